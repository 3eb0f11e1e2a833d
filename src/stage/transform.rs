//! Changes of layout and basis.

use super::{Datum, ModuleWork, Stage, StageError, WorkUnit};
use crate::isa::Isa;
use crate::quant::Grain;
use crate::transform::Panel;

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
        let own = work.transforms.iter().map(|transform| transform.grain()).max();
        own.max(work.folded).unwrap_or(Grain::Rows)
    }

    fn run(&self, unit: &mut WorkUnit<'_>, work: &ModuleWork, isa: Isa) -> Result<(), StageError> {
        for transform in &work.transforms {
            let panel = Panel {
                values: &mut unit.values,
                row_elements: work.row_elements,
                first_row: unit.first_row,
            };
            transform.apply(panel, isa, &mut unit.scratch);
        }
        Ok(())
    }
}
