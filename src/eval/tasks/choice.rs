//! Multiple choice: which continuation the model finds likeliest.
//!
//! Three ways to compare choices c with ln p(c | prompt), n(c) tokens and b(c) bytes ([`super::prompt::Continuation`]):
//!
//! | metric | chosen |
//! | --- | --- |
//! | `sum` | argmax ln p(c) |
//! | `per_token` | argmax ln p(c) / n(c) |
//! | `per_byte` | argmax ln p(c) / b(c) |
//!
//! A suite's own metric is `sum` if all choices of the items that are taken are single tokens (then `per_token` is the
//! same), else `per_byte`, which does not depend on the tokenizer. All three are kept. Of equals the first is chosen, and the tie is noted.

use serde::{Deserialize, Serialize};

use super::prompt::{Context, Prompt, share};
use super::score::{Ask, scores};
use super::suite::ChoiceItem;
use super::{Detail, Ended, Frame, Run};
use crate::failure::Outcome;

/// How choices are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// By ln p.
    Sum,
    /// By ln p a token.
    PerToken,
    /// By ln p a byte.
    PerByte,
}

/// One value for each metric.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct ByMetric<T> {
    /// See [`Metric::Sum`].
    pub sum: T,
    /// See [`Metric::PerToken`].
    pub per_token: T,
    /// See [`Metric::PerByte`].
    pub per_byte: T,
}

impl<T: Copy> ByMetric<T> {
    /// The value of one.
    pub fn get(&self, metric: Metric) -> T {
        match metric {
            Metric::Sum => self.sum,
            Metric::PerToken => self.per_token,
            Metric::PerByte => self.per_byte,
        }
    }

    /// Another value for each.
    pub fn map<U>(self, mut change: impl FnMut(T) -> U) -> ByMetric<U> {
        ByMetric { sum: change(self.sum), per_token: change(self.per_token), per_byte: change(self.per_byte) }
    }
}

impl ByMetric<usize> {
    /// Sums.
    pub fn plus(self, other: Self) -> Self {
        Self {
            sum: self.sum + other.sum,
            per_token: self.per_token + other.per_token,
            per_byte: self.per_byte + other.per_byte,
        }
    }
}

/// What is kept of an item.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChoiceDetail {
    /// ln p of each choice, in nats.
    pub log_probs: Vec<f64>,
    /// Tokens of each.
    pub tokens: Vec<usize>,
    /// Bytes of each.
    pub bytes: Vec<usize>,
    /// The right one.
    pub answer: usize,
    /// The suite's own metric, which decides whether the item counts as right.
    pub metric: Metric,
    /// The choice of each metric.
    pub chosen: ByMetric<usize>,
    /// Whether another choice was as good.
    pub tied: ByMetric<bool>,
    /// Choices that change the prompt's own tokens.
    pub retokenized: usize,
}

impl ChoiceDetail {
    fn new(log_probs: Vec<f64>, item: &Encoded, metric: Metric) -> Self {
        let per = |divisors: &[usize]| -> Vec<f64> {
            log_probs.iter().zip(divisors).map(|(log_prob, by)| log_prob / *by as f64).collect()
        };
        let tokens: Vec<usize> = item.continuations.iter().map(Vec::len).collect();
        let values = [log_probs.clone(), per(&tokens), per(&item.bytes)];
        let [sum, per_token, per_byte] = values.map(|values| best(&values));
        let all = ByMetric { sum, per_token, per_byte };
        Self {
            tokens,
            bytes: item.bytes.clone(),
            answer: item.answer,
            metric,
            chosen: all.map(|(chosen, _)| chosen),
            tied: all.map(|(_, tied)| tied),
            retokenized: item.retokenized,
            log_probs,
        }
    }
}

/// The first of the largest values, and whether there are others.
fn best(values: &[f64]) -> (usize, bool) {
    let greatest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut equals = (0..values.len()).filter(|i| values[*i] == greatest);
    (equals.next().unwrap_or(0), equals.next().is_some())
}

/// An item as tokens.
struct Encoded {
    id: String,
    /// One for all choices, or one for each.
    prompts: Vec<Prompt>,
    continuations: Vec<Vec<u32>>,
    bytes: Vec<usize>,
    answer: usize,
    retokenized: usize,
}

impl Encoded {
    fn prompt_of(&self, choice: usize) -> usize {
        if self.prompts.len() == 1 { 0 } else { choice }
    }
}

