//! Values of a module's matrix, outside the pipeline.

use super::FoldError;
use crate::codec::CodecSpec;
use crate::encode::{Encoded, Scratch, encode_rows, release_rows};
use crate::plan::{Module, Plan};
use crate::quant::CAST;
use crate::stage::ModuleWork;
use crate::tensor::Float;

/// A module's work that ends in f32.
pub(super) fn unrounded(work: &ModuleWork) -> ModuleWork {
    let mut work = work.clone();
    (work.codec, work.float, work.encoder) = (CodecSpec::F32, Float::F32, CAST);
    (work.cast, work.solved) = (None, None);
    work
}

/// The whole matrix in f32, after the transforms of `work`.
pub fn values(plan: &Plan, module: &Module, work: &ModuleWork) -> Result<Vec<f32>, FoldError> {
    let mut all = Vec::with_capacity(module.weights() as usize);
    let (work, mut scratch) = (unrounded(work), Scratch::default());
    let mut start = 0;
    // A module of several runs in its tensor, such as the gates of all experts, is cut where they are.
    while start < module.rows {
        let end = module.panels.iter().find(|panel| panel.contains(&start)).map_or(module.rows, |p| p.end);
        let Encoded { planes, .. } = encode_rows(plan, module, &work, start..end, &mut scratch)?;
        let values = planes[0].as_chunks::<4>().0;
        all.extend(values.iter().map(|value| f32::from_le_bytes(*value)));
        release_rows(plan, module, &(start..end));
        start = end;
    }
    Ok(all)
}

/// The sum of squares of every row and of every column of a row-major matrix, in f64 and in the order of rows.
pub(super) fn squares(values: &[f32], columns: usize) -> (Vec<f64>, Vec<f64>) {
    let mut by_column = vec![0.0; columns];
    let by_row = values.chunks_exact(columns).map(|row| {
        let squares = row.iter().map(|value| f64::from(*value) * f64::from(*value));
        by_column.iter_mut().zip(squares).fold(0.0, |sum, (column, square)| {
            *column += square;
            sum + square
        })
    });
    (by_row.collect(), by_column)
}
