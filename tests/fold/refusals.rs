//! What cannot be exact is refused with its reason, and nothing is written.

use crate::*;

/// The refusal of a build.
fn refused(text: &str, source: &Path, code: i32) -> String {
    let dir = temp();
    let path = recipe(dir.path(), text);
    let out = dir.path().join("artifact");
    let run = tqc!("build", path, "--source", source, "-o", out).expect(code);
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["test.toml"], "{}", run.stderr);
    run.stderr
}

#[track_caller]
fn says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no `{word}` in:\n{text}");
    }
}

fn rotation(rotation: &str) -> String {
    format!("[default]\ncodec = \"f32\"\n[transform]\nrotation = {rotation}\n")
}

#[test]
fn a_width_without_a_matrix_is_refused_with_the_nearest_blocks_and_auto_takes_those() {
    let dir = temp();
    // 100 = 4 · 25: 25 needs a core of order 100, and none is known.
    let model = Model::llama(100 * 32 / 32, 64, 64, 1);
    let mut model = model;
    model.config["num_attention_heads"] = 4.into();
    model.config["num_key_value_heads"] = 4.into();
    model.config["head_dim"] = 25.into();
    // Rotary pairs need an even head.
    model.config["num_attention_heads"] = 2.into();
    model.config["num_key_value_heads"] = 2.into();
    model.config["head_dim"] = 50.into();
    let at = dir.path().join("source");
    model.write(&at);
    let said = refused(&rotation("\"hadamard\""), &at, 2);
    says(&said, &["no Hadamard matrix of order 100", "block-hadamard", "block = 20", "test.toml:5:12"]);
    let (_, json) = built(dir.path(), &rotation("\"auto\""), &at, &[]);
    assert_eq!(json["transform"]["r1"]["block"], 20);
    assert_eq!(json["transform"]["r2"], serde_json::Value::Null);
    says(json["transform"]["r2_reason"].as_str().unwrap(), &["no Hadamard matrix"]);
    assert_eq!(json["notes"][0]["kind"], "fallback");
    let strict =
        tqc!("build", dir.path().join("test.toml"), "--source", at, "-o", dir.path().join("s"), "--strict");
    says(&strict.expect(2).stderr, &["blocks of 20"]);
}

#[test]
fn blocks_that_do_not_fit_are_refused() {
    let block = |block: u32| rotation(&format!("{{ kind = \"block-hadamard\", block = {block} }}"));
    says(&refused(&block(48), &fixture("llama-tied"), 2), &["blocks of 48 do not divide", "width of 128"]);
    says(&refused(&block(100), &fixture("llama-tied"), 2), &["no Hadamard matrix of order 100"]);
}

#[test]
fn value_heads_of_gated_attention_are_refused_and_left_alone_by_auto() {
    let text = rotation("{ kind = \"hadamard\", r2 = true }");
    says(
        &refused(&text, &fixture("qwen3_5"), 2),
        &["value heads cannot be rotated", "gated channel by channel"],
    );
    let dir = temp();
    let (_, json) = built(dir.path(), &rotation("\"hadamard\""), &fixture("qwen3_5"), &[]);
    says(json["transform"]["r2_reason"].as_str().unwrap(), &["gated"]);
}

#[test]
fn contradictions_of_a_recipe_are_refused_before_a_source_is_read() {
    let with = |more: &str| format!("[default]\ncodec = \"f32\"\n[transform]\n{more}\n");
    let nowhere = Path::new("no/such/folder");
    for (text, words) in [
        ("gamma-fold = false\nrotation = \"hadamard\"", vec!["needs `gamma-fold`", "test.toml:5:14"]),
        ("rotation = \"hadamrd\"", vec!["no rotation is called `hadamrd`", "did you mean `hadamard`?"]),
        ("rotation = { kind = \"hadamard\", block = 64 }", vec!["`block` is a setting of `block-hadamard`"]),
        ("rotation = { kind = \"hadamard\", steps = 6 }", vec!["`steps` is a setting of `optrot`"]),
        ("rotation = { kind = \"hadamard\", r2 = 1 }", vec!["true, false or \"auto\""]),
        ("rotation = { seed = 1 }", vec!["needs `kind`"]),
        ("rotation = 7", vec!["a kind's name or a table", "got an integer"]),
        ("rotation = { kind = \"optrot\", steps = 0 }", vec!["from 1 to 10000, got 0"]),
        ("rotation = { kind = \"hadamard\", r2 = true }\nvalue-order = true", vec!["undo each other"]),
        ("rotation = \"measure\"\ntokens = 3", vec!["`tokens` must be from 16"]),
        ("tokens = 64", vec!["`tokens` is a setting of `measure`, not of `none`"]),
        ("rotation = \"hadamard\"\ntext = \"a.jsonl\"", vec!["`text` is a setting of `measure`"]),
        ("rotation = { kind = \"none\", r2 = true }", vec!["`r2` is a setting of `hadamard`, not of `none`"]),
        ("gamma-fold = \"yes\"", vec!["`gamma-fold` must be true or false"]),
    ] {
        says(&refused(&with(text), nowhere, 2), &words);
    }
    let layout = "[default]\ncodec = \"f32\"\n[output]\nlayout = \"pytorch\"\n";
    says(&refused(layout, nowhere, 2), &["no layout is called `pytorch`", "known names"]);
}

