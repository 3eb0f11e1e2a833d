//! One decoder layer over many rows.
//!
//! Linear layers see all rows of a pass at once, whatever sequences they belong to; mixers see each sequence on its
//! own, with its own state.

use std::ops::Range;

use super::RuntimeError;
use super::state::{LayerState, channels};
use super::weights::Weights;
use crate::arch::decoder::{AttentionConfig, DeltaNetConfig, MixerKind, MlpConfig};
use crate::backend::LinearOp;
use crate::backend::cpu::{Cpu, Heads, Input, Rotation};
use std::sync::Arc;

/// Passes of at least this many tokens go through DeltaNet in chunks. Below, token by token is as fast, and its
/// bits are those of decoding.
const CHUNKED_FROM: usize = 16;

/// Some rows of a pass that are consecutive tokens of one sequence.
#[derive(Debug)]
pub struct Span<'a> {
    /// Its rows.
    pub rows: Range<usize>,
    /// Position of its first token.
    pub position: usize,
    /// The sequence's state in this layer.
    pub state: &'a mut LayerState,
}

/// Looks at values on their way through the layers.
pub trait Observer {
    /// The residual stream [rows, H] before the first layer (`layer` = 0) and after each (`layer` = its number + 1).
    fn residual(&mut self, _layer: usize, _rows: &[f32]) {}

    /// The input [rows, K] of the linear layers with these paths below `layer`'s.
    fn linear_input(&mut self, _layer: &str, _modules: &[&str], _rows: &[f32]) {}
}

/// Looks at nothing.
impl Observer for () {}

/// A linear layer with its bias.
#[derive(Debug)]
pub(super) struct Linear {
    op: Box<dyn LinearOp>,
    bias: Option<Vec<f32>>,
}

impl Linear {
    pub(super) fn open(
        weights: &Weights,
        cpu: &Arc<Cpu>,
        module: &str,
        exact: bool,
    ) -> Result<Self, RuntimeError> {
        let bias = format!("{module}.bias");
        let bias = if weights.has(&bias) { Some(weights.vector(&bias)?) } else { None };
        Ok(Self { op: cpu.prepare(&weights.packed(module)?, exact), bias })
    }

    pub(super) fn op(&self) -> &dyn LinearOp {
        &*self.op
    }

    fn room(&self, rows: usize) -> Vec<f32> {
        vec![0.0; rows * self.op.out_features()]
    }

    fn add_bias(&self, out: &mut [f32]) {
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(bias.len()) {
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
    }
}

/// What computes one module: its linear layer, or that of every expert.
#[derive(Debug)]
pub struct Ops(Vec<Box<dyn LinearOp>>);

impl Ops {
    /// The exact path of the module at this path, such as `model.layers.0.mlp.down_proj`.
    ///
    /// # Errors
    /// As [`Weights::packed`].
    pub fn open(weights: &Weights, cpu: &Arc<Cpu>, module: &str) -> Result<Self, RuntimeError> {
        let packed = match weights.decoder.mlp {
            MlpConfig::Experts { experts, .. } if module.contains(".switch_mlp.") => {
                (0..experts).map(|e| weights.expert(module, e)).collect::<Result<_, _>>()?
            }
            _ => vec![weights.packed(module)?],
        };
        Ok(Self(packed.iter().map(|weight| cpu.prepare(weight, true)).collect()))
    }
}

/// Several linear layers over one input.
fn linears<const N: usize>(cpu: &Cpu, x: &[f32], width: usize, layers: [&Linear; N]) -> [Vec<f32>; N] {
    let input = Input::new(x, width);
    let mut outs = layers.map(|layer| layer.room(input.rows()));
    let mut work: Vec<(&dyn LinearOp, &mut [f32])> =
        layers.iter().zip(&mut outs).map(|(layer, out)| (layer.op(), out.as_mut_slice())).collect();
    cpu.linear(&input, &mut work);
    for (layer, out) in layers.iter().zip(&mut outs) {
        layer.add_bias(out);
    }
    outs
}

/// The weights of one decoder layer, ready to compute.
#[derive(Debug)]
pub struct Layer {
    path: String,
    hidden: usize,
    eps: f32,
    input_norm: Vec<f32>,
    mixer: Mixer,
    post_norm: Vec<f32>,
    mlp: Mlp,
}

#[derive(Debug)]
enum Mixer {
    Attention(Box<Attention>),
    DeltaNet(Box<DeltaNet>),
}

impl Layer {
    /// The layer at `path`, such as `model.layers.0`.
    pub(super) fn open(
        weights: &Weights,
        cpu: &Arc<Cpu>,
        path: &str,
        kind: MixerKind,
    ) -> Result<Self, RuntimeError> {
        let config = &weights.decoder;
        let mixer = match (kind, config.delta_net) {
            (MixerKind::DeltaNet, Some(delta)) => {
                Mixer::DeltaNet(Box::new(DeltaNet::open(weights, cpu, path, delta)?))
            }
            (MixerKind::Attention { window }, _) => {
                Mixer::Attention(Box::new(Attention::open(weights, cpu, path, &config.attention, window)?))
            }
            (MixerKind::DeltaNet, None) => unreachable!("a family with DeltaNet layers has their sizes"),
        };
        Ok(Self {
            path: path.to_owned(),
            hidden: config.hidden,
            eps: config.eps,
            input_norm: weights.vector(&format!("{path}.input_layernorm.weight"))?,
            mixer,
            post_norm: weights.vector(&format!("{path}.post_attention_layernorm.weight"))?,
            mlp: Mlp::open(weights, cpu, path, config.mlp)?,
        })
    }

