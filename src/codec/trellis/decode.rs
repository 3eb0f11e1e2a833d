//! Stored tiles, decoded sixteen weights at a time.
//!
//! Weights t to t + 15 of a tile, t a multiple of 16, are windows that begin every k bits, the last weight's first, at
//! byte 2 k (T / 16 − 1 − t / 16) of its ring: 15 k + L bits. So they are shifted out of one word of 64 bits, or for
//! k = 4 out of two, and values are computed from them; no table is looked up if the code has none.
//!
//! A **strip** is sixteen rows of a weight whose tiles lie along outputs: one such vector for each column.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;

use super::{Along, Codebook, MAX_TILE, Trellis, tile_words};
use crate::codec::Part;
use crate::numeric::dot::PANEL;
use crate::numeric::f16_to_f32;
use crate::numeric::lanes::{Kernel, LANES, Lanes};

/// What states are worth, sixteen at a time: [`Codebook::value`].
pub(crate) trait Rule: Copy {
    /// Values in code units.
    fn values<V: Lanes>(self, states: V) -> V;
}

/// A rule by which values are sums of four bytes, less 510.
pub(crate) trait Bytes: Copy {
    /// The bytes of each state.
    fn bytes<V: Lanes>(self, states: V) -> V;
}

/// Bytes of state · multiplier.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product(u32);

/// Bytes of state · multiplier + addend.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Congruence(u32, u32);

/// All other codes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Other<'a>(&'a Codebook);

/// What the four bytes of a state's value are less by.
pub(crate) const BYTES_LESS: i32 = 510;

impl Bytes for Product {
    #[inline(always)]
    fn bytes<V: Lanes>(self, states: V) -> V {
        states.imul(V::splat_bits(self.0))
    }
}

impl Bytes for Congruence {
    #[inline(always)]
    fn bytes<V: Lanes>(self, states: V) -> V {
        states.imul(V::splat_bits(self.0)).iadd(V::splat_bits(self.1))
    }
}

impl<B: Bytes> Rule for B {
    #[inline(always)]
    fn values<V: Lanes>(self, states: V) -> V {
        let less = V::splat_bits(-BYTES_LESS as u32);
        less.add_bytes(self.bytes(states), V::splat_bits(V::times(1))).to_float()
    }
}

impl Rule for Other<'_> {
    #[inline(always)]
    fn values<V: Lanes>(self, states: V) -> V {
        let Some((multiplier, addend)) = self.0.code().congruence() else {
            let mut lanes = [0.0; LANES];
            states.store(&mut lanes);
            return V::load(&lanes.map(|state: f32| self.0.value(state.to_bits())));
        };
        let bits = V::splat_bits;
        let x = states.imul(bits(multiplier)).iadd(bits(addend)).and(bits(0x8fff_8fff));
        // Exclusive or.
        let flip = bits(0x3b60_3b60);
        let r = x.or(flip).isub(x.and(flip));
        // Halves with exponents from 12 to 15: normal numbers, whose bits need only move.
        let (sign, rebias) = (bits(1 << 31), bits((127 - 15) << 23));
        let low = r.shl::<16>().and(sign).or(r.and(bits(0x7fff)).shl::<13>().iadd(rebias));
        let high = r.and(sign).or(r.and(bits(0x7fff_0000)).shr::<3>().iadd(rebias));
        low.add(high).round_f16()
    }
}

/// Which rule a code has.
#[derive(Debug, Clone, Copy)]
pub(crate) enum AnyRule<'a> {
    Product(Product),
    Congruence(Congruence),
    Other(Other<'a>),
}

/// Runs `$body` with `$BITS`, k as a constant.
macro_rules! with_width {
    ($bits:expr, $BITS:ident => $body:expr) => {
        match $bits {
            1 => {
                const $BITS: u32 = 1;
                $body
            }
            2 => {
                const $BITS: u32 = 2;
                $body
            }
            3 => {
                const $BITS: u32 = 3;
                $body
            }
            4 => {
                const $BITS: u32 = 4;
                $body
            }
            bits => unreachable!("no trellis has {bits} bits a weight"),
        }
    };
}

