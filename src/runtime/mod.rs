//! Runs a model: from tokens to logits.
//!
//! [`Weights`] opens a folder, [`Model`] makes its layers ready, [`State`] is what one sequence carries, and
//! [`Model::forward`] takes tokens through. A model larger than memory goes through [`Stream`], layer by layer.
//!
//! Logits are a function of weights and tokens alone: neither threads nor the instruction set change a bit of
//! them, and for a model without DeltaNet layers neither does the way the tokens are cut into passes.

mod draft;
mod head;
mod layer;
mod many;
mod residual;
mod state;
mod store;
mod stream;
mod weights;

use std::path::PathBuf;
use std::sync::Arc;

pub use draft::{Draft, DraftState, Drafted};
pub use head::Head;
pub use layer::{Layer, Observer, Ops, Span};
pub use many::Part;
pub use residual::Residual;
pub use state::{DeltaState, KvCache, LayerState, State};
pub use store::{Files, Store};
pub use stream::Stream;
pub use weights::Weights;

use crate::arch::DecoderConfig;
use crate::arch::decoder::MlpConfig;
use crate::backend::cpu::Cpu;
use crate::backend::{LinearOp, Packed, Precision};
use crate::failure::{Exit, Failure, Outcome};

/// Why a model cannot be run, beyond what its files' own errors say.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum RuntimeError {
    #[error("the model has no parameter `{path}`")]
    NoParameter { path: String },
    #[error("`{file}`: parameter `{path}` holds NaN or infinity")]
    NonFinite { path: String, file: PathBuf },
    #[error("{problem}")]
    Unmade { problem: String, help: Option<String> },
    #[error("the logits after token {token} hold NaN or infinity, though every weight is finite")]
    Overflow { token: usize },
    #[error("token id {found} is out of range: the model has {vocab} tokens")]
    NoSuchToken { found: u32, vocab: usize },
    #[error("{tokens} tokens are more than the model's context of {context}")]
    ContextFull { tokens: usize, context: usize },
    #[error("the prompt is empty")]
    NoTokens,
    #[error("a recurrent state of {tokens} tokens cannot be cut back to {to}")]
    CannotTruncate { tokens: usize, to: usize },
    #[error("the prompt has token {id}, which stands for an image or a video")]
    Media { id: u32 },
    #[error("`{dir}` holds no draft head")]
    NoDraft { dir: PathBuf },
    #[error("layers {from}..{to} were asked for, but the model has {layers}")]
    NoSuchLayers { from: usize, to: usize, layers: usize },
}

impl Failure for RuntimeError {
    fn exit(&self) -> Exit {
        match self {
            RuntimeError::NoParameter { .. }
            | RuntimeError::NonFinite { .. }
            | RuntimeError::Unmade { .. }
            | RuntimeError::Overflow { .. } => Exit::Input,
            _ => Exit::Request,
        }
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            RuntimeError::NoParameter { .. } => {
                "check that config and weights belong together and that the download is complete".to_owned()
            }
            RuntimeError::NonFinite { .. } => "the file is damaged; download or build it again".to_owned(),
            RuntimeError::Unmade { help, .. } => return help.clone(),
            RuntimeError::Overflow { .. } => {
                "weights or scales are far out of range: use another build of the model".to_owned()
            }
            RuntimeError::NoSuchToken { .. } => {
                "check that the ids come from this model's tokenizer".to_owned()
            }
            RuntimeError::ContextFull { .. } => "shorten the prompt, or ask for fewer tokens".to_owned(),
            RuntimeError::NoTokens => "give a prompt of at least one token".to_owned(),
            RuntimeError::CannotTruncate { .. } => "start the sequence anew".to_owned(),
            RuntimeError::Media { .. } => {
                "this runtime computes text only; the vision tower is stored for other readers".to_owned()
            }
            RuntimeError::NoDraft { .. } => {
                "run without `--draft`, or use a checkpoint that was published with its MTP head".to_owned()
            }
            RuntimeError::NoSuchLayers { layers, .. } => format!("name layers below {layers}"),
        })
    }
}

/// Which rows of a pass get hidden states and logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// None.
    Nothing,
    /// The last token.
    Last,
    /// The last token, and hidden states of all.
    Hidden,
    /// All tokens.
    All,
}

