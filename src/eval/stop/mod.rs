//! The stop probe: does a model still begin its answers, and end them?
//!
//! A case is a prompt with a reference answer: what the teacher writes greedily, or what a dump's text holds. Both models
//! are read along the reference, and at every row with the end tokens E and logits z
//!
//! ```text
//! P(end) = Σ_{e in E} softmax(z)[e]          margin = max_{e in E} z[e] - max_{v not in E} z[v]
//! ```
//!
//! The row after the prompt is the *start*: an end token there makes the answer empty. The row after the answer's last
//! token is the *end*, if an end token follows it. Then the candidate writes greedily by itself, and its answer is
//! *empty* (nothing but white space), *missed its stop* (ran to the last token allowed, where the reference ended) or
//! *looped* ([`crate::eval::tasks::generative::loop_period`]).
//!
//! Mean KL hardly sees any of this: starts and ends are one position each of some hundred.

pub mod cases;
pub mod gate;

pub use cases::{Case, Prompt};
pub use gate::{Limits, Summary, summarize};

use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use crate::failure::Outcome;
use crate::generate::{Answer, Finish, Request, Session};
use crate::numeric::divergence::log_sum;
use crate::numeric::math::exp64;
use crate::runtime::{Model, Want};
use crate::sample::{Sampler, Sampling};
use crate::text::Tokenizer;

/// Version of the instrument.
pub const VERSION: u32 = 1;

/// Rows of logits held at a time.
const TOGETHER: usize = 32;

/// How much a row wants to end.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// P(end).
    pub p_end: f64,
    /// The best end token's logit less the best other's: positive if the model would stop here.
    pub margin: f64,
}

impl Row {
    /// Of a row of logits; none if one is not finite.
    pub fn of(logits: &[f32], ends: &[u32], isa: crate::isa::Isa) -> Option<Self> {
        let (sum, _) = log_sum(logits, isa)?;
        let p_end = ends.iter().map(|id| exp64(f64::from(logits[*id as usize]) - sum)).sum();
        let best = |wanted: bool| {
            let of = logits.iter().enumerate().filter(|(id, _)| ends.contains(&(*id as u32)) == wanted);
            of.map(|(_, logit)| *logit).fold(f32::NEG_INFINITY, f32::max)
        };
        Some(Self { p_end, margin: f64::from(best(true)) - f64::from(best(false)) })
    }
}

/// One model along a reference answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Along {
    /// After the prompt.
    pub start: Row,
    /// After the answer's last token, if an end token follows it.
    pub end: Option<Row>,
    /// Rows inside the answer where the model would stop.
    pub early: usize,
}

/// What a model writes by itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Written {
    /// Tokens, the end token left out.
    pub tokens: Vec<u32>,
    /// The text.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
    /// Nothing but white space.
    pub empty: bool,
    /// Period of the repetition that it ends in.
    pub loop_period: Option<usize>,
}

/// What is kept of a case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Found {
    /// The reference ended, by an end token or a blank line.
    pub ended: bool,
    /// Tokens of the reference answer.
    pub reference_tokens: usize,
    /// The reference answer is empty.
    pub reference_empty: bool,
    /// The reference answer loops.
    pub reference_loops: bool,
    /// The teacher along the reference.
    pub teacher: Along,
    /// The candidate along it.
    pub candidate: Along,
    /// The candidate by itself.
    pub written: Written,
}

/// A model that writes and is read.
#[derive(Debug, Clone, Copy)]
pub struct Speaking<'a> {
    /// Its layers.
    pub model: &'a Model,
    /// Its tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Tokens that end its answers.
    pub ends: &'a [u32],
    /// Most tokens of an answer.
    pub max_tokens: usize,
    /// Raised to stop.
    pub stop: &'a AtomicBool,
}

