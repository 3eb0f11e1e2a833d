//! `imported.json`: what a folder was imported from.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::digest::Digest;
use crate::tensor::Shape;
use crate::tool::Tool;

/// Name of the record.
pub const IMPORTED: &str = "imported.json";

/// Version of its shape.
pub(super) const VERSION: u32 = 1;

/// The whole record; canonical JSON, and nothing of the machine (`docs/formats/exl3.md`).
#[derive(Debug, Clone, Serialize)]
pub struct Imported {
    /// 1.
    pub version: u32,
    /// The program.
    pub tool: Tool,
    /// What it was made from.
    pub source: SourceCheckpoint,
    /// Type of decoded weights.
    pub to: String,
    /// Modules that were decoded, in the order of the source.
    pub modules: Vec<ImportedModule>,
    /// Tensors whose bytes were kept.
    pub kept: usize,
    /// Every other file of the folder: name to SHA-256.
    pub files: BTreeMap<String, Digest>,
}

/// A checkpoint of another tool.
#[derive(Debug, Clone, Serialize)]
pub struct SourceCheckpoint {
    /// `exl3`.
    pub format: &'static str,
    /// SHA-256 of its `config.json` and weight files.
    pub files: BTreeMap<String, Digest>,
}

/// What was decoded.
#[derive(Debug, Clone, Serialize)]
pub struct ImportedModule {
    /// Path of the module.
    pub module: String,
    /// Of the dense weight.
    pub shape: Shape,
    /// Bits of a weight (K).
    pub bits: f64,
    /// Codebook.
    pub code: String,
    /// Σ over the module of w², f64, row by row: what tells two imports apart at a glance.
    pub energy: f64,
}
