//! Suites: frozen files of items, one JSON object a line.
//!
//! | kind | keys | optional |
//! | --- | --- | --- |
//! | multiple choice | `prompt`, `choices` (texts that may follow it), `answer` (index of the right one) | `id` |
//! | generative | `raw_prompt` or `question` or both, `answer` (a number, as a string) | `id`, `stop`, `gold`, `extract` |
//! | cloze | `prompt`, `gold` (the text that should follow it) | `id` |
//!
//! All items of a file are of one kind, and have the same frames. An unknown key is an error: it may be a misspelt one.
//!
//! An item's id is its key `id`, else the first 16 hexadecimal digits of the SHA-256 of its canonical JSON. Line
//! numbers would not do: results of two versions of a file are paired by id, and one line more would shift all after it.
//! So two equal items must be told apart by ids of their own.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::answer::{Extract, Number};
use super::{Fault, Frame, TaskError, olmo};
use crate::checkpoint::REPORTED;
use crate::digest::{Digest, canonical_json};
use crate::failure::Problems;

/// A file of items.
#[derive(Debug, Clone, PartialEq)]
pub struct Suite {
    /// The file's name without endings; of a package's file, `TASK/VARIANT`.
    pub name: String,
    /// SHA-256 of the file as it is on disk.
    pub digest: Digest,
    /// What is asked.
    pub items: Items,
    /// For people: what was left out or is odd, with counts.
    pub notes: Vec<String>,
}

/// Items of one kind, in the order of the file.
#[derive(Debug, Clone, PartialEq)]
pub enum Items {
    /// Which continuation is the likeliest.
    Choice(Vec<ChoiceItem>),
    /// What the model writes.
    Generative(Vec<GenerativeItem>),
    /// Whether the model would write exactly this.
    Cloze(Vec<ClozeItem>),
}

/// A multiple choice item.
#[derive(Debug, Clone, PartialEq)]
pub struct ChoiceItem {
    /// Its name in the suite.
    pub id: String,
    /// One prompt for all choices, or one for each.
    pub prompts: Vec<String>,
    /// What may follow.
    pub choices: Vec<String>,
    /// The right one.
    pub answer: usize,
}

/// A question whose answer is read from what the model writes.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerativeItem {
    /// Its name in the suite.
    pub id: String,
    /// The prompt of the raw frame.
    pub raw_prompt: Option<String>,
    /// The user's message of the chat frame.
    pub question: Option<String>,
    /// The right answer.
    pub answer: Number,
    /// What ends the raw frame, beside a blank line and end tokens.
    pub stop: Vec<String>,
    /// A right continuation of the raw prompt, whose probability is taken too.
    pub gold: Option<String>,
    /// Where the answer is.
    pub extract: Extract,
}

/// A text whose continuation is known.
#[derive(Debug, Clone, PartialEq)]
pub struct ClozeItem {
    /// Its name in the suite.
    pub id: String,
    /// The text.
    pub prompt: String,
    /// What follows.
    pub gold: String,
}

impl GenerativeItem {
    /// Refuses a gold continuation of a prompt that ends in white space: which tokens it has is not clear.
    pub(super) fn check_gold(self) -> Result<Self, Fault> {
        match &self.raw_prompt {
            Some(prompt) if self.gold.is_some() && prompt.ends_with(char::is_whitespace) => {
                Err(Fault::GoldAfterBlank)
            }
            _ => Ok(self),
        }
    }
}

impl Items {
    /// The ids, in the order of the file.
    pub fn ids(&self) -> Vec<&str> {
        match self {
            Items::Choice(items) => items.iter().map(|item| item.id.as_str()).collect(),
            Items::Generative(items) => items.iter().map(|item| item.id.as_str()).collect(),
            Items::Cloze(items) => items.iter().map(|item| item.id.as_str()).collect(),
        }
    }

