//! `tqc import`: weights against goldens made in numpy (`tests/oracle/exl3.py --write`), bytes, and refusals.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use tqc::numeric::{f16_from_f32, f16_to_f32};

use crate::common::*;
use crate::tqc;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/exl3")
}

/// A copy of the golden checkpoint in a folder of its own, without the rows.
fn copy() -> tempfile::TempDir {
    let dir = temp();
    copy_folder(&golden(), &dir.path().join("exl3"));
    fs::remove_file(dir.path().join("exl3/rows.json")).unwrap();
    dir
}

fn tensor(folder: &Path, name: &str) -> Tensor {
    let mut all = read_folder(folder);
    all.remove(name).unwrap_or_else(|| panic!("`{name}` is not in {:?}", all.keys()))
}

#[test]
fn weights_are_those_of_the_goldens_in_every_type() {
    let dir = copy();
    let out = |to: &str| dir.path().join(to);
    for to in ["f32", "f16", "bf16"] {
        tqc!("import", dir.path().join("exl3"), "-o", out(to), "--to", to).expect(0);
    }
    let rows = read_json(&golden().join("rows.json"));
    let rows = rows.as_object().unwrap();
    assert_eq!(rows.len(), 8);
    for (module, rows) in rows {
        let name = format!("{module}.weight");
        let weight = tensor(&out("f32"), &name);
        let (values, wide) = (weight.floats(), weight.shape[1] as usize);
        let most = values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        for (row, expected) in rows.as_object().unwrap() {
            let row: usize = row.parse().unwrap();
            let expected = expected.as_array().unwrap();
            assert_eq!(expected.len(), wide);
            for (found, expected) in values[row * wide..].iter().zip(expected) {
                let off = (f64::from(*found) - expected.as_f64().unwrap()).abs();
                assert!(off <= 2e-6 * f64::from(most), "{module}, row {row}: {found} is not {expected}");
            }
        }
        let halves: Vec<f32> = values.iter().map(|value| f16_to_f32(f16_from_f32(*value))).collect();
        assert_eq!(tensor(&out("f16"), &name).floats(), halves, "{module}");
        assert_eq!(tensor(&out("bf16"), &name).dtype, "BF16");
    }
}

#[test]
fn the_record_says_what_was_decoded_and_bytes_depend_on_no_thread() {
    let dir = copy();
    let mut tensors = read_safetensors(&dir.path().join("exl3/model.safetensors"));
    tensors.push(Tensor::random("model.norm.weight", &[300], 1));
    write_safetensors(&dir.path().join("exl3/model.safetensors"), &tensors);
    fs::write(dir.path().join("exl3/tokenizer.json"), "{}").unwrap();
    fs::write(dir.path().join("exl3/quantization_config.json"), "{}").unwrap();
    let import = |name: &str, threads: &str| {
        tqc!("import", dir.path().join("exl3"), "-o", dir.path().join(name), "--threads", threads, "--json")
            .expect(0)
    };
    let (one, two) = (import("one", "1").json(), import("two", "3").json());
    assert_eq!(one["digest"], two["digest"]);
    assert_eq!((&one["format"], &one["to"], &one["kept"]), (&json!("exl3"), &json!("f16"), &json!(1)));
    let mut names: Vec<_> =
        fs::read_dir(dir.path().join("one")).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["config.json", "imported.json", "model.safetensors", "tokenizer.json"]);
    for name in &names {
        let [a, b] = ["one", "two"].map(|folder| fs::read(dir.path().join(folder).join(name)).unwrap());
        assert!(a == b, "{name:?}");
    }
    let module = |name: &str| {
        let modules = one["modules"].as_array().unwrap();
        modules.iter().find(|module| module["module"] == name).unwrap().clone()
    };
    let half = module("mul1-2.5");
    assert_eq!(
        (&half["bits"], &half["code"], &half["shape"]),
        (&json!(2.5), &json!("mul1"), &json!([128, 128]))
    );
    assert_eq!((&module("3inst-6")["bits"], &module("3inst-6")["code"]), (&json!(6.0), &json!("3inst")));
    let kept = tensor(&dir.path().join("one"), "model.norm.weight");
    assert_eq!(kept.bytes, tensors.last().unwrap().bytes);
    assert_eq!(read_json(&dir.path().join("one/config.json")), json!({}));
    let record = read_json(&dir.path().join("one/imported.json"));
    assert_eq!(record["modules"], one["modules"]);
    for (name, digest) in record["files"].as_object().unwrap() {
        let found = tqc::digest::Digest::of(&fs::read(dir.path().join("one").join(name)).unwrap());
        assert_eq!(*digest, json!(found.to_string()), "{name}");
    }
    let read = record["source"]["files"].as_object().unwrap();
    assert_eq!(read.keys().collect::<Vec<_>>(), ["config.json", "model.safetensors"]);
}

