//! llama.cpp's `_logits_` files, which `llama-perplexity --kl-divergence-base FILE` writes.
//!
//! ```text
//! 8 bytes "_logits_"; i32 n_ctx, n_vocab, n_chunk; i32 tokens [n_chunk, n_ctx]
//! for each chunk, for each position from n_ctx / 2 to n_ctx - 2:
//!     f32 scale, f32 least; u16 code [n_vocab], padded to an even count         ln p[v] = least + scale · code[v]
//! ```
//!
//! `least` is 16 below the largest logit or above; tokens less likely than that have code 0 and are taken as unknown
//! here (read as numbers, 150 000 of them would hold over 1 % of the probability). The noise floor is that of the
//! step: an error spread evenly over it gives scale² / 24. llama.cpp puts the model's first token (BOS) in the place
//! of each chunk's first if the vocabulary asks for one; the file does not say, so the candidate's tokenizer decides.
//!
//! Source: llama.cpp, tools/perplexity/perplexity.cpp (`log_softmax`, `process_logits`, `perplexity`).

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use super::{Content, Dump, Format, NoiseFloor, Record, SequenceRecord, Teacher, VERSION};
use crate::digest::Digest;
use crate::eval::EvalError;
use crate::eval::dump::topk::Top;
use crate::failure::Outcome;
use crate::text::documents::{Sequence, tokens_digest};

const MAGIC: &[u8] = b"_logits_";

/// Log-probabilities in a mapped file.
#[derive(Debug)]
pub struct Logits {
    map: Mmap,
    context: usize,
    vocab: usize,
    /// Where the first row begins.
    start: usize,
}

impl Logits {
    /// 16-bit words of a row.
    fn words(&self) -> usize {
        self.vocab.next_multiple_of(2) + 4
    }

    /// Rows of a chunk.
    fn rows(&self) -> usize {
        self.context - 1 - self.context / 2
    }

    /// The bytes of a position of the token stream.
    fn bytes(&self, position: usize) -> &[u8] {
        let (chunk, at) = (position / self.context, position % self.context);
        let row = chunk * self.rows() + at - self.context / 2;
        let size = 2 * self.words();
        &self.map[self.start + row * size..][..size]
    }

    fn scale(&self, position: usize) -> (f32, f32) {
        let bytes = self.bytes(position);
        let float = |at: usize| f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        (float(0), float(4))
    }

    /// What is known of a position.
    ///
    /// # Panics
    /// If the file has no row for it.
    pub fn row(&self, position: usize) -> Top {
        let (scale, least) = self.scale(position);
        let codes = self.bytes(position)[8..].as_chunks::<2>().0.iter().take(self.vocab);
        let mut top = Top { ids: Vec::new(), log_probs: Vec::new(), rest: None };
        for (id, code) in codes.enumerate() {
            let code = u16::from_le_bytes(*code);
            // Equal logits have no step between them, and every code is 0.
            if code > 0 || scale == 0.0 {
                top.ids.push(id as u32);
                top.log_probs.push(least + scale * f32::from(code));
            }
        }
        top
    }
}

/// Opens a `_logits_` file.
///
/// # Errors
/// [`EvalError::NotADump`], [`EvalError::Truncated`], [`EvalError::Io`].
pub(super) fn open(path: &Path) -> Outcome<Dump> {
    let file = File::open(path).map_err(EvalError::io("open", path))?;
    // SAFETY: the file is only read, and one that another process cuts meanwhile ends this one, as any mapped file.
    let map = unsafe { Mmap::map(&file) }.map_err(EvalError::io("read", path))?;
    let bad = |problem: String| EvalError::NotADump { path: path.to_owned(), problem };
    if !map.starts_with(MAGIC) || map.len() < 20 {
        return Err(bad("it does not begin with `_logits_` and three counts".to_owned()).into());
    }
    let int = |at: usize| i32::from_le_bytes([map[at], map[at + 1], map[at + 2], map[at + 3]]);
    let counts = [int(8), int(12), int(16)];
    let [context, vocab, chunks] = match counts {
        [c @ 4..=16_777_216, v @ 1..=16_777_216, n @ 1..=16_777_216] => [c as usize, v as usize, n as usize],
        [c, v, n] => {
            return Err(bad(format!("it counts {c} tokens of context, {v} of vocabulary, {n} chunks")).into());
        }
    };
    let start = 20 + 4 * chunks * context;
    let rows = chunks * (context - 1 - context / 2);
    let needed = (start + 2 * rows * (vocab.next_multiple_of(2) + 4)) as u64;
    if map.len() as u64 != needed {
        return Err(EvalError::Truncated { path: path.to_owned(), found: map.len() as u64, needed }.into());
    }
    let mut sequences = Vec::new();
    for chunk in 0..chunks {
        let ids = map[20 + 4 * chunk * context..][..4 * context].as_chunks().0;
        let tokens: Vec<u32> = ids.iter().map(|b| u32::from_le_bytes(*b)).collect();
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocab) {
            return Err(bad(format!("chunk {chunk} has token {id}, beyond a vocabulary of {vocab}")).into());
        }
        sequences.push(Sequence { document: chunk, line: 0, tokens });
    }
    let logits = Logits { map, context, vocab, start };
    let scored: Vec<_> = sequences.iter().map(|_| context / 2..context - 1).collect();
    let (mut sum, mut most) = (0.0f64, 0.0f64);
    let (mut nll, mut known) = (0.0, 0usize);
    for (chunk, sequence) in sequences.iter().enumerate() {
        for at in context / 2..context - 1 {
            let position = chunk * context + at;
            let (scale, least) = logits.scale(position);
            if !(scale.is_finite() && scale >= 0.0 && least.is_finite()) {
                return Err(bad(format!("position {at} of chunk {chunk} has a scale of {scale}")).into());
            }
            let floor = f64::from(scale) * f64::from(scale) / 24.0;
            (sum, most) = (sum + floor, most.max(floor));
            let target = sequence.tokens[at + 1] as usize;
            let code = &logits.bytes(position)[8 + 2 * target..];
            let code = u16::from_le_bytes([code[0], code[1]]);
            if code > 0 {
                nll -= f64::from(least + scale * f32::from(code));
                known += 1;
            }
        }
    }
    let digest = Digest::of(&logits.map);
    let record = Record {
        version: VERSION,
        format: Format::Llama,
        dtype: "U16".to_owned(),
        teacher: Teacher {
            digest: None,
            model_type: None,
            vocab,
            hidden: 0,
            tokenizer_sha256: None,
            head_sha256: None,
        },
        text: None,
        tokens_sha256: tokens_digest(&sequences),
        sequences: sequences
            .iter()
            .map(|s| SequenceRecord { document: s.document, line: s.line, tokens: s.tokens.len() })
            .collect(),
        noise_floor: NoiseFloor { mean_kl: sum / rows as f64, max_kl: most },
        teacher_ppl: (known > 0).then(|| crate::numeric::math::exp64(nll / known as f64)),
        files: BTreeMap::new(),
        tool: "llama.cpp".to_owned(),
    };
    Ok(Dump { record, digest, sequences, scored, content: Content::Llama(logits), path: path.to_owned() })
}
