//! Everything about a build that headers and the recipe decide: codecs, names, offsets, sizes, memory,
//! and every refusal. No weight is read.

mod budget;
mod calibration;
mod estimate;
mod fold;
mod memory;
mod module;
mod side;

use std::path::{Path, PathBuf};

use serde::Serialize;

use budget::{Bits, Given, allocate};

pub use budget::{BUDGET, CONTROL, RecordedBits};
pub use calibration::{BUILT_IN, CalibrationPlan, From as CalibratedFrom, RowsPlace};
pub use estimate::{
    COMPARED_TOKENS, Estimate, Extrapolated, LayerTime, calibration_operations, estimate, extrapolate,
};
pub use fold::{Channels, FoldPlan, RotationPlan, Step, What, impossible};
pub use memory::{layer_of, search_samples};
pub use module::{Module, STRIP_ELEMENTS};
pub(crate) use side::copied;
pub use side::{CopiedFile, SideFile};

use crate::alloc::import::ImportError;
use crate::arch::{Arch, ArchError, Config, Fate, Folder, Found, Model, Output, registry};
use crate::artifact::layout::{ModuleTensors, OutputFile, lay_out};
pub use crate::artifact::provenance::Sizes;
use crate::artifact::provenance::{AllocationRecord, ComparedRecord, MeasuredRecord};
use crate::checkpoint::{Checkpoint, Links};
use crate::codec::CodecSpec;
use crate::digest::{Digest, canonical_json};
use crate::failure::{Exit, Failure, Outcome, Problems};
use crate::isa::Isa;
use crate::quant::weighs;
use crate::recipe::{Control, Recipe, RecipeError, RotationKind};
use crate::stage::pipeline::Pipeline;
use crate::tensor::{Float, Layout};
use crate::tool::Tool;
use crate::units::Bytes;

/// Where the weights come from.
#[derive(Debug, Clone)]
pub struct SourceFolder {
    /// The folder on this machine.
    pub dir: PathBuf,
    /// Repository and commit, if it was fetched by them.
    pub hub: Option<HubId>,
}

/// A pinned repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HubId {
    /// `org/name`.
    pub repo: String,
    /// Commit.
    pub revision: String,
}

/// What the machine may use.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Budget for the working memory of all threads; none means four times the largest tensor, at least 64 MiB.
    pub memory: Option<Bytes>,
    /// Threads asked for.
    pub threads: usize,
    /// Kernels.
    pub isa: Isa,
}

/// Something that a person should know, named; `--strict` makes it an error.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Note {
    /// Which kind.
    pub kind: NoteKind,
    /// Tensor or file.
    pub subject: String,
    /// What happened to it.
    pub detail: String,
}

/// Kinds of [`Note`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NoteKind {
    /// A weight is rounded to the model's dtype before it is encoded.
    CastFirst,
    /// Stored floats are rounded to another dtype, by the recipe or by the role's default.
    Cast,
    /// A file that a complete model has is not in the source.
    MissingFile,
    /// A weight file of the source folder that the checkpoint does not name.
    UnreadFile,
    /// The config promises a part that the checkpoint does not hold.
    AbsentPart,
    /// An encoder changed more than rounding does.
    Repair,
    /// A basis other than the one asked for was taken.
    Fallback,
    /// Numbers out of a change of basis's range were moved into it.
    Clamp,
    /// A tied head was given a matrix of its own, as a change of basis needs.
    Untied,
    /// The basis is not decided before the build measures.
    Undecided,
    /// Costs that a budget is spent by were measured in another basis.
    OtherBasis,
    /// Threads were reduced to fit the budget.
    FewerThreads,
    /// A search that weighs errors could do no better than rounding to nearest.
    Nearest,
    /// Second moments needed more on their diagonal than the recipe says.
    Damped,
    /// An expert saw too few tokens to be weighed by its own.
    FewTokens,
    /// Documents of a text to calibrate on were too short to be of use.
    ShortDocuments,
    /// What a budget chose is worse than an even choice of the same size.
    Lost,
}

