//! Trellis codes that make up for each other's errors: LDLQ.
//!
//! ```text
//! minimise tr(E H Eᵀ),  E = W − decode          W: [N, K]   H: [K, K], second moments of what the layer reads
//! H + λ I = Mᵀ D M                              M unit lower triangular: `linalg::Factor`
//! ```
//!
//! Tiles along outputs hold one column each, so feedback is as fine as it can be: before column k is coded, its
//! target is w_k + Σ_{i<k} e_i M[k, i]. Tiles along inputs hold columns J of one row, which cannot make up for each
//! other: their target is w_J + y with M[J, J] y = M[J, before] e_before, which costs the share that
//! [`penalty`] gives.
//!
//! Then, `sweeps` times: [`refit`] moves the scales by least squares under H, and [`sweep`] codes each column again, for
//! all errors of the others as they now are. Neither raises tr(E (H + λ I) Eᵀ).
//!
//! With second moments of outputs, rows make up for each other too: [`two_sided`].
//!
//! **Scales.** W is divided by the root mean square of its rows and of its columns, in turn, until both are about 1; a
//! scale is that root mean square over the code's operating scale, rounded to f16, and tiles are coded against it as
//! rounded. Feedback makes targets larger than weights: [`drift`].
//!
//! **Guard.** As GPTQ's: a damping whose factor does not exist, whose values are not finite, whose greatest error,
//! times the root of its input's second moment, is above four times that of tiles without feedback, or whose loss
//! is above theirs is refused, and the next is tried.
//!
//! Sources: Chee et al., QuIP, arXiv 2307.13304; Tseng et al., QTIP, arXiv 2406.11235, section 3 and algorithm 5, for tiles
//! under feedback; ExLlamaV3, for scales of inputs and outputs, their refit and the drift.

mod pass;
mod refit;
mod scales;
mod sweep;
mod two_sided;

use std::sync::Mutex;

use super::gptq::{GptqOptions, GptqReport, LADDER, Refusal, Weighted, falling, proxy};
use super::loss::{mend, of_decoded};
use super::trellis::{Encoder, Options, Workspace};
use super::{Grain, QuantError, Quantizer, Repairs, RowLoss, Rows, check_sizes};
use crate::codec::trellis::{Along, Trellis, TrellisError};
use crate::codec::{CodecSpec, Matrix};
use crate::isa::Isa;
use crate::linalg::{Factor, NotPositive, Symmetric};
use crate::numeric::{Parallel, f16_from_f32, serial};

pub use scales::drift;
use scales::{ScaleError, Vectors};

/// Columns between two products with the errors of all columns before.
const PANEL: usize = 128;

/// By what feedback may exceed the greatest error of tiles without it.
const CEILING: f64 = 4.0;

/// A weight so many times as far out as the codebook reaches is counted: [`Repairs::out_of_reach`].
const FAR: f32 = 2.0;

/// Rows that are worked on together where tiles lie along inputs.
const ROWS: usize = 32;

/// Tiles without feedback: the trellis codec's nearest.
#[derive(Debug)]
pub struct Nearest;

impl Quantizer for Nearest {
    fn id(&self) -> &'static str {
        "trellis"
    }

    fn accepts(&self, codec: CodecSpec) -> bool {
        matches!(codec, CodecSpec::Trellis(_))
    }

    fn grain(&self, matrix_rows: u64) -> Grain {
        Grain::Blocks(matrix_rows)
    }

    fn fit(
        &self,
        codec: CodecSpec,
        rows: Rows<'_>,
        isa: Isa,
        planes: &mut [&mut [u8]],
        losses: &mut [RowLoss],
    ) -> Result<Repairs, QuantError> {
        nearest(codec, rows, isa, &serial, planes, losses)
    }
}

/// Fills the planes of one matrix without feedback.
///
/// # Errors
/// A scale that does not fit f16.
///
/// # Panics
/// If the codec is no trellis, or sizes differ from what it says.
pub fn nearest(
    codec: CodecSpec,
    rows: Rows<'_>,
    isa: Isa,
    parallel: Parallel<'_>,
    planes: &mut [&mut [u8]],
    losses: &mut [RowLoss],
) -> Result<Repairs, QuantError> {
    check_sizes(codec, rows, planes, losses);
    let job = Job::new(codec, rows, isa, parallel)?;
    let scales = job.scales(false)?;
    let mut state = State::new(&job, scales.vectors);
    let saturated = job.pass(None, &mut state).map_err(|error| job.moved(&error))?;
    job.store(&state, planes, losses);
    Ok(job.repairs(&state, scales.underflows, saturated))
}

