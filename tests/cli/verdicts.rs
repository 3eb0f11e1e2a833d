//! `verify` and `diff` say no, with exit code 1 and the name of what is wrong.

use std::fs;
use std::path::PathBuf;

use serde_json::json;
use tempfile::TempDir;

use crate::common::*;
use crate::tqc;

struct Artifact {
    dir: TempDir,
    source: PathBuf,
}

impl Artifact {
    /// With a draft head, so that a second folder is checked too.
    fn new() -> Self {
        let dir = temp();
        let source = dir.path().join("source");
        copy_folder(&fixture("qwen3_5"), &source);
        let recipe = recipe(dir.path(), &default_codec(AFFINE_4_32));
        tqc!("build", recipe, "--source", source, "-o", dir.path().join("out")).expect(0);
        Self { dir, source }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    #[track_caller]
    fn is_wrong(&self, words: &[&str]) {
        let run = tqc!("verify", self.path(), "--source", self.source).expect(1);
        for word in words {
            assert!(run.stdout.contains(word), "`{word}` is not in:\n{}", run.stdout);
        }
        assert!(run.stdout.contains("NOT verified"), "{}", run.stdout);
    }
}

#[test]
fn a_good_artifact_is_verified() {
    let artifact = Artifact::new();
    let verdict = tqc!("verify", artifact.path(), "--json").expect(0).json();
    assert_eq!(verdict["ok"], true);
    assert_eq!(verdict["source_tensors"], 0);
    let source = read_folder(&artifact.source).len();
    let verdict = tqc!("verify", artifact.path(), "--source", artifact.source, "--rebuild", "3", "--json")
        .expect(0)
        .json();
    assert_eq!(verdict["source_tensors"], source);
    assert_eq!(verdict["rebuilt_modules"], 3);
}

#[test]
fn a_flipped_byte_is_found_in_every_file() {
    let artifact = Artifact::new();
    let record = read_json(&artifact.file("provenance.json"));
    let files: Vec<String> = record["files"].as_object().unwrap().keys().cloned().collect();
    for needed in ["config.json", "README.md", "tokenizer.json", "model.safetensors", "mtp/model.safetensors"]
    {
        assert!(files.iter().any(|file| file == needed), "{needed} is not in the record");
    }
    for name in files {
        let path = artifact.file(&name);
        let whole = fs::read(&path).unwrap();
        flip_byte(&path, whole.len() - 3);
        artifact.is_wrong(&[&format!("`{name}` has SHA-256")]);
        fs::write(&path, whole).unwrap();
    }
    tqc!("verify", artifact.path()).expect(0);
}

#[test]
fn a_flipped_weight_is_named_by_its_tensor() {
    let artifact = Artifact::new();
    let path = artifact.file("model.safetensors");
    let tensors = read_safetensors(&path);
    let bytes = fs::read(&path).unwrap();
    let last = tensors.last().unwrap();
    flip_byte(&path, bytes.len() - last.bytes.len());
    artifact.is_wrong(&["`model.safetensors` has SHA-256", &format!("`{}` has payload SHA-256", last.name)]);
    // A damaged header is a finding, not a crash.
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    artifact.is_wrong(&["model.safetensors", "truncated"]);
    fs::write(&path, b"").unwrap();
    artifact.is_wrong(&["model.safetensors"]);
}

#[test]
fn missing_and_extra_files_are_named() {
    let artifact = Artifact::new();
    for name in ["config.json", "mtp/model.safetensors", "tokenizer.json"] {
        let whole = fs::read(artifact.file(name)).unwrap();
        fs::remove_file(artifact.file(name)).unwrap();
        artifact.is_wrong(&[&format!("`{name}` is missing")]);
        fs::write(artifact.file(name), whole).unwrap();
    }
    // mlx-lm loads every file of this pattern.
    fs::write(artifact.file("model-x.safetensors"), b"anything").unwrap();
    artifact.is_wrong(&["`model-x.safetensors` is not in the record"]);
}

#[test]
fn a_changed_source_is_named_by_its_tensor() {
    let artifact = Artifact::new();
    let name = "model.language_model.layers.0.linear_attn.A_log";
    let path = artifact.source.join("model.safetensors");
    let mut tensors = read_safetensors(&path);
    tensors.iter_mut().find(|tensor| tensor.name == name).unwrap().bytes[1] ^= 1;
    write_safetensors(&path, &tensors);
    artifact.is_wrong(&[&format!("`{name}` has SHA-256"), "in the source"]);

    tensors.push(Tensor::random("extra", &[4], 1));
    write_safetensors(&path, &tensors);
    artifact.is_wrong(&["`extra` is in the source but not in the record"]);
    tensors.retain(|tensor| tensor.name != name);
    write_safetensors(&path, &tensors);
    artifact.is_wrong(&[&format!("`{name}` is in the record but not in the source")]);
}

#[test]
fn a_changed_record_is_found() {
    let artifact = Artifact::new();
    let path = artifact.file("provenance.json");
    let text = fs::read_to_string(&path).unwrap();
    let record = read_json(&path);
    let edit = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        fs::write(&path, text.replacen(from, to, 1)).unwrap();
    };
    // A digest of an output, of a source tensor, and of the recipe.
    for digest in [
        &record["outputs"][3]["sha256"],
        &record["source"]["tensors"][5]["sha256"],
        &record["recipe"]["sha256"],
    ] {
        let digest = digest.as_str().unwrap();
        let other = if digest.starts_with('0') { "1" } else { "0" };
        edit(digest, &format!("{other}{}", &digest[1..]));
        artifact.is_wrong(&["says"]);
    }
    // The recipe's words, and a codec that was not used.
    edit("bits = 4", "bits = 5");
    artifact.is_wrong(&["recipe"]);
    // The same content spelt otherwise has another digest than the one published.
    fs::write(&path, format!("{text} ")).unwrap();
    artifact.is_wrong(&["provenance.json"]);
    fs::write(&path, &text).unwrap();
    tqc!("verify", artifact.path()).expect(0);

