//! The sum of products that everything on a CPU is made of.
//!
//! dot(x, w) = Σ_p Σ_l Σ_{k in panel p, k ≡ l (mod 16)} x[k] · w[k]
//!
//! Innermost, lane l adds its products in the order of k, each fused with the sum and rounded once; then the
//! sixteen lanes are added in halves ([`Lanes::sum`]); then panels of [`PANEL`] in their order. A last panel that
//! is not a multiple of sixteen is filled up with zeros. The order depends on the length alone, so a result does
//! not depend on the instruction set, on the tile it was computed in, or on how many rows x or w have.

use crate::numeric::lanes::{LANES, Lanes};

/// Products between two roundings of the panel's sum.
pub const PANEL: usize = 512;

/// out[t · stride + n] = dot(x[t], w[n])                     x: [T, K], rows `x_stride` apart; w: [N, K] likewise
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub fn products<V: Lanes>(
    x: &[f32],
    x_stride: usize,
    t_count: usize,
    w: &[f32],
    w_stride: usize,
    n_count: usize,
    k: usize,
    out: &mut [f32],
    stride: usize,
) {
    let mut t = 0;
    while t < t_count {
        let tall = t_count - t >= 4;
        let mut n = 0;
        while n < n_count {
            let wide = n_count - n >= 4;
            let (x, w, out) = (&x[t * x_stride..], &w[n * w_stride..], &mut out[t * stride + n..]);
            match (tall, wide) {
                (true, true) => tile::<V, 4, 4>(x, x_stride, w, w_stride, k, out, stride),
                (true, false) => tile::<V, 4, 1>(x, x_stride, w, w_stride, k, out, stride),
                (false, true) => tile::<V, 1, 4>(x, x_stride, w, w_stride, k, out, stride),
                (false, false) => tile::<V, 1, 1>(x, x_stride, w, w_stride, k, out, stride),
            }
            n += if wide { 4 } else { 1 };
        }
        t += if tall { 4 } else { 1 };
    }
}

#[inline(always)]
fn tile<V: Lanes, const T: usize, const N: usize>(
    x: &[f32],
    x_stride: usize,
    w: &[f32],
    w_stride: usize,
    k: usize,
    out: &mut [f32],
    stride: usize,
) {
    let mut start = 0;
    while start < k {
        let end = k.min(start + PANEL);
        let mut sums = [[V::splat(0.0); N]; T];
        let mut at = start;
        while at < end {
            let load = |from: &[f32]| match from[at..end].first_chunk::<LANES>() {
                Some(lanes) => V::load(lanes),
                None => V::load(&padded(&from[at..end])),
            };
            let ws: [V; N] = std::array::from_fn(|n| load(&w[n * w_stride..]));
            for (t, sums) in sums.iter_mut().enumerate() {
                let x = load(&x[t * x_stride..]);
                for (sum, w) in sums.iter_mut().zip(ws) {
                    *sum = x.fma(w, *sum);
                }
            }
            at += LANES;
        }
        for (t, sums) in sums.iter().enumerate() {
            for (n, sum) in sums.iter().enumerate() {
                let out = &mut out[t * stride + n];
                let sum = sum.sum();
                *out = if start == 0 { sum } else { *out + sum };
            }
        }
        start = end;
    }
}

/// Fewer than sixteen values and zeros.
#[inline(always)]
pub fn padded(values: &[f32]) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    lanes[..values.len()].copy_from_slice(values);
    lanes
}
