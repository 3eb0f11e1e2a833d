//! Why a checkpoint could not be imported.

use std::io;
use std::path::{Path, PathBuf};

use crate::codec::trellis::Code;
use crate::failure::{Exit, Failure};
use crate::repack::RepackError;
use crate::tensor::Float;

/// Why there is no imported folder.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ImportError {
    #[error("`{path}` is no EXL3 checkpoint: its `config.json` {found}")]
    NotExl3 { path: PathBuf, found: String },
    #[error("`{path}` is not a JSON object: {problem}")]
    NotJson { path: PathBuf, problem: String },
    #[error("`{file}`: `{tensor}` is {found}, but {needed} is needed")]
    Tensor { file: PathBuf, tensor: String, found: String, needed: String },
    #[error("`{module}` is packed in part: there is no `{tensor}`")]
    Missing { module: String, tensor: String },
    #[error("`{module}` is marked as both `mcg` and `mul1`")]
    Markers { module: String },
    #[error(
        "`{module}` has {words} words a tile, which is no rate of `{code}`: 16 · K with K from 1 to 8, or with \
         `mul1` 1.5, 2.5 or 3.5"
    )]
    Rate { module: String, words: u64, code: Code },
    #[error("`{module}` is stored twice, the second time with `{tensor}`")]
    Twice { module: String, tensor: String },
    #[error("row {row} of `{module}` decodes to NaN or infinity, or to more than {float} holds")]
    NonFinite { module: String, row: u64, float: Float },
    /// Of the new folder: the disk, the files, an end before time.
    #[error(transparent)]
    Folder(#[from] RepackError),
}

impl ImportError {
    /// For `map_err`.
    pub(super) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let failed = RepackError::io(what, path);
        move |source| failed(source).into()
    }
}

impl Failure for ImportError {
    fn exit(&self) -> Exit {
        match self {
            ImportError::Folder(error) => error.exit(),
            _ => Exit::Input,
        }
    }

    fn help(&self) -> Option<String> {
        let text = match self {
            ImportError::NotExl3 { .. } => {
                "a checkpoint that is not packed is read as it is; of one that another tool packed, use the original"
            }
            ImportError::NonFinite { float: Float::F32, .. } => {
                "its scales are damaged: download the file again"
            }
            ImportError::NonFinite { .. } => {
                "import with `--to f32`; if that says the same, its scales are damaged: download the file again"
            }
            ImportError::Folder(error) => return error.help(),
            _ => "the files do not belong together, or are damaged: download the checkpoint again",
        };
        Some(text.to_owned())
    }
}
