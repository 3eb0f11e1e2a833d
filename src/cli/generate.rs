//! `tqc generate` and `tqc chat`.

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::model::{DraftArgs, SamplingArgs, WriterArgs, say_precisions};
use super::{CliError, Common, print};
use crate::arch::Config;
use crate::failure::{Exit, Outcome};
use crate::generate::{Answer, Continuation, Finish, Request, Session};
use crate::process::PeakMemory;
use crate::runtime::RuntimeError;
use crate::sample::Sampler;
use crate::text::{ChatTemplate, Conversation, EndTokens, GenerationConfig, Json, TextError, Tokenizer};

/// Continue a prompt.
///
/// Text goes to stdout as it comes; with `--json`, one object when it is done.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["prompt", "prompt_ids", "prompt_file"]))]
pub struct GenerateArgs {
    #[command(flatten)]
    model: WriterArgs,
    /// The prompt.
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// The prompt, from a file (`-`: from stdin).
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<std::path::PathBuf>,
    /// The prompt as token ids. Works without a tokenizer; then no text is made.
    #[arg(long, value_name = "ID,ID,...", value_delimiter = ',', conflicts_with_all = ["chat", "system"])]
    prompt_ids: Option<Vec<u32>>,
    /// Put the prompt into the model's chat template, as the user's message.
    #[arg(long)]
    chat: bool,
    /// A system message before it.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Set the template's variable `enable_thinking` to false.
    #[arg(long, requires = "chat")]
    no_thinking: bool,
    /// Go on after the model's end tokens.
    #[arg(long)]
    ignore_eos: bool,
    /// Most tokens to make.
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_tokens: usize,
    /// End before this text; may be given several times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    common: Common,
}

impl GenerateArgs {
    pub fn run(self) -> Outcome<Exit> {
        let stop = interrupt(|| {})?;
        let dir = self.model.folder()?;
        // A folder that holds no model at all should say so first.
        Config::read_packed(&dir)?;
        let settings = GenerationConfig::read(&dir)?;
        let mut sampler = Sampler::new(self.sampling.over(&settings)?)?;
        let by_ids = self.prompt_ids.is_some();
        let tokenizer = match Tokenizer::open(&dir) {
            Ok(tokenizer) => Some(tokenizer),
            // Ids in, ids out needs none, unless stop strings are to be found.
            Err(error)
                if by_ids && self.stop.is_empty() && matches!(error, TextError::NoTokenizer { .. }) =>
            {
                None
            }
            Err(error) => return Err(error.into()),
        };
        let prompt = self.prompt_tokens(&dir, tokenizer.as_ref())?;
        let model = self.model.open(&dir)?;
        model.check_prompt(&prompt)?;
        if self.draft.tokens() > 0 {
            model.draft()?;
        }
        let ends = EndTokens::read(&dir, tokenizer.as_ref(), model.config().vocab)?;
        let ends: Vec<u32> = if self.ignore_eos { Vec::new() } else { ends.ids_ascending().collect() };
        if ends.is_empty() && !self.ignore_eos {
            print::say(
                "warning: the model declares no end token, so only `--max-tokens` and `--stop` end the text",
            );
        }
        say_precisions(&model);
        let request = Request {
            sampler: &mut sampler,
            max_tokens: self.max_tokens,
            ends: &ends,
            draft: self.draft.tokens(),
            stop: &|| stop.load(Ordering::Relaxed),
        };
        let mut session = Session::new(&model);
        let stops: Vec<&str> = self.stop.iter().map(String::as_str).collect();
        let answer =
            session.answer(&prompt, request, tokenizer.as_ref(), &stops, &mut show(self.common.json))?;
        let Answer { text, finish, continuation } = answer;
        if self.common.json {
            print::json(&json!({
                "prompt_tokens": prompt, "tokens": continuation.tokens, "text": text,
                "finish_reason": finish, "end_token": continuation.end,
                "drafting": (self.draft.tokens() > 0).then_some(continuation.drafting),
                "timings": timings(&continuation), "memory": memory(&session),
            }))?;
        } else {
            match tokenizer {
                Some(_) => print::text("\n")?,
                None => {
                    let ids: Vec<String> = continuation.tokens.iter().map(u32::to_string).collect();
                    print::text(&format!("{}\n", ids.join(",")))?;
                }
            }
            print::say(&summary(&continuation, finish));
        }
        Ok(if finish == Finish::Interrupted { Exit::Interrupted } else { Exit::Done })
    }

    fn prompt_tokens(&self, dir: &Path, tokenizer: Option<&Tokenizer>) -> Outcome<Vec<u32>> {
        if let Some(ids) = &self.prompt_ids {
            return Ok(ids.clone());
        }
        let tokenizer = tokenizer.expect("a prompt of text has a tokenizer, or the command has ended");
        let text = match (&self.prompt, &self.prompt_file) {
            (Some(text), _) => text.clone(),
            (None, Some(path)) => read_prompt(path)?,
            (None, None) => unreachable!("clap asks for one of them"),
        };
        if !self.chat {
            return Ok(tokenizer.encode(&text, true)?);
        }
        let template = ChatTemplate::open(dir)?;
        let system = self.system.iter().map(|text| message("system", text));
        let messages: Vec<Json> = system.chain([message("user", &text)]).collect();
        let rendered = render(&template, messages, self.no_thinking)?;
        Ok(tokenizer.encode(&rendered, false)?)
    }
}

