//! Modules use only those listed before them in `src/lib.rs`, and the pure ones touch no outside world.

use std::fs;
use std::path::{Path, PathBuf};

/// These are functions of their arguments.
const PURE: [&str; 6] = ["linalg", "stats", "codec", "quant", "transform", "alloc"];
const OUTSIDE: [&str; 6] = ["std::fs", "std::time", "std::net", "std::env", "std::process", "std::thread"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The public modules, bottom to top.
fn layers() -> Vec<String> {
    let text = fs::read_to_string(root().join("lib.rs")).unwrap();
    let lines = text.lines().filter_map(|line| line.trim().strip_prefix("pub mod ")?.strip_suffix(';'));
    lines.map(str::to_owned).collect()
}

/// Files of a module, its tests' lines taken out: numbered lines.
fn lines_of(module: &str) -> Vec<(PathBuf, usize, String)> {
    let mut files = Vec::new();
    collect(&root().join(format!("{module}.rs")), &mut files);
    collect(&root().join(module), &mut files);
    assert!(!files.is_empty(), "`{module}` has no file");
    let mut lines = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for (number, line) in text.lines().enumerate() {
            // Unit tests come last in a file and may use anything.
            if line.starts_with("#[cfg(test)]") {
                break;
            }
            let code = line.split("//").next().unwrap_or_default();
            lines.push((file.clone(), number + 1, code.to_owned()));
        }
    }
    lines
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) {
    if path.is_dir() {
        let mut entries: Vec<PathBuf> =
            fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        entries.iter().for_each(|entry| collect(entry, files));
    } else if path.is_file() && path.extension().is_some_and(|extension| extension == "rs") {
        files.push(path.to_owned());
    }
}

/// Names that follow `crate::` in a line: `crate::x::…`, `crate::{x, y::z}`.
fn used(line: &str) -> Vec<String> {
    let mut names = Vec::new();
    for (at, _) in line.match_indices("crate::") {
        let rest = &line[at + "crate::".len()..];
        let word = |text: &str| {
            text.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>()
        };
        match rest.strip_prefix('{') {
            Some(list) => names.extend(list.split(',').map(word)),
            None => names.push(word(rest)),
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

#[test]
fn the_scanner_sees_every_spelling() {
    assert_eq!(used("use crate::plan::Plan; crate::build::run(x)"), ["plan", "build"]);
    assert_eq!(used("use crate::{arch::Arch, tensor};"), ["arch", "tensor"]);
}

#[test]
fn a_module_uses_only_modules_listed_before_it() {
    let layers = layers();
    assert!(layers.len() > 10, "the list of modules was not found");
    let mut wrong = Vec::new();
    for (level, module) in layers.iter().enumerate() {
        for (file, number, line) in lines_of(module) {
            for name in used(&line) {
                let known = layers.iter().position(|layer| *layer == name);
                if known.is_none_or(|at| at > level) {
                    wrong.push(format!(
                        "{}:{number}: `{module}` uses `{name}`: {}",
                        file.display(),
                        line.trim()
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn the_pure_modules_touch_no_files_devices_or_clock() {
    let layers = layers();
    let mut wrong = Vec::new();
    for module in PURE {
        assert!(layers.iter().any(|layer| layer == module), "`{module}` is not listed");
        for (file, number, line) in lines_of(module) {
            for outside in OUTSIDE.iter().filter(|outside| line.contains(**outside)) {
                wrong.push(format!("{}:{number}: `{module}` uses `{outside}`", file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
