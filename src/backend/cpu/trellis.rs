//! Trellis weights on the exact path.
//!
//! Tiles along outputs decode to a column's weights for sixteen rows at a time. One row of x: a strip of sixteen rows
//! has a vector of sums for each lane of [`crate::numeric::dot`], so that weights go from registers into sums in the
//! defined order without being turned; the sixteen vectors are added in halves, as lanes are. All else goes through
//! [`Panels`]: sixteen rows are decoded, and turned if need be, one panel long.

use std::ops::Range;

use super::rows::{LINES, Line, Panels};
use crate::codec::trellis::decode::{AnyRule, Decode, Room, Rule, Strip, View, Words, widen, with_width};
use crate::numeric::dot::PANEL;
use crate::numeric::lanes::{Kernel, LANES, Lanes};

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
        let mask = view.mask::<V>();
        let mut room: Room = [[0; 16]; PANEL];
        let (mut inputs, mut of_x) = ([0.0; PANEL], [0.0; PANEL]);
        let mut first = rows.start;
        // A panel of the columns that some rows share stays in the second-level cache while its strips pass.
        while first < rows.end {
            let end = view.tile_end(first).min(rows.end);
            let scales = view.inputs(first).expect("a scale for each column");
            for start in (0..x.len()).step_by(PANEL) {
                let panel = start..x.len().min(start + PANEL);
                widen::<V>(&scales[2 * panel.start..2 * panel.end], &mut inputs);
                of_x[..panel.len()].copy_from_slice(&x[panel.clone()]);
                of_x[panel.len()..panel.len().next_multiple_of(LANES)].fill(0.0);
                let mut row = first;
                while row < end {
                    let strip = view.strip(row);
                    let words = strip.words(panel.clone(), BITS, &mut room);
                    let sums = sums::<V, R, BITS>(rule, words, &of_x, &inputs, strip.outputs(), mask);
                    let here = row..strip.rows.end.min(end);
                    row = here.end;
                    add(
                        &strip,
                        sums,
                        here.clone(),
                        start == 0,
                        &mut out[here.start - rows.start..here.end - rows.start],
                    );
                }
            }
            first = end;
        }
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

/// Σ_k x[k] · w[n, k] over a panel, for each row n of a strip, in the order of [`crate::numeric::dot`]. What fills the
/// last sixteen columns up has zeros in `x` and `inputs`.
#[inline(always)]
fn sums<V: Lanes, R: Rule, const BITS: u32>(
    rule: R,
    words: Words<'_>,
    x: &[f32; PANEL],
    inputs: &[f32; PANEL],
    outputs: V,
    mask: V,
) -> V {
    let len = words.len();
    assert!(len <= PANEL, "a panel");
    let mut sums = [V::splat(0.0); LANES];
    let mut at = 0;
    while at < len {
        for (l, sum) in sums.iter_mut().enumerate() {
            // SAFETY: one of sixteen columns that begin inside the panel.
            let (states, x, input) = unsafe {
                (
                    words.states::<V, BITS>(at + l, mask),
                    *x.get_unchecked(at + l),
                    *inputs.get_unchecked(at + l),
                )
            };
            let weights = rule.values(states).mul(V::splat(input)).mul(outputs);
            *sum = V::splat(x).fma(weights, *sum);
        }
        at += LANES;
    }
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
