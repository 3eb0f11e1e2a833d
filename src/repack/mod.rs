//! Expands an artifact into codecs that stock mlx-lm loads.
//!
//! ```text
//! w      = Codec::decode(planes)      of a trellis (f32(code) · f32(scales)) · f32(scales2)             w: [N, K]
//! stored = encode(w)                  once: f32 as it is; bf16 to nearest even; affine as encoder `mlx` does
//! ```
//!
//! [`Plan`] follows from headers alone: which modules change, and where every byte of the result lies. Carrying it out
//! ([`Plan::write`]) decodes and encodes strips of whole tile rows, so that memory is bounded by the tallest strip and
//! never by a tensor. Every other tensor keeps its bytes. Files keep their names, and their tensors the order of
//! [`crate::artifact::layout`].
//!
//! The result is no artifact of a build: it has `repacked.json` instead of `provenance.json`
//! (`docs/formats/repacked.md`).

mod error;
mod place;
mod record;
mod write;

use std::collections::BTreeMap;
use std::path::Path;

pub use error::RepackError;
pub(crate) use place::{Growing, check};
pub use record::{REPACKED, Repacked, RepackedModule};
pub use write::Options;
pub(crate) use write::digests;

use crate::arch::{Config, Folder, Packing};
use crate::artifact::config::{index, pretty_json, quantization, with_quantization};
use crate::artifact::layout::{ModuleTensors, OutputFile, Place, StoredTensor, arrange};
use crate::artifact::open::Artifact;
use crate::checkpoint::{Checkpoint, INDEX, TensorEntry};
use crate::codec::{AffineBits, CodecSpec, GroupSize, Matrix, Plane, codec};
use crate::failure::Outcome;
use crate::tensor::{Dtype, Float, Layout, Shape};

/// What modules become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// `affine-8g64` where groups of 64 divide a row, `affine-8g32` where only those of 32 do, else `bf16`.
    Affine,
    /// bf16, rounded to nearest even.
    Bf16,
    /// What the codes decode to, unrounded.
    F32,
}

impl Target {
    /// As the command line spells them; the first is the default.
    pub const NAMES: [&'static str; 3] = ["affine-8g64", "bf16", "f32"];

    /// Reads one of [`Target::NAMES`].
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Target::Affine, Target::Bf16, Target::F32];
        Self::NAMES.iter().zip(all).find(|(known, _)| **known == name).map(|(_, target)| target)
    }

    /// The codec that is asked for.
    pub fn wanted(self) -> CodecSpec {
        match self {
            Target::Affine => eight_bits(64),
            Target::Bf16 => CodecSpec::Bf16,
            Target::F32 => CodecSpec::F32,
        }
    }

    /// What a weight of such matrices becomes.
    pub fn codec(self, matrix: Matrix) -> CodecSpec {
        let choices = [self.wanted(), eight_bits(32), CodecSpec::Bf16];
        // Float storage holds any matrix, so it is chosen where it is asked for.
        *choices.iter().find(|codec| codec.fits(matrix).is_ok()).expect("bf16 holds any matrix")
    }
}

fn eight_bits(group: u32) -> CodecSpec {
    CodecSpec::Affine {
        bits: AffineBits::try_from(8).expect("a width of the codec"),
        group: GroupSize::try_from(group).expect("a size of the codec"),
    }
}

/// What is to be done: everything that headers decide.
#[derive(Debug)]
pub struct Plan {
    artifact: Artifact,
    target: Target,
    all: bool,
    sources: Vec<Source>,
    /// In the order of the files.
    items: Vec<Item>,
    files: Vec<OutputFile>,
    /// `places[item][plane]`.
    places: Vec<Vec<Place>>,
    /// Files that are written anew: path and content.
    generated: BTreeMap<String, Vec<u8>>,
}

/// The weights of one folder.
#[derive(Debug)]
struct Source {
    folder: Folder,
    checkpoint: Checkpoint,
}

/// What is moved as a whole: a tensor, or the planes of a module that changes.
#[derive(Debug)]
struct Item {
    /// Index into the sources.
    source: usize,
    /// What is read: one entry, or one for each plane of the module's codec.
    planes: Vec<TensorEntry>,
    /// Weights that it holds: of a packed module that stays, its codes' tensor has all.
    weights: u64,
    change: Option<Change>,
}

/// A module that changes its codec.
#[derive(Debug, Clone)]
struct Change {
    /// As `tqc inspect` names it: with its folder, unless that is the main one.
    module: String,
    /// Of the weight.
    shape: Shape,
    was: CodecSpec,
    /// Type of the old parameters.
    float_was: Float,
    became: CodecSpec,
    /// Type of the new ones.
    float: Float,
}

/// A packed module as its tensors lie in the files.
struct Packed {
    spec: CodecSpec,
    float: Float,
    shape: Shape,
    planes: Vec<TensorEntry>,
}

