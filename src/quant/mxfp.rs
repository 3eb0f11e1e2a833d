//! MLX's codes for mxfp4, mxfp8 and nvfp4 (`docs/formats/mxfp.md`).
//!
//! Scale and scaled weights are rounded to the model's float type before they are coded. Differs from MLX:
//! an mxfp group too small for the least scale is zeros under scale byte 127, where MLX's byte wraps.

use super::loss::RowSums;
use super::{Repairs, RowLoss, Rows};
use crate::codec::affine::pack;
use crate::codec::mxfp::{Mxfp, e4m3_values};
use crate::numeric::lanes::{Kernel, LANES, Lanes, round_to};
use crate::numeric::{self, E2M1, e4m3_from_f32, e4m3_to_f32, e8m0_to_f32};
use crate::tensor::Float;

/// The greatest weight that an nvfp4 group can hold: 6 · 448.
const NVFP4_LARGEST: f32 = 2688.0;

/// Magnitude of a weight from which MLX's search for the nearest E2M1 value must be followed step by step.
///
/// Under the largest nvfp4 scale this is 2^21.2 after division, where f32 still tells 6 from 4.
const STEP_BY_STEP: f32 = (1u32 << 30) as f32;

pub(super) struct Encode<'a, 'p> {
    pub(super) codec: Mxfp,
    pub(super) rows: Rows<'a>,
    pub(super) planes: &'a mut [&'p mut [u8]],
    pub(super) losses: &'a mut [RowLoss],
}

impl Kernel for Encode<'_, '_> {
    type Output = Repairs;

    #[inline(always)]
    fn run<V: Lanes>(self) -> Repairs {
        // Constant arguments: each arm is compiled for its codec and float type alone.
        match (self.codec, self.rows.float) {
            (Mxfp::Mxfp4, Float::Bf16) => self.groups::<V, 32>(Mxfp::Mxfp4, Float::Bf16),
            (Mxfp::Mxfp4, Float::F16) => self.groups::<V, 32>(Mxfp::Mxfp4, Float::F16),
            (Mxfp::Mxfp4, Float::F32) => self.groups::<V, 32>(Mxfp::Mxfp4, Float::F32),
            (Mxfp::Mxfp8, Float::Bf16) => self.groups::<V, 32>(Mxfp::Mxfp8, Float::Bf16),
            (Mxfp::Mxfp8, Float::F16) => self.groups::<V, 32>(Mxfp::Mxfp8, Float::F16),
            (Mxfp::Mxfp8, Float::F32) => self.groups::<V, 32>(Mxfp::Mxfp8, Float::F32),
            (Mxfp::Nvfp4, Float::Bf16) => self.groups::<V, 16>(Mxfp::Nvfp4, Float::Bf16),
            (Mxfp::Nvfp4, Float::F16) => self.groups::<V, 16>(Mxfp::Nvfp4, Float::F16),
            (Mxfp::Nvfp4, Float::F32) => self.groups::<V, 16>(Mxfp::Nvfp4, Float::F32),
        }
    }
}

impl Encode<'_, '_> {
    #[inline(always)]
    fn groups<V: Lanes, const GROUP: usize>(self, codec: Mxfp, float: Float) -> Repairs {
        let [weight, scales] = self.planes else { unreachable!("sizes were checked") };
        let mut sums = RowSums::<V>::new(self.losses, self.rows.in_features);
        let mut repairs = Repairs::default();
        let groups = self.rows.values.as_chunks::<GROUP>().0.iter();
        let stored = weight.chunks_exact_mut(GROUP * codec.bits() / 8).zip(scales.iter_mut());
        for (group, (packed, scale_byte)) in groups.zip(stored) {
            let vectors = group.as_chunks::<LANES>().0;
            let mut most = V::splat(0.0);
            for weights in vectors {
                most = V::load(weights).abs().max(most);
            }
            let greatest = most.greatest();
            let scale = choose_scale(codec, float, greatest);
            *scale_byte = scale.byte;
            repairs.scale_underflow += u64::from(scale.underflow);
            repairs.scale_overflow += u64::from(codec == Mxfp::Nvfp4 && greatest > NVFP4_LARGEST);

            let decoded_scale = V::splat(codec.scale(scale.byte));
            let by = V::splat(scale.by);
            let mut codes = [0; GROUP];
            for (weights, codes) in vectors.iter().zip(codes.as_chunks_mut::<LANES>().0) {
                let weights = V::load(weights);
                let (code, value) = if scale.all_zero {
                    (V::splat_bits(0), V::splat(0.0))
                } else if codec == Mxfp::Nvfp4 {
                    let scaled = round_to(float, weights.div(by));
                    if greatest < STEP_BY_STEP { nearest_e2m1(scaled) } else { first_nearest_e2m1(scaled) }
                } else {
                    // The factor is a power of two, so this is MLX's quotient.
                    let scaled = round_to(float, weights.mul(by));
                    if codec == Mxfp::Mxfp4 { nearest_e2m1(scaled) } else { nearest_e4m3(scaled) }
                };
                *codes = code.low_bytes();
                sums.run.add(weights, value.mul(decoded_scale));
            }
            match codec {
                Mxfp::Mxfp4 | Mxfp::Nvfp4 => pack::<V, 4>(&codes, packed),
                Mxfp::Mxfp8 => packed.copy_from_slice(&codes),
            }
            sums.advance(GROUP);
        }
        repairs
    }
}

