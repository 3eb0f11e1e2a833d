//! Tokens to text as they come, and where to stop.
//!
//! A decoder of tokenizer.json is a chain of steps from a list of pieces to a list of pieces, joined at the end.
//! Each step that models use can run on one piece at a time with little memory, so text appears as soon as no
//! later token can change it, at a cost linear in the tokens:
//!
//! | step | what it holds back |
//! | --- | --- |
//! | `Replace`, `Strip` before `Fuse` | nothing: it looks at one piece |
//! | `Metaspace`, `WordPiece` | nothing: it treats the first piece apart |
//! | `ByteFallback` | a run of `<0x..>` tokens: one wrong byte turns the whole run into U+FFFD |
//! | `ByteLevel` | the bytes of an unfinished character, three at most |
//! | `Fuse`, then `Strip` | as many blanks as may be cut from the end |
//!
//! `CTC` and `BPEDecoder` look at neighbours and are of no language model in use; they are refused.

use std::path::Path;

use tokenizers::Decoder;
use tokenizers::decoders::DecoderWrapper;

use super::{TextError, Tokenizer};

/// The steps of a decoder: some on pieces, then joining, then cuts at the ends of the whole text.
#[derive(Debug)]
pub(super) struct Steps {
    pieces: Vec<PieceStep>,
    join: Join,
    cuts: Vec<Cut>,
}

#[derive(Debug, Clone)]
enum PieceStep {
    /// Looks at one piece.
    Alone(Box<DecoderWrapper>),
    /// Looks at one piece and whether it is the first.
    First(Box<DecoderWrapper>),
    /// Cuts the ends of one piece.
    Strip(Cut),
    /// Joins runs of `<0x..>`.
    Bytes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Join {
    /// One after the other.
    Plain,
    /// With a space between: what a tokenizer without a decoder does.
    Spaced,
    /// As bytes in the byte-level alphabet.
    ByteLevel,
}

/// Takes up to `start` characters `content` from the start, and up to `stop` from the end.
#[derive(Debug, Clone, Copy)]
struct Cut {
    content: char,
    start: usize,
    stop: usize,
}

impl Cut {
    fn piece(self, text: &str) -> &str {
        let cut =
            |text: &str, many: usize| text.chars().take(many).take_while(|c| *c == self.content).count();
        let width = self.content.len_utf8();
        let text = &text[cut(text, self.start) * width..];
        let end = text.chars().rev().take(self.stop).take_while(|c| *c == self.content).count();
        &text[..text.len() - end * width]
    }
}

impl Steps {
    /// The steps of a tokenizer's decoder.
    pub fn of(decoder: Option<&DecoderWrapper>, file: &Path) -> Result<Self, TextError> {
        let mut steps = Self { pieces: Vec::new(), join: Join::Plain, cuts: Vec::new() };
        match decoder {
            None => steps.join = Join::Spaced,
            Some(decoder) => {
                let mut joined = false;
                steps.add(decoder, &mut joined, file)?;
            }
        }
        Ok(steps)
    }

    fn add(&mut self, decoder: &DecoderWrapper, joined: &mut bool, file: &Path) -> Result<(), TextError> {
        use DecoderWrapper::*;
        let refused = |name: &str, why: &'static str| {
            Err(TextError::Unsupported { file: file.to_path_buf(), part: format!("decoder `{name}`"), why })
        };
        const LATE: &str = "it comes after the pieces have been joined";
        const ODD: &str = "no language model that this runtime knows uses it";
        match decoder {
            Sequence(list) => {
                for decoder in list.get_decoders() {
                    self.add(decoder, joined, file)?;
                }
            }
            Strip(strip) => {
                let cut = Cut { content: strip.content, start: strip.start, stop: strip.stop };
                if *joined {
                    self.cuts.push(cut);
                } else {
                    self.pieces.push(PieceStep::Strip(cut));
                }
            }
            Fuse(_) => *joined = true,
            BPE(_) => return refused("BPEDecoder", ODD),
            CTC(_) => return refused("CTC", ODD),
            _ if *joined => return refused("Sequence", LATE),
            ByteLevel(_) => {
                *joined = true;
                self.join = Join::ByteLevel;
            }
            ByteFallback(_) => self.pieces.push(PieceStep::Bytes),
            Replace(_) => self.pieces.push(PieceStep::Alone(Box::new(decoder.clone()))),
            Metaspace(_) | WordPiece(_) => self.pieces.push(PieceStep::First(Box::new(decoder.clone()))),
        }
        Ok(())
    }
}

