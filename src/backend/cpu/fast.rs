//! Linear layers by the fast path, which [`super::int8`] defines, and for trellis weights [`super::sums`].

use std::ops::Range;
use std::sync::Arc;

use super::int8::{AffineCodes, Codes, E2m1Codes, Room, RowByRow, Turned};
use super::sums::ByStrips;
use super::{Cpu, Input};
use crate::backend::{Columns, LinearOp, Packed, Precision, Stored};
use crate::codec::CodecSpec;
use crate::codec::affine::with_bits;
use crate::codec::mxfp::Mxfp;
use crate::codec::trellis::decode::View;
use crate::codec::trellis::{Along, Trellis};
use crate::numeric::lanes::dispatch;

/// Rows of x from which on turning the weight pays.
pub(super) const TURN: usize = 8;

/// A weight whose codes or values are small integers.
#[derive(Debug)]
pub struct Fast {
    weight: Packed,
    cpu: Arc<Cpu>,
}

impl Fast {
    /// Takes the weight, or says that its codec has no fast path.
    pub fn new(weight: &Packed, cpu: &Arc<Cpu>) -> Option<Self> {
        match weight.codec {
            CodecSpec::Affine { .. } | CodecSpec::Mxfp4 | CodecSpec::Nvfp4 => {
                Some(Self { weight: weight.clone(), cpu: cpu.clone() })
            }
            // Values of other codes are not integers. Tiles along inputs have the exact path alone.
            CodecSpec::Trellis(trellis) => (trellis.code().sums_bytes() && trellis.along() == Along::Outputs)
                .then(|| Self { weight: weight.clone(), cpu: cpu.clone() }),
            CodecSpec::Mxfp8 | CodecSpec::Keep | CodecSpec::Bf16 | CodecSpec::F16 | CodecSpec::F32 => None,
        }
    }

    fn multiply<C: Codes>(&self, weight: C, input: &Input<'_>, rows: Range<usize>, out: &Columns<'_>) {
        let Packed { out_features, in_features, .. } = self.weight;
        assert!(rows.end <= out_features, "rows of the weight");
        assert_eq!(input.in_features(), in_features, "columns of the weight");
        assert_eq!(out.rows(), input.rows(), "one row of outputs for each of the input");
        let x = input.quantized(C::ORDER, weight.group(), self.cpu.isa, None);
        let t_count = input.rows();
        if t_count < TURN {
            let isa = self.cpu.isa;
            match weight.group() {
                16 => dispatch(isa, RowByRow::<C, 16> { weight, x, in_features, t_count, rows, out }),
                32 => dispatch(isa, RowByRow::<C, 32> { weight, x, in_features, t_count, rows, out }),
                64 => dispatch(isa, RowByRow::<C, 64> { weight, x, in_features, t_count, rows, out }),
                128 => dispatch(isa, RowByRow::<C, 128> { weight, x, in_features, t_count, rows, out }),
                group => unreachable!("no codec has groups of {group}"),
            }
        } else {
            Room::lend(|room| {
                dispatch(self.cpu.isa, Turned { weight, x, in_features, t_count, rows, out, room });
            });
        }
    }

    fn multiply_trellis(&self, trellis: Trellis, input: &Input<'_>, rows: Range<usize>, out: &Columns<'_>) {
        let Packed { part, out_features, in_features, ref planes, .. } = self.weight;
        assert!(rows.end <= out_features, "rows of the weight");
        assert_eq!(input.in_features(), in_features, "columns of the weight");
        assert_eq!(out.rows(), input.rows(), "one row of outputs for each of the input");
        let planes: Vec<&[u8]> = planes.iter().map(Stored::bytes).collect();
        let view = View::new(trellis, part, &planes, out_features);
        let mut first = rows.start;
        while first < rows.end {
            let end = view.matrix_end(first).min(rows.end);
            let scales = view.inputs(first).expect("a scale for each input");
            let x = input.folded(scales, self.cpu.isa, None);
            dispatch(self.cpu.isa, ByStrips { view: &view, x: &x, rows: first..end, out });
            first = end;
        }
    }

    fn run(&self, input: &Input<'_>, rows: Range<usize>, out: &Columns<'_>) {
        let Packed { codec, float, out_features: n, in_features: k, ref planes, .. } = self.weight;
        let plane = |p: usize| Stored::bytes(&planes[p]);
        match codec {
            CodecSpec::Affine { bits, group } => {
                let (planes, group) = ([plane(0), plane(1), plane(2)], group.get() as usize);
                with_bits!(bits.get(), BITS => {
                    self.multiply(AffineCodes::<BITS>::new(planes, float, n, k, group), input, rows, out);
                });
            }
            CodecSpec::Mxfp4 | CodecSpec::Nvfp4 => {
                let codec = if codec == CodecSpec::Mxfp4 { Mxfp::Mxfp4 } else { Mxfp::Nvfp4 };
                self.multiply(E2m1Codes::new(codec, [plane(0), plane(1)], n, k), input, rows, out);
            }
            CodecSpec::Trellis(trellis) => self.multiply_trellis(trellis, input, rows, out),
            _ => unreachable!("refused by `new`"),
        }
    }
}

impl LinearOp for Fast {
    fn out_features(&self) -> usize {
        self.weight.out_features
    }

    fn in_features(&self) -> usize {
        self.weight.in_features
    }

    fn precision(&self) -> Precision {
        Precision::Fast
    }

    fn bytes(&self) -> u64 {
        self.weight.bytes()
    }

    fn rows_together(&self) -> usize {
        self.weight.rows_together()
    }

    fn ready(&self, input: &Input<'_>) {
        if let CodecSpec::Trellis(trellis) = self.weight.codec {
            let planes: Vec<&[u8]> = self.weight.planes.iter().map(Stored::bytes).collect();
            let view = View::new(trellis, self.weight.part, &planes, self.weight.out_features);
            let mut first = 0;
            while first < self.weight.out_features {
                let scales = view.inputs(first).expect("a scale for each input");
                input.folded(scales, self.cpu.isa, Some(&self.cpu.threads));
                first = view.matrix_end(first);
            }
            return;
        }
        let CodecSpec::Affine { bits, .. } = self.weight.codec else {
            let group = self.weight.codec.group().expect("refused by `new`");
            input.quantized(E2m1Codes::ORDER, group as usize, self.cpu.isa, Some(&self.cpu.threads));
            return;
        };
        let group = self.weight.codec.group().expect("affine codecs have groups") as usize;
        with_bits!(bits.get(), BITS => {
            input.quantized(AffineCodes::<BITS>::ORDER, group, self.cpu.isa, Some(&self.cpu.threads));
        });
    }

    fn apply(&self, input: &Input<'_>, rows: Range<usize>, out: &Columns<'_>) {
        self.run(input, rows, out);
    }
}
