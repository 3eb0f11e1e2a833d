//! How fast trellis tiles are searched on each instruction set, and how near they come to Gaussian weights.
//!
//! Each tile is timed alone and a thread's rate is that of its median tile, so that time in which other processes hold
//! the processor does not count. The scalar search is the definition and slow: it is given few tiles.

use std::time::Instant;

use serde::Serialize;

use crate::codec::trellis::{Code, MAX_TILE, Normal, TrellisError};
use crate::isa::Isa;
use crate::quant::trellis::{Encoder, Options, Workspace};

/// Tiles of the scalar search, of each thread, at most.
const SCALAR_TILES: usize = 8;

/// What [`trellis`] measures.
#[derive(Debug, Clone)]
pub struct TrellisBench {
    /// Codes.
    pub codes: Vec<Code>,
    /// Bits of a weight: k.
    pub bits: Vec<u32>,
    /// Bits of a state: L.
    pub states: Vec<u32>,
    /// w of the first pass; T / 2 if none.
    pub window: Option<usize>,
    /// Tiles of 256 weights, over all threads.
    pub tiles: usize,
    /// Threads that search at once.
    pub threads: usize,
    /// Instruction sets, beside the scalar one.
    pub isas: Vec<Isa>,
    /// Also measure errors.
    pub mse: bool,
}

/// One trellis.
#[derive(Debug, Clone, Serialize)]
pub struct TrellisRates {
    /// As recipes write it.
    pub code: String,
    /// k.
    pub bits: u32,
    /// L.
    pub states: u32,
    /// g, by which weights are multiplied.
    pub scale: f32,
    /// One for each instruction set, the scalar one first.
    pub rates: Vec<TrellisRate>,
    /// Errors, if asked for.
    pub mse: Option<TrellisMse>,
}

/// One instruction set.
#[derive(Debug, Clone, Serialize)]
pub struct TrellisRate {
    /// Its name.
    pub isa: String,
    /// Millions of weights per second, over all threads.
    pub mweights_per_s: f64,
    /// The same, as a multiple of the scalar search's.
    pub of_scalar: f64,
}

/// Mean squared errors of Gaussian weights of unit variance.
#[derive(Debug, Clone, Serialize)]
pub struct TrellisMse {
    /// 4^-k: no code of k bits a weight has less.
    pub bound: f64,
    /// Weights as they are, g = 1.
    pub plain: f64,
    /// Of its mean over tiles.
    pub plain_standard_error: f64,
    /// Weights times g.
    pub scaled: f64,
    /// Of its mean over tiles.
    pub scaled_standard_error: f64,
    /// Tiles of both that were searched again in floating point.
    pub saturated: usize,
}

/// The result of [`trellis`].
#[derive(Debug, Clone, Serialize)]
pub struct TrellisReport {
    /// Threads that searched at once.
    pub threads: usize,
    /// Tiles of each measurement.
    pub tiles: usize,
    /// Weights of a tile.
    pub tile: usize,
    /// w of the first pass.
    pub window: usize,
    /// One for each code, k and L.
    pub trellises: Vec<TrellisRates>,
}

/// Measures every trellis; weights are the same for any threads.
///
/// # Errors
/// If there is no such trellis or window.
///
/// # Panics
/// If there are no tiles or threads, or this processor lacks an instruction set.
pub fn trellis(bench: &TrellisBench) -> Result<TrellisReport, TrellisError> {
    let mut trellises = Vec::new();
    for code in &bench.codes {
        for states in &bench.states {
            for bits in &bench.bits {
                trellises.push(one(bench, *code, *bits, *states)?);
            }
        }
    }
    let window = bench.window.unwrap_or(MAX_TILE / 2);
    Ok(TrellisReport { threads: bench.threads, tiles: bench.tiles, tile: MAX_TILE, window, trellises })
}

fn one(bench: &TrellisBench, code: Code, bits: u32, states: u32) -> Result<TrellisRates, TrellisError> {
    let encoder = Encoder::new(code, bits, states, MAX_TILE, Options { window: bench.window })?;
    let scale = code.operating_scale(bits, states)?;
    let few = bench.tiles.min(SCALAR_TILES * bench.threads);
    let scalar = rate(&pass(&encoder, scale, Isa::Scalar, few, bench.threads)?);
    let mut rates =
        vec![TrellisRate { isa: Isa::Scalar.to_string(), mweights_per_s: scalar, of_scalar: 1.0 }];
    let mut scaled = None;
    for isa in bench.isas.iter().filter(|isa| **isa != Isa::Scalar) {
        let threads = pass(&encoder, scale, *isa, bench.tiles, bench.threads)?;
        let mweights_per_s = rate(&threads);
        rates.push(TrellisRate { isa: isa.to_string(), mweights_per_s, of_scalar: mweights_per_s / scalar });
        scaled = Some(threads);
    }
    let mse = if bench.mse {
        let isa = Isa::best();
        let scaled = match scaled {
            Some(threads) => threads,
            None => pass(&encoder, scale, isa, bench.tiles, bench.threads)?,
        };
        let plain = pass(&encoder, 1.0, isa, bench.tiles, bench.threads)?;
        let saturated = scaled.iter().chain(&plain).map(|thread| thread.saturated).sum();
        let [(plain, plain_standard_error), (scaled, scaled_standard_error)] = [plain, scaled].map(mean);
        let bound = 0.25f64.powi(bits as i32);
        Some(TrellisMse { bound, plain, plain_standard_error, scaled, scaled_standard_error, saturated })
    } else {
        None
    };
    Ok(TrellisRates { code: code.to_string(), bits, states, scale, rates, mse })
}

