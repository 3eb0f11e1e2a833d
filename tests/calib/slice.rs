//! `--only-layers`: what it measures, that a resume goes on from it, and that kills lose nothing of a trellis either.

use std::time::{Duration, Instant};

use tqc::plan::{LayerTime, extrapolate};

use crate::*;

/// A trellis of few states, whose search is short.
fn trellis(more: &str) -> String {
    format!(
        "[default]\ncodec = {{ trellis = {{ bits = 2, states = 10 }} }}\nencoder = \"ldlq\"\n\
         [[rule]]\nmatch = \"*.linear_attn.in_proj_{{a,b}}\"\ncodec = {{ affine = {{ bits = 8, group = 32 }} }}\n\
         [calibration]\ntext = \"text.jsonl\"\nrows = 8\ncontext = 24\n{more}"
    )
}

/// The command's arguments but its name.
fn arguments(dir: &Path, text: &str, out: &Path, more: &[&str]) -> Vec<std::ffi::OsString> {
    let path = recipe(dir, text);
    let mut all = args!["build", path, "--source", fixture("qwen3_5"), "-o", out, "--json"];
    all.extend(more.iter().map(Into::into));
    all
}

#[test]
fn a_slice_measures_its_layers_and_a_resume_goes_on_from_it() {
    for text_of in
        [trellis(""), trellis("activations = \"sequential\"\n"), recipe_text("gptq-refit", 3, "", "")]
    {
        let dir = temp();
        text(dir.path());
        let (_, whole) = built(dir.path(), "whole", &text_of, &fixture("qwen3_5"), &[]);
        let out = dir.path().join("sliced");
        let build = |more: &[&str]| finish(command(arguments(dir.path(), &text_of, &out, more)));
        let first = build(&["--only-layers", "1"]).expect(0).json();
        assert_eq!(first["layers"], 4);
        assert!(!out.exists() && Path::new(first["staging"].as_str().unwrap()).is_dir(), "{first}");
        let numbers = |said: &Value| -> Vec<u64> {
            let measured = said["measured"].as_array().unwrap();
            measured.iter().map(|time| time["layer"].as_u64().unwrap()).collect()
        };
        assert_eq!(numbers(&first), [0]);
        let part = |name: &str| first["whole"][name].as_f64().unwrap();
        assert!(part("pass_s") > first["measured"][0]["pass_s"].as_f64().unwrap(), "{first}");
        assert!(part("search_s") > first["measured"][0]["search_s"].as_f64().unwrap(), "{first}");
        let sum = part("pass_s") + part("search_s") + part("rest_s");
        assert!((part("total_s") / sum - 1.0).abs() < 1e-9 && part("of_estimate") > 0.0);
        // One more command would begin anew; one that goes on does the next layers.
        build(&["--only-layers", "3"]).expect(2);
        let next = build(&["--only-layers", "3", "--resume"]).expect(0).json();
        assert_eq!(numbers(&next), [1, 2]);
        let again = build(&["--only-layers", "2", "--resume"]).expect(0).json();
        assert_eq!((numbers(&again), &again["whole"]), (vec![], &Value::Null));
        let rest = build(&["--resume"]).expect(0).json();
        assert_eq!(rest["digest"], whole["digest"]);
        assert!(!Path::new(first["staging"].as_str().unwrap()).exists());
    }
}

#[test]
fn a_slice_has_the_notes_of_its_layers() {
    let dir = temp();
    text(dir.path());
    let text_of = recipe_text("gptq", 4, "expert-tokens = 1000", "");
    let source = fixture("qwen3_5_moe");
    let of_experts = |said: &Value| -> Vec<Value> {
        let notes = said["notes"].as_array().unwrap().iter().filter(|note| note["kind"] == "few-tokens");
        notes.filter(|note| note["subject"].as_str().unwrap().contains(".layers.0.")).cloned().collect()
    };
    let (_, whole) = built(dir.path(), "whole", &text_of, &source, &[]);
    let path = recipe(dir.path(), &text_of);
    let out = dir.path().join("sliced");
    let run = tqc!["build", path, "--source", source, "-o", out, "--only-layers", "1", "--json"].expect(0);
    assert!(run.stderr.contains("saw too few tokens"), "{}", run.stderr);
    let notes = of_experts(&run.json());
    assert!(!notes.is_empty() && notes == of_experts(&whole), "{notes:?}");
    let all =
        run.json()["notes"].as_array().unwrap().iter().filter(|note| note["kind"] == "few-tokens").count();
    assert_eq!(all, notes.len(), "of layers that were not in the slice");
}

