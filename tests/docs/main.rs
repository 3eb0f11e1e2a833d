//! The documents against the program: the generated command reference, and every key of every JSON.
//!
//! `TQC_BLESS=1 cargo test --test docs` rewrites the generated part of `docs/cli.md`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

const RECIPE: &str = "recipes/mlx-4bit.toml";
const SOURCE: &str = "tests/fixtures/llama-tied";

/// A build with every change of basis that is recorded, a calibration, a budget, and a source with a draft head.
const CHANGING: &str = "
name = \"changing\"
[default]
codec = { affine = { bits = 2, group = 32 } }
encoder = \"gptq\"
[calibration]
rows = 4
context = 32
[transform]
gamma-fold = true
rotation = { kind = \"measure\", steps = 2 }
tokens = 16
";
const BUDGET: &str = "
[budget]
bits-per-weight = 16
sensitivity = \"costs.json\"
";
const PACKED: &str = "
name = \"packed\"
[default]
codec = { trellis = { bits = 1, states = 10 } }
encoder = \"trellis\"
";
const CHANGED: &str = "tests/fixtures/qwen3_5-tied";

/// Objects whose keys are names or settings of the user's, not ours.
const OPEN: &[&str] = &["files", "left", "metadata", "refused", "repairs", "right"];

#[test]
fn the_command_reference_is_what_the_parser_says() {
    const BEGIN: &str = "<!-- generated: begin -->\n";
    const END: &str = "<!-- generated: end -->\n";
    let path = Path::new("docs/cli.md");
    let text = fs::read_to_string(path).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("the first mark");
    let (found, after) = rest.split_once(END).expect("the last mark");
    let reference = tqc::cli::reference::reference();
    if std::env::var_os("TQC_BLESS").is_some() {
        fs::write(path, format!("{before}{BEGIN}{reference}{END}{after}")).unwrap();
        return;
    }
    assert_eq!(found, reference, "run TQC_BLESS=1 cargo test --test docs");
}

#[test]
fn every_table_has_its_head() {
    let mut folders = vec![Path::new("docs").to_owned(), Path::new(".").to_owned()];
    let mut tables = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && folder != Path::new(".") {
                folders.push(path.clone());
            }
            if path.extension().is_none_or(|extension| extension != "md") {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let lines: Vec<&str> = std::iter::once("").chain(text.lines()).collect();
            for (number, pair) in lines.windows(2).enumerate() {
                let begins = |line: &str| line.starts_with('|');
                if begins(pair[1]) && !begins(pair[0]) {
                    let rule = lines.get(number + 2).copied().unwrap_or_default();
                    let at = number + 1;
                    assert!(rule.starts_with("| -"), "{}:{at}: a table without a head", path.display());
                    tables += 1;
                }
            }
        }
    }
    assert!(tables > 50, "{tables} tables");
}

#[test]
fn the_architecture_names_every_module_once_and_in_order() {
    let text = fs::read_to_string("docs/architecture.md").unwrap();
    let rows =
        section(&text, "## Modules\n").lines().filter_map(|line| line.strip_prefix("| `")?.split('|').next());
    let named: Vec<&str> =
        rows.flat_map(|cell| cell.split(',')).map(|name| name.trim().trim_matches('`')).collect();
    let lib = fs::read_to_string("src/lib.rs").unwrap();
    let modules = lib.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'));
    assert_eq!(named, modules.collect::<Vec<_>>());
}

#[test]
fn every_format_of_costs_is_described() {
    let text = fs::read_to_string("docs/formats/sensitivity.md").unwrap();
    for format in tqc::alloc::import::formats() {
        assert!(text.contains(&format!("\n| `{format}` | ")), "{format}");
        assert!(
            text.lines().any(|line| line.starts_with("## `") && line.contains(&format!("`{format}"))),
            "{format}"
        );
    }
}

