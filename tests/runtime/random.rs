//! Small models of any sizes, with random weights, in the Hugging Face layout.

use serde_json::{Value, json};

use crate::common::{Model, Tensor};

/// What a config says, of any family.
#[derive(Debug, Clone)]
pub struct Sizes {
    pub family: &'static str,
    pub hidden: u64,
    pub intermediate: u64,
    pub vocab: u64,
    pub layers: u64,
    pub kv_heads: u64,
    /// Query heads for each key head.
    pub share: u64,
    pub head_dim: u64,
    pub tied: bool,
    pub attention_bias: bool,
    pub mlp_bias: bool,
    pub rope_scaling: Value,
    /// Tokens, and the first layer where the family allows one.
    pub window: Option<(u64, u64)>,
    pub dtype: &'static str,
    pub hybrid: Hybrid,
    pub seed: u64,
}

/// What only `qwen3_5` and `qwen3_5_moe` have.
#[derive(Debug, Clone)]
pub struct Hybrid {
    pub interval: u64,
    pub key_heads: u64,
    pub share: u64,
    pub key_dim: u64,
    pub value_dim: u64,
    pub kernel: u64,
    pub rotary_part: f64,
    pub experts: u64,
    pub chosen: u64,
    pub shared: u64,
    pub draft: bool,
}

impl Sizes {
    /// Sizes that every codec's groups divide.
    pub fn wide(family: &'static str) -> Self {
        Self {
            family,
            hidden: 128,
            intermediate: 128,
            vocab: 96,
            layers: 2,
            kv_heads: 2,
            share: 2,
            head_dim: 32,
            tied: false,
            attention_bias: false,
            mlp_bias: false,
            rope_scaling: Value::Null,
            window: None,
            dtype: "BF16",
            hybrid: Hybrid {
                interval: 2,
                key_heads: 2,
                share: 2,
                key_dim: 16,
                value_dim: 32,
                kernel: 4,
                rotary_part: 0.25,
                experts: 4,
                chosen: 2,
                shared: 128,
                draft: true,
            },
            seed: 11,
        }
    }

    pub fn is_hybrid(&self) -> bool {
        self.family.starts_with("qwen3_5")
    }

    fn experts(&self) -> bool {
        self.family == "qwen3_5_moe"
    }

