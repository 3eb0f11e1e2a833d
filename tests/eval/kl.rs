//! `tqc eval dump`, `kl` and `list`: against arithmetic, across threads and interruptions, and on bad inputs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tqc::backend::Precision;
use tqc::backend::cpu::Cpu;
use tqc::isa::Isa;
use tqc::runtime;

use crate::common::*;
use crate::{args, demo, tqc};

/// Documents that every tokenizer of the fixtures can read.
const TEXTS: [&str; 6] = [
    "The answer is 42. The question was lost, and with it the reason for asking.",
    "Q: Ned has 7 boxes with 21 books in each box. How many books are there?\nA: 7 * 21 = 147.",
    "In which region is Stobelfen? In Adrun, on the river Lodri, where rope is made.",
    "def f(x): return x + 1",
    "Once there was a man who had two sons, and the younger of them said to his father: give me what is mine.",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36",
];

struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self { dir: temp() };
        let lines: Vec<String> = TEXTS.iter().map(|text| json!({ "text": text }).to_string()).collect();
        fs::write(place.path("text.jsonl"), lines.join("\n")).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn dump_command(&self, model: &Path, name: &str, options: &[&str]) -> Command {
        let text = self.path("text.jsonl");
        let mut args = args!["eval", "dump", model, "--text", text, "-o", self.path(name), "--json"];
        args.extend(options.iter().map(Into::into));
        command(args)
    }

    fn dump_run(&self, model: &Path, name: &str, options: &[&str]) -> Run {
        finish(self.dump_command(model, name, options))
    }

    /// Dumps `model` into `name`.
    fn dump(&self, model: &Path, name: &str, options: &[&str]) -> Value {
        self.dump_run(model, name, options).expect(0).json()
    }

    /// So little memory that every sequence is a batch of its own, or nearly.
    fn little_memory(&self) -> String {
        let made = self.dump(&demo(), "planned", &[]);
        let longest = 120;
        // 256 f32 values of residual stream a token.
        format!("{}KiB", made["need"]["inside"].as_u64().unwrap() / 1024 + longest + 1)
    }

    fn kl_run(&self, dump: &str, model: &Path, options: &[&str]) -> Run {
        let db = self.path("eval.db");
        let mut args = args!["eval", "kl", "--teacher", self.path(dump), model, "--db", db, "--json"];
        args.extend(options.iter().map(Into::into));
        finish(command(args))
    }

    fn kl(&self, dump: &str, model: &Path, options: &[&str]) -> Value {
        self.kl_run(dump, model, options).expect(0).json()
    }
}

/// A copy of a fixture with one tensor changed.
fn changed(dir: &Path, name: &str, tensor: &str, value: impl Fn(f32) -> f32) -> PathBuf {
    let mut model = Model::fixture(name);
    let all = model.shards.iter_mut().flatten();
    all.filter(|t| t.name == tensor).for_each(|t| t.map(&value));
    let to = dir.join("changed");
    model.write(&to);
    to
}

/// Logits [T, V] of every document, in f32.
fn logits(model: &Path, dump: &Path) -> (Vec<Vec<f32>>, usize) {
    let weights = runtime::Weights::open(model).unwrap();
    let vocab = weights.decoder.vocab;
    let cpu = Cpu::new(Isa::best(), 1, Precision::Exact);
    let model = runtime::Model::new(weights, cpu).unwrap();
    let tokens = read_safetensors(&dump.join("tokens.safetensors"));
    let mut ids = tokens[0].bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b));
    let record = read_json(&dump.join("dump.json"));
    let sequences = record["sequences"].as_array().unwrap();
    let of = |sequence: &Value| {
        let tokens: Vec<u32> = ids.by_ref().take(sequence["tokens"].as_u64().unwrap() as usize).collect();
        model.forward(&mut model.state(), &tokens, runtime::Want::All).unwrap().logits
    };
    (sequences.iter().map(of).collect(), vocab)
}

/// What a comparison found, without what differs from run to run.
fn numbers(mut found: Value) -> Value {
    for key in ["timings", "memory", "run", "tokens_per_s"] {
        found.as_object_mut().unwrap().remove(key).expect(key);
    }
    found
}

fn log_softmax(row: &[f32], factor: f64) -> Vec<f64> {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|x| (factor * f64::from(x - most)).exp()).sum();
    row.iter().map(|x| factor * f64::from(x - most) - sum.ln()).collect()
}

