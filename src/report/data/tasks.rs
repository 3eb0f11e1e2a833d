//! What models can still do.

use std::collections::BTreeMap;

use serde_json::Value;

use super::verdicts::{self, Verdicts};
use super::{Group, Model, count, described, frontier, interval, list, number, text};
use crate::eval::db::{Db, DbError, Item};
use crate::stats::{CONFIDENCE, Interval, wilson};

/// One suite in one frame, with the same settings.
#[derive(Debug)]
pub struct TaskGroup {
    /// The suite.
    pub suite: String,
    /// `choice`, `raw` or `chat`.
    pub frame: String,
    /// What was measured on.
    pub subject: String,
    /// How.
    pub settings: String,
    /// One for each model.
    pub entries: Vec<TaskEntry>,
    /// Each model against the one with the most bits per weight.
    pub verdicts: Option<Verdicts>,
}

/// A model's answers.
#[derive(Debug)]
pub struct TaskEntry {
    /// Position of the model.
    pub model: usize,
    /// The run.
    pub run: i64,
    /// Items with a result.
    pub items: Option<u64>,
    /// Those that are right.
    pub correct: Option<u64>,
    /// Their share.
    pub accuracy: Option<f64>,
    /// Wilson's interval.
    pub interval: Option<Interval>,
    /// Nothing but white space before the end.
    pub empty: Option<u64>,
    /// Ended in a repetition.
    pub loops: Option<u64>,
    /// Ran to the most tokens.
    pub full: Option<u64>,
    /// No other model has as few bits per weight and is right as often.
    pub on_frontier: bool,
}

impl TaskGroup {
    /// The suites and frames of runs that may be compared.
    pub(super) fn read(db: &Db, group: &Group<'_>, models: &[Model]) -> Result<Vec<Self>, DbError> {
        let mut suites: BTreeMap<(String, String), Vec<TaskEntry>> = BTreeMap::new();
        let mut answers: BTreeMap<(usize, String, String), Vec<(String, bool)>> = BTreeMap::new();
        for (model, run) in group {
            for value in list(&run.summary, "suites") {
                let name = |key| text(value, key).unwrap_or_else(|| "(no name)".to_owned());
                let entry = TaskEntry::new(*model, run.id, value);
                suites.entry((name("suite"), name("frame"))).or_default().push(entry);
            }
            for Item { suite, frame, item, correct, .. } in db.items(run.id)? {
                if let Some(correct) = correct {
                    answers.entry((*model, suite, frame)).or_default().push((item, correct));
                }
            }
        }
        let first = group[0].1;
        let group = |((suite, frame), mut entries): ((String, String), Vec<TaskEntry>)| {
            mark(&mut entries, models);
            let none: &[(String, bool)] = &[];
            let runs: Vec<(usize, &[(String, bool)])> = entries
                .iter()
                .map(|entry| {
                    let key = (entry.model, suite.clone(), frame.clone());
                    (entry.model, answers.get(&key).map_or(none, Vec::as_slice))
                })
                .collect();
            // Models are in the order of their bits per weight.
            let verdicts = (runs.len() > 1).then(|| verdicts::items(models, &runs, 0));
            let (subject, settings) = (described(&first.subject), described(&first.settings));
            Self { suite, frame, subject, settings, entries, verdicts }
        };
        Ok(suites.into_iter().map(group).collect())
    }
}

impl TaskEntry {
    fn new(model: usize, run: i64, value: &Value) -> Self {
        let (items, correct) = (count(value, "items"), count(value, "correct"));
        let counted = items.zip(correct).filter(|(items, correct)| *items > 0 && correct <= items);
        let wilson = counted.map(|(items, correct)| wilson(correct, items, CONFIDENCE));
        // Of generative items only, in a part of their own.
        let part = value.get("generative").unwrap_or(&Value::Null);
        let of = |key: &str| count(value, key).or_else(|| count(part, key));
        Self {
            model,
            run,
            items,
            correct,
            accuracy: number(value, "accuracy")
                .or_else(|| counted.map(|(items, correct)| correct as f64 / items as f64)),
            interval: interval(value, "ci95").or(wilson),
            empty: of("empty"),
            loops: of("loops"),
            full: of("length"),
            on_frontier: false,
        }
    }
}

fn mark(entries: &mut [TaskEntry], models: &[Model]) {
    let measured: Vec<usize> = (0..entries.len()).filter(|i| entries[*i].accuracy.is_some()).collect();
    let point = |i: &usize| {
        let entry = &entries[*i];
        (models[entry.model].identity.bits_per_weight, -entry.accuracy.unwrap_or(0.0))
    };
    let on = frontier(&measured.iter().map(point).collect::<Vec<_>>());
    for (i, on) in measured.into_iter().zip(on) {
        entries[i].on_frontier = on;
    }
}
