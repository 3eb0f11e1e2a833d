//! mlx-lm's `…_sensitivities.json`, of `mlx_lm.dynamic_quant`: a list of `[module, sensitivity]`.
//!
//! sensitivity s = Σ (∂KL/∂w · (w_low − w_high)) / (weights / 10^6), the gradient taken at the low width: to first order
//! what the high width saves, for a million weights. The file does not record the widths; the tool's own defaults, 4 and 5
//! bits, are assumed, and a cost that falls by four with each bit:
//!
//! cost(b) = s · weights / 10^6 · 4^-b / (4^-4 − 4^-5)
//!
//! A negative s, which a first-order estimate may give, counts as 0. Source: `mlx_lm` 0.32.2 `quant/dynamic_quant.py`.

use serde_json::Value;

use super::{Content, Curve, Entry, Facts, FileFormat, ImportError, Read, names, quarter};

pub(super) const FORMAT: FileFormat =
    FileFormat { name: "mlx-lm", told_by: "a list of [module, sensitivity] pairs", is, read };

/// Widths that the tool compares by default.
const WIDTHS: (u32, u32) = (4, 5);

fn pair(value: &Value) -> Option<(&str, f64)> {
    match value.as_array()?.as_slice() {
        [name, sensitivity] => Some((name.as_str()?, sensitivity.as_f64()?)),
        _ => None,
    }
}

fn is(content: Content<'_>) -> bool {
    let list = content.json.and_then(Value::as_array);
    list.is_some_and(|list| !list.is_empty() && list.iter().all(|value| pair(value).is_some()))
}

fn read(content: Content<'_>, _: &Facts<'_>) -> Result<Read, ImportError> {
    let pairs = content.json.and_then(Value::as_array).expect("sniffed").iter().filter_map(pair);
    let saved = quarter(WIDTHS.0) - quarter(WIDTHS.1);
    let entries = pairs.map(|(name, sensitivity)| Entry {
        module: names::canonical(name),
        name: name.to_owned(),
        weights: None,
        in_features: None,
        curve: Curve::Quarter { scale: sensitivity.max(0.0) / 1e6 / saved, by_weight: true },
    });
    Ok(Read { measured: false, basis: "none".to_owned(), entries: entries.collect() })
}
