//! Divergences from one teacher's dump.

use std::collections::BTreeMap;

use serde_json::Value;

use super::distribution::Distribution;
use super::verdicts::{self, Verdicts};
use super::{Group, Model, count, described, frontier, interval, list, number, text};
use crate::eval::compare::DocumentKl;
use crate::eval::db::{Db, DbError, Document, Run};
use crate::stats::Interval;

/// Runs against the same dump, on the same path.
#[derive(Debug)]
pub struct KlGroup {
    /// Its letter on the page.
    pub letter: String,
    /// The dump.
    pub subject: String,
    /// The path.
    pub settings: String,
    /// The dump's noise floor, if the runs agree on it.
    pub noise_floor: Option<f64>,
    /// One for each model.
    pub entries: Vec<KlEntry>,
    /// Each model that is not at the noise floor against the one of these with the lowest divergence.
    pub verdicts: Option<Verdicts>,
}

/// A model's divergence.
#[derive(Debug)]
pub struct KlEntry {
    /// Position of the model.
    pub model: usize,
    /// What was printed.
    pub summary: Value,
    /// Mean KL, nats per token.
    pub mean: Option<f64>,
    /// Its 95 % interval.
    pub interval: Option<Interval>,
    /// The mean is less than twice the noise floor: as far as this dump can tell, there is no difference. Such a
    /// model is in no chart, where it would leave no room for the others.
    pub at_floor: bool,
    /// No other model has as few bits per weight and as low a KL.
    pub on_bits_frontier: bool,
    /// No other model has as few bytes and as low a KL.
    pub on_bytes_frontier: bool,
    /// After each layer, if that was measured.
    pub layers: Vec<Layer>,
    /// Over positions.
    pub distribution: Distribution,
}

/// The divergence after a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Layer {
    /// Layers done.
    pub layer: u64,
    /// Mean KL.
    pub mean: f64,
    /// Its standard error.
    pub error: Option<f64>,
}

impl KlGroup {
    pub(super) fn read(
        db: &Db,
        letter: String,
        group: &Group<'_>,
        models: &[Model],
    ) -> Result<Self, DbError> {
        let floors: Vec<Option<f64>> =
            group.iter().map(|(_, run)| number(&run.summary, "noise_floor")).collect();
        let noise_floor = floors[0].filter(|_| floors.iter().all(|floor| *floor == floors[0]));
        let (mut entries, mut by_document) = (Vec::new(), Vec::new());
        for (model, run) in group {
            let documents = db.documents(run.id)?;
            entries.push(KlEntry::new(*model, run, &documents, noise_floor.unwrap_or(0.0)));
            by_document.push(sums(&documents));
        }
        mark(&mut entries, models);
        let verdicts = compared(&entries, &by_document, models);
        let first = group[0].1;
        Ok(Self {
            letter,
            subject: described(&first.subject),
            settings: described(&first.settings),
            noise_floor,
            entries,
            verdicts,
        })
    }
}

impl KlEntry {
    fn new(model: usize, run: &Run, documents: &[Document], floor: f64) -> Self {
        let summary = run.summary.clone();
        let layer = |value: &Value| {
            let (layer, mean) = (count(value, "layer")?, number(value, "mean_kl")?);
            Some(Layer { layer, mean, error: number(value, "standard_error") })
        };
        Self {
            model,
            mean: number(&summary, "mean_kl"),
            interval: interval(&summary, "ci95"),
            at_floor: number(&summary, "mean_kl").is_some_and(|mean| mean <= 2.0 * floor),
            on_bits_frontier: false,
            on_bytes_frontier: false,
            layers: list(&summary, "layers").iter().filter_map(layer).collect(),
            distribution: Distribution::of(documents.iter().flat_map(|d| &d.positions), floor),
            summary,
        }
    }

    /// Mean KL by `by_position` or `by_confidence`: from, to, positions, mean, share.
    pub fn buckets(&self, key: &str) -> Vec<Bucket> {
        let bucket = |value: &Value| {
            let (from, to) = (number(value, "from")?, number(value, "to")?);
            let tokens = count(value, "tokens")?;
            Some(Bucket { from, to, tokens, mean: number(value, "mean_kl")?, share: number(value, "share") })
        };
        list(&self.summary, key).iter().filter_map(bucket).filter(|bucket| bucket.tokens > 0).collect()
    }

