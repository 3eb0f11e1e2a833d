//! OptRot: the rotation that flattens weights most, found from the weights alone.
//!
//! ```text
//! minimise  f(R) = Σ_i Σ_j z[i, j]⁴        Z = S R        S: [m, n] samples, R: [n, n] orthogonal
//! κ(R)    = f(R) / (3/n · Σ_i ‖s_i‖⁴)      1/3 where all |z| of a row are equal; n / (n + 2) on average over
//!                                          all R; n / 3 where each row has one value
//! ```
//!
//! Fourth powers punish outliers, which set the scale of a group. R only moves within the orthogonal group:
//!
//! ```text
//! B = Zᵀ Z³,  G = 2 (B − Bᵀ)               gradient: f(R exp(tΩ)) ≈ f + t ⟨G, Ω⟩ for skew Ω; Z³ by element
//! M ← μ M + G                              momentum, μ = ½
//! Ω = −msign(M)                            all rotation angles made about equal, see below
//! R' = polar(R + t R Ω)                    retraction; accepted if f(R') ≤ f + t ⟨G, Ω⟩ / 10⁴
//! ```
//!
//! `msign` takes M = U Σ Vᵀ to about U Vᵀ: three times X ← a X + (b X Xᵀ + c (X Xᵀ)²) X, from M divided by
//! a bound of its largest singular value. A gradient has few large singular values, from the few directions
//! that many rows share; along the gradient itself they alone would decide the step. `polar` is Newton and
//! Schulz's X ← X − ½ (X Xᵀ − I) X until f32 is exhausted, so every accepted R is orthogonal to rounding. t
//! is the minimum of the parabola through f(0), f'(0) and the last f(t), which also shortens a step that
//! was refused. So f never rises.
//!
//! | per step | operations |
//! | --- | --- |
//! | B | 2 m n² |
//! | each trial (nearly always one): Z | 2 m n² |
//! | direction: 3 times 3 n³, and R Ω | 11 n³ |
//! | each trial: `polar`, 2 to 3 times 3 n³ | 6 to 9 n³ |
//!
//! That is 35 n³ at m = 4 n. Memory beside the samples: 8 m n + 32 n² bytes.
//!
//! All sums have an order that depends on m and n only: the result is the same for every instruction set
//! and number of threads. Sources: Gadhikar, Hensman and Grazzi, OptRot, arXiv 2512.24124, for the
//! objective; Jordan et al., Muon, 2024, for `msign` with its a, b, c; Absil, Mahony and Sepulchre 2008 for
//! retractions.

use std::sync::Mutex;

use crate::isa::Isa;
use crate::numeric::Parallel;
use crate::numeric::dot::{Strided, multiply};
use crate::numeric::lanes::{Kernel, LANES, Lanes, dispatch};

/// When to stop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Options {
    /// Most steps.
    pub steps: usize,
    /// Stops after a step that lowers κ by less than this share of κ.
    pub tolerance: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self { steps: 60, tolerance: 1e-4 }
    }
}

/// What [`optimise`] found.
#[derive(Debug, Clone, PartialEq)]
pub struct Optimised {
    /// R, row-major `[n, n]`.
    pub matrix: Vec<f32>,
    /// κ of the start and after each accepted step; it falls strictly. 0 if all samples are 0.
    pub trace: Vec<f64>,
}

/// The length of the first step, as a rotation angle.
const FIRST_ANGLE: f64 = 0.2;
/// The longest step.
const MOST_ANGLE: f64 = 0.5;
/// The share of the old direction.
const MOMENTUM: f32 = 0.5;
/// What of the fall that the slope foretells a step must reach.
const ARMIJO: f64 = 1e-4;
/// Lengths tried along one direction.
const TRIALS: usize = 10;
/// Times that singular values are raised.
const RAISES: usize = 3;
/// x ← a x + b x³ + c x⁵ has values below 1.21 on [0, 1.21], and slope a at 0.
const RAISE: [f32; 3] = [3.4445, -4.7750, 2.0315];

