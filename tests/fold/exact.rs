//! The rules of a fold, carried out in f64 by plain loops on the plan's own words, leave a second implementation's
//! logits as they were; the program's f32 leaves its own runtime's and loses nothing that cannot be undone.

use std::collections::BTreeMap;
use std::sync::Arc;

use tqc::arch::Part;
use tqc::backend::Precision;
use tqc::backend::cpu::Cpu;
use tqc::fold::{Prepared, parity, prepare};
use tqc::isa::Isa;
use tqc::plan::{Plan, RotationPlan, What};
use tqc::runtime::{Model as Runtime, Want, Weights};
use tqc::transform::hadamard::signs;
use tqc::transform::{Axis, Panel};

use crate::common::*;
use crate::plain::{Plain, difference, widen};
use crate::reference::Reference;
use crate::*;

/// R [L, L], row-major: signs and Hadamard blocks from their definition.
pub fn rotation(plan: &Plan, of: &RotationPlan, lane: u32) -> Vec<f64> {
    let (n, b) = (of.len, of.block);
    let signs = signs(plan.recipe.transform.rotation.seed, lane, n);
    let h = of.size.as_ref().expect("a Hadamard rotation").matrix();
    let mut r = vec![0.0; n * n];
    for i in 0..n {
        for j in (0..n).filter(|j| j / b == i / b) {
            let sign = if signs[i] { -1.0 } else { 1.0 };
            r[i * n + j] = sign * f64::from(h[i % b * b + j % b]) / (b as f64).sqrt();
        }
    }
    r
}

/// Every run of L along the axis of a matrix [rows, columns]: x R.
pub fn rotate(matrix: &mut [f64], columns: usize, axis: Axis, r: &[f64]) {
    let n = r.len().isqrt();
    let times = |x: &[f64]| -> Vec<f64> {
        (0..n).map(|j| x.iter().enumerate().map(|(i, x)| x * r[i * n + j]).sum()).collect()
    };
    match axis {
        Axis::Input => {
            for run in matrix.chunks_exact_mut(n) {
                let turned = times(run);
                run.copy_from_slice(&turned);
            }
        }
        Axis::Output => {
            for block in matrix.chunks_exact_mut(n * columns) {
                for column in 0..columns {
                    let run: Vec<f64> = (0..n).map(|row| block[row * columns + column]).collect();
                    for (row, value) in times(&run).into_iter().enumerate() {
                        block[row * columns + column] = value;
                    }
                }
            }
        }
    }
}

pub fn scale(matrix: &mut [f64], columns: usize, axis: Axis, factors: &[f64]) {
    for (at, value) in matrix.iter_mut().enumerate() {
        let (row, column) = (at / columns, at % columns);
        *value *= match axis {
            Axis::Input => factors[column],
            Axis::Output => factors[row % factors.len()],
        };
    }
}

/// The layer number in a path.
pub fn layer(path: &str) -> u32 {
    path.split('.').find_map(|word| word.parse().ok()).expect("a layer's path")
}

/// A checkpoint's tensors by name, in f64.
pub fn tensors(source: &Model) -> BTreeMap<String, Vec<f64>> {
    let all = source.shards.iter().flatten();
    all.map(|t| (t.name.clone(), t.floats().into_iter().map(f64::from).collect())).collect()
}

/// The folded tensors, in the Hugging Face layout; the draft head's c is given. Only Hadamard rotations and gains.
pub fn folded(plan: &Plan, source: &Model, c: f64) -> BTreeMap<String, Vec<f64>> {
    let fold = plan.fold.as_ref().expect("a fold");
    let centre = if plan.model.zero_centred { 1.0 } else { 0.0 };
    let of = tensors(source);
    let gain =
        |norm: &str| -> Vec<f64> { of[&format!("{norm}.weight")].iter().map(|w| w + centre).collect() };
    let final_gain = gain(&plan.model.final_norm);
    let draft = || -> Vec<f64> {
        let ratio: Vec<f64> = gain("mtp.norm").iter().zip(&final_gain).map(|(m, f)| m / f).collect();
        let size = (ratio.iter().map(|d| d * d).sum::<f64>() / ratio.len() as f64).sqrt();
        ratio.into_iter().map(|d| d / size).collect()
    };
    let mut result = BTreeMap::new();
    for module in &plan.modules {
        let name = &plan.checkpoint.tensors()[module.tensor].name;
        let mut matrix = of[name].clone();
        let vector = module.output.shape.0.len() == 1;
        let columns = *module.output.shape.0.last().unwrap() as usize;
        for step in &module.steps {
            let axis = if vector { Axis::Input } else { step.axis };
            match &step.what {
                What::Neutral => matrix.fill(f64::from(fold.neutral)),
                What::Gain { norm } => scale(&mut matrix, columns, axis, &gain(norm)),
                What::DraftGain { norm } => {
                    let factors: Vec<f64> = gain(norm).iter().zip(draft()).map(|(g, d)| g / d).collect();
                    scale(&mut matrix, columns, axis, &factors);
                }
                What::DraftScale => scale(&mut matrix, columns, axis, &draft()),
                What::DraftJoin { embedding, hidden } => {
                    let hidden = gain(hidden).into_iter().zip(&final_gain).map(|(g, f)| g * f / c);
                    let factors: Vec<f64> = gain(embedding).into_iter().chain(hidden).collect();
                    scale(&mut matrix, columns, axis, &factors);
                }
                What::R1 => {
                    rotate(&mut matrix, columns, axis, &rotation(plan, fold.residual.as_ref().unwrap(), 0));
                }
                What::R2 { of } => {
                    let r = rotation(plan, fold.values.as_ref().unwrap(), layer(of) + 1);
                    rotate(&mut matrix, columns, axis, &r);
                }
                other => panic!("{other:?}"),
            }
        }
        result.insert(module.stored[0].name.clone(), matrix);
    }
    result
}

