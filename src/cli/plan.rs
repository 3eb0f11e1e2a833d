//! `tqc plan`.

use std::fmt::Write as _;

use clap::Args;
use serde_json::{Value, json};

use super::print::{self, Table};
use super::{Common, Machine, RecipeArgs, fetch};
use crate::arch::Fate;
use crate::failure::{Exit, Outcome};
use crate::plan::{CalibratedFrom, Estimate, FoldPlan, Plan, RotationPlan, estimate, plan};
use crate::quant::weighs;
use crate::units::Bytes;

/// Show what a build would do, from headers alone: codecs, sizes, memory, time, and every refusal.
#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    #[command(flatten)]
    machine: Machine,
    /// Make an error of every note: casts, repairs, missing and unread files, absent parts.
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    common: Common,
}

impl PlanArgs {
    pub fn run(self) -> Outcome<Exit> {
        let (recipe, source) = fetch::recipe_and_source(&self.recipe, fetch::Need::Headers)?;
        let plan = plan(recipe, source, self.machine.limits())?;
        let estimate = estimate(&plan);
        if self.common.json {
            print::json(&as_json(&plan, &estimate))?;
        } else {
            print::text(&as_text(&plan, &estimate))?;
        }
        if self.strict {
            plan.check_strict()?;
        }
        Ok(Exit::Done)
    }
}

fn as_json(plan: &Plan, estimate: &Estimate) -> Value {
    let tensors = plan.checkpoint.tensors();
    let modules: Vec<Value> = plan
        .modules
        .iter()
        .map(|module| {
            json!({
                "module": module.output.rule_path(), "source": tensors[module.tensor].name,
                "role": module.output.role, "shape": module.output.shape, "stored_as": module.work.stored,
                "codec": module.assignment.codec.to_string(), "encoder": module.assignment.encoder,
                "fate": module.fate(), "reason": module.assignment.reason, "weights": module.weights(),
                "bytes": module.bytes(), "folder": module.output.folder, "transforms": module.transforms(),
                "tensors": module.stored.iter().map(|plane| &plane.name).collect::<Vec<_>>(),
            })
        })
        .collect();
    let dropped: Vec<Value> = tensors
        .iter()
        .zip(&plan.fates)
        .filter_map(|(entry, fate)| match fate {
            Fate::Dropped(reason) => Some(json!({ "tensor": entry.name, "reason": reason })),
            Fate::Outputs(_) => None,
        })
        .collect();
    let files: Vec<Value> = plan
        .files
        .iter()
        .map(|file| json!({ "name": file.name, "bytes": file.len, "tensors": file.order.len() }))
        .collect();
    json!({
        "recipe": plan.recipe.name, "model_type": plan.model.model_type, "layout": plan.model.layout.title(),
        "plan_sha256": plan.digest, "transform": plan.fold.as_ref().map(transform),
        "allocation": allocation(plan), "calibration": calibration(plan), "modules": modules, "dropped": dropped, "files": files,
        "notes": plan.notes, "sizes": plan.sizes, "threads": plan.threads, "isa": plan.isa.to_string(),
        "peak_memory_bytes": plan.peak_memory, "disk_bytes": plan.disk(), "estimate": estimate,
        "output": plan.default_output(),
    })
}

fn allocation(plan: &Plan) -> Value {
    let Some(record) = &plan.allocation else { return Value::Null };
    let mut value = json!(record);
    let histogram = plan.histogram().into_iter().map(|(codec, modules)| json!([codec, modules]));
    value["histogram"] = histogram.collect();
    value
}

fn calibration(plan: &Plan) -> Value {
    let Some(from) = &plan.calibration else { return Value::Null };
    let wanted = &plan.recipe.calibration;
    let modules = plan.modules.iter().filter(|module| weighs(module.assignment.encoder)).count();
    json!({
        "from": from.from.name(), "name": from.name, "sha256": from.sha256, "rows": wanted.rows, "context": wanted.context,
        "packing": wanted.packing.name(), "activations": wanted.activations.name(), "modules": modules,
    })
}

fn transform(fold: &FoldPlan) -> Value {
    json!({
        "gamma_fold": fold.gains, "r1": fold.residual, "r2": fold.values, "r2_reason": fold.no_values,
        "untied": fold.untied, "channels": fold.channels(),
    })
}

