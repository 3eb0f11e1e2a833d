//! The EXL3 format: trellises of 16 × 16 tiles between two block-wise Hadamard transforms.
//!
//! ```text
//! W[o, i] = suh[i] · svh[o] · Σ_a Σ_b H[i, a] · Q[a, b] · H[b, o]         H = blockdiag(S₁₂₈, …) / √128
//! Q[a, b] = value(state t of tile [a / 16, b / 16])                       (a % 16, b % 16) is element t of a tile
//! state t = the 16 bits of the tile's ring that end before bit ⌊(t + 1) · K⌋
//! ```
//!
//! | tensor of a module | type | shape |
//! | --- | --- | --- |
//! | `trellis` | I16 | `[in / 16, out / 16, 16 · K]` |
//! | `suh`, `svh` | F16 | `[in]`, `[out]` |
//! | `su`, `sv` in older files, in their place | I16 | `[in / 16]`, `[out / 16]`: bit j of word n is the sign of 16 · n + j |
//! | `mcg` or `mul1`; neither is `3inst` | any | marker of the codebook |
//!
//! K is a whole number from 1 to 8, or with `mul1` 1.5, 2.5 or 3.5. A ring's bits lie in u32 words, the highest first.
//! Values are f16: [`Code::Mcg`] and [`Code::ThreeInst`] at L = 16, and of `mul1` one f16 fused multiply-add,
//! `f16((1024 + bytes) · 0x1EEE + 0xC931)`.
//!
//! Arithmetic here: butterflies (a, b) ← (a + b, a − b) in f32 at distances 1, 2, 4, …, along inputs and then along
//! outputs; times 1/128, which is exact; times `suh`, rounded, times `svh`, rounded.
//!
//! Source: ExLlamaV3 1.4.1 (`exl3_dq.cuh`, `reconstruct.cu`, `exl3.py`); half rates by the trellis specification, 4.3.

use super::ImportError;
use crate::checkpoint::{Checkpoint, TensorEntry};
use crate::codec::trellis::{Code, Codebook};
use crate::numeric::{f16_from_f32, f16_to_f32};
use crate::tensor::{Dtype, Shape};

/// Rows and columns of a tile.
const TILE: usize = 16;
/// Order of the Hadamard transforms, and so what both widths are multiples of.
pub(super) const BLOCK: usize = 128;
/// L.
const STATES: u32 = 16;
/// No model is as wide; a thread holds 128 rows of f32.
const WIDEST: u64 = 1 << 20;
/// What follows a module's path.
pub(super) const PARTS: [&str; 7] = ["trellis", "suh", "su", "svh", "sv", "mcg", "mul1"];

/// Signs or scales of one axis.
#[derive(Debug, Clone)]
enum Scales {
    /// f16.
    Values(TensorEntry),
    /// 16 signs a word; a set bit is −1.
    Signs(TensorEntry),
}

/// A packed linear module.
#[derive(Debug, Clone)]
pub(super) struct Linear {
    trellis: TensorEntry,
    inputs: Scales,
    outputs: Scales,
    pub code: Code,
    /// 2 · K.
    twice: u32,
    in_features: usize,
    out_features: usize,
}

impl Linear {
    /// Reads the headers of the module at `path`.
    ///
    /// # Errors
    /// [`ImportError::Tensor`], [`ImportError::Missing`], [`ImportError::Markers`], [`ImportError::Rate`],
    /// [`ImportError::Twice`].
    pub fn open(checkpoint: &Checkpoint, path: &str) -> Result<Self, ImportError> {
        let get = |part: &str| checkpoint.get(&format!("{path}.{part}"));
        let trellis = get("trellis").ok_or_else(|| missing(path, "trellis"))?;
        let wrong = |entry: &TensorEntry, needed: &str| ImportError::Tensor {
            file: checkpoint.files()[entry.file].path.clone(),
            tensor: entry.name.clone(),
            found: format!("{} {}", entry.dtype, entry.shape),
            needed: needed.to_owned(),
        };
        let &[tall, wide, words] = trellis.shape.0.as_slice() else {
            return Err(wrong(trellis, "I16 [in / 16, out / 16, 16 * K]"));
        };
        let block = (BLOCK / TILE) as u64;
        if trellis.dtype != Dtype::I16 || !tall.is_multiple_of(block) || !wide.is_multiple_of(block) {
            return Err(wrong(trellis, "I16 [in / 16, out / 16, 16 * K] with widths that 128 divides"));
        }
        let code = match (get("mcg").is_some(), get("mul1").is_some()) {
            (true, true) => return Err(ImportError::Markers { module: path.to_owned() }),
            (true, false) => Code::Mcg,
            (false, true) => Code::Mul1,
            (false, false) => Code::ThreeInst,
        };
        let twice = words / 8;
        let known = match twice % 2 {
            0 => (2..=16).contains(&twice),
            _ => (3..=7).contains(&twice) && code == Code::Mul1,
        };
        if !words.is_multiple_of(8) || !known {
            return Err(ImportError::Rate { module: path.to_owned(), words, code });
        }
        if TILE as u64 * tall > WIDEST {
            return Err(wrong(trellis, &format!("at most {WIDEST} inputs")));
        }
        let scales = |values: &str, signs: &str, len: u64| match (get(values), get(signs)) {
            (Some(_), Some(signs)) => {
                Err(ImportError::Twice { module: path.to_owned(), tensor: signs.name.clone() })
            }
            (Some(entry), None) if (entry.dtype, &entry.shape.0[..]) == (Dtype::F16, &[len]) => {
                Ok(Scales::Values(entry.clone()))
            }
            (Some(entry), None) => Err(wrong(entry, &format!("F16 [{len}]"))),
            (None, Some(entry)) if (entry.dtype, &entry.shape.0[..]) == (Dtype::I16, &[len / 16]) => {
                Ok(Scales::Signs(entry.clone()))
            }
            (None, Some(entry)) => Err(wrong(entry, &format!("I16 [{}]", len / 16))),
            (None, None) => Err(missing(path, values)),
        };
        let (inputs, outputs) = (scales("suh", "su", 16 * tall)?, scales("svh", "sv", 16 * wide)?);
        let widths = [tall, wide].map(|tiles| tiles as usize * TILE);
        let [in_features, out_features] = widths;
        let trellis = trellis.clone();
        Ok(Self { trellis, inputs, outputs, code, twice: twice as u32, in_features, out_features })
    }

