//! A symmetric matrix that grows by products of activations.

use std::ops::Range;
use std::sync::Mutex;

use super::panels::{self, PANEL_ROWS};
use crate::isa::Isa;
use crate::numeric::dot::{PANEL, Strided, multiply};
use crate::numeric::{Parallel, in_chunks};

/// Rows of the triangle that are computed together.
const STRIP: usize = 64;

/// Columns that they are computed for at a time: the operands of a tile stay in the second-level cache.
const WIDTH: usize = 256;

/// A symmetric n x n matrix of f32, of which the panels up to the diagonal are stored.
///
/// Panel p holds rows p·R to (p+1)·R − 1 (R = [`PANEL_ROWS`]; the last panel may be shorter), each with the
/// columns 0 to the panel's last row. Inside a panel's square on the diagonal both halves are stored.
#[derive(Debug, Clone, PartialEq)]
pub struct Symmetric {
    n: usize,
    values: Vec<f32>,
}

impl Symmetric {
    /// Zeros of order n.
    pub fn new(n: usize) -> Self {
        Self { n, values: vec![0.0; panels::len(n)] }
    }

    /// Bytes that a matrix of order n takes: 2 n² + 512 n, less what a short last panel saves.
    pub fn bytes(n: usize) -> u64 {
        4 * panels::len(n) as u64
    }

    /// The order.
    pub fn n(&self) -> usize {
        self.n
    }

    /// The stored values, panel by panel: all of the matrix that a checkpoint must keep.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The inverse of [`Symmetric::values`]; none if there are more or fewer than a matrix of order n has.
    pub fn from_values(values: Vec<f32>, n: usize) -> Option<Self> {
        (values.len() == panels::len(n)).then_some(Self { n, values })
    }

    /// From all n² values, row-major; those right of the diagonal are not read.
    ///
    /// # Panics
    /// If there are not n² values.
    pub fn from_full(full: &[f32], n: usize) -> Self {
        assert_eq!(full.len(), n * n, "values of a matrix of order {n}");
        Self::from_lower(n, |i, j| full[i * n + j])
    }

    /// From its values up to the diagonal: `get(i, j)` with j ≤ i.
    pub fn from_lower(n: usize, get: impl Fn(usize, usize) -> f32) -> Self {
        let mut out = Self::new(n);
        for (i, stride, row) in panels::strips(n, &mut out.values, 1) {
            for (j, value) in row.iter_mut().enumerate().take(stride) {
                *value = get(i.max(j), i.min(j));
            }
        }
        out
    }

    /// All n² values, row-major.
    pub fn to_full(&self) -> Vec<f32> {
        self.rows(0..self.n)
    }

    /// H[i, j]
    ///
    /// # Panics
    /// If i or j is not below n.
    pub fn get(&self, i: usize, j: usize) -> f32 {
        assert!(i < self.n && j < self.n, "({i}, {j}) of a matrix of order {}", self.n);
        self.values[panels::row(self.n, i.max(j)).0 + i.min(j)]
    }

    /// H[i, i] ← H[i, i] + more(i)
    pub fn add_to_diagonal(&mut self, more: impl Fn(usize) -> f32) {
        for i in 0..self.n {
            let at = panels::row(self.n, i).0 + i;
            self.values[at] += more(i);
        }
    }

    /// H[i, i] of each i.
    pub fn diagonal(&self) -> Vec<f32> {
        (0..self.n).map(|i| self.get(i, i)).collect()
    }

