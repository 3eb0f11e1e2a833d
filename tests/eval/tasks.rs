//! Suites on the demo model: equal to transformers to the item, whatever way they are run.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use tqc::backend::Precision;
use tqc::backend::cpu::Cpu;
use tqc::eval::tasks::{
    Detail, Frame, ItemResult, Items, Key, Listeners, Ran, Settings, Subject, Suite, run, summaries,
};
use tqc::failure::{Exit, Failure, Outcome};
use tqc::generate::{Request, Session};
use tqc::isa::Isa;
use tqc::runtime::{Model, Weights};
use tqc::sample::{Sampler, Sampling};
use tqc::text::Tokenizer;

use crate::common::{Run, command, finish, fixture, temp};
use crate::{args, demo, golden, tqc};

/// A model and its tokenizer.
struct Bench {
    dir: PathBuf,
    model: Model,
    tokenizer: Tokenizer,
}

impl Bench {
    fn open(dir: &Path) -> Self {
        let cpu = Cpu::new(Isa::best(), 2, Precision::Exact);
        let model = Model::new(Weights::open(dir).unwrap(), cpu).unwrap();
        Self { dir: dir.to_owned(), model, tokenizer: Tokenizer::open(dir).unwrap() }
    }

    fn run(&self, suite: &Suite, settings: &Settings) -> Outcome<(Vec<ItemResult>, Ran)> {
        let mut results = Vec::new();
        let ran = self.run_into(suite, settings, &BTreeSet::new(), usize::MAX, &mut results)?;
        Ok((results, ran))
    }

    /// Runs until `most` results are there; then the flag goes up.
    fn run_into(
        &self,
        suite: &Suite,
        settings: &Settings,
        done: &BTreeSet<Key>,
        most: usize,
        results: &mut Vec<ItemResult>,
    ) -> Outcome<Ran> {
        let stop = AtomicBool::new(false);
        let subject = Subject { model: &self.model, tokenizer: &self.tokenizer, dir: &self.dir };
        let mut given = 0;
        let mut sink = |result| {
            results.push(result);
            given += 1;
            stop.store(given >= most, Ordering::Relaxed);
            Ok(())
        };
        let mut last = None;
        let mut progress = |now: usize, all: usize| {
            assert!(now <= all && last.is_none_or(|before| before <= now), "{last:?} {now} {all}");
            last = Some(now);
        };
        let listeners = Listeners { sink: &mut sink, progress: &mut progress, stop: &stop };
        run(subject, suite, settings, done, listeners)
    }
}

fn suite(name: &str) -> Suite {
    Suite::open(&golden("tasks").join(name)).unwrap()
}

fn expected(name: &str) -> Vec<Value> {
    let text = fs::read_to_string(golden("tasks/expected.json")).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    all[name].as_array().unwrap().clone()
}

fn detail(result: &ItemResult) -> Detail {
    serde_json::from_value(result.detail.clone()).unwrap()
}

fn sorted(mut results: Vec<ItemResult>) -> Vec<ItemResult> {
    results.sort_by(|a, b| (a.frame, &a.item).cmp(&(b.frame, &b.item)));
    results
}

/// Two stacks differ by up to 3.6e-5 in a logit (`goldens/runtime/SOURCE.toml`), and a log-probability has two.
fn slack(tokens: usize) -> f64 {
    8e-5 * tokens as f64
}

#[test]
fn choices_have_the_probabilities_that_transformers_gives_them() {
    let bench = Bench::open(&demo());
    for name in ["recall.jsonl", "sentences.jsonl"] {
        let suite = suite(name);
        let (results, ran) = bench.run(&suite, &Settings::default()).unwrap();
        assert!(ran.complete);
        let expected = expected(name);
        assert_eq!(results.len(), expected.len());
        for (result, expected) in results.iter().zip(expected) {
            let Detail::Choice(found) = detail(result) else { panic!("{result:?}") };
            let mut sums = Vec::new();
            for (choice, expected) in expected.as_array().unwrap().iter().enumerate() {
                let tokens = expected["tokens"].as_array().unwrap().len();
                let log_prob = expected["log_prob"].as_f64().unwrap();
                assert_eq!(found.tokens[choice], tokens, "{}", result.item);
                let off = (found.log_probs[choice] - log_prob).abs();
                assert!(off <= slack(tokens), "{} choice {choice}: {found:?} is off by {off:e}", result.item);
                sums.push(log_prob);
            }
            let best = (0..sums.len()).max_by(|a, b| sums[*a].total_cmp(&sums[*b]).then(b.cmp(a))).unwrap();
            assert_eq!(found.chosen.sum, best, "{}", result.item);
        }
    }
}