/// Turns tokens into text as they come.
///
/// The pieces that [`Streamer::push`] gives, and what [`Streamer::finish`] gives, are together exactly
/// [`Tokenizer::decode`] of all ids, and none ends inside a character.
#[derive(Debug)]
pub struct Streamer<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// One a step on pieces.
    states: Vec<PieceState>,
    /// Whether a piece has reached the join.
    begun: bool,
    /// Bytes of an unfinished character.
    partial: Vec<u8>,
    /// One a cut.
    cuts: Vec<CutState>,
    out: String,
}

#[derive(Debug, Clone, Default)]
struct PieceState {
    begun: bool,
    run: Vec<u8>,
}

#[derive(Debug, Clone)]
struct CutState {
    /// How many more characters may be taken from the start.
    left: usize,
    /// How many characters are held, because the text may end here.
    held: usize,
}

impl<'a> Streamer<'a> {
    /// Starts an empty text. With `skip_special`, tokens marked special give no text.
    pub fn new(tokenizer: &'a Tokenizer, skip_special: bool) -> Self {
        let steps = &tokenizer.steps;
        Self {
            tokenizer,
            skip_special,
            states: vec![PieceState::default(); steps.pieces.len()],
            begun: false,
            partial: Vec::new(),
            cuts: steps.cuts.iter().map(|cut| CutState { left: cut.start, held: 0 }).collect(),
            out: String::new(),
        }
    }

    /// Takes the next token; gives the text that it completes, which is often empty.
    ///
    /// # Errors
    /// [`TextError::Decode`] if a pattern of the tokenizer fails.
    pub fn push(&mut self, id: u32) -> Result<&str, TextError> {
        self.out.clear();
        if let Some(token) = self.tokenizer.token(id)
            && !(self.skip_special && self.tokenizer.is_special(&token))
        {
            self.piece(0, token)?;
        }
        Ok(&self.out)
    }

    /// Ends the text; gives what was held back.
    ///
    /// # Errors
    /// As [`Streamer::push`].
    pub fn finish(mut self) -> Result<String, TextError> {
        self.out.clear();
        for at in 0..self.states.len() {
            self.end_run(at)?;
        }
        if !self.partial.is_empty() {
            // What is left is the start of one character.
            self.partial.clear();
            self.text("\u{fffd}");
        }
        Ok(self.out)
    }

    /// Gives a piece to step `at`.
    fn piece(&mut self, at: usize, piece: String) -> Result<(), TextError> {
        let steps = &self.tokenizer.steps;
        let Some(step) = steps.pieces.get(at) else {
            self.join(&piece);
            return Ok(());
        };
        let state = &mut self.states[at];
        let piece = match step {
            PieceStep::Alone(decoder) => last(decoder.decode_chain(vec![piece]))?,
            PieceStep::First(decoder) => {
                let before = std::mem::replace(&mut state.begun, true).then(String::new);
                last(decoder.decode_chain(before.into_iter().chain([piece]).collect()))?
            }
            PieceStep::Strip(cut) => cut.piece(&piece).to_owned(),
            PieceStep::Bytes => {
                if let Some(byte) = fallback_byte(&piece) {
                    state.run.push(byte);
                    return Ok(());
                }
                self.end_run(at)?;
                piece
            }
        };
        self.piece(at + 1, piece)
    }

    /// Passes on the run of bytes that step `at` holds.
    fn end_run(&mut self, at: usize) -> Result<(), TextError> {
        let run = std::mem::take(&mut self.states[at].run);
        if run.is_empty() {
            return Ok(());
        }
        match String::from_utf8(run) {
            Ok(text) => self.piece(at + 1, text),
            // One a byte, as the crate does, each a piece of its own.
            Err(error) => {
                (0..error.as_bytes().len()).try_for_each(|_| self.piece(at + 1, "\u{fffd}".to_owned()))
            }
        }
    }

    fn join(&mut self, piece: &str) {
        let begun = std::mem::replace(&mut self.begun, true);
        match self.tokenizer.steps.join {
            Join::Plain => self.text(piece),
            Join::Spaced => {
                if begun {
                    self.text(" ");
                }
                self.text(piece);
            }
            Join::ByteLevel => {
                let mut bytes = std::mem::take(&mut self.partial);
                let before = bytes.len();
                for c in piece.chars() {
                    match level_byte(c) {
                        Some(byte) => bytes.push(byte),
                        // A token that is not in the alphabet stands for itself: an added one, say.
                        None => {
                            bytes.truncate(before);
                            bytes.extend_from_slice(piece.as_bytes());
                            break;
                        }
                    }
                }
                self.partial = self.characters(bytes);
            }
        }
    }

