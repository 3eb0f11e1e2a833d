//! One sweep of coordinate descent: every column is coded again, for what all others now err.
//!
//! ```text
//! A = H + λ I,  L = Σ_n e_n A e_nᵀ,  e = w − decode,  g = e A
//! decode_k ← decode_k + δ:  L falls by Σ_n δ_n (2 g_nk − δ_n A_kk),  best for decode_k + g_k / A_kk
//! ```
//!
//! All rows of a tile weigh alike, so the tile nearest to that is the best there is; it takes the old one's place only
//! if L falls, by more than a small part of its terms. Tiles along inputs weigh their columns differently, and are not
//! coded again.

use super::pass::Column;
use super::{Job, PANEL, State, Strip, Vectors};
use crate::codec::trellis::{Along, TrellisError};
use crate::linalg::Symmetric;
use crate::numeric::dot::{Strided, multiply};
use crate::numeric::lanes::{Kernel, LANES, Lanes, dispatch};

/// What part of a move's quadratic term its gain must exceed: 2^-12.
const MARGIN: f32 = 1.0 / 4096.0;

impl Job<'_> {
    /// Sweeps once; the number of tiles whose fixed-point costs saturated.
    pub(super) fn sweep(&self, h: &Symmetric, damping: f64, state: &mut State) -> Result<u64, TrellisError> {
        if self.trellis.along() == Along::Inputs {
            return Ok(0);
        }
        let damping = damping as f32;
        let done = self.strips(state, &|vectors, strip| {
            dispatch(self.isa, Sweep { job: self, h, damping, vectors, strip })
        });
        done.into_iter().sum()
    }
}

struct Sweep<'a, 'j> {
    job: &'a Job<'j>,
    h: &'a Symmetric,
    damping: f32,
    vectors: &'a Vectors,
    strip: Strip<'a>,
}

impl Kernel for Sweep<'_, '_> {
    type Output = Result<u64, TrellisError>;

    #[inline(always)]
    fn run<V: Lanes>(self) -> Self::Output {
        let Self { job, h, damping, vectors, strip } = self;
        let Strip { first: first_row, values, errors, words, mut workspace } = strip;
        let (k, tile, ring) = (job.rows.in_features, job.encoder.tile(), job.encoder.words());
        let lanes = tile / LANES;
        let mut column = Column::new(job, &vectors.outputs[first_row..first_row + tile]);
        let mut saturated = 0;
        let mut gradient = vec![0.0; tile * PANEL];
        let mut h_rows = vec![0.0; PANEL * k];
        let panel = || vec![[0.0; LANES]; PANEL * lanes];
        let (mut e, mut g) = (panel(), panel());
        for first in (0..k).step_by(PANEL) {
            let width = PANEL.min(k - first);
            let h_rows = &mut h_rows[..width * k];
            h.gather(first..first + width, h_rows);
            let stored = Strided { values: errors, stride: k, rows: tile };
            multiply(
                stored,
                Strided { values: h_rows, stride: k, rows: width },
                k,
                &mut gradient,
                PANEL,
                job.isa,
            );
            for c in 0..width {
                for row in 0..tile {
                    let error = errors[row * k + first + c];
                    e[c * lanes + row / LANES][row % LANES] = error;
                    g[c * lanes + row / LANES][row % LANES] = gradient[row * PANEL + c] + damping * error;
                }
            }
            for c in 0..width {
                let near = &h_rows[c * k + first..][..width];
                let own = near[c] + damping;
                if own <= 0.0 {
                    continue;
                }
                let at = first + c;
                let here = c * lanes..(c + 1) * lanes;
                for (l, weights) in column.weights.iter_mut().enumerate() {
                    for (lane, weight) in weights.iter_mut().enumerate() {
                        *weight = values[(l * LANES + lane) * k + at];
                    }
                }
                let now = |w: &[f32; LANES], e: &[f32; LANES]| V::load(w).sub(V::load(e));
                let old = column.weights.iter().zip(&e[here.clone()]).zip(&g[here.clone()]);
                for (target, ((w, e), g)) in column.target.iter_mut().zip(old) {
                    now(w, e).add(V::load(g).div(V::splat(own))).store(target);
                }
                saturated += column.encode::<V>(&mut workspace, vectors.inputs[at])?;
                let mut gain = V::wide_zero();
                let old = column.weights.iter().zip(&e[here.clone()]).zip(&g[here.clone()]);
                for (decoded, ((w, e), g)) in column.decoded.iter().zip(old) {
                    let (change, slope) = (V::load(decoded).sub(now(w, e)), V::load(g));
                    let quadratic = change.mul(V::splat(own * (1.0 + MARGIN)));
                    gain = change.mul(slope.add(slope).sub(quadratic)).wide_add(gain);
                }
                let gain: f64 = V::wide_store(gain).iter().sum();
                if gain <= 0.0 || !gain.is_finite() {
                    continue;
                }
                words[at * ring..][..ring].copy_from_slice(&column.ring);
                // Target is not needed any more: it takes the change.
                for (l, change) in column.target.iter_mut().enumerate() {
                    let e = &mut e[here.start + l];
                    let error = V::load(&column.weights[l]).sub(V::load(&column.decoded[l]));
                    error.sub(V::load(e)).store(change);
                    error.store(e);
                }
                for (j, g) in g.chunks_exact_mut(lanes).take(width).enumerate() {
                    let by = V::splat(if j == c { own } else { near[j] });
                    for (g, change) in g.iter_mut().zip(&column.target) {
                        V::load(change).fma(by, V::load(g)).store(g);
                    }
                }
            }
            for (row, errors) in errors.chunks_exact_mut(k).enumerate() {
                for (c, error) in errors[first..first + width].iter_mut().enumerate() {
                    *error = e[c * lanes + row / LANES][row % LANES];
                }
            }
        }
        Ok(saturated)
    }
}
