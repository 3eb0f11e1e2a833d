//! From a recipe's or the command line's word to a folder of weights.

use std::path::PathBuf;

use super::RecipeArgs;
use super::progress::bytes_bar;
use crate::failure::Outcome;
use crate::hub::{HubConfig, Step, Transfer, outline, snapshot};
use crate::plan::{HubId, PlanError, SourceFolder};
use crate::recipe::{Recipe, Source};
use crate::stage::pipeline;

/// What of a source a command reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Headers and small files.
    Headers,
    /// Everything.
    Weights,
}

/// Reads the recipe and finds (or fetches) its source.
pub fn recipe_and_source(args: &RecipeArgs, need: Need) -> Outcome<(Recipe, SourceFolder)> {
    let recipe = Recipe::load(&args.recipe, &pipeline::names())?;
    if let Some(dir) = &args.source {
        return Ok((recipe, SourceFolder { dir: dir.clone(), hub: None }));
    }
    if let Some(dir) = recipe.source_path() {
        return Ok((recipe, SourceFolder { dir, hub: None }));
    }
    match recipe.source.clone() {
        Some(Source::Hub { repo, revision }) => {
            let dir = hub(&repo, &revision, need)?;
            Ok((recipe, SourceFolder { dir, hub: Some(HubId { repo, revision }) }))
        }
        _ => Err(PlanError::NoSource { recipe: recipe.name }.into()),
    }
}

/// The revision's folder in the cache, fetched if it is not there.
pub fn hub(repo: &str, revision: &str, need: Need) -> Outcome<PathBuf> {
    let mut bar = None;
    let mut draw = |transfer: Transfer<'_>| {
        let bar = bar.get_or_insert_with(|| bytes_bar(transfer.total.0));
        if let Some(bar) = bar {
            bar.set_length(transfer.total.0);
            bar.set_position(transfer.done.0);
            bar.set_message(match transfer.step {
                Step::Download => "downloading",
                Step::Check => "checking",
            });
            bar.set_prefix(transfer.file.to_owned());
        }
    };
    let config = HubConfig::from_env()?;
    let snapshot = match need {
        Need::Headers => outline(&config, repo, revision, &mut draw),
        Need::Weights => snapshot(&config, repo, revision, &mut draw),
    };
    if let Some(bar) = bar.flatten() {
        bar.finish_and_clear();
    }
    Ok(snapshot?.dir)
}
