//! The gated delta rule.
//!
//! For each value head, with a state S [dk, dv] in f32, queries and keys already normalised, log decay g <= 0:
//!
//! S ← exp(g_t) · S;  r = Sᵀ k_t;  S ← S + k_t (β_t (v_t - r))ᵀ;  o_t = Sᵀ q_t
//!
//! [`Cpu::delta_steps`] does this token by token. [`Cpu::delta_chunks`] gives the same map for [`CHUNK`] tokens at a
//! time, with G_i = g_1 + ... + g_i inside the chunk and D_ij = exp(G_i - G_j) for i >= j:
//!
//! A = strictly lower part of (β_i k_i · k_j) D_ij;  [U | W] = (I + A)^-1 [β V | β exp(G) K];  V' = U - W S
//! O = (exp(G) Q) S + (Q Kᵀ ∘ D) V';  S ← exp(G_C) S + (exp(G_C - G) K)ᵀ V'
//!
//! Both are equal up to rounding. Heads are independent of each other, and every sum has a fixed order.
//! Source: Yang et al., *Gated Delta Networks* (2024), section 3.3; `transformers` 5.24 `qwen3_5`.

use super::Cpu;
use super::combine::{Matrix, combine};
use super::pointwise::{scaled, squares};
use crate::arch::decoder::DeltaNetConfig;
use crate::numeric::dot;
use crate::numeric::lanes::{Kernel, LANES, Lanes, dispatch};
use crate::numeric::math::{exp, exp64, silu, softplus64};

/// Tokens of a chunk.
pub const CHUNK: usize = 64;

/// Added to the sum of squares in the L2 norms of queries and keys.
const L2_EPS: f32 = 1e-6;

/// What the recurrence takes, for T tokens.
#[derive(Debug, Clone, Default)]
pub struct DeltaInput {
    /// [T, Nk · dk], normalised and divided by sqrt(dk).
    pub q: Vec<f32>,
    /// [T, Nk · dk], normalised.
    pub k: Vec<f32>,
    /// [T, Nv · dv]
    pub v: Vec<f32>,
    /// Log decay [T, Nv].
    pub g: Vec<f32>,
    /// [T, Nv]
    pub beta: Vec<f32>,
}

/// Width of a state's rows: dv, or the next multiple of sixteen.
pub fn state_width(config: &DeltaNetConfig) -> usize {
    config.value_dim.next_multiple_of(LANES)
}

impl Cpu {
    /// y[t, c] = silu(Σ_j w[j, c] · u[t - (K - 1) + j, c]): u is `history` (K - 1 rows) and then `rows`.
    ///
    /// `taps` is [K, C]. Returns y [T, C] and leaves the last K - 1 raw rows in `history`.
    pub fn causal_conv(
        &self,
        rows: &[f32],
        taps: &[f32],
        history: &mut Vec<f32>,
        channels: usize,
    ) -> Vec<f32> {
        let kernel = taps.len() / channels;
        let mut all = std::mem::take(history);
        all.extend_from_slice(rows);
        let mut out = vec![0.0; rows.len()];
        self.threads.chunks(&mut out, channels * 8, &|i, out| {
            let rows = &all[i * 8 * channels..];
            dispatch(self.isa, Conv { rows, taps, channels, out });
        });
        *history = all.split_off(all.len() - (kernel - 1) * channels);
        out
    }

    /// Splits and normalises rows of the convolution [T, 2 Nk dk + Nv dv], and makes the gates.
    ///
    /// q = l2(q) / sqrt(dk), k = l2(k), β = sigmoid(b), g = -exp(A_log) · softplus(a + dt_bias).
    pub fn delta_input(
        &self,
        config: &DeltaNetConfig,
        qkv: &[f32],
        (b, a): (&[f32], &[f32]),
        (a_log, dt_bias): (&[f32], &[f32]),
    ) -> DeltaInput {
        let keys = config.key_heads * config.key_dim;
        let width = 2 * keys + config.value_heads * config.value_dim;
        let tokens = qkv.len() / width;
        let mut input = DeltaInput {
            q: vec![0.0; tokens * keys],
            k: vec![0.0; tokens * keys],
            v: Vec::with_capacity(tokens * (width - 2 * keys)),
            g: Vec::with_capacity(b.len()),
            beta: Vec::with_capacity(b.len()),
        };
        for row in qkv.chunks_exact(width) {
            input.v.extend_from_slice(&row[2 * keys..]);
        }
        let (q, k) = (&mut input.q, &mut input.k);
        dispatch(self.isa, Normalise { qkv, width, keys, dim: config.key_dim, q, k });
        for (b, a) in b.chunks_exact(config.value_heads).zip(a.chunks_exact(config.value_heads)) {
            for h in 0..config.value_heads {
                input.beta.push((1.0 / (1.0 + exp64(-f64::from(b[h])))) as f32);
                let step = softplus64(f64::from(a[h]) + f64::from(dt_bias[h]));
                input.g.push((-exp64(f64::from(a_log[h])) * step) as f32);
            }
        }
        input
    }

