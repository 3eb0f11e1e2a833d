//! Text to token ids and back.
//!
//! `tokenizer.json` is read by the `tokenizers` crate, which defines normalizing, splitting and merging.
//! What it would do in silence is refused or undone here: truncation and padding are switched off, dropout is
//! refused (the same text would give other tokens each time), and an added token whose id is not the declared
//! one is an error. `tokenizer_config.json` is applied as `transformers` 5 does: its `added_tokens_decoder` adds
//! tokens and replaces their flags, `split_special_tokens` reads special tokens as plain text; `add_bos_token` and
//! `add_eos_token` are not read where there is a tokenizer.json, whose post-processor says what goes around a text.
//!
//! The crate's regular expressions give up after 10^6 steps back and leave the rest of the text unsplit without
//! a word. Of the patterns in use only long whitespace comes near that: n whitespace characters before a letter
//! cost n steps. So [`BLANK_LIMIT`] in a row are refused.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::AddedToken;

use super::TextError;
use super::files::{Document, read};
use super::stream::{Steps, Streamer};
use crate::digest::{Digest, Hasher, canonical_json};

/// Whitespace characters in a row that are split exactly; half of what the regular expressions can do.
pub const BLANK_LIMIT: usize = 500_000;

/// Words, numbers, code, spaces, several scripts, marks that combine, a pictogram.
const PROBE: &str = "The quick  brown fox's 12345.678 jumps: naïve café, fiancée; x_1 += (a->b) * 0xFF;\r\n\t\
    if (i < 10) { return \"ok\"; }\n\n   \u{2014} «Привет, мир» 你好，世界。 こんにちは 안녕하세요 مرحبا שלום नमस्ते \
    e\u{301}e\u{301} ﬁ \u{200d}👩\u{200d}🚀 I'll we've DON'T 3rd 1,000,000 http://a.b/c?d=e#f";

/// A tokenizer of one model.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    pub(super) steps: Steps,
    size: usize,
}

/// The parts of tokenizer.json that the crate does not check.
#[derive(Deserialize)]
struct Declared {
    #[serde(default)]
    added_tokens: Vec<DeclaredToken>,
    #[serde(default)]
    model: DeclaredModel,
}

#[derive(Deserialize)]
struct DeclaredToken {
    id: u64,
    content: String,
}

#[derive(Deserialize, Default)]
struct DeclaredModel {
    #[serde(default, rename = "type")]
    kind: Option<Value>,
    #[serde(default)]
    dropout: Option<Value>,
    #[serde(default)]
    continuing_subword_prefix: Option<Value>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of `dir`, and `tokenizer_config.json` if there is one.
    ///
    /// # Errors
    /// [`TextError::NoTokenizer`], [`TextError::Tokenizer`] if the file is damaged, [`TextError::Unsupported`],
    /// [`TextError::TokenId`], and those of reading files.
    pub fn open(dir: &Path) -> Result<Self, TextError> {
        let Some((file, bytes)) = read(dir, "tokenizer.json")? else {
            return Err(TextError::NoTokenizer { dir: dir.to_path_buf() });
        };
        // First, because of JSON that breaks off the crate gives panics, not errors.
        let declared: Declared = serde_json::from_slice(&bytes)
            .map_err(|error| TextError::Tokenizer { file: file.clone(), problem: error.to_string() })?;
        let unsupported = |part: &str, why: &'static str| {
            Err(TextError::Unsupported { file: file.clone(), part: part.to_owned(), why })
        };
        let model = &declared.model;
        if model.dropout.as_ref().is_some_and(|dropout| dropout.as_f64() != Some(0.0)) {
            return unsupported("dropout", "the same text would give other tokens each time");
        }
        // The crate cuts the prefix off every second half of a merge without a look whether it is there.
        let prefix = model.continuing_subword_prefix.as_ref().and_then(Value::as_str).unwrap_or("");
        if !prefix.is_empty() && model.kind.as_ref().is_none_or(|kind| kind != "WordPiece") {
            return unsupported(
                "`continuing_subword_prefix`",
                "no language model that this runtime knows uses it",
            );
        }
        let mut inner = parse(&file, &bytes)?;
        inner
            .with_truncation(None)
            .map_err(|error| TextError::Tokenizer { file: file.clone(), problem: error.to_string() })?;
        inner.with_padding(None);
        let ids = declared.added_tokens.iter().map(|token| (token.id, token.content.as_str()));
        check_ids(&inner, &file, ids)?;

