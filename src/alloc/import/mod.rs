//! Tables of costs from files: our own format, and those of other tools.
//!
//! Which format a file has is told by its content. Every reader gives [`Entry`]s under the names that its tool has for
//! modules; [`read`] finds the model's modules by them, and refuses a table that leaves out a module, names one that is
//! not there, or is of another model. What each format means, and what is assumed of it, is in
//! `docs/formats/sensitivity.md`.
//!
//! To add a format: one file here, one line in [`FORMATS`].

mod exl3;
mod imatrix;
mod mlx_lm;
mod names;
mod optiq;
mod own;
mod unique;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use self::unique::Unique;
use super::cost::{Cost, CostTable, FORMAT, LARGEST};
use crate::codec::{AffineBits, CodecSpec, GroupSize};
use crate::digest::Digest;
use crate::failure::{Exit, Failure};

/// A module of the model that costs are wanted for.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// Its rule path.
    pub path: &'a str,
    /// Weights it has.
    pub weights: u64,
    /// Columns of its matrix.
    pub in_features: u64,
    /// Whether the table must have it.
    pub required: bool,
}

/// What a file is held against.
#[derive(Debug, Clone, Copy)]
pub struct Facts<'a> {
    /// [`crate::checkpoint::Checkpoint::shapes_digest`] of the source.
    pub tensors: Digest,
    /// Digest of the source's `config.json`.
    pub config: Digest,
    /// Every module that is stored.
    pub modules: &'a [Wanted<'a>],
    /// Codecs that may be chosen: a table by bits alone is read for those of them that it speaks of.
    pub candidates: &'a [CodecSpec],
}

/// A file, as far as it is parsed for all formats alike.
#[derive(Clone, Copy)]
struct Content<'a> {
    bytes: &'a [u8],
    json: Option<&'a Value>,
}

/// What a file says of one module, or of a part of it.
#[derive(Debug, Clone)]
struct Entry {
    /// The module, by the tool's name made [`names::canonical`].
    module: String,
    /// As the file has it.
    name: String,
    /// Weights, if the file says.
    weights: Option<u64>,
    /// Columns, if the file says.
    in_features: Option<u64>,
    /// What it costs.
    curve: Curve,
}

/// Costs of an entry.
#[derive(Debug, Clone)]
enum Curve {
    /// In these codecs.
    Codecs(BTreeMap<CodecSpec, Cost>),
    /// In affine codecs of these widths, whatever their group, and in trellises of as many bits.
    Widths(BTreeMap<u32, f64>),
    /// scale · 4^-bits in every affine codec; scale is by weight if so stated.
    Quarter {
        /// Before it is multiplied by the weights.
        scale: f64,
        /// Multiplied by the number of weights.
        by_weight: bool,
    },
}

/// A whole file.
struct Read {
    measured: bool,
    basis: String,
    entries: Vec<Entry>,
}

/// One format.
struct FileFormat {
    /// For messages and provenance.
    name: &'static str,
    /// What tells it, for the message about a file that is of none.
    told_by: &'static str,
    /// Whether the file is of this format.
    is: fn(Content<'_>) -> bool,
    /// Reads it.
    read: fn(Content<'_>, &Facts<'_>) -> Result<Read, ImportError>,
}

/// Every format, in the order they are tried.
static FORMATS: &[FileFormat] =
    &[own::FORMAT, optiq::FORMAT, mlx_lm::FORMAT, exl3::FORMAT, imatrix::GGUF, imatrix::LEGACY];

/// Names of all formats.
pub fn formats() -> impl Iterator<Item = &'static str> {
    FORMATS.iter().map(|format| format.name)
}

/// Why a file cannot be used as a table of costs.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ImportError {
    #[error("is of no known format; these were looked for: {looked_for}")]
    Unknown { looked_for: String },
    #[error("has format `{found}`, and this program reads `{FORMAT}`")]
    Version { found: String },
    #[error("is not a whole {format}: {problem}")]
    Malformed { format: &'static str, problem: String },
    #[error("is of another model: {what} is {found}, but the source has {needed}")]
    OtherModel { what: String, found: String, needed: String },
    #[error("says of `{name}` a cost of {found}; a cost is a number of nats below {LARGEST} in size")]
    BadCost { name: String, found: String },
    #[error("has {count} names of no module of this model, such as {first}")]
    NoSuchModule { count: usize, first: String },
    #[error("has `{first}` and `{second}` for the same module, `{module}`")]
    Twice { first: String, second: String, module: String },
    #[error("lacks {count} of the modules to be given bits, such as {first}")]
    Missing { count: usize, first: String },
}

