//! `goldens/mlx`: bytes made by MLX 0.32.4 on the CPU.

use std::path::Path;

use safetensors::SafeTensors;

use tqc::codec::{AffineBits, CodecSpec, GroupSize, Part, dequantize};
use tqc::isa::Isa;
use tqc::numeric::widen;
use tqc::quant::{Rows, quantizer};
use tqc::tensor::Float;

use crate::{Encoded, encode};

const FLOATS: [Float; 3] = [Float::Bf16, Float::F16, Float::F32];

fn bytes_of_file() -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/mlx/expected.safetensors")).unwrap()
}

fn wide(golden: &SafeTensors<'_>, name: &str, float: Float, isa: Isa) -> Vec<f32> {
    let bytes = golden.tensor(name).unwrap().data().to_vec();
    let mut out = vec![0.0; bytes.len() / float.bytes()];
    assert!(widen(float, &bytes, &mut out, isa), "{name} is finite");
    out
}

/// The row of f32 subnormals, whose mxfp4 and mxfp8 scale bytes wrap around in MLX.
fn wrapped_row(file: &[u8], spec: CodecSpec, float: Float) -> Option<usize> {
    let (_, metadata) = SafeTensors::read_metadata(file).unwrap();
    let names = &metadata.metadata().as_ref().unwrap()[&format!("rows.{float}")];
    let names: Vec<String> = serde_json::from_str(names).unwrap();
    let scale_is_e8m0 = matches!(spec, CodecSpec::Mxfp4 | CodecSpec::Mxfp8);
    names.iter().position(|name| name == "subnormal_1e-42").filter(|_| scale_is_e8m0)
}

/// Panics with the first row in which `found` and `expected` differ.
fn assert_same_rows(found: &[u8], expected: &[u8], rows: usize, except: Option<usize>, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    let row_bytes = expected.len() / rows;
    for (r, (f, e)) in found.chunks(row_bytes).zip(expected.chunks(row_bytes)).enumerate() {
        assert!(f == e || except == Some(r), "{what}: row {r}\n found {f:02x?}\nneeded {e:02x?}");
    }
}

fn check(file: &[u8], spec: CodecSpec, float: Float, prefix: &str, planes: &[&str]) {
    let golden = SafeTensors::deserialize(file).unwrap();
    for isa in Isa::available() {
        let values = wide(&golden, &format!("in.{float}"), float, isa);
        let count = values.len() / 256;
        let except = wrapped_row(file, spec, float);
        let rows = Rows { values: &values, in_features: 256, float, ahead: &[] };
        let encoded = encode(quantizer("mlx").unwrap(), spec, rows, isa).unwrap();
        for (found, plane) in encoded.planes.iter().zip(planes) {
            let expected = golden.tensor(&format!("{prefix}.{plane}")).unwrap();
            assert_same_rows(found, expected.data(), count, except, &format!("{isa} {prefix}.{plane}"));
        }
        if let Ok(expected) = golden.tensor(&format!("{prefix}.dequant")) {
            let found = rounded(spec, rows, &encoded);
            assert_same_rows(&found, expected.data(), count, except, &format!("{isa} {prefix}.dequant"));
        }
        if let Some(row) = except {
            let zero_and_one = [0u8, 127];
            for (plane, byte) in encoded.planes.iter().zip(zero_and_one) {
                let row_bytes = plane.len() / count;
                assert!(plane[row * row_bytes..][..row_bytes].iter().all(|b| *b == byte), "{isa} {spec}");
            }
            assert!(encoded.repairs.scale_underflow >= 256 / 32, "{isa} {spec}: {:?}", encoded.repairs);
        }
    }
}

/// MLX's decoding, as stored bytes.
fn rounded(spec: CodecSpec, rows: Rows<'_>, encoded: &Encoded) -> Vec<u8> {
    let mut out = vec![f32::NAN; rows.values.len()];
    let matrix = crate::matrix(encoded.losses.len(), rows.in_features);
    dequantize(spec, Part { matrix, first: 0 }, rows.float, &encoded.planes(), &mut out);
    out.iter()
        .flat_map(|w| match rows.float {
            Float::Bf16 => ((w.to_bits() >> 16) as u16).to_le_bytes().to_vec(),
            Float::F16 => half::f16::from_f32(*w).to_le_bytes().to_vec(),
            Float::F32 => w.to_le_bytes().to_vec(),
        })
        .collect()
}

#[test]
fn affine_bytes_are_those_of_mlx_in_every_width_group_and_float_type() {
    let file = bytes_of_file();
    for float in FLOATS {
        for bits in AffineBits::ALL {
            for group in GroupSize::ALL {
                let prefix = format!("affine.{float}.b{}.g{}", bits.get(), group.get());
                let spec = CodecSpec::Affine { bits, group };
                check(&file, spec, float, &prefix, &["weight", "scales", "biases"]);
            }
        }
    }
}

#[test]
fn mxfp4_mxfp8_and_nvfp4_bytes_are_those_of_mlx_in_every_float_type() {
    let file = bytes_of_file();
    for float in FLOATS {
        for spec in [CodecSpec::Mxfp4, CodecSpec::Mxfp8, CodecSpec::Nvfp4] {
            check(&file, spec, float, &format!("{spec}.{float}"), &["weight", "scales"]);
        }
    }
}