#[test]
fn what_was_measured_is_scaled_by_what_was_estimated() {
    let dir = temp();
    text(dir.path());
    let plan = planned(dir.path(), &recipe_text("gptq-refit", 3, "", ""), &fixture("llama-untied"));
    assert_eq!(extrapolate(&plan, &[]).map(|all| all.total_s), None);
    let of = |layers: &[usize], pass_s: f64, search_s: f64| {
        let times = layers.iter().map(|layer| LayerTime { layer: Some(*layer), pass_s, search_s });
        extrapolate(&plan, &times.collect::<Vec<_>>()).unwrap()
    };
    // Its layers are alike: so many times one of them, and the head's sums and search.
    let layers =
        plan.arch.decoder(&plan.config, &plan.model).unwrap_or_else(|e| panic!("{e}")).layers.len() as f64;
    let one = of(&[0], 3.0, 5.0);
    assert!(one.pass_s > layers * 3.0 && one.pass_s < (layers + 1.0) * 3.0, "{one:?}");
    assert!(one.search_s > layers * 5.0, "{one:?}");
    for (other, times) in
        [(of(&[1], 3.0, 5.0), 1.0), (of(&[0, 1], 3.0, 5.0), 1.0), (of(&[0], 6.0, 10.0), 2.0)]
    {
        assert!((other.pass_s / (times * one.pass_s) - 1.0).abs() < 1e-9, "{other:?} of {one:?}");
        // What a search does inside panels is measured anew.
        let ratio = other.search_s / (times * one.search_s);
        assert!((0.2..5.0).contains(&ratio), "{other:?} of {one:?}");
    }
}

#[test]
fn a_slice_leaves_the_comparison_of_a_budget_to_the_whole_build() {
    let dir = temp();
    text(dir.path());
    let text_of = recipe_text("gptq", 3, "", "");
    let path = recipe(dir.path(), &text_of);
    let plan = tqc!("plan", path, "--source", fixture("qwen3_5"), "--json").expect(0).json();
    let linears = plan["modules"].as_array().unwrap().iter().filter(|module| module["role"] == "linear");
    // As mlx-lm writes it; embedding and head have no cost.
    let costs: Vec<(&Value, f64)> = linears.map(|module| (&module["module"], 0.5)).collect();
    std::fs::write(dir.path().join("costs.json"), serde_json::to_string(&costs).unwrap()).unwrap();
    let budget = "[budget]\nbits-per-weight = 7\nsensitivity = \"costs.json\"\ntext = \"text.jsonl\"\n";
    let (text_of, out) = (format!("{text_of}{budget}"), dir.path().join("out"));
    let build = |more: &[&str]| finish(command(arguments(dir.path(), &text_of, &out, more))).expect(0).json();
    let first = build(&["--only-layers", "1"]);
    assert_eq!(first["measured"].as_array().unwrap().len(), 1, "{first}");
    assert!(!tqc::build::measuring_path(&out).unwrap().exists());
    assert!(build(&["--resume"])["compared"]["chosen"].is_object());
}

#[test]
fn slices_that_cannot_be_are_refused() {
    let dir = temp();
    text(dir.path());
    let refused = |text: &str, more: &[&str], words: &str| {
        let out = dir.path().join("new/out");
        let run = finish(command(arguments(dir.path(), text, &out, more))).expect(2);
        assert!(run.stderr.contains(words), "`{words}` is not in {}", run.stderr);
        assert!(!dir.path().join("new").exists());
    };
    refused(&trellis(""), &["--only-layers", "4"], "the model has 4 layers");
    refused(&trellis(""), &["--only-layers", "0"], "0 is not in 1..");
    refused(&trellis(""), &["--only-layers", "1", "--write-lock"], "cannot be used with");
    refused("[default]\ncodec = \"bf16\"\n", &["--only-layers", "1"], "weighs no errors");
    let path = recipe(dir.path(), &trellis(""));
    tqc!["calibrate", path, "--source", fixture("qwen3_5"), "-o", dir.path().join("moments")].expect(0);
    let file = trellis("").split("[calibration]").next().unwrap().to_owned()
        + "[calibration]\nhessians = \"moments/hessians.json\"\n";
    refused(&file, &["--only-layers", "1"], "no way through layers");
}

#[test]
fn a_trellis_that_is_killed_again_and_again_has_the_same_bytes() {
    let dir = temp();
    text(dir.path());
    let slow = trellis("").replace("states = 10", "states = 12");
    let (_, whole) = built(dir.path(), "whole", &slow, &fixture("qwen3_5"), &[]);
    let (out, began) = (dir.path().join("killed"), Instant::now());
    let (mut wait, mut kills, mut kept) = (Duration::from_millis(40), 0, 0);
    let digest = loop {
        assert!(began.elapsed() < Duration::from_secs(300), "it never ends");
        let more: &[&str] = if kills == 0 { &[] } else { &["--resume"] };
        let mut child = command(arguments(dir.path(), &slow, &out, more));
        let mut child =
            child.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::null()).spawn().unwrap();
        let due = Instant::now() + wait;
        while Instant::now() < due && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        if child.try_wait().unwrap().is_none() {
            child.kill().unwrap();
            child.wait().unwrap();
            kills += 1;
            let staging = tqc::build::staging_path(&out).unwrap().join("found");
            let files = std::fs::read_dir(&staging).map_or(0, |all| {
                all.filter(|entry| {
                    entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("codes-")
                })
                .count()
            });
            assert!(files >= kept, "codes were lost");
            kept = files;
            // So that it comes to its end however slow the machine is.
            wait += wait / 4;
            continue;
        }
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        break serde_json::from_slice::<Value>(&output.stdout).unwrap()["digest"].clone();
    };
    assert!(kills > 1, "it was too fast to be killed");
    assert_eq!(digest, whole["digest"]);
}
