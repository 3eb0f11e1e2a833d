//! The folder an artifact grows in, its journal, and its publication.
//!
//! ```text
//! artifacts/.demo.building/   lock           held while a build runs
//!                             journal.jsonl  one line per finished piece of work
//!                             artifact/      becomes artifacts/demo in one rename
//!                             found/         rotations and codes that were looked for and found
//! ```
//!
//! A journal line is written after the bytes it speaks of, and names their digests; a resumed build
//! believes a line only if the bytes on disk have that digest. So neither a kill nor a power cut between
//! the two can do harm, and no line needs a sync of its own.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use super::BuildError;
use crate::artifact::PROVENANCE;
use crate::artifact::open::{Artifact, files_below};
use crate::digest::Digest;
use crate::fold::{Keep, KeepFolder};
use crate::process::{is_same_file, lock};
use crate::quant::{Repairs, RowLoss};

/// The work that a journal belongs to: the plan, and the source files as the file system describes them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalKey {
    /// Digest of the resolved plan: recipe, tool, names, shapes, layout.
    pub plan: Digest,
    /// One per source file.
    pub source: Vec<SourceStat>,
}

/// A source file as the file system describes it; a change means it must be read again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceStat {
    /// Name in the source folder.
    pub name: String,
    /// Size in bytes.
    pub len: u64,
    /// Time of last change of content or of any fact about it, nanoseconds since 1970; no program can set it.
    pub changed_ns: u64,
}

/// A finished piece of work.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Entry {
    /// The first line.
    Key(JournalKey),
    /// A source tensor was read whole.
    SourceTensor {
        /// Index in the checkpoint.
        tensor: usize,
        /// Digest of its payload.
        sha256: Digest,
    },
    /// A source file was read whole.
    SourceFile {
        /// Index in the checkpoint.
        file: usize,
        /// Digest of the file.
        sha256: Digest,
    },
    /// All planes of a module are written.
    Module(SealedModule),
}

/// What is known of a module once its planes are written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SealedModule {
    /// Index in the plan.
    pub module: usize,
    /// Digest of each plane's payload.
    pub planes: Vec<Digest>,
    /// Σ (w − decode)², as the bits of an f64 so that no decimal is between.
    pub error_bits: u64,
    /// Σ w², likewise.
    pub energy_bits: u64,
    /// Groups written as zeros because their scale underflows.
    pub scale_underflow: u64,
    /// Groups whose scale was clamped.
    pub scale_overflow: u64,
    /// Tiles that were searched again in f32.
    #[serde(default)]
    pub path_saturated: u64,
    /// Weights stored as the farthest value of their codebook, far from where they are.
    #[serde(default)]
    pub out_of_reach: u64,
}

impl SealedModule {
    /// Module `module` with these plane digests, the sums over its rows, and what its encoder changed.
    pub fn new(module: usize, planes: Vec<Digest>, loss: RowLoss, repairs: Repairs) -> Self {
        Self {
            module,
            planes,
            error_bits: loss.error.to_bits(),
            energy_bits: loss.energy.to_bits(),
            scale_underflow: repairs.scale_underflow,
            scale_overflow: repairs.scale_overflow,
            path_saturated: repairs.path_saturated,
            out_of_reach: repairs.out_of_reach,
        }
    }

    /// The sums over all rows.
    pub fn loss(&self) -> RowLoss {
        RowLoss { error: f64::from_bits(self.error_bits), energy: f64::from_bits(self.energy_bits) }
    }

    /// What the encoder changed beyond rounding.
    pub fn repairs(&self) -> Repairs {
        Repairs {
            scale_underflow: self.scale_underflow,
            scale_overflow: self.scale_overflow,
            path_saturated: self.path_saturated,
            out_of_reach: self.out_of_reach,
        }
    }
}

/// What to do with an unfinished build in the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unfinished {
    /// Refuse.
    Refuse,
    /// Go on from it.
    Resume,
    /// Throw it away.
    Discard,
}

/// A locked staging folder.
#[derive(Debug)]
pub struct Staging {
    root: PathBuf,
    target: PathBuf,
    journal: Mutex<File>,
    has_work: AtomicBool,
    lock: File,
}

