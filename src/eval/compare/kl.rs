//! KL from the same teacher over the same documents.

use serde::Serialize;

use super::{
    CompareError, Joined, LeftOut, Run, Verdict, hundredfold, join, left_out_text, opening, p_text, verdict,
};
use crate::stats::{
    ALPHA, Bootstrap, CONFIDENCE, Interval, Mean, PairedCluster, RESAMPLES, Tost, clustered_mean, holm,
    paired_bootstrap, tost_ratio,
};

/// Of the bootstrap's draws; the same for every comparison.
const SEED: u64 = 1;

/// What a run found in one document.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DocumentKl {
    /// Σ KL(teacher || candidate) over its tokens, nats.
    pub sum: f64,
    /// Tokens scored.
    pub tokens: u64,
}

/// B against A on the documents that both have. Means are in nats per token.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KlComparison {
    /// Name of the baseline.
    pub a: String,
    /// Name of the arm.
    pub b: String,
    /// Documents that both have.
    pub documents: u64,
    /// Tokens in them.
    pub tokens: u64,
    /// A's mean, clustered by document.
    pub mean_a: Mean,
    /// B's mean.
    pub mean_b: Mean,
    /// B's mean less A's, with Student's interval.
    pub difference: Mean,
    /// The same, resampled by document; `None` for one document.
    pub bootstrap: Option<Bootstrap>,
    /// The shortest interval that holds Student's and the bootstrap's.
    pub difference_ci95: Option<Interval>,
    /// Documents in which B's KL is lower.
    pub documents_better: u64,
    /// Documents in which it is higher.
    pub documents_worse: u64,
    /// `documents_better` / `documents`.
    pub share_better: f64,
    /// The larger of Student's and the bootstrap's p of "no difference"; 1 for one document.
    pub p: f64,
    /// After Holm over all arms.
    pub p_adjusted: f64,
    /// Equivalence within the margin, relative to A's mean.
    pub tost: Option<Tost>,
    /// Its p after Holm over all arms.
    pub tost_p_adjusted: Option<f64>,
    /// What only one run has.
    pub left_out: LeftOut,
    /// B against A; lower KL is better.
    pub verdict: Verdict,
    /// The verdict with its numbers, for people.
    pub conclusion: String,
}

