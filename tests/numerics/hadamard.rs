//! `goldens/rotation`: compositions, matrices and signs of an independent implementation; the rotation
//! against its formula in f64, and on every instruction set against the definition.

use std::path::Path;

use proptest::prelude::*;
use serde_json::Value;
use sha2::{Digest, Sha256};

use tqc::isa::Isa;
use tqc::transform::hadamard::{SignWords, SignedHadamard, Size, core, largest_block, signs};

use crate::Random;

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/rotation/hadamard.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Negative entries as set bits, lowest first.
fn pack(negative: impl IntoIterator<Item = bool>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (i, negative) in negative.into_iter().enumerate() {
        if i % 8 == 0 {
            bytes.push(0);
        }
        *bytes.last_mut().unwrap() |= u8::from(negative) << (i % 8);
    }
    bytes
}

/// SHA-256 of the negative entries of a matrix as bits, rows in order without padding between them.
fn digest(matrix: &[i8]) -> String {
    hex(&Sha256::digest(pack(matrix.iter().map(|entry| *entry < 0))))
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

#[test]
fn cores_are_those_of_the_golden_bit_for_bit() {
    let golden = golden();
    let cores = golden["cores"].as_object().unwrap();
    assert!(cores.len() >= 33, "{} cores", cores.len());
    for (order, core_of_golden) in cores {
        let n: usize = order.parse().unwrap();
        let matrix = core(n).unwrap_or_else(|| panic!("order {order} is a core"));
        assert_eq!(digest(&matrix), core_of_golden["sha256"].as_str().unwrap(), "order {order}");
        let signs: String = matrix[..n].iter().map(|entry| if *entry < 0 { '-' } else { '+' }).collect();
        assert_eq!(signs, core_of_golden["row0"].as_str().unwrap(), "order {order}");
        let symmetric = (0..n * n).all(|at| matrix[at] == matrix[at % n * n + at / n]);
        assert_eq!(symmetric, core_of_golden["symmetric"].as_bool().unwrap(), "order {order}");
    }
}

#[test]
fn compositions_and_matrices_of_real_sizes_are_those_of_the_golden() {
    let golden = golden();
    let sizes = golden["sizes"].as_object().unwrap();
    assert!(sizes.len() >= 74, "{} sizes", sizes.len());
    let mut digests = 0;
    for (n, expected) in sizes {
        let size = Size::of(n.parse().unwrap()).unwrap_or_else(|| panic!("order {n} is covered"));
        let factors: Vec<u64> = size.factors().iter().map(|factor| u64::from(*factor)).collect();
        let mut needed = numbers(&expected["factors"]);
        // The golden writes Sylvester's matrix alone as one core of order 1.
        needed.retain(|factor| *factor != 1);
        assert_eq!(factors, needed, "order {n}");
        assert_eq!(
            u64::from(size.sylvester_log2()),
            expected["sylvester_log2"].as_u64().unwrap(),
            "order {n}"
        );
        assert_eq!(size.order().to_string(), *n);
        // The golden has digests up to 2048.
        if let Some(expected) = expected.get("sha256") {
            assert_eq!(digest(&size.matrix()), expected.as_str().unwrap(), "order {n}");
            digests += 1;
        }
    }
    assert!(digests >= 26, "{digests} digests");
}

#[test]
fn as_many_orders_are_covered_as_the_golden_counts_and_the_first_gaps_are_the_same() {
    let golden = golden();
    for (step, expected) in golden["coverage_up_to_32768_by_multiple_of"].as_object().unwrap() {
        let orders = (1..=32768usize).filter(|n| n.is_multiple_of(step.parse().unwrap()));
        let (covered, missing): (Vec<usize>, Vec<usize>) = orders.partition(|n| Size::of(*n).is_some());
        assert_eq!(covered.len() as u64, expected["covered"].as_u64().unwrap(), "multiples of {step}");
        assert_eq!((covered.len() + missing.len()) as u64, expected["of"].as_u64().unwrap());
        let first: Vec<u64> = missing.iter().take(10).map(|n| *n as u64).collect();
        assert_eq!(first, numbers(&expected["first_missing"]), "multiples of {step}");
        for n in missing.into_iter().take(10) {
            let block = largest_block(n);
            assert!(block < n && n.is_multiple_of(block) && Size::of(block).is_some(), "{n}: {block}");
        }
    }
}

#[test]
fn every_covered_order_up_to_1024_has_orthogonal_rows_in_integers() {
    for n in 1..=1024 {
        let Some(size) = Size::of(n) else { continue };
        // Rows as bits; the dot product of two is n − 2 · (places where they differ).
        let words = n.div_ceil(64);
        let mut bits = vec![0u64; n * words];
        for (row, bits) in size.rows().zip(bits.chunks_exact_mut(words)) {
            assert!(row.len() == n && row.iter().all(|entry| entry.abs() == 1), "order {n}: entries are ±1");
            for (j, entry) in row.into_iter().enumerate() {
                bits[j / 64] |= u64::from(entry < 0) << (j % 64);
            }
        }
        for i in 0..n {
            for j in 0..i {
                let pair = bits[i * words..][..words].iter().zip(&bits[j * words..]);
                let differ: u32 = pair.map(|(a, b)| (a ^ b).count_ones()).sum();
                assert_eq!(2 * differ as usize, n, "order {n}: rows {i} and {j}");
            }
        }
    }
}

#[test]
fn every_covered_order_up_to_2048_gives_back_n_times_a_random_vector_in_integers() {
    // H (Hᵀ v) = n v. If H Hᵀ were not n I, some row d of the difference would not be 0, and d · v = 0 for at
    // most one in 2^32 vectors of 32-bit integers. All pairs of rows would take half a minute.
    for n in 1025..=2048 {
        let Some(size) = Size::of(n) else { continue };
        let mut random = Random(n as u64);
        let v: Vec<i64> = (0..n).map(|_| (random.bits() >> 32) as i64).collect();
        let matrix = size.matrix();
        let mut turned = vec![0i64; n];
        for (row, v) in matrix.chunks(n).zip(&v) {
            assert!(row.iter().all(|entry| entry.abs() == 1), "order {n}: entries are ±1");
            turned.iter_mut().zip(row).for_each(|(sum, entry)| *sum += i64::from(*entry) * v);
        }
        for (i, row) in matrix.chunks(n).enumerate() {
            let back: i64 = row.iter().zip(&turned).map(|(entry, x)| i64::from(*entry) * x).sum();
            assert_eq!(back, n as i64 * v[i], "order {n}, element {i}");
        }
    }
}

#[test]
fn signs_are_those_of_the_golden() {
    let golden = golden();
    let vectors = golden["signs"].as_array().unwrap();
    assert!(vectors.len() >= 5, "{} vectors", vectors.len());
    for vector in vectors {
        let number = |key: &str| vector[key].as_u64().unwrap();
        let (seed, lane, n) = (number("seed"), number("lane") as u32, number("n") as usize);
        let mut words = SignWords::new(seed, lane);
        assert_eq!(format!("{:08x}", words.state()), vector["state0"].as_str().unwrap(), "{vector}");
        assert_eq!(
            format!("{:08x}", words.next().unwrap()),
            vector["first_word"].as_str().unwrap(),
            "{vector}"
        );
        let found = signs(seed, lane, n);
        assert_eq!(
            found.iter().filter(|negative| **negative).count() as u64,
            number("negatives"),
            "{vector}"
        );
        let bits = pack(found);
        assert_eq!(hex(&Sha256::digest(&bits)), vector["sha256_neg_bits"].as_str().unwrap(), "{vector}");
        if let Some(expected) = vector["neg_bits_hex_lsb_first"].as_str() {
            assert_eq!(hex(&bits), expected, "{vector}");
        }
    }
}

/// Every kind of order: Sylvester's alone, a core with 0 to 7 doublings, products of cores with 0 and 4,
/// cores beyond 512; two or three blocks.
const SHAPES: [(usize, usize); 31] = [
    (1, 1),
    (2, 2),
    (4, 4),
    (8, 8),
    (12, 12),
    (16, 16),
    (20, 20),
    (24, 24),
    (32, 32),
    (64, 64),
    (128, 128),
    (156, 156),
    (160, 160),
    (172, 172),
    (192, 192),
    (256, 256),
    (320, 320),
    (512, 512),
    (576, 576),
    (640, 640),
    (896, 896),
    (1024, 1024),
    (2048, 2048),
    (2560, 2560),
    (60, 20),
    (192, 64),
    (960, 320),
    (10944, 10944),
    (16640, 16640),
    (524, 524),
    (1048, 524),
];

fn rotation(n: usize, b: usize) -> SignedHadamard {
    SignedHadamard::new(signs(42, 0, n), Size::of(b).unwrap())
}

fn gaussian(count: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    (0..count).map(|_| random.normal() as f32).collect()
}

/// Column-major in `values`' place: `[rows, columns]` to `[columns, rows]`.
fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    (0..values.len())
        .map(|at| values[at % (values.len() / columns) * columns + at / (values.len() / columns)])
        .collect()
}

