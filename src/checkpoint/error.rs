//! What can be wrong with a checkpoint's files.

use std::io;
use std::path::PathBuf;

use crate::failure::{Exit, Failure, Problems};
use crate::tensor::{Dtype, Shape, TensorName};
use crate::units::Bytes;

/// How many problems one pass reports before it only counts them.
pub const REPORTED: usize = 20;

/// Why a checkpoint was refused. Nothing of it is read further, and nothing was written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum CheckpointError {
    #[error("`{path}` does not exist")]
    Missing { path: PathBuf },

    #[error("`{path}` could not be read: {source}")]
    Unreadable { path: PathBuf, source: io::Error },

    #[error("`{path}` is neither a folder nor a regular file")]
    NotAFile { path: PathBuf },

    #[error("`{path}` has {found} bytes, more than the {limit} that such a file may have")]
    TooLarge { path: PathBuf, found: u64, limit: u64 },

    #[error("`{dir}` holds no safetensors file")]
    NoWeights { dir: PathBuf },

    #[error("`{dir}` holds several sets of weights ({}) and no index that says which to read", quoted(.found))]
    Ambiguous { dir: PathBuf, found: Vec<String> },

    #[error("`{path}` would be loaded by tools that read every `model*.safetensors`, but {}", not_of(.index))]
    Stray { path: PathBuf, index: bool },

    #[error("`{path}` is a symbolic link, and links are not followed in a source folder")]
    Link { path: PathBuf },

    #[error("`{path}` is a symbolic link to `{target}`, which is outside `{root}`")]
    LinkEscapes { path: PathBuf, target: PathBuf, root: PathBuf },

    #[error("`{index}` is not an index: found {found}, needed {needed}")]
    Index { index: PathBuf, found: String, needed: &'static str },

    #[error("`{index}` lists tensor `{tensor}` twice")]
    IndexDuplicate { index: PathBuf, tensor: TensorName },

    #[error(
        "`{index}`: tensor `{tensor}` is said to be in `{found}`, which is not a plain `*.safetensors` file name"
    )]
    IndexPath { index: PathBuf, tensor: TensorName, found: String },

    #[error("`{path}` is missing: {needed_by}")]
    MissingShard { path: PathBuf, needed_by: String },

    #[error("`{file}`: tensor `{tensor}` is not there, but `{index}` says it is")]
    IndexTensorMissing { file: PathBuf, tensor: TensorName, index: PathBuf },

    #[error("`{file}`: tensor `{tensor}` is not listed for this file in `{index}`")]
    IndexTensorUnlisted { file: PathBuf, tensor: TensorName, index: PathBuf },

    #[error("`{file}` is {found} bytes long; a safetensors file has at least 8 bytes and a header")]
    TooShort { file: PathBuf, found: u64 },

    #[error("`{file}`: the header is said to be {found} bytes long, but only {room} bytes follow")]
    HeaderLength { file: PathBuf, found: u64, room: u64 },

    #[error("`{file}`: the header is said to be {found} bytes long, over the format's limit of {limit}")]
    HeaderTooLarge { file: PathBuf, found: u64, limit: u64 },

    #[error("`{file}`: the header is not UTF-8 from its byte {at} on")]
    HeaderUtf8 { file: PathBuf, at: usize },

    #[error("`{file}`: the header is not JSON: {source}")]
    HeaderJson { file: PathBuf, source: serde_json::Error },

    #[error("`{file}`: the header is {found}, but must be a JSON object that starts at its first byte")]
    HeaderNotObject { file: PathBuf, found: &'static str },

    #[error("`{file}`: `__metadata__` must map strings to strings, found {found}")]
    Metadata { file: PathBuf, found: String },

    #[error("`{file}` holds no tensor")]
    NoTensors { file: PathBuf },

    #[error("`{file}`: tensor `{tensor}` occurs twice in the header")]
    DuplicateTensor { file: PathBuf, tensor: TensorName },

    #[error("tensor `{tensor}` is both in `{first}` and in `{second}`")]
    DuplicateAcross { tensor: TensorName, first: PathBuf, second: PathBuf },

    #[error("`{file}`: tensor `{tensor}`: found {found}, needed {needed}")]
    Entry { file: PathBuf, tensor: TensorName, found: String, needed: &'static str },

    #[error("`{file}`: tensor `{tensor}` has dtype `{found}`, which is not one of {}", quoted(&Dtype::ALL))]
    UnknownDtype { file: PathBuf, tensor: TensorName, found: String },

    #[error("`{file}`: tensor `{tensor}` of shape {shape} has no elements")]
    ZeroSize { file: PathBuf, tensor: TensorName, shape: Shape },

    #[error("`{file}`: tensor `{tensor}` of {dtype} {shape} needs more bytes than 64 bits can count")]
    ShapeOverflow { file: PathBuf, tensor: TensorName, dtype: Dtype, shape: Shape },

    #[error("`{file}`: tensor `{tensor}` begins at {begin}, after its end {end}")]
    Backwards { file: PathBuf, tensor: TensorName, begin: u64, end: u64 },

    #[error("`{file}`: tensor `{tensor}` holds {found} bytes, but {dtype} {shape} needs {needed}")]
    TensorSize { file: PathBuf, tensor: TensorName, dtype: Dtype, shape: Shape, found: u64, needed: u64 },

    #[error("`{file}`: tensor `{tensor}` ends at {end}, but the file has only {found} bytes of data")]
    OutOfRange { file: PathBuf, tensor: TensorName, end: u64, found: u64 },

    #[error("`{file}`: tensor `{tensor}` begins at {begin}, inside `{other}`, which ends at {other_end}")]
    Overlap { file: PathBuf, tensor: TensorName, begin: u64, other: TensorName, other_end: u64 },

    #[error("`{file}`: {} bytes before tensor `{tensor}`, from {from} to {to}, belong to no tensor", .to - .from)]
    Hole { file: PathBuf, tensor: TensorName, from: u64, to: u64 },

    #[error("`{file}`: {found} bytes after the last tensor `{tensor}` belong to no tensor")]
    Trailing { file: PathBuf, tensor: TensorName, found: u64 },

    #[error(
        "`{file}` is truncated: its header describes {needed} bytes, the file has {found}, so {} ({}) are missing",
        .needed - .found, Bytes(.needed - .found)
    )]
    Truncated { file: PathBuf, found: u64, needed: u64 },

    #[error("`{path}` changed while it was being read: {what}")]
    Changed { path: PathBuf, what: &'static str },

    #[error("and {count} more")]
    More { count: usize },
}

