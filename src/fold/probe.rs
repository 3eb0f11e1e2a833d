//! Tokens to hold a folded model against its source with.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::digest::{Digest, canonical_json};
use crate::text::Tokenizer;
use crate::transform::hadamard::SignWords;

/// Some sequences of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// The tokens.
    pub sequences: Vec<Vec<u32>>,
    /// Where they come from.
    pub text: ProbeText,
}

/// Where a probe's tokens come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeText {
    /// The text that comes with the program.
    BuiltIn,
    /// Numbers drawn from a fixed seed: the source has no tokenizer that can be read.
    Drawn,
}

/// Sequences of a probe, and the tokens of one at most.
const SEQUENCES: usize = 3;
const TOKENS: usize = 32;

/// Prose, code, and other scripts.
const TEXT: [&str; SEQUENCES] = [
    "The river had been rising since noon, and by evening the lower fields were a single sheet of grey water. Anna \
     counted the animals twice, wrote 37 in the margin of the almanac, and went to look for her brother. \"If the \
     bridge holds until morning,\" he said, \"we can take the carts across at six.\"",
    "def merge(left, right):\n    out = []\n    while left and right:\n        out.append(left.pop(0) if left[0] <= \
     right[0] else right.pop(0))\n    return out + left + right\n\nassert merge([1, 4], [2, 3]) == [1, 2, 3, 4]  # \
     O(n^2), but short\n",
    "Question: what is 12 * 7 - 5?\nAnswer: 12 * 7 = 84, and 84 - 5 = 79. \u{00dc}ber den D\u{00e4}chern, \u{6771}\
     \u{4eac}\u{306e}\u{5929}\u{6c17}, \u{043f}\u{0440}\u{0438}\u{0432}\u{0435}\u{0442}; x \u{2208} \u{211d}, 50 \u{20ac} \
     \u{1f642}",
];

impl Probe {
    /// The built-in text in the tokens of the model in `dir`, or drawn tokens below `vocab`; none of `never`, and no
    /// sequence longer than `context`.
    pub fn new(dir: &Path, vocab: usize, never: &[u32], context: Option<usize>) -> Self {
        let most = TOKENS.min(context.unwrap_or(TOKENS)).max(1);
        let fits = |id: &u32| (*id as usize) < vocab && !never.contains(id);
        let from_text = || -> Option<Vec<Vec<u32>>> {
            let tokenizer = Tokenizer::open(dir).ok()?;
            let sequences = TEXT.iter().map(|text| {
                let ids = tokenizer.encode(text, true).ok()?;
                let ids: Vec<u32> = ids.into_iter().take(most).collect();
                (!ids.is_empty() && ids.iter().all(fits)).then_some(ids)
            });
            sequences.collect()
        };
        if let Some(sequences) = from_text() {
            return Self { sequences, text: ProbeText::BuiltIn };
        }
        let draw = |lane| -> Vec<u32> {
            let words = SignWords::new(0, lane);
            words.map(|word| word % vocab as u32).filter(fits).take(most).collect()
        };
        // A vocabulary of nothing but media tokens is no model's.
        Self { sequences: (0..SEQUENCES as u32).map(draw).collect(), text: ProbeText::Drawn }
    }

    /// SHA-256 of the canonical JSON of all sequences.
    pub fn digest(&self) -> Digest {
        Digest::of(&canonical_json(&self.sequences))
    }

    /// Tokens in all.
    pub fn tokens(&self) -> usize {
        self.sequences.iter().map(Vec::len).sum()
    }
}
