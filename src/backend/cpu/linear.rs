//! The exact path: weights are decoded to f32, row by row, and multiplied as [`super::dot`] says.

use std::ops::Range;
use std::sync::Arc;

use super::{Cpu, Input, dot};
use crate::backend::{Columns, LinearOp, Packed, Precision};
use crate::numeric::lanes::{Kernel, Lanes, dispatch};

/// A weight in any codec.
#[derive(Debug)]
pub struct Exact {
    weight: Packed,
    cpu: Arc<Cpu>,
}

impl Exact {
    /// Takes the weight.
    pub fn new(weight: Packed, cpu: Arc<Cpu>) -> Self {
        Self { weight, cpu }
    }
}

impl LinearOp for Exact {
    fn out_features(&self) -> usize {
        self.weight.out_features
    }

    fn in_features(&self) -> usize {
        self.weight.in_features
    }

    fn precision(&self) -> Precision {
        Precision::Exact
    }

    fn bytes(&self) -> u64 {
        self.weight.bytes()
    }

    fn apply(&self, input: &Input<'_>, rows: Range<usize>, out: &Columns<'_>) {
        let k = self.weight.in_features;
        let mut decoded = vec![0.0; k];
        let mut column = vec![0.0; input.rows()];
        for n in rows {
            self.weight.decode(n..n + 1, &mut decoded);
            dispatch(self.cpu.isa, Row { x: input.values(), w: &decoded, out: &mut column });
            for (t, value) in column.iter().enumerate() {
                // SAFETY: rows of the weight, and so columns of the output, are given to one call each.
                unsafe { out.row(t, n..n + 1)[0] = *value };
            }
        }
    }
}

struct Row<'a> {
    x: &'a [f32],
    w: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let k = self.w.len();
        dot::products::<V>(self.x, k, self.out.len(), self.w, k, 1, k, self.out, 1);
    }
}
