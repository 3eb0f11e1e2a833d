//! From a prompt to a continuation, token by token.
//!
//! A [`Session`] keeps one sequence: what the model has seen of it, and the logits that decide its next token. With a
//! draft head each step guesses some tokens, takes them all through the trunk in one pass, and keeps those that the
//! sampler would have chosen anyway. The trunk's bits do not depend on how many tokens share a pass, and the sampler
//! draws once for each token that is kept; so drafting changes the time and nothing else.

mod text;

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

pub use text::Answer;

use crate::failure::{Exit, Failure};
use crate::runtime::{DraftState, Drafted, Model, RuntimeError, State, Want};
use crate::sample::{SampleError, Sampler};

/// Why a continuation broke off.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum GenerateError {
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error(transparent)]
    Sample(#[from] SampleError),
}

impl Failure for GenerateError {
    fn exit(&self) -> Exit {
        match self {
            GenerateError::Runtime(error) => error.exit(),
            GenerateError::Sample(error) => error.exit(),
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            GenerateError::Runtime(error) => error.help(),
            GenerateError::Sample(error) => error.help(),
        }
    }
}

/// Why a continuation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Finish {
    /// The model gave an end token.
    EndToken,
    /// A stop string came up.
    StopString,
    /// The most tokens that were asked for are there.
    Length,
    /// The model's context is full.
    ContextFull,
    /// Whoever was given the tokens wanted no more.
    Interrupted,
}

/// Counts of guesses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Drafting {
    /// Passes through the trunk.
    pub passes: usize,
    /// Tokens guessed.
    pub guessed: usize,
    /// Guesses that were kept: tokens that cost no pass of their own.
    pub accepted: usize,
}

/// How long the parts took.
#[derive(Debug, Clone, Copy, Default)]
pub struct Timings {
    /// Tokens of the prompt that were computed.
    pub prompt_tokens: usize,
    /// For the prompt.
    pub prompt: Duration,
    /// Tokens after the first, which the prompt's own pass decides.
    pub decoded_tokens: usize,
    /// For them.
    pub decode: Duration,
}

/// What a continuation is made by.
pub struct Request<'a> {
    /// Chooses tokens.
    pub sampler: &'a mut Sampler,
    /// Most tokens to make.
    pub max_tokens: usize,
    /// Tokens that end it; they are not part of it.
    pub ends: &'a [u32],
    /// Tokens to guess at a time with the draft head; 0 goes without it.
    pub draft: usize,
    /// Asked between parts of a long prompt: whether to break off.
    pub stop: &'a dyn Fn() -> bool,
}

/// The result of [`Session::generate`].
#[derive(Debug, Clone)]
pub struct Continuation {
    /// Its tokens, the end token left out.
    pub tokens: Vec<u32>,
    /// The end token, if one came.
    pub end: Option<u32>,
    /// Why it ended. [`Finish::Interrupted`] covers stop strings, which only [`Session::answer`] knows of.
    pub finish: Finish,
    /// How the guesses did.
    pub drafting: Drafting,
    /// How long it took.
    pub timings: Timings,
}

/// One sequence on a model.
#[derive(Debug)]
pub struct Session<'a> {
    model: &'a Model,
    state: State,
    draft: Option<DraftState>,
    /// Tokens that the trunk has seen.
    seen: Vec<u32>,
    /// Final hidden states of the trunk's last tokens, [rows, H], that the draft head has not been given.
    pending: Vec<f32>,
}

impl<'a> Session<'a> {
    /// Before the first token.
    pub fn new(model: &'a Model) -> Self {
        Self { model, state: model.state(), draft: None, seen: Vec::new(), pending: Vec::new() }
    }

    /// Bytes of caches.
    pub fn bytes(&self) -> u64 {
        self.state.bytes()
    }