    /// The recurrence for tokens `tokens` of `input`, one by one; o [T, Nv · dv].
    pub fn delta_steps(
        &self,
        config: &DeltaNetConfig,
        input: &DeltaInput,
        tokens: std::ops::Range<usize>,
        state: &mut [f32],
    ) -> Vec<f32> {
        self.delta(config, input, tokens, state, false)
    }

    /// The recurrence in chunks of [`CHUNK`]; o [T, Nv · dv].
    pub fn delta_chunks(
        &self,
        config: &DeltaNetConfig,
        input: &DeltaInput,
        tokens: std::ops::Range<usize>,
        state: &mut [f32],
    ) -> Vec<f32> {
        self.delta(config, input, tokens, state, true)
    }

    fn delta(
        &self,
        config: &DeltaNetConfig,
        input: &DeltaInput,
        tokens: std::ops::Range<usize>,
        state: &mut [f32],
        chunks: bool,
    ) -> Vec<f32> {
        let width = config.value_heads * config.value_dim;
        let mut out = vec![0.0; tokens.len() * width];
        let columns = crate::backend::Columns::new(&mut out, width);
        let size = config.key_dim * state_width(config);
        self.threads.chunks(state, size, &|h, state| {
            let head = Head { config: *config, input, tokens: tokens.clone(), h, state, out: &columns };
            match chunks {
                true => dispatch(self.isa, Chunks(head)),
                false => dispatch(self.isa, Steps(head)),
            }
        });
        out
    }

    /// o[t, h, ..] = rms(o[t, h, ..]) · gain · silu(z[t, h, ..])
    pub fn gated_norm(&self, o: &mut [f32], z: &[f32], gain: &[f32], eps: f32) {
        let each = gain.len() * (4096 / gain.len()).max(1);
        self.threads.chunks(o, each, &|i, o| {
            let z = &z[i * each..][..o.len()];
            dispatch(self.isa, GatedNorm { o, z, gain, eps });
        });
    }
}

struct Conv<'a> {
    rows: &'a [f32],
    taps: &'a [f32],
    channels: usize,
    out: &'a mut [f32],
}

impl Kernel for Conv<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let channels = self.channels;
        for (t, out) in self.out.chunks_exact_mut(channels).enumerate() {
            for at in (0..channels).step_by(LANES) {
                let len = LANES.min(channels - at);
                let mut sum = V::splat(0.0);
                for (j, taps) in self.taps.chunks_exact(channels).enumerate() {
                    let row = &self.rows[(t + j) * channels + at..][..len];
                    sum = V::load_part(&taps[at..at + len]).fma(V::load_part(row), sum);
                }
                let mut lanes = [0.0; LANES];
                silu(sum).store(&mut lanes);
                out[at..at + len].copy_from_slice(&lanes[..len]);
            }
        }
    }
}

struct Normalise<'a> {
    qkv: &'a [f32],
    width: usize,
    keys: usize,
    dim: usize,
    q: &'a mut [f32],
    k: &'a mut [f32],
}

impl Kernel for Normalise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let root = (self.dim as f32).sqrt();
        let rows = self.qkv.chunks_exact(self.width);
        let outs = self.q.chunks_exact_mut(self.keys).zip(self.k.chunks_exact_mut(self.keys));
        for (row, (q, k)) in rows.zip(outs) {
            for (part, out, scale) in [(0, q, 1.0 / root), (self.keys, k, 1.0)] {
                let heads = row[part..part + self.keys].chunks_exact(self.dim);
                for (x, out) in heads.zip(out.chunks_exact_mut(self.dim)) {
                    let norm = scale / (squares::<V>(x) + L2_EPS).sqrt();
                    x.iter().zip(out).for_each(|(x, out)| *out = x * norm);
                }
            }
        }
    }
}

struct GatedNorm<'a> {
    o: &'a mut [f32],
    z: &'a [f32],
    gain: &'a [f32],
    eps: f32,
}

impl Kernel for GatedNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let width = self.gain.len();
        let mut normed = vec![0.0; width];
        for (o, z) in self.o.chunks_exact_mut(width).zip(self.z.chunks_exact(width)) {
            let scale = 1.0 / (squares::<V>(o) / width as f32 + self.eps).sqrt();
            scaled::<V>(o, scale, self.gain, &mut normed);
            for at in (0..width).step_by(LANES) {
                let len = LANES.min(width - at);
                let mut lanes = [0.0; LANES];
                let gate = silu(V::load_part(&z[at..at + len]));
                V::load_part(&normed[at..at + len]).mul(gate).store(&mut lanes);
                o[at..at + len].copy_from_slice(&lanes[..len]);
            }
        }
    }
}