/// Lowers κ of `samples` `[m, n]`, from the orthogonal matrix `start`, row-major `[n, n]`.
///
/// A sample is a weight's row (if the weight reads a rotated vector) or column (if it writes one), times a
/// weight whose fourth power is how much it counts; values about 1 are in range. `each_step` is told the
/// number of steps done and κ, and stops the search by returning false. Without a step that lowers κ, the
/// result is `start` as it was given.
///
/// R has n² / 2 degrees of freedom, so a few n samples are easy to flatten and say little about rows that took
/// no part. A small trained model (n = 512, 54 880 rows, κ = 0.996) reached 0.831 in 60 steps with all rows as
/// samples. With 2048 of them, those reached 0.524 and the others 0.987.
///
/// # Panics
/// If n is 0, `start` does not hold n² values, the samples are not rows of n, or a sample is not finite.
pub fn optimise(
    samples: &[f32],
    n: usize,
    start: &[f32],
    options: &Options,
    isa: Isa,
    parallel: Parallel<'_>,
    each_step: &mut dyn FnMut(usize, f64) -> bool,
) -> Optimised {
    assert!(n > 0 && start.len() == n * n, "{} values are not a matrix of order {n}", start.len());
    assert!(samples.len().is_multiple_of(n), "{} values are not rows of {n}", samples.len());
    let work = Work { n, isa, parallel };
    let unit = 3.0 / n as f64 * work.fourth_powers_of_lengths(samples);
    assert!(unit.is_finite(), "a sample is not finite");
    let mut r = start.to_vec();
    if unit == 0.0 {
        return Optimised { matrix: r, trace: vec![0.0] };
    }

    // Zᵀ and its cubes, [n, m].
    let mut z = vec![0.0; samples.len()];
    let mut cubes = vec![0.0; samples.len()];
    let square = || vec![0.0; n * n];
    let (mut gradient, mut momentum, mut omega) = (square(), square(), square());
    let (mut first, mut second, mut third, mut columns) = (square(), square(), square(), square());

    work.transpose(&r, &mut columns);
    let mut value = work.evaluate(&columns, samples, &mut z, &mut cubes);
    let mut trace = vec![value / unit];
    let mut angle = FIRST_ANGLE;
    for step in 0..options.steps {
        work.products(&z, &cubes, samples.len() / n, &mut first, Part::All);
        work.gradient(&first, &mut gradient);
        work.blend(&mut momentum, MOMENTUM, &gradient, 1.0);
        let mut fresh = step == 0;
        let next = loop {
            omega.copy_from_slice(&momentum);
            let along = work.equalise(&mut omega, &mut first, &mut second);
            // R Ω = −R msign(M), and f'(0) = ⟨G, Ω⟩.
            let slope = -work.inner(&gradient, &omega);
            let mut found = None;
            if slope < 0.0 {
                work.products(&r, &omega, n, &mut first, Part::All);
                let squares = along / n as f64;
                for _ in 0..TRIALS {
                    work.retract(
                        &r,
                        &first,
                        angle,
                        squares,
                        &mut second,
                        [&mut third, &mut columns, &mut omega],
                    );
                    let new = work.evaluate(&columns, samples, &mut z, &mut cubes);
                    let bend = new - value - slope * angle;
                    let best = if bend > 0.0 { -slope * angle * angle / (2.0 * bend) } else { f64::INFINITY };
                    if new < value && new <= value + ARMIJO * slope * angle {
                        found = Some((new, best.clamp(0.5 * angle, 1.5 * angle).min(MOST_ANGLE)));
                        break;
                    }
                    angle = best.clamp(0.1 * angle, 0.5 * angle);
                }
            }
            if found.is_some() || fresh {
                break found;
            }
            // The old direction may be what is wrong.
            momentum.copy_from_slice(&gradient);
            angle = FIRST_ANGLE;
            fresh = true;
        };
        let Some((new, next_angle)) = next else { break };
        std::mem::swap(&mut r, &mut second);
        let fall = (value - new) / value;
        (value, angle) = (new, next_angle);
        trace.push(value / unit);
        if !each_step(step + 1, value / unit) || fall < options.tolerance {
            break;
        }
    }
    Optimised { matrix: r, trace }
}

/// Which part of a symmetric or skew product is computed.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    All,
    /// The blocks of rows up to their diagonal.
    Lower,
}

