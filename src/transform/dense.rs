//! Rotations by any orthogonal matrix.
//!
//! ```text
//! R: [n, n], orthogonal
//! rows     x ← x R       y[j] = dot(x, column j of R)         inverse  x ← x Rᵀ
//! columns  c ← Rᵀ c      the same products                    inverse  c ← R c
//! ```
//!
//! `dot` is [`crate::numeric::dot`]'s, whose order depends on n alone: a vector has the same bits as a row
//! or as a column, wherever a matrix is cut, and on every instruction set. R is held twice, as it is and
//! transposed, so that both directions read it along rows: 8 n² bytes.

use std::fmt;

use super::hadamard::SignWords;
use super::runs;
use crate::isa::Isa;
use crate::numeric::dot::products;
use crate::numeric::lanes::{Kernel, Lanes, dispatch};
use crate::numeric::math::{ln64, sin_cos64};

/// An orthogonal matrix and its transpose.
#[derive(Clone)]
pub struct Dense {
    n: usize,
    matrix: Vec<f32>,
    transposed: Vec<f32>,
}

impl fmt::Debug for Dense {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dense").field("n", &self.n).finish_non_exhaustive()
    }
}

impl Dense {
    /// The rotation by `matrix`, row-major `[n, n]`, of which the caller knows that it is orthogonal.
    ///
    /// # Panics
    /// If n is 0 or the matrix does not hold n² values.
    pub fn new(matrix: Vec<f32>, n: usize) -> Self {
        assert!(n > 0 && matrix.len() == n * n, "{} values are not a matrix of order {n}", matrix.len());
        let mut transposed = vec![0.0; n * n];
        for (j, to) in transposed.chunks_exact_mut(n).enumerate() {
            for (to, row) in to.iter_mut().zip(matrix.chunks_exact(n)) {
                *to = row[j];
            }
        }
        Self { n, matrix, transposed }
    }

    /// n.
    #[allow(clippy::len_without_is_empty)] // Never empty.
    pub fn len(&self) -> usize {
        self.n
    }

    /// R, row-major, `[n, n]`.
    pub fn matrix(&self) -> &[f32] {
        &self.matrix
    }

    /// x ← x R for every run of n values of every row.
    ///
    /// `values` are rows of `row_elements` values. `scratch` is resized as needed; its contents do not
    /// matter.
    ///
    /// # Panics
    /// If n does not divide `row_elements`, or `values` are not whole rows.
    pub fn rotate_rows(&self, values: &mut [f32], row_elements: usize, isa: Isa, scratch: &mut Vec<f32>) {
        self.rows(&self.transposed, values, row_elements, isa, scratch);
    }

    /// x ← x Rᵀ: undoes [`Dense::rotate_rows`], up to rounding; same arguments.
    pub fn unrotate_rows(&self, values: &mut [f32], row_elements: usize, isa: Isa, scratch: &mut Vec<f32>) {
        self.rows(&self.matrix, values, row_elements, isa, scratch);
    }

    /// c ← Rᵀ c for every column of every n consecutive rows.
    ///
    /// `values` are rows of `row_elements` values. `scratch` is resized as needed; its contents do not
    /// matter.
    ///
    /// # Panics
    /// If `values` are not whole rows, or n does not divide their number.
    pub fn rotate_columns(&self, values: &mut [f32], row_elements: usize, isa: Isa, scratch: &mut Vec<f32>) {
        self.columns(&self.transposed, values, row_elements, isa, scratch);
    }

    /// c ← R c: undoes [`Dense::rotate_columns`], up to rounding; same arguments.
    pub fn unrotate_columns(
        &self,
        values: &mut [f32],
        row_elements: usize,
        isa: Isa,
        scratch: &mut Vec<f32>,
    ) {
        self.columns(&self.matrix, values, row_elements, isa, scratch);
    }

    fn rows(&self, by: &[f32], values: &mut [f32], row_elements: usize, isa: Isa, scratch: &mut Vec<f32>) {
        let n = self.n;
        runs::assert_in_rows(values, row_elements, n);
        dispatch(isa, Rows { n, by, values, scratch });
    }