    /// Of the dense weight: `[out, in]`.
    pub fn shape(&self) -> Shape {
        Shape::from([self.out_features as u64, self.in_features as u64])
    }

    /// K.
    pub fn bits(&self) -> f64 {
        f64::from(self.twice) / 2.0
    }

    /// Stored bytes of the module.
    pub fn bytes(&self) -> u64 {
        let scales = |scales: &Scales| match scales {
            Scales::Values(entry) | Scales::Signs(entry) => entry.bytes(),
        };
        self.trellis.bytes() + scales(&self.inputs) + scales(&self.outputs)
    }

    /// Lets go of the pages of its codes.
    pub fn release(&self, checkpoint: &Checkpoint) {
        checkpoint.release(self.trellis.file, self.trellis.range.clone());
    }

    /// Rows `[block · 128, (block + 1) · 128)` of the dense weight: `out` is `[128, in]`.
    pub fn decode(&self, checkpoint: &Checkpoint, values: &Values, block: usize, out: &mut [f32]) {
        let (in_features, words) = (self.in_features, 4 * self.twice as usize);
        assert_eq!(out.len(), BLOCK * in_features, "rows of a block");
        let stored = checkpoint.bytes(&self.trellis);
        let tile_bytes = 4 * words;
        let across = self.out_features / TILE;
        let outputs = read(checkpoint, &self.outputs, block * BLOCK..(block + 1) * BLOCK);
        let mut ring = vec![0; words];
        let (mut q, mut turned) = (vec![0.0; BLOCK * BLOCK], vec![0.0; BLOCK * BLOCK]);
        for first in (0..in_features).step_by(BLOCK) {
            for tile in 0..(BLOCK / TILE) * (BLOCK / TILE) {
                let (down, right) = (tile / (BLOCK / TILE), tile % (BLOCK / TILE));
                let at = (first / TILE + down) * across + block * (BLOCK / TILE) + right;
                let bytes = &stored[at * tile_bytes..(at + 1) * tile_bytes];
                for (word, bytes) in ring.iter_mut().zip(bytes.chunks_exact(4)) {
                    *word = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
                }
                for t in 0..TILE * TILE {
                    let (row, column) = place(t);
                    let state = state(&ring, self.twice, t);
                    q[(down * TILE + row) * BLOCK + right * TILE + column] = values.0[state as usize];
                }
            }
            butterflies(&mut q);
            for (i, row) in q.chunks_exact(BLOCK).enumerate() {
                row.iter().enumerate().for_each(|(o, value)| turned[o * BLOCK + i] = *value);
            }
            butterflies(&mut turned);
            let inputs = read(checkpoint, &self.inputs, first..first + BLOCK);
            for ((row, out), output) in
                turned.chunks_exact(BLOCK).zip(out.chunks_exact_mut(in_features)).zip(&outputs)
            {
                for ((out, value), input) in out[first..first + BLOCK].iter_mut().zip(row).zip(&inputs) {
                    *out = value * (1.0 / BLOCK as f32) * input * output;
                }
            }
        }
    }
}

fn missing(path: &str, part: &str) -> ImportError {
    ImportError::Missing { module: path.to_owned(), tensor: format!("{path}.{part}") }
}

/// What each state is worth.
pub(super) struct Values(Vec<f32>);

