//! The forward pass of every family a second time: plain loops in f64, one token's worth at a time, written from the
//! specification and sharing nothing with the program. It reads the Hugging Face layout from memory.
//!
//! It can make each mistake of [`Mistake`], one at a time, and it can compute in f32 instead ([`Plain::in_f32`]): how far
//! the two lie apart tells how much of a difference rounding alone makes to a model.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::common;

/// A rule changed, as somebody might have read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    /// Zero-centred norms: gain = w, not 1 + w.
    GainAsStored,
    /// `linear_attn.norm`: gain = 1 + w, not w.
    GatedNormCentred,
    /// rms(o · silu(z)), not rms(o) · silu(z).
    GateBeforeNorm,
    /// sigmoid(z), not silu(z).
    SigmoidOfZ,
    /// Value head h uses key head h mod Nk, not h div (Nv / Nk).
    TiledValueHeads,
    /// q is not divided by sqrt(dk).
    NoQueryScale,
    /// q and k of DeltaNet are used as they are.
    NoL2Norm,
    /// The first tap multiplies the current token.
    TapsReversed,
    /// The convolution is over silu(u) and nothing follows it.
    SiluBeforeConv,
    /// β from a and g from b.
    GatesSwapped,
    /// S decays after its update, before it is read.
    DecayAfterUpdate,
    /// g = -|A_log| · softplus.
    NoExpOfA,
    /// All queries first, then all gates, not per head.
    QueriesThenGates,
    /// The attention's gate is silu, not sigmoid.
    SiluAttentionGate,
    /// `partial_rotary_factor` is ignored.
    RopeOnWholeHead,
    /// Pairs (2i, 2i + 1), not (i, i + n).
    InterleavedRope,
    /// Weights of the chosen experts are their softmax over all.
    ChosenNotRenormalised,
    /// The shared expert is added whole.
    SharedNotGated,
    /// Of an expert's rows the second half is the gate.
    GateAndUpSwapped,
    /// `rope_scaling` is ignored.
    NoFrequencyScaling,
    /// Norm of q and k after they are rotated.
    QkNormAfterRope,
    /// No norm of q and k.
    NoQkNorm,
    /// Biases are ignored.
    NoBias,
}

use Mistake::*;

/// A model in memory, widened.
pub struct Plain {
    text: Value,
    hybrid: bool,
    root: String,
    tensors: BTreeMap<String, Vec<f64>>,
    mistake: Option<Mistake>,
    f32: bool,
}

/// What a pass gives, rows of all tokens.
pub struct Out {
    /// The residual stream before the first layer and after each.
    pub residuals: Vec<Vec<f64>>,
    pub hidden: Vec<f64>,
    pub logits: Vec<f64>,
}

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

impl Plain {
    pub fn new(model: &common::Model) -> Self {
        let tensors: BTreeMap<String, Vec<f64>> = model
            .shards
            .iter()
            .flatten()
            .filter(|tensor| !tensor.name.contains(".visual."))
            .map(|tensor| (tensor.name.clone(), tensor.floats().into_iter().map(f64::from).collect()))
            .collect();
        Self::of(&model.config, tensors)
    }

    /// The model of these tensors, whatever precision they came in.
    pub fn of(config: &Value, tensors: BTreeMap<String, Vec<f64>>) -> Self {
        let hybrid = config["model_type"].as_str().unwrap().starts_with("qwen3_5");
        let nested_names = tensors.contains_key("model.language_model.embed_tokens.weight");
        let root = if nested_names { "model.language_model" } else { "model" };
        Self {
            text: config.get("text_config").unwrap_or(config).clone(),
            hybrid,
            root: root.to_owned(),
            tensors,
            mistake: None,
            f32: false,
        }
    }

    /// The same model, read with a mistake.
    pub fn with(mut self, mistake: Mistake) -> Self {
        self.mistake = Some(mistake);
        self
    }

    /// The same model, every step and every sum rounded to f32.
    pub fn in_f32(mut self) -> Self {
        self.f32 = true;
        self
    }