    /// The panel that row i lies in, from this row on: each row up to its own column and beyond, to the panel's
    /// last row.
    ///
    /// # Panics
    /// If i is not below n.
    pub fn lower(&self, i: usize) -> Strided<'_> {
        let ((at, stride), panel) = (panels::row(self.n, i), panels::rows(self.n, i / PANEL_ROWS));
        let rows = panel.end - i;
        Strided { values: &self.values[at..at + rows * stride], stride, rows }
    }

    /// Whole rows: `[range, n]`, row-major.
    ///
    /// # Panics
    /// If the range reaches beyond n.
    pub fn rows(&self, range: Range<usize>) -> Vec<f32> {
        let mut out = vec![0.0; range.len() * self.n];
        self.gather(range, &mut out);
        out
    }

    /// [`Symmetric::rows`] into memory that is there.
    ///
    /// # Panics
    /// If the range reaches beyond n, or `out` does not hold n values for each of its rows.
    pub fn gather(&self, range: Range<usize>, out: &mut [f32]) {
        const TOGETHER: usize = 16;
        let n = self.n;
        assert!(range.end <= n, "rows to {} of a matrix of order {n}", range.end);
        assert_eq!(out.len(), range.len() * n, "values of {} rows of {n}", range.len());
        for (i, row) in range.clone().zip(out.chunks_exact_mut(n)) {
            let (at, stride) = panels::row(n, i);
            row[..stride].copy_from_slice(&self.values[at..at + stride]);
        }
        // What lies right of a row's panel is in the rows of later panels.
        let first = range.start;
        for (s, rows) in out.chunks_mut(TOGETHER * n).enumerate() {
            let i = first + s * TOGETHER;
            let count = rows.len() / n;
            let ends = |r: usize| panels::rows(n, (i + r) / PANEL_ROWS).end;
            for j in ends(0)..n {
                let at = panels::row(n, j).0 + i;
                let from = &self.values[at..at + count.min(j - i)];
                for (r, value) in from.iter().enumerate() {
                    if j >= ends(r) {
                        rows[r * n + j] = *value;
                    }
                }
            }
        }
    }

    /// H[order[i], order[j]] at (i, j).
    ///
    /// # Panics
    /// If `order` does not hold n numbers below n.
    pub fn permuted(&self, order: &[usize], parallel: Parallel<'_>) -> Self {
        assert_eq!(order.len(), self.n, "places of a matrix of order {}", self.n);
        let mut out = Self::new(self.n);
        let strips: Vec<_> =
            panels::strips(self.n, &mut out.values, STRIP).into_iter().map(Mutex::new).collect();
        parallel(strips.len(), &|s| {
            let (first, stride, values) = &mut *strips[s].lock().expect("each strip is visited once");
            for (i, row) in values.chunks_exact_mut(*stride).enumerate() {
                for (value, from) in row.iter_mut().zip(order) {
                    *value = self.get(order[*first + i], *from);
                }
            }
        });
        drop(strips);
        out
    }

    /// H ← by H
    pub fn scale(&mut self, by: f32) {
        self.values.iter_mut().for_each(|value| *value *= by);
    }

    /// Whether no value is infinite or NaN.
    pub fn is_finite(&self) -> bool {
        self.values.iter().all(|value| value.is_finite())
    }

    /// H += xᵀ x                                                                  x: [T, n]
    ///
    /// Every 512 rows make one partial, a sum in the order of [`crate::numeric::dot`]; partials are added to H as
    /// they come. So rows that come in one call or in several give the same bits if each call but the last has
    /// a multiple of 512. Beside H this takes 2 KiB · n for the transposed rows.
    ///
    /// # Panics
    /// If `x` is not rows of n values, or this processor has no `isa`.
    pub fn add_products(&mut self, x: &[f32], isa: Isa, parallel: Parallel<'_>) {
        let n = self.n;
        if x.is_empty() {
            return;
        }
        assert!(x.len().is_multiple_of(n), "{} values are not rows of {n}", x.len());
        let mut transposed = vec![0.0; n * PANEL.min(x.len() / n)];
        for x in x.chunks(PANEL * n) {
            let t_count = x.len() / n;
            let transposed = &mut transposed[..n * t_count];
            in_chunks(parallel, transposed.chunks_mut(STRIP * t_count), &|c, columns| {
                let count = columns.len() / t_count;
                for (t, row) in x.chunks_exact(n).enumerate() {
                    for (i, value) in row[c * STRIP..][..count].iter().enumerate() {
                        columns[i * t_count + t] = *value;
                    }
                }
            });
            let columns = Columns { values: transposed, len: t_count };
            update_lower(n, &mut self.values, columns, Reach::Panel, isa, parallel, &|value, sum| {
                value + sum
            });
        }
    }
}

/// Columns of a matrix, each contiguous: column i starts at `i · len`.
#[derive(Clone, Copy)]
pub(super) struct Columns<'a> {
    pub(super) values: &'a [f32],
    pub(super) len: usize,
}

/// How far right of the diagonal an update goes.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Reach {
    /// To the panel's last row: both halves of the squares on the diagonal.
    Panel,
    /// As little as tiles allow.
    Diagonal,
}

