//! Dense decoders: llama, mistral, qwen2, qwen3.
//!
//! One skeleton: attention and a gated MLP, each after an RMS norm. The families differ in which
//! projections have biases, in per-head query and key norms, and in how the window is declared.
//! Names and shapes are the same in the Hugging Face and MLX layouts, and gains are stored as gains.
//! Source: `transformers` 5.24 and `mlx_lm` 0.32.2, modules of the same names.

use serde_json::{Map, Value};

use super::decoder::{self, AttentionConfig, DecoderConfig, MixerKind, MlpConfig};
use super::{Arch, ArchError, Config, Drop, Keys, Model, Part, Role, Seat, Slots, Stand};
use crate::failure::Problems;
use crate::tensor::{Dtype, Float, Layout, Shape};

/// Which parts of the skeleton a family has.
pub struct Dense {
    model_types: &'static [&'static str],
    /// `None`: read `attention_bias`, which then covers q, k, v and o.
    qkv_bias: Option<bool>,
    qk_norm: bool,
    mlp_bias_key: bool,
    window: Windowing,
}

/// Which layers a family's sliding window is in.
#[derive(Clone, Copy)]
enum Windowing {
    Never,
    All,
    Upper,
}

/// Llama 1 to 3 and everything that calls itself one.
pub static LLAMA: Dense = Dense {
    model_types: &["llama"],
    qkv_bias: None,
    qk_norm: false,
    mlp_bias_key: true,
    window: Windowing::Never,
};
/// Mistral 7B and its kin (`mlx_lm` runs it as llama).
pub static MISTRAL: Dense = Dense {
    model_types: &["mistral"],
    qkv_bias: Some(false),
    qk_norm: false,
    mlp_bias_key: false,
    window: Windowing::All,
};
/// Qwen2 and Qwen2.5: biases on q, k and v.
pub static QWEN2: Dense = Dense {
    model_types: &["qwen2"],
    qkv_bias: Some(true),
    qk_norm: false,
    mlp_bias_key: false,
    window: Windowing::Upper,
};
/// Qwen3: per-head norms on q and k.
pub static QWEN3: Dense = Dense {
    model_types: &["qwen3"],
    qkv_bias: None,
    qk_norm: true,
    mlp_bias_key: false,
    window: Windowing::Upper,
};

/// Path of the final norm.
const FINAL_NORM: &str = "model.norm";

/// Scaling kinds that stock mlx-lm computes.
const ROPE_TYPES: &[&str] = &["default", "linear", "dynamic", "llama3", "yarn", "longrope", "su", "mrope"];

