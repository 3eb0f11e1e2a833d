//! Codecs of the modules that no rule decides, from a budget and a table of costs.
//!
//! The weight files follow from the codecs alone, so a budget is held to the byte: what the modules to be decided may
//! take is the budget less everything else in the files, and where another choice makes a header longer, so much less
//! is given out the next time.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::module::{Destination, Module};
use super::{Note, NoteKind, PlanError};
use crate::alloc::budget::{BudgetError, Method, Solution, Tie, Way, least, solve};
use crate::alloc::cost::CostTable;
use crate::alloc::import::{Facts, Wanted, read};
use crate::alloc::{Rules, tie};
use crate::arch::{Config, Role};
use crate::artifact::layout::{ModuleTensors, lay_out};
use crate::artifact::provenance::{AllocationRecord, ControlRecord};
use crate::checkpoint::Checkpoint;
use crate::codec::{AffineBits, CodecSpec, GroupSize, Matrix};
use crate::digest::Digest;
use crate::failure::{Outcome, Problems};
use crate::recipe::{Budget, BudgetMethod, BudgetWeights, Origin, Recipe, RecipeError};
use crate::units::Bytes;

/// Allocator of a recipe with a budget, as provenance names it.
pub const BUDGET: &str = "budget";

/// Allocator of its even control.
pub const CONTROL: &str = "budget-control";

/// The largest file of costs that is read; the largest known, an importance matrix of a model with many experts, has
/// some hundred megabytes.
const LARGEST: Bytes = Bytes::gib(1);

/// The group of affine candidates where the default's codec has none.
const GROUP: u32 = 64;

/// A choice differs from the one before by a few bytes of header, so two rounds are the rule.
const ROUNDS: usize = 32;

/// Whose choice a plan takes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Bits<'a> {
    /// The recipe's method.
    Chosen,
    /// The even control's.
    Control,
    /// What an artifact's record says: no table is read.
    Recorded(&'a RecordedBits),
}

/// The choice that an artifact's record has.
#[derive(Debug, Clone)]
pub struct RecordedBits {
    /// Its record.
    pub record: AllocationRecord,
    /// Codec of every module, by its path without the parameter.
    pub codecs: BTreeMap<String, CodecSpec>,
}

/// What else the choice depends on.
pub(super) struct Given<'a> {
    pub recipe: &'a Recipe,
    pub budget: &'a Budget,
    pub checkpoint: &'a Checkpoint,
    pub config: &'a Config,
    pub to: &'a Destination<'a>,
}

/// A choice that was made.
pub(super) struct Allocated {
    pub record: AllocationRecord,
    pub allocator: &'static str,
    pub notes: Vec<Note>,
}

/// Decides every open module.
///
/// # Errors
/// A table that cannot be read or is of another model; a budget too small, with the least that is possible.
pub(super) fn allocate(given: &Given<'_>, modules: &mut [Module], bits: Bits<'_>) -> Outcome<Allocated> {
    let (record, allocator) = match bits {
        Bits::Recorded(recorded) => {
            for module in modules.iter_mut().filter(|module| module.assignment.open) {
                let lacking = recorded.record.lacking.contains(&module.output.rule_path());
                if let Some(codec) = recorded.codecs.get(&module.output.module).filter(|_| !lacking) {
                    *module = module.stored_as(*codec, given.recipe, BUDGET, given.to);
                }
            }
            (recorded.record.clone(), BUDGET)
        }
        Bits::Chosen => (decide(given, modules, false)?, BUDGET),
        Bits::Control => (decide(given, modules, true)?, CONTROL),
    };
    let own = given.to.fold.and_then(|fold| fold.residual.as_ref()).map_or("none", |rotation| rotation.kind);
    // Value heads may be rotated too: that is a matter of the same kind.
    let measured = record.basis.split('+').next().unwrap_or_default();
    let note = (measured != own).then(|| Note {
        kind: NoteKind::OtherBasis,
        subject: record.sensitivity.clone(),
        detail: format!("was measured in the basis `{}`, and this recipe's is `{own}`", record.basis),
    });
    Ok(Allocated { record, allocator, notes: note.into_iter().collect() })
}

