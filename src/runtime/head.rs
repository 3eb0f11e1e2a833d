//! What comes after the last layer: the final norm, and the matrix that makes logits of hidden states.

use std::ops::Range;
use std::sync::Arc;

use super::{RuntimeError, Weights};
use crate::backend::cpu::{Cpu, Input};
use crate::backend::{LinearOp, Packed};

/// Final-normed hidden states [rows, H] of a residual stream [rows, H], without the head, which may be far larger than
/// a layer.
///
/// # Errors
/// As [`Weights::vector`].
pub fn final_hidden(weights: &Weights, cpu: &Cpu, residual: &[f32]) -> Result<Vec<f32>, RuntimeError> {
    Ok(norm(cpu, &final_gain(weights)?, weights.decoder.eps, residual))
}

fn final_gain(weights: &Weights) -> Result<Vec<f32>, RuntimeError> {
    weights.vector(&format!("{}.norm.weight", weights.decoder.root))
}

fn norm(cpu: &Cpu, gain: &[f32], eps: f32, residual: &[f32]) -> Vec<f32> {
    let mut hidden = vec![0.0; residual.len()];
    cpu.rms_norm(residual, gain, eps, &mut hidden);
    hidden
}

/// The final norm and the head.
#[derive(Debug)]
pub struct Head {
    cpu: Arc<Cpu>,
    gain: Vec<f32>,
    eps: f32,
    op: Box<dyn LinearOp>,
}

impl Head {
    /// The head of a model.
    ///
    /// # Errors
    /// As [`Weights::vector`].
    pub fn open(weights: &Weights, cpu: &Arc<Cpu>) -> Result<Self, RuntimeError> {
        let gain = final_gain(weights)?;
        let op = cpu.prepare(&weights.head()?, false);
        Ok(Self { cpu: cpu.clone(), gain, eps: weights.decoder.eps, op })
    }

    /// The matrix alone, for hidden states that are normed already.
    pub fn of_matrix(matrix: &Packed, cpu: &Arc<Cpu>) -> Self {
        Self { cpu: cpu.clone(), gain: Vec::new(), eps: 0.0, op: cpu.prepare(matrix, true) }
    }

    /// The linear layer.
    pub fn op(&self) -> &dyn LinearOp {
        &*self.op
    }

    /// Final-normed hidden states [rows, H] of a residual stream [rows, H].
    ///
    /// # Panics
    /// If the stream does not hold whole rows, or after [`Head::of_matrix`].
    pub fn norm(&self, residual: &[f32]) -> Vec<f32> {
        norm(&self.cpu, &self.gain, self.eps, residual)
    }

    /// Logits [rows, V] of final-normed hidden states [rows, H]. They may hold NaN or infinity.
    pub fn logits(&self, hidden: &[f32]) -> Vec<f32> {
        let input = Input::new(hidden, self.op.in_features());
        let mut logits = vec![0.0; input.rows() * self.op.out_features()];
        self.cpu.linear(&input, &mut [(&*self.op, &mut logits)]);
        logits
    }

    /// Logits [rows, V] of rows `rows` of a residual stream [T, H].
    ///
    /// # Panics
    /// After [`Head::of_matrix`], or if the stream has no such rows.
    pub fn logits_of(&self, residual: &[f32], rows: Range<usize>) -> Vec<f32> {
        let width = self.op.in_features();
        self.logits(&self.norm(&residual[rows.start * width..rows.end * width]))
    }
}
