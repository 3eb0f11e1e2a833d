//! A checkpoint's `config.json`, read one typed key at a time.

use std::path::Path;

use serde_json::{Map, Value};

use super::Packing;
use crate::checkpoint::{CheckpointError, Links, read_small};
use crate::digest::Digest;
use crate::failure::{Exit, Failure};
use crate::tensor::{Dtype, Float, Shape};

/// Why a config or a checkpoint does not fit a model family.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ArchError {
    #[error("`{file}`: {problem}")]
    Unreadable { file: String, problem: String },
    #[error("`config.json`: `model_type` is `{found}`, which no adapter knows")]
    UnknownModelType { found: String, known: String },
    #[error("`config.json`: key `{key}` is missing; a `{model_type}` model needs it")]
    MissingKey { key: String, model_type: String },
    #[error("`config.json`: key `{key}` is {found}, but {needed}")]
    Value { key: String, found: String, needed: String },
    #[error("`config.json` has `{key}`: the source is already quantized")]
    AlreadyQuantized { key: String },
    #[error("`{file}`: tensor `{name}` is {dtype} beside `{scales}`: the source is already quantized")]
    PackedTensor { file: String, name: String, dtype: Dtype, scales: String },
    #[error("`{file}`: tensor `{name}` has shape {found}, but the config calls for {needed}")]
    Shape { file: String, name: String, found: Shape, needed: Shape },
    #[error("`{file}`: tensor `{name}` is {found}, but a weight must be BF16, F16 or F32")]
    Dtype { file: String, name: String, found: Dtype },
    #[error("`{file}`: tensor `{name}` is not part of a `{model_type}` model")]
    UnknownTensor { file: String, name: String, model_type: String },
    #[error(
        "tensor `{name}` {shape} is missing from the checkpoint; a `{model_type}` model with this config needs it"
    )]
    MissingTensor { name: String, shape: Shape, model_type: String },
    #[error(
        "`config.json` has a `quantization_config` of method `{method}`, which this program does not read"
    )]
    ForeignPacking { method: String },
    #[error("`{file}`: tensor `{name}` is packed, but `config.json` has no `quantization` for it")]
    NoPacking { file: String, name: String },
    #[error("`{folder}/`: {problem}")]
    Side { folder: &'static str, problem: Box<ArchError> },
    #[error("the checkpoint mixes layouts: {found}")]
    MixedLayout { found: String },
    #[error("a `{model_type}` model cannot change its basis: {reason}")]
    Inexact { model_type: String, reason: &'static str },
    #[error("the checkpoint is in MLX's layout, which cannot be written back in the Hugging Face layout")]
    NoWayBack,
    #[error("and {count} more")]
    More { count: usize },
}

impl Failure for ArchError {
    fn exit(&self) -> Exit {
        Exit::Input
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            ArchError::Unreadable { .. } => {
                "a source folder needs the `config.json` that was published with its weights".to_owned()
            }
            ArchError::UnknownModelType { known, .. } => format!("known model types: {known}"),
            ArchError::MissingKey { .. } => {
                "take `config.json` from the repository that the weights came from".to_owned()
            }
            ArchError::Value { .. } => {
                "if the config is right, this model needs an adapter of its own; if not, mend the value"
                    .to_owned()
            }
            ArchError::ForeignPacking { method } if method == "exl3" => {
                "decode it with `tqc import`, or use the original checkpoint".to_owned()
            }
            ArchError::AlreadyQuantized { key } if key == "quantization_config" => {
                "quantize from the original bf16, f16 or f32 checkpoint; one of EXL3 becomes dense with `tqc import`"
                    .to_owned()
            }
            ArchError::AlreadyQuantized { .. } | ArchError::PackedTensor { .. } => {
                "quantize from the original bf16, f16 or f32 checkpoint".to_owned()
            }
            ArchError::MissingTensor { name, .. } if name.ends_with("lm_head.weight") => {
                "if the head is the input embedding, `config.json` must say `\"tie_word_embeddings\": true`; if not, check that the download is complete".to_owned()
            }
            ArchError::Shape { .. } | ArchError::MissingTensor { .. } => {
                "check that config and weights belong together and that the download is complete".to_owned()
            }
            ArchError::Dtype { .. } => "quantize from the original bf16, f16 or f32 checkpoint".to_owned(),
            ArchError::UnknownTensor { name, .. } => format!(
                "check that config and weights belong together; a build stores it as it is if the recipe has \
                 `[keep]` with `tensors = [\"{name}\"]`"
            ),
            ArchError::ForeignPacking { .. } => {
                "use the original bf16, f16 or f32 checkpoint, or one in MLX's layout".to_owned()
            }
            ArchError::NoPacking { .. } => {
                "take `config.json` from the repository that the weights came from".to_owned()
            }
            ArchError::Side { problem, .. } => return problem.help(),
            ArchError::Inexact { .. } => "leave `[transform]` out".to_owned(),
            ArchError::NoWayBack => {
                "build from the original Hugging Face checkpoint, or leave `output.layout` out".to_owned()
            }
            ArchError::More { .. } => return None,
            ArchError::MixedLayout { .. } => {
                "use a checkpoint that is wholly in the Hugging Face layout or wholly in MLX's".to_owned()
            }
        })
    }
}

