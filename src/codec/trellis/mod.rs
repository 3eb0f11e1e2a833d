//! A bitshift trellis: k bits a weight, each weight a function of a window of L bits.
//!
//! A tile of T weights is a ring of T · k bits. The L bits that begin at bit (T − 1 − t) · k, the lowest first, are
//! the state of weight t, and its value is that of the state in a codebook, [`Code`]:
//!
//! ```text
//! state[t] = ((state[t−1] << k) | symbol[t]) mod 2^L        t modulo T
//! value[t] = C[state[t]]
//! ```
//!
//! So neighbours share L − k bits, any weight is read without the others, and nothing but the ring is stored: T · k / 32
//! words of 32 bits, little-endian. Codebooks are computed, not stored. L costs a decoder nothing; it is how far the
//! encoder looks.
//!
//! Values are in **code units**: integers for the codes that add four bytes. [`Code::unit`] is the code unit's
//! inverse in standard deviations: a source of unit variance is held against `value / unit`.
//!
//! Refused: k outside 1 to 4, L outside 10 to 16, widths that no multiple of 32 up to 256 divides.
//!
//! Source: QTIP (Tseng et al., 2024, arXiv 2406.11235), the bitshift trellis and the codes `1mad` and `3inst`; ring
//! layout, other codes and all constants: the trellis specification of this project.

mod code;
pub(crate) mod decode;
mod normal;
mod ring;
mod stored;

pub use code::{BadCode, Code, Codebook};
pub use normal::Normal;
pub use ring::{decode, pack, state, tile, tile_words};
pub use stored::{Along, DEFAULT_CODE, DEFAULT_STATES, Scales, Trellis};

use crate::failure::{Exit, Failure};

/// Bits of a weight: k.
pub const BITS: std::ops::RangeInclusive<u32> = 1..=4;

/// Bits of a state: L.
pub const STATES: std::ops::RangeInclusive<u32> = 10..=16;

/// Weights of a tile at most; every length is a multiple of [`TILE_STEP`].
pub const MAX_TILE: usize = 256;

/// Of the stored format, as configs name it.
pub const VERSION: u32 = 1;

/// Lengths of tiles are multiples of this, so that a tile is whole words for every k.
pub const TILE_STEP: usize = 32;

/// Why there is no such trellis, or why weights cannot be encoded by it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TrellisError {
    /// k is out of range.
    #[error("a trellis has {found} bits a weight, but it must have 1, 2, 3 or 4")]
    Bits {
        /// k asked for.
        found: u32,
    },
    /// L is out of range, or not above k.
    #[error("a trellis of {bits} bits a weight has states of {found} bits, but they must have 10 to 16")]
    States {
        /// k.
        bits: u32,
        /// L asked for.
        found: u32,
    },
    /// Tiles are not whole words, or too long for the arithmetic of the search.
    #[error("a trellis tile has {found} weights, but it must have a multiple of 32 up to 256")]
    Tile {
        /// T asked for.
        found: usize,
    },
    /// No tile fits a row.
    #[error("no trellis tile divides a width of {width}: it must be a multiple of 32")]
    Width {
        /// The coded width.
        width: u64,
    },
    /// The first search does not fit the tile.
    #[error(
        "the seam of a trellis tile is searched over {found} weights to each side, but it must be 1 to {most}"
    )]
    Window {
        /// w asked for.
        found: usize,
        /// T / 2.
        most: usize,
    },
    /// NaN or infinity.
    #[error("weight {position} of a trellis tile is {value}, but must be finite")]
    NonFinite {
        /// The first such weight of the tile.
        position: usize,
        /// Its value.
        value: f32,
    },
}

impl Failure for TrellisError {
    fn exit(&self) -> Exit {
        match self {
            TrellisError::NonFinite { .. } => Exit::Input,
            _ => Exit::Request,
        }
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            TrellisError::Bits { .. } => {
                "write `bits = 2`, 3 or 4; for 5 or more use an affine codec".to_owned()
            }
            TrellisError::States { .. } => {
                "write `states = 12` for speed, or 14 or 16 for a smaller error".to_owned()
            }
            TrellisError::Tile { .. } => "let the width choose the tile".to_owned(),
            TrellisError::Width { .. } => {
                "code the tensor along its other axis, or give it an affine codec or `keep`".to_owned()
            }
            TrellisError::Window { most, .. } => format!("{most} searches the whole tile"),
            TrellisError::NonFinite { .. } => {
                "the weight, its scale or its feedback overflowed; look for NaN and infinity in the source"
                    .to_owned()
            }
        })
    }
}

/// `Err` unless there is a trellis of `bits` bits a weight and `states` bits a state.
///
/// # Errors
/// [`TrellisError::Bits`], [`TrellisError::States`].
pub fn check(bits: u32, states: u32) -> Result<(), TrellisError> {
    if !BITS.contains(&bits) {
        return Err(TrellisError::Bits { found: bits });
    }
    if !STATES.contains(&states) || states <= bits {
        return Err(TrellisError::States { bits, found: states });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_trellises_that_do_not_exist_and_says_what_is_needed() {
        assert_eq!(check(0, 12), Err(TrellisError::Bits { found: 0 }));
        assert_eq!(check(5, 12), Err(TrellisError::Bits { found: 5 }));
        for states in [0, 3, 9, 17, u32::MAX] {
            let error = check(3, states).unwrap_err();
            assert_eq!(error, TrellisError::States { bits: 3, found: states });
            assert!(error.to_string().contains(&format!("states of {states} bits")), "{error}");
            assert!(error.help().is_some() && error.exit() == Exit::Request);
        }
        for bits in BITS {
            for states in STATES {
                assert_eq!(check(bits, states), Ok(()));
            }
        }
    }
}
