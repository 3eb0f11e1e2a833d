//! Small floats under a shared scale: MLX's `mxfp4`, `mxfp8` and `nvfp4` modes.
//!
//! w[n, k] ≈ value(code[n, k]) · scale[n, k / group]                                       w: [N, K]
//!
//! | codec | element | scale | group |
//! | --- | --- | --- | --- |
//! | mxfp4 | E2M1 | E8M0 | 32 |
//! | mxfp8 | E4M3 | E8M0 | 32 |
//! | nvfp4 | E2M1 | E4M3 | 16 |
//!
//! Planes: `weight` U32 [N, K / 8] (E2M1, two per byte, the first in the low half) or [N, K / 4] (E4M3, one
//! per byte); `scales` U8 [N, K / group].
//! Sources: OCP Microscaling Formats 1.0; MLX 0.32.4, `mlx/backend/cpu/quantized.cpp`.

use super::affine::unpack;
use super::{Codec, CodecError, CodecSpec, Matrix, Part, Plane, check_group};
use crate::isa::Isa;
use crate::numeric::lanes::{Kernel, LANES, Lanes, dispatch, round_to};
use crate::numeric::{self, E2M1, e4m3_to_f32, e8m0_to_f32};
use crate::tensor::{Dtype, Float};

/// The three codecs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Mxfp {
    Mxfp4,
    Mxfp8,
    Nvfp4,
}

impl Mxfp {
    /// Bits of an element.
    pub fn bits(self) -> usize {
        match self {
            Mxfp::Mxfp4 | Mxfp::Nvfp4 => 4,
            Mxfp::Mxfp8 => 8,
        }
    }

    /// Elements that share a scale.
    pub fn group(self) -> usize {
        match self {
            Mxfp::Mxfp4 | Mxfp::Mxfp8 => 32,
            Mxfp::Nvfp4 => 16,
        }
    }

    /// What a scale byte means.
    #[inline(always)]
    pub fn scale(self, byte: u8) -> f32 {
        match self {
            Mxfp::Mxfp4 | Mxfp::Mxfp8 => e8m0_to_f32(byte),
            Mxfp::Nvfp4 => e4m3_to_f32(byte),
        }
    }

    /// Decodes, rounding the scale and the product to `rounding`.
    pub(super) fn decode_rounding(self, rounding: Float, planes: &[&[u8]], out: &mut [f32]) {
        let &[weight, scales] = planes else { panic!("an mxfp codec has two planes, got {}", planes.len()) };
        assert_eq!(weight.len() * 8, out.len() * self.bits(), "bytes of `weight`");
        assert_eq!(scales.len() * self.group(), out.len(), "bytes of `scales`");
        // The instance does not matter to the result, so the fastest will do.
        dispatch(Isa::best(), Decode { codec: self, rounding, weight, scales, out });
    }
}

impl Codec for Mxfp {
    fn spec(&self) -> CodecSpec {
        match self {
            Mxfp::Mxfp4 => CodecSpec::Mxfp4,
            Mxfp::Mxfp8 => CodecSpec::Mxfp8,
            Mxfp::Nvfp4 => CodecSpec::Nvfp4,
        }
    }

    fn planes(&self, matrix: Matrix, _float: Float) -> Result<Vec<Plane>, CodecError> {
        let in_features = matrix.in_features;
        let groups = in_features / check_group(self.spec(), in_features)?;
        let words = in_features * self.bits() as u64 / 32;
        Ok(vec![Plane::of_rows("weight", Dtype::U32, words), Plane::of_rows("scales", Dtype::U8, groups)])
    }

    fn decode(&self, _part: Part, _float: Float, planes: &[&[u8]], out: &mut [f32]) {
        self.decode_rounding(Float::F32, planes, out);
    }
}

/// The values of E2M1 codes, one per lane.
#[inline(always)]
pub(crate) fn e2m1_values<V: Lanes>(codes: V) -> V {
    let magnitude = codes.and(V::splat_bits(7)).lookup(&E2M1);
    magnitude.or(codes.and(V::splat_bits(8)).shl::<28>())
}

/// The values of E4M3 codes, one per lane.
#[inline(always)]
pub(crate) fn e4m3_values<V: Lanes>(codes: V) -> V {
    const TWO_POW_MINUS_6: f32 = 1.0 / 64.0;
    // Rebiased by an integer sum. What was subnormal is now 2^-7 + m · 2^-10 for m · 2^-9, which the lesser of the
    // two below mends, exactly; to rebias by a product would be slow where factors are subnormal.
    let biased = codes.and(V::splat_bits(0x7f)).shl::<20>().iadd(V::splat_bits(120 << 23));
    let magnitude = biased.fma(V::splat(2.0), V::splat(-TWO_POW_MINUS_6)).min(biased);
    // The greatest is NaN.
    let magnitude = magnitude.if_eq(V::splat(480.0), V::splat(f32::NAN), magnitude);
    magnitude.or(codes.and(V::splat_bits(0x80)).shl::<24>())
}

struct Decode<'a> {
    codec: Mxfp,
    rounding: Float,
    weight: &'a [u8],
    scales: &'a [u8],
    out: &'a mut [f32],
}

impl Kernel for Decode<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let (group, bits) = (self.codec.group(), self.codec.bits());
        let groups = self.out.chunks_exact_mut(group).zip(self.weight.chunks_exact(group * bits / 8));
        for ((out, weight), scale) in groups.zip(self.scales) {
            let scale = V::splat(numeric::round_to(self.rounding, self.codec.scale(*scale)));
            let vectors = out.as_chunks_mut::<LANES>().0.iter_mut();
            for (out, packed) in vectors.zip(weight.chunks_exact(LANES * bits / 8)) {
                let values: V = match self.codec {
                    Mxfp::Mxfp4 | Mxfp::Nvfp4 => e2m1_values(V::widen_bytes(unpack::<V, 4>(packed))),
                    Mxfp::Mxfp8 => e4m3_values(V::widen_bytes(unpack::<V, 8>(packed))),
                };
                round_to(self.rounding, values.mul(scale)).store(out);
            }
        }
    }
}
