//! Trellis tiles with and without feedback: against the specification's figures, against a walk in f64, and against
//! themselves on other processors.

use std::sync::Arc;

use tqc::backend::{Packed, Stored};
use tqc::codec::trellis::{Along, Code, Scales, Trellis};
use tqc::codec::{CodecSpec, codec};
use tqc::isa::Isa;
use tqc::linalg::Symmetric;
use tqc::numeric::{Parallel, serial};
use tqc::quant::gptq::{GptqOptions, GptqReport, Refusal, Weighted};
use tqc::quant::ldlq::{nearest, solve};
use tqc::quant::trellis::{Encoder, Options, Workspace};
use tqc::quant::{QuantError, Repair, RowLoss, Rows};
use tqc::tensor::Float;

use crate::gptq::{correlated, gaussian, proxy, rows_of, threads};
use crate::{Encoded, Random};

const PASS: GptqOptions = GptqOptions { refit: false, sweeps: 0, act_order: false, damping: 0.01 };
const SWEPT: GptqOptions = GptqOptions { sweeps: 2, ..PASS };

fn trellis(bits: u32, along: Along, scales: Scales) -> CodecSpec {
    CodecSpec::Trellis(Trellis::new(bits, 12, Code::Bs12, along, scales).unwrap())
}

fn planes(spec: CodecSpec, rows: usize, k: usize) -> (Vec<Vec<u8>>, Vec<RowLoss>) {
    let layout = codec(spec).planes(crate::matrix(rows, k), Float::Bf16).unwrap();
    let planes = layout.iter().map(|p| vec![0xa5; p.bytes_of(p.begun(0..rows as u64))]);
    (planes.collect(), vec![RowLoss::default(); rows])
}

fn plain(spec: CodecSpec, rows: Rows<'_>, isa: Isa, parallel: Parallel<'_>) -> Result<Encoded, QuantError> {
    let (mut planes, mut losses) = planes(spec, rows.values.len() / rows.in_features, rows.in_features);
    let mut slices: Vec<&mut [u8]> = planes.iter_mut().map(Vec::as_mut_slice).collect();
    let repairs = nearest(spec, rows, isa, parallel, &mut slices, &mut losses)?;
    Ok(Encoded { planes, losses, repairs })
}

fn ldlq_on(
    spec: CodecSpec,
    weighted: Weighted<'_>,
    options: &GptqOptions,
    isa: Isa,
    parallel: Parallel<'_>,
) -> (Encoded, GptqReport) {
    let k = weighted.in_features;
    let (mut planes, mut losses) = planes(spec, weighted.values.len() / k, k);
    let mut slices: Vec<&mut [u8]> = planes.iter_mut().map(Vec::as_mut_slice).collect();
    let (report, repairs) = solve(spec, weighted, options, isa, parallel, &mut slices, &mut losses).unwrap();
    (Encoded { planes, losses, repairs }, report)
}

fn ldlq(spec: CodecSpec, weighted: Weighted<'_>, options: &GptqOptions) -> (Encoded, GptqReport) {
    ldlq_on(spec, weighted, options, Isa::best(), &serial)
}

fn identity(k: usize) -> Symmetric {
    let mut full = vec![0.0; k * k];
    full.iter_mut().step_by(k + 1).for_each(|one| *one = 1.0);
    Symmetric::from_full(&full, k)
}

#[test]
fn the_error_on_normal_weights_is_the_specifications() {
    // Section 2.2, `bs12` at L = 12 and its operating scale; on rows and columns of unlike size too.
    let (n, k) = (512, 512);
    for (bits, expected) in [(1, 0.2764), (2, 0.0718), (3, 0.01868), (4, 0.00491)] {
        for along in [Along::Outputs, Along::Inputs] {
            let mut random = Random(11);
            let sizes = |random: &mut Random, count| -> Vec<f64> {
                (0..count).map(|_| (0.6 * random.normal()).exp()).collect()
            };
            let (rows, columns) = (sizes(&mut random, n), sizes(&mut random, k));
            let normal: Vec<f64> = (0..n * k).map(|_| random.normal()).collect();
            let values: Vec<f32> =
                (0..n * k).map(|i| (0.01 * normal[i] * rows[i / k] * columns[i % k]) as f32).collect();
            let spec = trellis(bits, along, Scales::Both);
            let rows_in = Rows { values: &values, in_features: k, float: Float::Bf16, ahead: &[] };
            let encoded = plain(spec, rows_in, Isa::best(), &serial).unwrap();
            let decoded = encoded.decode(spec, rows_in);
            // Each weight in deviations of its own.
            let error: f64 = (0..n * k)
                .map(|i| {
                    let own = 0.01 * rows[i / k] * columns[i % k];
                    ((f64::from(values[i]) - f64::from(decoded[i])) / own).powi(2)
                })
                .sum();
            let found = error / (n * k) as f64;
            assert!((found / expected - 1.0).abs() < 0.02, "{spec}: {found} for {expected}");
        }
    }
}

