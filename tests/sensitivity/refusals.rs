//! What is refused, and what stays where it was.

use std::fs;

use crate::common::*;
use crate::{FOUR, TEXT, args, in_f32, recipe_named, tqc};

/// A request that is refused leaves nothing behind; its messages.
fn refused(recipe: &str, text: &str, code: i32, more: &[&str]) -> String {
    let dir = temp();
    let recipe = recipe_named(dir.path(), "test", recipe);
    fs::write(dir.path().join("text.jsonl"), text).unwrap();
    let out = dir.path().join("sens.json");
    let mut args = args![
        "sensitivity",
        fixture("qwen3_5"),
        "--recipe",
        recipe,
        "-o",
        out,
        "--text",
        dir.path().join("text.jsonl")
    ];
    args.extend(more.iter().map(Into::into));
    let run = finish(command(args)).expect(code);
    assert_eq!(run.stdout, "");
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
    run.stderr
}

#[test]
fn bad_requests_name_what_is_wrong() {
    for (recipe, text, code, more, words) in [
        (FOUR, TEXT, 2, &["--only", "*.mlp.nope"][..], "`*.mlp.nope` matches none of the"),
        (FOUR, TEXT, 2, &["--only", "[z-a]"], "is not a glob"),
        (FOUR, TEXT, 2, &["--candidates", "affine-7g32"], "`affine-7g32` is not a codec that quantizes"),
        (FOUR, TEXT, 2, &["--candidates", "bf16"], "`bf16` is not a codec that quantizes"),
        (FOUR, TEXT, 2, &["--candidates", "mxfp4,mxfp4"], "`mxfp4` is a candidate twice"),
        // The fixture's width is 160.
        (
            FOUR,
            TEXT,
            2,
            &["--candidates", "affine-4g64"],
            "affine-4g64 needs in_features to be a multiple of 64, but",
        ),
        (FOUR, TEXT, 2, &["--memory", "1KiB"], "a budget of 1.00 KiB is too small: one probe of"),
        (FOUR, "", 3, &[], "holds no text"),
        (FOUR, "{\"text\": 1}\n", 3, &[], "`text` must be a string"),
        ("[default]\ncodec = \"keep\"\n", TEXT, 2, &[], "recipe `test` quantizes no module"),
        (&format!("{FOUR}[transform]\nrotation = \"measure\"\n"), TEXT, 2, &[], "leaves the basis open"),
    ] {
        let stderr = refused(recipe, text, code, more);
        assert!(stderr.contains(words), "{more:?}: {stderr}");
        assert!(stderr.contains("\nhelp: ") || stderr.contains("is not a glob"), "{stderr}");
    }
}

#[test]
fn a_module_that_the_recipe_stores_as_floats_is_not_measured() {
    let recipe = format!("{FOUR}[[rule]]\nmatch = \"*.lm_head\"\ncodec = \"keep\"\n");
    let stderr = refused(&recipe, TEXT, 2, &["--only", "*.lm_head"]);
    assert!(stderr.contains("`*.lm_head` matches none"), "{stderr}");
}

#[test]
fn neither_a_file_nor_the_work_of_another_task_is_lost() {
    let dir = temp();
    let recipe = recipe_named(dir.path(), "test", FOUR);
    let out = dir.path().join("sens.json");
    let text = dir.path().join("text.jsonl");
    fs::write(&text, TEXT).unwrap();
    let run = |more: &[&str]| {
        let source = fixture("qwen3_5");
        let mut args = args!["sensitivity", source, "--recipe", recipe, "-o", out, "--text", text];
        args.extend(["--only", "*.layers.3.mlp.*", "--candidates", "affine-4g32"].map(Into::into));
        args.extend(more.iter().map(Into::into));
        finish(command(args))
    };
    fs::write(&out, "mine").unwrap();
    assert!(run(&[]).expect(2).stderr.contains("exists already"));
    assert_eq!(fs::read_to_string(&out).unwrap(), "mine");
    fs::remove_file(&out).unwrap();

    let work = dir.path().join(".sens.json.work");
    fs::create_dir(&work).unwrap();
    fs::write(work.join("key.json"), "{}\n").unwrap();
    fs::write(work.join("done.json"), "{}\n").unwrap();
    let stderr = run(&[]).expect(2).stderr;
    assert!(stderr.contains("unfinished work of another kind") && stderr.contains("--discard"), "{stderr}");
    assert!(work.join("done.json").exists());
    run(&["--discard"]).expect(0);
    assert!(out.exists() && !work.exists());
}

#[test]
fn numbers_that_are_none_are_named() {
    let dir = temp();
    let mut model = Model::fixture("qwen3_5");
    let name = "model.language_model.layers.1.mlp.down_proj.weight";
    model.tensor(name).put_u16(&[3, 5], 0x7fc0);
    let source = dir.path().join("nan");
    model.write(&source);
    let recipe = recipe_named(dir.path(), "test", FOUR);
    let out = dir.path().join("sens.json");
    let run = |only: &str| {
        tqc!(
            "sensitivity",
            source,
            "--recipe",
            recipe,
            "-o",
            out,
            "--only",
            only,
            "--tokens",
            "20",
            "--candidates",
            "affine-4g32"
        )
        .expect(3)
    };
    // Where it is encoded, and where it is only computed with.
    assert!(run("*.layers.1.mlp.down_proj").stderr.contains("holds NaN at [3, 5]"));
    assert!(
        run("*.layers.1.mlp.up_proj")
            .stderr
            .contains("`language_model.model.layers.1.mlp.down_proj.weight` holds NaN")
    );

    // Weights that are finite, but too large once they are multiplied.
    let wide = in_f32(dir.path(), "qwen2");
    let mut tensors = read_safetensors(&wide.join("model.safetensors"));
    let norm = tensors.iter_mut().find(|tensor| tensor.name == "model.norm.weight").unwrap();
    norm.map(|_| 3e38);
    write_safetensors(&wide.join("model.safetensors"), &tensors);
    let run = tqc!("sensitivity", wide, "--recipe", recipe, "-o", out, "--only", "*.down_proj").expect(3);
    assert!(run.stderr.contains("hold NaN or infinity, though every weight is finite"), "{}", run.stderr);
}