    /// Passes on the whole characters of `bytes`, U+FFFD for what cannot become one; gives the unfinished rest.
    fn characters(&mut self, mut bytes: Vec<u8>) -> Vec<u8> {
        let mut at = 0;
        while at < bytes.len() {
            match std::str::from_utf8(&bytes[at..]) {
                Ok(text) => {
                    self.text(text);
                    at = bytes.len();
                }
                Err(error) => {
                    let end = at + error.valid_up_to();
                    self.text(std::str::from_utf8(&bytes[at..end]).expect("the error says that it is valid"));
                    at = end;
                    let Some(wrong) = error.error_len() else { break };
                    self.text("\u{fffd}");
                    at += wrong;
                }
            }
        }
        bytes.drain(..at);
        bytes
    }

    /// Gives text to the cuts, and what they pass to the output.
    fn text(&mut self, text: &str) {
        if self.cuts.is_empty() {
            self.out.push_str(text);
            return;
        }
        let mut text = text.to_owned();
        for (cut, state) in self.tokenizer.steps.cuts.iter().zip(&mut self.cuts) {
            let start = text.chars().take(state.left).take_while(|c| *c == cut.content).count();
            // Another character ends the start of the text.
            state.left = if start < text.chars().count() { 0 } else { state.left - start };
            let held = std::iter::repeat_n(cut.content, state.held);
            text = held.chain(text.chars().skip(start)).collect();
            state.held = text.chars().rev().take(cut.stop).take_while(|c| *c == cut.content).count();
            text.truncate(text.len() - state.held * cut.content.len_utf8());
        }
        self.out.push_str(&text);
    }
}

fn last(pieces: tokenizers::Result<Vec<String>>) -> Result<String, TextError> {
    match pieces {
        Ok(mut pieces) => Ok(pieces.pop().unwrap_or_default()),
        Err(error) => Err(TextError::Decode { problem: error.to_string() }),
    }
}

/// The byte that `<0x41>` stands for.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The byte that a character of the byte-level alphabet stands for.
///
/// Printable bytes stand for themselves; the others, in order, for U+0100 and on.
fn level_byte(c: char) -> Option<u8> {
    match c as u32 {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// Finds the first of some strings in a text that comes in parts.
///
/// "First" is the one that is complete first; of several complete at one place, the longest. So the answer does
/// not depend on how the text was cut into parts. Text that may be the start of a stop string is held back.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    held: String,
    stopped: bool,
    out: String,
}

#[derive(Debug, Clone)]
struct Stop {
    text: String,
    /// Of each prefix, how long its longest proper border is (Knuth, Morris and Pratt).
    borders: Vec<usize>,
    /// Bytes of `text` that the text so far ends with.
    matched: usize,
}

impl StopMatcher {
    /// Looks for `stops`; none is fine.
    ///
    /// # Errors
    /// [`TextError::EmptyStop`].
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Result<Self, TextError> {
        let mut list = Vec::new();
        for stop in stops {
            let text = stop.as_ref().to_owned();
            if text.is_empty() {
                return Err(TextError::EmptyStop);
            }
            list.push(Stop { borders: borders(text.as_bytes()), text, matched: 0 });
        }
        Ok(Self { stops: list, held: String::new(), stopped: false, out: String::new() })
    }

    /// Takes more text; gives what cannot be part of a stop string. After the first match it gives nothing more.
    pub fn push(&mut self, text: &str) -> &str {
        self.out.clear();
        if self.stopped {
            return &self.out;
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (at, byte) in text.bytes().enumerate() {
            let mut found = 0;
            for stop in &mut self.stops {
                if stop.step(byte) {
                    found = found.max(stop.text.len());
                }
            }
            if found > 0 {
                // A match starts inside what was held: its start was a match's start too.
                self.held.truncate(before + at + 1 - found);
                self.stopped = true;
                self.out.push_str(&std::mem::take(&mut self.held));
                return &self.out;
            }
        }
        let keep = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let give = self.held.len() - keep;
        self.out.extend(self.held.drain(..give));
        &self.out
    }

    /// Whether a stop string has been found.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Ends the text; gives what was held back.
    pub fn finish(self) -> String {
        self.held
    }
}

impl Stop {
    /// Takes one more byte; says whether the text now ends with this string.
    fn step(&mut self, byte: u8) -> bool {
        let text = self.text.as_bytes();
        while self.matched > 0 && text[self.matched] != byte {
            self.matched = self.borders[self.matched - 1];
        }
        if text[self.matched] == byte {
            self.matched += 1;
        }
        let found = self.matched == text.len();
        if found {
            self.matched = self.borders[self.matched - 1];
        }
        found
    }
}

fn borders(text: &[u8]) -> Vec<usize> {
    let mut borders = vec![0; text.len()];
    let mut length = 0;
    for at in 1..text.len() {
        while length > 0 && text[length] != text[at] {
            length = borders[length - 1];
        }
        if text[length] == text[at] {
            length += 1;
        }
        borders[at] = length;
    }
    borders
}