pub(crate) use with_width;

/// The planes of some rows of a weight [N, K], or of several such below each other.
#[derive(Debug, Clone)]
pub(crate) struct View<'a> {
    trellis: Trellis,
    /// For codes whose values are not sums of bytes.
    book: Option<Arc<Codebook>>,
    /// T, and bytes of a tile.
    tile: usize,
    bytes: usize,
    out_features: usize,
    in_features: usize,
    /// Which row of the stored weight is row 0 of these.
    first: usize,
    rows: usize,
    words: &'a [u8],
    scales: [Option<&'a [u8]>; 2],
}

impl<'a> View<'a> {
    /// `rows` rows of a stored weight whose `planes` cover them.
    ///
    /// # Panics
    /// If the planes do not hold these rows, or the matrix has no tiles.
    pub fn new(trellis: Trellis, part: Part, planes: &[&'a [u8]], rows: usize) -> Self {
        let tile = trellis.tile(part.matrix).expect("checked when the planes were laid out");
        let (n, k) = (part.matrix.out_features as usize, part.matrix.in_features as usize);
        let (first, end) = (part.first as usize, part.first as usize + rows);
        let bytes = 4 * tile_words(tile, trellis.bits());
        let tiles = match trellis.along() {
            Along::Outputs => (end.div_ceil(tile) - first / tile) * k,
            Along::Inputs => rows * (k / tile),
        };
        assert!(planes[0].len() >= tiles * bytes, "bytes of `weight`");
        let book = (!trellis.code().sums_bytes()).then(|| trellis.codebook());
        let (words, scales) = (planes[0], [planes.get(1).copied(), planes.get(2).copied()]);
        let view =
            Self { trellis, book, tile, bytes, out_features: n, in_features: k, first, rows, words, scales };
        let (inputs, outputs) = view.scales();
        let matrices = end.div_ceil(n) - first / n;
        assert!(inputs.is_none_or(|plane| plane.len() >= 2 * matrices * k), "scales of every input");
        assert!(outputs.is_none_or(|plane| plane.len() >= 2 * rows), "scales of every output");
        view
    }

    /// K.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// k.
    pub fn bits(&self) -> u32 {
        self.trellis.bits()
    }

    /// How tiles lie.
    pub fn along(&self) -> Along {
        self.trellis.along()
    }

    /// The code's rule.
    pub fn rule(&self) -> AnyRule<'_> {
        let code = self.trellis.code();
        match (&self.book, code.congruence()) {
            (Some(book), _) => AnyRule::Other(Other(book)),
            (None, Some((multiplier, 0))) => AnyRule::Product(Product(multiplier)),
            (None, Some((multiplier, addend))) => AnyRule::Congruence(Congruence(multiplier, addend)),
            (None, None) => unreachable!("{code} has no multiplier"),
        }
    }

    /// The bits of a state.
    #[inline(always)]
    pub fn mask<V: Lanes>(&self) -> V {
        V::splat_bits((1 << self.trellis.states()) - 1)
    }

    /// f16 scales of inputs, and of outputs.
    fn scales(&self) -> (Option<&'a [u8]>, Option<&'a [u8]>) {
        let [first, second] = self.scales;
        match self.trellis.along() {
            Along::Outputs => (first, second),
            Along::Inputs => (second, first),
        }
    }

