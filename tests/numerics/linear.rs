//! Linear layers against their definitions, written out as plain loops.

use std::sync::Arc;

use tqc::backend::cpu::{Cpu, Input};
use tqc::backend::{Columns, LinearOp, Packed, Precision, Stored};
use tqc::codec::trellis::{Trellis, state, tile_words};
use tqc::codec::{CodecSpec, codec};
use tqc::isa::Isa;
use tqc::numeric::dot;
use tqc::numeric::lanes::{Kernel, LANES, Lanes, dispatch};
use tqc::tensor::Float;

use crate::Random;

/// Rows of x: one, tiles with every remainder, and more than are gathered at a time.
const T: [usize; 8] = [1, 2, 3, 5, 10, 17, 64, 259];
/// Rows of w: one, less than a tile, and several blocks with a remainder.
const N: [usize; 3] = [1, 7, 53];

/// A weight of random codes and small scales.
fn random_weight(random: &mut Random, spec: CodecSpec, float: Float, n: usize, k: usize) -> Packed {
    let value = |random: &mut Random, deviation: f64| {
        let value = crate::stored(float, random.normal() * deviation);
        match float {
            Float::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
            Float::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
            Float::F32 => value.to_le_bytes().to_vec(),
        }
    };
    let planes = codec(spec).planes(crate::matrix(n, k), float).unwrap();
    let planes = planes.iter().map(|plane| {
        let bytes = plane.bytes_of(plane.begun(0..n as u64));
        let floats = bytes / float.bytes();
        let bytes: Vec<u8> = match (spec, plane.suffix) {
            (CodecSpec::Keep, _) | (_, "biases") => (0..floats).flat_map(|_| value(random, 0.5)).collect(),
            (CodecSpec::Trellis(_), "scales" | "scales2") => {
                let scale = |random: &mut Random| half::f16::from_f64(random.normal() * 0.03).to_le_bytes();
                (0..bytes / 2).flat_map(|_| scale(random)).collect()
            }
            (CodecSpec::Affine { .. }, "scales") => (0..floats).flat_map(|_| value(random, 0.1)).collect(),
            (CodecSpec::Bf16, _) => {
                (0..bytes / 2).flat_map(|_| half::bf16::from_f64(random.normal()).to_le_bytes()).collect()
            }
            (CodecSpec::F16, _) => {
                (0..bytes / 2).flat_map(|_| half::f16::from_f64(random.normal()).to_le_bytes()).collect()
            }
            (CodecSpec::F32, _) => {
                (0..bytes / 4).flat_map(|_| (random.normal() as f32).to_le_bytes()).collect()
            }
            (CodecSpec::Nvfp4, "scales") => (0..bytes).map(|_| (random.bits() % 0x7f) as u8).collect(),
            (_, "scales") => (0..bytes).map(|_| 120 + (random.bits() % 14) as u8).collect(),
            // E4M3's NaN would make every sum NaN.
            (CodecSpec::Mxfp8, _) => (0..bytes)
                .map(|_| random.bits() as u8)
                .map(|b| if b & 0x7f == 0x7f { b - 1 } else { b })
                .collect(),
            _ => (0..bytes).map(|_| random.bits() as u8).collect(),
        };
        let len = bytes.len();
        Stored::Owned(Arc::new(bytes), 0..len)
    });
    let planes = planes.collect();
    Packed::whole(spec, float, n, k, planes)
}

/// Every codec, and trellises with other choices than the defaults.
fn all_codecs() -> Vec<CodecSpec> {
    let others =
        ["trellis-2-L16-1mad-one", "trellis-3-mcg", "trellis-4-inputs", "trellis-1-L10-rptc-inputs-one"];
    CodecSpec::all().into_iter().chain(others.map(|name| name.parse().unwrap())).collect()
}

/// The same of at least `n` rows, as many as the codec has in whole tiles.
fn random_rows(random: &mut Random, spec: CodecSpec, float: Float, n: usize, k: usize) -> Packed {
    let whole = if matches!(spec, CodecSpec::Trellis(_)) { n.next_multiple_of(32) } else { n };
    random_weight(random, spec, float, whole, k)
}

