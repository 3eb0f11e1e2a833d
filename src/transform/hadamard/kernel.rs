//! The kernel of the rotation.
//!
//! It works on lane groups, `[elements, strips]` of them: sixteen lanes that go through the same arithmetic.
//!
//! - Columns: a group is one element of sixteen adjacent columns, and a strip is those columns. A tile in the
//!   second cache holds 2^8 elements of some strips for the first butterflies; later stages work on the
//!   matrix in place, row by row, because memory is read fast only along its rows.
//! - Rows: a group is sixteen adjacent elements of a row, and a strip is the row. Butterflies at distances 1
//!   to 8 are those between lanes. The tile holds the whole row; the first stage reads it from the matrix,
//!   the last writes it.
//! - Rows whose Sylvester part is shorter than sixteen are transposed, sixteen at a time, and become columns.

use std::ops::Range;

use crate::numeric::lanes::{Kernel, LANES, Lanes};
use crate::numeric::prefetch_line;

/// Sixteen f32.
type Group = [f32; LANES];

/// log₂ of the elements in a tile of columns: with all strips half a megabyte, in a core's second cache.
const COLUMNS_TILE_LOG2: u32 = 8;

/// Strips of sixteen columns that go through all stages together, at most: 2 KiB of each row, so that a row's
/// page is looked up once for many cache lines.
const COLUMN_STRIPS: usize = 32;

/// How many elements ahead of the reader a column's values are asked for: those of the next butterflies.
const ROWS_AHEAD: usize = 16;

/// How many values ahead of the reader a row's values are asked for by the later stages.
const VALUES_AHEAD: usize = 8 * LANES;

/// Which of R and Rᵀ a row is multiplied by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// x ← x R, c ← Rᵀ c.
    Forward,
    /// x ← x Rᵀ, c ← R c.
    Inverse,
}

/// A core M of order m: out_i = Σ_j T\[i]\[j] x_j with T = Mᵀ on the way forward, T = M back.
#[derive(Debug, Clone)]
pub(super) struct Core {
    order: usize,
    /// M, row-major.
    entries: Vec<i8>,
    /// Signs for the way forward and back, all fours of outputs, unless they would fill more than a cache.
    ready: Option<[Vec<Signs>; 2]>,
}

/// T\[4 i]\[j], …, T\[4 i + 3]\[j].
type Signs = [f64; 4];

/// Two tables of 2 MiB.
const LARGEST_READY: usize = 512;

impl Core {
    /// From M, row-major.
    pub(super) fn new(order: usize, entries: Vec<i8>) -> Self {
        assert!(
            order.is_multiple_of(4) && entries.len() == order * order,
            "orders of cores are multiples of 4"
        );
        let mut core = Self { order, entries, ready: None };
        if order <= LARGEST_READY {
            core.ready = Some([Direction::Forward, Direction::Inverse].map(|direction| {
                let mut all = vec![[0.0; 4]; order / 4 * order];
                for (i, signs) in all.chunks_exact_mut(order).enumerate() {
                    core.four_outputs(direction, i, signs);
                }
                all
            }));
        }
        core
    }

    /// The signs of outputs 4 i to 4 i + 3, for every input.
    #[inline(always)]
    fn four_outputs(&self, direction: Direction, i: usize, signs: &mut [Signs]) {
        for (j, signs) in signs.iter_mut().enumerate() {
            for (r, sign) in signs.iter_mut().enumerate() {
                let (row, column) = match direction {
                    Direction::Forward => (j, 4 * i + r),
                    Direction::Inverse => (4 * i + r, j),
                };
                *sign = f64::from(self.entries[row * self.order + column]);
            }
        }
    }
}

/// What is done to the vectors.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    /// n times ±1.
    pub(super) factors: &'a [f32],
    /// b.
    pub(super) order: usize,
    pub(super) sylvester_log2: u32,
    /// Slowest index first.
    pub(super) cores: &'a [Core],
    /// 1 / √b.
    pub(super) scale: f64,
    pub(super) direction: Direction,
}

