//! `tqc build`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use serde_json::json;

use super::plan::seconds;
use super::print::Table;
use super::progress::Bar;
use super::{CliError, Common, Machine, RecipeArgs, fetch, print};
use crate::artifact::provenance::{
    CalibrationRecord, CalibrationTotals, ComparedRecord, ComparedRow, RotationRecord, TransformRecord,
};
use crate::build::{
    Before, Built, Options, Progress as _, Unfinished, build, check_target, measuring_path, staging_path,
};
use crate::calib::Slice;
use crate::control::compare;
use crate::digest::{Digest, canonical_json};
use crate::failure::{Exit, Outcome};
use crate::fold::{Asked, Keep, KeepFolder, Watch};
use crate::measure::measure;
use crate::plan::{CalibratedFrom, LayerTime, Limits, Note, NoteKind, Plan, SourceFolder, extrapolate, plan};
use crate::quant::weighs;
use crate::recipe::{Control, Lock, Recipe, RotationKind, differences_text};
use crate::units::Bytes;

/// Build the artifact that a recipe describes.
#[derive(Debug, Args)]
pub struct BuildArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Folder of the artifact [default: the recipe's `output.directory`, else artifacts/NAME].
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    #[command(flatten)]
    machine: Machine,
    /// Go on from an unfinished build of the same plan.
    #[arg(long, conflicts_with = "restart")]
    resume: bool,
    /// Throw an unfinished build away.
    #[arg(long)]
    restart: bool,
    /// Weigh errors in the first N layers only, say how long the whole build would take, and stop: `--resume` goes on.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..), conflicts_with_all = ["locked", "write_lock"])]
    only_layers: Option<u16>,
    /// Make an error of every note: casts, repairs, missing and unread files, absent parts.
    #[arg(long)]
    strict: bool,
    /// Compare recipe, source, tokenizer, program and artifact with the recipe's lock; exit 1 if any differs.
    #[arg(long, conflicts_with = "write_lock")]
    locked: bool,
    /// Write the lock beside the recipe.
    #[arg(long)]
    write_lock: bool,
    #[command(flatten)]
    common: Common,
}

impl BuildArgs {
    pub fn run(self) -> Outcome<Exit> {
        let before = Before::nothing();
        let lock_path = self.recipe.recipe.with_extension("lock");
        if self.write_lock {
            check_lock_place(&self.recipe.recipe, &lock_path)?;
        }
        let lock = match self.locked {
            true if !lock_path.exists() => return Err(CliError::NoLock { path: lock_path }.into()),
            true => Some(Lock::read(&lock_path)?),
            false => None,
        };
        let interrupt = Interrupt::install()?;
        let (recipe, source) = fetch::recipe_and_source(&self.recipe, fetch::Need::Weights)?;
        let stop = interrupt.raise_a_flag();
        let bar = Bar::default();
        let unfinished = match (self.resume, self.restart) {
            (true, _) => Unfinished::Resume,
            (_, true) => Unfinished::Discard,
            _ => Unfinished::Refuse,
        };
        let limits = self.machine.limits();
        let (output, stop, bar) = (&self.output, &*stop, &bar);
        // What is wrong with it is said before anything is measured.
        let sliced = |only: u16| slice(&plan(recipe.clone(), source.clone(), limits)?, only.into());
        let slice = self.only_layers.map(sliced).transpose()?;
        let mut ahead = Ahead { output, unfinished, stop, bar, before, kept: None, went_on: false };
        let plan = ahead.decide(recipe, source, limits)?;
        // A comparison would look for all codes.
        let plan = if slice.is_some() { Arc::new(plan) } else { ahead.compared(plan)? };
        let Ahead { before, kept, went_on, .. } = ahead;
        let target = self.output.clone().unwrap_or_else(|| plan.default_output());
        // Without a final `/` or `/.`, which name what a link leads to rather than the link.
        let target: PathBuf = target.components().collect();
        let tool = format!("{} {}", plan.tool.name, plan.tool.version);
        // What the plan knows already is compared before the work, not after.
        let planned = |lock: &Lock| Lock {
            tool: tool.clone(),
            tool_digest: plan.tool.source_sha256,
            recipe: plan.recipe.digest(),
            text: measured_on(&plan),
            ..lock.clone()
        };
        if let Some(lock) = &lock
            && !holds(lock, &planned(lock), &lock_path, false)
        {
            return Ok(Exit::No);
        }
        tell("note", plan.notes.iter());
        if self.resume && !staging_path(&target)?.exists() {
            let target = target.display();
            print::say(&match went_on {
                true => format!(
                    "note: the build of `{target}` had not begun; what was measured for it was used again"
                ),
                false => format!("note: there is no unfinished build of `{target}`; starting one"),
            });
        }
        let options = Options {
            target: &target,
            unfinished,
            strict: self.strict,
            stop,
            progress: bar,
            found: kept.as_ref().map_or(&(), |kept| kept as &dyn Keep),
            before,
            slice: slice.as_ref(),
        };
        let finished = build(&plan, &options);
        if let Some(slice) = &slice
            && let Some((times, notes)) = slice.ended()
        {
            tell("warning", notes.iter());
            self.report_slice(&plan, &target, slice, (&times, &notes), before)?;
            return Ok(Exit::Done);
        }
        let finished = finished?;
        tell("warning", finished.built.notes.iter().filter(|note| !plan.notes.contains(note)));
        let found = Lock {
            tool: tool.clone(),
            tool_digest: plan.tool.source_sha256,
            recipe: plan.recipe.digest(),
            source: finished.built.source_sha256,
            tokenizer: finished.built.tokenizer_sha256,
            text: measured_on(&plan),
            artifact: finished.built.digest,
        };
        if let Some(lock) = &lock
            && !holds(lock, &found, &lock_path, true)
        {
            print::say(&format!("`{}` is as it was before", target.display()));
            finished.discard()?;
            return Ok(Exit::No);
        }
        let built = finished.publish()?;
        kept.iter().for_each(discard);
        self.report(&plan, &built)?;
        if self.write_lock {
            write_whole(&lock_path, &found.text())?;
            print::say(&format!("wrote {}", lock_path.display()));
        }
        Ok(Exit::Done)
    }

