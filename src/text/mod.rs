//! Text in, tokens out, and back: tokenizers, chat templates, end tokens, streamed text.
//!
//! Nothing here knows a model. A folder's `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` and
//! `generation_config.json` are read; `docs/text.md` says what of them. Where another program defines the
//! answer (`tokenizers`, `transformers` with Jinja2), goldens made by it are in `goldens/`.

pub mod documents;
mod error;
mod files;
mod generation;
mod moment;
mod python;
mod stream;
mod template;
mod tokenizer;

pub use error::TextError;
pub use generation::{EndTokens, GenerationConfig};
pub use moment::Moment;
pub use stream::{StopMatcher, Streamer};
pub use template::{ChatTemplate, Conversation, Json};
pub use tokenizer::{BLANK_LIMIT, Tokenizer};

/// The message of a panic, for crates that have some which bad input can reach.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text =
        panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    format!("the library that reads it gave up: {}", text.unwrap_or("no reason given"))
}

thread_local! {
    /// Whether this thread expects a panic and will report it itself.
    static QUIET: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Runs `work` without the message that a panic inside it would print.
fn quietly<T>(work: impl FnOnce() -> T) -> T {
    static HOOK: std::sync::Once = std::sync::Once::new();
    HOOK.call_once(|| {
        let shown = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                shown(panic);
            }
        }));
    });
    let before = QUIET.replace(true);
    let result = work();
    QUIET.set(before);
    result
}
