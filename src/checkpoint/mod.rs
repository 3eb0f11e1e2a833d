//! Reads a folder of safetensors files, strictly.
//!
//! Opening reads headers only, finds every problem at once, and refuses what it does not understand;
//! after that each tensor's bytes are a slice of a read-only map. Nothing is copied and nothing of the
//! payload is read before it is asked for.
//!
//! The maps trust that nobody shortens a file meanwhile: touching a page past the new end ends the
//! process ([`crate::process::guard_maps`]). That loses minutes at most, because finished work is journaled and a
//! resumed build checks the sources again. [`Checkpoint::check_unchanged`] finds such a change while it is harmless.

mod error;
mod files;
mod header;
mod json;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use memmap2::{Advice, Mmap, UncheckedAdvice};

pub use error::{CheckpointError, REPORTED};
pub use files::{INDEX, SMALL_LIMIT, is_plain, read_small};
pub use header::{HEADER_LIMIT, Header, HeaderTensor, read_header};

use crate::digest::{Digest, canonical_json};
use crate::failure::Problems;
use crate::tensor::{Dtype, Shape, TensorName};
use error::report;
use files::{Choice, Index};

/// Whether files of a source folder may be symbolic links.
///
/// The path that the user named may always be one; this is about the names found inside.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Links {
    /// A link is refused by name.
    #[default]
    Refuse,
    /// A link is followed if it ends inside this folder.
    Within(PathBuf),
}

impl Links {
    /// `Within` the repository's folder if `dir` is a snapshot of the Hugging Face cache
    /// (`models--ORG--NAME/snapshots/COMMIT`, whose files link to `../../blobs`), else `Refuse`.
    pub fn of_folder(dir: &Path) -> Self {
        let Ok(dir) = std::fs::canonicalize(dir) else { return Links::Refuse };
        let name = |path: &Path| path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
        let (Some(snapshots), Some(commit)) = (dir.parent(), name(&dir)) else { return Links::Refuse };
        let is_commit = commit.len() == 40 && commit.bytes().all(|b| b.is_ascii_hexdigit());
        match snapshots.parent() {
            Some(repo)
                if is_commit
                    && name(snapshots).as_deref() == Some("snapshots")
                    && name(repo).is_some_and(|name| name.starts_with("models--")) =>
            {
                Links::Within(repo.to_path_buf())
            }
            _ => Links::Refuse,
        }
    }
}

/// A stored tensor and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Full name, unique in the checkpoint.
    pub name: TensorName,
    /// As the header spells it.
    pub dtype: Dtype,
    /// Dimensions, outermost first; none is zero.
    pub shape: Shape,
    /// Index into [`Checkpoint::files`].
    pub file: usize,
    /// Bytes in the file, counted from its start. Not aligned to the dtype.
    pub range: Range<u64>,
}

impl TensorEntry {
    /// Length of the payload: elements times bytes of one.
    pub fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// One open file of a checkpoint.
#[derive(Debug)]
pub struct SourceFile {
    /// Name inside the folder.
    pub name: String,
    /// The folder and the name.
    pub path: PathBuf,
    /// Bytes, header included.
    pub len: u64,
    /// Where the data starts: 8 + header length.
    pub data_start: u64,
    /// The header's `__metadata__`.
    pub metadata: BTreeMap<String, String>,
    handle: File,
    modified: Option<SystemTime>,
    map: Mmap,
}

/// A checked, mapped, read-only checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<SourceFile>,
    tensors: Vec<TensorEntry>,
    by_name: BTreeMap<TensorName, usize>,
    unread: Vec<String>,
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `path`, or the single safetensors file `path`; links inside
    /// a folder are refused.
    ///
    /// # Errors
    /// Every problem of every file, the first [`REPORTED`] in words.
    pub fn open(path: &Path) -> Result<Self, Problems<CheckpointError>> {
        Self::open_with(path, &Links::Refuse)
    }

    /// [`Checkpoint::open`], with a rule for links.
    pub fn open_with(path: &Path, links: &Links) -> Result<Self, Problems<CheckpointError>> {
        let meta = std::fs::metadata(path).map_err(|source| missing_or(path, source))?;
        if meta.is_file() {
            let dir = path.parent().unwrap_or(Path::new("")).to_path_buf();
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            let mut problems = Vec::new();
            let opened = SourceFile::open(name, path.to_path_buf(), &mut problems);
            return Self::assemble(dir, opened.into_iter().collect(), None, Vec::new(), problems);
        }
        if !meta.is_dir() {
            return Err(CheckpointError::NotAFile { path: path.to_path_buf() }.into());
        }
        let mut problems = Vec::new();
        let Choice { files, index, unread } = files::choose(path, links, &mut problems);
        Self::read_files(path, &files, index, unread, links, problems)
    }