    /// What the first layers took, and what the whole build should.
    fn report_slice(
        &self,
        plan: &Plan,
        target: &Path,
        slice: &Slice,
        (times, notes): (&[LayerTime], &[Note]),
        before: Before,
    ) -> Outcome<()> {
        let Before { began, peak, .. } = before;
        let peak = peak.max(slice.peak());
        let (staging, whole) = (staging_path(target)?, extrapolate(plan, times));
        let layers = layers(plan);
        if self.common.json {
            print::json(&json!({
                "path": target.display().to_string(), "staging": staging.display().to_string(), "layers": layers,
                "measured": times, "whole": whole, "notes": plan.notes.iter().chain(notes).collect::<Vec<_>>(),
                "elapsed_s": began.elapsed().as_secs_f64(), "threads": plan.threads, "isa": plan.isa.to_string(),
                "peak_resident_bytes": peak.resident, "peak_anonymous_bytes": peak.anonymous,
            }))?;
            return Ok(());
        }
        print::say(&format!(
            "stopped after {} of {layers} layers in {}, peak memory {} ({} anonymous); `--resume` goes on",
            slice.layers(),
            seconds(began.elapsed().as_secs_f64()),
            peak.resident,
            peak.anonymous
        ));
        if times.is_empty() {
            print::say(
                "note: none of them had all its codes to be looked for, so there is nothing to extrapolate from",
            );
        }
        let mut table = Table::new(&[("layer", true), ("pass", true), ("search", true)]);
        for time in times {
            let number = time.layer.map_or("-".to_owned(), |layer| layer.to_string());
            table.row([number, seconds(time.pass_s), seconds(time.search_s)]);
        }
        let mut text = table.render();
        if let Some(whole) = whole {
            let (all, of_estimate) = (seconds(whole.total_s), whole.of_estimate);
            text = format!(
                "{text}\nwhole build  {all}: passes {}, searches {}, the rest {}\n             ({of_estimate:.2} x the plan's own estimate in the layers measured)\n",
                seconds(whole.pass_s),
                seconds(whole.search_s),
                seconds(whole.rest_s),
            );
        }
        print::text(&text)?;
        Ok(())
    }