    /// x = x + mixer(norm(x)); x = x + mlp(norm(x))                                     x: [rows, H]
    pub fn forward(
        &self,
        cpu: &Cpu,
        x: &mut [f32],
        spans: &mut [Span<'_>],
        rotation: &Rotation,
        observer: &mut dyn Observer,
    ) {
        let mut normed = vec![0.0; x.len()];
        cpu.rms_norm(x, &self.input_norm, self.eps, &mut normed);
        let mixed = match &self.mixer {
            Mixer::Attention(mixer) => mixer.forward(cpu, &normed, self, spans, rotation, observer),
            Mixer::DeltaNet(mixer) => mixer.forward(cpu, &normed, self, spans, observer),
        };
        cpu.add(x, &mixed);
        cpu.rms_norm(x, &self.post_norm, self.eps, &mut normed);
        let out = self.mlp.forward(cpu, &normed, self, observer);
        cpu.add(x, &out);
    }

    /// Computes `module`, a path below the layer such as `mlp.down_proj`, with `ops`, which take what computed it
    /// before: a second call undoes the first. Its bias stays.
    ///
    /// # Errors
    /// [`RuntimeError::NoParameter`] for a module that the layer does not have.
    pub fn exchange(&mut self, module: &str, ops: &mut Ops) -> Result<(), RuntimeError> {
        let mine = self.linears_of(module);
        if mine.is_empty() {
            return Err(RuntimeError::NoParameter { path: format!("{}.{module}", self.path) });
        }
        assert_eq!(mine.len(), ops.0.len(), "as many matrices as `{module}` has");
        mine.into_iter().zip(&mut ops.0).for_each(|(linear, op)| std::mem::swap(&mut linear.op, op));
        Ok(())
    }

    /// The linear layers of a module: one, or one an expert.
    fn linears_of(&mut self, module: &str) -> Vec<&mut Linear> {
        let Some((part, name)) = module.split_once('.') else { return Vec::new() };
        match (part, &mut self.mixer, &mut self.mlp) {
            ("self_attn", Mixer::Attention(m), _) => match name {
                "q_proj" => vec![&mut m.q],
                "k_proj" => vec![&mut m.k],
                "v_proj" => vec![&mut m.v],
                "o_proj" => vec![&mut m.o],
                _ => Vec::new(),
            },
            ("linear_attn", Mixer::DeltaNet(m), _) => match name {
                "in_proj_qkv" => vec![&mut m.qkv],
                "in_proj_z" => vec![&mut m.z],
                "in_proj_b" => vec![&mut m.b],
                "in_proj_a" => vec![&mut m.a],
                "out_proj" => vec![&mut m.out],
                _ => Vec::new(),
            },
            ("mlp", _, Mlp::Dense(gated)) => gated.linear(name).into_iter().collect(),
            ("mlp", _, Mlp::Experts(m)) => match name.split_once('.') {
                None if name == "gate" => vec![&mut m.router],
                None if name == "shared_expert_gate" => vec![&mut m.shared_gate],
                Some(("shared_expert", name)) => m.shared.linear(name).into_iter().collect(),
                Some(("switch_mlp", name)) => m.experts.iter_mut().filter_map(|e| e.linear(name)).collect(),
                _ => Vec::new(),
            },
            _ => Vec::new(),
        }
    }

    /// Every linear layer, for sums over them.
    pub(super) fn linears(&self) -> Vec<&dyn LinearOp> {
        let mixer: Vec<&Linear> = match &self.mixer {
            Mixer::Attention(m) => vec![&m.q, &m.k, &m.v, &m.o],
            Mixer::DeltaNet(m) => vec![&m.qkv, &m.z, &m.b, &m.a, &m.out],
        };
        let mlp = match &self.mlp {
            Mlp::Dense(gated) => gated.linears().to_vec(),
            Mlp::Experts(experts) => {
                let mut all = vec![&experts.router, &experts.shared_gate];
                all.extend(experts.shared.linears());
                all.extend(experts.experts.iter().flat_map(Gated::linears));
                all
            }
        };
        mixer.into_iter().chain(mlp).map(Linear::op).collect()
    }

    fn see(&self, observer: &mut dyn Observer, modules: &[&str], rows: &[f32]) {
        observer.linear_input(&self.path, modules, rows);
    }
}

#[derive(Debug)]
struct Attention {
    config: AttentionConfig,
    window: Option<usize>,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    /// Gains of the norms per head.
    norms: Option<(Vec<f32>, Vec<f32>)>,
}

impl Attention {
    fn open(
        weights: &Weights,
        cpu: &Arc<Cpu>,
        path: &str,
        config: &AttentionConfig,
        window: Option<usize>,
    ) -> Result<Self, RuntimeError> {
        let linear = |name: &str| Linear::open(weights, cpu, &format!("{path}.self_attn.{name}"), false);
        let gain = |name: &str| weights.vector(&format!("{path}.self_attn.{name}.weight"));
        Ok(Self {
            config: config.clone(),
            window,
            q: linear("q_proj")?,
            k: linear("k_proj")?,
            v: linear("v_proj")?,
            o: linear("o_proj")?,
            norms: if config.qk_norm { Some((gain("q_norm")?, gain("k_norm")?)) } else { None },
        })
    }

