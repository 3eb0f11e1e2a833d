//! Cloze: whether the model would write exactly the text that follows.
//!
//! An item is right if each token of the gold continuation is the likeliest one after those before it (LAMBADA's
//! accuracy, as lm-evaluation-harness counts it). Its probability is kept beside that: it moves long before an answer
//! flips. Bits per byte = -ln p / (ln 2 · bytes).

use serde::{Deserialize, Serialize};

use super::prompt::{Context, Continuation, Prompt, share};
use super::score::{Ask, Score, scores};
use super::suite::ClozeItem;
use super::{Detail, Ended, Frame, Run};
use crate::failure::Outcome;

/// How likely the gold continuation is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GoldDetail {
    /// ln p, in nats.
    pub log_prob: f64,
    /// Its tokens.
    pub tokens: usize,
    /// Its bytes.
    pub bytes: usize,
    /// Whether greedy decoding gives exactly it.
    pub greedy: bool,
    /// Whether it changes the prompt's own tokens.
    pub retokenized: bool,
}

impl GoldDetail {
    pub(super) fn new(gold: &Continuation, score: Score) -> Self {
        Self {
            log_prob: score.log_prob,
            tokens: gold.tokens.len(),
            bytes: gold.bytes,
            greedy: score.greedy,
            retokenized: gold.retokenized,
        }
    }
}

/// Scores the items that are not done.
pub(super) fn run(run: &mut Run<'_>, items: &[ClozeItem]) -> Outcome<Ended> {
    let (fit, items) = (run.fit, run.taken(items));
    let made = fit.each(items, |item| {
        let context = Context::new(fit.tokenizer, &item.prompt)?;
        let gold = fit.follow(&item.id, 0, &context, &item.gold)?;
        Ok((gold, context.tokens))
    })?;
    let (golds, tokens): (Vec<Continuation>, Vec<Vec<u32>>) = made.into_iter().unzip();
    let prompts = share(tokens);
    let pending: Vec<usize> =
        (0..items.len().min(run.limit())).filter(|i| !run.is_done(Frame::Raw, &items[*i].id)).collect();
    for group in pending.chunks(run.settings.batch) {
        if run.stopped() {
            return Ok(Ended::Stopped);
        }
        let these: Vec<&Prompt> = group.iter().map(|i| &prompts[*i]).collect();
        let read = run.reader.read(&these)?;
        let asks = read.iter().zip(group);
        let asks = asks.map(|((state, logits), i)| Ask { state, logits, tokens: &golds[*i].tokens });
        let scores = scores(run.model, &asks.collect::<Vec<_>>(), run.settings.batch)?;
        for (i, score) in group.iter().zip(scores) {
            let detail = GoldDetail::new(&golds[*i], score);
            run.give(Frame::Raw, &items[*i].id, score.greedy, Detail::Cloze(detail))?;
        }
    }
    Ok(Ended::Done)
}
