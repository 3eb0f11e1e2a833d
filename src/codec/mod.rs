//! What may be stored, and how its bytes lie.
//!
//! A codec turns rows of a weight `[N, K]` into one or more **planes**, each a tensor with the same
//! leading dimensions and its own last one. A codec says how planes are laid out and what they
//! decode to; it does not search for good codes (that is a [`crate::quant::Quantizer`]).
//!
//! A row never shares bytes with another row, in any plane, so any range of rows can be encoded,
//! decoded or checked alone.

pub mod affine;
pub mod float;
pub mod mxfp;
pub mod trellis;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use trellis::Trellis;

use crate::failure::{Exit, Failure};
use crate::tensor::{Dtype, Float, Shape};

/// Code width of the affine codec, in bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct AffineBits(u32);

impl AffineBits {
    /// Every width, narrowest first.
    pub const ALL: [AffineBits; 6] =
        [AffineBits(2), AffineBits(3), AffineBits(4), AffineBits(5), AffineBits(6), AffineBits(8)];

    /// The width as a number.
    pub fn get(self) -> u32 {
        self.0
    }
}

impl TryFrom<u32> for AffineBits {
    type Error = String;

    fn try_from(bits: u32) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|b| b.0 == bits)
            .ok_or_else(|| format!("affine bits must be 2, 3, 4, 5, 6 or 8, got {bits}"))
    }
}

impl From<AffineBits> for u32 {
    fn from(bits: AffineBits) -> u32 {
        bits.0
    }
}

/// How many consecutive weights of a row share one scale and one bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct GroupSize(u32);

impl GroupSize {
    /// Every size, smallest first.
    pub const ALL: [GroupSize; 3] = [GroupSize(32), GroupSize(64), GroupSize(128)];

    /// The size as a number.
    pub fn get(self) -> u32 {
        self.0
    }
}

impl TryFrom<u32> for GroupSize {
    type Error = String;

    fn try_from(group: u32) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|g| g.0 == group)
            .ok_or_else(|| format!("group size must be 32, 64 or 128, got {group}"))
    }
}

impl From<GroupSize> for u32 {
    fn from(group: GroupSize) -> u32 {
        group.0
    }
}

/// A codec and its parameters, as a recipe names it and as provenance records it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum CodecSpec {
    /// `w ≈ scale · code + bias` per group, unsigned codes (`docs/formats/affine.md`).
    Affine {
        /// Code width.
        bits: AffineBits,
        /// Weights per scale.
        group: GroupSize,
    },
    /// Windows of a ring of bits, a function of each window (`docs/formats/trellis.md`).
    Trellis(Trellis),
    /// E2M1 elements, one E8M0 scale per 32.
    Mxfp4,
    /// E4M3 elements, one E8M0 scale per 32.
    Mxfp8,
    /// E2M1 elements, one E4M3 scale per 16.
    Nvfp4,
    /// The stored dtype, byte for byte.
    Keep,
    /// bfloat16, rounded to nearest even.
    Bf16,
    /// IEEE half, rounded to nearest even.
    F16,
    /// IEEE single: what changes of basis give, unrounded.
    F32,
}

impl CodecSpec {
    /// Whether codes and scales are stored instead of floats.
    pub fn quantizes(self) -> bool {
        !matches!(self, CodecSpec::Keep | CodecSpec::Bf16 | CodecSpec::F16 | CodecSpec::F32)
    }

    /// Whether stock mlx-lm loads it.
    pub fn loads_in_mlx(self) -> bool {
        !matches!(self, CodecSpec::Trellis(_))
    }

    /// Dimensions of the weight whose first plane has these: the inverse of [`Plane::shape`]. `None` if no weight has
    /// such a plane.
    pub fn unpacked(self, plane: &Shape) -> Option<Shape> {
        let (leading, last) = plane.0.split_last().map(|(last, leading)| (leading, *last))?;
        // Of codes that fill words without a gap.
        let codes = |words: u64, bits: u32| Some(words.checked_mul(32)? / u64::from(bits));
        let shape = match (self, leading) {
            // [.., N / T, K, words of a tile]
            (CodecSpec::Trellis(trellis), [leading @ .., tiles, in_features])
                if trellis.along() == trellis::Along::Outputs =>
            {
                let out_features = tiles.checked_mul(codes(last, trellis.bits())?)?;
                Shape(leading.iter().copied().chain([out_features, *in_features]).collect())
            }
            _ if self.quantizes() => plane.with_last(codes(last, self.code_bits()?)?),
            _ => plane.clone(),
        };
        let planes =
            (shape.0.len() > 1).then(|| codec(self).planes(Matrix::of(&shape), Float::Bf16))?.ok()?;
        (planes[0].shape(&shape) == *plane).then_some(shape)
    }

