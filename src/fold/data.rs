//! The numbers of a fold, and the transforms made of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::balance::{Balances, measure};
use super::draft::{self, DraftFold};
use super::rotations::{self, Rotations};
use super::{FoldError, Watch};
use crate::arch::{Part, Stand};
use crate::encode::EncodeError;
use crate::numeric::widen;
use crate::plan::{FoldPlan, Module, Plan, Step, What};
use crate::stage::{ModuleWork, Solved};
use crate::tensor::{Layout, Shape};
use crate::transform::{Axis, Neutral, Reorder, Rotate, Rotation, Scale, Transform};

/// Norm gains g by the path of their module, in f64: w, or 1 + w where the source is zero-centred.
pub(super) type Gains = BTreeMap<String, Arc<[f64]>>;

/// A plan's modules with the transforms that their steps stand for.
#[derive(Debug, Clone)]
pub struct Prepared {
    works: Vec<ModuleWork>,
    data: Option<Data>,
}

/// All numbers of a fold.
#[derive(Debug, Clone)]
struct Data {
    gains: Gains,
    rotations: Rotations,
    balances: Balances,
    draft: Option<DraftFold>,
}

/// Reads and makes what the plan's steps name.
///
/// # Errors
/// [`FoldError`] for gains that are not finite, and if `watch` stops it.
pub fn prepare(plan: &Plan, watch: Watch<'_>) -> Result<Prepared, FoldError> {
    let works: Vec<ModuleWork> = plan.modules.iter().map(|module| module.work.clone()).collect();
    let mut prepared = Prepared { works, data: None };
    let Some(fold) = &plan.fold else { return Ok(prepared) };
    (watch.tell)("reading gains");
    let gains = gains(plan)?;
    let draft = draft::fold(plan, &gains);
    let mut data = Data { gains, rotations: Rotations::default(), balances: Balances::default(), draft };
    if rotations::are_found(fold) {
        // The search sees weights with their gains.
        prepared.data = Some(data.clone());
        prepared.fill(plan, fold);
        data.rotations = rotations::find(plan, fold, &prepared, watch)?;
    } else {
        data.rotations = rotations::make(plan, fold, watch)?;
    }
    data.balances = measure(plan, &data.gains, watch)?;
    prepared.data = Some(data);
    prepared.fill(plan, fold);
    Ok(prepared)
}

/// The gains that steps name: every norm over a residual stream.
fn gains(plan: &Plan) -> Result<Gains, FoldError> {
    let norms = plan.modules.iter().filter(|module| module.output.seat.stream == Stand::Gain);
    norms.map(|norm| Ok((norm.output.module.clone(), vector(plan, norm)?.into()))).collect()
}

/// A norm's gains, in f64.
pub(super) fn vector(plan: &Plan, norm: &Module) -> Result<Vec<f64>, FoldError> {
    let entry = &plan.checkpoint.tensors()[norm.tensor];
    let float = entry.dtype.float().expect("binding let only float tensors through");
    let mut values = vec![0.0; norm.weights() as usize];
    if !widen(float, plan.checkpoint.bytes(entry), &mut values, plan.isa) {
        let index = values.iter().position(|value| !value.is_finite()).unwrap_or(0);
        let error = EncodeError::NonFinite {
            file: plan.checkpoint.files()[entry.file].path.display().to_string(),
            tensor: entry.name.clone(),
            index: Shape::from([index as u64]),
            value: values[index],
        };
        return Err(error.into());
    }
    let centre = if plan.model.zero_centred { 1.0 } else { 0.0 };
    Ok(values.into_iter().map(|value| centre + f64::from(value)).collect())
}

impl Prepared {
    /// The same changes for another plan of the same model in the same basis.
    pub fn on(&self, plan: &Plan) -> Self {
        let works = plan.modules.iter().map(|module| module.work.clone()).collect();
        let mut prepared = Self { works, data: self.data.clone() };
        if let Some(fold) = &plan.fold {
            prepared.fill(plan, fold);
        }
        prepared
    }

