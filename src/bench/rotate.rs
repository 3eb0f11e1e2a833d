//! How fast rows and columns change their basis, beside a copy of the same bytes by the same thread.

use std::time::Instant;

use serde::Serialize;

use crate::isa::Isa;
use crate::transform::hadamard::{SignedHadamard, Size, signs};

/// Values that are rotated together: more than a second-level cache holds.
const VALUES: usize = 8 << 20;

/// What [`rotate`] measures.
#[derive(Debug, Clone)]
pub struct RotateBench {
    /// Widths of the rotation.
    pub widths: Vec<usize>,
    /// Passes of each measurement; the median counts.
    pub passes: usize,
    /// Kernels.
    pub isa: Isa,
}

/// The speed at one width, bytes of f32 values counted once.
#[derive(Debug, Clone, Serialize)]
pub struct RotateRate {
    /// n.
    pub width: usize,
    /// Orders of the Hadamard cores, the slowest index first.
    pub factors: Vec<u32>,
    /// The last factor is of order 2^k.
    pub sylvester_log2: u32,
    /// Gigabytes (10^9) of rows a second.
    pub rows_gb_per_s: f64,
    /// Gigabytes of columns a second, of a matrix of n rows.
    pub columns_gb_per_s: f64,
    /// Gigabytes that memcpy copies a second, between the passes of both.
    pub memcpy_gb_per_s: f64,
}

/// The result of [`rotate`].
#[derive(Debug, Clone, Serialize)]
pub struct RotateReport {
    /// Kernels used; one thread.
    pub isa: String,
    /// One row a width.
    pub rates: Vec<RotateRate>,
}

/// Measures the signed Hadamard rotation on one thread; a width without a matrix has no row.
pub fn rotate(bench: &RotateBench) -> RotateReport {
    let rates = bench.widths.iter().filter_map(|width| Some(rate(bench, *width, Size::of(*width)?)));
    RotateReport { isa: bench.isa.to_string(), rates: rates.collect() }
}

fn rate(bench: &RotateBench, width: usize, size: Size) -> RotateRate {
    // A sawtooth; both ways of the rotation keep its size.
    let columns = (VALUES / width).max(1);
    let mut values: Vec<f32> = (0..columns * width).map(|i| ((i * 37) % 101) as f32 / 101.0 - 0.5).collect();
    let mut copy = values.clone();
    let (factors, sylvester_log2) = (size.factors().to_vec(), size.sylvester_log2());
    let rotation = SignedHadamard::new(signs(42, 0, width), size);
    let (mut rows, mut across, mut copied) = (Vec::new(), Vec::new(), Vec::new());
    let mut scratch = Vec::new();
    let mut timed = |times: &mut Vec<f64>, work: &mut dyn FnMut(&mut [f32])| {
        let start = Instant::now();
        work(&mut values);
        times.push(start.elapsed().as_secs_f64());
    };
    for _ in 0..bench.passes.max(1) {
        timed(&mut rows, &mut |values| rotation.rotate_rows(values, width, bench.isa, &mut scratch));
        timed(&mut copied, &mut |values| copy.copy_from_slice(values));
        timed(&mut across, &mut |values| rotation.rotate_columns(values, columns, bench.isa, &mut scratch));
        timed(&mut copied, &mut |values| copy.copy_from_slice(values));
    }
    let gigabytes = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        4.0 * (columns * width) as f64 / times[times.len() / 2] / 1e9
    };
    RotateRate {
        width,
        factors,
        sylvester_log2,
        rows_gb_per_s: gigabytes(rows),
        columns_gb_per_s: gigabytes(across),
        memcpy_gb_per_s: gigabytes(copied),
    }
}
