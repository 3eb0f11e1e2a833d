//! A better scale and bias for the affine codec, by least squares.
//!
//! From several first guesses, alternate: nearest codes for the scale and bias that would be *stored*, then
//! the regression of w on those codes,
//!
//!   scale = (G Σqw − Σq Σw) / (G Σq² − (Σq)²),   bias = (Σw − scale Σq) / G          sums over a group of G
//!
//! with the scale rounded to the stored dtype before the bias is solved for. The guesses are MLX's parameters
//! and the group's range shrunk to 1, 0.9, 0.8 and 0.7. From 5 bits up, where the rounding of scale and bias
//! to 16 bits costs as much as that of the weights, scales beside the best one are tried last. Every pair met
//! on the way is judged by the error of what a decoder would read, and the best is kept.
//!
//! **Never worse than `mlx`, group by group.** Another pair replaces MLX's codes and parameters only if its
//! error, summed in f32, is below MLX's by more than 2^-14, which is more than rounding can account for. Groups
//! whose error under MLX is outside 2^±100 keep MLX's, since f32 sums say little there.
//!
//! Sixteen groups are worked on at once, one per lane, so a group's result does not depend on its neighbours.

use super::affine::{Coding, LARGEST_GROUP, Parameters, encode_group, nearest, range, top};
use super::loss::{RowSums, mend_out_of_range};
use super::{Grain, QuantError, Quantizer, Repairs, RowLoss, Rows, check_sizes};
use crate::codec::CodecSpec;
use crate::codec::affine::{with_bits, write_parameter};
use crate::isa::Isa;
use crate::numeric::lanes::{Kernel, LANES, Lanes, dispatch, round_to};
use crate::tensor::Float;

/// First guesses besides MLX's parameters: the group's range, shrunk about its middle.
const SHRINKS: [f32; 4] = [1.0, 0.9, 0.8, 0.7];

/// Regressions from each guess.
const ROUNDS: usize = 6;

/// Least width whose best scale is nudged. The gain on Gaussian rows (group 64, bf16) grows from 15.3 to 16.8 %
/// at 5 bits and from 13.1 to 16.5 % at 6.
const NUDGED_FROM_BITS: u32 = 5;

/// Nudges of the best scale, in units of its last place (of half of that, for mantissas above 1).
const NUDGES: [f32; 8] = [1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 4.0, -4.0];

/// What part of MLX's error another pair may have at most.
const MARGIN: f32 = 1.0 - 1.0 / 16384.0;

/// 2^100.
const TWO_POW_100: f32 = f32::from_bits((127 + 100) << 23);

/// The refining encoder.
pub(super) struct Refit;

impl Quantizer for Refit {
    fn id(&self) -> &'static str {
        "refit"
    }

    fn accepts(&self, codec: CodecSpec) -> bool {
        matches!(codec, CodecSpec::Affine { .. })
    }

    fn grain(&self, _matrix_rows: u64) -> Grain {
        Grain::Rows
    }

    fn fit(
        &self,
        codec: CodecSpec,
        rows: Rows<'_>,
        isa: Isa,
        planes: &mut [&mut [u8]],
        losses: &mut [RowLoss],
    ) -> Result<Repairs, QuantError> {
        check_sizes(codec, rows, planes, losses);
        let CodecSpec::Affine { bits, group } = codec else {
            panic!("`refit` does not accept {codec}: ask `accepts` first")
        };
        with_bits!(bits.get(), BITS => {
            dispatch(isa, Encode::<BITS> { group: group.get() as usize, rows, planes, losses })?
        });
        mend_out_of_range(codec, rows, planes, losses);
        Ok(Repairs::default())
    }
}

struct Encode<'a, 'p, const BITS: u32> {
    group: usize,
    rows: Rows<'a>,
    planes: &'a mut [&'p mut [u8]],
    losses: &'a mut [RowLoss],
}

impl<const BITS: u32> Kernel for Encode<'_, '_, BITS> {
    type Output = Result<(), QuantError>;

