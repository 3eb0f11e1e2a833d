//! The weights of a folder, by their place in the model tree.
//!
//! Three kinds of folder are read: a Hugging Face checkpoint (f32, bf16 or f16), a checkpoint in MLX's layout,
//! packed or not, and an artifact of this program, which is one of the latter with a record. Names, shapes and
//! layouts are [`crate::arch`]'s; a packed module is told by its stored scales, and its codec by
//! [`crate::arch::Packing`].

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::RuntimeError;
use crate::arch::{
    Arch, ArchError, Config, DecoderConfig, Folder, Model as Statement, Output, Packing, Slot, registry,
};
use crate::backend::{Packed, Stored};
use crate::checkpoint::{Checkpoint, Links, REPORTED, TensorEntry};
use crate::codec::{CodecSpec, codec};
use crate::failure::{Outcome, Problems};
use crate::isa::Isa;
use crate::numeric::widen;
use crate::tensor::{Float, Shape};

/// An opened folder: every parameter found and checked, nothing read yet.
#[derive(Debug)]
pub struct Weights {
    /// The folder.
    pub dir: PathBuf,
    /// Its `config.json`.
    pub config: Config,
    /// What it computes.
    pub decoder: DecoderConfig,
    /// For people: `Hugging Face` or `MLX` layout.
    pub layout: &'static str,
    parameters: BTreeMap<String, Parameter>,
    /// Tensors of the folder that the runtime has no use for, with the reason.
    pub unused: Vec<(String, &'static str)>,
}

/// One parameter and where its bytes are.
#[derive(Debug)]
struct Parameter {
    output: Output,
    store: Arc<Checkpoint>,
    /// One per plane.
    planes: Vec<TensorEntry>,
    codec: CodecSpec,
}

impl Weights {
    /// Opens the folder and checks every tensor against the config.
    ///
    /// # Errors
    /// A config or checkpoint that cannot be read, an unknown model type or config value, tensors that are
    /// missing, unknown, of another shape or of another dtype than the codec's.
    pub fn open(dir: &Path) -> Outcome<Self> {
        let (config, packing) = Config::read_packed(dir)?;
        let arch = registry::find(&config)?;
        let links = Links::of_folder(dir);
        let main = Arc::new(Checkpoint::open_with(dir, &links)?);
        // A packed embedding has the packed shape; only its presence and its place are asked for.
        let probe = |name: &str| main.get(name).map(|entry| (entry.dtype, entry.shape.clone()));
        let statement = arch.model(&config, &probe)?;
        let decoder = arch.decoder(&config, &statement)?;
        let mut binder = Binder { packing: &packing, problems: Vec::new(), parameters: BTreeMap::new() };
        let mut unused = binder.bind(&main, &statement.slots, &statement);
        let has_draft =
            statement.slots.iter().flat_map(|slot| &slot.outputs).any(|o| o.folder == Folder::Mtp);
        let companion = companion(dir, arch, &config, has_draft)?;
        if let Some((store, slots, packing)) = &companion {
            binder.packing = packing;
            unused.extend(binder.bind(store, slots, &statement));
        }
        let Binder { mut problems, parameters, .. } = binder;
        if problems.len() > REPORTED {
            let count = problems.len() - REPORTED;
            problems.truncate(REPORTED);
            problems.push(ArchError::More { count });
        }
        let layout = statement.layout;
        let weights = Self { dir: dir.to_owned(), config, decoder, layout, parameters, unused };
        Ok(Problems::none_or(problems, weights)?)
    }

    /// Whether the folder holds a draft head.
    pub fn has_draft(&self) -> bool {
        self.parameters.contains_key("mtp.fc.weight")
    }

    /// Whether there is a parameter of this path.
    pub fn has(&self, path: &str) -> bool {
        self.parameters.contains_key(path)
    }

    /// The matrix of a linear layer or an embedding, `[N, K]` over all experts.
    ///
    /// # Errors
    /// [`RuntimeError::NoParameter`], which a folder that was opened without an error does not give.
    pub fn packed(&self, module: &str) -> Result<Packed, RuntimeError> {
        let parameter = self.parameter(&format!("{module}.weight"))?;
        let planes = parameter.planes.iter().map(|entry| parameter.stored(entry)).collect();
        let first = &parameter.planes[0];
        let shape = &parameter.output.shape;
        // A float weight says its own type; a packed one's parameters do.
        let float = match parameter.codec {
            CodecSpec::Keep => first.dtype.float(),
            _ => parameter.planes.get(1).and_then(|scales| scales.dtype.float()),
        };
        let whole = Packed {
            codec: parameter.codec,
            float: float.unwrap_or(Float::Bf16),
            out_features: first.shape.rows() as usize,
            in_features: shape.last() as usize,
            planes,
        };
        Ok(whole)
    }

