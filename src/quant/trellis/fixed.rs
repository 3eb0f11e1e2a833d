//! Costs in 16-bit fixed point: the normative search.
//!
//! ```text
//! c = round(C / unit · A)  x = round(x · A)             held to ±32767, ties to even; x · A rounded to f32 first
//! d = c − x                                             held to 16 signed bits
//! e = (d² + 2^14) >> 15
//! N' = min over h of min(N + e, 65535)                  the smallest h of equals
//! ```
//!
//! One unit is 2^15 / A² of the codebook's variance. A whole tile's least cost is a twentieth to a half of the range, so
//! costs are never brought back; a tile whose path costs 65000 or more is searched again in floating point.

use super::forward::{Aligned, Cut, Pass, Trace};
#[cfg(target_arch = "x86_64")]
use super::forward::{run_avx2, run_avx512, trace_avx2};
use super::walk::Costs;
#[cfg(target_arch = "aarch64")]
use super::words::Neon;
use super::words::{Plain, distance};
use crate::isa::Isa;

/// From here on a path's cost says nothing.
pub(super) const SATURATED: u16 = 65_000;

/// A, by k.
pub(super) const AMPLITUDE: [f32; 4] = [4200.0, 6500.0, 8800.0, 9300.0];

/// Values of states as the search sees them.
#[derive(Debug)]
pub(super) struct Table {
    /// k.
    pub(super) bits: u32,
    /// L.
    pub(super) states: u32,
    /// `[node, h]`: of state h · 2^(L−k) + node.
    pub(super) values: Vec<i16>,
    /// The same for vectors.
    arranged: Vec<Arranged>,
}

#[derive(Debug)]
struct Arranged {
    isa: Isa,
    cut: Cut,
    table: Aligned,
}

/// Words of a vector, and how many minima registers hold beside what they are made of; `None` for the definition.
fn lanes(isa: Isa) -> Option<(usize, usize)> {
    match isa {
        Isa::Scalar => None,
        Isa::Avx2 => Some((16, 8)),
        Isa::Avx512 => Some((32, 16)),
        Isa::Neon => Some((8, 16)),
    }
}

impl Table {
    /// `values` are of each state, times A and rounded.
    pub(super) fn new(bits: u32, states: u32, values: &[i16]) -> Self {
        let nodes = 1usize << (states - bits);
        let by_node = |i: usize| values[(i % (1 << bits)) * nodes + (i >> bits)];
        let values: Vec<i16> = (0..values.len()).map(by_node).collect();
        let arrange = |isa| {
            let (lanes, held) = lanes(isa)?;
            let cut = Cut::new(bits, states, lanes, held)?;
            let mut table = Aligned::default();
            table.resize(values.len());
            cut.arrange(&values, lanes, table.words_mut());
            Some(Arranged { isa, cut, table })
        };
        let arranged = Isa::available().into_iter().filter_map(arrange).collect();
        Self { bits, states, values, arranged }
    }

    fn nodes(&self) -> usize {
        1 << (self.states - self.bits)
    }
}

/// Room for costs.
#[derive(Debug, Default)]
pub(super) struct Room {
    costs: Aligned,
    /// Values of the tile, times A and rounded.
    x: Vec<i16>,
    /// The same in the order of a pass.
    turned: Vec<i16>,
}

/// A tile under search.
pub(super) struct Fixed<'a> {
    table: &'a Table,
    room: &'a mut Room,
    isa: Isa,
    /// Of the last pass: its steps, and the first whose costs are kept.
    steps: usize,
    keep: usize,
}

/// Where the costs before a step lie; those that need not be kept take turns in the first two rows.
fn row(keep: usize, step: usize) -> usize {
    if step < keep { step % 2 } else { 2 + step - keep }
}