/// Everything that is known before the choice.
struct Instance {
    ties: Vec<Tie>,
    /// Indices of modules, for each tie.
    members: Vec<Vec<usize>>,
    /// Most bytes of all weight files.
    most: u64,
}

fn decide(given: &Given<'_>, modules: &mut [Module], even: bool) -> Outcome<AllocationRecord> {
    let Given { recipe, budget, .. } = given;
    let path = recipe.sensitivity().expect("this recipe has a budget");
    let bytes = file(&path)?;
    let candidates = candidates(recipe, budget);
    let table = table(given, modules, &candidates, &path, &bytes)?;
    let lacking: Vec<String> = modules
        .iter()
        .filter(|module| module.assignment.open)
        .map(|module| module.output.rule_path())
        .filter(|path| !table.modules.contains_key(path))
        .collect();
    let instance = instance(given, modules, &table, &candidates)?;
    let method = match budget.method {
        BudgetMethod::Exact => Method::Exact,
        BudgetMethod::Greedy => Method::Greedy,
    };
    let (chosen, chosen_bytes) = fit(given, modules, &instance, method)?;
    let (control, control_bytes) = fit(given, modules, &instance, Method::Uniform)?;
    let taken = if even { &control } else { &chosen };
    let assigned = codecs(&instance, taken);
    for (index, codec) in assigned {
        modules[index] = modules[index].stored_as(codec, recipe, BUDGET, given.to);
    }
    Ok(AllocationRecord {
        sensitivity: path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
        sensitivity_sha256: Digest::of(&bytes),
        format: table.format.to_owned(),
        measured: table.measured,
        basis: table.basis,
        method: budget.method.name().to_owned(),
        budget_bytes: instance.most,
        candidates: candidates.iter().map(CodecSpec::to_string).collect(),
        modules: instance.members.iter().map(|members| members.len() as u64).sum(),
        lacking,
        weight_file_bytes: chosen_bytes,
        predicted_kl: chosen.cost,
        control: ControlRecord { weight_file_bytes: control_bytes, predicted_kl: control.cost },
    })
}

