//! The command line: parses, runs, prints.
//!
//! stdout is data (text tables, or one JSON object with `--json`); everything for people goes to stderr.

mod bench;
mod build;
mod calibrate;
mod check;
mod doctor;
mod eval;
mod fetch;
mod generate;
mod import;
mod model;
mod plan;
mod print;
mod progress;
pub mod reference;
mod repack;
mod report;
mod sensitivity;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::failure::{Exit, Failure, Outcome};
use crate::isa::Isa;
use crate::plan::Limits;
use crate::process;
use crate::units::Bytes;

/// Builds quantized language models from recipes, reproducibly, and checks what was built.
#[derive(Debug, Parser)]
#[command(name = "tqc", version, arg_required_else_help = true, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Plan(plan::PlanArgs),
    Build(build::BuildArgs),
    Calibrate(calibrate::CalibrateArgs),
    Inspect(check::InspectArgs),
    Verify(check::VerifyArgs),
    Diff(check::DiffArgs),
    Repack(repack::RepackArgs),
    Import(import::ImportArgs),
    Generate(Box<generate::GenerateArgs>),
    Chat(Box<generate::ChatArgs>),
    Eval(eval::EvalArgs),
    Sensitivity(sensitivity::SensitivityArgs),
    Report(report::ReportArgs),
    Doctor(doctor::DoctorArgs),
    Bench(bench::BenchArgs),
}

/// Options that every command has.
#[derive(Debug, Args)]
struct Common {
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// What of the machine a command may use.
#[derive(Debug, Args)]
struct Machine {
    /// Working memory of all threads together, such as 4GiB [default: 4 x the largest tensor,
    /// at least 64MiB].
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    #[command(flatten)]
    cores: Cores,
}

impl Machine {
    fn limits(&self) -> Limits {
        Limits { memory: self.memory, ..self.cores.limits() }
    }
}

/// Threads and kernels.
#[derive(Debug, Args)]
struct Cores {
    /// Threads [default: all the machine has]. The result does not depend on it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Instruction set of the kernels: scalar, avx2, avx512 or neon [default: the best here]. The result
    /// does not depend on it.
    #[arg(long, value_name = "NAME")]
    isa: Option<Isa>,
}

impl Cores {
    /// With the default budget.
    fn limits(&self) -> Limits {
        Limits { memory: None, threads: threads(self.threads), isa: self.isa.unwrap_or_else(Isa::best) }
    }
}

/// Threads that were asked for, or as many as the machine has.
fn threads(asked: Option<u16>) -> usize {
    let all = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    asked.map_or_else(all, usize::from)
}

/// A recipe and where its weights come from.
#[derive(Debug, Args)]
struct RecipeArgs {
    /// The recipe, a TOML file.
    recipe: PathBuf,
    /// Folder of the checkpoint, instead of the recipe's own source.
    #[arg(long, value_name = "DIR")]
    source: Option<PathBuf>,
}

/// Runs the command line and returns how it ended.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // `--help` and `--version` are answers; all else is a wrong request.
            let exit = if error.use_stderr() { Exit::Request } else { Exit::Done };
            let _ = error.print();
            return code(exit);
        }
    };
    let ran: Outcome<Exit> = match process::guard_maps() {
        Ok(()) => cli.run(),
        Err(error) => Err(CliError::Signals(error.to_string()).into()),
    };
    match ran {
        Ok(exit) => code(exit),
        Err(failure) => {
            print::failure(&*failure);
            code(failure.exit())
        }
    }
}

fn code(exit: Exit) -> ExitCode {
    ExitCode::from(exit as u8)
}

impl Cli {
    fn run(self) -> Outcome<Exit> {
        match self.command {
            Command::Plan(args) => args.run(),
            Command::Build(args) => args.run(),
            Command::Calibrate(args) => args.run(),
            Command::Inspect(args) => args.run(),
            Command::Verify(args) => args.run(),
            Command::Diff(args) => args.run(),
            Command::Repack(args) => args.run(),
            Command::Import(args) => args.run(),
            Command::Doctor(args) => args.run(),
            Command::Generate(args) => args.run(),
            Command::Chat(args) => args.run(),
            Command::Eval(args) => args.run(),
            Command::Sensitivity(args) => args.run(),
            Command::Report(args) => args.run(),
            Command::Bench(args) => args.run(),
        }
    }
}

/// Why the command line could not do its own part.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
enum CliError {
    #[error("stdout cannot be written: {0}")]
    Stdout(std::io::Error),
    #[error("`{path}` cannot be written: {error}")]
    Write { path: PathBuf, error: std::io::Error },
    #[error("signals cannot be handled: {0}")]
    Signals(String),
    #[error("the recipe is called `{path}`, which is where its lock would be written")]
    LockIsRecipe { path: PathBuf },
    #[error("no codec's name contains `{text}`")]
    NoSuchCodec { text: String },
    #[error("`{model}` names no commit")]
    NoRevision { model: String },
    #[error("there is no folder `{model}`")]
    NoFolder { model: String },
    #[error("the prompt `{path}` cannot be read: {error}")]
    Prompt { path: PathBuf, error: std::io::Error },
    #[error("`{path}` exists already")]
    Exists { path: PathBuf },
    #[error(
        "what the budget chose loses to an even choice of the same size, and the recipe says to stop then"
    )]
    Lost,
    #[error("`{path}` does not exist, so there is nothing to compare the build with")]
    NoLock { path: PathBuf },
    #[error("`--only-layers` is not possible: {needed}")]
    NoLayers { needed: String },
}

impl Failure for CliError {
    fn exit(&self) -> Exit {
        match self {
            CliError::NoLock { .. }
            | CliError::NoLayers { .. }
            | CliError::Exists { .. }
            | CliError::LockIsRecipe { .. }
            | CliError::NoSuchCodec { .. }
            | CliError::NoRevision { .. }
            | CliError::NoFolder { .. }
            | CliError::Prompt { .. } => Exit::Request,
            CliError::Lost => Exit::No,
            _ => Exit::Machine,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            CliError::LockIsRecipe { .. } => Some("give the recipe a name that ends in `.toml`".to_owned()),
            CliError::NoSuchCodec { .. } => Some("`affine-4`, `mxfp`, `nvfp4` and the like do".to_owned()),
            CliError::NoRevision { .. } => {
                Some("write `hub:ORG/NAME@COMMIT`, with the full commit hash".to_owned())
            }
            CliError::NoFolder { .. } => Some("give a model's folder, or `hub:ORG/NAME@COMMIT`".to_owned()),
            CliError::Prompt { .. } => Some("name a file of UTF-8 text, or `-` for stdin".to_owned()),
            CliError::Lost => Some(
                "measure costs on more text, leave `[budget]` out for an even choice, or write `control = \"report\"`"
                    .to_owned(),
            ),
            CliError::Exists { .. } => Some("name another folder, or remove this one".to_owned()),
            CliError::NoLayers { .. } => Some("leave it out, or name fewer layers".to_owned()),
            CliError::NoLock { .. } => Some("write it with `tqc build RECIPE --write-lock`".to_owned()),
            _ => None,
        }
    }
}
