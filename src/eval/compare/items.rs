//! Right and wrong answers to the same items.

use serde::Serialize;

use super::{
    CompareError, Joined, LeftOut, Run, Verdict, hundredfold, join, left_out_text, opening, p_text, verdict,
};
use crate::stats::{
    ALPHA, CONFIDENCE, Interval, Pairs, Tost, holm, items_to_prove, items_to_see, smallest_difference, wilson,
};

/// A share of items.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Proportion {
    /// Items answered right.
    pub right: u64,
    /// Of all.
    pub share: f64,
    /// Wilson's interval.
    pub ci95: Interval,
}

/// Whether the wrong answers of one run are among those of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nesting {
    /// The same items are wrong.
    Same,
    /// Whatever A gets wrong, B gets wrong too: B only loses.
    AInB,
    /// Whatever B gets wrong, A gets wrong too: B only gains.
    BInA,
    /// Each gets some right that the other does not.
    Crossed,
}

/// What so many items can show, with 80 % power at 5 %.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PowerLine {
    /// Items.
    pub n: u64,
    /// Smallest visible difference of shares in the best case, all disagreements one way; `None` below 6
    /// items.
    pub smallest_visible: Option<f64>,
    /// The same if models disagree as often as these two.
    pub smallest_visible_here: Option<f64>,
    /// Items that would show a difference of the margin, if models disagree as often as these two.
    pub items_to_see_margin: Option<u64>,
    /// Items that would prove two equals to be within the margin.
    pub items_to_prove_margin: Option<u64>,
    /// "n = 100 cannot see less than 8 points".
    pub sentence: String,
}

/// B against A on the items that both have.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ItemComparison {
    /// Name of the baseline.
    pub a: String,
    /// Name of the arm.
    pub b: String,
    /// Items that both have.
    pub n: u64,
    /// A's share.
    pub right_a: Proportion,
    /// B's share.
    pub right_b: Proportion,
    /// Both, one, none.
    pub pairs: Pairs,
    /// Of the wrong answers.
    pub nesting: Nesting,
    /// Share right in B less share right in A.
    pub difference: f64,
    /// Tango's interval of the difference.
    pub difference_ci95: Interval,
    /// Exact McNemar.
    pub mcnemar_p: f64,
    /// After Holm over all arms.
    pub mcnemar_p_adjusted: f64,
    /// Equivalence within the margin.
    pub tost: Tost,
    /// Its p after Holm over all arms.
    pub tost_p_adjusted: f64,
    /// What could have been seen.
    pub power: PowerLine,
    /// What only one run has.
    pub left_out: LeftOut,
    /// B against A.
    pub verdict: Verdict,
    /// The verdict with its numbers, for people.
    pub conclusion: String,
}

