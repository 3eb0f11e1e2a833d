//! The weights of a folder, by their place in the model tree.
//!
//! Three kinds of folder are read: a Hugging Face checkpoint (f32, bf16 or f16), a checkpoint in MLX's layout,
//! packed or not, and an artifact of this program, which is one of the latter with a record. Names, shapes and
//! layouts are [`crate::arch`]'s; a packed module is told by its stored scales, and its codec by
//! [`crate::arch::Packing`].

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Files, RuntimeError, Store};
use crate::arch::{
    Arch, ArchError, Config, DecoderConfig, Folder, Model as Statement, Output, Packing, Role, Slot, registry,
};
use crate::backend::Packed;
use crate::checkpoint::{Checkpoint, Links, REPORTED, TensorEntry};
use crate::codec::{CodecSpec, Matrix, Part, codec};
use crate::failure::{Outcome, Problems};
use crate::isa::Isa;
use crate::numeric::widen;
use crate::tensor::{Dtype, Float, Layout, Shape};
use crate::transform::Panel;
use crate::units::Bytes;

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
    /// Of the tensor, of all outputs that share it, before it was packed.
    shape: Shape,
    store: Arc<dyn Store>,
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
        Self::open_keeping(dir, &|_| false)
    }

    /// [`Weights::open`] of a folder with tensors that the family does not know and nobody computes with: those that
    /// `keep` names.
    ///
    /// # Errors
    /// As [`Weights::open`].
    pub fn open_keeping(dir: &Path, keep: &dyn Fn(&str) -> bool) -> Outcome<Self> {
        let (config, packing) = Config::read_packed(dir)?;
        config.check_float()?;
        let main = Checkpoint::open_with(dir, &Links::of_folder(dir))?;
        Self::of(dir, config, &packing, Arc::new(Files(Arc::new(main))), keep)
    }

    /// The model whose main tensors are in `main`; a draft head in a folder of its own is looked for in `dir`.
    ///
    /// # Errors
    /// As [`Weights::open`].
    pub fn of(
        dir: &Path,
        config: Config,
        packing: &Packing,
        main: Arc<dyn Store>,
        keep: &dyn Fn(&str) -> bool,
    ) -> Outcome<Self> {
        let arch = registry::find(&config)?;
        // A packed embedding has the packed shape; only its presence and its place are asked for.
        let probe = |name: &str| main.get(name).map(|entry| (entry.dtype, entry.shape.clone()));
        let statement = arch.model(&config, &probe, Layout::Mlx)?;
        let decoder = arch.decoder(&config, &statement)?;
        let mut binder =
            Binder { folder: Folder::Main, packing, keep, problems: Vec::new(), parameters: BTreeMap::new() };
        let mut unused = binder.bind(&main, &statement.slots, &statement);
        let has_draft =
            statement.slots.iter().flat_map(|slot| &slot.outputs).any(|o| o.folder == Folder::Mtp);
        let companion = companion(dir, arch, &config, has_draft)?;
        if let Some((store, slots, packing)) = &companion {
            (binder.folder, binder.packing) = (Folder::Mtp, packing);
            unused.extend(binder.bind(store, slots, &statement));
        }
        let Binder { mut problems, parameters, .. } = binder;
        if problems.len() > REPORTED {
            let count = problems.len() - REPORTED;
            problems.truncate(REPORTED);
            problems.push(ArchError::More { count });
        }
        let layout = statement.layout.title();
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
        self.parameter(&format!("{module}.weight"))?.packed()
    }

    /// Some rows of such a matrix.
    ///
    /// # Errors
    /// As [`Weights::packed`].
    pub fn packed_rows(&self, module: &str, rows: Range<usize>) -> Result<Packed, RuntimeError> {
        self.parameter(&format!("{module}.weight"))?.rows(rows.start as u64..rows.end as u64)
    }

    /// The matrix that makes logits, `[V, H]`: the head's, or the embedding's if they are tied.
    ///
    /// # Errors
    /// As [`Weights::packed`].
    pub fn head(&self) -> Result<Packed, RuntimeError> {
        self.packed(&self.head_path())
    }

    /// The path of that matrix.
    pub fn head_path(&self) -> String {
        let embedding = || format!("{}.embed_tokens", self.decoder.root);
        self.decoder.head.map_or_else(embedding, str::to_owned)
    }

    /// Bytes of the largest layer, or of the head: what [`super::Stream`] maps at a time.
    pub fn largest_part(&self) -> Bytes {
        let of = |prefix: &str| self.bytes_below(prefix).0;
        let root = self.decoder.root;
        let layers = (0..self.decoder.layers.len()).map(|i| of(&format!("{root}.layers.{i}.")));
        let ends = [Some(format!("{root}.embed_tokens.")), self.decoder.head.map(|head| format!("{head}."))];
        Bytes(layers.chain(ends.into_iter().flatten().map(|prefix| of(&prefix))).max().unwrap_or(0))
    }

    /// The rows of expert `e`, for a module that holds all experts.
    ///
    /// # Errors
    /// As [`Weights::packed`].
    pub fn expert(&self, module: &str, e: usize) -> Result<Packed, RuntimeError> {
        let parameter = self.parameter(&format!("{module}.weight"))?;
        let (select, rows) = (parameter.output.select, parameter.output.shape.0[1]);
        let start = e as u64 * select.period + select.start;
        // Where a tensor is one module's alone, its period is all of it, or one expert's.
        let start = if select.len == rows { start } else { e as u64 * rows };
        parameter.rows(start..start + rows)
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
        let stored = parameter.store.rows(entry, 0..1, 1)?;
        if !widen(float, stored.bytes(), &mut values, Isa::best()) {
            return Err(RuntimeError::NonFinite { path: path.to_owned(), file: parameter.file() });
        }
        let mut scratch = Vec::new();
        for transform in &parameter.output.transforms {
            let row_elements = parameter.output.shape.last() as usize;
            let panel = Panel { values: &mut values, row_elements, first_row: 0 };
            transform.apply(panel, Isa::best(), &mut scratch);
        }
        Ok(values)
    }

    /// The first weight, in the order of paths, that holds NaN or infinity once it is decoded. Reads all that a pass
    /// computes with: for telling what went wrong.
    pub fn non_finite(&self) -> Option<RuntimeError> {
        let computed = self.parameters.iter().filter(|(_, p)| p.output.role != Role::Vision);
        computed.into_iter().find_map(|(path, parameter)| {
            let weight = match parameter.packed() {
                Ok(weight) => weight,
                Err(error) => return Some(error),
            };
            let mut row = vec![0.0; weight.in_features];
            let bad = (0..weight.out_features).any(|n| {
                weight.decode(n..n + 1, &mut row);
                row.iter().any(|value| !value.is_finite())
            });
            bad.then(|| RuntimeError::NonFinite { path: path.clone(), file: parameter.file() })
        })
    }

    /// Stored tensors of every parameter whose path starts with `prefix`.
    fn below(&self, prefix: &str) -> impl Iterator<Item = (&Parameter, &TensorEntry)> {
        let below = self.parameters.range(prefix.to_owned()..);
        let below = below.take_while(move |(path, _)| path.starts_with(prefix));
        below.flat_map(|(_, p)| p.planes.iter().map(move |entry| (p, entry)))
    }

    /// Their stored bytes.
    pub fn bytes_below(&self, prefix: &str) -> Bytes {
        Bytes(self.below(prefix).map(|(_, entry)| entry.bytes()).sum())
    }

    /// Nobody will ask for them soon.
    pub fn release(&self, prefix: &str) {
        self.below(prefix).for_each(|(p, entry)| p.store.release(entry));
    }

    fn parameter(&self, path: &str) -> Result<&Parameter, RuntimeError> {
        self.parameters.get(path).ok_or_else(|| RuntimeError::NoParameter { path: path.to_owned() })
    }
}

