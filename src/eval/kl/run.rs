//! Scores a candidate against a dump.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde::Serialize;

use super::{Position, positions};
use crate::backend::cpu::Cpu;
use crate::eval::dump::{Dump, Speaker};
use crate::eval::forward::Forward;
use crate::eval::identity::Identity;
use crate::eval::work::Work;
use crate::eval::{EvalError, Progress};
use crate::failure::Outcome;
use crate::runtime::{Head, Model, Want, Weights};
use crate::text::Tokenizer;
use crate::units::Bytes;

/// Positions that are scored together on the decode path.
const TOGETHER: usize = 64;

/// The model that is scored, by either of two paths.
pub enum Candidate {
    /// Layer by layer, all sequences at once: for models of any size.
    Streamed(Box<Weights>, Arc<Cpu>),
    /// Token by token with a cache, as when it generates.
    Decoding(Box<Model>),
}

/// How to score.
pub struct Scoring<'a> {
    /// What the teacher says about the dump's sequences.
    pub speaker: &'a Speaker<'a>,
    /// Most bytes to hold, mapped weights left out.
    pub budget: Bytes,
    /// Where unfinished batches are kept.
    pub work: Option<&'a Work>,
    /// Sequences that are scored already.
    pub done: usize,
    /// Raised to stop.
    pub stop: &'a AtomicBool,
    /// Who is told.
    pub progress: &'a dyn Progress,
}

/// Where the time went, seconds.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Timings {
    /// In the candidate's layers.
    pub layers_s: f64,
    /// In the heads of candidate and teacher.
    pub heads_s: f64,
    /// In the divergence over the vocabulary.
    pub divergence_s: f64,
    /// Positions scored in this run.
    pub positions: usize,
}

/// Refuses a candidate that does not speak the dump's language.
///
/// # Errors
/// [`EvalError::OtherVocabulary`], [`EvalError::OtherTokenizer`], [`EvalError::ShortContext`].
pub fn check(dump: &Dump, weights: &Weights, candidate: &Identity) -> Result<(), EvalError> {
    let teacher = &dump.record.teacher;
    let (found, needed) = (weights.decoder.vocab, teacher.vocab);
    if found != needed {
        return Err(EvalError::OtherVocabulary { found, needed });
    }
    if let Some(needed) = teacher.tokenizer_sha256 {
        candidate.check_tokenizer(needed)?;
    }
    let needed = dump.sequences.iter().map(|s| s.tokens.len()).max().unwrap_or(0);
    match weights.decoder.context {
        Some(found) if needed > found => Err(EvalError::ShortContext { found, needed }),
        _ => Ok(()),
    }
}

/// The dump's sequences, as this candidate reads them: llama.cpp puts the first token that the vocabulary asks for
/// in the place of a chunk's first, without a word in the file.
fn sequences(dump: &Dump, dir: &Path) -> Outcome<Vec<Vec<u32>>> {
    let mut sequences: Vec<Vec<u32>> = dump.sequences.iter().map(|s| s.tokens.clone()).collect();
    if dump.record.text.is_none() {
        let first = Tokenizer::open(dir)?.encode("", true)?;
        if let Some(first) = first.first() {
            sequences.iter_mut().for_each(|tokens| tokens[0] = *first);
        }
    }
    Ok(sequences)
}

/// Scores every position that the teacher spoke about; `take` is given each sequence's number and positions.
///
/// # Errors
/// [`EvalError::Budget`], [`EvalError::Interrupted`], those of the runtime and of `take`.
pub fn score(
    candidate: &Candidate,
    scoring: &Scoring<'_>,
    take: &mut dyn FnMut(usize, &[Position]) -> Outcome<()>,
) -> Outcome<Timings> {
    match candidate {
        Candidate::Streamed(weights, cpu) => {
            let mut scorer = Scorer::new(scoring, cpu);
            scorer.stream(weights, take)?;
            Ok(scorer.timings)
        }
        Candidate::Decoding(model) => {
            let mut scorer = Scorer::new(scoring, model.cpu());
            scorer.decode(model, take)?;
            Ok(scorer.timings)
        }
    }
}

struct Scorer<'a> {
    scoring: &'a Scoring<'a>,
    cpu: &'a Arc<Cpu>,
    /// Where each sequence begins in the token stream.
    starts: Vec<usize>,
    timings: Timings,
}

