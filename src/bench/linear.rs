//! How fast linear layers are, for every codec and on both paths, beside how fast memory is read.
//!
//! One row of activations, as in decoding, is bound by memory if the kernel is good; many, as in reading a prompt,
//! by arithmetic. With few rows the weights of each run come from memory: there are enough copies of them that no
//! cache holds all, and runs take them in turn. Each figure is the median of some runs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::memory::read_bandwidth;
use crate::backend::cpu::{Cpu, Input};
use crate::backend::{LinearOp, Packed, Precision, Stored};
use crate::codec::{CodecError, CodecSpec, Matrix, codec};
use crate::isa::Isa;
use crate::numeric::{bf16_from_f32, f16_from_f32};
use crate::tensor::{Dtype, Float};

/// Bytes of all copies of a weight: more than last-level caches hold.
const COPIES_BYTES: u64 = 192 << 20;

/// What [`linear`] measures.
#[derive(Debug, Clone)]
pub struct LinearBench {
    /// Threads of the team.
    pub threads: usize,
    /// Kernels to use.
    pub isa: Isa,
    /// N.
    pub out_features: usize,
    /// K.
    pub in_features: usize,
    /// Numbers of rows of activations: T.
    pub rows: Vec<usize>,
    /// How long each measurement takes at least; three runs at least.
    pub time: Duration,
}

/// One measurement.
#[derive(Debug, Clone, Serialize)]
pub struct LinearRate {
    /// As in a recipe's report: `affine-4g64`.
    pub codec: String,
    /// Which path.
    pub path: Precision,
    /// T.
    pub rows: usize,
    /// Billions of weights per second: N · K over the time of a run.
    pub gweights_per_s: f64,
    /// Gigabytes (10^9) of stored weights per second.
    pub gb_per_s: f64,
    /// The same, as a part of what these threads can read.
    pub of_bandwidth: f64,
    /// Billions of operations per second: 2 · T · N · K over the time of a run.
    pub gflop_per_s: f64,
}

/// The result of [`linear`].
#[derive(Debug, Clone, Serialize)]
pub struct LinearReport {
    /// Threads of the team.
    pub threads: usize,
    /// Kernels used.
    pub isa: String,
    /// N.
    pub out_features: usize,
    /// K.
    pub in_features: usize,
    /// Gigabytes (10^9) per second that these threads read from memory.
    pub read_gb_per_s: f64,
    /// For every codec, path and number of rows.
    pub rates: Vec<LinearRate>,
}

/// Measures every codec that `wanted` lets through, on the paths it has.
///
/// # Errors
/// If a codec's groups do not divide `in_features`.
///
/// # Panics
/// If a size is 0, or this processor has no such instruction set.
pub fn linear(bench: &LinearBench, wanted: impl Fn(CodecSpec) -> bool) -> Result<LinearReport, CodecError> {
    let codecs: Vec<CodecSpec> = CodecSpec::all().into_iter().filter(|spec| wanted(*spec)).collect();
    for spec in &codecs {
        codec(*spec).planes(matrix(bench.out_features, bench.in_features), Float::Bf16)?;
    }
    let bandwidth = read_bandwidth(bench.threads);
    let cpus = [Precision::Exact, Precision::Fast].map(|p| Cpu::new(bench.isa, bench.threads, p));
    let mut rates = Vec::new();
    for spec in codecs {
        let weight = weight(spec, bench.out_features, bench.in_features)?;
        let copies = (COPIES_BYTES / weight.bytes()).clamp(1, 256);
        let weights: Vec<Packed> = (0..copies).map(|_| copy(&weight)).collect();
        for cpu in &cpus {
            let ops: Vec<_> = weights.iter().map(|weight| cpu.prepare(weight, false)).collect();
            // The fast path of a codec that has none is the exact one.
            if ops[0].precision() != cpu.precision {
                continue;
            }
            for rows in &bench.rows {
                rates.push(rate(bench, cpu, &ops, spec, *rows, bandwidth));
            }
        }
    }
    Ok(LinearReport {
        threads: bench.threads,
        isa: bench.isa.to_string(),
        out_features: bench.out_features,
        in_features: bench.in_features,
        read_gb_per_s: bandwidth / 1e9,
        rates,
    })
}

