//! What can be wrong with a recipe.

use std::io;
use std::path::{Path, PathBuf};

use super::keys::{Section, elsewhere};
use super::pattern::BadPattern;
use super::text::{Located, listed, nearest};
use super::{BudgetMethod, RotationKind};
use crate::codec::{BadCodec, CodecSpec};
use crate::failure::{Exit, Failure};
use crate::quant::ENCODERS;
use crate::tensor::Layout;
use crate::units::{BadSize, Bytes};

/// Why a recipe cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The file cannot be had.
    #[error(transparent)]
    File(#[from] FileProblem),
    /// Something in its text is wrong.
    #[error(transparent)]
    Text(#[from] Box<Located<Mistake>>),
}

impl RecipeError {
    /// File, line and column (both from 1) of the mistake; `None` if the file could not be read.
    pub fn place(&self) -> Option<(&Path, usize, usize)> {
        match self {
            RecipeError::File(_) => None,
            RecipeError::Text(located) => Some((located.path(), located.line(), located.column())),
        }
    }
}

impl Failure for RecipeError {
    fn exit(&self) -> Exit {
        Exit::Request
    }

    fn help(&self) -> Option<String> {
        match self {
            RecipeError::File(problem) => problem.help(),
            RecipeError::Text(located) => located.mistake().help(),
        }
    }
}

/// Why the text of a recipe file cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum FileProblem {
    /// No such file.
    #[error("recipe `{path}` does not exist", path = path.display())]
    Absent {
        /// The path asked for.
        path: PathBuf,
        /// A recipe of that folder with a similar name.
        near: Option<PathBuf>,
    },
    /// The operating system refused.
    #[error("recipe `{path}` cannot be read: {error}", path = path.display())]
    Unreadable {
        /// The path asked for.
        path: PathBuf,
        /// Its words.
        error: io::Error,
    },
    /// Larger than any recipe.
    #[error("`{path}` is larger than {limit}, so it is not a recipe", path = path.display())]
    TooLarge {
        /// The path asked for.
        path: PathBuf,
        /// The most a recipe may have.
        limit: Bytes,
    },
}

impl FileProblem {
    fn help(&self) -> Option<String> {
        match self {
            FileProblem::Absent { near: Some(near), .. } => {
                Some(format!("did you mean `{}`?", near.display()))
            }
            _ => None,
        }
    }
}

