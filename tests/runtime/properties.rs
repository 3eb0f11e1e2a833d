//! Models of random sizes and weights: the runtime computes what the plain pass does, whatever way it is asked.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::common::temp;
use crate::plain::{Plain, difference, widen};
use crate::random::{Hybrid, Sizes};

fn pick<T: Clone + std::fmt::Debug + 'static>(from: &[T]) -> impl Strategy<Value = T> + use<T> {
    prop::sample::select(from.to_vec())
}

fn rope_scaling() -> impl Strategy<Value = Value> {
    let linear = pick(&[2.0, 7.5]).prop_map(|factor| json!({ "type": "linear", "factor": factor }));
    let llama3 = pick(&[16, 100]).prop_map(|context| {
        json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": context,
        })
    });
    prop_oneof![2 => Just(Value::Null), 1 => linear, 1 => llama3, 1 => Just(json!({ "rope_type": "default" }))]
}

/// Odd sizes on purpose: widths that no vector divides, heads of one pair, windows around the cache's page of 64.
fn sizes(families: &'static [&'static str]) -> impl Strategy<Value = Sizes> {
    let shape = (
        pick(families),
        pick(&[16u64, 48, 80]),
        pick(&[24u64, 40, 72]),
        pick(&[37u64, 64]),
        1u64..4,
        1u64..4,
        1u64..4,
        pick(&[2u64, 10, 16, 24, 40]),
    );
    let choices = (
        any::<[bool; 3]>(),
        rope_scaling(),
        prop::option::of((pick(&[1u64, 3, 17, 63, 64, 65, 100]), 0u64..3)),
        pick(&["F32", "BF16", "F16"]),
        any::<u64>(),
    );
    let hybrid = (
        1u64..4,
        (1u64..3, 1u64..4),
        (pick(&[4u64, 10, 16, 24]), pick(&[8u64, 16, 24, 40])),
        2u64..5,
        pick(&[0.25, 0.5, 1.0]),
        (1u64..6, 1u64..6, pick(&[8u64, 24])),
        any::<bool>(),
    )
        .prop_map(|(interval, heads, dims, kernel, rotary_part, experts, draft)| Hybrid {
            interval,
            key_heads: heads.0,
            share: heads.1,
            key_dim: dims.0,
            value_dim: dims.1,
            kernel,
            rotary_part,
            experts: experts.0.max(experts.1),
            chosen: experts.0.min(experts.1),
            shared: experts.2,
            draft,
        });
    (shape, choices, hybrid).prop_map(|(shape, choices, hybrid)| {
        let (family, hidden, intermediate, vocab, layers, kv_heads, share, head_dim) = shape;
        let ([tied, attention_bias, mlp_bias], rope_scaling, window, dtype, seed) = choices;
        // An even part of a head must be rotated.
        let turned = (head_dim as f64 * hybrid.rotary_part) as u64;
        let whole = !turned.is_multiple_of(2) || turned == 0;
        let rotary_part = if whole { 1.0 } else { hybrid.rotary_part };
        let window = window.filter(|_| family != "llama");
        Sizes {
            family,
            hidden,
            intermediate,
            vocab,
            layers,
            kv_heads,
            share,
            head_dim,
            tied,
            attention_bias,
            mlp_bias,
            rope_scaling,
            window,
            dtype,
            hybrid: Hybrid { rotary_part, ..hybrid },
            seed,
        }
    })
}

const DENSE: &[&str] = &["llama", "mistral", "qwen2", "qwen3"];
const HYBRID: &[&str] = &["qwen3_5", "qwen3_5_moe"];

/// Prompts: short ones, and ones that go over two pages of a cache and two chunks of DeltaNet.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![1 => 1usize..8, 2 => 60usize..72, 2 => 126usize..190]
}

/// What rounding may do: the plain pass in f32 strays this far from itself in f64, and the runtime, which adds in
/// another order, may stray eight times as far; where it happens to stray nowhere, some roundings of the greatest logit.
fn tolerance(source: &crate::common::Model, ids: &[u32], right: &[f64], vocab: usize) -> f64 {
    let rounded = Plain::new(source).in_f32().forward(ids).logits;
    let scale = right.iter().fold(0.0, |most: f64, logit| most.max(logit.abs()));
    8.0 * difference(right, &rounded, vocab).most + 32.0 * f64::from(f32::EPSILON) * scale
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 60, ..ProptestConfig::default() }
}

fn opened(sizes: &Sizes, on: Arc<Cpu>) -> (crate::common::Model, tempfile::TempDir, Model) {
    let (source, dir) = (sizes.model(), temp());
    source.write(dir.path());
    let model = open_on(dir.path(), on);
    (source, dir, model)
}

fn logits(model: &Model, state: &mut State, ids: &[u32]) -> Vec<f32> {
    model.forward(state, ids, Want::All).unwrap().logits
}

