//! One module of the artifact: its codec, its matrix, its pieces of work.

use std::ops::Range;

use super::{FoldPlan, Note, NoteKind, Rounding, Step};
use crate::alloc::{Allocator, Assignment, Candidate, Rules, encoder};
use crate::arch::{Fate, Folder, Model, Output, Role};
use crate::artifact::layout::{Place, StoredTensor};
use crate::checkpoint::Checkpoint;
use crate::codec::{CodecSpec, Matrix, Plane};
use crate::failure::Problems;
use crate::quant::{CAST, Grain, weighs};
use crate::recipe::{Choice, Recipe, RecipeError};
use crate::stage::ModuleWork;
use crate::stage::pipeline::Pipeline;
use crate::tensor::{Dtype, Float};
use crate::transform::RowSelect;

/// Elements that a panel, the unit of work, holds at most (a row may be longer).
///
/// A constant, so that the cut never follows the machine.
const PANEL_ELEMENTS: u64 = 1 << 20;

/// Elements that go through the stages at once: at four bytes each they stay in a core's cache.
pub const STRIP_ELEMENTS: usize = 1 << 16;

/// One module (or bare parameter) of the artifact.
#[derive(Debug)]
pub struct Module {
    /// Index of the source tensor in the checkpoint.
    pub tensor: usize,
    /// Names, role, rows, transforms.
    pub output: Output,
    /// Codec, encoder and reason.
    pub assignment: Assignment,
    /// [`Candidate::computes`].
    pub computes: bool,
    /// Changes of basis, in order, after the changes of layout.
    pub steps: Vec<Step>,
    /// The same as the stages need it.
    pub work: ModuleWork,
    /// Rows of the matrix that is encoded.
    pub rows: u64,
    /// Planes as the codec lays them out.
    pub planes: Vec<Plane>,
    /// Planes as the artifact names them.
    pub stored: Vec<StoredTensor>,
    /// Where each plane lies.
    pub places: Vec<Place>,
    /// Rows in pieces of work; each is contiguous in the source.
    pub panels: Vec<Range<u64>>,
}

impl Module {
    fn new(
        tensor: usize,
        stored: Dtype,
        output: Output,
        assignment: Assignment,
        to: &Destination<'_>,
    ) -> Self {
        let (codec, model) = (assignment.codec, to.model.float);
        let steps = to.fold.map_or_else(Vec::new, |fold| fold.steps(&output));
        let folded = to.fold.and_then(|fold| fold.grain(&output, &steps));
        let computes = computes(to.model, output.role);
        let (rows, row_elements) = matrix(&output, codec, folded.is_some());
        let own = stored.float();
        let float = match codec {
            CodecSpec::Keep => own.unwrap_or(model),
            CodecSpec::Bf16 => Float::Bf16,
            CodecSpec::F16 => Float::F16,
            CodecSpec::F32 => Float::F32,
            _ => model,
        };
        let work = ModuleWork {
            stored,
            row_elements: usize::try_from(row_elements).expect("a mapped row fits in memory"),
            matrix_rows: match output.shape.0.as_slice() {
                [.., rows, _] if codec.quantizes() => *rows,
                _ => rows,
            },
            // A fold goes on in f32: rounding its input first would be an error of its own.
            // So would it be for a search that weighs errors; only MLX's own bytes call for it.
            cast: (codec.quantizes()
                && own != Some(model)
                && folded.is_none()
                && !weighs(assignment.encoder))
            .then_some(model),
            transforms: output.transforms.clone(),
            folded,
            codec,
            float,
            encoder: assignment.encoder,
            solved: None,
        };
        let planes = work.planes();
        let tensors = planes.iter().map(|plane| StoredTensor {
            name: output.stored_name(plane.suffix),
            dtype: plane.dtype,
            shape: match codec.quantizes() {
                true => plane.shape(&output.shape),
                false => output.shape.clone(),
            },
            bytes: plane.bytes_of(plane.begun(0..rows)) as u64,
        });
        let stored = tensors.collect();
        Self {
            tensor,
            output,
            assignment,
            computes,
            steps,
            work,
            rows,
            planes,
            stored,
            places: Vec::new(),
            panels: Vec::new(),
        }
    }

