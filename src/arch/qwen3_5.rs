//! Qwen3.5, 3.6 and 3.8: gated DeltaNet and gated attention in turn, with a draft (MTP) head and a
//! vision tower; dense (`qwen3_5`) and with experts (`qwen3_5_moe`).
//!
//! Two layouts are read. Hugging Face's keeps `conv1d` as `[C, 1, K]` and norms zero-centred (gain =
//! 1 + w); MLX's keeps `[C, K, 1]` and gains. MLX's is written, whole: a mixture loads without an error
//! and is numerically wrong. The last axis of `conv1d` tells which one a checkpoint has, which is also
//! mlx-lm's own test. `linear_attn.norm` is a plain gain in both.
//!
//! The draft head goes to `mtp/`, because readers take its presence in the main files as a sign of the
//! Hugging Face layout. Source: `transformers` 5.24 and `mlx_lm` 0.32.2 `qwen3_5`, `qwen3_5_moe`;
//! `mlx_vlm` 0.7.10 for the draft folder and the tower.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::decoder::{self, AttentionConfig, DecoderConfig, DeltaNetConfig, MixerKind, MlpConfig};
use super::dense::{check_rope, tied_head, write_float};
use super::{
    Arch, ArchError, Config, Drop, Folder, Keys, Model, Output, Part, Role, Seat, Slot, Slots, Stand,
};
use crate::failure::Problems;
use crate::tensor::{Dtype, Layout, Shape};
use crate::transform::{ChannelsLast, GainOffset, RowSelect, Transform};

/// The family, dense or with experts.
pub struct Qwen35 {
    model_types: &'static [&'static str],
    /// What stock mlx-lm calls it.
    output_type: &'static str,
    experts: bool,
}

/// Dense MLPs.
pub static QWEN3_5: Qwen35 =
    Qwen35 { model_types: &["qwen3_5", "qwen3_5_text"], output_type: "qwen3_5", experts: false };
/// Every MLP is a mixture of experts with one shared expert.
pub static QWEN3_5_MOE: Qwen35 =
    Qwen35 { model_types: &["qwen3_5_moe", "qwen3_5_moe_text"], output_type: "qwen3_5_moe", experts: true };

/// What readers assume when `partial_rotary_factor` is absent.
const ROTARY_PART: f64 = 0.25;
/// Most values of a recurrent state, 256 MiB. The 27B has 3 MiB in a layer.
const LARGEST_STATE: u64 = 1 << 26;
/// What readers assume when `mtp_num_hidden_layers` is absent.
const DEFAULT_DRAFT_LAYERS: u64 = 1;

/// Sizes that several tensors share.
struct Dims {
    hidden: u64,
    vocab: u64,
    layers: u64,
    q_heads: u64,
    kv_heads: u64,
    head_dim: u64,
    key_heads: u64,
    value_heads: u64,
    key_dim: u64,
    value_dim: u64,
    kernel: u64,
    interval: u64,
    /// Dense width, or one expert's.
    intermediate: u64,
    shared_intermediate: u64,
    experts: u64,
}

impl Qwen35 {
    fn dims(&self, config: &Config, p: &mut Vec<ArchError>) -> Dims {
        let keys = config.text();
        let q_heads = keys.dimension("num_attention_heads", p);
        let hidden = keys.dimension("hidden_size", p);
        let dims = Dims {
            hidden,
            vocab: keys.dimension("vocab_size", p),
            layers: keys.layers("num_hidden_layers", p),
            q_heads,
            kv_heads: keys.dimension_or("num_key_value_heads", q_heads, p),
            head_dim: keys.dimension_or("head_dim", 256, p),
            key_heads: keys.dimension("linear_num_key_heads", p),
            value_heads: keys.dimension("linear_num_value_heads", p),
            key_dim: keys.dimension("linear_key_head_dim", p),
            value_dim: keys.dimension("linear_value_head_dim", p),
            kernel: keys.dimension_or("linear_conv_kernel_dim", 4, p),
            interval: keys.dimension_or("full_attention_interval", 4, p),
            intermediate: keys
                .dimension(if self.experts { "moe_intermediate_size" } else { "intermediate_size" }, p),
            shared_intermediate: if self.experts {
                keys.dimension("shared_expert_intermediate_size", p)
            } else {
                0
            },
            experts: if self.experts { keys.dimension("num_experts", p) } else { 0 },
        };
        if !dims.value_heads.is_multiple_of(dims.key_heads) {
            p.push(ArchError::Value {
                key: "linear_num_value_heads".to_owned(),
                found: dims.value_heads.to_string(),
                needed: format!("it must be a multiple of linear_num_key_heads = {}", dims.key_heads),
            });
        }
        dims
    }
}