/// One value head over some tokens.
struct Head<'a> {
    config: DeltaNetConfig,
    input: &'a DeltaInput,
    tokens: std::ops::Range<usize>,
    h: usize,
    /// [dk, dv], rows of [`state_width`].
    state: &'a mut [f32],
    out: &'a crate::backend::Columns<'a>,
}

impl<'a> Head<'a> {
    fn q(&self, t: usize) -> &'a [f32] {
        self.key_row(&self.input.q, t)
    }

    fn k(&self, t: usize) -> &'a [f32] {
        self.key_row(&self.input.k, t)
    }

    fn key_row(&self, of: &'a [f32], t: usize) -> &'a [f32] {
        let head = self.h / (self.config.value_heads / self.config.key_heads);
        &of[(t * self.config.key_heads + head) * self.config.key_dim..][..self.config.key_dim]
    }

    fn v(&self, t: usize) -> &'a [f32] {
        &self.input.v[(t * self.config.value_heads + self.h) * self.config.value_dim..]
            [..self.config.value_dim]
    }

    fn gate(&self, of: &[f32], t: usize) -> f32 {
        of[t * self.config.value_heads + self.h]
    }

    /// Writes a row of the output.
    fn put(&self, t: usize, o: &[f32]) {
        let dv = self.config.value_dim;
        // SAFETY: this part alone has this head.
        let out = unsafe { self.out.row(t - self.tokens.start, self.h * dv..(self.h + 1) * dv) };
        out.copy_from_slice(&o[..dv]);
    }
}

struct Steps<'a>(Head<'a>);

impl Kernel for Steps<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let head = self.0;
        let width = state_width(&head.config);
        let mut rows = vec![0.0; 3 * width];
        let (v, rest) = rows.split_at_mut(width);
        let (delta, o) = rest.split_at_mut(width);
        for t in head.tokens.clone() {
            let (q, k) = (head.q(t), head.k(t));
            let decay = V::splat(exp64(f64::from(head.gate(&head.input.g, t))) as f32);
            let beta = V::splat(head.gate(&head.input.beta, t));
            v[..head.config.value_dim].copy_from_slice(head.v(t));
            delta.fill(0.0);
            for (s, k) in head.state.chunks_exact_mut(width).zip(k) {
                let k = V::splat(*k);
                for (s, r) in s.as_chunks_mut().0.iter_mut().zip(delta.as_chunks_mut().0) {
                    let decayed = V::load(s).mul(decay);
                    decayed.store(s);
                    k.fma(decayed, V::load(r)).store(r);
                }
            }
            for (r, v) in delta.as_chunks_mut().0.iter_mut().zip(v.as_chunks().0) {
                beta.mul(V::load(v).sub(V::load(r))).store(r);
            }
            o.fill(0.0);
            for ((s, k), q) in head.state.chunks_exact_mut(width).zip(k).zip(q) {
                let (k, q) = (V::splat(*k), V::splat(*q));
                let lanes = s.as_chunks_mut().0.iter_mut().zip(delta.as_chunks().0);
                for ((s, delta), o) in lanes.zip(o.as_chunks_mut().0) {
                    let new = k.fma(V::load(delta), V::load(s));
                    new.store(s);
                    q.fma(new, V::load(o)).store(o);
                }
            }
            head.put(t, o);
        }
    }
}

struct Chunks<'a>(Head<'a>);

impl Kernel for Chunks<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let head = self.0;
        let (dk, width) = (head.config.key_dim, state_width(&head.config));
        let wide_k = dk.next_multiple_of(LANES);
        let mut scratch = Scratch::new(dk, wide_k, width);
        let mut start = head.tokens.start;
        while start < head.tokens.end {
            let n = CHUNK.min(head.tokens.end - start);
            scratch.gather(&head, start, n);
            scratch.chunk::<V>(n, dk, wide_k, width, head.state);
            for i in 0..n {
                head.put(start + i, &scratch.o[i * width..][..width]);
            }
            start += n;
        }
    }
}

/// One chunk's matrices; rows are tokens.
struct Scratch {
    /// [C, dk]
    q: Vec<f32>,
    k: Vec<f32>,
    /// G_i = g_1 + ... + g_i, and β_i.
    g: Vec<f32>,
    beta: Vec<f32>,
    /// [C, C] products and their decays.
    a: Vec<f32>,
    qk: Vec<f32>,
    decay: Vec<f32>,
    /// [C, dv], [C, dk]: right-hand sides, then solutions.
    u: Vec<f32>,
    w: Vec<f32>,
    /// [C, dv]
    o: Vec<f32>,
    /// [dk, C]
    kt: Vec<f32>,
}

