//! `tqc eval dump`.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};

use super::{BudgetArgs, Steps, nats, shown};
use crate::arch::Config;
use crate::backend::Precision;
use crate::cli::generate::interrupt;
use crate::cli::model::ModelArgs;
use crate::cli::{Common, print};
use crate::eval::EvalError;
use crate::eval::dump::Format;
use crate::eval::dump::make::{Making, make};
use crate::eval::identity::Identity;
use crate::failure::{Exit, Outcome};
use crate::runtime::Weights;
use crate::tensor::Float;
use crate::text::Tokenizer;
use crate::text::documents::{self, Taking};

/// Keep what a teacher says about a text, to hold candidates against it.
///
/// One pass, layer by layer, so the teacher may be larger than memory. Run again after an interruption, it goes
/// on where it ended.
#[derive(Debug, Args)]
pub struct DumpArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Documents: JSON lines with `text`, or with `messages` for the chat template.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Folder of the dump.
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    #[command(flatten)]
    taking: TakingArgs,
    /// What to keep of a position: the final hidden state, from which a head makes exact logits; or the 2048
    /// likeliest tokens, for engines that have no head to share.
    #[arg(long, value_enum, default_value_t = Kept::Hidden)]
    format: Kept,
    /// Type of the numbers that are kept.
    #[arg(long, value_enum, default_value_t = Number::F16)]
    dtype: Number,
    /// Throw away unfinished work of another task at the same place.
    #[arg(long)]
    discard: bool,
    /// Refuse documents that would be cut or left out, or that repeat others.
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    budget: BudgetArgs,
    #[command(flatten)]
    common: Common,
}

/// How documents are taken from a file.
#[derive(Debug, Args)]
pub struct TakingArgs {
    /// Most documents, from the first [default: all].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rows: Option<u32>,
    /// Most tokens of a sequence.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(2..))]
    context: u32,
    /// Leave documents of fewer tokens out, and count them. Without it one of fewer than 2 is an error.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    min_tokens: Option<u32>,
    /// What to do with what is beyond the context: leave it out, or make it further sequences.
    #[arg(long, value_enum, default_value_t = Long::Cut)]
    long: Long,
}

impl TakingArgs {
    /// The same for the reader.
    pub fn taking(&self) -> Taking {
        Taking {
            rows: self.rows.map(|rows| rows as usize),
            context: self.context as usize,
            min_tokens: self.min_tokens.map(|tokens| tokens as usize),
            split: self.long == Long::Split,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kept {
    Hidden,
    Topk,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Number {
    F16,
    F32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Long {
    Cut,
    Split,
}

impl DumpArgs {
    pub fn run(self) -> Outcome<Exit> {
        let stop = interrupt(|| {})?;
        let dir = self.model.folder()?;
        Config::read_packed(&dir)?;
        if self.output.symlink_metadata().is_ok() {
            return Err(EvalError::Occupied { path: self.output }.into());
        }
        let tokenizer = Tokenizer::open(&dir)?;
        let documents = documents::read(&self.text, &dir, &tokenizer, self.taking.taking())?;
        drop(tokenizer);
        let text = &documents.record;
        if text.repeated > 0 {
            print::say(&format!(
                "note: {} documents repeat an earlier one; intervals take them for independent, so remove them",
                text.repeated
            ));
        }
        if text.cut > 0 || text.short > 0 || text.repeated > 0 {
            let (cut, tokens, short, repeated) = (text.cut, text.cut_tokens, text.short, text.repeated);
            if self.strict {
                return Err(EvalError::Strict { cut, short, repeated }.into());
            }
            if cut + short > 0 {
                print::say(&format!(
                    "note: {cut} documents cut at {} tokens ({tokens} tokens left out), {short} left out as short",
                    text.taking.context
                ));
            }
        }
        let weights = Weights::open(&dir)?;
        let cpu: Arc<_> = self.model.cpu(Precision::Exact);
        let steps = Steps::new("dump");
        let teacher = Identity::read(&dir)?;
        let making = Making {
            target: &self.output,
            format: if self.format == Kept::Hidden { Format::Hidden } else { Format::TopK },
            float: if self.dtype == Number::F16 { Float::F16 } else { Float::F32 },
            budget: self.budget.memory,
            discard: self.discard,
            stop: &stop,
            progress: &steps,
        };
        let made = make(&weights, &cpu, &teacher, &documents, &making)?;
        steps.end();
        print::result(self.common.json, &made, |made| {
            let resumed = match made.resumed_sequences {
                0 => String::new(),
                n => format!(", of which {n} sequences were done before"),
            };
            format!(
                "dump         {}\ndigest       {}\ndocuments    {} ({} cut, {} left out as short)\n\
                 positions    {}, {} bytes each{resumed}\nteacher ppl  {}\n\
                 noise floor  {} nats per token (mean KL of the teacher against its own dump), at most {}\n\
                 took         {:.1} s; at most {} resident, {} anonymous\n",
                shown(&made.path),
                made.digest,
                made.documents,
                made.cut,
                made.short,
                made.tokens,
                made.bytes_per_position,
                made.teacher_ppl.map_or_else(|| "-".to_owned(), |ppl| format!("{ppl:.4}")),
                nats(made.noise_floor.mean_kl),
                nats(made.noise_floor.max_kl),
                made.elapsed_s,
                made.peak.resident,
                made.peak.anonymous,
            )
        })?;
        Ok(Exit::Done)
    }
}