/// Fills `planes` and `losses` of one matrix with codes that are good under `weighted.hessian`.
///
/// Bytes do not depend on `isa` or `parallel`. Beside its arguments this takes a factor as large as H (twice that with
/// `act_order`, or a refit), errors as large as the weight in f32 twice, and the codes twice; with `weighted.outputs` a
/// factor as large as that.
///
/// # Errors
/// A scale that does not fit f16.
///
/// # Panics
/// If the codec is no trellis, `hessian` is not of order K or `outputs` not of order N, or sizes differ from what the
/// codec says.
pub fn solve(
    codec: CodecSpec,
    weighted: Weighted<'_>,
    options: &GptqOptions,
    isa: Isa,
    parallel: Parallel<'_>,
    planes: &mut [&mut [u8]],
    losses: &mut [RowLoss],
) -> Result<(GptqReport, Repairs), QuantError> {
    let h = weighted.hessian;
    assert_eq!(h.n(), weighted.in_features, "the order of H");
    let g = weighted.outputs;
    assert!(g.is_none_or(|g| g.n() == losses.len()), "the order of G");
    let rows = Rows { values: weighted.values, in_features: h.n(), float: weighted.float, ahead: &[] };
    let mut repairs = nearest(codec, rows, isa, parallel, planes, losses)?;
    let job = Job::new(codec, rows, isa, parallel)?;
    let scales = job.scales(true)?;
    let diagonal = h.diagonal();
    let mean_of =
        |diagonal: &[f32]| diagonal.iter().map(|x| f64::from(*x)).sum::<f64>() / diagonal.len().max(1) as f64;
    let mean = mean_of(&diagonal);
    let stored: Vec<&[u8]> = planes.iter().map(|plane| &**plane).collect();
    let nearest_errors = job.errors_of(&stored);
    let nearest_loss = job.loss(&nearest_errors, weighted);
    let ceiling = CEILING * CEILING * job.worst(&nearest_errors, &diagonal);
    drop(nearest_errors);
    let mut report = GptqReport {
        damping: None,
        refused: Vec::new(),
        two_sided: g.is_some(),
        nearest_loss,
        loss: nearest_loss,
        energy: job.loss(rows.values, weighted),
        dead_columns: diagonal.iter().filter(|x| **x == 0.0).count() as u64,
        penalty: None,
    };
    if !(h.is_finite() && nearest_loss.is_finite() && g.is_none_or(Symmetric::is_finite)) {
        report.refused.push((options.damping, Refusal::NonFinite));
        return Ok((report, repairs));
    }
    let mean_of_outputs = g.map(|g| mean_of(&g.diagonal()));
    if mean == 0.0 || mean_of_outputs == Some(0.0) || losses.is_empty() {
        return Ok((report, repairs));
    }
    let order = options.act_order.then(|| falling(&diagonal));
    let permuted = order.as_ref().map(|order| h.permuted(order, parallel));
    let rungs = LADDER.into_iter().filter(|rung| *rung > options.damping);
    for rung in std::iter::once(options.damping).chain(rungs) {
        let damping = rung * mean;
        let factor = Factor::new(permuted.as_ref().unwrap_or(h), damping, isa, parallel);
        let refused = |NotPositive { index, pivot }| Refusal::NotPositive { index, pivot };
        let tried = factor.map_err(|NotPositive { index, pivot }| {
            refused(NotPositive { index: order.as_ref().map_or(index, |order| order[index]), pivot })
        });
        let tried = tried.and_then(|factor| {
            let mut state = State::new(&job, scales.vectors.clone());
            let feedback = pass::Feedback { factor: &factor, order: order.as_deref() };
            let of_outputs = match g.zip(mean_of_outputs) {
                Some((g, mean)) => Some(Factor::new(g, rung * mean, isa, parallel).map_err(refused)?),
                None => None,
            };
            let passed = match &of_outputs {
                Some(outputs) => job.two_sided_pass(feedback, outputs, &mut state),
                None => job.pass(Some(feedback), &mut state),
            };
            let mut saturated = passed.map_err(|_| Refusal::NonFinite)?;
            let penalty = penalty(&factor, job.columns_together());
            drop((factor, of_outputs));
            let sweeps = if g.is_some() { 0 } else { options.sweeps };
            for _ in 0..sweeps {
                job.refit(h, damping, &mut state);
                saturated += job.sweep(h, damping, &mut state).map_err(|_| Refusal::NonFinite)?;
            }
            if sweeps > 0 {
                job.refit(h, damping, &mut state);
            }
            let (loss, worst) = (job.loss(&state.errors, weighted), job.worst(&state.errors, &diagonal));
            if !loss.is_finite() {
                Err(Refusal::NonFinite)
            } else if worst > ceiling {
                Err(Refusal::ErrorCeiling { found: worst, ceiling })
            } else if loss > nearest_loss {
                Err(Refusal::WorseThanNearest { found: loss, nearest: nearest_loss })
            } else {
                Ok((state, loss, saturated, penalty))
            }
        });
        match tried {
            Ok((state, loss, saturated, penalty)) => {
                job.store(&state, planes, losses);
                repairs = job.repairs(&state, scales.underflows, saturated);
                (report.damping, report.loss) = (Some(rung), loss);
                report.penalty = (job.columns_together() > 1).then_some(penalty);
                break;
            }
            Err(refusal) => report.refused.push((rung, refusal)),
        }
    }
    Ok((report, repairs))
}

