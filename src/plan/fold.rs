//! What the recipe's changes of basis do to each parameter, from headers alone.
//!
//! The rules are in `docs/transforms.md`. Here they are only named: which factors, which rotation, along which axis.
//! [`crate::fold`] reads the gains and makes the rotations when the build begins.

use serde::Serialize;

use super::{Note, NoteKind};
use crate::arch::{DecoderConfig, Model, Output, Part, Role, Stand};
use crate::failure::Problems;
use crate::quant::Grain;
use crate::recipe::{Recipe, RecipeError, RotationKind};
use crate::tensor::Layout;
use crate::transform::Axis;
use crate::transform::hadamard::{Size, largest_block};

/// A rotation that is decided but not made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RotationPlan {
    /// How it is made: never `auto`, `measure` or `none`.
    pub kind: &'static str,
    /// L, its width.
    pub len: usize,
    /// Width of a Hadamard matrix on its diagonal; L for one matrix, and for kinds without.
    pub block: usize,
    /// What that matrix is a product of; none for `random-orthogonal`.
    pub size: Option<Size>,
}

/// One step of a fold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Step {
    /// Along which axis; that of a vector is the output.
    pub axis: Axis,
    /// What happens.
    #[serde(flatten)]
    pub what: What,
}

/// What a step does, by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub enum What {
    /// Times the gain of a norm.
    Gain {
        /// Path of the norm.
        norm: String,
    },
    /// Times the gain of a norm of the draft head, over D.
    DraftGain {
        /// Path of the norm.
        norm: String,
    },
    /// Times D, the draft head's final gain over the trunk's.
    DraftScale,
    /// Times the gains of the draft head's two inputs, the second also times the trunk's final gain over c.
    DraftJoin {
        /// Path of the norm over embeddings.
        embedding: String,
        /// Path of the norm over hidden states.
        hidden: String,
    },
    /// The rotation of the residual stream.
    R1,
    /// The rotation of an attention's value heads.
    R2 {
        /// Path of the attention.
        of: String,
    },
    /// Times factors that make channels even, or the inverse.
    Balance {
        /// Which channels.
        channels: Channels,
        /// Path of the attention or MLP.
        of: String,
    },
    /// Channels of values in another order.
    Order {
        /// Path of the attention.
        of: String,
    },
    /// A gain that was taken over.
    Neutral,
}

/// Channels inside a layer that can be scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Channels {
    /// Of query and key heads.
    Keys,
    /// Of value heads.
    Values,
    /// Of an MLP.
    Inner,
}

impl Step {
    /// As provenance spells it.
    pub fn name(&self) -> String {
        let axis = match self.axis {
            Axis::Input => "input",
            Axis::Output => "output",
        };
        let what = match &self.what {
            What::Gain { .. } => "gain",
            What::DraftGain { .. } => "draft-gain",
            What::DraftScale => "draft-scale",
            What::DraftJoin { .. } => "draft-join",
            What::R1 => "r1",
            What::R2 { .. } => "r2",
            What::Balance { channels: Channels::Keys, .. } => "key-balance",
            What::Balance { channels: Channels::Values, .. } => "value-balance",
            What::Balance { channels: Channels::Inner, .. } => "up-balance",
            What::Order { .. } => "value-order",
            What::Neutral => return "neutral".to_owned(),
        };
        format!("{what}:{axis}")
    }
}

/// All changes of basis of a build.
#[derive(Debug, Clone)]
pub struct FoldPlan {
    /// Gains go into their readers.
    pub gains: bool,
    /// R1.
    pub residual: Option<RotationPlan>,
    /// R2 of every attention.
    pub values: Option<RotationPlan>,
    /// Why there is no R2 beside R1.
    pub no_values: Option<&'static str>,
    /// Whether the output head was given a matrix of its own.
    pub untied: bool,
    /// What a gain of 1 is stored as.
    pub neutral: f32,
    /// What the model computes.
    pub decoder: DecoderConfig,
    key_balance: bool,
    value_balance: bool,
    value_order: bool,
    up_balance: bool,
}

/// Why value heads of these models are not rotated.
const GATED: &str = "attention is gated channel by channel before `o_proj`, which a rotation would mix";

