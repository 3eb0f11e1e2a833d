//! Generative items: what the model writes, and whether the answer in it is right.
//!
//! | frame | prompt | ends at |
//! | --- | --- | --- |
//! | raw | `raw_prompt` | an end token, a blank line (`\n\n`), a string of the item's `stop` |
//! | chat | `question` as the user's message in the model's chat template | an end token |
//!
//! Both end at the most tokens asked for, too, and when the context is full. Decoding is greedy: the likeliest token,
//! of equals the one with the lowest id. Several items are decoded at once, a token of each in one pass; each gets what
//! it would get alone. The text leaves out special tokens and what ended it.
//!
//! Two failures have a name and a count of their own, because they are not wrong answers but broken behaviour:
//!
//! - *empty*: the text holds nothing but white space.
//! - *loop*: the last tokens repeat. With t the tokens and n their number, there is a period p such that
//!   `t[i] = t[i - p]` for the last L - p tokens, where L = max(48, 3 p) <= n: at least 48 tokens are covered, and at
//!   least three rounds. The smallest such p is kept.

use serde::{Deserialize, Serialize};

use super::answer::{Number, Rule};
use super::cloze::GoldDetail;
use super::prompt::{self, Context, Continuation, Prompt, share};
use super::score::{Ask, scores};
use super::suite::GenerativeItem;
use super::{Detail, Ended, Frame, Run, no_frame};
use crate::failure::Outcome;
use crate::generate::Finish;
use crate::runtime::{Part, State, Want};
use crate::sample::{Sampler, Sampling};
use crate::text::{ChatTemplate, EndTokens, StopMatcher, Streamer};

/// Ends the raw frame.
const BLANK_LINE: &str = "\n\n";
/// Tokens that a loop covers at least.
const LOOP_TOKENS: usize = 48;
/// Rounds that a loop has at least.
const LOOP_ROUNDS: usize = 3;

/// What is kept of an item.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerativeDetail {
    /// What the model wrote.
    pub text: String,
    /// Its tokens, the end token left out.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// The end token, if one came.
    pub end_token: Option<u32>,
    /// Whether there is nothing but white space.
    pub empty: bool,
    /// The period of the repetition it ends in, if it does.
    pub loop_period: Option<usize>,
    /// The answer found, if any.
    pub answer: Option<Number>,
    /// The rule that decided which; see [`super::answer`].
    pub rule: Option<Rule>,
    /// The right answer.
    pub expected: Number,
    /// How likely the item's `gold` is, in the raw frame.
    pub gold: Option<GoldDetail>,
}

/// The period of the repetition that `tokens` end in; see the head of this module.
pub fn loop_period(tokens: &[u32]) -> Option<usize> {
    (1..=tokens.len() / LOOP_ROUNDS).find(|&p| {
        let covered = LOOP_TOKENS.max(LOOP_ROUNDS * p);
        covered <= tokens.len() && {
            let last = &tokens[tokens.len() - covered..];
            last[p..] == last[..covered - p]
        }
    })
}

/// An item in one frame.
struct Encoded<'a> {
    item: &'a GenerativeItem,
    prompt: Prompt,
    stops: Vec<&'a str>,
    gold: Option<Continuation>,
}

fn raw<'a>(run: &Run<'_>, items: &'a [GenerativeItem]) -> Outcome<Vec<Encoded<'a>>> {
    let fit = run.fit;
    let made = fit.each(items, |item| {
        let text = item.raw_prompt.as_deref().ok_or_else(|| no_frame(fit.suite, Frame::Raw))?;
        let prompt = fit.tokenizer.encode(text, true)?;
        fit.check_length(&item.id, &prompt, 0)?;
        // Reading the suite has refused a gold after a prompt that ends in white space, so both have these tokens.
        let gold = match &item.gold {
            Some(gold) => Some(fit.follow(&item.id, 0, &Context::new(fit.tokenizer, text)?, gold)?),
            None => None,
        };
        Ok((prompt, gold))
    })?;
    let (prompts, golds): (Vec<_>, Vec<_>) = made.into_iter().unzip();
    let encoded = items.iter().zip(share(prompts)).zip(golds);
    let with_stops = |((item, prompt), gold): ((&'a GenerativeItem, _), _)| {
        let stops = item.stop.iter().map(String::as_str).chain([BLANK_LINE]).collect();
        Encoded { item, prompt, stops, gold }
    };
    Ok(encoded.map(with_stops).collect())
}

fn chat<'a>(run: &Run<'_>, items: &'a [GenerativeItem]) -> Outcome<Vec<Encoded<'a>>> {
    let (fit, no_thinking) = (run.fit, run.settings.no_thinking);
    let template = ChatTemplate::open(run.dir).map_err(|error| run.no_template(error))?;
    let prompts = fit.each(items, |item| {
        let question = item.question.as_deref().ok_or_else(|| no_frame(fit.suite, Frame::Chat))?;
        let prompt = prompt::chat(fit.tokenizer, &template, question, no_thinking)?;
        fit.check_length(&item.id, &prompt, 0)?;
        Ok(prompt)
    })?;
    let encoded = items.iter().zip(share(prompts));
    Ok(encoded.map(|(item, prompt)| Encoded { item, prompt, stops: Vec::new(), gold: None }).collect())
}

/// An item that is being decoded.
struct Lane<'a> {
    at: usize,
    state: State,
    stream: Streamer<'a>,
    matcher: StopMatcher,
    text: String,
    tokens: Vec<u32>,
    finish: Option<Finish>,
    end_token: Option<u32>,
    gold: Option<GoldDetail>,
}

