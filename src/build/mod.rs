//! Carries out a plan: encodes panel by panel, digests everything on the way, and publishes the artifact
//! in one step.
//!
//! Every file of the artifact has its final size from the start and every panel has its place in it, so
//! panels may be encoded in any order by any number of threads. Digests are chains of small jobs that
//! follow the data in file order while it is still in memory (`run`). Finished modules are journaled, so
//! that a killed build resumes (`staging`).

mod run;
pub mod schedule;
mod staging;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use serde::Serialize;

pub(crate) use run::Results;
pub(crate) use staging::{SealedModule, check_outside, hidden, remove_dir, sync_tree};
pub use staging::{Unfinished, check_target, measuring_path, staging_path};

use crate::arch::Fate;
use crate::artifact::config::pretty_json;
use crate::artifact::provenance::{
    CalibrationRecord, NoteRecord, OutputRecord, Provenance, RecipeRecord, RecipeText, SourceFileRecord,
    SourceRecord, SourceTensorRecord, ToolRecord, TransformRecord, VERSION, digest_of_files, source_digest,
};
use crate::artifact::{MACHINE, PROVENANCE};
use crate::calib::{NGRAMS, Slice, fold_and_solve};
use crate::digest::{Digest, canonical_json};
use crate::encode::EncodeError;
use crate::failure::{Exit, Failure, Outcome};
use crate::fold::{Both, Folded, Keep, OfPlan, Watch};
use crate::plan::{Note, NoteKind, Plan, PlanError, strict};
use crate::process::{PeakMemory, free_space, processor, watching};
use crate::units::Bytes;
use staging::{JournalKey, SourceStat, Staging};

/// How to build.
pub struct Options<'a> {
    /// Folder of the artifact.
    pub target: &'a Path,
    /// What to do with an unfinished build.
    pub unfinished: Unfinished,
    /// Turn notes into errors.
    pub strict: bool,
    /// Raised to stop; finished work stays for a resume.
    pub stop: &'a AtomicBool,
    /// Who is told.
    pub progress: &'a dyn Progress,
    /// Where a measurement kept what it found.
    pub found: &'a dyn Keep,
    /// What the same command did before.
    pub before: Before,
    /// Where the calibration ends, and the build with it: finished work stays for a resume.
    pub slice: Option<&'a Slice>,
}

/// What a command did before it began to build.
#[derive(Debug, Clone, Copy)]
pub struct Before {
    /// When the command began.
    pub began: Instant,
    /// Seconds in which bases were measured; none if none were.
    pub measure_s: Option<f64>,
    /// Seconds in which the choice of a budget was compared with an even one; none if it was not.
    pub compare_s: Option<f64>,
    /// What the process held meanwhile.
    pub peak: PeakMemory,
}

impl Before {
    /// A command that begins now.
    pub fn nothing() -> Self {
        Self { began: Instant::now(), measure_s: None, compare_s: None, peak: PeakMemory::default() }
    }

    /// Runs `work`; what it returned, and the seconds it took.
    pub fn watch<T>(&mut self, work: impl FnOnce() -> T) -> (T, f64) {
        let start = Instant::now();
        let (result, peak) = watching(work);
        self.peak = self.peak.max(peak);
        (result, start.elapsed().as_secs_f64())
    }
}

/// Is told how far a build is.
pub trait Progress: Sync {
    /// Work begins: source bytes to encode and modules, of which some are finished already.
    fn begin(&self, bytes: u64, modules: u64, bytes_done: u64, modules_done: u64);
    /// A panel of so many source bytes is encoded.
    fn panel(&self, bytes: u64);
    /// A module is finished.
    fn module(&self, name: &str);
    /// What is left is not counted in bytes.
    fn phase(&self, what: &str);
    /// Work has ended, well or not.
    fn end(&self);
}