    /// f16 scales of the inputs of row `row`'s matrix, if there are any.
    pub fn inputs(&self, row: usize) -> Option<&'a [u8]> {
        let matrix = (self.first + row) / self.out_features - self.first / self.out_features;
        Some(&self.scales().0?[2 * matrix * self.in_features..][..2 * self.in_features])
    }

    /// Where the rows of `row`'s matrix end.
    pub fn matrix_end(&self, row: usize) -> usize {
        self.rows.min(((self.first + row) / self.out_features + 1) * self.out_features - self.first)
    }

    /// Where the rows end that share tiles with `row`. Tiles must lie along outputs.
    pub fn tile_end(&self, row: usize) -> usize {
        self.rows.min(((self.first + row) / self.tile + 1) * self.tile - self.first)
    }

    /// The strip that holds `row`. Tiles must lie along outputs.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn strip(&self, row: usize) -> Strip<'a> {
        assert!(row < self.rows && self.trellis.along() == Along::Outputs, "a row of a tile of outputs");
        let absolute = self.first + row;
        let begin = absolute / LANES * LANES;
        let lane = self.first.saturating_sub(begin);
        let rows = begin + lane - self.first..self.rows.min(begin + LANES - self.first);
        let group = absolute / self.tile - self.first / self.tile;
        let column = self.in_features * self.bytes;
        let outputs = self.scales().1;
        Strip {
            tiles: &self.words[group * column..][..column],
            bytes: self.bytes,
            at: self.at(absolute % self.tile),
            number: absolute % self.tile / LANES,
            outputs: outputs.map(|plane| &plane[2 * rows.start..2 * rows.end]),
            lane,
            rows,
        }
    }

    /// The strips of `rows`, which share tiles. Tiles must lie along outputs.
    pub fn strips(&self, rows: Range<usize>) -> Vec<Strip<'a>> {
        let (mut strips, mut row) = (Vec::with_capacity(MAX_TILE / LANES), rows.start);
        while row < rows.end {
            let strip = self.strip(row);
            row = strip.rows.end;
            strips.push(strip);
        }
        strips
    }

    /// At which byte of its ring the windows of the sixteen weights begin that weight `t` is of.
    #[inline(always)]
    fn at(&self, t: usize) -> usize {
        2 * self.trellis.bits() as usize * (self.tile / LANES - 1 - t / LANES)
    }
}

/// Bytes that a strip's windows are shifted out of.
const fn needed(bits: u32) -> usize {
    if bits == 4 { WORD + WORD / 2 } else { WORD }
}

/// Sixteen rows of a weight, at most.
#[derive(Debug, Clone)]
pub(crate) struct Strip<'a> {
    /// Tiles of one column after the other, and bytes of each.
    tiles: &'a [u8],
    bytes: usize,
    /// At which byte of each the windows begin.
    at: usize,
    /// How many of the tile's strips come before it.
    number: usize,
    /// f16, one for each of `rows`.
    outputs: Option<&'a [u8]>,
    /// In which lane the first of `rows` is.
    lane: usize,
    /// Rows of the view.
    pub rows: Range<usize>,
}

/// What is done with strips of a tile, several at a time.
pub(crate) trait Together {
    /// Takes `G` strips from strip `at` on, of which the first are parted if any are; gives `G`.
    fn take<const G: usize, const PARTED: bool>(&mut self, at: usize) -> usize;
}