impl NoteKind {
    /// As JSON spells it.
    pub fn name(self) -> &'static str {
        match self {
            NoteKind::CastFirst => "cast-first",
            NoteKind::Cast => "cast",
            NoteKind::MissingFile => "missing-file",
            NoteKind::UnreadFile => "unread-file",
            NoteKind::AbsentPart => "absent-part",
            NoteKind::Repair => "repair",
            NoteKind::Fallback => "fallback",
            NoteKind::Clamp => "clamp",
            NoteKind::Untied => "untied",
            NoteKind::Undecided => "undecided",
            NoteKind::OtherBasis => "other-basis",
            NoteKind::FewerThreads => "fewer-threads",
            NoteKind::Nearest => "nearest",
            NoteKind::Damped => "damped",
            NoteKind::FewTokens => "few-tokens",
            NoteKind::ShortDocuments => "short-documents",
            NoteKind::Lost => "lost",
        }
    }

    /// Whether `--strict` refuses it: it changes what the artifact holds, and the recipe did not ask for it.
    pub fn strict(self) -> bool {
        !matches!(
            self,
            NoteKind::FewerThreads | NoteKind::Untied | NoteKind::Undecided | NoteKind::OtherBasis
        )
    }
}

impl Serialize for NoteKind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A checked build.
pub struct Plan {
    /// The recipe.
    pub recipe: Recipe,
    /// The source.
    pub source: SourceFolder,
    /// Its weights.
    pub checkpoint: Checkpoint,
    /// Its config.
    pub config: Config,
    /// Its adapter.
    pub arch: &'static dyn Arch,
    /// The adapter's statement.
    pub model: Model,
    /// The stages.
    pub pipeline: Pipeline,
    /// Who gave out codecs.
    pub allocator: &'static str,
    /// How a budget was spent.
    pub allocation: Option<AllocationRecord>,
    /// Changes of basis.
    pub fold: Option<FoldPlan>,
    /// What second moments are taken from; none if no encoder weighs errors by them.
    pub calibration: Option<CalibrationPlan>,
    /// Where its rows lie, and how often they are kept; no digest covers it.
    pub rows: RowsPlace,
    /// How what a budget chose compares with an even choice.
    pub compared: Option<ComparedRecord>,
    /// Bases that were measured before the recipe's was decided.
    pub measured: Option<MeasuredRecord>,
    /// One fate per source tensor.
    pub fates: Vec<Fate>,
    /// Everything that is stored, in the order of the source.
    pub modules: Vec<Module>,
    /// Weight files of the artifact.
    pub files: Vec<OutputFile>,
    /// Generated files that follow from the plan alone.
    pub side: Vec<SideFile>,
    /// Files copied from the source.
    pub copied: Vec<CopiedFile>,
    /// What a person should know.
    pub notes: Vec<Note>,
    /// Sizes.
    pub sizes: Sizes,
    /// The program that plans and builds.
    pub tool: Tool,
    /// Threads that fit the budget.
    pub threads: usize,
    /// Kernels.
    pub isa: Isa,
    /// Anonymous memory that the build reaches at most.
    pub peak_memory: Bytes,
    /// Digest of all that decides the artifact's bytes, but the weights.
    pub digest: Digest,
}

