//! Many sequences through a model that may not fit in memory.
//!
//! Sequences are taken in batches. A batch goes through one layer after the other, so that memory holds its residual
//! stream and one layer's work, never the model; each batch reads all weights once. Every minute the residual stream
//! is kept in the folder of unfinished work, so that a kill loses minutes.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::work::{RESIDUAL, Work};
use super::{EvalError, Progress};
use crate::backend::cpu::Cpu;
use crate::failure::Outcome;
use crate::runtime::{Stream, Weights};
use crate::units::Bytes;

/// Bytes of logits that are worked on at a time, and most rows: more make no kernel faster.
const LOGITS: u64 = 64 << 20;
const MOST_ROWS: u64 = 128;

/// Time between two copies of the residual stream.
const KEEP_EVERY: Duration = Duration::from_secs(60);

/// A pass over all sequences.
pub struct Forward<'a> {
    /// The model.
    pub weights: &'a Weights,
    /// Where it runs.
    pub cpu: &'a Arc<Cpu>,
    /// Tokens of each sequence.
    pub sequences: &'a [Vec<u32>],
    /// Most bytes to hold, mapped weights left out.
    pub budget: Bytes,
    /// Where unfinished batches are kept.
    pub work: Option<&'a Work>,
    /// Raised to stop.
    pub stop: &'a AtomicBool,
    /// Who is told.
    pub progress: &'a dyn Progress,
}

/// What a pass holds in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Need {
    /// Batches; each reads all weights.
    pub batches: usize,
    /// Residual stream of the largest batch.
    pub residual: Bytes,
    /// Work inside a layer, and on logits.
    pub inside: Bytes,
    /// Mapped pages of the largest layer or head, which the system may drop at any time.
    pub mapped: Bytes,
}

/// Is given a batch: its sequences, and their residual stream [rows, H].
pub type Take<'a> = dyn FnMut(Range<usize>, &[f32]) -> Outcome<()> + 'a;

/// Which layers of which batch a kept residual stream has behind it.
type Kept = (Range<usize>, usize);

impl Forward<'_> {
    /// Consecutive sequences that share a batch.
    fn batches(&self) -> Result<Vec<Range<usize>>, EvalError> {
        let each = Stream::bytes_per_token(self.weights).0;
        let fixed = self.inside().0;
        let longest = self.sequences.iter().map(Vec::len).max().unwrap_or(0) as u64;
        let rows = self.budget.0.saturating_sub(fixed) / each;
        if rows < longest {
            return Err(EvalError::Budget { budget: self.budget, needed: Bytes(fixed + longest * each) });
        }
        let (mut batches, mut start, mut held) = (Vec::new(), 0, 0);
        for (i, tokens) in self.sequences.iter().enumerate() {
            if held + tokens.len() as u64 > rows {
                batches.push(start..i);
                (start, held) = (i, 0);
            }
            held += tokens.len() as u64;
        }
        batches.push(start..self.sequences.len());
        Ok(batches)
    }

    /// Of a layer, and of three matrices of logits: two models', and a copy on its way.
    fn inside(&self) -> Bytes {
        let rows = self.sequences.iter().map(Vec::len).sum();
        let logits = 4 * (self.rows_of_logits().min(rows) * self.weights.decoder.vocab) as u64;
        Bytes(Stream::bytes_inside(self.weights, rows).0 + 3 * logits)
    }

    /// Rows whose logits are worked on together.
    pub fn rows_of_logits(&self) -> usize {
        (LOGITS / (4 * self.weights.decoder.vocab as u64)).clamp(1, MOST_ROWS) as usize
    }

    /// What the pass will hold.
    ///
    /// # Errors
    /// [`EvalError::Budget`].
    pub fn need(&self) -> Result<Need, EvalError> {
        let batches = self.batches()?;
        let rows = |batch: &Range<usize>| self.sequences[batch.clone()].iter().map(Vec::len).sum::<usize>();
        let largest = batches.iter().map(rows).max().unwrap_or(0) as u64;
        Ok(Need {
            batches: batches.len(),
            residual: Bytes(largest * Stream::bytes_per_token(self.weights).0),
            inside: self.inside(),
            mapped: self.weights.largest_part(),
        })
    }

    /// Takes the sequences from number `done` on through the model and gives `take` each batch: the sequences, and
    /// their residual stream [rows, H] after the last layer.
    ///
    /// # Errors
    /// [`EvalError::Budget`], [`EvalError::Interrupted`], those of the runtime, and those of `take`.
    pub fn run(&self, done: usize, take: &mut Take<'_>) -> Outcome<()> {
        let (batches, layers) = (self.batches()?, self.weights.decoder.layers.len());
        let total = (batches.len() * layers) as u64;
        for (number, batch) in batches.iter().enumerate().filter(|(_, batch)| batch.end > done) {
            // With another budget an earlier run may have ended inside this batch.
            let batch = batch.start.max(done)..batch.end;
            let mut stream = Stream::new(self.weights, self.cpu.clone(), &self.sequences[batch.clone()])?;
            if let Some((layer, residual)) = self.kept(&batch)
                && residual.len() == stream.residual().len()
            {
                stream.resume(layer, residual);
            }
            let mut kept = Instant::now();
            while stream.layer() < layers {
                self.progress.at((number * layers + stream.layer()) as u64, total, "layers");
                if self.stop.load(Ordering::Relaxed) {
                    self.keep(&batch, &stream)?;
                    let done = format!(
                        "batch {} of {}, {} of {layers} layers",
                        number + 1,
                        batches.len(),
                        stream.layer()
                    );
                    return Err(EvalError::Interrupted(done).into());
                }
                if kept.elapsed() > KEEP_EVERY {
                    self.keep(&batch, &stream)?;
                    kept = Instant::now();
                }
                stream.step(&mut ())?;
            }
            self.progress.at(((number + 1) * layers) as u64, total, "layers");
            take(batch, stream.residual())?;
        }
        Ok(())
    }

    fn keep(&self, batch: &Range<usize>, stream: &Stream<'_>) -> Result<(), EvalError> {
        match self.work {
            Some(work) if stream.layer() > 0 => {
                work.keep::<Kept>(RESIDUAL, &(batch.clone(), stream.layer()), stream.residual())
            }
            _ => Ok(()),
        }
    }

    /// Layers done and residual stream of this batch, if they were kept.
    fn kept(&self, batch: &Range<usize>) -> Option<(usize, Vec<f32>)> {
        let ((of, _), _): (Kept, serde_json::Value) = self.work?.read(&format!("{RESIDUAL}.json"))?;
        // Reading the stream is worth the time only if it is this batch's.
        (of == *batch).then_some(())?;
        let ((_, layer), residual) = self.work?.kept::<Kept>(RESIDUAL)?;
        Some((layer, residual))
    }
}