impl Staging {
    /// Takes the folder beside `target`, and returns what its journal says is finished.
    ///
    /// # Errors
    /// [`BuildError::InUse`], [`BuildError::Unfinished`], [`BuildError::OtherPlan`],
    /// [`BuildError::NotOurs`] or [`BuildError::HoldsMore`] if replacing `target` would lose what is not
    /// ours, [`BuildError::Io`].
    pub fn take(
        target: &Path,
        key: &JournalKey,
        unfinished: Unfinished,
    ) -> Result<(Self, Vec<Entry>), BuildError> {
        check_replaceable(target)?;
        let root = staging_path(target)?;
        check_staging(&root)?;
        let lock_path = root.join("lock");
        let lock = lock(&lock_path).map_err(|(what, e)| BuildError::io(what, &lock_path, e))?;
        let lock = lock.ok_or_else(|| BuildError::InUse { path: target.to_owned() })?;
        let journal_path = root.join("journal.jsonl");
        let mut entries =
            read_journal(&journal_path).map_err(|e| BuildError::io("read", &journal_path, e))?;
        let found = match entries.first() {
            Some(Entry::Key(found)) => Some(found.clone()),
            _ => None,
        };
        match (&found, unfinished) {
            (None, _) | (Some(_), Unfinished::Discard) => entries.clear(),
            (Some(_), Unfinished::Refuse) => return Err(BuildError::Unfinished { path: root.clone() }),
            (Some(found), Unfinished::Resume) if found.plan != key.plan => {
                return Err(BuildError::OtherPlan { path: root.clone() });
            }
            // Source files were touched: what was read of them must be read again.
            (Some(found), Unfinished::Resume) if found.source != key.source => entries.clear(),
            (Some(_), Unfinished::Resume) => {}
        }
        let artifact = root.join("artifact");
        if entries.is_empty() {
            remove_dir(&artifact)?;
            remove_dir(&root.join(FOUND))?;
        }
        std::fs::create_dir_all(&artifact).map_err(|e| BuildError::io("create", &artifact, e))?;
        // The journal is written anew: a torn last line would otherwise swallow the next one.
        let mut text = Vec::new();
        let kept = entries.iter().skip(1).cloned();
        for entry in std::iter::once(Entry::Key(key.clone())).chain(kept) {
            text.extend(line(&entry));
        }
        let fresh = root.join("journal.new");
        std::fs::write(&fresh, &text).map_err(|e| BuildError::io("write", &fresh, e))?;
        std::fs::rename(&fresh, &journal_path).map_err(|e| BuildError::io("rename", &fresh, e))?;
        let journal = OpenOptions::new().append(true).open(&journal_path);
        let journal = Mutex::new(journal.map_err(|e| BuildError::io("open", &journal_path, e))?);
        let finished: Vec<Entry> = entries.into_iter().skip(1).collect();
        let has_work = AtomicBool::new(!finished.is_empty());
        Ok((Self { root, target: target.to_owned(), journal, has_work, lock }, finished))
    }

    /// Where the artifact's files are written.
    pub fn artifact(&self) -> PathBuf {
        self.root.join("artifact")
    }

    /// Whether anything is finished that a resume could use.
    pub fn has_work(&self) -> bool {
        self.has_work.load(Ordering::Relaxed)
    }

    /// Appends one finished piece of work.
    ///
    /// # Errors
    /// [`BuildError::Io`].
    pub fn record(&self, entry: &Entry) -> Result<(), BuildError> {
        let line = line(entry);
        self.has_work.store(true, Ordering::Relaxed);
        let mut journal = self.journal.lock().expect("writing a line does not panic");
        journal.write_all(&line).map_err(|e| BuildError::io("append to", &self.root.join("journal.jsonl"), e))
    }

    /// Whether the folder is still the one that was taken: nobody removed or replaced it meanwhile.
    pub fn is_intact(&self) -> bool {
        is_same_file(&self.lock, &self.root.join("lock"))
    }

    /// Files of what was looked for: codes, rows, rotations.
    pub fn found(&self) -> Vec<std::fs::Metadata> {
        let entries = std::fs::read_dir(self.root.join(FOUND)).into_iter().flatten();
        entries.filter_map(|entry| entry.ok()?.metadata().ok()).filter(|meta| meta.is_file()).collect()
    }

