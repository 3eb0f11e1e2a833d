//! The forward pass in vectors.
//!
//! ```text
//! N'[u·B + b] = min over h < B of  N[h·U + u] + e(c[h·U·B + u·B + b])          B = 2^k, U = 2^(L−2k)
//! ```
//!
//! A lane is a u: the predecessors of a vector of new costs are then a plain load, which serves all B symbols, and the
//! B vectors of new costs are woven into order once they are minima. Values lie in a table in the order in which the
//! loops want them. If there are fewer predecessors u than lanes, a vector holds those of several symbols.

use super::words::Words;

/// Costs and values, at the start of a cache line.
#[derive(Debug, Clone, Default)]
pub(super) struct Aligned {
    lines: Vec<Line>,
    len: usize,
}

#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "read as words")] [u16; 32]);

impl Aligned {
    /// Makes room for `len` words; what they hold is unspecified.
    pub(super) fn resize(&mut self, len: usize) {
        self.lines.resize(len.div_ceil(32), Line([0; 32]));
        self.len = len;
    }

    pub(super) fn words(&self) -> &[u16] {
        // SAFETY: lines are arrays of words without gaps, and `len` words are inside them.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }

    pub(super) fn words_mut(&mut self) -> &mut [u16] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

/// How one step is cut for vectors of some length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    /// k.
    bits: u32,
    /// U.
    before: usize,
    /// Symbols of which a vector holds predecessors.
    repeat: usize,
    /// Vectors of new costs that are kept in registers.
    held: usize,
}

impl Cut {
    /// For vectors of `lanes` words of which `held` minima fit into registers; `None` if a step does not fill one.
    pub(super) fn new(bits: u32, states: u32, lanes: usize, held: usize) -> Option<Self> {
        let before = 1usize << (states - 2 * bits);
        let repeat = (lanes / before).max(1);
        let vectors = (1 << bits) / repeat;
        (vectors > 1).then_some(Self { bits, before, repeat, held: held.min(vectors) })
    }

    /// Each state's value in the order in which [`run`] reads them; `values` is `[U · B, h]`.
    pub(super) fn arrange(self, values: &[i16], lanes: usize, table: &mut [u16]) {
        let symbols = 1usize << self.bits;
        let wide = lanes / self.repeat;
        let mut to = table.iter_mut();
        for block in 0..self.before / wide {
            for part in 0..symbols / self.repeat / self.held {
                for h in 0..symbols {
                    for vector in part * self.held..(part + 1) * self.held {
                        for lane in 0..lanes {
                            let (u, b) = (block * wide + lane % wide, vector * self.repeat + lane / wide);
                            let value = values[(u * symbols + b) * symbols + h];
                            *to.next().expect("as many values as states") = value as u16;
                        }
                    }
                }
            }
        }
    }
}

/// One pass: `x[i]` leads from the costs at `rows[i]` of `costs` to those at `rows[i + 1]`.
pub(super) struct Pass<'a> {
    pub(super) table: &'a [u16],
    pub(super) x: &'a [i16],
    pub(super) costs: &'a mut [u16],
    pub(super) rows: &'a dyn Fn(usize) -> usize,
    pub(super) cut: Cut,
}

