//! The file: format `tqc-sensitivity/1`.

use super::probe::{Done, Score};
use super::{SensitivityError, Task};
use crate::alloc::cost::{
    FORMAT, MeasuredCandidate, MeasuredModel, MeasuredModule, MeasuredText, Sensitivity,
};
use crate::digest::Digest;
use crate::plan::Plan;
use crate::text::documents::tokens_digest;

/// The file's content, all probes being done.
pub(super) fn record(task: &Task, done: &Done) -> Result<Sensitivity, SensitivityError> {
    let plan = &task.plan;
    let path = plan.source.dir.join("config.json");
    let config = std::fs::read(&path).map_err(|error| SensitivityError::Config { path, error })?;
    let modules = task.modules.iter().map(|index| {
        let (module, path) = (&plan.modules[*index], plan.modules[*index].output.rule_path());
        let candidates = task.candidates(*index).map(|(_, codec, trial)| {
            let Score { kl, standard_error } = done.scores[&path][&codec.to_string()];
            let bytes = trial.modules[*index].bytes();
            (codec.to_string(), MeasuredCandidate { kl, standard_error, bytes })
        });
        let costs = MeasuredModule { weights: module.weights(), candidates: candidates.collect() };
        (path, costs)
    });
    Ok(Sensitivity {
        format: FORMAT.to_owned(),
        model: MeasuredModel {
            model_type: plan.model.model_type.clone(),
            tensors_sha256: plan.checkpoint.shapes_digest(),
            config_sha256: Digest::of(&config),
        },
        basis: basis(plan),
        encoder: task.encoder.to_owned(),
        text: MeasuredText {
            name: task.text.clone(),
            tokens_sha256: tokens_digest(&task.sequences),
            positions: task.positions() as u64,
            sequences: task.sequences.len() as u64,
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
