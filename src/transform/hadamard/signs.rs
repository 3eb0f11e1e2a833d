//! The signs of a rotation, from a seed.
//!
//! With G = 0x9e3779b9 and `mix` on u32, wrapping:
//!
//! ```text
//! mix(x):   x ^= x >> 16;  x *= 0x21f0aaad;  x ^= x >> 15;  x *= 0x735a2d97;  x ^= x >> 15
//! state:    s = mix(low(seed) + G);  s = mix((s ^ high(seed)) + G);  s = mix((s ^ lane) + G)
//! word w:   s += G;  word = mix(s)                                         w = 0, 1, …
//! ```
//!
//! Element 32 w + i is −1 where bit i of word w is set. Lane 0 is the residual stream, lane i + 1 the values
//! of layer i. The mixer is that of splitmix32.

/// The words whose bits are the signs: an endless iterator.
#[derive(Debug, Clone)]
pub struct SignWords {
    state: u32,
}

const GOLDEN: u32 = 0x9e37_79b9;

fn mix(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x21f0_aaad);
    x = (x ^ (x >> 15)).wrapping_mul(0x735a_2d97);
    x ^ (x >> 15)
}

impl SignWords {
    /// The words of `lane`.
    pub fn new(seed: u64, lane: u32) -> Self {
        let mut state = 0;
        for part in [seed as u32, (seed >> 32) as u32, lane] {
            state = mix((state ^ part).wrapping_add(GOLDEN));
        }
        Self { state }
    }

    /// What the next word is made from.
    pub fn state(&self) -> u32 {
        self.state
    }
}

impl Iterator for SignWords {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        self.state = self.state.wrapping_add(GOLDEN);
        Some(mix(self.state))
    }
}

/// The first `n` signs of a lane: true means −1.
pub fn signs(seed: u64, lane: u32, n: usize) -> Vec<bool> {
    let bits = SignWords::new(seed, lane).flat_map(|word| (0..32).map(move |bit| word >> bit & 1 == 1));
    bits.take(n).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shorter_vector_is_the_beginning_of_a_longer_one() {
        let long = signs(7, 3, 100);
        for n in [0, 1, 31, 32, 33, 99] {
            assert_eq!(signs(7, 3, n), long[..n]);
        }
    }

    #[test]
    fn both_halves_of_the_seed_and_the_lane_matter() {
        let first = |seed, lane| SignWords::new(seed, lane).next();
        let all = [first(1, 0), first(1 << 32, 0), first(0, 1), first(0, 0), first(1 << 32 | 1, 0)];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b), "{all:x?}");
        }
    }
}
