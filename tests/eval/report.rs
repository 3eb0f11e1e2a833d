//! `tqc report`: what is on the page, that nothing in a database gets out of its place, and where it may be written.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tqc::digest::Digest;
use tqc::eval::db::{Db, Document, Item, Key};
use tqc::eval::identity::{Class, Identity};
use tqc::eval::kl::Position;
use tqc::report::{collect, is_page, page};

use crate::common::*;
use crate::tqc;

/// Names that want out of their place.
const HOSTILE: [&str; 4] = [
    "</script><img src=x onerror=alert(1)>",
    "\"><svg/onload=alert(2)>&amp;",
    "gpj.\u{202e}exe\u{1b}[31m\u{0}",
    "' onmouseover='alert(3)",
];

fn model(name: &str, bits: f64) -> Identity {
    let class = |class: &str, storage: &str, bytes: u64| Class {
        class: class.to_owned(),
        storage: storage.to_owned(),
        modules: 3,
        weights: 1000,
        bytes,
    };
    Identity {
        digest: Digest::of(format!("{name} {bits}").as_bytes()),
        kind: if bits < 16.0 { "artifact" } else { "checkpoint" }.to_owned(),
        name: name.to_owned(),
        model_type: Some("qwen3_5".to_owned()),
        record: match bits < 16.0 {
            true => {
                let given = json!([
                    [format!("m.layers.0.{name}"), name, 10, 5],
                    ["m.layers.1.q", "affine-4g64", 10, 6],
                    ["lm_head", "affine-8g64", 10, 11],
                    "no row",
                    [1, 2],
                    ["m", "m", 0, 1]
                ]);
                let arm = |kl: f64| json!({ "mean_kl": kl, "standard_error": kl, "bits_per_weight": bits, "top1": 0.5 });
                json!({ "recipe": { "name": name, "sha256": Digest::of(b"r") }, "stages": ["ingest", "quantize"],
                        "calibration": { "name": name, "from": name, "text": { "packing": name, "context": "?" },
                                         "modules": { "damped": 3, "loss": name }, "encoders": { name: 3 } },
                        "allocation": { "method": name, "given": given, "control": [], "measured": true },
                        "compared": { "text": name, "chosen": arm(0.25 / bits), "even": arm(0.5 / bits),
                                      "difference": -0.25 / bits, "standard_error": null, "wins": bits > 3.0 } })
            }
            false => Value::Null,
        },
        tokenizer: None,
        weights: 4000,
        bytes: (bits * 500.0) as u64,
        bits_per_weight: bits,
        classes: vec![class("mlp", "affine-4 g64", (bits * 300.0) as u64), class("embedding", name, 100)],
    }
}

/// The numbers of a KL run over `documents`; `extra` is put over them.
fn kl_summary(mean: f64, extra: Value) -> Value {
    let bucket =
        |from: f64, to: f64| json!({ "from": from, "to": to, "tokens": 8, "mean_kl": mean, "share": 0.5 });
    let mut summary = json!({
        "mean_kl": mean, "ci95": [0.9 * mean, 1.1 * mean], "top1_agreement": 0.97, "teacher_ppl": 5.5,
        "candidate_ppl": 5.6, "tokens": 16, "documents": 4, "non_finite": 0, "noise_floor": 1e-5,
        "by_position": [bucket(0.0, 1.0), bucket(1.0, 4.0)], "by_confidence": [bucket(0.0, 0.1), bucket(0.99, 1.0)],
        "layers": null, "worst": [],
    });
    for (key, value) in extra.as_object().unwrap() {
        summary[key] = value.clone();
    }
    summary
}

fn documents(mean: f32) -> Vec<Document> {
    let document = |i: usize| {
        let factors = [0.0, 1e-4, 0.5, 3.5 - 0.1 * i as f32];
        let position = |factor: f32| Position { kl: mean * factor, confidence: 0.5, ..Position::NOT_FINITE };
        Document { sequence: i, document: i, positions: factors.map(position).to_vec() }
    };
    (0..4).map(document).collect()
}

struct Bench {
    db: Db,
}

