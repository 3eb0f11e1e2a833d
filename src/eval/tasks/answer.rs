//! The answer in a text: which number it gives, and by which rule it was found.
//!
//! Two ways to look, of which an item names one:
//!
//! | way | what is looked for, in this order |
//! | --- | --- |
//! | [`Extract::FinalSentence`] | the first chunk of the text (up to a blank line) ends with `The answer is N.` |
//! | [`Extract::Gsm8k`] | the number after the first `####`; the number after the first `the answer is` (in any case); the last number |
//!
//! A marker (`####`, `the answer is`) counts if a number comes right after it; blanks, `:`, `=`, `*`, `_`, `(`, `[` and
//! backquotes may stand between. A marker before `N/A` says that there is no answer, and later rules are not tried.
//!
//! A number is `[sign] [currency] digits [. digits]`, the digits plain or in groups of three with commas. The sign is
//! `-`, `−` or `+` with no letter, digit, closing bracket or `%` before it (so `18-5` is 18 and 5); the currency is one
//! of `$ € £ ¥`, before or after the sign; `%`, units and a full stop after it are not part of it. No numbers are:
//! digits after a letter or `_` (`x2`), fractions (`1/2`), exponents (`1e5`) and dotted runs (`1.2.3`).
//!
//! Numbers are compared as decimals, exactly: `1,234.50` and `1234.5` are equal, `0.1` and `0.10000000001` are not.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A decimal in its one spelling: no sign but `-`, no commas, no zeros that say nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Number(String);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Number {
    /// The number that `text` is, blanks around it, a `%` and a full stop after it left out.
    pub fn parse(text: &str) -> Option<Self> {
        let (range, number) = leading(text.trim())?;
        matches!(&text.trim()[range.end..], "" | "." | "%" | "%.").then_some(number)
    }

    fn canonical(negative: bool, digits: &str, fraction: &str) -> Self {
        let whole: String = digits.chars().filter(|c| *c != ',').collect();
        let whole = whole.trim_start_matches('0');
        let fraction = fraction.trim_end_matches('0');
        let mut text = if whole.is_empty() { "0".to_owned() } else { whole.to_owned() };
        if !fraction.is_empty() {
            text.push('.');
            text.push_str(fraction);
        }
        Self(if negative && text != "0" { format!("-{text}") } else { text })
    }
}

/// How an item's answer is looked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Extract {
    /// The first chunk must end with `The answer is N.`
    #[default]
    FinalSentence,
    /// `#### N`, else `the answer is N`, else the last number.
    Gsm8k,
}

/// The rule that decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// The first chunk ends with `The answer is N.`
    FinalSentence,
    /// `#### N`.
    Hashes,
    /// `the answer is N`.
    AnswerIs,
    /// The last number.
    LastNumber,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The rule that decided; none if no rule applied.
    pub rule: Option<Rule>,
    /// The answer; none if no rule applied, or the marker is before `N/A`.
    pub answer: Option<Number>,
}

impl Extract {
    /// Looks for the answer in `text`.
    pub fn find(self, text: &str) -> Found {
        let found = match self {
            Extract::FinalSentence => final_sentence(text).map(|number| (Rule::FinalSentence, Some(number))),
            Extract::Gsm8k => {
                let lower = text.to_ascii_lowercase();
                let after =
                    |marker: &str| lower.find(marker).and_then(|at| marked(&text[at + marker.len()..]));
                let hashes = after("####").map(|answer| (Rule::Hashes, answer));
                let answer_is = || after("the answer is").map(|answer| (Rule::AnswerIs, answer));
                let last = || numbers(text).pop().map(|(_, number)| (Rule::LastNumber, Some(number)));
                hashes.or_else(answer_is).or_else(last)
            }
        };
        match found {
            Some((rule, answer)) => Found { rule: Some(rule), answer },
            None => Found { rule: None, answer: None },
        }
    }
}

/// The lines before the first blank one.
pub fn first_chunk(text: &str) -> &str {
    let mut end = 0;
    for line in text.split_inclusive('\n') {
        if line.trim().is_empty() {
            break;
        }
        end += line.len();
    }
    &text[..end]
}

