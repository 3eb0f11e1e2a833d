//! Weighs errors by what goes through the layers: second moments of their inputs on a text, one layer at a time, and the
//! search for codes under them.
//!
//! ```text
//! rows of a text ─► layer l ─► H of each input ─► codes of l's modules (kept)
//!                     │
//!                     └► rows for layer l + 1: of the unrounded model, or through l's codes (`sequential`)
//! ```
//!
//! What is held is one layer, its second moments and one matrix; rows in a file where they are many. Codes are kept in
//! files as they are found, and so are rows now and then, for a build that was killed. The rules are in
//! `docs/calibration.md`.

mod inputs;
mod kept;
mod moments;
mod overlap;
mod solve;
mod text;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use serde::{Deserialize, Serialize};

pub use inputs::{Collector, Input, InputKey, Inputs};
pub use moments::{CONTENTS, Contents, InputRow, Moments};
pub use overlap::{NGRAMS, Ngrams, Overlap};
pub use text::{Rows, rows};

use crate::arch::Role;
use crate::artifact::open::file_digest;
use crate::artifact::provenance::{CalibrationRecord, CalibrationText, WeighedRecord};
use crate::backend::Precision;
use crate::backend::cpu::Cpu;
use crate::digest::Digest;
use crate::failure::{Exit, Failure, Outcome};
use crate::fold::{FoldError, Folded, Planned, Watch, fold};
use crate::plan::{CalibratedFrom, CalibrationPlan, LayerTime, Module, Note, NoteKind, Plan};
use crate::process::PeakMemory;
use crate::quant::{LDLQ, weighs};
use crate::recipe::Activations;
use crate::runtime::{Residual, Stream, Weights};

/// Why nothing could be weighed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CalibError {
    #[error("{text} gives {found} rows of up to {context} tokens, but the recipe asks for {needed}")]
    ShortText { text: String, found: usize, needed: usize, context: usize },
    #[error("rows of {found} tokens are longer than the model's context of {most}")]
    Context { found: usize, most: usize },
    #[error("an input of `{module}` is NaN or infinite")]
    NonFinite { module: String },
    #[error("`{path}` is no file of second moments: {problem}")]
    NotMoments { path: PathBuf, problem: String },
    #[error("`{path}` is of another {what}: {found}, where this plan needs {needed}")]
    OtherMoments { path: PathBuf, what: &'static str, found: String, needed: String },
    #[error("`{path}` holds no second moments of what goes into `{module}`")]
    NoMoments { path: PathBuf, module: String },
    #[error("second moments of `sequential` activations belong to one build, and are not kept")]
    Sequential,
    #[error("cannot {what} `{path}`: {source}")]
    Io { what: &'static str, path: PathBuf, source: io::Error },
}

/// For `map_err`.
fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CalibError {
    let path = path.to_owned();
    move |source| CalibError::Io { what, path, source }
}

impl Failure for CalibError {
    fn exit(&self) -> Exit {
        match self {
            CalibError::ShortText { .. }
            | CalibError::Context { .. }
            | CalibError::OtherMoments { .. }
            | CalibError::NoMoments { .. }
            | CalibError::Sequential => Exit::Request,
            CalibError::NonFinite { .. } | CalibError::NotMoments { .. } => Exit::Input,
            CalibError::Io { .. } => Exit::Machine,
        }
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            CalibError::ShortText { found, .. } => format!(
                "write `rows = {found}` or less under `[calibration]`, shorten `context` if `packing` is `joined`, or \
                 name a longer text"
            ),
            CalibError::Context { most, .. } => format!("write `context = {most}` or less under `[calibration]`"),
            CalibError::NonFinite { .. } => {
                "the weights before it are damaged or far out of range: take the checkpoint from its origin again"
                    .to_owned()
            }
            CalibError::NotMoments { .. } => {
                "`tqc calibrate` writes such files; `docs/formats/hessians.md` says what they hold".to_owned()
            }
            CalibError::OtherMoments { .. } => {
                "make them with `tqc calibrate` and this recipe, or leave `hessians` out".to_owned()
            }
            CalibError::NoMoments { .. } => {
                "give the module another encoder in a `[[rule]]`, or make the file with `tqc calibrate`".to_owned()
            }
            CalibError::Sequential => "leave `activations` out".to_owned(),
            CalibError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                "free some space, then run the same command again; a build goes on with `--resume`".to_owned()
            }
            CalibError::Io { what: "read", .. } => "name a file that is there and may be read".to_owned(),
            CalibError::Io { .. } => {
                "check that the folder may be written, then run the same command again; a build goes on with `--resume`"
                    .to_owned()
            }
        })
    }
}