impl Bench {
    fn new(path: &Path) -> Self {
        Self { db: Db::create(path).unwrap() }
    }

    /// Begins a run.
    fn begin(&self, instrument: &'static str, model: &Identity, subject: Value, settings: Value) -> i64 {
        let key = Key { instrument, version: 1, model: model.digest, subject, settings };
        self.db.begin(&key, model, true).unwrap().id
    }

    fn kl(&self, model: &Identity, dump: &str, path: &str, mean: f64, extra: Value) {
        let settings = json!({ "path": path, "precision": "exact" });
        let run = self.begin("kl", model, json!({ "dump": Digest::of(dump.as_bytes()) }), settings);
        documents(mean as f32).iter().for_each(|document| self.db.put_document(run, document).unwrap());
        self.db.finish(run, &kl_summary(mean, extra), 1.0).unwrap();
    }

    fn tasks(&self, model: &Identity, suites: &[&str], right: u64) {
        let about = |suite: &&str| {
            json!({ "suite": suite, "sha256": Digest::of(suite.as_bytes()),
                                           "frames": ["raw"], "settings": { "max_tokens": 64 } })
        };
        let subject = json!({ "suites": suites.iter().map(about).collect::<Vec<_>>() });
        let run = self.begin("tasks", model, subject, json!({ "precision": "exact", "limit": null }));
        let mut results = Vec::new();
        for suite in suites {
            for i in 0..20 {
                let (suite, frame, item) = ((*suite).to_owned(), "raw".to_owned(), format!("{i:02}"));
                let item = Item { suite, frame, item, correct: Some(i < right), detail: json!({}) };
                self.db.put_item(run, &item).unwrap();
            }
            results.push(json!({ "suite": suite, "frame": "raw", "items": 20, "correct": right,
                                 "accuracy": right as f64 / 20.0, "generative": { "empty": 7, "loops": 2 } }));
        }
        self.db.finish(run, &json!({ "results": results, "headline": "x" }), 1.0).unwrap();
    }

    fn stop(&self, model: &Identity, pass: bool) {
        let run = self.begin("stop", model, json!({ "teacher": "t" }), json!({}));
        let line = json!({ "what": "empty answers", "count": 3, "of": 40, "value": 0.075, "interval": [0.02, 0.2],
                           "limit": 0.01, "pass": pass });
        let frame = json!({ "frame": "chat", "cases": 40, "ends": 38, "teacher": { "start_p_end": 0.001 },
                            "candidate": { "start_p_end": 0.25, "empty": 3 }, "gate": [line] });
        let headline = if pass { "pass" } else { "FAIL: empty answers (chat)" };
        self.db.finish(run, &json!({ "pass": pass, "headline": headline, "frames": [frame] }), 1.0).unwrap();
    }
}

/// Six models, two dumps, all instruments, hostile names everywhere, an interrupted run, a repeated one.
fn fill(path: &Path) -> Vec<Identity> {
    let bench = Bench::new(path);
    let mut models = vec![model("teacher", 16.0), model("twin", 4.5), model("twin", 4.25)];
    models.extend(HOSTILE.iter().zip([8.0, 3.0, 2.5, 2.0]).map(|(name, bits)| model(name, bits)));
    for (i, model) in models.iter().enumerate() {
        let mean = if i == 0 { 0.0 } else { 0.4 / model.bits_per_weight.powi(2) };
        let layers = json!([{ "layer": 0, "mean_kl": 0.0, "standard_error": null },
                            { "layer": 1, "mean_kl": mean, "standard_error": 0.1 * mean }]);
        let worst = json!([{ "document": 1, "line": 2, "position": 3, "kl": 9.5, "context": HOSTILE[0],
                             "next": null, "teacher": ["<b>", 0.5], "candidate": HOSTILE[2] }]);
        bench.kl(model, "first", "streamed", mean, json!({ "layers": layers, "worst": worst }));
    }
    // Of another dump, on another path, without an interval, and of a version that says little.
    bench.kl(&models[1], "second", "streamed", 0.5, json!({ "ci95": null }));
    bench.kl(&models[2], "second", "streamed", 0.25, json!({ "noise_floor": 0.0 }));
    bench.kl(
        &models[1],
        "first",
        "decode",
        0.125,
        json!({ "by_position": "?", "worst": { "a": 1 }, "mean_kl": null }),
    );
    for (model, right) in models.iter().zip([20, 19, 18, 17, 16, 15, 2]) {
        bench.tasks(model, &[HOSTILE[1]], right);
    }
    bench.stop(&models[1], true);
    bench.stop(&models[6], false);
    let run = bench.begin("stop", &models[3], json!(HOSTILE[0]), json!({ HOSTILE[3]: HOSTILE[2] }));
    bench.db.finish(run, &json!(["of", "another", "version"]), 1.0).unwrap();
    bench.begin("kl", &models[4], json!({ "dump": HOSTILE[1] }), json!(null));
    bench.tasks(&models[0], &[HOSTILE[1]], 20);
    // With another suite beside, but it is the same suite.
    bench.tasks(&models[6], &["other", HOSTILE[1]], 3);
    models
}

