//! Does an artifact hold what its record says, and does the record say what the source and the recipe give?

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde::Serialize;

use super::diff::keys;
use crate::artifact::PROVENANCE;
use crate::artifact::open::{Artifact, file_digest, files_below};
use crate::artifact::provenance::{Provenance, source_digest};
use crate::build::schedule::{Ended, Schedule};
use crate::build::{Results, SealedModule, all_notes, provenance};
use crate::calib::{NGRAMS, fold_and_solve};
use crate::checkpoint::{Checkpoint, Links, is_plain};
use crate::digest::{Digest, Hasher, canonical_json};
use crate::encode::{EncodeError, Scratch, encode_panel, release_panel};
use crate::failure::{Exit, Failure, Outcome};
use crate::fold::{Folded, KeepFolder, Watch};
use crate::plan::{BUDGET, HubId, Limits, Module, Plan, RecordedBits, SourceFolder, plan, plan_recorded};
use crate::quant::{Repairs, RowLoss};
use crate::recipe::{BudgetSize, BudgetWeights, Recipe, RecipeFile, RotationKind, digest_of_texts};
use crate::stage::pipeline;
use crate::tool::Tool;

/// How many modules are encoded again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rebuild {
    /// None.
    No,
    /// So many, spread over the artifact by its digest.
    Some(usize),
    /// Every one.
    All,
}

/// What is made again.
#[derive(Debug, Clone, Copy)]
pub struct Again<'a> {
    /// How many modules.
    pub rebuild: Rebuild,
    /// The file that the recipe calibrates with, if it is not where the recipe says.
    pub calibration: Option<&'a Path>,
}

/// What was checked and what was found.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Verdict {
    /// Whether nothing is wrong.
    pub ok: bool,
    /// Files whose digests were compared.
    pub files: usize,
    /// Stored tensors whose digests were compared.
    pub tensors: usize,
    /// Source tensors whose digests were compared.
    pub source_tensors: usize,
    /// Modules that were encoded again and compared.
    pub rebuilt_modules: usize,
    /// What is wrong.
    pub problems: Vec<Problem>,
    /// What a person should know and that is not wrong.
    pub notes: Vec<String>,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Problem {
    /// File or tensor.
    pub subject: String,
    /// What was found and what was needed.
    pub found: String,
}

/// Why a check could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum VerifyError {
    #[error("modules can only be encoded again from the source")]
    RebuildNeedsSource,
    #[error("`{path}` cannot be read: {error}")]
    Unreadable { path: std::path::PathBuf, error: std::io::Error },
    #[error("interrupted")]
    Interrupted,
}

impl Failure for VerifyError {
    fn exit(&self) -> Exit {
        match self {
            VerifyError::RebuildNeedsSource => Exit::Request,
            VerifyError::Unreadable { .. } => Exit::Machine,
            VerifyError::Interrupted => Exit::Interrupted,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            VerifyError::RebuildNeedsSource => {
                Some("give the original checkpoint with `--source DIR`".to_owned())
            }
            _ => None,
        }
    }
}

/// Verifies the artifact in `dir`.
///
/// # Errors
/// If the artifact or the source cannot be read at all. What can be read and is wrong is in the verdict.
pub fn verify(
    dir: &Path,
    source: Option<&Path>,
    again: Again<'_>,
    limits: Limits,
    stop: &AtomicBool,
) -> Outcome<Verdict> {
    let rebuild = again.rebuild;
    if rebuild != Rebuild::No && source.is_none() {
        return Err(VerifyError::RebuildNeedsSource.into());
    }
    let artifact = Artifact::open(dir)?;
    let mut verdict = Verdict::default();
    let found = check_files(&artifact, limits, stop, &mut verdict)?;
    check_tensors(&artifact, &found, limits, stop, &mut verdict)?;
    check_accounts(&artifact.provenance, &mut verdict);
    check_record(&artifact, &mut verdict);
    if let Some(source) = source {
        let tensors = check_source(&artifact.provenance, source, limits, stop, &mut verdict)?;
        if rebuild != Rebuild::No {
            check_rebuild(&artifact, source, tensors, again, limits, stop, &mut verdict)?;
        }
    }
    verdict.problems.sort();
    verdict.ok = verdict.problems.is_empty();
    Ok(verdict)
}

