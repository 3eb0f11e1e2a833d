//! Safetensors headers: built at random, then damaged.

use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;
use tqc::checkpoint::{Checkpoint, read_header};

/// Header text made of plausible pieces, most of them wrong together.
fn plausible_header() -> impl Strategy<Value = String> {
    let name = prop_oneof![Just("a"), Just("b"), Just("é"), Just(""), Just("__metadata__"), Just("\\u0061")];
    let dtype = prop::sample::select(vec![
        "\"U8\"", "\"U8\"", "\"U8\"", "\"U8\"", "\"BF16\"", "\"F4\"", "\"C64\"", "1", "null",
    ]);
    let number = prop_oneof![
        6 => (0u64..9).prop_map(|n| n.to_string()),
        1 => prop_oneof![
            Just("18446744073709551615"), Just("18446744073709551616"), Just("-1"), Just("1.0"), Just("1e3"),
            Just("1e999"), Just("true"), Just("[1]"), Just("4294967296")
        ].prop_map(str::to_owned),
    ];
    let shape = vec(number.clone(), 0..3).prop_map(|dims| format!("[{}]", dims.join(",")));
    let offsets = vec(number, 1..4).prop_map(|offsets| format!("[{}]", offsets.join(",")));
    let keys = prop_oneof![8 => Just(""), 1 => Just(",\"dtype\":\"U8\""), 1 => Just(",\"shape\":[1]"), 1 => Just(",\"x\":{\"y\":[null,false]}")];
    let entry = (dtype, shape, offsets, keys).prop_map(|(dtype, shape, offsets, keys)| {
        format!("{{\"dtype\":{dtype},\"shape\":{shape},\"data_offsets\":{offsets}{keys}}}")
    });
    let value =
        prop_oneof![9 => entry, 1 => Just("{\"format\":\"pt\"}".to_owned()), 1 => Just("null".to_owned())];
    (
        vec((name, value), 0..4),
        prop_oneof![8 => Just("}"), 1 => Just("}  "), 1 => Just("}}"), 1 => Just(""), 1 => Just("}\n")],
    )
        .prop_map(|(pairs, end)| {
            let pairs: Vec<String> =
                pairs.into_iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
            format!("{{{}{end}", pairs.join(","))
        })
}

/// A correct file: contiguous tensors of random dtypes and shapes, metadata and padding.
fn correct_file() -> impl Strategy<Value = Vec<u8>> {
    let dtype = prop_oneof![Just(("U8", 1)), Just(("BF16", 2)), Just(("F32", 4)), Just(("I64", 8))];
    (vec((dtype, vec(1u64..4, 0..3)), 1..5), any::<bool>(), 0usize..9).prop_map(
        |(tensors, metadata, padding)| {
            let mut at = 0;
            let mut pairs = Vec::new();
            if metadata {
                pairs.push("\"__metadata__\":{\"format\":\"pt\"}".to_owned());
            }
            for (i, ((dtype, size), shape)) in tensors.iter().enumerate() {
                let end = at + size * shape.iter().product::<u64>();
                pairs.push(format!(
                    "\"t{i}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{at},{end}]}}"
                ));
                at = end;
            }
            file(&format!("{{{}}}{}", pairs.join(","), " ".repeat(padding)), at as usize)
        },
    )
}

fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0x5a);
    bytes
}

#[derive(Debug, Clone)]
pub enum Damage {
    Set(prop::sample::Index, u8),
    Flip(prop::sample::Index, u8),
    Cut(prop::sample::Index),
    Splice(prop::sample::Index, prop::sample::Index, prop::sample::Index),
    Append(Vec<u8>),
    Length(u64),
}

pub fn damage() -> impl Strategy<Value = Damage> {
    use prop::sample::Index;
    prop_oneof![
        (any::<Index>(), prop_oneof![any::<u8>(), prop::sample::select(b"0123456789{}[],:\"-e. ".to_vec())])
            .prop_map(|(at, byte)| Damage::Set(at, byte)),
        (any::<Index>(), 0u8..8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
        any::<Index>().prop_map(Damage::Cut),
        any::<[Index; 3]>().prop_map(|[from, to, at]| Damage::Splice(from, to, at)),
        vec(any::<u8>(), 1..9).prop_map(Damage::Append),
        any::<u64>().prop_map(Damage::Length),
    ]
}

pub fn apply(bytes: &mut Vec<u8>, damage: &Damage) {
    if bytes.is_empty() {
        return;
    }
    let len = bytes.len();
    match damage {
        Damage::Set(at, byte) => bytes[at.index(len)] = *byte,
        Damage::Flip(at, bit) => bytes[at.index(len)] ^= 1 << bit,
        Damage::Cut(at) => bytes.truncate(at.index(len)),
        Damage::Splice(from, to, at) => {
            let (from, to) = (from.index(len).min(to.index(len)), from.index(len).max(to.index(len)));
            let piece = bytes[from..to].to_vec();
            let at = at.index(len);
            bytes.splice(at..at, piece);
        }
        Damage::Append(tail) => bytes.extend_from_slice(tail),
        Damage::Length(length) => {
            let prefix = length.to_le_bytes();
            let n = prefix.len().min(len);
            bytes[..n].copy_from_slice(&prefix[..n]);
        }
    }
}

/// What we accept, the reference accepts, and every tensor's bytes are those it gives.
fn check(bytes: &[u8]) -> Result<bool, TestCaseError> {
    let reference = safetensors::SafeTensors::deserialize(bytes);
    match read_header(Path::new("fuzzed.safetensors"), bytes) {
        Err(problems) => {
            prop_assert!(!problems.list().is_empty());
            prop_assert!(!problems.to_string().is_empty());
            Ok(false)
        }
        Ok(header) => {
            let reference = match reference {
                Ok(reference) => reference,
                Err(error) => return Err(TestCaseError::fail(format!("we accept, the reference: {error}"))),
            };
            prop_assert_eq!(reference.len(), header.tensors.len());
            for tensor in &header.tensors {
                let view = reference.tensor(&tensor.name).expect("the reference knows the tensor");
                let range = tensor.range.start as usize..tensor.range.end as usize;
                prop_assert_eq!(&bytes[range], view.data());
                prop_assert_eq!(tensor.dtype.to_string(), format!("{:?}", view.dtype()));
                let shape: Vec<u64> = view.shape().iter().map(|d| *d as u64).collect();
                prop_assert_eq!(&tensor.shape.0, &shape);
            }
            Ok(true)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_plausible_header_is_accepted_only_if_the_reference_accepts_it(
        header in plausible_header(), data in 0usize..12,
    ) {
        check(&file(&header, data))?;
    }

    #[test]
    fn a_damaged_file_is_accepted_only_if_the_reference_accepts_it(
        mut bytes in correct_file(), damages in vec(damage(), 1..4),
    ) {
        for damage in &damages {
            apply(&mut bytes, damage);
        }
        check(&bytes)?;
    }

    #[test]
    fn arbitrary_bytes_never_panic(mut bytes in vec(any::<u8>(), 0..64), short in any::<bool>()) {
        if short && bytes.len() > 8 {
            bytes[1..8].fill(0);
        }
        check(&bytes)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_correct_file_is_accepted_and_every_tensor_is_read_from_its_map(bytes in correct_file()) {
        prop_assert!(check(&bytes)?);
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("model.safetensors"), &bytes).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let total: usize = checkpoint.tensors().iter().map(|entry| checkpoint.bytes(entry).len()).sum();
        prop_assert_eq!(total as u64, checkpoint.files()[0].len - checkpoint.files()[0].data_start);
    }
}
