//! Messages to a prompt, as the model's chat template says.
//!
//! A template is a Jinja2 program from the model's folder, so it is bounded: a budget of steps that grows with
//! the conversation, and a limit on nesting. It is run as `transformers` runs it (utils/chat_template_utils.py):
//! `trim_blocks`, `lstrip_blocks`, no trailing newline, `break` and `continue`, `{% generation %}` ignored,
//! `namespace`, `raise_exception`, `strftime_now`, `tojson`, Python's methods, and the named special tokens of
//! tokenizer_config.json as variables. Keys of messages that are null are left out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;
use std::{fmt, io, thread};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior, Value};
use serde::Deserialize;

use super::files::{Document, read_text};
use super::{Moment, TextError, python};

/// Steps that any conversation may cost, and more for each value in it and each byte of text.
///
/// A step is an instruction or 64 bytes of text, so this bounds both time and memory. The templates in
/// `goldens/templates` cost 10 to 130 steps a value.
const STEPS: u64 = 100_000;
const STEPS_A_VALUE: u64 = 500;
const BYTES_A_STEP: u64 = 4;
const STEPS_LIMIT: u64 = 2_000_000;
/// Nesting of blocks and macro calls.
const NESTING: usize = 120;
/// The largest template; some ten times the largest in use.
const SOURCE_LIMIT: usize = 256 << 10;
/// What one step, or one byte of a template, can add to the stack: a list around a list, a sign before a sign. The
/// engine walks such values and programs by recursion; 700 bytes a level were measured. Pages never touched cost
/// nothing.
const STACK_A_LEVEL: usize = 2 << 10;
const STACK_LEAST: usize = 2 << 20;
/// Comparing values that hold each other many times over takes no steps and may take for ever.
const DEADLINE: Duration = Duration::from_secs(30);

/// Special tokens that templates see as variables, by their keys in tokenizer_config.json.
const SPECIAL: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Variables that a conversation sets itself.
const RESERVED: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

/// A JSON value whose objects keep the order of their keys, which templates print.
#[derive(Debug, Clone, Deserialize)]
#[serde(transparent)]
pub struct Json(Value);

impl Json {
    /// Parses one JSON value.
    ///
    /// # Errors
    /// The parser's, with line and column.
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// An object from its keys and values, in this order.
    pub fn object<'a>(pairs: impl IntoIterator<Item = (&'a str, Json)>) -> Self {
        Self(Value::from_pairs(pairs.into_iter().map(|(key, Json(value))| (key, value))))
    }

    /// The string under `key`, if this is an object that has one.
    pub fn text(&self, key: &str) -> Option<String> {
        self.0.get_attr(key).ok()?.as_str().map(str::to_owned)
    }

    /// Steps that a template may take for this value.
    fn steps(&self) -> u64 {
        fn of(value: &Value) -> u64 {
            let items = || value.try_iter().into_iter().flatten();
            let inner = match value.kind() {
                ValueKind::String => value.as_str().map_or(0, str::len) as u64 / BYTES_A_STEP,
                ValueKind::Seq => items().map(|item| of(&item)).sum(),
                ValueKind::Map => items().map(|key| value.get_item(&key).map_or(0, |item| of(&item))).sum(),
                _ => 0,
            };
            inner + STEPS_A_VALUE
        }
        of(&self.0)
    }
}

impl From<&str> for Json {
    fn from(text: &str) -> Self {
        Self(Value::from(text))
    }
}

impl From<bool> for Json {
    fn from(flag: bool) -> Self {
        Self(Value::from(flag))
    }
}

impl From<&serde_json::Value> for Json {
    fn from(value: &serde_json::Value) -> Self {
        Self(Value::from(minijinja::value::Serde(value)))
    }
}

/// What a template is given.
#[derive(Debug, Clone)]
pub struct Conversation {
    /// Objects with `role`, `content` (a string, or a list of parts) and what else the template reads.
    pub messages: Vec<Json>,
    /// JSON schemas of functions that the model may call; empty if it may call none.
    pub tools: Vec<Json>,
    /// Whether to end with the start of the model's answer.
    pub add_generation_prompt: bool,
    /// What `strftime_now` tells.
    pub now: Moment,
    variables: BTreeMap<String, Json>,
}

impl Conversation {
    /// These messages and the start of an answer, now.
    pub fn new(messages: Vec<Json>) -> Self {
        Self {
            messages,
            tools: Vec::new(),
            add_generation_prompt: true,
            now: Moment::now(),
            variables: BTreeMap::new(),
        }
    }

    /// A message of plain text.
    pub fn message(role: &str, content: &str) -> Json {
        Json::object([("role", Json::from(role)), ("content", Json::from(content))])
    }

