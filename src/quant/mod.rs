//! The search for a good point in a codec.
//!
//! A quantizer is given rows in f32 and a codec, and fills the codec's planes. Two quantizers may
//! fill the same codec: the bytes differ, the meaning of the bytes does not.

mod affine;
mod cast;
pub mod gptq;
pub mod ldlq;
mod loss;
mod mlx;
mod mxfp;
mod refit;
pub mod trellis;

use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use crate::codec::{self, CodecSpec, Matrix};
use crate::failure::{Exit, Failure};
use crate::isa::Isa;
use crate::tensor::Float;

/// The encoders a recipe may name, in the order documents list them; the first is the default.
pub const ENCODERS: &[&str] = &["mlx", "refit", GPTQ, GPTQ_REFIT, TRELLIS, LDLQ];

/// Rounding with error feedback under the second moment of a layer's inputs.
pub const GPTQ: &str = "gptq";

/// The same with searched parameters, refined afterwards.
pub const GPTQ_REFIT: &str = "gptq-refit";

/// Tiles of a trellis, each by itself.
pub const TRELLIS: &str = "trellis";

/// Tiles of a trellis with error feedback under the second moment of a layer's inputs.
pub const LDLQ: &str = "ldlq";

/// The encoder that needs no second moments and stands in where there are none: `mlx` for `gptq`, `refit` for
/// `gptq-refit`, `trellis` for `ldlq`, and every other for itself.
pub fn base(encoder: &'static str) -> &'static str {
    match encoder {
        GPTQ => "mlx",
        GPTQ_REFIT => "refit",
        LDLQ => TRELLIS,
        _ => encoder,
    }
}

/// Whether an encoder weighs errors by the second moment of the inputs.
pub fn weighs(encoder: &str) -> bool {
    matches!(encoder, GPTQ | GPTQ_REFIT | LDLQ)
}

/// Every quantizer. Those not in [`ENCODERS`] follow from the codec: `cast` fills float storage.
pub static QUANTIZERS: &[&dyn Quantizer] = &[&mlx::Mlx, &refit::Refit, &ldlq::Nearest, &cast::Cast];

/// The quantizer of that name.
pub fn quantizer(id: &str) -> Option<&'static dyn Quantizer> {
    QUANTIZERS.iter().copied().find(|quantizer| quantizer.id() == id)
}

/// The encoder of codecs that store floats: rounds to the dtype. No recipe needs to name it.
pub const CAST: &str = "cast";

/// How much of a weight a quantizer or a stage must see at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Grain {
    /// Any range of rows: work is streamed.
    Rows,
    /// Runs of so many rows: a matrix of each expert, or a head.
    Blocks(u64),
    /// The whole matrix.
    Matrix,
}

/// Squared error of one row against what its bytes decode to, and the row's energy.
///
/// error = Σ_k (w[k] − decode[k])², energy = Σ_k w[k]²; decode as [`crate::codec::Codec::decode`].
/// Both sums have one fixed order (`docs/formats/affine.md`, "Reported error"), so they do not
/// depend on the instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RowLoss {
    /// Σ (w − decode)².
    pub error: f64,
    /// Σ w².
    pub energy: f64,
}

impl AddAssign for RowLoss {
    fn add_assign(&mut self, other: Self) {
        self.error += other.error;
        self.energy += other.energy;
    }
}

/// What an encoder changed beyond rounding. Counted and reported by name; `--strict` refuses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Repair {
    /// A group whose scale is below the format's range was written as zeros.
    ScaleUnderflow,
    /// A group's scale was clamped to the format's largest, so its largest weights are clipped.
    ScaleOverflow,
    /// A tile's costs left the range of fixed point, and it was searched again in f32.
    PathSaturated,
    /// A weight is more than twice as far out as its codebook reaches, and is stored as the farthest value.
    OutOfReach,
}

impl Repair {
    /// As JSON spells it.
    pub fn name(self) -> &'static str {
        match self {
            Repair::ScaleUnderflow => "scale-underflow",
            Repair::ScaleOverflow => "scale-overflow",
            Repair::PathSaturated => "path-saturated",
            Repair::OutOfReach => "out-of-reach",
        }
    }
}

/// Counted repairs of some rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Repairs {
    /// Groups of [`Repair::ScaleUnderflow`].
    pub scale_underflow: u64,
    /// Groups of [`Repair::ScaleOverflow`].
    pub scale_overflow: u64,
    /// Tiles of [`Repair::PathSaturated`].
    pub path_saturated: u64,
    /// Weights of [`Repair::OutOfReach`].
    pub out_of_reach: u64,
}

impl Repairs {
    /// The kinds that occurred, with their counts.
    pub fn rows(self) -> impl Iterator<Item = (Repair, u64)> {
        let kinds = [
            (Repair::ScaleUnderflow, self.scale_underflow),
            (Repair::ScaleOverflow, self.scale_overflow),
            (Repair::PathSaturated, self.path_saturated),
            (Repair::OutOfReach, self.out_of_reach),
        ];
        kinds.into_iter().filter(|(_, count)| *count > 0)
    }
}

