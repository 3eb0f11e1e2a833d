//! `tqc sensitivity`: against artifacts that hold one rounded module, across waves, threads and interruptions, and on
//! bad requests.

#[path = "../common/mod.rs"]
mod common;
mod refusals;
mod same_bytes;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use tqc::backend::Precision;
use tqc::backend::cpu::Cpu;
use tqc::isa::Isa;
use tqc::numeric::divergence::divergence;
use tqc::runtime::{Model as Runtime, Want, Weights};

use common::*;

/// Documents that every tokenizer of the fixtures can read; shorter and longer than DeltaNet's chunks.
const TEXT: &str = "{\"text\": \"The old mill stood by the river, and nobody had seen it turn.\"}\n\
                    {\"text\": \"for i in range(10): print(i * i)\"}\n{\"text\": \"A man, a plan\"}\n";

/// Most tokens of the tests' measurements: the last document is cut.
const TOKENS: usize = 60;

/// Writes a recipe of this name and gives its path.
fn recipe_named(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(format!("{name}.toml"));
    std::fs::write(&path, format!("name = \"{name}\"\n{text}")).unwrap();
    path
}

/// Measures `source` by a recipe with this text; the file's content.
fn measured(dir: &Path, text: &str, source: &Path, more: &[&str]) -> Value {
    let (recipe, out) = (recipe_named(dir, "measure", text), dir.join("sens.json"));
    std::fs::write(dir.join("text.jsonl"), TEXT).unwrap();
    let _ = std::fs::remove_file(&out);
    let mut args = args![
        "sensitivity",
        source,
        "--recipe",
        recipe,
        "-o",
        out,
        "--json",
        "--text",
        dir.join("text.jsonl"),
        "--tokens",
        TOKENS.to_string()
    ];
    args.extend(more.iter().map(Into::into));
    let printed = finish(command(args)).expect(0).json();
    let bytes = std::fs::read(&out).unwrap();
    assert_eq!(bytes, tqc::digest::canonical_json(&printed), "the file and what `--json` prints");
    printed
}

/// Mean KL(source || artifact) over the tests' text, by whole forward passes.
fn kl(source: &Path, artifact: &Path) -> f64 {
    let cpu = Cpu::new(Isa::best(), 2, Precision::Exact);
    let open = |dir: &Path| Runtime::new(Weights::open(dir).unwrap(), Arc::clone(&cpu)).unwrap();
    let (teacher, student) = (open(source), open(artifact));
    let tokenizer = tqc::text::Tokenizer::open(source).unwrap();
    let (mut kls, mut left) = (Vec::new(), TOKENS);
    for line in TEXT.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let mut ids = tokenizer.encode(line["text"].as_str().unwrap(), true).unwrap();
        ids.truncate(left);
        left -= ids.len();
        let logits = |model: &Runtime| model.forward(&mut model.state(), &ids, Want::All).unwrap().logits;
        let vocab = teacher.config().vocab;
        let (a, b) = (logits(&teacher), logits(&student));
        let rows = a.chunks(vocab).zip(b.chunks(vocab));
        kls.extend(rows.map(|(a, b)| divergence(a, b, Isa::best()).unwrap().kl));
    }
    assert_eq!(left, 0, "the text has enough tokens");
    kls.iter().sum::<f64>() / kls.len() as f64
}

/// Holds what was measured of these modules against artifacts in which one module is in the codec and all else is as
/// `rest` says.
fn check(source: &Path, measuring: &str, rest: &str, modules: &[&str]) {
    let dir = temp();
    let found = measured(dir.path(), measuring, source, &["--candidates", "affine-3g32"]);
    for module in modules {
        let text = format!(
            "{rest}\n[[rule]]\nmatch = \"{module}\"\ncodec = {{ affine = {{ bits = 3, group = 32 }} }}\n"
        );
        let (recipe, out) = (recipe_named(dir.path(), "one", &text), dir.path().join("one"));
        let _ = std::fs::remove_dir_all(&out);
        tqc!("build", recipe, "--source", source, "-o", out).expect(0);
        let (probed, built) = (&found["modules"][module]["candidates"]["affine-3g32"], kl(source, &out));
        let probed_kl = probed["kl"].as_f64().unwrap_or_else(|| panic!("no `{module}` in {found}"));
        assert!((probed_kl - built).abs() <= 1e-12, "{module}: probed {probed_kl}, built {built}");
        assert!(built > 0.0 && probed["standard_error"].as_f64().unwrap() > 0.0, "{module}: {probed}");
        // Codes, scales and biases, by the artifact's own tensors.
        let stored: usize = read_folder(&out)
            .iter()
            .filter(|(name, _)| {
                name.rsplit_once('.').is_some_and(|(path, plane)| path == *module && plane != "bias")
            })
            .map(|(_, tensor)| tensor.bytes.len())
            .sum();
        assert_eq!(probed["bytes"], stored, "{module}");
    }
}