impl<'a> Fixed<'a> {
    /// Rounds finite values, in units of the codebook's deviation.
    pub(super) fn new(table: &'a Table, room: &'a mut Room, x: &[f32], isa: Isa) -> Self {
        /// Added to a number of magnitude below 2^22, leaves its nearest integer in the low bits.
        const ALIGN: f32 = 12_582_912.0;
        let amplitude = AMPLITUDE[table.bits as usize - 1];
        let rounded = |x: &f32| {
            let held = (x * amplitude).clamp(-32767.0, 32767.0);
            (held + ALIGN).to_bits() as i16
        };
        room.x.clear();
        room.x.extend(x.iter().map(rounded));
        room.costs.resize((x.len() + 3) * table.nodes());
        Self { table, room, isa, steps: 0, keep: 0 }
    }

    /// The cost of `node` after the last step.
    #[cfg(test)]
    pub(super) fn cost(&self, node: u32) -> u16 {
        self.last()[node as usize]
    }

    fn before(&self, step: usize) -> &[u16] {
        let nodes = self.table.nodes();
        &self.room.costs.words()[row(self.keep, step) * nodes..][..nodes]
    }

    fn last(&self) -> &[u16] {
        self.before(self.steps)
    }
}

impl Costs for Fixed<'_> {
    fn forward(&mut self, position: usize, steps: usize, start: Option<u32>, keep: usize) {
        (self.steps, self.keep) = (steps, keep);
        let nodes = self.table.nodes();
        let Room { costs, x, turned } = &mut *self.room;
        turned.clear();
        let ahead = steps.min(x.len() - position);
        turned.extend_from_slice(&x[position..][..ahead]);
        turned.extend_from_slice(&x[..steps - ahead]);
        let costs = costs.words_mut();
        let first = &mut costs[row(keep, 0) * nodes..][..nodes];
        match start {
            Some(node) => {
                first.fill(u16::MAX);
                first[node as usize] = 0;
            }
            None => first.fill(0),
        }
        let rows = |step| row(keep, step);
        let Some(arranged) = self.table.arranged.iter().find(|arranged| arranged.isa == self.isa) else {
            return plain(self.table, turned, costs, &rows);
        };
        let pass = Pass { table: arranged.table.words(), x: turned, costs, rows: &rows, cut: arranged.cut };
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Encoder::search` has found the instruction set.
            Isa::Avx2 => unsafe { run_avx2(pass) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx512 => unsafe { run_avx512(pass) },
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => pass.run::<Neon>(),
            _ => pass.run::<Plain<8>>(),
        }
    }

    fn cheapest(&self) -> u32 {
        let last = self.last();
        let least = last.iter().copied().min().expect("a trellis has nodes");
        last.iter().position(|cost| *cost == least).expect("the least is one of them") as u32
    }

    fn is_saturated(&self, node: u32) -> bool {
        self.last()[node as usize] >= SATURATED
    }

    fn back(&self, first: usize, node: u32, states: &mut [u32]) -> u32 {
        let rows = |i| row(self.keep, first + i);
        let Table { bits, values, .. } = self.table;
        let (x, costs) = (&self.room.x[..states.len()], self.room.costs.words());
        let trace = Trace { values, x, costs, rows: &rows, bits: *bits, node };
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Encoder::search` has found the instruction set; AVX-512 comes with AVX2.
            Isa::Avx2 | Isa::Avx512 => unsafe { trace_avx2(trace, states) },
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => trace.run::<Neon>(states),
            _ => trace.run::<Plain<8>>(states),
        }
    }
}

/// The definition.
pub(super) fn plain(table: &Table, x: &[i16], costs: &mut [u16], rows: &dyn Fn(usize) -> usize) {
    let (bits, nodes) = (table.bits, table.nodes());
    let stride = nodes >> bits;
    for (i, x) in x.iter().enumerate() {
        let (from, to) = (rows(i) * nodes, rows(i + 1) * nodes);
        for (node, values) in table.values.chunks_exact(1 << bits).enumerate() {
            let before = costs[from + (node >> bits)..].iter().step_by(stride);
            let reached = before.zip(values).map(|(cost, value)| cost.saturating_add(distance(*value, *x)));
            costs[to + node] = reached.min().expect("at least two symbols");
        }
    }
}
