//! Artifacts, made by the program itself with every codec: each computes what a float checkpoint of the decoded weights
//! computes.

use serde_json::Value;
use tqc::codec::{AffineBits, CodecSpec, GroupSize, Matrix, Part, codec};
use tqc::tensor::{Float, Shape};

use super::*;
use crate::common::{
    Tensor, copy_folder, default_codec, read_folder, read_json, recipe, temp, write_json, write_safetensors,
};
use crate::plain::{difference, widen};
use crate::random::Sizes;
use crate::tqc;

/// The codec as a recipe spells it.
fn spelled(spec: CodecSpec) -> String {
    match spec {
        CodecSpec::Affine { bits, group } => {
            format!("{{ affine = {{ bits = {}, group = {} }} }}", bits.get(), group.get())
        }
        CodecSpec::Trellis(trellis) => {
            let json = serde_json::to_string(&trellis).unwrap();
            // A TOML table is JSON with other signs.
            format!("{{ trellis = {} }}", json.replace(':', " = "))
        }
        other => format!("\"{other}\""),
    }
}

/// What an entry of `quantization` says.
fn entry(value: &Value) -> CodecSpec {
    let number = |key: &str| value[key].as_u64().unwrap() as u32;
    match value["mode"].as_str().unwrap_or("affine") {
        "mxfp4" => CodecSpec::Mxfp4,
        "mxfp8" => CodecSpec::Mxfp8,
        "nvfp4" => CodecSpec::Nvfp4,
        "trellis" => {
            let own =
                ["bits", "states", "code", "along", "scales"].map(|key| (key.to_owned(), value[key].clone()));
            CodecSpec::Trellis(serde_json::from_value(own.into_iter().collect()).unwrap())
        }
        "affine" => CodecSpec::Affine {
            bits: AffineBits::try_from(number("bits")).unwrap(),
            group: GroupSize::try_from(number("group_size")).unwrap(),
        },
        other => panic!("{other}"),
    }
}

/// Writes the weights of the artifact in `from` as floats: every packed module decoded to F32.
fn decode(from: &Path, to: &Path) -> usize {
    std::fs::create_dir_all(to).unwrap();
    let mut config = read_json(&from.join("config.json"));
    let packing = config.as_object_mut().unwrap().remove("quantization").unwrap_or_default();
    config.as_object_mut().unwrap().remove("quantization_config");
    write_json(&to.join("config.json"), &config);
    let tensors = read_folder(from);
    let (mut floats, mut packed) = (Vec::new(), 0);
    for (name, tensor) in &tensors {
        let Some(module) = name.strip_suffix(".weight") else {
            if ![".scales", ".scales2", ".biases"].iter().any(|suffix| name.ends_with(suffix)) {
                floats.push(tensor.clone());
            }
            continue;
        };
        let Some(scales) = tensors.get(&format!("{module}.scales")) else {
            floats.push(tensor.clone());
            continue;
        };
        packed += 1;
        let spec = entry(packing.get(module).unwrap_or(&packing));
        let mut shape = tensor.shape.clone();
        match spec {
            CodecSpec::Trellis(trellis) => {
                // [.., N / T, K, words of a tile]
                let words = shape.pop().unwrap();
                let tiles = shape.len() - 2;
                shape[tiles] *= words * 32 / u64::from(trellis.bits());
            }
            _ => *shape.last_mut().unwrap() = scales.shape.last().unwrap() * u64::from(spec.group().unwrap()),
        }
        let matrix = Matrix::of(&Shape(shape.clone()));
        let mut planes = vec![tensor.bytes.as_slice(), scales.bytes.as_slice()];
        for suffix in ["biases", "scales2"] {
            planes.extend(tensors.get(&format!("{module}.{suffix}")).map(|plane| plane.bytes.as_slice()));
        }
        let float = match scales.dtype.as_str() {
            "F16" => Float::F16,
            "F32" => Float::F32,
            _ => Float::Bf16,
        };
        let mut values = vec![0.0; shape.iter().product::<u64>() as usize];
        codec(spec).decode(Part { matrix, first: 0 }, float, &planes, &mut values);
        floats.push(Tensor::of_floats(name, &shape, &values));
    }
    write_safetensors(&to.join("model.safetensors"), &floats);
    if from.join("mtp").exists() {
        copy_folder(&from.join("mtp"), &to.join("mtp"));
    }
    packed
}

