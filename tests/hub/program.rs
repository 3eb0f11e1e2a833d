//! The program itself on a recipe whose source is a Hub repository.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::WEIGHTS;
use crate::common::{self, AFFINE_4_32, Run, default_codec, fixture, temp};
use crate::server::{COMMIT, Manners, REPO, Request, Server, etag};

/// A fixture on a server, and a recipe that names it there.
struct Desk {
    dir: TempDir,
    recipe: PathBuf,
    endpoint: String,
}

impl Desk {
    fn new(server: &Server) -> Self {
        let dir = temp();
        let source = format!("[source]\nhub = \"{REPO}\"\nrevision = \"{COMMIT}\"\n");
        let recipe = common::recipe(dir.path(), &format!("{source}{}", default_codec(AFFINE_4_32)));
        Self { dir, recipe, endpoint: server.endpoint() }
    }

    fn out(&self, name: &str) -> PathBuf {
        self.dir.path().join("new").join(name)
    }

    /// `build --json`, with no settings of the hub but these and `extra`.
    fn command(&self, out: &Path, extra: &[(&str, &str)]) -> Command {
        self.here(common::command(crate::args!["build", self.recipe, "-o", out, "--json"]), extra)
    }

    /// The command with no settings of the hub but these and `extra`.
    fn here(&self, mut command: Command, extra: &[(&str, &str)]) -> Command {
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy().to_ascii_lowercase();
            if text.starts_with("hf_") || text.starts_with("hugging") || text.ends_with("_proxy") {
                command.env_remove(name);
            }
        }
        command.env("HF_ENDPOINT", &self.endpoint).env("HF_HOME", self.dir.path().join("home"));
        command.envs(extra.iter().copied());
        command
    }

    fn build(&self, out: &Path, extra: &[(&str, &str)]) -> Run {
        common::finish(self.command(out, extra))
    }
}

fn files() -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(fixture("llama-tied")).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

#[test]
fn a_plan_fetches_headers_and_small_files_but_no_weights() {
    let server = Server::start(files(), Manners::default());
    let desk = Desk::new(&server);
    let command = common::command(crate::args!["plan", desk.recipe, "--json"]);
    let plan = common::finish(desk.here(command, &[])).expect(0).json();
    let local =
        crate::tqc!("plan", desk.recipe, "--source", fixture("llama-tied"), "--json").expect(0).json();
    assert_eq!(plan["modules"], local["modules"]);
    assert_eq!(plan["sizes"], local["sizes"]);

    let weights = format!("/{WEIGHTS}");
    let asked: Vec<String> = server
        .requests()
        .into_iter()
        .filter(|request| request.path.ends_with(&weights))
        .filter_map(|request| request.range)
        .filter(|range| range != "bytes=0-0")
        .collect();
    let file = files().remove(WEIGHTS).unwrap();
    let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap());
    assert!(!asked.is_empty());
    for range in &asked {
        let last: u64 = range.rsplit('-').next().unwrap().parse().unwrap();
        assert!(last < header, "`{range}` reaches past the header's {header} bytes");
    }
    // A second plan asks for no header again, and a build still fetches everything.
    let again = common::command(crate::args!["plan", desk.recipe, "--json"]);
    common::finish(desk.here(again, &[])).expect(0);
    desk.build(&desk.out("built"), &[]).expect(0);
}

