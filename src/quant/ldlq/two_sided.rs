//! Errors that outputs make up for too.
//!
//! ```text
//! minimise tr(E H Eᵀ G),  H: [K, K] of inputs, G: [N, N] of outputs
//! G + μ I = Bᵀ D B                                      B unit lower triangular
//! B[J, J] R_J = B[J, before] E_before                   rows J of one row of tiles, after all rows before
//! ```
//!
//! What is left of rows J once later rows have made up for it as they can is that of E_J + R_J. So W_J + R_J is coded with
//! the feedback of inputs as W_J would be, one row of tiles after the other; rows of one tile cannot make up for each
//! other. Sweeps and the refit of scales know no G, and are left out.
//!
//! G takes gradients (of the loss that matters, by each output), so it is only ever read from a file.
//! Source: Tseng et al., YAQA, arXiv 2505.22988, for objective and rounding; there in square tiles along antidiagonals.

use std::sync::Mutex;

use super::pass::{Columns, Feedback};
use super::{Job, PANEL, State, Strip, Workspace};
use crate::codec::trellis::{Along, TrellisError};
use crate::linalg::{Factor, Symmetric};
use crate::numeric::dot::{Strided, multiply};
use crate::numeric::lanes::dispatch;

impl Job<'_> {
    /// As [`Job::pass`] with feedback, and rows that make up for the rows before.
    pub(super) fn two_sided_pass(
        &self,
        feedback: Feedback<'_>,
        outputs: &Factor,
        state: &mut State,
    ) -> Result<u64, TrellisError> {
        let (k, rows) = (self.rows.in_features, self.rows_together());
        let words_together = rows * k / self.encoder.tile() * self.encoder.words();
        let State { vectors, words, errors } = state;
        let mut saturated = 0;
        for (s, words) in words.chunks_mut(words_together).enumerate() {
            let first = s * rows;
            let (before, rest) = errors.split_at_mut(first * k);
            let own = &mut rest[..(rows * k).min(self.rows.values.len() - first * k)];
            let handed = self.handed_on(outputs, before, own.len() / k);
            let values: Vec<f32> =
                self.rows.values[first * k..].iter().zip(&handed).map(|(w, r)| w + r).collect();
            let strip = Strip { first, values: &values, errors: own, words, workspace: Workspace::new() };
            saturated += match self.trellis.along() {
                Along::Outputs => {
                    let feedback = Some(feedback);
                    dispatch(self.isa, Columns { job: self, feedback, vectors, strip })?
                }
                Along::Inputs => self.rows_pass(Some(feedback), vectors, strip)?,
            };
            own.iter_mut().zip(&handed).for_each(|(e, r)| *e -= r);
        }
        Ok(saturated)
    }

    /// R of the `rows` rows that come after those of `before`, `[rows, K]`.
    fn handed_on(&self, outputs: &Factor, before: &[f32], rows: usize) -> Vec<f32> {
        let k = self.rows.in_features;
        let first = before.len() / k;
        let mut out = vec![0.0; rows * k];
        if first == 0 {
            return out;
        }
        let panels: Vec<Mutex<Vec<f32>>> = (0..k.div_ceil(PANEL)).map(|_| Mutex::default()).collect();
        (self.parallel)(panels.len(), &|p| {
            let columns = p * PANEL..k.min((p + 1) * PANEL);
            let width = columns.len();
            let mut turned = vec![0.0; width * first];
            for (row, errors) in before.chunks_exact(k).enumerate() {
                for (c, error) in errors[columns.clone()].iter().enumerate() {
                    turned[c * first + row] = *error;
                }
            }
            let turned = Strided { values: &turned, stride: first, rows: width };
            let mut panel = vec![0.0; rows * width];
            let mut row = 0;
            while row < rows {
                let lower = outputs.lower(first + row);
                let count = lower.rows.min(rows - row);
                let lower = Strided { rows: count, ..lower };
                multiply(lower, turned, first, &mut panel[row * width..], width, self.isa);
                row += count;
            }
            for row in 1..rows {
                let (done, here) = panel.split_at_mut(row * width);
                let lower = &outputs.lower(first + row).values[first..first + row];
                for (by, done) in lower.iter().zip(done.chunks_exact(width)) {
                    here.iter_mut().zip(done).for_each(|(here, done)| *here -= by * done);
                }
            }
            *panels[p].lock().expect("each panel is visited once") = panel;
        });
        for (p, panel) in panels.into_iter().enumerate() {
            let panel = panel.into_inner().expect("a panic ends the search");
            let width = panel.len() / rows;
            for (out, panel) in out.chunks_exact_mut(k).zip(panel.chunks_exact(width)) {
                out[p * PANEL..][..width].copy_from_slice(panel);
            }
        }
        out
    }

    /// tr(E H Eᵀ G) of errors that are `[N, K]`.
    pub(super) fn two_sided_loss(&self, errors: &[f32], h: &Symmetric, outputs: &Symmetric) -> f64 {
        let (k, n, together) = (self.rows.in_features, self.count, self.rows_together());
        let parts: Vec<Mutex<f64>> = (0..n.div_ceil(together)).map(|_| Mutex::default()).collect();
        (self.parallel)(parts.len(), &|s| {
            let rows = s * together..n.min((s + 1) * together);
            let [along] = self.times([&errors[rows.start * k..rows.end * k]], h, 0.0);
            let mut products = vec![0.0; rows.len() * n];
            let along = Strided { values: &along, stride: k, rows: rows.len() };
            multiply(along, Strided { values: errors, stride: k, rows: n }, k, &mut products, n, self.isa);
            let weights = outputs.rows(rows);
            let terms = products.iter().zip(&weights).map(|(x, g)| f64::from(*x) * f64::from(*g));
            *parts[s].lock().expect("each part is visited once") = terms.sum();
        });
        parts.into_iter().map(|part| part.into_inner().expect("a panic ends the search")).sum()
    }
}