#[test]
fn codes_have_no_place_in_the_hugging_face_layout() {
    let text = format!("{}[output]\nlayout = \"huggingface\"\n", default_codec(AFFINE_4_32));
    says(&refused(&text, &fixture("qwen3"), 2), &["affine-4g32", "has no place for", "test.toml:5:10"]);
}

#[test]
fn an_unknown_tensor_of_the_streams_width_is_refused_unless_no_basis_changes() {
    let dir = temp();
    let mut source = Model::fixture("llama-untied");
    source.shards[0].push(Tensor::random("model.steering.weight", &[3, 128], 5));
    let at = dir.path().join("source");
    source.write(&at);
    let keep = "[keep]\ntensors = [\"model.steering.weight\"]\n";
    let said = refused(&format!("{}{keep}", rotation("\"hadamard\"")), &at, 2);
    says(&said, &["`model.steering.weight` has an axis of 128", "leave it in the old basis"]);
    built(dir.path(), &format!("[default]\ncodec = \"f32\"\n{keep}"), &at, &[]);

    // One without such an axis is kept beside the fold.
    source.shards[0].pop();
    source.shards[0].push(Tensor::random("model.steering.weight", &[3, 7], 5));
    source.write(&at);
    let (out, _) = built(dir.path(), &format!("{}{keep}", rotation("\"hadamard\"")), &at, &[]);
    assert!(read_folder(&out.join("kept")).contains_key("model.steering.weight"));
}

#[test]
fn what_a_measurement_needs_is_asked_for_before_it_begins() {
    let dir = temp();
    let mut source = Model::fixture("qwen2");
    source.files.remove("tokenizer.json");
    let at = dir.path().join("source");
    source.write(&at);
    let measure =
        |more: &str| format!("[default]\ncodec = \"bf16\"\n[transform]\nrotation = \"measure\"\n{more}");
    says(&refused(&measure(""), &at, 2), &["no `tokenizer.json`", "fetch `tokenizer.json`"]);
    let absent = measure("text = \"no-such.jsonl\"\n");
    says(&refused(&absent, &fixture("qwen2"), 2), &["no-such.jsonl", "cannot be read"]);
    let r2 = "[default]\ncodec = \"bf16\"\n[transform]\nrotation = { kind = \"measure\", r2 = true }\n";
    says(&refused(r2, &fixture("qwen3_5"), 2), &["value heads cannot be rotated"]);
    // An occupied target is known before anything is measured.
    let out = dir.path().join("occupied");
    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("thesis.txt"), "words").unwrap();
    let path = recipe(dir.path(), &measure(""));
    let run = tqc!("build", path, "--source", fixture("qwen2"), "-o", out).expect(2);
    says(&run.stderr, &["is not an artifact of tqc"]);
    assert!(!run.stderr.contains("measured:"), "{}", run.stderr);
}

#[test]
fn a_source_whose_own_states_overflow_is_bad_input() {
    let dir = temp();
    let mut source = Model::fixture("llama-untied");
    for tensor in source.shards.iter_mut().flatten() {
        if tensor.name == "model.layers.0.input_layernorm.weight" {
            tensor.map(|_| 1e30);
        }
    }
    let at = dir.path().join("source");
    source.write(&at);
    says(&refused(&rotation("\"hadamard\""), &at, 3), &["not finite after 1 layers", "out of range"]);
}

#[test]
fn a_checkpoint_in_mlx_layout_cannot_be_written_back() {
    let dir = temp();
    let (mlx, _) = built(dir.path(), "[default]\ncodec = \"keep\"\n", &fixture("qwen3_5"), &[]);
    let text = "[default]\ncodec = \"keep\"\n[output]\nlayout = \"huggingface\"\n";
    says(&refused(text, &mlx, 3), &["cannot be written back in the Hugging Face layout"]);
}

#[test]
fn families_whose_fold_is_not_exact_are_refused_with_the_reason() {
    let dir = temp();
    for (model_type, word) in
        [("gemma3_text", "a norm on what a sublayer gives"), ("gpt2", "LayerNorm"), ("deepseek_v3", "latent")]
    {
        let mut model = Model::llama(64, 64, 64, 1);
        model.config["model_type"] = model_type.into();
        let at = dir.path().join(model_type);
        model.write(&at);
        let said = refused(&rotation("\"hadamard\""), &at, 3);
        says(&said, &[model_type, word]);
    }
}

#[test]
fn a_gain_that_is_no_number_is_refused_by_name() {
    let dir = temp();
    let mut source = Model::fixture("llama-tied");
    for tensor in source.shards.iter_mut().flatten() {
        if tensor.name == "model.layers.1.input_layernorm.weight" {
            tensor.put_u16(&[5], 0x7fc0);
        }
    }
    let at = dir.path().join("source");
    source.write(&at);
    let said = refused(&rotation("\"hadamard\""), &at, 3);
    says(&said, &["model.layers.1.input_layernorm.weight", "NaN", "[5]"]);
}
