//! Other tools' names of modules.
//!
//! All that call a module by its path in the model's tree differ only in prefixes; [`canonical`] takes them off.
//! llama.cpp has names of its own; [`of_llama_cpp`] translates those of the families in [`crate::arch`].
//! Source of these: llama.cpp `gguf-py/gguf/constants.py`, `MODEL_TENSORS` of `llama`, `qwen2`, `qwen3`, `qwen35` and
//! `qwen35moe`.

/// `layers.0.mlp.down_proj`, whatever stands before `layers`; experts one by one go by the name of all together.
pub fn canonical(name: &str) -> String {
    let mut rest = name.strip_suffix(".weight").unwrap_or(name);
    while let Some(shorter) =
        ["language_model.", "model."].iter().find_map(|prefix| rest.strip_prefix(prefix))
    {
        rest = shorter;
    }
    let Some((before, after)) = rest.split_once(".mlp.experts.") else { return rest.to_owned() };
    match after.split_once('.') {
        Some((number, projection)) if number.bytes().all(|b| b.is_ascii_digit()) => {
            format!("{before}.mlp.switch_mlp.{projection}")
        }
        _ => rest.to_owned(),
    }
}

/// The same for a tensor of llama.cpp, such as `blk.0.ffn_down.weight`; none for a name it does not have.
pub fn of_llama_cpp(name: &str) -> Option<String> {
    let name = name.strip_suffix(".weight").unwrap_or(name);
    match name {
        "token_embd" => return Some("embed_tokens".to_owned()),
        "output" => return Some("lm_head".to_owned()),
        _ => {}
    }
    let (layer, tensor) = name.strip_prefix("blk.")?.split_once('.')?;
    if layer.is_empty() || !layer.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let module = match tensor {
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_qkv" => "linear_attn.in_proj_qkv",
        "attn_gate" => "linear_attn.in_proj_z",
        "ssm_alpha" => "linear_attn.in_proj_a",
        "ssm_beta" => "linear_attn.in_proj_b",
        "ssm_out" => "linear_attn.out_proj",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        "ffn_gate_inp" => "mlp.gate",
        "ffn_gate_exps" => "mlp.switch_mlp.gate_proj",
        "ffn_up_exps" => "mlp.switch_mlp.up_proj",
        "ffn_down_exps" => "mlp.switch_mlp.down_proj",
        "ffn_gate_inp_shexp" => "mlp.shared_expert_gate",
        "ffn_gate_shexp" => "mlp.shared_expert.gate_proj",
        "ffn_up_shexp" => "mlp.shared_expert.up_proj",
        "ffn_down_shexp" => "mlp.shared_expert.down_proj",
        _ => return None,
    };
    Some(format!("layers.{layer}.{module}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_of_every_tool_come_off() {
        for name in [
            "model.layers.0.mlp.down_proj",
            "language_model.model.layers.0.mlp.down_proj",
            "model.language_model.layers.0.mlp.down_proj.weight",
            "layers.0.mlp.down_proj",
        ] {
            assert_eq!(canonical(name), "layers.0.mlp.down_proj", "{name}");
        }
        assert_eq!(canonical("language_model.lm_head"), "lm_head");
        assert_eq!(canonical("model.layers.1.mlp.experts.17.up_proj"), "layers.1.mlp.switch_mlp.up_proj");
    }

    #[test]
    fn llama_cpp_names_are_translated_and_others_are_not_guessed() {
        assert_eq!(of_llama_cpp("blk.12.ffn_down.weight").as_deref(), Some("layers.12.mlp.down_proj"));
        assert_eq!(
            of_llama_cpp("blk.3.attn_qkv.weight").as_deref(),
            Some("layers.3.linear_attn.in_proj_qkv")
        );
        assert_eq!(of_llama_cpp("token_embd.weight").as_deref(), Some("embed_tokens"));
        assert_eq!(of_llama_cpp("blk.x.ffn_down.weight"), None);
        assert_eq!(of_llama_cpp("blk.0.nextn.eh_proj.weight"), None);
    }
}
