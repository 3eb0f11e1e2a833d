//! A matrix in trellis tiles: which weights a tile holds, and its scales.
//!
//! ```text
//! w[n, k] = (value · scales[..]) · scales2[..]                                            w: [N, K]
//! ```
//!
//! | along | tile of T weights | `weight` U32 | `scales` F16 | `scales2` F16 |
//! | --- | --- | --- | --- | --- |
//! | `outputs` | rows [g T, (g + 1) T) of column k | [N / T, K, T · bits / 32] | [K] | [N] |
//! | `inputs` | columns [g T, (g + 1) T) of row n | [N, K · bits / 32] | [N] | [K] |
//!
//! T is [`tile`] of N or K. Values are in code units; each product rounds once, in f32. `scales2` is there if both
//! sides have scales.

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::decode::{Decode, View};
use super::{BITS, Code, Codebook, TrellisError, check, tile, tile_words};
use crate::codec::{Codec, CodecError, CodecSpec, Matrix, Part, Plane};
use crate::isa::Isa;
use crate::numeric::lanes::dispatch;
use crate::tensor::{Dtype, Float};

/// What the weights of a tile have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Along {
    /// Their input: a tile is part of a column.
    #[default]
    Outputs,
    /// Their output: a tile is part of a row.
    Inputs,
}

/// What has a scale of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scales {
    /// Every input and every output.
    #[default]
    Both,
    /// What the weights of a tile have in common.
    One,
}

/// The parameters of the trellis codec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Fields", into = "Fields")]
pub struct Trellis {
    bits: u32,
    states: u32,
    code: Code,
    along: Along,
    scales: Scales,
}

/// [`Trellis`] as it is written: what is left out is the default.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    bits: u32,
    #[serde(default = "default_states")]
    states: u32,
    #[serde(default = "default_code")]
    code: Code,
    #[serde(default)]
    along: Along,
    #[serde(default)]
    scales: Scales,
}

/// L where a recipe states none.
pub const DEFAULT_STATES: u32 = 12;

/// The code where a recipe states none.
pub const DEFAULT_CODE: Code = Code::Bs12;

fn default_states() -> u32 {
    DEFAULT_STATES
}

fn default_code() -> Code {
    DEFAULT_CODE
}

impl TryFrom<Fields> for Trellis {
    type Error = TrellisError;

    fn try_from(fields: Fields) -> Result<Self, TrellisError> {
        let Fields { bits, states, code, along, scales } = fields;
        Self::new(bits, states, code, along, scales)
    }
}

impl From<Trellis> for Fields {
    fn from(trellis: Trellis) -> Self {
        let Trellis { bits, states, code, along, scales } = trellis;
        Self { bits, states, code, along, scales }
    }
}

impl Trellis {
    /// Names of the parameters, as recipes and configs have them.
    pub const KEYS: [&str; 5] = ["bits", "states", "code", "along", "scales"];

    /// The codec with these parameters.
    ///
    /// # Errors
    /// As [`check`].
    pub fn new(
        bits: u32,
        states: u32,
        code: Code,
        along: Along,
        scales: Scales,
    ) -> Result<Self, TrellisError> {
        check(bits, states)?;
        Ok(Self { bits, states, code, along, scales })
    }

    /// So many bits, and else the defaults.
    ///
    /// # Errors
    /// [`TrellisError::Bits`].
    pub fn of(bits: u32) -> Result<Self, TrellisError> {
        Self::new(bits, DEFAULT_STATES, DEFAULT_CODE, Along::default(), Scales::default())
    }

    /// The same with every number of bits, as codecs.
    pub fn of_every_width(self) -> Vec<CodecSpec> {
        BITS.map(|bits| CodecSpec::Trellis(Self { bits, ..self })).collect()
    }

    /// k.
    pub fn bits(self) -> u32 {
        self.bits
    }

    /// L.
    pub fn states(self) -> u32 {
        self.states
    }

    /// The codebook's rule.
    pub fn code(self) -> Code {
        self.code
    }

    /// How tiles lie.
    pub fn along(self) -> Along {
        self.along
    }

    /// Which scales are stored.
    pub fn scales(self) -> Scales {
        self.scales
    }

    /// T.
    ///
    /// # Errors
    /// [`CodecError::NoTile`].
    pub fn tile(self, matrix: Matrix) -> Result<usize, CodecError> {
        let (width, axis) = match self.along {
            Along::Outputs => (matrix.out_features, "out_features"),
            Along::Inputs => (matrix.in_features, "in_features"),
        };
        let none = |_| CodecError::NoTile { codec: CodecSpec::Trellis(self), axis, width };
        tile(width).map_err(none)
    }

    /// The values of its states.
    pub fn codebook(self) -> Arc<Codebook> {
        static MADE: Mutex<Vec<Arc<Codebook>>> = Mutex::new(Vec::new());
        let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
        let known = made.iter().find(|book| (book.code(), book.states()) == (self.code, self.states));
        if let Some(known) = known {
            return known.clone();
        }
        let book = Arc::new(Codebook::new(self.code, self.states).expect("checked by `new`"));
        made.push(book.clone());
        book
    }
}

impl fmt::Display for Trellis {
    /// `trellis-3`, and what differs from the default: `trellis-3-L14-mul1-inputs-one`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "trellis-{}", self.bits)?;
        if self.states != DEFAULT_STATES {
            write!(f, "-L{}", self.states)?;
        }
        if self.code != DEFAULT_CODE {
            write!(f, "-{}", self.code)?;
        }
        if self.along == Along::Inputs {
            f.write_str("-inputs")?;
        }
        if self.scales == Scales::One {
            f.write_str("-one")?;
        }
        Ok(())
    }
}

