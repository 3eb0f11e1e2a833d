//! Rounding to a float type: the encoder of `keep`, `bf16`, `f16` and `f32`.

use super::loss::{RUN, RowSums, Run, mend_out_of_range};
use super::{Grain, QuantError, Quantizer, Repairs, RowLoss, Rows, check_sizes};
use crate::codec::CodecSpec;
use crate::codec::float::Storage;
use crate::isa::Isa;
use crate::numeric::lanes::{Kernel, LANES, Lanes, dispatch, round_to};
use crate::numeric::{self, narrow};
use crate::tensor::Float;

/// Nearest value, ties to even.
pub(super) struct Cast;

impl Quantizer for Cast {
    fn id(&self) -> &'static str {
        "cast"
    }

    fn accepts(&self, codec: CodecSpec) -> bool {
        storage(codec).is_some()
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
        let storage =
            storage(codec).unwrap_or_else(|| panic!("`cast` does not accept {codec}: ask `accepts` first"));
        let float = storage.float(rows.float);
        let [weight] = planes else { unreachable!("sizes were checked") };
        if !narrow(float, rows.values, weight, isa)
            && let Some(at) = rows.values.iter().position(|w| !numeric::round_to(float, *w).is_finite())
        {
            let (row, column) = (at / rows.in_features, at % rows.in_features);
            return Err(QuantError::ValueOverflow { row, column, float, value: rows.values[at] });
        }
        dispatch(isa, Losses { rows, float, losses });
        mend_out_of_range(codec, rows, planes, losses);
        Ok(Repairs::default())
    }
}

fn storage(codec: CodecSpec) -> Option<Storage> {
    match codec {
        CodecSpec::Keep => Some(Storage::Keep),
        CodecSpec::Bf16 => Some(Storage::Bf16),
        CodecSpec::F16 => Some(Storage::F16),
        CodecSpec::F32 => Some(Storage::F32),
        _ => None,
    }
}

struct Losses<'a> {
    rows: Rows<'a>,
    float: Float,
    losses: &'a mut [RowLoss],
}

impl Kernel for Losses<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        if self.rows.in_features == 0 {
            self.losses.fill(RowLoss::default());
            return;
        }
        let mut sums = RowSums::<V>::new(self.losses, self.rows.in_features);
        for row in self.rows.values.chunks_exact(self.rows.in_features) {
            let (runs, rest) = row.as_chunks::<RUN>();
            for run in runs {
                add::<V>(&mut sums.run, run, self.float);
                sums.advance(RUN);
            }
            if !rest.is_empty() {
                // Filled up with zeros, which add nothing.
                let mut padded = [0.0; RUN];
                padded[..rest.len()].copy_from_slice(rest);
                add::<V>(&mut sums.run, &padded, self.float);
                sums.advance(rest.len());
            }
        }
    }
}

#[inline(always)]
fn add<V: Lanes>(run: &mut Run<V>, weights: &[f32; RUN], float: Float) {
    for weights in weights.as_chunks::<LANES>().0 {
        let weights = V::load(weights);
        run.add(weights, round_to(float, weights));
    }
}
