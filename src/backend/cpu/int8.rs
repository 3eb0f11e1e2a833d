//! The fast path: integer products of a weight's codes and of [`super::quantized`] activations.
//!
//! With w[n, k] = s[n, g] · c[n, k] + b[n, g] and x[t, k] ≈ z[t, g] · q[t, k], g = k / group, the sum of products is
//!
//! y[t, n] = Σ_l Σ_{g ≡ l (mod 16)} (s[n, g] · z[t, g]) · I[t, n, g]  +  b[n, g] · (z[t, g] · Q[t, g])
//!
//! I = Σ c · q and Q = Σ q over the group are integers below 2^24, so exact whatever the order. Parentheses round to
//! f32. Each of the two terms, first the left, is fused with the sum of its lane l and rounded once, in the order of
//! g; at last the sixteen lanes are added in halves ([`Lanes::sum`]). The order depends on K and the group alone.
//!
//! | codec | c | s | b |
//! | --- | --- | --- | --- |
//! | affine | the code | the scale | the bias |
//! | mxfp4, nvfp4 | twice the value of the element | half the scale | none |
//!
//! For one row of x, a row of the weight is read once, in order: 128 codes become two vectors of bytes, and the
//! lanes' sums are joined for sixteen groups at a time. For several, sixteen rows of the weight are turned, for
//! sixteen groups at a time, so that each lane has a row of its own, and all rows of x pass over them.

use std::cell::RefCell;
use std::ops::Range;

use super::quantized::{Half, Order, Quantized, TALL, Tile, UNIT};
use crate::backend::Columns;
use crate::codec::mxfp::{Mxfp, e4m3_values};
use crate::numeric::lanes::{Kernel, LANES, Lanes};
use crate::numeric::prefetch_line;
use crate::tensor::Float;

/// Bytes of codes asked for before they are needed.
const AHEAD: usize = 4096;

/// The codes and parameters of a weight [N, K].
pub(super) trait Codes: Copy {
    /// The order of codes in a unit.
    const ORDER: Order;
    /// What [`Codes::unit`] adds to each code, to have none below 0.
    const OFFSET: i32;
    /// Whether there are biases.
    const BIASES: bool;

    /// Weights that share a scale.
    fn group(&self) -> usize;

    /// The codes of unit `u` of row `n`, in [`Codes::ORDER`].
    ///
    /// # Safety
    /// The whole unit must be there.
    unsafe fn unit<V: Lanes>(&self, n: usize, u: usize) -> [V; 2];

    /// The same of the last unit of a row, of which only a part is there; then anything.
    fn part<V: Lanes>(&self, n: usize, u: usize) -> [V; 2];

    /// Scales, and biases or anything, of the groups from `16 · block` on of row `n`; 0 beyond the row's end.
    fn parameters<V: Lanes>(&self, n: usize, block: usize) -> [V; 2];
}

/// Planes of the affine codec.
#[derive(Debug, Clone, Copy)]
pub(super) struct AffineCodes<'a, const BITS: u32> {
    codes: &'a [u8],
    scales: &'a [u8],
    biases: &'a [u8],
    float: Float,
    group: usize,
    /// Groups in a row.
    groups: usize,
}

impl<'a, const BITS: u32> AffineCodes<'a, BITS> {
    /// # Panics
    /// Unless the planes hold `out_features` rows of `in_features`.
    pub fn new(
        planes: [&'a [u8]; 3],
        float: Float,
        out_features: usize,
        in_features: usize,
        group: usize,
    ) -> Self {
        let [codes, scales, biases] = planes;
        let weights = out_features * in_features;
        assert!(in_features.is_multiple_of(group), "whole groups");
        assert_eq!(codes.len(), weights * BITS as usize / 8, "bytes of `weight`");
        assert_eq!(scales.len(), weights / group * float.bytes(), "bytes of `scales`");
        assert_eq!(biases.len(), weights / group * float.bytes(), "bytes of `biases`");
        Self { codes, scales, biases, float, group, groups: in_features / group }
    }
}

/// Asks for the bytes that follow those at `unit` in some time.
#[inline(always)]
fn ask_ahead(unit: *const u8, bytes: usize) {
    prefetch_line(unit.wrapping_add(AHEAD));
    if bytes > 64 {
        prefetch_line(unit.wrapping_add(AHEAD + 64));
    }
}

/// The two codes of each byte.
#[inline(always)]
fn nibbles<V: Lanes>(both: V) -> [V; 2] {
    let mask = V::splat_bits(0x0f0f_0f0f);
    [both.and(mask), both.shr::<4>().and(mask)]
}

impl<const BITS: u32> Codes for AffineCodes<'_, BITS> {
    const ORDER: Order = if BITS == 4 { Order::Split } else { Order::Plain };
    const OFFSET: i32 = 0;
    const BIASES: bool = true;

