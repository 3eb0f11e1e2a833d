//! Builds that are killed, interrupted, damaged and changed on the way.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::common::*;

const REFIT: &str = "[output]\nshard-size = \"8MB\"\n[default]\ncodec = { affine = { bits = 3, group = 32 } }\nencoder = \"refit\"\n";

/// A checkpoint that takes the plain kernels about a second, and its uninterrupted digest; made once.
struct Shared {
    dir: TempDir,
    digest: String,
}

fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(|| {
        let dir = temp();
        Model::llama(512, 1024, 4096, 5).write(&dir.path().join("source"));
        let work = Work::new(&dir.path().join("source"), REFIT);
        let digest = work.build(&["--json"]).expect(0).digest();
        Shared { dir, digest }
    })
}

/// One output folder and how to build it.
struct Work {
    dir: TempDir,
    source: PathBuf,
}

impl Work {
    fn new(source: &Path, text: &str) -> Self {
        let dir = temp();
        recipe(dir.path(), text);
        Self { dir, source: source.to_owned() }
    }

    fn on_shared() -> Self {
        Self::new(&shared().dir.path().join("source"), REFIT)
    }

    /// On a copy of the shared source, for tests that change it.
    fn on_copy() -> Self {
        let mut work = Self::on_shared();
        let copy = work.dir.path().join("source");
        copy_folder(&work.source, &copy);
        work.source = copy;
        work
    }

    fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    fn staging(&self) -> PathBuf {
        self.dir.path().join(".out.building")
    }

    fn command(&self, extra: &[&str]) -> std::process::Command {
        let recipe = self.dir.path().join("test.toml");
        let mut args = crate::args!["build", recipe, "--source", self.source, "-o", self.out()];
        args.extend(extra.iter().map(Into::into));
        command(args)
    }

    fn build(&self, extra: &[&str]) -> Run {
        finish(self.command(extra))
    }

    /// Starts a slow build.
    fn spawn(&self, extra: &[&str]) -> Child {
        let mut command = self.command(&[&["--isa", "scalar", "--threads", "1"], extra].concat());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn journal_lines(&self) -> usize {
        let text = fs::read(self.staging().join("journal.jsonl")).unwrap_or_default();
        text.iter().filter(|byte| **byte == b'\n').count()
    }

    /// Starts a slow build and kills it once so many lines are journaled; whether it was still running.
    fn kill_at(&self, lines: usize, extra: &[&str]) -> bool {
        let mut child = self.spawn(extra);
        let deadline = Instant::now() + Duration::from_secs(60);
        while child.try_wait().unwrap().is_none() && self.journal_lines() < lines {
            assert!(Instant::now() < deadline, "the build makes no progress");
            sleep(Duration::from_millis(1));
        }
        let running = child.try_wait().unwrap().is_none();
        child.kill().unwrap();
        child.wait().unwrap();
        running
    }

    #[track_caller]
    fn resumes_to(&self, digest: &str) -> Run {
        let run = self.build(&["--resume", "--json"]).expect(0);
        assert_eq!(run.digest(), digest);
        self.assert_clean();
        run
    }

    #[track_caller]
    fn assert_clean(&self) {
        assert!(!self.staging().exists(), "the staging folder was left behind");
        finish(command(crate::args!["verify", self.out(), "--source", self.source])).expect(0);
    }
}

#[test]
fn a_build_killed_again_and_again_ends_with_the_same_digest() {
    let work = Work::on_shared();
    let mut killed = 0;
    // Each life gets a little further than the one before, by the clock and not by the journal.
    for (life, ms) in [5, 15, 30, 60, 100, 150, 90, 40].into_iter().enumerate() {
        let mut child = work.spawn(if life == 0 { &[] } else { &["--resume"] });
        sleep(Duration::from_millis(ms));
        killed += usize::from(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!work.out().exists() || work.out().join("provenance.json").exists(), "half an artifact");
    }
    assert!(killed >= 4, "only {killed} of 8 lives were cut short");
    work.resumes_to(&shared().digest);
}

#[test]
fn resuming_after_any_number_of_finished_pieces_gives_the_same_digest() {
    for lines in [2, 9, 30, 70] {
        let work = Work::on_shared();
        assert!(work.kill_at(lines, &[]), "the build ended before it could be killed at {lines} lines");
        let run = work.resumes_to(&shared().digest);
        if lines >= 30 {
            assert!(
                run.json()["resumed_modules"].as_u64().unwrap() > 0,
                "nothing was resumed at {lines} lines"
            );
        }
    }
}

#[test]
fn an_interrupt_exits_130_and_says_how_to_go_on() {
    for signal in ["-INT", "-TERM"] {
        let work = Work::on_shared();
        let child = work.spawn(&[]);
        while work.journal_lines() < 12 {
            sleep(Duration::from_millis(1));
        }
        let sent =
            std::process::Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(130), "{signal}: {stderr}");
        assert!(stderr.contains("error: interrupted with "), "{stderr}");
        assert!(stderr.contains("help: run the same command with `--resume` to go on"), "{stderr}");
        assert!(output.stdout.is_empty());
        assert!(!work.out().exists());
        work.resumes_to(&shared().digest);
    }
}

#[test]
fn an_unfinished_build_is_neither_overwritten_nor_resumed_unasked() {
    let work = Work::on_shared();
    assert!(work.kill_at(12, &[]));
    let lines = work.journal_lines();
    let run = work.build(&[]).expect(2);
    let staging = work.staging();
    assert_eq!(
        run.stderr,
        format!(
            "error: an unfinished build lies in `{}`\nhelp: go on from it with `--resume`, or throw it away with `--restart`\n",
            staging.display()
        )
    );
    assert_eq!(work.journal_lines(), lines);
    let run = work.build(&["--restart", "--json"]).expect(0);
    assert_eq!(run.digest(), shared().digest);
    assert_eq!(run.json()["resumed_modules"], 0);
    work.assert_clean();
}