#[test]
fn gold_continuations_have_the_probabilities_that_transformers_gives_them() {
    let bench = Bench::open(&demo());
    let (results, _) = bench.run(&suite("last_words.jsonl"), &Settings::default()).unwrap();
    for (result, expected) in results.iter().zip(expected("last_words.jsonl")) {
        let Detail::Cloze(found) = detail(result) else { panic!("{result:?}") };
        let tokens = expected["tokens"].as_array().unwrap().len();
        assert_eq!((found.tokens, found.greedy), (tokens, expected["greedy"] == true), "{}", result.item);
        let off = (found.log_prob - expected["log_prob"].as_f64().unwrap()).abs();
        assert!(off <= slack(tokens), "{}: {found:?} is off by {off:e}", result.item);
        assert_eq!(result.correct, Some(found.greedy));
    }
}

#[test]
fn greedy_answers_are_those_of_transformers() {
    let bench = Bench::open(&demo());
    let settings = Settings { max_tokens: 64, ..Settings::default() };
    let (results, _) = bench.run(&suite("problems.jsonl"), &settings).unwrap();
    assert_eq!(results.len(), 8);
    for frame in [Frame::Raw, Frame::Chat] {
        let suite = suite("problems.jsonl");
        let ids = suite.items.ids();
        for (id, expected) in ids.iter().zip(expected(&format!("problems.jsonl {frame}"))) {
            let result = results.iter().find(|r| r.frame == frame && r.item == *id).unwrap();
            let Detail::Generative(found) = detail(result) else { panic!("{result:?}") };
            assert_eq!(json!(found.text), expected["text"]);
            assert_eq!(json!(found.tokens), expected["tokens"]);
            assert_eq!(json!(found.end_token), expected["end_token"]);
            assert_eq!(result.correct, Some(true), "{found:?}");
            assert!(!found.empty && found.loop_period.is_none());
        }
    }
    let summary = summaries(&results).unwrap();
    assert_eq!(
        summary.iter().map(|s| (s.frame, s.items, s.correct)).collect::<Vec<_>>(),
        [(Frame::Raw, 4, 4), (Frame::Chat, 4, 4),]
    );
}

/// Items of every kind whose prompts begin with the same 150 tokens or so.
fn shared_suites(dir: &Path) -> Vec<Suite> {
    let shots = "Q: Leo has 3 boxes with 6 eggs in each box, and 5 loose eggs. How many eggs are there?\n\
                 A: 3 * 6 = 18. 18 + 5 = 23. The answer is 23.\n\n"
        .repeat(4);
    let question = |i: usize| {
        format!("{shots}Q: Cora has {} boxes with {} cups in each box. How many?\nA:", i + 2, 3 * i + 4)
    };
    let file = |name: &str, line: &dyn Fn(usize) -> Value| {
        let path = dir.join(name);
        let lines: Vec<String> = (0..5).map(|i| line(i).to_string()).collect();
        fs::write(&path, lines.join("\n") + "\n").unwrap();
        Suite::open(&path).unwrap()
    };
    vec![
        file("choice.jsonl", &|i| {
            json!({ "id": format!("c{i}"), "prompt": question(i), "answer": i % 3,
                    "choices": [" The answer is 5.", " 8", format!(" {i} * 3 = 21. 21 + 4 = 25. The answer is 25.")] })
        }),
        file("cloze.jsonl", &|i| json!({ "prompt": question(i), "gold": format!(" {i} * 7 = 21.") })),
        file(
            "generative.jsonl",
            &|i| json!({ "raw_prompt": question(i), "question": question(i), "answer": "23", "gold": " 2 * 4 = 8." }),
        ),
    ]
}

