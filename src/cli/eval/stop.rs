//! `tqc eval stop`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use serde::Serialize;
use serde_json::json;

use super::{DbArgs, PathArgs, Started, Steps};
use crate::arch::Config;
use crate::backend::Precision;
use crate::backend::cpu::Cpu;
use crate::cli::Common;
use crate::cli::generate::interrupt;
use crate::cli::model::{ModelArgs, folder};
use crate::cli::print::{self, Table};
use crate::digest::Digest;
use crate::eval::db::{Item, Key};
use crate::eval::dump::Dump;
use crate::eval::identity::Identity;
use crate::eval::kl::run::check;
use crate::eval::stop::cases::{digest, of_dump, prompts};
use crate::eval::stop::{Along, Case, Found, Limits, Prompt, Speaking, Summary, VERSION, summarize};
use crate::eval::tasks::suite::Suite;
use crate::eval::{EvalError, Progress as _};
use crate::failure::{Exit, Outcome};
use crate::runtime::{Model, Weights};
use crate::text::{EndTokens, TextError, Tokenizer};

/// Whether a model still begins and ends its answers, beside its teacher; exit 1 if not.
///
/// Both models are read at the start of answers and at their true ends, and the candidate writes by itself. A mean
/// KL does not see these few positions; a model that fails there answers nothing, or never stops.
#[derive(Debug, Args)]
pub struct StopArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The teacher: a model, which writes the reference answers; or a dump of chat text with hidden states, whose
    /// answers are the references.
    #[arg(long, value_name = "MODEL|DUMP")]
    teacher: String,
    /// Take the prompts of this generative suite instead of the built-in ones; may be given several times.
    #[arg(long, value_name = "FILE")]
    suite: Vec<PathBuf>,
    /// Most cases of each frame.
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// Most tokens of an answer.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    path: PathArgs,
    #[command(flatten)]
    db: DbArgs,
    #[command(flatten)]
    common: Common,
}

/// A part of a whole.
fn part(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err("must be a number from 0 to 1".to_owned()),
    }
}

/// What the gate lets pass.
#[derive(Debug, Args)]
struct LimitArgs {
    /// Largest part of empty answers.
    #[arg(long, value_name = "RATE", default_value_t = Limits::default().empty, value_parser = part)]
    max_empty: f64,
    /// Largest part of answers that miss their stop.
    #[arg(long, value_name = "RATE", default_value_t = Limits::default().missed, value_parser = part)]
    max_missed: f64,
    /// Largest part of answers that end in a repetition.
    #[arg(long, value_name = "RATE", default_value_t = Limits::default().loops, value_parser = part)]
    max_loops: f64,
    /// Largest part of answers that would stop early.
    #[arg(long, value_name = "RATE", default_value_t = Limits::default().early, value_parser = part)]
    max_early: f64,
    /// Largest part of true ends that are passed over.
    #[arg(long, value_name = "RATE", default_value_t = Limits::default().ends, value_parser = part)]
    max_ends: f64,
    /// Largest gain of the mean P(end) at the start of answers.
    #[arg(long, value_name = "P", default_value_t = Limits::default().start_mass, value_parser = part)]
    max_start_mass: f64,
    /// Largest loss of the mean P(end) at true ends.
    #[arg(long, value_name = "P", default_value_t = Limits::default().end_mass, value_parser = part)]
    max_end_mass: f64,
}

impl LimitArgs {
    fn limits(&self) -> Limits {
        Limits {
            empty: self.max_empty,
            missed: self.max_missed,
            loops: self.max_loops,
            early: self.max_early,
            ends: self.max_ends,
            start_mass: self.max_start_mass,
            end_mass: self.max_end_mass,
        }
    }
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    summary: Summary,
    limits: Limits,
    model: Digest,
    teacher: Digest,
    bits_per_weight: f64,
    run: i64,
}

/// A model that is ready to speak.
struct Ready {
    model: Model,
    tokenizer: Tokenizer,
    ends: Vec<u32>,
}