    /// The frames that every item has.
    pub fn frames(&self) -> Vec<Frame> {
        let items = match self {
            Items::Choice(_) => return vec![Frame::Choice],
            Items::Cloze(_) => return vec![Frame::Raw],
            Items::Generative(items) => items,
        };
        let raw = items.iter().all(|item| item.raw_prompt.is_some());
        let chat = items.iter().all(|item| item.question.is_some());
        [(Frame::Raw, raw), (Frame::Chat, chat)].into_iter().filter(|(_, has)| *has).map(|(f, _)| f).collect()
    }

    /// How many.
    pub fn len(&self) -> usize {
        match self {
            Items::Choice(items) => items.len(),
            Items::Generative(items) => items.len(),
            Items::Cloze(items) => items.len(),
        }
    }

    /// Whether there are none, which [`Suite::open`] refuses.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// For people, and in results.
    pub fn kind(&self) -> &'static str {
        match self {
            Items::Choice(_) => CHOICE,
            Items::Generative(_) => GENERATIVE,
            Items::Cloze(_) => CLOZE,
        }
    }
}

pub(super) const CHOICE: &str = "multiple choice";
pub(super) const GENERATIVE: &str = "generative";
pub(super) const CLOZE: &str = "cloze";

impl Suite {
    /// Reads and checks a whole file: our own form, or the package's if it is called `requests.jsonl`. A file whose
    /// name ends in `.gz` is decompressed.
    ///
    /// # Errors
    /// Every line that is wrong, up to [`REPORTED`] of them and a count of the others.
    pub fn open(path: &Path) -> Result<Self, Problems<TaskError>> {
        let bytes = std::fs::read(path).map_err(TaskError::io(path))?;
        let digest = Digest::of(&bytes);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let compressed = name.strip_suffix(".gz");
        let lines = Lines::new(path, &bytes, compressed.is_some());
        let name = compressed.unwrap_or(&name);
        let (name, (items, notes)) = match name {
            "requests.jsonl" => (olmo::name(path), olmo::read(lines)?),
            _ => (name.strip_suffix(".jsonl").unwrap_or(name).to_owned(), (read(lines)?, Vec::new())),
        };
        if items.is_empty() {
            return Err(TaskError::NoItems { path: path.to_owned() }.into());
        }
        Ok(Self { name, digest, items, notes })
    }
}

/// Numbered lines of a file, and the problems found in them.
pub(super) struct Lines<'a> {
    pub path: &'a Path,
    reader: Box<dyn BufRead + 'a>,
    number: usize,
    problems: Vec<TaskError>,
    wrong: usize,
}

impl<'a> Lines<'a> {
    fn new(path: &'a Path, bytes: &'a [u8], compressed: bool) -> Self {
        let reader: Box<dyn BufRead + 'a> = match compressed {
            true => Box::new(BufReader::with_capacity(1 << 16, MultiGzDecoder::new(bytes))),
            false => Box::new(bytes),
        };
        Self { path, reader, number: 0, problems: Vec::new(), wrong: 0 }
    }

    /// Gives every line and its number to `take`, whose faults are collected.
    pub fn each(&mut self, mut take: impl FnMut(usize, &str) -> Result<(), Fault>) -> Result<(), TaskError> {
        let mut line = Vec::new();
        loop {
            line.clear();
            // A line longer than this is no item; it would only fill the memory.
            let mut part = self.reader.by_ref().take(LONGEST_LINE);
            let read = part.read_until(b'\n', &mut line);
            match read {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(source) => return Err(TaskError::Gzip { path: self.path.to_owned(), source }),
            }
            self.number += 1;
            let text = match std::str::from_utf8(&line) {
                Ok(text) if text.trim().is_empty() => Err(Fault::Blank),
                // With its end an error at the end of the line would be on the next.
                Ok(text) => Ok(text.trim_end_matches(['\r', '\n'])),
                Err(_) => Err(Fault::NotUtf8),
            };
            if let Err(fault) = text.and_then(|text| take(self.number, text)) {
                self.fault(self.number, fault);
            }
        }
    }

    /// Notes what is wrong with a line.
    pub fn fault(&mut self, line: usize, fault: Fault) {
        self.wrong += 1;
        if self.wrong <= REPORTED {
            self.problems.push(TaskError::Line { path: self.path.to_owned(), line, fault });
        }
    }

    /// `value`, if no line was wrong.
    pub fn none_or<T>(mut self, value: T) -> Result<T, Problems<TaskError>> {
        if self.wrong > REPORTED {
            let count = self.wrong - REPORTED;
            self.problems.push(TaskError::More { path: self.path.to_owned(), count });
        }
        Problems::none_or(self.problems, value)
    }
}