/// Each arm against the baseline; `true` is a right answer. `margin` is the largest difference of shares that
/// does not matter: 0.02 is two points.
pub fn items(
    baseline: Run<'_, bool>,
    arms: &[Run<'_, bool>],
    margin: f64,
) -> Result<Vec<ItemComparison>, CompareError> {
    let mut joined = Vec::with_capacity(arms.len());
    for &arm in arms {
        let Joined { both, left_out } = join(baseline, arm)?;
        let mut pairs = Pairs::default();
        for (_, a, b) in both {
            *match (a, b) {
                (true, true) => &mut pairs.both,
                (true, false) => &mut pairs.only_a,
                (false, true) => &mut pairs.only_b,
                (false, false) => &mut pairs.neither,
            } += 1;
        }
        joined.push((arm.name, pairs, left_out));
    }
    let difference_p = holm(&joined.iter().map(|(_, pairs, _)| pairs.mcnemar()).collect::<Vec<_>>());
    let equivalence_p = holm(&joined.iter().map(|(_, pairs, _)| pairs.tost(margin).p).collect::<Vec<_>>());
    let adjusted = difference_p.into_iter().zip(equivalence_p);
    Ok(joined
        .into_iter()
        .zip(adjusted)
        .map(|((name, pairs, left_out), p)| {
            compared((baseline.name, name), pairs, left_out, margin, p, arms.len())
        })
        .collect())
}

/// `adjusted`: p of difference and of equivalence.
fn compared(
    (a, b): (&str, &str),
    pairs: Pairs,
    left_out: LeftOut,
    margin: f64,
    adjusted: (f64, f64),
    arms: usize,
) -> ItemComparison {
    let n = pairs.n();
    let proportion =
        |right| Proportion { right, share: right as f64 / n as f64, ci95: wilson(right, n, CONFIDENCE) };
    let mut comparison = ItemComparison {
        a: a.to_owned(),
        b: b.to_owned(),
        n,
        right_a: proportion(pairs.both + pairs.only_a),
        right_b: proportion(pairs.both + pairs.only_b),
        pairs,
        nesting: match (pairs.only_a, pairs.only_b) {
            (0, 0) => Nesting::Same,
            (_, 0) => Nesting::AInB,
            (0, _) => Nesting::BInA,
            _ => Nesting::Crossed,
        },
        difference: pairs.difference(),
        difference_ci95: pairs.interval(CONFIDENCE),
        mcnemar_p: pairs.mcnemar(),
        mcnemar_p_adjusted: adjusted.0,
        tost: pairs.tost(margin),
        tost_p_adjusted: adjusted.1,
        power: power_line(pairs, margin),
        left_out,
        verdict: verdict(adjusted.0, Some(adjusted.1), pairs.only_b > pairs.only_a),
        conclusion: String::new(),
    };
    comparison.conclusion = conclusion(&comparison, arms);
    comparison
}

fn power_line(pairs: Pairs, margin: f64) -> PowerLine {
    let (n, discordance) = (pairs.n(), pairs.discordance());
    let smallest_visible = smallest_difference(n, 0.0);
    let smallest_visible_here = smallest_difference(n, discordance);
    PowerLine {
        n,
        smallest_visible,
        smallest_visible_here,
        items_to_see_margin: items_to_see(margin, discordance),
        items_to_prove_margin: items_to_prove(margin, discordance),
        sentence: match (smallest_visible.map(points), smallest_visible_here.map(points)) {
            (Some(best), Some(here)) if best == here => format!("n = {n} cannot see less than {best} points"),
            (Some(best), Some(here)) => format!(
                "n = {n} cannot see less than {best} points, and with as much disagreement as here no less \
                 than {here}"
            ),
            _ => format!("n = {n} cannot see any difference"),
        },
    }
}

/// `8`, `2.4`.
fn points(share: f64) -> String {
    let value = 100.0 * share;
    if value >= 5.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

fn conclusion(c: &ItemComparison, arms: usize) -> String {
    let within = format!("{} points", hundredfold(c.tost.margin));
    let judged = match c.verdict {
        Verdict::Better | Verdict::Worse => {
            format!("exact McNemar {}", p_text(c.mcnemar_p_adjusted, arms))
        }
        Verdict::Equivalent if c.mcnemar_p_adjusted <= ALPHA => format!(
            "within {within}, TOST {}; the difference is real, but smaller than that",
            p_text(c.tost_p_adjusted, arms)
        ),
        Verdict::Equivalent => format!("within {within}, TOST {}", p_text(c.tost_p_adjusted, arms)),
        Verdict::Undecided => {
            let proof = c.power.items_to_prove_margin.map_or_else(String::new, |items| {
                format!(", and to prove equals to be within {within} takes about {items} items")
            });
            format!("exact McNemar {}; {}{proof}", p_text(c.mcnemar_p_adjusted, arms), c.power.sentence)
        }
    };
    format!(
        "{}: {:+.1} points ({:.1} % right against {:.1} %; 95 % interval {:+.1} to {:+.1}); {judged}{}",
        opening(c.verdict, &c.a, &c.b),
        100.0 * c.difference,
        100.0 * c.right_b.share,
        100.0 * c.right_a.share,
        100.0 * c.difference_ci95.low,
        100.0 * c.difference_ci95.high,
        left_out_text(&c.left_out, "items"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::{Exit, Failure};

    /// Items `0`, `1`, ... of which those in `wrong` are wrong.
    fn results(n: usize, wrong: impl Fn(usize) -> bool) -> Vec<(String, bool)> {
        (0..n).map(|i| (format!("{i:04}"), !wrong(i))).collect()
    }

    fn run<'a, T>(name: &'a str, results: &'a [(String, T)]) -> Run<'a, T> {
        Run { name, results }
    }

    #[test]
    fn counts_by_id_whatever_the_order() {
        let a = results(10, |i| i < 3);
        let mut b = results(10, |i| (2..7).contains(&i));
        b.reverse();
        let c = items(run("a", &a), &[run("b", &b)], 0.02).unwrap().remove(0);
        assert_eq!(c.pairs, Pairs { both: 3, only_a: 4, only_b: 2, neither: 1 });
        assert_eq!((c.n, c.right_a.right, c.right_b.right), (10, 7, 5));
        assert_eq!(c.nesting, Nesting::Crossed);
        // 2 (1 + 6 + 15) / 64, by hand.
        assert_eq!(c.mcnemar_p, 0.6875);
        assert_eq!(c.mcnemar_p_adjusted, c.mcnemar_p);
        assert_eq!(c.verdict, Verdict::Undecided);
    }

    #[test]
    fn names_items_that_only_one_run_has() {
        let (a, mut b) = (results(5, |_| false), results(4, |_| false));
        b.push(("extra".to_owned(), true));
        let c = items(run("a", &a), &[run("b", &b)], 0.02).unwrap().remove(0);
        assert_eq!(c.n, 4);
        assert_eq!(c.left_out.only_in_a, ["0004"]);
        assert_eq!(c.left_out.only_in_b, ["extra"]);
        assert!(c.conclusion.ends_with("; left out: 1 items only in A, 1 only in B"), "{}", c.conclusion);
    }

    #[test]
    fn refuses_an_id_found_twice_and_runs_with_nothing_in_common() {
        let a = results(5, |_| false);
        let twice = [a.clone(), a[2..3].to_vec()].concat();
        let error = items(run("a", &a), &[run("b", &twice)], 0.02).unwrap_err();
        assert_eq!(error.to_string(), "run `b` holds `0002` more than once");
        assert_eq!(error.exit(), Exit::Input);
        let other = [("x".to_owned(), true)];
        let error = items(run("a", &a), &[run("b", &other)], 0.02).unwrap_err();
        assert_eq!(error.to_string(), "runs `a` and `b` have no id in common: they hold 5 and 1 others");
        assert_eq!(error.exit(), Exit::Request);
    }

    #[test]
    fn says_better_worse_equivalent_and_undecided() {
        let base = results(2000, |i| i % 4 == 0);
        let arm = |flip: usize| results(2000, move |i| i % 4 == 0 || i % 4 == 1 && i < flip);
        let (same, slightly, worse) = (arm(0), arm(40), arm(800));
        let all = items(
            run("base", &base),
            &[run("same", &same), run("slightly", &slightly), run("worse", &worse)],
            0.02,
        )
        .unwrap();
        let words: Vec<Verdict> = all.iter().map(|c| c.verdict).collect();
        assert_eq!(words, [Verdict::Equivalent, Verdict::Equivalent, Verdict::Worse]);
        assert_eq!(all.iter().map(|c| c.nesting).collect::<Vec<_>>()[..2], [Nesting::Same, Nesting::AInB]);
        assert!(all[1].mcnemar_p_adjusted < 0.05, "ten losses and no gain are real");
        assert!(all[1].conclusion.contains("the difference is real, but smaller"), "{}", all[1].conclusion);
        assert!(all[0].conclusion.contains("within 2 points"), "{}", all[0].conclusion);
        assert!(all[2].conclusion.contains("(Holm over 3 arms)"), "{}", all[2].conclusion);
        let back = items(run("worse", &worse), &[run("base", &base)], 0.02).unwrap().remove(0);
        assert_eq!((back.verdict, back.nesting), (Verdict::Better, Nesting::BInA));
    }

    #[test]
    fn holm_takes_back_what_one_arm_alone_would_claim() {
        let base = results(100, |_| false);
        let arm = results(100, |i| i < 6);
        let one = items(run("base", &base), &[run("b", &arm)], 0.02).unwrap();
        let two = items(run("base", &base), &[run("b", &arm), run("c", &arm)], 0.02).unwrap();
        // 2 / 2^6, by hand.
        assert_eq!((one[0].mcnemar_p_adjusted, two[0].mcnemar_p_adjusted), (0.03125, 0.0625));
        assert_eq!((one[0].verdict, two[0].verdict), (Verdict::Worse, Verdict::Undecided));
    }

    #[test]
    fn a_hundred_items_cannot_see_less_than_eight_points() {
        let a = results(100, |_| false);
        let c = items(run("a", &a), &[run("b", &a)], 0.02).unwrap().remove(0);
        assert_eq!(c.power.sentence, "n = 100 cannot see less than 8 points");
        assert_eq!(c.verdict, Verdict::Undecided, "even a hundred equal answers do not prove two points");
        let b = results(100, |i| i % 10 == 0);
        let c = items(run("a", &a), &[run("b", &b)], 0.075).unwrap().remove(0);
        assert!(c.power.sentence.ends_with("disagreement as here no less than 9"), "{}", c.power.sentence);
        assert_eq!(c.verdict, Verdict::Worse);
        let few = items(run("a", &a[..5]), &[run("b", &a[..5])], 0.02).unwrap().remove(0);
        assert_eq!(few.power.sentence, "n = 5 cannot see any difference");
    }

    #[test]
    fn json_has_intervals_as_pairs_and_verdicts_as_words() {
        let a = results(10, |i| i < 3);
        let c = items(run("a", &a), &[run("b", &a)], 0.02).unwrap().remove(0);
        let json = serde_json::to_value(&c).unwrap();
        assert_eq!(json["verdict"], "undecided");
        assert_eq!(json["nesting"], "same");
        assert_eq!(json["difference_ci95"].as_array().unwrap().len(), 2);
    }
}