/// The file of rows that were kept.
const ROWS: &str = "rows-kept";

/// Rows of the head's input that are summed at a time.
const HEAD_ROWS: usize = 512;

/// A calibration that ends after its first layers, and what each of them took.
#[derive(Debug)]
pub struct Slice {
    layers: usize,
    ended: Mutex<Option<(Vec<LayerTime>, Vec<Note>)>>,
    peak: Mutex<PeakMemory>,
}

impl Slice {
    /// Ends after so many layers.
    pub fn new(layers: usize) -> Self {
        Self { layers, ended: Mutex::default(), peak: Mutex::default() }
    }

    /// After how many layers it ends.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Notes what the process held meanwhile.
    pub fn held(&self, peak: PeakMemory) {
        *self.peak.lock().expect("a number is only stored") = peak;
    }

    /// What was noted.
    pub fn peak(&self) -> PeakMemory {
        *self.peak.lock().expect("a number is only stored")
    }

    fn end(&self, times: Vec<LayerTime>, notes: Vec<Note>) -> FoldError {
        *self.ended.lock().expect("a time is only stored") = Some((times, notes));
        FoldError::Interrupted
    }

    /// Layers all of whose codes were looked for, if it has come to its end: those of which an earlier build had found some
    /// are not among them. And notes of all codes that there are now.
    pub fn ended(&self) -> Option<(Vec<LayerTime>, Vec<Note>)> {
        self.ended.lock().expect("a time is only stored").clone()
    }
}

/// Makes the plan's changes of basis, as [`fold`] does, and finds the codes of modules whose encoder weighs errors.
///
/// # Errors
/// Those of [`fold`]; [`CalibError`]; those of the runtime and of the module's weights. [`FoldError::Interrupted`] at the
/// end of a `slice`, with everything kept for a build that goes on.
pub fn fold_and_solve(plan: &Arc<Plan>, slice: Option<&Slice>, watch: Watch<'_>) -> Outcome<Folded> {
    let mut folded = fold(plan, watch)?;
    if let Some(calibration) = &plan.calibration {
        let mut calibration = Calibration::new(plan, calibration, &mut folded, watch);
        calibration.slice = slice;
        let (record, notes) = calibration.run()?;
        folded.calibration = Some(record);
        folded.notes.extend(notes);
    }
    Ok(folded)
}

/// One pass over the layers.
struct Calibration<'a> {
    plan: &'a Arc<Plan>,
    from: &'a CalibrationPlan,
    folded: &'a mut Folded,
    watch: Watch<'a>,
    cpu: Arc<Cpu>,
    /// What was found, by module.
    records: BTreeMap<usize, WeighedRecord>,
    /// Second moments are written here, and no codes looked for.
    export: Option<Export<'a>>,
    /// Where to end.
    slice: Option<&'a Slice>,
}

/// Second moments on their way into files.
struct Export<'a> {
    out: &'a Path,
    /// Modules whose inputs are written.
    done: BTreeSet<usize>,
    rows: Vec<InputRow>,
    files: BTreeMap<String, Digest>,
}

/// What is kept of a layer whose second moments are written.
#[derive(Serialize, Deserialize)]
struct ExportNote {
    modules: Vec<usize>,
    rows: Vec<InputRow>,
    file: String,
    sha256: Digest,
}

/// Rows that were kept after so many layers.
#[derive(Serialize, Deserialize)]
struct RowsNote {
    layer: usize,
}

