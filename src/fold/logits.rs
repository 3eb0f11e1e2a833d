//! Logits of a model whose head may be larger than memory.

use std::sync::Arc;

use crate::backend::cpu::{Cpu, Input};
use crate::runtime::{RuntimeError, Weights};

/// Bytes of logits, and of rows of the head, that are held at a time.
const HELD: usize = 64 << 20;

/// Logits [rows, V] of final-normed hidden states [rows, H], some rows of the head at a time.
///
/// # Errors
/// As [`Weights::packed`].
pub fn logits(cpu: &Arc<Cpu>, weights: &Weights, hidden: &[f32]) -> Result<Vec<f32>, RuntimeError> {
    let (width, vocab) = (weights.decoder.hidden, weights.decoder.vocab);
    let rows = hidden.len() / width;
    let head = weights.head_path();
    let most = (HELD / (4 * width)).max(1);
    let mut all = vec![0.0; rows * vocab];
    for start in (0..vocab).step_by(most) {
        let end = (start + most).min(vocab);
        let op = cpu.prepare(&weights.packed_rows(&head, start..end)?, true);
        let mut part = vec![0.0; rows * (end - start)];
        cpu.linear(&Input::new(hidden, width), &mut [(&*op, &mut part)]);
        for (all, part) in all.chunks_exact_mut(vocab).zip(part.chunks_exact(end - start)) {
            all[start..end].copy_from_slice(part);
        }
    }
    Ok(all)
}

/// Gives the logits of each row of two models that share a vocabulary to `take`, some rows at a time.
///
/// `hidden` are final-normed hidden states [rows, H] of either.
///
/// # Errors
/// As [`logits`].
pub fn side_by_side(
    cpu: &Arc<Cpu>,
    models: [&Weights; 2],
    hidden: [&[f32]; 2],
    take: &mut dyn FnMut(&[f32], &[f32]),
) -> Result<(), RuntimeError> {
    let (width, vocab) = (models[0].decoder.hidden, models[0].decoder.vocab);
    let rows = (HELD / (4 * vocab)).max(1) * width;
    for (a, b) in hidden[0].chunks(rows).zip(hidden[1].chunks(rows)) {
        let (a, b) = (logits(cpu, models[0], a)?, logits(cpu, models[1], b)?);
        a.chunks(vocab).zip(b.chunks(vocab)).for_each(|(a, b)| take(a, b));
    }
    Ok(())
}