    /// Makes the artifact durable and visible in one step, replacing an earlier artifact of ours.
    ///
    /// # Errors
    /// [`BuildError::Io`]; the target is then as it was.
    pub fn publish(self) -> Result<(), BuildError> {
        let artifact = self.artifact();
        sync_tree(&artifact)?;
        if self.target.symlink_metadata().is_ok() {
            exchange(&artifact, &self.target)?;
        } else {
            std::fs::rename(&artifact, &self.target).map_err(|e| BuildError::io("rename", &artifact, e))?;
        }
        if let Some(parent) = self.target.parent().filter(|p| !p.as_os_str().is_empty()) {
            sync_dir(parent)?;
        }
        remove_dir(&self.root)
    }

    /// Removes everything that was staged.
    ///
    /// # Errors
    /// [`BuildError::Io`].
    pub fn discard(self) -> Result<(), BuildError> {
        remove_dir(&self.root)
    }
}

impl Keep for Staging {
    fn get(&self, name: &str) -> Option<Vec<u8>> {
        KeepFolder(self.root.join(FOUND)).get(name)
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        // Without it, the next try looks again.
        KeepFolder(self.root.join(FOUND)).put(name, bytes);
        self.has_work.store(true, Ordering::Relaxed);
    }

    fn place(&self, name: &str) -> Option<PathBuf> {
        self.has_work.store(true, Ordering::Relaxed);
        KeepFolder(self.root.join(FOUND)).place(name)
    }
}

/// What a staging folder may hold.
const OWN: [&str; 6] = ["lock", "journal.jsonl", "journal.new", "artifact", "replaced", FOUND];

/// The folder of what was looked for: rotations, and codes that errors were weighed for.
const FOUND: &str = "found";

/// Refuses a folder of the staging folder's name that is no staging folder: what is in it is somebody's.
fn check_staging(root: &Path) -> Result<(), BuildError> {
    let Ok(meta) = root.symlink_metadata() else { return Ok(()) };
    let foreign = || BuildError::NotStaging { path: root.to_owned() };
    if !meta.is_dir() {
        return Err(foreign());
    }
    let entries = std::fs::read_dir(root).map_err(|e| BuildError::io("list", root, e))?;
    for entry in entries {
        let entry = entry.map_err(|e| BuildError::io("list", root, e))?;
        let kind = entry.file_type().map_err(|e| BuildError::io("list", root, e))?;
        let name = entry.file_name();
        let folder = name == "artifact" || name == "replaced" || name == FOUND;
        let fits = if folder { kind.is_dir() } else { kind.is_file() };
        if !fits || !OWN.iter().any(|own| name == *own) {
            return Err(foreign());
        }
    }
    Ok(())
}

/// Refuses a target that [`super::build`] would refuse, without touching it.
///
/// # Errors
/// [`BuildError`] for a target that is not ours to replace, and for an unfinished build in the way.
pub fn check_target(target: &Path, unfinished: Unfinished) -> Result<(), BuildError> {
    let root = staging_path(target)?;
    check_replaceable(target)?;
    check_staging(&root)?;
    let journal = root.join("journal.jsonl");
    match unfinished {
        Unfinished::Refuse if journal.exists() => Err(BuildError::Unfinished { path: root }),
        _ => Ok(()),
    }
}

/// `artifacts/demo` to `artifacts/.demo.building`.
pub fn staging_path(target: &Path) -> Result<PathBuf, BuildError> {
    hidden(target, ".building")
}

/// `artifacts/demo` to `artifacts/.demo.measuring`: what a measurement of bases keeps until the build is published.
pub fn measuring_path(target: &Path) -> Result<PathBuf, BuildError> {
    hidden(target, ".measuring")
}

/// `artifacts/demo` to `artifacts/.demo.SUFFIX`.
///
/// # Errors
/// [`BuildError::NoName`].
pub(crate) fn hidden(target: &Path, suffix: &str) -> Result<PathBuf, BuildError> {
    let name = target.file_name().ok_or_else(|| BuildError::NoName { path: target.to_owned() })?;
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(suffix);
    Ok(target.with_file_name(hidden))
}

