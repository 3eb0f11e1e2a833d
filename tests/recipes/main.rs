//! A folder of wrong recipes with the message each gives, the recipes that ship, the reference in
//! the documents, and a fuzzer.
//!
//! `wrong/NAME.toml` gives `wrong/NAME.txt`: exit code, then all problems as the command prints them.
//! `TQC_BLESS=1 cargo test --test recipes` rewrites those and the table in `docs/recipes.md`; read
//! the difference before committing it.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tqc::failure::{Exit, Failure, Problems};
use tqc::recipe::{Recipe, RecipeError, RecipeFile, keys};

const PIPELINES: &[&str] = &["rtn"];

fn toml_files(folder: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        .collect();
    files.sort();
    files
}

fn transcript(outcome: Result<Recipe, Problems<RecipeError>>) -> String {
    match outcome {
        Ok(recipe) => panic!("`{}` was accepted", recipe.name),
        Err(problems) => {
            let mut text = format!("exit {}\n{problems}\n", problems.exit() as u8);
            if let Some(help) = problems.help() {
                text.push_str(&format!("help: {help}\n"));
            }
            text.replace('\\', "/")
        }
    }
}

fn blessing() -> bool {
    std::env::var_os("TQC_BLESS").is_some()
}

#[test]
fn every_wrong_recipe_gives_its_whole_message() {
    let cases = toml_files("tests/recipes/wrong");
    assert!(cases.len() >= 30, "only {} cases found", cases.len());
    let mut failures = Vec::new();
    for case in &cases {
        let found = transcript(Recipe::load(case, PIPELINES));
        let snapshot = case.with_extension("txt");
        if blessing() {
            fs::write(&snapshot, &found).unwrap();
        }
        let expected = fs::read_to_string(&snapshot).unwrap_or_default();
        if found != expected {
            failures.push(format!("{}\nexpected:\n{expected}\nfound:\n{found}", case.display()));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[test]
fn every_shipped_recipe_is_accepted_and_is_called_what_its_file_is_called() {
    let shipped = toml_files("recipes");
    let names: Vec<_> = shipped.iter().map(|path| path.file_stem().unwrap().to_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "demo-q3",
            "demo",
            "gptq-4bit",
            "lab-q3",
            "mlx-3bit",
            "mlx-4bit",
            "mlx-mixed",
            "mxfp4",
            "nvfp4",
            "qwen38-4bit",
            "qwen38-q3-mixed",
            "qwen38-q3",
            "smollm2-q3",
            "trellis-3bit"
        ]
    );
    for (path, name) in shipped.iter().zip(names) {
        let recipe = Recipe::load(path, PIPELINES).unwrap_or_else(|problems| panic!("{problems}"));
        assert_eq!(recipe.name, name);
        assert!(recipe.description.is_some(), "{name}");
    }
}

#[test]
fn the_rules_of_shipped_recipes_reach_the_modules_they_are_written_for() {
    let load = |name: &str| Recipe::load(&Path::new("recipes").join(name), PIPELINES).unwrap();
    let codec = |recipe: &Recipe, module: &str| match recipe.rule_for(module) {
        Some((_, rule)) => rule.choice.codec.to_string(),
        None => recipe.default.codec.to_string(),
    };
    let mixed = load("mlx-mixed.toml");
    for (module, expected) in [
        ("model.layers.0.mlp.gate_proj", "affine-3g64"),
        ("language_model.model.layers.9.mlp.down_proj", "affine-3g64"),
        ("language_model.model.layers.9.mlp.switch_mlp.up_proj", "affine-3g64"),
        ("language_model.model.layers.9.mlp.gate", "affine-4g64"),
        ("model.layers.0.self_attn.q_proj", "affine-4g64"),
        ("model.embed_tokens", "affine-4g64"),
    ] {
        assert_eq!(codec(&mixed, module), expected, "{module}");
    }
    let qwen = load("qwen38-4bit.toml");
    for (module, expected) in [
        ("language_model.model.embed_tokens", "affine-6g64"),
        ("language_model.lm_head", "affine-8g64"),
        ("language_model.model.layers.0.linear_attn.in_proj_a", "affine-8g64"),
        ("language_model.model.layers.62.linear_attn.in_proj_b", "affine-8g64"),
        ("language_model.model.layers.0.linear_attn.in_proj_qkv", "affine-4g64"),
        ("language_model.model.layers.3.self_attn.k_proj", "affine-6g64"),
        ("language_model.model.layers.3.self_attn.q_proj", "affine-4g64"),
        ("language_model.model.layers.63.mlp.down_proj", "affine-4g64"),
    ] {
        assert_eq!(codec(&qwen, module), expected, "{module}");
    }
    let third = load("qwen38-q3.toml");
    for (module, expected, encoder) in [
        ("language_model.model.layers.63.mlp.down_proj", "trellis-3", "ldlq"),
        ("language_model.model.layers.0.mlp.gate_proj", "trellis-3", "ldlq"),
        ("language_model.model.layers.3.self_attn.k_proj", "affine-6g64", "gptq-refit"),
        ("language_model.model.layers.3.self_attn.q_proj", "affine-4g64", "gptq-refit"),
        ("language_model.lm_head", "affine-8g64", "gptq-refit"),
    ] {
        assert_eq!(codec(&third, module), expected, "{module}");
        let choice = third.rule_for(module).map_or(&third.default, |(_, rule)| &rule.choice);
        assert_eq!(third.encoder(choice), Some(encoder), "{module}");
    }
    let mixed = load("qwen38-q3-mixed.toml");
    for (module, expected) in [
        ("language_model.model.layers.3.self_attn.q_proj", "affine-4g64"),
        ("language_model.model.layers.3.self_attn.k_proj", "affine-6g64"),
        ("language_model.model.layers.0.linear_attn.in_proj_qkv", "affine-4g64"),
        ("language_model.model.layers.0.linear_attn.in_proj_a", "affine-8g64"),
        ("language_model.lm_head", "affine-8g64"),
    ] {
        assert_eq!(codec(&mixed, module), expected, "{module}");
    }
    for module in ["gate_proj", "up_proj", "down_proj"] {
        let module = format!("language_model.model.layers.63.mlp.{module}");
        assert!(mixed.rule_for(&module).is_none(), "{module} is left to the budget");
    }
    let demo = load("demo.toml");
    assert_eq!(demo.source_path().unwrap(), Path::new("recipes/../goldens/models/demo-qwen3_5"));
}

#[test]
fn a_recipe_that_is_not_there_suggests_the_one_that_is() {
    for (asked, expected) in [
        (
            "recipes/dmeo.toml",
            "recipe `recipes/dmeo.toml` does not exist\nhelp: did you mean `recipes/demo.toml`?\n",
        ),
        ("recipes/demo", "recipe `recipes/demo` does not exist\nhelp: did you mean `recipes/demo.toml`?\n"),
        ("recipes/hippopotamus.toml", "recipe `recipes/hippopotamus.toml` does not exist\n"),
    ] {
        assert_eq!(transcript(Recipe::load(Path::new(asked), PIPELINES)), format!("exit 2\n{expected}"));
    }
}

#[test]
fn a_file_larger_than_a_mebibyte_is_refused_unread() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("big.toml");
    fs::write(&path, "# \n".repeat(400_000)).unwrap();
    let message = transcript(Recipe::load(&path, PIPELINES));
    assert_eq!(
        message,
        format!("exit 2\n`{}` is larger than 1.00 MiB, so it is not a recipe\n", path.display())
    );
    assert!(transcript(Recipe::load(folder.path(), PIPELINES)).contains("cannot be read"));
}

#[test]
fn the_table_of_keys_in_the_documents_is_the_one_the_parser_uses() {
    const BEGIN: &str = "<!-- keys: written by `TQC_BLESS=1 cargo test --test recipes` -->\n";
    const END: &str = "<!-- end of keys -->\n";
    let path = Path::new("docs/recipes.md");
    let text = fs::read_to_string(path).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("the table's first mark");
    let (table, after) = rest.split_once(END).expect("the table's last mark");
    if blessing() {
        fs::write(path, format!("{before}{BEGIN}{}{END}{after}", keys::reference())).unwrap();
        return;
    }
    assert_eq!(table, keys::reference(), "run TQC_BLESS=1 cargo test --test recipes");
}

#[test]
fn the_examples_in_the_documents_do_what_the_documents_say() {
    let folder = tempfile::tempdir().unwrap();
    for shipped in toml_files("recipes") {
        fs::copy(&shipped, folder.path().join(shipped.file_name().unwrap())).unwrap();
    }
    let text = fs::read_to_string("docs/recipes.md").unwrap();
    let mut examples = std::collections::BTreeMap::new();
    for part in text.split("```toml\n").skip(1) {
        let (example, _) = part.split_once("```").expect("an end of the example");
        // Whole recipes begin with their file's name, fragments do not.
        let Some((name, _)) = example.strip_prefix("# ").and_then(|rest| rest.split_once('\n')) else {
            continue;
        };
        fs::write(folder.path().join(name), example).unwrap();
        let recipe = Recipe::load(&folder.path().join(name), PIPELINES);
        examples.insert(name, recipe.unwrap_or_else(|problems| panic!("{problems}")));
    }
    assert!(examples.contains_key("smallest.toml"));
    let worked = &examples["my-coder.toml"];
    for (module, expected) in [
        ("model.layers.0.mlp.down_proj", ("bf16", None)),
        ("model.layers.5.mlp.down_proj", ("affine-6g64", Some("refit"))),
        ("lm_head", ("mxfp8", Some("mlx"))),
        ("model.layers.5.self_attn.q_proj", ("affine-4g64", Some("refit"))),
    ] {
        let choice = worked.rule_for(module).map_or(&worked.default, |(_, rule)| &rule.choice);
        assert_eq!((choice.codec.to_string().as_str(), worked.encoder(choice)), expected, "{module}");
        assert!(text.contains(&format!("| `{module}` | ")), "{module}");
    }
}

#[test]
fn every_known_key_of_the_wrong_type_is_refused_at_its_place() {
    for key in keys::KEYS {
        let name = key.name;
        let text = match key.section {
            keys::Section::Top => format!("{name} = 1979-05-27"),
            keys::Section::Source => format!("source.path = 'x'\nsource.{name} = 1979-05-27"),
            keys::Section::Default => format!("default.{name} = 1979-05-27"),
            keys::Section::Rule => format!("[[rule]]\n{name} = 1979-05-27"),
            keys::Section::Keep => format!("keep.{name} = 1979-05-27"),
            keys::Section::Transform => format!("transform.{name} = 1979-05-27"),
            keys::Section::Rotation => format!("transform.rotation.{name} = 1979-05-27"),
            keys::Section::Calibration => format!("calibration.{name} = 1979-05-27"),
            keys::Section::Gptq => format!("gptq.{name} = 1979-05-27"),
            keys::Section::Budget => format!("budget.{name} = 1979-05-27"),
            keys::Section::Output => format!("output.{name} = 1979-05-27"),
            keys::Section::Affine => format!("default.codec.affine.{name} = 1979-05-27"),
            keys::Section::Trellis => format!("default.codec.trellis.{name} = 1979-05-27"),
        };
        // `path` is the key that makes the others of `[source]` worth reading.
        let text = text.replace("source.path = 'x'\nsource.path", "source.path");
        let text = text.replace("source.path = 'x'\nsource.revision", "source.hub = 'a/b'\nsource.revision");
        let text = text.replace("source.path = 'x'\nsource.hub", "source.hub");
        let message = parse(text.clone()).unwrap_err().to_string();
        assert!(message.contains(&format!("`{name}` must be")), "{text}\n{message}");
        assert!(message.contains("got a date or time"), "{text}\n{message}");
    }
}

fn parse(text: String) -> Result<Recipe, Problems<RecipeError>> {
    Recipe::parse(vec![RecipeFile { path: "fuzz.toml".into(), text }], PIPELINES)
}

/// Whatever the text, an answer comes, and each mistake is on a line that the text has.
fn check(text: String) -> Result<(), TestCaseError> {
    let lines = text.lines().count().max(1);
    let Err(problems) = parse(text) else { return Ok(()) };
    prop_assert!(!problems.list().is_empty());
    prop_assert_eq!(problems.exit(), Exit::Request);
    for problem in problems.list() {
        let (path, line, column) = problem.place().expect("a problem of a text has a place");
        prop_assert_eq!(path, Path::new("fuzz.toml"));
        prop_assert!((1..=lines).contains(&line), "line {} of {}: {}", line, lines, problem);
        prop_assert!(column >= 1);
        prop_assert!(!problem.to_string().is_empty());
    }
    Ok(())
}

const SEEDS: [&str; 6] = [
    include_str!("../../recipes/qwen38-4bit.toml"),
    include_str!("wrong/many.toml"),
    "name = 'x'\nseed = 3\n[default]\ncodec.affine.bits = 4\ncodec.affine.group = 64\n[source]\nhub = 'a/b'\n\
     revision = '0123456789012345678901234567890123456789'\n[output]\nshard-size = '5GB'\n[keep]\ntensors = ['*']\n",
    "name = 'y'\n[default]\ncodec = 'f32'\n[transform]\ngamma-fold = true\nkey-balance = true\ntext = 'a.jsonl'\n\
     tokens = 64\nrotation = { kind = 'optrot', seed = 7, r2 = 'auto', steps = 9 }\n[output]\nlayout = 'huggingface'\n",
    "name = 'z'\n[default]\ncodec.affine.bits = 3\ncodec.affine.group = 64\nencoder = 'gptq-refit'\n[calibration]\n\
     text = 'a.jsonl'\nrows = 8\npacking = 'joined'\nactivations = 'sequential'\n[gptq]\ndamping = 0.1\nact-order = true\n",
    "name = 'z'\n[default]\ncodec.affine = { bits = 4, group = 64 }\n[budget]\nbits-per-weight = 3.5\n\
     sensitivity = 's.json'\ncandidates = ['affine-4g64', 'mxfp8']\ncontrol = 'stop'\n[[rule]]\nmatch = '*.k'\n\
     least-bits = 4\nmost-bits = 6\n",
];

const WORDS: [&str; 24] = [
    "[",
    "]",
    "{",
    "}",
    "=",
    "\"",
    "'",
    "\n",
    ".",
    "#",
    "[[rule]]\n",
    "match",
    "codec",
    "affine",
    "bits",
    "-1",
    "999999999999999999999",
    "\u{0}",
    "é",
    "\u{feff}",
    "*",
    "extends = 'a'\n",
    "[default]\n",
    "1e9",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        check(String::from_utf8_lossy(&bytes).into_owned())?;
    }

    #[test]
    fn arbitrary_words_never_panic(words in proptest::collection::vec(0..WORDS.len(), 0..60)) {
        check(words.into_iter().map(|word| WORDS[word]).collect())?;
    }

    #[test]
    fn mutations_of_recipes_never_panic(
        seed in 0..SEEDS.len(),
        edits in proptest::collection::vec((any::<prop::sample::Index>(), 0usize..12, 0..WORDS.len()), 1..6),
    ) {
        let mut characters: Vec<char> = SEEDS[seed].chars().collect();
        for (place, removed, word) in edits {
            let start = place.index(characters.len() + 1);
            let end = (start + removed).min(characters.len());
            characters.splice(start..end, WORDS[word].chars());
        }
        check(characters.into_iter().collect())?;
    }

    #[test]
    fn arbitrary_patterns_never_panic(pattern in r"[\[\]{},*?!a-c\\.é^-]{0,90}", name in "[a-c.]{0,20}") {
        if let Ok(pattern) = tqc::recipe::Pattern::new(&pattern) {
            pattern.matches(&name);
        }
    }

    #[test]
    fn arbitrary_locks_never_panic(text in r#"(version = [0-3]\n)?([a-z-]{1,9} = ["0-9a-f]{0,70}\n){0,4}"#) {
        let _ = tqc::recipe::Lock::parse(Path::new("x.lock"), &text);
    }
}
