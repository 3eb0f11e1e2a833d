//! What stock readers rely on, in the artifact of every fixture; and layouts, computed here from the source.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::common::*;
use crate::tqc;

fn build(name: &str, text: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = temp();
    let recipe = recipe(dir.path(), text);
    let out = dir.path().join("out");
    tqc!("build", recipe, "--source", fixture(name), "-o", out).expect(0);
    (dir, out)
}

/// Several codecs at once, and several shards.
const MIXED: &str = "
[output]
shard-size = \"1MB\"
[default]
codec = { affine = { bits = 4, group = 32 } }
[[rule]]
match = \"*.layers.0.mlp.*\"
codec = \"mxfp4\"
[[rule]]
match = \"*.embed_tokens\"
codec = \"bf16\"
";

#[test]
fn configs_say_for_every_module_how_its_weights_are_stored() {
    for name in fixtures() {
        let (_dir, out) = build(&name, MIXED);
        check_quantization(&out, &name);
        let config = read_json(&out.join("config.json"));
        let source = read_json(&fixture(&name).join("config.json"));
        assert!(config["tie_word_embeddings"].is_boolean(), "{name}");
        if let Value::Object(text) = &config["text_config"] {
            assert_eq!(text["tie_word_embeddings"], config["tie_word_embeddings"], "{name}");
        } else {
            assert!(config["rope_theta"].is_number(), "{name}");
            assert!(config.as_object().unwrap().contains_key("rope_scaling"), "{name}");
            assert_eq!(config["rope_theta"], source["rope_theta"], "{name}");
            for key in source.as_object().unwrap().keys() {
                assert_eq!(config[key], source[key], "{name}: {key}");
            }
        }
        let tied = !read_folder(&fixture(&name)).keys().any(|tensor| tensor.ends_with("lm_head.weight"));
        assert_eq!(config["tie_word_embeddings"], tied, "{name}");
    }
}

/// Every module with scales has settings that its planes' shapes confirm; every matrix without has `false`.
fn check_quantization(out: &Path, name: &str) {
    let config = read_json(&out.join("config.json"));
    let object = config["quantization"].as_object().unwrap();
    assert_eq!(config["quantization"], config["quantization_config"], "{name}");
    let settings = |value: &Value| {
        let map = value.as_object().unwrap();
        (
            map["group_size"].as_u64().unwrap(),
            map["bits"].as_u64().unwrap(),
            map["mode"].as_str().unwrap().to_owned(),
        )
    };
    let top = settings(&config["quantization"]);
    let tensors = read_folder(out);
    for (key, value) in
        object.iter().filter(|(key, _)| !["group_size", "bits", "mode"].contains(&key.as_str()))
    {
        assert!(tensors.contains_key(&format!("{key}.weight")), "{name}: `{key}` is not a module");
        if let Value::Object(entry) = value {
            assert_eq!(entry.keys().collect::<Vec<_>>(), ["bits", "group_size", "mode"], "{name}: {key}");
        } else {
            assert_eq!(*value, false, "{name}: {key}");
            assert!(!tensors.contains_key(&format!("{key}.scales")), "{name}: {key}");
        }
    }
    for scales in tensors.values().filter(|tensor| tensor.name.ends_with(".scales")) {
        let module = scales.name.strip_suffix(".scales").unwrap();
        let (group, bits, mode) = object.get(module).map_or(top.clone(), settings);
        let weight = &tensors[&format!("{module}.weight")];
        let (codes, groups) = (weight.shape.last().unwrap(), scales.shape.last().unwrap());
        assert_eq!(weight.dtype, "U32", "{name}: {module}");
        assert_eq!(
            codes * 32,
            groups * group * bits,
            "{name}: {module} is not {bits} bits in groups of {group}"
        );
        assert_eq!(tensors.contains_key(&format!("{module}.biases")), mode == "affine", "{name}: {module}");
        assert_eq!(scales.dtype == "U8", mode != "affine", "{name}: {module}");
    }
    for module in ["mlp.gate_proj", "mlp.switch_mlp.gate_proj"] {
        for tensor in tensors.keys().filter(|t| t.ends_with(&format!("layers.0.{module}.weight"))) {
            let entry = &object[tensor.strip_suffix(".weight").unwrap()];
            assert_eq!(settings(entry), (32, 4, "mxfp4".to_owned()), "{name}");
        }
    }
}

