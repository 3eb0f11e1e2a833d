//! Requests that must be refused: recipes that do not fit, flags, budgets, folders that are taken.

use std::fs::{self, File};
use std::path::Path;

use serde_json::json;

use crate::common::*;
use crate::tqc;

fn llama_recipe(dir: &Path) -> std::path::PathBuf {
    recipe(dir, &default_codec(AFFINE_4_32))
}

/// Exit code, then stderr with the test's folders taken out.
fn transcript(run: &Run, dir: &Path) -> String {
    let text = run.stderr.replace(dir.to_str().unwrap(), "DIR");
    format!("exit {}\n{}", run.code, text.replace(env!("CARGO_MANIFEST_DIR"), "PROJECT"))
}

#[track_caller]
fn build_refused(text: &str, source: &Path, code: i32, words: &[&str]) -> String {
    let dir = temp();
    let recipe = recipe(dir.path(), text);
    let run = tqc!("build", recipe, "--source", source, "-o", dir.path().join("new/out")).expect(code);
    for word in words {
        assert!(run.stderr.contains(word), "`{word}` is not in:\n{}", run.stderr);
    }
    assert!(!dir.path().join("new").exists());
    transcript(&run, dir.path())
}

#[test]
fn a_recipe_mistake_is_shown_with_its_place_and_exit_2() {
    let text = build_refused(
        "[default]\ncodec = { affine = { bits = 4, group = 100 } }\n",
        &fixture("llama-tied"),
        2,
        &[],
    );
    assert_eq!(
        text,
        "exit 2
error: DIR/test.toml:3:40
3 | codec = { affine = { bits = 4, group = 100 } }
  |                                        ^^^
group size must be 32, 64 or 128, got 100
"
    );
    build_refused("colour = 1\n", &fixture("llama-tied"), 2, &["test.toml:2:1", "colour", "^^^^^^"]);
}

#[test]
fn a_group_that_does_not_divide_is_shown_where_the_recipe_states_it() {
    // hidden_size is 224 in this one: 32 divides it, 64 does not.
    let text = build_refused(
        "[default]\ncodec = { affine = { bits = 4, group = 64 } }\n",
        &fixture("mistral"),
        2,
        &[],
    );
    for word in ["test.toml:3", "multiple of 64", "224", "group 32", "help: "] {
        assert!(text.contains(word), "`{word}` is not in:\n{text}");
    }
}

#[test]
fn rules_that_contradict_or_match_nothing_are_refused() {
    let rules = "[[rule]]\nmatch = \"*.mlp.up_proj\"\ncodec = \"mxfp4\"\n[[rule]]\nmatch = \"*.mlp.up_proj\"\ncodec = \"mxfp8\"\n";
    build_refused(
        &format!("{}{rules}", default_codec(AFFINE_4_32)),
        &fixture("llama-tied"),
        2,
        &["test.toml", "*.mlp.up_proj"],
    );
    let typo = "[[rule]]\nmatch = \"*.mlp.upproj\"\ncodec = \"mxfp4\"\n";
    build_refused(
        &format!("{}{typo}", default_codec(AFFINE_4_32)),
        &fixture("llama-tied"),
        2,
        &["test.toml", "*.mlp.upproj", "matches no", "up_proj"],
    );
}

#[test]
fn mistakes_that_show_only_beside_the_source_are_told_all_at_once() {
    let rule = |pattern: &str| format!("[[rule]]\nmatch = \"{pattern}\"\ncodec = \"mxfp4\"\n");
    let rules = rule("*.mlp.upproj") + &rule("modle.*");
    build_refused(
        &format!("{}{rules}[keep]\ntensors = [\"*.inv_frequency\"]\n", default_codec(AFFINE_4_32)),
        &fixture("llama-tied"),
        2,
        &["`*.inv_frequency` matches no tensor", "`*.mlp.upproj` matches no", "`modle.*` matches no"],
    );
}

