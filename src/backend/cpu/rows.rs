//! Rows of a weight, decoded sixteen weights at a time in registers, and the two ways to multiply by them.
//!
//! One row of x: weights go from registers straight into sums, and are never stored. Several rows of x: [`NEAR`]
//! rows of the weight are decoded one panel long into a scratch that the first-level cache holds, and all rows of
//! x pass over it in tiles. Trellis weights, which come in columns, take the second way through [`Panels`]. Both add in the order that [`super::dot`] defines.

use std::cell::RefCell;
use std::ops::Range;

use crate::backend::Columns;
use crate::numeric::dot::{NEAR, PANEL, panel};
use crate::numeric::lanes::{Kernel, LANES, Lanes};

/// Weights decoded in one step.
pub(super) const STEP: usize = 2 * LANES;

/// Rows of x that are gathered at a time: with one panel, half of a second-level cache of 1 MiB.
const FAR: usize = 256;

/// A weight [N, K] that can decode parts of its rows to exactly what [`crate::codec::Codec::decode`] gives.
///
/// An implementation is a few slices, made for one call; its constructor checks their lengths.
pub(super) trait Rows: Copy {
    /// What a group's weights share, widened.
    type Group<V: Lanes>: Copy;

    /// Weights that share a [`Rows::Group`]: a multiple of [`STEP`] that divides [`PANEL`].
    fn group_len(&self) -> usize;

    /// What group `g` of row `n` shares. Also a good place to ask memory for what comes next.
    ///
    /// # Safety
    /// The row and the group must be there.
    unsafe fn group<V: Lanes>(&self, n: usize, g: usize) -> Self::Group<V>;

    /// Weights `[k, k + STEP)` of row `n`, all in the given group; `k` is a multiple of [`STEP`].
    ///
    /// # Safety
    /// They must be there.
    unsafe fn step<V: Lanes>(&self, n: usize, k: usize, group: Self::Group<V>) -> [V; 2];

    /// The last weights of row `n` from `k` on, fewer than [`STEP`]; then zeros. `k` is a multiple of it.
    fn rest<V: Lanes>(&self, n: usize, k: usize) -> [V; 2];
}

/// A weight [N, K] that can decode a panel of some of its rows: what [`Several`] needs of it.
pub(super) trait Panels: Copy {
    /// Weights `columns` of each of at most [`NEAR`] rows, at most [`PANEL`] from a multiple of it on, to rows of
    /// `to` that are as long as a panel; and zeros to the end of the last line.
    ///
    /// The rows and columns must be there.
    fn panel<V: Lanes>(self, rows: Range<usize>, columns: Range<usize>, to: &mut [Line]);
}

impl<R: Rows> Panels for R {
    #[inline(always)]
    fn panel<V: Lanes>(self, rows: Range<usize>, columns: Range<usize>, to: &mut [Line]) {
        for (n, to) in rows.zip(to.chunks_exact_mut(LINES)) {
            decode::<V, R>(self, n, columns.start, columns.len(), to);
        }
    }
}

/// Lines of a panel.
pub(super) const LINES: usize = PANEL / LANES;

/// Rows of the weight that are multiplied at once: sums that do not wait for each other.
const AT_ONCE: usize = 4;

/// How far ahead of its use a row's byte is asked for: where the next rows have theirs, or not as far if that would
/// drive the first-level cache out.
pub(super) const fn ahead(row_bytes: usize) -> usize {
    const FAR: usize = 24 << 10;
    if AT_ONCE * row_bytes <= FAR { AT_ONCE * row_bytes } else { 4 << 10 }
}

/// out[n] = dot(x, w[n]) for `rows`
pub(super) struct One<'a, R> {
    pub weight: R,
    pub x: &'a [f32],
    pub rows: Range<usize>,
    /// One output for each of `rows`.
    pub out: &'a mut [f32],
}

impl<R: Rows> Kernel for One<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let mut n = self.rows.start;
        let (several, last) = self.out.as_chunks_mut::<AT_ONCE>();
        for out in several {
            rows_by_one::<V, R, AT_ONCE>(self.weight, self.x, n, out);
            n += AT_ONCE;
        }
        for out in last.as_chunks_mut::<1>().0 {
            rows_by_one::<V, R, 1>(self.weight, self.x, n, out);
            n += 1;
        }
    }
}

#[inline(always)]
fn rows_by_one<V: Lanes, R: Rows, const N: usize>(weight: R, x: &[f32], first: usize, out: &mut [f32; N]) {
    let (k, group_len) = (x.len(), weight.group_len());
    let whole = k / STEP * STEP;
    out.fill(0.0);
    let mut start = 0;
    while start < k {
        let end = whole.min(start + PANEL);
        let mut sums = [V::splat(0.0); N];
        let mut at = start;
        while at < end {
            // SAFETY: `first + n` is a row, by the caller of the kernel, and `at` is below K.
            let group = |n: usize| unsafe { weight.group::<V>(first + n, at / group_len) };
            // Not `from_fn`: a closure that is not inlined would be compiled for the baseline.
            let mut groups = [group(0); N];
            for (n, to) in groups.iter_mut().enumerate().skip(1) {
                *to = group(n);
            }
            let group_end = end.min(at + group_len);
            while at < group_end {
                // SAFETY: `at + STEP` is at most K.
                let x = |from: usize| V::load(unsafe { &*x.as_ptr().add(from).cast() });
                let (low, high) = (x(at), x(at + LANES));
                for (n, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: as above; a whole step is left.
                    let [a, b] = unsafe { weight.step(first + n, at, groups[n]) };
                    *sum = high.fma(b, low.fma(a, *sum));
                }
                at += STEP;
            }
        }
        if end == whole && at < start + PANEL && at < k {
            let rest = &x[at..];
            let (low, high) = rest.split_at(rest.len().min(LANES));
            for (n, sum) in sums.iter_mut().enumerate() {
                let [a, b] = weight.rest::<V>(first + n, at);
                *sum = V::load_part(low).fma(a, *sum);
                if !high.is_empty() {
                    *sum = V::load_part(high).fma(b, *sum);
                }
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = if start == 0 { sum.sum() } else { *out + sum.sum() };
        }
        start += PANEL;
    }
}

/// out[t, n] = dot(x[t], w[n]) for all t, and n in `rows`
pub(super) struct Several<'a, R> {
    pub weight: R,
    /// [T, K]
    pub x: &'a [f32],
    pub in_features: usize,
    pub rows: Range<usize>,
    pub out: &'a Columns<'a>,
    pub room: &'a mut Room,
}