fn encode(run: &Run<'_>, items: &[ChoiceItem]) -> Outcome<Vec<Encoded>> {
    let fit = run.fit;
    let made = fit.each(items, |item| {
        let contexts: Vec<Context<'_>> =
            item.prompts.iter().map(|text| Context::new(fit.tokenizer, text)).collect::<Result<_, _>>()?;
        let mut out = Encoded {
            id: item.id.clone(),
            prompts: Vec::new(),
            continuations: Vec::new(),
            bytes: Vec::new(),
            answer: item.answer,
            retokenized: 0,
        };
        for (choice, text) in item.choices.iter().enumerate() {
            let context = &contexts[if contexts.len() == 1 { 0 } else { choice }];
            let next = fit.follow(&item.id, choice, context, text)?;
            out.retokenized += usize::from(next.retokenized);
            out.bytes.push(next.bytes);
            out.continuations.push(next.tokens);
        }
        Ok((out, contexts.into_iter().map(|context| context.tokens).collect::<Vec<_>>()))
    })?;
    let (mut encoded, prompts): (Vec<Encoded>, Vec<Vec<Vec<u32>>>) = made.into_iter().unzip();
    let mut prompts = share(prompts.concat()).into_iter();
    for (out, item) in encoded.iter_mut().zip(items) {
        out.prompts = prompts.by_ref().take(item.prompts.len()).collect();
    }
    encoded.truncate(run.limit());
    Ok(encoded)
}

/// Scores the items that are not done.
pub(super) fn run(run: &mut Run<'_>, items: &[ChoiceItem]) -> Outcome<Ended> {
    let encoded = encode(run, run.taken(items))?;
    let single = encoded.iter().flat_map(|item| &item.continuations).all(|tokens| tokens.len() == 1);
    let metric = if single { Metric::Sum } else { Metric::PerByte };
    let pending: Vec<&Encoded> =
        encoded.iter().filter(|item| !run.is_done(Frame::Choice, &item.id)).collect();
    for group in pending.chunks(run.settings.batch) {
        if run.stopped() {
            return Ok(Ended::Stopped);
        }
        let prompts: Vec<&Prompt> = group.iter().flat_map(|item| &item.prompts).collect();
        let read = run.reader.read(&prompts)?;
        let (mut asks, mut at) = (Vec::new(), 0);
        for item in group {
            asks.extend(item.continuations.iter().enumerate().map(|(choice, tokens)| {
                let (state, logits) = &read[at + item.prompt_of(choice)];
                Ask { state, logits, tokens }
            }));
            at += item.prompts.len();
        }
        let scores = scores(run.model, &asks, run.settings.batch)?;
        let mut scores = scores.into_iter();
        for item in group {
            let of_item = scores.by_ref().take(item.continuations.len());
            let detail = ChoiceDetail::new(of_item.map(|score| score.log_prob).collect(), item, metric);
            let correct = detail.chosen.get(metric) == item.answer;
            run.give(Frame::Choice, &item.id, correct, Detail::Choice(detail))?;
        }
    }
    Ok(Ended::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(tokens: &[usize], bytes: &[usize]) -> Encoded {
        Encoded {
            id: "x".to_owned(),
            prompts: Vec::new(),
            continuations: tokens.iter().map(|n| vec![0; *n]).collect(),
            bytes: bytes.to_vec(),
            answer: 0,
            retokenized: 0,
        }
    }

    #[test]
    fn each_metric_chooses_by_its_own_length() {
        // -6; -8; -9 in sum: a token -3, -2, -3; a byte -1.5, -2, -0.9
        let detail =
            ChoiceDetail::new(vec![-6.0, -8.0, -9.0], &item(&[2, 4, 3], &[4, 4, 10]), Metric::PerByte);
        assert_eq!(detail.chosen, ByMetric { sum: 0, per_token: 1, per_byte: 2 });
        assert_eq!(detail.tied, ByMetric::default());
        assert_eq!(detail.chosen.get(Metric::PerToken), 1);
    }

    #[test]
    fn of_equals_the_first_is_chosen_and_the_tie_is_noted() {
        let detail = ChoiceDetail::new(vec![-4.0, -2.0, -2.0], &item(&[2, 1, 1], &[1, 1, 2]), Metric::Sum);
        assert_eq!(detail.chosen, ByMetric { sum: 1, per_token: 0, per_byte: 2 });
        assert_eq!(detail.tied, ByMetric { sum: true, per_token: true, per_byte: false });
    }
}
