//! Damaged and hostile text files: refused or accepted, never a panic, never without end.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tqc::failure::{Exit, Failure};
use tqc::text::{
    BLANK_LIMIT, ChatTemplate, Conversation, EndTokens, GenerationConfig, Json, TextError, Tokenizer,
};

/// A minute would be a hang; most take milliseconds.
const LONG: Duration = Duration::from_secs(60);

fn fixture(name: &str, file: &str) -> String {
    fs::read_to_string(Path::new("tests/fixtures").join(name).join(file)).unwrap()
}

fn folder_with(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

fn template(source: &str) -> Result<ChatTemplate, TextError> {
    ChatTemplate::new(Path::new("test.jinja"), source, BTreeMap::new())
}

fn render(source: &str) -> Result<String, TextError> {
    template(source)?.render(&Conversation::new(vec![Conversation::message("user", "Hi")]))
}

#[test]
fn what_is_absent_or_damaged_is_named() {
    let empty = folder_with(&[]);
    let error = Tokenizer::open(empty.path()).unwrap_err();
    assert!(matches!(error, TextError::NoTokenizer { .. }), "{error}");
    assert_eq!(error.exit(), Exit::Input);
    let error = ChatTemplate::open(empty.path()).unwrap_err();
    assert!(matches!(error, TextError::NoTemplate { .. }), "{error}");
    assert_eq!(error.exit(), Exit::Input);
    assert!(EndTokens::read(empty.path(), None, 10).unwrap().is_empty());
    assert_eq!(GenerationConfig::read(empty.path()).unwrap(), GenerationConfig::default());

    for bad in
        ["", "{", "[]", "{}", "null", "{\"version\":\"1.0\"}", "{\"model\":{\"type\":\"BPE\"}}", "\u{0}"]
    {
        let folder = folder_with(&[("tokenizer.json", bad)]);
        let error = Tokenizer::open(folder.path()).unwrap_err();
        assert!(error.to_string().contains("tokenizer.json` is not a tokenizer"), "{error}");
        assert_eq!(error.exit(), Exit::Input);
    }
    let deep = "[".repeat(1_000_000);
    for bad in [deep.clone(), format!("{{\"x\":{deep}"), format!("{{\"pre_tokenizer\":{deep}")] {
        let folder = folder_with(&[("tokenizer.json", &bad), ("tokenizer_config.json", &bad)]);
        assert_eq!(Tokenizer::open(folder.path()).unwrap_err().exit(), Exit::Input);
        assert_eq!(ChatTemplate::open(folder.path()).unwrap_err().exit(), Exit::Input);
    }
}

/// A change to a good tokenizer, and what the error must name.
#[test]
fn a_tokenizer_that_would_mislead_is_refused() {
    let good: Value = serde_json::from_str(&fixture("llama-tied", "tokenizer.json")).unwrap();
    let open = |tokenizer: &Value, config: &Value| {
        let folder = folder_with(&[
            ("tokenizer.json", &tokenizer.to_string()),
            ("tokenizer_config.json", &config.to_string()),
        ]);
        Tokenizer::open(folder.path())
    };
    assert!(open(&good, &json!({})).is_ok());

    let mut bad = good.clone();
    bad["model"]["dropout"] = json!(0.1);
    assert!(open(&bad, &json!({})).unwrap_err().to_string().contains("dropout is not supported"));

    let mut bad = good.clone();
    bad["added_tokens"][5]["id"] = json!(600);
    let error = open(&bad, &json!({})).unwrap_err().to_string();
    assert!(error.contains("token `<|pad|>` should have id 600, but gets 511"), "{error}");

    let config = json!({"added_tokens_decoder": {"600": {"content": "<new>", "special": true}}});
    let error = open(&good, &config).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json`: token `<new>` should have id 600"), "{error}");

    for decoder in [
        json!({"type": "CTC", "pad_token": "p", "word_delimiter_token": "|", "cleanup": true}),
        json!({"type": "BPEDecoder", "suffix": "</w>"}),
        json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}),
    ] {
        let mut bad = good.clone();
        bad["decoder"] = decoder;
        let error = open(&bad, &json!({})).unwrap_err();
        assert!(matches!(error, TextError::Unsupported { .. }), "{error}");
    }

    // Not applied, so that a long text stays whole and a short one is not filled up.
    let mut cut = good.clone();
    cut["truncation"] =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    cut["padding"] = json!({"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "x"});
    let text = "a text of some words";
    let whole = open(&good, &json!({})).unwrap().encode(text, true).unwrap();
    assert_eq!(open(&cut, &json!({})).unwrap().encode(text, true).unwrap(), whole);
}

#[test]
fn long_whitespace_is_split_exactly_or_refused() {
    let tokenizer = Tokenizer::open(Path::new("tests/fixtures/qwen3_5")).unwrap();
    let blank = |count: usize| " ".repeat(count) + "x";
    let ids = tokenizer.encode(&blank(BLANK_LIMIT), false).unwrap();
    // The last space belongs to the next word, so the two pieces are apart; unsplit, they would be one.
    assert_eq!(ids[ids.len() - 1], tokenizer.encode(" x", false).unwrap()[1]);
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), blank(BLANK_LIMIT));
    let error = tokenizer.encode(&blank(BLANK_LIMIT + 1), false).unwrap_err();
    assert_eq!(error.exit(), Exit::Request);
    assert!(error.to_string().contains("500001 whitespace characters"), "{error}");
}

#[test]
fn end_tokens_are_the_union_of_all_files() {
    let tokenizer = fixture("qwen3_5", "tokenizer.json");
    let read = |generation: Value, config: Value, text: Value| {
        let folder = folder_with(&[
            ("tokenizer.json", &tokenizer),
            ("generation_config.json", &generation.to_string()),
            ("config.json", &config.to_string()),
            ("tokenizer_config.json", &text.to_string()),
        ]);
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        EndTokens::read(folder.path(), Some(&tokenizer), 512)
    };
    let all = read(
        json!({"eos_token_id": [3, 1, 3]}),
        json!({"eos_token_id": 4, "text_config": {"eos_token_id": [5]}}),
        json!({"eos_token": {"content": "<|im_end|>", "lstrip": false}}),
    )
    .unwrap();
    assert_eq!(all.ids_ascending().collect::<Vec<_>>(), [1, 3, 4, 5, 491]);
    assert!(all.contains(491) && !all.contains(2));
    let sources: Vec<String> = all.declared().map(|(_, sources)| sources.join(", ")).collect();
    assert_eq!(sources[0], "generation_config.json: eos_token_id");
    assert_eq!(sources[3], "config.json: text_config.eos_token_id");
    assert_eq!(sources[4], "tokenizer_config.json: eos_token");

    let none = json!({"eos_token_id": null, "eos_token": null});
    assert!(read(none.clone(), none.clone(), none.clone()).unwrap().is_empty());
    for bad in
        [json!(-1), json!(1.5), json!("2"), json!(true), json!([1, null]), json!([[1]]), json!({"a": 1})]
    {
        let error = read(json!({"eos_token_id": bad}), none.clone(), none.clone()).unwrap_err();
        assert!(error.to_string().contains("generation_config.json`: key `eos_token_id` is"), "{error}");
        assert_eq!(error.exit(), Exit::Input);
        assert!(read(none.clone(), json!({"text_config": {"eos_token_id": bad}}), none.clone()).is_err());
    }
    for beyond in [512u64, 1 << 32, u64::MAX] {
        let error = read(json!({"eos_token_id": [1, beyond]}), none.clone(), none.clone()).unwrap_err();
        assert!(
            matches!(error, TextError::BeyondVocabulary { id, vocabulary: 512, .. } if id == beyond),
            "{error}"
        );
    }
    let error = read(none.clone(), none.clone(), json!({"eos_token": "<nowhere>"})).unwrap_err();
    assert!(error.to_string().contains("names token `<nowhere>`"), "{error}");
    assert!(read(none.clone(), none.clone(), json!({"eos_token": 7})).is_err());

    // Without a tokenizer, from the ids beside it.
    let dir = Path::new("tests/fixtures/qwen3_5");
    assert_eq!(EndTokens::read(dir, None, 512).unwrap(), {
        let tokenizer = Tokenizer::open(dir).unwrap();
        EndTokens::read(dir, Some(&tokenizer), 512).unwrap()
    });
}