/// Operations on matrices of order n, cut into blocks of rows.
struct Work<'a> {
    n: usize,
    isa: Isa,
    parallel: Parallel<'a>,
}

impl Work<'_> {
    /// Rows of a block: enough of them to share what they are multiplied with, and sixteen blocks if n
    /// allows.
    fn block(&self) -> usize {
        (self.n / 16).clamp(16, 64)
    }

    /// Σ_i part(i), added in the order of i.
    fn sum(&self, count: usize, part: &(dyn Fn(usize) -> f64 + Sync)) -> f64 {
        let sums: Vec<_> = (0..count).map(|_| Mutex::new(0.0)).collect();
        (self.parallel)(count, &|i| *sums[i].lock().expect("a part does not panic twice") = part(i));
        sums.into_iter().map(|sum| sum.into_inner().expect("a part that panics ends the search")).sum()
    }

    /// Runs `work(first row, rows)` on every block of rows of `len` values; the sum of what it returns.
    fn blocks(&self, out: &mut [f32], len: usize, work: &(dyn Fn(usize, &mut [f32]) -> f64 + Sync)) -> f64 {
        let block = self.block();
        let parts: Vec<_> = out.chunks_mut(block * len).map(Mutex::new).collect();
        self.sum(parts.len(), &|i| {
            // The last one first: of a lower triangle it is the longest.
            let i = parts.len() - 1 - i;
            work(i * block, &mut parts[i].lock().expect("each block is visited once"))
        })
    }

    /// Σ_i ‖s_i‖⁴.
    fn fourth_powers_of_lengths(&self, samples: &[f32]) -> f64 {
        const ROWS: usize = 256;
        let parts: Vec<_> = samples.chunks(ROWS * self.n).collect();
        self.sum(parts.len(), &|i| {
            let squares = parts[i].chunks_exact(self.n).map(|x| dispatch(self.isa, Inner { x, y: x }));
            squares.map(|square| square * square).sum()
        })
    }

    /// Zᵀ and its cubes for R whose columns are the rows of `columns`; Σ z⁴.
    fn evaluate(&self, columns: &[f32], samples: &[f32], z: &mut [f32], cubes: &mut [f32]) -> f64 {
        let (n, m) = (self.n, samples.len() / self.n);
        self.products(columns, samples, n, z, Part::All);
        let z = &*z;
        self.blocks(cubes, m, &|row, cubes| {
            dispatch(self.isa, Powers { z: &z[row * m..][..cubes.len()], cubes })
        })
    }

    /// out[i, j] = dot(x[i], w[j])                              x: [I, K]  w: [J, K]
    fn products(&self, x: &[f32], w: &[f32], k: usize, out: &mut [f32], part: Part) {
        let width = w.len() / k;
        self.blocks(out, width, &|row, out| {
            let rows = out.len() / width;
            let count = if part == Part::Lower { row + rows } else { width };
            let x = Strided { values: &x[row * k..], stride: k, rows };
            multiply(x, Strided { values: w, stride: k, rows: count }, k, out, width, self.isa);
            0.0
        });
    }

    /// to = fromᵀ
    fn transpose(&self, from: &[f32], to: &mut [f32]) {
        let n = self.n;
        self.blocks(to, n, &|row, to| {
            let rows = to.len() / n;
            for (j, from) in from.chunks_exact(n).enumerate() {
                for (i, value) in from[row..row + rows].iter().enumerate() {
                    to[i * n + j] = *value;
                }
            }
            0.0
        });
    }

    /// G = 2 (B − Bᵀ)
    fn gradient(&self, b: &[f32], gradient: &mut [f32]) {
        let n = self.n;
        self.blocks(gradient, n, &|row, out| {
            let rows = out.len() / n;
            for (j, column) in b.chunks_exact(n).enumerate() {
                for (i, value) in column[row..row + rows].iter().enumerate() {
                    out[i * n + j] = 2.0 * (b[(row + i) * n + j] - value);
                }
            }
            0.0
        });
    }

    /// x ← a x + b y
    fn blend(&self, x: &mut [f32], a: f32, y: &[f32], b: f32) {
        let n = self.n;
        self.blocks(x, n, &|row, x| {
            for (x, y) in x.iter_mut().zip(&y[row * n..]) {
                *x = a * *x + b * y;
            }
            0.0
        });
    }

    /// x ← a x + b L of a symmetric (sign 1) or skew (sign −1) L, which is read from its lower triangle.
    fn blend_lower(&self, x: &mut [f32], a: f32, lower: &[f32], b: f32, sign: f32) {
        let n = self.n;
        self.blocks(x, n, &|row, x| {
            let rows = x.len() / n;
            for (i, x) in x.chunks_exact_mut(n).enumerate() {
                let end = row + i;
                for (x, l) in x[..end].iter_mut().zip(&lower[end * n..]) {
                    *x = a * *x + b * l;
                }
                let diagonal = if sign > 0.0 { lower[end * n + end] } else { 0.0 };
                x[end] = a * x[end] + b * diagonal;
            }
            for (j, l) in lower.chunks_exact(n).enumerate().skip(row + 1) {
                for (i, l) in l[row..row + rows.min(j - row)].iter().enumerate() {
                    let x = &mut x[i * n + j];
                    *x = a * *x + b * (sign * l);
                }
            }
            0.0
        });
    }

    /// Σ l² of a symmetric or skew matrix, which is read from its lower triangle.
    fn squares_of_lower(&self, lower: &[f32]) -> f64 {
        let n = self.n;
        self.sum(n.div_ceil(self.block()), &|block| {
            let rows = block * self.block()..n.min((block + 1) * self.block());
            let squares = rows.map(|i| {
                let (below, diagonal) = (&lower[i * n..i * n + i], f64::from(lower[i * n + i]));
                2.0 * dispatch(self.isa, Inner { x: below, y: below }) + diagonal * diagonal
            });
            squares.sum()
        })
    }

    /// Σ x y
    fn inner(&self, x: &[f32], y: &[f32]) -> f64 {
        const PART: usize = 1 << 16;
        let pairs: Vec<_> = x.chunks(PART).zip(y.chunks(PART)).collect();
        self.sum(pairs.len(), &|i| dispatch(self.isa, Inner { x: pairs[i].0, y: pairs[i].1 }))
    }

    /// Raises the singular values of a skew matrix towards 1, and keeps it skew; Σ x².
    fn equalise(&self, x: &mut [f32], lower: &mut [f32], square: &mut [f32]) -> f64 {
        let n = self.n;
        let length = self.inner(x, x).sqrt();
        if length == 0.0 {
            return 0.0;
        }
        self.scale(x, (1.0 / length) as f32);
        let [a, b, c] = RAISE;
        for raise in 0..RAISES {
            // A = X Xᵀ
            self.products(x, x, n, lower, Part::Lower);
            self.blend_lower(square, 0.0, lower, 1.0, 1.0);
            // A² = A Aᵀ
            self.products(square, square, n, lower, Part::Lower);
            if raise == 0 {
                // Of X the largest singular value is at most the fourth root of the length of A².
                let bound = self.squares_of_lower(lower).sqrt().sqrt();
                self.scale(x, (1.0 / bound.sqrt()) as f32);
                self.scale(square, (1.0 / bound) as f32);
                self.scale(lower, (1.0 / (bound * bound)) as f32);
            }
            self.blend_lower(square, b, lower, c, 1.0);
            // (b A + c A²) X, and X = −Xᵀ
            self.products(square, x, n, lower, Part::Lower);
            self.blend_lower(x, a, lower, -1.0, -1.0);
        }
        self.inner(x, x)
    }

    /// x ← a x
    fn scale(&self, x: &mut [f32], a: f32) {
        self.blocks(x, self.n, &|_, x| {
            x.iter_mut().for_each(|x| *x *= a);
            0.0
        });
    }

    /// `to` becomes polar(R + t R Ω), of `along` = R Ω, and the second of `spare` its transpose.
    ///
    /// `squares` is the mean of the squared singular values of Ω, which are at most 1.21².
    fn retract(
        &self,
        r: &[f32],
        along: &[f32],
        t: f64,
        squares: f64,
        to: &mut [f32],
        spare: [&mut [f32]; 3],
    ) {
        let n = self.n;
        let [product, transposed, excess] = spare;
        // (R + t R Ω) (R + t R Ω)ᵀ = I − t² R Ω² Rᵀ
        let mean = 1.0 + t * t * squares;
        to.copy_from_slice(r);
        let scale = 1.0 / mean.sqrt();
        self.blend(to, scale as f32, along, (t * scale) as f32);
        self.transpose(to, transposed);
        // The largest |σ² − 1|, which becomes 3/4 of its square, and a quarter of its cube.
        let mut error = (1.0 - 1.0 / mean).max((1.0 + 1.4641 * t * t) / mean - 1.0);
        while error > 1e-8 {
            self.products(to, to, n, product, Part::Lower);
            self.blend_lower(excess, 0.0, product, 1.0, 1.0);
            excess.iter_mut().step_by(n + 1).for_each(|diagonal| *diagonal -= 1.0);
            self.products(excess, transposed, n, product, Part::All);
            self.blend(to, 1.0, product, -0.5);
            self.transpose(to, transposed);
            error = error * error * (0.75 + 0.25 * error);
        }
    }
}

