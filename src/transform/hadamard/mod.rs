//! The signed Hadamard rotation.
//!
//! ```text
//! R = diag(s) · blockdiag(H, …, H) / √b       R: [n, n], orthogonal    s: n signs    H: [b, b], H Hᵀ = b I
//! rows     x ← x R  = (s ∘ x) H / √b            inverse  x ← x Rᵀ = s ∘ (x Hᵀ) / √b
//! columns  c ← Rᵀ c = Hᵀ (s ∘ c) / √b           inverse  c ← R c  = s ∘ (H c) / √b
//! ```
//!
//! H = M₁ ⊗ … ⊗ M_r ⊗ S has a [`Size`]; b = n wherever an order n has one. It need not be symmetric. A weight
//! `[out, in]` that reads a rotated vector has its rows rotated, one that writes it its columns.
//!
//! Arithmetic of one vector, the same on every instruction set and for every cut of the rows or columns:
//!
//! 1. signs: exact;
//! 2. Sylvester's matrix: butterflies (a, b) ← (a + b, a − b) in f32, at distances 1, 2, 4, …;
//! 3. each core, M_r first: Σ_j ± x_j in f64, j ascending, rounded once to f32;
//! 4. 1/√b: √b and its reciprocal in f64, multiplied into the f64 sum of the last core before it is rounded.
//!    Without a core, the f32 result of the butterflies is widened, multiplied and rounded.
//!
//! Infinity and NaN spread over their block. Sources: Sylvester 1867; Paley 1933; QuaRot, arXiv 2404.00456.

mod cores;
mod kernel;
mod signs;
mod size;

pub use cores::core;
pub use signs::{SignWords, signs};
pub use size::{Size, largest_block};

use super::runs;
use crate::isa::Isa;
use crate::numeric::lanes::dispatch;

use kernel::{Core, Direction, Job, RotateColumns, RotateRows};

/// R = diag(signs) · blockdiag(H, …, H) / √b.
#[derive(Debug, Clone)]
pub struct SignedHadamard {
    signs: Vec<bool>,
    size: Size,
    /// 1 or −1 for each sign.
    factors: Vec<f32>,
    cores: Vec<Core>,
    scale: f64,
}

impl SignedHadamard {
    /// The rotation of `signs.len()` values by blocks of `size`; true means −1.
    ///
    /// # Panics
    /// If the order of `size` does not divide the number of signs, or there are no signs.
    pub fn new(signs: Vec<bool>, size: Size) -> Self {
        let (n, order) = (signs.len(), size.order());
        assert!(n > 0 && n.is_multiple_of(order), "{n} values are not blocks of {order}");
        let factors = signs.iter().map(|negative| if *negative { -1.0 } else { 1.0 }).collect();
        let cores = size.cores().into_iter().map(|(order, entries)| Core::new(order, entries)).collect();
        Self { signs, factors, cores, scale: 1.0 / (order as f64).sqrt(), size }
    }

    /// n.
    #[allow(clippy::len_without_is_empty)] // Never empty.
    pub fn len(&self) -> usize {
        self.signs.len()
    }

    /// The order b and what H is composed of.
    pub fn size(&self) -> &Size {
        &self.size
    }

    /// True means −1.
    pub fn signs(&self) -> &[bool] {
        &self.signs
    }

    /// x ← x R for every run of n values of every row.
    ///
    /// `values` are rows of `row_elements` values. `scratch` is resized as needed; what it holds does not
    /// matter.
    ///
    /// # Panics
    /// If n does not divide `row_elements`, or `values` are not whole rows.
    pub fn rotate_rows(&self, values: &mut [f32], row_elements: usize, isa: Isa, scratch: &mut Vec<f32>) {
        self.rows(values, row_elements, isa, scratch, Direction::Forward);
    }

    /// x ← x Rᵀ: undoes [`SignedHadamard::rotate_rows`], up to rounding; same arguments.
    pub fn unrotate_rows(&self, values: &mut [f32], row_elements: usize, isa: Isa, scratch: &mut Vec<f32>) {
        self.rows(values, row_elements, isa, scratch, Direction::Inverse);
    }

    /// c ← Rᵀ c for every column of every n consecutive rows.
    ///
    /// `values` are rows of `row_elements` values. `scratch` is resized as needed; what it holds does not
    /// matter.
    ///
    /// # Panics
    /// If `values` are not whole rows, or n does not divide their number.
    pub fn rotate_columns(&self, values: &mut [f32], row_elements: usize, isa: Isa, scratch: &mut Vec<f32>) {
        self.columns(values, row_elements, isa, scratch, Direction::Forward);
    }

    /// c ← R c: undoes [`SignedHadamard::rotate_columns`], up to rounding; same arguments.
    pub fn unrotate_columns(
        &self,
        values: &mut [f32],
        row_elements: usize,
        isa: Isa,
        scratch: &mut Vec<f32>,
    ) {
        self.columns(values, row_elements, isa, scratch, Direction::Inverse);
    }

    /// R, row-major, `[n, n]`.
    pub fn matrix(&self, isa: Isa) -> Vec<f32> {
        let n = self.len();
        let mut values = vec![0.0; n * n];
        values.iter_mut().step_by(n + 1).for_each(|diagonal| *diagonal = 1.0);
        self.rotate_rows(&mut values, n, isa, &mut Vec::new());
        values
    }

    fn rows(
        &self,
        values: &mut [f32],
        row_elements: usize,
        isa: Isa,
        scratch: &mut Vec<f32>,
        direction: Direction,
    ) {
        runs::assert_in_rows(values, row_elements, self.len());
        dispatch(isa, RotateRows { job: self.job(direction), values, scratch });
    }

    fn columns(
        &self,
        values: &mut [f32],
        row_elements: usize,
        isa: Isa,
        scratch: &mut Vec<f32>,
        direction: Direction,
    ) {
        if values.is_empty() {
            return;
        }
        runs::assert_of_rows(values, row_elements, self.len());
        dispatch(isa, RotateColumns { job: self.job(direction), values, row_elements, scratch });
    }

    fn job(&self, direction: Direction) -> Job<'_> {
        Job {
            factors: &self.factors,
            order: self.size.order(),
            sylvester_log2: self.size.sylvester_log2(),
            cores: &self.cores,
            scale: self.scale,
            direction,
        }
    }
}
