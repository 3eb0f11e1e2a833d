//! Which basis suits a model and its codecs: quantize in each, score each, keep the best.
//!
//! A rotation spreads what is special about single channels over all of them. Whether that helps depends on the model,
//! the codecs and the rounding, so it is measured: for each basis the artifact that the recipe would give is run layer
//! by layer, with the codecs' own bytes, and its KL from the source decides. No file is written.

use std::path::Path;
use std::sync::Arc;

use crate::artifact::provenance::{MeasuredRecord, MeasuredRow, SkippedRow};
use crate::backend::Precision;
use crate::backend::cpu::Cpu;
use crate::digest::canonical_json;
use crate::failure::Outcome;
use crate::fold::logits::side_by_side;
use crate::fold::{Keep as _, OfPlan, Planned, Watch, hidden_states, prepare};
use crate::numeric::divergence::divergence;
use crate::plan::{Limits, SourceFolder, impossible, plan};
use crate::recipe::Recipe;
use crate::runtime::Weights;
use crate::stats::{CONFIDENCE, clustered_mean, in_clusters};
use crate::text::Tokenizer;
use crate::text::documents::{Documents, Sequence, Taking, parse, read, tokens_digest};

/// The text of a recipe that names none: prose of the public domain, and tasks.
const TEXT: &str = include_str!("text.jsonl");

/// The name that a candidate's row is kept under.
const ROW: &str = "row";

/// Tokens of a sequence at most.
const CONTEXT: usize = 256;

/// Scores every basis that the model and the recipe allow; those that `watch.keep` has a row of are not scored again.
///
/// # Errors
/// Those of the recipe in the model's own basis, of the text, and of the runtime.
pub fn measure(
    recipe: &Recipe,
    source: &SourceFolder,
    limits: Limits,
    watch: Watch<'_>,
) -> Outcome<MeasuredRecord> {
    let weights = Weights::open_keeping(&source.dir, &|name| recipe.keeps(name))?;
    let documents = documents(recipe, &source.dir, weights.decoder.context)?;
    let (sequences, text) = taken(documents, recipe.transform.tokens as usize);
    let tokens: Vec<Vec<u32>> = sequences.iter().map(|sequence| sequence.tokens.clone()).collect();
    let cpu = Cpu::new(limits.isa, limits.threads, Precision::Exact);
    let hidden = |weights: &Weights, what: &str| {
        hidden_states(weights, &cpu, &tokens, &format!("measuring {what}"), watch)
    };
    // Not needed where every row was kept.
    let mut teacher = None;
    let mut record = MeasuredRecord {
        text,
        tokens_sha256: tokens_digest(&sequences),
        positions: tokens.iter().map(|tokens| tokens.len() as u64).sum(),
        rows: Vec::new(),
        skipped: Vec::new(),
        chosen: String::new(),
    };
    for basis in recipe.transform.candidates() {
        let candidate = recipe.clone().with_basis(basis);
        if let Some(reason) = impossible(&candidate, &weights.decoder) {
            record.skipped.push(SkippedRow { basis: basis.to_owned(), reason });
            continue;
        }
        // What is wrong now, a budget too small say, is not the basis's fault, and must not decide.
        let planned = Arc::new(plan(candidate, source.clone(), limits)?);
        let scored = OfPlan::new(watch.keep, &planned, record.tokens_sha256);
        if let Some(row) = scored.get(ROW).and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
            record.rows.push(row);
            continue;
        }
        if teacher.is_none() {
            teacher = Some(hidden(&weights, "the source")?);
        }
        let teacher = teacher.as_deref().expect("made above");
        let watch = Watch { keep: &OfPlan::new(watch.keep, &planned, ()), ..watch };
        let prepared = Arc::new(prepare(&planned, watch)?);
        let candidate = Planned::open(&planned, &prepared)?;
        let student = hidden(&candidate, basis)?;
        let mut kls = Vec::with_capacity(record.positions as usize);
        let mut agreed = 0;
        side_by_side(&cpu, [&weights, &candidate], [teacher, &student], &mut |teacher, student| {
            let apart = divergence(teacher, student, limits.isa);
            agreed += u64::from(apart.as_ref().is_some_and(|apart| apart.a_top == apart.b_top));
            kls.push(apart.map_or(f64::INFINITY, |apart| apart.kl));
        })?;
        let mean = clustered_mean(&in_clusters(&kls, tokens.iter().map(Vec::len)), CONFIDENCE);
        let mean_kl = kls.iter().sum::<f64>() / kls.len() as f64;
        let row = MeasuredRow {
            basis: basis.to_owned(),
            mean_kl,
            standard_error: mean.and_then(|mean| mean.standard_error),
            top1: agreed as f64 / kls.len() as f64,
            bits_per_weight: planned.sizes.bits_per_weight,
        };
        scored.put(ROW, &canonical_json(&row));
        record.rows.push(row);
    }
    // The first of equals: the model's own basis before any other.
    let best = record.rows.iter().min_by(|a, b| a.mean_kl.total_cmp(&b.mean_kl));
    record.chosen = best.expect("the model's own basis is always measured").basis.clone();
    Ok(record)
}

fn documents(recipe: &Recipe, dir: &Path, context: Option<usize>) -> Outcome<Documents> {
    let context = CONTEXT.min(context.unwrap_or(CONTEXT));
    let taking = Taking { rows: None, context, min_tokens: Some(2), split: false };
    text(recipe.transform_text().as_deref(), dir, taking)
}

/// The documents of `file`, or of the built-in text, as tokens of the model in `dir`.
///
/// # Errors
/// As [`read`]; those of the tokenizer.
pub fn text(file: Option<&Path>, dir: &Path, taking: Taking) -> Outcome<Documents> {
    let tokenizer = Tokenizer::open(dir)?;
    match file {
        Some(path) => read(path, dir, &tokenizer, taking),
        None => parse(Path::new("built-in"), TEXT.as_bytes(), dir, &tokenizer, taking),
    }
}

/// The first sequences that hold so many tokens, the last one cut, and the text's name.
pub fn taken(documents: Documents, most: usize) -> (Vec<Sequence>, String) {
    let mut left = most;
    let mut sequences = Vec::new();
    for mut sequence in documents.sequences {
        sequence.tokens.truncate(left);
        left -= sequence.tokens.len();
        if !sequence.tokens.is_empty() {
            sequences.push(sequence);
        }
    }
    (sequences, documents.record.name)
}