impl Ready {
    fn open(dir: &Path, cpu: &Arc<Cpu>) -> Outcome<Self> {
        let tokenizer = Tokenizer::open(dir)?;
        let model = Model::new(Weights::open(dir)?, cpu.clone())?;
        let ends: Vec<u32> =
            EndTokens::read(dir, Some(&tokenizer), model.config().vocab)?.ids_ascending().collect();
        match ends.is_empty() {
            true => Err(EvalError::NoEndTokens { dir: dir.to_owned() }.into()),
            false => Ok(Self { model, tokenizer, ends }),
        }
    }

    fn speaking<'a>(&'a self, max_tokens: usize, stop: &'a AtomicBool) -> Speaking<'a> {
        Speaking { model: &self.model, tokenizer: &self.tokenizer, ends: &self.ends, max_tokens, stop }
    }
}

/// Suite, frame and id.
type CaseId = (String, String, String);

/// Who gives the references.
enum Teacher {
    Model { dir: PathBuf, identity: Box<Identity> },
    Dump(Box<Dump>),
}

impl StopArgs {
    pub fn run(self) -> Outcome<Exit> {
        let stop = interrupt(|| {})?;
        let dir = self.model.folder()?;
        Config::read_packed(&dir)?;
        let suites = self.suite.iter().map(|path| Suite::open(path)).collect::<Result<Vec<_>, _>>()?;
        let cpu = self.model.cpu(self.path.precision());
        let candidate = Ready::open(&dir, &cpu)?;
        let identity = Identity::read(&dir)?;
        let teacher = self.teacher()?;
        if matches!(teacher, Teacher::Dump(_)) && !suites.is_empty() {
            return Err(EvalError::SuiteBesideDump.into());
        }
        let asked = match &teacher {
            Teacher::Dump(dump) => {
                check(dump, candidate.model.weights(), &identity)?;
                Vec::new()
            }
            Teacher::Model { identity: teacher, dir: teacher_dir } => {
                let none = || TextError::NoTokenizer { dir: teacher_dir.clone() };
                identity.check_tokenizer(teacher.tokenizer.ok_or_else(none)?)?;
                self.asked(&dir, &candidate, &suites)?
            }
        };
        let teacher_digest = match &teacher {
            Teacher::Dump(dump) => dump.digest,
            Teacher::Model { identity, .. } => identity.digest,
        };
        let key = Key {
            instrument: "stop",
            version: VERSION,
            model: identity.digest,
            subject: json!({ "teacher": teacher_digest, "prompts": digest(&asked), "limit": self.limit }),
            settings: json!({
                "max_tokens": self.max_tokens,
                "precision": self.path.precision(),
            }),
        };
        let started = self.db.start(&key, &identity)?;
        let steps = Steps::new("stop");
        let found = match self.measure(&started, &teacher, &candidate, &asked, &dir, &steps, &stop) {
            Ok(found) => found,
            Err(error) => return Err(started.failed(steps.seconds(), error)),
        };
        let cases: Vec<(String, Found)> =
            found.into_iter().map(|((_, frame, _), detail)| (frame, detail)).collect();
        let limits = self.limits.limits();
        let report = Report {
            summary: summarize(&cases, &limits),
            limits,
            model: identity.digest,
            teacher: teacher_digest,
            bits_per_weight: identity.bits_per_weight,
            run: started.run.id,
        };
        let value = serde_json::to_value(&report).expect("a report is plain data");
        started.finish(&value, steps.seconds())?;
        steps.end();
        print::result(self.common.json, &report, |report| text(report, &identity))?;
        Ok(if report.summary.pass { Exit::Done } else { Exit::No })
    }

