//! H + λ I = Mᵀ D M, from the last index backwards.
//!
//! ```text
//! M: unit lower triangular, D: diagonal and positive
//! e H eᵀ + λ ‖e‖² = Σ_k D_k (e_k + Σ_{i<k} M[k, i] e_i)²                          e: [n]
//! ```
//!
//! So who rounds w_k to ŵ_k in the order of k, e = w − ŵ, best aims at target_k = w_k + Σ_{i<k} M[k, i] e_i, and
//! what is left is Σ_k D_k (target_k − ŵ_k)². With U = chol(H⁻¹)ᵀ, which GPTQ uses: M = −(diag(U) ⁻¹ U)⁻ᵀ off the
//! diagonal, D_k = 1 / U[k, k]²; but nothing is inverted here.
//!
//! Panel by panel of 256 rows from the last: the panel's square in f64; S = C⁻ᵀ A for what lies left of it, where
//! Cᵀ C = the square; A ← A − Sᵀ S for what lies above; the last two as sums of products in f32, n³ / 3 operations
//! in all. Source: the UDUᵀ factorization of Bierman 1977 by tiles; Chee et al., QuIP, arXiv 2307.13304, theorem 1,
//! for its equality with Frantar et al., GPTQ, arXiv 2210.17323.

use super::Symmetric;
use super::panels::{self, PANEL_ROWS};
use super::symmetric::{Columns, Reach, update_lower};
use crate::failure::{Exit, Failure};
use crate::isa::Isa;
use crate::numeric::dot::{Strided, multiply};
use crate::numeric::lanes::{Kernel, Lanes, dispatch};
use crate::numeric::{Parallel, in_chunks};

/// Rows or columns that are worked on together.
const STRIP: usize = 64;

/// M and D.
#[derive(Debug, Clone, PartialEq)]
pub struct Factor {
    n: usize,
    /// Panels as in [`Symmetric`]; zeros right of the diagonal, ones on it.
    m: Vec<f32>,
    d: Vec<f64>,
}

/// A matrix that is not positive definite, or not by enough for f32.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("the matrix is not positive definite: pivot {index} is {pivot:e}")]
pub struct NotPositive {
    /// Of the row.
    pub index: usize,
    /// What should be finite and above 0.
    pub pivot: f64,
}

impl Failure for NotPositive {
    fn exit(&self) -> Exit {
        Exit::Input
    }

    fn help(&self) -> Option<String> {
        Some("add more to the diagonal, or sum the matrix over more tokens".to_owned())
    }
}

impl Factor {
    /// Factors H + `damping` · I. Takes as much memory as H again, and 3 KiB · n meanwhile.
    ///
    /// # Errors
    /// [`NotPositive`] with the first pivot, from the last index backwards, that is not finite and above 0.
    ///
    /// # Panics
    /// If this processor has no `isa`.
    pub fn new(h: &Symmetric, damping: f64, isa: Isa, parallel: Parallel<'_>) -> Result<Self, NotPositive> {
        let n = h.n();
        let mut m = h.values().to_vec();
        let mut d = vec![0.0; n];
        // Sᵀ of one panel, [left, rows].
        let mut left = vec![0.0; n.saturating_sub(1) * PANEL_ROWS.min(n)];
        for p in (0..panels::count(n)).rev() {
            let rows = panels::rows(n, p);
            let (above, panel) = m.split_at_mut(panels::start(p));
            let panel = &mut panel[..rows.len() * rows.end];
            let d = &mut d[rows.clone()];
            let tile = Tile { panel, n: rows.len(), damping, d };
            let inverse = dispatch(isa, tile)
                .map_err(|(index, pivot)| NotPositive { index: rows.start + index, pivot })?;
            if p == 0 {
                break;
            }
            let left = &mut left[..rows.start * rows.len()];
            solve(panel, rows.len(), &inverse, left, isa, parallel);
            keep(panel, rows.len(), left, d, parallel);
            let columns = Columns { values: left, len: rows.len() };
            update_lower(n, above, columns, Reach::Diagonal, isa, parallel, &|value, sum| value - sum);
        }
        Ok(Self { n, m, d })
    }

