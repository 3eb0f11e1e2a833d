//! How much memory a build holds at most, and how many threads fit a budget.
//!
//! Sources are mapped and their pages are given back panel by panel; what is held is one panel's output
//! and one strip's values for each thread. So the peak follows the panel and the threads, not the model.

use std::collections::{BTreeMap, BTreeSet};

use super::calibration::input_sums;
use super::estimate::{COMPARED_PROMPTS, COMPARED_TOKENS, PROMPT_TOKENS};
use super::{FoldPlan, Limits, Module, Note, NoteKind, PlanError, RowsPlace, STRIP_ELEMENTS};
use crate::arch::{DecoderConfig, Role};
use crate::checkpoint::Checkpoint;
use crate::codec::CodecSpec;
use crate::codec::trellis::MAX_TILE;
use crate::linalg::Symmetric;
use crate::quant::{Grain, RowLoss, weighs};
use crate::recipe::{Calibration, RotationKind, Transforms};
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

/// What a build does before it encodes.
pub(super) struct Phases<'a> {
    /// Changes of basis.
    pub fold: Option<(&'a FoldPlan, &'a Transforms)>,
    /// A calibration, and the modules of whose outputs it has second moments.
    pub calibration: Option<(&'a DecoderConfig, &'a Calibration, &'a BTreeSet<String>)>,
    /// A comparison of what a budget chose with an even choice.
    pub compare: Option<&'a DecoderConfig>,
}