/// Refuses a place inside an artifact, of which every file is recorded, or inside the source.
///
/// # Errors
/// [`BuildError::Inside`].
pub(crate) fn check_outside(target: &Path, source: Option<&Path>) -> Result<(), BuildError> {
    let source = source.and_then(|source| source.canonicalize().ok());
    let above = std::path::absolute(target).unwrap_or_else(|_| target.to_owned());
    for outer in above.ancestors().skip(1) {
        let is_source = source.is_some() && outer.canonicalize().ok() == source;
        let what = match (is_source, outer.join(PROVENANCE).is_file()) {
            (true, _) => "the source",
            (false, true) => "an artifact",
            (false, false) => continue,
        };
        return Err(BuildError::Inside { path: target.to_owned(), outer: outer.to_owned(), what });
    }
    Ok(())
}

/// Refuses to replace anything but an empty folder, or an artifact of ours and nothing beside it.
fn check_replaceable(target: &Path) -> Result<(), BuildError> {
    let not_ours = || BuildError::NotOurs { path: target.to_owned() };
    let Ok(meta) = target.symlink_metadata() else { return Ok(()) };
    if !meta.is_dir() {
        return Err(not_ours());
    }
    let listed = |e| BuildError::io("list", target, e);
    if std::fs::read_dir(target).map_err(listed)?.next().is_none() {
        return Ok(());
    }
    // Only an artifact is walked: anything else may be a home folder, large and in use.
    let artifact = Artifact::open(target).map_err(|_| not_ours())?;
    let files = files_below(target).map_err(listed)?;
    match files.into_iter().find(|file| !artifact.knows(file)) {
        Some(file) => Err(BuildError::HoldsMore { path: target.to_owned(), file }),
        None => Ok(()),
    }
}

/// A journal's line: the entry, and the start of its own SHA-256 in front, so that a damaged line is known.
fn line(entry: &Entry) -> Vec<u8> {
    let json = serde_json::to_string(entry).expect("entries have string keys");
    format!("{} {json}\n", Digest::of(json.as_bytes()).short()).into_bytes()
}

fn parse_line(line: &[u8]) -> Option<Entry> {
    let (digest, json) = std::str::from_utf8(line).ok()?.split_once(' ')?;
    (Digest::of(json.as_bytes()).short() == digest).then(|| serde_json::from_str(json).ok())?
}

/// The lines that are whole, up to the first that is not: a kill can only tear the last.
fn read_journal(path: &Path) -> io::Result<Vec<Entry>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut entries = Vec::new();
    for line in BufReader::new(file).split(b'\n') {
        match parse_line(&line?) {
            Some(entry) => entries.push(entry),
            None => break,
        }
    }
    Ok(entries)
}

fn sync_dir(path: &Path) -> Result<(), BuildError> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(|e| BuildError::io("sync", path, e))
}

/// Makes all files below `path` durable.
///
/// # Errors
/// [`BuildError::Io`].
pub(crate) fn sync_tree(path: &Path) -> Result<(), BuildError> {
    let list = std::fs::read_dir(path).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    for entry in list.map_err(|e| BuildError::io("list", path, e))? {
        let path = entry.path();
        if path.is_dir() {
            sync_tree(&path)?;
        } else {
            sync_dir(&path)?;
        }
    }
    sync_dir(path)
}

/// Removes a folder, if it is there.
///
/// # Errors
/// [`BuildError::Io`].
pub(crate) fn remove_dir(path: &Path) -> Result<(), BuildError> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(BuildError::io("remove", path, error)),
        _ => Ok(()),
    }
}