    /// Bits of one code or float; `None` for [`CodecSpec::Keep`], which takes the source's.
    pub fn code_bits(self) -> Option<u32> {
        match self {
            CodecSpec::Affine { bits, .. } => Some(bits.get()),
            CodecSpec::Trellis(trellis) => Some(trellis.bits()),
            CodecSpec::Mxfp4 | CodecSpec::Nvfp4 => Some(4),
            CodecSpec::Mxfp8 => Some(8),
            CodecSpec::Bf16 | CodecSpec::F16 => Some(16),
            CodecSpec::F32 => Some(32),
            CodecSpec::Keep => None,
        }
    }

    /// Consecutive weights of a row that share a scale; `None` where that is not how scales lie.
    pub fn group(self) -> Option<u32> {
        match self {
            CodecSpec::Affine { group, .. } => Some(group.get()),
            CodecSpec::Mxfp4 | CodecSpec::Mxfp8 => Some(32),
            CodecSpec::Nvfp4 => Some(16),
            CodecSpec::Trellis(_) | CodecSpec::Keep | CodecSpec::Bf16 | CodecSpec::F16 | CodecSpec::F32 => {
                None
            }
        }
    }

    /// Whether it can hold a weight of such matrices.
    ///
    /// # Errors
    /// [`CodecError`] with the dimension that does not fit.
    pub fn fits(self, matrix: Matrix) -> Result<(), CodecError> {
        codec(self).planes(matrix, Float::Bf16).map(drop)
    }
}

impl CodecSpec {
    /// Every codec with every choice of its parameters, in the order documents list them; the trellis with every number
    /// of bits, and else its defaults.
    pub fn all() -> Vec<CodecSpec> {
        let affine = AffineBits::ALL
            .into_iter()
            .flat_map(|bits| GroupSize::ALL.into_iter().map(move |group| CodecSpec::Affine { bits, group }));
        let trellis =
            trellis::BITS.map(|bits| CodecSpec::Trellis(Trellis::of(bits).expect("a number of bits")));
        affine
            .chain(trellis)
            .chain([CodecSpec::Mxfp4, CodecSpec::Mxfp8, CodecSpec::Nvfp4])
            .chain([CodecSpec::Keep, CodecSpec::Bf16, CodecSpec::F16, CodecSpec::F32])
            .collect()
    }
}

impl fmt::Display for CodecSpec {
    /// `affine-4g64`, `mxfp4`, `keep`, …
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CodecSpec::Affine { bits, group } => write!(f, "affine-{}g{}", bits.get(), group.get()),
            CodecSpec::Trellis(trellis) => trellis.fmt(f),
            CodecSpec::Mxfp4 => f.write_str("mxfp4"),
            CodecSpec::Mxfp8 => f.write_str("mxfp8"),
            CodecSpec::Nvfp4 => f.write_str("nvfp4"),
            CodecSpec::Keep => f.write_str("keep"),
            CodecSpec::Bf16 => f.write_str("bf16"),
            CodecSpec::F16 => f.write_str("f16"),
            CodecSpec::F32 => f.write_str("f32"),
        }
    }
}

/// A text that names no codec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no codec is written `{0}`; codecs are written as in `affine-4g64`, `mxfp4` or `bf16`")]
pub struct BadCodec(String);

impl FromStr for CodecSpec {
    type Err = BadCodec;

    /// The inverse of [`fmt::Display`].
    fn from_str(text: &str) -> Result<Self, BadCodec> {
        if let Ok(trellis) = text.parse() {
            return Ok(CodecSpec::Trellis(trellis));
        }
        let known = CodecSpec::all().into_iter().find(|codec| codec.to_string() == text);
        known.ok_or_else(|| BadCodec(text.chars().take(60).collect()))
    }
}

/// The shape of a weight, or of each of the matrices that one is stacked of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// N.
    pub out_features: u64,
    /// K.
    pub in_features: u64,
}

impl Matrix {
    /// The matrix of this shape, or each of those stacked in it; a vector is one row.
    pub fn of(shape: &Shape) -> Self {
        let out_features = match shape.0.as_slice() {
            [.., out_features, _] => *out_features,
            _ => 1,
        };
        Self { out_features, in_features: shape.last() }
    }
}