fn page_of(db: &Path) -> String {
    page(&collect(&Db::open(db).unwrap()).unwrap())
}

/// The start of a tag: its name, whether it closes, whether it is empty.
fn tags(html: &str) -> Vec<(String, bool, bool)> {
    let mut tags = Vec::new();
    let mut rest = html.strip_prefix("<!DOCTYPE html>").expect("the page begins with its type");
    while let Some(at) = rest.find('<') {
        let end = at + rest[at..].find('>').expect("a tag ends");
        let inside = &rest[at + 1..end];
        let name: String =
            inside.trim_start_matches('/').chars().take_while(|c| c.is_ascii_alphanumeric()).collect();
        assert!(!name.is_empty(), "`<{inside}>` is no tag");
        let attributes = inside.trim_start_matches('/').strip_prefix(name.as_str()).unwrap();
        assert_eq!(attributes.matches('"').count() % 2, 0, "quotes of `<{inside}>`");
        assert!(!attributes.contains('<'), "`<{inside}>`");
        tags.push((name, inside.starts_with('/'), inside.ends_with('/')));
        rest = &rest[end + 1..];
    }
    tags
}

fn text_between<'a>(html: &'a str, from: &str, to: &str) -> &'a str {
    let (_, rest) = html.split_once(from).unwrap_or_else(|| panic!("no `{from}`"));
    rest.split_once(to).unwrap_or_else(|| panic!("no `{to}` after `{from}`")).0
}

#[test]
fn every_tag_is_closed_every_id_is_there_once_and_nothing_is_fetched_or_run() {
    let dir = temp();
    let path = dir.path().join("eval.db");
    fill(&path);
    let html = page_of(&path);
    let mut open = Vec::new();
    for (name, closes, empty) in tags(&html) {
        match (closes, empty) {
            (false, false) => open.push(name),
            (true, false) => assert_eq!(open.pop(), Some(name), "closed in the order of opening"),
            _ => {}
        }
    }
    assert_eq!(open, Vec::<String>::new());
    for pair in html.split('&').skip(1) {
        let known = ["amp;", "lt;", "gt;", "quot;", "#39;"];
        assert!(known.iter().any(|entity| pair.starts_with(entity)), "&{}", &pair[..pair.len().min(10)]);
    }
    for never in
        ["http:", "https:", "<script", "javascript:", "<img", "<iframe", "onerror=alert(1)>", "<svg/", "url("]
    {
        assert!(!html.contains(never), "{never}");
    }
    assert!(!html.contains(|c: char| c.is_control() && c != '\n'), "control characters are shown by number");
    assert!(!html.contains('\u{202e}'), "nothing turns the text around");
    let mut ids: Vec<&str> =
        html.split(" id=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    let targets = html.split("href=\"#").skip(1).map(|rest| rest.split('"').next().unwrap());
    for target in targets {
        assert!(ids.contains(&target), "#{target} leads nowhere");
    }
    ids.sort_unstable();
    let all = ids.len();
    ids.dedup();
    assert_eq!(ids.len(), all, "ids are unique");
    let headings: Vec<u32> =
        html.match_indices("<h").filter_map(|(at, _)| html[at + 2..].chars().next()?.to_digit(10)).collect();
    assert_eq!(headings[0], 1);
    assert!(headings.windows(2).all(|pair| pair[1] <= pair[0] + 1 && pair[1] > 1), "{headings:?}");
}

