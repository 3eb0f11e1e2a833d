//! Our own format: [`Sensitivity`].

use serde::Deserialize;
use serde_json::Value;

use super::{Content, Curve, Entry, Facts, FileFormat, ImportError, Read, names};
use crate::alloc::cost::{self, Cost, Sensitivity};

pub(super) const FORMAT: FileFormat =
    FileFormat { name: "tqc-sensitivity", told_by: "`format` is `tqc-sensitivity/1`", is, read };

fn version(content: Content<'_>) -> Option<&str> {
    content.json?.get("format").and_then(Value::as_str).filter(|found| found.starts_with("tqc-sensitivity"))
}

fn is(content: Content<'_>) -> bool {
    version(content).is_some()
}

fn read(content: Content<'_>, facts: &Facts<'_>) -> Result<Read, ImportError> {
    let (Some(found), Some(json)) = (version(content), content.json) else { unreachable!("sniffed") };
    if found != cost::FORMAT {
        return Err(ImportError::Version { found: found.to_owned() });
    }
    let malformed = |problem: String| ImportError::Malformed { format: FORMAT.name, problem };
    let file = Sensitivity::deserialize(json).map_err(|error| malformed(error.to_string()))?;
    let digests = [
        ("the digest of all tensors' names, dtypes and shapes", file.model.tensors_sha256, facts.tensors),
        ("the digest of `config.json`", file.model.config_sha256, facts.config),
    ];
    if let Some((what, found, needed)) = digests.into_iter().find(|(_, found, needed)| found != needed) {
        let (found, needed) = (found.short(), needed.short());
        return Err(ImportError::OtherModel { what: what.to_owned(), found, needed });
    }
    let mut entries = Vec::new();
    for (name, module) in &file.modules {
        let costs = module.candidates.iter().map(|(codec, measured)| {
            let codec = codec.parse().map_err(|error| malformed(format!("of `{name}`: {error}")))?;
            Ok((codec, Cost { nats: measured.kl, standard_error: measured.standard_error }))
        });
        entries.push(Entry {
            module: names::canonical(name),
            name: name.clone(),
            weights: Some(module.weights),
            in_features: None,
            curve: Curve::Codecs(costs.collect::<Result<_, _>>()?),
        });
    }
    Ok(Read { measured: true, basis: file.basis, entries })
}
