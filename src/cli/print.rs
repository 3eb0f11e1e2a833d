//! Text tables, JSON, and failures for people.

use std::io::Write as _;

use serde::Serialize;

use super::CliError;
use crate::failure::Failure;

/// Writes text to stdout; a closed pipe is the reader's choice, not an error.
pub fn text(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(CliError::Stdout(error)),
        _ => Ok(()),
    }
}

/// Writes one JSON object to stdout.
pub fn json<T: Serialize>(value: &T) -> Result<(), CliError> {
    let bytes = crate::artifact::config::pretty_json(value);
    text(&String::from_utf8_lossy(&bytes))
}

/// Writes an error and its remedy to stderr.
pub fn failure(failure: &dyn Failure) {
    let mut out = format!("error: {failure}\n");
    if let Some(help) = failure.help() {
        out.push_str(&format!("help: {help}\n"));
    }
    // Nobody is left to tell if this fails.
    let _ = std::io::stderr().lock().write_all(out.as_bytes());
}

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
        self.rows.push(cells.into_iter().collect());
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
    fn numbers_are_aligned_right_and_lines_end_without_spaces() {
        let mut table = Table::new(&[("name", false), ("n", true), ("note", false)]);
        table.row(["a".to_owned(), "7".to_owned(), "x".to_owned()]);
        table.row(["longer".to_owned(), "1234".to_owned(), String::new()]);
        assert_eq!(table.render(), "name       n  note\na          7  x\nlonger  1234\n");
    }
}
