//! Is B better than A, worse, the same for all that matters, or is that not to be known from these results?
//!
//! Two runs are joined by the id of the item ([`items`]) or document ([`kl`]), in any order; what only one of
//! them has is counted and named. The first run is the baseline A, every other one is an arm B, and the p
//! values of all arms are adjusted together by Holm's method, those of difference and those of equivalence
//! apart.
//!
//! | verdict | when |
//! | --- | --- |
//! | `equivalent` | adjusted p of the equivalence tests at most 0.05: inside the margin, real or not |
//! | `better`, `worse` | else, adjusted p of "no difference" at most 0.05 |
//! | `undecided` | else |
//!
//! Pure: that both runs used the same suite, text and tokens is for the caller to know, by their digests.

mod items;
mod kl;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::failure::{Exit, Failure};
use crate::stats::ALPHA;

pub use items::{ItemComparison, Nesting, PowerLine, Proportion, items};
pub use kl::{DocumentKl, KlComparison, kl};

/// Results of one model.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a, T> {
    /// What people call it.
    pub name: &'a str,
    /// Id of an item or document, and what came of it; each id once, in any order.
    pub results: &'a [(String, T)],
}

/// One word on B against A.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// B is better.
    Better,
    /// B is worse.
    Worse,
    /// The difference is inside the margin.
    Equivalent,
    /// These results do not say.
    Undecided,
}

/// Ids that only one run has, in order. Nothing of them is in any number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// Only A has these.
    pub only_in_a: Vec<String>,
    /// Only B has these.
    pub only_in_b: Vec<String>,
}

/// Why two runs cannot be compared.
#[derive(Debug, thiserror::Error, PartialEq)]
#[allow(missing_docs)] // the messages say what each field is
pub enum CompareError {
    #[error("run `{run}` holds `{id}` more than once")]
    Duplicate { run: String, id: String },
    #[error("runs `{a}` and `{b}` have no id in common: they hold {a_ids} and {b_ids} others")]
    NothingInCommon { a: String, b: String, a_ids: usize, b_ids: usize },
    #[error("document `{document}`: run `{a}` scored {a_tokens} tokens, run `{b}` {b_tokens}")]
    Tokens { document: String, a: String, b: String, a_tokens: u64, b_tokens: u64 },
    #[error(
        "run `{run}`, document `{document}`: a KL sum of {sum} over {tokens} tokens; a finite sum over at \
         least one token is needed"
    )]
    Document { run: String, document: String, sum: f64, tokens: u64 },
}

impl Failure for CompareError {
    fn exit(&self) -> Exit {
        match self {
            Self::NothingInCommon { .. } | Self::Tokens { .. } => Exit::Request,
            Self::Duplicate { .. } | Self::Document { .. } => Exit::Input,
        }
    }

    fn help(&self) -> Option<String> {
        let text = match self {
            Self::Duplicate { .. } => "ids of a suite or text must be unique; rename them and run it again",
            Self::NothingInCommon { .. } => "compare runs of the same suite or teacher dump",
            Self::Tokens { .. } => {
                "only the same tokens can be paired: score both against one dump; if one run has non-finite \
                 values, that model is broken and needs no comparison"
            }
            Self::Document { .. } => {
                "see the run's count of non-finite values: the model computes NaN or infinity"
            }
        };
        Some(text.to_owned())
    }
}

/// Two runs by id.
struct Joined<'a, T> {
    /// Id, A's result and B's, in order of ids.
    both: Vec<(&'a str, T, T)>,
    left_out: LeftOut,
}

fn join<'a, T: Copy>(a: Run<'a, T>, b: Run<'a, T>) -> Result<Joined<'a, T>, CompareError> {
    let (in_a, in_b) = (by_id(a)?, by_id(b)?);
    let both: Vec<(&str, T, T)> =
        in_a.iter().filter_map(|(&id, &left)| Some((id, left, *in_b.get(id)?))).collect();
    if both.is_empty() {
        let (a, b) = (a.name.to_owned(), b.name.to_owned());
        return Err(CompareError::NothingInCommon { a, b, a_ids: in_a.len(), b_ids: in_b.len() });
    }
    let only = |ids: &BTreeMap<&str, T>, other: &BTreeMap<&str, T>| {
        ids.keys().filter(|id| !other.contains_key(*id)).map(|id| (*id).to_owned()).collect()
    };
    Ok(Joined { both, left_out: LeftOut { only_in_a: only(&in_a, &in_b), only_in_b: only(&in_b, &in_a) } })
}

fn by_id<T: Copy>(run: Run<'_, T>) -> Result<BTreeMap<&str, T>, CompareError> {
    let mut map = BTreeMap::new();
    for (id, result) in run.results {
        if map.insert(id.as_str(), *result).is_some() {
            return Err(CompareError::Duplicate { run: run.name.to_owned(), id: id.clone() });
        }
    }
    Ok(map)
}

/// From adjusted p values.
fn verdict(difference_p: f64, equivalence_p: Option<f64>, b_is_better: bool) -> Verdict {
    match (equivalence_p.is_some_and(|p| p <= ALPHA), difference_p <= ALPHA) {
        (true, _) => Verdict::Equivalent,
        (false, true) if b_is_better => Verdict::Better,
        (false, true) => Verdict::Worse,
        (false, false) => Verdict::Undecided,
    }
}

/// How a conclusion begins.
fn opening(verdict: Verdict, a: &str, b: &str) -> String {
    match verdict {
        Verdict::Better => format!("`{b}` is better than `{a}`"),
        Verdict::Worse => format!("`{b}` is worse than `{a}`"),
        Verdict::Equivalent => format!("`{b}` is equivalent to `{a}`"),
        Verdict::Undecided => format!("undecided between `{b}` and `{a}`"),
    }
}

/// `p = 0.012`, `p < 0.001`, and that it was adjusted.
fn p_text(p: f64, arms: usize) -> String {
    let value = if p < 0.001 { "p < 0.001".to_owned() } else { format!("p = {p:.3}") };
    if arms > 1 { format!("{value} (Holm over {arms} arms)") } else { value }
}

/// A share as points or percent, without trailing zeros: 0.02 is `2`.
fn hundredfold(share: f64) -> String {
    format!("{}", (share * 1e5).round() / 1e3)
}

/// How a conclusion ends: what was left out, if anything.
fn left_out_text(left_out: &LeftOut, what: &str) -> String {
    let (a, b) = (left_out.only_in_a.len(), left_out.only_in_b.len());
    if a + b == 0 { String::new() } else { format!("; left out: {a} {what} only in A, {b} only in B") }
}
