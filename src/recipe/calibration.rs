//! The `[calibration]` and `[gptq]` tables: the text whose activations weigh errors, and how rounding uses them.

use std::path::PathBuf;

use super::dom::{At, Report, Value};
use super::error::Mistake;
use super::keys::Section;
use super::text::Origin;
use super::transform::number;
use crate::digest::Digest;

/// How documents become rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Packing {
    /// A row is the beginning of one document.
    #[default]
    Documents,
    /// Documents are joined, an end token between them, and cut into rows of one length.
    Joined,
}

impl Packing {
    /// Every way, as recipes spell it.
    pub const NAMES: [(&'static str, Packing); 2] =
        [("documents", Packing::Documents), ("joined", Packing::Joined)];

    /// As recipes spell it.
    pub fn name(self) -> &'static str {
        name_of(&Self::NAMES, self)
    }
}

/// Whose activations a layer is calibrated on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activations {
    /// Those of the model before anything is rounded: layers are independent of each other.
    #[default]
    Unrounded,
    /// Those of the layers before, as they will be stored.
    Sequential,
}

impl Activations {
    /// Both, as recipes spell them.
    pub const NAMES: [(&'static str, Activations); 2] =
        [("unrounded", Activations::Unrounded), ("sequential", Activations::Sequential)];

    /// As recipes spell it.
    pub fn name(self) -> &'static str {
        name_of(&Self::NAMES, self)
    }
}

/// What experts get that saw too few tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FewTokens {
    /// The second moment of what all experts of the layer saw.
    #[default]
    Shared,
    /// Rounding to nearest.
    Nearest,
}

