//! One walk over the columns, along a factor.

use super::{Job, PANEL, State, Strip, Vectors};
use crate::codec::trellis::{Along, TrellisError};
use crate::linalg::Factor;
use crate::numeric::dot::{Strided, multiply};
use crate::numeric::lanes::{Kernel, LANES, Lanes, dispatch};

/// What columns hand on.
#[derive(Clone, Copy)]
pub(super) struct Feedback<'a> {
    pub(super) factor: &'a Factor,
    /// Which column the factor's k-th is; each its own if none.
    pub(super) order: Option<&'a [usize]>,
}

impl Job<'_> {
    /// Codes every tile, and fills words and errors; the number of tiles whose fixed-point costs saturated.
    pub(super) fn pass(
        &self,
        feedback: Option<Feedback<'_>>,
        state: &mut State,
    ) -> Result<u64, TrellisError> {
        let done = self.strips(state, &|vectors, strip| match self.trellis.along() {
            Along::Outputs => dispatch(self.isa, Columns { job: self, feedback, vectors, strip }),
            Along::Inputs => self.rows_pass(feedback, vectors, strip),
        });
        done.into_iter().sum()
    }

    /// Tiles along inputs: part by part of all rows.
    pub(super) fn rows_pass(
        &self,
        feedback: Option<Feedback<'_>>,
        vectors: &Vectors,
        mut strip: Strip<'_>,
    ) -> Result<u64, TrellisError> {
        let (k, tile) = (self.rows.in_features, self.encoder.tile());
        let (rows, words) = (strip.values.len() / k, self.encoder.words());
        let mut saturated = 0;
        let mut wanted = vec![0.0; rows * tile];
        let (mut x, mut values) = (vec![0.0; tile], vec![0.0; tile]);
        let unit = self.trellis.code().unit() as f32;
        // Errors of the columns visited so far, in the order of visits; tiles are of neighbours, so there is none.
        for (number, first) in (0..k).step_by(tile).enumerate() {
            wanted.fill(0.0);
            if let Some(Feedback { factor, .. }) = feedback {
                for start in (first..first + tile).step_by(1) {
                    let m = factor.lower(start);
                    let before = Strided { values: strip.errors, stride: k, rows };
                    let to = &mut wanted[start - first..];
                    multiply(before, Strided { rows: 1, ..m }, first, to, tile, self.isa);
                }
                for row in wanted.chunks_exact_mut(tile) {
                    for c in 0..tile {
                        let m = &factor.lower(first + c).values[first..first + c];
                        let mut y = row[c];
                        for (m, before) in m.iter().zip(&row[..c]) {
                            y -= m * before;
                        }
                        row[c] = y;
                    }
                }
            }
            for (row, wanted) in wanted.chunks_exact(tile).enumerate() {
                let at = row * k + first;
                let output = vectors.outputs[strip.first + row];
                let inputs = &vectors.inputs[first..first + tile];
                for (((x, w), y), input) in x.iter_mut().zip(&strip.values[at..]).zip(wanted).zip(inputs) {
                    let scale = output * input * unit;
                    *x = if scale == 0.0 { 0.0 } else { (w + y) / scale };
                }
                let place = (row * (k / tile) + number) * words;
                let ring = &mut strip.words[place..place + words];
                let outcome = self.encoder.encode(&mut strip.workspace, &x, self.isa, ring, &mut values)?;
                saturated += u64::from(outcome.saturated);
                let errors = strip.errors[at..at + tile].iter_mut().zip(&strip.values[at..]);
                for (((error, w), value), input) in errors.zip(&values).zip(inputs) {
                    *error = w - value * output * input;
                }
            }
        }
        Ok(saturated)
    }
}

/// Tiles along outputs: column by column of a tile's rows.
pub(super) struct Columns<'a, 'j> {
    pub(super) job: &'a Job<'j>,
    pub(super) feedback: Option<Feedback<'a>>,
    pub(super) vectors: &'a Vectors,
    pub(super) strip: Strip<'a>,
}

impl Kernel for Columns<'_, '_> {
    type Output = Result<u64, TrellisError>;

