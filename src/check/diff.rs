//! How two checkpoints or artifacts differ.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Serialize;

use crate::arch::Folder;
use crate::artifact::open::{file_digest, files_below};
use crate::artifact::{MACHINE, PROVENANCE};
use crate::checkpoint::{Checkpoint, Links, TensorEntry};
use crate::digest::Digest;
use crate::failure::Outcome;

use super::verify::VerifyError;

/// Files that are compared key by key.
const CONFIGS: [&str; 2] = ["config.json", "mtp/config.json"];

/// What differs.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Difference {
    /// Whether nothing differs.
    pub same: bool,
    /// Tensors that both hold, equal in dtype, shape and bytes.
    pub equal_tensors: usize,
    /// Tensors that differ or that one of them lacks.
    pub tensors: Vec<TensorDifference>,
    /// Keys of `config.json` and of `provenance.json` that differ: path, left value, right value.
    pub metadata: Vec<KeyDifference>,
    /// Other files that differ or that one of them lacks.
    pub files: Vec<FileDifference>,
}

/// A tensor that is not the same in both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TensorDifference {
    /// Its name; in a side folder, with the folder in front.
    pub name: String,
    /// `dtype shape` on the left, null if absent.
    pub left: Option<String>,
    /// `dtype shape` on the right, null if absent.
    pub right: Option<String>,
    /// Bytes that differ, if dtype and shape are equal.
    pub differing_bytes: Option<u64>,
}

/// A key of a JSON file that is not the same in both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KeyDifference {
    /// The file.
    pub file: String,
    /// Keys joined by `.`.
    pub key: String,
    /// Value on the left, null if absent.
    pub left: Option<serde_json::Value>,
    /// Value on the right, null if absent.
    pub right: Option<serde_json::Value>,
}

/// A file that is not the same in both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileDifference {
    /// Its path.
    pub name: String,
    /// SHA-256 on the left, null if absent.
    pub left: Option<Digest>,
    /// SHA-256 on the right, null if absent.
    pub right: Option<Digest>,
}

/// Compares the folders.
///
/// # Errors
/// If one of them cannot be read.
pub fn diff(left: &Path, right: &Path) -> Outcome<Difference> {
    let mut found = Difference::default();
    tensors(left, right, "", &mut found)?;
    for folder in Folder::SIDE {
        let (a, b) = (left.join(folder.path()), right.join(folder.path()));
        if a.is_dir() || b.is_dir() {
            tensors(&a, &b, &format!("{}/", folder.path()), &mut found)?;
        }
    }
    for name in CONFIGS.into_iter().chain([PROVENANCE]) {
        let (a, b) = (json(&left.join(name)), json(&right.join(name)));
        if a != b {
            keys(name, "", a.as_ref(), b.as_ref(), &mut found.metadata);
        }
    }
    // One line says that the same file has other tensors; their own lines say which.
    files(left, right, &mut found)?;
    found.same = found.tensors.is_empty() && found.metadata.is_empty() && found.files.is_empty();
    Ok(found)
}

fn open(dir: &Path) -> Outcome<Option<Checkpoint>> {
    if !dir.exists() {
        return Ok(None);
    }
    Ok(Some(Checkpoint::open_with(dir, &Links::of_folder(dir))?))
}

