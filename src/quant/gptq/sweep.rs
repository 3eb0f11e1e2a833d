//! One sweep of coordinate descent over the codes of some rows, under the damped H.
//!
//! ```text
//! A = H + λ I,  L = e A eᵀ,  e = w − decode,  g = e A                       of one row
//! decode_k ← decode_k + δ:  L falls by δ (2 g_k − δ A_kk), most for δ = g_k / A_kk
//! ```
//!
//! Group by group, each column takes the code nearest to decode_k + g_k / A_kk. Then scale and bias move by (a, b)
//! with the codes as they are: over the group's columns P, with q = code − (2^bits − 1) / 2, which is exact,
//!
//! ```text
//! L falls by 2 (a Σ q g + c Σ g) − (a² q A_PP qᵀ + 2 a c q A_PP 1ᵀ + c² 1 A_PP 1ᵀ),   c = b + a (2^bits − 1) / 2
//! ```
//!
//! a is the best one, rounded so that the new scale is stored exactly; c, and so b, is the best one for that a. A
//! move is made only if L falls by more than a small part of its terms, which rounding does not account for. So the
//! damped loss never rises. Without λ, columns that H hardly weighs would grow to make up for the others: with
//! those of a thousandth of the others' size, scales came to twelve times those of plain rounding.

use super::super::Rows;
use super::super::affine::{nearest, top};
use super::PANEL;
use super::pass::State;
use crate::isa::Isa;
use crate::linalg::Symmetric;
use crate::numeric::dot::{Strided, multiply};
use crate::numeric::lanes::{Kernel, LANES, Lanes, round_to};
use crate::tensor::Float;

/// What part of a move's quadratic terms its gain must exceed: 2^-12.
const MARGIN: f32 = 1.0 / 4096.0;

/// The sweep, as a kernel.
pub(super) struct Sweep<'a, const BITS: u32> {
    pub(super) rows: Rows<'a>,
    pub(super) group: usize,
    pub(super) hessian: &'a Symmetric,
    /// λ
    pub(super) damping: f32,
    pub(super) isa: Isa,
    pub(super) state: &'a mut State,
}

/// Sixteen rows' values of a panel's columns: a lane is a row.
type Columns = [[f32; LANES]; PANEL];

impl<const BITS: u32> Kernel for Sweep<'_, BITS> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self { rows: Rows { values, in_features: k, float, .. }, group, hessian, damping, isa, state } =
            self;
        let (count, groups) = (values.len() / k, k / group);
        let zeros = || -> Columns { [[0.0; LANES]; PANEL] };
        let (mut w, mut e, mut g, mut q, mut hq) = (zeros(), zeros(), zeros(), zeros(), zeros());
        let mut gradient = vec![0.0; count * PANEL];
        let mut h_rows = vec![0.0; PANEL * k];
        let zero = V::splat(0.0);
        for first in (0..k).step_by(PANEL) {
            let width = PANEL.min(k - first);
            let h_rows = &mut h_rows[..width * k];
            hessian.gather(first..first + width, h_rows);
            let errors = Strided { values: &state.errors, stride: k, rows: count };
            let h = Strided { values: h_rows, stride: k, rows: width };
            multiply(errors, h, k, &mut gradient, PANEL, isa);
            // A among the panel's columns.
            let mut near = [[0.0; PANEL]; PANEL];
            for (c, (near, row)) in near.iter_mut().zip(h_rows.chunks_exact(k)).enumerate() {
                near[..width].copy_from_slice(&row[first..first + width]);
                near[c] += damping;
            }
            for row in (0..count).step_by(LANES) {
                let lanes = LANES.min(count - row);
                for columns in [&mut w, &mut e, &mut g, &mut q] {
                    columns.fill([0.0; LANES]);
                }
                for lane in 0..lanes {
                    let at = (row + lane) * k + first;
                    for c in 0..width {
                        w[c][lane] = values[at + c];
                        e[c][lane] = state.errors[at + c];
                        q[c][lane] = f32::from(state.codes[at + c]);
                        g[c][lane] = gradient[(row + lane) * PANEL + c] + damping * e[c][lane];
                    }
                }
                for start in (0..width).step_by(group) {
                    let end = start + group;
                    let [mut scales, mut biases] = [[0.0; LANES]; 2];
                    for lane in 0..lanes {
                        let at = (row + lane) * groups + (first + start) / group;
                        (scales[lane], biases[lane]) = (state.scales[at], state.biases[at]);
                    }
                    let (scale, bias) = (V::load(&scales), V::load(&biases));
                    for c in start..end {
                        let own = near[c][c];
                        if own <= 0.0 {
                            continue;
                        }
                        let (code, slope) = (V::load(&q[c]), V::load(&g[c]));
                        let now = code.mul(scale).add(bias);
                        let wanted = now.add(slope.div(V::splat(own)));
                        let (better, _) = nearest::<V, BITS>(wanted.sub(bias).div(scale));
                        let then = better.mul(scale).add(bias);
                        let change = then.sub(now);
                        let gain =
                            change.mul(slope.add(slope).sub(change.mul(V::splat(own * (1.0 + MARGIN)))));
                        let change = zero.if_lt(gain, change, zero);
                        if change.same_bits(zero) {
                            continue;
                        }
                        zero.if_lt(gain, better, code).store(&mut q[c]);
                        zero.if_lt(gain, V::load(&w[c]).sub(then), V::load(&e[c])).store(&mut e[c]);
                        give_way::<V>(&mut g[..width], change, &near[c]);
                    }
                    let moved = refit::<V, BITS>(&q[start..end], &g[start..end], &near, start, &mut hq);
                    let (next_scale, next_bias) = moved.rounded(scale, bias, float);
                    let gain = moved.gain(next_scale.sub(scale), next_bias.sub(bias));
                    let finite = V::splat(f32::MAX);
                    let gain = finite.if_lt(next_scale.abs(), zero, gain);
                    let gain = finite.if_lt(next_bias.abs(), zero, gain);
                    let next_scale = zero.if_lt(gain, next_scale, scale);
                    let next_bias = zero.if_lt(gain, next_bias, bias);
                    if next_scale.same_bits(scale) && next_bias.same_bits(bias) {
                        continue;
                    }
                    for c in start..end {
                        let code = V::load(&q[c]);
                        let now = code.mul(scale).add(bias);
                        let then = code.mul(next_scale).add(next_bias);
                        let error = V::load(&w[c]).sub(then);
                        zero.if_lt(gain, error, V::load(&e[c])).store(&mut e[c]);
                        give_way::<V>(&mut g[..width], zero.if_lt(gain, then.sub(now), zero), &near[c]);
                    }
                    next_scale.store(&mut scales);
                    next_bias.store(&mut biases);
                    for lane in 0..lanes {
                        let at = (row + lane) * groups + (first + start) / group;
                        (state.scales[at], state.biases[at]) = (scales[lane], biases[lane]);
                    }
                }
                for lane in 0..lanes {
                    let at = (row + lane) * k + first;
                    for c in 0..width {
                        state.errors[at + c] = e[c][lane];
                        state.codes[at + c] = q[c][lane] as u8;
                    }
                }
            }
        }
    }
}

