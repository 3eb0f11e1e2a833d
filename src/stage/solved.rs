//! Rows that were encoded before the pipeline runs: a search that needs more than rows has been there.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use crate::codec::Plane;
use crate::quant::{Repairs, RowLoss};

/// All planes of a module, one after the other, and the loss of each row.
#[derive(Debug)]
pub struct Solved {
    place: Place,
    losses: Vec<RowLoss>,
    repairs: Repairs,
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
    /// Planes of `losses.len()` rows.
    pub fn new(place: Place, losses: Vec<RowLoss>, repairs: Repairs) -> Self {
        Self { place, losses, repairs }
    }

    /// What the search changed beyond rounding, in all rows.
    pub fn repairs(&self) -> Repairs {
        self.repairs
    }

    /// Fills `planes`, one buffer each and laid out so, with what belongs to `rows`, and returns the losses of these.
    ///
    /// # Errors
    /// That the file cannot be read any more.
    ///
    /// # Panics
    /// If there are no such rows.
    pub fn read(
        &self,
        rows: Range<u64>,
        layout: &[Plane],
        planes: &mut Vec<Vec<u8>>,
    ) -> io::Result<Vec<RowLoss>> {
        planes.resize_with(layout.len(), Vec::new);
        let mut start = 0;
        for (buffer, plane) in planes.iter_mut().zip(layout) {
            let here = plane.bytes_of(plane.begun(rows.clone()));
            buffer.resize(here, 0);
            let at = start + plane.bytes_of(plane.begun(0..rows.start));
            match &self.place {
                Place::Memory(all) => buffer.copy_from_slice(&all[at..at + here]),
                Place::File(file, first) => file.read_exact_at(buffer, first + at as u64)?,
            }
            start += plane.bytes_of(plane.begun(0..self.losses.len() as u64));
        }
        Ok(self.losses[rows.start as usize..rows.end as usize].to_vec())
    }
}
