//! Shares, and the difference of two shares on the same items.

use serde::Serialize;

use super::{Binomial, Interval, Tost, bisect, normal_quantile, normal_tail};

/// Wilson's interval for the probability behind `k` successes in `n` trials.
///
/// ```text
/// (k + z²/2 ± z √(k (n − k) / n + z²/4)) / (n + z²)
/// ```
/// [0, 1] for n = 0. Source: Wilson 1927. No continuity correction.
pub fn wilson(k: u64, n: u64, confidence: f64) -> Interval {
    let z = normal_quantile(0.5 + confidence / 2.0);
    let (right, wrong) = (k as f64, n.saturating_sub(k) as f64);
    let total = (right + wrong).max(1.0);
    let half = z * (right * wrong / total + z * z / 4.0).sqrt();
    let end = |offset: f64| (right + z * z / 2.0 + offset) / (right + wrong + z * z);
    // Exactly 0 and 1 where the formula says so, whatever the rounding.
    Interval { low: if k == 0 { 0.0 } else { end(-half) }, high: if wrong == 0.0 { 1.0 } else { end(half) } }
}

/// How many items both, one or none of A and B got right.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Pairs {
    /// Right in A and B.
    pub both: u64,
    /// Right in A only.
    pub only_a: u64,
    /// Right in B only.
    pub only_b: u64,
    /// Right in neither.
    pub neither: u64,
}

impl Pairs {
    /// All items.
    pub fn n(self) -> u64 {
        self.both + self.only_a + self.only_b + self.neither
    }

    /// Share of `count` in all items; 0 without items.
    fn share(self, count: u64) -> f64 {
        count as f64 / self.n().max(1) as f64
    }

    /// Share right in B less share right in A; 0 without items.
    pub fn difference(self) -> f64 {
        (self.only_b as f64 - self.only_a as f64) / self.n().max(1) as f64
    }

    /// Share of items on which A and B disagree; 0 without items.
    pub fn discordance(self) -> f64 {
        self.share(self.only_a + self.only_b)
    }

    /// Two-sided p of "A and B are right equally often": McNemar's test in its exact form.
    ///
    /// min(1, 2 P(X <= min(only_a, only_b))), X ~ Binomial(only_a + only_b, 1/2). 1 if they never disagree.
    pub fn mcnemar(self) -> f64 {
        let tail = Binomial::new(self.only_a + self.only_b, 0.5).at_most(self.only_a.min(self.only_b));
        (2.0 * tail).min(1.0)
    }

    /// Interval for the difference: every d that the score test does not reject.
    ///
    /// [−1, 1] without items. Source: Tango 1998. It stays inside [−1, 1], has a width when A and B never
    /// disagree (where Wald's has none), and agrees with [`Pairs::tost`].
    pub fn interval(self, confidence: f64) -> Interval {
        let z = normal_quantile(0.5 + confidence / 2.0);
        let estimate = self.difference();
        Interval {
            low: bisect(-1.0, estimate, |d| self.score(d) > z),
            high: bisect(estimate, 1.0, |d| self.score(d) > -z),
        }
    }

    /// Are A and B right equally often, up to `margin`? By two score tests.
    ///
    /// p <= α exactly if [`Pairs::interval`] of confidence 1 − 2α lies inside ±`margin`.
    /// Sources: Schuirmann 1987, Tango 1998.
    pub fn tost(self, margin: f64) -> Tost {
        Tost::new(margin, normal_tail(self.score(-margin)), normal_tail(-self.score(margin)))
    }

    /// z of "the difference is `d`": √n (d̂ − d) / √V, V from [`restricted_variance`]. At d = 0 McNemar's z.
    fn score(self, d: f64) -> f64 {
        let variance = restricted_variance(self.share(self.only_b), self.share(self.only_a), d);
        let off = self.difference() - d;
        if off == 0.0 {
            0.0
        } else if variance > 0.0 {
            (self.n() as f64 / variance).sqrt() * off
        } else {
            off.signum() * f64::INFINITY
        }
    }
}

/// n times the variance of the difference of the shares, if it is truly `d`.
///
/// `up` and `down` are the shares seen in B only and in A only. q is the likeliest probability of "A only"
/// under the restriction that "B only" has q + d:
///
/// ```text
/// 2 q² + (2 d − (up + down) − (up − down) d) q − down · d (1 − d) = 0,   q >= 0
/// V = 2 q + d − d²
/// ```
/// Source: Tango 1998.
pub(super) fn restricted_variance(up: f64, down: f64, d: f64) -> f64 {
    if d < 0.0 {
        return restricted_variance(down, up, -d);
    }
    let linear = 2.0 * d - (up + down) - (up - down) * d;
    let constant = down * d * (1.0 - d);
    let root = (linear * linear + 8.0 * constant).sqrt();
    // The form without cancellation.
    let q = if linear < 0.0 {
        (root - linear) / 4.0
    } else if root > 0.0 {
        2.0 * constant / (root + linear)
    } else {
        0.0
    };
    2.0 * q + d - d * d
}
