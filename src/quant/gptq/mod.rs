//! Codes that make up for each other's errors: GPTQ for the affine codec.
//!
//! ```text
//! minimise tr(E H Eᵀ),  E = W − decode          W: [N, K]   H: [K, K], second moments of what the layer reads
//! H + λ I = Mᵀ D M                              M unit lower triangular: `linalg::Factor`
//! target_k = w_k + Σ_{i<k} e_i M[k, i]          code_k is nearest to it; e_k = w_k − decode_k
//! ```
//!
//! Columns are visited in order. A group's scale and bias are chosen when its first column comes, for the weights
//! as they then are: the w' that would make up best for all errors so far, if they were stored exactly. `gptq`
//! takes MLX's parameters and MLX's rule for codes (the parameters before they are rounded), errors are against
//! what a decoder reads. So with a diagonal H its bytes are those of `mlx`.
//!
//! `gptq-refit` searches the parameters as `refit` does, column k counting D_k, and then improves rows by
//! sweeps of coordinate descent ([`sweep`]), which never raise tr(E (H + λ I) Eᵀ).
//!
//! With `act_order` columns are visited by falling H[k, k], equal ones by index. Groups stay where the format has
//! them; their parameters are then chosen from the weights as given, before the first column.
//!
//! **Guard.** Where few tokens were seen, H has directions that cost nothing: errors are passed on and grow until
//! scales do. Each of some dampings λ is tried in turn, and refused if H + λ I has no factor, a value is not
//! finite, a scale is above four times the greatest of the `base` quantizer's, or tr(E H Eᵀ), undamped, is above
//! the base's. If all are refused the base's codes are stored. So no matrix is worse than the base's by this loss.
//!
//! Rows do not see each other: with the same λ, a split of rows gives the same bits.
//! Sources: Frantar et al., GPTQ, arXiv 2210.17323, algorithm 1; Chee et al., QuIP, arXiv 2307.13304, for the form
//! with M.

mod pass;
mod sweep;

use std::sync::Mutex;

use super::loss::{mend_out_of_range, of_decoded};
use super::{QuantError, Quantizer, RowLoss, Rows, check_sizes};
use crate::codec::affine::{read_parameter, with_bits};
use crate::codec::{self, CodecSpec, Matrix, Part};
use crate::isa::Isa;
use crate::linalg::{Factor, NotPositive, PANEL_ROWS, Symmetric};
use crate::numeric::Parallel;
use crate::numeric::dot::{Strided, multiply};
use crate::numeric::lanes::dispatch;
use crate::tensor::Float;

/// Columns between two products with the errors of all columns before; every group size divides it.
const PANEL: usize = 128;

/// Rows that go through all columns together. Their errors take 512 bytes · K, for each thread.
const STRIP: usize = 128;

/// Shares of H's mean diagonal that are tried after the first.
pub(super) const LADDER: [f64; 3] = [0.1, 1.0, 10.0];

/// How far scales may exceed the greatest of the base quantizer's.
const CEILING: f32 = 4.0;

/// A weight, and what its rows' errors cost.
#[derive(Debug, Clone, Copy)]
pub struct Weighted<'a> {
    /// Row-major values, `[N, K]`, all finite.
    pub values: &'a [f32],
    /// K.
    pub in_features: usize,
    /// The dtype that scales and biases are stored in: the model's.
    pub float: Float,
    /// H, of order K, times any factor above 0.
    pub hessian: &'a Symmetric,
    /// G, of order N, times any factor above 0: what errors in outputs cost together. Only a trellis has a use for it.
    pub outputs: Option<&'a Symmetric>,
}

/// How to search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GptqOptions {
    /// Search scales and biases, and sweep; if not, MLX's.
    pub refit: bool,
    /// Sweeps over all columns, with `refit`.
    pub sweeps: u32,
    /// Visit columns by falling H[k, k].
    pub act_order: bool,
    /// The least λ, as a share of H's mean diagonal.
    pub damping: f64,
}

impl Default for GptqOptions {
    fn default() -> Self {
        Self { refit: true, sweeps: 2, act_order: false, damping: 0.01 }
    }
}