/// Space for [`NEAR`] rows of w and up to [`FAR`] rows of x, one panel long; grows as needed.
#[derive(Debug, Default)]
pub(super) struct Room(Vec<Line>);

thread_local! {
    static ROOM: RefCell<Room> = const { RefCell::new(Room(Vec::new())) };
}

impl Room {
    /// Lends this thread's.
    pub fn lend(to: impl FnOnce(&mut Room)) {
        let mut room = ROOM.take();
        to(&mut room);
        ROOM.set(room);
    }
}

/// A cache line of values.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(super) struct Line(pub [f32; LANES]);

impl<R: Panels> Kernel for Several<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self { weight, x, in_features: k, rows, out, room: Room(room) } = self;
        let t_count = x.len() / k;
        assert!(out.rows() == t_count && rows.end <= out.width(), "room for every row's outputs");
        let need = (NEAR + FAR.min(t_count)) * LINES;
        if room.len() < need {
            room.resize(need, Line([0.0; LANES]));
        }
        let (near, far) = room.split_at_mut(NEAR * LINES);
        for t in (0..t_count).step_by(FAR) {
            let tall = FAR.min(t_count - t);
            for start in (0..k).step_by(PANEL) {
                let len = PANEL.min(k - start);
                for (t, to) in (t..t + tall).zip(far.chunks_exact_mut(LINES)) {
                    gather(&x[t * k + start..][..len], to);
                }
                for n in rows.clone().step_by(NEAR) {
                    let wide = NEAR.min(rows.end - n);
                    weight.panel::<V>(n..n + wide, start..start + len, near);
                    V::call(Tiles {
                        x: far,
                        t_count: tall,
                        w: near,
                        n_count: wide,
                        len: len.next_multiple_of(LANES),
                        out: out.column(n).wrapping_add(t * out.width()),
                        stride: out.width(),
                        add: start > 0,
                    });
                }
            }
        }
    }
}

/// Copies a row of a panel, and zeros to the end of the last line.
#[inline(always)]
fn gather(from: &[f32], to: &mut [Line]) {
    let (lines, rest) = from.as_chunks::<LANES>();
    for (from, to) in lines.iter().zip(to.iter_mut()) {
        to.0 = *from;
    }
    if !rest.is_empty() {
        let to = &mut to[lines.len()].0;
        to.fill(0.0);
        to[..rest.len()].copy_from_slice(rest);
    }
}

/// Decodes weights `[start, start + len)` of row `n`, and zeros to the end of the last line.
#[inline(always)]
fn decode<V: Lanes, R: Rows>(weight: R, n: usize, start: usize, len: usize, to: &mut [Line]) {
    let group_len = weight.group_len();
    let end = start + len / STEP * STEP;
    let mut at = start;
    let (steps, _) = to.as_chunks_mut::<2>();
    let mut steps = steps.iter_mut();
    while at < end {
        // SAFETY: `n` is a row, by the caller of the kernel, and `at` is below K.
        let group = unsafe { weight.group::<V>(n, at / group_len) };
        let group_end = end.min(at + group_len);
        for [low, high] in steps.by_ref().take((group_end - at) / STEP) {
            // SAFETY: as above; a whole step is left.
            let [a, b] = unsafe { weight.step(n, at, group) };
            a.store(&mut low.0);
            b.store(&mut high.0);
            at += STEP;
        }
    }
    if at < start + len {
        let [a, b] = weight.rest::<V>(n, at);
        let [low, high] = steps.next().expect("a panel is whole steps, and this one is not full");
        a.store(&mut low.0);
        b.store(&mut high.0);
    }
}

/// [`panel`] over whole lines, compiled once for all codecs.
struct Tiles<'a> {
    x: &'a [Line],
    t_count: usize,
    w: &'a [Line],
    n_count: usize,
    len: usize,
    out: *mut f32,
    stride: usize,
    add: bool,
}

impl Kernel for Tiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let (x, w) = (self.x.as_ptr().cast(), self.w.as_ptr().cast());
        assert!(self.t_count * PANEL <= self.x.len() * LANES && self.n_count * PANEL <= self.w.len() * LANES);
        // SAFETY: the rows were just asserted; `Several` has asserted that the columns are there, and rows of a
        // weight, and so columns of the output, are given to one call each.
        unsafe {
            panel::<V>(
                x,
                PANEL,
                self.t_count,
                w,
                PANEL,
                self.n_count,
                self.len,
                self.out,
                self.stride,
                self.add,
            );
        }
    }
}