/// What a build did.
#[derive(Debug, Clone, Serialize)]
pub struct Built {
    /// Folder of the artifact.
    pub path: PathBuf,
    /// SHA-256 of `provenance.json`, which names every other file's.
    pub digest: Digest,
    /// Changes of basis.
    pub transform: Option<TransformRecord>,
    /// What weighed errors.
    pub calibration: Option<CalibrationRecord>,
    /// Notes of the plan and the build.
    pub notes: Vec<Note>,
    /// Modules that an earlier, unfinished build had finished.
    pub resumed_modules: usize,
    /// Wall time of the command up to publication, seconds.
    pub elapsed_s: f64,
    /// Of it, seconds in which bases were measured; none if none were.
    pub measure_s: Option<f64>,
    /// Of it, seconds in which the choice of a budget was compared with an even one; none if it was not.
    pub compare_s: Option<f64>,
    /// What the process held at most, measuring and comparing included.
    pub peak: PeakMemory,
    /// Digest of all files that were read from the source but the tokenizer's, as [`digest_of_files`] takes
    /// it: `config.json`, the weight files, other copied files.
    pub source_sha256: Digest,
    /// Digest of the tokenizer's files, if there are any.
    pub tokenizer_sha256: Option<Digest>,
}

/// Why a build ended without an artifact.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum BuildError {
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error("the artifact needs {needed} at `{path}`, but only {free} are free")]
    DiskSpace { path: PathBuf, needed: Bytes, free: Bytes },
    #[error("cannot {what} `{path}`: {source}")]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("`{path}` exists and is not an artifact of tqc")]
    NotOurs { path: PathBuf },
    #[error("`{path}` is an artifact, but it also holds `{file}`, which would be lost")]
    HoldsMore { path: PathBuf, file: String },
    #[error("`{path}` is the source, which the artifact would replace")]
    IsSource { path: PathBuf },
    #[error("`{path}` is inside `{outer}`, {what}")]
    Inside { path: PathBuf, outer: PathBuf, what: &'static str },
    #[error("`{path}` is where the artifact would grow, but it holds what no build put there")]
    NotStaging { path: PathBuf },
    #[error("`{path}` was removed or replaced while it was written")]
    Taken { path: PathBuf },
    #[error("`{path}` does not name a folder")]
    NoName { path: PathBuf },
    #[error("another build is writing `{path}`")]
    InUse { path: PathBuf },
    #[error("an unfinished build lies in `{path}`")]
    Unfinished { path: PathBuf },
    #[error("the unfinished build in `{path}` has another plan: its recipe, source or program differs")]
    OtherPlan { path: PathBuf },
    #[error("`{path}` changed while it was copied")]
    CopyChanged { path: PathBuf },
    #[error("{count} of the build's notes are errors under `--strict`; the first: {first}")]
    Strict { count: usize, first: String },
    #[error("interrupted with {done} of {modules} modules finished")]
    Interrupted { done: usize, modules: usize },
}

impl BuildError {
    fn io(what: &'static str, path: &Path, source: io::Error) -> Self {
        BuildError::Io { what, path: path.to_owned(), source }
    }

    /// Whether finished work is worth keeping: the same build can go on once the cause is mended. What is
    /// wrong with the weights themselves cannot be mended without changing the source.
    fn keeps_work(&self) -> bool {
        matches!(
            self,
            BuildError::Io { .. }
                | BuildError::DiskSpace { .. }
                | BuildError::CopyChanged { .. }
                | BuildError::Interrupted { .. }
        )
    }
}

impl Failure for BuildError {
    fn exit(&self) -> Exit {
        match self {
            BuildError::Encode(error) => error.exit(),
            BuildError::CopyChanged { .. } => Exit::Input,
            BuildError::DiskSpace { .. } | BuildError::Io { .. } | BuildError::Taken { .. } => Exit::Machine,
            BuildError::Interrupted { .. } => Exit::Interrupted,
            _ => Exit::Request,
        }
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            BuildError::Encode(error) => return error.help(),
            BuildError::DiskSpace { .. } => "free some space, or write elsewhere with `-o`".to_owned(),
            BuildError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                "free some space, then run the same command with `--resume`".to_owned()
            }
            BuildError::Io { .. } => {
                "check that the folder exists and may be written, or write elsewhere with `-o`".to_owned()
            }
            BuildError::NotOurs { .. } => "choose another folder with `-o`, or move this one away".to_owned(),
            BuildError::HoldsMore { .. } => {
                "move the file away, or choose another folder with `-o`".to_owned()
            }
            BuildError::IsSource { .. } | BuildError::Inside { .. } => "choose another folder with `-o`".to_owned(),
            BuildError::Strict { .. } => {
                "all is kept: `--resume` without `--strict` writes the artifact with these notes; `--restart` begins anew"
                    .to_owned()
            }
            BuildError::NotStaging { .. } => "move it away, or choose another folder with `-o`".to_owned(),
            BuildError::Taken { .. } => {
                "leave `.NAME.building` alone while a build runs; run it again".to_owned()
            }
            BuildError::NoName { .. } => "name the artifact's folder with `-o`".to_owned(),
            BuildError::InUse { .. } => "wait for it to end, or write elsewhere with `-o`".to_owned(),
            BuildError::Unfinished { .. } => {
                "go on from it with `--resume`, or throw it away with `--restart`".to_owned()
            }
            BuildError::OtherPlan { .. } => {
                "restore what was changed and `--resume`, or throw it away with `--restart`".to_owned()
            }
            BuildError::CopyChanged { .. } => "run the command again with `--resume`".to_owned(),
            BuildError::Interrupted { .. } => "run the same command with `--resume` to go on".to_owned(),
        })
    }
}