/// Every run of n values.
pub(super) struct RotateRows<'a> {
    pub(super) job: Job<'a>,
    pub(super) values: &'a mut [f32],
    pub(super) scratch: &'a mut Vec<f32>,
}

/// Every column of every n rows.
pub(super) struct RotateColumns<'a> {
    pub(super) job: Job<'a>,
    pub(super) values: &'a mut [f32],
    pub(super) row_elements: usize,
    pub(super) scratch: &'a mut Vec<f32>,
}

impl Kernel for RotateRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self { job, values, scratch } = self;
        if job.sylvester_log2 >= LANES.ilog2() {
            along_rows::<V>(&job, values, scratch);
        } else {
            across_rows::<V>(&job, values, scratch);
        }
    }
}

impl Kernel for RotateColumns<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self { job, values, row_elements, scratch } = self;
        columns::<V>(&job, values, row_elements, scratch);
    }
}

/// Rows whose sixteens of adjacent elements are lane groups.
#[inline(always)]
fn along_rows<V: Lanes>(job: &Job<'_>, values: &mut [f32], scratch: &mut Vec<f32>) {
    let (n, b) = (job.factors.len(), job.order);
    // A core's columns are taken in pairs; the one of a row without more is paired with the next row's.
    let strips = if job.sylvester_log2 == LANES.ilog2() { 2 } else { 1 };
    let mut panel = Panel::new(job);
    let [tile] = tiles(scratch, [b / LANES * strips]);
    for runs in values.chunks_mut(strips * n) {
        let strips = runs.len() / n;
        for (block, factors) in job.factors.chunks_exact(b).enumerate() {
            let factors = factors.as_chunks().0;
            let forward = job.direction == Direction::Forward;
            V::call(Block {
                job,
                shape: Shape { elements: b / LANES, strips, log2: job.sylvester_log2 - LANES.ilog2() },
                vectors: AlongRows { runs, stride: n, start: block * b, factors, forward },
                tile,
                panel: &mut panel,
            });
        }
    }
}

/// Rows that are transposed, sixteen at a time.
#[inline(always)]
fn across_rows<V: Lanes>(job: &Job<'_>, values: &mut [f32], scratch: &mut Vec<f32>) {
    let (n, b) = (job.factors.len(), job.order);
    let mut panel = Panel::new(job);
    let [tile, turned] = tiles(scratch, [1 << job.sylvester_log2, b]);
    for runs in values.chunks_mut(LANES * n) {
        for (block, factors) in job.factors.chunks_exact(b).enumerate() {
            turn::<V>(runs, n, block * b, turned);
            some_columns::<V>(job, (turned.as_flattened_mut(), LANES), 0..1, factors, tile, &mut panel);
            turn_back::<V>(turned, runs, n, block * b);
        }
    }
}

#[inline(always)]
fn columns<V: Lanes>(job: &Job<'_>, values: &mut [f32], row_elements: usize, scratch: &mut Vec<f32>) {
    let b = job.order;
    let (whole, rest) = (row_elements / LANES, row_elements % LANES);
    let in_tile = 1 << job.sylvester_log2.min(COLUMNS_TILE_LOG2);
    let widest = whole.clamp(1, COLUMN_STRIPS);
    let mut panel = Panel::new(job);
    let [tile, padded] = tiles(scratch, [in_tile * widest, if rest > 0 { b } else { 0 }]);
    for (block, values) in values.chunks_exact_mut(b * row_elements).enumerate() {
        let factors = &job.factors[block * b % job.factors.len()..][..b];
        let mut at = 0;
        while at < whole {
            let strips = (whole - at).min(widest);
            some_columns::<V>(job, (values, row_elements), at..at + strips, factors, tile, &mut panel);
            at += strips;
        }
        if rest > 0 {
            for (to, row) in padded.iter_mut().zip(values.chunks_exact(row_elements)) {
                to[..rest].copy_from_slice(&row[whole * LANES..]);
                to[rest..].fill(0.0);
            }
            some_columns::<V>(job, (padded.as_flattened_mut(), LANES), 0..1, factors, tile, &mut panel);
            for (from, row) in padded.iter().zip(values.chunks_exact_mut(row_elements)) {
                row[whole * LANES..].copy_from_slice(&from[..rest]);
            }
        }
    }
}