#[test]
fn every_key_of_every_json_is_described_and_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let artifact = folder.path().join("artifact");
    let at = artifact.to_str().unwrap();
    let cli = fs::read_to_string("docs/cli.md").unwrap();
    let mut wrong = Vec::new();
    // Keys of objects that may be null are there in one of two: a build that changes nothing, and one that measures.
    let (changing, changed) = (folder.path().join("changing.toml"), folder.path().join("changed"));
    fs::write(&changing, CHANGING).unwrap();
    let plan = json(0, &["plan", changing.to_str().unwrap(), "--source", CHANGED, "--json"]);
    let linears = plan["modules"].as_array().unwrap().iter().filter(|module| module["role"] == "linear");
    // As mlx-lm writes it; embedding and head have no cost.
    let costs: Vec<(&Value, f64)> = linears.map(|module| (&module["module"], 0.5)).collect();
    fs::write(folder.path().join("costs.json"), serde_json::to_string(&costs).unwrap()).unwrap();
    fs::write(&changing, format!("{CHANGING}{BUDGET}")).unwrap();
    let (changing, changed) = (changing.to_str().unwrap(), changed.to_str().unwrap());
    let both = |command: &str, wrong: &mut Vec<String>, runs: [&[&str]; 2]| {
        let heading = format!("### `tqc {command} --json`\n");
        let values = runs.map(|arguments| json(0, arguments));
        compare(&values, section(&cli, &heading), &heading, wrong);
    };
    let plain = ["plan", RECIPE, "--source", SOURCE, "--json"];
    both("plan", &mut wrong, [&plain, &["plan", changing, "--source", CHANGED, "--json"]]);
    let plain = ["build", RECIPE, "--source", SOURCE, "-o", at, "--json"];
    both("build", &mut wrong, [&plain, &["build", changing, "--source", CHANGED, "-o", changed, "--json"]]);
    let sliced = folder.path().join("sliced");
    let (recipe, out) = (folder.path().join("sliced.toml"), sliced.to_str().unwrap());
    fs::write(&recipe, CHANGING.split("[transform]").next().unwrap()).unwrap();
    let slice =
        ["build", recipe.to_str().unwrap(), "--source", CHANGED, "-o", out, "--only-layers", "1", "--json"];
    let heading = "### `tqc build --only-layers --json`\n";
    compare(&[json(0, &slice)], section(&cli, heading), heading, &mut wrong);
    let mut check = |command: &str, exit: i32, arguments: &[&str]| {
        let heading = format!("### `tqc {command} --json`\n");
        compare(&[json(exit, arguments)], section(&cli, &heading), &heading, &mut wrong);
    };
    check("inspect", 0, &["inspect", at, "--json"]);
    // A file that the record does not name is one problem; the source has other tensors, keys and files.
    fs::write(artifact.join("stray.txt"), "").unwrap();
    check("verify", 1, &["verify", at, "--source", SOURCE, "--json"]);
    check("diff", 1, &["diff", at, SOURCE, "--json"]);
    let (recipe, out) = (folder.path().join("packed.toml"), folder.path().join("packed"));
    fs::write(&recipe, PACKED).unwrap();
    json(0, &["build", recipe.to_str().unwrap(), "--source", SOURCE, "-o", out.to_str().unwrap(), "--json"]);
    let repacked = folder.path().join("repacked");
    check("repack", 0, &["repack", out.to_str().unwrap(), "-o", repacked.to_str().unwrap(), "--json"]);
    let (packed, imported) = (folder.path().join("exl3"), folder.path().join("imported"));
    fs::create_dir(&packed).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(Path::new("goldens/exl3").join(name), packed.join(name)).unwrap();
    }
    check("import", 0, &["import", packed.to_str().unwrap(), "-o", imported.to_str().unwrap(), "--json"]);
    check("doctor", 0, &["doctor", "--json"]);
    check("bench encode", 0, &["bench", "encode", "--codec", "bf16", "--json"]);
    let small = ["--out-features", "64", "--in-features", "64", "--rows", "1"];
    check("bench linear", 0, &[&["bench", "linear", "--codec", "bf16", "--json"], &small[..]].concat());

    check("bench rotate", 0, &["bench", "rotate", "--width", "64", "--passes", "1", "--json"]);
    check("bench factor", 0, &["bench", "factor", "--n", "64", "--runs", "1", "--rows", "2", "--json"]);
    let trellis = ["bench", "trellis", "--bits", "3", "--states", "10", "--tiles", "2", "--mse", "--json"];
    check("bench trellis", 0, &trellis);

    let formats = fs::read_to_string("docs/formats/provenance.md").unwrap();
    for file in ["provenance.json", "machine.json"] {
        let read = |dir: &Path| serde_json::from_slice(&fs::read(dir.join(file)).unwrap()).unwrap();
        let heading = format!("## Keys of `{file}`\n");
        compare(
            &[read(&artifact), read(Path::new(changed))],
            section(&formats, &heading),
            &heading,
            &mut wrong,
        );
    }
    for (page, record) in
        [("repacked", repacked.join("repacked.json")), ("exl3", imported.join("imported.json"))]
    {
        let text = fs::read_to_string(format!("docs/formats/{page}.md")).unwrap();
        let heading = format!("## Keys of `{}`\n", record.file_name().unwrap().to_str().unwrap());
        let record = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
        compare(&[record], section(&text, &heading), &heading, &mut wrong);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The text from `heading` to the next heading of any level.
fn section<'a>(text: &'a str, heading: &str) -> &'a str {
    let (_, rest) = text.split_once(heading).unwrap_or_else(|| panic!("no section {heading}"));
    rest.split("\n#").next().expect("split gives at least one part")
}

fn json(exit: i32, arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_tqc")).args(arguments).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(exit), "tqc {}: {stderr}", arguments.join(" "));
    serde_json::from_slice(&output.stdout).expect("stdout is one JSON value")
}

/// Keys that only the value or only the section's tables have.
fn compare(values: &[Value], section: &str, heading: &str, wrong: &mut Vec<String>) {
    let mut paths = BTreeSet::new();
    values.iter().for_each(|value| collect("", value, &mut paths));
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let documented: BTreeSet<String> = rows.map(str::to_owned).collect();
    let heading = heading.trim();
    wrong.extend(paths.difference(&documented).map(|path| format!("{heading}: `{path}` is not described")));
    let stale = documented.difference(&paths).filter(|path| {
        // The items of an empty list have no keys to compare.
        let list = path.rsplit_once("[].").map(|(list, _)| format!("{list}[]."));
        list.is_none_or(|list| paths.iter().any(|found| found.starts_with(&list)))
    });
    wrong.extend(stale.map(|path| format!("{heading}: `{path}` is described and not there")));
}

/// `sizes.weights`, `modules[].name`: the path of every key.
fn collect(at: &str, value: &Value, paths: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                let path = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
                if !(value.is_object() && OPEN.contains(&key.as_str())) {
                    collect(&path, value, paths);
                }
                paths.insert(path);
            }
        }
        Value::Array(items) => {
            for item in items.iter().filter(|item| item.is_object()) {
                collect(&format!("{at}[]"), item, paths);
            }
        }
        _ => {}
    }
}