fn read_prompt(path: &Path) -> Outcome<String> {
    let read = || match path.as_os_str() == "-" {
        true => std::io::read_to_string(std::io::stdin()),
        false => std::fs::read_to_string(path),
    };
    Ok(read().map_err(|error| CliError::Prompt { path: path.to_owned(), error })?)
}

fn message(role: &str, content: &str) -> Json {
    Conversation::message(role, content)
}

fn render(template: &ChatTemplate, messages: Vec<Json>, no_thinking: bool) -> Outcome<String> {
    let mut conversation = Conversation::new(messages);
    if no_thinking {
        conversation.set("enable_thinking", Json::from(false))?;
    }
    Ok(template.render(&conversation)?)
}

/// Prints text as it comes, unless one object is printed at the end; whether anybody reads it.
fn show(json: bool) -> impl FnMut(&str) -> Outcome<bool> {
    move |text| if json { Ok(true) } else { Ok(print::raw(text)?) }
}

/// Memory of the process now, and the caches in it.
fn memory(session: &Session<'_>) -> Value {
    let mut peak = PeakMemory::default();
    peak.sample();
    json!({ "peak_resident": peak.resident, "anonymous": peak.anonymous, "caches": session.bytes() })
}

fn per_second(count: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { count as f64 / time.as_secs_f64() }
}

fn timings(continuation: &Continuation) -> Value {
    let t = &continuation.timings;
    json!({
        "prompt_tokens": t.prompt_tokens, "prompt_ms": t.prompt.as_secs_f64() * 1e3,
        "prompt_tokens_per_s": per_second(t.prompt_tokens, t.prompt),
        "decoded_tokens": t.decoded_tokens, "decode_ms": t.decode.as_secs_f64() * 1e3,
        "decode_tokens_per_s": per_second(t.decoded_tokens, t.decode),
    })
}

fn summary(continuation: &Continuation, finish: Finish) -> String {
    let t = &continuation.timings;
    let why = match finish {
        Finish::EndToken => "end token",
        Finish::StopString => "stop string",
        Finish::Length => "length",
        Finish::ContextFull => "context full",
        Finish::Interrupted => "interrupted",
    };
    let mut text = format!(
        "prompt {} tokens, {:.1} tokens/s; {} tokens, {:.1} tokens/s; ended by {why}",
        t.prompt_tokens,
        per_second(t.prompt_tokens, t.prompt),
        continuation.tokens.len(),
        per_second(t.decoded_tokens, t.decode),
    );
    let d = &continuation.drafting;
    if d.guessed > 0 {
        let share = 100.0 * d.accepted as f64 / d.guessed as f64;
        text.push_str(&format!(
            "; {} of {} guesses kept ({share:.0} %), {} passes",
            d.accepted, d.guessed, d.passes
        ));
    }
    text
}

/// Ctrl-C raises the flag; `idle` is called for each as well. A second one while the flag is up ends the process.
pub(super) fn interrupt(idle: impl Fn() + Send + 'static) -> Outcome<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(Exit::Interrupted as i32);
        }
        idle();
    })
    .map_err(|error| CliError::Signals(error.to_string()))?;
    Ok(stop)
}

/// Talk with a model.
///
/// Each line is a message; `/reset` starts anew, `/quit` or the end of input ends. Ctrl-C breaks an answer off and
/// keeps the conversation; at the prompt, twice, it ends.
#[derive(Debug, Args)]
pub struct ChatArgs {
    #[command(flatten)]
    model: WriterArgs,
    /// A system message.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Set the template's variable `enable_thinking` to false.
    #[arg(long)]
    no_thinking: bool,
    /// Most tokens of an answer.
    #[arg(long, value_name = "N", default_value_t = 2048)]
    max_tokens: usize,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    draft: DraftArgs,
    /// Print one JSON object a turn instead of text: `user`, `assistant`, `finish_reason`, `timings`.
    #[arg(long)]
    json: bool,
}