/// What came out of a pass.
#[derive(Debug, Clone, Default)]
pub struct Pass {
    /// Final-normed hidden states of the rows wanted, [rows, H]: what the head reads.
    pub hidden: Vec<f32>,
    /// Logits of the rows wanted, [rows, V].
    pub logits: Vec<f32>,
}

/// A model whose layers are all ready.
#[derive(Debug)]
pub struct Model {
    weights: Weights,
    cpu: Arc<Cpu>,
    ends: Ends,
    layers: Vec<Layer>,
    draft: Option<Draft>,
}

/// What comes before the first layer and after the last.
#[derive(Debug)]
struct Ends {
    embedding: Packed,
    head: Head,
}

impl Ends {
    fn open(weights: &Weights, cpu: &Arc<Cpu>) -> Result<Self, RuntimeError> {
        let embedding = weights.packed(&format!("{}.embed_tokens", weights.decoder.root))?;
        Ok(Self { embedding, head: Head::open(weights, cpu)? })
    }

    /// The embeddings of `tokens`, [T, H].
    fn embed(&self, tokens: &[u32]) -> Vec<f32> {
        let width = self.embedding.in_features;
        let mut x = vec![0.0; tokens.len() * width];
        for (row, token) in x.chunks_exact_mut(width).zip(tokens) {
            let n = *token as usize;
            self.embedding.decode(n..n + 1, row);
        }
        x
    }
}

/// The most rows that go through the layers together: wide enough for the kernels.
pub const ROWS: usize = 512;

/// Bytes of activations that a pass of a model in memory may hold.
const ACTIVATIONS: usize = 32 << 20;

/// Values of activations that a pass holds for each of its rows: the residual stream, its norm, what the layer
/// gives, and the widest part of the layer.
pub fn values_of_row(config: &DecoderConfig) -> usize {
    let attention = &config.attention;
    let queries = (if attention.gated { 4 } else { 2 }) * attention.q_heads * attention.head_dim;
    let delta = config.delta_net.map_or(0, |c| 3 * state::channels(&c) + 3 * c.value_heads * c.value_dim);
    let mlp = match config.mlp {
        MlpConfig::Dense { intermediate } => 2 * intermediate,
        MlpConfig::Experts { chosen, shared, .. } => chosen * config.hidden + 2 * shared,
    };
    3 * config.hidden + queries.max(delta).max(mlp)
}

/// Rows that go through a model's layers together: as many as [`ACTIVATIONS`] allows, from 16 to [`ROWS`].
fn rows_of_pass(config: &DecoderConfig) -> usize {
    (ACTIVATIONS / (4 * values_of_row(config))).clamp(16, ROWS)
}

impl Model {
    /// Makes every layer ready. Weights stay where they are, mapped.
    ///
    /// # Errors
    /// [`RuntimeError`]s of the small tensors that are read now.
    pub fn new(weights: Weights, cpu: Arc<Cpu>) -> Outcome<Self> {
        let ends = Ends::open(&weights, &cpu)?;
        let config = &weights.decoder;
        let layers = config
            .layers
            .iter()
            .enumerate()
            .map(|(i, kind)| Layer::open(&weights, &cpu, &format!("{}.layers.{i}", config.root), *kind))
            .collect::<Result<_, _>>()?;
        let draft = if weights.has_draft() { Some(Draft::open(&weights, &cpu)?) } else { None };
        Ok(Self { ends, layers, draft, weights, cpu })
    }

    /// What the model computes.
    pub fn config(&self) -> &DecoderConfig {
        &self.weights.decoder
    }

    /// The folder it came from.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Where it runs.
    pub fn cpu(&self) -> &Arc<Cpu> {
        &self.cpu
    }

    /// The draft head, if the folder holds one.
    ///
    /// # Errors
    /// [`RuntimeError::NoDraft`].
    pub fn draft(&self) -> Result<&Draft, RuntimeError> {
        self.draft.as_ref().ok_or_else(|| RuntimeError::NoDraft { dir: self.weights.dir.clone() })
    }

    /// A state before the first token.
    pub fn state(&self) -> State {
        State::new(&self.weights.decoder)
    }

    /// Tokens that [`Model::forward`] takes through the layers together.
    pub fn rows_of_pass(&self) -> usize {
        rows_of_pass(self.config())
    }