/// Why a damping was refused.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// H + λ I has no factor.
    #[error("pivot {index} of the damped second moments is {pivot:e}")]
    NotPositive {
        /// Column of the weight.
        index: usize,
        /// What should be above 0.
        pivot: f64,
    },
    /// H, a scale, a bias or an error is infinite or NaN.
    #[error("a value is not finite")]
    NonFinite,
    /// A scale has grown.
    #[error("a scale of {found:e} is above the ceiling of {ceiling:e}")]
    ScaleCeiling {
        /// The greatest magnitude.
        found: f32,
        /// Four times the greatest magnitude of the base quantizer.
        ceiling: f32,
    },
    /// An error has grown.
    #[error("an error that costs {found:e} is above the ceiling of {ceiling:e}")]
    ErrorCeiling {
        /// The greatest h_k e².
        found: f64,
        /// Four times the greatest without feedback, as a magnitude: 16 times its square.
        ceiling: f64,
    },
    /// The loss is above that of the base quantizer.
    #[error("the loss {found:e} is above that of the nearest codes, {nearest:e}")]
    WorseThanNearest {
        /// tr(E H Eᵀ)
        found: f64,
        /// The same of the base quantizer.
        nearest: f64,
    },
}

/// What [`solve`] found.
#[derive(Debug, Clone, PartialEq)]
pub struct GptqReport {
    /// The share of the mean diagonal that λ is; none if the base quantizer's codes are stored.
    pub damping: Option<f64>,
    /// The shares tried before, and why they would not do.
    pub refused: Vec<(f64, Refusal)>,
    /// Whether errors of outputs were made up for too; losses are then tr(E H Eᵀ G).
    pub two_sided: bool,
    /// tr(E H Eᵀ) of the base quantizer. This and the next two are NaN if H is not finite.
    pub nearest_loss: f64,
    /// tr(E H Eᵀ) of what is stored.
    pub loss: f64,
    /// tr(W H Wᵀ)
    pub energy: f64,
    /// Columns with H[k, k] = 0: they cost nothing, and are rounded.
    pub dead_columns: u64,
    /// Where columns of a tile cannot make up for each other, the expected loss over what it would be if they could.
    pub penalty: Option<f64>,
}

/// Fills `planes` and `losses` as [`Quantizer::fit`] does, with codes that are good under `weighted.hessian`.
///
/// `base` is what a damping is held against, and what is stored if none will do; it must accept the codec row by
/// row. Bytes do not depend on `isa` or `parallel`. Beside its arguments this takes a factor as large as H (twice
/// that with `act_order`), the planes once more, and for each thread 0.7 KiB · K (twice that with sweeps).
///
/// # Errors
/// Those of `base`.
///
/// # Panics
/// If the codec is not affine, `hessian` is not of order K, or sizes differ from what the codec says.
#[allow(clippy::too_many_arguments)]
pub fn solve(
    codec: CodecSpec,
    weighted: Weighted<'_>,
    base: &dyn Quantizer,
    options: &GptqOptions,
    isa: Isa,
    parallel: Parallel<'_>,
    planes: &mut [&mut [u8]],
    losses: &mut [RowLoss],
) -> Result<GptqReport, QuantError> {
    let h = weighted.hessian;
    assert_eq!(h.n(), weighted.in_features, "the order of H");
    let all = Rows { values: weighted.values, in_features: h.n(), float: weighted.float, ahead: &[] };
    check_sizes(codec, all, planes, losses);
    let run = Run { codec, weighted, options, isa, parallel };

    let nearest = run.nearest(base, planes, losses)?;
    let diagonal = h.diagonal();
    let mean = diagonal.iter().map(|x| f64::from(*x)).sum::<f64>() / h.n().max(1) as f64;
    let mut report = GptqReport {
        damping: None,
        refused: Vec::new(),
        two_sided: false,
        nearest_loss: nearest.loss,
        loss: nearest.loss,
        energy: nearest.energy,
        dead_columns: diagonal.iter().filter(|x| **x == 0.0).count() as u64,
        penalty: None,
    };
    if !(h.is_finite() && nearest.loss.is_finite()) {
        report.refused.push((options.damping, Refusal::NonFinite));
        return Ok(report);
    }
    if mean == 0.0 || losses.is_empty() {
        return Ok(report);
    }

    let order = options.act_order.then(|| falling(&diagonal));
    let permuted = order.as_ref().map(|order| h.permuted(order, parallel));
    let mut found: Vec<Vec<u8>> = planes.iter().map(|plane| vec![0; plane.len()]).collect();
    let mut found_losses = vec![RowLoss::default(); losses.len()];
    let rungs = LADDER.into_iter().filter(|rung| *rung > options.damping);
    for rung in std::iter::once(options.damping).chain(rungs) {
        let factor = Factor::new(permuted.as_ref().unwrap_or(h), rung * mean, isa, parallel);
        let tried = factor.map_err(|NotPositive { index, pivot }| {
            let index = order.as_ref().map_or(index, |order| order[index]);
            Refusal::NotPositive { index, pivot }
        });
        let tried = tried.and_then(|factor| {
            let mut found: Vec<&mut [u8]> = found.iter_mut().map(Vec::as_mut_slice).collect();
            run.rung(
                &factor,
                rung * mean,
                order.as_deref(),
                &diagonal,
                &nearest,
                &mut found,
                &mut found_losses,
            )
        });
        match tried {
            Ok(loss) => {
                for (plane, found) in planes.iter_mut().zip(&found) {
                    plane.copy_from_slice(found);
                }
                losses.copy_from_slice(&found_losses);
                (report.damping, report.loss) = (Some(rung), loss);
                break;
            }
            Err(refusal) => report.refused.push((rung, refusal)),
        }
    }
    Ok(report)
}

