//! The sum of products that matrix products are made of.
//!
//! dot(x, w) = Σ_p Σ_l Σ_{k in panel p, k ≡ l (mod 16)} x[k] · w[k]
//!
//! Innermost, lane l adds its products in the order of k, each fused with the sum and rounded once; then the
//! sixteen lanes are added in halves ([`Lanes::sum`]); then panels of [`PANEL`] in their order. A last panel that
//! is not a multiple of sixteen is filled up with zeros. The order depends on the length alone, so a result does
//! not depend on the instruction set, on the tile it was computed in, or on how many rows x or w have.

use crate::isa::Isa;
use crate::numeric::lanes::{Kernel, LANES, Lanes, dispatch};

/// Products between two roundings of the panel's sum.
///
/// A tile of 4 x 4 with its operands in the first two caches does 258 GFLOP/s on one Zen 5 core at 512, and 246
/// at 1024, where a tile's rows leave the first-level cache no room; at 256 the sums of lanes would cost 12 %.
pub const PANEL: usize = 512;

/// Rows of w that stay in the first-level cache while rows of x pass.
pub(crate) const NEAR: usize = 16;

/// out[t · stride + n] = dot(x[t], w[n])                     x: [T, K], rows `x_stride` apart; w: [N, K] likewise
///
/// # Panics
/// If x, w or out is too short.
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
    V::call(Products { x, x_stride, t_count, w, w_stride, n_count, k, out, stride });
}

struct Products<'a> {
    x: &'a [f32],
    x_stride: usize,
    t_count: usize,
    w: &'a [f32],
    w_stride: usize,
    n_count: usize,
    k: usize,
    out: &'a mut [f32],
    stride: usize,
}

impl Kernel for Products<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self { x, x_stride, t_count, w, w_stride, n_count, k, out, stride } = self;
        if t_count == 0 || n_count == 0 {
            return;
        }
        let fits = |len: usize, rows: usize, stride: usize, row: usize| (rows - 1) * stride + row <= len;
        assert!(fits(x.len(), t_count, x_stride, k), "x holds {t_count} rows of {k}");
        assert!(fits(w.len(), n_count, w_stride, k), "w holds {n_count} rows of {k}");
        assert!(fits(out.len(), t_count, stride, n_count), "out holds {t_count} rows of {n_count}");
        let mut n = 0;
        while n < n_count {
            let rows = NEAR.min(n_count - n);
            let mut start = 0;
            // A sum of no products is 0.
            while start < k || start == 0 {
                let len = PANEL.min(k - start);
                // SAFETY: the rows and columns asked for lie inside x, w and out, as was asserted.
                unsafe {
                    let (x, w) = (x.as_ptr().add(start), w.as_ptr().add(n * w_stride + start));
                    let out = out.as_mut_ptr().add(n);
                    panel::<V>(x, x_stride, t_count, w, w_stride, rows, len, out, stride, start > 0);
                }
                start += PANEL;
            }
            n += rows;
        }
    }
}

/// Sets out[t · stride + n] to the sum of one panel's `len` products, or adds it.
///
/// # Safety
/// `t_count` rows of x, `n_count` rows of w and their places in out must be there, and nobody else may use
/// those places.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn panel<V: Lanes>(
    x: *const f32,
    x_stride: usize,
    t_count: usize,
    w: *const f32,
    w_stride: usize,
    n_count: usize,
    len: usize,
    out: *mut f32,
    stride: usize,
    add: bool,
) {
    // Sums, and a row of operands, fill half of the registers or a little more.
    let most = if V::IN_REGISTERS >= 32 { 4 } else { 2 };
    let mut t = 0;
    while t < t_count {
        let tall = (t_count - t).min(most);
        let mut n = 0;
        while n < n_count {
            let wide = if n_count - n >= most { most } else { 1 };
            // SAFETY: inside, by the caller's word, as t and n are.
            unsafe {
                let (x, w) = (x.add(t * x_stride), w.add(n * w_stride));
                let out = out.add(t * stride + n);
                match (tall, wide) {
                    (4, 4) if V::IN_REGISTERS >= 32 => {
                        tile::<V, 4, 4>(x, x_stride, w, w_stride, len, out, stride, add);
                    }
                    (3, 4) if V::IN_REGISTERS >= 32 => {
                        tile::<V, 3, 4>(x, x_stride, w, w_stride, len, out, stride, add);
                    }
                    (2, 4) if V::IN_REGISTERS >= 32 => {
                        tile::<V, 2, 4>(x, x_stride, w, w_stride, len, out, stride, add);
                    }
                    (1, 4) if V::IN_REGISTERS >= 32 => {
                        tile::<V, 1, 4>(x, x_stride, w, w_stride, len, out, stride, add);
                    }
                    (2, 2) => tile::<V, 2, 2>(x, x_stride, w, w_stride, len, out, stride, add),
                    (1, 2) => tile::<V, 1, 2>(x, x_stride, w, w_stride, len, out, stride, add),
                    _ => {
                        for t in 0..tall {
                            let (x, out) = (x.add(t * x_stride), out.add(t * stride));
                            tile::<V, 1, 1>(x, x_stride, w, w_stride, len, out, stride, add);
                        }
                    }
                }
            }
            n += wide;
        }
        t += tall;
    }
}