impl ChatArgs {
    pub fn run(self) -> Outcome<Exit> {
        let (answering, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let flags = (Arc::clone(&answering), Arc::clone(&stop));
        ctrlc::set_handler(move || {
            let again = flags.1.swap(true, Ordering::Relaxed);
            if !flags.0.load(Ordering::Relaxed) {
                // Nobody is there to ask.
                if again || !std::io::stdin().is_terminal() {
                    std::process::exit(Exit::Interrupted as i32);
                }
                print::say("\n(once more, or /quit, to end)");
                let _ = write!(std::io::stderr(), "> ").and_then(|()| std::io::stderr().flush());
            }
        })
        .map_err(|error| CliError::Signals(error.to_string()))?;
        let dir = self.model.folder()?;
        let settings = GenerationConfig::read(&dir)?;
        let mut sampler = Sampler::new(self.sampling.over(&settings)?)?;
        let tokenizer = Tokenizer::open(&dir)?;
        let template = ChatTemplate::open(&dir)?;
        let model = self.model.open(&dir)?;
        let ends: Vec<u32> =
            EndTokens::read(&dir, Some(&tokenizer), model.config().vocab)?.ids_ascending().collect();
        say_precisions(&model);
        let mut talk = Talk::new(self.system.as_deref());
        let mut session = Session::new(&model);
        let terminal = std::io::stdin().is_terminal();
        let mut lines = std::io::stdin().lock().split(b'\n');
        loop {
            if terminal {
                let _ = write!(std::io::stderr(), "> ").and_then(|()| std::io::stderr().flush());
            }
            let Some(line) = lines.next() else { return Ok(Exit::Done) };
            let line = line.map_err(|error| CliError::Prompt { path: "-".into(), error })?;
            let Ok(line) = String::from_utf8(line) else {
                print::say("that line is not UTF-8 and was not sent");
                continue;
            };
            match line.trim() {
                "" => continue,
                "/quit" => return Ok(Exit::Done),
                "/reset" => {
                    talk = Talk::new(self.system.as_deref());
                    session = Session::new(&model);
                    continue;
                }
                other if other.starts_with('/') => {
                    print::say("the commands are /reset and /quit; a message does not begin with `/`");
                    continue;
                }
                _ => {}
            }
            let prompt = talk
                .ask(&line, &tokenizer, |messages| render(&template, messages.to_vec(), self.no_thinking))?;
            let room = model.config().context.unwrap_or(usize::MAX);
            if prompt.len() > room {
                let full = RuntimeError::ContextFull { tokens: prompt.len(), context: room };
                if self.json {
                    print::json_line(&json!({ "user": line, "error": full.to_string() }))?;
                }
                print::failure(&full);
                print::say("the last message is forgotten; `/reset` starts anew");
                talk.take_back();
                continue;
            }
            stop.store(false, Ordering::Relaxed);
            answering.store(true, Ordering::Relaxed);
            let request = Request {
                sampler: &mut sampler,
                max_tokens: self.max_tokens,
                ends: &ends,
                draft: self.draft.tokens(),
                stop: &|| stop.load(Ordering::Relaxed),
            };
            let answer = session.answer(&prompt, request, Some(&tokenizer), &[], &mut show(self.json))?;
            answering.store(false, Ordering::Relaxed);
            stop.store(false, Ordering::Relaxed);
            if self.json {
                print::json_line(&json!({
                    "user": line, "assistant": answer.text, "finish_reason": answer.finish,
                    "timings": timings(&answer.continuation),
                }))?;
            } else {
                print::text("\n")?;
                print::say(&summary(&answer.continuation, answer.finish));
            }
            talk.answered(prompt, answer, &tokenizer)?;
        }
    }
}

/// Messages so far, and how they read as tokens.
struct Talk {
    messages: Vec<Json>,
    /// The last rendering and the answer to it, and their tokens.
    text: String,
    tokens: Vec<u32>,
    rendered: String,
}

impl Talk {
    fn new(system: Option<&str>) -> Self {
        let messages = system.map(|text| message("system", text)).into_iter().collect();
        Self { messages, text: String::new(), tokens: Vec::new(), rendered: String::new() }
    }

    /// Adds the user's message; the tokens of the whole conversation.
    ///
    /// What the model has read and written keeps its tokens, where the template repeats its text: the same text
    /// might be cut into tokens in another way, and would have to be read again.
    fn ask(
        &mut self,
        line: &str,
        tokenizer: &Tokenizer,
        render: impl Fn(&[Json]) -> Outcome<String>,
    ) -> Outcome<Vec<u32>> {
        self.messages.push(message("user", line));
        self.rendered = render(&self.messages)?;
        match self.rendered.strip_prefix(&self.text) {
            Some(rest) if !self.text.is_empty() => {
                let mut tokens = self.tokens.clone();
                tokens.extend(tokenizer.encode(rest, false)?);
                Ok(tokens)
            }
            _ => Ok(tokenizer.encode(&self.rendered, false)?),
        }
    }

    fn take_back(&mut self) {
        self.messages.pop();
    }

    fn answered(&mut self, prompt: Vec<u32>, answer: Answer, tokenizer: &Tokenizer) -> Outcome<()> {
        self.messages.push(message("assistant", &answer.text));
        self.tokens = prompt;
        self.tokens.extend(&answer.continuation.tokens);
        self.text = std::mem::take(&mut self.rendered);
        // With special tokens, as the template would have to repeat it.
        self.text.push_str(&tokenizer.decode(&answer.continuation.tokens, false)?);
        Ok(())
    }
}
