//! Modules that share their codec, because runtimes compute them as one matrix.

use crate::arch::{Output, Part};

/// What the modules of one tie have in common: queries, keys and values of an attention; gate and up of an MLP, of all
/// experts or of the shared one; `in_proj_qkv` and `in_proj_z` of a DeltaNet. Any other module is tied to none.
pub fn tie(output: &Output) -> String {
    let (parent, name) = output.module.rsplit_once('.').unwrap_or(("", &output.module));
    let kind = match (output.seat.part, name) {
        (Some(Part::Query | Part::Key | Part::Value), _) => "q/k/v",
        (Some(Part::Gate | Part::Up), _) | (None, "gate_proj" | "up_proj") => "gate/up",
        (None, "in_proj_qkv" | "in_proj_z") => "in_proj",
        _ => return output.rule_path(),
    };
    format!("{parent} {kind}")
}
