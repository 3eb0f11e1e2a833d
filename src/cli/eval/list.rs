//! `tqc eval list`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::cli::print::{self, Table};
use crate::cli::{CliError, Common};
use crate::eval::db::{Db, Run};
use crate::failure::{Exit, Outcome};

/// List the results in the database, or export them.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// The database of results.
    #[arg(long, value_name = "FILE", default_value = "eval.db")]
    db: PathBuf,
    /// One run alone, with its items or sequences.
    #[arg(long, value_name = "ID")]
    run: Option<i64>,
    /// Print everything that is stored, as CSV (a row a run, or with `--run` a row an item or position) or as
    /// one JSON object.
    #[arg(long, value_enum, conflicts_with = "json")]
    export: Option<Export>,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Export {
    Csv,
    Json,
}

impl ListArgs {
    pub fn run(self) -> Outcome<Exit> {
        let db = Db::open(&self.db)?;
        match self.run {
            Some(id) => self.one(&db, &db.run(id)?),
            None => self.all(&db.runs()?),
        }
    }

    fn all(&self, runs: &[Run]) -> Outcome<Exit> {
        match self.export {
            Some(Export::Csv) => print::text(&csv_of_runs(runs)?)?,
            None if !self.common.json => print::text(&table(runs))?,
            _ => print::json(&json!({ "runs": runs }))?,
        }
        Ok(Exit::Done)
    }

    fn one(&self, db: &Db, run: &Run) -> Outcome<Exit> {
        if self.export == Some(Export::Csv) {
            print::text(&csv_of_rows(db, run)?)?;
            return Ok(Exit::Done);
        }
        if self.export == Some(Export::Json) || self.common.json {
            let sequences: Vec<Value> = db
                .documents(run.id)?
                .iter()
                .map(|d| json!({ "sequence": d.sequence, "document": d.document, "positions": d.positions }))
                .collect();
            print::json(&json!({ "run": run, "items": db.items(run.id)?, "sequences": sequences }))?;
            return Ok(Exit::Done);
        }
        let pretty = serde_json::to_string_pretty(run).expect("a run is plain data");
        print::text(&format!("{pretty}\n"))?;
        Ok(Exit::Done)
    }
}

fn table(runs: &[Run]) -> String {
    let mut table = Table::new(&[
        ("run", true),
        ("instrument", false),
        ("model", false),
        ("digest", false),
        ("bpw", true),
        ("started", false),
        ("seconds", true),
        ("result", false),
    ]);
    for run in runs {
        table.row([
            run.id.to_string(),
            run.instrument.clone(),
            run.model.name.clone(),
            run.model.digest.short(),
            format!("{:.3}", run.model.bits_per_weight),
            run.started.clone(),
            format!("{:.1}", run.seconds),
            headline(run),
        ]);
    }
    table.render()
}

/// The result in a few words.
fn headline(run: &Run) -> String {
    if run.finished.is_none() {
        return "unfinished".to_owned();
    }
    let spoilt = match run.summary.get("non_finite").and_then(Value::as_u64) {
        None | Some(0) => String::new(),
        Some(count) => format!(", {count} not finite"),
    };
    match run.summary.get("mean_kl").map(Value::as_f64) {
        Some(Some(kl)) => format!("KL {}{spoilt}", super::nats(kl)),
        Some(None) => format!("no KL{spoilt}"),
        None => run.summary.get("headline").and_then(Value::as_str).unwrap_or("").to_owned(),
    }
}

/// Columns of the runs: what was measured, and the single numbers of its summary.
fn csv_of_runs(runs: &[Run]) -> Outcome<String> {
    let mut keys: Vec<String> = Vec::new();
    let numbers = |run: &Run| -> Vec<(String, Value)> {
        let fields = run.summary.as_object().into_iter().flatten();
        let single = fields.filter(|(_, value)| !value.is_array() && !value.is_object());
        single.map(|(key, value)| (key.clone(), value.clone())).collect()
    };
    for (key, _) in runs.iter().flat_map(numbers) {
        if !keys.contains(&key) && !["model", "run", "bits_per_weight"].contains(&key.as_str()) {
            keys.push(key);
        }
    }
    keys.sort();
    let mut csv = csv::Writer::from_writer(Vec::new());
    let fixed = [
        "run",
        "instrument",
        "version",
        "model_name",
        "model_digest",
        "bits_per_weight",
        "bytes",
        "subject",
        "settings",
        "started",
        "finished",
        "seconds",
    ];
    let header = fixed.iter().map(|name| (*name).to_owned()).chain(keys.iter().cloned());
    write(&mut csv, header)?;
    for run in runs {
        let own = numbers(run);
        let value = |key: &String| own.iter().find(|(name, _)| name == key).map(|(_, value)| cell(value));
        let fixed = [
            run.id.to_string(),
            run.instrument.clone(),
            run.version.to_string(),
            run.model.name.clone(),
            run.model.digest.to_string(),
            run.model.bits_per_weight.to_string(),
            run.model.bytes.to_string(),
            run.subject.to_string(),
            run.settings.to_string(),
            run.started.clone(),
            run.finished.clone().unwrap_or_default(),
            run.seconds.to_string(),
        ];
        write(&mut csv, fixed.into_iter().chain(keys.iter().map(|key| value(key).unwrap_or_default())))?;
    }
    Ok(finished(csv))
}

/// One row an item, or one row a position.
fn csv_of_rows(db: &Db, run: &Run) -> Outcome<String> {
    let mut csv = csv::Writer::from_writer(Vec::new());
    let own = |cells: &[&str]| cells.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>();
    let items = db.items(run.id)?;
    if !items.is_empty() {
        write(&mut csv, own(&["suite", "frame", "item", "correct", "detail"]))?;
        for item in items {
            let correct = item.correct.map_or_else(String::new, |correct| correct.to_string());
            write(&mut csv, [item.suite, item.frame, item.item, correct, item.detail.to_string()])?;
        }
        return Ok(finished(csv));
    }
    let header = [
        "document",
        "sequence",
        "row",
        "kl",
        "confidence",
        "teacher_nll",
        "candidate_nll",
        "teacher_top",
        "candidate_top",
    ];
    write(&mut csv, own(&header))?;
    for document in db.documents(run.id)? {
        for (row, p) in document.positions.iter().enumerate() {
            let numbers =
                [p.kl, p.confidence, p.teacher_nll, p.candidate_nll].map(|value| match value.is_nan() {
                    true => String::new(),
                    false => value.to_string(),
                });
            let places = [document.document, document.sequence, row].map(|n| n.to_string());
            let tops = [p.teacher_top, p.candidate_top].map(|id| id.to_string());
            write(&mut csv, places.into_iter().chain(numbers).chain(tops))?;
        }
    }
    Ok(finished(csv))
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn write(csv: &mut csv::Writer<Vec<u8>>, cells: impl IntoIterator<Item = String>) -> Result<(), CliError> {
    csv.write_record(cells).map_err(|error| CliError::Stdout(std::io::Error::other(error)))
}

fn finished(csv: csv::Writer<Vec<u8>>) -> String {
    let bytes = csv.into_inner().expect("writing to memory does not fail");
    String::from_utf8(bytes).expect("cells are text")
}