impl Verdict {
    fn problem(&mut self, subject: &str, found: impl Into<String>) {
        self.problems.push(Problem { subject: subject.to_owned(), found: found.into() });
    }
}

/// Runs `work` on every item on the threads allowed, and returns the results in order.
fn in_parallel<T: Sync, R: Send, E: Send>(
    items: &[T],
    limits: Limits,
    stop: &AtomicBool,
    work: impl Fn(usize, &T) -> Result<R, E> + Sync,
) -> Outcome<Vec<R>>
where
    Box<dyn Failure>: From<E>,
{
    let mut schedule = Schedule::default();
    for index in 0..items.len() {
        schedule.add(index, []);
    }
    let results: Vec<Mutex<Option<R>>> = items.iter().map(|_| Mutex::new(None)).collect();
    let ended = schedule.run(limits.threads, stop, |thread, index| {
        let result = work(thread, &items[*index])?;
        *results[*index].lock().expect("only this job writes it") = Some(result);
        Ok::<(), E>(())
    });
    match ended {
        Ok(()) => {}
        Err(Ended::Stopped) => return Err(VerifyError::Interrupted.into()),
        Err(Ended::Failed(error)) => return Err(error.into()),
    }
    let done = results.into_iter().map(|r| r.into_inner().expect("all threads have ended"));
    Ok(done.map(|r| r.expect("every job has run")).collect())
}

/// Compares every file's digest, and returns the files that are there.
fn check_files(
    artifact: &Artifact,
    limits: Limits,
    stop: &AtomicBool,
    verdict: &mut Verdict,
) -> Outcome<BTreeSet<String>> {
    let unreadable = |error| VerifyError::Unreadable { path: artifact.dir.clone(), error };
    let found = files_below(&artifact.dir).map_err(unreadable)?;
    let listed: Vec<(&String, &Digest)> = artifact.provenance.files.iter().collect();
    let digests = in_parallel(&listed, limits, stop, |_, (name, _)| {
        let path = artifact.dir.join(name);
        match found.contains(*name) {
            true => file_digest(&path).map(Some).map_err(|error| VerifyError::Unreadable { path, error }),
            false => Ok(None),
        }
    })?;
    for ((name, needed), digest) in listed.iter().zip(digests) {
        match digest {
            None => verdict.problem(name, "is missing"),
            Some(digest) if digest != **needed => {
                verdict.problem(name, format!("has SHA-256 {digest}, but the record says {needed}"));
            }
            Some(_) => {}
        }
    }
    verdict.files = listed.len();
    for name in found.iter().filter(|name| !artifact.knows(name)) {
        verdict.problem(name, "is not in the record");
    }
    Ok(found)
}

