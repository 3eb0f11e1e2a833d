//! What the tensors of a model family are called, what they are, and how its layouts differ.
//!
//! An adapter reads `config.json` and states every tensor that the checkpoint must hold and what each
//! becomes in the artifact: its module path in MLX's model tree, its role, and the changes of layout on
//! the way. It touches no weights. [`Model::bind`] then holds that statement against the checkpoint, so
//! that a missing, misshapen or unknown tensor is refused by name.
//!
//! To add a family: one file here, one line in [`registry`].

mod config;
pub mod decoder;
mod dense;
mod packing;
mod qwen3_5;
pub mod registry;
mod seat;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use config::{ArchError, Config, Keys};
pub use decoder::DecoderConfig;
pub use packing::Packing;
pub use seat::{Part, Seat, Stand};

use crate::checkpoint::REPORTED;
use crate::failure::Problems;
use crate::tensor::{Dtype, Float, Layout, Shape, TensorName};
use crate::transform::{RowSelect, Transform};

/// What a module is for; decides its default codec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// A linear layer.
    Linear,
    /// The input embedding (and, when tied, the output head).
    Embedding,
    /// An untied output head.
    Head,
    /// The stacked linears of all experts, `[E, N, K]`.
    Experts,
    /// An expert router or shared-expert gate: tiny, and its errors flip choices.
    Router,
    /// `in_proj_a` or `in_proj_b` of a gated DeltaNet: tiny, and they set the state's decay.
    Decay,
    /// A norm's gain.
    Norm,
    /// A depthwise convolution kernel.
    Conv,
    /// A per-head parameter of the recurrence (`A_log`, `dt_bias`).
    State,
    /// A linear layer's bias vector.
    Bias,
    /// Any tensor of the vision tower.
    Vision,
    /// A linear layer of the draft (MTP) head.
    DraftLinear,
    /// Any other tensor of the draft head.
    Draft,
    /// A tensor that the recipe's `[keep]` asked for and no adapter knows.
    Unknown,
}

impl Role {
    /// Whether codes and scales may be stored for it.
    pub fn quantizable(self) -> bool {
        matches!(
            self,
            Role::Linear
                | Role::Embedding
                | Role::Head
                | Role::Experts
                | Role::Router
                | Role::Decay
                | Role::DraftLinear
        )
    }

    /// Whether codes and scales may be stored for it, and the text model computes with it.
    pub fn in_trunk(self) -> bool {
        self.quantizable() && self != Role::DraftLinear
    }

    /// Why it is not quantized unless a rule says so, for the plan and the report.
    pub fn default_reason(self) -> Option<&'static str> {
        match self {
            Role::Linear | Role::Embedding | Role::Head | Role::Experts => None,
            Role::Router => Some("router: 8 bits by default"),
            Role::Decay => Some("sets the recurrent decay: 8 bits by default"),
            Role::Norm => Some("norm gains are kept"),
            Role::Conv => Some("convolution kernels are kept"),
            Role::State => Some("recurrence parameters are kept"),
            Role::Bias => Some("bias vectors are kept"),
            Role::Vision => Some("vision tower passes through in bf16"),
            Role::DraftLinear | Role::Draft => Some("draft head is moved to `mtp/` unquantized"),
            Role::Unknown => Some("kept by the recipe's `[keep]`"),
        }
    }
}

/// Which weight files of the artifact a tensor goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Folder {
    /// The artifact's root: what a stock loader reads.
    Main,
    /// `mtp/`: the draft head.
    Mtp,
    /// `kept/`: tensors that only the recipe's `[keep]` knows. Stock loaders refuse unknown tensors in the
    /// main files.
    Kept,
}

impl Folder {
    /// The folders beside the main files, in the order they are written.
    pub const SIDE: [Folder; 2] = [Folder::Mtp, Folder::Kept];

    /// Path below the artifact: empty for the main files.
    pub fn path(self) -> &'static str {
        match self {
            Folder::Main => "",
            Folder::Mtp => "mtp",
            Folder::Kept => "kept",
        }
    }
}

/// One parameter of the artifact and where it comes from.
#[derive(Debug, Clone)]
pub struct Output {
    /// Path in the model tree of the layout that is written, without the parameter's name: what rules match and
    /// `config.json` names.
    pub module: String,
    /// `weight`, `bias`, or a bare parameter's own name (`A_log`).
    pub parameter: &'static str,
    /// What it is for.
    pub role: Role,
    /// Shape before encoding.
    pub shape: Shape,
    /// Which rows of the source tensor (dimensions flattened but the last) it owns.
    pub select: RowSelect,
    /// Changes of layout, in order.
    pub transforms: Vec<Arc<dyn Transform>>,
    /// Which files it goes to.
    pub folder: Folder,
    /// Where it stands to the bases that may be changed.
    pub seat: Seat,
}

