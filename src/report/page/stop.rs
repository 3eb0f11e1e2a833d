//! The stop probe: verdicts, and the gate's lines.

use serde_json::Value;

use super::who;
use crate::report::data::{Data, Model, StopGroup, count, interval, list, number, text};
use crate::report::html::{Markup, Table, details, escape, paragraph};
use crate::report::number::{percent, percent_between};

pub fn section(data: &Data) -> String {
    if data.stop.is_empty() {
        return paragraph("", "Nothing was measured: `tqc eval stop` does it.");
    }
    let mut out = paragraph(
        "",
        "Does a model begin its answers and end them as its teacher does? Each line of the gate is a rate or a \
         difference with the most that passes; one line over its limit fails the model, whatever its KL.",
    );
    for group in &data.stop {
        out.push_str(&of_group(data, group));
    }
    out
}

/// The verdict in a word.
pub fn word(summary: &Value) -> Markup {
    match summary.get("pass").and_then(Value::as_bool) {
        Some(true) => Markup::raw("<span class=\"word pass\">pass</span>"),
        Some(false) => Markup::raw("<span class=\"word fail\">FAIL</span>"),
        None => Markup::none(),
    }
}

fn of_group(data: &Data, group: &StopGroup) -> String {
    let mut out = format!("<h3>{}</h3>\n{}", escape(&group.subject), paragraph("", &group.settings));
    let mut table =
        Table::new("Verdicts of the stop probe", &[("model", false), ("verdict", false), ("because", false)]);
    for (model, summary) in &group.entries {
        let headline = text(summary, "headline").map(|headline| {
            let reason = headline.strip_prefix("FAIL: ").unwrap_or(&headline);
            if reason == "pass" { "every line is within its limit".to_owned() } else { reason.to_owned() }
        });
        table.row([who(&data.models[*model]), word(summary), Markup::or_none(headline)]);
    }
    out.push_str(&table.render());
    for (model, summary) in &group.entries {
        let model = &data.models[*model];
        let content = format!("{}{}", gate(model, summary), means(model, summary));
        if !content.is_empty() {
            let title = format!("{}: the gate line by line, and both sides on average", who(model).as_str());
            out.push_str(&details(Markup::raw(title), &content));
        }
    }
    out
}

fn frame_of(frame: &Value) -> String {
    text(frame, "frame").unwrap_or_else(|| "(no name)".to_owned())
}

fn gate(model: &Model, summary: &Value) -> String {
    let mut table = Table::new(
        format!("The gate of {} {}, line by line", model.number, model.label),
        &[
            ("what", false),
            ("frame", false),
            ("cases", true),
            ("of", true),
            ("value", true),
            ("95 % interval", true),
            ("most that passes", true),
            ("verdict", false),
        ],
    );
    for frame in list(summary, "frames") {
        for line in list(frame, "gate") {
            // Counted lines are rates, the others differences of probabilities.
            let cases = count(line, "count");
            let share = |value: f64| if cases.is_some() { percent(value) } else { format!("{value:.4}") };
            table.row([
                Markup::or_none(text(line, "what")),
                frame_of(frame).into(),
                Markup::or_none(cases.map(|n| n.to_string())),
                Markup::or_none(count(line, "of").map(|n| n.to_string())),
                Markup::or_none(number(line, "value").map(share)),
                Markup::or_none(interval(line, "interval").map(percent_between)),
                Markup::or_none(number(line, "limit").map(share)),
                word(line),
            ]);
        }
    }
    if table.is_empty() { String::new() } else { table.render() }
}

/// Averages of both sides: name in the summary, name for people, whether it is a count.
const MEANS: [(&str, &str, bool); 11] = [
    ("start_p_end", "P(end) at starts, mean", false),
    ("start_p_end_max", "P(end) at starts, largest", false),
    ("start_margin", "margin at starts, mean", false),
    ("stops_at_once", "starts where it would stop at once", true),
    ("end_p_end", "P(end) at true ends, mean", false),
    ("end_margin", "margin at true ends, mean", false),
    ("goes_on", "true ends where it would go on", true),
    ("empty", "empty answers", true),
    ("loops", "answers that end in a repetition", true),
    ("full", "answers that ran to the most tokens", true),
    ("early", "answers inside which it would stop", true),
];

fn means(model: &Model, summary: &Value) -> String {
    let mut content = String::new();
    for frame in list(summary, "frames") {
        let cases = |key: &str| count(frame, key).map_or_else(|| "–".to_owned(), |n| n.to_string());
        let caption = format!(
            "{} {}, {}: {} cases, {} true ends",
            model.number,
            model.label,
            frame_of(frame),
            cases("cases"),
            cases("ends")
        );
        let mut table = Table::new(caption, &[("", false), ("teacher", true), ("model", true)]);
        for (key, name, counted) in MEANS {
            let cell = |side: &str| {
                let of = frame.get(side).unwrap_or(&Value::Null);
                Markup::or_none(match counted {
                    true => count(of, key).map(|n| n.to_string()),
                    false => number(of, key).map(|value| format!("{value:.4}")),
                })
            };
            table.row([name.into(), cell("teacher"), cell("candidate")]);
        }
        content.push_str(&table.render());
    }
    content
}
