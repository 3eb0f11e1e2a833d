//! One comparison in numbers.

use serde::Serialize;

use super::Position;
use crate::eval::dump::{Dump, Format};
use crate::failure::Outcome;
use crate::numeric::math::exp64;
use crate::stats::{CONFIDENCE as LEVEL, Interval, Percentiles, clustered_mean};
use crate::text::Tokenizer;

/// The numbers of a comparison; keys are part of the command-line contract.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// Mean over all positions, nats per token; null, as everything that needs one, without a finite position.
    pub mean_kl: Option<f64>,
    /// Its standard error, clustered by document; null with one document.
    pub standard_error: Option<f64>,
    /// Its 95 % interval, Student's t over documents.
    pub ci95: Option<Interval>,
    /// Half of the positions are below.
    pub median_kl: Option<f64>,
    /// Nine in ten.
    pub p90_kl: Option<f64>,
    /// Ninety-nine in a hundred.
    pub p99_kl: Option<f64>,
    /// 999 in a thousand.
    pub p999_kl: Option<f64>,
    /// The largest.
    pub max_kl: Option<f64>,
    /// Part of the positions where both have the same likeliest token.
    pub top1_agreement: Option<f64>,
    /// exp of the mean -ln p of the next token. Where the dump does not hold every next token's probability: the one
    /// that it recorded, else null.
    pub teacher_ppl: Option<f64>,
    /// The same of the candidate.
    pub candidate_ppl: Option<f64>,
    /// Positions with a KL.
    pub tokens: usize,
    /// Positions of them with a next token, which perplexities count.
    pub predicted: usize,
    /// Documents.
    pub documents: usize,
    /// Positions without a KL, because a logit is NaN or infinite.
    pub non_finite: usize,
    /// What the dump cannot see: a mean KL below this means nothing.
    pub noise_floor: f64,
    /// By the probability that the teacher gives its likeliest token.
    pub by_confidence: Vec<Bucket>,
    /// By the position in the sequence.
    pub by_position: Vec<Bucket>,
    /// The positions with the largest KL.
    pub worst: Vec<Worst>,
}

/// Positions of one kind.
#[derive(Debug, Clone, Serialize)]
pub struct Bucket {
    /// From here ...
    pub from: f64,
    /// ... to below here.
    pub to: f64,
    /// Positions.
    pub tokens: usize,
    /// Their mean KL; 0 without any.
    pub mean_kl: f64,
    /// Part of the whole KL that they make.
    pub share: f64,
}

/// A position in its context.
#[derive(Debug, Clone, Serialize)]
pub struct Worst {
    /// Number of the document.
    pub document: usize,
    /// Its line in the text's file.
    pub line: usize,
    /// Position in the sequence.
    pub position: usize,
    /// KL.
    pub kl: f64,
    /// The text before.
    pub context: String,
    /// The token that follows in the text, if one does.
    pub next: Option<String>,
    /// The teacher's likeliest token and its probability.
    pub teacher: (String, f64),
    /// The candidate's likeliest token.
    pub candidate: String,
}

/// Upper bounds of the buckets of confidence.
const CONFIDENCE: [f64; 7] = [0.1, 0.3, 0.5, 0.7, 0.9, 0.99, f64::INFINITY];

/// Tokens of context that are shown before a position.
const CONTEXT: usize = 24;

