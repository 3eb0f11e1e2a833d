//! The small JSON files beside a tokenizer, read one typed key at a time.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::TextError;
use crate::checkpoint::{CheckpointError, Links, SMALL_LIMIT, read_small};

/// A JSON object and the file it came from.
#[derive(Debug, Clone)]
pub(super) struct Document {
    pub file: PathBuf,
    pub map: Map<String, Value>,
}

/// The bytes of `name` in `dir`; `None` if there is no such file.
pub(super) fn read(dir: &Path, name: &str) -> Result<Option<(PathBuf, Vec<u8>)>, TextError> {
    let file = dir.join(name);
    match read_small(&file, &Links::of_folder(dir), SMALL_LIMIT) {
        Ok(bytes) => Ok(Some((file, bytes))),
        Err(CheckpointError::Missing { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The text of `name` in `dir`; `None` if there is no such file.
pub(super) fn read_text(dir: &Path, name: &str) -> Result<Option<(PathBuf, String)>, TextError> {
    let Some((file, bytes)) = read(dir, name)? else { return Ok(None) };
    match String::from_utf8(bytes) {
        Ok(text) => Ok(Some((file, text))),
        Err(error) => Err(TextError::Utf8 { file, at: error.utf8_error().valid_up_to() }),
    }
}

impl Document {
    /// Reads the JSON object `name` in `dir`; `None` if there is no such file.
    pub fn read(dir: &Path, name: &str) -> Result<Option<Self>, TextError> {
        let Some((file, bytes)) = read(dir, name)? else { return Ok(None) };
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(map)) => Ok(Some(Self { file, map })),
            Ok(other) => Err(TextError::NotObject { file, found: kind(&other), needed: "an object" }),
            Err(error) => Err(TextError::Json { file, problem: error.to_string() }),
        }
    }

    /// The value of `key`; a null is as good as absent.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// The object under `key`.
    pub fn section(&self, key: &str) -> Option<&Map<String, Value>> {
        self.get(key)?.as_object()
    }

    /// An error about the value of `key`.
    pub fn wrong(&self, key: &str, found: &Value, needed: &str) -> TextError {
        let mut found = match found {
            Value::Object(_) | Value::Array(_) => kind(found).to_owned(),
            plain => plain.to_string(),
        };
        if let Some((at, _)) = found.char_indices().nth(60) {
            found.truncate(at);
            found.push('…');
        }
        TextError::Value { file: self.file.clone(), key: key.to_owned(), found, needed: needed.to_owned() }
    }

    /// A flag.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, TextError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.wrong(key, other, "must be true or false")),
        }
    }

    /// A finite number.
    pub fn number(&self, key: &str) -> Result<Option<f64>, TextError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_f64().filter(|number| number.is_finite()) {
                Some(number) => Ok(Some(number)),
                None => Err(self.wrong(key, value, "must be a number")),
            },
        }
    }

    /// A whole number from 0 on.
    pub fn count(&self, key: &str) -> Result<Option<u64>, TextError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(count) => Ok(Some(count)),
                None => Err(self.wrong(key, value, "must be a whole number from 0 on")),
            },
        }
    }

    /// A token by its text: a string, or an object with `content`, as tokenizer_config.json writes them.
    pub fn token(&self, key: &str) -> Result<Option<&str>, TextError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let text = match value {
            Value::String(text) => Some(text.as_str()),
            Value::Object(map) => map.get("content").and_then(Value::as_str),
            _ => None,
        };
        match text {
            Some(text) => Ok(Some(text)),
            None => Err(self.wrong(key, value, "must be a string, or an object whose `content` is one")),
        }
    }
}

/// What a JSON value is, in words.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