/// Numbers of several magnitudes, and some zeros.
fn random_input(random: &mut Random, len: usize) -> Vec<f32> {
    let value = |random: &mut Random| match random.bits() % 16 {
        0 => 0.0,
        1 => random.normal() * 30.0,
        2 => random.normal() * 1e-3,
        _ => random.normal(),
    };
    (0..len).map(|_| value(random) as f32).collect()
}

/// The sum of products as `numeric::dot` defines it.
fn defined_dot(x: &[f32], w: &[f32]) -> f32 {
    let panels = x.chunks(dot::PANEL).zip(w.chunks(dot::PANEL)).map(|(x, w)| {
        let mut lanes = [0.0f32; LANES];
        for (k, (x, w)) in x.iter().zip(w).enumerate() {
            lanes[k % LANES] = x.mul_add(*w, lanes[k % LANES]);
        }
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    });
    panels.reduce(|sum, panel| sum + panel).unwrap()
}

fn same(found: f32, expected: f32) -> bool {
    found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan()
}

/// y of `op`, its rows cut at random places.
fn apply(random: &mut Random, op: &dyn LinearOp, x: &[f32]) -> Vec<f32> {
    let (n, k) = (op.out_features(), op.in_features());
    let mut y = vec![f32::NAN; x.len() / k * n];
    let (input, out) = (Input::new(x, k), Columns::new(&mut y, n));
    op.ready(&input);
    let mut start = 0;
    while start < n {
        let end = n.min(start + 1 + random.bits() as usize % n);
        op.apply(&input, start..end, &out);
        start = end;
    }
    y
}

fn floats(spec: CodecSpec) -> &'static [Float] {
    match spec {
        CodecSpec::Affine { .. } | CodecSpec::Keep => &[Float::Bf16, Float::F16, Float::F32],
        _ => &[Float::Bf16],
    }
}

/// Lengths of a row with one and several panels, and the shortest remainders that the codec allows.
fn row_lengths(spec: CodecSpec) -> Vec<usize> {
    match spec.group() {
        None if spec.to_string().contains("inputs") => vec![32, 192, 576, 1024 + 512 + 64],
        None => vec![1, 19, 576, 1024 + 512 + 45],
        Some(group) => {
            let group = group as usize;
            [group, 3 * group, 192, 576, 1024 + 512 + 5 * group]
                .into_iter()
                .filter(|k| k % group == 0)
                .collect()
        }
    }
}

