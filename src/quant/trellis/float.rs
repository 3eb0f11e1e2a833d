//! Costs in f32, for tiles that the fixed-point search cannot tell apart.
//!
//! `N' = min over h of N + (C − x)²`, each operation rounded once to f32, none fused; the smallest h of equals. x is held to
//! ±32 deviations, beyond which sums would no longer see the difference between values.

use super::walk::Costs;

/// No codebook has values near it.
const FARTHEST: f32 = 32.0;

/// Values of states, in deviations of the codebook.
#[derive(Debug)]
pub(super) struct Table {
    /// k.
    pub(super) bits: u32,
    /// L.
    pub(super) states: u32,
    /// Of each state.
    pub(super) values: Vec<f32>,
}

/// A tile under search.
pub(super) struct Float<'a> {
    table: &'a Table,
    x: Vec<f32>,
    /// Costs before each step, and after the last.
    costs: Vec<f32>,
    steps: usize,
}

impl<'a> Float<'a> {
    /// Of finite values, in deviations of the codebook.
    pub(super) fn new(table: &'a Table, x: &[f32]) -> Self {
        let x = x.iter().map(|x| x.clamp(-FARTHEST, FARTHEST)).collect();
        Self { table, x, costs: Vec::new(), steps: 0 }
    }

    fn nodes(&self) -> usize {
        1 << (self.table.states - self.table.bits)
    }

    fn before(&self, step: usize) -> &[f32] {
        &self.costs[step * self.nodes()..][..self.nodes()]
    }

    fn last(&self) -> &[f32] {
        self.before(self.steps)
    }

    /// The cost of `node` after the last step.
    #[cfg(test)]
    pub(super) fn cost(&self, node: u32) -> f32 {
        self.last()[node as usize]
    }

    /// The states that reach `node`, the smallest first, with their costs.
    #[inline(always)]
    fn reached(&self, before: &[f32], node: usize, x: f32) -> impl Iterator<Item = (f32, u32)> {
        let (bits, nodes) = (self.table.bits, before.len());
        (0..1usize << bits).map(move |h| {
            let state = h * nodes + node;
            let distance = self.table.values[state] - x;
            (before[state >> bits] + distance * distance, state as u32)
        })
    }

    fn least(reached: impl Iterator<Item = (f32, u32)>) -> (f32, u32) {
        reached
            .reduce(|least, other| if other.0 < least.0 { other } else { least })
            .expect("at least two symbols")
    }
}

impl Costs for Float<'_> {
    fn forward(&mut self, position: usize, steps: usize, start: Option<u32>, _keep: usize) {
        let nodes = self.nodes();
        self.steps = steps;
        let mut costs = std::mem::take(&mut self.costs);
        costs.resize((steps + 1) * nodes, 0.0);
        costs[..nodes].fill(if start.is_some() { f32::INFINITY } else { 0.0 });
        if let Some(node) = start {
            costs[node as usize] = 0.0;
        }
        for step in 0..steps {
            let (before, after) = costs[step * nodes..].split_at_mut(nodes);
            let x = self.x[(position + step) % self.x.len()];
            for (node, cost) in after[..nodes].iter_mut().enumerate() {
                *cost = Self::least(self.reached(before, node, x)).0;
            }
        }
        self.costs = costs;
    }

    fn cheapest(&self) -> u32 {
        let nodes = self.last().iter().zip(0..).map(|(cost, node)| (*cost, node));
        Self::least(nodes).1
    }

    fn is_saturated(&self, _node: u32) -> bool {
        false
    }

    fn back(&self, first: usize, mut node: u32, states: &mut [u32]) -> u32 {
        for (i, state) in states.iter_mut().enumerate().rev() {
            *state = Self::least(self.reached(self.before(first + i), node as usize, self.x[i])).1;
            node = *state >> self.table.bits;
        }
        node
    }
}
