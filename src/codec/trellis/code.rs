//! Codebooks: what a state is worth.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{TrellisError, check, normal};
use crate::numeric::{f16_from_f32, f16_to_f32};

/// √(4 · (256² − 1) / 12) as the published code rounds it: the deviation of a sum of four uniform bytes.
const FOUR_BYTES: f64 = 147.800_537_109_375;

/// A rule that gives each state a value.
///
/// With x = state · multiplier + addend modulo 2^32:
///
/// | name | value, in code units | unit |
/// | --- | --- | --- |
/// | `1mad` | sum of the bytes of x, less 510; 34038481, 76625530 | 147.800537109375 |
/// | `bs12` | the same; 0xBEA5E527, 0 | the same |
/// | `mul1` | the same; 0x83DCD12D, 0 | the same |
/// | `3inst` | sum of the halves of (x & 0x8FFF8FFF) ^ 0x3B603B60 as f16, rounded to f16; 89226354, 64248484 | 1.24371 |
/// | `mcg` | the same; 0xCBAC1FED, 0 | 1.24411 |
/// | `rptc` | quantiles of the normal distribution in a shuffled order | 1 |
/// | `random` | independent normal numbers | 1 |
///
/// Sources: QTIP (`1mad`, `3inst`), ExLlamaV3 (`mul1`, `mcg`), Mao and Gray, *Rate-Constrained Trellis-Coded
/// Quantization* (`rptc`); `bs12` is the best of 3000 multipliers at L = 12.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Code {
    /// Sum of four bytes of a linear congruence.
    #[serde(rename = "1mad")]
    OneMad,
    /// Sum of four bytes of a product, found for L = 12.
    #[serde(rename = "bs12")]
    Bs12,
    /// Sum of four bytes of a product.
    #[serde(rename = "mul1")]
    Mul1,
    /// Sum of two f16 made of a linear congruence.
    #[serde(rename = "3inst")]
    ThreeInst,
    /// Sum of two f16 made of a product.
    #[serde(rename = "mcg")]
    Mcg,
    /// Shuffled quantiles; a table of 2^L values.
    #[serde(rename = "rptc")]
    Rptc,
    /// Random normal values; a table of 2^L values.
    #[serde(rename = "random")]
    Random,
}

impl Code {
    /// Every code, in the order documents list them.
    pub const ALL: [Code; 7] =
        [Code::OneMad, Code::Bs12, Code::Mul1, Code::ThreeInst, Code::Mcg, Code::Rptc, Code::Random];

    /// As a recipe writes it.
    pub fn name(self) -> &'static str {
        match self {
            Code::OneMad => "1mad",
            Code::Bs12 => "bs12",
            Code::Mul1 => "mul1",
            Code::ThreeInst => "3inst",
            Code::Mcg => "mcg",
            Code::Rptc => "rptc",
            Code::Random => "random",
        }
    }

    /// Multiplier and addend of the linear congruence; `None` for codes that are tables.
    pub fn congruence(self) -> Option<(u32, u32)> {
        match self {
            Code::OneMad => Some((34_038_481, 76_625_530)),
            Code::Bs12 => Some((0xbea5_e527, 0)),
            Code::Mul1 => Some((0x83dc_d12d, 0)),
            Code::ThreeInst => Some((89_226_354, 64_248_484)),
            Code::Mcg => Some((0xcbac_1fed, 0)),
            Code::Rptc | Code::Random => None,
        }
    }

    /// Whether values are sums of four bytes less 510: integers from -510 to 510.
    pub fn sums_bytes(self) -> bool {
        matches!(self, Code::OneMad | Code::Bs12 | Code::Mul1)
    }

    /// Code units in one standard deviation of the codebook.
    ///
    /// It belongs to the code, not to L: of the actual root mean square over the states it is within 1 %.
    pub fn unit(self) -> f64 {
        match self {
            Code::OneMad | Code::Bs12 | Code::Mul1 => FOUR_BYTES,
            Code::ThreeInst => 1.24371,
            Code::Mcg => 1.24411,
            Code::Rptc | Code::Random => 1.0,
        }
    }

    /// g: weights of unit variance are multiplied by it before they are encoded with `bits` bits and states of
    /// `states` bits, and values divided by it.
    ///
    /// A codebook is bounded, so the scale of least error is not that of equal variances. Measured on Gaussian
    /// weights (specification, section 2.2; `rptc` and `random` by this encoder at L = 12, in steps of 0.04).
    ///
    /// # Errors
    /// As [`check`].
    pub fn operating_scale(self, bits: u32, states: u32) -> Result<f32, TrellisError> {
        check(bits, states)?;
        let row = match self {
            Code::Rptc | Code::Random => [1.12, 0.98, 0.93, 0.88],
            Code::ThreeInst | Code::Mcg => [1.04, 0.97, 0.93, 0.89],
            Code::OneMad | Code::Bs12 | Code::Mul1 if states < 14 => [1.13, 0.98, 0.91, 0.88],
            Code::OneMad | Code::Bs12 | Code::Mul1 => [1.07, 0.98, 0.94, 0.90],
        };
        Ok(row[bits as usize - 1])
    }

    /// The value of a state for the codes that sum bytes, which depends on no L; `None` for the others.
    #[inline]
    pub fn integer(self, state: u32) -> Option<i32> {
        if !self.sums_bytes() {
            return None;
        }
        let (multiplier, addend) = self.congruence()?;
        let x = state.wrapping_mul(multiplier).wrapping_add(addend);
        Some(x.to_le_bytes().into_iter().map(i32::from).sum::<i32>() - 510)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text that names no code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no trellis code is called `{0}`; there are `1mad`, `bs12`, `mul1`, `3inst`, `mcg`, `rptc` and `random`"
)]
pub struct BadCode(String);