#[test]
fn a_rule_after_rules_that_leave_it_nothing_is_refused_in_one_file_and_fine_in_a_base() {
    let rule = |pattern: &str, codec: &str| format!("[[rule]]\nmatch = \"{pattern}\"\ncodec = \"{codec}\"\n");
    let (wide, narrow) = (rule("model.layers.*", "mxfp4"), rule("*.layers.0.mlp.*", "mxfp8"));
    let default = default_codec(AFFINE_4_32);
    build_refused(
        &format!("{default}{wide}{narrow}"),
        &fixture("llama-tied"),
        2,
        &[
            "test.toml:8:9",
            "`*.layers.0.mlp.*` decides nothing",
            "`model.layers.*`",
            "\nhelp: the first rule",
        ],
    );
    let dir = temp();
    let plan = |text: &str| {
        tqc!("plan", recipe(dir.path(), text), "--source", fixture("llama-tied"), "--json").expect(0).json()
    };
    let codecs = |plan: &serde_json::Value| {
        let modules = plan["modules"].as_array().unwrap().iter();
        modules.filter(|m| m["codec"] == "mxfp8").count()
    };
    assert_eq!(codecs(&plan(&format!("{default}{narrow}{wide}"))), 3);
    fs::write(dir.path().join("base.toml"), format!("name = \"base\"\n{default}{narrow}")).unwrap();
    assert_eq!(codecs(&plan(&format!("extends = \"base.toml\"\n{wide}"))), 0);
}

#[test]
fn a_recipe_without_a_source_needs_one_from_the_command_line() {
    let dir = temp();
    let run = tqc!("build", llama_recipe(dir.path()), "-o", dir.path().join("out")).expect(2);
    assert_eq!(
        transcript(&run, dir.path()),
        "exit 2
error: recipe `test` names no source
help: give a checkpoint folder with `--source DIR`, or a `[source]` table in the recipe
"
    );
    let run = tqc!("plan", llama_recipe(dir.path()), "--source", dir.path().join("nowhere")).expect(3);
    assert!(run.stderr.contains("nowhere` does not exist"), "{}", run.stderr);
    let run = tqc!("plan", dir.path().join("absent.toml")).expect(2);
    assert!(run.stderr.contains("absent.toml"), "{}", run.stderr);
}

#[test]
fn locked_without_a_lock_is_refused() {
    let dir = temp();
    let out = dir.path().join("out");
    let run =
        tqc!("build", llama_recipe(dir.path()), "--source", fixture("llama-tied"), "-o", out, "--locked");
    let run = run.expect(2);
    assert_eq!(
        transcript(&run, dir.path()),
        "exit 2
error: `DIR/test.lock` does not exist, so there is nothing to compare the build with
help: write it with `tqc build RECIPE --write-lock`
"
    );
    assert!(!out.exists());
}

#[test]
fn a_memory_budget_that_no_thread_fits_in_is_refused_with_the_least_that_does() {
    let dir = temp();
    let recipe = llama_recipe(dir.path());
    let source = fixture("llama-tied");
    let out = dir.path().join("out");
    let run = tqc!("build", recipe, "--source", source, "-o", out, "--memory", "1KiB").expect(2);
    assert!(run.stderr.contains("budget is 1.00 KiB"), "{}", run.stderr);
    let least = run.stderr.split("at least ").nth(1).expect("a remedy").trim().replace(' ', "");
    assert!(!out.exists());
    // What the remedy says works.
    tqc!("build", recipe, "--source", source, "-o", out, "--memory", least).expect(0);
}

#[test]
fn wrong_command_lines_exit_2_and_show_the_usage() {
    let dir = temp();
    let recipe = llama_recipe(dir.path());
    for args in [
        crate::args!["build"],
        crate::args!["build", recipe, "--fast"],
        crate::args!["build", recipe, "--resume", "--restart"],
        crate::args!["build", recipe, "--locked", "--write-lock"],
        crate::args!["build", recipe, "--threads", "0"],
        crate::args!["build", recipe, "--memory", "lots"],
        crate::args!["build", recipe, "--memory", "-1"],
        crate::args!["build", recipe, "--isa", "sse9"],
        crate::args!["verify", recipe, "--rebuild", "some"],
        crate::args!["compile", recipe],
    ] {
        let run = finish(command(args.clone())).expect(2);
        assert!(run.stderr.contains("error: "), "{args:?}: {}", run.stderr);
        assert!(run.stderr.contains("--help"), "{args:?}: {}", run.stderr);
        assert_eq!(run.stdout, "");
    }
    assert!(tqc!("--help").expect(0).stdout.contains("verify"));
    assert!(tqc!("--version").expect(0).stdout.starts_with("tqc "));
}

