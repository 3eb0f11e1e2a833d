//! Tiles as rings of bits.
//!
//! Time runs backwards: weight t's newest symbol is at bit (T − 1 − t) · k and its older ones above it, so that a
//! state is a plain window, lowest bit first. The window of the first weights wraps around.

use super::{BITS, Codebook, MAX_TILE, TILE_STEP, TrellisError};

/// The length of tiles along a coded width: the greatest multiple of 32, at most 256, that divides it.
///
/// 5120 → 256, 576 → 192, 640 → 160, 896 → 224.
///
/// # Errors
/// [`TrellisError::Width`] if the width is 0 or no multiple of 32.
pub fn tile(width: u64) -> Result<usize, TrellisError> {
    let lengths = (1..=MAX_TILE / TILE_STEP).rev().map(|steps| steps * TILE_STEP);
    let mut fitting = lengths.filter(|length| width > 0 && width.is_multiple_of(*length as u64));
    fitting.next().ok_or(TrellisError::Width { width })
}

/// Words of a tile: T · k / 32.
pub const fn tile_words(tile: usize, bits: u32) -> usize {
    tile * bits as usize / 32
}

/// Writes a tile's ring: of each state only the newest symbol, the rest being the neighbours'.
///
/// `states` are those of a tile, in time; `words` are T · k / 32.
///
/// # Panics
/// If the sizes do not match.
pub fn pack(states: &[u32], bits: u32, words: &mut [u32]) {
    assert!(BITS.contains(&bits), "1 to 4 bits");
    assert_eq!(words.len() * 32, states.len() * bits as usize, "words of {} weights", states.len());
    let symbol = (1 << bits) - 1;
    let mut words = words.iter_mut();
    let (mut held, mut count) = (0u64, 0);
    for state in states.iter().rev() {
        held |= u64::from(state & symbol) << count;
        count += bits;
        if count >= 32 {
            *words.next().expect("as many bits as words hold") = held as u32;
            held >>= 32;
            count -= 32;
        }
    }
}

/// The state of weight `t`: `states` bits from bit (T − 1 − t) · `bits` of a tile's ring.
///
/// # Panics
/// If t is not below T, or there are no words.
#[inline]
pub fn state(words: &[u32], bits: u32, states: u32, t: usize) -> u32 {
    let last = words.len() * 32 / bits as usize - 1;
    let offset = (last - t) * bits as usize;
    let at = offset / 32;
    let next = if at + 1 == words.len() { 0 } else { at + 1 };
    let window = u64::from(words[at]) | u64::from(words[next]) << 32;
    (window >> (offset % 32)) as u32 & ((1 << states) - 1)
}

/// The values of a tile, in code units: the definition.
///
/// `words` is one tile's ring, `values` its T values in time. Multiplied by the tile's scale in f32 they are the
/// weights.
///
/// # Panics
/// If the sizes do not match.
pub fn decode(codebook: &Codebook, bits: u32, words: &[u32], values: &mut [f32]) {
    assert_eq!(words.len() * 32, values.len() * bits as usize, "words of {} weights", values.len());
    for (t, value) in values.iter_mut().enumerate() {
        *value = codebook.value(state(words, bits, codebook.states(), t));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Code;
    use super::*;
    use crate::digest::Digest;

    /// States of a ring of symbols, by the recurrence, begun so that it closes.
    fn path(symbols: &[u32], bits: u32, states: u32) -> Vec<u32> {
        let mask = (1u32 << states) - 1;
        let mut state = 0;
        for symbol in symbols {
            state = (state << bits | symbol) & mask;
        }
        let step = |symbol: &u32| {
            state = (state << bits | symbol) & mask;
            state
        };
        symbols.iter().map(step).collect()
    }

    #[test]
    fn rings_are_those_of_the_specification() {
        for (bits, first, ends, expected) in [
            (2, vec![0xc6c6_c6c6; 16], [2843, 3180, 1734], "8e6290ac8189bc54"),
            (3, vec![0x0e62_af0e, 0xaf0e_62af, 0x62af_0e62], [2163, 920, 3854], "f933458620fb9cea"),
            (4, vec![0xb05a_f49e, 0x38d2_7c16], [2531, 3640, 1182], "0f10bd8a83a926f4"),
        ] {
            let symbols: Vec<u32> = (0..256).map(|t| (5 * t + 3) % (1 << bits)).collect();
            let states = path(&symbols, bits, 12);
            assert_eq!([states[0], states[1], states[255]], ends, "k = {bits}");
            let mut words = vec![0; tile_words(256, bits)];
            pack(&states, bits, &mut words);
            assert_eq!(words[..first.len()], first, "k = {bits}");
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            assert_eq!(Digest::of(&bytes).to_string()[..16], *expected, "k = {bits}");
        }
    }

    #[test]
    fn the_longest_tile_that_divides_a_width_is_taken() {
        for (width, expected) in
            [(576, 192), (640, 160), (896, 224), (5120, 256), (17408, 256), (32, 32), (96, 96), (2560, 256)]
        {
            assert_eq!(tile(width), Ok(expected), "{width}");
        }
        for width in [0, 16, 100, 5121] {
            assert_eq!(tile(width), Err(TrellisError::Width { width }));
        }
    }

    proptest! {
        #[test]
        fn every_window_is_the_paths_state(
            seed in any::<u64>(),
            bits in 1u32..=4,
            states in 10u32..=16,
            steps in 1usize..=8,
        ) {
            let tile = 32 * steps;
            let mut x = seed | 1;
            let symbols: Vec<u32> = (0..tile)
                .map(|_| {
                    x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (x >> 40) as u32 & ((1 << bits) - 1)
                })
                .collect();
            let path = path(&symbols, bits, states);
            let mut words = vec![0; tile_words(tile, bits)];
            pack(&path, bits, &mut words);
            let windows: Vec<u32> = (0..tile).map(|t| state(&words, bits, states, t)).collect();
            prop_assert_eq!(&windows, &path);
            let codebook = Codebook::new(Code::Bs12, states).unwrap();
            let mut values = vec![0.0; tile];
            decode(&codebook, bits, &words, &mut values);
            let expected: Vec<f32> = path.iter().map(|state| Code::Bs12.integer(*state).unwrap() as f32).collect();
            prop_assert_eq!(values, expected);
        }
    }
}