    #[inline(always)]
    fn group(&self) -> usize {
        self.group
    }

    #[inline(always)]
    unsafe fn unit<V: Lanes>(&self, n: usize, u: usize) -> [V; 2] {
        let bytes = UNIT * BITS as usize / 8;
        let at = n * (self.groups * self.group * BITS as usize / 8) + u * bytes;
        // SAFETY: the caller's word that the unit is there, and the lengths that `new` asserts.
        let packed = unsafe { self.codes.get_unchecked(at..at + bytes) };
        ask_ahead(packed.as_ptr(), bytes);
        if BITS == 4 {
            nibbles(V::load_bytes(packed.first_chunk().expect("64 bytes")))
        } else {
            [V::byte_codes::<BITS>(&packed[..bytes / 2]), V::byte_codes::<BITS>(&packed[bytes / 2..])]
        }
    }

    #[inline(always)]
    fn part<V: Lanes>(&self, n: usize, u: usize) -> [V; 2] {
        let (row, bytes) = (self.groups * self.group * BITS as usize / 8, UNIT * BITS as usize / 8);
        let packed = &self.codes[n * row + u * bytes..(n + 1) * row];
        if BITS == 4 {
            nibbles(V::load_bytes_part(packed))
        } else {
            let (low, high) = packed.split_at(packed.len().min(bytes / 2));
            [V::byte_codes::<BITS>(low), V::byte_codes::<BITS>(high)]
        }
    }

    #[inline(always)]
    fn parameters<V: Lanes>(&self, n: usize, block: usize) -> [V; 2] {
        let (from, to) = (block * LANES, self.groups.min((block + 1) * LANES));
        let sixteen = |plane| widen::<V>(self.float, plane, n * self.groups + from..n * self.groups + to);
        [sixteen(self.scales), sixteen(self.biases)]
    }
}

/// At most sixteen parameters, and zeros for the rest.
#[inline(always)]
fn widen<V: Lanes>(float: Float, plane: &[u8], range: Range<usize>) -> V {
    let bytes = float.bytes();
    let stored = &plane[range.start * bytes..range.end * bytes];
    prefetch_line(stored.as_ptr().wrapping_add(1024));
    match float {
        Float::Bf16 => V::load_bf16_part(stored),
        Float::F16 => V::load_f16_part(stored),
        Float::F32 => V::load_bytes_part(stored),
    }
}

/// Planes of mxfp4 or nvfp4.
#[derive(Debug, Clone, Copy)]
pub(super) struct E2m1Codes<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    codec: Mxfp,
    group: usize,
    /// Groups in a row.
    groups: usize,
}

impl<'a> E2m1Codes<'a> {
    /// # Panics
    /// Unless the planes hold `out_features` rows of `in_features`, and elements are E2M1.
    pub fn new(codec: Mxfp, planes: [&'a [u8]; 2], out_features: usize, in_features: usize) -> Self {
        let ([codes, scales], group) = (planes, codec.group());
        let weights = out_features * in_features;
        assert!(in_features.is_multiple_of(group), "whole groups");
        assert_eq!(codes.len(), weights / 2, "bytes of `weight`");
        assert_eq!(scales.len(), weights / group, "bytes of `scales`");
        assert_ne!(codec, Mxfp::Mxfp8, "elements that are small integers");
        Self { codes, scales, codec, group, groups: in_features / group }
    }

    /// Twice the values of both codes of each byte, and [`Codes::OFFSET`].
    #[inline(always)]
    fn values<V: Lanes>(both: V) -> [V; 2] {
        const TWICE: [u8; LANES] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
        let [even, odd] = nibbles(both);
        [even.pick_bytes(&TWICE), odd.pick_bytes(&TWICE)]
    }
}

impl Codes for E2m1Codes<'_> {
    const ORDER: Order = Order::Split;
    const OFFSET: i32 = 12;
    const BIASES: bool = false;