proptest! {
    #![proptest_config(config(48))]

    #[test]
    fn any_dense_model_computes_what_the_plain_pass_does(sizes in sizes(DENSE), tokens in length()) {
        agrees(&sizes, tokens)?;
    }

    #[test]
    fn any_model_with_delta_net_computes_what_the_plain_pass_does(sizes in sizes(HYBRID), tokens in length()) {
        agrees(&sizes, tokens)?;
    }
}

fn agrees(sizes: &Sizes, tokens: usize) -> Result<(), TestCaseError> {
    let (source, _dir, model) = opened(sizes, cpu());
    let (ids, vocab) = (sizes.prompt(tokens), sizes.vocab as usize);
    let plain = Plain::new(&source);
    let right = plain.forward(&ids);
    // Which experts a token goes to must not hang on a rounding.
    prop_assume!(plain.closest_choice(&ids) > 1e-4);
    let most = tolerance(&source, &ids, &right.logits, vocab);
    let pass = model.forward(&mut model.state(), &ids, Want::All).unwrap();
    let apart = difference(&right.logits, &widen(&pass.logits), vocab);
    prop_assert!(apart.most <= most, "{apart:?}, more than {most:e}");
    // That tolerance is worth something.
    let scale = right.logits.iter().fold(0.0, |most: f64, logit| most.max(logit.abs()));
    prop_assert!(most < 0.02 * scale, "a tolerance of {most:e} for logits of {scale}");
    if let Ok(head) = model.draft() {
        let next: Vec<u32> = ids.iter().rev().copied().collect();
        let found = head.forward_all(&model, &mut head.state(&model), &next, &pass.hidden).unwrap();
        let apart = difference(&plain.draft(&next, &right.hidden), &widen(&found.logits), vocab);
        prop_assert!(apart.most <= 8.0 * most, "draft head: {apart:?}, more than {most:e}");
    }
    Ok(())
}

#[test]
fn the_tolerance_of_random_models_sees_every_mistake() {
    use crate::plain::Mistake::*;
    // (family, what it has that the mistake needs, mistakes)
    let both = [
        GainAsStored,
        GatedNormCentred,
        GateBeforeNorm,
        SigmoidOfZ,
        TiledValueHeads,
        NoQueryScale,
        NoL2Norm,
        TapsReversed,
        SiluBeforeConv,
        GatesSwapped,
        DecayAfterUpdate,
        NoExpOfA,
        QueriesThenGates,
        SiluAttentionGate,
        RopeOnWholeHead,
        InterleavedRope,
        QkNormAfterRope,
        NoQkNorm,
    ];
    let experts = [ChosenNotRenormalised, SharedNotGated, GateAndUpSwapped];
    let dense = [InterleavedRope, NoFrequencyScaling, NoBias];
    let cases: [(&str, &[crate::plain::Mistake]); 4] = [
        ("qwen3_5", &both),
        ("qwen3_5_moe", &experts),
        ("llama", &dense),
        ("qwen3", &[QkNormAfterRope, NoQkNorm]),
    ];
    for (family, mistakes) in cases {
        for (seed, dtype) in [(1, "F32"), (2, "BF16"), (3, "F16")] {
            let wide = Sizes::wide(family);
            let linear = json!({ "type": "linear", "factor": 3.0 });
            let sizes = Sizes {
                hidden: 48,
                head_dim: 24,
                rope_scaling: linear,
                attention_bias: true,
                seed,
                dtype,
                ..wide.clone()
            };
            let sizes = Sizes { hybrid: Hybrid { key_dim: 10, value_dim: 24, ..wide.hybrid }, ..sizes };
            let (source, ids) = (sizes.model(), sizes.prompt(70));
            let right = Plain::new(&source).forward(&ids).logits;
            let most = tolerance(&source, &ids, &right, sizes.vocab as usize);
            for mistake in mistakes {
                let wrong = Plain::new(&source).with(*mistake).forward(&ids).logits;
                let apart = difference(&right, &wrong, sizes.vocab as usize).most;
                assert!(apart > 10.0 * most, "{family} {seed} {mistake:?}: {apart:e} of {most:e}");
            }
        }
    }
}

