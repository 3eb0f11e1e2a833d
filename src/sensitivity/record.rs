//! The file: format `tqc-sensitivity/1`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::probe::{Done, Score};
use super::{SensitivityError, Task};
use crate::digest::{Digest, canonical_json};
use crate::eval::documents::tokens_digest;
use crate::plan::Plan;

/// Name and version of the format.
const FORMAT: &str = "tqc-sensitivity/1";

/// What each module costs in each codec.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sensitivity {
    /// Name and version of the format.
    pub format: String,
    /// The source.
    pub model: ModelMeasured,
    /// The basis that modules were rounded in: `none` is the model's own.
    pub basis: String,
    /// Who searched for codes; `mlx` where this one cannot fill the codec.
    pub encoder: String,
    /// The text.
    pub text: TextUsed,
    /// KL(source || the unrounded model in this basis), nats.
    pub base_kl: f64,
    /// Costs, by the path that rules match.
    pub modules: BTreeMap<String, ModuleCosts>,
}

/// The source of a measurement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelMeasured {
    /// As its config names it.
    pub model_type: String,
    /// SHA-256 of the canonical JSON of `[name, dtype, shape]` of every source tensor, sorted by name.
    pub tensors_sha256: Digest,
    /// SHA-256 of `config.json`.
    pub config_sha256: Digest,
}

/// The text of a measurement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextUsed {
    /// File name, or `built-in`.
    pub name: String,
    /// Digest of the tokens and their sequences' boundaries.
    pub tokens_sha256: Digest,
    /// Tokens, at each of which KL is taken.
    pub positions: usize,
    /// Sequences, each a document.
    pub sequences: usize,
}

/// One module's costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModuleCosts {
    /// Weights in it.
    pub weights: u64,
    /// Costs by codec.
    pub candidates: BTreeMap<String, Candidate>,
}

/// One module in one codec.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Candidate {
    /// Mean KL(source || the model with this module alone in the codec), nats.
    pub kl: f64,
    /// Of the mean, with documents as clusters; none for one document.
    pub standard_error: Option<f64>,
    /// Stored bytes of all planes.
    pub bytes: u64,
}

/// The file's content, all probes being done.
pub(super) fn record(task: &Task, done: &Done) -> Result<Sensitivity, SensitivityError> {
    let plan = &task.plan;
    let mut tensors: Vec<_> =
        plan.checkpoint.tensors().iter().map(|entry| (&entry.name, entry.dtype, &entry.shape)).collect();
    tensors.sort_by_key(|(name, ..)| *name);
    let path = plan.source.dir.join("config.json");
    let config = std::fs::read(&path).map_err(|error| SensitivityError::Config { path, error })?;
    let modules = task.modules.iter().map(|index| {
        let (module, path) = (&plan.modules[*index], plan.modules[*index].output.rule_path());
        let candidates = task.trials.iter().map(|(codec, trial)| {
            let Score { kl, standard_error } = done.scores[&path][&codec.to_string()];
            let bytes = trial.modules[*index].bytes();
            (codec.to_string(), Candidate { kl, standard_error, bytes })
        });
        let costs = ModuleCosts { weights: module.weights(), candidates: candidates.collect() };
        (path, costs)
    });
    Ok(Sensitivity {
        format: FORMAT.to_owned(),
        model: ModelMeasured {
            model_type: plan.model.model_type.clone(),
            tensors_sha256: Digest::of(&canonical_json(&tensors)),
            config_sha256: Digest::of(&config),
        },
        basis: basis(plan),
        encoder: task.encoder.to_owned(),
        text: TextUsed {
            name: task.text.clone(),
            tokens_sha256: tokens_digest(&task.sequences),
            positions: task.positions(),
            sequences: task.sequences.len(),
        },
        base_kl: done.base_kl.unwrap_or(0.0),
        modules: modules.collect(),
    })
}

/// `none`, or every change of basis by the word of its recipe: `hadamard+r2+key-balance`, `gamma-fold`.
fn basis(plan: &Plan) -> String {
    let Some(fold) = &plan.fold else { return "none".to_owned() };
    let mut parts: Vec<&str> = fold.residual.iter().map(|rotation| rotation.kind).collect();
    if parts.is_empty() && fold.gains {
        parts.push("gamma-fold");
    }
    parts.extend(fold.values.as_ref().map(|_| "r2"));
    parts.extend(fold.channels());
    parts.join("+")
}
