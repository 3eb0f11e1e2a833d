//! Several sequences through a model in one pass.
//!
//! Linear layers read each weight once for all rows, whatever sequences they belong to. A row's bits do not depend on
//! the rows beside it, so each sequence gets exactly what it would get alone.

use super::layer::{Observer, Span};
use super::stream::batches;
use super::{Model, Pass, RuntimeError, State, Want, check_context, check_finite, check_tokens};
use crate::backend::cpu::Rotation;

/// What one sequence does in a pass.
#[derive(Debug)]
pub struct Part<'a> {
    /// What it carries.
    pub state: &'a mut State,
    /// Its next tokens.
    pub tokens: &'a [u32],
    /// Which of them get hidden states and logits.
    pub want: Want,
}

impl Part<'_> {
    /// How many of the last tokens get hidden states, and how many get logits.
    fn rows(&self) -> (usize, usize) {
        match self.want {
            Want::Nothing => (0, 0),
            Want::Last => (1, 1),
            Want::Hidden => (self.tokens.len(), 1),
            Want::All => (self.tokens.len(), self.tokens.len()),
        }
    }
}

impl Model {
    /// [`Model::forward`] for several sequences, as many at a time as a pass has rows for.
    ///
    /// # Errors
    /// As [`Model::forward`], and [`RuntimeError::NoTokens`] for a part without tokens, for the first part that is
    /// wrong. Unless weights make NaN or infinity, all states are as before then.
    pub fn forward_many(&self, parts: &mut [Part<'_>]) -> Result<Vec<Pass>, RuntimeError> {
        for part in &*parts {
            if part.tokens.is_empty() {
                return Err(RuntimeError::NoTokens);
            }
            check_tokens(self.config(), part.tokens)?;
            check_context(self.config(), part.state.tokens + part.tokens.len())?;
        }
        let lengths: Vec<usize> = parts.iter().map(|part| part.tokens.len()).collect();
        let (mut passes, mut rest) = (Vec::with_capacity(parts.len()), parts);
        for batch in batches(&lengths, self.rows_of_pass()) {
            let (these, others) = rest.split_at_mut(batch.len());
            rest = others;
            match these {
                [] => {}
                // It may be longer than a pass.
                [one] => passes.push(self.forward(one.state, one.tokens, one.want)?),
                several => passes.extend(self.together(several)?),
            }
        }
        Ok(passes)
    }

    /// Logits [rows, V] of final-normed hidden states [rows, H], the first of which is of token `first`.
    ///
    /// # Errors
    /// [`RuntimeError`] for weights that make NaN or infinity.
    pub fn logits(&self, hidden: &[f32], first: usize) -> Result<Vec<f32>, RuntimeError> {
        let logits = self.ends.head.logits(hidden);
        check_finite(&self.weights, &logits, first)?;
        Ok(logits)
    }

    fn together(&self, parts: &mut [Part<'_>]) -> Result<Vec<Pass>, RuntimeError> {
        let width = self.config().hidden;
        let x = self.hidden(parts, &mut ());
        let (mut residual, mut end) = (Vec::new(), 0);
        for part in &*parts {
            end += part.tokens.len() * width;
            residual.extend_from_slice(&x[end - part.rows().0 * width..end]);
        }
        let hidden = self.ends.head.norm(&residual);
        let (mut heads, mut end) = (Vec::new(), 0);
        for part in &*parts {
            let (rows, with_logits) = part.rows();
            end += rows * width;
            heads.extend_from_slice(&hidden[end - with_logits * width..end]);
        }
        let logits = self.ends.head.logits(&heads);
        let (mut hidden, mut logits) = (hidden.as_slice(), logits.as_slice());
        let take = |part: &Part<'_>| {
            let (rows, with_logits) = part.rows();
            let pass = Pass {
                hidden: hidden.split_off(..rows * width).expect("counted above").to_vec(),
                logits: logits
                    .split_off(..with_logits * self.config().vocab)
                    .expect("counted above")
                    .to_vec(),
            };
            check_finite(&self.weights, &pass.logits, part.state.tokens - with_logits)?;
            Ok(pass)
        };
        parts.iter().map(take).collect()
    }

    /// The residual stream after the last layer, [rows, H], of parts that share a pass.
    pub(super) fn hidden(&self, parts: &mut [Part<'_>], observer: &mut dyn Observer) -> Vec<f32> {
        let positions =
            parts.iter().flat_map(|part| part.state.tokens..part.state.tokens + part.tokens.len());
        let rotation = Rotation::new(&self.config().attention.rope, positions);
        let tokens: Vec<u32> = parts.iter().flat_map(|part| part.tokens).copied().collect();
        let mut x = self.ends.embed(&tokens);
        observer.residual(0, &x);
        for (i, layer) in self.layers.iter().enumerate() {
            let mut rows = 0..0;
            let spans = parts.iter_mut().map(|part| {
                rows = rows.end..rows.end + part.tokens.len();
                let position = part.state.tokens;
                Span { rows: rows.clone(), position, state: &mut part.state.layers[i] }
            });
            let mut spans: Vec<Span<'_>> = spans.collect();
            layer.forward(&self.cpu, &mut x, &mut spans, &rotation, observer);
            observer.residual(i + 1, &x);
        }
        for part in parts {
            part.state.tokens += part.tokens.len();
        }
        x
    }
}
