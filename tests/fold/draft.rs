//! The draft head after a fold: near the unfolded one by the residual rescale, and far from it by the naive fold.

use std::collections::BTreeMap;

use crate::common::*;
use crate::exact::{folded, rotate, rotation, scale, tensors};
use crate::plain::{Plain, difference};
use crate::reference::Reference;
use crate::*;
use tqc::plan::{Plan, What};
use tqc::transform::Axis;

/// KL of other draft heads to the unfolded one, by an implementation in PyTorch with random signs of its own: the fold
/// that gives `fc` only the gains of its two norms, and the rescale with a calibrated c.
const REFERENCE: [(&str, f64, f64); 2] = [("qwen3_5", 1.65, 0.033), ("qwen3_5-tied", 1.42, 0.030)];

/// Draft logits of unfolded and folded weights, with the trunk's own hidden states.
fn apart(name: &str, source: &Model, folded: BTreeMap<String, Vec<f64>>) -> crate::plain::Difference {
    let drafts = Reference::file(&format!("fixtures/{name}/mtp.safetensors"));
    let (next, ids) = (drafts.ids("next_ids.a"), Reference::open(name).ids("input_ids.a"));
    let mut config = source.config.clone();
    for config in [Some(&mut config), None].into_iter().flatten() {
        config["tie_word_embeddings"] = false.into();
    }
    let run = |model: Plain| model.draft(&next, &model.forward(&ids).hidden);
    let (expected, found) = (run(Plain::new(source)), run(Plain::of(&config, folded)));
    difference(&expected, &found, expected.len() / next.len())
}

/// The tensors that a build wrote, in f64.
fn written(out: &Path) -> BTreeMap<String, Vec<f64>> {
    let files = read_folder(out).into_iter();
    files.map(|(name, t)| (name, t.floats().into_iter().map(f64::from).collect())).collect()
}

/// The head as a fold that knows only its readers would leave it: no D, and no trunk gain in `fc`.
fn naive(plan: &Plan, source: &Model) -> BTreeMap<String, Vec<f64>> {
    let mut result = folded(plan, source, 1.0);
    let of = tensors(source);
    let gain = |norm: &str| -> Vec<f64> { of[&format!("{norm}.weight")].iter().map(|w| w + 1.0).collect() };
    let r1 = rotation(plan, plan.fold.as_ref().unwrap().residual.as_ref().unwrap(), 0);
    for module in plan.modules.iter().filter(|module| module.output.module.starts_with("mtp.")) {
        let name = &module.stored[0].name;
        let mut matrix = of[name].clone();
        let columns = *module.output.shape.0.last().unwrap() as usize;
        for step in &module.steps {
            match &step.what {
                What::DraftGain { norm } => scale(&mut matrix, columns, step.axis, &gain(norm)),
                What::DraftJoin { embedding, hidden } => {
                    let both = [gain(embedding), gain(hidden)].concat();
                    scale(&mut matrix, columns, Axis::Input, &both);
                }
                What::R1 => rotate(&mut matrix, columns, step.axis, &r1),
                _ => {}
            }
        }
        if !module.steps.iter().any(|step| step.what == What::Neutral) {
            result.insert(name.clone(), matrix);
        }
    }
    result
}

#[test]
fn the_rescaled_head_is_near_the_unfolded_one_and_the_naive_fold_is_not() {
    for (name, of_naive, of_rescaled) in REFERENCE {
        let (dir, source) = (temp(), Model::fixture(name));
        let text = unrounded("rotation = \"hadamard\"", "huggingface");
        let (out, json) = built(dir.path(), &text, &fixture(name), &[]);
        let found = apart(name, &source, written(&out));
        // c is measured on the program's own text here, and on the prompts there.
        assert!(found.kl < 1.5 * of_rescaled, "{name}: {found:?}, not about {of_rescaled}");
        assert!(found.flips <= 8, "{name}: {found:?}");
        let draft = &json["transform"]["draft"];
        assert_eq!((&draft["feed"], &draft["calibrated"]), (&"post_norm".into(), &true.into()), "{draft}");
        let plan = planned(dir.path(), &text, &fixture(name));
        let bad = apart(name, &source, naive(&plan, &source));
        assert!((bad.kl - of_naive).abs() < 0.02 * of_naive, "{name}: {bad:?}, not {of_naive}");
        // In f64 and with that c, the plan's words give the same head.
        let c = draft["c"].as_f64().unwrap();
        let same = apart(name, &source, folded(&plan, &source, c));
        assert!((same.kl - found.kl).abs() < 1e-5, "{name}: {same:?} and {found:?}");
    }
}

#[test]
fn gains_alone_keep_the_draft_head_too() {
    for (name, _, of_rescaled) in REFERENCE {
        let (dir, source) = (temp(), Model::fixture(name));
        let (out, _) = built(dir.path(), &unrounded("gamma-fold = true", "huggingface"), &fixture(name), &[]);
        let found = apart(name, &source, written(&out));
        assert!(found.kl < 1.5 * of_rescaled, "{name}: {found:?}");
    }
}

#[test]
fn gains_too_near_zero_are_clamped_counted_and_refused_by_strict() {
    let dir = temp();
    let mut source = Model::fixture("qwen3_5");
    for tensor in source.shards.iter_mut().flatten() {
        // w = -1: the gain is 0.
        if tensor.name == "model.language_model.norm.weight" {
            tensor.put_u16(&[3], 0xbf80);
            tensor.put_u16(&[70], 0xbf80);
        }
    }
    let at = dir.path().join("source");
    source.write(&at);
    let text = unrounded("rotation = \"hadamard\"", "mlx");
    let (out, json) = built(dir.path(), &text, &at, &[]);
    assert_eq!(json["transform"]["draft"]["clamped"], 2);
    let note = json["notes"].as_array().unwrap().iter().find(|note| note["kind"] == "clamp").expect("a note");
    assert_eq!(note["subject"], "mtp");
    assert!(out.join("provenance.json").exists());
    let strict = dir.path().join("strict");
    let run = tqc!("build", dir.path().join("test.toml"), "--source", at, "-o", strict, "--strict").expect(2);
    assert!(run.stderr.contains("2 gains too near 0"), "{}", run.stderr);
    assert!(!strict.exists());
}
