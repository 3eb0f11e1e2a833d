//! Logits, greedy continuations, hidden states and draft logits against `transformers` in f32.

#[path = "../common/mod.rs"]
mod common;
mod hostile;
mod mistakes;
mod plain;
mod packed;
mod properties;
mod random;
mod reference;
mod variants;

use std::path::Path;
use std::sync::Arc;

use tqc::backend::Precision;
use tqc::backend::cpu::Cpu;
use tqc::isa::Isa;
use tqc::runtime::{LayerState, Model, Observer, Part, State, Stream, Want, Weights};

use common::{fixture, fixtures};
use reference::Reference;

/// The spread between two other stacks is 2e-4 (`goldens/runtime/fixtures/SOURCE.toml`).
const LOGITS: f32 = 1e-3;

fn cpu() -> Arc<Cpu> {
    Cpu::new(Isa::best(), 2, Precision::Exact)
}

fn open(dir: &Path) -> Model {
    open_on(dir, cpu())
}

fn open_on(dir: &Path, cpu: Arc<Cpu>) -> Model {
    let weights = Weights::open(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    Model::new(weights, cpu).unwrap()
}

/// The greatest distance and where it is.
fn distance(found: &[f32], expected: &[f32]) -> (f32, usize) {
    assert_eq!(found.len(), expected.len());
    let apart = |i: usize| {
        let distance = (found[i] - expected[i]).abs();
        if distance.is_nan() { f32::INFINITY } else { distance }
    };
    (0..found.len()).map(|i| (apart(i), i)).max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32], most: f32) {
    let (distance, at) = distance(found, expected);
    assert!(distance <= most, "{what}: value {at} is {}, not {} ({distance:e})", found[at], expected[at]);
}

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]).then(b.cmp(a))).unwrap() as u32
}

#[test]
fn logits_of_every_fixture_are_those_of_transformers_f32() {
    for name in fixtures() {
        let (model, reference) = (open(&fixture(&name)), Reference::open(&name));
        for prompt in ["a", "b"] {
            let ids = reference.ids(&format!("input_ids.{prompt}"));
            let pass = model.forward(&mut model.state(), &ids, Want::All).unwrap();
            let expected = reference.floats(&format!("logits_f32.{prompt}"));
            assert_close(&format!("{name} {prompt}"), &pass.logits, &expected, LOGITS);
        }
    }
}

/// Takes `ids` through in passes of these lengths, the last one repeated.
fn in_passes(model: &Model, ids: &[u32], lengths: &[usize]) -> (Vec<f32>, State) {
    let (mut state, mut logits) = (model.state(), Vec::new());
    let mut rest = ids;
    let mut lengths = lengths.iter().copied().chain(std::iter::repeat(*lengths.last().unwrap()));
    while !rest.is_empty() {
        let (part, after) = rest.split_at(lengths.next().unwrap().min(rest.len()));
        logits.extend(model.forward(&mut state, part, Want::All).unwrap().logits);
        rest = after;
    }
    (logits, state)
}

#[test]
fn greedy_continuations_of_every_fixture_are_those_of_transformers_f32() {
    for name in fixtures() {
        let (model, reference) = (open(&fixture(&name)), Reference::open(&name));
        for prompt in ["a", "b"] {
            let ids = reference.ids(&format!("input_ids.{prompt}"));
            let expected = reference.ids(&format!("greedy_f32.{prompt}"));
            let mut state = model.state();
            let mut next = argmax(&model.forward(&mut state, &ids, Want::Last).unwrap().logits);
            let mut found = Vec::new();
            for _ in &expected {
                found.push(next);
                next = argmax(&model.forward(&mut state, &[next], Want::Last).unwrap().logits);
            }
            assert_eq!(found, expected, "{name} {prompt}");
        }
    }
}

/// Keeps the residual stream after every layer.
#[derive(Default)]
struct Residuals(Vec<Vec<f32>>);

impl Observer for Residuals {
    fn residual(&mut self, layer: usize, rows: &[f32]) {
        assert_eq!(layer, self.0.len(), "every layer, in order");
        self.0.push(rows.to_vec());
    }
}

