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
        let rows = Rows {
            values: &unit.values,
            in_features: work.row_elements,
            float: work.float,
            ahead: unit.ahead,
        };
        unit.repairs += work.quantizer().fit(work.codec, rows, isa, &mut unit.planes, unit.losses)?;
        Ok(())
    }
}
