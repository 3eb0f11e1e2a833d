//! `refit` against `mlx`: never worse in any group, and better by what least squares should gain.

use tqc::codec::{AffineBits, CodecSpec, GroupSize};
use tqc::isa::Isa;
use tqc::quant::{Rows, quantizer};
use tqc::tensor::Float;

use crate::{Random, encode, stored};

/// Squared error of each group, in f64, from what the bytes decode to.
fn group_errors(encoder: &str, spec: CodecSpec, rows: Rows<'_>) -> Vec<f64> {
    let encoded = encode(quantizer(encoder).unwrap(), spec, rows, Isa::best()).unwrap();
    let decoded = encoded.decode(spec, rows);
    let group = spec.group().unwrap() as usize;
    let error = |(w, d): (&[f32], &[f32])| -> f64 {
        w.iter().zip(d).map(|(w, d)| (f64::from(*w) - f64::from(*d)).powi(2)).sum()
    };
    rows.values.chunks(group).zip(decoded.chunks(group)).map(error).collect()
}

fn all_affine() -> impl Iterator<Item = CodecSpec> {
    CodecSpec::all().into_iter().filter(|spec| matches!(spec, CodecSpec::Affine { .. }))
}

#[test]
fn refit_is_never_worse_than_mlx_in_any_group() {
    let mut random = Random(7);
    for float in [Float::Bf16, Float::F16, Float::F32] {
        let mut values = Vec::new();
        for row in 0..48 {
            // Gaussian, heavy-tailed, shifted, sparse, on a grid; from 1e-21 to 1e3, with f32 subnormals beyond.
            let scale = if row == 47 { 1e-41 } else { 10f64.powi(row / 2 - 20) };
            values.extend((0..256).map(|_| {
                let value = match row % 5 {
                    0 => random.normal(),
                    1 => random.student(),
                    2 => random.normal() * 0.01 + 1.0,
                    3 => random.normal() * f64::from(u8::from(random.bits().is_multiple_of(8))),
                    _ => (random.bits() % 16) as f64 - 7.0,
                };
                stored(float, value * scale)
            }));
        }
        let rows = Rows { values: &values, in_features: 256, float, ahead: &[] };
        for spec in all_affine() {
            let (mlx, refit) = (group_errors("mlx", spec, rows), group_errors("refit", spec, rows));
            for (g, (mlx, refit)) in mlx.iter().zip(&refit).enumerate() {
                assert!(refit <= mlx, "{spec} {float} group {g}: {refit:e} is worse than {mlx:e}");
            }
        }
    }
}

#[test]
fn refit_keeps_the_bytes_of_mlx_where_nothing_can_be_gained() {
    // Zeros, constants, and multiples of a quarter that the grid holds exactly.
    let mut values = vec![0.0; 256];
    values[128..192].fill(-0.375);
    for (k, value) in values[192..].iter_mut().enumerate() {
        *value = (k % 16) as f32 * 0.25;
    }
    let rows = Rows { values: &values, in_features: 256, float: Float::Bf16, ahead: &[] };
    let spec = CodecSpec::Affine { bits: AffineBits::ALL[2], group: GroupSize::ALL[1] };
    let [mlx, refit] =
        ["mlx", "refit"].map(|id| encode(quantizer(id).unwrap(), spec, rows, Isa::best()).unwrap());
    assert_eq!(mlx, refit);
    assert_eq!(mlx.losses[0].error, 0.0);
}

#[test]
fn refit_gains_on_gaussian_rows_what_least_squares_was_measured_to_gain() {
    let mut random = Random(3);
    let float = Float::Bf16;
    let values: Vec<f32> = (0..256 * 1024).map(|_| stored(float, random.normal() * 0.02)).collect();
    let rows = Rows { values: &values, in_features: 1024, float, ahead: &[] };
    // Change of the squared error, group 64. Measured independently, in numpy, over Gaussian, Laplace and
    // Student-t rows: −29 to −36 % at 2 bits, −23 to −27 % at 3, −18 to −19 % at 4, −16 to −17 % at 5, −17 to
    // −18 % at 6, −34 to −42 % at 8. Two points of margin below for the rows being others.
    for (bits, least) in [(2, 0.27), (3, 0.21), (4, 0.16), (5, 0.14), (6, 0.15), (8, 0.32)] {
        let bits = AffineBits::try_from(bits).unwrap();
        let spec = CodecSpec::Affine { bits, group: GroupSize::ALL[1] };
        let total = |encoder: &str| group_errors(encoder, spec, rows).iter().sum::<f64>();
        let gain = 1.0 - total("refit") / total("mlx");
        println!("{spec}: {:.1} %", -100.0 * gain);
        assert!(
            gain > least,
            "{spec}: gained {:.1} %, at least {:.0} % expected",
            100.0 * gain,
            100.0 * least
        );
        assert!(gain < 0.5, "{spec}: a gain of {:.1} % is too good to be true", 100.0 * gain);
    }
}
