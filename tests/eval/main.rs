//! The instruments: against arithmetic and other implementations, and what they refuse.

#[path = "../common/mod.rs"]
mod common;

mod compare;
mod kl;
mod llama;
mod report;
mod stop;
mod tasks;

use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens").join(name)
}

fn demo() -> PathBuf {
    golden("models/demo-qwen3_5")
}