    fn columns(&self, by: &[f32], values: &mut [f32], row_elements: usize, isa: Isa, scratch: &mut Vec<f32>) {
        if values.is_empty() {
            return;
        }
        let n = self.n;
        runs::assert_of_rows(values, row_elements, n);
        dispatch(isa, Columns { n, by, values, row_elements, scratch });
    }
}

/// Vectors that are rotated while a row of the matrix is in the caches.
const TILE: usize = 64;

struct Rows<'a> {
    n: usize,
    by: &'a [f32],
    values: &'a mut [f32],
    scratch: &'a mut Vec<f32>,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self { n, by, values, scratch } = self;
        scratch.resize(TILE * n, 0.0);
        for tile in values.chunks_mut(TILE * n) {
            let out = &mut scratch[..tile.len()];
            products::<V>(tile, n, tile.len() / n, by, n, n, n, out, n);
            tile.copy_from_slice(out);
        }
    }
}

struct Columns<'a> {
    n: usize,
    by: &'a [f32],
    values: &'a mut [f32],
    row_elements: usize,
    scratch: &'a mut Vec<f32>,
}

impl Kernel for Columns<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self { n, by, values, row_elements, scratch } = self;
        scratch.resize(2 * TILE * n, 0.0);
        let (x, out) = scratch.split_at_mut(TILE * n);
        for block in values.chunks_exact_mut(n * row_elements) {
            for start in (0..row_elements).step_by(TILE) {
                let wide = TILE.min(row_elements - start);
                for (i, row) in block.chunks_exact(row_elements).enumerate() {
                    for (c, value) in row[start..start + wide].iter().enumerate() {
                        x[c * n + i] = *value;
                    }
                }
                products::<V>(x, n, wide, by, n, n, n, out, n);
                for (i, row) in block.chunks_exact_mut(row_elements).enumerate() {
                    for (c, value) in row[start..start + wide].iter_mut().enumerate() {
                        *value = out[c * n + i];
                    }
                }
            }
        }
    }
}

/// A random rotation, row-major `[n, n]`: Q of G = Q U, where the entries of G are independent normal
/// numbers and the upper triangular U has a positive diagonal, which makes Q uniform over the orthogonal
/// group (Haar).
///
/// Normal numbers, column after column of G, come two at a time from four words of [`SignWords`] (Box and
/// Muller 1958):
///
/// ```text
/// u = (bits + 1) / 2^53,  v = bits / 2^53          bits: the upper 53 of two words, the first one high
/// √(−2 ln u) · cos 2πv,  √(−2 ln u) · sin 2πv
/// ```
///
/// Q is made in f64 by Householder reflections, 64 at a time (I − Vᵀ T V; Schreiber and Van Loan 1989), and
/// rounded once: orthogonal to the rounding of f32. 8/3 n³ operations on one thread, 16 n² bytes beside the
/// result. The bits depend on n, seed and lane only. Source: Mezzadri 2007, arXiv math-ph/0609050.
///
/// # Panics
/// If n is 0.
pub fn random_orthogonal(n: usize, seed: u64, lane: u32) -> Vec<f32> {
    assert!(n > 0, "a rotation has at least one dimension");
    let mut columns = normal(n * n, seed, lane);
    dispatch(Isa::best(), Orthogonal { n, columns: &mut columns })
}

/// Independent normal numbers.
fn normal(count: usize, seed: u64, lane: u32) -> Vec<f64> {
    const TO_UNIT: f64 = 1.0 / (1u64 << 53) as f64;
    let mut words = SignWords::new(seed, lane);
    let mut bits = || {
        let mut word = || u64::from(words.next().expect("the words never end"));
        let high = word();
        (high << 32 | word()) >> 11
    };
    let mut values = Vec::with_capacity(count + 1);
    while values.len() < count {
        let (u, v) = ((bits() + 1) as f64 * TO_UNIT, bits() as f64 * TO_UNIT);
        let radius = (-2.0 * ln64(u)).sqrt();
        let (sin, cos) = sin_cos64(std::f64::consts::TAU * v);
        values.extend([radius * cos, radius * sin]);
    }
    values.truncate(count);
    values
}

