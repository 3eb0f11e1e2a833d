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
    /// Changes of basis; null without any.
    pub transform: Option<TransformRecord>,
    /// What a budget chose beside an even choice; null without a budget, or where the recipe says `off`.
    pub compared: Option<ComparedRecord>,
    /// What weighed errors; null unless an encoder asks for that.
    pub calibration: Option<CalibrationRecord>,
    /// Bases that were measured; null unless the recipe asked for that.
    pub measured: Option<MeasuredRecord>,
    /// Who gave out codecs.
    pub allocator: String,
    /// How a budget was spent; null without one.
    pub allocation: Option<AllocationRecord>,
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

/// Changes of basis.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransformRecord {
    /// Version of the rules that they follow: `tqc-fold/1`.
    pub id: String,
    /// `model_type` of the family whose rules they are.
    pub family: String,
    /// Whether gains of norms went into their readers.
    pub gamma_fold: bool,
    /// What a gain of 1 is stored as: `one`, or `zero` in a zero-centred layout.
    pub gains: String,
    /// Whether the output head was given a matrix of its own.
    pub untied: bool,
    /// R1; null for the model's own basis.
    pub r1: Option<RotationRecord>,
    /// R2; null where value heads are as they were.
    pub r2: Option<RotationRecord>,
    /// Why there is no R2 beside R1; null if there is, or no R1.
    pub r2_reason: Option<String>,
    /// Channels that were balanced or put in order, by the recipe's keys.
    pub channels: Vec<String>,
    /// The draft head; null without one.
    pub draft: Option<DraftRecord>,
    /// The comparison with the source, before anything was rounded.
    pub parity: ParityRecord,
}

/// How a rotation was made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RotationRecord {
    /// As recipes spell it.
    pub kind: String,
    /// Where its signs or Gaussians start.
    pub seed: u64,
    /// Its width.
    pub width: u64,
    /// Width of a block on its diagonal.
    pub block: u64,
    /// Orders of the Hadamard cores of a block, the slowest index first; null without a Hadamard matrix.
    pub factors: Option<Vec<u32>>,
    /// The last factor is of order 2^k; null without a Hadamard matrix.
    pub sylvester_log2: Option<u32>,
    /// Searches for it; empty unless it was looked for.
    pub searches: Vec<SearchRecord>,
}

/// What a search for a rotation reached.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SearchRecord {
    /// `r1`, or `r2` and the path of the attention.
    pub name: String,
    /// Vectors that it saw.
    pub samples: u64,
    /// Steps it took.
    pub steps: u64,
    /// The objective at its start.
    pub before: f64,
    /// The objective at its end.
    pub after: f64,
}

/// How the draft head was folded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DraftRecord {
    /// The hidden state that it assumes: `post_norm`.
    pub feed: String,
    /// Typical size of that state.
    pub c: f64,
    /// Whether c was measured on the probe's tokens; else it is the size of the trunk's final gain.
    pub calibrated: bool,
    /// Gains that were moved away from 0.
    pub clamped: u64,
}

/// A folded model, unrounded, beside its source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParityRecord {
    /// Tokens compared.
    pub tokens: u64,
    /// `built-in`, or `drawn` for numbers where the source has no tokenizer.
    pub text: String,
    /// Digest of the tokens: canonical JSON of all sequences.
    pub tokens_sha256: Digest,
    /// Mean KL(source || folded), nats.
    pub mean_kl: f64,
    /// The largest.
    pub max_kl: f64,
    /// The largest difference of a logit.
    pub max_logit: f64,
    /// Root mean square of the source's logits.
    pub logit_size: f64,
    /// Tokens whose likeliest successor differs.
    pub flips: u64,
    /// The largest difference of the residual stream after any layer, relative to its size.
    pub max_stream: f64,
}

/// Bases that were measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredRecord {
    /// Name of the text's file, or `built-in`.
    pub text: String,
    /// Digest of its tokens.
    pub tokens_sha256: Digest,
    /// Positions scored.
    pub positions: u64,
    /// One row a basis.
    pub rows: Vec<MeasuredRow>,
    /// Bases that this model or recipe does not allow.
    pub skipped: Vec<SkippedRow>,
    /// Which one was taken.
    pub chosen: String,
}

