//! Paired bootstrap over clusters.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::Serialize;

use super::{Interval, quantile_of_sorted};

/// Resamples unless told otherwise.
pub const RESAMPLES: u32 = 10_000;

/// What two runs summed over the same observations of one cluster.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PairedCluster {
    /// Sum in A.
    pub a: f64,
    /// Sum in B.
    pub b: f64,
    /// Observations in each.
    pub count: u64,
}

/// What resampling says of a difference of means.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bootstrap {
    /// Quantiles of the resampled differences.
    pub interval: Interval,
    /// Two-sided p of "the difference is 0".
    pub p: f64,
    /// R.
    pub resamples: u32,
    /// Of the draws.
    pub seed: u64,
}

/// Σ (b − a) / Σ count over G clusters drawn with replacement from the G given, `resamples` (at least 1)
/// times.
///
/// ```text
/// interval: the (1 ∓ confidence) / 2 quantiles of d*                                    (percentile)
/// p = min(1, 2 (1 + min(#{d* <= 0}, #{d* >= 0})) / (R + 1))
/// ```
/// Clusters without observations are left out. `None` below two clusters. Each draw takes the next 32 bits x
/// of ChaCha8 seeded with `seed`: the index is the high half of x · G, and x is drawn again if the low half
/// is below 2³² mod G (Lemire 2019), so no index is favoured. 10 000 resamples of 1000 clusters take 0.1 s.
///
/// With few clusters p is too small: in 1500 simulated comparisons of equals 11 % had p <= 0.05 at G = 10 and
/// 7 to 11 % at G = 20. Use it with [`super::Mean::p_of_zero`], which keeps its 5 %. Source: Davison and
/// Hinkley 1997.
pub fn paired_bootstrap(
    clusters: &[PairedCluster],
    confidence: f64,
    resamples: u32,
    seed: u64,
) -> Option<Bootstrap> {
    let held: Vec<(f64, f64)> =
        clusters.iter().filter(|c| c.count > 0).map(|c| (c.b - c.a, c.count as f64)).collect();
    if held.len() < 2 {
        return None;
    }
    let groups = u32::try_from(held.len()).expect("a list of 2^32 documents does not fit in memory");
    let unfair = groups.wrapping_neg() % groups;
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut draw = || loop {
        let product = u64::from(random.next_u32()) * u64::from(groups);
        if product as u32 >= unfair {
            return held[(product >> 32) as usize];
        }
    };
    let mut differences: Vec<f64> = (0..resamples)
        .map(|_| {
            let (mut sum, mut count) = (0.0, 0.0);
            for _ in 0..groups {
                let (d, n) = draw();
                sum += d;
                count += n;
            }
            sum / count
        })
        .collect();
    differences.sort_unstable_by(f64::total_cmp);
    let not_above = differences.partition_point(|&d| d <= 0.0);
    let not_below = differences.len() - differences.partition_point(|&d| d < 0.0);
    let fewer = 1.0 + not_above.min(not_below) as f64;
    let end = |q| quantile_of_sorted(&differences, q);
    Some(Bootstrap {
        interval: Interval { low: end(0.5 - confidence / 2.0)?, high: end(0.5 + confidence / 2.0)? },
        p: (2.0 * fewer / (f64::from(resamples) + 1.0)).min(1.0),
        resamples,
        seed,
    })
}