#[test]
fn in_f64_gains_r1_and_r2_change_no_logit_of_any_fixture() {
    for name in fixtures() {
        for transform in [
            "gamma-fold = true",
            "rotation = \"hadamard\"",
            "rotation = { kind = \"hadamard\", seed = 7, r2 = false }",
            "rotation = { kind = \"block-hadamard\", block = 32 }",
        ] {
            let (dir, source) = (temp(), Model::fixture(&name));
            let plan = planned(dir.path(), &unrounded(transform, "huggingface"), &fixture(&name));
            let mut config = source.config.clone();
            config["tie_word_embeddings"] = false.into();
            let ids = Reference::open(&name).ids("input_ids.a");
            let expected = Plain::new(&source).forward(&ids).logits;
            let found = Plain::of(&config, folded(&plan, &source, 1.0)).forward(&ids).logits;
            let apart = difference(&expected, &found, expected.len() / ids.len());
            assert!(apart.most < 1e-9, "{name}, {transform}: {apart:?}");
            let r2 = plan.fold.as_ref().unwrap().values.is_some();
            let wanted = DENSE.contains(&name.as_str()) && !transform.contains("r2 = false");
            assert_eq!(r2, wanted && transform.contains("rotation"), "{name}, {transform}");
        }
    }
}

/// Every change that a family allows.
fn transforms(name: &str) -> Vec<&'static str> {
    let mut all = vec![
        "gamma-fold = true",
        "rotation = \"hadamard\"",
        "rotation = { kind = \"block-hadamard\", block = 32 }",
        "rotation = { kind = \"random-orthogonal\", seed = 3 }",
        "rotation = { kind = \"optrot\", steps = 5 }",
        "rotation = \"auto\"\nkey-balance = true\nup-balance = true",
        "value-balance = true\nvalue-order = true",
        "key-balance = true",
    ];
    if DENSE.contains(&name) {
        all.push("rotation = { kind = \"hadamard\", r2 = true }\nup-balance = true");
    }
    all
}