/// Why no plan could be made, beyond the recipe's and the source's own errors.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum PlanError {
    #[error("recipe `{recipe}` names no source")]
    NoSource { recipe: String },
    #[error("this build needs {needed} of working memory, but the budget is {budget}")]
    Memory { needed: Bytes, budget: Bytes },
    #[error("`{file}` is not JSON: {problem}")]
    NotJson { file: PathBuf, problem: String },
    #[error("{what}, but the source has no `tokenizer.json`")]
    NoTokenizer { what: &'static str },
    #[error("`{path}`, which the recipe names, cannot be read: {source}", path = path.display())]
    NoText { path: PathBuf, source: std::io::Error },
    #[error("`{path}` has SHA-256 {found}, but the recipe's `calibration.sha256` is {needed}", path = path.display())]
    OtherText { path: PathBuf, found: Digest, needed: Digest },
    #[error("the file of costs, `{path}`, cannot be read: {error}", path = path.display())]
    SensitivityUnreadable { path: PathBuf, error: std::io::Error },
    #[error("the file of costs, `{path}`, is larger than {limit}", path = path.display())]
    SensitivityTooLarge { path: PathBuf, limit: Bytes },
    #[error("the file of costs, `{path}`, {problem}", path = path.display())]
    Sensitivity { path: PathBuf, problem: ImportError },
    #[error("{count} of the plan's notes are errors under `--strict`; the first: {first}")]
    Strict { count: usize, first: String },
}

impl Failure for PlanError {
    fn exit(&self) -> Exit {
        match self {
            PlanError::NotJson { .. } | PlanError::Sensitivity { .. } => Exit::Input,
            _ => Exit::Request,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            PlanError::NoSource { .. } => Some(
                "give a checkpoint folder with `--source DIR`, or a `[source]` table in the recipe"
                    .to_owned(),
            ),
            PlanError::Memory { needed, .. } => Some(format!("give `--memory` at least {needed}")),
            PlanError::NotJson { .. } => {
                Some("take the file from the repository that the weights came from, or remove it".to_owned())
            }
            PlanError::NoTokenizer { .. } => {
                Some("fetch `tokenizer.json` from the repository that the weights came from".to_owned())
            }
            PlanError::NoText { .. } => Some("mend the path, or leave the key out".to_owned()),
            PlanError::OtherText { .. } => {
                Some("take the text that the recipe was written for, or change the digest".to_owned())
            }
            PlanError::SensitivityUnreadable { .. } | PlanError::SensitivityTooLarge { .. } => {
                Some("mend `budget.sensitivity`; `tqc sensitivity` makes such a file".to_owned())
            }
            PlanError::Sensitivity { problem, .. } => problem.help(),
            PlanError::Strict { .. } => {
                Some("`tqc plan` lists them all; mend each, or build without `--strict`".to_owned())
            }
        }
    }
}

/// Makes the plan.
///
/// # Errors
/// Everything that is wrong with the recipe, the checkpoint, the config or the request.
pub fn plan(recipe: Recipe, source: SourceFolder, limits: Limits) -> Outcome<Plan> {
    plan_with(recipe, source, limits, Rounding::AsRecipe, Bits::Chosen)
}

/// The plan of an artifact whose budget was spent as its record says: no file of costs is read.
///
/// # Errors
/// As [`plan`].
pub fn plan_recorded(
    recipe: Recipe,
    source: SourceFolder,
    limits: Limits,
    recorded: &RecordedBits,
) -> Outcome<Plan> {
    plan_with(recipe, source, limits, Rounding::AsRecipe, Bits::Recorded(recorded))
}

/// What becomes of the weights once they are in their new basis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rounding {
    /// What the recipe says.
    AsRecipe,
    /// They are stored in f32, to see the change of basis alone.
    None,
    /// What the recipe quantizes goes into this codec by this encoder, where its groups divide: to try one module
    /// after the other.
    Trial(CodecSpec, &'static str),
}

