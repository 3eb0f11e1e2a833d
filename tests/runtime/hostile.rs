//! Folders and requests that must be refused: an error that names the thing, the right exit code, a remedy, no panic.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};
use tempfile::TempDir;
use tqc::artifact::open::Artifact;
use tqc::failure::{Exit, Failure, Outcome};

use super::*;
use crate::common::{
    AFFINE_4_32, Model as Source, Tensor, copy_folder, default_codec, flip_byte, read_json, read_safetensors,
    recipe, temp, write_json, write_safetensors,
};
use crate::random::{Hybrid, Sizes};
use crate::tqc;

/// All that a user does with a folder, on one thread.
fn run(dir: &Path, ids: &[u32]) -> Outcome<Vec<f32>> {
    let model = Model::new(Weights::open(dir)?, Cpu::new(Isa::best(), 1, Precision::Exact))?;
    let mut state = model.state();
    let pass = model.forward(&mut state, ids, Want::Last)?;
    if let Ok(head) = model.draft() {
        head.forward(&model, &mut head.state(&model), &ids[ids.len() - 1..], &pass.hidden)?;
    }
    Ok(pass.logits)
}

#[track_caller]
fn check(what: &str, error: &dyn Failure, exit: Exit, words: &[&str]) {
    let text = format!("{error}\n{}", error.help().unwrap_or_default());
    assert_eq!(error.exit(), exit, "{what}: {text}");
    for word in words {
        assert!(text.contains(word), "{what}: `{word}` is not in: {text}");
    }
    assert!(error.help().is_some() || text.contains("\nhelp: "), "{what}: no remedy: {text}");
    assert!(text.len() < 20_000, "{what}: {} bytes of message", text.len());
}

/// The folder is refused as bad input, with these words.
#[track_caller]
fn refused(what: &str, dir: &Path, words: &[&str]) {
    match run(dir, &[1, 2, 3]) {
        Ok(_) => panic!("{what}: accepted"),
        Err(error) => check(what, &*error, Exit::Input, words),
    }
}

/// A checkpoint that is written, run and refused.
#[track_caller]
fn refused_model(what: &str, model: &Source, words: &[&str]) {
    let dir = temp();
    model.write(dir.path());
    refused(what, dir.path(), words);
}

/// Names of all tensors and whether the runtime has no use for them.
fn tensors(model: &Source) -> Vec<String> {
    model.shards.iter().flatten().map(|tensor| tensor.name.clone()).collect()
}

#[test]
fn every_tensor_must_be_there() {
    for name in fixtures() {
        let source = Source::fixture(&name);
        for tensor in tensors(&source) {
            let mut model = source.clone();
            model.remove(&tensor);
            // Without the one that shows that there is a head or a tower, the others are not known.
            let sign = ["mtp.fc.weight", "model.visual.patch_embed.proj.weight"].contains(&tensor.as_str());
            match sign {
                true => refused_model(
                    &tensor,
                    &model,
                    &[tensor.rsplit_once('.').unwrap().0.split('.').next().unwrap(), "not part of"],
                ),
                false => refused_model(&tensor, &model, &[&format!("`{tensor}`"), "missing"]),
            }
        }
    }
}

#[test]
fn no_tensor_may_be_there_that_nobody_knows() {
    for name in fixtures() {
        for extra in ["model.layers.9.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bogus", "x"] {
            let mut model = Source::fixture(&name);
            model.add(Tensor::random(extra, &[4, 4], 1));
            refused_model(extra, &model, &[&format!("`{extra}`"), "not part of"]);
        }
        // A bias that the config does not announce would be left out in silence.
        let mut model = Source::fixture(&name);
        let bias = match name.as_str() {
            name if name.starts_with("qwen3_5") => "model.language_model.layers.0.linear_attn.out_proj.bias",
            _ => "model.layers.0.self_attn.o_proj.bias",
        };
        model.add(Tensor::random(bias, &[4], 1));
        refused_model(bias, &model, &[bias]);
    }
}

#[test]
fn every_tensor_must_have_the_shape_and_a_dtype_that_can_be_computed_with() {
    for name in fixtures() {
        let source = Source::fixture(&name);
        for tensor in tensors(&source) {
            type Change = fn(&mut Tensor);
            let changes: [(&str, Change); 4] = [
                ("a row more", |tensor| {
                    let row = tensor.bytes.len() / tensor.shape[0] as usize;
                    tensor.shape[0] += 1;
                    tensor.bytes.extend(vec![0; row]);
                }),
                ("flat", |tensor| tensor.shape = vec![tensor.shape.iter().product(), 1, 1, 1]),
                ("I16", |tensor| {
                    let count: u64 = tensor.shape.iter().product();
                    (tensor.dtype, tensor.bytes) = ("I16".to_owned(), vec![0; 2 * count as usize]);
                }),
                ("F64", |tensor| {
                    let count: u64 = tensor.shape.iter().product();
                    (tensor.dtype, tensor.bytes) = ("F64".to_owned(), vec![0; 8 * count as usize]);
                }),
            ];
            for (what, change) in changes {
                let mut model = source.clone();
                change(model.tensor(&tensor));
                // The last axis of the first convolution tells the layout: then every name is another.
                let named =
                    if what == "flat" && tensor.contains("conv1d") { "conv1d" } else { tensor.as_str() };
                refused_model(&format!("{tensor} {what}"), &model, &[named]);
            }
        }
    }
}