    fn config(&self) -> Value {
        let mut text = json!({
            "hidden_size": self.hidden, "vocab_size": self.vocab, "num_hidden_layers": self.layers,
            "num_attention_heads": self.kv_heads * self.share, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "max_position_embeddings": 4096, "tie_word_embeddings": self.tied, "eos_token_id": 2,
        });
        let h = &self.hybrid;
        let more = match self.family {
            _ if self.is_hybrid() => json!({
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": h.rotary_part,
                },
                "full_attention_interval": h.interval, "linear_num_key_heads": h.key_heads,
                "linear_num_value_heads": h.key_heads * h.share, "linear_key_head_dim": h.key_dim,
                "linear_value_head_dim": h.value_dim, "linear_conv_kernel_dim": h.kernel,
                "mtp_num_hidden_layers": u64::from(h.draft), "dtype": torch_name(self.dtype),
            }),
            _ => json!({
                "rope_theta": 1000.0, "rope_scaling": self.rope_scaling, "torch_dtype": torch_name(self.dtype),
                "model_type": self.family, "intermediate_size": self.intermediate,
                "sliding_window": self.window.map(|(tokens, _)| tokens),
            }),
        };
        let mut put = |more: Value| text.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        put(more);
        match self.family {
            "llama" => put(json!({ "attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias })),
            "qwen3" => put(json!({ "attention_bias": self.attention_bias })),
            "qwen3_5" => put(json!({ "model_type": "qwen3_5_text", "intermediate_size": self.intermediate })),
            "qwen3_5_moe" => put(json!({
                "model_type": "qwen3_5_moe_text", "moe_intermediate_size": self.intermediate,
                "shared_expert_intermediate_size": h.shared, "num_experts": h.experts,
                "num_experts_per_tok": h.chosen,
            })),
            _ => {}
        }
        if self.family.starts_with("qwen") && !self.is_hybrid() {
            let first = self.window.map_or(self.layers, |(_, first)| first);
            put(json!({ "use_sliding_window": self.window.is_some(), "max_window_layers": first }));
        }
        match self.is_hybrid() {
            true => {
                json!({ "model_type": self.family, "text_config": text, "tie_word_embeddings": self.tied })
            }
            false => text,
        }
    }

    /// The model: weights of about unit gain, so that every part of it matters to the logits.
    pub fn model(&self) -> Model {
        let mut w = Writer { random: Random::new(self.seed), dtype: self.dtype, tensors: Vec::new() };
        let root = if self.is_hybrid() { "model.language_model" } else { "model" };
        w.normal(format!("{root}.embed_tokens.weight"), &[self.vocab, self.hidden], 1.0);
        if !self.tied {
            w.normal("lm_head.weight".to_owned(), &[self.vocab, self.hidden], self.near(self.hidden) * 3.0);
        }
        for i in 0..self.layers {
            let at = format!("{root}.layers.{i}");
            match self.is_hybrid() && !(i + 1).is_multiple_of(self.hybrid.interval) {
                true => self.delta_net(&mut w, &at),
                false => self.attention(&mut w, &at),
            }
            self.rest(&mut w, &at);
        }
        self.gain(&mut w, format!("{root}.norm.weight"), self.hidden);
        if self.is_hybrid() && self.hybrid.draft {
            w.normal("mtp.fc.weight".to_owned(), &[self.hidden, 2 * self.hidden], self.near(2 * self.hidden));
            for name in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
                self.gain(&mut w, format!("mtp.{name}.weight"), self.hidden);
            }
            self.attention(&mut w, "mtp.layers.0");
            self.rest(&mut w, "mtp.layers.0");
        }
        let tokenizer = b"{\"version\":\"1.0\",\"model\":{\"type\":\"BPE\",\"vocab\":{},\"merges\":[]}}";
        let files = [("tokenizer.json".to_owned(), tokenizer.to_vec())].into();
        Model { config: self.config(), shards: vec![w.tensors], files }
    }

    fn near(&self, inputs: u64) -> f32 {
        1.0 / (inputs as f32).sqrt()
    }

    fn gain(&self, w: &mut Writer, name: String, width: u64) {
        let centre = if self.is_hybrid() { 0.0 } else { 1.0 };
        w.uniform(name, &[width], centre - 0.4, centre + 0.4);
    }

    fn linear(&self, w: &mut Writer, module: String, bias: bool, out: u64, input: u64) {
        w.normal(format!("{module}.weight"), &[out, input], 1.5 * self.near(input));
        if bias {
            w.normal(format!("{module}.bias"), &[out], 0.3);
        }
    }

    fn attention(&self, w: &mut Writer, at: &str) {
        let (q, kv) = (self.kv_heads * self.share * self.head_dim, self.kv_heads * self.head_dim);
        let hybrid = self.is_hybrid();
        let (bias, o_bias) = match self.family {
            "qwen2" => (true, false),
            "llama" | "qwen3" => (self.attention_bias, self.attention_bias),
            _ => (false, false),
        };
        let rows = if hybrid { 2 * q } else { q };
        for (name, bias, out, input) in [
            ("q_proj", bias, rows, self.hidden),
            ("k_proj", bias, kv, self.hidden),
            ("v_proj", bias, kv, self.hidden),
            ("o_proj", o_bias, self.hidden, q),
        ] {
            self.linear(w, format!("{at}.self_attn.{name}"), bias, out, input);
        }
        if hybrid || self.family == "qwen3" {
            self.gain(w, format!("{at}.self_attn.q_norm.weight"), self.head_dim);
            self.gain(w, format!("{at}.self_attn.k_norm.weight"), self.head_dim);
        }
    }

    fn delta_net(&self, w: &mut Writer, at: &str) {
        let at = format!("{at}.linear_attn");
        let h = &self.hybrid;
        let heads = h.key_heads * h.share;
        let values = heads * h.value_dim;
        let channels = 2 * h.key_heads * h.key_dim + values;
        self.linear(w, format!("{at}.in_proj_qkv"), false, channels, self.hidden);
        self.linear(w, format!("{at}.in_proj_z"), false, values, self.hidden);
        self.linear(w, format!("{at}.in_proj_a"), false, heads, self.hidden);
        self.linear(w, format!("{at}.in_proj_b"), false, heads, self.hidden);
        self.linear(w, format!("{at}.out_proj"), false, self.hidden, values);
        w.normal(format!("{at}.conv1d.weight"), &[channels, 1, h.kernel], 0.7);
        // Half-lives from less than a token to about a hundred.
        w.uniform(format!("{at}.A_log"), &[heads], -4.0, 1.0);
        w.uniform(format!("{at}.dt_bias"), &[heads], -2.0, 1.0);
        w.uniform(format!("{at}.norm.weight"), &[h.value_dim], 0.5, 1.5);
    }

    fn rest(&self, w: &mut Writer, at: &str) {
        self.gain(w, format!("{at}.input_layernorm.weight"), self.hidden);
        self.gain(w, format!("{at}.post_attention_layernorm.weight"), self.hidden);
        let gated = |w: &mut Writer, at: &str, bias: bool, inner: u64| {
            self.linear(w, format!("{at}.gate_proj"), bias, inner, self.hidden);
            self.linear(w, format!("{at}.up_proj"), bias, inner, self.hidden);
            self.linear(w, format!("{at}.down_proj"), bias, self.hidden, inner);
        };
        if !self.experts() {
            gated(w, &format!("{at}.mlp"), self.mlp_bias && self.family == "llama", self.intermediate);
            return;
        }
        let (h, inner) = (&self.hybrid, self.intermediate);
        // Scores far apart: which experts a token gets must not hang on a rounding.
        w.normal(format!("{at}.mlp.gate.weight"), &[h.experts, self.hidden], 2.0 * self.near(self.hidden));
        let shape = [h.experts, 2 * inner, self.hidden];
        w.normal(format!("{at}.mlp.experts.gate_up_proj"), &shape, 1.5 * self.near(self.hidden));
        let shape = [h.experts, self.hidden, inner];
        w.normal(format!("{at}.mlp.experts.down_proj"), &shape, 1.5 * self.near(inner));
        gated(w, &format!("{at}.mlp.shared_expert"), false, h.shared);
        w.normal(format!("{at}.mlp.shared_expert_gate.weight"), &[1, self.hidden], self.near(self.hidden));
    }

    /// Token ids for a prompt.
    pub fn prompt(&self, tokens: usize) -> Vec<u32> {
        let mut random = Random::new(self.seed ^ 0x5eed);
        (0..tokens).map(|_| (random.next() % self.vocab) as u32).collect()
    }
}

fn torch_name(dtype: &str) -> &'static str {
    match dtype {
        "BF16" => "bfloat16",
        "F16" => "float16",
        _ => "float32",
    }
}

struct Writer {
    random: Random,
    dtype: &'static str,
    tensors: Vec<Tensor>,
}

impl Writer {
    fn put(&mut self, name: String, shape: &[u64], values: Vec<f32>) {
        let bytes: Vec<u8> = match self.dtype {
            "BF16" => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
            "F16" => values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        self.tensors.push(Tensor::new(&name, self.dtype, shape, bytes));
    }

    fn normal(&mut self, name: String, shape: &[u64], deviation: f32) {
        let values = (0..shape.iter().product()).map(|_| self.random.normal() * deviation).collect();
        self.put(name, shape, values);
    }

    fn uniform(&mut self, name: String, shape: &[u64], from: f32, to: f32) {
        let values = (0..shape.iter().product()).map(|_| from + (to - from) * self.random.unit()).collect();
        self.put(name, shape, values);
    }
}

/// SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From 0 to 1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }

    /// Near enough to a bell of deviation one.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }
}