    /// The order.
    pub fn n(&self) -> usize {
        self.n
    }

    /// D: how much a squared error counts at each index, once later indices have made up for it as they can.
    pub fn d(&self) -> &[f64] {
        &self.d
    }

    /// Rows of M from row k on, up to the end of its panel: values left of the diagonal, 1 on it, 0 right of it.
    ///
    /// # Panics
    /// If k is not below n.
    pub fn lower(&self, k: usize) -> Strided<'_> {
        let ((at, stride), panel) = (panels::row(self.n, k), panels::rows(self.n, k / PANEL_ROWS));
        let rows = panel.end - k;
        Strided { values: &self.m[at..at + rows * stride], stride, rows }
    }
}

/// left[i] = C⁻ᵀ A[:, i], where A is what lies left of the panel's square.           left: [columns, rows]
fn solve(panel: &[f32], rows: usize, inverse: &[f32], left: &mut [f32], isa: Isa, parallel: Parallel<'_>) {
    let stride = panel.len() / rows;
    in_chunks(parallel, left.chunks_mut(STRIP * rows), &|s, left| {
        let count = left.len() / rows;
        let mut columns = vec![0.0; count * rows];
        for (k, row) in panel.chunks_exact(stride).enumerate() {
            for (i, value) in row[s * STRIP..][..count].iter().enumerate() {
                columns[i * rows + k] = *value;
            }
        }
        let columns = Strided { values: &columns, stride: rows, rows: count };
        multiply(columns, Strided { values: inverse, stride: rows, rows }, rows, left, rows, isa);
    });
}

/// M[k, i] = S[k, i] / √D_k to the left of the panel's square.
fn keep(panel: &mut [f32], rows: usize, left: &[f32], d: &[f64], parallel: Parallel<'_>) {
    const TOGETHER: usize = 16;
    let stride = panel.len() / rows;
    in_chunks(parallel, panel.chunks_mut(TOGETHER * stride), &|s, panel| {
        for (i, column) in left.chunks_exact(rows).enumerate() {
            for (k, row) in panel.chunks_exact_mut(stride).enumerate() {
                let k_in_panel = s * TOGETHER + k;
                row[i] = (f64::from(column[k_in_panel]) / d[k_in_panel].sqrt()) as f32;
            }
        }
    });
}

/// Factors the square at the end of a panel, whose rows are stored with all columns left of it.
struct Tile<'a> {
    panel: &'a mut [f32],
    n: usize,
    damping: f64,
    d: &'a mut [f64],
}

