//! How fast second moments are summed and factored, beside the products that both are made of.

use std::time::Instant;

use serde::Serialize;

use crate::backend::cpu::Threads;
use crate::codec::{self, Matrix};
use crate::isa::Isa;
use crate::linalg::{Factor, NotPositive, Symmetric};
use crate::numeric::Parallel;
use crate::numeric::dot::{Strided, multiply};
use crate::quant::gptq::{GptqOptions, Weighted, solve};
use crate::quant::{RowLoss, quantizer};
use crate::tensor::Float;

/// Rows of activations that are summed at a time.
const ROWS: usize = 512;

/// What [`factor`] measures.
#[derive(Debug, Clone)]
pub struct FactorBench {
    /// Order of the matrix.
    pub n: usize,
    /// Threads of the team.
    pub threads: usize,
    /// Kernels.
    pub isa: Isa,
    /// Runs of each measurement; the median counts.
    pub runs: usize,
    /// Rows of a 4-bit weight whose codes are searched under the matrix, once; 0 for none.
    pub rows: usize,
}

/// The result of [`factor`].
#[derive(Debug, Clone, Serialize)]
pub struct FactorReport {
    /// Order of the matrix.
    pub n: usize,
    /// Threads of the team.
    pub threads: usize,
    /// Kernels used.
    pub isa: String,
    /// Billions of operations per second of 512 rows times an n x n weight, both in f32: 2 · 512 · n².
    pub products_gflop_per_s: f64,
    /// The same of a sum of 512 rows' products: 512 · n · (n + 1), the half that is stored.
    pub sums_gflop_per_s: f64,
    /// The same of a factorization: n³ / 3.
    pub factor_gflop_per_s: f64,
    /// Seconds of a factorization.
    pub factor_s: f64,
    /// Its rate as a part of that of the products.
    pub of_products: f64,
    /// Searches for codes.
    pub gptq: Option<GptqTimes>,
}

/// How long codes of a weight [rows, n] are searched, its factorization included.
#[derive(Debug, Clone, Serialize)]
pub struct GptqTimes {
    /// Rows of the weight.
    pub rows: usize,
    /// Seconds at the products' rate for what no search can leave out: rows · n² operations of feedback and n³ / 3 of a
    /// factorization.
    pub floor_s: f64,
    /// Seconds of `gptq`.
    pub gptq_s: f64,
    /// Seconds of `gptq-refit`, with its two sweeps.
    pub gptq_refit_s: f64,
}

/// Measures one order, with measurements in turn.
///
/// # Errors
/// If the random matrix is not positive definite, which its diagonal rules out.
///
/// # Panics
/// If n is 0, or this processor has no such instruction set.
pub fn factor(bench: &FactorBench) -> Result<FactorReport, NotPositive> {
    let &FactorBench { n, threads, isa, runs, rows } = bench;
    let team = Threads::new(threads);
    let parallel: Parallel<'_> = &|count, part| team.run(count, part);
    // Sixteen-bit numbers of a linear congruential generator.
    let mut state = 1u64;
    let x: Vec<f32> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 48) as f32 / 32_768.0 - 1.0
    })
    .take(ROWS * n)
    .collect();
    let mut h = Symmetric::new(n);
    let weight: Vec<f32> = x.iter().copied().cycle().take(n * n).collect();
    let mut out = vec![0.0; ROWS * n];
    let [mut products, mut sums, mut factors] = [const { Vec::new() }; 3];
    for _ in 0..runs.max(1) {
        let start = Instant::now();
        product(&x, &weight, n, &mut out, isa, &team);
        products.push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        h.add_products(&x, isa, parallel);
        sums.push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        std::hint::black_box(Factor::new(&h, ROWS as f64, isa, parallel)?);
        factors.push(start.elapsed().as_secs_f64());
    }
    std::hint::black_box(&out);
    let [products, sums, factor_s] = [products, sums, factors].map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    let order = n as f64;
    let products_gflop_per_s = 2.0 * ROWS as f64 * order * order / products / 1e9;
    let factor_gflop_per_s = order.powi(3) / 3.0 / factor_s / 1e9;
    let floor = rows as f64 * order * order + order.powi(3) / 3.0;
    let gptq = (rows > 0).then(|| {
        let values: Vec<f32> = x.iter().copied().cycle().skip(7).take(rows * n).collect();
        let time = |refit| searched(&values, &h, refit, isa, parallel);
        GptqTimes {
            rows,
            floor_s: floor / products_gflop_per_s / 1e9,
            gptq_s: time(false),
            gptq_refit_s: time(true),
        }
    });
    Ok(FactorReport {
        gptq,
        n,
        threads,
        isa: isa.to_string(),
        products_gflop_per_s,
        sums_gflop_per_s: ROWS as f64 * order * (order + 1.0) / sums / 1e9,
        factor_gflop_per_s,
        factor_s,
        of_products: factor_gflop_per_s / products_gflop_per_s,
    })
}

/// Seconds of a search for 4-bit codes in groups of 64.
///
/// # Panics
/// If n is no multiple of 64.
fn searched(values: &[f32], h: &Symmetric, refit: bool, isa: Isa, parallel: Parallel<'_>) -> f64 {
    let codec = "affine-4g64".parse().expect("a codec's name");
    let rows = values.len() / h.n();
    let matrix = Matrix { out_features: rows as u64, in_features: h.n() as u64 };
    let planes = codec::codec(codec).planes(matrix, Float::Bf16).expect("whole groups");
    let mut planes: Vec<Vec<u8>> =
        planes.iter().map(|plane| vec![0; plane.bytes_of(plane.begun(0..rows as u64))]).collect();
    let mut planes: Vec<&mut [u8]> = planes.iter_mut().map(Vec::as_mut_slice).collect();
    let mut losses = vec![RowLoss::default(); rows];
    let weighted = Weighted { values, in_features: h.n(), float: Float::Bf16, hessian: h, outputs: None };
    let options = GptqOptions { refit, ..GptqOptions::default() };
    let nearest = quantizer("mlx").expect("it is registered");
    let start = Instant::now();
    let found = solve(codec, weighted, nearest, &options, isa, parallel, &mut planes, &mut losses);
    std::hint::black_box(found.expect("small values have scales"));
    start.elapsed().as_secs_f64()
}

/// outᵀ = w xᵀ: 64 rows of w at a time.
fn product(x: &[f32], w: &[f32], n: usize, out: &mut [f32], isa: Isa, team: &Threads) {
    const TOGETHER: usize = 64;
    team.chunks(out, TOGETHER * ROWS, &|s, out| {
        let (w, rows) = (&w[s * TOGETHER * n..], out.len() / ROWS);
        let x = Strided { values: x, stride: n, rows: ROWS };
        multiply(Strided { values: w, stride: n, rows }, x, n, out, ROWS, isa);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rate_of_a_small_matrix_is_positive() {
        let report = factor(&FactorBench { n: 128, threads: 2, isa: Isa::best(), runs: 1, rows: 3 }).unwrap();
        let rates = [report.products_gflop_per_s, report.sums_gflop_per_s, report.factor_gflop_per_s];
        assert!(rates.iter().all(|rate| *rate > 0.0), "{report:?}");
        assert!((report.of_products * rates[0] / rates[2] - 1.0).abs() < 1e-9);
        let gptq = report.gptq.unwrap();
        assert!(
            gptq.rows == 3 && gptq.floor_s > 0.0 && gptq.gptq_s > 0.0 && gptq.gptq_refit_s > 0.0,
            "{gptq:?}"
        );
    }
}