/// Strips of sixteen columns of b rows of so many elements.
#[inline(always)]
fn some_columns<V: Lanes>(
    job: &Job<'_>,
    (values, row_elements): (&mut [f32], usize),
    strips: Range<usize>,
    factors: &[f32],
    tile: &mut [Group],
    panel: &mut Panel,
) {
    let forward = job.direction == Direction::Forward;
    V::call(Block {
        job,
        shape: Shape { elements: job.order, strips: strips.len(), log2: job.sylvester_log2 },
        vectors: Columns { values, row_elements, column: strips.start * LANES, factors, forward },
        tile,
        panel,
    });
}

/// Where lane groups come from and go to, and the signs between.
trait Vectors {
    /// Whether the lanes of a group are elements of one vector, which stays in the first cache.
    ///
    /// If so, the tile holds all its elements; otherwise a run of Sylvester's part, and cores work in place.
    const ALONG: bool;

    /// R elements of a strip from `element` on, their signs applied on the way forward.
    fn load<V: Lanes, const R: usize>(&self, element: usize, strip: usize) -> [V; R];
    /// Writes an element of a strip, its sign applied on the way back.
    fn store<V: Lanes>(&mut self, element: usize, strip: usize, value: V);
    /// An element of a strip between stages.
    fn get<V: Lanes>(&self, element: usize, strip: usize) -> V;
    /// Writes an element of a strip between stages.
    fn put<V: Lanes>(&mut self, element: usize, strip: usize, value: V);
}

/// Strip s is the run that starts at value s · stride.
struct AlongRows<'a> {
    runs: &'a mut [f32],
    stride: usize,
    /// Of the block, in a run.
    start: usize,
    factors: &'a [Group],
    forward: bool,
}

impl Vectors for AlongRows<'_> {
    const ALONG: bool = true;

    #[inline(always)]
    fn load<V: Lanes, const R: usize>(&self, element: usize, strip: usize) -> [V; R] {
        let at = strip * self.stride + self.start + element * LANES;
        let from = self.runs[at..].as_chunks().0.first_chunk::<R>().expect("R lane groups");
        let factors = self.factors[element..].first_chunk::<R>().expect("R lane groups");
        let mut x = [V::splat_bits(0); R];
        for (x, from) in x.iter_mut().zip(from) {
            *x = V::load(from);
        }
        if self.forward {
            for (x, factors) in x.iter_mut().zip(factors) {
                *x = x.mul(V::load(factors));
            }
        }
        x
    }

    #[inline(always)]
    fn store<V: Lanes>(&mut self, element: usize, strip: usize, value: V) {
        let at = strip * self.stride + self.start + element * LANES;
        let value = if self.forward { value } else { value.mul(V::load(&self.factors[element])) };
        value.store(self.runs[at..].first_chunk_mut().expect("sixteen values"));
        // The next runs are wanted next.
        prefetch_line(self.runs.as_ptr().wrapping_add(at + self.runs.len()).cast());
    }

    #[inline(always)]
    fn get<V: Lanes>(&self, element: usize, strip: usize) -> V {
        V::load(
            self.runs[strip * self.stride + self.start + element * LANES..]
                .first_chunk()
                .expect("sixteen values"),
        )
    }

    #[inline(always)]
    fn put<V: Lanes>(&mut self, element: usize, strip: usize, value: V) {
        let at = strip * self.stride + self.start + element * LANES;
        value.store(self.runs[at..].first_chunk_mut().expect("sixteen values"));
    }
}

/// Strip s is the sixteen columns that start at `column` + 16 s.
struct Columns<'a> {
    values: &'a mut [f32],
    row_elements: usize,
    column: usize,
    factors: &'a [f32],
    forward: bool,
}