impl<'a> Calibration<'a> {
    fn new(plan: &'a Arc<Plan>, from: &'a CalibrationPlan, folded: &'a mut Folded, watch: Watch<'a>) -> Self {
        let cpu = Cpu::new(plan.isa, plan.threads, Precision::Exact);
        Self { plan, from, folded, watch, cpu, records: BTreeMap::new(), export: None, slice: None }
    }

    fn run(mut self) -> Outcome<(CalibrationRecord, Vec<Note>)> {
        self.recall_modules();
        let text = match self.from.from {
            CalibratedFrom::Text => Some(self.on_text()?),
            CalibratedFrom::Hessians => {
                self.on_file()?;
                None
            }
        };
        let mut notes = self.notes();
        if let Some(short) = text.as_ref().map(|text| text.short).filter(|short| *short > 0) {
            notes.push(Note {
                kind: NoteKind::ShortDocuments,
                subject: self.from.name.clone(),
                detail: format!("has {short} documents of fewer than two tokens, which are left out"),
            });
        }
        let (recipe, records) = (&self.plan.recipe, self.records);
        let record = CalibrationRecord {
            from: self.from.from.name().to_owned(),
            name: self.from.name.clone(),
            sha256: self.from.sha256,
            text,
            activations: recipe.calibration.activations.name().to_owned(),
            few_tokens: recipe.calibration.few_tokens.name().to_owned(),
            expert_tokens: recipe.calibration.expert_tokens.into(),
            damping: recipe.gptq.damping,
            act_order: recipe.gptq.act_order,
            sweeps: recipe.gptq.sweeps,
            modules: records.into_values().collect(),
        };
        Ok((record, notes))
    }

    /// Of what was found.
    fn notes(&self) -> Vec<Note> {
        let damping = self.plan.recipe.gptq.damping;
        self.records.values().flat_map(|record| notes(record, damping)).collect()
    }