impl FromStr for Code {
    type Err = BadCode;

    /// The inverse of [`fmt::Display`].
    fn from_str(text: &str) -> Result<Self, BadCode> {
        let known = Self::ALL.into_iter().find(|code| code.name() == text);
        known.ok_or_else(|| BadCode(text.chars().take(60).collect()))
    }
}

/// A code for states of L bits.
#[derive(Debug, Clone)]
pub struct Codebook {
    code: Code,
    states: u32,
    /// Of codes that are not computed, the value of each state.
    table: Vec<f32>,
}

impl Codebook {
    /// The codebook; tables are made of a fixed seed.
    ///
    /// # Errors
    /// [`TrellisError::States`].
    pub fn new(code: Code, states: u32) -> Result<Self, TrellisError> {
        check(*super::BITS.start(), states)?;
        Ok(Self::small(code, states))
    }

    /// The same for any L: tests search trellises small enough to be searched by force.
    pub(crate) fn small(code: Code, states: u32) -> Self {
        let table = match code {
            Code::Rptc => normal::shuffled_quantiles(states),
            Code::Random => normal::independent(states),
            _ => Vec::new(),
        };
        Self { code, states, table }
    }

    /// The rule.
    pub fn code(&self) -> Code {
        self.code
    }

    /// L.
    pub fn states(&self) -> u32 {
        self.states
    }

    /// The value of a state, in code units.
    ///
    /// # Panics
    /// May panic if the state has more than L bits.
    #[inline]
    pub fn value(&self, state: u32) -> f32 {
        if let Some(sum) = self.code.integer(state) {
            return sum as f32;
        }
        match self.code.congruence() {
            Some((multiplier, addend)) => two_halves(state.wrapping_mul(multiplier).wrapping_add(addend)),
            None => self.table[state as usize],
        }
    }

    /// The value of every state, in code units: `[2^L]`.
    pub fn values(&self) -> Vec<f32> {
        (0..1 << self.states).map(|state| self.value(state)).collect()
    }
}