/// What decides when a lane ends.
struct Limits {
    ends: Vec<u32>,
    max_tokens: usize,
    context: usize,
}

impl Lane<'_> {
    /// Takes the token that was chosen.
    fn take(&mut self, token: u32, limits: &Limits) -> Outcome<()> {
        if limits.ends.contains(&token) {
            (self.end_token, self.finish) = (Some(token), Some(Finish::EndToken));
            return Ok(());
        }
        self.tokens.push(token);
        self.text.push_str(self.matcher.push(self.stream.push(token)?));
        self.finish = if self.matcher.stopped() {
            Some(Finish::StopString)
        } else if self.tokens.len() >= limits.max_tokens {
            Some(Finish::Length)
        } else if self.state.tokens() >= limits.context {
            Some(Finish::ContextFull)
        } else {
            None
        };
        Ok(())
    }

    fn result(mut self, item: &GenerativeItem) -> Outcome<GenerativeDetail> {
        self.text.push_str(self.matcher.push(&self.stream.finish()?));
        let mut finish = self.finish.unwrap_or(Finish::Interrupted);
        // Text that was held back for a later token may complete a stop string.
        if self.matcher.stopped() {
            finish = Finish::StopString;
        } else {
            self.text.push_str(&self.matcher.finish());
        }
        let found = item.extract.find(&self.text);
        Ok(GenerativeDetail {
            empty: self.text.trim().is_empty(),
            loop_period: loop_period(&self.tokens),
            text: self.text,
            tokens: self.tokens,
            finish,
            end_token: self.end_token,
            answer: found.answer,
            rule: found.rule,
            expected: item.answer.clone(),
            gold: self.gold,
        })
    }
}

/// Runs the items that are not done, frame by frame.
pub(super) fn run(run: &mut Run<'_>, items: &[GenerativeItem], frames: &[Frame]) -> Outcome<Ended> {
    // Everything is checked before the first token is computed.
    let items = run.taken(items);
    let mut work = Vec::new();
    for &frame in frames {
        let encoded = if frame == Frame::Chat { chat(run, items)? } else { raw(run, items)? };
        work.push((frame, encoded));
    }
    let config = run.model.config();
    let limits = Limits {
        ends: EndTokens::read(run.dir, Some(run.tokenizer), config.vocab)?.ids_ascending().collect(),
        max_tokens: run.settings.max_tokens,
        context: config.context.unwrap_or(usize::MAX),
    };
    for (frame, encoded) in work {
        if decode(run, frame, &encoded, &limits)? == Ended::Stopped {
            return Ok(Ended::Stopped);
        }
    }
    Ok(Ended::Done)
}

fn decode(run: &mut Run<'_>, frame: Frame, encoded: &[Encoded<'_>], limits: &Limits) -> Outcome<Ended> {
    let mut sampler = Sampler::new(Sampling::greedy())?;
    let pending = (0..encoded.len().min(run.limit())).filter(|i| !run.is_done(frame, &encoded[*i].item.id));
    let mut pending = pending.collect::<Vec<_>>().into_iter();
    let mut lanes: Vec<Lane<'_>> = Vec::new();
    loop {
        if run.stopped() {
            return Ok(Ended::Stopped);
        }
        let fresh: Vec<usize> = pending.by_ref().take(run.settings.batch - lanes.len()).collect();
        if !fresh.is_empty() {
            lanes.extend(start(run, encoded, &fresh, limits, &mut sampler)?);
        } else if !lanes.is_empty() {
            step(run, &mut lanes, limits, &mut sampler)?;
        } else {
            return Ok(Ended::Done);
        }
        for lane in lanes.extract_if(.., |lane| lane.finish.is_some()) {
            let item = encoded[lane.at].item;
            let detail = lane.result(item)?;
            let correct = detail.answer.as_ref() == Some(&item.answer);
            run.give(frame, &item.id, correct, Detail::Generative(detail))?;
        }
    }
}