/// H[i, j] ← change(H[i, j], dot(column i, column j)) in the first panels of a matrix of order n: those in `values`.
#[allow(clippy::too_many_arguments)]
pub(super) fn update_lower(
    n: usize,
    values: &mut [f32],
    columns: Columns<'_>,
    reach: Reach,
    isa: Isa,
    parallel: Parallel<'_>,
    change: &(impl Fn(f32, f32) -> f32 + Sync),
) {
    let len = columns.len;
    let strips: Vec<_> = panels::strips(n, values, STRIP).into_iter().map(Mutex::new).collect();
    let from =
        |column: usize, rows: usize| Strided { values: &columns.values[column * len..], stride: len, rows };
    parallel(strips.len(), &|s| {
        // The longest first.
        let (first, stride, values) =
            &mut *strips[strips.len() - 1 - s].lock().expect("each strip is visited once");
        let (first, stride) = (*first, *stride);
        let rows = values.len() / stride;
        let end = if reach == Reach::Panel { stride } else { first + rows };
        let mut sums = vec![0.0; rows * WIDTH];
        for column in (0..end).step_by(WIDTH) {
            let width = WIDTH.min(end - column);
            multiply(from(first, rows), from(column, width), len, &mut sums, WIDTH, isa);
            for (row, sums) in values.chunks_exact_mut(stride).zip(sums.chunks_exact(WIDTH)) {
                for (value, sum) in row[column..column + width].iter_mut().zip(sums) {
                    *value = change(*value, *sum);
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::tests::{Random, threads};
    use crate::numeric::serial;

    fn bits(matrix: &Symmetric) -> Vec<u32> {
        matrix.values().iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn sums_of_products_agree_with_f64_across_panels_and_ragged_ends() {
        for (n, t_count) in [(1, 1), (7, 3), (255, 40), (256, 16), (300, 513), (530, 20)] {
            let x = Random(n as u64).normals(t_count * n);
            let mut h = Symmetric::new(n);
            h.add_products(&x, Isa::best(), &serial);
            assert_eq!(h.values().len() as u64 * 4, Symmetric::bytes(n));
            let full = h.to_full();
            for (i, j) in (0..n).flat_map(|i| [0, i / 2, i, n - 1].map(|j| (i, j))) {
                let expected: f64 = x.chunks(n).map(|x| f64::from(x[i]) * f64::from(x[j])).sum();
                let size: f64 = x.chunks(n).map(|x| (f64::from(x[i]) * f64::from(x[j])).abs()).sum();
                // Sixteen lanes: no sum has more than T / 16 + 8 roundings.
                let tolerance = size * (t_count as f64 / 16.0 + 8.0) / f64::from(1 << 24);
                let found = f64::from(h.get(i, j));
                assert!((found - expected).abs() <= tolerance, "{n} {t_count} {i} {j}: {found} {expected}");
                assert_eq!(full[i * n + j].to_bits(), h.get(j, i).to_bits());
            }
        }
    }

    #[test]
    fn sums_have_the_same_bits_on_every_instruction_set_and_number_of_threads() {
        let n = 290;
        let x = Random(3).normals(700 * n);
        let sum = |isa, parallel: Parallel<'_>| {
            let mut h = Symmetric::new(n);
            h.add_products(&x, isa, parallel);
            h
        };
        let expected = sum(Isa::Scalar, &serial);
        for isa in Isa::available() {
            assert_eq!(bits(&sum(isa, &threads)), bits(&expected), "{isa}");
        }
        // Calls that end at a multiple of 512 rows change nothing.
        let mut parts = Symmetric::new(n);
        parts.add_products(&x[..512 * n], Isa::best(), &serial);
        parts.add_products(&x[512 * n..], Isa::best(), &serial);
        assert_eq!(bits(&parts), bits(&expected));
    }

    #[test]
    fn full_rows_values_and_permutations_say_the_same_matrix() {
        let n = 600;
        let value = |i: usize, j: usize| (i.max(j) * 1000 + i.min(j)) as f32;
        let full: Vec<f32> = (0..n * n).map(|at| value(at / n, at % n)).collect();
        let h = Symmetric::from_full(&full, n);
        assert_eq!(h.to_full(), full);
        for range in [0..1, 250..262, 100..600, 599..600, 300..300] {
            assert_eq!(h.rows(range.clone()), full[range.start * n..range.end * n], "{range:?}");
        }
        assert_eq!(Symmetric::from_values(h.values().to_vec(), n).as_ref(), Some(&h));
        assert_eq!(Symmetric::from_values(h.values().to_vec(), n + 1), None);
        assert_eq!(h.diagonal()[599], 599_599.0);
        let order: Vec<usize> = (0..n).map(|i| i * 7 % n).collect();
        let permuted = h.permuted(&order, &threads);
        for (i, j) in [(0, 0), (1, 599), (599, 1), (255, 256), (300, 300)] {
            assert_eq!(permuted.get(i, j), value(order[i], order[j]));
        }
        let lower = h.lower(300);
        assert_eq!((lower.rows, lower.values[lower.stride + 5]), (212, value(301, 5)));
    }
}
