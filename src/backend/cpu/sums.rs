//! The fast path of trellis weights whose values are sums of bytes and whose tiles lie along outputs.
//!
//! With w[n, k] = r[n] · s[k] · v[n, k], v = Σ bytes − 510, and s[k] · x[t, k] ≈ z[t, b] · q[t, k], b = k / 128,
//!
//! y[t, n] = r[n] · Σ_b z[t, b] · I[t, n, b]                                  I = Σ_{k in block b} q[t, k] · v[n, k]
//!
//! I is an integer below 2^23, so exact whatever the order. Each z · I is fused with the sum and rounded once, in the
//! order of b; then the product with r rounds. Without scales of outputs r is 1. s · x rounds to f32, and z and q are made
//! of that as [`super::quantized`] makes a group's scale and codes; a last block that is not full is filled up with zeros.
//!
//! | what | where it is applied |
//! | --- | --- |
//! | s, the scale of each input | to x, before it is quantized |
//! | 510 | to the sum of a block's q, once for all outputs |
//! | r, the scale of each output | to the sum of blocks |
//!
//! The bytes of a state's product are multiplied as they are: Σ bytes · q is one dot product of bytes, and no value of
//! a weight is ever put together.

use std::ops::Range;

use super::quantized::quantize_group;
use crate::backend::Columns;
use crate::codec::trellis::MAX_TILE;
use crate::codec::trellis::decode::{AnyRule, BYTES_LESS, Bytes, Room, View, Words, with_width};
use crate::numeric::dot::PANEL;
use crate::numeric::lanes::{Kernel, LANES, Lanes};

/// Inputs that share a scale.
const BLOCK: usize = 128;

/// Rows of activations, times a layer's scales of inputs, as integers.
#[derive(Debug)]
pub(super) struct Folded {
    /// The layer's, f16.
    scales: Vec<u8>,
    rows: usize,
    /// Blocks of a row.
    blocks: usize,
    /// q, as [`Lanes::add_bytes`] takes it: [T, blocks, 128].
    factors: Vec<u32>,
    /// z: [T, blocks].
    steps: Vec<f32>,
    /// −510 Σ q: [T, blocks].
    less: Vec<i32>,
}

/// One row of it, to be filled.
#[derive(Debug)]
pub(super) struct RowMut<'a> {
    factors: &'a mut [u32],
    steps: &'a mut [f32],
    less: &'a mut [i32],
}

impl Folded {
    /// Room for `rows` rows, until [`Fold`] has filled it.
    pub fn new(rows: usize, scales: &[u8]) -> Self {
        let blocks = (scales.len() / 2).div_ceil(BLOCK);
        Self {
            scales: scales.to_vec(),
            rows,
            blocks,
            factors: vec![0; rows * blocks * BLOCK],
            steps: vec![0.0; rows * blocks],
            less: vec![0; rows * blocks],
        }
    }

    /// What it was made with.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// Each row alone.
    pub fn rows_mut(&mut self) -> impl Iterator<Item = RowMut<'_>> {
        let factors = self.factors.chunks_mut(self.blocks * BLOCK);
        let steps = self.steps.chunks_mut(self.blocks);
        let less = self.less.chunks_mut(self.blocks);
        factors.zip(steps).zip(less).map(|((factors, steps), less)| RowMut { factors, steps, less })
    }
}

/// Multiplies a row of x by `scales`, and quantizes it.
pub(super) struct Fold<'a> {
    pub x: &'a [f32],
    pub scales: &'a [u8],
    pub to: RowMut<'a>,
}

impl Kernel for Fold<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self { x, scales, to } = self;
        let blocks = x.chunks(BLOCK).zip(scales.chunks(2 * BLOCK));
        let to = to.factors.as_chunks_mut::<BLOCK>().0.iter_mut().zip(to.steps).zip(to.less);
        for ((x, scales), ((factors, step), less)) in blocks.zip(to) {
            let (mut products, mut codes) = ([0.0; BLOCK], [0; BLOCK]);
            let sixteens = x.chunks(LANES).zip(scales.chunks(2 * LANES));
            for ((x, scales), to) in sixteens.zip(products.as_chunks_mut::<LANES>().0) {
                V::load_part(x).mul(V::load_f16_part(scales)).store(to);
            }
            let (scale, sum) = quantize_group::<V>(&products, &mut codes);
            (*step, *less) = (scale, -BYTES_LESS * sum as i32);
            for (factor, code) in factors.iter_mut().zip(codes) {
                *factor = V::times(code as i8);
            }
        }
    }
}

/// out[t, n] for all t, and n in `rows`, which are rows of one matrix.
pub(super) struct ByStrips<'a, 'b> {
    pub view: &'a View<'b>,
    pub x: &'a Folded,
    pub rows: Range<usize>,
    pub out: &'a Columns<'a>,
}

impl Kernel for ByStrips<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self { view, x, rows, out } = self;
        assert_eq!(x.scales.len(), 2 * view.in_features(), "a scale for each input");
        match view.rule() {
            AnyRule::Product(rule) => by_width::<V, _>(view, rule, x, rows, out),
            AnyRule::Congruence(rule) => by_width::<V, _>(view, rule, x, rows, out),
            AnyRule::Other(_) => unreachable!("values that are no integers have no fast path"),
        }
    }
}