/// What the name of the folder that grows ends with.
const WORK: &str = ".repacking";

/// What may follow a packed module's path.
const PLANES: [&str; 4] = ["weight", "scales", "biases", "scales2"];

impl Plan {
    /// Decides what becomes of the artifact in `dir`, whose files must be those that its record names: modules that stock
    /// mlx-lm does not load, or with `all` every packed one, become `target`. The folder will be `new`, which is looked
    /// at first: reading a model takes a while.
    ///
    /// # Errors
    /// [`RepackError::Exists`] and the like; a folder that is no artifact, or whose files are damaged; tensors that do
    /// not fit the config; [`RepackError::Nothing`].
    pub fn new(dir: &Path, target: Target, all: bool, new: &Path) -> Outcome<Self> {
        place::check(new, WORK)?;
        let artifact = Artifact::open(dir)?;
        artifact.check_files()?;
        let (main, _) = Config::read_packed(dir)?;
        let mut plan = Self {
            artifact,
            target,
            all,
            sources: Vec::new(),
            items: Vec::new(),
            files: Vec::new(),
            places: Vec::new(),
            generated: BTreeMap::new(),
        };
        // The type that scales have in what `tqc build` and mlx-lm write.
        let float = main.model_float(None);
        let (mut members, mut tensors) = (Vec::new(), Vec::new());
        let mut configs = Vec::new();
        for folder in [Folder::Main, Folder::Mtp, Folder::Kept] {
            let path = dir.join(folder.path());
            let checkpoint = match folder {
                Folder::Main => Checkpoint::open(&path)?,
                _ if !path.join("model.safetensors").exists() => continue,
                _ => Checkpoint::open_files(&path, &["model.safetensors".to_owned()])?,
            };
            let read = path.join("config.json").exists().then(|| Config::read_packed(&path)).transpose()?;
            let packing = read.as_ref().map(|(_, packing)| packing.clone()).unwrap_or_default();
            let codecs = plan.take(folder, checkpoint, &packing, float, &mut members, &mut tensors)?;
            configs.push((folder, read, codecs));
        }
        if plan.items.iter().all(|item| item.change.is_none()) {
            return Err(RepackError::Nothing { path: dir.to_owned(), all }.into());
        }
        (plan.files, plan.places) = arrange(members, &tensors, Layout::Mlx);
        for (folder, read, codecs) in configs {
            let changed = plan
                .items
                .iter()
                .any(|item| item.change.is_some() && plan.sources[item.source].folder == folder);
            if let Some((config, packing)) = read.filter(|_| changed) {
                let floats = packing.floats().map(|module| (module, CodecSpec::Keep));
                let packed = codecs.iter().map(|(module, codec)| (module.as_str(), *codec));
                let quantization = quantization(packed.chain(floats), target.wanted());
                let config = with_quantization(config.root().clone(), quantization);
                plan.generated.insert(below(folder, "config.json"), pretty_json(&config));
            }
            if folder == Folder::Main && changed {
                plan.generated.insert(INDEX.to_owned(), plan.index(&tensors));
            }
        }
        Ok(plan)
    }

    /// Adds the tensors of a folder; the codecs that its packed modules will have.
    fn take(
        &mut self,
        folder: Folder,
        checkpoint: Checkpoint,
        packing: &Packing,
        float: Float,
        members: &mut Vec<(String, Vec<usize>)>,
        tensors: &mut Vec<ModuleTensors>,
    ) -> Result<BTreeMap<String, CodecSpec>, RepackError> {
        let source = self.sources.len();
        let mut codecs = BTreeMap::new();
        for (number, file) in checkpoint.files().iter().enumerate() {
            let mut inside = Vec::new();
            for entry in checkpoint.tensors().iter().filter(|entry| entry.file == number) {
                let base = entry.name.rsplit_once('.').filter(|(_, plane)| PLANES.contains(plane));
                let packed = match base {
                    Some((path, _)) => packed(&checkpoint, packing, path)?,
                    None => None,
                };
                let became = packed.as_ref().map(|packed| {
                    let became = self.target.codec(Matrix::of(&packed.shape));
                    let changes = self.all || !packed.spec.loads_in_mlx();
                    if changes { became } else { packed.spec }
                });
                let (stored, item) = match (base, packed, became) {
                    (Some((path, _)), Some(packed), Some(became)) if became != packed.spec => {
                        // The module stands where its first plane stood.
                        if codecs.insert(path.to_owned(), became).is_some() {
                            continue;
                        }
                        let change = Change {
                            module: below(folder, path),
                            shape: packed.shape,
                            was: packed.spec,
                            float_was: packed.float,
                            became,
                            float,
                        };
                        let weights = change.shape.elements().unwrap_or(0);
                        let stored = change.stored(path);
                        (stored, Item { source, planes: packed.planes, weights, change: Some(change) })
                    }
                    (base, packed, _) => {
                        let weights = match (base, packed) {
                            (Some((path, "weight")), Some(packed)) => {
                                codecs.insert(path.to_owned(), packed.spec);
                                packed.shape.elements().unwrap_or(0)
                            }
                            // Its other planes hold no weights.
                            (_, Some(_)) => 0,
                            (_, None) => entry.shape.elements().unwrap_or(0),
                        };
                        let (name, shape) = (entry.name.clone(), entry.shape.clone());
                        let stored = StoredTensor { name, dtype: entry.dtype, shape, bytes: entry.bytes() };
                        (vec![stored], Item { source, planes: vec![entry.clone()], weights, change: None })
                    }
                };
                inside.push(self.items.len());
                self.items.push(item);
                tensors.push(ModuleTensors { folder, planes: stored });
            }
            members.push((below(folder, &file.name), inside));
        }
        self.sources.push(Source { folder, checkpoint });
        Ok(codecs)
    }