/// An artifact that is whole but not yet published: the caller may still look at it and refuse.
#[must_use = "an artifact that is not published stays invisible"]
pub struct Finished {
    /// What was built.
    pub built: Built,
    staging: Staging,
    unmade: Unmade,
}

impl Finished {
    /// Puts the artifact in its place, in one step.
    ///
    /// # Errors
    /// [`BuildError::Io`]; the target is then as it was.
    pub fn publish(self) -> Result<Built, BuildError> {
        if !self.staging.is_intact() {
            return Err(BuildError::Taken { path: self.staging.artifact() });
        }
        self.staging.publish()?;
        Ok(self.built)
    }

    /// Throws the artifact away; the target is as it was.
    ///
    /// # Errors
    /// [`BuildError::Io`].
    pub fn discard(self) -> Result<(), BuildError> {
        self.staging.discard()?;
        self.unmade.remove_if_empty();
        Ok(())
    }
}

/// Builds the artifact beside its place.
///
/// # Errors
/// [`BuildError`], [`crate::plan::PlanError::Strict`], or the checkpoint's if a file changed meanwhile.
/// Nothing is left behind unless work is finished that a resume can use.
pub fn build(plan: &Arc<Plan>, options: &Options<'_>) -> Outcome<Finished> {
    if options.strict {
        plan.check_strict()?;
    }
    let same = |a: &Path, b: &Path| matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b);
    if same(options.target, &plan.source.dir) {
        return Err(BuildError::IsSource { path: options.target.to_owned() }.into());
    }
    check_outside(options.target, Some(&plan.source.dir))?;
    let key = JournalKey { plan: plan.digest, source: source_stats(plan) };
    let unmade = first_unmade(options.target);
    let result = Staging::take(options.target, &key, options.unfinished);
    let (staging, finished) = result.inspect_err(|_| unmade.remove_if_empty())?;
    let made = || -> Result<(Folded, Results), Ending> {
        check_space(plan, &staging)?;
        let folded = make_fold(plan, options, &staging)?;
        let results = run::run(plan, &folded.prepared, &staging, finished, options.stop, options.progress)?;
        Ok((folded, results))
    };
    let (made, peak) = watching(made);
    options.slice.iter().for_each(|slice| slice.held(peak));
    let result = made.and_then(|(folded, results)| finish(plan, options, &staging, &folded, results, peak));
    options.progress.end();
    match result {
        Ok(built) => Ok(Finished { built, staging, unmade }),
        Err(Ending { failure, keep }) if keep && staging.has_work() => Err(failure),
        Err(Ending { failure, .. }) => {
            staging.discard()?;
            unmade.remove_if_empty();
            Err(failure)
        }
    }
}

/// The plan's changes of basis; nothing of the artifact is written before the model is known to compute the same.
fn make_fold(plan: &Arc<Plan>, options: &Options<'_>, staging: &Staging) -> Result<Folded, Ending> {
    let tell = |what: &str| options.progress.phase(what);
    let found = OfPlan::new(options.found, plan, ());
    let watch = Watch { stop: options.stop, tell: &tell, keep: &Both(staging, &found) };
    // What is refused would be refused again.
    let keep = |failure: &dyn Failure| matches!(failure.exit(), Exit::Interrupted | Exit::Machine);
    fold_and_solve(plan, options.slice, watch).map_err(|failure| Ending { keep: keep(&*failure), failure })
}

