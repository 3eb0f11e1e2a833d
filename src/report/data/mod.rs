//! What the page shows, as plain values.
//!
//! Results are put together only where they may be compared: a group is all finished runs of one instrument and version
//! on the same subject (dump, suite, teacher) with the same settings, the latest of each model. Summaries may be of
//! another version than this program's: a key that is missing is a number that does not exist.

mod distribution;
mod kl;
mod tasks;
mod verdicts;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

pub use distribution::{Distribution, EDGES};
pub use kl::{Bucket, KlEntry, KlGroup, Layer, Worst};
pub use tasks::{TaskEntry, TaskGroup};
pub use verdicts::{ITEM_MARGIN, Verdict, Verdicts};

use super::html::cut;
use crate::digest::{Digest, canonical_json};
use crate::eval::db::{Db, DbError, Run};
use crate::eval::identity::Identity;
use crate::stats::Interval;

/// Everything.
#[derive(Debug)]
pub struct Data {
    /// Every model that has a run: the most bits per weight first.
    pub models: Vec<Model>,
    /// Divergences; the group with the most models first.
    pub kl: Vec<KlGroup>,
    /// Tasks: one group for each suite and frame that may be compared.
    pub tasks: Vec<TaskGroup>,
    /// Stop probes.
    pub stop: Vec<StopGroup>,
    /// Every run, the oldest first.
    pub runs: Vec<RunRow>,
}

/// A model on the page.
#[derive(Debug)]
pub struct Model {
    /// Its number on the page, from 1.
    pub number: usize,
    /// Its name; with the start of its digest if another has the same name.
    pub label: String,
    /// What is known of it.
    pub identity: Identity,
}

/// Stop probes against one teacher with the same prompts and limits.
#[derive(Debug)]
pub struct StopGroup {
    /// What was measured on.
    pub subject: String,
    /// How.
    pub settings: String,
    /// Each model's summary.
    pub entries: Vec<(usize, Value)>,
}

/// A run in the list of all.
#[derive(Debug)]
pub struct RunRow {
    /// The run.
    pub run: Run,
    /// Position of its model in [`Data::models`].
    pub model: usize,
    /// A later run of the same measurement is shown in its place.
    pub replaced: bool,
}

/// Reads everything that the page needs.
///
/// # Errors
/// A database that cannot be read.
pub fn collect(db: &Db) -> Result<Data, DbError> {
    let runs = db.runs()?;
    let models = models(&runs);
    let position: BTreeMap<Digest, usize> =
        models.iter().enumerate().map(|(i, model)| (model.identity.digest, i)).collect();
    let of = |run: &Run| position[&run.model.digest];
    let mut kl = Vec::new();
    for (i, group) in groups(&runs, "kl", &of).iter().enumerate() {
        kl.push(KlGroup::read(db, letter(i), group, &models)?);
    }
    let stop = groups(&runs, "stop", &of).iter().map(StopGroup::new).collect();
    let shown = latest(&runs);
    let measured = runs.iter().filter(|run| run.instrument == "tasks" && shown.contains(&run.id));
    let measured: Vec<(usize, &Run)> = measured.map(|run| (of(run), run)).collect();
    let tasks = TaskGroup::read(db, &measured, &models)?;
    let rows = runs.iter().map(|run| {
        let replaced = run.finished.is_some() && !shown.contains(&run.id);
        RunRow { run: run.clone(), model: of(run), replaced }
    });
    Ok(Data { kl, tasks, stop, runs: rows.collect(), models })
}

impl StopGroup {
    fn new(group: &Group<'_>) -> Self {
        Self {
            subject: described(&group[0].1.subject),
            settings: described(&group[0].1.settings),
            entries: group.iter().map(|(model, run)| (*model, run.summary.clone())).collect(),
        }
    }
}

/// Characters of a name that are shown.
const NAME: usize = 80;

fn models(runs: &[Run]) -> Vec<Model> {
    let by_digest: BTreeMap<Digest, &Identity> =
        runs.iter().map(|run| (run.model.digest, &run.model)).collect();
    let mut identities: Vec<&Identity> = by_digest.into_values().collect();
    identities.sort_by(|a, b| {
        b.bits_per_weight
            .total_cmp(&a.bits_per_weight)
            .then(a.name.cmp(&b.name))
            .then(a.digest.cmp(&b.digest))
    });
    let same = |name: &str| identities.iter().filter(|other| other.name == name).count();
    let label = |identity: &Identity| match same(&identity.name) {
        1 => cut(&identity.name, NAME),
        _ => format!("{} {}", cut(&identity.name, NAME), identity.digest.short()),
    };
    let model = |(i, identity): (usize, &&Identity)| Model {
        number: i + 1,
        label: label(identity),
        identity: (*identity).clone(),
    };
    identities.iter().enumerate().map(model).collect()
}

