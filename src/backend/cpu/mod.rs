//! The CPU: one source for every instruction set, the same bits on each.

mod affine;
mod attention;
mod combine;
mod delta_net;
mod fast;
mod float;
mod int8;
mod linear;
mod mxfp;
mod pointwise;
mod quantized;
mod rotary;
mod rows;
mod sums;
mod threads;
mod trellis;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

pub use attention::{Heads, PAGE, Page};
pub use delta_net::{CHUNK, DeltaInput, state_width};
pub use rotary::Rotation;
pub use threads::Threads;

use super::{Columns, LinearOp, Packed, Precision};
use crate::isa::Isa;
use crate::numeric::lanes::dispatch;

use quantized::{Order, Quantize, Quantized, TileMut};
use sums::{Fold, Folded};

/// Where and how to compute.
#[derive(Debug)]
pub struct Cpu {
    /// Kernels to use.
    pub isa: Isa,
    /// Who works.
    pub threads: Threads,
    /// The path to take where a codec has both.
    pub precision: Precision,
}

impl Cpu {
    /// A CPU with a team of its own.
    pub fn new(isa: Isa, threads: usize, precision: Precision) -> Arc<Self> {
        Arc::new(Self { isa, threads: Threads::new(threads), precision })
    }

    /// A linear layer over the weight's bytes, which are neither copied nor decoded as a whole.
    ///
    /// `exact` asks for the exact path whatever [`Cpu::precision`] says. A codec without a fast path (mxfp8, float
    /// storage) has the exact one; [`LinearOp::precision`] tells.
    pub fn prepare(self: &Arc<Self>, weight: &Packed, exact: bool) -> Box<dyn LinearOp> {
        if !exact
            && self.precision == Precision::Fast
            && let Some(fast) = fast::Fast::new(weight, self)
        {
            return Box::new(fast);
        }
        Box::new(linear::Exact::new(weight.clone(), self.clone()))
    }

    /// Rows that one thread takes at a time: enough to be worth a turn, and some turns for each thread.
    fn rows_of_a_part(&self, op: &dyn LinearOp, t_count: usize) -> usize {
        /// Rows that the widest kernel takes at once.
        const TOGETHER: usize = 32;
        /// Bytes of weights in a part: about a microsecond of reading.
        const PART: u64 = 64 << 10;
        /// Rows over which gathering several rows of the input costs little.
        const GATHERED: usize = 512;
        let (n, turns) = (op.out_features(), 4 * self.threads.count());
        // Whole tiles, unless threads would be idle.
        let mut together = op.rows_together().next_multiple_of(TOGETHER);
        while together.is_multiple_of(2 * TOGETHER) && turns * together > n {
            together /= 2;
        }
        let share = n.div_ceil(turns).next_multiple_of(together);
        let row = (op.bytes() / n as u64).max(1);
        let few = (PART / row).max(1) as usize;
        few.max(GATHERED.min(8 * t_count)).next_multiple_of(together).min(share)
    }

    /// Several layers over one input; each `out` is [T, out_features].
    ///
    /// # Panics
    /// If an output's length is not that.
    pub fn linear(&self, input: &Input<'_>, work: &mut [(&dyn LinearOp, &mut [f32])]) {
        let mut parts = Vec::new();
        let columns: Vec<(&dyn LinearOp, Columns<'_>)> = work
            .iter_mut()
            .map(|(op, out)| {
                let n = op.out_features();
                assert_eq!(out.len(), n * input.rows(), "one output for each row of the input");
                op.ready(input);
                (*op, Columns::new(out, n))
            })
            .collect();
        for (i, (op, _)) in columns.iter().enumerate() {
            let n = op.out_features();
            let rows = self.rows_of_a_part(*op, input.rows());
            parts.extend((0..n.div_ceil(rows)).map(|p| (i, p * rows..n.min((p + 1) * rows))));
        }
        self.threads.run(parts.len(), &|p| {
            let (i, rows) = &parts[p];
            let (op, out) = &columns[*i];
            op.apply(input, rows.clone(), out);
        });
    }
}

/// Rows of activations [T, K] on their way into linear layers.
#[derive(Debug)]
pub struct Input<'a> {
    values: &'a [f32],
    in_features: usize,
    /// For each order of codes and group size that a layer has asked for.
    quantized: [[Cached; 4]; 2],
    /// For the scales of inputs that a layer has of its own.
    folded: Mutex<Vec<Arc<Folded>>>,
}