    fn forward(
        &self,
        cpu: &Cpu,
        x: &[f32],
        layer: &Layer,
        spans: &mut [Span<'_>],
        rotation: &Rotation,
        observer: &mut dyn Observer,
    ) -> Vec<f32> {
        let c = &self.config;
        layer.see(observer, &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], x);
        let [mut q, mut k, v] = linears(cpu, x, layer.hidden, [&self.q, &self.k, &self.v]);
        let mut gate = Vec::new();
        if c.gated {
            let mut queries = Vec::with_capacity(q.len() / 2);
            gate.reserve(q.len() / 2);
            for head in q.chunks_exact(2 * c.head_dim) {
                queries.extend_from_slice(&head[..c.head_dim]);
                gate.extend_from_slice(&head[c.head_dim..]);
            }
            q = queries;
        }
        if let Some((q_gain, k_gain)) = &self.norms {
            for (rows, gain) in [(&mut q, q_gain), (&mut k, k_gain)] {
                let raw = rows.clone();
                cpu.rms_norm(&raw, gain, layer.eps, rows);
            }
        }
        let (q_width, k_width) = (c.q_heads * c.head_dim, c.kv_heads * c.head_dim);
        for (rows, width) in [(&mut q, q_width), (&mut k, k_width)] {
            for (t, row) in rows.chunks_exact_mut(width).enumerate() {
                row.chunks_exact_mut(c.head_dim).for_each(|head| rotation.turn(t, head));
            }
        }
        let mut out = vec![0.0; q.len()];
        for span in spans {
            let LayerState::Attention(cache) = &mut *span.state else {
                unreachable!("an attention layer's state is a cache")
            };
            let of = |width: usize| span.rows.start * width..span.rows.end * width;
            cache.append(&k[of(k_width)], &v[of(k_width)]);
            let heads = Heads {
                queries: &q[of(q_width)],
                q_heads: c.q_heads,
                kv_heads: c.kv_heads,
                head_dim: c.head_dim,
                position: span.position,
                window: self.window,
                pages: cache.pages(),
            };
            cpu.attention(heads, &mut out[of(q_width)]);
        }
        if c.gated {
            cpu.sigmoid_product(&mut out, &gate);
        }
        layer.see(observer, &["self_attn.o_proj"], &out);
        let [out] = linears(cpu, &out, q_width, [&self.o]);
        out
    }
}

#[derive(Debug)]
struct DeltaNet {
    config: DeltaNetConfig,
    qkv: Linear,
    z: Linear,
    b: Linear,
    a: Linear,
    out: Linear,
    /// [K, C]: tap by tap.
    taps: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
}

impl DeltaNet {
    fn open(
        weights: &Weights,
        cpu: &Arc<Cpu>,
        path: &str,
        config: DeltaNetConfig,
    ) -> Result<Self, RuntimeError> {
        let at = format!("{path}.linear_attn");
        // The decay's gates are tiny, and their errors add up over the whole sequence.
        let linear = |name: &str, exact| Linear::open(weights, cpu, &format!("{at}.{name}"), exact);
        let by_channel = weights.vector(&format!("{at}.conv1d.weight"))?;
        let (kernel, channels) = (config.kernel, channels(&config));
        let taps = (0..kernel * channels).map(|i| by_channel[i % channels * kernel + i / channels]).collect();
        Ok(Self {
            config,
            qkv: linear("in_proj_qkv", false)?,
            z: linear("in_proj_z", false)?,
            b: linear("in_proj_b", true)?,
            a: linear("in_proj_a", true)?,
            out: linear("out_proj", false)?,
            taps,
            a_log: weights.vector(&format!("{at}.A_log"))?,
            dt_bias: weights.vector(&format!("{at}.dt_bias"))?,
            norm: weights.vector(&format!("{at}.norm.weight"))?,
        })
    }

