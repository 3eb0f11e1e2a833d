//! `tqc calibrate`.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use serde_json::json;

use super::build::Interrupt;
use super::progress::Bar;
use super::{CliError, Common, Machine, RecipeArgs, fetch, print};
use crate::build::Progress as _;
use crate::calib::{CONTENTS, export};
use crate::digest::Digest;
use crate::eval::work::Work;
use crate::failure::{Exit, Outcome};
use crate::fold::{KeepFolder, Watch};
use crate::plan::plan;

/// Write the second moments of what goes into a model's linear layers on the recipe's text, for later builds.
#[derive(Debug, Args)]
pub struct CalibrateArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Folder to write; it must not exist.
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    #[command(flatten)]
    machine: Machine,
    /// Throw away unfinished work of another plan.
    #[arg(long)]
    discard: bool,
    #[command(flatten)]
    common: Common,
}

/// What decides the files.
#[derive(Serialize)]
struct Key<'a> {
    plan: Digest,
    text: Digest,
    source: Vec<(&'a str, u64, String)>,
}

impl CalibrateArgs {
    pub fn run(self) -> Outcome<Exit> {
        let interrupt = Interrupt::install()?;
        let (recipe, source) = fetch::recipe_and_source(&self.recipe, fetch::Need::Weights)?;
        let stop = interrupt.raise_a_flag();
        // Second moments do not depend on codecs.
        let plan = Arc::new(plan(recipe.without_budget(), source, self.machine.limits())?);
        let target: PathBuf = self.output.components().collect();
        if target.symlink_metadata().is_ok() {
            return Err(CliError::Exists { path: target }.into());
        }
        let key =
            Key { plan: plan.digest, text: plan.calibrated_text()?.sha256, source: plan.checkpoint.stats() };
        if let Some(parent) = target.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            std::fs::create_dir_all(parent)
                .map_err(|error| CliError::Write { path: parent.to_owned(), error })?;
        }
        let work = Work::take(&target, &key, self.discard)?;
        let out = work.path("out");
        let bar = Bar::default();
        let tell = |what: &str| bar.phase(what);
        let keep = KeepFolder(work.path("kept"));
        let made =
            std::fs::create_dir_all(&out).map_err(|error| CliError::Write { path: out.clone(), error });
        let result = made
            .map_err(Into::into)
            .and_then(|()| export(&plan, &out, Watch { stop: &stop, tell: &tell, keep: &keep }));
        bar.end();
        let text = match result {
            Ok(text) => text,
            // What was written is there for the same command.
            Err(error) if error.exit() == Exit::Interrupted => return Err(error),
            Err(error) => return Err(work.failed(error)),
        };
        std::fs::rename(&out, &target).map_err(|error| CliError::Write { path: target.clone(), error })?;
        work.remove()?;
        let contents = target.join(CONTENTS);
        if self.common.json {
            print::json(&json!({
                "path": target.display().to_string(), "contents": contents.display().to_string(), "text": text,
            }))?;
        } else {
            print::text(&format!(
                "second moments   {}\ntokens           {} in {} rows of up to {}\ntokens digest    {}\n",
                contents.display(),
                text.tokens,
                text.rows,
                text.context,
                text.tokens_sha256
            ))?;
        }
        Ok(Exit::Done)
    }
}