/// Takes a tile's strips `G` at a time, and then one.
#[inline(always)]
pub(crate) fn together<const BITS: u32, const G: usize>(strips: &[Strip<'_>], work: &mut impl Together) {
    let mut at = 0;
    while at < strips.len() {
        at += match (strips.len() - at >= G, strips[at].is_parted(BITS)) {
            (true, false) => work.take::<G, false>(at),
            (true, true) if strips[at].number == 0 => work.take::<G, true>(at),
            (_, false) => work.take::<1, false>(at),
            (_, true) => work.take::<1, true>(at),
        };
    }
}

/// Columns of [`Strip::below`], at most.
const BELOW: usize = 128;

/// Strips of a tile whose words lie partly at the end of its ring and partly at the beginning, at most.
const PARTED: usize = 3;

/// Space for the words of such strips.
#[derive(Debug)]
pub(crate) struct Parts([[MaybeUninit<[u8; 2 * WORD]>; BELOW]; PARTED]);

impl Parts {
    /// Nothing is in it.
    #[inline(always)]
    pub fn new() -> Self {
        Self([[MaybeUninit::uninit(); BELOW]; PARTED])
    }
}

/// Space for the words of a panel of columns.
pub(crate) type Room = [[u8; 2 * WORD]; PANEL];

const WORD: usize = size_of::<u64>();

impl Strip<'_> {
    /// Which lane has row `row`.
    #[inline(always)]
    pub fn lane_of(&self, row: usize) -> usize {
        row - self.rows.start + self.lane
    }

    /// The outputs' scales; 1 if they have none.
    #[inline(always)]
    pub fn outputs<V: Lanes>(&self) -> V {
        match self.outputs {
            None => V::splat(1.0),
            Some(scales) if self.lane == 0 => V::load_f16_part(scales),
            Some(scales) => {
                let mut all = [0; 2 * LANES];
                all[2 * self.lane..][..scales.len()].copy_from_slice(scales);
                V::load_f16(&all)
            }
        }
    }

    /// Whether its words lie partly at the end of the ring and partly at the beginning: only the first strips' of a tile.
    #[inline(always)]
    pub fn is_parted(&self, bits: u32) -> bool {
        self.at + needed(bits) > self.bytes
    }

    /// Where part `part` of `parts` of column `c`'s tile lies; of a column past the last, what lies behind. For prefetches.
    #[inline(always)]
    pub fn part_of(&self, c: usize, part: usize, parts: usize) -> *const u8 {
        self.tiles.as_ptr().wrapping_add(c * self.bytes + part * self.bytes / parts)
    }

    /// The words of this strip and the `G − 1` below it in at most 128 columns. If this one is `PARTED`, `G` is 1 or it is
    /// the tile's first; then parted words are put together in `room`.
    ///
    /// # Panics
    /// If there are no such columns or strips, or `PARTED` is wrong.
    #[inline(always)]
    pub fn below<'r, const BITS: u32, const G: usize, const PARTED: bool>(
        &'r self,
        columns: Range<usize>,
        room: &'r mut Parts,
    ) -> Below<'r, BITS, G, PARTED> {
        let tiles = &self.tiles[columns.start * self.bytes..columns.end * self.bytes];
        assert!(
            columns.len() <= BELOW && self.at >= 2 * BITS as usize * (G - 1),
            "columns of so many strips"
        );
        assert!(
            PARTED == self.is_parted(BITS) && (!PARTED || G == 1 || self.number == 0),
            "the first are parted"
        );
        for (g, words) in room.0.iter_mut().enumerate().take(Below::<BITS, G, PARTED>::PARTS) {
            let at = self.at - 2 * BITS as usize * g;
            for (tile, words) in tiles.chunks_exact(self.bytes).zip(words) {
                let mut both = [0; 2 * WORD];
                both[..WORD].copy_from_slice(&ring_word(tile, at).to_le_bytes());
                if BITS == 4 {
                    both[WORD / 2..][..WORD].copy_from_slice(&ring_word(tile, at + WORD / 2).to_le_bytes());
                }
                words.write(both);
            }
        }
        Below { tiles: &tiles[self.at..], bytes: self.bytes, room }
    }

    /// The words of at most a panel of columns. Where a ring ends among them, or the plane might, they are put together
    /// in `room`; so they are if the columns are not whole sixteens, and then words of anything fill the last sixteen up.
    ///
    /// # Panics
    /// If there are no such columns, or too many.
    #[inline(always)]
    pub fn words<'r>(&'r self, columns: Range<usize>, bits: u32, room: &'r mut Room) -> Words<'r> {
        assert!(!columns.is_empty() && columns.len() <= PANEL, "a panel of columns");
        let count = columns.len();
        let tiles = &self.tiles[columns.start * self.bytes..columns.end * self.bytes];
        if !self.is_parted(bits) && count.is_multiple_of(LANES) {
            return Words { bytes: &tiles[self.at..], stride: self.bytes, count };
        }
        for (tile, words) in tiles.chunks_exact(self.bytes).zip(room.iter_mut()) {
            words[..WORD].copy_from_slice(&ring_word(tile, self.at).to_le_bytes());
            if bits == 4 {
                words[WORD / 2..][..WORD].copy_from_slice(&ring_word(tile, self.at + 4).to_le_bytes());
            }
        }
        Words { bytes: room.as_flattened(), stride: 2 * WORD, count }
    }
}

