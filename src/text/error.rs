//! What can be wrong with a model's text files, or with a request that uses them.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::checkpoint::CheckpointError;
use crate::failure::{Exit, Failure};

/// Why text could not become tokens, tokens text, or messages a prompt.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum TextError {
    #[error(transparent)]
    File(#[from] CheckpointError),

    #[error("`{dir}` has no `tokenizer.json`, so text cannot be turned into tokens")]
    NoTokenizer { dir: PathBuf },

    #[error("`{file}` is not JSON: {problem}")]
    Json { file: PathBuf, problem: String },

    #[error("`{file}` is not UTF-8 from its byte {at} on")]
    Utf8 { file: PathBuf, at: usize },

    #[error("`{file}`: found {found}, needed {needed}")]
    NotObject { file: PathBuf, found: &'static str, needed: &'static str },

    #[error("`{file}`: key `{key}` is {found}, but {needed}")]
    Value { file: PathBuf, key: String, found: String, needed: String },

    #[error("`{file}` is not a tokenizer: {problem}")]
    Tokenizer { file: PathBuf, problem: String },

    #[error("`{file}`: {part} is not supported: {why}")]
    Unsupported { file: PathBuf, part: String, why: &'static str },

    #[error("`{file}`: token `{token}` should have id {declared}, but gets {}", or_none(.found))]
    TokenId { file: PathBuf, token: String, declared: u64, found: Option<u32> },

    #[error("`{file}`: key `{key}` names token `{token}`, which the vocabulary does not have")]
    UnknownToken { file: PathBuf, key: String, token: String },

    #[error("`{file}`: key `{key}` is {id}, but the model's vocabulary has ids below {vocabulary}")]
    BeyondVocabulary { file: PathBuf, key: String, id: u64, vocabulary: usize },

    #[error("the text could not be turned into tokens: {problem}")]
    Encode { problem: String },

    #[error(
        "the text has {found} whitespace characters in a row, more than the {limit} that can be split exactly"
    )]
    LongBlank { found: usize, limit: usize },

    #[error("the tokens could not be turned into text: {problem}")]
    Decode { problem: String },

    #[error("`{dir}` has no chat template")]
    NoTemplate { dir: PathBuf },

    #[error("`{file}`: the chat template does not parse: line {line}: {problem}")]
    TemplateSyntax { file: PathBuf, line: usize, problem: String },

    #[error("the chat template refuses these messages: {message}")]
    TemplateRaised { message: String },

    #[error("`{file}`: line {line}: the chat template fails on these messages: {problem}")]
    TemplateFailed { file: PathBuf, line: usize, problem: String },

    #[error("`{file}`: line {line}: the chat template uses what this runtime does not have: {problem}")]
    TemplateUnsupported { file: PathBuf, line: usize, problem: String },

    #[error("`{file}`: the chat template does not end: {spent} steps were not enough for this conversation")]
    TemplateEndless { file: PathBuf, spent: u64 },

    #[error("`{file}`: the chat template is not done with this conversation after {} s", .limit.as_secs())]
    TemplateSlow { file: PathBuf, limit: Duration },

    #[error("`{file}`: the chat template has {found} bytes, more than the {limit} that one may have")]
    TemplateSize { file: PathBuf, found: usize, limit: usize },

    #[error("no thread could be started for the chat template: {source}")]
    Thread { source: io::Error },

    #[error("message {message} has a part of type `{kind}`: {medium} input is not supported by this runtime")]
    Media { message: usize, kind: String, medium: &'static str },

    #[error("message {message}: found {found}, needed {needed}")]
    Message { message: usize, found: String, needed: &'static str },

    #[error("the template variable `{name}` is set by the conversation itself")]
    Variable { name: String },

    #[error("a stop string must have at least one character")]
    EmptyStop,
}

fn or_none(id: &Option<u32>) -> String {
    id.map_or("none".to_owned(), |id| id.to_string())
}

impl Failure for TextError {
    fn exit(&self) -> Exit {
        use TextError::*;
        match self {
            File(error) => error.exit(),
            Thread { .. } => Exit::Machine,
            LongBlank { .. }
            | TemplateRaised { .. }
            | TemplateFailed { .. }
            | Media { .. }
            | Message { .. }
            | Variable { .. }
            | EmptyStop => Exit::Request,
            _ => Exit::Input,
        }
    }

    fn help(&self) -> Option<String> {
        use TextError::*;
        let again = "fetch this file again from the repository that the weights came from";
        Some(match self {
            File(error) => return error.help(),
            NoTokenizer { .. } => {
                "fetch `tokenizer.json` from the repository that the weights came from, or give token ids".into()
            }
            Json { .. } | Utf8 { .. } | NotObject { .. } | Tokenizer { .. } => again.into(),
            Value { .. } => "mend the value, or fetch the file again".into(),
            Unsupported { .. } => "give token ids that another tokenizer made".into(),
            TokenId { .. } | UnknownToken { .. } => {
                "the tokenizer's files are not of one model; fetch them again at one revision".into()
            }
            BeyondVocabulary { .. } => {
                "the tokenizer's files and `config.json` are not of one model; fetch them again at one revision"
                    .into()
            }
            Encode { .. } | Decode { .. } => {
                "this may be a mistake in `tokenizer.json`; fetch it again from the repository that the weights \
                 came from"
                    .into()
            }
            LongBlank { .. } => "shorten the blank part of the text".into(),
            NoTemplate { .. } => {
                "fetch `chat_template.jinja` or `tokenizer_config.json` of an instruct model, or give a plain prompt"
                    .into()
            }
            TemplateSyntax { .. } | TemplateSize { .. } => again.into(),
            Thread { .. } => "free some memory, or raise the limit on threads (`ulimit -u`)".into(),
            TemplateRaised { .. } => "change the messages as it says".into(),
            TemplateFailed { .. } => {
                "check that each message has the role and the content that this template reads".into()
            }
            TemplateUnsupported { .. } | TemplateEndless { .. } | TemplateSlow { .. } => {
                "render the conversation with another program and give the text as a plain prompt".into()
            }
            Media { .. } => "send text parts only".into(),
            Message { .. } => "send each message as an object with `role` and `content`".into(),
            Variable { .. } | EmptyStop => "leave it out".into(),
        })
    }
}