fn build(source: &Path, dir: &Path, spec: CodecSpec) -> std::path::PathBuf {
    let (recipe, out) = (recipe(dir, &default_codec(&spelled(spec))), dir.join(format!("{spec}")));
    tqc!("build", recipe, "--source", source, "-o", out).expect(0);
    out
}

fn all_logits(model: &Model, ids: &[u32]) -> Vec<f32> {
    model.forward(&mut model.state(), ids, Want::All).unwrap().logits
}

#[test]
fn an_artifact_of_any_codec_computes_what_its_decoded_weights_do() {
    for (family, dtype) in [("llama", "BF16"), ("qwen3_5_moe", "BF16"), ("qwen2", "F16")] {
        let dir = temp();
        let sizes = Sizes { dtype, ..Sizes::wide(family) };
        let source = dir.path().join("source");
        sizes.model().write(&source);
        let ids = sizes.prompt(24);
        let right = widen(&all_logits(&open(&source), &ids));
        let scale = right.iter().fold(0.0, |most: f64, logit| most.max(logit.abs()));
        let mut by_bits = Vec::new();
        for spec in CodecSpec::all() {
            let artifact = build(&source, dir.path(), spec);
            let floats = dir.path().join("floats");
            let packed = decode(&artifact, &floats);
            assert_eq!(packed > 0, spec.quantizes(), "{family} {spec}: {packed}");
            let model = open(&artifact);
            let found = widen(&all_logits(&model, &ids));
            let expected = widen(&all_logits(&open(&floats), &ids));
            let apart = difference(&expected, &found, sizes.vocab as usize);
            assert!(apart.most < 1e-3 * scale, "{family} {spec}: {apart:?} of {scale}");
            if spec.quantizes() {
                // It is packed: the weights are no longer those of the source.
                let loss = difference(&right, &found, sizes.vocab as usize).most;
                assert!(loss > 1e-3 * scale, "{family} {spec}: {loss}");
                let bytes = model.bytes_per_token();
                assert!(bytes < open(&floats).bytes_per_token() / 2, "{family} {spec}: {bytes} bytes");
                if let CodecSpec::Affine { bits, .. } = spec {
                    by_bits.push((bits.get(), difference(&right, &found, sizes.vocab as usize).kl));
                }
            }
            // The draft head, which lies in its own folder.
            if family == "qwen3_5_moe" {
                let (draft, theirs) = (open(&artifact), open(&floats));
                let hidden = draft.forward(&mut draft.state(), &ids, Want::All).unwrap().hidden;
                let run = |model: &Model| {
                    let head = model.draft().unwrap();
                    head.forward_all(model, &mut head.state(model), &ids, &hidden).unwrap().logits
                };
                assert_close(&format!("{spec}"), &run(&draft), &run(&theirs), 1e-3 * scale as f32);
            }
        }
        let mean = |bits: u32| {
            let of: Vec<f64> = by_bits.iter().filter(|(b, _)| *b == bits).map(|(_, kl)| *kl).collect();
            of.iter().sum::<f64>() / of.len() as f64
        };
        assert!(mean(8) < 0.05 * mean(3) && mean(4) < mean(2), "{family}: {by_bits:?}");
    }
}

#[test]
fn packed_models_have_the_same_bits_on_every_instruction_set_with_any_threads_and_passes() {
    let affine = |bits: u32, group: u32| CodecSpec::Affine {
        bits: AffineBits::try_from(bits).unwrap(),
        group: GroupSize::try_from(group).unwrap(),
    };
    let codecs = [
        affine(2, 32),
        affine(3, 64),
        affine(4, 64),
        affine(5, 128),
        affine(6, 32),
        affine(8, 64),
        CodecSpec::Mxfp4,
        CodecSpec::Mxfp8,
        CodecSpec::Nvfp4,
        "trellis-3".parse().unwrap(),
        "trellis-2-L14-mul1-inputs-one".parse().unwrap(),
    ];
    for family in ["llama", "qwen3_5_moe"] {
        let dir = temp();
        let sizes = Sizes::wide(family);
        let source = dir.path().join("source");
        sizes.model().write(&source);
        let ids = sizes.prompt(15);
        for spec in codecs {
            let artifact = build(&source, dir.path(), spec);
            let on = |isa, threads, precision, lengths: &[usize]| {
                let model = open_on(&artifact, Cpu::new(isa, threads, precision));
                in_passes(&model, &ids, lengths).0
            };
            let exact = on(Isa::Scalar, 1, Precision::Exact, &[15]);
            let fast = on(Isa::Scalar, 1, Precision::Fast, &[15]);
            for isa in Isa::available() {
                for (threads, lengths) in [(1, [15]), (2, [1]), (3, [4]), (5, [7])] {
                    for (precision, expected) in [(Precision::Exact, &exact), (Precision::Fast, &fast)] {
                        let found = on(isa, threads, precision, &lengths);
                        let what =
                            format!("{family} {spec} {precision} {isa}, {threads} threads, {lengths:?}");
                        assert!(same_bits(&found, expected), "{what}");
                    }
                }
            }
            // Activations of eight bits cost something, and not much.
            let scale = exact.iter().fold(0.0, |most: f32, logit| most.max(logit.abs()));
            let model = open_on(&artifact, Cpu::new(Isa::best(), 1, Precision::Fast));
            let any = model.precisions().contains_key(&Precision::Fast);
            let apart = difference(&widen(&exact), &widen(&fast), sizes.vocab as usize);
            assert_eq!(apart.most > 0.0, any, "{family} {spec}: {apart:?}");
            // A flip of an expert is a jump; the dense model has none.
            if family == "llama" {
                assert!(
                    apart.most < 0.05 * f64::from(scale) && apart.kl < 0.02,
                    "{spec}: {apart:?} of {scale}"
                );
            }
        }
    }
}

