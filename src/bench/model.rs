//! How fast a model decodes and reads prompts, beside how fast memory is read, and what the fast path costs.
//!
//! Tokens are the model's own: a sequence drawn from it at temperature 1, so that the distance between the two
//! paths is measured where the model is used. Each figure is the median of some runs.

use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use super::memory::read_bandwidth;
use crate::backend::Precision;
use crate::backend::cpu::Cpu;
use crate::failure::Outcome;
use crate::isa::Isa;
use crate::numeric::divergence::divergence;
use crate::runtime::{Model, Want, Weights};
use crate::sample::{Sampler, Sampling};

/// What is measured.
#[derive(Debug, Clone)]
pub struct ModelBench {
    /// Threads of each measurement.
    pub threads: Vec<usize>,
    /// Kernels to use.
    pub isa: Isa,
    /// Tokens of a run.
    pub tokens: usize,
    /// Runs of each measurement.
    pub runs: usize,
    /// Paths to measure.
    pub precisions: Vec<Precision>,
}

/// One measurement.
#[derive(Debug, Clone, Serialize)]
pub struct ModelRate {
    /// Which path was asked for.
    pub path: Precision,
    /// Threads that worked.
    pub threads: usize,
    /// Tokens of a run.
    pub tokens: usize,
    /// Median over the runs.
    pub tokens_per_s: f64,
    /// Gigabytes (10^9) of weights read per second.
    pub weights_gb_per_s: f64,
    /// The same as a part of what these threads can read.
    pub of_bandwidth: f64,
}

/// How far the fast path is from the exact one.
#[derive(Debug, Clone, Serialize)]
pub struct Distance {
    /// Positions compared.
    pub tokens: usize,
    /// Mean of KL(exact || fast), in nats.
    pub mean_kl: f64,
    /// Its standard error.
    pub standard_error: f64,
    /// The largest.
    pub max_kl: f64,
    /// Part of the positions where both have the same likeliest token.
    pub top1_agreement: f64,
}

/// The result.
#[derive(Debug, Clone, Serialize)]
pub struct ModelReport {
    /// Kernels used.
    pub isa: String,
    /// Bytes of weights that one decoded token reads.
    pub bytes_per_token: u64,
    /// Linear layers that take each path when the fast one is asked for.
    pub fast_layers: usize,
    /// See [`ModelReport::fast_layers`].
    pub exact_layers: usize,
    /// Gigabytes (10^9) per second that each number of threads reads from memory.
    pub read_gb_per_s: Vec<(usize, f64)>,
    /// Measurements.
    pub rows: Vec<ModelRate>,
    /// Distance of the paths; none unless both were asked for.
    pub fast_against_exact: Option<Distance>,
}

/// Tokens decoded per second, one at a time.
///
/// # Errors
/// If the model refuses its own tokens.
pub fn decode(weights: &dyn Fn() -> Outcome<Weights>, bench: &ModelBench) -> Outcome<ModelReport> {
    measure(weights, bench, &|model, tokens| {
        let mut state = model.state();
        model.forward(&mut state, &tokens[..1], Want::Last)?;
        let start = Instant::now();
        for token in &tokens[1..] {
            model.forward(&mut state, &[*token], Want::Last)?;
        }
        Ok(((tokens.len() - 1) as f64, start.elapsed().as_secs_f64(), tokens.len() - 1))
    })
}

/// Tokens of a prompt read per second, all at once.
///
/// # Errors
/// If the model refuses its own tokens.
pub fn prefill(weights: &dyn Fn() -> Outcome<Weights>, bench: &ModelBench) -> Outcome<ModelReport> {
    measure(weights, bench, &|model, tokens| {
        let mut state = model.state();
        let start = Instant::now();
        model.forward(&mut state, tokens, Want::Last)?;
        Ok((tokens.len() as f64, start.elapsed().as_secs_f64(), tokens.len().div_ceil(512)))
    })
}

/// One run: tokens, seconds, how often all weights were read.
type Run = dyn Fn(&Model, &[u32]) -> Outcome<(f64, f64, usize)>;

fn measure(weights: &dyn Fn() -> Outcome<Weights>, bench: &ModelBench, run: &Run) -> Outcome<ModelReport> {
    let open = |threads, precision| Model::new(weights()?, Cpu::new(bench.isa, threads, precision));
    let most = bench.threads.iter().copied().max().unwrap_or(1);
    let exact = open(most, Precision::Exact)?;
    let tokens = drawn(&exact, bench.tokens)?;
    let mut report = ModelReport {
        isa: bench.isa.to_string(),
        bytes_per_token: exact.bytes_per_token(),
        fast_layers: 0,
        exact_layers: 0,
        read_gb_per_s: Vec::new(),
        rows: Vec::new(),
        fast_against_exact: None,
    };
    for &threads in &bench.threads {
        let bandwidth = read_bandwidth(threads);
        report.read_gb_per_s.push((threads, bandwidth / 1e9));
        for &path in &bench.precisions {
            let model = open(threads, path)?;
            let mut rates = Vec::new();
            for _ in 0..bench.runs {
                rates.push(run(&model, &tokens)?);
            }
            rates.sort_by(|a, b| (a.0 / a.1).total_cmp(&(b.0 / b.1)));
            let (count, seconds, passes) = rates[rates.len() / 2];
            let bytes = passes as f64 * report.bytes_per_token as f64 / seconds;
            report.rows.push(ModelRate {
                path,
                threads,
                tokens: count as usize,
                tokens_per_s: count / seconds,
                weights_gb_per_s: bytes / 1e9,
                of_bandwidth: bytes / bandwidth,
            });
        }
    }
    if bench.precisions.contains(&Precision::Fast) {
        let fast = open(most, Precision::Fast)?;
        let counts = fast.precisions();
        report.fast_layers = counts.get(&Precision::Fast).copied().unwrap_or(0);
        report.exact_layers = counts.get(&Precision::Exact).copied().unwrap_or(0);
        if bench.precisions.contains(&Precision::Exact) {
            report.fast_against_exact = Some(distance(&exact, &fast, &tokens)?);
        }
    }
    Ok(report)
}

