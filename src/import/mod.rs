//! Decodes checkpoints of other trellis tools into dense ones, which every command reads.
//!
//! [`Plan`] follows from headers alone; carrying it out ([`Plan::write`]) decodes strips of 128 rows, so that memory
//! is bounded by them and never by a tensor. Every tensor that is not a part of a packed module keeps its bytes. What is
//! written is a Hugging Face checkpoint without `quantization_config`, and `imported.json` (`docs/formats/exl3.md`).

mod error;
mod exl3;
mod record;
mod write;

use std::collections::BTreeMap;
use std::path::Path;

pub use error::ImportError;
pub use record::{IMPORTED, Imported, ImportedModule};
pub use write::Options;

use crate::arch::Folder;
use crate::artifact::config::{index, pretty_json};
use crate::artifact::layout::{ModuleTensors, OutputFile, Place, StoredTensor, lay_out};
use crate::checkpoint::{Checkpoint, INDEX, Links, SMALL_LIMIT, TensorEntry, read_small};
use crate::digest::Digest;
use crate::failure::Outcome;
use crate::plan::{CopiedFile, Note, copied};
use crate::repack::check;
use crate::tensor::{Float, Layout};
use crate::units::Bytes;
use exl3::{BLOCK, Linear, PARTS};

/// Payload of a weight file.
const SHARD: u64 = 5_000_000_000;
/// What the name of the folder that grows ends with.
const WORK: &str = ".importing";

/// What is to be done: everything that headers decide.
#[derive(Debug)]
pub struct Plan {
    checkpoint: Checkpoint,
    float: Float,
    /// In the order of the source.
    items: Vec<Item>,
    files: Vec<OutputFile>,
    /// One for each item.
    places: Vec<Place>,
    copied: Vec<CopiedFile>,
    /// What a person should know.
    notes: Vec<Note>,
    /// Files that are written anew: name and content.
    generated: BTreeMap<String, Vec<u8>>,
    /// Of the `config.json` that was read.
    config: Digest,
}

#[derive(Debug)]
enum Item {
    Kept(TensorEntry),
    Packed { module: String, linear: Box<Linear> },
}

impl Plan {
    /// Decides what becomes of the EXL3 checkpoint in `dir`; decoded weights will be `float`. The folder will be `new`,
    /// which is looked at first.
    ///
    /// # Errors
    /// [`ImportError`]; those of [`Checkpoint::open_with`]; damaged files beside the weights.
    pub fn new(dir: &Path, float: Float, new: &Path) -> Outcome<Self> {
        check(new, WORK).map_err(ImportError::from)?;
        let links = Links::of_folder(dir);
        let path = dir.join("config.json");
        let bytes = read_small(&path, &links, SMALL_LIMIT)?;
        let config = serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&bytes);
        let mut root = config
            .map_err(|error| ImportError::NotJson { path: path.clone(), problem: error.to_string() })?;
        let method = root.get("quantization_config").and_then(|value| value.get("quant_method"));
        if method.and_then(|method| method.as_str()) != Some("exl3") {
            let found = match method {
                Some(method) => format!("has a `quantization_config` of method {method}"),
                None => "has no `quantization_config` with a `quant_method`".to_owned(),
            };
            return Err(ImportError::NotExl3 { path: dir.to_owned(), found }.into());
        }
        root.remove("quantization_config");
        let checkpoint = Checkpoint::open_with(dir, &links)?;
        let mut notes = Vec::new();
        let copied = copied(dir, &mut notes)?;
        let mut plan = Self {
            checkpoint,
            float,
            items: Vec::new(),
            files: Vec::new(),
            places: Vec::new(),
            copied,
            notes,
            generated: BTreeMap::from([("config.json".to_owned(), pretty_json(&root))]),
            config: Digest::of(&bytes),
        };
        let tensors = plan.take()?;
        let (files, places) = lay_out(&tensors, SHARD, Layout::HuggingFace);
        (plan.files, plan.places) = (files, places.into_iter().map(|planes| planes[0]).collect());
        if plan.files.len() > 1 {
            let all = || tensors.iter().map(|tensor| &tensor.planes[0]);
            let weights = all().map(|tensor| tensor.shape.elements().unwrap_or(0)).sum();
            let rows = all().zip(&plan.places).map(|(tensor, place)| {
                (tensor.name.as_str(), plan.files[place.file].name.as_str(), tensor.bytes)
            });
            plan.generated.insert(INDEX.to_owned(), index(rows, weights));
        }
        Ok(plan)
    }

    /// Sorts the tensors; what each becomes.
    fn take(&mut self) -> Result<Vec<ModuleTensors>, ImportError> {
        let mut tensors = Vec::new();
        for entry in self.checkpoint.tensors() {
            let part = entry.name.rsplit_once('.').filter(|(_, part)| PARTS.contains(part));
            let (stored, item) = match part {
                Some((module, "trellis")) => {
                    let linear = Box::new(Linear::open(&self.checkpoint, module)?);
                    let name = format!("{module}.weight");
                    if self.checkpoint.get(&name).is_some() {
                        return Err(ImportError::Twice { module: module.to_owned(), tensor: name });
                    }
                    let (shape, dtype) = (linear.shape(), self.float.dtype());
                    let bytes = shape.elements().unwrap_or(0) * self.float.bytes() as u64;
                    let stored = StoredTensor { name, dtype, shape, bytes };
                    (stored, Item::Packed { module: module.to_owned(), linear })
                }
                Some((module, _)) => {
                    let tensor = format!("{module}.trellis");
                    if self.checkpoint.get(&tensor).is_none() {
                        return Err(ImportError::Missing { module: module.to_owned(), tensor });
                    }
                    continue;
                }
                None => {
                    let TensorEntry { name, dtype, shape, .. } = entry.clone();
                    let stored = StoredTensor { name, dtype, shape, bytes: entry.bytes() };
                    (stored, Item::Kept(entry.clone()))
                }
            };
            tensors.push(ModuleTensors { folder: Folder::Main, planes: vec![stored] });
            self.items.push(item);
        }
        if !self.items.iter().any(|item| matches!(item, Item::Packed { .. })) {
            let found = "says so, but no tensor is called `*.trellis`".to_owned();
            return Err(ImportError::NotExl3 { path: self.checkpoint.dir().to_owned(), found });
        }
        Ok(tensors)
    }

    /// Notes, and files of weights that are not read.
    pub fn notes(&self) -> impl Iterator<Item = String> {
        let notes = self.notes.iter().map(|note| format!("`{}` {}", note.subject, note.detail));
        let unread = self.checkpoint.unread().iter();
        notes.chain(unread.map(|name| format!("`{name}` is no part of the checkpoint, and is not read")))
    }

    /// Bytes of the weight files that will be written.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.files.iter().map(|file| file.len).sum())
    }

    /// Bytes of the source's weight files.
    pub fn source_bytes(&self) -> Bytes {
        Bytes(self.checkpoint.files().iter().map(|file| file.len).sum())
    }
}