#[test]
fn hidden_and_recurrent_states_of_every_fixture_are_those_of_transformers_f32() {
    for name in fixtures() {
        let (model, reference) = (open(&fixture(&name)), Reference::open(&name));
        let ids = reference.ids("input_ids.a");
        let (mut state, mut residuals) = (model.state(), Residuals::default());
        let pass = model.forward_observed(&mut state, &ids, Want::All, &mut residuals).unwrap();
        // The residual stream has outliers of about 100: f32 rounds those to 1e-5.
        let expected = reference.floats("hidden_f32.a");
        assert_close(&name, &residuals.0.concat(), &expected, 1e-3);
        assert_close(&name, &pass.hidden, &reference.floats("final_norm_f32.a"), 1e-3);
        let Some(LayerState::DeltaNet(first)) = state.layer(0) else {
            assert!(!name.starts_with("qwen3_5"));
            continue;
        };
        let expected = reference.floats("gdn_state_f32.a.layer0");
        assert_close(&name, &first.matrices(), &expected, 1e-4);
        // The reference keeps channels first.
        let channels = first.history().len() / 3;
        let expected = reference.floats("gdn_conv_f32.a.layer0");
        let expected: Vec<f32> =
            (0..first.history().len()).map(|i| expected[i % channels * 3 + i / channels]).collect();
        assert_close(&name, first.history(), &expected, 1e-4);
    }
}

