//! Changes of basis: exact by an independent pass in f64, exact enough in f32, caught when they are not, and the same
//! bytes everywhere.

#[path = "../common/mod.rs"]
mod common;
mod draft;
mod exact;
mod gate;
mod measure;
#[path = "../runtime/plain.rs"]
#[allow(dead_code)]
mod plain;
#[path = "../runtime/reference.rs"]
#[allow(dead_code)]
mod reference;
mod refusals;
mod same_bytes;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use tqc::fold::Watch;
use tqc::isa::Isa;
use tqc::plan::{Limits, Plan, SourceFolder, plan};
use tqc::recipe::Recipe;
use tqc::stage::pipeline;

use common::*;

/// Families in which value heads can be rotated.
const DENSE: [&str; 5] = ["llama-tied", "llama-untied", "mistral", "qwen2", "qwen3"];

/// A recipe that only changes the basis.
fn unrounded(transform: &str, layout: &str) -> String {
    format!("[default]\ncodec = \"f32\"\n[transform]\n{transform}\n[output]\nlayout = \"{layout}\"\n")
}

fn recipe_path(dir: &Path, text: &str) -> PathBuf {
    recipe(dir, text)
}

/// The plan of a recipe on a checkpoint.
fn planned(dir: &Path, text: &str, source: &Path) -> Plan {
    let recipe = Recipe::load(&recipe_path(dir, text), &pipeline::names()).unwrap();
    let source = SourceFolder { dir: source.to_owned(), hub: None };
    plan(recipe, source, limits()).unwrap_or_else(|e| panic!("{e}"))
}

fn limits() -> Limits {
    Limits { memory: None, threads: 2, isa: Isa::best() }
}

static NEVER: AtomicBool = AtomicBool::new(false);

/// Nobody.
fn nobody() -> Watch<'static> {
    Watch { stop: &NEVER, tell: &|_| {}, keep: &() }
}

/// A build of a recipe, read back.
fn built(dir: &Path, text: &str, source: &Path, more: &[&str]) -> (PathBuf, serde_json::Value) {
    let out = dir.join("artifact");
    let mut args =
        args!["build", recipe_path(dir, text), "--source", source, "-o", out, "--restart", "--json"];
    args.extend(more.iter().map(Into::into));
    let run = finish(command(args)).expect(0);
    (out, run.json())
}
