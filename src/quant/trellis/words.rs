//! Lanes of 16 bits, and what a step of the search asks of them.

/// A vector of [`Words::COUNT`] lanes of 16 bits.
///
/// Every operation is exact integer arithmetic, so all instances agree; [`Plain`] says what each means.
pub(super) trait Words: Copy {
    /// Lanes: a power of two.
    const COUNT: usize;

    /// Reads [`Words::COUNT`] words.
    ///
    /// # Safety
    /// They must be there; any alignment.
    unsafe fn load(from: *const u16) -> Self;
    /// Reads `COUNT / REPEAT` words, as often as they fit.
    ///
    /// # Safety
    /// They must be there; any alignment.
    unsafe fn load_repeated<const REPEAT: usize>(from: *const u16) -> Self;
    /// Writes [`Words::COUNT`] words.
    ///
    /// # Safety
    /// There must be room; any alignment.
    unsafe fn store(self, to: *mut u16);
    /// The same word in each lane.
    fn splat(word: u16) -> Self;
    /// e = (d² + 2^14) >> 15, where d = `value + minus_x` is held to 16 signed bits; `minus_x` is not −32768.
    ///
    /// A sum, since x86 adds a word in memory in one instruction and cannot subtract from it.
    fn distance(value: Self, minus_x: Self) -> Self;
    /// `self + other`, held to 65535.
    fn add_held(self, other: Self) -> Self;
    /// `self + other`, where no sum is above 65535.
    fn add(self, other: Self) -> Self;
    /// The smaller of unsigned words.
    fn min(self, other: Self) -> Self;
    /// Bitwise or.
    fn or(self, other: Self) -> Self;
    /// Whether a word is above 32767.
    fn any_high(self) -> bool;
    /// The first of eight at which `min(costs + e, 65535)` is least, and what it is there; e as in [`Words::distance`].
    fn least(costs: [u16; 8], values: &[i16; 8], x: i16) -> (u16, u32);
    /// Lanes of both in turn, beginning with this one's first: the first [`Words::COUNT`], and the rest.
    fn zip(self, other: Self) -> (Self, Self);
    /// Lanes of all in turn, as [`Words::zip`] does of two. N is a power of two.
    #[inline(always)]
    fn weave<const N: usize>(mut all: [Self; N]) -> [Self; N] {
        let mut distance = N / 2;
        while distance > 0 {
            for i in (0..N).filter(|i| i & distance == 0) {
                (all[i], all[i + distance]) = all[i].zip(all[i + distance]);
            }
            distance /= 2;
        }
        all
    }
}

/// e = (d² + 2^14) >> 15, where d = `value − x` is held to 16 signed bits.
#[inline(always)]
pub(super) fn distance(value: i16, x: i16) -> u16 {
    let d = i32::from(value.saturating_sub(x));
    ((d * d + 0x4000) >> 15) as u16
}

/// The definition of the lanes: an array, and loops over it.
#[derive(Clone, Copy)]
pub(super) struct Plain<const COUNT: usize>([u16; COUNT]);

impl<const COUNT: usize> Words for Plain<COUNT> {
    const COUNT: usize = COUNT;

