//! Contracts that every encoder keeps on every codec it accepts, and worked examples.

use tqc::codec::{AffineBits, CodecError, CodecSpec, GroupSize, codec};
use tqc::failure::{Exit, Failure};
use tqc::isa::Isa;
use tqc::numeric::e4m3_to_f32;
use tqc::quant::{
    ENCODERS, Grain, QUANTIZERS, QuantError, Quantizer, Repair, RowLoss, Rows, base, quantizer, weighs,
};
use tqc::tensor::Float;

use crate::{Random, encode, stored};

const FLOATS: [Float; 3] = [Float::Bf16, Float::F16, Float::F32];

/// Columns of [`hard_rows`]: whole groups of every size, but no whole strip of sixteen groups.
const K: usize = 384;

fn affine(bits: u32, group: u32) -> CodecSpec {
    CodecSpec::Affine {
        bits: AffineBits::try_from(bits).unwrap(),
        group: GroupSize::try_from(group).unwrap(),
    }
}

/// Those that see one row at a time; `ldlq.rs` has the others.
fn every_pair() -> impl Iterator<Item = (&'static dyn Quantizer, CodecSpec)> {
    let pairs = |quantizer: &'static dyn Quantizer| {
        CodecSpec::all()
            .into_iter()
            .filter(|spec| quantizer.accepts(*spec))
            .map(move |spec| (quantizer, spec))
    };
    QUANTIZERS.iter().copied().filter(|quantizer| quantizer.grain(8) == Grain::Rows).flat_map(pairs)
}

/// Rows that have broken quantizers before: heavy tails, ties, zeros, constants, subnormals, giants.
fn hard_rows(float: Float) -> Vec<f32> {
    let mut random = Random(20_250_611);
    let mut rows = Vec::new();
    let mut add = |value: &mut dyn FnMut(&mut Random, usize) -> f64| {
        rows.extend((0..K).map(|k| stored(float, value(&mut random, k))));
    };
    for deviation in [1.0, 0.02, 1e-4] {
        add(&mut |r, _| r.normal() * deviation);
        add(&mut |r, _| r.student() * deviation);
    }
    for step in [1.0, 0.5, 0.125] {
        add(&mut |r, _| (r.bits() % 61) as f64 * step - 30.0 * step);
        add(&mut |r, _| (r.bits() % 31) as f64 * step + 3.0);
    }
    for constant in [0.0, -0.0, 1.0, -1.0, 0.1, 1e-7, -1e-7, 3e-8, 1e-40, 6e4, 3e34, -3e34] {
        add(&mut |_, _| constant);
    }
    for deviation in [1e-7, 1e-12, 1e-20, 1e-30, 1e-38, 1e-42, 1e3, 1e10, 1e20, 1e30, 1e37] {
        add(&mut |r, _| r.normal() * deviation);
    }
    add(&mut |r, _| if r.bits() & 1 == 0 { 1.0 } else { -1.0 });
    add(&mut |r, _| r.normal().abs() + 5.0);
    add(&mut |r, _| -r.normal().abs() * 1e-2 - 1.0);
    add(&mut |r, k| if k.is_multiple_of(64) { 100.0 } else { r.normal() * 1e-3 });
    add(&mut |r, k| r.normal() * 2f64.powi(k as i32 / 16 % 24 - 12));
    add(&mut |r, _| r.normal() * 2f64.powi((r.bits() % 60) as i32 - 30));
    add(&mut |r, _| if r.bits().is_multiple_of(50) { r.normal() } else { -0.0 });
    // Any bits with an exponent that leaves room for a scale.
    add(&mut |r, _| f64::from(f32::from_bits(r.bits() as u32 & 0xbfff_ffff)));
    rows
}