    #[inline(always)]
    fn run<V: Lanes>(self) -> Self::Output {
        let [weight, scales, biases] = self.planes else { unreachable!("sizes were checked") };
        let float = self.rows.float;
        let group_size = self.group;
        let groups_per_row = self.rows.in_features / group_size;
        let mut sums = RowSums::<V>::new(self.losses, self.rows.in_features);
        let mut packed = weight.chunks_exact_mut(group_size * BITS as usize / 8);
        let mut columns = [[0.0; LANES]; LARGEST_GROUP];
        let columns = &mut columns[..group_size];
        for (s, strip) in self.rows.values.chunks(LANES * group_size).enumerate() {
            let first = s * LANES;
            let [mut low, mut high] = [[0.0; LANES]; 2];
            for (g, group) in strip.chunks_exact(group_size).enumerate() {
                (low[g], high[g]) = range::<V>(group);
                for (column, weight) in columns.iter_mut().zip(group) {
                    column[g] = *weight;
                }
            }
            let (low, high) = (V::load(&low), V::load(&high));
            let mlx = Parameters::<V>::mlx::<BITS>(low, high, float);
            mlx.check(first, groups_per_row, float)?;
            let best = search::<V, BITS>(columns, None, low, high, mlx, float);

            let [mut by, mut offset, mut scale, mut bias, mut mine] = [[0.0; LANES]; 5];
            let choose = |refined: V, mlx: V| V::splat(0.5).if_lt(best.refined, refined, mlx);
            best.refined.store(&mut mine);
            choose(V::splat(1.0).div(best.scale), mlx.scale).store(&mut by);
            choose(best.bias, mlx.bias).store(&mut offset);
            choose(best.scale, mlx.stored_scale).store(&mut scale);
            choose(best.bias, mlx.stored_bias).store(&mut bias);
            for ((g, group), packed) in strip.chunks_exact(group_size).enumerate().zip(&mut packed) {
                write_parameter(float, scales, first + g, scale[g]);
                write_parameter(float, biases, first + g, bias[g]);
                let coding =
                    Coding { by: by[g], offset: offset[g], stored_scale: scale[g], stored_bias: bias[g] };
                if mine[g] == 1.0 {
                    encode_group::<V, BITS, false>(group, coding, packed, &mut sums.run);
                } else {
                    encode_group::<V, BITS, true>(group, coding, packed, &mut sums.run);
                }
                sums.advance(group_size);
            }
        }
        Ok(())
    }
}

/// The best pair of each lane so far.
pub(super) struct Best<V> {
    error: V,
    pub(super) scale: V,
    pub(super) bias: V,
    /// 1 where it is not MLX's.
    refined: V,
    /// Σe and Σq of its codes.
    e: V,
    q: V,
}

impl<V: Lanes> Best<V> {
    /// Takes a pair where it is better.
    #[inline(always)]
    fn meet(&mut self, scale: V, bias: V, fit: &Fit<V>) {
        let limit = self.error;
        self.scale = fit.error.if_lt(limit, scale, self.scale);
        self.bias = fit.error.if_lt(limit, bias, self.bias);
        self.refined = fit.error.if_lt(limit, V::splat(1.0), self.refined);
        self.e = fit.error.if_lt(limit, fit.e, self.e);
        self.q = fit.error.if_lt(limit, fit.q, self.q);
        self.error = fit.error.if_lt(limit, fit.error, limit);
    }
}

/// The best bias for `next_scale`, with the codes of `fit` unchanged.
#[inline(always)]
fn refit_bias<V: Lanes>(scale: V, bias: V, next_scale: V, e: V, q: V, count: V) -> V {
    bias.add(e.sub(next_scale.sub(scale).mul(q)).div(count))
}

/// Sums over the codes of one pair, each lane a group: e = w − decoded, q = code, each term times its weight.
struct Fit<V> {
    error: V,
    e: V,
    q: V,
    qq: V,
    qe: V,
}