/// `config.json`, with the keys of the text model found wherever the family puts them.
#[derive(Debug, Clone)]
pub struct Config {
    root: Map<String, Value>,
    sha256: Digest,
}

impl Config {
    /// Reads `config.json` of a checkpoint folder.
    ///
    /// # Errors
    /// [`ArchError::Unreadable`] if it is missing, larger than 16 MiB or not a JSON object;
    /// [`ArchError::AlreadyQuantized`] if it describes quantized weights.
    pub fn read(dir: &Path) -> Result<Self, ArchError> {
        let (root, sha256) = Self::object(dir)?;
        Ok(Self { sha256, ..Self::new(root)? })
    }

    fn object(dir: &Path) -> Result<(Map<String, Value>, Digest), ArchError> {
        let unreadable = |problem: String| ArchError::Unreadable { file: "config.json".to_owned(), problem };
        let path = dir.join("config.json");
        let bytes = read_small(&path, &Links::of_folder(dir), CONFIG_LIMIT).map_err(|error| match error {
            CheckpointError::Missing { .. } => unreadable("the file is missing".to_owned()),
            other => unreadable(other.to_string()),
        })?;
        let root = match serde_json::from_slice(&bytes) {
            Ok(Value::Object(root)) => root,
            Ok(_) => return Err(unreadable("not a JSON object".to_owned())),
            Err(error) => return Err(unreadable(error.to_string())),
        };
        Ok((root, Digest::of(&bytes)))
    }

    /// Reads the `config.json` of a folder that may hold a packed model in MLX's layout, and how it is packed.
    ///
    /// # Errors
    /// As [`Config::read`], and for packings of other tools.
    pub fn read_packed(dir: &Path) -> Result<(Self, Packing), ArchError> {
        let (mut root, sha256) = Self::object(dir)?;
        let packing = Packing::take(&mut root)?;
        Ok((Self { sha256, ..Self::new(root)? }, packing))
    }

    /// [`Config::read_packed`] of a parsed config.
    ///
    /// # Errors
    /// As [`Config::read_packed`].
    pub fn packed(mut root: Map<String, Value>) -> Result<(Self, Packing), ArchError> {
        let packing = Packing::take(&mut root)?;
        Ok((Self::new(root)?, packing))
    }

    /// Takes a parsed config.
    ///
    /// # Errors
    /// [`ArchError::AlreadyQuantized`].
    pub fn new(root: Map<String, Value>) -> Result<Self, ArchError> {
        for key in ["quantization", "quantization_config", "compression_config"] {
            if root.get(key).is_some_and(|value| !value.is_null()) {
                return Err(ArchError::AlreadyQuantized { key: key.to_owned() });
            }
        }
        let sha256 = Digest::of(&crate::digest::canonical_json(&root));
        Ok(Self { root, sha256 })
    }

