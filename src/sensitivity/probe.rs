//! Probes on their way through the layers, wave after wave.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use super::{Asking, MOST_PROBES, SensitivityError, Task};
use crate::backend::cpu::Cpu;
use crate::codec::CodecSpec;
use crate::digest::canonical_json;
use crate::eval::EvalError;
use crate::eval::work::{DONE, Work};
use crate::failure::Outcome;
use crate::fold::{KeepFolder, OfPlan, Planned, Watch, fold};
use crate::numeric::divergence::divergence;
use crate::plan::{Plan, layer_of};
use crate::runtime::{Head, Ops, RuntimeError, Stream, Weights};
use crate::stats::{CONFIDENCE, clustered_mean, in_clusters};
use crate::units::Bytes;

/// Bytes of logits that are worked on at a time, and most rows: more make no kernel faster.
const LOGITS: usize = 64 << 20;
const MOST_ROWS: usize = 128;

/// Folder in that of unfinished work for rotations that were searched.
const FOUND: &str = "found";

/// A probe's answer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Score {
    pub kl: f64,
    pub standard_error: Option<f64>,
}

/// Probes that are done.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Done {
    /// KL of the unrounded model in its new basis.
    pub base_kl: Option<f64>,
    /// By module, then by codec.
    pub scores: BTreeMap<String, BTreeMap<String, Score>>,
}

impl Done {
    /// How many.
    pub fn probes(&self) -> usize {
        self.scores.values().map(BTreeMap::len).sum()
    }

    fn has(&self, probe: &Probe) -> bool {
        self.scores.get(&probe.path).is_some_and(|scores| scores.contains_key(&probe.codec.to_string()))
    }
}

/// Where a module computes; in the order of a pass.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// Before the first layer, and after the last if `tied`.
    Embedding { tied: bool },
    /// In this layer, by its path below it.
    Layer(usize, String),
    /// After the last layer.
    Head,
}

/// One module in one codec.
#[derive(Debug, Clone)]
struct Probe {
    place: Place,
    path: String,
    codec: CodecSpec,
    /// Number of the codec among the candidates.
    trial: usize,
}

impl Probe {
    /// The layers that it goes through.
    fn layers(&self, all: usize) -> usize {
        match &self.place {
            Place::Embedding { .. } => all,
            Place::Layer(layer, _) => all - layer,
            Place::Head => 0,
        }
    }

    fn has_own_head(&self) -> bool {
        matches!(self.place, Place::Head | Place::Embedding { tied: true })
    }
}

/// Who measures.
pub(super) struct Prober<'a> {
    pub task: &'a Task,
    pub cpu: &'a Arc<Cpu>,
    pub asking: &'a Asking<'a>,
    pub work: &'a Work,
}

/// The models of a measurement.
struct Models<'a> {
    /// The source.
    source: &'a Weights,
    /// The unrounded model in its new basis; none if the basis is the source's.
    folded: Option<Weights>,
    /// Every module in each candidate.
    trials: Vec<Weights>,
    tokens: Vec<Vec<u32>>,
    /// The source's residual stream after its last layer, if that is not the probes' own.
    teacher: Option<Vec<f32>>,
}

impl Models<'_> {
    /// The unrounded model that probes leave.
    fn clean(&self) -> &Weights {
        self.folded.as_ref().unwrap_or(self.source)
    }
}

/// How far all waves are: passes of a batch through a layer.
struct Passes {
    done: u64,
    total: u64,
}

