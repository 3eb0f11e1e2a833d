//! `config.json` and `model.safetensors.index.json`, as stock mlx-lm reads them.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::codec::CodecSpec;
use crate::codec::trellis::{MAX_TILE, VERSION};

/// What mlx-lm calls a codec: exactly the keys that its `to_quantized` takes.
///
/// All three are always written: a missing one takes the mode's default, not the file's top level.
///
/// A trellis is no mode of mlx-lm's. Its entry has the codec's own parameters besides; `group_size` is the most weights
/// of a tile.
pub fn quantization_entry(codec: CodecSpec) -> Option<Value> {
    let (group, bits, mode) = match codec {
        CodecSpec::Trellis(trellis) => {
            let mut entry = serde_json::to_value(trellis).expect("numbers and names");
            let object = entry.as_object_mut().expect("a struct");
            object.insert("mode".to_owned(), "trellis".into());
            object.insert("group_size".to_owned(), MAX_TILE.into());
            object.insert("version".to_owned(), VERSION.into());
            return Some(entry);
        }
        CodecSpec::Affine { bits, group } => (group.get(), bits.get(), "affine"),
        CodecSpec::Mxfp4 => (32, 4, "mxfp4"),
        CodecSpec::Mxfp8 => (32, 8, "mxfp8"),
        CodecSpec::Nvfp4 => (16, 4, "nvfp4"),
        CodecSpec::Keep | CodecSpec::Bf16 | CodecSpec::F16 | CodecSpec::F32 => return None,
    };
    Some(json!({ "group_size": group, "bits": bits, "mode": mode }))
}

/// The `quantization` object: `default`'s settings at the top if any module has them, else the commonest;
/// one entry for each module that differs, `false` for a matrix that stays float.
///
/// `modules` are the matrices that could be quantized, by path in MLX's model tree. `None` if none is.
pub fn quantization<'a>(
    modules: impl Iterator<Item = (&'a str, CodecSpec)> + Clone,
    default: CodecSpec,
) -> Option<Value> {
    let mut counts: BTreeMap<CodecSpec, usize> = BTreeMap::new();
    for (_, codec) in modules.clone().filter(|(_, codec)| codec.quantizes()) {
        *counts.entry(codec).or_default() += 1;
    }
    let commonest = counts.iter().max_by_key(|(codec, count)| (**count, std::cmp::Reverse(**codec)));
    let top = if counts.contains_key(&default) { default } else { *commonest?.0 };
    let Some(Value::Object(mut object)) = quantization_entry(top) else { return None };
    for (path, codec) in modules.filter(|(_, codec)| *codec != top) {
        object.insert(path.to_owned(), quantization_entry(codec).unwrap_or(Value::Bool(false)));
    }
    Some(object.into())
}

/// Adds the quantization under both of its names: mlx-lm reads the first, the hub shows the second.
pub fn with_quantization(mut config: Map<String, Value>, quantization: Option<Value>) -> Map<String, Value> {
    if let Some(quantization) = quantization {
        config.insert("quantization".to_owned(), quantization.clone());
        config.insert("quantization_config".to_owned(), quantization);
    }
    config
}

/// JSON for people and readers alike: keys sorted, indent 4, one trailing newline, as mlx-lm writes it.
pub fn pretty_json<T: Serialize + ?Sized>(value: &T) -> Vec<u8> {
    let value = serde_json::to_value(value).expect("our types have string keys and finite numbers");
    let mut bytes = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, formatter);
    value.serialize(&mut serializer).expect("writing to memory does not fail");
    bytes.push(b'\n');
    bytes
}

/// `model.safetensors.index.json`: payload bytes, weights, and the file of every stored tensor.
pub fn index<'a>(tensors: impl Iterator<Item = (&'a str, &'a str, u64)>, weights: u64) -> Vec<u8> {
    let mut total = 0;
    let mut map = BTreeMap::new();
    for (name, file, bytes) in tensors {
        total += bytes;
        map.insert(name, file);
    }
    pretty_json(&json!({
        "metadata": { "total_size": total, "total_parameters": weights },
        "weight_map": map,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{AffineBits, GroupSize};

    fn affine(bits: u32, group: u32) -> CodecSpec {
        CodecSpec::Affine {
            bits: AffineBits::try_from(bits).unwrap(),
            group: GroupSize::try_from(group).unwrap(),
        }
    }

    #[test]
    fn every_deviating_module_has_a_whole_entry() {
        let modules =
            [("a", affine(4, 64)), ("b", affine(8, 64)), ("c", CodecSpec::Nvfp4), ("d", CodecSpec::Keep)];
        let object = quantization(modules.into_iter(), affine(4, 64)).unwrap();
        assert_eq!(
            object,
            json!({
                "group_size": 64, "bits": 4, "mode": "affine",
                "b": { "group_size": 64, "bits": 8, "mode": "affine" },
                "c": { "group_size": 16, "bits": 4, "mode": "nvfp4" },
                "d": false,
            })
        );
    }

    #[test]
    fn the_top_level_is_the_commonest_codec_when_nothing_has_the_default() {
        let modules = [("a", affine(3, 64)), ("b", affine(5, 32)), ("c", affine(5, 32))];
        let object = quantization(modules.into_iter(), CodecSpec::Keep).unwrap();
        assert_eq!(object["bits"], 5);
        assert_eq!(object["a"]["bits"], 3);
        assert!(object.get("b").is_none());
        assert_eq!(quantization([("a", CodecSpec::Bf16)].into_iter(), affine(4, 64)), None);
    }
}
