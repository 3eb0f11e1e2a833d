//! `tqc generate` and `tqc chat`: whole answers of a trained model, ends, and what is refused.
//!
//! Prompts and answers are those of `goldens/runtime`, made by transformers.

use std::fs;
use std::io::{BufRead as _, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::common::*;
use crate::{args, tqc};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens").join(name)
}

fn demo() -> PathBuf {
    golden("models/demo-qwen3_5")
}

/// Name, prompt and text of each stored answer.
fn answers() -> Vec<Value> {
    serde_json::from_slice(&fs::read(golden("runtime/demo-qwen3_5.json")).unwrap()).unwrap()
}

fn ids(name: &str) -> Vec<u64> {
    let bytes = fs::read(golden("runtime/demo-qwen3_5.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = tensors.tensor(name).unwrap();
    tensor.data().as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes) as u64).collect()
}

fn comma(ids: &[u64]) -> String {
    ids.iter().map(u64::to_string).collect::<Vec<_>>().join(",")
}

/// A copy of the demo whose files can be changed.
fn copy_of_demo() -> tempfile::TempDir {
    let dir = temp();
    for entry in fs::read_dir(demo()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    dir
}

#[test]
fn greedy_answers_are_those_of_transformers_with_and_without_the_draft_head() {
    for answer in answers() {
        let name = answer["name"].as_str().unwrap();
        let (prompt, expected) = (ids(&format!("input_ids.{name}")), ids(&format!("greedy_ids.{name}")));
        let n = expected.len().to_string();
        for draft in [&[][..], &["--draft", "mtp"], &["--draft", "mtp", "--draft-tokens", "5"]] {
            let mut args = args![
                "generate",
                demo(),
                "--prompt-ids",
                comma(&prompt),
                "--ignore-eos",
                "--max-tokens",
                n,
                "--exact",
                "--json"
            ];
            args.extend(draft.iter().map(Into::into));
            let run = finish(command(args)).expect(0).json();
            assert_eq!(run["tokens"], json!(expected), "{name} {draft:?}");
            assert_eq!(run["prompt_tokens"], json!(prompt));
            assert_eq!(run["finish_reason"], "length");
            assert!(run["timings"]["decode_tokens_per_s"].as_f64().unwrap() > 0.0);
            let drafting = &run["drafting"];
            assert_eq!(drafting.is_null(), draft.is_empty());
            if let Some(accepted) = drafting["accepted"].as_u64() {
                let passes = drafting["passes"].as_u64().unwrap();
                // Each pass gives one token and the guesses that were kept; the prompt's own pass gives the first.
                assert_eq!(1 + passes + accepted, expected.len() as u64, "{name} {draft:?}");
                assert!(accepted > 10, "{name}: only {accepted} guesses of a trained head were kept");
            }
        }
    }
}

#[test]
fn a_chat_prompt_reads_as_the_golden_and_ends_at_the_end_token_which_is_not_shown() {
    let answer = answers().into_iter().find(|answer| answer["name"] == "chat").unwrap();
    let rendered = answer["prompt"].as_str().unwrap();
    let question = rendered.split("user\n").nth(1).unwrap().split("<|im_end|>").next().unwrap();
    let run = tqc!("generate", demo(), "--chat", "--prompt", question, "--exact", "--json").expect(0).json();
    assert_eq!(run["prompt_tokens"], json!(ids("input_ids.chat")));
    assert_eq!(run["text"], answer["text"]);
    assert_eq!(run["finish_reason"], "end-token");
    let length = answer["tokens_before_end"].as_u64().unwrap() as usize;
    let expected = ids("greedy_ids.chat");
    assert_eq!(run["tokens"], json!(expected[..length]));
    assert_eq!(run["end_token"], json!(expected[length]));

    // The text form streams the same text, and nothing else, to stdout.
    let run = tqc!("generate", demo(), "--chat", "--prompt", question, "--exact").expect(0);
    assert_eq!(run.stdout, format!("{}\n", answer["text"].as_str().unwrap()));
    assert!(run.stderr.contains("ended by end token"), "{}", run.stderr);
}

#[test]
fn every_end_token_that_any_file_declares_ends_the_text() {
    let expected = ids("greedy_ids.problem");
    // A token of the answer that comes up first at place 5 or later.
    let at = (5..).find(|at| !expected[..*at].contains(&expected[*at])).unwrap();
    let end = expected[at];
    type Change = fn(&mut Value, u64);
    let set: [(&str, Change); 3] = [
        ("generation_config.json", |v, end| v["eos_token_id"] = json!([0, end])),
        ("config.json", |v, end| v["eos_token_id"] = json!(end)),
        ("generation_config.json", |v, end| v["eos_token_id"] = json!(end)),
    ];
    for (file, change) in set {
        let dir = copy_of_demo();
        let path = dir.path().join(file);
        let mut value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut value, end);
        fs::write(&path, value.to_string()).unwrap();
        let prompt = comma(&ids("input_ids.problem"));
        let generate = |more: &[&str]| {
            let mut args = args!["generate", dir.path(), "--prompt-ids", prompt, "--exact", "--json"];
            args.extend(more.iter().map(Into::into));
            finish(command(args)).expect(0).json()
        };
        for draft in [&[][..], &["--draft", "mtp", "--draft-tokens", "7"]] {
            let run = generate(draft);
            assert_eq!(run["tokens"], json!(expected[..at]), "{file}");
            assert_eq!((&run["end_token"], &run["finish_reason"]), (&json!(end), &json!("end-token")));
        }
        let run = generate(&["--ignore-eos", "--max-tokens", "20"]);
        assert_eq!(run["tokens"], json!(expected[..20]), "{file}");
    }
}

