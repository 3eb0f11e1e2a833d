//! The draft (MTP) head: guesses the token after the next.
//!
//! Row i pairs the trunk's hidden state h_i, after its final norm, with the embedding of token t_{i+1}:
//!
//! u = fc(concat[rms(embed(t_{i+1})), rms(h_i)]);  u = layers(u);  h'_i = rms(u);  logits = head(h'_i)
//!
//! and predicts t_{i+2}. Embedding and head are the trunk's. A further guess takes h'_i in the place of h_i.
//! Source: `vllm` `qwen3_5_mtp.py`; which of the trunk's hidden states is meant was settled by acceptance rates
//! (`llama.cpp` pull request 24025).

use std::sync::Arc;

use super::layer::{Layer, Linear, Span};
use super::state::LayerState;
use super::weights::Weights;
use super::{Model, RuntimeError};
use crate::arch::decoder::MixerKind;
use crate::backend::LinearOp;
use crate::backend::cpu::{Cpu, Input, Rotation};

/// The head's weights, ready to compute.
#[derive(Debug)]
pub struct Draft {
    embedding_norm: Vec<f32>,
    hidden_norm: Vec<f32>,
    fc: Linear,
    layers: Vec<Layer>,
    norm: Vec<f32>,
}

/// Keys and values of the head's own layers.
#[derive(Debug, Clone)]
pub struct DraftState {
    layers: Vec<LayerState>,
    tokens: usize,
}

impl DraftState {
    /// Rows that went through.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Forgets all after the first `tokens` rows.
    pub fn truncate(&mut self, tokens: usize) {
        self.tokens = self.tokens.min(tokens);
        for layer in &mut self.layers {
            if let LayerState::Attention(cache) = layer {
                cache.truncate(tokens);
            }
        }
    }
}

/// What the head gave for some rows.
#[derive(Debug, Clone)]
pub struct Drafted {
    /// h' of each row, [T, H].
    pub hidden: Vec<f32>,
    /// Logits of the last row, [V].
    pub logits: Vec<f32>,
}

impl Draft {
    pub(super) fn open(weights: &Weights, cpu: &Arc<Cpu>) -> Result<Self, RuntimeError> {
        let gain = |name: &str| weights.vector(&format!("mtp.{name}.weight"));
        let kind = MixerKind::Attention { window: None };
        let layer = |i: usize| Layer::open(weights, cpu, &format!("mtp.layers.{i}"), kind);
        Ok(Self {
            embedding_norm: gain("pre_fc_norm_embedding")?,
            hidden_norm: gain("pre_fc_norm_hidden")?,
            fc: Linear::open(weights, cpu, "mtp.fc", false)?,
            layers: (0..weights.decoder.draft_layers).map(layer).collect::<Result<_, _>>()?,
            norm: gain("norm")?,
        })
    }

    /// A state before the first row.
    pub fn state(&self, model: &Model) -> DraftState {
        let kind = MixerKind::Attention { window: None };
        let layers = self.layers.iter().map(|_| LayerState::new(kind, model.config())).collect();
        DraftState { layers, tokens: 0 }
    }

    /// Rows that pair `next` [T] with `hidden` [T, H].
    ///
    /// # Errors
    /// [`RuntimeError::NoSuchToken`]; weights that make NaN or infinity.
    ///
    /// # Panics
    /// If there is not one hidden state for each token, or there is none.
    pub fn forward(
        &self,
        model: &Model,
        state: &mut DraftState,
        next: &[u32],
        hidden: &[f32],
    ) -> Result<Drafted, RuntimeError> {
        let x = self.rows(model, state, next, hidden)?;
        let width = model.config().hidden;
        let logits = model.ends.head.logits(&x[x.len() - width..]);
        super::check_finite(&model.weights, &logits, state.tokens - 1)?;
        Ok(Drafted { hidden: x, logits })
    }

    /// [`Draft::forward`] with the logits of every row.
    ///
    /// # Errors
    /// As [`Draft::forward`].
    pub fn forward_all(
        &self,
        model: &Model,
        state: &mut DraftState,
        next: &[u32],
        hidden: &[f32],
    ) -> Result<Drafted, RuntimeError> {
        let x = self.rows(model, state, next, hidden)?;
        let logits = model.ends.head.logits(&x);
        super::check_finite(&model.weights, &logits, state.tokens - next.len())?;
        Ok(Drafted { hidden: x, logits })
    }

    fn rows(
        &self,
        model: &Model,
        state: &mut DraftState,
        next: &[u32],
        hidden: &[f32],
    ) -> Result<Vec<f32>, RuntimeError> {
        let (cpu, config) = (&model.cpu, model.config());
        let width = config.hidden;
        assert!(!next.is_empty() && hidden.len() == next.len() * width, "one hidden state for each token");
        super::check_tokens(config, next)?;
        let embedded = model.ends.embed(next);
        let mut normed = [vec![0.0; hidden.len()], vec![0.0; hidden.len()]];
        cpu.rms_norm(&embedded, &self.embedding_norm, config.eps, &mut normed[0]);
        cpu.rms_norm(hidden, &self.hidden_norm, config.eps, &mut normed[1]);
        let rows = normed[0].chunks_exact(width).zip(normed[1].chunks_exact(width));
        let both: Vec<f32> = rows.flat_map(|(e, h)| e.iter().chain(h)).copied().collect();
        let input = Input::new(&both, 2 * width);
        let mut x = vec![0.0; hidden.len()];
        cpu.linear(&input, &mut [(self.fc.op(), &mut x)]);
        let position = state.tokens;
        let rotation = Rotation::new(&config.attention.rope, position..position + next.len());
        for (layer, layer_state) in self.layers.iter().zip(&mut state.layers) {
            let mut spans = [Span { rows: 0..next.len(), position, state: layer_state }];
            layer.forward(cpu, &mut x, &mut spans, &rotation, &mut ());
        }
        state.tokens += next.len();
        let mut out = vec![0.0; x.len()];
        cpu.rms_norm(&x, &self.norm, config.eps, &mut out);
        Ok(out)
    }

    /// Bytes of weights that one row reads, without the shared head.
    pub fn bytes(&self) -> u64 {
        let layers = self.layers.iter().flat_map(Layer::linears);
        layers.map(LinearOp::bytes).sum::<u64>() + self.fc.op().bytes()
    }
}
