//! Makes the rotations that a plan names.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::data::Prepared;
use super::sample::values;
use super::{FoldError, Watch};
use crate::arch::Part;
use crate::backend::cpu::Threads;
use crate::digest::{Digest, canonical_json};
use crate::plan::{FoldPlan, Module, Plan, RotationPlan, What, search_samples};
use crate::recipe::RotationKind;
use crate::transform::hadamard::{SignedHadamard, signs};
use crate::transform::optrot::{Options, optimise};
use crate::transform::{Axis, Dense, Rotate, Rotation, Transform, random_orthogonal};

/// Rotations, ready.
#[derive(Debug, Clone, Default)]
pub(super) struct Rotations {
    /// R1.
    pub residual: Option<Arc<Rotation>>,
    /// R2 by the path of the attention.
    pub values: BTreeMap<String, Arc<Rotation>>,
    /// What searches reached.
    pub searches: Vec<Search>,
}

/// What a search for a rotation reached.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Search {
    /// `r1`, or `r2` and the path of the attention.
    pub name: String,
    /// Vectors that it saw.
    pub samples: usize,
    /// Steps it took.
    pub steps: usize,
    /// The objective at its start: the mean fourth power of rotated samples over that of Gaussians of their size.
    pub before: f64,
    /// The same at its end.
    pub after: f64,
}

/// Whether rotations must be looked for in the weights.
pub(super) fn are_found(fold: &FoldPlan) -> bool {
    fold.residual.as_ref().is_some_and(|plan| plan.kind == RotationKind::OptRot.name())
}

/// The lane of a layer's R2: one more than the number in its path.
fn lane(of: &str) -> u32 {
    let number = of.split('.').find_map(|word| word.parse::<u32>().ok());
    number.map_or(u32::MAX, |layer| layer + 1)
}

/// Paths of the attentions that have an R2.
fn attentions(plan: &Plan) -> Vec<String> {
    let steps = plan.modules.iter().flat_map(|module| &module.steps);
    let of = steps.filter_map(|step| match &step.what {
        What::R2 { of } => Some(of.clone()),
        _ => None,
    });
    let mut of: Vec<String> = of.collect();
    of.sort();
    of.dedup();
    of
}

/// Rotations that follow from the seed alone.
pub(super) fn make(plan: &Plan, fold: &FoldPlan, watch: Watch<'_>) -> Result<Rotations, FoldError> {
    let mut rotations = Rotations::default();
    if let Some(residual) = &fold.residual {
        (watch.tell)("making r1");
        rotations.residual = Some(Arc::new(drawn(plan, residual, 0)));
    }
    if let Some(values) = &fold.values {
        for of in attentions(plan) {
            watch.check()?;
            rotations.values.insert(of.clone(), Arc::new(drawn(plan, values, lane(&of))));
        }
    }
    Ok(rotations)
}

fn drawn(plan: &Plan, rotation: &RotationPlan, lane: u32) -> Rotation {
    let seed = plan.recipe.transform.rotation.seed;
    match &rotation.size {
        Some(size) => Rotation::Hadamard(SignedHadamard::new(signs(seed, lane, rotation.len), size.clone())),
        None => Rotation::Dense(Dense::new(random_orthogonal(rotation.len, seed, lane), rotation.len)),
    }
}

/// Rotations that make the weights' fourth powers least, from the signed Hadamard start.
///
/// `prepared` holds the gains, and no rotations yet.
pub(super) fn find(
    plan: &Plan,
    fold: &FoldPlan,
    prepared: &Prepared,
    watch: Watch<'_>,
) -> Result<Rotations, FoldError> {
    let threads = Threads::new(plan.threads);
    let mut found = Rotations::default();
    if let Some(residual) = &fold.residual {
        let samples = || {
            (watch.tell)("sampling weights for r1");
            residual_samples(plan, prepared, residual.len, watch)
        };
        found.residual =
            Some(descend(plan, residual, 0, "r1", &samples, &threads, watch, &mut found.searches)?);
    }
    if let (Some(values), Some(residual)) = (&fold.values, found.residual.clone()) {
        for of in attentions(plan) {
            watch.check()?;
            let samples = || value_samples(plan, prepared, &of, values.len, &residual);
            let name = format!("r2 {of}");
            let lane = lane(&of);
            let rotation =
                descend(plan, values, lane, &name, &samples, &threads, watch, &mut found.searches)?;
            found.values.insert(of, rotation);
        }
    }
    Ok(found)
}

