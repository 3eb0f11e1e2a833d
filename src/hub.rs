//! Fetches one pinned revision of a model repository into the Hugging Face cache.
//!
//! `hf-hub` speaks the protocol and lays out the cache (`models--ORG--NAME/{blobs,snapshots,refs}`), so
//! other tools share the files. Around it this module adds what a build needs and `hf-hub` 0.5 lacks
//! (`docs/decisions/0009-hub.md`): only the files a source needs, retries that continue where the bytes
//! stopped, a limit on silence, the digest of every file, and a record of what is complete:
//! `models--ORG--NAME/tqc/COMMIT.json` maps each file to its length and digest. With a record whose files
//! are all there, no request is made.
//!
//! Digest of a file, from its ETag: 64 hexadecimal digits are the SHA-256 of the content (large files);
//! 40 are SHA-1("blob LENGTH\0" + content), git's name for it (small files).

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use hf_hub::api::sync::{Api, ApiBuilder, ApiError, Metadata};
use hf_hub::{Cache, Repo, RepoType};
use serde::{Deserialize, Serialize};
use sha1::Digest as _;

use crate::checkpoint::{HEADER_LIMIT, INDEX};
use crate::digest::{Hasher, canonical_json};
use crate::failure::{Exit, Failure};
use crate::units::Bytes;

/// Where and how to fetch. Made once, at the command line's edge.
#[derive(Clone)]
pub struct HubConfig {
    /// The hub's address, without a slash at its end (`HF_ENDPOINT`).
    pub endpoint: String,
    /// The cache folder (`HF_HUB_CACHE`, else `HF_HOME/hub`, else `~/.cache/huggingface/hub`).
    pub cache: PathBuf,
    /// Access token (`HF_TOKEN`, else the file `HF_HOME/token`).
    pub token: Option<String>,
    /// Make no request (`HF_HUB_OFFLINE`).
    pub offline: bool,
    /// How often a request is tried again when no byte arrived since the last try.
    pub retries: u32,
    /// Wait before the first retry; doubled each time, at most 16 times as long.
    pub backoff: Duration,
    /// How long a request may be silent.
    pub silence: Duration,
}

impl std::fmt::Debug for HubConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HubConfig")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .field("token", &self.token.as_ref().map(|_| "(set)"))
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

impl HubConfig {
    /// The settings that the Hugging Face tools read from the environment.
    ///
    /// # Errors
    /// If no variable and no home folder says where the cache is.
    pub fn from_env() -> Result<Self, HubError> {
        Self::from_vars(|name| std::env::var(name).ok())
    }

    /// [`HubConfig::from_env`] over any set of variables. An empty value counts as unset.
    pub fn from_vars(get: impl Fn(&str) -> Option<String>) -> Result<Self, HubError> {
        let get = |name: &str| get(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
        let path = |name: &str| get(name).map(PathBuf::from);
        let home = path("HF_HOME")
            .or_else(|| path("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")))
            .or_else(|| path("HOME").map(|home| home.join(".cache/huggingface")));
        let cache = path("HF_HUB_CACHE")
            .or_else(|| home.as_ref().map(|home| home.join("hub")))
            .ok_or(HubError::NoCacheFolder)?;
        let token_file = path("HF_TOKEN_PATH").or_else(|| home.map(|home| home.join("token")));
        let token = get("HF_TOKEN").or_else(|| {
            let text = fs::read_to_string(token_file?).ok()?;
            Some(text.trim().to_owned()).filter(|token| !token.is_empty())
        });
        let endpoint = get("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        let offline = get("HF_HUB_OFFLINE")
            .is_some_and(|v| ["1", "on", "yes", "true"].contains(&v.to_ascii_lowercase().as_str()));
        Ok(Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache,
            token,
            offline,
            retries: 5,
            backoff: Duration::from_millis(500),
            silence: Duration::from_secs(60),
        })
    }
}

/// What is going on, for a progress bar. Sent at most about ten times a second.
#[derive(Debug, Clone, Copy)]
pub struct Transfer<'a> {
    /// Downloading, or reading again to check the digest.
    pub step: Step,
    /// The file in work.
    pub file: &'a str,
    /// Bytes of the files that are finished, and of this file as far as this step came.
    pub done: Bytes,
    /// Bytes of all files.
    pub total: Bytes,
    /// Mean since this file's step began; 0 at its start.
    pub bytes_per_second: f64,
}

/// See [`Transfer::step`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Step {
    Download,
    Check,
}

/// A complete revision in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The folder with the files; they are links to blobs in `root`.
    pub dir: PathBuf,
    /// The repository's folder in the cache: where links may lead
    /// ([`crate::checkpoint::Links::Within`]).
    pub root: PathBuf,
    /// Names of the files, sorted.
    pub files: Vec<String>,
    /// The revision's commit.
    pub commit: String,
}