#[test]
fn every_isa_gives_the_bytes_and_losses_of_the_scalar_definition() {
    for float in FLOATS {
        let values = hard_rows(float);
        let rows = Rows { values: &values, in_features: K, float, ahead: &[] };
        for (quantizer, spec) in every_pair() {
            let Ok(expected) = encode(quantizer, spec, rows, Isa::Scalar) else {
                assert_eq!(spec, CodecSpec::F16, "{} {spec} {float}", quantizer.id());
                continue;
            };
            for isa in Isa::available() {
                let found = encode(quantizer, spec, rows, isa).unwrap();
                let what = format!("{} {spec} {float} {isa}", quantizer.id());
                for (p, (found, expected)) in found.planes.iter().zip(&expected.planes).enumerate() {
                    let differs = found.iter().zip(expected).position(|(f, e)| f != e);
                    assert_eq!(differs, None, "{what}: plane {p} of {} bytes", expected.len());
                }
                let bits = |losses: &[RowLoss]| -> Vec<(u64, u64)> {
                    losses.iter().map(|loss| (loss.error.to_bits(), loss.energy.to_bits())).collect()
                };
                assert_eq!(bits(&found.losses), bits(&expected.losses), "{what}");
                assert_eq!(found.repairs, expected.repairs, "{what}");
            }
        }
    }
}

#[test]
fn any_split_into_rows_gives_the_same_bytes_and_losses() {
    let float = Float::Bf16;
    let values = hard_rows(float);
    for (quantizer, spec) in every_pair().filter(|(_, spec)| *spec != CodecSpec::F16) {
        let whole =
            encode(quantizer, spec, Rows { values: &values, in_features: K, float, ahead: &[] }, Isa::best())
                .unwrap();
        for rows_at_a_time in [1, 3] {
            let mut planes = vec![Vec::new(); whole.planes.len()];
            let mut losses = Vec::new();
            let mut repairs = tqc::quant::Repairs::default();
            for part in values.chunks(rows_at_a_time * K) {
                let rows = Rows { values: part, in_features: K, float, ahead: &[] };
                let part = encode(quantizer, spec, rows, Isa::best()).unwrap();
                for (plane, part) in planes.iter_mut().zip(&part.planes) {
                    plane.extend_from_slice(part);
                }
                losses.extend(part.losses);
                repairs += part.repairs;
            }
            assert!(planes == whole.planes, "{} {spec}", quantizer.id());
            assert_eq!((losses, repairs), (whole.losses.clone(), whole.repairs), "{} {spec}", quantizer.id());
        }
    }
}

#[test]
fn the_reported_error_is_that_of_what_the_bytes_decode_to() {
    for float in FLOATS {
        let values = hard_rows(float);
        let rows = Rows { values: &values, in_features: K, float, ahead: &[] };
        for (quantizer, spec) in every_pair() {
            let Ok(encoded) = encode(quantizer, spec, rows, Isa::best()) else { continue };
            let decoded = encoded.decode(spec, rows);
            for (r, loss) in encoded.losses.iter().enumerate() {
                let row = r * K..(r + 1) * K;
                let (mut error, mut energy) = (0.0, 0.0);
                for (w, d) in values[row.clone()].iter().zip(&decoded[row]) {
                    error += (f64::from(*w) - f64::from(*d)).powi(2);
                    energy += f64::from(*w).powi(2);
                }
                // A difference, a square and up to seven sums, each rounded to f32. Differences of weights with
                // a large mean lose more, relative to the weight; squares below 2^-126 lose absolutely.
                let tolerance = 12.0 * 2f64.powi(-24);
                let slack = |sum: f64| tolerance * sum + 2f64.powi(-48) * energy + 1e-35 * energy.min(1.0);
                let what = format!("{} {spec} {float} row {r}", quantizer.id());
                assert!((loss.energy - energy).abs() <= slack(energy), "{what}: {loss:?}, energy {energy:e}");
                assert!((loss.error - error).abs() <= slack(error), "{what}: {loss:?}, error {error:e}");
            }
        }
    }
}

/// Float type, group (repeated), bits; scale, bias, codes.
type Example = (Float, &'static [f32], u32, f32, f32, &'static [u8]);

