//! What the commands that run a model share: finding it, opening it, its settings.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;

use super::fetch::{Need, hub};
use super::{CliError, print};
use crate::artifact::PROVENANCE;
use crate::artifact::open::Artifact;
use crate::backend::Precision;
use crate::backend::cpu::Cpu;
use crate::failure::Outcome;
use crate::isa::Isa;
use crate::runtime::{Model, Weights};
use crate::sample::Sampling;
use crate::text::GenerationConfig;

/// A model, and where it runs.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// A folder (a Hugging Face checkpoint, a checkpoint in MLX's layout, or an artifact), or
    /// `hub:ORG/NAME@COMMIT`.
    #[arg(value_name = "MODEL")]
    model: String,
    /// Do not compare an artifact's files with its record first.
    #[arg(long)]
    no_verify: bool,
    /// Threads [default: all the machine has]. The result does not depend on it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Instruction set of the kernels: scalar, avx2, avx512 or neon [default: the best here]. The result
    /// does not depend on it.
    #[arg(long, value_name = "NAME")]
    isa: Option<Isa>,
}

impl ModelArgs {
    /// The model's folder; an artifact's files agree with its record.
    pub fn folder(&self) -> Outcome<PathBuf> {
        folder(&self.model, self.no_verify)
    }

    /// Where it runs.
    pub fn cpu(&self, precision: Precision) -> Arc<Cpu> {
        let all = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Cpu::new(self.isa.unwrap_or_else(Isa::best), self.threads.map_or(all, usize::from), precision)
    }
}

/// A model that writes.
#[derive(Debug, Args)]
pub struct WriterArgs {
    /// Compute with f32 activations everywhere. The default rounds the inputs of packed linear layers to
    /// int8 where their codec allows it.
    #[arg(long)]
    exact: bool,
    #[command(flatten)]
    model: ModelArgs,
}

impl WriterArgs {
    /// See [`ModelArgs::folder`].
    pub fn folder(&self) -> Outcome<PathBuf> {
        self.model.folder()
    }

    /// Makes the model ready.
    pub fn open(&self, dir: &Path) -> Outcome<Model> {
        let precision = if self.exact { Precision::Exact } else { Precision::Fast };
        Model::new(Weights::open(dir)?, self.model.cpu(precision))
    }
}

/// The folder that `model` names; an artifact's files agree with its record, unless `unchecked`.
pub fn folder(model: &str, unchecked: bool) -> Outcome<PathBuf> {
    let dir = match model.strip_prefix("hub:") {
        None => PathBuf::from(model),
        Some(name) => {
            let Some((repo, revision)) = name.split_once('@') else {
                return Err(CliError::NoRevision { model: model.to_owned() }.into());
            };
            hub(repo, revision, Need::Weights)?
        }
    };
    if !dir.is_dir() {
        return Err(CliError::NoFolder { model: model.to_owned() }.into());
    }
    if !unchecked && dir.join(PROVENANCE).exists() {
        Artifact::open(&dir)?.check_files()?;
    }
    Ok(dir)
}

/// How tokens are chosen.
#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// Flattens (above 1) or sharpens the choice; 0 takes the likeliest token [default: what the model's
    /// generation_config.json says if it samples, else 0].
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Keep the likeliest tokens up to this share of the probability.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// Keep this many of the likeliest tokens; 0 keeps all.
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Keep tokens at least this likely, as a share of the likeliest one's probability.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f64>,
    /// Make tokens that came before less likely; 1 does not.
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    repetition_penalty: Option<f64>,
    /// Of the random choices: same seed, same tokens.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

impl SamplingArgs {
    /// The options over the model's own settings.
    pub fn over(&self, model: &GenerationConfig) -> Outcome<Sampling> {
        let own = match model.do_sample {
            Some(true) => model.sampling(self.seed),
            _ => Sampling { seed: self.seed, ..Sampling::greedy() },
        };
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(own.temperature),
            top_p: self.top_p.unwrap_or(own.top_p),
            top_k: self.top_k.unwrap_or(own.top_k),
            min_p: self.min_p.unwrap_or(own.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(own.repetition_penalty),
            seed: self.seed,
        };
        sampling.check()?;
        Ok(sampling)
    }
}

/// Guessing ahead.
#[derive(Debug, Args)]
pub struct DraftArgs {
    /// Guess tokens ahead and take several through the model at once. `mtp`: with the model's own draft head.
    /// The output is the same as without.
    #[arg(long, value_name = "HEAD", value_parser = ["mtp"])]
    draft: Option<String>,
    /// Tokens to guess at a time.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16), requires = "draft")]
    draft_tokens: u8,
}

impl DraftArgs {
    /// Tokens to guess at a time; 0 without a draft head.
    pub fn tokens(&self) -> usize {
        if self.draft.is_some() { usize::from(self.draft_tokens) } else { 0 }
    }
}

/// Tells a person which path the layers take, if it is not the one asked for in all.
pub fn say_precisions(model: &Model) {
    let counts = model.precisions();
    let count = |precision| counts.get(&precision).copied().unwrap_or(0);
    let (fast, exact) = (count(Precision::Fast), count(Precision::Exact));
    if fast > 0 && exact > 0 {
        print::say(&format!("{fast} linear layers with int8 activations, {exact} with f32"));
    }
}