/// Why a revision could not be had.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum HubError {
    #[error("hub repository must be `ORGANISATION/NAME`, got `{repo}`")]
    BadRepo { repo: String },

    #[error("revision of `{repo}` must be a commit of 40 hexadecimal digits, got `{revision}`")]
    Unpinned { repo: String, revision: String },

    #[error("no folder for the hub cache: neither `HF_HUB_CACHE`, `HF_HOME` nor `HOME` is set")]
    NoCacheFolder,

    #[error("`{what}` was not found at `{endpoint}`")]
    NotFound { what: String, endpoint: String },

    #[error("`{what}` was refused by `{endpoint}` with status {status}: {}", token_state(.token))]
    Denied { what: String, endpoint: String, status: u16, token: bool },

    #[error("`{repo}` was asked for at commit `{needed}`, but the hub answered with `{found}`")]
    OtherCommit { repo: String, needed: String, found: String },

    #[error("`{repo}` at `{commit}` holds no `*.safetensors` weights that can be told apart")]
    NoWeights { repo: String, commit: String },

    #[error("`{file}` of `{repo}` has ETag `{found}`, which is neither a SHA-256 nor a git digest")]
    BadEtag { repo: String, file: String, found: String },

    #[error("`{file}` of `{repo}` has digest {found}, but the hub says {needed}; the file was removed")]
    WrongDigest { repo: String, file: String, found: String, needed: String },

    #[error("`{repo}` at `{commit}` is not complete in the cache, and requests are off: no {missing}")]
    NotCached { repo: String, commit: String, missing: String },

    #[error("`{what}` could not be fetched in {tries} tries: {source}")]
    Network { what: String, tries: u32, source: Box<ApiError> },

    #[error("`{what}` could not be fetched: no byte came for {seconds} s")]
    Silent { what: String, seconds: u64 },

    #[error("`{what}`: `{endpoint}` does not answer as a hub does: {found}")]
    Protocol { what: String, endpoint: String, found: String },

    #[error("`{lock}` is locked: another process is fetching this file")]
    Busy { lock: PathBuf },

    #[error("`{path}` in the hub cache could not be used: {source}")]
    Disk { path: PathBuf, source: io::Error },
}

fn token_state(token: &bool) -> &'static str {
    if *token { "the token in use does not give access" } else { "no token is set" }
}

impl Failure for HubError {
    fn exit(&self) -> Exit {
        use HubError::*;
        match self {
            BadRepo { .. } | Unpinned { .. } => Exit::Request,
            NotFound { .. } | Denied { .. } | OtherCommit { .. } | NoWeights { .. } => Exit::Input,
            BadEtag { .. } | WrongDigest { .. } | NotCached { .. } | Protocol { .. } => Exit::Input,
            NoCacheFolder | Network { .. } | Silent { .. } | Busy { .. } | Disk { .. } => Exit::Machine,
        }
    }

    fn help(&self) -> Option<String> {
        use HubError::*;
        Some(match self {
            BadRepo { .. } => "write it as in the page's address, such as `Qwen/Qwen2.5-0.5B`".into(),
            Unpinned { repo, .. } => format!(
                "a branch or tag can move, so a source pins the commit: \
                 open the history of `{repo}` on the hub and copy the full commit hash"
            ),
            NoCacheFolder => "set `HF_HOME` to a folder with enough room".into(),
            NotFound { .. } => {
                "check the spelling of the repository and that the commit is one of its history".into()
            }
            Denied { token: false, .. } => "the repository is private, gated or misspelt: accept its terms \
                 on its page, create a token with read access, and set `HF_TOKEN`"
                .into(),
            Denied { token: true, .. } => "accept the repository's terms on its page with the account of \
                 this token, or set `HF_TOKEN` to another token with read access"
                .into(),
            OtherCommit { .. } => {
                "check `HF_ENDPOINT`: a mirror must serve the commit that is asked for".into()
            }
            NoWeights { .. } => "choose a repository with safetensors weights".into(),
            BadEtag { .. } => "check `HF_ENDPOINT`: a mirror must pass on the hub's ETags".into(),
            WrongDigest { .. } => "run again to fetch it anew; if it happens again, \
                 suspect the mirror, the network or the disk"
                .into(),
            NotCached { .. } => "unset `HF_HUB_OFFLINE` and run again to fetch what is missing".into(),
            Network { .. } | Silent { .. } => {
                "check the network, then run again: what has arrived is kept and continued".into()
            }
            Protocol { .. } => "check `HF_ENDPOINT`".into(),
            Busy { .. } => "wait for the other process, or end it".into(),
            Disk { .. } => "check room and permissions, or set `HF_HOME` to another folder".into(),
        })
    }
}