impl Output {
    /// The stored name of one plane: `suffix` replaces `weight`.
    pub fn stored_name(&self, suffix: &str) -> String {
        let path: &str = match self.folder {
            Folder::Main | Folder::Kept => &self.module,
            // The companion folder's names lack the prefix: that is how its readers tell gains from raw norms.
            Folder::Mtp => self.module.strip_prefix("mtp.").unwrap_or(&self.module),
        };
        let parameter = if self.parameter == "weight" { suffix } else { self.parameter };
        if parameter.is_empty() { path.to_owned() } else { format!("{path}.{parameter}") }
    }

    /// The path that rules match: the module, and the parameter's name if it is not `weight`.
    pub fn rule_path(&self) -> String {
        if self.parameter == "weight" || self.parameter.is_empty() {
            self.module.clone()
        } else {
            format!("{}.{}", self.module, self.parameter)
        }
    }
}

/// A tensor that the checkpoint must hold, and what it becomes.
#[derive(Debug, Clone)]
pub struct Slot {
    /// Name in the source.
    pub source: TensorName,
    /// Shape that the config calls for.
    pub shape: Shape,
    /// What it becomes; never empty.
    pub outputs: Vec<Output>,
}

/// A tensor name that may be there and is left out, with the reason.
#[derive(Debug, Clone)]
pub struct Drop {
    /// Whole name, or a suffix that starts with `.`.
    pub name: TensorName,
    /// For the report.
    pub reason: &'static str,
}

/// What one checkpoint should hold and become, from its config alone.
#[derive(Debug)]
pub struct Model {
    /// `model_type` of the source's config.
    pub model_type: String,
    /// The source's layout.
    pub layout: Layout,
    /// The layout that outputs are named and shaped in.
    pub target: Layout,
    /// Whether the source stores w for a norm's gain 1 + w.
    pub zero_centred: bool,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Path of the final norm, in the target's tree.
    pub final_norm: String,
    /// Path of the output head, in the target's tree, whether it is tied or not.
    pub head: String,
    /// Every tensor.
    pub slots: Vec<Slot>,
    /// Tensors that may be dropped.
    pub drops: Vec<Drop>,
    /// The dtype that activations, scales and biases have.
    pub float: Float,
    /// Whether norms and biases must have that dtype too: MLX computes in f32 after one that has another.
    pub uniform: bool,
    /// Whether the output head is the input embedding.
    pub tied: bool,
}

/// What a source tensor turns out to be.
#[derive(Debug, Clone)]
pub enum Fate {
    /// It becomes these parameters.
    Outputs(Vec<Output>),
    /// It is left out, for this reason.
    Dropped(&'static str),
}

/// A model family.
pub trait Arch: Sync {
    /// The `model_type` values it answers to.
    fn model_types(&self) -> &'static [&'static str];

    /// States the tensors that this config calls for, to be written in the layout `target`. `probe` gives the dtype
    /// and shape of a source tensor by name, for telling layouts apart.
    ///
    /// # Errors
    /// [`ArchError`]s for every config value that is missing or that this family does not know.
    fn model(
        &self,
        config: &Config,
        probe: &dyn Fn(&str) -> Option<(Dtype, Shape)>,
        target: Layout,
    ) -> Result<Model, Problems<ArchError>>;

    /// What a checkpoint of this config computes.
    ///
    /// # Errors
    /// [`ArchError`]s for every config value that the runtime does not know.
    fn decoder(&self, config: &Config, model: &Model) -> Result<DecoderConfig, Problems<ArchError>>;

    /// The tensors of a draft head in a folder of its own, as [`Arch::draft_config`] describes it.
    ///
    /// # Errors
    /// [`ArchError`]s for every config value that is missing or that this family does not know.
    fn companion(&self, _config: &Config) -> Result<Vec<Slot>, Problems<ArchError>> {
        Ok(Vec::new())
    }

    /// The artifact's `config.json` before `quantization` is added: what stock readers of the target's layout
    /// read, with every key written out whose default differs between them.
    fn output_config(&self, config: &Config, model: &Model) -> serde_json::Map<String, serde_json::Value>;

    /// The `config.json` of the `mtp/` folder, if the family has a draft head.
    fn draft_config(
        &self,
        _config: &Config,
        _model: &Model,
    ) -> Option<serde_json::Map<String, serde_json::Value>> {
        None
    }
}

/// A source tensor's header facts, as [`Model::bind`] needs them.
#[derive(Debug, Clone)]
pub struct Found<'a> {
    /// Name in the source.
    pub name: &'a str,
    /// Stored dtype.
    pub dtype: Dtype,
    /// Stored shape.
    pub shape: &'a Shape,
    /// File that holds it, for messages.
    pub file: &'a str,
}

