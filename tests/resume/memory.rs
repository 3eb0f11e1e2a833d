//! Memory follows the budget, not the model.

use std::fs;

use serde_json::json;

use crate::common::*;
use crate::tqc;

const MIB: u64 = 1 << 20;

/// A llama whose embedding is 256 MiB of zeros that the disk does not hold.
fn big_embedding(dir: &std::path::Path) {
    let mut model = Model::llama(256, 256, 32, 1);
    let vocab = 256 * MIB / (2 * 256);
    model.config["vocab_size"] = json!(vocab);
    model.config["tie_word_embeddings"] = json!(true);
    model.remove("lm_head.weight");
    // Last in its file, so that the file's end is a hole.
    model.remove("model.embed_tokens.weight");
    model.write(dir);
    let names: Vec<_> = model.shards[0].iter().map(|t| t.name.clone()).collect();
    assert_eq!(names, ["model.norm.weight"]);
    let norm = &model.shards[0][0];
    let shape = [vocab, 256];
    let head = header(
        [
            (norm.name.as_str(), "BF16", norm.shape.as_slice(), 512),
            ("model.embed_tokens.weight", "BF16", shape.as_slice(), 256 * MIB),
        ]
        .into_iter(),
    );
    let path = dir.join(model.shard_name(0));
    let mut bytes = head.clone();
    bytes.extend_from_slice(&norm.bytes);
    fs::write(&path, &bytes).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(bytes.len() as u64 + 256 * MIB).unwrap();
    let index = dir.join("model.safetensors.index.json");
    let mut map = read_json(&index);
    map["weight_map"]["model.embed_tokens.weight"] = json!(model.shard_name(0));
    write_json(&index, &map);
}

#[test]
fn memory_stays_within_the_budget_plus_64_mib() {
    let dir = temp();
    let source = dir.path().join("source");
    big_embedding(&source);
    // `keep` copies from the map, the others hold panels.
    for codec in ["\"keep\"", AFFINE_4_32, "\"nvfp4\""] {
        let recipe = recipe(dir.path(), &default_codec(codec));
        let out = dir.path().join("out");
        let plan = tqc!("plan", recipe, "--source", source, "--memory", "16MiB", "--threads", "4", "--json");
        let planned = plan.expect(0).json()["peak_memory_bytes"].as_u64().unwrap();
        let run = tqc!(
            "build",
            recipe,
            "--source",
            source,
            "-o",
            out,
            "--memory",
            "16MiB",
            "--threads",
            "4",
            "--json"
        );
        run.expect(0);
        let machine = read_json(&out.join("machine.json"));
        let anonymous = machine["peak_anonymous_bytes"].as_u64().unwrap();
        let resident = machine["peak_resident_bytes"].as_u64().unwrap();
        if anonymous == 0 {
            eprintln!("SKIPPED: this system does not say how much memory a process holds");
            return;
        }
        assert!(anonymous <= (16 + 64) * MIB, "{codec}: {} MiB anonymous", anonymous / MIB);
        assert!(anonymous <= planned, "{codec}: {anonymous} bytes anonymous, planned {planned}");
        // Mapped pages come on top: one piece of 16 MiB for each thread, and what the kernel reads around it.
        assert!(resident <= (16 + 64 + 4 * 20) * MIB, "{codec}: {} MiB resident", resident / MIB);
    }
}
