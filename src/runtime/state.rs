//! What a sequence carries from token to token.
//!
//! | layer | carries | roll back |
//! | --- | --- | --- |
//! | attention | keys and values of every token, in pages | cut off |
//! | DeltaNet | the last K - 1 raw rows of the convolution, and a matrix per value head | only inside a trial |
//!
//! A trial ([`State::begin_trial`]) is a pass whose last tokens may be taken back: each DeltaNet layer keeps its
//! state from before and the pass's inputs to the recurrence, which are small, and [`State::keep`] runs the recurrence
//! again over the tokens that stay. The same steps give the same bits, as if the others had never been there.

use super::RuntimeError;
use crate::arch::DecoderConfig;
use crate::arch::decoder::{AttentionConfig, DeltaNetConfig, MixerKind};
use crate::backend::cpu::{Cpu, DeltaInput, PAGE, Page, state_width};
use crate::numeric::lanes::LANES;

/// The state of one sequence.
#[derive(Debug, Clone)]
pub struct State {
    /// One per layer.
    pub(super) layers: Vec<LayerState>,
    /// Tokens that went through.
    pub(super) tokens: usize,
    trial: Option<usize>,
}

/// What one layer carries.
#[derive(Debug, Clone)]
pub enum LayerState {
    /// Keys and values.
    Attention(KvCache),
    /// Convolution and recurrence.
    DeltaNet(Box<DeltaState>),
}

impl LayerState {
    /// Before the first token.
    pub fn new(kind: MixerKind, config: &DecoderConfig) -> Self {
        match (kind, config.delta_net) {
            (MixerKind::DeltaNet, Some(delta)) => LayerState::DeltaNet(Box::new(DeltaState::new(delta))),
            _ => LayerState::Attention(KvCache::new(&config.attention)),
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        match self {
            LayerState::Attention(cache) => cache.bytes(),
            LayerState::DeltaNet(state) => (4 * (state.conv.len() + state.matrix.len())) as u64,
        }
    }
}

impl State {
    /// Before the first token.
    pub fn new(config: &DecoderConfig) -> Self {
        let layers = config.layers.iter().map(|kind| LayerState::new(*kind, config)).collect();
        Self { layers, tokens: 0, trial: None }
    }

    /// Tokens that went through.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// What layer `layer` carries.
    pub fn layer(&self, layer: usize) -> Option<&LayerState> {
        self.layers.get(layer)
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(LayerState::bytes).sum()
    }

    /// From here on, until [`State::keep`], tokens may be taken back. One pass only.
    pub fn begin_trial(&mut self) {
        self.trial = Some(self.tokens);
        for layer in &mut self.layers {
            if let LayerState::DeltaNet(state) = layer {
                state.trial = Some(Box::new(Trial {
                    conv: state.conv.clone(),
                    matrix: state.matrix.clone(),
                    rows: Vec::new(),
                    input: DeltaInput::default(),
                }));
            }
        }
    }

    /// Ends the trial and keeps its first `tokens` tokens.
    ///
    /// # Panics
    /// If no trial was begun, or it has fewer tokens.
    pub fn keep(&mut self, cpu: &Cpu, tokens: usize) {
        let start = self.trial.take().expect("a trial was begun");
        assert!(start + tokens <= self.tokens, "the trial has {} tokens", self.tokens - start);
        let all = start + tokens == self.tokens;
        self.tokens = start + tokens;
        for layer in &mut self.layers {
            match layer {
                LayerState::Attention(cache) => cache.truncate(self.tokens),
                LayerState::DeltaNet(state) => {
                    let trial = state.trial.take().expect("begun in every layer");
                    if !all {
                        state.replay(cpu, *trial, tokens);
                    }
                }
            }
        }
    }

    /// Forgets all tokens after the first `tokens`.
    ///
    /// # Errors
    /// [`RuntimeError::CannotTruncate`] if a layer's state cannot be taken back: a recurrent layer's can only
    /// be dropped as a whole.
    pub fn truncate(&mut self, tokens: usize) -> Result<(), RuntimeError> {
        let recurrent = self.layers.iter().any(|layer| matches!(layer, LayerState::DeltaNet(_)));
        if recurrent && tokens != self.tokens && tokens != 0 {
            return Err(RuntimeError::CannotTruncate { tokens: self.tokens, to: tokens });
        }
        self.tokens = self.tokens.min(tokens);
        for layer in &mut self.layers {
            match layer {
                LayerState::Attention(cache) => cache.truncate(tokens),
                LayerState::DeltaNet(state) if tokens == 0 => **state = DeltaState::new(state.config),
                LayerState::DeltaNet(_) => {}
            }
        }
        Ok(())
    }
}

/// Keys and values of one attention layer, f32.
#[derive(Debug, Clone)]
pub struct KvCache {
    kv_heads: usize,
    head_dim: usize,
    pages: Vec<Page>,
    tokens: usize,
}

impl KvCache {
    /// An empty cache.
    pub fn new(config: &AttentionConfig) -> Self {
        Self { kv_heads: config.kv_heads, head_dim: config.head_dim, pages: Vec::new(), tokens: 0 }
    }