#[test]
fn a_stop_string_cuts_the_text_before_it_wherever_tokens_are_cut() {
    let answer = answers().into_iter().find(|answer| answer["name"] == "problem").unwrap();
    let (prompt, text) = (answer["prompt"].as_str().unwrap(), answer["text"].as_str().unwrap());
    for stop in ["The answer", "168.", "23.\n", "\n\nQ", ". "] {
        let run = tqc!(
            "generate",
            demo(),
            "--prompt",
            prompt,
            "--exact",
            "--json",
            "--stop",
            "never",
            "--stop",
            stop
        );
        let run = run.expect(0).json();
        assert_eq!(run["text"].as_str().unwrap(), text.split(stop).next().unwrap(), "{stop:?}");
        assert_eq!(run["finish_reason"], "stop-string");
    }
}

#[test]
fn the_same_seed_draws_the_same_tokens_whatever_the_machine_does() {
    let prompt = comma(&ids("input_ids.prose"));
    let draw = |more: &[&str]| {
        let mut args = args![
            "generate",
            demo(),
            "--prompt-ids",
            prompt,
            "--temperature",
            "0.9",
            "--top-p",
            "0.95",
            "--top-k",
            "50",
            "--max-tokens",
            "40",
            "--ignore-eos",
            "--json"
        ];
        args.extend(more.iter().map(Into::into));
        finish(command(args)).expect(0).json()["tokens"].clone()
    };
    let first = draw(&["--seed", "7"]);
    for more in [
        &["--seed", "7", "--threads", "1"][..],
        &["--seed", "7", "--threads", "3", "--isa", "scalar"],
        &["--seed", "7", "--draft", "mtp"],
    ] {
        assert_eq!(draw(more), first, "{more:?}");
    }
    assert_ne!(draw(&["--seed", "8"]), first);
}

#[test]
fn an_artifact_answers_and_a_flipped_byte_is_named_unless_it_was_not_to_be_checked() {
    let dir = temp();
    let recipe = recipe(dir.path(), &default_codec("{ affine = { bits = 8, group = 64 } }"));
    let out = dir.path().join("out");
    tqc!("build", recipe, "--source", demo(), "-o", out).expect(0);
    let answer = answers().into_iter().find(|answer| answer["name"] == "problem").unwrap();
    let generate = |more: &[&str]| {
        let mut args =
            args!["generate", out, "--prompt", answer["prompt"].as_str().unwrap(), "--max-tokens", "32"];
        args.extend(more.iter().map(Into::into));
        finish(command(args))
    };
    // Eight bits keep the sum right, on both paths and with the draft head in its own folder.
    for more in [&[][..], &["--exact"], &["--draft", "mtp"], &["--exact", "--draft", "mtp"]] {
        let text = generate(more).expect(0).stdout;
        assert!(text.starts_with(" 8 * 21 = 168. 191 - 168 = 23."), "{more:?}: {text}");
    }
    let weights = out.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let run = generate(&[]).expect(3);
    assert!(run.stderr.contains("model.safetensors` has SHA-256"), "{}", run.stderr);
    generate(&["--no-verify"]).expect(0);
}

