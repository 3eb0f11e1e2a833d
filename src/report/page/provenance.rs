//! Provenance: where every number is from.

use serde_json::Value;

use super::who;
use crate::eval::db::Run;
use crate::report::data::{Data, Model, RunRow, described};
use crate::report::html::{Markup, Table, cut, details, escape, paragraph};
use crate::report::number::{count, duration, size};

pub fn section(data: &Data) -> String {
    let models: String = data.models.iter().map(|model| of_model(data, model)).collect();
    let mut out = format!("<h3>Models</h3>\n{models}<h3>Runs</h3>\n");
    let replaced = data.runs.iter().filter(|row| row.replaced).count();
    if replaced > 0 {
        let text =
            format!("{replaced} of these runs are not shown above: the same was measured again later.");
        out.push_str(&paragraph("note", &text));
    }
    let finished: Vec<&RunRow> = data.runs.iter().filter(|row| row.run.finished.is_some()).collect();
    let unfinished: Vec<&RunRow> = data.runs.iter().filter(|row| row.run.finished.is_none()).collect();
    out.push_str(&runs(data, "Runs that ended", &finished));
    out.push_str("<h3>Unfinished runs</h3>\n");
    match unfinished.is_empty() {
        true => out.push_str(&paragraph("note", "There are none.")),
        false => {
            let text = "Nothing of these is shown above. The same command goes on where each ended.";
            out.push_str(&paragraph("note", text));
            out.push_str(&runs(data, "Runs that did not end", &unfinished));
        }
    }
    out
}

/// Rows of a JSON value that are shown.
const ROWS: usize = 60;

/// Every value of an object with its path: `tool.version`, `0.1.0`.
fn flat(path: &str, value: &Value, rows: &mut Vec<(String, String)>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flat(&path, value, rows);
            }
        }
        Value::String(text) => rows.push((path.to_owned(), text.clone())),
        Value::Array(items) if items.iter().all(|item| !item.is_object()) => {
            rows.push((path.to_owned(), described(value)));
        }
        Value::Null => {}
        other => rows.push((path.to_owned(), other.to_string())),
    }
}

fn of_model(data: &Data, model: &Model) -> String {
    let identity = &model.identity;
    let own = data.runs.iter().filter(|row| row.run.model.digest == identity.digest);
    let ids: Vec<String> = own.map(|row| row.run.id.to_string()).collect();
    let mut rows = vec![
        ("digest".to_owned(), identity.digest.to_string()),
        ("kind".to_owned(), identity.kind.clone()),
        ("model type".to_owned(), identity.model_type.clone().unwrap_or_else(|| "unknown".to_owned())),
        (
            "tokenizer".to_owned(),
            identity.tokenizer.map_or_else(|| "none".to_owned(), |digest| digest.to_string()),
        ),
        ("weights".to_owned(), count(identity.weights)),
        ("weight files".to_owned(), format!("{} ({} bytes)", size(identity.bytes), count(identity.bytes))),
        ("bits per weight".to_owned(), format!("{:.4}", identity.bits_per_weight)),
        ("runs".to_owned(), format!("{}: {}", ids.len(), ids.join(", "))),
    ];
    let before = rows.len();
    let mut record = identity.record.clone();
    if let Value::Object(record) = &mut record {
        // These have a part of their own.
        record.retain(|key, _| !["calibration", "allocation", "compared"].contains(&key.as_str()));
    }
    flat("", &record, &mut rows);
    let recorded = rows.len() - before;
    let left = recorded.saturating_sub(ROWS);
    rows.truncate(before + ROWS);
    if left > 0 {
        rows.push(("more".to_owned(), format!("{left} more values are in the model's own record")));
    }
    let list: String = rows
        .iter()
        .map(|(name, value)| {
            format!("<dt>{}</dt><dd>{}</dd>\n", escape(&cut(name, 100)), escape(&cut(value, 300)))
        })
        .collect();
    let note = match recorded {
        0 => paragraph("note", "This folder has no record of how it was made."),
        _ => String::new(),
    };
    format!(
        "<details id=\"m{}\">\n<summary>{}</summary>\n<dl>\n{list}</dl>\n{note}</details>\n",
        model.number,
        who(model).as_str()
    )
}

/// What `of` gives for every run, if it is the same for all and there are several.
fn common<'a>(rows: &[&'a RunRow], of: impl Fn(&'a Run) -> &'a Value) -> Option<&'a Value> {
    let (first, rest) = rows.split_first()?;
    let first = of(&first.run);
    (!rest.is_empty() && rest.iter().all(|row| of(&row.run) == first)).then_some(first)
}

fn runs(data: &Data, caption: &str, rows: &[&RunRow]) -> String {
    // What all runs have in common is said once, and has no column.
    let (program, machine) = (common(rows, |run| &run.tool), common(rows, |run| &run.machine));
    let columns = [
        ("run", true),
        ("instrument", false),
        ("model", false),
        ("measured on", false),
        ("settings", false),
        ("program", false),
        ("machine", false),
        ("began", false),
        ("ended", false),
        ("spent", true),
        ("shown", false),
    ];
    let own = |name: &str| match name {
        "program" => program.is_none(),
        "machine" => machine.is_none(),
        _ => true,
    };
    let shown: Vec<(&str, bool)> = columns.into_iter().filter(|(name, _)| own(name)).collect();
    let mut table = Table::new(caption, &shown);
    for row in rows {
        let run = &row.run;
        let long = |value: &Value| {
            Markup::raw(format!("<span class=\"mid\">{}</span>", escape(&cut(&described(value), 400))))
        };
        let shown = match (&run.finished, row.replaced) {
            (None, _) => "unfinished",
            (Some(_), true) => "measured again",
            (Some(_), false) => "yes",
        };
        let cells = [
            run.id.to_string().into(),
            format!("{} version {}", cut(&run.instrument, 40), run.version).into(),
            who(&data.models[row.model]),
            long(&run.subject),
            long(&run.settings),
            long(&run.tool),
            long(&run.machine),
            run.started.as_str().into(),
            Markup::or_none(run.finished.clone()),
            duration(run.seconds).into(),
            shown.into(),
        ];
        table.row(cells.into_iter().zip(columns).filter(|(_, (name, _))| own(name)).map(|(cell, _)| cell));
    }
    let once = |what: &str, value: Option<&Value>| match value {
        Some(value) => paragraph("note", &format!("{what} for all: {}.", cut(&described(value), 400))),
        None => String::new(),
    };
    let content =
        format!("{}{}{}", once("One program", program), once("One machine", machine), table.render());
    match table.is_empty() {
        true => paragraph("note", "There are none."),
        false => details(format!("{caption}: {}", rows.len()), &content),
    }
}
