//! A changed basis is the same bytes for every number of threads, instruction set, budget and resume.

use std::sync::atomic::Ordering;

use tqc::isa::Isa;

use crate::*;

#[test]
fn threads_and_instruction_sets_do_not_change_a_byte() {
    let codec = "[default]\ncodec = { affine = { bits = 3, group = 32 } }\n[transform]\n";
    for name in ["qwen2", "qwen3_5", "qwen3_5_moe"] {
        for rotation in [
            "\"hadamard\"",
            "\"block-hadamard\"",
            "\"random-orthogonal\"",
            "{ kind = \"optrot\", steps = 4 }",
        ] {
            let dir = temp();
            let text = format!("{codec}rotation = {rotation}\nkey-balance = true\nup-balance = true\n");
            let digest = |more: &[&str]| built(dir.path(), &text, &fixture(name), more).1["digest"].clone();
            let first = digest(&[]);
            let isas: Vec<String> = Isa::available().iter().map(ToString::to_string).collect();
            let mut runs = vec![vec!["--threads", "1"], vec!["--threads", "5", "--memory", "64MiB"]];
            runs.extend(isas.iter().map(|isa| vec!["--isa", isa.as_str(), "--threads", "2"]));
            for run in runs {
                assert_eq!(digest(&run), first, "{name}, {rotation}, {run:?}");
            }
            let other = text.replacen("rotation = ", "# ", 1);
            let plain = built(dir.path(), &other, &fixture(name), &[]).1["digest"].clone();
            assert_ne!(plain, first, "{name}, {rotation}");
        }
    }
}

#[test]
fn another_seed_is_another_artifact_and_the_same_seed_the_same() {
    let dir = temp();
    let digest = |seed: u32, kind: &str| {
        let text = format!(
            "[default]\ncodec = {AFFINE_4_32}\n[transform]\nrotation = {{ kind = \"{kind}\", seed = {seed} }}\n"
        );
        let (out, _) = built(dir.path(), &text, &fixture("llama-untied"), &[]);
        read_folder(&out)["model.layers.0.mlp.up_proj.weight"].bytes.clone()
    };
    for kind in ["hadamard", "random-orthogonal"] {
        assert_eq!(digest(1, kind), digest(1, kind), "{kind}");
        assert_ne!(digest(1, kind), digest(2, kind), "{kind}");
    }
}

#[test]
fn the_record_says_how_it_was_made() {
    let dir = temp();
    let text = "[default]\ncodec = \"bf16\"\n[transform]\nrotation = { kind = \"hadamard\", seed = 9 }\n";
    let (out, _) = built(dir.path(), text, &fixture("qwen3"), &[]);
    let record = read_json(&out.join("provenance.json"));
    let transform = &record["transform"];
    assert_eq!(transform["id"], "tqc-fold/1");
    assert_eq!(transform["family"], "qwen3");
    assert_eq!((&transform["gains"], &transform["untied"]), (&"one".into(), &true.into()));
    // 192 = 12 · 16.
    let r1 = &transform["r1"];
    assert_eq!((&r1["kind"], &r1["seed"], &r1["width"]), (&"hadamard".into(), &9.into(), &192.into()));
    assert_eq!((&r1["factors"], &r1["sylvester_log2"]), (&serde_json::json!([12]), &4.into()));
    let outputs = record["outputs"].as_array().unwrap();
    let steps = |name: &str| outputs.iter().find(|o| o["name"] == name).expect(name)["transforms"].clone();
    assert_eq!(
        steps("model.layers.1.self_attn.v_proj.weight"),
        serde_json::json!(["gain:input", "r1:input", "r2:output"])
    );
    assert_eq!(steps("model.layers.1.self_attn.o_proj.weight"), serde_json::json!(["r1:output", "r2:input"]));
    assert_eq!(steps("model.embed_tokens.weight"), serde_json::json!(["r1:input"]));
    assert_eq!(steps("lm_head.weight"), serde_json::json!(["gain:input", "r1:input"]));
    assert_eq!(steps("model.norm.weight"), serde_json::json!(["neutral"]));
    assert_eq!(steps("model.layers.0.self_attn.q_norm.weight"), serde_json::json!([]));
    assert!(record["notes"].as_array().unwrap().iter().any(|note| note["kind"] == "untied"));
    assert_eq!(read_json(&out.join("config.json"))["tie_word_embeddings"], false);
}

/// Raises a flag when a phase begins with these words, and counts the steps of searches.
struct Until<'a> {
    words: &'a str,
    stop: &'a AtomicBool,
    steps: std::sync::atomic::AtomicUsize,
}

impl tqc::build::Progress for Until<'_> {
    fn begin(&self, _: u64, _: u64, _: u64, _: u64) {}
    fn panel(&self, _: u64) {}
    fn module(&self, _: &str) {}
    fn phase(&self, what: &str) {
        self.steps.fetch_add(usize::from(what.contains(": step ")), Ordering::Relaxed);
        self.stop.fetch_or(what.starts_with(self.words), Ordering::Relaxed);
    }
    fn end(&self) {}
}

#[test]
fn an_interrupted_build_keeps_the_rotations_that_it_found() {
    use tqc::build::{Before, Options, Unfinished, build};
    use tqc::failure::Exit;
    let dir = temp();
    let text = "[default]\ncodec = \"bf16\"\n[transform]\nrotation = { kind = \"optrot\", steps = 6 }\n";
    let plan = std::sync::Arc::new(planned(dir.path(), text, &fixture("llama-tied")));
    let run = |target: &Path, words: &str, unfinished| {
        let stop = AtomicBool::new(false);
        let progress = Until { words, stop: &stop, steps: Default::default() };
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
        let ended = build(&plan, &options).map(|finished| finished.publish().unwrap().digest);
        (ended, progress.steps.into_inner())
    };
    let (whole, steps) = run(&dir.path().join("whole"), "never", Unfinished::Refuse);
    assert!(steps > 6, "{steps} steps for r1 and two r2");
    let target = dir.path().join("artifact");
    let (ended, _) = run(&target, "comparing layer", Unfinished::Refuse);
    assert_eq!(ended.unwrap_err().exit(), Exit::Interrupted);
    assert!(!target.exists() && dir.path().join(".artifact.building/found/r1").exists());
    let (resumed, steps) = run(&target, "never", Unfinished::Resume);
    assert_eq!(steps, 0, "nothing is looked for twice");
    assert_eq!(resumed.unwrap(), whole.unwrap());

    // A file that is not whole is looked for again.
    let (ended, _) = run(&target, "comparing layer", Unfinished::Refuse);
    assert_eq!(ended.unwrap_err().exit(), Exit::Interrupted);
    let r1 = dir.path().join(".artifact.building/found/r1");
    let mut bytes = std::fs::read(&r1).unwrap();
    bytes[400] ^= 1;
    std::fs::write(&r1, bytes).unwrap();
    let (resumed, steps) = run(&target, "never", Unfinished::Resume);
    assert!(steps > 0 && steps <= 7, "{steps} steps for r1 alone");
    assert!(resumed.is_ok());
}
