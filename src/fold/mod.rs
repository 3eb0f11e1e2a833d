//! Makes a plan's changes of basis: reads gains, makes rotations, measures channels, and shows that the model still
//! computes the same.
//!
//! [`prepare`] turns the names in [`crate::plan::FoldPlan`] into transforms; [`Planned`] is the artifact that would
//! come out, as the runtime reads it, without a file; [`parity`] holds it against the source.

mod balance;
mod data;
mod draft;
mod keep;
pub mod logits;
pub mod parity;
mod probe;
mod rotations;
mod sample;
mod store;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub use data::{Prepared, prepare};
pub use keep::{Asked, Both, Keep, KeepFolder, OfPlan};
pub use probe::{Probe, ProbeText};
pub use sample::values;
pub use store::Planned;

use crate::artifact::provenance::{
    CalibrationRecord, DraftRecord, RotationRecord, SearchRecord, TransformRecord,
};
use crate::backend::cpu::Cpu;
use crate::encode::EncodeError;
use crate::failure::{Exit, Failure, Outcome};
use crate::plan::{FoldPlan, Note, NoteKind, Plan, RotationPlan};
use crate::runtime::{Stream, Weights};

/// Why a fold could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum FoldError {
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error("the changes of basis change what the model computes: {found}")]
    NotExact { found: String },
    #[error("the source's own hidden states are not finite after {layer} layers, so nothing can be compared")]
    NotFinite { layer: usize },
    #[error("interrupted")]
    Interrupted,
}

impl Failure for FoldError {
    fn exit(&self) -> Exit {
        match self {
            FoldError::Encode(error) => error.exit(),
            FoldError::NotExact { .. } => Exit::No,
            FoldError::NotFinite { .. } => Exit::Input,
            FoldError::Interrupted => Exit::Interrupted,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            FoldError::Encode(error) => error.help(),
            FoldError::NotExact { .. } => Some(
                "leave `[transform]` out to build without it, and report this: a family whose fold is not exact \
                 should have been refused"
                    .to_owned(),
            ),
            FoldError::NotFinite { .. } => {
                Some("weights or gains are far out of range: take the checkpoint from its origin again".to_owned())
            }
            FoldError::Interrupted => Some("run the same command with `--resume` to go on".to_owned()),
        }
    }
}

/// Who waits for a fold.
#[derive(Clone, Copy)]
pub struct Watch<'a> {
    /// Raised to stop.
    pub stop: &'a AtomicBool,
    /// Is told what is being done.
    pub tell: &'a (dyn Fn(&str) + Sync),
    /// Where searched rotations are kept.
    pub keep: &'a dyn Keep,
}

impl Watch<'_> {
    /// Goes on unless the flag is raised.
    ///
    /// # Errors
    /// [`FoldError::Interrupted`].
    pub fn check(&self) -> Result<(), FoldError> {
        match self.stop.load(std::sync::atomic::Ordering::Relaxed) {
            true => Err(FoldError::Interrupted),
            false => Ok(()),
        }
    }
}

/// Final-normed hidden states [rows, H] of sequences that go through a model layer by layer; `doing` is what is told.
///
/// # Errors
/// Those of the runtime, and [`FoldError::Interrupted`].
pub fn hidden_states(
    weights: &Weights,
    cpu: &Arc<Cpu>,
    sequences: &[Vec<u32>],
    doing: &str,
    watch: Watch<'_>,
) -> Outcome<Vec<f32>> {
    let mut stream = Stream::new(weights, cpu.clone(), sequences)?;
    let layers = weights.decoder.layers.len();
    for layer in 1..=layers {
        (watch.tell)(&format!("{doing}: layer {layer} of {layers}"));
        watch.check()?;
        stream.step(&mut ())?;
    }
    Ok(stream.final_hidden()?)
}

/// Version of the rules in `docs/transforms.md`.
const RULES: &str = "tqc-fold/1";

/// A fold that was made and held against the source.
#[derive(Debug)]
pub struct Folded {
    /// Every module's work.
    pub prepared: Prepared,
    /// What is recorded of it; none without changes of basis.
    pub record: Option<TransformRecord>,
    /// What weighed errors; none where no encoder asks for it.
    pub calibration: Option<CalibrationRecord>,
    /// Hashes of what the calibration text holds, as the artifact stores them.
    pub ngrams: Option<Vec<u8>>,
    /// What a person should know of it.
    pub notes: Vec<Note>,
}

/// Makes the plan's changes of basis, and shows that the model computes the same before anything is rounded.
///
/// # Errors
/// [`FoldError::NotExact`] if more than rounding differs; gains that are not finite; errors of the runtime.
pub fn fold(plan: &Plan, watch: Watch<'_>) -> Outcome<Folded> {
    let mut prepared = prepare(plan, watch)?;
    let Some(fold) = &plan.fold else {
        return Ok(Folded { prepared, record: None, calibration: None, ngrams: None, notes: Vec::new() });
    };
    let unrounded = Arc::new(plan.unrounded()?);
    let parity = parity::known(&unrounded, &Arc::new(prepared.on(&unrounded)), watch)?;
    if !parity.holds() {
        return Err(FoldError::NotExact { found: parity.found() }.into());
    }
    prepared.feed(plan, 1.0 / parity.inverse_size);
    let notes = prepared.draft().filter(|draft| draft.clamped > 0).map(|draft| Note {
        kind: NoteKind::Clamp,
        subject: "mtp".to_owned(),
        detail: format!("has {} gains too near 0 to divide by, moved away from it", draft.clamped),
    });
    let notes = notes.into_iter().collect();
    let record = Some(record(plan, fold, &prepared, parity.record()));
    Ok(Folded { prepared, record, calibration: None, ngrams: None, notes })
}

fn record(
    plan: &Plan,
    fold: &FoldPlan,
    prepared: &Prepared,
    parity: crate::artifact::provenance::ParityRecord,
) -> TransformRecord {
    let rotation = |rotation: &Option<RotationPlan>, name: &str| {
        let searches = prepared.searches().iter().filter(|search| search.name.starts_with(name));
        let searches: Vec<SearchRecord> = searches
            .map(|search| SearchRecord {
                name: search.name.clone(),
                samples: search.samples as u64,
                steps: search.steps as u64,
                before: search.before,
                after: search.after,
            })
            .collect();
        rotation.as_ref().map(|rotation| RotationRecord {
            kind: rotation.kind.to_owned(),
            seed: plan.recipe.transform.rotation.seed,
            width: rotation.len as u64,
            block: rotation.block as u64,
            factors: rotation.size.as_ref().map(|size| size.factors().to_vec()),
            sylvester_log2: rotation.size.as_ref().map(|size| size.sylvester_log2()),
            searches,
        })
    };
    TransformRecord {
        id: RULES.to_owned(),
        family: plan.model.model_type.clone(),
        gamma_fold: fold.gains,
        gains: if fold.neutral == 0.0 { "zero" } else { "one" }.to_owned(),
        untied: fold.untied,
        r1: rotation(&fold.residual, "r1"),
        r2: rotation(&fold.values, "r2"),
        r2_reason: fold.no_values.map(str::to_owned),
        channels: fold.channels().into_iter().map(str::to_owned).collect(),
        draft: prepared.draft().map(|draft| DraftRecord {
            feed: "post_norm".to_owned(),
            c: draft.c,
            calibrated: draft.calibrated,
            clamped: draft.clamped as u64,
        }),
        parity,
    }
}