/// An input's rows in one form.
#[derive(Debug, Default)]
struct Cached(OnceLock<Quantized>);

impl Drop for Cached {
    fn drop(&mut self) {
        if let Some(quantized) = self.0.take() {
            quantized.spare();
        }
    }
}

impl<'a> Input<'a> {
    /// Whole rows of `in_features`.
    ///
    /// # Panics
    /// If `values` is not whole rows.
    pub fn new(values: &'a [f32], in_features: usize) -> Self {
        assert!(values.len().is_multiple_of(in_features), "{} values in rows of {in_features}", values.len());
        Self { values, in_features, quantized: Default::default(), folded: Mutex::default() }
    }

    /// T.
    pub fn rows(&self) -> usize {
        self.values.len() / self.in_features
    }

    /// K.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// The values.
    pub fn values(&self) -> &'a [f32] {
        self.values
    }

    /// The rows as 8-bit integers, computed when first asked for, by the team if there is one.
    ///
    /// Parts of a team's work may not ask the team.
    fn quantized(&self, order: Order, group: usize, isa: Isa, team: Option<&Threads>) -> &Quantized {
        let of_order = &self.quantized[usize::from(order == Order::Split)];
        let index = match group {
            16 => 0,
            32 => 1,
            64 => 2,
            128 => 3,
            _ => unreachable!("no codec has groups of {group}"),
        };
        of_order[index].0.get_or_init(|| {
            let tall = if self.rows() < fast::TURN { 1 } else { quantized::TALL };
            let mut quantized = Quantized::new(self.rows(), self.in_features, group, tall);
            let tiles = quantized.tiles_mut();
            let one = |(x, mut to): (&[f32], TileMut<'_>)| {
                dispatch(isa, Quantize { x, in_features: self.in_features, order, to: &mut to });
            };
            let work = self.values.chunks(tall * self.in_features).zip(tiles);
            match team {
                Some(team) if self.rows() > 1 => {
                    let work: Vec<_> = work.map(|part| Mutex::new(Some(part))).collect();
                    team.run(work.len(), &|i| {
                        let part = work[i].lock().unwrap_or_else(PoisonError::into_inner).take();
                        one(part.expect("a part is done once"));
                    });
                }
                _ => work.for_each(one),
            }
            quantized
        })
    }

    /// The rows times `scales`, one f16 for each input, as 8-bit integers; computed when first asked for.
    ///
    /// Parts of a team's work may not ask the team.
    fn folded(&self, scales: &[u8], isa: Isa, team: Option<&Threads>) -> Arc<Folded> {
        let held = || self.folded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(folded) = held().iter().find(|folded| folded.scales() == scales) {
            return folded.clone();
        }
        let mut folded = Folded::new(self.rows(), scales);
        let one = |(x, to)| dispatch(isa, Fold { x, scales, to });
        let work = self.values.chunks(self.in_features).zip(folded.rows_mut());
        match team {
            Some(team) if self.rows() > 1 => {
                let work: Vec<_> = work.map(|part| Mutex::new(Some(part))).collect();
                team.run(work.len(), &|i| {
                    let part = work[i].lock().unwrap_or_else(PoisonError::into_inner).take();
                    one(part.expect("a part is done once"));
                });
            }
            _ => work.for_each(one),
        }
        let folded = Arc::new(folded);
        held().push(folded.clone());
        folded
    }
}
