//! llama.cpp's importance matrices: sums of squared activations for each column of each tensor.
//!
//! What they know is how large a module's inputs are, not how much its output matters. The cost is a proxy, the squared
//! error of the module's output if weights of one size are rounded to b bits:
//!
//! cost(b) = mean_k E[x_k²] · weights · 4^-b
//!
//! scaled so that the largest scale in a file is 1. The GGUF form has tensors `NAME.in_sum2` [K, E] and `NAME.counts`
//! [1, E], F32, with E experts (1 without); the mean is over experts that saw a token. The older form is
//! `i32 entries; { i32 length; name; i32 calls; i32 values; f32 values[] }`, little-endian, each value the mean square
//! times `calls`. Source: llama.cpp `common/imatrix-loader.cpp`, `tools/imatrix/imatrix.cpp`; GGUF version 3 and 2.

use std::collections::BTreeMap;

use super::{Content, Curve, Entry, Facts, FileFormat, ImportError, Read, Wanted, names};

pub(super) const GGUF: FileFormat =
    FileFormat { name: "imatrix", told_by: "GGUF with tensors `….in_sum2`", is: is_gguf, read: read_gguf };
pub(super) const LEGACY: FileFormat = FileFormat {
    name: "imatrix.dat",
    told_by: "a count and names of llama.cpp's tensors",
    is: is_legacy,
    read: read_legacy,
};

/// Longest name, most entries and most dimensions that any file of these has; beyond them it is another kind of file.
const LONGEST: u64 = 512;
const MOST: u64 = 1 << 20;

fn malformed(format: &'static str, problem: impl Into<String>) -> ImportError {
    ImportError::Malformed { format, problem: problem.into() }
}

/// Little-endian numbers, one after another.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    format: &'static str,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: u64) -> Result<&'a [u8], ImportError> {
        let taken = usize::try_from(count)
            .ok()
            .and_then(|count| self.at.checked_add(count))
            .and_then(|end| self.bytes.get(self.at..end));
        let taken =
            taken.ok_or_else(|| malformed(self.format, format!("it ends at byte {}", self.bytes.len())))?;
        self.at += taken.len();
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, ImportError> {
        Ok(u32::from_le_bytes(self.take(4)?.try_into().expect("four bytes")))
    }

    fn u64(&mut self) -> Result<u64, ImportError> {
        Ok(u64::from_le_bytes(self.take(8)?.try_into().expect("eight bytes")))
    }

    fn count(&mut self, number: u64, what: &str, most: u64) -> Result<u64, ImportError> {
        match number <= most {
            true => Ok(number),
            false => Err(malformed(self.format, format!("it claims {number} {what}"))),
        }
    }

    fn text(&mut self, length: u64) -> Result<&'a str, ImportError> {
        let length = self.count(length, "bytes of a name", LONGEST)?;
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes).map_err(|_| malformed(self.format, "a name is not UTF-8"))
    }

    /// A value of a GGUF's metadata, left unread.
    fn skip(&mut self, kind: u32, depth: u32) -> Result<(), ImportError> {
        let size = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            8 => self.u64()?,
            9 if depth == 0 => {
                let (kind, count) = (self.u32()?, self.u64()?);
                for _ in 0..self.count(count, "elements of an array", MOST)? {
                    self.skip(kind, depth + 1)?;
                }
                0
            }
            _ => return Err(malformed(self.format, format!("a value of its metadata has type {kind}"))),
        };
        self.take(size).map(|_| ())
    }
}

/// Sums of squares of one tensor.
struct Sums {
    name: String,
    /// Values, experts slowest.
    sums: Vec<f64>,
    /// Tokens of each expert.
    counts: Vec<f64>,
}

fn floats(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
}

fn is_gguf(content: Content<'_>) -> bool {
    let has = |word: &[u8]| content.bytes.windows(word.len()).any(|found| found == word);
    content.bytes.starts_with(b"GGUF") && has(b".in_sum2")
}