/// The words that a strip's windows in some columns are shifted out of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Words<'a> {
    bytes: &'a [u8],
    stride: usize,
    count: usize,
}

impl Words<'_> {
    /// How many columns.
    pub fn len(&self) -> usize {
        self.count
    }

    /// The states of column `c` of these; anything in what fills the last sixteen up.
    ///
    /// # Safety
    /// There must be such a column, or it must be one of the last sixteen.
    #[inline(always)]
    pub unsafe fn states<V: Lanes, const BITS: u32>(&self, c: usize, mask: V) -> V {
        debug_assert!(c < self.count.next_multiple_of(LANES), "a column of the panel");
        let word = |at: usize| {
            let from = self.bytes.as_ptr().wrapping_add(c * self.stride + at);
            // SAFETY: `Strip::words` has made sure that there is a word, or for k = 4 one and a half, for each column.
            u64::from_le_bytes(unsafe { *from.cast::<[u8; WORD]>() })
        };
        V::windows::<BITS>(word(0), if BITS == 4 { word(4) } else { 0 }, mask)
    }
}

/// Words of strips below each other.
pub(crate) struct Below<'a, const BITS: u32, const G: usize, const PARTED: bool> {
    /// From the first strip's of the first column on.
    tiles: &'a [u8],
    /// Bytes of a tile.
    bytes: usize,
    room: &'a Parts,
}

impl<const BITS: u32, const G: usize, const PARTED: bool> Below<'_, BITS, G, PARTED> {
    /// How many of the first strips are parted: those with 2 k (number + 1) bytes to the end of the ring, which are too few.
    const PARTS: usize = match (PARTED, G) {
        (false, _) => 0,
        (true, 1) => 1,
        (true, _) => needed(BITS).div_ceil(2 * BITS as usize) - 1,
    };

    /// The states of column `c` of strip `g`.
    ///
    /// # Safety
    /// There must be both.
    #[inline(always)]
    pub unsafe fn states<V: Lanes>(&self, c: usize, g: usize, mask: V) -> V {
        let from = if g < Self::PARTS {
            self.room.0[g].as_ptr().wrapping_add(c).cast::<u8>()
        } else {
            self.tiles.as_ptr().wrapping_add(c * self.bytes).wrapping_sub(2 * BITS as usize * g)
        };
        let word = |at: usize| {
            // SAFETY: `Strip::below` has put these together, or they end before the ring does.
            u64::from_le_bytes(unsafe { *from.wrapping_add(at).cast::<[u8; WORD]>() })
        };
        V::windows::<BITS>(word(0), if BITS == 4 { word(WORD / 2) } else { 0 }, mask)
    }
}

/// The 64 bits of a ring that begin at byte `at`.
#[inline(always)]
fn ring_word(ring: &[u8], at: usize) -> u64 {
    let word = |at: usize| u64::from_le_bytes(*ring[at..].first_chunk().expect("eight bytes"));
    let over = 8 * (at + WORD).saturating_sub(ring.len());
    if over == 0 {
        return word(at);
    }
    if let Ok(half) = <[u8; WORD / 2]>::try_from(ring) {
        let half = u64::from(u32::from_le_bytes(half));
        return (half | half << 32).rotate_right(8 * at as u32);
    }
    word(ring.len() - WORD) >> over | word(0) << (64 - over)
}

/// At most a panel of f16 as f32, then zeros to the end of the last sixteen.
///
/// # Panics
/// If there are more.
#[inline(always)]
pub(crate) fn widen<V: Lanes>(from: &[u8], to: &mut [f32; PANEL]) {
    assert!(from.len() <= 2 * PANEL, "a panel");
    for (from, to) in from.chunks(2 * LANES).zip(to.as_chunks_mut::<LANES>().0) {
        V::load_f16_part(from).store(to);
    }
}

