//! How long a build takes on this machine, from a few milliseconds of each encoder.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::{CalibratedFrom, Module, Plan, STRIP_ELEMENTS};
use crate::codec::{self, CodecSpec, Matrix};
use crate::digest::Hasher;
use crate::isa::Isa;
use crate::numeric::dot::{Strided, multiply};
use crate::quant::{GPTQ_REFIT, RowLoss, Rows, base, quantizer, weighs};
use crate::recipe::Activations;
use crate::tensor::Float;

/// Time that a build should take, if storage keeps up.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct Estimate {
    /// Encoding, over all threads.
    pub encode_s: f64,
    /// Digests of files, tensors and planes, over all threads.
    pub digest_s: f64,
    /// Calibration, over all threads: operations counted, at the rate of products here.
    pub calibrate_s: f64,
    /// All of it, divided by the threads.
    pub total_s: f64,
}

/// Measures and adds up.
pub fn estimate(plan: &Plan) -> Estimate {
    let mut work: BTreeMap<(CodecSpec, &'static str), u64> = BTreeMap::new();
    for module in &plan.modules {
        *work.entry((module.assignment.codec, module.assignment.encoder)).or_default() += module.weights();
    }
    let encode_s = work
        .iter()
        .map(|((codec, encoder), weights)| *weights as f64 / weights_per_second(*codec, base(encoder), plan))
        .sum();
    // Every source byte goes into a file's digest and a tensor's at once; every stored one into a plane's and
    // later into its file's.
    let (source, stored) = (plan.sizes.source_bytes as f64, plan.sizes.weight_file_bytes as f64);
    let (one, both) = bytes_digested_per_second();
    let digest_s = source / both + 2.0 * stored / one;
    let calibrate_s = calibration_operations(plan) / operations_per_second(plan.isa);
    let total_s = (encode_s + digest_s + calibrate_s) / plan.threads as f64;
    Estimate { encode_s, digest_s, calibrate_s, total_s }
}

/// Multiplications and additions of a calibration; 0 without one.
///
/// T tokens through all layers (2 operations a weight), H of every input (T K²), a factor (K³ / 3) and a search for N rows:
/// losses and feedback come to 8 N K², two sweeps to as much again.
fn calibration_operations(plan: &Plan) -> f64 {
    let Some(from) = &plan.calibration else { return 0.0 };
    let wanted = &plan.recipe.calibration;
    let tokens = match from.from {
        CalibratedFrom::Text => f64::from(wanted.rows) * f64::from(wanted.context),
        CalibratedFrom::Hessians => 0.0,
    };
    let passes = if wanted.activations == Activations::Sequential { 2.0 } else { 1.0 };
    let in_layers = plan.modules.iter().filter(|module| module.computes);
    let weights: u64 = in_layers.map(Module::weights).sum();
    let weighed = plan.modules.iter().filter(|module| weighs(module.assignment.encoder));
    let searches = weighed.map(|module| {
        let (rows, columns) = (module.rows as f64, module.work.row_elements as f64);
        let each = if module.assignment.encoder == GPTQ_REFIT { 16.0 } else { 8.0 };
        tokens * columns * columns + columns.powi(3) / 3.0 + each * rows * columns * columns
    });
    2.0 * passes * tokens * weights as f64 + searches.sum::<f64>()
}

/// Of products of f32 on one thread.
fn operations_per_second(isa: Isa) -> f64 {
    const ROWS: usize = 64;
    const COLUMNS: usize = 512;
    let values: Vec<f32> = (0..ROWS * COLUMNS).map(|i| ((i * 37) % 101) as f32 / 101.0 - 0.5).collect();
    let side = Strided { values: &values, stride: COLUMNS, rows: ROWS };
    let mut out = vec![0.0; ROWS * ROWS];
    rate(|| multiply(side, side, COLUMNS, &mut out, ROWS, isa)) * (2 * ROWS * ROWS * COLUMNS) as f64
}

fn weights_per_second(codec: CodecSpec, encoder: &'static str, plan: &Plan) -> f64 {
    const ROW: usize = 512;
    let rows = STRIP_ELEMENTS / ROW;
    let matrix = Matrix { out_features: rows as u64, in_features: ROW as u64 };
    // A sawtooth: no group is constant, and no two neighbours are equal.
    let values: Vec<f32> = (0..STRIP_ELEMENTS).map(|i| ((i * 37) % 101) as f32 / 101.0 - 0.5).collect();
    let (Some(quantizer), Ok(planes)) = (quantizer(encoder), codec::codec(codec).planes(matrix, Float::Bf16))
    else {
        return f64::INFINITY;
    };
    let mut buffers: Vec<Vec<u8>> =
        planes.iter().map(|plane| vec![0; plane.bytes_of(plane.begun(0..rows as u64))]).collect();
    let mut losses = vec![RowLoss::default(); rows];
    let rate = rate(|| {
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        let rows = Rows { values: &values, in_features: ROW, float: Float::Bf16, ahead: &[] };
        // The values are finite and small, so no refusal is possible.
        let _ = quantizer.fit(codec, rows, plan.isa, &mut slices, &mut losses);
    });
    rate * STRIP_ELEMENTS as f64
}

/// Of one digest, and of two over the same bytes.
fn bytes_digested_per_second() -> (f64, f64) {
    let block = vec![0x5a; 1 << 18];
    let (mut first, mut second) = (Hasher::default(), Hasher::default());
    let one = rate(|| first.update(&block));
    let both = rate(|| Hasher::update_both(&mut first, &mut second, &block));
    (one * block.len() as f64, both * block.len() as f64)
}

/// Calls per second, from the fastest of several calls within about five milliseconds.
fn rate(mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    let mut fastest = Duration::MAX;
    for round in 0.. {
        let before = Instant::now();
        call();
        fastest = fastest.min(before.elapsed());
        if round >= 2 && start.elapsed() > Duration::from_millis(5) {
            break;
        }
    }
    1.0 / fastest.as_secs_f64().max(1e-9)
}
