//! `repacked.json`: what a folder was repacked from.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::digest::Digest;
use crate::tensor::Shape;
use crate::tool::Tool;

/// Name of the record.
pub const REPACKED: &str = "repacked.json";

/// Version of its shape.
pub(super) const VERSION: u32 = 1;

/// The whole record; canonical JSON, and nothing of the machine (`docs/formats/repacked.md`).
#[derive(Debug, Clone, Serialize)]
pub struct Repacked {
    /// 1.
    pub version: u32,
    /// The program.
    pub tool: Tool,
    /// What it was made from.
    pub source: SourceArtifact,
    /// The codec that was asked for.
    pub to: String,
    /// Whether modules were repacked that stock mlx-lm loads.
    pub all: bool,
    /// Modules that changed, in the order of the files.
    pub modules: Vec<RepackedModule>,
    /// Every other file of the folder: path to SHA-256.
    pub files: BTreeMap<String, Digest>,
}

/// An artifact of a build.
#[derive(Debug, Clone, Serialize)]
pub struct SourceArtifact {
    /// SHA-256 of its `provenance.json`.
    pub digest: Digest,
    /// Name of its recipe.
    pub recipe: String,
}

/// What one module was and became.
#[derive(Debug, Clone, Serialize)]
pub struct RepackedModule {
    /// As `tqc inspect` names it.
    pub module: String,
    /// Of the weight.
    pub shape: Shape,
    /// Codec it was in.
    pub was: String,
    /// Codec it is in.
    pub became: String,
    /// Σ (w − decode)² / Σ w², w being what it decoded to before; null where all of that is zero.
    pub relative_mse: Option<f64>,
}