    /// Modules to find codes for, or whose inputs to write.
    fn wanted(&self) -> impl Iterator<Item = (usize, &'a Module)> + use<'a> {
        let (modules, export) = (self.plan.modules.iter().enumerate(), self.export.is_some());
        modules.filter(move |(_, module)| match export {
            true => module.assignment.codec.quantizes() && module.computes,
            false => weighs(module.assignment.encoder),
        })
    }

    /// Those of them that are not done yet and whose path starts with `prefix`.
    fn open(&self, prefix: &str) -> Vec<(usize, &'a Module)> {
        let done = |index: &usize| match &self.export {
            Some(export) => export.done.contains(index),
            None => self.records.contains_key(index),
        };
        let open = self.wanted().filter(|(index, _)| !done(index));
        open.filter(|(_, module)| module.output.rule_path().starts_with(prefix)).collect()
    }

    /// Finds the codes of modules whose inputs were summed, or writes these.
    fn take(&mut self, name: &str, modules: &[(usize, &Module)], inputs: &Inputs) -> Outcome<()> {
        match modules.is_empty() {
            true => Ok(()),
            false if self.export.is_some() => Ok(self.write(name, modules, inputs)?),
            false => self.solve(modules, inputs),
        }
    }

    /// Writes the second moments of one layer.
    fn write(&mut self, name: &str, modules: &[(usize, &Module)], inputs: &Inputs) -> Result<(), CalibError> {
        let export = self.export.as_mut().expect("asked before");
        let file = format!("hessians-{name}.safetensors");
        let (rows, sha256) = moments::write(export.out, &file, inputs)?;
        let modules = modules.iter().map(|(index, _)| *index).collect();
        let note = ExportNote { modules, rows, file, sha256 };
        if let Some(path) = self.watch.keep.place(&format!("moments-{name}")) {
            kept::write(&path, &note, &[]).map_err(io("write", &path))?;
        }
        export.add(note);
        Ok(())
    }

    /// Takes over the second moments that an earlier run wrote.
    fn recall_moments(&mut self, layers: usize) {
        let Some(export) = &mut self.export else { return };
        for name in (0..layers).map(layer_name).chain(["head".to_owned()]) {
            let path = self.watch.keep.find(&format!("moments-{name}"));
            let note: Option<(ExportNote, _, _)> = path.and_then(|path| kept::open(&path));
            if let Some((note, ..)) = note
                && file_digest(&export.out.join(&note.file)).is_ok_and(|found| found == note.sha256)
            {
                export.add(note);
            }
        }
    }

    /// Takes over the codes that an earlier build kept.
    fn recall_modules(&mut self) {
        for (index, _) in self.wanted() {
            let kept = self.watch.keep.find(&kept_name(index)).and_then(|path| solve::recall(&path));
            if let Some((solved, record)) = kept {
                self.folded.prepared.solve(index, solved);
                self.records.insert(index, record);
            }
        }
    }

    /// Finds the codes of modules whose inputs were summed.
    fn solve(&mut self, modules: &[(usize, &Module)], inputs: &Inputs) -> Outcome<()> {
        for (index, module) in modules {
            self.watch.check()?;
            (self.watch.tell)(&format!("weighing errors of {}", module.output.module));
            let path = self.watch.keep.place(&kept_name(*index));
            let prepared = &self.folded.prepared;
            let (solved, record) =
                solve::module(self.plan, prepared, *index, inputs, &self.cpu, path.as_deref())?;
            self.folded.prepared.solve(*index, solved);
            self.records.insert(*index, record);
        }
        Ok(())
    }

    /// A residual stream of so many values, in a file if they are many and there is a place.
    fn residual(&self, name: &str, values: usize) -> Result<Residual, CalibError> {
        match self.watch.keep.place(name).filter(|_| 4 * values as u64 > self.plan.rows.in_memory.0) {
            Some(path) => Residual::in_file(&path, values).map_err(io("create", &path)),
            None => Ok(Residual::in_memory(values)),
        }
    }

    /// Finds codes under the second moments of a file.
    fn on_file(&mut self) -> Outcome<()> {
        let path = self.from.path.clone().expect("a file has a path");
        let moments = Moments::open(&path, self.plan)?;
        for (index, module) in self.open("") {
            let name = module.output.rule_path();
            let experts = (module.output.role == Role::Experts).then(|| module.output.shape.0[0] as usize);
            let mut inputs = moments.inputs(&path, &name, module.work.row_elements, experts)?;
            if module.assignment.encoder == LDLQ {
                let channels = module.rows as usize / experts.unwrap_or(1);
                moments.outputs(&path, &name, channels, experts, &mut inputs)?;
            }
            self.solve(&[(index, module)], &inputs)?;
        }
        Ok(())
    }

    /// Takes the rows through the layers.
    fn on_text(&mut self) -> Outcome<CalibrationText> {
        let plan = self.plan;
        // Values of a fold are nowhere in the source; without one, the source's own are read where they lie.
        let weights = match &plan.fold {
            None => Weights::open_keeping(&plan.source.dir, &|name| plan.recipe.keeps(name))?,
            Some(_) => {
                let unrounded = Arc::new(plan.unrounded()?);
                Planned::open(&unrounded, &Arc::new(self.folded.prepared.on(&unrounded)))?
            }
        };
        let rows = rows(plan, weights.decoder.context, weights.decoder.vocab)?;
        let wanted = &plan.recipe.calibration;
        let record = CalibrationText {
            tokens_sha256: rows.digest(),
            rows: rows.rows.len() as u64,
            tokens: rows.tokens() as u64,
            context: wanted.context.into(),
            packing: wanted.packing.name().to_owned(),
            seed: wanted.seed.unwrap_or(plan.recipe.seed),
            cut: rows.cut as u64,
            short: rows.short as u64,
        };
        if self.export.is_none() {
            self.folded.ngrams = Some(Ngrams::of(&rows.rows).to_bytes());
        }
        self.recall_moments(weights.decoder.layers.len());
        // Where everything was kept, no row is needed.
        match (self.open("").is_empty(), self.slice) {
            (false, _) => self.through_layers(&weights, &rows)?,
            (true, Some(slice)) => return Err(slice.end(Vec::new(), self.notes()).into()),
            (true, None) => {}
        }
        Ok(record)
    }

    fn through_layers(&mut self, weights: &Weights, rows: &Rows) -> Outcome<()> {
        let (plan, decoder) = (self.plan, &weights.decoder);
        let layers = decoder.layers.len();
        let prefix = |layer: usize| format!("{}.layers.{layer}.", decoder.root);
        let values = rows.tokens() * decoder.hidden;
        let sequential = plan.recipe.calibration.activations == Activations::Sequential;
        let first_open = (0..layers).find(|layer| !self.open(&prefix(*layer)).is_empty()).unwrap_or(layers);
        let mut stream = match self.kept_rows(first_open, values)? {
            Some((layer, x)) => Stream::after(weights, self.cpu.clone(), &rows.rows, layer, x),
            None => self.embedded(weights, rows, values, sequential)?,
        };
        let mut kept = Instant::now();
        let mut times = Vec::new();
        while stream.layer() < layers {
            let layer = stream.layer();
            if let Some(slice) = self.slice.filter(|slice| layer >= slice.layers) {
                self.keep_rows(&stream)?;
                return Err(slice.end(times, self.notes()).into());
            }
            (self.watch.tell)(&format!("calibrating layer {} of {layers}", layer + 1));
            self.watch.check()?;
            let before = match sequential {
                true => {
                    let mut before = self.residual("before", values)?;
                    before.copy_from_slice(stream.residual());
                    Some(before)
                }
                false => None,
            };
            let open = self.open(&prefix(layer));
            let widths = open.iter().map(|(_, m)| (m.output.module.clone(), m.work.row_elements)).collect();
            let cpu = self.cpu.clone();
            let mut collector = Collector::new(&cpu, &widths);
            let begun = Instant::now();
            stream.step(&mut collector)?;
            let inputs = collector.finish()?;
            let passed = begun.elapsed();
            self.take(&layer_name(layer), &open, &inputs)?;
            let search_s = (begun.elapsed() - passed).as_secs_f64();
            let begun = Instant::now();
            if let Some(before) = before {
                let stored = self.stored()?;
                let mut again = Stream::after(&stored, self.cpu.clone(), &rows.rows, layer, before);
                again.step(&mut ())?;
                stream.resume(layer + 1, again.into_residual());
            }
            // What is left of a layer says nothing of the whole.
            let all = self.wanted().filter(|(_, m)| m.output.rule_path().starts_with(&prefix(layer))).count();
            if !open.is_empty() && open.len() == all {
                let pass_s = (passed + begun.elapsed()).as_secs_f64();
                times.push(LayerTime { layer: Some(layer), pass_s, search_s });
            }
            if kept.elapsed() >= self.plan.rows.keep_every {
                self.keep_rows(&stream)?;
                kept = Instant::now();
            }
        }
        let head = self.open("");
        if let Some((_, module)) = head.first() {
            let mut input = Input::new(decoder.hidden);
            for start in (0..rows.tokens()).step_by(HEAD_ROWS) {
                let hidden = stream.final_hidden_of(start..(start + HEAD_ROWS).min(rows.tokens()))?;
                input.add(&hidden, &self.cpu);
            }
            let path = module.output.module.clone();
            if !input.hessian.is_finite() {
                return Err(CalibError::NonFinite { module: path }.into());
            }
            self.take("head", &head, &Inputs::of(&path, input))?;
        }
        // Nothing is left that a row could be needed for.
        if let Some(path) = self.watch.keep.find(ROWS) {
            std::fs::remove_file(&path).map_err(io("remove", &path))?;
        }
        Ok(())
    }

    /// The model as it will be stored, as far as codes are found.
    fn stored(&self) -> Outcome<Weights> {
        Planned::open(self.plan, &Arc::new(self.folded.prepared.clone()))
    }

    /// The rows' embeddings.
    fn embedded<'w>(
        &self,
        weights: &'w Weights,
        rows: &Rows,
        values: usize,
        sequential: bool,
    ) -> Outcome<Stream<'w>> {
        let x = self.residual("rows", values)?;
        if !sequential {
            return Ok(Stream::keeping(weights, self.cpu.clone(), &rows.rows, x)?);
        }
        let stored = self.stored()?;
        let x = Stream::keeping(&stored, self.cpu.clone(), &rows.rows, x)?.into_residual();
        Ok(Stream::after(weights, self.cpu.clone(), &rows.rows, 0, x))
    }

    /// Keeps the rows, for a build that is killed after this.
    fn keep_rows(&self, stream: &Stream<'_>) -> Result<(), CalibError> {
        let Some(path) = self.watch.keep.place(ROWS) else { return Ok(()) };
        let note = RowsNote { layer: stream.layer() };
        kept::write_values(&path, &note, stream.residual()).map_err(io("write", &path))
    }

    /// Rows that were kept after `most` layers or before, and the number of these layers.
    fn kept_rows(&self, most: usize, values: usize) -> Result<Option<(usize, Residual)>, CalibError> {
        let Some(path) = self.watch.keep.find(ROWS) else { return Ok(None) };
        let Some((RowsNote { layer }, file, start)) = kept::open(&path) else { return Ok(None) };
        let mut x = self.residual("rows", values)?;
        let read = layer <= most && kept::read_values(&file, start, &mut x).is_ok();
        Ok(read.then_some((layer, x)))
    }
}

