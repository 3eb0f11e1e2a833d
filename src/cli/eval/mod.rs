//! `tqc eval`: what its commands share.

mod compare;
mod dump;
mod kl;
mod list;
mod stop;
mod tasks;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal as _;

use super::print;
use crate::backend::Precision;
use crate::digest::{Digest, canonical_json};
use crate::eval::Progress;
use crate::eval::db::{Db, Key, Open};
use crate::eval::forward::Need;
use crate::eval::identity::Identity;
use crate::eval::work::{RESIDUAL, Work};
use crate::failure::{Exit, Failure, Outcome};
use crate::units::Bytes;

/// Measure a model: divergence from its teacher, tasks, stop behaviour; compare and list results.
#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(subcommand)]
    what: Eval,
}

#[derive(Debug, Subcommand)]
enum Eval {
    Dump(Box<dump::DumpArgs>),
    Kl(Box<kl::KlArgs>),
    Tasks(Box<tasks::TasksArgs>),
    Stop(Box<stop::StopArgs>),
    Compare(compare::CompareArgs),
    List(list::ListArgs),
}

impl EvalArgs {
    pub fn run(self) -> Outcome<Exit> {
        match self.what {
            Eval::Dump(args) => args.run(),
            Eval::Kl(args) => args.run(),
            Eval::Tasks(args) => args.run(),
            Eval::Stop(args) => args.run(),
            Eval::Compare(args) => args.run(),
            Eval::List(args) => args.run(),
        }
    }
}

/// Which arithmetic is measured.
#[derive(Debug, Args)]
pub struct PathArgs {
    /// Measure the path that `generate` takes by default, which rounds the inputs of packed linear layers to
    /// int8. Without it weights alone are measured, with f32 activations.
    #[arg(long)]
    fast: bool,
}

impl PathArgs {
    /// The path.
    pub fn precision(&self) -> Precision {
        if self.fast { Precision::Fast } else { Precision::Exact }
    }
}

/// Where results are kept.
#[derive(Debug, Args)]
pub struct DbArgs {
    /// The database of results; made if it does not exist.
    #[arg(long, value_name = "FILE", default_value = "eval.db")]
    pub db: PathBuf,
    /// Start anew, even if the same measurement lies there unfinished.
    #[arg(long)]
    pub fresh: bool,
}

/// A measurement under way. It holds the lock of its folder of unfinished work, so that no other process has the same.
pub struct Started {
    /// The database.
    pub db: Db,
    /// The run in it.
    pub run: Open,
    /// The folder.
    pub work: Work,
    file: PathBuf,
    /// Whether the database was made for this.
    is_new: bool,
}

impl DbArgs {
    /// Begins a measurement, or takes up an unfinished one.
    pub fn start(&self, key: &Key, model: &Identity) -> Outcome<Started> {
        let is_new = !self.db.exists();
        let db = Db::create(&self.db)?;
        let name = Digest::of(&canonical_json(key)).short();
        let work = Work::take(&self.db.with_file_name(format!("eval-{name}")), key, true)?;
        let run = db.begin(key, model, self.fresh)?;
        if !run.resumed {
            work.forget(&format!("{RESIDUAL}.json"));
        }
        Ok(Started { db, run, work, file: self.db.clone(), is_new })
    }
}

impl Started {
    /// Keeps what there is of a measurement that failed or was interrupted; nothing, if there is nothing.
    pub fn failed(self, seconds: f64, error: Box<dyn Failure>) -> Box<dyn Failure> {
        match self.keep(seconds) {
            Ok(()) => error,
            Err(other) => other,
        }
    }

    fn keep(self, seconds: f64) -> Outcome<()> {
        if self.work.is_worth_resuming() || !self.db.drop_empty(self.run.id)? {
            return Ok(self.db.spend(self.run.id, seconds)?);
        }
        self.work.remove()?;
        if self.is_new && self.db.runs()?.is_empty() {
            drop(self.db);
            // SQLite takes its log away itself. A file that stays is an empty database.
            let _ = std::fs::remove_file(&self.file);
        }
        Ok(())
    }

    /// Ends the measurement.
    pub fn finish(self, summary: &serde_json::Value, seconds: f64) -> Outcome<()> {
        self.db.finish(self.run.id, summary, seconds)?;
        Ok(self.work.remove()?)
    }
}

/// Most memory to hold.
#[derive(Debug, Args)]
pub struct BudgetArgs {
    /// Working memory, mapped weights left out. A smaller budget reads the weights more often.
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    pub memory: Bytes,
}

/// Draws how far an instrument is, on a terminal, and says what it will hold in memory.
pub struct Steps {
    bar: Mutex<Option<ProgressBar>>,
    what: Mutex<String>,
    start: Instant,
}

impl Steps {
    /// A bar for `what`.
    pub fn new(what: &str) -> Self {
        Self { bar: Mutex::new(None), what: Mutex::new(what.to_owned()), start: Instant::now() }
    }

    /// Says what is being done from now on.
    pub fn phase(&self, what: &str) {
        what.clone_into(&mut self.what.lock().expect("drawing does not panic"));
        if let Some(bar) = self.bar.lock().expect("drawing does not panic").as_ref() {
            bar.set_message(what.to_owned());
        }
    }

    /// Takes the bar away.
    pub fn end(&self) {
        if let Some(bar) = self.bar.lock().expect("drawing does not panic").take() {
            bar.finish_and_clear();
        }
    }

    /// Seconds since it was made.
    pub fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.end();
    }
}

impl Progress for Steps {
    fn need(&self, need: &Need) {
        print::say(&format!(
            "memory: {} for the residual stream, {} inside a layer; weights are mapped, at most {} at a time; {}",
            need.residual,
            need.inside,
            need.mapped,
            match need.batches {
                1 => "they are read once".to_owned(),
                n => format!("they are read {n} times"),
            }
        ));
    }

    fn at(&self, done: u64, total: u64, unit: &'static str) {
        if !std::io::stderr().is_terminal() {
            return;
        }
        let mut bar = self.bar.lock().expect("drawing does not panic");
        let bar = bar.get_or_insert_with(|| {
            let bar = ProgressBar::new(total);
            let template = "{msg:>12} [{bar:30}] {pos}/{len} {prefix}  {per_sec}  {eta} left";
            let style = ProgressStyle::with_template(template).expect("the template is a constant");
            bar.set_style(style.progress_chars("=> "));
            bar.set_message(self.what.lock().expect("drawing does not panic").clone());
            bar.set_position(done);
            // Work of an earlier process must not count into the rate.
            bar.reset_eta();
            bar
        });
        bar.set_prefix(unit);
        bar.set_length(total);
        bar.set_position(done);
    }
}

/// A number of nats: four digits, small ones with an exponent.
pub fn nats(value: f64) -> String {
    if value == 0.0 || value.abs() >= 1e-3 { format!("{value:.5}") } else { format!("{value:.2e}") }
}

/// `path` for people.
pub fn shown(path: &Path) -> String {
    path.display().to_string()
}
