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

/// Adds to a folder of second moments what errors in the outputs of an expert or a module cost.
fn add_outputs(
    folder: &Path,
    module: &str,
    expert: Option<usize>,
    shape: &[u64],
    value: &dyn Fn(usize) -> f32,
) {
    let contents = folder.join("hessians.json");
    let mut json = read_json(&contents);
    let rows = json["outputs"].as_array().map_or(0, Vec::len);
    let file = format!("outputs-{rows}.safetensors");
    let values: Vec<f32> = (0..shape.iter().product::<u64>() as usize).map(value).collect();
    write_safetensors(
        &folder.join(&file),
        &[Tensor::of_floats(&format!("{rows}.output_hessian"), shape, &values)],
    );
    let row =
        serde_json::json!({ "name": rows.to_string(), "module": module, "expert": expert, "file": file });
    match json["outputs"].as_array_mut() {
        Some(rows) => rows.push(row),
        None => json["outputs"] = vec![row].into(),
    }
    let digest = tqc::digest::Digest::of(&std::fs::read(folder.join(&file)).unwrap());
    json["files"][file.as_str()] = digest.to_string().into();
    write_json(&contents, &json);
}

#[test]
fn second_moments_of_outputs_are_read_where_there_are_any_and_refused_where_they_do_not_fit() {
    let dir = temp();
    let dir = dir.path();
    text(dir);
    let source = fixture("qwen3_5_moe");
    let first = recipe(dir, &of("bits = 2, states = 10", &format!("{SMALL}{GATES}")));
    tqc!["calibrate", first, "--source", source, "-o", dir.join("moments")].expect(0);
    let by_file = of("bits = 2, states = 10", &format!("{SMALL}{GATES}"))
        .replace("text = \"text.jsonl\"", "hessians = \"moments/hessians.json\"");
    let (one_sided, said) = built(dir, "one-sided", &by_file, &source, &[]);
    let modules = said["calibration"]["modules"].as_array().unwrap();
    assert!(modules.iter().all(|module| module["two_sided"] == false));
    // The first module whose rows are several rows of tiles, and one with experts.
    let inspected = tqc!["inspect", one_sided, "--json"].expect(0).json();
    let shapes = inspected["modules"].as_array().unwrap();
    let of_shape = |wanted: &dyn Fn(&[u64]) -> bool| {
        let module = modules.iter().map(|module| module["module"].as_str().unwrap()).find_map(|name| {
            let shape = shapes.iter().find(|row| row["name"] == name)?["shape"].as_array()?;
            let shape: Vec<u64> = shape.iter().map(|side| side.as_u64().unwrap()).collect();
            wanted(&shape).then(|| (name.to_owned(), shape))
        });
        module.unwrap()
    };
    let (plain, shape) = of_shape(&|shape| shape.len() == 2);
    let (experts, of_experts) = of_shape(&|shape| shape.len() == 3);
    // Ones beside twos on the diagonal: errors that go together. Whole, and as the upper triangle.
    let n = shape[0];
    let whole = |at: usize| if at as u64 / n == at as u64 % n { 2.0 } else { 1.0 };
    add_outputs(&dir.join("moments"), &plain, None, &[n, n], &whole);
    let n_of_expert = of_experts[1];
    let mut diagonal = std::collections::BTreeSet::new();
    (0..n_of_expert).fold(0, |at, i| {
        diagonal.insert(at);
        at + n_of_expert - i
    });
    let packed = |at: usize| if diagonal.contains(&(at as u64)) { 2.0 } else { 1.0 };
    add_outputs(&dir.join("moments"), &experts, Some(1), &[n_of_expert * (n_of_expert + 1) / 2], &packed);
    let (_, said) = built(dir, "two-sided", &by_file, &source, &["--threads", "1"]);
    let two_sided: Vec<&str> = said["calibration"]["modules"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|module| module["two_sided"] == true)
        .map(|module| module["module"].as_str().unwrap())
        .collect();
    let mut expected = [plain.as_str(), experts.as_str()];
    expected.sort_unstable();
    let mut found = two_sided.clone();
    found.sort_unstable();
    assert_eq!(found, expected);
    let (_, again) = built(dir, "again", &by_file, &source, &["--threads", "3"]);
    assert_eq!(again["digest"], said["digest"]);

    let refused = |words: &str| {
        let path = recipe(dir, &by_file);
        let run = tqc!["build", path, "--source", source, "-o", dir.join("bad"), "--restart"].expect(3);
        assert!(run.stderr.contains(words) && !dir.join("bad").exists(), "{}", run.stderr);
    };
    let contents = dir.join("moments/hessians.json");
    let good = std::fs::read(&contents).unwrap();
    add_outputs(&dir.join("moments"), &plain, None, &[n + 1, n + 1], &whole);
    refused("not F32");
    std::fs::write(&contents, &good).unwrap();
    add_outputs(&dir.join("moments"), &plain, Some(0), &[n, n], &whole);
    refused("is of expert 0");
    std::fs::write(&contents, &good).unwrap();
    add_outputs(
        &dir.join("moments"),
        &experts,
        Some(of_experts[0] as usize),
        &[n_of_expert, n_of_expert],
        &whole,
    );
    refused("has none such");
    std::fs::write(&contents, &good).unwrap();
    add_outputs(&dir.join("moments"), &plain, None, &[n, n], &whole);
    refused("the second of the same outputs");
    std::fs::write(&contents, &good).unwrap();
    add_outputs(&dir.join("moments"), &plain, None, &[n, n], &|at| if at == 3 { f32::NAN } else { 1.0 });
    refused("holds NaN at [0, 3]");
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