    fn is(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    fn size(&self, key: &str) -> usize {
        self.text[key].as_u64().unwrap_or_else(|| panic!("{key}")) as usize
    }

    fn number(&self, key: &str) -> f64 {
        self.text[key].as_f64().unwrap_or_else(|| panic!("{key}"))
    }

    fn tensor(&self, name: &str) -> &[f64] {
        self.tensors.get(name).unwrap_or_else(|| panic!("{name}"))
    }

    fn round(&self, x: f64) -> f64 {
        if self.f32 { f64::from(x as f32) } else { x }
    }

    fn rounded(&self, mut x: Vec<f64>) -> Vec<f64> {
        x.iter_mut().for_each(|x| *x = self.round(*x));
        x
    }

    /// Σ x · w
    fn dot(&self, x: &[f64], w: &[f64]) -> f64 {
        assert_eq!(x.len(), w.len());
        if self.f32 {
            f64::from(x.iter().zip(w).fold(0.0, |sum: f32, (x, w)| sum + *x as f32 * *w as f32))
        } else {
            x.iter().zip(w).map(|(x, w)| x * w).sum()
        }
    }

    /// y[t, n] = Σ_k x[t, k] · w[n, k] + b[n]
    fn matmul(&self, x: &[f64], width: usize, w: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
        let mut y = Vec::new();
        for x in x.chunks_exact(width) {
            for (n, w) in w.chunks_exact(width).enumerate() {
                y.push(self.dot(x, w) + bias.map_or(0.0, |bias| bias[n]));
            }
        }
        self.rounded(y)
    }

    fn linear(&self, x: &[f64], width: usize, module: &str) -> Vec<f64> {
        let bias = self.tensors.get(&format!("{module}.bias")).filter(|_| !self.is(NoBias));
        self.matmul(x, width, self.tensor(&format!("{module}.weight")), bias.map(Vec::as_slice))
    }

    /// x / sqrt(mean(x²) + eps) · gain, over rows of the gain's width.
    fn rms(&self, x: &[f64], gain: &[f64]) -> Vec<f64> {
        let eps = self.number("rms_norm_eps");
        let mut y = Vec::new();
        for row in x.chunks_exact(gain.len()) {
            let scale = 1.0 / (self.dot(row, row) / gain.len() as f64 + eps).sqrt();
            y.extend(row.iter().zip(gain).map(|(x, gain)| x * scale * gain));
        }
        self.rounded(y)
    }

    /// A norm that this family may store zero-centred.
    fn norm(&self, x: &[f64], module: &str) -> Vec<f64> {
        let offset = if self.hybrid && !self.is(GainAsStored) { 1.0 } else { 0.0 };
        let gain: Vec<f64> =
            self.tensor(&format!("{module}.weight")).iter().map(|w| self.round(w + offset)).collect();
        self.rms(x, &gain)
    }

    fn head_dim(&self) -> usize {
        match self.text.get("head_dim").and_then(Value::as_u64) {
            Some(dim) => dim as usize,
            None => self.size("hidden_size") / self.size("num_attention_heads"),
        }
    }

    /// Radians per token, of each pair.
    fn frequencies(&self) -> Vec<f64> {
        let section = self.text.get("rope_parameters").filter(|section| section.is_object());
        let find = |key: &str| {
            section
                .and_then(|section| section.get(key))
                .or_else(|| self.text.get(key))
                .and_then(Value::as_f64)
        };
        let partial = match self.is(RopeOnWholeHead) {
            true => 1.0,
            false => find("partial_rotary_factor").unwrap_or(1.0),
        };
        let theta = find("rope_theta").unwrap();
        let dims = (self.head_dim() as f64 * partial) as usize;
        let plain: Vec<f64> = (0..dims / 2).map(|i| theta.powf(-2.0 * i as f64 / dims as f64)).collect();
        let scaling = self.text.get("rope_scaling").filter(|scaling| scaling.is_object()).or(section);
        let Some(scaling) = scaling.filter(|_| !self.is(NoFrequencyScaling)) else { return plain };
        let number = |key: &str| scaling[key].as_f64().unwrap();
        let stretch = |f: f64| match scaling.get("rope_type").or(scaling.get("type")).and_then(Value::as_str)
        {
            None | Some("default") => f,
            Some("linear") => f / number("factor"),
            Some("llama3") => {
                let wavelength = 2.0 * std::f64::consts::PI / f;
                let context = number("original_max_position_embeddings");
                let (low, high) = (number("low_freq_factor"), number("high_freq_factor"));
                if wavelength > context / low {
                    f / number("factor")
                } else if wavelength < context / high {
                    f
                } else {
                    let smooth = (context / wavelength - low) / (high - low);
                    (1.0 - smooth) * f / number("factor") + smooth * f
                }
            }
            Some(other) => panic!("{other}"),
        };
        plain.into_iter().map(stretch).collect()
    }

    /// Rotates one head at a position.
    fn rotate(&self, head: &mut [f64], position: usize, frequencies: &[f64]) {
        let n = frequencies.len();
        for (i, frequency) in frequencies.iter().enumerate() {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (sin, cos) = (self.round(sin), self.round(cos));
            let (at, to) = if self.is(InterleavedRope) { (2 * i, 2 * i + 1) } else { (i, i + n) };
            let (a, b) = (head[at], head[to]);
            head[at] = self.round(a * cos - b * sin);
            head[to] = self.round(b * cos + a * sin);
        }
    }

    fn attention(&self, x: &[f64], at: &str, window: Option<usize>) -> Vec<f64> {
        let (heads, d, width) = (self.size("num_attention_heads"), self.head_dim(), self.size("hidden_size"));
        let kv_heads = self.text["num_key_value_heads"].as_u64().map_or(heads, |n| n as usize);
        let tokens = x.len() / width;
        let raw = self.linear(x, width, &format!("{at}.q_proj"));
        let (mut q, mut gate) = (raw.clone(), Vec::new());
        if self.hybrid {
            (q, gate) = (Vec::new(), Vec::new());
            for row in raw.chunks_exact(2 * heads * d) {
                if self.is(QueriesThenGates) {
                    q.extend(&row[..heads * d]);
                    gate.extend(&row[heads * d..]);
                } else {
                    for head in row.chunks_exact(2 * d) {
                        q.extend(&head[..d]);
                        gate.extend(&head[d..]);
                    }
                }
            }
        }
        let mut k = self.linear(x, width, &format!("{at}.k_proj"));
        let v = self.linear(x, width, &format!("{at}.v_proj"));
        let normed = self.tensors.contains_key(&format!("{at}.q_norm.weight")) && !self.is(NoQkNorm);
        let norm = |q: &mut Vec<f64>, k: &mut Vec<f64>| {
            *q = self.norm(q, &format!("{at}.q_norm"));
            *k = self.norm(k, &format!("{at}.k_norm"));
        };
        if normed && !self.is(QkNormAfterRope) {
            norm(&mut q, &mut k);
        }
        let frequencies = self.frequencies();
        for (rows, heads) in [(&mut q, heads), (&mut k, kv_heads)] {
            for (i, head) in rows.chunks_exact_mut(d).enumerate() {
                self.rotate(head, i / heads, &frequencies);
            }
        }
        if normed && self.is(QkNormAfterRope) {
            norm(&mut q, &mut k);
        }
        let mut out = Vec::new();
        for t in 0..tokens {
            let first = window.map_or(0, |window| (t + 1).saturating_sub(window));
            for h in 0..heads {
                let g = h / (heads / kv_heads);
                let query = &q[(t * heads + h) * d..][..d];
                let of = |rows: &[f64], s: usize, i: usize| rows[(s * kv_heads + g) * d + i];
                let scores: Vec<f64> = (first..=t)
                    .map(|s| self.dot(query, &k[(s * kv_heads + g) * d..][..d]) / (d as f64).sqrt())
                    .collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| self.round((score - most).exp())).collect();
                let sum: f64 = weights.iter().sum();
                for i in 0..d {
                    let column: Vec<f64> = (first..=t).map(|s| of(&v, s, i)).collect();
                    out.push(self.dot(&weights, &column) / sum);
                }
            }
        }
        for (out, gate) in out.iter_mut().zip(&gate) {
            *out *= if self.is(SiluAttentionGate) { silu(*gate) } else { sigmoid(*gate) };
        }
        self.linear(&self.rounded(out), heads * d, &format!("{at}.o_proj"))
    }