#[test]
fn a_recipe_with_a_hub_source_builds_and_says_where_it_is_from_and_builds_again_offline() {
    let server = Server::start(files(), Manners::default());
    let desk = Desk::new(&server);
    let (online, offline, local) = (desk.out("online"), desk.out("offline"), desk.out("local"));
    let first = desk.build(&online, &[]).expect(0);
    assert_eq!(first.stderr, "");

    let record: serde_json::Value =
        serde_json::from_slice(&fs::read(online.join("provenance.json")).unwrap()).unwrap();
    assert_eq!(record["source"]["hub"], REPO);
    assert_eq!(record["source"]["revision"], COMMIT);
    let card = fs::read_to_string(online.join("README.md")).unwrap();
    let front = card.split("---\n").nth(1).expect("the card has front matter");
    for line in [&format!("base_model: \"{REPO}\""), "base_model_relation: quantized"] {
        assert!(front.lines().any(|found| found == line), "no `{line}` in:\n{front}");
    }
    assert!(card.contains(&format!("`{REPO}` at revision `{COMMIT}`")), "{card}");

    drop(server);
    let again = desk.build(&offline, &[("HF_HUB_OFFLINE", "1")]).expect(0);
    assert_eq!(again.digest(), first.digest());

    // The weights are those of the folder that the server had, and verify finds the record whole.
    let recipe = common::recipe(desk.dir.path(), &default_codec(AFFINE_4_32));
    crate::tqc!("build", recipe, "--source", fixture("llama-tied"), "-o", local).expect(0);
    assert_eq!(fs::read(local.join(WEIGHTS)).unwrap(), fs::read(online.join(WEIGHTS)).unwrap());
    crate::tqc!("verify", online, "--source", fixture("llama-tied"), "--rebuild", "all").expect(0);
}

#[test]
fn a_shard_with_the_wrong_digest_ends_the_build_with_exit_3_and_nothing_written() {
    let wrong = "ab".repeat(32);
    let manners =
        Manners { etag: BTreeMap::from([(WEIGHTS.to_owned(), wrong.clone())]), ..Manners::default() };
    let server = Server::start(files(), manners);
    let desk = Desk::new(&server);
    let run = desk.build(&desk.out("out"), &[]).expect(3);
    assert_eq!(run.stdout, "");
    let found = etag(WEIGHTS, &files()[WEIGHTS]);
    let message = format!(
        "error: `{WEIGHTS}` of `{REPO}` has digest {found}, but the hub says {wrong}; the file was removed\nhelp: "
    );
    assert!(run.stderr.starts_with(&message), "{}", run.stderr);
    assert!(!desk.dir.path().join("new").exists());
    let blobs = desk.dir.path().join("home/hub/models--org--tiny-model/blobs");
    for left in [wrong.clone(), format!("{wrong}.part")] {
        assert!(!blobs.join(&left).exists(), "{left}");
    }

    // Without the cache there is nothing to build from, and the message says so.
    let run = desk.build(&desk.out("out"), &[("HF_HUB_OFFLINE", "1")]).expect(3);
    assert!(run.stderr.contains("is not complete in the cache, and requests are off"), "{}", run.stderr);
    assert!(!desk.dir.path().join("new").exists());
}

#[cfg(unix)]
#[test]
fn an_interrupt_while_the_hub_is_silent_ends_at_once_and_the_next_build_goes_on() {
    let server = Server::start(files(), Manners { silent: Some(WEIGHTS.to_owned()), ..Manners::default() });
    let desk = Desk::new(&server);
    let out = desk.out("out");
    for signal in ["-INT", "-TERM"] {
        let asked = server.requests().len();
        let child = desk.command(&out, &[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let content = |request: &Request| {
            request.path == format!("/cdn/{WEIGHTS}") && request.range.as_deref() != Some("bytes=0-0")
        };
        while !server.requests()[asked..].iter().any(content) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(130), "{signal}: {stderr}");
        assert_eq!(
            stderr,
            "\nerror: interrupted before the work began\nhelp: run the same command again; a download goes on where it stopped\n"
        );
        assert!(!desk.dir.path().join("new").exists());
    }
    server.manners().silent = None;
    desk.build(&out, &[]).expect(0);
}

#[test]
fn a_model_of_the_hub_is_fetched_once_and_generates_what_its_folder_does() {
    let server = Server::start(files(), Manners::default());
    let desk = Desk::new(&server);
    let model = format!("hub:{REPO}@{COMMIT}");
    let generate = |model: &Path| {
        let args = crate::args!["generate", model, "--prompt-ids", "5,6,7", "--max-tokens", "6", "--json"];
        let run = common::finish(desk.here(common::command(args), &[])).expect(0).json();
        run["tokens"].clone()
    };
    let fetched = generate(Path::new(&model));
    assert_eq!(fetched, generate(&fixture("llama-tied")));
    let before = server.requests().len();
    assert_eq!(generate(Path::new(&model)), fetched);
    assert_eq!(server.requests().len(), before, "a complete snapshot is not asked for again");
}
