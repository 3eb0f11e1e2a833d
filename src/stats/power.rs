//! What n paired items can show, at 5 % and with 80 % power.
//!
//! The test is exact McNemar, so its power is computed exactly as well, as long as few items are expected to
//! differ (n · discordance up to 300): there the test is far from its normal approximation, and below six
//! discordant items it never rejects, which is just what a user with a hundred items must hear. Beyond 300
//! the normal approximation with continuity correction takes over, which gives differences within 0.4 % of
//! the exact ones.

use super::pairs::restricted_variance;
use super::{ALPHA, Binomial, bisect, normal_quantile, normal_tail};

/// The power that is asked for.
pub const POWER: f64 = 0.8;

/// Up to so many discordant items expected, power is exact.
const EXACT: f64 = 300.0;

/// Probability that exact McNemar on `n` items has p <= 5 %.
///
/// `discordance` is the probability ψ that an item is right in one model only, `difference` d <= ψ that of B
/// only less that of A only.
///
/// ```text
/// exact:  Σ_D P(D) · P(X >= k(D) or X <= D − k(D)),  D ~ Binomial(n, ψ),  X ~ Binomial(D, (1 + d/ψ)/2)
///         k(D) the least k with 2 P(Binomial(D, 1/2) >= k) <= 0.05
/// normal: Φ((n d − 1 − z √(n ψ)) / √(n (ψ − d²)))
/// ```
/// Source: Connor 1987 for the normal formula, with Edwards's correction.
pub fn power(n: u64, discordance: f64, difference: f64) -> f64 {
    let expected = n as f64 * discordance;
    if expected <= 0.0 {
        return 0.0;
    }
    if expected > EXACT {
        let spread = (n as f64 * (discordance - difference * difference)).max(f64::MIN_POSITIVE).sqrt();
        let reach = n as f64 * difference - 1.0 - normal_quantile(1.0 - ALPHA / 2.0) * expected.sqrt();
        return 1.0 - normal_tail(reach / spread);
    }
    let share = (0.5 + difference / discordance / 2.0).min(1.0);
    let discordant = Binomial::new(n, discordance);
    // What is left out adds less than 1e-12.
    let likely = discordant.probabilities().filter(|&(_, p)| p > 1e-15);
    let rejected = likely.filter_map(|(d, p)| Some((d, p, critical(d)?))).map(|(d, p, k)| {
        let seen = Binomial::new(d, share);
        p * (seen.at_least(k) + seen.at_most(d - k))
    });
    rejected.sum()
}

/// The least count k of `discordant` items on one side that exact McNemar calls significant; none below six
/// items.
fn critical(discordant: u64) -> Option<u64> {
    let fair = Binomial::new(discordant, 0.5);
    let mut tail = 0.0;
    let mut least = None;
    let masses: Vec<(u64, f64)> = fair.probabilities().collect();
    for &(k, mass) in masses.iter().rev() {
        tail += mass;
        if 2.0 * tail > ALPHA {
            break;
        }
        least = Some(k);
    }
    least
}

/// The smallest difference of shares that `n` items show with 80 % power if A and B disagree on a share
/// `discordance` of them. `None` if `n` items show nothing at all.
///
/// A difference needs at least as much disagreement, so 0 asks for the best case: all disagreements one way.
/// No pair of models does better than that.
pub fn smallest_difference(n: u64, discordance: f64) -> Option<f64> {
    let enough = |d: f64| power(n, discordance.max(d), d) >= POWER;
    enough(1.0).then(|| bisect(0.0, 1.0, |d| !enough(d)))
}

/// How many items show `difference` with 80 % power, if A and B disagree on a share `discordance`. `None` if
/// it is not above 0.
pub fn items_to_see(difference: f64, discordance: f64) -> Option<u64> {
    let enough = |n: u64| power(n, discordance.max(difference), difference) >= POWER;
    if !(difference > 0.0 && difference <= 1.0) {
        return None;
    }
    let mut high = 1u64;
    while !enough(high) {
        high = high.checked_mul(2)?;
    }
    let mut low = high / 2;
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if enough(middle) {
            high = middle;
        } else {
            low = middle;
        }
    }
    Some(high)
}

/// How many items prove with 80 % power that two equals, which disagree on a share `discordance`, differ by
/// less than `margin`. `None` if it is not in (0, 1).
///
/// n = ((z₀.₉₅ √V(margin) + z₀.₉ √discordance) / margin)², V the restricted variance of
/// [`super::Pairs::tost`]. Normal approximation, like that test; each of the two tests fails with half of the
/// 20 %.
pub fn items_to_prove(margin: f64, discordance: f64) -> Option<u64> {
    if !(margin > 0.0 && margin < 1.0) {
        return None;
    }
    let variance = restricted_variance(discordance / 2.0, discordance / 2.0, margin);
    let level = normal_quantile(1.0 - ALPHA) * variance.sqrt();
    let chance = normal_quantile(1.0 - (1.0 - POWER) / 2.0) * discordance.sqrt();
    Some(((level + chance) / margin).powi(2).ceil() as u64)
}