#[allow(clippy::too_many_arguments)]
fn descend(
    plan: &Plan,
    rotation: &RotationPlan,
    lane: u32,
    name: &str,
    samples: &dyn Fn() -> Result<Vec<f32>, FoldError>,
    threads: &Threads,
    watch: Watch<'_>,
    searches: &mut Vec<Search>,
) -> Result<Arc<Rotation>, FoldError> {
    let n = rotation.len;
    if let Some((search, matrix)) = watch.keep.get(name).and_then(|bytes| recall(&bytes, name, n)) {
        searches.push(search);
        return Ok(Arc::new(Rotation::Dense(Dense::new(matrix, n))));
    }
    let samples = samples()?;
    let start = drawn(plan, rotation, lane).matrix(plan.isa);
    let options = Options { steps: plan.recipe.transform.rotation.steps as usize, ..Options::default() };
    let parallel = |count: usize, part: &(dyn Fn(usize) + Sync)| threads.run(count, part);
    let mut each = |step: usize, objective: f64| {
        (watch.tell)(&format!("{name}: step {step} of {}, objective {objective:.4}", options.steps));
        watch.check().is_ok()
    };
    let optimised = optimise(&samples, n, &start, &options, plan.isa, &parallel, &mut each);
    watch.check()?;
    let (first, last) = (optimised.trace.first(), optimised.trace.last());
    let search = Search {
        name: name.to_owned(),
        samples: samples.len() / n,
        steps: optimised.trace.len().saturating_sub(1),
        before: first.copied().unwrap_or_default(),
        after: last.copied().unwrap_or_default(),
    };
    watch.keep.put(name, &line_of(&search, &optimised.matrix));
    searches.push(search);
    Ok(Arc::new(Rotation::Dense(Dense::new(optimised.matrix, n))))
}

/// A search's result as it is kept: a line of JSON, then R as little-endian f32, then the SHA-256 of both.
fn line_of(search: &Search, matrix: &[f32]) -> Vec<u8> {
    let mut bytes = canonical_json(search);
    bytes.extend(matrix.iter().flat_map(|value| value.to_le_bytes()));
    let digest = Digest::of(&bytes).to_string();
    bytes.extend_from_slice(digest.as_bytes());
    bytes
}

/// The search and R of what was kept, if it is whole and of this name and width.
fn recall(bytes: &[u8], name: &str, n: usize) -> Option<(Search, Vec<f32>)> {
    let (content, digest) = bytes.split_at_checked(bytes.len().checked_sub(64)?)?;
    (Digest::of(content).to_string().as_bytes() == digest).then_some(())?;
    let (json, matrix) = content.split_at(content.iter().position(|byte| *byte == b'\n')? + 1);
    let search: Search = serde_json::from_slice(json).ok()?;
    (search.name == name && matrix.len() == 4 * n * n).then_some(())?;
    Some((search, matrix.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect()))
}

/// Whether a search should care for a module: what is stored in floats, or in 8 bits, loses nothing to speak of.
fn matters(module: &Module) -> bool {
    module.stored.iter().map(|plane| 8 * plane.bytes).sum::<u64>() < 8 * module.weights()
}

/// The module's axis that R1 is applied along.
fn residual_axis(module: &Module) -> Option<Axis> {
    module.steps.iter().find(|step| step.what == What::R1).map(|step| step.axis)
}

