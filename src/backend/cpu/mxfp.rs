//! Rows of mxfp4, mxfp8 and nvfp4: w[n, k] = value(code) · scale, rounded once.
//!
//! Where a table of sixteen is looked up in one operation, the values of a group's four-bit codes are scaled once
//! and looked up; the values are the same.

use super::rows::{Rows, STEP};
use crate::codec::mxfp::{Mxfp, e2m1_values, e4m3_values};
use crate::numeric::lanes::{LANES, Lanes};
use crate::numeric::{e2m1_to_f32, e4m3_to_f32, e8m0_to_f32, prefetch_line};

/// Bytes of codes asked for before they are needed.
const AHEAD: usize = 4096;

/// What the bytes of a scale mean.
static E8M0: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        values[byte] = e8m0_to_f32(byte as u8);
        byte += 1;
    }
    values
};
static E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        values[byte] = e4m3_to_f32(byte as u8);
        byte += 1;
    }
    values
};

/// The values of E2M1 codes.
static E2M1: [f32; LANES] = {
    let mut values = [0.0; LANES];
    let mut code = 0;
    while code < LANES {
        values[code] = e2m1_to_f32(code as u8);
        code += 1;
    }
    values
};

/// The planes of a weight with elements of `BITS` bits: E2M1 or E4M3.
#[derive(Debug, Clone, Copy)]
pub(super) struct MxfpRows<'a, const BITS: u32> {
    codes: &'a [u8],
    scales: &'a [u8],
    scale: &'static [f32; 256],
    group: usize,
    /// Groups in a row.
    groups: usize,
}

impl<'a, const BITS: u32> MxfpRows<'a, BITS> {
    /// # Panics
    /// Unless the planes hold `out_features` rows of `in_features`, and `BITS` is the codec's.
    pub fn new(codec: Mxfp, planes: [&'a [u8]; 2], out_features: usize, in_features: usize) -> Self {
        let ([codes, scales], group) = (planes, codec.group());
        let weights = out_features * in_features;
        assert_eq!(BITS as usize, codec.bits(), "bits of an element");
        assert!(in_features.is_multiple_of(group), "whole groups");
        assert_eq!(codes.len(), weights * BITS as usize / 8, "bytes of `weight`");
        assert_eq!(scales.len(), weights / group, "bytes of `scales`");
        let scale = match codec {
            Mxfp::Mxfp4 | Mxfp::Mxfp8 => &E8M0,
            Mxfp::Nvfp4 => &E4M3,
        };
        Self { codes, scales, scale, group, groups: in_features / group }
    }

    /// Where the code of weight [n, k] lies.
    #[inline(always)]
    fn at(&self, n: usize, k: usize) -> usize {
        n * (self.groups * self.group * BITS as usize / 8) + k * BITS as usize / 8
    }

    /// Scales of weights `[k, k + 16)` and `[k + 16, k + 32)`; the second as the first where the row ends.
    #[inline(always)]
    fn scales<V: Lanes>(&self, n: usize, k: usize) -> [V; 2] {
        let (first, last) = (n * self.groups, (n + 1) * self.groups - 1);
        // Of the first, or of the second too: mxfp has one for both.
        let low = V::splat(self.scale[usize::from(self.scales[first + k / self.group])]);
        if self.group == STEP {
            return [low; 2];
        }
        let index = (first + k / self.group + 1).min(last);
        [low, V::splat(self.scale[usize::from(self.scales[index])])]
    }

    #[inline(always)]
    fn values<V: Lanes>(packed: &[u8], group: [V; 2]) -> [V; 2] {
        let [low, high] = V::codes::<BITS>(packed);
        [Self::sixteen(low, group[0]), Self::sixteen(high, group[1])]
    }

    #[inline(always)]
    fn sixteen<V: Lanes>(codes: V, group: V) -> V {
        if BITS == 8 {
            e4m3_values(codes).mul(group)
        } else if V::PICKS {
            codes.pick(group)
        } else {
            e2m1_values(codes).mul(group)
        }
    }
}

impl<const BITS: u32> Rows for MxfpRows<'_, BITS> {
    /// For each half of a step, the scaled values of all codes, or the scale.
    type Group<V: Lanes> = [V; 2];

    #[inline(always)]
    fn group_len(&self) -> usize {
        STEP
    }

    #[inline(always)]
    unsafe fn group<V: Lanes>(&self, n: usize, g: usize) -> [V; 2] {
        let k = g * STEP;
        prefetch_line(self.codes.as_ptr().wrapping_add(self.at(n, k) + AHEAD));
        let [low, high] = self.scales::<V>(n, k);
        if V::PICKS && BITS == 4 { [V::load(&E2M1).mul(low), V::load(&E2M1).mul(high)] } else { [low, high] }
    }

    #[inline(always)]
    unsafe fn step<V: Lanes>(&self, n: usize, k: usize, group: [V; 2]) -> [V; 2] {
        let at = self.at(n, k);
        // SAFETY: the caller's word that these weights are there, and the lengths that `new` asserts.
        let packed = unsafe { self.codes.get_unchecked(at..at + STEP * BITS as usize / 8) };
        Self::values(packed, group)
    }

    #[inline(always)]
    fn rest<V: Lanes>(&self, n: usize, k: usize) -> [V; 2] {
        // Only nvfp4 leaves one: a group of sixteen.
        let mut packed = [0; STEP];
        packed[..LANES * BITS as usize / 8].copy_from_slice(&self.codes[self.at(n, k)..self.at(n + 1, 0)]);
        // SAFETY: `group` reads the scales of this step, the second of which it takes from the row's end.
        let group = unsafe { self.group::<V>(n, k / STEP) };
        let [low, _] = Self::values(&packed[..STEP * BITS as usize / 8], group);
        [low, V::splat(0.0)]
    }
}