impl FewTokens {
    /// Both, as recipes spell them.
    pub const NAMES: [(&'static str, FewTokens); 2] =
        [("shared", FewTokens::Shared), ("nearest", FewTokens::Nearest)];

    /// As recipes spell it.
    pub fn name(self) -> &'static str {
        name_of(&Self::NAMES, self)
    }
}

fn name_of<T: Copy + PartialEq>(names: &[(&'static str, T)], value: T) -> &'static str {
    names.iter().find(|(_, known)| *known == value).expect("every value has a name").0
}

/// What a recipe calibrates with.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    /// The text, as written; none: the built-in one.
    pub text: Option<PathBuf>,
    /// What the text's SHA-256 must be.
    pub sha256: Option<Digest>,
    /// Rows taken.
    pub rows: u32,
    /// Most tokens of a row.
    pub context: u32,
    /// How documents become rows.
    pub packing: Packing,
    /// Which documents are taken first; none: the recipe's seed.
    pub seed: Option<u64>,
    /// Whose activations.
    pub activations: Activations,
    /// Second moments from a file instead of a text, as written.
    pub hessians: Option<PathBuf>,
    /// What experts get that saw too few tokens.
    pub few_tokens: FewTokens,
    /// How many are too few.
    pub expert_tokens: u32,
    /// Where `rows` or the table is stated.
    pub origin: Option<Origin>,
    /// Where `text` is stated.
    pub text_origin: Option<Origin>,
    /// Where `hessians` is stated.
    pub hessians_origin: Option<Origin>,
}

impl Default for Calibration {
    fn default() -> Self {
        Self {
            text: None,
            sha256: None,
            rows: 128,
            context: 512,
            packing: Packing::default(),
            seed: None,
            activations: Activations::default(),
            hessians: None,
            few_tokens: FewTokens::default(),
            expert_tokens: 256,
            origin: None,
            text_origin: None,
            hessians_origin: None,
        }
    }
}

/// How rounding under second moments goes about it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GptqChoice {
    /// What is first added to the diagonal, over its mean.
    pub damping: f64,
    /// Whether columns are visited in falling order of their diagonal entries.
    pub act_order: bool,
    /// Rounds of coordinate descent of `gptq-refit`.
    pub sweeps: u32,
}

impl Default for GptqChoice {
    fn default() -> Self {
        Self { damping: 0.01, act_order: false, sweeps: 2 }
    }
}

/// What one file's tables state.
#[derive(Debug, Default)]
pub(super) struct CalibrationSheet {
    table: Option<Origin>,
    text: Option<At<PathBuf>>,
    sha256: Option<At<Digest>>,
    rows: Option<At<u32>>,
    context: Option<u32>,
    packing: Option<Packing>,
    seed: Option<u64>,
    activations: Option<Activations>,
    hessians: Option<At<PathBuf>>,
    few_tokens: Option<FewTokens>,
    expert_tokens: Option<u32>,
    damping: Option<f64>,
    act_order: Option<bool>,
    sweeps: Option<u32>,
}

impl CalibrationSheet {
    /// Reads `[calibration]`.
    pub fn read(&mut self, value: Value<'_>, report: &mut Report) {
        let Some(table) = value.table(Section::Calibration, report) else { return };
        let mut number = |key, range| table.get(key).and_then(|value| number(value, range, report));
        let rows = number("rows", 1..=1 << 20);
        let context = number("context", 16..=1 << 20);
        let expert_tokens = number("expert-tokens", 0..=1 << 24);
        let path = |key, report: &mut Report| table.get(key).and_then(|v| super::sheet::path(v, report));
        *self = Self {
            table: Some(value.at),
            text: path("text", report),
            sha256: table.get("sha256").and_then(|value| digest(value, report)),
            rows: rows.zip(table.get("rows")).map(|(rows, value)| At { value: rows, at: value.at }),
            context,
            packing: table.get("packing").and_then(|value| word(value, &Packing::NAMES, report)),
            seed: table.get("seed").and_then(|value| super::sheet::seed(value, report)),
            activations: table.get("activations").and_then(|value| word(value, &Activations::NAMES, report)),
            hessians: path("hessians", report),
            few_tokens: table.get("few-tokens").and_then(|value| word(value, &FewTokens::NAMES, report)),
            expert_tokens,
            ..std::mem::take(self)
        };
        if let Some(pinned) = &self.sha256
            && self.text.is_none()
        {
            report.add(pinned.at, Mistake::NeedsKey { key: "sha256", other: "text" });
        }
    }

    /// Reads `[gptq]`.
    pub fn read_gptq(&mut self, value: Value<'_>, report: &mut Report) {
        let Some(table) = value.table(Section::Gptq, report) else { return };
        self.damping = table.get("damping").and_then(|value| share(value, report));
        self.act_order = table.get("act-order").and_then(|value| value.boolean(report)).map(|at| at.value);
        self.sweeps = table.get("sweeps").and_then(|value| number(value, 0..=100, report));
    }
}

/// The sheets' statements joined, the recipe's own first.
pub(super) fn join<'s>(
    sheets: impl Iterator<Item = &'s CalibrationSheet> + Clone,
) -> (Calibration, GptqChoice) {
    fn first<'s, T: Clone + 's>(
        mut sheets: impl Iterator<Item = &'s CalibrationSheet>,
        of: fn(&CalibrationSheet) -> &Option<T>,
    ) -> Option<T> {
        sheets.find_map(|sheet| of(sheet).clone())
    }
    let (usual, gptq) = (Calibration::default(), GptqChoice::default());
    let rows = first(sheets.clone(), |sheet| &sheet.rows);
    let text = first(sheets.clone(), |sheet| &sheet.text);
    // The digest of a base's text says nothing of the text that replaces it.
    let stating = sheets.clone().find(|sheet| sheet.text.is_some());
    let hessians = first(sheets.clone(), |sheet| &sheet.hessians);
    let calibration = Calibration {
        sha256: stating.and_then(|sheet| sheet.sha256.as_ref()).map(|at| at.value),
        text_origin: text.as_ref().map(|at| at.at),
        text: text.map(|at| at.value),
        hessians_origin: hessians.as_ref().map(|at| at.at),
        hessians: hessians.map(|at| at.value),
        origin: rows.as_ref().map(|at| at.at).or_else(|| first(sheets.clone(), |sheet| &sheet.table)),
        rows: rows.map_or(usual.rows, |at| at.value),
        context: first(sheets.clone(), |sheet| &sheet.context).unwrap_or(usual.context),
        packing: first(sheets.clone(), |sheet| &sheet.packing).unwrap_or_default(),
        seed: first(sheets.clone(), |sheet| &sheet.seed),
        activations: first(sheets.clone(), |sheet| &sheet.activations).unwrap_or_default(),
        few_tokens: first(sheets.clone(), |sheet| &sheet.few_tokens).unwrap_or_default(),
        expert_tokens: first(sheets.clone(), |sheet| &sheet.expert_tokens).unwrap_or(usual.expert_tokens),
    };
    let gptq = GptqChoice {
        damping: first(sheets.clone(), |sheet| &sheet.damping).unwrap_or(gptq.damping),
        act_order: first(sheets.clone(), |sheet| &sheet.act_order).unwrap_or(gptq.act_order),
        sweeps: first(sheets, |sheet| &sheet.sweeps).unwrap_or(gptq.sweeps),
    };
    (calibration, gptq)
}

/// One of several words.
fn word<T: Copy>(value: Value<'_>, names: &'static [(&'static str, T)], report: &mut Report) -> Option<T> {
    let known = || names.iter().map(|(name, _)| *name).collect();
    let unknown = |found| Mistake::UnknownWord { key: value.key, found, known: known() };
    value.named(names, report, unknown).map(|at| at.value)
}

/// A number above 0, of at most 10.
fn share(value: Value<'_>, report: &mut Report) -> Option<f64> {
    let (number, found) = value.number(report)?;
    let number = number.filter(|number| *number > 0.0 && *number <= 10.0);
    if number.is_none() {
        report.add(value.at, Mistake::ShareRange { key: value.key, found });
    }
    number
}

fn digest(value: Value<'_>, report: &mut Report) -> Option<At<Digest>> {
    let At { value: found, at } = value.string(report)?;
    match found.parse() {
        Ok(digest) => Some(At { value: digest, at }),
        Err(_) => {
            report.add(at, Mistake::BadDigest { key: value.key, found: found.to_owned() });
            None
        }
    }
}
