//! What chat templates expect of Python: `json.dumps`, and the methods of strings, dicts and lists.
//!
//! Source: CPython 3.11, `json/encoder.py` and `Objects/unicodeobject.c`. Differs: `isdigit` and `isdecimal` are
//! `isnumeric`, and case follows Rust's Unicode tables. Methods that change a list or a dict do not exist, as in
//! Jinja2's immutable sandbox.

use std::fmt::Write as _;

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Output, State, Value};

/// Values inside values that are written. JSON from outside has at most 128.
const DEPTH_LIMIT: usize = 200;

fn invalid(problem: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

/// The arguments of a method: see [`place`].
fn bind<const N: usize>(
    function: &str,
    args: &[Value],
    names: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    let (given, named): (Rest<Value>, Kwargs) = from_args(args)?;
    place(function, &given, &named, names)
}

/// Arguments by position or name, one for each of `names`; `None` for those left out.
fn place<const N: usize>(
    function: &str,
    given: &[Value],
    named: &Kwargs,
    names: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    if given.len() > N {
        return Err(Error::new(
            ErrorKind::TooManyArguments,
            format!("`{function}` takes at most {N}, got {}", given.len()),
        ));
    }
    let mut bound: [Option<Value>; N] = std::array::from_fn(|i| given.get(i).cloned());
    for (slot, name) in bound.iter_mut().zip(names) {
        if named.has(name) {
            if slot.is_some() {
                return Err(Error::new(
                    ErrorKind::TooManyArguments,
                    format!("`{function}` got `{name}` twice"),
                ));
            }
            *slot = Some(named.get(name)?);
        }
    }
    named.assert_all_used()?;
    Ok(bound)
}

/// An argument that Python treats as left out when it is `None`.
fn some(value: Option<Value>) -> Option<Value> {
    value.filter(|value| !value.is_none())
}

fn text<'a>(function: &str, name: &str, value: &'a Option<Value>) -> Result<&'a str, Error> {
    match value {
        Some(value) => value.as_str().ok_or_else(|| {
            invalid(format!("`{name}` of `{function}` must be a string, not {}", value.kind()))
        }),
        None => Err(Error::new(ErrorKind::MissingArgument, format!("`{function}` needs `{name}`"))),
    }
}

fn whole(function: &str, name: &str, value: Option<Value>) -> Result<Option<i64>, Error> {
    value
        .map(|value| {
            value.as_i64().ok_or_else(|| {
                invalid(format!("`{name}` of `{function}` must be a whole number, not {}", value.kind()))
            })
        })
        .transpose()
}

/// Pays for a string of `bytes` before it is made.
fn pay(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel((bytes / 64) as u64)
}

/// How `json.dumps` writes.
struct Style {
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sorted: bool,
}

/// The filter `tojson` as `transformers` defines it: `json.dumps` with `ensure_ascii=False`, and no HTML escapes.
pub(super) fn tojson(
    state: &State,
    value: &Value,
    args: Rest<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sorted] = place("tojson", &args, &named, names)?;
    let indent = match some(indent) {
        None => None,
        Some(value) => Some(match (value.as_str(), value.as_i64()) {
            (Some(text), _) => text.to_owned(),
            (None, Some(width)) => {
                let width = usize::try_from(width).unwrap_or(0);
                pay(state, width)?;
                " ".repeat(width)
            }
            (None, None) => return Err(invalid("`indent` of `tojson` must be a whole number or a string")),
        }),
    };
    let (item, key) = match some(separators) {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(pair) => {
            let parts: Vec<Value> = pair.try_iter()?.collect();
            match parts.as_slice() {
                [item, key] if item.as_str().is_some() && key.as_str().is_some() => {
                    (item.to_string(), key.to_string())
                }
                _ => return Err(invalid("`separators` of `tojson` must be two strings")),
            }
        }
    };
    let truth = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let style = Style { ascii: truth(ascii), indent, item, key, sorted: truth(sorted) };
    let mut out = String::new();
    style.write(state, value, 0, &mut out)?;
    Ok(out)
}