/// The halves of x as f16 of magnitude about 1, added and rounded to f16.
fn two_halves(x: u32) -> f32 {
    let r = (x & 0x8fff_8fff) ^ 0x3b60_3b60;
    // The f32 sum of two f16 of like magnitude is exact, so f16 rounds it once.
    f16_to_f32(f16_from_f32(f16_to_f32(r as u16) + f16_to_f32((r >> 16) as u16)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Digest;

    /// The first 16 digits of a digest.
    fn digest(bytes: impl Iterator<Item = u8>) -> String {
        let bytes: Vec<u8> = bytes.collect();
        Digest::of(&bytes).to_string()[..16].to_owned()
    }

    #[test]
    fn integer_codebooks_are_those_of_the_specification() {
        let first = [
            (Code::OneMad, [-185, -124, -63, -2, 59, -135, -74, -13]),
            (Code::Mul1, [-510, 95, -66, 29, -132, -37, -198, -103]),
            (Code::Bs12, [-510, 113, -30, 82, 195, 52, 164, -234]),
        ];
        for (code, expected) in first {
            let found: Vec<i32> = (0..8).map(|state| code.integer(state).unwrap()).collect();
            assert_eq!(found, expected, "{code}");
        }
        for (code, states, expected) in [
            (Code::OneMad, 12, "02190186935d0e79"),
            (Code::OneMad, 16, "e1bdf61e67523058"),
            (Code::Mul1, 12, "98e53ae5feb20111"),
            (Code::Mul1, 16, "092b910a69dd4802"),
            (Code::Bs12, 12, "ffbd328f4ebea563"),
            (Code::Bs12, 16, "96065d3c529d38b3"),
        ] {
            let table = (0..1 << states).flat_map(|state| code.integer(state).unwrap().to_le_bytes());
            assert_eq!(digest(table), expected, "{code} L = {states}");
            let codebook = Codebook::new(code, states).unwrap();
            assert!(codebook.values().iter().zip(0..).all(|(v, s)| *v == code.integer(s).unwrap() as f32));
        }
        let mut distinct = Codebook::new(Code::OneMad, 12).unwrap().values();
        distinct.sort_by(f32::total_cmp);
        distinct.dedup();
        assert_eq!((distinct.len(), distinct[0], distinct[712]), (713, -448.0, 454.0));
    }

    #[test]
    fn half_precision_codebooks_are_those_of_the_specification() {
        let bits = |code, states| {
            let values = Codebook::new(code, states).unwrap().values();
            values.into_iter().map(f16_from_f32).collect::<Vec<u16>>()
        };
        let first = [
            (Code::ThreeInst, [0x3a25, 0xbb5b, 0x3b74, 0x34b6, 0x3924, 0x2cb0]),
            (Code::Mcg, [0x3f60, 0x304e, 0xba13, 0x3ab8, 0x3952, 0xb75f]),
        ];
        for (code, expected) in first {
            assert_eq!(bits(code, 12)[..6], expected, "{code}");
        }
        for (code, states, expected) in [
            (Code::ThreeInst, 12, "8e280200f7b5caf2"),
            (Code::ThreeInst, 16, "ad88de2dcff5bb05"),
            (Code::Mcg, 12, "6bb0183acefb2691"),
            (Code::Mcg, 16, "95383563929baa9d"),
        ] {
            let table = bits(code, states).into_iter().flat_map(u16::to_le_bytes);
            assert_eq!(digest(table), expected, "{code} L = {states}");
        }
    }

    #[test]
    fn the_unit_of_each_code_is_its_deviation() {
        for code in Code::ALL {
            let values = Codebook::new(code, 16).unwrap().values();
            let squares: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
            let relative = (squares / 65536.0).sqrt() / code.unit();
            assert!((relative - 1.0).abs() < 0.01, "{code}: {relative}");
        }
    }

    #[test]
    fn every_code_reads_back_from_how_it_is_written() {
        for code in Code::ALL {
            assert_eq!(code.to_string().parse(), Ok(code));
            let json = serde_json::to_string(&code).unwrap();
            assert_eq!(json, format!("\"{code}\""));
            assert_eq!(serde_json::from_str::<Code>(&json).unwrap(), code);
        }
        assert_eq!("2mad".parse::<Code>(), Err(BadCode("2mad".to_owned())));
    }

    #[test]
    fn operating_scales_follow_the_specification_and_refuse_what_does_not_exist() {
        assert_eq!(Code::Bs12.operating_scale(3, 12), Ok(0.91));
        assert_eq!(Code::Mul1.operating_scale(1, 16), Ok(1.07));
        assert_eq!(Code::Mcg.operating_scale(4, 16), Ok(0.89));
        assert_eq!(Code::Bs12.operating_scale(0, 12), Err(TrellisError::Bits { found: 0 }));
        assert!(Codebook::new(Code::Random, 9).is_err());
    }
}