/// Makes sure that every file a source needs is in the cache, whole, at commit `revision` of `repo`.
///
/// Needed: configs, tokenizer, chat template, license, card, and the safetensors weights: those the index
/// names if there is one. Downloads one file after the other.
///
/// # Errors
/// See [`HubError`]. What has arrived stays in the cache and is continued by the next call; a file with a
/// wrong digest is removed.
pub fn snapshot(
    config: &HubConfig,
    repo: &str,
    revision: &str,
    progress: &mut dyn FnMut(Transfer<'_>),
) -> Result<Snapshot, HubError> {
    let hub = Hub::new(config, repo, revision)?;
    if let Some(record) = hub.complete_record() {
        return Ok(hub.snapshot_of(record.into_keys().collect()));
    }
    if config.offline {
        let files = hub.cached_files()?;
        hub.check_cached(&files, progress)?;
        return Ok(hub.snapshot_of(files));
    }
    let record = hub.fetch(progress)?;
    hub.write_record(&record)?;
    Ok(hub.snapshot_of(record.into_keys().collect()))
}

/// What a plan reads of a revision, without its weights: the small files whole, and of each weight file the
/// header, in a sparse file of the real length. A revision that is in the cache is used as it is.
///
/// # Errors
/// As [`snapshot`].
pub fn outline(
    config: &HubConfig,
    repo: &str,
    revision: &str,
    progress: &mut dyn FnMut(Transfer<'_>),
) -> Result<Snapshot, HubError> {
    let hub = Hub::new(config, repo, revision)?;
    if config.offline || hub.complete_record().is_some() {
        return snapshot(config, repo, revision, progress);
    }
    hub.outline(progress)
}

/// A file's length and the digest its ETag promises.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Promise {
    bytes: u64,
    digest: String,
}

type Record = BTreeMap<String, Promise>;

/// One repository at one commit, and its place in the cache.
struct Hub<'a> {
    config: &'a HubConfig,
    repo: &'a str,
    commit: &'a str,
    root: PathBuf,
    dir: PathBuf,
    api: Api,
    handle: Repo,
}

impl<'a> Hub<'a> {
    fn new(config: &'a HubConfig, repo: &'a str, commit: &'a str) -> Result<Self, HubError> {
        let part = |part: &str| {
            !part.is_empty()
                && !part.starts_with('.')
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        };
        if repo.split('/').count() > 2 || !repo.split('/').all(part) {
            return Err(HubError::BadRepo { repo: repo.to_owned() });
        }
        if commit.len() != 40 || !is_lower_hex(commit) {
            return Err(HubError::Unpinned { repo: repo.to_owned(), revision: commit.to_owned() });
        }
        let disk = |source| HubError::Disk { path: config.cache.clone(), source };
        let cache = Cache::new(std::path::absolute(&config.cache).map_err(disk)?);
        let handle = Repo::with_revision(repo.to_owned(), RepoType::Model, commit.to_owned());
        let root = cache.path().join(handle.folder_name());
        let dir = cache.repo(handle.clone()).pointer_path(commit);
        let api = ApiBuilder::from_cache(cache)
            .with_endpoint(config.endpoint.clone())
            .with_token(config.token.clone())
            .with_progress(false)
            .with_user_agent("tqc", env!("CARGO_PKG_VERSION"))
            .build()
            .map_err(|error| HubError::Network {
                what: repo.to_owned(),
                tries: 1,
                source: Box::new(error),
            })?;
        Ok(Self { config, repo, commit, root, dir, api, handle })
    }

    fn snapshot_of(&self, files: Vec<String>) -> Snapshot {
        Snapshot { dir: self.dir.clone(), root: self.root.clone(), files, commit: self.commit.to_owned() }
    }

    fn record_path(&self) -> PathBuf {
        self.root.join("tqc").join(format!("{}.json", self.commit))
    }

    /// The record, if each of its files is there with the recorded length.
    fn complete_record(&self) -> Option<Record> {
        // A record that cannot be read is as good as none: the files are checked again.
        let record: Record = serde_json::from_slice(&fs::read(self.record_path()).ok()?).ok()?;
        let whole = |(file, promise): (&String, &Promise)| {
            fs::metadata(self.dir.join(file)).is_ok_and(|meta| meta.is_file() && meta.len() == promise.bytes)
        };
        (!record.is_empty() && record.keys().all(|file| is_needed(file)) && record.iter().all(whole))
            .then_some(record)
    }

    fn write_record(&self, record: &Record) -> Result<(), HubError> {
        let path = self.record_path();
        let beside = path.with_extension(format!("{}.part", std::process::id()));
        let write = || {
            fs::create_dir_all(path.parent().expect("the record lies in a folder"))?;
            fs::write(&beside, canonical_json(record))?;
            fs::rename(&beside, &path)
        };
        write().map_err(|source| HubError::Disk { path: path.clone(), source })
    }

