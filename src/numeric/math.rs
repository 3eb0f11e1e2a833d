//! Functions that are not one IEEE-754 operation, made of such operations: the same bits everywhere.
//!
//! The platform's own `exp`, `ln` and `sin` differ in the last bit between libraries, so none is used here.
//!
//! | function | over | error |
//! | --- | --- | --- |
//! | [`exp`], [`sigmoid`], [`silu`] | sixteen f32 lanes | below 2 units in the last place; exact limits |
//! | [`exp64`], [`ln64`], [`sin_cos64`], [`pow64`], [`softplus64`] | one f64 | about 1e-15 relative |
//!
//! Sources: Cody and Waite, *Software Manual for the Elementary Functions*, for the reductions; the
//! polynomials are Taylor's, long enough for the reduced range.

use super::lanes::Lanes;

/// log2(e).
const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts: the first has nine bits, so that its product with an exponent is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Added to a number of magnitude below 2^22, leaves its nearest integer in the low bits.
const ALIGN: f32 = 12_582_912.0;

/// `e^x` for each lane.
///
/// +infinity above 88.73, 0 below -104, NaN for NaN; subnormal results are rounded once more.
#[inline(always)]
pub fn exp<V: Lanes>(x: V) -> V {
    // Beyond these the result has been decided; they keep the exponent in range.
    let inside = x.max(V::splat(-110.0)).min(V::splat(90.0));
    let aligned = inside.fma(V::splat(LOG2_E), V::splat(ALIGN));
    let n = aligned.sub(V::splat(ALIGN));
    let r = n.fma(V::splat(-LN2_HIGH), inside);
    let r = n.fma(V::splat(-LN2_LOW), r);
    // Σ r^i / i!, |r| <= ln 2 / 2: the first term left out is below 2^-26.
    let mut sum = V::splat(1.0 / 5040.0);
    for term in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = sum.fma(r, V::splat(term));
    }
    // 2^n in two factors, because n may be as low as -159 or as high as 130.
    let half = n.mul(V::splat(0.5)).add(V::splat(ALIGN));
    let rest = n.sub(half.sub(V::splat(ALIGN))).add(V::splat(ALIGN));
    sum.mul(power(half)).mul(power(rest)).if_eq_self(x)
}

/// 2^n, for n + [`ALIGN`].
#[inline(always)]
fn power<V: Lanes>(aligned: V) -> V {
    aligned.shl::<23>().iadd(V::splat(1.0))
}

/// `1 / (1 + e^-x)` for each lane.
#[inline(always)]
pub fn sigmoid<V: Lanes>(x: V) -> V {
    V::splat(1.0).div(V::splat(1.0).add(exp(V::splat(0.0).sub(x))))
}

/// `x · sigmoid(x)` for each lane.
#[inline(always)]
pub fn silu<V: Lanes>(x: V) -> V {
    x.div(V::splat(1.0).add(exp(V::splat(0.0).sub(x))))
}

/// `e^x`.
pub fn exp64(x: f64) -> f64 {
    if x.is_nan() || x > 709.7 {
        return if x.is_nan() { x } else { f64::INFINITY };
    }
    if x < -745.2 {
        return 0.0;
    }
    const HIGH: f64 = 6.931_471_803_691_238e-1;
    const LOW: f64 = 1.908_214_929_270_587_7e-10;
    let n = (x * std::f64::consts::LOG2_E).round_ties_even();
    let r = (x - n * HIGH) - n * LOW;
    let mut sum = 1.0;
    for i in (1..=14).rev() {
        sum = 1.0 + sum * r / f64::from(i);
    }
    let half = (n as i64) / 2;
    sum * two_to(half) * two_to(n as i64 - half)
}

/// 2^n for an exponent of a normal number.
fn two_to(n: i64) -> f64 {
    f64::from_bits(((n + 1023) as u64) << 52)
}

/// The natural logarithm of a positive normal number; NaN for anything else.
pub fn ln64(x: f64) -> f64 {
    if !x.is_normal() || x < 0.0 {
        return f64::NAN;
    }
    let bits = x.to_bits();
    let mut n = (bits >> 52) as i64 - 1023;
    let mut m = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | (1023 << 52));
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        n += 1;
    }
    // ln m = 2 (s + s^3 / 3 + s^5 / 5 + ...), |s| <= 0.172.
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let mut sum = 0.0;
    for i in (0..=11).rev() {
        sum = sum * square + 1.0 / f64::from(2 * i + 1);
    }
    n as f64 * std::f64::consts::LN_2 + 2.0 * s * sum
}

/// `base^power` of a positive base.
pub fn pow64(base: f64, power: f64) -> f64 {
    exp64(power * ln64(base))
}

/// `ln(1 + e^x)`: `x` itself from 40 on, `e^x` below -40.
pub fn softplus64(x: f64) -> f64 {
    if x > 40.0 {
        x
    } else if x < -40.0 {
        exp64(x)
    } else if x > 0.0 {
        x + ln_1p(exp64(-x))
    } else {
        ln_1p(exp64(x))
    }
}

/// `ln(1 + y)`, 0 <= y <= 1.
fn ln_1p(y: f64) -> f64 {
    let s = y / (2.0 + y);
    let square = s * s;
    let mut sum = 0.0;
    // |s| <= 1/3: 9^-18 is below 2^-56.
    for i in (0..=17).rev() {
        sum = sum * square + 1.0 / f64::from(2 * i + 1);
    }
    2.0 * s * sum
}

