//! Sums of rows: the product of a matrix with another that is stored by its own rows.
//!
//! out[r, n] = out[r, n] + Σ_m a[r, m] · b[m, n]            a: [R, M], b: [M, N], out: [R, N], rows strides apart
//!
//! Each output adds its terms in the order of m, fused with the sum and rounded once; sixteen lanes are sixteen
//! outputs. So it depends neither on the instruction set nor on the tile.

use crate::numeric::lanes::{LANES, Lanes};

/// Rows of a matrix, `stride` values apart.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    /// From the first value of the first row on.
    pub values: &'a [f32],
    /// Values from one row to the next.
    pub stride: usize,
}

impl<'a> Matrix<'a> {
    #[inline(always)]
    fn row(&self, r: usize) -> &'a [f32] {
        &self.values[r * self.stride..]
    }
}

/// Adds a · b to `out`; see the module's head. `n` must be a multiple of sixteen.
#[inline(always)]
pub fn combine<V: Lanes>(
    a: Matrix<'_>,
    b: Matrix<'_>,
    (rows, m, n): (usize, usize, usize),
    out: &mut [f32],
    stride: usize,
) {
    debug_assert!(n.is_multiple_of(LANES));
    let mut r = 0;
    while r < rows {
        let tall = rows - r >= 4;
        let mut at = 0;
        while at < n {
            let wide = n - at >= 4 * LANES;
            match (tall, wide) {
                (true, true) => tile::<V, 4, 4>(a, b, r, at, m, out, stride),
                (true, false) => tile::<V, 4, 1>(a, b, r, at, m, out, stride),
                (false, true) => tile::<V, 1, 4>(a, b, r, at, m, out, stride),
                (false, false) => tile::<V, 1, 1>(a, b, r, at, m, out, stride),
            }
            at += if wide { 4 * LANES } else { LANES };
        }
        r += if tall { 4 } else { 1 };
    }
}

#[inline(always)]
fn tile<V: Lanes, const R: usize, const N: usize>(
    a: Matrix<'_>,
    b: Matrix<'_>,
    r: usize,
    at: usize,
    m: usize,
    out: &mut [f32],
    stride: usize,
) {
    let mut sums = [[V::splat(0.0); N]; R];
    for (i, sums) in sums.iter_mut().enumerate() {
        let from = &out[(r + i) * stride + at..][..N * LANES];
        for (sum, lanes) in sums.iter_mut().zip(from.as_chunks::<LANES>().0) {
            *sum = V::load(lanes);
        }
    }
    for k in 0..m {
        let row = b.row(k)[at..][..N * LANES].as_chunks::<LANES>().0;
        for (i, sums) in sums.iter_mut().enumerate() {
            let term = V::splat(a.values[(r + i) * a.stride + k]);
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum = term.fma(V::load(value), *sum);
            }
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        let to = &mut out[(r + i) * stride + at..][..N * LANES];
        for (sum, lanes) in sums.iter().zip(to.as_chunks_mut::<LANES>().0) {
            sum.store(lanes);
        }
    }
}
