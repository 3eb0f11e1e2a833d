//! How the weights of a packed model are encoded: the `quantization` object of MLX's `config.json`.
//!
//! `group_size`, `bits` and `mode` (default `affine`) at its top hold for every module that has no entry of its
//! own; an entry, by the module's path, has the same keys, with the mode's defaults for those missing, or is
//! `false` for none or `true` for the common one. Source: `mlx_lm` 0.32.2, `utils.load_model`.

use std::collections::BTreeMap;

use serde::Deserialize as _;
use serde_json::{Map, Value};

use super::ArchError;
use crate::codec::trellis::{MAX_TILE, Trellis, VERSION};
use crate::codec::{AffineBits, CodecSpec, GroupSize};

/// The codec of each module.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Packing {
    default: Option<CodecSpec>,
    modules: BTreeMap<String, Option<CodecSpec>>,
}

impl Packing {
    /// The codec of a module whose scales are stored; none if the config says that it has none.
    pub fn codec(&self, module: &str) -> Option<CodecSpec> {
        self.modules.get(module).copied().unwrap_or(self.default)
    }

    /// Modules that the config says have none.
    pub fn floats(&self) -> impl Iterator<Item = &str> + Clone {
        self.modules.iter().filter(|(_, codec)| codec.is_none()).map(|(module, _)| module.as_str())
    }

    /// Whether the model is packed at all.
    pub fn is_packed(&self) -> bool {
        self.default.is_some()
    }

    /// Takes `quantization` and its copy for the hub out of a config.
    ///
    /// # Errors
    /// [`ArchError::Value`] for an entry that is not one of ours; [`ArchError::ForeignPacking`] if only another
    /// tool's description is there.
    pub(super) fn take(root: &mut Map<String, Value>) -> Result<Self, ArchError> {
        let copy = root.remove("quantization_config").filter(|value| !value.is_null());
        let Some(own) = root.remove("quantization").filter(|value| !value.is_null()) else {
            return match copy {
                None => Ok(Self::default()),
                Some(foreign) => {
                    let method = foreign.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
                    Err(ArchError::ForeignPacking { method: method.to_owned() })
                }
            };
        };
        let Value::Object(own) = own else { return Err(bad("quantization", &own, "an object is needed")) };
        let mut modules = BTreeMap::new();
        for (path, entry) in &own {
            let key = format!("quantization.{path}");
            match entry {
                // Read below, for all modules.
                _ if ["group_size", "mode", "version"]
                    .iter()
                    .chain(&Trellis::KEYS)
                    .any(|key| key == path) =>
                {
                    continue;
                }
                Value::Object(entry) => modules.insert(path.clone(), Some(codec(&key, entry)?)),
                Value::Bool(false) => modules.insert(path.clone(), None),
                Value::Bool(true) => continue,
                other => return Err(bad(&key, other, "an object, true or false is needed")),
            };
        }
        Ok(Self { default: Some(codec("quantization", &own)?), modules })
    }
}

fn bad(key: &str, found: &Value, needed: &str) -> ArchError {
    let mut found = found.to_string();
    if found.len() > 80 {
        found = found.chars().take(77).chain("...".chars()).collect();
    }
    ArchError::Value { key: key.to_owned(), found, needed: needed.to_owned() }
}

/// The trellis that an entry describes.
fn trellis(key: &str, entry: &Map<String, Value>) -> Result<CodecSpec, ArchError> {
    for (name, needed) in [("group_size", MAX_TILE as u64), ("version", u64::from(VERSION))] {
        let found = entry.get(name).cloned().unwrap_or(Value::Null);
        if found.as_u64() != Some(needed) {
            return Err(bad(&format!("{key}.{name}"), &found, &format!("a trellis has {needed} here")));
        }
    }
    // At the top of the object, modules' own entries follow.
    let own = Trellis::KEYS.iter().filter_map(|key| Some(((*key).to_owned(), entry.get(*key)?.clone())));
    let own = Value::Object(own.collect());
    Trellis::deserialize(&own).map(CodecSpec::Trellis).map_err(|error| bad(key, &own, &error.to_string()))
}

/// The codec that an entry names.
fn codec(key: &str, entry: &Map<String, Value>) -> Result<CodecSpec, ArchError> {
    let mode = match entry.get("mode") {
        None => "affine",
        Some(Value::String(mode)) => mode,
        Some(other) => return Err(bad(&format!("{key}.mode"), other, "a name is needed")),
    };
    let (bits, group) = match mode {
        "affine" => (4, 64),
        "mxfp4" => (4, 32),
        "mxfp8" => (8, 32),
        "nvfp4" => (4, 16),
        "trellis" => return trellis(key, entry),
        other => {
            let needed = "the known ones are `affine`, `mxfp4`, `mxfp8`, `nvfp4` and `trellis`";
            return Err(bad(&format!("{key}.mode"), &other.into(), needed));
        }
    };
    let number = |name: &str, default: u32| match entry.get(name) {
        None => Ok(default),
        Some(value) => match value.as_u64().and_then(|n| u32::try_from(n).ok()) {
            Some(n) => Ok(n),
            None => Err(bad(&format!("{key}.{name}"), value, "a whole number is needed")),
        },
    };
    let (found_bits, found_group) = (number("bits", bits)?, number("group_size", group)?);
    if mode == "affine" {
        let at = |name: &str| format!("{key}.{name}");
        let bits = AffineBits::try_from(found_bits);
        let bits = bits.map_err(|needed| bad(&at("bits"), &found_bits.into(), &needed))?;
        let group = GroupSize::try_from(found_group);
        let group = group.map_err(|needed| bad(&at("group_size"), &found_group.into(), &needed))?;
        return Ok(CodecSpec::Affine { bits, group });
    }
    if (found_bits, found_group) != (bits, group) {
        let found = Value::Object(entry.clone());
        return Err(bad(key, &found, &format!("`{mode}` has {bits} bits in groups of {group}")));
    }
    Ok(match mode {
        "mxfp4" => CodecSpec::Mxfp4,
        "mxfp8" => CodecSpec::Mxfp8,
        _ => CodecSpec::Nvfp4,
    })
}