/// g ← g − change · A[c, :] after decode_c has changed.
#[inline(always)]
fn give_way<V: Lanes>(g: &mut [[f32; LANES]], change: V, h: &[f32; PANEL]) {
    let less = V::splat(0.0).sub(change);
    for (g, h) in g.iter_mut().zip(h) {
        less.fma(V::splat(*h), V::load(g)).store(g);
    }
}

/// The quadratic that L is in a group's scale and bias.
struct Moved<V> {
    /// The best a, before anything is rounded.
    scale: V,
    middle: V,
    qg: V,
    sum_g: V,
    qhq: V,
    qh: V,
    sum_h: V,
}

/// The quadratic of one group, whose columns start at `start` of the panel.
#[inline(always)]
fn refit<V: Lanes, const BITS: u32>(
    q: &[[f32; LANES]],
    g: &[[f32; LANES]],
    near: &[[f32; PANEL]; PANEL],
    start: usize,
    hq: &mut [[f32; LANES]; PANEL],
) -> Moved<V> {
    let zero = V::splat(0.0);
    let middle = V::splat(top(BITS) / 2.0);
    let hq = &mut hq[..q.len()];
    hq.fill([0.0; LANES]);
    let mut sum_h = 0.0;
    for (c, code) in q.iter().enumerate() {
        let code = V::load(code).sub(middle);
        let h = &near[start + c][start..start + q.len()];
        for (hq, h) in hq.iter_mut().zip(h) {
            code.fma(V::splat(*h), V::load(hq)).store(hq);
        }
        let mut row = 0.0;
        for h in h {
            row += h;
        }
        sum_h += row;
    }
    let (mut qg, mut sum_g, mut qhq, mut qh) = (zero, zero, zero, zero);
    for ((code, g), hq) in q.iter().zip(g).zip(hq.iter()) {
        let (code, g, hq) = (V::load(code).sub(middle), V::load(g), V::load(hq));
        qg = code.fma(g, qg);
        sum_g = sum_g.add(g);
        qhq = code.fma(hq, qhq);
        qh = qh.add(hq);
    }
    let sum_h = V::splat(sum_h);
    // Codes that H cannot tell from a constant leave only the bias.
    let spread = qhq.mul(sum_h).sub(qh.mul(qh));
    let least = qhq.mul(sum_h).mul(V::splat(1e-5));
    let best = qg.mul(sum_h).sub(sum_g.mul(qh)).div(spread);
    Moved { scale: least.if_lt(spread, best, zero), middle, qg, sum_g, qhq, qh, sum_h }
}

impl<V: Lanes> Moved<V> {
    /// The best scale, rounded, and the bias that is best for it, rounded.
    #[inline(always)]
    fn rounded(&self, scale: V, bias: V, float: Float) -> (V, V) {
        let zero = V::splat(0.0);
        let next_scale = round_to(float, scale.add(self.scale));
        let a = next_scale.sub(scale);
        let c = self.sum_g.sub(a.mul(self.qh)).div(self.sum_h);
        let c = zero.if_lt(self.sum_h, c, zero);
        (next_scale, round_to(float, bias.add(c.sub(a.mul(self.middle)))))
    }

    /// By how much L falls, less a margin, if scale and bias change by a and b.
    #[inline(always)]
    fn gain(&self, a: V, b: V) -> V {
        let c = b.add(a.mul(self.middle));
        let (square_a, square_c) = (a.mul(a).mul(self.qhq), c.mul(c).mul(self.sum_h));
        let cross = a.mul(c).mul(self.qh);
        let quadratic = square_a.add(square_c).add(cross.add(cross));
        let linear = a.mul(self.qg).add(c.mul(self.sum_g));
        let margin = square_a.add(square_c).mul(V::splat(MARGIN));
        linear.add(linear).sub(quadratic).sub(margin)
    }
}
