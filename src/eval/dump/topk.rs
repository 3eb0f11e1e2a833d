//! The likeliest tokens of a position, instead of all.
//!
//! KL over them and one outcome for all others is a lower bound of KL over the whole vocabulary (merging outcomes
//! never adds divergence), and close to it where the others are improbable.

use crate::isa::Isa;
use crate::numeric::divergence::log_sum;
use crate::numeric::math::exp64;

/// Planes of the file.
pub const PLANES: [&str; 4] = ["ids", "log_probs", "log_sum", "rest"];

/// The likeliest tokens of a position, as far as they are known.
#[derive(Debug, Clone, PartialEq)]
pub struct Top {
    /// Their ids.
    pub ids: Vec<u32>,
    /// Their log-probabilities.
    pub log_probs: Vec<f32>,
    /// The probability of all others; none if it is not known.
    pub rest: Option<f32>,
}

impl Top {
    /// The `k` likeliest by `logits`, the likeliest first and the lower id first among equals; and ln Σ e^logit over
    /// all. None if a logit is not finite.
    pub fn of(logits: &[f32], k: usize, isa: Isa) -> Option<(Self, f64)> {
        let (log_sum, _) = log_sum(logits, isa)?;
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let before = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        if k < ids.len() {
            ids.select_nth_unstable_by(k, before);
            ids.truncate(k);
        }
        ids.sort_unstable_by(before);
        let log_prob = |id: &u32| f64::from(logits[*id as usize]) - log_sum;
        let known: f64 = ids.iter().map(|id| exp64(log_prob(id))).sum();
        let rest = if ids.len() == logits.len() { 0.0 } else { (1.0 - known).max(0.0) };
        let log_probs = ids.iter().map(|id| log_prob(id) as f32).collect();
        Some((Self { ids, log_probs, rest: Some(rest as f32) }, log_sum))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_come_first_and_the_rest_is_what_they_leave() {
        // Probabilities 1/10, 2/10, 4/10, 2/10, 1/10.
        let logits: Vec<f32> = [1f32, 2.0, 4.0, 2.0, 1.0].iter().map(|p| p.ln()).collect();
        let (top, log_sum) = Top::of(&logits, 3, Isa::best()).unwrap();
        assert_eq!(top.ids, [2, 1, 3]);
        assert!((log_sum - 10f64.ln()).abs() < 1e-6);
        assert!((top.rest.unwrap() - 0.2).abs() < 1e-6, "{top:?}");
        assert!((top.log_probs[0] - 0.4f32.ln()).abs() < 1e-6);
        assert_eq!(Top::of(&logits, 9, Isa::best()).unwrap().0.rest, Some(0.0));
    }
}