/// One plane of a stored weight.
///
/// Most have a row for each row of the weight. Rows that are encoded together share one, and what belongs to the
/// inputs is stored once for a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plane {
    /// What follows the module path: `weight`, `scales`, `biases`.
    pub suffix: &'static str,
    /// Element type of the stored tensor.
    pub dtype: Dtype,
    /// Rows of the weight that share a row of the plane; divides the rows of each matrix.
    pub height: u64,
    /// Whether the stored tensor has a dimension for rows of the plane: one that is stored once for a matrix has not.
    numbered: bool,
    /// Dimensions of a row of the plane: the stored tensor's last ones.
    row: Vec<u64>,
}

impl Plane {
    /// A row of so many elements for each row of the weight.
    pub fn of_rows(suffix: &'static str, dtype: Dtype, row_elements: u64) -> Self {
        Self { suffix, dtype, height: 1, numbered: true, row: vec![row_elements] }
    }

    /// A row of these dimensions for every `height` rows of the weight; of one element if there are none.
    pub fn of_tiles(suffix: &'static str, dtype: Dtype, height: u64, row: &[u64]) -> Self {
        Self { suffix, dtype, height, numbered: true, row: row.to_vec() }
    }

    /// So many elements for a matrix of `out_features` rows.
    pub fn of_matrix(suffix: &'static str, dtype: Dtype, out_features: u64, elements: u64) -> Self {
        Self { suffix, dtype, height: out_features, numbered: false, row: vec![elements] }
    }

    /// Elements in a row of the plane.
    pub fn row_elements(&self) -> u64 {
        self.row.iter().product()
    }

    /// Bytes in a row of the plane.
    pub fn row_bytes(&self) -> u64 {
        self.row_elements() * self.dtype.bytes()
    }

    /// The plane's rows that begin with a row of the weight in `rows`: what is written with these. The ranges of
    /// neighbours do not meet.
    pub fn begun(&self, rows: Range<u64>) -> Range<u64> {
        rows.start.div_ceil(self.height)..rows.end.div_ceil(self.height)
    }

    /// The plane's rows that `rows` of the weight are decoded from.
    pub fn covering(&self, rows: Range<u64>) -> Range<u64> {
        rows.start / self.height..rows.end.div_ceil(self.height)
    }

    /// Bytes of some of the plane's rows.
    pub fn bytes_of(&self, rows: Range<u64>) -> usize {
        ((rows.end - rows.start) * self.row_bytes()) as usize
    }

    /// Dimensions of the stored tensor, of a weight with these.
    ///
    /// # Panics
    /// If the weight has fewer than two.
    pub fn shape(&self, weight: &Shape) -> Shape {
        let [leading @ .., out_features, _] = weight.0.as_slice() else { panic!("{weight} is no matrix") };
        let rows = self.numbered.then_some(out_features / self.height);
        Shape(leading.iter().copied().chain(rows).chain(self.row.iter().copied()).collect())
    }
}

/// Why a codec cannot hold a weight.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// Groups never cross a row.
    #[error("{codec} needs in_features to be a multiple of {group}, but it is {in_features}")]
    GroupDoesNotDivide {
        /// The codec asked for.
        codec: CodecSpec,
        /// Its group size.
        group: u32,
        /// The weight's last dimension.
        in_features: u64,
    },
    /// Tiles never cross a matrix.
    #[error("{codec} needs {axis} to be a multiple of 32, but it is {width}")]
    NoTile {
        /// The codec asked for.
        codec: CodecSpec,
        /// Along which tiles lie.
        axis: &'static str,
        /// The weight's dimension.
        width: u64,
    },
}

impl Failure for CodecError {
    fn exit(&self) -> Exit {
        Exit::Request
    }
}

/// A storage format.
pub trait Codec: Send + Sync {
    /// The name and parameters.
    fn spec(&self) -> CodecSpec;

    /// The planes of a weight whose matrices have this shape and whose parameters are stored as `float`.
    ///
    /// # Errors
    /// [`CodecError`].
    fn planes(&self, matrix: Matrix, float: Float) -> Result<Vec<Plane>, CodecError>;

