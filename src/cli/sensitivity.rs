//! `tqc sensitivity`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;

use super::eval::{BudgetArgs, Steps, nats, shown};
use super::generate::interrupt;
use super::{Common, Cores, RecipeArgs, fetch, model, print};
use crate::codec::CodecSpec;
use crate::failure::{Exit, Outcome};
use crate::recipe::Pattern;
use crate::sensitivity::{self, Asking, Measured};

/// Measure what rounding each module alone costs: KL from the source, module by module and codec by codec.
///
/// The layers are walked once for many probes, so the model may be larger than memory. Run again after an
/// interruption, it goes on after the last finished wave.
#[derive(Debug, Args)]
pub struct SensitivityArgs {
    /// The checkpoint, a folder or `hub:ORG/NAME@COMMIT` [default: the recipe's own source].
    #[arg(value_name = "MODEL")]
    model: Option<String>,
    /// The recipe: its changes of basis, its encoder, and which modules it quantizes.
    #[arg(long, value_name = "FILE")]
    recipe: PathBuf,
    /// The file to write.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Codecs to try, such as affine-4g64,mxfp4 [default: affine with 2, 3, 4, 6 and 8 bits, in groups as the
    /// recipe's default codec has].
    #[arg(long, value_name = "LIST")]
    candidates: Option<String>,
    /// Only modules whose path matches this pattern, as in a recipe's rule.
    #[arg(long, value_name = "PATTERN", value_parser = pattern)]
    only: Option<Pattern>,
    /// Documents: JSON lines with `text`, or with `messages` for the chat template [default: a built-in text].
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Most documents, from the first [default: all].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rows: Option<u32>,
    /// Most tokens of a document [default: 256, or the model's context].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    context: Option<u32>,
    /// Most tokens of all documents together.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(2..))]
    tokens: u32,
    /// Throw away unfinished work of another task at the same place.
    #[arg(long)]
    discard: bool,
    #[command(flatten)]
    budget: BudgetArgs,
    #[command(flatten)]
    cores: Cores,
    #[command(flatten)]
    common: Common,
}

fn pattern(text: &str) -> Result<Pattern, String> {
    Pattern::new(text).map_err(|error| error.to_string())
}

impl SensitivityArgs {
    pub fn run(self) -> Outcome<Exit> {
        let stop = interrupt(|| {})?;
        let candidates = match &self.candidates {
            Some(list) => sensitivity::candidates(list)?,
            None => Vec::new(),
        };
        let source = self.model.as_ref().map(|name| model::folder(name, false)).transpose()?;
        let args = RecipeArgs { recipe: self.recipe, source };
        let (recipe, source) = fetch::recipe_and_source(&args, fetch::Need::Weights)?;
        let steps = Steps::new("sensitivity");
        let asking = Asking {
            target: &self.output,
            candidates: &candidates,
            only: self.only.as_ref(),
            text: self.text.as_deref(),
            rows: self.rows.map(|rows| rows as usize),
            context: self.context.map(|context| context as usize),
            tokens: self.tokens as usize,
            budget: self.budget.memory,
            discard: self.discard,
            stop: &stop,
            progress: &steps,
            tell: &|what| steps.phase(what),
        };
        let measured = sensitivity::sensitivity(&recipe, &source, self.cores.limits(), &asking)?;
        steps.end();
        if self.common.json {
            print::json(&measured.sensitivity)?;
        } else {
            print::text(&as_text(&measured))?;
        }
        Ok(Exit::Done)
    }
}

/// The file, and for each codec the sum over modules and the module that costs most.
fn as_text(measured: &Measured) -> String {
    let found = &measured.sensitivity;
    let resumed = match measured.resumed_probes {
        0 => String::new(),
        n => format!("; {n} probes were done before"),
    };
    let mut text = format!(
        "file         {}\ndigest       {}\nmodules      {}, in basis {}\ntext         {}: {} positions of {} documents\n\
         base KL      {} nats\ntook         {:.1} s in {} waves{resumed}\n\n",
        shown(&measured.path),
        measured.digest,
        found.modules.len(),
        found.basis,
        found.text.name,
        found.text.positions,
        found.text.sequences,
        nats(found.base_kl),
        measured.elapsed_s,
        measured.waves,
    );
    let mut codecs: BTreeMap<&str, (f64, f64, &str)> = BTreeMap::new();
    for (path, module) in &found.modules {
        for (codec, cost) in &module.candidates {
            let (sum, most, worst) = codecs.entry(codec).or_insert((0.0, f64::NEG_INFINITY, path));
            *sum += cost.kl;
            if cost.kl > *most {
                (*most, *worst) = (cost.kl, path);
            }
        }
    }
    let order = CodecSpec::all().into_iter().map(|codec| codec.to_string());
    for codec in order {
        if let Some((sum, most, worst)) = codecs.get(codec.as_str()) {
            let (sum, most) = (nats(*sum), nats(*most));
            let _ = writeln!(text, "{codec:<12} sum of KL {sum}, most {most} in {worst}");
        }
    }
    text
}
