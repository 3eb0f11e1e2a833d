//! From a recipe's or the command line's word to a folder of weights.

use super::RecipeArgs;
use crate::failure::Outcome;
use crate::plan::{HubId, PlanError, SourceFolder};
use crate::recipe::{Recipe, Source};
use crate::stage::pipeline;

/// Reads the recipe and finds (or fetches) its source.
pub fn recipe_and_source(args: &RecipeArgs) -> Outcome<(Recipe, SourceFolder)> {
    let recipe = Recipe::load(&args.recipe, &pipeline::names())?;
    if let Some(dir) = &args.source {
        return Ok((recipe, SourceFolder { dir: dir.clone(), hub: None }));
    }
    if let Some(dir) = recipe.source_path() {
        return Ok((recipe, SourceFolder { dir, hub: None }));
    }
    match recipe.source.clone() {
        Some(Source::Hub { repo, revision }) => {
            let dir = hub(&repo, &revision)?;
            Ok((recipe, SourceFolder { dir, hub: Some(HubId { repo, revision }) }))
        }
        _ => Err(PlanError::NoSource { recipe: recipe.name }.into()),
    }
}

fn hub(repo: &str, revision: &str) -> Outcome<std::path::PathBuf> {
    todo!("{repo} {revision}")
}
