//! What stops an instrument.

use std::io;
use std::path::{Path, PathBuf};

use crate::digest::Digest;
use crate::failure::{Exit, Failure};
use crate::units::Bytes;

/// Why something could not be measured.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum EvalError {
    #[error("cannot {what} `{path}`: {source}")]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("`{path}` exists already")]
    Occupied { path: PathBuf },
    #[error("`{path}` is being written by another process")]
    InUse { path: PathBuf },
    #[error("`{path}` holds unfinished work of another kind: other text, model, settings or program")]
    OtherWork { path: PathBuf },
    #[error("a budget of {budget} is too small: one sequence needs {needed}")]
    Budget { budget: Bytes, needed: Bytes },
    #[error("a hidden state of token {position} holds {value}, which {dtype} cannot")]
    HiddenOverflow { position: usize, value: f32, dtype: &'static str },
    #[error("the teacher's logits after token {position} hold NaN or infinity")]
    TeacherNonFinite { position: usize },
    #[error("`{path}` is not a teacher dump: {problem}")]
    NotADump { path: PathBuf, problem: String },
    #[error("`{path}` has version {found}, but this program reads version {needed}")]
    DumpVersion { path: PathBuf, found: u64, needed: u32 },
    #[error("`{path}` holds {found} bytes, but the dump's record says {needed}")]
    Truncated { path: PathBuf, found: u64, needed: u64 },
    #[error("`{path}` has SHA-256 {found}, but the dump's record says {needed}")]
    Damaged { path: PathBuf, found: Digest, needed: Digest },
    #[error("the dump's teacher has a head with SHA-256 {needed}, but {tried}")]
    NoHead { needed: Digest, tried: String },
    #[error("the teacher's folder is needed, but {tried}")]
    NoTeacher { tried: String },
    #[error("the candidate has {found} tokens in its vocabulary, but the teacher has {needed}")]
    OtherVocabulary { found: usize, needed: usize },
    #[error("the candidate has {found} layers, but the teacher has {needed}")]
    OtherDepth { found: usize, needed: usize },
    #[error("the candidate's tokenizer differs from the teacher's: its fingerprint is {found}, not {needed}")]
    OtherTokenizer { found: String, needed: Digest },
    #[error("the candidate's context is {found} tokens, but the dump has a sequence of {needed}")]
    ShortContext { found: usize, needed: usize },
    #[error("{cut} documents would be cut, {short} left out as short, and {repeated} repeat an earlier one")]
    Strict { cut: usize, short: usize, repeated: usize },
    #[error("suite `{suite}` has no prompts for free answers")]
    NoPrompts { suite: String },
    #[error(
        "the dump's text has no answer that begins after the chat template's opening and ends with an end token"
    )]
    NoAnswers,
    #[error("the dump keeps the likeliest tokens only, which need not hold the end tokens")]
    NoHeadInDump,
    #[error("`{dir}` declares no end token, so there is nothing to probe")]
    NoEndTokens { dir: PathBuf },
    #[error("a margin must be above 0 and below 1, got {found}")]
    Margin { found: f64 },
    #[error("the database has no finished run or model `{name}`")]
    NoSuchModel { name: String },
    #[error("`{name}` stands for several models: {digests}")]
    SeveralModels { name: String, digests: String },
    #[error("there is no measurement that all of them have: {found}")]
    NothingToCompare { found: String },
    #[error("the model in the teacher's folder has digest {found}, but the dump was made of {needed}")]
    OtherTeacher { found: Digest, needed: Digest },
    #[error("a dump's own answers are the cases, so `--suite` has no use beside it")]
    SuiteBesideDump,
    #[error("`{name}` is given twice")]
    SameArm { name: String },
    #[error("interrupted: {0}")]
    Interrupted(String),
}

impl EvalError {
    /// For `map_err`.
    pub fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| EvalError::Io { what, path, source }
    }
}