    #[inline(always)]
    fn run<V: Lanes>(self) -> Self::Output {
        let Self { job, feedback, vectors, strip } = self;
        let Strip { first: first_row, values, errors, words, mut workspace } = strip;
        let (k, tile, ring) = (job.rows.in_features, job.encoder.tile(), job.encoder.words());
        let mut column = Column::new(job, &vectors.outputs[first_row..first_row + tile]);
        let mut saturated = 0;
        let mut fed = vec![0.0; tile * PANEL];
        // A panel's columns, each with the tile's rows: [PANEL, T].
        let mut e = vec![[0.0; LANES]; PANEL * tile / LANES];
        let lanes = tile / LANES;
        for first in (0..k).step_by(PANEL) {
            let width = PANEL.min(k - first);
            if let Some(Feedback { factor, .. }) = feedback {
                let before = Strided { values: errors, stride: k, rows: tile };
                multiply(
                    before,
                    Strided { rows: width, ..factor.lower(first) },
                    first,
                    &mut fed,
                    PANEL,
                    job.isa,
                );
            }
            for c in 0..width {
                let at = feedback.and_then(|f| f.order).map_or(first + c, |order| order[first + c]);
                let (before, own) = e.split_at_mut(c * lanes);
                let own = &mut own[..lanes];
                for (l, target) in column.target.iter_mut().enumerate() {
                    for (lane, target) in target.iter_mut().enumerate() {
                        let row = l * LANES + lane;
                        column.weights[l][lane] = values[row * k + at];
                        *target = fed[row * PANEL + c];
                    }
                }
                for (target, w) in column.target.iter_mut().zip(&column.weights) {
                    V::load(target).add(V::load(w)).store(target);
                }
                if let Some(Feedback { factor, .. }) = feedback {
                    let m = factor.lower(first);
                    let m = &m.values[c * m.stride + first..][..c];
                    for (before, m) in before.chunks_exact(lanes).zip(m) {
                        let m = V::splat(*m);
                        for (target, e) in column.target.iter_mut().zip(before) {
                            V::load(e).fma(m, V::load(target)).store(target);
                        }
                    }
                }
                saturated += column.encode::<V>(&mut workspace, vectors.inputs[at])?;
                words[at * ring..][..ring].copy_from_slice(&column.ring);
                for ((e, w), decoded) in own.iter_mut().zip(&column.weights).zip(&column.decoded) {
                    V::load(w).sub(V::load(decoded)).store(e);
                }
            }
            for (row, errors) in errors.chunks_exact_mut(k).enumerate() {
                for (c, error) in errors[first..first + width].iter_mut().enumerate() {
                    *error = e[c * lanes + row / LANES][row % LANES];
                }
            }
        }
        if let Some(order) = feedback.and_then(|feedback| feedback.order) {
            let mut in_order = vec![0.0; k];
            for errors in errors.chunks_exact_mut(k) {
                in_order.copy_from_slice(errors);
                for (error, place) in in_order.iter().zip(order) {
                    errors[*place] = *error;
                }
            }
        }
        Ok(saturated)
    }
}

/// A column of a tile's rows on its way through the encoder.
pub(super) struct Column<'a> {
    job: &'a Job<'a>,
    /// Scales of the rows, `[T / 16]`.
    outputs: Vec<[f32; LANES]>,
    pub(super) weights: Vec<[f32; LANES]>,
    /// What the column would be.
    pub(super) target: Vec<[f32; LANES]>,
    x: Vec<[f32; LANES]>,
    /// What it is.
    pub(super) decoded: Vec<[f32; LANES]>,
    pub(super) ring: Vec<u32>,
    unit: f32,
}

impl<'a> Column<'a> {
    pub(super) fn new(job: &'a Job<'_>, outputs: &[f32]) -> Self {
        let zeros = || vec![[0.0; LANES]; outputs.len() / LANES];
        Self {
            job,
            outputs: outputs.as_chunks::<LANES>().0.to_vec(),
            weights: zeros(),
            target: zeros(),
            x: zeros(),
            decoded: zeros(),
            ring: vec![0; job.encoder.words()],
            unit: job.trellis.code().unit() as f32,
        }
    }

    /// Codes the target: fills ring and decoded. `input` is the column's scale.
    #[inline(always)]
    pub(super) fn encode<V: Lanes>(
        &mut self,
        workspace: &mut crate::quant::trellis::Workspace,
        input: f32,
    ) -> Result<u64, TrellisError> {
        let (zero, input) = (V::splat(0.0), V::splat(input));
        for ((x, target), output) in self.x.iter_mut().zip(&self.target).zip(&self.outputs) {
            let scale = input.mul(V::load(output)).mul(V::splat(self.unit));
            scale.if_eq(zero, zero, V::load(target).div(scale)).store(x);
        }
        let (x, values) = (self.x.as_flattened(), self.decoded.as_flattened_mut());
        let outcome = self.job.encoder.encode(workspace, x, self.job.isa, &mut self.ring, values)?;
        for (decoded, output) in self.decoded.iter_mut().zip(&self.outputs) {
            V::load(decoded).mul(input).mul(V::load(output)).store(decoded);
        }
        Ok(u64::from(outcome.saturated))
    }
}
