//! A model larger than memory, layer by layer over many rows.
//!
//! All sequences of a batch go through one layer before the next is touched: each weight is read once for all of
//! them, and its pages go back to the system after. What stays is the residual stream [rows, H] and, inside a layer,
//! the activations of [`super::ROWS`] rows at a time and the states of the sequences in this one layer.

use std::ops::Range;
use std::sync::Arc;

use super::head::final_hidden;
use super::layer::{Layer, Observer, Span};
use super::residual::Residual;
use super::state::LayerState;
use super::weights::Weights;
use super::{Head, ROWS, RuntimeError, check_context, check_finite, check_tokens, values_of_row};
use crate::backend::cpu::{Cpu, Rotation};
use crate::units::Bytes;

/// A batch on its way through a model.
#[derive(Debug)]
pub struct Stream<'a> {
    weights: &'a Weights,
    cpu: Arc<Cpu>,
    /// Tokens of each sequence.
    lengths: Vec<usize>,
    /// [rows, H]
    x: Residual,
    /// Layers done.
    layer: usize,
}

impl<'a> Stream<'a> {
    /// The embeddings of every sequence, one after the other.
    ///
    /// # Errors
    /// [`RuntimeError`] for an empty batch or sequence, ids out of range, and sequences longer than the context.
    pub fn new(weights: &'a Weights, cpu: Arc<Cpu>, sequences: &[Vec<u32>]) -> Result<Self, RuntimeError> {
        let rows: usize = sequences.iter().map(Vec::len).sum();
        Self::keeping(weights, cpu, sequences, Residual::in_memory(rows * weights.decoder.hidden))
    }

    /// The same, with the residual stream kept in `x`.
    ///
    /// # Errors
    /// As [`Stream::new`].
    ///
    /// # Panics
    /// If `x` does not have the batch's size.
    pub fn keeping(
        weights: &'a Weights,
        cpu: Arc<Cpu>,
        sequences: &[Vec<u32>],
        mut x: Residual,
    ) -> Result<Self, RuntimeError> {
        if sequences.is_empty() || sequences.iter().any(Vec::is_empty) {
            return Err(RuntimeError::NoTokens);
        }
        for tokens in sequences {
            check_tokens(&weights.decoder, tokens)?;
            check_context(&weights.decoder, tokens.len())?;
        }
        let root = weights.decoder.root;
        let rows: usize = sequences.iter().map(Vec::len).sum();
        assert_eq!(x.len(), rows * weights.decoder.hidden, "the residual stream of this batch");
        let tokens = sequences.iter().flatten().map(|token| *token as usize);
        for (row, token) in x.chunks_exact_mut(weights.decoder.hidden).zip(tokens) {
            weights.packed_rows(&format!("{root}.embed_tokens"), token..token + 1)?.decode(0..1, row);
        }
        weights.release(&format!("{root}.embed_tokens."));
        Ok(Self { weights, cpu, lengths: sequences.iter().map(Vec::len).collect(), x, layer: 0 })
    }

    /// A batch that has gone through `layer` layers already, with what its residual stream then was.
    ///
    /// # Panics
    /// If `x` does not have the batch's size.
    pub fn after(
        weights: &'a Weights,
        cpu: Arc<Cpu>,
        sequences: &[Vec<u32>],
        layer: usize,
        x: Residual,
    ) -> Self {
        let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
        let rows: usize = lengths.iter().sum();
        assert_eq!(x.len(), rows * weights.decoder.hidden, "the residual stream of this batch");
        Self { weights, cpu, lengths, x, layer }
    }

    /// Bytes that a batch holds for each token, from its first layer to its last.
    pub fn bytes_per_token(weights: &Weights) -> Bytes {
        Bytes(4 * weights.decoder.hidden as u64)
    }

    /// Bytes that a batch of `rows` tokens holds besides, inside a layer.
    pub fn bytes_inside(weights: &Weights, rows: usize) -> Bytes {
        Bytes(4 * (ROWS.min(rows) * values_of_row(&weights.decoder)) as u64)
    }

    /// Layers done.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// The residual stream, [rows, H].
    pub fn residual(&self) -> &[f32] {
        &self.x
    }

    /// Goes on from a residual stream that was kept after `layer` layers.
    ///
    /// # Panics
    /// If it does not have the batch's size.
    pub fn resume(&mut self, layer: usize, residual: impl Into<Residual>) {
        let residual = residual.into();
        assert_eq!(residual.len(), self.x.len(), "the residual stream of the same batch");
        (self.layer, self.x) = (layer, residual);
    }

    /// Gives up the residual stream.
    pub fn into_residual(self) -> Residual {
        self.x
    }

    /// Bytes of weights in layer `layer`.
    pub fn layer_bytes(&self, layer: usize) -> Bytes {
        self.weights.bytes_below(&self.path(layer))
    }

