//! `tqc eval compare`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use serde_json::Value;

use super::nats;
use crate::cli::Common;
use crate::cli::print::{self, Table};
use crate::eval::EvalError;
use crate::eval::compare::{self, DocumentKl, ItemComparison, KlComparison};
use crate::eval::db::{Db, Run};
use crate::failure::{Exit, Outcome};

/// Whether B is better than A, worse, the same, or not to be told apart by these results.
///
/// Paired: by item for tasks, by document for KL. The first model is the baseline; with several others the p values
/// are adjusted for their number. Only results of the same dump or suites, settings and instrument are compared.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// The baseline: a run's number, or a model by its name or the first digits of its digest (then its latest
    /// results are taken).
    a: String,
    /// What is held against it.
    #[arg(required = true)]
    b: Vec<String>,
    /// The largest difference that does not matter: of accuracy, 0.02 is two points; of KL, a part of the
    /// baseline's.
    #[arg(long, value_name = "M", default_value_t = 0.02)]
    margin: f64,
    /// The database of results.
    #[arg(long, value_name = "FILE", default_value = "eval.db")]
    db: PathBuf,
    #[command(flatten)]
    common: Common,
}

/// Comparisons of one kind.
#[derive(Debug, Serialize)]
struct Report {
    margin: f64,
    kl: Vec<KlGroup>,
    tasks: Vec<TaskGroup>,
}

#[derive(Debug, Serialize)]
struct KlGroup {
    subject: Value,
    settings: Value,
    arms: Vec<KlComparison>,
}

#[derive(Debug, Serialize)]
struct TaskGroup {
    suite: String,
    frame: String,
    settings: Value,
    arms: Vec<ItemComparison>,
}

/// What has to be the same for two runs to be compared.
type Group = (String, u32, String, String);

impl CompareArgs {
    pub fn run(self) -> Outcome<Exit> {
        if !(self.margin > 0.0 && self.margin < 1.0) {
            return Err(EvalError::Margin { found: self.margin }.into());
        }
        let db = Db::open(&self.db)?;
        let all: Vec<Run> = db.runs()?.into_iter().filter(|run| run.finished.is_some()).collect();
        let names: Vec<&String> = std::iter::once(&self.a).chain(&self.b).collect();
        let mut arms = Vec::new();
        for (i, name) in names.iter().enumerate() {
            let arm = latest(&all, name)?;
            let runs = |arm: &BTreeMap<Group, &Run>| arm.values().map(|run| run.id).collect::<Vec<_>>();
            if names[..i].contains(name) || arms.iter().any(|other| runs(other) == runs(&arm)) {
                return Err(EvalError::SameArm { name: (*name).clone() }.into());
            }
            arms.push(arm);
        }
        let mut report = Report { margin: self.margin, kl: Vec::new(), tasks: Vec::new() };
        for (group, _) in &arms[0] {
            let found: Vec<&Run> = arms.iter().filter_map(|arm| arm.get(group).copied()).collect();
            if found.len() < arms.len() {
                continue;
            }
            match group.0.as_str() {
                "kl" => report.kl.push(self.kl(&db, &found)?),
                "tasks" => report.tasks.extend(self.tasks(&db, &found)?),
                _ => {}
            }
        }
        if report.kl.is_empty() && report.tasks.is_empty() {
            let have = |arm: &BTreeMap<Group, &Run>| {
                let runs: Vec<String> =
                    arm.values().map(|run| format!("{} (run {})", run.instrument, run.id)).collect();
                runs.join(", ")
            };
            let found = names.iter().zip(&arms).map(|(name, arm)| format!("`{name}`: {}", have(arm)));
            return Err(EvalError::NothingToCompare { found: found.collect::<Vec<_>>().join("; ") }.into());
        }
        print::result(self.common.json, &report, text)?;
        Ok(Exit::Done)
    }

    fn kl(&self, db: &Db, runs: &[&Run]) -> Outcome<KlGroup> {
        let mut results = Vec::new();
        for run in runs {
            let mut sums: BTreeMap<usize, DocumentKl> = BTreeMap::new();
            for document in db.documents(run.id)? {
                let sum = sums.entry(document.document).or_insert(DocumentKl { sum: 0.0, tokens: 0 });
                for position in document.positions.iter().filter(|position| !position.kl.is_nan()) {
                    sum.sum += f64::from(position.kl);
                    sum.tokens += 1;
                }
            }
            results.push(sums.into_iter().map(|(id, sum)| (format!("{id:06}"), sum)).collect::<Vec<_>>());
        }
        let names = names(runs);
        let arms: Vec<compare::Run<'_, DocumentKl>> = names
            .iter()
            .zip(&results)
            .map(|(name, results)| compare::Run { name: name.as_str(), results })
            .collect();
        let (baseline, arms) = arms.split_first().expect("a comparison has a baseline");
        Ok(KlGroup {
            subject: runs[0].subject.clone(),
            settings: runs[0].settings.clone(),
            arms: compare::kl(*baseline, arms, Some(self.margin))?,
        })
    }

