//! How far one row of logits is from another: KL over the whole vocabulary.
//!
//! ```text
//! p = softmax(a), q = softmax(b), d[v] = ln q[v] - ln p[v]
//! KL(p || q) = Σ_v p[v] (e^d[v] - 1 - d[v])
//! ```
//!
//! which is the usual sum, because Σ p e^d = Σ q = 1. In this form every term is at least 0, and an error of the
//! normalisers moves it by its square only; so f32 lanes are enough, summed in f64. Equal rows give exactly 0.
//! Source: Schulman, *Approximating KL divergence* (2020), estimator k3, here summed over all outcomes.

use super::lanes::{Kernel, LANES, Lanes, dispatch};
use super::math::{exp, exp64, ln64};
use crate::isa::Isa;

/// What is asked about a pair of rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Divergence {
    /// KL(softmax(a) || softmax(b)), nats.
    pub kl: f64,
    /// ln Σ e^a.
    pub a_log_sum: f64,
    /// ln Σ e^b.
    pub b_log_sum: f64,
    /// The likeliest outcome by a, the first of equals.
    pub a_top: u32,
    /// The likeliest outcome by b.
    pub b_top: u32,
}

/// ln Σ e^x, and the first of the largest; none if a value is not finite.
///
/// # Panics
/// If the row is empty.
pub fn log_sum(row: &[f32], isa: Isa) -> Option<(f64, u32)> {
    let (greatest, top) = greatest(row)?;
    let sum = dispatch(isa, ExpSum { row, greatest });
    Some((f64::from(greatest) + ln64(sum), top))
}

/// Compares two rows of logits; none if a value is not finite.
///
/// # Panics
/// If the rows are empty or differ in length.
pub fn divergence(a: &[f32], b: &[f32], isa: Isa) -> Option<Divergence> {
    assert_eq!(a.len(), b.len(), "two rows over one vocabulary");
    let ((a_log_sum, a_top), (b_log_sum, b_top)) = (log_sum(a, isa)?, log_sum(b, isa)?);
    let shift = |row: &[f32], top: u32, log_sum: f64| {
        // ln p[v] = (x[v] - x[top]) - (log_sum - x[top]): both brackets are small where p is not.
        let top = row[top as usize];
        (top, (log_sum - f64::from(top)) as f32)
    };
    let kernel = KlSum { a, b, a_shift: shift(a, a_top, a_log_sum), b_shift: shift(b, b_top, b_log_sum) };
    Some(Divergence { kl: dispatch(isa, kernel).max(0.0), a_log_sum, b_log_sum, a_top, b_top })
}

/// The part of KL(p || q) that some outcomes make: Σ p (e^d - 1 - d) over them, with `ln_p` given, and `b` the
/// logits of the same outcomes in a row whose largest is `top` and whose ln Σ e^b is `log_sum`. Also their Σ q.
///
/// # Panics
/// If the lengths differ.
pub fn partial(ln_p: &[f32], b: &[f32], top: f32, log_sum: f64, isa: Isa) -> (f64, f64) {
    assert_eq!(ln_p.len(), b.len(), "the same outcomes");
    let rest = log_sum - f64::from(top);
    let kernel = KlSum { a: ln_p, b, a_shift: (0.0, 0.0), b_shift: (top, rest as f32) };
    let q = dispatch(isa, ExpSum { row: b, greatest: top }) * exp64(-rest);
    (dispatch(isa, kernel).max(0.0), q)
}

/// The largest value and its first place; none if a value is not finite.
fn greatest(row: &[f32]) -> Option<(f32, u32)> {
    let mut magnitude = 0;
    let mut best = f32::NEG_INFINITY;
    for value in row {
        magnitude = magnitude.max(value.to_bits() & 0x7fff_ffff);
        best = best.max(*value);
    }
    if magnitude >= f32::INFINITY.to_bits() {
        return None;
    }
    let top = row.iter().position(|value| *value == best).expect("a row has a largest value");
    Some((best, top as u32))
}

/// Σ e^(x - greatest): lane l adds x ≡ l (mod 16) in f64, then the lanes in order.
struct ExpSum<'a> {
    row: &'a [f32],
    greatest: f32,
}

impl Kernel for ExpSum<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<V: Lanes>(self) -> f64 {
        let (whole, rest) = self.row.as_chunks::<LANES>();
        let greatest = V::splat(self.greatest);
        let mut sum = V::wide_zero();
        for x in whole {
            sum = exp(V::load(x).sub(greatest)).wide_add(sum);
        }
        if !rest.is_empty() {
            // e^-infinity adds nothing.
            let mut last = [f32::NEG_INFINITY; LANES];
            last[..rest.len()].copy_from_slice(rest);
            sum = exp(V::load(&last).sub(greatest)).wide_add(sum);
        }
        V::wide_store(sum).iter().sum()
    }
}

struct KlSum<'a> {
    a: &'a [f32],
    b: &'a [f32],
    a_shift: (f32, f32),
    b_shift: (f32, f32),
}