impl Kernel for Tile<'_> {
    /// C⁻ᵀ, row-major, or the index and the value of a wrong pivot.
    type Output = Result<Vec<f32>, (usize, f64)>;

    // Loops over contiguous f64, which each instruction set does in its own vectors, element by element alike.
    #[inline(always)]
    fn run<V: Lanes>(self) -> Self::Output {
        let Self { panel, n, damping, d } = self;
        let stride = panel.len() / n;
        let mut m = vec![0.0; n * n];
        for (i, (to, from)) in m.chunks_exact_mut(n).zip(panel.chunks_exact(stride)).enumerate() {
            for (to, from) in to[..=i].iter_mut().zip(&from[stride - n..]) {
                *to = f64::from(*from);
            }
            to[i] += damping;
        }
        for k in (0..n).rev() {
            let (above, row) = m.split_at_mut(k * n);
            let row = &mut row[..=k];
            let pivot = row[k];
            if !(pivot > 0.0 && pivot.is_finite()) {
                return Err((k, pivot));
            }
            d[k] = pivot;
            for (i, to) in above.chunks_exact_mut(n).enumerate() {
                let by = row[i] / pivot;
                for (to, from) in to[..=i].iter_mut().zip(&*row) {
                    *to -= by * from;
                }
            }
            row.iter_mut().for_each(|value| *value /= pivot);
        }
        // M⁻¹ by rows: row i is unit row i less Σ_{j<i} M[i, j] · row j.
        let mut inverse = vec![0.0; n * n];
        for i in 0..n {
            let (before, row) = inverse.split_at_mut(i * n);
            let row = &mut row[..=i];
            row[i] = 1.0;
            for (j, from) in before.chunks_exact(n).enumerate() {
                let by = m[i * n + j];
                for (to, from) in row[..=j].iter_mut().zip(from) {
                    *to -= by * from;
                }
            }
        }
        for (i, (row, m)) in panel.chunks_exact_mut(stride).zip(m.chunks_exact(n)).enumerate() {
            let row = &mut row[stride - n..];
            row.fill(0.0);
            row[i] = 1.0;
            for (to, from) in row[..i].iter_mut().zip(m) {
                *to = *from as f32;
            }
        }
        // (C⁻ᵀ)[i, j] = M⁻¹[j, i] / √D_i
        let mut out = vec![0.0; n * n];
        for (j, row) in inverse.chunks_exact(n).enumerate() {
            for (i, value) in row[..=j].iter().enumerate() {
                out[i * n + j] = (value / d[i].sqrt()) as f32;
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::tests::{Random, threads};
    use crate::numeric::serial;

    /// XᵀX / T of correlated rows.
    fn moments(n: usize, t_count: usize, seed: u64) -> Symmetric {
        let mut x = Random(seed).normals(t_count * n);
        for row in x.chunks_mut(n) {
            for i in 1..n {
                row[i] = 0.7 * row[i - 1] + 0.7 * row[i];
            }
        }
        let mut h = Symmetric::new(n);
        h.add_products(&x, Isa::best(), &serial);
        h.scale(1.0 / t_count as f32);
        h
    }

    fn m_of(factor: &Factor, k: usize, i: usize) -> f64 {
        if i > k { 0.0 } else { f64::from(factor.lower(k).values[i]) }
    }

    #[test]
    fn the_factors_product_is_the_matrix() {
        for n in [1, 5, 255, 256, 257, 600] {
            let h = moments(n, 2 * n + 3, 1);
            let factor = Factor::new(&h, 0.01, Isa::best(), &threads).unwrap();
            let mut worst: (f64, usize, usize) = (0.0, 0, 0);
            for i in (0..n).step_by(1 + n / 40) {
                for j in 0..=i {
                    let sum: f64 =
                        (i..n).map(|k| m_of(&factor, k, i) * factor.d()[k] * m_of(&factor, k, j)).sum();
                    let expected = f64::from(h.get(i, j)) + if i == j { 0.01 } else { 0.0 };
                    let size = (f64::from(h.get(i, i)) * f64::from(h.get(j, j))).sqrt();
                    let error = (sum - expected).abs() / size;
                    if error > worst.0 {
                        worst = (error, i, j);
                    }
                }
            }
            // Rounding of f32 products of length n, times the condition of a square: about 10².
            assert!(worst.0 < 1e-5, "{n}: {worst:?}");
        }
    }

    /// GPTQ as published: U = chol(H⁻¹)ᵀ, and after column k the error / U[k, k] times U[k, k + 1..] leaves the rest.
    fn textbook(h: &[f64], n: usize, w: &[f64], round: impl Fn(f64) -> f64) -> (Vec<f64>, f64) {
        // H⁻¹ by Gauss and Jordan.
        let mut a = h.to_vec();
        let mut inverse: Vec<f64> = (0..n * n).map(|at| f64::from(u8::from(at / n == at % n))).collect();
        for k in 0..n {
            let pivot = a[k * n + k];
            for j in 0..n {
                a[k * n + j] /= pivot;
                inverse[k * n + j] /= pivot;
            }
            for i in (0..n).filter(|i| *i != k) {
                let by = a[i * n + k];
                for j in 0..n {
                    a[i * n + j] -= by * a[k * n + j];
                    inverse[i * n + j] -= by * inverse[k * n + j];
                }
            }
        }
        // L Lᵀ = H⁻¹, U = Lᵀ.
        let mut l = vec![0.0; n * n];
        for i in 0..n {
            for j in 0..=i {
                let sum: f64 = (0..j).map(|k| l[i * n + k] * l[j * n + k]).sum();
                let rest: f64 = inverse[i * n + j] - sum;
                l[i * n + j] = if i == j { rest.sqrt() } else { rest / l[j * n + j] };
            }
        }
        let (mut rest, mut loss) = (w.to_vec(), 0.0);
        let mut found = vec![0.0; n];
        for k in 0..n {
            found[k] = round(rest[k]);
            let error = (rest[k] - found[k]) / l[k * n + k];
            loss += error * error;
            for j in k..n {
                rest[j] -= error * l[j * n + k];
            }
        }
        (found, loss)
    }

    #[test]
    fn feedback_along_the_factor_is_gptq_as_published() {
        let n = 40;
        let h = moments(n, 100, 2);
        let damping = 0.05;
        let factor = Factor::new(&h, damping, Isa::best(), &serial).unwrap();
        let mut full: Vec<f64> = h.to_full().into_iter().map(f64::from).collect();
        full.iter_mut().step_by(n + 1).for_each(|value| *value += damping);
        for seed in 0..20 {
            let w: Vec<f64> = Random(seed).normals(n).into_iter().map(f64::from).collect();
            let round = |value: f64| (2.0 * value).round() / 2.0;
            let (expected, expected_loss) = textbook(&full, n, &w, round);
            let (mut error, mut loss) = (vec![0.0; n], 0.0);
            for k in 0..n {
                let target = w[k] + (0..k).map(|i| error[i] * m_of(&factor, k, i)).sum::<f64>();
                let found = round(target);
                // A target within 1e-4 of a tie would say nothing; none of these seeds has one.
                assert_eq!(found, expected[k], "{seed} {k}: {target}");
                error[k] = w[k] - found;
                loss += factor.d()[k] * (target - found).powi(2);
            }
            let direct: f64 = (0..n * n).map(|at| error[at / n] * full[at] * error[at % n]).sum();
            assert!((loss / expected_loss - 1.0).abs() < 1e-4, "{loss} {expected_loss}");
            assert!((direct / expected_loss - 1.0).abs() < 1e-4, "{direct} {expected_loss}");
        }
    }

    #[test]
    fn factors_have_the_same_bits_on_every_instruction_set_and_number_of_threads() {
        let h = moments(330, 400, 3);
        let expected = Factor::new(&h, 0.01, Isa::Scalar, &serial).unwrap();
        let bits = |factor: &Factor| -> (Vec<u32>, Vec<u64>) {
            (factor.m.iter().map(|x| x.to_bits()).collect(), factor.d.iter().map(|x| x.to_bits()).collect())
        };
        for isa in Isa::available() {
            let found = Factor::new(&h, 0.01, isa, &threads).unwrap();
            assert_eq!(bits(&found), bits(&expected), "{isa}");
        }
    }

    #[test]
    fn a_pivot_that_is_not_positive_is_named() {
        let n = 300;
        let mut full = vec![0.0; n * n];
        full.iter_mut().step_by(n + 1).for_each(|value| *value = 1.0);
        full[280 * n + 280] = -2.0;
        let found = Factor::new(&Symmetric::from_full(&full, n), 0.5, Isa::best(), &serial).unwrap_err();
        assert_eq!(found, NotPositive { index: 280, pivot: -1.5 });
        full[280 * n + 280] = f32::NAN;
        let found = Factor::new(&Symmetric::from_full(&full, n), 0.5, Isa::best(), &serial).unwrap_err();
        assert_eq!(found.index, 280);
        // Row 7 twice: what is left of its second copy is 0.
        full[280 * n + 280] = 1.0;
        full[8 * n + 7] = 1.0;
        let found = Factor::new(&Symmetric::from_full(&full, n), 0.0, Isa::best(), &serial).unwrap_err();
        assert_eq!(found, NotPositive { index: 7, pivot: 0.0 });
        assert!(Factor::new(&Symmetric::from_full(&full, n), 1e-9, Isa::best(), &serial).is_ok());
    }
}