/// Householder reflections that are applied together.
const REFLECTIONS: usize = 64;

/// Q of the matrix whose columns are the rows of `columns`.
struct Orthogonal<'a> {
    n: usize,
    columns: &'a mut [f64],
}

impl Kernel for Orthogonal<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<V: Lanes>(self) -> Vec<f32> {
        let Self { n, columns } = self;
        let mut signs = Vec::with_capacity(n);
        let mut weights = Vec::with_capacity(n);
        for start in (0..n).step_by(REFLECTIONS) {
            let end = n.min(start + REFLECTIONS);
            for j in start..end {
                let (before, after) = columns[..end * n].split_at_mut((j + 1) * n);
                let axis = &mut before[j * n + j..];
                let (diagonal, weight) = reflect_to_first(axis);
                for x in after.chunks_exact_mut(n) {
                    let x = &mut x[j..];
                    let by = -weight * dot(axis, x);
                    add(by, axis, x);
                }
                signs.push(if diagonal < 0.0 { -1.0 } else { 1.0 });
                weights.push(weight);
            }
            // Column x becomes (I − Vᵀ Tᵀ V) x, a row x (I − Vᵀ T V).
            let (axes, rest) = columns.split_at_mut(end * n);
            let product = Reflections::new(n, start, &axes[start * n..], &weights[start..]);
            product.apply(rest, &product.t);
        }
        // Row j becomes column j of Q: the reflections in reverse, of the unit vector with that sign.
        let mut q = vec![0.0; n * n];
        for (j, sign) in signs.into_iter().enumerate() {
            q[j * n + j] = sign;
        }
        for start in (0..n).step_by(REFLECTIONS).rev() {
            let end = n.min(start + REFLECTIONS);
            let product = Reflections::new(n, start, &columns[start * n..end * n], &weights[start..end]);
            let count = end - start;
            let mut transposed = vec![0.0; count * count];
            for r in 0..count {
                for c in 0..count {
                    transposed[c * count + r] = product.t[r * count + c];
                }
            }
            product.apply(&mut q[start * n..], &transposed);
        }
        let mut matrix = vec![0.0; n * n];
        for (i, row) in matrix.chunks_exact_mut(n).enumerate() {
            for (to, column) in row.iter_mut().zip(q.chunks_exact(n)) {
                *to = column[i] as f32;
            }
        }
        matrix
    }
}

/// Replaces x by the axis v of the reflection I − w v vᵀ that takes x to (d, 0, …, 0); d and w.
#[inline(always)]
fn reflect_to_first(x: &mut [f64]) -> (f64, f64) {
    let length = dot(x, x).sqrt();
    if length == 0.0 {
        return (0.0, 0.0);
    }
    let diagonal = if x[0] > 0.0 { -length } else { length };
    x[0] -= diagonal;
    // vᵀ v = 2 |x|² − 2 d x₀ = −2 d v₀
    let weight = -1.0 / (diagonal * x[0]);
    (diagonal, weight)
}

/// The product of reflections I − w v vᵀ, first axis first: I − Vᵀ T V.
struct Reflections {
    /// All axes are zero before it.
    first: usize,
    n: usize,
    /// V from column `first` on, [count, n − first].
    axes: Vec<f64>,
    /// Its transpose.
    transposed: Vec<f64>,
    /// T, upper triangular.
    t: Vec<f64>,
}

impl Reflections {
    /// `columns` are rows of n values, of which row r holds axis r from `first` + r on.
    #[inline(always)]
    fn new(n: usize, first: usize, columns: &[f64], weights: &[f64]) -> Self {
        let (count, len) = (weights.len(), n - first);
        let mut axes = vec![0.0; count * len];
        let mut transposed = vec![0.0; count * len];
        for (r, (to, from)) in axes.chunks_exact_mut(len).zip(columns.chunks_exact(n)).enumerate() {
            to[r..].copy_from_slice(&from[first + r..]);
            for (i, value) in to.iter().enumerate() {
                transposed[i * count + r] = *value;
            }
        }
        // T[.., r] = −w_r T[.., ..r] (V[..r] v_r), and w_r on the diagonal.
        let mut t = vec![0.0; count * count];
        for (r, weight) in weights.iter().enumerate() {
            let axis = |r: usize| &axes[r * len..(r + 1) * len];
            let overlaps: Vec<f64> = (0..r).map(|c| dot(axis(c), axis(r))).collect();
            for i in 0..r {
                let sum = dot(&t[i * count..i * count + r], &overlaps);
                t[i * count + r] = -weight * sum;
            }
            t[r * count + r] = *weight;
        }
        Self { first, n, axes, transposed, t }
    }