    /// Opens exactly the named files of `dir`, without looking for an index: an artifact's side
    /// folder, for example.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    ///
    /// # Panics
    /// If a name is not a plain `*.safetensors` file name; names from outside go through
    /// [`Checkpoint::open`].
    pub fn open_files(dir: &Path, names: &[String]) -> Result<Self, Problems<CheckpointError>> {
        for name in names {
            assert!(files::is_plain(name), "`{name}` must be a plain safetensors file name");
        }
        Self::read_files(dir, names, None, Vec::new(), &Links::Refuse, Vec::new())
    }

    fn read_files(
        dir: &Path,
        names: &[String],
        index: Option<Index>,
        unread: Vec<String>,
        links: &Links,
        mut problems: Vec<CheckpointError>,
    ) -> Result<Self, Problems<CheckpointError>> {
        let mut opened = Vec::new();
        for name in names {
            let path = dir.join(name);
            match files::check_links(&path, links) {
                Ok(()) => opened.extend(SourceFile::open(name.clone(), path, &mut problems)),
                Err(problem) => problems.push(problem),
            }
        }
        Self::assemble(dir.to_path_buf(), opened, index, unread, problems)
    }

    /// Joins the files' headers and checks them against each other and the index.
    fn assemble(
        dir: PathBuf,
        opened: Vec<(SourceFile, Vec<HeaderTensor>)>,
        index: Option<Index>,
        unread: Vec<String>,
        mut problems: Vec<CheckpointError>,
    ) -> Result<Self, Problems<CheckpointError>> {
        let mut files = Vec::new();
        let mut tensors: Vec<TensorEntry> = Vec::new();
        let mut by_name: BTreeMap<TensorName, usize> = BTreeMap::new();
        for (file, header) in opened {
            let expected = index.as_ref().map(|index| {
                let here = index.weight_map.iter().filter(|(_, name)| **name == file.name);
                (index, here.map(|(tensor, _)| tensor).collect::<BTreeSet<_>>())
            });
            if let Some((index, expected)) = &expected {
                let found: BTreeSet<_> = header.iter().map(|tensor| &tensor.name).collect();
                problems.extend(expected.difference(&found).map(|tensor| {
                    CheckpointError::IndexTensorMissing {
                        file: file.path.clone(),
                        tensor: (*tensor).clone(),
                        index: index.path.clone(),
                    }
                }));
            }
            for HeaderTensor { name, dtype, shape, range } in header {
                let listed = expected.as_ref().is_none_or(|(_, expected)| expected.contains(&name));
                if let Some(first) = by_name.get(&name) {
                    let first: &SourceFile = &files[tensors[*first].file];
                    problems.push(CheckpointError::DuplicateAcross {
                        tensor: name,
                        first: first.path.clone(),
                        second: file.path.clone(),
                    });
                    continue;
                }
                if let (false, Some((index, _))) = (listed, &expected) {
                    problems.push(CheckpointError::IndexTensorUnlisted {
                        file: file.path.clone(),
                        tensor: name.clone(),
                        index: index.path.clone(),
                    });
                }
                by_name.insert(name.clone(), tensors.len());
                tensors.push(TensorEntry { name, dtype, shape, file: files.len(), range });
            }
            files.push(file);
        }
        report(problems, Self { dir, files, tensors, by_name, unread })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The files, sorted by name.
    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// Safetensors files of the folder that are not part of the checkpoint, sorted: for the report.
    pub fn unread(&self) -> &[String] {
        &self.unread
    }

    /// Every tensor, in the order work is streamed: by file, then by offset.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// Name, size and last change of every file: what tells that one was replaced.
    pub fn stats(&self) -> Vec<(&str, u64, String)> {
        let files = self.files.iter();
        files.map(|file| (file.name.as_str(), file.len, file.changed_ns().to_string())).collect()
    }

    /// SHA-256 of the canonical JSON of every tensor's name, dtype and shape, by name: which model this is, whatever
    /// its weights.
    pub fn shapes_digest(&self) -> Digest {
        let mut list: Vec<_> = self.tensors.iter().map(|e| (&e.name, e.dtype, &e.shape)).collect();
        list.sort();
        Digest::of(&canonical_json(&list))
    }

    /// The tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&TensorEntry> {
        self.by_name.get(name).map(|index| &self.tensors[*index])
    }

    /// The tensor's payload: elements in row order, little-endian.
    pub fn bytes(&self, entry: &TensorEntry) -> &[u8] {
        &self.file_bytes(entry.file)[in_memory(&entry.range)]
    }

    /// The whole file, header included.
    pub fn file_bytes(&self, file: usize) -> &[u8] {
        &self.files[file].map
    }