    /// Bytes of weights that one token reads: all linear layers, and the head.
    pub fn bytes_per_token(&self) -> u64 {
        let layers = self.layers.iter().flat_map(Layer::linears);
        layers.map(LinearOp::bytes).sum::<u64>() + self.ends.head.op().bytes()
    }

    /// How many linear layers take each path, the head included.
    pub fn precisions(&self) -> std::collections::BTreeMap<Precision, usize> {
        let mut counts = std::collections::BTreeMap::new();
        for op in self.layers.iter().flat_map(Layer::linears).chain([self.ends.head.op()]) {
            *counts.entry(op.precision()).or_default() += 1;
        }
        counts
    }

    /// Refuses a prompt that is empty, that has ids the model has no row for or that stand for pictures, or that
    /// fills the context.
    ///
    /// # Errors
    /// [`RuntimeError::NoTokens`], [`RuntimeError::NoSuchToken`], [`RuntimeError::Media`],
    /// [`RuntimeError::ContextFull`].
    pub fn check_prompt(&self, tokens: &[u32]) -> Result<(), RuntimeError> {
        if tokens.is_empty() {
            return Err(RuntimeError::NoTokens);
        }
        check_tokens(self.config(), tokens)?;
        // A model may make such a token itself; only a prompt means a picture by it.
        match tokens.iter().find(|id| self.config().media_tokens.contains(id)) {
            Some(id) => Err(RuntimeError::Media { id: *id }),
            None => check_context(self.config(), tokens.len()),
        }
    }

    /// Takes `tokens` through all layers, after those that `state` has seen.
    ///
    /// # Errors
    /// [`RuntimeError`] for ids out of range and a context that is full: the state is as before. For weights that
    /// make NaN or infinity: the state is spoilt.
    pub fn forward(&self, state: &mut State, tokens: &[u32], want: Want) -> Result<Pass, RuntimeError> {
        self.forward_observed(state, tokens, want, &mut ())
    }

    /// [`Model::forward`], with somebody looking on.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn forward_observed(
        &self,
        state: &mut State,
        tokens: &[u32],
        want: Want,
        observer: &mut dyn Observer,
    ) -> Result<Pass, RuntimeError> {
        check_tokens(self.config(), tokens)?;
        check_context(self.config(), state.tokens + tokens.len())?;
        let mut pass = Pass::default();
        let rows = rows_of_pass(self.config());
        let passes = tokens.len().div_ceil(rows);
        for (i, part) in tokens.chunks(rows).enumerate() {
            let x = self.hidden(&mut [Part { state, tokens: part, want }], observer);
            let last = x.len() - self.config().hidden;
            let from = match want {
                Want::Nothing => continue,
                Want::Last if i + 1 < passes => continue,
                Want::Last => last,
                Want::Hidden | Want::All => 0,
            };
            let hidden = self.ends.head.norm(&x[from..]);
            match want {
                Want::All => pass.logits.extend(self.ends.head.logits(&hidden)),
                _ if i + 1 == passes => pass.logits = self.ends.head.logits(&hidden[last - from..]),
                _ => {}
            }
            pass.hidden.extend(hidden);
        }
        let rows = pass.logits.len() / self.config().vocab;
        check_finite(&self.weights, &pass.logits, state.tokens - rows)?;
        Ok(pass)
    }
}

fn check_tokens(config: &DecoderConfig, tokens: &[u32]) -> Result<(), RuntimeError> {
    for &id in tokens {
        if id as usize >= config.vocab {
            return Err(RuntimeError::NoSuchToken { found: id, vocab: config.vocab });
        }
    }
    Ok(())
}

/// Refuses logits [rows, V] that are not numbers, and names the weight that made them so. The first row is of token
/// `first`.
fn check_finite(weights: &Weights, logits: &[f32], first: usize) -> Result<(), RuntimeError> {
    match logits.iter().position(|logit| !logit.is_finite()) {
        None => Ok(()),
        Some(at) => {
            let token = first + at / weights.decoder.vocab;
            Err(weights.non_finite().unwrap_or(RuntimeError::Overflow { token }))
        }
    }
}

fn check_context(config: &DecoderConfig, tokens: usize) -> Result<(), RuntimeError> {
    match config.context {
        Some(context) if tokens > context => Err(RuntimeError::ContextFull { tokens, context }),
        _ => Ok(()),
    }
}
