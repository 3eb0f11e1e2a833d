//! Prompts as tokens, and reading them once where they begin alike.
//!
//! The few-shot examples before the questions of a suite are often the same text. A prompt's *shared* tokens are the
//! longest beginning that it has in common with the prompt before it or after it in the file, cut to a multiple of
//! [`STEP`] so that neighbours agree on it; they go through the model apart from the rest, and the state after them is
//! kept for the next prompt that begins so. Where a prompt is cut depends on the suite and the tokenizer alone, never
//! on what was read before, so results do not depend on batches, limits or where a run was resumed. (For a model with
//! DeltaNet layers the last bits do depend on the cut itself.)
//!
//! The tokens of a continuation are those of lm-evaluation-harness 0.4 (`TemplateLM._encode_pair`): white space at the
//! prompt's end goes to the continuation; then `encode(prompt + continuation)[len(encode(prompt))..]`, read after
//! `encode(prompt)`. Where the encoding of both together does not begin with that of the prompt, the boundary was cut in
//! another way than the text alone would be; that is counted as *retokenized*. Special tokens are added as the
//! tokenizer's own post-processor says (the harness adds none unless asked).

use std::time::Duration;

use crate::runtime::{Model, Part, RuntimeError, State, Want};
use crate::text::{ChatTemplate, Conversation, Json, Moment, TextError, Tokenizer};

/// Shared beginnings are multiples of this many tokens.
pub const STEP: usize = 64;

/// What chat templates are told is now: 2026-01-01T00:00:00 UTC.
const DATE: Duration = Duration::from_secs(1_767_225_600);

/// A prompt, ready to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// All its tokens.
    pub tokens: Vec<u32>,
    /// How many of the first are read apart, and kept.
    pub shared: usize,
}

/// The tokens of `question` as the user's message in the chat template, up to where the answer begins.
///
/// # Errors
/// Those of template and tokenizer.
pub fn chat(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    question: &str,
    no_thinking: bool,
) -> Result<Vec<u32>, TextError> {
    let mut conversation = Conversation::new(vec![Conversation::message("user", question)]);
    // A template that prints the date must not make tomorrow's prompt another one.
    conversation.now = Moment::since_epoch(DATE);
    if no_thinking {
        conversation.set("enable_thinking", Json::from(false))?;
    }
    tokenizer.encode(&template.render(&conversation)?, false)
}

/// Finds the shared tokens of prompts that follow each other in a suite.
pub fn share(prompts: Vec<Vec<u32>>) -> Vec<Prompt> {
    let common = |a: &[u32], b: &[u32]| {
        let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
        // The last token must be left, for its logits.
        same.min(a.len() - 1).min(b.len() - 1) / STEP * STEP
    };
    let with_next: Vec<usize> = prompts.windows(2).map(|pair| common(&pair[0], &pair[1])).collect();
    let shared = |i: usize| {
        let before = i.checked_sub(1).map_or(0, |before| with_next[before]);
        before.max(with_next.get(i).copied().unwrap_or(0))
    };
    let shared: Vec<usize> = (0..prompts.len()).map(shared).collect();
    prompts.into_iter().zip(shared).map(|(tokens, shared)| Prompt { tokens, shared }).collect()
}

/// What continuations follow.
#[derive(Debug)]
pub struct Context<'a> {
    tokenizer: &'a Tokenizer,
    text: &'a str,
    /// Tokens of the text without the white space at its end.
    pub tokens: Vec<u32>,
}

/// The tokens of a continuation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Continuation {
    /// Those after the prompt's; none if the text adds none.
    pub tokens: Vec<u32>,
    /// Whether the prompt's own tokens are others when the two are encoded together.
    pub retokenized: bool,
    /// UTF-8 bytes of the text without the white space at its start (or with it, if there is nothing else).
    pub bytes: usize,
}

impl<'a> Context<'a> {
    /// Encodes a prompt that is not blank.
    pub fn new(tokenizer: &'a Tokenizer, text: &'a str) -> Result<Self, TextError> {
        Ok(Self { tokenizer, text, tokens: tokenizer.encode(text.trim_end(), true)? })
    }