    /// The rows of expert `e`, for a module that holds all experts.
    ///
    /// # Errors
    /// As [`Weights::packed`].
    pub fn expert(&self, module: &str, e: usize) -> Result<Packed, RuntimeError> {
        let select = self.parameter(&format!("{module}.weight"))?.output.select;
        let whole = self.packed(module)?;
        let start = e * select.period as usize + select.start as usize;
        let rows = self.parameter(&format!("{module}.weight"))?.output.shape.0[1] as usize;
        // Where a tensor is one module's alone, its period is all of it, or one expert's.
        let start = if select.len as usize == rows { start } else { e * rows };
        Ok(whole.rows(start..start + rows))
    }

    /// A small tensor in f32, after its changes of layout.
    ///
    /// # Errors
    /// [`RuntimeError::NoParameter`]; [`RuntimeError::NonFinite`] if a value is NaN or infinite.
    pub fn vector(&self, path: &str) -> Result<Vec<f32>, RuntimeError> {
        let parameter = self.parameter(path)?;
        let entry = &parameter.planes[0];
        let float = entry.dtype.float().expect("binding let only float tensors through");
        let elements = parameter.output.shape.elements().expect("the header's shape was checked") as usize;
        let mut values = vec![0.0; elements];
        if !widen(float, parameter.store.bytes(entry), &mut values, Isa::best()) {
            return Err(RuntimeError::NonFinite {
                path: path.to_owned(),
                file: self.dir.join(file_of(parameter)),
            });
        }
        let mut scratch = Vec::new();
        for transform in &parameter.output.transforms {
            transform.apply(&mut values, parameter.output.shape.last() as usize, &mut scratch);
        }
        Ok(values)
    }

    /// Stored bytes of every parameter whose path starts with `prefix`.
    pub fn stored(&self, prefix: &str) -> Vec<Stored> {
        let below =
            self.parameters.range(prefix.to_owned()..).take_while(|(path, _)| path.starts_with(prefix));
        below.flat_map(|(_, p)| p.planes.iter().map(|entry| p.stored(entry))).collect()
    }

    fn parameter(&self, path: &str) -> Result<&Parameter, RuntimeError> {
        self.parameters.get(path).ok_or_else(|| RuntimeError::NoParameter { path: path.to_owned() })
    }
}

fn file_of(parameter: &Parameter) -> String {
    parameter.store.files()[parameter.planes[0].file].name.clone()
}

impl Parameter {
    fn stored(&self, entry: &TensorEntry) -> Stored {
        Stored::Mapped { checkpoint: self.store.clone(), file: entry.file, range: entry.range.clone() }
    }
}

/// A draft head in a folder of its own: files, what they must hold, how they are packed.
type Companion = (Arc<Checkpoint>, Vec<Slot>, Packing);

/// The draft head's own folder, if there is one and the main files hold none.
fn companion(
    dir: &Path,
    arch: &'static dyn Arch,
    config: &Config,
    has_draft: bool,
) -> Outcome<Option<Companion>> {
    let folder = dir.join(Folder::Mtp.path());
    let slots = arch.companion(config)?;
    if has_draft || slots.is_empty() || !folder.join("model.safetensors").exists() {
        return Ok(None);
    }
    let store = Checkpoint::open_files(&folder, &["model.safetensors".to_owned()])?;
    let (_, packing) = Config::read_packed(&folder)?;
    Ok(Some((Arc::new(store), slots, packing)))
}

/// Joins what the config calls for with what the files hold.
struct Binder<'a> {
    packing: &'a Packing,
    problems: Vec<ArchError>,
    parameters: BTreeMap<String, Parameter>,
}

