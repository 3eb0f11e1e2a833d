//! Sixteen 32-bit lanes, and one way to run a kernel on every instruction set.
//!
//! A numeric kernel is written once, over [`Lanes`]. [`dispatch`] compiles it again for each [`Isa`].
//! Every operation is either one IEEE-754 operation per lane (no estimates, no flushing of subnormals; a
//! multiply-add is fused where the kernel says so and nowhere else), a fixed sequence of them, or exact, so all
//! instances give the same bits; [`Plain`] is the definition, and `tests/numerics` compares the others with it.

use crate::isa::Isa;
use crate::tensor::Float;

/// Lanes in a vector.
pub const LANES: usize = 16;

/// Sixteen lanes of 32 bits, used as f32 or as integers by the operation's name.
///
/// Integer operations wrap. Comparisons are those of f32: false if a NaN takes part.
pub trait Lanes: Copy {
    /// Sixteen f64 lanes.
    type Wide: Copy;

    /// Reads sixteen values.
    fn load(from: &[f32; LANES]) -> Self;
    /// Writes sixteen values.
    fn store(self, to: &mut [f32; LANES]);
    /// The same bits in each lane.
    fn splat_bits(bits: u32) -> Self;
    /// Bytes as integers.
    fn widen_bytes(bytes: [u8; LANES]) -> Self;
    /// Bytes as numbers.
    fn from_bytes(bytes: [u8; LANES]) -> Self;
    /// The low byte of each lane's bits.
    fn low_bytes(self) -> [u8; LANES];
    /// `self + other`.
    fn add(self, other: Self) -> Self;
    /// `self - other`.
    fn sub(self, other: Self) -> Self;
    /// `self * other`.
    fn mul(self, other: Self) -> Self;
    /// `self / other`.
    fn div(self, other: Self) -> Self;
    /// `self * by + plus`, rounded once.
    fn fma(self, by: Self, plus: Self) -> Self;
    /// The square root.
    fn sqrt(self) -> Self;
    /// `self < other ? self : other`.
    fn min(self, other: Self) -> Self;
    /// `self > other ? self : other`.
    fn max(self, other: Self) -> Self;
    /// Nearest integer, ties to even.
    fn rint(self) -> Self;
    /// Nearest f16, ties to even, widened again.
    fn round_f16(self) -> Self;
    /// Bitwise and.
    fn and(self, other: Self) -> Self;
    /// Bitwise or.
    fn or(self, other: Self) -> Self;
    /// Integer sum.
    fn iadd(self, other: Self) -> Self;
    /// Integer difference.
    fn isub(self, other: Self) -> Self;
    /// Smaller signed integer.
    fn imin(self, other: Self) -> Self;
    /// Larger signed integer.
    fn imax(self, other: Self) -> Self;
    /// Left shift.
    fn shl<const N: u32>(self) -> Self;
    /// Logical right shift.
    fn shr<const N: u32>(self) -> Self;
    /// `self < other ? yes : no`.
    fn if_lt(self, other: Self, yes: Self, no: Self) -> Self;
    /// `self == other ? yes : no`.
    fn if_eq(self, other: Self, yes: Self, no: Self) -> Self;
    /// `table[lane]`, where each lane is an integer below 8.
    fn lookup(self, table: &[f32; 8]) -> Self;
    /// The sum of the lanes: halves are added until one is left (0 + 8, 1 + 9, ...; then 0 + 4, ...; 0 + 2, ...;
    /// 0 + 1).
    fn sum(self) -> f32;
    /// The least lane; the sign of a zero is unspecified.
    fn least(self) -> f32;
    /// The greatest lane; the sign of a zero is unspecified.
    fn greatest(self) -> f32;
    /// Whether all 512 bits are equal.
    fn same_bits(self, other: Self) -> bool;

    /// Sixteen zeros.
    fn wide_zero() -> Self::Wide;
    /// `sum + f64(self)`.
    fn wide_add(self, sum: Self::Wide) -> Self::Wide;
    /// The f64 lanes.
    fn wide_store(sum: Self::Wide) -> [f64; LANES];