    /// What the bytes mean: `out[r, k]` for whole rows, in f32.
    ///
    /// `planes[p]` holds the rows of plane `p` that cover the part's ([`Plane::covering`]), as [`Codec::planes`] lays
    /// them out; `out` holds rows × in_features values. Parameters are widened to f32; products and sums round once
    /// each, in f32, without fused multiply-add.
    fn decode(&self, part: Part, float: Float, planes: &[&[u8]], out: &mut [f32]);
}

/// Some rows of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Of each matrix.
    pub matrix: Matrix,
    /// The first row, counted over all matrices.
    pub first: u64,
}

/// The codec that `spec` names.
pub fn codec(spec: CodecSpec) -> Box<dyn Codec> {
    match spec {
        CodecSpec::Affine { bits, group } => Box::new(affine::Affine { bits, group }),
        CodecSpec::Trellis(trellis) => Box::new(trellis),
        CodecSpec::Mxfp4 => Box::new(mxfp::Mxfp::Mxfp4),
        CodecSpec::Mxfp8 => Box::new(mxfp::Mxfp::Mxfp8),
        CodecSpec::Nvfp4 => Box::new(mxfp::Mxfp::Nvfp4),
        CodecSpec::Keep => Box::new(float::Storage::Keep),
        CodecSpec::Bf16 => Box::new(float::Storage::Bf16),
        CodecSpec::F16 => Box::new(float::Storage::F16),
        CodecSpec::F32 => Box::new(float::Storage::F32),
    }
}

/// What MLX's `dequantize` gives: [`Codec::decode`] with every step rounded to `float`.
///
/// affine: `w = float(float(code · scale) + bias)`; trellis, which MLX does not know: unrounded; mxfp4, mxfp8, nvfp4: `w = float(value(code) ·
/// float(scale))`; float storage: as stored. `out` holds rows × in_features values.
pub fn dequantize(spec: CodecSpec, part: Part, float: Float, planes: &[&[u8]], out: &mut [f32]) {
    match spec {
        CodecSpec::Affine { bits, group } => {
            affine::Affine { bits, group }.decode_rounding(float, float, planes, out);
        }
        CodecSpec::Mxfp4 => mxfp::Mxfp::Mxfp4.decode_rounding(float, planes, out),
        CodecSpec::Mxfp8 => mxfp::Mxfp::Mxfp8.decode_rounding(float, planes, out),
        CodecSpec::Nvfp4 => mxfp::Mxfp::Nvfp4.decode_rounding(float, planes, out),
        CodecSpec::Trellis(_) | CodecSpec::Keep | CodecSpec::Bf16 | CodecSpec::F16 | CodecSpec::F32 => {
            codec(spec).decode(part, float, planes, out);
        }
    }
}

/// `Err` unless groups of `spec` divide a row.
fn check_group(spec: CodecSpec, in_features: u64) -> Result<u64, CodecError> {
    let group = spec.group().map_or(1, u64::from);
    if in_features.is_multiple_of(group) {
        Ok(group)
    } else {
        Err(CodecError::GroupDoesNotDivide { codec: spec, group: group as u32, in_features })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shape_of_a_weight_follows_from_its_first_plane() {
        let along = |along| trellis::Trellis::new(3, 12, trellis::DEFAULT_CODE, along, Default::default());
        let inputs = CodecSpec::Trellis(along(trellis::Along::Inputs).unwrap());
        for spec in CodecSpec::all().into_iter().chain([inputs]) {
            for shape in [Shape::from([576, 640]), Shape::from([3, 576, 640])] {
                let planes = codec(spec).planes(Matrix::of(&shape), Float::F16).unwrap();
                assert_eq!(spec.unpacked(&planes[0].shape(&shape)), Some(shape), "{spec}");
            }
        }
        let outputs = CodecSpec::Trellis(along(trellis::Along::Outputs).unwrap());
        // Tiles of 192 weights are 18 words: these are too long, not whole, or not in columns.
        for bad in [vec![3, 640, 36], vec![3, 640, 17], vec![18], vec![]] {
            assert_eq!(outputs.unpacked(&Shape(bad.clone())), None, "{bad:?}");
        }
    }

    #[test]
    fn every_codec_reads_back_from_how_it_is_written() {
        for codec in CodecSpec::all() {
            assert_eq!(codec.to_string().parse(), Ok(codec));
        }
        for text in ["affine-7g64", "affine-4g48", "affine-04g64", "MXFP4", ""] {
            assert_eq!(text.parse::<CodecSpec>(), Err(BadCodec(text.to_owned())));
        }
    }
}