    fn delta_net(&self, x: &[f64], at: &str) -> Vec<f64> {
        let (nk, nv) = (self.size("linear_num_key_heads"), self.size("linear_num_value_heads"));
        let (dk, dv) = (self.size("linear_key_head_dim"), self.size("linear_value_head_dim"));
        let kernel = self.size("linear_conv_kernel_dim");
        let width = self.size("hidden_size");
        let tokens = x.len() / width;
        let channels = 2 * nk * dk + nv * dv;
        let linear = |name: &str| self.linear(x, width, &format!("{at}.{name}"));
        let (mut u, z) = (linear("in_proj_qkv"), linear("in_proj_z"));
        let (mut b, mut a) = (linear("in_proj_b"), linear("in_proj_a"));
        if self.is(GatesSwapped) {
            (b, a) = (a, b);
        }
        if self.is(SiluBeforeConv) {
            u.iter_mut().for_each(|u| *u = silu(*u));
        }
        let taps = self.tensor(&format!("{at}.conv1d.weight"));
        let mut rows = vec![0.0; tokens * channels];
        for t in 0..tokens {
            for c in 0..channels {
                let mut sum = 0.0;
                for j in (0..kernel).filter(|j| t + j + 1 >= kernel) {
                    let tap = if self.is(TapsReversed) { kernel - 1 - j } else { j };
                    sum = self.round(sum + taps[c * kernel + tap] * u[(t + j + 1 - kernel) * channels + c]);
                }
                rows[t * channels + c] = if self.is(SiluBeforeConv) { sum } else { self.round(silu(sum)) };
            }
        }
        let (a_log, dt_bias) = (self.tensor(&format!("{at}.A_log")), self.tensor(&format!("{at}.dt_bias")));
        let gain: Vec<f64> = self
            .tensor(&format!("{at}.norm.weight"))
            .iter()
            .map(|w| if self.is(GatedNormCentred) { 1.0 + w } else { *w })
            .collect();
        let l2 = |x: &[f64], scale: f64| -> Vec<f64> {
            if self.is(NoL2Norm) {
                return x.iter().map(|x| x * scale).collect();
            }
            let norm = scale / (self.dot(x, x) + 1e-6).sqrt();
            x.iter().map(|x| self.round(x * norm)).collect()
        };
        let query_scale = if self.is(NoQueryScale) { 1.0 } else { 1.0 / (dk as f64).sqrt() };
        let mut out = vec![0.0; tokens * nv * dv];
        for h in 0..nv {
            let key_head = if self.is(TiledValueHeads) { h % nk } else { h / (nv / nk) };
            // state[i][j], [dk, dv]
            let mut state = vec![vec![0.0; dv]; dk];
            for t in 0..tokens {
                let row = &rows[t * channels..][..channels];
                let q = l2(&row[key_head * dk..][..dk], query_scale);
                let k = l2(&row[(nk + key_head) * dk..][..dk], 1.0);
                let v = &row[2 * nk * dk + h * dv..][..dv];
                let beta = sigmoid(b[t * nv + h]);
                let rate = if self.is(NoExpOfA) { a_log[h].abs() } else { a_log[h].exp() };
                let decay = self.round((-rate * softplus(a[t * nv + h] + dt_bias[h])).exp());
                let shrink = |state: &mut Vec<Vec<f64>>| {
                    state.iter_mut().flatten().for_each(|s| *s = self.round(*s * decay));
                };
                if !self.is(DecayAfterUpdate) {
                    shrink(&mut state);
                }
                for j in 0..dv {
                    let predicted: f64 = (0..dk).map(|i| state[i][j] * k[i]).sum();
                    let step = self.round(beta * (v[j] - self.round(predicted)));
                    (0..dk).for_each(|i| state[i][j] = self.round(state[i][j] + k[i] * step));
                }
                if self.is(DecayAfterUpdate) {
                    shrink(&mut state);
                }
                let mut o: Vec<f64> =
                    (0..dv).map(|j| self.round((0..dk).map(|i| state[i][j] * q[i]).sum())).collect();
                let z = &z[(t * nv + h) * dv..][..dv];
                let gate = |z: f64| if self.is(SigmoidOfZ) { sigmoid(z) } else { silu(z) };
                if self.is(GateBeforeNorm) {
                    o.iter_mut().zip(z).for_each(|(o, z)| *o *= gate(*z));
                    o = self.rms(&o, &gain);
                } else {
                    o = self.rms(&o, &gain);
                    o.iter_mut().zip(z).for_each(|(o, z)| *o = self.round(*o * gate(*z)));
                }
                out[(t * nv + h) * dv..][..dv].copy_from_slice(&o);
            }
        }
        self.linear(&out, nv * dv, &format!("{at}.out_proj"))
    }

