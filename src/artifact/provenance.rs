//! `provenance.json`: what an artifact was made from, by what, and what came out.
//!
//! Canonical JSON (sorted keys, no spaces, one newline), free of anything that differs between machines:
//! no paths, no clock, no threads. It names the SHA-256 of every other file of the artifact except
//! `machine.json`, so its own SHA-256 is the artifact's digest. `docs/formats/provenance.md` lists the keys.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::tensor::{Dtype, Shape};

/// Version of the record's shape.
pub const VERSION: u32 = 1;

/// The whole record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// [`VERSION`].
    pub version: u32,
    /// The program.
    pub tool: ToolRecord,
    /// The recipe.
    pub recipe: RecipeRecord,
    /// Digest of the resolved plan: recipe, tool, names, shapes, layout, copied files.
    pub plan_sha256: Digest,
    /// Stages that every module went through.
    pub stages: Vec<String>,
    /// Who gave out codecs.
    pub allocator: String,
    /// What was read.
    pub source: SourceRecord,
    /// What was stored.
    pub outputs: Vec<OutputRecord>,
    /// Every other file of the artifact: path to SHA-256.
    pub files: BTreeMap<String, Digest>,
    /// Digest of the tokenizer's files among `files`, as [`digest_of_files`] takes it; null without any.
    pub tokenizer_sha256: Option<Digest>,
    /// Sizes.
    pub sizes: Sizes,
    /// What a person should know: kind, subject, detail.
    pub notes: Vec<NoteRecord>,
}

/// Name, version, digest of the program's source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct ToolRecord {
    pub name: String,
    pub version: String,
    pub source_sha256: Digest,
}

/// The recipe, whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecipeRecord {
    /// Its name.
    pub name: String,
    /// Digest over the texts of all its files.
    pub sha256: Digest,
    /// Seed of everything random.
    pub seed: u64,
    /// Its files, base first.
    pub files: Vec<RecipeText>,
}

/// One file of a recipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecipeText {
    /// File name without its folder.
    pub name: String,
    /// The whole text.
    pub text: String,
}

/// What was read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceRecord {
    /// `model_type` of its config.
    pub model_type: String,
    /// `Hugging Face` or `MLX`.
    pub layout: String,
    /// Repository, if it was fetched from the hub.
    pub hub: Option<String>,
    /// Its commit.
    pub revision: Option<String>,
    /// Digest over all tensors: canonical JSON of `[name, dtype, shape, sha256]`, sorted by name.
    pub sha256: Digest,
    /// Digest of `config.json` as it was read.
    pub config_sha256: Digest,
    /// Weight files.
    pub files: Vec<SourceFileRecord>,
    /// Every tensor, in the order it was read.
    pub tensors: Vec<SourceTensorRecord>,
}

/// A weight file of the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct SourceFileRecord {
    pub name: String,
    pub bytes: u64,
    pub sha256: Digest,
}

/// A tensor of the source and what became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceTensorRecord {
    /// Its name.
    pub name: String,
    /// Stored dtype.
    pub dtype: Dtype,
    /// Stored shape.
    pub shape: Shape,
    /// Digest of its payload.
    pub sha256: Digest,
    /// `quantized`, `kept`, `cast`, `moved` or `dropped`.
    pub fate: String,
    /// Why.
    pub reason: String,
    /// Names of the stored tensors that come from it.
    pub outputs: Vec<String>,
}

/// A stored tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputRecord {
    /// Its name.
    pub name: String,
    /// File that holds it.
    pub file: String,
    /// Stored dtype.
    pub dtype: Dtype,
    /// Stored shape.
    pub shape: Shape,
    /// Digest of its payload.
    pub sha256: Digest,
    /// Module that it belongs to, in MLX's model tree.
    pub module: String,
    /// Source tensors that it comes from.
    pub sources: Vec<String>,
    /// Changes of layout on the way.
    pub transforms: Vec<String>,
    /// Codec.
    pub codec: String,
    /// Encoder.
    pub encoder: String,
    /// Σ (w − decode)² / Σ w² of the module; null where nothing is encoded or all weights are zero.
    pub relative_mse: Option<f64>,
    /// What the encoder changed beyond rounding: kind to count of groups.
    pub repairs: BTreeMap<String, u64>,
}

/// Exact sizes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sizes {
    /// Weights of the source that the artifact holds in any form.
    pub weights: u64,
    /// Weights stored as codes.
    pub quantized_weights: u64,
    /// Bytes of their codes, scales and biases.
    pub quantized_bytes: u64,
    /// Payload bytes of the source.
    pub source_bytes: u64,
    /// Bytes of all weight files, headers and padding included.
    pub weight_file_bytes: u64,
    /// 8 · weight_file_bytes / weights.
    pub bits_per_weight: f64,
    /// 8 · quantized_bytes / quantized_weights; 0 without quantized weights.
    pub quantized_bits_per_weight: f64,
}

/// A note of the plan or the build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct NoteRecord {
    pub kind: String,
    pub subject: String,
    pub detail: String,
}

/// The digest of some files: SHA-256 of the canonical JSON of `{path: sha256}`.
pub fn digest_of_files<'a>(files: impl Iterator<Item = (&'a str, Digest)>) -> Digest {
    let map: BTreeMap<&str, Digest> = files.collect();
    Digest::of(&crate::digest::canonical_json(&map))
}

/// The source's digest, from its tensors.
pub fn source_digest(tensors: &[SourceTensorRecord]) -> Digest {
    let mut list: Vec<_> = tensors.iter().map(|t| (&t.name, t.dtype, &t.shape, t.sha256)).collect();
    list.sort();
    Digest::of(&crate::digest::canonical_json(&list))
}
