//! Values to planes.

use super::{Datum, ModuleWork, Stage, StageError, WorkUnit};
use crate::isa::Isa;
use crate::quant::{Grain, Rows};

/// Hands the rows to the module's quantizer.
pub struct Quantize;

impl Stage for Quantize {
    fn id(&self) -> &'static str {
        "quantize"
    }

    fn needs(&self) -> Datum {
        Datum::Values
    }

    fn gives(&self) -> Datum {
        Datum::Planes
    }

    fn grain(&self, work: &ModuleWork) -> Grain {
        work.quantizer().grain(work.matrix_rows)
    }

    fn run(&self, unit: &mut WorkUnit<'_>, work: &ModuleWork, isa: Isa) -> Result<(), StageError> {
        let (quantizer, in_features) = (work.quantizer(), work.row_elements);
        let count = unit.losses.len();
        let together = match quantizer.grain(work.matrix_rows) {
            Grain::Blocks(rows) => rows as usize,
            Grain::Rows | Grain::Matrix => count.max(1),
        };
        let layout = work.planes();
        for start in (0..count).step_by(together) {
            let end = (start + together).min(count);
            let values = &unit.values[start * in_features..end * in_features];
            let rows = Rows { values, in_features, float: work.float, ahead: unit.ahead };
            let mut planes: Vec<&mut [u8]> = unit
                .planes
                .iter_mut()
                .zip(&layout)
                .map(|(bytes, plane)| {
                    let before = plane.bytes_of(plane.begun(0..start as u64));
                    &mut bytes[before..before + plane.bytes_of(plane.begun(start as u64..end as u64))]
                })
                .collect();
            let losses = &mut unit.losses[start..end];
            let fit = quantizer.fit(work.codec, rows, isa, &mut planes, losses);
            unit.repairs += fit.map_err(|error| error.moved(start))?;
        }
        Ok(())
    }
}
