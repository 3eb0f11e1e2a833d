//! Which runs of tokens a calibration saw: so that a result on the same text is not taken for one on unseen text.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// The file of an artifact that holds the hashes.
pub const NGRAMS: &str = "calibration.ngrams";

/// Tokens of a run. Runs of 13 are what is usually held to tell copied text from like text.
pub const LENGTH: usize = 13;

/// Hashes of all runs of [`LENGTH`] tokens of some rows: sorted, each once.
///
/// A hash is the first eight bytes, little-endian, of the SHA-256 of the run's ids, four little-endian bytes each. A row
/// that is shorter counts as one run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ngrams(Vec<u64>);

/// How much of a text a calibration saw.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Overlap {
    /// Tokens of a run.
    pub length: usize,
    /// Runs of the text.
    pub runs: usize,
    /// Those that the calibration text has too.
    pub shared: usize,
    /// Sequences of the text.
    pub sequences: usize,
    /// Those of which every run is in the calibration text.
    pub whole: usize,
}

impl Ngrams {
    /// Those of these rows.
    pub fn of(rows: &[Vec<u32>]) -> Self {
        let mut hashes: Vec<u64> = rows.iter().flat_map(|row| runs(row).map(hash)).collect();
        hashes.sort_unstable();
        hashes.dedup();
        Self(hashes)
    }

    /// As a file holds them: eight little-endian bytes each.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|hash| hash.to_le_bytes()).collect()
    }

    /// Those of an artifact; none if it was not calibrated, or the file is not whole.
    pub fn read(artifact: &Path) -> Option<Self> {
        Self::parse(&std::fs::read(artifact.join(NGRAMS)).ok()?)
    }

    /// The inverse of [`Ngrams::to_bytes`].
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (words, rest) = bytes.as_chunks::<8>();
        let hashes: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        (rest.is_empty() && hashes.is_sorted()).then_some(Self(hashes))
    }

    /// How much of these sequences is among them.
    pub fn overlap<'s>(&self, sequences: impl Iterator<Item = &'s [u32]>) -> Overlap {
        let mut overlap = Overlap { length: LENGTH, runs: 0, shared: 0, sequences: 0, whole: 0 };
        for sequence in sequences {
            let (mut all, mut shared) = (0, 0);
            for run in runs(sequence) {
                all += 1;
                shared += usize::from(self.0.binary_search(&hash(run)).is_ok());
            }
            overlap.runs += all;
            overlap.shared += shared;
            overlap.sequences += 1;
            overlap.whole += usize::from(all > 0 && shared == all);
        }
        overlap
    }
}

/// Runs of a row; the row itself if it is shorter.
fn runs(row: &[u32]) -> impl Iterator<Item = &[u32]> {
    row.windows(LENGTH.min(row.len().max(1)))
}

fn hash(run: &[u32]) -> u64 {
    let bytes: Vec<u8> = run.iter().flat_map(|id| id.to_le_bytes()).collect();
    let digest = Digest::of(&bytes);
    u64::from_le_bytes(digest.bytes()[..8].try_into().expect("a digest has 32 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_overlaps_with_itself_and_not_with_another() {
        let rows: Vec<Vec<u32>> = vec![(0..40).collect(), vec![7, 8]];
        let ngrams = Ngrams::of(&rows);
        // 40 − 13 + 1 runs, and one short row.
        assert_eq!(ngrams.0.len(), 29);
        let overlap = |rows: &[Vec<u32>]| ngrams.overlap(rows.iter().map(Vec::as_slice));
        let own = overlap(&rows);
        assert_eq!((own.runs, own.shared, own.sequences, own.whole), (29, 29, 2, 2));
        // Twenty tokens of the first row among others: 20 − 13 + 1 runs are shared.
        let mixed: Vec<u32> = (100..110).chain(5..25).chain(100..110).collect();
        let other = overlap(&[mixed, (500..530).collect()]);
        assert_eq!((other.runs, other.shared, other.whole), (28 + 18, 8, 0));
    }
}