/// What the formula gives in f64: (s ∘ x) H / √b, or s ∘ (x Hᵀ) / √b, for every n values.
fn by_formula(rotation: &SignedHadamard, values: &[f32], forward: bool) -> Vec<f64> {
    let (n, b) = (rotation.len(), rotation.size().order());
    let sign = |at: usize| if rotation.signs()[at % n] { -1.0 } else { 1.0 };
    let mut out = vec![0.0; values.len()];
    for (i, row) in rotation.size().rows().enumerate() {
        for start in (0..values.len()).step_by(b) {
            if forward {
                let x = sign(start + i) * f64::from(values[start + i]);
                out[start..start + b].iter_mut().zip(&row).for_each(|(out, h)| *out += x * f64::from(*h));
            } else {
                let terms = values[start..start + b].iter().zip(&row);
                out[start + i] =
                    sign(start + i) * terms.map(|(x, h)| f64::from(*x) * f64::from(*h)).sum::<f64>();
            }
        }
    }
    out.iter_mut().for_each(|out| *out /= (b as f64).sqrt());
    out
}

/// Panics at the worst element if it is further off than f32 allows.
///
/// Every butterfly and every core rounds once, and so does the end: at most log₂ b + 3 roundings, each of at
/// most 2^-24 of a partial sum. A partial sum is at most √b times the norm of the block, a part of it that
/// falls as the roundings go on; and errors of the early ones reach an output with random signs. Measured
/// over these tests: about 1.3 times 2^-24 of the norm; three are allowed.
fn assert_near(found: &[f32], expected: &[f64], b: usize, what: &str) {
    for (start, (found, expected)) in found.chunks(b).zip(expected.chunks(b)).enumerate() {
        let norm = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
        let allowed = 3.0 * 2f64.powi(-24) * norm;
        let off = |i: &usize| (f64::from(found[*i]) - expected[*i]).abs();
        let worst = (0..found.len()).max_by(|i, j| off(i).total_cmp(&off(j))).unwrap();
        assert!(
            off(&worst) <= allowed,
            "{what}, block {start}, element {worst}: {} is not {} to {allowed:e}",
            found[worst],
            expected[worst]
        );
    }
}

