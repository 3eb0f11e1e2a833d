//! Floats of 4, 8, 16 and 32 bits, and conversions between them.
//!
//! | format | sign, exponent, mantissa | largest | least above 0 | infinity, NaN |
//! | --- | --- | --- | --- | --- |
//! | bf16 | 1, 8, 7 | 3.39e38 | 2^-133 | yes |
//! | f16 | 1, 5, 10 | 65504 | 2^-24 | yes |
//! | E4M3 (FN) | 1, 4, 3 | 448 | 2^-9 | NaN only (`0x7f`, `0xff`) |
//! | E8M0 | 0, 8, 0 | 2^127 | 2^-127 | see [`e8m0_to_f32`] |
//! | E2M1 | 1, 2, 1 | 6 | 0.5 | none |
//!
//! Widening is exact; narrowing rounds to nearest, ties to even. Subnormals are kept. Stored bytes are
//! little-endian. Sources: IEEE 754-2019; OCP 8-bit Floating Point Specification 1.0; OCP Microscaling
//! Formats 1.0.

pub mod divergence;
pub mod dot;
pub mod lanes;
pub mod math;
mod parallel;

use crate::isa::Isa;
use crate::tensor::Float;

use lanes::{Kernel, Lanes, dispatch};
pub use parallel::{Parallel, in_chunks, serial};

/// Bits of an f32 infinity; the bits of greater magnitudes are NaN.
const INFINITY: u32 = 0x7f80_0000;

/// bf16 bits to f32.
#[inline(always)]
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// f32 to bf16 bits. A NaN stays a NaN.
#[inline(always)]
pub const fn bf16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    // The quiet bit, lest a payload in the low half vanish.
    let nan = bits | 0x40_0000;
    ((if bits & 0x7fff_ffff > INFINITY { nan } else { rounded }) >> 16) as u16
}

/// f16 bits to f32.
#[inline(always)]
pub const fn f16_to_f32(bits: u16) -> f32 {
    const TWO_POW_112: f32 = f32::from_bits((127 + 112) << 23);
    let sign = (bits as u32 & 0x8000) << 16;
    let shifted = (bits as u32 & 0x7fff) << 13;
    // The product rebiases the exponent and normalises subnormals, exactly.
    let magnitude = (f32::from_bits(shifted) * TWO_POW_112).to_bits();
    let special = if shifted >= 0x1f << 23 { INFINITY } else { 0 };
    f32::from_bits(sign | magnitude | special)
}

/// f32 to f16 bits. A NaN stays a NaN.
#[inline(always)]
pub const fn f16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    // From 65520 the carry runs into the exponent and makes infinity.
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Below 2^-14, the least normal f16, the sum with 0.5 leaves multiples of 2^-24 in the low bits.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let beyond = if magnitude > INFINITY { 0x7e00 } else { 0x7c00 };
    let finite = if magnitude < 0x3880_0000 { subnormal } else { normal };
    let half = if magnitude < 0x4780_0000 { finite } else { beyond };
    sign | half as u16
}

