//! Codes of one module under the second moment of its inputs.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::inputs::{Input, Inputs};
use super::kept;
use crate::arch::Role;
use crate::artifact::provenance::{ExpertRecord, WeighedRecord};
use crate::backend::cpu::Cpu;
use crate::encode::EncodeError;
use crate::failure::Outcome;
use crate::fold::{Prepared, values};
use crate::linalg::Symmetric;
use crate::plan::{Module, Plan};
use crate::quant::gptq::{self, GptqOptions, GptqReport, Refusal, Weighted};
use crate::quant::{GPTQ_REFIT, LDLQ, QuantError, Repairs, RowLoss, Rows, base, ldlq, quantizer};
use crate::recipe::FewTokens;
use crate::stage::{Place, Solved};

/// What is kept of a module beside its planes and losses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Note {
    rows: usize,
    /// Bytes of all planes.
    bytes: u64,
    repairs: Repairs,
    record: WeighedRecord,
}

/// Bytes of a row's loss: two f64.
const LOSS: usize = 16;

/// What [`module`] kept at `path`, if it is there and whole.
pub(super) fn recall(path: &Path) -> Option<(Arc<Solved>, WeighedRecord)> {
    let (note, file, start): (Note, _, _) = kept::open(path)?;
    let mut losses = vec![0; LOSS * note.rows];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut losses, start + note.bytes).ok()?;
    let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    let losses =
        losses.chunks_exact(LOSS).map(|b| RowLoss { error: number(&b[..8]), energy: number(&b[8..]) });
    let solved = Solved::new(Place::File(file, start), losses.collect(), note.repairs);
    Some((Arc::new(solved), note.record))
}

/// Searches the module's codes, and keeps them at `path` if there is one.
///
/// # Errors
/// Those of the module's weights; [`EncodeError::Encode`] where a parameter does not fit; files that cannot be written.
pub(super) fn module(
    plan: &Plan,
    prepared: &Prepared,
    index: usize,
    inputs: &Inputs,
    cpu: &Cpu,
    path: Option<&Path>,
) -> Outcome<(Arc<Solved>, WeighedRecord)> {
    let module = &plan.modules[index];
    let work = prepared.work(index);
    let matrix = values(plan, module, work)?;
    let layout = &module.planes;
    let rows = module.rows as usize;
    let mut all = vec![0u8; module.bytes() as usize];
    let mut losses = vec![RowLoss::default(); rows];
    let mut planes = Vec::new();
    let mut rest = all.as_mut_slice();
    for stored in &module.stored {
        let (plane, after) = rest.split_at_mut(stored.bytes as usize);
        planes.push(plane);
        rest = after;
    }
    let name = module.output.rule_path();
    let mut account = Account::new(name.clone());
    let parts = parts(module);
    let each = rows / parts.len();
    let shared = parts.iter().any(Option::is_some).then(|| inputs.all_experts(&name)).flatten();
    for (part, expert) in parts.into_iter().enumerate() {
        let own = inputs.get(&name, expert);
        let tokens = own.map_or(0, |input| input.tokens);
        let few = expert.is_some() && tokens < u64::from(plan.recipe.calibration.expert_tokens);
        let input = match (few, plan.recipe.calibration.few_tokens) {
            (false, _) => own,
            (true, FewTokens::Shared) => shared.as_ref(),
            (true, FewTokens::Nearest) => None,
        };
        let rows = part * each..(part + 1) * each;
        let columns = module.work.row_elements;
        let mut here: Vec<&mut [u8]> = planes
            .iter_mut()
            .zip(layout)
            .map(|(plane, layout)| {
                let start = layout.bytes_of(layout.begun(0..rows.start as u64));
                let here = layout.begun(rows.start as u64..rows.end as u64);
                &mut plane[start..start + layout.bytes_of(here)]
            })
            .collect();
        let values = &matrix[rows.start * columns..rows.end * columns];
        let outputs = inputs.outputs(&name, expert);
        let given = input.map(|input| (input, outputs));
        let found = search(plan, module, values, given, cpu, &mut here, &mut losses[rows.clone()]);
        let found = found.map_err(|error| refusal(plan, module, rows.start, &error))?;
        account.add(expert, tokens, few, &found);
    }
    let (record, repairs) = account.finish();
    let Some(path) = path else {
        return Ok((Arc::new(Solved::new(Place::Memory(all), losses, repairs)), record));
    };
    let numbers: Vec<u8> =
        losses.iter().flat_map(|loss| [loss.error, loss.energy]).flat_map(f64::to_le_bytes).collect();
    let note = Note { rows, bytes: all.len() as u64, repairs, record };
    kept::write(path, &note, &[&all, &numbers]).map_err(super::io("write", path))?;
    drop((all, numbers));
    match recall(path) {
        Some(kept) => Ok(kept),
        None => Err(super::io("read back", path)(std::io::Error::other("it is not what was written")).into()),
    }
}