fn plan_with(
    recipe: Recipe,
    source: SourceFolder,
    limits: Limits,
    rounding: Rounding,
    bits: Bits<'_>,
) -> Outcome<Plan> {
    let pipeline = Pipeline::find(&recipe.pipeline)?;
    let checkpoint = Checkpoint::open_with(&source.dir, &Links::of_folder(&source.dir))?;
    let config = Config::read(&source.dir)?;
    config.check_float()?;
    refuse_packed(&checkpoint)?;
    if recipe.transform.any() {
        registry::check_exact(&config)?;
    }
    let arch = registry::find(&config)?;
    let probe = |name: &str| checkpoint.get(name).map(|entry| (entry.dtype, entry.shape.clone()));
    let mut model = arch.model(&config, &probe, recipe.output.layout)?;
    if rounding == Rounding::None || recipe.default.codec == CodecSpec::F32 {
        model.float = Float::F32;
    }
    let fold = match recipe.transform.any() {
        false => None,
        true => {
            let decoder = arch.decoder(&config, &model)?;
            FoldPlan::new(&recipe, &mut model, decoder)?
        }
    };
    let (fates, mut unused) = bind(&recipe, &checkpoint, &model)?;
    if let Some(fold) = &fold {
        unused.extend(fold.check_kept(&recipe, model.hidden, &kept(&checkpoint, &fates)));
    }

    let to = module::Destination { model: &model, fold: fold.as_ref(), pipeline: &pipeline, rounding };
    let (mut modules, mut allocator) = module::assign(&recipe, &checkpoint, &fates, &to, unused)?;
    let allocated = match (&recipe.budget, rounding) {
        (Some(budget), Rounding::AsRecipe) => {
            let (recipe, checkpoint, config) = (&recipe, &checkpoint, &config);
            let given = Given { recipe, budget, checkpoint, config, to: &to };
            Some(allocate(&given, &mut modules, bits)?)
        }
        // Where nothing is rounded there is nothing to give out.
        _ => None,
    };
    check_layout(&recipe, &modules)?;
    let tensors: Vec<ModuleTensors> = modules
        .iter()
        .map(|module| ModuleTensors { folder: module.output.folder, planes: module.stored.clone() })
        .collect();
    let (files, places) = lay_out(&tensors, recipe.output.shard_size.0, recipe.output.layout);
    for (module, places) in modules.iter_mut().zip(places) {
        module.places = places;
    }

    let mut notes = module::notes(&checkpoint, &modules);
    let allocation = allocated.map(|allocated| {
        allocator = allocated.allocator;
        notes.extend(allocated.notes);
        allocated.record
    });
    if let Some(fold) = &fold {
        notes.extend(fold.notes(&recipe, &model));
    }
    let copied = copied(&source.dir, &mut notes)?;
    if recipe.transform.rotation.kind == RotationKind::Measure {
        check_measurable(&recipe, &copied)?;
    }
    let calibration = CalibrationPlan::new(&recipe, &modules, &copied)?;
    side::note_absent_parts(&source.dir, &config, &modules, &copied, &mut notes);
    let sizes = sizes(&checkpoint, &modules, &files);
    let side = side::generate(&recipe, &source, &config, arch, &model, &modules, &files, &sizes);
    // Where a trial rounds, or nothing does, nothing is compared.
    let compares = rounding == Rounding::AsRecipe && compares(&recipe);
    let decoder = match calibration.is_some() || compares {
        true => Some(arch.decoder(&config, &model)?),
        false => None,
    };
    let (threads, peak_memory) = memory::fit(
        &checkpoint,
        &modules,
        &pipeline,
        &memory::Phases {
            fold: fold.as_ref().map(|fold| (fold, &recipe.transform)),
            calibration: decoder
                .as_ref()
                .zip(calibration.as_ref())
                .map(|(decoder, from)| (decoder, &recipe.calibration, &from.outputs)),
            compare: decoder.as_ref().filter(|_| compares),
        },
        limits,
        &mut notes,
    )?;
    notes.sort();
    let mut plan = Plan {
        recipe,
        source,
        checkpoint,
        config,
        arch,
        model,
        pipeline,
        allocator,
        allocation,
        fold,
        calibration,
        rows: RowsPlace::default(),
        compared: None,
        measured: None,
        fates,
        modules,
        files,
        side,
        copied,
        notes,
        sizes,
        tool: Tool::this(),
        threads,
        isa: limits.isa,
        peak_memory,
        digest: Digest::of(b""),
    };
    plan.digest = plan.resolved_digest();
    Ok(plan)
}

