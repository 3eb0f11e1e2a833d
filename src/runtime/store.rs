//! Where the tensors of a model come from.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use super::RuntimeError;
use crate::backend::Stored;
use crate::checkpoint::{Checkpoint, TensorEntry};

/// Tensors by name: those of files, or of an artifact that is only planned.
pub trait Store: fmt::Debug + Send + Sync {
    /// All of them.
    fn tensors(&self) -> &[TensorEntry];

    /// One by its name.
    fn get(&self, name: &str) -> Option<&TensorEntry>;

    /// The file of a tensor, for messages.
    fn file(&self, entry: &TensorEntry) -> PathBuf;

    /// Some of a tensor's rows, of which there are `of`, each as long as the others.
    ///
    /// # Errors
    /// [`RuntimeError::Unmade`] from a store that has to make them.
    fn rows(&self, entry: &TensorEntry, rows: Range<u64>, of: u64) -> Result<Stored, RuntimeError>;

    /// Nobody will ask for this tensor soon.
    fn release(&self, entry: &TensorEntry);
}

/// Tensors of mapped files.
#[derive(Debug)]
pub struct Files(pub Arc<Checkpoint>);

impl Store for Files {
    fn tensors(&self) -> &[TensorEntry] {
        self.0.tensors()
    }

    fn get(&self, name: &str) -> Option<&TensorEntry> {
        self.0.get(name)
    }

    fn file(&self, entry: &TensorEntry) -> PathBuf {
        self.0.files()[entry.file].path.clone()
    }

    fn rows(&self, entry: &TensorEntry, rows: Range<u64>, of: u64) -> Result<Stored, RuntimeError> {
        let row = entry.bytes() / of;
        let range = entry.range.start + rows.start * row..entry.range.start + rows.end * row;
        Ok(Stored::Mapped { checkpoint: self.0.clone(), file: entry.file, range })
    }

    fn release(&self, entry: &TensorEntry) {
        self.0.release(entry.file, entry.range.clone());
    }
}