fn read_gguf(content: Content<'_>, facts: &Facts<'_>) -> Result<Read, ImportError> {
    let format = GGUF.name;
    let mut reader = Reader { bytes: content.bytes, at: 4, format };
    let version = reader.u32()?;
    if !(2..=3).contains(&version) {
        return Err(malformed(format, format!("its GGUF version is {version}, not 2 or 3")));
    }
    let (tensors, values) = (reader.u64()?, reader.u64()?);
    let tensors = reader.count(tensors, "tensors", MOST)?;
    let mut alignment = 32;
    for _ in 0..reader.count(values, "values of metadata", MOST)? {
        let length = reader.u64()?;
        let (key, kind) = (reader.text(length)?, reader.u32()?);
        match (key, kind) {
            ("general.alignment", 4) => alignment = u64::from(reader.u32()?).max(1),
            _ => reader.skip(kind, 0)?,
        }
    }
    let mut listed: Vec<(&str, u64, u64)> = Vec::new();
    for _ in 0..tensors {
        let length = reader.u64()?;
        let (name, dimensions) = (reader.text(length)?, reader.u32()?);
        let mut elements = 1u64;
        for _ in 0..reader.count(u64::from(dimensions), "dimensions of a tensor", 4)? {
            let dimension = reader.u64()?;
            elements =
                elements.checked_mul(dimension).ok_or_else(|| malformed(format, "a tensor is too large"))?;
        }
        let (kind, offset) = (reader.u32()?, reader.u64()?);
        let wanted = name.ends_with(".in_sum2") || name.ends_with(".counts");
        match (wanted, kind) {
            (true, 0) => listed.push((name, elements, offset)),
            (true, kind) => return Err(malformed(format, format!("`{name}` has type {kind}, not F32"))),
            (false, _) => {}
        }
    }
    let start = (reader.at as u64).next_multiple_of(alignment);
    let mut found: BTreeMap<&str, [Option<Vec<f64>>; 2]> = BTreeMap::new();
    for (name, elements, offset) in listed {
        let at = start.checked_add(offset).and_then(|at| usize::try_from(at).ok());
        let mut reader = Reader { bytes: content.bytes, at: at.unwrap_or(usize::MAX), format };
        let bytes = reader
            .take(elements.checked_mul(4).ok_or_else(|| malformed(format, "a tensor is too large"))?)?;
        let (tensor, which) = match name.strip_suffix(".in_sum2") {
            Some(tensor) => (tensor, 0),
            None => (name.strip_suffix(".counts").unwrap_or(name), 1),
        };
        found.entry(tensor).or_default()[which] = Some(floats(bytes));
    }
    let sums = found.into_iter().map(|(name, both)| match both {
        [Some(sums), Some(counts)] => Ok(Sums { name: name.to_owned(), sums, counts }),
        _ => Err(malformed(format, format!("`{name}` has not both `in_sum2` and `counts`"))),
    });
    entries(format, sums.collect::<Result<_, _>>()?, facts)
}

fn is_legacy(content: Content<'_>) -> bool {
    let mut reader = Reader { bytes: content.bytes, at: 0, format: LEGACY.name };
    let count = reader.u32().unwrap_or(0);
    let length = reader.u32().unwrap_or(0);
    let name = reader.text(u64::from(length)).unwrap_or_default();
    (1..=MOST).contains(&u64::from(count)) && !name.is_empty() && name.bytes().all(|b| b.is_ascii_graphic())
}

fn read_legacy(content: Content<'_>, facts: &Facts<'_>) -> Result<Read, ImportError> {
    let mut reader = Reader { bytes: content.bytes, at: 0, format: LEGACY.name };
    let count = reader.u32()?;
    let mut list = Vec::new();
    for _ in 0..count {
        let length = reader.u32()?;
        let name = reader.text(u64::from(length))?.to_owned();
        let (calls, values) = (reader.u32()?, reader.u32()?);
        let sums = floats(reader.take(4 * u64::from(values))?);
        list.push(Sums { name, sums, counts: vec![f64::from(calls)] });
    }
    // What follows, a count of chunks and a text's name, is not needed.
    entries(LEGACY.name, list, facts)
}

fn entries(format: &'static str, list: Vec<Sums>, facts: &Facts<'_>) -> Result<Read, ImportError> {
    let mut scaled = Vec::new();
    for Sums { name, sums, counts } in list {
        // Matrices of other families are named below, as all that match nothing.
        let module = names::of_llama_cpp(&name).unwrap_or_else(|| name.clone());
        if counts.is_empty() || sums.is_empty() || sums.len() % counts.len() != 0 {
            let problem = format!("`{name}` has {} values for {} experts", sums.len(), counts.len());
            return Err(malformed(format, problem));
        }
        let columns = sums.len() / counts.len();
        let seen = sums.chunks(columns).zip(&counts).filter(|(_, count)| **count > 0.0);
        let (mut total, mut experts) = (0.0, 0.0);
        for (sums, count) in seen {
            total += sums.iter().sum::<f64>() / count / columns as f64;
            experts += 1.0;
        }
        let importance = if experts > 0.0 { total / experts } else { f64::NAN };
        if !(importance.is_finite() && importance >= 0.0) {
            return Err(malformed(format, format!("`{name}` has no mean square of its inputs")));
        }
        let wanted = facts.modules.iter().find(|wanted| names::canonical(wanted.path) == module);
        // The older form does not say how many experts its values are of.
        let whole = |wanted: &Wanted<'_>| (columns as u64).is_multiple_of(wanted.in_features);
        let in_features = match wanted {
            Some(wanted) if format == LEGACY.name && whole(wanted) => wanted.in_features,
            _ => columns as u64,
        };
        let weights = wanted.map_or(1.0, |wanted| wanted.weights as f64);
        scaled.push((module, name, in_features, importance * weights));
    }
    // Proportions are all that is known; the largest scale is 1 whatever a model's size.
    let scales = scaled.iter().map(|(.., scale)| *scale);
    let largest = scales.fold(0.0, f64::max);
    let unit = if largest > 0.0 { largest } else { 1.0 };
    let entries = scaled.into_iter().map(|(module, name, in_features, scale)| Entry {
        module,
        name,
        weights: None,
        in_features: Some(in_features),
        curve: Curve::Quarter { scale: scale / unit, by_weight: false },
    });
    Ok(Read { measured: false, basis: "none".to_owned(), entries: entries.collect() })
}
