//! The measured basis is the one of least KL, and what was measured is what is built.

use std::sync::Arc;

use tqc::backend::Precision;
use tqc::backend::cpu::Cpu;
use tqc::isa::Isa;
use tqc::measure::measure;
use tqc::numeric::divergence::divergence;
use tqc::recipe::Recipe;
use tqc::runtime::{Model as Runtime, Want, Weights};

use crate::*;

/// A recipe that measures on [`TEXT`], beside it, or takes a basis by name.
fn text(more: &str) -> String {
    let measures = if more.contains("measure") { "text = \"text.jsonl\"\ntokens = 90\n" } else { "" };
    format!("[default]\ncodec = {{ affine = {{ bits = 2, group = 32 }} }}\n[transform]\n{more}\n{measures}")
}

const TEXT: &str = "{\"text\": \"The old mill stood by the river, and nobody had seen it turn.\"}\n\
                    {\"text\": \"for i in range(10): print(i * i)\"}\n{\"text\": \"A man, a plan, a canal: Panama!\"}\n";

#[test]
fn the_basis_of_least_kl_is_built_and_recorded() {
    for name in ["qwen2", "qwen3_5"] {
        let dir = temp();
        std::fs::write(dir.path().join("text.jsonl"), TEXT).unwrap();
        let measuring = "rotation = { kind = \"measure\", steps = 3 }";
        let (out, json) = built(dir.path(), &text(measuring), &fixture(name), &[]);
        let measured = &json["measured"];
        let rows = measured["rows"].as_array().unwrap();
        let kl = |row: &serde_json::Value| row["mean_kl"].as_f64().unwrap();
        let best = rows.iter().min_by(|a, b| kl(a).total_cmp(&kl(b))).unwrap();
        assert_eq!(measured["chosen"], best["basis"], "{measured}");
        let skipped: Vec<&str> =
            measured["skipped"].as_array().unwrap().iter().map(|s| s["basis"].as_str().unwrap()).collect();
        assert_eq!(skipped, if name == "qwen3_5" { vec!["hadamard+r2"] } else { vec![] }, "{measured}");
        assert_eq!(rows.len() + skipped.len(), 5);
        // Bases differ in what they cost.
        assert!(rows.iter().any(|row| kl(row) != kl(&rows[0])), "{measured}");
        let record = read_json(&out.join("provenance.json"));
        assert_eq!(&record["measured"], measured);
        tqc!("verify", out, "--source", fixture(name), "--rebuild", "all").expect(0);

        // The same basis, asked for by name, is the same weights.
        let basis = measured["chosen"].as_str().unwrap();
        let (kind, r2) = basis.strip_suffix("+r2").map_or((basis, "\"auto\""), |kind| (kind, "true"));
        let r2 = if basis == "hadamard" { "false" } else { r2 };
        let steps = if kind == "optrot" { ", steps = 3" } else { "" };
        let named = text(&format!("rotation = {{ kind = \"{kind}\", r2 = {r2}{steps} }}"));
        let again = temp();
        let (other, _) = built(again.path(), &named, &fixture(name), &[]);
        assert!(read_folder(&out) == read_folder(&other), "{name}: {basis}");
    }
}

#[test]
fn a_measured_kl_is_that_of_the_built_artifact() {
    let dir = temp();
    std::fs::write(dir.path().join("text.jsonl"), TEXT).unwrap();
    let source = fixture("qwen2");
    let path = recipe(dir.path(), &text("rotation = { kind = \"measure\", steps = 2 }"));
    let recipe = Recipe::load(&path, &pipeline::names()).unwrap();
    let folder = SourceFolder { dir: source.clone(), hub: None };
    let measured = measure(&recipe, &folder, limits(), nobody()).unwrap();
    let row = measured.rows.iter().find(|row| row.basis == "hadamard+r2").unwrap();
    let (out, _) = built(dir.path(), &text("rotation = { kind = \"hadamard\", r2 = true }"), &source, &[]);

    let cpu = Cpu::new(Isa::best(), 2, Precision::Exact);
    let open = |dir: &Path| Runtime::new(Weights::open(dir).unwrap(), Arc::clone(&cpu)).unwrap();
    let (teacher, student) = (open(&source), open(&out));
    let tokenizer = tqc::text::Tokenizer::open(&source).unwrap();
    let (mut sum, mut left) = (0.0, 90);
    for line in TEXT.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let mut ids = tokenizer.encode(line["text"].as_str().unwrap(), true).unwrap();
        ids.truncate(left);
        left -= ids.len();
        let logits = |model: &Runtime| model.forward(&mut model.state(), &ids, Want::All).unwrap().logits;
        let vocab = teacher.config().vocab;
        let (a, b) = (logits(&teacher), logits(&student));
        sum += a
            .chunks(vocab)
            .zip(b.chunks(vocab))
            .map(|(a, b)| divergence(a, b, Isa::best()).unwrap().kl)
            .sum::<f64>();
    }
    let positions = measured.positions as f64;
    assert_eq!(measured.positions, 90 - left as u64);
    assert!((row.mean_kl - sum / positions).abs() < 1e-12, "{} and {}", row.mean_kl, sum / positions);
}