#[test]
fn worked_examples_of_the_affine_encoder() {
    const CYCLE: [f32; 8] = [-0.75, 0.5, 0.25, 0.0, 0.1, -0.3, 0.6, 1.0];
    let bits = f32::from_bits;
    let examples: [Example; 10] = [
        (Float::F32, &CYCLE, 4, bits(0xbde3_8e39), 1.0, &[15, 4, 7, 9, 8, 12, 4, 0]),
        (Float::Bf16, &CYCLE, 4, bits(0xbde4_0000), 1.0, &[15, 4, 7, 9, 8, 12, 4, 0]),
        (Float::F32, &CYCLE, 2, -0.5, 1.0, &[3, 1, 2, 2, 2, 3, 1, 0]),
        (Float::F32, &CYCLE, 8, bits(0xbbe0_7038), 1.0, &[255, 73, 110, 146, 131, 190, 58, 0]),
        (Float::F32, &[-1.0, 1.0], 4, bits(0xbe12_4925), 1.0, &[14, 0]),
        (Float::F32, &[1.0, 2.0, 3.0, 4.0], 4, -0.2, 4.0, &[15, 10, 5, 0]),
        (Float::F32, &[-1.0, -2.0, -3.0, -4.0], 4, 0.2, -4.0, &[15, 10, 5, 0]),
        (Float::F32, &[1.0], 4, bits(0xb3d6_bf95), 1.0, &[0]),
        (Float::F32, &[0.0], 4, -1e-7, 0.0, &[0]),
        (Float::F32, &[-0.0], 4, -1e-7, 0.0, &[0]),
    ];
    for isa in Isa::available() {
        for (float, group, bits, scale, bias, codes) in examples {
            let values: Vec<f32> =
                group.iter().copied().cycle().take(32).map(|w| stored(float, w.into())).collect();
            let rows = Rows { values: &values, in_features: 32, float, ahead: &[] };
            let encoded = encode(quantizer("mlx").unwrap(), affine(bits, 32), rows, isa).unwrap();
            let parameter = |value: f32| match float {
                Float::Bf16 => ((value.to_bits() >> 16) as u16).to_le_bytes().to_vec(),
                _ => value.to_le_bytes().to_vec(),
            };
            let what = format!("{isa} {float} {bits} bits {group:?}");
            assert_eq!(encoded.planes[1], parameter(scale), "{what}: scale");
            assert_eq!(encoded.planes[2], parameter(bias), "{what}: bias");
            let mut packed = vec![0u8; 4 * bits as usize];
            for (c, code) in codes.iter().cycle().take(32).enumerate() {
                for bit in 0..bits as usize {
                    let at = c * bits as usize + bit;
                    packed[at / 8] |= (code >> bit & 1) << (at % 8);
                }
            }
            assert_eq!(encoded.planes[0], packed, "{what}: codes");
        }
    }
}

#[test]
fn parameters_beyond_the_stored_type_are_refused_with_row_and_group() {
    let mlx = quantizer("mlx").unwrap();
    for encoder in [mlx, quantizer("refit").unwrap()] {
        for isa in Isa::available() {
            // Row 1, group 2: a range that overflows f32.
            let mut values = vec![0.5f32; 2 * 256];
            values[256 + 2 * 64 + 7] = f32::MAX;
            values[256 + 2 * 64 + 9] = -f32::MAX;
            let rows = Rows { values: &values, in_features: 256, float: Float::F32, ahead: &[] };
            let error = encode(encoder, affine(4, 64), rows, isa).unwrap_err();
            let QuantError::ParameterOverflow { row: 1, group: 2, float: Float::F32, value } = error else {
                panic!("{error}")
            };
            assert!(value.is_infinite());

            // Row 0, group 3: a bias that f16 cannot hold.
            let mut values = vec![0.5f32; 256];
            values[3 * 64] = 1e5;
            let rows = Rows { values: &values, in_features: 256, float: Float::F16, ahead: &[] };
            let error = encode(encoder, affine(8, 64), rows, isa).unwrap_err();
            assert_eq!(
                error,
                QuantError::ParameterOverflow { row: 0, group: 3, float: Float::F16, value: 1e5 }
            );
            assert_eq!(
                error.to_string(),
                "scale or bias of group 3 is not finite when stored as f16 (from 1e5)"
            );
            assert_eq!(error.exit(), Exit::Input);
            assert!(error.help().unwrap().contains("`keep`"));
        }
    }
}