#[test]
fn wrong_requests_are_refused_by_name() {
    let demo = demo().into_os_string().into_string().unwrap();
    let fixture = fixture("qwen3_5").into_os_string().into_string().unwrap();
    let llama = crate::common::fixture("llama-tied").into_os_string().into_string().unwrap();
    let cases: &[(&str, &[&str], i32, &str)] = &[
        (&demo, &["--prompt", "x", "--temperature", "-1"], 2, "`temperature` is -1"),
        (&demo, &["--prompt", "x", "--temperature", "NaN"], 2, "`temperature` is NaN"),
        (&demo, &["--prompt", "x", "--top-p", "0"], 2, "`top-p` is 0"),
        (&demo, &["--prompt", "x", "--top-p", "1.5"], 2, "`top-p` is 1.5"),
        (&demo, &["--prompt", "x", "--min-p", "2"], 2, "`min-p` is 2"),
        (&demo, &["--prompt", "x", "--stop", ""], 2, "stop"),
        (&demo, &["--prompt", ""], 2, "the prompt is empty"),
        (&demo, &["--prompt-ids", "1,2,5000"], 2, "token id 5000 is out of range"),
        (&demo, &["--prompt-ids", "1,x"], 2, "invalid value 'x'"),
        (&demo, &["--prompt", "x", "--prompt-ids", "1"], 2, "cannot be used with"),
        (&demo, &[], 2, "required"),
        (&demo, &["--prompt-file", "/nowhere/prompt.txt"], 2, "`/nowhere/prompt.txt` cannot be read"),
        (&demo, &["--prompt", "x", "--draft", "eagle"], 2, "eagle"),
        (&llama, &["--prompt", "x", "--draft", "mtp"], 2, "holds no draft head"),
        (&fixture, &["--prompt-ids", "492,494,493"], 2, "stands for an image"),
        ("/nowhere", &["--prompt", "x"], 2, "there is no folder `/nowhere`"),
        ("hub:a/b", &["--prompt", "x"], 2, "names no commit"),
    ];
    for (model, more, code, words) in cases {
        let mut args = args!["generate", model];
        args.extend(more.iter().map(Into::into));
        let run = finish(command(args)).expect(*code);
        assert!(run.stderr.contains(words), "{more:?}: `{words}` is not in:\n{}", run.stderr);
        assert_eq!(run.stdout, "");
    }
    let long = vec!["5"; 1100].join(",");
    let run = tqc!("generate", &demo, "--prompt-ids", long).expect(2);
    assert!(run.stderr.contains("1100 tokens are more than the model's context of 1024"), "{}", run.stderr);
}

#[test]
fn a_full_context_ends_the_text() {
    let prompt = vec!["5"; 1020].join(",");
    for draft in [&[][..], &["--draft", "mtp", "--draft-tokens", "9"]] {
        let mut args = args!["generate", demo(), "--prompt-ids", prompt, "--ignore-eos", "--json"];
        args.extend(draft.iter().map(Into::into));
        let run = finish(command(args)).expect(0).json();
        assert_eq!(run["finish_reason"], "context-full", "{draft:?}");
        // The last token needs no place of its own: nothing comes after it.
        assert_eq!(run["tokens"].as_array().unwrap().len(), 5, "{draft:?}");
    }
}

#[test]
fn without_a_tokenizer_ids_go_in_and_out_and_text_is_refused() {
    let dir = copy_of_demo();
    fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    fs::remove_file(dir.path().join("tokenizer_config.json")).unwrap();
    let run = tqc!("generate", dir.path(), "--prompt", "x").expect(3);
    assert!(run.stderr.contains("tokenizer.json"), "{}", run.stderr);
    let prompt = comma(&ids("input_ids.problem"));
    let run = tqc!("generate", dir.path(), "--prompt-ids", &prompt, "--max-tokens", "8", "--exact").expect(0);
    assert_eq!(run.stdout, format!("{}\n", comma(&ids("greedy_ids.problem")[..8])));
    tqc!("generate", dir.path(), "--prompt-ids", &prompt, "--stop", "x").expect(3);
}

