//! OptiQ's `sensitivity.json`: KL gains of single layers, measured.
//!
//! ```json
//! { "group_size": 64, "metric": "kl_divergence_vs_reference",
//!   "layers": [ { "layer_name": "…", "sensitivities": { "4": 0.0012, "8": 1e-5 }, "param_count": 655360 } ] }
//! ```
//!
//! or the list alone, whose groups are of 64. `sensitivities[b]` is the mean KL gain with this layer alone in MLX's affine
//! codec of b bits; 16 stands for bf16. Source: `mlx-optiq` 0.0.8 `core/sensitivity.py`, 0.7.7 `models/llm.py`.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Content, Curve, Entry, Facts, FileFormat, ImportError, Read, names};
use crate::alloc::cost::Cost;
use crate::codec::{AffineBits, CodecSpec, GroupSize};

pub(super) const FORMAT: FileFormat =
    FileFormat { name: "optiq", told_by: "layers with `layer_name` and `sensitivities`", is, read };

/// Weights that share a scale where the file does not say.
const GROUP: u64 = 64;

/// A width that means unrounded.
const LOSSLESS: u32 = 16;

fn layers(json: &Value) -> Option<&Vec<Value>> {
    json.as_array().or_else(|| json.get("layers")?.as_array())
}

fn is(content: Content<'_>) -> bool {
    let layers = content.json.and_then(layers);
    layers.is_some_and(|layers| {
        !layers.is_empty()
            && layers.iter().all(|l| l.get("layer_name").is_some() && l.get("sensitivities").is_some())
    })
}

fn read(content: Content<'_>, _: &Facts<'_>) -> Result<Read, ImportError> {
    let malformed = |problem: String| ImportError::Malformed { format: FORMAT.name, problem };
    let json = content.json.expect("sniffed");
    let group = json.get("group_size").map_or(Some(GROUP), Value::as_u64);
    let group = group.and_then(|group| GroupSize::try_from(u32::try_from(group).ok()?).ok());
    let group = group.ok_or_else(|| malformed("its `group_size` is none of 32, 64 and 128".to_owned()))?;
    let mut entries = Vec::new();
    for layer in layers(json).expect("sniffed") {
        let name = layer["layer_name"]
            .as_str()
            .ok_or_else(|| malformed("a `layer_name` is no string".to_owned()))?;
        let widths = layer["sensitivities"].as_object();
        let widths = widths.ok_or_else(|| malformed(format!("`sensitivities` of `{name}` is no object")))?;
        let mut costs = BTreeMap::new();
        for (width, nats) in widths {
            let bits: Option<u32> = width.parse().ok();
            let codec = match bits {
                Some(LOSSLESS) => Some(CodecSpec::Bf16),
                bits => bits
                    .and_then(|bits| AffineBits::try_from(bits).ok())
                    .map(|bits| CodecSpec::Affine { bits, group }),
            };
            let codec = codec.ok_or_else(|| malformed(format!("`{name}` has a width of `{width}` bits")))?;
            let nats = nats.as_f64().ok_or_else(|| malformed(format!("a KL of `{name}` is no number")))?;
            costs.insert(codec, Cost { nats, standard_error: None });
        }
        entries.push(Entry {
            module: names::canonical(name),
            name: name.to_owned(),
            weights: layer.get("param_count").and_then(Value::as_u64),
            in_features: None,
            curve: Curve::Codecs(costs),
        });
    }
    Ok(Read { measured: true, basis: "none".to_owned(), entries })
}
