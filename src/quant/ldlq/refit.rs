//! Scales by least squares under H, with the codes as they are.
//!
//! With A = H + λ I, X = decode and E = W − X, rows of X times 1 + a and columns times 1 + δ:
//!
//! ```text
//! a_n = x_n A e_nᵀ / x_n A x_nᵀ                    each output by itself
//! (XᵀX ∘ A) δ = diag(Xᵀ E A)                       all inputs together
//! ```
//!
//! Outputs first: their moves change X and E A by known amounts, so that one product with A serves both. Scales are stored
//! as f16, so each output's is taken only if the rounded one lowers the loss, and the inputs' all or none.
//! Source: ExLlamaV3 1.6's refit, by the trellis specification, section 5.

use super::scales::rounded;
use super::{Job, PANEL, State};
use crate::codec::trellis::{Along, Scales};
use crate::linalg::{Factor, Symmetric};
use crate::numeric::dot::{Strided, multiply};

/// What is added to the diagonal of the inputs' system, as a share of its mean: inputs that H hardly sees stay.
const RIDGE: f64 = 1e-3;

/// What part of a move's quadratic terms its gain must exceed: rounding does not account for so much.
const MARGIN: f64 = 1e-6;

impl Job<'_> {
    /// Moves the scales; the damped loss does not rise by more than rounding.
    pub(super) fn refit(&self, h: &Symmetric, damping: f64, state: &mut State) {
        let (scales, along) = (self.trellis.scales(), self.trellis.along());
        let of_outputs = scales == Scales::Both || along == Along::Inputs;
        let of_inputs = scales == Scales::Both || along == Along::Outputs;
        let gradients = self.refit_outputs(h, damping, state, of_outputs);
        if of_inputs {
            self.refit_inputs(h, damping, state, gradients);
        }
    }

    /// x A for rows of each x, `[rows, K]`: rows of A are gathered once for all of them.
    pub(super) fn times<const N: usize>(
        &self,
        xs: [&[f32]; N],
        h: &Symmetric,
        damping: f32,
    ) -> [Vec<f32>; N] {
        let k = self.rows.in_features;
        let mut outs = xs.map(|x| vec![0.0; x.len()]);
        let most = xs.iter().map(|x| x.len() / k).max().unwrap_or(0);
        let (mut panel, mut h_rows) = (vec![0.0; most * PANEL], vec![0.0; PANEL * k]);
        for first in (0..k).step_by(PANEL) {
            let here = first..k.min(first + PANEL);
            let h_rows = &mut h_rows[..here.len() * k];
            h.gather(here.clone(), h_rows);
            let h_rows = Strided { values: h_rows, stride: k, rows: here.len() };
            for (x, out) in xs.iter().zip(&mut outs) {
                let rows = Strided { values: x, stride: k, rows: x.len() / k };
                multiply(rows, h_rows, k, &mut panel[..x.len() / k * PANEL], PANEL, self.isa);
                let rows = out.chunks_exact_mut(k).zip(x.chunks_exact(k)).zip(panel.chunks_exact(PANEL));
                for ((out, x), from) in rows {
                    for ((out, x), from) in out[here.clone()].iter_mut().zip(&x[here.clone()]).zip(from) {
                        *out = from + damping * x;
                    }
                }
            }
        }
        outs
    }

    /// Moves the outputs' scales if `moves`; diag(Xᵀ E A) of what then is stored.
    fn refit_outputs(&self, h: &Symmetric, damping: f64, state: &mut State, moves: bool) -> Vec<f64> {
        let k = self.rows.in_features;
        let damping = damping as f32;
        let found = self.strips(state, &|vectors, strip| {
            let mut x: Vec<f32> = strip.values.iter().zip(&*strip.errors).map(|(w, e)| w - e).collect();
            let [mut along_errors, along_x] = match moves {
                true => self.times([&*strip.errors, &x], h, damping),
                false => {
                    let [along_errors] = self.times([&*strip.errors], h, damping);
                    [along_errors, Vec::new()]
                }
            };
            let (mut moved, mut gradients) = (Vec::new(), vec![0.0; k]);
            for (row, (x, g)) in x.chunks_exact_mut(k).zip(along_errors.chunks_exact_mut(k)).enumerate() {
                let now = vectors.outputs[strip.first + row];
                let mut next = now;
                if moves {
                    let along_x = &along_x[row * k..(row + 1) * k];
                    let (linear, square) = (dot(x, g), dot(x, along_x));
                    let wanted = f64::from(now) * (1.0 + linear / square);
                    let then =
                        rounded(wanted as f32).filter(|then| square > 0.0 && *then > 0.0).unwrap_or(now);
                    let a = f64::from(then) / f64::from(now) - 1.0;
                    if a * (2.0 * linear - a * square) > MARGIN * a * a * square {
                        next = then;
                        for ((x, g), along) in x.iter_mut().zip(g.iter_mut()).zip(along_x) {
                            *x *= 1.0 + a as f32;
                            *g -= a as f32 * along;
                        }
                    }
                }
                moved.push(next);
                for ((sum, x), g) in gradients.iter_mut().zip(&*x).zip(&*g) {
                    *sum += f64::from(*x) * f64::from(*g);
                }
            }
            (moved, gradients)
        });
        let (moved, parts): (Vec<_>, Vec<_>) = found.into_iter().unzip();
        if moves {
            self.rescale(state, None, Some(moved.concat()));
        }
        let mut gradients = vec![0.0; k];
        for part in parts {
            gradients.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        gradients
    }

    fn refit_inputs(&self, h: &Symmetric, damping: f64, state: &mut State, gradients: Vec<f64>) {
        let k = self.rows.in_features;
        let mut squares = Symmetric::new(k);
        for (values, errors) in self
            .rows
            .values
            .chunks(self.rows_together() * k)
            .zip(state.errors.chunks(self.rows_together() * k))
        {
            let x: Vec<f32> = values.iter().zip(errors).map(|(w, e)| w - e).collect();
            squares.add_products(&x, self.isa, self.parallel);
        }
        let Some(system) = hadamard(&squares, h, damping as f32) else { return };
        drop(squares);
        let diagonal = system.diagonal();
        let mean = diagonal.iter().map(|x| f64::from(*x)).sum::<f64>() / k as f64;
        if !(mean.is_finite() && mean > 0.0) {
            return;
        }
        let Ok(factor) = Factor::new(&system, RIDGE * mean, self.isa, self.parallel) else { return };
        let wanted = solve(&factor, gradients.clone());
        let then = |(now, by): (&f32, &f64)| {
            let then = rounded((f64::from(*now) * (1.0 + by)) as f32).filter(|then| *then > 0.0);
            if by.is_finite() { then.unwrap_or(*now) } else { *now }
        };
        let inputs: Vec<f32> = state.vectors.inputs.iter().zip(&wanted).map(then).collect();
        let moved = inputs.iter().zip(&state.vectors.inputs).map(|(then, now)| match *now {
            0.0 => 0.0,
            now => f64::from(*then) / f64::from(now) - 1.0,
        });
        let moved: Vec<f64> = moved.collect();
        let linear: f64 = moved.iter().zip(&gradients).map(|(by, gradient)| by * gradient).sum();
        let square = quadratic(&system, &moved);
        if 2.0 * linear - square > MARGIN * square {
            self.rescale(state, Some(inputs), None);
        }
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

/// xᵀ A x
fn quadratic(a: &Symmetric, x: &[f64]) -> f64 {
    let row = |i: usize| {
        let row = &a.lower(i).values[..=i];
        let before: f64 = row[..i].iter().zip(x).map(|(a, x)| f64::from(*a) * x).sum();
        x[i] * (2.0 * before + f64::from(row[i]) * x[i])
    };
    (0..x.len()).map(row).sum()
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
        let full = a.to_full();
        let all = (0..n * n).map(|i| f64::from(full[i]) * known[i / n] * known[i % n]).sum::<f64>();
        assert!((quadratic(&a, &known) / all - 1.0).abs() < 1e-6);
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
