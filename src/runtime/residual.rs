//! A residual stream of many rows, in memory or in a file.

use std::fs::OpenOptions;
use std::io;
use std::ops::{Deref, DerefMut};
use std::path::Path;

use memmap2::MmapMut;

/// Values [rows, H]. Those in a file are not held: the system writes its pages out when memory runs short.
#[derive(Debug)]
pub enum Residual {
    /// In memory.
    Memory(Vec<f32>),
    /// In a file that is mapped.
    File(MmapMut),
}

impl Residual {
    /// Zeros in a new file at `path`, which goes away with the last handle: it is unlinked at once.
    ///
    /// # Errors
    /// That the file cannot be made, or mapped.
    pub fn in_file(path: &Path, values: usize) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
        file.set_len(4 * values as u64)?;
        // SAFETY: the file was made just now, and nobody finds it after it is unlinked.
        let map = unsafe { MmapMut::map_mut(&file)? };
        std::fs::remove_file(path)?;
        Ok(Self::File(map))
    }

    /// Zeros in memory.
    pub fn in_memory(values: usize) -> Self {
        Self::Memory(vec![0.0; values])
    }
}

impl From<Vec<f32>> for Residual {
    fn from(values: Vec<f32>) -> Self {
        Self::Memory(values)
    }
}

impl Deref for Residual {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Residual::Memory(values) => values,
            // SAFETY: a map starts on a page, holds whole values, and every pattern of bits is an f32.
            Residual::File(map) => unsafe {
                std::slice::from_raw_parts(map.as_ptr().cast(), map.len() / size_of::<f32>())
            },
        }
    }
}

impl DerefMut for Residual {
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            Residual::Memory(values) => values,
            // SAFETY: as above; the map is borrowed exclusively.
            Residual::File(map) => unsafe {
                std::slice::from_raw_parts_mut(map.as_mut_ptr().cast(), map.len() / size_of::<f32>())
            },
        }
    }
}
