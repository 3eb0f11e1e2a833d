//! Trellis weights on the exact path.
//!
//! Tiles along outputs decode to a column's weights for sixteen rows at a time. One row of x: a strip of sixteen rows
//! has a vector of sums for each lane of [`crate::numeric::dot`], so that weights go from registers into sums in the
//! defined order without being turned; the sixteen vectors are added in halves, as lanes are. Columns are taken lane by
//! lane, so that few sums are in registers at a time and several strips can share what a column is multiplied by. All
//! else goes through [`Panels`]: sixteen rows are decoded, and turned if need be, one panel long.

use std::ops::Range;

use super::rows::{LINES, Line, Panels};
use crate::codec::trellis::MAX_TILE;
use crate::codec::trellis::decode::{
    AnyRule, Decode, Parts, Rule, Strip, Together, View, together, widen, with_width,
};
use crate::numeric::dot::PANEL;
use crate::numeric::lanes::{Kernel, LANES, Lanes};
use crate::numeric::prefetch_line;

impl Panels for &View<'_> {
    #[inline(always)]
    fn panel<V: Lanes>(self, rows: Range<usize>, columns: Range<usize>, to: &mut [Line]) {
        let (count, len) = (rows.len(), columns.len());
        let to = &mut to[..count * LINES];
        // SAFETY: the same values; a line has nothing else.
        let values = unsafe { std::slice::from_raw_parts_mut(to.as_mut_ptr().cast::<f32>(), count * PANEL) };
        for row in values.chunks_exact_mut(PANEL) {
            row[len..len.next_multiple_of(LANES)].fill(0.0);
        }
        Decode { view: self, rows, columns, to: values, stride: PANEL }.run::<V>();
    }
}

/// out[n] = dot(x, w[n]) for `rows` of a weight whose tiles lie along outputs.
pub(super) struct OneByStrips<'a, 'b> {
    pub view: &'a View<'b>,
    pub x: &'a [f32],
    pub rows: Range<usize>,
    /// One output for each of `rows`.
    pub out: &'a mut [f32],
}

impl Kernel for OneByStrips<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self { view, x, rows, out } = self;
        assert!(
            x.len() == view.in_features() && rows.len() == out.len(),
            "an input's row, and one output for each row"
        );
        match view.rule() {
            AnyRule::Product(rule) => by_width::<V, _>(view, rule, x, rows, out),
            AnyRule::Congruence(rule) => by_width::<V, _>(view, rule, x, rows, out),
            AnyRule::Other(rule) => by_width::<V, _>(view, rule, x, rows, out),
        }
    }
}

#[inline(always)]
fn by_width<V: Lanes, R: Rule>(view: &View<'_>, rule: R, x: &[f32], rows: Range<usize>, out: &mut [f32]) {
    with_width!(view.bits(), BITS => V::call(OneBy::<R, BITS> { view, rule, x, rows, out }));
}

/// Columns of a tile that stay near: with 16 strips, their sums are 16 KB and their codes at most as many.
const NEAR: usize = 128;

/// [`OneByStrips`], compiled once for each rule and k.
struct OneBy<'a, 'b, R, const BITS: u32> {
    view: &'a View<'b>,
    rule: R,
    x: &'a [f32],
    rows: Range<usize>,
    out: &'a mut [f32],
}

impl<R: Rule, const BITS: u32> Kernel for OneBy<'_, '_, R, BITS> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self { view, rule, x, rows, out } = self;
        let (mut inputs, mut of_x) = ([0.0; PANEL], [0.0; PANEL]);
        let mut sums: [Sums; MAX_TILE / LANES] = [[[0.0; LANES]; LANES]; MAX_TILE / LANES];
        let mut first = rows.start;
        while first < rows.end {
            let end = view.tile_end(first).min(rows.end);
            let strips = view.strips(first..end);
            let scales = view.inputs(first).expect("a scale for each column");
            for start in (0..x.len()).step_by(PANEL) {
                let panel = start..x.len().min(start + PANEL);
                widen::<V>(&scales[2 * panel.start..2 * panel.end], &mut inputs);
                of_x[..panel.len()].copy_from_slice(&x[panel.clone()]);
                sums.as_flattened_mut().fill([0.0; LANES]);
                // So many of a tile's columns stay in the first-level cache while its strips pass, with their sums.
                for near in panel.clone().step_by(NEAR) {
                    let columns = near..panel.end.min(near + NEAR);
                    let own = near - start..columns.end - start;
                    let work = &mut Near::<_, _, BITS> {
                        rule,
                        mask: view.mask::<V>(),
                        strips: &strips,
                        x: &of_x[own.clone()],
                        inputs: &inputs[own],
                        columns,
                        sums: &mut sums,
                    };
                    if V::IN_REGISTERS >= 32 {
                        together::<BITS, 4>(&strips, work);
                    } else {
                        together::<BITS, 2>(&strips, work);
                    }
                }
                for (strip, sums) in strips.iter().zip(&sums) {
                    let here = strip.rows.start.max(first)..strip.rows.end.min(end);
                    let to = &mut out[here.start - rows.start..here.end - rows.start];
                    add(strip, total::<V>(sums), here, start == 0, to);
                }
            }
            first = end;
        }
    }
}

