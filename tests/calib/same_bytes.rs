//! Codes are the same bytes for every number of threads, instruction set, resume and detour through a file.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tqc::build::{Before, Options, Progress, Unfinished, build, staging_path};
use tqc::digest::Digest;
use tqc::failure::Exit;
use tqc::plan::RowsPlace;
use tqc::units::Bytes;

use crate::*;

const ROTATED: &str = "[transform]\nrotation = \"hadamard\"\n";

#[test]
fn threads_and_instruction_sets_do_not_change_a_byte() {
    for (name, encoder, calibration, more) in [
        ("qwen3_5", "gptq-refit", "", ROTATED),
        ("qwen3_5_moe", "gptq", "expert-tokens = 20", ""),
        ("llama-tied", "gptq-refit", "activations = \"sequential\"", "[gptq]\nact-order = true\n"),
    ] {
        let dir = temp();
        text(dir.path());
        let recipe = recipe_text(encoder, 3, calibration, more);
        let digest =
            |more: &[&str]| built(dir.path(), "out", &recipe, &fixture(name), more).1["digest"].clone();
        let first = digest(&["--threads", "1"]);
        let mut runs = vec![vec!["--threads", "3"]];
        let isas: Vec<String> = Isa::available().iter().map(ToString::to_string).collect();
        runs.extend(isas.iter().map(|isa| vec!["--isa", isa.as_str(), "--threads", "2"]));
        for run in runs {
            assert_eq!(digest(&run), first, "{name}, {run:?}");
        }
    }
}

#[test]
fn second_moments_of_a_file_give_the_codes_that_the_text_gave() {
    for (name, more) in [("qwen3_5", ROTATED), ("qwen3_5_moe", ""), ("qwen3_5-tied", "")] {
        let dir = temp();
        text(dir.path());
        let direct = recipe_text("gptq-refit", 3, "expert-tokens = 20", more);
        let path = recipe(dir.path(), &direct);
        let moments = dir.path().join("moments");
        tqc!["calibrate", path, "--source", fixture(name), "-o", moments].expect(0);
        let (left, _) = built(dir.path(), "direct", &direct, &fixture(name), &[]);
        let file = "hessians = \"moments/hessians.json\"\nexpert-tokens = 20";
        let by_file = recipe_text("gptq-refit", 3, file, more);
        let (right, said) = built(dir.path(), "file", &by_file, &fixture(name), &[]);
        assert_eq!(said["calibration"]["from"], "hessians");
        assert_eq!(read_folder(&left), read_folder(&right), "{name}");
        assert!(left.join("calibration.ngrams").exists() && !right.join("calibration.ngrams").exists());
    }
}

#[test]
fn what_the_layers_before_make_of_the_text_is_another_calibration() {
    let dir = temp();
    text(dir.path());
    let weights = |activations: &str| {
        let recipe = recipe_text("gptq", 2, &format!("activations = \"{activations}\""), "");
        read_folder(&built(dir.path(), activations, &recipe, &fixture("qwen3"), &[]).0)
    };
    let (unrounded, sequential) = (weights("unrounded"), weights("sequential"));
    let first = "model.layers.0.self_attn.q_proj.weight";
    assert_ne!(
        unrounded["model.layers.1.mlp.down_proj.weight"],
        sequential["model.layers.1.mlp.down_proj.weight"]
    );
    // The first layer reads embeddings, which are stored in two bits too.
    assert_ne!(unrounded[first], sequential[first]);
    assert_eq!(unrounded["model.embed_tokens.weight"].dtype, "U32");
}

/// When panels begin to be encoded, which is no phase of words.
const ENCODING: &str = "encoding";

/// Raises a flag when a phase begins with these words, and remembers what was done.
struct Until<'a> {
    words: &'a str,
    stop: &'a AtomicBool,
    /// The folder whose mapped files are looked for.
    folder: PathBuf,
    seen: Mutex<Seen>,
}

/// What a build did.
#[derive(Debug, Default)]
struct Seen {
    /// Modules whose codes were looked for.
    weighed: usize,
    /// Layers that rows went through, from 1.
    layers: Vec<usize>,
    /// Whether rows lay in a file.
    mapped: bool,
}