impl Failure for ImportError {
    fn exit(&self) -> Exit {
        Exit::Input
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            ImportError::Unknown { .. } => {
                "`tqc sensitivity` measures a table; `docs/formats/sensitivity.md` lists the formats"
            }
            ImportError::Version { .. } => {
                "measure again with this program, or use the version that wrote it"
            }
            ImportError::Malformed { .. } | ImportError::BadCost { .. } => {
                "take the file from where it was made again"
            }
            ImportError::OtherModel { .. } | ImportError::NoSuchModule { .. } => {
                "name the file that was made for this checkpoint in `budget.sensitivity`"
            }
            ImportError::Twice { .. } => "leave one of the two out",
            ImportError::Missing { .. } => "give them a codec in a `[[rule]]`, or use a table that has them",
        };
        Some(help.to_owned())
    }
}

/// Reads a table of whatever format and finds the model's modules in it.
///
/// # Errors
/// [`ImportError`].
pub fn read(bytes: &[u8], facts: &Facts<'_>) -> Result<CostTable, ImportError> {
    let json = serde_json::from_slice::<Unique>(bytes);
    if let Err(error) = &json
        && matches!(bytes.trim_ascii_start(), [b'{' | b'[', ..] | [0xef, 0xbb, 0xbf, ..])
    {
        return Err(ImportError::Malformed { format: "JSON file", problem: error.to_string() });
    }
    let json: Option<Value> = json.ok().map(|Unique(value)| value);
    let content = Content { bytes, json: json.as_ref() };
    let Some(format) = FORMATS.iter().find(|format| (format.is)(content)) else {
        let formats = FORMATS.iter().map(|format| format!("{} ({})", format.name, format.told_by));
        return Err(ImportError::Unknown { looked_for: formats.collect::<Vec<_>>().join(", ") });
    };
    let read = (format.read)(content, facts)?;
    let modules = place(format.name, &read.entries, facts)?;
    Ok(CostTable { format: format.name, measured: read.measured, basis: read.basis, modules })
}

/// Gives every entry to its module.
fn place(
    format: &'static str,
    entries: &[Entry],
    facts: &Facts<'_>,
) -> Result<BTreeMap<String, BTreeMap<CodecSpec, Cost>>, ImportError> {
    let mut by_name: BTreeMap<String, &Wanted<'_>> = BTreeMap::new();
    for wanted in facts.modules {
        by_name.insert(names::canonical(wanted.path), wanted);
    }
    // A tied head is the embedding: tools that list both have one matrix twice under two names.
    let tied = !by_name.contains_key("lm_head");
    let mut parts: BTreeMap<&str, Vec<&Entry>> = BTreeMap::new();
    let mut strange = Vec::new();
    for entry in entries {
        let name = match entry.module.as_str() {
            "lm_head" if tied => "embed_tokens",
            name => name,
        };
        match by_name.get(name) {
            Some(wanted) => parts.entry(wanted.path).or_default().push(entry),
            None => strange.push(entry.name.as_str()),
        }
    }
    if let Some(first) = some_of(&strange) {
        return Err(ImportError::NoSuchModule { count: strange.len(), first });
    }
    let lacking: Vec<&str> = facts
        .modules
        .iter()
        .filter(|wanted| wanted.required && !parts.contains_key(wanted.path))
        .map(|wanted| wanted.path)
        .collect();
    if let Some(first) = some_of(&lacking) {
        return Err(ImportError::Missing { count: lacking.len(), first });
    }
    let mut table = BTreeMap::new();
    for wanted in facts.modules {
        let Some(parts) = parts.get(wanted.path) else { continue };
        check(wanted, parts)?;
        let total = add(wanted, parts, facts.candidates)?;
        table.insert(wanted.path.to_owned(), total);
    }
    if table.is_empty() {
        return Err(ImportError::Malformed { format, problem: "it has no entries".to_owned() });
    }
    Ok(table)
}

