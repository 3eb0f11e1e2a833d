//! What models can still do.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::verdicts::{self, Verdicts};
use super::{Model, NAME, count, described, frontier, interval, list, number};
use crate::digest::canonical_json;
use crate::eval::db::{Db, DbError, Run};
use crate::report::html::cut;
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
    /// No answer was found in the text.
    pub no_answer: Option<u64>,
    /// No other model has as few bits per weight and is right as often.
    pub on_frontier: bool,
}

type Answers = Vec<(String, bool)>;

impl TaskGroup {
    /// The suites and frames of `runs`, each with the position of its model, the oldest first.
    ///
    /// A run may hold several suites, so what must agree is the suite's own: its digest and settings.
    pub(super) fn read(db: &Db, runs: &[(usize, &Run)], models: &[Model]) -> Result<Vec<Self>, DbError> {
        type Found = (TaskGroup, BTreeMap<usize, (TaskEntry, Answers)>);
        let mut groups: BTreeMap<(String, String, Vec<u8>), Found> = BTreeMap::new();
        for (model, run) in runs {
            let items = db.items(run.id)?;
            for value in list(&run.summary, "results") {
                let name = |key| value.get(key).and_then(Value::as_str).unwrap_or("(no name)");
                let (suite, frame) = (name("suite"), name("frame"));
                let of_suite = |about: &&Value| about.get("suite").and_then(Value::as_str) == Some(suite);
                let about = list(&run.subject, "suites").iter().find(of_suite);
                let (subject, settings) = match about {
                    Some(about) => (json!({ "suite": about.get("sha256") }), about.get("settings")),
                    None => (run.subject.clone(), None),
                };
                let settings: Vec<&Value> = settings.into_iter().chain([&run.settings]).collect();
                let own = items.iter().filter(|item| item.suite == suite && item.frame == frame);
                let answers = own.filter_map(|item| Some((item.item.clone(), item.correct?))).collect();
                let key = canonical_json(&(run.version, &subject, &settings));
                let group = || Self {
                    suite: cut(suite, NAME),
                    frame: cut(frame, NAME),
                    subject: described(&subject),
                    settings: settings.iter().map(|value| described(value)).collect::<Vec<_>>().join(", "),
                    entries: Vec::new(),
                    verdicts: None,
                };
                let key = (suite.to_owned(), frame.to_owned(), key);
                let (_, entries) = groups.entry(key).or_insert_with(|| (group(), BTreeMap::new()));
                entries.insert(*model, (TaskEntry::new(*model, value), answers));
            }
        }
        Ok(groups.into_values().map(|(group, entries)| group.with(entries, models)).collect())
    }

    fn with(mut self, entries: BTreeMap<usize, (TaskEntry, Answers)>, models: &[Model]) -> Self {
        let runs: Vec<(usize, &[(String, bool)])> =
            entries.iter().map(|(model, (_, answers))| (*model, answers.as_slice())).collect();
        // Models are in the order of their bits per weight.
        self.verdicts = (runs.len() > 1).then(|| verdicts::items(models, &runs, 0));
        self.entries = entries.into_values().map(|(entry, _)| entry).collect();
        mark(&mut self.entries, models);
        self
    }
}

impl TaskEntry {
    fn new(model: usize, value: &Value) -> Self {
        let (items, correct) = (count(value, "items"), count(value, "correct"));
        let counted = items.zip(correct).filter(|(items, correct)| *items > 0 && correct <= items);
        let wilson = counted.map(|(items, correct)| wilson(correct, items, CONFIDENCE));
        // Of generative items only, in a part of their own.
        let part = value.get("generative").unwrap_or(&Value::Null);
        let of = |key: &str| count(value, key).or_else(|| count(part, key));
        Self {
            model,
            items,
            correct,
            accuracy: number(value, "accuracy")
                .or_else(|| counted.map(|(items, correct)| correct as f64 / items as f64)),
            interval: interval(value, "ci95").or(wilson),
            empty: of("empty"),
            loops: of("loops"),
            full: of("length"),
            no_answer: of("no_answer"),
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