/// Puts a value at a pointer such as `/text_config/rope_theta`; null takes the key out.
fn put(config: &mut Value, pointer: &str, value: Value) {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let parent = config.pointer_mut(parent).unwrap_or_else(|| panic!("{pointer}"));
    parent.as_object_mut().unwrap().insert(key.to_owned(), value);
}

#[test]
fn config_values_that_are_unknown_or_contradict_each_other_are_refused_by_name() {
    let cases: Vec<(&str, &str, Value, &str)> = vec![
        ("llama-tied", "/model_type", json!("gpt2"), "gpt2"),
        ("llama-tied", "/model_type", json!(7), "model_type"),
        ("llama-tied", "/model_type", json!(null), "model_type"),
        ("llama-tied", "/hidden_act", json!("gelu"), "hidden_act"),
        ("llama-tied", "/hidden_size", json!(0), "hidden_size"),
        ("llama-tied", "/hidden_size", json!(-128), "hidden_size"),
        ("llama-tied", "/hidden_size", json!("128"), "hidden_size"),
        ("llama-tied", "/hidden_size", json!(128.5), "hidden_size"),
        ("llama-tied", "/hidden_size", json!(1u64 << 40), "hidden_size"),
        ("llama-tied", "/hidden_size", json!(null), "hidden_size"),
        ("llama-tied", "/hidden_size", json!([128]), "hidden_size"),
        ("llama-tied", "/vocab_size", json!(513), "embed_tokens"),
        ("llama-tied", "/vocab_size", json!(u64::MAX), "vocab_size"),
        ("llama-tied", "/num_hidden_layers", json!(3), "layers.2."),
        ("llama-tied", "/num_hidden_layers", json!(1), "layers.1."),
        ("llama-tied", "/num_hidden_layers", json!(1_000_000), "num_hidden_layers"),
        ("llama-tied", "/num_attention_heads", json!(3), "num_attention_heads"),
        ("llama-tied", "/num_attention_heads", json!(8), "_proj.weight"),
        ("llama-tied", "/num_attention_heads", json!(0), "num_attention_heads"),
        ("llama-tied", "/num_key_value_heads", json!(3), "num_key_value_heads"),
        ("llama-tied", "/num_key_value_heads", json!(true), "num_key_value_heads"),
        ("llama-tied", "/head_dim", json!(33), "head_dim"),
        ("llama-tied", "/head_dim", json!("many"), "head_dim"),
        ("llama-tied", "/rms_norm_eps", json!(-1e-5), "rms_norm_eps"),
        ("llama-tied", "/rms_norm_eps", json!("NaN"), "rms_norm_eps"),
        ("llama-tied", "/max_position_embeddings", json!(0), "max_position_embeddings"),
        ("llama-tied", "/max_position_embeddings", json!("4k"), "max_position_embeddings"),
        ("llama-tied", "/tie_word_embeddings", json!("yes"), "tie_word_embeddings"),
        ("llama-tied", "/tie_word_embeddings", json!(false), "lm_head"),
        ("llama-tied", "/attention_bias", json!(true), "_proj.bias"),
        ("llama-tied", "/attention_bias", json!(1), "attention_bias"),
        ("llama-tied", "/mlp_bias", json!(true), "mlp.gate_proj.bias"),
        ("llama-tied", "/rope_theta", json!(0), "rope_theta"),
        ("llama-tied", "/rope_theta", json!("1e4"), "rope_theta"),
        ("llama-tied", "/rope_scaling", json!("linear"), "rope_scaling"),
        ("llama-tied", "/rope_scaling", json!({ "rope_type": "linear" }), "rope_scaling.factor"),
        ("llama-tied", "/rope_scaling", json!({ "type": "linear", "factor": 0 }), "rope_scaling.factor"),
        ("llama-tied", "/rope_scaling", json!({ "type": "linear", "factor": "2" }), "rope_scaling.factor"),
        ("llama-tied", "/rope_scaling", json!({ "rope_type": "yarn", "factor": 2.0 }), "yarn"),
        ("llama-tied", "/rope_scaling", json!({ "rope_type": "dynamic", "factor": 2.0 }), "dynamic"),
        ("llama-tied", "/rope_scaling", json!({ "rope_type": "longrope", "factor": 2.0 }), "longrope"),
        ("llama-tied", "/rope_scaling", json!({ "rope_type": "su" }), "su"),
        ("llama-tied", "/rope_scaling", json!({ "rope_type": "twisted" }), "twisted"),
        ("llama-tied", "/rope_scaling", json!({ "rope_type": 3 }), "rope_type"),
        ("llama-tied", "/rope_parameters", json!({ "rope_theta": 1234.5 }), "rope_theta"),
        (
            "llama-tied",
            "/rope_parameters",
            json!({ "full_attention": { "rope_theta": 1e6 } }),
            "full_attention",
        ),
        ("llama-untied", "/rope_scaling/low_freq_factor", json!(5.0), "high_freq_factor"),
        ("llama-untied", "/rope_scaling/high_freq_factor", json!(null), "high_freq_factor"),
        (
            "llama-untied",
            "/rope_scaling/original_max_position_embeddings",
            json!(-1),
            "original_max_position",
        ),
        ("llama-untied", "/rope_parameters", json!({ "rope_type": "default" }), "rope_type"),
        ("llama-untied", "/partial_rotary_factor", json!(0.1), "partial_rotary_factor"),
        ("llama-untied", "/partial_rotary_factor", json!(1.5), "partial_rotary_factor"),
        ("llama-untied", "/partial_rotary_factor", json!("half"), "partial_rotary_factor"),
        ("mistral", "/sliding_window", json!(0), "sliding_window"),
        ("mistral", "/sliding_window", json!(-4), "sliding_window"),
        ("mistral", "/sliding_window", json!("wide"), "sliding_window"),
        ("mistral", "/layer_types", json!(["sliding_attention", "full_attention"]), "layer_types"),
        ("qwen2", "/layer_types", json!(["sliding_attention", "sliding_attention"]), "layer_types"),
        ("qwen2", "/layer_types", json!("full_attention"), "layer_types"),
        ("qwen2", "/use_sliding_window", json!("no"), "use_sliding_window"),
        ("qwen3", "/head_dim", json!(null), "q_proj"),
        ("qwen3_5", "/text_config/layer_types", json!(["full_attention"]), "layer_types"),
        ("qwen3_5", "/text_config/full_attention_interval", json!(3), "layer_types"),
        ("qwen3_5", "/text_config/full_attention_interval", json!(0), "full_attention_interval"),
        ("qwen3_5", "/text_config/linear_num_value_heads", json!(3), "linear_num_value_heads"),
        ("qwen3_5", "/text_config/linear_num_key_heads", json!(null), "linear_num_key_heads"),
        ("qwen3_5", "/text_config/linear_conv_kernel_dim", json!(3), "conv1d"),
        ("qwen3_5", "/text_config/linear_key_head_dim", json!(48), "in_proj_qkv"),
        ("qwen3_5", "/text_config/linear_key_head_dim", json!(1u64 << 21), "linear_key_head_dim"),
        ("qwen3_5", "/text_config/num_key_value_heads", json!(3), "num_key_value_heads"),
        ("qwen3_5", "/text_config/attention_bias", json!(true), "attention_bias"),
        ("qwen3_5", "/text_config/attn_output_gate", json!(false), "attn_output_gate"),
        ("qwen3_5", "/text_config/mtp_use_dedicated_embeddings", json!(true), "mtp_use_dedicated_embeddings"),
        ("qwen3_5", "/text_config/mtp_num_hidden_layers", json!(2), "mtp.layers.1."),
        ("qwen3_5", "/text_config/mtp_num_hidden_layers", json!("one"), "mtp_num_hidden_layers"),
        ("qwen3_5", "/text_config/partial_rotary_factor", json!(0.5), "partial_rotary_factor"),
        ("qwen3_5", "/text_config/rope_parameters/rope_type", json!("yarn"), "yarn"),
        ("qwen3_5", "/vision_config/depth", json!(-1), "depth"),
        ("qwen3_5", "/image_token_id", json!("<image>"), "image_token_id"),
        ("qwen3_5", "/video_token_id", json!(u64::MAX), "video_token_id"),
        ("qwen3_5_moe", "/text_config/num_experts", json!(5), "experts"),
        ("qwen3_5_moe", "/text_config/num_experts_per_tok", json!(5), "num_experts_per_tok"),
        ("qwen3_5_moe", "/text_config/num_experts_per_tok", json!(0), "num_experts_per_tok"),
        ("qwen3_5_moe", "/text_config/num_experts_per_tok", json!(null), "num_experts_per_tok"),
        ("qwen3_5_moe", "/model_type", json!("qwen3_5"), "intermediate_size"),
    ];
    for (name, pointer, value, word) in cases {
        let mut model = Source::fixture(name);
        put(&mut model.config, pointer, value.clone());
        refused_model(&format!("{name} {pointer} {value}"), &model, &[word]);
    }
    // Needs two keys.
    let mut model = Source::fixture("qwen2");
    put(&mut model.config, "/use_sliding_window", json!(true));
    put(&mut model.config, "/max_window_layers", json!("some"));
    refused_model("max_window_layers", &model, &["max_window_layers"]);
}