/// to[r, c] = w[rows.start + r, columns.start + c]: the definition's bits. Rows of `to` are `stride` apart.
///
/// # Panics
/// If there are no such rows or columns, `to` is too short, or columns do not begin at a multiple of 16.
pub(crate) struct Decode<'a, 'b> {
    pub view: &'a View<'b>,
    pub rows: Range<usize>,
    pub columns: Range<usize>,
    pub to: &'a mut [f32],
    pub stride: usize,
}

impl Kernel for Decode<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        if self.rows.is_empty() || self.columns.is_empty() {
            return;
        }
        let Self { view, rows, columns, to, stride } = self;
        assert!(rows.end <= view.rows && columns.end <= view.in_features, "rows and columns of the weight");
        assert!(columns.start.is_multiple_of(LANES), "whole sixteens before the columns");
        assert!((rows.len() - 1) * stride + columns.len() <= to.len(), "room for them");
        match view.rule() {
            AnyRule::Product(rule) => by_width::<V, _>(view, rule, rows, columns, to, stride),
            AnyRule::Congruence(rule) => by_width::<V, _>(view, rule, rows, columns, to, stride),
            AnyRule::Other(rule) => by_width::<V, _>(view, rule, rows, columns, to, stride),
        }
    }
}

#[inline(always)]
fn by_width<V: Lanes, R: Rule>(
    view: &View<'_>,
    rule: R,
    rows: Range<usize>,
    columns: Range<usize>,
    to: &mut [f32],
    stride: usize,
) {
    with_width!(view.bits(), BITS => {
        V::call(DecodeBy::<R, BITS> { view, rule, rows, columns, to, stride });
    });
}

/// [`Decode`], compiled once for each rule and k.
struct DecodeBy<'a, 'b, R, const BITS: u32> {
    view: &'a View<'b>,
    rule: R,
    rows: Range<usize>,
    columns: Range<usize>,
    to: &'a mut [f32],
    stride: usize,
}

impl<R: Rule, const BITS: u32> Kernel for DecodeBy<'_, '_, R, BITS> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        match self.view.along() {
            Along::Outputs => self.strips::<V>(),
            Along::Inputs => self.rows::<V>(),
        }
    }
}

impl<R: Rule, const BITS: u32> DecodeBy<'_, '_, R, BITS> {
    #[inline(always)]
    fn strips<V: Lanes>(self) {
        let Self { view, rule, rows, columns, to, stride } = self;
        let mask = view.mask::<V>();
        let (mut room, mut inputs) = ([[0; 2 * WORD]; PANEL], [0.0; PANEL]);
        for start in columns.clone().step_by(PANEL) {
            let panel = start..columns.end.min(start + PANEL);
            let mut row = rows.start;
            while row < rows.end {
                let strip = view.strip(row);
                let scales = view.inputs(row).expect("a scale for each column");
                widen::<V>(&scales[2 * panel.start..2 * panel.end], &mut inputs);
                let (words, outputs) = (strip.words(panel.clone(), BITS, &mut room), strip.outputs::<V>());
                let end = strip.rows.end.min(rows.end);
                for c in (0..words.len()).step_by(LANES) {
                    let wide = LANES.min(words.len() - c);
                    let mut all = [V::splat(0.0); LANES];
                    for (i, to) in all.iter_mut().enumerate() {
                        // SAFETY: c + i is one of sixteen that begin inside the panel.
                        let (states, input) =
                            unsafe { (words.states::<V, BITS>(c + i, mask), *inputs.get_unchecked(c + i)) };
                        *to = rule.values(states).mul(V::splat(input)).mul(outputs);
                    }
                    for (lane, values) in V::transpose(all).into_iter().enumerate() {
                        let here = lane + strip.rows.start;
                        if !(row + strip.lane..end + strip.lane).contains(&here) {
                            continue;
                        }
                        let at = (here - strip.lane - rows.start) * stride + start - columns.start + c;
                        store(values, &mut to[at..at + wide]);
                    }
                }
                row = end;
            }
        }
    }