#[test]
fn logits_do_not_depend_on_how_the_tokens_are_cut_into_passes() {
    for name in fixtures() {
        let (model, reference) = (open(&fixture(&name)), Reference::open(&name));
        let ids = reference.ids("input_ids.b");
        let (whole, _) = in_passes(&model, &ids, &[ids.len()]);
        for lengths in [&[1][..], &[2], &[3], &[7], &[15], &[16], &[17], &[1, 30, 16], &[47, 1]] {
            let (parts, _) = in_passes(&model, &ids, lengths);
            if name.starts_with("qwen3_5") {
                // The chunked form of DeltaNet rounds differently.
                assert_close(&format!("{name} {lengths:?}"), &parts, &whole, LOGITS);
            } else {
                assert!(same_bits(&parts, &whole), "{name} {lengths:?}: other bits");
            }
        }
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn logits_have_the_same_bits_on_every_instruction_set_and_number_of_threads() {
    for name in fixtures() {
        let ids = Reference::open(&name).ids("input_ids.a");
        for precision in [Precision::Exact, Precision::Fast] {
            let on = |isa, threads| {
                let model = open_on(&fixture(&name), Cpu::new(isa, threads, precision));
                in_passes(&model, &ids, &[40, 1]).0
            };
            let expected = on(Isa::Scalar, 1);
            for isa in Isa::available() {
                for threads in [1, 2, 3, 7] {
                    assert!(same_bits(&on(isa, threads), &expected), "{name} {isa} {threads} {precision}");
                }
            }
        }
    }
}

#[test]
fn draft_logits_are_those_of_the_head_put_together_from_transformers_classes() {
    for name in ["qwen3_5", "qwen3_5-tied"] {
        let model = open(&fixture(name));
        let (reference, drafts) =
            (Reference::open(name), Reference::file(&format!("fixtures/{name}/mtp.safetensors")));
        let (next, hidden) = (drafts.ids("next_ids.a"), reference.floats("final_norm_f32.a"));
        let head = model.draft().unwrap();
        let mut state = head.state(&model);
        let drafted = head.forward_all(&model, &mut state, &next, &hidden).unwrap();
        assert_close(name, &drafted.logits, &drafts.floats("logits_f32.a"), LOGITS);
        assert_close(name, &drafted.hidden, &drafts.floats("hidden_f32.a"), LOGITS);

        // Chained guesses: the head's own hidden state takes the trunk's place.
        let width = model.config().hidden;
        let vocab = model.config().vocab;
        let mut logits = drafted.logits[drafted.logits.len() - vocab..].to_vec();
        let mut last = drafted.hidden[drafted.hidden.len() - width..].to_vec();
        let (mut ids, mut all) = (Vec::new(), Vec::new());
        for _ in drafts.ids("chain_ids.a") {
            all.extend_from_slice(&logits);
            ids.push(argmax(&logits));
            let step = head.forward(&model, &mut state, &ids[ids.len() - 1..], &last).unwrap();
            (logits, last) = (step.logits, step.hidden);
        }
        assert_eq!(ids, drafts.ids("chain_ids.a"));
        assert_close(name, &all, &drafts.floats("chain_logits_f32.a"), LOGITS);
    }
}

#[test]
fn a_trial_that_is_cut_short_leaves_the_state_as_if_its_tail_had_never_been() {
    for name in fixtures() {
        let (model, ids) = (open(&fixture(&name)), Reference::open(&name).ids("input_ids.a"));
        let (prompt, rest) = ids.split_at(24);
        for tried in [1, 2, 5, 20] {
            for kept in [0, 1, tried / 2, tried] {
                let (mut state, mut plain) = (model.state(), model.state());
                model.forward(&mut state, prompt, Want::Nothing).unwrap();
                model.forward(&mut plain, prompt, Want::Nothing).unwrap();
                state.begin_trial();
                model.forward(&mut state, &rest[..tried], Want::All).unwrap();
                state.keep(model.cpu(), kept);
                for token in &rest[..kept] {
                    model.forward(&mut plain, &[*token], Want::Nothing).unwrap();
                }
                assert_eq!(state.tokens(), plain.tokens());
                let next =
                    |state: &mut State| model.forward(state, &[rest[kept]], Want::Last).unwrap().logits;
                assert!(same_bits(&next(&mut state), &next(&mut plain)), "{name}: {kept} of {tried}");
            }
        }
    }
}

#[test]
fn a_stream_gives_the_bits_of_a_pass_for_every_sequence_of_its_batch() {
    for name in fixtures() {
        let (model, reference) = (open(&fixture(&name)), Reference::open(&name));
        let (a, b) = (reference.ids("input_ids.a"), reference.ids("input_ids.b"));
        let long: Vec<u32> = a.iter().chain(&b).cycle().take(700).copied().collect();
        let sequences = [a.clone(), b[..5].to_vec(), long, b];
        let mut stream = Stream::new(model.weights(), model.cpu().clone(), &sequences).unwrap();
        while stream.layer() < model.config().layers.len() {
            stream.step(&mut ()).unwrap();
        }
        let mut found = Vec::new();
        stream.logits(100, &mut |_, logits| found.extend_from_slice(logits)).unwrap();
        let expected: Vec<f32> = sequences
            .iter()
            .flat_map(|ids| model.forward(&mut model.state(), ids, Want::All).unwrap().logits)
            .collect();
        assert!(same_bits(&found, &expected), "{name}");
    }
}

/// What a pass gives and what the state carries after it.
fn bits_of(pass: &tqc::runtime::Pass, state: &State) -> (Vec<u32>, Vec<u32>, String) {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect();
    (bits(&pass.hidden), bits(&pass.logits), format!("{state:?}"))
}

#[test]
fn several_sequences_in_one_pass_get_what_each_gets_alone() {
    for name in fixtures() {
        let model = open(&fixture(&name));
        let vocab = model.config().vocab as u32;
        let tokens =
            |seed: u32, len: u32| (0..len).map(|i| (i * i + seed * 7 + i) % vocab).collect::<Vec<_>>();
        // Before the pass, in it, and what is wanted; one of them is longer than a pass.
        let most = model.rows_of_pass() as u32;
        let context = model.config().context.map_or(u32::MAX, |context| context as u32);
        let parts = [
            (0, 5, Want::Last),
            (20, 1, Want::Last),
            (3, 40, Want::All),
            (0, 17, Want::Hidden),
            (7, 2, Want::Nothing),
            (0, (most + 9).min(context), Want::Last),
            (1, 1, Want::All),
        ];
        let before = |i: usize, len: u32| {
            let mut state = model.state();
            if len > 0 {
                model.forward(&mut state, &tokens(i as u32, len), Want::Nothing).unwrap();
            }
            state
        };
        let mut states: Vec<State> = parts.iter().enumerate().map(|(i, part)| before(i, part.0)).collect();
        let alone: Vec<_> = states
            .iter()
            .zip(parts)
            .enumerate()
            .map(|(i, (state, (_, len, want)))| {
                let mut state = state.clone();
                let pass = model.forward(&mut state, &tokens(50 + i as u32, len), want).unwrap();
                bits_of(&pass, &state)
            })
            .collect();
        let next: Vec<Vec<u32>> =
            parts.iter().enumerate().map(|(i, part)| tokens(50 + i as u32, part.1)).collect();
        let mut together: Vec<Part<'_>> = states
            .iter_mut()
            .zip(&next)
            .zip(parts)
            .map(|((state, tokens), (_, _, want))| Part { state, tokens, want })
            .collect();
        let passes = model.forward_many(&mut together).unwrap();
        for (i, (pass, state)) in passes.iter().zip(&states).enumerate() {
            assert!(bits_of(pass, state) == alone[i], "{name}: sequence {i}");
        }
    }
}

#[test]
fn a_wrong_sequence_leaves_all_as_they_were() {
    let model = open(&fixture("qwen3"));
    let vocab = model.config().vocab as u32;
    let (mut good, mut bad) = (model.state(), model.state());
    for tokens in [&[][..], &[vocab]] {
        let mut parts = [
            Part { state: &mut good, tokens: &[1, 2], want: Want::Last },
            Part { state: &mut bad, tokens, want: Want::Last },
        ];
        assert!(model.forward_many(&mut parts).is_err());
        assert_eq!((good.tokens(), bad.tokens()), (0, 0));
    }
    assert!(model.forward_many(&mut []).unwrap().is_empty());
}
