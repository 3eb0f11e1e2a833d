//! Everything about a build that headers and the recipe decide: codecs, names, offsets, sizes, memory,
//! and every refusal. No weight is read.

mod estimate;
mod memory;
mod module;
mod side;

use std::path::{Path, PathBuf};

use serde::Serialize;

pub use estimate::{Estimate, estimate};
pub use module::{Module, STRIP_ELEMENTS};
pub use side::{CopiedFile, SideFile};

use crate::arch::{Arch, ArchError, Config, Fate, Found, Model, registry};
use crate::artifact::layout::{ModuleTensors, OutputFile, lay_out};
pub use crate::artifact::provenance::Sizes;
use crate::checkpoint::{Checkpoint, Links};
use crate::digest::{Digest, canonical_json};
use crate::failure::{Exit, Failure, Outcome, Problems};
use crate::isa::Isa;
use crate::recipe::{Recipe, RecipeError};
use crate::stage::pipeline::Pipeline;
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
    /// Threads were reduced to fit the budget.
    FewerThreads,
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
            NoteKind::FewerThreads => "fewer-threads",
        }
    }

    /// Whether `--strict` refuses it: it changes what the artifact holds.
    pub fn strict(self) -> bool {
        self != NoteKind::FewerThreads
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
    #[error("{count} of the plan's notes are errors under `--strict`; the first: {first}")]
    Strict { count: usize, first: String },
}

impl Failure for PlanError {
    fn exit(&self) -> Exit {
        match self {
            PlanError::NotJson { .. } => Exit::Input,
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
    let pipeline = Pipeline::find(&recipe.pipeline)?;
    let checkpoint = Checkpoint::open_with(&source.dir, &Links::of_folder(&source.dir))?;
    let config = Config::read(&source.dir)?;
    config.check_float()?;
    refuse_packed(&checkpoint)?;
    let arch = registry::find(&config)?;
    let probe = |name: &str| checkpoint.get(name).map(|entry| (entry.dtype, entry.shape.clone()));
    let model = arch.model(&config, &probe)?;
    let (fates, unused) = bind(&recipe, &checkpoint, &model)?;

    let (mut modules, allocator) = module::assign(&recipe, &checkpoint, &model, &fates, &pipeline, unused)?;
    let tensors: Vec<ModuleTensors> = modules
        .iter()
        .map(|module| ModuleTensors { folder: module.output.folder, planes: module.stored.clone() })
        .collect();
    let (files, places) = lay_out(&tensors, recipe.output.shard_size.0);
    for (module, places) in modules.iter_mut().zip(places) {
        module.places = places;
    }

    let mut notes = module::notes(&checkpoint, &modules);
    let copied = side::copied(&source.dir, &mut notes)?;
    side::note_absent_parts(&source.dir, &config, &modules, &copied, &mut notes);
    let sizes = sizes(&checkpoint, &modules, &files);
    let side = side::generate(&recipe, &source, &config, arch, &model, &modules, &files, &sizes);
    let (threads, peak_memory) = memory::fit(&checkpoint, &modules, limits, &mut notes)?;
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
    let keep = |name: &str| recipe.keep.iter().any(|keep| keep.pattern.matches(name));
    let fates = model.bind(&found, &keep)?;
    let unused = recipe.keep.iter().filter(|keep| !found.iter().any(|t| keep.pattern.matches(t.name)));
    let problems = unused.map(|keep| {
        let message = format!("`{}` matches no tensor of the source", keep.pattern);
        recipe.problem(&keep.origin, message, Some("remove it, or mend the name".to_owned()))
    });
    Ok((fates, problems.collect()))
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

    /// Bytes that the artifact takes on disk; provenance is estimated at half a KiB a tensor.
    pub fn disk(&self) -> Bytes {
        let side: u64 = self.side.iter().map(|file| file.bytes.len() as u64).sum();
        let copied: u64 = self.copied.iter().map(|file| file.bytes).sum();
        let tensors = self.checkpoint.tensors().len() as u64
            + self.modules.iter().map(|module| module.stored.len() as u64).sum::<u64>();
        Bytes(self.sizes.weight_file_bytes + side + copied + 512 * tensors)
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
            (m.tensor, &output.module, output.parameter, choice.codec, choice.encoder, m.work.cast)
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