#[test]
fn a_teacher_against_its_own_f32_dump_has_no_divergence_at_all() {
    let place = Place::new();
    let made = place.dump(&demo(), "dump", &["--dtype", "f32"]);
    assert_eq!(made["noise_floor"]["mean_kl"], 0.0);
    let found = place.kl("dump", &demo(), &["--worst", "3"]);
    assert_eq!((&found["mean_kl"], &found["max_kl"]), (&json!(0.0), &json!(0.0)));
    assert_eq!((&found["top1_agreement"], &found["non_finite"]), (&json!(1.0), &json!(0)));
    assert_eq!(found["teacher_ppl"], found["candidate_ppl"]);
    let (ppl, made_ppl) = (found["teacher_ppl"].as_f64().unwrap(), made["teacher_ppl"].as_f64().unwrap());
    assert!((ppl / made_ppl - 1.0).abs() < 1e-6, "{ppl} {made_ppl}");
    assert_eq!(found["tokens"], made["tokens"]);
    assert_eq!(found["documents"], 6);
    assert_eq!(found["worst"].as_array().unwrap().len(), 3);
    for key in ["mean_kl", "ci95", "median_kl", "p90_kl", "p99_kl", "p999_kl", "noise_floor", "candidate_ppl"]
    {
        assert!(found.get(key).is_some(), "{key} is part of the contract");
    }
}

#[test]
fn an_f16_dump_states_the_divergence_that_its_rounding_makes() {
    let place = Place::new();
    let made = place.dump(&demo(), "dump", &[]);
    let floor = made["noise_floor"]["mean_kl"].as_f64().unwrap();
    assert!(floor > 0.0 && floor < 1e-5, "{floor}");
    assert_eq!(made["bytes_per_position"], 512, "two bytes for each of 256 values");
    // KL(true || rounded) was recorded, KL(rounded || true) is measured: equal in second order.
    let found = place.kl("dump", &demo(), &[]);
    let measured = found["mean_kl"].as_f64().unwrap();
    assert!((measured / floor - 1.0).abs() < 0.05, "{measured} against {floor}");
    assert_eq!(found["noise_floor"], made["noise_floor"]["mean_kl"]);
}

#[test]
fn doubled_logits_diverge_as_arithmetic_in_f64_says() {
    let place = Place::new();
    let teacher = fixture("llama-untied");
    let candidate = changed(place.dir.path(), "llama-untied", "model.norm.weight", |gain| 2.0 * gain);
    for (name, options) in
        [("hidden", &["--dtype", "f32"][..]), ("topk", &["--dtype", "f32", "--format", "topk"])]
    {
        place.dump(&teacher, name, options);
        let (documents, vocab) = logits(&teacher, &place.path(name));
        let (mut sum, mut count, mut agree) = (0.0, 0, 0);
        let mut of_documents = Vec::new();
        for rows in &documents {
            let mut own = 0.0;
            for row in rows.chunks_exact(vocab) {
                let (p, q) = (log_softmax(row, 1.0), log_softmax(row, 2.0));
                own += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
                agree += 1;
            }
            sum += own;
            count += rows.len() / vocab;
            of_documents.push((own, (rows.len() / vocab) as f64));
        }
        let found = place.kl(name, &candidate, &[]);
        let mean = sum / f64::from(count as u32);
        let kl = found["mean_kl"].as_f64().unwrap();
        assert!(mean > 1e-3 && (kl - mean).abs() < 1e-6 * mean.max(1.0), "{name}: {kl} against {mean}");
        assert_eq!(found["top1_agreement"], agree as f64 / count as f64, "doubling changes no order");
        // CR1 by its formula.
        let groups = of_documents.len() as f64;
        let squares: f64 = of_documents.iter().map(|(sum, n)| (sum - mean * n).powi(2)).sum();
        let error = (groups / (groups - 1.0) * squares).sqrt() / count as f64;
        assert!((found["standard_error"].as_f64().unwrap() / error - 1.0).abs() < 1e-5, "{name}");
        let ppl: f64 = found["candidate_ppl"].as_f64().unwrap();
        assert!(
            ppl > found["teacher_ppl"].as_f64().unwrap(),
            "sharper guesses of an untrained model cost more"
        );
    }
}