fn check_tensors(
    artifact: &Artifact,
    found: &BTreeSet<String>,
    limits: Limits,
    stop: &AtomicBool,
    verdict: &mut Verdict,
) -> Outcome<()> {
    let mut by_folder: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for name in artifact.provenance.files.keys().filter(|name| name.ends_with(".safetensors")) {
        let (folder, file) = name.rsplit_once('/').unwrap_or(("", name));
        // Only what was found below the folder is opened, whatever path the record names.
        if found.contains(name) && is_plain(file) {
            by_folder.entry(folder).or_default().push(file.to_owned());
        }
    }
    let outputs = &artifact.provenance.outputs;
    let mut needed: BTreeMap<(String, String), usize> = BTreeMap::new();
    for (index, output) in outputs.iter().enumerate() {
        needed.insert((output.file.clone(), output.name.clone()), index);
    }
    for (folder, files) in by_folder {
        let checkpoint = match Checkpoint::open_files(&artifact.dir.join(folder), &files) {
            Ok(checkpoint) => checkpoint,
            Err(problems) => {
                problems.list().iter().for_each(|problem| verdict.problem(folder, problem.to_string()));
                continue;
            }
        };
        let digests = in_parallel(checkpoint.tensors(), limits, stop, |_, entry| {
            let digest = Digest::of(checkpoint.bytes(entry));
            checkpoint.release(entry.file, entry.range.clone());
            Ok::<_, VerifyError>(digest)
        })?;
        for (entry, digest) in checkpoint.tensors().iter().zip(digests) {
            let file = &checkpoint.files()[entry.file].name;
            let file = if folder.is_empty() { file.clone() } else { format!("{folder}/{file}") };
            verdict.tensors += 1;
            let Some(index) = needed.remove(&(file.clone(), entry.name.clone())) else {
                verdict.problem(&entry.name, format!("is in `{file}` but not in the record"));
                continue;
            };
            let output = &outputs[index];
            if (entry.dtype, &entry.shape) != (output.dtype, &output.shape) {
                let (found, needed) = ((entry.dtype, &entry.shape), (output.dtype, &output.shape));
                verdict.problem(
                    &entry.name,
                    format!("is {} {}, but the record says {} {}", found.0, found.1, needed.0, needed.1),
                );
            }
            if digest != output.sha256 {
                verdict.problem(
                    &entry.name,
                    format!("has payload SHA-256 {digest}, but the record says {}", output.sha256),
                );
            }
        }
    }
    for (file, name) in needed.into_keys() {
        verdict.problem(&name, format!("is in the record but not in `{file}`"));
    }
    Ok(())
}

/// The record's own digests, and its spelling: its digest is the artifact's, so there is only one.
fn check_record(artifact: &Artifact, verdict: &mut Verdict) {
    let record = &artifact.provenance;
    if Digest::of(&canonical_json(record)) != artifact.digest {
        verdict.problem(PROVENANCE, "is not spelt as this program writes it, so its digest is another");
    }
    let found = digest_of_texts(record.recipe.files.iter().map(|file| file.text.as_str()));
    if found != record.recipe.sha256 {
        verdict.problem(
            PROVENANCE,
            format!("carries a recipe with digest {found}, but says {}", record.recipe.sha256),
        );
    }
}

/// Every source tensor leads to stored tensors or a reason, every stored tensor comes from source tensors.
fn check_accounts(provenance: &Provenance, verdict: &mut Verdict) {
    let stored: std::collections::BTreeSet<&str> =
        provenance.outputs.iter().map(|o| o.name.as_str()).collect();
    let sources: std::collections::BTreeSet<&str> =
        provenance.source.tensors.iter().map(|t| t.name.as_str()).collect();
    for tensor in &provenance.source.tensors {
        if tensor.fate == "dropped" && tensor.reason.is_empty() {
            verdict.problem(&tensor.name, "was dropped without a reason");
        }
        if tensor.fate != "dropped" && tensor.outputs.is_empty() {
            verdict.problem(&tensor.name, format!("is `{}` but leads to no stored tensor", tensor.fate));
        }
        for output in tensor.outputs.iter().filter(|output| !stored.contains(output.as_str())) {
            verdict.problem(&tensor.name, format!("leads to `{output}`, which is not stored"));
        }
    }
    for output in &provenance.outputs {
        for source in output.sources.iter().filter(|source| !sources.contains(source.as_str())) {
            verdict.problem(&output.name, format!("comes from `{source}`, which the source does not hold"));
        }
    }
    if source_digest(&provenance.source.tensors) != provenance.source.sha256 {
        verdict.problem(PROVENANCE, "names a source digest that its tensors do not give");
    }
}

