//! Checkpoints that must be refused: exit code 3, file and tensor and remedy named, nothing written.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::*;
use crate::tqc;

/// A source folder with room around it.
struct Case {
    dir: TempDir,
}

impl Case {
    fn of(model: &Model) -> Self {
        let dir = temp();
        model.write(&dir.path().join("source"));
        Self { dir }
    }

    fn source(&self) -> PathBuf {
        self.dir.path().join("source")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.source().join(name)
    }

    fn build(&self, recipe_text: &str, extra: &[&str]) -> Run {
        let recipe = recipe(self.dir.path(), recipe_text);
        let mut args = crate::args!["build", recipe, "--source", self.source(), "-o", self.output()];
        args.extend(extra.iter().map(Into::into));
        finish(command(args))
    }

    /// A folder whose parents do not exist, so that even those must not be left behind.
    fn output(&self) -> PathBuf {
        self.dir.path().join("new/parents/out")
    }

    /// Refused as bad input, with all these words, and without a trace on disk.
    #[track_caller]
    fn refused(&self, words: &[&str]) -> Run {
        self.refused_by(&default_codec(AFFINE_4_32), 3, words)
    }

    #[track_caller]
    fn refused_by(&self, recipe_text: &str, code: i32, words: &[&str]) -> Run {
        let before = listing(&self.source());
        let run = self.build(recipe_text, &[]).expect(code);
        for word in words {
            assert!(run.stderr.contains(word), "`{word}` is not in:\n{}", run.stderr);
        }
        assert!(run.stderr.contains("\nhelp: "), "no remedy in:\n{}", run.stderr);
        assert_eq!(run.stdout, "");
        assert!(!self.dir.path().join("new").exists(), "something was written");
        assert_eq!(listing(&self.source()), before, "the source was written to");
        run
    }
}

fn listing(dir: &Path) -> Vec<(PathBuf, u64)> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let mut files: Vec<_> =
        entries.map(|entry| (entry.path(), entry.path().symlink_metadata().unwrap().len())).collect();
    files.sort();
    files
}

fn small() -> Model {
    Model::fixture("llama-tied")
}

fn sharded() -> Model {
    Model::fixture("llama-untied")
}

