//! What a decoder computes, as its config says: sizes, kinds of layers, positions.
//!
//! The names of its tensors are those of [`super::Model`]'s outputs: paths in MLX's model tree, below
//! [`DecoderConfig::root`].

use serde_json::Value;

use super::{ArchError, Keys};
use crate::numeric::math::pow64;

/// A decoder-only transformer, in all the ways the families here differ.
///
/// x = x + mixer(norm(x)); x = x + mlp(norm(x)) for each layer; the head reads norm(x). Every norm is an RMS norm.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// Path of the trunk: `model` or `language_model.model`.
    pub root: &'static str,
    /// Path of the output head; none if it is the input embedding.
    pub head: Option<&'static str>,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rows of the embedding and of the head.
    pub vocab: usize,
    /// Added to the mean square in every norm but the DeltaNet's L2 norms.
    pub eps: f32,
    /// Most tokens the model was made for.
    pub context: Option<usize>,
    /// The mixer of each layer.
    pub layers: Vec<MixerKind>,
    /// Every attention layer.
    pub attention: AttentionConfig,
    /// Every DeltaNet layer, if there are any.
    pub delta_net: Option<DeltaNetConfig>,
    /// Every MLP.
    pub mlp: MlpConfig,
    /// Layers of the draft head; 0 without one.
    pub draft_layers: usize,
    /// Token ids that stand for an image or a video; the runtime has no tower for them.
    pub media_tokens: Vec<u32>,
}

/// What mixes tokens in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MixerKind {
    /// Softmax attention; a query sees itself and the `window` - 1 tokens before it, or all.
    Attention {
        /// Tokens seen; none means all.
        window: Option<usize>,
    },
    /// Gated DeltaNet.
    DeltaNet,
}

/// Softmax attention with grouped heads: query head h reads key and value head h div (H / G).
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionConfig {
    /// H.
    pub q_heads: usize,
    /// G.
    pub kv_heads: usize,
    /// Dh.
    pub head_dim: usize,
    /// Whether each query head carries a gate: `q_proj` then has 2 · Dh rows a head, queries first, and the
    /// head's output is multiplied by sigmoid(gate) before `o_proj`.
    pub gated: bool,
    /// Whether queries and keys go through an RMS norm per head before they are rotated.
    pub qk_norm: bool,
    /// Positions.
    pub rope: Rope,
}

/// Rotary position embedding over the first `dims` of a head, in pairs (i, i + dims / 2).
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Dimensions that are rotated: even, at most the head's.
    pub dims: usize,
    /// Change of the frequencies.
    pub scaling: RopeScaling,
}

/// How frequencies are stretched for long contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All divided by the factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Long waves divided, short ones kept, a ramp between them.
    Llama3 {
        /// Divides the frequencies of long waves.
        factor: f64,
        /// Waves longer than context / low are long.
        low: f64,
        /// Waves shorter than context / high are short.
        high: f64,
        /// Context before stretching, in tokens.
        context: f64,
    },
}

impl Rope {
    /// Radians per token of each pair: theta^(-2i / dims), stretched.
    pub fn frequencies(&self) -> Vec<f64> {
        let plain = (0..self.dims / 2).map(|i| pow64(self.theta, -((2 * i) as f64) / self.dims as f64));
        let stretched = plain.map(|f| match self.scaling {
            RopeScaling::None => f,
            RopeScaling::Linear { factor } => f / factor,
            RopeScaling::Llama3 { factor, low, high, context } => {
                let waves = context * f / std::f64::consts::TAU;
                if waves < low {
                    f / factor
                } else if waves > high {
                    f
                } else {
                    let smooth = (waves - low) / (high - low);
                    (1.0 - smooth) * f / factor + smooth * f
                }
            }
        });
        stretched.collect()
    }
}

/// Gated DeltaNet: value head h uses key head h div (Nv / Nk).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaNetConfig {
    /// Nk.
    pub key_heads: usize,
    /// Nv.
    pub value_heads: usize,
    /// dk.
    pub key_dim: usize,
    /// dv.
    pub value_dim: usize,
    /// Taps of the convolution.
    pub kernel: usize,
}

/// down(silu(gate(x)) · up(x)), once or by experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpConfig {
    /// One.
    Dense {
        /// Its width.
        intermediate: usize,
    },
    /// The best `chosen` of `experts` by the router's softmax, weights renormalised to sum to one, and a shared
    /// one under a sigmoid gate.
    Experts {
        /// How many there are.
        experts: usize,
        /// How many a token goes to.
        chosen: usize,
        /// Width of one.
        intermediate: usize,
        /// Width of the shared one.
        shared: usize,
    },
}

