//! Grouped unsigned integers with a scale and a bias: MLX's `affine` mode.
//!
//! w[n, k] ≈ scale[n, k / group] · code[n, k] + bias[n, k / group],  0 ≤ code < 2^bits        w: [N, K]
//! Planes: `weight` U32 [N, K · bits / 32], a little-endian bit stream per row, lowest bits first;
//! `scales` and `biases` in the model's float type [N, K / group].
//! A scale may be negative or zero; any finite pair is legal.
//! Source: MLX 0.32.4, `mlx/ops.cpp` and `mlx/backend/cpu/quantized.cpp`.

use super::{AffineBits, Codec, CodecError, CodecSpec, GroupSize, Matrix, Part, Plane, check_group};
use crate::isa::Isa;
use crate::numeric::lanes::{Kernel, LANES, Lanes, dispatch, round_to};
use crate::numeric::{bf16_from_f32, bf16_to_f32, f16_from_f32, f16_to_f32};
use crate::tensor::{Dtype, Float};

/// Calls `$body` with the code width as a constant `$name`.
macro_rules! with_bits {
    ($bits:expr, $name:ident => $body:expr) => {
        match $bits {
            2 => {
                const $name: u32 = 2;
                $body
            }
            3 => {
                const $name: u32 = 3;
                $body
            }
            4 => {
                const $name: u32 = 4;
                $body
            }
            5 => {
                const $name: u32 = 5;
                $body
            }
            6 => {
                const $name: u32 = 6;
                $body
            }
            8 => {
                const $name: u32 = 8;
                $body
            }
            bits => unreachable!("AffineBits does not hold {bits}"),
        }
    };
}
pub(crate) use with_bits;

/// The affine codec at one width and group size.
#[derive(Debug, Clone, Copy)]
pub struct Affine {
    /// Code width.
    pub bits: AffineBits,
    /// Weights per scale.
    pub group: GroupSize,
}

impl Codec for Affine {
    fn spec(&self) -> CodecSpec {
        CodecSpec::Affine { bits: self.bits, group: self.group }
    }

    fn planes(&self, matrix: Matrix, float: Float) -> Result<Vec<Plane>, CodecError> {
        let in_features = matrix.in_features;
        let groups = in_features / check_group(self.spec(), in_features)?;
        // A group is at least 32 codes, so this division is exact.
        let words = in_features * u64::from(self.bits.get()) / 32;
        Ok(vec![
            Plane::of_rows("weight", Dtype::U32, words),
            Plane::of_rows("scales", float.dtype(), groups),
            Plane::of_rows("biases", float.dtype(), groups),
        ])
    }

    fn decode(&self, _part: Part, float: Float, planes: &[&[u8]], out: &mut [f32]) {
        self.decode_rounding(float, Float::F32, planes, out);
    }
}

impl Affine {
    /// Decodes parameters stored as `float`, rounding the product and the sum to `rounding`.
    pub(super) fn decode_rounding(&self, float: Float, rounding: Float, planes: &[&[u8]], out: &mut [f32]) {
        let &[weight, scales, biases] = planes else {
            panic!("the affine codec has three planes, got {}", planes.len())
        };
        let group = self.group.get() as usize;
        let groups = out.len() / group;
        assert_eq!(weight.len() * 8, out.len() * self.bits.get() as usize, "bytes of `weight`");
        assert_eq!((scales.len(), biases.len()), (groups * float.bytes(), groups * float.bytes()));
        // The instance does not matter to the result, so the fastest will do.
        let isa = Isa::best();
        with_bits!(self.bits.get(), BITS => {
            dispatch(isa, Decode::<BITS> { group, float, rounding, weight, scales, biases, out });
        });
    }
}

/// Packs codes, one per byte, into `BITS` bits each.
///
/// `codes` is a multiple of eight long, and `out` takes exactly its bits.
#[inline(always)]
pub(crate) fn pack<V: Lanes, const BITS: u32>(codes: &[u8], out: &mut [u8]) {
    for (codes, out) in codes.as_chunks::<8>().0.iter().zip(out.chunks_exact_mut(BITS as usize)) {
        let packed = V::squeeze::<BITS>(u64::from_le_bytes(*codes));
        out.copy_from_slice(&packed.to_le_bytes()[..BITS as usize]);
    }
}

/// The inverse of [`pack`] for sixteen codes, which lie in the `2 * BITS` bytes of `packed`.
#[inline(always)]
pub(crate) fn unpack<V: Lanes, const BITS: u32>(packed: &[u8]) -> [u8; LANES] {
    let mut codes = [0; LANES];
    for (codes, packed) in codes.as_chunks_mut::<8>().0.iter_mut().zip(packed.chunks_exact(BITS as usize)) {
        let mut word = [0; 8];
        word[..BITS as usize].copy_from_slice(packed);
        *codes = V::spread::<BITS>(u64::from_le_bytes(word)).to_le_bytes();
    }
    codes
}