    /// The positions with the largest divergence, in context.
    pub fn worst(&self) -> Vec<Worst> {
        let worst = |value: &Value| {
            let pair = list(value, "teacher");
            Some(Worst {
                kl: number(value, "kl")?,
                line: count(value, "line"),
                position: count(value, "position"),
                context: text(value, "context"),
                next: text(value, "next"),
                teacher: pair.first().and_then(Value::as_str).map(str::to_owned),
                confidence: pair.get(1).and_then(Value::as_f64),
                candidate: text(value, "candidate"),
            })
        };
        list(&self.summary, "worst").iter().filter_map(worst).collect()
    }
}

/// Positions of one kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bucket {
    /// From here ...
    pub from: f64,
    /// ... to below here.
    pub to: f64,
    /// Positions.
    pub tokens: u64,
    /// Their mean KL.
    pub mean: f64,
    /// Part of the whole KL that they make.
    pub share: Option<f64>,
}

/// A position in its context.
#[derive(Debug, Clone)]
pub struct Worst {
    /// Its divergence.
    pub kl: f64,
    /// Line of its document in the text's file.
    pub line: Option<u64>,
    /// Position in its sequence.
    pub position: Option<u64>,
    /// The text before.
    pub context: Option<String>,
    /// The token that follows in the text.
    pub next: Option<String>,
    /// The teacher's likeliest token.
    pub teacher: Option<String>,
    /// Its probability.
    pub confidence: Option<f64>,
    /// The candidate's likeliest token.
    pub candidate: Option<String>,
}

/// Σ KL and number of positions of each document.
fn sums(documents: &[Document]) -> Vec<(String, DocumentKl)> {
    let mut sums: BTreeMap<usize, DocumentKl> = BTreeMap::new();
    for document in documents {
        let sum = sums.entry(document.document).or_insert(DocumentKl { sum: 0.0, tokens: 0 });
        for position in document.positions.iter().filter(|position| position.kl.is_finite()) {
            sum.sum += f64::from(position.kl);
            sum.tokens += 1;
        }
    }
    let held = sums.into_iter().filter(|(_, sum)| sum.tokens > 0);
    held.map(|(document, sum)| (document.to_string(), sum)).collect()
}

fn mark(entries: &mut [KlEntry], models: &[Model]) {
    let measured: Vec<usize> = (0..entries.len()).filter(|i| entries[*i].mean.is_some()).collect();
    let points = |size: &dyn Fn(&Model) -> f64| -> Vec<(f64, f64)> {
        let point = |i: &usize| (size(&models[entries[*i].model]), entries[*i].mean.unwrap_or(f64::MAX));
        measured.iter().map(point).collect()
    };
    let bits = frontier(&points(&|model| model.identity.bits_per_weight));
    let bytes = frontier(&points(&|model| model.identity.bytes as f64));
    for (at, i) in measured.iter().enumerate() {
        entries[*i].on_bits_frontier = bits[at];
        entries[*i].on_bytes_frontier = bytes[at];
    }
}

/// Verdicts against the lowest divergence; the teacher itself, which is at the noise floor, is no rival.
fn compared(
    entries: &[KlEntry],
    by_document: &[Vec<(String, DocumentKl)>],
    models: &[Model],
) -> Option<Verdicts> {
    let rivals = entries.iter().zip(by_document).filter(|(entry, _)| !entry.at_floor);
    let rivals: Vec<_> = rivals.filter(|(entry, _)| entry.mean.is_some()).collect();
    let mean = |at: usize| rivals[at].0.mean.unwrap_or(f64::INFINITY);
    let lowest = (0..rivals.len()).min_by(|a, b| mean(*a).total_cmp(&mean(*b)))?;
    let runs: Vec<(usize, &[(String, DocumentKl)])> =
        rivals.iter().map(|(entry, sums)| (entry.model, sums.as_slice())).collect();
    (runs.len() > 1).then(|| verdicts::kl(models, &runs, lowest))
}