/// What `together` columns of a tile that cannot make up for each other cost: the expected loss over that of tiles of
/// one column, 1 + Σ D_k M[k, i]² / Σ D_k over pairs i < k of one tile.
pub fn penalty(factor: &Factor, together: usize) -> f64 {
    let (mut lost, mut all) = (0.0, 0.0);
    for (k, d) in factor.d().iter().enumerate() {
        let row = &factor.lower(k).values[k / together * together..k];
        lost += d * row.iter().map(|m| f64::from(*m) * f64::from(*m)).sum::<f64>();
        all += d;
    }
    1.0 + lost / all
}

/// A matrix and the trellis it is coded in.
struct Job<'a> {
    trellis: Trellis,
    rows: Rows<'a>,
    /// N.
    count: usize,
    encoder: Encoder,
    isa: Isa,
    parallel: Parallel<'a>,
}

/// Codes found so far.
struct State {
    vectors: Vectors,
    /// Rings, tile by tile as the format has them.
    words: Vec<u32>,
    /// w − decode, `[N, K]`.
    errors: Vec<f32>,
}

impl State {
    fn new(job: &Job<'_>, vectors: Vectors) -> Self {
        let tiles = job.rows.values.len() / job.encoder.tile();
        Self {
            vectors,
            words: vec![0; tiles * job.encoder.words()],
            errors: vec![0.0; job.rows.values.len()],
        }
    }
}

/// Rows that are worked on together.
struct Strip<'a> {
    /// The first.
    first: usize,
    values: &'a [f32],
    errors: &'a mut [f32],
    words: &'a mut [u32],
    workspace: Workspace,
}

impl<'a> Job<'a> {
    fn new(codec: CodecSpec, rows: Rows<'a>, isa: Isa, parallel: Parallel<'a>) -> Result<Self, QuantError> {
        let CodecSpec::Trellis(trellis) = codec else { panic!("LDLQ does not fill {codec}") };
        let count = rows.values.len() / rows.in_features;
        let matrix = Matrix { out_features: count as u64, in_features: rows.in_features as u64 };
        let tile = trellis.tile(matrix).expect("a plan asks only for codecs that fit the shape");
        let encoder =
            Encoder::new(trellis.code(), trellis.bits(), trellis.states(), tile, Options::default());
        let encoder = encoder.expect("a trellis codec has an encoder");
        Ok(Self { trellis, rows, count, encoder, isa, parallel })
    }

    /// Columns of a tile.
    fn columns_together(&self) -> usize {
        match self.trellis.along() {
            Along::Outputs => 1,
            Along::Inputs => self.encoder.tile(),
        }
    }

    fn rows_together(&self) -> usize {
        match self.trellis.along() {
            Along::Outputs => self.encoder.tile(),
            Along::Inputs => ROWS,
        }
    }

    fn scales(&self, feedback: bool) -> Result<scales::Found, QuantError> {
        scales::find(self, feedback)
            .map_err(|ScaleError { row, value }| QuantError::ScaleOverflow { row, value })
    }

