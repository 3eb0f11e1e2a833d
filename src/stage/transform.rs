//! Changes of layout and basis.

use super::{Datum, ModuleWork, Stage, StageError, WorkUnit};
use crate::isa::Isa;
use crate::quant::Grain;

/// Applies the module's transforms in order, in f32.
pub struct ApplyTransforms;

impl Stage for ApplyTransforms {
    fn id(&self) -> &'static str {
        "transform"
    }

    fn needs(&self) -> Datum {
        Datum::Values
    }

    fn gives(&self) -> Datum {
        Datum::Values
    }

    fn grain(&self, work: &ModuleWork) -> Grain {
        work.transforms.iter().map(|transform| transform.grain()).max().unwrap_or(Grain::Rows)
    }

    fn run(&self, unit: &mut WorkUnit<'_>, work: &ModuleWork, _isa: Isa) -> Result<(), StageError> {
        for transform in &work.transforms {
            transform.apply(&mut unit.values, work.row_elements, &mut unit.scratch);
        }
        Ok(())
    }
}