fn file(path: &Path) -> Result<Vec<u8>, PlanError> {
    let unreadable = |error| PlanError::SensitivityUnreadable { path: path.to_owned(), error };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(LARGEST.0 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    match bytes.len() as u64 > LARGEST.0 {
        true => Err(PlanError::SensitivityTooLarge { path: path.to_owned(), limit: LARGEST }),
        false => Ok(bytes),
    }
}

fn table(
    given: &Given<'_>,
    modules: &[Module],
    candidates: &[CodecSpec],
    path: &Path,
    bytes: &[u8],
) -> Result<CostTable, PlanError> {
    let paths: Vec<String> = modules.iter().map(|module| module.output.rule_path()).collect();
    let wanted: Vec<Wanted<'_>> = modules
        .iter()
        .zip(&paths)
        .map(|(module, path)| Wanted {
            path,
            weights: module.weights(),
            in_features: module.output.shape.last(),
            // Tools differ on whether they look at embedding and head; without a cost they keep the default.
            required: module.assignment.open && !matches!(module.output.role, Role::Embedding | Role::Head),
        })
        .collect();
    let (tensors, config) = (given.checkpoint.shapes_digest(), given.config.digest());
    let facts = Facts { tensors, config, modules: &wanted, candidates };
    read(bytes, &facts).map_err(|problem| PlanError::Sensitivity { path: path.to_owned(), problem })
}

/// The candidates, the narrowest first.
fn candidates(recipe: &Recipe, budget: &Budget) -> Vec<CodecSpec> {
    let mut candidates = budget.candidates.clone().unwrap_or_else(|| {
        let group = match recipe.default.codec {
            CodecSpec::Trellis(own) => return own.of_every_width(),
            CodecSpec::Affine { group, .. } => group,
            _ => GroupSize::try_from(GROUP).expect("64 is a size"),
        };
        AffineBits::ALL.into_iter().map(|bits| CodecSpec::Affine { bits, group }).collect()
    });
    candidates.sort_by_key(|codec| (width(*codec), *codec));
    candidates
}

/// Thousandths of a bit for each weight, scales of a 16-bit model included.
fn width(codec: CodecSpec) -> u32 {
    let scales = match (codec, codec.group()) {
        (CodecSpec::Affine { .. }, Some(group)) => 32_000 / group,
        (_, Some(group)) => 8_000 / group,
        (_, None) => 0,
    };
    codec.code_bits().map_or(u32::MAX, |bits| 1000 * bits + scales)
}

/// Gathers ties and what each candidate would cost them.
fn instance(
    given: &Given<'_>,
    modules: &[Module],
    table: &CostTable,
    candidates: &[CodecSpec],
) -> Result<Instance, Problems<RecipeError>> {
    let Given { recipe, budget, checkpoint, to, .. } = given;
    let mut members: Vec<Vec<usize>> = Vec::new();
    let mut by_name: BTreeMap<String, usize> = BTreeMap::new();
    for (index, module) in modules.iter().enumerate() {
        if module.assignment.open && table.modules.contains_key(&module.output.rule_path()) {
            let at = *by_name.entry(tie(&module.output)).or_insert(members.len());
            match members.get_mut(at) {
                Some(list) => list.push(index),
                None => members.push(vec![index]),
            }
        }
    }
    let problem = |origin: &Origin, message: String, help: &str| {
        Problems::from(recipe.problem(origin, message, Some(help.to_owned())))
    };
    let origins = &budget.origins;
    if members.is_empty() {
        let help = "rules with a `codec` take modules from the budget: remove some, or the budget";
        return Err(problem(&origins.size, "no module is left to give bits to".to_owned(), help));
    }
    // Stated candidates must be in the table; the default's are those that are.
    if let (Some(stated), Some(origin)) = (&budget.candidates, &origins.candidates) {
        for codec in stated {
            let paths = members.iter().flatten().map(|index| modules[*index].output.rule_path());
            let without: Vec<String> =
                paths.filter(|path| !table.modules[path].contains_key(codec)).collect();
            if let Some(first) = without.first() {
                let message = format!(
                    "the table of costs lacks {codec} for {} modules, such as `{first}`",
                    without.len()
                );
                let known =
                    table.modules[first].keys().map(CodecSpec::to_string).collect::<Vec<_>>().join(", ");
                return Err(problem(origin, message, &format!("it has {known}")));
            }
        }
    }
    let mut ties = Vec::new();
    let mut problems = Vec::new();
    for list in &members {
        let mut ways = Vec::new();
        for (level, codec) in candidates.iter().enumerate() {
            let mut way = Way { codec: *codec, level, bytes: 0, cost: 0.0 };
            let fits = list.iter().all(|index| {
                let module = &modules[*index];
                let source = &checkpoint.tensors()[module.tensor].name;
                let source = source.strip_suffix(".weight").unwrap_or(source);
                let (least, most) = Rules { recipe }.bounds(&module.output, source);
                let bits = codec.code_bits().expect("`keep` is no candidate");
                let cost = table.modules[&module.output.rule_path()].get(codec);
                let allowed =
                    (least..=most).contains(&bits) && codec.fits(Matrix::of(&module.output.shape)).is_ok();
                let Some(cost) = cost.filter(|_| allowed) else { return false };
                way.bytes += module.stored_as(*codec, recipe, BUDGET, to).bytes();
                way.cost += cost.nats;
                true
            });
            if fits {
                ways.push(way);
            }
        }
        let name = modules[list[0]].output.rule_path();
        if ways.is_empty() {
            let named = candidates.iter().map(CodecSpec::to_string).collect::<Vec<_>>().join(", ");
            let message = match list.len() {
                1 => format!("`{name}` can have none of {named}"),
                more => {
                    format!("`{name}` and the {} modules tied to it can all have none of {named}", more - 1)
                }
            };
            let help =
                "a limit, a group that does not divide its width, or the table of costs leaves it none";
            let origin = origins.candidates.as_ref().unwrap_or(&origins.size);
            problems.push(recipe.problem(origin, message, Some(help.to_owned())));
        }
        ties.push(Tie { name, ways });
    }
    let mut instance = Problems::none_or(problems, Instance { ties, members, most: 0 })?;
    let smallest = least(&instance.ties);
    let mut of = BudgetWeights {
        all: modules.iter().map(Module::weights).sum(),
        decided: 0,
        rest: file_bytes(given, modules, &instance, &smallest),
    };
    for (index, codec) in codecs(&instance, &smallest) {
        let (weights, bits) = (modules[index].weights(), codec.code_bits().expect("`keep` is no candidate"));
        of.decided += weights;
        of.rest -= weights * u64::from(bits) / 8;
    }
    instance.most = budget.size.bytes(of);
    Ok(instance)
}

/// The codec of every module that a solution decides.
fn codecs(instance: &Instance, solution: &Solution) -> Vec<(usize, CodecSpec)> {
    let decided = instance.ties.iter().zip(&instance.members).zip(&solution.chosen);
    let each =
        decided.flat_map(|((tie, members), way)| members.iter().map(|index| (*index, tie.ways[*way].codec)));
    each.collect()
}

/// Bytes of all weight files with a solution's codecs.
fn file_bytes(given: &Given<'_>, modules: &[Module], instance: &Instance, solution: &Solution) -> u64 {
    let decided: BTreeMap<usize, CodecSpec> = codecs(instance, solution).into_iter().collect();
    let tensors = modules.iter().enumerate().map(|(index, module)| ModuleTensors {
        folder: module.output.folder,
        planes: match decided.get(&index) {
            Some(codec) => module.stored_as(*codec, given.recipe, BUDGET, given.to).stored,
            None => module.stored.clone(),
        },
    });
    let output = &given.recipe.output;
    let (files, _) = lay_out(&tensors.collect::<Vec<_>>(), output.shard_size.0, output.layout);
    files.iter().map(|file| file.len).sum()
}

/// The method's solution whose weight files fit, and their bytes.
fn fit(
    given: &Given<'_>,
    modules: &[Module],
    instance: &Instance,
    method: Method,
) -> Result<(Solution, u64), Problems<RecipeError>> {
    let Given { recipe, budget, .. } = given;
    let most = instance.most;
    let smallest = least(&instance.ties);
    let least = file_bytes(given, modules, instance, &smallest);
    if least > most {
        let weights: u64 = modules.iter().map(Module::weights).sum();
        let bits = (8.0 * least as f64 / weights as f64 * 1e4).ceil() / 1e4;
        let message = format!(
            "the weight files would take at least {least} bytes ({bits:.4} bits per weight), but the budget is {most} bytes"
        );
        let help = "raise the budget, or add narrower candidates; what rules fix and what is never quantized counts too";
        return Err(recipe.problem(&budget.origins.size, message, Some(help.to_owned())).into());
    }
    let mut rest = least - smallest.bytes;
    for _ in 0..ROUNDS {
        let Some(room) = most.checked_sub(rest) else { break };
        match solve(method, &instance.ties, room) {
            Ok(solution) => match file_bytes(given, modules, instance, &solution) {
                bytes if bytes <= most => return Ok((solution, bytes)),
                bytes => rest += bytes - most,
            },
            Err(BudgetError::TooSmall { .. }) => break,
            Err(error @ BudgetError::TooMany { .. }) => {
                let help = "take `method = \"greedy\"`, or fewer candidates";
                return Err(recipe
                    .problem(&budget.origins.size, error.to_string(), Some(help.to_owned()))
                    .into());
            }
        }
    }
    Ok((smallest, least))
}
