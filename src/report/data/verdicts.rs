//! Whether a model is better or worse than another, by [`crate::eval::compare`].

use super::Model;
use crate::eval::compare::{self, CompareError, DocumentKl, Run, Verdict as Word};

/// The largest difference of accuracy that does not matter: two points.
pub const ITEM_MARGIN: f64 = 0.02;

/// One model against the baseline.
#[derive(Debug)]
pub struct Verdict {
    /// Position of the model.
    pub model: usize,
    /// `better`, `worse`, `equivalent` or `undecided`.
    pub word: &'static str,
    /// The same with its numbers.
    pub conclusion: String,
}

/// All models of a group against one.
#[derive(Debug)]
pub struct Verdicts {
    /// Position of the one.
    pub baseline: usize,
    /// The others, or why they cannot be compared.
    pub arms: Result<Vec<Verdict>, String>,
}

/// Answers to the same items: all of `runs` against number `at`.
pub fn items(models: &[Model], runs: &[(usize, &[(String, bool)])], at: usize) -> Verdicts {
    against(models, runs, at, |base, arms| {
        let found = compare::items(base, arms, ITEM_MARGIN)?;
        Ok(found.into_iter().map(|c| (c.verdict, c.conclusion)).collect())
    })
}

/// Divergences over the same documents: all of `runs` against number `at`.
pub fn kl(models: &[Model], runs: &[(usize, &[(String, DocumentKl)])], at: usize) -> Verdicts {
    against(models, runs, at, |base, arms| {
        let found = compare::kl(base, arms, None)?;
        Ok(found.into_iter().map(|c| (c.verdict, c.conclusion)).collect())
    })
}

fn against<T: Copy>(
    models: &[Model],
    runs: &[(usize, &[(String, T)])],
    at: usize,
    compare: impl FnOnce(Run<'_, T>, &[Run<'_, T>]) -> Result<Vec<(Word, String)>, CompareError>,
) -> Verdicts {
    let (baseline, results) = runs[at];
    let others: Vec<(usize, &[(String, T)])> =
        runs.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, run)| *run).collect();
    let named = |model: usize, results| Run { name: &models[model].label, results };
    let arms: Vec<Run<'_, T>> = others.iter().map(|(model, results)| named(*model, results)).collect();
    let arms = compare(named(baseline, results), &arms)
        .map(|found| {
            let verdict = |((model, _), (word, conclusion)): (&(usize, _), (Word, String))| Verdict {
                model: *model,
                word: match word {
                    Word::Better => "better",
                    Word::Worse => "worse",
                    Word::Equivalent => "equivalent",
                    Word::Undecided => "undecided",
                },
                conclusion,
            };
            others.iter().zip(found).map(verdict).collect()
        })
        .map_err(|error| error.to_string());
    Verdicts { baseline, arms }
}