/// `count` tokens drawn from the model, after its first.
fn drawn(model: &Model, count: usize) -> Outcome<Vec<u32>> {
    let sampling = Sampling { temperature: 1.0, ..Sampling::greedy() };
    let mut sampler = Sampler::new(sampling)?;
    let (mut state, mut tokens) = (model.state(), vec![0]);
    let count = count.min(model.config().context.unwrap_or(usize::MAX));
    while tokens.len() < count {
        let logits = model.forward(&mut state, &tokens[tokens.len() - 1..], Want::Last)?.logits;
        tokens.push(sampler.choose(&logits)?);
    }
    Ok(tokens)
}

fn distance(exact: &Model, fast: &Model, tokens: &[u32]) -> Outcome<Distance> {
    let (mut a, mut b) = (exact.state(), fast.state());
    let (mut kls, mut agree) = (Vec::new(), 0);
    for part in tokens.chunks(64) {
        let (p, q) = (exact.forward(&mut a, part, Want::All)?, fast.forward(&mut b, part, Want::All)?);
        let vocab = exact.config().vocab;
        for (p, q) in p.logits.chunks_exact(vocab).zip(q.logits.chunks_exact(vocab)) {
            let d =
                divergence(p, q, exact.cpu().isa).expect("the runtime refuses logits that are not finite");
            kls.push(d.kl);
            agree += usize::from(d.a_top == d.b_top);
        }
    }
    let count = kls.len() as f64;
    let mean = kls.iter().sum::<f64>() / count;
    let variance = kls.iter().map(|kl| (kl - mean) * (kl - mean)).sum::<f64>() / (count - 1.0).max(1.0);
    Ok(Distance {
        tokens: kls.len(),
        mean_kl: mean,
        standard_error: (variance / count).sqrt(),
        max_kl: kls.iter().copied().fold(0.0, f64::max),
        top1_agreement: agree as f64 / count,
    })
}

/// The largest cost of a batch that does not fit into memory, measured on some of its layers.
#[derive(Debug, Clone, Serialize)]
pub struct StreamReport {
    /// Sequences, and tokens of each.
    pub rows: (usize, usize),
    /// Layers of the model.
    pub layers: usize,
    /// Each layer that was run: number, seconds, bytes of weights.
    pub measured: Vec<(usize, f64, u64)>,
    /// Seconds for all layers, from the mean of each kind of mixer.
    pub projected_s: f64,
    /// Multiplications and additions of the linear layers per second, in 10^9.
    pub gflops: f64,
    /// Most resident memory, mapped pages included.
    pub peak_resident: crate::units::Bytes,
    /// Most anonymous memory.
    pub peak_anonymous: crate::units::Bytes,
}

/// Takes `rows` sequences of `tokens` tokens through layers `layers`, one layer at a time.
///
/// # Errors
/// [`crate::runtime::RuntimeError`].
pub fn stream(
    weights: &Weights,
    cpu: &Arc<Cpu>,
    (rows, tokens): (usize, usize),
    layers: std::ops::Range<usize>,
    done: &mut dyn FnMut(usize, f64),
) -> Outcome<StreamReport> {
    use crate::runtime::{RuntimeError, Stream};
    let all = weights.decoder.layers.len();
    if layers.is_empty() || layers.end > all {
        return Err(RuntimeError::NoSuchLayers { from: layers.start, to: layers.end, layers: all }.into());
    }
    let vocab = weights.decoder.vocab;
    // Any tokens do: the cost does not depend on them.
    let sequences: Vec<Vec<u32>> =
        (0..rows).map(|r| (0..tokens).map(|t| ((r * 7919 + t * 104_729) % vocab) as u32).collect()).collect();
    let mut batch = Stream::new(weights, cpu.clone(), &sequences)?;
    let residual = batch.residual().to_vec();
    batch.resume(layers.start, residual);
    let mut peak = crate::process::PeakMemory::default();
    let mut measured = Vec::new();
    for layer in layers {
        let bytes = batch.layer_bytes(layer).0;
        let start = Instant::now();
        batch.step(&mut ())?;
        let seconds = start.elapsed().as_secs_f64();
        peak.sample();
        measured.push((layer, seconds, bytes));
        done(layer, seconds);
    }
    let kinds = &weights.decoder.layers;
    let of_kind = |layer: usize| {
        let same = measured
            .iter()
            .filter(|(i, _, _)| std::mem::discriminant(&kinds[*i]) == std::mem::discriminant(&kinds[layer]));
        let seconds: Vec<f64> = same.map(|(_, seconds, _)| *seconds).collect();
        match seconds.len() {
            // No layer of this kind was run: the mean of all.
            0 => measured.iter().map(|(_, s, _)| s).sum::<f64>() / measured.len() as f64,
            n => seconds.iter().sum::<f64>() / n as f64,
        }
    };
    let projected_s = (0..all).map(of_kind).sum();
    // Two bytes a weight: this measures checkpoints, which are bf16 or f16.
    let flops: f64 = measured.iter().map(|(_, _, bytes)| *bytes as f64 * (rows * tokens) as f64).sum();
    Ok(StreamReport {
        rows: (rows, tokens),
        layers: all,
        projected_s,
        gflops: flops / measured.iter().map(|(_, s, _)| s).sum::<f64>() / 1e9,
        measured,
        peak_resident: peak.resident,
        peak_anonymous: peak.anonymous,
    })
}