    /// Examines what is not examined yet.
    #[allow(clippy::too_many_arguments)] // what `run` has opened and checked
    fn measure(
        &self,
        started: &Started,
        teacher: &Teacher,
        candidate: &Ready,
        asked: &[Prompt],
        dir: &Path,
        steps: &Steps,
        stop: &AtomicBool,
    ) -> Outcome<BTreeMap<CaseId, Found>> {
        let (db, run) = (&started.db, started.run);
        let mut found: BTreeMap<CaseId, Found> = BTreeMap::new();
        for item in db.items(run.id)? {
            // An item that an earlier version wrote is measured again.
            if let Ok(detail) = serde_json::from_value(item.detail) {
                found.insert((item.suite, item.frame, item.item), detail);
            }
        }
        if run.resumed {
            print::say(&format!("going on with run {}: {} cases are done", run.id, found.len()));
        }
        let done: BTreeSet<CaseId> = found.keys().cloned().collect();
        let is_done = |prompt: &Prompt| {
            done.contains(&(prompt.suite.clone(), prompt.frame.to_owned(), prompt.id.clone()))
        };
        let mut keep = |prompt: &Prompt, detail: Found| -> Outcome<()> {
            let item = Item {
                suite: prompt.suite.clone(),
                frame: prompt.frame.to_owned(),
                item: prompt.id.clone(),
                correct: None,
                detail: serde_json::to_value(&detail).expect("a case is plain data"),
            };
            db.put_item(run.id, &item)?;
            found.insert((item.suite, item.frame, item.item), detail);
            Ok(())
        };
        let speaking = candidate.speaking(self.max_tokens as usize, stop);
        match teacher {
            Teacher::Model { dir, .. } => {
                let teacher = Ready::open(dir, &self.model.cpu(Precision::Exact))?;
                let reference = teacher.speaking(self.max_tokens as usize, stop);
                self.beside_model(asked, &reference, &speaking, &is_done, steps, &mut keep)?;
            }
            Teacher::Dump(dump) => self.beside_dump(dump, dir, &speaking, &is_done, steps, &mut keep)?,
        }
        Ok(found)
    }

    fn teacher(&self) -> Outcome<Teacher> {
        let path = Path::new(&self.teacher);
        if path.join(crate::eval::dump::RECORD).exists() || path.is_file() {
            return Ok(Teacher::Dump(Box::new(Dump::open(path)?)));
        }
        let dir = folder(&self.teacher, false)?;
        let identity = Box::new(Identity::read(&dir)?);
        Ok(Teacher::Model { dir, identity })
    }

    /// The prompts, at most so many of a frame.
    fn asked(&self, dir: &Path, candidate: &Ready, suites: &[Suite]) -> Outcome<Vec<Prompt>> {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        let mut asked = prompts(dir, &candidate.tokenizer, suites)?;
        asked.retain(|prompt| {
            let count = counts.entry(prompt.frame).or_default();
            *count += 1;
            *count <= self.limit as usize
        });
        for prompt in &asked {
            candidate.model.check_prompt(&prompt.tokens)?;
        }
        Ok(asked)
    }

    fn beside_model(
        &self,
        asked: &[Prompt],
        teacher: &Speaking<'_>,
        candidate: &Speaking<'_>,
        is_done: &dyn Fn(&Prompt) -> bool,
        steps: &Steps,
        keep: &mut dyn FnMut(&Prompt, Found) -> Outcome<()>,
    ) -> Outcome<()> {
        for (i, prompt) in asked.iter().enumerate() {
            steps.at(i as u64, asked.len() as u64, "cases");
            if is_done(prompt) {
                continue;
            }
            let raw = prompt.frame == "raw";
            let Some(reference) = teacher.write(&prompt.tokens, raw)? else {
                return Err(interrupted(i, asked.len()));
            };
            let case = Case::of(&prompt.tokens, &reference);
            let along = teacher.along(&case)?;
            match examine(&case, along, candidate, raw)? {
                Some(found) => keep(prompt, found)?,
                None => return Err(interrupted(i, asked.len())),
            }
        }
        Ok(())
    }