#[test]
fn topk_is_exact_where_it_keeps_the_whole_vocabulary_and_a_lower_bound_in_f16() {
    let place = Place::new();
    let teacher = fixture("llama-untied");
    let candidate = changed(place.dir.path(), "llama-untied", "model.norm.weight", |gain| 0.5 * gain);
    place.dump(&teacher, "hidden", &["--dtype", "f32"]);
    let made = place.dump(&teacher, "topk", &["--format", "topk"]);
    assert!(made["noise_floor"]["mean_kl"].as_f64().unwrap() > 0.0, "f16 log-probabilities are not exact");
    let (whole, top) = (place.kl("hidden", &candidate, &[]), place.kl("topk", &candidate, &[]));
    let (whole, top) = (whole["mean_kl"].as_f64().unwrap(), top["mean_kl"].as_f64().unwrap());
    assert!((whole / top - 1.0).abs() < 1e-2, "{whole} {top}");
}

#[test]
fn neither_threads_nor_instruction_set_nor_memory_change_a_bit() {
    let place = Place::new();
    let recipe = recipe(place.dir.path(), &default_codec(AFFINE_4_32));
    tqc!("build", &recipe, "--source", demo(), "-o", place.path("artifact")).expect(0);
    let first = place.dump(&demo(), "a", &["--threads", "1", "--isa", "scalar"]);
    let memory = place.little_memory();
    let second = place.dump(&demo(), "b", &["--threads", "3", "--memory", &memory]);
    assert!(second["need"]["batches"].as_u64().unwrap() > 2, "{second}");
    assert_eq!(first["digest"], second["digest"]);
    let run = |options: &[&str]| numbers(place.kl("a", &place.path("artifact"), options));
    let found = run(&["--threads", "1", "--isa", "scalar"]);
    assert!(found["mean_kl"].as_f64().unwrap() > 1e-4);
    assert_eq!(found, run(&["--threads", "2", "--memory", &memory]));
}

#[test]
fn the_decode_path_gives_what_the_streamed_one_gives() {
    let place = Place::new();
    for (name, tolerance) in [("llama-tied", 0.0), ("qwen3_5", 1e-6)] {
        let teacher = fixture(name);
        place.dump(&teacher, name, &["--dtype", "f32"]);
        let found = place.kl(name, &teacher, &["--decode"]);
        // DeltaNet reads a prompt in chunks and decodes token by token: rounding differs.
        let kl = found["mean_kl"].as_f64().unwrap();
        assert!(kl <= tolerance, "{name}: {kl}");
    }
    let run = tqc!("eval", "list", "--db", place.path("eval.db"), "--json").expect(0).json();
    let settings: Vec<&Value> = run["runs"].as_array().unwrap().iter().map(|run| &run["settings"]).collect();
    assert_eq!(settings[0], &json!({ "path": "decode", "precision": "exact" }));
}