    /// Runs `work` on every strip; what it returns, in order.
    fn strips<T: Send>(&self, state: &mut State, work: &(dyn Fn(&Vectors, Strip<'_>) -> T + Sync)) -> Vec<T> {
        let (k, rows) = (self.rows.in_features, self.rows_together());
        let State { vectors, words, errors } = state;
        let vectors = &*vectors;
        let words_together = rows * k / self.encoder.tile() * self.encoder.words();
        let parts = self
            .rows
            .values
            .chunks(rows * k)
            .zip(errors.chunks_mut(rows * k))
            .zip(words.chunks_mut(words_together));
        let strips: Vec<_> = parts
            .enumerate()
            .map(|(s, ((values, errors), words))| {
                let strip = Strip { first: s * rows, values, errors, words, workspace: Workspace::new() };
                Mutex::new((Some(strip), None))
            })
            .collect();
        (self.parallel)(strips.len(), &|s| {
            let mut slot = strips[s].lock().expect("each strip is visited once");
            let strip = slot.0.take().expect("each strip is visited once");
            slot.1 = Some(work(vectors, strip));
        });
        let done = strips.into_iter().map(|slot| slot.into_inner().expect("a panic ends the search").1);
        done.map(|done| done.expect("every strip is visited")).collect()
    }

    /// tr(E H Eᵀ), or tr(E H Eᵀ G), of errors that are `[N, K]`.
    fn loss(&self, errors: &[f32], weighted: Weighted<'_>) -> f64 {
        let (k, h) = (self.rows.in_features, weighted.hessian);
        if let Some(outputs) = weighted.outputs {
            return self.two_sided_loss(errors, h, outputs);
        }
        let parts: Vec<_> =
            errors.chunks(self.rows_together() * k).map(|part| Mutex::new((part, 0.0))).collect();
        (self.parallel)(parts.len(), &|s| {
            let mut part = parts[s].lock().expect("each part is visited once");
            part.1 = proxy(part.0, h, self.isa);
        });
        parts.into_iter().map(|part| part.into_inner().expect("a panic ends the search").1).sum()
    }

    /// The greatest h_k e², which is no sum and so has no order.
    fn worst(&self, errors: &[f32], diagonal: &[f32]) -> f64 {
        let of = |row: &[f32]| {
            let costs = row.iter().zip(diagonal).map(|(e, h)| f64::from(*e) * f64::from(*e) * f64::from(*h));
            costs.fold(0.0, f64::max)
        };
        errors.chunks_exact(self.rows.in_features).map(of).fold(0.0, f64::max)
    }

    fn repairs(&self, state: &State, scale_underflow: u64, path_saturated: u64) -> Repairs {
        let values = self.encoder.codebook().values();
        let far = FAR * values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let Vectors { inputs, outputs } = &state.vectors;
        let rows = self.rows.values.chunks_exact(self.rows.in_features).zip(outputs);
        let out_of_reach = rows.map(|(row, output)| {
            let is_far = |(w, input): (&f32, &f32)| {
                let reach = far * input * output;
                reach > 0.0 && w.abs() > reach
            };
            row.iter().zip(inputs).filter(|pair| is_far(*pair)).count() as u64
        });
        Repairs { scale_underflow, path_saturated, out_of_reach: out_of_reach.sum(), ..Repairs::default() }
    }

    /// w − decode of stored planes.
    fn errors_of(&self, planes: &[&[u8]]) -> Vec<f32> {
        let mut errors = self.decode(planes);
        errors.iter_mut().zip(self.rows.values).for_each(|(error, value)| *error = value - *error);
        errors
    }

    fn decode(&self, planes: &[&[u8]]) -> Vec<f32> {
        let matrix = Matrix { out_features: self.count as u64, in_features: self.rows.in_features as u64 };
        let mut out = vec![0.0; self.rows.values.len()];
        let part = crate::codec::Part { matrix, first: 0 };
        crate::codec::codec(CodecSpec::Trellis(self.trellis)).decode(part, self.rows.float, planes, &mut out);
        out
    }

    /// Writes codes and scales into planes, and each row's loss.
    fn store(&self, state: &State, planes: &mut [&mut [u8]], losses: &mut [RowLoss]) {
        for (bytes, word) in planes[0].as_chunks_mut::<4>().0.iter_mut().zip(&state.words) {
            *bytes = word.to_le_bytes();
        }
        let halves = |to: &mut [u8], values: &[f32]| {
            for (bytes, value) in to.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *bytes = f16_from_f32(*value).to_le_bytes();
            }
        };
        let Vectors { inputs, outputs } = &state.vectors;
        let (first, second) = match self.trellis.along() {
            Along::Outputs => (inputs, outputs),
            Along::Inputs => (outputs, inputs),
        };
        let [_, scales, more @ ..] = planes else { unreachable!("sizes were checked") };
        halves(scales, first);
        if let [scales2] = more {
            halves(scales2, second);
        }
        let stored: Vec<&[u8]> = planes.iter().map(|plane| &**plane).collect();
        let decoded = self.decode(&stored);
        of_decoded(self.rows, &decoded, self.isa, losses);
        let k = self.rows.in_features;
        mend(self.rows, losses, &|r, row| row.copy_from_slice(&decoded[r * k..][..k]));
    }

    fn moved(&self, error: &TrellisError) -> QuantError {
        let TrellisError::NonFinite { value, .. } = error else { unreachable!("the trellis was checked") };
        QuantError::ScaleOverflow { row: 0, value: *value }
    }
}