fn check_source(
    provenance: &Provenance,
    source: &Path,
    limits: Limits,
    stop: &AtomicBool,
    verdict: &mut Verdict,
) -> Outcome<Vec<Digest>> {
    let checkpoint = Checkpoint::open_with(source, &Links::of_folder(source))?;
    let digests = in_parallel(checkpoint.tensors(), limits, stop, |_, entry| {
        let mut hasher = Hasher::default();
        const PIECE: u64 = 16 << 20;
        for start in entry.range.clone().step_by(PIECE as usize) {
            let range = start..(start + PIECE).min(entry.range.end);
            hasher.update(&checkpoint.file_bytes(entry.file)[range.start as usize..range.end as usize]);
            checkpoint.release(entry.file, range);
        }
        Ok::<_, VerifyError>(hasher.finish())
    })?;
    let mut needed: BTreeMap<&str, _> =
        provenance.source.tensors.iter().map(|t| (t.name.as_str(), t)).collect();
    for (entry, digest) in checkpoint.tensors().iter().zip(&digests) {
        verdict.source_tensors += 1;
        match needed.remove(entry.name.as_str()) {
            None => verdict.problem(&entry.name, "is in the source but not in the record"),
            Some(record) if (record.dtype, &record.shape) != (entry.dtype, &entry.shape) => verdict.problem(
                &entry.name,
                format!(
                    "is {} {} in the source, but the record says {} {}",
                    entry.dtype, entry.shape, record.dtype, record.shape
                ),
            ),
            Some(record) if record.sha256 != *digest => verdict.problem(
                &entry.name,
                format!("has SHA-256 {digest} in the source, but the record says {}", record.sha256),
            ),
            Some(_) => {}
        }
    }
    for name in needed.into_keys() {
        verdict.problem(name, "is in the record but not in the source");
    }
    Ok(digests)
}

/// A folder for codes that are looked for again; it goes away in the end.
struct Found(KeepFolder);

impl Found {
    fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("tqc-verify-{}-{number}", std::process::id());
        Self(KeepFolder(std::env::temp_dir().join(name)))
    }
}

impl Drop for Found {
    fn drop(&mut self) {
        // What cannot be removed is the system's to clean up.
        let _ = std::fs::remove_dir_all(&self.0.0);
    }
}

/// Encodes modules again, from the recipe that the record carries.
fn check_rebuild(
    artifact: &Artifact,
    source: &Path,
    source_tensors: Vec<Digest>,
    Again { rebuild, calibration }: Again<'_>,
    limits: Limits,
    stop: &AtomicBool,
    verdict: &mut Verdict,
) -> Outcome<()> {
    let record = &artifact.provenance;
    let tool = Tool::this();
    if record.tool.source_sha256 != tool.source_sha256 {
        verdict.notes.push(format!(
            "built by {} {} (source {}), encoded again by {} {} (source {})",
            record.tool.name,
            record.tool.version,
            record.tool.source_sha256.short(),
            tool.name,
            tool.version,
            tool.source_sha256.short()
        ));
    }
    let files = record.recipe.files.iter();
    let files: Vec<RecipeFile> =
        files.map(|file| RecipeFile { path: file.name.clone().into(), text: file.text.clone() }).collect();
    if files.is_empty() {
        verdict.problem(PROVENANCE, "carries no recipe, so nothing can be encoded again");
        return Ok(());
    }
    let recipe = Recipe::parse(files, &pipeline::names())?;
    check_measured(record, &recipe, verdict);
    // Measuring again would take as long as the build did; what was chosen is held to be.
    let recipe = match &record.measured {
        Some(measured) => recipe.with_basis(&measured.chosen),
        None => recipe,
    };
    let hub = record.source.hub.clone().zip(record.source.revision.clone());
    let hub = hub.map(|(repo, revision)| HubId { repo, revision });
    let recipe = match calibration {
        Some(file) => recipe.with_calibration(file),
        None => recipe,
    };
    let source_folder = SourceFolder { dir: source.to_owned(), hub };
    // The file of costs is not part of the artifact; what was chosen by it is held to be.
    let mut plan = match recorded_bits(record, &recipe, verdict) {
        Some(recorded) => plan_recorded(recipe, source_folder, limits, &recorded)?,
        None if recipe.budget.is_some() => return Ok(()),
        None => plan(recipe, source_folder, limits)?,
    };
    check_budget(&plan, verdict);
    plan.measured = record.measured.clone();
    // So is how it compared; that took as long as the build.
    plan.compared = record.compared.clone();
    let plan = Arc::new(plan);
    let found = Found::new();
    let folded = fold_and_solve(&plan, None, Watch { stop, tell: &|_| {}, keep: &found.0 })?;
    if folded.calibration != record.calibration {
        verdict.problem(PROVENANCE, "has a `calibration` that the recipe and its text do not give");
    }
    check_outputs(record, &plan, verdict);
    let mut digests: BTreeMap<&str, Digest> = BTreeMap::new();
    for output in &record.outputs {
        digests.insert(&output.name, output.sha256);
    }
    let chosen = choose(&plan, artifact.digest, rebuild);
    let scratch: Vec<Mutex<Scratch>> = (0..plan.threads).map(|_| Mutex::default()).collect();
    let limits = Limits { threads: plan.threads, ..limits };
    let rebuilt = in_parallel(&chosen, limits, stop, |thread, (index, module)| {
        let work = folded.prepared.work(*index);
        let mut scratch = scratch[thread].lock().expect("one job a thread");
        let mut planes = vec![Hasher::default(); module.stored.len()];
        let (mut loss, mut repairs) = (RowLoss::default(), Repairs::default());
        for panel in 0..module.panels.len() {
            let encoded = encode_panel(&plan, module, work, panel, &mut scratch)?;
            planes.iter_mut().zip(encoded.planes).for_each(|(hasher, bytes)| hasher.update(bytes));
            encoded.losses.into_iter().for_each(|row| loss += row);
            repairs += encoded.repairs;
            release_panel(&plan, module, panel);
        }
        let planes = planes.into_iter().map(Hasher::finish).collect();
        Ok::<_, EncodeError>(SealedModule::new(0, planes, loss, repairs))
    })?;
    for ((_, module), sealed) in chosen.iter().zip(&rebuilt) {
        verdict.rebuilt_modules += 1;
        for (plane, digest) in module.stored.iter().zip(&sealed.planes) {
            match digests.get(plane.name.as_str()) {
                Some(needed) if needed == digest => {}
                Some(needed) => verdict.problem(
                    &plane.name,
                    format!("encodes to SHA-256 {digest}, but the record says {needed}"),
                ),
                // Reported with the other facts.
                None => {}
            }
        }
    }
    // Anything else that is wrong would only be said again.
    if rebuild == Rebuild::All && verdict.problems.is_empty() {
        check_whole_record(artifact, &plan, &folded, source_tensors, rebuilt, limits, stop, verdict)?;
    }
    Ok(())
}