/// What a thread found.
struct Searched {
    /// Seconds of each tile.
    times: Vec<f64>,
    /// Mean squared error of each tile.
    errors: Vec<f64>,
    saturated: usize,
}

/// Every thread's share of the tiles, in order.
fn pass(
    encoder: &Encoder,
    scale: f32,
    isa: Isa,
    tiles: usize,
    threads: usize,
) -> Result<Vec<Searched>, TrellisError> {
    let share = |thread: usize| tiles * thread / threads..tiles * (thread + 1) / threads;
    std::thread::scope(|scope| {
        let work = |thread| move || searched(encoder, scale, isa, share(thread));
        let workers: Vec<_> = (0..threads).map(|thread| scope.spawn(work(thread))).collect();
        workers.into_iter().map(|worker| worker.join().expect("a search does not panic")).collect()
    })
}

fn searched(
    encoder: &Encoder,
    scale: f32,
    isa: Isa,
    tiles: std::ops::Range<usize>,
) -> Result<Searched, TrellisError> {
    let mut workspace = Workspace::new();
    let (mut words, mut values) = (vec![0; encoder.words()], vec![0.0; encoder.tile()]);
    let mut found = Searched { times: Vec::new(), errors: Vec::new(), saturated: 0 };
    let (unit, g) = (encoder.codebook().code().unit(), f64::from(scale));
    for tile in tiles {
        let x: Vec<f32> = Normal::new(tile as u64).take(encoder.tile()).map(|x| x * scale).collect();
        let start = Instant::now();
        let outcome = encoder.encode(&mut workspace, &x, isa, &mut words, &mut values)?;
        found.times.push(start.elapsed().as_secs_f64());
        found.saturated += usize::from(outcome.saturated);
        let squares =
            x.iter().zip(&values).map(|(x, value)| (f64::from(*x) - f64::from(*value) / unit).powi(2));
        found.errors.push(squares.sum::<f64>() / (g * g * x.len() as f64));
    }
    Ok(found)
}

/// Millions of weights per second of all threads: each thread's median tile, added up.
fn rate(threads: &[Searched]) -> f64 {
    let rate = |thread: &Searched| {
        let mut times = thread.times.clone();
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).map_or(0.0, |seconds| MAX_TILE as f64 / seconds / 1e6)
    };
    threads.iter().map(rate).sum()
}

/// Mean of all tiles in order, and its standard error.
fn mean(threads: Vec<Searched>) -> (f64, f64) {
    let errors: Vec<f64> = threads.into_iter().flat_map(|thread| thread.errors).collect();
    let count = errors.len() as f64;
    let mean = errors.iter().sum::<f64>() / count;
    let variance = errors.iter().map(|error| (error - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
    (mean, (variance / count).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_trellis_is_measured_on_every_instruction_set_and_its_error_whatever_the_threads() {
        let bench = |threads| TrellisBench {
            codes: vec![Code::Bs12],
            bits: vec![2, 3],
            states: vec![10],
            window: Some(64),
            tiles: 5,
            threads,
            isas: Isa::available(),
            mse: true,
        };
        let [one, two] = [1, 2].map(|threads| trellis(&bench(threads)).unwrap());
        assert_eq!((one.trellises.len(), one.tile, one.window), (2, 256, 64));
        for (a, b) in one.trellises.iter().zip(&two.trellises) {
            assert_eq!(a.rates.len(), Isa::available().len());
            assert!(a.rates.iter().all(|rate| rate.mweights_per_s > 0.0 && rate.of_scalar > 0.0));
            let (a, b) = (a.mse.as_ref().unwrap(), b.mse.as_ref().unwrap());
            assert_eq!((a.plain, a.scaled), (b.plain, b.scaled));
            assert!(a.bound < a.scaled && a.scaled < 1.5 * a.bound, "{a:?}");
        }
        let mut none = bench(1);
        none.bits = vec![5];
        assert_eq!(trellis(&none).unwrap_err(), TrellisError::Bits { found: 5 });
    }
}