/// E4M3 bits to f32.
pub const fn e4m3_to_f32(bits: u8) -> f32 {
    const TWO_POW_MINUS_9: f32 = 1.0 / 512.0;
    let (exponent, mantissa) = ((bits >> 3) & 15, bits & 7);
    let magnitude = if bits & 0x7f == 0x7f {
        f32::NAN
    } else if exponent == 0 {
        mantissa as f32 * TWO_POW_MINUS_9
    } else {
        f32::from_bits((exponent as u32 + 120) << 23 | (mantissa as u32) << 20)
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

/// f32 to E4M3 bits; magnitudes beyond 448 become 448. Not for NaN.
#[inline(always)]
pub const fn e4m3_from_f32(value: f32) -> u8 {
    const TWO_POW_MINUS_6: f32 = 1.0 / 64.0;
    /// Added to a magnitude below 2^-6, leaves multiples of 2^-9 in the low bits.
    const ALIGN: f32 = (1 << 14) as f32;
    let magnitude = if value.abs() < 448.0 { value.abs() } else { 448.0 };
    let code = if magnitude < TWO_POW_MINUS_6 {
        (magnitude + ALIGN).to_bits() - ALIGN.to_bits()
    } else {
        let bits = magnitude.to_bits();
        ((bits + 0x7_ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    };
    code as u8 | if value.is_sign_negative() { 0x80 } else { 0 }
}

/// E8M0 bits to f32: `2^(bits - 127)`. 255, which OCP calls NaN, is infinity here as in MLX.
#[inline(always)]
pub const fn e8m0_to_f32(bits: u8) -> f32 {
    f32::from_bits(if bits == 0 { 1 << 22 } else { (bits as u32) << 23 })
}

/// Magnitudes of the E2M1 codes 0 to 7; codes 8 to 15 are their negatives.
pub const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// E2M1 bits (the low four) to f32.
#[inline(always)]
pub const fn e2m1_to_f32(bits: u8) -> f32 {
    let magnitude = E2M1[(bits & 7) as usize];
    if bits & 8 == 0 { magnitude } else { -magnitude }
}

/// The value nearest to `value` that `float` holds; infinity if it is out of range.
#[inline(always)]
pub const fn round_to(float: Float, value: f32) -> f32 {
    match float {
        Float::Bf16 => bf16_to_f32(bf16_from_f32(value)),
        Float::F16 => f16_to_f32(f16_from_f32(value)),
        Float::F32 => value,
    }
}

/// Asks memory for `bytes`, without waiting for them; a hint, and nothing where there is none.
#[inline(always)]
pub fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(64) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch reads nothing and faults on no address; every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// Asks memory for the 64 bytes around `address`, which need not be anybody's; a hint like [`prefetch`].
#[inline(always)]
pub fn prefetch_line(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing and faults on no address; every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Widens stored values to f32, and says whether all of them are finite.
///
/// # Panics
/// If `bytes` does not hold exactly `out.len()` values.
pub fn widen(float: Float, bytes: &[u8], out: &mut [f32], isa: Isa) -> bool {
    assert_eq!(bytes.len(), out.len() * float.bytes(), "one stored value per output");
    dispatch(isa, Widen { float, bytes, out })
}

/// The index of the first stored value that is NaN or infinite.
///
/// For the message, after [`widen`] has said that there is one.
pub fn first_non_finite(float: Float, bytes: &[u8]) -> Option<usize> {
    let finite = |value: f32| value.is_finite();
    match float {
        Float::Bf16 => bytes.as_chunks().0.iter().position(|b| !finite(bf16_to_f32(u16::from_le_bytes(*b)))),
        Float::F16 => bytes.as_chunks().0.iter().position(|b| !finite(f16_to_f32(u16::from_le_bytes(*b)))),
        Float::F32 => bytes.as_chunks().0.iter().position(|b| !finite(f32::from_le_bytes(*b))),
    }
}

/// Rounds values to `float`, and says whether all results are finite.
///
/// # Panics
/// If `out` does not hold exactly `values.len()` stored values.
pub fn narrow(float: Float, values: &[f32], out: &mut [u8], isa: Isa) -> bool {
    assert_eq!(out.len(), values.len() * float.bytes(), "one stored value per input");
    dispatch(isa, Narrow { float, values, out })
}

struct Widen<'a> {
    float: Float,
    bytes: &'a [u8],
    out: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<V: Lanes>(self) -> bool {
        // The greatest magnitude, as bits: integers order as magnitudes do, and NaN comes last.
        let mut greatest = 0;
        match self.float {
            Float::Bf16 => {
                for (out, bytes) in self.out.iter_mut().zip(self.bytes.as_chunks::<2>().0) {
                    *out = bf16_to_f32(u16::from_le_bytes(*bytes));
                    greatest = greatest.max(out.to_bits() & 0x7fff_ffff);
                }
            }
            Float::F16 => {
                for (out, bytes) in self.out.iter_mut().zip(self.bytes.as_chunks::<2>().0) {
                    *out = f16_to_f32(u16::from_le_bytes(*bytes));
                    greatest = greatest.max(out.to_bits() & 0x7fff_ffff);
                }
            }
            Float::F32 => {
                for (out, bytes) in self.out.iter_mut().zip(self.bytes.as_chunks::<4>().0) {
                    *out = f32::from_le_bytes(*bytes);
                    greatest = greatest.max(out.to_bits() & 0x7fff_ffff);
                }
            }
        }
        greatest < INFINITY
    }
}

struct Narrow<'a> {
    float: Float,
    values: &'a [f32],
    out: &'a mut [u8],
}

impl Kernel for Narrow<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<V: Lanes>(self) -> bool {
        match self.float {
            Float::Bf16 => {
                let mut greatest = 0;
                for (out, value) in self.out.as_chunks_mut::<2>().0.iter_mut().zip(self.values) {
                    let bits = bf16_from_f32(*value);
                    greatest = greatest.max(bits & 0x7fff);
                    *out = bits.to_le_bytes();
                }
                greatest < 0x7f80
            }
            Float::F16 => {
                let mut greatest = 0;
                for (out, value) in self.out.as_chunks_mut::<2>().0.iter_mut().zip(self.values) {
                    let bits = f16_from_f32(*value);
                    greatest = greatest.max(bits & 0x7fff);
                    *out = bits.to_le_bytes();
                }
                greatest < 0x7c00
            }
            Float::F32 => {
                let mut greatest = 0;
                for (out, value) in self.out.as_chunks_mut::<4>().0.iter_mut().zip(self.values) {
                    greatest = greatest.max(value.to_bits() & 0x7fff_ffff);
                    *out = value.to_le_bytes();
                }
                greatest < INFINITY
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bf16_and_f16_widens_as_the_half_crate_has_it_and_narrows_back() {
        for isa in Isa::available() {
            for float in [Float::Bf16, Float::F16] {
                let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
                let mut wide = vec![0.0; 1 << 16];
                assert!(!widen(float, &bytes, &mut wide, isa), "{isa} {float}: infinities are in there");
                for (bits, value) in (0..=u16::MAX).zip(&wide) {
                    let expected = match float {
                        Float::Bf16 => half::bf16::from_bits(bits).to_f32(),
                        _ => half::f16::from_bits(bits).to_f32(),
                    };
                    let same = value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan();
                    assert!(same, "{isa} {float} {bits:#06x}: {value} is not {expected}");
                }
                let mut back = vec![0; bytes.len()];
                assert!(!narrow(float, &wide, &mut back, isa));
                for (i, value) in wide.iter().enumerate().filter(|(_, value)| !value.is_nan()) {
                    assert_eq!(back[2 * i..2 * i + 2], bytes[2 * i..2 * i + 2], "{isa} {float} {value}");
                }
            }
        }
    }

    #[test]
    fn narrowing_rounds_as_the_half_crate_does_at_and_beside_every_midpoint() {
        let mut values = Vec::new();
        for bits in 0..=u16::MAX {
            for (low, high) in [
                (bf16_to_f32(bits), bf16_to_f32(bits.wrapping_add(1))),
                (f16_to_f32(bits), f16_to_f32(bits.wrapping_add(1))),
            ] {
                let middle = ((f64::from(low) + f64::from(high)) / 2.0) as f32;
                if middle.is_finite() {
                    values.extend([middle.next_down(), middle, middle.next_up()]);
                }
            }
        }
        values.extend([f32::MAX, f32::MIN, 65519.99, 65520.0, 0.0, -0.0, f32::MIN_POSITIVE, 1e-45]);
        for isa in Isa::available() {
            let mut out = vec![0; 2 * values.len()];
            narrow(Float::Bf16, &values, &mut out, isa);
            for (value, bytes) in values.iter().zip(out.as_chunks().0) {
                let expected = half::bf16::from_f32(*value).to_bits();
                assert_eq!(u16::from_le_bytes(*bytes), expected, "{isa} bf16 {value:e}");
            }
            narrow(Float::F16, &values, &mut out, isa);
            for (value, bytes) in values.iter().zip(out.as_chunks().0) {
                let expected = half::f16::from_f32_const(*value).to_bits();
                assert_eq!(u16::from_le_bytes(*bytes), expected, "{isa} f16 {value:e}");
            }
        }
    }

    #[test]
    fn e4m3_decodes_to_the_arithmetic_of_its_definition_and_encodes_to_the_nearest() {
        let value = |bits: u8| {
            let (exponent, mantissa) = (i32::from(bits >> 3), f64::from(bits & 7));
            if exponent == 0 {
                mantissa * 2f64.powi(-9)
            } else {
                (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7)
            }
        };
        for bits in 0..=0x7e {
            assert_eq!(f64::from(e4m3_to_f32(bits)), value(bits), "{bits:#04x}");
            assert_eq!(f64::from(e4m3_to_f32(bits | 0x80)), -value(bits), "{bits:#04x}");
            assert_eq!(e4m3_from_f32(e4m3_to_f32(bits)), bits);
            assert_eq!(e4m3_from_f32(-e4m3_to_f32(bits)), bits | 0x80);
        }
        assert!(e4m3_to_f32(0x7f).is_nan() && e4m3_to_f32(0xff).is_nan());
        for bits in 0..0x7e {
            let middle = (e4m3_to_f32(bits) + e4m3_to_f32(bits + 1)) / 2.0;
            assert_eq!(e4m3_from_f32(middle.next_down()), bits, "below {middle}");
            assert_eq!(e4m3_from_f32(middle), bits + (bits & 1), "tie at {middle} goes to the even code");
            assert_eq!(e4m3_from_f32(middle.next_up()), bits + 1, "above {middle}");
        }
        for large in [448.0, 460.0, 464.0, 465.0, 1e30, f32::MAX] {
            assert_eq!((e4m3_from_f32(large), e4m3_from_f32(-large)), (0x7e, 0xfe));
        }
    }

    #[test]
    fn e8m0_is_a_power_of_two_and_e2m1_its_eight_values() {
        for bits in 0..=254u8 {
            assert_eq!(f64::from(e8m0_to_f32(bits)), 2f64.powi(i32::from(bits) - 127), "{bits}");
        }
        let values: Vec<f32> = (0..16).map(e2m1_to_f32).collect();
        let half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        assert_eq!(values[..8], half);
        assert_eq!(values[8..], half.map(|v| -v));
    }

    #[test]
    fn a_value_that_is_not_finite_is_found_wherever_it_is() {
        for isa in Isa::available() {
            for at in [0, 15, 16, 77, 99] {
                for (float, bad) in [
                    (Float::Bf16, [0x80, 0xff].to_vec()),
                    (Float::F16, [0x01, 0x7c].to_vec()),
                    (Float::F32, f32::NAN.to_le_bytes().to_vec()),
                ] {
                    let mut bytes = vec![0x11; 100 * float.bytes()];
                    let mut out = [0.0; 100];
                    assert!(widen(float, &bytes, &mut out, isa));
                    assert_eq!(first_non_finite(float, &bytes), None);
                    bytes[at * bad.len()..][..bad.len()].copy_from_slice(&bad);
                    assert!(!widen(float, &bytes, &mut out, isa), "{isa} {float} {at}");
                    assert_eq!(first_non_finite(float, &bytes), Some(at));
                }
            }
            assert!(!narrow(Float::F16, &[1.0, 65520.0], &mut [0; 4], isa));
            assert!(narrow(Float::F16, &[1.0, -65519.0], &mut [0; 4], isa));
            assert!(!narrow(Float::Bf16, &[f32::MAX], &mut [0; 2], isa));
        }
    }
}
