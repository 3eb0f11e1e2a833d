//! The recipe's own assignment: first matching rule, else the role's default.

use super::{Allocator, Assignment, Candidate};
use crate::arch::{Output, Role};
use crate::codec::trellis::TILE_STEP;
use crate::codec::{AffineBits, CodecError, CodecSpec, GroupSize, Matrix};
use crate::failure::Problems;
use crate::quant::{CAST, ENCODERS, base};
use crate::recipe::{Choice, Limit, Origin, Pattern, Recipe, RecipeError, Rule, Scope};

/// Ordered rules over a default.
///
/// A rule with a quantizing codec speaks of the matrices it matches and passes over norms, biases and the
/// like; one with a float codec speaks of everything it matches. Without a rule, linears and embeddings
/// take the recipe's default; routers and `in_proj_a`/`in_proj_b` take affine 8-bit at the default's group
/// (64 if it has none) unless the default stores floats; a default of f32 goes for every parameter; else the vision tower takes bf16; norms and biases of a
/// [uniform](crate::arch::Model::uniform) model take its dtype; all else is kept.
pub struct Rules<'a> {
    /// Whose rules.
    pub recipe: &'a Recipe,
}

/// Why a module has the choice it has.
enum Because {
    Rule(usize),
    Default,
    Role(&'static str),
}

impl Rules<'_> {
    fn choose(&self, candidate: &Candidate<'_>) -> (Choice, Because) {
        let output = candidate.output;
        if let Some(index) = self.recipe.rules.iter().position(|rule| speaks_of(rule, candidate)) {
            return (self.recipe.rules[index].choice.clone(), Because::Rule(index));
        }
        let default = &self.recipe.default;
        let role = |codec| {
            let reason = output.role.default_reason().unwrap_or_default();
            (Choice { codec, encoder: None }, Because::Role(reason))
        };
        match output.role {
            // Whoever wants matrices unrounded wants no other weight rounded.
            role if default.codec == CodecSpec::F32 && role != Role::Unknown => {
                (default.clone(), Because::Default)
            }
            Role::Linear | Role::Embedding | Role::Head | Role::Experts => {
                (default.clone(), Because::Default)
            }
            Role::Router | Role::Decay if default.codec.quantizes() => role(eight_bits_like(default)),
            Role::Router | Role::Decay => (default.clone(), Because::Default),
            Role::Vision => role(CodecSpec::Bf16),
            Role::Norm | Role::Bias => match candidate.narrow {
                Some(codec) => {
                    (Choice { codec, encoder: None }, Because::Role("rounded to the model's dtype"))
                }
                None => role(CodecSpec::Keep),
            },
            _ => role(CodecSpec::Keep),
        }
    }

    fn origin(&self, because: &Because) -> Option<Origin> {
        match because {
            Because::Rule(index) => Some(self.recipe.rules[*index].codec_origin),
            Because::Default | Because::Role(_) => self.recipe.origins.default_codec,
        }
    }
}

/// Whether the rule names the module, in its part of the model, with a codec that it can have.
fn speaks_of(rule: &Rule, candidate: &Candidate<'_>) -> bool {
    let output = candidate.output;
    let scope = match output.role {
        Role::Vision => Scope::Vision,
        Role::Draft | Role::DraftLinear => Scope::DraftHead,
        _ => Scope::Trunk,
    };
    // `[keep]` says untouched, and what it keeps need not even be floats.
    let fits = output.role != Role::Unknown && (output.role.quantizable() || !rule.choice.codec.quantizes());
    rule.pattern.scope() == scope && fits && names(&rule.pattern, output, candidate.source_module)
}

/// Who fills the codec of a module, which `computes` as [`Candidate::computes`] says. An embedding's rows and a draft head
/// have no inputs that calibration sees.
pub fn encoder(recipe: &Recipe, choice: &Choice, computes: bool) -> &'static str {
    let named = recipe.encoder(choice);
    let encoder = ENCODERS.iter().find(|known| Some(**known) == named).copied().unwrap_or(CAST);
    if computes { encoder } else { base(encoder) }
}

/// Whether the pattern names the module, by its own path or by the source's.
fn names(pattern: &Pattern, output: &Output, source_module: &str) -> bool {
    pattern.matches(&output.rule_path()) || pattern.matches(source_module)
}

impl Rules<'_> {
    /// The least and most bits that the first limit that matches leaves the module.
    pub fn bounds(&self, output: &Output, source_module: &str) -> (u32, u32) {
        let first = self.recipe.limits.iter().find(|limit| names(&limit.pattern, output, source_module));
        first.map_or((0, u32::MAX), |limit| (limit.least.unwrap_or(0), limit.most.unwrap_or(u32::MAX)))
    }
}

fn eight_bits_like(default: &Choice) -> CodecSpec {
    let bits = AffineBits::try_from(8).expect("8 is a width");
    match default.codec {
        CodecSpec::Affine { group, .. } => CodecSpec::Affine { bits, group },
        _ => CodecSpec::Affine { bits, group: GroupSize::try_from(64).expect("64 is a size") },
    }
}

