//! A changed basis is the same bytes for every number of threads, instruction set, budget and resume.

use tqc::isa::Isa;

use crate::*;

#[test]
fn threads_and_instruction_sets_do_not_change_a_byte() {
    let codec = "[default]\ncodec = { affine = { bits = 3, group = 32 } }\n[transform]\n";
    for name in ["qwen2", "qwen3_5", "qwen3_5_moe"] {
        for rotation in [
            "\"hadamard\"",
            "\"block-hadamard\"",
            "\"random-orthogonal\"",
            "{ kind = \"optrot\", steps = 4 }",
        ] {
            let dir = temp();
            let text = format!("{codec}rotation = {rotation}\nkey-balance = true\nup-balance = true\n");
            let digest = |more: &[&str]| built(dir.path(), &text, &fixture(name), more).1["digest"].clone();
            let first = digest(&[]);
            let isas: Vec<String> = Isa::available().map(|isa| isa.to_string()).collect();
            let mut runs = vec![vec!["--threads", "1"], vec!["--threads", "5", "--memory", "64MiB"]];
            runs.extend(isas.iter().map(|isa| vec!["--isa", isa.as_str(), "--threads", "2"]));
            for run in runs {
                assert_eq!(digest(&run), first, "{name}, {rotation}, {run:?}");
            }
            let other = text.replacen("rotation = ", "# ", 1);
            let plain = built(dir.path(), &other, &fixture(name), &[]).1["digest"].clone();
            assert_ne!(plain, first, "{name}, {rotation}");
        }
    }
}

#[test]
fn another_seed_is_another_artifact_and_the_same_seed_the_same() {
    let dir = temp();
    let digest = |seed: u32, kind: &str| {
        let text = format!(
            "[default]\ncodec = {AFFINE_4_32}\n[transform]\nrotation = {{ kind = \"{kind}\", seed = {seed} }}\n"
        );
        let (out, _) = built(dir.path(), &text, &fixture("llama-untied"), &[]);
        read_folder(&out)["model.layers.0.mlp.up_proj.weight"].bytes.clone()
    };
    for kind in ["hadamard", "random-orthogonal"] {
        assert_eq!(digest(1, kind), digest(1, kind), "{kind}");
        assert_ne!(digest(1, kind), digest(2, kind), "{kind}");
    }
}

#[test]
fn the_record_says_how_it_was_made() {
    let dir = temp();
    let text = "[default]\ncodec = \"bf16\"\n[transform]\nrotation = { kind = \"hadamard\", seed = 9 }\n";
    let (out, _) = built(dir.path(), text, &fixture("qwen3"), &[]);
    let record = read_json(&out.join("provenance.json"));
    let transform = &record["transform"];
    assert_eq!(transform["id"], "tqc-fold/1");
    assert_eq!(transform["family"], "qwen3");
    assert_eq!((&transform["gains"], &transform["untied"]), (&"one".into(), &true.into()));
    // 192 = 12 · 16.
    let r1 = &transform["r1"];
    assert_eq!((&r1["kind"], &r1["seed"], &r1["width"]), (&"hadamard".into(), &9.into(), &192.into()));
    assert_eq!((&r1["factors"], &r1["sylvester_log2"]), (&serde_json::json!([12]), &4.into()));
    let outputs = record["outputs"].as_array().unwrap();
    let steps = |name: &str| outputs.iter().find(|o| o["name"] == name).expect(name)["transforms"].clone();
    assert_eq!(
        steps("model.layers.1.self_attn.v_proj.weight"),
        serde_json::json!(["gain:input", "r1:input", "r2:output"])
    );
    assert_eq!(steps("model.layers.1.self_attn.o_proj.weight"), serde_json::json!(["r1:output", "r2:input"]));
    assert_eq!(steps("model.embed_tokens.weight"), serde_json::json!(["r1:input"]));
    assert_eq!(steps("lm_head.weight"), serde_json::json!(["gain:input", "r1:input"]));
    assert_eq!(steps("model.norm.weight"), serde_json::json!(["neutral"]));
    assert_eq!(steps("model.layers.0.self_attn.q_norm.weight"), serde_json::json!([]));
    assert!(record["notes"].as_array().unwrap().iter().any(|note| note["kind"] == "untied"));
    assert_eq!(read_json(&out.join("config.json"))["tie_word_embeddings"], false);
}