    /// A module's work, with its transforms.
    pub fn work(&self, module: usize) -> &ModuleWork {
        &self.works[module]
    }

    /// The same, to be changed: how a test spoils a fold.
    pub fn work_mut(&mut self, module: usize) -> &mut ModuleWork {
        &mut self.works[module]
    }

    /// Takes the codes that were found for a module.
    pub fn solve(&mut self, module: usize, solved: Arc<Solved>) {
        self.works[module].solved = Some(solved);
    }

    /// R1.
    pub fn residual(&self) -> Option<&Rotation> {
        self.data.as_ref()?.rotations.residual.as_deref()
    }

    /// The draft head's fold, if there is a draft head.
    pub fn draft(&self) -> Option<&DraftFold> {
        self.data.as_ref()?.draft.as_ref()
    }

    /// What the rotations' search reached: objective before and after, by name.
    pub fn searches(&self) -> &[rotations::Search] {
        self.data.as_ref().map_or(&[], |data| &data.rotations.searches)
    }

    /// Feeds the draft head hidden states of this typical size.
    pub fn feed(&mut self, plan: &Plan, c: f64) {
        if let (Some(fold), Some(draft)) =
            (&plan.fold, self.data.as_mut().and_then(|data| data.draft.as_mut()))
        {
            draft.calibrate(c);
            self.fill(plan, fold);
        }
    }

    /// Makes every module's transforms anew.
    fn fill(&mut self, plan: &Plan, fold: &FoldPlan) {
        let data = self.data.as_ref().expect("filled from data");
        for (work, module) in self.works.iter_mut().zip(&plan.modules) {
            work.transforms = module.work.transforms.clone();
            for step in &module.steps {
                work.transforms.extend(data.transform(plan, fold, module, step));
            }
        }
    }
}

impl Data {
    /// The transform that a step stands for; none while its rotation is still looked for.
    fn transform(
        &self,
        plan: &Plan,
        fold: &FoldPlan,
        module: &Module,
        step: &Step,
    ) -> Option<Arc<dyn Transform>> {
        // The axis of a vector lies along its one row.
        let axis = if module.output.shape.0.len() == 1 { Axis::Input } else { step.axis };
        let scale =
            |factors: Arc<[f64]>| -> Option<Arc<dyn Transform>> { Some(Arc::new(Scale::new(axis, factors))) };
        let gain = |norm: &String| &self.gains[norm];
        match &step.what {
            What::Neutral => Some(Arc::new(Neutral(fold.neutral))),
            What::Gain { norm } => scale(gain(norm).clone()),
            What::DraftGain { norm } => scale(self.draft.as_ref()?.reader(gain(norm))),
            What::DraftScale => scale(self.draft.as_ref()?.scale.clone()),
            What::DraftJoin { embedding, hidden } => {
                scale(self.draft.as_ref()?.join(gain(embedding), gain(hidden)))
            }
            What::R1 => Some(Arc::new(Rotate::new(axis, self.rotations.residual.clone()?))),
            What::R2 { of } => Some(Arc::new(Rotate::new(axis, self.rotations.values.get(of)?.clone()))),
            What::Balance { channels, of } => {
                let part = module.output.seat.part?;
                let factors = self.balances.factors(*channels, of, part, &fold.decoder.attention)?;
                let gain = matches!(part, Part::QueryGain | Part::KeyGain);
                // Nothing has added the 1 yet.
                match gain && plan.model.zero_centred && plan.model.target == Layout::HuggingFace {
                    true => Some(Arc::new(Scale::zero_centred(factors))),
                    false => scale(factors),
                }
            }
            What::Order { of } => {
                let part = module.output.seat.part?;
                let order = self.balances.order(of, part, &fold.decoder.attention)?;
                Some(Arc::new(Reorder::new(axis, order)))
            }
        }
    }
}