#[test]
fn hostile_names_are_there_as_text() {
    let dir = temp();
    let path = dir.path().join("eval.db");
    fill(&path);
    let html = page_of(&path);
    for shown in [
        "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;",
        "&quot;&gt;&lt;svg/onload=alert(2)&gt;&amp;amp;",
        "gpj.\\u{202e}exe\\u{1b}[31m\\u{0}",
        "&#39; onmouseover=&#39;alert(3)",
    ] {
        assert!(html.contains(shown), "{shown}");
    }
}

#[test]
fn every_model_is_in_every_table_that_it_belongs_to() {
    let dir = temp();
    let path = dir.path().join("eval.db");
    let models = fill(&path);
    let data = collect(&Db::open(&path).unwrap()).unwrap();
    let bits: Vec<f64> = data.models.iter().map(|model| model.identity.bits_per_weight).collect();
    assert_eq!(bits, [16.0, 8.0, 4.5, 4.25, 3.0, 2.5, 2.0], "the most bits first");
    let html = page(&data);
    let rows = |table: &str| {
        let body = text_between(text_between(&html, table, "</table>"), "<tbody>", "</tbody>");
        body.matches("<tr>").count()
    };
    assert_eq!(rows("<caption>All models"), models.len());
    let first = text_between(&html, "<h3><span class=\"group\">A</span> dump", "<h3>");
    for table in ["<caption>Mean KL(teacher", "<caption>Quantiles"] {
        let body = text_between(first, table, "</table>");
        for number in 1..=models.len() {
            let name = format!("<span class=\"no\">{number}</span>");
            assert_eq!(body.matches(&name).count(), 1, "{table}: {name}");
        }
    }
    // Two models have the same name, so their digests tell them apart.
    for twin in &models[1..3] {
        assert!(html.contains(&format!("twin {}", twin.digest.short())));
    }
    assert_eq!(data.kl.iter().map(|group| group.entries.len()).collect::<Vec<_>>(), [7, 2, 1]);
    assert!(html.contains("in the tables but in no chart: 1 teacher."), "the teacher's KL is 0");
    let tasks = text_between(&html, "<section id=\"tasks\"", "</section>");
    assert!(
        tasks.contains("95.0 %") && tasks.contains("[76.4, 99.1] %"),
        "Wilson's interval of 19 of 20, by scipy"
    );
    assert!(tasks.contains("Compared with 1 teacher, which has the most bits per weight."));
    assert!(tasks.contains("<span class=\"word worse\">worse</span>"), "2 of 20 against 20 of 20");
    let stop = text_between(&html, "<section id=\"stop\"", "</section>");
    assert!(
        stop.contains("<td>empty answers (chat)</td>")
            && stop.contains("7.5 %")
            && stop.contains("[2.0, 20.0] %")
    );
    assert_eq!(stop.matches("<details>").count(), 2, "a gate for each model of the probe");
    assert!(html.contains("Runs that did not end: 1"));
    let ended = text_between(&html, "Runs that ended: ", "</details>");
    for (shared, column) in [("One program for all: ", "program"), ("One machine for all: ", "machine")] {
        assert_eq!(ended.matches(shared).count(), 1, "{shared}");
        assert!(!ended.contains(&format!("<th scope=\"col\">{column}</th>")), "{column}");
    }
    assert!(html.contains("1 of these runs are not shown above"), "the repeated run");
}

#[test]
fn the_same_database_gives_the_same_bytes() {
    let dir = temp();
    let path = dir.path().join("eval.db");
    fill(&path);
    let first = page_of(&path);
    assert_eq!(first, page_of(&path));
    assert!(is_page(first.as_bytes()) && !is_page(b"<!DOCTYPE html><html></html>") && !is_page(b""));
}

