//! Does what a budget chose beat an even choice of the same size?
//!
//! A table of costs is a guess: it takes what several modules do together for the sum of what each does alone. So both
//! artifacts, the chosen and the even one ([`crate::plan::Plan::control`]), are run layer by layer with the codes that a
//! build would store, and compared on text that neither was calibrated on:
//!
//! ```text
//! d_t = KL_t(source || chosen) − KL_t(source || even)        mean over positions t, documents as clusters
//! ```
//!
//! And since no KL shows whether a model still begins and ends its answers, P(end) and its margin are read as the
//! [stop probe](crate::eval::stop) reads them, after the probe's prompts and all along the text. No file is written.

use std::sync::Arc;

use crate::artifact::provenance::{ComparedRecord, ComparedRow};
use crate::backend::Precision;
use crate::backend::cpu::Cpu;
use crate::calib::{Ngrams, fold_and_solve};
use crate::eval::stop::Row;
use crate::eval::stop::cases::prompts;
use crate::failure::Outcome;
use crate::fold::logits::side_by_side;
use crate::fold::{OfPlan, Planned, Watch, hidden_states};
use crate::measure::{taken, text};
use crate::numeric::divergence::divergence;
use crate::plan::{COMPARED_TOKENS, Plan};
use crate::runtime::Weights;
use crate::stats::{CONFIDENCE, clustered_mean, in_clusters};
use crate::text::documents::{Sequence, Taking, tokens_digest};
use crate::text::{EndTokens, Tokenizer};

/// Tokens of a sequence at most.
const CONTEXT: usize = 256;

/// Compares the plan's choice with an even one; none if nothing was chosen.
///
/// # Errors
/// Those of the text, of the builds' own steps and of the runtime.
pub fn compare(plan: &Arc<Plan>, watch: Watch<'_>) -> Outcome<Option<ComparedRecord>> {
    let Some(even) = plan.control()? else { return Ok(None) };
    let source = Weights::open_keeping(&plan.source.dir, &|name| plan.recipe.keeps(name))?;
    let probe = Probe::new(plan, &source)?;
    let cpu = Cpu::new(plan.isa, plan.threads, Precision::Exact);
    let teacher = probe.hidden(&source, &cpu, "the source", watch)?;
    let (mut arms, mut seen) = (Vec::new(), None);
    for (what, plan) in [("what was chosen", plan.clone()), ("an even choice", Arc::new(even))] {
        let keep = OfPlan::new(watch.keep, &plan, ());
        let folded = fold_and_solve(&plan, None, Watch { keep: &keep, ..watch })?;
        // Both calibrate on the same rows.
        seen = folded.ngrams;
        let weights = Planned::open(&plan, &Arc::new(folded.prepared))?;
        let student = probe.hidden(&weights, &cpu, what, watch)?;
        arms.push(probe.score(&cpu, [&source, &weights], [&teacher, &student], &plan)?);
    }
    let [chosen, even] = <[Arm; 2]>::try_from(arms).unwrap_or_else(|_| unreachable!("two arms"));
    let difference: Vec<f64> = chosen.kls.iter().zip(&even.kls).map(|(a, b)| a - b).collect();
    let mean = clustered_mean(&probe.clusters(&difference), CONFIDENCE);
    let difference = difference.iter().sum::<f64>() / difference.len() as f64;
    let more_empty = chosen.row.stops_at_once > even.row.stops_at_once;
    let held_out = || probe.text.iter().map(|sequence| sequence.tokens.as_slice());
    let overlap = seen.as_deref().and_then(Ngrams::parse).map(|seen| seen.overlap(held_out()).shared as u64);
    Ok(Some(ComparedRecord {
        text: probe.name,
        tokens_sha256: tokens_digest(&probe.text),
        positions: chosen.kls.len() as u64,
        prompts: probe.prompts.len() as u64,
        shared_runs: overlap,
        // A NaN is no win.
        wins: difference <= 0.0 && !more_empty,
        difference,
        standard_error: mean.and_then(|mean| mean.standard_error),
        chosen: chosen.row,
        even: even.row,
    }))
}

/// What both are asked.
struct Probe {
    name: String,
    text: Vec<Sequence>,
    /// Prompts of the stop probe.
    prompts: Vec<Vec<u32>>,
    ends: Vec<u32>,
}

/// What one of them answered.
struct Arm {
    kls: Vec<f64>,
    row: ComparedRow,
}

