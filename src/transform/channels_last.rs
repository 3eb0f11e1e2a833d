//! Convolution kernels to channels-last.

use super::{Panel, Transform};
use crate::isa::Isa;
use crate::quant::Grain;

/// out[n, s, c] = in[n, c, s]: `[N, C, …S]` to `[N, …S, C]`, with S the product of the kernel's dimensions.
///
/// PyTorch keeps a kernel's input channels before its spatial dimensions, MLX after.
#[derive(Debug, Clone, Copy)]
pub struct ChannelsLast {
    /// C, input channels.
    pub channels: usize,
}

impl ChannelsLast {
    /// Transposes each row from `[rows_in, cols_in]` to `[cols_in, rows_in]`.
    fn transpose(values: &mut [f32], row_elements: usize, rows_in: usize, scratch: &mut Vec<f32>) {
        let cols_in = row_elements / rows_in;
        scratch.resize(row_elements, 0.0);
        for row in values.chunks_exact_mut(row_elements) {
            for r in 0..rows_in {
                for c in 0..cols_in {
                    scratch[c * rows_in + r] = row[r * cols_in + c];
                }
            }
            row.copy_from_slice(&scratch[..row_elements]);
        }
    }
}

impl Transform for ChannelsLast {
    fn id(&self) -> &'static str {
        "channels-last"
    }

    fn grain(&self) -> Grain {
        Grain::Rows
    }

    fn apply(&self, panel: Panel<'_>, _isa: Isa, scratch: &mut Vec<f32>) {
        Self::transpose(panel.values, panel.row_elements, self.channels, scratch);
    }

    fn invert(&self, panel: Panel<'_>, _isa: Isa, scratch: &mut Vec<f32>) {
        Self::transpose(panel.values, panel.row_elements, panel.row_elements / self.channels, scratch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_the_channel_axis_last_and_back() {
        // Two kernels [C = 2, S = 3]; channel c, tap s holds 10 c + s (+ 100 for the second kernel).
        let original: Vec<f32> = vec![0., 1., 2., 10., 11., 12., 100., 101., 102., 110., 111., 112.];
        let mut values = original.clone();
        let mut scratch = Vec::new();
        let mut panel = Panel { values: &mut values, row_elements: 6, first_row: 0 };
        ChannelsLast { channels: 2 }.apply(panel.again(), Isa::Scalar, &mut scratch);
        assert_eq!(panel.values, [0., 10., 1., 11., 2., 12., 100., 110., 101., 111., 102., 112.]);
        ChannelsLast { channels: 2 }.invert(panel.again(), Isa::Scalar, &mut scratch);
        assert_eq!(panel.values, original);
    }
}
