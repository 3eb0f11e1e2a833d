//! Which codec each module gets.
//!
//! An allocator sees names, roles and shapes, never weights, and gives every module a codec and an
//! encoder, with the reason in words. [`Rules`] is the recipe's own word: ordered rules, first match wins. What the rules
//! leave open, [`budget`] decides from a table of costs ([`cost`], [`import`]) and a number of bytes, the same for all
//! modules that [`tie`] together.

pub mod budget;
pub mod cost;
pub mod import;
mod rules;
mod ties;

pub use rules::{Rules, encoder};
pub use ties::tie;

use crate::arch::Output;
use crate::codec::CodecSpec;
use crate::failure::Problems;
use crate::recipe::RecipeError;

/// A module that needs a codec.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// What it is.
    pub output: &'a Output,
    /// The source tensor's name without `.weight`: rules may use it too.
    pub source_module: &'a str,
    /// Columns of the matrix.
    pub in_features: u64,
    /// The float type that a norm or bias must be rounded to, if the stored one would widen the computation.
    pub narrow: Option<CodecSpec>,
    /// Whether the trunk computes with it on inputs that a text gives: errors can be weighed by these.
    pub computes: bool,
}

/// A module's codec, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// What is stored.
    pub codec: CodecSpec,
    /// Who searches, by name in the quantizer registry.
    pub encoder: &'static str,
    /// For the plan and the report.
    pub reason: String,
    /// Whether it is only the default of a matrix, which a budget may replace.
    pub open: bool,
}

/// A way to hand out codecs.
pub trait Allocator {
    /// As provenance names it.
    fn id(&self) -> &'static str;

    /// One assignment per candidate, in order.
    ///
    /// # Errors
    /// Every mistake of the recipe that shows only now, at its line.
    fn assign(&self, candidates: &[Candidate<'_>]) -> Result<Vec<Assignment>, Problems<RecipeError>>;
}