    /// Tells the kernel that these pages are not needed again, so that resident memory stays bounded.
    ///
    /// Pages that the range only touches go too; reading them again is correct and costs a page fault.
    /// The page cache keeps its copy.
    ///
    /// # Panics
    /// If the range leaves the file.
    pub fn release(&self, file: usize, range: Range<u64>) {
        self.assert_inside(file, &range);
        let range = in_memory(&range);
        // SAFETY: the map is shared, read-only and backed by the file, so a dropped page is read from
        // the file again when it is next touched; no byte of it can be lost.
        let advised = unsafe {
            self.files[file].map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len())
        };
        // Advice that the kernel declines costs memory, never correctness.
        let _ = advised;
    }

    /// Tells the kernel that this range will be read soon, front to back.
    ///
    /// # Panics
    /// If the range leaves the file.
    pub fn prefetch(&self, file: usize, range: Range<u64>) {
        self.assert_inside(file, &range);
        let range = in_memory(&range);
        // As in `release`: only speed depends on the answer.
        let _ = self.files[file].map.advise_range(Advice::WillNeed, range.start, range.len());
    }

    /// Whether every file still has the length and the time of change that it had when opened.
    ///
    /// One `fstat` per file. Call it before trusting what was read, and before publishing.
    ///
    /// # Errors
    /// Every file that changed.
    pub fn check_unchanged(&self) -> Result<(), Problems<CheckpointError>> {
        let problems = self.files.iter().filter_map(|file| file.change()).collect();
        Problems::none_or(problems, ())
    }

    fn assert_inside(&self, file: usize, range: &Range<u64>) {
        let len = self.files[file].len;
        assert!(range.start <= range.end && range.end <= len, "{range:?} leaves a file of {len} bytes");
    }
}

/// A checked range of a mapped file as indices.
fn in_memory(range: &Range<u64>) -> Range<usize> {
    let index = |offset| usize::try_from(offset).expect("the map holds the whole file, so its offsets fit");
    index(range.start)..index(range.end)
}

fn missing_or(path: &Path, source: io::Error) -> CheckpointError {
    let path = path.to_path_buf();
    match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => CheckpointError::Missing { path },
        _ => CheckpointError::Unreadable { path, source },
    }
}

impl SourceFile {
    /// Time of last change of the file or of facts about it (`ctime`) in nanoseconds since 1970, asked now;
    /// 0 if the system does not say.
    pub fn changed_ns(&self) -> u64 {
        use std::os::unix::fs::MetadataExt as _;
        let now = self.handle.metadata();
        now.map_or(0, |meta| (meta.ctime() as u64).wrapping_mul(1_000_000_000) + meta.ctime_nsec() as u64)
    }

    /// Maps the file and reads its header; `None` after a problem was pushed.
    fn open(
        name: String,
        path: PathBuf,
        problems: &mut Vec<CheckpointError>,
    ) -> Option<(Self, Vec<HeaderTensor>)> {
        let (handle, map, modified) = match map(&path) {
            Ok(mapped) => mapped,
            Err(problem) => {
                problems.push(problem);
                return None;
            }
        };
        let Header { tensors, metadata, data_start } = header::parse(&path, &map, problems)?;
        let len = map.len() as u64;
        Some((Self { name, path, len, data_start, metadata, handle, modified, map }, tensors))
    }

    fn change(&self) -> Option<CheckpointError> {
        let changed = |what| Some(CheckpointError::Changed { path: self.path.clone(), what });
        match self.handle.metadata() {
            Ok(meta) if meta.len() != self.len => changed("its length"),
            Ok(meta) if meta.modified().ok() != self.modified => changed("its time of change"),
            Ok(_) => None,
            Err(source) => Some(CheckpointError::Unreadable { path: self.path.clone(), source }),
        }
    }
}

/// Maps a regular file, read-only.
fn map(path: &Path) -> Result<(File, Mmap, Option<SystemTime>), CheckpointError> {
    // Asked before opening, because opening a pipe would wait for its writer.
    if !std::fs::metadata(path).map_err(|source| missing_or(path, source))?.is_file() {
        return Err(CheckpointError::NotAFile { path: path.to_path_buf() });
    }
    let unreadable = |source| CheckpointError::Unreadable { path: path.to_path_buf(), source };
    let handle = File::open(path).map_err(unreadable)?;
    let meta = handle.metadata().map_err(unreadable)?;
    if meta.len() < 8 {
        return Err(CheckpointError::TooShort { file: path.to_path_buf(), found: meta.len() });
    }
    // SAFETY: the map is read-only. Its bytes can still change if another process writes the file:
    // they are plain integers to us, so any value is valid, and every offset is checked against the
    // map's length. A file that shrinks raises SIGBUS (module text).
    let map = unsafe { Mmap::map(&handle) }.map_err(unreadable)?;
    if map.len() as u64 != meta.len() {
        return Err(CheckpointError::Changed { path: path.to_path_buf(), what: "its length" });
    }
    Ok((handle, map, meta.modified().ok()))
}
