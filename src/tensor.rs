//! Words for tensors: name, dtype, shape.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Element types that a safetensors file may hold, spelled as its header spells them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[allow(missing_docs, non_camel_case_types, clippy::upper_case_acronyms)]
pub enum Dtype {
    BOOL,
    U8,
    I8,
    F8_E5M2,
    F8_E4M3,
    U16,
    I16,
    F16,
    BF16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
}

impl Dtype {
    /// Every dtype, in header spelling order of size.
    pub const ALL: [Dtype; 15] = [
        Dtype::BOOL,
        Dtype::U8,
        Dtype::I8,
        Dtype::F8_E5M2,
        Dtype::F8_E4M3,
        Dtype::U16,
        Dtype::I16,
        Dtype::F16,
        Dtype::BF16,
        Dtype::U32,
        Dtype::I32,
        Dtype::F32,
        Dtype::U64,
        Dtype::I64,
        Dtype::F64,
    ];

    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::BOOL | Dtype::U8 | Dtype::I8 | Dtype::F8_E5M2 | Dtype::F8_E4M3 => 1,
            Dtype::U16 | Dtype::I16 | Dtype::F16 | Dtype::BF16 => 2,
            Dtype::U32 | Dtype::I32 | Dtype::F32 => 4,
            Dtype::U64 | Dtype::I64 | Dtype::F64 => 8,
        }
    }

    /// The float type that weights and their parameters can be computed from, if this is one.
    pub fn float(self) -> Option<Float> {
        match self {
            Dtype::BF16 => Some(Float::Bf16),
            Dtype::F16 => Some(Float::F16),
            Dtype::F32 => Some(Float::F32),
            _ => None,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl FromStr for Dtype {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Dtype::ALL.into_iter().find(|dtype| dtype.to_string() == text).ok_or(())
    }
}

/// The float types that a weight may be stored in before quantization, and its scales after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Float {
    Bf16,
    F16,
    F32,
}

impl Float {
    /// The same type as a stored dtype.
    pub fn dtype(self) -> Dtype {
        match self {
            Float::Bf16 => Dtype::BF16,
            Float::F16 => Dtype::F16,
            Float::F32 => Dtype::F32,
        }
    }

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Float::Bf16 | Float::F16 => 2,
            Float::F32 => 4,
        }
    }

    /// As PyTorch and Hugging Face configs spell it (`bfloat16`).
    pub fn torch_name(self) -> &'static str {
        match self {
            Float::Bf16 => "bfloat16",
            Float::F16 => "float16",
            Float::F32 => "float32",
        }
    }

    /// Reads [`Float::torch_name`].
    pub fn from_torch_name(name: &str) -> Option<Self> {
        [Float::Bf16, Float::F16, Float::F32].into_iter().find(|float| float.torch_name() == name)
    }
}

impl fmt::Display for Float {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Float::Bf16 => "bf16",
            Float::F16 => "f16",
            Float::F32 => "f32",
        })
    }
}

/// Dimensions, outermost first. A weight is `[N, K]` (out_features, in_features).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Shape(pub Vec<u64>);

impl Shape {
    /// Product of the dimensions (1 for a scalar); `None` if it overflows.
    pub fn elements(&self) -> Option<u64> {
        self.0.iter().try_fold(1u64, |n, d| n.checked_mul(*d))
    }

    /// The last dimension (in_features), 1 for a scalar.
    pub fn last(&self) -> u64 {
        self.0.last().copied().unwrap_or(1)
    }

    /// Product of all dimensions but the last: the rows of a weight, over all experts.
    ///
    /// Stays at `u64::MAX` where it would overflow: only a config can call for such a shape, and no
    /// checked header has it.
    pub fn rows(&self) -> u64 {
        let leading = &self.0[..self.0.len().saturating_sub(1)];
        leading.iter().fold(1u64, |n, d| n.saturating_mul(*d))
    }

    /// The same leading dimensions over another last one.
    pub fn with_last(&self, last: u64) -> Self {
        let mut dims = self.0.clone();
        match dims.last_mut() {
            Some(d) => *d = last,
            None => dims.push(last),
        }
        Self(dims)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.0.iter().enumerate() {
            write!(f, "{}{d}", if i > 0 { ", " } else { "" })?;
        }
        f.write_str("]")
    }
}

impl<const R: usize> From<[u64; R]> for Shape {
    fn from(dims: [u64; R]) -> Self {
        Self(dims.to_vec())
    }
}

/// The full name of a stored tensor, such as `model.layers.0.mlp.up_proj.weight`.
pub type TensorName = String;

/// The names and shapes that a reader expects.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub enum Layout {
    /// As `transformers` reads and publishes them.
    #[serde(rename = "huggingface")]
    HuggingFace,
    /// As mlx-lm writes them, and this program's artifacts of codes.
    #[default]
    #[serde(rename = "mlx")]
    Mlx,
}

impl Layout {
    /// Both, as recipes spell them.
    pub const NAMES: [(&'static str, Layout); 2] =
        [("mlx", Layout::Mlx), ("huggingface", Layout::HuggingFace)];

    /// For people.
    pub fn title(self) -> &'static str {
        match self {
            Layout::HuggingFace => "Hugging Face",
            Layout::Mlx => "MLX",
        }
    }
}
