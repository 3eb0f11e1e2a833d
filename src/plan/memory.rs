//! How much memory a build holds at most, and how many threads fit a budget.
//!
//! Sources are mapped and their pages are given back panel by panel; what is held is one panel's output
//! and one strip's values for each thread. So the peak follows the panel and the threads, not the model.

use std::collections::BTreeMap;

use super::{FoldPlan, Limits, Module, Note, NoteKind, PlanError, STRIP_ELEMENTS};
use crate::arch::{DecoderConfig, Role, Stand};
use crate::checkpoint::Checkpoint;
use crate::linalg::Symmetric;
use crate::quant::{Grain, RowLoss, weighs};
use crate::recipe::{Activations, Calibration, RotationKind, Transforms};
use crate::runtime::{ROWS, values_of_row};
use crate::stage::pipeline::Pipeline;
use crate::units::Bytes;

/// The process itself: code, headers, plan, provenance.
const OVERHEAD: Bytes = Bytes::mib(32);

/// Tokens that a folded model is compared on, and bytes of logits or of rows of the head that are held at a time.
const PROBE_TOKENS: u64 = 96;
const HELD: Bytes = Bytes::mib(64);

/// The default budget of small models, whose largest tensor says nothing about the machine.
const LEAST_DEFAULT: Bytes = Bytes::mib(64);

/// Threads that fit the budget, and the peak that follows.
pub(super) fn fit(
    checkpoint: &Checkpoint,
    modules: &[Module],
    pipeline: &Pipeline,
    fold: Option<(&FoldPlan, &Transforms)>,
    calibration: Option<(&DecoderConfig, &Calibration)>,
    limits: Limits,
    notes: &mut Vec<Note>,
) -> Result<(usize, Bytes), PlanError> {
    let worker = modules.iter().map(|module| worker_bytes(module, pipeline)).max().unwrap_or(0).max(1);
    let largest = checkpoint.tensors().iter().map(|entry| entry.bytes()).max().unwrap_or(0);
    let wanted = limits.threads.max(1);
    let folds = fold.is_some();
    let fold = fold.map_or(0, |(fold, transforms)| fold_bytes(modules, fold, transforms));
    let calibration = calibration
        .map_or(0, |(decoder, calibration)| calibration_bytes(modules, decoder, calibration, folds, wanted));
    // One after the other.
    let fold = fold.max(calibration);
    let budget = limits.memory.unwrap_or(Bytes((4 * largest).max(LEAST_DEFAULT.0).max(fold)));
    if fold > budget.0 {
        return Err(PlanError::Memory { needed: Bytes(fold), budget });
    }
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
    Ok((threads, Bytes(OVERHEAD.0 + fold.max(threads as u64 * worker))))
}

/// Vectors of width n that a search for a rotation sees at most.
///
/// A rotation has n² / 2 degrees of freedom, and few vectors are flattened without doing the others any good: of a model
/// of width 512, 4 n of 107 n vectors fell to 0.52 of a Gaussian's fourth power and the rest from 0.996 to 0.987, where
/// all of them together fell to 0.83. So as many as half a gigabyte holds.
pub fn search_samples(n: usize) -> usize {
    (128 * n).min((512 << 20) / (4 * n)).max(1)
}

/// Rows of a calibration that take more lie in a file.
pub const ROWS_IN_MEMORY: Bytes = Bytes::mib(256);

/// What is held while a layer is calibrated: its second moments, the rows, the activations of a pass, the layer in f32
/// where its values are not the source's own; and while one module's codes are looked for: its values, its errors, a
/// factor and another copy of the second moment.
fn calibration_bytes(
    modules: &[Module],
    decoder: &DecoderConfig,
    wanted: &Calibration,
    folds: bool,
    threads: usize,
) -> u64 {
    let weighed = || modules.iter().filter(|module| weighs(module.assignment.encoder));
    let channels = |module: &Module| module.work.row_elements;
    let matrices = |module: &Module| match module.output.role {
        Role::Experts => module.output.shape.0[0],
        _ => 1,
    };
    // Modules that read one norm share their inputs.
    let mut layers: BTreeMap<&str, BTreeMap<String, u64>> = BTreeMap::new();
    for module in weighed() {
        let path = module.output.module.as_str();
        let layer = layer_of(path).unwrap_or_default();
        let input = match &module.output.seat.stream {
            Stand::Reads(norm) => norm.clone(),
            _ => path.to_owned(),
        };
        let bytes = matrices(module) * Symmetric::bytes(channels(module));
        let most = layers.entry(layer).or_default().entry(input).or_default();
        *most = bytes.max(*most);
    }
    let moments = layers.values().map(|inputs| inputs.values().sum::<u64>()).max().unwrap_or(0);
    let searched = weighed().map(|module| {
        // Values, planes and the planes being tried; a factor and, in another order of columns, H again; and for each
        // thread 1.4 KiB a column.
        let planes = 2 * module.bytes() + module.rows * size_of::<RowLoss>() as u64;
        let strips = threads as u64 * 1434 * channels(module) as u64;
        4 * module.weights() + planes + 2 * Symmetric::bytes(channels(module)) + strips
    });
    let tokens = u64::from(wanted.rows) * u64::from(wanted.context);
    let rows = ROWS_IN_MEMORY.0.min(4 * tokens * decoder.hidden as u64);
    let rows = rows * if wanted.activations == Activations::Sequential { 3 } else { 1 };
    let inside = 4 * (ROWS as u64) * values_of_row(decoder) as u64;
    let held = if folds { layer_bytes(modules) } else { 0 };
    moments + searched.max().unwrap_or(0).max(inside + held) + rows
}