    /// Sets a variable of the template: `enable_thinking`, say. It wins over a special token of that name.
    ///
    /// # Errors
    /// [`TextError::Variable`] for those that the other fields set.
    pub fn set(&mut self, name: &str, value: Json) -> Result<(), TextError> {
        if RESERVED.contains(&name) {
            return Err(TextError::Variable { name: name.to_owned() });
        }
        self.variables.insert(name.to_owned(), value);
        Ok(())
    }

    /// Refuses messages with parts that are not text: images, videos, sounds, files.
    ///
    /// Templates put placeholders where these parts are, which mean nothing to a model that does not see them.
    ///
    /// # Errors
    /// [`TextError::Media`] for the first.
    pub fn refuse_media(&self) -> Result<(), TextError> {
        for (at, message) in self.messages.iter().enumerate() {
            let Ok(content) = message.0.get_attr("content") else { continue };
            if content.kind() != ValueKind::Seq {
                continue;
            }
            for part in content.try_iter().into_iter().flatten() {
                let Some((kind, medium)) = media(&part) else { continue };
                return Err(TextError::Media { message: at + 1, kind, medium });
            }
        }
        Ok(())
    }

    /// The messages as `transformers` hands them on: no null keys, and an answer's reasoning under both its names.
    fn plain_messages(&self) -> Result<Vec<Value>, TextError> {
        const NEEDED: &str = "an object with `role` and `content`";
        if self.messages.is_empty() {
            return Err(TextError::Message { message: 1, found: "no message".to_owned(), needed: NEEDED });
        }
        let plain = |(at, Json(message)): (usize, &Json)| {
            if message.kind() != ValueKind::Map {
                let found = format!("a value of type {}", message.kind());
                return Err(TextError::Message { message: at + 1, found, needed: NEEDED });
            }
            let mut pairs: Vec<(Value, Value)> = Vec::new();
            for key in message.try_iter().into_iter().flatten() {
                let value = message.get_item(&key).unwrap_or_default();
                if !value.is_none() {
                    pairs.push((key, value));
                }
            }
            const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
            let get =
                |name: &str| pairs.iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, v)| v.clone());
            if let Some(reasoning) = REASONING.iter().find_map(|name| get(name)) {
                if get("thinking").is_none() {
                    pairs.push((Value::from("thinking"), reasoning.clone()));
                }
                pairs.retain(|(key, _)| key.as_str() != Some("reasoning_content"));
                pairs.push((Value::from("reasoning_content"), reasoning));
            }
            Ok(Value::from_pairs(pairs))
        };
        self.messages.iter().enumerate().map(plain).collect()
    }

    fn steps(&self) -> u64 {
        let values = self.messages.iter().chain(&self.tools).chain(self.variables.values());
        (STEPS + values.map(Json::steps).sum::<u64>()).min(STEPS_LIMIT)
    }
}

/// The type of a part that is no text, and what it holds.
fn media(part: &Value) -> Option<(String, &'static str)> {
    const MEDIA: [&str; 4] = ["image", "video", "audio", "file"];
    let medium = |name: &str| MEDIA.into_iter().find(|medium| name.contains(medium));
    if let Some(kind) = part.get_attr("type").ok()?.as_str() {
        return Some((kind.to_owned(), medium(kind)?));
    }
    // A part without a type is told by its keys.
    let mut keys = part.try_iter().ok().filter(|_| part.kind() == ValueKind::Map)?;
    keys.find_map(|key| key.as_str().and_then(|key| Some((key.to_owned(), medium(key)?))))
}

/// A chat template, ready to run.
pub struct ChatTemplate {
    environment: Environment<'static>,
    file: PathBuf,
    special: BTreeMap<String, String>,
    has_tool_use: bool,
    deadline: Duration,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("file", &self.file)
            .field("special", &self.special)
            .finish_non_exhaustive()
    }
}

const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

