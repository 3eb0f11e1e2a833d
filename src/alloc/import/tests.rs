//! Every format, written by hand as its tool writes it, and what is wrong with files.

use proptest::prelude::*;
use serde_json::json;

use super::*;

const A: &str = "language_model.model.layers.0.mlp.down_proj";
const B: &str = "language_model.model.layers.0.mlp.up_proj";

fn wanted(path: &str, weights: u64, in_features: u64) -> Wanted<'_> {
    Wanted { path, weights, in_features, required: true }
}

fn modules() -> [Wanted<'static>; 2] {
    [wanted(A, 4_000_000, 64), wanted(B, 2_000_000, 64)]
}

fn read_with(bytes: &[u8], modules: &[Wanted<'_>]) -> Result<CostTable, ImportError> {
    let candidates = ["affine-4g64", "trellis-3", "trellis-4"].map(|codec| codec.parse().unwrap());
    let (tensors, config) = (Digest::of(b"t"), Digest::of(b"c"));
    read(bytes, &Facts { tensors, config, modules, candidates: &candidates })
}

fn read_json(value: &Value) -> Result<CostTable, ImportError> {
    read_with(value.to_string().as_bytes(), &modules())
}

fn cost(table: &CostTable, module: &str, codec: &str) -> Option<f64> {
    table.modules[module].get(&codec.parse().unwrap()).map(|cost| cost.nats)
}

fn own() -> Value {
    let candidates = json!({ "affine-4g64": { "kl": 0.25, "standard_error": 0.125, "bytes": 9 } });
    json!({
        "format": FORMAT, "basis": "hadamard", "encoder": "mlx", "base_kl": 0.0,
        "model": { "model_type": "x", "tensors_sha256": Digest::of(b"t"), "config_sha256": Digest::of(b"c") },
        "text": { "name": "x", "tokens_sha256": Digest::of(b"x"), "positions": 8, "sequences": 2 },
        "modules": {
            A: { "weights": 4_000_000, "candidates": candidates },
            B: { "weights": 2_000_000, "candidates": { "mxfp4": { "kl": 0.5, "standard_error": null, "bytes": 9 } } },
        },
    })
}

#[test]
fn our_own_file_gives_what_it_says() {
    let table = read_json(&own()).unwrap();
    assert!(table.measured);
    assert_eq!((table.format, table.basis.as_str()), ("tqc-sensitivity", "hadamard"));
    let codec = "affine-4g64".parse().unwrap();
    assert_eq!(table.modules[A][&codec], Cost { nats: 0.25, standard_error: Some(0.125) });
    assert_eq!(cost(&table, B, "mxfp4"), Some(0.5));
    assert_eq!(cost(&table, B, "affine-4g64"), None);
}

#[test]
fn a_file_of_another_model_is_refused_by_tensors_config_and_weights() {
    let refused = |change: fn(&mut Value)| {
        let mut file = own();
        change(&mut file);
        read_json(&file).unwrap_err().to_string()
    };
    // The digests are those of `printf other | sha256sum` and `printf t | sha256sum`.
    assert_eq!(
        refused(|file| file["model"]["tensors_sha256"] = json!(Digest::of(b"other"))),
        "is of another model: the digest of all tensors' names, dtypes and shapes is d9298a10d1b0, but the source has \
         e3b98a4da31a"
    );
    assert!(
        refused(|file| file["model"]["config_sha256"] = json!(Digest::of(b"other")))
            .contains("`config.json`")
    );
    assert_eq!(
        refused(|file| file["modules"][A]["weights"] = json!(5)),
        format!("is of another model: the number of weights of `{A}` is 5, but the source has 4000000")
    );
}

#[test]
fn names_that_fit_nothing_and_modules_that_are_missing_are_counted_and_named() {
    let mut file = own();
    for i in 0..5 {
        file["modules"][format!("model.layers.{i}.mlp.nope")] = json!({ "weights": 1, "candidates": {} });
    }
    assert_eq!(
        read_json(&file).unwrap_err().to_string(),
        "has 5 names of no module of this model, such as `model.layers.0.mlp.nope`, `model.layers.1.mlp.nope`, \
         `model.layers.2.mlp.nope`"
    );
    let mut file = own();
    file["modules"].as_object_mut().unwrap().remove(B);
    let missing = read_json(&file).unwrap_err();
    assert_eq!(missing.to_string(), format!("lacks 1 of the modules to be given bits, such as `{B}`"));
    // Where it is not required, the table simply lacks it.
    let modules = [wanted(A, 4_000_000, 64), Wanted { required: false, ..wanted(B, 2_000_000, 64) }];
    let table = read_with(file.to_string().as_bytes(), &modules).unwrap();
    assert_eq!(table.modules.keys().collect::<Vec<_>>(), [A]);
}

#[test]
fn what_is_wrong_in_our_own_file_is_said() {
    let mut file = own();
    file["format"] = json!("tqc-sensitivity/2");
    assert_eq!(
        read_json(&file).unwrap_err().to_string(),
        "has format `tqc-sensitivity/2`, and this program reads `tqc-sensitivity/1`"
    );
    let mut file = own();
    file["modules"][A]["candidates"] =
        json!({ "affine-7g64": { "kl": 0.1, "standard_error": null, "bytes": 1 } });
    assert!(read_json(&file).unwrap_err().to_string().contains("no codec is written `affine-7g64`"));
    let mut file = own();
    file["modules"][A]["candidates"]["affine-4g64"]["kl"] = json!(1e300);
    assert!(matches!(read_json(&file), Err(ImportError::BadCost { name, .. }) if name == A));
    let mut file = own();
    file["extra"] = json!(1);
    assert!(read_json(&file).unwrap_err().to_string().contains("unknown field `extra`"));
}

#[test]
fn an_optiq_file_is_read_in_both_its_forms() {
    let layer = |name: &str, count: u64| json!({ "layer_name": name, "sensitivities": { "4": 0.5, "8": 0.125, "16": 0.0 }, "param_count": count });
    let layers = json!([
        layer("model.language_model.layers.0.mlp.down_proj", 4_000_000),
        layer("language_model.model.layers.0.mlp.up_proj", 2_000_000),
    ]);
    let bare = read_json(&layers).unwrap();
    assert_eq!((bare.format, bare.measured), ("optiq", true));
    for (codec, expected) in [
        ("affine-4g64", Some(0.5)),
        ("affine-8g64", Some(0.125)),
        ("bf16", Some(0.0)),
        ("affine-4g32", None),
        ("affine-5g64", None),
    ] {
        assert_eq!(cost(&bare, A, codec), expected, "{codec}");
    }
    let whole = json!({ "base_model": "x", "group_size": 32, "metric": "kl_divergence_vs_reference", "layers": layers });
    assert_eq!(cost(&read_json(&whole).unwrap(), B, "affine-4g32"), Some(0.5));
    let wrong = json!([layer("layers.0.mlp.down_proj", 7), layer("layers.0.mlp.up_proj", 2_000_000)]);
    assert!(matches!(read_json(&wrong), Err(ImportError::OtherModel { .. })));
}

#[test]
fn experts_one_by_one_add_up_to_all_together() {
    let all = "language_model.model.layers.0.mlp.switch_mlp.up_proj";
    let layer = |expert: u64, kl: f64| {
        json!({ "layer_name": format!("model.layers.0.mlp.experts.{expert}.up_proj"),
                "sensitivities": { "4": kl }, "param_count": 10 })
    };
    let file = json!([layer(0, 0.25), layer(1, 0.5)]).to_string();
    let table = read_with(file.as_bytes(), &[wanted(all, 20, 64)]).unwrap();
    assert_eq!(cost(&table, all, "affine-4g64"), Some(0.75));
    assert!(read_with(file.as_bytes(), &[wanted(all, 30, 64)]).is_err(), "an expert is missing");
    let twice = json!([layer(0, 0.25), layer(0, 0.5)]).to_string();
    assert!(matches!(read_with(twice.as_bytes(), &[wanted(all, 20, 64)]), Err(ImportError::Twice { .. })));
}

#[test]
fn an_mlx_lm_file_gives_the_saving_it_measured_between_four_and_five_bits() {
    let file =
        json!([["language_model.model.layers.0.mlp.down_proj", 0.003], ["model.layers.0.mlp.up_proj", -0.5]]);
    let table = read_json(&file).unwrap();
    assert!(!table.measured);
    let saving = cost(&table, A, "affine-4g64").unwrap() - cost(&table, A, "affine-5g64").unwrap();
    // 0.003 for a million weights, of which there are four.
    assert!((saving - 0.012).abs() < 1e-12, "{saving}");
    assert_eq!(cost(&table, A, "affine-2g32").unwrap(), 16.0 * cost(&table, A, "affine-4g32").unwrap());
    assert_eq!(cost(&table, B, "affine-2g64"), Some(0.0));
}

#[test]
fn an_exl3_file_gives_changes_from_its_base_shared_by_a_group() {
    let layers = json!(["model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"]);
    let candidates = json!([{ "dkld": -0.5, "dbits": 100 }, { "dkld": -0.75, "dbits": 300 }]);
    let mut file = json!({
        "base": { "dir": "2.0", "bpw": 2.02 }, "alts": [{ "dir": "3", "bpw": 3.02 }, { "dir": "5", "bpw": 5.02 }],
        "base_kld": 1.0, "groups": [{ "idx": 0, "layers": layers, "candidates": candidates }],
    });
    let table = read_json(&file).unwrap();
    for (codec, expected) in [
        ("affine-2g64", Some(0.0)),
        ("affine-3g128", Some(-0.25)),
        ("affine-5g64", Some(-0.375)),
        ("affine-4g64", None),
        ("trellis-3", Some(-0.25)),
        // No model of 4 bits was measured, and nobody asked for 2.
        ("trellis-4", None),
        ("trellis-2", None),
    ] {
        assert_eq!(cost(&table, A, codec), expected, "{codec}");
    }
    file["alts"][0]["bpw"] = json!(2.5);
    assert!(read_json(&file).unwrap_err().to_string().contains("no whole number of bits"));
}

#[test]
fn json_that_is_cut_off_or_says_a_thing_twice_is_told_where() {
    let text = own().to_string();
    let twice = text.replacen("\"weights\":4000000", "\"weights\":4,\"weights\":4000000", 1);
    assert_ne!(twice, text);
    for (bytes, words) in [
        (twice, "`weights` occurs twice"),
        (text[..text.len() - 9].to_owned(), "EOF"),
        ("[[\"model.embed_tokens\", NaN]]".to_owned(), "line 1 column"),
        (format!("\u{feff}{text}"), "line 1 column 1"),
        (format!("{text} x"), "trailing characters"),
    ] {
        let error = read_with(bytes.as_bytes(), &modules()).unwrap_err();
        assert!(
            matches!(error, ImportError::Malformed { .. }) && error.to_string().contains(words),
            "{error}"
        );
    }
}

/// The older binary form.
fn legacy(entries: &[(&str, u32, &[f32])]) -> Vec<u8> {
    let mut bytes = (entries.len() as u32).to_le_bytes().to_vec();
    for (name, calls, values) in entries {
        bytes.extend((name.len() as u32).to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend(calls.to_le_bytes());
        bytes.extend((values.len() as u32).to_le_bytes());
        values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
    }
    bytes
}

/// A GGUF of version 3 with these F32 tensors and two values of metadata.
fn gguf(tensors: &[(&str, &[u64], &[f32])]) -> Vec<u8> {
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend(2u64.to_le_bytes());
    text(&mut bytes, "general.type");
    bytes.extend(8u32.to_le_bytes());
    text(&mut bytes, "imatrix");
    text(&mut bytes, "imatrix.datasets");
    bytes.extend(9u32.to_le_bytes());
    bytes.extend(8u32.to_le_bytes());
    bytes.extend(1u64.to_le_bytes());
    text(&mut bytes, "words.txt");
    let mut offset = 0u64;
    for (name, dims, values) in tensors {
        text(&mut bytes, name);
        bytes.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        offset += (4 * values.len() as u64).next_multiple_of(32);
    }
    for (_, _, values) in tensors {
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
    }
    bytes
}

const SMALL: [Wanted<'static>; 2] = [
    Wanted { path: A, weights: 40, in_features: 2, required: true },
    Wanted { path: B, weights: 20, in_features: 2, required: true },
];

#[test]
fn both_forms_of_an_imatrix_give_mean_squares_times_weights() {
    // Mean squares (1 + 3) / 2 = 2 and (0.5 + 1.5) / 2 = 1; by weights 80 and 20, so 1 and a quarter.
    let old = legacy(&[("blk.0.ffn_down.weight", 4, &[4.0, 12.0]), ("blk.0.ffn_up.weight", 2, &[1.0, 3.0])]);
    let new = gguf(&[
        ("blk.0.ffn_down.weight.in_sum2", &[2, 1], &[100.0, 300.0]),
        ("blk.0.ffn_down.weight.counts", &[1, 1], &[100.0]),
        ("blk.0.ffn_up.weight.in_sum2", &[2, 1], &[5.0, 15.0]),
        ("blk.0.ffn_up.weight.counts", &[1, 1], &[10.0]),
    ]);
    for (bytes, format) in [(old, "imatrix.dat"), (new, "imatrix")] {
        let table = read_with(&bytes, &SMALL).unwrap();
        assert_eq!((table.format, table.measured), (format, false));
        assert_eq!(cost(&table, A, "affine-2g64"), Some(1.0 / 16.0));
        assert_eq!(cost(&table, B, "affine-3g64"), Some(0.25 / 64.0));
    }
}

#[test]
fn an_expert_that_saw_no_token_does_not_count() {
    let all = "language_model.model.layers.0.mlp.switch_mlp.down_proj";
    let modules = [wanted(all, 40, 2), wanted(B, 20, 2)];
    let file = gguf(&[
        ("blk.0.ffn_down_exps.weight.in_sum2", &[2, 2], &[100.0, 300.0, 0.0, 0.0]),
        ("blk.0.ffn_down_exps.weight.counts", &[1, 2], &[100.0, 0.0]),
        ("blk.0.ffn_up.weight.in_sum2", &[2, 1], &[5.0, 15.0]),
        ("blk.0.ffn_up.weight.counts", &[1, 1], &[10.0]),
    ]);
    let table = read_with(&file, &modules).unwrap();
    assert_eq!(cost(&table, B, "affine-2g64"), Some(0.25 / 16.0));
}

#[test]
fn an_imatrix_of_another_width_is_refused() {
    let file =
        legacy(&[("blk.0.ffn_down.weight", 4, &[4.0, 12.0, 1.0]), ("blk.0.ffn_up.weight", 2, &[1.0, 3.0])]);
    assert_eq!(
        read_with(&file, &SMALL).unwrap_err().to_string(),
        format!("is of another model: the number of columns of `{A}` is 3, but the source has 2")
    );
}

#[test]
fn any_prefix_of_a_binary_file_is_refused_and_none_is_a_crash() {
    let old = legacy(&[("blk.0.ffn_down.weight", 4, &[4.0, 12.0]), ("blk.0.ffn_up.weight", 2, &[1.0, 3.0])]);
    let new = gguf(&[
        ("blk.0.ffn_down.weight.in_sum2", &[2, 1], &[100.0, 300.0]),
        ("blk.0.ffn_down.weight.counts", &[1, 1], &[100.0]),
    ]);
    for (whole, modules) in [(old, &SMALL[..]), (new, &SMALL[..1])] {
        assert!(read_with(&whole, modules).is_ok());
        for end in 0..whole.len() {
            assert!(read_with(&whole[..end], modules).is_err(), "{end} of {}", whole.len());
        }
    }
}

#[test]
fn a_file_of_no_format_is_told_what_was_looked_for() {
    for file in ["", "{}", "[]", "hello", "{\"format\": \"other\"}"] {
        let message = read_with(file.as_bytes(), &modules()).unwrap_err().to_string();
        assert!(
            message.starts_with("is of no known format; these were looked for: tqc-sensitivity ("),
            "{message}"
        );
        for format in formats() {
            assert!(message.contains(format), "{format}");
        }
    }
}

proptest! {
    #[test]
    fn damaged_binary_files_are_answered_and_never_a_crash(
        gguf_form: bool,
        at: prop::sample::Index,
        bytes in prop::collection::vec(any::<u8>(), 1..9),
    ) {
        let mut file = match gguf_form {
            true => gguf(&[
                ("blk.0.ffn_down.weight.in_sum2", &[2, 1], &[100.0, 300.0]),
                ("blk.0.ffn_down.weight.counts", &[1, 1], &[100.0]),
            ]),
            false => legacy(&[("blk.0.ffn_down.weight", 4, &[4.0, 12.0])]),
        };
        let at = at.index(file.len());
        let end = (at + bytes.len()).min(file.len());
        file.splice(at..end, bytes);
        // Either answer will do; costs that come out are numbers.
        if let Ok(table) = read_with(&file, &SMALL[..1]) {
            let costs = table.modules.values().flat_map(|costs| costs.values());
            prop_assert!(costs.into_iter().all(|cost| cost.nats.is_finite()));
        }
    }
}