impl Model {
    /// Gives a tied model an output head of its own: a second copy of the embedding.
    ///
    /// # Panics
    /// If it has no embedding, which every family has.
    pub fn untie(&mut self) {
        let outputs = self.slots.iter_mut().map(|slot| &mut slot.outputs);
        let mut embedding = outputs.filter(|outputs| outputs[0].seat.stream == Stand::Points);
        let outputs = embedding.next().expect("a decoder has an input embedding");
        outputs.push(Output {
            module: self.head.clone(),
            role: Role::Head,
            seat: Seat::reads(&self.final_norm),
            ..outputs[0].clone()
        });
        self.tied = false;
    }

    /// Holds the statement against the checkpoint's tensors; `keep` says which unknown ones the recipe keeps.
    ///
    /// The result has one fate for each tensor in `found`, in the same order.
    ///
    /// # Errors
    /// Tensors that are missing, have another shape or dtype than the config calls for, or are unknown:
    /// the first [`REPORTED`] of them, and how many more there are.
    pub fn bind(
        &self,
        found: &[Found<'_>],
        keep: &dyn Fn(&str) -> bool,
    ) -> Result<Vec<Fate>, Problems<ArchError>> {
        let slots: BTreeMap<&str, &Slot> =
            self.slots.iter().map(|slot| (slot.source.as_str(), slot)).collect();
        let mut problems = Vec::new();
        let mut fates = Vec::with_capacity(found.len());
        for tensor in found {
            if let Some(slot) = slots.get(tensor.name) {
                if *tensor.shape != slot.shape {
                    problems.push(ArchError::Shape {
                        file: tensor.file.to_owned(),
                        name: tensor.name.to_owned(),
                        found: tensor.shape.clone(),
                        needed: slot.shape.clone(),
                    });
                } else if tensor.dtype.float().is_none() {
                    problems.push(ArchError::Dtype {
                        file: tensor.file.to_owned(),
                        name: tensor.name.to_owned(),
                        found: tensor.dtype,
                    });
                }
                fates.push(Fate::Outputs(slot.outputs.clone()));
            } else if let Some(drop) = self.drops.iter().find(|drop| drop.covers(tensor.name)) {
                fates.push(Fate::Dropped(drop.reason));
            } else if keep(tensor.name) {
                fates.push(Fate::Outputs(vec![Output::kept(tensor.name, tensor.shape)]));
            } else {
                fates.push(Fate::Dropped("unknown"));
                problems.push(ArchError::UnknownTensor {
                    file: tensor.file.to_owned(),
                    name: tensor.name.to_owned(),
                    model_type: self.model_type.clone(),
                });
            }
        }
        let names: std::collections::BTreeSet<&str> = found.iter().map(|tensor| tensor.name).collect();
        for slot in self.slots.iter().filter(|slot| !names.contains(slot.source.as_str())) {
            problems.push(ArchError::MissingTensor {
                name: slot.source.clone(),
                shape: slot.shape.clone(),
                model_type: self.model_type.clone(),
            });
        }
        // A config of another size than the weights is wrong in every tensor alike.
        if problems.len() > REPORTED {
            let count = problems.len() - REPORTED;
            problems.truncate(REPORTED);
            problems.push(ArchError::More { count });
        }
        Problems::none_or(problems, fates)
    }
}

impl Drop {
    /// Whether a tensor of this name is meant.
    pub fn covers(&self, name: &str) -> bool {
        if self.name.starts_with('.') { name.ends_with(&self.name) } else { name == self.name }
    }
}

impl Output {
    fn kept(name: &str, shape: &Shape) -> Self {
        // A bare parameter keeps its whole name; only `.weight` is split off, as for known tensors.
        let (module, parameter) = match name.strip_suffix(".weight") {
            Some(module) => (module.to_owned(), "weight"),
            None => (name.to_owned(), ""),
        };
        Self {
            module,
            parameter,
            role: Role::Unknown,
            shape: shape.clone(),
            select: RowSelect::all(shape.rows()),
            transforms: Vec::new(),
            folder: Folder::Kept,
            seat: Seat::default(),
        }
    }
}

/// Collects slots; the adapters' shared hand.
struct Slots {
    list: Vec<Slot>,
}

impl Slots {
    fn new() -> Self {
        Self { list: Vec::new() }
    }

    /// A tensor that becomes exactly one parameter of the same shape.
    fn one(
        &mut self,
        source: String,
        module: &str,
        parameter: &'static str,
        role: Role,
        shape: impl Into<Shape>,
        seat: Seat,
    ) {
        self.with(source, module, parameter, role, shape, Vec::new(), Folder::Main, seat);
    }

    #[allow(clippy::too_many_arguments)]
    fn with(
        &mut self,
        source: String,
        module: &str,
        parameter: &'static str,
        role: Role,
        shape: impl Into<Shape>,
        transforms: Vec<Arc<dyn Transform>>,
        folder: Folder,
        seat: Seat,
    ) {
        let shape = shape.into();
        self.list.push(Slot {
            source,
            shape: shape.clone(),
            outputs: vec![Output {
                module: module.to_owned(),
                parameter,
                role,
                select: RowSelect::all(shape.rows()),
                shape,
                transforms,
                folder,
                seat,
            }],
        });
    }
}