impl Values {
    /// Of one of the three codes of the format.
    pub fn new(code: Code) -> Self {
        let codebook = Codebook::new(code, STATES).expect("16 is a legal L");
        let values = codebook.values();
        if code != Code::Mul1 {
            return Self(values);
        }
        let [step, bias] = [0x1eee, 0xc931].map(f16_to_f32);
        // Both the product and the sum are exact in f32, so f16 rounds once, as its fused multiply-add does.
        let fused = |value: &f32| f16_to_f32(f16_from_f32((1024.0 + (value + 510.0)) * step + bias));
        Self(values.iter().map(fused).collect())
    }
}

/// Row (of inputs) and column (of outputs) of the t-th element of a tile: the order of a tensor core's fragments.
fn place(t: usize) -> (usize, usize) {
    let (lane, at) = (t / 8, t % 8);
    let (row, column) = (lane % 4 * 2, lane / 4);
    (row + at % 2 + at / 2 % 2 * 8, column + at / 4 * 8)
}

/// The 16 bits that end before bit ⌊(t + 1) · K⌋ of a ring.
fn state(ring: &[u32], twice: u32, t: usize) -> u32 {
    let total = 32 * ring.len();
    let end = (t + 1) * twice as usize / 2 + total;
    let word = |at: usize| u64::from(ring[at / 32 % ring.len()]);
    let both = word(end - 16) << 32 | word(end - 1);
    (both >> (31 - (end - 1) % 32)) as u32 & 0xffff
}

/// S · m for m: `[128, 128]`.
fn butterflies(m: &mut [f32]) {
    let mut distance = 1;
    while distance < BLOCK {
        for pair in m.chunks_exact_mut(2 * distance * BLOCK) {
            let (a, b) = pair.split_at_mut(distance * BLOCK);
            for (a, b) in a.iter_mut().zip(b) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        distance *= 2;
    }
}

/// Scales of an axis, or signs as 1 and −1.
fn read(checkpoint: &Checkpoint, scales: &Scales, range: std::ops::Range<usize>) -> Vec<f32> {
    let half = |bytes: &[u8], at: usize| u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]);
    match scales {
        Scales::Values(entry) => {
            let bytes = checkpoint.bytes(entry);
            range.map(|at| f16_to_f32(half(bytes, at))).collect()
        }
        Scales::Signs(entry) => {
            let bytes = checkpoint.bytes(entry);
            let sign = |at: usize| if half(bytes, at / 16) >> (at % 16) & 1 == 1 { -1.0 } else { 1.0 };
            range.map(sign).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::trellis::{Normal, state as ours};
    use crate::isa::Isa;
    use crate::quant::trellis::{Encoder, Options, Workspace};

    #[test]
    fn every_element_of_a_tile_has_one_place() {
        let mut places: Vec<_> = (0..256).map(place).collect();
        assert_eq!(places[..9], [(0, 0), (1, 0), (8, 0), (9, 0), (0, 8), (1, 8), (8, 8), (9, 8), (2, 0)]);
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), 256);
    }

    #[test]
    fn rings_of_our_search_are_read_in_the_other_layout() {
        for (bits, code) in [(1, Code::Mcg), (2, Code::ThreeInst), (3, Code::Mul1), (4, Code::Mcg)] {
            let encoder = Encoder::new(code, bits, 16, 256, Options { window: Some(16) }).unwrap();
            let x: Vec<f32> = Normal::new(7).take(256).map(|x| x * 0.9).collect();
            let (mut words, mut values) = (vec![0; encoder.words()], vec![0.0; 256]);
            encoder.encode(&mut Workspace::new(), &x, Isa::best(), &mut words, &mut values).unwrap();
            let states: Vec<u32> = (0..256).map(|t| ours(&words, bits, 16, t)).collect();
            // Symbols in the order of time, the highest bit first.
            let mut ring = vec![0u32; 8 * bits as usize];
            for (t, state) in states.iter().enumerate() {
                for bit in 0..bits {
                    let at = t * bits as usize + bit as usize;
                    ring[at / 32] |= (state >> (bits - 1 - bit) & 1) << (31 - at % 32);
                }
            }
            let read: Vec<u32> = (0..256).map(|t| state(&ring, 2 * bits, t)).collect();
            assert_eq!(read, states, "k = {bits}");
        }
    }

    #[test]
    fn half_rates_advance_by_turns() {
        // 1.5 bits: windows end at bits 1, 3, 4, 6, …; a ring whose bit n is set where n is a multiple of three.
        let bits: Vec<u32> = (0..384).map(|n| u32::from(n % 3 == 0)).collect();
        let word = |word: &[u32]| word.iter().fold(0, |all, bit| all << 1 | bit);
        let ring: Vec<u32> = bits.chunks_exact(32).map(word).collect();
        for (t, end) in [(0, 1), (1, 3), (2, 4), (3, 6), (255, 384)] {
            let expected = (0..16).fold(0, |all, n| all << 1 | bits[(end + 384 - 16 + n) % 384]);
            assert_eq!(state(&ring, 3, t), expected, "t = {t}");
        }
    }
}
