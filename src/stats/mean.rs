//! Means of observations that come in clusters, and quantiles.

use serde::Serialize;

use super::{Interval, student_quantile, student_tail};

/// A mean and how well it is known.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Mean {
    /// Σ x / N over all observations.
    pub mean: f64,
    /// N.
    pub observations: u64,
    /// G, the clusters that hold any observation.
    pub clusters: u64,
    /// Robust to any dependence inside a cluster; `None` for one cluster.
    pub standard_error: Option<f64>,
    /// Student's, with G − 1 degrees of freedom; `None` for one cluster.
    pub interval: Option<Interval>,
}

impl Mean {
    /// Two-sided p of "the mean is 0", by Student's t with G − 1 degrees of freedom; `None` for one cluster.
    pub fn p_of_zero(&self) -> Option<f64> {
        let error = self.standard_error?;
        Some((2.0 * upper_p(self.mean.abs(), error, self.clusters as f64 - 1.0)).min(1.0))
    }
}

/// One-sided p of "what was estimated is at most 0". Without error the estimate is the truth.
pub(super) fn upper_p(estimate: f64, standard_error: f64, freedom: f64) -> f64 {
    if standard_error > 0.0 {
        student_tail(estimate / standard_error, freedom)
    } else if estimate > 0.0 {
        0.0
    } else {
        1.0
    }
}

/// Sums and counts for [`clustered_mean`] of values that lie cluster after cluster, of these lengths.
///
/// # Panics
/// If there are fewer values than the lengths call for.
pub fn in_clusters(values: &[f64], lengths: impl Iterator<Item = usize>) -> Vec<(f64, u64)> {
    let mut rest = values;
    let sum = |length: usize| {
        let own = rest.split_off(..length).expect("a value for each observation");
        (own.iter().sum(), own.len() as u64)
    };
    lengths.map(sum).collect()
}

/// The mean over all observations, whose clusters have (sum, count).
///
/// ```text
/// m   = Σ_g sum_g / N,   N = Σ_g count_g
/// SE² = G / (G − 1) · Σ_g (sum_g − m · count_g)² / N²                              (CR1)
/// m ± t(G − 1) · SE
/// ```
/// Clusters without observations are left out of G. `None` if there is no observation. `confidence` is in
/// (0, 1). Source: Liang and Zeger 1986; equals a regression on a constant with clustered errors in
/// statsmodels or Stata.
pub fn clustered_mean(clusters: &[(f64, u64)], confidence: f64) -> Option<Mean> {
    let observations: u64 = clusters.iter().map(|c| c.1).sum();
    if observations == 0 {
        return None;
    }
    let n = observations as f64;
    let mean = clusters.iter().map(|c| c.0).sum::<f64>() / n;
    let groups = clusters.iter().filter(|c| c.1 > 0).count() as u64;
    let freedom = groups as f64 - 1.0;
    let standard_error = (groups > 1).then(|| {
        let squares: f64 = clusters.iter().map(|&(sum, count)| (sum - mean * count as f64).powi(2)).sum();
        (groups as f64 / freedom * squares).sqrt() / n
    });
    let interval = standard_error.map(|error| {
        let half = student_quantile(0.5 + confidence / 2.0, freedom) * error;
        Interval { low: mean - half, high: mean + half }
    });
    Some(Mean { mean, observations, clusters: groups, standard_error, interval })
}

/// The quantile `q` in [0, 1] of values in ascending order, `None` if there are none.
///
/// Linear interpolation between order statistics: with h = (n − 1) q, x₍⌊h⌋₎ + (h − ⌊h⌋) (x₍⌊h⌋₊₁₎ − x₍⌊h⌋₎),
/// counted from 0. numpy's default, number 7 of Hyndman and Fan 1996.
pub fn quantile_of_sorted<T: Copy + Into<f64>>(sorted: &[T], q: f64) -> Option<f64> {
    let h = sorted.len().checked_sub(1)? as f64 * q;
    let below = h.floor();
    let (low, high) = (sorted[below as usize].into(), sorted[h.ceil() as usize].into());
    Some(if low == high { low } else { low + (h - below) * (high - low) })
}

/// The quantiles that instruments print.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Percentiles {
    /// The median.
    pub p50: f64,
    /// Nine of ten values are at most this.
    pub p90: f64,
    /// 99 of 100.
    pub p99: f64,
    /// 999 of 1000.
    pub p999: f64,
}

impl Percentiles {
    /// Of values in any order, `None` if there are none; n log n.
    pub fn of<T: Copy + Into<f64>>(values: &[T]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_unstable_by(|a, b| (*a).into().total_cmp(&(*b).into()));
        let at = |q| quantile_of_sorted(&sorted, q);
        Some(Self { p50: at(0.5)?, p90: at(0.9)?, p99: at(0.99)?, p999: at(0.999)? })
    }
}