    fn tasks(&self, db: &Db, runs: &[&Run]) -> Outcome<Vec<TaskGroup>> {
        // Suite and frame, then the results of each run.
        let mut groups: BTreeMap<(String, String), Vec<Vec<(String, bool)>>> = BTreeMap::new();
        for (i, run) in runs.iter().enumerate() {
            for item in db.items(run.id)? {
                let group =
                    groups.entry((item.suite, item.frame)).or_insert_with(|| vec![Vec::new(); runs.len()]);
                if let Some(correct) = item.correct {
                    group[i].push((item.item, correct));
                }
            }
        }
        let names = names(runs);
        let mut found = Vec::new();
        for ((suite, frame), results) in groups {
            let arms: Vec<compare::Run<'_, bool>> = names
                .iter()
                .zip(&results)
                .map(|(name, results)| compare::Run { name: name.as_str(), results })
                .collect();
            let (baseline, arms) = arms.split_first().expect("a comparison has a baseline");
            let arms = compare::items(*baseline, arms, self.margin)?;
            found.push(TaskGroup { suite, frame, settings: runs[0].settings.clone(), arms });
        }
        Ok(found)
    }
}

/// What people call the runs: models' names, with the run's number where two are alike.
fn names(runs: &[&Run]) -> Vec<String> {
    let name = |run: &&Run| {
        let alike = runs.iter().filter(|other| other.model.name == run.model.name).count();
        if alike > 1 { format!("{} (run {})", run.model.name, run.id) } else { run.model.name.clone() }
    };
    runs.iter().map(name).collect()
}

/// The latest finished run of each kind that `name` stands for.
fn latest<'a>(all: &'a [Run], name: &str) -> Result<BTreeMap<Group, &'a Run>, EvalError> {
    let number = name.parse::<i64>().ok();
    let by_number: Vec<&Run> = all.iter().filter(|run| Some(run.id) == number).collect();
    let of_model = |run: &&Run| {
        let digest = run.model.digest.to_string();
        run.model.name == name || (name.len() >= 6 && digest.starts_with(name))
    };
    let runs = if by_number.is_empty() { all.iter().filter(of_model).collect() } else { by_number };
    let mut models: Vec<_> = runs.iter().map(|run| run.model.digest).collect();
    models.sort();
    models.dedup();
    match models.as_slice() {
        [] => Err(EvalError::NoSuchModel { name: name.to_owned() }),
        [_] => {
            let group = |run: &&'a Run| {
                let key = (run.subject.to_string(), run.settings.to_string());
                ((run.instrument.clone(), run.version, key.0, key.1), *run)
            };
            // Runs come oldest first, so a later one replaces an earlier one.
            Ok(runs.iter().map(group).collect())
        }
        several => {
            let digests: Vec<String> = several.iter().map(|digest| digest.short()).collect();
            Err(EvalError::SeveralModels { name: name.to_owned(), digests: digests.join(", ") })
        }
    }
}

fn text(report: &Report) -> String {
    let mut out = String::new();
    for group in &report.kl {
        let mut table = Table::new(&[
            ("KL", false),
            ("A", true),
            ("B", true),
            ("B - A", true),
            ("95 %", false),
            ("p", true),
            ("documents better, worse", true),
            ("verdict", false),
        ]);
        for arm in &group.arms {
            let interval = arm
                .difference_ci95
                .map_or_else(String::new, |i| format!("[{}, {}]", nats(i.low), nats(i.high)));
            table.row([
                format!("{} against {}", arm.b, arm.a),
                nats(arm.mean_a.mean),
                nats(arm.mean_b.mean),
                nats(arm.difference.mean),
                interval,
                format!("{:.4}", arm.p_adjusted),
                format!("{}, {}", arm.documents_better, arm.documents_worse),
                word(&arm.verdict),
            ]);
        }
        out.push_str(&table.render());
        group.arms.iter().for_each(|arm| out.push_str(&format!("{}\n", arm.conclusion)));
        out.push('\n');
    }
    for group in &report.tasks {
        let mut table = Table::new(&[
            ("task", false),
            ("arm", false),
            ("A", true),
            ("B", true),
            ("n", true),
            ("only A, only B right", true),
            ("p", true),
            ("verdict", false),
        ]);
        for arm in &group.arms {
            table.row([
                format!("{} {}", group.suite, group.frame),
                format!("{} against {}", arm.b, arm.a),
                format!("{:.3}", arm.right_a.share),
                format!("{:.3}", arm.right_b.share),
                arm.n.to_string(),
                format!("{}, {}", arm.pairs.only_a, arm.pairs.only_b),
                format!("{:.4}", arm.mcnemar_p_adjusted),
                word(&arm.verdict),
            ]);
        }
        out.push_str(&table.render());
        for arm in &group.arms {
            out.push_str(&format!("{}\n{}\n", arm.conclusion, arm.power.sentence));
        }
        out.push('\n');
    }
    out
}

/// A verdict as JSON spells it.
fn word(verdict: &compare::Verdict) -> String {
    serde_json::to_value(verdict).ok().and_then(|value| Some(value.as_str()?.to_owned())).unwrap_or_default()
}
