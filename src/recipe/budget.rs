//! The `[budget]` table: how many bytes the weights may take, and what tells which of them need them.

use std::path::PathBuf;
use std::str::FromStr;

use toml::de::DeValue;

use super::dom::{At, Report, Value};
use super::error::Mistake;
use super::keys::Section;
use super::pattern::Pattern;
use super::text::Origin;
use crate::codec::CodecSpec;
use crate::units::Bytes;

/// A budget, as a recipe asks for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Budget {
    /// The most that all weight files together may take.
    pub size: BudgetSize,
    /// File of costs, as written; [`super::Recipe::sensitivity`] resolves it.
    pub sensitivity: PathBuf,
    /// Codecs to choose from, as written; none: affine ones of the default's group.
    pub candidates: Option<Vec<CodecSpec>>,
    /// How to choose.
    pub method: BudgetMethod,
    /// What becomes of a choice that is no better than an even one of the same bytes.
    pub control: Control,
    /// Text that the two are compared on, as written; none: the built-in one.
    pub text: Option<PathBuf>,
    /// Where its parts are stated.
    pub origins: BudgetOrigins,
}

/// Where parts of a [`Budget`] are stated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BudgetOrigins {
    /// The size.
    pub size: Origin,
    /// `sensitivity`.
    pub sensitivity: Origin,
    /// `candidates`.
    pub candidates: Option<Origin>,
    /// `text`.
    pub text: Option<Origin>,
}

/// The most that all weight files together may take, headers included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BudgetSize {
    /// So many bits for each weight of the model.
    BitsPerWeight(f64),
    /// So many bits of codes, on average, for each weight of the modules that the budget decides; their scales and
    /// everything else in the files come on top.
    CodeBits(f64),
    /// So many bytes.
    Bytes(Bytes),
}

impl BudgetSize {
    /// In bytes.
    pub fn bytes(self, of: Weights) -> u64 {
        match self {
            BudgetSize::BitsPerWeight(bits) => (bits * of.all as f64 / 8.0) as u64,
            BudgetSize::CodeBits(bits) => of.rest + (bits * of.decided as f64 / 8.0) as u64,
            BudgetSize::Bytes(bytes) => bytes.0,
        }
    }
}

/// What a budget in bits is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weights {
    /// Weights of the model.
    pub all: u64,
    /// Weights of the modules that the budget decides.
    pub decided: u64,
    /// Bytes of all weight files but for the codes of those modules.
    pub rest: u64,
}

/// How to choose.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BudgetMethod {
    /// The least cost there is.
    #[default]
    Exact,
    /// Always the step of the most gain for each byte.
    Greedy,
}

impl BudgetMethod {
    /// Every method, as recipes spell it.
    pub const NAMES: [(&'static str, BudgetMethod); 2] =
        [("exact", BudgetMethod::Exact), ("greedy", BudgetMethod::Greedy)];

    /// As recipes spell it.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, method)| *method == self).expect("every method has a name").0
    }
}

/// What becomes of a choice that is no better than an even one of the same bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Control {
    /// The build stops.
    Stop,
    /// The build says so.
    #[default]
    Report,
    /// Nobody looks.
    Off,
}