    #[inline(always)]
    unsafe fn load(from: *const u16) -> Self {
        // SAFETY: the caller has so many words; an array of words needs no more than their alignment.
        Self(unsafe { from.cast::<[u16; COUNT]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_repeated<const REPEAT: usize>(from: *const u16) -> Self {
        // SAFETY: the caller has `COUNT / REPEAT` words.
        Self(std::array::from_fn(|i| unsafe { *from.add(i % (COUNT / REPEAT)) }))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut u16) {
        // SAFETY: the caller has room for so many words.
        unsafe { to.cast::<[u16; COUNT]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    fn splat(word: u16) -> Self {
        Self([word; COUNT])
    }
    #[inline(always)]
    fn distance(value: Self, minus_x: Self) -> Self {
        Self(std::array::from_fn(|i| distance(value.0[i] as i16, -(minus_x.0[i] as i16))))
    }
    #[inline(always)]
    fn add_held(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].saturating_add(other.0[i])))
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].wrapping_add(other.0[i])))
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].min(other.0[i])))
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] | other.0[i]))
    }
    #[inline(always)]
    fn any_high(self) -> bool {
        self.0.iter().fold(0, |all, word| all | word) >> 15 == 1
    }
    #[inline(always)]
    fn least(costs: [u16; 8], values: &[i16; 8], x: i16) -> (u16, u32) {
        // The cost above, the place below.
        let key = |i: usize| u32::from(costs[i].saturating_add(distance(values[i], x))) << 3 | i as u32;
        let least = (1..8).map(key).fold(key(0), u32::min);
        ((least >> 3) as u16, least & 7)
    }
    #[inline(always)]
    fn zip(self, other: Self) -> (Self, Self) {
        let lane = |i: usize| if i.is_multiple_of(2) { self.0[i / 2] } else { other.0[i / 2] };
        (Self(std::array::from_fn(lane)), Self(std::array::from_fn(|i| lane(COUNT + i))))
    }
}

#[cfg(target_arch = "aarch64")]
pub(super) use neon::Neon;
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "aarch64")]
mod neon {
    use std::arch::aarch64::*;

    use super::Words;

    /// Eight words, with what every aarch64 processor has.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Neon(uint16x8_t);

    // SAFETY of this impl: NEON is part of aarch64; pointers are the caller's matter.
    #[allow(clippy::undocumented_unsafe_blocks, unused_unsafe)]
    impl Words for Neon {
        const COUNT: usize = 8;

