//! Calibration: sums are those of the inputs, codes are those that a loss calls for, and both are the same everywhere.

#[path = "../common/mod.rs"]
mod common;
mod planned;
mod refusals;
mod same_bytes;
mod slice;
mod sums;
mod trellis;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use tqc::isa::Isa;
use tqc::plan::{Limits, Plan, SourceFolder, plan};
use tqc::recipe::Recipe;
use tqc::stage::pipeline;

use common::*;

/// Twelve documents of words that come in no order.
fn text(dir: &Path) -> PathBuf {
    let words =
        ["river", "stone", "of", "the", "seven", "12", "bridge", "and", "blue", "ran", "to", "a", "mill"];
    let mut state = 7usize;
    let mut next = || {
        state = (state * 1_103_515_245 + 12_345) % 2_147_483_648;
        words[state / 65_536 % words.len()]
    };
    let lines: Vec<String> = (0..12)
        .map(|_| {
            let text: Vec<&str> = (0..40).map(|_| next()).collect();
            serde_json::json!({ "text": text.join(" ") }).to_string()
        })
        .collect();
    let path = dir.join("text.jsonl");
    std::fs::write(&path, lines.join("\n")).unwrap();
    path
}

/// A recipe of one codec and encoder, and what `more` adds.
fn recipe_text(encoder: &str, bits: u32, calibration: &str, more: &str) -> String {
    format!(
        "[default]\ncodec = {{ affine = {{ bits = {bits}, group = 32 }} }}\nencoder = \"{encoder}\"\n\
         [calibration]\ntext = \"text.jsonl\"\nrows = 8\ncontext = 24\n{calibration}\n{more}\n"
    )
}

/// A build of a recipe, and what it said.
fn built(dir: &Path, name: &str, text: &str, source: &Path, more: &[&str]) -> (PathBuf, Value) {
    let out = dir.join(name);
    let path = recipe(dir, text);
    let mut args = args!["build", path, "--source", source, "-o", out, "--restart", "--json"];
    args.extend(more.iter().map(Into::into));
    let run = finish(command(args)).expect(0);
    (out, run.json())
}

fn limits() -> Limits {
    Limits { memory: None, threads: 2, isa: Isa::best() }
}

/// The plan of a recipe on a checkpoint.
fn planned(dir: &Path, text: &str, source: &Path) -> Arc<Plan> {
    let recipe = Recipe::load(&recipe(dir, text), &pipeline::names()).unwrap();
    let source = SourceFolder { dir: source.to_owned(), hub: None };
    Arc::new(plan(recipe, source, limits()).unwrap_or_else(|e| panic!("{e}")))
}
