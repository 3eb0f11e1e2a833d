//! Does the folded model compute what the source computes?
//!
//! Source and folded model, the latter with every weight in f32 as it goes into the quantizers, take the same tokens
//! layer by layer, side by side. After each layer the folded stream, turned back by R1ᵀ, must be the source's, and in
//! the end the logits must be. What is left is the rounding of f32.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::logits::side_by_side;
use super::{FoldError, Planned, Prepared, Probe, ProbeText, Watch};
use crate::artifact::provenance::ParityRecord;
use crate::backend::Precision;
use crate::backend::cpu::Cpu;
use crate::digest::{Digest, canonical_json};
use crate::failure::Outcome;
use crate::numeric::divergence::divergence;
use crate::plan::Plan;
use crate::runtime::{Stream, Weights};
use crate::transform::Rotation;

/// The largest mean KL in nats that rounding explains.
pub const MOST_KL: f64 = 1e-6;

/// The largest difference of a logit that rounding explains, for logits whose root mean square is at most 1; larger
/// ones may differ by as much more.
pub const MOST_LOGIT: f64 = 2e-3;

/// The largest difference of a layer's residual stream that rounding explains, over the stream's size.
pub const MOST_STREAM: f64 = 1e-3;

/// What a comparison found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Parity {
    /// Tokens compared.
    pub tokens: usize,
    /// Where they come from.
    pub text: ProbeText,
    /// Their digest.
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
    pub flips: usize,
    /// The largest difference of the residual stream after any layer, relative to its size; the embeddings are layer 0.
    pub max_stream: f64,
    /// The first layer that differs by more than rounding, counted from 1; 0 stands for the embeddings.
    pub first_layer: Option<usize>,
    /// Mean over tokens of 1 / rms of the source's final-normed hidden state.
    pub inverse_size: f64,
}

impl Parity {
    /// Whether rounding explains all of it.
    pub fn holds(&self) -> bool {
        let logit = MOST_LOGIT * self.logit_size.max(1.0);
        self.first_layer.is_none() && self.mean_kl <= MOST_KL && self.max_logit <= logit
    }

    /// As provenance has it.
    pub fn record(&self) -> ParityRecord {
        ParityRecord {
            tokens: self.tokens as u64,
            text: match self.text {
                ProbeText::BuiltIn => "built-in".to_owned(),
                ProbeText::Drawn => "drawn".to_owned(),
            },
            tokens_sha256: self.tokens_sha256,
            mean_kl: self.mean_kl,
            max_kl: self.max_kl,
            max_logit: self.max_logit,
            logit_size: self.logit_size,
            flips: self.flips as u64,
            max_stream: self.max_stream,
        }
    }

    /// In words.
    pub fn found(&self) -> String {
        let at = match self.first_layer {
            None => "no layer's residual stream differs".to_owned(),
            Some(0) => "the embeddings differ already".to_owned(),
            Some(layer) => format!("the first that differs is layer {}", layer - 1),
        };
        format!(
            "on {} tokens the mean KL is {:.3e} nats (at most {MOST_KL:.0e}), the largest difference of a logit {:.3e} \
             (at most {:.0e}), and {at}",
            self.tokens,
            self.mean_kl,
            self.max_logit,
            MOST_LOGIT * self.logit_size.max(1.0)
        )
    }
}

/// The name that a comparison is kept under.
const KEPT: &str = "parity";

/// [`compare`], unless `watch.keep` has a comparison that holds; what holds is kept. Plan and source decide all of it, so
/// a build that goes on, or that follows a comparison of budgets, need not take both models through their layers again.
///
/// # Errors
/// As [`compare`].
pub fn known(plan: &Arc<Plan>, prepared: &Arc<Prepared>, watch: Watch<'_>) -> Outcome<Parity> {
    let whole = |bytes: Vec<u8>| -> Option<Parity> {
        let (parity, sha256): (Parity, Digest) = serde_json::from_slice(&bytes).ok()?;
        (Digest::of(&canonical_json(&parity)) == sha256 && parity.holds()).then_some(parity)
    };
    if let Some(parity) = watch.keep.get(KEPT).and_then(whole) {
        return Ok(parity);
    }
    (watch.tell)("comparing with the source");
    let parity = compare(plan, prepared, watch)?;
    if parity.holds() {
        let sha256 = Digest::of(&canonical_json(&parity));
        watch.keep.put(KEPT, &canonical_json(&(&parity, sha256)));
    }
    Ok(parity)
}