impl Parameter {
    /// Its file.
    fn file(&self) -> PathBuf {
        self.store.file(&self.planes[0])
    }

    /// All of its tensor, `[N, K]` over leading dimensions.
    fn packed(&self) -> Result<Packed, RuntimeError> {
        self.rows(0..self.shape().rows())
    }

    /// Of the weight: a float tensor has its own, before changes of layout; a packed one its slot's.
    fn shape(&self) -> &Shape {
        match self.codec {
            CodecSpec::Keep => &self.planes[0].shape,
            _ => &self.shape,
        }
    }

    fn rows(&self, rows: Range<u64>) -> Result<Packed, RuntimeError> {
        // A float weight says its own type; a packed one's parameters do.
        let of_float = if self.codec == CodecSpec::Keep { self.planes.first() } else { self.planes.get(1) };
        let float = of_float.and_then(|entry| entry.dtype.float()).unwrap_or(Float::Bf16);
        let shape = self.shape();
        let matrix = Matrix::of(shape);
        let layout = codec(self.codec).planes(matrix, float).expect("checked when the folder was opened");
        let planes = self.planes.iter().zip(layout).map(|(entry, plane)| {
            let of = plane.begun(0..shape.rows()).end;
            self.store.rows(entry, plane.covering(rows.clone()), of)
        });
        Ok(Packed {
            codec: self.codec,
            float,
            out_features: (rows.end - rows.start) as usize,
            in_features: matrix.in_features as usize,
            part: Part { matrix, first: rows.start },
            planes: planes.collect::<Result<_, _>>()?,
        })
    }
}