/// Holds what a file says of a module's size against the model.
fn check(wanted: &Wanted<'_>, parts: &[&Entry]) -> Result<(), ImportError> {
    let experts = |entry: &Entry| entry.name.contains(".experts.");
    if let [first, second, ..] = parts
        && !(experts(first) && experts(second) && first.name != second.name)
    {
        let (first, second) = (first.name.clone(), second.name.clone());
        return Err(ImportError::Twice { first, second, module: wanted.path.to_owned() });
    }
    let other = |what: &str, found: u64, needed: u64| ImportError::OtherModel {
        what: format!("the number of {what} of `{}`", wanted.path),
        found: found.to_string(),
        needed: needed.to_string(),
    };
    let weights: Option<u64> = parts.iter().map(|part| part.weights).sum();
    if let Some(found) = weights
        && found != wanted.weights
    {
        return Err(other("weights", found, wanted.weights));
    }
    match parts.iter().find_map(|part| part.in_features.filter(|found| *found != wanted.in_features)) {
        Some(found) => Err(other("columns", found, wanted.in_features)),
        None => Ok(()),
    }
}

/// Adds the costs of a module's parts, in the codecs that all of them have.
fn add(
    wanted: &Wanted<'_>,
    parts: &[&Entry],
    candidates: &[CodecSpec],
) -> Result<BTreeMap<CodecSpec, Cost>, ImportError> {
    let mut total: Option<BTreeMap<CodecSpec, Cost>> = None;
    for part in parts {
        let costs = spread(&part.curve, wanted.weights, candidates);
        if let Some((_, cost)) =
            costs.iter().find(|(_, cost)| cost.nats.is_nan() || cost.nats.abs() > LARGEST)
        {
            return Err(ImportError::BadCost { name: part.name.clone(), found: cost.nats.to_string() });
        }
        total = Some(match total {
            None => costs,
            Some(before) => {
                let both =
                    before.into_iter().filter_map(|(codec, cost)| Some((codec, cost, costs.get(&codec)?)));
                // Errors of parts measured one by one are taken for independent.
                let error = |a: Cost, b: &Cost| {
                    let (a, b) = (a.standard_error?, b.standard_error?);
                    Some((a * a + b * b).sqrt())
                };
                both.map(|(codec, a, b)| (codec, Cost { nats: a.nats + b.nats, standard_error: error(a, b) }))
                    .collect()
            }
        });
    }
    Ok(total.unwrap_or_default())
}

/// A curve as costs of codecs.
fn spread(curve: &Curve, weights: u64, candidates: &[CodecSpec]) -> BTreeMap<CodecSpec, Cost> {
    let every_group = |bits: AffineBits| GroupSize::ALL.map(|group| CodecSpec::Affine { bits, group });
    let plain = |nats| Cost { nats, standard_error: None };
    match curve {
        Curve::Codecs(costs) => costs.clone(),
        Curve::Widths(widths) => {
            let affine = AffineBits::ALL
                .into_iter()
                .filter_map(|bits| Some((bits, *widths.get(&bits.get())?)))
                .flat_map(|(bits, nats)| every_group(bits).map(|codec| (codec, plain(nats))));
            let trellises = candidates.iter().filter_map(|codec| match codec {
                CodecSpec::Trellis(trellis) => Some((*codec, plain(*widths.get(&trellis.bits())?))),
                _ => None,
            });
            affine.chain(trellises).collect()
        }
        Curve::Quarter { scale, by_weight } => AffineBits::ALL
            .into_iter()
            .flat_map(|bits| {
                let scale = if *by_weight { scale * weights as f64 } else { *scale };
                every_group(bits).map(|codec| (codec, plain(scale * quarter(bits.get()))))
            })
            .collect(),
    }
}

/// 4^-bits: the variance of rounding falls by four with each bit.
fn quarter(bits: u32) -> f64 {
    1.0 / (1u64 << (2 * bits)) as f64
}

/// The first few names, quoted; none of none.
fn some_of(names: &[&str]) -> Option<String> {
    let unique: BTreeSet<&str> = names.iter().copied().collect();
    let shown: Vec<String> = unique.iter().take(3).map(|name| format!("`{name}`")).collect();
    (!shown.is_empty()).then(|| shown.join(", "))
}

#[cfg(test)]
mod tests;
