//! What a number is worth: intervals, paired tests, equivalence, power.
//!
//! | question | function |
//! | --- | --- |
//! | how well is a mean over documents known? | [`clustered_mean`] |
//! | how large are the largest of many values? | [`Percentiles`] |
//! | how well is a share known? | [`wilson`] |
//! | do two models differ on the same questions, and by how much? | [`Pairs`] |
//! | do they differ on the same documents, and by how much? | [`paired_bootstrap`], [`Mean::p_of_zero`] |
//! | are they the same, for all that matters? | [`Pairs::tost`], [`tost_ratio`] |
//! | and if many were tried? | [`holm`] |
//! | what difference could have been seen at all? | [`smallest_difference`], [`items_to_see`] |
//!
//! `docs/statistics.md` has the formulas for users. Pure functions of their arguments; random draws are those
//! of ChaCha with 8 rounds from a stated seed. Sums run in the order of the arguments. Where there is no
//! answer (one cluster has no standard error) it is `None` and never NaN; arguments are finite.
//!
//! The normal and Student's distributions are those of `statrs`, which uses the platform's `ln` and `exp`:
//! between machines the last digits of an interval or p value may differ, never a count, a mean or a draw.

mod bootstrap;
mod distribution;
mod equivalence;
mod holm;
mod mean;
mod pairs;
mod power;

pub use bootstrap::{Bootstrap, PairedCluster, RESAMPLES, paired_bootstrap};
pub use distribution::{Binomial, normal_quantile, normal_tail, student_quantile, student_tail};
pub use equivalence::{Tost, tost_ratio};
pub use holm::holm;
pub use mean::{Mean, Percentiles, clustered_mean, in_clusters, quantile_of_sorted};
pub use pairs::{Pairs, wilson};
pub use power::{POWER, items_to_prove, items_to_see, power, smallest_difference};

/// The level of every interval that is printed.
pub const CONFIDENCE: f64 = 0.95;

/// A p value at most this large is called significant.
pub const ALPHA: f64 = 0.05;

/// From `low` to `high`; JSON: `[low, high]`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
#[serde(into = "[f64; 2]")]
pub struct Interval {
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

impl From<Interval> for [f64; 2] {
    fn from(interval: Interval) -> Self {
        [interval.low, interval.high]
    }
}

impl Interval {
    /// The shortest interval that holds both.
    pub fn hull(self, other: Self) -> Self {
        Self { low: self.low.min(other.low), high: self.high.max(other.high) }
    }
}

/// Where `holds` ends, between `low`, where it does, and `high`, where it does not: to 1e-14 of itself, or
/// 1e-15.
///
/// Goes to `high` if it holds everywhere and to `low` if nowhere.
fn bisect(mut low: f64, mut high: f64, holds: impl Fn(f64) -> bool) -> f64 {
    while high - low > 1e-15 + 1e-14 * high.abs().max(low.abs()) {
        let middle = low + (high - low) / 2.0;
        if holds(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low + (high - low) / 2.0
}
