//! Quantities with their unit in the type.

use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// `n` mebibytes.
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// `n` gibibytes.
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }
}

impl fmt::Display for Bytes {
    /// Binary units with three significant digits: `812 B`, `4.00 GiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit < 4 {
            value /= 1024.0;
            unit += 1;
        }
        let name = ["B", "KiB", "MiB", "GiB", "TiB"][unit];
        let digits = match value {
            _ if unit == 0 => 0,
            v if v >= 100.0 => 0,
            v if v >= 10.0 => 1,
            _ => 2,
        };
        write!(f, "{value:.digits$} {name}")
    }
}

/// Why a size could not be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("size must be a whole number and a unit such as `512MiB` or `5GB`, got `{0}`")]
pub struct BadSize(String);

impl FromStr for Bytes {
    type Err = BadSize;

    /// `4GiB`, `4096 MiB`, `5GB` (decimal), `1.5GiB`, or plain bytes.
    fn from_str(text: &str) -> Result<Self, BadSize> {
        let bad = || BadSize(text.to_owned());
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "kib" | "k" => 1 << 10,
            "mib" | "m" => 1 << 20,
            "gib" | "g" => 1 << 30,
            "tib" | "t" => 1 << 40,
            "kb" => 1000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err(bad()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(factor).map(Bytes).ok_or_else(bad);
        }
        let value = number.parse::<f64>().map_err(|_| bad())? * factor as f64;
        if value.is_finite() && value >= 0.0 && value < u64::MAX as f64 {
            Ok(Bytes(value as u64))
        } else {
            Err(bad())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_binary_decimal_and_fractional_sizes() {
        assert_eq!("4GiB".parse(), Ok(Bytes::gib(4)));
        assert_eq!("512 MiB".parse(), Ok(Bytes::mib(512)));
        assert_eq!("5GB".parse(), Ok(Bytes(5_000_000_000)));
        assert_eq!("1.5k".parse(), Ok(Bytes(1536)));
        assert_eq!("77".parse(), Ok(Bytes(77)));
        for bad in ["", "GiB", "4 parsecs", "-1", "1e99GiB", "99999999999TiB"] {
            assert!(bad.parse::<Bytes>().is_err(), "{bad}");
        }
    }

    #[test]
    fn prints_three_digits() {
        assert_eq!(Bytes(812).to_string(), "812 B");
        assert_eq!(Bytes::gib(4).to_string(), "4.00 GiB");
        assert_eq!(Bytes(11_587_816).to_string(), "11.1 MiB");
    }
}
