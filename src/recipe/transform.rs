//! The `[transform]` table: changes of basis that cost nothing when the model runs.

use std::path::PathBuf;

use toml::de::DeValue;

use super::dom::{At, Report, Table, Value};
use super::error::Mistake;
use super::keys::Section;
use super::text::Origin;

/// Which basis the residual stream gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RotationKind {
    /// Its own.
    None,
    /// Signs and one Hadamard matrix of the stream's width.
    Hadamard,
    /// The orthogonal factor of a Gaussian matrix.
    RandomOrthogonal,
    /// Signs and equal Hadamard matrices along the diagonal.
    BlockHadamard,
    /// Found by descent on the sum of fourth powers of the rotated weights.
    OptRot,
    /// [`RotationKind::Hadamard`] where the width has a matrix, else the largest blocks that have.
    Auto,
    /// The one that gives the least KL with the recipe's codecs.
    Measure,
}

impl RotationKind {
    /// Every kind, as recipes spell it.
    pub const NAMES: [(&'static str, RotationKind); 7] = [
        ("none", RotationKind::None),
        ("hadamard", RotationKind::Hadamard),
        ("random-orthogonal", RotationKind::RandomOrthogonal),
        ("block-hadamard", RotationKind::BlockHadamard),
        ("optrot", RotationKind::OptRot),
        ("auto", RotationKind::Auto),
        ("measure", RotationKind::Measure),
    ];

    /// As recipes spell it.
    pub fn name(self) -> &'static str {
        let name = Self::NAMES.iter().find(|(_, kind)| *kind == self);
        name.expect("every kind has a name").0
    }
}

/// A rotation, as a recipe asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RotationChoice {
    /// Which.
    pub kind: RotationKind,
    /// Where signs and Gaussians start.
    pub seed: u64,
    /// Whether value heads are rotated too; none: where that is exact.
    pub r2: Option<bool>,
    /// Width of a block of [`RotationKind::BlockHadamard`]; none: the default codec's group, or what the width allows.
    pub block: Option<u32>,
    /// Steps of [`RotationKind::OptRot`].
    pub steps: u32,
    /// Where it is stated.
    pub origin: Option<Origin>,
}

/// The steps of descent of a recipe that does not say.
pub const OPTROT_STEPS: u32 = 60;

/// Every step costs two products of the samples with the rotation; nothing is gained after some hundred.
const MOST_STEPS: u32 = 10_000;

/// The seed of a rotation that does not say.
pub const ROTATION_SEED: u64 = 42;

impl Default for RotationChoice {
    fn default() -> Self {
        let kind = RotationKind::None;
        Self { kind, seed: ROTATION_SEED, r2: None, block: None, steps: OPTROT_STEPS, origin: None }
    }
}

/// Changes of basis, as a recipe asks for them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Transforms {
    /// Gains of norms go into what reads them.
    pub gamma_fold: bool,
    /// The basis of the residual stream.
    pub rotation: RotationChoice,
    /// Channels of keys are scaled to even norms, those of queries by the inverse.
    pub key_balance: bool,
    /// Channels of values are scaled, the columns that read them by the inverse.
    pub value_balance: bool,
    /// Channels of values are put in the order of their norms.
    pub value_order: bool,
    /// Inner channels of an MLP: rows of `up` are scaled, columns of `down` by the inverse.
    pub up_balance: bool,
    /// Text that [`RotationKind::Measure`] scores on, as written; none: the built-in one.
    pub text: Option<PathBuf>,
    /// The most tokens of it.
    pub tokens: u32,
    /// Whether the recipe itself says `gamma-fold = true`.
    pub gains_stated: bool,
    /// Where `text` is stated.
    pub text_origin: Option<Origin>,
}

impl Transforms {
    /// The bases that [`RotationKind::Measure`] compares, in their order.
    pub const CANDIDATES: [&'static str; 5] = ["none", "hadamard", "hadamard+r2", "block-hadamard", "optrot"];

    /// Those of them that the recipe's `r2` leaves.
    pub fn candidates(&self) -> impl Iterator<Item = &'static str> {
        let without = match self.rotation.r2 {
            None => "",
            Some(true) => "hadamard",
            Some(false) => "hadamard+r2",
        };
        Self::CANDIDATES.into_iter().filter(move |basis| *basis != without)
    }