#[test]
fn keys_that_say_the_same_thing_twice_are_no_contradiction() {
    let ids = Reference::open("llama-untied").ids("input_ids.a");
    let expected = run(&fixture("llama-untied"), &ids).ok().unwrap();
    let mut model = Source::fixture("llama-untied");
    let mut both = model.config["rope_scaling"].clone();
    put(&mut both, "/rope_theta", json!(500_000));
    put(&mut both, "/type", json!("llama3"));
    put(&mut model.config, "/rope_parameters", both.clone());
    put(&mut model.config, "/layer_types", json!(["full_attention", "full_attention", "full_attention"]));
    for scaling in [model.config["rope_scaling"].clone(), both, Value::Null] {
        put(&mut model.config, "/rope_scaling", scaling.clone());
        let dir = temp();
        model.write(dir.path());
        let found = run(dir.path(), &ids).unwrap_or_else(|error| panic!("{scaling}: {error}"));
        assert!(same_bits(&found, &expected), "{scaling}");
    }
}

#[test]
fn config_files_that_cannot_be_read_are_refused() {
    let dir = temp();
    Source::fixture("llama-tied").write(dir.path());
    let path = dir.path().join("config.json");
    for text in
        ["", "[]", "null", "{", "{\"model_type\": NaN}", "{\"hidden_size\": 1e999}", "\u{feff}{}", "{}"]
    {
        fs::write(&path, text).unwrap();
        refused(text, dir.path(), &["config.json"]);
    }
    fs::write(&path, [0xff, 0xfe, 0x00]).unwrap();
    refused("not UTF-8", dir.path(), &["config.json"]);
    let deep = format!("{{\"a\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    fs::write(&path, deep).unwrap();
    refused("deep", dir.path(), &["config.json"]);
    fs::remove_file(&path).unwrap();
    refused("gone", dir.path(), &["config.json"]);
    fs::create_dir(&path).unwrap();
    refused("a folder", dir.path(), &["config.json"]);
    refused("nothing there", &dir.path().join("nowhere"), &["config.json"]);
}

/// An artifact that the program built from a fixture.
fn artifact(name: &str, codec: &str) -> (TempDir, PathBuf) {
    let dir = temp();
    let out = dir.path().join("artifact");
    let recipe = recipe(dir.path(), &default_codec(codec));
    tqc!("build", recipe, "--source", fixture(name), "-o", out).expect(0);
    // An index would find a missing tensor first.
    fs::remove_file(out.join("model.safetensors.index.json")).unwrap();
    (dir, out)
}

/// Changes the tensors of a folder's only weight file.
fn edit(file: &Path, change: impl FnOnce(&mut Vec<Tensor>)) {
    let mut tensors = read_safetensors(file);
    change(&mut tensors);
    write_safetensors(file, &tensors);
}

fn named<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    tensors.iter_mut().find(|tensor| tensor.name == name).expect(name)
}

