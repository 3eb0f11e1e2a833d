//! The page: HTML that is well-formed XML too, with its style inside.

mod choices;
mod kl;
mod plot;
mod provenance;
mod sizes;
mod stop;
mod tasks;

use super::data::{Data, Model, number};
use super::html::{Markup, Table, cut, escape, paragraph};

use super::number::{nats, nats_between, percent, size};
use super::svg::COLOURS;

/// What tells a page of ours from any other file.
const MARK: &str = "<meta name=\"generator\" content=\"tqc report\"/>";

/// Nothing is fetched and nothing runs, whatever the names of models may hold.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";

/// Whether `bytes` begin as a page of ours.
pub fn is_page(bytes: &[u8]) -> bool {
    let start = String::from_utf8_lossy(&bytes[..bytes.len().min(1024)]).into_owned();
    start.starts_with("<!DOCTYPE html>") && start.contains(MARK)
}

/// The page of `data`.
pub fn page(data: &Data) -> String {
    let sections: [(&str, &str, String); 7] = [
        ("models", "Models", models(data)),
        ("kl", "Divergence from the teacher", kl::section(data)),
        ("tasks", "Tasks", tasks::section(data)),
        ("stop", "Stop probe", stop::section(data)),
        ("sizes", "What the bytes are spent on", sizes::section(data)),
        ("choices", "Calibration and budgets", choices::section(data)),
        ("provenance", "Provenance", provenance::section(data)),
    ];
    let links: String =
        sections.iter().map(|(id, name, _)| format!("<li><a href=\"#{id}\">{name}</a></li>\n")).collect();
    let parts: String = sections
        .iter()
        .map(|(id, name, content)| {
            format!("<section id=\"{id}\" aria-labelledby=\"{id}-h\">\n<h2 id=\"{id}-h\">{name}</h2>\n{content}</section>\n")
        })
        .collect();
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n{MARK}\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n<link rel=\"icon\" href=\"data:,\"/>\n\
         <title>Measured results</title>\n<style>\n{}</style>\n</head>\n<body>\n\
         <a class=\"skip\" href=\"#main\">Skip to the results</a>\n\
         <header>\n<h1>Measured results</h1>\n{}</header>\n\
         <nav aria-label=\"Contents\">\n<ul>\n{links}</ul>\n</nav>\n\
         <main id=\"main\" tabindex=\"-1\">\n{parts}</main>\n\
         <footer>\n<p>Made by <code>tqc report</code> from a database of results. Every number is of one run on one \
         machine; intervals are 95 %.</p>\n</footer>\n</body>\n</html>\n",
        include_str!("style.css"),
        opening(data)
    )
}

/// How much there is, and from when.
fn opening(data: &Data) -> String {
    let finished = data.runs.iter().filter(|row| row.run.finished.is_some()).count();
    let mut text =
        format!("{}, {} that ended", several(data.models.len(), "model"), several(finished, "run"));
    let unfinished = data.runs.len() - finished;
    if unfinished > 0 {
        text.push_str(&format!(", {unfinished} that did not"));
    }
    let first = data.runs.iter().map(|row| row.run.started.as_str()).min();
    let last = data.runs.iter().filter_map(|row| row.run.finished.as_deref()).max();
    if let (Some(first), Some(last)) = (first, last) {
        text.push_str(&format!("; from {first} to {last}"));
    }
    paragraph("lead", &format!("{text}."))
}