impl Kernel for KlSum<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<V: Lanes>(self) -> f64 {
        let ((a, a_rest), (b, b_rest)) = (self.a.as_chunks::<LANES>(), self.b.as_chunks::<LANES>());
        let splat = |(top, log): (f32, f32)| (V::splat(top), V::splat(log));
        let (a_shift, b_shift) = (splat(self.a_shift), splat(self.b_shift));
        let mut sum = V::wide_zero();
        for (a, b) in a.iter().zip(b) {
            sum = terms(V::load(a), V::load(b), a_shift, b_shift).wide_add(sum);
        }
        if !a_rest.is_empty() {
            // Copies of an outcome that neither row finds possible: its term is 0.
            let padded = |row: &[f32], shift: (f32, f32)| {
                let mut last = [shift.0 - 200.0; LANES];
                last[..row.len()].copy_from_slice(row);
                V::load(&last)
            };
            let (a, b) = (padded(a_rest, self.a_shift), padded(b_rest, self.b_shift));
            sum = terms(a, b, a_shift, b_shift).wide_add(sum);
        }
        V::wide_store(sum).iter().sum()
    }
}

/// p (e^d - 1 - d). Near 0, where that cancels, by its series; elsewhere as q - p - p d, which does not overflow.
#[inline(always)]
fn terms<V: Lanes>(a: V, b: V, a_shift: (V, V), b_shift: (V, V)) -> V {
    let ln_p = a.sub(a_shift.0).sub(a_shift.1);
    let ln_q = b.sub(b_shift.0).sub(b_shift.1);
    let (p, d) = (exp(ln_p), ln_q.sub(ln_p));
    // Σ d^i / (i + 2)!, |d| < 1/2: the first term left out is below 2^-24 of the sum.
    let mut series = V::splat(1.0 / 40320.0);
    for term in [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
        series = series.fma(d, V::splat(term));
    }
    let near = p.mul(d).mul(d).mul(series);
    let far = exp(ln_q).sub(p).sub(p.mul(d));
    d.mul(d).if_lt(V::splat(0.25), near, far)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The textbook sum, in f64.
    fn reference(a: &[f32], b: &[f32]) -> (f64, f64) {
        let log_sum = |row: &[f32]| {
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            f64::from(most) + row.iter().map(|x| (f64::from(*x) - f64::from(most)).exp()).sum::<f64>().ln()
        };
        let (za, zb) = (log_sum(a), log_sum(b));
        let terms = a.iter().zip(b).map(|(a, b)| {
            let (ln_p, ln_q) = (f64::from(*a) - za, f64::from(*b) - zb);
            ln_p.exp() * (ln_p - ln_q)
        });
        (terms.sum(), za)
    }

    /// Values in (-1, 1) from a fixed linear congruential generator.
    fn noise(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32) / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn kl_agrees_with_the_textbook_sum_in_f64_for_small_and_large_distances() {
        for vocab in [1, 2, 15, 16, 17, 4096, 151_937] {
            for (spread, distance) in [(1.0, 0.0), (10.0, 1e-4), (10.0, 1e-2), (20.0, 1.0), (30.0, 30.0)] {
                let a: Vec<f32> = noise(vocab, 1).iter().map(|x| x * spread).collect();
                let b: Vec<f32> = a.iter().zip(noise(vocab, 2)).map(|(a, n)| a + n * distance).collect();
                let (kl, log_sum) = reference(&a, &b);
                let found = divergence(&a, &b, Isa::best()).unwrap();
                // f32 logits of magnitude `spread` are known to 2^-24 of it, and d is their difference.
                let tolerance = 1e-9 + 4e-6 * kl + (spread as f64 * 1.2e-7) * (kl.sqrt() + 1e-6) * 4.0;
                assert!((found.kl - kl).abs() <= tolerance, "{vocab} {spread} {distance}: {found:?} {kl}");
                assert!((found.a_log_sum - log_sum).abs() < 1e-6 * (1.0 + log_sum.abs()));
            }
        }
    }

    #[test]
    fn equal_rows_give_exactly_zero_and_every_instruction_set_the_same_bits() {
        let (a, b) = (noise(5000, 3), noise(5000, 4));
        for isa in Isa::available() {
            let same = divergence(&a, &a, isa).unwrap();
            assert_eq!(same.kl.to_bits(), 0.0f64.to_bits());
            assert_eq!(divergence(&a, &b, isa), divergence(&a, &b, Isa::Scalar), "{isa}");
        }
    }

    #[test]
    fn rows_that_are_not_finite_have_no_divergence_and_extreme_ones_do() {
        assert_eq!(divergence(&[0.0, f32::NAN], &[0.0, 1.0], Isa::best()), None);
        assert_eq!(divergence(&[0.0, 1.0], &[f32::INFINITY, 1.0], Isa::best()), None);
        // p = (1, 0) and q = (0, 1) but for e^-1000: ln p - ln q is 1000 where p is.
        let far = divergence(&[1000.0, 0.0], &[0.0, 1000.0], Isa::best()).unwrap();
        assert!((far.kl - 1000.0).abs() < 1e-3 * 1000.0, "{far:?}");
        assert_eq!((far.a_top, far.b_top), (0, 1));
    }

    #[test]
    fn the_first_of_equal_logits_is_the_likeliest() {
        assert_eq!(log_sum(&[1.0, 3.0, 3.0], Isa::best()).unwrap().1, 1);
    }
}