#[test]
fn rows_and_columns_are_what_the_formula_gives_in_f64() {
    let mut scratch = Vec::new();
    for (n, b) in SHAPES {
        let rotation = rotation(n, b);
        let count = if n > 5000 { 1 } else { 3 };
        let values = gaussian(count * n, n as u64);
        let forward = by_formula(&rotation, &values, true);
        let inverse = by_formula(&rotation, &values, false);
        for isa in Isa::available() {
            let what = format!("{isa}, {n} values in blocks of {b}");
            let mut rows = values.clone();
            rotation.rotate_rows(&mut rows, n, isa, &mut scratch);
            assert_near(&rows, &forward, b, &format!("{what}: rows"));
            let mut rows = values.clone();
            rotation.unrotate_rows(&mut rows, n, isa, &mut scratch);
            assert_near(&rows, &inverse, b, &format!("{what}: rows, inverse"));
            // A column is what a row of the same values is.
            let mut columns = transposed(&values, n);
            rotation.rotate_columns(&mut columns, count, isa, &mut scratch);
            assert_near(&transposed(&columns, count), &forward, b, &format!("{what}: columns"));
            let mut columns = transposed(&values, n);
            rotation.unrotate_columns(&mut columns, count, isa, &mut scratch);
            assert_near(&transposed(&columns, count), &inverse, b, &format!("{what}: columns, inverse"));
        }
    }
}