    // What is no record at all is bad input.
    for (bad, word) in [("{", "provenance.json"), ("{\"version\": 7}", "version 7"), ("[]", "version")] {
        fs::write(&path, bad).unwrap();
        let run = tqc!("verify", artifact.path()).expect(3);
        assert!(run.stderr.contains(word), "{}", run.stderr);
        assert!(run.stderr.contains("help: "), "{}", run.stderr);
    }
    fs::remove_file(&path).unwrap();
    let run = tqc!("verify", artifact.path()).expect(3);
    assert!(run.stderr.contains("is not an artifact of tqc"), "{}", run.stderr);
}

#[test]
fn a_whole_rebuild_finds_every_fact_that_does_not_follow_from_recipe_and_source() {
    let artifact = Artifact::new();
    let path = artifact.file("provenance.json");
    let record = read_json(&path);
    for (pointer, value) in [
        ("/stages", json!([])),
        ("/allocator", json!("chance")),
        ("/sizes/weights", json!(1)),
        ("/tokenizer_sha256", json!(null)),
        ("/recipe/seed", json!(7)),
        ("/notes", json!([{ "kind": "cast", "subject": "x", "detail": "y" }])),
        ("/outputs/0/relative_mse", json!(0.5)),
        ("/outputs/0/repairs", json!({ "scale-underflow": 3 })),
        ("/source/model_type", json!("mistral")),
    ] {
        let mut edited = record.clone();
        let place = edited.pointer_mut(pointer).expect(pointer);
        assert_ne!(*place, value, "{pointer}");
        *place = value;
        fs::write(&path, format!("{edited}\n")).unwrap();
        let run = tqc!("verify", artifact.path(), "--source", artifact.source, "--rebuild", "all").expect(1);
        let key = pointer.rsplit('/').next().unwrap();
        assert!(run.stdout.contains(key), "{pointer}: {}", run.stdout);
    }
}