impl ChatTemplate {
    /// The template of `dir`: `chat_template.jinja`, else `chat_template.json`, else the key `chat_template` of
    /// tokenizer_config.json: a string, or a list of objects with `name` and `template`. Of several, `default` is
    /// used, and `tool_use` if there are tools.
    ///
    /// # Errors
    /// [`TextError::NoTemplate`], [`TextError::TemplateSyntax`], [`TextError::Value`], and those of reading.
    pub fn open(dir: &Path) -> Result<Self, TextError> {
        let config = Document::read(dir, "tokenizer_config.json")?;
        let mut special = BTreeMap::new();
        if let Some(config) = &config {
            for key in SPECIAL {
                if let Some(token) = config.token(key)? {
                    special.insert(key.to_owned(), token.to_owned());
                }
            }
        }
        if let Some((file, source)) = read_text(dir, "chat_template.jinja")? {
            let mut template = Self::new(&file, &source, special)?;
            if let Some((_, source)) = read_text(dir, "additional_chat_templates/tool_use.jinja")? {
                template.add(TOOL_USE, &source)?;
            }
            return Ok(template);
        }
        let json = Document::read(dir, "chat_template.json")?;
        for document in [json, config].into_iter().flatten() {
            const KEY: &str = "chat_template";
            const NEEDED: &str =
                "must be a string, or a list of objects with the strings `name` and `template`";
            let Some(value) = document.get(KEY) else { continue };
            let mut named = BTreeMap::new();
            match value {
                serde_json::Value::String(source) => drop(named.insert(DEFAULT, source.as_str())),
                serde_json::Value::Array(list) => {
                    for entry in list {
                        let get = |key: &str| entry.get(key).and_then(serde_json::Value::as_str);
                        let (Some(name), Some(source)) = (get("name"), get("template")) else {
                            return Err(document.wrong(KEY, value, NEEDED));
                        };
                        named.insert(name, source);
                    }
                }
                other => return Err(document.wrong(KEY, other, NEEDED)),
            }
            let Some(source) = named.get(DEFAULT) else {
                return Err(document.wrong(KEY, value, "must have a template of the name `default`"));
            };
            let mut template = Self::new(&document.file, source, special)?;
            if let Some(source) = named.get(TOOL_USE) {
                template.add(TOOL_USE, source)?;
            }
            return Ok(template);
        }
        Err(TextError::NoTemplate { dir: dir.to_path_buf() })
    }