    fn forward(
        &self,
        cpu: &Cpu,
        x: &[f32],
        layer: &Layer,
        spans: &mut [Span<'_>],
        observer: &mut dyn Observer,
    ) -> Vec<f32> {
        let names = [
            "linear_attn.in_proj_qkv",
            "linear_attn.in_proj_z",
            "linear_attn.in_proj_b",
            "linear_attn.in_proj_a",
        ];
        layer.see(observer, &names, x);
        let [qkv, z, b, a] = linears(cpu, x, layer.hidden, [&self.qkv, &self.z, &self.b, &self.a]);
        let (channels, heads) = (channels(&self.config), self.config.value_heads);
        let mut o = Vec::with_capacity(z.len());
        for span in spans {
            let LayerState::DeltaNet(state) = &mut *span.state else {
                unreachable!("a DeltaNet layer's state is one")
            };
            let of = |width: usize| span.rows.start * width..span.rows.end * width;
            let raw = &qkv[of(channels)];
            let rows = cpu.causal_conv(raw, &self.taps, &mut state.conv, channels);
            let gates = (&b[of(heads)], &a[of(heads)]);
            let input = cpu.delta_input(&self.config, &rows, gates, (&self.a_log, &self.dt_bias));
            state.record(raw, &input);
            let tokens = 0..span.rows.len();
            // A trial's tokens must have the bits that decoding them one by one would give.
            let out = match tokens.len() >= CHUNKED_FROM && !state.on_trial() {
                true => cpu.delta_chunks(&self.config, &input, tokens, &mut state.matrix),
                false => cpu.delta_steps(&self.config, &input, tokens, &mut state.matrix),
            };
            o.extend(out);
        }
        cpu.gated_norm(&mut o, &z, &self.norm, layer.eps);
        layer.see(observer, &["linear_attn.out_proj"], &o);
        let [out] = linears(cpu, &o, heads * self.config.value_dim, [&self.out]);
        out
    }
}

#[derive(Debug)]
enum Mlp {
    Dense(Gated),
    Experts(Box<Experts>),
}

/// down(silu(gate(x)) · up(x))
#[derive(Debug)]
struct Gated {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Gated {
    fn linears(&self) -> [&Linear; 3] {
        [&self.gate, &self.up, &self.down]
    }

    fn linear(&mut self, name: &str) -> Option<&mut Linear> {
        match name {
            "gate_proj" => Some(&mut self.gate),
            "up_proj" => Some(&mut self.up),
            "down_proj" => Some(&mut self.down),
            _ => None,
        }
    }