/// What is wrong at a place in a recipe's text.
#[derive(Debug, thiserror::Error)]
pub enum Mistake {
    /// The file is not text.
    #[error("a recipe is UTF-8 text, but byte {offset} is not")]
    NotUtf8 {
        /// The first byte that is not.
        offset: usize,
    },
    /// The file is not TOML.
    #[error("this is not TOML: {message}")]
    Syntax {
        /// The TOML parser's words.
        message: String,
    },
    /// A key is given twice in one table.
    #[error("`{key}` is given twice")]
    DuplicateKey {
        /// As written.
        key: String,
    },
    /// A key that no recipe has.
    #[error("{}", match section {
        Section::Top => format!("a recipe has no top-level key `{key}`"),
        _ => format!("{} has no key `{key}`", section.title()),
    })]
    UnknownKey {
        /// As written.
        key: String,
        /// The table it stands in.
        section: Section,
    },
    /// A required key is absent.
    #[error("{} needs `{key}`", section.title())]
    MissingKey {
        /// The key.
        key: &'static str,
        /// The table that needs it.
        section: Section,
    },
    /// A value of another type than the key has.
    #[error("`{key}` must be {needed}, got {found}")]
    WrongType {
        /// The key.
        key: &'static str,
        /// The type it has.
        needed: &'static str,
        /// The type found.
        found: &'static str,
    },
    /// An element of another type than the key's array holds.
    #[error("`{key}` must hold {needed}s, got {found}")]
    WrongElement {
        /// The key.
        key: &'static str,
        /// The type its elements have.
        needed: &'static str,
        /// The type found.
        found: &'static str,
    },
    /// An empty string where something must be said.
    #[error("`{key}` must not be empty")]
    Empty {
        /// The key.
        key: &'static str,
    },
    /// The name cannot be a folder's.
    #[error(
        "`name` must begin with a letter or digit and have at most 100 letters, digits, `-`, `_` and `.`, got `{found}`"
    )]
    BadName {
        /// As written.
        found: String,
    },
    /// The seed is not one.
    #[error("`seed` must be from 0 to {}, got {found}", i64::MAX)]
    SeedRange {
        /// As written.
        found: String,
    },
    /// No such pipeline.
    #[error("no pipeline is called `{found}`")]
    UnknownPipeline {
        /// As written.
        found: String,
        /// The pipelines there are.
        known: Vec<String>,
    },
    /// No such codec.
    #[error("no codec is called `{found}`")]
    UnknownCodec {
        /// As written.
        found: String,
    },
    /// A codec without its parameters.
    #[error("codec `{codec}` needs parameters")]
    CodecNeedsParameters {
        /// The codec.
        codec: &'static str,
    },
    /// Parameters for a codec that has none.
    #[error("codec `{codec}` has no parameters")]
    CodecTakesNoParameters {
        /// The codec.
        codec: &'static str,
    },
    /// A codec table that names none or several.
    #[error("`codec` must name one codec, got {found}")]
    CodecCount {
        /// How many.
        found: usize,
    },
    /// A parameter's own check failed.
    #[error("{message}")]
    Parameter {
        /// The words of [`crate::codec::AffineBits`], [`crate::codec::GroupSize`] or [`crate::codec::trellis::TrellisError`].
        message: String,
    },
    /// No such encoder.
    #[error("no encoder is called `{found}`")]
    UnknownEncoder {
        /// As written.
        found: String,
    },
    /// An encoder for a codec that it cannot fill.
    #[error("{}", match codec.quantizes() {
        true => format!("encoder `{encoder}` cannot fill codec `{codec}`"),
        false => format!("codec `{codec}` stores floats and takes no encoder, got `{encoder}`"),
    })]
    EncoderRefuses {
        /// The encoder.
        encoder: String,
        /// The codec it would have to fill.
        codec: CodecSpec,
    },
    /// A glob that is not one.
    #[error(transparent)]
    Pattern(#[from] BadPattern),
    /// A rule or `keep` entry says again what an earlier line says.
    #[error("`{pattern}` is already on line {earlier}")]
    Repeated {
        /// The pattern.
        pattern: String,
        /// The line that has it first.
        earlier: usize,
    },
    /// Two rules give the same modules different codecs.
    #[error("`{pattern}` takes {first} on line {earlier} and {second} here")]
    Contradiction {
        /// The pattern.
        pattern: String,
        /// The line that has it first.
        earlier: usize,
        /// What that rule gives.
        first: String,
        /// What this rule gives.
        second: String,
    },
    /// A rule after one that takes everything.
    #[error("`{pattern}` can match nothing: the rule on line {earlier} takes every module")]
    Unreachable {
        /// The pattern.
        pattern: String,
        /// The line of the rule that takes everything.
        earlier: usize,
    },
    /// Both kinds of source.
    #[error("`[source]` has both `path` and `hub`")]
    TwoSources,
    /// Neither kind of source.
    #[error("`[source]` needs `path` or `hub`")]
    NoSource,
    /// A revision of a folder.
    #[error("`revision` belongs to `hub`, and this source has none")]
    RevisionWithoutHub,
    /// No such rotation.
    #[error("no rotation is called `{found}`")]
    UnknownRotation {
        /// As written.
        found: String,
    },
    /// A setting of another kind of rotation.
    #[error("`{key}` is a setting of `{of}`, not of `{kind}`")]
    RotationTakesNo {
        /// The setting.
        key: &'static str,
        /// The kind it stands beside.
        kind: &'static str,
        /// The kind that has it.
        of: &'static str,
    },
    /// A rotation of a stream whose norms have gains.
    #[error("a rotation needs `gamma-fold`: norms commute with it only without their gains")]
    RotationNeedsGains,
    /// Two changes of the same channels.
    #[error("`{key}` and a rotation of value heads (`r2 = true`) undo each other")]
    ValuesTwice {
        /// The first one's key.
        key: &'static str,
    },
    /// A number out of its range.
    #[error("`{key}` must be from {least} to {most}, got {found}")]
    NumberRange {
        /// The key.
        key: &'static str,
        /// The least allowed.
        least: u32,
        /// The most allowed.
        most: u32,
        /// As written.
        found: String,
    },
    /// A word that the key does not know.
    #[error("`{key}` cannot be `{found}`")]
    UnknownWord {
        /// The key.
        key: &'static str,
        /// As written.
        found: String,
        /// The words there are.
        known: Vec<&'static str>,
    },
    /// A share out of its range.
    #[error("`{key}` must be above 0 and at most 10, got {found}")]
    ShareRange {
        /// The key.
        key: &'static str,
        /// As written.
        found: String,
    },
    /// Not a digest.
    #[error("`{key}` must be 64 hexadecimal digits, got `{found}`")]
    BadDigest {
        /// The key.
        key: &'static str,
        /// As written.
        found: String,
    },
    /// A key that says nothing without another.
    #[error("`{key}` belongs to `{other}`, which is not given")]
    NeedsKey {
        /// The key.
        key: &'static str,
        /// What it needs.
        other: &'static str,
    },
    /// Second moments of a file are of whatever activations they are of.
    #[error(
        "`activations = \"sequential\"` takes a text through the layers, but `hessians` names a file instead"
    )]
    SequentialFile,
    /// Both kinds of budget.
    #[error("`[budget]` has both `{first}` and `{other}`")]
    TwoBudgets {
        /// A key that states a size.
        first: &'static str,
        /// Another.
        other: &'static str,
    },
    /// Neither kind of budget.
    #[error("`[budget]` needs `bits-per-weight`, `code-bits` or `bytes`")]
    NoBudget,
    /// A number of bits that no model has.
    #[error("`{key}` must be from 1 to 64")]
    BitsRange {
        /// The key.
        key: &'static str,
    },
    /// No such method.
    #[error("no method is called `{found}`")]
    UnknownMethod {
        /// As written.
        found: String,
    },
    /// No such answer to a control.
    #[error("`control` must be `stop`, `report` or `off`, got `{found}`")]
    UnknownControl {
        /// As written.
        found: String,
    },
    /// A candidate that is no codec.
    #[error(transparent)]
    Codec(#[from] BadCodec),
    /// A codec that has no width of its own.
    #[error("`{codec}` has no width of its own and cannot be a candidate")]
    NoCandidate {
        /// The codec.
        codec: CodecSpec,
    },
    /// A candidate given twice.
    #[error("`{codec}` is already a candidate")]
    CandidateTwice {
        /// The codec.
        codec: CodecSpec,
    },
    /// A rule that both gives a codec and limits the budget.
    #[error("a rule with `least-bits` or `most-bits` leaves the codec to the budget and takes no `{key}`")]
    LimitTakesNo {
        /// The key beside the limit.
        key: &'static str,
    },
    /// A floor above its ceiling.
    #[error("`most-bits` = {most} is less than `least-bits` = {least}")]
    LimitsCross {
        /// The floor.
        least: u32,
        /// The ceiling.
        most: u32,
    },
    /// A limit of what nobody gives out.
    #[error("`{pattern}` limits the bits of a budget, and this recipe has no `[budget]`")]
    LimitWithoutBudget {
        /// The rule's pattern.
        pattern: String,
    },
    /// No such layout.
    #[error("no layout is called `{found}`")]
    UnknownLayout {
        /// As written.
        found: String,
    },
    /// Not a repository name.
    #[error("`hub` must be `org/name`, got `{found}`")]
    BadHub {
        /// As written.
        found: String,
    },
    /// A branch or tag, which may move.
    #[error("`revision` must be pinned to a commit (40 hexadecimal digits), got `{found}`")]
    Unpinned {
        /// As written.
        found: String,
    },
    /// A size that does not parse.
    #[error(transparent)]
    Size(#[from] BadSize),
    /// A shard too small to be of use.
    #[error("`shard-size` must be at least {} bytes, got {}", least.0, found.0)]
    ShardTooSmall {
        /// As written.
        found: Bytes,
        /// The least allowed.
        least: Bytes,
    },
    /// The base recipe's file cannot be had.
    #[error(transparent)]
    Base(FileProblem),
    /// A recipe that extends itself.
    #[error("recipe `{path}` extends itself", path = path.display())]
    Cycle {
        /// The file met for the second time.
        path: PathBuf,
    },
    /// Too many bases of bases.
    #[error("recipes may extend each other {limit} deep at most")]
    TooDeep {
        /// The most allowed.
        limit: usize,
    },
    /// `extends` does not fit the files that were given.
    #[error("`extends` names a recipe whose text was not given")]
    BaseNotGiven,
    /// A base was given for a recipe that names none.
    #[error("this recipe has a base but no `extends`")]
    BaseNotAsked,
    /// More mistakes than are worth a line each.
    #[error("and {count} more mistakes, the first of them here")]
    More {
        /// How many are not shown, this one included.
        count: usize,
    },
    /// Something found when the recipe met a checkpoint.
    #[error("{message}")]
    Plan {
        /// The planner's words.
        message: String,
        /// The planner's remedy.
        help: Option<String>,
    },
}

/// Every codec's name, as recipes spell it, in the order documents list them.
pub const CODECS: &[&str] = &["affine", "trellis", "mxfp4", "mxfp8", "nvfp4", "keep", "bf16", "f16", "f32"];

const AFFINE_EXAMPLE: &str = "write `codec = { affine = { bits = 4, group = 64 } }`";

const TRELLIS_EXAMPLE: &str = "write `codec = { trellis = { bits = 3 } }`";

impl Mistake {
    /// Whether a base is missing because of it, so that what the recipe lacks may be there.
    pub(super) fn hides_base(&self) -> bool {
        matches!(
            self,
            Mistake::Base(_) | Mistake::Cycle { .. } | Mistake::TooDeep { .. } | Mistake::BaseNotGiven
        )
    }

    /// What to do about it.
    pub fn help(&self) -> Option<String> {
        let help = match self {
            Mistake::UnknownKey { key, section } => {
                if let Some(near) = nearest(key, section.keys().map(|key| key.name)) {
                    format!("did you mean `{near}`?")
                } else if let Some(place) = elsewhere(key, *section) {
                    format!("`{key}` belongs {place}")
                } else {
                    format!("its keys are {}", listed(section.keys().map(|key| key.name)))
                }
            }
            Mistake::MissingKey { key: "codec", section: Section::Default } => {
                "for example `codec = { affine = { bits = 4, group = 64 } }` under `[default]`".into()
            }
            Mistake::MissingKey { key: "revision", .. } | Mistake::Unpinned { .. } => {
                "a branch or tag moves; the commit is on the repository's page under `History`".into()
            }
            Mistake::WrongType { key: "rule", .. } => "begin each rule with `[[rule]]`".into(),
            Mistake::WrongType { key: "source", .. } => "write `source = { path = \"…\" }`".into(),
            Mistake::WrongType { key: "shard-size", .. } => {
                "write a size in quotes, such as `\"5GB\"`".into()
            }
            Mistake::UnknownPipeline { found, known } => suggest(found, known.iter().map(String::as_str)),
            Mistake::UnknownCodec { found } if found == "bits" || found == "group" => AFFINE_EXAMPLE.into(),
            Mistake::UnknownCodec { found } => suggest(found, CODECS.iter().copied()),
            Mistake::CodecNeedsParameters { codec: "trellis" } => TRELLIS_EXAMPLE.into(),
            Mistake::CodecNeedsParameters { .. } => AFFINE_EXAMPLE.into(),
            Mistake::CodecTakesNoParameters { codec } => format!("write `codec = \"{codec}\"`"),
            Mistake::UnknownRotation { found } => {
                suggest(found, RotationKind::NAMES.iter().map(|(name, _)| *name))
            }
            Mistake::UnknownWord { found, known, .. } => suggest(found, known.iter().copied()),
            Mistake::UnknownLayout { found } => suggest(found, Layout::NAMES.iter().map(|(name, _)| *name)),
            Mistake::RotationTakesNo { .. } | Mistake::RotationNeedsGains => "leave it out".into(),
            Mistake::ValuesTwice { .. } => "leave one of the two out".into(),
            Mistake::WrongType { key: "bytes", .. } => "write a size in quotes, such as `\"5GB\"`".into(),
            Mistake::SequentialFile => "leave one of the two out".into(),
            Mistake::TwoBudgets { .. } => "keep one of the two".into(),
            Mistake::NoBudget => "for example `bits-per-weight = 4.5` under `[budget]`".into(),
            Mistake::UnknownMethod { found } => {
                suggest(found, BudgetMethod::NAMES.iter().map(|(name, _)| *name))
            }
            Mistake::MissingKey { key: "sensitivity", .. } => {
                "name a file that `tqc sensitivity` or another tool measured".into()
            }
            Mistake::NoCandidate { .. } => {
                "give modules that should stay as they are `codec = \"keep\"` in a `[[rule]]`".into()
            }
            Mistake::LimitTakesNo { .. } | Mistake::CandidateTwice { .. } => "leave it out".into(),
            Mistake::LimitWithoutBudget { .. } => "add a `[budget]`, or give the modules a `codec`".into(),
            Mistake::UnknownEncoder { found } => suggest(found, ENCODERS.iter().copied()),
            Mistake::EncoderRefuses { codec, .. } if codec.quantizes() => {
                "leave `encoder` out: `trellis` and `ldlq` fill `trellis`, the others `affine`".into()
            }
            Mistake::EncoderRefuses { .. } => "leave `encoder` out".into(),
            Mistake::Contradiction { .. } => "the first rule that matches wins: remove one of the two".into(),
            Mistake::Unreachable { .. } => {
                "move it before that rule, or put that rule's codec in `[default]`".into()
            }
            Mistake::TwoSources => "keep one of the two".into(),
            Mistake::NoSource => "leave `[source]` out to take the checkpoint from `--source`".into(),
            Mistake::Base(problem) => return problem.help(),
            Mistake::Plan { help, .. } => return help.clone(),
            _ => return None,
        };
        Some(help)
    }
}

fn suggest<'k>(found: &str, known: impl Iterator<Item = &'k str> + Clone) -> String {
    match nearest(found, known.clone()) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("known names: {}", listed(known)),
    }
}