impl FoldPlan {
    /// Decides the changes; unties the model if they need it. `None` if the recipe asks for none.
    ///
    /// # Errors
    /// The recipe's mistakes: a width without a Hadamard matrix, a block that does not divide, a rotation of value
    /// heads where it is not exact, a kept tensor that nothing is known of.
    pub(super) fn new(
        recipe: &Recipe,
        model: &mut Model,
        decoder: DecoderConfig,
    ) -> Result<Option<Self>, Problems<RecipeError>> {
        let wanted = &recipe.transform;
        if !wanted.any() {
            return Ok(None);
        }
        let mut problems = Vec::new();
        let mut refuse = |message: String, help: String| match wanted.rotation.origin {
            Some(origin) => problems.push(recipe.problem(&origin, message, Some(help))),
            None => unreachable!("a rotation is stated somewhere"),
        };
        let Rotations { residual, values, no_values } = decide(recipe, &decoder, &mut refuse);
        let gains = wanted.gamma_fold;
        let untied = gains && model.tied;
        if untied {
            model.untie();
        }
        let neutral = if model.zero_centred && model.target == Layout::HuggingFace { 0.0 } else { 1.0 };
        let plan = Self {
            gains,
            residual,
            values,
            no_values,
            untied,
            neutral,
            decoder,
            key_balance: wanted.key_balance,
            value_balance: wanted.value_balance,
            value_order: wanted.value_order,
            up_balance: wanted.up_balance,
        };
        Problems::none_or(problems, Some(plan))
    }

    /// Refuses a tensor that only the recipe's `[keep]` knows, if one of its axes may be the stream.
    pub(super) fn check_kept(
        &self,
        recipe: &Recipe,
        hidden: u64,
        outputs: &[(String, Output)],
    ) -> Vec<RecipeError> {
        let suspect = outputs
            .iter()
            .filter(|(_, output)| output.role == Role::Unknown && output.shape.0.contains(&hidden));
        let problems = suspect.filter_map(|(name, _)| {
            let keep = recipe.keep.iter().find(|keep| keep.pattern.matches(name))?;
            let message = format!(
                "`{name}` has an axis of {hidden}, the residual stream's width, and nothing is known of it: a fold \
                 could leave it in the old basis"
            );
            let help = "leave the tensor out of the checkpoint, or leave `[transform]` out".to_owned();
            Some(recipe.problem(&keep.origin, message, Some(help)))
        });
        if self.gains { problems.collect() } else { Vec::new() }
    }