#[test]
fn rebuilding_without_the_source_is_refused() {
    let dir = temp();
    let run = tqc!("verify", dir.path(), "--rebuild", "all").expect(2);
    assert_eq!(
        transcript(&run, dir.path()),
        "exit 2
error: modules can only be encoded again from the source
help: give the original checkpoint with `--source DIR`
"
    );
}

#[test]
fn a_folder_that_is_not_an_artifact_is_never_replaced() {
    let dir = temp();
    let (recipe, source) = (llama_recipe(dir.path()), fixture("llama-tied"));
    let thesis = dir.path().join("thesis");
    fs::create_dir(&thesis).unwrap();
    fs::write(thesis.join("chapter.txt"), "words").unwrap();
    let refused = |extra: &[&str]| {
        let mut args = crate::args!["build", recipe, "--source", source, "-o", thesis];
        args.extend(extra.iter().map(Into::into));
        let run = finish(command(args)).expect(2);
        assert!(run.stderr.contains("thesis"), "{}", run.stderr);
        assert!(run.stderr.contains("\nhelp: choose another folder with `-o`"), "{}", run.stderr);
        assert_eq!(fs::read_to_string(thesis.join("chapter.txt")).unwrap(), "words");
        assert!(!dir.path().join(".thesis.building").exists());
    };
    refused(&[]);
    refused(&["--restart"]);
    // Other programs write files of this name too.
    fs::write(thesis.join("provenance.json"), "{\"builder\": \"npm\"}").unwrap();
    refused(&[]);
    // A file, and a link to a folder.
    let file = dir.path().join("file");
    fs::write(&file, "words").unwrap();
    tqc!("build", recipe, "--source", source, "-o", file).expect(2);
    assert_eq!(fs::read_to_string(&file).unwrap(), "words");
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(dir.path().join("nothing-there"), &link).unwrap();
    tqc!("build", recipe, "--source", source, "-o", link).expect(2);
    // An empty folder is no loss.
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    tqc!("build", recipe, "--source", source, "-o", empty).expect(0);
}

#[test]
fn files_that_a_person_added_to_an_artifact_are_never_lost() {
    let dir = temp();
    let (recipe, source, out) = (llama_recipe(dir.path()), fixture("llama-tied"), dir.path().join("out"));
    tqc!("build", recipe, "--source", source, "-o", out).expect(0);
    tqc!("build", recipe, "--source", source, "-o", out).expect(0);
    fs::write(out.join("evaluation.txt"), "a week of work").unwrap();
    let run = tqc!("build", recipe, "--source", source, "-o", out).expect(2);
    assert!(run.stderr.contains("evaluation.txt"), "{}", run.stderr);
    assert_eq!(fs::read_to_string(out.join("evaluation.txt")).unwrap(), "a week of work");
    assert!(!dir.path().join(".out.building").exists());
}

#[test]
fn the_source_is_never_the_target() {
    // An artifact without codes is a source like any other, and would be replaced by what is made of it.
    let dir = temp();
    let keep = recipe(dir.path(), &default_codec("\"keep\""));
    let plain = dir.path().join("plain");
    tqc!("build", keep, "--source", fixture("llama-tied"), "-o", plain).expect(0);
    let before = fs::read(plain.join("model.safetensors")).unwrap();
    let recipe = llama_recipe(dir.path());
    let run = tqc!("build", recipe, "--source", plain, "-o", plain).expect(2);
    assert!(run.stderr.contains("source"), "{}", run.stderr);
    assert_eq!(fs::read(plain.join("model.safetensors")).unwrap(), before);
}

