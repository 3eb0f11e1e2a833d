//! Which instruction set the numeric kernels run on.
//!
//! The scalar path is the definition. Every other path gives the same bits, so the choice is a
//! matter of speed only; `--isa` forces one, for tests and for chasing a miscompilation.

use std::fmt;
use std::str::FromStr;

/// An instruction set that has kernels of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Whatever the target's baseline is.
    Scalar,
    /// x86-64 AVX2 with FMA, F16C and BMI.
    Avx2,
    /// x86-64 AVX-512 F, BW, DQ, VL, VBMI and VNNI: Ice Lake, Zen 4 and later.
    Avx512,
    /// aarch64 NEON.
    Neon,
}

impl Isa {
    /// What this processor can run, slowest first. Never empty.
    pub fn available() -> Vec<Isa> {
        let mut list = vec![Isa::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
                && is_x86_feature_detected!("bmi1")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("lzcnt")
                && is_x86_feature_detected!("popcnt");
            if avx2 {
                list.push(Isa::Avx2);
            }
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vbmi")
                && is_x86_feature_detected!("avx512vnni");
            if avx512 && list.contains(&Isa::Avx2) {
                list.push(Isa::Avx512);
            }
        }
        #[cfg(target_arch = "aarch64")]
        list.push(Isa::Neon);
        list
    }

    /// Whether this processor can run it.
    pub fn is_available(self) -> bool {
        /// A bit for each of [`Isa::available`], found once.
        static AVAILABLE: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
        let bit = |isa: Isa| 1 << isa as u32;
        AVAILABLE.get_or_init(|| Isa::available().into_iter().map(bit).sum()) & bit(self) != 0
    }

    /// The fastest available.
    pub fn best() -> Isa {
        *Isa::available().last().expect("scalar is always available")
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
        })
    }
}

/// Why an instruction set was not accepted.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("instruction set must be one of {available} on this machine, got `{found}`")]
pub struct BadIsa {
    found: String,
    available: String,
}

impl FromStr for Isa {
    type Err = BadIsa;

    /// Accepts only what this processor can run.
    fn from_str(text: &str) -> Result<Self, BadIsa> {
        let available = Isa::available();
        available.iter().copied().find(|isa| isa.to_string() == text).ok_or_else(|| BadIsa {
            found: text.to_owned(),
            available: available.iter().map(|isa| format!("`{isa}`")).collect::<Vec<_>>().join(", "),
        })
    }
}