#[test]
fn results_that_are_not_comparable_are_in_charts_of_their_own() {
    let dir = temp();
    let path = dir.path().join("eval.db");
    fill(&path);
    let data = collect(&Db::open(&path).unwrap()).unwrap();
    let settings: Vec<(&str, usize)> =
        data.kl.iter().map(|group| (group.settings.as_str(), group.entries.len())).collect();
    let (streamed, decode) = ("path streamed, precision exact", "path decode, precision exact");
    assert_eq!(settings, [(streamed, 7), (streamed, 2), (decode, 1)]);
    assert_ne!(data.kl[0].subject, data.kl[1].subject);
    let suites: Vec<(&str, usize)> =
        data.tasks.iter().map(|group| (group.suite.as_str(), group.entries.len())).collect();
    assert_eq!(suites, [(HOSTILE[1], 7), ("other", 1)], "a suite is the same whatever was run with it");
    assert_eq!(data.tasks[0].entries[6].correct, Some(3), "the latest run counts");
    let html = page(&data);
    for (letter, drawn) in [("A", 6), ("B", 2)] {
        let chart = text_between(&html, &format!("<title id=\"kl-{letter}-bits-t\">"), "</svg>");
        assert_eq!(chart.matches("bits per weight, ").count(), drawn, "{letter}");
    }
    assert!(!html.contains("kl-C-bits"), "a run without a mean is in the table alone");
}

#[test]
fn the_command_writes_whole_pages_and_only_over_its_own() {
    let dir = temp();
    let at = |name: &str| dir.path().join(name);
    let (db, out) = (at("eval.db"), at("report.html"));
    let missing = tqc!("report", "--db", db, "-o", out).expect(2);
    assert!(
        missing.stderr.contains("eval.db` ") || missing.stderr.contains("there is no"),
        "{}",
        missing.stderr
    );
    drop(Db::create(&db).unwrap());
    let empty = tqc!("report", "--db", db, "-o", out).expect(2);
    assert!(empty.stderr.contains("holds no results") && empty.stderr.contains("help:"), "{}", empty.stderr);
    assert!(!out.exists());

    fill(&db);
    let written = tqc!("report", "--db", db, "-o", out, "--json").expect(0).json();
    let bytes = fs::metadata(&out).unwrap().len();
    let path = out.to_str().unwrap();
    assert_eq!(written, json!({ "path": path, "bytes": bytes, "models": 7, "runs": 23 }));
    let first = fs::read(&out).unwrap();
    tqc!("report", "--db", db, "-o", out).expect(0);
    assert_eq!(fs::read(&out).unwrap(), first);

    let mine = at("mine.html");
    fs::write(&mine, "<!DOCTYPE html><p>my own page</p>").unwrap();
    let refused = tqc!("report", "--db", db, "-o", mine).expect(2);
    assert!(refused.stderr.contains("mine.html` is there already"), "{}", refused.stderr);
    assert!(fs::read_to_string(&mine).unwrap().contains("my own page"));
    tqc!("report", "--db", db, "-o", mine, "--force").expect(0);
    assert_eq!(fs::read(&mine).unwrap(), first);
    tqc!("report", "--db", db, "-o", dir.path()).expect(2);
    let results = fs::read(&db).unwrap();
    let refused = tqc!("report", "--db", db, "-o", db, "--force").expect(2);
    assert!(refused.stderr.contains("is the database that the page is made of"), "{}", refused.stderr);
    assert!(fs::read(&db).unwrap() == results);
    tqc!("report", "--db", db, "-o", at("absent").join("report.html")).expect(4);
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name.to_string_lossy().ends_with(".new")), "{names:?}");
}