/// The codecs that the record has, if the recipe has a budget.
fn recorded_bits(record: &Provenance, recipe: &Recipe, verdict: &mut Verdict) -> Option<RecordedBits> {
    let allocation = match (&record.allocation, &recipe.budget) {
        (Some(allocation), Some(_)) => allocation.clone(),
        (Some(_), None) => {
            verdict.problem(PROVENANCE, "has an `allocation` though the recipe has no budget");
            return None;
        }
        (None, Some(_)) => {
            verdict.problem(PROVENANCE, "has no `allocation`, though the recipe has a budget");
            return None;
        }
        (None, None) => return None,
    };
    let mut codecs = BTreeMap::new();
    for output in &record.outputs {
        match output.codec.parse() {
            Ok(codec) => {
                codecs.insert(output.module.clone(), codec);
            }
            Err(error) => verdict.problem(&output.name, format!("{error}")),
        }
    }
    Some(RecordedBits { record: allocation, codecs })
}

/// What an allocation says of sizes and candidates must be so, though it is not made again.
fn check_budget(plan: &Plan, verdict: &mut Verdict) {
    let (Some(allocation), Some(budget)) = (&plan.allocation, &plan.recipe.budget) else { return };
    let decided = || plan.modules.iter().filter(|module| module.assignment.reason == BUDGET);
    let most = match budget.size {
        // In bytes this depends on the narrowest choice, which only the table of costs knows.
        BudgetSize::CodeBits(bits) => {
            let weights: u64 = decided().map(Module::weights).sum();
            let codes = decided().map(|module| {
                module.weights() * u64::from(module.assignment.codec.code_bits().unwrap_or_default())
            });
            let found = codes.sum::<u64>() as f64 / weights as f64;
            if found > bits {
                let found = format!("gives codes of {found} bits on average, but the recipe's are {bits}");
                verdict.problem(PROVENANCE, found);
            }
            allocation.budget_bytes
        }
        size => size.bytes(BudgetWeights { all: plan.sizes.weights, decided: 0, rest: 0 }),
    };
    if allocation.budget_bytes != most {
        let found = format!("has a budget of {} bytes, but the recipe's is {most}", allocation.budget_bytes);
        verdict.problem(PROVENANCE, found);
    }
    let bytes = plan.sizes.weight_file_bytes;
    if allocation.weight_file_bytes != bytes || bytes > most {
        let said = allocation.weight_file_bytes;
        let found =
            format!("says that a budget of {most} bytes gave weight files of {said}, and they have {bytes}");
        verdict.problem(PROVENANCE, found);
    }
    if allocation.method != budget.method.name() {
        verdict.problem(
            PROVENANCE,
            format!("was allocated by `{}`, not by the recipe's method", allocation.method),
        );
    }
    let mut count = 0;
    for module in decided() {
        count += 1;
        let codec = module.assignment.codec.to_string();
        if !allocation.candidates.contains(&codec) {
            verdict
                .problem(&module.output.rule_path(), format!("is stored as {codec}, which is no candidate"));
        }
    }
    if count != allocation.modules {
        let found = format!("says that {} modules were given bits, and {count} were", allocation.modules);
        verdict.problem(PROVENANCE, found);
    }
}

