//! A folder of unfinished work: locked, tied to one task, and believed only as far as its digests hold.
//!
//! ```text
//! .NAME.work/   lock        held by the process that works here
//!               key.json    the task: canonical JSON of everything that decides the result
//!               …           files of the task, each written beside and renamed, or appended and counted elsewhere
//! ```

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use serde::{Serialize, de::DeserializeOwned};

use super::EvalError;
use crate::digest::{Digest, Hasher, canonical_json};
use crate::failure::{Exit, Failure};
use crate::process::lock;

/// Record of the batches that are done, where they are counted in the folder itself.
pub const DONE: &str = "done.json";
/// Name under which a residual stream is kept on its way through the layers.
pub const RESIDUAL: &str = "residual";

/// Values that are read or written at a time.
const PART: usize = 1 << 18;

/// A locked folder.
#[derive(Debug)]
pub struct Work {
    dir: PathBuf,
    // Held for its lock.
    _lock: File,
    /// Whether the folder held work of this task already.
    pub resumed: bool,
}

impl Work {
    /// Takes the folder `.NAME.work` beside `target` for the task `key`.
    ///
    /// # Errors
    /// [`EvalError::InUse`]; [`EvalError::OtherWork`] if it holds another task's work and `discard` is not set.
    pub fn take<K: Serialize>(target: &Path, key: &K, discard: bool) -> Result<Self, EvalError> {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let dir = target.with_file_name(format!(".{name}.work"));
        let lock_path = dir.join("lock");
        let lock = lock(&lock_path).map_err(|(what, error)| EvalError::io(what, &lock_path)(error))?;
        let lock = lock.ok_or_else(|| EvalError::InUse { path: dir.clone() })?;
        let key = canonical_json(key);
        let found = std::fs::read(dir.join("key.json")).ok();
        let resumed = found.as_ref() == Some(&key);
        let work = Self { dir, _lock: lock, resumed };
        match found {
            Some(_) if resumed => return Ok(work),
            Some(_) if !discard => return Err(EvalError::OtherWork { path: work.dir }),
            _ => work.clear()?,
        }
        work.write("key.json", &key)?;
        Ok(work)
    }

    /// Removes everything but the lock.
    fn clear(&self) -> Result<(), EvalError> {
        let entries = std::fs::read_dir(&self.dir).map_err(EvalError::io("list", &self.dir))?;
        for entry in entries {
            let path = entry.map_err(EvalError::io("list", &self.dir))?.path();
            if path.is_dir() {
                std::fs::remove_dir_all(&path).map_err(EvalError::io("remove", &path))?;
            } else if !path.ends_with("lock") {
                std::fs::remove_file(&path).map_err(EvalError::io("remove", &path))?;
            }
        }
        Ok(())
    }

    /// The path of a file of the task.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Writes a file whole, or leaves it as it was.
    ///
    /// # Errors
    /// [`EvalError::Io`].
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), EvalError> {
        self.write_with(name, &mut |file| file.write_all(bytes))
    }

    fn write_with(
        &self,
        name: &str,
        content: &mut dyn FnMut(&mut File) -> io::Result<()>,
    ) -> Result<(), EvalError> {
        let (fresh, path) = (self.path(&format!("{name}.new")), self.path(name));
        let mut write = || {
            let mut file = File::create(&fresh)?;
            content(&mut file)?;
            file.sync_data()?;
            std::fs::rename(&fresh, &path)
        };
        write().map_err(EvalError::io("write", &path))
    }

    /// Keeps `values` with a note about them.
    ///
    /// # Errors
    /// [`EvalError::Io`].
    pub fn keep<N: Serialize>(&self, name: &str, note: &N, values: &[f32]) -> Result<(), EvalError> {
        let mut hasher = Hasher::default();
        self.write_with(&format!("{name}.f32"), &mut |file| {
            hasher = Hasher::default();
            for part in values.chunks(PART) {
                let bytes: Vec<u8> = part.iter().flat_map(|value| value.to_le_bytes()).collect();
                hasher.update(&bytes);
                file.write_all(&bytes)?;
            }
            Ok(())
        })?;
        self.write(&format!("{name}.json"), &canonical_json(&(note, hasher.finish())))
    }

    /// What [`Work::keep`] kept, if it is there and whole.
    pub fn kept<N: DeserializeOwned>(&self, name: &str) -> Option<(N, Vec<f32>)> {
        let (note, digest): (N, Digest) = self.read(&format!("{name}.json"))?;
        let mut file = File::open(self.path(&format!("{name}.f32"))).ok()?;
        let mut values = Vec::with_capacity(file.metadata().ok()?.len() as usize / 4);
        let (mut hasher, mut bytes) = (Hasher::default(), Vec::new());
        loop {
            bytes.clear();
            io::Read::by_ref(&mut file).take(4 * PART as u64).read_to_end(&mut bytes).ok()?;
            if bytes.is_empty() {
                break;
            }
            hasher.update(&bytes);
            values.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)));
        }
        (hasher.finish() == digest).then_some((note, values))
    }

    /// A small record, if it is there and whole.
    pub fn read<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        serde_json::from_slice(&std::fs::read(self.path(name)).ok()?).ok()
    }

    /// Forgets a file.
    pub fn forget(&self, name: &str) {
        // One that stays costs disk and is overwritten by the next.
        let _ = std::fs::remove_file(self.path(name));
    }

    /// Whether a later process can go on from here.
    pub fn is_worth_resuming(&self) -> bool {
        self.path(DONE).exists() || self.path(&format!("{RESIDUAL}.json")).exists()
    }

    /// Ends work that `error` broke off. It stays if a later process can go on from it, but not if this process
    /// began it and it is refused: the same would be refused again. Gives back the error to report.
    pub fn failed(self, error: Box<dyn Failure>) -> Box<dyn Failure> {
        let refused = matches!(error.exit(), Exit::Request | Exit::Input);
        if self.is_worth_resuming() && (self.resumed || !refused) {
            return error;
        }
        match self.remove() {
            Ok(()) => error,
            Err(other) => other.into(),
        }
    }

    /// Removes the folder.
    ///
    /// # Errors
    /// [`EvalError::Io`].
    pub fn remove(self) -> Result<(), EvalError> {
        std::fs::remove_dir_all(&self.dir).map_err(EvalError::io("remove", &self.dir))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Bytes;

    #[test]
    fn a_refused_task_leaves_what_an_earlier_process_did_and_nothing_of_its_own() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("dump");
        let dir = place.path().join(".dump.work");
        let refused = || EvalError::Budget { budget: Bytes(1), needed: Bytes(2) }.into();
        let interrupted = || EvalError::Interrupted("1 of 2 batches".to_owned()).into();
        let take = || Work::take(&target, &"task", false).unwrap();

        take().failed(interrupted());
        assert!(!dir.exists(), "there is nothing to go on from");
        let work = take();
        work.write(DONE, b"{}").unwrap();
        work.failed(refused());
        assert!(!dir.exists(), "the same would be refused again");
        for name in [DONE, "residual.json"] {
            let work = take();
            work.write(name, b"{}").unwrap();
            work.failed(interrupted());
            let work = take();
            assert!(work.resumed);
            let error = work.failed(refused());
            assert_eq!(error.exit(), Exit::Request);
            assert!(dir.join(name).exists(), "another budget may go on from there");
            take().remove().unwrap();
        }
    }
}
