//! Nothing about the machine reaches the artifact.

use std::collections::BTreeSet;
use std::path::Path;

use tqc::isa::Isa;

use crate::common::*;
use crate::tqc;

/// A recipe with every kind of work in it: two encoders, float formats, casts, kept tensors.
const MIXED: &str = "
[output]
shard-size = \"1MB\"
[default]
codec = { affine = { bits = 4, group = 32 } }
encoder = \"refit\"
[[rule]]
match = \"*.down_proj\"
codec = \"nvfp4\"
[[rule]]
match = \"*.self_attn.*_proj\"
codec = { affine = { bits = 3, group = 32 } }
encoder = \"mlx\"
[[rule]]
match = \"*.embed_tokens\"
codec = \"mxfp8\"
";

fn digest(recipe: &Path, source: &Path, out: &Path, extra: &[&str]) -> String {
    let mut args = crate::args!["build", recipe, "--source", source, "-o", out, "--json"];
    args.extend(extra.iter().map(Into::into));
    finish(command(args)).expect(0).digest()
}

#[test]
fn threads_instruction_set_folders_and_processes_do_not_change_a_byte() {
    for name in ["llama-untied", "qwen3_5", "qwen3_5_moe"] {
        let dir = temp();
        let recipe = recipe(dir.path(), MIXED);
        let source = fixture(name);
        let out = |tag: &str| dir.path().join("out").join(tag);
        let first = digest(&recipe, &source, &out("first"), &[]);
        let mut runs: Vec<(String, String)> = Vec::new();
        for threads in ["1", "2", "5"] {
            runs.push((
                format!("{threads} threads"),
                digest(&recipe, &source, &out(threads), &["--threads", threads, "--memory", "64MiB"]),
            ));
        }
        for isa in Isa::available() {
            let isa = isa.to_string();
            runs.push((
                format!("kernels {isa}"),
                digest(&recipe, &source, &out(&isa), &["--isa", &isa, "--threads", "2", "--memory", "64MiB"]),
            ));
        }
        runs.push(("a budget".to_owned(), digest(&recipe, &source, &out("budget"), &["--memory", "2MiB"])));
        let copy = dir.path().join("elsewhere/the source");
        copy_folder(&source, &copy);
        runs.push(("a copy of the source".to_owned(), digest(&recipe, &copy, &out("copy"), &[])));
        // Relative paths, from another working directory.
        let mut elsewhere =
            command(crate::args!["build", "../test.toml", "--source", "the source", "-o", "o", "--json"]);
        elsewhere.current_dir(dir.path().join("elsewhere"));
        runs.push(("another working directory".to_owned(), finish(elsewhere).expect(0).digest()));
        for (what, found) in &runs {
            assert_eq!(*found, first, "{name}: {what}");
        }
        // The digest speaks of the files.
        let whole = tqc!("diff", out("first"), out("5"), "--json").expect(0).json();
        assert_eq!(whole["same"], true);
        let names: BTreeSet<_> =
            std::fs::read_dir(out("first")).unwrap().map(|e| e.unwrap().file_name()).collect();
        let others: BTreeSet<_> =
            std::fs::read_dir(out("5")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, others);
        for file in names.iter().filter(|file| *file != "machine.json") {
            let (a, b) = (out("first").join(file), out("5").join(file));
            if a.is_file() {
                assert!(std::fs::read(a).unwrap() == std::fs::read(b).unwrap(), "{name}: {file:?} differs");
            }
        }
    }
}

#[test]
fn the_digest_is_the_sha256_of_the_record() {
    use sha2::Digest as _;
    let dir = temp();
    let recipe = recipe(dir.path(), &default_codec(AFFINE_4_32));
    let out = dir.path().join("out");
    let found = digest(&recipe, &fixture("qwen2"), &out, &[]);
    let of = |path: &Path| -> String {
        let hash = sha2::Sha256::digest(std::fs::read(path).unwrap());
        hash.iter().map(|byte| format!("{byte:02x}")).collect()
    };
    assert_eq!(found, of(&out.join("provenance.json")));
    let record = read_json(&out.join("provenance.json"));
    for (name, sha256) in record["files"].as_object().unwrap() {
        assert_eq!(*sha256, of(&out.join(name)), "{name}");
    }
}

#[test]
fn one_changed_weight_changes_the_digest() {
    let dir = temp();
    let recipe = recipe(dir.path(), &default_codec(AFFINE_4_32));
    let mut model = Model::fixture("llama-tied");
    let source = dir.path().join("source");
    model.write(&source);
    let before = digest(&recipe, &source, &dir.path().join("a"), &[]);
    let weight = model.tensor("model.layers.1.mlp.up_proj.weight");
    weight.bytes[1000] ^= 1;
    model.write(&source);
    assert_ne!(digest(&recipe, &source, &dir.path().join("b"), &[]), before);
}
