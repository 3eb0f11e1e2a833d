//! Which model was measured: digests, sizes, and what its bytes are spent on.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::EvalError;
use crate::artifact::PROVENANCE;
use crate::artifact::open::{Artifact, file_digest};
use crate::artifact::provenance::{AllocationRecord, CalibrationRecord, Provenance, digest_of_files};
use crate::check::inspect::{Inspection, ModuleRow, Totals, inspect, totals};
use crate::codec::CodecSpec;
use crate::digest::Digest;
use crate::failure::Outcome;
use crate::plan::BUDGET;
use crate::text::Tokenizer;

/// A model as the records of an evaluation name it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    /// An artifact's digest, which is that of its provenance record; of another folder, the digest over its weight
    /// files, configs and tokenizer.
    pub digest: Digest,
    /// `artifact`, `mlx` or `checkpoint`.
    pub kind: String,
    /// Name of its folder, for people.
    pub name: String,
    /// `model_type` of its config.
    pub model_type: Option<String>,
    /// What an artifact was made from and by, for people; null for other folders.
    pub record: Value,
    /// What its tokenizer does; none without one. See [`Tokenizer::fingerprint`].
    pub tokenizer: Option<Digest>,
    /// Weights.
    pub weights: u64,
    /// Bytes of all weight files.
    pub bytes: u64,
    /// 8 · bytes / weights.
    pub bits_per_weight: f64,
    /// What the bytes are spent on.
    pub classes: Vec<Class>,
}

/// Modules of one kind and storage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Class {
    /// `embedding`, `head`, `attention`, `delta-net`, `mlp`, `norm`, `draft`, `vision` or `other`.
    pub class: String,
    /// Dtype or codec.
    pub storage: String,
    /// Modules.
    pub modules: usize,
    /// Weights.
    pub weights: u64,
    /// Bytes of payload.
    pub bytes: u64,
}

/// Files beside the weights that decide what a model says.
const DECIDING: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
];