impl Progress for Until<'_> {
    fn begin(&self, _: u64, _: u64, _: u64, _: u64) {
        self.stop.fetch_or(self.words == ENCODING, Ordering::Relaxed);
    }
    fn panel(&self, _: u64) {}
    fn module(&self, _: &str) {}
    fn phase(&self, what: &str) {
        let mut seen = self.seen.lock().unwrap();
        seen.weighed += usize::from(what.starts_with("weighing errors of"));
        if let Some(rest) = what.strip_prefix("calibrating layer ") {
            seen.layers.push(rest.split(' ').next().unwrap().parse().unwrap());
        }
        // Files of rows have no name any more.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let folder = self.folder.display().to_string();
        seen.mapped |= maps.lines().any(|line| line.contains(&folder) && line.ends_with("/rows (deleted)"));
        self.stop.fetch_or(what.starts_with(self.words), Ordering::Relaxed);
    }
    fn end(&self) {}
}

/// Builds until a phase begins with these words; the artifact's digest, or how it ended.
fn run(plan: &Arc<Plan>, target: &Path, words: &str, unfinished: Unfinished) -> (Result<Digest, Exit>, Seen) {
    let stop = AtomicBool::new(false);
    let folder = staging_path(target).unwrap();
    let progress = Until { words, stop: &stop, folder, seen: Mutex::default() };
    let before = Before::nothing();
    let options = Options {
        target,
        unfinished,
        strict: false,
        stop: &stop,
        progress: &progress,
        found: &(),
        before,
        slice: None,
    };
    let ended = build(plan, &options).map(|finished| finished.publish().unwrap().digest);
    (ended.map_err(|error| error.exit()), progress.seen.into_inner().unwrap())
}

#[test]
fn an_interrupted_build_goes_on_with_the_codes_that_it_found() {
    for activations in ["unrounded", "sequential"] {
        let dir = temp();
        text(dir.path());
        let recipe = recipe_text("gptq", 3, &format!("activations = \"{activations}\""), "");
        let plan = planned(dir.path(), &recipe, &fixture("qwen3_5"));
        let (whole, all) = run(&plan, &dir.path().join("whole"), "never", Unfinished::Refuse);
        let target = dir.path().join("artifact");
        let (ended, some) = run(&plan, &target, "calibrating layer 3", Unfinished::Refuse);
        assert_eq!(ended, Err(Exit::Interrupted));
        assert!(some.weighed > 0 && some.weighed < all.weighed && !target.exists(), "{some:?} of {all:?}");
        let head = "weighing errors of language_model.lm_head";
        let (ended, more) = run(&plan, &target, head, Unfinished::Resume);
        assert_eq!(ended, Err(Exit::Interrupted));
        let (resumed, rest) = run(&plan, &target, "never", Unfinished::Resume);
        // The module whose turn it was when the flag was raised is done before the build ends.
        let weighed = some.weighed + more.weighed + rest.weighed;
        assert_eq!((weighed, resumed), (all.weighed, whole), "{some:?}, {more:?}, {rest:?}");
    }
}

/// Rows in memory, or in files however few they are; kept after every layer.
fn with_rows(plan: Arc<Plan>, in_memory: Bytes) -> Arc<Plan> {
    let mut plan = Arc::try_unwrap(plan).unwrap_or_else(|_| panic!("nobody else holds it"));
    plan.rows = RowsPlace { in_memory, keep_every: Duration::ZERO };
    Arc::new(plan)
}

#[test]
fn rows_in_a_file_give_the_codes_that_rows_in_memory_gave() {
    for (name, activations) in
        [("qwen3_5", "unrounded"), ("qwen3_5", "sequential"), ("llama-tied", "unrounded")]
    {
        let dir = temp();
        text(dir.path());
        let recipe = recipe_text("gptq-refit", 3, &format!("activations = \"{activations}\""), ROTATED);
        let plan = |in_memory| with_rows(planned(dir.path(), &recipe, &fixture(name)), in_memory);
        let (in_memory, seen) =
            run(&plan(Bytes::mib(256)), &dir.path().join("memory"), "never", Unfinished::Refuse);
        assert!(!seen.mapped, "{name}, {activations}");
        let (in_file, seen) = run(&plan(Bytes(0)), &dir.path().join("file"), "never", Unfinished::Refuse);
        if cfg!(target_os = "linux") {
            assert!(seen.mapped, "{name}, {activations}: no file was mapped");
        }
        assert!(in_memory.is_ok());
        assert_eq!(in_file, in_memory, "{name}, {activations}");
    }
}

