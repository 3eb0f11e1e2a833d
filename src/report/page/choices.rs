//! Calibration and budgets: what errors were weighed by, which bits were chosen, and whether the choice was any good.
//!
//! All of it is from the extract of an artifact's record that its runs carry along; other folders have none.

use std::collections::BTreeMap;

use serde_json::Value;

use super::plot::{curve_legend, figure};
use super::{lines, look, who};
use crate::report::data::{Data, Model, count, list, number, text};
use crate::report::html::{Markup, Table, details, escape, paragraph};
use crate::report::number::{count as whole, nats, percent, size};
use crate::report::svg::{Axis, Chart, Point, key};

/// Half the width of a 95 % interval, in standard errors of a normal mean.
const NORMAL: f64 = 1.96;

pub fn section(data: &Data) -> String {
    let with = |key: &str| -> Vec<(usize, &Value)> {
        let records = data.models.iter().map(|model| model.identity.record.get(key)).enumerate();
        let found = records.filter_map(|(i, record)| Some((i, record?)));
        found.filter(|(_, record)| record.is_object()).collect()
    };
    let (calibrated, budgets, compared) = (with("calibration"), with("allocation"), with("compared"));
    if calibrated.is_empty() && budgets.is_empty() {
        return paragraph(
            "",
            "No model here was calibrated or has a budget, as far as its record was read when it was measured.",
        );
    }
    let mut out = String::new();
    if !calibrated.is_empty() {
        out.push_str(&calibration(data, &calibrated));
    }
    if !budgets.is_empty() {
        out.push_str(&allocation(data, &budgets));
    }
    if !compared.is_empty() {
        out.push_str(&comparison(data, &compared));
    }
    out
}

fn calibration(data: &Data, models: &[(usize, &Value)]) -> String {
    let mut table = Table::new(
        "What errors were weighed by, and what it brought on that text",
        &[
            ("model", false),
            ("encoders, with modules", false),
            ("text", false),
            ("rows", true),
            ("tokens", true),
            ("activations", false),
            ("modules weighed", true),
            ("matrices", true),
            ("modules damped more", true),
            ("matrices rounded to nearest", true),
            ("experts of few tokens", true),
            ("loss, nearest", true),
            ("loss, stored", true),
            ("stored / nearest", true),
        ],
    );
    for (model, record) in models {
        let rows = record.get("text").unwrap_or(&Value::Null);
        let totals = record.get("modules").unwrap_or(&Value::Null);
        let counted = |of: &Value, key: &str| Markup::or_none(count(of, key).map(whole));
        let loss = |key: &str| Markup::or_none(number(totals, key).map(|loss| format!("{loss:.3e}")));
        let name = text(record, "name").map(|name| match text(record, "from").as_deref() {
            Some("hessians") => format!("second moments of {name}"),
            _ => name,
        });
        let packing = text(rows, "packing").map(|packing| format!("{packing}, at most"));
        let context = packing.zip(count(rows, "context")).map(|(p, context)| format!("{p} {context} a row"));
        let of_text: Vec<String> = name.into_iter().chain(context).map(|line| escape(&line)).collect();
        let encoders = record.get("encoders").and_then(Value::as_object);
        let encoders = encoders.into_iter().flatten().map(|(name, n)| escape(&format!("{name} {n}")));
        table.row([
            who(&data.models[*model]),
            lines(encoders.collect()),
            lines(of_text),
            counted(rows, "rows"),
            counted(rows, "tokens"),
            Markup::or_none(text(record, "activations")),
            counted(totals, "modules"),
            counted(totals, "matrices"),
            counted(totals, "damped"),
            counted(totals, "fallbacks"),
            counted(totals, "few"),
            loss("nearest"),
            loss("loss"),
            Markup::or_none(number(totals, "ratio").map(|ratio| format!("{ratio:.3}"))),
        ]);
    }
    let about = "The loss of a module is tr(E H Eᵀ) / tr(W H Wᵀ): its errors E under the second moments H of what goes \
                 into it, as a part of the weights' own. The table has the mean over modules, for the codes that are \
                 stored and for the nearest ones, which stand in where a search does no better. It falls on the text \
                 that it was fitted to; whether the model gained, only the divergence on another text says.";
    format!("<h3>Calibration</h3>\n{}{}", paragraph("", about), table.render())
}