/// A basis that was not measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct SkippedRow {
    pub basis: String,
    pub reason: String,
}

/// A basis that was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredRow {
    /// `none`, `hadamard`, `hadamard+r2`, `block-hadamard`, `optrot`.
    pub basis: String,
    /// Mean KL(source || quantized), nats.
    pub mean_kl: f64,
    /// Its standard error, sequences as clusters; null for one sequence.
    pub standard_error: Option<f64>,
    /// Positions whose likeliest successor agrees, over all.
    pub top1: f64,
    /// Bits per weight over all stored bytes.
    pub bits_per_weight: f64,
}

/// What weighed errors, and what came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CalibrationRecord {
    /// `text` or `hessians`.
    pub from: String,
    /// Name of the file, or `built-in`.
    pub name: String,
    /// SHA-256 of the file.
    pub sha256: Digest,
    /// The text's rows; null for a file of second moments.
    pub text: Option<CalibrationText>,
    /// `unrounded` or `sequential`: whose activations.
    pub activations: String,
    /// The rule for experts that saw too few tokens: `shared` or `nearest`.
    pub few_tokens: String,
    /// How many are too few.
    pub expert_tokens: u64,
    /// First damping, over the mean of the diagonal.
    pub damping: f64,
    /// Whether columns were visited in falling order of the diagonal.
    pub act_order: bool,
    /// Rounds of coordinate descent.
    pub sweeps: u32,
    /// One row a module, in the order of the source.
    pub modules: Vec<WeighedRecord>,
}

/// What came of all modules of a calibration.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CalibrationTotals {
    /// Modules whose errors were weighed.
    pub modules: u64,
    /// Their matrices: every expert has its own.
    pub matrices: u64,
    /// Modules that needed more than the first damping.
    pub damped: u64,
    /// Matrices that were rounded to nearest after all.
    pub fallbacks: u64,
    /// Experts that saw too few tokens.
    pub few: u64,
    /// tr(E H Eᵀ) / tr(W H Wᵀ) of what would stand in, on average over modules.
    pub nearest: f64,
    /// The same of what is stored.
    pub loss: f64,
    /// What is stored over what would stand in, on average over modules where that has a loss.
    pub ratio: f64,
}

impl CalibrationRecord {
    /// Counts and means over modules.
    pub fn totals(&self) -> CalibrationTotals {
        let modules = &self.modules;
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let of = |value: fn(&WeighedRecord) -> f64| mean(modules.iter().map(value).collect());
        let lossy = modules.iter().filter(|module| module.nearest > 0.0);
        CalibrationTotals {
            modules: modules.len() as u64,
            matrices: modules.iter().map(|module| module.experts.len().max(1) as u64).sum(),
            damped: modules.iter().filter(|m| m.damping.is_some_and(|d| d > self.damping)).count() as u64,
            fallbacks: modules.iter().map(|module| module.fallbacks).sum(),
            few: modules.iter().flat_map(|m| &m.experts).filter(|expert| expert.few).count() as u64,
            nearest: of(|module| module.nearest),
            loss: of(|module| module.loss),
            ratio: mean(lossy.map(|module| module.loss / module.nearest).collect()),
        }
    }
}

/// Rows that were calibrated on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CalibrationText {
    /// Digest of the tokens: canonical JSON of all rows.
    pub tokens_sha256: Digest,
    /// Rows.
    pub rows: u64,
    /// Tokens of all rows.
    pub tokens: u64,
    /// Most tokens of a row.
    pub context: u64,
    /// `documents` or `joined`.
    pub packing: String,
    /// Where the order of documents starts.
    pub seed: u64,
    /// Rows that are the beginning of a longer document.
    pub cut: u64,
    /// Documents of fewer than two tokens, which were left out.
    #[serde(default)]
    pub short: u64,
}