#[test]
fn groups_below_the_least_scale_become_zeros_and_are_counted() {
    for isa in Isa::available() {
        let mlx = quantizer("mlx").unwrap();
        // Group 0 at 2^-130, group 1 ordinary, group 2 zero, group 3 of one weight at -2^-140.
        let mut values = vec![2f32.powi(-130); 128];
        values[32..].fill(0.0);
        values[40] = 1.0;
        values[100] = -(2f32.powi(-140));
        let rows = Rows { values: &values, in_features: 128, float: Float::F32, ahead: &[] };
        for (spec, byte_of_one) in [(CodecSpec::Mxfp4, 127 - 2), (CodecSpec::Mxfp8, 127 - 8)] {
            let encoded = encode(mlx, spec, rows, isa).unwrap();
            assert_eq!(encoded.repairs.scale_underflow, 2, "{isa} {spec}");
            assert_eq!(encoded.planes[1], [127, byte_of_one, 127, 127], "{isa} {spec}");
            let decoded = encoded.decode(spec, rows);
            assert!(
                decoded.iter().enumerate().all(|(k, w)| *w == if k == 40 { 1.0 } else { 0.0 }),
                "{isa} {spec}"
            );
            let group = encoded.planes[0].len() / 4;
            assert!(encoded.planes[0][..group].iter().all(|byte| *byte == 0), "{isa} {spec}");
            assert_eq!(encoded.repairs.rows().collect::<Vec<_>>(), [(Repair::ScaleUnderflow, 2)]);
        }
        // nvfp4 has no scale below 2^-9; 6 · 2^-10 is the tie that rounds to zero.
        let mut values = vec![0.0; 64];
        (values[0], values[16], values[32]) = (6.0 * 2f32.powi(-10), 6.0 * 2f32.powi(-10) * 1.01, -1e-30);
        let rows = Rows { values: &values, in_features: 64, float: Float::F32, ahead: &[] };
        let encoded = encode(mlx, CodecSpec::Nvfp4, rows, isa).unwrap();
        assert_eq!(encoded.planes[1], [0, 1, 0, 0], "{isa}");
        assert_eq!(encoded.repairs.scale_underflow, 2, "{isa}");
    }
}

#[test]
fn an_nvfp4_group_beyond_its_largest_scale_is_counted() {
    assert_eq!(6.0 * e4m3_to_f32(0x7e), 2688.0);
    for isa in Isa::available() {
        let mut values = vec![1.0; 64];
        (values[0], values[16], values[32], values[48]) = (2688.0, 2689.0, -4000.0, -2688.0);
        let rows = Rows { values: &values, in_features: 64, float: Float::F32, ahead: &[] };
        let encoded = encode(quantizer("mlx").unwrap(), CodecSpec::Nvfp4, rows, isa).unwrap();
        assert_eq!(encoded.planes[1], [0x7e; 4], "{isa}");
        assert_eq!(encoded.repairs.rows().collect::<Vec<_>>(), [(Repair::ScaleOverflow, 2)]);
        let decoded = encoded.decode(CodecSpec::Nvfp4, rows);
        assert_eq!([decoded[0], decoded[16], decoded[32]], [2688.0, 2688.0, -2688.0], "{isa}");
    }
}

