//! Zero-centred norm weights to gains.

use super::{Panel, Transform};
use crate::isa::Isa;
use crate::quant::Grain;

/// gain[i] = 1 + w[i], in f32; the caller rounds to the stored dtype.
///
/// Qwen3.5 stores `w` in the Hugging Face layout and the gain in MLX's
/// (`transformers` `Qwen3_5RMSNorm`, `mlx_lm` `qwen3_5.sanitize`).
#[derive(Debug, Clone, Copy)]
pub struct GainOffset;

impl Transform for GainOffset {
    fn id(&self) -> &'static str {
        "gain-offset"
    }

    fn grain(&self) -> Grain {
        Grain::Rows
    }

    fn apply(&self, panel: Panel<'_>, _isa: Isa, _scratch: &mut Vec<f32>) {
        panel.values.iter_mut().for_each(|w| *w += 1.0);
    }

    fn invert(&self, panel: Panel<'_>, _isa: Isa, _scratch: &mut Vec<f32>) {
        panel.values.iter_mut().for_each(|gain| *gain -= 1.0);
    }
}