/// The rope settings of `keys`; `part` of a head is rotated where no key says how much.
///
/// Three places may say the same thing: `rope_scaling`, `rope_parameters` and the keys beside them. Readers
/// differ in which they believe, so all that are there must agree.
pub(super) fn rope(keys: Keys<'_>, head_dim: usize, part: f64, p: &mut Vec<ArchError>) -> Rope {
    let section = |name: &str| keys.get(name).and_then(Value::as_object);
    let sections =
        [("rope_scaling.", section("rope_scaling")), ("rope_parameters.", section("rope_parameters"))];
    for (prefix, map) in sections {
        let nested = map.into_iter().flatten().find(|(_, value)| value.is_object());
        if let Some((name, value)) = nested {
            let needed = "this runtime has one set of positions for all layers";
            p.push(keys.bad(&format!("{prefix}{name}"), value, needed));
        }
    }
    let mut said = |names: &[&str], beside: bool| {
        let places = sections.into_iter().chain([("", Some(keys.map()).filter(|_| beside))]);
        let all: Vec<(String, &Value)> = places
            .filter_map(|(prefix, map)| {
                names.iter().find_map(|name| Some((format!("{prefix}{name}"), map?.get(*name)?)))
            })
            .filter(|(_, value)| !value.is_null())
            .collect();
        // 1 and 1.0 are the same number.
        let same = |a: &Value, b: &Value| a == b || a.as_f64().is_some() && a.as_f64() == b.as_f64();
        if let [(first, value), rest @ ..] = all.as_slice()
            && let Some((key, other)) = rest.iter().find(|(_, other)| !same(value, other))
        {
            p.push(keys.bad(key, other, &format!("`{first}` says {value}")));
        }
        all.first().map(|(_, value)| *value)
    };
    let theta = said(&["rope_theta"], true).and_then(Value::as_f64).unwrap_or(10_000.0);
    let found = said(&["partial_rotary_factor"], true);
    let kind = said(&["rope_type", "type"], false).and_then(Value::as_str);
    let part = found.map_or(part, |found| found.as_f64().unwrap_or(0.0));
    let dims = (head_dim as f64 * part) as usize;
    if !(part > 0.0 && part <= 1.0) || dims == 0 || !dims.is_multiple_of(2) {
        let needed = format!("an even part of head_dim = {head_dim} must be rotated");
        p.push(keys.bad("partial_rotary_factor", found.unwrap_or(&part.into()), &needed));
    }
    let scaling = sections.into_iter().find_map(|(_, map)| map);
    let mut needed = |key: &str| {
        let found = scaling.and_then(|map| map.get(key));
        match found.and_then(Value::as_f64) {
            Some(number) if number.is_finite() && number > 0.0 => number,
            _ => {
                let found = found.unwrap_or(&Value::Null);
                p.push(keys.bad(&format!("rope_scaling.{key}"), found, "a positive number is needed"));
                1.0
            }
        }
    };
    let scaling = match kind {
        None | Some("default" | "mrope") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: needed("factor") },
        Some("llama3") => {
            let (factor, low) = (needed("factor"), needed("low_freq_factor"));
            let (high, context) = (needed("high_freq_factor"), needed("original_max_position_embeddings"));
            if high <= low {
                let found = high.into();
                p.push(keys.bad("rope_scaling.high_freq_factor", &found, "it must exceed low_freq_factor"));
            }
            RopeScaling::Llama3 { factor, low, high, context }
        }
        Some(other) => {
            let needed = "this runtime computes only `default`, `linear`, `llama3` and `mrope` (for text)";
            p.push(keys.bad("rope_scaling.rope_type", &other.into(), needed));
            RopeScaling::None
        }
    };
    Rope { theta, dims: dims.max(2), scaling }
}

/// `rms_norm_eps`, or the family's default.
pub(super) fn eps(keys: Keys<'_>, p: &mut Vec<ArchError>) -> f32 {
    let eps = keys.get("rms_norm_eps").and_then(Value::as_f64).unwrap_or(1e-6) as f32;
    if !(eps > 0.0 && eps <= 1.0) {
        let found = keys.get("rms_norm_eps").cloned().unwrap_or(Value::Null);
        p.push(keys.bad("rms_norm_eps", &found, "a number above 0 and at most 1 is needed"));
    }
    eps
}
