//! Text to measure on or to calibrate with: documents of a JSONL file, as token sequences.
//!
//! A line is an object with `text`, or with `messages` (objects with `role` and `content`), which go through the
//! model's chat template; other keys are not read. Blank lines are skipped. A document is a cluster: its tokens are
//! not independent of each other, and every interval counts documents.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ChatTemplate, Conversation, Json, Tokenizer};
use crate::digest::{Digest, canonical_json};
use crate::failure::{Exit, Failure, Outcome};

/// Why documents could not be taken.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DocumentsError {
    #[error("cannot read `{path}`: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("`{path}`, line {line}: {problem}")]
    Line { path: PathBuf, line: usize, problem: String },
    #[error("`{path}` holds no text")]
    NoText { path: PathBuf },
    #[error(
        "`{path}`, line {line}: the text is {found} token, but there is nothing to compare in fewer than 2"
    )]
    ShortText { path: PathBuf, line: usize, found: usize },
    #[error("`{path}`: none of {documents} documents has {min_tokens} tokens")]
    AllShort { path: PathBuf, documents: usize, min_tokens: usize },
}

impl Failure for DocumentsError {
    fn exit(&self) -> Exit {
        match self {
            // What was asked for is not there to be read: the request's fault.
            DocumentsError::Read { source, .. }
                if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::IsADirectory) =>
            {
                Exit::Request
            }
            DocumentsError::Read { .. } => Exit::Machine,
            DocumentsError::AllShort { .. } => Exit::Request,
            _ => Exit::Input,
        }
    }

    fn help(&self) -> Option<String> {
        let text = match self {
            DocumentsError::Read { .. } => return None,
            DocumentsError::Line { .. } => {
                "each line is one JSON object with `text`, or with `messages` for the chat template"
            }
            DocumentsError::NoText { .. } => "give a file with at least one line of JSON",
            DocumentsError::ShortText { .. } => {
                "remove the line, or leave short documents out with `--min-tokens N` (they are counted)"
            }
            DocumentsError::AllShort { min_tokens: 0..=2, .. } => "give longer documents",
            DocumentsError::AllShort { .. } => "lower `--min-tokens`, or give longer documents",
        };
        Some(text.to_owned())
    }
}

/// How documents are taken from a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Taking {
    /// Most documents, from the first; none takes all.
    pub rows: Option<usize>,
    /// Most tokens of a sequence.
    pub context: usize,
    /// Documents of fewer tokens are left out and counted; none refuses those of fewer than 2.
    pub min_tokens: Option<usize>,
    /// Whether what is beyond the context becomes further sequences of the document; else it is left out.
    pub split: bool,
}

/// A sequence of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// Number of its document.
    pub document: usize,
    /// Line of the document in the file.
    pub line: usize,
    /// Its tokens.
    pub tokens: Vec<u32>,
}

/// The documents of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Documents {
    /// What is recorded of the text.
    pub record: TextRecord,
    /// All sequences, in the file's order.
    pub sequences: Vec<Sequence>,
}

/// What a dump records of its text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextRecord {
    /// Name of the file.
    pub name: String,
    /// Its SHA-256.
    pub sha256: Digest,
    /// How documents were taken.
    pub taking: Taking,
    /// Documents taken.
    pub documents: usize,
    /// Documents left out because they were short.
    pub short: usize,
    /// Documents cut at the context.
    pub cut: usize,
    /// Tokens that were cut off.
    pub cut_tokens: usize,
    /// Documents taken that have the same tokens as an earlier one.
    pub repeated: usize,
}

/// Reads and tokenizes the documents of `path`; `dir` is the model's folder, for its chat template.
///
/// # Errors
/// [`DocumentsError::Read`], [`DocumentsError::Line`], [`DocumentsError::NoText`], [`DocumentsError::ShortText`],
/// [`DocumentsError::AllShort`], and those of tokenizer and template.
pub fn read(path: &Path, dir: &Path, tokenizer: &Tokenizer, taking: Taking) -> Outcome<Documents> {
    let bytes =
        std::fs::read(path).map_err(|source| DocumentsError::Read { path: path.to_owned(), source })?;
    parse(path, &bytes, dir, tokenizer, taking)
}