fn final_sentence(text: &str) -> Option<Number> {
    const SENTENCE: &str = "The answer is ";
    let chunk = first_chunk(text).trim_end().strip_suffix('.')?;
    let said = &chunk[chunk.rfind(SENTENCE)? + SENTENCE.len()..];
    // The full stop is gone already: another one would be a second.
    if said.ends_with('.') { None } else { Number::parse(said) }
}

/// What a marker says, given the text after it: a number, that there is none, or (outer none) nothing.
fn marked(rest: &str) -> Option<Option<Number>> {
    let rest = rest.trim_start_matches(|c: char| c.is_whitespace() || ":=*_([`".contains(c));
    if rest.get(..3).is_some_and(|start| start.eq_ignore_ascii_case("n/a")) {
        return Some(None);
    }
    leading(rest).map(|(_, number)| Some(number))
}

/// The number that `text` begins with.
fn leading(text: &str) -> Option<(Range<usize>, Number)> {
    numbers(text).into_iter().next().filter(|(range, _)| range.start == 0)
}

const CURRENCY: [char; 4] = ['$', '€', '£', '¥'];
const SIGNS: [char; 3] = ['-', '−', '+'];

/// All numbers of a text, and where they are, signs and currencies included.
pub fn numbers(text: &str) -> Vec<(Range<usize>, Number)> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(start) = next_digits(text, at) {
        let run = Run::at(text, start);
        at = run.end;
        if let Some((from, negative)) = run.opening(text) {
            let number = Number::canonical(negative, &text[start..run.whole], &text[run.fraction.clone()]);
            found.push((from..run.end, number));
        }
    }
    found
}

/// Where the next digits are, or a dot before some.
fn next_digits(text: &str, from: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    (from..bytes.len()).find(|&i| {
        bytes[i].is_ascii_digit() || bytes[i] == b'.' && bytes.get(i + 1).is_some_and(u8::is_ascii_digit)
    })
}

/// Digits with what belongs to them, as byte positions.
struct Run {
    start: usize,
    /// End of the digits before the point.
    whole: usize,
    fraction: Range<usize>,
    end: usize,
    /// Something after it makes it no number.
    spoilt: bool,
}

impl Run {
    fn at(text: &str, start: usize) -> Self {
        let bytes = text.as_bytes();
        let digit = |i: usize| bytes.get(i).is_some_and(u8::is_ascii_digit);
        let digits = |from: usize| (from..).take_while(|i| digit(*i)).count();
        let mut whole = start + digits(start);
        if whole - start <= 3 {
            while bytes.get(whole) == Some(&b',') && digits(whole + 1) == 3 {
                whole += 4;
            }
        }
        let mut fraction = whole..whole;
        if bytes.get(whole) == Some(&b'.') && digit(whole + 1) {
            fraction = whole + 1..whole + 1 + digits(whole + 1);
        }
        let mut end = whole.max(fraction.end);
        let mut spoilt = false;
        // Dotted runs, fractions and exponents are taken whole, so that no part of them is read as a number.
        loop {
            let sign = usize::from(matches!(bytes.get(end + 1), Some(b'-' | b'+')));
            let skip = match bytes.get(end) {
                Some(b'.' | b'/') if digit(end + 1) => 1,
                Some(b'e' | b'E') if digit(end + 1 + sign) => 1 + sign,
                _ => break,
            };
            spoilt = true;
            end += skip;
            end += digits(end);
        }
        Self { start, whole, fraction, end, spoilt }
    }

