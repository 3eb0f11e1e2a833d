//! Where in a file something is written, and how a message shows it.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// One file of a recipe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecipeFile {
    /// As the command line or `extends` leads to it.
    pub path: PathBuf,
    /// All of it.
    pub text: String,
}

impl RecipeFile {
    /// The file's name without its folder: what an artifact records.
    pub fn name(&self) -> String {
        self.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }
}

/// A place in a recipe's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Origin {
    /// Index into [`super::Recipe::files`].
    pub file: usize,
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
}

/// What is wrong at a place of a text file, with the line it stands on.
///
/// ```text
/// recipes/x.toml:3:47
/// 3 | codec = { affine = { bits = 4, group = 100 } }
///   |                                        ^^^
/// group size must be 32, 64 or 128, got 100
/// ```
#[derive(Debug)]
pub struct Located<M> {
    path: PathBuf,
    line: usize,
    column: usize,
    excerpt: String,
    indent: usize,
    width: usize,
    mistake: M,
}

/// Characters of a line that a message shows around the mistake.
const SHOWN: usize = 100;

impl<M> Located<M> {
    /// Finds bytes `at` of `text`; a range past the end points at the end of the last line.
    pub fn new(path: &Path, text: &str, at: Range<usize>, mistake: M) -> Self {
        let boundary = |mut index: usize| {
            index = index.min(text.len());
            while !text.is_char_boundary(index) {
                index -= 1;
            }
            index
        };
        let last = text.strip_suffix('\n').unwrap_or(text);
        let start = boundary(at.start).min(last.len());
        let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |newline| start + newline);
        let end = boundary(at.end).clamp(start, line_end);

        let before = text[line_start..start].chars().count();
        let width = text[start..end].trim_end_matches('\r').chars().count().max(1);
        let characters: Vec<char> =
            text[line_start..line_end].trim_end_matches('\r').chars().map(printable).collect();
        let first = if characters.len() > SHOWN { before.saturating_sub(SHOWN / 2) } else { 0 };
        let shown = &characters[first.min(characters.len())..(first + SHOWN).min(characters.len())];
        let mut excerpt: String = shown.iter().collect();
        let mut indent = before - first;
        if first > 0 {
            excerpt.insert(0, '…');
            indent += 1;
        }
        if first + SHOWN < characters.len() {
            excerpt.push('…');
        }
        let width = width.min((excerpt.chars().count().saturating_sub(indent)).max(1));
        Self {
            path: path.to_owned(),
            line: text[..start].matches('\n').count() + 1,
            column: before + 1,
            excerpt: excerpt.trim_end().to_owned(),
            indent,
            width,
            mistake,
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The line, from 1.
    pub fn line(&self) -> usize {
        self.line
    }

    /// The column in characters, from 1.
    pub fn column(&self) -> usize {
        self.column
    }

    /// What is wrong there.
    pub fn mistake(&self) -> &M {
        &self.mistake
    }
}

/// A tab counts as one column, and a file cannot send control sequences to the terminal.
fn printable(character: char) -> char {
    match character {
        '\t' | '\u{feff}' => ' ',
        c if c.is_control() => char::REPLACEMENT_CHARACTER,
        c => c,
    }
}

impl<M: fmt::Display> fmt::Display for Located<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.line.to_string();
        writeln!(f, "{}:{number}:{}", self.path.display(), self.column)?;
        writeln!(f, "{}", format!("{number} | {}", self.excerpt).trim_end())?;
        let margin = number.len();
        writeln!(f, "{:margin$} | {:indent$}{}", "", "", "^".repeat(self.width), indent = self.indent)?;
        write!(f, "{}", self.mistake)
    }
}

impl<M: std::error::Error> std::error::Error for Located<M> {}

/// The known name that `found` is probably meant to be: the closest one within a third of its
/// length, counting swapped, added, missing and wrong characters.
pub(super) fn nearest<'k>(found: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    let spelled = found.to_lowercase().replace('_', "-");
    let allowed = (found.chars().count() / 3).max(1);
    known
        .into_iter()
        .map(|name| (strsim::damerau_levenshtein(&spelled, name), name))
        .filter(|(distance, _)| *distance <= allowed)
        .min()
        .map(|(_, name)| name)
}

/// "`a`, `b` and `c`".
pub(super) fn listed<'k>(names: impl IntoIterator<Item = &'k str>) -> String {
    let quoted: Vec<String> = names.into_iter().map(|name| format!("`{name}`")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str, at: Range<usize>) -> String {
        Located::new(Path::new("f"), text, at, "wrong").to_string()
    }

    #[test]
    fn the_caret_stands_under_the_words_it_means() {
        assert_eq!(shown("a = 1\nbc = 22\n", 11..13), "f:2:6\n2 | bc = 22\n  |      ^^\nwrong");
    }

    #[test]
    fn columns_count_characters_and_tabs_are_one() {
        assert_eq!(shown("\té = 1", 6..7), "f:1:6\n1 |  é = 1\n  |      ^\nwrong");
    }

    #[test]
    fn a_place_past_the_end_is_the_end_of_the_last_line() {
        assert_eq!(shown("a = 1\n", 99..120), "f:1:6\n1 | a = 1\n  |      ^\nwrong");
        assert_eq!(shown("", 0..0), "f:1:1\n1 |\n  | ^\nwrong");
    }

    #[test]
    fn a_range_over_lines_is_marked_on_its_first() {
        assert_eq!(shown("x = [\r\n 1]\r\n", 4..10), "f:1:5\n1 | x = [\n  |     ^\nwrong");
    }

    #[test]
    fn a_long_line_is_cut_around_the_mistake() {
        let text = format!("{}!{}", "a".repeat(300), "b".repeat(300));
        let half = "a".repeat(50);
        let expected = format!("f:1:301\n1 | …{half}!{}…\n  | {}^\nwrong", "b".repeat(49), " ".repeat(51));
        assert_eq!(shown(&text, 300..301), expected);
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert!(!shown("a = \u{1b}[2J", 4..5).contains('\u{1b}'));
    }

    #[test]
    fn a_near_name_is_found_and_a_far_one_is_not() {
        let known = ["shard-size", "directory", "affine"];
        for (found, expected) in [
            ("shard_size", Some("shard-size")),
            ("Affine", Some("affine")),
            ("afifne", Some("affine")),
            ("dir", None),
            ("zzz", None),
        ] {
            assert_eq!(nearest(found, known), expected, "{found}");
        }
    }
}
