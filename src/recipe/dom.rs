//! A recipe's TOML with positions: values are read one by one, and every mistake is kept.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::Mistake;
use super::keys::Section;
use super::text::Origin;

/// A mistake and where it is.
#[derive(Debug)]
pub(super) struct Problem {
    pub at: Origin,
    pub mistake: Mistake,
}

/// A value and where it is written.
#[derive(Debug, Clone)]
pub(super) struct At<T> {
    pub value: T,
    pub at: Origin,
}

/// The mistakes of one file, as they are found.
#[derive(Debug)]
pub(super) struct Report {
    pub file: usize,
    pub problems: Vec<Problem>,
}

impl Report {
    pub fn origin(&self, span: Range<usize>) -> Origin {
        Origin { file: self.file, start: span.start, end: span.end }
    }

    pub fn add(&mut self, at: Origin, mistake: Mistake) {
        self.problems.push(Problem { at, mistake });
    }
}

/// Parses the TOML of one file.
///
/// A key given twice does not hide the rest of the file; any other mistake of syntax does, because
/// what follows it may mean anything.
pub(super) fn parse<'t>(text: &'t str, report: &mut Report) -> Option<DeTable<'t>> {
    let (document, errors) = DeTable::parse_recoverable(text);
    let place = |error: &toml::de::Error| error.span().unwrap_or(text.len()..text.len());
    let broken = errors.iter().find(|error| error.message() != "duplicate key");
    if let Some(error) = broken {
        let at = report.origin(place(error));
        report.add(at, Mistake::Syntax { message: error.message().to_owned() });
        return None;
    }
    for error in &errors {
        let span = place(error);
        let key = text.get(span.clone()).unwrap_or_default().to_owned();
        let at = report.origin(span);
        report.add(at, Mistake::DuplicateKey { key });
    }
    Some(document.into_inner())
}

/// One table whose keys have all been checked against [`Section::keys`].
pub(super) struct Table<'t> {
    section: Section,
    entries: &'t DeTable<'t>,
    /// Its header, or its braces.
    pub at: Origin,
}

/// One value of a table.
#[derive(Clone, Copy)]
pub(super) struct Value<'t> {
    pub key: &'static str,
    pub value: &'t DeValue<'t>,
    pub at: Origin,
    /// Whether it is an element of the array that `key` holds.
    pub element: bool,
}

impl<'t> Table<'t> {
    pub fn new(section: Section, entries: &'t DeTable<'t>, at: Origin, report: &mut Report) -> Self {
        for key in entries.keys() {
            if !section.keys().any(|known| known.name == key.get_ref().as_ref()) {
                let at = report.origin(key.span());
                report.add(at, Mistake::UnknownKey { key: key.get_ref().to_string(), section });
            }
        }
        Self { section, entries, at }
    }

    /// The value of `key`, if it is given.
    pub fn get(&self, key: &'static str) -> Option<Value<'t>> {
        debug_assert!(self.section.keys().any(|known| known.name == key), "`{key}` is not in KEYS");
        let (name, value) = self.entries.get_key_value(key)?;
        // A table made of dotted keys has no braces; its first key stands for it.
        let span = if value.span().is_empty() { name.span() } else { value.span() };
        let at = Origin { file: self.at.file, start: span.start, end: span.end };
        Some(Value { key, value: value.get_ref(), at, element: false })
    }

    /// The value of a key that must be given.
    pub fn require(&self, key: &'static str, report: &mut Report) -> Option<Value<'t>> {
        let value = self.get(key);
        if value.is_none() {
            report.add(self.at, Mistake::MissingKey { key, section: self.section });
        }
        value
    }
}

impl<'t> Value<'t> {
    pub fn wrong_type(self, needed: &'static str, report: &mut Report) {
        let found = match self.value {
            DeValue::Array(_) => "an array",
            DeValue::Integer(_) => "an integer",
            DeValue::Boolean(_) => "a boolean",
            DeValue::Float(_) => "a float",
            DeValue::String(_) => "a string",
            DeValue::Table(_) => "a table",
            DeValue::Datetime(_) => "a date or time",
        };
        let key = self.key;
        let mistake = match self.element {
            // "strings", "tables".
            true => Mistake::WrongElement { key, needed: needed.trim_start_matches("a "), found },
            false => Mistake::WrongType { key, needed, found },
        };
        report.add(self.at, mistake);
    }

    /// A string that is not blank.
    pub fn string(self, report: &mut Report) -> Option<At<&'t str>> {
        match self.value {
            DeValue::String(text) if text.trim().is_empty() => {
                report.add(self.at, Mistake::Empty { key: self.key });
                None
            }
            DeValue::String(text) => Some(At { value: text.as_ref(), at: self.at }),
            _ => {
                self.wrong_type("a string", report);
                None
            }
        }
    }

    /// An integer; `None` inside if it needs more than 128 bits, beside its text.
    pub fn integer(self, report: &mut Report) -> Option<(Option<i128>, String)> {
        match self.value {
            DeValue::Integer(number) => {
                Some((i128::from_str_radix(number.as_str(), number.radix()).ok(), number.to_string()))
            }
            _ => {
                self.wrong_type("an integer", report);
                None
            }
        }
    }

    /// A number, whole or not; `None` inside if it is none that an f64 holds, beside its text.
    pub fn number(self, report: &mut Report) -> Option<(Option<f64>, String)> {
        let text = match self.value {
            DeValue::Float(number) => number.as_str(),
            DeValue::Integer(_) => {
                return self.integer(report).map(|(number, text)| (number.map(|number| number as f64), text));
            }
            _ => {
                self.wrong_type("a number", report);
                return None;
            }
        };
        Some((text.replace('_', "").parse().ok(), text.to_owned()))
    }

    /// What one of `names` stands for; `mistake` is for another word.
    pub fn named<T: Copy>(
        self,
        names: &[(&'static str, T)],
        report: &mut Report,
        mistake: impl FnOnce(String) -> Mistake,
    ) -> Option<At<T>> {
        let At { value: found, at } = self.string(report)?;
        match names.iter().find(|(name, _)| *name == found) {
            Some((_, value)) => Some(At { value: *value, at }),
            None => {
                report.add(at, mistake(found.to_owned()));
                None
            }
        }
    }

    pub fn boolean(self, report: &mut Report) -> Option<At<bool>> {
        match self.value {
            DeValue::Boolean(value) => Some(At { value: *value, at: self.at }),
            _ => {
                self.wrong_type("true or false", report);
                None
            }
        }
    }

    pub fn table(self, section: Section, report: &mut Report) -> Option<Table<'t>> {
        match self.value {
            DeValue::Table(entries) => Some(Table::new(section, entries, self.at, report)),
            _ => {
                self.wrong_type("a table", report);
                None
            }
        }
    }

    /// The elements of an array, each under the array's key.
    pub fn elements(self, needed: &'static str, report: &mut Report) -> Vec<Value<'t>> {
        match self.value {
            DeValue::Array(elements) => elements
                .iter()
                .map(|element: &Spanned<DeValue<'t>>| Value {
                    key: self.key,
                    value: element.get_ref(),
                    at: report.origin(element.span()),
                    element: true,
                })
                .collect(),
            _ => {
                self.wrong_type(needed, report);
                Vec::new()
            }
        }
    }
}
