//! A pinned revision arrives whole and right, or not at all. The hub is a server on the loopback
//! interface; no test leaves the machine or reads the environment.

#[path = "../common/mod.rs"]
mod common;
mod program;
mod server;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use server::{COMMIT, Manners, REPO, Server, etag};
use tempfile::TempDir;
use tqc::checkpoint::{Checkpoint, INDEX, Links};
use tqc::failure::{Exit, Failure};
use tqc::hub::{HubConfig, HubError, Snapshot, Step, Transfer, snapshot};

const WEIGHTS: &str = "model.safetensors";

/// A correct shard with one U8 tensor.
fn shard(tensor: &str, len: usize) -> Vec<u8> {
    let header = format!(r#"{{"{tensor}":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend((0..len).map(|i| (i * 7 % 251) as u8));
    bytes
}

fn repository() -> BTreeMap<String, Vec<u8>> {
    BTreeMap::from([
        ("README.md".to_owned(), b"# A model\n".to_vec()),
        ("config.json".to_owned(), b"{\"model_type\":\"llama\"}\n".to_vec()),
        ("tokenizer.json".to_owned(), b"{}\n".to_vec()),
        (WEIGHTS.to_owned(), shard("a", 300_000)),
        ("pytorch_model.bin".to_owned(), b"not wanted".to_vec()),
        ("onnx/model.safetensors".to_owned(), b"not wanted either".to_vec()),
    ])
}

/// A cache folder and a server.
struct Rig {
    server: Server,
    cache: TempDir,
}

impl Rig {
    fn new(files: BTreeMap<String, Vec<u8>>, manners: Manners) -> Self {
        Self { server: Server::start(files, manners), cache: tempfile::tempdir().unwrap() }
    }

    fn config(&self) -> HubConfig {
        config(self.server.endpoint(), self.cache.path())
    }

    fn fetch(&self) -> Result<Snapshot, HubError> {
        snapshot(&self.config(), REPO, COMMIT, &mut |_| {})
    }

    fn repo_dir(&self) -> PathBuf {
        self.cache.path().join("models--org--tiny-model")
    }

    /// Ranges of the requests for the content of `file`; probes for its length excluded.
    fn content_ranges(&self, file: &str) -> Vec<String> {
        let requests = self.server.requests().into_iter().filter(|r| r.path == format!("/cdn/{file}"));
        requests.filter_map(|r| r.range).filter(|range| range != "bytes=0-0").collect()
    }
}

fn config(endpoint: String, cache: &Path) -> HubConfig {
    HubConfig {
        endpoint,
        cache: cache.to_path_buf(),
        token: None,
        offline: false,
        retries: 3,
        backoff: Duration::from_millis(1),
        silence: Duration::from_secs(10),
    }
}

#[track_caller]
fn refused(result: Result<Snapshot, HubError>, exit: Exit, message: &str) -> String {
    let error = result.expect_err("this must be refused");
    assert_eq!(error.to_string(), message);
    assert_eq!(error.exit(), exit);
    error.help().expect("every refusal has a remedy")
}

#[test]
fn downloads_the_needed_files_of_a_pinned_revision() {
    let rig = Rig::new(repository(), Manners::default());
    let snapshot = rig.fetch().unwrap();
    assert_eq!(snapshot.files, ["README.md", "config.json", WEIGHTS, "tokenizer.json"]);
    assert_eq!(snapshot.commit, COMMIT);
    assert_eq!(snapshot.dir, rig.repo_dir().join("snapshots").join(COMMIT));
    for file in &snapshot.files {
        assert_eq!(fs::read(snapshot.dir.join(file)).unwrap(), repository()[file], "{file}");
    }
    assert!(!rig.server.requests().iter().any(|r| r.path.contains("onnx") || r.path.contains(".bin")));

    let links = Links::of_folder(&snapshot.dir);
    assert_eq!(links, Links::Within(fs::canonicalize(&snapshot.root).unwrap()));
    let checkpoint = Checkpoint::open_with(&snapshot.dir, &links).unwrap();
    assert_eq!(checkpoint.tensors()[0].name, "a");
}

#[test]
fn downloads_the_shards_that_the_index_names_and_no_others() {
    let (one, two) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let mut files = repository();
    files.insert(one.to_owned(), shard("a", 100));
    files.insert(two.to_owned(), shard("b", 100));
    let index = format!(r#"{{"weight_map":{{"a":"{one}","b":"{two}"}}}}"#);
    files.insert(INDEX.to_owned(), index.into_bytes());
    let rig = Rig::new(files, Manners::default());
    let snapshot = rig.fetch().unwrap();
    assert!(snapshot.files.contains(&one.to_owned()) && snapshot.files.contains(&two.to_owned()));
    assert!(!snapshot.files.contains(&WEIGHTS.to_owned()));
    let checkpoint = Checkpoint::open_with(&snapshot.dir, &Links::of_folder(&snapshot.dir)).unwrap();
    assert_eq!(checkpoint.files().len(), 2);
}

#[test]
fn a_cut_connection_is_resumed_where_the_bytes_stopped() {
    let manners = Manners { cut: BTreeMap::from([(WEIGHTS.to_owned(), 2)]), ..Manners::default() };
    let rig = Rig::new(repository(), manners);
    let snapshot = rig.fetch().unwrap();
    let content = &repository()[WEIGHTS];
    assert_eq!(&fs::read(snapshot.dir.join(WEIGHTS)).unwrap(), content);
    let first = content.len() / 2;
    let second = first + (content.len() - first) / 2;
    assert_eq!(
        rig.content_ranges(WEIGHTS),
        ["bytes=0-".to_owned(), format!("bytes={first}-"), format!("bytes={second}-")]
    );
}

#[test]
fn a_later_run_resumes_what_an_earlier_one_left_even_if_its_first_try_fails() {
    let manners = Manners { cut: BTreeMap::from([(WEIGHTS.to_owned(), 1)]), ..Manners::default() };
    let rig = Rig::new(repository(), manners);
    let config = HubConfig { retries: 0, ..rig.config() };
    let error = snapshot(&config, REPO, COMMIT, &mut |_| {}).unwrap_err();
    assert!(matches!(error, HubError::Network { tries: 1, .. }), "{error}");
    assert_eq!(error.exit(), Exit::Machine);

    // The retry after this must not append the whole file to the half that is there.
    rig.server.manners().busy = 1;
    let snapshot = rig.fetch().unwrap();
    assert_eq!(fs::read(snapshot.dir.join(WEIGHTS)).unwrap(), repository()[WEIGHTS]);
    let half = format!("bytes={}-", repository()[WEIGHTS].len() / 2);
    assert_eq!(rig.content_ranges(WEIGHTS).last(), Some(&half));
}

#[test]
fn a_part_that_is_complete_or_too_long_is_settled_without_asking_past_the_end() {
    for extra in [0, 5] {
        let rig = Rig::new(repository(), Manners::default());
        let content = &repository()[WEIGHTS];
        let blobs = rig.repo_dir().join("blobs");
        fs::create_dir_all(&blobs).unwrap();
        let mut part = content.clone();
        part.resize(content.len() + extra, 0);
        fs::write(blobs.join(etag(WEIGHTS, content)).with_extension("part"), part).unwrap();
        let snapshot = rig.fetch().unwrap();
        assert_eq!(&fs::read(snapshot.dir.join(WEIGHTS)).unwrap(), content);
        assert_eq!(rig.content_ranges(WEIGHTS).len(), usize::from(extra > 0));
    }
}

#[test]
fn a_blob_of_another_revision_is_linked_rather_than_fetched_again() {
    let rig = Rig::new(repository(), Manners::default());
    let content = &repository()[WEIGHTS];
    let blobs = rig.repo_dir().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join(etag(WEIGHTS, content)), content).unwrap();
    let snapshot = rig.fetch().unwrap();
    assert_eq!(&fs::read(snapshot.dir.join(WEIGHTS)).unwrap(), content);
    assert!(rig.content_ranges(WEIGHTS).is_empty());
}

#[test]
fn gives_up_after_a_bounded_number_of_tries() {
    let rig = Rig::new(repository(), Manners { busy: 99, ..Manners::default() });
    let error = rig.fetch().unwrap_err();
    assert!(matches!(error, HubError::Network { tries: 4, .. }), "{error}");
    assert_eq!(99 - rig.server.manners().busy, 4);
}

#[test]
fn a_silent_connection_is_given_up() {
    let rig = Rig::new(repository(), Manners { silent: Some(WEIGHTS.to_owned()), ..Manners::default() });
    let config = HubConfig { silence: Duration::from_secs(1), ..rig.config() };
    refused(
        snapshot(&config, REPO, COMMIT, &mut |_| {}),
        Exit::Machine,
        "`org/tiny-model/model.safetensors` could not be fetched: no byte came for 1 s",
    );
}

#[test]
fn refuses_and_removes_a_file_with_the_wrong_digest() {
    for (file, wrong) in [(WEIGHTS, "ab".repeat(32)), ("config.json", "cd".repeat(20))] {
        let manners =
            Manners { etag: BTreeMap::from([(file.to_owned(), wrong.clone())]), ..Manners::default() };
        let rig = Rig::new(repository(), manners);
        let found = etag(file, &repository()[file]);
        refused(
            rig.fetch(),
            Exit::Input,
            &format!(
                "`{file}` of `{REPO}` has digest {found}, but the hub says {wrong}; the file was removed"
            ),
        );
        assert!(fs::symlink_metadata(rig.repo_dir().join("snapshots").join(COMMIT).join(file)).is_err());
        assert!(!rig.repo_dir().join("blobs").join(&wrong).exists());

        // Once the hub is right again, so is the cache.
        rig.server.manners().etag.clear();
        let snapshot = rig.fetch().unwrap();
        assert_eq!(fs::read(snapshot.dir.join(file)).unwrap(), repository()[file]);
    }
}

#[test]
fn refuses_an_etag_that_is_no_digest() {
    let manners = Manners {
        etag: BTreeMap::from([("config.json".to_owned(), "../../escape".to_owned())]),
        ..Manners::default()
    };
    let rig = Rig::new(repository(), manners);
    refused(
        rig.fetch(),
        Exit::Input,
        "`config.json` of `org/tiny-model` has ETag `../../escape`, which is neither a SHA-256 nor a git digest",
    );
}

#[test]
fn a_complete_revision_needs_no_request_and_no_server() {
    let rig = Rig::new(repository(), Manners::default());
    let first = rig.fetch().unwrap();
    let asked = rig.server.requests().len();
    assert_eq!(rig.fetch().unwrap(), first);
    assert_eq!(rig.server.requests().len(), asked);

    let Rig { server, cache } = rig;
    let endpoint = server.endpoint();
    drop(server);
    for offline in [false, true] {
        let config = HubConfig { offline, ..config(endpoint.clone(), cache.path()) };
        assert_eq!(snapshot(&config, REPO, COMMIT, &mut |_| {}).unwrap(), first);
    }
}

#[test]
fn a_lost_blob_is_fetched_again_and_the_rest_is_not() {
    let rig = Rig::new(repository(), Manners::default());
    rig.fetch().unwrap();
    fs::remove_file(rig.repo_dir().join("blobs").join(etag("config.json", &repository()["config.json"])))
        .unwrap();
    let snapshot = rig.fetch().unwrap();
    assert_eq!(fs::read(snapshot.dir.join("config.json")).unwrap(), repository()["config.json"]);
    assert_eq!(rig.content_ranges(WEIGHTS).len(), 1);
}

#[test]
fn a_cache_that_another_tool_filled_is_used_offline_after_its_digests_are_checked() {
    let rig = Rig::new(repository(), Manners::default());
    let first = rig.fetch().unwrap();
    fs::remove_dir_all(rig.repo_dir().join("tqc")).unwrap();
    let offline = HubConfig { offline: true, ..rig.config() };
    assert_eq!(snapshot(&offline, REPO, COMMIT, &mut |_| {}).unwrap(), first);

    let blob = rig.repo_dir().join("blobs").join(etag(WEIGHTS, &repository()[WEIGHTS]));
    let mut damaged = fs::read(&blob).unwrap();
    *damaged.last_mut().unwrap() ^= 1;
    fs::write(&blob, &damaged).unwrap();
    let error = snapshot(&offline, REPO, COMMIT, &mut |_| {}).unwrap_err();
    assert!(matches!(error, HubError::WrongDigest { .. }), "{error}");
}

#[test]
fn offline_without_the_files_says_what_is_missing() {
    let rig = Rig::new(repository(), Manners::default());
    let offline = HubConfig { offline: true, ..rig.config() };
    let message = |missing| {
        format!("`{REPO}` at `{COMMIT}` is not complete in the cache, and requests are off: no {missing}")
    };
    refused(snapshot(&offline, REPO, COMMIT, &mut |_| {}), Exit::Input, &message("snapshot at all"));
    assert!(rig.server.requests().is_empty());

    rig.fetch().unwrap();
    fs::remove_dir_all(rig.repo_dir().join("tqc")).unwrap();
    fs::remove_file(rig.repo_dir().join("snapshots").join(COMMIT).join(WEIGHTS)).unwrap();
    refused(snapshot(&offline, REPO, COMMIT, &mut |_| {}), Exit::Input, &message("safetensors weights"));
}

#[test]
fn refuses_a_revision_that_is_not_a_commit() {
    let rig = Rig::new(repository(), Manners::default());
    for revision in ["main", "v1.0", "0123456", &COMMIT.to_uppercase()] {
        let help = refused(
            snapshot(&rig.config(), REPO, revision, &mut |_| {}),
            Exit::Request,
            &format!("revision of `{REPO}` must be a commit of 40 hexadecimal digits, got `{revision}`"),
        );
        assert!(help.contains("pins the commit"), "{help}");
    }
    assert!(rig.server.requests().is_empty());
}

#[test]
fn refuses_a_repository_name_that_could_leave_the_cache() {
    let rig = Rig::new(repository(), Manners::default());
    for repo in ["../x", "a/b/c", "/a", "a/", "", "a/..", "a b/c", "a?/b"] {
        refused(
            snapshot(&rig.config(), repo, COMMIT, &mut |_| {}),
            Exit::Request,
            &format!("hub repository must be `ORGANISATION/NAME`, got `{repo}`"),
        );
    }
}

#[test]
fn an_unknown_revision_is_named() {
    let rig = Rig::new(repository(), Manners::default());
    let other = "f".repeat(40);
    refused(
        snapshot(&rig.config(), REPO, &other, &mut |_| {}),
        Exit::Input,
        &format!("`{REPO} at {other}` was not found at `{}`", rig.server.endpoint()),
    );
}

#[test]
fn refuses_another_commit_than_the_one_asked_for() {
    let found = "e".repeat(40);
    let rig = Rig::new(repository(), Manners { commit: Some(found.clone()), ..Manners::default() });
    refused(
        rig.fetch(),
        Exit::Input,
        &format!("`{REPO}` was asked for at commit `{COMMIT}`, but the hub answered with `{found}`"),
    );
}

#[test]
fn a_gated_repository_asks_for_a_token_once() {
    for status in [401, 403] {
        let rig = Rig::new(repository(), Manners { status: Some(status), ..Manners::default() });
        let denied =
            format!("`{REPO} at {COMMIT}` was refused by `{}` with status {status}", rig.server.endpoint());
        let help = refused(rig.fetch(), Exit::Input, &format!("{denied}: no token is set"));
        assert!(help.contains("set `HF_TOKEN`"), "{help}");
        assert_eq!(rig.server.requests().len(), 1);

        let config = HubConfig { token: Some("hf_secret".into()), ..rig.config() };
        let help = refused(
            snapshot(&config, REPO, COMMIT, &mut |_| {}),
            Exit::Input,
            &format!("{denied}: the token in use does not give access"),
        );
        assert!(help.contains("HF_TOKEN") && !help.contains("hf_secret"), "{help}");
        assert_eq!(rig.server.requests()[1].token.as_deref(), Some("Bearer hf_secret"));
    }
}

#[test]
fn a_repository_without_safetensors_is_refused() {
    let mut files = repository();
    files.remove(WEIGHTS);
    let rig = Rig::new(files, Manners::default());
    refused(
        rig.fetch(),
        Exit::Input,
        &format!("`{REPO}` at `{COMMIT}` holds no `*.safetensors` weights that can be told apart"),
    );
}

#[test]
fn a_hub_that_refuses_connections_is_tried_a_bounded_number_of_times() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let cache = tempfile::tempdir().unwrap();
    let error = snapshot(&config(endpoint, cache.path()), REPO, COMMIT, &mut |_| {}).unwrap_err();
    assert!(matches!(error, HubError::Network { tries: 4, .. }), "{error}");
    assert!(error.to_string().contains("refused"), "{error}");
}