    /// The changes of channels, by the recipe's keys.
    pub fn channels(&self) -> Vec<&'static str> {
        let all = [
            ("key-balance", self.key_balance),
            ("value-balance", self.value_balance),
            ("value-order", self.value_order),
            ("up-balance", self.up_balance),
        ];
        all.iter().filter(|(_, on)| *on).map(|(key, _)| *key).collect()
    }

    /// What a person should know of the decisions.
    pub(super) fn notes(&self, recipe: &Recipe, model: &Model) -> Vec<Note> {
        let mut notes = Vec::new();
        let mut note = |kind, subject: &str, detail: String| {
            notes.push(Note { kind, subject: subject.to_owned(), detail });
        };
        let asked = recipe.transform.rotation.kind;
        if asked == RotationKind::Measure {
            let detail =
                "is measured by the build; until then everything is planned as for `hadamard`".to_owned();
            note(NoteKind::Undecided, "transform.rotation", detail);
        }
        if let Some(plan) = &self.residual
            && asked != RotationKind::BlockHadamard
            && plan.block < plan.len
        {
            let detail = format!(
                "is made of blocks of {}: no Hadamard matrix of order {} is known",
                plan.block, plan.len
            );
            note(NoteKind::Fallback, "transform.rotation", detail);
        }
        if self.untied {
            let detail = "is stored as a matrix of its own: it takes over the final norm's gain".to_owned();
            note(NoteKind::Untied, &model.head, detail);
        }
        notes
    }

    /// The steps that a parameter goes through, in order.
    pub fn steps(&self, output: &Output) -> Vec<Step> {
        let draft = matches!(output.role, Role::Draft | Role::DraftLinear);
        let mut steps = Vec::new();
        let mut step = |axis, what| steps.push(Step { axis, what });
        if self.gains {
            let rotates = self.residual.is_some();
            match &output.seat.stream {
                Stand::Apart => {}
                Stand::Points if rotates => step(Axis::Input, What::R1),
                Stand::Points => {}
                Stand::Gain => step(Axis::Output, What::Neutral),
                Stand::Reads(norm) => {
                    let norm = norm.clone();
                    step(Axis::Input, if draft { What::DraftGain { norm } } else { What::Gain { norm } });
                    if rotates {
                        step(Axis::Input, What::R1);
                    }
                }
                Stand::Joins { embedding, hidden } => {
                    let (embedding, hidden) = (embedding.clone(), hidden.clone());
                    step(Axis::Input, What::DraftJoin { embedding, hidden });
                    if rotates {
                        step(Axis::Input, What::R1);
                    }
                }
                Stand::Writes => {}
            }
            if matches!(output.seat.stream, Stand::Writes | Stand::Joins { .. }) {
                if draft {
                    step(Axis::Output, What::DraftScale);
                }
                if rotates {
                    step(Axis::Output, What::R1);
                }
            }
        }
        let of = || output.module.rsplit_once('.').map_or_else(String::new, |(of, _)| of.to_owned());
        if let Some(part) = output.seat.part {
            self.inside(part, of(), &mut step);
        }
        steps
    }

    /// Steps of the channels inside a layer.
    fn inside(&self, part: Part, of: String, step: &mut dyn FnMut(Axis, What)) {
        let balance = |channels| What::Balance { channels, of: of.clone() };
        let axis = if matches!(part, Part::Attended | Part::Down) { Axis::Input } else { Axis::Output };
        let attended = matches!(part, Part::Value | Part::Attended);
        if self.values.is_some() && attended {
            step(axis, What::R2 { of: of.clone() });
        }
        let keys = match self.decoder.attention.qk_norm {
            true => matches!(part, Part::QueryGain | Part::KeyGain),
            false => matches!(part, Part::Query | Part::Key),
        };
        if self.key_balance && keys {
            step(axis, balance(Channels::Keys));
        }
        if self.value_balance && attended {
            step(axis, balance(Channels::Values));
        }
        let gates = part == Part::Query && self.decoder.attention.gated;
        if self.value_order && (attended || gates) {
            step(axis, What::Order { of: of.clone() });
        }
        if self.up_balance && matches!(part, Part::Up | Part::Down) {
            step(axis, balance(Channels::Inner));
        }
    }

    /// How much of a matrix the steps must see at once; none without steps.
    pub fn grain(&self, output: &Output, steps: &[Step]) -> Option<Grain> {
        let vector = output.shape.0.len() == 1;
        let rows = output.shape.0.iter().rev().nth(1).copied().unwrap_or(1);
        let grain = |step: &Step| match (&step.what, step.axis) {
            _ if vector => Grain::Rows,
            (What::R1, Axis::Output) => Grain::Blocks(self.residual.as_ref().map_or(1, |r| r.len as u64)),
            (What::R2 { .. }, Axis::Output) => {
                Grain::Blocks(self.values.as_ref().map_or(1, |r| r.len as u64))
            }
            (What::Order { .. }, Axis::Output) => Grain::Blocks(rows),
            _ => Grain::Rows,
        };
        steps.iter().map(grain).max()
    }
}

/// The rotations of a recipe, decided.
#[derive(Default)]
struct Rotations {
    residual: Option<RotationPlan>,
    values: Option<RotationPlan>,
    no_values: Option<&'static str>,
}

