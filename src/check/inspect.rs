//! What a folder of weights holds.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use crate::arch::Folder;
use crate::artifact::open::Artifact;
use crate::checkpoint::{Checkpoint, Links, TensorEntry};
use crate::codec::CodecSpec;
use crate::codec::trellis::Trellis;
use crate::digest::Digest;
use crate::failure::Outcome;
use crate::tensor::{Dtype, Shape};

/// A folder's content, from headers alone.
#[derive(Debug, Clone, Serialize)]
pub struct Inspection {
    /// The folder or file, as it is shown: names need not be UTF-8.
    pub path: String,
    /// `artifact` (ours), `mlx` (quantized or MLX layout) or `checkpoint`.
    pub kind: &'static str,
    /// `model_type` of `config.json`, if there is one.
    pub model_type: Option<String>,
    /// The artifact's digest.
    pub digest: Option<Digest>,
    /// Weight files.
    pub files: Vec<FileRow>,
    /// Modules, in file order.
    pub modules: Vec<ModuleRow>,
    /// Modules by storage.
    pub storage: Vec<StorageRow>,
    /// Weights in all modules.
    pub weights: u64,
    /// Payload bytes.
    pub bytes: u64,
    /// 8 · (bytes of all weight files) / weights.
    pub bits_per_weight: f64,
}

/// One weight file.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct FileRow {
    pub name: String,
    pub bytes: u64,
    pub tensors: usize,
    pub metadata: BTreeMap<String, String>,
}

/// A module: one float tensor, or the planes of a quantized one.
#[derive(Debug, Clone, Serialize)]
pub struct ModuleRow {
    /// Name of the tensor, or of the module if it is quantized.
    pub name: String,
    /// Dtype, or codec.
    pub storage: String,
    /// Shape of the weight, unpacked.
    pub shape: Shape,
    /// Weights.
    pub weights: u64,
    /// Bytes of all planes.
    pub bytes: u64,
    /// Index of the file.
    pub file: usize,
    /// Σ (w − decode)² / Σ w², if the artifact's record has it.
    pub relative_mse: Option<f64>,
}

/// All modules of one storage.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct StorageRow {
    pub storage: String,
    pub modules: usize,
    pub weights: u64,
    pub bytes: u64,
}

/// Sums over some modules.
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct Totals {
    pub modules: usize,
    pub weights: u64,
    pub bytes: u64,
}

/// The sums over the modules of each key.
pub fn totals<K: Ord>(modules: &[ModuleRow], key: impl Fn(&ModuleRow) -> K) -> BTreeMap<K, Totals> {
    let mut totals: BTreeMap<K, Totals> = BTreeMap::new();
    for module in modules {
        let row = totals.entry(key(module)).or_default();
        row.modules += 1;
        row.weights += module.weights;
        row.bytes += module.bytes;
    }
    totals
}