/// z³, and Σ z⁴: z² and its square rounded to f32, their sum in f64.
struct Powers<'a> {
    z: &'a [f32],
    cubes: &'a mut [f32],
}

impl Kernel for Powers<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<V: Lanes>(self) -> f64 {
        let (zs, z_rest) = self.z.as_chunks::<LANES>();
        let (cubes, cubes_rest) = self.cubes.as_chunks_mut::<LANES>();
        let mut sum = V::wide_zero();
        for (z, cube) in zs.iter().zip(cubes) {
            let z = V::load(z);
            let square = z.mul(z);
            square.mul(z).store(cube);
            sum = square.mul(square).wide_add(sum);
        }
        let mut total: f64 = V::wide_store(sum).iter().sum();
        for (z, cube) in z_rest.iter().zip(cubes_rest) {
            let square = z * z;
            *cube = square * z;
            total += f64::from(square * square);
        }
        total
    }
}

/// Σ x y in f64, in sixteen lanes: each product is exact.
struct Inner<'a> {
    x: &'a [f32],
    y: &'a [f32],
}

impl Kernel for Inner<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<V: Lanes>(self) -> f64 {
        let ((xs, x_rest), (ys, y_rest)) = (self.x.as_chunks::<LANES>(), self.y.as_chunks::<LANES>());
        let mut sums = [0.0; LANES];
        for (x, y) in xs.iter().zip(ys) {
            for i in 0..LANES {
                sums[i] += f64::from(x[i]) * f64::from(y[i]);
            }
        }
        let rest: f64 = x_rest.iter().zip(y_rest).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
        sums.iter().sum::<f64>() + rest
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::transform::hadamard::SignWords;
    use crate::transform::{Dense, random_orthogonal};