    fn beside_dump(
        &self,
        dump: &Dump,
        dir: &Path,
        candidate: &Speaking<'_>,
        is_done: &dyn Fn(&Prompt) -> bool,
        steps: &Steps,
        keep: &mut dyn FnMut(&Prompt, Found) -> Outcome<()>,
    ) -> Outcome<()> {
        let speaker = dump.speaker(None, candidate.model.cpu())?;
        let cases = of_dump(&speaker, dir, candidate, self.limit as usize)?;
        let total = cases.len();
        for (i, (prompt, case, along)) in cases.into_iter().enumerate() {
            steps.at(i as u64, total as u64, "cases");
            if is_done(&prompt) {
                continue;
            }
            match examine(&case, along, candidate, false)? {
                Some(found) => keep(&prompt, found)?,
                None => return Err(interrupted(i, total)),
            }
        }
        Ok(())
    }
}

fn interrupted(done: usize, total: usize) -> Box<dyn crate::failure::Failure> {
    EvalError::Interrupted(format!("{done} of {total} cases")).into()
}

/// The candidate along a case and by itself; none if it was interrupted.
fn examine(case: &Case, teacher: Along, candidate: &Speaking<'_>, raw: bool) -> Outcome<Option<Found>> {
    if candidate.stop.load(Ordering::Relaxed) {
        return Ok(None);
    }
    let along = candidate.along(case)?;
    let Some(written) = candidate.write(&case.prompt, raw)? else { return Ok(None) };
    Ok(Some(Found {
        ended: case.ended,
        reference_tokens: case.answer.len(),
        reference_empty: case.empty,
        reference_loops: case.loops,
        teacher,
        candidate: along,
        written,
    }))
}

fn text(report: &Report, identity: &Identity) -> String {
    let mut out = format!(
        "model    {} ({}, {:.3} bits per weight)\nverdict  {}\n",
        identity.name,
        identity.digest.short(),
        identity.bits_per_weight,
        report.summary.headline
    );
    for frame in &report.summary.frames {
        let (t, c) = (&frame.teacher, &frame.candidate);
        out.push_str(&format!(
            "\n{}: {} cases, {} of them with a true end\n",
            frame.frame, frame.cases, frame.ends
        ));
        let mut table = Table::new(&[("", false), ("teacher", true), ("candidate", true)]);
        let number = |value: f64| format!("{value:.4}");
        let maybe = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), number);
        let rows = [
            ("P(end) at starts", number(t.start_p_end), number(c.start_p_end)),
            ("  the largest", number(t.start_p_end_max), number(c.start_p_end_max)),
            ("margin at starts", number(t.start_margin), number(c.start_margin)),
            ("P(end) at true ends", maybe(t.end_p_end), maybe(c.end_p_end)),
            ("margin at true ends", maybe(t.end_margin), maybe(c.end_margin)),
            ("would stop at once", t.stops_at_once.to_string(), c.stops_at_once.to_string()),
            ("would pass over the end", t.goes_on.to_string(), c.goes_on.to_string()),
            ("empty answers", t.empty.to_string(), c.empty.to_string()),
            ("answers that loop", t.loops.to_string(), c.loops.to_string()),
            ("answers of full length", t.full.to_string(), c.full.to_string()),
        ];
        rows.into_iter()
            .for_each(|(name, teacher, candidate)| table.row([name.to_owned(), teacher, candidate]));
        out.push_str(&table.render());
        let mut gate = Table::new(&[
            ("gate", false),
            ("found", true),
            ("of", true),
            ("value", true),
            ("95 %", false),
            ("limit", true),
            ("", false),
        ]);
        for line in &frame.gate {
            let interval =
                line.interval.map_or_else(String::new, |i| format!("[{:.3}, {:.3}]", i.low, i.high));
            gate.row([
                line.what.to_owned(),
                line.count.map_or_else(String::new, |count| count.to_string()),
                line.of.to_string(),
                format!("{:.3}", line.value),
                interval,
                format!("{:.3}", line.limit),
                if line.pass { "pass".to_owned() } else { "FAIL".to_owned() },
            ]);
        }
        out.push_str(&gate.render());
    }
    out
}