/// Reads the headers below `path`, a folder or a single file.
///
/// # Errors
/// What the checkpoint reader refuses, or a damaged record.
pub fn inspect(path: &Path) -> Outcome<Inspection> {
    let main = Checkpoint::open_with(path, &Links::of_folder(path))?;
    let config = read_json(&path.join("config.json"));
    let mut parts = vec![(String::new(), main, quantization(config.as_ref()))];
    for folder in Folder::SIDE {
        let side = path.join(folder.path());
        if side.join("model.safetensors").is_file() {
            let checkpoint = Checkpoint::open_with(&side, &Links::of_folder(&side))?;
            let config = read_json(&side.join("config.json"));
            parts.push((format!("{}/", folder.path()), checkpoint, quantization(config.as_ref())));
        }
    }
    let artifact = match path.join(crate::artifact::PROVENANCE).is_file() {
        true => Some(Artifact::open(path)?),
        false => None,
    };
    let losses: BTreeMap<(&str, &str), f64> = artifact
        .iter()
        .flat_map(|a| &a.provenance.outputs)
        .filter_map(|o| Some(((o.file.as_str(), o.name.as_str()), o.relative_mse?)))
        .collect();

    let (mut files, mut modules) = (Vec::new(), Vec::new());
    for (prefix, checkpoint, quantization) in &parts {
        let first = files.len();
        for (index, file) in checkpoint.files().iter().enumerate() {
            files.push(FileRow {
                name: format!("{prefix}{}", file.name),
                bytes: file.len,
                tensors: checkpoint.tensors().iter().filter(|entry| entry.file == index).count(),
                metadata: file.metadata.clone(),
            });
        }
        for entry in checkpoint.tensors() {
            let base = entry.name.rsplit_once('.');
            let plane_of_packed = base.is_some_and(|(module, plane)| {
                PLANES.contains(&plane) && packed(checkpoint, module).is_some()
            });
            if plane_of_packed {
                continue;
            }
            let file = first + entry.file;
            let stored = (files[file].name.as_str(), entry.name.as_str());
            let relative_mse = losses.get(&stored).copied();
            let row = match base
                .filter(|(_, plane)| *plane == "weight")
                .and_then(|(m, _)| Some((m, packed(checkpoint, m)?)))
            {
                Some((module, (shape, bytes))) => {
                    let (storage, shape) = storage(quantization, module, checkpoint, &shape);
                    ModuleRow {
                        name: format!("{prefix}{module}"),
                        storage,
                        weights: shape.elements().unwrap_or(0),
                        shape,
                        bytes,
                        file,
                        relative_mse,
                    }
                }
                None => ModuleRow {
                    name: format!("{prefix}{}", entry.name),
                    storage: entry.dtype.to_string(),
                    shape: entry.shape.clone(),
                    weights: entry.shape.elements().unwrap_or(0),
                    bytes: entry.bytes(),
                    file,
                    relative_mse,
                },
            };
            modules.push(row);
        }
    }
    let storage = totals(&modules, |module| module.storage.clone())
        .into_iter()
        .map(|(storage, Totals { modules, weights, bytes })| StorageRow { storage, modules, weights, bytes })
        .collect();
    let weights: u64 = modules.iter().map(|module| module.weights).sum();
    let file_bytes: u64 = files.iter().map(|file| file.bytes).sum();
    let mlx = files.iter().any(|file| file.metadata.get("format").is_some_and(|format| format == "mlx"));
    Ok(Inspection {
        path: path.display().to_string(),
        kind: if artifact.is_some() {
            "artifact"
        } else if mlx {
            "mlx"
        } else {
            "checkpoint"
        },
        model_type: config.and_then(|c| Some(c.get("model_type")?.as_str()?.to_owned())),
        digest: artifact.map(|a| a.digest),
        bytes: modules.iter().map(|module| module.bytes).sum(),
        files,
        modules,
        storage,
        weights,
        bits_per_weight: if weights == 0 { 0.0 } else { 8.0 * file_bytes as f64 / weights as f64 },
    })
}

/// What a packed weight may have beside its codes.
const PLANES: [&str; 3] = ["scales", "biases", "scales2"];

/// The packed shape of a quantized module's weight and the bytes of all its planes.
fn packed(checkpoint: &Checkpoint, module: &str) -> Option<(Shape, u64)> {
    let weight = checkpoint.get(&format!("{module}.weight")).filter(|entry| entry.dtype == Dtype::U32)?;
    checkpoint.get(&format!("{module}.scales"))?;
    let others = PLANES.iter().filter_map(|plane| checkpoint.get(&format!("{module}.{plane}")));
    Some((weight.shape.clone(), weight.bytes() + others.map(TensorEntry::bytes).sum::<u64>()))
}

/// What a packed module is stored as, and the shape of its weight: from the config, else from its shapes.
fn storage(
    quantization: &Option<serde_json::Value>,
    module: &str,
    checkpoint: &Checkpoint,
    packed: &Shape,
) -> (String, Shape) {
    let own = quantization.as_ref().map(|q| q.get(module).filter(|entry| entry.is_object()).unwrap_or(q));
    let number = |key: &str| own.and_then(|q| q.get(key)?.as_u64());
    let mode = own.and_then(|q| q.get("mode")?.as_str()).unwrap_or("affine");
    let trellis = own.filter(|_| mode == "trellis").and_then(|entry| {
        let own = entry.as_object()?.iter().filter(|(key, _)| Trellis::KEYS.contains(&key.as_str()));
        let own = own.map(|(key, value)| (key.clone(), value.clone())).collect();
        serde_json::from_value::<Trellis>(own).ok()
    });
    if let Some(trellis) = trellis
        && let Some(shape) = CodecSpec::Trellis(trellis).unpacked(packed)
    {
        return (trellis.to_string(), shape);
    }
    match number("bits").zip(number("group_size")) {
        Some((bits @ 1..=32, group)) => {
            let name = if mode == "affine" { format!("affine-{bits}g{group}") } else { mode.to_owned() };
            (name, packed.with_last(packed.last() * 32 / bits))
        }
        _ => {
            let groups = checkpoint.get(&format!("{module}.scales")).map_or(1, |scales| scales.shape.last());
            // Without settings only the ratio is known; 64 is the usual group.
            (format!("packed ({} words for {groups} groups)", packed.last()), packed.with_last(groups * 64))
        }
    }
}

fn quantization(config: Option<&serde_json::Value>) -> Option<serde_json::Value> {
    config?.get("quantization").filter(|q| q.is_object()).cloned()
}

fn read_json(path: &Path) -> Option<serde_json::Value> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}
