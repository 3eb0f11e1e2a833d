//! Every deliberate mistake that the references were shown to notice, made here too.
//!
//! The numbers of [`TABLE`] are another program's: a forward pass in PyTorch f64 with the same rule changed, against the
//! right one, on prompt a of the fixture. The plain pass makes each mistake by a changed formula and must find those
//! numbers again. Where the mistake can also be made by changing a checkpoint or its config, the runtime runs that, and
//! must give the logits of the mistaken formula: so each formula of the runtime is held from both sides.

use serde_json::json;

use super::*;
use crate::common::{Model as Source, temp};
use crate::plain::Mistake::*;
use crate::plain::{Difference, Mistake, Plain, difference, widen};

struct Row {
    fixture: &'static str,
    mistake: Mistake,
    most: f64,
    kl: f64,
    flips: usize,
}

const fn row(fixture: &'static str, mistake: Mistake, most: f64, kl: f64, flips: usize) -> Row {
    Row { fixture, mistake, most, kl, flips }
}

const TABLE: &[Row] = &[
    row("qwen3_5", GainAsStored, 19.71, 4.983, 48),
    row("qwen3_5", GatedNormCentred, 10.74, 2.081, 43),
    row("qwen3_5", GateBeforeNorm, 17.68, 3.621, 39),
    row("qwen3_5", SigmoidOfZ, 17.61, 6.004, 47),
    row("qwen3_5", TiledValueHeads, 17.10, 5.126, 48),
    row("qwen3_5", NoQueryScale, 4.94, 0.118, 12),
    row("qwen3_5", NoL2Norm, 16.43, 6.326, 45),
    row("qwen3_5", TapsReversed, 19.69, 6.852, 48),
    row("qwen3_5", SiluBeforeConv, 22.86, 4.609, 44),
    row("qwen3_5", GatesSwapped, 15.49, 3.185, 44),
    row("qwen3_5", DecayAfterUpdate, 5.41, 0.182, 16),
    row("qwen3_5", NoExpOfA, 19.43, 4.512, 42),
    row("qwen3_5", QueriesThenGates, 5.69, 0.247, 20),
    row("qwen3_5", SiluAttentionGate, 3.67, 0.155, 17),
    row("qwen3_5", RopeOnWholeHead, 3.20, 0.113, 14),
    row("qwen3_5", InterleavedRope, 2.24, 0.035, 7),
    row("qwen3_5_moe", ChosenNotRenormalised, 10.77, 0.629, 24),
    row("qwen3_5_moe", SharedNotGated, 16.21, 3.437, 42),
    row("qwen3_5_moe", GateAndUpSwapped, 14.56, 4.541, 46),
    row("llama-untied", NoFrequencyScaling, 10.17, 0.721, 18),
    row("llama-untied", InterleavedRope, 21.69, 5.027, 41),
    row("qwen3", QkNormAfterRope, 11.92, 0.932, 28),
    row("qwen3", NoQkNorm, 15.24, 1.962, 33),
    row("qwen2", NoBias, 10.70, 2.302, 42),
];

fn vocab(logits: &[f64], ids: &[u32]) -> usize {
    logits.len() / ids.len()
}

#[test]
fn the_plain_pass_is_that_of_transformers_and_the_runtime_agrees_with_it() {
    for name in fixtures() {
        let (plain, reference) = (Plain::new(&Source::fixture(&name)), Reference::open(&name));
        let model = open(&fixture(&name));
        for prompt in ["a", "b"] {
            let ids = reference.ids(&format!("input_ids.{prompt}"));
            let expected = plain.forward(&ids);
            let theirs = widen(&reference.floats(&format!("logits_f32.{prompt}")));
            let apart = difference(&expected.logits, &theirs, vocab(&theirs, &ids));
            assert!(apart.most < 2e-4, "{name} {prompt}: {apart:?} from transformers");
            let mut residuals = Residuals::default();
            let pass = model.forward_observed(&mut model.state(), &ids, Want::All, &mut residuals).unwrap();
            let apart = difference(&expected.logits, &widen(&pass.logits), vocab(&theirs, &ids));
            assert!(apart.most < 3e-4 && apart.flips == 0, "{name} {prompt}: {apart:?} from the runtime");
            for (layer, (found, expected)) in residuals.0.iter().zip(&expected.residuals).enumerate() {
                let apart = difference(expected, &widen(found), model.config().hidden);
                assert!(apart.most < 3e-4, "{name} {prompt}, residual {layer}: {apart:?}");
            }
        }
    }
    for name in ["qwen3_5", "qwen3_5-tied"] {
        let plain = Plain::new(&Source::fixture(name));
        let drafts = Reference::file(&format!("fixtures/{name}/mtp.safetensors"));
        let ids = Reference::open(name).ids("input_ids.a");
        let found = plain.draft(&drafts.ids("next_ids.a"), &plain.forward(&ids).hidden);
        let theirs = widen(&drafts.floats("logits_f32.a"));
        let apart = difference(&found, &theirs, vocab(&theirs, &ids));
        assert!(apart.most < 2e-4, "{name}, draft head: {apart:?} from transformers' classes");
    }
}