    #[inline(always)]
    fn group(&self) -> usize {
        self.group
    }

    #[inline(always)]
    unsafe fn unit<V: Lanes>(&self, n: usize, u: usize) -> [V; 2] {
        let at = n * (self.groups * self.group / 2) + u * (UNIT / 2);
        // SAFETY: the caller's word that the unit is there, and the lengths that `new` asserts.
        let packed = unsafe { self.codes.get_unchecked(at..at + UNIT / 2) };
        ask_ahead(packed.as_ptr(), UNIT / 2);
        Self::values(V::load_bytes(packed.first_chunk().expect("64 bytes")))
    }

    #[inline(always)]
    fn part<V: Lanes>(&self, n: usize, u: usize) -> [V; 2] {
        let row = self.groups * self.group / 2;
        Self::values(V::load_bytes_part(&self.codes[n * row + u * (UNIT / 2)..(n + 1) * row]))
    }

    #[inline(always)]
    fn parameters<V: Lanes>(&self, n: usize, block: usize) -> [V; 2] {
        let (from, to) = (block * LANES, self.groups.min((block + 1) * LANES));
        let scales = &self.scales[n * self.groups + from..n * self.groups + to];
        let bytes = V::widen_bytes_part(scales);
        let scales = match self.codec {
            // 2^-127 has a mantissa, and no exponent.
            Mxfp::Mxfp4 | Mxfp::Mxfp8 => bytes.shl::<23>().imax(V::splat_bits(1 << 22)),
            Mxfp::Nvfp4 => e4m3_values(bytes),
        };
        [scales.mul(V::splat(0.5)), V::splat(0.0)]
    }
}

/// The integer `value`, sixteen times.
#[inline(always)]
fn splat_int<V: Lanes>(value: i32) -> V {
    V::splat_bits(value as u32)
}

/// Row by row: out[t, n] for all t, and n in `rows`
pub(super) struct RowByRow<'a, C, const GROUP: usize> {
    pub weight: C,
    pub x: &'a Quantized,
    pub in_features: usize,
    pub t_count: usize,
    pub rows: Range<usize>,
    pub out: &'a Columns<'a>,
}

impl<C: Codes, const GROUP: usize> Kernel for RowByRow<'_, C, GROUP> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self { weight, x, in_features, t_count, rows, out } = self;
        assert!(weight.group() == GROUP && x.tall() == 1, "the weight's group, and single rows");
        for t in 0..t_count {
            // SAFETY: rows of the weight, and so columns of the output, are given to one call each.
            let out = unsafe { out.row(t, rows.clone()) };
            let x = x.tile(t);
            for (n, out) in rows.clone().zip(out) {
                *out = row::<V, C, GROUP>(weight, n, x, in_features);
            }
        }
    }
}

