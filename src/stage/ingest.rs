//! Stored rows to finite f32.

use super::{Datum, ModuleWork, Stage, StageError, WorkUnit};
use crate::isa::Isa;
use crate::numeric;
use crate::quant::Grain;
use crate::tensor::Float;

/// Widens to f32 (exact), refuses NaN and infinity, and rounds to the model's dtype where asked.
pub struct Ingest;

impl Stage for Ingest {
    fn id(&self) -> &'static str {
        "ingest"
    }

    fn needs(&self) -> Datum {
        Datum::Stored
    }

    fn gives(&self) -> Datum {
        Datum::Values
    }

    fn grain(&self, _work: &ModuleWork) -> Grain {
        Grain::Rows
    }

    fn run(&self, unit: &mut WorkUnit<'_>, work: &ModuleWork, isa: Isa) -> Result<(), StageError> {
        let float = work.stored.float().expect("the plan lets only float tensors through the stages");
        unit.values.resize(unit.stored.len() / float.bytes(), 0.0);
        if !numeric::widen(float, unit.stored, &mut unit.values, isa) {
            return Err(find_non_finite(float, unit.stored).expect("widen saw one"));
        }
        if let Some(float) = work.cast {
            let mut narrow = vec![0; unit.values.len() * float.bytes()];
            numeric::narrow(float, &unit.values, &mut narrow, isa);
            if !numeric::widen(float, &narrow, &mut unit.values, isa) {
                let element = numeric::first_non_finite(float, &narrow).expect("widen saw one") as u64;
                return Err(StageError::CastOverflow { element, float });
            }
        }
        Ok(())
    }
}

/// The first element of `stored` that is NaN or infinite.
pub fn find_non_finite(float: Float, stored: &[u8]) -> Option<StageError> {
    let element = numeric::first_non_finite(float, stored)?;
    let size = float.bytes();
    let mut value = [0.0];
    numeric::widen(float, &stored[element * size..][..size], &mut value, Isa::Scalar);
    Some(StageError::NonFinite { element: element as u64, value: value[0] })
}