    /// The same module in another codec.
    pub(super) fn stored_as(
        &self,
        codec: CodecSpec,
        recipe: &Recipe,
        reason: &str,
        to: &Destination<'_>,
    ) -> Self {
        let encoder = encoder(recipe, &Choice { codec, encoder: None }, self.computes);
        let assignment = Assignment { codec, encoder, reason: reason.to_owned(), open: true };
        make(self.tensor, self.work.stored, self.output.clone(), assignment, to)
    }

    /// Which rows of the encoded matrix lie where in the source.
    fn select(&self) -> RowSelect {
        // Rows of a module that owns the whole tensor may be cut elsewhere than after the last dimension.
        if owns_all(&self.output) { RowSelect::all(self.rows) } else { self.output.select }
    }

    /// Number of weights.
    pub fn weights(&self) -> u64 {
        self.rows * self.work.row_elements as u64
    }

    /// Stored bytes of all planes.
    pub fn bytes(&self) -> u64 {
        self.stored.iter().map(|plane| plane.bytes).sum()
    }

    /// Bytes of the rows of a panel, counted from the start of the source tensor's payload.
    pub fn source_range(&self, panel: &Range<u64>) -> Range<u64> {
        let row = self.work.row_elements as u64 * self.work.stored.bytes();
        let start = self.select().source_row(panel.start) * row;
        start..start + (panel.end - panel.start) * row
    }

    /// Changes of layout and of basis, by name, in order.
    pub fn transforms(&self) -> Vec<String> {
        let layout = self.output.transforms.iter().map(|step| step.id().to_owned());
        layout.chain(self.steps.iter().map(Step::name)).collect()
    }

    /// The word for what happens to its tensor in reports.
    pub fn fate(&self) -> &'static str {
        match (self.assignment.codec, self.output.folder) {
            (codec, _) if codec.quantizes() => "quantized",
            (_, Folder::Mtp | Folder::Kept) => "moved",
            _ if !self.steps.is_empty() => "folded",
            (CodecSpec::Keep, _) => "kept",
            _ if self.work.stored == self.work.float.dtype() => "kept",
            _ => "cast",
        }
    }
}

/// Where outputs go.
pub(super) struct Destination<'a> {
    pub model: &'a Model,
    pub fold: Option<&'a FoldPlan>,
    pub pipeline: &'a Pipeline,
    pub rounding: Rounding,
}

/// Gives every output a codec and cuts its rows into panels; also says which allocator gave them.
///
/// # Errors
/// `unused`, the recipe's mistakes so far, and those that show only here.
pub(super) fn assign(
    recipe: &Recipe,
    checkpoint: &Checkpoint,
    fates: &[Fate],
    to: &Destination<'_>,
    unused: Vec<RecipeError>,
) -> Result<(Vec<Module>, &'static str), Problems<RecipeError>> {
    let mut outputs: Vec<(usize, &Output)> = Vec::new();
    for (tensor, fate) in fates.iter().enumerate() {
        if let Fate::Outputs(list) = fate {
            outputs.extend(list.iter().map(|output| (tensor, output)));
        }
    }
    let candidates: Vec<Candidate<'_>> = outputs
        .iter()
        .map(|(tensor, output)| {
            let name = checkpoint.tensors()[*tensor].name.as_str();
            let source_module = name.strip_suffix(".weight").unwrap_or(name);
            let narrow = match (to.model.uniform, to.model.float) {
                (true, Float::Bf16) => Some((Float::Bf16, CodecSpec::Bf16)),
                (true, Float::F16) => Some((Float::F16, CodecSpec::F16)),
                // Nothing is wider than f32.
                _ => None,
            };
            let stored = checkpoint.tensors()[*tensor].dtype.float();
            let narrow = narrow.filter(|(float, _)| stored != Some(*float)).map(|(_, codec)| codec);
            let computes = computes(to.model, output.role);
            Candidate { output, source_module, in_features: output.shape.last(), narrow, computes }
        })
        .collect();
    let allocator = Rules { recipe };
    let assignments = match allocator.assign(&candidates) {
        Ok(assignments) => Problems::none_or(unused, assignments)?,
        Err(more) => return Err(more.after(unused)),
    };
    let modules = outputs.into_iter().zip(assignments).map(|((tensor, output), mut assignment)| {
        let stored = checkpoint.tensors()[tensor].dtype;
        if to.rounding == Rounding::None && stored.float().is_some() {
            (assignment.codec, assignment.encoder) = (CodecSpec::F32, CAST);
        }
        if let Rounding::Trial(codec, encoder) = to.rounding
            && output.role.in_trunk()
            && assignment.codec.quantizes()
            && codec.fits(Matrix::of(&output.shape)).is_ok()
        {
            (assignment.codec, assignment.encoder) = (codec, encoder);
        }
        make(tensor, stored, output.clone(), assignment, to)
    });
    Ok((modules.collect(), allocator.id()))
}