/// One fate per source tensor, and the patterns of `[keep]` that match none.
fn bind(
    recipe: &Recipe,
    checkpoint: &Checkpoint,
    model: &Model,
) -> Result<(Vec<Fate>, Vec<RecipeError>), Problems<ArchError>> {
    let found: Vec<Found<'_>> = checkpoint
        .tensors()
        .iter()
        .map(|entry| Found {
            name: &entry.name,
            dtype: entry.dtype,
            shape: &entry.shape,
            file: &checkpoint.files()[entry.file].name,
        })
        .collect();
    let fates = model.bind(&found, &|name| recipe.keeps(name))?;
    let unused = recipe.keep.iter().filter(|keep| !found.iter().any(|t| keep.pattern.matches(t.name)));
    let problems = unused.map(|keep| {
        let message = format!("`{}` matches no tensor of the source", keep.pattern);
        recipe.problem(&keep.origin, message, Some("remove it, or mend the name".to_owned()))
    });
    Ok((fates, problems.collect()))
}

/// Tensors that only the recipe's `[keep]` knows, with their names in the source.
fn kept(checkpoint: &Checkpoint, fates: &[Fate]) -> Vec<(String, Output)> {
    let named = checkpoint.tensors().iter().zip(fates);
    let outputs = named.filter_map(|(entry, fate)| match fate {
        Fate::Outputs(outputs) => Some(outputs.iter().map(|output| (entry.name.clone(), output.clone()))),
        Fate::Dropped(_) => None,
    });
    outputs.flatten().filter(|(_, output)| output.folder == Folder::Kept).collect()
}

/// A measurement needs tokens of a text.
fn check_measurable(recipe: &Recipe, copied: &[CopiedFile]) -> Result<(), PlanError> {
    if !copied.iter().any(|file| file.name == "tokenizer.json") {
        return Err(PlanError::NoTokenizer { what: "`rotation = \"measure\"` scores text" });
    }
    match recipe.transform_text() {
        Some(path) => match std::fs::metadata(&path) {
            Ok(_) => Ok(()),
            Err(source) => Err(PlanError::NoText { path, source }),
        },
        None => Ok(()),
    }
}

/// The Hugging Face layout has no place for codes.
fn check_layout(recipe: &Recipe, modules: &[Module]) -> Result<(), Problems<RecipeError>> {
    let coded = modules.iter().find(|module| module.assignment.codec.quantizes());
    let (Some(coded), Layout::HuggingFace) = (coded, recipe.output.layout) else { return Ok(()) };
    let message = format!(
        "`{}` would be stored as {}, which the Hugging Face layout has no place for",
        coded.output.rule_path(),
        coded.assignment.codec
    );
    let help = "use `f32`, `bf16`, `f16` or `keep`, or leave `layout` out".to_owned();
    let origin = recipe.origins.layout.expect("only a recipe that states a layout has this one");
    Err(recipe.problem(&origin, message, Some(help)).into())
}

/// Whether a build compares what a budget chose with an even choice.
fn compares(recipe: &Recipe) -> bool {
    recipe.budget.as_ref().is_some_and(|budget| budget.control != Control::Off)
}

/// A packed checkpoint may come without a `quantization` key; its tensors give it away.
fn refuse_packed(checkpoint: &Checkpoint) -> Result<(), Problems<ArchError>> {
    let packed =
        checkpoint.tensors().iter().filter(|entry| entry.dtype.float().is_none()).filter_map(|entry| {
            let module =
                entry.name.strip_suffix(".weight").or_else(|| entry.name.strip_suffix(".qweight"))?;
            let scales =
                ["scales", "weight_scale", "weight_scale_inv"].map(|suffix| format!("{module}.{suffix}"));
            let scales = scales.into_iter().find(|name| checkpoint.get(name).is_some())?;
            Some(ArchError::PackedTensor {
                file: checkpoint.files()[entry.file].name.clone(),
                name: entry.name.clone(),
                dtype: entry.dtype,
                scales,
            })
        });
    // One is enough to say what is wrong with all of them.
    Problems::none_or(packed.take(1).collect(), ())
}