/// What a measurement says must hang together, though it is not made again.
fn check_measured(record: &Provenance, recipe: &Recipe, verdict: &mut Verdict) {
    let asked = recipe.transform.rotation.kind == RotationKind::Measure;
    let Some(measured) = &record.measured else {
        if asked {
            verdict.problem(PROVENANCE, "has no `measured`, though the recipe asks for a measurement");
        }
        return;
    };
    if !asked {
        verdict.problem(PROVENANCE, "has a `measured` that the recipe does not ask for");
        return;
    }
    let rows = measured.rows.iter().map(|row| row.basis.as_str());
    let mut named: Vec<&str> = rows.chain(measured.skipped.iter().map(|row| row.basis.as_str())).collect();
    let mut candidates: Vec<&str> = recipe.transform.candidates().collect();
    named.sort_unstable();
    candidates.sort_unstable();
    if named != candidates {
        let (named, candidates) = (named.join(", "), candidates.join(", "));
        verdict.problem(PROVENANCE, format!("measured {named}, but the candidates are {candidates}"));
    }
    if measured.rows.iter().any(|row| row.mean_kl.is_nan() || row.mean_kl < 0.0) {
        verdict.problem(PROVENANCE, "has a measured KL below 0");
    }
    let best = measured.rows.iter().min_by(|a, b| a.mean_kl.total_cmp(&b.mean_kl));
    if best.map(|row| row.basis.as_str()) != Some(measured.chosen.as_str()) {
        let found = format!("chose `{}`, which is not the basis of least KL in its table", measured.chosen);
        verdict.problem(PROVENANCE, found);
    }
}