#[test]
fn the_exact_path_is_the_defined_sum_of_decoded_weights_for_every_codec_isa_and_shape() {
    let mut random = Random(3);
    for spec in all_codecs() {
        for float in floats(spec) {
            for k in row_lengths(spec) {
                let weight = random_rows(&mut random, spec, *float, N[N.len() - 1], k);
                let n = weight.out_features;
                let mut decoded = vec![0.0; n * k];
                weight.decode(0..n, &mut decoded);
                let t_most = if k == 576 && *float == Float::Bf16 { T[T.len() - 1] } else { 17 };
                let x = random_input(&mut random, t_most * k);
                let expected: Vec<f32> =
                    x.chunks(k).flat_map(|x| decoded.chunks(k).map(move |w| defined_dot(x, w))).collect();
                for isa in Isa::available() {
                    let cpu = Cpu::new(isa, 1, Precision::Exact);
                    for n_some in N {
                        let op = cpu.prepare(&weight.rows(0..n_some), false);
                        assert_eq!(op.precision(), Precision::Exact);
                        for t in T.into_iter().filter(|t| *t <= t_most) {
                            if isa == Isa::Scalar && t * n_some * k > 100_000 {
                                continue;
                            }
                            let y = apply(&mut random, &*op, &x[..t * k]);
                            let expected = |i: usize| expected[i / n_some * n + i % n_some];
                            let differs = (0..y.len()).find(|i| !same(y[*i], expected(*i)));
                            assert_eq!(
                                differs.map(|i| (i / n_some, i % n_some, y[i], expected(i))),
                                None,
                                "{spec} {float} {isa} T {t} N {n_some} K {k}: first t, n, found, expected"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// A group of activations as `backend::cpu::quantized` defines it: scale and codes.
fn defined_quantization(x: &[f32]) -> (f32, Vec<i32>) {
    if x.iter().any(|x| !x.is_finite()) {
        return (f32::NAN, vec![0; x.len()]);
    }
    let scale = x.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0;
    if scale < f32::MIN_POSITIVE {
        return (0.0, vec![0; x.len()]);
    }
    let inverse = 1.0 / scale;
    (scale, x.iter().map(|x| (x * inverse).round_ties_even() as i32).collect())
}

/// Integer codes of row `n`; for each group, its scale and its bias: as the table in `backend::cpu::int8` has them.
fn integer_codes(weight: &Packed, n: usize) -> (Vec<i32>, Vec<(f32, f32)>) {
    let (k, spec) = (weight.in_features, weight.codec);
    let group = spec.group().unwrap() as usize;
    let row = weight.rows(n..n + 1);
    let planes: Vec<&[u8]> = row.planes.iter().map(Stored::bytes).collect();
    let value = |plane: &[u8], g: usize| match weight.float {
        Float::Bf16 => half::bf16::from_le_bytes([plane[2 * g], plane[2 * g + 1]]).to_f32(),
        Float::F16 => half::f16::from_le_bytes([plane[2 * g], plane[2 * g + 1]]).to_f32(),
        Float::F32 => f32::from_le_bytes(plane[4 * g..4 * g + 4].try_into().unwrap()),
    };
    let bits = match spec {
        CodecSpec::Affine { bits, .. } => bits.get() as usize,
        _ => 4,
    };
    let code = |k: usize| {
        (0..bits).map(|i| i32::from(planes[0][(k * bits + i) / 8] >> ((k * bits + i) % 8) & 1) << i).sum()
    };
    let twice = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
    match spec {
        CodecSpec::Affine { .. } => {
            let parameters = |g| (value(planes[1], g), value(planes[2], g));
            ((0..k).map(code).collect(), (0..k / group).map(parameters).collect())
        }
        _ => {
            let scale = |g: usize| match spec {
                CodecSpec::Mxfp4 => 2f64.powi(i32::from(planes[1][g]) - 128) as f32,
                _ => tqc::numeric::e4m3_to_f32(planes[1][g]) / 2.0,
            };
            let codes = (0..k).map(|k| twice[code(k) as usize]).collect();
            (codes, (0..k / group).map(|g| (scale(g), 0.0)).collect())
        }
    }
}

/// The fast path as `backend::cpu::int8` defines it.
fn defined_fast(x: &[(f32, Vec<i32>)], codes: &[i32], parameters: &[(f32, f32)], biases: bool) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let groups = x.iter().zip(codes.chunks(codes.len() / x.len())).zip(parameters);
    for (g, (((x_scale, x), codes), (scale, bias))) in groups.enumerate() {
        let product: i32 = x.iter().zip(codes).map(|(x, code)| x * code).sum();
        let sum: i32 = x.iter().sum();
        let lane = &mut lanes[g % LANES];
        *lane = (scale * x_scale).mul_add(product as f32, *lane);
        if biases {
            *lane = bias.mul_add(x_scale * sum as f32, *lane);
        }
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

#[test]
fn the_fast_path_is_its_definition_for_every_codec_isa_and_shape_and_near_the_exact_one() {
    let mut random = Random(7);
    let has_none = |spec: CodecSpec| matches!(spec, CodecSpec::Mxfp8) || !spec.quantizes();
    // Trellises have a fast path of their own.
    for spec in CodecSpec::all().into_iter().filter(|spec| !matches!(spec, CodecSpec::Trellis(_))) {
        for float in floats(spec) {
            for k in row_lengths(spec) {
                let weight = random_rows(&mut random, spec, *float, N[N.len() - 1], k);
                let n = weight.out_features;
                if has_none(spec) {
                    let cpu = Cpu::new(Isa::best(), 1, Precision::Fast);
                    assert_eq!(cpu.prepare(&weight, false).precision(), Precision::Exact, "{spec}");
                    continue;
                }
                let group = spec.group().unwrap() as usize;
                let t_most = if k == 576 && *float == Float::Bf16 { T[T.len() - 1] } else { 17 };
                let mut x = random_input(&mut random, t_most * k);
                // A group of zeros, one below the least scale, and a very large one.
                x[..group].fill(0.0);
                let tiny = |x: &mut f32| *x *= 1e-38;
                x[(t_most - 1) * k..][..group].iter_mut().for_each(tiny);
                x[k - group..k].iter_mut().for_each(|x| *x *= 1e33);
                let quantized: Vec<Vec<_>> =
                    x.chunks(k).map(|x| x.chunks(group).map(defined_quantization).collect()).collect();
                let rows: Vec<_> = (0..n).map(|n| integer_codes(&weight, n)).collect();
                let biases = matches!(spec, CodecSpec::Affine { .. });
                let expected: Vec<f32> = quantized
                    .iter()
                    .flat_map(|x| {
                        rows.iter().map(move |(codes, parameters)| defined_fast(x, codes, parameters, biases))
                    })
                    .collect();

                let mut decoded = vec![0.0; n * k];
                weight.decode(0..n, &mut decoded);
                for (i, y) in expected.iter().enumerate() {
                    let (t, n) = (i / n, i % n);
                    let (mut exact, mut half_steps, mut terms) = (0.0, 0.0, 0.0);
                    for j in 0..k {
                        let (x, w) = (f64::from(x[t * k + j]), f64::from(decoded[n * k + j]));
                        let (scale, bias) = rows[n].1[j / group];
                        exact += x * w;
                        half_steps += w.abs() * f64::from(quantized[t][j / group].0) / 2.0;
                        terms += x.abs() * (f64::from(scale.abs()) * 256.0 + f64::from(bias.abs()));
                    }
                    // Beside the steps: some roundings of f32 of terms that may cancel, and what is below 2^-126.
                    let slack = terms * 2f64.powi(-21) + 1e-30;
                    let error = (f64::from(*y) - exact).abs();
                    assert!(
                        error <= half_steps * 1.0001 + slack,
                        "{spec} {float} K {k} t {t} n {n}: {y}, {exact}"
                    );
                }

                for isa in Isa::available() {
                    let cpu = Cpu::new(isa, 1, Precision::Fast);
                    for n_some in N {
                        let op = cpu.prepare(&weight.rows(0..n_some), false);
                        assert_eq!(op.precision(), Precision::Fast);
                        assert_eq!(cpu.prepare(&weight, true).precision(), Precision::Exact);
                        for t in T.into_iter().filter(|t| *t <= t_most) {
                            if isa == Isa::Scalar && t * n_some * k > 100_000 {
                                continue;
                            }
                            let y = apply(&mut random, &*op, &x[..t * k]);
                            let expected = |i: usize| expected[i / n_some * n + i % n_some];
                            let differs = (0..y.len()).find(|i| !same(y[*i], expected(*i)));
                            assert_eq!(
                                differs.map(|i| (i / n_some, i % n_some, y[i], expected(i))),
                                None,
                                "{spec} {float} {isa} T {t} N {n_some} K {k}: first t, n, found, expected"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Code values of row `n`, by the definitions of the ring and of the code.
fn code_values(weight: &Packed, trellis: Trellis, n: usize) -> Vec<i32> {
    let tile = trellis.tile(weight.part.matrix).unwrap();
    let words = weight.planes[0].bytes().as_chunks::<4>().0;
    let per_tile = tile_words(tile, trellis.bits());
    let value = |k: usize| {
        let ring: Vec<u32> = words[(n / tile * weight.in_features + k) * per_tile..][..per_tile]
            .iter()
            .map(|word| u32::from_le_bytes(*word))
            .collect();
        trellis.code().integer(state(&ring, trellis.bits(), trellis.states(), n % tile)).unwrap()
    };
    (0..weight.in_features).map(value).collect()
}

#[test]
fn the_fast_path_of_trellises_is_its_definition_for_every_isa_and_shape_and_near_the_exact_one() {
    /// Inputs that share a scale.
    const BLOCK: usize = 128;
    let mut random = Random(8);
    let none = ["trellis-3-3inst", "trellis-2-L16-random", "trellis-4-inputs"];
    for name in none {
        let weight = random_weight(&mut random, name.parse().unwrap(), Float::Bf16, 32, 64);
        let cpu = Cpu::new(Isa::best(), 1, Precision::Fast);
        assert_eq!(cpu.prepare(&weight, false).precision(), Precision::Exact, "{name}");
    }
    for name in
        ["trellis-1", "trellis-2", "trellis-3", "trellis-4", "trellis-3-L16-1mad-one", "trellis-2-L10-mul1"]
    {
        let spec: CodecSpec = name.parse().unwrap();
        let CodecSpec::Trellis(trellis) = spec else { panic!("{name}") };
        for k in row_lengths(spec) {
            let weight = random_rows(&mut random, spec, Float::Bf16, N[N.len() - 1], k);
            let n = weight.out_features;
            let scales = |plane: usize| -> Vec<f32> {
                let bytes = weight.planes[plane].bytes().as_chunks::<2>().0;
                bytes.iter().map(|bytes| half::f16::from_le_bytes(*bytes).to_f32()).collect()
            };
            let inputs = scales(1);
            let outputs = if weight.planes.len() == 3 { scales(2) } else { vec![1.0; n] };
            let t_most = if k == 576 { T[T.len() - 1] } else { 17 };
            let mut x = random_input(&mut random, t_most * k);
            // A block of zeros, one below the least scale, and a very large one.
            let block = BLOCK.min(k);
            x[..block].fill(0.0);
            x[(t_most - 1) * k..][..block].iter_mut().for_each(|x| *x *= 1e-38);
            x[2 * k - block..2 * k].iter_mut().for_each(|x| *x *= 1e33);
            let quantized: Vec<Vec<_>> = x
                .chunks(k)
                .map(|x| {
                    let folded: Vec<f32> = x.iter().zip(&inputs).map(|(x, scale)| x * scale).collect();
                    folded.chunks(BLOCK).map(defined_quantization).collect()
                })
                .collect();
            let values: Vec<Vec<i32>> = (0..n).map(|n| code_values(&weight, trellis, n)).collect();
            let product = |(step, codes): &(f32, Vec<i32>), values: &[i32]| {
                (*step, codes.iter().zip(values).map(|(code, value)| code * value).sum::<i32>() as f32)
            };
            let mut expected = Vec::new();
            for x in &quantized {
                for (values, output) in values.iter().zip(&outputs) {
                    let blocks = x.iter().zip(values.chunks(BLOCK)).map(|(x, values)| product(x, values));
                    let sum = blocks.fold(0.0f32, |sum, (step, product)| step.mul_add(product, sum));
                    expected.push(sum * output);
                }
            }

            let mut decoded = vec![0.0; n * k];
            weight.decode(0..n, &mut decoded);
            for (i, y) in expected.iter().enumerate() {
                let (t, n) = (i / n, i % n);
                let (mut exact, mut half_steps, mut terms) = (0.0, 0.0, 0.0);
                for j in 0..k {
                    let (x, w) = (f64::from(x[t * k + j]), f64::from(decoded[n * k + j]));
                    exact += x * w;
                    let step = f64::from(quantized[t][j / BLOCK].0) / 2.0;
                    half_steps += f64::from(values[n][j]).abs() * f64::from(outputs[n]).abs() * step;
                    terms += (x * w).abs();
                }
                // Beside the steps: some roundings of f32 of terms that may cancel, and what is below 2^-126.
                let slack = (terms + half_steps) * 2f64.powi(-19) + 1e-30;
                let error = (f64::from(*y) - exact).abs();
                assert!(error <= half_steps + slack, "{spec} K {k} t {t} n {n}: {y}, {exact}");
            }

            for isa in Isa::available() {
                let cpu = Cpu::new(isa, 1, Precision::Fast);
                for first in [0, 9] {
                    for n_some in N.into_iter().filter(|some| first + some <= n) {
                        let op = cpu.prepare(&weight.rows(first..first + n_some), false);
                        assert_eq!(op.precision(), Precision::Fast);
                        assert_eq!(cpu.prepare(&weight, true).precision(), Precision::Exact);
                        for t in T.into_iter().filter(|t| *t <= t_most) {
                            if isa == Isa::Scalar && t * n_some * k > 100_000 {
                                continue;
                            }
                            let y = apply(&mut random, &*op, &x[..t * k]);
                            let expected = |i: usize| expected[i / n_some * n + first + i % n_some];
                            let differs = (0..y.len()).find(|i| !same(y[*i], expected(*i)));
                            assert_eq!(
                                differs.map(|i| (i / n_some, i % n_some, y[i], expected(i))),
                                None,
                                "{spec} {isa} T {t} N {n_some} from {first} K {k}: first t, n, found, expected"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_team_computes_several_layers_over_one_input_as_each_alone() {
    let mut random = Random(4);
    let affine = CodecSpec::all()[4];
    let trellis: CodecSpec = "trellis-3".parse().unwrap();
    for t in [1, 3, 70] {
        let x = random_input(&mut random, t * 576);
        let weights: Vec<Packed> =
            [(576, affine), (192, affine), (33, affine), (1024, trellis), (576, trellis)]
                .map(|(n, spec)| random_weight(&mut random, spec, Float::Bf16, n, 576))
                .into();
        for precision in [Precision::Exact, Precision::Fast] {
            let mut expected: Option<Vec<Vec<f32>>> = None;
            for threads in [1, 2, 3] {
                let cpu = Cpu::new(Isa::best(), threads, precision);
                let ops: Vec<_> = weights.iter().map(|weight| cpu.prepare(weight, false)).collect();
                let mut outs: Vec<Vec<f32>> =
                    weights.iter().map(|w| vec![f32::NAN; t * w.out_features]).collect();
                let mut work: Vec<(&dyn LinearOp, &mut [f32])> =
                    ops.iter().zip(&mut outs).map(|(op, out)| (&**op, out.as_mut_slice())).collect();
                cpu.linear(&Input::new(&x, 576), &mut work);
                let alone: Vec<Vec<f32>> = ops.iter().map(|op| apply(&mut random, &**op, &x)).collect();
                assert_eq!(outs, alone, "{threads} threads");
                assert_eq!(expected.get_or_insert(outs.clone()), &outs, "{threads} threads");
            }
        }
    }
}

#[test]
fn what_is_not_finite_in_the_input_reaches_every_output_it_belongs_to() {
    let mut random = Random(5);
    for spec in all_codecs() {
        let weight = random_rows(&mut random, spec, Float::Bf16, 7, 256).rows(0..7);
        for precision in [Precision::Exact, Precision::Fast] {
            let cpu = Cpu::new(Isa::best(), 1, precision);
            let op = cpu.prepare(&weight, false);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, 31, 200, 255] {
                    let mut x = random_input(&mut random, 3 * 256);
                    x[256 + at] = bad;
                    let y = apply(&mut random, &*op, &x);
                    for (i, y) in y.iter().enumerate() {
                        // An infinity times a weight of 0 is NaN, too.
                        assert_eq!(y.is_finite(), i / 7 != 1, "{spec} {precision} {bad} at {at}: {i} is {y}");
                    }
                }
            }
        }
    }
}

struct Products<'a> {
    x: &'a [f32],
    w: &'a [f32],
    shape: [usize; 3],
    x_stride: usize,
    out: &'a mut [f32],
}

impl Kernel for Products<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let [t, n, k] = self.shape;
        dot::products::<V>(self.x, self.x_stride, t, self.w, k + 1, n, k, self.out, n + 2);
    }
}

#[test]
fn products_of_any_shape_and_stride_are_the_defined_sums_and_touch_nothing_else() {
    let mut random = Random(6);
    for isa in Isa::available() {
        for shape in [[1, 1, 1], [1, 9, 64], [2, 5, 80], [3, 33, 31], [7, 4, 513], [9, 18, 1100], [4, 3, 0]] {
            let [t, n, k] = shape;
            let x_stride = k + 3;
            let x = random_input(&mut random, t * x_stride);
            let w = random_input(&mut random, n * (k + 1));
            let mut out = vec![7.5; t * (n + 2)];
            dispatch(isa, Products { x: &x, w: &w, shape, x_stride, out: &mut out });
            for (i, found) in out.iter().enumerate() {
                let (t, n_here) = (i / (n + 2), i % (n + 2));
                let expected = match (n_here < n, k) {
                    (false, _) => 7.5,
                    (_, 0) => 0.0,
                    _ => defined_dot(&x[t * x_stride..][..k], &w[n_here * (k + 1)..][..k]),
                };
                assert!(same(*found, expected), "{isa} {shape:?} {t} {n_here}: {found} is not {expected}");
            }
        }
    }
}