    fn serial(count: usize, part: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(part);
    }

    fn backwards(count: usize, part: &(dyn Fn(usize) + Sync)) {
        (0..count).rev().for_each(part);
    }

    fn three_threads(count: usize, part: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        let run = || {
            while let i @ 0.. = next.fetch_add(1, Ordering::Relaxed)
                && i < count
            {
                part(i);
            }
        };
        std::thread::scope(|threads| (0..3).for_each(|_| drop(threads.spawn(run))));
    }

    /// Numbers in (−1, 1), and some ten times as large.
    fn heavy(count: usize, lane: u32) -> Vec<f32> {
        let words = SignWords::new(7, lane).take(count);
        words
            .map(|word| (word as i32 as f32 / 2f32.powi(31)) * if word % 16 == 3 { 10.0 } else { 1.0 })
            .collect()
    }

    fn signs(count: usize, lane: u32) -> Vec<f32> {
        SignWords::new(11, lane).take(count).map(|word| if word & 1 == 0 { 1.0 } else { -1.0 }).collect()
    }

    fn identity(n: usize) -> Vec<f32> {
        (0..n * n).map(|at| if at % (n + 1) == 0 { 1.0 } else { 0.0 }).collect()
    }

    /// x R in f64.
    fn rotated(x: &[f32], r: &[f64], n: usize) -> Vec<f64> {
        let entry = |x: &[f32], j| x.iter().enumerate().map(|(k, x)| f64::from(*x) * r[k * n + j]).sum();
        x.chunks_exact(n).flat_map(|x| (0..n).map(move |j| entry(x, j))).collect()
    }

