//! Text tables, JSON, and failures for people.

use std::io::Write as _;

use serde::Serialize;

use super::CliError;
use crate::failure::Failure;

/// Writes text to stdout; a closed pipe is the reader's choice, not an error.
pub fn text(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    match out.write_all(clean(text).as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(CliError::Stdout(error)),
        _ => Ok(()),
    }
}

/// Writes a model's text to stdout as it is; on a terminal, control characters are shown and not obeyed.
///
/// Whether anybody reads it: a closed pipe is the reader's choice, and the end of the work.
pub fn raw(text: &str) -> Result<bool, CliError> {
    use std::io::IsTerminal as _;
    let mut out = std::io::stdout().lock();
    let shown = if out.is_terminal() { clean(text) } else { text.to_owned() };
    match out.write_all(shown.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(CliError::Stdout(error)),
    }
}

/// Writes one JSON object to stdout.
pub fn json<T: Serialize>(value: &T) -> Result<(), CliError> {
    let bytes = crate::artifact::config::pretty_json(value);
    text(&escaped(&String::from_utf8_lossy(&bytes)))
}

/// Writes a result to stdout: one JSON object, or `text_of` it.
pub fn result<T: Serialize>(
    as_json: bool,
    value: &T,
    text_of: impl FnOnce(&T) -> String,
) -> Result<(), CliError> {
    if as_json { json(value) } else { text(&text_of(value)) }
}

/// Writes one JSON object to stdout, as one line.
pub fn json_line(value: &serde_json::Value) -> Result<(), CliError> {
    text(&escaped(&format!("{value}\n")))
}

/// JSON leaves DEL and the C1 control characters as they are; here they are escaped as JSON escapes them.
fn escaped(json: &str) -> String {
    let escape = |c: char| match c {
        '\u{7f}'..='\u{9f}' => format!("\\u{:04x}", u32::from(c)),
        c => c.to_string(),
    };
    if json.contains(|c| matches!(c, '\u{7f}'..='\u{9f}')) {
        json.chars().map(escape).collect()
    } else {
        json.to_owned()
    }
}

/// Writes a line to stderr; nobody is left to tell if that fails.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{}", clean(line));
}

/// Characters of an error that are shown: a hostile name can be megabytes long.
const LONGEST: usize = 20_000;

/// Writes an error and its remedy to stderr.
pub fn failure(failure: &dyn Failure) {
    let mut out = format!("error: {}", shortened(failure.to_string()));
    if let Some(help) = failure.help() {
        out.push_str(&format!("\nhelp: {}", shortened(help)));
    }
    say(&out);
}

fn shortened(mut text: String) -> String {
    if let Some((cut, _)) = text.char_indices().nth(LONGEST) {
        text.truncate(cut);
        text.push_str(" ... (cut)");
    }
    text
}

/// Names come from files that anyone may have written: control characters are shown, not obeyed.
fn clean(text: &str) -> String {
    let escape = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(escape) {
        return text.to_owned();
    }
    text.chars().map(|c| if escape(c) { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// Characters of a table's cell that are shown.
const WIDEST: usize = 120;

/// A table with a header; numeric columns (`true`) are aligned right.
pub struct Table {
    columns: Vec<(&'static str, bool)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table.
    pub fn new(columns: &[(&'static str, bool)]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Appends a row of as many cells as there are columns.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let short = |cell: String| match cell.char_indices().nth(WIDEST) {
            Some((cut, _)) => format!("{}...", &cell[..cut]),
            None => cell,
        };
        self.rows.push(cells.into_iter().map(short).collect());
    }

    /// The text, two spaces between columns.
    pub fn render(&self) -> String {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0).max(self.columns[column].0.len())
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let line = |cells: &mut dyn Iterator<Item = &str>| {
            let mut text = String::new();
            for ((cell, width), (_, right)) in cells.zip(&widths).zip(&self.columns) {
                let padded = if *right { format!("{cell:>width$}") } else { format!("{cell:<width$}") };
                text.push_str(&padded);
                text.push_str("  ");
            }
            format!("{}\n", text.trim_end())
        };
        let mut out = line(&mut self.columns.iter().map(|(name, _)| *name));
        for row in &self.rows {
            out.push_str(&line(&mut row.iter().map(String::as_str)));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_and_long_cells_are_cut() {
        assert_eq!(clean("a\u{1b}[31mb\n\tc\0"), "a\\u{1b}[31mb\n\tc\\u{0}");
        let mut table = Table::new(&[("name", false)]);
        table.row(["é".repeat(100_000)]);
        assert_eq!(table.render().lines().last().map(|line| line.chars().count()), Some(WIDEST + 3));
    }

    #[test]
    fn json_stays_json_whatever_characters_are_in_it() {
        let value = serde_json::json!({ "text": "a\u{1b}b\u{7f}c\u{85}d\u{9f}e\u{a0}é" });
        let text = clean(&escaped(&format!("{value}\n")));
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }

    #[test]
    fn numbers_are_aligned_right_and_lines_end_without_spaces() {
        let mut table = Table::new(&[("name", false), ("n", true), ("note", false)]);
        table.row(["a".to_owned(), "7".to_owned(), "x".to_owned()]);
        table.row(["longer".to_owned(), "1234".to_owned(), String::new()]);
        assert_eq!(table.render(), "name       n  note\na          7  x\nlonger  1234\n");
    }
}
