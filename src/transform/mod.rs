//! Reversible changes of basis.
//!
//! A transform rewrites the values of a tensor so that the model computes the same function from
//! another representation. It is pure and works on rows in f32, so every quantizer sees its result
//! without a round trip through a narrower type.
//!
//! Two kinds are here. [`GainOffset`] and [`ChannelsLast`] change a checkpoint from the Hugging Face layout to
//! MLX's; choosing which rows of a source tensor a module owns (`experts.gate_up_proj` holds two modules) is
//! [`RowSelect`]. [`Scale`], [`Reorder`], [`Rotate`] and [`Neutral`] are the steps of a fold, each along one
//! [`Axis`] of a weight: norm gains, rotations of the residual stream and of value heads, balanced channels.

mod channels_last;
mod dense;
mod gain_offset;
pub mod hadamard;
mod neutral;
pub mod optrot;
mod reorder;
mod rotate;
mod row_select;
mod runs;
mod scale;

use std::fmt;

pub use channels_last::ChannelsLast;
pub use dense::{Dense, random_orthogonal};
pub use gain_offset::GainOffset;
pub use neutral::Neutral;
pub use reorder::Reorder;
pub use rotate::{Rotate, Rotation};
pub use row_select::RowSelect;
pub use scale::Scale;

use crate::isa::Isa;
use crate::quant::Grain;

/// An axis of a weight `[N, K]`, or of the stacked weights `[E, N, K]` of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// K, along rows.
    Input,
    /// N, across rows.
    Output,
}

/// Whole rows of a matrix.
#[derive(Debug)]
pub struct Panel<'a> {
    /// Row-major values.
    pub values: &'a mut [f32],
    /// Values in a row.
    pub row_elements: usize,
    /// How many rows of the matrix come before.
    pub first_row: u64,
}

impl Panel<'_> {
    /// The same rows once more.
    pub fn again(&mut self) -> Panel<'_> {
        Panel { values: self.values, row_elements: self.row_elements, first_row: self.first_row }
    }
}

/// A reversible rewriting of rows.
pub trait Transform: fmt::Debug + Send + Sync {
    /// As plans and provenance name it.
    fn id(&self) -> &'static str;

    /// How much of the tensor [`Transform::apply`] must see at once.
    fn grain(&self) -> Grain;

    /// Rewrites the rows in place. `scratch` is resized as needed. The result is the same bits for every `isa` and
    /// for every split of a matrix that [`Transform::grain`] allows.
    fn apply(&self, panel: Panel<'_>, isa: Isa, scratch: &mut Vec<f32>);

    /// Undoes [`Transform::apply`], up to rounding.
    fn invert(&self, panel: Panel<'_>, isa: Isa, scratch: &mut Vec<f32>);
}