impl Style {
    fn write(&self, state: &State, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > DEPTH_LIMIT {
            return Err(invalid(format!("`tojson` of values more than {DEPTH_LIMIT} deep")));
        }
        state.consume_fuel(1)?;
        let not = |what: &str| {
            Err(Error::new(
                ErrorKind::BadSerialization,
                format!("object of type {what} is not JSON serializable"),
            ))
        };
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.quote(state, value.as_str().unwrap_or_default(), out)?,
            ValueKind::Seq | ValueKind::Iterable => {
                let mut items = value.try_iter()?;
                let mut item = items.next();
                if item.is_none() {
                    out.push_str("[]");
                    return Ok(());
                }
                out.push('[');
                let mut first = true;
                while let Some(value) = item {
                    self.open(state, first, depth + 1, out)?;
                    first = false;
                    self.write(state, &value, depth + 1, out)?;
                    item = items.next();
                }
                self.line(state, depth, out)?;
                out.push(']');
            }
            ValueKind::Map => {
                let mut pairs = Vec::new();
                for key in value.try_iter()? {
                    state.consume_fuel(1)?;
                    let item = value.get_item(&key)?;
                    pairs.push((key, item));
                }
                if pairs.is_empty() {
                    out.push_str("{}");
                    return Ok(());
                }
                if self.sorted {
                    pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
                }
                out.push('{');
                for (at, (key, item)) in pairs.iter().enumerate() {
                    self.open(state, at == 0, depth + 1, out)?;
                    match key.kind() {
                        ValueKind::String => self.quote(state, key.as_str().unwrap_or_default(), out)?,
                        ValueKind::Number => {
                            let _ = write!(out, "\"{}\"", number(key));
                        }
                        ValueKind::Bool => {
                            out.push_str(if key.is_true() { "\"true\"" } else { "\"false\"" });
                        }
                        ValueKind::None => out.push_str("\"null\""),
                        other => return not(&other.to_string()),
                    }
                    out.push_str(&self.key);
                    self.write(state, item, depth + 1, out)?;
                }
                self.line(state, depth, out)?;
                out.push('}');
            }
            ValueKind::Undefined => return not("Undefined"),
            other => return not(&other.to_string()),
        }
        Ok(())
    }

    /// What comes before an item.
    fn open(&self, state: &State, first: bool, depth: usize, out: &mut String) -> Result<(), Error> {
        if !first {
            pay(state, self.item.len())?;
            out.push_str(&self.item);
        }
        self.line(state, depth, out)
    }

    /// A new line, where there is an indent.
    fn line(&self, state: &State, depth: usize, out: &mut String) -> Result<(), Error> {
        if let Some(indent) = &self.indent {
            pay(state, indent.len() * depth)?;
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
        Ok(())
    }

    fn quote(&self, state: &State, text: &str, out: &mut String) -> Result<(), Error> {
        pay(state, text.len())?;
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
        Ok(())
    }
}

/// A number as JSON of Python: whole numbers plainly, others as `float.__repr__`.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(number) if number.is_nan() => "NaN".to_owned(),
        Ok(number) if number.is_infinite() => if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
        Ok(number) => float(number),
        Err(_) => value.to_string(),
    }
}

/// `float.__repr__` of a finite number: the shortest digits that read back the same, with an exponent below
/// 10^-4 and from 10^16 on.
pub(super) fn float(number: f64) -> String {
    // Rust writes the shortest digits too; the exponent's form is what differs.
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').expect("`{:e}` writes an exponent");
    let exponent: i32 = exponent.parse().expect("`{:e}` writes a whole exponent");
    if (-4..16).contains(&exponent) {
        let plain = number.to_string();
        if plain.contains('.') { plain } else { plain + ".0" }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{digits}e{sign}{:02}", exponent.abs())
    }
}

/// What `str.isspace` is true for: Rust's whitespace and four separators.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase() || is_title(c)
}

/// The four letters of two that have a form for titles alone.
fn is_title(c: char) -> bool {
    matches!(c, '\u{1c5}' | '\u{1c8}' | '\u{1cb}' | '\u{1f2}')
}

fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let wanted = |c: char| match chars {
        Some(chars) => chars.contains(c),
        None => is_space(c),
    };
    let text = if left { text.trim_start_matches(wanted) } else { text };
    if right { text.trim_end_matches(wanted) } else { text }
}

/// The filter `trim`: `str(value).strip(chars)`.
pub(super) fn trim(state: &State, value: &Value, args: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let [chars] = place("trim", &args, &named, ["chars"])?;
    let chars = some(chars);
    let chars = if chars.is_some() { Some(text("trim", "chars", &chars)?) } else { None };
    Ok(strip(&string(state, value)?, chars, true, true).to_owned())
}

/// The filter `indent`.
pub(super) fn indent(
    state: &State,
    value: &Value,
    args: Rest<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let [width, first, blank] = place("indent", &args, &named, ["width", "first", "blank"])?;
    let margin = match &width {
        None => "    ".to_owned(),
        Some(text) if text.as_str().is_some() => text.to_string(),
        Some(_) => {
            let width =
                whole("indent", "width", width)?.and_then(|width| usize::try_from(width).ok()).unwrap_or(0);
            pay(state, width)?;
            " ".repeat(width)
        }
    };
    let truth = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let (first, blank) = (truth(first), truth(blank));
    let text = string(state, value)? + "\n";
    let mut out = String::new();
    for (at, line) in split_lines(&text, false).into_iter().enumerate() {
        pay(state, margin.len() + line.len())?;
        if at > 0 {
            out.push('\n');
        }
        if if at == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&margin);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// The filter `int`: the default if the value is no number.
pub(super) fn int(value: &Value, args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let [default, base] = place("int", &args, &named, ["default", "base"])?;
    let default = default.unwrap_or(Value::from(0));
    let base = whole("int", "base", base)?.unwrap_or(10);
    let Ok(radix @ 2..=36) = u32::try_from(base) else {
        return Err(invalid(format!("`base` of `int` must be from 2 to 36, not {base}")));
    };
    let number = match value.as_str() {
        None => f64::try_from(value.clone()).ok(),
        Some(text) => {
            let text = strip(text, None, true, true).replace('_', "");
            let (sign, digits) = match text.strip_prefix('-') {
                Some(digits) => (-1, digits),
                None => (1, text.strip_prefix('+').unwrap_or(&text)),
            };
            let prefix = match radix {
                2 => ["0b", "0B"],
                8 => ["0o", "0O"],
                16 => ["0x", "0X"],
                _ => [""; 2],
            };
            let digits = prefix.iter().find_map(|prefix| digits.strip_prefix(prefix)).unwrap_or(digits);
            if let Ok(whole) = i64::from_str_radix(digits, radix) {
                return Ok(Value::from(sign * whole));
            }
            text.parse().ok()
        }
    };
    if value.is_integer() {
        return Ok(value.clone());
    }
    Ok(match number.filter(|number: &f64| number.is_finite()) {
        Some(number) => Value::from(number.trunc() as i64),
        None => default,
    })
}

/// The filter `float`: the default if the value is no number.
pub(super) fn to_float(value: &Value, args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let [default] = place("float", &args, &named, ["default"])?;
    let number = match value.as_str() {
        None => f64::try_from(value.clone()).ok(),
        Some(text) => strip(text, None, true, true).replace('_', "").parse().ok(),
    };
    Ok(number.map_or_else(|| default.unwrap_or(Value::from(0.0)), Value::from))
}

/// The filters `escape` and `e`.
pub(super) fn escape(state: &State, value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    for c in string(state, value)?.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    Ok(out)
}

/// Writes what `{{ value }}` prints: `str(value)`.
pub(super) fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text)?,
        None => out.write_str(&string(state, value)?)?,
    }
    Ok(())
}

/// `str(value)`; nothing for what is undefined.
pub(super) fn string(state: &State, value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            let mut out = String::new();
            repr(state, value, 0, &mut out)?;
            Ok(out)
        }
        _ => Ok(value.to_string()),
    }
}

