//! What computes: linear layers from packed bytes, and the other steps of a decoder, on one device.
//!
//! The seam is small. A device takes a [`Packed`] weight and gives back a [`LinearOp`]; the model above it
//! asks for nothing else of a weight. To add a codec to a device: one file beside the others and one line in
//! the device's `prepare`.

pub mod cpu;
mod packed;

use std::ops::Range;

pub use packed::{Packed, Stored};

use cpu::Input;

/// How a linear layer is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// f32 activations on weights decoded to f32: the definition.
    Exact,
    /// int8 activations with one scale per group, where the codec's codes or values are integers.
    Fast,
}

impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Precision::Exact => "exact",
            Precision::Fast => "fast",
        })
    }
}

/// A linear layer without its bias: y[t, n] = Σ_k x[t, k] · w[n, k].            x: [T, K]  w: [N, K]  y: [T, N]
///
/// Every output is computed on its own, in an order that depends on K alone; so y does not depend on how rows
/// are shared out, on T, or on the instruction set.
pub trait LinearOp: Send + Sync + std::fmt::Debug {
    /// N.
    fn out_features(&self) -> usize;

    /// K.
    fn in_features(&self) -> usize;

    /// Which of the two paths it takes.
    fn precision(&self) -> Precision;

    /// Bytes of weights that one pass reads.
    fn bytes(&self) -> u64;

    /// How many rows share bytes, and are best computed together.
    fn rows_together(&self) -> usize {
        1
    }

    /// Work on the input that all rows share, done once before [`LinearOp::apply`].
    fn ready(&self, _input: &Input<'_>) {}

    /// Computes y[t, n] for all t and for n in `rows`.
    fn apply(&self, input: &Input<'_>, rows: Range<usize>, out: &Columns<'_>);
}

/// A matrix [T, N] whose columns several threads fill, each its own.
#[derive(Debug)]
pub struct Columns<'a> {
    start: *mut f32,
    rows: usize,
    width: usize,
    of: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: `Columns::row` hands out parts of an exclusively borrowed slice, and its callers keep them disjoint.
unsafe impl Sync for Columns<'_> {}

impl<'a> Columns<'a> {
    /// All of `values`, rows of `width`.
    ///
    /// # Panics
    /// If `values` is not whole rows.
    pub fn new(values: &'a mut [f32], width: usize) -> Self {
        assert!(values.len().is_multiple_of(width), "{} values in rows of {width}", values.len());
        let rows = values.len() / width;
        Self { start: values.as_mut_ptr(), rows, width, of: std::marker::PhantomData }
    }

    /// T.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// N.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Where column `n` of row 0 lies; row t is t · [`Columns::width`] further.
    ///
    /// # Panics
    /// If there is no such column.
    pub(crate) fn column(&self, n: usize) -> *mut f32 {
        assert!(n < self.width, "inside the matrix");
        self.start.wrapping_add(n)
    }

    /// Columns `range` of row `t`.
    ///
    /// # Safety
    /// No other part that overlaps this one may be alive.
    ///
    /// # Panics
    /// If it leaves the matrix.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn row(&self, t: usize, range: Range<usize>) -> &mut [f32] {
        assert!(t < self.rows && range.start <= range.end && range.end <= self.width, "inside the matrix");
        // SAFETY: inside the slice, which is borrowed for 'a; the caller keeps parts disjoint.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(t * self.width + range.start), range.len()) }
    }
}