    /// Tokens held.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The pages, the last one partly filled.
    pub fn pages(&self) -> &[Page] {
        &self.pages
    }

    /// Appends rows: keys, rotated, and values, both [T, G · Dh].
    pub fn append(&mut self, keys: &[f32], values: &[f32]) {
        let (width, wide) = (self.kv_heads * self.head_dim, self.head_dim.next_multiple_of(LANES));
        for (k, v) in keys.chunks_exact(width).zip(values.chunks_exact(width)) {
            if self.tokens == self.pages.len() * PAGE {
                self.pages.push(Page {
                    keys: vec![0.0; PAGE * width].into(),
                    values: vec![0.0; PAGE * self.kv_heads * wide].into(),
                });
            }
            let (page, at) = (self.tokens / PAGE, self.tokens % PAGE);
            self.pages[page].keys[at * width..][..width].copy_from_slice(k);
            let row = &mut self.pages[page].values[at * self.kv_heads * wide..][..self.kv_heads * wide];
            for (to, from) in row.chunks_exact_mut(wide).zip(v.chunks_exact(self.head_dim)) {
                to[..self.head_dim].copy_from_slice(from);
            }
            self.tokens += 1;
        }
    }

    /// Forgets all after the first `tokens` tokens.
    pub fn truncate(&mut self, tokens: usize) {
        self.tokens = self.tokens.min(tokens);
        self.pages.truncate(self.tokens.div_ceil(PAGE));
    }

    fn bytes(&self) -> u64 {
        self.pages.iter().map(|page| 4 * (page.keys.len() + page.values.len()) as u64).sum()
    }
}

/// Convolution history and recurrent matrices of one DeltaNet layer, f32.
#[derive(Debug, Clone)]
pub struct DeltaState {
    config: DeltaNetConfig,
    /// The last K - 1 rows before the convolution, oldest first.
    pub(super) conv: Vec<f32>,
    /// [Nv, dk, dv], rows of [`state_width`].
    pub(super) matrix: Vec<f32>,
    trial: Option<Box<Trial>>,
}

#[derive(Debug, Clone)]
struct Trial {
    conv: Vec<f32>,
    matrix: Vec<f32>,
    /// The pass's rows before the convolution.
    rows: Vec<f32>,
    input: DeltaInput,
}

impl DeltaState {
    fn new(config: DeltaNetConfig) -> Self {
        let channels = channels(&config);
        Self {
            config,
            conv: vec![0.0; (config.kernel - 1) * channels],
            matrix: vec![0.0; config.value_heads * config.key_dim * state_width(&config)],
            trial: None,
        }
    }

    /// Whether the pass may be taken back.
    pub(super) fn on_trial(&self) -> bool {
        self.trial.is_some()
    }

    /// Keeps what [`State::keep`] needs.
    pub(super) fn record(&mut self, rows: &[f32], input: &DeltaInput) {
        if let Some(trial) = &mut self.trial {
            trial.rows = rows.to_vec();
            trial.input = input.clone();
        }
    }

    fn replay(&mut self, cpu: &Cpu, trial: Trial, tokens: usize) {
        let Trial { conv, matrix, rows, input } = trial;
        let width = channels(&self.config);
        let mut history = conv;
        history.extend_from_slice(&rows[..tokens * width]);
        self.conv = history.split_off(history.len() - (self.config.kernel - 1) * width);
        self.matrix = matrix;
        cpu.delta_steps(&self.config, &input, 0..tokens, &mut self.matrix);
    }

    /// The recurrent state [Nv, dk, dv] without padding.
    pub fn matrices(&self) -> Vec<f32> {
        let rows = self.matrix.chunks_exact(state_width(&self.config));
        rows.flat_map(|row| &row[..self.config.value_dim]).copied().collect()
    }

    /// The last K - 1 rows before the convolution [K - 1, C], oldest first.
    pub fn history(&self) -> &[f32] {
        &self.conv
    }
}

/// Channels of the convolution: 2 Nk dk + Nv dv.
pub fn channels(config: &DeltaNetConfig) -> usize {
    2 * config.key_heads * config.key_dim + config.value_heads * config.value_dim
}