    fn report(&self, plan: &Plan, built: &Built) -> Outcome<()> {
        let sizes = &plan.sizes;
        if self.common.json {
            print::json(&json!({
                "path": built.path.display().to_string(), "digest": built.digest, "sizes": sizes, "notes": built.notes,
                "transform": built.transform, "calibration": built.calibration, "measured": plan.measured,
                "allocation": plan.allocation, "compared": plan.compared,
                "modules": plan.modules.len(), "resumed_modules": built.resumed_modules,
                "elapsed_s": built.elapsed_s, "measure_s": built.measure_s, "compare_s": built.compare_s,
                "threads": plan.threads, "isa": plan.isa.to_string(),
                "peak_resident_bytes": built.peak.resident, "peak_anonymous_bytes": built.peak.anonymous,
                "recipe_sha256": plan.recipe.digest(), "source_sha256": built.source_sha256,
                "tokenizer_sha256": built.tokenizer_sha256,
            }))?;
            return Ok(());
        }
        let resumed = match built.resumed_modules {
            0 => String::new(),
            n => format!(", {n} modules resumed"),
        };
        let part = |what: &str, part: Option<f64>| {
            part.map_or(String::new(), |part| format!(" ({} of it {what})", seconds(part)))
        };
        print::say(&format!(
            "built in {}{}{} with {} threads ({}), peak memory {} ({} anonymous){resumed}",
            seconds(built.elapsed_s),
            part("measuring bases", built.measure_s),
            part("comparing with an even choice", built.compare_s),
            plan.threads,
            plan.isa,
            built.peak.resident,
            built.peak.anonymous
        ));
        if let Some(transform) = &built.transform {
            print::say(&transform_words(transform));
        }
        if let Some(calibration) = &built.calibration {
            print::say(&calibration_words(calibration));
        }
        print::text(&format!(
            "artifact         {}\nsize             {} ({} bytes of weight files)\nbits per weight  {:.4} ({:.4} over quantized modules)\ndigest           {}\n",
            built.path.display(),
            Bytes(sizes.weight_file_bytes),
            sizes.weight_file_bytes,
            sizes.bits_per_weight,
            sizes.quantized_bits_per_weight,
            built.digest
        ))?;
        Ok(())
    }
}

/// Decoder layers of the text model.
fn layers(plan: &Plan) -> usize {
    plan.arch.decoder(&plan.config, &plan.model).map_or(0, |decoder| decoder.layers.len())
}

/// A calibration of the first layers.
///
/// # Errors
/// [`CliError::NoLayers`].
fn slice(plan: &Plan, only: usize) -> Outcome<Slice> {
    let from = plan.calibration.as_ref().map(|calibration| calibration.from);
    let weighs = plan.modules.iter().any(|module| weighs(module.assignment.encoder));
    let needed = match from.filter(|_| weighs) {
        Some(CalibratedFrom::Text) if only < layers(plan) => return Ok(Slice::new(only)),
        Some(CalibratedFrom::Text) => {
            format!("the model has {} layers, and a slice is fewer", layers(plan))
        }
        Some(CalibratedFrom::Hessians) => "second moments of a file take no way through layers".to_owned(),
        None => "the recipe weighs no errors, so it has no layers to end after".to_owned(),
    };
    Err(CliError::NoLayers { needed }.into())
}

/// The digest of the tokens that bases were measured on; with a calibration or a budget, of that and their files' digests.
fn measured_on(plan: &Plan) -> Option<Digest> {
    let measured = plan.measured.as_ref().map(|measured| measured.tokens_sha256);
    let calibration = plan.calibration.as_ref().map(|from| from.sha256);
    let costs = plan.allocation.as_ref().map(|allocation| allocation.sensitivity_sha256);
    match (calibration, costs) {
        (None, None) => measured,
        _ => Some(Digest::of(&canonical_json(&(measured, calibration, costs)))),
    }
}

/// What is measured before a build: bases, and what a budget chose.
struct Ahead<'a> {
    output: &'a Option<PathBuf>,
    unfinished: Unfinished,
    stop: &'a AtomicBool,
    bar: &'a Bar,
    before: Before,
    /// Where it is kept until the artifact is published.
    kept: Option<KeepFolder>,
    /// Whether an earlier command had kept some of it.
    went_on: bool,
}