/// Each arm against the baseline. `margin` is the largest difference that does not matter, relative to the
/// baseline's mean: 0.05 is five percent of its KL; without it nothing is called equivalent.
pub fn kl(
    baseline: Run<'_, DocumentKl>,
    arms: &[Run<'_, DocumentKl>],
    margin: Option<f64>,
) -> Result<Vec<KlComparison>, CompareError> {
    let mut all = arms
        .iter()
        .map(|&arm| compared(baseline, arm, margin))
        .collect::<Result<Vec<KlComparison>, CompareError>>()?;
    let difference_p = holm(&all.iter().map(|c| c.p).collect::<Vec<_>>());
    // An arm without the test proves nothing, but it was tried.
    let equivalence_p = holm(&all.iter().map(|c| c.tost.map_or(1.0, |t| t.p)).collect::<Vec<_>>());
    for (c, (difference, equivalence)) in all.iter_mut().zip(difference_p.into_iter().zip(equivalence_p)) {
        c.p_adjusted = difference;
        c.tost_p_adjusted = c.tost.map(|_| equivalence);
        c.verdict = verdict(difference, c.tost_p_adjusted, c.difference.mean < 0.0);
        c.conclusion = conclusion(c, arms.len());
    }
    Ok(all)
}

/// All but what needs the other arms.
fn compared(
    a: Run<'_, DocumentKl>,
    b: Run<'_, DocumentKl>,
    margin: Option<f64>,
) -> Result<KlComparison, CompareError> {
    let Joined { both, left_out } = join(a, b)?;
    let mut clusters = Vec::with_capacity(both.len());
    for (document, left, right) in both {
        for (run, found) in [(a.name, left), (b.name, right)] {
            if !found.sum.is_finite() || found.tokens == 0 {
                let (run, document) = (run.to_owned(), document.to_owned());
                return Err(CompareError::Document { run, document, sum: found.sum, tokens: found.tokens });
            }
        }
        if left.tokens != right.tokens {
            return Err(CompareError::Tokens {
                document: document.to_owned(),
                a: a.name.to_owned(),
                b: b.name.to_owned(),
                a_tokens: left.tokens,
                b_tokens: right.tokens,
            });
        }
        clusters.push(PairedCluster { a: left.sum, b: right.sum, count: left.tokens });
    }
    let mean = |of: fn(&PairedCluster) -> f64| {
        let sums: Vec<(f64, u64)> = clusters.iter().map(|c| (of(c), c.count)).collect();
        clustered_mean(&sums, CONFIDENCE).expect("every document has a token, and there is one")
    };
    let difference = mean(|c| c.b - c.a);
    let bootstrap = paired_bootstrap(&clusters, CONFIDENCE, RESAMPLES, SEED);
    let count = |better: fn(&PairedCluster) -> bool| clusters.iter().filter(|c| better(c)).count() as u64;
    let (documents, documents_better) = (clusters.len() as u64, count(|c| c.b < c.a));
    Ok(KlComparison {
        a: a.name.to_owned(),
        b: b.name.to_owned(),
        documents,
        tokens: difference.observations,
        mean_a: mean(|c| c.a),
        mean_b: mean(|c| c.b),
        difference,
        difference_ci95: bootstrap.and_then(|b| Some(b.interval.hull(difference.interval?))),
        documents_better,
        documents_worse: count(|c| c.b > c.a),
        share_better: documents_better as f64 / documents as f64,
        p: bootstrap.and_then(|b| Some(b.p.max(difference.p_of_zero()?))).unwrap_or(1.0),
        p_adjusted: 1.0,
        bootstrap,
        tost: margin.and_then(|margin| tost_ratio(&clusters, margin)),
        tost_p_adjusted: None,
        left_out,
        verdict: Verdict::Undecided,
        conclusion: String::new(),
    })
}

/// Four digits after the point, or three significant ones of what is small.
fn nats(value: f64) -> String {
    if value.abs() >= 0.001 || value == 0.0 { format!("{value:.4}") } else { format!("{value:.2e}") }
}

fn conclusion(c: &KlComparison, arms: usize) -> String {
    let relative = if c.mean_a.mean > 0.0 {
        format!(" ({:+.1} %)", 100.0 * c.difference.mean / c.mean_a.mean)
    } else {
        String::new()
    };
    let interval = c.difference_ci95.map_or_else(String::new, |i| {
        format!(", 95 % interval of the difference {} to {}", nats(i.low), nats(i.high))
    });
    let judged = match (c.verdict, c.tost, c.tost_p_adjusted) {
        (Verdict::Equivalent, Some(tost), Some(p)) => {
            let real =
                if c.p_adjusted <= ALPHA { "; the difference is real, but smaller than that" } else { "" };
            format!("within {} %, TOST {}{real}", hundredfold(tost.margin), p_text(p, arms))
        }
        _ if c.bootstrap.is_none() => "one document says nothing about others".to_owned(),
        _ => p_text(c.p_adjusted, arms),
    };
    format!(
        "{}: KL {} against {}{relative}{interval}; lower in {} of {} documents; {judged}{}",
        opening(c.verdict, &c.a, &c.b),
        nats(c.mean_b.mean),
        nats(c.mean_a.mean),
        c.documents_better,
        c.documents,
        left_out_text(&c.left_out, "documents"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Documents of 10 to 19 tokens whose KL per token is `kl(i)`.
    fn documents(n: usize, kl: impl Fn(usize) -> f64) -> Vec<(String, DocumentKl)> {
        let document =
            |i: usize| DocumentKl { sum: kl(i) * (10 + i % 10) as f64, tokens: 10 + i as u64 % 10 };
        (0..n).map(|i| (format!("{i:04}"), document(i))).collect()
    }

    /// Between 0 and 1, without pattern.
    fn noise(i: usize) -> f64 {
        (i * 7919 % 101) as f64 / 101.0
    }

    fn compare(
        a: &[(String, DocumentKl)],
        b: &[(String, DocumentKl)],
        margin: Option<f64>,
    ) -> Result<KlComparison, CompareError> {
        kl(Run { name: "a", results: a }, &[Run { name: "b", results: b }], margin)
            .map(|mut all| all.remove(0))
    }

    #[test]
    fn says_better_worse_equivalent_and_undecided() {
        let base = documents(101, |i| 0.03 + 0.02 * noise(i));
        let lower = documents(101, |i| (0.03 + 0.02 * noise(i)) * (0.8 + 0.1 * noise(i + 50)));
        let other = documents(101, |i| 0.03 + 0.02 * noise(i * 3 + 7));
        let near = documents(101, |i| (0.03 + 0.02 * noise(i)) * (1.005 + 0.002 * noise(i + 9)));
        let better = compare(&base, &lower, None).unwrap();
        assert_eq!((better.verdict, better.documents_better), (Verdict::Better, 101));
        assert_eq!(compare(&lower, &base, None).unwrap().verdict, Verdict::Worse);
        assert_eq!(compare(&base, &other, None).unwrap().verdict, Verdict::Undecided);
        assert_eq!(compare(&base, &near, None).unwrap().verdict, Verdict::Worse);
        let near = compare(&base, &near, Some(0.02)).unwrap();
        assert_eq!(near.verdict, Verdict::Equivalent);
        assert!(near.conclusion.contains("within 2 %"), "{}", near.conclusion);
        assert!(near.conclusion.contains("the difference is real"), "{}", near.conclusion);
    }

    #[test]
    fn three_documents_that_agree_are_no_proof_though_the_bootstrap_says_so() {
        let a = documents(3, |_| 0.03);
        let b = documents(3, |i| 0.03 - 0.002 - 0.01 * noise(i));
        let c = compare(&a, &b, None).unwrap();
        assert!(c.bootstrap.unwrap().p < 0.05);
        assert_eq!((c.verdict, c.documents_better), (Verdict::Undecided, 3));
        let (hull, student) = (c.difference_ci95.unwrap(), c.difference.interval.unwrap());
        assert!(hull.low <= student.low && hull.high >= student.high && hull.high > 0.0);
    }

    #[test]
    fn one_document_decides_nothing() {
        let c = compare(&documents(1, |_| 0.03), &documents(1, |_| 0.02), Some(0.5)).unwrap();
        assert_eq!((c.verdict, c.p, c.bootstrap, c.tost), (Verdict::Undecided, 1.0, None, None));
        assert!(c.conclusion.contains("one document says nothing"), "{}", c.conclusion);
    }

    #[test]
    fn a_run_against_itself_is_equivalent_and_never_different() {
        let a = documents(50, |i| 0.03 + 0.02 * noise(i));
        let c = compare(&a, &a, Some(0.01)).unwrap();
        assert_eq!((c.p, c.difference.mean, c.verdict), (1.0, 0.0, Verdict::Equivalent));
        assert_eq!((c.documents_better, c.documents_worse), (0, 0));
    }

    #[test]
    fn refuses_other_tokens_and_sums_that_are_no_numbers() {
        let a = documents(5, |_| 0.03);
        let mut b = a.clone();
        b[3].1.tokens += 1;
        let error = compare(&a, &b, None).unwrap_err().to_string();
        assert_eq!(error, "document `0003`: run `a` scored 13 tokens, run `b` 14");
        b[1].1.sum = f64::NAN;
        let error = compare(&a, &b, None).unwrap_err().to_string();
        assert!(error.starts_with("run `b`, document `0001`: a KL sum of NaN over 11 tokens"), "{error}");
    }

    #[test]
    fn the_same_results_in_another_order_give_the_same_numbers() {
        let a = documents(60, |i| 0.03 + 0.02 * noise(i));
        let b = documents(60, |i| 0.03 + 0.02 * noise(i + 1));
        let (mut a_back, mut b_back) = (a.clone(), b.clone());
        a_back.reverse();
        b_back.rotate_left(17);
        assert_eq!(compare(&a, &b, Some(0.1)).unwrap(), compare(&a_back, &b_back, Some(0.1)).unwrap());
    }
}