impl Identity {
    /// Reads the folder `dir`. Of a folder that is not an artifact every byte is read, for the digest.
    ///
    /// # Errors
    /// Files that cannot be read; a damaged record or tokenizer.
    pub fn read(dir: &Path) -> Outcome<Self> {
        let inspection = inspect(dir)?;
        let (digest, record) = match dir.join(PROVENANCE).exists() {
            true => {
                let artifact = Artifact::open(dir)?;
                let p = &artifact.provenance;
                let record = json!({
                    "tool": p.tool, "recipe": { "name": p.recipe.name, "sha256": p.recipe.sha256 },
                    "source": { "model_type": p.source.model_type, "hub": p.source.hub,
                                "revision": p.source.revision, "sha256": p.source.sha256 },
                    "plan_sha256": p.plan_sha256, "stages": p.stages, "allocator": p.allocator,
                    "sizes": p.sizes, "notes": p.notes.len(),
                    "calibration": p.calibration.as_ref().map(|record| calibration(p, record)),
                    "allocation": p.allocation.as_ref().map(|record| allocation(p, record, &inspection)),
                    "compared": p.compared,
                });
                (artifact.digest, record)
            }
            false => (folder_digest(dir, &inspection)?, Value::Null),
        };
        let tokenizer = match Tokenizer::open(dir) {
            Ok(tokenizer) => Some(tokenizer.fingerprint()?),
            Err(crate::text::TextError::NoTokenizer { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        let absolute = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        let name =
            absolute.file_name().map_or_else(|| "/".to_owned(), |name| name.to_string_lossy().into_owned());
        // It stands in tables, where a line end would begin another row.
        let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
        Ok(Self {
            digest,
            kind: inspection.kind.to_owned(),
            name: name.chars().map(escape).collect(),
            model_type: inspection.model_type.clone(),
            record,
            tokenizer,
            weights: inspection.weights,
            bytes: inspection.files.iter().map(|file| file.bytes).sum(),
            bits_per_weight: inspection.bits_per_weight,
            classes: classes(&inspection),
        })
    }

    /// Refuses a model whose tokenizer does anything else than the one with fingerprint `needed`.
    ///
    /// # Errors
    /// [`EvalError::OtherTokenizer`].
    pub fn check_tokenizer(&self, needed: Digest) -> Result<(), EvalError> {
        if self.tokenizer == Some(needed) {
            return Ok(());
        }
        let found = self.tokenizer.map_or_else(|| "none".to_owned(), |found| found.to_string());
        Err(EvalError::OtherTokenizer { found, needed })
    }
}

/// A calibration without its rows of modules: their counts and means, and how many modules each encoder filled.
fn calibration(provenance: &Provenance, record: &CalibrationRecord) -> Value {
    let quantizes = |codec: &str| codec.parse::<CodecSpec>().is_ok_and(|codec| codec.quantizes());
    let quantized = provenance.outputs.iter().filter(|output| quantizes(&output.codec));
    let of: BTreeMap<&str, &str> =
        quantized.map(|output| (output.module.as_str(), output.encoder.as_str())).collect();
    let mut encoders: BTreeMap<&str, usize> = BTreeMap::new();
    of.values().for_each(|encoder| *encoders.entry(*encoder).or_default() += 1);
    let mut value = json!(CalibrationRecord { modules: Vec::new(), ..record.clone() });
    value["modules"] = json!(record.totals());
    value["encoders"] = json!(encoders);
    value
}

/// A budget's record, and what each module that it gave a codec takes: name, storage, weights, bytes.
fn allocation(provenance: &Provenance, record: &AllocationRecord, inspection: &Inspection) -> Value {
    let path = |name: &str| name.strip_suffix(".weight").unwrap_or(name).to_owned();
    let given: BTreeSet<String> = provenance
        .source
        .tensors
        .iter()
        .filter(|tensor| tensor.reason == BUDGET)
        .flat_map(|tensor| &tensor.outputs)
        .map(|output| path(output))
        .collect();
    let rows = inspection.modules.iter().filter(|module| given.contains(&path(&module.name)));
    let rows = rows.map(|module| json!([module.name, module.storage, module.weights, module.bytes]));
    let mut value = json!(record);
    value["given"] = rows.collect();
    value
}

fn folder_digest(dir: &Path, inspection: &Inspection) -> Result<Digest, EvalError> {
    let beside = DECIDING.iter().map(|name| (*name).to_owned()).filter(|name| dir.join(name).is_file());
    let weights = inspection.files.iter().map(|file| file.name.clone());
    let mut files = BTreeMap::new();
    for name in beside.chain(weights) {
        let path = dir.join(&name);
        let digest = file_digest(&path).map_err(EvalError::io("read", &path))?;
        files.insert(name, digest);
    }
    Ok(digest_of_files(files.iter().map(|(name, digest)| (name.as_str(), *digest))))
}

fn classes(inspection: &Inspection) -> Vec<Class> {
    let of = |module: &ModuleRow| (class_of(&module.name), module.storage.clone());
    let row = |((class, storage), Totals { modules, weights, bytes }): ((&str, String), _)| Class {
        class: class.to_owned(),
        storage,
        modules,
        weights,
        bytes,
    };
    totals(&inspection.modules, of).into_iter().map(row).collect()
}

/// The class of a module, by the parts of its name.
fn class_of(name: &str) -> &'static str {
    let part = |wanted: &str| name.split(['.', '/']).any(|part| part == wanted);
    // The first that fits: a draft head and a vision tower have attention and norms of their own.
    let table: [(&str, &[&str]); 8] = [
        ("draft", &["mtp"]),
        ("vision", &["visual", "vision", "vision_tower"]),
        ("embedding", &["embed_tokens"]),
        ("head", &["lm_head"]),
        ("norm", &["norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"]),
        ("attention", &["self_attn"]),
        ("delta-net", &["linear_attn"]),
        ("mlp", &["mlp"]),
    ];
    table
        .iter()
        .find(|(_, parts)| parts.iter().any(|wanted| part(wanted)))
        .map_or("other", |(class, _)| class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_told_apart_by_the_parts_of_their_names() {
        for (name, class) in [
            ("model.layers.0.self_attn.q_proj", "attention"),
            ("language_model.model.layers.3.linear_attn.norm.weight", "norm"),
            ("model.layers.0.mlp.switch_mlp.gate_proj", "mlp"),
            ("mtp/mtp.layers.0.self_attn.q_proj", "draft"),
            ("vision/visual.blocks.0.norm1.weight", "vision"),
            ("lm_head", "head"),
            ("model.embed_tokens", "embedding"),
            ("model.mlpx.weight", "other"),
        ] {
            assert_eq!(class_of(name), class, "{name}");
        }
    }
}