    /// Where the number begins and whether it is negative; none if it is no number.
    fn opening(&self, text: &str) -> Option<(usize, bool)> {
        if self.spoilt {
            return None;
        }
        let mut before = text[..self.start].chars().rev().peekable();
        let (mut from, mut sign, mut currency) = (self.start, None, false);
        while let Some(&c) = before.peek() {
            if CURRENCY.contains(&c) && !currency {
                currency = true;
            } else if SIGNS.contains(&c) && sign.is_none() {
                let mut further = before.clone().skip(1);
                let prior = further.next();
                // After these, it is an operator or a hyphen.
                if prior.is_some_and(|p| p.is_alphanumeric() || ")]}%_".contains(p)) {
                    break;
                }
                sign = Some(c);
            } else {
                break;
            }
            from -= c.len_utf8();
            before.next();
        }
        match before.peek() {
            Some(c) if from == self.start && (c.is_alphabetic() || *c == '_') => None,
            _ => Some((from, matches!(sign, Some('-' | '−')))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Vec<String> {
        numbers(text).into_iter().map(|(_, number)| number.to_string()).collect()
    }

    fn found(extract: Extract, text: &str) -> (Option<Rule>, Option<String>) {
        let found = extract.find(text);
        (found.rule, found.answer.map(|number| number.to_string()))
    }

    #[test]
    fn numbers_are_read_in_every_usual_spelling() {
        for (text, expected) in [
            ("23", vec!["23"]),
            ("1,234", vec!["1234"]),
            ("1,234,567.50", vec!["1234567.5"]),
            ("007", vec!["7"]),
            ("0.50", vec!["0.5"]),
            (".5", vec!["0.5"]),
            ("5.", vec!["5"]),
            ("5.0", vec!["5"]),
            ("-0", vec!["0"]),
            ("-0.0", vec!["0"]),
            ("-12", vec!["-12"]),
            ("\u{2212}12", vec!["-12"]),
            ("+12", vec!["12"]),
            ("$18", vec!["18"]),
            ("-$18.20", vec!["-18.2"]),
            ("$-18", vec!["-18"]),
            ("€1,000", vec!["1000"]),
            ("25%", vec!["25"]),
            ("3kg and 18th", vec!["3", "18"]),
            ("00", vec!["0"]),
        ] {
            assert_eq!(all(text), expected, "{text}");
        }
    }

    #[test]
    fn a_minus_between_terms_is_an_operator() {
        for (text, expected) in [
            ("18-5", vec!["18", "5"]),
            ("(2)-5", vec!["2", "5"]),
            ("x-5", vec!["5"]),
            ("50%-5", vec!["50", "5"]),
            ("191 - 168 = 23", vec!["191", "168", "23"]),
            ("3 -4", vec!["3", "-4"]),
            ("= -4", vec!["-4"]),
            ("(-4)", vec!["-4"]),
            ("2024-01-02", vec!["2024", "1", "2"]),
            ("5\u{2013}10", vec!["5", "10"]),
        ] {
            assert_eq!(all(text), expected, "{text}");
        }
    }

    #[test]
    fn commas_join_groups_of_three_only() {
        for (text, expected) in [
            ("12,34", vec!["12", "34"]),
            ("1,2345", vec!["1", "2345"]),
            ("1234,567", vec!["1234", "567"]),
            ("1, 234", vec!["1", "234"]),
            ("10,000,00", vec!["10000", "0"]),
            ("3,4,500", vec!["3", "4500"]),
        ] {
            assert_eq!(all(text), expected, "{text}");
        }
    }

    #[test]
    fn what_only_looks_like_a_number_is_none() {
        for text in [
            "",
            "N/A",
            "x2",
            "B12",
            "_3",
            "1/2",
            "10/4/3",
            "1e5",
            "2E-3",
            "1.2.3",
            "192.168.0.1",
            ".",
            "-",
            "$",
        ] {
            assert_eq!(all(text), Vec::<String>::new(), "{text}");
        }
        assert_eq!(all("126 / 7 = 18"), ["126", "7", "18"]);
    }

    #[test]
    fn a_whole_text_is_a_number_or_not() {
        for (text, expected) in [
            (" 1,000 ", Some("1000")),
            ("18.", Some("18")),
            ("18%.", Some("18")),
            ("$5", Some("5")),
            ("-3.50", Some("-3.5")),
            ("18 apples", None),
            ("a 18", None),
            ("18 19", None),
            ("", None),
            ("N/A", None),
        ] {
            assert_eq!(Number::parse(text).map(|n| n.to_string()).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn equal_decimals_are_equal_and_near_ones_are_not() {
        let n = |text| Number::parse(text).unwrap();
        assert_eq!(n("1,234.50"), n("1234.5"));
        assert_eq!(n("$20.00"), n("20"));
        assert_ne!(n("0.1"), n("0.10000000001"));
        // f64 cannot tell these apart.
        assert_ne!(n("9007199254740993"), n("9007199254740992"));
    }

    #[test]
    fn the_final_sentence_must_end_the_first_chunk() {
        let rule = Some(Rule::FinalSentence);
        for (text, expected) in [
            (" 8 * 21 = 168. 191 - 168 = 23. The answer is 23.", Some("23")),
            ("The answer is 23.\n\nQ: next", Some("23")),
            ("The answer is 23.\n \nThe answer is 9.", Some("23")),
            ("The answer is 23.  \n", Some("23")),
            ("The answer is 4. No. The answer is 5.", Some("5")),
            ("line one\nThe answer is $1,200.50.", Some("1200.5")),
            ("The answer is -3.", Some("-3")),
            ("The answer is 23", None),
            ("The answer is 23. Yes.", None),
            ("The answer is 23..", None),
            ("The answer is N/A.", None),
            ("The answer is 23 eggs.", None),
            ("the answer is 23.", None),
            ("\n\nThe answer is 23.", None),
            ("Step.\n\nThe answer is 23.", None),
            ("168. 23.", None),
            ("", None),
        ] {
            let expected = (expected.and(rule), expected.map(str::to_owned));
            assert_eq!(found(Extract::FinalSentence, text), expected, "{text:?}");
        }
    }

    #[test]
    fn gsm8k_answers_are_found_by_the_first_rule_that_applies() {
        use Rule::{AnswerIs, Hashes, LastNumber};
        for (text, rule, expected) in [
            ("9 * 2 = 18\n#### 18", Some(Hashes), Some("18")),
            ("#### $1,800.00 in all, not 7", Some(Hashes), Some("1800")),
            ("####-5", Some(Hashes), Some("-5")),
            ("#### 18\nQuestion #### 20", Some(Hashes), Some("18")),
            ("#### N/A. 7", Some(Hashes), None),
            ("#### none. So the answer is 4.", Some(AnswerIs), Some("4")),
            ("So the answer is 18.", Some(AnswerIs), Some("18")),
            ("The answer is: **18** dollars, 3 a day", Some(AnswerIs), Some("18")),
            ("The Answer Is 18.\nThe answer is 20.", Some(AnswerIs), Some("18")),
            ("The answer is N/A, though 5 came close", Some(AnswerIs), None),
            ("The answer is perhaps 5, or 6", Some(LastNumber), Some("6")),
            ("9 + 9 = 18.", Some(LastNumber), Some("18")),
            ("He pays $70,000 x 2 = $140,000 a year.", Some(LastNumber), Some("140000")),
            ("It is 25% more.", Some(LastNumber), Some("25")),
            ("no number", None, None),
            ("1/2", None, None),
            ("", None, None),
        ] {
            assert_eq!(found(Extract::Gsm8k, text), (rule, expected.map(str::to_owned)), "{text:?}");
        }
    }

    #[test]
    fn a_chunk_ends_at_a_blank_line() {
        assert_eq!(first_chunk("a\nb\n\nc"), "a\nb\n");
        assert_eq!(first_chunk("a\r\n\r\nb"), "a\r\n");
        assert_eq!(first_chunk("a\n \t\nb"), "a\n");
        assert_eq!(first_chunk("\na"), "");
        assert_eq!(first_chunk("a"), "a");
        assert_eq!(first_chunk(""), "");
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_searched_without_a_crash(text in "[-−+$€0-9.,/eE %#()A-Za-z\n]{0,40}|.{0,40}") {
            for extract in [Extract::FinalSentence, Extract::Gsm8k] {
                extract.find(&text);
            }
            for (range, number) in numbers(&text) {
                // A canonical number is read as itself.
                proptest::prop_assert_eq!(Number::parse(&number.to_string()), Some(number));
                proptest::prop_assert!(text.is_char_boundary(range.start) && text.is_char_boundary(range.end));
            }
        }
    }
}
