//! A gain that its readers have taken over.

use super::{Panel, Transform};
use crate::isa::Isa;
use crate::quant::Grain;

/// Every value becomes the one that stands for a gain of 1: 1 where gains are stored, 0 where they are stored
/// zero-centred.
///
/// Alone it cannot be undone: what was there is in the readers' [`super::Scale`].
#[derive(Debug, Clone, Copy)]
pub struct Neutral(pub f32);

impl Transform for Neutral {
    fn id(&self) -> &'static str {
        "neutral"
    }

    fn grain(&self) -> Grain {
        Grain::Rows
    }

    fn apply(&self, panel: Panel<'_>, _isa: Isa, _scratch: &mut Vec<f32>) {
        panel.values.fill(self.0);
    }

    fn invert(&self, panel: Panel<'_>, _isa: Isa, _scratch: &mut Vec<f32>) {
        panel.values.fill(self.0);
    }
}