/// Builds a fixture with a calibration and a budget, whose files have hostile names; measures it, and makes the page.
fn built_page(dir: &Path) -> (Value, String) {
    let line =
        |i: usize| json!({ "text": format!("the river ran {i} times to the mill and back; ").repeat(6) });
    let lines = |count: usize| (0..count).map(|i| line(i).to_string()).collect::<Vec<_>>().join("\n");
    fs::write(dir.join("<b>&\"text.jsonl"), lines(6)).unwrap();
    fs::write(dir.join("<i>held.jsonl"), lines(4)).unwrap();
    let start = "[default]\ncodec = { affine = { bits = 4, group = 32 } }\nencoder = \"gptq\"\n[calibration]\n\
                 text = '<b>&\"text.jsonl'\nrows = 4\ncontext = 24\n";
    let source = fixture("llama-untied");
    let path = recipe(dir, start);
    let plan = tqc!("plan", path, "--source", source, "--json").expect(0).json();
    // In mlx-lm's form: modules of the second layer matter most.
    let modules = plan["modules"].as_array().unwrap().iter().filter(|module| module["role"] == "linear");
    let names = modules.map(|module| module["module"].as_str().unwrap().to_owned());
    let costs: Vec<(String, f64)> =
        names.map(|name| (name.clone(), if name.contains("layers.1.") { 64.0 } else { 1.0 })).collect();
    write_json(&dir.join("<script>costs.json"), &json!(costs));
    let budget =
        "[budget]\nbits-per-weight = 7.0\nsensitivity = '<script>costs.json'\ntext = '<i>held.jsonl'\n";
    let path = recipe(dir, &format!("{start}{budget}"));
    let artifact = dir.join("artifact");
    tqc!("build", path, "--source", source, "-o", artifact).expect(0);
    let (dump, db, out) = (dir.join("dump"), dir.join("eval.db"), dir.join("report.html"));
    tqc!("eval", "dump", source, "--text", dir.join("<i>held.jsonl"), "-o", dump).expect(0);
    tqc!("eval", "kl", "--teacher", dump, "--db", db, artifact).expect(0);
    tqc!("report", "--db", db, "-o", out).expect(0);
    (read_json(&artifact.join("provenance.json")), fs::read_to_string(out).unwrap())
}

