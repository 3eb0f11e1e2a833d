//! MLX's own choice of codes: bit for bit what `mx.quantize` stores on the CPU.
//!
//! affine: codes come from the parameters *before* they are rounded to the stored dtype
//! (`docs/formats/affine.md`). mxfp4, mxfp8, nvfp4: [`super::mxfp`].
//! Source: MLX 0.32.4, `mlx/backend/cpu/quantized.cpp`.

use super::affine::{Coding, Parameters, encode_group, range};
use super::loss::{RowSums, mend_out_of_range};
use super::{Grain, QuantError, Quantizer, Repairs, RowLoss, Rows, check_sizes, mxfp};
use crate::codec::CodecSpec;
use crate::codec::affine::{with_bits, write_parameter};
use crate::codec::mxfp::Mxfp;
use crate::isa::Isa;
use crate::numeric::lanes::{Kernel, LANES, Lanes, dispatch};
use crate::numeric::prefetch;

/// The default encoder.
pub(super) struct Mlx;

impl Quantizer for Mlx {
    fn id(&self) -> &'static str {
        "mlx"
    }

    fn accepts(&self, codec: CodecSpec) -> bool {
        codec.quantizes() && !matches!(codec, CodecSpec::Trellis(_))
    }

    fn grain(&self, _matrix_rows: u64) -> Grain {
        Grain::Rows
    }

    fn fit(
        &self,
        codec: CodecSpec,
        rows: Rows<'_>,
        isa: Isa,
        planes: &mut [&mut [u8]],
        losses: &mut [RowLoss],
    ) -> Result<Repairs, QuantError> {
        check_sizes(codec, rows, planes, losses);
        let repairs = match codec {
            CodecSpec::Affine { bits, group } => {
                with_bits!(bits.get(), BITS => {
                    dispatch(isa, Encode::<BITS> { group: group.get() as usize, rows, planes, losses })?
                });
                Repairs::default()
            }
            CodecSpec::Mxfp4 => dispatch(isa, mxfp::Encode { codec: Mxfp::Mxfp4, rows, planes, losses }),
            CodecSpec::Mxfp8 => dispatch(isa, mxfp::Encode { codec: Mxfp::Mxfp8, rows, planes, losses }),
            CodecSpec::Nvfp4 => dispatch(isa, mxfp::Encode { codec: Mxfp::Nvfp4, rows, planes, losses }),
            CodecSpec::Trellis(_) | CodecSpec::Keep | CodecSpec::Bf16 | CodecSpec::F16 | CodecSpec::F32 => {
                panic!("`mlx` does not accept {codec}: ask `accepts` first")
            }
        };
        mend_out_of_range(codec, rows, planes, losses);
        Ok(repairs)
    }
}

struct Encode<'a, 'p, const BITS: u32> {
    group: usize,
    rows: Rows<'a>,
    planes: &'a mut [&'p mut [u8]],
    losses: &'a mut [RowLoss],
}

impl<const BITS: u32> Kernel for Encode<'_, '_, BITS> {
    type Output = Result<(), QuantError>;

    #[inline(always)]
    fn run<V: Lanes>(self) -> Self::Output {
        let [weight, scales, biases] = self.planes else { unreachable!("sizes were checked") };
        let float = self.rows.float;
        let group_size = self.group;
        let groups_per_row = self.rows.in_features / group_size;
        let mut sums = RowSums::<V>::new(self.losses, self.rows.in_features);
        let mut packed = weight.chunks_exact_mut(group_size * BITS as usize / 8);
        // Ranges of sixteen groups first, then their parameters at once, then their codes.
        let strips = self.rows.values.len().div_ceil(LANES * group_size);
        let mut ahead = self.rows.ahead.chunks(self.rows.ahead.len().div_ceil(strips).max(1));
        for (s, strip) in self.rows.values.chunks(LANES * group_size).enumerate() {
            let first = s * LANES;
            prefetch(ahead.next().unwrap_or_default());
            let [mut low, mut high] = [[0.0; LANES]; 2];
            for (g, group) in strip.chunks_exact(group_size).enumerate() {
                (low[g], high[g]) = range::<V>(group);
            }
            let parameters = Parameters::<V>::mlx::<BITS>(V::load(&low), V::load(&high), float);
            parameters.check(first, groups_per_row, float)?;
            let [mut scale, mut bias, mut stored_scale, mut stored_bias] = [[0.0; LANES]; 4];
            parameters.scale.store(&mut scale);
            parameters.bias.store(&mut bias);
            parameters.stored_scale.store(&mut stored_scale);
            parameters.stored_bias.store(&mut stored_bias);
            for ((g, group), packed) in strip.chunks_exact(group_size).enumerate().zip(&mut packed) {
                write_parameter(float, scales, first + g, stored_scale[g]);
                write_parameter(float, biases, first + g, stored_bias[g]);
                let coding = Coding {
                    by: scale[g],
                    offset: bias[g],
                    stored_scale: stored_scale[g],
                    stored_bias: stored_bias[g],
                };
                encode_group::<V, BITS, true>(group, coding, packed, &mut sums.run);
                sums.advance(group_size);
            }
        }
        Ok(())
    }
}
