//! `tqc import`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde_json::json;

use super::build::Interrupt;
use super::print::Table;
use super::progress::Bar;
use super::{CliError, Common, print, threads};
use crate::build::Progress as _;
use crate::failure::{Exit, Outcome};
use crate::import::{Imported, Options, Plan};
use crate::tensor::Float;

/// Decode an EXL3 checkpoint into a dense one, which every command reads.
#[derive(Debug, Args)]
pub struct ImportArgs {
    /// Folder of the EXL3 checkpoint.
    checkpoint: PathBuf,
    /// Folder to write; it must not exist.
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Type of decoded weights. What EXL3's own kernels compute with is f16.
    #[arg(long, value_name = "TYPE", default_value = "f16", value_parser = ["f16", "bf16", "f32"])]
    to: String,
    /// Threads [default: all the machine has]. The result does not depend on it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    #[command(flatten)]
    common: Common,
}

impl ImportArgs {
    pub fn run(self) -> Outcome<Exit> {
        let began = Instant::now();
        let interrupt = Interrupt::install()?;
        if !self.checkpoint.is_dir() {
            let model = self.checkpoint.display().to_string();
            return Err(CliError::NoFolder { model }.into());
        }
        let target: PathBuf = self.output.components().collect();
        let floats = [Float::F16, Float::Bf16, Float::F32];
        let float = floats.into_iter().find(|float| float.to_string() == self.to);
        let plan = Plan::new(&self.checkpoint, float.expect("the parser knows the names"), &target)?;
        plan.notes().for_each(|note| print::say(&format!("note: {note}")));
        let stop = interrupt.raise_a_flag();
        let (threads, bar) = (threads(self.threads), Bar::default());
        let options = Options { target: &target, threads, stop: &stop, progress: &bar };
        let written = plan.write(&options);
        bar.end();
        let (record, digest) = written?;
        let (before, after) = (plan.source_bytes(), plan.bytes());
        if self.common.json {
            print::json(&json!({
                "path": target.display().to_string(), "digest": digest, "format": record.source.format, "to": record.to,
                "modules": record.modules, "kept": record.kept, "source_weight_file_bytes": before,
                "weight_file_bytes": after, "threads": threads,
                "elapsed_s": began.elapsed().as_secs_f64(),
            }))?;
        } else {
            print::text(&format!(
                "{}\nkept    {} other tensors\nfolder  {}\nsize    {after} of weight files, before {before}\n\
                 digest  {digest}\n",
                table(&record),
                record.kept,
                target.display(),
            ))?;
        }
        Ok(Exit::Done)
    }
}

/// Modules by rate and codebook.
fn table(record: &Imported) -> String {
    let mut rows: BTreeMap<(String, &str), (usize, u64)> = BTreeMap::new();
    for module in &record.modules {
        let row = rows.entry((module.bits.to_string(), &module.code)).or_default();
        row.0 += 1;
        row.1 += module.shape.elements().unwrap_or(0);
    }
    let mut table = Table::new(&[("bits", true), ("code", false), ("modules", true), ("weights", true)]);
    for ((bits, code), (modules, weights)) in rows {
        table.row([bits, code.to_owned(), modules.to_string(), weights.to_string()]);
    }
    table.render()
}