/// Threads that fit the budget, and the peak that follows.
pub(super) fn fit(
    checkpoint: &Checkpoint,
    modules: &[Module],
    pipeline: &Pipeline,
    phases: &Phases<'_>,
    limits: Limits,
    notes: &mut Vec<Note>,
) -> Result<(usize, Bytes), PlanError> {
    let worker = modules.iter().map(|module| worker_bytes(module, pipeline)).max().unwrap_or(0).max(1);
    let largest = checkpoint.tensors().iter().map(|entry| entry.bytes()).max().unwrap_or(0);
    let wanted = limits.threads.max(1);
    let folds = phases.fold.is_some();
    let fold = phases.fold.map_or(0, |(fold, transforms)| fold_bytes(modules, fold, transforms));
    let calibration = phases.calibration.map_or(0, |(decoder, calibration, outputs)| {
        calibration_bytes(modules, decoder, calibration, outputs, folds, wanted)
    });
    // One after the other.
    let before = fold.max(calibration);
    let before = phases.compare.map_or(before, |decoder| compare_bytes(modules, decoder, before));
    let budget = limits.memory.unwrap_or(Bytes((4 * largest).max(LEAST_DEFAULT.0).max(before)));
    if before > budget.0 {
        return Err(PlanError::Memory { needed: Bytes(before), budget });
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
    Ok((threads, Bytes(OVERHEAD.0 + before.max(threads as u64 * worker))))
}

/// Vectors of width n that a search for a rotation sees at most.
///
/// A rotation has n² / 2 degrees of freedom, and few vectors are flattened without doing the others any good: of a model
/// of width 512, 4 n of 107 n vectors fell to 0.52 of a Gaussian's fourth power and the rest from 0.996 to 0.987, where
/// all of them together fell to 0.83. So as many as half a gigabyte holds.
pub fn search_samples(n: usize) -> usize {
    (128 * n).min((512 << 20) / (4 * n)).max(1)
}

/// What is held while a layer is calibrated: its second moments, the rows, the activations of a pass, the layer in f32
/// where its values are not the source's own; and while one module's codes are looked for: its values, its errors, a
/// factor and another copy of the second moment.
fn calibration_bytes(
    modules: &[Module],
    decoder: &DecoderConfig,
    wanted: &Calibration,
    outputs: &BTreeSet<String>,
    folds: bool,
    threads: usize,
) -> u64 {
    let weighed = || modules.iter().filter(|module| weighs(module.assignment.encoder));
    let channels = |module: &Module| module.work.row_elements;
    let mut layers: BTreeMap<&str, u64> = BTreeMap::new();
    for sum in input_sums(modules) {
        *layers.entry(sum.layer).or_default() += sum.matrices * Symmetric::bytes(sum.channels);
    }
    let moments = layers.values().max().copied().unwrap_or(0);
    let searched = weighed().map(|module| {
        // Values, planes and the planes being tried; a factor and, in another order of columns, H again; and for each
        // thread 1.4 KiB a column.
        let planes = 2 * module.bytes() + module.rows * size_of::<RowLoss>() as u64;
        let (strips, more) = match module.assignment.codec {
            // Errors, the codes once more; for each thread 4 KiB a column and the costs of a tile's nodes. What is stored
            // first is decoded whole.
            CodecSpec::Trellis(trellis) => {
                let costs = (2 * (MAX_TILE + 3) as u64) << (trellis.states() - trellis.bits());
                (4096 * channels(module) as u64 + costs, 8 * module.weights() + module.bytes())
            }
            _ => (1434 * channels(module) as u64, 0),
        };
        let strips = threads as u64 * strips + more;
        let two_sided = match outputs.contains(&module.output.rule_path()) {
            true => two_sided_bytes(module, threads),
            false => 0,
        };
        4 * module.weights() + planes + 2 * Symmetric::bytes(channels(module)) + strips + two_sided
    });
    let tokens = u64::from(wanted.rows) * u64::from(wanted.context);
    let rows = Bytes(4 * tokens * decoder.hidden as u64);
    let rows = RowsPlace::default().bytes(rows, wanted.activations).1.0;
    let inside = 4 * (ROWS as u64) * values_of_row(decoder) as u64;
    let held = if folds { layer_bytes(modules) } else { 0 };
    moments + searched.max().unwrap_or(0).max(inside + held) + rows
}

/// What second moments of a module's outputs add to a search: those of all experts, a factor, what a row of tiles is handed
/// on and its targets, and for each thread a panel of the errors before.
fn two_sided_bytes(module: &Module, threads: usize) -> u64 {
    let experts = if module.output.role == Role::Experts { module.output.shape.0[0] } else { 1 };
    let rows = module.rows / experts;
    let strip = 4 * 2 * (MAX_TILE as u64).min(rows) * module.work.row_elements as u64;
    let panels = threads as u64 * 4 * 128 * (rows + MAX_TILE as u64);
    (experts + 1) * Symmetric::bytes(rows as usize) + strip + panels
}

/// What is held while what a budget chose is compared with an even choice: what the source computed, all along; and
/// either what else comes `before` a build encodes, or the stream of an arm, its packed layer, and logits of both.
fn compare_bytes(modules: &[Module], decoder: &DecoderConfig, before: u64) -> u64 {
    let (hidden, vocab) = (decoder.hidden as u64, decoder.vocab as u64);
    let positions = (COMPARED_TOKENS + COMPARED_PROMPTS) as u64;
    let tokens = (COMPARED_TOKENS + COMPARED_PROMPTS * PROMPT_TOKENS) as u64;
    let kept = 4 * positions * hidden;
    let stream = 4 * 2 * tokens * hidden + kept + 4 * (ROWS as u64) * values_of_row(decoder) as u64;
    // Logits of both, and those that are being made; rows of the head are packed, or made in f32.
    let logits = 3 * (4 * vocab * positions).min(HELD.0.max(4 * vocab)) + HELD.0.min(4 * vocab * hidden);
    kept + before.max(stream + packed_layer_bytes(modules)).max(kept + logits)
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

/// Bytes of a layer in f32.
fn layer_bytes(modules: &[Module]) -> u64 {
    most_of_parts(modules, |module| 4 * module.weights())
}

/// Bytes of a layer as it is stored.
fn packed_layer_bytes(modules: &[Module]) -> u64 {
    most_of_parts(modules, Module::bytes)
}

/// Buffers are used again from layer to layer, and kinds of layers differ: the most of each part, by the part's name
/// below its layer.
fn most_of_parts(modules: &[Module], bytes: impl Fn(&Module) -> u64) -> u64 {
    let mut parts: BTreeMap<&str, u64> = BTreeMap::new();
    for (part, module) in in_layers(modules) {
        let most = parts.entry(part).or_default();
        *most = bytes(module).max(*most);
    }
    parts.values().sum()
}

/// Bytes of the largest part of a layer in f32.
fn largest_part(modules: &[Module]) -> u64 {
    in_layers(modules).map(|(_, module)| 4 * module.weights()).max().unwrap_or(0)
}

/// Parts of layers, by their names below these.
fn in_layers(modules: &[Module]) -> impl Iterator<Item = (&str, &Module)> {
    let computed = modules.iter().filter(|module| module.output.role != Role::Vision);
    computed.filter_map(|module| {
        let (_, rest) = module.output.module.split_once(".layers.")?;
        let (_, part) = rest.split_once('.')?;
        Some((part, module))
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