    fn fourth_powers(samples: &[f32], r: &[f64], n: usize) -> f64 {
        rotated(samples, r, n).iter().map(|z| z.powi(4)).sum()
    }

    fn kappa(samples: &[f32], r: &[f32], n: usize) -> f64 {
        let lengths = samples.chunks_exact(n).map(|x| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>());
        let unit = 3.0 / n as f64 * lengths.map(|square| square * square).sum::<f64>();
        fourth_powers(samples, &wide(r), n) / unit
    }

    fn wide(x: &[f32]) -> Vec<f64> {
        x.iter().map(|x| f64::from(*x)).collect()
    }

    /// The largest |RᵀR − I|.
    fn distance_from_orthogonal(r: &[f32], n: usize) -> f64 {
        let entry = |i, j| (0..n).map(|k| f64::from(r[k * n + i]) * f64::from(r[k * n + j])).sum::<f64>();
        let error = |i, j| (entry(i, j) - if i == j { 1.0 } else { 0.0 }).abs();
        (0..n).flat_map(|i| (0..=i).map(move |j| error(i, j))).fold(0.0, f64::max)
    }

    fn run(samples: &[f32], n: usize, start: &[f32], options: &Options) -> Optimised {
        optimise(samples, n, start, options, Isa::best(), &serial, &mut |_, _| true)
    }

    #[test]
    fn the_gradient_is_the_derivative_along_every_plane_rotation() {
        let n = 9;
        let (samples, r) = (heavy(40 * n, 0), random_orthogonal(n, 1, 0));
        let work = Work { n, isa: Isa::best(), parallel: &serial };
        let (mut z, mut cubes) = (vec![0.0; samples.len()], vec![0.0; samples.len()]);
        let (mut columns, mut b, mut gradient) = (r.clone(), r.clone(), r.clone());
        work.transpose(&r, &mut columns);
        let value = work.evaluate(&columns, &samples, &mut z, &mut cubes);
        work.products(&z, &cubes, 40, &mut b, Part::All);
        work.gradient(&b, &mut gradient);
        let exact = fourth_powers(&samples, &wide(&r), n);
        assert!((value - exact).abs() < 1e-5 * exact, "{value} is not {exact}");
        for i in 0..n {
            assert_eq!(gradient[i * n + i], 0.0);
            for j in 0..i {
                // R exp(tΩ) for Ω[i, j] = 1, Ω[j, i] = −1 turns columns i and j.
                let turned = |t: f64| {
                    let mut r = wide(&r);
                    for row in r.chunks_exact_mut(n) {
                        let (a, b) = (row[i], row[j]);
                        (row[i], row[j]) = (a * t.cos() - b * t.sin(), a * t.sin() + b * t.cos());
                    }
                    fourth_powers(&samples, &r, n)
                };
                let expected = (turned(1e-5) - turned(-1e-5)) / 2e-5;
                // ⟨G, Ω⟩ = G[i, j] − G[j, i]
                let found = f64::from(gradient[i * n + j]) - f64::from(gradient[j * n + i]);
                assert!((found - expected).abs() < 1e-5 * exact, "{i} {j}: {found} is not {expected}");
            }
        }
    }

    #[test]
    fn singular_values_of_the_direction_are_those_of_the_gradient_through_the_polynomial() {
        // Planes of columns 2 p and 2 p + 1, each with a singular value twice.
        let values = [3.0, 1.0, 0.3, 0.01, 0.0];
        let n = 2 * values.len();
        let mut x = vec![0.0; n * n];
        for (p, value) in values.into_iter().enumerate() {
            x[2 * p * n + 2 * p + 1] = value as f32;
            x[(2 * p + 1) * n + 2 * p] = -value as f32;
        }
        let work = Work { n, isa: Isa::best(), parallel: &serial };
        let squares = work.equalise(&mut x, &mut vec![0.0; n * n], &mut vec![0.0; n * n]);
        let bound = values.iter().map(|value: &f64| 2.0 * value.powi(8)).sum::<f64>().powf(0.125);
        let [a, b, c] = RAISE.map(f64::from);
        let raised =
            values.map(|value| (0..RAISES).fold(value / bound, |x, _| a * x + b * x.powi(3) + c * x.powi(5)));
        let mut expected = vec![0.0; n * n];
        for (p, value) in raised.into_iter().enumerate() {
            assert!(value <= 1.21);
            expected[2 * p * n + 2 * p + 1] = value;
            expected[(2 * p + 1) * n + 2 * p] = -value;
        }
        for (at, (x, expected)) in x.iter().zip(&expected).enumerate() {
            assert!((f64::from(*x) - expected).abs() < 1e-5, "{at}: {x} is not {expected}");
        }
        let expected = 2.0 * raised.iter().map(|value| value * value).sum::<f64>();
        assert!((squares - expected).abs() < 1e-4, "{squares} is not {expected}");
    }