/// What a budget gave a module.
struct Given<'a> {
    /// Number of its layer; none outside the layers.
    layer: Option<usize>,
    /// Its path below its layer, or its whole path.
    part: &'a str,
    storage: &'a str,
    weights: f64,
    bytes: f64,
}

/// Modules of a record, as [`crate::eval::identity`] lists them.
fn given(record: &Value) -> Vec<Given<'_>> {
    let rows = list(record, "given").iter().filter_map(Value::as_array);
    rows.filter_map(|row| {
        let [name, storage, weights, bytes] = row.as_slice() else { return None };
        let name = name.as_str()?;
        let inside = name.split_once(".layers.").and_then(|(_, rest)| rest.split_once('.'));
        let layer = inside.and_then(|(number, _)| number.parse().ok());
        Some(Given {
            layer,
            part: inside.filter(|_| layer.is_some()).map_or(name, |(_, part)| part),
            storage: storage.as_str()?,
            weights: weights.as_f64().filter(|weights| *weights > 0.0)?,
            bytes: bytes.as_f64()?,
        })
    })
    .collect()
}

fn allocation(data: &Data, models: &[(usize, &Value)]) -> String {
    let mut table = Table::new(
        "What budgets were spent on",
        &[
            ("model", false),
            ("budget", true),
            ("taken", true),
            ("method", false),
            ("costs", false),
            ("modules, with what they got", false),
            ("predicted, chosen", true),
            ("predicted, even", true),
        ],
    );
    for (model, record) in models {
        let mut codecs: BTreeMap<&str, usize> = BTreeMap::new();
        let rows = given(record);
        rows.iter().for_each(|row| *codecs.entry(row.storage).or_default() += 1);
        let codecs = codecs.iter().map(|(codec, n)| escape(&format!("{n} {codec}")));
        let even = record.get("control").unwrap_or(&Value::Null);
        let measured = record.get("measured").and_then(Value::as_bool) == Some(true);
        let kl = |of: &Value| {
            let cost = number(of, "predicted_kl");
            Markup::or_none(cost.map(|cost| match measured {
                true => format!("{} nats", nats(cost)),
                false => format!("{cost:.4e}, a proxy"),
            }))
        };
        let costs = [text(record, "sensitivity"), text(record, "format")];
        let costs = costs.into_iter().flatten().map(|line| escape(&line)).collect();
        let bytes =
            |key: &str| Markup::or_none(count(record, key).map(|bytes| format!("{} B", whole(bytes))));
        table.row([
            who(&data.models[*model]),
            bytes("budget_bytes"),
            bytes("weight_file_bytes"),
            Markup::or_none(text(record, "method")),
            lines(costs),
            lines(codecs.collect()),
            kl(record),
            kl(even),
        ]);
    }
    let about = "A budget is of all bytes of all weight files, and is spent so that the sum of the modules' costs is \
                 the least. That costs add up is a guess, which the comparison below tests.";
    let mut out = format!("<h3>Budgets</h3>\n{}{}", paragraph("", about), table.render());
    out.push_str(&by_layer(data, models));
    for (model, record) in models {
        let model = &data.models[*model];
        if let Some(table) = modules(model, &given(record)) {
            let title = format!("{}: what each module got", who(model).as_str());
            out.push_str(&details(Markup::raw(title), &table));
        }
    }
    out
}

/// Bits per weight of each layer, a line a model.
fn by_layer(data: &Data, models: &[(usize, &Value)]) -> String {
    let bits = |record: &Value| -> Vec<(f64, f64)> {
        let mut layers: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
        for row in given(record) {
            if let Some(layer) = row.layer {
                let (weights, bytes) = layers.entry(layer).or_default();
                *weights += row.weights;
                *bytes += row.bytes;
            }
        }
        layers.into_iter().map(|(layer, (weights, bytes))| (layer as f64, 8.0 * bytes / weights)).collect()
    };
    let curves: Vec<(usize, Vec<(f64, f64)>)> = models.iter().map(|(i, record)| (*i, bits(record))).collect();
    let curves: Vec<_> = curves.into_iter().filter(|(_, points)| points.len() > 1).collect();
    if curves.is_empty() {
        return String::new();
    }
    let all = || curves.iter().flat_map(|(_, points)| points.iter().copied());
    let x = Axis::linear("layer", all().map(|point| point.0));
    let y = Axis::linear("bits per weight", all().map(|point| point.1));
    let title = "Bits per weight of what the budget decides, layer by layer";
    let about = "One line a model, scales counted. The tables that follow say what each module got.";
    let mut chart = Chart::new("choices-layers", title, about, x, y, 270.0);
    for (i, points) in &curves {
        let (colour, dash, shape) = look(*i);
        let model = &data.models[*i];
        chart.line(points, colour, dash);
        for (layer, bits) in points {
            chart.point(&Point {
                x: *layer,
                y: *bits,
                interval: None,
                number: String::new(),
                name: String::new(),
                hint: format!("{} {}: layer {layer}, {bits:.3} bits per weight", model.number, model.label),
                colour,
                shape,
                filled: true,
            });
        }
    }
    let legend = curve_legend(curves.iter().map(|(i, _)| (*i, &data.models[*i])));
    format!("{}{legend}", figure(&chart.render(), title))
}