#[test]
fn sampling_values_of_a_model_are_checked() {
    let read = |value: &str| {
        let folder = folder_with(&[("generation_config.json", value)]);
        GenerationConfig::read(folder.path())
    };
    let all = read(
        r#"{"do_sample": true, "temperature": 1, "top_p": 0.95, "top_k": 20, "min_p": 0.0,
        "repetition_penalty": 1.05, "x": 1}"#,
    )
    .unwrap();
    assert_eq!((all.do_sample, all.temperature, all.top_k), (Some(true), Some(1.0), Some(20)));
    let sampling = all.sampling(7);
    assert_eq!((sampling.top_p, sampling.repetition_penalty, sampling.seed), (0.95, 1.05, 7));
    for (bad, key) in [
        (r#"{"temperature": "1"}"#, "temperature"),
        (r#"{"temperature": -1}"#, "temperature"),
        (r#"{"top_p": 0}"#, "top_p"),
        (r#"{"top_p": 1.5}"#, "top_p"),
        (r#"{"top_k": -1}"#, "top_k"),
        (r#"{"top_k": 1.5}"#, "top_k"),
        (r#"{"min_p": 2}"#, "min_p"),
        (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
        (r#"{"do_sample": 1}"#, "do_sample"),
    ] {
        let error = read(bad).unwrap_err();
        assert!(error.to_string().contains(&format!("generation_config.json`: key `{key}` is")), "{error}");
        assert_eq!(error.exit(), Exit::Input);
    }
    assert!(matches!(read("{").unwrap_err(), TextError::Json { .. }));
    assert!(matches!(read("[]").unwrap_err(), TextError::NotObject { .. }));
}

#[test]
fn templates_come_from_the_first_file_that_has_one() {
    let config = |template: Value| json!({"bos_token": "<B>", "chat_template": template}).to_string();
    let open = |files: &[(&str, &str)], tools: bool| {
        let folder = folder_with(files);
        let template = ChatTemplate::open(folder.path())?;
        let mut conversation = Conversation::new(vec![Conversation::message("user", "Hi")]);
        conversation.tools.extend(tools.then(|| Json::from(&json!({"a": 1}))));
        template.render(&conversation)
    };
    let plain = config(json!("config {{ bos_token }}"));
    let list =
        config(json!([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]));
    let json_file = ("chat_template.json", r#"{"chat_template": "json {{ bos_token }}"}"#);
    let jinja = ("chat_template.jinja", "jinja {{ bos_token }}");
    let plain = ("tokenizer_config.json", plain.as_str());
    assert_eq!(open(&[plain], false).unwrap(), "config <B>");
    assert_eq!(open(&[plain, json_file], false).unwrap(), "json <B>");
    assert_eq!(open(&[plain, json_file, jinja], false).unwrap(), "jinja <B>");
    assert_eq!(open(&[("tokenizer_config.json", &list)], false).unwrap(), "plain");
    assert_eq!(open(&[("tokenizer_config.json", &list)], true).unwrap(), "tools");
    for bad in
        [json!(7), json!([{"name": "default"}]), json!([{"name": "rag", "template": "x"}]), json!({"a": "b"})]
    {
        let error = open(&[("tokenizer_config.json", &config(bad))], false).unwrap_err();
        assert!(error.to_string().contains("key `chat_template` is "), "{error}");
    }
    let error = open(&[("tokenizer_config.json", &config(json!(null)))], false).unwrap_err();
    assert!(matches!(error, TextError::NoTemplate { .. }), "{error}");
}

#[test]
fn a_template_that_fails_says_where_and_whose_fault_it_is() {
    for (source, exit, text) in [
        ("a\n\n{% if %}", Exit::Input, "does not parse: line 3"),
        ("{{ messages[0].content", Exit::Input, "does not parse: line 1"),
        ("\n{{ 'a' | no_such_filter }}", Exit::Input, "line 2: the chat template uses what"),
        ("\n{{ no_such_function() }}", Exit::Input, "line 2: the chat template uses what"),
        ("{{ 'a'.no_such_method() }}", Exit::Input, "no method named no_such_method"),
        ("{% include 'other' %}", Exit::Input, "line 1"),
        ("\n\n{{ messages[0].name + 'x' }}", Exit::Request, "line 3"),
        (
            "{{ raise_exception('Roles must alternate!') }}",
            Exit::Request,
            "refuses these messages: Roles must",
        ),
        ("{{ strftime_now('%Q') }}", Exit::Input, "`strftime_now` does not know `%Q`"),
    ] {
        let error = render(source).expect_err(source);
        assert_eq!(error.exit(), exit, "{source}: {error}");
        assert!(error.to_string().contains(text), "{source}: {error}");
        assert!(error.help().is_some());
    }
}

#[test]
fn parts_that_are_not_text_are_refused_by_name() {
    for (part, kind, medium) in [
        (json!({"type": "image"}), "image", "image"),
        (json!({"type": "image_url", "image_url": {"url": "x"}}), "image_url", "image"),
        (json!({"type": "input_audio"}), "input_audio", "audio"),
        (json!({"video": "x"}), "video", "video"),
    ] {
        let parts = json!({"role": "user", "content": [{"type": "text", "text": "the image"}, part]});
        let conversation =
            Conversation::new(vec![Conversation::message("user", "image"), Json::from(&parts)]);
        let error = conversation.refuse_media().unwrap_err();
        let needed =
            format!("message 2 has a part of type `{kind}`: {medium} input is not supported by this runtime");
        assert_eq!(error.to_string(), needed);
        assert_eq!(error.exit(), Exit::Request);
    }
    let fine = json!({"role": "user", "content": [{"type": "text", "text": "x", "image": null}, "image"]});
    assert!(Conversation::new(vec![Json::from(&fine)]).refuse_media().is_ok());
}

#[test]
fn messages_must_be_objects() {
    let template = template("{{ messages }}").unwrap();
    for messages in
        [vec![], vec![Json::from("x")], vec![Json::from(&json!([]))], vec![Json::from(&json!(null))]]
    {
        let error = template.render(&Conversation::new(messages)).unwrap_err();
        assert!(matches!(error, TextError::Message { message: 1, .. }), "{error}");
        assert_eq!(error.exit(), Exit::Request);
    }
    let mut conversation = Conversation::new(Vec::new());
    assert!(conversation.set("messages", Json::from(true)).is_err());
}

/// Programs that would not end, or would fill the memory or the stack.
#[test]
fn hostile_templates_end_with_an_error() {
    let nested = |open: &str, close: &str, count: usize| open.repeat(count) + &close.repeat(count);
    let grow = |step: &str, then: &str| {
        format!(
            "{{% set ns = namespace(x=[], s='ab') %}}{{% for i in range(99999) %}}{{% for j in range(99999) %}}{step}{{% endfor %}}{{% endfor %}}{then}"
        )
    };
    // Many levels a turn: the deepest values for their steps.
    let deep = |then: &str| {
        let (open, close) = ("[".repeat(40), "]".repeat(40));
        let step = format!("{{% set ns.x = {open}ns.x{close} %}}{{% set ns.y = {open}ns.y{close} %}}");
        format!("{{% set ns = namespace(x=[], y=[]) %}}{{% for i in range(600) %}}{step}{{% endfor %}}{then}")
    };
    let wide = |then: &str| {
        format!(
            "{{% set ns = namespace(x=[1], y=[1]) %}}{{% for i in range(64) %}}{{% set ns.x = [ns.x, ns.x] %}}{{% set ns.y = [ns.y, ns.y] %}}{{% endfor %}}{then}"
        )
    };
    const END: &str = "{{ raise_exception('end') }}";
    let cases = [
        ("a loop", grow("", "")),
        ("a growing text", grow("{% set ns.s = ns.s + ns.s %}", "")),
        ("a growing text by repeats", grow("{% set ns.s = ns.s * 1000 %}", "")),
        ("a growing list", grow("{% set ns.x = ns.x + [i] %}", "")),
        ("a growing replacement", grow("{% set ns.s = ns.s.replace('a', 'aaaa') %}", "")),
        ("a growing indent", grow("{% set ns.s = ns.s | indent(1000, true) %}", "")),
        ("a growing join", grow("{% set ns.s = ns.s.join(['a'] * 1000) %}", "")),
        ("a wide field", "{{ 'x'.ljust(99999999999) }}".to_owned()),
        ("a wide format", "{{ '{:99999999}'.format(1) }}{{ '%99999999d' | format(1) }}".repeat(50)),
        ("a wide tojson", "{{ [1, [2]] | tojson(indent=99999999999) }}".to_owned()),
        ("printing much", grow("{{ messages }}", "")),
        ("macros without end", "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(1) }}".to_owned()),
        (
            "macros that branch",
            "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(64) }}"
                .to_owned(),
        ),
        ("a recursive loop", "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}".to_owned()),
        ("deep parentheses", format!("{{{{ {} }}}}", nested("(", ")", 100_000))),
        ("deep lists", format!("{{{{ {} }}}}", nested("[", "]", 100_000))),
        ("deep blocks", nested("{% if true %}", "{% endif %}", 10_000)),
        ("many signs", format!("{{{{ {}1 }}}}{END}", "-".repeat(200_000))),
        ("many nots", format!("{{{{ {}1 }}}}{END}", "not ".repeat(60_000))),
        ("a long sum", format!("{{{{ 1{} + nothing }}}}", " + 1".repeat(60_000))),
        ("many filters", format!("{{{{ 'a'{} }}}}{END}", "|upper".repeat(40_000))),
        ("many conditions", format!("{{% if 0 %}}{}{{% endif %}}{END}", "{% elif 0 %}".repeat(20_000))),
        ("too long a template", " ".repeat(300_000)),
        ("many attributes", format!("{{{{ messages{} }}}}", ".a".repeat(100_000))),
        ("a deep value printed", deep("{{ ns.x }}")),
        ("a deep value as json", deep("{{ ns.x | tojson }}")),
        ("a deep value joined", deep("{{ 'a' ~ ns.x ~ raise_exception('end') }}")),
        ("deep values compared", deep("{{ ns.x == ns.y }}{{ raise_exception('end') }}")),
        ("a deep value sorted", deep("{{ [ns.x, ns.y] | sort }}")),
        ("deep values in a dict", deep("{{ {'a': ns.x}['a'] | tojson }}")),
        ("a deep value let go", deep("{{ raise_exception('end') }}")),
        ("a wide value printed", wide("{{ ns.x }}")),
        ("a wide value as json", wide("{{ ns.x | tojson }}")),
        ("wide values compared", wide("{{ ns.x == ns.y }}{{ raise_exception('end') }}")),
        (
            "a namespace in itself",
            "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns | tojson }}".to_owned(),
        ),
        (
            "a namespace in itself printed",
            "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x }}{{ ns }}".to_owned(),
        ),
    ];
    for (name, source) in cases {
        let start = Instant::now();
        let conversation = Conversation::new(vec![Conversation::message("user", "Hi")]);
        let rendered = template(&source).and_then(|mut template| {
            template.set_deadline(Duration::from_secs(2));
            template.render(&conversation)
        });
        let error = rendered.expect_err(name);
        let took = start.elapsed();
        println!("{name}: {took:?} {}", error.to_string().chars().take(140).collect::<String>());
        assert!(took < LONG, "{name} took {took:?}");
    }
}
