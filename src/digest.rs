//! SHA-256 digests, and JSON with exactly one spelling.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::Digest as _;

/// A SHA-256 digest; written as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = Hasher::default();
        hasher.update(bytes);
        hasher.finish()
    }

    /// The first twelve hexadecimal digits, for people.
    pub fn short(&self) -> String {
        self.to_string()[..12].to_owned()
    }
}

/// A digest under way.
#[derive(Clone, Default)]
pub struct Hasher(sha2::Sha256);

impl Hasher {
    /// Appends `bytes` to the message.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of everything appended.
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Why a digest could not be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a SHA-256 digest is 64 hexadecimal digits, got `{0}`")]
pub struct BadDigest(String);

impl FromStr for Digest {
    type Err = BadDigest;

    fn from_str(text: &str) -> Result<Self, BadDigest> {
        let bad = || BadDigest(text.to_owned());
        if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(bad());
        }
        let mut bytes = [0; 32];
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).map_err(|_| bad())?;
        }
        Ok(Self(bytes))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The canonical JSON of `value`: keys sorted, no spaces, one trailing newline.
///
/// Two equal values give the same bytes, so their digests can be compared. Numbers are written as
/// `serde_json` writes them (shortest form that reads back).
///
/// # Panics
/// If a map key is not a string, which no type of ours has.
pub fn canonical_json<T: Serialize + ?Sized>(value: &T) -> Vec<u8> {
    // `serde_json::Value` keeps objects in a BTreeMap, which is what sorts the keys.
    let value = serde_json::to_value(value).expect("our types have string keys and finite numbers");
    let mut bytes = serde_json::to_vec(&value).expect("a JSON value always serializes");
    bytes.push(b'\n');
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_of_abc_is_the_published_vector() {
        // FIPS 180-4, example "abc".
        let hex = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(Digest::of(b"abc").to_string(), hex);
        assert_eq!(hex.parse::<Digest>().unwrap(), Digest::of(b"abc"));
        assert!("ba78".parse::<Digest>().is_err());
        assert!("zz".repeat(32).parse::<Digest>().is_err());
    }

    #[test]
    fn canonical_json_sorts_keys_at_every_depth() {
        let value: serde_json::Value =
            serde_json::from_str(r#"{"b": {"z": 1, "a": [2, 1]}, "a": null}"#).unwrap();
        assert_eq!(canonical_json(&value), b"{\"a\":null,\"b\":{\"a\":[2,1],\"z\":1}}\n");
    }
}
