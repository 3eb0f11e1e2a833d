//! Normal numbers that are the same everywhere: own quantile, own generator.

use crate::numeric::math::ln64;

/// What the tables of `rptc` and `random` begin with. Part of the format.
const SEED: u64 = 0x7471_635f_7472_656c;

/// Φ⁻¹((i + ½) / 2^L), i below 2^L, in a random order: `[2^L]`.
pub(super) fn shuffled_quantiles(states: u32) -> Vec<f32> {
    let count = 1u64 << states;
    let mut values: Vec<f32> = (0..count).map(|i| quantile((i as f64 + 0.5) / count as f64) as f32).collect();
    let mut random = SplitMix(SEED);
    // Fisher and Yates. The high half of a product instead of a remainder: biased by less than 2^-48.
    for last in (1..values.len()).rev() {
        let other = (u128::from(random.next()) * (last as u128 + 1)) >> 64;
        values.swap(last, other as usize);
    }
    values
}

/// Independent standard normal numbers: `[2^L]`.
pub(super) fn independent(states: u32) -> Vec<f32> {
    Normal::new(SEED).take(1 << states).collect()
}

/// Independent standard normal numbers without end: quantiles of random odd multiples of 2^-25.
///
/// The same on every machine; codebooks, measurements and tests draw from it.
#[derive(Debug, Clone)]
pub struct Normal(SplitMix);

impl Normal {
    /// Seeds that differ give sequences that have nothing in common.
    pub fn new(seed: u64) -> Self {
        Self(SplitMix(seed))
    }
}

impl Iterator for Normal {
    type Item = f32;

    fn next(&mut self) -> Option<f32> {
        let uniform = ((self.0.next() >> 40) as f64 + 0.5) / (1u64 << 24) as f64;
        Some(quantile(uniform) as f32)
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Debug, Clone)]
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Φ⁻¹(p), for p in [2^-34, 1 − 2^-34]; relative error about 1e-15.
///
/// Source: Wichura, algorithm AS 241 (1988), PPND16, without its branch for the far tail.
fn quantile(p: f64) -> f64 {
    const A: [f64; 8] = [
        3.387_132_872_796_366_5,
        133.141_667_891_784_38,
        1_971.590_950_306_551_3,
        13_731.693_765_509_46,
        45_921.953_931_549_87,
        67_265.770_927_008_7,
        33_430.575_583_588_13,
        2_509.080_928_730_122_7,
    ];
    const B: [f64; 8] = [
        1.0,
        42.313_330_701_600_91,
        687.187_007_492_057_9,
        5_394.196_021_424_751,
        21_213.794_301_586_597,
        39_307.895_800_092_71,
        28_729.085_735_721_943,
        5_226.495_278_852_854,
    ];
    const C: [f64; 8] = [
        1.423_437_110_749_683_5,
        4.630_337_846_156_546,
        5.769_497_221_460_691,
        3.647_848_324_763_204_5,
        1.270_458_252_452_368_4,
        0.241_780_725_177_450_6,
        0.022_723_844_989_269_184,
        7.745_450_142_783_414e-4,
    ];
    const D: [f64; 8] = [
        1.0,
        2.053_191_626_637_759,
        1.676_384_830_183_803_8,
        0.689_767_334_985_1,
        0.148_103_976_427_480_08,
        0.015_198_666_563_616_457,
        5.475_938_084_995_345e-4,
        1.050_750_071_644_416_9e-9,
    ];
    let rational = |r: f64, above: &[f64; 8], below: &[f64; 8]| {
        let horner = |terms: &[f64; 8]| terms.iter().rev().fold(0.0, |sum, term| sum * r + term);
        horner(above) / horner(below)
    };
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        return q * rational(0.180625 - q * q, &A, &B);
    }
    let tail = if q < 0.0 { p } else { 1.0 - p };
    let x = rational((-ln64(tail)).sqrt() - 1.6, &C, &D);
    if q < 0.0 { -x } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::normal_quantile;

    #[test]
    fn quantiles_are_those_of_the_statistics() {
        for i in 1..20_000 {
            let p = f64::from(i) / 20_000.0;
            let (found, expected) = (quantile(p), normal_quantile(p));
            assert!((found - expected).abs() < 1e-9, "{p}: {found} is not {expected}");
        }
        for power in [20, 25, 30, 34] {
            let p = 2f64.powi(-power);
            assert!((quantile(p) - normal_quantile(p)).abs() < 1e-8, "2^-{power}");
        }
        assert_eq!(quantile(0.25), -quantile(0.75));
    }

    #[test]
    fn shuffling_keeps_each_quantile_once() {
        let mut values = shuffled_quantiles(10);
        assert!(values.windows(2).any(|pair| pair[0] > pair[1]), "shuffled");
        values.sort_by(f32::total_cmp);
        for (i, value) in values.iter().enumerate() {
            assert_eq!(*value, quantile((i as f64 + 0.5) / 1024.0) as f32);
        }
    }

    #[test]
    fn the_generator_is_the_published_one() {
        // First outputs from seed 1234567, as in the reference implementation's test.
        let mut random = SplitMix(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }
}