#[test]
fn an_output_that_another_build_is_writing_is_refused() {
    let dir = temp();
    let staging = dir.path().join(".out.building");
    fs::create_dir(&staging).unwrap();
    let lock = File::create(staging.join("lock")).unwrap();
    lock.try_lock().unwrap();
    let recipe = llama_recipe(dir.path());
    for extra in ["--resume", "--restart", "--strict"] {
        let out = dir.path().join("out");
        let source = fixture("llama-tied");
        let run = tqc!("build", recipe, "--source", source, "-o", out, extra, "--memory", "64MiB").expect(2);
        assert_eq!(
            transcript(&run, dir.path()),
            "exit 2
error: another build is writing `DIR/out`
help: wait for it to end, or write elsewhere with `-o`
"
        );
        assert!(!out.exists());
    }
    drop(lock);
    tqc!("build", recipe, "--source", fixture("llama-tied"), "-o", dir.path().join("out")).expect(0);
    assert!(!staging.exists());
}

#[test]
fn an_output_that_cannot_be_written_exits_4() {
    let dir = temp();
    let recipe = llama_recipe(dir.path());
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let mut places = vec![file.join("out")];
    if cfg!(target_os = "linux") {
        places.push("/proc/tqc-test/out".into());
    }
    for place in places {
        let run = tqc!("build", recipe, "--source", fixture("llama-tied"), "-o", place).expect(4);
        assert!(
            run.stderr.contains("help: check that the folder exists and may be written"),
            "{}",
            run.stderr
        );
        assert!(run.stderr.contains(place.parent().unwrap().to_str().unwrap()), "{}", run.stderr);
    }
    let run = tqc!("build", recipe, "--source", fixture("llama-tied"), "-o", "..").expect(2);
    assert!(run.stderr.contains("`..` exists and is not an artifact"), "{}", run.stderr);
}

#[test]
fn a_disk_that_is_too_small_is_noticed_before_anything_is_written() {
    // A sparse source of eight terabytes, kept as it is.
    const ROWS: u64 = 1 << 21;
    let dir = temp();
    let source = dir.path().join("source");
    let mut model = Model::llama(32, 32, 32, 1);
    model.shards = vec![model.shards.concat()];
    model.config["vocab_size"] = json!(ROWS);
    model.config["hidden_size"] = json!(ROWS);
    for key in ["num_attention_heads", "num_key_value_heads"] {
        model.config[key] = json!(1);
    }
    for tensor in &mut model.shards[0] {
        let widen = |d: &mut u64, old: u64| {
            if *d == old {
                *d = ROWS
            }
        };
        let role = tensor.name.clone();
        match tensor.shape.as_mut_slice() {
            [v, h] if role.contains("embed") || role.contains("head") => {
                widen(v, 32);
                widen(h, 32);
            }
            [n, _] if role.contains("o_proj") || role.contains("down_proj") => widen(n, 32),
            [_, k] => widen(k, 32),
            [n] => widen(n, 32),
            _ => unreachable!("a llama has vectors and matrices"),
        }
    }
    model.config["tie_word_embeddings"] = json!(true);
    model.remove("lm_head.weight");
    let shard = std::mem::take(&mut model.shards[0]);
    model.write(&source);
    let bytes = |tensor: &Tensor| 2 * tensor.shape.iter().product::<u64>();
    let head = header(shard.iter().map(|t| (t.name.as_str(), "BF16", t.shape.as_slice(), bytes(t))));
    let path = source.join("model.safetensors");
    fs::write(&path, &head).unwrap();
    let whole = head.len() as u64 + shard.iter().map(bytes).sum::<u64>();
    if let Err(error) = File::options().write(true).open(&path).unwrap().set_len(whole) {
        eprintln!("SKIPPED: this file system has no sparse files of {whole} bytes: {error}");
        return;
    }
    let keep = recipe(dir.path(), &default_codec("\"keep\""));
    let out = dir.path().join("new/out");
    let run = tqc!("build", keep, "--source", source, "-o", out).expect(4);
    assert!(run.stderr.contains("error: the artifact needs 8.00 TiB at `"), "{}", run.stderr);
    assert!(run.stderr.contains("help: free some space, or write elsewhere with `-o`"), "{}", run.stderr);
    assert!(!dir.path().join("new").exists());
    // The plan still works, and says how much.
    let plan = tqc!("plan", keep, "--source", source, "--json").expect(0).json();
    assert!(plan["disk_bytes"].as_u64().unwrap() > 8 << 40);
}
