//! Gives the program the digest of its own source, which provenance records.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Everything that decides what the program does, apart from the compiler.
const PARTS: [&str; 5] = ["Cargo.lock", "Cargo.toml", "build.rs", "pipelines", "src"];

fn main() {
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let mut files = Vec::new();
    for part in PARTS {
        println!("cargo::rerun-if-changed={part}");
        collect(&root.join(part), &mut files);
    }
    let mut named: Vec<(String, PathBuf)> =
        files.into_iter().map(|path| (name(&root, &path), path)).collect();
    named.sort();
    let mut hasher = Sha256::new();
    for (name, path) in named {
        let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for part in [name.as_bytes(), &bytes] {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
    }
    let hex: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("cargo::rustc-env=TQC_SOURCE_SHA256={hex}");
}

/// The path below the root with `/` on every system.
fn name(root: &Path, path: &Path) -> String {
    let below = path.strip_prefix(root).expect("collected below the root");
    below.components().map(|c| c.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/")
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) {
    if path.is_dir() {
        let entries = fs::read_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for entry in entries {
            collect(&entry.expect("a listed entry can be read").path(), files);
        }
    } else if path.exists() {
        files.push(path.to_owned());
    }
}
