//! Rows that were encoded before the pipeline runs: a search that needs more than rows has been there.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use crate::quant::RowLoss;

/// All planes of a module, one after the other, and the loss of each row.
#[derive(Debug)]
pub struct Solved {
    place: Place,
    /// Bytes of a row in each plane.
    row_bytes: Vec<usize>,
    losses: Vec<RowLoss>,
}

/// Where the planes are.
#[derive(Debug)]
pub enum Place {
    /// In memory.
    Memory(Vec<u8>),
    /// In a file, from this byte on.
    File(File, u64),
}

impl Solved {
    /// Planes of `losses.len()` rows each, with so many bytes a row.
    pub fn new(place: Place, row_bytes: Vec<usize>, losses: Vec<RowLoss>) -> Self {
        Self { place, row_bytes, losses }
    }

    /// Fills `planes`, one buffer each, with rows `rows`, and returns the losses of these.
    ///
    /// # Errors
    /// That the file cannot be read any more.
    ///
    /// # Panics
    /// If there are no such rows.
    pub fn read(&self, rows: Range<u64>, planes: &mut Vec<Vec<u8>>) -> io::Result<Vec<RowLoss>> {
        let rows = rows.start as usize..rows.end as usize;
        planes.resize_with(self.row_bytes.len(), Vec::new);
        let mut start = 0;
        for (buffer, bytes) in planes.iter_mut().zip(&self.row_bytes) {
            buffer.resize(rows.len() * bytes, 0);
            let at = start + rows.start * bytes;
            match &self.place {
                Place::Memory(all) => buffer.copy_from_slice(&all[at..at + rows.len() * bytes]),
                Place::File(file, first) => file.read_exact_at(buffer, first + at as u64)?,
            }
            start += self.losses.len() * bytes;
        }
        Ok(self.losses[rows].to_vec())
    }
}