/// Sums of a strip's rows, one vector for each lane of [`crate::numeric::dot`].
type Sums = [[f32; LANES]; LANES];

/// Some columns of a tile, and what its strips add to.
struct Near<'a, 'b, V, R, const BITS: u32> {
    rule: R,
    mask: V,
    strips: &'a [Strip<'b>],
    columns: Range<usize>,
    /// Of these columns.
    x: &'a [f32],
    inputs: &'a [f32],
    /// One for each strip.
    sums: &'a mut [Sums],
}

impl<V: Lanes, R: Rule, const BITS: u32> Together for Near<'_, '_, V, R, BITS> {
    /// Adds x[k] · w[n, k] to the lane k mod 16 of the sums of each row n of `G` strips.
    #[inline(always)]
    fn take<const G: usize, const PARTED: bool>(&mut self, at: usize) -> usize {
        let Self { rule, mask, strips, x, inputs, .. } = *self;
        let sums = &mut self.sums[at..];
        let len = self.columns.len();
        let mut room = Parts::new();
        let words = strips[at].below::<BITS, G, PARTED>(self.columns.clone(), &mut room);
        let outputs: [V; G] = std::array::from_fn(|g| strips[at + g].outputs());
        assert!(
            x.len() == len && inputs.len() == len && sums.len() >= G,
            "as many columns, and sums of each strip"
        );
        for lane in 0..LANES.min(len) {
            let mut all: [V; G] = std::array::from_fn(|g| V::load(&sums[g][lane]));
            let mut c = lane;
            while c < len {
                // Each strip has its share of what comes next brought near.
                prefetch_line(strips[at].part_of(self.columns.start + NEAR + c, at, strips.len()));
                // SAFETY: a column of these.
                let (x, input) =
                    unsafe { (V::splat(*x.get_unchecked(c)), V::splat(*inputs.get_unchecked(c))) };
                for (g, (sum, outputs)) in all.iter_mut().zip(outputs).enumerate() {
                    // SAFETY: a column of these, and one of the strips.
                    let states = unsafe { words.states(c, g, mask) };
                    *sum = x.fma(rule.values(states).mul(input).mul(outputs), *sum);
                }
                c += LANES;
            }
            all.iter().zip(&mut *sums).for_each(|(all, sums)| all.store(&mut sums[lane]));
        }
        G
    }
}

/// Sets or adds the sums of a strip's rows `rows`.
#[inline(always)]
fn add<V: Lanes>(strip: &Strip<'_>, sums: V, rows: Range<usize>, set: bool, out: &mut [f32]) {
    let mut lanes = [0.0; LANES];
    sums.store(&mut lanes);
    for (out, sum) in out.iter_mut().zip(&lanes[strip.lane_of(rows.start)..]) {
        *out = if set { *sum } else { *out + *sum };
    }
}

/// The sum of sixteen lanes in the order of [`crate::numeric::dot`], for each row.
#[inline(always)]
fn total<V: Lanes>(sums: &Sums) -> V {
    let sums = sums.each_ref().map(V::load);
    let mut eight = [V::splat(0.0); 8];
    for (l, to) in eight.iter_mut().enumerate() {
        *to = sums[l].add(sums[l + 8]);
    }
    let mut four = [V::splat(0.0); 4];
    for (l, to) in four.iter_mut().enumerate() {
        *to = eight[l].add(eight[l + 4]);
    }
    four[0].add(four[2]).add(four[1].add(four[3]))
}
