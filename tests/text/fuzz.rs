//! Mutations of real text files, and properties of streamed text: never a panic, never without end.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::{Value, json};
use tqc::text::{
    ChatTemplate, Conversation, EndTokens, GenerationConfig, Json, StopMatcher, Streamer, Tokenizer,
};

/// A minute would be a hang; most take milliseconds.
const LONG: Duration = Duration::from_secs(60);

fn fixture(name: &str, file: &str) -> String {
    fs::read_to_string(Path::new("tests/fixtures").join(name).join(file)).unwrap()
}

/// Values that a file might hold by mistake or by malice, the names of the tokenizers' parts among them.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop::sample::select(vec![
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1.5),
        json!(1u64 << 40),
        json!(u64::MAX),
        json!(1e300),
        json!(""),
        json!("é"),
        json!("a"),
        json!(" "),
        json!("\u{2581}"),
        json!("<|im_end|>"),
        json!([]),
        json!({}),
        json!("BPE"),
        json!("Unigram"),
        json!("WordPiece"),
        json!("WordLevel"),
        json!({"type": "ByteLevel"}),
        json!({"type": "Sequence", "normalizers": [], "pretokenizers": [], "decoders": [], "processors": []}),
        json!({"type": "Replace", "pattern": {"String": ""}, "content": "xx"}),
        json!({"type": "Replace", "pattern": {"Regex": "(a*)*$"}, "content": ""}),
        json!({"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": true}),
        json!({"type": "Split", "pattern": {"Regex": ""}, "behavior": "MergedWithNext", "invert": false}),
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
        json!({"type": "Strip", "content": " ", "start": 3, "stop": 3}),
        json!({"type": "Strip", "strip_left": true, "strip_right": true}),
        json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        json!({"type": "Prepend", "prepend": "é"}),
        json!({"type": "NFKC"}),
        json!({"type": "StripAccents"}),
        json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": true, "lowercase": true}),
        json!({"type": "FixedLength", "length": 0}),
        json!({"type": "Digits", "individual_digits": true}),
        json!({"type": "CharDelimiterSplit", "delimiter": "a"}),
        json!({"type": "UnicodeScripts"}),
        json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "none", "type_id": 0}}], "pair": [], "special_tokens": {}}),
        json!({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 9}}], "pair": [], "special_tokens": {"x": {"id": "x", "ids": [1, 2], "tokens": []}}}),
        json!({"type": "BertProcessing", "sep": ["x", 1], "cls": ["y", 99999]}),
        json!({"type": "RobertaProcessing", "sep": ["x", 1], "cls": ["y", 2], "trim_offsets": true, "add_prefix_space": true}),
        json!({"type": "Unigram", "unk_id": 7, "vocab": [["a", -1.0], ["", 0.0]], "byte_fallback": true}),
        json!({"type": "Unigram", "unk_id": null, "vocab": [], "byte_fallback": false}),
        json!({"type": "WordPiece", "unk_token": "no", "continuing_subword_prefix": "##", "max_input_chars_per_word": 1, "vocab": {"a": 0}}),
        json!({"type": "WordLevel", "vocab": {"a": 4294967295u32}, "unk_token": "zz"}),
        json!({"type": "BPE", "vocab": {"a": 0, "b": 0, "ab": 4294967295u32}, "merges": [["a", "b"]], "unk_token": "q", "byte_fallback": true}),
        json!({"type": "BPE", "vocab": {"a": 0, "": 1, "a ": 5}, "merges": ["a  "], "continuing_subword_prefix": "éé", "end_of_word_suffix": "</w>"}),
    ]);
    leaf.prop_recursive(2, 6, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            ("[a-z_]{1,9}", inner).prop_map(|(key, value)| json!({key: value})),
        ]
    })
}

/// Replaces the value at the `at`-th place of a document, counted in writing order, or removes it.
fn change(document: &mut Value, at: &mut usize, by: &Option<Value>) -> bool {
    let here = |slot: &mut Value, at: &mut usize| match at.checked_sub(1) {
        None => {
            *slot = by.clone().unwrap_or(Value::Null);
            true
        }
        Some(less) => {
            *at = less;
            change(slot, at, by)
        }
    };
    match document {
        Value::Object(map) => {
            let removed = if by.is_none() && *at < map.len() { map.keys().nth(*at).cloned() } else { None };
            match removed {
                Some(key) => map.remove(&key).is_some(),
                None => map.values_mut().any(|slot| here(slot, at)),
            }
        }
        // The first few of a long list stand for the rest.
        Value::Array(list) => list.iter_mut().take(4).any(|slot| here(slot, at)),
        _ => false,
    }
}

