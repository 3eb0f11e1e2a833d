//! Sizes: what each model's bytes are spent on.

use crate::eval::identity::Class;
use crate::report::data::{Data, Model};
use crate::report::html::{Table, details, paragraph};
use crate::report::number::{count, percent, size};
use crate::report::page::plot::figure;
use crate::report::svg::{Part, stacked, swatch};

/// Classes of modules in the order of their colours; what has another name has the last one's.
const CLASSES: [&str; 9] =
    ["embedding", "head", "attention", "delta-net", "mlp", "norm", "draft", "vision", "other"];

fn colour(class: &str) -> usize {
    CLASSES.iter().position(|known| *known == class).unwrap_or(CLASSES.len() - 1)
}

pub fn section(data: &Data) -> String {
    let known: Vec<&Model> = data.models.iter().filter(|model| !model.identity.classes.is_empty()).collect();
    if known.is_empty() {
        return paragraph("", "The database does not say what the bytes of these models are.");
    }
    let bar = |model: &&Model| {
        (format!("{} {}: {}", model.number, model.label, size(payload(model))), parts(model))
    };
    let bars: Vec<(String, Vec<Part>)> = known.iter().map(bar).collect();
    let title = "Bytes of each model by class of module, all on one scale";
    let about =
        "One bar a model, one part for each class and storage. The tables that follow have the numbers.";
    let mut out = figure(&stacked("sizes-bars", title, about, &bars), title);
    let used =
        |class: &usize| known.iter().any(|m| m.identity.classes.iter().any(|c| colour(&c.class) == *class));
    let legend: String = (0..CLASSES.len())
        .filter(used)
        .map(|class| format!("<li>{} {}</li>\n", swatch(class), CLASSES[class]))
        .collect();
    out.push_str(&format!("<ul class=\"legend\">\n{legend}</ul>\n"));
    known.iter().for_each(|model| out.push_str(&table(model)));
    out
}

fn payload(model: &Model) -> u64 {
    model.identity.classes.iter().map(|class| class.bytes).sum()
}

/// In the order of colours, then the largest first.
fn sorted(model: &Model) -> Vec<&Class> {
    let mut classes: Vec<&Class> = model.identity.classes.iter().collect();
    classes.sort_by(|a, b| {
        colour(&a.class).cmp(&colour(&b.class)).then(b.bytes.cmp(&a.bytes)).then(a.storage.cmp(&b.storage))
    });
    classes
}

fn parts(model: &Model) -> Vec<Part> {
    let part = |class: &Class| Part {
        colour: colour(&class.class),
        value: class.bytes as f64,
        hint: format!("{}, {}: {}", class.class, class.storage, size(class.bytes)),
    };
    sorted(model).into_iter().map(part).collect()
}

fn table(model: &Model) -> String {
    let identity = &model.identity;
    let mut table = Table::new(
        format!("{} {}: modules by class and storage", model.number, model.label),
        &[
            ("class", false),
            ("storage", false),
            ("modules", true),
            ("weights", true),
            ("size", true),
            ("share", true),
            ("bits per weight", true),
        ],
    );
    let whole = payload(model).max(1) as f64;
    for class in sorted(model) {
        let bits = 8.0 * class.bytes as f64 / class.weights.max(1) as f64;
        table.row([
            class.class.as_str().into(),
            class.storage.as_str().into(),
            count(class.modules as u64).into(),
            count(class.weights).into(),
            size(class.bytes).into(),
            percent(class.bytes as f64 / whole).into(),
            format!("{bits:.3}").into(),
        ]);
    }
    let summary = format!(
        "{} {}: {} in weight files, {:.3} bits per weight",
        model.number,
        model.label,
        size(identity.bytes),
        identity.bits_per_weight
    );
    let headers = identity.bytes.saturating_sub(payload(model));
    let note = format!("{} of payload; {} of headers in the files.", size(payload(model)), size(headers));
    details(summary, &format!("{}{}", table.render(), paragraph("note", &note)))
}