impl Speaking<'_> {
    /// What the model writes after `prompt`: greedy, up to an end token, a blank line if `raw`, or the most tokens.
    /// None if the flag was raised.
    ///
    /// # Errors
    /// Those of the runtime and the tokenizer.
    pub fn write(&self, prompt: &[u32], raw: bool) -> Outcome<Option<Written>> {
        let stops: &[&str] = if raw { &["\n\n"] } else { &[] };
        let mut sampler = Sampler::new(Sampling::greedy())?;
        let request = Request {
            sampler: &mut sampler,
            max_tokens: self.max_tokens,
            ends: self.ends,
            draft: 0,
            stop: &|| self.stop.load(Ordering::Relaxed),
        };
        let mut session = Session::new(self.model);
        let Answer { text, finish, continuation } =
            session.answer(prompt, request, Some(self.tokenizer), stops, &mut |_| Ok(true))?;
        if finish == Finish::Interrupted {
            return Ok(None);
        }
        let tokens = continuation.tokens;
        let loop_period = crate::eval::tasks::generative::loop_period(&tokens);
        Ok(Some(Written { empty: text.trim().is_empty(), tokens, text, finish, loop_period }))
    }

    /// Reads the model along a case.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn along(&self, case: &Case) -> Outcome<Along> {
        let model = self.model;
        let mut state = model.state();
        let (last, before) = case.prompt.split_last().expect("a case has a prompt");
        if !before.is_empty() {
            model.forward(&mut state, before, Want::Nothing)?;
        }
        let rows: Vec<u32> = std::iter::once(*last).chain(case.answer.iter().copied()).collect();
        let mut found = Vec::with_capacity(rows.len());
        for part in rows.chunks(TOGETHER) {
            let logits = model.forward(&mut state, part, Want::All)?.logits;
            let of = logits.chunks_exact(model.config().vocab);
            found.extend(of.map(|row| {
                Row::of(row, self.ends, model.cpu().isa)
                    .expect("the runtime refuses logits that are not finite")
            }));
        }
        Ok(Along::of(&found, case.by_end_token))
    }
}

impl Along {
    /// From the rows of a reference: the one after the prompt, then one after each token of the answer.
    pub fn of(rows: &[Row], by_end_token: bool) -> Self {
        let inside = if rows.len() > 2 { &rows[1..rows.len() - 1] } else { &[] };
        let end = rows.last().copied().filter(|_| by_end_token && rows.len() > 1);
        Self { start: rows[0], end, early: inside.iter().filter(|row| row.margin > 0.0).count() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    #[test]
    fn a_row_wants_to_end_as_much_as_its_end_tokens_weigh() {
        // Probabilities 1/8, 1/2, 1/8, 1/4.
        let logits: Vec<f32> = [1f32, 4.0, 1.0, 2.0].iter().map(|p| p.ln()).collect();
        let row = Row::of(&logits, &[0, 3], Isa::best()).unwrap();
        assert!((row.p_end - 0.375).abs() < 1e-6, "{row:?}");
        assert!((row.margin - (0.5f64).ln()).abs() < 1e-6, "ln 2 - ln 4");
        assert!(Row::of(&logits, &[1], Isa::best()).unwrap().margin > 0.0);
        assert_eq!(Row::of(&[0.0, f32::NAN], &[0], Isa::best()), None);
    }

    #[test]
    fn start_inside_and_end_are_told_apart() {
        let row = |margin: f64| Row { p_end: 0.5, margin };
        let rows = [row(-1.0), row(2.0), row(-3.0), row(4.0)];
        let along = Along::of(&rows, true);
        assert_eq!((along.start.margin, along.end.unwrap().margin, along.early), (-1.0, 4.0, 1));
        assert_eq!(Along::of(&rows, false).end, None, "a blank line is no end token");
        let empty = Along::of(&rows[..1], true);
        assert_eq!(
            (empty.end, empty.early),
            (None, 0),
            "the start of an empty answer is not its end as well"
        );
    }
}
