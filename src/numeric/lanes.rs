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

/// Sixteen lanes of 32 bits, used as f32, as integers or as 64 bytes by the operation's name.
///
/// Integer operations wrap. Comparisons are those of f32: false if a NaN takes part.
pub trait Lanes: Copy {
    /// Sixteen f64 lanes.
    type Wide: Copy;

    /// Whether [`Lanes::pick`] costs no more than one arithmetic operation.
    const PICKS: bool;

    /// How many vectors the registers hold.
    const IN_REGISTERS: usize;

    /// Runs a kernel on this instance, out of line: for code that several kernels share.
    ///
    /// A kernel that is inlined is compiled once for each place it is used in.
    fn call<K: Kernel>(kernel: K) -> K::Output;

    /// Reads sixteen values.
    fn load(from: &[f32; LANES]) -> Self;
    /// Reads at most sixteen values, and zeros for the rest.
    fn load_part(from: &[f32]) -> Self;
    /// Reads sixteen bf16 values.
    fn load_bf16(from: &[u8; 2 * LANES]) -> Self;
    /// Reads sixteen f16 values.
    fn load_f16(from: &[u8; 2 * LANES]) -> Self;
    /// Reads at most 64 bytes, and zeros for the rest.
    fn load_bytes_part(from: &[u8]) -> Self;
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
    /// Signed integers as numbers, rounded to nearest even beyond 2^24.
    fn to_float(self) -> Self;
    /// Numbers as signed integers. Only for integers below 2^31.
    fn to_int(self) -> Self;
    /// Integer sum.
    fn iadd(self, other: Self) -> Self;
    /// Integer difference.
    fn isub(self, other: Self) -> Self;
    /// Integer product.
    fn imul(self, other: Self) -> Self;
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
    /// `table[lane & 15]` of integers.
    fn pick(self, table: Self) -> Self;
    /// Sixty-four bytes.
    fn load_bytes(from: &[u8; 4 * LANES]) -> Self;
    /// Bytes: `table[byte]`, where each byte is below 16.
    fn pick_bytes(self, table: &[u8; LANES]) -> Self;
    /// `self + Σ_j codes[j] · x[j]` over the four bytes of each lane, `codes` unsigned and `x` signed: exact.
    fn dot_bytes(self, codes: Self, x: Self) -> Self;
    /// Windows of a stream of bits that begin every `STEP` bits, 1 to 4, the last window first: lane l has the bits
    /// from (15 − l) · STEP on that are in `mask`, which is below 2^16 and the same in each lane.
    ///
    /// `low` has the stream's bits from 0 on; `high`, which matters only for a step of 4, those from 32 on.
    fn windows<const STEP: u32>(low: u64, high: u64, mask: Self) -> Self;
    /// A factor as [`Lanes::add_bytes`] takes it, for one lane.
    fn times(by: i8) -> u32;
    /// `self + by · Σ_j codes[j]` over the four unsigned bytes of each lane: exact. `by` is of [`Lanes::times`], the
    /// same in each lane.
    fn add_bytes(self, codes: Self, by: Self) -> Self;
    /// At most 64 codes of `BITS` bits, lowest bits first, one per byte; then zeros.
    fn byte_codes<const BITS: u32>(packed: &[u8]) -> Self;
    /// Of all lanes of `parts`, end to end, the integer sums of every `parts.len()`, which is 2, 4, 8 or 16.
    fn group_sums(parts: &[Self]) -> Self;
    /// `out[j] = Σ_i self[i] · (-1)^popcount(i & j)`: for distances d = 1, 2, 4, 8, each two lanes i and i + d
    /// become their sum and their difference.
    fn butterflies(self) -> Self;
    /// Lane j of `all[i]` to lane i of the result's j.
    fn transpose(all: [Self; LANES]) -> [Self; LANES];
    /// The sum of the lanes: halves are added until one is left (0 + 8, 1 + 9, ...; then 0 + 4, ...; 0 + 2, ...;
    /// 0 + 1).
    fn sum(self) -> f32;
    /// [`Lanes::sum`] of each.
    fn sums(all: [Self; LANES]) -> Self;
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
    /// Sixteen f64 lanes.
    fn wide_load(from: &[f64; LANES]) -> Self::Wide;
    /// The lanes as f64: exact.
    fn widen(self) -> Self::Wide;
    /// The f32 nearest to each lane, ties to even.
    fn narrow(wide: Self::Wide) -> Self;
    /// `wide * by`.
    fn wide_mul(wide: Self::Wide, by: f64) -> Self::Wide;
    /// `sum + sign * wide` for a sign of 1 or -1; the product is exact, so fused or not is the same.
    fn wide_add_signed(sum: Self::Wide, sign: f64, wide: Self::Wide) -> Self::Wide;

    /// The low `BITS` bits of each byte, closed up: byte *i* to bits `[i*BITS, (i+1)*BITS)`.
    fn squeeze<const BITS: u32>(codes: u64) -> u64;
    /// The inverse of [`Lanes::squeeze`].
    fn spread<const BITS: u32>(packed: u64) -> u64;

    /// 32 codes of `BITS` bits, lowest bits first, as integers.
    #[inline(always)]
    fn codes<const BITS: u32>(packed: &[u8]) -> [Self; 2] {
        let mut codes = [0; 2 * LANES];
        for (codes, packed) in codes.as_chunks_mut::<8>().0.iter_mut().zip(packed.chunks_exact(BITS as usize))
        {
            let mut word = [0; 8];
            word[..BITS as usize].copy_from_slice(packed);
            *codes = Self::spread::<BITS>(u64::from_le_bytes(word)).to_le_bytes();
        }
        let [low, high] = *codes.as_chunks().0 else { unreachable!("two halves") };
        [Self::widen_bytes(low), Self::widen_bytes(high)]
    }

    /// Reads at most sixteen bf16 values, and zeros for the rest.
    #[inline(always)]
    fn load_bf16_part(from: &[u8]) -> Self {
        Self::load_bf16(&filled(from))
    }

    /// Reads at most sixteen f16 values, and zeros for the rest.
    #[inline(always)]
    fn load_f16_part(from: &[u8]) -> Self {
        Self::load_f16(&filled(from))
    }

    /// At most sixteen bytes as integers, and zeros for the rest.
    #[inline(always)]
    fn widen_bytes_part(from: &[u8]) -> Self {
        Self::widen_bytes(filled(from))
    }

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
    assert!(isa.is_available(), "this processor has no {isa}");
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

/// The bytes, and zeros.
#[inline(always)]
fn filled<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut all = [0; N];
    all[..bytes.len()].copy_from_slice(bytes);
    all
}