impl Export<'_> {
    fn add(&mut self, note: ExportNote) {
        self.done.extend(note.modules);
        self.rows.extend(note.rows);
        self.files.insert(note.file, note.sha256);
    }
}

/// Writes the second moments of everything that the trunk computes with into the folder `out`, for later builds.
///
/// # Errors
/// As [`fold_and_solve`]; [`CalibError::Sequential`].
pub fn export(plan: &Arc<Plan>, out: &Path, watch: Watch<'_>) -> Outcome<CalibrationText> {
    if plan.recipe.calibration.activations == Activations::Sequential {
        return Err(CalibError::Sequential.into());
    }
    let from = plan.calibrated_text()?;
    let mut folded = fold(plan, watch)?;
    let mut calibration = Calibration::new(plan, &from, &mut folded, watch);
    let (done, rows, files) = Default::default();
    calibration.export = Some(Export { out, done, rows, files });
    let text = calibration.on_text()?;
    let export = calibration.export.expect("set above");
    moments::write_contents(out, plan, text.clone(), export.rows, export.files)?;
    Ok(text)
}

fn layer_name(layer: usize) -> String {
    format!("{layer:03}")
}

/// The file of a module's codes.
fn kept_name(module: usize) -> String {
    format!("codes-{module}")
}

/// What a person should know of one module.
fn notes(record: &WeighedRecord, first: f64) -> Vec<Note> {
    let mut notes = Vec::new();
    let mut note = |kind, detail| notes.push(Note { kind, subject: record.module.clone(), detail });
    let of = |count: u64| match record.experts.len() {
        0 => "its matrix".to_owned(),
        experts => format!("{count} of {experts} experts"),
    };
    let few = record.experts.iter().filter(|expert| expert.few).count() as u64;
    if few > 0 {
        note(NoteKind::FewTokens, format!("saw too few tokens in {}", of(few)));
    }
    if record.fallbacks > 0 {
        let why: Vec<String> = record.refused.iter().map(|(why, count)| format!("{why} ({count})")).collect();
        let why = match why.is_empty() {
            true => "no token was seen, or what came in was all zero".to_owned(),
            false => format!("refused: {}", why.join(", ")),
        };
        note(NoteKind::Nearest, format!("rounds {} to nearest; {why}", of(record.fallbacks)));
    }
    if record.damping.is_some_and(|damping| damping > first) {
        let damping = record.damping.unwrap_or_default();
        note(NoteKind::Damped, format!("needed a damping of {damping} instead of {first}"));
    }
    notes
}
