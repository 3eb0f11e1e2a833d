//! Equivalence: two one-sided tests.

use serde::Serialize;

use super::bootstrap::PairedCluster;
use super::mean::{clustered_mean, upper_p};

/// Is a difference inside ±`margin`?
///
/// Two one-sided tests; both must reject, so their larger p is the p of "the difference is `margin` or more,
/// one way or the other". p <= α proves equivalence at level α, as does a 1 − 2α interval inside ±`margin`.
/// Source: Schuirmann 1987.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Tost {
    /// The largest difference that does not matter, above 0.
    pub margin: f64,
    /// p of "the difference is at most −`margin`".
    pub p_lower: f64,
    /// p of "the difference is at least `margin`".
    pub p_upper: f64,
    /// The larger of both.
    pub p: f64,
}

impl Tost {
    pub(super) fn new(margin: f64, p_lower: f64, p_upper: f64) -> Self {
        Self { margin, p_lower, p_upper, p: p_lower.max(p_upper) }
    }
}

/// For the ratio of two means over the same clusters: is B inside A · (1 ± `margin`)?
///
/// Tests the means of b − (1 − margin) a and b − (1 + margin) a against 0, with clustered errors, so that the
/// noise in A is counted too and no ratio is ever formed. `None` below two clusters. Source: Fieller's method
/// as used by Hauschke and others 1999.
pub fn tost_ratio(clusters: &[PairedCluster], margin: f64) -> Option<Tost> {
    let p_above = |sign: f64, factor: f64| {
        let off: Vec<(f64, u64)> = clusters.iter().map(|c| (sign * (c.b - factor * c.a), c.count)).collect();
        let mean = clustered_mean(&off, super::CONFIDENCE)?;
        Some(upper_p(mean.mean, mean.standard_error?, mean.clusters as f64 - 1.0))
    };
    Some(Tost::new(margin, p_above(1.0, 1.0 - margin)?, p_above(-1.0, 1.0 + margin)?))
}
