//! `tqc repack`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde_json::json;

use super::build::Interrupt;
use super::print::Table;
use super::progress::Bar;
use super::{CliError, Common, Cores, print};
use crate::build::Progress as _;
use crate::failure::{Exit, Outcome};
use crate::repack::{Options, Plan, Repacked, Target};

/// Expand an artifact into codecs that stock mlx-lm loads.
#[derive(Debug, Args)]
pub struct RepackArgs {
    /// Folder of the artifact.
    artifact: PathBuf,
    /// Folder to write; it must not exist.
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// What modules become: affine codes of the decoded weights (groups of 32, or bf16, where 64 does not divide a row),
    /// the decoded weights rounded to bf16, or as they are.
    #[arg(long, value_name = "CODEC", default_value = Target::NAMES[0], value_parser = Target::NAMES)]
    to: String,
    /// Repack every packed module, also those that stock mlx-lm loads.
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    cores: Cores,
    #[command(flatten)]
    common: Common,
}

/// Modules of another codec than the one asked for that are told by name.
const TOLD: usize = 3;

impl RepackArgs {
    pub fn run(self) -> Outcome<Exit> {
        let began = Instant::now();
        let interrupt = Interrupt::install()?;
        if !self.artifact.is_dir() {
            let model = self.artifact.display().to_string();
            return Err(CliError::NoFolder { model }.into());
        }
        let target: PathBuf = self.output.components().collect();
        let to = Target::from_name(&self.to).expect("the parser knows the names");
        let plan = Plan::new(&self.artifact, to, self.all, &target)?;
        let stop = interrupt.raise_a_flag();
        let others: Vec<_> = plan.others().collect();
        for (module, codec) in others.iter().take(TOLD) {
            print::say(&format!("note: `{module}` becomes {codec}: {} does not fit its rows", self.to));
        }
        if others.len() > TOLD {
            let more = others.len() - TOLD;
            print::say(&format!("note: and {more} more that {} does not fit", self.to));
        }
        let (limits, bar) = (self.cores.limits(), Bar::default());
        let options = Options {
            target: &target,
            threads: limits.threads,
            isa: limits.isa,
            stop: &stop,
            progress: &bar,
        };
        let written = plan.write(&options);
        bar.end();
        let (record, digest) = written?;
        let (before, after) = (plan.source_bytes(), plan.bytes());
        if self.common.json {
            print::json(&json!({
                "path": target.display().to_string(), "digest": digest, "source_digest": record.source.digest, "to": record.to,
                "all": record.all, "modules": record.modules, "source_weight_file_bytes": before,
                "weight_file_bytes": after, "threads": limits.threads, "isa": limits.isa.to_string(),
                "elapsed_s": began.elapsed().as_secs_f64(),
            }))?;
        } else {
            print::text(&format!(
                "{}\nfolder  {}\nsize    {after} of weight files, before {before}\ndigest  {digest}\n",
                table(&record),
                target.display(),
            ))?;
        }
        Ok(Exit::Done)
    }
}

/// Modules by what they were and became, with the worst relative error.
fn table(record: &Repacked) -> String {
    let mut rows: BTreeMap<(&str, &str), (usize, u64, f64)> = BTreeMap::new();
    for module in &record.modules {
        let row = rows.entry((&module.was, &module.became)).or_default();
        row.0 += 1;
        row.1 += module.shape.elements().unwrap_or(0);
        row.2 = row.2.max(module.relative_mse.unwrap_or(0.0));
    }
    let mut table = Table::new(&[
        ("was", false),
        ("became", false),
        ("modules", true),
        ("weights", true),
        ("worst relative mse", true),
    ]);
    for ((was, became), (modules, weights, worst)) in rows {
        let cells = [modules.to_string(), weights.to_string(), format!("{worst:.3e}")];
        table.row([was.to_owned(), became.to_owned()].into_iter().chain(cells));
    }
    table.render()
}