impl Dims {
    fn full_attention(&self, layer: u64) -> bool {
        (layer + 1).is_multiple_of(self.interval)
    }

    /// `layer_types`, if present, must say what the interval says: mlx-lm reads only the interval.
    fn check_layer_types(&self, config: &Config, p: &mut Vec<ArchError>) {
        let Some(value) = config.text().get("layer_types") else { return };
        let expected: Vec<Value> = (0..self.layers)
            .map(|i| if self.full_attention(i) { "full_attention" } else { "linear_attention" }.into())
            .collect();
        if value.as_array() != Some(&expected) {
            let needed = format!(
                "stock readers derive the {} layers' kinds from full_attention_interval = {}, which gives others",
                self.layers, self.interval
            );
            p.push(config.text().bad("layer_types", value, &needed));
        }
    }
}

/// Layers that the config gives the draft head.
fn draft_layers(keys: Keys<'_>, p: &mut Vec<ArchError>) -> u64 {
    match keys.get("mtp_num_hidden_layers") {
        Some(value) if value.as_u64() == Some(0) => 0,
        Some(_) => keys.layers("mtp_num_hidden_layers", p),
        None => DEFAULT_DRAFT_LAYERS,
    }
}

/// One group of tensors under construction: trunk or draft head.
struct Writer<'a> {
    slots: &'a mut Slots,
    /// The source's layout.
    layout: Layout,
    target: Layout,
    /// Part of the draft head.
    draft: bool,
    folder: Folder,
    /// Source and output prefixes, without the final dot.
    from: String,
    to: String,
}