    /// Continues `prompt`, the whole sequence from its first token on. What the session has seen of it is not
    /// computed again, if it is a true beginning of the prompt.
    ///
    /// `take` is given every token as soon as it is decided, and may break off.
    ///
    /// # Errors
    /// A prompt the model refuses; logits the sampler refuses. The session then starts anew.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        request: Request<'_>,
        take: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Continuation, GenerateError> {
        self.model.check_prompt(prompt)?;
        let result = self.run(prompt, request, take);
        if result.is_err() {
            self.reset();
        }
        result
    }

    fn reset(&mut self) {
        *self = Self::new(self.model);
    }

    fn run(
        &mut self,
        prompt: &[u32],
        request: Request<'_>,
        take: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Continuation, GenerateError> {
        let Request { sampler, max_tokens, ends, draft, stop } = request;
        let model = self.model;
        if draft > 0 {
            model.draft()?;
        }
        // The last token is always computed: its logits are not kept.
        if !(prompt.starts_with(&self.seen) && self.seen.len() < prompt.len())
            || (draft > 0) != self.draft.is_some()
        {
            self.reset();
        }
        if draft > 0 && self.draft.is_none() {
            self.draft = Some(model.draft()?.state(model));
        }
        sampler.see(prompt);
        let start = Instant::now();
        let fresh = &prompt[self.seen.len()..];
        let logits = self.read(fresh, stop)?;
        let mut out = Continuation {
            tokens: Vec::new(),
            end: None,
            finish: Finish::Length,
            drafting: Drafting::default(),
            timings: Timings { prompt_tokens: fresh.len(), prompt: start.elapsed(), ..Timings::default() },
        };
        let start = Instant::now();
        let room = model.config().context.map_or(usize::MAX, |context| context - prompt.len());
        let mut emit = |out: &mut Continuation, token: u32| {
            if ends.contains(&token) {
                (out.end, out.finish) = (Some(token), Finish::EndToken);
                return ControlFlow::Break(());
            }
            out.tokens.push(token);
            let full = out.tokens.len() > room;
            let enough = out.tokens.len() >= max_tokens;
            let wanted = take(token);
            if full || enough || wanted.is_break() {
                out.finish = match wanted {
                    ControlFlow::Break(()) => Finish::Interrupted,
                    ControlFlow::Continue(()) if enough => Finish::Length,
                    ControlFlow::Continue(()) => Finish::ContextFull,
                };
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        };
        let Some(logits) = logits else {
            out.finish = Finish::Interrupted;
            return Ok(out);
        };
        if max_tokens == 0 {
            return Ok(out);
        }
        let mut next = sampler.choose(&logits)?;
        let mut go_on = emit(&mut out, next);
        while go_on.is_continue() {
            let left = room - out.tokens.len();
            (next, go_on) = match draft.min(left) {
                0 => self.step(next, sampler, &mut out, &mut emit)?,
                guesses => self.drafted(next, guesses, sampler, &mut out, &mut emit)?,
            };
        }
        out.timings.decode = start.elapsed();
        out.timings.decoded_tokens = (out.tokens.len() + usize::from(out.end.is_some())).saturating_sub(1);
        Ok(out)
    }

    /// Takes more of the prompt through the trunk, part by part; the logits of its last token, or none if `stop`
    /// broke it off.
    ///
    /// The parts are those of [`Model::forward`], and the draft head takes each one's hidden states before the next,
    /// so that they do not pile up.
    fn read(&mut self, tokens: &[u32], stop: &dyn Fn() -> bool) -> Result<Option<Vec<f32>>, GenerateError> {
        let drafting = self.draft.is_some();
        let want = if drafting { Want::Hidden } else { Want::Last };
        let mut logits = None;
        for (i, part) in tokens.chunks(self.model.rows_of_pass()).enumerate() {
            if stop() {
                return Ok(None);
            }
            if i > 0 && drafting {
                self.feed(part[0])?;
            }
            let pass = self.model.forward(&mut self.state, part, want)?;
            if drafting {
                self.pending.extend(pass.hidden);
            }
            self.seen.extend_from_slice(part);
            logits = Some(pass.logits);
        }
        Ok(logits)
    }

    /// One token through the trunk.
    fn step(
        &mut self,
        token: u32,
        sampler: &mut Sampler,
        out: &mut Continuation,
        emit: &mut Emit<'_>,
    ) -> Result<(u32, ControlFlow<()>), GenerateError> {
        let pass = self.model.forward(&mut self.state, &[token], Want::Last)?;
        if self.draft.is_some() {
            self.pending.extend(pass.hidden);
        }
        self.seen.push(token);
        out.drafting.passes += 1;
        let next = sampler.choose(&pass.logits)?;
        Ok((next, emit(out, next)))
    }

    /// `token` and up to `guesses` guessed ones through the trunk; keeps what the sampler agrees with.
    fn drafted(
        &mut self,
        token: u32,
        guesses: usize,
        sampler: &mut Sampler,
        out: &mut Continuation,
        emit: &mut Emit<'_>,
    ) -> Result<(u32, ControlFlow<()>), GenerateError> {
        let model = self.model;
        let mut tried = vec![token];
        tried.extend(self.guess(token, guesses)?);
        self.state.begin_trial();
        let pass = model.forward(&mut self.state, &tried, Want::All)?;
        let (width, vocab) = (model.config().hidden, model.config().vocab);
        out.drafting.passes += 1;
        out.drafting.guessed += tried.len() - 1;

        let (mut next, mut go_on) = (token, ControlFlow::Continue(()));
        let mut kept = 0;
        for (i, logits) in pass.logits.chunks_exact(vocab).enumerate() {
            kept = i + 1;
            next = sampler.choose(logits)?;
            go_on = emit(out, next);
            let agreed = tried.get(i + 1) == Some(&next);
            if go_on.is_break() || !agreed {
                break;
            }
        }
        out.drafting.accepted += kept - 1;
        self.state.keep(model.cpu(), kept);
        self.seen.extend_from_slice(&tried[..kept]);
        self.pending.extend_from_slice(&pass.hidden[..kept * width]);
        Ok((next, go_on))
    }

    /// Gives the draft head the trunk's pending hidden states, each with the token after it; the last is `token`.
    fn feed(&mut self, token: u32) -> Result<Drafted, GenerateError> {
        let (model, head) = (self.model, self.model.draft()?);
        let state = self.draft.as_mut().expect("a session that guesses has the head's state");
        let rows = self.pending.len() / model.config().hidden;
        let mut next = self.seen[self.seen.len() + 1 - rows..].to_vec();
        next.push(token);
        let drafted = head.forward(model, state, &next, &self.pending)?;
        self.pending.clear();
        Ok(drafted)
    }

    /// Up to `count` tokens after `token`, each the draft head's best.
    fn guess(&mut self, token: u32, count: usize) -> Result<Vec<u32>, GenerateError> {
        let mut drafted = self.feed(token)?;
        let (model, head) = (self.model, self.model.draft()?);
        let state = self.draft.as_mut().expect("a session that guesses has the head's state");
        let settled = state.tokens();
        let mut guesses = Vec::new();
        let width = model.config().hidden;
        loop {
            let logits = &drafted.logits;
            let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]).then(b.cmp(a)));
            guesses.push(best.expect("a vocabulary has tokens") as u32);
            if guesses.len() == count {
                break;
            }
            let last = drafted.hidden[drafted.hidden.len() - width..].to_vec();
            drafted = head.forward(model, state, &guesses[guesses.len() - 1..], &last)?;
        }
        // Rows of guesses are replaced by rows of the trunk's own hidden states.
        state.truncate(settled);
        Ok(guesses)
    }
}

type Emit<'a> = dyn FnMut(&mut Continuation, u32) -> ControlFlow<()> + 'a;
