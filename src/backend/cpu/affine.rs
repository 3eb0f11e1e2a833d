//! Rows of the affine codec: w[n, k] = scale · code + bias, the product and the sum rounded once each.
//!
//! Where a table of sixteen is looked up in one operation and codes have at most four bits, a group's values are
//! computed once and looked up; the values are the same.

use super::rows::{Rows, STEP};
use crate::codec::affine::read_parameter;
use crate::numeric::lanes::{Lanes, iota};
use crate::numeric::prefetch_line;
use crate::tensor::Float;

/// Bytes of codes asked for before they are needed.
const AHEAD: usize = 4096;

/// The planes of a weight with codes of `BITS` bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct AffineRows<'a, const BITS: u32> {
    codes: &'a [u8],
    scales: &'a [u8],
    biases: &'a [u8],
    float: Float,
    group: usize,
    /// Groups in a row.
    groups: usize,
}

impl<'a, const BITS: u32> AffineRows<'a, BITS> {
    /// # Panics
    /// Unless the planes hold `out_features` rows of `in_features`.
    pub fn new(
        planes: [&'a [u8]; 3],
        float: Float,
        out_features: usize,
        in_features: usize,
        group: usize,
    ) -> Self {
        let [codes, scales, biases] = planes;
        let weights = out_features * in_features;
        assert!(in_features.is_multiple_of(group), "whole groups");
        assert_eq!(codes.len(), weights * BITS as usize / 8, "bytes of `weight`");
        assert_eq!(scales.len(), weights / group * float.bytes(), "bytes of `scales`");
        assert_eq!(biases.len(), weights / group * float.bytes(), "bytes of `biases`");
        Self { codes, scales, biases, float, group, groups: in_features / group }
    }
}

impl<const BITS: u32> Rows for AffineRows<'_, BITS> {
    /// The values of all codes, or scale and bias.
    type Group<V: Lanes> = [V; 2];

    #[inline(always)]
    fn group_len(&self) -> usize {
        self.group
    }

    #[inline(always)]
    unsafe fn group<V: Lanes>(&self, n: usize, g: usize) -> [V; 2] {
        let index = n * self.groups + g;
        prefetch_line(self.codes.as_ptr().wrapping_add(index * self.group * BITS as usize / 8 + AHEAD));
        let scale = V::splat(read_parameter(self.float, self.scales, index));
        let bias = V::splat(read_parameter(self.float, self.biases, index));
        if V::PICKS && BITS <= 4 { [iota::<V>().mul(scale).add(bias); 2] } else { [scale, bias] }
    }

    #[inline(always)]
    unsafe fn step<V: Lanes>(&self, n: usize, k: usize, group: [V; 2]) -> [V; 2] {
        let at = n * (self.groups * self.group * BITS as usize / 8) + k * BITS as usize / 8;
        // SAFETY: the caller's word that these weights are there, and the lengths that `new` asserts.
        let packed = unsafe { self.codes.get_unchecked(at..at + STEP * BITS as usize / 8) };
        let codes = V::codes::<BITS>(packed);
        let [low, high] = codes;
        if V::PICKS && BITS <= 4 {
            [low.pick(group[0]), high.pick(group[0])]
        } else {
            let value = |codes: V| codes.to_float().mul(group[0]).add(group[1]);
            [value(low), value(high)]
        }
    }

    #[inline(always)]
    fn rest<V: Lanes>(&self, _n: usize, _k: usize) -> [V; 2] {
        unreachable!("a row is whole groups, and a group whole steps")
    }
}