#[test]
fn every_mistake_changes_the_logits_as_much_as_in_the_references() {
    for Row { fixture: name, mistake, most, kl, flips } in TABLE {
        let ids = Reference::open(name).ids("input_ids.a");
        let source = Source::fixture(name);
        let right = Plain::new(&source).forward(&ids).logits;
        let wrong = Plain::new(&source).with(*mistake).forward(&ids).logits;
        let found = difference(&right, &wrong, vocab(&right, &ids));
        // The table's last digit.
        assert!((found.most - most).abs() < 0.006, "{name} {mistake:?}: {found:?}, not {most}");
        assert!((found.kl - kl).abs() < 0.0006, "{name} {mistake:?}: {found:?}, not {kl}");
        assert_eq!(found.flips, *flips, "{name} {mistake:?}: {found:?}");
        // What holds our logits to the references sees it from far off.
        assert!(found.most > 1000.0 * f64::from(LOGITS));
    }
}

/// Makes the mistake in the checkpoint, if that can be done: the changed one, read rightly, is the right one misread.
fn spoil(source: &mut Source, mistake: Mistake) -> bool {
    let text = |source: &Source, key: &str| {
        let text = source.config.get("text_config").unwrap_or(&source.config);
        text[key].as_u64().unwrap_or_else(|| panic!("{key}")) as usize
    };
    match mistake {
        GainAsStored => {
            for tensor in source.ending("norm.weight") {
                if !tensor.name.ends_with("linear_attn.norm.weight") {
                    tensor.map(|w| w - 1.0);
                }
            }
        }
        GatedNormCentred => {
            source.ending("linear_attn.norm.weight").for_each(|tensor| tensor.map(|w| 1.0 + w))
        }
        TapsReversed => source.ending("conv1d.weight").for_each(|tensor| {
            let kernel = *tensor.shape.last().unwrap() as usize;
            tensor.pick(1, |i| i / kernel * kernel + kernel - 1 - i % kernel);
        }),
        GatesSwapped => {
            for tensor in source.shards.iter_mut().flatten() {
                let swapped = match tensor.name.rsplit_once(".in_proj_") {
                    Some((at, "a.weight")) => format!("{at}.in_proj_b.weight"),
                    Some((at, "b.weight")) => format!("{at}.in_proj_a.weight"),
                    _ => continue,
                };
                tensor.name = swapped;
            }
        }
        // exp(ln |A_log|) = |A_log|; the logarithm of 0 is far enough below.
        NoExpOfA => source.ending(".A_log").for_each(|t| t.map(|a| a.abs().ln().max(-80.0))),
        TiledValueHeads => {
            let (nk, nv) = (text(source, "linear_num_key_heads"), text(source, "linear_num_value_heads"));
            let (dk, dv) = (text(source, "linear_key_head_dim"), text(source, "linear_value_head_dim"));
            // Place s, which reads key head s div (Nv / Nk), gets the head that should have read it by the mistake.
            let share = nv / nk;
            let head = |s: usize| s % share * nk + s / share;
            let value = |i: usize| head(i / dv) * dv + i % dv;
            let keys = 2 * nk * dk;
            let channel = |i: usize| if i < keys { i } else { keys + value(i - keys) };
            for tensor in source.shards.iter_mut().flatten() {
                let width = tensor.shape.iter().skip(1).product::<u64>() as usize;
                let Some((_, name)) = tensor.name.rsplit_once("linear_attn.") else { continue };
                match name {
                    "in_proj_qkv.weight" | "conv1d.weight" => tensor.pick(width, channel),
                    "in_proj_z.weight" => tensor.pick(width, value),
                    "in_proj_a.weight" | "in_proj_b.weight" | "A_log" | "dt_bias" => tensor.pick(width, head),
                    "out_proj.weight" => tensor.pick(1, |i| i / width * width + value(i % width)),
                    _ => {}
                }
            }
        }
        QueriesThenGates => {
            let (heads, d) = (text(source, "num_attention_heads"), text(source, "head_dim"));
            let width = text(source, "hidden_size");
            let from = |row: usize| match (row / (2 * d), row % (2 * d)) {
                (head, i) if i < d => head * d + i,
                (head, i) => (heads + head) * d + i - d,
            };
            source.ending("layers.3.self_attn.q_proj.weight").for_each(|tensor| tensor.pick(width, from));
        }
        RopeOnWholeHead => {
            let text = &mut source.config["text_config"];
            text["partial_rotary_factor"] = json!(1.0);
            text["rope_parameters"]["partial_rotary_factor"] = json!(1.0);
            text["rope_parameters"].as_object_mut().unwrap().remove("mrope_section");
        }
        InterleavedRope => {
            // Scores do not change if queries and keys have their dimensions in another order: the pair (i, i + n) must
            // hold what was (2i, 2i + 1).
            let (d, width) = (text(source, "head_dim"), text(source, "hidden_size"));
            let hybrid = source.config["model_type"] == "qwen3_5";
            let n = if hybrid { d / 8 } else { d / 2 };
            let dim = |i: usize| match i {
                i if i < n => 2 * i,
                i if i < 2 * n => 2 * (i - n) + 1,
                i => i,
            };
            let row = |step: usize| move |i: usize| i / step * step + dim(i % step);
            for tensor in source.shards.iter_mut().flatten().filter(|tensor| !tensor.name.starts_with("mtp."))
            {
                let Some((_, name)) = tensor.name.rsplit_once("self_attn.") else { continue };
                match name {
                    // A gated head's second half is the gate.
                    "q_proj.weight" => tensor.pick(width, row(if hybrid { 2 * d } else { d })),
                    "k_proj.weight" => tensor.pick(width, row(d)),
                    "q_norm.weight" | "k_norm.weight" => tensor.pick(1, row(d)),
                    _ => {}
                }
            }
        }
        SharedNotGated => {
            // sigmoid(0) = 1/2, of twice as much.
            source.ending("shared_expert_gate.weight").for_each(|tensor| tensor.map(|_| 0.0));
            source.ending("shared_expert.down_proj.weight").for_each(|tensor| tensor.map(|w| 2.0 * w));
        }
        GateAndUpSwapped => source.ending("experts.gate_up_proj").for_each(|tensor| {
            let (rows, width) = (tensor.shape[1] as usize, tensor.shape[2] as usize);
            tensor.pick(width, |i| i / rows * rows + (i % rows + rows / 2) % rows);
        }),
        NoFrequencyScaling => source.config["rope_scaling"] = json!(null),
        NoQkNorm => {
            // Without them a qwen3 is a llama.
            source.config["model_type"] = json!("llama");
            for shard in &mut source.shards {
                shard.retain(|t| !t.name.ends_with("q_norm.weight") && !t.name.ends_with("k_norm.weight"));
            }
        }
        NoBias => source.ending(".bias").for_each(|tensor| tensor.map(|_| 0.0)),
        // Another formula: no weights make it.
        GateBeforeNorm
        | SigmoidOfZ
        | NoQueryScale
        | NoL2Norm
        | SiluBeforeConv
        | DecayAfterUpdate
        | SiluAttentionGate
        | ChosenNotRenormalised
        | QkNormAfterRope => return false,
    }
    true
}