#[test]
fn one_scale_for_each_tile_costs_what_unlike_neighbours_cost() {
    // Section 2.3: deviations spread by 0.4 along the tile cost 53 % at three bits, and none across it.
    let (n, k) = (256, 512);
    let mut random = Random(5);
    let sizes: Vec<f64> = (0..k).map(|_| (0.4 * random.normal()).exp()).collect();
    let values: Vec<f32> = (0..n * k).map(|i| (0.02 * random.normal() * sizes[i % k]) as f32).collect();
    let rows = Rows { values: &values, in_features: k, float: Float::Bf16, ahead: &[] };
    let error = |along, scales| {
        let encoded = plain(trellis(3, along, scales), rows, Isa::best(), &serial).unwrap();
        let sum = |of: fn(&RowLoss) -> f64| encoded.losses.iter().map(of).sum::<f64>();
        sum(|loss| loss.error) / sum(|loss| loss.energy)
    };
    let both = error(Along::Inputs, Scales::Both);
    assert!((0.9..1.1).contains(&(error(Along::Outputs, Scales::One) / both)));
    assert!(error(Along::Inputs, Scales::One) > 1.3 * both);
}

#[test]
fn every_processor_and_any_threads_find_the_same_bytes() {
    let (n, k) = (64, 96);
    let values = gaussian(n * k, Float::Bf16, 3);
    let hessian = correlated(k, 300, 4);
    let weighted =
        Weighted { values: &values, in_features: k, float: Float::Bf16, hessian: &hessian, outputs: None };
    for (along, scales) in
        [(Along::Outputs, Scales::Both), (Along::Inputs, Scales::Both), (Along::Outputs, Scales::One)]
    {
        for bits in [2, 3] {
            let spec = trellis(bits, along, scales);
            let options = GptqOptions { act_order: along == Along::Outputs && bits == 2, ..SWEPT };
            let (expected, report) = ldlq_on(spec, weighted, &options, Isa::Scalar, &serial);
            for isa in Isa::available() {
                let parallel: [Parallel<'_>; 2] = [&serial, &threads];
                for parallel in parallel {
                    let (found, other) = ldlq_on(spec, weighted, &options, isa, parallel);
                    assert!(found.planes == expected.planes, "{spec} {isa}");
                    assert_eq!((found.losses, &other), (expected.losses.clone(), &report), "{spec} {isa}");
                }
            }
        }
    }
}

#[test]
fn without_correlation_there_is_no_feedback() {
    let (n, k) = (64, 128);
    let values = gaussian(n * k, Float::Bf16, 8);
    let hessian = identity(k);
    let weighted =
        Weighted { values: &values, in_features: k, float: Float::Bf16, hessian: &hessian, outputs: None };
    // Four bits: feedback's own allowance for larger targets is nothing there.
    for along in [Along::Outputs, Along::Inputs] {
        let spec = trellis(4, along, Scales::Both);
        let expected = plain(spec, rows_of(weighted), Isa::best(), &serial).unwrap();
        let (found, report) = ldlq(spec, weighted, &PASS);
        assert!(found.planes == expected.planes, "{spec}");
        assert_eq!((report.damping, report.loss), (Some(0.01), report.nearest_loss));
    }
}

/// M of MᵀDM = H + λ I, left of the diagonal: eliminates the last index first.
fn eliminated(h: &Symmetric, damping: f64) -> Vec<f64> {
    let (k, full) = (h.n(), h.to_full());
    let mean = (0..k).map(|i| f64::from(full[i * k + i])).sum::<f64>() / k as f64;
    let mut s: Vec<f64> = full.iter().map(|h| f64::from(*h)).collect();
    (0..k).for_each(|i| s[i * k + i] += damping * mean);
    let mut m = vec![0.0; k * k];
    for last in (0..k).rev() {
        let d = s[last * k + last];
        for j in 0..last {
            m[last * k + j] = s[last * k + j] / d;
        }
        for i in 0..last {
            for j in 0..last {
                s[i * k + j] -= m[last * k + i] * m[last * k + j] * d;
            }
        }
    }
    m
}

/// LDLQ as published, in f64: H + λ I = L D Lᵀ from the last column backwards, no lazy products.
fn walked(weighted: Weighted<'_>, trellis: Trellis, damping: f64, forwards: bool) -> f64 {
    let (k, values) = (weighted.in_features, weighted.values);
    let n = values.len() / k;
    let full = weighted.hessian.to_full();
    let m = eliminated(weighted.hessian, damping);
    // One scale for each output and each input, from the encoder itself: what it stored.
    let spec = CodecSpec::Trellis(trellis);
    let (encoded, _) = ldlq(spec, weighted, &PASS);
    let half = |bytes: &[u8]| half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f64();
    let inputs: Vec<f64> = encoded.planes[1].chunks(2).map(half).collect();
    let outputs: Vec<f64> = encoded.planes[2].chunks(2).map(half).collect();
    let encoder =
        Encoder::new(trellis.code(), trellis.bits(), trellis.states(), n, Options::default()).unwrap();
    let (mut workspace, mut words) = (Workspace::new(), vec![0; encoder.words()]);
    let mut errors = vec![0.0; n * k];
    for c in 0..k {
        let scale = |r: usize| inputs[c] * outputs[r] * trellis.code().unit();
        let mut x = vec![0.0f32; n];
        for (r, x) in x.iter_mut().enumerate() {
            let mut target = f64::from(values[r * k + c]);
            // The mistake of handing errors to the wrong side.
            let by = |i: usize| if forwards { m[c * k + i] } else { -m[c * k + i] };
            target += (0..c).map(|i| errors[r * k + i] * by(i)).sum::<f64>();
            *x = (target / scale(r)) as f32;
        }
        let mut found = vec![0.0f32; n];
        encoder.encode(&mut workspace, &x, Isa::best(), &mut words, &mut found).unwrap();
        for (r, value) in found.iter().enumerate() {
            let decoded = f64::from(*value) * inputs[c] * outputs[r];
            errors[r * k + c] = f64::from(values[r * k + c]) - decoded;
        }
    }
    let mut loss = 0.0;
    for e in errors.chunks(k) {
        for (i, e_i) in e.iter().enumerate() {
            loss += e_i * e.iter().zip(&full[i * k..]).map(|(e, h)| e * f64::from(*h)).sum::<f64>();
        }
    }
    loss
}

#[test]
fn feedback_is_that_of_a_walk_in_f64_and_worth_its_while() {
    let (n, k) = (64, 160);
    let values = gaussian(n * k, Float::Bf16, 1);
    let hessian = correlated(k, 600, 2);
    let weighted =
        Weighted { values: &values, in_features: k, float: Float::Bf16, hessian: &hessian, outputs: None };
    for bits in [2, 3] {
        let own = Trellis::of(bits).unwrap();
        let spec = CodecSpec::Trellis(own);
        let (found, report) = ldlq(spec, weighted, &PASS);
        assert_eq!((report.damping, &report.refused[..], report.penalty), (Some(0.01), &[][..], None));
        let exact = proxy(spec, weighted, &found);
        assert!((report.loss / exact - 1.0).abs() < 1e-3, "{report:?}, {exact}");
        let expected = walked(weighted, own, 0.01, true);
        assert!((report.loss / expected - 1.0).abs() < 0.02, "{bits} bits: {} for {expected}", report.loss);
        assert!(report.loss < 0.6 * report.nearest_loss, "{report:?}");
        assert!(walked(weighted, own, 0.01, false) > 1.5 * report.loss, "the wrong sign shows");
        // Each sweep and refit only lowers the loss.
        let mut last = report.loss;
        for sweeps in [1, 3] {
            let (found, report) = ldlq(spec, weighted, &GptqOptions { sweeps, ..PASS });
            let most = if sweeps == 1 { 0.95 } else { 0.995 };
            assert!(report.loss < most * last, "{sweeps} sweeps: {} after {last}", report.loss);
            let exact = proxy(spec, weighted, &found);
            assert!((report.loss / exact - 1.0).abs() < 1e-3, "{report:?}, {exact}");
            last = report.loss;
        }
    }
}

/// tr(E H Eᵀ G) in f64.
fn two_sided(errors: &[f64], h: &Symmetric, g: &Symmetric) -> f64 {
    let (k, n) = (h.n(), g.n());
    let (h, g) = (h.to_full(), g.to_full());
    let product =
        |e: &[f64], j: usize| e.iter().zip(&h[j * k..]).map(|(e, h)| e * f64::from(*h)).sum::<f64>();
    let along: Vec<f64> =
        errors.chunks(k).flat_map(|e| (0..k).map(move |j| (e, j))).map(|(e, j)| product(e, j)).collect();
    let pair = |a: usize, b: usize| -> f64 {
        along[a * k..][..k].iter().zip(&errors[b * k..]).map(|(x, e)| x * e).sum()
    };
    (0..n * n).map(|at| f64::from(g[at]) * pair(at / n, at % n)).sum()
}

fn errors_of(spec: CodecSpec, weighted: Weighted<'_>, encoded: &Encoded) -> Vec<f64> {
    let decoded = encoded.decode(spec, rows_of(weighted));
    weighted.values.iter().zip(&decoded).map(|(w, d)| f64::from(*w) - f64::from(*d)).collect()
}

#[test]
fn rows_of_tiles_make_up_for_those_before_where_errors_of_outputs_go_together() {
    let (n, k) = (512, 96);
    let values = gaussian(n * k, Float::Bf16, 31);
    let hessian = correlated(k, 400, 32);
    // Row r and row r + 256, of the other row of tiles, are neighbours.
    let near = correlated(n, 2000, 33).to_full();
    let place = |r: usize| r % 256 * 2 + r / 256;
    let full: Vec<f32> = (0..n * n).map(|at| near[place(at / n) * n + place(at % n)]).collect();
    let g = Symmetric::from_full(&full, n);
    let alone =
        Weighted { values: &values, in_features: k, float: Float::Bf16, hessian: &hessian, outputs: None };
    let both = Weighted { outputs: Some(&g), ..alone };
    let own = Trellis::of(3).unwrap();
    let spec = CodecSpec::Trellis(own);
    let (found, report) = ldlq(spec, both, &SWEPT);
    assert!(report.two_sided && report.refused.is_empty(), "{report:?}");
    let exact = two_sided(&errors_of(spec, both, &found), &hessian, &g);
    assert!((report.loss / exact - 1.0).abs() < 1e-3, "{report:?}, {exact}");
    let (one_sided, _) = ldlq(spec, alone, &PASS);
    let without = two_sided(&errors_of(spec, alone, &one_sided), &hessian, &g);
    assert!(exact < 0.8 * without, "{exact}, and {without} if outputs are not known to go together");

    // The same walk in f64: the second row of tiles aims at what makes up for the first.
    let (b, m) = (eliminated(&g, 0.01), eliminated(&hessian, 0.01));
    let half = |bytes: &[u8]| half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f64();
    let inputs: Vec<f64> = found.planes[1].chunks(2).map(half).collect();
    let outputs: Vec<f64> = found.planes[2].chunks(2).map(half).collect();
    let encoder = Encoder::new(own.code(), 3, own.states(), 256, Options::default()).unwrap();
    let (mut workspace, mut words, mut decoded) =
        (Workspace::new(), vec![0; encoder.words()], vec![0.0f32; 256]);
    let mut errors = vec![0.0; n * k];
    for first in [0, 256] {
        let mut handed = vec![0.0; 256 * k];
        for r in 0..256 {
            for c in 0..k {
                let before: f64 = (0..first).map(|i| b[(first + r) * n + i] * errors[i * k + c]).sum();
                let inside: f64 = (0..r).map(|i| b[(first + r) * n + first + i] * handed[i * k + c]).sum();
                handed[r * k + c] = before - inside;
            }
        }
        for c in 0..k {
            let mut x = vec![0.0f32; 256];
            for (r, x) in x.iter_mut().enumerate() {
                let left = |i: usize| errors[(first + r) * k + i] + handed[r * k + i];
                let target = f64::from(values[(first + r) * k + c])
                    + handed[r * k + c]
                    + (0..c).map(|i| left(i) * m[c * k + i]).sum::<f64>();
                *x = (target / (inputs[c] * outputs[first + r] * own.code().unit())) as f32;
            }
            encoder.encode(&mut workspace, &x, Isa::best(), &mut words, &mut decoded).unwrap();
            for (r, value) in decoded.iter().enumerate() {
                let at = (first + r) * k + c;
                errors[at] = f64::from(values[at]) - f64::from(*value) * inputs[c] * outputs[first + r];
            }
        }
    }
    let expected = two_sided(&errors, &hessian, &g);
    assert!((exact / expected - 1.0).abs() < 0.02, "{exact} for {expected}");
}

#[test]
fn two_sided_searches_agree_everywhere_and_fall_back_where_outputs_say_nothing() {
    for (along, act_order, n, k) in [(Along::Inputs, false, 96, 256), (Along::Outputs, true, 512, 32)] {
        let values = gaussian(n * k, Float::Bf16, 41);
        let (hessian, g) = (correlated(k, 600, 42), correlated(n, 300, 43));
        let weighted = Weighted {
            values: &values,
            in_features: k,
            float: Float::Bf16,
            hessian: &hessian,
            outputs: Some(&g),
        };
        let spec = trellis(2, along, Scales::Both);
        let options = GptqOptions { act_order, ..PASS };
        let (expected, report) = ldlq(spec, weighted, &options);
        let exact = two_sided(&errors_of(spec, weighted, &expected), &hessian, &g);
        assert!((report.loss / exact - 1.0).abs() < 1e-3 && report.loss < report.nearest_loss, "{report:?}");
        for isa in Isa::available() {
            for parallel in [&serial as Parallel<'_>, &threads] {
                let (found, again) = ldlq_on(spec, weighted, &options, isa, parallel);
                assert!(found.planes == expected.planes && again == report, "{along:?} {isa}");
            }
        }
        // Outputs that all cost alike and by themselves: one side, and no sweeps.
        let (expected, _) = ldlq(spec, Weighted { outputs: None, ..weighted }, &PASS);
        let (found, _) = ldlq(spec, Weighted { outputs: Some(&identity(n)), ..weighted }, &SWEPT);
        assert!(found.planes == expected.planes, "{along:?}");
        let (found, report) = ldlq(spec, Weighted { outputs: Some(&Symmetric::new(n)), ..weighted }, &PASS);
        let stands_in = plain(spec, rows_of(weighted), Isa::best(), &serial).unwrap();
        assert!(report.damping.is_none() && found.planes == stands_in.planes, "{report:?}");
    }
}

#[test]
fn columns_of_one_tile_cannot_make_up_for_each_other_and_the_penalty_says_so() {
    let (n, k) = (64, 256);
    let values = gaussian(n * k, Float::Bf16, 6);
    let hessian = correlated(k, 800, 7);
    let weighted =
        Weighted { values: &values, in_features: k, float: Float::Bf16, hessian: &hessian, outputs: None };
    let loss = |along| ldlq(trellis(3, along, Scales::Both), weighted, &PASS).1;
    let (outputs, inputs) = (loss(Along::Outputs), loss(Along::Inputs));
    let penalty = inputs.penalty.unwrap();
    let found = inputs.loss / outputs.loss;
    assert!(penalty > 1.2 && (found / penalty - 1.0).abs() < 0.15, "{found} where {penalty} is expected");
}

#[test]
fn what_has_no_factor_or_no_end_falls_back_and_is_told() {
    let (n, k) = (32, 128);
    let values = gaussian(n * k, Float::Bf16, 9);
    // Eight tokens for 128 channels, and one of those without any.
    let mut random = Random(10);
    let x: Vec<f32> = (0..8 * k).map(|i| if i % k == 5 { 0.0 } else { random.normal() as f32 }).collect();
    let mut hessian = Symmetric::new(k);
    hessian.add_products(&x, Isa::best(), &serial);
    let spec = trellis(2, Along::Outputs, Scales::Both);
    let weighted =
        Weighted { values: &values, in_features: k, float: Float::Bf16, hessian: &hessian, outputs: None };
    let (_, report) = ldlq(spec, weighted, &GptqOptions { damping: 1e-9, ..SWEPT });
    assert!(report.loss <= report.nearest_loss && report.dead_columns == 1, "{report:?}");

    let mut full = hessian.to_full();
    full[3 * k + 3] = f32::INFINITY;
    let infinite = Symmetric::from_full(&full, k);
    let weighted = Weighted { hessian: &infinite, ..weighted };
    let (found, report) = ldlq(spec, weighted, &SWEPT);
    assert_eq!((report.damping, &report.refused[..]), (None, &[(0.01, Refusal::NonFinite)][..]));
    let expected = plain(spec, rows_of(weighted), Isa::best(), &serial).unwrap();
    assert!(found.planes == expected.planes, "what stands in is stored");
}

#[test]
fn errors_that_grow_under_feedback_have_a_ceiling() {
    // Eight tokens for 32 channels, and hardly any damping: directions without any cost, along which errors grow.
    let (n, k) = (32, 32);
    let spec = trellis(2, Along::Outputs, Scales::Both);
    let mut refused = 0;
    for seed in 0..60 {
        let values = gaussian(n * k, Float::Bf16, 100 + seed);
        let mut random = Random(200 + seed);
        let x: Vec<f32> = (0..8 * k).map(|_| random.normal() as f32).collect();
        let mut hessian = Symmetric::new(k);
        hessian.add_products(&x, Isa::best(), &serial);
        let weighted = Weighted {
            values: &values,
            in_features: k,
            float: Float::Bf16,
            hessian: &hessian,
            outputs: None,
        };
        let (found, report) = ldlq(spec, weighted, &GptqOptions { damping: 1e-5, ..PASS });
        refused +=
            report.refused.iter().filter(|(_, why)| matches!(why, Refusal::ErrorCeiling { .. })).count();
        let worst = |encoded: &Encoded| {
            let costs =
                errors_of(spec, weighted, encoded).into_iter().zip(hessian.diagonal().into_iter().cycle());
            costs.map(|(e, h)| e * e * f64::from(h)).fold(0.0, f64::max)
        };
        let nearest = worst(&plain(spec, rows_of(weighted), Isa::best(), &serial).unwrap());
        assert!(report.damping.is_some() && worst(&found) < 16.01 * nearest, "{report:?}");
    }
    assert!(refused > 0, "an error was above the ceiling");
}

#[test]
fn zeros_stay_zeros_and_what_leaves_no_room_for_a_scale_is_refused() {
    let (n, k) = (32, 64);
    let mut values = gaussian(n * k, Float::Bf16, 12);
    values[3 * k..4 * k].fill(0.0);
    (0..n).for_each(|r| values[r * k + 7] = 0.0);
    for along in [Along::Outputs, Along::Inputs] {
        let spec = trellis(3, along, Scales::Both);
        let rows = Rows { values: &values, in_features: k, float: Float::Bf16, ahead: &[] };
        let encoded = plain(spec, rows, Isa::best(), &serial).unwrap();
        let decoded = encoded.decode(spec, rows);
        assert!(decoded[3 * k..4 * k].iter().all(|w| *w == 0.0));
        assert!((0..n).all(|r| decoded[r * k + 7] == 0.0));
        assert_eq!(encoded.repairs, Default::default());

        let large: Vec<f32> = values.iter().map(|w| w * 1e34).collect();
        let rows = Rows { values: &large, ..rows };
        let error = plain(spec, rows, Isa::best(), &serial).unwrap_err();
        assert!(matches!(error, QuantError::ScaleOverflow { .. }), "{error}");
        let small: Vec<f32> = values.iter().map(|w| w * 1e-20).collect();
        let rows = Rows { values: &small, ..rows };
        assert!(plain(spec, rows, Isa::best(), &serial).unwrap().repairs.scale_underflow > 0);
    }
}

#[test]
fn weights_that_are_cut_off_are_counted() {
    let (n, k) = (256, 512);
    let mut values = gaussian(n * k, Float::Bf16, 22);
    values[100 * k + 77] = 1e3;
    for along in [Along::Outputs, Along::Inputs] {
        for scales in [Scales::Both, Scales::One] {
            let rows = Rows { values: &values, in_features: k, float: Float::Bf16, ahead: &[] };
            let encoded = plain(trellis(3, along, scales), rows, Isa::best(), &serial).unwrap();
            let half = |bytes: &[u8]| half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
            let first: Vec<f32> = encoded.planes[1].chunks(2).map(half).collect();
            let second: Vec<f32> = encoded
                .planes
                .get(2)
                .map_or(vec![1.0; n.max(k)], |plane| plane.chunks(2).map(half).collect());
            let far = |i: &usize| {
                let (first, second) = match along {
                    Along::Outputs => (first[i % k], second[i / k]),
                    Along::Inputs => (first[i / k], second[i % k]),
                };
                // The farthest value of `bs12` is −510.
                values[*i].abs() > 1020.0 * first * second
            };
            let expected = (0..n * k).filter(far).count() as u64;
            assert!(expected > 0, "{along:?} {scales:?}");
            let counted = encoded.repairs.rows().find(|(kind, _)| *kind == Repair::OutOfReach);
            assert_eq!(counted, Some((Repair::OutOfReach, expected)), "{along:?} {scales:?}");
        }
    }
}

/// A window of a ring as a person would read it: bit by bit.
fn window(ring: &[u8], bits: usize, states: usize, t: usize) -> u32 {
    let length = 8 * ring.len();
    let first = length - (t + 1) * bits;
    (0..states)
        .map(|i| (first + i) % length)
        .enumerate()
        .fold(0, |sum, (i, bit)| sum | u32::from(ring[bit / 8] >> (bit % 8) & 1) << i)
}

#[test]
fn weights_are_what_the_format_says_and_rows_decode_alone() {
    // Two matrices, one on the other, as experts are.
    let (experts, n, k) = (2, 96, 64);
    let mut random = Random(13);
    for (bits, states, along) in [(1, 10, Along::Outputs), (3, 12, Along::Outputs), (4, 16, Along::Inputs)] {
        let own = Trellis::new(bits, states, Code::OneMad, along, Scales::Both).unwrap();
        let spec = CodecSpec::Trellis(own);
        let layout = codec(spec).planes(crate::matrix(n, k), Float::Bf16).unwrap();
        let stored: Vec<Vec<u8>> = layout
            .iter()
            .map(|plane| {
                let bytes = plane.bytes_of(plane.begun(0..(experts * n) as u64));
                match plane.suffix {
                    "weight" => (0..bytes).map(|_| random.bits() as u8).collect(),
                    _ => (0..bytes / 2)
                        .flat_map(|_| half::f16::from_f64(0.1 * random.normal()).to_le_bytes())
                        .collect(),
                }
            })
            .collect();
        let half = |plane: usize, i: usize| {
            half::f16::from_le_bytes([stored[plane][2 * i], stored[plane][2 * i + 1]]).to_f32()
        };
        let tile = if along == Along::Outputs { 96 } else { 64 };
        let ring = tile * bits as usize / 8;
        let expected = |row: usize, c: usize| {
            let (number, t) = match along {
                Along::Outputs => ((row / tile) * k + c, row % tile),
                Along::Inputs => (row, c),
            };
            let state = window(&stored[0][number * ring..][..ring], bits as usize, states as usize, t);
            let x = state.wrapping_mul(34_038_481).wrapping_add(76_625_530);
            let value = x.to_le_bytes().map(i32::from).iter().sum::<i32>() - 510;
            let (input, output) = (row / n * k + c, row);
            let (first, second) = match along {
                Along::Outputs => (half(1, input), half(2, output)),
                Along::Inputs => (half(1, output), half(2, input)),
            };
            value as f32 * first * second
        };
        let planes = stored.iter().map(|bytes| Stored::Owned(Arc::new(bytes.clone()), 0..bytes.len()));
        let mut weight = Packed::whole(spec, Float::Bf16, n, k, planes.collect());
        weight.out_features = experts * n;
        for rows in [0..192, 96..192, 0..1, 50..130, 95..97, 191..192] {
            let mut out = vec![f32::NAN; rows.len() * k];
            weight.decode(rows.clone(), &mut out);
            let mut again = vec![f32::NAN; rows.len() * k];
            weight.rows(rows.clone()).decode(0..rows.len(), &mut again);
            assert_eq!(out, again, "{spec} {rows:?}");
            for (i, found) in out.iter().enumerate() {
                assert_eq!(*found, expected(rows.start + i / k, i % k), "{spec}, {rows:?}: {i}");
            }
        }
    }
}