#[test]
fn refuses_a_truncated_shard() {
    let case = Case::of(&sharded());
    let shard = case.file("model-00002-of-00003.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 1000]).unwrap();
    case.refused(&["model-00002-of-00003.safetensors", "truncated", "1000", "fetch this file again"]);
    // Cut inside the header, inside the length word, and to nothing.
    for len in [100, 5, 0] {
        fs::write(&shard, &bytes[..len]).unwrap();
        case.refused(&["model-00002-of-00003.safetensors", "fetch this file again"]);
    }
}

#[test]
fn refuses_a_header_longer_than_its_file() {
    let case = Case::of(&small());
    let file = case.file("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    bytes[..8].copy_from_slice(&50_000_000u64.to_le_bytes());
    fs::write(&file, &bytes).unwrap();
    case.refused(&["model.safetensors", "50000000", "fetch this file again"]);
    bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&file, &bytes).unwrap();
    case.refused(&["model.safetensors", "18446744073709551615", "limit"]);
}

/// The header's JSON of a file, changed, and the same data behind it.
fn edit_header(path: &Path, edit: impl FnOnce(&mut Value)) {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    edit(&mut header);
    let mut out = raw_header(&header.to_string());
    out.extend_from_slice(&bytes[8 + length..]);
    fs::write(path, out).unwrap();
}

#[test]
fn refuses_overlapping_and_out_of_range_offsets() {
    let gate = "model.layers.0.mlp.gate_proj.weight";
    let case = Case::of(&small());
    edit_header(&case.file("model.safetensors"), |header| {
        header[gate]["data_offsets"] = header["model.layers.0.mlp.up_proj.weight"]["data_offsets"].clone();
    });
    case.refused(&["model.safetensors", gate, "model.layers.0.mlp.up_proj.weight", "inside"]);

    let case = Case::of(&small());
    edit_header(&case.file("model.safetensors"), |header| {
        let begin = header[gate]["data_offsets"][0].as_u64().unwrap() + (1 << 40);
        header[gate]["data_offsets"] = json!([begin, begin + 256 * 128 * 2]);
    });
    case.refused(&["model.safetensors", gate]);

    let case = Case::of(&small());
    edit_header(&case.file("model.safetensors"), |header| {
        header[gate]["data_offsets"] = json!([u64::MAX - 1, u64::MAX]);
    });
    case.refused(&["model.safetensors", gate, "holds 1 bytes"]);

    let case = Case::of(&small());
    edit_header(&case.file("model.safetensors"), |header| {
        let (begin, end) = (&header[gate]["data_offsets"][0], &header[gate]["data_offsets"][1]);
        header[gate]["data_offsets"] = json!([end, begin]);
    });
    case.refused(&["model.safetensors", gate, "after its end"]);
}

#[test]
fn refuses_a_tensor_that_two_shards_hold() {
    let mut model = sharded();
    let twice = model.shards[0][1].clone();
    model.shards[2].push(twice.clone());
    let case = Case::of(&model);
    case.refused(&[&twice.name, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"]);
}

#[test]
fn refuses_an_index_that_names_a_missing_file_or_tensor() {
    let case = Case::of(&sharded());
    let path = case.file("model.safetensors.index.json");
    let whole = read_json(&path);
    let mut index = whole.clone();
    index["weight_map"]["model.norm.weight"] = json!("model-00004-of-00003.safetensors");
    write_json(&path, &index);
    case.refused(&["model-00004-of-00003.safetensors", "model.norm.weight", "missing"]);

    let mut index = whole.clone();
    index["weight_map"]["model.ghost.weight"] = json!("model-00002-of-00003.safetensors");
    write_json(&path, &index);
    case.refused(&["model.ghost.weight", "model-00002-of-00003.safetensors", "model.safetensors.index.json"]);

    // A tensor that the file has and the index does not list would be lost to readers of the index.
    let mut index = whole;
    index["weight_map"].as_object_mut().unwrap().remove("model.norm.weight");
    write_json(&path, &index);
    case.refused(&["model.norm.weight", "not listed"]);
}

#[test]
fn refuses_a_missing_shard_with_and_without_an_index() {
    let case = Case::of(&sharded());
    fs::remove_file(case.file("model-00002-of-00003.safetensors")).unwrap();
    case.refused(&["model-00002-of-00003.safetensors", "missing", "fetch the missing file"]);
    fs::remove_file(case.file("model.safetensors.index.json")).unwrap();
    case.refused(&["model-00002-of-00003.safetensors", "missing"]);
}

#[test]
fn refuses_paths_in_an_index_that_leave_the_folder() {
    let case = Case::of(&sharded());
    let outside = case.dir.path().join("outside.safetensors");
    fs::copy(case.file("model-00002-of-00003.safetensors"), &outside).unwrap();
    let path = case.file("model.safetensors.index.json");
    let whole = fs::read_to_string(&path).unwrap();
    for bad in ["../outside.safetensors", outside.to_str().unwrap(), "sub/x.safetensors"] {
        fs::write(&path, whole.replace("model-00002-of-00003.safetensors", bad)).unwrap();
        case.refused(&["model.safetensors.index.json", bad, "file name"]);
    }
    fs::write(&path, whole).unwrap();
    let shard = case.file("model-00002-of-00003.safetensors");
    fs::remove_file(&shard).unwrap();
    symlink(&outside, &shard).unwrap();
    case.refused(&["model-00002-of-00003.safetensors", "symbolic link"]);
    symlink("nowhere", case.file("tokenizer.model")).unwrap();
    fs::remove_file(&shard).unwrap();
    fs::copy(&outside, &shard).unwrap();
    case.refused(&["tokenizer.model", "symbolic link"]);
}

#[test]
fn refuses_a_dtype_or_shape_that_the_config_does_not_call_for() {
    let name = "model.layers.1.mlp.up_proj.weight";
    let mut model = small();
    model.tensor(name).dtype = "I16".to_owned();
    Case::of(&model).refused(&["model.safetensors", name, "I16", "BF16, F16 or F32"]);

    let mut model = small();
    model.tensor(name).shape = vec![128, 256];
    Case::of(&model).refused(&["model.safetensors", name, "[128, 256]", "[256, 128]"]);

    let mut model = small();
    model.config["vocab_size"] = json!(513);
    Case::of(&model).refused(&["model.safetensors", "model.embed_tokens.weight", "[513, 128]"]);
}

/// Quiet NaN, infinity and minus infinity in bf16.
const NAN: u16 = 0x7fc0;
const INFINITY: u16 = 0x7f80;
const MINUS_INFINITY: u16 = 0xff80;

#[test]
fn refuses_nan_and_infinity_and_says_where() {
    let kept = default_codec("\"keep\"");
    let quantized = default_codec(AFFINE_4_32);
    let mlp = "model.layers.1.mlp.up_proj.weight";
    let norm = "model.layers.0.input_layernorm.weight";
    for (bits, word) in [(NAN, "NaN"), (INFINITY, "inf"), (MINUS_INFINITY, "-inf")] {
        let mut model = small();
        model.tensor(mlp).put_u16(&[201, 77], bits);
        let case = Case::of(&model);
        for recipe in [&quantized, &kept, &default_codec("\"mxfp4\""), &default_codec("\"f16\"")] {
            case.refused_by(recipe, 3, &["model.safetensors", mlp, "[201, 77]", word]);
        }
        let mut model = small();
        model.tensor(norm).put_u16(&[127], bits);
        Case::of(&model).refused(&["model.safetensors", norm, "[127]", word]);
    }
}

#[test]
fn the_index_of_a_nan_counts_in_the_source_tensor() {
    // Rows of an expert's second half, and a kernel that is transposed on its way.
    let mut model = Model::fixture("qwen3_5_moe");
    let stack = "model.language_model.layers.1.mlp.experts.gate_up_proj";
    let shape = model.tensor(stack).shape.clone();
    let last: Vec<u64> = shape.iter().map(|d| d - 1).collect();
    model.tensor(stack).put_u16(&last, NAN);
    let index = format!("[{}, {}, {}]", last[0], last[1], last[2]);
    Case::of(&model).refused(&[stack, &index, "NaN"]);

    let mut model = Model::fixture("qwen3_5");
    let kernel = "model.visual.patch_embed.proj.weight";
    model.tensor(kernel).put_u16(&[3, 2, 1, 3, 2], NAN);
    Case::of(&model).refused(&[kernel, "[3, 2, 1, 3, 2]", "NaN"]);
}

#[test]
fn of_several_nans_the_same_one_is_reported_whatever_the_threads() {
    let mut model = sharded();
    for name in
        ["model.layers.0.mlp.gate_proj.weight", "model.layers.2.mlp.down_proj.weight", "lm_head.weight"]
    {
        for row in [5, 90] {
            model.tensor(name).put_u16(&[row, 3], NAN);
        }
    }
    let case = Case::of(&model);
    case.refused(&["NaN", "[5, 3]"]);
    let mut said = Vec::new();
    for threads in ["1", "2", "4", "4", "4"] {
        // Without a budget, threads are few where tensors are small.
        let extra = ["--threads", threads, "--memory", "64MiB"];
        said.push(case.build(&default_codec(AFFINE_4_32), &extra).expect(3).stderr);
    }
    assert!(said.iter().all(|stderr| *stderr == said[0]), "{said:#?}");
}

#[test]
fn refuses_a_tensor_without_elements() {
    let mut model = small();
    model.add(Tensor::new("model.layers.0.empty", "BF16", &[0, 128], Vec::new()));
    Case::of(&model).refused(&["model.safetensors", "model.layers.0.empty", "[0, 128]", "no elements"]);
}

#[test]
fn refuses_a_source_that_is_already_quantized() {
    for key in ["quantization", "quantization_config", "compression_config"] {
        let mut model = small();
        model.config[key] = json!({ "bits": 4, "group_size": 64 });
        Case::of(&model).refused(&["config.json", key, "already quantized"]);
    }
    // Packed tensors give it away where the config is silent.
    let mut model = small();
    let name = "model.layers.0.mlp.up_proj.weight";
    *model.tensor(name) = Tensor::new(name, "U32", &[256, 16], vec![1; 256 * 16 * 4]);
    model.add(Tensor::random("model.layers.0.mlp.up_proj.scales", &[256, 4], 1));
    Case::of(&model).refused(&[
        "model.safetensors",
        name,
        "model.layers.0.mlp.up_proj.scales",
        "already quantized",
    ]);

    // And so does what this program writes itself.
    let dir = temp();
    let recipe = recipe(dir.path(), &default_codec(AFFINE_4_32));
    let artifact = dir.path().join("artifact");
    tqc!("build", recipe, "--source", fixture("llama-tied"), "-o", artifact).expect(0);
    let run = tqc!("build", recipe, "--source", artifact, "-o", dir.path().join("again")).expect(3);
    assert!(run.stderr.contains("already quantized"), "{}", run.stderr);
    assert!(!dir.path().join("again").exists());
}

#[test]
fn refuses_an_unknown_model_type_and_a_missing_config() {
    let mut model = small();
    model.config["model_type"] = json!("gpt-oss");
    Case::of(&model).refused(&["config.json", "model_type", "gpt-oss", "`llama`", "`qwen3_5_moe`"]);
    model.config.as_object_mut().unwrap().remove("model_type");
    Case::of(&model).refused(&["config.json", "model_type", "missing"]);
    let case = Case::of(&model);
    fs::remove_file(case.file("config.json")).unwrap();
    case.refused(&["config.json"]);
    fs::write(case.file("config.json"), "{\"model_type\": \"llama\"").unwrap();
    case.refused(&["config.json", "line 1"]);
    fs::write(case.file("config.json"), "[]").unwrap();
    case.refused(&["config.json", "not a JSON object"]);
}

#[test]
fn names_every_missing_config_key_at_once() {
    let mut model = small();
    for key in ["hidden_size", "intermediate_size"] {
        model.config.as_object_mut().unwrap().remove(key);
    }
    Case::of(&model).refused(&["config.json", "hidden_size", "intermediate_size", "missing"]);
}

#[test]
fn a_missing_head_may_be_a_tied_one_that_the_config_does_not_tell_of() {
    let mut model = Model::fixture("llama-tied");
    model.config.as_object_mut().unwrap().remove("tie_word_embeddings");
    Case::of(&model).refused(&[
        "`lm_head.weight` [512, 128] is missing",
        "\nhelp: if the head",
        "tie_word_embeddings",
    ]);
}

#[test]
fn refuses_config_values_that_no_reader_knows() {
    let mut model = small();
    model.config["hidden_act"] = json!("gelu");
    Case::of(&model).refused(&["config.json", "hidden_act", "gelu", "silu"]);
    let mut model = small();
    model.config["rope_scaling"] = json!({ "rope_type": "spiral", "factor": 2.0 });
    Case::of(&model).refused(&["config.json", "rope_type", "spiral", "llama3"]);
    for (key, value) in [
        ("rms_norm_eps", json!("1e-5")),
        ("rope_theta", json!(-1)),
        ("rope_parameters", json!({ "rope_theta": "x" })),
    ] {
        let mut model = small();
        model.config[key] = value;
        Case::of(&model).refused(&["config.json", key, "a positive number is needed"]);
    }
    for (fixture, key, value) in [
        ("llama-tied", "num_hidden_layers", json!(-1)),
        ("llama-tied", "num_hidden_layers", json!(1e6)),
        ("llama-tied", "hidden_size", json!("128")),
        ("llama-tied", "tie_word_embeddings", json!("yes")),
        ("llama-tied", "num_key_value_heads", json!(3)),
        ("qwen2", "vocab_size", json!(0)),
    ] {
        let mut model = Model::fixture(fixture);
        model.config[key] = value.clone();
        Case::of(&model).refused(&["config.json", key]);
    }
    let mut model = Model::fixture("qwen3_5");
    model.config["text_config"]["layer_types"] = json!(["full_attention"]);
    Case::of(&model).refused(&["config.json", "text_config.layer_types", "full_attention_interval"]);
}

#[test]
fn refuses_an_unknown_tensor_unless_the_recipe_keeps_it() {
    let mut model = small();
    let extra = Tensor::random("model.layers.0.adapter.weight", &[8, 40], 5);
    model.add(extra.clone());
    model.add(Tensor::new("steps", "I64", &[], 7u64.to_le_bytes().to_vec()));
    let case = Case::of(&model);
    case.refused(&["model.safetensors", "model.layers.0.adapter.weight", "`steps`", "llama", "[keep]"]);

    let keep = format!("{}[keep]\ntensors = [\"*.adapter.weight\", \"steps\"]\n", default_codec(AFFINE_4_32));
    case.build(&keep, &[]).expect(0);
    let stored = read_folder(&case.output().join("kept"));
    assert_eq!(stored["model.layers.0.adapter.weight"], extra);
    assert_eq!(stored["steps"].bytes, 7u64.to_le_bytes());
    assert_eq!(stored["steps"].shape, Vec::<u64>::new());
    tqc!("verify", case.output(), "--source", case.source(), "--rebuild", "all").expect(0);
}

#[test]
fn no_rule_touches_what_the_recipe_keeps() {
    let mut model = small();
    let kept = [
        Tensor::new("steps", "I64", &[3], vec![1; 24]),
        Tensor::new("flag", "BOOL", &[], vec![1]),
        Tensor::random("model.extra.weight", &[8, 32], 3),
    ];
    kept.iter().for_each(|tensor| model.add(tensor.clone()));
    let case = Case::of(&model);
    let text = "[default]\ncodec = \"bf16\"\n[[rule]]\nmatch = \"*\"\ncodec = \"f16\"\n\
                [keep]\ntensors = [\"steps\", \"flag\", \"model.extra.weight\"]\n";
    case.build(text, &[]).expect(0);
    let mut stored = read_folder(&case.output());
    let folder = case.output().join("kept");
    if folder.exists() {
        stored.extend(read_folder(&folder));
    }
    for tensor in kept {
        assert_eq!(stored[&tensor.name], tensor);
    }
    assert_eq!(stored["model.norm.weight"].dtype, "F16");
}

#[test]
fn refuses_a_keep_pattern_that_matches_no_tensor() {
    let keep = format!("{}[keep]\ntensors = [\"*.adapter.weight\"]\n", default_codec(AFFINE_4_32));
    Case::of(&small()).refused_by(&keep, 2, &["*.adapter.weight", "matches no tensor", "test.toml"]);
}

#[test]
fn refuses_a_missing_tensor() {
    let mut model = small();
    model.remove("model.layers.1.self_attn.k_proj.weight");
    Case::of(&model).refused(&["model.layers.1.self_attn.k_proj.weight", "[64, 128]", "missing", "llama"]);
}

#[test]
fn drops_a_tied_models_copy_of_the_head_with_a_reason() {
    let mut model = small();
    let mut copy = model.tensor("model.embed_tokens.weight").clone();
    copy.name = "lm_head.weight".to_owned();
    model.add(copy);
    let case = Case::of(&model);
    case.build(&default_codec(AFFINE_4_32), &[]).expect(0);
    let record = read_json(&case.output().join("provenance.json"));
    let tensors = record["source"]["tensors"].as_array().unwrap();
    let head = tensors.iter().find(|tensor| tensor["name"] == "lm_head.weight").expect("it is accounted for");
    assert_eq!(head["fate"], "dropped");
    assert!(head["reason"].as_str().unwrap().contains("tied"), "{head}");
    assert!(!read_folder(&case.output()).keys().any(|name| name.contains("lm_head")));
}

#[test]
fn kept_tensors_never_lie_where_readers_would_take_them_for_something_else() {
    // Beside `embed_tokens` the first would be its scales; readers take the second as a sign of another layout.
    let mut model = Model::fixture("qwen3_5");
    let names = ["model.language_model.embed_tokens.scales", "mtp.extra"];
    for name in names {
        model.add(Tensor::random(name, &[512, 4], 5));
    }
    let keep = format!("{}[keep]\ntensors = [\"*.scales\", \"mtp.extra\"]\n", default_codec(AFFINE_4_32));
    let case = Case::of(&model);
    case.build(&keep, &[]).expect(0);
    let kept: Vec<String> = read_folder(&case.output().join("kept")).into_keys().collect();
    assert_eq!(kept, ["model.language_model.embed_tokens.scales", "mtp.extra"]);
    let main = read_folder(&case.output());
    assert!(names.iter().all(|name| !main.contains_key(*name)));
    tqc!("verify", case.output(), "--source", case.source(), "--rebuild", "all").expect(0);
}

#[test]
fn refuses_a_declared_dtype_that_no_weight_has_and_two_that_differ() {
    let mut model = small();
    model.config["torch_dtype"] = json!("float64");
    Case::of(&model).refused(&["config.json", "torch_dtype", "float64", "bfloat16"]);
    model.config["torch_dtype"] = json!("bfloat16");
    model.config["dtype"] = json!("float16");
    Case::of(&model).refused(&["config.json", "`dtype`", "float16", "bfloat16"]);
    model.config["dtype"] = json!("auto");
    Case::of(&model).build(&default_codec(AFFINE_4_32), &[]).expect(0);
}