/// `repr(value)`.
fn repr(state: &State, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    // A value may occur in itself many times over, so what is written may be far more than what is held.
    state.consume_fuel(1)?;
    if depth > DEPTH_LIMIT {
        return Err(invalid(format!("values more than {DEPTH_LIMIT} deep cannot be printed")));
    }
    match value.kind() {
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) if number.is_finite() => out.push_str(&float(number)),
            Ok(number) if number.is_nan() => out.push_str("nan"),
            _ => out.push_str(&value.to_string()),
        },
        // An iterator of unknown length is printed by its name; the engine does that too.
        ValueKind::Seq | ValueKind::Iterable if value.len().is_some() => {
            let tuple = value.is_tuple();
            out.push(if tuple { '(' } else { '[' });
            for (at, item) in value.try_iter()?.enumerate() {
                if at > 0 {
                    out.push_str(", ");
                }
                repr(state, &item, depth + 1, out)?;
            }
            out.push_str(match (tuple, value.len()) {
                (true, Some(1)) => ",)",
                (true, _) => ")",
                (false, _) => "]",
            });
        }
        ValueKind::Map => {
            out.push('{');
            for (at, key) in value.try_iter()?.enumerate() {
                if at > 0 {
                    out.push_str(", ");
                }
                repr(state, &key, depth + 1, out)?;
                out.push_str(": ");
                repr(state, &value.get_item(&key)?, depth + 1, out)?;
            }
            out.push('}');
        }
        ValueKind::String => {
            pay(state, value.as_str().map_or(0, str::len))?;
            write!(out, "{value:?}")?;
        }
        _ => write!(out, "{value:?}")?,
    }
    Ok(())
}

/// The test `sequence`: what has a length and items. Strings and dicts do.
pub(super) fn is_sequence(value: &Value) -> bool {
    use ValueKind::{Bytes, Map, Seq, String, Undefined};
    matches!(value.kind(), String | Bytes | Seq | Map | Undefined)
        || (value.kind() == ValueKind::Iterable && value.len().is_some())
}

/// The test `iterable`: what a loop takes, which `none` is not.
pub(super) fn is_iterable(value: &Value) -> bool {
    use ValueKind::{Bytes, Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), String | Bytes | Seq | Map | Iterable | Undefined)
}

