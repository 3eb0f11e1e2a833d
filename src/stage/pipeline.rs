//! Named, ordered lists of stages (`pipelines/*.toml`).

use serde::Deserialize;

use super::{Datum, ModuleWork, STAGES, Stage};
use crate::failure::{Exit, Failure};
use crate::quant::Grain;

/// The shipped pipelines: name and text.
const SHIPPED: &[(&str, &str)] = &[("rtn", include_str!("../../pipelines/rtn.toml"))];

/// A checked list of stages.
pub struct Pipeline {
    /// As a recipe names it.
    pub name: &'static str,
    stages: Vec<&'static dyn Stage>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    name: String,
    stages: Vec<String>,
}

/// Why a pipeline cannot run.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PipelineError {
    /// No such file under `pipelines/`.
    #[error("pipeline `{name}` is not one of {known}")]
    Unknown {
        /// What the recipe names.
        name: String,
        /// What there is.
        known: String,
    },
    /// The file does not parse or names itself otherwise.
    #[error("pipeline `{name}`: {problem}")]
    Text {
        /// Which.
        name: String,
        /// The parser's words.
        problem: String,
    },
    /// A name that no stage has.
    #[error("pipeline `{name}`: stage `{stage}` is not one of {known}")]
    UnknownStage {
        /// Which.
        name: String,
        /// The bad name.
        stage: String,
        /// What there is.
        known: String,
    },
    /// A stage's input is given by none before it.
    #[error("pipeline `{name}`: stage `{stage}` needs {needs:?}, which nothing before it gives")]
    Needs {
        /// Which.
        name: String,
        /// The stage.
        stage: &'static str,
        /// What it lacks.
        needs: Datum,
    },
    /// The artifact writer's input is given by none.
    #[error("pipeline `{name}`: no stage gives {:?}, which the artifact is written from", Datum::Planes)]
    NoPlanes {
        /// Which.
        name: String,
    },
}

impl Failure for PipelineError {
    fn exit(&self) -> Exit {
        Exit::Request
    }
}

/// The names that a recipe may give.
pub fn names() -> Vec<&'static str> {
    SHIPPED.iter().map(|(name, _)| *name).collect()
}

impl Pipeline {
    /// A shipped pipeline by name.
    ///
    /// # Errors
    /// [`PipelineError`].
    pub fn find(name: &str) -> Result<Self, PipelineError> {
        let (name, text) = SHIPPED
            .iter()
            .find(|(known, _)| *known == name)
            .ok_or_else(|| PipelineError::Unknown { name: name.to_owned(), known: names().join(", ") })?;
        Self::parse(name, text)
    }

    fn parse(name: &'static str, text: &str) -> Result<Self, PipelineError> {
        let bad = |problem: String| PipelineError::Text { name: name.to_owned(), problem };
        let text: Text = toml::from_str(text).map_err(|error| bad(error.to_string()))?;
        if text.name != name {
            return Err(bad(format!("the file calls itself `{}`", text.name)));
        }
        let mut stages = Vec::new();
        let mut held = vec![Datum::Stored];
        for id in &text.stages {
            let stage = STAGES.iter().copied().find(|stage| stage.id() == id).ok_or_else(|| {
                let known = STAGES.iter().map(|stage| stage.id()).collect::<Vec<_>>().join(", ");
                PipelineError::UnknownStage { name: name.to_owned(), stage: id.clone(), known }
            })?;
            if !held.contains(&stage.needs()) {
                return Err(PipelineError::Needs {
                    name: name.to_owned(),
                    stage: stage.id(),
                    needs: stage.needs(),
                });
            }
            held.push(stage.gives());
            stages.push(stage);
        }
        if !held.contains(&Datum::Planes) {
            return Err(PipelineError::NoPlanes { name: name.to_owned() });
        }
        Ok(Self { name, stages })
    }

    /// The stages, in order.
    pub fn stages(&self) -> &[&'static dyn Stage] {
        &self.stages
    }

    /// The largest grain of any stage for this module.
    pub fn grain(&self, work: &ModuleWork) -> Grain {
        self.stages.iter().map(|stage| stage.grain(work)).max().unwrap_or(Grain::Rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shipped_pipeline_is_sound() {
        for name in names() {
            assert!(Pipeline::find(name).is_ok_and(|pipeline| !pipeline.stages().is_empty()), "{name}");
        }
    }

    #[test]
    fn refuses_a_stage_before_its_input_and_a_pipeline_without_planes() {
        let parse =
            |stages: &str| Pipeline::parse("x", &format!("name = \"x\"\nstages = {stages}")).map(|_| ());
        assert!(matches!(parse(r#"["quantize"]"#), Err(PipelineError::Needs { stage: "quantize", .. })));
        assert!(matches!(parse(r#"["ingest"]"#), Err(PipelineError::NoPlanes { .. })));
        assert!(matches!(parse(r#"["ingest", "polish"]"#), Err(PipelineError::UnknownStage { .. })));
        assert!(matches!(parse("3"), Err(PipelineError::Text { .. })));
    }
}
