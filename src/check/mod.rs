//! Commands that read artifacts and checkpoints and judge or show them.

pub mod diff;
pub mod inspect;
pub mod verify;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::digest::{Digest, Hasher};

/// The digest of a file, read in pieces.
fn file_digest(path: &Path) -> io::Result<Digest> {
    // Asked before opening, because opening a pipe would wait for its writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut file = File::open(path)?;
    let mut hasher = Hasher::default();
    let mut buffer = vec![0; 1 << 18];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finish()),
            n => hasher.update(&buffer[..n]),
        }
    }
}