/// No codec is written so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotTrellis;

impl FromStr for Trellis {
    type Err = NotTrellis;

    /// The inverse of [`fmt::Display`].
    fn from_str(text: &str) -> Result<Self, NotTrellis> {
        let mut words = text.split('-');
        if words.next() != Some("trellis") {
            return Err(NotTrellis);
        }
        let mut fields = Fields {
            bits: words.next().and_then(|bits| bits.parse().ok()).ok_or(NotTrellis)?,
            states: DEFAULT_STATES,
            code: DEFAULT_CODE,
            along: Along::default(),
            scales: Scales::default(),
        };
        for word in words {
            match word {
                "inputs" => fields.along = Along::Inputs,
                "one" => fields.scales = Scales::One,
                _ => match word.strip_prefix('L').map(str::parse) {
                    Some(states) => fields.states = states.map_err(|_| NotTrellis)?,
                    None => fields.code = word.parse().map_err(|_| NotTrellis)?,
                },
            }
        }
        let trellis = Self::try_from(fields).map_err(|_| NotTrellis)?;
        // One spelling only: no sign, no leading zero, no default that is stated, no other order.
        if trellis.to_string() == text { Ok(trellis) } else { Err(NotTrellis) }
    }
}

impl Codec for Trellis {
    fn spec(&self) -> CodecSpec {
        CodecSpec::Trellis(*self)
    }

    fn planes(&self, matrix: Matrix, _float: Float) -> Result<Vec<Plane>, CodecError> {
        let tile = self.tile(matrix)?;
        let Matrix { out_features, in_features } = matrix;
        let per_output = |suffix| Plane::of_tiles(suffix, Dtype::F16, 1, &[]);
        let per_input = |suffix| Plane::of_matrix(suffix, Dtype::F16, out_features, in_features);
        let mut planes = match self.along {
            Along::Outputs => {
                let row = [in_features, tile_words(tile, self.bits) as u64];
                vec![Plane::of_tiles("weight", Dtype::U32, tile as u64, &row), per_input("scales")]
            }
            Along::Inputs => {
                let words = in_features * u64::from(self.bits) / 32;
                vec![Plane::of_rows("weight", Dtype::U32, words), per_output("scales")]
            }
        };
        if self.scales == Scales::Both {
            planes.push(match self.along {
                Along::Outputs => per_output("scales2"),
                Along::Inputs => per_input("scales2"),
            });
        }
        Ok(planes)
    }

    fn decode(&self, part: Part, _float: Float, planes: &[&[u8]], out: &mut [f32]) {
        let columns = 0..part.matrix.in_features as usize;
        let (rows, stride) = (out.len() / columns.len(), columns.len());
        let view = View::new(*self, part, planes, rows);
        dispatch(Isa::best(), Decode { view: &view, rows: 0..rows, columns, to: out, stride });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_spelling() {
        let plain = Trellis::of(3).unwrap();
        assert_eq!(plain.to_string(), "trellis-3");
        let other = Trellis::new(2, 16, Code::Mul1, Along::Inputs, Scales::One).unwrap();
        assert_eq!(other.to_string(), "trellis-2-L16-mul1-inputs-one");
        for trellis in [plain, other] {
            assert_eq!(trellis.to_string().parse(), Ok(trellis));
            let json = serde_json::to_string(&trellis).unwrap();
            assert_eq!(serde_json::from_str::<Trellis>(&json).unwrap(), trellis);
        }
        for text in
            ["trellis", "trellis-5", "trellis-03", "trellis-3-L12", "trellis-3-bs12", "trellis-3-one-inputs"]
        {
            assert_eq!(text.parse::<Trellis>(), Err(NotTrellis), "{text}");
        }
        let minimal: Trellis = serde_json::from_str(r#"{"bits": 3}"#).unwrap();
        assert_eq!(minimal, plain);
        assert!(serde_json::from_str::<Trellis>(r#"{"bits": 9}"#).is_err());
    }

    #[test]
    fn planes_have_the_shapes_of_the_format() {
        let matrix = Matrix { out_features: 576, in_features: 1536 };
        let shapes = |trellis: Trellis| {
            let planes = trellis.planes(matrix, Float::Bf16).unwrap();
            let weight = crate::tensor::Shape::from([576, 1536]);
            planes.iter().map(|plane| (plane.suffix, plane.shape(&weight).0)).collect::<Vec<_>>()
        };
        let both = |along, scales| Trellis::new(3, 12, Code::Bs12, along, scales).unwrap();
        assert_eq!(
            shapes(both(Along::Outputs, Scales::Both)),
            [("weight", vec![3, 1536, 18]), ("scales", vec![1536]), ("scales2", vec![576])]
        );
        assert_eq!(
            shapes(both(Along::Inputs, Scales::One)),
            [("weight", vec![576, 144]), ("scales", vec![576])]
        );
        let odd = Matrix { out_features: 100, in_features: 64 };
        let error = both(Along::Outputs, Scales::Both).planes(odd, Float::Bf16).unwrap_err();
        assert_eq!(error.to_string(), "trellis-3 needs out_features to be a multiple of 32, but it is 100");
        assert!(both(Along::Inputs, Scales::Both).planes(odd, Float::Bf16).is_ok());
    }
}