/// A failure, and whether the staging folder stays for a resume.
struct Ending {
    failure: Box<dyn Failure>,
    keep: bool,
}

impl From<BuildError> for Ending {
    fn from(error: BuildError) -> Self {
        Self { keep: error.keeps_work(), failure: error.into() }
    }
}

/// Folders that a failed build must take away again: those above the target that did not exist.
#[derive(Debug)]
pub(crate) struct Unmade(Vec<PathBuf>);

/// Those above `target`.
pub(crate) fn first_unmade(target: &Path) -> Unmade {
    let above = target.ancestors().skip(1).filter(|path| !path.as_os_str().is_empty());
    Unmade(above.take_while(|path| !path.exists()).map(Path::to_owned).collect())
}

impl Unmade {
    /// Removes them again.
    pub(crate) fn remove_if_empty(&self) {
        // Innermost first; one that holds anything stays.
        for path in &self.0 {
            let _ = std::fs::remove_dir(path);
        }
    }
}

fn source_stats(plan: &Plan) -> Vec<SourceStat> {
    let files = plan.checkpoint.files().iter();
    files.map(|f| SourceStat { name: f.name.clone(), len: f.len, changed_ns: f.changed_ns() }).collect()
}

/// Refuses before hours are spent; files that an unfinished build has claimed are counted as there.
fn check_space(plan: &Plan, staging: &Staging) -> Result<(), BuildError> {
    let weights = plan.files.iter();
    let weights = weights.filter_map(|file| std::fs::metadata(staging.artifact().join(&file.name)).ok());
    let claimed: u64 = weights.chain(staging.found()).map(|meta| allocated(&meta)).sum();
    let needed = Bytes(plan.disk().0.saturating_sub(claimed));
    let path = staging.artifact();
    let free = free_space(&path).map_err(|e| BuildError::io("ask the free space of", &path, e))?;
    if free < needed { Err(BuildError::DiskSpace { path, needed, free }) } else { Ok(()) }
}

fn allocated(meta: &std::fs::Metadata) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    (meta.blocks() * 512).min(meta.len())
}

/// Everything but the weight files, and the record of all.
fn finish(
    plan: &Plan,
    options: &Options<'_>,
    staging: &Staging,
    folded: &Folded,
    results: Results,
    peak: PeakMemory,
) -> Result<Built, Ending> {
    options.progress.phase("writing");
    let stop = |failure: Box<dyn Failure>| Ending { failure, keep: false };
    plan.checkpoint.check_unchanged().map_err(|error| stop(error.into()))?;
    let notes = all_notes(plan, folded, &results.modules);
    if options.strict {
        // The same build without `--strict` can use all of it.
        let refused = |error| match error {
            PlanError::Strict { count, first } => BuildError::Strict { count, first }.into(),
            other => Box::<dyn Failure>::from(other),
        };
        strict(&notes).map_err(|error| Ending { failure: refused(error), keep: true })?;
    }

    let artifact = staging.artifact();
    let mut files: BTreeMap<String, Digest> = results
        .output_files
        .iter()
        .zip(&plan.files)
        .map(|(sha256, file)| (file.name.clone(), *sha256))
        .collect();
    for side in &plan.side {
        write(&artifact.join(&side.name), &side.bytes)?;
        files.insert(side.name.clone(), Digest::of(&side.bytes));
    }
    for copied in &plan.copied {
        let bytes = std::fs::read(&copied.path).map_err(|e| BuildError::io("read", &copied.path, e))?;
        if Digest::of(&bytes) != copied.sha256 {
            return Err(BuildError::CopyChanged { path: copied.path.clone() }.into());
        }
        write(&artifact.join(&copied.name), &bytes)?;
        files.insert(copied.name.clone(), copied.sha256);
    }
    if let Some(ngrams) = &folded.ngrams {
        write(&artifact.join(NGRAMS), ngrams)?;
        files.insert(NGRAMS.to_owned(), Digest::of(ngrams));
    }
    let provenance = provenance(plan, folded, &results, &notes, files);
    let bytes = canonical_json(&provenance);
    write(&artifact.join(PROVENANCE), &bytes)?;
    let digest = Digest::of(&bytes);
    let built = Built {
        path: options.target.to_owned(),
        digest,
        transform: folded.record.clone(),
        calibration: folded.calibration.clone(),
        notes,
        resumed_modules: results.resumed_modules,
        elapsed_s: options.before.began.elapsed().as_secs_f64(),
        measure_s: options.before.measure_s,
        compare_s: options.before.compare_s,
        peak: options.before.peak.max(peak),
        source_sha256: pinned_source(plan, &provenance),
        tokenizer_sha256: provenance.tokenizer_sha256,
    };
    let machine = serde_json::json!({
        "threads": plan.threads,
        "isa": plan.isa.to_string(),
        "elapsed_s": built.elapsed_s,
        "measure_s": built.measure_s,
        "compare_s": built.compare_s,
        "peak_resident_bytes": built.peak.resident,
        "peak_anonymous_bytes": built.peak.anonymous,
        "resumed_modules": built.resumed_modules,
        "operating_system": std::env::consts::OS,
        "architecture": std::env::consts::ARCH,
        "processor": processor(),
    });
    write(&artifact.join(MACHINE), &pretty_json(&machine))?;
    Ok(built)
}

