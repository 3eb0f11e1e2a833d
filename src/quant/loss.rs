//! Sums of squares in one fixed order (`docs/formats/affine.md`, "Reported error").
//!
//! A run is 128 consecutive weights of a row, counted from its start; the last may be shorter. Inside a run,
//! sixteen f32 lanes add (w[k] − decode[k])² and w[k]² for k ≡ lane (mod 16), in order of k. At the end of a run
//! its lanes are added to sixteen f64 lanes of the row; at the end of the row those are added as a tree: lanes 8
//! apart, then 4, 2, 1. Rows whose f32 sums may have left the range of f32 are summed again in f64 by
//! [`mend_out_of_range`].

use super::{RowLoss, Rows};
use crate::codec::{self, CodecSpec, Matrix, Part};
use crate::isa::Isa;
use crate::numeric::lanes::{Kernel, LANES, Lanes, dispatch};

/// The sums of one run, one per lane.
#[derive(Clone, Copy)]
pub(super) struct Run<V> {
    error: V,
    energy: V,
}

impl<V: Lanes> Run<V> {
    /// A run without weights.
    #[inline(always)]
    pub(super) fn empty() -> Self {
        Self { error: V::splat(0.0), energy: V::splat(0.0) }
    }

    /// Adds sixteen weights and what they decode to.
    #[inline(always)]
    pub(super) fn add(&mut self, weights: V, decoded: V) {
        let error = weights.sub(decoded);
        self.error = self.error.add(error.mul(error));
        self.energy = self.energy.add(weights.mul(weights));
    }
}

/// Weights in a run: every group size divides it.
pub(super) const RUN: usize = 128;

/// The sums of the row under way, and the rows still to come.
pub(super) struct RowSums<'a, V: Lanes> {
    /// Where the next weights are added.
    pub(super) run: Run<V>,
    error: V::Wide,
    energy: V::Wide,
    in_features: usize,
    left_in_run: usize,
    left_in_row: usize,
    losses: std::slice::IterMut<'a, RowLoss>,
}

impl<'a, V: Lanes> RowSums<'a, V> {
    /// Fills `losses` in order, one per `in_features` weights.
    #[inline(always)]
    pub(super) fn new(losses: &'a mut [RowLoss], in_features: usize) -> Self {
        Self {
            run: Run::empty(),
            error: V::wide_zero(),
            energy: V::wide_zero(),
            in_features,
            left_in_run: RUN,
            left_in_row: in_features,
            losses: losses.iter_mut(),
        }
    }

    /// Ends runs and rows, after `weights` have been added to `run`. They cross neither.
    #[inline(always)]
    pub(super) fn advance(&mut self, weights: usize) {
        self.left_in_run -= weights;
        self.left_in_row -= weights;
        if self.left_in_run == 0 || self.left_in_row == 0 {
            self.error = self.run.error.wide_add(self.error);
            self.energy = self.run.energy.wide_add(self.energy);
            self.run = Run::empty();
            self.left_in_run = RUN;
        }
        if self.left_in_row == 0 {
            if let Some(loss) = self.losses.next() {
                *loss = RowLoss { error: tree_sum::<V>(self.error), energy: tree_sum::<V>(self.energy) };
            }
            (self.error, self.energy) = (V::wide_zero(), V::wide_zero());
            self.left_in_row = self.in_features;
        }
    }
}

#[inline(always)]
fn tree_sum<V: Lanes>(lanes: V::Wide) -> f64 {
    let mut lanes = V::wide_store(lanes);
    let mut apart = LANES / 2;
    while apart > 0 {
        for lane in 0..apart {
            lanes[lane] += lanes[lane + apart];
        }
        apart /= 2;
    }
    lanes[0]
}

/// The losses of rows whose decoded values are at hand.
pub(super) fn of_decoded(rows: Rows<'_>, decoded: &[f32], isa: Isa, losses: &mut [RowLoss]) {
    dispatch(isa, OfDecoded { rows, decoded, losses });
}

struct OfDecoded<'a> {
    rows: Rows<'a>,
    decoded: &'a [f32],
    losses: &'a mut [RowLoss],
}

impl Kernel for OfDecoded<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let mut sums = RowSums::<V>::new(self.losses, self.rows.in_features);
        let weights = self.rows.values.as_chunks::<LANES>().0;
        for (weights, decoded) in weights.iter().zip(self.decoded.as_chunks::<LANES>().0) {
            sums.run.add(V::load(weights), V::load(decoded));
            sums.advance(LANES);
        }
    }
}

/// [`mend`] for rows that are decoded from planes with a row for each.
pub(super) fn mend_out_of_range(
    spec: CodecSpec,
    rows: Rows<'_>,
    planes: &[&mut [u8]],
    losses: &mut [RowLoss],
) {
    let count = losses.len();
    let matrix = Matrix { out_features: count as u64, in_features: rows.in_features as u64 };
    mend(rows, losses, &|r, decoded| {
        let row_of_each_plane: Vec<&[u8]> = planes
            .iter()
            .map(|plane| {
                let row_bytes = plane.len() / count;
                &plane[r * row_bytes..][..row_bytes]
            })
            .collect();
        let part = Part { matrix, first: r as u64 };
        codec::codec(spec).decode(part, rows.float, &row_of_each_plane, decoded);
    });
}

/// Sums rows of extreme energy again, with the squares in f64; `decode` gives what a row decodes to.
///
/// Squares of f32 weights overflow from 1.8e19 and vanish below 2e-23; a row between 1e-24 and 1e36 in
/// energy has lost nothing of note to either.
pub(super) fn mend(rows: Rows<'_>, losses: &mut [RowLoss], decode: &dyn Fn(usize, &mut [f32])) {
    for (r, loss) in losses.iter_mut().enumerate() {
        if (1e-24..=1e36).contains(&loss.energy) && loss.error.is_finite() {
            continue;
        }
        let weights = &rows.values[r * rows.in_features..][..rows.in_features];
        if weights.iter().all(|weight| *weight == 0.0) {
            continue;
        }
        let mut decoded = vec![0.0; rows.in_features];
        decode(r, &mut decoded);
        *loss = RowLoss::default();
        for (weight, decoded) in weights.iter().zip(&decoded) {
            loss.error += (f64::from(*weight) - f64::from(*decoded)).powi(2);
            loss.energy += f64::from(*weight).powi(2);
        }
    }
}