    /// The needed files of a snapshot that other tools made, if it holds a config and all weights.
    fn cached_files(&self) -> Result<Vec<String>, HubError> {
        let missing = |missing: String| HubError::NotCached {
            repo: self.repo.to_owned(),
            commit: self.commit.to_owned(),
            missing,
        };
        let Ok(entries) = fs::read_dir(&self.dir) else { return Err(missing("snapshot at all".to_owned())) };
        // `exists` follows the link, so that a link to a lost blob does not count.
        let present: Vec<String> = entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| self.dir.join(name).exists())
            .collect();
        let mut files = self.chosen(&present)?.ok_or_else(|| missing("safetensors weights".to_owned()))?;
        files.extend(present.iter().filter(|name| is_needed(name)).cloned());
        files.sort();
        files.dedup();
        if let Some(absent) = files.iter().find(|name| !present.contains(name)) {
            return Err(missing(format!("`{absent}`")));
        }
        if !present.iter().any(|name| name == "config.json") {
            return Err(missing("`config.json`".to_owned()));
        }
        Ok(files)
    }

    fn check_cached(&self, files: &[String], progress: &mut dyn FnMut(Transfer<'_>)) -> Result<(), HubError> {
        let mut promises = Record::new();
        for file in files {
            let path = self.dir.join(file);
            let disk = |source| HubError::Disk { path: path.clone(), source };
            let bytes = fs::metadata(&path).map_err(disk)?.len();
            // A plain file in the snapshot carries no promise; a link names its blob, which is one.
            if let Ok(blob) = fs::read_link(&path)
                && let Some(digest) = blob.file_name().and_then(|name| name.to_str())
                && is_digest(digest)
            {
                promises.insert(file.clone(), Promise { bytes, digest: digest.to_owned() });
            }
        }
        let mut meter = Meter::new(&promises, progress);
        promises.iter().try_for_each(|(file, promise)| self.check(file, promise, &mut meter))
    }

    /// The weights among `names`: those that the index names, else by name; `None` if there are none.
    ///
    /// The index itself must be in the cache already if it is among the names.
    fn chosen(&self, names: &[String]) -> Result<Option<Vec<String>>, HubError> {
        let weights: Vec<&String> = names.iter().filter(|name| is_weights(name)).collect();
        if names.iter().any(|name| name == INDEX) {
            #[derive(Deserialize)]
            struct Index {
                weight_map: BTreeMap<String, String>,
            }
            let path = self.dir.join(INDEX);
            let bytes = fs::read(&path).map_err(|source| HubError::Disk { path, source })?;
            // A damaged index is the checkpoint reader's to explain; here it only selects nothing.
            let index: Option<Index> = serde_json::from_slice(&bytes).ok();
            let mut files: Vec<String> =
                index.into_iter().flat_map(|index| index.weight_map.into_values()).collect();
            files.retain(|file| is_weights(file));
            files.sort();
            files.dedup();
            return Ok(Some(files).filter(|files| !files.is_empty()));
        }
        let single = weights.iter().find(|name| name.as_str() == "model.safetensors");
        let series = weights.iter().filter(|name| name.starts_with("model-") && name.contains("-of-"));
        let chosen: Vec<String> = match (single, weights.as_slice()) {
            (Some(single), _) => vec![(**single).clone()],
            (None, [only]) => vec![(*only).clone()],
            (None, _) => series.map(|name| (**name).clone()).collect(),
        };
        Ok(Some(chosen).filter(|files| !files.is_empty()))
    }

    /// Lists the revision and says which of its files are needed: the index with its promise, for it is
    /// fetched to know the weights; the other small files; the weights.
    fn needed(&self) -> Result<(Record, Vec<String>, Vec<String>), HubError> {
        let info = self.request(self.repo, |repo, _| repo.info())?;
        self.same_commit(&info.sha)?;
        let names: Vec<String> = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        let mut index = Record::new();
        if names.iter().any(|name| name == INDEX) {
            index.insert(INDEX.to_owned(), self.promise(INDEX)?);
            self.fetch_all(&index, &mut |_| {})?;
        }
        let no_weights =
            || HubError::NoWeights { repo: self.repo.to_owned(), commit: self.commit.to_owned() };
        let weights = self.chosen(&names)?.ok_or_else(no_weights)?;
        let side = names.into_iter().filter(|name| is_needed(name) && !is_weights(name) && name != INDEX);
        Ok((index, side.collect(), weights))
    }

    /// Downloads and checks each needed file.
    fn fetch(&self, progress: &mut dyn FnMut(Transfer<'_>)) -> Result<Record, HubError> {
        let (mut record, side, weights) = self.needed()?;
        for file in side.into_iter().chain(weights) {
            let promise = self.promise(&file)?;
            record.insert(file, promise);
        }
        self.fetch_all(&record, progress)?;
        Ok(record)
    }

    fn outline(&self, progress: &mut dyn FnMut(Transfer<'_>)) -> Result<Snapshot, HubError> {
        let (mut record, side, weights) = self.needed()?;
        for file in side {
            let promise = self.promise(&file)?;
            record.insert(file, promise);
        }
        self.fetch_all(&record, progress)?;
        let dir = self.root.join("tqc").join(format!("{}-headers", self.commit));
        let disk = |source| HubError::Disk { path: dir.clone(), source };
        fs::create_dir_all(&dir).map_err(disk)?;
        for file in record.keys() {
            fs::copy(self.dir.join(file), dir.join(file)).map_err(disk)?;
        }
        for file in &weights {
            let len = self.promise(file)?.bytes;
            let path = dir.join(file);
            if fs::metadata(&path).is_ok_and(|meta| meta.len() == len) {
                continue;
            }
            // A damaged length or header is the checkpoint reader's to explain.
            let mut bytes = self.start_of(file, 0..len.min(8))?;
            let header = bytes.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
            if header <= HEADER_LIMIT && header <= len.saturating_sub(8) {
                bytes.extend(self.start_of(file, 8..8 + header)?);
            }
            let beside = dir.join(format!("{file}.new"));
            let write = || -> io::Result<()> {
                fs::write(&beside, &bytes)?;
                fs::OpenOptions::new().write(true).open(&beside)?.set_len(len)?;
                fs::rename(&beside, &path)
            };
            write().map_err(disk)?;
        }
        let files = record.into_keys().chain(weights).collect();
        Ok(Snapshot { dir, root: self.root.clone(), files, commit: self.commit.to_owned() })
    }

    /// Some bytes of a file, straight from the hub.
    fn start_of(&self, file: &str, range: std::ops::Range<u64>) -> Result<Vec<u8>, HubError> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let (name, token) = (file.to_owned(), self.config.token.clone());
        let needed = range.end - range.start;
        let bytes = self.request(file, move |repo, _| {
            let mut request = ureq::get(repo.url(&name))
                .header("Range", format!("bytes={}-{}", range.start, range.end - 1))
                .header("User-Agent", concat!("tqc/", env!("CARGO_PKG_VERSION")));
            if let Some(token) = &token {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            let response = request.call().map_err(Box::new)?;
            // A server that does not know ranges sends the file from its start.
            let skip = if response.status() == 206 { 0 } else { range.start };
            let mut body = response.into_body().into_reader();
            io::copy(&mut (&mut body).take(skip), &mut io::sink())?;
            let mut bytes = Vec::new();
            body.take(needed).read_to_end(&mut bytes)?;
            Ok(bytes)
        })?;
        if bytes.len() as u64 != needed {
            return Err(self
                .protocol(self.named(file), format!("{} bytes where {needed} were asked for", bytes.len())));
        }
        Ok(bytes)
    }

    fn same_commit(&self, found: &str) -> Result<(), HubError> {
        if found == self.commit {
            return Ok(());
        }
        Err(HubError::OtherCommit {
            repo: self.repo.to_owned(),
            needed: self.commit.to_owned(),
            found: found.to_owned(),
        })
    }

    /// What the hub says about a file. Its ETag becomes a file name in the cache, so it is checked here.
    fn promise(&self, file: &str) -> Result<Promise, HubError> {
        let api = self.api.clone();
        let name = file.to_owned();
        let meta: Metadata = self.request(file, move |repo, _| api.metadata(&repo.url(&name)))?;
        self.same_commit(meta.commit_hash())?;
        if !is_digest(meta.etag()) {
            return Err(HubError::BadEtag {
                repo: self.repo.to_owned(),
                file: file.to_owned(),
                found: meta.etag().to_owned(),
            });
        }
        Ok(Promise { bytes: meta.size() as u64, digest: meta.etag().to_owned() })
    }

    fn fetch_all(&self, record: &Record, progress: &mut dyn FnMut(Transfer<'_>)) -> Result<(), HubError> {
        let mut meter = Meter::new(record, progress);
        for (file, promise) in record {
            if !self.adopt(file, promise)? {
                self.download(file, &mut meter)?;
            }
            self.check(file, promise, &mut meter)?;
        }
        Ok(())
    }

    /// Uses a blob that is there already, from another revision or a finished but unnamed download.
    fn adopt(&self, file: &str, promise: &Promise) -> Result<bool, HubError> {
        let blob = self.root.join("blobs").join(&promise.digest);
        let (part, pointer) = (blob.with_extension("part"), self.dir.join(file));
        let length = |path: &Path| fs::metadata(path).ok().map(|meta| meta.len());
        let adopt = || -> io::Result<bool> {
            if length(&pointer) == Some(promise.bytes) {
                return Ok(true);
            }
            // Whatever else bears the name (a link to a lost blob, a shorter file) is in the way.
            if fs::symlink_metadata(&pointer).is_ok() {
                fs::remove_file(&pointer)?;
            }
            match length(&part) {
                // `hf-hub` would ask for the bytes after the last, and be refused.
                Some(found) if found == promise.bytes => fs::rename(&part, &blob)?,
                Some(found) if found > promise.bytes => fs::remove_file(&part)?,
                _ => {}
            }
            if length(&blob) != Some(promise.bytes) {
                return Ok(false);
            }
            fs::create_dir_all(&self.dir)?;
            std::os::unix::fs::symlink(Path::new("../../blobs").join(&promise.digest), &pointer)?;
            Ok(true)
        };
        adopt().map_err(|source| HubError::Disk { path: pointer.clone(), source })
    }

    fn download(&self, file: &str, meter: &mut Meter<'_>) -> Result<(), HubError> {
        meter.begin(file, Step::Download);
        let name = file.to_owned();
        self.request_metered(
            file,
            move |repo, bytes| repo.download_with_progress(&name, Sender(bytes)).map(drop),
            &mut |event| match event {
                Event::Restart => meter.restart(),
                Event::Bytes(n) => meter.add(n),
            },
        )
    }

    /// Compares the file's digest with the promise; a file that breaks it is removed.
    fn check(&self, file: &str, promise: &Promise, meter: &mut Meter<'_>) -> Result<(), HubError> {
        meter.begin(file, Step::Check);
        let path = self.dir.join(file);
        let disk = |source| HubError::Disk { path: path.clone(), source };
        let found = file_digest(&path, promise.digest.len() == 64, &mut |n| meter.add(n)).map_err(disk)?;
        if found != promise.digest {
            let blob = fs::canonicalize(&path).map_err(disk)?;
            fs::remove_file(&path).map_err(disk)?;
            if blob.exists() && blob.starts_with(fs::canonicalize(&self.root).map_err(disk)?) {
                fs::remove_file(&blob).map_err(disk)?;
            }
            return Err(HubError::WrongDigest {
                repo: self.repo.to_owned(),
                file: file.to_owned(),
                found,
                needed: promise.digest.clone(),
            });
        }
        meter.finish(promise.bytes);
        Ok(())
    }

    fn request<T: Send + 'static>(
        &self,
        what: &str,
        work: impl Fn(&hf_hub::api::sync::ApiRepo, mpsc::Sender<Message<T>>) -> Result<T, ApiError>
        + Clone
        + Send
        + 'static,
    ) -> Result<T, HubError> {
        self.request_metered(what, work, &mut |_| {})
    }

    /// Runs `work`, again after a failure that may pass. Every retry that brought new bytes starts the
    /// count anew.
    ///
    /// `hf-hub` sets no time limits, so the work runs on a thread of its own, which is left behind if it
    /// falls silent. Its own retries are not used: after a failure before the first byte they would append
    /// the whole file to the part that is there.
    fn request_metered<T: Send + 'static>(
        &self,
        what: &str,
        work: impl Fn(&hf_hub::api::sync::ApiRepo, mpsc::Sender<Message<T>>) -> Result<T, ApiError>
        + Clone
        + Send
        + 'static,
        event: &mut dyn FnMut(Event),
    ) -> Result<T, HubError> {
        let mut tries = 0;
        loop {
            tries += 1;
            let (sender, receiver) = mpsc::channel();
            let (api, handle, work) = (self.api.clone(), self.handle.clone(), work.clone());
            std::thread::spawn(move || {
                let result = work(&api.repo(handle), sender.clone());
                // The receiver is gone if it gave up on us.
                let _ = sender.send(Message::Done(result));
            });
            let mut restarted = false;
            let error = loop {
                match receiver.recv_timeout(self.config.silence) {
                    Ok(Message::Event(Event::Restart)) => {
                        restarted = true;
                        event(Event::Restart);
                    }
                    Ok(Message::Event(Event::Bytes(n))) => {
                        // The first count after a restart is what the part already held.
                        if !std::mem::take(&mut restarted) && n > 0 {
                            tries = 1;
                        }
                        event(Event::Bytes(n));
                    }
                    Ok(Message::Done(Ok(value))) => return Ok(value),
                    Ok(Message::Done(Err(error))) => break error,
                    Err(mpsc::RecvTimeoutError::Timeout) => {
                        let seconds = self.config.silence.as_secs();
                        return Err(HubError::Silent { what: self.named(what), seconds });
                    }
                    Err(mpsc::RecvTimeoutError::Disconnected) => {
                        let found = "an answer that its client library cannot read".to_owned();
                        return Err(self.protocol(self.named(what), found));
                    }
                }
            };
            if !may_pass(&error) || tries > self.config.retries {
                return Err(self.explain(what, tries, error));
            }
            std::thread::sleep(self.config.backoff * (1 << (tries - 1).min(4)));
        }
    }

    /// The repository itself, or a file of it, as messages name it.
    fn named(&self, what: &str) -> String {
        if what == self.repo {
            format!("{} at {}", self.repo, self.commit)
        } else {
            format!("{}/{what}", self.repo)
        }
    }

    fn protocol(&self, what: String, found: String) -> HubError {
        HubError::Protocol { what, endpoint: self.config.endpoint.clone(), found }
    }

    fn explain(&self, what: &str, tries: u32, error: ApiError) -> HubError {
        let endpoint = self.config.endpoint.clone();
        let what = self.named(what);
        if let ApiError::RequestError(request) = &error {
            match **request {
                ureq::Error::StatusCode(404) => return HubError::NotFound { what, endpoint },
                ureq::Error::StatusCode(status @ (401 | 403)) => {
                    return HubError::Denied { what, endpoint, status, token: self.config.token.is_some() };
                }
                ureq::Error::Json(ref json) if !was_cut(json) => {
                    return self.protocol(what, format!("JSON that is no model description ({json})"));
                }
                _ => {}
            }
        }
        match error {
            ApiError::LockAcquisition(lock) => HubError::Busy { lock },
            ApiError::IoError(source) if is_local(&source) => {
                HubError::Disk { path: self.root.clone(), source }
            }
            error @ (ApiError::RequestError(_) | ApiError::IoError(_) | ApiError::TooManyRetries(_)) => {
                HubError::Network { what, tries, source: Box::new(error) }
            }
            other => self.protocol(what, other.to_string()),
        }
    }
}

/// From the thread that talks to the hub.
enum Message<T> {
    Event(Event),
    Done(Result<T, ApiError>),
}

enum Event {
    /// A file starts, or starts again; the bytes that are there already are counted next.
    Restart,
    Bytes(u64),
}

struct Sender<T>(mpsc::Sender<Message<T>>);

impl<T> hf_hub::api::Progress for Sender<T> {
    fn init(&mut self, _size: usize, _file: &str) {
        // Nobody listens after a silence; the thread then ends with its request.
        let _ = self.0.send(Message::Event(Event::Restart));
    }

    fn update(&mut self, bytes: usize) {
        let _ = self.0.send(Message::Event(Event::Bytes(bytes as u64)));
    }

    fn finish(&mut self) {}
}

/// Whether trying again may help.
fn may_pass(error: &ApiError) -> bool {
    match error {
        ApiError::RequestError(error) => match **error {
            ureq::Error::StatusCode(status) => matches!(status, 408 | 425 | 429 | 500..=599),
            ureq::Error::Json(ref json) => was_cut(json),
            ureq::Error::HostNotFound | ureq::Error::BadUri(_) | ureq::Error::Tls(_) => false,
            ref other => !matches!(other, ureq::Error::Io(error) if is_local(error)),
        },
        ApiError::IoError(error) => !is_local(error),
        _ => false,
    }
}

/// Whether JSON could not be read because it did not arrive whole.
fn was_cut(json: &serde_json::Error) -> bool {
    json.is_io() || json.is_eof()
}

/// Whether an I/O error is the disk's rather than the network's.
fn is_local(error: &io::Error) -> bool {
    use io::ErrorKind::*;
    matches!(
        error.kind(),
        NotFound
            | PermissionDenied
            | AlreadyExists
            | StorageFull
            | QuotaExceeded
            | FileTooLarge
            | ReadOnlyFilesystem
            | NotADirectory
            | IsADirectory
    )
}

/// SHA-256 of the content, or git's blob name: SHA-1("blob LENGTH\0" + content).
fn file_digest(path: &Path, sha256: bool, read: &mut dyn FnMut(u64)) -> io::Result<String> {
    let mut file = fs::File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    let (mut long, mut git) = (Hasher::default(), sha1::Sha1::new());
    if !sha256 {
        git.update(format!("blob {}\0", file.metadata()?.len()));
    }
    loop {
        let n = match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if sha256 {
            long.update(&buffer[..n]);
        } else {
            git.update(&buffer[..n]);
        }
        read(n as u64);
    }
    Ok(if sha256 {
        long.finish().to_string()
    } else {
        git.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    })
}

/// Counts bytes over all files and tells the caller.
struct Meter<'a> {
    progress: &'a mut dyn FnMut(Transfer<'_>),
    total: u64,
    before: u64,
    current: u64,
    /// Bytes of this step that were there when it began.
    skipped: u64,
    fresh: bool,
    file: String,
    step: Step,
    began: Instant,
    told: Option<Instant>,
}