#[test]
fn a_record_cannot_lead_out_of_its_folder() {
    let artifact = Artifact::new();
    let path = artifact.file("provenance.json");
    fs::copy(artifact.file("model.safetensors"), artifact.dir.path().join("outside.safetensors")).unwrap();
    fs::write(artifact.file("c:odd.safetensors"), b"").unwrap();
    for name in ["../outside.safetensors", "c:odd.safetensors", "/nowhere/x.safetensors"] {
        let mut record = read_json(&path);
        let digest = record["files"]["model.safetensors"].clone();
        record["files"].as_object_mut().unwrap().insert(name.to_owned(), digest);
        fs::write(&path, record.to_string()).unwrap();
        artifact.is_wrong(&[name]);
    }
}

#[test]
fn diff_tells_equal_from_different_and_names_what_differs() {
    let dir = temp();
    let source = fixture("llama-untied");
    let build = |name: &str, text: &str| {
        let recipe = recipe(dir.path(), text);
        let out = dir.path().join(name);
        tqc!("build", recipe, "--source", source, "-o", out).expect(0);
        out
    };
    let a = build("a", &default_codec(AFFINE_4_32));
    let b = build("b", &default_codec(AFFINE_4_32));
    let run = tqc!("diff", a, b).expect(0);
    assert!(run.stdout.starts_with("same: "), "{}", run.stdout);
    let rule =
        "[[rule]]\nmatch = \"*.layers.1.mlp.up_proj\"\ncodec = { affine = { bits = 8, group = 32 } }\n";
    let c = build("c", &format!("{}{rule}", default_codec(AFFINE_4_32)));
    let run = tqc!("diff", a, c, "--json").expect(1).json();
    let tensors: Vec<&str> =
        run["tensors"].as_array().unwrap().iter().map(|tensor| tensor["name"].as_str().unwrap()).collect();
    let module = "model.layers.1.mlp.up_proj";
    // The scales differ; that all of the biases happen not to cannot be known beforehand.
    assert!(tensors.contains(&&*format!("{module}.scales")), "{tensors:?}");
    assert!(tensors.contains(&&*format!("{module}.weight")), "{tensors:?}");
    assert!(tensors.iter().all(|tensor| tensor.starts_with(module)), "{tensors:?}");
    let keys = run["metadata"].as_array().unwrap();
    assert!(
        keys.iter().any(|key| key["file"] == "config.json" && key["key"].as_str().unwrap().contains(module))
    );
    // Plain checkpoints can be compared as well, and a folder without weights cannot.
    tqc!("diff", source, source).expect(0);
    tqc!("diff", source, fixture("llama-tied")).expect(1);
    let run = tqc!("diff", source, dir.path()).expect(3);
    assert!(run.stderr.contains("holds no safetensors file"), "{}", run.stderr);

    // A checkpoint's other files count, those that end in `config.json` too.
    let copy = dir.path().join("copy");
    copy_folder(&source, &copy);
    for file in ["tokenizer_config.json", "generation_config.json", "tokenizer.json"] {
        fs::write(copy.join(file), "{}").unwrap();
        let run = tqc!("diff", source, copy).expect(1);
        assert!(run.stdout.contains(&format!("file {file}: ")), "{}", run.stdout);
        fs::copy(source.join(file), copy.join(file)).unwrap();
    }
    tqc!("diff", source, copy).expect(0);

    let config = b.join("config.json");
    let mut changed = read_json(&config);
    changed["rope_theta"] = json!(1.0);
    write_json(&config, &changed);
    let run = tqc!("diff", a, b).expect(1);
    assert!(run.stdout.contains("config.json rope_theta: "), "{}", run.stdout);
}
