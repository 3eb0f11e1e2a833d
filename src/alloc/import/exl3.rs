//! ExLlamaV3's `measurement.json`, of `util/measure.py`.
//!
//! ```json
//! { "base": { "dir": "…", "bpw": 2.01 }, "alts": [ { "dir": "…", "bpw": 3.01 } ],
//!   "groups": [ { "idx": 0, "layers": [ "model.layers.0.self_attn.q_proj" ],
//!                 "candidates": [ { "dkld": -0.004, "dbits": 2097152 } ] } ] }
//! ```
//!
//! `dkld` is the change of the whole model's KL when a group's layers are taken from an alternative instead of the base.
//! Assumed: models of k bits (bpw rounded; EXL3's scales add little to k) stand for trellises of k bits, which are of their
//! kind, and for affine codecs of k bits, and a group's cost divides evenly among its layers. Costs are counted from the
//! base's, which is 0, so only differences mean something: the table is a proxy. Source: `exllamav3` 1.6.5 `conversion/measure_model.py`, `optimize_model.py`.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Content, Curve, Entry, Facts, FileFormat, ImportError, Read, names};

pub(super) const FORMAT: FileFormat = FileFormat {
    name: "exl3",
    told_by: "`base`, `alts` and `groups`, whose candidates have `dkld`",
    is,
    read,
};

fn is(content: Content<'_>) -> bool {
    let has = |key| content.json.is_some_and(|json| json.get(key).is_some());
    has("base") && has("alts") && has("groups")
}

/// Bits of a model's codes: its bits per weight without the scales, which add less than a quarter.
fn width(model: &Value) -> Option<u32> {
    let bpw = model["bpw"].as_f64().filter(|bpw| (1.0..=16.0).contains(bpw))?;
    (bpw - bpw.floor() < 0.25).then_some(bpw.floor() as u32)
}

fn read(content: Content<'_>, _: &Facts<'_>) -> Result<Read, ImportError> {
    let malformed = |problem: String| ImportError::Malformed { format: FORMAT.name, problem };
    let json = content.json.expect("sniffed");
    let list = |value: &'_ Value, what: &str| match value.as_array() {
        Some(list) => Ok(list.clone()),
        None => Err(malformed(format!("{what} is no list"))),
    };
    let models: Vec<Value> =
        std::iter::once(json["base"].clone()).chain(list(&json["alts"], "`alts`")?).collect();
    let mut widths = Vec::new();
    for model in &models {
        let bits = width(model).ok_or_else(|| {
            malformed(format!("a model of `bpw` {} has no whole number of bits", model["bpw"]))
        })?;
        if widths.contains(&bits) {
            return Err(malformed(format!("two of its models have {bits} bits")));
        }
        widths.push(bits);
    }
    let mut entries = Vec::new();
    for (index, group) in list(&json["groups"], "`groups`")?.iter().enumerate() {
        let layers = list(&group["layers"], &format!("`layers` of group {index}"))?;
        let candidates = list(&group["candidates"], &format!("`candidates` of group {index}"))?;
        let changes: Option<Vec<f64>> =
            candidates.iter().map(|candidate| candidate["dkld"].as_f64()).collect();
        let changes = changes.filter(|changes| changes.len() + 1 == widths.len()).ok_or_else(|| {
            malformed(format!(
                "group {index} has not one `dkld` for each of {} alternatives",
                widths.len() - 1
            ))
        })?;
        let share = 1.0 / layers.len() as f64;
        let costs = std::iter::once(0.0).chain(changes).map(|change| change * share);
        let costs: BTreeMap<u32, f64> = widths.iter().copied().zip(costs).collect();
        for layer in &layers {
            let name =
                layer.as_str().ok_or_else(|| malformed(format!("a layer of group {index} is no string")))?;
            entries.push(Entry {
                module: names::canonical(name),
                name: name.to_owned(),
                weights: None,
                in_features: None,
                curve: Curve::Widths(costs.clone()),
            });
        }
    }
    Ok(Read { measured: false, basis: "none".to_owned(), entries })
}
