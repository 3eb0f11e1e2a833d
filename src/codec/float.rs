//! Floats as they are: `keep`, `bf16`, `f16`, `f32`.
//!
//! w[n, k] = stored[n, k]                                                                  w: [N, K]
//! One plane, `weight` [N, K]: in the model's float type for `keep`, else in the codec's own.

use super::{Codec, CodecError, CodecSpec, Matrix, Part, Plane};
use crate::isa::Isa;
use crate::numeric::widen;
use crate::tensor::Float;

/// The four codecs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// The given type.
    Keep,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
}

impl Storage {
    /// The type stored, in a model of type `float`.
    pub fn float(self, float: Float) -> Float {
        match self {
            Storage::Keep => float,
            Storage::Bf16 => Float::Bf16,
            Storage::F16 => Float::F16,
            Storage::F32 => Float::F32,
        }
    }
}

impl Codec for Storage {
    fn spec(&self) -> CodecSpec {
        match self {
            Storage::Keep => CodecSpec::Keep,
            Storage::Bf16 => CodecSpec::Bf16,
            Storage::F16 => CodecSpec::F16,
            Storage::F32 => CodecSpec::F32,
        }
    }

    fn planes(&self, matrix: Matrix, float: Float) -> Result<Vec<Plane>, CodecError> {
        Ok(vec![Plane::of_rows("weight", self.float(float).dtype(), matrix.in_features)])
    }

    fn decode(&self, _part: Part, float: Float, planes: &[&[u8]], out: &mut [f32]) {
        let &[weight] = planes else { panic!("float storage has one plane, got {}", planes.len()) };
        // The instance does not matter to the result, so the fastest will do.
        widen(self.float(float), weight, out, Isa::best());
    }
}