#[test]
fn integers_are_rotated_exactly_where_the_square_root_is_one() {
    // √b is 4, 16 and 12: with integers that are small enough nothing is rounded, so the inverse gives them
    // back.
    for n in [16, 64, 256, 144 * 4, 1024] {
        let rotation = rotation(n, n);
        let root = (n as f64).sqrt() as usize;
        assert_eq!(root * root, n);
        let mut random = Random(n as u64);
        let values: Vec<f32> =
            (0..3 * n).map(|_| ((random.bits() % 201) as f32 - 100.0) * root as f32).collect();
        for isa in Isa::available() {
            let mut rotated = values.clone();
            rotation.rotate_rows(&mut rotated, n, isa, &mut Vec::new());
            assert!(rotated.iter().all(|value| value.fract() == 0.0), "{isa} {n}");
            assert_ne!(rotated, values);
            rotation.unrotate_rows(&mut rotated, n, isa, &mut Vec::new());
            assert_eq!(rotated, values, "{isa} {n}");
        }
    }
}

#[test]
fn the_inverse_restores_rows_and_columns_of_every_real_size_above_2048() {
    let (golden, mut scratch) = (golden(), Vec::new());
    let sizes = golden["sizes"].as_object().unwrap().keys().map(|n| n.parse::<usize>().unwrap());
    for n in sizes.filter(|n| *n > 2048) {
        let rotation = rotation(n, n);
        let values = gaussian(2 * n, 5);
        let expected: Vec<f64> = values.iter().map(|value| f64::from(*value)).collect();
        let isa = Isa::best();
        let mut rows = values.clone();
        rotation.rotate_rows(&mut rows, n, isa, &mut scratch);
        assert_near(
            &[rows.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32],
            &[expected.iter().map(|x| x * x).sum::<f64>().sqrt()],
            1,
            &format!("{n}: the norm"),
        );
        rotation.unrotate_rows(&mut rows, n, isa, &mut scratch);
        assert_near(&rows, &expected, n, &format!("{n}: rows"));
        let mut columns = values.clone();
        rotation.rotate_columns(&mut columns, 2, isa, &mut scratch);
        rotation.unrotate_columns(&mut columns, 2, isa, &mut scratch);
        assert_near(&columns, &expected, 2 * n, &format!("{n}: columns"));
    }
}

#[test]
fn one_element_moves_to_a_row_of_h_in_large_orders() {
    // x = e_i: x R is row i of H, with the sign of i, over √b; R c is column i.
    for n in [5120, 8192, 11008] {
        let (rotation, mut scratch) = (rotation(n, n), Vec::new());
        let root = (1.0 / (n as f64).sqrt()) as f32;
        for (i, row) in rotation.size().rows().enumerate().step_by(n / 7 + 1) {
            let sign = if rotation.signs()[i] { -root } else { root };
            let mut x = vec![0.0; n];
            x[i] = 1.0;
            rotation.rotate_rows(&mut x, n, Isa::best(), &mut scratch);
            let expected: Vec<f32> = row.iter().map(|entry| sign * f32::from(*entry)).collect();
            assert!(x == expected, "{n}, element {i}");
            x.fill(0.0);
            x[i] = 1.0;
            rotation.rotate_columns(&mut x, 1, Isa::best(), &mut scratch);
            assert!(x == expected, "{n}, element {i} of a column");
        }
    }
}