proptest! {
    #![proptest_config(config(24))]

    #[test]
    fn a_dense_model_gives_the_same_bits_however_its_tokens_are_cut(
        sizes in sizes(DENSE), tokens in length(), cuts in prop::collection::vec(1usize..100, 1..6),
        back in any::<prop::sample::Index>(),
    ) {
        let (_source, _dir, model) = opened(&sizes, cpu());
        let ids = sizes.prompt(tokens);
        let whole = logits(&model, &mut model.state(), &ids);
        let (parts, mut state) = in_passes(&model, &ids, &cuts);
        prop_assert!(same_bits(&parts, &whole), "passes of {cuts:?}");
        // Back to any token, with other tokens in between, and the rest once more.
        let at = back.index(ids.len());
        let row = |at: usize| &whole[at * sizes.vocab as usize..];
        state.truncate(at).unwrap();
        logits(&model, &mut state, &[0; 70]);
        state.truncate(at).unwrap();
        prop_assert!(same_bits(&logits(&model, &mut state, &ids[at..]), row(at)), "cut back to {at}");
    }

    #[test]
    fn a_model_with_delta_net_gives_the_same_bits_for_any_short_passes(
        sizes in sizes(HYBRID), tokens in 1usize..80, cuts in prop::collection::vec(1usize..16, 1..6),
        long in prop::collection::vec(1usize..80, 1..4),
    ) {
        let (source, _dir, model) = opened(&sizes, cpu());
        let (ids, vocab) = (sizes.prompt(tokens), sizes.vocab as usize);
        let (single, _) = in_passes(&model, &ids, &[1]);
        let (parts, _) = in_passes(&model, &ids, &cuts);
        prop_assert!(same_bits(&parts, &single), "passes of {cuts:?}");
        // Longer ones go through chunks, which round differently.
        let plain = Plain::new(&source);
        prop_assume!(plain.closest_choice(&ids) > 1e-4);
        let (parts, _) = in_passes(&model, &ids, &long);
        let most = tolerance(&source, &ids, &plain.forward(&ids).logits, vocab);
        let apart = difference(&widen(&single), &widen(&parts), vocab);
        prop_assert!(apart.most <= 2.0 * most, "passes of {long:?}: {apart:?}, more than twice {most:e}");
    }

    #[test]
    fn what_a_trial_takes_back_has_never_been(
        sizes in sizes(&["llama", "mistral", "qwen3", "qwen3_5", "qwen3_5_moe"]), tokens in length(),
        tried in 1usize..24, kept in any::<prop::sample::Index>(), again in 1usize..6,
    ) {
        let (_source, _dir, model) = opened(&sizes, cpu());
        let ids = sizes.prompt(tokens + tried + again);
        let kept = kept.index(tried + 1);
        let (mut state, mut plain) = (model.state(), model.state());
        model.forward(&mut state, &ids[..tokens], Want::Nothing).unwrap();
        model.forward(&mut plain, &ids[..tokens], Want::Nothing).unwrap();
        state.begin_trial();
        let during = logits(&model, &mut state, &ids[tokens..tokens + tried]);
        state.keep(model.cpu(), kept);
        let mut one_by_one = Vec::new();
        for token in &ids[tokens..tokens + kept] {
            one_by_one.extend(logits(&model, &mut plain, &[*token]));
        }
        prop_assert!(same_bits(&during[..one_by_one.len()], &one_by_one), "logits of the trial");
        prop_assert_eq!(state.tokens(), plain.tokens());
        // Another trial from there, given up altogether, and then on.
        let rest = &ids[tokens + kept..tokens + kept + again];
        state.begin_trial();
        logits(&model, &mut state, &[0; 5]);
        state.keep(model.cpu(), 0);
        prop_assert!(same_bits(&logits(&model, &mut state, rest), &logits(&model, &mut plain, rest)));
    }

    #[test]
    fn bits_do_not_depend_on_threads_or_instruction_set(
        sizes in sizes(&["llama", "mistral", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe"]),
        tokens in length(), threads in 1usize..6,
    ) {
        let (source, dir) = (sizes.model(), temp());
        source.write(dir.path());
        let ids = sizes.prompt(tokens);
        for precision in [Precision::Exact, Precision::Fast] {
            let on = |isa, threads| {
                let model = open_on(dir.path(), Cpu::new(isa, threads, precision));
                in_passes(&model, &ids, &[tokens.max(2) - 1, 1]).0
            };
            let expected = on(Isa::Scalar, 1);
            for isa in Isa::available() {
                prop_assert!(same_bits(&on(isa, threads), &expected), "{isa}, {threads} threads, {precision}");
            }
        }
    }

    #[test]
    fn a_stream_gives_the_bits_of_passes(
        sizes in sizes(&["mistral", "qwen2", "qwen3_5", "qwen3_5_moe"]),
        lengths in prop::collection::vec(1usize..90, 1..5),
    ) {
        let (_source, _dir, model) = opened(&sizes, cpu());
        let ids = sizes.prompt(lengths.iter().sum());
        let mut rest = ids.as_slice();
        let mut sequences = Vec::new();
        for length in &lengths {
            let (own, after) = rest.split_at(*length);
            sequences.push(own.to_vec());
            rest = after;
        }
        let mut stream = Stream::new(model.weights(), model.cpu().clone(), &sequences).unwrap();
        while stream.layer() < model.config().layers.len() {
            stream.step(&mut ()).unwrap();
        }
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        stream.logits(13, &mut |_, logits| found.extend_from_slice(logits)).unwrap();
        sequences.iter().for_each(|ids| expected.extend(logits(&model, &mut model.state(), ids)));
        prop_assert!(same_bits(&found, &expected), "sequences of {lengths:?}");
    }
}