#[test]
fn the_runtime_shows_every_mistake_that_a_checkpoint_can_be_made_to_have() {
    let mut shown = 0;
    for Row { fixture: name, mistake, most, kl, flips } in TABLE {
        let ids = Reference::open(name).ids("input_ids.a");
        let mut source = Source::fixture(name);
        let right = Plain::new(&source).forward(&ids).logits;
        let wrong = Plain::new(&source).with(*mistake).forward(&ids).logits;
        if !spoil(&mut source, *mistake) {
            continue;
        }
        shown += 1;
        let dir = temp();
        source.write(dir.path());
        let model = open(dir.path());
        let logits = widen(&model.forward(&mut model.state(), &ids, Want::All).unwrap().logits);
        let Difference { most: found, kl: found_kl, flips: found_flips } =
            difference(&right, &logits, vocab(&right, &ids));
        assert!((found - most).abs() < 0.01, "{name} {mistake:?}: {found}, not {most}");
        assert!((found_kl - kl).abs() < 0.01 * kl + 0.001, "{name} {mistake:?}: {found_kl}, not {kl}");
        assert!(found_flips.abs_diff(*flips) <= 1, "{name} {mistake:?}: {found_flips}, not {flips}");
        let apart = difference(&wrong, &logits, vocab(&right, &ids));
        assert!(apart.most < 2e-3, "{name} {mistake:?}: the runtime makes another mistake: {apart:?}");
        // And the golden comparison itself, as the other tests make it, fails.
        let golden = widen(&Reference::open(name).floats("logits_f32.a"));
        assert!(difference(&golden, &logits, vocab(&right, &ids)).most > 1000.0 * f64::from(LOGITS));
    }
    assert_eq!(shown, 15);
}
