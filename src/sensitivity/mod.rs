//! What rounding each module alone costs: its KL from the source in every codec that it might get.
//!
//! ```text
//! cost(m, c) = mean over positions of KL(source || the model with module m alone stored in c)       nats
//! ```
//!
//! No gradient is taken. A probe is the residual stream of the model with one module rounded: it leaves the unrounded
//! stream at the module's layer, and from there on passes through the same unrounded layers. So the layers are walked
//! once for many probes, each opened once, and what is before a probe's layer is not computed again. Probes that do not
//! fit in memory together, and those beyond [`MOST_PROBES`], wait for another walk: a wave. Neither the waves nor the
//! threads nor an interruption change a bit of the result.
//!
//! With changes of basis the module is rounded in the new basis, and all else is there in f32; `base_kl` is what the
//! change of basis alone costs.

mod error;
mod probe;
mod record;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use serde::Serialize;

pub use crate::alloc::cost::Sensitivity;
pub use error::SensitivityError;

use crate::backend::Precision;
use crate::backend::cpu::Cpu;
use crate::codec::{AffineBits, CodecError, CodecSpec, GroupSize, Matrix};
use crate::digest::{Digest, canonical_json};
use crate::eval::work::{DONE, Work};
use crate::eval::{EvalError, Progress};
use crate::failure::Outcome;
use crate::measure::{taken, text};
use crate::plan::{Limits, Module, Plan, SourceFolder, plan};
use crate::quant::{ENCODERS, LDLQ, TRELLIS, quantizer};
use crate::recipe::{Pattern, Recipe, RotationKind};
use crate::runtime::Weights;
use crate::text::documents::{Sequence, Taking, tokens_digest};
use crate::units::Bytes;
use probe::{Done, Prober};

/// Probes of a wave at most: enough that walking the layers costs little beside them, and few enough that an
/// interruption does not cost much.
pub const MOST_PROBES: usize = 64;

/// Widths that are tried unless the request names codecs.
const WIDTHS: [u32; 5] = [2, 3, 4, 6, 8];

/// The group where the recipe's default codec has none that affine codecs may have.
const GROUP: u32 = 64;

/// Tokens of a sequence at most, unless the request says.
const CONTEXT: usize = 256;

/// The name that the file has before it appears.
const FILE: &str = "sensitivity.json";

/// What is asked.
pub struct Asking<'a> {
    /// The file to write.
    pub target: &'a Path,
    /// Codecs to try; none tries affine codecs of 2, 3, 4, 6 and 8 bits in groups of the recipe's default.
    pub candidates: &'a [CodecSpec],
    /// Modules to try; none tries all.
    pub only: Option<&'a Pattern>,
    /// JSONL file of documents; none takes the built-in text.
    pub text: Option<&'a Path>,
    /// Most documents.
    pub rows: Option<usize>,
    /// Most tokens of a document; none takes 256, or the model's context if that is less.
    pub context: Option<usize>,
    /// Most tokens of all documents together.
    pub tokens: usize,
    /// Most bytes to hold, mapped weights left out.
    pub budget: Bytes,
    /// Throw away unfinished work of another task.
    pub discard: bool,
    /// Raised to stop; finished waves stay.
    pub stop: &'a AtomicBool,
    /// Who is told how far it is.
    pub progress: &'a dyn Progress,
    /// Is told what is being done.
    pub tell: &'a (dyn Fn(&str) + Sync),
}

/// A file that was made.
#[derive(Debug)]
pub struct Measured {
    /// Where it is.
    pub path: PathBuf,
    /// SHA-256 of its bytes.
    pub digest: Digest,
    /// What it says.
    pub sensitivity: Sensitivity,
    /// Probes that an earlier, unfinished run had finished.
    pub resumed_probes: usize,
    /// Walks over the layers in this run.
    pub waves: usize,
    /// Wall time, seconds.
    pub elapsed_s: f64,
}

/// What decides the file's bytes.
#[derive(Serialize)]
struct Key<'a> {
    trials: Vec<Digest>,
    files: Vec<(&'a str, u64, String)>,
    modules: Vec<String>,
    tokens: Digest,
}

/// Everything that was checked before the first weight is read.
struct Task {
    plan: Arc<Plan>,
    /// One plan a candidate: every module in its codec.
    trials: Vec<(CodecSpec, Arc<Plan>)>,
    /// Numbers of the modules to try.
    modules: Vec<usize>,
    encoder: &'static str,
    source: Weights,
    sequences: Vec<Sequence>,
    text: String,
}