#[test]
fn neither_batches_nor_limits_nor_interruptions_change_a_bit() {
    let bench = Bench::open(&demo());
    let dir = temp();
    for suite in shared_suites(dir.path()) {
        let settings = |batch, limit| Settings { max_tokens: 20, batch, limit, ..Settings::default() };
        let (alone, ran) = bench.run(&suite, &settings(1, None)).unwrap();
        let frames = if suite.name == "generative" { 2 } else { 1 };
        assert_eq!(alone.len(), 5 * frames);
        assert!(ran.shared_tokens >= 4 * 128, "{}: {ran:?}", suite.name);
        let alone = sorted(alone);
        for batch in [2, 3, 16] {
            assert_eq!(sorted(bench.run(&suite, &settings(batch, None)).unwrap().0), alone, "{batch}");
        }
        let (limited, _) = bench.run(&suite, &settings(4, Some(2))).unwrap();
        assert_eq!(limited.len(), 2 * frames);
        assert!(limited.iter().all(|result| alone.contains(result)));

        let mut results = Vec::new();
        let first = bench.run_into(&suite, &settings(2, None), &BTreeSet::new(), 2, &mut results).unwrap();
        assert!(!first.complete && results.len() < alone.len());
        let done: BTreeSet<Key> = results.iter().map(|r| (r.frame, r.item.clone())).collect();
        let before = results.len();
        let second = bench.run_into(&suite, &settings(3, None), &done, usize::MAX, &mut results).unwrap();
        assert!(second.complete);
        assert_eq!(results.len(), alone.len(), "{before} were done");
        assert_eq!(sorted(results.clone()), alone);
        assert_eq!(summaries(&results).unwrap(), summaries(&alone).unwrap());
    }
}

/// Without recurrent layers the cut of a prompt changes nothing: what a suite shares gives the bits of what it does not.
#[test]
fn a_shared_beginning_gives_what_reading_the_whole_prompt_gives() {
    let bench = Bench::open(&fixture("qwen3"));
    let dir = temp();
    let shots = "the cat sat on the mat and looked at the moon. ".repeat(12);
    let line =
        |i: usize| json!({ "prompt": format!("{shots}{i} is"), "choices": [" a number", " b"], "answer": 0 });
    let path = dir.path().join("all.jsonl");
    fs::write(&path, format!("{}\n{}\n{}\n", line(1), line(2), line(3))).unwrap();
    let (shared, ran) = bench.run(&Suite::open(&path).unwrap(), &Settings::default()).unwrap();
    assert!(ran.shared_tokens > 0);
    for (i, result) in shared.iter().enumerate() {
        let path = dir.path().join("one.jsonl");
        fs::write(&path, format!("{}\n", line(i + 1))).unwrap();
        let (alone, ran) = bench.run(&Suite::open(&path).unwrap(), &Settings::default()).unwrap();
        assert_eq!(ran.shared_tokens, 0);
        assert_eq!(alone[0].detail, result.detail);
    }
}

#[test]
fn a_batch_decodes_what_a_session_does() {
    let bench = Bench::open(&demo());
    let suite = suite("problems.jsonl");
    let Items::Generative(items) = &suite.items else { panic!("{suite:?}") };
    let settings = Settings { frames: vec![Frame::Raw], ..Settings::default() };
    let (results, _) = bench.run(&suite, &settings).unwrap();
    for item in items {
        let prompt = bench.tokenizer.encode(item.raw_prompt.as_deref().unwrap(), true).unwrap();
        let mut sampler = Sampler::new(Sampling::greedy()).unwrap();
        let request =
            Request { sampler: &mut sampler, max_tokens: 256, ends: &[0, 2], draft: 0, stop: &|| false };
        let mut text = Vec::new();
        Session::new(&bench.model)
            .generate(&prompt, request, &mut |token| {
                text.push(token);
                match bench.tokenizer.decode(&text, true).unwrap().contains("\n\n") {
                    true => std::ops::ControlFlow::Break(()),
                    false => std::ops::ControlFlow::Continue(()),
                }
            })
            .unwrap();
        let result = results.iter().find(|result| result.item == item.id).unwrap();
        let Detail::Generative(found) = detail(result) else { panic!("{result:?}") };
        assert_eq!(found.tokens, text);
    }
}

#[test]
fn silence_loops_and_missing_answers_are_counted_apart() {
    let bench = Bench::open(&demo());
    let dir = temp();
    let path = dir.path().join("broken.jsonl");
    let problem: Value = serde_json::from_str(
        fs::read_to_string(golden("tasks/problems.jsonl")).unwrap().lines().next().unwrap(),
    )
    .unwrap();
    // A stop string that every answer begins with leaves nothing.
    let silent =
        json!({ "id": "silent", "raw_prompt": problem["raw_prompt"], "answer": "23", "stop": [" "] });
    let good = json!({ "id": "good", "raw_prompt": problem["raw_prompt"], "answer": "23.0" });
    let wrong = json!({ "id": "wrong", "raw_prompt": problem["raw_prompt"], "answer": "24" });
    fs::write(&path, format!("{silent}\n{good}\n{wrong}\n")).unwrap();
    let (results, _) = bench.run(&Suite::open(&path).unwrap(), &Settings::default()).unwrap();
    let summary = &summaries(&results).unwrap()[0];
    let counts = summary.generative.as_ref().unwrap();
    assert_eq!((summary.items, summary.correct, counts.empty, counts.no_answer), (3, 1, 1, 1));
    assert_eq!((counts.length, counts.loops, counts.context_full), (0, 0, 0));
    let (results, _) =
        bench.run(&Suite::open(&path).unwrap(), &Settings { max_tokens: 5, ..Settings::default() }).unwrap();
    assert_eq!(summaries(&results).unwrap()[0].generative.as_ref().unwrap().length, 2);
}

