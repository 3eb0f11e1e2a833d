//! Damaged configs and records: refused or accepted, never a panic, never slow, never large.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::{Value, json};
use tqc::check::verify::{Again, Rebuild, verify};
use tqc::isa::Isa;
use tqc::plan::{Limits, SourceFolder, plan};
use tqc::recipe::Recipe;

use crate::common::*;
use crate::tqc;

const LIMITS: fn() -> Limits = || Limits { memory: None, threads: 1, isa: Isa::Scalar };

/// JSON that a config might hold by mistake or by malice.
fn any_json() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        (0u64..9).prop_map(|n| json!(n)),
        prop::sample::select(vec![
            json!(-1),
            json!(1u64 << 21),
            json!((1u64 << 21) + 1),
            json!(1u64 << 32),
            json!(u64::MAX),
            json!(0.5),
            json!(1e300),
            json!(1024),
            json!(1025),
            json!(2097151)
        ]),
    ];
    let leaf = prop_oneof![
        4 => number,
        1 => prop::sample::select(vec![json!(null), json!(true), json!(false), json!("bfloat16"), json!("float32"),
            json!("silu"), json!("gelu"), json!(""), json!("qwen3_5"), json!("llama"), json!("qwen3_5_moe"), json!("é")]),
    ];
    leaf.prop_recursive(2, 8, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z_]{1,8}|rope_type|rope_theta|hidden_size|factor", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// What is done to one place of a document.
#[derive(Debug, Clone)]
enum Change {
    Remove,
    Replace(Value),
    /// Add the value of one place under the name of another.
    Insert(Value),
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        1 => Just(Change::Remove),
        4 => any_json().prop_map(Change::Replace),
        1 => any_json().prop_map(Change::Insert),
    ]
}

/// Every path of keys and positions in a document.
fn paths(value: &Value, at: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    let below: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(key, value)| (key.clone(), value)).collect(),
        // The first few stand for the rest.
        Value::Array(list) => {
            list.iter().take(3).enumerate().map(|(i, value)| (i.to_string(), value)).collect()
        }
        _ => Vec::new(),
    };
    for (key, value) in below {
        at.push(key);
        found.push(at.clone());
        paths(value, at, found);
        at.pop();
    }
}

fn apply(document: &mut Value, path: &[String], change: &Change) {
    let (last, above) = path.split_last().expect("paths are not empty");
    let mut parent = document;
    for key in above {
        let next = match parent {
            Value::Object(map) => map.get_mut(key),
            Value::Array(list) => key.parse::<usize>().ok().and_then(|i| list.get_mut(i)),
            _ => None,
        };
        // An earlier change may have taken the place away.
        let Some(next) = next else { return };
        parent = next;
    }
    match (parent, change) {
        (Value::Object(map), Change::Remove) => drop(map.remove(last)),
        (Value::Object(map), Change::Replace(value)) => drop(map.insert(last.clone(), value.clone())),
        (Value::Object(map), Change::Insert(value)) => {
            drop(map.insert("text_config".to_owned(), value.clone()))
        }
        (Value::Array(list), change) => {
            let Some(i) = last.parse::<usize>().ok().filter(|i| *i < list.len()) else { return };
            match change {
                Change::Remove => drop(list.remove(i)),
                Change::Replace(value) => list[i] = value.clone(),
                Change::Insert(value) => list.insert(i, value.clone()),
            }
        }
        _ => {}
    }
}

/// A document, and the changes to make at places chosen by number.
fn mutated(document: &Value, changes: &[(prop::sample::Index, Change)]) -> Value {
    let mut all = Vec::new();
    paths(document, &mut Vec::new(), &mut all);
    let mut changed = document.clone();
    for (place, change) in changes {
        apply(&mut changed, &all[place.index(all.len())], change);
    }
    changed
}

fn changes() -> impl Strategy<Value = Vec<(prop::sample::Index, Change)>> {
    prop::collection::vec((any::<prop::sample::Index>(), change()), 1..4)
}