impl Ahead<'_> {
    /// The plan, in the basis that the recipe names or that is measured to be the best.
    fn decide(&mut self, recipe: Recipe, source: SourceFolder, limits: Limits) -> Outcome<Plan> {
        let first = plan(recipe.clone(), source.clone(), limits)?;
        if recipe.transform.rotation.kind != RotationKind::Measure {
            return Ok(first);
        }
        let (measured, seconds) =
            self.kept_for(&first, &mut |watch| measure(&recipe, &source, limits, watch))?;
        self.before.measure_s = Some(seconds);
        for row in &measured.rows {
            let error = row.standard_error.map_or(String::new(), |error| format!(" +- {error:.5}"));
            print::say(&format!("measured: {:<15} mean KL {:.5}{error}", row.basis, row.mean_kl));
        }
        for row in &measured.skipped {
            print::say(&format!("measured: {:<15} is not possible: {}", row.basis, row.reason));
        }
        print::say(&format!("measured: building with {}", measured.chosen));
        let mut plan = plan(recipe.with_basis(&measured.chosen), source, limits)?;
        plan.measured = Some(measured);
        Ok(plan)
    }

    /// The plan, with its choice of codecs held against an even one if it spends a budget and the recipe wants that.
    fn compared(&mut self, plan: Plan) -> Outcome<Arc<Plan>> {
        let plan = Arc::new(plan);
        let Some(wanted) = plan.recipe.budget.as_ref().map(|budget| budget.control) else {
            return Ok(plan);
        };
        if wanted == Control::Off {
            return Ok(plan);
        }
        let (compared, seconds) = self.kept_for(&plan, &mut |watch| compare(&plan, watch))?;
        if let Some(compared) = &compared {
            self.before.compare_s = Some(seconds);
            print::say(&compared_words(compared));
            if wanted == Control::Stop && !compared.wins {
                self.kept.iter().for_each(discard);
                return Err(CliError::Lost.into());
            }
        }
        // The comparison has let go of it.
        let mut plan = Arc::try_unwrap(plan).unwrap_or_else(|_| unreachable!("nobody else holds the plan"));
        plan.compared = compared;
        Ok(Arc::new(plan))
    }

    /// Does `work`, which may keep what it finds beside the target of `plan`; its result, and the seconds it took.
    fn kept_for<T>(
        &mut self,
        plan: &Plan,
        work: &mut dyn FnMut(Watch<'_>) -> Outcome<T>,
    ) -> Outcome<(T, f64)> {
        let target = self.output.clone().unwrap_or_else(|| plan.default_output());
        // What the recipe or the target has wrong is said before hours are spent.
        check_target(&target, self.unfinished)?;
        let first = self.kept.is_none();
        let folder = KeepFolder(measuring_path(&target)?);
        if first && self.unfinished == Unfinished::Discard {
            discard(&folder);
        }
        let (bar, stop) = (self.bar, self.stop);
        let tell = |what: &str| bar.phase(what);
        let keep = Asked::new(&folder);
        let (done, seconds) = self.before.watch(|| work(Watch { stop, tell: &tell, keep: &keep }));
        bar.end();
        // What comes second may find what came first in the same command.
        self.went_on |= first && keep.found();
        self.kept = Some(folder);
        Ok((done?, seconds))
    }
}

/// A table of two rows, and the difference.
fn compared_words(compared: &ComparedRecord) -> String {
    let row = |name: &str, row: &ComparedRow| {
        let error = row.standard_error.map_or(String::new(), |error| format!(" +- {error:.5}"));
        format!(
            "compared: {name:<7} {:.3} bits per weight, mean KL {:.5}{error}, top-1 {:.4}, empty answers {} of {} prompts",
            row.bits_per_weight, row.mean_kl, row.top1, row.stops_at_once, compared.prompts
        )
    };
    let error = compared.standard_error.map_or(String::new(), |error| format!(" +- {error:.5}"));
    let seen = match compared.shared_runs {
        Some(runs) if runs > 0 => format!("; {runs} runs of 13 tokens of it are in the calibration text too"),
        _ => String::new(),
    };
    format!(
        "{}\n{}\ncompared: the choice {} an even one by {:.5}{error} nats on {} positions of {}{seen}",
        row("chosen", &compared.chosen),
        row("even", &compared.even),
        if compared.wins { "beats" } else { "loses to" },
        compared.difference.abs(),
        compared.positions,
        compared.text
    )
}

/// Takes what a measurement kept away.
fn discard(found: &KeepFolder) {
    // What cannot be removed is only in nobody's way.
    let _ = std::fs::remove_dir_all(&found.0);
}

/// Writes notes to stderr, at most [`TOLD`] of a kind: a model of another dtype has one for every module.
fn tell<'a>(word: &str, notes: impl Iterator<Item = &'a Note>) {
    let mut counts: BTreeMap<NoteKind, usize> = BTreeMap::new();
    for note in notes {
        let count = counts.entry(note.kind).or_default();
        *count += 1;
        if *count <= TOLD {
            print::say(&format!("{word}: `{}` {}", note.subject, note.detail));
        }
    }
    for (kind, count) in counts.into_iter().filter(|(_, count)| *count > TOLD) {
        print::say(&format!(
            "{word}: and {} more of kind `{}`; `provenance.json` lists them",
            count - TOLD,
            kind.name()
        ));
    }
}

