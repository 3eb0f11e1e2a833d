//! One panel of one module, from the mapped source to its planes.

use std::ops::Range;

use crate::failure::{Exit, Failure};
use crate::plan::{Module, Plan, STRIP_ELEMENTS};
use crate::quant::{Grain, Repairs, RowLoss};
use crate::stage::{ModuleWork, StageError, WorkUnit, find_non_finite};
use crate::tensor::{Float, Shape};

/// Why a panel could not be encoded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum EncodeError {
    #[error("`{file}`: tensor `{tensor}` holds {value} at {index}")]
    NonFinite { file: String, tensor: String, index: Shape, value: f32 },
    #[error("`{file}`: tensor `{tensor}` has a value at {index} that overflows {float}")]
    CastOverflow { file: String, tensor: String, index: Shape, float: Float },
    #[error("`{file}`: tensor `{tensor}` cannot be encoded at row {row} of its matrix: {problem}")]
    Encode { file: String, tensor: String, row: u64, problem: String },
    #[error("the codes that were found for `{tensor}` cannot be read back: {problem}")]
    Solved { tensor: String, problem: String },
}

impl Failure for EncodeError {
    fn exit(&self) -> Exit {
        match self {
            EncodeError::Solved { .. } => Exit::Machine,
            _ => Exit::Input,
        }
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            EncodeError::Solved { .. } => "run the same command with `--resume` to find them again",
            EncodeError::NonFinite { .. } => {
                "the checkpoint is damaged or was trained to this point; take it from its origin again"
            }
            EncodeError::CastOverflow { .. } => {
                "give this module `codec = \"keep\"` in a `[[rule]]`, which stores it as it is"
            }
            EncodeError::Encode { .. } => "give this module `codec = \"keep\"` in a `[[rule]]`",
        };
        Some(help.to_owned())
    }
}

/// Buffers that a thread uses again and again.
#[derive(Debug, Default)]
pub struct Scratch {
    values: Vec<f32>,
    transform: Vec<f32>,
    planes: Vec<Vec<u8>>,
}

/// A panel's rows as the codec stores them.
#[derive(Debug)]
pub struct Encoded<'a> {
    /// The panel's rows of each plane.
    pub planes: Vec<&'a [u8]>,
    /// One per row.
    pub losses: Vec<RowLoss>,
    /// What the encoder changed beyond rounding.
    pub repairs: Repairs,
}

/// Takes the panel through the pipeline, strip by strip. Planes that are the stored bytes are not copied,
/// so the caller gives the source's pages back ([`release_panel`]) when it is done with them.
///
/// `work` is the module's, with its changes of basis.
///
/// # Errors
/// [`EncodeError`].
pub fn encode_panel<'a>(
    plan: &'a Plan,
    module: &Module,
    work: &ModuleWork,
    panel: usize,
    scratch: &'a mut Scratch,
) -> Result<Encoded<'a>, EncodeError> {
    encode_rows(plan, module, work, module.panels[panel].clone(), scratch)
}