    /// The low `BITS` bits of each byte, closed up: byte *i* to bits `[i*BITS, (i+1)*BITS)`.
    fn squeeze<const BITS: u32>(codes: u64) -> u64;
    /// The inverse of [`Lanes::squeeze`].
    fn spread<const BITS: u32>(packed: u64) -> u64;

    /// The same value in each lane.
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self::splat_bits(value.to_bits())
    }

    /// `self`, and NaN where `other` is NaN.
    #[inline(always)]
    fn if_eq_self(self, other: Self) -> Self {
        other.if_eq(other, self, other)
    }

    /// `|self|`.
    #[inline(always)]
    fn abs(self) -> Self {
        self.and(Self::splat_bits(0x7fff_ffff))
    }

    /// Nearest bfloat16, ties to even, widened again. Not for NaN.
    #[inline(always)]
    fn round_bf16(self) -> Self {
        let odd = self.shr::<16>().and(Self::splat_bits(1));
        self.iadd(odd.iadd(Self::splat_bits(0x7fff))).and(Self::splat_bits(0xffff_0000))
    }
}

/// Nearest value of `float`, ties to even, widened again. Not for NaN.
#[inline(always)]
pub fn round_to<V: Lanes>(float: Float, value: V) -> V {
    match float {
        Float::Bf16 => value.round_bf16(),
        Float::F16 => value.round_f16(),
        Float::F32 => value,
    }
}

/// Code that [`dispatch`] compiles for each instruction set.
///
/// Everything that `run` calls must be `#[inline(always)]`, or it is compiled for the baseline.
pub trait Kernel {
    /// What it returns.
    type Output;
    /// The work.
    fn run<V: Lanes>(self) -> Self::Output;
}

