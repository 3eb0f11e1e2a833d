//! Another order of channels.

use std::sync::Arc;

use super::{Axis, Panel, Transform};
use crate::isa::Isa;
use crate::quant::Grain;

/// Channel i becomes what channel order[i] was, in every run of as many channels along the axis.
#[derive(Debug, Clone)]
pub struct Reorder {
    axis: Axis,
    order: Arc<[u32]>,
}

impl Reorder {
    /// # Panics
    /// If `order` is not a permutation of 0 .. len.
    pub fn new(axis: Axis, order: Arc<[u32]>) -> Self {
        let mut seen = vec![false; order.len()];
        for from in &*order {
            let seen = seen.get_mut(*from as usize).expect("an order names channels that are there");
            assert!(!std::mem::replace(seen, true), "an order names each channel once");
        }
        Self { axis, order }
    }

    /// Moves units of `unit` values: from[place] to place, or back.
    fn shuffle(&self, values: &mut [f32], unit: usize, back: bool, scratch: &mut Vec<f32>) {
        for run in values.chunks_exact_mut(unit * self.order.len()) {
            scratch.clear();
            scratch.extend_from_slice(run);
            for (to, from) in self.order.iter().enumerate() {
                let (to, from) = if back { (*from as usize, to) } else { (to, *from as usize) };
                run[to * unit..][..unit].copy_from_slice(&scratch[from * unit..][..unit]);
            }
        }
    }

    fn run(&self, panel: Panel<'_>, back: bool, scratch: &mut Vec<f32>) {
        let unit = match self.axis {
            Axis::Input => 1,
            Axis::Output => panel.row_elements,
        };
        self.shuffle(panel.values, unit, back, scratch);
    }
}

impl Transform for Reorder {
    fn id(&self) -> &'static str {
        "reorder"
    }

    fn grain(&self) -> Grain {
        match self.axis {
            Axis::Input => Grain::Rows,
            Axis::Output => Grain::Blocks(self.order.len() as u64),
        }
    }

    fn apply(&self, panel: Panel<'_>, _isa: Isa, scratch: &mut Vec<f32>) {
        self.run(panel, false, scratch);
    }

    fn invert(&self, panel: Panel<'_>, _isa: Isa, scratch: &mut Vec<f32>) {
        self.run(panel, true, scratch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reorders_columns_and_rows_of_every_run_and_back() {
        let original = [0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 20.0, 21.0, 22.0];
        for (axis, expected) in [
            (Axis::Input, [2.0, 0.0, 1.0, 12.0, 10.0, 11.0, 22.0, 20.0, 21.0]),
            (Axis::Output, [20.0, 21.0, 22.0, 0.0, 1.0, 2.0, 10.0, 11.0, 12.0]),
        ] {
            let (mut values, mut scratch) = (original, Vec::new());
            let reorder = Reorder::new(axis, Arc::from([2, 0, 1]));
            let mut panel = Panel { values: &mut values, row_elements: 3, first_row: 0 };
            reorder.apply(panel.again(), Isa::Scalar, &mut scratch);
            assert_eq!(panel.values, expected);
            reorder.invert(panel.again(), Isa::Scalar, &mut scratch);
            assert_eq!(panel.values, original);
        }
    }
}
