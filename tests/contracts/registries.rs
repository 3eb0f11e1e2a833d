//! Walks over the lists of families, codecs and encoders.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use tqc::arch::registry::ARCHS;
use tqc::codec::CodecSpec;
use tqc::quant::{ENCODERS, base, weighs};

use crate::common::*;
use crate::tqc;

#[test]
fn every_family_has_a_fixture_whose_every_tensor_the_plan_places() {
    let mut by_type: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in fixtures() {
        let config = read_json(&fixture(&name).join("config.json"));
        by_type.entry(config["model_type"].as_str().unwrap().to_owned()).or_default().push(name);
    }
    let dir = temp();
    let recipe = recipe(dir.path(), &default_codec("\"keep\""));
    let mut planned = BTreeSet::new();
    for arch in ARCHS {
        let types = arch.model_types();
        let names: Vec<&String> = types.iter().filter_map(|kind| by_type.get(*kind)).flatten().collect();
        assert!(!names.is_empty(), "no fixture is of any of {types:?}");
        for name in names {
            let plan = tqc!("plan", recipe, "--source", fixture(name), "--json").expect(0).json();
            let placed: BTreeSet<&str> =
                list(&plan, "modules", "source").chain(list(&plan, "dropped", "tensor")).collect();
            let source = read_folder(&fixture(name));
            assert!(placed.iter().copied().eq(source.keys().map(String::as_str)), "{name}");
            // Nothing else reads these weights: what is not dropped is stored, weight for weight.
            let stored: u64 =
                plan["modules"].as_array().unwrap().iter().map(|m| m["weights"].as_u64().unwrap()).sum();
            let dropped: BTreeSet<&str> = list(&plan, "dropped", "tensor").collect();
            let kept = source.values().filter(|tensor| !dropped.contains(&*tensor.name));
            assert_eq!(
                stored,
                kept.map(|tensor| tensor.shape.iter().product::<u64>()).sum::<u64>(),
                "{name}"
            );
            planned.insert(name.clone());
        }
    }
    assert!(planned.iter().eq(&fixtures()), "a fixture is of no family");
}

fn list<'a>(plan: &'a Value, key: &str, field: &'a str) -> impl Iterator<Item = &'a str> {
    plan[key].as_array().unwrap().iter().map(move |item| item[field].as_str().unwrap())
}

/// A codec as a recipe spells it.
fn spelling(codec: CodecSpec) -> String {
    match codec {
        CodecSpec::Affine { bits, group } => {
            format!("{{ affine = {{ bits = {}, group = {} }} }}", bits.get(), group.get())
        }
        CodecSpec::Trellis(trellis) => format!("{{ trellis = {{ bits = {} }} }}", trellis.bits()),
        other => format!("\"{other}\""),
    }
}

#[test]
fn every_codec_and_encoder_builds_and_verifies_by_encoding_again() {
    // Every width is a multiple of 128 in this one, so that every group divides.
    let source = fixture("llama-tied");
    let dir = temp();
    for codec in CodecSpec::all() {
        let of_trellis = |encoder: &&'static str| matches!(base(encoder), "trellis");
        let encoders: Vec<&str> = match codec {
            CodecSpec::Affine { .. } => ENCODERS.iter().copied().filter(|e| !of_trellis(e)).collect(),
            CodecSpec::Trellis(_) => ENCODERS.iter().copied().filter(of_trellis).collect(),
            _ => vec![""],
        };
        for encoder in encoders {
            let mut text = default_codec(&spelling(codec));
            if !encoder.is_empty() {
                text.push_str(&format!("encoder = \"{encoder}\"\n"));
            }
            if weighs(encoder) {
                text.push_str("[calibration]\nrows = 4\ncontext = 64\n");
            }
            let what = format!("{codec} {encoder}");
            let recipe = recipe(dir.path(), &text);
            let out = dir.path().join("out");
            tqc!("build", recipe, "--source", source, "-o", out).expect(0);
            let verdict =
                tqc!("verify", out, "--source", source, "--rebuild", "all", "--json").expect(0).json();
            assert!(verdict["rebuilt_modules"].as_u64().unwrap() > 15, "{what}: {verdict}");

            let config = read_json(&out.join("config.json"));
            let record = read_json(&out.join("provenance.json"));
            let outputs = record["outputs"].as_array().unwrap();
            let weight = outputs.iter().find(|o| o["name"] == "model.layers.0.mlp.up_proj.weight").unwrap();
            assert_eq!(weight["codec"], codec.to_string(), "{what}");
            match weight["relative_mse"].as_f64() {
                // Coarser than two bits is nothing; finer than f16's rounding is a mistake somewhere. Codes that errors were
                // weighed for err more where it costs nothing, but not as much as zeros would.
                Some(mse) => {
                    let most = if weighs(encoder) { 1.0 } else { 0.3 };
                    assert!(
                        (1e-9..most).contains(&mse) || (mse == 0.0 && !codec.quantizes()),
                        "{what}: {mse}"
                    )
                }
                None => assert!(!codec.quantizes(), "{what}"),
            }
            if codec.quantizes() {
                if !encoder.is_empty() {
                    assert_eq!(weight["encoder"], *encoder, "{what}");
                }
                // A trellis has a scale for each input here, and 256 is the most weights of a tile.
                let (group, scales) = match codec.group() {
                    Some(group) => (group, serde_json::json!([256, 128 / group])),
                    None => (256, serde_json::json!([128])),
                };
                assert_eq!(config["quantization"]["group_size"], group, "{what}");
                let shapes: BTreeMap<&str, &Value> =
                    outputs.iter().map(|o| (o["name"].as_str().unwrap(), &o["shape"])).collect();
                assert_eq!(*shapes["model.layers.0.mlp.up_proj.scales"], scales, "{what}");
            } else {
                assert!(config.get("quantization").is_none(), "{what}");
            }
        }
    }
}

#[test]
fn wider_codes_have_smaller_errors() {
    let dir = temp();
    let mut last = f64::INFINITY;
    for bits in [2, 3, 4, 5, 6, 8] {
        let text = default_codec(&format!("{{ affine = {{ bits = {bits}, group = 64 }} }}"));
        let out = dir.path().join("out");
        tqc!("build", recipe(dir.path(), &text), "--source", fixture("llama-tied"), "-o", out).expect(0);
        let record = read_json(&out.join("provenance.json"));
        let outputs = record["outputs"].as_array().unwrap();
        let weight = outputs.iter().find(|o| o["name"] == "model.layers.1.mlp.down_proj.weight").unwrap();
        let mse = weight["relative_mse"].as_f64().unwrap();
        // One bit more quarters the error of a uniform grid.
        assert!(mse < 0.5 * last, "{bits} bits: {mse}, after {last}");
        last = mse;
    }
}