impl<'a> Meter<'a> {
    fn new(record: &Record, progress: &'a mut dyn FnMut(Transfer<'_>)) -> Self {
        Self {
            progress,
            total: record.values().map(|promise| promise.bytes).sum(),
            before: 0,
            current: 0,
            skipped: 0,
            fresh: false,
            file: String::new(),
            step: Step::Download,
            began: Instant::now(),
            told: None,
        }
    }

    fn begin(&mut self, file: &str, step: Step) {
        self.file.clear();
        self.file.push_str(file);
        self.step = step;
        (self.current, self.skipped, self.fresh) = (0, 0, false);
        self.began = Instant::now();
        self.tell();
    }

    /// The count starts anew; what is there already comes with the next [`Meter::add`].
    fn restart(&mut self) {
        (self.current, self.skipped, self.fresh) = (0, 0, true);
        self.began = Instant::now();
    }

    fn add(&mut self, bytes: u64) {
        self.current += bytes;
        if std::mem::take(&mut self.fresh) {
            self.skipped = bytes;
        }
        if self.told.is_none_or(|told| told.elapsed() >= Duration::from_millis(100)) {
            self.tell();
        }
    }

    fn finish(&mut self, bytes: u64) {
        self.current = bytes;
        self.tell();
        self.before += bytes;
    }

    fn tell(&mut self) {
        let seconds = self.began.elapsed().as_secs_f64();
        let moved = self.current.saturating_sub(self.skipped) as f64;
        self.told = Some(Instant::now());
        (self.progress)(Transfer {
            step: self.step,
            file: &self.file,
            done: Bytes(self.before + self.current),
            total: Bytes(self.total),
            bytes_per_second: if seconds > 0.0 { moved / seconds } else { 0.0 },
        });
    }
}