fn pinned_source(plan: &Plan, provenance: &Provenance) -> Digest {
    let copied = plan.copied.iter().filter(|file| !file.tokenizer);
    let copied = copied.map(|file| (file.name.as_str(), file.sha256));
    let weights = provenance.source.files.iter().map(|file| (file.name.as_str(), file.sha256));
    let config = [("config.json", plan.config.digest())];
    digest_of_files(config.into_iter().chain(weights).chain(copied))
}

/// Notes of the plan, and one for each module that its encoder repaired.
pub(crate) fn all_notes(plan: &Plan, folded: &Folded, modules: &[SealedModule]) -> Vec<Note> {
    let repairs = modules.iter().zip(&plan.modules).flat_map(|(sealed, module)| {
        sealed.repairs().rows().map(|(kind, count)| Note {
            kind: NoteKind::Repair,
            subject: module.output.rule_path(),
            detail: format!("has {count} {}", repair_words(kind)),
        })
    });
    let lost = plan.compared.iter().filter(|compared| !compared.wins).map(|compared| Note {
        kind: NoteKind::Lost,
        subject: "budget".to_owned(),
        detail: format!(
            "chose a mean KL of {:.5} and {} empty answers, and an even choice has {:.5} and {}",
            compared.chosen.mean_kl,
            compared.chosen.stops_at_once,
            compared.even.mean_kl,
            compared.even.stops_at_once
        ),
    });
    let plans = plan.notes.iter().chain(&folded.notes).cloned();
    let mut notes: Vec<Note> = plans.chain(repairs).chain(lost).collect();
    notes.sort();
    notes
}

fn repair_words(kind: crate::quant::Repair) -> &'static str {
    match kind {
        crate::quant::Repair::ScaleUnderflow => {
            "groups whose scale is below the format's range, written as zeros"
        }
        crate::quant::Repair::ScaleOverflow => "groups whose scale is above the format's range, clamped",
        crate::quant::Repair::PathSaturated => "tiles whose costs left fixed point, searched again in f32",
        crate::quant::Repair::OutOfReach => {
            "weights more than twice as far out as its codebook reaches, cut off; a rotation spreads such weights"
        }
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), BuildError> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(|e| BuildError::io("create", parent, e))?;
    }
    std::fs::write(path, bytes).map_err(|e| BuildError::io("write", path, e))
}

