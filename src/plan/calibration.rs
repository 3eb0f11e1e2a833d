//! What a build calibrates with, from the recipe and the file it names.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::{CopiedFile, Module, PlanError, layer_of};
use crate::arch::{Role, Stand};
use crate::artifact::open::file_digest;
use crate::digest::Digest;
use crate::quant::weighs;
use crate::recipe::{Activations, Recipe};
use crate::units::Bytes;

/// The text of a recipe that names none: prose, manuals, code, questions and conversations, of the public domain or
/// under permissive licences.
pub const BUILT_IN: &str = include_str!("calibration.jsonl");

/// Where second moments come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// The activations on a text.
    Text,
    /// A file.
    Hessians,
}

impl From {
    /// As provenance spells it.
    pub fn name(self) -> &'static str {
        match self {
            From::Text => "text",
            From::Hessians => "hessians",
        }
    }
}

/// Where the rows of a calibration lie on their way through the layers. The codes do not depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsPlace {
    /// Rows that take more lie in a mapped file.
    pub in_memory: Bytes,
    /// How often, at most, they are kept for a build that is killed after that.
    pub keep_every: Duration,
}

impl Default for RowsPlace {
    fn default() -> Self {
        Self { in_memory: Bytes::mib(256), keep_every: Duration::from_secs(20) }
    }
}

impl RowsPlace {
    /// Bytes on disk and in memory of rows that take so many, 4 · tokens · hidden.
    ///
    /// Rows that are kept lie on disk twice while new ones take the place of old ones. With `sequential` activations the
    /// rows before a layer stay beside those after it. Of a mapped file, pages that the system has not written out yet
    /// are taken to be as many as rows that lie in memory.
    pub fn bytes(self, rows: Bytes, activations: Activations) -> (Bytes, Bytes) {
        let copies = match activations {
            Activations::Unrounded => 1,
            Activations::Sequential => 2,
        };
        match rows > self.in_memory {
            true => (Bytes((2 + copies) * rows.0), Bytes(copies * self.in_memory.0)),
            false => (Bytes(2 * rows.0), Bytes(copies * rows.0)),
        }
    }
}

/// What a build calibrates with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CalibrationPlan {
    /// Where second moments come from.
    pub from: From,
    /// The file; none for the built-in text.
    pub path: Option<PathBuf>,
    /// Its name, or `built-in`.
    pub name: String,
    /// Its SHA-256.
    pub sha256: Digest,
    /// Modules of whose outputs the file has second moments, too; none in a text.
    pub outputs: BTreeSet<String>,
}

impl CalibrationPlan {
    /// What the modules' encoders need; none if no encoder weighs errors.
    ///
    /// # Errors
    /// [`PlanError::NoText`], [`PlanError::OtherText`], [`PlanError::NoTokenizer`].
    pub(super) fn new(
        recipe: &Recipe,
        modules: &[Module],
        copied: &[CopiedFile],
    ) -> Result<Option<Self>, PlanError> {
        match modules.iter().any(|module| weighs(module.assignment.encoder)) {
            true => Self::of(recipe, copied).map(Some),
            false => Ok(None),
        }
    }

    /// The recipe's `[calibration]`.
    fn of(recipe: &Recipe, copied: &[CopiedFile]) -> Result<Self, PlanError> {
        if let Some(path) = recipe.calibration_hessians() {
            let (name, sha256) = (file_name(&path), digest_of(&path)?);
            let outputs = output_modules(&path);
            return Ok(Self { from: From::Hessians, path: Some(path), name, sha256, outputs });
        }
        Self::text(recipe, copied)
    }

    /// The text of the recipe's `[calibration]`.
    ///
    /// # Errors
    /// As [`CalibrationPlan::new`].
    pub(super) fn text(recipe: &Recipe, copied: &[CopiedFile]) -> Result<Self, PlanError> {
        if !copied.iter().any(|file| file.name == "tokenizer.json") {
            return Err(PlanError::NoTokenizer { what: "calibration reads text" });
        }
        let Some(path) = recipe.calibration_text() else {
            let sha256 = Digest::of(BUILT_IN.as_bytes());
            let (name, outputs) = ("built-in".to_owned(), BTreeSet::new());
            return Ok(Self { from: From::Text, path: None, name, sha256, outputs });
        };
        let (name, found) = (file_name(&path), digest_of(&path)?);
        match recipe.calibration.sha256 {
            Some(needed) if needed != found => Err(PlanError::OtherText { path, found, needed }),
            _ => {
                let outputs = BTreeSet::new();
                Ok(Self { from: From::Text, path: Some(path), name, sha256: found, outputs })
            }
        }
    }
}

/// Second moments that codes are looked for under: one matrix of order `channels`, or one for each expert.
pub(super) struct InputSum<'a> {
    /// Path of the decoder layer; empty for the head.
    pub layer: &'a str,
    /// K.
    pub channels: usize,
    /// How many matrices.
    pub matrices: u64,
    /// Whether each is an expert's.
    pub experts: bool,
}

/// The sums of all modules whose encoder weighs errors; those that read the same norm share theirs.
pub(super) fn input_sums(modules: &[Module]) -> Vec<InputSum<'_>> {
    let mut sums = BTreeMap::new();
    for module in modules.iter().filter(|module| weighs(module.assignment.encoder)) {
        let path = module.output.module.as_str();
        let layer = layer_of(path).unwrap_or_default();
        let input = match &module.output.seat.stream {
            Stand::Reads(norm) => norm.as_str(),
            _ => path,
        };
        let experts = module.output.role == Role::Experts;
        let matrices = if experts { module.output.shape.0[0] } else { 1 };
        let sum = InputSum { layer, channels: module.work.row_elements, matrices, experts };
        sums.entry((layer, input, experts)).or_insert(sum);
    }
    sums.into_values().collect()
}

/// The modules in `outputs` of a table of contents. What is wrong with it is said where it is opened.
fn output_modules(path: &Path) -> BTreeSet<String> {
    let contents = std::fs::read(path).ok().and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
    let rows = contents.as_ref().and_then(|contents| contents["outputs"].as_array());
    let modules = rows.into_iter().flatten().filter_map(|row| row["module"].as_str());
    modules.map(str::to_owned).collect()
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn digest_of(path: &Path) -> Result<Digest, PlanError> {
    file_digest(path).map_err(|source| PlanError::NoText { path: path.to_owned(), source })
}