/// A draft head in a folder of its own: files, what they must hold, how they are packed.
type Companion = (Arc<dyn Store>, Vec<Slot>, Packing);

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
    let (_, packing) = Config::read_packed(&folder)
        .map_err(|problem| ArchError::Side { folder: Folder::Mtp.path(), problem: Box::new(problem) })?;
    Ok(Some((Arc::new(Files(Arc::new(store))), slots, packing)))
}

/// Joins what the config calls for with what the files hold.
struct Binder<'a> {
    folder: Folder,
    packing: &'a Packing,
    keep: &'a dyn Fn(&str) -> bool,
    problems: Vec<ArchError>,
    parameters: BTreeMap<String, Parameter>,
}

impl Binder<'_> {
    /// Binds every slot to tensors of `store`; returns what is left over for a stated reason.
    fn bind(
        &mut self,
        store: &Arc<dyn Store>,
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
            let planes = match self.planes(&**store, slot, first) {
                Ok((codec, planes)) => {
                    taken.extend(planes.iter().filter_map(|p| store.get(&p.name)).map(|p| p.name.as_str()));
                    (codec, planes)
                }
                Err(problem) => {
                    self.problems.push(*problem);
                    // One error for a module is enough.
                    let path = slot.source.strip_suffix("weight").unwrap_or(&slot.source);
                    let planes = ["scales", "biases"].map(|suffix| store.get(&format!("{path}{suffix}")));
                    taken.extend(planes.into_iter().flatten().map(|entry| entry.name.as_str()));
                    continue;
                }
            };
            for output in &slot.outputs {
                let parameter = Parameter {
                    output: output.clone(),
                    shape: slot.shape.clone(),
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
                None if (self.keep)(&tensor.name) => {
                    unused.push((tensor.name.clone(), "kept by the recipe's `[keep]`"));
                }
                None => self.problems.push(ArchError::UnknownTensor {
                    file: self.file(&**store, tensor),
                    name: tensor.name.clone(),
                    model_type: statement.model_type.clone(),
                }),
            }
        }
        unused
    }

    /// A tensor's file, for messages.
    fn file(&self, store: &dyn Store, entry: &TensorEntry) -> String {
        let path = store.file(entry);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        match self.folder.path() {
            "" => name.into_owned(),
            folder => format!("{folder}/{name}"),
        }
    }

    /// What `quantization` calls the module of a tensor whose name starts with `path`.
    fn module<'n>(&self, output: &'n Output, path: &'n str) -> &'n str {
        if self.folder == Folder::Mtp { path } else { &output.module }
    }

    /// The planes of a slot, which must have the shapes and dtypes that its codec and the config call for.
    fn planes(
        &self,
        store: &dyn Store,
        slot: &Slot,
        first: &TensorEntry,
    ) -> Result<(CodecSpec, Vec<TensorEntry>), Box<ArchError>> {
        let output = &slot.outputs[0];
        let file = |entry: &TensorEntry| self.file(store, entry);
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
            if let Some(path) = path.filter(|_| output.role.quantizable() && first.dtype == Dtype::U32)
                && let Some(spec) = self.packing.codec(self.module(output, path))
            {
                let (name, model_type) = (format!("{path}.scales"), format!("packed ({spec})"));
                let layout = codec(spec).planes(Matrix::of(&slot.shape), Float::Bf16).unwrap_or_default();
                let scales = layout.iter().find(|plane| plane.suffix == "scales");
                let shape = scales.map_or_else(|| slot.shape.clone(), |plane| plane.shape(&slot.shape));
                return Err(Box::new(ArchError::MissingTensor { name, shape, model_type }));
            }
            shape_of(first, slot.shape.clone())?;
            dtype_of(first, first.dtype.float().is_some())?;
            return Ok((CodecSpec::Keep, vec![first.clone()]));
        };
        let module = self.module(output, path);
        let Some(spec) = self.packing.codec(module) else {
            return Err(Box::new(ArchError::NoPacking { file: file(first), name: first.name.clone() }));
        };
        let float = scales.dtype.float().unwrap_or(Float::Bf16);
        let layout = codec(spec).planes(Matrix::of(&slot.shape), float).map_err(|error| {
            Box::new(ArchError::Value {
                key: format!("quantization.{module}"),
                found: spec.to_string(),
                needed: error.to_string(),
            })
        })?;
        let mut planes = Vec::new();
        for plane in layout {
            let name = format!("{path}.{}", plane.suffix);
            let needed = plane.shape(&slot.shape);
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