impl Pass<'_> {
    /// Runs every step.
    #[inline(always)]
    pub(super) fn run<V: Words>(self) {
        let Cut { bits, repeat, held, .. } = self.cut;
        match (bits, repeat, held) {
            (1, 1, 2) => self.steps::<V, 2, 2, 2, 1>(),
            (2, 1, 4) => self.steps::<V, 4, 4, 4, 1>(),
            (3, 1, 8) => self.steps::<V, 8, 8, 8, 1>(),
            (3, 2, 4) => self.steps::<V, 8, 4, 4, 2>(),
            (4, 1, 8) => self.steps::<V, 16, 16, 8, 1>(),
            (4, 1, 16) => self.steps::<V, 16, 16, 16, 1>(),
            (4, 2, 8) => self.steps::<V, 16, 8, 8, 2>(),
            (4, 4, 4) => self.steps::<V, 16, 4, 4, 4>(),
            (4, 8, 2) => self.steps::<V, 16, 2, 2, 8>(),
            _ => unreachable!("no trellis is cut into {:?}", self.cut),
        }
    }

    /// `B` symbols in `VECTORS` vectors, `HELD` at a time, each of `REPEAT` symbols.
    #[inline(always)]
    fn steps<V: Words, const B: usize, const VECTORS: usize, const HELD: usize, const REPEAT: usize>(self) {
        let Cut { before, .. } = self.cut;
        let nodes = before * B;
        assert_eq!(self.table.len(), nodes * B, "a value for each state");
        let mut high = true;
        for (i, x) in self.x.iter().enumerate() {
            let [from, to] = [i, i + 1].map(|i| (self.rows)(i) * nodes);
            assert!(from.max(to) + nodes <= self.costs.len() && from != to, "rows of costs");
            let costs = self.costs.as_mut_ptr();
            // SAFETY: both rows are inside the costs, and they are two.
            let (from, to) = unsafe { (costs.add(from).cast_const(), costs.add(to)) };
            let minus_x = V::splat(x.wrapping_neg() as u16);
            // SAFETY: the table holds a value for each of `before` · B · B states, each row `before` · B costs.
            high = unsafe {
                let table = self.table.as_ptr();
                if high {
                    step::<V, B, VECTORS, HELD, REPEAT, true>(table, minus_x, before, from, to)
                } else {
                    step::<V, B, VECTORS, HELD, REPEAT, false>(table, minus_x, before, from, to)
                }
            };
        }
    }
}

/// One step, from a row of costs to the next; whether a new cost is above 32767.
///
/// Distances are 32768 at most, so sums need holding to 16 bits only if `HOLD`: if an old cost is above 32767. Sums that
/// are held take twice as long on most x86 processors.
///
/// # Safety
/// `values` must hold `before` · B² words in the order of [`Cut::arrange`], each row of costs `before` · B.
#[inline(always)]
unsafe fn step<
    V: Words,
    const B: usize,
    const VECTORS: usize,
    const HELD: usize,
    const REPEAT: usize,
    const HOLD: bool,
>(
    mut values: *const u16,
    minus_x: V,
    before: usize,
    from: *const u16,
    to: *mut u16,
) -> bool {
    let wide = V::COUNT / REPEAT;
    let mut bits = V::splat(0);
    for block in 0..before / wide {
        let mut all = [minus_x; VECTORS];
        for part in 0..VECTORS / HELD {
            let mut least = [V::splat(u16::MAX); HELD];
            for h in 0..B {
                // SAFETY: `wide` predecessors of each h are in the row, and the table holds one vector for each of the
                // blocks, parts, h and vectors held: as many words as there are states.
                unsafe {
                    let before = V::load_repeated::<REPEAT>(from.add(h * before + block * wide));
                    for (i, least) in least.iter_mut().enumerate() {
                        let distance = V::distance(V::load(values.add(i * V::COUNT)), minus_x);
                        let cost = if HOLD { before.add_held(distance) } else { before.add(distance) };
                        *least = least.min(cost);
                    }
                    values = values.add(HELD * V::COUNT);
                }
            }
            for (least, all) in least.iter().zip(&mut all[part * HELD..]) {
                *all = *least;
                bits = bits.or(*least);
            }
        }
        // SAFETY: a block is `wide` · B new costs, and the row holds those of all blocks.
        unsafe { place::<V, B, VECTORS, REPEAT>(all, to.add(block * wide * B)) };
    }
    bits.any_high()
}

/// A path, backwards from a node: step i was from the costs at `rows[i]` of `costs`, at `x[i]`.
pub(super) struct Trace<'a> {
    /// `[node, h]`
    pub(super) values: &'a [i16],
    pub(super) x: &'a [i16],
    pub(super) costs: &'a [u16],
    pub(super) rows: &'a dyn Fn(usize) -> usize,
    /// k.
    pub(super) bits: u32,
    pub(super) node: u32,
}

