//! What a plan says of a calibration, by arithmetic.

use tqc::plan::{RowsPlace, calibration_operations, estimate};
use tqc::recipe::Activations;
use tqc::units::Bytes;

use crate::*;

/// A plan of its own, to be changed.
fn own(dir: &Path, text: &str, source: &Path) -> Plan {
    Arc::try_unwrap(planned(dir, text, source)).unwrap_or_else(|_| panic!("nobody else holds it"))
}

#[test]
fn rows_take_disk_where_they_are_kept_and_where_memory_does_not_hold_them() {
    let dir = temp();
    text(dir.path());
    let mut plan = own(dir.path(), &recipe_text("gptq", 4, "", ""), &fixture("qwen3"));
    let (context, hidden) = (24, plan.model.hidden);
    for (in_memory, activations, times) in [
        // Kept, and kept anew beside that.
        (Bytes::mib(256), Activations::Unrounded, 2),
        (Bytes::mib(256), Activations::Sequential, 2),
        // The file that they lie in; with `sequential` those before a layer in another.
        (Bytes(0), Activations::Unrounded, 3),
        (Bytes(0), Activations::Sequential, 4),
    ] {
        plan.rows = RowsPlace { in_memory, ..RowsPlace::default() };
        plan.recipe.calibration.activations = activations;
        let mut disk = |rows| {
            plan.recipe.calibration.rows = rows;
            plan.disk().0
        };
        assert_eq!(disk(19) - disk(8), times * 4 * 11 * context * hidden, "{in_memory}, {activations:?}");
    }
    // 256 MiB and a row more: the file comes on top.
    plan.rows = RowsPlace::default();
    plan.recipe.calibration.activations = Activations::Unrounded;
    let row = 4 * context * hidden;
    let most = (256 << 20) / row;
    let mut disk = |rows: u64| {
        plan.recipe.calibration.rows = u32::try_from(rows).unwrap();
        plan.disk().0
    };
    assert_eq!(disk(most + 1) - disk(most), 2 * row + (most + 1) * row);
}

#[test]
fn operations_are_those_of_layers_moments_factors_and_searches() {
    let dir = temp();
    text(dir.path());
    let source = fixture("llama-untied");
    let config = read_json(&source.join("config.json"));
    let of = |key: &str| config[key].as_f64().unwrap();
    let (h, i, layers) = (of("hidden_size"), of("intermediate_size"), of("num_hidden_layers"));
    let head_dim = config.get("head_dim").and_then(Value::as_f64).unwrap_or(h / of("num_attention_heads"));
    let (q, kv) = (of("num_attention_heads") * head_dim, of("num_key_value_heads") * head_dim);
    let vocab = of("vocab_size");
    let (tokens, context) = (8.0 * 24.0, 24.0);
    // Rows and columns of q, k, v, o, gate, up, down.
    let matrices = [(q, h), (kv, h), (kv, h), (h, q), (i, h), (i, h), (h, i)];
    let weights: f64 = matrices.iter().map(|(n, k)| n * k).sum();
    let pass = layers * (2.0 * tokens * weights + 2.0 * tokens * context * q);
    // One sum for q, k and v, one for gate and up; and the head's.
    let moments = layers * tokens * (h * h + q * q + h * h + i * i) + tokens * h * h;
    let factors = layers * matrices.iter().map(|(_, k)| k.powi(3) / 3.0).sum::<f64>() + h.powi(3) / 3.0;
    let squares = layers * matrices.iter().map(|(n, k)| n * k * k).sum::<f64>() + vocab * h * h;
    for (encoder, calibration, more, passes, each) in [
        ("gptq", "", "", 1.0, 4.0),
        ("gptq", "activations = \"sequential\"", "", 2.0, 4.0),
        ("gptq-refit", "", "", 1.0, 8.0),
        ("gptq-refit", "", "[gptq]\nsweeps = 5\n", 1.0, 14.0),
    ] {
        let plan = planned(dir.path(), &recipe_text(encoder, 4, calibration, more), &source);
        let expected = passes * pass + moments + factors + each * squares;
        let found = calibration_operations(&plan);
        assert!(
            (found / expected - 1.0).abs() < 1e-12,
            "{encoder}, {calibration}, {more}: {found} of {expected}"
        );
    }
    let plan = planned(dir.path(), &recipe_text("mlx", 4, "", ""), &source);
    assert_eq!((calibration_operations(&plan), estimate(&plan).calibrate_s), (0.0, 0.0));
    // The sum of nothing is −0, which a report would show.
    assert!(
        calibration_operations(&plan).is_sign_positive() && estimate(&plan).calibrate_s.is_sign_positive()
    );
}

#[test]
fn a_token_goes_through_the_experts_that_are_chosen_for_it() {
    let dir = temp();
    text(dir.path());
    let mut plan = own(dir.path(), &recipe_text("gptq", 4, "", ""), &fixture("qwen3_5_moe"));
    let config = read_json(&fixture("qwen3_5_moe").join("config.json"));
    let of =
        |key: &str| config.get(key).or_else(|| config["text_config"].get(key)).unwrap().as_u64().unwrap();
    let (experts, chosen) = (of("num_experts"), of("num_experts_per_tok"));
    assert!(chosen < experts);
    // For each token more: two operations a weight, and a square of each input's width.
    let mut per_token = 0.0;
    let mut inputs = std::collections::BTreeSet::new();
    for module in plan.modules.iter().filter(|m| m.computes && m.output.module.contains(".layers.")) {
        let (n, k) = (module.weights() / module.work.row_elements as u64, module.work.row_elements as u64);
        let name = module.output.module.as_str();
        let share = if name.contains("switch_mlp") { chosen as f64 / experts as f64 } else { 1.0 };
        per_token += 2.0 * share * (n * k) as f64;
        if module.assignment.encoder != "gptq" {
            continue;
        }
        let (layer, last) = name.rsplit_once('.').unwrap();
        let reads = match last {
            "q_proj" | "k_proj" | "v_proj" | "in_proj_qkv" | "in_proj_z" | "in_proj_a" | "in_proj_b" => {
                "mixer"
            }
            "gate_proj" | "up_proj" if name.contains("shared_expert") => "mlp",
            "gate" | "shared_expert_gate" => "mlp",
            "gate_proj" | "up_proj" => "experts",
            other => other,
        };
        let layer = layer.split(".layers.").nth(1).unwrap().split('.').next().unwrap().to_owned();
        let own = if reads == "down_proj" { name.to_owned() } else { reads.to_owned() };
        let times = if name.contains("switch_mlp") { chosen } else { 1 };
        if inputs.insert((layer, own)) {
            per_token += (times * k * k) as f64;
        }
    }
    // The head's input.
    per_token += (plan.model.hidden * plan.model.hidden) as f64;
    let decoder = plan.arch.decoder(&plan.config, &plan.model).unwrap_or_else(|e| panic!("{e}"));
    let context = 24.0;
    for kind in &decoder.layers {
        per_token += match kind {
            tqc::arch::decoder::MixerKind::Attention { .. } => {
                2.0 * context * (decoder.attention.q_heads * decoder.attention.head_dim) as f64
            }
            tqc::arch::decoder::MixerKind::DeltaNet => {
                let net = decoder.delta_net.unwrap();
                8.0 * (net.value_heads * net.key_dim * net.value_dim) as f64
            }
        };
    }
    let mut operations = |rows: u32| {
        plan.recipe.calibration.rows = rows;
        calibration_operations(&plan)
    };
    let found = (operations(11) - operations(4)) / (7.0 * context);
    assert!((found / per_token - 1.0).abs() < 1e-9, "{found} of {per_token}");
}