/// A method that the engine does not have.
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => string_method(state, value.as_str().unwrap_or_default(), name, args),
        ValueKind::Map => map_method(value, name, args),
        ValueKind::Seq | ValueKind::Iterable => list_method(state, value, name, args),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn string_method(state: &State, s: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let none = || bind::<0>(name, args, []);
    let all = |test: fn(char) -> bool| Value::from(!s.is_empty() && s.chars().all(test));
    Ok(match name {
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = bind(name, args, ["chars"])?;
            let chars = some(chars);
            let chars = if chars.is_some() { Some(text(name, "chars", &chars)?) } else { None };
            Value::from(strip(s, chars, name != "rstrip", name != "lstrip"))
        }
        "split" | "rsplit" => {
            let [sep, most] = bind(name, args, ["sep", "maxsplit"])?;
            let sep = some(sep);
            let sep = if sep.is_some() { Some(text(name, "sep", &sep)?) } else { None };
            let most = whole(name, "maxsplit", most)?.and_then(|most| usize::try_from(most).ok());
            Value::from_iter(split(s, sep, most, name == "rsplit")?)
        }
        "splitlines" => {
            let [keep] = bind(name, args, ["keepends"])?;
            Value::from_iter(split_lines(s, keep.is_some_and(|keep| keep.is_true())))
        }
        "partition" | "rpartition" => {
            let [sep] = bind(name, args, ["sep"])?;
            let sep = text(name, "sep", &sep)?;
            if sep.is_empty() {
                return Err(invalid("empty separator"));
            }
            let found = if name == "partition" { s.split_once(sep) } else { s.rsplit_once(sep) };
            let parts = match found {
                Some((before, after)) => [before, sep, after],
                None if name == "partition" => [s, "", ""],
                None => ["", "", s],
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "startswith" | "endswith" => {
            let [wanted, start, end] = bind(name, args, ["prefix", "start", "end"])?;
            let s = part(name, s, start, end)?;
            let Some(wanted) = wanted else {
                return Err(Error::new(ErrorKind::MissingArgument, format!("`{name}` needs a string")));
            };
            let one = |wanted: &Value| match wanted.as_str() {
                Some(wanted) if name == "startswith" => Ok(s.starts_with(wanted)),
                Some(wanted) => Ok(s.ends_with(wanted)),
                None => Err(invalid(format!(
                    "`{name}` needs a string or a tuple of strings, not {}",
                    wanted.kind()
                ))),
            };
            if wanted.kind() == ValueKind::String
                || !matches!(wanted.kind(), ValueKind::Seq | ValueKind::Iterable)
            {
                Value::from(one(&wanted)?)
            } else {
                let mut any = false;
                for wanted in wanted.try_iter()? {
                    any |= one(&wanted)?;
                }
                Value::from(any)
            }
        }
        "replace" => {
            let [old, new, count] = bind(name, args, ["old", "new", "count"])?;
            let (old, new) = (text(name, "old", &old)?, text(name, "new", &new)?);
            let count = whole(name, "count", count)?.and_then(|count| usize::try_from(count).ok());
            let places = s.matches(old).count().min(count.unwrap_or(usize::MAX));
            pay(state, s.len().saturating_add(places.saturating_mul(new.len())))?;
            Value::from(match count {
                Some(count) => s.replacen(old, new, count),
                None => s.replace(old, new),
            })
        }
        "count" | "find" | "rfind" | "index" | "rindex" => {
            let [wanted, start, end] = bind(name, args, ["sub", "start", "end"])?;
            let wanted = text(name, "sub", &wanted)?;
            let offset = match &start {
                Some(start) if !start.is_none() => bound(s.chars().count(), start.as_i64().unwrap_or(0)),
                _ => 0,
            };
            let s = part(name, s, start, end)?;
            if name == "count" {
                return Ok(Value::from(s.matches(wanted).count()));
            }
            let found = if name.starts_with('r') { s.rfind(wanted) } else { s.find(wanted) };
            match found {
                Some(at) => Value::from(offset + s[..at].chars().count()),
                None if name.ends_with("find") => Value::from(-1),
                None => return Err(invalid("substring not found")),
            }
        }
        "removeprefix" => {
            let [prefix] = bind(name, args, ["prefix"])?;
            Value::from(s.strip_prefix(text(name, "prefix", &prefix)?).unwrap_or(s))
        }
        "removesuffix" => {
            let [suffix] = bind(name, args, ["suffix"])?;
            Value::from(s.strip_suffix(text(name, "suffix", &suffix)?).unwrap_or(s))
        }
        "join" => {
            let [list] = bind(name, args, ["iterable"])?;
            let Some(list) = list else {
                return Err(Error::new(ErrorKind::MissingArgument, "`join` needs a list"));
            };
            let mut out = String::new();
            for (at, item) in list.try_iter()?.enumerate() {
                let Some(item) = item.as_str() else {
                    let kind = item.kind();
                    return Err(invalid(format!("`join` needs strings, and item {at} is of type {kind}")));
                };
                pay(state, s.len() + item.len())?;
                if at > 0 {
                    out.push_str(s);
                }
                out.push_str(item);
            }
            Value::from(out)
        }
        "ljust" | "rjust" | "center" | "zfill" => {
            let [width, fill] = bind(name, args, ["width", "fillchar"])?;
            let width = whole(name, "width", width)?
                .ok_or_else(|| Error::new(ErrorKind::MissingArgument, format!("`{name}` needs `width`")))?;
            let fill = match &fill {
                Some(_) => text(name, "fillchar", &fill)?.to_owned(),
                None => if name == "zfill" { "0" } else { " " }.to_owned(),
            };
            if fill.chars().count() != 1 {
                return Err(invalid(format!("`fillchar` of `{name}` must be one character")));
            }
            let missing = usize::try_from(width).unwrap_or(0).saturating_sub(s.chars().count());
            pay(state, missing.saturating_mul(fill.len()))?;
            let (sign, digits) = match s.strip_prefix(['+', '-']) {
                Some(digits) if name == "zfill" => s.split_at(s.len() - digits.len()),
                _ => ("", s),
            };
            // CPython's `center` puts the odd one left if the width is odd, else right.
            let left = match name {
                "ljust" => 0,
                "center" => missing / 2 + (missing & usize::try_from(width).unwrap_or(0) & 1),
                _ => missing,
            };
            Value::from(format!("{sign}{}{digits}{}", fill.repeat(left), fill.repeat(missing - left)))
        }
        "format" => {
            let text = format(FormatStyle::StrFormat, s, args)?;
            Value::from(text)
        }
        "upper" => none().map(|_| Value::from(s.to_uppercase()))?,
        "lower" | "casefold" => none().map(|_| Value::from(s.to_lowercase()))?,
        "capitalize" => none().map(|_| Value::from(words(s, false)))?,
        "title" => none().map(|_| Value::from(words(s, true)))?,
        "swapcase" => {
            none()?;
            let mut out = String::new();
            for c in s.chars() {
                if c.is_uppercase() { out.extend(c.to_lowercase()) } else { out.extend(c.to_uppercase()) }
            }
            Value::from(out)
        }
        "isspace" => none().map(|_| all(is_space))?,
        "isalpha" => none().map(|_| all(char::is_alphabetic))?,
        "isalnum" => none().map(|_| all(char::is_alphanumeric))?,
        "isdigit" | "isdecimal" | "isnumeric" => none().map(|_| all(char::is_numeric))?,
        "isascii" => none().map(|_| Value::from(s.is_ascii()))?,
        "islower" | "isupper" => {
            none()?;
            let wanted = |c: char| if name == "islower" { c.is_lowercase() } else { c.is_uppercase() };
            let mut cased = s.chars().filter(|c| is_cased(*c)).peekable();
            Value::from(cased.peek().is_some() && cased.all(wanted))
        }
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    })
}

/// A place in a list of `length`, as Python reads it: negative from the end, cut to the list.
fn bound(length: usize, at: i64) -> usize {
    let magnitude = usize::try_from(at.unsigned_abs()).unwrap_or(usize::MAX);
    if at < 0 { length.saturating_sub(magnitude) } else { magnitude.min(length) }
}

/// `s[start:end]`, in characters.
fn part<'a>(name: &str, s: &'a str, start: Option<Value>, end: Option<Value>) -> Result<&'a str, Error> {
    let (start, end) = (whole(name, "start", some(start))?, whole(name, "end", some(end))?);
    if start.is_none() && end.is_none() {
        return Ok(s);
    }
    let length = s.chars().count();
    let byte = |at: usize| s.char_indices().nth(at).map_or(s.len(), |(byte, _)| byte);
    let (start, end) = (start.map_or(0, |at| bound(length, at)), end.map_or(length, |at| bound(length, at)));
    Ok(if start < end { &s[byte(start)..byte(end)] } else { "" })
}

