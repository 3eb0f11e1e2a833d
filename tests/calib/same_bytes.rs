//! Codes are the same bytes for every number of threads, instruction set, resume and detour through a file.

use std::sync::atomic::{AtomicBool, Ordering};

use tqc::build::{Options, Progress, Unfinished, build};
use tqc::failure::Exit;

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

/// Raises a flag when a phase begins with these words, and counts modules whose codes are looked for.
struct Until<'a> {
    words: &'a str,
    stop: &'a AtomicBool,
    weighed: std::sync::atomic::AtomicUsize,
}

impl Progress for Until<'_> {
    fn begin(&self, _: u64, _: u64, _: u64, _: u64) {}
    fn panel(&self, _: u64) {}
    fn module(&self, _: &str) {}
    fn phase(&self, what: &str) {
        self.weighed.fetch_add(usize::from(what.starts_with("weighing errors of")), Ordering::Relaxed);
        self.stop.fetch_or(what.starts_with(self.words), Ordering::Relaxed);
    }
    fn end(&self) {}
}

#[test]
fn an_interrupted_build_goes_on_with_the_codes_that_it_found() {
    for activations in ["unrounded", "sequential"] {
        let dir = temp();
        text(dir.path());
        let recipe = recipe_text("gptq", 3, &format!("activations = \"{activations}\""), "");
        let plan = planned(dir.path(), &recipe, &fixture("qwen3_5"));
        let run = |target: &Path, words: &str, unfinished| {
            let stop = AtomicBool::new(false);
            let progress = Until { words, stop: &stop, weighed: Default::default() };
            let options =
                Options { target, unfinished, strict: false, stop: &stop, progress: &progress, found: &() };
            let ended = build(&plan, &options).map(|finished| finished.publish().unwrap().digest);
            (ended, progress.weighed.into_inner())
        };
        let (whole, all) = run(&dir.path().join("whole"), "never", Unfinished::Refuse);
        let target = dir.path().join("artifact");
        let (ended, some) = run(&target, "calibrating layer 3", Unfinished::Refuse);
        assert_eq!(ended.unwrap_err().exit(), Exit::Interrupted);
        assert!(some > 0 && some < all && !target.exists(), "{some} of {all}");
        let (ended, more) = run(&target, "weighing errors of language_model.lm_head", Unfinished::Resume);
        assert_eq!(ended.unwrap_err().exit(), Exit::Interrupted);
        let (resumed, rest) = run(&target, "never", Unfinished::Resume);
        // The module whose turn it was when the flag was raised is done before the build ends.
        assert_eq!((some + more + rest, resumed.unwrap()), (all, whole.unwrap()), "{some}, {more}, {rest}");
    }
}

#[test]
fn codes_that_were_damaged_are_looked_for_again() {
    let dir = temp();
    text(dir.path());
    let plan = planned(dir.path(), &recipe_text("gptq", 3, "", ""), &fixture("llama-untied"));
    let target = dir.path().join("artifact");
    let run = |words: &str, unfinished| {
        let stop = AtomicBool::new(false);
        let progress = Until { words, stop: &stop, weighed: Default::default() };
        let options = Options {
            target: &target,
            unfinished,
            strict: false,
            stop: &stop,
            progress: &progress,
            found: &(),
        };
        build(&plan, &options).map(|finished| finished.publish().unwrap().digest)
    };
    let whole = run("never", Unfinished::Refuse).unwrap_or_else(|e| panic!("{e}"));
    std::fs::remove_dir_all(&target).unwrap();
    assert!(run("calibrating layer 2", Unfinished::Refuse).is_err());
    let found = dir.path().join(".artifact.building/found");
    let mut codes: Vec<_> = std::fs::read_dir(&found).unwrap().map(|entry| entry.unwrap().path()).collect();
    codes.sort();
    let damaged = codes.iter().find(|path| path.file_name().unwrap().to_string_lossy().starts_with("codes-"));
    let length = std::fs::metadata(damaged.unwrap()).unwrap().len() as usize;
    flip_byte(damaged.unwrap(), length - 40);
    assert_eq!(run("never", Unfinished::Resume).unwrap_or_else(|e| panic!("{e}")), whole);
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