fn rate(
    bench: &LinearBench,
    cpu: &Cpu,
    ops: &[Box<dyn LinearOp>],
    spec: CodecSpec,
    rows: usize,
    bandwidth: f64,
) -> LinearRate {
    const LEAST_RUNS: usize = 3;
    let (n, k) = (bench.out_features, bench.in_features);
    let mut random = Random(2);
    let x: Vec<f32> = (0..rows * k).map(|_| random.number()).collect();
    let mut y = vec![0.0; rows * n];
    let mut seconds = Vec::new();
    let begin = Instant::now();
    for op in ops.iter().cycle() {
        let start = Instant::now();
        cpu.linear(&Input::new(&x, k), &mut [(&**op, &mut y)]);
        seconds.push(start.elapsed().as_secs_f64());
        if seconds.len() > LEAST_RUNS && begin.elapsed() >= bench.time {
            break;
        }
    }
    std::hint::black_box(&y);
    // The first run touches pages and wakes threads.
    let seconds = &mut seconds[1..];
    seconds.sort_by(f64::total_cmp);
    let second = seconds[seconds.len() / 2];
    let (weights, bytes) = (n as f64 * k as f64, ops[0].bytes() as f64);
    LinearRate {
        codec: spec.to_string(),
        path: cpu.precision,
        rows,
        gweights_per_s: weights / second / 1e9,
        gb_per_s: bytes / second / 1e9,
        of_bandwidth: bytes / second / bandwidth,
        gflop_per_s: 2.0 * rows as f64 * weights / second / 1e9,
    }
}

fn matrix(n: usize, k: usize) -> Matrix {
    Matrix { out_features: n as u64, in_features: k as u64 }
}

/// A weight of random codes and parameters below 1.
fn weight(spec: CodecSpec, n: usize, k: usize) -> Result<Packed, CodecError> {
    let mut random = Random(1);
    let layout = codec(spec).planes(matrix(n, k), Float::Bf16)?;
    let mut planes = Vec::new();
    for plane in layout {
        let elements = plane.bytes_of(plane.begun(0..n as u64)) / plane.dtype.bytes() as usize;
        let bytes: Vec<u8> = match plane.dtype {
            Dtype::BF16 => (0..elements).flat_map(|_| bf16_from_f32(random.number()).to_le_bytes()).collect(),
            Dtype::F16 => (0..elements).flat_map(|_| f16_from_f32(random.number()).to_le_bytes()).collect(),
            // E8M0 and E4M3: powers of two, and small numbers.
            _ if plane.suffix == "scales" => (0..elements).map(|_| 0x30 + random.bits() as u8 % 16).collect(),
            // No byte is a NaN of E4M3.
            _ => (0..elements).flat_map(|_| (random.bits() as u32 & 0xbfbf_bfbf).to_le_bytes()).collect(),
        };
        let len = bytes.len();
        planes.push(Stored::Owned(Arc::new(bytes), 0..len));
    }
    Ok(Packed::whole(spec, Float::Bf16, n, k, planes))
}

/// The same in memory of its own.
fn copy(weight: &Packed) -> Packed {
    let plane = |plane: &Stored| {
        let bytes = Arc::new(plane.bytes().to_vec());
        let len = bytes.len();
        Stored::Owned(bytes, 0..len)
    };
    Packed { planes: weight.planes.iter().map(plane).collect(), ..weight.clone() }
}

struct Random(u64);

impl Random {
    /// Knuth's linear congruential generator; its upper bits.
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 24
    }

    /// In [-1, 1).
    fn number(&mut self) -> f32 {
        (self.bits() as u32 as i32) as f32 / (1u32 << 31) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_codec_is_measured_on_each_of_its_paths_with_each_number_of_rows() {
        let bench = LinearBench {
            threads: 2,
            isa: Isa::best(),
            out_features: 64,
            in_features: 128,
            rows: vec![1, 9],
            time: Duration::ZERO,
        };
        let report = linear(&bench, |_| true).unwrap();
        let paths = |spec: CodecSpec| match spec {
            CodecSpec::Affine { .. } | CodecSpec::Trellis(_) | CodecSpec::Mxfp4 | CodecSpec::Nvfp4 => 2,
            _ => 1,
        };
        let expected: usize = CodecSpec::all().into_iter().map(|spec| 2 * paths(spec)).sum();
        assert_eq!(report.rates.len(), expected);
        assert!(report.rates.iter().all(|rate| rate.gflop_per_s > 0.0 && rate.gb_per_s > 0.0));
        let odd = LinearBench { in_features: 100, ..bench };
        assert!(matches!(linear(&odd, |_| true), Err(CodecError::GroupDoesNotDivide { .. })));
    }
}