#[test]
fn an_artifact_shows_its_calibration_its_budget_and_how_the_choice_compares() {
    let dir = temp();
    let (record, html) = built_page(dir.path());
    for never in ["<script", "<i>", "<b>"] {
        assert!(!html.contains(never), "{never}");
    }
    let part = text_between(&html, "<section id=\"choices\"", "</section>");
    let table = |caption: &str| text_between(text_between(part, caption, "</table>"), "<tbody>", "</tbody>");
    let cells = |row: &str| -> Vec<String> {
        let cells = row.split("</td>").filter_map(|cell| cell.rsplit_once('>').or(Some(("", cell))));
        cells.map(|(_, text)| text.to_owned()).filter(|text| !text.trim().is_empty()).collect()
    };
    let number = |value: &Value| value.as_f64().unwrap();

    // Means over modules, again.
    let calibration = &record["calibration"];
    let modules = calibration["modules"].as_array().unwrap();
    let mean = |of: &dyn Fn(&Value) -> f64| modules.iter().map(of).sum::<f64>() / modules.len() as f64;
    let nearest = mean(&|module| number(&module["nearest"]));
    let loss = mean(&|module| number(&module["loss"]));
    let ratio = mean(&|module| number(&module["loss"]) / number(&module["nearest"]));
    let shown = table("<caption>What errors were weighed by");
    assert!(shown.contains("&lt;b&gt;&amp;&quot;text.jsonl<br/>documents, at most 24 a row"), "{shown}");
    let fell = modules.iter().filter(|module| number(&module["fallbacks"]) > 0.0).count();
    let first = calibration["damping"].as_f64().unwrap();
    let damped =
        modules.iter().filter(|module| module["damping"].as_f64().is_some_and(|d| d > first)).count();
    let quantized: std::collections::BTreeSet<&str> = record["outputs"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|output| output["encoder"] == "gptq")
        .map(|output| output["module"].as_str().unwrap())
        .collect();
    assert!(shown.contains(&format!("gptq {}", quantized.len())), "{shown}");
    let tokens = calibration["text"]["tokens"].to_string();
    let n = modules.len().to_string();
    let expected = [
        "4",
        &tokens,
        "unrounded",
        &n,
        &n,
        &damped.to_string(),
        &fell.to_string(),
        "0",
        &format!("{nearest:.3e}"),
        &format!("{loss:.3e}"),
        &format!("{ratio:.3}"),
    ];
    let row = cells(shown);
    assert_eq!(row[row.len() - expected.len()..], expected.map(str::to_owned), "{shown}");

    let allocation = &record["allocation"];
    let shown = table("<caption>What budgets were spent on");
    assert!(shown.contains("&lt;script&gt;costs.json<br/>mlx-lm") && shown.contains(">exact<"), "{shown}");
    let thin = |n: &Value| {
        let digits = n.to_string();
        let (left, right) = digits.split_at(digits.len() - 3);
        format!("{left}\u{2009}{right} B")
    };
    assert!(shown.contains(&thin(&allocation["budget_bytes"])), "{shown}");
    assert!(shown.contains(&thin(&allocation["weight_file_bytes"])), "{shown}");
    // What each module got, layer by layer.
    let mut given = std::collections::BTreeMap::<&str, usize>::new();
    let by_layer = table("what modules got, layer by layer");
    let rows: Vec<&str> = by_layer.split("</tr>").filter(|row| row.contains("<td")).collect();
    let source = record["source"]["tensors"].as_array().unwrap();
    for output in record["outputs"].as_array().unwrap() {
        let name = output["name"].as_str().unwrap();
        let Some(module) = name.strip_suffix(".weight") else { continue };
        let from =
            source.iter().find(|tensor| tensor["outputs"].to_string().contains(&format!("\"{name}\"")));
        if from.unwrap()["reason"] != "budget" {
            continue;
        }
        let codec = output["codec"].as_str().unwrap();
        *given.entry(codec).or_default() += 1;
        if let Some((layer, part)) = module.split_once(".layers.").and_then(|(_, rest)| rest.split_once('.'))
        {
            let head = text_between(
                text_between(part_table(part_of(&html)), "<thead>", "</thead>"),
                "<tr>",
                "</tr>",
            );
            let column = head.split("</th>").position(|cell| cell.ends_with(&format!(">{part}"))).unwrap();
            let row = rows.iter().find(|row| row.contains(&format!(">{layer}</th>"))).unwrap();
            let cell = row.split("<td").nth(column).unwrap();
            assert!(
                cell.contains(&format!(">{}<", codec.strip_prefix("affine-").unwrap())),
                "{module}: {cell}"
            );
        }
    }
    assert!(given.len() > 1, "the budget decided nothing: {given:?}");
    let shown = table("<caption>What budgets were spent on");
    for (codec, n) in &given {
        assert!(shown.contains(&format!("{n} {codec}")), "{n} {codec}: {shown}");
    }
    assert!(part.contains("id=\"choices-layers-t\"") && part.contains("id=\"choices-pairs-t\""));

    let compared = &record["compared"];
    let shown = table("<caption>The mean KL of what was chosen less");
    let (difference, error) = (number(&compared["difference"]), number(&compared["standard_error"]));
    assert!(shown.contains("&lt;i&gt;held.jsonl"), "{shown}");
    assert!(shown.contains(&format!(">{difference:+.2e}<")), "{shown}");
    let around = format!("[{:+.2e}, {:+.2e}]", difference - 1.96 * error, difference + 1.96 * error);
    assert!(shown.contains(&around), "{around}: {shown}");
    let wins = compared["wins"].as_bool().unwrap();
    assert_eq!(shown.contains("loses"), !wins, "{shown}");
    let shown = table("<caption>Both choices on text");
    for arm in ["chosen", "even"] {
        let row = shown.split("</tr>").find(|row| row.contains(&format!("<td>{arm}</td>"))).unwrap();
        for cell in [
            format!(">{:.3}<", number(&compared[arm]["bits_per_weight"])),
            format!(">{:.1} %<", 100.0 * number(&compared[arm]["top1"])),
            format!(">{}<", compared[arm]["stops_at_once"]),
            format!(">{}<", compared["prompts"]),
        ] {
            assert!(row.contains(&cell), "{arm}: {cell} in {row}");
        }
    }
}

fn part_of(html: &str) -> &str {
    text_between(html, "<section id=\"choices\"", "</section>")
}

/// The table of layers, its head included.
fn part_table(part: &str) -> &str {
    text_between(part, "what modules got, layer by layer", "</table>")
}