        if let Some(config) = Document::read(dir, "tokenizer_config.json")? {
            add_tokens(&mut inner, &config)?;
            inner.set_encode_special_tokens(config.flag("split_special_tokens")?.unwrap_or(false));
        }
        let steps = Steps::of(inner.get_decoder(), &file)?;
        let size = size(&inner);
        Ok(Self { inner, steps, size })
    }

    /// The ids of `text`. With `add_special`, those that the model wants around a text (a first token, say) too.
    ///
    /// A rendered chat template holds them already, so it is encoded without.
    ///
    /// # Errors
    /// [`TextError::LongBlank`]; [`TextError::Encode`] if the vocabulary has no token for a piece, and no token
    /// for such pieces.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        let found = longest_blank(text);
        if found > BLANK_LIMIT {
            return Err(TextError::LongBlank { found, limit: BLANK_LIMIT });
        }
        let encoding = guarded(|| self.inner.encode_fast(text, add_special))
            .and_then(|result| result.map_err(|error| error.to_string()))
            .map_err(|problem| TextError::Encode { problem })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `ids`. With `skip_special`, tokens marked special give no text.
    ///
    /// Ids that are no token give no text: a model's vocabulary is often padded beyond its tokenizer's.
    /// Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`TextError::Decode`].
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        let mut streamer = Streamer::new(self, skip_special);
        let mut text = String::new();
        for &id in ids {
            text.push_str(streamer.push(id)?);
        }
        text.push_str(&streamer.finish()?);
        Ok(text)
    }

    /// The token with this id, as the vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token, as the vocabulary spells it.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Whether a token of this spelling is marked special.
    pub fn is_special(&self, token: &str) -> bool {
        self.inner.get_added_vocabulary().is_special_token(token)
    }

    /// A digest of what the tokenizer does: every token's spelling and whether it is special, and how it splits a
    /// text that has something of everything.
    ///
    /// Two files that say the same in other words have the same fingerprint.
    ///
    /// # Errors
    /// [`TextError::Encode`] if it cannot encode the text.
    pub fn fingerprint(&self) -> Result<Digest, TextError> {
        let mut hasher = Hasher::default();
        for id in 0..self.size as u32 {
            let token = self.token(id);
            let special = token.as_ref().is_some_and(|token| self.is_special(token));
            hasher.update(&canonical_json(&(id, token, special)));
        }
        for special in [false, true] {
            hasher.update(&canonical_json(&self.encode(PROBE, special)?));
        }
        Ok(hasher.finish())
    }

    /// One more than the largest id; the model's vocabulary may be larger, never smaller.
    pub fn vocab_size(&self) -> usize {
        self.size
    }
}

fn parse(file: &Path, bytes: &[u8]) -> Result<tokenizers::Tokenizer, TextError> {
    guarded(|| tokenizers::Tokenizer::from_bytes(bytes))
        .and_then(|result| result.map_err(|error| error.to_string()))
        .map_err(|problem| TextError::Tokenizer { file: file.to_path_buf(), problem })
}

/// Runs code of the `tokenizers` crate: it has panics that a damaged tokenizer.json can reach.
fn guarded<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    super::quietly(|| catch_unwind(AssertUnwindSafe(work))).map_err(|panic| super::panic_text(panic.as_ref()))
}

/// Whether each token has the id that its file says: the crate numbers added tokens itself.
fn check_ids<'a>(
    inner: &tokenizers::Tokenizer,
    file: &Path,
    tokens: impl Iterator<Item = (u64, &'a str)>,
) -> Result<(), TextError> {
    for (declared, token) in tokens {
        let found = inner.token_to_id(token);
        if found.map(u64::from) != Some(declared) {
            return Err(TextError::TokenId {
                file: file.to_path_buf(),
                token: token.to_owned(),
                declared,
                found,
            });
        }
    }
    Ok(())
}

/// Adds the tokens of `added_tokens_decoder`, in the order of their ids; of a known token the flags change.
fn add_tokens(inner: &mut tokenizers::Tokenizer, config: &Document) -> Result<(), TextError> {
    const KEY: &str = "added_tokens_decoder";
    let Some(value) = config.get(KEY) else { return Ok(()) };
    let Value::Object(entries) = value else { return Err(config.wrong(KEY, value, "must be an object")) };
    let mut tokens = BTreeMap::new();
    for (id, entry) in entries {
        let key = format!("{KEY}.{id}");
        let number: u32 = id
            .parse()
            .map_err(|_| config.wrong(&key, entry, "must have a whole number below 2^32 as its name"))?;
        let Some(content) = entry.get("content").and_then(Value::as_str) else {
            return Err(config.wrong(&key, entry, "must be an object whose `content` is a string"));
        };
        let flag = |name: &str, absent: bool| match entry.get(name) {
            None | Some(Value::Null) => Ok(absent),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(config.wrong(&format!("{key}.{name}"), other, "must be true or false")),
        };
        let special = flag("special", false)?;
        let token = AddedToken::from(content, special)
            .single_word(flag("single_word", false)?)
            .lstrip(flag("lstrip", false)?)
            .rstrip(flag("rstrip", false)?)
            .normalized(flag("normalized", !special)?);
        tokens.insert(number, token);
    }
    let failed = |problem| TextError::Tokenizer { file: config.file.clone(), problem };
    let known = inner.get_added_tokens_decoder();
    let new: Vec<AddedToken> = tokens
        .iter()
        .filter(|(id, token)| known.get(id) != Some(token))
        .map(|(_, token)| token.clone())
        .collect();
    if !new.is_empty() {
        guarded(|| inner.add_tokens(new))
            .and_then(|result| result.map_err(|error| error.to_string()))
            .map_err(failed)?;
    }
    let ids = tokens.iter().map(|(id, token)| (u64::from(*id), token.content.as_str()));
    check_ids(inner, &config.file, ids)
}

/// One more than the largest id.
fn size(inner: &tokenizers::Tokenizer) -> usize {
    // Almost always there are no gaps, and copying the whole vocabulary to see that would double it for a moment.
    let count = inner.get_vocab_size(true);
    let dense = u32::try_from(count).is_ok_and(|count| (0..count).all(|id| inner.id_to_token(id).is_some()));
    if dense {
        return count;
    }
    inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1)
}

/// The most whitespace characters in a row.
fn longest_blank(text: &str) -> usize {
    // Shorter texts cannot have more, and most are.
    if text.len() <= BLANK_LIMIT {
        return 0;
    }
    let (mut longest, mut run) = (0, 0);
    for c in text.chars() {
        run = if c.is_whitespace() { run + 1 } else { 0 };
        longest = longest.max(run);
    }
    longest
}