/// Whether the trunk computes with a matrix on inputs that a text gives.
fn computes(model: &Model, role: Role) -> bool {
    match role {
        Role::Linear | Role::Head | Role::Experts | Role::Router | Role::Decay => true,
        Role::Embedding => model.tied,
        _ => false,
    }
}

/// A module with its rows cut into panels.
fn make(
    tensor: usize,
    stored: Dtype,
    output: Output,
    assignment: Assignment,
    to: &Destination<'_>,
) -> Module {
    let mut module = Module::new(tensor, stored, output, assignment, to);
    let fitting = PANEL_ELEMENTS / module.work.row_elements as u64;
    let most = match to.pipeline.grain(&module.work) {
        Grain::Matrix => u64::MAX,
        Grain::Blocks(rows) => (fitting / rows).max(1) * rows,
        Grain::Rows => fitting.max(1),
    };
    module.panels = module.select().panels(module.rows, most);
    module
}

fn owns_all(output: &Output) -> bool {
    output.select == RowSelect::all(output.shape.rows())
}

/// Rows and columns of the matrix that is encoded.
///
/// Floats are cut after the first dimension, so that a transform sees a whole kernel as one row; codes are
/// cut before the last, where groups run, and so is what changes its basis. A module that owns only some rows keeps the cut its rows are
/// counted in.
fn matrix(output: &Output, codec: CodecSpec, folded: bool) -> (u64, u64) {
    let shape = &output.shape;
    let total = shape.elements().expect("checked when the header was read");
    let rows = match shape.0.as_slice() {
        _ if codec.quantizes() || folded || !owns_all(output) => shape.rows(),
        [first, _, ..] => *first,
        _ => 1,
    };
    (rows, total / rows)
}

/// Casts, and weight files that are not read.
pub(super) fn notes(checkpoint: &Checkpoint, modules: &[Module]) -> Vec<Note> {
    let casts = modules.iter().filter_map(|module| {
        let from = module.work.stored.float()?;
        let subject = module.output.rule_path();
        if let Some(to) = module.work.cast {
            let detail = format!("is rounded from {from} to {to}, the model's dtype, before it is encoded");
            return Some(Note { kind: NoteKind::CastFirst, subject, detail });
        }
        // f32 holds whatever the others hold.
        let rounds = module.work.float != from && module.work.float != Float::F32;
        let casts = module.assignment.encoder == CAST && rounds;
        let detail = format!("is rounded from {from} to {}", module.work.float);
        casts.then_some(Note { kind: NoteKind::Cast, subject, detail })
    });
    let unread = checkpoint.unread().iter().map(|file| Note {
        kind: NoteKind::UnreadFile,
        subject: file.clone(),
        detail: "is not part of the checkpoint and is not read".to_owned(),
    });
    casts.chain(unread).collect()
}