/// Measures every module of the trunk that the recipe quantizes, and writes the file.
///
/// # Errors
/// [`SensitivityError`]; [`EvalError::Occupied`], [`EvalError::OtherWork`], [`EvalError::Interrupted`], and those of the
/// text; those of the plan, of its changes of basis and of the runtime.
pub fn sensitivity(
    recipe: &Recipe,
    source: &SourceFolder,
    limits: Limits,
    asking: &Asking<'_>,
) -> Outcome<Measured> {
    let start = Instant::now();
    if asking.target.symlink_metadata().is_ok() {
        return Err(EvalError::Occupied { path: asking.target.to_owned() }.into());
    }
    let task = Task::new(recipe, source, limits, asking)?;
    let key = Key {
        trials: task.trials.iter().map(|(_, plan)| plan.digest).collect(),
        files: task.plan.checkpoint.stats(),
        modules: task.modules().map(|module| module.output.rule_path()).collect(),
        tokens: tokens_digest(&task.sequences),
    };
    let work = Work::take(asking.target, &key, asking.discard)?;
    let cpu = Cpu::new(limits.isa, limits.threads, Precision::Exact);
    match fill(&task, &cpu, asking, &work) {
        Ok((sensitivity, digest, resumed_probes, waves)) => {
            work.remove()?;
            let (path, elapsed_s) = (asking.target.to_owned(), start.elapsed().as_secs_f64());
            Ok(Measured { path, digest, sensitivity, resumed_probes, waves, elapsed_s })
        }
        Err(error) => Err(work.failed(error)),
    }
}

/// Measures what `work` does not hold yet, and moves the file to its place.
fn fill(
    task: &Task,
    cpu: &Arc<Cpu>,
    asking: &Asking<'_>,
    work: &Work,
) -> Outcome<(Sensitivity, Digest, usize, usize)> {
    let mut done: Done = work.read(DONE).unwrap_or_default();
    let resumed = done.probes();
    let waves = Prober { task, cpu, asking, work }.run(&mut done)?;
    let sensitivity = record::record(task, &done)?;
    let bytes = canonical_json(&sensitivity);
    work.write(FILE, &bytes)?;
    std::fs::rename(work.path(FILE), asking.target).map_err(EvalError::io("rename", asking.target))?;
    Ok((sensitivity, Digest::of(&bytes), resumed, waves))
}

impl Task {
    fn new(recipe: &Recipe, source: &SourceFolder, limits: Limits, asking: &Asking<'_>) -> Outcome<Self> {
        if recipe.transform.rotation.kind == RotationKind::Measure {
            return Err(SensitivityError::Undecided.into());
        }
        // What a budget would choose is chosen by what comes out here. The memory is for the probes; what encodes beside
        // them takes a plan's default.
        let recipe = &recipe.clone().without_budget();
        let plan = Arc::new(plan(recipe.clone(), source.clone(), Limits { memory: None, ..limits })?);
        let modules = chosen(&plan, asking.only)?;
        let candidates = match asking.candidates {
            [] => usual(recipe.default.codec),
            named => named.to_vec(),
        };
        let unfit = unfit(&plan, &modules, &candidates)?;
        if unfit > 0 {
            (asking.tell)(&format!(
                "{unfit} modules are not measured in every codec: some do not fit their shapes"
            ));
        }
        let encoder = encoder(recipe);
        let trials = candidates.into_iter().map(|codec| {
            let fills = quantizer(encoder).is_some_and(|encoder| encoder.accepts(codec));
            let other = if matches!(codec, CodecSpec::Trellis(_)) { TRELLIS } else { ENCODERS[0] };
            let trial = plan.trial(codec, if fills { encoder } else { other })?;
            Ok((codec, Arc::new(trial)))
        });
        let trials = trials.collect::<Outcome<_>>()?;
        let source = Weights::open_keeping(&plan.source.dir, &|name| recipe.keeps(name))?;
        let most = source.decoder.context.unwrap_or(CONTEXT).min(CONTEXT);
        let context = asking.context.unwrap_or(most);
        let taking = Taking { rows: asking.rows, context, min_tokens: Some(2), split: false };
        let (sequences, text) = taken(text(asking.text, &plan.source.dir, taking)?, asking.tokens);
        Ok(Self { plan, trials, modules, encoder, source, sequences, text })
    }