impl Writer<'_> {
    fn put(
        &mut self,
        name: &str,
        parameter: &'static str,
        role: Role,
        shape: impl Into<Shape>,
        steps: Vec<Arc<dyn Transform>>,
        seat: Seat,
    ) {
        let role = match role {
            role if !self.draft => role,
            role if role.quantizable() => Role::DraftLinear,
            _ => Role::Draft,
        };
        let below = |root: &str| match (root, name) {
            ("", name) => name.to_owned(),
            (root, "") => root.to_owned(),
            (root, name) => format!("{root}.{name}"),
        };
        let (module, source) = (below(&self.to), format!("{}.{parameter}", below(&self.from)));
        self.slots.with(source, &module, parameter, role, shape, steps, self.folder, seat);
    }

    fn linear(&mut self, name: &str, out: u64, input: u64, seat: Seat) {
        self.put(name, "weight", Role::Linear, [out, input], Vec::new(), seat);
    }

    /// Reads what the norm `norm` below this group gives.
    fn reads(&self, norm: &str) -> Seat {
        Seat::reads(&format!("{}.{norm}", self.to))
    }

    fn draft_head(&mut self, layers: u64, d: &Dims) {
        let path = |norm: &str| format!("{}.{norm}", self.to);
        let (embedding, hidden) = (path("pre_fc_norm_embedding"), path("pre_fc_norm_hidden"));
        let joins = Seat { stream: Stand::Joins { embedding, hidden }, part: None };
        self.linear("fc", d.hidden, 2 * d.hidden, joins);
        for name in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
            self.norm(name, d.hidden, Seat::gain());
        }
        for i in 0..layers {
            let at = format!("layers.{i}");
            self.norm(&format!("{at}.input_layernorm"), d.hidden, Seat::gain());
            self.norm(&format!("{at}.post_attention_layernorm"), d.hidden, Seat::gain());
            self.attention(&at, d);
            self.mlp(&at, d);
        }
    }

    /// A norm that is zero-centred in the Hugging Face layout.
    fn norm(&mut self, name: &str, width: u64, seat: Seat) {
        let steps: Vec<Arc<dyn Transform>> = match (self.layout, self.target) {
            (Layout::HuggingFace, Layout::Mlx) => vec![Arc::new(GainOffset)],
            _ => Vec::new(),
        };
        self.put(name, "weight", Role::Norm, [width], steps, seat);
    }

    fn attention(&mut self, at: &str, d: &Dims) {
        let reads = self.reads(&format!("{at}.input_layernorm"));
        let at = format!("{at}.self_attn");
        let (q_width, kv_width) = (d.q_heads * d.head_dim, d.kv_heads * d.head_dim);
        self.linear(&format!("{at}.q_proj"), 2 * q_width, d.hidden, reads.clone().part(Part::Query));
        self.linear(&format!("{at}.k_proj"), kv_width, d.hidden, reads.clone().part(Part::Key));
        self.linear(&format!("{at}.v_proj"), kv_width, d.hidden, reads.part(Part::Value));
        self.linear(&format!("{at}.o_proj"), d.hidden, q_width, Seat::writes().part(Part::Attended));
        self.norm(&format!("{at}.q_norm"), d.head_dim, Part::QueryGain.into());
        self.norm(&format!("{at}.k_norm"), d.head_dim, Part::KeyGain.into());
    }

    fn delta_net(&mut self, at: &str, d: &Dims) {
        let reads = self.reads(&format!("{at}.input_layernorm"));
        let at = format!("{at}.linear_attn");
        let channels = 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim;
        let value_width = d.value_heads * d.value_dim;
        self.linear(&format!("{at}.in_proj_qkv"), channels, d.hidden, reads.clone());
        self.linear(&format!("{at}.in_proj_z"), value_width, d.hidden, reads.clone());
        for name in ["in_proj_b", "in_proj_a"] {
            let (name, shape) = (format!("{at}.{name}"), [d.value_heads, d.hidden]);
            self.put(&name, "weight", Role::Decay, shape, Vec::new(), reads.clone());
        }
        self.linear(&format!("{at}.out_proj"), d.hidden, value_width, Seat::writes());
        self.conv(&format!("{at}.conv1d"), channels, d.kernel);
        self.put(&at, "A_log", Role::State, [d.value_heads], Vec::new(), Seat::default());
        self.put(&at, "dt_bias", Role::State, [d.value_heads], Vec::new(), Seat::default());
        self.put(&format!("{at}.norm"), "weight", Role::Norm, [d.value_dim], Vec::new(), Seat::default());
    }

    /// `[C, 1, K]` to `[C, K, 1]`: the same bytes under another shape.
    fn conv(&mut self, name: &str, channels: u64, kernel: u64) {
        let shape = |layout| match layout {
            Layout::HuggingFace => [channels, 1, kernel],
            Layout::Mlx => [channels, kernel, 1],
        };
        self.put(name, "weight", Role::Conv, shape(self.target), Vec::new(), Seat::default());
        self.slots.list.last_mut().expect("just put").shape = Shape::from(shape(self.layout));
    }

    fn mlp(&mut self, at: &str, d: &Dims) {
        let reads = self.reads(&format!("{at}.post_attention_layernorm"));
        let at = format!("{at}.mlp");
        let dense = |writer: &mut Self, at: &str, width| {
            writer.linear(&format!("{at}.gate_proj"), width, d.hidden, reads.clone().part(Part::Gate));
            writer.linear(&format!("{at}.up_proj"), width, d.hidden, reads.clone().part(Part::Up));
            writer.linear(&format!("{at}.down_proj"), d.hidden, width, Seat::writes().part(Part::Down));
        };
        if d.experts == 0 {
            return dense(self, &at, d.intermediate);
        }
        let router = |writer: &mut Self, name: &str, rows| {
            let name = format!("{at}.{name}");
            writer.put(&name, "weight", Role::Router, [rows, d.hidden], Vec::new(), reads.clone());
        };
        router(self, "gate", d.experts);
        self.experts(&at, d, &reads);
        dense(self, &format!("{at}.shared_expert"), d.shared_intermediate);
        router(self, "shared_expert_gate", 1);
    }

    fn experts(&mut self, at: &str, d: &Dims, reads: &Seat) {
        let (e, i, h) = (d.experts, d.intermediate, d.hidden);
        if self.layout == Layout::Mlx {
            for (name, out, input, seat) in [
                ("gate_proj", i, h, reads.clone()),
                ("up_proj", i, h, reads.clone()),
                ("down_proj", h, i, Seat::writes()),
            ] {
                let name = format!("{at}.switch_mlp.{name}");
                self.put(&name, "weight", Role::Experts, [e, out, input], Vec::new(), seat);
            }
            return;
        }
        let role = if self.draft { Role::DraftLinear } else { Role::Experts };
        let output = |parameter, name: &str, shape: Shape, select, seat| Output {
            module: format!("{}.{at}.{name}", self.to),
            parameter,
            role,
            shape,
            select,
            transforms: Vec::new(),
            folder: self.folder,
            seat,
        };
        let (gate_up, down) = (Shape::from([e, 2 * i, h]), Shape::from([e, h, i]));
        let half = |name: &str, start| {
            let select = RowSelect { period: 2 * i, start, len: i };
            output("weight", &format!("switch_mlp.{name}"), Shape::from([e, i, h]), select, reads.clone())
        };
        let whole = |parameter, name: &str, shape: &Shape, seat| {
            output(parameter, name, shape.clone(), RowSelect::all(shape.rows()), seat)
        };
        let (of_gate_up, of_down) = match self.target {
            Layout::Mlx => (
                vec![half("gate_proj", 0), half("up_proj", i)],
                whole("weight", "switch_mlp.down_proj", &down, Seat::writes()),
            ),
            Layout::HuggingFace => (
                vec![whole("", "experts.gate_up_proj", &gate_up, reads.clone())],
                whole("", "experts.down_proj", &down, Seat::writes()),
            ),
        };
        let source = |name: &str| format!("{}.{at}.experts.{name}", self.from);
        let gate_up = Slot { source: source("gate_up_proj"), shape: gate_up, outputs: of_gate_up };
        let down = Slot { source: source("down_proj"), shape: down, outputs: vec![of_down] };
        self.slots.list.extend([gate_up, down]);
    }
}