    /// Digest of the file as it was read.
    pub fn digest(&self) -> Digest {
        self.sha256
    }

    /// The whole object.
    pub fn root(&self) -> &Map<String, Value> {
        &self.root
    }

    /// `model_type` at the root.
    pub fn model_type(&self) -> Result<&str, ArchError> {
        match self.root.get("model_type") {
            Some(Value::String(name)) => Ok(name),
            Some(other) => Err(ArchError::Value {
                key: "model_type".to_owned(),
                found: other.to_string(),
                needed: "a string is needed".to_owned(),
            }),
            None => Err(ArchError::MissingKey { key: "model_type".to_owned(), model_type: "any".to_owned() }),
        }
    }

    /// The object that holds the text model's keys: `text_config` if there is one, else the root.
    pub fn text(&self) -> Keys<'_> {
        match self.root.get("text_config") {
            Some(Value::Object(text)) => Keys { map: text, prefix: "text_config.", model_type: self.name() },
            _ => Keys { map: &self.root, prefix: "", model_type: self.name() },
        }
    }

    /// The keys at the root, for families that keep everything there.
    pub fn flat(&self) -> Keys<'_> {
        Keys { map: &self.root, prefix: "", model_type: self.name() }
    }

    /// A nested object by name.
    pub fn section(&self, name: &'static str, prefix: &'static str) -> Option<Keys<'_>> {
        match self.root.get(name) {
            Some(Value::Object(map)) => Some(Keys { map, prefix, model_type: self.name() }),
            _ => None,
        }
    }

    /// The float type that the config declares for the model, if it does.
    pub fn float(&self) -> Option<Float> {
        self.declared_floats().find_map(|(_, value)| Float::from_torch_name(value.as_str()?))
    }

    /// The model's float type: declared, else the embedding's, else bf16.
    pub fn model_float(&self, embedding: Option<(Dtype, Shape)>) -> Float {
        self.float().or(embedding.and_then(|(dtype, _)| dtype.float())).unwrap_or(Float::Bf16)
    }

    /// Refuses a declared dtype that no weight here can have, and two that differ: readers would disagree.
    ///
    /// # Errors
    /// [`ArchError::Value`].
    pub fn check_float(&self) -> Result<(), ArchError> {
        let first = self.float();
        for (key, value) in self.declared_floats() {
            let found = value.as_str().and_then(Float::from_torch_name);
            if found.is_none() || found != first {
                let needed = match (found, first) {
                    (Some(_), Some(first)) => format!("another key says `{}`", first.torch_name()),
                    _ => "a model's dtype is `bfloat16`, `float16` or `float32`".to_owned(),
                };
                return Err(ArchError::Value { key, found: value.to_string(), needed });
            }
        }
        Ok(())
    }

    /// Every key that declares the model's dtype, the first that readers believe first.
    fn declared_floats(&self) -> impl Iterator<Item = (String, &Value)> {
        let text = self.root.get("text_config").and_then(Value::as_object);
        let sections = [("", Some(&self.root)), ("text_config.", text)];
        sections.into_iter().flat_map(|(prefix, map)| {
            ["torch_dtype", "dtype"].into_iter().filter_map(move |key| {
                let value = map?.get(key).filter(|value| !value.is_null())?;
                // `auto` leaves the word to the weights.
                (value.as_str() != Some("auto")).then(|| (format!("{prefix}{key}"), value))
            })
        })
    }

    fn name(&self) -> &str {
        self.root.get("model_type").and_then(Value::as_str).unwrap_or("this")
    }
}

/// Typed access to one object of the config; problems are collected, not thrown one by one.
#[derive(Debug, Clone, Copy)]
pub struct Keys<'a> {
    map: &'a Map<String, Value>,
    prefix: &'static str,
    model_type: &'a str,
}