fn split<'a>(s: &'a str, sep: Option<&str>, most: Option<usize>, right: bool) -> Result<Vec<&'a str>, Error> {
    let most = most.unwrap_or(usize::MAX);
    let mut parts = Vec::new();
    let mut rest = s;
    match sep {
        Some("") => return Err(invalid("empty separator")),
        Some(sep) => {
            while parts.len() < most {
                let found = if right { rest.rsplit_once(sep) } else { rest.split_once(sep) };
                let Some((before, after)) = found else { break };
                let (part, next) = if right { (after, before) } else { (before, after) };
                parts.push(part);
                rest = next;
            }
            parts.push(rest);
        }
        None => loop {
            rest = strip(rest, None, !right, right);
            if rest.is_empty() {
                break;
            }
            let end = if parts.len() == most {
                None
            } else if right {
                rest.rfind(is_space)
            } else {
                rest.find(is_space)
            };
            match end {
                Some(at) if right => {
                    let width = rest[at..].chars().next().map_or(0, char::len_utf8);
                    parts.push(&rest[at + width..]);
                    rest = &rest[..at];
                }
                Some(at) => {
                    parts.push(&rest[..at]);
                    rest = &rest[at..];
                }
                None => {
                    // The last part keeps its far end's blanks only if the count ran out.
                    parts.push(rest);
                    break;
                }
            }
        },
    }
    if right {
        parts.reverse();
    }
    Ok(parts)
}