#[inline(always)]
fn row<V: Lanes, C: Codes, const GROUP: usize>(weight: C, n: usize, x: Tile<'_>, in_features: usize) -> f32 {
    let in_block = LANES * GROUP / UNIT;
    let (codes, _) = x.codes.as_chunks::<2>();
    let whole = in_features / UNIT;
    let mut sum = V::splat(0.0);
    for block in 0..x.scales.len() / LANES {
        let first = block * in_block;
        let mut parts = [V::splat_bits(0); LANES];
        if first + in_block <= whole {
            for (i, x) in codes[first..first + in_block].iter().enumerate() {
                let u = first + i;
                // SAFETY: a whole unit of a row that the caller of the kernel asks for.
                let w = unsafe { weight.unit::<V>(n, u) };
                add_unit::<V, C, GROUP>(w, x, &mut parts, i);
            }
        } else {
            // Unrolled as well, lest the sums go through memory; the branches are the same for each row.
            let mut last = [V::splat_bits(0); LANES];
            if (first..first + in_block).contains(&whole) && in_features > whole * UNIT {
                add_unit::<V, C, GROUP>(weight.part(n, whole), &codes[whole], &mut last, 0);
            }
            for i in 0..in_block {
                let u = first + i;
                if u < whole {
                    // SAFETY: as above.
                    let w = unsafe { weight.unit::<V>(n, u) };
                    add_unit::<V, C, GROUP>(w, &codes[u], &mut parts, i);
                } else if u == whole {
                    let each = parts_of::<C, GROUP>() / in_block;
                    parts[i * each..(i + 1) * each].copy_from_slice(&last[..each]);
                }
            }
        }
        let mut products = V::group_sums(&parts[..parts_of::<C, GROUP>()]);
        let at = block * LANES;
        let sixteen = |values: &[f32]| V::load(values[at..].first_chunk().expect("whole blocks"));
        if C::OFFSET != 0 {
            let sums: V = sixteen(x.sums);
            const { assert!(C::OFFSET == 0 || C::OFFSET == 12) };
            products = products.isub(sums.shl::<3>().iadd(sums.shl::<2>()));
        }
        let [scales, biases] = weight.parameters::<V>(n, block);
        sum = scales.mul(sixteen(x.scales)).fma(products.to_float(), sum);
        if C::BIASES {
            sum = biases.fma(sixteen(x.biases), sum);
        }
    }
    sum.sum()
}

/// Whether both vectors of a unit add to the same lanes' sums: if the codes of a lane in both are of one group.
const fn together<C: Codes, const GROUP: usize>() -> bool {
    matches!(C::ORDER, Order::Split) || GROUP == UNIT
}

/// Vectors of sums that sixteen groups make.
const fn parts_of<C: Codes, const GROUP: usize>() -> usize {
    if together::<C, GROUP>() { LANES * GROUP / UNIT } else { 2 * LANES * GROUP / UNIT }
}

/// Multiplies the `i`-th unit of a block.
#[inline(always)]
fn add_unit<V: Lanes, C: Codes, const GROUP: usize>(
    w: [V; 2],
    x: &[Half; 2],
    parts: &mut [V; LANES],
    i: usize,
) {
    let ([a, b], [Half(x), Half(y)]) = (w, x);
    let first = V::splat_bits(0).dot_bytes(a, V::load_bytes(x));
    if together::<C, GROUP>() {
        parts[i] = first.dot_bytes(b, V::load_bytes(y));
    } else {
        parts[2 * i] = first;
        parts[2 * i + 1] = V::splat_bits(0).dot_bytes(b, V::load_bytes(y));
    }
}

/// Times sixteen rows of the weight that a tile passes over at once: each value of x is then loaded once for two
/// products, and a tile of [`TALL`] rows has enough sums to hide the time that a product takes. In the first-level
/// cache 1 does 3.2, and 2 does 6.0 products of 64 bytes a nanosecond (Zen 5).
const WIDE: usize = 2;

/// Tiles that pass over a turned block of the weight before the next is turned.
const FAR: usize = 32;

/// Thirty-two rows at a time: out[t, n] for all t, and n in `rows`
pub(super) struct Turned<'a, C> {
    pub weight: C,
    pub x: &'a Quantized,
    pub in_features: usize,
    pub t_count: usize,
    pub rows: Range<usize>,
    pub out: &'a Columns<'a>,
    pub room: &'a mut Room,
}

/// Space for turned codes and for sums.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// A block of units, for each unit 32 times four codes of all rows.
    codes: Vec<[Half; WIDE]>,
    /// For each tile, and each of sixteen lanes, and each row of x, a sum for each row of the weight.
    sums: Vec<Sums>,
}

type Sums = [[[Line; WIDE]; TALL]; LANES];
const NO_SUMS: Sums = [[[Line([0.0; LANES]); WIDE]; TALL]; LANES];

#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Line([f32; LANES]);

thread_local! {
    static ROOM: RefCell<Room> = const { RefCell::new(Room { codes: Vec::new(), sums: Vec::new() }) };
}

impl Room {
    /// Lends this thread's.
    pub fn lend(to: impl FnOnce(&mut Room)) {
        let mut room = ROOM.take();
        to(&mut room);
        ROOM.set(room);
    }
}