impl Allocator for Rules<'_> {
    fn id(&self) -> &'static str {
        "rules"
    }

    fn assign(&self, candidates: &[Candidate<'_>]) -> Result<Vec<Assignment>, Problems<RecipeError>> {
        let mut assignments = Vec::with_capacity(candidates.len());
        // Problems already reported: a wrong group concerns hundreds of modules alike.
        let mut undivided: Vec<(CodecError, Origin, String, usize)> = Vec::new();
        for candidate in candidates {
            let (choice, because) = self.choose(candidate);
            let codec = choice.codec;
            if let Err(problem) = codec.fits(Matrix::of(&candidate.output.shape))
                && let Some(origin) = self.origin(&because)
            {
                match undivided.iter_mut().find(|(p, o, ..)| (p, *o) == (&problem, origin)) {
                    Some((.., count)) => *count += 1,
                    None => undivided.push((problem, origin, candidate.output.rule_path(), 1)),
                }
            }
            let encoder = encoder(self.recipe, &choice, candidate.computes);
            let trunk =
                matches!(candidate.output.role, Role::Linear | Role::Embedding | Role::Head | Role::Experts);
            let open = trunk && matches!(because, Because::Default);
            let reason = match because {
                Because::Rule(index) => format!("rule `{}`", self.recipe.rules[index].pattern),
                Because::Default => "default".to_owned(),
                Because::Role(reason) => reason.to_owned(),
            };
            assignments.push(Assignment { codec, encoder, reason, open });
        }

        let idle = |rule: &&Rule| !candidates.iter().any(|candidate| speaks_of(rule, candidate));
        let unmatched = self.recipe.rules.iter().filter(idle).map(|rule| {
            let what = if rule.choice.codec.quantizes() { "module that can be quantized" } else { "module" };
            let help = match rule.pattern.scope() {
                Scope::Trunk => nearest(rule.pattern.as_str(), candidates).map_or_else(
                    || "`tqc plan` lists the module names".to_owned(),
                    |name| format!("the nearest module name is `{name}`; `tqc plan` lists them all, or remove the rule"),
                ),
                Scope::DraftHead => "this checkpoint has no such draft-head module; remove the rule".to_owned(),
                Scope::Vision => "the vision tower is stored in bf16, f16 or as it is, and never quantized".to_owned(),
            };
            let message = format!("rule `{}` matches no {what} of this model", rule.pattern);
            self.recipe.problem(&rule.origin, message, Some(help))
        });
        let dead = self.recipe.rules.iter().enumerate().filter_map(|(index, rule)| {
            // Only of one file: a base recipe's rules come last, and may all be overridden.
            let earlier = || self.recipe.rules[..index].iter().filter(|e| e.origin.file == rule.origin.file);
            let taker = |candidate: &Candidate<'_>| earlier().find(|first| speaks_of(first, candidate));
            let named = candidates.iter().filter(|candidate| speaks_of(rule, candidate));
            let takers: Vec<_> = named.map(taker).collect::<Option<_>>()?;
            let message = format!(
                "rule `{}` decides nothing: earlier rules, such as `{}`, take every module it matches",
                rule.pattern,
                takers.first()?.pattern
            );
            let help = "the first rule that matches wins: move this one before them, or remove it".to_owned();
            Some(self.recipe.problem(&rule.origin, message, Some(help)))
        });
        let undivided = undivided.iter().map(|(problem, origin, path, count)| {
            let (codec, axis, needed, found) = match problem {
                CodecError::GroupDoesNotDivide { codec, group, in_features } => {
                    (codec, "in_features", *group, *in_features)
                }
                CodecError::NoTile { codec, axis, width } => (codec, *axis, TILE_STEP as u32, *width),
            };
            let has = match count {
                1 => format!("has {found}"),
                _ => format!("has {found}, and so have {} more", count - 1),
            };
            let message = format!("{codec} needs {axis} to be a multiple of {needed}, but `{path}` {has}");
            let mut groups = GroupSize::ALL.into_iter().rev();
            let fits = groups.find(|g| found.is_multiple_of(u64::from(g.get())));
            let help = match (problem, fits) {
                (CodecError::NoTile { .. }, _) => {
                    "give it `along` the other side, an affine codec, or `codec = \"keep\"`, in a `[[rule]]`"
                        .to_owned()
                }
                (_, Some(fits)) => format!(
                    "give it an affine codec with group {}, or `codec = \"keep\"`, in a `[[rule]]`",
                    fits.get()
                ),
                (_, None) => "give it `codec = \"keep\"` in a `[[rule]]`".to_owned(),
            };
            self.recipe.problem(origin, message, Some(help))
        });
        let idle = |limit: &&Limit| {
            let bounds = |(candidate, assignment): (&Candidate<'_>, &Assignment)| {
                assignment.open && names(&limit.pattern, candidate.output, candidate.source_module)
            };
            !candidates.iter().zip(&assignments).any(bounds)
        };
        let unbound = self.recipe.limits.iter().filter(idle).map(|limit| {
            let message = format!("`{}` limits no module that the budget gives bits to", limit.pattern);
            let help = "rules with a codec and the vision tower, draft head, routers and norms are apart; mend the \
                        pattern or remove the rule";
            self.recipe.problem(&limit.origin, message, Some(help.to_owned()))
        });
        let problems: Vec<RecipeError> = unmatched.chain(dead).chain(undivided).chain(unbound).collect();
        Problems::none_or(problems, assignments)
    }
}

/// The module name that a misspelt pattern most resembles, compared without its wildcards.
fn nearest<'a>(pattern: &str, candidates: &'a [Candidate<'_>]) -> Option<&'a str> {
    let words = pattern.trim_matches('*').trim_matches('.');
    let last = |path: &'a str| {
        // Compare as many trailing dotted parts as the pattern names.
        let parts = words.split('.').count();
        let start = path.rmatch_indices('.').nth(parts.saturating_sub(1)).map_or(0, |(at, _)| at + 1);
        &path[start..]
    };
    let near = |path: &'a str| (strsim::normalized_levenshtein(words, last(path)) * 1000.0) as u64;
    let quantizable = candidates.iter().filter(|candidate| candidate.output.role.quantizable());
    let best = quantizable
        .map(|c| c.output.module.as_str())
        .max_by_key(|path| (near(path), std::cmp::Reverse(*path)))?;
    (near(best) >= 500).then_some(best)
}