#[test]
fn the_matrix_is_orthogonal_and_is_what_multiplies_a_row() {
    for (n, b) in [(20, 20), (60, 20), (64, 64), (160, 160), (320, 320)] {
        let rotation = rotation(n, b);
        let matrix = rotation.matrix(Isa::best());
        let values = gaussian(n, 9);
        let mut expected = vec![0.0; n];
        for (i, row) in matrix.chunks(n).enumerate() {
            for (to, entry) in expected.iter_mut().zip(row) {
                *to += f64::from(values[i]) * f64::from(*entry);
            }
        }
        let mut rotated = values.clone();
        rotation.rotate_rows(&mut rotated, n, Isa::best(), &mut Vec::new());
        assert_near(&rotated, &expected, n, &format!("{n}"));
        for (i, a) in matrix.chunks(n).enumerate() {
            for (j, b) in matrix.chunks(n).enumerate() {
                let dot: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                let needed = if i == j { 1.0 } else { 0.0 };
                assert!((dot - needed).abs() < 1e-6, "{n}: rows {i} and {j} give {dot}");
            }
        }
    }
}

#[test]
fn every_isa_gives_the_bits_of_the_scalar_definition() {
    let mut scratch = Vec::new();
    for (n, b) in SHAPES.into_iter().chain([(4096, 4096), (5120, 5120)]) {
        let rotation = rotation(n, b);
        // Magnitudes from 2^-20 to 2^20, zeros of both signs, a subnormal.
        let mut random = Random(n as u64);
        let mut values: Vec<f32> = (0..n * 21)
            .map(|_| random.normal() as f32 * 2f32.powi((random.bits() % 41) as i32 - 20))
            .collect();
        values[n / 2] = -0.0;
        values[n - 1] = 1e-42;
        let rows = [SignedHadamard::rotate_rows, SignedHadamard::unrotate_rows];
        for (f, rotate) in rows.into_iter().enumerate() {
            let mut expected = values.clone();
            rotate(&rotation, &mut expected, n, Isa::Scalar, &mut scratch);
            for isa in Isa::available() {
                // Another offset from a cache line, and remains of an earlier call.
                let mut found = vec![7.0; 3];
                found.extend(&values);
                scratch.fill(f32::NAN);
                rotate(&rotation, &mut found[3..], n, isa, &mut scratch);
                assert_same(&found[3..], &expected, &format!("{isa}, rows of {n}, blocks of {b}, {f}"));
            }
        }
        let columns = [SignedHadamard::rotate_columns, SignedHadamard::unrotate_columns];
        for (f, rotate) in columns.into_iter().enumerate() {
            let mut expected = values.clone();
            rotate(&rotation, &mut expected, 21, Isa::Scalar, &mut scratch);
            for isa in Isa::available() {
                let mut found = values.clone();
                scratch.fill(f32::NAN);
                rotate(&rotation, &mut found, 21, isa, &mut scratch);
                assert_same(&found, &expected, &format!("{isa}, columns of {n}, blocks of {b}, {f}"));
            }
        }
    }
}

fn assert_same(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let differs = (0..found.len()).find(|i| found[*i].to_bits() != expected[*i].to_bits());
    if let Some(i) = differs {
        panic!("{what}: value {i} is {:e}, not {:e}", found[i], expected[i]);
    }
}