/// Reads prompts; a lane for each, with its first token.
fn start<'a>(
    run: &mut Run<'a>,
    encoded: &[Encoded<'_>],
    fresh: &[usize],
    limits: &Limits,
    sampler: &mut Sampler,
) -> Outcome<Vec<Lane<'a>>> {
    let prompts: Vec<&Prompt> = fresh.iter().map(|at| &encoded[*at].prompt).collect();
    let read = run.reader.read(&prompts)?;
    let golds: Vec<&Continuation> = fresh.iter().filter_map(|at| encoded[*at].gold.as_ref()).collect();
    let asks = read.iter().zip(fresh).filter_map(|((state, logits), at)| {
        let tokens = &encoded[*at].gold.as_ref()?.tokens;
        Some(Ask { state, logits, tokens })
    });
    let scores = scores(run.model, &asks.collect::<Vec<_>>(), run.settings.batch)?;
    let mut details = golds.into_iter().zip(scores).map(|(gold, score)| GoldDetail::new(gold, score));
    let mut lanes = Vec::new();
    for ((state, logits), &at) in read.into_iter().zip(fresh) {
        let Encoded { stops, gold, .. } = &encoded[at];
        let mut lane = Lane {
            at,
            state,
            stream: Streamer::new(run.tokenizer, true),
            matcher: StopMatcher::new(stops)?,
            text: String::new(),
            tokens: Vec::new(),
            finish: None,
            end_token: None,
            gold: gold.as_ref().and_then(|_| details.next()),
        };
        lane.take(sampler.choose(&logits)?, limits)?;
        lanes.push(lane);
    }
    Ok(lanes)
}

/// One token more for each lane.
fn step(run: &mut Run<'_>, lanes: &mut [Lane<'_>], limits: &Limits, sampler: &mut Sampler) -> Outcome<()> {
    let last = |lane: &Lane<'_>| *lane.tokens.last().expect("a lane that goes on has a token");
    let tokens: Vec<u32> = lanes.iter().map(last).collect();
    let mut parts = Vec::with_capacity(lanes.len());
    for (lane, token) in lanes.iter_mut().zip(&tokens) {
        parts.push(Part { state: &mut lane.state, tokens: std::slice::from_ref(token), want: Want::Last });
    }
    let passes = run.model.forward_many(&mut parts)?;
    run.decoded += tokens.len();
    for (lane, pass) in lanes.iter_mut().zip(passes) {
        lane.take(sampler.choose(&pass.logits)?, limits)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_covers_48_tokens_and_three_rounds() {
        let noise = |n: usize| (0..n as u32).map(|i| 5000 + i);
        let tail = |period: usize, covered: usize| (0..covered).map(move |i| (i % period) as u32);
        let tokens = |before: usize, period: usize, covered: usize| -> Vec<u32> {
            noise(before).chain(tail(period, covered)).collect()
        };
        for (before, period, covered, expected) in [
            (0, 1, 48, Some(1)),
            (0, 1, 47, None),
            (10, 1, 47, None),
            (10, 1, 48, Some(1)),
            (10, 7, 48, Some(7)),
            (10, 7, 47, None),
            (0, 16, 48, Some(16)),
            (9, 17, 50, None),
            (9, 17, 51, Some(17)),
            (3, 60, 180, Some(60)),
            (3, 60, 179, None),
            (300, 1, 0, None),
        ] {
            assert_eq!(
                loop_period(&tokens(before, period, covered)),
                expected,
                "{before} {period} {covered}"
            );
        }
        assert_eq!(loop_period(&[]), None);
    }

    #[test]
    fn a_loop_that_was_left_is_none() {
        let mut tokens = vec![1; 100];
        assert_eq!(loop_period(&tokens), Some(1));
        tokens.push(2);
        assert_eq!(loop_period(&tokens), None);
    }
}