impl Vectors for Columns<'_> {
    const ALONG: bool = false;

    #[inline(always)]
    fn load<V: Lanes, const R: usize>(&self, element: usize, strip: usize) -> [V; R] {
        let at = element * self.row_elements + self.column + strip * LANES;
        let factors = self.factors[element..].first_chunk::<R>().expect("R elements");
        let mut x = [V::splat_bits(0); R];
        for ((x, from), factor) in x.iter_mut().zip(self.values[at..].chunks(self.row_elements)).zip(factors)
        {
            let value = V::load(from.first_chunk().expect("sixteen values"));
            prefetch_line(from.as_ptr().wrapping_add(ROWS_AHEAD * self.row_elements).cast());
            *x = if self.forward { value.mul(V::splat(*factor)) } else { value };
        }
        x
    }

    #[inline(always)]
    fn store<V: Lanes>(&mut self, element: usize, strip: usize, value: V) {
        let value = if self.forward { value } else { value.mul(V::splat(self.factors[element])) };
        self.put(element, strip, value);
    }

    #[inline(always)]
    fn get<V: Lanes>(&self, element: usize, strip: usize) -> V {
        let at = element * self.row_elements + self.column + strip * LANES;
        prefetch_line(self.values.as_ptr().wrapping_add(at + VALUES_AHEAD).cast());
        V::load(self.values[at..].first_chunk().expect("sixteen values"))
    }

    #[inline(always)]
    fn put<V: Lanes>(&mut self, element: usize, strip: usize, value: V) {
        let at = element * self.row_elements + self.column + strip * LANES;
        value.store(self.values[at..].first_chunk_mut().expect("sixteen values"));
    }
}

/// Of a tile: `[elements, strips]`.
#[derive(Clone, Copy)]
struct Shape {
    elements: usize,
    strips: usize,
    /// Butterflies at distances 1, 2, …, 2^(log2 − 1) elements.
    log2: u32,
}

/// One block of every strip.
struct Block<'a, S> {
    job: &'a Job<'a>,
    shape: Shape,
    vectors: S,
    tile: &'a mut [Group],
    panel: &'a mut Panel,
}

impl<S: Vectors> Kernel for Block<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self { job, shape, mut vectors, tile, panel } = self;
        let vectors = &mut vectors;
        let Shape { elements, strips, log2 } = shape;
        // The registers hold a radix of sixteen, or of four.
        let wide = V::IN_REGISTERS >= 32;
        let most = if wide { 4 } else { 2 };
        let in_tile = if S::ALONG { log2 } else { log2.min(COLUMNS_TILE_LOG2) };
        for start in (0..elements).step_by(1 << in_tile) {
            let tile = if S::ALONG { &mut tile[start * strips..] } else { &mut *tile };
            let tile = &mut tile[..strips << in_tile];
            let mut done = in_tile.min(most);
            match done {
                0 => first_pass::<V, S, 1>(vectors, start, strips, tile),
                1 => first_pass::<V, S, 2>(vectors, start, strips, tile),
                2 => first_pass::<V, S, 4>(vectors, start, strips, tile),
                3 if wide => first_pass::<V, S, 8>(vectors, start, strips, tile),
                4 if wide => first_pass::<V, S, 16>(vectors, start, strips, tile),
                _ => unreachable!("the greatest radix"),
            }
            while done < in_tile {
                let next = (in_tile - done).min(most);
                let stride = strips << done;
                match next {
                    1 => pass::<V, 2>(tile, stride),
                    2 => pass::<V, 4>(tile, stride),
                    3 if wide => pass::<V, 8>(tile, stride),
                    4 if wide => pass::<V, 16>(tile, stride),
                    _ => unreachable!("the greatest radix"),
                }
                done += next;
            }
            let last = job.cores.is_empty() && in_tile == log2;
            if last || !S::ALONG {
                for (element, groups) in tile.chunks_exact(strips).enumerate() {
                    for (strip, group) in groups.iter().enumerate() {
                        let value = V::load(group);
                        if last {
                            vectors.store(
                                start + element,
                                strip,
                                V::narrow(V::wide_mul(value.widen(), job.scale)),
                            );
                        } else {
                            vectors.put(start + element, strip, value);
                        }
                    }
                }
            }
        }
        let mut done = in_tile;
        while done < log2 && !S::ALONG {
            let next = (log2 - done).min(most);
            let scale = (job.cores.is_empty() && done + next == log2).then_some(job.scale);
            match next {
                1 => pass_in_place::<V, S, 2>(vectors, shape, 1 << done, scale),
                2 => pass_in_place::<V, S, 4>(vectors, shape, 1 << done, scale),
                3 if wide => pass_in_place::<V, S, 8>(vectors, shape, 1 << done, scale),
                4 if wide => pass_in_place::<V, S, 16>(vectors, shape, 1 << done, scale),
                _ => unreachable!("the greatest radix"),
            }
            done += next;
        }
        let mut inner = 1 << log2;
        for (i, core) in job.cores.iter().enumerate().rev() {
            let scale = (i == 0).then_some(job.scale);
            let stage = Stage {
                core,
                direction: job.direction,
                outer: elements / (inner * core.order),
                inner,
                strips,
                scale,
            };
            if wide {
                core_stage::<V, S, 4, 2>(stage, vectors, tile, panel);
            } else {
                core_stage::<V, S, 2, 1>(stage, vectors, tile, panel);
            }
            inner *= core.order;
        }
    }
}