    /// silu(gate) · up
    fn gated(&self, gate: &[f64], up: &[f64]) -> Vec<f64> {
        assert_eq!(gate.len(), up.len());
        self.rounded(gate.iter().zip(up).map(|(gate, up)| silu(*gate) * up).collect())
    }

    fn dense_mlp(&self, x: &[f64], at: &str) -> Vec<f64> {
        let width = self.size("hidden_size");
        let gate = self.linear(x, width, &format!("{at}.gate_proj"));
        let up = self.linear(x, width, &format!("{at}.up_proj"));
        let inner = gate.len() / (x.len() / width);
        self.linear(&self.gated(&gate, &up), inner, &format!("{at}.down_proj"))
    }

    /// Every expert's probability, [T, E].
    fn probabilities(&self, x: &[f64], at: &str) -> Vec<Vec<f64>> {
        let scores = self.linear(x, self.size("hidden_size"), &format!("{at}.gate"));
        let rows = scores.chunks_exact(self.size("num_experts"));
        rows.map(|row| {
            let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = row.iter().map(|score| (score - most).exp()).sum();
            row.iter().map(|score| (score - most).exp() / sum).collect()
        })
        .collect()
    }

    fn mlp(&self, x: &[f64], at: &str) -> Vec<f64> {
        if !self.tensors.contains_key(&format!("{at}.experts.gate_up_proj")) {
            return self.dense_mlp(x, at);
        }
        let width = self.size("hidden_size");
        let (inner, chosen) = (self.size("moe_intermediate_size"), self.size("num_experts_per_tok"));
        let gate_up = self.tensor(&format!("{at}.experts.gate_up_proj"));
        let down = self.tensor(&format!("{at}.experts.down_proj"));
        let mut out = self.dense_mlp(x, &format!("{at}.shared_expert"));
        let gates = self.linear(x, width, &format!("{at}.shared_expert_gate"));
        for (t, probabilities) in self.probabilities(x, at).iter().enumerate() {
            let x = &x[t * width..][..width];
            let out = &mut out[t * width..][..width];
            if !self.is(SharedNotGated) {
                out.iter_mut().for_each(|out| *out *= sigmoid(gates[t]));
            }
            let mut order: Vec<usize> = (0..probabilities.len()).collect();
            order.sort_by(|a, b| probabilities[*b].total_cmp(&probabilities[*a]));
            let total: f64 = order[..chosen].iter().map(|e| probabilities[*e]).sum();
            for e in &order[..chosen] {
                let weight = probabilities[*e] / if self.is(ChosenNotRenormalised) { 1.0 } else { total };
                let rows = &gate_up[e * 2 * inner * width..][..2 * inner * width];
                let (mut gate, mut up) = rows.split_at(inner * width);
                if self.is(GateAndUpSwapped) {
                    (gate, up) = (up, gate);
                }
                let (gate, up) = (self.matmul(x, width, gate, None), self.matmul(x, width, up, None));
                let down = &down[e * width * inner..][..width * inner];
                let y = self.matmul(&self.gated(&gate, &up), inner, down, None);
                out.iter_mut().zip(y).for_each(|(out, y)| *out = self.round(*out + weight * y));
            }
        }
        out
    }