    /// `names` are those of gate, up and down.
    fn forward(
        &self,
        cpu: &Cpu,
        x: &[f32],
        layer: &Layer,
        names: [&str; 3],
        observer: &mut dyn Observer,
    ) -> Vec<f32> {
        layer.see(observer, &names[..2], x);
        let [mut gate, up] = linears(cpu, x, layer.hidden, [&self.gate, &self.up]);
        cpu.silu_product(&mut gate, &up);
        layer.see(observer, &names[2..], &gate);
        let [out] = linears(cpu, &gate, self.down.op.in_features(), [&self.down]);
        out
    }
}

#[derive(Debug)]
struct Experts {
    chosen: usize,
    router: Linear,
    experts: Vec<Gated>,
    shared: Gated,
    shared_gate: Linear,
}

impl Mlp {
    fn open(weights: &Weights, cpu: &Arc<Cpu>, path: &str, config: MlpConfig) -> Result<Self, RuntimeError> {
        let at = format!("{path}.mlp");
        let gated = |at: &str| {
            let linear = |name: &str| Linear::open(weights, cpu, &format!("{at}.{name}"), false);
            Ok::<_, RuntimeError>(Gated {
                gate: linear("gate_proj")?,
                up: linear("up_proj")?,
                down: linear("down_proj")?,
            })
        };
        let MlpConfig::Experts { experts, chosen, .. } = config else { return Ok(Mlp::Dense(gated(&at)?)) };
        let expert = |e: usize| {
            let linear = |name: &str| {
                let packed = weights.expert(&format!("{at}.switch_mlp.{name}"), e)?;
                Ok::<_, RuntimeError>(Linear { op: cpu.prepare(&packed, false), bias: None })
            };
            Ok::<_, RuntimeError>(Gated {
                gate: linear("gate_proj")?,
                up: linear("up_proj")?,
                down: linear("down_proj")?,
            })
        };
        Ok(Mlp::Experts(Box::new(Experts {
            chosen,
            // An error here flips a token's choice of experts.
            router: Linear::open(weights, cpu, &format!("{at}.gate"), true)?,
            experts: (0..experts).map(expert).collect::<Result<_, _>>()?,
            shared: gated(&format!("{at}.shared_expert"))?,
            shared_gate: Linear::open(weights, cpu, &format!("{at}.shared_expert_gate"), true)?,
        })))
    }

    fn forward(&self, cpu: &Cpu, x: &[f32], layer: &Layer, observer: &mut dyn Observer) -> Vec<f32> {
        match self {
            Mlp::Dense(gated) => {
                let names = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];
                gated.forward(cpu, x, layer, names, observer)
            }
            Mlp::Experts(experts) => experts.forward(cpu, x, layer, observer),
        }
    }
}

impl Experts {
    fn forward(&self, cpu: &Cpu, x: &[f32], layer: &Layer, observer: &mut dyn Observer) -> Vec<f32> {
        let width = layer.hidden;
        layer.see(observer, &["mlp.gate", "mlp.shared_expert_gate"], x);
        let [scores, gates] = linears(cpu, x, width, [&self.router, &self.shared_gate]);
        let choices: Vec<Vec<(usize, f32)>> =
            scores.chunks_exact(self.experts.len()).map(|row| choose(row, self.chosen)).collect();

        // Each expert computes all of its tokens at once; `parts` [tokens, chosen, H] keeps the order of choice.
        let mut parts = vec![0.0; choices.len() * self.chosen * width];
        for (e, expert) in self.experts.iter().enumerate() {
            let places: Vec<usize> = choices
                .iter()
                .enumerate()
                .filter_map(|(t, row)| Some(t * self.chosen + row.iter().position(|(which, _)| *which == e)?))
                .collect();
            if places.is_empty() {
                continue;
            }
            let rows: Vec<f32> =
                places.iter().flat_map(|p| &x[p / self.chosen * width..][..width]).copied().collect();
            let names = ["gate_proj", "up_proj", "down_proj"].map(|n| format!("mlp.switch_mlp.{e}.{n}"));
            let out = expert.forward(cpu, &rows, layer, names.each_ref().map(String::as_str), observer);
            for (place, row) in places.iter().zip(out.chunks_exact(width)) {
                parts[place * width..][..width].copy_from_slice(row);
            }
        }
        let names =
            ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"];
        let shared = self.shared.forward(cpu, x, layer, names, observer);
        let mut out = vec![0.0; x.len()];
        for (t, out) in out.chunks_exact_mut(width).enumerate() {
            for (i, (_, weight)) in choices[t].iter().enumerate() {
                let part = &parts[(t * self.chosen + i) * width..][..width];
                out.iter_mut().zip(part).for_each(|(out, part)| *out += weight * part);
            }
            let gate = (1.0 / (1.0 + crate::numeric::math::exp64(-f64::from(gates[t])))) as f32;
            out.iter_mut().zip(&shared[t * width..]).for_each(|(out, shared)| *out += gate * shared);
        }
        out
    }
}

/// The `chosen` experts with the highest probabilities, best first, ties to the lower number, and their weights:
/// softmax over all, then renormalised over the chosen, in f64.
fn choose(scores: &[f32], chosen: usize) -> Vec<(usize, f32)> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
    order.truncate(chosen);
    // The denominator over all experts cancels.
    let weights: Vec<f64> = order
        .iter()
        .map(|e| crate::numeric::math::exp64(f64::from(scores[*e]) - f64::from(scores[order[0]])))
        .collect();
    let sum: f64 = weights.iter().sum();
    order.into_iter().zip(weights).map(|(e, weight)| (e, (weight / sum) as f32)).collect()
}