#[test]
fn in_f32_every_change_leaves_the_logits_of_every_fixture_in_both_layouts() {
    let cpu = Cpu::new(Isa::best(), 2, Precision::Exact);
    let run = |dir: &Path, ids: &[u32]| {
        let weights = Weights::open(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        let model = Runtime::new(weights, cpu.clone()).unwrap();
        widen(&model.forward(&mut model.state(), ids, Want::All).unwrap().logits)
    };
    for name in fixtures() {
        let ids = Reference::open(&name).ids("input_ids.a");
        let expected = run(&fixture(&name), &ids);
        for (i, transform) in transforms(&name).into_iter().enumerate() {
            let layout = ["mlx", "huggingface"][i % 2];
            let dir = temp();
            let (out, json) = built(dir.path(), &unrounded(transform, layout), &fixture(&name), &[]);
            let found = run(&out, &ids);
            let apart = difference(&expected, &found, expected.len() / ids.len());
            assert!(apart.most < 1e-3 && apart.kl < 1e-8, "{name}, {layout}, {transform}: {apart:?}");
            let parity = &json["transform"]["parity"];
            assert!(parity["mean_kl"].as_f64().unwrap() < 1e-8, "{name}, {transform}: {parity}");
            assert!(parity["max_logit"].as_f64().unwrap() < 1e-3, "{name}, {transform}: {parity}");
            // What was asked for did happen.
            let changed = parity["max_logit"] != 0.0 || transform == "gamma-fold = true";
            assert!(changed, "{name}, {transform}");
            tqc!("verify", out, "--source", fixture(&name), "--rebuild", "all").expect(0);
        }
    }
}

/// Root mean square of 1 + w of the fixture's final norm.
fn reference_gain() -> f64 {
    let tensors = tensors(&Model::fixture("qwen3_5"));
    let gain = &tensors["model.language_model.norm.weight"];
    (gain.iter().map(|w| (1.0 + w) * (1.0 + w)).sum::<f64>() / gain.len() as f64).sqrt()
}

/// The values of a module's source tensor, as one matrix.
fn stored(plan: &Plan, index: usize) -> (Vec<f32>, usize) {
    let module = &plan.modules[index];
    let entry = &plan.checkpoint.tensors()[module.tensor];
    let range = module.source_range(&(0..module.rows));
    let bytes = &plan.checkpoint.bytes(entry)[range.start as usize..range.end as usize];
    let mut values = vec![0.0; module.weights() as usize];
    assert!(tqc::numeric::widen(entry.dtype.float().unwrap(), bytes, &mut values, Isa::best()));
    (values, module.work.row_elements)
}

#[test]
fn what_was_folded_can_be_unfolded() {
    for name in fixtures() {
        for transform in transforms(&name) {
            let dir = temp();
            let plan = planned(dir.path(), &unrounded(transform, "huggingface"), &fixture(&name));
            let prepared: Prepared = prepare(&plan, nobody()).unwrap();
            let mut changed = 0;
            for (index, module) in plan.modules.iter().enumerate() {
                let work = prepared.work(index);
                if module.steps.iter().any(|step| step.what == What::Neutral) || module.steps.is_empty() {
                    continue;
                }
                assert_eq!(work.transforms.len(), module.steps.len(), "{name}: {}", module.output.module);
                let (original, row_elements) = stored(&plan, index);
                let (mut values, mut scratch) = (original.clone(), Vec::new());
                let mut panel = Panel { values: &mut values, row_elements, first_row: 0 };
                for transform in &work.transforms {
                    transform.apply(panel.again(), Isa::best(), &mut scratch);
                }
                changed += usize::from(panel.values != original.as_slice());
                for transform in work.transforms.iter().rev() {
                    transform.invert(panel.again(), Isa::best(), &mut scratch);
                }
                let largest = original.iter().fold(0f32, |most, value| most.max(value.abs()));
                let apart = original.iter().zip(&*panel.values).map(|(a, b)| (a - b).abs());
                let apart = apart.fold(0f32, f32::max);
                // The largest gain ratio of the fixtures is about 4.
                assert!(apart <= 1e-5 * largest, "{name}, {}: {apart:e} of {largest}", module.output.module);
            }
            assert!(changed > 0, "{name}, {transform}");
        }
    }
}

#[test]
fn a_planned_artifact_has_the_bytes_of_the_built_one() {
    use tqc::fold::Planned;
    use tqc::runtime::Store;
    let text = "[default]\ncodec = { affine = { bits = 3, group = 32 } }\n[transform]\nrotation = \"auto\"\n";
    for name in ["qwen2", "qwen3_5", "qwen3_5_moe"] {
        let dir = temp();
        let (out, _) = built(dir.path(), text, &fixture(name), &[]);
        let plan = Arc::new(planned(dir.path(), text, &fixture(name)));
        let prepared = Arc::new(prepare(&plan, nobody()).unwrap());
        let store = Planned::new(plan, prepared);
        let files = read_folder(&out);
        assert_eq!(store.tensors().len(), files.len());
        for entry in store.tensors() {
            let whole = store.rows(entry, 0..1, 1).unwrap();
            assert!(whole.bytes() == files[&entry.name].bytes, "{name}: {}", entry.name);
        }
        let embedding = store.tensors().iter().find(|e| e.name.ends_with("embed_tokens.weight")).unwrap();
        let row = store.rows(embedding, 7..9, embedding.shape.rows()).unwrap();
        let bytes = &files[&embedding.name].bytes;
        let each = bytes.len() / embedding.shape.rows() as usize;
        assert!(row.bytes() == &bytes[7 * each..9 * each], "{name}: two rows alone");
    }
}

#[test]
fn parity_is_measured_against_the_source_and_names_no_layer_when_it_holds() {
    let dir = temp();
    let text = unrounded("rotation = \"hadamard\"", "mlx");
    let plan = Arc::new(planned(dir.path(), &text, &fixture("qwen3_5")));
    let prepared = Arc::new(prepare(&plan, nobody()).unwrap());
    let parity = parity::compare(&plan, &prepared, nobody()).unwrap();
    assert!(parity.holds() && parity.first_layer.is_none(), "{parity:?}");
    assert!(parity.tokens > 90 && parity.max_logit > 0.0, "{parity:?}");
    // One over the size of the fixture's final gain, about.
    let gain = reference_gain();
    assert!((0.8..1.25).contains(&(parity.inverse_size * gain)), "{parity:?} and {gain}");
    let part = plan.modules.iter().filter(|module| module.output.seat.part == Some(Part::Attended));
    assert!(part.count() > 0);
}