/// `1 model`, `3 models`.
fn several(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// A model's number and name.
fn who(model: &Model) -> Markup {
    Markup::raw(format!("<span class=\"no\">{}</span> {}", model.number, escape(&model.label)))
}

/// Colour, dash and marker of a model in charts of several.
fn look(model: usize) -> (usize, usize, usize) {
    (model % COLOURS, model / COLOURS, (model + model / COLOURS) % 6)
}

/// Lines of a cell.
fn lines(lines: Vec<String>) -> Markup {
    match lines.is_empty() {
        true => Markup::none(),
        false => Markup::raw(lines.join("<br/>")),
    }
}

/// Results of so many suites have a line each; of more, only their sum is shown.
const SUITES: usize = 4;

fn models(data: &Data) -> String {
    let mut table = Table::new(
        "All models, the most bits per weight first",
        &[
            ("model", false),
            ("bits per weight", true),
            ("size", true),
            ("mean KL, nats", true),
            ("top-1", true),
            ("perplexity", true),
            ("tasks right", true),
            ("stop probe", false),
        ],
    );
    for (i, model) in data.models.iter().enumerate() {
        let identity = &model.identity;
        let name = format!(
            "<span class=\"no\">{0}</span> <a href=\"#m{0}\">{1}</a><br/>\
             <span class=\"ci\">{2} <code>{3}</code></span>",
            model.number,
            escape(&model.label),
            escape(&cut(&identity.kind, 40)),
            identity.digest.short()
        );
        let of_kl = |cell: &dyn Fn(&super::data::KlEntry) -> Option<String>| {
            let groups = data.kl.iter().filter_map(|group| {
                let entry = group.entries.iter().find(|entry| entry.model == i)?;
                let cell = cell(entry)?;
                Some(match data.kl.len() {
                    1 => cell,
                    _ => format!("<span class=\"group\">{}</span> {cell}", escape(&group.letter)),
                })
            });
            lines(groups.collect())
        };
        table.row([
            Markup::raw(name),
            format!("{:.3}", identity.bits_per_weight).into(),
            size(identity.bytes).into(),
            of_kl(&|entry| {
                let interval = entry.interval.map_or_else(String::new, |interval| {
                    format!(" <span class=\"ci\">{}</span>", escape(&nats_between(interval)))
                });
                Some(format!("{}{interval}", nats(entry.mean?)))
            }),
            of_kl(&|entry| number(&entry.summary, "top1_agreement").map(percent)),
            of_kl(&|entry| number(&entry.summary, "candidate_ppl").map(|ppl| format!("{ppl:.4}"))),
            right(data, i),
            stops(data, i),
        ]);
    }
    let mut out = paragraph(
        "",
        "Numbers in front of names are the same in every chart and table of this page. KL is the divergence of the \
         model's next-token probabilities from its teacher's; lower is better, and 0 is no difference. It ranks \
         models cheaply, but it does not see whether a model answers, or stops: the tasks and the stop probe do.",
    );
    out.push_str(&table.render());
    if data.kl.len() > 1 {
        let group = |group: &super::data::KlGroup| {
            format!(
                "<li><span class=\"group\">{}</span> {}, {}</li>\n",
                group.letter,
                escape(&group.subject),
                escape(&group.settings)
            )
        };
        let groups: String = data.kl.iter().map(group).collect();
        out.push_str(&format!(
            "<p>Numbers that begin with different letters were not measured the same way and cannot be compared:</p>\n\
             <ul class=\"plain\">\n{groups}</ul>\n"
        ));
    }
    out
}

fn right(data: &Data, model: usize) -> Markup {
    let mut own = Vec::new();
    let (mut correct, mut items) = (0, 0);
    for group in &data.tasks {
        for entry in group.entries.iter().filter(|entry| entry.model == model) {
            let share = entry.accuracy.map_or_else(|| "–".to_owned(), percent);
            own.push(format!("{} {}: {share}", escape(&group.suite), escape(&group.frame)));
            correct += entry.correct.unwrap_or(0);
            items += entry.items.unwrap_or(0);
        }
    }
    match own.len() {
        n if n > SUITES => Markup::from(format!("{correct} of {items} in {n} suites")),
        _ => lines(own),
    }
}

fn stops(data: &Data, model: usize) -> Markup {
    let own = data.stop.iter().flat_map(|group| &group.entries).filter(|(of, _)| *of == model);
    lines(own.map(|(_, summary)| stop::word(summary).as_str().to_owned()).collect())
}
