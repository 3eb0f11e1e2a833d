//! The exact path: f32 activations on weights decoded to f32, multiplied and added as [`super::dot`] says.

use std::ops::Range;
use std::sync::Arc;

use super::affine::AffineRows;
use super::float::{Bf16, F16, F32, FloatRows};
use super::mxfp::MxfpRows;
use super::rows::{One, Panels, Room, Rows, Several};
use super::trellis::OneByStrips;
use super::{Cpu, Input};
use crate::backend::{Columns, LinearOp, Packed, Precision, Stored};
use crate::codec::CodecSpec;
use crate::codec::affine::with_bits;
use crate::codec::float::Storage;
use crate::codec::mxfp::Mxfp;
use crate::codec::trellis::decode::View;
use crate::codec::trellis::{Along, Trellis};
use crate::numeric::lanes::dispatch;
use crate::tensor::Float;

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

    fn multiply<R: Rows>(&self, weight: R, input: &Input<'_>, rows: Range<usize>, out: &Columns<'_>) {
        assert!(rows.end <= self.weight.out_features, "rows of the weight");
        assert_eq!(input.in_features(), self.weight.in_features, "columns of the weight");
        if rows.is_empty() {
            return;
        }
        let x = input.values();
        if input.rows() == 1 {
            // SAFETY: rows of the weight, and so columns of the output, are given to one call each.
            let out = unsafe { out.row(0, rows.clone()) };
            dispatch(self.cpu.isa, One { weight, x, rows, out });
        } else {
            let in_features = self.weight.in_features;
            self.several(weight, x, in_features, rows, out);
        }
    }

    fn several<P: Panels>(
        &self,
        weight: P,
        x: &[f32],
        in_features: usize,
        rows: Range<usize>,
        out: &Columns<'_>,
    ) {
        Room::lend(|room| {
            dispatch(self.cpu.isa, Several { weight, x, in_features, rows, out, room });
        });
    }

    fn multiply_trellis(&self, trellis: Trellis, input: &Input<'_>, rows: Range<usize>, out: &Columns<'_>) {
        let Packed { part, out_features, in_features, ref planes, .. } = self.weight;
        assert!(rows.end <= out_features, "rows of the weight");
        assert_eq!(input.in_features(), in_features, "columns of the weight");
        if rows.is_empty() {
            return;
        }
        let planes: Vec<&[u8]> = planes.iter().map(Stored::bytes).collect();
        let view = View::new(trellis, part, &planes, out_features);
        let x = input.values();
        if input.rows() == 1 && trellis.along() == Along::Outputs {
            // SAFETY: rows of the weight, and so columns of the output, are given to one call each.
            let out = unsafe { out.row(0, rows.clone()) };
            dispatch(self.cpu.isa, OneByStrips { view: &view, x, rows, out });
        } else {
            self.several(&view, x, in_features, rows, out);
        }
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

    fn rows_together(&self) -> usize {
        self.weight.rows_together()
    }

    fn apply(&self, input: &Input<'_>, rows: Range<usize>, out: &Columns<'_>) {
        let Packed { codec, float, out_features: n, in_features: k, ref planes, .. } = self.weight;
        let plane = |p: usize| Stored::bytes(&planes[p]);
        let mxfp = || [plane(0), plane(1)];
        match codec {
            CodecSpec::Affine { bits, group } => {
                let (planes, group) = ([plane(0), plane(1), plane(2)], group.get() as usize);
                with_bits!(bits.get(), BITS => {
                    self.multiply(AffineRows::<BITS>::new(planes, float, n, k, group), input, rows, out);
                });
            }
            CodecSpec::Trellis(trellis) => self.multiply_trellis(trellis, input, rows, out),
            CodecSpec::Mxfp4 => {
                self.multiply(MxfpRows::<4>::new(Mxfp::Mxfp4, mxfp(), n, k), input, rows, out);
            }
            CodecSpec::Mxfp8 => {
                self.multiply(MxfpRows::<8>::new(Mxfp::Mxfp8, mxfp(), n, k), input, rows, out);
            }
            CodecSpec::Nvfp4 => {
                self.multiply(MxfpRows::<4>::new(Mxfp::Nvfp4, mxfp(), n, k), input, rows, out);
            }
            CodecSpec::Keep | CodecSpec::Bf16 | CodecSpec::F16 | CodecSpec::F32 => {
                let storage = match codec {
                    CodecSpec::Bf16 => Storage::Bf16,
                    CodecSpec::F16 => Storage::F16,
                    CodecSpec::F32 => Storage::F32,
                    _ => Storage::Keep,
                };
                let values = plane(0);
                match storage.float(float) {
                    Float::Bf16 => self.multiply(FloatRows::<Bf16>::new(values, n, k), input, rows, out),
                    Float::F16 => self.multiply(FloatRows::<F16>::new(values, n, k), input, rows, out),
                    Float::F32 => self.multiply(FloatRows::<F32>::new(values, n, k), input, rows, out),
                }
            }
        }
    }
}
