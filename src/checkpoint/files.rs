//! Which files of a folder are the checkpoint.
//!
//! With `model.safetensors.index.json`: the files it names. Else `model.safetensors`, or the whole
//! numbered series `model-00001-of-0000N.safetensors`, or the only `*.safetensors` file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::Links;
use super::error::CheckpointError;
use super::json::Node;
use crate::tensor::TensorName;

/// The index file's name.
pub const INDEX: &str = "model.safetensors.index.json";

/// The files to read, sorted, and what the index says about them.
pub(super) struct Choice {
    pub files: Vec<String>,
    pub index: Option<Index>,
    /// `*.safetensors` files that are not read, sorted.
    pub unread: Vec<String>,
}

pub(super) struct Index {
    pub path: PathBuf,
    /// Tensor to file.
    pub weight_map: BTreeMap<TensorName, String>,
}

/// Chooses the files of `dir`; every problem found goes to `problems`.
pub(super) fn choose(dir: &Path, links: &Links, problems: &mut Vec<CheckpointError>) -> Choice {
    let present = match safetensors_in(dir) {
        Ok(present) => present,
        Err(problem) => {
            problems.push(problem);
            return Choice { files: Vec::new(), index: None, unread: Vec::new() };
        }
    };
    let index = read_index(dir, links, problems);
    let indexed = index.is_some();
    let files = match &index {
        Some(index) => indexed_files(dir, index, &present, problems),
        // An index that could not be read has been reported; guessing past it would only mislead.
        None if !problems.is_empty() => return Choice { files: Vec::new(), index: None, unread: Vec::new() },
        None => unindexed_files(dir, &present, problems),
    };
    let unread: Vec<String> = present.iter().filter(|name| !files.contains(name)).cloned().collect();
    if !files.is_empty() {
        problems.extend(
            unread
                .iter()
                .filter(|name| name.starts_with("model"))
                .map(|name| CheckpointError::Stray { path: dir.join(name), index: indexed }),
        );
    }
    Choice { files, index, unread }
}

fn safetensors_in(dir: &Path) -> Result<BTreeSet<String>, CheckpointError> {
    let unreadable = |source| CheckpointError::Unreadable { path: dir.to_path_buf(), source };
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir).map_err(unreadable)? {
        // A name that is not UTF-8 cannot be one that an index or this module asks for.
        if let Ok(name) = entry.map_err(unreadable)?.file_name().into_string()
            && name.ends_with(".safetensors")
        {
            names.insert(name);
        }
    }
    Ok(names)
}

fn read_index(dir: &Path, links: &Links, problems: &mut Vec<CheckpointError>) -> Option<Index> {
    let path = dir.join(INDEX);
    match check_links(&path, links) {
        Ok(()) => {}
        Err(CheckpointError::Missing { .. }) => return None,
        Err(problem) => {
            problems.push(problem);
            return None;
        }
    }
    let bytes = match read_small(&path, links, SMALL_LIMIT) {
        Ok(bytes) => bytes,
        Err(problem) => {
            problems.push(problem);
            return None;
        }
    };
    let found = match serde_json::from_slice(&bytes) {
        Ok(Node::Map(pairs)) => {
            let mut maps: Vec<Node> =
                pairs.into_iter().filter(|(key, _)| key == "weight_map").map(|(_, node)| node).collect();
            match (maps.pop(), maps.len()) {
                (Some(Node::Map(pairs)), 0) => return weight_map(path, pairs, problems),
                (Some(node), 0) => format!("{} as `weight_map`", node.kind()),
                (Some(_), _) => "`weight_map` twice".to_owned(),
                (None, _) => "no `weight_map`".to_owned(),
            }
        }
        Ok(node) => node.kind().to_owned(),
        Err(error) => format!("text that is not JSON ({error})"),
    };
    const NEEDED: &str = "an object whose `weight_map` maps tensor names to file names";
    problems.push(CheckpointError::Index { index: path, found, needed: NEEDED });
    None
}

fn weight_map(
    path: PathBuf,
    pairs: Vec<(String, Node)>,
    problems: &mut Vec<CheckpointError>,
) -> Option<Index> {
    let before = problems.len();
    let mut weight_map = BTreeMap::new();
    for (tensor, node) in pairs {
        let index = path.clone();
        match node {
            Node::Text(file) if !is_plain(&file) => {
                problems.push(CheckpointError::IndexPath { index, tensor, found: file });
            }
            Node::Text(file) => {
                if weight_map.insert(tensor.clone(), file).is_some() {
                    problems.push(CheckpointError::IndexDuplicate { index, tensor });
                }
            }
            other => problems.push(CheckpointError::Index {
                index,
                found: format!("{} as the file of `{tensor}`", other.kind()),
                needed: "a file name",
            }),
        }
    }
    if weight_map.is_empty() && problems.len() == before {
        let found = "an empty `weight_map`".to_owned();
        problems.push(CheckpointError::Index { index: path, found, needed: "at least one tensor" });
        return None;
    }
    (problems.len() == before).then_some(Index { path, weight_map })
}

/// A file name of the folder itself: no separator of any system, no drive, no `..`.
pub fn is_plain(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.contains(['/', '\\', ':', '\0'])
}