    /// The template `source`; `file` is for messages, `special` are the named special tokens.
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`].
    pub fn new(file: &Path, source: &str, special: BTreeMap<String, String>) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .keep_trailing_newline(false)
            .build()
            .expect("the delimiters are the usual ones");
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_recursion_limit(NESTING);
        environment.set_unknown_method_callback(python::method);
        // So that an undefined value is named in the error.
        environment.set_debug(true);
        environment.add_filter("tojson", python::tojson);
        environment.add_filter("trim", python::trim);
        environment.add_filter("indent", python::indent);
        environment.add_filter("int", python::int);
        environment.add_filter("float", python::to_float);
        environment.add_filter("string", python::string);
        environment.add_filter("escape", python::escape);
        environment.add_filter("e", python::escape);
        environment.add_test("sequence", python::is_sequence);
        environment.add_test("iterable", python::is_iterable);
        environment.set_formatter(python::print);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
        });
        environment.remove_global("debug");
        let mut template =
            Self { environment, file: file.to_path_buf(), special, has_tool_use: false, deadline: DEADLINE };
        template.add(DEFAULT, source)?;
        Ok(template)
    }

    fn add(&mut self, name: &'static str, source: &str) -> Result<(), TextError> {
        let file = self.file.clone();
        if source.len() > SOURCE_LIMIT {
            return Err(TextError::TemplateSize { file, found: source.len(), limit: SOURCE_LIMIT });
        }
        let source = plain_source(source);
        let levels = source.len();
        let mut environment = self.environment.clone();
        let compile = move || environment.add_template_owned(name, source).map(|()| environment);
        let syntax = |line: usize, problem: String| TextError::TemplateSyntax { file, line, problem };
        match on_own_stack(levels, self.deadline, compile) {
            Ok(Ok(environment)) => self.environment = environment,
            Ok(Err(error)) => {
                let problem = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
                return Err(syntax(error.line().unwrap_or(0), problem));
            }
            Err(Lost::Late) => return Err(syntax(1, "this takes too long".to_owned())),
            Err(Lost::Panic(problem)) => return Err(syntax(1, problem)),
            Err(Lost::Machine(source)) => return Err(TextError::Thread { source }),
        }
        self.has_tool_use |= name == TOOL_USE;
        Ok(())
    }

    /// Changes how long a conversation may take; 30 s at first, thousands of times what any should.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// The file that the template came from.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The prompt for a conversation. It holds its special tokens: encode it without adding any.
    ///
    /// # Errors
    /// [`TextError::TemplateRaised`] if the template refuses the messages in its own words;
    /// [`TextError::TemplateFailed`], [`TextError::TemplateUnsupported`], [`TextError::TemplateEndless`],
    /// [`TextError::Message`].
    pub fn render(&self, conversation: &Conversation) -> Result<String, TextError> {
        let text = |text: &String| Value::from(text.as_str());
        let mut context: BTreeMap<String, Value> =
            self.special.iter().map(|(name, token)| (name.clone(), text(token))).collect();
        context
            .extend(conversation.variables.iter().map(|(name, Json(value))| (name.clone(), value.clone())));
        let tools = match conversation.tools.as_slice() {
            [] => Value::from(()),
            tools => tools.iter().map(|Json(tool)| tool.clone()).collect(),
        };
        let fixed = [
            Value::from(conversation.plain_messages()?),
            tools,
            Value::from(()),
            Value::from(conversation.add_generation_prompt),
        ];
        context.extend(RESERVED.map(str::to_owned).into_iter().zip(fixed));

        let mut environment = self.environment.clone();
        let steps = conversation.steps();
        environment.set_fuel(Some(steps));
        let now = conversation.now;
        environment.add_function("strftime_now", move |format: &str| {
            now.strftime(format).map_err(|directive| {
                Error::new(ErrorKind::UnknownFunction, format!("`strftime_now` does not know `{directive}`"))
            })
        });
        let name = if self.has_tool_use && !conversation.tools.is_empty() { TOOL_USE } else { DEFAULT };
        let file = self.file.clone();
        // The engine's error may hold values, which are as deep as any; it must not leave this stack.
        let run = move || {
            let template = environment.get_template(name).expect("`open` has added it");
            template.render(Value::from(context)).map_err(|error| failure(file, &error, steps))
        };
        let levels = usize::try_from(steps).expect("the limit fits");
        match on_own_stack(levels, self.deadline, run) {
            Ok(rendered) => rendered,
            Err(Lost::Late) => Err(TextError::TemplateSlow { file: self.file.clone(), limit: self.deadline }),
            Err(Lost::Panic(problem)) => {
                Err(TextError::TemplateFailed { file: self.file.clone(), line: 0, problem })
            }
            Err(Lost::Machine(source)) => Err(TextError::Thread { source }),
        }
    }
}

/// What an error of the engine means.
fn failure(file: PathBuf, error: &Error, steps: u64) -> TextError {
    let mut causes: Vec<&(dyn std::error::Error + 'static)> = vec![error];
    while let Some(source) = causes[causes.len() - 1].source() {
        causes.push(source);
    }
    if let Some(Raised(message)) = causes.iter().find_map(|cause| cause.downcast_ref::<Raised>()) {
        return TextError::TemplateRaised { message: message.clone() };
    }
    // The innermost error says what happened; those around it, in which macro.
    let innermost = causes.iter().rev().find_map(|cause| cause.downcast_ref::<Error>()).unwrap_or(error);
    let line = innermost.line().or(error.line()).unwrap_or(0);
    let problem = match innermost.detail() {
        Some(detail) => format!("{}: {detail}", innermost.kind()),
        None => innermost.kind().to_string(),
    };
    match innermost.kind() {
        ErrorKind::OutOfFuel => TextError::TemplateEndless { file, spent: steps },
        ErrorKind::UnknownFilter
        | ErrorKind::UnknownTest
        | ErrorKind::UnknownFunction
        | ErrorKind::UnknownMethod
        | ErrorKind::TemplateNotFound
        | ErrorKind::BadInclude => TextError::TemplateUnsupported { file, line, problem },
        _ => TextError::TemplateFailed { file, line, problem },
    }
}

/// Why work on another stack gave nothing.
enum Lost {
    /// It takes longer than allowed.
    Late,
    /// The engine has a mistake.
    Panic(String),
    /// There is no thread or no room for its stack.
    Machine(io::Error),
}

/// Runs `work` on a stack that has room for values or programs of so many levels.
///
/// Work that is late is left behind: nothing can stop it, and it ends with the process.
fn on_own_stack<T: Send + 'static>(
    levels: usize,
    deadline: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Lost> {
    let (done, wait) = mpsc::sync_channel(1);
    let stack = STACK_LEAST + levels * STACK_A_LEVEL;
    let thread = thread::Builder::new().name("template".to_owned()).stack_size(stack);
    let run = move || {
        // Nobody waits any more if it is late.
        let _ = done.send(work());
    };
    let handle = thread.spawn(run).map_err(Lost::Machine)?;
    match wait.recv_timeout(deadline) {
        Ok(value) => Ok(value),
        Err(RecvTimeoutError::Timeout) => Err(Lost::Late),
        Err(RecvTimeoutError::Disconnected) => Err(Lost::Panic(match handle.join() {
            Err(panic) => super::panic_text(panic.as_ref()),
            Ok(()) => unreachable!("it sends before it ends"),
        })),
    }
}

/// What a template said with `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// `source` with line ends as Jinja2 reads them, and without the marks of training: what is between
/// `{% generation %}` and `{% endgeneration %}` is printed as it is.
fn plain_source(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        rest = tag;
        let inner = tag.trim_start_matches(['-', '+']).trim_start();
        for (mark, word) in [("generation", "with"), ("endgeneration", "endwith")] {
            let Some(after) = inner.strip_prefix(mark) else { continue };
            if after.trim_start().trim_start_matches(['-', '+']).starts_with("%}") {
                out.push_str(&tag[..tag.len() - inner.len()]);
                out.push_str(word);
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}