/// Bytes of a line.
const LONGEST_LINE: u64 = 64 << 20;

/// Reads one line as a JSON object.
pub(super) fn parse<'de, T: Deserialize<'de>>(line: &'de str) -> Result<T, Fault> {
    // A list would be taken for the values of the keys in their order.
    if !line.trim_start().starts_with('{') {
        return Err(Fault::NoObject);
    }
    serde_json::from_str(line).map_err(|error| {
        let text = error.to_string();
        // The error counts lines within this one.
        let problem = text.rsplit_once(" at line ").map_or(text.as_str(), |(problem, _)| problem);
        Fault::Json { column: error.column(), problem: problem.to_owned() }
    })
}

/// A line of our own form.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Line {
    #[serde(skip_serializing)]
    id: Option<String>,
    prompt: Option<String>,
    choices: Option<Vec<String>>,
    answer: Option<Value>,
    raw_prompt: Option<String>,
    question: Option<String>,
    stop: Option<Vec<String>>,
    gold: Option<String>,
    extract: Option<Extract>,
}

impl Line {
    /// Its id, and whether the file gives it.
    fn id(&self) -> Result<(String, bool), Fault> {
        match &self.id {
            Some(id) if id.trim().is_empty() => Err(Fault::Empty { key: "id" }),
            Some(id) => Ok((id.clone(), true)),
            None => Ok((Digest::of(&canonical_json(self)).to_string()[..16].to_owned(), false)),
        }
    }

    fn kind(&self) -> Result<&'static str, Fault> {
        let (choice, written) =
            (self.choices.is_some(), self.raw_prompt.is_some() || self.question.is_some());
        match (self.prompt.is_some(), choice, written, self.answer.is_some()) {
            (true, true, false, true) => Ok(CHOICE),
            (false, false, true, true) => Ok(GENERATIVE),
            (true, false, false, false) if self.gold.is_some() => Ok(CLOZE),
            _ => Err(Fault::NoKind),
        }
    }

    /// Refuses keys that the kind gives no meaning.
    fn refuse(&self, kind: &'static str) -> Result<(), Fault> {
        let present = [
            ("stop", self.stop.is_some(), kind == GENERATIVE),
            ("extract", self.extract.is_some(), kind == GENERATIVE),
            ("gold", self.gold.is_some(), kind == CLOZE || kind == GENERATIVE && self.raw_prompt.is_some()),
        ];
        match present.into_iter().find(|(_, present, fits)| *present && !fits) {
            Some((key, ..)) => Err(Fault::StrayKey { key, kind }),
            None => Ok(()),
        }
    }
}

fn filled(key: &'static str, text: Option<String>) -> Result<Option<String>, Fault> {
    match text {
        Some(text) if text.trim().is_empty() => Err(Fault::Empty { key }),
        other => Ok(other),
    }
}

fn required(key: &'static str, text: Option<String>) -> Result<String, Fault> {
    filled(key, text)?.ok_or(Fault::NoKind)
}