/// Uses every part of a tokenizer that opens.
fn use_tokenizer(folder: &Path) -> Result<(), TestCaseError> {
    let start = Instant::now();
    let tokenizer = Tokenizer::open(folder);
    let _ = EndTokens::read(folder, tokenizer.as_ref().ok(), 600);
    let _ = GenerationConfig::read(folder);
    let _ = ChatTemplate::open(folder);
    if let Ok(tokenizer) = tokenizer {
        for text in ["", "a b\n", "é今🙂 <|im_end|>x", &"ab ".repeat(300)] {
            for special in [false, true] {
                let Ok(ids) = tokenizer.encode(text, special) else { continue };
                for skip in [false, true] {
                    let Ok(whole) = tokenizer.decode(&ids, skip) else { continue };
                    let mut streamer = Streamer::new(&tokenizer, skip);
                    let mut streamed = String::new();
                    for id in &ids {
                        streamed.push_str(streamer.push(*id).expect("as in `decode`"));
                    }
                    streamed.push_str(&streamer.finish().expect("as in `decode`"));
                    prop_assert_eq!(streamed, whole);
                }
            }
        }
        let _ = (tokenizer.vocab_size(), tokenizer.token(u32::MAX), tokenizer.id(""));
    }
    prop_assert!(start.elapsed() < LONG);
    Ok(())
}

const FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"];

/// Sources that real models use: the golden ones and the fixtures'.
fn sources() -> &'static [String] {
    static SOURCES: OnceLock<Vec<String>> = OnceLock::new();
    SOURCES.get_or_init(|| {
        let mut sources = vec![fixture("qwen3_5", "chat_template.jinja")];
        for file in ["constructs", "families"] {
            let text = fs::read_to_string(format!("goldens/templates/{file}.json")).unwrap();
            let golden: Value = serde_json::from_str(&text).unwrap();
            let templates = golden["templates"].as_object().unwrap().values();
            sources.extend(templates.map(|source| source.as_str().unwrap().to_owned()));
        }
        sources
    })
}

