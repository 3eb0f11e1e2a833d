//! A trellis in whole artifacts: the same bytes however it is made, experts and rotations included, and refusals.

use crate::*;

/// Widths of 160 have no groups of 64.
const SMALL: &str =
    "[[rule]]\nmatch = \"*.linear_attn.in_proj_{a,b}\"\ncodec = { affine = { bits = 8, group = 32 } }\n";
const GATES: &str = "[[rule]]\nmatch = \"*gate\"\ncodec = { affine = { bits = 8, group = 32 } }\n";

fn of(parameters: &str, more: &str) -> String {
    format!(
        "[default]\ncodec = {{ trellis = {{ {parameters} }} }}\nencoder = \"ldlq\"\n[calibration]\ntext = \"text.jsonl\"\n\
         rows = 8\ncontext = 24\n{more}"
    )
}

// The plain definition of the search is slow: the fewest states that there are.
#[test]
fn threads_and_instruction_sets_do_not_change_a_byte() {
    let experts = format!("expert-tokens = 20\n{SMALL}{GATES}");
    let rotated = format!("[transform]\nrotation = \"hadamard\"\n{SMALL}");
    for (name, parameters, more) in [
        ("qwen3_5", "bits = 3, states = 10", rotated.as_str()),
        ("qwen3_5_moe", "bits = 2, states = 10", &experts),
        ("llama-tied", "bits = 4, states = 10, along = \"inputs\", code = \"1mad\"", ""),
        ("qwen3", "bits = 2, states = 10, scales = \"one\"", "[gptq]\nsweeps = 1\nact-order = true\n"),
    ] {
        let dir = temp();
        text(dir.path());
        let recipe = of(parameters, more);
        let build = |more: &[&str]| built(dir.path(), "out", &recipe, &fixture(name), more);
        let (out, said) = build(&["--threads", "1"]);
        assert!(said["calibration"]["modules"].as_array().unwrap().len() > 10, "{name}");
        let isas: Vec<String> = Isa::available().iter().map(ToString::to_string).collect();
        let mut runs = vec![vec!["--threads", "3"]];
        runs.extend(isas.iter().map(|isa| vec!["--isa", isa.as_str(), "--threads", "2"]));
        for run in runs {
            assert_eq!(build(&run).1["digest"], said["digest"], "{name}, {run:?}");
        }
        let verdict = tqc![
            "verify",
            out,
            "--source",
            fixture(name),
            "--rebuild",
            "all",
            "--json",
            "--calibration",
            dir.path().join("text.jsonl")
        ]
        .expect(0)
        .json();
        assert!(verdict["rebuilt_modules"].as_u64().unwrap() > 15, "{name}: {verdict}");
    }
}

#[test]
fn what_is_stored_is_what_the_record_and_the_inspection_say() {
    let dir = temp();
    text(dir.path());
    let (out, said) =
        built(dir.path(), "out", &of("bits = 3, along = \"inputs\"", ""), &fixture("llama-tied"), &[]);
    for module in said["calibration"]["modules"].as_array().unwrap() {
        // Whole rows of a text this short are nearly one direction: a tile's columns have much to make up for.
        assert!(module["tile_penalty"].as_f64().unwrap() > 1.0, "{module}");
        assert!(module["loss"].as_f64().unwrap() <= module["nearest"].as_f64().unwrap(), "{module}");
    }
    let inspected = tqc!["inspect", out, "--json"].expect(0).json();
    let up = "model.layers.0.mlp.up_proj";
    let module = inspected["modules"].as_array().unwrap().iter().find(|module| module["name"] == up).unwrap();
    assert_eq!(module["storage"], "trellis-3-inputs");
    assert_eq!(module["shape"], serde_json::json!([256, 128]));
    assert_eq!(module["bytes"], 256 * 128 * 3 / 8 + 2 * 256 + 2 * 128);
    let config: Value = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
    assert_eq!(
        config["quantization"],
        serde_json::json!({
            "mode": "trellis", "version": 1, "group_size": 256, "bits": 3, "states": 12, "code": "bs12",
            "along": "inputs", "scales": "both"
        })
    );
}

#[test]
fn damaged_artifacts_are_refused_by_name() {
    let dir = temp();
    text(dir.path());
    let (out, _) = built(dir.path(), "out", &of("bits = 2", ""), &fixture("llama-tied"), &[]);
    // With its record, any changed file is refused before it is read.
    std::fs::remove_file(out.join("provenance.json")).unwrap();
    let path = out.join("config.json");
    let whole = std::fs::read_to_string(&path).unwrap();
    for (from, to, words) in [
        ("\"version\": 1", "\"version\": 2", ["quantization.version", "2", "a trellis has 1"]),
        ("\"code\": \"bs12\"", "\"code\": \"bs13\"", ["quantization", "bs13", "unknown variant"]),
        ("\"group_size\": 256", "\"group_size\": 64", ["quantization.group_size", "64", "256"]),
        ("\"bits\": 2", "\"bits\": 3", ["`model.embed_tokens.weight`", "[2, 128, 16]", "[2, 128, 24]"]),
        ("\"bits\": 2", "\"bits\": 7", ["quantization", "7", "must have 1, 2, 3 or 4"]),
        (
            "\"along\": \"outputs\"",
            "\"along\": \"inputs\"",
            ["`model.embed_tokens.weight`", "[2, 128, 16]", "[512, 8]"],
        ),
    ] {
        assert!(whole.contains(from), "{from}");
        std::fs::write(&path, whole.replace(from, to)).unwrap();
        let run = tqc!["generate", out, "--prompt", "a"].expect(3);
        for word in words {
            assert!(run.stderr.contains(word), "{to}: `{word}` in:\n{}", run.stderr);
        }
    }
}

#[test]
fn widths_without_a_tile_and_encoders_of_other_codecs_are_refused() {
    let dir = temp();
    text(dir.path());
    let source = fixture("qwen3_5");
    let plan = |text: &str| tqc!["plan", recipe(dir.path(), text), "--source", source].expect(2).stderr;
    let rule = "[[rule]]\nmatch = \"*.in_proj_{a,b}\"\ncodec = { trellis = { bits = 3 } }\n";
    let said = plan(&of("bits = 3", rule));
    for word in [
        "trellis-3 needs out_features to be a multiple of 32, but `",
        "in_proj_",
        "has 4",
        "`along` the other side",
    ] {
        assert!(said.contains(word), "`{word}` in:\n{said}");
    }
    let said = plan("[default]\ncodec = { trellis = { bits = 5, states = 17 } }\nencoder = \"gptq\"\n");
    assert!(said.contains("a trellis has 5 bits a weight"), "{said}");
    let said = plan(
        "[default]\ncodec = { trellis = { bits = 3, code = \"bs13\", along = \"rows\" } }\nencoder = \"mlx\"\n",
    );
    for word in ["`code` cannot be `bs13`", "did you mean `bs12`", "`along` cannot be `rows`"] {
        assert!(said.contains(word), "`{word}` in:\n{said}");
    }
    let said = plan("[default]\ncodec = \"trellis\"\n");
    assert!(
        said.contains("codec `trellis` needs parameters") && said.contains("{ trellis = { bits = 3 } }"),
        "{said}"
    );
    let said = plan("[default]\ncodec = { trellis = { bits = 3 } }\nencoder = \"mlx\"\n");
    assert!(said.contains("`trellis` and `ldlq` fill `trellis`"), "{said}");
}