/// Sine and cosine of an angle in radians of magnitude below 2^30; NaN beyond.
pub fn sin_cos64(x: f64) -> (f64, f64) {
    if x.is_nan() || x.abs() >= (1u64 << 30) as f64 {
        return (f64::NAN, f64::NAN);
    }
    // pi / 2 in three parts of 33 bits, so that the first two products are exact.
    const PARTS: [f64; 3] = [1.570_796_326_734_125_6, 6.077_100_506_303_966e-11, 2.022_266_248_795_950_6e-21];
    let n = (x * std::f64::consts::FRAC_2_PI).round_ties_even();
    let r = ((x - n * PARTS[0]) - n * PARTS[1]) - n * PARTS[2];
    let square = r * r;
    let (mut sin, mut cos) = (1.0, 1.0);
    for i in (1..=9).rev() {
        let i = f64::from(2 * i);
        sin = 1.0 - sin * square / (i * (i + 1.0));
        cos = 1.0 - cos * square / (i * (i - 1.0));
    }
    let sin = sin * r;
    match (n as i64).rem_euclid(4) {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::numeric::lanes::{Kernel, LANES, dispatch};

    struct Each<'a> {
        which: usize,
        x: &'a [f32],
    }

    impl Kernel for Each<'_> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run<V: Lanes>(self) -> Vec<f32> {
            let mut out = vec![0.0; self.x.len()];
            for (x, y) in self.x.as_chunks::<LANES>().0.iter().zip(out.as_chunks_mut::<LANES>().0) {
                let x = V::load(x);
                match self.which {
                    0 => exp(x),
                    1 => sigmoid(x),
                    _ => silu(x),
                }
                .store(y);
            }
            out
        }
    }

    /// Values of every magnitude that f32 has, and a fine grid where results are finite.
    fn samples() -> Vec<f32> {
        let mut x: Vec<f32> = (0..1 << 16).map(|i| f32::from_bits(i << 16 | 0x5a5a)).collect();
        x.extend((-1_100_000..900_000).map(|i| i as f32 * 1e-4));
        x.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 88.72, 88.73, -103.9, -104.1]);
        x.resize(x.len().next_multiple_of(LANES), 1.0);
        x
    }

    #[test]
    fn exp_sigmoid_and_silu_are_within_units_in_the_last_place_of_f64_and_alike_on_every_isa() {
        let x = samples();
        for which in 0..3 {
            let plain = dispatch(Isa::Scalar, Each { which, x: &x });
            for isa in Isa::available() {
                let here = dispatch(isa, Each { which, x: &x });
                let differ = here
                    .iter()
                    .zip(&plain)
                    .position(|(a, b)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan()));
                assert_eq!(differ, None, "{isa}");
            }
            for (x, y) in x.iter().zip(&plain) {
                let wide = f64::from(*x);
                let expected = match which {
                    0 => wide.exp(),
                    1 => 1.0 / (1.0 + (-wide).exp()),
                    _ => wide / (1.0 + (-wide).exp()),
                };
                if expected.is_nan() {
                    assert!(y.is_nan(), "{which} {x}: {y}");
                    continue;
                }
                if (expected as f32).is_infinite() || y.is_infinite() {
                    // The last representable results may fall on either side.
                    let near = f64::from(f32::MAX) * (1.0 - 1e-6);
                    assert!(f64::from(*y).abs() >= near && expected.abs() >= near, "{which} {x}: {y}");
                    continue;
                }
                let unit = f64::from((expected as f32).abs().max(f32::MIN_POSITIVE)) * 2f64.powi(-23);
                // e^-x overflows to infinity one step before the quotient vanishes.
                let error = (f64::from(*y) - expected).abs();
                assert!(
                    error <= 2.5 * unit || error < 1.2e-38 * wide.abs().max(1.0),
                    "{which} {x}: {y} is not {expected}"
                );
            }
        }
    }

    #[test]
    fn f64_functions_agree_with_the_platforms_to_some_units_in_the_last_place() {
        let close = |a: f64, b: f64, scale: f64| (a - b).abs() <= 4e-15 * scale.max(b.abs());
        for i in -200_000..200_000 {
            let x = f64::from(i) * 1.7e-3;
            assert!(close(exp64(x), x.exp(), 0.0), "exp {x}");
            let (sin, cos) = sin_cos64(x * 1003.0);
            let angle = x * 1003.0;
            assert!(close(sin, angle.sin(), 1.0) && close(cos, angle.cos(), 1.0), "sin, cos {angle}");
            assert!(close(softplus64(x), if x > 40.0 { x } else { x.exp().ln_1p() }, 0.0), "softplus {x}");
            if i > 0 {
                assert!(close(ln64(x), x.ln(), 1e-2), "ln {x}");
                assert!(close(pow64(1e7, -x / 340.0), 1e7f64.powf(-x / 340.0), 0.0), "pow {x}");
            }
        }
        assert_eq!((exp64(f64::NEG_INFINITY), exp64(f64::INFINITY)), (0.0, f64::INFINITY));
        assert!(exp64(f64::NAN).is_nan() && ln64(-1.0).is_nan() && ln64(0.0).is_nan());
    }
}
