//! What the affine encoders share: MLX's parameters, and the coding of one group.

use super::QuantError;
use super::loss::Run;
use crate::codec::affine::pack;
use crate::numeric::lanes::{LANES, Lanes, round_to};
use crate::tensor::Float;

/// Added to a number from 0 to 255, rounds it to an integer, ties to even, and leaves that in the low byte.
const ROUNDER: f32 = 12_582_912.0; // 1.5 · 2^23

/// Weights in the largest group.
pub(super) const LARGEST_GROUP: usize = 128;

/// The greatest code.
#[inline(always)]
pub(super) const fn top(bits: u32) -> f32 {
    ((1u32 << bits) - 1) as f32
}

/// Least and greatest weight of a group.
#[inline(always)]
pub(super) fn range<V: Lanes>(group: &[f32]) -> (f32, f32) {
    let vectors = group.as_chunks::<LANES>().0;
    let mut low = V::load(&vectors[0]);
    let mut high = low;
    for vector in &vectors[1..] {
        let weights = V::load(vector);
        low = weights.min(low);
        high = weights.max(high);
    }
    (low.least(), high.greatest())
}

/// Scale and bias of sixteen groups, one per lane, before and after they are rounded to the stored dtype.
#[derive(Clone, Copy)]
pub(super) struct Parameters<V> {
    pub(super) scale: V,
    pub(super) bias: V,
    pub(super) stored_scale: V,
    pub(super) stored_bias: V,
}

impl<V: Lanes> Parameters<V> {
    /// MLX's choice, step for step as `mlx/backend/cpu/quantized.cpp` (0.32.4) has it.
    ///
    /// The edge, which is the weight of greatest magnitude, becomes code 0, and the step is bent so that
    /// 0 lies on the grid. A tie of magnitudes takes the greatest weight; the scale is then negative.
    #[inline(always)]
    pub(super) fn mlx<const BITS: u32>(low: V, high: V, float: Float) -> Self {
        let zero = V::splat(0.0);
        let on_low = |yes: V, no: V| high.abs().if_lt(low.abs(), yes, no);
        let step = high.sub(low).div(V::splat(top(BITS))).max(V::splat(1e-7));
        let step = on_low(step, zero.sub(step));
        let edge = on_low(low, high);
        let steps_to_zero = edge.div(step).rint();
        let bias = steps_to_zero.if_eq(zero, zero, edge);
        let scale = steps_to_zero.if_eq(zero, step, edge.div(steps_to_zero));
        Self { scale, bias, stored_scale: round_to(float, scale), stored_bias: round_to(float, bias) }
    }

    /// Refuses parameters that are infinite in the stored dtype; `first` is the index of lane 0's group.
    #[inline(always)]
    pub(super) fn check(&self, first: usize, groups_per_row: usize, float: Float) -> Result<(), QuantError> {
        let greatest = self.stored_scale.abs().max(self.stored_bias.abs()).greatest();
        if greatest < f32::INFINITY { Ok(()) } else { Err(self.overflow(first, groups_per_row, float)) }
    }

    #[inline(always)]
    fn overflow(&self, first: usize, groups_per_row: usize, float: Float) -> QuantError {
        let [mut scale, mut bias, mut stored_scale, mut stored_bias] = [[0.0; LANES]; 4];
        self.scale.store(&mut scale);
        self.bias.store(&mut bias);
        self.stored_scale.store(&mut stored_scale);
        self.stored_bias.store(&mut stored_bias);
        let finite = |lane: usize| stored_scale[lane].is_finite() && stored_bias[lane].is_finite();
        let lane = (0..LANES).find(|lane| !finite(*lane)).unwrap_or(0);
        let value = if stored_scale[lane].is_finite() { bias[lane] } else { scale[lane] };
        let (row, group) = ((first + lane) / groups_per_row, (first + lane) % groups_per_row);
        QuantError::ParameterOverflow { row, group, float, value }
    }
}

/// Nearest codes of sixteen positions on the grid, as numbers; their low bytes are in the second vector.
///
/// A position that is not a number becomes 0, as MLX's cast to an integer has it.
#[inline(always)]
pub(super) fn nearest<V: Lanes, const BITS: u32>(position: V) -> (V, V) {
    let clamped = position.max(V::splat(0.0)).min(V::splat(top(BITS)));
    let raised = clamped.add(V::splat(ROUNDER));
    (raised.sub(V::splat(ROUNDER)), raised)
}

/// How a group finds its codes, and what it stores.
#[derive(Clone, Copy)]
pub(super) struct Coding {
    /// Divisor (`DIVIDE`) or factor of `w − offset`.
    pub(super) by: f32,
    /// Where code 0 lies.
    pub(super) offset: f32,
    /// As a decoder reads it.
    pub(super) stored_scale: f32,
    /// As a decoder reads it.
    pub(super) stored_bias: f32,
}

/// Codes one group, packs the codes into `out`, and adds the error of what was stored to `run`.
#[inline(always)]
pub(super) fn encode_group<V: Lanes, const BITS: u32, const DIVIDE: bool>(
    group: &[f32],
    coding: Coding,
    out: &mut [u8],
    run: &mut Run<V>,
) {
    let (by, offset) = (V::splat(coding.by), V::splat(coding.offset));
    let (scale, bias) = (V::splat(coding.stored_scale), V::splat(coding.stored_bias));
    let mut codes = [0; LARGEST_GROUP];
    let codes = &mut codes[..group.len()];
    for (weights, codes) in group.as_chunks::<LANES>().0.iter().zip(codes.as_chunks_mut::<LANES>().0) {
        let weights = V::load(weights);
        let shifted = weights.sub(offset);
        let position = if DIVIDE { shifted.div(by) } else { shifted.mul(by) };
        let (code, raised) = nearest::<V, BITS>(position);
        *codes = raised.low_bytes();
        run.add(weights, code.mul(scale).add(bias));
    }
    pack::<V, BITS>(codes, out);
}
