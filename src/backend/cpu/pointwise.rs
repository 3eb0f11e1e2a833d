//! Norms and functions of single values.

use super::Cpu;
use crate::numeric::lanes::{Kernel, LANES, Lanes, dispatch};
use crate::numeric::math::{sigmoid, silu};

/// Values below which one thread is faster than two.
const SMALL: usize = 1 << 14;

impl Cpu {
    /// out[t, i] = x[t, i] / sqrt(Σ_i x[t, i]² / width + eps) · gain[i]
    ///
    /// The sum is that of [`super::dot`] over one panel: lane l adds x[i]² for i ≡ l (mod 16), then halves.
    ///
    /// # Panics
    /// If lengths do not fit each other.
    pub fn rms_norm(&self, x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
        let width = gain.len();
        assert!(x.len() == out.len() && x.len().is_multiple_of(width), "rows of the gain's width");
        self.rows(x.len() / width, width, out, &|rows, out| {
            let x = &x[rows.start * width..rows.end * width];
            dispatch(self.isa, RmsNorm { x, gain, eps, out });
        });
    }

    /// gate[i] = silu(gate[i]) · up[i]
    pub fn silu_product(&self, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len());
        self.rows(gate.len().div_ceil(LANES), LANES, gate, &|rows, gate| {
            let up = &up[rows.start * LANES..][..gate.len()];
            dispatch(self.isa, Product { by: up, values: gate, function: Function::SiluOfValue });
        });
    }

    /// values[i] = values[i] · sigmoid(gate[i])
    pub fn sigmoid_product(&self, values: &mut [f32], gate: &[f32]) {
        assert_eq!(values.len(), gate.len());
        self.rows(values.len().div_ceil(LANES), LANES, values, &|rows, values| {
            let by = &gate[rows.start * LANES..][..values.len()];
            dispatch(self.isa, Product { by, values, function: Function::SigmoidOfOther });
        });
    }

    /// x[i] = x[i] + y[i]
    pub fn add(&self, x: &mut [f32], y: &[f32]) {
        assert_eq!(x.len(), y.len());
        x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
    }

    /// Shares rows of `out` among the team if there are enough values.
    fn rows(
        &self,
        count: usize,
        width: usize,
        out: &mut [f32],
        work: &(dyn Fn(std::ops::Range<usize>, &mut [f32]) + Sync),
    ) {
        if out.len() < SMALL {
            work(0..count, out);
            return;
        }
        let each = (SMALL / 2).div_ceil(width);
        self.threads.chunks(out, each * width, &|i, part| {
            work(i * each..count.min((i + 1) * each), part);
        });
    }
}

struct RmsNorm<'a> {
    x: &'a [f32],
    gain: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let width = self.gain.len();
        for (x, out) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            let scale = 1.0 / (squares::<V>(x) / width as f32 + self.eps).sqrt();
            scaled::<V>(x, scale, self.gain, out);
        }
    }
}

/// Σ x[i]²
#[inline(always)]
pub(super) fn squares<V: Lanes>(x: &[f32]) -> f32 {
    let (lanes, rest) = x.as_chunks::<LANES>();
    let mut sum = V::splat(0.0);
    for x in lanes {
        let x = V::load(x);
        sum = x.fma(x, sum);
    }
    if !rest.is_empty() {
        let x = V::load_part(rest);
        sum = x.fma(x, sum);
    }
    sum.sum()
}

/// out[i] = x[i] · scale · gain[i]
#[inline(always)]
pub(super) fn scaled<V: Lanes>(x: &[f32], scale: f32, gain: &[f32], out: &mut [f32]) {
    let (lanes, rest) = x.as_chunks::<LANES>();
    let (gains, gain_rest) = gain.as_chunks::<LANES>();
    let (outs, out_rest) = out.as_chunks_mut::<LANES>();
    let scales = V::splat(scale);
    for ((x, gain), out) in lanes.iter().zip(gains).zip(outs) {
        V::load(x).mul(scales).mul(V::load(gain)).store(out);
    }
    for ((x, gain), out) in rest.iter().zip(gain_rest).zip(out_rest) {
        *out = x * scale * gain;
    }
}

#[derive(Clone, Copy)]
enum Function {
    SiluOfValue,
    SigmoidOfOther,
}

impl Function {
    // Not a closure: one that is not inlined would be compiled for the baseline.
    #[inline(always)]
    fn of<V: Lanes>(self, value: V, by: V) -> V {
        match self {
            Function::SiluOfValue => silu(value).mul(by),
            Function::SigmoidOfOther => value.mul(sigmoid(by)),
        }
    }
}

struct Product<'a> {
    values: &'a mut [f32],
    by: &'a [f32],
    function: Function,
}

impl Kernel for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let (lanes, rest) = self.values.as_chunks_mut::<LANES>();
        let (by, by_rest) = self.by.as_chunks::<LANES>();
        for (value, by) in lanes.iter_mut().zip(by) {
            self.function.of(V::load(value), V::load(by)).store(value);
        }
        if !rest.is_empty() {
            let mut out = [0.0; LANES];
            self.function.of(V::load_part(rest), V::load_part(by_rest)).store(&mut out);
            rest.copy_from_slice(&out[..rest.len()]);
        }
    }
}