    /// x ← x − x Vᵀ `middle` V for rows of n values.
    #[inline(always)]
    fn apply(&self, rows: &mut [f64], middle: &[f64]) {
        /// Rows whose products fit beside the axes in the second-level cache.
        const ROWS: usize = 64;
        let Self { first, n, .. } = *self;
        let (len, count) = (n - first, self.axes.len() / (n - first));
        let mut along = vec![0.0; ROWS * count];
        let mut by = vec![0.0; ROWS * count];
        for rows in rows.chunks_mut(ROWS * n) {
            let t = rows.len() / n;
            along.fill(0.0);
            by.fill(0.0);
            add_products(&rows[first..], n, t, &self.transposed, count, len, &mut along, count, count);
            add_products(&along, count, t, middle, count, count, &mut by, count, count);
            by.iter_mut().for_each(|value| *value = -*value);
            add_products(&by, count, t, &self.axes, len, count, &mut rows[first..], n, len);
        }
    }
}

/// c[i, j] += Σ_k a[i, k] · b[k, j], k ascending, each product fused with the sum     a: [T, K]  b: [K, N]
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn add_products(
    a: &[f64],
    a_stride: usize,
    t_count: usize,
    b: &[f64],
    b_stride: usize,
    k: usize,
    c: &mut [f64],
    c_stride: usize,
    n: usize,
) {
    /// Columns of b that pass while k advances through a panel.
    const WIDE: usize = 512;
    /// 64 columns of these many rows of b, or fewer columns of more rows, fill an eighth of a megabyte.
    const DEEP: usize = 256;
    for k0 in (0..k).step_by(DEEP) {
        let deep = DEEP.min(k - k0);
        for n0 in (0..n).step_by(WIDE) {
            let n1 = n.min(n0 + WIDE);
            let mut t = 0;
            while t < t_count {
                let tall = if t_count - t >= 4 { 4 } else { 1 };
                let a = &a[t * a_stride + k0..];
                let c = &mut c[t * c_stride..];
                let mut j = n0;
                while j < n1 {
                    let b = &b[k0 * b_stride + j..];
                    let wide = if n1 - j >= 8 { 8 } else { 1 };
                    match (tall, wide) {
                        (4, 8) => tile::<4, 8>(a, a_stride, b, b_stride, deep, &mut c[j..], c_stride),
                        (4, _) => tile::<4, 1>(a, a_stride, b, b_stride, deep, &mut c[j..], c_stride),
                        (_, 8) => tile::<1, 8>(a, a_stride, b, b_stride, deep, &mut c[j..], c_stride),
                        _ => tile::<1, 1>(a, a_stride, b, b_stride, deep, &mut c[j..], c_stride),
                    }
                    j += wide;
                }
                t += tall;
            }
        }
    }
}

#[inline(always)]
fn tile<const T: usize, const N: usize>(
    a: &[f64],
    a_stride: usize,
    b: &[f64],
    b_stride: usize,
    k: usize,
    c: &mut [f64],
    c_stride: usize,
) {
    let mut sums = [[0.0; N]; T];
    for (t, sums) in sums.iter_mut().enumerate() {
        sums.copy_from_slice(&c[t * c_stride..][..N]);
    }
    let rows: [&[f64]; T] = std::array::from_fn(|t| &a[t * a_stride..][..k]);
    for k in 0..k {
        let b: &[f64; N] = b[k * b_stride..][..N].try_into().expect("N values");
        for t in 0..T {
            let a = rows[t][k];
            for n in 0..N {
                sums[t][n] = a.mul_add(b[n], sums[t][n]);
            }
        }
    }
    for (t, sums) in sums.iter().enumerate() {
        c[t * c_stride..][..N].copy_from_slice(sums);
    }
}

