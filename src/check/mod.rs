//! Commands that read artifacts and checkpoints and judge or show them.

pub mod diff;
pub mod inspect;
pub mod verify;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::digest::{Digest, Hasher};

/// The digest of a file, read in pieces.
fn file_digest(path: &Path) -> io::Result<Digest> {
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

/// Every file below `dir`: path with `/`, to size.
fn files_below(dir: &Path) -> io::Result<BTreeMap<String, u64>> {
    fn walk(dir: &Path, prefix: &str, found: &mut BTreeMap<String, u64>) -> io::Result<()> {
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            let meta = std::fs::metadata(entry.path())?;
            if meta.is_dir() {
                walk(&entry.path(), &format!("{name}/"), found)?;
            } else {
                found.insert(name, meta.len());
            }
        }
        Ok(())
    }
    let mut found = BTreeMap::new();
    walk(dir, "", &mut found)?;
    Ok(found)
}
