//! Reversible changes of basis.
//!
//! A transform rewrites the values of a tensor so that the model computes the same function from
//! another representation. It is pure and works on rows in f32, so every quantizer sees its result
//! without a round trip through a narrower type.
//!
//! The ones here change a checkpoint from the Hugging Face layout to MLX's:
//! [`GainOffset`] and [`ChannelsLast`]. Choosing which rows of a source tensor a module owns
//! (`experts.gate_up_proj` holds two modules) is [`RowSelect`].

mod channels_last;
mod gain_offset;
mod row_select;

use std::fmt;

pub use channels_last::ChannelsLast;
pub use gain_offset::GainOffset;
pub use row_select::RowSelect;

use crate::quant::Grain;

/// A reversible rewriting of rows.
pub trait Transform: fmt::Debug + Send + Sync {
    /// As plans and provenance name it.
    fn id(&self) -> &'static str;

    /// How much of the tensor [`Transform::apply`] must see at once.
    fn grain(&self) -> Grain;

    /// Rewrites whole rows of `row_elements` values in place. `scratch` is resized as needed.
    fn apply(&self, values: &mut [f32], row_elements: usize, scratch: &mut Vec<f32>);

    /// Undoes [`Transform::apply`], up to rounding.
    fn invert(&self, values: &mut [f32], row_elements: usize, scratch: &mut Vec<f32>);
}