impl AddAssign for Repairs {
    fn add_assign(&mut self, other: Self) {
        self.scale_underflow += other.scale_underflow;
        self.scale_overflow += other.scale_overflow;
        self.path_saturated += other.path_saturated;
        self.out_of_reach += other.out_of_reach;
    }
}

/// Why rows could not be encoded. Positions are relative to the rows given.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum QuantError {
    /// A scale or bias does not fit the dtype it is stored in.
    #[error("scale or bias of group {group} is not finite when stored as {float} (from {value:e})")]
    ParameterOverflow {
        /// Row of the rows given.
        row: usize,
        /// Group of that row.
        group: usize,
        /// The dtype that parameters are stored in.
        float: Float,
        /// The value before it was rounded.
        value: f32,
    },
    /// A scale of a trellis does not fit the f16 it is stored in.
    #[error("a scale is not finite when stored as f16 (from {value:e})")]
    ScaleOverflow {
        /// Row of the rows given; the first if the scale is an input's.
        row: usize,
        /// The value before it was rounded.
        value: f32,
    },
    /// A weight does not fit the float type it is stored in.
    #[error("the weight in column {column} is not finite when stored as {float} (from {value:e})")]
    ValueOverflow {
        /// Row of the rows given.
        row: usize,
        /// Column of that row.
        column: usize,
        /// The dtype that weights are stored in.
        float: Float,
        /// The value before it was rounded.
        value: f32,
    },
}

impl QuantError {
    /// The row, of the rows given.
    pub fn row(&self) -> usize {
        match self {
            QuantError::ParameterOverflow { row, .. }
            | QuantError::ScaleOverflow { row, .. }
            | QuantError::ValueOverflow { row, .. } => *row,
        }
    }

    /// The same, of rows of which those given were `rows` further down.
    pub(crate) fn moved(mut self, rows: usize) -> Self {
        match &mut self {
            QuantError::ParameterOverflow { row, .. }
            | QuantError::ScaleOverflow { row, .. }
            | QuantError::ValueOverflow { row, .. } => *row += rows,
        }
        self
    }
}

impl Failure for QuantError {
    fn exit(&self) -> Exit {
        Exit::Input
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            QuantError::ParameterOverflow { float, .. } => {
                format!(
                    "weights this large leave no room for a scale in {float}; store the tensor with `keep`"
                )
            }
            QuantError::ScaleOverflow { .. } => {
                "weights this large leave no room for a scale; store the tensor with `keep`".to_owned()
            }
            QuantError::ValueOverflow { float, .. } => {
                format!("{float} cannot hold the weight; store the tensor with `keep` or `bf16`")
            }
        })
    }
}

/// Rows of a weight, ready to be encoded.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// Row-major values, rows × `in_features`, all finite.
    pub values: &'a [f32],
    /// K.
    pub in_features: usize,
    /// The dtype that scales and biases are stored in: the model's.
    pub float: Float,
    /// Stored bytes that are read next: a fast encoder asks memory for them meanwhile. May be empty.
    pub ahead: &'a [u8],
}

/// A search for codes.
pub trait Quantizer: Send + Sync {
    /// As a recipe's `encoder` names it.
    fn id(&self) -> &'static str;

    /// Whether it can fill this codec.
    fn accepts(&self, codec: CodecSpec) -> bool;

    /// How much it must see at once of a weight whose matrices have so many rows.
    fn grain(&self, matrix_rows: u64) -> Grain;

    /// Fills `planes` (laid out as the codec says, exactly sized) and `losses` (one per row).
    ///
    /// The result is the same bits for every `isa` and for every split of a weight into ranges of
    /// rows, if [`Quantizer::grain`] is [`Grain::Rows`].
    ///
    /// # Errors
    /// [`QuantError`]; the planes then hold nothing of use.
    fn fit(
        &self,
        codec: CodecSpec,
        rows: Rows<'_>,
        isa: Isa,
        planes: &mut [&mut [u8]],
        losses: &mut [RowLoss],
    ) -> Result<Repairs, QuantError>;
}

/// What every `fit` relies on.
///
/// # Panics
/// If the planes, losses or values are not sized as the codec says: the caller's mistake, not the user's.
fn check_sizes(spec: CodecSpec, rows: Rows<'_>, planes: &[&mut [u8]], losses: &[RowLoss]) {
    assert_eq!(rows.values.len(), losses.len() * rows.in_features, "values of {} rows", losses.len());
    let layout = codec::codec(spec)
        .planes(
            Matrix { out_features: losses.len() as u64, in_features: rows.in_features as u64 },
            rows.float,
        )
        .expect("a plan asks only for codecs that fit the shape");
    assert_eq!(planes.len(), layout.len(), "planes of {spec}");
    for (plane, layout) in planes.iter().zip(layout) {
        assert_eq!(
            plane.len() as u64,
            layout.bytes_of(layout.begun(0..losses.len() as u64)) as u64,
            "bytes of `{}`",
            layout.suffix
        );
    }
}