    #[test]
    fn a_retraction_turns_each_plane_by_the_angle_whose_tangent_is_t_times_its_singular_value() {
        let n = 40;
        let values: Vec<f64> = (0..n / 2).map(|p| 1.2 * p as f64 / (n / 2) as f64).collect();
        let (mut along, mut expected) = (vec![0.0; n * n], vec![0.0; n * n]);
        let t = MOST_ANGLE;
        for (p, value) in values.iter().enumerate() {
            let (i, j) = (2 * p, 2 * p + 1);
            let angle = (t * value).atan();
            (along[i * n + j], along[j * n + i]) = (*value as f32, -*value as f32);
            (expected[i * n + i], expected[j * n + j]) = (angle.cos(), angle.cos());
            (expected[i * n + j], expected[j * n + i]) = (angle.sin(), -angle.sin());
        }
        let work = Work { n, isa: Isa::best(), parallel: &serial };
        let squares = 2.0 * values.iter().map(|value| value * value).sum::<f64>() / n as f64;
        let square = || vec![0.0; n * n];
        let (mut to, mut product, mut transposed, mut excess) = (square(), square(), square(), square());
        let spare = [&mut product[..], &mut transposed, &mut excess];
        work.retract(&identity(n), &along, t, squares, &mut to, spare);
        for i in 0..n {
            for j in 0..n {
                let (found, expected) = (f64::from(to[i * n + j]), expected[i * n + j]);
                assert!((found - expected).abs() < 3e-7, "{i} {j}: {found} is not {expected}");
                assert_eq!(to[i * n + j], transposed[j * n + i]);
            }
        }
    }

    #[test]
    fn the_objective_falls_with_every_step_and_the_result_is_orthogonal_and_has_it() {
        for n in [3, 16, 33, 70] {
            let samples = heavy(12 * n * n, n as u32);
            let start = random_orthogonal(n, 2, 0);
            let mut seen = Vec::new();
            let options = Options { steps: 25, tolerance: 0.0 };
            let found = optimise(&samples, n, &start, &options, Isa::best(), &serial, &mut |step, value| {
                seen.push(value);
                assert_eq!(step, seen.len());
                true
            });
            assert_eq!(found.trace[1..], seen);
            assert!(found.trace.is_sorted_by(|a, b| a > b), "{n}: {:?}", found.trace);
            assert!(seen.len() > 3, "{n}: {:?}", found.trace);
            let orthogonal = distance_from_orthogonal(&found.matrix, n);
            assert!(orthogonal < 5e-7, "{n}: {orthogonal}");
            for (value, r) in [(found.trace[0], &start), (seen[seen.len() - 1], &found.matrix)] {
                let exact = kappa(&samples, r, n);
                assert!((value - exact).abs() < 1e-5 * exact, "{n}: {value} is not {exact}");
            }
        }
    }

    #[test]
    fn finds_the_basis_in_which_all_magnitudes_are_equal() {
        let n = 48;
        // Rows of signs in a hidden basis: κ is 1/3 there, and no less anywhere.
        let hidden = Dense::new(random_orthogonal(n, 3, 0), n);
        let mut samples = signs(10 * n * n, 0);
        hidden.unrotate_rows(&mut samples, n, Isa::best(), &mut Vec::new());
        let options = Options { steps: 200, tolerance: 0.0 };
        let found = run(&samples, n, &random_orthogonal(n, 4, 0), &options);
        let (first, last) = (found.trace[0], found.trace[found.trace.len() - 1]);
        assert!(first > 0.9 && last < 0.3334, "{first} to {last} in {} steps", found.trace.len() - 1);
        // Every column is one of the hidden basis, up to its sign.
        for j in 0..n {
            let overlap =
                |i| (0..n).map(|k| found.matrix[k * n + j] * hidden.matrix()[k * n + i]).sum::<f32>();
            let closest = (0..n).map(|i| overlap(i).abs()).fold(0.0, f32::max);
            assert!(closest > 0.999, "{j}: {closest}");
        }
    }