/// [`encode_panel`] for any rows that are contiguous in the source and whole blocks of the module's grain.
///
/// # Errors
/// [`EncodeError`].
pub fn encode_rows<'a>(
    plan: &'a Plan,
    module: &Module,
    work: &ModuleWork,
    rows: Range<u64>,
    scratch: &'a mut Scratch,
) -> Result<Encoded<'a>, EncodeError> {
    let entry = &plan.checkpoint.tensors()[module.tensor];
    let source = module.source_range(&rows);
    let stored = &plan.checkpoint.bytes(entry)[source.start as usize..source.end as usize];
    let count = (rows.end - rows.start) as usize;
    let mut encoded =
        Encoded { planes: Vec::new(), losses: vec![RowLoss::default(); count], repairs: Repairs::default() };
    let refuse = |(error, elements_before): (StageError, usize)| {
        refusal(plan, module, error, source.start / entry.dtype.bytes() + elements_before as u64)
    };
    if work.verbatim() {
        check_finite(plan, module, stored, &mut scratch.values).map_err(refuse)?;
        encoded.planes.push(stored);
        return Ok(encoded);
    }
    if let Some(solved) = &work.solved {
        // Counted once, with the first panel.
        if rows.start == 0 {
            encoded.repairs = solved.repairs();
        }
        let read = solved.read(rows, &work.planes(), &mut scratch.planes);
        let tensor = || entry.name.clone();
        encoded.losses =
            read.map_err(|error| EncodeError::Solved { tensor: tensor(), problem: error.to_string() })?;
        encoded.planes.extend(scratch.planes.iter().map(Vec::as_slice));
        return Ok(encoded);
    }
    let planes_of = work.planes();
    scratch.planes.resize_with(planes_of.len(), Vec::new);
    for (buffer, plane) in scratch.planes.iter_mut().zip(&planes_of) {
        buffer.resize(plane.bytes_of(plane.begun(rows.clone())), 0);
    }
    let row_bytes = stored.len() / count;
    let strip = match plan.pipeline.grain(work) {
        Grain::Matrix => count,
        Grain::Blocks(rows) => {
            let block = rows as usize;
            (STRIP_ELEMENTS / (module.work.row_elements * block)).max(1) * block
        }
        Grain::Rows => (STRIP_ELEMENTS / module.work.row_elements).max(1),
    };
    for start in (0..count).step_by(strip) {
        let end = (start + strip).min(count);
        let planes = scratch.planes.iter_mut().zip(&planes_of).map(|(buffer, plane)| {
            let before = plane.begun(rows.start..rows.start + start as u64);
            let here = plane.begun(rows.start + start as u64..rows.start + end as u64);
            let start = plane.bytes_of(before);
            &mut buffer[start..start + plane.bytes_of(here)]
        });
        let mut unit = WorkUnit {
            stored: &stored[start * row_bytes..end * row_bytes],
            first_row: rows.start + start as u64,
            ahead: &stored[end * row_bytes..(end + strip).min(count) * row_bytes],
            values: std::mem::take(&mut scratch.values),
            planes: planes.collect(),
            losses: &mut encoded.losses[start..end],
            repairs: Repairs::default(),
            scratch: std::mem::take(&mut scratch.transform),
        };
        let stages = plan.pipeline.stages();
        let result = stages.iter().try_for_each(|stage| stage.run(&mut unit, work, plan.isa));
        encoded.repairs += unit.repairs;
        (scratch.values, scratch.transform) = (unit.values, unit.scratch);
        result.map_err(|error| refuse((error, start * module.work.row_elements)))?;
    }
    encoded.planes.extend(scratch.planes.iter().map(Vec::as_slice));
    Ok(encoded)
}

/// Gives back the source pages that a panel was read from.
pub fn release_panel(plan: &Plan, module: &Module, panel: usize) {
    release_rows(plan, module, &module.panels[panel]);
}

/// Gives back the source pages of rows that are contiguous in the source.
pub fn release_rows(plan: &Plan, module: &Module, rows: &Range<u64>) {
    let entry = &plan.checkpoint.tensors()[module.tensor];
    let source = module.source_range(rows);
    plan.checkpoint.release(entry.file, entry.range.start + source.start..entry.range.start + source.end);
}

/// Floats that are copied are refused like others if they are not finite; the error comes with the
/// elements before its strip.
fn check_finite(
    plan: &Plan,
    module: &Module,
    stored: &[u8],
    values: &mut Vec<f32>,
) -> Result<(), (StageError, usize)> {
    let Some(float) = module.work.stored.float() else { return Ok(()) };
    for (strip, bytes) in stored.chunks(STRIP_ELEMENTS * float.bytes()).enumerate() {
        values.resize(bytes.len() / float.bytes(), 0.0);
        if !crate::numeric::widen(float, bytes, values, plan.isa) {
            let error = find_non_finite(float, bytes).expect("widen saw one");
            return Err((error, strip * STRIP_ELEMENTS));
        }
    }
    Ok(())
}

/// Says where in the source tensor a stage met something it refuses; `before` elements precede the strip.
fn refusal(plan: &Plan, module: &Module, error: StageError, before: u64) -> EncodeError {
    let entry = &plan.checkpoint.tensors()[module.tensor];
    let file = plan.checkpoint.files()[entry.file].path.display().to_string();
    let tensor = entry.name.clone();
    let index = |element: u64| coordinates(&entry.shape, before + element);
    match error {
        StageError::NonFinite { element, value } => {
            EncodeError::NonFinite { file, tensor, index: index(element), value }
        }
        StageError::CastOverflow { element, float } => {
            EncodeError::CastOverflow { file, tensor, index: index(element), float }
        }
        StageError::Quant(error) => {
            // The error counts rows from the strip's first; a person needs the tensor's own.
            let row = before / module.work.row_elements as u64 + error.row() as u64;
            EncodeError::Encode { file, tensor, row, problem: error.to_string() }
        }
    }
}

/// The index of element `element` of a tensor of this shape.
fn coordinates(shape: &Shape, mut element: u64) -> Shape {
    let mut index = Vec::new();
    for d in shape.0.iter().rev() {
        index.push(element % d);
        element /= d;
    }
    index.reverse();
    Shape(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_count_the_last_dimension_fastest() {
        assert_eq!(coordinates(&Shape::from([2, 3, 4]), 0), Shape::from([0, 0, 0]));
        assert_eq!(coordinates(&Shape::from([2, 3, 4]), 17), Shape::from([1, 1, 1]));
        assert_eq!(coordinates(&Shape::from([7]), 6), Shape::from([6]));
    }
}
