//! Why an artifact could not be repacked.

use std::io;
use std::path::{Path, PathBuf};

use crate::build::BuildError;
use crate::codec::CodecSpec;
use crate::failure::{Exit, Failure};
use crate::quant::QuantError;
use crate::units::Bytes;

/// Why there is no repacked folder.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum RepackError {
    #[error("`{path}` has nothing to repack: {}", nothing(*.all))]
    Nothing { path: PathBuf, all: bool },
    #[error("`{path}` exists already")]
    Exists { path: PathBuf },
    #[error("`{path}` does not name a folder")]
    NoName { path: PathBuf },
    #[error("`{path}` is inside `{outer}`, {what}")]
    Inside { path: PathBuf, outer: PathBuf, what: &'static str },
    #[error("`{path}` is being written by another process")]
    InUse { path: PathBuf },
    #[error("`{path}` is where the folder would grow, but it holds what `tqc` did not put there")]
    NotOurs { path: PathBuf },
    #[error("`{file}`: `{tensor}` is {found}, but {codec} needs {needed}")]
    Plane { file: PathBuf, tensor: String, found: String, codec: CodecSpec, needed: String },
    #[error("row {row} of `{module}` decodes to NaN or infinity")]
    NonFinite { module: String, row: u64 },
    #[error("row {row} of `{module}`: {problem}")]
    Encode { module: String, row: u64, problem: QuantError },
    #[error("`{path}` changed while it was copied")]
    CopyChanged { path: PathBuf },
    #[error("the new folder needs {needed} at `{path}`, but only {free} are free")]
    DiskSpace { path: PathBuf, needed: Bytes, free: Bytes },
    #[error("cannot {what} `{path}`: {source}")]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("interrupted; nothing was written")]
    Interrupted,
}

fn nothing(all: bool) -> &'static str {
    match all {
        true => "no module is packed in another codec",
        false => "stock mlx-lm loads every module as it is",
    }
}

impl RepackError {
    /// For `map_err`.
    pub(crate) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| RepackError::Io { what, path, source }
    }
}

impl From<BuildError> for RepackError {
    /// Of what staging a build and a repacked folder have in common.
    fn from(error: BuildError) -> Self {
        match error {
            BuildError::Io { what, path, source } => RepackError::Io { what, path, source },
            BuildError::NoName { path } => RepackError::NoName { path },
            BuildError::Inside { path, outer, what } => RepackError::Inside { path, outer, what },
            other => unreachable!("moving files does not end with `{other}`"),
        }
    }
}

impl Failure for RepackError {
    fn exit(&self) -> Exit {
        match self {
            RepackError::Nothing { .. }
            | RepackError::Exists { .. }
            | RepackError::NoName { .. }
            | RepackError::Inside { .. }
            | RepackError::InUse { .. }
            | RepackError::NotOurs { .. } => Exit::Request,
            RepackError::Plane { .. }
            | RepackError::NonFinite { .. }
            | RepackError::Encode { .. }
            | RepackError::CopyChanged { .. } => Exit::Input,
            RepackError::DiskSpace { .. } | RepackError::Io { .. } => Exit::Machine,
            RepackError::Interrupted => Exit::Interrupted,
        }
    }

    fn help(&self) -> Option<String> {
        let text = match self {
            RepackError::Nothing { all: false, .. } => {
                "use it as it is, or repack all packed modules with `--all`"
            }
            RepackError::Nothing { all: true, .. } => "use it as it is",
            RepackError::Exists { .. } => "name another folder, or remove this one",
            RepackError::NoName { .. } => "name the new folder with `-o`",
            RepackError::Inside { .. } => "name another folder with `-o`",
            RepackError::InUse { .. } => "wait for it to end, or write elsewhere with `-o`",
            RepackError::NotOurs { .. } => "move it away, or write elsewhere with `-o`",
            RepackError::Plane { .. } => {
                "config and weights do not belong together; build the artifact again"
            }
            RepackError::NonFinite { .. } => "the scales are out of range; build the artifact again",
            RepackError::Encode { .. } => "repack with `--to f32`, which holds every value",
            RepackError::CopyChanged { .. } | RepackError::Interrupted => "run the command again",
            RepackError::DiskSpace { .. } => "free some space, or write elsewhere with `-o`",
            RepackError::Io { .. } => {
                "check that the folder exists, may be written and has room, or write elsewhere with `-o`"
            }
        };
        Some(text.to_owned())
    }
}
