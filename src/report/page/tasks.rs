//! Tasks: a part for each suite and frame.

use super::kl::verdicts_of;
use super::plot::{self, Dot, Size};
use super::who;
use crate::report::data::{Data, TaskEntry, TaskGroup};
use crate::report::html::{Markup, Table, details, escape, paragraph};
use crate::report::number::{percent, percent_between};
use crate::report::svg::Axis;

/// With more suites than this, each is closed at first.
const OPEN: usize = 6;

pub fn section(data: &Data) -> String {
    if data.tasks.is_empty() {
        return paragraph("", "Nothing was measured: `tqc eval tasks` does it.");
    }
    let mut out = plot::scatter_legend();
    for (i, group) in data.tasks.iter().enumerate() {
        let name = format!("{}, {}", group.suite, group.frame);
        let content = of_group(data, group, i);
        match data.tasks.len() > OPEN {
            true => out.push_str(&details(name, &content)),
            false => out.push_str(&format!("<h3>{}</h3>\n{content}", escape(&name))),
        }
    }
    out
}

fn of_group(data: &Data, group: &TaskGroup, number: usize) -> String {
    let mut out = paragraph("", &format!("{}; {}", group.subject, group.settings));
    let dot = |entry: &TaskEntry| {
        Some(Dot {
            model: &data.models[entry.model],
            value: 100.0 * entry.accuracy?,
            interval: entry.interval.map(|interval| (100.0 * interval.low, 100.0 * interval.high)),
            shown: percent(entry.accuracy?),
            on_frontier: entry.on_frontier,
        })
    };
    let dots: Vec<Dot<'_>> = group.entries.iter().filter_map(dot).collect();
    if !dots.is_empty() {
        let about =
            "Each point is a model, with Wilson's 95 % interval. The table that follows has the numbers.";
        let chart = |what: &str, title: &str, size: Size| {
            let y = Axis::even("% right", 0.0, 100.0);
            plot::scatter(&format!("task-{number}-{what}"), title, about, size, y, &dots, None)
        };
        out.push_str(&plot::row(&[
            chart("bits", "Items answered right against bits per weight", Size::Bits),
            chart("bytes", "Items answered right against the size of all weight files", Size::Bytes),
        ]));
    }
    let caption = format!("{}, {}: items answered right", group.suite, group.frame);
    let mut table = Table::new(
        caption,
        &[
            ("model", false),
            ("bits per weight", true),
            ("right", true),
            ("of", true),
            ("accuracy", true),
            ("95 % interval", true),
            ("empty", true),
            ("loops", true),
            ("ran to the most tokens", true),
            ("no answer", true),
            ("on the frontier", false),
        ],
    );
    for entry in &group.entries {
        let model = &data.models[entry.model];
        let whole = |n: Option<u64>| Markup::or_none(n.map(|n| n.to_string()));
        table.row([
            who(model),
            format!("{:.3}", model.identity.bits_per_weight).into(),
            whole(entry.correct),
            whole(entry.items),
            Markup::or_none(entry.accuracy.map(percent)),
            Markup::or_none(entry.interval.map(percent_between)),
            whole(entry.empty),
            whole(entry.loops),
            whole(entry.full),
            whole(entry.no_answer),
            if entry.on_frontier { "yes".into() } else { "no".into() },
        ]);
    }
    out.push_str(&table.render());
    if let Some(verdicts) = &group.verdicts {
        out.push_str(&verdicts_of(data, verdicts, "the most bits per weight"));
    }
    out
}
