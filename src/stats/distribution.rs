//! Tails and quantiles.
//!
//! | function | from | relative error against scipy |
//! | --- | --- | --- |
//! | [`normal_quantile`], [`normal_tail`] | `statrs` | 1e-9 |
//! | [`student_tail`] | `statrs` | 1e-12, or 1e-14 for each degree of freedom |
//! | [`student_quantile`] | bisection of the tail | the same |
//! | [`Binomial`] | its own recurrence | 1e-11 up to n = 10^6 |
//!
//! Not used of `statrs` 0.19: Student's quantile, off by 6e-5 at a million degrees of freedom, and the
//! binomial's tail, off by 2e-3 in the middle of n = 10^6 (its incomplete beta stops early).

use statrs::distribution::{ContinuousCDF, Normal, StudentsT};

use super::bisect;

/// x with P(Z <= x) = p, for p in [0, 1].
pub fn normal_quantile(p: f64) -> f64 {
    Normal::standard().inverse_cdf(p)
}

/// P(Z > x).
pub fn normal_tail(x: f64) -> f64 {
    Normal::standard().sf(x)
}

/// P(T > x) with `freedom` degrees of freedom, above 0 and perhaps infinite.
pub fn student_tail(x: f64, freedom: f64) -> f64 {
    StudentsT::new(0.0, 1.0, freedom).expect("callers have at least one degree of freedom").sf(x)
}

/// x with P(T <= x) = p, for p in (0, 1).
pub fn student_quantile(p: f64, freedom: f64) -> f64 {
    if p < 0.5 {
        return -student_quantile(1.0 - p, freedom);
    }
    let mut high = 2.0;
    while student_tail(high, freedom) > 1.0 - p {
        high *= 2.0;
    }
    bisect(0.0, high, |x| student_tail(x, freedom) > 1.0 - p)
}

/// The probabilities of k = 0 ... n with P(k) ∝ C(n, k) pᵏ (1 − p)ⁿ⁻ᵏ.
///
/// From the mode outwards by P(k + 1) / P(k) = (n − k) / (k + 1) · p / (1 − p) until they vanish beside the
/// mode's, then divided by their sum: four IEEE operations, so the same bits everywhere. About 40 standard
/// deviations are held, which is what f64 can tell from 0.
pub struct Binomial {
    first: u64,
    mass: Vec<f64>,
}

impl Binomial {
    /// `n` draws that are each a success with probability `p` in [0, 1].
    pub fn new(n: u64, p: f64) -> Self {
        let mode = (((n as f64 + 1.0) * p) as u64).min(n);
        let odds = p / (1.0 - p);
        let mut mass = Vec::new();
        let (mut k, mut weight) = (mode, 1.0);
        while k > 0 {
            weight *= k as f64 / ((n - k + 1) as f64 * odds);
            if weight == 0.0 {
                break;
            }
            mass.push(weight);
            k -= 1;
        }
        let first = k;
        mass.reverse();
        mass.push(1.0);
        (k, weight) = (mode, 1.0);
        while k < n {
            weight *= (n - k) as f64 * odds / (k + 1) as f64;
            if weight == 0.0 {
                break;
            }
            mass.push(weight);
            k += 1;
        }
        let middle = (mode - first) as usize;
        let sum = mass[..middle].iter().sum::<f64>() + mass[middle..].iter().rev().sum::<f64>();
        mass.iter_mut().for_each(|weight| *weight /= sum);
        Self { first, mass }
    }

    /// Each k whose probability f64 can hold, with it.
    pub fn probabilities(&self) -> impl Iterator<Item = (u64, f64)> {
        (self.first..).zip(self.mass.iter().copied())
    }

    /// P(X <= k).
    pub fn at_most(&self, k: u64) -> f64 {
        let held = (k + 1).saturating_sub(self.first).min(self.mass.len() as u64) as usize;
        self.mass[..held].iter().sum::<f64>().min(1.0)
    }

    /// P(X >= k).
    pub fn at_least(&self, k: u64) -> f64 {
        let below = k.saturating_sub(self.first).min(self.mass.len() as u64) as usize;
        self.mass[below..].iter().rev().sum::<f64>().min(1.0)
    }
}