fn as_text(plan: &Plan, estimate: &Estimate) -> String {
    let mut table = Table::new(&[
        ("module", false),
        ("shape", false),
        ("codec", false),
        ("encoder", false),
        ("bytes", true),
        ("reason", false),
    ]);
    for module in &plan.modules {
        table.row([
            module.output.rule_path(),
            module.output.shape.to_string(),
            module.assignment.codec.to_string(),
            module.assignment.encoder.to_owned(),
            module.bytes().to_string(),
            module.assignment.reason.clone(),
        ]);
    }
    let mut text = table.render();
    for (entry, fate) in plan.checkpoint.tensors().iter().zip(&plan.fates) {
        if let Fate::Dropped(reason) = fate {
            let _ = writeln!(text, "dropped: {} ({reason})", entry.name);
        }
    }
    text.push('\n');
    for note in &plan.notes {
        let _ = writeln!(text, "note: `{}` {}", note.subject, note.detail);
    }
    let sizes = &plan.sizes;
    let _ = writeln!(
        text,
        "recipe            {} ({}, {} layout)",
        plan.recipe.name,
        plan.model.model_type,
        plan.model.layout.title()
    );
    let _ = writeln!(text, "modules           {} of {} source tensors", plan.modules.len(), plan.fates.len());
    if let Some(from) = &plan.calibration {
        let wanted = &plan.recipe.calibration;
        let modules = plan.modules.iter().filter(|module| weighs(module.assignment.encoder)).count();
        let on = match from.from {
            CalibratedFrom::Text => {
                format!("{} rows of up to {} tokens of {}", wanted.rows, wanted.context, from.name)
            }
            CalibratedFrom::Hessians => format!("second moments of {}", from.name),
        };
        let _ = writeln!(text, "calibration       {modules} modules on {on} ({})", from.sha256.short());
    }
    if let Some(fold) = &plan.fold {
        let rotation = |name: &str, rotation: &Option<RotationPlan>| {
            rotation.as_ref().map(|rotation| match rotation.block {
                block if block < rotation.len => {
                    format!("{name} {} ({} in blocks of {block})", rotation.kind, rotation.len)
                }
                _ => format!("{name} {} ({})", rotation.kind, rotation.len),
            })
        };
        let gains = fold.gains.then(|| "gains folded".to_owned());
        let none = fold.no_values.map(|reason| format!("no r2: {reason}"));
        let parts = [gains, rotation("r1", &fold.residual), rotation("r2", &fold.values), none];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        let _ = writeln!(text, "transform         {}", parts.join(", "));
    }
    if let Some(record) = &plan.allocation {
        let given = plan.histogram().into_iter().filter(|(_, modules)| *modules > 0);
        let given: Vec<String> = given.map(|(codec, modules)| format!("{modules} {codec}")).collect();
        let _ = writeln!(
            text,
            "budget            {} bytes, {}: {}",
            record.budget_bytes,
            record.method,
            given.join(", ")
        );
        let what = if record.measured { "predicted KL" } else { "predicted cost" };
        let unit = if record.measured { " nats" } else { " (a proxy)" };
        let _ = writeln!(
            text,
            "{what:<17} {:.6}{unit}; an even choice of {} bytes {:.6}",
            record.predicted_kl, record.control.weight_file_bytes, record.control.predicted_kl
        );
        if !record.lacking.is_empty() {
            let _ = writeln!(text, "without a cost    {}: they keep the default", record.lacking.join(", "));
        }
    }
    let _ =
        writeln!(text, "weights           {}, of which {} quantized", sizes.weights, sizes.quantized_weights);
    let _ = writeln!(text, "source            {} of payload", Bytes(sizes.source_bytes));
    let _ = writeln!(
        text,
        "weight files      {} bytes ({}) in {}",
        sizes.weight_file_bytes,
        Bytes(sizes.weight_file_bytes),
        plan.files.iter().map(|file| file.name.as_str()).collect::<Vec<_>>().join(", ")
    );
    let _ = writeln!(
        text,
        "bits per weight   {:.4} over all stored bytes, {:.4} over quantized modules",
        sizes.bits_per_weight, sizes.quantized_bits_per_weight
    );
    let _ =
        writeln!(text, "peak memory       {} with {} threads ({})", plan.peak_memory, plan.threads, plan.isa);
    let _ = writeln!(text, "disk              {}", plan.disk());
    let _ = writeln!(
        text,
        "time              about {} if storage keeps up and nothing else runs",
        seconds(estimate.total_s)
    );
    let _ = writeln!(text, "output            {}", plan.default_output().display());
    text
}

/// `0.4 s`, `1 min 20 s`.
pub fn seconds(seconds: f64) -> String {
    if seconds < 60.0 {
        format!("{seconds:.1} s")
    } else {
        format!("{} min {:02.0} s", (seconds / 60.0).floor(), seconds % 60.0)
    }
}