impl Probe {
    fn new(plan: &Plan, source: &Weights) -> Outcome<Self> {
        let dir = &plan.source.dir;
        let most = source.decoder.context.unwrap_or(CONTEXT).min(CONTEXT);
        let taking = Taking { rows: None, context: most, min_tokens: Some(2), split: false };
        let (text, name) = taken(text(plan.recipe.budget_text().as_deref(), dir, taking)?, COMPARED_TOKENS);
        let tokenizer = Tokenizer::open(dir)?;
        let vocab = source.decoder.vocab;
        let ends = EndTokens::read(dir, Some(&tokenizer), vocab)?.ids_ascending().collect();
        let fits = |prompt: &Vec<u32>| {
            let media = &source.decoder.media_tokens;
            let known = prompt.iter().all(|id| (*id as usize) < vocab && !media.contains(id));
            !prompt.is_empty()
                && known
                && source.decoder.context.is_none_or(|context| prompt.len() <= context)
        };
        let prompts = prompts(dir, &tokenizer, &[])?.into_iter().map(|prompt| prompt.tokens);
        Ok(Self { name, text, prompts: prompts.filter(fits).collect(), ends })
    }

    /// Final-normed hidden states of the text's tokens, then of each prompt's last.
    fn hidden(&self, weights: &Weights, cpu: &Arc<Cpu>, what: &str, watch: Watch<'_>) -> Outcome<Vec<f32>> {
        let text = self.text.iter().map(|sequence| sequence.tokens.clone());
        let sequences: Vec<Vec<u32>> = text.chain(self.prompts.iter().cloned()).collect();
        let hidden = hidden_states(weights, cpu, &sequences, &format!("comparing {what}"), watch)?;
        let width = weights.decoder.hidden;
        let (mut wanted, mut row) = (Vec::new(), 0);
        for (i, sequence) in sequences.iter().enumerate() {
            let first = if i < self.text.len() { row } else { row + sequence.len() - 1 };
            row += sequence.len();
            wanted.extend_from_slice(&hidden[first * width..row * width]);
        }
        Ok(wanted)
    }

    fn score(&self, cpu: &Arc<Cpu>, models: [&Weights; 2], hidden: [&[f32]; 2], plan: &Plan) -> Outcome<Arm> {
        let positions: usize = self.text.iter().map(|sequence| sequence.tokens.len()).sum();
        let mut kls = Vec::with_capacity(positions);
        let mut row = ComparedRow {
            bits_per_weight: plan.sizes.bits_per_weight,
            weight_file_bytes: plan.sizes.weight_file_bytes,
            ..ComparedRow::default()
        };
        let (mut agreed, mut gained, mut at) = (0u64, 0.0, 0);
        side_by_side(cpu, models, hidden, &mut |teacher, student| {
            let end = |logits: &[f32]| Row::of(logits, &self.ends, cpu.isa);
            let (theirs, ours) = (end(teacher), end(student));
            let stops = |row: &Option<Row>| row.is_some_and(|row| row.margin > 0.0);
            if at < positions {
                let apart = divergence(teacher, student, cpu.isa);
                agreed += u64::from(apart.as_ref().is_some_and(|apart| apart.a_top == apart.b_top));
                kls.push(apart.map_or(f64::INFINITY, |apart| apart.kl));
                row.early += u64::from(stops(&ours) && !stops(&theirs));
                row.passed_over += u64::from(stops(&theirs) && !stops(&ours));
            } else {
                row.stops_at_once += u64::from(stops(&ours) && !stops(&theirs));
                let p = |row: &Option<Row>| row.map_or(f64::NAN, |row| row.p_end);
                gained += p(&ours) - p(&theirs);
            }
            at += 1;
        })?;
        row.mean_kl = kls.iter().sum::<f64>() / kls.len() as f64;
        row.standard_error =
            clustered_mean(&self.clusters(&kls), CONFIDENCE).and_then(|mean| mean.standard_error);
        row.top1 = agreed as f64 / kls.len() as f64;
        row.p_end_gained = if self.prompts.is_empty() { 0.0 } else { gained / self.prompts.len() as f64 };
        Ok(Arm { kls, row })
    }

    /// Sums by document, and counts.
    fn clusters(&self, values: &[f64]) -> Vec<(f64, u64)> {
        in_clusters(values, self.text.iter().map(|sequence| sequence.tokens.len()))
    }
}
