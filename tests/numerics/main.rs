//! Encoders and decoders against MLX's own bytes, linear layers against plain loops, statistics against
//! scipy, and every instruction set against the definition.

mod encoders;
mod golden;
mod gptq;
mod hadamard;
mod ldlq;
mod linear;
mod refit;
mod statistics;

use tqc::codec::{CodecSpec, Matrix, Part, codec};
use tqc::isa::Isa;
use tqc::quant::{QuantError, Quantizer, Repairs, RowLoss, Rows};
use tqc::tensor::Float;

/// What one encoder made of some rows.
#[derive(Debug, Clone, PartialEq)]
struct Encoded {
    planes: Vec<Vec<u8>>,
    losses: Vec<RowLoss>,
    repairs: Repairs,
}

impl Encoded {
    fn planes(&self) -> Vec<&[u8]> {
        self.planes.iter().map(Vec::as_slice).collect()
    }

    fn decode(&self, spec: CodecSpec, rows: Rows<'_>) -> Vec<f32> {
        let mut out = vec![f32::NAN; rows.values.len()];
        let matrix = matrix(self.losses.len(), rows.in_features);
        codec(spec).decode(Part { matrix, first: 0 }, rows.float, &self.planes(), &mut out);
        out
    }
}

fn encode(
    quantizer: &dyn Quantizer,
    spec: CodecSpec,
    rows: Rows<'_>,
    isa: Isa,
) -> Result<Encoded, QuantError> {
    let count = rows.values.len() / rows.in_features;
    let layout = codec(spec).planes(matrix(count, rows.in_features), rows.float).unwrap();
    let mut planes: Vec<Vec<u8>> =
        layout.iter().map(|p| vec![0xa5; p.bytes_of(p.begun(0..count as u64))]).collect();
    let mut losses = vec![RowLoss::default(); count];
    let mut slices: Vec<&mut [u8]> = planes.iter_mut().map(Vec::as_mut_slice).collect();
    let repairs = quantizer.fit(spec, rows, isa, &mut slices, &mut losses)?;
    Ok(Encoded { planes, losses, repairs })
}

fn matrix(rows: usize, in_features: usize) -> Matrix {
    Matrix { out_features: rows as u64, in_features: in_features as u64 }
}

/// A fixed stream of numbers, so that a failure can be run again.
struct Random(u64);

impl Random {
    /// splitmix64.
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In (0, 1).
    fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Box and Muller.
    fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Student's t with two degrees of freedom: heavy tails.
    fn student(&mut self) -> f64 {
        let chi = (self.normal().powi(2) + self.normal().powi(2)) / 2.0;
        self.normal() / chi.sqrt()
    }
}

/// `value` as a model of type `float` would hold it; the largest finite value if it is out of range.
fn stored(float: Float, value: f64) -> f32 {
    let largest = match float {
        Float::Bf16 => half::bf16::MAX.to_f32(),
        Float::F16 => half::f16::MAX.to_f32(),
        Float::F32 => f32::MAX,
    };
    let value = (value as f32).clamp(-largest, largest);
    match float {
        Float::Bf16 => half::bf16::from_f32(value).to_f32(),
        Float::F16 => half::f16::from_f32(value).to_f32(),
        Float::F32 => value,
    }
}
