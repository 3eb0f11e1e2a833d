//! Scales of inputs and outputs.

use std::sync::Mutex;

use super::Job;
use crate::codec::trellis::{Along, Scales};
use crate::numeric::{f16_from_f32, f16_to_f32};

/// How often rows and columns are divided by their root mean squares in turn.
const TURNS: usize = 4;

/// A scale that does not fit f16.
#[derive(Debug)]
pub(super) struct ScaleError {
    pub(super) row: usize,
    pub(super) value: f32,
}

/// Scales as a decoder reads them; ones where none are stored.
#[derive(Debug, Clone)]
pub(super) struct Vectors {
    /// [K]
    pub(super) inputs: Vec<f32>,
    /// [N]
    pub(super) outputs: Vec<f32>,
}

/// What [`find`] gives.
pub(super) struct Found {
    pub(super) vectors: Vectors,
    /// Scales that f16 rounds to zero though what they scale is not.
    pub(super) underflows: u64,
}

/// By how much feedback makes the deviation of targets exceed that of weights, for k bits.
///
/// Source: ExLlamaV3's measurements, by the trellis specification, section 2.2.
pub fn drift(bits: u32) -> f32 {
    match bits {
        1 => 1.08,
        2 => 1.018,
        3 => 1.004,
        _ => 1.0,
    }
}

/// f16 and back; `None` if it overflows.
pub(super) fn rounded(value: f32) -> Option<f32> {
    let half = f16_to_f32(f16_from_f32(value));
    half.is_finite().then_some(half)
}

/// Means of squares of some rows, with columns divided by `inputs`, `[rows]`; and of columns with rows divided by
/// `outputs`, `[K]`, as sums over the rows.
fn row_squares(values: &[f32], inputs: &[f64]) -> Vec<f64> {
    let k = inputs.len();
    let of = |row: &[f32]| {
        let mut sum = 0.0;
        for (w, s) in row.iter().zip(inputs) {
            let scaled = if *s > 0.0 { f64::from(*w) / s } else { 0.0 };
            sum += scaled * scaled;
        }
        sum / k as f64
    };
    values.chunks_exact(k).map(of).collect()
}

fn column_squares(values: &[f32], outputs: &[f64], k: usize) -> Vec<f64> {
    let mut sums = vec![0.0; k];
    for (row, s) in values.chunks_exact(k).zip(outputs) {
        if *s > 0.0 {
            for (sum, w) in sums.iter_mut().zip(row) {
                let scaled = f64::from(*w) / s;
                *sum += scaled * scaled;
            }
        }
    }
    sums
}

/// The scales of a matrix, from its weights alone.
pub(super) fn find(job: &Job<'_>, feedback: bool) -> Result<Found, ScaleError> {
    let (k, n, trellis) = (job.rows.in_features, job.count, job.trellis);
    let together = job.rows_together();
    let values = job.rows.values;
    let parts = n.div_ceil(together);
    let in_parts = |work: &(dyn Fn(usize, &[f32]) -> Vec<f64> + Sync)| -> Vec<Vec<f64>> {
        let done: Vec<Mutex<Vec<f64>>> = (0..parts).map(|_| Mutex::default()).collect();
        (job.parallel)(parts, &|p| {
            let rows = &values[p * together * k..((p + 1) * together * k).min(values.len())];
            *done[p].lock().expect("each part is visited once") = work(p * together, rows);
        });
        done.into_iter().map(|part| part.into_inner().expect("a panic ends the search")).collect()
    };
    let of_rows = |inputs: &[f64]| -> Vec<f64> {
        in_parts(&|_, rows| row_squares(rows, inputs)).concat().into_iter().map(f64::sqrt).collect()
    };
    let of_columns = |outputs: &[f64]| -> Vec<f64> {
        let mut sums = vec![0.0; k];
        for part in in_parts(&|first, rows| column_squares(rows, &outputs[first..], k)) {
            sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        sums.into_iter().map(|sum| (sum / n as f64).sqrt()).collect()
    };
    let (mut inputs, mut outputs) = (vec![1.0; k], vec![1.0; n]);
    match (trellis.scales(), trellis.along()) {
        (Scales::One, Along::Outputs) => inputs = of_columns(&outputs),
        (Scales::One, Along::Inputs) => outputs = of_rows(&inputs),
        (Scales::Both, _) => {
            for _ in 0..TURNS {
                outputs = of_rows(&inputs);
                inputs = of_columns(&outputs);
            }
        }
    }
    let g =
        trellis.code().operating_scale(trellis.bits(), trellis.states()).expect("the trellis was checked");
    let drift = if feedback { drift(trellis.bits()) } else { 1.0 };
    let unit = f64::from(drift) / (f64::from(g) * trellis.code().unit());
    // With two vectors the unit goes to both by a power of two that keeps either far from f16's ends.
    let (to_inputs, to_outputs) = match (trellis.scales(), trellis.along()) {
        (Scales::One, Along::Outputs) => (unit, 1.0),
        (Scales::One, Along::Inputs) => (1.0, unit),
        (Scales::Both, _) => {
            let middle = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
            let ratio = middle(&inputs) / (middle(&outputs) * unit);
            let half = if ratio.is_normal() && ratio > 0.0 { exponent(ratio) / 2 } else { 0 };
            (power(-half), unit * power(half))
        }
    };
    let mut underflows = 0;
    let mut stored = |values: &[f64], by: f64, is_row: bool| {
        let mut out = Vec::with_capacity(values.len());
        for (index, value) in values.iter().enumerate() {
            let exact = (value * by) as f32;
            let row = if is_row { index } else { 0 };
            let half = rounded(exact).ok_or(ScaleError { row, value: exact })?;
            underflows += u64::from(half == 0.0 && *value > 0.0);
            out.push(half);
        }
        Ok(out)
    };
    let ones = |count: usize| vec![1.0; count];
    let one = trellis.scales() == Scales::One;
    let vectors = Vectors {
        inputs: if one && trellis.along() == Along::Inputs {
            ones(k)
        } else {
            stored(&inputs, to_inputs, false)?
        },
        outputs: if one && trellis.along() == Along::Outputs {
            ones(n)
        } else {
            stored(&outputs, to_outputs, true)?
        },
    };
    Ok(Found { vectors, underflows })
}

/// ⌊log₂ value⌋ of a normal number.
fn exponent(value: f64) -> i32 {
    ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

/// 2^n
fn power(n: i32) -> f64 {
    f64::from_bits(((n.clamp(-1022, 1023) + 1023) as u64) << 52)
}