    #[inline(always)]
    fn rows<V: Lanes>(self) {
        let Self { view, rule, rows, columns, to, stride } = self;
        let mask = view.mask::<V>();
        let row_bytes = view.in_features / view.tile * view.bytes;
        let outputs = view.scales().1.expect("a scale for each row").as_chunks::<2>().0;
        for (i, row) in rows.enumerate() {
            let rings = &view.words[row * row_bytes..][..row_bytes];
            let output = V::splat(f16_to_f32(u16::from_le_bytes(outputs[row])));
            let inputs = view.inputs(row);
            for c in columns.clone().step_by(LANES) {
                let (ring, at) = (&rings[c / view.tile * view.bytes..][..view.bytes], view.at(c % view.tile));
                let high = if BITS == 4 { ring_word(ring, at + 4) } else { 0 };
                let states = V::windows::<BITS>(ring_word(ring, at), high, mask);
                let mut values = rule.values(states).mul(output);
                if let Some(inputs) = inputs {
                    values = values.mul(V::load_f16(inputs[2 * c..].first_chunk().expect("whole sixteens")));
                }
                let at = i * stride + c - columns.start;
                store(values, &mut to[at..at + LANES.min(columns.end - c)]);
            }
        }
    }
}

/// Writes at most sixteen lanes.
#[inline(always)]
fn store<V: Lanes>(values: V, to: &mut [f32]) {
    if let Ok(sixteen) = (&mut *to).try_into() {
        values.store(sixteen);
    } else {
        let mut all = [0.0; LANES];
        values.store(&mut all);
        to.copy_from_slice(&all[..to.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{BITS, Code, STATES, Scales, state};
    use super::*;
    use crate::codec::{Codec, Matrix};
    use crate::isa::Isa;
    use crate::numeric::f16_from_f32;
    use crate::numeric::lanes::dispatch;
    use crate::tensor::Float;

    fn random(seed: u64) -> impl FnMut() -> u64 {
        let mut x = seed;
        move || {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            x >> 33
        }
    }

    /// Planes of `rows` rows of a weight, with scales of both signs, zeros among them.
    fn planes(trellis: Trellis, matrix: Matrix, rows: u64, random: &mut impl FnMut() -> u64) -> Vec<Vec<u8>> {
        let plane = |plane: &crate::codec::Plane| {
            let bytes = plane.bytes_of(plane.begun(0..rows));
            if plane.suffix == "weight" {
                return (0..bytes).map(|_| random() as u8).collect();
            }
            let scale = |_| f16_from_f32((random() % 33) as f32 / 64.0 - 0.25).to_le_bytes();
            (0..bytes / 2).flat_map(scale).collect()
        };
        trellis.planes(matrix, Float::Bf16).unwrap().iter().map(plane).collect()
    }

    /// Weight [row, column] by the table in `stored` and the definition of a ring.
    fn defined(trellis: Trellis, matrix: Matrix, planes: &[Vec<u8>], row: usize, column: usize) -> f32 {
        let (n, k) = (matrix.out_features as usize, matrix.in_features as usize);
        let tile = trellis.tile(matrix).unwrap();
        let per_tile = tile_words(tile, trellis.bits());
        let (number, t, scales) = match trellis.along() {
            Along::Outputs => (row / tile * k + column, row % tile, [row / n * k + column, row]),
            Along::Inputs => (row * (k / tile) + column / tile, column % tile, [row, row / n * k + column]),
        };
        let bytes = &planes[0][4 * number * per_tile..][..4 * per_tile];
        let ring: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let value = trellis.codebook().value(state(&ring, trellis.bits(), trellis.states(), t));
        planes[1..]
            .iter()
            .zip(scales)
            .fold(value, |value, (plane, at)| value * f16_to_f32(u16::from_le_bytes(plane.as_chunks().0[at])))
    }

    #[test]
    fn any_rows_and_columns_are_the_definition_for_every_code_width_and_isa() {
        let mut random = random(1);
        for code in Code::ALL {
            for bits in BITS {
                for states in [*STATES.start(), 12, *STATES.end()] {
                    for (along, scales) in [
                        (Along::Outputs, Scales::Both),
                        (Along::Outputs, Scales::One),
                        (Along::Inputs, Scales::Both),
                        (Along::Inputs, Scales::One),
                    ] {
                        let trellis = Trellis::new(bits, states, code, along, scales).unwrap();
                        // Tiles of 32, 64 and 192; two matrices below each other.
                        for (n, k) in [(32, 19), (64, 37), (192, 5), (5, 192), (3, 64), (7, 32)] {
                            let matrix = Matrix { out_features: n, in_features: k };
                            if trellis.tile(matrix).is_err() {
                                continue;
                            }
                            let stored = planes(trellis, matrix, 2 * n, &mut random);
                            let planes: Vec<&[u8]> = stored.iter().map(Vec::as_slice).collect();
                            let (n, k) = (2 * n as usize, k as usize);
                            let view = View::new(trellis, Part { matrix, first: 0 }, &planes, n);
                            let (r, c) = (random() as usize % n, random() as usize % k / LANES * LANES);
                            let (r_end, c_end) =
                                (r + 1 + random() as usize % (n - r), c + 1 + random() as usize % (k - c));
                            for (rows, columns) in [(0..n, 0..k), (r..r_end, c..c_end)] {
                                for isa in Isa::available() {
                                    let stride = columns.len() + 2;
                                    let mut to = vec![7.5; rows.len() * stride];
                                    let (rows, columns) = (rows.clone(), columns.clone());
                                    let [r0, c0] = [rows.start, columns.start];
                                    let wide = columns.len();
                                    dispatch(isa, Decode { view: &view, rows, columns, to: &mut to, stride });
                                    for (i, found) in to.iter().enumerate() {
                                        let (r, c) = (r0 + i / stride, c0 + i % stride);
                                        let expected = if i % stride < wide {
                                            defined(trellis, matrix, &stored, r, c)
                                        } else {
                                            7.5
                                        };
                                        assert_eq!(
                                            found.to_bits(),
                                            expected.to_bits(),
                                            "{trellis} {isa} {n} x {k}, row {r}, column {c}: {found}, {expected}"
                                        );
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn rows_that_begin_inside_a_tile_or_a_strip_find_their_scales_and_windows() {
        let mut random = random(2);
        for along in [Along::Outputs, Along::Inputs] {
            let trellis = Trellis::new(3, 12, Code::Bs12, along, Scales::Both).unwrap();
            let matrix = Matrix { out_features: 96, in_features: 32 };
            let stored = planes(trellis, matrix, 192, &mut random);
            let layout = trellis.planes(matrix, Float::Bf16).unwrap();
            for first in [0, 5, 16, 40, 90, 96, 101, 170] {
                let rows = 192 - first;
                let cut = |(stored, plane): (&'_ Vec<u8>, &crate::codec::Plane)| {
                    stored[plane.bytes_of(0..plane.covering(first..192).start)..].to_vec()
                };
                let cut: Vec<Vec<u8>> = stored.iter().zip(&layout).map(cut).collect();
                let planes: Vec<&[u8]> = cut.iter().map(Vec::as_slice).collect();
                let view = View::new(trellis, Part { matrix, first }, &planes, rows as usize);
                let mut to = vec![0.0; rows as usize * 32];
                let all = 0..rows as usize;
                let decode = Decode { view: &view, rows: all, columns: 0..32, to: &mut to, stride: 32 };
                dispatch(Isa::best(), decode);
                for (i, found) in to.iter().enumerate() {
                    let expected = defined(trellis, matrix, &stored, first as usize + i / 32, i % 32);
                    assert_eq!(found.to_bits(), expected.to_bits(), "{trellis} from {first}: {i}");
                }
            }
        }
    }
}