/// Numbers of the runs that are shown: of each measurement the latest that ended.
fn latest(runs: &[Run]) -> BTreeSet<i64> {
    let finished = runs.iter().filter(|run| run.finished.is_some());
    let by_key: BTreeMap<Digest, i64> = finished.map(|run| (run.key, run.id)).collect();
    by_key.into_values().collect()
}

/// Runs that may be compared, by the position of their model.
type Group<'a> = Vec<(usize, &'a Run)>;

fn groups<'a>(runs: &'a [Run], instrument: &str, of: &dyn Fn(&Run) -> usize) -> Vec<Group<'a>> {
    let shown = latest(runs);
    let mut groups: BTreeMap<Vec<u8>, Group<'a>> = BTreeMap::new();
    for run in runs.iter().filter(|run| run.instrument == instrument && shown.contains(&run.id)) {
        let key = canonical_json(&(run.version, &run.subject, &run.settings));
        groups.entry(key).or_default().push((of(run), run));
    }
    let mut groups: Vec<Group<'a>> = groups.into_values().collect();
    groups.iter_mut().for_each(|group| group.sort_by_key(|(model, _)| *model));
    let first = |group: &Group<'_>| group.iter().map(|(_, run)| run.id).min();
    groups.sort_by(|a, b| b.len().cmp(&a.len()).then(first(a).cmp(&first(b))));
    groups
}

/// `A`, `B`, ... `Z`, then `27` and on.
fn letter(i: usize) -> String {
    match u8::try_from(i) {
        Ok(i) if i < 26 => char::from(b'A' + i).to_string(),
        _ => (i + 1).to_string(),
    }
}

/// A JSON value in words: `path streamed, precision exact`.
pub fn described(value: &Value) -> String {
    match value {
        Value::Object(object) => {
            let part =
                |(key, value): (&String, &Value)| format!("{} {}", key.replace('_', " "), described(value));
            object.iter().map(part).collect::<Vec<_>>().join(", ")
        }
        Value::Array(items) => items.iter().map(described).collect::<Vec<_>>().join(" "),
        Value::String(text) if text.parse::<Digest>().is_ok() => text[..12].to_owned(),
        Value::String(text) => cut(text, 200),
        Value::Null => "none".to_owned(),
        other => other.to_string(),
    }
}

/// A number of an object.
pub fn number(value: &Value, key: &str) -> Option<f64> {
    value.get(key)?.as_f64()
}

/// A count of an object.
pub fn count(value: &Value, key: &str) -> Option<u64> {
    value.get(key)?.as_u64()
}

/// A string of an object, the first 400 characters.
pub fn text(value: &Value, key: &str) -> Option<String> {
    Some(cut(value.get(key)?.as_str()?, 400))
}

/// `[low, high]` of an object.
pub fn interval(value: &Value, key: &str) -> Option<Interval> {
    match value.get(key)?.as_array()?.as_slice() {
        [low, high] => Some(Interval { low: low.as_f64()?, high: high.as_f64()? }),
        _ => None,
    }
}

/// A list of an object; empty if there is none.
pub fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// Which of the points (size, loss) no other beats: none is at most as large with at most the loss, and better in one.
pub fn frontier(points: &[(f64, f64)]) -> Vec<bool> {
    let beats = |a: &(f64, f64), b: &(f64, f64)| a.0 <= b.0 && a.1 <= b.1 && (a.0 < b.0 || a.1 < b.1);
    points.iter().map(|point| !points.iter().any(|other| beats(other, point))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_points_that_nothing_beats_are_on_the_frontier() {
        let points = [(2.0, 0.5), (4.0, 0.1), (4.0, 0.2), (3.0, 0.6), (8.0, 0.1), (16.0, 0.0), (2.0, 0.5)];
        assert_eq!(frontier(&points), [true, true, false, false, false, true, true]);
        assert_eq!(frontier(&[]), Vec::<bool>::new());
    }

    #[test]
    fn values_of_other_versions_are_no_numbers_and_no_crash() {
        let value = json!({ "a": "x", "b": [1], "c": null, "d": -1, "e": [0.5, 1.5], "f": { "g": 1 } });
        assert_eq!((number(&value, "a"), number(&value, "z"), number(&json!(3), "a")), (None, None, None));
        assert_eq!((interval(&value, "b"), interval(&value, "c"), count(&value, "d")), (None, None, None));
        assert_eq!(interval(&value, "e"), Some(Interval { low: 0.5, high: 1.5 }));
        assert_eq!(list(&value, "f"), Vec::<Value>::new());
    }

    #[test]
    fn json_is_described_in_words() {
        let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let value = json!({ "path": "streamed", "max_tokens": 256, "suites": { "x": digest }, "none": null });
        assert_eq!(described(&value), "max tokens 256, none none, path streamed, suites x ba7816bf8f01");
        assert_eq!((letter(0), letter(25), letter(26)), ("A".to_owned(), "Z".to_owned(), "27".to_owned()));
    }
}