#[test]
fn float_storage_rounds_to_even_and_names_a_weight_it_cannot_hold() {
    let cast = quantizer("cast").unwrap();
    for isa in Isa::available() {
        // 257 = 1.0000 0000 1 · 2^8 lies midway between the bf16 values 256 and 258, 259 between 258 and 260.
        let values = [257.0, 259.0, -0.0, 1.5, 2049.0];
        let rows = Rows { values: &values, in_features: 5, float: Float::F32, ahead: &[] };
        let bf16 = encode(cast, CodecSpec::Bf16, rows, isa).unwrap();
        assert_eq!(bf16.decode(CodecSpec::Bf16, rows), [256.0, 260.0, -0.0, 1.5, 2048.0]);
        assert_eq!(bf16.losses[0].error, 3.0);
        let f16 = encode(cast, CodecSpec::F16, rows, isa).unwrap();
        assert_eq!(f16.decode(CodecSpec::F16, rows), [257.0, 259.0, -0.0, 1.5, 2048.0]);
        let keep = encode(cast, CodecSpec::Keep, rows, isa).unwrap();
        assert_eq!(keep.planes[0], values.map(f32::to_le_bytes).concat());
        assert_eq!(keep.losses[0].error, 0.0);

        let values = [1.0, 2.0, 3.0, -65520.0];
        let rows = Rows { values: &values, in_features: 2, float: Float::Bf16, ahead: &[] };
        let error = encode(cast, CodecSpec::F16, rows, isa).unwrap_err();
        let expected = QuantError::ValueOverflow { row: 1, column: 1, float: Float::F16, value: -65520.0 };
        assert_eq!(error, expected);
    }
}

#[test]
fn planes_hold_the_bits_per_weight_that_the_format_promises() {
    for spec in CodecSpec::all() {
        for float in FLOATS {
            let planes = codec(spec).planes(crate::matrix(512, 1024), float).unwrap();
            let bytes = planes.iter().map(|plane| plane.bytes_of(plane.begun(0..512))).sum::<usize>();
            let bits = (8 * bytes) as f64 / (512.0 * 1024.0);
            let expected = match spec {
                CodecSpec::Affine { bits, group } => {
                    f64::from(bits.get()) + 16.0 * float.bytes() as f64 / f64::from(group.get())
                }
                CodecSpec::Trellis(trellis) => {
                    f64::from(trellis.bits()) + 16.0 * (1.0 / 512.0 + 1.0 / 1024.0)
                }
                CodecSpec::Mxfp4 => 4.25,
                CodecSpec::Mxfp8 => 8.25,
                CodecSpec::Nvfp4 => 4.5,
                CodecSpec::Keep => 8.0 * float.bytes() as f64,
                CodecSpec::Bf16 | CodecSpec::F16 => 16.0,
                CodecSpec::F32 => 32.0,
            };
            assert_eq!(bits, expected, "{spec} {float}");
            assert_eq!(codec(spec).spec(), spec);
        }
    }
}

#[test]
fn a_group_that_does_not_divide_the_row_is_refused_by_every_codec_that_has_groups() {
    for spec in CodecSpec::all() {
        let planes = codec(spec).planes(crate::matrix(32, 1000), Float::Bf16);
        match spec.group() {
            Some(group) => {
                let expected = CodecError::GroupDoesNotDivide { codec: spec, group, in_features: 1000 };
                assert_eq!(planes, Err(expected));
            }
            None => assert!(planes.is_ok(), "{spec}"),
        }
    }
}

#[test]
fn encoders_that_a_recipe_may_name_are_registered_and_every_codec_has_one() {
    for id in ENCODERS {
        // Those that weigh errors are no search over rows alone; what stands in for them is.
        assert_eq!(quantizer(base(id)).unwrap().id(), base(id));
        assert_eq!(weighs(id), base(id) != *id, "{id}");
        assert_eq!(quantizer(id).is_none(), weighs(id), "{id}");
    }
    assert!(quantizer("gptqq").is_none());
    for spec in CodecSpec::all() {
        let by = QUANTIZERS.iter().find(|quantizer| quantizer.accepts(spec)).unwrap();
        let expected = match spec {
            CodecSpec::Trellis(_) => "trellis",
            _ if spec.quantizes() => ENCODERS[0],
            _ => "cast",
        };
        assert_eq!(by.id(), expected, "{spec}");
    }
}
