//! The header of one safetensors file.
//!
//! File: u64 length of the header, little-endian; the header, a JSON object padded with spaces; data.
//! Header: tensor name -> `{dtype, shape, data_offsets: [begin, end]}`, offsets counted from the start
//! of the data; and optionally `__metadata__`, strings to strings.
//! Every byte of the data belongs to exactly one tensor, and a tensor's bytes are its elements in row
//! order, little-endian. Its address is not aligned to its dtype.
//! Source: the format description in the `safetensors` repository's README. Stricter: a tensor without
//! elements, an unknown key in an entry and a name that occurs twice are refused.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use super::error::{CheckpointError, report};
use super::json::Node;
use crate::failure::Problems;
use crate::tensor::{Dtype, Shape, TensorName};

/// Longest header that readers of the format accept.
pub const HEADER_LIMIT: u64 = 100_000_000;

/// What one file says it holds; checked against the file's length.
#[derive(Debug)]
pub struct Header {
    /// Tensors in the order their bytes lie.
    pub tensors: Vec<HeaderTensor>,
    /// `__metadata__`, empty if absent.
    pub metadata: BTreeMap<String, String>,
    /// Where the data starts: 8 + header length.
    pub data_start: u64,
}

/// One tensor of a header.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct HeaderTensor {
    pub name: TensorName,
    pub dtype: Dtype,
    pub shape: Shape,
    /// Bytes in the file, counted from its start.
    pub range: Range<u64>,
}

/// Reads the header of a file whose whole contents are `bytes`; `file` is for messages only.
///
/// Touches only the header's bytes. After `Ok`, every range lies inside `bytes`.
///
/// # Errors
/// Everything that is wrong with the header, up to [`super::REPORTED`] problems.
pub fn read_header(file: &Path, bytes: &[u8]) -> Result<Header, Problems<CheckpointError>> {
    let mut problems = Vec::new();
    let header = parse(file, bytes, &mut problems);
    report(problems, ())?;
    Ok(header.expect("a header without problems was read"))
}

/// [`read_header`], pushing every problem of one file after those of others. `None` if any was pushed.
pub(super) fn parse(file: &Path, bytes: &[u8], found: &mut Vec<CheckpointError>) -> Option<Header> {
    let file = file.to_path_buf();
    let (pairs, data_start) = match top_level(&file, bytes) {
        Ok(top) => top,
        Err(problem) => {
            found.push(problem);
            return None;
        }
    };
    let data_len = bytes.len() as u64 - data_start;

    let mut problems = Vec::new();
    let mut metadata = BTreeMap::new();
    let mut names = BTreeSet::new();
    let mut claims = Vec::new();
    for (name, node) in pairs {
        if !names.insert(name.clone()) {
            problems.push(CheckpointError::DuplicateTensor { file: file.clone(), tensor: name });
        } else if name == "__metadata__" {
            match string_map(node) {
                Ok(map) => metadata = map,
                Err(found) => problems.push(CheckpointError::Metadata { file: file.clone(), found }),
            }
        } else {
            match claim(&file, &name, node) {
                Ok(claim) => claims.push((name, claim)),
                Err(problem) => problems.push(problem),
            }
        }
    }
    // A tensor that could not be read leaves a hole that is not worth a second message.
    let all_read = problems.is_empty();
    // Ties only among empty or overlapping tensors; the name makes the messages' order fixed.
    claims.sort_by(|(a_name, a), (b_name, b)| (a.begin, a.end, a_name).cmp(&(b.begin, b.end, b_name)));
    for (name, claim) in &claims {
        problems.extend(claim.check(&file, name));
    }
    check_cover(&file, &claims, data_start, data_len, all_read, &mut problems);
    if !problems.is_empty() {
        found.append(&mut problems);
        return None;
    }

    let tensors = claims
        .into_iter()
        .map(|(name, claim)| HeaderTensor {
            name,
            dtype: claim.dtype,
            shape: claim.shape,
            range: data_start + claim.begin..data_start + claim.end,
        })
        .collect();
    Some(Header { tensors, metadata, data_start })
}

/// The pairs of the header object, and where the data starts.
fn top_level(file: &Path, bytes: &[u8]) -> Result<(Vec<(String, Node)>, u64), CheckpointError> {
    let file = file.to_path_buf();
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(CheckpointError::TooShort { file, found: bytes.len() as u64 });
    };
    let length = u64::from_le_bytes(*length);
    let room = rest.len() as u64;
    if length > HEADER_LIMIT {
        return Err(CheckpointError::HeaderTooLarge { file, found: length, limit: HEADER_LIMIT });
    }
    if length > room {
        return Err(CheckpointError::HeaderLength { file, found: length, room });
    }
    let text = match std::str::from_utf8(&rest[..length as usize]) {
        Ok(text) => text,
        Err(error) => return Err(CheckpointError::HeaderUtf8 { file, at: error.valid_up_to() }),
    };
    if text.starts_with([' ', '\t', '\r', '\n']) || text.is_empty() {
        let found = if text.trim().is_empty() { "empty" } else { "indented" };
        return Err(CheckpointError::HeaderNotObject { file, found });
    }
    match serde_json::from_str(text) {
        Ok(Node::Map(pairs)) => Ok((pairs, 8 + length)),
        Ok(node) => Err(CheckpointError::HeaderNotObject { file, found: node.kind() }),
        Err(source) => Err(CheckpointError::HeaderJson { file, source }),
    }
}