fn sizes(checkpoint: &Checkpoint, modules: &[Module], files: &[OutputFile]) -> Sizes {
    let quantized = || modules.iter().filter(|module| module.assignment.codec.quantizes());
    let per = |bytes: u64, weights: u64| if weights == 0 { 0.0 } else { 8.0 * bytes as f64 / weights as f64 };
    let weights = modules.iter().map(Module::weights).sum();
    let quantized_weights = quantized().map(Module::weights).sum();
    let quantized_bytes = quantized().map(Module::bytes).sum();
    let weight_file_bytes = files.iter().map(|file| file.len).sum();
    Sizes {
        weights,
        quantized_weights,
        quantized_bytes,
        source_bytes: checkpoint.tensors().iter().map(|entry| entry.bytes()).sum(),
        weight_file_bytes,
        bits_per_weight: per(weight_file_bytes, weights),
        quantized_bits_per_weight: per(quantized_bytes, quantized_weights),
    }
}

impl Plan {
    /// `--strict`: refuses any note that changes what the artifact holds.
    ///
    /// # Errors
    /// [`PlanError::Strict`].
    pub fn check_strict(&self) -> Result<(), PlanError> {
        strict(&self.notes)
    }

    /// The same model in the same basis, with every weight in f32.
    ///
    /// # Errors
    /// As [`plan`]: the source is opened again.
    pub fn unrounded(&self) -> Outcome<Plan> {
        let limits = Limits { memory: None, threads: self.threads, isa: self.isa };
        plan_with(self.recipe.clone(), self.source.clone(), limits, Rounding::None, Bits::Chosen)
    }

    /// The same model with its budget spent evenly, whatever the costs; none without a budget.
    ///
    /// # Errors
    /// As [`plan`]: source and costs are read again.
    pub fn control(&self) -> Outcome<Option<Plan>> {
        if self.allocation.is_none() {
            return Ok(None);
        }
        let limits = Limits { memory: None, threads: self.threads, isa: self.isa };
        plan_with(self.recipe.clone(), self.source.clone(), limits, Rounding::AsRecipe, Bits::Control)
            .map(Some)
    }

    /// How many modules the budget gave each codec, the narrowest first.
    pub fn histogram(&self) -> Vec<(String, u64)> {
        let Some(allocation) = &self.allocation else { return Vec::new() };
        let given = |codec: &str| {
            let modules = self.modules.iter().map(|module| &module.assignment);
            modules.filter(|a| a.reason == BUDGET && a.codec.to_string() == codec).count() as u64
        };
        allocation.candidates.iter().map(|codec| (codec.clone(), given(codec))).collect()
    }

    /// The text that the recipe calibrates on, whether or not an encoder asks for it.
    ///
    /// # Errors
    /// Those of the text and a missing tokenizer.
    pub fn calibrated_text(&self) -> Result<CalibrationPlan, PlanError> {
        CalibrationPlan::text(&self.recipe, &self.copied)
    }

    /// Which basis inputs of linear layers are in: `none` for the source's own, else a digest of what decides it.
    pub fn basis(&self) -> String {
        let Some(fold) = &self.fold else { return "none".to_owned() };
        let rotation = self.recipe.transform.rotation;
        let decides =
            (&fold.residual, &fold.values, fold.gains, fold.channels(), rotation.seed, rotation.steps);
        Digest::of(&canonical_json(&decides)).to_string()
    }

