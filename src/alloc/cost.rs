//! What it costs to store a module in a codec, and the file that measurements of it are kept in.
//!
//! cost(m, c) is the mean KL gain, in nats, of the model with module m alone stored in codec c. An allocator adds the
//! costs of its choices: what several modules do together is taken for the sum of what each does alone.
//! `docs/formats/sensitivity.md` describes the file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::codec::CodecSpec;
use crate::digest::Digest;

/// `format` of [`Sensitivity`].
pub const FORMAT: &str = "tqc-sensitivity/1";

/// The largest size of a cost: sums of them stay exact (see [`super::budget`]).
pub const LARGEST: f64 = 1_048_576.0;

/// A file of measurements.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sensitivity {
    /// [`FORMAT`].
    pub format: String,
    /// The model that was measured.
    pub model: MeasuredModel,
    /// Kind of the rotation that it was measured in; `none` for its own basis.
    pub basis: String,
    /// Who found the codes, by name in the quantizer registry.
    pub encoder: String,
    /// What it was measured on.
    pub text: MeasuredText,
    /// KL of the same model with nothing rounded, nats: 0 but for the change of basis.
    pub base_kl: f64,
    /// By [rule path](crate::arch::Output::rule_path).
    pub modules: BTreeMap<String, MeasuredModule>,
}

/// The model that was measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredModel {
    /// `model_type` of the adapter's statement.
    pub model_type: String,
    /// [`crate::checkpoint::Checkpoint::shapes_digest`] of the source.
    pub tensors_sha256: Digest,
    /// Digest of the bytes of `config.json`.
    pub config_sha256: Digest,
}

/// What was measured on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredText {
    /// Name of the text's file, or `built-in`.
    pub name: String,
    /// Digest of its tokens: canonical JSON of all sequences.
    pub tokens_sha256: Digest,
    /// Positions scored.
    pub positions: u64,
    /// Sequences they come from.
    pub sequences: u64,
}

/// One module.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredModule {
    /// Weights it has.
    pub weights: u64,
    /// By the codec's name, as `affine-4g64`.
    pub candidates: BTreeMap<String, MeasuredCandidate>,
}

/// One module in one codec.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredCandidate {
    /// Mean KL gain, nats.
    pub kl: f64,
    /// Its standard error, sequences as clusters; null for one sequence.
    pub standard_error: Option<f64>,
    /// Bytes that the module takes.
    pub bytes: u64,
}

/// What one choice costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Nats, or a proxy's unit (see [`CostTable::measured`]).
    pub nats: f64,
    /// Standard error, if it is known.
    pub standard_error: Option<f64>,
}

/// Costs of the modules of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct CostTable {
    /// Name of the format it was read from.
    pub format: &'static str,
    /// Whether costs are measured, in nats; else only their proportions mean something.
    pub measured: bool,
    /// Basis it was measured in; `none` for the model's own.
    pub basis: String,
    /// By rule path.
    pub modules: BTreeMap<String, BTreeMap<CodecSpec, Cost>>,
}