/// Butterflies at distances below R, from the vectors to the tile; for rows, those between lanes before.
#[inline(always)]
fn first_pass<V: Lanes, S: Vectors, const R: usize>(
    vectors: &S,
    start: usize,
    strips: usize,
    tile: &mut [Group],
) {
    for (i, tile) in tile.chunks_exact_mut(R * strips).enumerate() {
        for strip in 0..strips {
            let mut x: [V; R] = vectors.load(start + i * R, strip);
            if S::ALONG {
                for x in &mut x {
                    *x = x.butterflies();
                }
            }
            butterflies(&mut x);
            for (r, x) in x.into_iter().enumerate() {
                x.store(&mut tile[r * strips + strip]);
            }
        }
    }
}

/// Butterflies at distances `stride`, 2 `stride`, …, R / 2 · `stride` groups, of the tile.
#[inline(always)]
fn pass<V: Lanes, const R: usize>(tile: &mut [Group], stride: usize) {
    for tile in tile.chunks_exact_mut(R * stride) {
        for at in 0..stride {
            let mut x = [V::splat_bits(0); R];
            for (r, x) in x.iter_mut().enumerate() {
                *x = V::load(&tile[r * stride + at]);
            }
            butterflies(&mut x);
            for (r, x) in x.into_iter().enumerate() {
                x.store(&mut tile[r * stride + at]);
            }
        }
    }
}

/// Butterflies at distances `stride`, 2 `stride`, …, R / 2 · `stride` elements, of the vectors themselves.
#[inline(always)]
fn pass_in_place<V: Lanes, S: Vectors, const R: usize>(
    vectors: &mut S,
    shape: Shape,
    stride: usize,
    scale: Option<f64>,
) {
    for start in (0..shape.elements).step_by(R * stride) {
        for at in start..start + stride {
            for strip in 0..shape.strips {
                let mut x = [V::splat_bits(0); R];
                for (r, x) in x.iter_mut().enumerate() {
                    *x = vectors.get(at + r * stride, strip);
                }
                butterflies(&mut x);
                for (r, x) in x.into_iter().enumerate() {
                    match scale {
                        None => vectors.put(at + r * stride, strip, x),
                        Some(scale) => {
                            let x = V::narrow(V::wide_mul(x.widen(), scale));
                            vectors.store(at + r * stride, strip, x);
                        }
                    }
                }
            }
        }
    }
}