/// The path of the decoder layer that a module's path is in; none outside the layers.
pub fn layer_of(path: &str) -> Option<&str> {
    let number = path.find(".layers.")? + ".layers.".len();
    Some(path[number..].find('.').map_or(path, |end| &path[..number + end]))
}

/// What is held while the folded model is compared with its source, and while rotations are looked for.
///
/// One layer at a time is held in f32, the matrix that is being made twice, and logits of both models.
fn fold_bytes(modules: &[Module], fold: &FoldPlan, transforms: &Transforms) -> u64 {
    let largest = largest_part(modules);
    let layer = layer_bytes(modules);
    let vocab = fold.decoder.vocab as u64;
    let measures = transforms.rotation.kind == RotationKind::Measure;
    let tokens = if measures { u64::from(transforms.tokens).max(PROBE_TOKENS) } else { PROBE_TOKENS };
    // Residual streams and hidden states of both models.
    let streams = 4 * 4 * tokens * fold.decoder.hidden as u64;
    let logits = 3 * (4 * vocab * tokens).min(HELD.0.max(4 * vocab));
    let compared =
        streams + layer + 2 * largest + logits + HELD.0.min(4 * vocab * fold.decoder.hidden as u64);
    let searched = fold.residual.as_ref().filter(|plan| measures || plan.kind == RotationKind::OptRot.name());
    let searched = searched.map_or(0, |plan| {
        let n = plan.len as u64;
        // The samples, twice the same rotated, and some matrices of the stream's width.
        4 * (3 * search_samples(plan.len) as u64 * n + 12 * n * n) + 2 * largest
    });
    compared.max(searched)
}

/// Bytes of a layer in f32. Buffers are used again from layer to layer, and kinds of layers differ: by the part's name
/// below its layer.
fn layer_bytes(modules: &[Module]) -> u64 {
    let mut parts: BTreeMap<&str, u64> = BTreeMap::new();
    for (part, bytes) in in_layers(modules) {
        let most = parts.entry(part).or_default();
        *most = bytes.max(*most);
    }
    parts.values().sum()
}

/// Bytes of the largest part of a layer in f32.
fn largest_part(modules: &[Module]) -> u64 {
    in_layers(modules).map(|(_, bytes)| bytes).max().unwrap_or(0)
}

/// Parts of layers by their names below these, and their bytes in f32.
fn in_layers(modules: &[Module]) -> impl Iterator<Item = (&str, u64)> {
    let computed = modules.iter().filter(|module| module.output.role != Role::Vision);
    computed.filter_map(|module| {
        let (_, rest) = module.output.module.split_once(".layers.")?;
        let (_, part) = rest.split_once('.')?;
        Some((part, 4 * module.weights()))
    })
}

/// What one thread holds while it works on this module's largest panel.
fn worker_bytes(module: &Module, pipeline: &Pipeline) -> u64 {
    let rows = module.panels.iter().map(|panel| panel.end - panel.start).max().unwrap_or(0);
    let row = module.work.row_elements as u64;
    let planes: u64 = module.planes.iter().map(|plane| plane.bytes_of(plane.begun(0..rows)) as u64).sum();
    let losses = rows * size_of::<RowLoss>() as u64;
    if module.work.verbatim() {
        // Copied from the map to the file; only the finite check widens a strip.
        return losses + 4 * (STRIP_ELEMENTS as u64).min(rows * row);
    }
    let at_once = match pipeline.grain(&module.work) {
        Grain::Rows => row,
        Grain::Blocks(rows) => rows * row,
        Grain::Matrix => module.weights(),
    };
    let strip = (STRIP_ELEMENTS as u64).max(at_once).min(rows * row);
    let cast = module.work.cast.map_or(0, |float| strip * float.bytes() as u64);
    let scratch = match (module.work.transforms.is_empty(), module.work.folded) {
        (true, None) => 0,
        (false, None) => 4 * row,
        // Sixteen rows, or sixty-four columns of a block, at a time.
        (_, Some(Grain::Rows)) => 4 * 16 * row,
        (_, Some(_)) => 4 * 64 * (at_once / row).max(row),
    };
    planes + losses + 4 * strip + cast + scratch
}