impl<'a> Scorer<'a> {
    fn new(scoring: &'a Scoring<'a>, cpu: &'a Arc<Cpu>) -> Self {
        let mut at = 0;
        let lengths = scoring.speaker.dump.sequences.iter().map(|s| s.tokens.len());
        let mut next = |len| {
            at += len;
            at - len
        };
        let starts = lengths.map(&mut next).collect();
        Self { scoring, cpu, starts, timings: Timings::default() }
    }

    /// Compares the candidate's logits after positions `first..` of sequence `number`.
    fn compare(&mut self, number: usize, first: usize, logits: &[f32], rows: usize) -> Vec<Position> {
        let tokens = &self.scoring.speaker.dump.sequences[number].tokens;
        let targets: Vec<Option<u32>> = (first..first + rows).map(|at| tokens.get(at + 1).copied()).collect();
        let clock = Instant::now();
        let at = self.starts[number] + first;
        let said = self.scoring.speaker.say(at..at + rows);
        self.timings.heads_s += clock.elapsed().as_secs_f64();
        let clock = Instant::now();
        let found = positions(self.cpu, &said, logits, &targets);
        self.timings.divergence_s += clock.elapsed().as_secs_f64();
        self.timings.positions += rows;
        found
    }

    fn stream(
        &mut self,
        weights: &Weights,
        take: &mut dyn FnMut(usize, &[Position]) -> Outcome<()>,
    ) -> Outcome<()> {
        let scoring = self.scoring;
        let sequences = sequences(scoring.speaker.dump, &weights.dir)?;
        let forward = Forward {
            weights,
            cpu: self.cpu,
            sequences: &sequences,
            budget: scoring.budget,
            work: scoring.work,
            stop: scoring.stop,
            progress: scoring.progress,
        };
        scoring.progress.need(&forward.need()?);
        let head = Head::open(weights, self.cpu)?;
        let together = forward.rows_of_logits();
        let mut clock = Instant::now();
        forward.run(scoring.done, &mut |batch, residual| {
            self.timings.layers_s += clock.elapsed().as_secs_f64();
            let mut row = 0;
            for number in batch {
                let scored = scoring.speaker.dump.scored[number].clone();
                let mut found = Vec::with_capacity(scored.len());
                for first in scored.clone().step_by(together) {
                    let rows = together.min(scored.end - first);
                    let clock = Instant::now();
                    let logits = head.logits_of(residual, row + first..row + first + rows);
                    self.timings.heads_s += clock.elapsed().as_secs_f64();
                    found.extend(self.compare(number, first, &logits, rows));
                }
                row += sequences[number].len();
                take(number, &found)?;
            }
            clock = Instant::now();
            Ok(())
        })
    }

    fn decode(
        &mut self,
        model: &Model,
        take: &mut dyn FnMut(usize, &[Position]) -> Outcome<()>,
    ) -> Outcome<()> {
        let scoring = self.scoring;
        let sequences = sequences(scoring.speaker.dump, &model.weights().dir)?;
        let total = sequences.iter().map(Vec::len).sum::<usize>() as u64;
        let mut at = 0;
        for (number, tokens) in sequences.iter().enumerate() {
            let scored = scoring.speaker.dump.scored[number].clone();
            let mut found = Vec::with_capacity(scored.len());
            if number >= scoring.done {
                let mut state = model.state();
                let (mut logits, mut first) = (Vec::new(), scored.start);
                for (i, token) in tokens[..scored.end].iter().enumerate() {
                    if scoring.stop.load(Ordering::Relaxed) {
                        let done = format!("{number} of {} sequences", sequences.len());
                        return Err(EvalError::Interrupted(done).into());
                    }
                    let clock = Instant::now();
                    let pass = model.forward(&mut state, &[*token], Want::Last)?;
                    self.timings.layers_s += clock.elapsed().as_secs_f64();
                    if i >= scored.start {
                        logits.extend(pass.logits);
                    }
                    let rows = (i + 1).saturating_sub(first);
                    if rows == TOGETHER || (rows > 0 && i + 1 == scored.end) {
                        found.extend(self.compare(number, first, &logits, rows));
                        logits.clear();
                        first = i + 1;
                    }
                    if i % 16 == 0 {
                        scoring.progress.at(at + i as u64, total, "tokens");
                    }
                }
                take(number, &found)?;
            }
            at += tokens.len() as u64;
        }
        Ok(())
    }
}