impl<C: Codes> Kernel for Turned<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self { weight, x, in_features, t_count, rows, out, room } = self;
        assert_eq!(x.tall(), TALL, "rows of a tile");
        let group = weight.group();
        let in_block = LANES * group / UNIT;
        let (units, whole) = (in_features.div_ceil(UNIT), in_features / UNIT);
        let tiles = t_count.div_ceil(TALL);
        room.codes.resize(in_block * 2 * LANES, [Half([0; UNIT / 2]); WIDE]);
        room.sums.resize(FAR.min(tiles), NO_SUMS);
        for first_row in rows.clone().step_by(WIDE * LANES) {
            let sixteens = |i: usize| {
                let n = first_row + i * LANES;
                n..rows.end.min(n + LANES)
            };
            for far in (0..tiles).step_by(FAR) {
                let blocks = x.groups / LANES;
                for block in 0..blocks {
                    let first = block * in_block;
                    let mut scales = [[V::splat(0.0); LANES]; WIDE];
                    let mut biases = scales;
                    for (i, (scales, biases)) in scales.iter_mut().zip(&mut biases).enumerate() {
                        let units = first..units.min(first + in_block);
                        for (u, to) in units.zip(room.codes.chunks_mut(2 * LANES)) {
                            turn::<V, C>(weight, sixteens(i), u, u < whole, to, i);
                        }
                        for (j, n) in sixteens(i).enumerate() {
                            [scales[j], biases[j]] = weight.parameters::<V>(n, block);
                        }
                        *scales = V::transpose(*scales);
                        *biases = V::transpose(*biases);
                    }
                    let groups = LANES.min(in_features / group - block * LANES);
                    let block = Block { codes: &room.codes, scales, biases, group, first, block, groups };
                    for tile in far..tiles.min(far + FAR) {
                        // With one block, sums are of no use after the tile, and the cache can hold one.
                        let sums = &mut room.sums[if blocks == 1 { 0 } else { tile - far }];
                        block.multiply::<C>(x.tile(tile), sums);
                        if block.block + 1 < blocks {
                            continue;
                        }
                        for t in tile * TALL..t_count.min((tile + 1) * TALL) {
                            for i in 0..WIDE {
                                let rows = sixteens(i);
                                if !rows.is_empty() {
                                    let y = add_lanes::<V>(sums, t % TALL, i);
                                    // SAFETY: rows of the weight, and so columns of the output, are given to one
                                    // call each.
                                    store(y, unsafe { out.row(t, rows) });
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Writes at most sixteen lanes.
#[inline(always)]
fn store<V: Lanes>(y: V, out: &mut [f32]) {
    if let Ok(sixteen) = (&mut *out).try_into() {
        y.store(sixteen);
    } else {
        let mut all = [0.0; LANES];
        y.store(&mut all);
        out.copy_from_slice(&all[..out.len()]);
    }
}

/// The sums of the `i`-th sixteen rows of the weight with row `t` of a tile: their lanes added in halves.
#[inline(always)]
fn add_lanes<V: Lanes>(sums: &Sums, t: usize, i: usize) -> V {
    let lane = |l: usize| V::load(&sums[l][t][i].0);
    let mut eight = [V::splat(0.0); 8];
    for (l, to) in eight.iter_mut().enumerate() {
        *to = lane(l).add(lane(l + 8));
    }
    let mut four = [V::splat(0.0); 4];
    for (l, to) in four.iter_mut().enumerate() {
        *to = eight[l].add(eight[l + 4]);
    }
    four[0].add(four[2]).add(four[1].add(four[3]))
}

/// Turns unit `u` of at most sixteen rows: vector j has the unit's j-th four codes of each row, or anything.
#[inline(always)]
fn turn<V: Lanes, C: Codes>(
    weight: C,
    rows: Range<usize>,
    u: usize,
    whole: bool,
    to: &mut [[Half; WIDE]],
    i: usize,
) {
    let mut turned = [[V::splat_bits(0); LANES]; 2];
    for (j, n) in rows.enumerate() {
        // SAFETY: a whole unit of a row that the caller of the kernel asks for.
        let [a, b] = if whole { unsafe { weight.unit::<V>(n, u) } } else { weight.part(n, u) };
        (turned[0][j], turned[1][j]) = (a, b);
    }
    for (half, to) in turned.into_iter().zip(to.chunks_mut(LANES)) {
        for (column, to) in V::transpose(half).into_iter().zip(to) {
            column.store(as_lanes(&mut to[i]));
        }
    }
}

/// The same 64 bytes.
#[inline(always)]
fn as_lanes(half: &mut Half) -> &mut [f32; LANES] {
    // SAFETY: of the same size, aligned to 64, and any bits are an f32.
    unsafe { &mut *(&raw mut half.0).cast() }
}

/// Sixteen groups of some rows of a weight.
struct Block<'a, V> {
    codes: &'a [[Half; WIDE]],
    /// [sixteen rows, group, row]
    scales: [[V; LANES]; WIDE],
    biases: [[V; LANES]; WIDE],
    /// Weights that share a scale.
    group: usize,
    /// The first unit, the block's number, and how many groups of it there are.
    first: usize,
    block: usize,
    groups: usize,
}

impl<V: Lanes> Block<'_, V> {
    /// Adds the block's part of a tile's outputs to `sums`; the first block sets them.
    #[inline(always)]
    fn multiply<C: Codes>(&self, x: Tile<'_>, sums: &mut Sums) {
        let Self { codes, group, .. } = *self;
        let fours = x.codes[self.first * 2 * TALL..].as_ptr().cast::<[u32; TALL]>();
        let at = self.block * LANES;
        let of_group = |values: &'_ [f32]| values[at * TALL..].as_ptr().cast::<[f32; TALL]>();
        let (x_scales, x_biases, x_sums) = (of_group(x.scales), of_group(x.biases), of_group(x.sums));
        // A group is two runs of vectors: of its codes with even k and odd k, or just its halves.
        let run = group / 8;
        assert!(self.groups <= LANES && codes.len() >= LANES * group / 4, "whole blocks");
        assert!(
            x.scales.len() >= (at + LANES) * TALL && x.codes.len() >= (self.first + group / 8) * 2 * TALL
        );
        if self.block == 0 {
            sums[self.groups..].fill([[Line([0.0; LANES]); WIDE]; TALL]);
        }
        for (g, sums) in sums.iter_mut().enumerate().take(self.groups) {
            let starts = match C::ORDER {
                Order::Plain => [g * 2 * run, (g * 2 + 1) * run],
                Order::Split => {
                    let start = g * group / UNIT * 2 * LANES + g * group % UNIT / 8;
                    [start, start + LANES]
                }
            };
            // SAFETY: group `at + g` of the tile, by the assertion.
            let (x_scales, x_biases, x_sums) =
                unsafe { (&*x_scales.add(g), &*x_biases.add(g), &*x_sums.add(g)) };
            let mut products = [[V::splat_bits(0); WIDE]; TALL];
            if C::OFFSET != 0 {
                for (products, sum) in products.iter_mut().zip(x_sums) {
                    *products = [splat_int(-C::OFFSET * sum.to_bits() as i32); WIDE];
                }
            }
            for start in starts {
                for j in start..start + run {
                    // SAFETY: vectors of the block and the tile's four codes that belong to them, by the assertion.
                    let (codes, x) = unsafe { (codes.get_unchecked(j), &*fours.add(j)) };
                    let mut w = [V::splat_bits(0); WIDE];
                    for (w, codes) in w.iter_mut().zip(codes) {
                        *w = V::load_bytes(&codes.0);
                    }
                    for (products, x) in products.iter_mut().zip(x) {
                        let x = V::splat_bits(*x);
                        for (product, w) in products.iter_mut().zip(w) {
                            *product = product.dot_bytes(w, x);
                        }
                    }
                }
            }
            for (t, (sums, products)) in sums.iter_mut().zip(products).enumerate() {
                for (i, (sum, product)) in sums.iter_mut().zip(products).enumerate() {
                    let scale = self.scales[i][g].mul(V::splat(x_scales[t]));
                    let before = if self.block == 0 { V::splat(0.0) } else { V::load(&sum.0) };
                    let mut total = scale.fma(product.to_float(), before);
                    if C::BIASES {
                        total = self.biases[i][g].fma(V::splat(x_biases[t]), total);
                    }
                    total.store(&mut sum.0);
                }
            }
        }
    }
}