    fn modules(&self) -> impl Iterator<Item = &Module> {
        self.modules.iter().map(|index| &self.plan.modules[*index])
    }

    /// The candidates that a module can have, numbered among all.
    fn candidates(&self, index: usize) -> impl Iterator<Item = (usize, CodecSpec, &Plan)> {
        let matrix = Matrix::of(&self.plan.modules[index].output.shape);
        let all = self.trials.iter().enumerate().map(|(trial, (codec, plan))| (trial, *codec, &**plan));
        all.filter(move |(_, codec, _)| codec.fits(matrix).is_ok())
    }

    fn positions(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.tokens.len()).sum()
    }
}

/// Numbers of the modules that `only` names among those of the trunk that the plan quantizes.
fn chosen(plan: &Plan, only: Option<&Pattern>) -> Result<Vec<usize>, SensitivityError> {
    let quantized = plan
        .modules
        .iter()
        .enumerate()
        .filter(|(_, module)| module.output.role.in_trunk() && module.assignment.codec.quantizes());
    let all: Vec<(usize, String)> = quantized.map(|(i, module)| (i, module.output.rule_path())).collect();
    if all.is_empty() {
        return Err(SensitivityError::NothingQuantized { recipe: plan.recipe.name.clone() });
    }
    let named = |path: &str| only.is_none_or(|pattern| pattern.matches(path));
    let modules: Vec<usize> = all.iter().filter(|(_, path)| named(path)).map(|(index, _)| *index).collect();
    match only {
        Some(pattern) if modules.is_empty() => Err(SensitivityError::NoSuchModule {
            pattern: pattern.to_string(),
            modules: all.len(),
            first: all[0].1.clone(),
        }),
        _ => Ok(modules),
    }
}

/// Affine codecs of the usual widths, in groups of `default`; or the trellis that it is, with every number of bits.
fn usual(default: CodecSpec) -> Vec<CodecSpec> {
    if let CodecSpec::Trellis(own) = default {
        return own.of_every_width();
    }
    let group = default.group().and_then(|group| GroupSize::try_from(group).ok());
    let group = group.unwrap_or_else(|| GroupSize::try_from(GROUP).expect("64 is a size"));
    let codec = |bits| CodecSpec::Affine { bits: AffineBits::try_from(bits).expect("a width"), group };
    WIDTHS.map(codec).to_vec()
}

/// The recipe's own encoder, unless it needs more than the weights.
fn encoder(recipe: &Recipe) -> &'static str {
    match recipe.default.encoder.as_deref() {
        None | Some("mlx" | TRELLIS | LDLQ) => ENCODERS[0],
        Some(_) => "refit",
    }
}

/// Modules that some candidates do not fit: they are measured in the others.
///
/// # Errors
/// [`SensitivityError::DoesNotFit`] if a module fits none.
fn unfit(plan: &Plan, modules: &[usize], candidates: &[CodecSpec]) -> Result<usize, SensitivityError> {
    let problems = |index: &usize| {
        let matrix = Matrix::of(&plan.modules[*index].output.shape);
        candidates.iter().filter_map(|codec| codec.fits(matrix).err()).collect::<Vec<_>>()
    };
    let all: Vec<(usize, Vec<CodecError>)> = modules.iter().map(|index| (*index, problems(index))).collect();
    let mut none = all.iter().filter(|(_, problems)| problems.len() == candidates.len());
    if let Some((first, problems)) = none.next() {
        let (module, more) = (plan.modules[*first].output.rule_path(), none.count());
        return Err(SensitivityError::DoesNotFit { problem: problems[0].clone(), module, more });
    }
    Ok(all.iter().filter(|(_, problems)| !problems.is_empty()).count())
}

/// The codecs that a list such as `affine-4g64,mxfp4` names.
///
/// # Errors
/// [`SensitivityError::NoSuchCandidate`], [`SensitivityError::CandidateTwice`].
pub fn candidates(list: &str) -> Result<Vec<CodecSpec>, SensitivityError> {
    let mut found = Vec::new();
    for text in list.split(',').map(str::trim) {
        let codec = text.parse().ok().filter(|codec: &CodecSpec| codec.quantizes());
        let codec = codec.ok_or_else(|| SensitivityError::NoSuchCandidate { text: text.to_owned() })?;
        if found.contains(&codec) {
            return Err(SensitivityError::CandidateTwice { codec });
        }
        found.push(codec);
    }
    Ok(found)
}