/// Sums up the positions of every sequence of `dump`; `worst` of them are shown with the words of `tokenizer`.
///
/// # Errors
/// If tokens cannot be decoded.
///
/// # Panics
/// If there are not as many sequences.
pub fn summarize(
    dump: &Dump,
    sequences: &[Vec<Position>],
    worst: usize,
    tokenizer: Option<&Tokenizer>,
) -> Outcome<Summary> {
    assert_eq!(sequences.len(), dump.sequences.len(), "every sequence was scored");
    let documents = 1 + dump.sequences.iter().map(|s| s.document).max().unwrap_or(0);
    let mut clusters = vec![(0.0, 0); documents];
    let mut values: Vec<f32> = Vec::new();
    let (mut non_finite, mut agreeing) = (0, 0);
    let (mut teacher_nll, mut candidate_nll, mut known, mut predicted) = (0.0, 0.0, 0, 0);
    let mut places: Vec<(usize, usize)> = Vec::new();
    for (number, (positions, sequence)) in sequences.iter().zip(&dump.sequences).enumerate() {
        for (i, position) in positions.iter().enumerate() {
            if position.kl.is_nan() {
                non_finite += 1;
                continue;
            }
            values.push(position.kl);
            places.push((number, i));
            let cluster = &mut clusters[sequence.document];
            *cluster = (cluster.0 + f64::from(position.kl), cluster.1 + 1u64);
            agreeing += usize::from(position.teacher_top == position.candidate_top);
            if !position.candidate_nll.is_nan() {
                candidate_nll += f64::from(position.candidate_nll);
                predicted += 1;
                // Of the likeliest tokens alone, the next one need not be among them.
                if !position.teacher_nll.is_nan() {
                    teacher_nll += f64::from(position.teacher_nll);
                    known += 1;
                }
            }
        }
    }
    let clusters: Vec<(f64, u64)> = clusters.into_iter().filter(|(_, count)| *count > 0).collect();
    let mean = clustered_mean(&clusters, LEVEL);
    let at = |(number, i): (usize, usize)| &sequences[number][i];
    let by_confidence =
        buckets(&CONFIDENCE, &places, &|place| f64::from(at(place).confidence), &|p| at(p).kl);
    let position_of = |(number, i): (usize, usize)| dump.scored[number].start + i;
    let longest = places.iter().map(|place| position_of(*place)).max().unwrap_or(0) as f64;
    let mut bounds = vec![1.0];
    while bounds.last().is_some_and(|bound| *bound <= longest) {
        bounds.push(bounds.last().map_or(1.0, |bound| bound * 4.0));
    }
    let by_position = buckets(&bounds, &places, &|place| position_of(place) as f64, &|p| at(p).kl);

    let mut order: Vec<usize> = (0..places.len()).collect();
    let before = |a: &usize, b: &usize| values[*b].total_cmp(&values[*a]).then(a.cmp(b));
    if worst < order.len() {
        order.select_nth_unstable_by(worst, before);
        order.truncate(worst);
    }
    order.sort_unstable_by(before);
    let worst = order
        .iter()
        .map(|i| in_context(dump, places[*i], position_of(places[*i]), at(places[*i]), tokenizer))
        .collect::<Outcome<_>>()?;

    let parts = Percentiles::of(&values);
    let ppl = |nll: f64| (predicted > 0).then(|| exp64(nll / predicted as f64));
    Ok(Summary {
        mean_kl: mean.as_ref().map(|mean| mean.mean),
        standard_error: mean.as_ref().and_then(|mean| mean.standard_error),
        ci95: mean.as_ref().and_then(|mean| mean.interval),
        median_kl: parts.map(|parts| parts.p50),
        p90_kl: parts.map(|parts| parts.p90),
        p99_kl: parts.map(|parts| parts.p99),
        p999_kl: parts.map(|parts| parts.p999),
        max_kl: values.iter().copied().reduce(f32::max).map(f64::from),
        top1_agreement: (!values.is_empty()).then(|| agreeing as f64 / values.len() as f64),
        teacher_ppl: match dump.record.format {
            _ if known == predicted => ppl(teacher_nll),
            Format::TopK => dump.record.teacher_ppl,
            _ => None,
        },
        candidate_ppl: ppl(candidate_nll),
        tokens: values.len(),
        predicted,
        documents: clusters.len(),
        non_finite,
        noise_floor: dump.record.noise_floor.mean_kl,
        by_confidence,
        by_position,
        worst,
    })
}

type Place = (usize, usize);

fn buckets(
    bounds: &[f64],
    places: &[Place],
    key: &dyn Fn(Place) -> f64,
    kl: &dyn Fn(Place) -> f32,
) -> Vec<Bucket> {
    let mut sums = vec![(0usize, 0.0f64); bounds.len()];
    for place in places {
        let bucket = bounds.iter().position(|bound| key(*place) < *bound).unwrap_or(bounds.len() - 1);
        sums[bucket] = (sums[bucket].0 + 1, sums[bucket].1 + f64::from(kl(*place)));
    }
    let whole: f64 = sums.iter().map(|(_, sum)| sum).sum();
    let mut from = 0.0;
    let bucket = |((tokens, sum), to): (&(usize, f64), &f64)| Bucket {
        from: std::mem::replace(&mut from, *to),
        // Probabilities end at 1.
        to: if to.is_finite() { *to } else { 1.0 },
        tokens: *tokens,
        mean_kl: sum / (*tokens).max(1) as f64,
        share: if whole > 0.0 { sum / whole } else { 0.0 },
    };
    sums.iter().zip(bounds).map(bucket).collect()
}

fn in_context(
    dump: &Dump,
    (number, _): Place,
    position: usize,
    found: &Position,
    tokenizer: Option<&Tokenizer>,
) -> Outcome<Worst> {
    let sequence = &dump.sequences[number];
    let word = |id: u32| match tokenizer {
        Some(tokenizer) => tokenizer.decode(&[id], false),
        None => Ok(id.to_string()),
    };
    let before = &sequence.tokens[(position + 1).saturating_sub(CONTEXT)..=position];
    let context = match tokenizer {
        Some(tokenizer) => tokenizer.decode(before, false)?,
        None => before.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
    };
    Ok(Worst {
        document: sequence.document,
        line: sequence.line,
        position,
        kl: f64::from(found.kl),
        context,
        next: sequence.tokens.get(position + 1).map(|id| word(*id)).transpose()?,
        teacher: (word(found.teacher_top)?, f64::from(found.confidence)),
        candidate: word(found.candidate_top)?,
    })
}