/// Reads the parameter at `index`.
#[inline(always)]
pub(crate) fn read_parameter(float: Float, stored: &[u8], index: usize) -> f32 {
    match float {
        Float::Bf16 => bf16_to_f32(u16::from_le_bytes(stored.as_chunks().0[index])),
        Float::F16 => f16_to_f32(u16::from_le_bytes(stored.as_chunks().0[index])),
        Float::F32 => f32::from_le_bytes(stored.as_chunks().0[index]),
    }
}

/// Writes the parameter at `index`, rounding it to `float`.
#[inline(always)]
pub(crate) fn write_parameter(float: Float, stored: &mut [u8], index: usize, value: f32) {
    match float {
        Float::Bf16 => stored.as_chunks_mut().0[index] = bf16_from_f32(value).to_le_bytes(),
        Float::F16 => stored.as_chunks_mut().0[index] = f16_from_f32(value).to_le_bytes(),
        Float::F32 => stored.as_chunks_mut().0[index] = value.to_le_bytes(),
    }
}

struct Decode<'a, const BITS: u32> {
    group: usize,
    float: Float,
    rounding: Float,
    weight: &'a [u8],
    scales: &'a [u8],
    biases: &'a [u8],
    out: &'a mut [f32],
}

impl<const BITS: u32> Kernel for Decode<'_, BITS> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let group_bytes = self.group * BITS as usize / 8;
        let groups = self.out.chunks_exact_mut(self.group).zip(self.weight.chunks_exact(group_bytes));
        for (index, (out, weight)) in groups.enumerate() {
            let scale = V::splat(read_parameter(self.float, self.scales, index));
            let bias = V::splat(read_parameter(self.float, self.biases, index));
            let vectors = out.as_chunks_mut::<LANES>().0.iter_mut();
            for (out, packed) in vectors.zip(weight.chunks_exact(2 * BITS as usize)) {
                let code = V::from_bytes(unpack::<V, BITS>(packed));
                let product = round_to(self.rounding, code.mul(scale));
                round_to(self.rounding, product.add(bias)).store(out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    struct Pack<'a, const BITS: u32>(&'a [u8]);

    impl<const BITS: u32> Kernel for Pack<'_, BITS> {
        type Output = (Vec<u8>, Vec<u8>);

        #[inline(always)]
        fn run<V: Lanes>(self) -> Self::Output {
            let mut packed = vec![0; self.0.len() * BITS as usize / 8];
            pack::<V, BITS>(self.0, &mut packed);
            let codes = packed.chunks(2 * BITS as usize).flat_map(unpack::<V, BITS>).collect();
            (packed, codes)
        }
    }

    #[test]
    fn codes_pack_as_the_table_of_worked_examples_has_them() {
        let row = |codes: &[u8]| -> Vec<u8> { codes.iter().copied().cycle().take(32).collect() };
        for isa in Isa::available() {
            let eight = [0, 1, 2, 3, 4, 5, 6, 7];
            assert_eq!(dispatch(isa, Pack::<2>(&row(&[0, 1, 2, 3]))).0[..1], [0xe4]);
            assert_eq!(dispatch(isa, Pack::<3>(&row(&eight))).0[..3], [0x88, 0xc6, 0xfa]);
            let straddling: Vec<u8> = [0x88fa_c688u32, 0xc688_fac6, 0xfac6_88fa]
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .collect();
            assert_eq!(dispatch(isa, Pack::<3>(&row(&eight))).0, straddling);
            assert_eq!(dispatch(isa, Pack::<4>(&row(&eight))).0[..4], [0x10, 0x32, 0x54, 0x76]);
            let from_one = [1, 2, 3, 4, 5, 6, 7, 8];
            assert_eq!(dispatch(isa, Pack::<5>(&row(&from_one))).0[..5], [0x41, 0x0c, 0x52, 0xcc, 0x41]);
            assert_eq!(dispatch(isa, Pack::<6>(&row(&from_one))).0[..3], [0x81, 0x30, 0x10]);
            assert_eq!(dispatch(isa, Pack::<8>(&row(&from_one))).0[..8], from_one);
        }
    }

    proptest! {
        #[test]
        fn any_codes_come_back_from_the_bit_stream_and_every_isa_packs_alike(
            codes in proptest::collection::vec(any::<u8>(), 4 * LANES),
            bits in 0usize..6,
        ) {
            let bits = AffineBits::ALL[bits].get();
            let codes: Vec<u8> = codes.iter().map(|code| code & (255 >> (8 - bits))).collect();
            // Bit i of code c is bit c * bits + i of the stream.
            let mut expected = vec![0u8; codes.len() * bits as usize / 8];
            for (c, code) in codes.iter().enumerate() {
                for i in 0..bits as usize {
                    let at = c * bits as usize + i;
                    expected[at / 8] |= (code >> i & 1) << (at % 8);
                }
            }
            for isa in Isa::available() {
                let (packed, back) = with_bits!(bits, BITS => dispatch(isa, Pack::<BITS>(&codes)));
                prop_assert_eq!(&packed, &expected);
                prop_assert_eq!(&back, &codes);
            }
        }
    }
}