impl Arch for Dense {
    fn model_types(&self) -> &'static [&'static str] {
        self.model_types
    }

    fn model(
        &self,
        config: &Config,
        probe: &dyn Fn(&str) -> Option<(Dtype, Shape)>,
        target: Layout,
    ) -> Result<Model, Problems<ArchError>> {
        let keys = config.flat();
        let mut problems = Vec::new();
        let p = &mut problems;
        let hidden = keys.dimension("hidden_size", p);
        let intermediate = keys.dimension("intermediate_size", p);
        let layers = keys.layers("num_hidden_layers", p);
        let vocab = keys.dimension("vocab_size", p);
        let heads = keys.dimension("num_attention_heads", p);
        let kv_heads = keys.dimension_or("num_key_value_heads", heads, p);
        let head_dim = keys.dimension_or("head_dim", (hidden / heads).max(1), p);
        keys.one_of("hidden_act", &["silu"], p);
        keys.positive("rms_norm_eps", p);
        keys.dimension_or("max_position_embeddings", 1, p);
        keys.token_ids("eos_token_id", p);
        check_rope(keys, p);
        if !heads.is_multiple_of(kv_heads) {
            p.push(ArchError::Value {
                key: "num_key_value_heads".to_owned(),
                found: kv_heads.to_string(),
                needed: format!("it must divide num_attention_heads = {heads}"),
            });
        }
        let tied = keys.flag_or("tie_word_embeddings", false, p);
        let attention_bias = keys.flag_or("attention_bias", false, p);
        let (qkv_bias, o_bias) = match self.qkv_bias {
            Some(fixed) => (fixed, false),
            None => (attention_bias, attention_bias),
        };
        let mlp_bias = self.mlp_bias_key && keys.flag_or("mlp_bias", false, p);

        let mut slots = Slots::new();
        let mut linear = |module: &str, role, bias: bool, out: u64, input: u64, seat: Seat| {
            slots.one(format!("{module}.weight"), module, "weight", role, [out, input], seat.clone());
            if bias {
                // A bias shares its layer's output, not its input.
                let seat = match seat.stream {
                    Stand::Writes => Seat::writes(),
                    _ => Seat { stream: Stand::Apart, ..seat },
                };
                slots.one(format!("{module}.bias"), module, "bias", Role::Bias, [out], seat);
            }
        };
        let points = Seat { stream: Stand::Points, part: None };
        linear("model.embed_tokens", Role::Embedding, false, vocab, hidden, points);
        if !tied {
            linear("lm_head", Role::Head, false, vocab, hidden, Seat::reads(FINAL_NORM));
        }
        for i in 0..layers {
            let at = format!("model.layers.{i}");
            let attended = Seat::reads(&format!("{at}.input_layernorm"));
            let mut attention = |name: &str, bias, out, input, seat: Seat| {
                linear(&format!("{at}.self_attn.{name}"), Role::Linear, bias, out, input, seat);
            };
            let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
            attention("q_proj", qkv_bias, q_width, hidden, attended.clone().part(Part::Query));
            attention("k_proj", qkv_bias, kv_width, hidden, attended.clone().part(Part::Key));
            attention("v_proj", qkv_bias, kv_width, hidden, attended.part(Part::Value));
            attention("o_proj", o_bias, hidden, q_width, Seat::writes().part(Part::Attended));
            let read = Seat::reads(&format!("{at}.post_attention_layernorm"));
            let mut mlp = |name: &str, out, input, seat: Seat| {
                linear(&format!("{at}.mlp.{name}"), Role::Linear, mlp_bias, out, input, seat);
            };
            mlp("gate_proj", intermediate, hidden, read.clone().part(Part::Gate));
            mlp("up_proj", intermediate, hidden, read.part(Part::Up));
            mlp("down_proj", hidden, intermediate, Seat::writes().part(Part::Down));
        }
        let mut norm = |module: String, width, seat| {
            slots.one(format!("{module}.weight"), &module, "weight", Role::Norm, [width], seat)
        };
        norm(FINAL_NORM.to_owned(), hidden, Seat::gain());
        for i in 0..layers {
            norm(format!("model.layers.{i}.input_layernorm"), hidden, Seat::gain());
            norm(format!("model.layers.{i}.post_attention_layernorm"), hidden, Seat::gain());
            if self.qk_norm {
                norm(format!("model.layers.{i}.self_attn.q_norm"), head_dim, Part::QueryGain.into());
                norm(format!("model.layers.{i}.self_attn.k_norm"), head_dim, Part::KeyGain.into());
            }
        }
        let mut drops = vec![Drop {
            name: ".rotary_emb.inv_freq".to_owned(),
            reason: "rotary frequencies are computed from the config",
        }];
        if tied {
            drops.push(tied_head("lm_head.weight"));
        }
        let embedding = probe("model.embed_tokens.weight");
        Problems::none_or(
            problems,
            Model {
                model_type: config.model_type().map_err(Problems::from)?.to_owned(),
                // Both layouts have the same names and shapes.
                layout: Layout::HuggingFace,
                target,
                zero_centred: false,
                hidden,
                final_norm: FINAL_NORM.to_owned(),
                head: "lm_head".to_owned(),
                slots: slots.list,
                drops,
                float: config.model_float(embedding),
                uniform: true,
                tied,
            },
        )
    }

    fn decoder(&self, config: &Config, model: &Model) -> Result<DecoderConfig, Problems<ArchError>> {
        let keys = config.flat();
        let mut problems = Vec::new();
        let p = &mut problems;
        let mut size = |key: &str| keys.dimension(key, p) as usize;
        let (hidden, vocab) = (size("hidden_size"), size("vocab_size"));
        let (layers, intermediate) = (size("num_hidden_layers"), size("intermediate_size"));
        let q_heads = size("num_attention_heads");
        let kv_heads = keys.dimension_or("num_key_value_heads", q_heads as u64, p) as usize;
        let head_dim = keys.dimension_or("head_dim", (hidden / q_heads).max(1) as u64, p) as usize;
        let windowed = self.windowed(keys, layers, p);
        let window = |i: usize| windowed.as_ref().filter(|w| i >= w.first).map(|w| w.tokens);
        let config = DecoderConfig {
            root: "model",
            head: (!model.tied).then_some("lm_head"),
            hidden,
            vocab,
            eps: decoder::eps(keys, p),
            context: keys
                .get("max_position_embeddings")
                .and_then(Value::as_u64)
                .map(|tokens| tokens as usize),
            layers: (0..layers).map(|i| MixerKind::Attention { window: window(i) }).collect(),
            attention: AttentionConfig {
                q_heads,
                kv_heads,
                head_dim,
                gated: false,
                qk_norm: self.qk_norm,
                rope: decoder::rope(keys, head_dim, 1.0, p),
            },
            delta_net: None,
            mlp: MlpConfig::Dense { intermediate },
            draft_layers: 0,
            media_tokens: Vec::new(),
        };
        Problems::none_or(problems, config)
    }

    fn output_config(&self, config: &Config, model: &Model) -> Map<String, Value> {
        let mut out = config.root().clone();
        out.insert("tie_word_embeddings".to_owned(), model.tied.into());
        write_rope(&mut out);
        if self.qk_norm && !out.get("head_dim").is_some_and(Value::is_u64) {
            // mlx-lm's qwen3 has no default for it.
            let number = |key: &str| out.get(key).and_then(Value::as_u64).unwrap_or(1);
            let head_dim = number("hidden_size") / number("num_attention_heads").max(1);
            out.insert("head_dim".to_owned(), head_dim.into());
        }
        out.insert("torch_dtype".to_owned(), model.float.torch_name().into());
        write_float(&mut out, model.float);
        out
    }
}

