//! Places for what took long to find.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;

use crate::digest::{Digest, canonical_json};
use crate::plan::Plan;

/// A place for what took long to find, so that a build that was killed, or that follows a measurement, does not look for
/// it again.
pub trait Keep: Sync {
    /// What was put under this name.
    fn get(&self, name: &str) -> Option<Vec<u8>>;

    /// Puts it there; that it could not be is no error.
    fn put(&self, name: &str, bytes: &[u8]);

    /// Where a file of this name may be written, for what is too large to be handed over; none if this is no folder.
    fn place(&self, name: &str) -> Option<PathBuf>;

    /// Such a file, if there is one.
    fn find(&self, name: &str) -> Option<PathBuf> {
        self.place(name).filter(|path| path.exists())
    }
}

/// Keeps nothing.
impl Keep for () {
    fn get(&self, _name: &str) -> Option<Vec<u8>> {
        None
    }

    fn put(&self, _name: &str, _bytes: &[u8]) {}

    fn place(&self, _name: &str) -> Option<PathBuf> {
        None
    }
}

/// A folder, a file a name; made when something is put there.
#[derive(Debug, Clone)]
pub struct KeepFolder(pub PathBuf);

impl Keep for KeepFolder {
    fn get(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.0.join(name)).ok()
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        // Beside, then over: a kill leaves it whole or not there.
        let beside = self.0.join("new");
        let _ = std::fs::create_dir_all(&self.0)
            .and_then(|()| std::fs::write(&beside, bytes))
            .and_then(|()| std::fs::rename(&beside, self.0.join(name)));
    }

    fn place(&self, name: &str) -> Option<PathBuf> {
        std::fs::create_dir_all(&self.0).ok()?;
        Some(self.0.join(name))
    }
}

/// What belongs to one plan and to source files as they are now, among other plans' in the same place.
pub struct OfPlan<'a> {
    keep: &'a dyn Keep,
    key: Digest,
}

impl<'a> OfPlan<'a> {
    /// The plan's own part of `keep`; `more` is what else decides.
    pub fn new(keep: &'a dyn Keep, plan: &Plan, more: impl Serialize) -> Self {
        Self { keep, key: Digest::of(&canonical_json(&(plan.digest, plan.checkpoint.stats(), more))) }
    }

    fn name(&self, name: &str) -> String {
        format!("{}-{name}", self.key.short())
    }
}

impl Keep for OfPlan<'_> {
    fn get(&self, name: &str) -> Option<Vec<u8>> {
        self.keep.get(&self.name(name))
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        self.keep.put(&self.name(name), bytes);
    }

    fn place(&self, name: &str) -> Option<PathBuf> {
        self.keep.place(&self.name(name))
    }

    fn find(&self, name: &str) -> Option<PathBuf> {
        self.keep.find(&self.name(name))
    }
}

/// A place that remembers whether anything was found in it.
pub struct Asked<'a> {
    keep: &'a dyn Keep,
    found: AtomicBool,
}

impl<'a> Asked<'a> {
    /// `keep`, of which nothing was asked yet.
    pub fn new(keep: &'a dyn Keep) -> Self {
        Self { keep, found: AtomicBool::new(false) }
    }

    /// Whether anything that was asked for was there.
    pub fn found(&self) -> bool {
        self.found.load(Ordering::Relaxed)
    }

    fn note<T>(&self, answer: Option<T>) -> Option<T> {
        self.found.fetch_or(answer.is_some(), Ordering::Relaxed);
        answer
    }
}

impl Keep for Asked<'_> {
    fn get(&self, name: &str) -> Option<Vec<u8>> {
        self.note(self.keep.get(name))
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        self.keep.put(name, bytes);
    }

    fn place(&self, name: &str) -> Option<PathBuf> {
        self.keep.place(name)
    }

    fn find(&self, name: &str) -> Option<PathBuf> {
        self.note(self.keep.find(name))
    }
}

/// Two places: what the first does not have is asked of the second; only the first is added to.
pub struct Both<'a>(pub &'a dyn Keep, pub &'a dyn Keep);

impl Keep for Both<'_> {
    fn get(&self, name: &str) -> Option<Vec<u8>> {
        self.0.get(name).or_else(|| self.1.get(name))
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        self.0.put(name, bytes);
    }

    fn place(&self, name: &str) -> Option<PathBuf> {
        self.0.place(name)
    }

    fn find(&self, name: &str) -> Option<PathBuf> {
        self.0.find(name).or_else(|| self.1.find(name))
    }
}