impl Arch for Qwen35 {
    fn model_types(&self) -> &'static [&'static str] {
        self.model_types
    }

    fn model(
        &self,
        config: &Config,
        probe: &dyn Fn(&str) -> Option<(Dtype, Shape)>,
        target: Layout,
    ) -> Result<Model, Problems<ArchError>> {
        let mut problems = Vec::new();
        let p = &mut problems;
        let keys = config.text();
        let d = self.dims(config, p);
        keys.one_of("hidden_act", &["silu"], p);
        keys.positive("rms_norm_eps", p);
        keys.dimension_or("max_position_embeddings", 1, p);
        keys.token_ids("eos_token_id", p);
        check_rope(keys, p);
        d.check_layer_types(config, p);
        if keys.flag_or("attention_bias", false, p) {
            p.push(keys.bad("attention_bias", &true.into(), "this family has no attention biases"));
        }
        if !keys.flag_or("attn_output_gate", true, p) {
            p.push(keys.bad("attn_output_gate", &false.into(), "every reader applies the output gate"));
        }
        if keys.flag_or("mtp_use_dedicated_embeddings", false, p) {
            p.push(keys.bad(
                "mtp_use_dedicated_embeddings",
                &true.into(),
                "the draft head must share the embeddings",
            ));
        }
        // Stock mlx-lm reads the text section's value and ignores the root's.
        let root_tied = config.root().get("tie_word_embeddings").and_then(Value::as_bool);
        let tied = keys.flag_or("tie_word_embeddings", root_tied.unwrap_or(false), p);
        // The config may promise a draft head that the checkpoint was published without.
        let has_draft = probe("mtp.fc.weight").is_some();
        let draft_layers = draft_layers(keys, p);

        let conv = (0..d.layers.min(d.interval)).find_map(|i| {
            ["model.language_model", "model", "language_model.model"]
                .iter()
                .find_map(|prefix| probe(&format!("{prefix}.layers.{i}.linear_attn.conv1d.weight")))
        });
        let layout = match &conv {
            Some((_, shape)) if shape.last() == 1 && d.kernel != 1 => Layout::Mlx,
            _ => Layout::HuggingFace,
        };
        let prefixed = |prefix: &str| probe(&format!("{prefix}.embed_tokens.weight")).is_some();
        let (from, head) = match layout {
            Layout::Mlx => ("language_model.model", "language_model.lm_head"),
            Layout::HuggingFace if prefixed("model") => ("model", "lm_head"),
            Layout::HuggingFace => ("model.language_model", "lm_head"),
        };
        if layout == Layout::HuggingFace && prefixed("language_model.model") {
            p.push(ArchError::MixedLayout {
                found:
                    "names start with `language_model.`, as in MLX's, but `conv1d` ends in the kernel's axis"
                        .to_owned(),
            });
        }

        if layout == Layout::Mlx && (prefixed("model") || prefixed("model.language_model")) {
            p.push(ArchError::MixedLayout {
                found: "names start with `model.`, as in Hugging Face's, but `conv1d` ends in an axis of one, as in \
                        MLX's"
                    .to_owned(),
            });
        }

        if (layout, target) == (Layout::Mlx, Layout::HuggingFace) {
            p.push(ArchError::NoWayBack);
        }
        let (to, to_head) = match target {
            Layout::Mlx => ("language_model.model", "language_model.lm_head"),
            Layout::HuggingFace => (from, head),
        };
        let final_norm = format!("{to}.norm");

        let mut slots = Slots::new();
        let mut trunk = Writer {
            slots: &mut slots,
            layout,
            target,
            draft: false,
            folder: Folder::Main,
            from: from.to_owned(),
            to: to.to_owned(),
        };
        let points = Seat { stream: Stand::Points, part: None };
        trunk.put("embed_tokens", "weight", Role::Embedding, [d.vocab, d.hidden], Vec::new(), points);
        trunk.norm("norm", d.hidden, Seat::gain());
        for i in 0..d.layers {
            let at = format!("layers.{i}");
            trunk.norm(&format!("{at}.input_layernorm"), d.hidden, Seat::gain());
            trunk.norm(&format!("{at}.post_attention_layernorm"), d.hidden, Seat::gain());
            if d.full_attention(i) {
                trunk.attention(&at, &d)
            } else {
                trunk.delta_net(&at, &d)
            }
            trunk.mlp(&at, &d);
        }
        if !tied {
            let (name, reads) = (format!("{head}.weight"), Seat::reads(&final_norm));
            slots.one(name, to_head, "weight", Role::Head, [d.vocab, d.hidden], reads);
        }
        let mut drops = Vec::new();
        if draft_layers > 0 && has_draft && layout == Layout::HuggingFace {
            let mut draft = Writer {
                slots: &mut slots,
                layout,
                target,
                draft: true,
                folder: match target {
                    Layout::Mlx => Folder::Mtp,
                    Layout::HuggingFace => Folder::Main,
                },
                from: "mtp".to_owned(),
                to: "mtp".to_owned(),
            };
            draft.draft_head(draft_layers, &d);
        }
        if has_draft && layout == Layout::Mlx {
            p.push(ArchError::MixedLayout {
                found: "`conv1d` is in MLX's layout, but `mtp.` tensors lie in the main files".to_owned(),
            });
        }
        tower(config, layout, target, probe, &mut slots, p);
        if tied {
            drops.push(tied_head(&format!("{head}.weight")));
        }
        drops.push(Drop {
            name: ".rotary_emb.inv_freq".to_owned(),
            reason: "rotary frequencies are computed from the config",
        });
        let embedding = probe(&format!("{from}.embed_tokens.weight"));
        Problems::none_or(
            problems,
            Model {
                model_type: config.model_type().map_err(Problems::from)?.to_owned(),
                layout,
                target,
                zero_centred: layout == Layout::HuggingFace,
                hidden: d.hidden,
                final_norm,
                head: to_head.to_owned(),
                slots: slots.list,
                drops,
                float: config.model_float(embedding),
                // Its state and its norms are f32 where they were trained so.
                uniform: false,
                tied,
            },
        )
    }

    fn decoder(&self, config: &Config, model: &Model) -> Result<DecoderConfig, Problems<ArchError>> {
        let mut problems = Vec::new();
        let p = &mut problems;
        let (keys, d) = (config.text(), self.dims(config, p));
        let head_dim = d.head_dim as usize;
        let chosen = if self.experts { keys.dimension("num_experts_per_tok", p) } else { 0 };
        if self.experts && chosen > d.experts {
            let found = chosen.into();
            let needed = format!("there are only num_experts = {}", d.experts);
            p.push(keys.bad("num_experts_per_tok", &found, &needed));
        }
        if !d.q_heads.is_multiple_of(d.kv_heads) {
            let found = d.kv_heads.into();
            let needed = format!("it must divide num_attention_heads = {}", d.q_heads);
            p.push(keys.bad("num_key_value_heads", &found, &needed));
        }
        // Sizes that fit small tensors may call for a state of any size.
        let state = d.value_heads.saturating_mul(d.key_dim).saturating_mul(d.value_dim);
        if state > LARGEST_STATE {
            let found = d.key_dim.into();
            let needed = format!(
                "with {} value heads of {} the state of a layer must not have more than {LARGEST_STATE} values",
                d.value_heads, d.value_dim
            );
            p.push(keys.bad("linear_key_head_dim", &found, &needed));
        }
        let every_layer = "every layer of this family has experts, and their weights are renormalised";
        for (key, usual) in [
            ("norm_topk_prob", Value::from(true)),
            ("decoder_sparse_step", 1.into()),
            ("mlp_only_layers", Value::Array(Vec::new())),
        ] {
            if let Some(value) = keys.get(key).filter(|value| self.experts && **value != usual) {
                p.push(keys.bad(key, value, every_layer));
            }
        }
        let kind = |i| match d.full_attention(i) {
            true => MixerKind::Attention { window: None },
            false => MixerKind::DeltaNet,
        };
        let mut media_tokens = Vec::new();
        for key in ["image_token_id", "video_token_id"] {
            let Some(value) = config.flat().get(key) else { continue };
            match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
                Some(id) => media_tokens.push(id),
                None => p.push(config.flat().bad(key, value, "a token id is needed")),
            }
        }
        let config = DecoderConfig {
            root: "language_model.model",
            head: (!model.tied).then_some("language_model.lm_head"),
            hidden: d.hidden as usize,
            vocab: d.vocab as usize,
            eps: decoder::eps(keys, p),
            context: keys
                .get("max_position_embeddings")
                .and_then(Value::as_u64)
                .map(|tokens| tokens as usize),
            layers: (0..d.layers).map(kind).collect(),
            attention: AttentionConfig {
                q_heads: d.q_heads as usize,
                kv_heads: d.kv_heads as usize,
                head_dim,
                gated: true,
                qk_norm: true,
                rope: decoder::rope(keys, head_dim, ROTARY_PART, p),
            },
            delta_net: Some(DeltaNetConfig {
                key_heads: d.key_heads as usize,
                value_heads: d.value_heads as usize,
                key_dim: d.key_dim as usize,
                value_dim: d.value_dim as usize,
                kernel: d.kernel as usize,
            }),
            mlp: match self.experts {
                false => MlpConfig::Dense { intermediate: d.intermediate as usize },
                true => MlpConfig::Experts {
                    experts: d.experts as usize,
                    chosen: chosen as usize,
                    intermediate: d.intermediate as usize,
                    shared: d.shared_intermediate as usize,
                },
            },
            draft_layers: draft_layers(keys, p) as usize,
            media_tokens,
        };
        Problems::none_or(problems, config)
    }

    fn companion(&self, config: &Config) -> Result<Vec<Slot>, Problems<ArchError>> {
        let mut problems = Vec::new();
        let d = self.dims(config, &mut problems);
        let layers = draft_layers(config.text(), &mut problems);
        let mut slots = Slots::new();
        let mut draft = Writer {
            slots: &mut slots,
            layout: Layout::Mlx,
            target: Layout::Mlx,
            draft: true,
            folder: Folder::Mtp,
            from: String::new(),
            to: "mtp".to_owned(),
        };
        draft.draft_head(layers, &d);
        Problems::none_or(problems, slots.list)
    }

    fn output_config(&self, config: &Config, model: &Model) -> Map<String, Value> {
        let mut out = config.root().clone();
        if model.target == Layout::HuggingFace {
            out.insert("tie_word_embeddings".to_owned(), model.tied.into());
            if let Some(Value::Object(text)) = out.get_mut("text_config") {
                text.insert("tie_word_embeddings".to_owned(), model.tied.into());
                write_float(text, model.float);
            }
            write_float(&mut out, model.float);
            return out;
        }
        let mut text = match out.remove("text_config") {
            Some(Value::Object(text)) => text,
            // A text-only checkpoint keeps everything at the root; mlx-lm wants the nested form.
            _ => {
                let text = out.clone();
                out = Map::new();
                for key in ["architectures", "eos_token_id", "bos_token_id", "pad_token_id"] {
                    if let Some(value) = text.get(key) {
                        out.insert(key.to_owned(), value.clone());
                    }
                }
                text
            }
        };
        text.insert("model_type".to_owned(), format!("{}_text", self.output_type).into());
        text.insert("tie_word_embeddings".to_owned(), model.tied.into());
        for key in ["architectures", "torch_dtype"] {
            text.remove(key);
        }
        write_float(&mut text, model.float);
        out.insert("model_type".to_owned(), self.output_type.into());
        out.insert("tie_word_embeddings".to_owned(), model.tied.into());
        out.insert("torch_dtype".to_owned(), model.float.torch_name().into());
        out.insert("text_config".to_owned(), text.into());
        out
    }

    fn draft_config(&self, config: &Config, model: &Model) -> Option<Map<String, Value>> {
        let text = config.text();
        let depth = text.get("mtp_num_hidden_layers").and_then(Value::as_u64).unwrap_or(DEFAULT_DRAFT_LAYERS);
        let mut out = Map::new();
        out.insert("model_type".to_owned(), "qwen3_5_mtp".into());
        out.insert("block_size".to_owned(), (depth + 2).into());
        out.insert("tie_word_embeddings".to_owned(), model.tied.into());
        let mut text = text.map().clone();
        if text.contains_key("tie_word_embeddings") {
            text.insert("tie_word_embeddings".to_owned(), model.tied.into());
        }
        text.insert("model_type".to_owned(), format!("{}_text", self.output_type).into());
        out.insert("text_config".to_owned(), text.into());
        Some(out)
    }
}