/// The scale of one group.
struct Scale {
    byte: u8,
    /// Divisor of the weights (nvfp4) or factor (mxfp4, mxfp8).
    by: f32,
    /// Codes are 0 without a look at the weights.
    all_zero: bool,
    /// A group that is not zero became zeros.
    underflow: bool,
}

#[inline(always)]
fn choose_scale(codec: Mxfp, float: Float, greatest: f32) -> Scale {
    let largest_element = if codec == Mxfp::Mxfp8 { 448.0 } else { 6.0 };
    let quotient = numeric::round_to(float, greatest / largest_element);
    let some = greatest != 0.0;
    if codec == Mxfp::Nvfp4 {
        let byte = e4m3_from_f32(quotient);
        return Scale { byte, by: e4m3_to_f32(byte), all_zero: byte == 0, underflow: byte == 0 && some };
    }
    // The byte of the least power of two that is not less than the quotient. A mantissa that is not zero
    // carries into the exponent; below 2^-126 the mantissa holds the exponent.
    let byte = match quotient.to_bits() {
        0 => return Scale { byte: 127, by: 1.0, all_zero: false, underflow: some },
        1..=0x0020_0000 => return Scale { byte: 127, by: 1.0, all_zero: true, underflow: true },
        0x0020_0001..=0x0040_0000 => 0,
        0x0040_0001..0x0080_0000 => 1,
        bits => ((bits + 0x007f_ffff) >> 23) as u8,
    };
    // 2^-(byte - 127); a quotient below 2^126 keeps this normal.
    Scale { byte, by: e8m0_to_f32(254 - byte), all_zero: false, underflow: false }
}

/// Codes and values of the nearest E2M1 numbers; ties take the smaller magnitude, and zero has no sign.
#[inline(always)]
fn nearest_e2m1<V: Lanes>(scaled: V) -> (V, V) {
    let (zero, one) = (V::splat_bits(0), V::splat_bits(1));
    let magnitude = scaled.abs();
    // From 1 up, a code is the exponent and one bit of mantissa, rounded half down.
    let upper = magnitude.iadd(V::splat_bits(0x001f_ffff)).shr::<22>().isub(V::splat_bits(252));
    let lower = V::splat(0.25).if_lt(magnitude, one, zero).iadd(V::splat(0.75).if_lt(magnitude, one, zero));
    let code = lower.imax(upper).imin(V::splat_bits(7));
    let value = code.lookup(&E2M1);
    let sign = value.if_eq(V::splat(0.0), zero, scaled.and(V::splat_bits(0x8000_0000)));
    (code.or(sign.shr::<28>()), value.or(sign))
}

/// MLX's definition: the first code whose value is nearest, with distances in f32.
///
/// Where distances are too large for f32 to tell apart, the first of them wins.
#[inline(always)]
fn first_nearest_e2m1<V: Lanes>(scaled: V) -> (V, V) {
    let mut best = (scaled.abs(), V::splat_bits(0), V::splat(0.0));
    for code in 1..16u8 {
        let value = V::splat(numeric::e2m1_to_f32(code));
        let distance = scaled.sub(value).abs();
        best = (
            distance.if_lt(best.0, distance, best.0),
            distance.if_lt(best.0, V::splat_bits(u32::from(code)), best.1),
            distance.if_lt(best.0, value, best.2),
        );
    }
    (best.1, best.2)
}

/// Codes and values of the nearest E4M3 numbers, ties to even, at most 448; zero keeps its sign.
#[inline(always)]
fn nearest_e4m3<V: Lanes>(scaled: V) -> (V, V) {
    const TWO_POW_MINUS_6: f32 = 1.0 / 64.0;
    const ALIGN: f32 = (1 << 14) as f32; // as in `numeric::e4m3_from_f32`
    let magnitude = scaled.abs().min(V::splat(448.0));
    let odd = magnitude.shr::<20>().and(V::splat_bits(1));
    let normal = magnitude.iadd(odd.iadd(V::splat_bits(0x7_ffff))).shr::<20>().isub(V::splat_bits(120 << 3));
    let subnormal = magnitude.add(V::splat(ALIGN)).isub(V::splat(ALIGN));
    let code = magnitude.if_lt(V::splat(TWO_POW_MINUS_6), subnormal, normal);
    let code = code.or(scaled.and(V::splat_bits(0x8000_0000)).shr::<24>());
    (code, e4m3_values(code))
}