#[test]
fn files_index_and_headers_agree() {
    let mut drafts = 0;
    for name in fixtures() {
        let (_dir, out) = build(&name, MIXED);
        let index = read_json(&out.join("model.safetensors.index.json"));
        let mut map = BTreeMap::new();
        let mut total = 0;
        for path in weight_files(&out) {
            let bytes = fs::read(&path).unwrap();
            let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
            assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "mlx", "{name}");
            for tensor in read_safetensors(&path) {
                total += tensor.bytes.len();
                map.insert(tensor.name, Value::from(path.file_name().unwrap().to_str().unwrap()));
            }
        }
        assert!(weight_files(&out).len() > 1 || total < 1_000_000, "{name}: one shard of {total} bytes");
        assert_eq!(index["metadata"]["total_size"], total, "{name}");
        assert_eq!(*index["weight_map"].as_object().unwrap(), map.clone().into_iter().collect(), "{name}");
        assert!(
            !map.keys().any(|tensor| tensor.contains("mtp.")),
            "{name}: a draft tensor in the main files"
        );
        let source: Vec<String> =
            read_folder(&fixture(&name)).into_keys().filter(|tensor| tensor.starts_with("mtp.")).collect();
        assert_eq!(out.join("mtp").exists(), !source.is_empty(), "{name}");
        if !source.is_empty() {
            drafts += 1;
            let draft = read_folder(&out.join("mtp"));
            assert!(draft.len() >= source.len(), "{name}: {} of {} draft tensors", draft.len(), source.len());
            assert!(draft.keys().all(|tensor| !tensor.starts_with("mtp.")), "{name}");
            assert!(read_json(&out.join("mtp/config.json"))["text_config"].is_object(), "{name}");
        }
    }
    assert!(drafts > 0, "no fixture has a draft head");
}