impl Trace<'_> {
    /// Fills in the states, and gives the node before the first.
    #[inline(always)]
    pub(super) fn run<V: Words>(self, states: &mut [u32]) -> u32 {
        match self.bits {
            1 => self.steps::<V, 2>(states),
            2 => self.steps::<V, 4>(states),
            3 => self.steps::<V, 8>(states),
            4 => self.steps::<V, 16>(states),
            _ => unreachable!("1 to 4 bits"),
        }
    }

    #[inline(always)]
    fn steps<V: Words, const B: usize>(self, states: &mut [u32]) -> u32 {
        let nodes = self.values.len() / B;
        let before = nodes / B;
        let mut node = self.node as usize;
        for (i, (state, x)) in states.iter_mut().zip(self.x).enumerate().rev() {
            let costs = &self.costs[(self.rows)(i) * nodes..][..nodes];
            let values = &self.values[node * B..][..B];
            let cost = |h: usize| costs[h * before + node / B];
            let least = |from: usize| {
                // A symbol that does not exist costs more than any, or as much and comes after it.
                let costs = std::array::from_fn(|h| if h < B { cost(from + h) } else { u16::MAX });
                let values = std::array::from_fn(|h| if h < B { values[from + h] } else { 0 });
                V::least(costs, &values, *x)
            };
            let (mut cost, mut h) = least(0);
            if B == 16 {
                let (other, place) = least(8);
                // Of equals the first.
                (cost, h) = if other < cost { (other, 8 + place) } else { (cost, h) };
            }
            let _ = cost;
            *state = (h as usize * nodes + node) as u32;
            node = *state as usize / B;
        }
        node as u32
    }
}

/// Writes minima in the order of nodes.
///
/// # Safety
/// There must be room for `VECTORS · V::COUNT` words.
#[inline(always)]
unsafe fn place<V: Words, const B: usize, const VECTORS: usize, const REPEAT: usize>(
    all: [V; VECTORS],
    to: *mut u16,
) {
    let count = V::COUNT;
    if REPEAT <= 2 {
        let mut all = V::weave(all);
        if REPEAT == 2 {
            // The two symbols of a vector are still each in one half of the vectors.
            for i in 0..VECTORS / 2 {
                (all[i], all[i + VECTORS / 2]) = all[i].zip(all[i + VECTORS / 2]);
            }
        }
        for (i, vector) in all.into_iter().enumerate() {
            let at = if REPEAT == 2 { 2 * i % VECTORS + 2 * i / VECTORS } else { i };
            // SAFETY: the caller has room for all vectors.
            unsafe { vector.store(to.add(at * count)) };
        }
        return;
    }
    // Only L = 10 and 11 at k = 4: at most 128 nodes.
    let mut words = [0; 128];
    for (vector, words) in all.into_iter().zip(words.chunks_exact_mut(count)) {
        // SAFETY: a chunk is a vector's words.
        unsafe { vector.store(words.as_mut_ptr()) };
    }
    let wide = count / REPEAT;
    for u in 0..wide {
        for b in 0..B {
            // SAFETY: u · B + b is below `VECTORS · count`.
            unsafe { *to.add(u * B + b) = words[b / REPEAT * count + b % REPEAT * wide + u] };
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::words::{Avx2, Avx512};
    use super::{Pass, Trace};

    /// # Safety
    /// The processor must have AVX2.
    #[target_feature(enable = "avx2")]
    pub(in super::super) unsafe fn run_avx2(pass: Pass<'_>) {
        pass.run::<Avx2>();
    }

    /// # Safety
    /// The processor must have AVX-512 F and BW.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(in super::super) unsafe fn run_avx512(pass: Pass<'_>) {
        pass.run::<Avx512>();
    }

    /// # Safety
    /// The processor must have AVX2.
    #[target_feature(enable = "avx2")]
    pub(in super::super) unsafe fn trace_avx2(trace: Trace<'_>, states: &mut [u32]) -> u32 {
        trace.run::<Avx2>(states)
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{run_avx2, run_avx512, trace_avx2};
