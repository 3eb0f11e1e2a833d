//! How much memory a build holds at most, and how many threads fit a budget.
//!
//! Sources are mapped and their pages are given back panel by panel; what is held is one panel's output
//! and one strip's values for each thread. So the peak follows the panel and the threads, not the model.

use super::{Limits, Module, Note, NoteKind, PlanError, STRIP_ELEMENTS};
use crate::checkpoint::Checkpoint;
use crate::codec::Plane;
use crate::quant::RowLoss;
use crate::units::Bytes;

/// The process itself: code, headers, plan, provenance.
const OVERHEAD: Bytes = Bytes::mib(32);

/// The default budget of small models, whose largest tensor says nothing about the machine.
const LEAST_DEFAULT: Bytes = Bytes::mib(64);

/// Threads that fit the budget, and the peak that follows.
pub(super) fn fit(
    checkpoint: &Checkpoint,
    modules: &[Module],
    limits: Limits,
    notes: &mut Vec<Note>,
) -> Result<(usize, Bytes), PlanError> {
    let worker = modules.iter().map(worker_bytes).max().unwrap_or(0).max(1);
    let largest = checkpoint.tensors().iter().map(|entry| entry.bytes()).max().unwrap_or(0);
    let wanted = limits.threads.max(1);
    let budget = limits.memory.unwrap_or(Bytes((4 * largest).max(LEAST_DEFAULT.0)));
    let fitting = usize::try_from(budget.0 / worker).unwrap_or(usize::MAX);
    if fitting == 0 {
        return Err(PlanError::Memory { needed: Bytes(worker), budget });
    }
    let threads = wanted.min(fitting);
    if threads < wanted {
        notes.push(Note {
            kind: NoteKind::FewerThreads,
            subject: "memory".to_owned(),
            detail: format!("{threads} of {wanted} threads fit in {budget}, at {} each", Bytes(worker)),
        });
    }
    Ok((threads, Bytes(OVERHEAD.0 + threads as u64 * worker)))
}

/// What one thread holds while it works on this module's largest panel.
fn worker_bytes(module: &Module) -> u64 {
    let rows = module.panels.iter().map(|panel| panel.end - panel.start).max().unwrap_or(0);
    let row = module.work.row_elements as u64;
    let planes: u64 = module.planes.iter().map(Plane::row_bytes).sum();
    let losses = rows * size_of::<RowLoss>() as u64;
    if module.work.verbatim() {
        // Copied from the map to the file; only the finite check widens a strip.
        return losses + 4 * (STRIP_ELEMENTS as u64).min(rows * row);
    }
    let strip = (STRIP_ELEMENTS as u64).max(row).min(rows * row);
    let cast = module.work.cast.map_or(0, |float| strip * float.bytes() as u64);
    let scratch = if module.work.transforms.is_empty() { 0 } else { 4 * row };
    rows * planes + losses + 4 * strip + cast + scratch
}
