//! How fast weights are encoded, beside how fast memory is copied.
//!
//! The source is bf16, larger than any last-level cache, and each thread works on its own part of it, in strips
//! that stay in its second-level cache: widen, then fit. The copy moves the same source bytes on the same
//! threads. Each strip of a mebiweight is timed alone and a thread's rate is that of its median strip, so that
//! time in which other processes hold the processor does not count.

pub mod factor;
pub mod linear;
pub mod memory;
pub mod model;
pub mod rotate;
pub mod trellis;

use std::time::Instant;

use serde::Serialize;

use crate::codec::{CodecSpec, Matrix, codec};
use crate::isa::Isa;
use crate::numeric::{narrow, widen};
use crate::quant::{Grain, QUANTIZERS, Quantizer, RowLoss, Rows};
use crate::tensor::Float;
use crate::units::Bytes;

/// Weights in a row, as in a model of middling width.
const IN_FEATURES: usize = 4096;

/// Rows widened and encoded at a time: 64 Ki weights.
const STRIP_ROWS: usize = 16;

/// Bytes of source that are timed together: a mebiweight.
const TIMED_BYTES: usize = 2 << 20;

/// What [`encode`] measures.
#[derive(Debug, Clone, Copy)]
pub struct EncodeBench {
    /// Threads that work at once.
    pub threads: usize,
    /// Kernels to use.
    pub isa: Isa,
    /// Bytes of the bf16 source, over all threads.
    pub source: Bytes,
    /// Passes over the source per row of the result, each after a copy of the source.
    pub passes: usize,
}

impl EncodeBench {
    /// A source that no cache holds, and enough passes to have hundreds of strips.
    pub fn new(threads: usize, isa: Isa) -> Self {
        Self { threads, isa, source: Bytes::mib(256), passes: 3 }
    }
}

/// The speed of one encoder.
#[derive(Debug, Clone, Serialize)]
pub struct EncodeRate {
    /// As in a recipe's report: `affine-4g64`.
    pub codec: String,
    /// `mlx`, `refit` or `cast`.
    pub encoder: &'static str,
    /// Millions of weights per second, over all threads, with the reported error.
    pub mweights_per_s: f64,
    /// Weights per second, as a part of the weights that memcpy copies per second.
    pub of_memcpy: f64,
}

/// The result of [`encode`].
#[derive(Debug, Clone, Serialize)]
pub struct EncodeReport {
    /// Threads that worked at once.
    pub threads: usize,
    /// Kernels used.
    pub isa: String,
    /// Bytes of the bf16 source.
    pub source: Bytes,
    /// Gigabytes (10^9) of source that memcpy copies per second, over all threads.
    pub memcpy_gb_per_s: f64,
    /// One row for every codec and encoder.
    pub rates: Vec<EncodeRate>,
}

/// Measures every encoder on every codec it accepts and `wanted` lets through.
///
/// # Panics
/// If the source holds less than 2 MiB per thread, or this processor has no such instruction set.
pub fn encode(bench: &EncodeBench, wanted: impl Fn(CodecSpec, &dyn Quantizer) -> bool) -> EncodeReport {
    let part_bytes = bench.source.0 as usize / bench.threads / TIMED_BYTES * TIMED_BYTES;
    assert!(part_bytes > 0, "at least {TIMED_BYTES} bytes per thread");
    let mut source = vec![0; part_bytes * bench.threads];
    fill(&mut source, bench.isa);
    let parts: Vec<&[u8]> = source.chunks_exact(part_bytes).collect();

    let mut copies: Vec<Vec<u8>> = parts.iter().map(|part| part.to_vec()).collect();
    let mut copied: Vec<Vec<f64>> = vec![Vec::new(); bench.threads];
    let mut timed = Vec::new();
    for quantizer in QUANTIZERS {
        for spec in CodecSpec::all() {
            // A trellis is measured by tiles, in `trellis`.
            if !quantizer.accepts(spec) || quantizer.grain(1) != Grain::Rows || !wanted(spec, *quantizer) {
                continue;
            }
            let mut encoded: Vec<Vec<f64>> = vec![Vec::new(); bench.threads];
            let mut workers: Vec<Worker> =
                parts.iter().map(|part| Worker::new(*quantizer, spec, part, bench.isa)).collect();
            for _ in 0..bench.passes {
                let work = parts.iter().zip(&mut copies).zip(&mut copied);
                together(work.map(|((part, copy), times)| move || times.extend(copy_pass(part, copy))));
                let work = workers.iter_mut().zip(&mut encoded);
                together(work.map(|(worker, times)| move || times.extend(worker.pass())));
            }
            timed.push((spec, quantizer.id(), bytes_per_second(&mut encoded)));
        }
    }

    let copy_rate = bytes_per_second(&mut copied);
    let rates = timed.into_iter().map(|(spec, encoder, rate)| EncodeRate {
        codec: spec.to_string(),
        encoder,
        mweights_per_s: rate / Float::Bf16.bytes() as f64 / 1e6,
        of_memcpy: rate / copy_rate,
    });
    EncodeReport {
        threads: bench.threads,
        isa: bench.isa.to_string(),
        source: Bytes(source.len() as u64),
        memcpy_gb_per_s: copy_rate / 1e9,
        rates: rates.collect(),
    }
}