/// Decides R1 and R2; what is wrong goes to `refuse`, with what to do about it.
fn decide(recipe: &Recipe, decoder: &DecoderConfig, refuse: &mut dyn FnMut(String, String)) -> Rotations {
    let (wanted, choice) = (&recipe.transform, recipe.transform.rotation);
    if choice.kind == RotationKind::None {
        return Rotations::default();
    }
    let (hidden, head_dim) = (decoder.hidden, decoder.attention.head_dim);
    let residual = rotation(choice.kind, hidden, block(recipe, hidden), refuse);
    let reason = if decoder.attention.gated {
        Some(GATED)
    } else if wanted.value_balance || wanted.value_order {
        Some("the recipe balances or orders the channels of values instead")
    } else if choice.kind != RotationKind::RandomOrthogonal && Size::of(head_dim).is_none() {
        Some("no Hadamard matrix of a head's width is known")
    } else {
        None
    };
    match (choice.r2, reason) {
        (Some(false), _) => Rotations { residual, values: None, no_values: Some("the recipe says so") },
        (None, Some(_)) => Rotations { residual, values: None, no_values: reason },
        (Some(true), Some(reason)) => {
            let message = format!("value heads cannot be rotated: {reason}");
            refuse(message, "leave `r2` out, which rotates them where that is exact".to_owned());
            Rotations { residual, values: None, no_values: None }
        }
        (None | Some(true), None) => {
            let kind = match choice.kind {
                // A block of the stream's width says nothing of a head's.
                RotationKind::BlockHadamard | RotationKind::Auto => RotationKind::Hadamard,
                kind => kind,
            };
            Rotations { residual, values: rotation(kind, head_dim, head_dim, refuse), no_values: None }
        }
    }
}

/// Why the recipe's rotation cannot be that of a model that computes this; none if it can.
pub fn impossible(recipe: &Recipe, decoder: &DecoderConfig) -> Option<String> {
    let mut first = None;
    decide(recipe, decoder, &mut |message, _| {
        first.get_or_insert(message);
    });
    first
}

/// The width of a block: the recipe's, else the default codec's group, else the widest power of two up to 128.
fn block(recipe: &Recipe, hidden: usize) -> usize {
    let stated = recipe.transform.rotation.block.map(|block| block as usize);
    let group = recipe.default.codec.group().map(|group| group as usize);
    stated.or(group).unwrap_or_else(|| 1 << hidden.trailing_zeros().min(7))
}

/// What to do about a width that no Hadamard matrix has.
const ANY_WIDTH: &str = "write `kind = \"random-orthogonal\"`, which any width has";

/// A rotation of this kind and width, or a refusal.
fn rotation(
    kind: RotationKind,
    len: usize,
    block: usize,
    refuse: &mut dyn FnMut(String, String),
) -> Option<RotationPlan> {
    let of = |kind: RotationKind, block, size| Some(RotationPlan { kind: kind.name(), len, block, size });
    let blocks = largest_block(len);
    let no_blocks = |refuse: &mut dyn FnMut(String, String)| {
        refuse(format!("a width of {len} has no blocks with a Hadamard matrix"), ANY_WIDTH.to_owned());
        None
    };
    match kind {
        RotationKind::RandomOrthogonal => of(kind, len, None),
        RotationKind::BlockHadamard if block < 2 => no_blocks(refuse),
        RotationKind::BlockHadamard => match Size::of(block) {
            Some(size) if len.is_multiple_of(block) => of(kind, block, Some(size)),
            Some(_) => {
                let message = format!("blocks of {block} do not divide the residual stream's width of {len}");
                refuse(message, format!("give a `block` that divides {len}, such as {blocks}"));
                None
            }
            None => {
                let message = format!("no Hadamard matrix of order {block} is known");
                refuse(message, "give a `block` that is a power of two, or 12 or 20 times one".to_owned());
                None
            }
        },
        RotationKind::Hadamard | RotationKind::OptRot | RotationKind::Measure | RotationKind::Auto => {
            match Size::of(len) {
                Some(size) if kind == RotationKind::OptRot => of(kind, len, Some(size)),
                Some(size) => of(RotationKind::Hadamard, len, Some(size)),
                None if kind == RotationKind::Hadamard => {
                    let message = format!("no Hadamard matrix of order {len} is known");
                    let help = match blocks {
                        0 | 1 => ANY_WIDTH.to_owned(),
                        _ => format!(
                            "blocks of {blocks} are the largest that divide it: write `rotation = {{ kind = \
                             \"block-hadamard\", block = {blocks} }}`, or `kind = \"auto\"`"
                        ),
                    };
                    refuse(message, help);
                    None
                }
                None if blocks < 2 => no_blocks(refuse),
                None => {
                    let kind = if kind == RotationKind::OptRot { kind } else { RotationKind::BlockHadamard };
                    of(kind, blocks, Size::of(blocks))
                }
            }
        }
        RotationKind::None => None,
    }
}
