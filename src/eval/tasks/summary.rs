//! Counts over results.

use std::collections::BTreeMap;

use serde::Serialize;

use super::choice::{ByMetric, Metric};
use super::cloze::GoldDetail;
use super::generative::GenerativeDetail;
use super::{Detail, Frame, ItemResult, TaskError};
use crate::generate::Finish;

/// One suite in one frame.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Name of the suite.
    pub suite: String,
    /// How its items were put.
    pub frame: Frame,
    /// Items with a result.
    pub items: usize,
    /// Those that are right.
    pub correct: usize,
    /// correct / items.
    pub accuracy: f64,
    /// Of multiple choice items.
    pub choice: Option<ChoiceSummary>,
    /// Of generative items.
    pub generative: Option<GenerativeSummary>,
    /// Of gold continuations: of cloze items, and of generative ones that have some.
    pub gold: Option<GoldSummary>,
}

/// What only multiple choice has.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChoiceSummary {
    /// The suite's own metric, which `correct` is by.
    pub metric: Metric,
    /// The share of right items by each metric.
    pub accuracy: ByMetric<f64>,
    /// Items with a tie for the best, by each metric.
    pub tied: ByMetric<usize>,
    /// Items with a choice that changes the prompt's own tokens.
    pub retokenized: usize,
}

/// What only generative items have.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct GenerativeSummary {
    /// Nothing but white space before the end.
    pub empty: usize,
    /// Ended in a repetition loop.
    pub loops: usize,
    /// Ended by the most tokens asked for.
    pub length: usize,
    /// Ended because the context was full.
    pub context_full: usize,
    /// No answer found.
    pub no_answer: usize,
    /// Tokens written.
    pub tokens: usize,
}

/// How likely gold continuations are.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct GoldSummary {
    /// How many.
    pub items: usize,
    /// Those that greedy decoding gives.
    pub greedy: usize,
    /// Σ ln p, in nats, summed in the order of the ids.
    pub log_prob: f64,
    /// Their tokens.
    pub tokens: usize,
    /// Their bytes.
    pub bytes: usize,
    /// -Σ ln p / (ln 2 · Σ bytes).
    pub bits_per_byte: f64,
    /// Those that change the prompt's own tokens.
    pub retokenized: usize,
}

impl GoldSummary {
    fn add(&mut self, gold: &GoldDetail) {
        self.items += 1;
        self.greedy += usize::from(gold.greedy);
        self.log_prob += gold.log_prob;
        self.tokens += gold.tokens;
        self.bytes += gold.bytes;
        self.bits_per_byte = -self.log_prob / (std::f64::consts::LN_2 * self.bytes as f64);
        self.retokenized += usize::from(gold.retokenized);
    }
}

impl GenerativeSummary {
    fn add(&mut self, detail: &GenerativeDetail) {
        self.empty += usize::from(detail.empty);
        self.loops += usize::from(detail.loop_period.is_some());
        self.length += usize::from(detail.finish == Finish::Length);
        self.context_full += usize::from(detail.finish == Finish::ContextFull);
        self.no_answer += usize::from(detail.answer.is_none());
        self.tokens += detail.tokens.len();
    }
}

/// A summary of each suite and frame that `results` hold, in the order of their names. The order of results does not
/// matter.
///
/// # Errors
/// [`TaskError::Stored`] for a detail that this version does not know.
pub fn summaries(results: &[ItemResult]) -> Result<Vec<Summary>, TaskError> {
    let mut groups: BTreeMap<(&str, Frame), BTreeMap<&str, &ItemResult>> = BTreeMap::new();
    for result in results {
        groups.entry((&result.suite, result.frame)).or_default().insert(&result.item, result);
    }
    groups.into_iter().map(|((suite, frame), group)| summary(suite, frame, group)).collect()
}

fn summary(suite: &str, frame: Frame, group: BTreeMap<&str, &ItemResult>) -> Result<Summary, TaskError> {
    let items = group.len();
    let mut choice: Option<(Metric, ByMetric<usize>, ByMetric<usize>, usize)> = None;
    let (mut generative, mut gold): (Option<GenerativeSummary>, Option<GoldSummary>) = (None, None);
    for result in group.values() {
        let detail = serde_json::from_value(result.detail.clone())
            .map_err(|problem| TaskError::Stored { item: result.item.clone(), problem })?;
        match detail {
            Detail::Choice(detail) => {
                let (_, right, tied, retokenized) =
                    choice.get_or_insert((detail.metric, ByMetric::default(), ByMetric::default(), 0));
                *right = right.plus(detail.chosen.map(|chosen| usize::from(chosen == detail.answer)));
                *tied = tied.plus(detail.tied.map(usize::from));
                *retokenized += usize::from(detail.retokenized > 0);
            }
            Detail::Generative(detail) => {
                generative.get_or_insert_default().add(&detail);
                if let Some(detail) = &detail.gold {
                    gold.get_or_insert_default().add(detail);
                }
            }
            Detail::Cloze(detail) => gold.get_or_insert_default().add(&detail),
        }
    }
    let share = |count: usize| count as f64 / items as f64;
    let correct = group.values().filter(|result| result.correct == Some(true)).count();
    Ok(Summary {
        suite: suite.to_owned(),
        frame,
        items,
        correct,
        accuracy: share(correct),
        choice: choice.map(|(metric, right, tied, retokenized)| ChoiceSummary {
            metric,
            accuracy: right.map(share),
            tied,
            retokenized,
        }),
        generative,
        gold,
    })
}