#[test]
fn packed_models_with_a_plane_missing_or_misshapen_are_refused() {
    for (name, module) in [
        ("llama-tied", "model.layers.1.mlp.down_proj"),
        ("llama-tied", "model.embed_tokens"),
        ("qwen3_5", "language_model.model.layers.0.linear_attn.in_proj_qkv"),
        ("qwen3_5_moe", "language_model.model.layers.1.mlp.switch_mlp.up_proj"),
    ] {
        let (_dir, out) = artifact(name, AFFINE_4_32);
        let file = out.join("model.safetensors");
        let good = fs::read(&file).unwrap();
        let case = |what: &str, words: &[&str], change: &dyn Fn(&mut Vec<Tensor>)| {
            edit(&file, |tensors| change(tensors));
            refused(&format!("{module}: {what}"), &out, words);
            fs::write(&file, &good).unwrap();
        };
        let plane = |suffix: &str| format!("{module}.{suffix}");
        for suffix in ["scales", "biases", "weight"] {
            let plane = plane(suffix);
            case("missing", &[&plane, "missing"], &|tensors| tensors.retain(|tensor| tensor.name != plane));
            case("a row more", &[&plane], &|tensors| {
                let tensor = named(tensors, &plane);
                let row = tensor.bytes.len() / tensor.shape[0] as usize;
                tensor.shape[0] += 1;
                tensor.bytes.extend(vec![0; row]);
            });
            case("half as wide", &[&plane], &|tensors| {
                let tensor = named(tensors, &plane);
                *tensor.shape.last_mut().unwrap() /= 2;
                tensor
                    .bytes
                    .truncate(tensor.bytes.len() / 2 / tensor.shape[0] as usize * tensor.shape[0] as usize);
                let size = tensor.shape.iter().product::<u64>() as usize;
                tensor.bytes.resize(size * if suffix == "weight" { 4 } else { 2 }, 0);
            });
            case("I32", &[&plane], &|tensors| {
                let tensor = named(tensors, &plane);
                tensor.dtype = "I32".to_owned();
                tensor.bytes.resize(4 * tensor.shape.iter().product::<u64>() as usize, 0);
            });
        }
        case("scales and biases differ in dtype", &[&plane("biases")], &|tensors| {
            named(tensors, &plane("biases")).map(|bias| bias);
        });
        case("no planes but its own", &[&plane("scales"), "missing"], &|tensors| {
            tensors.retain(|t| t.name != plane("scales") && t.name != plane("biases"));
        });
        for (what, bits) in [("NaN", 0x7fc0u16), ("infinity", 0x7f80), ("minus infinity", 0xff80)] {
            for suffix in ["scales", "biases"] {
                case(what, &[module, "model.safetensors", "NaN or infinity"], &|tensors| {
                    let tensor = named(tensors, &plane(suffix));
                    // Of the rows that the prompt's tokens are in, and of every expert.
                    tensor
                        .bytes
                        .chunks_exact_mut(2)
                        .for_each(|value| value.copy_from_slice(&bits.to_le_bytes()));
                });
            }
        }
        run(&out, &[1, 2, 3]).unwrap_or_else(|e| panic!("the artifact is whole again: {e}"));
    }
}