impl Failure for EvalError {
    fn exit(&self) -> Exit {
        match self {
            // What was asked for is not there to be read: the request's fault.
            EvalError::Io { what: "open" | "read", source, .. }
                if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::IsADirectory) =>
            {
                Exit::Request
            }
            EvalError::Io { .. } => Exit::Machine,
            EvalError::Strict { .. }
            | EvalError::OtherTeacher { .. }
            | EvalError::SuiteBesideDump
            | EvalError::SameArm { .. }
            | EvalError::Margin { .. }
            | EvalError::NoSuchModel { .. }
            | EvalError::SeveralModels { .. }
            | EvalError::NothingToCompare { .. }
            | EvalError::NoPrompts { .. }
            | EvalError::NoAnswers
            | EvalError::NoHeadInDump
            | EvalError::Occupied { .. }
            | EvalError::InUse { .. }
            | EvalError::OtherWork { .. }
            | EvalError::Budget { .. }
            | EvalError::HiddenOverflow { .. }
            | EvalError::NoHead { .. }
            | EvalError::NoTeacher { .. }
            | EvalError::OtherVocabulary { .. }
            | EvalError::OtherTokenizer { .. }
            | EvalError::OtherDepth { .. }
            | EvalError::ShortContext { .. } => Exit::Request,
            EvalError::Interrupted(_) => Exit::Interrupted,
            _ => Exit::Input,
        }
    }

    fn help(&self) -> Option<String> {
        let text = match self {
            EvalError::Io { .. } => return None,
            EvalError::Occupied { .. } => "name another folder, or remove this one",
            EvalError::InUse { .. } => "wait for it, or name another place",
            EvalError::OtherWork { .. } => {
                "repeat the command it belongs to, or throw it away with `--discard`"
            }
            EvalError::Budget { .. } => "raise `--memory`, or make the dump with a shorter `--context`",
            EvalError::HiddenOverflow { .. } => "dump with `--dtype f32`",
            EvalError::TeacherNonFinite { .. } => {
                "the teacher's weights are out of range; nothing can be measured against it"
            }
            EvalError::NotADump { .. } => {
                "give a folder that `tqc eval dump` wrote, or a `_logits_` file of llama.cpp"
            }
            EvalError::DumpVersion { .. } => "make the dump again, or use the program version that wrote it",
            EvalError::Truncated { .. } | EvalError::Damaged { .. } => {
                "the file was cut or changed after it was written; copy it again, or make the dump again"
            }
            EvalError::NoHead { .. } | EvalError::NoTeacher { .. } => {
                "name the teacher's folder with `--head DIR`"
            }
            EvalError::OtherVocabulary { .. } | EvalError::OtherTokenizer { .. } => {
                "a KL between different tokens means nothing: make a dump of this candidate's own teacher"
            }
            EvalError::OtherDepth { .. } => "name the model that this candidate was made from",
            EvalError::ShortContext { .. } => "make a dump with a smaller `--context`",
            EvalError::Strict { .. } => {
                "raise `--context`, lower `--min-tokens`, remove repeated documents, or run without `--strict`"
            }
            EvalError::NoPrompts { .. } => "name suites whose items have `raw_prompt` or `question`",
            EvalError::NoAnswers => {
                "dump conversations (`messages`, or text in the template's form), or give a model as the teacher"
            }
            EvalError::NoHeadInDump => "make the dump with `--format hidden`",
            EvalError::NoEndTokens { .. } => "add `eos_token_id` to its generation_config.json",
            EvalError::Margin { .. } => "0.02 is two points of accuracy",
            EvalError::NoSuchModel { .. } => "`tqc eval list` shows runs, names and digests",
            EvalError::SeveralModels { .. } => "give the digest's first digits, or a run's number",
            EvalError::NothingToCompare { .. } => {
                "measure them with the same dump or suites and the same settings; `tqc eval list` shows what there is"
            }
            EvalError::OtherTeacher { .. } => {
                "name the teacher's folder with `--head DIR`, or make a dump of this one"
            }
            EvalError::SuiteBesideDump => "give a model as the teacher, or leave `--suite` out",
            EvalError::SameArm { .. } => "name each model or run once",
            EvalError::Interrupted(_) => "run the same command again to go on from there",
        };
        Some(text.to_owned())
    }
}