#[test]
fn resuming_without_an_unfinished_build_starts_one_and_says_so() {
    let work = Work::new(&fixture("llama-tied"), &default_codec(AFFINE_4_32));
    let run = work.build(&["--resume"]).expect(0);
    assert!(run.stderr.contains("there is no unfinished build"), "{}", run.stderr);
}

#[test]
fn damage_to_finished_work_is_noticed_and_repaired() {
    let work = Work::on_shared();
    assert!(work.kill_at(30, &[]));
    let file = first_weights(&work.staging().join("artifact"));
    // The first weights of the first file belong to the first module, which is finished.
    let bytes = fs::read(&file).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    flip_byte(&file, data + 5);
    work.resumes_to(&shared().digest);

    // A file that lost its end, one that is gone, and a header that was written over.
    for harm in 0..3 {
        let work = Work::on_shared();
        assert!(work.kill_at(30, &[]));
        let file = first_weights(&work.staging().join("artifact"));
        match harm {
            0 => fs::File::options().write(true).open(&file).unwrap().set_len(100).unwrap(),
            1 => fs::remove_file(&file).unwrap(),
            _ => flip_byte(&file, 20),
        }
        work.resumes_to(&shared().digest);
    }
}

fn first_weights(dir: &Path) -> PathBuf {
    weight_files(dir).remove(0)
}

#[test]
fn a_torn_or_foreign_journal_line_costs_only_work() {
    for tail in [
        "{\"module\":{\"mod",
        "\u{0}\u{0}\u{0}\u{0}",
        "{\"module\":{\"module\":99999,\"planes\":[],\"error-bits\":0}}\n",
    ] {
        let work = Work::on_shared();
        assert!(work.kill_at(12, &[]));
        let journal = work.staging().join("journal.jsonl");
        let mut text = fs::read(&journal).unwrap();
        text.extend_from_slice(tail.as_bytes());
        fs::write(&journal, text).unwrap();
        work.resumes_to(&shared().digest);
    }
    // Without its first line a journal says nothing.
    let work = Work::on_shared();
    assert!(work.kill_at(12, &[]));
    fs::write(work.staging().join("journal.jsonl"), "").unwrap();
    work.resumes_to(&shared().digest);
}

#[test]
fn a_source_that_changed_meanwhile_gives_the_artifact_of_the_changed_source() {
    let work = Work::on_copy();
    assert!(work.kill_at(30, &[]));
    // A weight of the first shard, which is finished.
    let shard = first_weights(&work.source);
    let len = fs::metadata(&shard).unwrap().len() as usize;
    flip_byte(&shard, (len / 3) & !1);
    let changed = work.build(&["--resume", "--json"]).expect(0).digest();
    assert_ne!(changed, shared().digest);
    work.assert_clean();
    let fresh = Work::new(&work.source, REFIT);
    assert_eq!(fresh.build(&["--json"]).expect(0).digest(), changed);
}

#[test]
fn a_touched_source_is_read_again_and_gives_the_same_digest() {
    let work = Work::on_copy();
    assert!(work.kill_at(30, &[]));
    for shard in weight_files(&work.source) {
        let file = fs::File::options().write(true).open(shard).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1)).unwrap();
    }
    work.resumes_to(&shared().digest);
}

#[test]
fn a_recipe_or_tokenizer_that_changed_meanwhile_is_refused() {
    let work = Work::on_copy();
    assert!(work.kill_at(12, &[]));
    recipe(work.dir.path(), &format!("{REFIT}# a remark\n"));
    let run = work.build(&["--resume"]).expect(2);
    for word in ["another plan", ".out.building", "help: restore what was changed and `--resume`"] {
        assert!(run.stderr.contains(word), "`{word}` is not in:\n{}", run.stderr);
    }
    recipe(work.dir.path(), REFIT);
    let tokenizer = work.source.join("tokenizer.json");
    let text = fs::read(&tokenizer).unwrap();
    fs::write(&tokenizer, [&text[..], b"\n"].concat()).unwrap();
    work.build(&["--resume"]).expect(2);
    // Restored, it goes on.
    fs::write(&tokenizer, text).unwrap();
    work.resumes_to(&shared().digest);
}

#[test]
fn a_killed_rebuild_leaves_the_earlier_artifact_untouched() {
    let work = Work::on_shared();
    work.build(&[]).expect(0);
    let before = fs::read(work.out().join("provenance.json")).unwrap();
    assert!(work.kill_at(20, &[]));
    assert_eq!(fs::read(work.out().join("provenance.json")).unwrap(), before);
    finish(command(crate::args!["verify", work.out()])).expect(0);
    work.resumes_to(&shared().digest);
}

#[test]
fn a_journal_line_that_was_edited_costs_only_work() {
    let work = Work::on_shared();
    assert!(work.kill_at(12, &[]));
    let journal = work.staging().join("journal.jsonl");
    let text = fs::read_to_string(&journal).unwrap();
    let edited = text.replace("\"scale_underflow\":0", "\"scale_underflow\":5");
    assert_ne!(edited, text);
    fs::write(&journal, edited).unwrap();
    work.resumes_to(&shared().digest);
}

#[test]
fn a_staging_folder_that_is_removed_under_a_build_never_becomes_an_artifact() {
    let work = Work::on_shared();
    let mut child = work.spawn(&[]);
    while child.try_wait().unwrap().is_none() && work.journal_lines() < 12 {
        sleep(Duration::from_millis(1));
    }
    fs::remove_dir_all(work.staging()).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(4));
    assert!(!work.out().exists());
}