#[test]
fn a_killed_dump_and_a_killed_comparison_go_on_where_they_ended() {
    let place = Place::new();
    let text = fs::read_to_string(place.path("text.jsonl")).unwrap();
    let many: Vec<String> = (0..10).map(|_| text.clone()).collect();
    fs::write(place.path("text.jsonl"), many.join("\n")).unwrap();
    let whole = place.dump(&demo(), "whole", &[]);
    let memory = place.little_memory();
    let options = ["--memory", memory.as_str(), "--threads", "1"];
    // On a busy machine the program may end before it is seen that it has begun: again, then, from nothing.
    let kill_when = |command: &dyn Fn() -> Command, ready: &dyn Fn() -> bool, undo: &dyn Fn()| {
        for _ in 0..10 {
            let mut child = command().stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            let start = Instant::now();
            while !ready() && child.try_wait().unwrap().is_none() && start.elapsed() < Duration::from_secs(60)
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            let _ = child.kill();
            if child.wait().unwrap().code().is_none() {
                return;
            }
            undo();
        }
        panic!("ended before it could be killed, ten times");
    };
    kill_when(
        &|| place.dump_command(&demo(), "cut", &options),
        &|| place.path(".cut.work/done.json").exists(),
        &|| fs::remove_dir_all(place.path("cut")).unwrap(),
    );
    assert!(!place.path("cut").exists(), "a dump appears whole or not at all");
    let other = place.dump_run(&demo(), "cut", &["--dtype", "f32"]);
    assert!(other.expect(2).stderr.contains("unfinished work of another kind"));
    // What lies there is believed only as far as its digest holds.
    let copy = |from: &str, to: &str| {
        fs::create_dir_all(place.path(to).join("dump")).unwrap();
        for name in ["key.json", "done.json", "dump/hidden.safetensors"] {
            fs::copy(place.path(from).join(name), place.path(to).join(name)).unwrap();
        }
    };
    copy(".cut.work", ".spoilt.work");
    let file = place.path(".spoilt.work/dump/hidden.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    bytes[200..264].fill(0);
    fs::write(&file, bytes).unwrap();
    let spoilt = place.dump(&demo(), "spoilt", &options);
    assert_eq!((&spoilt["digest"], &spoilt["resumed_sequences"]), (&whole["digest"], &json!(0)));
    let resumed = place.dump(&demo(), "cut", &options);
    assert_eq!(resumed["digest"], whole["digest"]);
    assert!(resumed["resumed_sequences"].as_u64().unwrap() > 0, "{resumed}");
    assert!(!place.path(".cut.work").exists());

    let db = place.path("eval.db");
    let comparison = || {
        let mut kl = args!["eval", "kl", "--teacher", place.path("whole"), demo(), "--db", &db];
        kl.extend(options.iter().map(Into::into));
        command(kl)
    };
    let scored = || {
        let listed = tqc!("eval", "list", "--db", &db, "--run", "1", "--json");
        listed.code == 0 && !listed.json()["sequences"].as_array().unwrap().is_empty()
    };
    kill_when(&comparison, &scored, &|| fs::remove_file(&db).unwrap());
    let run = place.kl_run("whole", &demo(), &[]).expect(0);
    assert!(run.stderr.contains("going on with run 1"), "{}", run.stderr);
    assert_eq!(numbers(place.kl("whole", &demo(), &["--fresh"])), numbers(run.json()));
}

#[test]
fn layers_tell_where_a_candidate_leaves_its_teacher() {
    let place = Place::new();
    let teacher = fixture("llama-untied");
    // Only the last layer differs.
    let name = "model.layers.1.mlp.down_proj.weight";
    let candidate = changed(place.dir.path(), "llama-untied", name, |w| 1.5 * w);
    place.dump(&teacher, "dump", &["--dtype", "f32"]);
    let found = place.kl("dump", &candidate, &["--layers", "4"]);
    let kls: Vec<f64> =
        found["layers"].as_array().unwrap().iter().map(|l| l["mean_kl"].as_f64().unwrap()).collect();
    let last = kls.len() - 1;
    assert!(kls[..2].iter().all(|kl| *kl == 0.0), "{kls:?}");
    assert!(kls[last] > 0.0, "{kls:?}");
    // The layers' teacher is the dump's, whatever its head.
    let other = changed(&place.path("other"), "llama-untied", "model.layers.0.mlp.down_proj.weight", |w| -w);
    let run =
        place.kl_run("dump", &candidate, &["--layers", "4", "--head", other.to_str().unwrap()]).expect(2);
    assert!(run.stderr.contains("but the dump was made of"), "{}", run.stderr);
}

#[test]
fn infinite_logits_are_counted_and_strict_makes_them_a_no() {
    let place = Place::new();
    let teacher = fixture("llama-untied");
    let candidate = changed(place.dir.path(), "llama-untied", "model.norm.weight", |_| 3e38);
    place.dump(&teacher, "dump", &["--dtype", "f32"]);
    let run = place.kl_run("dump", &candidate, &[]);
    let found = run.json();
    assert!(found["non_finite"].as_u64().unwrap() > 0, "{found}");
    let nothing = found["tokens"] == 0;
    assert_eq!((run.code, found["mean_kl"].is_null()), (i32::from(nothing), nothing), "{found}");
    assert!(run.stderr.contains("logits that are not finite"), "{}", run.stderr);
    place.kl_run("dump", &candidate, &["--strict"]).expect(1);
}

#[test]
fn long_documents_are_cut_or_split_and_short_ones_left_out_with_a_count() {
    let place = Place::new();
    let cut = place.dump(&demo(), "cut", &["--context", "8", "--min-tokens", "20"]);
    assert!(cut["cut"].as_u64().unwrap() > 0 && cut["short"].as_u64().unwrap() > 0, "{cut}");
    assert_eq!(cut["tokens"].as_u64().unwrap(), 8 * cut["documents"].as_u64().unwrap());
    let split = place.dump(&demo(), "split", &["--context", "8", "--min-tokens", "20", "--long", "split"]);
    assert_eq!(split["cut"], 0);
    assert!(split["tokens"].as_u64() > cut["tokens"].as_u64());
    let found = place.kl("split", &demo(), &[]);
    assert_eq!(found["documents"], split["documents"], "parts of a document are one cluster");
    let one = place.dump(&demo(), "one", &["--rows", "1"]);
    assert_eq!(one["documents"], 1);
    assert_eq!(place.kl("one", &demo(), &[])["ci95"], Value::Null, "one document has no interval");
    let strict = place.dump_run(&demo(), "x", &["--context", "8", "--strict"]);
    assert!(strict.expect(2).stderr.contains("would be cut"));
    let twice = format!("{0}\n{0}", json!({ "text": TEXTS[0] }));
    fs::write(place.path("text.jsonl"), twice).unwrap();
    let run = place.dump_run(&demo(), "twice", &[]).expect(0);
    assert!(run.stderr.contains("1 documents repeat an earlier one"), "{}", run.stderr);
}

#[test]
fn bad_texts_are_refused_with_file_and_line_and_nothing_is_written() {
    let place = Place::new();
    let path = place.path("text.jsonl");
    for (text, code, words) in [
        ("", 3, "holds no text"),
        ("\n \n", 3, "holds no text"),
        ("{\"text\": \"a b c d\"}\n{\"text\": \"\"}", 3, "line 2: the text is 0 token"),
        ("{\"text\": \"a b c d\"}\n{\"text\": 7}", 3, "line 2: `text` must be a string"),
        ("{\"text\": \"a b c d\"}\nnot json", 3, "line 2"),
        ("{\"body\": \"a\"}", 3, "neither `text` nor `messages`"),
        ("{\"text\": \"a\", \"messages\": []}", 3, "both `text` and `messages`"),
    ] {
        fs::write(&path, text).unwrap();
        let run = place.dump_run(&demo(), "dump", &[]).expect(code);
        assert!(run.stderr.contains(words) && run.stderr.contains("help: "), "{text:?}: {}", run.stderr);
        let left: Vec<_> = fs::read_dir(place.dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["text.jsonl"]);
    }
    let run = tqc!("eval", "dump", demo(), "--text", place.path("none"), "-o", place.path("dump")).expect(2);
    assert!(run.stderr.contains("cannot read"), "{}", run.stderr);
    let messages = json!({ "messages": [{ "role": "user", "content": "hi" }, { "role": "assistant", "content": "ho" }] });
    fs::write(&path, messages.to_string()).unwrap();
    place.dump(&demo(), "chat", &[]);
}

#[test]
fn dumps_that_do_not_fit_or_are_damaged_are_refused_by_name() {
    let place = Place::new();
    place.dump(&fixture("qwen3"), "dump", &[]);
    let refused = |model: &Path, options: &[&str], code: i32, words: &str| {
        let run = place.kl_run("dump", model, options).expect(code);
        assert!(run.stderr.contains(words) && run.stderr.contains("help: "), "{words}: {}", run.stderr);
        assert!(!place.path("eval.db").exists(), "nothing is written for a comparison that is refused");
    };
    refused(&demo(), &[], 2, "tokens in its vocabulary, but the teacher has");
    // The same vocabulary, but two tokens have changed places.
    let mut other = Model::fixture("qwen3");
    let mut tokenizer: Value = serde_json::from_slice(&other.files["tokenizer.json"]).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let names: Vec<String> =
        vocab.iter().filter(|(name, _)| name.len() == 1).map(|(name, _)| name.clone()).take(2).collect();
    let (a, b) = (vocab[&names[0]].clone(), vocab[&names[1]].clone());
    vocab.insert(names[0].clone(), b);
    vocab.insert(names[1].clone(), a);
    other.files.insert("tokenizer.json".to_owned(), serde_json::to_vec(&tokenizer).unwrap());
    other.write(&place.path("other"));
    refused(&place.path("other"), &[], 2, "tokenizer differs");
    refused(&fixture("qwen3"), &["--head", "/nowhere"], 2, "there is no folder `/nowhere`");
    let head = fixture("qwen2");
    refused(
        &fixture("qwen3"),
        &["--head", head.to_str().unwrap()],
        2,
        "the dump's teacher has a head with SHA-256",
    );

    let hidden = place.path("dump/hidden.safetensors");
    let whole = fs::read(&hidden).unwrap();
    fs::write(&hidden, &whole[..whole.len() - 2]).unwrap();
    refused(&fixture("qwen3"), &[], 3, "bytes, but the dump's record says");
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    fs::write(&hidden, &flipped).unwrap();
    refused(&fixture("qwen3"), &[], 3, "has SHA-256");
    fs::write(&hidden, &whole).unwrap();

    let record = place.path("dump/dump.json");
    let good = read_json(&record);
    let mut newer = good.clone();
    newer["version"] = json!(2);
    write_json(&record, &newer);
    refused(&fixture("qwen3"), &[], 3, "has version 2, but this program reads version 1");
    let mut shifted = good.clone();
    let first = good["sequences"][0]["tokens"].as_u64().unwrap();
    let second = good["sequences"][1]["tokens"].as_u64().unwrap();
    (shifted["sequences"][0]["tokens"], shifted["sequences"][1]["tokens"]) =
        (json!(first - 1), json!(second + 1));
    write_json(&record, &shifted);
    refused(&fixture("qwen3"), &[], 3, "its token stream is not the one it records");
    fs::write(&record, "{").unwrap();
    refused(&fixture("qwen3"), &[], 3, "is not a teacher dump");
    write_json(&record, &good);
    let run = tqc!("eval", "kl", "--teacher", place.path("text.jsonl"), demo()).expect(3);
    assert!(run.stderr.contains("does not begin with `_logits_`"), "{}", run.stderr);
    let run = place.dump_run(&demo(), "dump", &[]).expect(2);
    assert!(run.stderr.contains("exists already"), "{}", run.stderr);
}

#[test]
fn a_dump_that_is_refused_leaves_nothing_behind() {
    let place = Place::new();
    let gain = |value: f32| {
        changed(&place.path(&value.to_string()), "llama-untied", "model.norm.weight", move |_| value)
    };
    let (infinite, large) = (gain(3e38), gain(1e6));
    for (teacher, options, code, words) in [
        (&demo(), ["--memory", "1MiB"], 2, "is too small: one sequence needs"),
        (&infinite, ["--dtype", "f32"], 3, "hold NaN or infinity"),
        (&large, ["--dtype", "f16"], 2, "which float16 cannot"),
    ] {
        let run = place.dump_run(teacher, "x", &options).expect(code);
        assert!(run.stderr.contains(words), "{options:?}: {}", run.stderr);
        for name in ["x", ".x.work"] {
            assert!(!place.path(name).exists(), "{options:?} left `{name}`");
        }
    }
}

#[test]
fn results_are_listed_and_exported() {
    let place = Place::new();
    let missing = tqc!("eval", "list", "--db", place.path("none.db")).expect(2);
    assert!(missing.stderr.contains("there is no"), "{}", missing.stderr);
    place.dump(&demo(), "dump", &[]);
    place.kl("dump", &demo(), &[]);
    let db = place.path("eval.db");
    let text = tqc!("eval", "list", "--db", &db).expect(0).stdout;
    assert!(text.contains("demo-qwen3_5") && text.contains("KL "), "{text}");
    let csv = tqc!("eval", "list", "--db", &db, "--export", "csv").expect(0).stdout;
    assert!(csv.starts_with("run,instrument,version,") && csv.lines().count() == 2, "{csv}");
    assert!(csv.lines().next().unwrap().contains("mean_kl"));
    let rows = tqc!("eval", "list", "--db", &db, "--run", "1", "--export", "csv").expect(0).stdout;
    let run = tqc!("eval", "list", "--db", &db, "--run", "1", "--json").expect(0).json();
    assert_eq!(rows.lines().count() as u64, 1 + run["run"]["summary"]["tokens"].as_u64().unwrap());
    assert_eq!(run["sequences"].as_array().unwrap().len(), 6);
    tqc!("eval", "list", "--db", &db, "--run", "9").expect(2);
    tqc!("eval", "list", "--db", &db, "--export", "csv", "--json").expect(2);
    // A name that SQLite has a meaning for is a file all the same.
    let mut memory =
        command(args!["eval", "kl", "--teacher", place.path("dump"), demo(), "--db", ":memory:"]);
    memory.current_dir(place.dir.path());
    finish(memory).expect(0);
    assert!(place.path(":memory:").is_file());
}