/// The record is wholly determined by recipe, source, program and artifact: makes it again and compares.
#[allow(clippy::too_many_arguments)]
fn check_whole_record(
    artifact: &Artifact,
    plan: &Plan,
    folded: &Folded,
    source_tensors: Vec<Digest>,
    modules: Vec<SealedModule>,
    limits: Limits,
    stop: &AtomicBool,
    verdict: &mut Verdict,
) -> Outcome<()> {
    let record = &artifact.provenance;
    let files = plan.checkpoint.files();
    let source_files = in_parallel(files, limits, stop, |_, file| {
        file_digest(&file.path).map_err(|error| VerifyError::Unreadable { path: file.path.clone(), error })
    })?;
    let named = files.iter().zip(&source_files).map(|(file, sha256)| (file.name.as_str(), file.len, *sha256));
    if !named.eq(record.source.files.iter().map(|file| (file.name.as_str(), file.bytes, file.sha256))) {
        verdict.notes.push(
            "the source is divided into other files than the record says; only its tensors were compared"
                .to_owned(),
        );
        return Ok(());
    }
    let side = plan.side.iter().map(|file| (file.name.clone(), Digest::of(&file.bytes)));
    let copied = plan.copied.iter().map(|file| (file.name.clone(), file.sha256));
    let output_files: Vec<Digest> =
        plan.files.iter().filter_map(|file| record.files.get(&file.name).copied()).collect();
    let weights = plan.files.iter().map(|file| file.name.clone()).zip(output_files.iter().copied());
    let ngrams = folded.ngrams.iter().map(|bytes| (NGRAMS.to_owned(), Digest::of(bytes)));
    let listed = weights.chain(side).chain(copied).chain(ngrams).collect();
    let notes = all_notes(plan, folded, &modules);
    let results = Results { source_files, source_tensors, modules, output_files, resumed_modules: 0 };
    let made = json(&provenance(plan, folded, &results, &notes, listed));
    let mut differences = Vec::new();
    keys(PROVENANCE, "", Some(&json(record)), Some(&made), &mut differences);
    let other_tool = record.tool.source_sha256 != plan.tool.source_sha256;
    let of_tool = |key: &str| key == "plan_sha256" || key.starts_with("tool.");
    for difference in differences.iter().filter(|difference| !(other_tool && of_tool(&difference.key))) {
        let word = |value: &Option<serde_json::Value>| {
            value.as_ref().map_or("nothing".to_owned(), |v| v.to_string())
        };
        verdict.problem(
            PROVENANCE,
            format!(
                "says {} for `{}`, but recipe and source give {}",
                word(&difference.left),
                difference.key,
                word(&difference.right)
            ),
        );
    }
    Ok(())
}

fn json(record: &Provenance) -> serde_json::Value {
    serde_json::to_value(record).expect("our types have string keys and finite numbers")
}

/// What the record says of each stored tensor, beyond its bytes and its error, against what the plan gives.
fn check_outputs(record: &Provenance, plan: &Plan, verdict: &mut Verdict) {
    let mut needed: BTreeMap<(&str, &str), (&Module, usize)> = BTreeMap::new();
    for module in &plan.modules {
        for (index, (plane, place)) in module.stored.iter().zip(&module.places).enumerate() {
            needed.insert((&plan.files[place.file].name, &plane.name), (module, index));
        }
    }
    for output in &record.outputs {
        let Some((module, index)) = needed.remove(&(output.file.as_str(), output.name.as_str())) else {
            verdict.problem(&output.name, "is in the record, but does not follow from recipe and source");
            continue;
        };
        let plane = &module.stored[index];
        let source = &plan.checkpoint.tensors()[module.tensor].name;
        let facts = [
            ("dtype", output.dtype == plane.dtype),
            ("shape", output.shape == plane.shape),
            ("module", output.module == module.output.module),
            ("sources", output.sources == [source.as_str()]),
            ("transforms", output.transforms == module.transforms()),
            ("codec", output.codec == module.assignment.codec.to_string()),
            ("encoder", output.encoder == module.assignment.encoder),
        ];
        for (fact, _) in facts.into_iter().filter(|(_, same)| !same) {
            verdict.problem(
                &output.name,
                format!("has another `{fact}` in the record than recipe and source give"),
            );
        }
    }
    for (_, name) in needed.into_keys() {
        verdict.problem(name, "follows from recipe and source, but is not in the record");
    }
}

/// Which modules to encode again: those whose name, hashed with the artifact's digest, comes first. So the
/// choice is spread evenly, the same for everyone, and not the maker's.
fn choose(plan: &Plan, digest: Digest, rebuild: Rebuild) -> Vec<(usize, &Module)> {
    let count = match rebuild {
        Rebuild::No => 0,
        Rebuild::Some(count) => count,
        Rebuild::All => plan.modules.len(),
    };
    let key = |(_, module): &(usize, &Module)| {
        Digest::of(format!("{digest}{}", module.output.rule_path()).as_bytes())
    };
    let mut modules: Vec<(usize, &Module)> = plan.modules.iter().enumerate().collect();
    modules.sort_by_cached_key(key);
    modules.truncate(count);
    modules.sort_by_key(|(index, _)| *index);
    modules
}