fn tensors(left: &Path, right: &Path, prefix: &str, found: &mut Difference) -> Outcome<()> {
    let (a, b) = if prefix.is_empty() {
        let open = |dir: &Path| Checkpoint::open_with(dir, &Links::of_folder(dir));
        (Some(open(left)?), Some(open(right)?))
    } else {
        (open(left)?, open(right)?)
    };
    let names = |side: &Option<Checkpoint>| -> BTreeSet<String> {
        side.iter().flat_map(|c| c.tensors().iter().map(|entry| entry.name.clone())).collect()
    };
    let words = |entry: &TensorEntry| format!("{} {}", entry.dtype, entry.shape);
    for name in names(&a).union(&names(&b)) {
        let (x, y) = (a.as_ref().and_then(|c| c.get(name)), b.as_ref().and_then(|c| c.get(name)));
        let differing_bytes = match (x, y, &a, &b) {
            (Some(x), Some(y), Some(a), Some(b)) if (x.dtype, &x.shape) == (y.dtype, &y.shape) => {
                let pairs = a.bytes(x).iter().zip(b.bytes(y));
                let equal = a.bytes(x) == b.bytes(y);
                let count = if equal { 0 } else { pairs.filter(|(p, q)| p != q).count() as u64 };
                a.release(x.file, x.range.clone());
                b.release(y.file, y.range.clone());
                if equal {
                    found.equal_tensors += 1;
                    continue;
                }
                Some(count)
            }
            _ => None,
        };
        found.tensors.push(TensorDifference {
            name: format!("{prefix}{name}"),
            left: x.map(words),
            right: y.map(words),
            differing_bytes,
        });
    }
    Ok(())
}

fn json(path: &Path) -> Option<serde_json::Value> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// Goes down into objects; lists and values are compared whole, except lists of named records.
pub(super) fn keys(
    file: &str,
    at: &str,
    left: Option<&serde_json::Value>,
    right: Option<&serde_json::Value>,
    found: &mut Vec<KeyDifference>,
) {
    use serde_json::Value;
    if left == right {
        return;
    }
    let below = |key: &str| if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") };
    match (left, right) {
        (Some(Value::Object(a)), Some(Value::Object(b))) => {
            for key in a.keys().chain(b.keys()).collect::<BTreeSet<_>>() {
                keys(file, &below(key), a.get(key), b.get(key), found);
            }
        }
        (Some(Value::Array(a)), Some(Value::Array(b))) if named(a).is_some() && named(b).is_some() => {
            let (a, b) = (named(a).unwrap_or_default(), named(b).unwrap_or_default());
            for name in a.keys().chain(b.keys()).collect::<BTreeSet<_>>() {
                keys(file, &below(name), a.get(name).copied(), b.get(name).copied(), found);
            }
        }
        _ => found.push(KeyDifference {
            file: file.to_owned(),
            key: at.to_owned(),
            left: left.cloned(),
            right: right.cloned(),
        }),
    }
}

/// A list of objects that each have a `name`, by that name.
fn named(list: &[serde_json::Value]) -> Option<BTreeMap<&str, &serde_json::Value>> {
    list.iter().map(|item| Some((item.get("name")?.as_str()?, item))).collect()
}

fn files(left: &Path, right: &Path, found: &mut Difference) -> Outcome<()> {
    let list = |dir: &Path| {
        files_below(dir).map_err(|error| VerifyError::Unreadable { path: dir.to_owned(), error })
    };
    let (a, b) = (list(left)?, list(right)?);
    let skip = |name: &str| {
        // Compared by content above, or never part of what an artifact is.
        name.ends_with(".safetensors")
            || CONFIGS.contains(&name)
                && json(&left.join(name)).is_some()
                && json(&right.join(name)).is_some()
            || [PROVENANCE, MACHINE].contains(&name)
    };
    for name in a.iter().chain(&b).collect::<BTreeSet<_>>() {
        if skip(name) && a.contains(name) && b.contains(name) {
            continue;
        }
        let digest = |dir: &Path, there: bool| -> Result<Option<Digest>, VerifyError> {
            let path = dir.join(name);
            there
                .then(|| file_digest(&path).map_err(|error| VerifyError::Unreadable { path, error }))
                .transpose()
        };
        let (x, y) = (digest(left, a.contains(name))?, digest(right, b.contains(name))?);
        if x != y && name != MACHINE {
            found.files.push(FileDifference { name: name.clone(), left: x, right: y });
        }
    }
    Ok(())
}