fn string_map(node: Node) -> Result<BTreeMap<String, String>, String> {
    let Node::Map(pairs) = node else { return Err(node.kind().to_owned()) };
    let mut map = BTreeMap::new();
    for (key, value) in pairs {
        let Node::Text(value) = value else { return Err(format!("{} for `{key}`", value.kind())) };
        if map.contains_key(&key) {
            return Err(format!("`{key}` twice"));
        }
        map.insert(key, value);
    }
    Ok(map)
}

/// What a header entry claims, before anything is checked.
struct Claim {
    dtype: Dtype,
    shape: Shape,
    begin: u64,
    end: u64,
}

fn claim(file: &Path, name: &str, node: Node) -> Result<Claim, CheckpointError> {
    let entry = |found: String, needed| CheckpointError::Entry {
        file: file.to_path_buf(),
        tensor: name.to_owned(),
        found,
        needed,
    };
    const KEYS: &str = "an object with `dtype`, `shape` and `data_offsets`, each once";
    let Node::Map(pairs) = node else { return Err(entry(node.kind().to_owned(), KEYS)) };
    let (mut dtype, mut shape, mut offsets) = (None, None, None);
    for (key, node) in pairs {
        let slot = match key.as_str() {
            "dtype" => &mut dtype,
            "shape" => &mut shape,
            "data_offsets" => &mut offsets,
            _ => return Err(entry(format!("the key `{key}`"), KEYS)),
        };
        if slot.replace(node).is_some() {
            return Err(entry(format!("`{key}` twice"), KEYS));
        }
    }
    let dtype = match dtype {
        Some(Node::Text(text)) => text.parse().map_err(|()| CheckpointError::UnknownDtype {
            file: file.to_path_buf(),
            tensor: name.to_owned(),
            found: text,
        })?,
        Some(node) => return Err(entry(format!("{} as `dtype`", node.kind()), "a string")),
        None => return Err(entry("no `dtype`".to_owned(), KEYS)),
    };
    let shape = counts(shape, "shape").map_err(|found| entry(found, "`shape`: a list of whole numbers"))?;
    const OFFSETS: &str = "`data_offsets`: a list of two whole numbers";
    match *counts(offsets, "data_offsets").map_err(|found| entry(found, OFFSETS))? {
        [begin, end] => Ok(Claim { dtype, shape: Shape(shape), begin, end }),
        ref other => Err(entry(format!("{} numbers as `data_offsets`", other.len()), OFFSETS)),
    }
}

fn counts(node: Option<Node>, key: &str) -> Result<Vec<u64>, String> {
    let list = match node {
        Some(Node::List(list)) => list,
        Some(node) => return Err(format!("{} as `{key}`", node.kind())),
        None => return Err(format!("no `{key}`")),
    };
    list.into_iter()
        .map(|node| match node {
            Node::Count(count) => Ok(count),
            other => Err(format!("{} in `{key}`", other.kind())),
        })
        .collect()
}

impl Claim {
    /// Whether the claim contradicts itself, other tensors aside.
    fn check(&self, file: &Path, name: &str) -> Option<CheckpointError> {
        let (file, tensor) = (file.to_path_buf(), name.to_owned());
        let Claim { dtype, shape, begin, end } = self;
        let (dtype, shape, begin, end) = (*dtype, shape.clone(), *begin, *end);
        if shape.0.contains(&0) {
            return Some(CheckpointError::ZeroSize { file, tensor, shape });
        }
        let Some(needed) = shape.elements().and_then(|n| n.checked_mul(dtype.bytes())) else {
            return Some(CheckpointError::ShapeOverflow { file, tensor, dtype, shape });
        };
        if begin > end {
            return Some(CheckpointError::Backwards { file, tensor, begin, end });
        }
        let found = end - begin;
        (found != needed).then_some(CheckpointError::TensorSize { file, tensor, dtype, shape, found, needed })
    }
}

/// Whether the tensors, sorted by offset, cover the data without gap or overlap.
fn check_cover(
    file: &Path,
    claims: &[(TensorName, Claim)],
    data_start: u64,
    data_len: u64,
    all_read: bool,
    problems: &mut Vec<CheckpointError>,
) {
    let mut covered = 0;
    let mut last: Option<&TensorName> = None;
    for (tensor, claim) in claims {
        let Claim { begin, end, .. } = *claim;
        match last {
            Some(other) if begin < covered && end > begin => problems.push(CheckpointError::Overlap {
                file: file.to_path_buf(),
                tensor: tensor.clone(),
                begin,
                other: other.clone(),
                other_end: covered,
            }),
            _ if begin > covered && all_read => problems.push(CheckpointError::Hole {
                file: file.to_path_buf(),
                tensor: tensor.clone(),
                from: covered,
                to: begin,
            }),
            _ => {}
        }
        if end > covered || last.is_none() {
            covered = covered.max(end);
            last = Some(tensor);
        }
    }
    let Some(last) = last else {
        if all_read {
            problems.push(CheckpointError::NoTensors { file: file.to_path_buf() });
        }
        return;
    };
    if covered < data_len && all_read {
        problems.push(CheckpointError::Trailing {
            file: file.to_path_buf(),
            tensor: last.clone(),
            found: data_len - covered,
        });
    }
    if covered > data_len {
        match data_start.checked_add(covered) {
            // A header that is right in every other way describes a longer file than this one.
            Some(needed) if problems.is_empty() => {
                problems.push(CheckpointError::Truncated {
                    file: file.to_path_buf(),
                    found: data_start + data_len,
                    needed,
                });
            }
            _ => problems.extend(claims.iter().filter(|(_, claim)| claim.end > data_len).map(
                |(tensor, claim)| CheckpointError::OutOfRange {
                    file: file.to_path_buf(),
                    tensor: tensor.clone(),
                    end: claim.end,
                    found: data_len,
                },
            )),
        }
    }
}
