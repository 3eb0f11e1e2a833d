//! The folder that a repacked or imported one grows in, beside its place.
//!
//! ```text
//! artifacts/.demo.repacking/   lock   held while it is written
//!                              out/   becomes artifacts/demo in one rename
//! ```
//!
//! Whatever ends the work takes it away; what a kill leaves is thrown away by the next command of the same target.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::RepackError;
use crate::build::{Unmade, check_outside, first_unmade, hidden, remove_dir, sync_tree};
use crate::process::lock;

/// A locked folder beside the target.
#[derive(Debug)]
pub(crate) struct Growing {
    root: PathBuf,
    target: PathBuf,
    work: &'static str,
    unmade: Unmade,
    // Held for its lock.
    _lock: File,
}

/// Refuses a target that is there, or whose place is somebody's, without touching anything.
///
/// `work` is what the hidden folder's name ends with.
///
/// # Errors
/// [`RepackError::Exists`], [`RepackError::NoName`], [`RepackError::Inside`], [`RepackError::NotOurs`].
pub(crate) fn check(target: &Path, work: &str) -> Result<(), RepackError> {
    if target.symlink_metadata().is_ok() {
        return Err(RepackError::Exists { path: target.to_owned() });
    }
    check_outside(target, None)?;
    let root = hidden(target, work)?;
    let Ok(meta) = root.symlink_metadata() else { return Ok(()) };
    let foreign = || RepackError::NotOurs { path: root.clone() };
    if !meta.is_dir() {
        return Err(foreign());
    }
    for entry in std::fs::read_dir(&root).map_err(RepackError::io("list", &root))? {
        let name = entry.map_err(RepackError::io("list", &root))?.file_name();
        if name != "lock" && name != "out" {
            return Err(foreign());
        }
    }
    Ok(())
}

impl Growing {
    /// Takes the folder beside `target`, and empties it.
    ///
    /// # Errors
    /// Those of [`check`]; [`RepackError::InUse`].
    pub fn take(target: &Path, work: &'static str) -> Result<Self, RepackError> {
        check(target, work)?;
        let root = hidden(target, work)?;
        let unmade = first_unmade(target);
        let path = root.join("lock");
        let held = lock(&path).map_err(|(what, error)| RepackError::io(what, &path)(error))?;
        let held = held.ok_or_else(|| RepackError::InUse { path: target.to_owned() })?;
        let growing = Self { root, target: target.to_owned(), work, unmade, _lock: held };
        remove_dir(&growing.out())?;
        std::fs::create_dir(growing.out()).map_err(RepackError::io("create", &growing.out()))?;
        Ok(growing)
    }

    /// Where files are written.
    pub fn out(&self) -> PathBuf {
        self.root.join("out")
    }

    /// Makes all of it durable and visible in one step.
    ///
    /// # Errors
    /// [`RepackError::Exists`], [`RepackError::Io`]: nothing is left then.
    pub fn publish(self) -> Result<(), RepackError> {
        let out = self.out();
        sync_tree(&out)?;
        check(&self.target, self.work)?;
        std::fs::rename(&out, &self.target).map_err(RepackError::io("rename", &out))?;
        let above = self.target.parent().filter(|path| !path.as_os_str().is_empty());
        let above = above.unwrap_or(Path::new("."));
        File::open(above).and_then(|dir| dir.sync_all()).map_err(RepackError::io("sync", above))
    }
}

impl Drop for Growing {
    fn drop(&mut self) {
        // What cannot be removed is thrown away by the next command of this target.
        let _ = remove_dir(&self.root);
        self.unmade.remove_if_empty();
    }
}
