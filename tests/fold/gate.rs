//! Mistakes that a fold could hold are caught before anything is rounded, with the layer named.

use std::sync::Arc;

use tqc::arch::{Part, Stand};
use tqc::fold::parity::{Parity, compare};
use tqc::fold::{Prepared, prepare};
use tqc::isa::Isa;
use tqc::plan::{Module, Plan, What};
use tqc::quant::Grain;
use tqc::transform::hadamard::{SignedHadamard, Size, signs};
use tqc::transform::{Axis, Neutral, Panel, Rotate, Rotation, Transform};

use crate::*;

/// A transform the wrong way round.
#[derive(Debug)]
struct Back(Arc<dyn Transform>);

impl Transform for Back {
    fn id(&self) -> &'static str {
        "back"
    }

    fn grain(&self) -> Grain {
        self.0.grain()
    }

    fn apply(&self, panel: Panel<'_>, isa: Isa, scratch: &mut Vec<f32>) {
        self.0.invert(panel, isa, scratch);
    }

    fn invert(&self, panel: Panel<'_>, isa: Isa, scratch: &mut Vec<f32>) {
        self.0.apply(panel, isa, scratch);
    }
}

/// What a comparison finds after `spoil` has had each module and its work.
fn found(
    name: &str,
    transform: &str,
    layout: &str,
    spoil: impl Fn(&Plan, &Module, &mut Vec<Arc<dyn Transform>>),
) -> Parity {
    let dir = temp();
    let plan = Arc::new(planned(dir.path(), &unrounded(transform, layout), &fixture(name)));
    let mut prepared: Prepared = prepare(&plan, nobody()).unwrap();
    for (index, module) in plan.modules.iter().enumerate() {
        spoil(&plan, module, &mut prepared.work_mut(index).transforms);
    }
    compare(&plan, &Arc::new(prepared), nobody()).unwrap()
}

/// Where a step stands among a module's transforms: layout changes come first.
fn place(module: &Module, what: impl Fn(&What, Axis) -> bool) -> Option<usize> {
    let step = module.steps.iter().position(|step| what(&step.what, step.axis))?;
    Some(module.work.transforms.len() + step)
}

#[track_caller]
fn caught(what: &str, parity: &Parity, layer: usize) {
    assert!(!parity.holds(), "{what}: {parity:?}");
    assert!(parity.mean_kl > 1e-3, "{what}: {parity:?}");
    assert_eq!(parity.first_layer, Some(layer), "{what}: {parity:?}");
    assert!(parity.found().contains(&format!("layer {}", layer - 1)), "{}", parity.found());
}

#[test]
fn writers_rotated_with_r_instead_of_its_transpose() {
    for name in fixtures() {
        let parity =
            found(&name, "rotation = { kind = \"hadamard\", r2 = false }", "mlx", |_, module, work| {
                let writes = module.output.seat.stream == Stand::Writes;
                if let Some(at) = place(module, |what, _| *what == What::R1).filter(|_| writes) {
                    work[at] = Arc::new(Back(work[at].clone()));
                }
            });
        caught(&name, &parity, 1);
        assert!(parity.mean_kl > 1.0, "{name}: {parity:?}");
    }
}

#[test]
fn a_value_bias_left_alone_under_r2() {
    let parity = found("qwen2", "rotation = \"hadamard\"", "mlx", |_, module, work| {
        let bias = module.output.parameter == "bias" && module.output.seat.part == Some(Part::Value);
        if let Some(at) = place(module, |what, _| matches!(what, What::R2 { .. })).filter(|_| bias) {
            work.remove(at);
        }
    });
    caught("qwen2", &parity, 1);
    assert!(parity.mean_kl > 0.1, "{parity:?}");
}

#[test]
fn gains_written_as_ones_in_the_zero_centred_layout() {
    for name in ["qwen3_5", "qwen3_5-tied", "qwen3_5_moe"] {
        let parity = found(name, "rotation = \"hadamard\"", "huggingface", |_, module, work| {
            if let Some(at) = place(module, |what, _| *what == What::Neutral) {
                work[at] = Arc::new(Neutral(1.0));
            }
        });
        caught(name, &parity, 1);
        assert!(parity.mean_kl > 1.0, "{name}: {parity:?}");
    }
}

#[test]
fn r2_applied_to_gated_attention() {
    let parity = found("qwen3_5", "rotation = \"hadamard\"", "mlx", |plan, module, work| {
        let dim = plan.fold.as_ref().unwrap().decoder.attention.head_dim;
        let r2 = Rotation::Hadamard(SignedHadamard::new(signs(42, 1, dim), Size::of(dim).unwrap()));
        let trunk = !module.output.module.starts_with("mtp.");
        match module.output.seat.part {
            Some(Part::Value) if trunk => work.push(Arc::new(Rotate::new(Axis::Output, Arc::new(r2)))),
            Some(Part::Attended) if trunk => work.push(Arc::new(Rotate::new(Axis::Input, Arc::new(r2)))),
            _ => {}
        }
    });
    // Three layers of DeltaNet come before the first with attention.
    caught("qwen3_5", &parity, 4);
    assert!(parity.mean_kl > 0.01, "{parity:?}");
}

#[test]
fn a_gain_that_one_reader_misses_and_a_head_that_keeps_its_basis() {
    for name in ["llama-untied", "qwen3_5_moe"] {
        let parity = found(name, "rotation = \"hadamard\"", "mlx", |_, module, work| {
            let second =
                module.output.module.contains("layers.1.") && module.output.seat.part == Some(Part::Up);
            if let Some(at) = place(module, |what, _| matches!(what, What::Gain { .. })).filter(|_| second) {
                work.remove(at);
            }
        });
        caught(name, &parity, 2);
    }
    let parity = found("qwen3", "rotation = \"hadamard\"", "mlx", |plan, module, work| {
        if let Some(at) =
            place(module, |what, _| *what == What::R1).filter(|_| module.output.module == plan.model.head)
        {
            work.remove(at);
        }
    });
    assert!(!parity.holds() && parity.first_layer.is_none() && parity.mean_kl > 1.0, "{parity:?}");
    assert!(parity.found().contains("no layer"), "{}", parity.found());
}