    /// `model.safetensors.index.json` of the main files.
    fn index(&self, tensors: &[ModuleTensors]) -> Vec<u8> {
        let main = || {
            let items = self.items.iter().enumerate();
            items.filter(|(_, item)| self.sources[item.source].folder == Folder::Main)
        };
        let weights = main().map(|(_, item)| item.weights).sum();
        let rows = main().flat_map(|(number, _)| {
            let planes = tensors[number].planes.iter().zip(&self.places[number]);
            planes.map(|(plane, place)| {
                (plane.name.as_str(), self.files[place.file].name.as_str(), plane.bytes)
            })
        });
        index(rows, weights)
    }

    /// Modules that cannot become what was asked for, and what they become instead.
    pub fn others(&self) -> impl Iterator<Item = (&str, CodecSpec)> {
        let changes = self.items.iter().filter_map(|item| item.change.as_ref());
        changes
            .filter(|change| change.became != self.target.wanted())
            .map(|change| (change.module.as_str(), change.became))
    }
}

impl Change {
    fn layout_was(&self) -> Vec<Plane> {
        let planes = codec(self.was).planes(Matrix::of(&self.shape), self.float_was);
        planes.expect("checked when the plan was made")
    }

    fn layout(&self) -> Vec<Plane> {
        let planes = codec(self.became).planes(Matrix::of(&self.shape), self.float);
        planes.expect("the codec was chosen to fit")
    }

    /// The tensors that the module at `path` becomes.
    fn stored(&self, path: &str) -> Vec<StoredTensor> {
        let stored = self.layout().into_iter().map(|plane| StoredTensor {
            name: format!("{path}.{}", plane.suffix),
            dtype: plane.dtype,
            shape: plane.shape(&self.shape),
            bytes: plane.bytes_of(plane.begun(0..self.shape.rows())) as u64,
        });
        stored.collect()
    }
}

/// The packed module at `path`, if there is one and the config says how it is packed.
///
/// # Errors
/// [`RepackError::Plane`] unless its tensors are those that its codec calls for.
fn packed(checkpoint: &Checkpoint, packing: &Packing, path: &str) -> Result<Option<Packed>, RepackError> {
    let get = |plane: &str| checkpoint.get(&format!("{path}.{plane}"));
    let (Some(weight), Some(scales)) = (get("weight").filter(|e| e.dtype == Dtype::U32), get("scales"))
    else {
        return Ok(None);
    };
    let Some(spec) = packing.codec(path) else { return Ok(None) };
    let bad = |entry: &TensorEntry, needed: String| RepackError::Plane {
        file: checkpoint.files()[entry.file].path.clone(),
        tensor: entry.name.clone(),
        found: format!("{} {}", entry.dtype, entry.shape),
        codec: spec,
        needed,
    };
    let shape = spec.unpacked(&weight.shape).ok_or_else(|| bad(weight, "whole codes".to_owned()))?;
    let float = scales.dtype.float().unwrap_or(Float::Bf16);
    let layout = codec(spec).planes(Matrix::of(&shape), float);
    let layout = layout.map_err(|error| bad(weight, error.to_string()))?;
    let mut planes = Vec::new();
    for plane in layout {
        let needed = plane.shape(&shape);
        let entry = get(plane.suffix).ok_or_else(|| bad(weight, format!("`{path}.{}`", plane.suffix)))?;
        if (entry.dtype, &entry.shape) != (plane.dtype, &needed) || entry.file != weight.file {
            return Err(bad(entry, format!("{} {needed} in the file of its codes", plane.dtype)));
        }
        planes.push(entry.clone());
    }
    Ok(Some(Packed { spec, float, shape, planes }))
}

/// A path below the artifact.
fn below(folder: Folder, name: &str) -> String {
    match folder.path() {
        "" => name.to_owned(),
        path => format!("{path}/{name}"),
    }
}