    fn path(&self, layer: usize) -> String {
        format!("{}.layers.{layer}.", self.weights.decoder.root)
    }

    /// The same batch, where it is now: to go on with other weights in a layer.
    pub fn fork(&self) -> Self {
        let (weights, cpu) = (self.weights, self.cpu.clone());
        Self { weights, cpu, lengths: self.lengths.clone(), x: self.x.to_vec().into(), layer: self.layer }
    }

    /// Takes the whole batch through the next layer.
    ///
    /// # Errors
    /// [`RuntimeError::NoSuchLayers`] after the last one; errors of the layer's small tensors.
    pub fn step(&mut self, observer: &mut dyn Observer) -> Result<(), RuntimeError> {
        let layer = self.open_next()?;
        self.step_through(&layer, observer);
        drop(layer);
        self.release_last();
        Ok(())
    }

    /// The weights of the next layer, for streams that are all before it.
    ///
    /// # Errors
    /// As [`Stream::step`].
    pub fn open_next(&self) -> Result<Layer, RuntimeError> {
        let config = &self.weights.decoder;
        let Some(kind) = config.layers.get(self.layer) else {
            let layers = config.layers.len();
            return Err(RuntimeError::NoSuchLayers { from: self.layer, to: self.layer + 1, layers });
        };
        Layer::open(self.weights, &self.cpu, &format!("{}.layers.{}", config.root, self.layer), *kind)
    }

    /// Takes the whole batch through `layer`, which is the next one.
    ///
    /// # Panics
    /// After the last layer.
    pub fn step_through(&mut self, layer: &Layer, observer: &mut dyn Observer) {
        let config = &self.weights.decoder;
        let kind = config.layers[self.layer];
        if self.layer == 0 {
            observer.residual(0, &self.x);
        }
        let mut row = 0;
        for batch in batches(&self.lengths, ROWS) {
            let mut states: Vec<LayerState> = batch.iter().map(|_| LayerState::new(kind, config)).collect();
            // Only a sequence longer than a pass is alone in its batch.
            let longest = batch.iter().max().copied().unwrap_or(0);
            for start in (0..longest).step_by(ROWS) {
                let mut rows = 0;
                let mut positions = Vec::new();
                let mut spans = Vec::new();
                for (length, state) in batch.iter().zip(&mut states) {
                    let len = ROWS.min(length - start);
                    positions.extend(start..start + len);
                    spans.push(Span { rows: rows..rows + len, position: start, state });
                    rows += len;
                }
                let rotation = Rotation::new(&config.attention.rope, positions.into_iter());
                let x = &mut self.x[row * config.hidden..(row + rows) * config.hidden];
                layer.forward(&self.cpu, x, &mut spans, &rotation, observer);
                row += rows;
            }
        }
        self.layer += 1;
        observer.residual(self.layer, &self.x);
    }

    /// Gives the pages of the layer that was last back.
    ///
    /// # Panics
    /// Before the first layer.
    pub fn release_last(&self) {
        self.weights.release(&self.path(self.layer - 1));
    }

    /// Final-normed hidden states of all rows, [rows, H].
    ///
    /// # Errors
    /// As [`Weights::vector`].
    pub fn final_hidden(&self) -> Result<Vec<f32>, RuntimeError> {
        final_hidden(self.weights, &self.cpu, &self.x)
    }

    /// The same of some rows.
    ///
    /// # Errors
    /// As [`Weights::vector`].
    pub fn final_hidden_of(&self, rows: Range<usize>) -> Result<Vec<f32>, RuntimeError> {
        let width = self.weights.decoder.hidden;
        final_hidden(self.weights, &self.cpu, &self.x[rows.start * width..rows.end * width])
    }

    /// Gives the logits of every row to `take`, some rows at a time: first row, values [rows, V].
    ///
    /// # Errors
    /// As [`Weights::vector`]; weights that make NaN or infinity.
    pub fn logits(&self, rows: usize, take: &mut dyn FnMut(usize, &[f32])) -> Result<(), RuntimeError> {
        let head = Head::open(self.weights, &self.cpu)?;
        let hidden = head.norm(&self.x);
        for (i, part) in hidden.chunks(rows * self.weights.decoder.hidden).enumerate() {
            let logits = head.logits(part);
            check_finite(self.weights, &logits, i * rows)?;
            take(i * rows, &logits);
        }
        Ok(())
    }
}

/// Consecutive sequences that go through a layer together: as many as fit in a pass of `most` rows, or one that does
/// not.
pub(super) fn batches(lengths: &[usize], most: usize) -> Vec<&[usize]> {
    let mut batches = Vec::new();
    let (mut start, mut rows) = (0, 0);
    for (i, length) in lengths.iter().enumerate() {
        if i > start && rows + length > most {
            batches.push(&lengths[start..i]);
            (start, rows) = (i, 0);
        }
        rows += length;
    }
    batches.push(&lengths[start..]);
    batches
}
