//! What stops a measurement of modules.

use crate::codec::{CodecError, CodecSpec};
use crate::failure::{Exit, Failure};
use crate::units::Bytes;

/// Why modules could not be measured, beyond the errors of the plan, the text and the runtime.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SensitivityError {
    #[error("`{text}` is not a codec that quantizes")]
    NoSuchCandidate { text: String },
    #[error("`{codec}` is a candidate twice")]
    CandidateTwice { codec: CodecSpec },
    #[error("`{pattern}` matches none of the {modules} modules that the recipe quantizes")]
    NoSuchModule { pattern: String, modules: usize, first: String },
    #[error("recipe `{recipe}` quantizes no module of this model")]
    NothingQuantized { recipe: String },
    #[error("`rotation = \"measure\"` leaves the basis open, but a module is measured in one basis")]
    Undecided,
    #[error("{problem} in `{module}`{}", and_more(*.more))]
    DoesNotFit { problem: CodecError, module: String, more: usize },
    #[error("a budget of {budget} is too small: one probe of {positions} tokens needs {needed}")]
    Budget { budget: Bytes, needed: Bytes, positions: usize },
    #[error("with `{module}` in {codec}, the logits after token {position} hold NaN or infinity")]
    NonFinite { module: String, codec: CodecSpec, position: usize },
    #[error("in the new basis, the unrounded logits after token {position} hold NaN or infinity")]
    BaseNonFinite { position: usize },
    #[error("`{path}` cannot be read: {error}")]
    Config { path: std::path::PathBuf, error: std::io::Error },
}

fn and_more(more: usize) -> String {
    match more {
        0 => String::new(),
        more => format!(", and {more} more modules have such rows"),
    }
}

impl Failure for SensitivityError {
    fn exit(&self) -> Exit {
        match self {
            SensitivityError::NonFinite { .. } | SensitivityError::BaseNonFinite { .. } => Exit::Input,
            SensitivityError::Config { .. } => Exit::Machine,
            _ => Exit::Request,
        }
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            SensitivityError::NoSuchCandidate { .. } => {
                "write `affine-4g64` (bits, then the group), `mxfp4`, `mxfp8` or `nvfp4`".to_owned()
            }
            SensitivityError::CandidateTwice { .. } => "name each codec once".to_owned(),
            SensitivityError::NoSuchModule { first, .. } => {
                format!("the first of them is `{first}`; `tqc plan` lists the module names")
            }
            SensitivityError::NothingQuantized { .. } => {
                "give it a `default.codec` of codes, such as `{ affine = { bits = 4, group = 64 } }`".to_owned()
            }
            SensitivityError::Undecided => {
                "name a kind of rotation, such as the one that a build with this recipe chose".to_owned()
            }
            SensitivityError::DoesNotFit { .. } => {
                "name codecs of another group with `--candidates`, leave the module out with `--only`, or give it \
                 `codec = \"keep\"` in a `[[rule]]`"
                    .to_owned()
            }
            SensitivityError::Budget { needed, .. } => {
                format!("give `--memory` at least {needed}, or fewer `--tokens`")
            }
            SensitivityError::NonFinite { .. } => {
                "leave the module out with `--only`, or name other `--candidates`".to_owned()
            }
            SensitivityError::BaseNonFinite { .. } => {
                "measure in the model's own basis: leave `[transform]` out".to_owned()
            }
            SensitivityError::Config { .. } => return None,
        })
    }
}