#[test]
fn an_interrupted_build_goes_on_from_the_rows_that_it_kept() {
    for (activations, in_memory) in [
        ("unrounded", Bytes::mib(256)),
        ("unrounded", Bytes(0)),
        ("sequential", Bytes::mib(256)),
        ("sequential", Bytes(0)),
    ] {
        let dir = temp();
        text(dir.path());
        let recipe = recipe_text("gptq", 3, &format!("activations = \"{activations}\""), "");
        let plan = with_rows(planned(dir.path(), &recipe, &fixture("qwen3_5")), in_memory);
        let (whole, all) = run(&plan, &dir.path().join("whole"), "never", Unfinished::Refuse);
        assert_eq!(all.layers, (1..=all.layers.len()).collect::<Vec<_>>());
        // Whole, and damaged: then the text goes through all layers again.
        for (damage, first) in [(false, 3), (true, 1)] {
            let target = dir.path().join(format!("artifact-{first}"));
            let (ended, _) = run(&plan, &target, "calibrating layer 3", Unfinished::Refuse);
            assert_eq!(ended, Err(Exit::Interrupted));
            let rows = staging_path(&target).unwrap().join("found/rows-kept");
            assert!(rows.exists(), "{activations}: rows are kept");
            if damage {
                flip_byte(&rows, std::fs::metadata(&rows).unwrap().len() as usize - 40);
            }
            let (resumed, seen) = run(&plan, &target, "never", Unfinished::Resume);
            assert_eq!(
                seen.layers,
                (first..=all.layers.len()).collect::<Vec<_>>(),
                "{activations}, {in_memory}"
            );
            assert_eq!(resumed, whole, "{activations}, {in_memory}");
        }
    }
}

#[test]
fn rows_that_were_kept_go_away_when_the_last_codes_are_found() {
    let dir = temp();
    text(dir.path());
    let plan =
        with_rows(planned(dir.path(), &recipe_text("gptq", 3, "", ""), &fixture("llama-untied")), Bytes(0));
    let target = dir.path().join("artifact");
    let (ended, _) = run(&plan, &target, ENCODING, Unfinished::Refuse);
    assert_eq!(ended, Err(Exit::Interrupted));
    let found = std::fs::read_dir(staging_path(&target).unwrap().join("found")).unwrap();
    let names: Vec<String> = found.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.iter().any(|name| name.starts_with("codes-")), "{names:?}");
    assert!(!names.iter().any(|name| name.contains("rows")), "{names:?}");
}

#[test]
fn codes_that_were_damaged_are_looked_for_again() {
    let dir = temp();
    text(dir.path());
    let plan = planned(dir.path(), &recipe_text("gptq", 3, "", ""), &fixture("llama-untied"));
    let target = dir.path().join("artifact");
    let (whole, _) = run(&plan, &target, "never", Unfinished::Refuse);
    std::fs::remove_dir_all(&target).unwrap();
    assert!(run(&plan, &target, "calibrating layer 2", Unfinished::Refuse).0.is_err());
    let found = dir.path().join(".artifact.building/found");
    let mut codes: Vec<_> = std::fs::read_dir(&found).unwrap().map(|entry| entry.unwrap().path()).collect();
    codes.sort();
    let damaged =
        codes.iter().find(|path| path.file_name().unwrap().to_string_lossy().starts_with("codes-")).unwrap();
    let length = std::fs::metadata(damaged).unwrap().len() as usize;
    flip_byte(damaged, length - 40);
    let (resumed, _) = run(&plan, &target, "never", Unfinished::Resume);
    assert!(whole.is_ok());
    assert_eq!(resumed, whole);
}

#[test]
fn verify_finds_the_same_codes_again_where_the_text_is_named() {
    let dir = temp();
    let text = text(dir.path());
    let recipe = recipe_text("gptq-refit", 4, "", ROTATED);
    let (artifact, _) = built(dir.path(), "artifact", &recipe, &fixture("qwen3"), &[]);
    let run = |calibration: &Path| {
        tqc![
            "verify",
            artifact,
            "--source",
            fixture("qwen3"),
            "--rebuild",
            "all",
            "--calibration",
            calibration,
            "--json"
        ]
    };
    let verdict = run(&text).expect(0).json();
    assert!(verdict["rebuilt_modules"].as_u64().unwrap() > 20, "{verdict}");
    // Another text gives other codes.
    let other = dir.path().join("other.jsonl");
    let lines = std::fs::read_to_string(&text).unwrap().replace("river", "mill mill");
    std::fs::write(&other, lines).unwrap();
    let verdict = run(&other).expect(1).json();
    assert!(verdict["problems"].to_string().contains("calibration"), "{verdict}");
}
