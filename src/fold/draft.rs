//! The draft head in a stream of its own.
//!
//! The draft head reads the trunk's final-normed hidden state, which after the fold has lost the trunk's final gain
//! g_f; and the shared output head applies g_f where the draft head has its own final gain g_m. Its own residual stream
//! runs from `fc` to its last norm, so that stream may live in any diagonal basis. In the basis D = g_m / g_f the shared
//! head is right again, and `fc` supplies g_f:
//!
//! fc' = R1ᵀ D [ fc_e diag(g_e) R1 | fc_h diag(g_h · g_f / c) R1 ],  readers W diag(g / D) R1,  writers R1ᵀ diag(D) W
//!
//! with D scaled to a mean square of 1 and c the typical size of a final-normed hidden state. It is exact up to one
//! positive factor a token in each norm over the stream, since the size of D x is not that of x. Source: shared
//! derivation in `docs/transforms.md`, "The draft head".

use std::sync::Arc;

use super::data::Gains;
use crate::plan::{Plan, What};

/// Gains smaller than this part of their root mean square are not divided by.
const SMALLEST: f64 = 1e-3;

/// The draft head's basis.
#[derive(Debug, Clone)]
pub struct DraftFold {
    /// D.
    pub scale: Arc<[f64]>,
    /// c.
    pub c: f64,
    /// Whether c was measured on hidden states; else it is the size of g_f.
    pub calibrated: bool,
    /// How many factors of D were moved away from 0.
    pub clamped: usize,
    final_gain: Arc<[f64]>,
}

pub(super) fn rms(values: &[f64]) -> f64 {
    (values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64).sqrt()
}

/// `value`, or what is `least` away from 0 on its side.
fn away(value: f64, least: f64, clamped: &mut usize) -> f64 {
    if value.abs() >= least {
        return value;
    }
    *clamped += 1;
    if value < 0.0 { -least } else { least }
}

/// The basis of the plan's draft head, if it has one.
pub(super) fn fold(plan: &Plan, gains: &Gains) -> Option<DraftFold> {
    let steps = plan.modules.iter().flat_map(|module| &module.steps);
    let mut joins = steps.filter_map(|step| match &step.what {
        What::DraftJoin { embedding, .. } => embedding.rsplit_once('.').map(|(root, _)| root),
        _ => None,
    });
    let own = &gains[&format!("{}.norm", joins.next()?)];
    let final_gain = gains[&plan.model.final_norm].clone();
    let size = rms(&final_gain);
    let (mut clamped, least) = (0, SMALLEST * size.max(f64::MIN_POSITIVE));
    let ratio: Vec<f64> =
        own.iter().zip(&*final_gain).map(|(m, f)| m / away(*f, least, &mut clamped)).collect();
    let ratio_size = rms(&ratio).max(f64::MIN_POSITIVE);
    let scale = ratio.iter().map(|ratio| away(ratio / ratio_size, SMALLEST, &mut clamped)).collect();
    Some(DraftFold { scale, c: positive(size), calibrated: false, clamped, final_gain })
}

/// 1 for what is no size.
fn positive(size: f64) -> f64 {
    if size.is_finite() && size > 0.0 { size } else { 1.0 }
}

impl DraftFold {
    /// Takes the typical size of hidden states for c, if it is one.
    pub(super) fn calibrate(&mut self, c: f64) {
        if c.is_finite() && c > 0.0 {
            (self.c, self.calibrated) = (c, true);
        }
    }

    /// g / D.
    pub(super) fn reader(&self, gain: &[f64]) -> Arc<[f64]> {
        gain.iter().zip(&*self.scale).map(|(gain, scale)| gain / scale).collect()
    }

    /// The gains of `fc`'s two inputs, end to end.
    pub(super) fn join(&self, embedding: &[f64], hidden: &[f64]) -> Arc<[f64]> {
        let hidden = hidden.iter().zip(&*self.final_gain).map(|(own, trunk)| own * trunk / self.c);
        embedding.iter().copied().chain(hidden).collect()
    }
}