#[test]
fn packings_that_are_not_ours_or_not_the_weights_own_are_refused() {
    let (_dir, out) = artifact("llama-tied", AFFINE_4_32);
    let path = out.join("config.json");
    let good = read_json(&path);
    const MODULE: &str = "model.layers.0.mlp.up_proj";
    let of_module = |value: Value| json!({ "bits": 4, "group_size": 32, MODULE: value });
    let cases: Vec<(Value, &[&str])> = vec![
        (Value::Null, &["quantization", "embed_tokens"]),
        (json!("affine"), &["quantization"]),
        (json!([]), &["quantization"]),
        (json!({ "bits": 4, "group_size": 32, "mode": "fancy" }), &["quantization.mode", "fancy", "mxfp4"]),
        (json!({ "bits": 4, "group_size": 32, "mode": 4 }), &["quantization.mode"]),
        (json!({ "bits": 7, "group_size": 32 }), &["quantization.bits", "7"]),
        (json!({ "bits": 0, "group_size": 32 }), &["quantization.bits"]),
        (json!({ "bits": -4, "group_size": 32 }), &["quantization.bits"]),
        (json!({ "bits": "4", "group_size": 32 }), &["quantization.bits"]),
        (json!({ "bits": 1u64 << 40, "group_size": 32 }), &["quantization.bits"]),
        (json!({ "bits": 4, "group_size": 48 }), &["quantization.group_size", "48"]),
        (json!({ "bits": 4, "group_size": 0 }), &["quantization.group_size"]),
        (json!({ "bits": 4, "group_size": 64 }), &["scales"]),
        (json!({ "bits": 4 }), &["scales"]),
        (json!({}), &["scales"]),
        (json!({ "bits": 8, "group_size": 32 }), &["weight"]),
        (json!({ "bits": 3, "group_size": 32 }), &["weight"]),
        (json!({ "mode": "mxfp4" }), &["scales"]),
        (json!({ "mode": "nvfp4" }), &["scales"]),
        (json!({ "mode": "mxfp4", "bits": 8 }), &["mxfp4"]),
        (json!({ "mode": "mxfp8", "group_size": 64 }), &["mxfp8"]),
        (of_module(json!("x")), &[MODULE]),
        (of_module(json!(3)), &[MODULE]),
        (of_module(json!([4, 32])), &[MODULE]),
        (of_module(json!(null)), &[MODULE]),
        (of_module(json!(false)), &[MODULE, "packed"]),
        (of_module(json!({ "bits": 8, "group_size": 32 })), &[MODULE]),
        (of_module(json!({ "bits": 9 })), &[MODULE, "bits"]),
        (of_module(json!({ "mode": "mxfp4" })), &[MODULE]),
    ];
    for (value, words) in cases {
        let mut config = good.clone();
        config.as_object_mut().unwrap().remove("quantization_config");
        put(&mut config, "/quantization", value.clone());
        write_json(&path, &config);
        refused(&value.to_string(), &out, words);
    }
    // Another tool's description alone.
    let mut config = good.clone();
    config.as_object_mut().unwrap().remove("quantization");
    put(&mut config, "/quantization_config", json!({ "quant_method": "gptq", "bits": 4 }));
    write_json(&path, &config);
    refused("gptq", &out, &["gptq"]);
    // An entry of `true` means the common settings, which the module has.
    let mut config = good;
    put(&mut config, &format!("/quantization/{MODULE}"), json!(true));
    write_json(&path, &config);
    run(&out, &[1, 2, 3]).unwrap_or_else(|e| panic!("true is the common codec: {e}"));
}

