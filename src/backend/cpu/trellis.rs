//! Rows of a trellis, a tile's at a time decoded into memory.

use std::cell::RefCell;
use std::ops::Range;

use super::rows::{Rows, STEP};
use crate::backend::Packed;
use crate::numeric::dot::PANEL;
use crate::numeric::lanes::{LANES, Lanes};

/// Rows `[first, first + values / K)` of a weight, decoded.
#[derive(Debug, Clone, Copy)]
pub(super) struct Decoded<'a> {
    values: &'a [f32],
    in_features: usize,
    first: usize,
}

thread_local! {
    static ROOM: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Decodes `rows` of the weight, those of a tile at a time, and lends them with their numbers.
pub(super) fn in_tiles(weight: &Packed, rows: Range<usize>, mut to: impl FnMut(Decoded<'_>, Range<usize>)) {
    let in_features = weight.in_features;
    let before = weight.part.first as usize;
    let tall =
        weight.layout().iter().map(|plane| plane.height).find(|height| *height > 1).unwrap_or(1) as usize;
    // A matrix's own scales are no tile; without tiles of several rows, some are decoded together all the same.
    let tall = if tall as u64 == weight.part.matrix.out_features { STEP } else { tall };
    let mut values = ROOM.take();
    let mut start = rows.start;
    while start < rows.end {
        let end = rows.end.min((before + start) / tall * tall + tall - before);
        values.resize((end - start) * in_features, 0.0);
        weight.decode(start..end, &mut values);
        to(Decoded { values: &values, in_features, first: start }, start..end);
        start = end;
    }
    ROOM.set(values);
}

impl Rows for Decoded<'_> {
    type Group<V: Lanes> = ();

    fn group_len(&self) -> usize {
        PANEL
    }

    #[inline(always)]
    unsafe fn group<V: Lanes>(&self, _n: usize, _g: usize) {}

    #[inline(always)]
    unsafe fn step<V: Lanes>(&self, n: usize, k: usize, (): ()) -> [V; 2] {
        let at = (n - self.first) * self.in_features + k;
        let (steps, _) = self.values[at..at + STEP].as_chunks::<LANES>();
        [V::load(&steps[0]), V::load(&steps[1])]
    }

    fn rest<V: Lanes>(&self, n: usize, k: usize) -> [V; 2] {
        let row = &self.values[(n - self.first) * self.in_features..][..self.in_features];
        let (low, high) = row[k..].split_at((row.len() - k).min(LANES));
        [V::load_part(low), if high.is_empty() { V::splat(0.0) } else { V::load_part(high) }]
    }
}
