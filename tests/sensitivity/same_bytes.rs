//! The same bytes whatever the machine, the waves and the interruptions.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tqc::eval::Progress;
use tqc::eval::forward::Need;
use tqc::failure::{Exit, Outcome};
use tqc::isa::Isa;
use tqc::plan::{Limits, SourceFolder};
use tqc::recipe::{Pattern, Recipe};
use tqc::sensitivity::{Asking, Measured, SensitivityError, candidates, sensitivity};
use tqc::stage::pipeline;
use tqc::units::Bytes;

use crate::common::*;
use crate::{FOUR, TEXT, args, recipe_named};

/// Raises a flag at the n-th pass of a batch through a layer.
struct StopAt<'a> {
    stop: &'a AtomicBool,
    passes: AtomicU64,
    last: u64,
}

impl Progress for StopAt<'_> {
    fn need(&self, _: &Need) {}

    fn at(&self, _: u64, _: u64, _: &'static str) {
        if self.passes.fetch_add(1, Ordering::Relaxed) + 1 >= self.last {
            self.stop.store(true, Ordering::Relaxed);
        }
    }
}

struct Place {
    dir: tempfile::TempDir,
    recipe: Recipe,
    source: PathBuf,
}

impl Place {
    fn new(transform: &str) -> Self {
        let dir = temp();
        let recipe = recipe_named(dir.path(), "test", &format!("{FOUR}{transform}"));
        fs::write(dir.path().join("text.jsonl"), TEXT).unwrap();
        let recipe = Recipe::load(&recipe, &pipeline::names()).unwrap();
        Self { dir, recipe, source: fixture("qwen3_5") }
    }

    fn out(&self) -> PathBuf {
        self.dir.path().join("sens.json")
    }

    /// Ends with 130 if it is stopped after so many passes.
    fn run(&self, threads: usize, isa: Isa, budget: u64, passes: u64) -> Outcome<Measured> {
        let stop = AtomicBool::new(false);
        let text = self.dir.path().join("text.jsonl");
        let only = Pattern::new("*{embed_tokens,.1.mlp.up_proj,.3.self_attn.o_proj}").unwrap();
        let asking = Asking {
            target: &self.out(),
            candidates: &candidates("affine-2g32,affine-5g32").unwrap(),
            only: Some(&only),
            text: Some(&text),
            rows: None,
            context: None,
            tokens: 60,
            budget: Bytes(budget),
            discard: false,
            stop: &stop,
            progress: &StopAt { stop: &stop, passes: AtomicU64::new(0), last: passes },
            tell: &|_| {},
        };
        let source = SourceFolder { dir: self.source.clone(), hub: None };
        sensitivity(&self.recipe, &source, Limits { memory: None, threads, isa }, &asking)
    }

    /// What one probe needs.
    fn least(&self) -> u64 {
        let error: Box<dyn Error> = self.run(1, Isa::best(), 1, u64::MAX).unwrap_err();
        match error.downcast_ref() {
            Some(SensitivityError::Budget { needed, .. }) => needed.0,
            _ => panic!("{error}"),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let bytes = fs::read(self.out()).unwrap();
        fs::remove_file(self.out()).unwrap();
        assert!(!work(&self.out()).exists());
        bytes
    }
}

fn work(out: &Path) -> PathBuf {
    out.with_file_name(format!(".{}.work", out.file_name().unwrap().to_str().unwrap()))
}

#[test]
fn threads_kernels_and_waves_change_no_byte() {
    for transform in ["", "[transform]\nrotation = \"hadamard\"\n"] {
        let place = Place::new(transform);
        let least = place.least();
        // 60 tokens of 160 f32 values.
        let each = 60 * 160 * 4;
        let whole = place.run(2, Isa::best(), 1 << 30, u64::MAX).unwrap();
        let probes = 6;
        assert_eq!(whole.waves, 1);
        let expected = place.bytes();
        for (threads, isa, budget, per_wave) in [
            (1, Isa::Scalar, 1 << 30, probes),
            (3, Isa::best(), least, 1),
            (1, Isa::best(), least + each, 2),
            (2, Isa::Scalar, least + 3 * each, 4),
        ] {
            let measured = place.run(threads, isa, budget, u64::MAX).unwrap();
            assert_eq!(measured.waves, usize::div_ceil(probes, per_wave), "{threads} {isa} {budget}");
            assert!(place.bytes() == expected, "{threads} {isa} {budget}");
        }
    }
}

#[test]
fn stopping_anywhere_loses_at_most_a_wave() {
    let place = Place::new("");
    let least = place.least();
    place.run(2, Isa::best(), 1 << 30, u64::MAX).unwrap();
    let expected = place.bytes();
    // A wave of one probe is 4 passes of the clean stream and up to 4 of the probe.
    for passes in [3, 9, 17, 30] {
        let failure = place.run(2, Isa::best(), least, passes).unwrap_err();
        assert_eq!(failure.exit(), Exit::Interrupted, "{failure}");
        assert!(!place.out().exists());
        assert_eq!(work(&place.out()).exists(), passes > 9, "a first wave that was not finished is not kept");
        let measured = place.run(1, Isa::best(), least + 60 * 160 * 4, u64::MAX).unwrap();
        // Every wave before the stop counts: none takes more than 8 passes, and one asks of the next.
        assert!(measured.resumed_probes as u64 >= (passes - 1) / 9, "{passes}: {}", measured.resumed_probes);
        assert!(place.bytes() == expected, "{passes}");
    }
}

#[test]
fn a_killed_process_leaves_its_waves_to_the_next() {
    let place = Place::new("");
    let recipe = place.dir.path().join("test.toml");
    let memory = format!("{}KiB", place.least().div_ceil(1024));
    let arguments = |out: &Path, more: &[&str]| {
        let text = place.dir.path().join("text.jsonl");
        let mut args = args!["sensitivity", place.source, "--recipe", recipe, "-o", out, "--text", text];
        args.extend(["--tokens", "60", "--candidates", "affine-2g32,affine-4g32"].map(Into::into));
        args.extend(more.iter().map(Into::into));
        args
    };
    let whole = place.dir.path().join("whole.json");
    finish(command(arguments(&whole, &["--threads", "1"]))).expect(0);
    // A process that is done before it is killed says nothing; the next attempt is likely not.
    let killed = (0..5).find_map(|attempt| {
        let out = place.dir.path().join(format!("killed-{attempt}.json"));
        let mut child = command(arguments(&out, &["--memory", &memory]))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let start = Instant::now();
        while !work(&out).join("done.json").exists() && child.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < Duration::from_secs(120), "it neither works nor ends");
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        (!out.exists()).then_some(out)
    });
    let killed = killed.expect("a process that is killed before it is done");
    let run = finish(command(arguments(&killed, &[]))).expect(0);
    assert!(run.stdout.contains("probes were done before"), "{}", run.stdout);
    assert!(fs::read(&killed).unwrap() == fs::read(&whole).unwrap());
}
