//! Activations as 8-bit integers, for the fast path.
//!
//! x[t, k] ≈ scale[t, g] · code[t, k],  g = k / group,  -127 <= code <= 127                      x: [T, K]
//! scale = max |x| / 127 over the group; code = x · (1 / scale), rounded to the nearest integer, ties to even.
//! Each operation rounds to f32 once. A group whose scale would be below 2^-126, the least normal number, has scale
//! 0 and codes 0. A group with a value that is not finite has scale NaN and codes 0, so whatever it takes part in
//! is NaN.
//!
//! Codes lie in units of 128, two cache lines each: as they are, or first all with even k and then all with odd k.
//! Rows are filled up with codes of 0 and groups of scale 0 to whole blocks of sixteen groups; tiles with anything. Several rows that
//! pass over a weight together lie four codes of each row after the other, and so do their scales.

use std::cell::RefCell;

use crate::numeric::lanes::{Kernel, LANES, Lanes};

/// Codes in a unit.
pub(super) const UNIT: usize = 128;

/// Rows side by side where there are many.
pub(super) const TALL: usize = 4;

/// In which order the codes of a unit lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// By k.
    Plain,
    /// Even k, then odd k: as the halves of bytes with two codes each come apart.
    Split,
}

/// Half a unit.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(super) struct Half(pub [u8; UNIT / 2]);

/// Quantized rows.
#[derive(Debug, Default)]
pub(super) struct Quantized {
    /// Rows that lie side by side: a tile.
    tall: usize,
    group: usize,
    /// Units in a row.
    pub units: usize,
    /// Groups in a row.
    pub groups: usize,
    /// Signed codes [tiles, units, 32, tall, 4].
    codes: Vec<Half>,
    /// [tiles, groups, tall], and likewise the next two.
    scales: Vec<f32>,
    /// Scale times the sum of the group's codes.
    biases: Vec<f32>,
    /// Sums of the group's codes, as integers.
    sums: Vec<f32>,
}

/// One tile of [`Quantized`].
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub(super) struct Tile<'a> {
    pub codes: &'a [Half],
    pub scales: &'a [f32],
    pub biases: &'a [f32],
    pub sums: &'a [f32],
}

thread_local! {
    static SPARE: RefCell<Vec<Quantized>> = const { RefCell::new(Vec::new()) };
}

impl Quantized {
    /// Room for `rows` of `in_features`, `tall` side by side, until [`Quantize`] has filled it; in the memory of one
    /// that is no longer needed, if this thread has such.
    pub fn new(rows: usize, in_features: usize, group: usize, tall: usize) -> Self {
        let groups = in_features.div_ceil(group).next_multiple_of(LANES);
        let units = groups * group / UNIT;
        let rows = rows.next_multiple_of(tall);
        let mut new = SPARE.with_borrow_mut(Vec::pop).unwrap_or_default();
        (new.tall, new.group, new.units, new.groups) = (tall, group, units, groups);
        new.codes.resize(rows * units * 2, Half([0; UNIT / 2]));
        for values in [&mut new.scales, &mut new.biases, &mut new.sums] {
            values.resize(rows * groups, 0.0);
        }
        new
    }

    /// Lets [`Quantized::new`] have the memory: to get some hundred KiB anew for each layer would cost a tenth of
    /// the time to multiply by it.
    pub fn spare(self) {
        /// One for each input that may be alive in a layer.
        const MOST: usize = 4;
        // A thread that ends has no use for it.
        let _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < MOST {
                spare.push(self);
            }
        });
    }

    /// Rows of a tile.
    pub fn tall(&self) -> usize {
        self.tall
    }

    /// The `i`-th.
    #[inline(always)]
    pub fn tile(&self, i: usize) -> Tile<'_> {
        let (codes, groups) = (self.tall * self.units * 2, self.tall * self.groups);
        Tile {
            codes: &self.codes[i * codes..(i + 1) * codes],
            scales: &self.scales[i * groups..(i + 1) * groups],
            biases: &self.biases[i * groups..(i + 1) * groups],
            sums: &self.sums[i * groups..(i + 1) * groups],
        }
    }

    /// Each tile alone, so that several threads can fill them.
    pub fn tiles_mut(&mut self) -> Vec<TileMut<'_>> {
        let Self { tall, group, units, groups, codes, scales, biases, sums } = self;
        let codes = codes.chunks_mut(*tall * *units * 2);
        let [scales, biases, sums] = [scales, biases, sums].map(|values| values.chunks_mut(*tall * *groups));
        let parts = codes.zip(scales).zip(biases).zip(sums);
        let tile = |(((codes, scales), biases), sums)| TileMut {
            tall: *tall,
            group: *group,
            codes,
            scales,
            biases,
            sums,
        };
        parts.map(tile).collect()
    }
}

