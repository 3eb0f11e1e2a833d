//! SHA-256 digests, and JSON with exactly one spelling.

mod pair;

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use pair::{BLOCK, State, compress, compress_pair};

/// A SHA-256 digest; written as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of what is left in `from`.
    ///
    /// # Errors
    /// That it cannot be read.
    pub fn of_reader(from: &mut impl Read) -> io::Result<Self> {
        let (mut hasher, mut part) = (Hasher::default(), vec![0; 1 << 18]);
        loop {
            match from.read(&mut part)? {
                0 => return Ok(hasher.finish()),
                n => hasher.update(&part[..n]),
            }
        }
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

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

/// A digest under way: the blocks are compressed by the `sha2` crate, or two messages at a time by [`pair`].
#[derive(Clone)]
pub struct Hasher {
    state: State,
    /// The start of a block that is not full yet.
    pending: [u8; BLOCK],
    /// Bytes of the message so far.
    len: u64,
}

impl Default for Hasher {
    fn default() -> Self {
        // FIPS 180-4, section 5.3.3.
        let state =
            [0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19];
        Self { state, pending: [0; BLOCK], len: 0 }
    }
}

impl Hasher {
    /// Appends `bytes` to the message.
    pub fn update(&mut self, bytes: &[u8]) {
        let blocks = self.take_blocks(bytes);
        compress(&mut self.state, blocks);
        self.keep_rest(bytes, blocks);
    }

    /// Appends `bytes` to both messages, for little more than the cost of one.
    pub fn update_both(first: &mut Self, second: &mut Self, bytes: &[u8]) {
        let (a, b) = (first.take_blocks(bytes), second.take_blocks(bytes));
        let both = a.len().min(b.len());
        compress_pair([&mut first.state, &mut second.state], [&a[..both], &b[..both]]);
        compress(&mut first.state, &a[both..]);
        compress(&mut second.state, &b[both..]);
        first.keep_rest(bytes, a);
        second.keep_rest(bytes, b);
    }

    /// The digest of everything appended.
    pub fn finish(mut self) -> Digest {
        // FIPS 180-4, section 5.1.1: a one bit, zeros, the length in bits.
        let bits = self.len.wrapping_mul(8);
        let filled = self.filled();
        let zeros = (2 * BLOCK - 9 - filled) % BLOCK;
        let mut padding = [0; 2 * BLOCK];
        padding[0] = 0x80;
        padding[1 + zeros..][..8].copy_from_slice(&bits.to_be_bytes());
        self.update(&padding[..1 + zeros + 8]);
        let mut bytes = [0; 32];
        for (out, word) in bytes.chunks_exact_mut(4).zip(self.state) {
            out.copy_from_slice(&word.to_be_bytes());
        }
        Digest(bytes)
    }

    fn filled(&self) -> usize {
        (self.len % BLOCK as u64) as usize
    }

    /// Completes the pending block from `bytes` if they reach, and returns the whole blocks after it.
    fn take_blocks<'a>(&mut self, bytes: &'a [u8]) -> &'a [[u8; BLOCK]] {
        let filled = self.filled();
        if filled == 0 {
            return bytes.as_chunks().0;
        }
        let missing = BLOCK - filled;
        let Some((head, rest)) = bytes.split_at_checked(missing) else { return &[] };
        self.pending[filled..].copy_from_slice(head);
        compress(&mut self.state, std::slice::from_ref(&self.pending));
        rest.as_chunks().0
    }

    /// Keeps what of `bytes` follows the whole `blocks`, and counts all of it.
    fn keep_rest(&mut self, bytes: &[u8], blocks: &[[u8; BLOCK]]) {
        let filled = self.filled();
        if filled > 0 && filled + bytes.len() < BLOCK {
            self.pending[filled..][..bytes.len()].copy_from_slice(bytes);
        } else {
            let head = (BLOCK - filled) % BLOCK;
            let rest = &bytes[head + blocks.len() * BLOCK..];
            self.pending[..rest.len()].copy_from_slice(rest);
        }
        self.len = self.len.wrapping_add(bytes.len() as u64);
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

    /// The `sha2` crate's own digest of a message.
    fn reference(message: &[u8]) -> String {
        use sha2::Digest as _;
        sha2::Sha256::digest(message).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    proptest::proptest! {
        #[test]
        fn any_cuts_of_two_messages_give_the_reference_digests(
            before in proptest::collection::vec(0u8.., 0..150),
            pieces in proptest::collection::vec(proptest::collection::vec(0u8.., 0..400), 0..6),
        ) {
            let (mut first, mut second) = (Hasher::default(), Hasher::default());
            first.update(&before);
            for piece in &pieces {
                Hasher::update_both(&mut first, &mut second, piece);
            }
            let shared = pieces.concat();
            proptest::prop_assert_eq!(first.finish().to_string(), reference(&[before, shared.clone()].concat()));
            proptest::prop_assert_eq!(second.finish().to_string(), reference(&shared));
        }
    }

    #[test]
    fn canonical_json_sorts_keys_at_every_depth() {
        let value: serde_json::Value =
            serde_json::from_str(r#"{"b": {"z": 1, "a": [2, 1]}, "a": null}"#).unwrap();
        assert_eq!(canonical_json(&value), b"{\"a\":null,\"b\":{\"a\":[2,1],\"z\":1}}\n");
    }
}