    /// The same model in the same basis, with every matrix of the trunk that is quantized here in `codec`, by an
    /// encoder that can fill it. Modules whose rows its groups do not divide stay as they are.
    ///
    /// # Errors
    /// As [`plan`]: the source is opened again.
    pub fn trial(&self, codec: CodecSpec, encoder: &'static str) -> Outcome<Plan> {
        let limits = Limits { memory: None, threads: self.threads, isa: self.isa };
        plan_with(
            self.recipe.clone(),
            self.source.clone(),
            limits,
            Rounding::Trial(codec, encoder),
            Bits::Chosen,
        )
    }

    /// Bytes that a build takes on disk; provenance is estimated at half a KiB a tensor.
    pub fn disk(&self) -> Bytes {
        let side: u64 = self.side.iter().map(|file| file.bytes.len() as u64).sum();
        let copied: u64 = self.copied.iter().map(|file| file.bytes).sum();
        let tensors = self.checkpoint.tensors().len() as u64
            + self.modules.iter().map(|module| module.stored.len() as u64).sum::<u64>();
        // Codes that are found before they are written out; where a budget is compared with an even choice, of both.
        let weighed = self.modules.iter().filter(|module| weighs(module.assignment.encoder));
        let codes: u64 = weighed.map(Module::bytes).sum();
        let choices = if compares(&self.recipe) { 2 } else { 1 };
        let wanted = &self.recipe.calibration;
        let rows = match &self.calibration {
            Some(CalibrationPlan { from: CalibratedFrom::Text, .. }) => {
                let rows = 4 * u64::from(wanted.rows) * u64::from(wanted.context) * self.model.hidden;
                self.rows.bytes(Bytes(rows), wanted.activations).0.0
            }
            _ => 0,
        };
        Bytes(self.sizes.weight_file_bytes + side + copied + 512 * tensors + choices * codes + rows)
    }

    /// The artifact's folder unless the command line names one.
    pub fn default_output(&self) -> PathBuf {
        self.recipe.output_directory().unwrap_or_else(|| Path::new("artifacts").join(&self.recipe.name))
    }

    fn resolved_digest(&self) -> Digest {
        let tensors = self.checkpoint.tensors().iter();
        let tensors: Vec<_> = tensors.map(|e| (&e.name, e.dtype, &e.shape, e.file, &e.range)).collect();
        let modules = self.modules.iter().map(|m| {
            let (output, choice) = (&m.output, &m.assignment);
            (m.tensor, &output.module, output.parameter, choice.codec, choice.encoder, m.work.cast, &m.steps)
        });
        let modules: Vec<_> = modules.collect();
        let files: Vec<_> =
            self.files.iter().map(|file| (&file.name, Digest::of(&file.header), file.len)).collect();
        let side: Vec<_> = self.side.iter().map(|file| (&file.name, Digest::of(&file.bytes))).collect();
        let copied: Vec<_> = self.copied.iter().map(|file| (&file.name, file.sha256)).collect();
        let stages: Vec<&str> = self.pipeline.stages().iter().map(|stage| stage.id()).collect();
        Digest::of(&canonical_json(&serde_json::json!({
            "recipe": self.recipe.digest(), "seed": self.recipe.seed, "hub": self.source.hub,
            "tool": self.tool, "stages": stages, "tensors": tensors, "modules": modules,
            "files": files, "side": side, "copied": copied,
            "rotations": self.fold.as_ref().map(|fold| (&fold.residual, &fold.values)),
            "calibration": self.calibration.as_ref().map(|calibration| calibration.sha256),
            "rotation_seed": self.recipe.transform.rotation.seed,
            "rotation_steps": self.recipe.transform.rotation.steps,
            "allocation": self.allocation,
        })))
    }
}

/// Refuses any note that changes what the artifact holds.
///
/// # Errors
/// [`PlanError::Strict`].
pub fn strict(notes: &[Note]) -> Result<(), PlanError> {
    let mut bad = notes.iter().filter(|note| note.kind.strict());
    match bad.next() {
        None => Ok(()),
        Some(first) => Err(PlanError::Strict {
            count: 1 + bad.count(),
            first: format!("`{}` {}", first.subject, first.detail),
        }),
    }
}