/// Runs every piece of work on a thread of its own.
fn together(work: impl Iterator<Item = impl FnOnce() + Send>) {
    std::thread::scope(|scope| {
        for piece in work {
            scope.spawn(piece);
        }
    });
}

/// Source bytes per second of all threads: each thread's median strip, added up.
fn bytes_per_second(times: &mut [Vec<f64>]) -> f64 {
    let rate = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        TIMED_BYTES as f64 / times.get(times.len() / 2).copied().unwrap_or(f64::INFINITY)
    };
    times.iter_mut().map(rate).sum()
}

/// Copies `part`, and says how many seconds each strip took.
fn copy_pass(part: &[u8], copy: &mut [u8]) -> Vec<f64> {
    let strips = part.chunks_exact(TIMED_BYTES).zip(copy.chunks_exact_mut(TIMED_BYTES));
    let time = |(from, to): (&[u8], &mut [u8])| {
        let start = Instant::now();
        to.copy_from_slice(from);
        start.elapsed().as_secs_f64()
    };
    strips.map(time).collect()
}

/// One thread's part of the source, and room for one strip.
struct Worker<'a> {
    quantizer: &'static dyn Quantizer,
    spec: CodecSpec,
    isa: Isa,
    source: &'a [u8],
    values: Vec<f32>,
    losses: Vec<RowLoss>,
    planes: Vec<Vec<u8>>,
}

impl<'a> Worker<'a> {
    fn new(quantizer: &'static dyn Quantizer, spec: CodecSpec, source: &'a [u8], isa: Isa) -> Self {
        let rows = source.len() / Float::Bf16.bytes() / IN_FEATURES;
        let layout = codec(spec)
            .planes(Matrix { out_features: rows as u64, in_features: IN_FEATURES as u64 }, Float::Bf16)
            .expect("every group size divides a power of two this large");
        // The planes of the whole part, as a build would write them.
        let planes =
            layout.iter().map(|plane| vec![1; plane.bytes_of(plane.begun(0..rows as u64))]).collect();
        let values = vec![0.0; STRIP_ROWS * IN_FEATURES];
        Self { quantizer, spec, isa, source, values, losses: vec![RowLoss::default(); STRIP_ROWS], planes }
    }

    /// Encodes the part, and says how many seconds each [`TIMED_BYTES`] of it took.
    fn pass(&mut self) -> Vec<f64> {
        let strip_bytes = self.values.len() * Float::Bf16.bytes();
        let strips = self.source.len() / strip_bytes;
        let mut times = Vec::new();
        let mut start = Instant::now();
        for (s, strip) in self.source.chunks_exact(strip_bytes).enumerate() {
            let ahead = self.source.get((s + 1) * strip_bytes..(s + 2) * strip_bytes).unwrap_or_default();
            widen(Float::Bf16, strip, &mut self.values, self.isa);
            let rows = Rows { values: &self.values, in_features: IN_FEATURES, float: Float::Bf16, ahead };
            let mut slices: Vec<&mut [u8]> = self
                .planes
                .iter_mut()
                .map(|plane| {
                    let bytes = plane.len() / strips;
                    &mut plane[s * bytes..][..bytes]
                })
                .collect();
            self.quantizer
                .fit(self.spec, rows, self.isa, &mut slices, &mut self.losses)
                .expect("the source is small numbers");
            if ((s + 1) * strip_bytes).is_multiple_of(TIMED_BYTES) {
                times.push(start.elapsed().as_secs_f64());
                start = Instant::now();
            }
        }
        std::hint::black_box(&self.losses);
        times
    }
}

/// Fills `source` with bf16 numbers that are nearly Gaussian, of deviation 0.02.
fn fill(source: &mut [u8], isa: Isa) {
    let mut state = 1u64;
    let mut values = [0.0; IN_FEATURES];
    for row in source.chunks_exact_mut(IN_FEATURES * Float::Bf16.bytes()) {
        for value in &mut values {
            // Knuth's linear congruential generator; the sum of four uniform numbers is near enough to Gaussian.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let sum: i32 = (0..4).map(|i| i32::from((state >> (8 + 14 * i)) as u16 & 0x3fff) - 0x2000).sum();
            *value = sum as f32 * (0.02 / 9459.0);
        }
        narrow(Float::Bf16, &values, row, isa);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_encoder_is_measured_once_on_every_codec_it_accepts() {
        let mut bench = EncodeBench::new(2, Isa::best());
        (bench.source, bench.passes) = (Bytes(2 * TIMED_BYTES as u64), 1);
        let report = encode(&bench, |_, _| true);
        // 18 affine codecs by two encoders, three mxfp, four float.
        assert_eq!(report.rates.len(), 2 * 18 + 3 + 4);
        assert!(report.rates.iter().all(|rate| rate.mweights_per_s > 0.0));
    }
}