/// Rows of readers and columns of writers, [samples, L]: all of them, or the same share of each matrix, evenly spread;
/// each matrix with a mean square of 1.
fn residual_samples(
    plan: &Plan,
    prepared: &Prepared,
    n: usize,
    watch: Watch<'_>,
) -> Result<Vec<f32>, FoldError> {
    let all = || {
        let modules = plan.modules.iter().enumerate();
        modules.filter(|(_, m)| m.output.shape.0.len() > 1 && residual_axis(m).is_some())
    };
    let mut chosen: Vec<(usize, &Module)> = all().filter(|(_, module)| matters(module)).collect();
    if chosen.is_empty() {
        chosen = all().collect();
    }
    let vectors = |module: &Module| module.weights() as usize / n;
    let all: usize = chosen.iter().map(|(_, module)| vectors(module)).sum();
    let most = search_samples(n).min(all);
    let mut samples = Vec::with_capacity(most * n);
    for (index, module) in chosen {
        watch.check()?;
        let columns = module.work.row_elements;
        let matrix = values(plan, module, prepared.work(index))?;
        let share = (vectors(module) * most).div_ceil(all);
        let axis = residual_axis(module).expect("chosen for having one");
        samples.extend(taken(&matrix, columns, axis, n, share));
    }
    Ok(samples)
}

/// At most `most` vectors of n values along an axis, evenly spread, [samples, n], with a mean square of 1. Each row may
/// hold several runs of n, and each column too.
fn taken(matrix: &[f32], columns: usize, axis: Axis, n: usize, most: usize) -> Vec<f32> {
    let mut samples = Vec::new();
    for vector in spread(matrix.len() / n, most) {
        match axis {
            Axis::Input => samples.extend_from_slice(&matrix[vector * n..][..n]),
            Axis::Output => {
                let (block, column) = (vector / columns, vector % columns);
                samples.extend((block * n..(block + 1) * n).map(|row| matrix[row * columns + column]));
            }
        }
    }
    unit(&mut samples);
    samples
}

/// At most `most` of the numbers below `count`, evenly spread.
fn spread(count: usize, most: usize) -> impl Iterator<Item = usize> {
    let taken = count.min(most);
    (0..taken).map(move |i| i * count / taken)
}

/// Scales values to a mean square of 1.
fn unit(values: &mut [f32]) {
    let squares: f64 = values.iter().map(|value| f64::from(*value) * f64::from(*value)).sum();
    if squares > 0.0 {
        let scale = (values.len() as f64 / squares).sqrt();
        values.iter_mut().for_each(|value| *value = (f64::from(*value) * scale) as f32);
    }
}

/// Columns of the value matrix's heads and rows of the output matrix's, [samples, L], in the stream's new basis.
fn value_samples(
    plan: &Plan,
    prepared: &Prepared,
    of: &str,
    n: usize,
    residual: &Arc<Rotation>,
) -> Result<Vec<f32>, FoldError> {
    let mut samples = Vec::new();
    let inside = |module: &Module| module.output.module.rsplit_once('.').is_some_and(|(path, _)| path == of);
    for (index, module) in plan.modules.iter().enumerate() {
        let part = module.output.seat.part;
        if !inside(module) || module.output.shape.0.len() == 1 {
            continue;
        }
        let axis = match part {
            Some(Part::Value) => Axis::Output,
            Some(Part::Attended) => Axis::Input,
            _ => continue,
        };
        let mut work = prepared.work(index).clone();
        let stream = residual_axis(module).expect("values and outputs touch the stream");
        work.transforms.push(Arc::new(Rotate::new(stream, residual.clone())) as Arc<dyn Transform>);
        let (matrix, columns) = (values(plan, module, &work)?, module.work.row_elements);
        samples.extend(taken(&matrix, columns, axis, n, search_samples(n)));
    }
    Ok(samples)
}