/// One tile of [`Quantized`], to be filled.
#[derive(Debug)]
pub(super) struct TileMut<'a> {
    tall: usize,
    group: usize,
    codes: &'a mut [Half],
    scales: &'a mut [f32],
    biases: &'a mut [f32],
    sums: &'a mut [f32],
}

/// Quantizes `x`, at most a tile's rows of whole groups.
pub(super) struct Quantize<'a, 'b> {
    pub x: &'a [f32],
    pub in_features: usize,
    pub order: Order,
    pub to: &'a mut TileMut<'b>,
}

impl Kernel for Quantize<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self { x, in_features, order, to } = self;
        let (group, tall) = (to.group, to.tall);
        let row = to.codes.len() / (2 * tall) * UNIT;
        // Whole rows by k first: what has just been stored in sixteens cannot be loaded at once in another shape.
        let mut by_k = vec![0; tall * row];
        for (i, (x, by_k)) in x.chunks(in_features).zip(by_k.chunks_exact_mut(row)).enumerate() {
            for values in [&mut *to.scales, &mut *to.biases, &mut *to.sums] {
                // Beyond the row's end.
                for value in values[in_features / group * tall..].iter_mut().skip(i).step_by(tall) {
                    *value = 0.0;
                }
            }
            for (g, (x, codes)) in x.chunks_exact(group).zip(by_k.chunks_exact_mut(group)).enumerate() {
                let (scale, sum) = quantize_group::<V>(x, codes);
                to.scales[g * tall + i] = scale;
                to.biases[g * tall + i] = scale * sum;
                to.sums[g * tall + i] = f32::from_bits(sum as i32 as u32);
            }
        }
        let mut ordered = [[Half([0; UNIT / 2]); 2]; TALL];
        for (u, unit) in to.codes.chunks_exact_mut(2 * tall).enumerate() {
            for (by_k, ordered) in by_k.chunks_exact(row).zip(&mut ordered) {
                order_unit(order, &by_k.as_chunks().0[u], ordered);
            }
            if tall == 1 {
                unit.copy_from_slice(&ordered[0]);
            } else {
                interleave(&ordered, unit);
            }
        }
    }
}

/// Puts a unit's codes in order.
#[inline(always)]
fn order_unit(order: Order, by_k: &[u8; UNIT], to: &mut [Half; 2]) {
    let [Half(first), Half(second)] = to;
    match order {
        Order::Plain => {
            first.copy_from_slice(&by_k[..UNIT / 2]);
            second.copy_from_slice(&by_k[UNIT / 2..]);
        }
        Order::Split => {
            for (i, [even, odd]) in by_k.as_chunks::<2>().0.iter().enumerate() {
                (first[i], second[i]) = (*even, *odd);
            }
        }
    }
}

/// Lays four codes of each row after the other.
#[inline(always)]
fn interleave(rows: &[[Half; 2]; TALL], to: &mut [Half]) {
    for half in 0..2 {
        let fours = rows.each_ref().map(|row| row[half].0.as_chunks::<4>().0);
        let to = &mut to[half * TALL..(half + 1) * TALL];
        for (j, to) in to.iter_mut().flat_map(|to| to.0.as_chunks_mut::<{ 4 * TALL }>().0).enumerate() {
            for (to, four) in to.as_chunks_mut::<4>().0.iter_mut().zip(fours) {
                *to = four[j];
            }
        }
    }
}

/// Codes of one group; its scale, and the sum of its codes.
#[inline(always)]
pub(super) fn quantize_group<V: Lanes>(x: &[f32], codes: &mut [u8]) -> (f32, f32) {
    const INFINITY: u32 = 0x7f80_0000;
    let (x, _) = x.as_chunks::<LANES>();
    // As integers, magnitudes order as numbers do; NaN would come last, and is taken for infinity.
    let mut greatest = V::splat_bits(0);
    for x in x {
        greatest = greatest.imax(V::load(x).abs());
    }
    let greatest = greatest.imin(V::splat_bits(INFINITY)).greatest();
    let scale = greatest / 127.0;
    if !scale.is_normal() {
        codes.fill(0);
        return (if greatest.is_finite() { 0.0 } else { f32::NAN }, 0.0);
    }
    let inverse = V::splat(1.0 / scale);
    let mut sum = V::splat(0.0);
    for (x, codes) in x.iter().zip(codes.as_chunks_mut::<LANES>().0) {
        let code = V::load(x).mul(inverse).rint();
        // Integers below 2^24, exact in any order.
        sum = sum.add(code);
        *codes = code.to_int().low_bytes();
    }
    (scale, sum.sum())
}