/// A sliding window.
struct Window {
    tokens: usize,
    /// First layer that has it.
    first: usize,
}

impl Dense {
    /// The window, where and if the family has one: mistral in all layers, qwen2 and qwen3 only if
    /// `use_sliding_window`, from `max_window_layers` on. It has 4096 tokens where the key is missing; where it is
    /// null there is none.
    fn windowed(&self, keys: Keys<'_>, layers: usize, p: &mut Vec<ArchError>) -> Option<Window> {
        let first = match self.window {
            Windowing::Never => None,
            Windowing::All => Some(0),
            Windowing::Upper if !keys.flag_or("use_sliding_window", false, p) => None,
            Windowing::Upper => match keys.get("max_window_layers") {
                Some(value) if value.as_u64() == Some(0) => Some(0),
                _ => Some(keys.dimension_or("max_window_layers", 28, p) as usize),
            },
        };
        let null = keys.map().get("sliding_window").is_some_and(Value::is_null);
        let window = first.filter(|_| !null).map(|first| {
            let tokens = keys.dimension_or("sliding_window", 4096, p) as usize;
            Window { tokens, first }
        });
        if let Some(kinds) = keys.get("layer_types") {
            let windowed = |i: usize| window.as_ref().is_some_and(|window| i >= window.first);
            let kind = |i: usize| if windowed(i) { "sliding_attention" } else { "full_attention" };
            let expected: Vec<Value> = (0..layers).map(|i| kind(i).into()).collect();
            if kinds.as_array() != Some(&expected) {
                p.push(keys.bad("layer_types", kinds, "the other keys call for windows in other layers"));
            }
        }
        window
    }
}

/// The reason that a tied model's own copy of the head is left out.
pub(super) fn tied_head(name: &str) -> Drop {
    Drop { name: name.to_owned(), reason: "tied: the output head is `embed_tokens`" }
}

/// Changes the dtype where one is stated.
pub(super) fn write_float(keys: &mut Map<String, Value>, float: Float) {
    for key in ["torch_dtype", "dtype"] {
        if let Some(value) = keys.get_mut(key) {
            *value = float.torch_name().into();
        }
    }
}

/// Refuses rope scaling that no reader knows.
pub(super) fn check_rope(keys: Keys<'_>, problems: &mut Vec<ArchError>) {
    keys.positive("rope_theta", problems);
    for section in ["rope_scaling", "rope_parameters"] {
        let Some(value) = keys.get(section) else { continue };
        let Value::Object(rope) = value else {
            problems.push(keys.bad(section, value, "an object is needed"));
            continue;
        };
        if let Some(theta) = rope.get("rope_theta").filter(|theta| !theta.as_f64().is_some_and(|t| t > 0.0)) {
            problems.push(keys.bad(&format!("{section}.rope_theta"), theta, "a positive number is needed"));
        }
        for key in ["rope_type", "type"] {
            if let Some(kind) = rope.get(key).filter(|kind| !kind.is_null())
                && !kind.as_str().is_some_and(|kind| ROPE_TYPES.contains(&kind))
            {
                let needed = format!("readers know only {}", super::config::quoted(ROPE_TYPES));
                problems.push(keys.bad(&format!("{section}.{key}"), kind, &needed));
            }
        }
    }
}

/// Spells rope settings the old way too: mlx-lm's llama, mistral and qwen2 read only `rope_theta` and
/// `rope_scaling`, and fall back to their own defaults in silence.
fn write_rope(out: &mut Map<String, Value>) {
    if let Some(Value::Object(rope)) = out.get("rope_parameters").cloned() {
        if let Some(theta) = rope.get("rope_theta") {
            out.entry("rope_theta").or_insert(theta.clone());
        }
        let kind = rope.get("rope_type").or_else(|| rope.get("type")).and_then(Value::as_str);
        if kind.is_some_and(|kind| kind != "default")
            && !out.get("rope_scaling").is_some_and(Value::is_object)
        {
            let scaling: Map<String, Value> =
                rope.into_iter().filter(|(key, _)| key != "rope_theta").collect();
            out.insert("rope_scaling".to_owned(), scaling.into());
        }
    }
    out.entry("rope_theta").or_insert_with(|| 10000.0.into());
    out.entry("rope_scaling").or_insert(Value::Null);
}