/// Runs `kernel` on `isa`.
///
/// # Panics
/// If this processor has no `isa`.
pub fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    assert!(Isa::available().contains(&isa), "this processor has no {isa}");
    match isa {
        // NEON is the baseline of aarch64, where the compiler makes vectors of plain lanes.
        Isa::Scalar | Isa::Neon => kernel.run::<Plain>(),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::available` has just found these features in this processor.
        Isa::Avx2 => unsafe { x86::run_avx2(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { x86::run_avx512(kernel) },
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 => unreachable!("refused above"),
    }
}

/// The definition: an array, and loops over it.
#[derive(Clone, Copy)]
pub struct Plain([f32; LANES]);

impl Plain {
    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        let mut out = self.0;
        for lane in &mut out {
            *lane = f(*lane);
        }
        Self(out)
    }

    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut out = self.0;
        for (lane, with) in out.iter_mut().zip(other.0) {
            *lane = f(*lane, with);
        }
        Self(out)
    }

    #[inline(always)]
    fn zip_bits(self, other: Self, f: impl Fn(u32, u32) -> u32) -> Self {
        self.zip(other, |a, b| f32::from_bits(f(a.to_bits(), b.to_bits())))
    }

    #[inline(always)]
    fn choose(self, other: Self, yes: Self, no: Self, f: impl Fn(f32, f32) -> bool) -> Self {
        Self(std::array::from_fn(|i| if f(self.0[i], other.0[i]) { yes.0[i] } else { no.0[i] }))
    }
}

impl Lanes for Plain {
    type Wide = [f64; LANES];

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        Self(*from)
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        *to = self.0;
    }
    #[inline(always)]
    fn splat_bits(bits: u32) -> Self {
        Self([f32::from_bits(bits); LANES])
    }
    #[inline(always)]
    fn widen_bytes(bytes: [u8; LANES]) -> Self {
        Self(bytes.map(|byte| f32::from_bits(u32::from(byte))))
    }
    #[inline(always)]
    fn from_bytes(bytes: [u8; LANES]) -> Self {
        Self(bytes.map(f32::from))
    }
    #[inline(always)]
    fn low_bytes(self) -> [u8; LANES] {
        self.0.map(|lane| lane.to_bits() as u8)
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, by: Self, plus: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(by.0[i], plus.0[i])))
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        self.map(f32::sqrt)
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn rint(self) -> Self {
        self.map(f32::round_ties_even)
    }
    #[inline(always)]
    fn round_f16(self) -> Self {
        self.map(|lane| super::f16_to_f32(super::f16_from_f32(lane)))
    }
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        self.zip_bits(other, |a, b| a & b)
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        self.zip_bits(other, |a, b| a | b)
    }
    #[inline(always)]
    fn iadd(self, other: Self) -> Self {
        self.zip_bits(other, u32::wrapping_add)
    }
    #[inline(always)]
    fn isub(self, other: Self) -> Self {
        self.zip_bits(other, u32::wrapping_sub)
    }
    #[inline(always)]
    fn imin(self, other: Self) -> Self {
        self.zip_bits(other, |a, b| (a as i32).min(b as i32) as u32)
    }
    #[inline(always)]
    fn imax(self, other: Self) -> Self {
        self.zip_bits(other, |a, b| (a as i32).max(b as i32) as u32)
    }
    #[inline(always)]
    fn shl<const N: u32>(self) -> Self {
        self.map(|lane| f32::from_bits(lane.to_bits() << N))
    }
    #[inline(always)]
    fn shr<const N: u32>(self) -> Self {
        self.map(|lane| f32::from_bits(lane.to_bits() >> N))
    }
    #[inline(always)]
    fn if_lt(self, other: Self, yes: Self, no: Self) -> Self {
        self.choose(other, yes, no, |a, b| a < b)
    }
    #[inline(always)]
    fn if_eq(self, other: Self, yes: Self, no: Self) -> Self {
        self.choose(other, yes, no, |a, b| a == b)
    }
    #[inline(always)]
    fn lookup(self, table: &[f32; 8]) -> Self {
        self.map(|lane| table[(lane.to_bits() & 7) as usize])
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut lanes = self.0;
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    }
    #[inline(always)]
    fn least(self) -> f32 {
        self.0.into_iter().fold(f32::INFINITY, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn greatest(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn same_bits(self, other: Self) -> bool {
        self.0.map(f32::to_bits) == other.0.map(f32::to_bits)
    }
    #[inline(always)]
    fn wide_zero() -> Self::Wide {
        [0.0; LANES]
    }
    #[inline(always)]
    fn wide_add(self, mut sum: Self::Wide) -> Self::Wide {
        for (total, lane) in sum.iter_mut().zip(self.0) {
            *total += f64::from(lane);
        }
        sum
    }
    #[inline(always)]
    fn wide_store(sum: Self::Wide) -> [f64; LANES] {
        sum
    }
    #[inline(always)]
    fn squeeze<const BITS: u32>(codes: u64) -> u64 {
        // Neighbours are joined three times: 8 codes, 4 pairs, 2 fours, 1 eight.
        let pairs = join::<8>(codes, BITS);
        let fours = join::<16>(pairs, 2 * BITS);
        join::<32>(fours, 4 * BITS)
    }
    #[inline(always)]
    fn spread<const BITS: u32>(packed: u64) -> u64 {
        let fours = part::<32>(packed, 4 * BITS);
        let pairs = part::<16>(fours, 2 * BITS);
        part::<8>(pairs, BITS)
    }
}

/// The low `bits` bits of every `2 * FIELD`-bit field of a u64.
#[inline(always)]
const fn low_halves<const FIELD: u32>(bits: u32) -> u64 {
    let every_other = u64::MAX / (u64::MAX >> (64 - 2 * FIELD));
    every_other * (u64::MAX >> (64 - bits))
}

/// Moves the upper of each two `FIELD`-bit fields down, next to the `bits` used bits of the lower.
#[inline(always)]
const fn join<const FIELD: u32>(x: u64, bits: u32) -> u64 {
    let low = low_halves::<FIELD>(bits);
    (x & low) | ((x >> (FIELD - bits)) & (low << bits))
}

/// The inverse of [`join`].
#[inline(always)]
const fn part<const FIELD: u32>(x: u64, bits: u32) -> u64 {
    let low = low_halves::<FIELD>(bits);
    (x & low) | ((x & (low << bits)) << (FIELD - bits))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Kernel, LANES, Lanes};

    /// # Safety
    /// The processor must have AVX2, FMA, F16C and BMI2.
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
    pub(super) unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Avx2>()
    }

    /// # Safety
    /// The processor must have AVX-512 F, BW, DQ, VL, VBMI and VNNI, and all that [`run_avx2`] needs.
    #[target_feature(
        enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt"
    )]
    pub(super) unsafe fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Avx512>()
    }

    const ROUND: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

    /// One bit per bit of a code, in each byte.
    const fn code_mask(bits: u32) -> u64 {
        0x0101_0101_0101_0101 * ((1 << bits) - 1)
    }

    /// Two 256-bit registers. Made only inside [`run_avx2`].
    #[derive(Clone, Copy)]
    pub(super) struct Avx2(__m256, __m256);

    macro_rules! both {
        ($op:ident($a:expr, $b:expr)) => {
            // SAFETY: `Avx2` values exist only inside `run_avx2`, whose caller has checked the features.
            unsafe { Avx2($op($a.0, $b.0), $op($a.1, $b.1)) }
        };
    }
    macro_rules! both_integers {
        ($op:ident($a:expr, $b:expr)) => {
            // SAFETY: as in `both`.
            unsafe {
                Avx2(
                    _mm256_castsi256_ps($op(_mm256_castps_si256($a.0), _mm256_castps_si256($b.0))),
                    _mm256_castsi256_ps($op(_mm256_castps_si256($a.1), _mm256_castps_si256($b.1))),
                )
            }
        };
    }

    // In this impl, SAFETY is that of `both`; loads and stores are unaligned and inside the array given.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Lanes for Avx2 {
        type Wide = [__m256d; 4];

        #[inline(always)]
        fn load(from: &[f32; LANES]) -> Self {
            unsafe { Self(_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))) }
        }
        #[inline(always)]
        fn store(self, to: &mut [f32; LANES]) {
            unsafe {
                _mm256_storeu_ps(to.as_mut_ptr(), self.0);
                _mm256_storeu_ps(to.as_mut_ptr().add(8), self.1);
            }
        }
        #[inline(always)]
        fn splat_bits(bits: u32) -> Self {
            let all = unsafe { _mm256_castsi256_ps(_mm256_set1_epi32(bits as i32)) };
            Self(all, all)
        }
        #[inline(always)]
        fn widen_bytes(bytes: [u8; LANES]) -> Self {
            unsafe {
                let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
                let low = _mm256_cvtepu8_epi32(bytes);
                let high = _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes));
                Self(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high))
            }
        }
        #[inline(always)]
        fn from_bytes(bytes: [u8; LANES]) -> Self {
            let Self(low, high) = Self::widen_bytes(bytes);
            unsafe {
                Self(
                    _mm256_cvtepi32_ps(_mm256_castps_si256(low)),
                    _mm256_cvtepi32_ps(_mm256_castps_si256(high)),
                )
            }
        }
        #[inline(always)]
        fn low_bytes(self) -> [u8; LANES] {
            let mut bytes = [0; LANES];
            unsafe {
                let mask = _mm256_set1_epi32(0xff);
                let low = _mm256_and_si256(_mm256_castps_si256(self.0), mask);
                let high = _mm256_and_si256(_mm256_castps_si256(self.1), mask);
                // The pack works in 128-bit halves: quarters come out as low, high, low, high.
                let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
                let packed =
                    _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
                _mm_storeu_si128(bytes.as_mut_ptr().cast(), packed);
            }
            bytes
        }
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            both!(_mm256_add_ps(self, other))
        }
        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            both!(_mm256_sub_ps(self, other))
        }
        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            both!(_mm256_mul_ps(self, other))
        }
        #[inline(always)]
        fn div(self, other: Self) -> Self {
            both!(_mm256_div_ps(self, other))
        }
        #[inline(always)]
        fn fma(self, by: Self, plus: Self) -> Self {
            unsafe { Self(_mm256_fmadd_ps(self.0, by.0, plus.0), _mm256_fmadd_ps(self.1, by.1, plus.1)) }
        }
        #[inline(always)]
        fn sqrt(self) -> Self {
            unsafe { Self(_mm256_sqrt_ps(self.0), _mm256_sqrt_ps(self.1)) }
        }
        #[inline(always)]
        fn min(self, other: Self) -> Self {
            both!(_mm256_min_ps(self, other))
        }
        #[inline(always)]
        fn max(self, other: Self) -> Self {
            both!(_mm256_max_ps(self, other))
        }
        #[inline(always)]
        fn rint(self) -> Self {
            unsafe { Self(_mm256_round_ps::<ROUND>(self.0), _mm256_round_ps::<ROUND>(self.1)) }
        }
        #[inline(always)]
        fn round_f16(self) -> Self {
            unsafe {
                Self(
                    _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)),
                    _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1)),
                )
            }
        }
        #[inline(always)]
        fn and(self, other: Self) -> Self {
            both!(_mm256_and_ps(self, other))
        }
        #[inline(always)]
        fn or(self, other: Self) -> Self {
            both!(_mm256_or_ps(self, other))
        }
        #[inline(always)]
        fn iadd(self, other: Self) -> Self {
            both_integers!(_mm256_add_epi32(self, other))
        }
        #[inline(always)]
        fn isub(self, other: Self) -> Self {
            both_integers!(_mm256_sub_epi32(self, other))
        }
        #[inline(always)]
        fn imin(self, other: Self) -> Self {
            both_integers!(_mm256_min_epi32(self, other))
        }
        #[inline(always)]
        fn imax(self, other: Self) -> Self {
            both_integers!(_mm256_max_epi32(self, other))
        }
        #[inline(always)]
        fn shl<const N: u32>(self) -> Self {
            let by = Self::splat_bits(N);
            both_integers!(_mm256_sllv_epi32(self, by))
        }
        #[inline(always)]
        fn shr<const N: u32>(self) -> Self {
            let by = Self::splat_bits(N);
            both_integers!(_mm256_srlv_epi32(self, by))
        }
        #[inline(always)]
        fn if_lt(self, other: Self, yes: Self, no: Self) -> Self {
            unsafe {
                Self(
                    _mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, other.0)),
                    _mm256_blendv_ps(no.1, yes.1, _mm256_cmp_ps::<_CMP_LT_OQ>(self.1, other.1)),
                )
            }
        }
        #[inline(always)]
        fn if_eq(self, other: Self, yes: Self, no: Self) -> Self {
            unsafe {
                Self(
                    _mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_EQ_OQ>(self.0, other.0)),
                    _mm256_blendv_ps(no.1, yes.1, _mm256_cmp_ps::<_CMP_EQ_OQ>(self.1, other.1)),
                )
            }
        }
        #[inline(always)]
        fn lookup(self, table: &[f32; 8]) -> Self {
            unsafe {
                let table = _mm256_loadu_ps(table.as_ptr());
                Self(
                    _mm256_permutevar8x32_ps(table, _mm256_castps_si256(self.0)),
                    _mm256_permutevar8x32_ps(table, _mm256_castps_si256(self.1)),
                )
            }
        }
        #[inline(always)]
        fn sum(self) -> f32 {
            unsafe {
                let eight = _mm256_add_ps(self.0, self.1);
                let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
            }
        }
        #[inline(always)]
        fn least(self) -> f32 {
            unsafe {
                let eight = _mm256_min_ps(self.0, self.1);
                let four = _mm_min_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
                let two = _mm_min_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)))
            }
        }
        #[inline(always)]
        fn greatest(self) -> f32 {
            unsafe {
                let eight = _mm256_max_ps(self.0, self.1);
                let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
                let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
            }
        }
        #[inline(always)]
        fn same_bits(self, other: Self) -> bool {
            unsafe {
                let low = _mm256_xor_si256(_mm256_castps_si256(self.0), _mm256_castps_si256(other.0));
                let high = _mm256_xor_si256(_mm256_castps_si256(self.1), _mm256_castps_si256(other.1));
                let any = _mm256_or_si256(low, high);
                _mm256_testz_si256(any, any) == 1
            }
        }
        #[inline(always)]
        fn wide_zero() -> Self::Wide {
            unsafe { [_mm256_setzero_pd(); 4] }
        }
        #[inline(always)]
        fn wide_add(self, sum: Self::Wide) -> Self::Wide {
            unsafe {
                let quarters = [
                    _mm256_castps256_ps128(self.0),
                    _mm256_extractf128_ps::<1>(self.0),
                    _mm256_castps256_ps128(self.1),
                    _mm256_extractf128_ps::<1>(self.1),
                ];
                [
                    _mm256_add_pd(sum[0], _mm256_cvtps_pd(quarters[0])),
                    _mm256_add_pd(sum[1], _mm256_cvtps_pd(quarters[1])),
                    _mm256_add_pd(sum[2], _mm256_cvtps_pd(quarters[2])),
                    _mm256_add_pd(sum[3], _mm256_cvtps_pd(quarters[3])),
                ]
            }
        }
        #[inline(always)]
        fn wide_store(sum: Self::Wide) -> [f64; LANES] {
            let mut out = [0.0; LANES];
            for (four, to) in sum.into_iter().zip(out.as_chunks_mut::<4>().0) {
                unsafe { _mm256_storeu_pd(to.as_mut_ptr(), four) };
            }
            out
        }
        #[inline(always)]
        fn squeeze<const BITS: u32>(codes: u64) -> u64 {
            unsafe { _pext_u64(codes, code_mask(BITS)) }
        }
        #[inline(always)]
        fn spread<const BITS: u32>(packed: u64) -> u64 {
            unsafe { _pdep_u64(packed, code_mask(BITS)) }
        }
    }

    /// One 512-bit register. Made only inside [`run_avx512`].
    #[derive(Clone, Copy)]
    pub(super) struct Avx512(__m512);

    macro_rules! integers {
        ($op:ident($a:expr, $b:expr)) => {
            // SAFETY: `Avx512` values exist only inside `run_avx512`, whose caller has checked the features.
            unsafe { Avx512(_mm512_castsi512_ps($op(_mm512_castps_si512($a.0), _mm512_castps_si512($b.0)))) }
        };
    }

    // In this impl, SAFETY is that of `integers`; loads and stores are unaligned and inside the array given.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Lanes for Avx512 {
        type Wide = [__m512d; 2];

        #[inline(always)]
        fn load(from: &[f32; LANES]) -> Self {
            unsafe { Self(_mm512_loadu_ps(from.as_ptr())) }
        }
        #[inline(always)]
        fn store(self, to: &mut [f32; LANES]) {
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
        }
        #[inline(always)]
        fn splat_bits(bits: u32) -> Self {
            unsafe { Self(_mm512_castsi512_ps(_mm512_set1_epi32(bits as i32))) }
        }
        #[inline(always)]
        fn widen_bytes(bytes: [u8; LANES]) -> Self {
            unsafe {
                let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
                Self(_mm512_castsi512_ps(_mm512_cvtepu8_epi32(bytes)))
            }
        }
        #[inline(always)]
        fn from_bytes(bytes: [u8; LANES]) -> Self {
            unsafe { Self(_mm512_cvtepi32_ps(_mm512_castps_si512(Self::widen_bytes(bytes).0))) }
        }
        #[inline(always)]
        fn low_bytes(self) -> [u8; LANES] {
            let mut bytes = [0; LANES];
            unsafe {
                let packed = _mm512_cvtepi32_epi8(_mm512_castps_si512(self.0));
                _mm_storeu_si128(bytes.as_mut_ptr().cast(), packed);
            }
            bytes
        }
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            unsafe { Self(_mm512_add_ps(self.0, other.0)) }
        }
        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            unsafe { Self(_mm512_sub_ps(self.0, other.0)) }
        }
        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            unsafe { Self(_mm512_mul_ps(self.0, other.0)) }
        }
        #[inline(always)]
        fn div(self, other: Self) -> Self {
            unsafe { Self(_mm512_div_ps(self.0, other.0)) }
        }
        #[inline(always)]
        fn fma(self, by: Self, plus: Self) -> Self {
            unsafe { Self(_mm512_fmadd_ps(self.0, by.0, plus.0)) }
        }
        #[inline(always)]
        fn sqrt(self) -> Self {
            unsafe { Self(_mm512_sqrt_ps(self.0)) }
        }
        #[inline(always)]
        fn min(self, other: Self) -> Self {
            unsafe { Self(_mm512_min_ps(self.0, other.0)) }
        }
        #[inline(always)]
        fn max(self, other: Self) -> Self {
            unsafe { Self(_mm512_max_ps(self.0, other.0)) }
        }
        #[inline(always)]
        fn rint(self) -> Self {
            unsafe { Self(_mm512_roundscale_ps::<ROUND>(self.0)) }
        }
        #[inline(always)]
        fn round_f16(self) -> Self {
            unsafe { Self(_mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))) }
        }
        #[inline(always)]
        fn and(self, other: Self) -> Self {
            integers!(_mm512_and_si512(self, other))
        }
        #[inline(always)]
        fn or(self, other: Self) -> Self {
            integers!(_mm512_or_si512(self, other))
        }
        #[inline(always)]
        fn iadd(self, other: Self) -> Self {
            integers!(_mm512_add_epi32(self, other))
        }
        #[inline(always)]
        fn isub(self, other: Self) -> Self {
            integers!(_mm512_sub_epi32(self, other))
        }
        #[inline(always)]
        fn imin(self, other: Self) -> Self {
            integers!(_mm512_min_epi32(self, other))
        }
        #[inline(always)]
        fn imax(self, other: Self) -> Self {
            integers!(_mm512_max_epi32(self, other))
        }
        #[inline(always)]
        fn shl<const N: u32>(self) -> Self {
            unsafe { Self(_mm512_castsi512_ps(_mm512_slli_epi32::<N>(_mm512_castps_si512(self.0)))) }
        }
        #[inline(always)]
        fn shr<const N: u32>(self) -> Self {
            unsafe { Self(_mm512_castsi512_ps(_mm512_srli_epi32::<N>(_mm512_castps_si512(self.0)))) }
        }
        #[inline(always)]
        fn if_lt(self, other: Self, yes: Self, no: Self) -> Self {
            unsafe {
                let lanes = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, other.0);
                Self(_mm512_mask_blend_ps(lanes, no.0, yes.0))
            }
        }
        #[inline(always)]
        fn if_eq(self, other: Self, yes: Self, no: Self) -> Self {
            unsafe {
                let lanes = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(self.0, other.0);
                Self(_mm512_mask_blend_ps(lanes, no.0, yes.0))
            }
        }
        #[inline(always)]
        fn lookup(self, table: &[f32; 8]) -> Self {
            unsafe {
                let table = _mm512_broadcast_f32x8(_mm256_loadu_ps(table.as_ptr()));
                Self(_mm512_permutexvar_ps(_mm512_castps_si512(self.0), table))
            }
        }
        #[inline(always)]
        fn sum(self) -> f32 {
            unsafe {
                let eight =
                    _mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
                let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
            }
        }
        #[inline(always)]
        fn least(self) -> f32 {
            unsafe {
                let eight =
                    _mm256_min_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
                let four = _mm_min_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
                let two = _mm_min_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)))
            }
        }
        #[inline(always)]
        fn greatest(self) -> f32 {
            unsafe {
                let eight =
                    _mm256_max_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
                let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
                let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
            }
        }
        #[inline(always)]
        fn same_bits(self, other: Self) -> bool {
            unsafe {
                _mm512_cmpneq_epi32_mask(_mm512_castps_si512(self.0), _mm512_castps_si512(other.0)) == 0
            }
        }
        #[inline(always)]
        fn wide_zero() -> Self::Wide {
            unsafe { [_mm512_setzero_pd(); 2] }
        }
        #[inline(always)]
        fn wide_add(self, sum: Self::Wide) -> Self::Wide {
            unsafe {
                let low = _mm512_cvtps_pd(_mm512_castps512_ps256(self.0));
                let high = _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(self.0));
                [_mm512_add_pd(sum[0], low), _mm512_add_pd(sum[1], high)]
            }
        }
        #[inline(always)]
        fn wide_store(sum: Self::Wide) -> [f64; LANES] {
            let mut out = [0.0; LANES];
            for (eight, to) in sum.into_iter().zip(out.as_chunks_mut::<8>().0) {
                unsafe { _mm512_storeu_pd(to.as_mut_ptr(), eight) };
            }
            out
        }
        #[inline(always)]
        fn squeeze<const BITS: u32>(codes: u64) -> u64 {
            unsafe { _pext_u64(codes, code_mask(BITS)) }
        }
        #[inline(always)]
        fn spread<const BITS: u32>(packed: u64) -> u64 {
            unsafe { _pdep_u64(packed, code_mask(BITS)) }
        }
    }
}