/// The vision tower: passed through, with its patch kernel in the layout that is written.
fn tower(
    config: &Config,
    layout: Layout,
    target: Layout,
    probe: &dyn Fn(&str) -> Option<(Dtype, Shape)>,
    slots: &mut Slots,
    p: &mut Vec<ArchError>,
) {
    let root = |layout| if layout == Layout::Mlx { "vision_tower" } else { "model.visual" };
    let (from, to) = (root(layout), root(target));
    let Some(keys) = config.section("vision_config", "vision_config.") else { return };
    // Text-only publications keep the section and leave the tower out.
    if probe(&format!("{from}.patch_embed.proj.weight")).is_none() {
        return;
    }
    let width = keys.dimension("hidden_size", p);
    let inner = keys.dimension("intermediate_size", p);
    let depth = keys.layers("depth", p);
    let out = keys.dimension("out_hidden_size", p);
    let channels = keys.dimension_or("in_channels", 3, p);
    let patch = keys.dimension("patch_size", p);
    let frames = keys.dimension_or("temporal_patch_size", 2, p);
    let merge = keys.dimension_or("spatial_merge_size", 2, p);
    let positions = keys.dimension("num_position_embeddings", p);
    if let Some(deep) =
        keys.get("deepstack_visual_indexes").filter(|value| value.as_array().is_none_or(|a| !a.is_empty()))
    {
        p.push(keys.bad("deepstack_visual_indexes", deep, "this family's towers have none"));
    }
    let mut put = |name: &str,
                   parameter: &'static str,
                   shape: Shape,
                   to_shape: Shape,
                   steps: Vec<Arc<dyn Transform>>| {
        let (source, module) = (format!("{from}.{name}.{parameter}"), format!("{to}.{name}"));
        // The last layer's output takes the place of embeddings.
        let seat = if name == "merger.linear_fc2" { Seat::writes() } else { Seat::default() };
        slots.with(source, &module, parameter, Role::Vision, to_shape, steps, Folder::Main, seat);
        slots.list.last_mut().expect("just put").shape = shape;
    };
    let first = Shape::from([width, channels, frames, patch, patch]);
    let last = Shape::from([width, frames, patch, patch, channels]);
    let shape = |layout| if layout == Layout::Mlx { last.clone() } else { first.clone() };
    let steps: Vec<Arc<dyn Transform>> = match (layout, target) {
        (Layout::HuggingFace, Layout::Mlx) => vec![Arc::new(ChannelsLast { channels: channels as usize })],
        _ => Vec::new(),
    };
    put("patch_embed.proj", "weight", shape(layout), shape(target), steps);
    let mut same =
        |name: &str, parameter, shape: Shape| put(name, parameter, shape.clone(), shape, Vec::new());
    same("patch_embed.proj", "bias", Shape::from([width]));
    same("pos_embed", "weight", Shape::from([positions, width]));
    let merged = width * merge * merge;
    let mut affine = |name: &str, out: u64, input: Option<u64>| {
        let weight = input.map_or_else(|| Shape::from([out]), |input| Shape::from([out, input]));
        same(name, "weight", weight);
        same(name, "bias", Shape::from([out]));
    };
    for j in 0..depth {
        affine(&format!("blocks.{j}.norm1"), width, None);
        affine(&format!("blocks.{j}.norm2"), width, None);
        affine(&format!("blocks.{j}.attn.qkv"), 3 * width, Some(width));
        affine(&format!("blocks.{j}.attn.proj"), width, Some(width));
        affine(&format!("blocks.{j}.mlp.linear_fc1"), inner, Some(width));
        affine(&format!("blocks.{j}.mlp.linear_fc2"), width, Some(inner));
    }
    affine("merger.norm", width, None);
    affine("merger.linear_fc1", merged, Some(merged));
    affine("merger.linear_fc2", out, Some(merged));
}