    /// Encodes what follows it.
    pub fn followed_by(&self, text: &str) -> Result<Continuation, TextError> {
        let whole = self.tokenizer.encode(&format!("{}{text}", self.text), true)?;
        let trimmed = text.trim_start();
        Ok(Continuation {
            retokenized: !whole.starts_with(&self.tokens),
            tokens: whole.get(self.tokens.len()..).unwrap_or_default().to_vec(),
            bytes: if trimmed.is_empty() { text.len() } else { trimmed.len() },
        })
    }
}

/// Reads prompts.
#[derive(Debug)]
pub struct Reader<'a> {
    model: &'a Model,
    /// The beginning that was read last, and the state after it.
    kept: Option<(Vec<u32>, State)>,
    /// Tokens computed.
    pub computed: usize,
    /// Tokens that a kept state saved.
    pub saved: usize,
}

impl<'a> Reader<'a> {
    /// Has read nothing.
    pub fn new(model: &'a Model) -> Self {
        Self { model, kept: None, computed: 0, saved: 0 }
    }

    /// The state after each prompt, and the logits of its last token.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn read(&mut self, prompts: &[&Prompt]) -> Result<Vec<(State, Vec<f32>)>, RuntimeError> {
        let mut states = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            states.push(self.beginning(prompt)?);
        }
        let mut parts = Vec::with_capacity(prompts.len());
        for (state, prompt) in states.iter_mut().zip(prompts) {
            parts.push(Part { state, tokens: &prompt.tokens[prompt.shared..], want: Want::Last });
        }
        self.computed += parts.iter().map(|part| part.tokens.len()).sum::<usize>();
        let passes = self.model.forward_many(&mut parts)?;
        Ok(states.into_iter().zip(passes.into_iter().map(|pass| pass.logits)).collect())
    }

    fn beginning(&mut self, prompt: &Prompt) -> Result<State, RuntimeError> {
        let shared = &prompt.tokens[..prompt.shared];
        if shared.is_empty() {
            return Ok(self.model.state());
        }
        if let Some((tokens, state)) = &self.kept
            && tokens == shared
        {
            self.saved += shared.len();
            return Ok(state.clone());
        }
        let mut state = self.model.state();
        self.model.forward(&mut state, shared, Want::Nothing)?;
        self.computed += shared.len();
        self.kept = Some((shared.to_vec(), state.clone()));
        Ok(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(prompts: &[(usize, u32, usize)]) -> Vec<usize> {
        // (length of the beginning, its token, length of the rest)
        let tokens = |(i, &(begin, token, rest)): (usize, &(usize, u32, usize))| {
            let mut tokens = vec![token; begin];
            tokens.extend(std::iter::repeat_n(1000 + i as u32, rest));
            tokens
        };
        share(prompts.iter().enumerate().map(tokens).collect()).iter().map(|p| p.shared).collect()
    }

    #[test]
    fn neighbours_share_whole_steps_of_what_they_have_in_common() {
        assert_eq!(shared(&[(200, 7, 30), (200, 7, 9), (200, 7, 80)]), [192, 192, 192]);
        assert_eq!(shared(&[(63, 7, 30), (63, 7, 9)]), [0, 0]);
        assert_eq!(shared(&[(100, 7, 9), (100, 7, 9), (100, 8, 9), (100, 8, 9)]), [64; 4]);
        assert_eq!(shared(&[(500, 7, 9)]), [0], "a prompt alone shares nothing");
        assert_eq!(shared(&[]), [0usize; 0]);
    }

    #[test]
    fn a_prompt_keeps_its_last_token_for_itself() {
        assert_eq!(shared(&[(128, 7, 0), (128, 7, 5)]), [64, 64]);
        assert_eq!(shared(&[(129, 7, 0), (129, 7, 0)]), [128, 128]);
        assert_eq!(shared(&[(1, 7, 0), (1, 7, 0)]), [0, 0]);
    }
}