/// Nearest codes under (`scale`, `bias`), and their sums.
///
/// `by` divides (`DIVIDE`) or multiplies; the codes are those of [`encode_group`]. Without `weights` each is 1.
#[inline(always)]
fn judge<V: Lanes, const BITS: u32, const DIVIDE: bool>(
    columns: &[[f32; LANES]],
    weights: Option<&[f32]>,
    by: V,
    offset: V,
    scale: V,
    bias: V,
) -> Fit<V> {
    let zero = V::splat(0.0);
    let mut fit = Fit { error: zero, e: zero, q: zero, qq: zero, qe: zero };
    for (c, column) in columns.iter().enumerate() {
        let value = V::load(column);
        let shifted = value.sub(offset);
        let position = if DIVIDE { shifted.div(by) } else { shifted.mul(by) };
        let (q, _) = nearest::<V, BITS>(position);
        let e = value.sub(q.mul(scale).add(bias));
        let weighted = |term: V| weights.map_or(term, |weights| term.mul(V::splat(weights[c])));
        let (weighted_e, weighted_q) = (weighted(e), weighted(q));
        fit.error = fit.error.add(weighted_e.mul(e));
        fit.e = fit.e.add(weighted_e);
        fit.q = fit.q.add(weighted_q);
        fit.qq = fit.qq.add(weighted_q.mul(q));
        fit.qe = fit.qe.add(weighted_q.mul(e));
    }
    fit
}

/// The best pair for sixteen groups, by Σ weight · e² over each one's columns.
#[inline(always)]
pub(super) fn search<V: Lanes, const BITS: u32>(
    columns: &[[f32; LANES]],
    weights: Option<&[f32]>,
    low: V,
    high: V,
    mlx: Parameters<V>,
    float: Float,
) -> Best<V> {
    let (zero, one, half) = (V::splat(0.0), V::splat(1.0), V::splat(0.5));
    let reference =
        judge::<V, BITS, true>(columns, weights, mlx.scale, mlx.bias, mlx.stored_scale, mlx.stored_bias)
            .error;
    // An error to beat of 0 cannot be beaten.
    let error = reference.if_lt(V::splat(TWO_POW_100), reference.mul(V::splat(MARGIN)), zero);
    let error = reference.if_lt(V::splat(1.0 / TWO_POW_100), zero, error);
    let mut best =
        Best { error, scale: mlx.stored_scale, bias: mlx.stored_bias, refined: zero, e: zero, q: zero };

    let count = V::splat(weights.map_or(columns.len() as f32, |weights| weights.iter().sum()));
    let middle = low.mul(half).add(high.mul(half));
    let reach = high.mul(half).sub(low.mul(half));
    for guess in 0..=SHRINKS.len() {
        let (mut scale, mut bias) = match guess.checked_sub(1) {
            None => (mlx.stored_scale, mlx.stored_bias),
            Some(shrink) => {
                let reach = reach.mul(V::splat(SHRINKS[shrink]));
                let step = reach.mul(V::splat(2.0 / top(BITS)));
                (round_to(float, step), round_to(float, middle.sub(reach)))
            }
        };
        for round in 0..=ROUNDS {
            let fit = judge::<V, BITS, false>(columns, weights, one.div(scale), bias, scale, bias);
            best.meet(scale, bias, &fit);
            if round == ROUNDS {
                break;
            }
            // The regression of the residual e on q gives the change of scale and bias.
            let spread = count.mul(fit.qq).sub(fit.q.mul(fit.q));
            let slope = count.mul(fit.qe).sub(fit.q.mul(fit.e)).div(spread);
            // All codes alike: only the bias can move.
            let slope = zero.if_lt(spread, slope, zero);
            let next_scale = round_to(float, scale.add(slope));
            let next_bias = round_to(float, refit_bias(scale, bias, next_scale, fit.e, fit.q, count));
            if next_scale.same_bits(scale) && next_bias.same_bits(bias) {
                break;
            }
            (scale, bias) = (next_scale, next_bias);
        }
    }
    let ulp = match float {
        Float::Bf16 => 1.0 / 256.0,
        Float::F16 => 1.0 / 2048.0,
        Float::F32 => return best,
    };
    if BITS >= NUDGED_FROM_BITS {
        for ulps in NUDGES {
            let nudge = V::splat(1.0 + ulps * ulp);
            let scale = round_to(float, best.scale.mul(nudge));
            let bias = round_to(float, refit_bias(best.scale, best.bias, scale, best.e, best.q, count));
            let fit = judge::<V, BITS, false>(columns, weights, one.div(scale), bias, scale, bias);
            best.meet(scale, bias, &fit);
        }
    }
    best
}