/// How errors of one module were weighed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeighedRecord {
    /// As rules name it.
    pub module: String,
    /// Tokens that its inputs were summed over; of all experts together.
    pub tokens: u64,
    /// The damping that held, over the mean of the diagonal; the largest of all experts; null where every expert was
    /// rounded to nearest.
    pub damping: Option<f64>,
    /// tr(E H Eᵀ) / tr(W H Wᵀ) of the encoder that stands in: `mlx` for `gptq`, `refit` for `gptq-refit`, `trellis`
    /// for `ldlq`.
    pub nearest: f64,
    /// The same of what was stored.
    pub loss: f64,
    /// Channels that no token used, over all experts.
    pub dead: u64,
    /// Why dampings were refused, with counts of experts.
    pub refused: BTreeMap<String, u64>,
    /// Matrices that were rounded to nearest after all.
    pub fallbacks: u64,
    /// One row an expert; empty for other modules.
    pub experts: Vec<ExpertRecord>,
    /// Where several columns of a trellis's tile cannot make up for each other, the expected loss over that of tiles of
    /// one column; the largest of all experts.
    #[serde(default)]
    pub tile_penalty: Option<f64>,
    /// Whether a file said what errors in outputs cost together: losses are then of tr(E H Eᵀ G).
    #[serde(default)]
    pub two_sided: bool,
}

/// What one expert saw.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertRecord {
    /// Tokens that went through it.
    pub tokens: u64,
    /// Whether these were too few, so that the rule for such experts was applied.
    pub few: bool,
}

/// How a budget was spent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllocationRecord {
    /// Name of the file of costs.
    pub sensitivity: String,
    /// Its digest.
    pub sensitivity_sha256: Digest,
    /// Its format.
    pub format: String,
    /// Whether its costs are measured, in nats; else only their proportions mean something.
    pub measured: bool,
    /// Basis it was measured in.
    pub basis: String,
    /// `exact` or `greedy`.
    pub method: String,
    /// The most that all weight files may take.
    pub budget_bytes: u64,
    /// Codecs there were to choose from, the narrowest first.
    pub candidates: Vec<String>,
    /// Modules whose codec was chosen.
    pub modules: u64,
    /// Modules without a cost, which kept the default.
    pub lacking: Vec<String>,
    /// What all weight files take.
    pub weight_file_bytes: u64,
    /// Sum of the costs of what was chosen.
    pub predicted_kl: f64,
    /// An even choice of the same budget.
    pub control: ControlRecord,
}

/// An even choice of a budget.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ControlRecord {
    /// What all weight files would take.
    pub weight_file_bytes: u64,
    /// Sum of its costs.
    pub predicted_kl: f64,
}

/// What a budget chose, beside an even choice of the same size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ComparedRecord {
    /// Name of the text's file, or `built-in`.
    pub text: String,
    /// Digest of its tokens.
    pub tokens_sha256: Digest,
    /// Positions scored.
    pub positions: u64,
    /// Prompts of the stop probe.
    pub prompts: u64,
    /// Runs of 13 tokens that the calibration text has too; null without a calibration text.
    pub shared_runs: Option<u64>,
    /// Mean KL of what was chosen less that of the even choice, nats.
    pub difference: f64,
    /// Its standard error, documents as clusters; null for one document.
    pub standard_error: Option<f64>,
    /// Whether what was chosen has no larger KL and no more empty answers.
    pub wins: bool,
    /// What was chosen.
    pub chosen: ComparedRow,
    /// The even choice.
    pub even: ComparedRow,
}

/// One of two choices.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ComparedRow {
    /// Mean KL(source || quantized), nats.
    pub mean_kl: f64,
    /// Its standard error; null for one document.
    pub standard_error: Option<f64>,
    /// Positions whose likeliest successor agrees, over all.
    pub top1: f64,
    /// Prompts after which it would end at once and the source would not.
    pub stops_at_once: u64,
    /// What P(end) gained after prompts, on average.
    pub p_end_gained: f64,
    /// Positions of the text where it would end and the source would not.
    pub early: u64,
    /// Positions where the source would end and it would not.
    pub passed_over: u64,
    /// What all weight files take.
    pub weight_file_bytes: u64,
    /// Bits per weight over all stored bytes.
    pub bits_per_weight: f64,
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
    /// Changes of layout and of basis on the way, in order.
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
