//! Files of a calibration under way: each a header with the payload's digest, then the payload.

use std::fs::File;
use std::io::{self, Read as _, Write};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use serde::{Serialize, de::DeserializeOwned};

use crate::digest::{Digest, Hasher};

/// Bytes read or written at a time.
const PART: usize = 1 << 18;

/// The length of a header is in the file's first bytes.
const LENGTH: usize = 8;

/// Writes `note` and the parts of a payload beside `path`, then renames: the file is there whole or not at all.
///
/// # Errors
/// Those of the file system.
pub fn write<N: Serialize>(path: &Path, note: &N, parts: &[&[u8]]) -> io::Result<()> {
    let mut hasher = Hasher::default();
    parts.iter().for_each(|part| hasher.update(part));
    let header = serde_json::to_vec(&(note, hasher.finish())).map_err(io::Error::other)?;
    let beside = path.with_extension("new");
    let mut file = File::create(&beside)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    parts.iter().try_for_each(|part| file.write_all(part))?;
    file.sync_data()?;
    std::fs::rename(&beside, path)
}

/// [`write`] with values as a payload.
///
/// # Errors
/// Those of the file system.
pub fn write_values<N: Serialize>(path: &Path, note: &N, values: &[f32]) -> io::Result<()> {
    if cfg!(target_endian = "little") {
        // SAFETY: the bytes of f32 values, which have no padding and live as long.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
        return write(path, note, &[bytes]);
    }
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    write(path, note, &[&bytes])
}

/// Reads values that [`write_values`] wrote.
///
/// # Errors
/// Those of the file system; a file that is too short.
pub fn read_values(file: &File, start: u64, values: &mut [f32]) -> io::Result<()> {
    let (mut at, mut bytes) = (start, vec![0; PART]);
    for part in values.chunks_mut(PART / 4) {
        let bytes = &mut bytes[..4 * part.len()];
        file.read_exact_at(bytes, at)?;
        let read = bytes.as_chunks::<4>().0;
        part.iter_mut().zip(read).for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
        at += bytes.len() as u64;
    }
    Ok(())
}

/// Opens what [`write`] wrote, if it is there and whole: its note, the file, and where the payload begins.
pub fn open<N: DeserializeOwned>(path: &Path) -> Option<(N, File, u64)> {
    let mut file = File::open(path).ok()?;
    let mut length = [0; LENGTH];
    file.read_exact(&mut length).ok()?;
    let length = u64::from_le_bytes(length);
    if length > file.metadata().ok()?.len() {
        return None;
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).ok()?;
    let (note, digest): (N, Digest) = serde_json::from_slice(&header).ok()?;
    (Digest::of_reader(&mut file).ok()? == digest).then_some((note, file, LENGTH as u64 + length))
}