    #[test]
    fn two_dimensions_and_one() {
        // One vector in the plane: best where both coordinates have the same magnitude.
        let found = run(&[1.0, 0.2], 2, &identity(2), &Options { steps: 100, tolerance: 0.0 });
        let last = found.trace[found.trace.len() - 1];
        assert!((last - 1.0 / 3.0).abs() < 1e-6, "{:?}", found.trace);
        let [a, b, c, d] = found.matrix[..] else { unreachable!("four values") };
        let (x, y) = (a + 0.2 * c, b + 0.2 * d);
        assert!((x.abs() - y.abs()).abs() < 1e-3, "{x} {y}");

        let found = run(&[2.0, -3.0], 1, &[-1.0], &Options::default());
        assert_eq!(found.matrix, [-1.0]);
        assert!(found.trace.len() == 1 && (found.trace[0] - 1.0 / 3.0).abs() < 1e-7, "{:?}", found.trace);
    }

    #[test]
    fn returns_the_start_if_there_is_nothing_to_do() {
        let n = 5;
        let start = random_orthogonal(n, 5, 0);
        for (samples, steps) in [(vec![], 9), (vec![0.0; 3 * n], 9), (heavy(7 * n, 1), 0)] {
            let found = run(&samples, n, &start, &Options { steps, tolerance: 0.0 });
            assert_eq!((&found.matrix, found.trace.len()), (&start, 1), "{} values", samples.len());
        }
        // At the identity a plane vector along an axis is a maximum, where the gradient is 0.
        let found = run(&[1.0, 0.0], 2, &identity(2), &Options::default());
        assert_eq!((found.matrix, found.trace.len()), (identity(2), 1));
    }

    #[test]
    fn stops_when_told_to_and_when_steps_gain_too_little() {
        let n = 12;
        let (samples, start) = (heavy(100 * n, 2), random_orthogonal(n, 6, 0));
        let options = Options { steps: 50, tolerance: 0.0 };
        let all = run(&samples, n, &start, &options).trace;
        let told = optimise(&samples, n, &start, &options, Isa::best(), &serial, &mut |step, _| step < 4);
        assert_eq!(told.trace, all[..5]);
        let fall = |at: usize| (all[at - 1] - all[at]) / all[at - 1];
        let tolerance = 0.02;
        let first = (1..all.len()).find(|at| fall(*at) < tolerance).expect("late steps gain less");
        let little = run(&samples, n, &start, &Options { steps: 50, tolerance });
        assert_eq!(little.trace, all[..=first]);
    }

    #[test]
    fn every_instruction_set_and_split_gives_the_same_bits() {
        // More samples than are summed at once, blocks and vectors that are not full.
        let (n, m) = (37, 4500);
        let (samples, start) = (heavy(m * n, 3), random_orthogonal(n, 7, 0));
        let options = Options { steps: 4, tolerance: 0.0 };
        let run = |isa, parallel| optimise(&samples, n, &start, &options, isa, parallel, &mut |_, _| true);
        let expected = run(Isa::Scalar, &serial);
        assert_eq!(expected.trace.len(), 5);
        let bits = |found: Optimised| -> (Vec<u32>, Vec<u64>) {
            let matrix = found.matrix.into_iter().map(f32::to_bits).collect();
            (matrix, found.trace.into_iter().map(f64::to_bits).collect())
        };
        let expected = bits(expected);
        for isa in Isa::available() {
            for (name, parallel) in [("in order", &serial as Parallel<'_>), ("backwards", &backwards)] {
                assert_eq!(bits(run(isa, parallel)), expected, "{isa} {name}");
            }
            assert_eq!(bits(run(isa, &three_threads)), expected, "{isa} three threads");
        }
    }
}
