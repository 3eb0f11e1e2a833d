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

/// The rope settings of `keys`, from `rope_parameters`, else from `rope_theta` and `rope_scaling`.
pub(super) fn rope(keys: Keys<'_>, head_dim: usize, p: &mut Vec<ArchError>) -> Rope {
    let section = |name: &str| keys.get(name).and_then(Value::as_object);
    let parameters = section("rope_parameters");
    let scaling = section("rope_scaling").or(parameters);
    let number = |key: &str| scaling.and_then(|map| map.get(key)).and_then(Value::as_f64);
    let theta = parameters
        .and_then(|map| map.get("rope_theta"))
        .or(keys.get("rope_theta"))
        .and_then(Value::as_f64)
        .unwrap_or(10_000.0);
    let partial = parameters
        .and_then(|map| map.get("partial_rotary_factor"))
        .or(keys.get("partial_rotary_factor"))
        .map_or(Some(1.0), Value::as_f64);
    let dims = partial.map_or(0, |part| (head_dim as f64 * part) as usize);
    if partial.is_none_or(|part| !(part > 0.0 && part <= 1.0)) || dims == 0 || dims % 2 != 0 {
        let found = keys.get("partial_rotary_factor").cloned().unwrap_or(Value::Null);
        let needed = format!("an even part of head_dim = {head_dim} must be rotated");
        p.push(keys.bad("partial_rotary_factor", &found, &needed));
    }
    let kind = scaling.and_then(|map| map.get("rope_type").or(map.get("type"))).and_then(Value::as_str);
    let mut needed = |key: &str| match number(key) {
        Some(number) if number.is_finite() && number > 0.0 => number,
        _ => {
            let found = scaling.and_then(|map| map.get(key)).cloned().unwrap_or(Value::Null);
            p.push(keys.bad(&format!("rope_scaling.{key}"), &found, "a positive number is needed"));
            1.0
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
pub(super) fn eps(keys: Keys<'_>) -> f32 {
    keys.get("rms_norm_eps").and_then(Value::as_f64).unwrap_or(1e-6) as f32
}
