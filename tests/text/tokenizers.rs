//! Tokenizers against `goldens/tokenizers`, which the Python package made.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use tqc::text::{ChatTemplate, Conversation, Json, Streamer, Tokenizer};

const NAMES: [&str; 7] =
    ["demo-qwen3_5", "llama-tied", "mistral", "qwen3", "qwen3_5", "qwen3_5-tied", "qwen3_5_moe"];

fn folder(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    match name {
        "demo-qwen3_5" => root.join("goldens/models").join(name),
        _ => root.join("tests/fixtures").join(name),
    }
}

fn golden<T: for<'a> Deserialize<'a>>(name: &str) -> T {
    serde_json::from_str(&fs::read_to_string(format!("goldens/tokenizers/{name}")).unwrap()).unwrap()
}

#[derive(Deserialize)]
struct Rows {
    texts: Vec<TextRow>,
    streams: Vec<StreamRow>,
}

#[derive(Deserialize)]
struct TextRow {
    ids: Vec<u32>,
    plain: Option<Vec<u32>>,
    decoded: Option<String>,
    skipped: Option<String>,
}

#[derive(Deserialize)]
struct StreamRow {
    ids: Vec<u32>,
    decoded: Option<String>,
    skipped: Option<String>,
}

/// The pieces of `ids`, one a token, and the rest.
fn stream(tokenizer: &Tokenizer, ids: &[u32], skip: bool) -> String {
    let mut streamer = Streamer::new(tokenizer, skip);
    let mut text = String::new();
    for id in ids {
        text.push_str(streamer.push(*id).unwrap());
    }
    text + &streamer.finish().unwrap()
}

fn check(name: &str, tokenizer: &Tokenizer, texts: &[String], rows: &Rows) {
    assert_eq!(texts.len(), rows.texts.len());
    let both =
        |ids: &[u32], decoded: &Option<String>, skipped: &Option<String>, what: &dyn std::fmt::Debug| {
            for (skip, expected) in [(false, decoded), (true, skipped)] {
                // Where the package itself fell over there is no answer to compare with.
                let Some(expected) = expected else { continue };
                let found = tokenizer.decode(ids, skip).unwrap();
                assert_eq!(&found, expected, "{name}: {what:?}, skip {skip}, {ids:?}");
                assert_eq!(stream(tokenizer, ids, skip), found, "{name}: streamed {ids:?}");
            }
        };
    for (text, row) in texts.iter().zip(&rows.texts) {
        assert_eq!(tokenizer.encode(text, true).unwrap(), row.ids, "{name}: {text:?}");
        let plain = row.plain.as_ref().unwrap_or(&row.ids);
        assert_eq!(&tokenizer.encode(text, false).unwrap(), plain, "{name}: {text:?}");
        both(&row.ids, &row.decoded, &row.skipped, text);
    }
    for row in &rows.streams {
        both(&row.ids, &row.decoded, &row.skipped, &"no text");
    }
}

#[test]
fn every_tokenizer_gives_the_ids_and_texts_of_the_python_package() {
    let texts: Vec<String> = golden("texts.json");
    for name in NAMES {
        check(name, &Tokenizer::open(&folder(name)).unwrap(), &texts, &golden(&format!("{name}.json")));
    }
}

#[derive(Deserialize)]
struct Synthetic {
    name: String,
    tokenizer: Value,
    inputs: Vec<String>,
    #[serde(flatten)]
    rows: Rows,
}

/// A folder with these files.
fn folder_with(files: &[(&str, String)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

#[test]
fn every_decoder_streams_what_it_decodes() {
    let cases: Vec<Synthetic> = golden("synthetic.json");
    assert!(cases.len() >= 13);
    for case in cases {
        let folder = folder_with(&[("tokenizer.json", case.tokenizer.to_string())]);
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        check(&case.name, &tokenizer, &case.inputs, &case.rows);
    }
}

#[derive(Deserialize)]
struct Wrapped {
    name: String,
    config: serde_json::Map<String, Value>,
    text: String,
    ids: Vec<u32>,
    plain: Vec<u32>,
    skipped: String,
}

#[test]
fn tokenizer_config_is_applied_as_transformers_does() {
    let cases: Vec<Wrapped> = golden("wrapped.json");
    for case in cases {
        let from = folder(&case.name);
        let mut config: Value =
            serde_json::from_str(&fs::read_to_string(from.join("tokenizer_config.json")).unwrap()).unwrap();
        config.as_object_mut().unwrap().extend(case.config.clone());
        let tokenizer = fs::read_to_string(from.join("tokenizer.json")).unwrap();
        let folder =
            folder_with(&[("tokenizer.json", tokenizer), ("tokenizer_config.json", config.to_string())]);
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        let what = format!("{} {:?}", case.name, case.config);
        assert_eq!(tokenizer.encode(&case.text, true).unwrap(), case.ids, "{what}");
        assert_eq!(tokenizer.encode(&case.text, false).unwrap(), case.plain, "{what}");
        assert_eq!(tokenizer.decode(&case.ids, true).unwrap(), case.skipped, "{what}");
    }
}

#[derive(Deserialize)]
struct First {
    encode: Vec<FirstText>,
    chat: Vec<FirstChat>,
}

#[derive(Deserialize)]
struct FirstText {
    text: String,
    ids: Vec<u32>,
    ids_no_special: Vec<u32>,
    decoded: String,
    decoded_skip_special: String,
}

#[derive(Deserialize)]
struct FirstChat {
    messages: Vec<Json>,
    add_generation_prompt: bool,
    enable_thinking: Option<bool>,
    rendered: String,
    ids: Vec<u32>,
}

/// The goldens that the fixtures were published with: texts, and chats through each fixture's own template.
#[test]
fn the_fixtures_own_goldens_pass() {
    for name in NAMES.into_iter().chain(["llama-untied", "qwen2"]).filter(|name| *name != "demo-qwen3_5") {
        let golden: First = golden(&format!("first/{name}.json"));
        let tokenizer = Tokenizer::open(&folder(name)).unwrap();
        for row in &golden.encode {
            assert_eq!(tokenizer.encode(&row.text, true).unwrap(), row.ids, "{name}: {:?}", row.text);
            assert_eq!(
                tokenizer.encode(&row.text, false).unwrap(),
                row.ids_no_special,
                "{name}: {:?}",
                row.text
            );
            assert_eq!(tokenizer.decode(&row.ids, false).unwrap(), row.decoded, "{name}");
            assert_eq!(tokenizer.decode(&row.ids, true).unwrap(), row.decoded_skip_special, "{name}");
        }
        let template = ChatTemplate::open(&folder(name)).unwrap();
        assert!(golden.chat.len() >= 3);
        for row in &golden.chat {
            let mut conversation = Conversation::new(row.messages.clone());
            conversation.add_generation_prompt = row.add_generation_prompt;
            if let Some(flag) = row.enable_thinking {
                conversation.set("enable_thinking", Json::from(flag)).unwrap();
            }
            let rendered = template.render(&conversation).unwrap();
            assert_eq!(rendered, row.rendered, "{name}");
            assert_eq!(tokenizer.encode(&rendered, false).unwrap(), row.ids, "{name}");
        }
    }
}