/// A fixture whose weights and config are f32: what a recipe stores in f32 is then all there is.
fn in_f32(dir: &Path, name: &str) -> PathBuf {
    let mut model = Model::fixture(name);
    model.shards.iter_mut().flatten().for_each(|tensor| tensor.map(|value| value));
    match model.config.get_mut("text_config") {
        Some(text) => text["dtype"] = "float32".into(),
        None => model.config["torch_dtype"] = "float32".into(),
    }
    let to = dir.join("wide");
    model.write(&to);
    to
}

/// All else as the source stores it; gains in MLX's layout are 1 + w, which only f32 holds.
const KEPT: &str = "[default]\ncodec = \"keep\"\n";
const WIDE: &str = "[default]\ncodec = \"f32\"\n";
const FOUR: &str = "[default]\ncodec = { affine = { bits = 4, group = 32 } }\n";

#[test]
fn a_probe_is_the_artifact_with_that_module_alone_rounded() {
    let dir = temp();
    check(
        &in_f32(dir.path(), "qwen3_5"),
        FOUR,
        WIDE,
        &[
            "language_model.model.embed_tokens",
            "language_model.model.layers.0.linear_attn.in_proj_qkv",
            "language_model.model.layers.0.linear_attn.in_proj_a",
            "language_model.model.layers.1.linear_attn.in_proj_b",
            "language_model.model.layers.1.linear_attn.in_proj_z",
            "language_model.model.layers.2.linear_attn.out_proj",
            "language_model.model.layers.2.mlp.gate_proj",
            "language_model.model.layers.3.self_attn.q_proj",
            "language_model.model.layers.3.self_attn.o_proj",
            "language_model.model.layers.3.mlp.down_proj",
            "language_model.lm_head",
        ],
    );
}

#[test]
fn a_tied_embedding_is_one_module_rounded_at_both_ends() {
    check(&fixture("llama-tied"), FOUR, KEPT, &["model.embed_tokens"]);
    let dir = temp();
    let wide = in_f32(dir.path(), "qwen3_5-tied");
    check(&wide, FOUR, WIDE, &["language_model.model.embed_tokens"]);
}

#[test]
fn a_bias_stays_where_its_matrix_is_rounded() {
    let at = |name: &str| format!("model.layers.0.self_attn.{name}");
    check(&fixture("qwen2"), FOUR, KEPT, &[&at("q_proj"), &at("v_proj"), &at("k_proj")]);
}

#[test]
fn the_stacked_experts_of_a_layer_are_one_module() {
    let at = |name: &str| format!("language_model.model.layers.1.mlp.{name}");
    let modules = [
        "switch_mlp.gate_proj",
        "switch_mlp.down_proj",
        "gate",
        "shared_expert_gate",
        "shared_expert.up_proj",
    ];
    let modules = modules.map(at);
    let dir = temp();
    check(&in_f32(dir.path(), "qwen3_5_moe"), FOUR, WIDE, &modules.each_ref().map(String::as_str));
}

#[test]
fn with_changes_of_basis_a_module_is_rounded_in_the_new_one() {
    let dir = temp();
    let source = in_f32(dir.path(), "qwen2");
    let turn = "[transform]\nrotation = { kind = \"hadamard\", r2 = true }\n";
    let modules = ["model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj", "lm_head"];
    let (measuring, rest) = (format!("{FOUR}{turn}"), format!("{WIDE}{turn}"));
    check(&source, &measuring, &rest, &modules);

    let found = measured(dir.path(), &measuring, &source, &["--candidates", "affine-3g32"]);
    assert_eq!(found["basis"], "hadamard+r2");
    let base = found["base_kl"].as_f64().unwrap();
    assert!((0.0..1e-6).contains(&base), "{base}");
    let plain = measured(dir.path(), FOUR, &source, &["--candidates", "affine-3g32"]);
    assert_eq!((&plain["basis"], &plain["base_kl"]), (&"none".into(), &0.0.into()));
    assert_ne!(plain["modules"], found["modules"]);
}

