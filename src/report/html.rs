//! Text that becomes HTML, and tables.
//!
//! Whatever comes from a database was written by somebody: it passes [`escape`], which [`Markup`] does unless told
//! that it holds markup already. The page is well-formed XML too, so that any XML parser can check it.

/// Markup: escaped text, or elements made here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Markup(String);

impl Markup {
    /// Elements, as they are.
    pub fn raw(markup: impl Into<String>) -> Self {
        Self(markup.into())
    }

    /// A dash: the number does not exist.
    pub fn none() -> Self {
        Self::raw("<span class=\"none\">–</span>")
    }

    /// `value` as text, or a dash.
    pub fn or_none(value: Option<String>) -> Self {
        value.map_or_else(Self::none, Self::from)
    }

    /// The markup.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for Markup {
    fn from(text: String) -> Self {
        Self(escape(&text))
    }
}

impl From<&str> for Markup {
    fn from(text: &str) -> Self {
        Self(escape(text))
    }
}

/// `text` as HTML and XML, between tags or inside quotes. Control characters and those that turn the direction of text
/// or take no room are shown by their number.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            c if hidden(c) => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out
}

fn hidden(c: char) -> bool {
    let marks = ['\u{61c}', '\u{feff}', '\u{fffe}', '\u{ffff}'];
    let ranges = ['\u{200b}'..='\u{200f}', '\u{2028}'..='\u{202e}', '\u{2060}'..='\u{206f}'];
    c.is_control() || marks.contains(&c) || ranges.iter().any(|range| range.contains(&c))
}

/// The first `most` characters.
pub fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// A table with a caption; the first column names the row.
#[derive(Debug)]
pub struct Table {
    caption: Markup,
    columns: Vec<(Markup, bool)>,
    rows: Vec<Vec<Markup>>,
}

impl Table {
    /// An empty table. `true`: a column of numbers.
    pub fn new(caption: impl Into<Markup>, columns: &[(&str, bool)]) -> Self {
        let columns = columns.iter().map(|(name, number)| (Markup::from(*name), *number)).collect();
        Self { caption: caption.into(), columns, rows: Vec::new() }
    }

    /// Appends a column.
    pub fn column(&mut self, name: Markup, number: bool) {
        self.columns.push((name, number));
    }

    /// Appends a row of as many cells as there are columns.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Markup>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Whether it has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The element, in a box of its own that scrolls sideways.
    pub fn render(&self) -> String {
        let class = |number: bool| if number { " class=\"n\"" } else { "" };
        let mut out = format!(
            "<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"{0}\">\n<table>\n\
             <caption>{0}</caption>\n<thead><tr>",
            self.caption.as_str()
        );
        for (name, number) in &self.columns {
            out.push_str(&format!("<th scope=\"col\"{}>{}</th>", class(*number), name.as_str()));
        }
        out.push_str("</tr></thead>\n<tbody>\n");
        for row in &self.rows {
            out.push_str("<tr>");
            for (i, (cell, (_, number))) in row.iter().zip(&self.columns).enumerate() {
                let (open, close) = if i == 0 { ("th scope=\"row\"", "th") } else { ("td", "td") };
                out.push_str(&format!("<{open}{}>{}</{close}>", class(*number), cell.as_str()));
            }
            out.push_str("</tr>\n");
        }
        out.push_str("</tbody>\n</table>\n</div>\n");
        out
    }
}

/// A part that is closed at first.
pub fn details(summary: impl Into<Markup>, content: &str) -> String {
    format!("<details>\n<summary>{}</summary>\n{content}</details>\n", summary.into().as_str())
}

/// Text with `code` in backquotes, as elements.
pub fn prose(text: &str) -> String {
    let escaped = escape(text);
    let parts: Vec<&str> = escaped.split('`').collect();
    // Of an odd number of quotes the last one is only a quote.
    let pairs = (parts.len() - 1) / 2;
    let mut out = String::new();
    for (i, part) in parts.iter().enumerate() {
        match i {
            0 => {}
            i if i > 2 * pairs => out.push('`'),
            i if i % 2 == 1 => out.push_str("<code>"),
            _ => out.push_str("</code>"),
        }
        out.push_str(part);
    }
    out
}

/// A paragraph of [`prose`].
pub fn paragraph(class: &str, text: &str) -> String {
    let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
    format!("<p{class}>{}</p>\n", prose(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_becomes_markup() {
        assert_eq!(
            escape("</script><img onerror='x'>&\""),
            "&lt;/script&gt;&lt;img onerror=&#39;x&#39;&gt;&amp;&quot;"
        );
        assert_eq!(
            escape("a\u{0}\u{1b}\u{7f}\u{85}\n\t\u{fffe}"),
            "a\\u{0}\\u{1b}\\u{7f}\\u{85}\n\t\\u{fffe}"
        );
        assert_eq!(escape("gpj.\u{202e}exe\u{200b}\u{2066}"), "gpj.\\u{202e}exe\\u{200b}\\u{2066}");
        assert_eq!(escape("Größe 中文 é 🦀"), "Größe 中文 é 🦀");
        assert_eq!(cut("abcdé", 4), "abcd…");
        assert_eq!(cut("abcd", 4), "abcd");
    }

    #[test]
    fn code_is_in_backquotes() {
        assert_eq!(prose("a `b` <c> `d`"), "a <code>b</code> &lt;c&gt; <code>d</code>");
        assert_eq!(prose("one ` alone"), "one ` alone");
        assert_eq!(prose("`a` and `"), "<code>a</code> and `");
        assert_eq!(prose(""), "");
    }

    #[test]
    fn tables_name_their_rows_and_columns() {
        let mut table = Table::new("a < b", &[("model", false), ("n", true)]);
        table.row(["<x>".into(), Markup::raw("<b>1</b>")]);
        let html = table.render();
        assert!(html.contains("<caption>a &lt; b</caption>"), "{html}");
        assert!(html.contains("<th scope=\"row\">&lt;x&gt;</th><td class=\"n\"><b>1</b></td>"), "{html}");
    }
}