#[test]
fn a_row_is_the_same_alone_and_a_column_too() {
    let mut scratch = Vec::new();
    for (n, b) in SHAPES {
        let rotation = rotation(n, b);
        for isa in Isa::available().into_iter().skip(1) {
            // Sixteens of rows or columns and some more; more columns than go through a tile at once.
            let counts = if n <= 640 { &[1, 2, 3, 16, 17, 69, 600][..] } else { &[1, 2, 17, 69] };
            for count in counts.iter().copied() {
                let values = gaussian(count * n, 1);
                let mut rows = values.clone();
                rotation.rotate_rows(&mut rows, n, isa, &mut scratch);
                let mut columns = transposed(&values, n);
                rotation.rotate_columns(&mut columns, count, isa, &mut scratch);
                let what = format!("{isa}, {count} of {n} in blocks of {b}");
                assert_same(&transposed(&columns, count), &rows, &format!("{what}: columns beside rows"));
                for (alone, together) in values.chunks(n).zip(rows.chunks(n)) {
                    let mut alone = alone.to_vec();
                    rotation.rotate_rows(&mut alone, n, isa, &mut scratch);
                    assert_same(&alone, together, &what);
                }
            }
        }
    }
}

#[test]
fn runs_of_a_row_and_of_a_column_are_rotated_one_by_one() {
    let (n, mut scratch) = (96, Vec::new());
    let rotation = rotation(n, n);
    let values = gaussian(5 * 3 * n, 2);
    let mut one_by_one = values.clone();
    rotation.rotate_rows(&mut one_by_one, n, Isa::best(), &mut scratch);
    let mut rows = values.clone();
    rotation.rotate_rows(&mut rows, 3 * n, Isa::best(), &mut scratch);
    assert_same(&rows, &one_by_one, "three runs in a row");
    let mut upright = transposed(&values, 3 * n);
    rotation.rotate_columns(&mut upright, 5, Isa::best(), &mut scratch);
    assert_same(&transposed(&upright, 5), &one_by_one, "three runs in a column");
}

#[test]
fn nothing_is_rotated_where_there_is_nothing() {
    let rotation = rotation(12, 12);
    rotation.rotate_rows(&mut [], 12, Isa::best(), &mut Vec::new());
    rotation.rotate_columns(&mut [], 7, Isa::best(), &mut Vec::new());
}

#[test]
#[should_panic(expected = "rows of 30 values are not runs of 12")]
fn refuses_rows_that_are_not_whole_runs() {
    rotation(12, 12).rotate_rows(&mut [0.0; 60], 30, Isa::best(), &mut Vec::new());
}

#[test]
#[should_panic(expected = "30 rows are not runs of 12")]
fn refuses_columns_that_are_not_whole_runs() {
    rotation(12, 12).rotate_columns(&mut [0.0; 60], 2, Isa::best(), &mut Vec::new());
}

#[test]
#[should_panic(expected = "64 values are not blocks of 12")]
fn refuses_a_block_that_does_not_divide_the_values() {
    SignedHadamard::new(signs(42, 0, 64), Size::of(12).unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn any_order_and_any_cut_of_rows_or_columns_gives_the_same_bits(
        n in (1usize..700).prop_filter("covered", |n| Size::of(*n).is_some()),
        blocks in 1usize..3,
        count in 1usize..40,
        cut in 0usize..40,
        seed: u64,
    ) {
        let rotation = SignedHadamard::new(signs(seed, 1, n * blocks), Size::of(n).unwrap());
        let n = n * blocks;
        let values = gaussian(n * count, seed);
        let mut expected = values.clone();
        let mut scratch = Vec::new();
        rotation.rotate_rows(&mut expected, n, Isa::Scalar, &mut scratch);
        for isa in Isa::available() {
            let mut found = values.clone();
            let (first, second) = found.split_at_mut(n * cut.min(count));
            rotation.rotate_rows(first, n, isa, &mut scratch);
            rotation.rotate_rows(second, n, isa, &mut scratch);
            assert_same(&found, &expected, "rows");
            let mut columns = transposed(&values, n);
            rotation.rotate_columns(&mut columns, count, isa, &mut scratch);
            assert_same(&transposed(&columns, count), &expected, "columns");
            rotation.unrotate_columns(&mut columns, count, isa, &mut scratch);
            let back = transposed(&columns, count);
            let wide: Vec<f64> = values.iter().map(|value| f64::from(*value)).collect();
            assert_near(&back, &wide, n, "back");
        }
    }
}
