//! The search for a tile's ring of bits: a Viterbi search that bites its tail.
//!
//! Of all rings it finds one whose values are near the T weights of a tile, in two passes ([`walk`]) over
//! 2^(L−k) nodes with 2^k edges each. The arithmetic is 16-bit fixed point and part of the contract ([`fixed`]): every
//! instruction set finds the same bits. No back-pointers are kept; the costs of all steps are, and the few edges of
//! the path are computed again.
//!
//! | module | what |
//! | --- | --- |
//! | [`walk`] | the two passes, over any costs |
//! | [`fixed`] | costs in fixed point; their definition |
//! | [`forward`], [`words`] | the same in vectors |
//! | [`float`] | costs in f32, for tiles that saturate the others |
//!
//! A tile is encoded as `x = g · w / rms`, where g is [`Code::operating_scale`], and decoded as
//! `w = value · rms / (g · unit)`; the encoder knows only x.
//!
//! Source: QTIP (arXiv 2406.11235), algorithm 4; the arithmetic, the trellis specification of this project.

mod fixed;
mod float;
mod forward;
#[cfg(test)]
mod tests;
mod walk;
mod words;

use std::sync::OnceLock;

use crate::codec::trellis::{Code, Codebook, MAX_TILE, TILE_STEP, TrellisError, check, pack, tile_words};
use crate::isa::Isa;

/// What an encoder may be told besides the trellis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// w: weights to each side of the seam that the first pass sees, at most and by default T / 2.
    ///
    /// 64 costs 0.05 to 0.15 % of the error at T = 256 and saves a quarter of the time.
    pub window: Option<usize>,
}

/// How a tile was encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outcome {
    /// Fixed-point costs were saturated, so the tile was searched again in f32. To be counted and reported.
    pub saturated: bool,
}

/// A trellis, ready to search tiles of one length. Threads may share it.
#[derive(Debug)]
pub struct Encoder {
    bits: u32,
    tile: usize,
    window: usize,
    codebook: Codebook,
    /// Of each state, in code units.
    values: Vec<f32>,
    fixed: fixed::Table,
    float: OnceLock<float::Table>,
}

/// What a thread needs for its searches: [`Encoder::workspace_bytes`], 265 KB at T = 256, L = 12 and k = 3.
///
/// It may be used with any encoder, and keeps the most it has needed.
#[derive(Debug, Default)]
pub struct Workspace {
    room: fixed::Room,
    states: Vec<u32>,
}

impl Workspace {
    /// An empty one; it grows on first use.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Encoder {
    /// The encoder of `code` with `bits` bits a weight (k), `states` bits a state (L) and tiles of `tile` weights (T).
    ///
    /// # Errors
    /// [`TrellisError::Bits`], [`TrellisError::States`], [`TrellisError::Tile`], [`TrellisError::Window`].
    pub fn new(
        code: Code,
        bits: u32,
        states: u32,
        tile: usize,
        options: Options,
    ) -> Result<Self, TrellisError> {
        check(bits, states)?;
        if tile == 0 || tile > MAX_TILE || !tile.is_multiple_of(TILE_STEP) {
            return Err(TrellisError::Tile { found: tile });
        }
        let window = options.window.unwrap_or(tile / 2);
        if window == 0 || window > tile / 2 {
            return Err(TrellisError::Window { found: window, most: tile / 2 });
        }
        Ok(Self::small(Codebook::new(code, states)?, bits, tile, window))
    }

    /// The same for any L and T: tests search trellises small enough to be searched by force.
    fn small(codebook: Codebook, bits: u32, tile: usize, window: usize) -> Self {
        let values = codebook.values();
        let amplitude = f64::from(fixed::AMPLITUDE[bits as usize - 1]);
        let unit = codebook.code().unit();
        let rounded = |value: &f32| {
            let scaled = f64::from(*value) / unit * amplitude;
            scaled.clamp(-32767.0, 32767.0).round_ties_even() as i16
        };
        let fixed: Vec<i16> = values.iter().map(rounded).collect();
        let fixed = fixed::Table::new(bits, codebook.states(), &fixed);
        Self { bits, tile, window, codebook, values, fixed, float: OnceLock::new() }
    }

    /// The codebook: code and L.
    pub fn codebook(&self) -> &Codebook {
        &self.codebook
    }

    /// k.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// T.
    pub fn tile(&self) -> usize {
        self.tile
    }

    /// Words of a tile: T · k / 32.
    pub fn words(&self) -> usize {
        tile_words(self.tile, self.bits)
    }

    /// Bytes of a [`Workspace`] for this encoder, and for the time of a tile that saturates twice as many again.
    ///
    /// Costs before each of T steps and after the last, two rows that take turns, and lists of T:
    /// 2 · (T + 3) · 2^(L−k) + 8 · T.
    pub fn workspace_bytes(&self) -> usize {
        2 * (self.tile + 3) * (1usize << (self.codebook.states() - self.bits)) + 8 * self.tile
    }

    /// Encodes one tile.
    ///
    /// `x` is its T weights in deviations of the codebook, g included; `words` becomes its ring, T · k / 32 words;
    /// `values` what the ring decodes to, T values in code units, so x ≈ value / [`Code::unit`]. Every instruction set
    /// gives the same.
    ///
    /// # Errors
    /// [`TrellisError::NonFinite`]; nothing was written then.
    ///
    /// # Panics
    /// If a size is wrong or this processor has no such instruction set; if the path found does not close, which only
    /// a mistake in the search could bring about.
    pub fn encode(
        &self,
        workspace: &mut Workspace,
        x: &[f32],
        isa: Isa,
        words: &mut [u32],
        values: &mut [f32],
    ) -> Result<Outcome, TrellisError> {
        assert_eq!(
            (x.len(), values.len(), words.len()),
            (self.tile, self.tile, self.words()),
            "sizes of a tile"
        );
        if let Some(position) = x.iter().position(|x| !x.is_finite()) {
            return Err(TrellisError::NonFinite { position, value: x[position] });
        }
        let Workspace { room, states } = workspace;
        let outcome = self.search(room, x, isa, states);
        pack(states, self.bits, words);
        for (value, state) in values.iter_mut().zip(states) {
            *value = self.values[*state as usize];
        }
        Ok(outcome)
    }

    /// The states of a ring near finite `x`.
    fn search(&self, room: &mut fixed::Room, x: &[f32], isa: Isa, states: &mut Vec<u32>) -> Outcome {
        assert!(isa.is_available(), "this processor has no {isa}");
        states.resize(x.len(), 0);
        let mut costs = fixed::Fixed::new(&self.fixed, room, x, isa);
        let saturated = walk::around(&mut costs, self.window, states).is_none();
        if saturated {
            let table = self.float.get_or_init(|| self.float_table());
            let found = walk::around(&mut float::Float::new(table, x), self.window, states);
            found.expect("costs in f32 are never saturated");
        }
        Outcome { saturated }
    }

    fn float_table(&self) -> float::Table {
        let unit = self.codebook.code().unit();
        let values = self.values.iter().map(|value| (f64::from(*value) / unit) as f32).collect();
        float::Table { bits: self.bits, states: self.codebook.states(), values }
    }
}