/// 1 + w, rounded to the nearest bf16, ties to even; by adding half a unit, not by the program's kernels.
fn gain(w: f32) -> u16 {
    let bits = (1.0 + w).to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[test]
fn qwen3_5_norms_become_gains_and_kernels_end_in_one() {
    for name in ["qwen3_5", "qwen3_5-tied", "qwen3_5_moe"] {
        let (_dir, out) = build(name, &default_codec(AFFINE_4_32));
        let (source, stored) = (read_folder(&fixture(name)), read_folder(&out));
        let mtp = out.join("mtp");
        let draft = if mtp.exists() { read_folder(&mtp) } else { BTreeMap::new() };
        let mut counts = [0, 0, 0];
        for tensor in source.values() {
            let target = match tensor.name.strip_prefix("mtp.") {
                Some(bare) => draft.get(bare),
                None => {
                    stored.get(&tensor.name.replacen("model.language_model.", "language_model.model.", 1))
                }
            };
            let norm = tensor.name.ends_with("norm.weight")
                || tensor.name.ends_with("layernorm.weight")
                || tensor.name.contains("pre_fc_norm");
            if tensor.name.contains(".visual.") {
                continue;
            } else if tensor.name.ends_with("linear_attn.norm.weight") {
                // A plain gain in both layouts.
                assert_eq!(target.unwrap().bytes, tensor.bytes, "{}", tensor.name);
                counts[0] += 1;
            } else if norm {
                assert_eq!(tensor.dtype, "BF16", "{}", tensor.name);
                let gains: Vec<u8> =
                    bf16(&tensor.bytes).into_iter().flat_map(|w| gain(w).to_le_bytes()).collect();
                assert_eq!(target.unwrap().bytes, gains, "{}", tensor.name);
                counts[1] += 1;
            } else if tensor.name.ends_with("conv1d.weight") {
                let target = target.unwrap();
                let &[channels, 1, kernel] = tensor.shape.as_slice() else { panic!("{:?}", tensor.shape) };
                assert_eq!(target.shape, [channels, kernel, 1]);
                assert_eq!(target.bytes, tensor.bytes, "{}", tensor.name);
                counts[2] += 1;
            }
        }
        assert!(counts.iter().all(|count| *count > 0), "{name}: {counts:?}");
    }
}

#[test]
fn the_halves_of_gate_up_proj_become_gate_and_up() {
    let (_dir, out) = build("qwen3_5_moe", &default_codec("\"keep\""));
    let (source, stored) = (read_folder(&fixture("qwen3_5_moe")), read_folder(&out));
    let mut stacks = 0;
    for tensor in
        source.values().filter(|t| t.name.ends_with("experts.gate_up_proj") && !t.name.starts_with("mtp."))
    {
        let at = tensor.name.strip_suffix("experts.gate_up_proj").unwrap();
        let at = at.replacen("model.language_model.", "language_model.model.", 1);
        let &[experts, double, hidden] = tensor.shape.as_slice() else { panic!("{:?}", tensor.shape) };
        let half = (double / 2 * hidden * 2) as usize;
        let part = |which: usize| -> Vec<u8> {
            tensor
                .bytes
                .chunks(2 * half)
                .flat_map(|expert| &expert[which * half..(which + 1) * half])
                .copied()
                .collect()
        };
        for (which, name) in ["gate_proj", "up_proj"].into_iter().enumerate() {
            let found = &stored[&format!("{at}switch_mlp.{name}.weight")];
            assert_eq!(found.shape, [experts, double / 2, hidden]);
            assert!(found.bytes == part(which), "{at}{name}");
        }
        stacks += 1;
    }
    assert!(stacks > 1);
}

#[test]
fn the_patch_kernel_has_its_channels_last() {
    let mut towers = 0;
    for name in ["qwen3_5", "qwen3_5-tied", "qwen3_5_moe"] {
        let source = read_folder(&fixture(name));
        let Some(kernel) = source.get("model.visual.patch_embed.proj.weight") else { continue };
        towers += 1;
        let (_dir, out) = build(name, &default_codec(AFFINE_4_32));
        let found = &read_folder(&out)["vision_tower.patch_embed.proj.weight"];
        let &[n, c, t, h, w] = kernel.shape.as_slice() else { panic!("{:?}", kernel.shape) };
        assert_eq!(found.shape, [n, t, h, w, c]);
        let word =
            |tensor: &Tensor, at: u64| [tensor.bytes[2 * at as usize], tensor.bytes[2 * at as usize + 1]];
        for flat in 0..n * c * t * h * w {
            // flat = (((n' C + c') T + t') H + h') W + w'
            let (x, rest) = (flat % w, flat / w);
            let (y, rest) = (rest % h, rest / h);
            let (f, rest) = (rest % t, rest / t);
            let (ch, out) = (rest % c, rest / c);
            let target = (((out * t + f) * h + y) * w + x) * c + ch;
            assert_eq!(word(kernel, flat), word(found, target), "{name}: [{out}, {ch}, {f}, {y}, {x}]");
        }
        // Everything else of the tower passes through.
        for tensor in source.values().filter(|t| t.name.starts_with("model.visual.") && t.name != kernel.name)
        {
            let found = &read_folder(&out)[&tensor.name.replacen("model.visual.", "vision_tower.", 1)];
            assert_eq!(
                (&found.bytes, &found.shape, &found.dtype),
                (&tensor.bytes, &tensor.shape, &tensor.dtype)
            );
        }
    }
    assert!(towers > 0, "no fixture has a vision tower");
}

#[test]
fn a_norm_or_bias_of_another_dtype_than_its_dense_model_is_rounded_to_the_models() {
    // MLX computes in f32 after a norm or bias in f32, and `mlx_lm.convert` rounds them too.
    for (name, wide) in
        [("llama-tied", "model.norm.weight"), ("qwen2", "model.layers.0.self_attn.q_proj.bias")]
    {
        let mut model = Model::fixture(name);
        let stored = model.tensor(wide).clone();
        let tensor = model.tensor(wide);
        tensor.dtype = "F32".to_owned();
        // Just under and over the middle of two neighbours, and nothing for the rest.
        let values = bf16(&stored.bytes);
        let moved = values.iter().enumerate().map(|(i, value)| value.to_bits() + [0, 0x7FFF, 0x8001][i % 3]);
        tensor.bytes = moved.flat_map(u32::to_le_bytes).collect();
        let up = |(i, value): (usize, &f32)| f32::from_bits(value.to_bits() + [0, 0, 0x1_0000][i % 3]);
        let expected: Vec<f32> = values.iter().enumerate().map(up).collect();

        let dir = temp();
        let (source, out) = (dir.path().join("source"), dir.path().join("out"));
        model.write(&source);
        let recipe_path = recipe(dir.path(), &default_codec(AFFINE_4_32));
        let built = tqc!("build", recipe_path, "--source", source, "-o", out, "--json").expect(0);
        let note = &built.json()["notes"][0];
        assert_eq!((&note["kind"], &note["detail"]), (&"cast".into(), &"is rounded from f32 to bf16".into()));
        let found = &read_folder(&out)[wide];
        assert_eq!(found.dtype, "BF16");
        assert_eq!(bf16(&found.bytes), expected, "{name}");
        tqc!("verify", out, "--source", source, "--rebuild", "all").expect(0);

        // A rule keeps it.
        let module = wide.strip_suffix(".weight").unwrap_or(wide);
        let keep =
            format!("{}[[rule]]\nmatch = \"{module}\"\ncodec = \"keep\"\n", default_codec(AFFINE_4_32));
        let (kept, text) = (dir.path().join("kept"), recipe(dir.path(), &keep));
        tqc!("build", text, "--source", source, "-o", kept).expect(0);
        assert_eq!(read_folder(&kept)[wide].dtype, "F32");
    }
}

#[test]
fn tokenizer_and_generation_settings_come_along_unchanged() {
    for name in fixtures() {
        let (_dir, out) = build(&name, &default_codec(AFFINE_4_32));
        for file in
            ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
        {
            let original = fixture(&name).join(file);
            if original.exists() {
                assert_eq!(fs::read(out.join(file)).unwrap(), fs::read(original).unwrap(), "{name}: {file}");
            }
        }
        let card = fs::read_to_string(out.join("README.md")).unwrap();
        for word in ["test.toml", "bits = 4", "group = 32"] {
            assert!(card.contains(word), "{name}: `{word}` is not in:\n{card}");
        }
        // Without a known base model the card makes no claim of one.
        assert!(!card.contains("base_model"), "{name}:\n{card}");
    }
}