fn split_lines(s: &str, keep: bool) -> Vec<&str> {
    let is_end = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = s;
    while let Some(at) = rest.find(is_end) {
        let tail = &rest[at..];
        let end = if tail.starts_with("\r\n") { 2 } else { tail.chars().next().map_or(0, char::len_utf8) };
        lines.push(if keep { &rest[..at + end] } else { &rest[..at] });
        rest = &rest[at + end..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// Large first letters, of every word (`title`) or of the text alone (`capitalize`); the others small.
fn words(s: &str, every: bool) -> String {
    let mut out = String::new();
    let mut inside = false;
    for c in s.chars() {
        if inside {
            out.extend(c.to_lowercase());
        } else {
            // Of a letter that becomes several, the first is large.
            let mut large = c.to_uppercase();
            out.extend(large.next());
            out.extend(large.flat_map(char::to_lowercase));
        }
        inside = if every { is_cased(c) } else { true };
    }
    out
}

fn map_method(value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let pairs = || -> Result<Vec<(Value, Value)>, Error> {
        value.try_iter()?.map(|key| value.get_item(&key).map(|item| (key, item))).collect()
    };
    Ok(match name {
        "get" => {
            let [key, default] = bind(name, args, ["key", "default"])?;
            let Some(key) = key else {
                return Err(Error::new(ErrorKind::MissingArgument, "`get` needs a key"));
            };
            let found = value.as_object().and_then(|object| object.get_value(&key));
            found.or(default).unwrap_or(Value::from(()))
        }
        "items" => {
            bind::<0>(name, args, [])?;
            pairs()?.into_iter().map(|(key, item)| Value::from(Tuple::from([key, item]))).collect()
        }
        "keys" => {
            bind::<0>(name, args, [])?;
            value.try_iter()?.collect()
        }
        "values" => {
            bind::<0>(name, args, [])?;
            pairs()?.into_iter().map(|(_, item)| item).collect()
        }
        "copy" => {
            bind::<0>(name, args, [])?;
            value.clone()
        }
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    })
}

fn list_method(state: &State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    match name {
        "count" | "index" => {
            let [wanted] = bind(name, args, ["value"])?;
            let Some(wanted) = wanted else {
                return Err(Error::new(ErrorKind::MissingArgument, format!("`{name}` needs a value")));
            };
            let mut count = 0;
            for (at, item) in value.try_iter()?.enumerate() {
                state.consume_fuel(1)?;
                if item == wanted {
                    if name == "index" {
                        return Ok(Value::from(at));
                    }
                    count += 1;
                }
            }
            if name == "index" {
                Err(invalid("the value is not in the list"))
            } else {
                Ok(Value::from(count))
            }
        }
        "copy" => {
            bind::<0>(name, args, [])?;
            Ok(value.clone())
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        // python3 -c 'print(repr(x))'
        for (number, text) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.0 / 3.0, "0.3333333333333333"),
            (5e-324, "5e-324"),
        ] {
            assert_eq!(float(number), text);
        }
    }

    #[test]
    fn splits_as_python_splits() {
        // python3 -c 'print(" a  b c ".split(None, 1))' and so on
        let blanks = |most, right| split(" a  b c ", None, most, right).unwrap();
        assert_eq!(blanks(None, false), ["a", "b", "c"]);
        assert_eq!(blanks(Some(1), false), ["a", "b c "]);
        assert_eq!(blanks(Some(1), true), [" a  b", "c"]);
        assert_eq!(blanks(Some(0), true), [" a  b c"]);
        assert_eq!(split("", None, None, false).unwrap(), Vec::<&str>::new());
        assert_eq!(split("", Some(","), None, false).unwrap(), [""]);
        assert_eq!(split("a,,b", Some(","), Some(1), true).unwrap(), ["a,", "b"]);
        assert!(split("a", Some(""), None, false).is_err());
        assert_eq!(split_lines("a\r\nb\u{2028}c\n", false), ["a", "b", "c"]);
        assert_eq!(split_lines("a\r\nb", true), ["a\r\n", "b"]);
    }
}
