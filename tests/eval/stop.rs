//! `tqc eval stop`: the teacher passes its own probe, models that cannot begin or end an answer fail it.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::common::*;
use crate::{args, demo, golden, tqc};

/// Word problems that the demo was trained on, raw and for the chat template.
fn problems() -> PathBuf {
    golden("tasks/problems.jsonl")
}

/// A copy of the demo in which the logits of its end tokens are `factor` times as large.
fn with_ends(dir: &Path, factor: f32) -> PathBuf {
    let to = dir.join(format!("ends{factor}"));
    fs::create_dir(&to).unwrap();
    for entry in fs::read_dir(demo()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let file = weight_files(&to).remove(0);
    let mut tensors = read_safetensors(&file);
    // Tied: the row is the token's input as well, but nothing comes after an end.
    let embedding = tensors.iter_mut().find(|tensor| tensor.name.ends_with("embed_tokens.weight")).unwrap();
    let width = embedding.shape[1] as usize;
    let mut values = embedding.floats();
    for id in [0, 2] {
        values[id * width..(id + 1) * width].iter_mut().for_each(|value| *value *= factor);
    }
    embedding.bytes = values.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect();
    write_safetensors(&file, &tensors);
    to
}

fn probe(dir: &Path, teacher: &Path, model: &Path, options: &[&str]) -> Run {
    let mut args = args!["eval", "stop", "--teacher", teacher, model, "--db", dir.join("eval.db"), "--json"];
    args.extend(options.iter().map(Into::into));
    finish(command(args))
}

fn failed(verdict: &Value) -> Vec<String> {
    let frames = verdict["frames"].as_array().unwrap().iter();
    let lines = frames.flat_map(|frame| frame["gate"].as_array().unwrap());
    let failed = lines.filter(|line| line["pass"] == false);
    let mut names: Vec<String> = failed.map(|line| line["what"].as_str().unwrap().to_owned()).collect();
    names.sort();
    names.dedup();
    names
}

#[test]
fn a_teacher_passes_its_own_probe_and_broken_ends_fail_it_by_name() {
    let dir = temp();
    let dir = dir.path();
    let options = ["--suite", problems().to_str().unwrap().to_owned().leak(), "--max-tokens", "64"];
    let own = probe(dir, &demo(), &demo(), &options).expect(0).json();
    assert_eq!((&own["pass"], &own["headline"]), (&json!(true), &json!("pass")));
    for frame in own["frames"].as_array().unwrap() {
        assert_eq!(frame["teacher"], frame["candidate"], "the same model does the same");
    }
    let chat = own["frames"].as_array().unwrap().iter().find(|frame| frame["frame"] == "chat").unwrap();
    assert!(chat["ends"].as_u64().unwrap() > 0, "the demo ends its answers");
    assert!(chat["teacher"]["end_p_end"].as_f64().unwrap() > 0.5);
    assert!(chat["teacher"]["start_p_end"].as_f64().unwrap() < 0.01);

    let mute = with_ends(dir, -1.0);
    let never = probe(dir, &demo(), &mute, &options).expect(1).json();
    let lines = failed(&never);
    for line in ["missed stops", "true ends passed over", "P(end) lost at true ends"] {
        assert!(lines.contains(&line.to_owned()), "{line}: {lines:?}");
    }
    assert!(never["headline"].as_str().unwrap().starts_with("FAIL: "));

    // A second look uses what is known: nothing is left to compute, and the limits alone decide.
    let lenient =
        [&options[..], &["--max-missed", "1", "--max-ends", "1", "--max-end-mass", "1", "--max-loops", "1"]]
            .concat();
    probe(dir, &demo(), &mute, &lenient).expect(0);
}

#[test]
fn a_dump_of_conversations_can_be_the_teacher() {
    let dir = temp();
    let dir = dir.path();
    let text = dir.join("text.jsonl");
    let problems = fs::read_to_string(problems()).unwrap();
    let conversation = |line: &str| {
        let item: Value = serde_json::from_str(line).unwrap();
        let answer = format!("The answer is {}.", item["answer"]);
        json!({ "messages": [
            { "role": "user", "content": item["question"] }, { "role": "assistant", "content": answer }
        ] })
        .to_string()
    };
    let lines: Vec<String> = problems.lines().map(conversation).collect();
    fs::write(&text, lines.join("\n")).unwrap();
    let dump = dir.join("dump");
    tqc!("eval", "dump", demo(), "--text", &text, "-o", &dump).expect(0);
    let own = probe(dir, &dump, &demo(), &["--max-tokens", "64"]).expect(0).json();
    let frame = &own["frames"][0];
    assert_eq!((&frame["frame"], frame["cases"].as_u64().unwrap() as usize), (&json!("chat"), lines.len()));
    assert_eq!(frame["cases"], frame["ends"]);
    // The same hidden states, but for their rounding to f16 in the dump.
    let p = |side: &str| frame[side]["end_p_end"].as_f64().unwrap();
    assert!((p("teacher") - p("candidate")).abs() < 1e-3, "{frame}");

    let run = probe(dir, &dump, &demo(), &["--suite", self::problems().to_str().unwrap()]).expect(2);
    assert!(run.stderr.contains("`--suite` has no use beside it"), "{}", run.stderr);

    let top = dir.join("top");
    tqc!("eval", "dump", demo(), "--text", &text, "-o", &top, "--format", "topk").expect(0);
    let run = probe(dir, &top, &demo(), &[]).expect(2);
    assert!(run.stderr.contains("need not hold the end tokens"), "{}", run.stderr);
    fs::write(&text, "{\"text\": \"no conversation here\"}").unwrap();
    let prose = dir.join("prose");
    tqc!("eval", "dump", demo(), "--text", &text, "-o", &prose).expect(0);
    let run = probe(dir, &prose, &demo(), &[]).expect(2);
    assert!(run.stderr.contains("has no answer that begins"), "{}", run.stderr);
}

#[test]
fn teachers_and_suites_that_do_not_fit_are_refused() {
    let dir = temp();
    let run = probe(dir.path(), &fixture("qwen3"), &demo(), &[]).expect(2);
    assert!(run.stderr.contains("tokenizer differs"), "{}", run.stderr);
    let recall = golden("tasks/recall.jsonl");
    let run = probe(dir.path(), &demo(), &demo(), &["--suite", recall.to_str().unwrap()]).expect(2);
    assert!(run.stderr.contains("no prompts for free answers"), "{}", run.stderr);
    for limit in ["nan", "-1", "2"] {
        probe(dir.path(), &demo(), &demo(), &[&format!("--max-empty={limit}")]).expect(2);
    }
    probe(dir.path(), &demo(), &demo(), &["--limit", "0"]).expect(2);
    assert!(!dir.path().join("eval.db").exists(), "nothing is written for a probe that is refused");
}