/// Compares, and judges nothing. The plan stores f32.
///
/// # Errors
/// Errors of the runtime and of the source's tensors, and [`FoldError::Interrupted`].
pub fn compare(plan: &Arc<Plan>, prepared: &Arc<Prepared>, watch: Watch<'_>) -> Outcome<Parity> {
    let cpu = Cpu::new(plan.isa, plan.threads, Precision::Exact);
    let source = Weights::open_keeping(&plan.source.dir, &|name| plan.recipe.keeps(name))?;
    let folded = Planned::open(plan, prepared)?;
    let decoder = &source.decoder;
    let probe = Probe::new(&plan.source.dir, decoder.vocab, &decoder.media_tokens, decoder.context);
    let mut theirs = Stream::new(&source, cpu.clone(), &probe.sequences)?;
    let mut ours = Stream::new(&folded, cpu.clone(), &probe.sequences)?;
    let (mut max_stream, mut first_layer) = (0f64, None);
    let layers = decoder.layers.len();
    for layer in 0..=layers {
        if layer > 0 {
            (watch.tell)(&format!("comparing layer {layer} of {layers} with the source"));
            theirs.step(&mut ())?;
            ours.step(&mut ())?;
        }
        watch.check()?;
        if !theirs.residual().iter().all(|value| value.is_finite()) {
            let found = source.non_finite();
            return Err(found.map_or_else(|| FoldError::NotFinite { layer }.into(), Into::into));
        }
        let apart = distance(plan, prepared, theirs.residual(), ours.residual());
        max_stream = max_stream.max(apart);
        // A NaN is no small number either.
        if first_layer.is_none() && (apart.is_nan() || apart > MOST_STREAM) {
            first_layer = Some(layer);
        }
    }
    (watch.tell)("comparing logits with the source");
    let (theirs, ours) = (theirs.final_hidden()?, ours.final_hidden()?);
    let inverse_size = inverse_size(&theirs, decoder.hidden);
    let mut parity = Parity {
        tokens: probe.tokens(),
        text: probe.text,
        tokens_sha256: probe.digest(),
        mean_kl: 0.0,
        max_kl: 0.0,
        max_logit: 0.0,
        logit_size: 0.0,
        flips: 0,
        max_stream,
        first_layer,
        inverse_size,
    };
    side_by_side(&cpu, [&source, &folded], [&theirs, &ours], &mut |a, b| {
        let apart = divergence(a, b, plan.isa);
        let kl = apart.as_ref().map_or(f64::INFINITY, |apart| apart.kl);
        parity.mean_kl += kl;
        parity.max_kl = parity.max_kl.max(kl);
        parity.flips += usize::from(apart.is_none_or(|apart| apart.a_top != apart.b_top));
        for (a, b) in a.iter().zip(b) {
            let (a, b) = (f64::from(*a), f64::from(*b));
            let apart = (a - b).abs();
            parity.max_logit = parity.max_logit.max(if apart.is_nan() { f64::INFINITY } else { apart });
            parity.logit_size += a * a;
        }
    })?;
    let tokens = parity.tokens as f64;
    parity.mean_kl /= tokens;
    parity.logit_size = (parity.logit_size / (tokens * decoder.vocab as f64)).sqrt();
    Ok(parity)
}

/// ‖x - x' R1ᵀ‖ / ‖x‖ over all rows.
fn distance(plan: &Plan, prepared: &Prepared, theirs: &[f32], ours: &[f32]) -> f64 {
    let mut back = ours.to_vec();
    if let Some(rotation) = prepared.residual() {
        Rotation::unrotate_rows(rotation, &mut back, plan.model.hidden as usize, plan.isa, &mut Vec::new());
    }
    let (mut apart, mut size) = (0.0, 0.0);
    for (a, b) in theirs.iter().zip(&back) {
        let (a, b) = (f64::from(*a), f64::from(*b));
        apart += (a - b) * (a - b);
        size += a * a;
    }
    match (apart == 0.0, size == 0.0) {
        (true, _) => 0.0,
        (false, true) => f64::INFINITY,
        (false, false) => (apart / size).sqrt(),
    }
}

/// Mean over rows of 1 / rms; infinite if a row is zero.
fn inverse_size(hidden: &[f32], width: usize) -> f64 {
    let rows = hidden.chunks_exact(width).map(|row| {
        let squares: f64 = row.iter().map(|value| f64::from(*value) * f64::from(*value)).sum();
        1.0 / (squares / width as f64).sqrt()
    });
    let count = (hidden.len() / width).max(1) as f64;
    rows.sum::<f64>() / count
}
