//! Scales by least squares under H, with the codes as they are.
//!
//! With A = H + λ I, X = decode and E = W − X, rows of X times 1 + a and columns times 1 + δ:
//!
//! ```text
//! a_n = x_n A e_nᵀ / x_n A x_nᵀ                    each output by itself
//! (XᵀX ∘ A) δ = diag(Xᵀ E A)                       all inputs together
//! ```
//!
//! Outputs first; the inputs' system then sees what is left. Scales are stored as f16, so each output's is taken only if
//! the rounded one lowers the loss, and the inputs' all or none.
//! Source: ExLlamaV3 1.6's refit, by the trellis specification, section 5.

use super::scales::rounded;
use super::{Job, PANEL, State};
use crate::codec::trellis::{Along, Scales};
use crate::linalg::{Factor, Symmetric};
use crate::numeric::dot::{Strided, multiply};

/// What is added to the diagonal of the inputs' system, as a share of its mean: inputs that H hardly sees stay.
const RIDGE: f64 = 1e-3;

impl Job<'_> {
    /// Moves the scales; the damped loss does not rise.
    pub(super) fn refit(&self, h: &Symmetric, damping: f64, state: &mut State) {
        let (scales, along) = (self.trellis.scales(), self.trellis.along());
        if scales == Scales::Both || along == Along::Inputs {
            self.refit_outputs(h, damping, state);
        }
        if scales == Scales::Both || along == Along::Outputs {
            self.refit_inputs(h, damping, state);
        }
    }

    /// x A for rows of x, `[rows, K]`.
    fn times(&self, x: &[f32], h: &Symmetric, damping: f32) -> Vec<f32> {
        let k = self.rows.in_features;
        let rows = x.len() / k;
        let mut out = vec![0.0; x.len()];
        let (mut panel, mut h_rows) = (vec![0.0; rows * PANEL], vec![0.0; PANEL * k]);
        for first in (0..k).step_by(PANEL) {
            let width = PANEL.min(k - first);
            let h_rows = &mut h_rows[..width * k];
            h.gather(first..first + width, h_rows);
            let h_rows = Strided { values: h_rows, stride: k, rows: width };
            multiply(Strided { values: x, stride: k, rows }, h_rows, k, &mut panel, PANEL, self.isa);
            for ((out, x), from) in
                out.chunks_exact_mut(k).zip(x.chunks_exact(k)).zip(panel.chunks_exact(PANEL))
            {
                let here = first..first + width;
                for ((out, x), from) in out[here.clone()].iter_mut().zip(&x[here]).zip(from) {
                    *out = from + damping * x;
                }
            }
        }
        out
    }

    fn refit_outputs(&self, h: &Symmetric, damping: f64, state: &mut State) {
        let k = self.rows.in_features;
        let found = self.strips(state, &|vectors, strip| {
            let decoded: Vec<f32> = strip.values.iter().zip(&*strip.errors).map(|(w, e)| w - e).collect();
            let along_errors = self.times(strip.errors, h, damping as f32);
            let along_decoded = self.times(&decoded, h, damping as f32);
            let mut moved = Vec::new();
            for (row, x) in decoded.chunks_exact(k).enumerate() {
                let at = row * k..(row + 1) * k;
                let (linear, square) = (dot(x, &along_errors[at.clone()]), dot(x, &along_decoded[at]));
                let now = vectors.outputs[strip.first + row];
                let wanted = f64::from(now) * (1.0 + linear / square);
                let then = rounded(wanted as f32).filter(|then| square > 0.0 && *then > 0.0).unwrap_or(now);
                let a = f64::from(then) / f64::from(now) - 1.0;
                let gain = a * (2.0 * linear - a * square);
                let then = if gain > 1e-6 * a * a * square { then } else { now };
                moved.push(then);
            }
            moved
        });
        let outputs = found.concat();
        self.rescale(state, None, Some(outputs));
    }

    fn refit_inputs(&self, h: &Symmetric, damping: f64, state: &mut State) {
        let k = self.rows.in_features;
        let decoded: Vec<f32> = self.rows.values.iter().zip(&state.errors).map(|(w, e)| w - e).collect();
        let mut squares = Symmetric::new(k);
        for part in decoded.chunks(self.rows_together() * k) {
            squares.add_products(part, self.isa, self.parallel);
        }
        let parts = self.strips(state, &|_, strip| {
            let along = self.times(strip.errors, h, damping as f32);
            let mut sums = vec![0.0; k];
            let rows =
                strip.values.chunks_exact(k).zip(strip.errors.chunks_exact(k)).zip(along.chunks_exact(k));
            for ((w, e), g) in rows {
                for (((sum, w), e), g) in sums.iter_mut().zip(w).zip(e).zip(g) {
                    *sum += f64::from(w - e) * f64::from(*g);
                }
            }
            sums
        });
        drop(decoded);
        let mut wanted = vec![0.0; k];
        for part in parts {
            wanted.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        let Some(system) = hadamard(&squares, h, damping as f32) else { return };
        drop(squares);
        let diagonal = system.diagonal();
        let mean = diagonal.iter().map(|x| f64::from(*x)).sum::<f64>() / k as f64;
        if !(mean.is_finite() && mean > 0.0) {
            return;
        }
        let Ok(factor) = Factor::new(&system, RIDGE * mean, self.isa, self.parallel) else { return };
        let moved = solve(&factor, wanted);
        let then = |(now, by): (&f32, &f64)| {
            let then = rounded((f64::from(*now) * (1.0 + by)) as f32).filter(|then| *then > 0.0);
            if by.is_finite() { then.unwrap_or(*now) } else { *now }
        };
        let inputs: Vec<f32> = state.vectors.inputs.iter().zip(&moved).map(then).collect();
        let before = self.damped_loss(state, h, damping);
        let (errors, vectors) = (state.errors.clone(), state.vectors.clone());
        self.rescale(state, Some(inputs), None);
        if !(self.damped_loss(state, h, damping) < before) {
            (state.errors, state.vectors) = (errors, vectors);
        }
    }

    fn damped_loss(&self, state: &State, h: &Symmetric, damping: f64) -> f64 {
        let squares = state.errors.iter().map(|e| f64::from(*e) * f64::from(*e)).sum::<f64>();
        self.loss(&state.errors, h) + damping * squares
    }

    /// Takes new scales, and decodes with them.
    fn rescale(&self, state: &mut State, inputs: Option<Vec<f32>>, outputs: Option<Vec<f32>>) {
        if let Some(inputs) = inputs {
            state.vectors.inputs = inputs;
        }
        if let Some(outputs) = outputs {
            state.vectors.outputs = outputs;
        }
        self.strips(state, &|vectors, strip| {
            self.decode_strip(vectors, strip.first, strip.words, strip.errors);
            for (error, w) in strip.errors.iter_mut().zip(strip.values) {
                *error = w - *error;
            }
        });
    }

    /// What rings decode to, `[rows, K]`.
    fn decode_strip(&self, vectors: &super::Vectors, first: usize, words: &[u32], out: &mut [f32]) {
        let (k, tile, ring) = (self.rows.in_features, self.encoder.tile(), self.encoder.words());
        let mut values = vec![0.0; tile];
        for (number, words) in words.chunks_exact(ring).enumerate() {
            crate::codec::trellis::decode(self.encoder.codebook(), self.encoder.bits(), words, &mut values);
            match self.trellis.along() {
                Along::Outputs => {
                    let input = vectors.inputs[number];
                    for (row, value) in values.iter().enumerate() {
                        out[row * k + number] = value * input * vectors.outputs[first + row];
                    }
                }
                Along::Inputs => {
                    let (row, start) = (number / (k / tile), number % (k / tile) * tile);
                    let output = vectors.outputs[first + row];
                    for ((out, value), input) in
                        out[row * k + start..].iter_mut().zip(&values).zip(&vectors.inputs[start..])
                    {
                        *out = value * output * input;
                    }
                }
            }
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// squares ∘ (H + λ I)
fn hadamard(squares: &Symmetric, h: &Symmetric, damping: f32) -> Option<Symmetric> {
    let n = h.n();
    let product = squares.values().iter().zip(h.values()).map(|(a, b)| a * b).collect();
    let mut out = Symmetric::from_values(product, n)?;
    out.add_to_diagonal(|i| squares.get(i, i) * damping);
    Some(out)
}

/// x of Mᵀ D M x = b.
fn solve(factor: &Factor, mut b: Vec<f64>) -> Vec<f64> {
    let n = factor.n();
    for k in (0..n).rev() {
        let y = b[k];
        for (b, m) in b[..k].iter_mut().zip(&factor.lower(k).values[..k]) {
            *b -= y * f64::from(*m);
        }
    }
    b.iter_mut().zip(factor.d()).for_each(|(b, d)| *b /= d);
    for k in 0..n {
        let mut x = b[k];
        for (before, m) in b[..k].iter().zip(&factor.lower(k).values[..k]) {
            x -= before * f64::from(*m);
        }
        b[k] = x;
    }
    b
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::numeric::serial;

    #[test]
    fn a_factored_system_is_solved() {
        let n = 7;
        let x: Vec<f32> = (0..3 * n * n).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
        let mut a = Symmetric::new(n);
        a.add_products(&x, Isa::Scalar, &serial);
        let factor = Factor::new(&a, 0.5, Isa::Scalar, &serial).unwrap();
        let known: Vec<f64> = (0..n).map(|i| i as f64 - 2.5).collect();
        let b = (0..n).map(|i| {
            let row = (0..n).map(|j| (f64::from(a.get(i, j)) + if i == j { 0.5 } else { 0.0 }) * known[j]);
            row.sum::<f64>()
        });
        let found = solve(&factor, b.collect());
        for (found, known) in found.iter().zip(&known) {
            assert!((found - known).abs() < 1e-4, "{found} for {known}");
        }
    }
}
