//! What stops the task instrument.

use std::io;
use std::path::{Path, PathBuf};

use super::Frame;
use crate::failure::{Exit, Failure};
use crate::text::TextError;

/// Why a suite cannot be read or run.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TaskError {
    #[error("cannot read `{path}`: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("`{path}` is no gzip file: {source}")]
    Gzip { path: PathBuf, source: io::Error },
    #[error("`{path}`, line {line}: {fault}")]
    Line { path: PathBuf, line: usize, fault: Fault },
    #[error("`{path}`: {count} more lines are wrong")]
    More { path: PathBuf, count: usize },
    #[error("`{path}` holds no items")]
    NoItems { path: PathBuf },
    #[error("`{first}` and `{second}` are both called `{name}`")]
    SameName { name: String, first: PathBuf, second: PathBuf },
    #[error("suite `{suite}`, item `{item}`: choice {choice} gives no tokens after the prompt")]
    NoContinuation { suite: String, item: String, choice: usize },
    #[error("suite `{suite}`, item `{item}`: {tokens} tokens are more than the model's context of {context}")]
    LongItem { suite: String, item: String, tokens: usize, context: usize },
    #[error("suite `{suite}` has no {frame} frame: its items have no `{key}`")]
    NoFrame { suite: String, frame: Frame, key: &'static str },
    #[error("suite `{suite}` has a chat frame, but {source}")]
    NoTemplate { suite: String, source: Box<TextError> },
    #[error("the stored result of item `{item}` cannot be read: {problem}")]
    Stored { item: String, problem: serde_json::Error },
}

/// What is wrong with one line of a suite.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Fault {
    #[error("the line is not UTF-8")]
    NotUtf8,
    #[error("the line is blank")]
    Blank,
    #[error("the line is no JSON object")]
    NoObject,
    #[error("column {column}: {problem}")]
    Json { column: usize, problem: String },
    #[error(
        "the keys fit no kind of item: multiple choice has `prompt`, `choices`, `answer`; generative has \
         `raw_prompt`, `question` or both, and `answer`; cloze has `prompt`, `gold`"
    )]
    NoKind,
    #[error("this is a {found} item, but line {first} is a {needed} item")]
    OtherKind { found: &'static str, needed: &'static str, first: usize },
    #[error("`{key}` {state}, unlike on line {first}")]
    OtherFrames { key: &'static str, state: &'static str, first: usize },
    #[error("`{key}` belongs to no {kind} item")]
    StrayKey { key: &'static str, kind: &'static str },
    #[error("`{key}` is blank")]
    Empty { key: &'static str },
    #[error("an item needs at least 2 choices, got {found}")]
    FewChoices { found: usize },
    #[error("choices {first} and {second} are equal: `{text}`")]
    EqualChoices { first: usize, second: usize, text: String },
    #[error("`answer` must be the index of a choice, a whole number from 0 to {most}, got {found}")]
    AnswerIndex { found: String, most: usize },
    #[error("`answer` must be a string that holds a number, got {found}")]
    AnswerNumber { found: String },
    #[error("id `{id}` is that of line {first} already")]
    SameId { id: String, first: usize },
    #[error("the item equals that of line {first}, and neither has an `id`")]
    SameItem { first: usize },
    #[error("`gold` needs a prompt that does not end in white space")]
    GoldAfterBlank,
    #[error("document {document} goes on here, but others came between")]
    Scattered { document: u64 },
    #[error("`idx` is {found}, but {needed} comes next for document {document}")]
    ChoiceIndex { document: u64, found: usize, needed: usize },
    #[error("`label` is not that of the document's first line")]
    OtherLabel,
}

impl TaskError {
    /// For `map_err`.
    pub(super) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| TaskError::Io { path, source }
    }
}

impl Failure for TaskError {
    fn exit(&self) -> Exit {
        match self {
            TaskError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => Exit::Request,
            TaskError::Io { .. } => Exit::Machine,
            TaskError::SameName { .. }
            | TaskError::NoContinuation { .. }
            | TaskError::LongItem { .. }
            | TaskError::NoFrame { .. }
            | TaskError::NoTemplate { .. } => Exit::Request,
            _ => Exit::Input,
        }
    }

    fn help(&self) -> Option<String> {
        let text = match self {
            TaskError::Io { .. } => "check the path and its permissions",
            TaskError::Gzip { .. } => "download the file again; a name that ends in `.gz` must be compressed",
            TaskError::Line { fault, .. } => return fault.help(),
            TaskError::More { .. } => return None,
            TaskError::NoItems { .. } => "give a file with at least one item, one JSON object a line",
            TaskError::SameName { .. } => "give each suite once, or rename one of the files",
            TaskError::NoContinuation { .. } => {
                "write the choice as it would follow the prompt, such as ` A`"
            }
            TaskError::LongItem { .. } => {
                "leave the item out of the suite, or use a model with a longer context"
            }
            TaskError::NoTemplate { .. } => "ask for the raw frame alone with `--frame raw`",
            TaskError::NoFrame { .. } => "leave the frame out, or give every item this key",
            TaskError::Stored { .. } => "it is another version's: run the suite again into another database",
        };
        Some(text.to_owned())
    }
}

impl Fault {
    fn help(&self) -> Option<String> {
        let text = match self {
            Fault::NotUtf8 | Fault::Blank | Fault::NoObject | Fault::Json { .. } => {
                "each line is one JSON object; `docs/tasks.md` lists its keys"
            }
            Fault::SameItem { .. } => {
                "remove one of them, or give both an `id`: an item counted twice is no evidence"
            }
            Fault::SameId { .. } => "results are paired by id, so each item needs its own",
            Fault::GoldAfterBlank => "move the white space to the start of `gold`",
            Fault::Scattered { .. } | Fault::ChoiceIndex { .. } | Fault::OtherLabel => {
                "the file is not as the package ships it; extract it again"
            }
            _ => return None,
        };
        Some(text.to_owned())
    }
}