fn is_lower_hex(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

fn is_digest(text: &str) -> bool {
    (text.len() == 64 || text.len() == 40) && is_lower_hex(text)
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

fn is_weights(name: &str) -> bool {
    is_plain(name) && name.ends_with(".safetensors")
}

/// Whether a source is read from, or an artifact carries, a file of this name.
fn is_needed(name: &str) -> bool {
    let begins = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    let ends = |suffixes: &[&str]| suffixes.iter().any(|suffix| name.ends_with(suffix));
    is_plain(name)
        && (is_weights(name)
            || name == INDEX
            || (begins(&["config", "generation_config", "tokenizer"]) && ends(&[".json", ".model", ".txt"]))
            || ends(&[".jinja", "processor_config.json"])
            || matches!(
                name,
                "vocab.json"
                    | "vocab.txt"
                    | "merges.txt"
                    | "special_tokens_map.json"
                    | "added_tokens.json"
                    | "chat_template.json"
                    | "README.md"
            )
            || begins(&["LICENSE"]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_configs_tokenizer_template_weights_and_license_only() {
        for needed in [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer.model",
            "tokenizer_config.json",
            "chat_template.jinja",
            "vocab.json",
            "merges.txt",
            "preprocessor_config.json",
            "video_preprocessor_config.json",
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            INDEX,
            "LICENSE",
            "README.md",
        ] {
            assert!(is_needed(needed), "{needed}");
        }
        for other in [
            "pytorch_model.bin",
            "model.gguf",
            "onnx/model.safetensors",
            ".gitattributes",
            "../config.json",
            "flax_model.msgpack",
        ] {
            assert!(!is_needed(other), "{other}");
        }
    }

    #[test]
    fn variables_are_read_as_the_hugging_face_tools_read_them() {
        let read = |vars: &[(&str, &str)]| {
            HubConfig::from_vars(|name| {
                vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            })
        };
        let config = read(&[("HOME", "/home/u")]).unwrap();
        assert_eq!(config.endpoint, "https://huggingface.co");
        assert_eq!(config.cache, Path::new("/home/u/.cache/huggingface/hub"));
        assert_eq!((config.token.clone(), config.offline), (None, false));

        let config = read(&[("HOME", "/home/u"), ("XDG_CACHE_HOME", "/x"), ("HF_TOKEN", " t\n")]).unwrap();
        assert_eq!(
            (config.cache.as_path(), config.token.as_deref()),
            (Path::new("/x/huggingface/hub"), Some("t"))
        );

        let config = read(&[
            ("HF_HOME", "/h"),
            ("HF_HUB_CACHE", "/c"),
            ("HF_ENDPOINT", "http://mirror/"),
            ("HF_HUB_OFFLINE", "True"),
        ])
        .unwrap();
        assert_eq!((config.cache.as_path(), config.endpoint.as_str()), (Path::new("/c"), "http://mirror"));
        assert!(config.offline);
        assert_eq!(read(&[("HF_HOME", "/h"), ("HF_TOKEN", "")]).unwrap().cache, Path::new("/h/hub"));
        assert!(matches!(read(&[]), Err(HubError::NoCacheFolder)));
    }

    #[test]
    fn a_token_is_never_printed() {
        let config = HubConfig::from_vars(|name| Some(format!("secret-{name}"))).unwrap();
        assert!(!format!("{config:?}").contains("secret-HF_TOKEN"));
    }

    #[test]
    fn digests_are_those_of_sha256sum_and_git_hash_object() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "hello\n").unwrap();
        // `printf 'hello\n' | git hash-object --stdin`, and `| sha256sum`.
        assert_eq!(
            file_digest(file.path(), false, &mut |_| {}).unwrap(),
            "ce013625030ba8dba906f756967f9e9ca394464a"
        );
        assert_eq!(
            file_digest(file.path(), true, &mut |_| {}).unwrap(),
            "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
        );
    }
}
