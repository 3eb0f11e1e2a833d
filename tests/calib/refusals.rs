//! What cannot be calibrated is refused, with nothing written.

use crate::*;

#[track_caller]
fn refused(dir: &Path, text: &str, source: &Path, code: i32, words: &[&str]) {
    let out = dir.join("artifact");
    let run = tqc!["build", recipe(dir, text), "--source", source, "-o", out].expect(code);
    for word in words {
        assert!(run.stderr.contains(word), "`{word}` in:\n{}", run.stderr);
    }
    assert!(!out.exists() && !dir.join(".artifact.building").exists(), "something was written");
}

#[test]
fn a_text_that_is_too_short_too_long_absent_or_another_one() {
    let dir = temp();
    let dir = dir.path();
    text(dir);
    let source = fixture("llama-untied");
    let with = |calibration: &str| {
        format!("[default]\ncodec = {AFFINE_4_32}\nencoder = \"gptq\"\n[calibration]\n{calibration}\n")
    };
    let text = |more: &str| with(&format!("text = \"text.jsonl\"\n{more}"));
    refused(dir, &text("rows = 13\ncontext = 24"), &source, 2, &["12 rows", "asks for 13", "`rows = 12`"]);
    let joined = "rows = 400\ncontext = 24\npacking = \"joined\"";
    refused(dir, &text(joined), &source, 2, &["rows of up to 24 tokens", "asks for 400", "`packing`"]);
    refused(dir, &text("rows = 8\ncontext = 65536"), &source, 2, &["65536", "context of", "[calibration]"]);
    refused(dir, &with("text = \"absent.jsonl\""), &source, 2, &["absent.jsonl", "mend the path"]);
    let pinned = format!("sha256 = \"{}\"\nrows = 8\ncontext = 24", "0".repeat(64));
    refused(dir, &text(&pinned), &source, 2, &["SHA-256", "calibration.sha256"]);
    std::fs::write(dir.join("text.jsonl"), "{\"text\": 3}\n").unwrap();
    refused(dir, &text("rows = 1"), &source, 3, &["line 1", "`text` must be a string"]);
    std::fs::write(dir.join("text.jsonl"), "\n\n").unwrap();
    refused(dir, &text("rows = 1"), &source, 3, &["holds no text"]);
}

#[test]
fn keys_out_of_range_are_shown_where_they_stand() {
    let dir = temp();
    let text = "[default]\ncodec = { affine = { bits = 4, group = 32 } }\nencoder = \"gtpq\"\n[calibration]\nrows = 0\n\
                context = 8\npacking = \"packed\"\nactivations = 3\nfew-tokens = \"share\"\nsha256 = \"12\"\n[gptq]\n\
                damping = 0.0\nsweeps = 101\nact-order = \"yes\"\n";
    let run = tqc!["plan", recipe(dir.path(), text), "--source", fixture("llama-untied")].expect(2);
    for words in [
        "no encoder is called `gtpq`",
        "did you mean `gptq`",
        "`rows` must be from 1 to 1048576, got 0",
        "`context` must be from 16",
        "`packing` cannot be `packed`",
        "`activations` must be a string",
        "did you mean `shared`",
        "`sha256` must be 64 hexadecimal digits",
        "`damping` must be above 0 and at most 10, got 0.0",
        "`sweeps` must be from 0 to 100",
        "`act-order` must be true or false",
    ] {
        assert!(run.stderr.contains(words), "`{words}` in:\n{}", run.stderr);
    }
}

#[test]
fn a_digest_needs_the_text_that_it_is_of() {
    let dir = temp();
    let digest = "0".repeat(64);
    let text = format!("[default]\ncodec = {AFFINE_4_32}\n[calibration]\nsha256 = \"{digest}\"\n");
    let run = tqc!["plan", recipe(dir.path(), &text), "--source", fixture("llama-untied")].expect(2);
    assert!(run.stderr.contains("`sha256` belongs to `text`, which is not given"), "{}", run.stderr);
}

#[test]
fn documents_too_short_to_calibrate_on_are_counted() {
    let dir = temp();
    let dir = dir.path();
    let path = text(dir);
    let lines = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, format!("{{\"text\": \"\"}}\n{lines}\n{{\"text\": \"\"}}\n")).unwrap();
    let plain = recipe_text("gptq", 4, "", "");
    let (out, said) = built(dir, "out", &plain, &fixture("qwen3"), &[]);
    let of_kind = |note: &&Value| note["kind"] == "short-documents";
    let notes: Vec<_> = said["notes"].as_array().unwrap().iter().filter(of_kind).collect();
    assert_eq!(notes.len(), 1);
    assert!(notes[0]["detail"].as_str().unwrap().contains("2 documents"), "{notes:?}");
    assert_eq!(read_json(&out.join("provenance.json"))["calibration"]["text"]["short"], 2);
    // What the search found is refused after it, and is there for a build that takes it.
    let (path, strict) = (recipe(dir, &plain), dir.join("strict"));
    let run = tqc!["build", path, "--source", fixture("qwen3"), "-o", strict, "--strict"].expect(2);
    assert!(run.stderr.contains("of the build's notes") && run.stderr.contains("--resume"), "{}", run.stderr);
    let run = tqc!["build", path, "--source", fixture("qwen3"), "-o", strict, "--resume", "--json"].expect(0);
    assert_eq!(run.json()["digest"], said["digest"]);
}