/// Whether a norm of `qwen3_5` is stored as its gain less one.
fn is_centred(name: &str) -> bool {
    name.contains("norm") && !name.contains("linear_attn") && !name.contains("visual")
}

#[test]
fn an_artifact_that_keeps_every_weight_has_the_bits_of_its_source() {
    for name in fixtures() {
        let dir = temp();
        let mut source = crate::common::Model::fixture(&name);
        if name.starts_with("qwen3_5") {
            // The artifact stores gains in bf16. Those that are exact there, less one, are exact here.
            for tensor in source.shards.iter_mut().flatten().filter(|tensor| is_centred(&tensor.name)) {
                let values: Vec<f32> =
                    tensor.floats().iter().map(|w| half::bf16::from_f32(1.0 + w).to_f32() - 1.0).collect();
                let bytes = values.iter().flat_map(|w| half::bf16::from_f32(*w).to_le_bytes()).collect();
                *tensor = Tensor::new(&tensor.name, "BF16", &tensor.shape, bytes);
                assert_eq!(tensor.floats(), values, "{}", tensor.name);
            }
        }
        source.write(&dir.path().join("source"));
        let text = "[default]\ncodec = \"keep\"\n[[rule]]\nmatch = \"*\"\ncodec = \"keep\"\n";
        let out = dir.path().join("out");
        tqc!("build", recipe(dir.path(), text), "--source", dir.path().join("source"), "-o", out).expect(0);
        let (from, to) = (open(&dir.path().join("source")), open(&out));
        let ids = Reference::open(&name).ids("input_ids.a");
        assert!(same_bits(&all_logits(&from, &ids), &all_logits(&to, &ids)), "{name}");
        let Ok(head) = from.draft() else { continue };
        let hidden = from.forward(&mut from.state(), &ids, Want::All).unwrap().hidden;
        let theirs = head.forward_all(&from, &mut head.state(&from), &ids, &hidden).unwrap();
        let head = to.draft().unwrap();
        let ours = head.forward_all(&to, &mut head.state(&to), &ids, &hidden).unwrap();
        assert!(same_bits(&ours.logits, &theirs.logits), "{name}: draft head");
    }
}

#[test]
fn an_artifact_of_a_published_checkpoint_loses_only_what_bf16_gains_lose() {
    for name in fixtures() {
        let dir = temp();
        let text = "[default]\ncodec = \"keep\"\n[[rule]]\nmatch = \"*\"\ncodec = \"keep\"\n";
        let out = dir.path().join("out");
        tqc!("build", recipe(dir.path(), text), "--source", fixture(&name), "-o", out).expect(0);
        let ids = Reference::open(&name).ids("input_ids.a");
        let right = Reference::open(&name).floats("logits_f32.a");
        let found = all_logits(&open(&out), &ids);
        let apart = difference(&widen(&right), &widen(&found), found.len() / ids.len());
        if name.starts_with("qwen3_5") {
            // Section 12 of the specification measured 4e-4 to 6e-3 of mean KL in these fixtures.
            assert!(apart.kl > 1e-5 && apart.kl < 0.02, "{name}: {apart:?}");
        } else {
            assert!(apart.most < f64::from(LOGITS), "{name}: {apart:?}");
        }
    }
}
