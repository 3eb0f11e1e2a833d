//! `tqc inspect`, `tqc verify`, `tqc diff`.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;

use super::build::Interrupt;
use super::print::{self, Table};
use super::{Common, Machine};
use crate::check::diff::{Difference, diff};
use crate::check::inspect::{Inspection, inspect};
use crate::check::verify::{Again, Rebuild, Verdict, verify};
use crate::failure::{Exit, Outcome};
use crate::units::Bytes;

/// Show what a checkpoint or artifact holds, from headers alone.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Folder, or a single safetensors file.
    path: PathBuf,
    #[command(flatten)]
    common: Common,
}

/// Check an artifact against its record, its source and its recipe; exit 1 if anything is wrong.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Folder of the artifact.
    artifact: PathBuf,
    /// Folder of the original checkpoint: compare every source tensor's digest.
    #[arg(long, value_name = "DIR")]
    source: Option<PathBuf>,
    /// Encode so many modules again from the source (or `all`) and compare their bytes.
    #[arg(long, value_name = "N|all", value_parser = parse_rebuild, default_value = "0")]
    rebuild: Rebuild,
    /// The text, or the file of second moments, that the recipe calibrates with, for `--rebuild`.
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    #[command(flatten)]
    machine: Machine,
    #[command(flatten)]
    common: Common,
}

/// Compare two checkpoints or artifacts: tensors, metadata, other files; exit 1 if they differ.
#[derive(Debug, Args)]
pub struct DiffArgs {
    /// One folder.
    left: PathBuf,
    /// The other.
    right: PathBuf,
    #[command(flatten)]
    common: Common,
}

fn parse_rebuild(text: &str) -> Result<Rebuild, String> {
    match text {
        "all" => Ok(Rebuild::All),
        "0" => Ok(Rebuild::No),
        number => {
            number.parse().map(Rebuild::Some).map_err(|_| "a number of modules or `all` is needed".to_owned())
        }
    }
}

impl InspectArgs {
    pub fn run(self) -> Outcome<Exit> {
        let inspection = inspect(&self.path)?;
        if self.common.json {
            print::json(&inspection)?;
        } else {
            print::text(&inspection_text(&inspection))?;
        }
        Ok(Exit::Done)
    }
}

fn inspection_text(inspection: &Inspection) -> String {
    let mut modules = Table::new(&[
        ("module", false),
        ("stored as", false),
        ("shape", false),
        ("bytes", true),
        ("relative mse", true),
    ]);
    for module in &inspection.modules {
        modules.row([
            module.name.clone(),
            module.storage.clone(),
            module.shape.to_string(),
            module.bytes.to_string(),
            module.relative_mse.map_or(String::new(), |mse| format!("{mse:.3e}")),
        ]);
    }
    let mut storage =
        Table::new(&[("stored as", false), ("modules", true), ("weights", true), ("bytes", true)]);
    for row in &inspection.storage {
        storage.row([
            row.storage.clone(),
            row.modules.to_string(),
            row.weights.to_string(),
            row.bytes.to_string(),
        ]);
    }
    let mut files = Table::new(&[("file", false), ("tensors", true), ("bytes", true)]);
    for file in &inspection.files {
        files.row([file.name.clone(), file.tensors.to_string(), file.bytes.to_string()]);
    }
    let mut text = format!("{}\n{}\n{}\n", modules.render(), storage.render(), files.render());
    let kind = inspection.model_type.as_deref().unwrap_or("no config");
    let _ = writeln!(
        text,
        "{} ({kind}): {} weights, {} of payload, {:.4} bits per weight over all stored bytes",
        inspection.kind,
        inspection.weights,
        Bytes(inspection.bytes),
        inspection.bits_per_weight
    );
    if let Some(digest) = inspection.digest {
        let _ = writeln!(text, "digest {digest}");
    }
    text
}

impl VerifyArgs {
    pub fn run(self) -> Outcome<Exit> {
        let stop = Interrupt::install()?.raise_a_flag();
        let verdict = verify(
            &self.artifact,
            self.source.as_deref(),
            Again { rebuild: self.rebuild, calibration: self.calibration.as_deref() },
            self.machine.limits(),
            &stop,
        )?;
        if self.common.json {
            print::json(&verdict)?;
        } else {
            print::text(&verdict_text(&verdict))?;
        }
        Ok(if verdict.ok { Exit::Done } else { Exit::No })
    }
}

fn verdict_text(verdict: &Verdict) -> String {
    let mut text = String::new();
    for problem in &verdict.problems {
        let _ = writeln!(text, "`{}` {}", problem.subject, problem.found);
    }
    for note in &verdict.notes {
        let _ = writeln!(text, "note: {note}");
    }
    let _ = writeln!(
        text,
        "{}: {} files, {} stored tensors, {} source tensors compared; {} modules encoded again; {} problems",
        if verdict.ok { "verified" } else { "NOT verified" },
        verdict.files,
        verdict.tensors,
        verdict.source_tensors,
        verdict.rebuilt_modules,
        verdict.problems.len()
    );
    text
}

impl DiffArgs {
    pub fn run(self) -> Outcome<Exit> {
        let difference = diff(&self.left, &self.right)?;
        if self.common.json {
            print::json(&difference)?;
        } else {
            print::text(&difference_text(&difference))?;
        }
        Ok(if difference.same { Exit::Done } else { Exit::No })
    }
}

fn difference_text(difference: &Difference) -> String {
    let mut text = String::new();
    let absent = || "absent".to_owned();
    for tensor in &difference.tensors {
        let (left, right) =
            (tensor.left.clone().unwrap_or_else(absent), tensor.right.clone().unwrap_or_else(absent));
        match tensor.differing_bytes {
            Some(bytes) => {
                let _ = writeln!(text, "tensor {}: {left}, {bytes} bytes differ", tensor.name);
            }
            None => {
                let _ = writeln!(text, "tensor {}: {left} | {right}", tensor.name);
            }
        }
    }
    let short = |value: &Option<serde_json::Value>| {
        let full = value.as_ref().map_or_else(absent, ToString::to_string);
        if full.chars().count() > 60 { full.chars().take(57).chain("...".chars()).collect() } else { full }
    };
    for key in &difference.metadata {
        let _ = writeln!(text, "{} {}: {} | {}", key.file, key.key, short(&key.left), short(&key.right));
    }
    for file in &difference.files {
        let digest = |digest: Option<crate::digest::Digest>| digest.map_or_else(absent, |d| d.short());
        let _ = writeln!(text, "file {}: {} | {}", file.name, digest(file.left), digest(file.right));
    }
    let _ = writeln!(
        text,
        "{}: {} tensors equal, {} differ; {} metadata keys and {} other files differ",
        if difference.same { "same" } else { "different" },
        difference.equal_tensors,
        difference.tensors.len(),
        difference.metadata.len(),
        difference.files.len()
    );
    text
}