/// Σ x[i] y[i]: sixteen lanes, each in the order of i, fused; lanes in halves; then the rest in order.
#[inline(always)]
fn dot(x: &[f64], y: &[f64]) -> f64 {
    const LANES: usize = 16;
    let mut lanes = [0.0; LANES];
    let ((xs, x_rest), (ys, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in xs.iter().zip(ys) {
        for i in 0..LANES {
            lanes[i] = x[i].mul_add(y[i], lanes[i]);
        }
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    x_rest.iter().zip(y_rest).fold(lanes[0], |sum, (x, y)| x.mul_add(*y, sum))
}

/// y += a x, fused.
#[inline(always)]
fn add(a: f64, x: &[f64], y: &mut [f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = a.mul_add(*x, *y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers in (−1, 1).
    fn values(count: usize, lane: u32) -> Vec<f32> {
        SignWords::new(9, lane).take(count).map(|word| word as i32 as f32 / 2f32.powi(31)).collect()
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    /// [rows, columns] to [columns, rows].
    fn transposed(x: &[f32], columns: usize) -> Vec<f32> {
        (0..columns).flat_map(|c| x.iter().skip(c).step_by(columns).copied()).collect()
    }

    /// The largest |QᵀQ − I| or |QQᵀ − I|.
    fn distance_from_orthogonal(q: &[f32], n: usize) -> f64 {
        let mut most = 0f64;
        for q in [q, &transposed(q, n)] {
            for (i, a) in q.chunks_exact(n).enumerate() {
                for (j, b) in q.chunks_exact(n).enumerate() {
                    let sum: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    most = most.max((sum - if i == j { 1.0 } else { 0.0 }).abs());
                }
            }
        }
        most
    }

    const ORDERS: [usize; 7] = [1, 2, 5, 16, 67, 130, 530];

    #[test]
    fn rows_and_columns_are_products_with_the_matrix() {
        for n in ORDERS {
            let r = random_orthogonal(n, 1, n as u32);
            let dense = Dense::new(r.clone(), n);
            assert_eq!((dense.len(), dense.matrix()), (n, &r[..]));
            // Two runs in each of 70 rows: more rows than one tile has.
            let x = values(70 * 2 * n, 0);
            // Of each run: Σ_k x[k] R[k, j], and Σ_k x[k] R[j, k].
            let product = |x: &[f32], at: &dyn Fn(usize, usize) -> usize| -> Vec<f64> {
                let entry = |x: &[f32], j| {
                    x.iter().enumerate().map(|(k, x)| f64::from(*x) * f64::from(r[at(k, j)])).sum::<f64>()
                };
                x.chunks_exact(n).flat_map(|x| (0..n).map(|j| entry(x, j)).collect::<Vec<_>>()).collect()
            };
            let forward = product(&x, &|k, j| k * n + j);
            let inverse = product(&x, &|k, j| j * n + k);
            let mut scratch = vec![f32::NAN; 3];
            // Unit rows of R, values below 1: a sum's rounding is below the length of x times a few units.
            let most = 4.0 * (n as f64).sqrt() * 2f64.powi(-24);
            let mut check = |expected: &[f64], inverse: bool, columns: bool| {
                // As columns, each run is one of 140 columns.
                let mut found = if columns { transposed(&x, n) } else { x.clone() };
                match (columns, inverse) {
                    (false, false) => dense.rotate_rows(&mut found, 2 * n, Isa::best(), &mut scratch),
                    (false, true) => dense.unrotate_rows(&mut found, 2 * n, Isa::best(), &mut scratch),
                    (true, false) => dense.rotate_columns(&mut found, 140, Isa::best(), &mut scratch),
                    (true, true) => dense.unrotate_columns(&mut found, 140, Isa::best(), &mut scratch),
                }
                let found = if columns { transposed(&found, 140) } else { found };
                for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
                    let error = (f64::from(*found) - expected).abs();
                    assert!(error <= most, "{n} {inverse} {columns} {at}: {found} is not {expected}");
                }
                found
            };
            for (expected, inverse) in [(&forward, false), (&inverse, true)] {
                let [rows, columns] = [false, true].map(|columns| bits(&check(expected, inverse, columns)));
                assert_eq!(rows, columns, "{n}");
            }
        }
    }

    #[test]
    fn the_inverse_undoes_and_cuts_and_instruction_sets_do_not_matter() {
        let mut scratch = Vec::new();
        for n in [1, 2, 5, 16, 67, 130] {
            let dense = Dense::new(random_orthogonal(n, 2, 0), n);
            let (rows, width) = (2 * n, 3 * n);
            let x = values(rows * width, 1);
            let best = Isa::best();
            let mut by_row = x.clone();
            dense.rotate_rows(&mut by_row, width, best, &mut scratch);
            let mut by_column = x.clone();
            dense.rotate_columns(&mut by_column, width, best, &mut scratch);
            for isa in Isa::available() {
                let mut cut = x.clone();
                for (i, row) in cut.chunks_mut(width).enumerate() {
                    // Runs of a row, one by one or together.
                    let runs = if i % 2 == 0 { n } else { width };
                    row.chunks_mut(runs).for_each(|run| dense.rotate_rows(run, runs, isa, &mut scratch));
                }
                assert_eq!(bits(&cut), bits(&by_row), "{n} {isa}");
                let mut cut = x.clone();
                for block in cut.chunks_mut(n * width) {
                    dense.rotate_columns(block, width, isa, &mut scratch);
                }
                assert_eq!(bits(&cut), bits(&by_column), "{n} {isa}");
            }
            // Columns from 1 on alone.
            let narrow =
                |x: &[f32]| -> Vec<f32> { x.chunks(width).flat_map(|row| row[1..].to_vec()).collect() };
            if width > 1 {
                let mut some = narrow(&x);
                dense.rotate_columns(&mut some, width - 1, best, &mut scratch);
                assert_eq!(bits(&some), bits(&narrow(&by_column)), "{n}");
            }
            dense.unrotate_rows(&mut by_row, width, best, &mut scratch);
            dense.unrotate_columns(&mut by_column, width, best, &mut scratch);
            let most = 8.0 * (n as f32).sqrt() * 2f32.powi(-24);
            for back in [by_row, by_column] {
                let error = back.iter().zip(&x).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(error <= most, "{n}: {error} is above {most}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "rows of 10 values are not runs of 4")]
    fn refuses_rows_that_are_not_runs() {
        Dense::new(random_orthogonal(4, 0, 0), 4).rotate_rows(
            &mut [0.0; 20],
            10,
            Isa::best(),
            &mut Vec::new(),
        );
    }

    #[test]
    #[should_panic(expected = "6 rows are not runs of 4")]
    fn refuses_columns_that_are_not_runs() {
        Dense::new(random_orthogonal(4, 0, 0), 4).rotate_columns(
            &mut [0.0; 18],
            3,
            Isa::best(),
            &mut Vec::new(),
        );
    }

    #[test]
    #[should_panic(expected = "8 values are not a matrix of order 3")]
    fn refuses_a_matrix_of_another_order() {
        Dense::new(vec![0.0; 8], 3);
    }

    #[test]
    fn random_rotations_are_orthogonal_to_rounding() {
        for n in [1, 2, 3, 4, 63, 64, 65, 127, 129, 200, 320] {
            let error = distance_from_orthogonal(&random_orthogonal(n, 3, 1), n);
            // Σ_k 2 q[k] δ[k] with |δ| <= 2^-25 |q|, up to powers of two.
            assert!(error <= 2f64.powi(-23), "{n}: {error}");
        }
    }

    #[test]
    fn a_random_rotation_is_what_is_left_of_a_triangle_with_a_positive_diagonal() {
        // Which determines it: QᵀG = U.
        for n in [1, 2, 7, 64, 65, 150] {
            let (seed, lane) = (1 << 40 | 17, 6);
            let (q, g) = (random_orthogonal(n, seed, lane), normal(n * n, seed, lane));
            for (c, g) in g.chunks_exact(n).enumerate() {
                for r in 0..n {
                    let u: f64 = g.iter().enumerate().map(|(k, g)| f64::from(q[k * n + r]) * g).sum();
                    if r == c {
                        assert!(u > 0.0, "{n} {r}: {u}");
                    } else if r > c {
                        let length = g.iter().map(|g| g * g).sum::<f64>().sqrt();
                        assert!(u.abs() < 1e-6 * length, "{n} {r} {c}: {u}");
                    }
                }
            }
        }
    }

    #[test]
    fn random_rotations_differ_by_seed_and_lane_and_not_by_instruction_set() {
        let n = 130;
        let expected = bits(&random_orthogonal(n, 4, 2));
        for isa in Isa::available() {
            let found = dispatch(isa, Orthogonal { n, columns: &mut normal(n * n, 4, 2) });
            assert_eq!(bits(&found), expected, "{isa}");
        }
        for (seed, lane) in [(5, 2), (4, 3), (4 | 1 << 32, 2)] {
            assert_ne!(bits(&random_orthogonal(n, seed, lane)), expected, "{seed} {lane}");
        }
    }

    #[test]
    fn random_rotations_have_the_moments_of_the_uniform_distribution() {
        // Over all of O(n): E q = 0, E q² = 1/n, E q⁴ = 3 / (n (n + 2)), E (tr Q)² = E tr Q² = 1.
        let (n, lanes) = (6, 4000);
        let (mut first, mut second, mut fourth) = (0.0, 0.0, 0.0);
        let (mut trace, mut of_square) = (0.0, 0.0);
        for lane in 0..lanes {
            let q = random_orthogonal(n, 5, lane);
            for q in q.iter().map(|q| f64::from(*q)) {
                first += q;
                second += q * q;
                fourth += q.powi(4);
            }
            trace += (0..n).map(|i| f64::from(q[i * n + i])).sum::<f64>().powi(2);
            let squared =
                |i: usize| (0..n).map(|k| f64::from(q[i * n + k]) * f64::from(q[k * n + i])).sum::<f64>();
            of_square += (0..n).map(squared).sum::<f64>();
        }
        let (lanes, entries) = (f64::from(lanes), f64::from(lanes) * (n * n) as f64);
        let n = n as f64;
        // Each bound is five or more standard deviations.
        assert!((first / entries).abs() < 5.0 / (n * entries).sqrt(), "{}", first / entries);
        assert!((second / entries - 1.0 / n).abs() < 1e-7, "{}", second / entries);
        assert!((fourth / entries * n * (n + 2.0) / 3.0 - 1.0).abs() < 0.02, "{}", fourth / entries);
        assert!((trace / lanes - 1.0).abs() < 0.12, "{}", trace / lanes);
        assert!((of_square / lanes - 1.0).abs() < 0.12, "{}", of_square / lanes);
        // Of order 1, half of them are −1.
        let negative = (0..1000).filter(|lane| random_orthogonal(1, 5, *lane) == [-1.0]).count();
        assert!((420..580).contains(&negative), "{negative}");
    }

    #[test]
    fn normal_numbers_are_those_of_box_and_muller() {
        let (seed, lane) = (77, 3);
        let words: Vec<u64> = SignWords::new(seed, lane).take(4 * 500).map(u64::from).collect();
        let found = normal(999, seed, lane);
        assert_eq!(found.len(), 999);
        for (at, x) in found.iter().enumerate() {
            let [a, b, c, d] = words[at / 2 * 4..][..4] else { unreachable!("four words") };
            let scale = 2f64.powi(-53);
            let (u, v) = (((a << 21 | b >> 11) + 1) as f64 * scale, (c << 21 | d >> 11) as f64 * scale);
            let angle = v * std::f64::consts::TAU;
            let expected = (-2.0 * u.ln()).sqrt() * if at % 2 == 0 { angle.cos() } else { angle.sin() };
            assert!((x - expected).abs() < 1e-13, "{at}: {x} is not {expected}");
        }
    }
}