#[test]
fn inputs_that_are_not_finite_name_the_module() {
    let dir = temp();
    text(dir.path());
    let source = dir.path().join("model");
    let mut model = Model::fixture("llama-untied");
    for tensor in model.ending("layers.0.self_attn.v_proj.weight") {
        tensor.map(|w| w.signum() * 3e38);
    }
    model.write(&source);
    let recipe = recipe_text("gptq", 4, "", "[[rule]]\nmatch = \"*.v_proj\"\ncodec = \"keep\"\n");
    refused(dir.path(), &recipe, &source, 3, &["NaN or infinite", "model.layers.0"]);
}

#[test]
fn second_moments_of_another_model_basis_or_shape() {
    let dir = temp();
    let dir = dir.path();
    text(dir);
    let source = fixture("qwen3");
    let plain = recipe_text("gptq", 4, "", "");
    let path = recipe(dir, &plain);
    let moments = dir.join("moments");
    tqc!["calibrate", path, "--source", source, "-o", moments].expect(0);
    let run = tqc!["calibrate", path, "--source", source, "-o", moments].expect(2);
    assert!(run.stderr.contains("exists already"), "{}", run.stderr);
    let by_file = |more: &str| recipe_text("gptq", 4, "hessians = \"moments/hessians.json\"", more);
    refused(dir, &by_file(""), &fixture("qwen2"), 2, &["of another model"]);
    refused(
        dir,
        &by_file("[transform]\nrotation = \"hadamard\"\n"),
        &source,
        2,
        &["of another basis", "none"],
    );
    let contents = moments.join("hessians.json");
    let whole = read_json(&contents);
    let spoilt = |change: &dyn Fn(&mut Value)| {
        let mut value = whole.clone();
        change(&mut value);
        write_json(&contents, &value);
    };
    spoilt(&|value| value["format"] = "tqc-hessians/9".into());
    refused(dir, &by_file(""), &source, 3, &["tqc-hessians/9"]);
    spoilt(&|value| value["inputs"].as_array_mut().unwrap().truncate(1));
    refused(dir, &by_file(""), &source, 2, &["holds no second moments of what goes into"]);
    spoilt(&|value| value["inputs"][0]["file"] = "../moments/hessians-000.safetensors".into());
    refused(dir, &by_file(""), &source, 3, &["no digest"]);
    spoilt(&|value| value["model_type"] = "llama".into());
    refused(dir, &by_file(""), &source, 2, &["of another model", "llama"]);
    spoilt(&|value| value["inputs"][0]["expert"] = 0.into());
    refused(dir, &by_file(""), &source, 3, &["of expert 0", "has none such"]);
    spoilt(&|value| {
        let again = value["inputs"][0].clone();
        value["inputs"].as_array_mut().unwrap().push(again);
    });
    refused(dir, &by_file(""), &source, 3, &["is the second that says what goes into"]);
    spoilt(&|_| {});
    let both = by_file("").replace("hessians =", "activations = \"sequential\"\nhessians =");
    refused(dir, &both, &source, 2, &["`hessians` names a file instead", "leave one of the two out"]);
    let file = moments.join("hessians-000.safetensors");
    let tensors = read_safetensors(&file);
    let write = |change: &dyn Fn(&mut Vec<f32>)| {
        let mut tensors = tensors.clone();
        let first = tensors.iter_mut().find(|tensor| tensor.name.ends_with(".hessian")).unwrap();
        let mut values = first.floats();
        change(&mut values);
        *first = Tensor::of_floats(&first.name, &first.shape, &values);
        write_safetensors(&file, &tensors);
        let digest = tqc::digest::Digest::of(&std::fs::read(&file).unwrap()).to_string();
        let mut value = whole.clone();
        value["files"]["hessians-000.safetensors"] = digest.into();
        write_json(&contents, &value);
    };
    write(&|values| values[1] = f32::NAN);
    refused(dir, &by_file(""), &source, 3, &["holds NaN at [0, 1]"]);
    write(&|values| values[1] += 1e6);
    refused(dir, &by_file(""), &source, 3, &["is not symmetric"]);
    write(&|values| values[0] = -1.0);
    refused(dir, &by_file(""), &source, 3, &["holds -1 at [0, 0]"]);
    flip_byte(&file, 4000);
    refused(dir, &by_file(""), &source, 3, &["SHA-256"]);
    let sequential = recipe_text("gptq", 4, "activations = \"sequential\"", "");
    let path = recipe(dir, &sequential);
    let run = tqc!["calibrate", path, "--source", source, "-o", dir.join("other")].expect(2);
    assert!(run.stderr.contains("sequential"), "{}", run.stderr);
}

#[test]
fn a_budget_below_what_a_layer_needs_is_refused_with_the_least() {
    let dir = temp();
    text(dir.path());
    let recipe = recipe_text("gptq", 4, "", "");
    let path = crate::recipe(dir.path(), &recipe);
    let run = tqc!["plan", path, "--source", fixture("llama-untied"), "--memory", "1MiB"].expect(2);
    assert!(run.stderr.contains("of working memory") && run.stderr.contains("--memory"), "{}", run.stderr);
}
