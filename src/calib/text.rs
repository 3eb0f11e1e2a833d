//! Rows of tokens to calibrate on.

use std::path::Path;

use super::CalibError;
use crate::digest::{Digest, canonical_json};
use crate::failure::Outcome;
use crate::plan::{BUILT_IN, Plan};
use crate::recipe::Packing;
use crate::text::documents::{Taking, parse, read};
use crate::text::{EndTokens, Tokenizer};
use crate::transform::hadamard::SignWords;

/// Rows of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rows {
    /// Tokens of each.
    pub rows: Vec<Vec<u32>>,
    /// Rows that are the beginning of a longer document.
    pub cut: usize,
    /// Documents of fewer than two tokens, which are left out.
    pub short: usize,
}

impl Rows {
    /// Tokens in all.
    pub fn tokens(&self) -> usize {
        self.rows.iter().map(Vec::len).sum()
    }

    /// SHA-256 of the canonical JSON of all rows.
    pub fn digest(&self) -> Digest {
        Digest::of(&canonical_json(&self.rows))
    }
}

/// The rows that the plan's recipe asks for.
///
/// Documents are put in an order that the seed decides; from it come the first `rows` of them, or, joined, as many rows
/// of `context` tokens.
///
/// # Errors
/// Those of the text and of the tokenizer; [`CalibError::ShortText`] if there are fewer rows than asked for,
/// [`CalibError::Context`] if they are longer than the model's context.
pub fn rows(plan: &Plan, context_of_model: Option<usize>, vocab: usize) -> Outcome<Rows> {
    let wanted = &plan.recipe.calibration;
    let (count, context) = (wanted.rows as usize, wanted.context as usize);
    if let Some(most) = context_of_model.filter(|most| *most < context) {
        return Err(CalibError::Context { found: context, most }.into());
    }
    let dir = &plan.source.dir;
    let tokenizer = Tokenizer::open(dir)?;
    let taking = Taking { rows: None, context: usize::MAX, min_tokens: Some(2), split: false };
    let documents = match plan.recipe.calibration_text() {
        Some(path) => read(&path, dir, &tokenizer, taking)?,
        None => parse(Path::new("built-in"), BUILT_IN.as_bytes(), dir, &tokenizer, taking)?,
    };
    let short = documents.record.short;
    let mut documents: Vec<Vec<u32>> = documents.sequences.into_iter().map(|s| s.tokens).collect();
    shuffle(&mut documents, wanted.seed.unwrap_or(plan.recipe.seed));
    let mut rows = Rows { rows: Vec::new(), cut: 0, short };
    match wanted.packing {
        Packing::Documents => {
            documents.truncate(count);
            for mut document in documents {
                rows.cut += usize::from(document.len() > context);
                document.truncate(context);
                rows.rows.push(document);
            }
        }
        Packing::Joined => {
            let end = EndTokens::read(dir, Some(&tokenizer), vocab)?.ids_ascending().next();
            let joined: Vec<u32> = documents.into_iter().flat_map(|d| d.into_iter().chain(end)).collect();
            rows.rows.extend(joined.chunks_exact(context).take(count).map(<[u32]>::to_vec));
        }
    }
    match rows.rows.len() {
        found if found < count => {
            let text = plan.recipe.calibration_text();
            let text =
                text.map_or_else(|| "the built-in text".to_owned(), |path| format!("`{}`", path.display()));
            Err(CalibError::ShortText { text, found, needed: count, context }.into())
        }
        _ => Ok(rows),
    }
}

/// An order that depends on the seed and the number of documents alone.
fn shuffle(documents: &mut Vec<Vec<u32>>, seed: u64) {
    let mut words = SignWords::new(seed, 0);
    let mut keyed: Vec<(u64, usize, Vec<u32>)> = std::mem::take(documents)
        .into_iter()
        .enumerate()
        .map(|(index, document)| {
            let mut word = || u64::from(words.next().expect("there is always another"));
            (word() << 32 | word(), index, document)
        })
        .collect();
    keyed.sort();
    documents.extend(keyed.into_iter().map(|(_, _, document)| document));
}