fn indexed_files(
    dir: &Path,
    index: &Index,
    present: &BTreeSet<String>,
    problems: &mut Vec<CheckpointError>,
) -> Vec<String> {
    let mut tensors: BTreeMap<&String, usize> = BTreeMap::new();
    for file in index.weight_map.values() {
        *tensors.entry(file).or_default() += 1;
    }
    let mut files = Vec::new();
    for (file, count) in tensors {
        if present.contains(file) {
            files.push(file.clone());
        } else {
            let plural = if count == 1 { "" } else { "s" };
            problems.push(CheckpointError::MissingShard {
                path: dir.join(file),
                needed_by: format!("`{INDEX}` says that it holds {count} tensor{plural}"),
            });
        }
    }
    files
}

fn unindexed_files(
    dir: &Path,
    present: &BTreeSet<String>,
    problems: &mut Vec<CheckpointError>,
) -> Vec<String> {
    let single = present.contains("model.safetensors");
    let series: BTreeMap<&str, (u32, u32)> =
        present.iter().filter_map(|name| Some((name.as_str(), numbered(name)?))).collect();
    let totals: BTreeSet<u32> = series.values().map(|(_, total)| *total).collect();
    match (single, totals.len()) {
        (true, 0) => vec!["model.safetensors".to_owned()],
        (false, 1) => {
            let total = *totals.first().expect("the set has one element");
            for number in 1..=total {
                if !series.values().any(|(n, _)| *n == number) {
                    problems.push(CheckpointError::MissingShard {
                        path: dir.join(format!("model-{number:05}-of-{total:05}.safetensors")),
                        needed_by: format!("{} of {total} numbered files are there", series.len()),
                    });
                }
            }
            series.into_keys().map(str::to_owned).collect()
        }
        (false, 0) => match present.len() {
            0 => {
                problems.push(CheckpointError::NoWeights { dir: dir.to_path_buf() });
                Vec::new()
            }
            1 => present.iter().cloned().collect(),
            _ => {
                let found = present.iter().cloned().collect();
                problems.push(CheckpointError::Ambiguous { dir: dir.to_path_buf(), found });
                Vec::new()
            }
        },
        _ => {
            let mut found: Vec<String> =
                totals.iter().map(|total| format!("model-*-of-{total:05}.safetensors")).collect();
            if single {
                found.insert(0, "model.safetensors".to_owned());
            }
            problems.push(CheckpointError::Ambiguous { dir: dir.to_path_buf(), found });
            Vec::new()
        }
    }
}

/// `model-00002-of-00011.safetensors` is (2, 11).
fn numbered(name: &str) -> Option<(u32, u32)> {
    let (number, total) = name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
    let five = |text: &str| {
        let digits = text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| text.parse().ok()).flatten()
    };
    Some((five(number)?, five(total)?))
}

/// The largest index or config that is read: some hundred times the largest in use.
pub const SMALL_LIMIT: u64 = 256 << 20;

/// Reads a regular file of at most `limit` bytes; a link only where `links` allows it.
///
/// # Errors
/// [`CheckpointError::Missing`], [`CheckpointError::Link`], [`CheckpointError::NotAFile`],
/// [`CheckpointError::TooLarge`], [`CheckpointError::Unreadable`].
pub fn read_small(path: &Path, links: &Links, limit: u64) -> Result<Vec<u8>, CheckpointError> {
    check_links(path, links)?;
    let unreadable = |source| CheckpointError::Unreadable { path: path.to_path_buf(), source };
    // Asked before opening, because opening a pipe would wait for its writer.
    let meta = fs::metadata(path).map_err(unreadable)?;
    if !meta.is_file() {
        return Err(CheckpointError::NotAFile { path: path.to_path_buf() });
    }
    if meta.len() > limit {
        return Err(CheckpointError::TooLarge { path: path.to_path_buf(), found: meta.len(), limit });
    }
    fs::read(path).map_err(unreadable)
}

/// Whether `path` may be opened: it exists, and it is no link, or a link that `links` allows.
pub fn check_links(path: &Path, links: &Links) -> Result<(), CheckpointError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => CheckpointError::Missing { path: path.to_path_buf() },
        _ => CheckpointError::Unreadable { path: path.to_path_buf(), source },
    };
    if !fs::symlink_metadata(path).map_err(failed)?.is_symlink() {
        return Ok(());
    }
    let Links::Within(root) = links else {
        return Err(CheckpointError::Link { path: path.to_path_buf() });
    };
    let canonical = |path: &Path| fs::canonicalize(path).map_err(failed);
    let (target, root) = (canonical(path)?, canonical(root)?);
    if target.starts_with(&root) {
        Ok(())
    } else {
        Err(CheckpointError::LinkEscapes { path: path.to_path_buf(), target, root })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_five_digit_series_are_numbered() {
        assert_eq!(numbered("model-00002-of-00011.safetensors"), Some((2, 11)));
        for other in [
            "model.safetensors",
            "model-2-of-11.safetensors",
            "model-+0002-of-00011.safetensors",
            "model-00002-of-00011.safetensors.part",
        ] {
            assert_eq!(numbered(other), None, "{other}");
        }
    }

    #[test]
    fn plain_names_have_no_way_out_of_the_folder() {
        assert!(is_plain("model.safetensors"));
        for bad in [
            "/etc/a.safetensors",
            "../a.safetensors",
            "b/a.safetensors",
            "b\\a.safetensors",
            "C:a.safetensors",
            "a.bin",
            "",
        ] {
            assert!(!is_plain(bad), "{bad}");
        }
    }
}