impl Scratch {
    fn new(dk: usize, wide_k: usize, width: usize) -> Self {
        let rows = |len: usize| vec![0.0; CHUNK * len];
        Self {
            q: rows(dk),
            k: rows(dk),
            g: rows(1),
            beta: rows(1),
            a: rows(CHUNK),
            qk: rows(CHUNK),
            decay: rows(CHUNK),
            u: rows(width),
            w: rows(wide_k),
            o: rows(width),
            kt: rows(dk),
        }
    }

    fn gather(&mut self, head: &Head<'_>, start: usize, n: usize) {
        let dk = head.config.key_dim;
        let width = self.u.len() / CHUNK;
        let mut sum = 0.0;
        for i in 0..n {
            let t = start + i;
            self.q[i * dk..][..dk].copy_from_slice(head.q(t));
            self.k[i * dk..][..dk].copy_from_slice(head.k(t));
            let v = head.v(t);
            self.u[i * width..][..v.len()].copy_from_slice(v);
            sum += head.gate(&head.input.g, t);
            self.g[i] = sum;
            self.beta[i] = head.gate(&head.input.beta, t);
        }
    }

    #[inline(always)]
    fn chunk<V: Lanes>(&mut self, n: usize, dk: usize, wide_k: usize, width: usize, state: &mut [f32]) {
        let exponential = |x: f32| exp64(f64::from(x)) as f32;
        for i in 0..n {
            // D_ij for j <= i; lanes beyond the diagonal are not read.
            let row = &mut self.decay[i * CHUNK..][..CHUNK];
            for (j, d) in row[..=i].iter_mut().enumerate() {
                *d = self.g[i] - self.g[j];
            }
            for lanes in row[..(i + 1).next_multiple_of(LANES)].as_chunks_mut().0 {
                exp(V::load(lanes)).store(lanes);
            }
        }
        dot::products::<V>(&self.k, dk, n, &self.k, dk, n, dk, &mut self.a, CHUNK);
        dot::products::<V>(&self.q, dk, n, &self.k, dk, n, dk, &mut self.qk, CHUNK);
        for i in 0..n {
            let beta = self.beta[i];
            for j in 0..n {
                let (at, below) = (i * CHUNK + j, j < i);
                // Negated, so that the solve adds.
                self.a[at] = if below { -(beta * self.a[at] * self.decay[at]) } else { 0.0 };
                self.qk[at] = if j <= i { self.qk[at] * self.decay[at] } else { 0.0 };
            }
            let grown = exponential(self.g[i]);
            self.u[i * width..][..width].iter_mut().for_each(|u| *u *= beta);
            for (w, k) in self.w[i * wide_k..][..dk].iter_mut().zip(&self.k[i * dk..]) {
                *w = beta * grown * k;
            }
        }
        // Forward substitution: row i takes the rows before it.
        for i in 1..n {
            let a = Matrix { values: &self.a[i * CHUNK..], stride: CHUNK };
            for (x, wide) in [(&mut self.u, width), (&mut self.w, wide_k)] {
                let (before, row) = x.split_at_mut(i * wide);
                combine::<V>(a, Matrix { values: before, stride: wide }, (1, i, wide), row, wide);
            }
        }
        // V' = U - W S, O = (exp(G) Q) S + (Q Kᵀ ∘ D) V'.
        self.w[..n * wide_k].iter_mut().for_each(|w| *w = -*w);
        let stored = Matrix { values: state, stride: width };
        combine::<V>(Matrix { values: &self.w, stride: wide_k }, stored, (n, dk, width), &mut self.u, width);
        for (q, g) in self.q.chunks_exact_mut(dk).zip(&self.g).take(n) {
            let grown = exponential(*g);
            q.iter_mut().for_each(|q| *q *= grown);
        }
        self.o[..n * width].fill(0.0);
        combine::<V>(Matrix { values: &self.q, stride: dk }, stored, (n, dk, width), &mut self.o, width);
        let values = Matrix { values: &self.u, stride: width };
        combine::<V>(Matrix { values: &self.qk, stride: CHUNK }, values, (n, n, width), &mut self.o, width);
        // S ← exp(G_C) S + (exp(G_C - G) K)ᵀ V'.
        let last = self.g[n - 1];
        for j in 0..n {
            let grown = exponential(last - self.g[j]);
            for i in 0..dk {
                self.kt[i * CHUNK + j] = grown * self.k[j * dk + i];
            }
        }
        let all = exponential(last);
        state.iter_mut().for_each(|s| *s *= all);
        combine::<V>(Matrix { values: &self.kt, stride: CHUNK }, values, (dk, n, width), state, width);
    }
}