/// Swaps two folders; atomic where the system can.
fn exchange(new: &Path, old: &Path) -> Result<(), BuildError> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        match renameat_with(CWD, new, CWD, old, RenameFlags::EXCHANGE) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::NOTSUP) => {}
            Err(error) => return Err(BuildError::io("replace", old, error.into())),
        }
    }
    // Two renames: for a moment nothing is at `old`, but never half an artifact.
    let aside = new.with_file_name("replaced");
    remove_dir(&aside)?;
    std::fs::rename(old, &aside).map_err(|e| BuildError::io("rename", old, e))?;
    std::fs::rename(new, old).map_err(|e| BuildError::io("rename", new, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(plan: &[u8]) -> JournalKey {
        JournalKey {
            plan: Digest::of(plan),
            source: vec![SourceStat { name: "model.safetensors".to_owned(), len: 3, changed_ns: 5 }],
        }
    }

    fn entry(tensor: usize) -> Entry {
        Entry::SourceTensor { tensor, sha256: Digest::of(b"payload") }
    }

    #[test]
    fn a_second_build_of_the_same_target_is_refused_while_the_first_runs() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let first = Staging::take(&target, &key(b"a"), Unfinished::Refuse).unwrap();
        let second = Staging::take(&target, &key(b"a"), Unfinished::Discard);
        assert!(matches!(second, Err(BuildError::InUse { .. })));
        first.0.discard().unwrap();
        assert!(Staging::take(&target, &key(b"a"), Unfinished::Refuse).is_ok());
    }

    #[test]
    fn a_torn_line_is_forgotten_and_the_rest_is_resumed() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let (staging, _) = Staging::take(&target, &key(b"a"), Unfinished::Refuse).unwrap();
        staging.record(&entry(0)).unwrap();
        staging.record(&entry(1)).unwrap();
        drop(staging);
        let journal = dir.path().join(".out.building/journal.jsonl");
        let text = std::fs::read(&journal).unwrap();
        std::fs::write(&journal, &text[..text.len() - 9]).unwrap();
        assert!(matches!(
            Staging::take(&target, &key(b"a"), Unfinished::Refuse),
            Err(BuildError::Unfinished { .. })
        ));
        assert!(matches!(
            Staging::take(&target, &key(b"b"), Unfinished::Resume),
            Err(BuildError::OtherPlan { .. })
        ));
        let (staging, finished) = Staging::take(&target, &key(b"a"), Unfinished::Resume).unwrap();
        assert_eq!(finished, [entry(0)]);
        staging.record(&entry(2)).unwrap();
        drop(staging);
        let (_, finished) = Staging::take(&target, &key(b"a"), Unfinished::Resume).unwrap();
        assert_eq!(finished, [entry(0), entry(2)]);
    }

    #[test]
    fn a_touched_source_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let (staging, _) = Staging::take(&target, &key(b"a"), Unfinished::Refuse).unwrap();
        staging.record(&entry(0)).unwrap();
        drop(staging);
        let mut touched = key(b"a");
        touched.source[0].changed_ns += 1;
        let (_, finished) = Staging::take(&target, &touched, Unfinished::Resume).unwrap();
        assert!(finished.is_empty());
    }

    /// A whole record of nothing, in a recipe of this name.
    fn record(name: &str) -> String {
        let zero = Digest::of(b"");
        serde_json::json!({
            "version": 1, "tool": { "name": "tqc", "version": "0", "source_sha256": zero },
            "recipe": { "name": name, "sha256": zero, "seed": 0, "files": [] }, "plan_sha256": zero,
            "stages": [], "allocator": "rules", "outputs": [], "files": {}, "tokenizer_sha256": null,
            "source": {
                "model_type": "llama", "layout": "MLX", "hub": null, "revision": null, "sha256": zero,
                "config_sha256": zero, "files": [], "tensors": [],
            },
            "sizes": {
                "weights": 0, "quantized_weights": 0, "quantized_bytes": 0, "source_bytes": 0,
                "weight_file_bytes": 0, "bits_per_weight": 0.0, "quantized_bits_per_weight": 0.0,
            },
            "notes": [],
        })
        .to_string()
    }

    #[test]
    fn publishing_replaces_an_artifact_of_ours_but_no_other_folder() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        for text in ["first", "second"] {
            let (staging, _) = Staging::take(&target, &key(b"a"), Unfinished::Refuse).unwrap();
            std::fs::write(staging.artifact().join("provenance.json"), record(text)).unwrap();
            staging.publish().unwrap();
            assert_eq!(std::fs::read_to_string(target.join("provenance.json")).unwrap(), record(text));
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left behind");
        }
        std::fs::write(target.join("evaluation.txt"), "words").unwrap();
        let refused = Staging::take(&target, &key(b"a"), Unfinished::Refuse);
        assert!(matches!(refused, Err(BuildError::HoldsMore { file, .. }) if file == "evaluation.txt"));
        let precious = dir.path().join("thesis");
        std::fs::create_dir(&precious).unwrap();
        std::fs::write(precious.join("chapter-1.txt"), "words").unwrap();
        let refused = Staging::take(&precious, &key(b"a"), Unfinished::Discard);
        assert!(matches!(refused, Err(BuildError::NotOurs { .. })));
    }
}