#[test]
fn neither_memory_nor_the_spelling_of_a_path_decides_and_r2_is_obeyed() {
    let dir = temp();
    std::fs::write(dir.path().join("text.jsonl"), TEXT).unwrap();
    let measuring = text("rotation = { kind = \"measure\", steps = 2 }");
    let (out, json) = built(dir.path(), &measuring, &fixture("qwen3_5"), &[]);
    let reason = json["measured"]["skipped"][0]["reason"].as_str().unwrap();
    assert!(reason.starts_with("value heads cannot be rotated") && !reason.contains('\n'), "{reason}");
    let mut elsewhere =
        command(args!["build", "./test.toml", "--source", fixture("qwen3_5"), "-o", "again", "--json"]);
    elsewhere.current_dir(dir.path());
    assert_eq!(finish(elsewhere).expect(0).json()["digest"], json["digest"]);
    let small = tqc!(
        "build",
        dir.path().join("test.toml"),
        "--source",
        fixture("qwen3_5"),
        "-o",
        dir.path().join("small"),
        "--memory",
        "1MiB"
    );
    assert!(small.expect(2).stderr.contains("of working memory, but the budget is"));
    assert!(out.exists());

    for (r2, without) in [("false", "hadamard+r2"), ("true", "hadamard")] {
        let asked = text(&format!("rotation = {{ kind = \"measure\", r2 = {r2}, steps = 2 }}"));
        let (_, json) = built(dir.path(), &asked, &fixture("qwen2"), &[]);
        let rows = json["measured"]["rows"].as_array().unwrap();
        assert!(rows.iter().all(|row| row["basis"] != without), "{}", json["measured"]);
        let rotates = json["measured"]["chosen"] != "none";
        let found = &json["transform"]["r2"];
        assert_eq!(found.is_object(), r2 == "true" && rotates, "{found}");
    }
}

#[test]
fn the_text_is_locked_and_a_forged_table_is_found() {
    let dir = temp();
    let words = dir.path().join("text.jsonl");
    std::fs::write(&words, TEXT).unwrap();
    let path = recipe(dir.path(), &text("rotation = { kind = \"measure\", steps = 2 }"));
    let out = dir.path().join("artifact");
    let source = fixture("qwen2");
    tqc!("build", path, "--source", source, "-o", out, "--write-lock").expect(0);
    tqc!("build", path, "--source", source, "-o", out, "--locked").expect(0);
    std::fs::write(&words, TEXT.replace("river", "sea")).unwrap();
    let run = tqc!("build", path, "--source", source, "-o", out, "--locked").expect(1);
    assert!(run.stderr.contains("the text that was measured on changed"), "{}", run.stderr);

    let record = out.join("provenance.json");
    let whole = std::fs::read_to_string(&record).unwrap();
    let value: serde_json::Value = serde_json::from_str(&whole).unwrap();
    let forged = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut value = value.clone();
        change(&mut value["measured"]);
        std::fs::write(&record, format!("{value}\n")).unwrap();
        tqc!("verify", out, "--source", source, "--rebuild", "all").expect(1).stdout
    };
    let found = forged(&|measured| measured["rows"][0]["mean_kl"] = (-5.5).into());
    assert!(found.contains("KL below 0"), "{found}");
    let found = forged(&|measured| measured["rows"] = serde_json::json!([]));
    assert!(found.contains("the candidates are"), "{found}");
    std::fs::write(&record, whole).unwrap();
    tqc!("verify", out, "--source", source, "--rebuild", "all").expect(0);
}

#[test]
fn an_interrupted_measurement_goes_on_with_the_next_basis_and_the_build_searches_nothing_again() {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tqc::fold::{KeepFolder, Watch, prepare};
    let dir = temp();
    std::fs::write(dir.path().join("text.jsonl"), TEXT).unwrap();
    let path = recipe(dir.path(), &text("rotation = { kind = \"measure\", steps = 3 }"));
    let recipe = Recipe::load(&path, &pipeline::names()).unwrap();
    let folder = SourceFolder { dir: fixture("llama-tied"), hub: None };
    let keep = KeepFolder(dir.path().join("kept"));
    let run = |until: &str| {
        let (stop, said) = (AtomicBool::new(false), Mutex::new(Vec::new()));
        let tell = |what: &str| {
            stop.fetch_or(what.starts_with(until), Ordering::Relaxed);
            said.lock().unwrap().push(what.to_owned());
        };
        let measured = measure(&recipe, &folder, limits(), Watch { stop: &stop, tell: &tell, keep: &keep });
        (measured, said.into_inner().unwrap())
    };
    let says = |said: &[String], words: &str| said.iter().any(|what| what.contains(words));
    let (ended, said) = run("measuring block-hadamard");
    assert!(ended.is_err() && says(&said, "measuring hadamard+r2"), "{said:?}");
    let (resumed, said) = run("never");
    assert!(!says(&said, "measuring hadamard") && says(&said, "measuring block-hadamard"), "{said:?}");
    assert!(says(&said, "r1: step"), "{said:?}");
    let resumed = resumed.unwrap();
    let whole = measure(&recipe, &folder, limits(), nobody()).unwrap();
    assert_eq!(resumed, whole);

    // What was found for a candidate is found for the build of the same plan.
    let plan = plan(recipe.clone().with_basis("optrot"), folder.clone(), limits()).unwrap();
    let said = Mutex::new(Vec::new());
    let tell = |what: &str| said.lock().unwrap().push(what.to_owned());
    let kept = tqc::fold::OfPlan::new(&keep, &plan, ());
    prepare(&plan, Watch { stop: &NEVER, tell: &tell, keep: &kept }).unwrap();
    let said = said.into_inner().unwrap();
    assert!(!says(&said, ": step"), "{said:?}");
}

#[test]
fn a_published_build_leaves_nothing_of_its_measurement() {
    let dir = temp();
    std::fs::write(dir.path().join("text.jsonl"), TEXT).unwrap();
    let (out, _) =
        built(dir.path(), &text("rotation = { kind = \"measure\", steps = 2 }"), &fixture("llama-tied"), &[]);
    assert!(out.exists());
    let mut left: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["artifact", "test.toml", "text.jsonl"]);
}