/// What is done to a text at one place.
#[derive(Debug, Clone)]
enum Edit {
    Cut(usize),
    Put(&'static str),
    Move(usize, usize),
}

fn edit() -> impl Strategy<Value = (usize, Edit)> {
    let puts = vec![
        "{%",
        "%}",
        "{{",
        "}}",
        "{#",
        "#}",
        "-",
        "+",
        "'",
        "\"",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "|",
        ".",
        ",",
        ":",
        "~",
        " if ",
        " else ",
        " for x in messages ",
        " in ",
        " not ",
        " is ",
        " and ",
        "loop",
        "ns",
        "messages",
        "none",
        "\\",
        "\n",
        "é",
        "[::-1]",
        "[1:]",
        "| tojson",
        "| length",
        "| trim",
        "| items",
        "| list",
        ".split('')",
        " * 9999",
        "{% break %}",
        "{% endfor %}",
        "{% endif %}",
        "range(99999)",
    ];
    let edit = prop_oneof![
        (1usize..40).prop_map(Edit::Cut),
        prop::sample::select(puts).prop_map(Edit::Put),
        (0usize..10_000, 1usize..80).prop_map(|(from, length)| Edit::Move(from, length)),
    ];
    (0usize..10_000, edit)
}

fn apply(text: &mut Vec<char>, (at, edit): (usize, Edit)) {
    let at = at % (text.len() + 1);
    match edit {
        Edit::Cut(length) => drop(text.drain(at..(at + length).min(text.len()))),
        Edit::Put(new) => drop(text.splice(at..at, new.chars()).count()),
        Edit::Move(from, length) => {
            let from = from % (text.len() + 1);
            let part = text[from..(from + length).min(text.len())].to_vec();
            text.splice(at..at, part);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_files_are_refused_or_work(
        name in prop::sample::select(vec!["qwen3_5-tied", "mistral", "llama-tied"]),
        changes in prop::collection::vec((0..FILES.len(), 0usize..60, prop::option::of(any_value())), 1..3),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut documents: Vec<Value> =
            FILES.iter().map(|file| serde_json::from_str(&fixture(name, file)).unwrap()).collect();
        for (file, mut at, by) in changes {
            change(&mut documents[file], &mut at, &by);
        }
        for (file, document) in FILES.iter().zip(&documents) {
            fs::write(folder.path().join(file), document.to_string()).unwrap();
        }
        use_tokenizer(folder.path())?;
    }

    #[test]
    fn cut_and_bent_files_are_refused_or_work(
        file in prop::sample::select(FILES.to_vec()),
        edits in prop::collection::vec(edit(), 1..4),
    ) {
        let folder = tempfile::tempdir().unwrap();
        for other in FILES {
            fs::write(folder.path().join(other), fixture("qwen3_5-tied", other)).unwrap();
        }
        let mut text: Vec<char> = fixture("qwen3_5-tied", file).chars().collect();
        edits.into_iter().for_each(|edit| apply(&mut text, edit));
        fs::write(folder.path().join(file), text.into_iter().collect::<String>()).unwrap();
        use_tokenizer(folder.path())?;
    }

    #[test]
    fn mutated_templates_render_or_are_refused(
        source in prop::sample::select(sources().to_vec()),
        edits in prop::collection::vec(edit(), 0..6),
        content in prop_oneof![any_value(), "\\PC{0,20}".prop_map(Value::from)],
        tools in prop::collection::vec(any_value(), 0..2),
    ) {
        let mut text: Vec<char> = source.chars().collect();
        edits.into_iter().for_each(|edit| apply(&mut text, edit));
        let source: String = text.into_iter().collect();
        let start = Instant::now();
        if let Ok(mut template) = ChatTemplate::new(Path::new("x.jinja"), &source, BTreeMap::new()) {
            template.set_deadline(Duration::from_secs(20));
            let message = json!({"role": "user", "content": content, "tool_calls": content});
            let mut conversation = Conversation::new(vec![Json::from(&message), Conversation::message("assistant", "a")]);
            conversation.tools = tools.iter().map(Json::from).collect();
            let _ = conversation.refuse_media();
            let _ = template.render(&conversation);
        }
        prop_assert!(start.elapsed() < LONG);
    }

    #[test]
    fn stops_are_found_where_a_search_finds_them(
        text in "[abc]{0,40}",
        stops in prop::collection::vec("[abc]{1,5}", 0..4),
        cuts in prop::collection::vec(0usize..41, 0..8),
    ) {
        let mut matcher = StopMatcher::new(&stops).unwrap();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
        cuts.push(text.len());
        cuts.sort_unstable();
        let (mut from, mut found) = (0, String::new());
        for cut in cuts {
            found.push_str(matcher.push(&text[from..cut]));
            from = cut;
            // What has been given can no longer become part of a stop string.
            for stop in &stops {
                prop_assert!(!found.contains(stop.as_str()));
            }
        }
        let stopped = matcher.stopped();
        found.push_str(&matcher.finish());
        // The first to be complete, and of those the longest.
        let first = (1..=text.len()).find_map(|end| {
            stops.iter().filter(|stop| text[..end].ends_with(stop.as_str())).map(|stop| end - stop.len()).min()
        });
        prop_assert_eq!(stopped, first.is_some());
        prop_assert_eq!(found, &text[..first.unwrap_or(text.len())]);
    }
}

#[test]
fn nothing_is_held_back_for_longer_than_it_must_be() {
    let mut matcher = StopMatcher::new(&["</s>", "\nUser:"]).unwrap();
    let mut given = Vec::new();
    for part in ["Hi<", "/b> <", "/s", "x\nUs", "ing", "\nUse", "r", ": no"] {
        given.push(matcher.push(part).to_owned());
    }
    assert_eq!(given, ["Hi", "</b> ", "", "</sx", "\nUsing", "", "", ""]);
    assert!(matcher.stopped());
    assert_eq!(matcher.push("more"), "");
    assert_eq!(matcher.finish(), "");
    assert!(StopMatcher::new(&[""]).is_err());

    let tokenizer = Tokenizer::open(Path::new("tests/fixtures/qwen3_5")).unwrap();
    let mut streamer = Streamer::new(&tokenizer, false);
    let pieces: Vec<String> = tokenizer
        .encode("é🙂a", false)
        .unwrap()
        .iter()
        .map(|id| streamer.push(*id).unwrap().to_owned())
        .collect();
    // Each character comes with its last byte.
    assert_eq!(pieces.concat(), "é🙂a");
    assert!(pieces.iter().all(|piece| piece.chars().count() <= 1), "{pieces:?}");
    assert_eq!(streamer.finish().unwrap(), "");
}