/// A message and its exit code.
#[track_caller]
fn refused(result: Result<impl std::fmt::Debug, impl Failure>, exit: Exit, messages: &[&str]) {
    let error = result.expect_err("it must be refused");
    for message in messages {
        assert!(error.to_string().contains(message), "{error}\ndoes not say\n{message}");
    }
    assert_eq!(error.exit(), exit, "{error}");
}

fn suite_of(text: impl AsRef<[u8]>) -> Result<Suite, impl Failure> {
    let dir = temp();
    let path = dir.path().join("suite.jsonl");
    fs::write(&path, text).unwrap();
    Suite::open(&path)
}

#[test]
fn wrong_lines_are_refused_by_number() {
    let good = r#"{"prompt": "P", "choices": [" A", " B"], "answer": 1}"#;
    let ask = r#"{"raw_prompt": "P", "question": "Q", "answer": "7"}"#;
    for (line, message) in [
        (r#"{"prompt": "P""#, "column 14: EOF while parsing an object"),
        ("[1]", "the line is no JSON object"),
        ("", "the line is blank"),
        (r#"{"prompt": "P", "choices": [" A", " B"], "answer": 1, "anwser": 2}"#, "unknown field `anwser`"),
        (
            r#"{"prompt": "P", "prompt": "P", "choices": [" A", " B"], "answer": 1}"#,
            "duplicate field `prompt`",
        ),
        (r#"{"prompt": 5, "choices": [" A", " B"], "answer": 1}"#, "expected a string"),
        (r#"{"prompt": "P", "choices": " A", "answer": 1}"#, "expected a sequence"),
        (r#"{"prompt": "P", "choices": [" A", 2], "answer": 1}"#, "expected a string"),
        (r#"{"prompt": "P", "choices": [" A", " B"]}"#, "the keys fit no kind of item"),
        (r#"{"choices": [" A", " B"], "answer": 1}"#, "the keys fit no kind of item"),
        (r#"{"prompt": "P"}"#, "the keys fit no kind of item"),
        (r#"{"prompt": "P", "question": "Q", "answer": "1"}"#, "the keys fit no kind of item"),
        (r#"{"prompt": " \n", "choices": [" A", " B"], "answer": 1}"#, "`prompt` is blank"),
        (r#"{"prompt": "P", "choices": [" A"], "answer": 0}"#, "at least 2 choices, got 1"),
        (r#"{"prompt": "P", "choices": [], "answer": 0}"#, "at least 2 choices, got 0"),
        (r#"{"prompt": "P", "choices": [" A", " B"], "answer": 2}"#, "a whole number from 0 to 1, got 2"),
        (r#"{"prompt": "P", "choices": [" A", " B"], "answer": -1}"#, "a whole number from 0 to 1, got -1"),
        (
            r#"{"prompt": "P", "choices": [" A", " B"], "answer": " A"}"#,
            "a whole number from 0 to 1, got \" A\"",
        ),
        (r#"{"prompt": "P", "choices": [" A", " B", " A"], "answer": 1}"#, "choices 0 and 2 are equal: ` A`"),
        (
            r#"{"prompt": "P", "choices": [" A", " B"], "answer": 1, "stop": ["x"]}"#,
            "`stop` belongs to no multiple choice item",
        ),
        (r#"{"id": " ", "prompt": "P", "choices": [" A", " B"], "answer": 1}"#, "`id` is blank"),
        (good, "the item equals that of line 1, and neither has an `id`"),
        (ask, "this is a generative item, but line 1 is a multiple choice item"),
        (r#"{"prompt": "P", "gold": " G"}"#, "this is a cloze item, but line 1 is a multiple choice item"),
    ] {
        let suite = suite_of(format!("{good}\n{line}\n"));
        refused(suite, Exit::Input, &["suite.jsonl`, line 2: ", message]);
    }
    for (line, message) in [
        (
            r#"{"raw_prompt": "P2", "question": "Q", "answer": 7}"#,
            "`answer` must be a string that holds a number, got 7",
        ),
        (
            r#"{"raw_prompt": "P2", "question": "Q", "answer": "seven"}"#,
            "a string that holds a number, got \"seven\"",
        ),
        (
            r#"{"raw_prompt": "P2", "question": "Q", "answer": "N/A"}"#,
            "a string that holds a number, got \"N/A\"",
        ),
        (r#"{"raw_prompt": "P2", "answer": "7"}"#, "`question` is missing, unlike on line 1"),
        (r#"{"question": "Q2", "answer": "7"}"#, "`raw_prompt` is missing, unlike on line 1"),
        (r#"{"raw_prompt": "P2", "question": "", "answer": "7"}"#, "`question` is blank"),
        (r#"{"raw_prompt": "P2", "question": "Q", "answer": "7", "stop": [""]}"#, "`stop` is blank"),
        (
            r#"{"raw_prompt": "P2 ", "question": "Q", "answer": "7", "gold": "7"}"#,
            "does not end in white space",
        ),
        (
            r#"{"raw_prompt": "P2", "question": "Q", "answer": "7", "extract": "last"}"#,
            "unknown variant `last`",
        ),
    ] {
        refused(suite_of(format!("{ask}\n{line}\n")), Exit::Input, &["suite.jsonl`, line 2: ", message]);
    }
    let twice = r#"{"id": "a", "prompt": "P", "choices": [" A", " B"], "answer": 1}"#;
    refused(
        suite_of(format!("{twice}\n{}\n", twice.replace("P", "R"))),
        Exit::Input,
        &["line 2: id `a` is that of line 1 already"],
    );
    refused(suite_of(""), Exit::Input, &["holds no items"]);
    refused(suite_of(b"\xff\n"), Exit::Input, &["line 1: the line is not UTF-8"]);
    refused(Suite::open(Path::new("no-such.jsonl")), Exit::Request, &["cannot read `no-such.jsonl`"]);
}

#[test]
fn every_wrong_line_is_named_up_to_a_limit() {
    let bad = "{}\n".repeat(40);
    let error = suite_of(&bad).unwrap_err().to_string();
    assert!(error.contains("line 1: ") && error.contains("line 20: "), "{error}");
    assert!(error.contains("20 more lines are wrong"), "{error}");
}

#[test]
fn ids_come_from_the_content_and_not_from_the_line() {
    let line = |p: &str| format!(r#"{{"prompt": "{p}", "choices": [" A", " B"], "answer": 1}}"#);
    let ids = |text: String| {
        let suite = suite_of(text).unwrap_or_else(|error| panic!("{error}"));
        suite.items.ids().iter().map(|id| (*id).to_owned()).collect::<Vec<_>>()
    };
    let both = ids(format!("{}\n{}\n", line("one"), line("two")));
    assert_eq!(both, ids(format!("{}\n{}", line("one"), line("two"))));
    assert_eq!(both[1], ids(line("two"))[0]);
    // The order of keys and spaces between them say nothing.
    assert_eq!(both[1], ids(r#"{"answer":1,"choices":[" A"," B"],"prompt":"two"}"#.to_owned())[0]);
    assert_eq!(both[0].len(), 16);
    let named = format!("{}\n{}\n", line("one").replace("{", r#"{"id": "x", "#), line("one"));
    assert_eq!(ids(named), ["x".to_owned(), both[0].clone()]);
}

fn request(doc: u64, idx: usize, label: &Value, context: &str, continuation: &str) -> Value {
    json!({
        "request_type": "loglikelihood", "doc": { "id": doc }, "idx": idx, "task_name": "t", "doc_id": doc,
        "native_id": null, "label": label, "request": { "context": context, "continuation": continuation },
    })
}

/// Writes `TASK/VARIANT/requests.jsonl` and opens it.
fn package(rows: &[Value]) -> Result<Suite, impl Failure> {
    let dir = temp();
    let folder = dir.path().join("arc_easy/test_rc_5shot");
    fs::create_dir_all(&folder).unwrap();
    let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
    fs::write(folder.join("requests.jsonl"), text).unwrap();
    Suite::open(&folder.join("requests.jsonl"))
}

#[test]
fn a_packages_requests_become_multiple_choice() {
    let rows: Vec<Value> = [0, 7]
        .into_iter()
        .flat_map(|doc| (0..3).map(move |i| request(doc, i, &json!(1), "Q:", &format!(" {i}"))))
        .chain([request(1_000_000, 0, &json!(1), "Answer:", " 0")])
        .collect();
    let suite = package(&rows).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(suite.name, "arc_easy/test_rc_5shot");
    assert_eq!(suite.items.ids(), ["0", "7"]);
    assert_eq!(suite.notes, ["1 lines with prompts that say nothing (doc_id from 1000000) left out"]);
    let Items::Choice(items) = suite.items else { panic!("{:?}", suite.items) };
    assert_eq!(items[1].prompts, ["Q:"]);
    assert_eq!((items[1].choices.len(), items[1].answer), (3, 1));
}

#[test]
fn a_packages_requests_may_have_a_context_for_each_choice_or_equal_choices() {
    let rows = [
        request(0, 0, &json!(1), "Sarah", " won."),
        request(0, 1, &json!(1), "Maria", " won."),
        request(1, 0, &json!(0), "Q:", " x"),
        request(1, 1, &json!(0), "Q:", " x"),
    ];
    let suite = package(&rows).unwrap_or_else(|error| panic!("{error}"));
    let Items::Choice(items) = &suite.items else { panic!("{:?}", suite.items) };
    assert_eq!(items[0].prompts, ["Sarah", "Maria"]);
    assert_eq!(suite.notes, ["1 items have equal choices, of which the first counts as chosen"]);
    let (results, _) = Bench::open(&demo()).run(&suite, &Settings::default()).unwrap();
    let Detail::Choice(found) = detail(&results[0]) else { panic!("{results:?}") };
    assert_ne!(found.log_probs[0], found.log_probs[1]);
    let Detail::Choice(found) = detail(&results[1]) else { panic!("{results:?}") };
    assert!(found.tied.sum && found.chosen.sum == 0 && results[1].correct == Some(true));
    assert_eq!(summaries(&results).unwrap()[0].choice.as_ref().unwrap().tied.sum, 1);
}

#[test]
fn a_packages_single_requests_become_cloze_or_generative_by_their_labels() {
    let cloze = package(&[request(0, 0, &json!(["signs"]), "I see", " signs")]);
    let cloze = cloze.unwrap_or_else(|error| panic!("{error}"));
    assert!(matches!(&cloze.items, Items::Cloze(items) if items[0].gold == " signs"), "{cloze:?}");
    let mut row = request(0, 0, &json!("1,800"), "Question: Q\nAnswer:", " 1800. So the answer is 1,800.");
    row["request_type"] = json!("generate_until_and_loglikelihood");
    row["request"]["stop_sequences"] = json!(["Question:"]);
    row["doc"]["question"] = json!("Q");
    let suite = package(std::slice::from_ref(&row)).unwrap_or_else(|error| panic!("{error}"));
    let Items::Generative(items) = &suite.items else { panic!("{suite:?}") };
    assert_eq!(items[0].answer.to_string(), "1800");
    assert_eq!(
        (items[0].stop.as_slice(), items[0].question.as_deref()),
        (&["Question:".to_owned()][..], Some("Q"))
    );
    // An answer that is code makes the whole suite cloze.
    let mut other = row.clone();
    (other["doc_id"], other["label"]) = (json!(1), json!("x = 1"));
    let suite = package(&[row, other]).unwrap_or_else(|error| panic!("{error}"));
    assert!(matches!(suite.items, Items::Cloze(_)));
}

#[test]
fn a_packages_file_that_was_changed_is_refused() {
    let row = |doc, idx, label: u64| request(doc, idx, &json!(label), "Q:", &format!(" {idx}"));
    for (rows, message) in [
        (
            vec![row(0, 0, 0), row(0, 1, 0), row(1, 0, 0), row(1, 1, 0), row(0, 2, 0)],
            "line 5: document 0 goes on here",
        ),
        (vec![row(0, 0, 0), row(0, 2, 0)], "line 2: `idx` is 2, but 1 comes next for document 0"),
        (vec![row(0, 0, 0), row(0, 1, 1)], "line 2: `label` is not that of the document's first line"),
        (
            vec![row(0, 0, 2), row(0, 1, 2)],
            "line 1: `answer` must be the index of a choice, a whole number from 0 to 1, got 2",
        ),
        (vec![row(0, 0, 0), row(0, 1, 0), row(1, 0, 0)], "line 3: an item needs at least 2 choices, got 1"),
        (vec![request(0, 0, &json!(0), " ", " x")], "line 1: `request.context` is blank"),
        (vec![request(0, 0, &json!(0), "Q:", "")], "line 1: `request.continuation` is blank"),
        (vec![json!({ "doc_id": 1 })], "line 1: column 12: missing field"),
    ] {
        refused(package(&rows), Exit::Input, &[message]);
    }
}

#[test]
fn compressed_files_are_read_and_damaged_ones_refused() {
    let dir = temp();
    let folder = dir.path().join("lambada/bpb_0shot");
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("requests.jsonl.gz");
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    writeln!(encoder, "{}", request(0, 0, &json!(["signs"]), "I see", " signs")).unwrap();
    let bytes = encoder.finish().unwrap();
    fs::write(&path, &bytes).unwrap();
    let suite = Suite::open(&path).unwrap();
    assert_eq!((suite.name.as_str(), suite.items.len()), ("lambada/bpb_0shot", 1));
    assert_eq!(suite.digest, tqc::digest::Digest::of(&bytes));
    fs::write(&path, &bytes[..bytes.len() - 9]).unwrap();
    refused(Suite::open(&path), Exit::Input, &["is no gzip file"]);
    fs::write(&path, b"{}").unwrap();
    refused(Suite::open(&path), Exit::Input, &["is no gzip file"]);
}

#[test]
fn items_that_do_not_fit_the_model_are_refused_before_anything_runs() {
    let bench = Bench::open(&demo());
    let good = r#"{"prompt": "P", "choices": [" A", " B"], "answer": 1}"#;
    let refuse = |text: String, settings: Settings, exit: Exit, message: &str| {
        let suite = suite_of(text).unwrap_or_else(|error| panic!("{error}"));
        let mut results = Vec::new();
        let ran = bench.run_into(&suite, &settings, &BTreeSet::new(), usize::MAX, &mut results);
        let error = ran.expect_err("it must be refused");
        assert!(error.to_string().contains(message), "{error}\ndoes not say\n{message}");
        assert_eq!((error.exit(), results.len()), (exit, 0), "{error}");
    };
    let settings = Settings::default;
    let long = "word ".repeat(1100);
    refuse(
        format!(
            "{good}\n{}\n",
            json!({ "id": "long", "prompt": long.trim(), "choices": [" A", " B"], "answer": 1 })
        ),
        settings(),
        Exit::Request,
        "item `long`: ",
    );
    refuse(
        format!("{good}\n{}\n", json!({ "id": "none", "prompt": "P", "choices": [" A", ""], "answer": 0 })),
        settings(),
        Exit::Request,
        "suite `suite`, item `none`: choice 1 gives no tokens after the prompt",
    );
    let only_raw = json!({ "raw_prompt": "P", "answer": "7" });
    let chat = Settings { frames: vec![Frame::Chat], ..settings() };
    refuse(only_raw.to_string(), chat, Exit::Request, "has no chat frame: its items have no `question`");
    let long = json!({ "id": "q", "question": long, "answer": "7" });
    refuse(long.to_string(), settings(), Exit::Request, "item `q`: ");
}

#[test]
fn a_chat_frame_needs_a_template() {
    let dir = temp();
    for file in fs::read_dir(demo()).unwrap() {
        let path = file.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let config = dir.path().join("tokenizer_config.json");
    let mut value: Value = serde_json::from_str(&fs::read_to_string(&config).unwrap()).unwrap();
    value.as_object_mut().unwrap().remove("chat_template");
    fs::write(&config, value.to_string()).unwrap();
    let error = Bench::open(dir.path()).run(&suite("problems.jsonl"), &Settings::default()).unwrap_err();
    assert!(error.to_string().contains("suite `problems` has a chat frame, but"), "{error}");
    assert!(error.help().unwrap().contains("--frame raw"));
    let raw = Settings { frames: vec![Frame::Raw], limit: Some(1), ..Settings::default() };
    assert_eq!(Bench::open(dir.path()).run(&suite("problems.jsonl"), &raw).unwrap().0.len(), 1);
}

#[test]
fn a_stored_result_of_another_version_is_named() {
    let result = ItemResult {
        suite: "s".to_owned(),
        frame: Frame::Raw,
        item: "i".to_owned(),
        correct: Some(true),
        detail: json!({ "other": 1 }),
    };
    refused(summaries(&[result]), Exit::Input, &["the stored result of item `i` cannot be read"]);
}

/// Items of the real suites, where a checkout has them; says so where it has not.
#[test]
fn the_lab_model_solves_its_tasks() {
    let shared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared");
    let (model, text) = (shared.join("models/lab-qwen3_5"), shared.join("text"));
    if !model.join("config.json").exists() {
        eprintln!("SKIP the_lab_model_solves_its_tasks: {} is not there", model.display());
        return;
    }
    let bench = Bench::open(&model);
    for (name, limit) in [("recall.jsonl", 40), ("problems.jsonl", 10)] {
        let suite = Suite::open(&text.join(name)).unwrap();
        let (results, _) =
            bench.run(&suite, &Settings { limit: Some(limit), ..Settings::default() }).unwrap();
        for summary in summaries(&results).unwrap() {
            assert_eq!((summary.items, summary.correct), (limit, limit), "{summary:?}");
        }
    }
}

/// The program on both golden suites with a few tokens at most.
fn program(db: &Path, more: &[&str]) -> Run {
    let tasks = golden("tasks");
    let suites = [tasks.join("recall.jsonl"), tasks.join("problems.jsonl")];
    let mut args = args!["eval", "tasks", demo(), "--suite", suites[0], "--suite", suites[1], "--db", db];
    args.extend(more.iter().map(Into::into));
    finish(command(args))
}

#[test]
fn the_program_keeps_every_item_and_prints_intervals() {
    let dir = temp();
    let db = dir.path().join("eval.db");
    let report = program(&db, &["--json"]).expect(0).json();
    assert_eq!(report["headline"], "problems raw 4/4, problems chat 4/4, recall 6/6");
    assert_eq!(report["suites"][0]["kind"], "multiple choice");
    let recall = &report["results"][2];
    assert_eq!((&recall["frame"], &recall["accuracy"]), (&json!("choice"), &json!(1.0)));
    // Wilson's interval of 6 of 6: 6 / (6 + z²), z = 1.959964.
    assert!((recall["ci95"][0].as_f64().unwrap() - 0.609_666).abs() < 1e-6, "{recall}");
    assert_eq!(recall["choice"]["accuracy"]["per_byte"], 1.0);
    let list = tqc!["eval", "list", "--db", db, "--run", "1", "--json"].expect(0).json();
    assert_eq!(list["items"].as_array().unwrap().len(), 14);
    let text = program(&db, &["--limit", "1", "--frame", "chat"]).expect(0).stdout;
    assert!(text.contains("problems") && text.contains("chat") && !text.contains("raw"), "{text}");
}

#[test]
fn the_program_goes_on_where_it_ended() {
    let dir = temp();
    let db = dir.path().join("eval.db");
    let first = program(&db, &["--json"]).expect(0).json();
    // As a kill would leave it: not finished, with some of the items.
    let connection = rusqlite::Connection::open(&db).unwrap();
    connection.execute("UPDATE run SET finished = NULL, summary = NULL", []).unwrap();
    connection.execute("DELETE FROM item WHERE frame = 'chat' OR item < '8'", []).unwrap();
    let left: i64 = connection.query_row("SELECT count(*) FROM item", [], |row| row.get(0)).unwrap();
    assert!(left > 0 && left < 10, "{left}");
    let again = program(&db, &["--json"]).expect(0);
    assert!(
        again.stderr.contains(&format!("going on with run 1: {left} items are done")),
        "{}",
        again.stderr
    );
    let again = again.json();
    assert_eq!(again["results"], first["results"]);
    assert!(again["timings"]["prompt_tokens"].as_u64() < first["timings"]["prompt_tokens"].as_u64());
    let third = program(&db, &["--json"]).expect(0).json();
    assert_eq!(third["run"], 2, "a finished run is not taken up");
}

#[test]
fn the_program_refuses_wrong_requests() {
    let dir = temp();
    let db = dir.path().join("eval.db");
    let suite = golden("tasks/recall.jsonl");
    let twice = tqc!["eval", "tasks", demo(), "--suite", suite, "--suite", suite, "--db", db].expect(2);
    assert!(twice.stderr.contains("are both called `recall`"), "{}", twice.stderr);
    tqc!["eval", "tasks", demo(), "--db", db].expect(2);
    tqc!["eval", "tasks", demo(), "--suite", suite, "--max-tokens", "0", "--db", db].expect(2);
    tqc!["eval", "tasks", demo(), "--suite", dir.path().join("none.jsonl"), "--db", db].expect(2);
    let bad = dir.path().join("bad.jsonl");
    fs::write(&bad, "{}\n").unwrap();
    let bad = tqc!["eval", "tasks", demo(), "--suite", bad, "--db", db].expect(3);
    assert!(bad.stderr.contains("line 1: the keys fit no kind of item"), "{}", bad.stderr);
    tqc!["eval", "tasks", dir.path(), "--suite", suite, "--db", db].expect(3);
    assert!(!db.exists(), "nothing was measured");
}