/// [`read`] of a file's bytes; `path` is what messages call it.
///
/// # Errors
/// As [`read`], but for [`DocumentsError::Read`].
pub fn parse(
    path: &Path,
    bytes: &[u8],
    dir: &Path,
    tokenizer: &Tokenizer,
    taking: Taking,
) -> Outcome<Documents> {
    let record = TextRecord {
        name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        sha256: Digest::of(bytes),
        taking,
        documents: 0,
        short: 0,
        cut: 0,
        cut_tokens: 0,
        repeated: 0,
    };
    let mut found = Documents { record, sequences: Vec::new() };
    let (mut template, mut seen) = (None, BTreeSet::new());
    for (i, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        if taking.rows.is_some_and(|rows| found.record.documents >= rows) {
            break;
        }
        let number = i + 1;
        let bad = |problem: String| DocumentsError::Line { path: path.to_owned(), line: number, problem };
        let value: Value = serde_json::from_slice(line).map_err(|error| bad(error.to_string()))?;
        let mut tokens = tokens_of(&value, dir, tokenizer, &mut template, &bad)?;
        let least = taking.min_tokens.unwrap_or(2).max(2);
        if tokens.len() < least {
            if taking.min_tokens.is_none() {
                let (path, found) = (path.to_owned(), tokens.len());
                return Err(DocumentsError::ShortText { path, line: number, found }.into());
            }
            found.record.short += 1;
            continue;
        }
        found.record.repeated += usize::from(!seen.insert(Digest::of(&canonical_json(&tokens))));
        let document = found.record.documents;
        found.record.documents += 1;
        if tokens.len() > taking.context && !taking.split {
            found.record.cut += 1;
            found.record.cut_tokens += tokens.len() - taking.context;
            tokens.truncate(taking.context);
        }
        for part in tokens.chunks(taking.context) {
            // One token has nothing after it to be judged by, but its own prediction counts.
            found.sequences.push(Sequence { document, line: number, tokens: part.to_vec() });
        }
    }
    if found.sequences.is_empty() {
        let path = path.to_owned();
        return Err(match found.record.short {
            0 => DocumentsError::NoText { path }.into(),
            documents => {
                let min_tokens = taking.min_tokens.unwrap_or(2);
                DocumentsError::AllShort { path, documents, min_tokens }.into()
            }
        });
    }
    Ok(found)
}

fn tokens_of(
    value: &Value,
    dir: &Path,
    tokenizer: &Tokenizer,
    template: &mut Option<ChatTemplate>,
    bad: &dyn Fn(String) -> DocumentsError,
) -> Outcome<Vec<u32>> {
    match (value.get("text"), value.get("messages")) {
        (Some(Value::String(text)), None) => Ok(tokenizer.encode(text, true)?),
        (Some(_), None) => Err(bad("`text` must be a string".to_owned()).into()),
        (None, Some(Value::Array(messages))) => {
            if template.is_none() {
                *template = Some(ChatTemplate::open(dir)?);
            }
            let template = template.as_ref().expect("it was opened just above");
            let mut conversation = Conversation::new(messages.iter().map(Json::from).collect());
            conversation.add_generation_prompt = false;
            let rendered = conversation.refuse_media().and_then(|()| template.render(&conversation));
            let text = rendered.map_err(|error| bad(error.to_string()))?;
            Ok(tokenizer.encode(&text, false)?)
        }
        (None, Some(_)) => Err(bad("`messages` must be an array".to_owned()).into()),
        (None, None) => Err(bad("it has neither `text` nor `messages`".to_owned()).into()),
        (Some(_), Some(_)) => Err(bad("it has both `text` and `messages`".to_owned()).into()),
    }
}

/// The digest of a stream of tokens, with the sequences' boundaries.
pub fn tokens_digest(sequences: &[Sequence]) -> Digest {
    let list: Vec<(usize, &[u32])> = sequences.iter().map(|s| (s.document, s.tokens.as_slice())).collect();
    Digest::of(&canonical_json(&list))
}