#[test]
fn a_group_that_does_not_divide_a_row_is_refused_with_the_module() {
    let (_dir, out) = artifact("qwen3_5", AFFINE_4_32);
    let mut config = read_json(&out.join("config.json"));
    // in_features is 160.
    put(&mut config, "/quantization/group_size", json!(128));
    write_json(&out.join("config.json"), &config);
    refused("group of 128", &out, &["affine-4g128", "multiple of 128", "160", "language_model."]);
}

#[test]
fn weight_files_that_are_cut_short_are_refused_by_name() {
    let (_dir, packed) = artifact("qwen3_5", AFFINE_4_32);
    let dir = temp();
    Source::fixture("llama-untied").write(dir.path());
    for (folder, file) in [
        (packed.as_path(), "model.safetensors"),
        (packed.as_path(), "mtp/model.safetensors"),
        (dir.path(), "model-00002-of-00003.safetensors"),
    ] {
        let path = folder.join(file);
        let good = fs::read(&path).unwrap();
        for len in [good.len() - 1, good.len() / 2, 200, 9, 8, 7, 0] {
            fs::write(&path, &good[..len]).unwrap();
            refused(&format!("{file} cut to {len}"), folder, &[file]);
        }
        let mut longer = good.clone();
        longer.push(0);
        fs::write(&path, longer).unwrap();
        refused(&format!("{file} and a byte"), folder, &[file]);
        let mut hollow = good.clone();
        hollow[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        fs::write(&path, hollow).unwrap();
        refused(&format!("{file}: huge header"), folder, &[file]);
        fs::write(&path, good).unwrap();
        run(folder, &[1, 2, 3]).unwrap_or_else(|e| panic!("whole again: {e}"));
    }
}

#[test]
fn a_damaged_folder_of_the_draft_head_is_refused_by_its_name() {
    let (_dir, out) = artifact("qwen3_5", AFFINE_4_32);
    let mtp = out.join("mtp");
    let case = |what: &str, words: &[&str], change: &dyn Fn(&Path)| {
        let copy = temp();
        copy_folder(&out, &copy.path().join("a"));
        change(&copy.path().join("a/mtp"));
        refused(what, &copy.path().join("a"), words);
    };
    assert!(mtp.join("model.safetensors").exists());
    case("no config", &["mtp/", "config.json", "missing"], &|mtp| {
        fs::remove_file(mtp.join("config.json")).unwrap()
    });
    case("no JSON", &["mtp/", "config.json"], &|mtp| fs::write(mtp.join("config.json"), "{").unwrap());
    case("strange packing", &["mtp/", "quantization"], &|mtp| {
        let mut config = read_json(&mtp.join("config.json"));
        put(&mut config, "/quantization", json!(4));
        write_json(&mtp.join("config.json"), &config);
    });
    let edited = |what: &str, words: &[&str], change: &dyn Fn(&mut Vec<Tensor>)| {
        case(what, words, &|mtp| edit(&mtp.join("model.safetensors"), |tensors| change(tensors)));
    };
    for tensor in read_safetensors(&mtp.join("model.safetensors")) {
        let name = tensor.name.as_str();
        edited(&format!("{name} missing"), &[name, "missing"], &|tensors| tensors.retain(|t| t.name != name));
        edited(&format!("{name} misshapen"), &["mtp/model.safetensors", name], &|tensors| {
            named(tensors, name).shape.insert(0, 1);
        });
        edited(&format!("{name} I16"), &["mtp/model.safetensors", name, "I16"], &|tensors| {
            let tensor = named(tensors, name);
            tensor.bytes.resize(2 * tensor.shape.iter().product::<u64>() as usize, 0);
            tensor.dtype = "I16".to_owned();
        });
        edited(&format!("{name} NaN"), &["mtp/model.safetensors", "NaN or infinity"], &|tensors| {
            named(tensors, name).map(|_| f32::NAN);
        });
    }
    edited("an extra tensor", &["mtp/model.safetensors", "layers.7.x"], &|tensors| {
        tensors.push(Tensor::random("layers.7.x", &[2, 2], 1));
    });
    edited("packed without a packing", &["mtp/model.safetensors", "fc.weight", "quantization"], &|tensors| {
        tensors.push(Tensor::random("fc.scales", &[160, 10], 1));
    });
    // Without the folder, or without its weights, there is just no draft head.
    for gone in ["mtp", "mtp/model.safetensors"] {
        let copy = temp();
        copy_folder(&out, copy.path());
        match gone {
            "mtp" => fs::remove_dir_all(copy.path().join(gone)).unwrap(),
            _ => fs::remove_file(copy.path().join(gone)).unwrap(),
        }
        let error = open(copy.path()).draft().map(|_| ()).unwrap_err();
        check(gone, &error, Exit::Request, &["no draft head"]);
    }
}

#[test]
fn checkpoints_that_mix_layouts_are_refused() {
    let source = Source::fixture("qwen3_5");
    let rename = |model: &mut Source, change: &dyn Fn(&str) -> String| {
        model.shards.iter_mut().flatten().for_each(|tensor| tensor.name = change(&tensor.name));
    };
    let turn = |model: &mut Source| model.ending("conv1d.weight").for_each(|tensor| tensor.shape.swap(1, 2));
    // Names of the one, convolutions of the other.
    let mut model = source.clone();
    turn(&mut model);
    refused_model("conv of MLX", &model, &["mixes layouts", "names start with `model.`"]);
    let mut model = source.clone();
    rename(&mut model, &|name| name.replace("model.language_model.", "language_model.model."));
    refused_model("names of MLX", &model, &["mixes layouts"]);
    // MLX's, with a draft head in the main files.
    let mut model = source.clone();
    turn(&mut model);
    rename(&mut model, &|name| {
        name.replace("model.language_model.", "language_model.model.")
            .replace("lm_head", "language_model.lm_head")
    });
    refused_model("mtp. in MLX's main files", &model, &["mixes layouts", "mtp."]);
    // One layer's convolution turned.
    let mut model = source;
    model.ending("layers.1.linear_attn.conv1d.weight").for_each(|tensor| tensor.shape.swap(1, 2));
    refused_model("one conv", &model, &["layers.1.linear_attn.conv1d.weight"]);
}

#[test]
fn one_changed_byte_of_any_file_of_an_artifact_is_found_and_the_file_is_named() {
    for codec in [AFFINE_4_32, "\"keep\""] {
        let dir = temp();
        let out = dir.path().join("artifact");
        let recipe = recipe(dir.path(), &default_codec(codec));
        tqc!("build", recipe, "--source", fixture("qwen3_5"), "-o", out).expect(0);
        let record = Artifact::open(&out).unwrap();
        record.check_files().unwrap();
        let files: Vec<String> = record.provenance.files.keys().cloned().collect();
        assert!(files.iter().any(|file| file == "mtp/model.safetensors") && files.len() > 4, "{files:?}");
        for file in files {
            let path = out.join(&file);
            let len = fs::metadata(&path).unwrap().len() as usize;
            for at in [0, len / 2, len - 1] {
                flip_byte(&path, at);
                let error = record.check_files().unwrap_err();
                check(&file, &error, Exit::Input, &[path.to_str().unwrap(), "SHA-256"]);
                flip_byte(&path, at);
            }
            let bytes = fs::read(&path).unwrap();
            fs::remove_file(&path).unwrap();
            check(&file, &record.check_files().unwrap_err(), Exit::Input, &[path.to_str().unwrap()]);
            fs::write(&path, bytes).unwrap();
        }
        record.check_files().unwrap();
        // A record may not send its reader elsewhere.
        for name in ["../recipe.toml", "/etc/hostname", "", ".", "mtp/../../x"] {
            let mut changed = read_json(&out.join("provenance.json"));
            let digest = changed["files"]["config.json"].clone();
            changed["files"].as_object_mut().unwrap().insert(name.to_owned(), digest);
            let elsewhere = temp();
            write_json(&elsewhere.path().join("provenance.json"), &changed);
            let error = Artifact::open(elsewhere.path()).unwrap().check_files().unwrap_err();
            check(name, &error, Exit::Input, &[&format!("`{name}`"), "provenance.json"]);
        }
    }
}

#[test]
fn a_weight_that_is_not_a_number_is_found_and_named() {
    for (name, file) in [
        ("qwen3_5", "model.safetensors"),
        ("qwen3_5_moe", "model.safetensors"),
        ("qwen3", "model.safetensors"),
    ] {
        let source = Source::fixture(name);
        for tensor in tensors(&source) {
            for value in [f32::NAN, f32::INFINITY] {
                let mut model = source.clone();
                let changed = model.tensor(&tensor);
                let width = changed.shape.last().copied().unwrap() as usize;
                // One value of a row that is used: every expert's, and those of the prompt's tokens.
                let rows = changed.floats().len() / width;
                let mut values = changed.floats();
                (0..rows).for_each(|row| values[row * width] = value);
                *changed = Tensor::of_floats(&tensor, &changed.shape.clone(), &values);
                let dir = temp();
                model.write(dir.path());
                if tensor.contains(".visual.") {
                    run(dir.path(), &[1, 2, 3]).unwrap_or_else(|e| panic!("the tower is not computed: {e}"));
                    continue;
                }
                // exp, sigmoid and softplus make numbers of infinity; not of NaN.
                let saturates = ["in_proj_a", "in_proj_b", "shared_expert_gate", "A_log", "dt_bias"];
                if value.is_infinite() && saturates.iter().any(|name| tensor.contains(name)) {
                    continue;
                }
                // The parameter's path in the model tree: the layer, and what both layouts call it.
                let own = match tensor.rsplit_once(".experts.") {
                    Some(_) => "switch_mlp".to_owned(),
                    None => tensor.trim_start_matches("model.language_model.").to_owned(),
                };
                refused(&format!("{tensor} {value}"), dir.path(), &[&own, file, "NaN or infinity"]);
            }
        }
    }
}

#[test]
fn small_tensors_that_call_for_a_huge_state_are_refused() {
    // 3 MB of weights, 1 GiB of state in each layer.
    let wide = Sizes::wide("qwen3_5");
    let hybrid =
        Hybrid { key_heads: 1, share: 1, key_dim: 1 << 14, value_dim: 1 << 14, ..wide.hybrid.clone() };
    let sizes = Sizes { hidden: 16, hybrid, ..wide };
    refused_model("huge state", &sizes.model(), &["linear_key_head_dim", "16384", "67108864"]);
}

#[test]
fn finite_weights_that_overflow_are_no_logits() {
    let mut model = Source::fixture("llama-untied");
    model.tensor("lm_head.weight").map(|_| 3e38);
    refused_model("head of 3e38", &model, &["NaN or infinity", "finite"]);
}

#[test]
fn requests_that_cannot_be_met_are_refused_and_leave_the_state_alone() {
    for name in fixtures() {
        let mut source = Source::fixture(&name);
        let at = if name.starts_with("qwen3_5") {
            "/text_config/max_position_embeddings"
        } else {
            "/max_position_embeddings"
        };
        put(&mut source.config, at, json!(8));
        let dir = temp();
        source.write(dir.path());
        let model = open(dir.path());
        let vocab = model.config().vocab as u32;
        let request = |what: &str, error: Option<tqc::runtime::RuntimeError>, words: &[&str]| {
            check(&format!("{name}: {what}"), &error.expect(what), Exit::Request, words);
        };
        request("empty", model.check_prompt(&[]).err(), &["empty"]);
        for id in [vocab, u32::MAX] {
            request("id", model.check_prompt(&[1, id]).err(), &[&id.to_string(), &vocab.to_string()]);
            let mut state = model.state();
            request("id", model.forward(&mut state, &[1, id], Want::Last).err(), &[&id.to_string()]);
            assert_eq!(state.tokens(), 0);
            let sequences = [vec![1], vec![id]];
            request("id", Stream::new(model.weights(), cpu(), &sequences).err(), &[&id.to_string()]);
            if let Ok(head) = model.draft() {
                let hidden = vec![0.5; model.config().hidden];
                let drafted = head.forward(&model, &mut head.state(&model), &[id], &hidden);
                request("drafted id", drafted.err(), &[&id.to_string()]);
            }
        }
        model.check_prompt(&[1; 8]).unwrap();
        request("long", model.check_prompt(&[1; 9]).err(), &["9 tokens", "context of 8"]);
        let mut state = model.state();
        request("long", model.forward(&mut state, &[1; 9], Want::Last).err(), &["context of 8"]);
        model.forward(&mut state, &[1; 8], Want::Last).unwrap();
        let before = state.clone();
        request("full", model.forward(&mut state, &[1], Want::Last).err(), &["9 tokens", "context of 8"]);
        assert_eq!(state.tokens(), 8);
        assert_eq!(format!("{before:?}"), format!("{state:?}"));
        request("no sequences", Stream::new(model.weights(), cpu(), &[]).err(), &["empty"]);
        request("empty sequence", Stream::new(model.weights(), cpu(), &[vec![]]).err(), &["empty"]);
        request("long sequence", Stream::new(model.weights(), cpu(), &[vec![1; 9]]).err(), &["context of 8"]);
        let mut stream = Stream::new(model.weights(), cpu(), &[vec![1]]).unwrap();
        for _ in 0..model.config().layers.len() {
            stream.step(&mut ()).unwrap();
        }
        request("after the last layer", stream.step(&mut ()).err(), &["layers"]);
        if name.starts_with("qwen3_5") {
            request("cut back", state.truncate(4).err(), &["8 tokens", "4"]);
            assert_eq!(state.tokens(), 8);
            for id in &model.config().media_tokens {
                request("picture", model.check_prompt(&[1, *id]).err(), &[&id.to_string(), "image"]);
            }
            assert_eq!(model.config().media_tokens.len(), 2);
        } else {
            request("no draft", model.draft().err(), &["no draft head"]);
        }
    }
}