impl Prober<'_> {
    /// Measures what is not in `done`; gives the number of waves that took.
    pub fn run(&self, done: &mut Done) -> Outcome<usize> {
        let mut probes = self.probes();
        probes.retain(|probe| !done.has(probe));
        if probes.is_empty() {
            return Ok(0);
        }
        let waves: Vec<&[Probe]> = probes.chunks(self.most_together()?).collect();
        let layers = self.task.source.decoder.layers.len();
        let mut models = self.models()?;
        let of_wave = |wave: &&[Probe]| layers + wave.iter().map(|p| p.layers(layers)).sum::<usize>();
        let folded = if models.folded.is_some() { layers } else { 0 };
        let total = (folded + waves.iter().map(of_wave).sum::<usize>()) as u64;
        let mut passes = Passes { done: 0, total };
        if models.folded.is_some() {
            models.teacher = Some(self.teacher(&models, &mut passes)?);
        }
        for (number, wave) in waves.iter().enumerate() {
            let name = format!("wave {} of {}", number + 1, waves.len());
            let streams = self.walk(&models, wave, &name, &mut passes)?;
            (self.asking.tell)(&format!("{name}: comparing logits"));
            self.score(&models, wave, &streams, done)?;
            self.work.write(DONE, &canonical_json(done))?;
        }
        Ok(waves.len())
    }

    /// Every module in every candidate, in the order of a pass.
    fn probes(&self) -> Vec<Probe> {
        let decoder = &self.task.source.decoder;
        let layers = format!("{}.layers.", decoder.root);
        let tied = self.task.plan.model.tied;
        let mut probes = Vec::new();
        for index in &self.task.modules {
            let path = self.task.plan.modules[*index].output.rule_path();
            let below = path.strip_prefix(&layers).and_then(|rest| rest.split_once('.'));
            let place = match below.and_then(|(layer, name)| Some((layer.parse().ok()?, name))) {
                Some((layer, name)) => Place::Layer(layer, name.to_owned()),
                None if path == format!("{}.embed_tokens", decoder.root) => Place::Embedding { tied },
                None => Place::Head,
            };
            let candidates = self.task.candidates(*index);
            probes.extend(candidates.map(|(trial, codec, _)| Probe {
                place: place.clone(),
                path: path.clone(),
                codec,
                trial,
            }));
        }
        probes.sort_by(|a, b| (&a.place, a.trial).cmp(&(&b.place, b.trial)));
        probes
    }

    /// Probes that fit in memory beside what a walk holds anyway.
    fn most_together(&self) -> Result<usize, SensitivityError> {
        let (task, budget) = (self.task, self.asking.budget);
        let (source, positions) = (&task.source, task.positions());
        let each = positions as u64 * Stream::bytes_per_token(source).0;
        let logits = 4 * (self.rows_of_logits().min(positions) * source.decoder.vocab) as u64;
        // A module's codes in every candidate: those of the head are there together.
        let of_module =
            |index: &usize| task.trials.iter().map(|(_, plan)| plan.modules[*index].bytes()).sum();
        let codes: u64 = task.modules.iter().map(of_module).max().unwrap_or(0);
        // Source and clean stream, and one on its way through a layer.
        let mut needed = 3 * each + Stream::bytes_inside(source, positions).0 + 2 * logits + codes;
        if task.plan.fold.is_some() {
            needed += made_bytes(&task.plan);
        }
        match usize::try_from(budget.0.saturating_sub(needed) / each).unwrap_or(usize::MAX) {
            0 => Err(SensitivityError::Budget { budget, needed: Bytes(needed + each), positions }),
            most => Ok(most.min(MOST_PROBES)),
        }
    }

    fn rows_of_logits(&self) -> usize {
        (LOGITS / (4 * self.task.source.decoder.vocab)).clamp(1, MOST_ROWS)
    }

    fn models(&self) -> Outcome<Models<'_>> {
        let task = self.task;
        let keep = KeepFolder(self.work.path(FOUND));
        let keep = OfPlan::new(&keep, &task.plan, ());
        let prepared =
            fold(&task.plan, Watch { stop: self.asking.stop, tell: self.asking.tell, keep: &keep });
        let prepared = prepared?.prepared;
        let open = |plan: &Arc<Plan>| Planned::open(plan, &Arc::new(prepared.on(plan)));
        let folded = match task.plan.fold {
            Some(_) => Some(open(&Arc::new(task.plan.unrounded()?))?),
            None => None,
        };
        let trials = task.trials.iter().map(|(_, plan)| open(plan)).collect::<Outcome<_>>()?;
        let tokens = task.sequences.iter().map(|sequence| sequence.tokens.clone()).collect();
        Ok(Models { source: &task.source, folded, trials, tokens, teacher: None })
    }

    /// A step is about to be taken.
    fn at(&self, passes: &mut Passes, what: &dyn Fn() -> String) -> Result<(), EvalError> {
        if self.asking.stop.load(Ordering::Relaxed) {
            return Err(EvalError::Interrupted(what()));
        }
        self.asking.progress.at(passes.done, passes.total, "passes");
        passes.done += 1;
        Ok(())
    }

    /// The source's residual stream after its last layer.
    fn teacher(&self, models: &Models<'_>, passes: &mut Passes) -> Outcome<Vec<f32>> {
        let mut stream = Stream::new(models.source, self.cpu.clone(), &models.tokens)?;
        let layers = models.source.decoder.layers.len();
        while stream.layer() < layers {
            let what = format!("the source, layer {} of {layers}", stream.layer() + 1);
            (self.asking.tell)(&what);
            self.at(passes, &|| what.clone())?;
            stream.step(&mut ())?;
        }
        Ok(stream.residual().to_vec())
    }

    /// Takes a wave through all layers: the clean stream, and each probe's, after the last one.
    fn walk<'m>(
        &self,
        models: &'m Models<'_>,
        wave: &[Probe],
        name: &str,
        passes: &mut Passes,
    ) -> Outcome<(Stream<'m>, Vec<Stream<'m>>)> {
        let cpu = self.cpu;
        let mut clean = Stream::new(models.clean(), cpu.clone(), &models.tokens)?;
        let layers = models.source.decoder.layers.len();
        let mut streams: Vec<Stream<'m>> = Vec::with_capacity(wave.len());
        let mut waiting = wave.iter().peekable();
        while let Some(probe) = waiting.next_if(|probe| matches!(probe.place, Place::Embedding { .. })) {
            streams.push(Stream::new(&models.trials[probe.trial], cpu.clone(), &models.tokens)?);
        }
        for number in 0..layers {
            let what = || format!("{name}, layer {} of {layers}", number + 1);
            (self.asking.tell)(&format!("{}, {} probes", what(), wave.len()));
            let mut layer = clean.open_next()?;
            for stream in &mut streams {
                self.at(passes, &what)?;
                stream.step_through(&layer, &mut ());
            }
            let here = |probe: &&Probe| matches!(&probe.place, Place::Layer(layer, _) if *layer == number);
            while let Some(probe) = waiting.next_if(here) {
                let Place::Layer(_, module) = &probe.place else { unreachable!("just asked") };
                self.at(passes, &what)?;
                let trial = &models.trials[probe.trial];
                let mut ops = Ops::open(trial, cpu, &probe.path)?;
                layer.exchange(module, &mut ops)?;
                let mut stream = clean.fork();
                stream.step_through(&layer, &mut ());
                layer.exchange(module, &mut ops)?;
                drop(ops);
                trial.release(&format!("{}.", probe.path));
                streams.push(stream);
            }
            self.at(passes, &what)?;
            clean.step_through(&layer, &mut ());
            drop(layer);
            clean.release_last();
        }
        // What is left speaks only after the last layer.
        streams.extend(waiting.map(|_| clean.fork()));
        self.asking.progress.at(passes.done, passes.total, "passes");
        Ok((clean, streams))
    }

    /// Adds the scores of a wave to `done`.
    fn score(
        &self,
        models: &Models<'_>,
        wave: &[Probe],
        (clean, streams): &(Stream<'_>, Vec<Stream<'_>>),
        done: &mut Done,
    ) -> Outcome<()> {
        let (cpu, width, vocab) = (self.cpu, models.source.decoder.hidden, models.source.decoder.vocab);
        let source_head = Head::open(models.source, cpu)?;
        let folded_head = models.folded.as_ref().map(|folded| Head::open(folded, cpu)).transpose()?;
        let clean_head = folded_head.as_ref().unwrap_or(&source_head);
        let own_heads = wave.iter().map(|probe| match probe.has_own_head() {
            true => Ok(Some(Head::of_matrix(&models.trials[probe.trial].head()?, cpu))),
            false => Ok(None),
        });
        let own_heads = own_heads.collect::<Result<Vec<_>, RuntimeError>>()?;
        let teacher = models.teacher.as_deref().unwrap_or(clean.residual());
        let rows_in_all = teacher.len() / width;
        let mut base = Vec::new();
        let mut kls: Vec<Vec<f64>> = vec![Vec::with_capacity(rows_in_all); wave.len()];
        for start in (0..rows_in_all).step_by(self.rows_of_logits()) {
            if self.asking.stop.load(Ordering::Relaxed) {
                return Err(EvalError::Interrupted("comparing logits".to_owned()).into());
            }
            let rows = start..(start + self.rows_of_logits()).min(rows_in_all);
            let logits = source_head.logits_of(teacher, rows.clone());
            if let Some(bad) = logits.iter().position(|logit| !logit.is_finite()) {
                let overflow = RuntimeError::Overflow { token: start + bad / vocab };
                return Err(models.source.non_finite().unwrap_or(overflow).into());
            }
            if models.folded.is_some() && done.base_kl.is_none() {
                let folded = clean_head.logits_of(clean.residual(), rows.clone());
                let apart = self.apart(&logits, &folded, vocab);
                let bad = |row| SensitivityError::BaseNonFinite { position: start + row };
                base.extend(apart.map_err(bad)?);
            }
            for (((probe, stream), own), kls) in wave.iter().zip(streams).zip(&own_heads).zip(&mut kls) {
                let hidden = clean_head.norm(&stream.residual()[of(&rows, width)]);
                let probed = own.as_ref().unwrap_or(clean_head).logits(&hidden);
                let apart = self.apart(&logits, &probed, vocab);
                kls.extend(apart.map_err(|row| SensitivityError::NonFinite {
                    module: probe.path.clone(),
                    codec: probe.codec,
                    position: start + row,
                })?);
            }
        }
        drop(own_heads);
        models.trials.iter().for_each(|trial| trial.release(&format!("{}.", trial.head_path())));
        if !base.is_empty() {
            done.base_kl = Some(self.mean(&base).kl);
        }
        for (probe, kls) in wave.iter().zip(&kls) {
            let scores = done.scores.entry(probe.path.clone()).or_default();
            scores.insert(probe.codec.to_string(), self.mean(kls));
        }
        Ok(())
    }

    /// KL of each row of logits [rows, V] from the teacher's, which are finite; or the first row that is not.
    fn apart(&self, teacher: &[f32], student: &[f32], vocab: usize) -> Result<Vec<f64>, usize> {
        let isa = self.cpu.isa;
        let mut kls = vec![None; teacher.len() / vocab];
        self.cpu.threads.chunks(&mut kls, 1, &|i, kl| {
            let row = i * vocab..(i + 1) * vocab;
            kl[0] = divergence(&teacher[row.clone()], &student[row], isa).map(|apart| apart.kl);
        });
        kls.into_iter().enumerate().map(|(row, kl)| kl.ok_or(row)).collect()
    }

    /// The mean over all positions, with documents as clusters.
    fn mean(&self, kls: &[f64]) -> Score {
        let lengths = self.task.sequences.iter().map(|sequence| sequence.tokens.len());
        let mean = clustered_mean(&in_clusters(kls, lengths), CONFIDENCE).expect("a text has tokens");
        Score { kl: mean.mean, standard_error: mean.standard_error }
    }
}

/// The values of some rows.
fn of(rows: &Range<usize>, width: usize) -> Range<usize> {
    rows.start * width..rows.end * width
}

/// Bytes in f32 that are made at a time in a new basis: a layer or the head, and the matrix under way once more.
fn made_bytes(plan: &Plan) -> u64 {
    let mut layers: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut largest, mut most) = (0, 0);
    for module in plan.modules.iter().filter(|module| module.output.role.in_trunk()) {
        let (path, bytes) = (module.output.module.as_str(), 4 * module.weights());
        let sum = layers.entry(layer_of(path).unwrap_or(path)).or_default();
        *sum += bytes;
        (largest, most) = (bytes.max(largest), most.max(*sum));
    }
    most + 2 * largest
}
