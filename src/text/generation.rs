//! Where a model ends its answers, and the sampling that it was published with.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::files::Document;
use super::{TextError, Tokenizer};
use crate::sample::{SampleError, Sampling};

/// The tokens that end a generation, and which file says so.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EndTokens {
    declared: BTreeMap<u32, Vec<String>>,
}

impl EndTokens {
    /// The union of what the files of `dir` declare: `eos_token_id` of generation_config.json and of config.json
    /// (at its root and in `text_config`), a number or a list; `eos_token` of tokenizer_config.json, a string or
    /// an object with `content`. Ids must be below `vocabulary`, the number of the model's logits.
    ///
    /// Without a tokenizer, `eos_token` is looked up in tokenizer_config.json's own `added_tokens_decoder`.
    ///
    /// # Errors
    /// [`TextError::Value`], [`TextError::BeyondVocabulary`], [`TextError::UnknownToken`], and those of reading.
    pub fn read(dir: &Path, tokenizer: Option<&Tokenizer>, vocabulary: usize) -> Result<Self, TextError> {
        let mut found = Self::default();
        const KEY: &str = "eos_token_id";
        if let Some(document) = Document::read(dir, "generation_config.json")? {
            found.take(&document, KEY, document.get(KEY), vocabulary)?;
        }
        if let Some(document) = Document::read(dir, "config.json")? {
            found.take(&document, KEY, document.get(KEY), vocabulary)?;
            let text = document.section("text_config").and_then(|text| text.get(KEY));
            found.take(&document, "text_config.eos_token_id", text, vocabulary)?;
        }
        if let Some(document) = Document::read(dir, "tokenizer_config.json")? {
            const KEY: &str = "eos_token";
            if let Some(token) = document.token(KEY)? {
                let id = match tokenizer {
                    Some(tokenizer) => tokenizer.id(token),
                    None => document.section("added_tokens_decoder").and_then(|map| added_id(map, token)),
                };
                let Some(id) = id else {
                    return Err(TextError::UnknownToken {
                        file: document.file.clone(),
                        key: KEY.to_owned(),
                        token: token.to_owned(),
                    });
                };
                found.add(&document, KEY, u64::from(id), vocabulary)?;
            }
        }
        Ok(found)
    }

    fn take(
        &mut self,
        document: &Document,
        key: &str,
        value: Option<&Value>,
        vocabulary: usize,
    ) -> Result<(), TextError> {
        const NEEDED: &str = "must be a token id or a list of them";
        let one = |value: &Value| value.as_u64().ok_or_else(|| document.wrong(key, value, NEEDED));
        match value {
            None | Some(Value::Null) => Ok(()),
            Some(Value::Array(list)) => {
                list.iter().try_for_each(|value| self.add(document, key, one(value)?, vocabulary))
            }
            Some(value) => self.add(document, key, one(value)?, vocabulary),
        }
    }

    fn add(&mut self, document: &Document, key: &str, id: u64, vocabulary: usize) -> Result<(), TextError> {
        match u32::try_from(id).ok().filter(|id| (*id as usize) < vocabulary) {
            Some(id) => {
                let name = document.file.file_name().unwrap_or_default().to_string_lossy();
                let sources = self.declared.entry(id).or_default();
                let source = format!("{name}: {key}");
                // A list may name a token twice.
                if !sources.contains(&source) {
                    sources.push(source);
                }
                Ok(())
            }
            None => Err(TextError::BeyondVocabulary {
                file: document.file.clone(),
                key: key.to_owned(),
                id,
                vocabulary,
            }),
        }
    }

    /// The ids, ascending.
    pub fn ids_ascending(&self) -> impl Iterator<Item = u32> {
        self.declared.keys().copied()
    }

    /// Each id and where it was declared, as `file: key`.
    pub fn declared(&self) -> impl Iterator<Item = (u32, &[String])> {
        self.declared.iter().map(|(id, sources)| (*id, sources.as_slice()))
    }

    /// Whether `id` ends a generation.
    pub fn contains(&self, id: u32) -> bool {
        self.declared.contains_key(&id)
    }

    /// Whether the model declares none.
    pub fn is_empty(&self) -> bool {
        self.declared.is_empty()
    }
}

/// The id of `token` in an `added_tokens_decoder`.
fn added_id(map: &Map<String, Value>, token: &str) -> Option<u32> {
    let named = |entry: &Value| entry.get("content").and_then(Value::as_str) == Some(token);
    map.iter().find(|(_, entry)| named(entry)).and_then(|(id, _)| id.parse().ok())
}

/// What generation_config.json says about sampling; `None` where it says nothing.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerationConfig {
    /// Whether its author samples at all; if not, greedy is meant.
    pub do_sample: Option<bool>,
    /// See [`Sampling::temperature`].
    pub temperature: Option<f64>,
    /// See [`Sampling::top_p`].
    pub top_p: Option<f64>,
    /// See [`Sampling::top_k`].
    pub top_k: Option<usize>,
    /// See [`Sampling::min_p`].
    pub min_p: Option<f64>,
    /// See [`Sampling::repetition_penalty`].
    pub repetition_penalty: Option<f64>,
}

impl GenerationConfig {
    /// Reads generation_config.json of `dir`; without that file, nothing is said.
    ///
    /// # Errors
    /// [`TextError::Value`] for a wrong type or a value that no sampler can use, and those of reading.
    pub fn read(dir: &Path) -> Result<Self, TextError> {
        let Some(document) = Document::read(dir, "generation_config.json")? else {
            return Ok(Self::default());
        };
        let top_k = document.count("top_k")?.map(|count| usize::try_from(count).unwrap_or(usize::MAX));
        let config = Self {
            do_sample: document.flag("do_sample")?,
            temperature: document.number("temperature")?,
            top_p: document.number("top_p")?,
            top_k,
            min_p: document.number("min_p")?,
            repetition_penalty: document.number("repetition_penalty")?,
        };
        config.sampling(0).check().map_err(|error| match error {
            SampleError::Option { option, found, needed } => TextError::Value {
                file: document.file,
                key: option.replace('-', "_"),
                found,
                needed: format!("must be {needed}"),
            },
            other => unreachable!("checking options needs no logits: {other}"),
        })?;
        Ok(config)
    }

    /// The sampling that this file asks for: what it leaves out is off, and the temperature 1.
    pub fn sampling(&self, seed: u64) -> Sampling {
        let greedy = Sampling::greedy();
        Sampling {
            temperature: self.temperature.unwrap_or(1.0),
            top_p: self.top_p.unwrap_or(greedy.top_p),
            top_k: self.top_k.unwrap_or(greedy.top_k),
            min_p: self.min_p.unwrap_or(greedy.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(greedy.repetition_penalty),
            seed,
        }
    }
}