    /// The same with its basis decided.
    pub fn with_basis(mut self, basis: &str) -> Self {
        let (name, r2) = match basis.strip_suffix("+r2") {
            Some(name) => (name, Some(true)),
            // Whatever else `hadamard` stands for, it is not `hadamard+r2`.
            None if basis == RotationKind::Hadamard.name() => (basis, Some(false)),
            None => (basis, self.rotation.r2),
        };
        let kind = RotationKind::NAMES.iter().find(|(known, _)| *known == name);
        self.rotation.kind = kind.map_or(RotationKind::None, |(_, kind)| *kind);
        self.rotation.r2 = r2;
        if self.rotation.kind == RotationKind::None {
            self.gamma_fold = self.gains_stated;
        }
        self
    }

    /// Whether anything is changed.
    pub fn any(&self) -> bool {
        self.gamma_fold || self.key_balance || self.value_balance || self.value_order || self.up_balance
    }
}

/// What one file's `[transform]` states.
#[derive(Debug, Default)]
pub(super) struct TransformSheet {
    pub gamma_fold: Option<At<bool>>,
    pub rotation: Option<At<RotationChoice>>,
    pub key_balance: Option<At<bool>>,
    pub value_balance: Option<At<bool>>,
    pub value_order: Option<At<bool>>,
    pub up_balance: Option<At<bool>>,
    pub text: Option<At<PathBuf>>,
    pub tokens: Option<At<u32>>,
}

const MEASURED_TOKENS: u32 = 1024;
const MOST_TOKENS: u32 = 1 << 20;

impl TransformSheet {
    pub fn read(value: Value<'_>, report: &mut Report) -> Self {
        let Some(table) = value.table(Section::Transform, report) else { return Self::default() };
        let mut flag = |key| table.get(key).and_then(|value| value.boolean(report));
        let (gamma_fold, key_balance) = (flag("gamma-fold"), flag("key-balance"));
        let (value_balance, value_order) = (flag("value-balance"), flag("value-order"));
        let up_balance = flag("up-balance");
        Self {
            gamma_fold,
            rotation: table.get("rotation").and_then(|value| rotation(value, report)),
            key_balance,
            value_balance,
            value_order,
            up_balance,
            text: table.get("text").and_then(|value| super::sheet::path(value, report)),
            tokens: table.get("tokens").and_then(|value| {
                let tokens = number(value, 16..=MOST_TOKENS, report)?;
                Some(At { value: tokens, at: value.at })
            }),
        }
    }
}

/// The sheets' statements joined, the recipe's own first.
pub(super) fn join<'s>(
    sheets: impl Iterator<Item = &'s TransformSheet> + Clone,
    report: &mut Report,
) -> Transforms {
    let flag = |of: fn(&TransformSheet) -> &Option<At<bool>>| {
        sheets.clone().find_map(|sheet| of(sheet).as_ref().map(|at| At { value: at.value, at: at.at }))
    };
    let is = |flag: Option<At<bool>>| flag.is_some_and(|flag| flag.value);
    let rotation = sheets.clone().find_map(|sheet| sheet.rotation.as_ref());
    let choice = rotation.map(|rotation| rotation.value).unwrap_or_default();
    let rotates = choice.kind != RotationKind::None;
    let gamma_fold = flag(|sheet| &sheet.gamma_fold);
    if let Some(At { value: false, at }) = &gamma_fold
        && rotates
    {
        report.add(*at, Mistake::RotationNeedsGains);
    }
    let (balance, order) = (flag(|sheet| &sheet.value_balance), flag(|sheet| &sheet.value_order));
    for (key, flag) in [("value-balance", &balance), ("value-order", &order)] {
        if let Some(At { value: true, at }) = flag
            && rotates
            && choice.r2 == Some(true)
        {
            report.add(*at, Mistake::ValuesTwice { key });
        }
    }
    // A base's may be for a rotation that this recipe replaces.
    if choice.kind != RotationKind::Measure
        && let Some(own) = sheets.clone().next()
    {
        let text = own.text.as_ref().map(|text| ("text", text.at));
        let tokens = own.tokens.as_ref().map(|tokens| ("tokens", tokens.at));
        for (key, at) in [text, tokens].into_iter().flatten() {
            report.add(at, Mistake::RotationTakesNo { key, kind: choice.kind.name(), of: "measure" });
        }
    }
    let text = sheets.clone().find_map(|sheet| sheet.text.as_ref());
    Transforms {
        gains_stated: gamma_fold.as_ref().is_some_and(|flag| flag.value),
        gamma_fold: gamma_fold.map_or(rotates, |flag| flag.value),
        rotation: choice,
        key_balance: is(flag(|sheet| &sheet.key_balance)),
        value_balance: is(balance),
        value_order: is(order),
        up_balance: is(flag(|sheet| &sheet.up_balance)),
        text: text.map(|text| text.value.clone()),
        tokens: sheets
            .clone()
            .find_map(|sheet| sheet.tokens.as_ref())
            .map_or(MEASURED_TOKENS, |tokens| tokens.value),
        text_origin: text.map(|text| text.at),
    }
}

