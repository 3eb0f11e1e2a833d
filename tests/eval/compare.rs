//! `tqc eval compare`: what it pairs, and what it refuses to pair.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::common::*;
use crate::{args, demo, golden, tqc};

/// Three artifacts of the demo, each measured against one dump.
fn measured(dir: &Path) -> PathBuf {
    let (demo, db) = (demo(), dir.join("eval.db"));
    tqc!(
        "eval",
        "dump",
        &demo,
        "--text",
        golden("eval/text.jsonl"),
        "-o",
        dir.join("dump"),
        "--context",
        "64"
    )
    .expect(0);
    for bits in ["8", "4", "2"] {
        let recipe = recipe(dir, &default_codec(&format!("{{ affine = {{ bits = {bits}, group = 32 }} }}")));
        let artifact = dir.join(format!("{bits}-bit"));
        tqc!("build", recipe, "--source", &demo, "-o", &artifact).expect(0);
        tqc!("eval", "kl", "--teacher", dir.join("dump"), &artifact, "--db", &db).expect(0);
    }
    db
}

#[test]
fn kl_is_paired_by_document_and_adjusted_for_the_number_of_arms() {
    let dir = temp();
    let dir = dir.path();
    let db = measured(dir);
    let found = tqc!("eval", "compare", "4-bit", "8-bit", "2-bit", "--db", &db, "--json").expect(0).json();
    let arms = found["kl"][0]["arms"].as_array().unwrap();
    let verdicts: Vec<&Value> = arms.iter().map(|arm| &arm["verdict"]).collect();
    assert_eq!(verdicts, [&json!("better"), &json!("worse")], "{found}");
    for arm in arms {
        assert_eq!(arm["documents"], 12);
        assert!(arm["p_adjusted"].as_f64().unwrap() >= arm["p"].as_f64().unwrap());
        let run = |name: &Value| {
            let runs = tqc!("eval", "list", "--db", &db, "--json").expect(0).json();
            let run =
                runs["runs"].as_array().unwrap().iter().find(|run| run["model"]["name"] == *name).unwrap();
            run["summary"]["mean_kl"].as_f64().unwrap()
        };
        let difference = run(&arm["b"]) - run(&arm["a"]);
        let mean = arm["difference"]["mean"].as_f64().unwrap();
        assert!((mean - difference).abs() < 1e-9 + 1e-6 * difference.abs(), "{mean} {difference}");
    }
    let text = tqc!("eval", "compare", "1", "2", "--db", &db).expect(0).stdout;
    assert!(text.contains("4-bit against 8-bit") && text.contains("worse"), "{text}");
}

#[test]
fn results_of_different_dumps_or_models_of_one_name_are_not_mixed_up() {
    let dir = temp();
    let dir = dir.path();
    let db = measured(dir);
    let demo = demo();
    let other = dir.join("other");
    tqc!("eval", "dump", &demo, "--text", golden("eval/text.jsonl"), "-o", &other, "--context", "32")
        .expect(0);
    tqc!("eval", "kl", "--teacher", &other, &demo, "--db", &db).expect(0);
    let run = tqc!("eval", "compare", "4-bit", "demo-qwen3_5", "--db", &db).expect(2);
    assert!(run.stderr.contains("no measurement that all of them have"), "{}", run.stderr);
    for (args, words) in [
        (args!["eval", "compare", "4-bit", "9-bit", "--db", &db], "no finished run or model `9-bit`"),
        (
            args!["eval", "compare", "4-bit", "2-bit", "--margin", "1", "--db", &db],
            "a margin must be above 0",
        ),
        (args!["eval", "compare", "4-bit", "2-bit", "--db", dir.join("none.db")], "there is no"),
        (args!["eval", "compare", "4-bit", "4-bit", "--db", &db], "`4-bit` is given twice"),
        (args!["eval", "compare", "4-bit", "2", "--db", &db], "`2` is given twice"),
    ] {
        let run = finish(command(args)).expect(2);
        assert!(run.stderr.contains(words), "{}", run.stderr);
    }
    // Another artifact in a folder of the same name.
    fs::create_dir(dir.join("b")).unwrap();
    let recipe = recipe(dir, &default_codec("{ affine = { bits = 3, group = 32 } }"));
    tqc!("build", recipe, "--source", &demo, "-o", dir.join("b/4-bit")).expect(0);
    tqc!("eval", "kl", "--teacher", dir.join("dump"), dir.join("b/4-bit"), "--db", &db).expect(0);
    let run = tqc!("eval", "compare", "4-bit", "2-bit", "--db", &db).expect(2);
    assert!(run.stderr.contains("stands for several models"), "{}", run.stderr);
}
