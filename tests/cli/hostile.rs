//! Folders, names and files that a careless or hostile hand prepared.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use serde_json::json;

use crate::common::*;
use crate::tqc;

#[test]
fn a_lock_is_never_written_over_the_recipe_or_a_strangers_file() {
    let dir = temp();
    let recipe = recipe(dir.path(), &default_codec(AFFINE_4_32));
    let as_lock = dir.path().join("test.lock");
    fs::copy(&recipe, &as_lock).unwrap();
    let out = dir.path().join("out");
    for named in [&as_lock, &recipe] {
        let before = fs::read(&as_lock).unwrap();
        tqc!("build", named, "--source", fixture("llama-tied"), "-o", out, "--write-lock").expect(2);
        assert_eq!(fs::read(&as_lock).unwrap(), before);
        assert!(!out.exists());
    }
}

#[test]
fn a_folder_in_the_place_of_the_staging_folder_is_left_alone() {
    let dir = temp();
    let recipe = recipe(dir.path(), &default_codec(AFFINE_4_32));
    let (out, mine) = (dir.path().join("out"), dir.path().join(".out.building/notes/mine"));
    fs::create_dir_all(mine.parent().unwrap()).unwrap();
    fs::write(&mine, "words").unwrap();
    for option in ["--restart", "--resume", "--strict"] {
        let run = tqc!("build", recipe, "--source", fixture("llama-tied"), "-o", out, option).expect(2);
        assert!(run.stderr.contains(".out.building"), "{}", run.stderr);
    }
    assert_eq!(fs::read_to_string(&mine).unwrap(), "words");

    let victim = dir.path().join("victim");
    fs::create_dir(&victim).unwrap();
    symlink(&victim, dir.path().join(".linked.building")).unwrap();
    tqc!("build", recipe, "--source", fixture("llama-tied"), "-o", dir.path().join("linked")).expect(2);
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
}

#[test]
fn an_output_path_may_end_in_a_dot_but_may_not_be_a_link() {
    let dir = temp();
    let recipe = recipe(dir.path(), &default_codec(AFFINE_4_32));
    tqc!("build", recipe, "--source", fixture("llama-tied"), "-o", dir.path().join("new/.")).expect(0);
    tqc!("verify", dir.path().join("new")).expect(0);
    fs::create_dir(dir.path().join("empty")).unwrap();
    symlink(dir.path().join("empty"), dir.path().join("link")).unwrap();
    let link = format!("{}/", dir.path().join("link").display());
    tqc!("build", recipe, "--source", fixture("llama-tied"), "-o", link).expect(2);
    assert!(!dir.path().join(".link.building").exists());
}

#[test]
fn small_files_of_a_source_must_be_regular_and_json() {
    for name in ["config.json", "tokenizer.json", "model.safetensors.index.json", "generation_config.json"] {
        let dir = temp();
        let source = dir.path().join("source");
        Model::fixture("llama-tied").write(&source);
        let path = source.join(name);
        let recipe = recipe(dir.path(), &default_codec(AFFINE_4_32));
        let refused = |what: &str| {
            let out = dir.path().join("out");
            let run = tqc!("build", recipe, "--source", source, "-o", out).expect(3);
            assert!(run.stderr.contains(name), "{what}: {}", run.stderr);
            assert!(!out.exists());
        };
        let content = fs::read(&path).ok();
        let clear = || drop(fs::remove_file(&path));

        clear();
        assert!(Command::new("mkfifo").arg(&path).status().expect("mkfifo is everywhere").success());
        refused("a pipe");
        clear();
        fs::write(dir.path().join("elsewhere"), content.unwrap_or_else(|| b"{}".to_vec())).unwrap();
        symlink(dir.path().join("elsewhere"), &path).unwrap();
        refused("a link");
        clear();
        fs::write(&path, [0; 16]).unwrap();
        refused("zeros");
    }
}

#[test]
fn names_from_files_reach_the_terminal_as_text() {
    let mut model = Model::fixture("llama-tied");
    let name = format!("x\u{1b}[31m{}", "y".repeat(100_000));
    model.add(Tensor::random(&name, &[4], 5));
    model.config["model_type"] = json!("llama");
    let dir = temp();
    model.write(&dir.path().join("source"));
    let run = tqc!("inspect", dir.path().join("source")).expect(0);
    assert!(run.stdout.contains("x\\u{1b}[31m") && !run.stdout.contains('\u{1b}'));
    let recipe = recipe(dir.path(), &default_codec(AFFINE_4_32));
    let run = tqc!("plan", recipe, "--source", dir.path().join("source")).expect(3);
    assert!(!run.stderr.contains('\u{1b}') && run.stderr.len() < 60_000, "{} bytes", run.stderr.len());
}

#[test]
fn a_measurement_of_no_codec_is_refused() {
    tqc!("bench", "encode", "--codec", "zzz").expect(2);
}

#[test]
fn nothing_is_written_into_an_artifact_or_the_source() {
    let dir = temp();
    let recipe = recipe(dir.path(), &default_codec(AFFINE_4_32));
    let (source, out) = (dir.path().join("source"), dir.path().join("out"));
    copy_folder(&fixture("llama-tied"), &source);
    tqc!("build", recipe, "--source", source, "-o", out).expect(0);
    for inner in [out.join("more"), out.join("deep/er/more"), source.join("more")] {
        let run = tqc!("build", recipe, "--source", source, "-o", inner).expect(2);
        assert!(run.stderr.contains("is inside"), "{}", run.stderr);
    }
    let run = tqc!("repack", out, "-o", out.join("more"), "--to", "bf16", "--all").expect(2);
    assert!(run.stderr.contains("is inside"), "{}", run.stderr);
    tqc!("verify", out).expect(0);
    assert!(!source.join("more").exists());
}

/// Elsewhere file names are text.
#[cfg(target_os = "linux")]
#[test]
fn names_that_are_no_text_are_shown_as_well_as_they_can_be() {
    use std::os::unix::ffi::OsStrExt as _;

    let dir = temp();
    let odd = dir.path().join(std::ffi::OsStr::from_bytes(b"not \xff text"));
    fs::create_dir(&odd).unwrap();
    let recipe = recipe(&odd, &default_codec(AFFINE_4_32));
    let shown = |run: &Run| run.json()["path"].as_str().unwrap().to_owned();
    let (built, expanded) = (odd.join("built"), odd.join("expanded"));
    let run = tqc!("build", recipe, "--source", fixture("llama-tied"), "-o", built, "--json").expect(0);
    assert!(shown(&run).ends_with("not \u{fffd} text/built"), "{}", run.stdout);
    let run = tqc!("inspect", built, "--json").expect(0);
    assert!(shown(&run).ends_with("built"), "{}", run.stdout);
    let run = tqc!("repack", built, "-o", expanded, "--to", "bf16", "--all", "--json").expect(0);
    assert!(shown(&run).ends_with("expanded"), "{}", run.stdout);
}