fn kind(value: Value<'_>, report: &mut Report) -> Option<RotationKind> {
    let unknown = |found| Mistake::UnknownRotation { found };
    value.named(&RotationKind::NAMES, report, unknown).map(|at| at.value)
}

/// `rotation = "hadamard"`, or a table with its settings.
fn rotation(value: Value<'_>, report: &mut Report) -> Option<At<RotationChoice>> {
    let origin = Some(value.at);
    let with = |choice| Some(At { value: choice, at: value.at });
    if let DeValue::String(_) = value.value {
        return with(RotationChoice { kind: kind(value, report)?, origin, ..RotationChoice::default() });
    }
    let DeValue::Table(_) = value.value else {
        value.wrong_type("a kind's name or a table", report);
        return None;
    };
    let table: Table<'_> = value.table(Section::Rotation, report)?;
    let stated = table.require("kind", report).and_then(|value| kind(value, report));
    let seed = table.get("seed").and_then(|value| super::sheet::seed(value, report));
    let r2 = table.get("r2").and_then(|value| r2(value, report)).flatten();
    let block = table.get("block");
    let steps = table.get("steps");
    if stated == Some(RotationKind::None) {
        for (key, given) in [("seed", table.get("seed")), ("r2", table.get("r2"))] {
            if let Some(value) = given {
                report.add(value.at, Mistake::RotationTakesNo { key, kind: "none", of: "hadamard" });
            }
        }
    }
    for (key, given, of) in [
        ("block", &block, [RotationKind::BlockHadamard, RotationKind::Measure]),
        ("steps", &steps, [RotationKind::OptRot, RotationKind::Measure]),
    ] {
        if let (Some(value), Some(kind)) = (given, stated)
            && !of.contains(&kind)
        {
            report.add(value.at, Mistake::RotationTakesNo { key, kind: kind.name(), of: of[0].name() });
        }
    }
    let block = block.and_then(|value| number(value, 2..=u32::MAX, report));
    let steps = steps.and_then(|value| number(value, 1..=MOST_STEPS, report));
    with(RotationChoice {
        kind: stated?,
        seed: seed.unwrap_or(ROTATION_SEED),
        r2,
        block,
        steps: steps.unwrap_or(OPTROT_STEPS),
        origin,
    })
}

/// `true`, `false` or `"auto"`.
fn r2(value: Value<'_>, report: &mut Report) -> Option<Option<bool>> {
    match value.value {
        DeValue::Boolean(on) => Some(Some(*on)),
        DeValue::String(word) if word.as_ref() == "auto" => Some(None),
        _ => {
            value.wrong_type("true, false or \"auto\"", report);
            None
        }
    }
}

pub(super) fn number(
    value: Value<'_>,
    range: std::ops::RangeInclusive<u32>,
    report: &mut Report,
) -> Option<u32> {
    let (number, found) = value.integer(report)?;
    let number = number.and_then(|n| u32::try_from(n).ok()).filter(|n| range.contains(n));
    if number.is_none() {
        let (least, most) = (*range.start(), *range.end());
        report.add(value.at, Mistake::NumberRange { key: value.key, least, most, found });
    }
    number
}