        #[inline(always)]
        unsafe fn load(from: *const u16) -> Self {
            Self(unsafe { vld1q_u16(from) })
        }
        #[inline(always)]
        unsafe fn load_repeated<const REPEAT: usize>(from: *const u16) -> Self {
            unsafe {
                Self(match REPEAT {
                    1 => vld1q_u16(from),
                    2 => {
                        let half = vld1_u16(from);
                        vcombine_u16(half, half)
                    }
                    _ => unreachable!("at least four predecessors"),
                })
            }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut u16) {
            unsafe { vst1q_u16(to, self.0) }
        }
        #[inline(always)]
        fn splat(word: u16) -> Self {
            Self(unsafe { vdupq_n_u16(word) })
        }
        #[inline(always)]
        fn distance(value: Self, minus_x: Self) -> Self {
            unsafe {
                let d = vqaddq_s16(vreinterpretq_s16_u16(value.0), vreinterpretq_s16_u16(minus_x.0));
                let e = vreinterpretq_u16_s16(vqrdmulhq_s16(d, d));
                // The product of −32768 with itself is held to 32767 here; a comparison that holds is −1.
                Self(vsubq_u16(e, vceqq_s16(d, vdupq_n_s16(i16::MIN))))
            }
        }
        #[inline(always)]
        fn add_held(self, other: Self) -> Self {
            Self(unsafe { vqaddq_u16(self.0, other.0) })
        }
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            Self(unsafe { vaddq_u16(self.0, other.0) })
        }
        #[inline(always)]
        fn min(self, other: Self) -> Self {
            Self(unsafe { vminq_u16(self.0, other.0) })
        }
        #[inline(always)]
        fn or(self, other: Self) -> Self {
            Self(unsafe { vorrq_u16(self.0, other.0) })
        }
        #[inline(always)]
        fn any_high(self) -> bool {
            unsafe { vmaxvq_u16(self.0) > i16::MAX as u16 }
        }
        #[inline(always)]
        fn least(costs: [u16; 8], values: &[i16; 8], x: i16) -> (u16, u32) {
            unsafe {
                let values = Self(vreinterpretq_u16_s16(vld1q_s16(values.as_ptr())));
                let e = Self::distance(values, Self::splat(x.wrapping_neg() as u16));
                let found = Self(vld1q_u16(costs.as_ptr())).add_held(e).0;
                let least = vminvq_u16(found);
                let places = vmovn_u16(vceqq_u16(found, vdupq_n_u16(least)));
                let places = vget_lane_u64::<0>(vreinterpret_u64_u8(places));
                (least, places.trailing_zeros() / 8)
            }
        }
        #[inline(always)]
        fn zip(self, other: Self) -> (Self, Self) {
            unsafe { (Self(vzip1q_u16(self.0, other.0)), Self(vzip2q_u16(self.0, other.0))) }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Words;

    /// Sixteen words. Made only where AVX2 is enabled.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(__m256i);

    // SAFETY of this impl: its values are made only by code that is inlined into functions that enable AVX2, whose
    // callers have found it; pointers are the caller's matter.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Words for Avx2 {
        const COUNT: usize = 16;

        #[inline(always)]
        unsafe fn load(from: *const u16) -> Self {
            Self(unsafe { _mm256_loadu_si256(from.cast()) })
        }
        #[inline(always)]
        unsafe fn load_repeated<const REPEAT: usize>(from: *const u16) -> Self {
            unsafe {
                Self(match REPEAT {
                    1 => _mm256_loadu_si256(from.cast()),
                    2 => _mm256_broadcastsi128_si256(_mm_loadu_si128(from.cast())),
                    4 => _mm256_broadcastq_epi64(_mm_loadl_epi64(from.cast())),
                    _ => unreachable!("at least four predecessors"),
                })
            }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut u16) {
            unsafe { _mm256_storeu_si256(to.cast(), self.0) }
        }
        #[inline(always)]
        fn splat(word: u16) -> Self {
            Self(unsafe { _mm256_set1_epi16(word as i16) })
        }
        #[inline(always)]
        fn distance(value: Self, minus_x: Self) -> Self {
            unsafe {
                let d = _mm256_adds_epi16(value.0, minus_x.0);
                Self(_mm256_mulhrs_epi16(d, d))
            }
        }
        #[inline(always)]
        fn add_held(self, other: Self) -> Self {
            Self(unsafe { _mm256_adds_epu16(self.0, other.0) })
        }
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            Self(unsafe { _mm256_add_epi16(self.0, other.0) })
        }
        #[inline(always)]
        fn min(self, other: Self) -> Self {
            Self(unsafe { _mm256_min_epu16(self.0, other.0) })
        }
        #[inline(always)]
        fn or(self, other: Self) -> Self {
            Self(unsafe { _mm256_or_si256(self.0, other.0) })
        }
        #[inline(always)]
        fn any_high(self) -> bool {
            unsafe { _mm256_movemask_epi8(self.0) & 0xaaaa_aaaau32 as i32 != 0 }
        }
        #[inline(always)]
        fn least(costs: [u16; 8], values: &[i16; 8], x: i16) -> (u16, u32) {
            unsafe { least(costs, values, x) }
        }
        #[inline(always)]
        fn zip(self, other: Self) -> (Self, Self) {
            unsafe {
                let low = _mm256_unpacklo_epi16(self.0, other.0);
                let high = _mm256_unpackhi_epi16(self.0, other.0);
                (
                    Self(_mm256_permute2x128_si256::<0x20>(low, high)),
                    Self(_mm256_permute2x128_si256::<0x31>(low, high)),
                )
            }
        }
        #[inline(always)]
        fn weave<const N: usize>(mut all: [Self; N]) -> [Self; N] {
            // Each step puts a bit of the vector's index under the lane's, and the highest bit of a lane in its half
            // in place of the former. The half itself takes part only once, at the end, and then is the index's
            // highest bit.
            let mut distance = N / 2;
            while distance > 0 {
                for i in (0..N).filter(|i| i & distance == 0) {
                    let (a, b) = (all[i].0, all[i + distance].0);
                    unsafe {
                        all[i] = Self(_mm256_unpacklo_epi16(a, b));
                        all[i + distance] = Self(_mm256_unpackhi_epi16(a, b));
                    }
                }
                distance /= 2;
            }
            let mut out = all;
            for i in 0..N / 2 {
                let (a, b) = (all[2 * i].0, all[2 * i + 1].0);
                unsafe {
                    out[i] = Self(_mm256_permute2x128_si256::<0x20>(a, b));
                    out[i + N / 2] = Self(_mm256_permute2x128_si256::<0x31>(a, b));
                }
            }
            out
        }
    }

    /// # Safety
    /// The processor must have SSE 4.1 and SSSE3.
    #[inline(always)]
    unsafe fn least(costs: [u16; 8], values: &[i16; 8], x: i16) -> (u16, u32) {
        // SAFETY: both arrays are 16 bytes; the caller has the features.
        unsafe {
            let costs = _mm_loadu_si128(costs.as_ptr().cast());
            let d = _mm_subs_epi16(_mm_loadu_si128(values.as_ptr().cast()), _mm_set1_epi16(x));
            let found = _mm_minpos_epu16(_mm_adds_epu16(costs, _mm_mulhrs_epi16(d, d)));
            let found = _mm_cvtsi128_si32(found) as u32;
            (found as u16, found >> 16)
        }
    }

    /// Thirty-two words. Made only where AVX-512 F and BW are enabled.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512(__m512i);

    #[repr(align(64))]
    struct Order([u16; 32]);

    /// Lanes `from`, `from + 32`, `from + 1`, … of two vectors' 64.
    const fn order(from: u16) -> Order {
        let mut order = [0; 32];
        let mut i = 0;
        while i < 32 {
            order[i] = from + i as u16 / 2 + 32 * (i as u16 % 2);
            i += 1;
        }
        Order(order)
    }

    static FIRST: Order = order(0);
    static REST: Order = order(16);

    // SAFETY of this impl: as of `Avx2`, with AVX-512 F and BW.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Words for Avx512 {
        const COUNT: usize = 32;

        #[inline(always)]
        unsafe fn load(from: *const u16) -> Self {
            Self(unsafe { _mm512_loadu_si512(from.cast()) })
        }
        #[inline(always)]
        unsafe fn load_repeated<const REPEAT: usize>(from: *const u16) -> Self {
            unsafe {
                Self(match REPEAT {
                    1 => _mm512_loadu_si512(from.cast()),
                    2 => _mm512_broadcast_i64x4(_mm256_loadu_si256(from.cast())),
                    4 => _mm512_broadcast_i32x4(_mm_loadu_si128(from.cast())),
                    8 => _mm512_broadcastq_epi64(_mm_loadl_epi64(from.cast())),
                    _ => unreachable!("at least four predecessors"),
                })
            }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut u16) {
            unsafe { _mm512_storeu_si512(to.cast(), self.0) }
        }
        #[inline(always)]
        fn splat(word: u16) -> Self {
            Self(unsafe { _mm512_set1_epi16(word as i16) })
        }
        #[inline(always)]
        fn distance(value: Self, minus_x: Self) -> Self {
            unsafe {
                let d = _mm512_adds_epi16(value.0, minus_x.0);
                Self(_mm512_mulhrs_epi16(d, d))
            }
        }
        #[inline(always)]
        fn add_held(self, other: Self) -> Self {
            Self(unsafe { _mm512_adds_epu16(self.0, other.0) })
        }
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            Self(unsafe { _mm512_add_epi16(self.0, other.0) })
        }
        #[inline(always)]
        fn min(self, other: Self) -> Self {
            Self(unsafe { _mm512_min_epu16(self.0, other.0) })
        }
        #[inline(always)]
        fn or(self, other: Self) -> Self {
            Self(unsafe { _mm512_or_si512(self.0, other.0) })
        }
        #[inline(always)]
        fn any_high(self) -> bool {
            unsafe { _mm512_movepi16_mask(self.0) != 0 }
        }
        #[inline(always)]
        fn least(costs: [u16; 8], values: &[i16; 8], x: i16) -> (u16, u32) {
            unsafe { least(costs, values, x) }
        }
        #[inline(always)]
        fn zip(self, other: Self) -> (Self, Self) {
            unsafe {
                let first = _mm512_load_si512(FIRST.0.as_ptr().cast());
                let rest = _mm512_load_si512(REST.0.as_ptr().cast());
                (
                    Self(_mm512_permutex2var_epi16(self.0, first, other.0)),
                    Self(_mm512_permutex2var_epi16(self.0, rest, other.0)),
                )
            }
        }
    }
}
