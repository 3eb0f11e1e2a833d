//! Where in the depth of a model a candidate leaves its teacher.
//!
//! After every layer both models' residual streams are read through their own final norm and head, and the two
//! distributions compared: a logit lens on both. A model whose residual stream was rotated folds the inverse into
//! norm and head, so the comparison holds for it too. The last layer's value is the KL of the outputs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;

use super::positions;
use crate::backend::cpu::Cpu;
use crate::eval::dump::Said;
use crate::eval::{EvalError, Progress};
use crate::failure::Outcome;
use crate::runtime::{Head, Stream, Weights};
use crate::stats::{CONFIDENCE, clustered_mean};

/// The divergence after a layer.
#[derive(Debug, Clone, Serialize)]
pub struct LayerKl {
    /// Layers done: 0 is the embedding alone.
    pub layer: usize,
    /// Mean KL, nats per token; null if no position is finite.
    pub mean_kl: Option<f64>,
    /// Its standard error, clustered by sequence.
    pub standard_error: Option<f64>,
    /// Positions whose logits are not finite on either side.
    pub non_finite: usize,
}

/// Rows whose logits are compared together.
const TOGETHER: usize = 64;

/// Takes `sequences` through both models.
///
/// # Errors
/// [`EvalError::OtherDepth`], [`EvalError::OtherVocabulary`], [`EvalError::Interrupted`], and those of the runtime.
pub fn layers(
    teacher: &Weights,
    candidate: &Weights,
    cpu: &Arc<Cpu>,
    sequences: &[Vec<u32>],
    stop: &AtomicBool,
    progress: &dyn Progress,
) -> Outcome<Vec<LayerKl>> {
    let (found, needed) = (candidate.decoder.layers.len(), teacher.decoder.layers.len());
    if found != needed {
        return Err(EvalError::OtherDepth { found, needed }.into());
    }
    let (found, needed) = (candidate.decoder.vocab, teacher.decoder.vocab);
    if found != needed {
        return Err(EvalError::OtherVocabulary { found, needed }.into());
    }
    let heads = [Head::open(teacher, cpu)?, Head::open(candidate, cpu)?];
    let mut streams =
        [Stream::new(teacher, cpu.clone(), sequences)?, Stream::new(candidate, cpu.clone(), sequences)?];
    let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
    let total = teacher.decoder.layers.len();
    let mut found = Vec::new();
    for layer in 0..=total {
        if stop.load(Ordering::Relaxed) {
            return Err(EvalError::Interrupted(format!("{layer} of {total} layers compared")).into());
        }
        if layer > 0 {
            for stream in &mut streams {
                stream.step(&mut ())?;
            }
        }
        found.push(compare(layer, &heads, [streams[0].residual(), streams[1].residual()], &lengths, cpu));
        progress.at(layer as u64, total as u64, "layers");
    }
    Ok(found)
}

fn compare(
    layer: usize,
    heads: &[Head; 2],
    residuals: [&[f32]; 2],
    lengths: &[usize],
    cpu: &Arc<Cpu>,
) -> LayerKl {
    let rows: usize = lengths.iter().sum();
    let mut kls = Vec::with_capacity(rows);
    for first in (0..rows).step_by(TOGETHER) {
        let count = TOGETHER.min(rows - first);
        let logits = |side: usize| heads[side].logits_of(residuals[side], first..first + count);
        let (teacher, candidate) = (logits(0), logits(1));
        let found = positions(cpu, &Said::Logits(teacher), &candidate, &vec![None; count]);
        kls.extend(found.iter().map(|position| position.kl));
    }
    let mut rest = kls.as_slice();
    let mut clusters = Vec::new();
    for length in lengths {
        let (own, after) = rest.split_at(*length);
        let finite = || own.iter().filter(|kl| !kl.is_nan());
        clusters.push((finite().map(|kl| f64::from(*kl)).sum(), finite().count() as u64));
        rest = after;
    }
    clusters.retain(|(_, count)| *count > 0);
    let mean = clustered_mean(&clusters, CONFIDENCE);
    LayerKl {
        layer,
        mean_kl: mean.as_ref().map(|mean| mean.mean),
        standard_error: mean.as_ref().and_then(|mean| mean.standard_error),
        non_finite: kls.iter().filter(|kl| kl.is_nan()).count(),
    }
}
