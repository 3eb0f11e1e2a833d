//! Logits, greedy continuations, hidden states and draft logits against `transformers` in f32.

#[path = "../common/mod.rs"]
mod common;
mod reference;

use std::path::Path;
use std::sync::Arc;

use tqc::backend::Precision;
use tqc::backend::cpu::Cpu;
use tqc::isa::Isa;
use tqc::runtime::{Model, Want, Weights};

use common::{fixture, fixtures};
use reference::Reference;

/// The spread between two other stacks is 2e-4 (`goldens/runtime/SOURCE.toml`).
const LOGITS: f32 = 1e-3;

fn cpu() -> Arc<Cpu> {
    Cpu::new(Isa::best(), 2, Precision::Exact)
}

fn open(dir: &Path) -> Model {
    open_on(dir, cpu())
}

fn open_on(dir: &Path, cpu: Arc<Cpu>) -> Model {
    let weights = Weights::open(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    Model::new(weights, cpu).unwrap()
}

/// The greatest distance and where it is.
fn distance(found: &[f32], expected: &[f32]) -> (f32, usize) {
    assert_eq!(found.len(), expected.len());
    let apart = |i: usize| {
        let distance = (found[i] - expected[i]).abs();
        if distance.is_nan() { f32::INFINITY } else { distance }
    };
    (0..found.len()).map(|i| (apart(i), i)).max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32], most: f32) {
    let (distance, at) = distance(found, expected);
    assert!(distance <= most, "{what}: value {at} is {}, not {} ({distance:e})", found[at], expected[at]);
}

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]).then(b.cmp(a))).unwrap() as u32
}

#[test]
fn logits_of_every_fixture_are_those_of_transformers_f32() {
    for name in fixtures() {
        let (model, reference) = (open(&fixture(&name)), Reference::open(&name));
        for prompt in ["a", "b"] {
            let ids = reference.ids(&format!("input_ids.{prompt}"));
            let pass = model.forward(&mut model.state(), &ids, Want::All).unwrap();
            let expected = reference.floats(&format!("logits_f32.{prompt}"));
            assert_close(&format!("{name} {prompt}"), &pass.logits, &expected, LOGITS);
        }
    }
}