/// Sylvester's matrix of order R, at most 16.
#[inline(always)]
fn butterflies<V: Lanes, const R: usize>(x: &mut [V; R]) {
    butterflies_at::<V, R, 1>(x);
    butterflies_at::<V, R, 2>(x);
    butterflies_at::<V, R, 4>(x);
    butterflies_at::<V, R, 8>(x);
}

#[inline(always)]
fn butterflies_at<V: Lanes, const R: usize, const DISTANCE: usize>(x: &mut [V; R]) {
    for i in 0..R {
        if i & DISTANCE == 0 && DISTANCE < R {
            let (a, b) = (x[i], x[i + DISTANCE]);
            (x[i], x[i + DISTANCE]) = (a.add(b), a.sub(b));
        }
    }
}

/// One core: out\[i] = Σ_j T\[i]\[j] x\[j], where i and j count runs of `inner` elements, `outer` times.
#[derive(Clone, Copy)]
struct Stage<'a> {
    core: &'a Core,
    direction: Direction,
    outer: usize,
    inner: usize,
    strips: usize,
    /// For the last stage.
    scale: Option<f64>,
}

/// C lane groups of each of the m inputs at a time, R outputs at a time.
#[inline(always)]
fn core_stage<V: Lanes, S: Vectors, const R: usize, const C: usize>(
    stage: Stage<'_>,
    vectors: &mut S,
    tile: &mut [Group],
    panel: &mut Panel,
) {
    let width = stage.inner * stage.strips;
    for outer in 0..stage.outer {
        let first = outer * stage.core.order * stage.inner;
        let mut at = 0;
        while at + C <= width {
            core_columns::<V, S, R, C>(stage, first, at, vectors, tile, panel);
            at += C;
        }
        while at < width {
            core_columns::<V, S, R, 1>(stage, first, at, vectors, tile, panel);
            at += 1;
        }
    }
}

/// The groups `at .. at + C` of each run of the core that starts at element `first`.
#[inline(always)]
fn core_columns<V: Lanes, S: Vectors, const R: usize, const C: usize>(
    stage: Stage<'_>,
    first: usize,
    at: usize,
    vectors: &mut S,
    tile: &mut [Group],
    panel: &mut Panel,
) {
    let Stage { core, direction, outer: _, inner, strips, scale } = stage;
    let (order, width) = (core.order, inner * strips);
    let mut places = [(0, 0); C];
    for (c, place) in places.iter_mut().enumerate() {
        *place = (first + (at + c) / strips, (at + c) % strips);
    }
    let inputs = &mut panel.inputs.as_chunks_mut::<C>().0[..order];
    if S::ALONG {
        for (inputs, run) in inputs.iter_mut().zip(tile[first * strips..].chunks_exact(width)) {
            for (to, from) in inputs.iter_mut().zip(&run[at..at + C]) {
                to.0 = V::wide_store(V::load(from).widen());
            }
        }
    } else {
        for (run, inputs) in inputs.iter_mut().enumerate() {
            for (to, (element, strip)) in inputs.iter_mut().zip(places) {
                to.0 = V::wide_store(vectors.get::<V>(element + run * inner, strip).widen());
            }
        }
    }
    for i in 0..order / 4 {
        let signs = match &core.ready {
            Some(ready) => &ready[direction as usize][i * order..][..order],
            None => {
                let signs = &mut panel.signs[..order];
                core.four_outputs(direction, i, signs);
                &*signs
            }
        };
        let mut from = 0;
        while from < 4 {
            let mut sums = [[V::wide_zero(); C]; R];
            for (signs, inputs) in signs.iter().zip(inputs.iter()) {
                let mut x = [V::wide_zero(); C];
                for (x, input) in x.iter_mut().zip(inputs) {
                    *x = V::wide_load(&input.0);
                }
                for r in 0..R {
                    for c in 0..C {
                        sums[r][c] = V::wide_add_signed(sums[r][c], signs[from + r], x[c]);
                    }
                }
            }
            for (r, sums) in sums.into_iter().enumerate() {
                let run = 4 * i + from + r;
                for (c, (sum, (element, strip))) in sums.into_iter().zip(places).enumerate() {
                    match scale {
                        None if S::ALONG => {
                            V::narrow(sum).store(&mut tile[first * strips + run * width + at + c]);
                        }
                        None => vectors.put(element + run * inner, strip, V::narrow(sum)),
                        Some(scale) => {
                            vectors.store(element + run * inner, strip, V::narrow(V::wide_mul(sum, scale)));
                        }
                    }
                }
            }
            from += R;
        }
    }
}