/// "`a`, `b` and `c`".
fn quoted<T: std::fmt::Display>(names: &[T]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    match names.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => names.concat(),
    }
}

fn not_of(index: &bool) -> &'static str {
    if *index { "the index does not list it" } else { "it is not one of the model's files" }
}

impl Failure for CheckpointError {
    fn exit(&self) -> Exit {
        match self {
            // A permission or a failing disk is not the checkpoint's fault.
            CheckpointError::Unreadable { .. } => Exit::Machine,
            _ => Exit::Input,
        }
    }

    fn help(&self) -> Option<String> {
        use CheckpointError::*;
        let again = "fetch this file again: the download is unfinished or damaged";
        let exporter = "the program that wrote this file broke the safetensors format; \
                        write the checkpoint again with `safetensors`, or fetch it again";
        Some(match self {
            Missing { .. } => "check the spelling; a source is a folder of safetensors files".into(),
            Unreadable { .. } => "check the permissions and the disk".into(),
            NotAFile { .. } => "a source is a folder of regular files, or one safetensors file".into(),
            TooLarge { .. } => "check that it is the file that its name says".into(),
            NoWeights { .. } => {
                "a source needs `model.safetensors`, or shards with `model.safetensors.index.json`; \
                 convert `.bin`, `.pth` or `.gguf` weights first"
                    .into()
            }
            Ambiguous { .. } => "leave one set in the folder, or add `model.safetensors.index.json`".into(),
            Stray { .. } => "delete or rename this file, or list its tensors in the index".into(),
            Link { path } => format!(
                "copy the folder with links followed: `cp -rL {} COPY`",
                path.parent().unwrap_or(path).display()
            ),
            LinkEscapes { .. } => "replace the link by the file it points to".into(),
            Index { .. } | IndexDuplicate { .. } | IndexTensorMissing { .. } | IndexTensorUnlisted { .. } => {
                "the index and the shards are not of one checkpoint; fetch both again at one revision, \
                 or write the index anew"
                    .into()
            }
            IndexPath { .. } => {
                "an index names files of its own folder only; move the file there and mend the index".into()
            }
            MissingShard { .. } => "fetch the missing file; the download is unfinished".into(),
            TooShort { .. } | HeaderLength { .. } | Truncated { .. } => again.into(),
            HeaderTooLarge { .. } | HeaderUtf8 { .. } | HeaderJson { .. } | HeaderNotObject { .. } => {
                "this is not a safetensors file, or it is damaged; fetch it again".into()
            }
            UnknownDtype { .. } => "convert this tensor to bf16, f16 or f32 first".into(),
            DuplicateAcross { .. } => "remove one of the two; they may be shards of different exports".into(),
            NoTensors { .. } => "remove this file, or write it again with its tensors".into(),
            ZeroSize { .. } => "remove this tensor from the checkpoint; it carries nothing".into(),
            Changed { .. } => "let the download or copy finish, then run again with `--resume`".into(),
            Metadata { .. }
            | DuplicateTensor { .. }
            | Entry { .. }
            | ShapeOverflow { .. }
            | Backwards { .. }
            | TensorSize { .. }
            | OutOfRange { .. }
            | Overlap { .. }
            | Hole { .. }
            | Trailing { .. } => exporter.into(),
            More { .. } => return None,
        })
    }
}

/// `Ok(value)` without problems, else the first [`REPORTED`] and how many more there were.
pub(super) fn report<T>(
    mut problems: Vec<CheckpointError>,
    value: T,
) -> Result<T, Problems<CheckpointError>> {
    if problems.len() > REPORTED {
        let count = problems.len() - REPORTED;
        problems.truncate(REPORTED);
        problems.push(CheckpointError::More { count });
    }
    Problems::none_or(problems, value)
}