impl Control {
    /// Every answer, as recipes spell it.
    pub const NAMES: [(&'static str, Control); 3] =
        [("stop", Control::Stop), ("report", Control::Report), ("off", Control::Off)];
}

/// Bounds on what a budget gives to the modules that match.
#[derive(Debug, Clone)]
pub struct Limit {
    /// Over module names, as MLX has them.
    pub pattern: Pattern,
    /// The fewest bits of a code.
    pub least: Option<u32>,
    /// The most.
    pub most: Option<u32>,
    /// Where the pattern is written.
    pub origin: Origin,
}

/// What one file's `[budget]` states.
#[derive(Debug, Default)]
pub(super) struct BudgetSheet {
    /// Its header, if it is there.
    pub at: Option<Origin>,
    pub size: Option<At<BudgetSize>>,
    pub states_size: bool,
    pub sensitivity: Option<At<PathBuf>>,
    pub candidates: Option<At<Vec<CodecSpec>>>,
    pub method: Option<BudgetMethod>,
    pub control: Option<Control>,
    pub text: Option<At<PathBuf>>,
}

impl BudgetSheet {
    pub fn read(value: Value<'_>, report: &mut Report) -> Self {
        let at = Some(value.at);
        let Some(table) = value.table(Section::Budget, report) else { return Self { at, ..Self::default() } };
        let stated: Vec<Value<'_>> = SIZES.into_iter().filter_map(|key| table.get(key)).collect();
        if let [first, others @ ..] = &stated[..] {
            for other in others {
                report.add(other.at, Mistake::TwoBudgets { first: first.key, other: other.key });
            }
        }
        let states_size = !stated.is_empty();
        let mut sizes = stated.into_iter().map(|value| size(value, report)).collect::<Vec<_>>().into_iter();
        Self {
            at,
            states_size,
            size: sizes.find_map(|size| size),
            sensitivity: table.get("sensitivity").and_then(|value| super::sheet::path(value, report)),
            candidates: table.get("candidates").and_then(|value| candidates(value, report)),
            method: table.get("method").and_then(|value| {
                let named =
                    value.named(&BudgetMethod::NAMES, report, |found| Mistake::UnknownMethod { found });
                named.map(|at| at.value)
            }),
            control: table.get("control").and_then(|value| {
                let named = value.named(&Control::NAMES, report, |found| Mistake::UnknownControl { found });
                named.map(|at| at.value)
            }),
            text: table.get("text").and_then(|value| super::sheet::path(value, report)),
        }
    }
}

/// The sheets' statements joined, the recipe's own first.
///
/// Missing keys are not reported if `hidden`: a base that could not be read may have them.
pub(super) fn join<'s>(
    sheets: impl Iterator<Item = &'s BudgetSheet> + Clone,
    hidden: bool,
    report: &mut Report,
) -> Option<Budget> {
    let at = sheets.clone().find_map(|sheet| sheet.at)?;
    let size = sheets.clone().find(|sheet| sheet.states_size);
    let sensitivity = sheets.clone().find_map(|sheet| sheet.sensitivity.as_ref());
    if !hidden {
        if size.is_none() {
            report.add(at, Mistake::NoBudget);
        }
        if sensitivity.is_none() && size.is_none_or(|size| size.size.is_some()) {
            report.add(at, Mistake::MissingKey { key: "sensitivity", section: Section::Budget });
        }
    }
    let size = size?.size.as_ref()?;
    let sensitivity = sensitivity?;
    let candidates = sheets.clone().find_map(|sheet| sheet.candidates.as_ref());
    let text = sheets.clone().find_map(|sheet| sheet.text.as_ref());
    Some(Budget {
        size: size.value,
        sensitivity: sensitivity.value.clone(),
        candidates: candidates.map(|candidates| candidates.value.clone()),
        method: sheets.clone().find_map(|sheet| sheet.method).unwrap_or_default(),
        control: sheets.clone().find_map(|sheet| sheet.control).unwrap_or_default(),
        text: text.map(|text| text.value.clone()),
        origins: BudgetOrigins {
            size: size.at,
            sensitivity: sensitivity.at,
            candidates: candidates.map(|candidates| candidates.at),
            text: text.map(|text| text.at),
        },
    })
}

/// Keys that state a size.
const SIZES: [&str; 3] = ["bits-per-weight", "code-bits", "bytes"];

fn size(value: Value<'_>, report: &mut Report) -> Option<At<BudgetSize>> {
    let in_bits: fn(f64) -> BudgetSize = match value.key {
        "bits-per-weight" => BudgetSize::BitsPerWeight,
        "code-bits" => BudgetSize::CodeBits,
        _ => return in_bytes(value, report),
    };
    let (bits, _) = value.number(report)?;
    let bits = bits.filter(|bits| (1.0..=64.0).contains(bits));
    if bits.is_none() {
        report.add(value.at, Mistake::BitsRange { key: value.key });
    }
    bits.map(|bits| At { value: in_bits(bits), at: value.at })
}

fn in_bytes(value: Value<'_>, report: &mut Report) -> Option<At<BudgetSize>> {
    let At { value: text, at } = value.string(report)?;
    match Bytes::from_str(text) {
        Ok(size) => Some(At { value: BudgetSize::Bytes(size), at }),
        Err(error) => {
            report.add(at, error.into());
            None
        }
    }
}

fn candidates(value: Value<'_>, report: &mut Report) -> Option<At<Vec<CodecSpec>>> {
    let mut codecs: Vec<CodecSpec> = Vec::new();
    let elements = value.elements("an array of strings", report);
    let given = elements.len();
    for element in elements {
        let Some(At { value: text, at }) = element.string(report) else { continue };
        match CodecSpec::from_str(text) {
            Ok(codec) if codec.code_bits().is_none() => report.add(at, Mistake::NoCandidate { codec }),
            Ok(codec) if codecs.contains(&codec) => report.add(at, Mistake::CandidateTwice { codec }),
            Ok(codec) => codecs.push(codec),
            Err(error) => report.add(at, error.into()),
        }
    }
    if given == 0 && matches!(value.value, DeValue::Array(_)) {
        report.add(value.at, Mistake::Empty { key: value.key });
    }
    (!codecs.is_empty()).then_some(At { value: codecs, at: value.at })
}

/// `least-bits` or `most-bits` of a rule.
pub(super) fn bits(value: Value<'_>, report: &mut Report) -> Option<At<u32>> {
    let bits = super::transform::number(value, 1..=32, report)?;
    Some(At { value: bits, at: value.at })
}