/// What a core's outputs are computed from.
struct Panel {
    /// Two lane groups of each input.
    inputs: Vec<Line>,
    /// Of four outputs, for a core that has none ready.
    signs: Vec<Signs>,
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([f64; LANES]);

impl Panel {
    fn new(job: &Job<'_>) -> Self {
        let orders = job.cores.iter().map(|core| core.order);
        let unready = job.cores.iter().filter(|core| core.ready.is_none()).map(|core| core.order);
        Self {
            inputs: vec![Line([0.0; LANES]); 2 * orders.max().unwrap_or(0)],
            signs: vec![[0.0; 4]; unready.max().unwrap_or(0)],
        }
    }
}

/// Parts of `scratch` of so many lane groups, each at the start of a cache line.
fn tiles<const N: usize>(scratch: &mut Vec<f32>, groups: [usize; N]) -> [&mut [Group]; N] {
    let needed = (groups.iter().sum::<usize>() + 1) * LANES;
    if scratch.len() < needed {
        scratch.resize(needed, 0.0);
    }
    // A group that straddles two cache lines is read as two. Where no offset is known, it is only slower.
    let offset = scratch.as_ptr().align_offset(64).min(LANES);
    let mut rest = scratch[offset..].as_chunks_mut().0;
    groups.map(|count| {
        let (tile, after) = std::mem::take(&mut rest).split_at_mut(count);
        rest = after;
        tile
    })
}

/// `turned[e][r]` = element `start + e` of run r; 0 where there is no run.
#[inline(always)]
fn turn<V: Lanes>(runs: &[f32], stride: usize, start: usize, turned: &mut [Group]) {
    let (whole, rest) = turned.as_chunks_mut::<LANES>();
    let first_of_rest = start + whole.len() * LANES;
    for (i, turned) in whole.iter_mut().enumerate() {
        let mut all = [V::splat_bits(0); LANES];
        for (to, run) in all.iter_mut().zip(runs.chunks_exact(stride)) {
            *to = V::load(run[start + i * LANES..].first_chunk().expect("sixteen values"));
        }
        for (to, from) in turned.iter_mut().zip(V::transpose(all)) {
            from.store(to);
        }
    }
    for (i, turned) in rest.iter_mut().enumerate() {
        *turned = [0.0; LANES];
        for (to, run) in turned.iter_mut().zip(runs.chunks_exact(stride)) {
            *to = run[first_of_rest + i];
        }
    }
}

/// Undoes [`turn`].
#[inline(always)]
fn turn_back<V: Lanes>(turned: &[Group], runs: &mut [f32], stride: usize, start: usize) {
    let (whole, rest) = turned.as_chunks::<LANES>();
    let first_of_rest = start + whole.len() * LANES;
    for (i, turned) in whole.iter().enumerate() {
        let mut all = [V::splat_bits(0); LANES];
        for (to, from) in all.iter_mut().zip(turned) {
            *to = V::load(from);
        }
        for (from, run) in V::transpose(all).into_iter().zip(runs.chunks_exact_mut(stride)) {
            from.store(run[start + i * LANES..].first_chunk_mut().expect("sixteen values"));
        }
    }
    for (i, turned) in rest.iter().enumerate() {
        for (from, run) in turned.iter().zip(runs.chunks_exact_mut(stride)) {
            run[first_of_rest + i] = *from;
        }
    }
}