/// Where two choices are equal.
pub(super) fn equal_choices(choices: &[String]) -> Option<(usize, usize)> {
    let pairs = (0..choices.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
    pairs.into_iter().find(|(a, b)| choices[*a] == choices[*b])
}

fn choice(id: String, line: Line) -> Result<ChoiceItem, Fault> {
    let choices = line.choices.ok_or(Fault::NoKind)?;
    if choices.len() < 2 {
        return Err(Fault::FewChoices { found: choices.len() });
    }
    if let Some((first, second)) = equal_choices(&choices) {
        return Err(Fault::EqualChoices { first, second, text: choices[first].clone() });
    }
    let found = line.answer.unwrap_or_default();
    let answer = found.as_u64().and_then(|at| usize::try_from(at).ok()).filter(|at| *at < choices.len());
    let most = choices.len() - 1;
    let answer = answer.ok_or_else(|| Fault::AnswerIndex { found: found.to_string(), most })?;
    Ok(ChoiceItem { id, prompts: vec![required("prompt", line.prompt)?], choices, answer })
}

fn generative(id: String, line: Line) -> Result<GenerativeItem, Fault> {
    let found = line.answer.unwrap_or_default();
    let answer = found.as_str().and_then(Number::parse);
    let stop = line.stop.unwrap_or_default();
    if stop.iter().any(String::is_empty) {
        return Err(Fault::Empty { key: "stop" });
    }
    GenerativeItem {
        id,
        raw_prompt: filled("raw_prompt", line.raw_prompt)?,
        question: filled("question", line.question)?,
        answer: answer.ok_or_else(|| Fault::AnswerNumber { found: found.to_string() })?,
        stop,
        gold: filled("gold", line.gold)?,
        extract: line.extract.unwrap_or_default(),
    }
    .check_gold()
}

/// What the first good line says of all others.
struct First {
    line: usize,
    kind: &'static str,
    raw_prompt: bool,
    question: bool,
}

impl First {
    fn agrees(&self, kind: &'static str, line: &Line) -> Result<(), Fault> {
        if kind != self.kind {
            return Err(Fault::OtherKind { found: kind, needed: self.kind, first: self.line });
        }
        let frames = [
            ("raw_prompt", line.raw_prompt.is_some(), self.raw_prompt),
            ("question", line.question.is_some(), self.question),
        ];
        match frames.into_iter().find(|(_, here, there)| here != there) {
            Some((key, here, _)) => {
                let state = if here { "is here" } else { "is missing" };
                Err(Fault::OtherFrames { key, state, first: self.line })
            }
            None => Ok(()),
        }
    }
}

/// Reads our own form.
fn read(mut lines: Lines<'_>) -> Result<Items, Problems<TaskError>> {
    let mut first: Option<First> = None;
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let (mut choices, mut generatives, mut clozes) = (Vec::new(), Vec::new(), Vec::new());
    lines.each(|number, text| {
        let line: Line = parse(text)?;
        let kind = line.kind()?;
        line.refuse(kind)?;
        let (id, given) = line.id()?;
        first
            .get_or_insert(First {
                line: number,
                kind,
                raw_prompt: line.raw_prompt.is_some(),
                question: line.question.is_some(),
            })
            .agrees(kind, &line)?;
        if let Some(&first) = seen.get(&id) {
            return Err(if given { Fault::SameId { id, first } } else { Fault::SameItem { first } });
        }
        seen.insert(id.clone(), number);
        match kind {
            CHOICE => choices.push(choice(id, line)?),
            GENERATIVE => generatives.push(generative(id, line)?),
            _ => {
                let prompt = required("prompt", line.prompt)?;
                clozes.push(ClozeItem { id, prompt, gold: required("gold", line.gold)? });
            }
        }
        Ok(())
    })?;
    let items = match first.map(|first| first.kind) {
        Some(GENERATIVE) => Items::Generative(generatives),
        Some(CLOZE) => Items::Cloze(clozes),
        _ => Items::Choice(choices),
    };
    lines.none_or(items)
}
