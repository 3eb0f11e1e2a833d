//! An artifact on disk.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::{Component, Path, PathBuf};

use super::provenance::{Provenance, VERSION};
use super::{MACHINE, PROVENANCE};
use crate::digest::Digest;
use crate::failure::{Exit, Failure};

/// A folder with a readable `provenance.json`.
#[derive(Debug)]
pub struct Artifact {
    /// The folder.
    pub dir: PathBuf,
    /// Its record.
    pub provenance: Provenance,
    /// SHA-256 of the record: the artifact's digest.
    pub digest: Digest,
}

/// Why a folder is not an artifact.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ArtifactError {
    #[error("`{path}` is not an artifact of tqc: it has no `{PROVENANCE}`")]
    NoRecord { path: PathBuf },
    #[error("`{path}` cannot be read: {error}")]
    Unreadable { path: PathBuf, error: std::io::Error },
    #[error("`{path}` is not a provenance record: {problem}")]
    Record { path: PathBuf, problem: String },
    #[error("`{path}` has SHA-256 {found}, but the artifact's record says {needed}")]
    Damaged { path: PathBuf, found: Digest, needed: Digest },
    #[error("`{path}` has version {found}, but this program reads version {VERSION}")]
    Version { path: PathBuf, found: u64 },
}

impl Failure for ArtifactError {
    fn exit(&self) -> Exit {
        Exit::Input
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            ArtifactError::NoRecord { .. } => {
                "`tqc inspect` reads any checkpoint; only folders that `tqc build` wrote can be verified or repacked"
                    .to_owned()
            }
            ArtifactError::Unreadable { .. } => "check the folder's permissions".to_owned(),
            ArtifactError::Record { .. } => {
                "the file is damaged; build or download the artifact again".to_owned()
            }
            ArtifactError::Damaged { .. } => {
                "the file was changed after the artifact was built; build or download it again".to_owned()
            }
            ArtifactError::Version { .. } => "use the program version that wrote it".to_owned(),
        })
    }
}

impl Artifact {
    /// Reads the record of the artifact in `dir`.
    ///
    /// # Errors
    /// [`ArtifactError`].
    pub fn open(dir: &Path) -> Result<Self, ArtifactError> {
        let path = dir.join(PROVENANCE);
        if path.metadata().is_ok_and(|meta| !meta.is_file()) {
            let problem = "it is not a regular file".to_owned();
            return Err(ArtifactError::Record { path, problem });
        }
        let bytes = std::fs::read(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
                ArtifactError::NoRecord { path: dir.to_owned() }
            }
            _ => ArtifactError::Unreadable { path: path.clone(), error },
        })?;
        let bad = |problem: String| ArtifactError::Record { path: path.clone(), problem };
        let value: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
        match value.get("version").and_then(serde_json::Value::as_u64) {
            Some(version) if version == u64::from(VERSION) => {}
            Some(found) => return Err(ArtifactError::Version { path, found }),
            None => return Err(bad("it has no `version`".to_owned())),
        }
        let provenance = serde_json::from_value(value).map_err(|e| bad(e.to_string()))?;
        Ok(Self { dir: dir.to_owned(), provenance, digest: Digest::of(&bytes) })
    }

    /// Compares the digest of every file that the record names.
    ///
    /// # Errors
    /// [`ArtifactError::Damaged`] or [`ArtifactError::Unreadable`] for the first that differs or is missing;
    /// [`ArtifactError::Record`] if the record names a file outside the artifact.
    pub fn check_files(&self) -> Result<(), ArtifactError> {
        let inside = |name: &str| Path::new(name).components().all(|c| matches!(c, Component::Normal(_)));
        if let Some(name) = self.provenance.files.keys().find(|name| name.is_empty() || !inside(name)) {
            let problem = format!("`files` names `{name}`, which is not a path below the artifact");
            return Err(ArtifactError::Record { path: self.dir.join(PROVENANCE), problem });
        }
        for (name, needed) in &self.provenance.files {
            let path = self.dir.join(name);
            match file_digest(&path) {
                Ok(found) if found == *needed => {}
                Ok(found) => return Err(ArtifactError::Damaged { path, found, needed: *needed }),
                Err(error) => return Err(ArtifactError::Unreadable { path, error }),
            }
        }
        Ok(())
    }

    /// Whether the record knows a file of this path; itself and the machine's facts it knows by name.
    pub fn knows(&self, file: &str) -> bool {
        file == PROVENANCE || file == MACHINE || self.provenance.files.contains_key(file)
    }
}

/// The digest of a file, read in pieces.
///
/// # Errors
/// If it cannot be read or is not a regular file.
pub fn file_digest(path: &Path) -> io::Result<Digest> {
    // Asked before opening, because opening a pipe would wait for its writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Digest::of_reader(&mut File::open(path)?)
}

/// Every file below `dir`, as a path with `/`. Links are files: what they point to is not walked.
///
/// # Errors
/// If a folder cannot be read.
pub fn files_below(dir: &Path) -> io::Result<BTreeSet<String>> {
    fn walk(dir: &Path, prefix: &str, found: &mut BTreeSet<String>) -> io::Result<()> {
        for entry in std::fs::read_dir(dir)? {
            let entry = entry?;
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            if entry.file_type()?.is_dir() {
                walk(&entry.path(), &format!("{name}/"), found)?;
            } else {
                found.insert(name);
            }
        }
        Ok(())
    }
    let mut found = BTreeSet::new();
    walk(dir, "", &mut found)?;
    Ok(found)
}