/// The record of a build: all of it follows from the plan, the digests and the losses.
pub(crate) fn provenance(
    plan: &Plan,
    folded: &Folded,
    results: &Results,
    notes: &[Note],
    files: BTreeMap<String, Digest>,
) -> Provenance {
    let tensors = source_tensors(plan, results);
    let tokenizer: Vec<_> = plan.copied.iter().filter(|file| file.tokenizer).collect();
    let tokenizer_sha256 = (!tokenizer.is_empty())
        .then(|| digest_of_files(tokenizer.iter().map(|file| (file.name.as_str(), file.sha256))));
    Provenance {
        version: VERSION,
        tool: ToolRecord {
            name: plan.tool.name.to_owned(),
            version: plan.tool.version.to_owned(),
            source_sha256: plan.tool.source_sha256,
        },
        recipe: RecipeRecord {
            name: plan.recipe.name.clone(),
            sha256: plan.recipe.digest(),
            seed: plan.recipe.seed,
            files: plan
                .recipe
                .files
                .iter()
                .map(|file| RecipeText { name: file.name(), text: file.text.clone() })
                .collect(),
        },
        plan_sha256: plan.digest,
        stages: plan.pipeline.stages().iter().map(|stage| stage.id().to_owned()).collect(),
        transform: folded.record.clone(),
        compared: plan.compared.clone(),
        calibration: folded.calibration.clone(),
        measured: plan.measured.clone(),
        allocator: plan.allocator.to_owned(),
        allocation: plan.allocation.clone(),
        source: SourceRecord {
            model_type: plan.model.model_type.clone(),
            layout: plan.model.layout.title().to_owned(),
            hub: plan.source.hub.as_ref().map(|hub| hub.repo.clone()),
            revision: plan.source.hub.as_ref().map(|hub| hub.revision.clone()),
            sha256: source_digest(&tensors),
            config_sha256: plan.config.digest(),
            files: plan
                .checkpoint
                .files()
                .iter()
                .zip(&results.source_files)
                .map(|(file, sha256)| SourceFileRecord {
                    name: file.name.clone(),
                    bytes: file.len,
                    sha256: *sha256,
                })
                .collect(),
            tensors,
        },
        outputs: outputs(plan, results),
        tokenizer_sha256,
        files,
        sizes: plan.sizes,
        notes: notes
            .iter()
            // Threads are the machine's affair, not the artifact's.
            .filter(|note| note.kind != NoteKind::FewerThreads)
            .map(|note| NoteRecord {
                kind: note.kind.name().to_owned(),
                subject: note.subject.clone(),
                detail: note.detail.clone(),
            })
            .collect(),
    }
}

fn source_tensors(plan: &Plan, results: &Results) -> Vec<SourceTensorRecord> {
    let mut of_tensor: Vec<Vec<&crate::plan::Module>> = vec![Vec::new(); plan.fates.len()];
    for module in &plan.modules {
        of_tensor[module.tensor].push(module);
    }
    let entries = plan.checkpoint.tensors().iter().zip(&plan.fates).enumerate();
    entries
        .map(|(index, (entry, fate))| {
            let modules = &of_tensor[index];
            let (fate, reason) = match fate {
                Fate::Dropped(reason) => ("dropped", (*reason).to_owned()),
                Fate::Outputs(_) => (modules[0].fate(), modules[0].assignment.reason.clone()),
            };
            let outputs = modules.iter().flat_map(|m| m.stored.iter().map(|plane| plane.name.clone()));
            SourceTensorRecord {
                name: entry.name.clone(),
                dtype: entry.dtype,
                shape: entry.shape.clone(),
                sha256: results.source_tensors[index],
                fate: fate.to_owned(),
                reason,
                outputs: outputs.collect(),
            }
        })
        .collect()
}

fn outputs(plan: &Plan, results: &Results) -> Vec<OutputRecord> {
    let mut records = Vec::new();
    for (module, sealed) in plan.modules.iter().zip(&results.modules) {
        let loss = sealed.loss();
        let encoded = !module.work.verbatim() && loss.energy > 0.0;
        let repairs: BTreeMap<String, u64> =
            sealed.repairs().rows().map(|(kind, groups)| (kind.name().to_owned(), groups)).collect();
        for ((plane, place), sha256) in module.stored.iter().zip(&module.places).zip(&sealed.planes) {
            records.push(OutputRecord {
                name: plane.name.clone(),
                file: plan.files[place.file].name.clone(),
                dtype: plane.dtype,
                shape: plane.shape.clone(),
                sha256: *sha256,
                module: module.output.module.clone(),
                sources: vec![plan.checkpoint.tensors()[module.tensor].name.clone()],
                transforms: module.transforms(),
                codec: module.assignment.codec.to_string(),
                encoder: module.assignment.encoder.to_owned(),
                relative_mse: encoded.then(|| loss.error / loss.energy),
                repairs: BTreeMap::clone(&repairs),
            });
        }
    }
    records
}