/// Layers against parts of layers; then what lies outside the layers.
fn modules(model: &Model, rows: &[Given<'_>]) -> Option<String> {
    let mut parts: Vec<&str> = Vec::new();
    let mut layers: BTreeMap<usize, BTreeMap<&str, &str>> = BTreeMap::new();
    for row in rows {
        let Some(layer) = row.layer else { continue };
        if !parts.contains(&row.part) {
            parts.push(row.part);
        }
        layers.entry(layer).or_default().insert(row.part, row.storage);
    }
    // `affine-4g64` fills the table, and `4g64` says as much.
    let short = |storage: &str| storage.strip_prefix("affine-").unwrap_or(storage).to_owned();
    let mut out = String::new();
    if !layers.is_empty() {
        let caption = format!(
            "{} {}: what modules got, layer by layer; 4g64 is affine, 4 bits in groups of 64",
            model.number, model.label
        );
        let mut table = Table::new(caption, &[("layer", true)]);
        parts.iter().for_each(|part| table.column(Markup::from(*part), false));
        for (layer, of) in &layers {
            let cells = parts.iter().map(|part| Markup::or_none(of.get(part).map(|storage| short(storage))));
            table.row(std::iter::once(Markup::from(layer.to_string())).chain(cells));
        }
        out.push_str(&table.render());
    }
    let mut table = Table::new(
        format!("{} {}: what modules outside the layers got", model.number, model.label),
        &[("module", false), ("storage", false)],
    );
    for row in rows.iter().filter(|row| row.layer.is_none()) {
        table.row([row.part.into(), row.storage.into()]);
    }
    if !table.is_empty() {
        out.push_str(&table.render());
    }
    (!out.is_empty()).then_some(out)
}

/// The two arms, by the record's keys.
const ARMS: [&str; 2] = ["chosen", "even"];

fn comparison(data: &Data, models: &[(usize, &Value)]) -> String {
    let mut arms = Table::new(
        "Both choices on text and on the stop probe's prompts",
        &[
            ("model", false),
            ("choice", false),
            ("bits per weight", true),
            ("size", true),
            ("mean KL, nats", true),
            ("standard error", true),
            ("top-1 agrees", true),
            ("ends at once, where the source does not", true),
            ("of prompts", true),
            ("P(end) gained", true),
            ("positions it would end at", true),
            ("ends passed over", true),
        ],
    );
    let mut differences = Table::new(
        "The mean KL of what was chosen less that of the even choice",
        &[
            ("model", false),
            ("text", false),
            ("positions", true),
            ("difference, nats", true),
            ("95 % interval", true),
            ("runs of 13 tokens that it was calibrated on", true),
            ("verdict", false),
        ],
    );
    for (model, record) in models {
        let model = &data.models[*model];
        let counted = |of: &Value, key: &str| Markup::or_none(count(of, key).map(whole));
        let error = |of: &Value| number(of, "standard_error");
        for arm in ARMS {
            let of = record.get(arm).unwrap_or(&Value::Null);
            arms.row([
                who(model),
                arm.into(),
                Markup::or_none(number(of, "bits_per_weight").map(|bits| format!("{bits:.3}"))),
                Markup::or_none(count(of, "weight_file_bytes").map(size)),
                Markup::or_none(number(of, "mean_kl").map(nats)),
                Markup::or_none(error(of).map(nats)),
                Markup::or_none(number(of, "top1").map(percent)),
                counted(of, "stops_at_once"),
                counted(record, "prompts"),
                Markup::or_none(number(of, "p_end_gained").map(|gained| format!("{gained:+.2e}"))),
                counted(of, "early"),
                counted(of, "passed_over"),
            ]);
        }
        let difference = number(record, "difference");
        let around = difference
            .zip(error(record))
            .map(|(mean, error)| format!("[{:+.2e}, {:+.2e}]", mean - NORMAL * error, mean + NORMAL * error));
        differences.row([
            who(model),
            Markup::or_none(text(record, "text")),
            counted(record, "positions"),
            Markup::or_none(difference.map(|difference| format!("{difference:+.2e}"))),
            Markup::or_none(around),
            counted(record, "shared_runs"),
            verdict(record),
        ]);
    }
    let about = "Before it was built, each of these artifacts was compared with an even choice of codecs that takes no \
                 more bytes and knows no costs, with the same encoders. The choice loses if its mean KL is larger, or if \
                 it ends at once after more prompts. Intervals are paired by position, with documents as clusters; one \
                 that holds 0 decides nothing.";
    format!(
        "<h3>Chosen and even</h3>\n{}{}{}{}",
        paragraph("", about),
        pairs(data, models),
        differences.render(),
        arms.render()
    )
}

/// Whether the choice held, and whether its interval leaves any doubt.
fn verdict(record: &Value) -> Markup {
    let clear = number(record, "difference").zip(number(record, "standard_error"));
    let clear = clear.is_some_and(|(mean, error)| mean.abs() > NORMAL * error);
    let (class, word) = match (record.get("wins").and_then(Value::as_bool), clear) {
        (None, _) => return Markup::none(),
        (Some(true), true) => ("better", "better"),
        (Some(true), false) => ("undecided", "no worse, undecided"),
        (Some(false), true) => ("worse", "loses"),
        (Some(false), false) => ("worse", "loses, undecided"),
    };
    Markup::raw(format!("<span class=\"word {class}\">{word}</span>"))
}

/// Both arms of every model, against their size.
fn pairs(data: &Data, models: &[(usize, &Value)]) -> String {
    let mut points = Vec::new();
    for (model, record) in models {
        let model = &data.models[*model];
        for (place, arm) in ARMS.into_iter().enumerate() {
            let of = record.get(arm).unwrap_or(&Value::Null);
            let Some((bits, mean)) = number(of, "bits_per_weight").zip(number(of, "mean_kl")) else {
                continue;
            };
            if mean <= 0.0 {
                continue;
            }
            let error = number(of, "standard_error").map(|error| NORMAL * error);
            points.push(Point {
                x: bits,
                y: mean,
                interval: error.map(|error| (mean - error, mean + error)),
                number: model.number.to_string(),
                name: arm.to_owned(),
                hint: format!(
                    "{} {}, {arm}: KL {}, {bits:.3} bits per weight",
                    model.number,
                    model.label,
                    nats(mean)
                ),
                colour: place,
                shape: place,
                filled: place == 0,
            });
        }
    }
    if points.len() < 2 {
        return String::new();
    }
    let least = points.iter().map(|point| point.y).fold(f64::INFINITY, f64::min);
    let ends = points.iter().filter_map(|point| point.interval).flat_map(|(low, high)| [low, high]);
    // Ends that would make the rest of the chart small are left out of the axis.
    let values: Vec<f64> =
        points.iter().map(|point| point.y).chain(ends.filter(|end| *end > least / 10.0)).collect();
    let x = Axis::linear("bits per weight", points.iter().map(|point| point.x));
    let y = Axis::log("mean KL, nats per token", values.into_iter());
    let title = "Mean KL of what was chosen and of an even choice of the same bytes";
    let about =
        "Two points a model, with the 95 % interval of each mean. The tables that follow have the numbers.";
    let mut chart = Chart::new("choices-pairs", title, about, x, y, 290.0);
    points.iter().for_each(|point| chart.point(point));
    chart.names(&points);
    let legend: String =
        ARMS.iter().enumerate().map(|(i, arm)| format!("<li>{} {arm}</li>\n", key(i, 0, i, false))).collect();
    format!("{}<ul class=\"legend\">\n{legend}</ul>\n", figure(&chart.render(), title))
}