/// Configs in use are some kilobytes.
const CONFIG_LIMIT: u64 = 16 << 20;

/// No real dimension is larger; keeps every product of three far inside u64.
const LARGEST_DIMENSION: u64 = 1 << 21;
/// No real model is deeper; keeps a hostile config from asking for millions of tensors.
const MOST_LAYERS: u64 = 1024;

impl<'a> Keys<'a> {
    /// The object itself.
    pub fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    /// A value that is there and not null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// A positive dimension; 1 stands in for a bad one so that the caller can go on collecting.
    pub fn dimension(&self, key: &str, problems: &mut Vec<ArchError>) -> u64 {
        match self.get(key) {
            None => {
                problems.push(ArchError::MissingKey {
                    key: format!("{}{key}", self.prefix),
                    model_type: self.model_type.to_owned(),
                });
                1
            }
            Some(_) => self.dimension_or(key, 1, problems),
        }
    }

    /// A number of layers.
    pub fn layers(&self, key: &str, problems: &mut Vec<ArchError>) -> u64 {
        let layers = self.dimension(key, problems);
        if layers > MOST_LAYERS {
            let found = layers.into();
            problems.push(self.bad(
                key,
                &found,
                &format!("a whole number from 1 to {MOST_LAYERS} is needed"),
            ));
            return 1;
        }
        layers
    }

    /// Like [`Keys::dimension`], with a default for a missing or null key.
    pub fn dimension_or(&self, key: &str, default: u64, problems: &mut Vec<ArchError>) -> u64 {
        match self.get(key) {
            None => default,
            Some(value) => match value.as_u64() {
                Some(n) if (1..=LARGEST_DIMENSION).contains(&n) => n,
                _ => {
                    problems.push(self.bad(
                        key,
                        value,
                        &format!("a whole number from 1 to {LARGEST_DIMENSION} is needed"),
                    ));
                    default
                }
            },
        }
    }

    /// A truth value, with a default.
    pub fn flag_or(&self, key: &str, default: bool, problems: &mut Vec<ArchError>) -> bool {
        match self.get(key) {
            None => default,
            Some(Value::Bool(flag)) => *flag,
            Some(value) => {
                problems.push(self.bad(key, value, "true or false is needed"));
                default
            }
        }
    }

    /// Refuses what is not a positive number; a missing key is fine.
    pub fn positive(&self, key: &str, problems: &mut Vec<ArchError>) {
        if let Some(value) = self.get(key)
            && !value.as_f64().is_some_and(|number| number > 0.0)
        {
            problems.push(self.bad(key, value, "a positive number is needed"));
        }
    }

    /// Refuses what is not a token id or a list of them; a missing key is fine.
    pub fn token_ids(&self, key: &str, problems: &mut Vec<ArchError>) {
        if let Some(value) = self.get(key)
            && !value.is_u64()
            && !value.as_array().is_some_and(|list| list.iter().all(Value::is_u64))
        {
            problems.push(self.bad(key, value, "a token id or a list of them is needed"));
        }
    }

    /// Refuses a text value outside `known`; a missing key is fine.
    pub fn one_of(&self, key: &str, known: &[&str], problems: &mut Vec<ArchError>) {
        if let Some(value) = self.get(key)
            && !value.as_str().is_some_and(|text| known.contains(&text))
        {
            problems.push(self.bad(key, value, &format!("this family knows only {}", quoted(known))));
        }
    }

    /// The error for a bad value of `key`.
    pub fn bad(&self, key: &str, found: &Value, needed: &str) -> ArchError {
        let mut found = found.to_string();
        if found.len() > 80 {
            found = found.chars().take(77).chain("...".chars()).collect();
        }
        ArchError::Value { key: format!("{}{key}", self.prefix), found, needed: needed.to_owned() }
    }
}

/// `` `a`, `b` ``.
pub(super) fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
