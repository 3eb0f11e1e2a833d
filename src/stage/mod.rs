//! The steps that turn stored rows of a source tensor into planes of the artifact.
//!
//! A stage is a function on a [`WorkUnit`]: some whole rows of one module. All it changes is in the
//! unit; all it reads besides is in the [`ModuleWork`]. It states what it needs and what it gives, so
//! that a pipeline is checked before any weight is read, and how much of a matrix it must see at once,
//! so that the executor can stream the rest.
//!
//! To add a stage: one file here, one line in [`STAGES`], one name in a `pipelines/*.toml`.

mod ingest;
pub mod pipeline;
mod quantize;
mod solved;
mod transform;

use std::sync::Arc;

pub use ingest::find_non_finite;
pub use solved::{Place, Solved};

use crate::codec::{self, CodecSpec, Matrix, Plane};
use crate::isa::Isa;
use crate::quant::{self, Grain, QuantError, Quantizer, Repairs, RowLoss};
use crate::tensor::{Dtype, Float};
use crate::transform::Transform;

/// Every stage.
pub static STAGES: &[&dyn Stage] = &[&ingest::Ingest, &transform::ApplyTransforms, &quantize::Quantize];

/// What a unit holds between stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Datum {
    /// Rows as the source stores them.
    Stored,
    /// Finite rows in f32.
    Values,
    /// Encoded rows, one buffer a plane.
    Planes,
}

/// What stages need to know about a module.
#[derive(Debug, Clone)]
pub struct ModuleWork {
    /// Dtype of the source tensor.
    pub stored: Dtype,
    /// Elements in a row of the source tensor.
    pub row_elements: usize,
    /// Rows of the matrix, or of each of those that it is stacked of.
    pub matrix_rows: u64,
    /// Values are rounded to this first: MLX casts weights to the model's dtype before it quantizes.
    pub cast: Option<Float>,
    /// Changes of layout and basis, in order.
    pub transforms: Vec<Arc<dyn Transform>>,
    /// What changes of basis that are not among `transforms` yet must see at once: a plan knows that they will come,
    /// not the gains and rotations that they consist of.
    pub folded: Option<Grain>,
    /// What is stored.
    pub codec: CodecSpec,
    /// Dtype of the scales and biases, or of the values if the codec stores floats.
    pub float: Float,
    /// The search, by name.
    pub encoder: &'static str,
    /// What a search that weighs errors has found; the stages are passed over.
    pub solved: Option<Arc<Solved>>,
}

/// Some whole rows of one module on their way through the stages.
#[derive(Debug)]
pub struct WorkUnit<'a> {
    /// The rows as stored. [`Datum::Stored`]
    pub stored: &'a [u8],
    /// How many rows of the module come before.
    pub first_row: u64,
    /// Stored bytes that the next unit will read; may be empty.
    pub ahead: &'a [u8],
    /// The rows in f32. [`Datum::Values`]
    pub values: Vec<f32>,
    /// Where the encoded rows go, one exactly sized slice a plane. [`Datum::Planes`]
    pub planes: Vec<&'a mut [u8]>,
    /// One per row.
    pub losses: &'a mut [RowLoss],
    /// What the encoder changed beyond rounding.
    pub repairs: Repairs,
    /// Reused by transforms.
    pub scratch: Vec<f32>,
}

/// Why a stage refused rows. Positions count from the first row given.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StageError {
    /// A value that is not a number a model can use.
    #[error("element {element} is {value}")]
    NonFinite {
        /// Index into the rows given.
        element: u64,
        /// `NaN`, `inf` or `-inf`.
        value: f32,
    },
    /// A value that the dtype it is cast to cannot hold.
    #[error("element {element} overflows {float}")]
    CastOverflow {
        /// Index into the rows given.
        element: u64,
        /// The dtype.
        float: Float,
    },
    /// The encoder's refusal.
    #[error(transparent)]
    Quant(#[from] QuantError),
}

/// A step.
pub trait Stage: Sync {
    /// As a pipeline names it.
    fn id(&self) -> &'static str;

    /// What must be in the unit.
    fn needs(&self) -> Datum;

    /// What is in the unit afterwards, besides what was.
    fn gives(&self) -> Datum;

    /// How much of the matrix it must see at once.
    fn grain(&self, work: &ModuleWork) -> Grain;

    /// Runs on whole rows.
    ///
    /// # Errors
    /// [`StageError`], for the first bad element.
    fn run(&self, unit: &mut WorkUnit<'_>, work: &ModuleWork, isa: Isa) -> Result<(), StageError>;
}

impl ModuleWork {
    /// Whether the stored bytes are the artifact's bytes.
    pub fn verbatim(&self) -> bool {
        let changed = !self.transforms.is_empty() || self.folded.is_some() || self.cast.is_some();
        self.codec == CodecSpec::Keep && !changed
    }

    /// The planes that rows become.
    ///
    /// # Panics
    /// If the codec's groups do not divide a row, which the allocator refuses.
    pub fn planes(&self) -> Vec<Plane> {
        let row_elements = self.row_elements as u64;
        if self.verbatim() {
            // Any dtype may be kept, floats or not.
            return vec![Plane::of_rows("weight", self.stored, row_elements)];
        }
        let matrix = Matrix { out_features: self.matrix_rows, in_features: row_elements };
        let planes = codec::codec(self.codec).planes(matrix, self.float);
        planes.expect("the allocator checked the group")
    }

    /// The quantizer named by `encoder`, or what stands in for it.
    pub fn quantizer(&self) -> &'static dyn Quantizer {
        quant::quantizer(quant::base(self.encoder)).expect("plans name only registered encoders")
    }
}
