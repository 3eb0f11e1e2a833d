//! Two SHA-256 states at once.
//!
//! A SHA-256 round waits for the round before it, so a core that digests one message mostly waits. Two
//! messages side by side keep it busy: on x86-64 with SHA extensions, two take little longer than one.
//! A build always has two, since every source byte counts for its file and for its tensor.

/// Bytes of a block.
pub const BLOCK: usize = 64;

/// A digest's state between blocks.
pub type State = [u32; 8];

/// Advances each state over its own blocks; both have equally many.
pub fn compress_pair(states: [&mut State; 2], blocks: [&[[u8; BLOCK]]; 2]) {
    assert_eq!(blocks[0].len(), blocks[1].len(), "one block of each message a step");
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sha") && is_x86_feature_detected!("sse4.1") {
        // SAFETY: the processor has what the function is compiled for.
        return unsafe { x86::compress_pair(states, blocks) };
    }
    for (state, blocks) in states.into_iter().zip(blocks) {
        compress(state, blocks);
    }
}

/// Advances one state.
pub fn compress(state: &mut State, blocks: &[[u8; BLOCK]]) {
    sha2::block_api::compress256(state, blocks);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{BLOCK, State};

    /// The round constants of FIPS 180-4, section 4.2.2, four to a step.
    const K: [[u32; 4]; 16] = [
        [0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5],
        [0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5],
        [0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3],
        [0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174],
        [0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc],
        [0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da],
        [0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7],
        [0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967],
        [0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13],
        [0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85],
        [0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3],
        [0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070],
        [0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5],
        [0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3],
        [0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208],
        [0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2],
    ];

    /// A state as the instructions want it: words a b e f and c d g h.
    #[derive(Clone, Copy)]
    struct Lane {
        abef: __m128i,
        cdgh: __m128i,
        /// The sixteen message words that the next steps use.
        words: [__m128i; 4],
    }

    impl Lane {
        #[inline]
        #[target_feature(enable = "sha,sse2,ssse3,sse4.1")]
        fn new(state: &State) -> Self {
            let word = |i: usize| state[i] as i32;
            Self {
                abef: _mm_set_epi32(word(0), word(1), word(4), word(5)),
                cdgh: _mm_set_epi32(word(2), word(3), word(6), word(7)),
                words: [_mm_setzero_si128(); 4],
            }
        }

        #[inline]
        #[target_feature(enable = "sha,sse2,ssse3,sse4.1")]
        fn store(self, state: &mut State) {
            *state = [
                _mm_extract_epi32::<3>(self.abef) as u32,
                _mm_extract_epi32::<2>(self.abef) as u32,
                _mm_extract_epi32::<3>(self.cdgh) as u32,
                _mm_extract_epi32::<2>(self.cdgh) as u32,
                _mm_extract_epi32::<1>(self.abef) as u32,
                _mm_extract_epi32::<0>(self.abef) as u32,
                _mm_extract_epi32::<1>(self.cdgh) as u32,
                _mm_extract_epi32::<0>(self.cdgh) as u32,
            ];
        }

        #[inline]
        #[target_feature(enable = "sha,sse2,ssse3,sse4.1")]
        fn load(&mut self, block: &[u8; BLOCK]) {
            let swap = _mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203);
            for (i, words) in self.words.iter_mut().enumerate() {
                // SAFETY: i < 4, so the 16 bytes at 16 i lie in the block; the load needs no alignment.
                let raw = unsafe { _mm_loadu_si128(block.as_ptr().add(16 * i).cast()) };
                *words = _mm_shuffle_epi8(raw, swap);
            }
        }

        /// Rounds 4 i to 4 i + 3.
        #[inline]
        #[target_feature(enable = "sha,sse2,ssse3,sse4.1")]
        fn step(&mut self, i: usize, constants: __m128i) {
            let [w0, w1, w2, w3] = self.words;
            let now = if i < 4 {
                self.words[i]
            } else {
                // W[t] from W[t-16], W[t-15], W[t-7] and W[t-2].
                let older = _mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8::<4>(w3, w2));
                let next = _mm_sha256msg2_epu32(older, w3);
                self.words = [w1, w2, w3, next];
                next
            };
            let keyed = _mm_add_epi32(now, constants);
            self.cdgh = _mm_sha256rnds2_epu32(self.cdgh, self.abef, keyed);
            self.abef = _mm_sha256rnds2_epu32(self.abef, self.cdgh, _mm_shuffle_epi32::<0x0e>(keyed));
        }
    }

    #[target_feature(enable = "sha,sse2,ssse3,sse4.1")]
    pub(super) fn compress_pair(states: [&mut State; 2], blocks: [&[[u8; BLOCK]]; 2]) {
        let [first, second] = states;
        let mut lanes = [Lane::new(first), Lane::new(second)];
        for (block_a, block_b) in blocks[0].iter().zip(blocks[1]) {
            let before = lanes;
            lanes[0].load(block_a);
            lanes[1].load(block_b);
            for (i, k) in K.iter().enumerate() {
                let constants = _mm_set_epi32(k[3] as i32, k[2] as i32, k[1] as i32, k[0] as i32);
                lanes[0].step(i, constants);
                lanes[1].step(i, constants);
            }
            for (lane, before) in lanes.iter_mut().zip(before) {
                lane.abef = _mm_add_epi32(lane.abef, before.abef);
                lane.cdgh = _mm_add_epi32(lane.cdgh, before.cdgh);
            }
        }
        lanes[0].store(first);
        lanes[1].store(second);
    }
}