#[test]
fn a_template_that_raises_gives_its_own_words() {
    let dir = copy_of_demo();
    let template = "{{ raise_exception('only the night shift may ask') }}";
    fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    let run = tqc!("generate", dir.path(), "--chat", "--prompt", "x").expect(2);
    assert!(run.stderr.contains("only the night shift may ask"), "{}", run.stderr);
    fs::write(dir.path().join("chat_template.jinja"), "{% if %}").unwrap();
    let run = tqc!("generate", dir.path(), "--chat", "--prompt", "x").expect(3);
    assert!(run.stderr.contains("chat_template.jinja"), "{}", run.stderr);
}

/// Talks with the demo; one JSON object a turn.
fn talk(lines: &str, more: &[&str]) -> (Run, Vec<Value>) {
    let mut args = args!["chat", demo(), "--exact", "--json"];
    args.extend(more.iter().map(Into::into));
    let mut child =
        command(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let run = Run {
        code: output.status.code().unwrap_or(-1),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    };
    let turns = run.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (run, turns)
}

#[test]
fn a_chat_keeps_the_conversation_and_reads_only_what_is_new() {
    let answer = answers().into_iter().find(|answer| answer["name"] == "chat").unwrap();
    let rendered = answer["prompt"].as_str().unwrap();
    let question = rendered.split("user\n").nth(1).unwrap().split("<|im_end|>").next().unwrap();
    for draft in [&[][..], &["--draft", "mtp"]] {
        let lines = format!("{question}\n\n{question}\n/reset\n{question}\n/quit\nnever read\n");
        let (run, turns) = talk(&lines, draft);
        assert_eq!((run.code, turns.len()), (0, 3), "{}", run.stderr);
        assert_eq!(turns[0]["assistant"], answer["text"]);
        let read = |turn: &Value| turn["timings"]["prompt_tokens"].as_u64().unwrap();
        let length = ids("input_ids.chat").len() as u64;
        assert_eq!(read(&turns[0]), length);
        // The question again, and the end of the answer before it; not the first question and the answer.
        assert!(read(&turns[1]) < length + 6, "{}", turns[1]);
        assert_eq!(turns[2]["assistant"], answer["text"], "the reset forgets");
        assert_eq!(read(&turns[2]), length);
    }
}

/// A chat that is read while it goes on.
struct Talk {
    child: std::process::Child,
    input: std::process::ChildStdin,
    answers: std::process::ChildStdout,
    notes: std::io::Lines<std::io::BufReader<std::process::ChildStderr>>,
}

impl Talk {
    fn begin(more: &[&str]) -> Self {
        let mut args = args!["chat", demo()];
        args.extend(more.iter().map(Into::into));
        let mut command = command(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (input, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let notes = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, input, answers, notes }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// Waits until there is more of an answer.
    fn hear(&mut self) {
        assert_ne!(self.answers.read(&mut [0; 64]).unwrap(), 0, "the chat goes on");
    }

    /// Waits for the line that ends an answer.
    fn end_of_answer(&mut self) -> String {
        self.notes
            .by_ref()
            .map(Result::unwrap)
            .find(|line| line.contains("ended by"))
            .expect("the chat goes on")
    }

    fn interrupt(&self) {
        let pid = self.child.id().to_string();
        assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    }
}

#[test]
fn ctrl_c_breaks_an_answer_off_and_the_conversation_goes_on() {
    // At this temperature answers seldom end by themselves.
    let mut talk =
        Talk::begin(&["--temperature", "100", "--threads", "1", "--isa", "scalar", "--max-tokens", "300"]);
    talk.say("Go on and on.");
    talk.hear();
    talk.interrupt();
    assert!(talk.end_of_answer().ends_with("ended by interrupted"));
    talk.say("And on.");
    assert!(!talk.end_of_answer().ends_with("ended by interrupted"));
    talk.say("/quit");
    assert_eq!(talk.child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_signal_between_answers_ends_a_chat_that_nobody_types() {
    let mut talk = Talk::begin(&["--max-tokens", "1"]);
    talk.say("Hello");
    talk.end_of_answer();
    std::thread::sleep(std::time::Duration::from_millis(100));
    talk.interrupt();
    assert_eq!(talk.child.wait().unwrap().code(), Some(130));
}

#[test]
fn ctrl_c_ends_the_reading_of_a_long_prompt() {
    let prompt = vec!["5"; 1000].join(",");
    let args =
        args!["generate", demo(), "--prompt-ids", prompt, "--isa", "scalar", "--threads", "1", "--json"];
    // The model reads this prompt for some seconds, unless it is told to stop.
    let child = command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
}