    /// How near a token came to another choice of experts: the least distance, over layers and tokens, between the
    /// probabilities of the last chosen and the first left out.
    pub fn closest_choice(&self, ids: &[u32]) -> f64 {
        let Some(chosen) = self.text.get("num_experts_per_tok").and_then(Value::as_u64) else { return 1.0 };
        let mut least: f64 = 1.0;
        let width = self.size("hidden_size");
        let mut x = self.embed(ids);
        for i in 0..self.size("num_hidden_layers") {
            let at = format!("{}.layers.{i}", self.root);
            self.mix(&mut x, &at, i);
            let normed = self.norm(&x, &format!("{at}.post_attention_layernorm"));
            for mut row in self.probabilities(&normed, &format!("{at}.mlp")) {
                row.sort_by(|a, b| b.total_cmp(a));
                if let [last, next, ..] = row[chosen as usize - 1..] {
                    least = least.min(last - next);
                }
            }
            let y = self.mlp(&normed, &format!("{at}.mlp"));
            x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
        }
        assert_eq!(x.len(), ids.len() * width);
        least
    }

    fn window(&self, layer: usize) -> Option<usize> {
        let window = self.text.get("sliding_window").and_then(Value::as_u64).map(|window| window as usize);
        match self.text["model_type"].as_str().unwrap() {
            "mistral" => window,
            "qwen2" | "qwen3" if self.text["use_sliding_window"] == true => {
                window.filter(|_| layer >= self.size("max_window_layers"))
            }
            _ => None,
        }
    }