#[inline(always)]
fn by_width<V: Lanes, R: Bytes>(view: &View<'_>, rule: R, x: &Folded, rows: Range<usize>, out: &Columns<'_>) {
    with_width!(view.bits(), BITS => V::call(By::<R, BITS> { view, rule, x, rows, out }));
}

/// [`ByStrips`], compiled once for each rule and k.
struct By<'a, 'b, R, const BITS: u32> {
    view: &'a View<'b>,
    rule: R,
    x: &'a Folded,
    rows: Range<usize>,
    out: &'a Columns<'a>,
}

impl<R: Bytes, const BITS: u32> Kernel for By<'_, '_, R, BITS> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let mut t = 0;
        while t < self.x.rows {
            // Each decoded weight is used for so many rows.
            t += match self.x.rows - t {
                4.. => self.rows_of_x::<V, 4>(t),
                2 | 3 => self.rows_of_x::<V, 2>(t),
                _ => self.rows_of_x::<V, 1>(t),
            };
        }
    }
}

/// Sums of a strip for some rows of x.
type Sums<const T: usize> = [[f32; LANES]; T];

impl<R: Bytes, const BITS: u32> By<'_, '_, R, BITS> {
    /// `T` rows of x from `t` on; gives `T`.
    #[inline(always)]
    fn rows_of_x<V: Lanes, const T: usize>(&self, t: usize) -> usize {
        let Self { view, rule, x, ref rows, out } = *self;
        let (k, mask) = (view.in_features(), view.mask::<V>());
        let mut room: Room = [[0; 16]; PANEL];
        let mut sums: [Sums<T>; MAX_TILE / LANES] = [[[0.0; LANES]; T]; MAX_TILE / LANES];
        let mut first = rows.start;
        while first < rows.end {
            let end = view.tile_end(first).min(rows.end);
            for start in (0..k).step_by(PANEL) {
                let panel = start..k.min(start + PANEL);
                let mut row = first;
                let mut of_strip = sums.iter_mut();
                while row < end {
                    let strip = view.strip(row);
                    let words = strip.words(panel.clone(), BITS, &mut room);
                    let sums = of_strip.next().expect("strips of a tile");
                    let mut totals = [V::splat(0.0); T];
                    if start > 0 {
                        for (total, sum) in totals.iter_mut().zip(sums.iter()) {
                            *total = V::load(sum);
                        }
                    }
                    self.panel::<V, T>(rule, words, x, t, start, mask, &mut totals);
                    if panel.end == k {
                        let outputs = strip.outputs::<V>();
                        for total in &mut totals {
                            *total = total.mul(outputs);
                        }
                    }
                    for (total, sum) in totals.into_iter().zip(sums) {
                        total.store(sum);
                    }
                    row = strip.rows.end;
                }
            }
            let mut row = first;
            for sums in &sums {
                if row >= end {
                    break;
                }
                let strip = view.strip(row);
                let here = row..strip.rows.end.min(end);
                for (i, sums) in sums.iter().enumerate() {
                    // SAFETY: rows of the weight, and so columns of the output, are given to one call each.
                    let out = unsafe { out.row(t + i, here.clone()) };
                    out.copy_from_slice(&sums[strip.lane_of(here.start)..][..here.len()]);
                }
                row = here.end;
            }
            first = end;
        }
        T
    }

    /// Adds z · I of the blocks of a panel that begins at column `start`.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    fn panel<V: Lanes, const T: usize>(
        &self,
        rule: R,
        words: Words<'_>,
        x: &Folded,
        t: usize,
        start: usize,
        mask: V,
        totals: &mut [V; T],
    ) {
        // Sums of integers that do not wait for each other.
        let side = 4 / T;
        let len = words.len();
        for block in (0..len).step_by(BLOCK) {
            let end = len.min(block + BLOCK);
            let of_row = |i: usize| (t + i) * x.blocks + (start + block) / BLOCK;
            let mut factors = [std::ptr::null::<u32>(); T];
            let mut sums = [[V::splat_bits(0); T]; 4];
            for i in 0..T {
                factors[i] = x.factors[of_row(i) * BLOCK..][..BLOCK].as_ptr();
                sums[0][i] = V::splat_bits(x.less[of_row(i)] as u32);
            }
            let mut at = block;
            // Columns that fill the last sixteen up have factors of 0.
            while at < end {
                for (j, sums) in sums.iter_mut().enumerate() {
                    if j < side {
                        // SAFETY: a column of the panel, or of the sixteen that it ends in.
                        let bytes = rule.bytes(unsafe { words.states::<V, BITS>(at + j, mask) });
                        for (sum, factors) in sums.iter_mut().zip(factors) {
                            // SAFETY: a column of the block.
                            let factor = unsafe { *factors.add(at + j - block) };
                            *sum = sum.add_bytes(bytes, V::splat_bits(factor));
                        }
                    }
                }
                at += side;
            }
            for (i, total) in totals.iter_mut().enumerate() {
                let sum = sums[0][i].iadd(sums[1][i]).iadd(sums[2][i].iadd(sums[3][i]));
                *total = V::splat(x.steps[of_row(i)]).fma(sum.to_float(), *total);
            }
        }
    }
}