#[test]
fn an_endpoint_that_does_not_answer_as_a_hub_is_named() {
    let rig = Rig::new(repository(), Manners { status: Some(200), ..Manners::default() });
    let error = rig.fetch().unwrap_err();
    assert!(
        matches!(&error, HubError::Protocol { endpoint, .. } if *endpoint == rig.server.endpoint()),
        "{error}"
    );
    assert_eq!(error.exit(), Exit::Input);
}

#[test]
fn progress_counts_every_byte_once_per_step_and_ends_at_the_total() {
    let manners = Manners { cut: BTreeMap::from([(WEIGHTS.to_owned(), 1)]), ..Manners::default() };
    let rig = Rig::new(repository(), manners);
    let mut last = (0, 0);
    let mut steps = Vec::new();
    let mut see = |transfer: Transfer<'_>| {
        assert!(transfer.done <= transfer.total, "{transfer:?}");
        assert!(transfer.bytes_per_second >= 0.0);
        last = (transfer.done.0, transfer.total.0);
        if !steps.contains(&(transfer.file.to_owned(), transfer.step)) {
            steps.push((transfer.file.to_owned(), transfer.step));
        }
    };
    let snapshot = snapshot(&rig.config(), REPO, COMMIT, &mut see).unwrap();
    let total: usize = snapshot.files.iter().map(|file| repository()[file].len()).sum();
    assert_eq!(last, (total as u64, total as u64));
    for file in snapshot.files {
        for step in [Step::Download, Step::Check] {
            assert!(steps.contains(&(file.clone(), step)), "{file} {step:?}");
        }
    }
}