    fn embed(&self, ids: &[u32]) -> Vec<f64> {
        let width = self.size("hidden_size");
        let embedding = self.tensor(&format!("{}.embed_tokens.weight", self.root));
        ids.iter().flat_map(|id| &embedding[*id as usize * width..][..width]).copied().collect()
    }

    fn mix(&self, x: &mut [f64], at: &str, i: usize) {
        let normed = self.norm(x, &format!("{at}.input_layernorm"));
        let attention = match self.hybrid && !at.starts_with("mtp.") {
            true => (i + 1).is_multiple_of(self.size("full_attention_interval")),
            false => true,
        };
        let y = match attention {
            true => self.attention(&normed, &format!("{at}.self_attn"), self.window(i)),
            false => self.delta_net(&normed, &format!("{at}.linear_attn")),
        };
        x.iter_mut().zip(y).for_each(|(x, y)| *x = self.round(*x + y));
    }

    fn layer(&self, x: &mut [f64], at: &str, i: usize) {
        self.mix(x, at, i);
        let y = self.mlp(&self.norm(x, &format!("{at}.post_attention_layernorm")), &format!("{at}.mlp"));
        x.iter_mut().zip(y).for_each(|(x, y)| *x = self.round(*x + y));
    }

    fn logits(&self, hidden: &[f64]) -> Vec<f64> {
        let tied = format!("{}.embed_tokens.weight", self.root);
        let head = self.tensors.get("lm_head.weight").unwrap_or_else(|| &self.tensors[&tied]);
        self.matmul(hidden, self.size("hidden_size"), head, None)
    }

    /// The trunk, from the first token on.
    pub fn forward(&self, ids: &[u32]) -> Out {
        let mut x = self.embed(ids);
        let mut residuals = vec![x.clone()];
        for i in 0..self.size("num_hidden_layers") {
            self.layer(&mut x, &format!("{}.layers.{i}", self.root), i);
            residuals.push(x.clone());
        }
        let hidden = self.norm(&x, &format!("{}.norm", self.root));
        Out { logits: self.logits(&hidden), hidden, residuals }
    }

    /// The draft head's logits, [T, V]: row i pairs `hidden[i]` with the embedding of `next[i]`.
    pub fn draft(&self, next: &[u32], hidden: &[f64]) -> Vec<f64> {
        let width = self.size("hidden_size");
        let e = self.norm(&self.embed(next), "mtp.pre_fc_norm_embedding");
        let h = self.norm(hidden, "mtp.pre_fc_norm_hidden");
        let rows = e.chunks_exact(width).zip(h.chunks_exact(width));
        let both: Vec<f64> = rows.flat_map(|(e, h)| e.iter().chain(h)).copied().collect();
        let mut x = self.linear(&both, 2 * width, "mtp.fc");
        for i in 0..self.text["mtp_num_hidden_layers"].as_u64().map_or(1, |n| n as usize) {
            self.layer(&mut x, &format!("mtp.layers.{i}"), i);
        }
        self.logits(&self.norm(&x, "mtp.norm"))
    }
}

/// How two sets of logits differ: greatest distance, mean KL of the second from the first, rows whose greatest is another.
#[derive(Debug)]
pub struct Difference {
    pub most: f64,
    pub kl: f64,
    pub flips: usize,
}

pub fn difference(right: &[f64], found: &[f64], vocab: usize) -> Difference {
    assert_eq!(right.len(), found.len());
    let log_softmax = |row: &[f64]| -> Vec<f64> {
        let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - most).exp()).sum();
        row.iter().map(|x| x - most - sum.ln()).collect()
    };
    let greatest = |row: &[f64]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
    let (mut kl, mut flips) = (0.0, 0);
    for (right, found) in right.chunks_exact(vocab).zip(found.chunks_exact(vocab)) {
        let (p, q) = (log_softmax(right), log_softmax(found));
        kl += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        flips += usize::from(greatest(right) != greatest(found));
    }
    let apart =
        right.iter().zip(found).map(|(a, b)| if (a - b).is_nan() { f64::INFINITY } else { (a - b).abs() });
    Difference { most: apart.fold(0.0, f64::max), kl: kl / (right.len() / vocab) as f64, flips }
}

pub fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}