/// The experts of a module, or one part.
fn parts(module: &Module) -> Vec<Option<usize>> {
    match module.output.role {
        Role::Experts => (0..module.output.shape.0[0] as usize).map(Some).collect(),
        _ => vec![None],
    }
}

/// What came of one matrix: the search's own account, if anything went through it, and what the encoder changed.
struct Found {
    report: Option<GptqReport>,
    repairs: Repairs,
}

fn search(
    plan: &Plan,
    module: &Module,
    values: &[f32],
    given: Option<(&Input, Option<&Symmetric>)>,
    cpu: &Cpu,
    planes: &mut [&mut [u8]],
    losses: &mut [RowLoss],
) -> Result<Found, QuantError> {
    let (codec, encoder) = (module.assignment.codec, module.assignment.encoder);
    let (in_features, float) = (module.work.row_elements, module.work.float);
    let base = quantizer(base(encoder)).expect("every encoder has one that stands in");
    let parallel = |count: usize, part: &(dyn Fn(usize) + Sync)| cpu.threads.run(count, part);
    let Some((input, outputs)) = given else {
        let rows = Rows { values, in_features, float, ahead: &[] };
        let repairs = match encoder {
            LDLQ => ldlq::nearest(codec, rows, cpu.isa, &parallel, planes, losses)?,
            _ => base.fit(codec, rows, cpu.isa, planes, losses)?,
        };
        return Ok(Found { report: None, repairs });
    };
    let choice = plan.recipe.gptq;
    let options = GptqOptions {
        refit: encoder == GPTQ_REFIT,
        sweeps: choice.sweeps,
        act_order: choice.act_order,
        damping: choice.damping,
    };
    let weighted = Weighted { values, in_features, float, hessian: &input.hessian, outputs };
    let (report, repairs) = match encoder {
        LDLQ => ldlq::solve(codec, weighted, &options, cpu.isa, &parallel, planes, losses)?,
        _ => {
            let report = gptq::solve(codec, weighted, base, &options, cpu.isa, &parallel, planes, losses)?;
            (report, Repairs::default())
        }
    };
    Ok(Found { report: Some(report), repairs })
}

/// A refusal's kind, as provenance spells it.
fn reason(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::NotPositive { .. } => "not-positive",
        Refusal::NonFinite => "non-finite",
        Refusal::ScaleCeiling { .. } => "scale-ceiling",
        Refusal::ErrorCeiling { .. } => "error-ceiling",
        Refusal::WorseThanNearest { .. } => "worse-than-nearest",
    }
}

/// Adds up what came of the matrices of one module.
struct Account {
    record: WeighedRecord,
    nearest: f64,
    loss: f64,
    energy: f64,
    repairs: Repairs,
}

impl Account {
    fn new(module: String) -> Self {
        let record = WeighedRecord {
            module,
            tokens: 0,
            damping: None,
            nearest: 0.0,
            loss: 0.0,
            dead: 0,
            refused: BTreeMap::new(),
            fallbacks: 0,
            experts: Vec::new(),
            tile_penalty: None,
            two_sided: false,
        };
        Self { record, nearest: 0.0, loss: 0.0, energy: 0.0, repairs: Repairs::default() }
    }

    fn add(&mut self, expert: Option<usize>, tokens: u64, few: bool, found: &Found) {
        self.record.tokens += tokens;
        if expert.is_some() {
            self.record.experts.push(ExpertRecord { tokens, few });
        }
        self.repairs += found.repairs;
        let Some(report) = &found.report else {
            self.record.fallbacks += 1;
            return;
        };
        let record = &mut self.record;
        record.dead += report.dead_columns;
        record.two_sided |= report.two_sided;
        record.tile_penalty = record.tile_penalty.into_iter().chain(report.penalty).reduce(f64::max);
        match report.damping {
            Some(damping) => record.damping = Some(record.damping.map_or(damping, |d| d.max(damping))),
            None => record.fallbacks += 1,
        }
        for (damping, refusal) in &report.refused {
            *record.refused.entry(format!("{damping}: {}", reason(refusal))).or_default() += 1;
        }
        self.nearest += report.nearest_loss;
        self.loss += report.loss;
        self.energy += report.energy;
    }

    fn finish(mut self) -> (WeighedRecord, Repairs) {
        let share = |loss: f64, energy: f64| if energy > 0.0 { loss / energy } else { 0.0 };
        self.record.nearest = share(self.nearest, self.energy);
        self.record.loss = share(self.loss, self.energy);
        (self.record, self.repairs)
    }
}

fn refusal(plan: &Plan, module: &Module, before: usize, error: &QuantError) -> EncodeError {
    let entry = &plan.checkpoint.tensors()[module.tensor];
    EncodeError::Encode {
        file: plan.checkpoint.files()[entry.file].path.display().to_string(),
        tensor: entry.name.clone(),
        row: (before + error.row()) as u64,
        problem: error.to_string(),
    }
}