/// The most memory this process ever held, in bytes; 0 if the system does not say.
fn high_water() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Copies of the fixtures whose configs may be written over; made once.
fn sources() -> &'static (tempfile::TempDir, Vec<(PathBuf, Value)>) {
    static SOURCES: OnceLock<(tempfile::TempDir, Vec<(PathBuf, Value)>)> = OnceLock::new();
    SOURCES.get_or_init(|| {
        let dir = temp();
        let copies = fixtures().into_iter().map(|name| {
            let copy = dir.path().join(&name);
            copy_folder(&fixture(&name), &copy);
            let config = read_json(&copy.join("config.json"));
            (copy, config)
        });
        let copies = copies.collect();
        (dir, copies)
    })
}

fn plan_with(config: &Value, source: &Path, recipe: &Path) {
    write_json(&source.join("config.json"), config);
    let recipe = Recipe::load(recipe, &["rtn"]).unwrap();
    let start = Instant::now();
    let outcome = plan(recipe, SourceFolder { dir: source.to_owned(), hub: None }, LIMITS());
    let took = start.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?} for {config}");
    if let Err(failure) = outcome {
        let message = failure.to_string();
        assert!(!message.is_empty() && message.len() < 100_000, "{} bytes of message", message.len());
    }
}

#[test]
fn the_planner_survives_damaged_configs() {
    let (dir, sources) = sources();
    let recipe = recipe(dir.path(), &default_codec(AFFINE_4_32));
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 400,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let strategy = (any::<prop::sample::Index>(), changes());
    runner
        .run(&strategy, |(which, changes)| {
            let (source, config) = &sources[which.index(sources.len())];
            plan_with(&mutated(config, &changes), source, &recipe);
            Ok(())
        })
        .unwrap();
    // Configs that call for the largest model there can be.
    for (source, config) in sources {
        let mut largest = config.clone();
        grow(&mut largest);
        plan_with(&largest, source, &recipe);
    }
    let most = high_water();
    assert!(most < 500 << 20, "{} MiB", most >> 20);
}

/// Every number as large as the readers of configs allow.
fn grow(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (key, value) in map.iter_mut() {
                let layers = key.contains("layers") || key == "depth";
                if value.as_u64().is_some_and(|n| n > 0) && key != "full_attention_interval" {
                    *value = json!(if layers { 1024u64 } else { 1 << 21 });
                } else {
                    grow(value);
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(grow),
        _ => {}
    }
}

fn claims(record: &Value) -> (Value, Value) {
    let mut outputs = record["outputs"].clone();
    for output in outputs.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
        output.remove("relative_mse");
        output.remove("repairs");
    }
    (outputs, record["files"].clone())
}

#[test]
fn verify_survives_damaged_records_and_believes_none() {
    let dir = temp();
    let recipe = recipe(dir.path(), &default_codec("\"mxfp4\""));
    let (source, out) = (fixture("llama-tied"), dir.path().join("out"));
    tqc!("build", recipe, "--source", source, "-o", out).expect(0);
    let path = out.join("provenance.json");
    let record = read_json(&path);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let unchanged = AtomicBool::new(false);
    runner
        .run(&changes(), |changes| {
            // Spelt as the program does, so that no change is noticed by its spelling alone.
            let changed = mutated(&record, &changes);
            std::fs::write(&path, format!("{changed}\n")).unwrap();
            let outcome = verify(
                &out,
                Some(&source),
                Again { rebuild: Rebuild::Some(2), calibration: None },
                LIMITS(),
                &unchanged,
            );
            // All that the record says of files and stored tensors follows from the folder, the recipe and
            // the source; only errors and repairs would take encoding every module again.
            if claims(&changed) != claims(&record) {
                prop_assert!(!outcome.as_ref().is_ok_and(|verdict| verdict.ok), "accepted {changes:?}");
            }
            Ok(())
        })
        .unwrap();
}