/// Imports, and finds the words in the complaint and nothing written.
fn refused(dir: &Path, code: i32, words: &[&str]) {
    let run = tqc!("import", dir.join("exl3"), "-o", dir.join("new/out")).expect(code);
    for word in words {
        assert!(run.stderr.contains(word), "`{word}` is not in:\n{}", run.stderr);
    }
    assert!(!dir.join("new").exists() && run.stdout.is_empty());
}

/// Imports a golden whose tensors were changed.
fn changed(change: impl FnOnce(&mut Vec<Tensor>), words: &[&str]) {
    let dir = copy();
    let path = dir.path().join("exl3/model.safetensors");
    let mut tensors = read_safetensors(&path);
    change(&mut tensors);
    write_safetensors(&path, &tensors);
    refused(dir.path(), 3, words);
}

fn named<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
}

#[test]
fn tensors_that_are_no_exl3_modules_are_refused_by_name() {
    changed(|all| all.retain(|t| t.name != "mcg-3.svh"), &["`mcg-3` is packed in part", "mcg-3.svh"]);
    changed(|all| all.retain(|t| t.name != "mcg-3.trellis"), &["`mcg-3` is packed in part", "mcg-3.trellis"]);
    changed(|all| all.retain(|t| t.name != "mul1-2.5.mul1"), &["`mul1-2.5` has 40 words a tile", "`3inst`"]);
    let marker = |name: &str| Tensor::new(name, "I32", &[], vec![0; 4]);
    changed(|all| all.push(marker("mcg-3.mul1")), &["`mcg-3` is marked as both"]);
    changed(|all| all.push(Tensor::random("mcg-3.weight", &[4, 4], 1)), &["`mcg-3` is stored twice"]);
    changed(
        |all| all.push(Tensor::new("mcg-3.su", "I16", &[8], vec![0; 16])),
        &["`mcg-3` is stored twice", "mcg-3.su"],
    );
    changed(|all| named(all, "mcg-3.suh").shape = vec![2, 64], &["mcg-3.suh", "F16 [2, 64]", "F16 [128]"]);
    changed(
        |all| named(all, "mcg-3.trellis").dtype = "U16".to_owned(),
        &["mcg-3.trellis", "U16", "I16 [in / 16"],
    );
    changed(
        |all| {
            let trellis = named(all, "mcg-3.trellis");
            trellis.shape = vec![trellis.shape[0], trellis.shape[1] / 2, 2 * trellis.shape[2]];
        },
        &["mcg-3.svh", "F16 [256]", "F16 [128]"],
    );
    changed(
        |all| {
            let trellis = named(all, "mcg-3.trellis");
            trellis.shape = vec![trellis.shape[0] / 2, trellis.shape[1], 2 * trellis.shape[2]];
        },
        &["mcg-3.trellis", "128 divides"],
    );
    changed(
        |all| {
            let scales = named(all, "mcg-3.svh");
            scales.bytes[2 * 7..2 * 8].copy_from_slice(&0x7e00u16.to_le_bytes());
        },
        &["row 7 of `mcg-3`", "--to f32"],
    );
    changed(
        |all| all.retain(|t| t.name.ends_with(".su") || t.name.ends_with(".nothing")),
        &["packed in part"],
    );
}

#[test]
fn folders_and_targets_that_cannot_be_are_refused() {
    let dir = copy();
    let config = dir.path().join("exl3/config.json");
    for (text, code, words) in [
        ("{}", 3, "has no `quantization_config`"),
        (r#"{"quantization_config": {"quant_method": "gptq"}}"#, 3, "of method \"gptq\""),
        ("[1]", 3, "is not a JSON object"),
        ("{", 3, "is not a JSON object"),
    ] {
        fs::write(&config, text).unwrap();
        refused(dir.path(), code, &[words, "config.json"]);
    }
    fs::remove_file(&config).unwrap();
    refused(dir.path(), 3, &["config.json"]);
    let dir = copy();
    let weights = dir.path().join("exl3/model.safetensors");
    let whole = fs::read(&weights).unwrap();
    fs::write(&weights, &whole[..whole.len() - 5]).unwrap();
    refused(dir.path(), 3, &["model.safetensors"]);
    fs::write(&weights, &whole).unwrap();
    fs::create_dir(dir.path().join("taken")).unwrap();
    let there = tqc!("import", dir.path().join("exl3"), "-o", dir.path().join("taken")).expect(2);
    assert!(there.stderr.contains("exists already"), "{}", there.stderr);
    let absent = tqc!("import", dir.path().join("absent"), "-o", dir.path().join("new")).expect(2);
    assert!(absent.stderr.contains("there is no folder"), "{}", absent.stderr);
    let wrong = tqc!("import", dir.path().join("exl3"), "-o", dir.path().join("new"), "--to", "affine-8g64");
    assert!(wrong.expect(2).stderr.contains("f16, bf16, f32"));
    // A build says how to go on.
    let recipe = recipe(dir.path(), &default_codec("\"bf16\""));
    let run =
        tqc!("build", recipe, "--source", dir.path().join("exl3"), "-o", dir.path().join("built")).expect(3);
    assert!(run.stderr.contains("tqc import"), "{}", run.stderr);
}