impl Binder<'_> {
    /// Binds every slot to tensors of `store`; returns what is left over for a stated reason.
    fn bind(
        &mut self,
        store: &Arc<Checkpoint>,
        slots: &[Slot],
        statement: &Statement,
    ) -> Vec<(String, &'static str)> {
        let mut taken: BTreeSet<&str> = BTreeSet::new();
        for slot in slots {
            let Some(first) = store.get(&slot.source) else {
                self.problems.push(ArchError::MissingTensor {
                    name: slot.source.clone(),
                    shape: slot.shape.clone(),
                    model_type: statement.model_type.clone(),
                });
                continue;
            };
            taken.insert(&first.name);
            let planes = match self.planes(store, slot, first) {
                Ok((codec, planes)) => {
                    taken.extend(planes.iter().filter_map(|p| store.get(&p.name)).map(|p| p.name.as_str()));
                    (codec, planes)
                }
                Err(problem) => {
                    self.problems.push(*problem);
                    continue;
                }
            };
            for output in &slot.outputs {
                let parameter = Parameter {
                    output: output.clone(),
                    store: store.clone(),
                    planes: planes.1.clone(),
                    codec: planes.0,
                };
                self.parameters.insert(format!("{}.{}", output.module, output.parameter), parameter);
            }
        }
        let mut unused = Vec::new();
        for tensor in store.tensors().iter().filter(|tensor| !taken.contains(tensor.name.as_str())) {
            match statement.drops.iter().find(|drop| drop.covers(&tensor.name)) {
                Some(drop) => unused.push((tensor.name.clone(), drop.reason)),
                None => self.problems.push(ArchError::UnknownTensor {
                    file: store.files()[tensor.file].name.clone(),
                    name: tensor.name.clone(),
                    model_type: statement.model_type.clone(),
                }),
            }
        }
        unused
    }

    /// The planes of a slot, which must have the shapes and dtypes that its codec and the config call for.
    fn planes(
        &self,
        store: &Checkpoint,
        slot: &Slot,
        first: &TensorEntry,
    ) -> Result<(CodecSpec, Vec<TensorEntry>), Box<ArchError>> {
        let output = &slot.outputs[0];
        let file = |entry: &TensorEntry| store.files()[entry.file].name.clone();
        let shape_of = |entry: &TensorEntry, needed: Shape| {
            if entry.shape == needed {
                return Ok(());
            }
            let (name, found) = (entry.name.clone(), entry.shape.clone());
            Err(Box::new(ArchError::Shape { file: file(entry), name, found, needed }))
        };
        let dtype_of = |entry: &TensorEntry, fits: bool| match fits {
            true => Ok(()),
            false => Err(Box::new(ArchError::Dtype {
                file: file(entry),
                name: entry.name.clone(),
                found: entry.dtype,
            })),
        };
        let path = slot.source.strip_suffix(".weight");
        let scales = path.and_then(|path| store.get(&format!("{path}.scales")));
        let (Some(path), Some(scales), true) = (path, scales, output.role.quantizable()) else {
            shape_of(first, slot.shape.clone())?;
            dtype_of(first, first.dtype.float().is_some())?;
            return Ok((CodecSpec::Keep, vec![first.clone()]));
        };
        let module = match output.folder {
            Folder::Mtp => path,
            Folder::Main | Folder::Kept => output.module.as_str(),
        };
        let unpacked = || {
            Box::new(ArchError::PackedTensor {
                file: file(first),
                name: first.name.clone(),
                dtype: first.dtype,
                scales: scales.name.clone(),
            })
        };
        let spec = self.packing.codec(module).ok_or_else(unpacked)?;
        let float = scales.dtype.float().unwrap_or(Float::Bf16);
        let layout = codec(spec).planes(slot.shape.last(), float).map_err(|error| {
            Box::new(ArchError::Value {
                key: format!("quantization.{module}"),
                found: spec.to_string(),
                needed: error.to_string(),
            })
        })?;
        let mut planes = Vec::new();
        for plane in layout {
            let name = format!("{path}.{}", plane.suffix);
            let needed = slot.shape.with_last(plane.row_elements);
            let Some(entry) = store.get(&name) else {
                let model_type = format!("packed ({spec})");
                return Err(Box::new(ArchError::MissingTensor { name, shape: needed, model_type }));
            };
            shape_of(entry, needed)?;
            dtype_of(entry, entry.dtype == plane.dtype)?;
            planes.push(entry.clone());
        }
        Ok((spec, planes))
    }
}