/// The columns by falling value, equal ones by index.
pub(super) fn falling(diagonal: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..diagonal.len()).collect();
    order.sort_by(|a, b| diagonal[*b].total_cmp(&diagonal[*a]));
    order
}

/// What a base quantizer, or a try, has come to.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    loss: f64,
    energy: f64,
    greatest_scale: f32,
}

struct Run<'a> {
    codec: CodecSpec,
    weighted: Weighted<'a>,
    options: &'a GptqOptions,
    isa: Isa,
    parallel: Parallel<'a>,
}

/// Some rows, and what is known and stored of them.
struct Strip<'a> {
    first: usize,
    rows: Rows<'a>,
    planes: Vec<&'a mut [u8]>,
    losses: &'a mut [RowLoss],
}

impl Run<'_> {
    /// Runs `work` on every strip of rows; what it returns, in order.
    fn strips<T: Send>(
        &self,
        planes: &mut [&mut [u8]],
        losses: &mut [RowLoss],
        work: &(dyn Fn(Strip<'_>) -> T + Sync),
    ) -> Vec<T> {
        let (count, k) = (losses.len().max(1), self.weighted.in_features);
        let mut pieces: Vec<_> = planes
            .iter_mut()
            .map(|plane| {
                let bytes = plane.len() / count;
                plane.chunks_mut((STRIP * bytes).max(1))
            })
            .collect();
        let strips = losses.chunks_mut(STRIP).enumerate().map(|(s, losses)| {
            let values = &self.weighted.values[s * STRIP * k..][..losses.len() * k];
            let rows = Rows { values, in_features: k, float: self.weighted.float, ahead: &[] };
            let planes = pieces
                .iter_mut()
                .map(|piece| piece.next().expect("planes have the rows of losses"))
                .collect();
            Mutex::new((Some(Strip { first: s * STRIP, rows, planes, losses }), None))
        });
        let strips: Vec<_> = strips.collect();
        (self.parallel)(strips.len(), &|s| {
            let mut slot = strips[s].lock().expect("each strip is visited once");
            let strip = slot.0.take().expect("each strip is visited once");
            slot.1 = Some(work(strip));
        });
        let done = strips.into_iter().map(|slot| slot.into_inner().expect("a panic ends the search").1);
        done.map(|done| done.expect("every strip is visited")).collect()
    }

    /// Stores the base quantizer's codes.
    fn nearest(
        &self,
        base: &dyn Quantizer,
        planes: &mut [&mut [u8]],
        losses: &mut [RowLoss],
    ) -> Result<Sums, QuantError> {
        let strips = self.strips(planes, losses, &|mut strip| {
            let fit = base.fit(self.codec, strip.rows, self.isa, &mut strip.planes, strip.losses);
            fit.map_err(|error| error.moved(strip.first))?;
            let mut errors = self.decode(&strip);
            for (error, value) in errors.iter_mut().zip(strip.rows.values) {
                *error = value - *error;
            }
            Ok(Sums {
                loss: proxy(&errors, self.weighted.hessian, self.isa),
                energy: proxy(strip.rows.values, self.weighted.hessian, self.isa),
                greatest_scale: self.greatest_scale(strip.planes[1]),
            })
        });
        let mut sums = Sums::default();
        for strip in strips {
            let strip = strip?;
            sums.loss += strip.loss;
            sums.energy += strip.energy;
            sums.greatest_scale = sums.greatest_scale.max(strip.greatest_scale);
        }
        Ok(sums)
    }

    /// The codes along the factor of H + `damping` · I, and their loss.
    #[allow(clippy::too_many_arguments)]
    fn rung(
        &self,
        factor: &Factor,
        damping: f64,
        order: Option<&[usize]>,
        diagonal: &[f32],
        nearest: &Sums,
        planes: &mut [&mut [u8]],
        losses: &mut [RowLoss],
    ) -> Result<f64, Refusal> {
        let CodecSpec::Affine { bits, group } = self.codec else {
            panic!("GPTQ does not fill {}", self.codec)
        };
        let group = group.get() as usize;
        let ceiling = CEILING * nearest.greatest_scale;
        let h = self.weighted.hessian;
        let strips = self.strips(planes, losses, &|mut strip| {
            let mut state = pass::State::new(strip.rows, group);
            let refit = self.options.refit;
            let pass = pass::Pass { group, factor, order, diagonal, refit, isa: self.isa };
            with_bits!(bits.get(), BITS => {
                dispatch(self.isa, pass.of::<BITS>(strip.rows, &mut state));
                let wild = |scale: &f32| !scale.is_finite() || scale.abs() > ceiling;
                if refit && !state.scales.iter().any(wild) {
                    for _ in 0..self.options.sweeps {
                        let sweep = sweep::Sweep::<BITS> {
                            rows: strip.rows, group, hessian: h, damping: damping as f32, isa: self.isa, state: &mut state,
                        };
                        dispatch(self.isa, sweep);
                    }
                }
                dispatch(self.isa, state.store::<BITS>(group, strip.rows.float, &mut strip.planes));
            });
            let finite = state.scales.iter().chain(&state.biases).chain(&state.errors).all(|x| x.is_finite());
            let greatest_scale = state.scales.iter().fold(0.0, |most: f32, scale| most.max(scale.abs()));
            if !finite || greatest_scale > ceiling {
                let loss = if finite { 0.0 } else { f64::NAN };
                return Sums { loss, energy: 0.0, greatest_scale };
            }
            let decoded = self.decode(&strip);
            of_decoded(strip.rows, &decoded, self.isa, strip.losses);
            mend_out_of_range(self.codec, strip.rows, &strip.planes, strip.losses);
            for ((error, value), decoded) in state.errors.iter_mut().zip(strip.rows.values).zip(&decoded) {
                *error = value - decoded;
            }
            Sums { loss: proxy(&state.errors, self.weighted.hessian, self.isa), energy: 0.0, greatest_scale }
        });
        let loss: f64 = strips.iter().map(|strip| strip.loss).sum();
        let found = strips.iter().fold(0.0, |most: f32, strip| most.max(strip.greatest_scale));
        if !loss.is_finite() {
            Err(Refusal::NonFinite)
        } else if found > ceiling {
            Err(Refusal::ScaleCeiling { found, ceiling })
        } else if loss > nearest.loss {
            Err(Refusal::WorseThanNearest { found: loss, nearest: nearest.loss })
        } else {
            Ok(loss)
        }
    }

    /// What a strip's planes decode to.
    fn decode(&self, strip: &Strip<'_>) -> Vec<f32> {
        let planes: Vec<&[u8]> = strip.planes.iter().map(|plane| &**plane).collect();
        let mut out = vec![0.0; strip.rows.values.len()];
        let matrix =
            Matrix { out_features: strip.losses.len() as u64, in_features: strip.rows.in_features as u64 };
        codec::codec(self.codec).decode(Part { matrix, first: 0 }, strip.rows.float, &planes, &mut out);
        out
    }

    fn greatest_scale(&self, scales: &[u8]) -> f32 {
        let float = self.weighted.float;
        let count = scales.len() / float.bytes();
        (0..count).fold(0.0, |most: f32, index| most.max(read_parameter(float, scales, index).abs()))
    }
}

/// tr(E H Eᵀ) of rows: e H of 256 columns at a time in f32, from the stored half of H; products with e and
/// their sums in f64, row by row.
pub(super) fn proxy(errors: &[f32], h: &Symmetric, isa: Isa) -> f64 {
    let k = h.n();
    let rows = errors.len() / k;
    let mut sums = vec![0.0; rows];
    let (mut before, mut inside) = (vec![0.0; rows * PANEL_ROWS], vec![0.0; rows * PANEL_ROWS]);
    for first in (0..k).step_by(PANEL_ROWS) {
        let lower = h.lower(first);
        let x = |from: usize| Strided { values: &errors[from..], stride: k, rows };
        let square = Strided { values: &lower.values[first..], ..lower };
        multiply(x(0), lower, first, &mut before, PANEL_ROWS, isa);
        multiply(x(first), square, lower.rows, &mut inside, PANEL_ROWS, isa);
        for (r, sum) in sums.iter_mut().enumerate() {
            for c in 0..lower.rows {
                let (before, inside) = (before[r * PANEL_ROWS + c], inside[r * PANEL_ROWS + c]);
                let gradient = 2.0 * f64::from(before) + f64::from(inside);
                *sum += f64::from(errors[r * k + first + c]) * gradient;
            }
        }
    }
    sums.iter().sum()
}