/// 0 to 15.
#[inline(always)]
pub fn iota<V: Lanes>() -> V {
    V::load(&std::array::from_fn(|i| i as f32))
}

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
    const PICKS: bool = false;
    const IN_REGISTERS: usize = 8;

    #[inline(never)]
    fn call<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Self>()
    }
    #[inline(always)]
    fn load_part(from: &[f32]) -> Self {
        let mut lanes = [0.0; LANES];
        lanes[..from.len()].copy_from_slice(from);
        Self(lanes)
    }
    #[inline(always)]
    fn load_bf16(from: &[u8; 2 * LANES]) -> Self {
        let value = |i: usize| super::bf16_to_f32(u16::from_le_bytes([from[2 * i], from[2 * i + 1]]));
        Self(std::array::from_fn(value))
    }
    #[inline(always)]
    fn load_f16(from: &[u8; 2 * LANES]) -> Self {
        let value = |i: usize| super::f16_to_f32(u16::from_le_bytes([from[2 * i], from[2 * i + 1]]));
        Self(std::array::from_fn(value))
    }
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
    fn to_float(self) -> Self {
        self.map(|lane| lane.to_bits() as i32 as f32)
    }
    #[inline(always)]
    fn to_int(self) -> Self {
        self.map(|lane| f32::from_bits(lane as i32 as u32))
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
    fn imul(self, other: Self) -> Self {
        self.zip_bits(other, u32::wrapping_mul)
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
    fn pick(self, table: Self) -> Self {
        self.map(|lane| table.0[(lane.to_bits() & 15) as usize])
    }
    #[inline(always)]
    fn load_bytes_part(from: &[u8]) -> Self {
        Self::load_bytes(&filled(from))
    }
    #[inline(always)]
    fn load_bytes(from: &[u8; 4 * LANES]) -> Self {
        let (lanes, _) = from.as_chunks::<4>();
        let mut out = [0.0; LANES];
        for (lane, bytes) in out.iter_mut().zip(lanes) {
            *lane = f32::from_bits(u32::from_le_bytes(*bytes));
        }
        Self(out)
    }
    #[inline(always)]
    fn pick_bytes(self, table: &[u8; LANES]) -> Self {
        let pick = |byte: u8| table[usize::from(byte & 15)];
        self.map(|lane| f32::from_bits(u32::from_le_bytes(lane.to_bits().to_le_bytes().map(pick))))
    }
    #[inline(always)]
    fn dot_bytes(self, codes: Self, x: Self) -> Self {
        let mut out = self.0;
        for ((sum, codes), x) in out.iter_mut().zip(codes.0).zip(x.0) {
            let mut total = sum.to_bits() as i32;
            for (code, x) in codes.to_bits().to_le_bytes().into_iter().zip(x.to_bits().to_le_bytes()) {
                total = total.wrapping_add(i32::from(code) * i32::from(x as i8));
            }
            *sum = f32::from_bits(total as u32);
        }
        Self(out)
    }
    #[inline(always)]
    fn windows<const STEP: u32>(low: u64, high: u64, mask: Self) -> Self {
        let mut out = mask.0;
        for (l, lane) in out.iter_mut().enumerate() {
            let (from_high, at) = window_start(STEP, l);
            let window = if from_high { high } else { low } >> at;
            *lane = f32::from_bits(window as u32 & lane.to_bits());
        }
        Self(out)
    }
    #[inline(always)]
    fn times(by: i8) -> u32 {
        i32::from(by) as u32
    }
    #[inline(always)]
    fn add_bytes(self, codes: Self, by: Self) -> Self {
        let sum = |codes: u32| codes.to_le_bytes().into_iter().map(u32::from).sum::<u32>();
        self.iadd(codes.zip_bits(by, |codes, by| sum(codes).wrapping_mul(by)))
    }
    #[inline(always)]
    fn byte_codes<const BITS: u32>(packed: &[u8]) -> Self {
        Self::load_bytes(&spread_bytes::<Self, BITS>(packed))
    }
    #[inline(always)]
    fn group_sums(parts: &[Self]) -> Self {
        let mut sums = [0u32; LANES];
        for (p, part) in parts.iter().enumerate() {
            for (l, lane) in part.0.iter().enumerate() {
                let sum = &mut sums[(p * LANES + l) / parts.len()];
                *sum = sum.wrapping_add(lane.to_bits());
            }
        }
        Self(sums.map(f32::from_bits))
    }
    #[inline(always)]
    fn butterflies(self) -> Self {
        let mut lanes = self.0;
        for distance in [1, 2, 4, 8] {
            for i in 0..LANES {
                if i & distance == 0 {
                    let (a, b) = (lanes[i], lanes[i + distance]);
                    (lanes[i], lanes[i + distance]) = (a + b, a - b);
                }
            }
        }
        Self(lanes)
    }
    #[inline(always)]
    fn transpose(all: [Self; LANES]) -> [Self; LANES] {
        let mut out = all;
        for (j, out) in out.iter_mut().enumerate() {
            for (i, lane) in out.0.iter_mut().enumerate() {
                *lane = all[i].0[j];
            }
        }
        out
    }
    #[inline(always)]
    fn sums(all: [Self; LANES]) -> Self {
        Self(all.map(Self::sum))
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
    fn wide_load(from: &[f64; LANES]) -> Self::Wide {
        *from
    }
    #[inline(always)]
    fn widen(self) -> Self::Wide {
        let mut wide = [0.0; LANES];
        for (to, lane) in wide.iter_mut().zip(self.0) {
            *to = f64::from(lane);
        }
        wide
    }
    #[inline(always)]
    fn narrow(wide: Self::Wide) -> Self {
        let mut lanes = [0.0; LANES];
        for (to, lane) in lanes.iter_mut().zip(wide) {
            *to = lane as f32;
        }
        Self(lanes)
    }
    #[inline(always)]
    fn wide_mul(mut wide: Self::Wide, by: f64) -> Self::Wide {
        for lane in &mut wide {
            *lane *= by;
        }
        wide
    }
    #[inline(always)]
    fn wide_add_signed(mut sum: Self::Wide, sign: f64, wide: Self::Wide) -> Self::Wide {
        for (total, lane) in sum.iter_mut().zip(wide) {
            *total += sign * lane;
        }
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

/// Where the window of lane `l` begins, for [`Lanes::windows`]: whether in `high`, and at which bit.
#[inline(always)]
const fn window_start(step: u32, l: usize) -> (bool, u32) {
    let at = (LANES - 1 - l) as u32 * step;
    if step == 4 && l < LANES / 2 { (true, at - 32) } else { (false, at) }
}

/// [`Lanes::byte_codes`] by [`Lanes::spread`], eight codes at a time.
#[inline(always)]
fn spread_bytes<V: Lanes, const BITS: u32>(packed: &[u8]) -> [u8; 4 * LANES] {
    let mut codes = [0; 4 * LANES];
    for (codes, packed) in codes.as_chunks_mut::<8>().0.iter_mut().zip(packed.chunks_exact(BITS as usize)) {
        let mut word = [0; 8];
        word[..BITS as usize].copy_from_slice(packed);
        *codes = V::spread::<BITS>(u64::from_le_bytes(word)).to_le_bytes();
    }
    codes
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

    use super::{Kernel, LANES, Lanes, filled, spread_bytes, window_start};

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
        const PICKS: bool = false;
        const IN_REGISTERS: usize = 8;

        #[inline(always)]
        fn call<K: Kernel>(kernel: K) -> K::Output {
            unsafe { run_avx2(kernel) }
        }
        #[inline(always)]
        fn load_part(from: &[f32]) -> Self {
            let mut lanes = [0.0; LANES];
            lanes[..from.len()].copy_from_slice(from);
            Self::load(&lanes)
        }
        #[inline(always)]
        fn load_bf16(from: &[u8; 2 * LANES]) -> Self {
            unsafe {
                let half = |at: usize| {
                    let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().add(at).cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
                };
                Self(half(0), half(16))
            }
        }
        #[inline(always)]
        fn load_f16(from: &[u8; 2 * LANES]) -> Self {
            unsafe {
                let half = |at: usize| _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().add(at).cast()));
                Self(half(0), half(16))
            }
        }
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
        fn to_float(self) -> Self {
            unsafe {
                Self(
                    _mm256_cvtepi32_ps(_mm256_castps_si256(self.0)),
                    _mm256_cvtepi32_ps(_mm256_castps_si256(self.1)),
                )
            }
        }
        #[inline(always)]
        fn to_int(self) -> Self {
            unsafe {
                Self(
                    _mm256_castsi256_ps(_mm256_cvttps_epi32(self.0)),
                    _mm256_castsi256_ps(_mm256_cvttps_epi32(self.1)),
                )
            }
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
        fn imul(self, other: Self) -> Self {
            both_integers!(_mm256_mullo_epi32(self, other))
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
        fn pick(self, table: Self) -> Self {
            unsafe {
                let half = |index: __m256| {
                    // The sign of the blend's selector is bit 3 of the index.
                    let upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(_mm256_castps_si256(index)));
                    let index = _mm256_castps_si256(index);
                    let low = _mm256_permutevar8x32_ps(table.0, index);
                    let high = _mm256_permutevar8x32_ps(table.1, index);
                    _mm256_blendv_ps(low, high, upper)
                };
                Self(half(self.0), half(self.1))
            }
        }
        #[inline(always)]
        fn load_bytes_part(from: &[u8]) -> Self {
            Self::load_bytes(&filled(from))
        }
        #[inline(always)]
        fn load_bytes(from: &[u8; 4 * LANES]) -> Self {
            unsafe {
                Self(_mm256_loadu_ps(from.as_ptr().cast()), _mm256_loadu_ps(from.as_ptr().add(32).cast()))
            }
        }
        #[inline(always)]
        fn pick_bytes(self, table: &[u8; LANES]) -> Self {
            let table = unsafe {
                _mm256_castsi256_ps(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())))
            };
            let table = Self(table, table);
            both_integers!(_mm256_shuffle_epi8(table, self))
        }
        #[inline(always)]
        fn dot_bytes(self, codes: Self, x: Self) -> Self {
            unsafe { Self(dot_half(self.0, codes.0, x.0), dot_half(self.1, codes.1, x.1)) }
        }
        #[inline(always)]
        fn windows<const STEP: u32>(low: u64, high: u64, mask: Self) -> Self {
            unsafe {
                // Both halves of a register hold the word, so a byte past its end is one that the mask drops.
                let tables = &NEAR_WINDOWS[STEP as usize];
                let low = _mm256_set1_epi64x(low as i64);
                let high = if STEP == 4 { _mm256_set1_epi64x(high as i64) } else { low };
                let half = |word: __m256i, i: usize| {
                    let bytes = _mm256_shuffle_epi8(word, load_eight(&tables.0[i]));
                    _mm256_castsi256_ps(_mm256_srlv_epi32(bytes, load_eight(&tables.1[i])))
                };
                Self(half(high, 0), half(low, 1)).and(mask)
            }
        }
        #[inline(always)]
        fn times(by: i8) -> u32 {
            u32::from(i16::from(by) as u16) * 0x0001_0001
        }
        #[inline(always)]
        fn add_bytes(self, codes: Self, by: Self) -> Self {
            unsafe {
                // Two bytes make at most 510, so nothing saturates.
                let half = |sum: __m256, codes: __m256, by: __m256| {
                    let pairs = _mm256_maddubs_epi16(_mm256_castps_si256(codes), _mm256_set1_epi8(1));
                    let products = _mm256_madd_epi16(pairs, _mm256_castps_si256(by));
                    _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), products))
                };
                Self(half(self.0, codes.0, by.0), half(self.1, codes.1, by.1))
            }
        }
        #[inline(always)]
        fn byte_codes<const BITS: u32>(packed: &[u8]) -> Self {
            Self::load_bytes(&spread_bytes::<Self, BITS>(packed))
        }
        #[inline(always)]
        fn group_sums(parts: &[Self]) -> Self {
            // Eights of lanes, end to end; each round halves their number.
            let mut eights = [Self::splat_bits(0); LANES];
            eights[..parts.len()].copy_from_slice(parts);
            let mut count = parts.len();
            while count > 1 {
                count /= 2;
                for i in 0..count {
                    let (a, b) = (eights[2 * i], eights[2 * i + 1]);
                    // SAFETY: as in `both`.
                    eights[i] = unsafe { Self(add_pairs(a.0, a.1), add_pairs(b.0, b.1)) };
                }
            }
            eights[0]
        }
        #[inline(always)]
        fn butterflies(self) -> Self {
            unsafe {
                let (low, high) = (butterflies_of_eight(self.0), butterflies_of_eight(self.1));
                Self(_mm256_add_ps(low, high), _mm256_sub_ps(low, high))
            }
        }
        #[inline(always)]
        fn transpose(all: [Self; LANES]) -> [Self; LANES] {
            let mut out = all;
            for i in 0..2 {
                let (mut low, mut high) = ([all[0].0; 8], [all[0].0; 8]);
                for j in 0..8 {
                    low[j] = all[8 * i + j].0;
                    high[j] = all[8 * i + j].1;
                }
                // SAFETY: as in `both`.
                let (low, high) = unsafe { (transpose_eights(low), transpose_eights(high)) };
                for j in 0..8 {
                    if i == 0 {
                        out[j].0 = low[j];
                        out[8 + j].0 = high[j];
                    } else {
                        out[j].1 = low[j];
                        out[8 + j].1 = high[j];
                    }
                }
            }
            out
        }
        #[inline(always)]
        fn sums(all: [Self; LANES]) -> Self {
            unsafe {
                let mut eights = [_mm256_setzero_ps(); LANES];
                for (eight, lanes) in eights.iter_mut().zip(all) {
                    *eight = _mm256_add_ps(lanes.0, lanes.1);
                }
                Self(sum_eights(&eights[..8]), sum_eights(&eights[8..]))
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
        fn wide_load(from: &[f64; LANES]) -> Self::Wide {
            unsafe {
                let at = from.as_ptr();
                [
                    _mm256_loadu_pd(at),
                    _mm256_loadu_pd(at.add(4)),
                    _mm256_loadu_pd(at.add(8)),
                    _mm256_loadu_pd(at.add(12)),
                ]
            }
        }
        #[inline(always)]
        fn widen(self) -> Self::Wide {
            unsafe {
                [
                    _mm256_cvtps_pd(_mm256_castps256_ps128(self.0)),
                    _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(self.0)),
                    _mm256_cvtps_pd(_mm256_castps256_ps128(self.1)),
                    _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(self.1)),
                ]
            }
        }
        #[inline(always)]
        fn narrow(wide: Self::Wide) -> Self {
            unsafe {
                let [a, b, c, d] = wide;
                Self(
                    _mm256_set_m128(_mm256_cvtpd_ps(b), _mm256_cvtpd_ps(a)),
                    _mm256_set_m128(_mm256_cvtpd_ps(d), _mm256_cvtpd_ps(c)),
                )
            }
        }
        #[inline(always)]
        fn wide_mul(mut wide: Self::Wide, by: f64) -> Self::Wide {
            for four in &mut wide {
                *four = unsafe { _mm256_mul_pd(*four, _mm256_set1_pd(by)) };
            }
            wide
        }
        #[inline(always)]
        fn wide_add_signed(mut sum: Self::Wide, sign: f64, wide: Self::Wide) -> Self::Wide {
            for (sum, four) in sum.iter_mut().zip(wide) {
                *sum = unsafe { _mm256_fmadd_pd(four, _mm256_set1_pd(sign), *sum) };
            }
            sum
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

    /// For each step of [`Lanes::windows`] and each half of the lanes: the bytes of a word that hold each window, and
    /// the bit of these at which it begins.
    static NEAR_WINDOWS: [([Eight; 2], [Eight; 2]); 5] = {
        let mut tables = [([Eight([0; 32]); 2], [Eight([0; 32]); 2]); 5];
        let mut step = 1;
        while step <= 4 {
            let mut lane = 0;
            while lane < LANES {
                let (_, at) = window_start(step as u32, lane);
                let mut byte = 0;
                while byte < 4 {
                    tables[step].0[lane / 8].0[4 * (lane % 8) + byte] = (at / 8) as u8 + byte as u8;
                    byte += 1;
                }
                tables[step].1[lane / 8].0[4 * (lane % 8)] = (at % 8) as u8;
                lane += 1;
            }
            step += 1;
        }
        tables
    };

    #[derive(Clone, Copy)]
    #[repr(align(32))]
    struct Eight([u8; 32]);

    /// # Safety
    /// The processor must have AVX2.
    #[inline(always)]
    unsafe fn load_eight(from: &Eight) -> __m256i {
        // SAFETY: 32 bytes, aligned, and the caller's word.
        unsafe { _mm256_load_si256(from.0.as_ptr().cast()) }
    }

    /// `sum + Σ_j codes[j] · x[j]` over four bytes each.
    ///
    /// # Safety
    /// The processor must have AVX2.
    #[inline(always)]
    unsafe fn dot_half(sum: __m256, codes: __m256, x: __m256) -> __m256 {
        // SAFETY: the caller's word.
        unsafe {
            let (codes, x) = (_mm256_castps_si256(codes), _mm256_castps_si256(x));
            let ones = _mm256_set1_epi16(1);
            // A sum of two products may pass 2^15, where this multiplication saturates; one does not.
            let even = _mm256_maddubs_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0xff)), x);
            let odd = _mm256_maddubs_epi16(_mm256_andnot_si256(_mm256_set1_epi16(0xff), codes), x);
            let products = _mm256_add_epi32(_mm256_madd_epi16(even, ones), _mm256_madd_epi16(odd, ones));
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), products))
        }
    }

    /// Sums of neighbours, of a and then of b.
    ///
    /// # Safety
    /// The processor must have AVX2.
    #[inline(always)]
    unsafe fn add_pairs(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller's word.
        unsafe {
            // The sums of a's halves come out on either side of b's.
            let sums = _mm256_hadd_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b));
            _mm256_castsi256_ps(_mm256_permute4x64_epi64::<0b11_01_10_00>(sums))
        }
    }

    /// [`Lanes::butterflies`] of eight lanes, for distances 1, 2 and 4.
    ///
    /// # Safety
    /// The processor must have AVX2 and FMA.
    #[inline(always)]
    unsafe fn butterflies_of_eight(x: __m256) -> __m256 {
        // SAFETY: the caller's word.
        unsafe {
            // A product with 1 or -1 is exact, so this is the sum or the difference, rounded once.
            let signs = _mm256_setr_ps(1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0);
            let x = _mm256_fmadd_ps(x, signs, _mm256_permute_ps::<0b10_11_00_01>(x));
            let signs = _mm256_setr_ps(1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0);
            let x = _mm256_fmadd_ps(x, signs, _mm256_permute_ps::<0b01_00_11_10>(x));
            let signs = _mm256_setr_ps(1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0);
            _mm256_fmadd_ps(x, signs, _mm256_permute2f128_ps::<0x01>(x, x))
        }
    }

    /// Lane j of `all[i]` to lane i of the result's j.
    ///
    /// # Safety
    /// The processor must have AVX2.
    #[inline(always)]
    unsafe fn transpose_eights(all: [__m256; 8]) -> [__m256; 8] {
        // SAFETY: the caller's word.
        unsafe {
            // Two by two, then four by four within fours of lanes; then the fours themselves.
            let (mut a, mut b, mut out) = (all, all, all);
            for i in 0..4 {
                a[2 * i] = _mm256_unpacklo_ps(all[2 * i], all[2 * i + 1]);
                a[2 * i + 1] = _mm256_unpackhi_ps(all[2 * i], all[2 * i + 1]);
            }
            for i in 0..2 {
                for half in 0..2 {
                    let (x, y) = (a[4 * i + half], a[4 * i + half + 2]);
                    b[4 * i + 2 * half] = _mm256_shuffle_ps::<0b01_00_01_00>(x, y);
                    b[4 * i + 2 * half + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(x, y);
                }
            }
            for j in 0..4 {
                out[j] = _mm256_permute2f128_ps::<0x20>(b[j], b[4 + j]);
                out[4 + j] = _mm256_permute2f128_ps::<0x31>(b[j], b[4 + j]);
            }
            out
        }
    }

    /// The sum of each of eight registers, by halves.
    ///
    /// # Safety
    /// The processor must have AVX2.
    #[inline(always)]
    unsafe fn sum_eights(eights: &[__m256]) -> __m256 {
        // SAFETY: the caller's word.
        unsafe {
            // Four lanes each of i and i + 4, then two lanes each of two such, then one.
            let mut fours = [_mm256_setzero_ps(); 4];
            for (i, four) in fours.iter_mut().enumerate() {
                let (a, b) = (eights[i], eights[i + 4]);
                *four =
                    _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
            }
            let mut twos = [_mm256_setzero_ps(); 2];
            for (i, two) in twos.iter_mut().enumerate() {
                let (a, b) = (fours[2 * i], fours[2 * i + 1]);
                *two = _mm256_add_ps(
                    _mm256_shuffle_ps::<0b01_00_01_00>(a, b),
                    _mm256_shuffle_ps::<0b11_10_11_10>(a, b),
                );
            }
            let [a, b] = twos;
            _mm256_add_ps(_mm256_shuffle_ps::<0b10_00_10_00>(a, b), _mm256_shuffle_ps::<0b11_01_11_01>(a, b))
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
        const PICKS: bool = true;
        const IN_REGISTERS: usize = 32;

        #[inline(always)]
        fn call<K: Kernel>(kernel: K) -> K::Output {
            unsafe { run_avx512(kernel) }
        }
        #[inline(always)]
        fn load_part(from: &[f32]) -> Self {
            assert!(from.len() <= LANES, "at most sixteen values");
            unsafe {
                let lanes = ((1u32 << from.len()) - 1) as __mmask16;
                Self(_mm512_maskz_loadu_ps(lanes, from.as_ptr()))
            }
        }
        #[inline(always)]
        fn load_bf16(from: &[u8; 2 * LANES]) -> Self {
            unsafe {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)))
            }
        }
        #[inline(always)]
        fn load_f16(from: &[u8; 2 * LANES]) -> Self {
            unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast()))) }
        }
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
        fn to_float(self) -> Self {
            unsafe { Self(_mm512_cvtepi32_ps(_mm512_castps_si512(self.0))) }
        }
        #[inline(always)]
        fn to_int(self) -> Self {
            unsafe { Self(_mm512_castsi512_ps(_mm512_cvttps_epi32(self.0))) }
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
        fn imul(self, other: Self) -> Self {
            integers!(_mm512_mullo_epi32(self, other))
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
        fn pick(self, table: Self) -> Self {
            unsafe { Self(_mm512_permutexvar_ps(_mm512_castps_si512(self.0), table.0)) }
        }
        #[inline(always)]
        fn load_bf16_part(from: &[u8]) -> Self {
            assert!(from.len() <= 2 * LANES, "at most sixteen values");
            unsafe {
                let values = ((1u64 << (from.len() / 2)) - 1) as __mmask16;
                let bits = _mm256_maskz_loadu_epi16(values, from.as_ptr().cast());
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits))))
            }
        }
        #[inline(always)]
        fn load_f16_part(from: &[u8]) -> Self {
            assert!(from.len() <= 2 * LANES, "at most sixteen values");
            unsafe {
                let values = ((1u64 << (from.len() / 2)) - 1) as __mmask16;
                Self(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(values, from.as_ptr().cast())))
            }
        }
        #[inline(always)]
        fn widen_bytes_part(from: &[u8]) -> Self {
            assert!(from.len() <= LANES, "at most sixteen bytes");
            unsafe {
                let lanes = ((1u32 << from.len()) - 1) as __mmask16;
                let bytes = _mm_maskz_loadu_epi8(lanes, from.as_ptr().cast());
                Self(_mm512_castsi512_ps(_mm512_cvtepu8_epi32(bytes)))
            }
        }
        #[inline(always)]
        fn load_bytes_part(from: &[u8]) -> Self {
            assert!(from.len() <= 4 * LANES, "at most 64 bytes");
            let bytes = ((1u128 << from.len()) - 1) as __mmask64;
            unsafe { Self(_mm512_castsi512_ps(_mm512_maskz_loadu_epi8(bytes, from.as_ptr().cast()))) }
        }
        #[inline(always)]
        fn load_bytes(from: &[u8; 4 * LANES]) -> Self {
            unsafe { Self(_mm512_loadu_ps(from.as_ptr().cast())) }
        }
        #[inline(always)]
        fn pick_bytes(self, table: &[u8; LANES]) -> Self {
            unsafe {
                let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
                Self(_mm512_castsi512_ps(_mm512_shuffle_epi8(table, _mm512_castps_si512(self.0))))
            }
        }
        #[inline(always)]
        fn dot_bytes(self, codes: Self, x: Self) -> Self {
            unsafe {
                Self(_mm512_castsi512_ps(_mm512_dpbusd_epi32(
                    _mm512_castps_si512(self.0),
                    _mm512_castps_si512(codes.0),
                    _mm512_castps_si512(x.0),
                )))
            }
        }
        #[inline(always)]
        fn windows<const STEP: u32>(low: u64, high: u64, mask: Self) -> Self {
            unsafe {
                let words = if STEP == 4 {
                    _mm512_mask_set1_epi64(_mm512_set1_epi64(high as i64), 0xf0, low as i64)
                } else {
                    _mm512_set1_epi64(low as i64)
                };
                // Bytes that begin past a word's end are those of its beginning, and the mask drops them.
                let windows = _mm512_multishift_epi64_epi8(WINDOWS[STEP as usize].load(), words);
                Self(_mm512_castsi512_ps(_mm512_and_si512(windows, _mm512_castps_si512(mask.0))))
            }
        }
        #[inline(always)]
        fn times(by: i8) -> u32 {
            u32::from(by as u8) * 0x0101_0101
        }
        #[inline(always)]
        fn add_bytes(self, codes: Self, by: Self) -> Self {
            self.dot_bytes(codes, by)
        }
        #[inline(always)]
        fn byte_codes<const BITS: u32>(packed: &[u8]) -> Self {
            let packed = Self::load_bytes_part(packed);
            if BITS == 8 {
                return packed;
            }
            unsafe {
                // Eight codes fill `BITS` bytes, which become a word of 64 bits of their own.
                let words =
                    _mm512_permutexvar_epi8(EIGHTS[BITS as usize].load(), _mm512_castps_si512(packed.0));
                let fields = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(starts(BITS)), words);
                let codes = _mm512_and_si512(fields, _mm512_set1_epi8((1 << BITS) - 1));
                Self(_mm512_castsi512_ps(codes))
            }
        }
        #[inline(always)]
        fn group_sums(parts: &[Self]) -> Self {
            unsafe {
                // Every four parts become one: lane 4 b + p is the sum of the four lanes b of part p.
                let mut fours = [_mm512_setzero_si512(); 4];
                for (four, parts) in fours.iter_mut().zip(parts.chunks(4)) {
                    let [a, b, c, d] = match *parts {
                        [a, b, c, d] => [a.0, b.0, c.0, d.0],
                        [a, b] => [a.0, b.0, a.0, b.0],
                        _ => unreachable!("2, 4, 8 or 16 parts"),
                    };
                    let (ab, cd) = (add_neighbours(a, b), add_neighbours(c, d));
                    *four = if parts.len() == 2 {
                        // Pairs of a in the even fours of words, of b in the odd ones.
                        _mm512_castps_si512(ab)
                    } else {
                        _mm512_castps_si512(add_neighbours(ab, cd))
                    };
                }
                let [a, b, c, d] = fours;
                let (sums, order) = match parts.len() {
                    2 => (a, [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]),
                    4 => (a, [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15]),
                    8 => (add_quarters(a, b), [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]),
                    _ => {
                        return Self(_mm512_castsi512_ps(add_quarters(
                            add_quarters(a, b),
                            add_quarters(c, d),
                        )));
                    }
                };
                let order: [i32; LANES] = order;
                let order = _mm512_loadu_si512(order.as_ptr().cast());
                Self(_mm512_castsi512_ps(_mm512_permutexvar_epi32(order, sums)))
            }
        }
        #[inline(always)]
        fn butterflies(self) -> Self {
            unsafe {
                // A product with 1 or -1 is exact, so this is the sum or the difference, rounded once.
                let x = self.0;
                let x = _mm512_fmadd_ps(x, SIGNS[0].load(), _mm512_permute_ps::<0b10_11_00_01>(x));
                let x = _mm512_fmadd_ps(x, SIGNS[1].load(), _mm512_permute_ps::<0b01_00_11_10>(x));
                let x = _mm512_fmadd_ps(x, SIGNS[2].load(), _mm512_shuffle_f32x4::<0b10_11_00_01>(x, x));
                Self(_mm512_fmadd_ps(x, SIGNS[3].load(), _mm512_shuffle_f32x4::<0b01_00_11_10>(x, x)))
            }
        }
        #[inline(always)]
        fn transpose(all: [Self; LANES]) -> [Self; LANES] {
            unsafe {
                // Two by two, then four by four within fours of lanes; then the fours themselves.
                let mut a = all;
                for i in 0..LANES / 2 {
                    let (x, y) = (all[2 * i].0, all[2 * i + 1].0);
                    a[2 * i].0 = _mm512_unpacklo_ps(x, y);
                    a[2 * i + 1].0 = _mm512_unpackhi_ps(x, y);
                }
                let mut b = all;
                for i in 0..LANES / 4 {
                    for half in 0..2 {
                        let x = _mm512_castps_pd(a[4 * i + half].0);
                        let y = _mm512_castps_pd(a[4 * i + half + 2].0);
                        b[4 * i + 2 * half].0 = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
                        b[4 * i + 2 * half + 1].0 = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
                    }
                }
                // b[4 i + j]: lanes j, 4 + j, 8 + j and 12 + j of rows 4 i to 4 i + 3.
                let mut out = all;
                for j in 0..4 {
                    let [r0, r1, r2, r3] = [b[j].0, b[4 + j].0, b[8 + j].0, b[12 + j].0];
                    let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(r0, r1);
                    let low2 = _mm512_shuffle_f32x4::<0b01_00_01_00>(r2, r3);
                    let high = _mm512_shuffle_f32x4::<0b11_10_11_10>(r0, r1);
                    let high2 = _mm512_shuffle_f32x4::<0b11_10_11_10>(r2, r3);
                    out[j].0 = _mm512_shuffle_f32x4::<0b10_00_10_00>(low, low2);
                    out[4 + j].0 = _mm512_shuffle_f32x4::<0b11_01_11_01>(low, low2);
                    out[8 + j].0 = _mm512_shuffle_f32x4::<0b10_00_10_00>(high, high2);
                    out[12 + j].0 = _mm512_shuffle_f32x4::<0b11_01_11_01>(high, high2);
                }
                out
            }
        }
        #[inline(always)]
        fn sums(all: [Self; LANES]) -> Self {
            unsafe {
                // Four rounds: the halves of two registers are added into one, until each lane is a sum.
                let mut a = [_mm512_setzero_ps(); 8];
                for (i, to) in a.iter_mut().enumerate() {
                    let (x, y) = (all[i].0, all[i + 8].0);
                    *to = _mm512_add_ps(
                        _mm512_shuffle_f32x4::<0b01_00_01_00>(x, y),
                        _mm512_shuffle_f32x4::<0b11_10_11_10>(x, y),
                    );
                }
                // a[i]: eight lanes of i, eight of i + 8.
                let mut b = [_mm512_setzero_ps(); 4];
                for (i, to) in b.iter_mut().enumerate() {
                    let (x, y) = (a[i], a[i + 4]);
                    *to = _mm512_add_ps(
                        _mm512_shuffle_f32x4::<0b10_00_10_00>(x, y),
                        _mm512_shuffle_f32x4::<0b11_01_11_01>(x, y),
                    );
                }
                // b[i]: four lanes each of i, i + 8, i + 4, i + 12.
                let mut c = [_mm512_setzero_ps(); 2];
                for (i, to) in c.iter_mut().enumerate() {
                    let (x, y) = (b[2 * i], b[2 * i + 1]);
                    *to = _mm512_add_ps(
                        _mm512_shuffle_ps::<0b01_00_01_00>(x, y),
                        _mm512_shuffle_ps::<0b11_10_11_10>(x, y),
                    );
                }
                let sums = _mm512_add_ps(
                    _mm512_shuffle_ps::<0b10_00_10_00>(c[0], c[1]),
                    _mm512_shuffle_ps::<0b11_01_11_01>(c[0], c[1]),
                );
                // 0..4, 8..12, 4..8, 12..16.
                Self(_mm512_shuffle_f32x4::<0b11_01_10_00>(sums, sums))
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
        fn wide_load(from: &[f64; LANES]) -> Self::Wide {
            unsafe { [_mm512_loadu_pd(from.as_ptr()), _mm512_loadu_pd(from.as_ptr().add(8))] }
        }
        #[inline(always)]
        fn widen(self) -> Self::Wide {
            unsafe {
                [
                    _mm512_cvtps_pd(_mm512_castps512_ps256(self.0)),
                    _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(self.0)),
                ]
            }
        }
        #[inline(always)]
        fn narrow(wide: Self::Wide) -> Self {
            unsafe {
                let low = _mm512_castps256_ps512(_mm512_cvtpd_ps(wide[0]));
                Self(_mm512_insertf32x8::<1>(low, _mm512_cvtpd_ps(wide[1])))
            }
        }
        #[inline(always)]
        fn wide_mul(wide: Self::Wide, by: f64) -> Self::Wide {
            unsafe {
                let by = _mm512_set1_pd(by);
                [_mm512_mul_pd(wide[0], by), _mm512_mul_pd(wide[1], by)]
            }
        }
        #[inline(always)]
        fn wide_add_signed(sum: Self::Wide, sign: f64, wide: Self::Wide) -> Self::Wide {
            unsafe {
                let sign = _mm512_set1_pd(sign);
                [_mm512_fmadd_pd(wide[0], sign, sum[0]), _mm512_fmadd_pd(wide[1], sign, sum[1])]
            }
        }
        #[inline(always)]
        fn squeeze<const BITS: u32>(codes: u64) -> u64 {
            unsafe { _pext_u64(codes, code_mask(BITS)) }
        }
        #[inline(always)]
        fn spread<const BITS: u32>(packed: u64) -> u64 {
            unsafe { _pdep_u64(packed, code_mask(BITS)) }
        }
        #[inline(always)]
        fn codes<const BITS: u32>(packed: &[u8]) -> [Self; 2] {
            assert!(packed.len() >= 4 * BITS as usize, "32 codes");
            unsafe {
                let mut halves = [_mm512_setzero_si512(); 2];
                for (half, to) in halves.iter_mut().enumerate() {
                    let at = packed.as_ptr().add(half * second_half(BITS as usize));
                    let fields = match BITS {
                        2..=4 => _mm512_set1_epi64(at.cast::<i64>().read_unaligned()),
                        5 | 6 => _mm512_permutexvar_epi8(
                            WORDS[BITS as usize][half].load(),
                            _mm512_castsi128_si512(_mm_loadu_si128(at.cast())),
                        ),
                        _ => _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())),
                    };
                    *to = if BITS == 8 {
                        fields
                    } else {
                        let codes = _mm512_multishift_epi64_epi8(FIELDS[BITS as usize][half].load(), fields);
                        _mm512_and_si512(codes, _mm512_set1_epi32((1 << BITS) - 1))
                    };
                }
                let [low, high] = halves;
                [Self(_mm512_castsi512_ps(low)), Self(_mm512_castsi512_ps(high))]
            }
        }
    }

    /// Within every four lanes, the sums of neighbours of a, then of b.
    ///
    /// # Safety
    /// The processor must have AVX-512 F.
    #[inline(always)]
    unsafe fn add_neighbours(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller's word.
        unsafe {
            let even = _mm512_castps_si512(_mm512_shuffle_ps::<0b10_00_10_00>(a, b));
            let odd = _mm512_castps_si512(_mm512_shuffle_ps::<0b11_01_11_01>(a, b));
            _mm512_castsi512_ps(_mm512_add_epi32(even, odd))
        }
    }

    /// The sums of a's fours of lanes 0 and 1, and 2 and 3; then of b's.
    ///
    /// # Safety
    /// The processor must have AVX-512 F.
    #[inline(always)]
    unsafe fn add_quarters(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the caller's word.
        unsafe {
            _mm512_add_epi32(
                _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b),
                _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b),
            )
        }
    }

    /// For each distance of [`Lanes::butterflies`]: 1 in the lanes that become sums, else -1.
    static SIGNS: [Numbers; 4] = {
        let mut tables = [Numbers([1.0; LANES]); 4];
        let mut stage = 0;
        while stage < 4 {
            let mut lane = 0;
            while lane < LANES {
                if lane >> stage & 1 == 1 {
                    tables[stage].0[lane] = -1.0;
                }
                lane += 1;
            }
            stage += 1;
        }
        tables
    };

    #[derive(Clone, Copy)]
    #[repr(align(64))]
    struct Numbers([f32; LANES]);

    impl Numbers {
        #[inline(always)]
        fn load(&self) -> __m512 {
            // SAFETY: 64 bytes, aligned; called only inside `run_avx512`.
            unsafe { _mm512_load_ps(self.0.as_ptr()) }
        }
    }

    /// Where eight codes of `bits` bits begin in a word, a byte each.
    const fn starts(bits: u32) -> i64 {
        let (mut starts, mut code) = (0, 0);
        while code < 8 {
            starts |= (code * bits as i64) << (8 * code);
            code += 1;
        }
        starts
    }

    /// For each step of [`Lanes::windows`]: where in its word each byte of each window begins.
    static WINDOWS: [Bytes; 5] = {
        let mut tables = [Bytes([0; 64]); 5];
        let mut step = 1;
        while step <= 4 {
            let mut lane = 0;
            while lane < LANES {
                let (_, at) = window_start(step as u32, lane);
                let mut byte = 0;
                while byte < 4 {
                    tables[step].0[4 * lane + byte] = ((at + 8 * byte as u32) % 64) as u8;
                    byte += 1;
                }
                lane += 1;
            }
            step += 1;
        }
        tables
    };

    /// Which bytes make a word of eight codes, for [`Lanes::byte_codes`].
    static EIGHTS: [Bytes; 7] = {
        let mut tables = [Bytes([0; 64]); 7];
        let mut bits = 2;
        while bits <= 6 {
            let mut byte = 0;
            while byte < 64 {
                // The last two or more of a word belong to no code.
                let within = if byte % 8 < bits { byte % 8 } else { 0 };
                tables[bits].0[byte] = (byte / 8 * bits + within) as u8;
                byte += 1;
            }
            bits += 1;
        }
        tables
    };

    /// Where the bytes begin that are loaded for the second sixteen of 32 codes: they end where the codes end.
    const fn second_half(bits: usize) -> usize {
        match bits {
            2..=4 => 4 * bits - 8,
            _ => 4 * bits - 16,
        }
    }

    /// Where in its word of 64 bits the code of each lane begins, for [`Lanes::codes`]: first and second half.
    static FIELDS: [[Bytes; 2]; 7] = tables(true);
    /// Which bytes make the word of each two lanes, for 5 and 6 bits.
    static WORDS: [[Bytes; 2]; 7] = tables(false);

    #[derive(Clone, Copy)]
    #[repr(align(64))]
    struct Bytes([u8; 64]);

    impl Bytes {
        #[inline(always)]
        fn load(&self) -> __m512i {
            // SAFETY: 64 bytes, aligned; called only inside `run_avx512`.
            unsafe { _mm512_load_si512(self.0.as_ptr().cast()) }
        }
    }

    const fn tables(fields: bool) -> [[Bytes; 2]; 7] {
        let mut tables = [[Bytes([0; 64]); 2]; 7];
        let mut bits = 2;
        while bits <= 6 {
            let mut lane = 0;
            while lane < 32 {
                let (half, at) = (lane / 16, lane % 16);
                // The bit at which the bytes begin that were loaded for this half.
                let loaded = 8 * half * second_half(bits);
                let bit = lane * bits - loaded;
                // For 5 and 6 bits, lanes 2i and 2i + 1 share the word that begins at the first one's byte.
                let word = if bits >= 5 { (lane / 2 * 2 * bits - loaded) / 8 } else { 0 };
                let mut byte = 0;
                while byte < 4 {
                    tables[bits][half].0[4 * at + byte] = if fields {
                        (bit - 8 * word) as u8
                    } else {
                        // Bytes past the loaded sixteen are not part of any code.
                        let from = word + 4 * (lane % 2) + byte;
                        if from < 16 { from as u8 } else { 15 }
                    };
                    byte += 1;
                }
                lane += 1;
            }
            bits += 1;
        }
        tables
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every operation on bytes and on several vectors, over `bytes`: results as bits.
    struct Operations<'a> {
        bytes: &'a [u8; 4 * LANES * LANES],
    }

    impl Kernel for Operations<'_> {
        type Output = Vec<[u32; LANES]>;

        #[inline(always)]
        fn run<V: Lanes>(self) -> Self::Output {
            let (rows, _) = self.bytes.as_chunks::<{ 4 * LANES }>();
            let mut all = [V::splat(0.0); LANES];
            for (to, row) in all.iter_mut().zip(rows) {
                *to = V::load_bytes(row);
            }
            let mut out = Vec::new();
            let mut note = |found: V| {
                let mut lanes = [0.0; LANES];
                found.store(&mut lanes);
                out.push(lanes.map(f32::to_bits));
            };
            V::transpose(all).into_iter().for_each(&mut note);
            for count in [2, 4, 8, 16] {
                note(V::group_sums(&all[..count]));
            }
            for pair in all.windows(2) {
                note(pair[0].dot_bytes(pair[0], pair[1]));
                note(V::splat_bits(0).dot_bytes(pair[1], pair[0]));
            }
            let nibbles = all[0].and(V::splat_bits(0x0f0f_0f0f));
            note(nibbles.pick_bytes(&[0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 250, 255]));
            for len in [0, 1, 4, 12, 16, 31, 32, 48, 63, 64] {
                note(V::load_bytes_part(&self.bytes[..len]));
                note(V::load_bf16_part(&self.bytes[..len.min(32) / 2 * 2]));
                note(V::widen_bytes_part(&self.bytes[..len.min(16)]));
            }
            for codes in [0, 8, 16, 32, 56, 64] {
                note(V::byte_codes::<2>(&self.bytes[..codes / 4]));
                note(V::byte_codes::<3>(&self.bytes[..codes * 3 / 8]));
                note(V::byte_codes::<4>(&self.bytes[..codes / 2]));
                note(V::byte_codes::<5>(&self.bytes[..codes * 5 / 8]));
                note(V::byte_codes::<6>(&self.bytes[..codes * 6 / 8]));
                note(V::byte_codes::<8>(&self.bytes[..codes]));
            }
            for (pair, words) in all.windows(2).zip(self.bytes.as_chunks::<16>().0) {
                note(pair[0].imul(pair[1]));
                for by in [-128, -1, 0, 1, words[0] as i8, 127] {
                    note(pair[1].add_bytes(pair[0], V::splat_bits(V::times(by))));
                }
                let word = |at: usize| u64::from_le_bytes(*words[at..].first_chunk().expect("eight bytes"));
                for bits in [10, 12, 16] {
                    let mask = V::splat_bits((1 << bits) - 1);
                    note(V::windows::<1>(word(0), word(4), mask));
                    note(V::windows::<2>(word(0), word(4), mask));
                    note(V::windows::<3>(word(0), word(4), mask));
                    note(V::windows::<4>(word(0), word(4), mask));
                }
            }
            let numbers = V::from_bytes(*self.bytes.first_chunk().expect("sixteen bytes"));
            let sums = [numbers; LANES];
            note(V::sums(sums));
            note(numbers.sub(V::splat(128.0)).to_int().to_float());
            note(V::widen_bytes(*self.bytes.last_chunk().expect("sixteen bytes")).pick(numbers));
            out.extend(operations_on_numbers::<V>(self.bytes));
            out
        }
    }

    /// Operations that round, on numbers from 2^-13 to 2^11 of both signs, zeros among them: results as bits.
    #[inline(always)]
    fn operations_on_numbers<V: Lanes>(bytes: &[u8; 4 * LANES * LANES]) -> Vec<[u32; LANES]> {
        let mut out = Vec::new();
        let mut note = |found: V| {
            let mut lanes = [0.0; LANES];
            found.store(&mut lanes);
            out.push(lanes.map(f32::to_bits));
        };
        // Sums of numbers of many magnitudes, so that each rounding of f64 is one.
        let mut sum = V::wide_zero();
        let mut wides = Vec::new();
        for (i, row) in bytes.as_chunks::<{ 4 * LANES }>().0.iter().enumerate() {
            let mut numbers = [0.0; LANES];
            for (to, word) in numbers.iter_mut().zip(row.as_chunks::<4>().0) {
                let word = u32::from_le_bytes(*word);
                let exponent = 114 + (word >> 23) % 24;
                *to =
                    f32::from_bits(word & 0x807f_ffff | exponent << 23) * f32::from(u8::from(word % 8 != 0));
            }
            let numbers = V::load(&numbers);
            note(numbers.butterflies());
            let small = V::wide_mul(numbers.widen(), 1.0 / 3.0 * 2f64.powi(4 * i as i32 - 48));
            for sign in [1.0, -1.0, -1.0] {
                sum = V::wide_add_signed(sum, sign, V::wide_load(&V::wide_store(small)));
            }
            note(V::narrow(sum));
            note(V::narrow(V::wide_mul(sum, 2f64.powi(-100))));
            wides.push(V::wide_store(sum));
        }
        for wide in wides {
            let bits = wide.map(f64::to_bits);
            out.push(bits.map(|bits| bits as u32));
            out.push(bits.map(|bits| (bits >> 32) as u32));
        }
        out
    }

    #[test]
    fn operations_on_bytes_and_on_several_vectors_are_the_definition_on_every_isa() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        let mut cases = vec![[0u8; 4 * LANES * LANES], [255; 4 * LANES * LANES], [128; 4 * LANES * LANES]];
        // The greatest products of one sign: codes of 255 with 127 and with -128.
        cases.push(std::array::from_fn(|i| if i / 64 % 2 == 0 { 255 } else { 127 }));
        cases.push(std::array::from_fn(|i| if i / 64 % 2 == 0 { 255 } else { 128 }));
        cases.extend((0..50).map(|_| std::array::from_fn(|_| random())));
        for bytes in &cases {
            let expected = dispatch(Isa::Scalar, Operations { bytes });
            for isa in Isa::available() {
                assert_eq!(dispatch(isa, Operations { bytes }), expected, "{isa}");
            }
        }
    }

    #[test]
    fn the_definitions_of_operations_on_bytes_are_what_their_names_say() {
        let bytes: [u8; 64] = std::array::from_fn(|i| i as u8);
        let lanes = Plain::load_bytes(&bytes);
        // 1 + 4·0 + 5·1 + 6·2 + 7·3 in lane 1, with x from 0 to 3 in each lane.
        let x = Plain::splat_bits(0x0302_0100);
        assert_eq!(Plain::splat_bits(1).dot_bytes(lanes, x).0[1].to_bits(), 1 + 5 + 12 + 21);
        let minus = Plain::splat_bits(0xffff_ffff);
        assert_eq!(Plain::splat_bits(0).dot_bytes(lanes, minus).0[0].to_bits() as i32, -(1 + 2 + 3));
        // 10 - 3 (4 + 5 + 6 + 7) in lane 1.
        let sum = Plain::splat_bits(10).add_bytes(lanes, Plain::splat_bits(Plain::times(-3)));
        assert_eq!(sum.0[1].to_bits() as i32, 10 - 3 * 22);
        let (stream, mask) = (0x0123_4567_89ab_cdef_0246_8ace_1357_9bdf_u128, Plain::splat_bits(0xfff));
        let (low, high) = (stream as u64, (stream >> 32) as u64);
        let windows = |step: usize| std::array::from_fn(|l| (stream >> ((15 - l) * step)) as u32 & 0xfff);
        assert_eq!(Plain::windows::<1>(low, high, mask).0.map(f32::to_bits), windows(1));
        assert_eq!(Plain::windows::<2>(low, high, mask).0.map(f32::to_bits), windows(2));
        assert_eq!(Plain::windows::<3>(low, high, mask).0.map(f32::to_bits), windows(3));
        assert_eq!(Plain::windows::<4>(low, high, mask).0.map(f32::to_bits), windows(4));
        let ones = [Plain::splat_bits(1), Plain::splat_bits(10)];
        let sums = Plain::group_sums(&ones).0.map(f32::to_bits);
        assert_eq!(sums, std::array::from_fn(|g| if g < 8 { 2 } else { 20 }));
        let rows: [Plain; LANES] = std::array::from_fn(|i| Plain::splat_bits(i as u32));
        assert!(
            Plain::transpose(rows)
                .iter()
                .all(|row| row.0.map(f32::to_bits) == std::array::from_fn(|i| i as u32))
        );
    }

    #[test]
    fn the_definitions_of_operations_that_round_are_what_their_names_say() {
        for j in 0..LANES {
            let unit = Plain(std::array::from_fn(|i| f32::from(u8::from(i == j))));
            let row = std::array::from_fn(|i| if (i & j).count_ones() % 2 == 0 { 1.0 } else { -1.0 });
            assert_eq!(unit.butterflies().0, row, "row {j} of Sylvester's matrix");
        }
        // 1 + 2^-24 is a tie between two f32, and goes to the even one; so is 1 + 3 · 2^-24.
        let tie = |odd: i32| 1.0 + f64::from(odd) * 2f64.powi(-24);
        assert_eq!(Plain::narrow([tie(1); LANES]).0, [1.0; LANES]);
        assert_eq!(Plain::narrow([tie(3); LANES]).0, [1.0 + 2.0 * f32::EPSILON; LANES]);
        let third = Plain::splat(1.0).div(Plain::splat(3.0));
        assert_eq!(third.widen(), [f64::from(1f32 / 3.0); LANES]);
        assert_eq!(Plain::wide_mul(third.widen(), 3.0), [f64::from(1f32 / 3.0) * 3.0; LANES]);
        assert_eq!(
            Plain::wide_add_signed([0.25; LANES], -1.0, third.widen()),
            [0.25 - f64::from(1f32 / 3.0); LANES]
        );
    }
}
