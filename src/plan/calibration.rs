//! What a build calibrates with, from the recipe and the file it names.

use std::path::{Path, PathBuf};

use super::{CopiedFile, Module, PlanError};
use crate::artifact::open::file_digest;
use crate::digest::Digest;
use crate::quant::weighs;
use crate::recipe::Recipe;

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
            return Ok(Self { from: From::Hessians, path: Some(path), name, sha256 });
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
            return Ok(Self { from: From::Text, path: None, name: "built-in".to_owned(), sha256 });
        };
        let (name, found) = (file_name(&path), digest_of(&path)?);
        match recipe.calibration.sha256 {
            Some(needed) if needed != found => Err(PlanError::OtherText { path, found, needed }),
            _ => Ok(Self { from: From::Text, path: Some(path), name, sha256: found }),
        }
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn digest_of(path: &Path) -> Result<Digest, PlanError> {
    file_digest(path).map_err(|source| PlanError::NoText { path: path.to_owned(), source })
}