/// One line: what was changed, and how near the model stayed.
fn transform_words(transform: &TransformRecord) -> String {
    let rotation = |name: &str, rotation: &Option<RotationRecord>| {
        rotation.as_ref().map(|rotation| format!("{name} {} ({})", rotation.kind, rotation.width))
    };
    let gains = transform.gamma_fold.then(|| "gains folded".to_owned());
    let parts = [gains, rotation("r1", &transform.r1), rotation("r2", &transform.r2)];
    let parts: Vec<String> = parts.into_iter().flatten().chain(transform.channels.iter().cloned()).collect();
    let parity = &transform.parity;
    format!(
        "transform: {}; before rounding, mean KL {:.1e} nats and logits within {:.1e} on {} tokens",
        parts.join(", "),
        parity.mean_kl,
        parity.max_logit,
        parity.tokens
    )
}

/// One line: what was weighed by what, and what it brought.
fn calibration_words(calibration: &CalibrationRecord) -> String {
    let CalibrationTotals { matrices, fallbacks, ratio, .. } = calibration.totals();
    let on = match &calibration.text {
        Some(text) => format!("{} tokens of {} rows of {}", text.tokens, text.rows, calibration.name),
        None => format!("second moments of {}", calibration.name),
    };
    format!(
        "calibration: {on}; {matrices} matrices weighed, {fallbacks} rounded to nearest after all; weighted loss {ratio:.3} \
         of rounding to nearest"
    )
}

/// Notes of one kind that are written out.
const TOLD: usize = 3;

/// Whether the lock holds; says what differs if not.
fn holds(lock: &Lock, found: &Lock, path: &Path, built: bool) -> bool {
    let differences = lock.differences(found);
    if !differences.is_empty() {
        print::say(&format!("`{}` does not hold:", path.display()));
        print::say(differences_text(&differences, built).trim_end());
    }
    differences.is_empty()
}

/// What Ctrl-C and SIGTERM do.
pub struct Interrupt {
    working: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
}

impl Interrupt {
    /// A signal ends the process at once, with 130: a download may be silent for a minute, and what came is kept.
    pub fn install() -> Result<Self, CliError> {
        let interrupt = Self { working: Arc::default(), stop: Arc::default() };
        let (working, stop) = (Arc::clone(&interrupt.working), Arc::clone(&interrupt.stop));
        ctrlc::set_handler(move || {
            if !working.load(Ordering::Relaxed) {
                print::say("\nerror: interrupted before the work began\nhelp: run the same command again; a download goes on where it stopped");
                std::process::exit(Exit::Interrupted as i32);
            }
            if stop.swap(true, Ordering::Relaxed) {
                std::process::exit(Exit::Interrupted as i32);
            }
            print::say("\nstopping after the panels under way; once more to stop at once");
        })
        .map_err(|error| CliError::Signals(error.to_string()))?;
        Ok(interrupt)
    }

    /// From now on a signal raises the flag, and a second one ends the process.
    pub fn raise_a_flag(self) -> Arc<AtomicBool> {
        self.working.store(true, Ordering::Relaxed);
        self.stop
    }
}

/// Refuses to write the lock over anything that is no lock: the recipe itself, or a stranger's file.
fn check_lock_place(recipe: &Path, lock: &Path) -> Outcome<()> {
    if recipe == lock {
        return Err(CliError::LockIsRecipe { path: lock.to_owned() }.into());
    }
    // A damaged lock may be written anew; anything else of its name is somebody's.
    if lock.symlink_metadata().is_ok()
        && !std::fs::read_to_string(lock).is_ok_and(|text| Lock::is_lock(&text))
    {
        Lock::read(lock)?;
    }
    Ok(())
}

/// Beside, then over: the file appears whole or not at all.
fn write_whole(path: &Path, text: &str) -> Result<(), CliError> {
    let failed = |error| CliError::Write { path: path.to_owned(), error };
    let beside = path.with_extension("lock.new");
    std::fs::write(&beside, text).map_err(failed)?;
    std::fs::rename(&beside, path).map_err(failed)
}