/// # Safety
/// `T` rows of x, `N` rows of w and their places in out must be there.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn tile<V: Lanes, const T: usize, const N: usize>(
    x: *const f32,
    x_stride: usize,
    w: *const f32,
    w_stride: usize,
    len: usize,
    out: *mut f32,
    stride: usize,
    add: bool,
) {
    let mut sums = [[V::splat(0.0); N]; T];
    let whole = len / LANES * LANES;
    let mut at = 0;
    while at < whole {
        // SAFETY: at + 16 <= len, inside each row.
        let load = |from: *const f32| V::load(unsafe { &*from.add(at).cast() });
        // Loops, not closures over arrays: what is not inlined would be compiled for the baseline.
        let mut ws = [V::splat(0.0); N];
        for (n, to) in ws.iter_mut().enumerate() {
            *to = load(w.wrapping_add(n * w_stride));
        }
        for (t, sums) in sums.iter_mut().enumerate() {
            let x = load(x.wrapping_add(t * x_stride));
            for (sum, w) in sums.iter_mut().zip(ws) {
                *sum = x.fma(w, *sum);
            }
        }
        at += LANES;
    }
    if whole < len {
        for (t, sums) in sums.iter_mut().enumerate() {
            for (n, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the rest of each row.
                let (x, w) = unsafe {
                    (
                        std::slice::from_raw_parts(x.add(t * x_stride + whole), len - whole),
                        std::slice::from_raw_parts(w.add(n * w_stride + whole), len - whole),
                    )
                };
                *sum = V::load_part(x).fma(V::load_part(w), *sum);
            }
        }
    }
    let mut totals = [0.0; LANES];
    if T * N <= 4 {
        for (total, sum) in totals.iter_mut().zip(sums.iter().flatten()) {
            *total = sum.sum();
        }
    } else {
        let mut all = [V::splat(0.0); LANES];
        for (to, sum) in all.iter_mut().zip(sums.iter().flatten()) {
            *to = *sum;
        }
        V::sums(all).store(&mut totals);
    }
    for t in 0..T {
        for n in 0..N {
            // SAFETY: a place in out.
            let out = unsafe { &mut *out.add(t * stride + n) };
            let total = totals[t * N + n];
            *out = if add { *out + total } else { total };
        }
    }
}

/// Rows of a matrix: row r starts at `r · stride`.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// The values from the first row's start on.
    pub values: &'a [f32],
    /// From one row's start to the next.
    pub stride: usize,
    /// How many.
    pub rows: usize,
}

/// out[t · stride + n] = Σ_p dot(x[t], w[n] over part p of k)                x: [T, K]  w: [N, K]
///
/// A part is 2048 columns: so many of some rows stay in the second-level cache. The parts' sums are added in
/// order, so up to 2048 columns this is [`products`].
///
/// # Panics
/// If x, w or out is too short, or this processor has no `isa`.
pub fn multiply(x: Strided<'_>, w: Strided<'_>, k: usize, out: &mut [f32], stride: usize, isa: Isa) {
    dispatch(isa, Multiply { x, w, k, out, stride });
}

struct Multiply<'a> {
    x: Strided<'a>,
    w: Strided<'a>,
    k: usize,
    out: &'a mut [f32],
    stride: usize,
}

impl Kernel for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        const DEEP: usize = 2048;
        let Self { x, w, k, out, stride } = self;
        products::<V>(x.values, x.stride, x.rows, w.values, w.stride, w.rows, k.min(DEEP), out, stride);
        if k <= DEEP {
            return;
        }
        let mut sums = vec![0.0; x.rows * w.rows];
        for start in (DEEP..k).step_by(DEEP) {
            let (from_x, from_w) = (&x.values[start..], &w.values[start..]);
            let len = DEEP.min(k - start);
            products::<V>(from_x, x.stride, x.rows, from_w, w.stride, w.rows, len, &mut sums, w.rows);
            for (out, sums) in out.chunks_mut(stride).zip(sums.chunks_exact(w.rows)) {
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out += sum;
                }
            }
        }
    }
}