#[test]
fn a_module_is_measured_in_the_codecs_that_its_shape_fits() {
    let dir = temp();
    // 64 is no divisor of the width of its stream, 224, but of its inner one.
    let both = ["--candidates", "affine-4g64,affine-4g32", "--only", "*.layers.0.*"];
    let found = measured(dir.path(), FOUR, &fixture("mistral"), &both);
    let only = measured(
        dir.path(),
        FOUR,
        &fixture("mistral"),
        &["--candidates", "affine-4g32", "--only", "*.layers.0.*"],
    );
    let modules = found["modules"].as_object().unwrap();
    let (mut fewer, mut all) = (0, 0);
    for (module, costs) in modules {
        let candidates = costs["candidates"].as_object().unwrap();
        assert_eq!(
            candidates["affine-4g32"], only["modules"][module]["candidates"]["affine-4g32"],
            "{module}"
        );
        fewer += usize::from(candidates.len() == 1);
        all += usize::from(candidates.len() == 2);
    }
    assert!(fewer > 0 && all > 0, "{modules:?}");
}

#[test]
fn fewer_bits_cost_more() {
    let dir = temp();
    let candidates = "affine-2g32,affine-4g32,affine-8g32";
    let found = measured(dir.path(), FOUR, &fixture("qwen3_5"), &["--candidates", candidates]);
    let modules = found["modules"].as_object().unwrap();
    let sum = |codec: &str| -> f64 {
        modules.values().map(|module| module["candidates"][codec]["kl"].as_f64().unwrap()).sum()
    };
    let [two, four, eight] = ["affine-2g32", "affine-4g32", "affine-8g32"].map(sum);
    // KL goes with the square of the step, (15 / 3)² = 25 and (255 / 15)² = 289 times less, where it does not saturate as
    // at 2 bits, and where rounding the parameters to bf16 is little beside the step, as at 8 bits it is not.
    assert!(four < 0.3 * two && eight < 0.05 * four, "{two} {four} {eight}");
}

#[test]
fn the_file_says_what_was_measured() {
    let dir = temp();
    let source = fixture("qwen3_5");
    let refit = FOUR.replace(" }\n", " }\nencoder = \"refit\"\n");
    let more = ["--only", "*.mlp.{gate,down}_proj", "--rows", "2"];
    let found = measured(dir.path(), &refit, &source, &more);
    assert_eq!((&found["format"], &found["encoder"]), (&"tqc-sensitivity/1".into(), &"refit".into()));
    let modules = found["modules"].as_object().unwrap();
    assert_eq!(modules.len(), 8, "two of each of four layers: {modules:?}");
    let gate = &modules["language_model.model.layers.0.mlp.gate_proj"];
    assert_eq!(gate["weights"], 160 * 64);
    let bytes: BTreeMap<&str, u64> = gate["candidates"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(codec, cost)| (codec.as_str(), cost["bytes"].as_u64().unwrap()))
        .collect();
    // b bits a weight, and two bf16 parameters a group of 32.
    let of = |bits: u64| 160 * 64 * bits / 8 + 160 * 64 / 32 * 4;
    let expected = [2, 3, 4, 6, 8].map(|bits| (format!("affine-{bits}g32"), of(bits)));
    assert!(bytes.into_iter().eq(expected.iter().map(|(codec, bytes)| (codec.as_str(), *bytes))));

    let tensors: Vec<Value> = read_folder(&source)
        .values()
        .map(|tensor| serde_json::json!([tensor.name, tensor.dtype, tensor.shape]))
        .collect();
    // Compact JSON and a line end.
    let text = format!("{}\n", serde_json::to_string(&tensors).unwrap());
    assert_eq!(found["model"]["tensors_sha256"], tqc::digest::Digest::of(text.as_bytes()).to_string());
    let config = std::fs::read(source.join("config.json")).unwrap();
    assert_eq!(found["model"]["config_sha256"], tqc::digest::Digest::of(&config).to_string());
    assert_eq!(found["model"]["model_type"], "qwen3_5");
    assert_eq!((&found["text"]["name"], &found["text"]["sequences"]), (&"text.jsonl".into(), &2.into()));
    let tokenizer = tqc::text::Tokenizer::open(&source).unwrap();
    let tokens: usize = TEXT
        .lines()
        .take(2)
        .map(|line| {
            let line: Value = serde_json::from_str(line).unwrap();
            tokenizer.encode(line["text"].as_str().unwrap(), true).unwrap().len()
        })
        .sum();
    assert_eq!(found["text"]["positions"], tokens.min(TOKENS));
}
