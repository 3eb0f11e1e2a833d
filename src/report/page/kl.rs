//! Divergence: a part for each dump and path.

use super::plot::{self, Curve, Dot, Size};
use super::who;
use crate::report::data::{Bucket, Data, EDGES, KlEntry, KlGroup, Verdicts, number};
use crate::report::html::{Markup, Table, details, escape, paragraph, prose};
use crate::report::number::{count, nats, nats_between, percent, size};
use crate::report::svg::{Axis, Chart};

pub fn section(data: &Data) -> String {
    match data.kl.is_empty() {
        true => paragraph("", "Nothing was measured: `tqc eval dump` and `tqc eval kl` do it."),
        false => data.kl.iter().map(|group| of_group(data, group)).collect(),
    }
}

fn of_group(data: &Data, group: &KlGroup) -> String {
    let mut out = format!(
        "<h3><span class=\"group\">{}</span> {}, {}</h3>\n",
        escape(&group.letter),
        escape(&group.subject),
        escape(&group.settings)
    );
    let mut floor = match group.noise_floor {
        Some(floor) if floor > 0.0 => {
            format!(
                "The dump's noise floor is {} nats per token: a mean KL below it means nothing.",
                nats(floor)
            )
        }
        Some(_) => "The dump's noise floor is 0.".to_owned(),
        None => "The runs do not agree on a noise floor.".to_owned(),
    };
    let at_floor = names(data, group, &|entry| entry.at_floor);
    if !at_floor.is_empty() {
        floor.push_str(&format!(" At it, and so in the tables but in no chart: {at_floor}."));
    }
    out.push_str(&paragraph("", &floor));
    out.push_str(&sizes(data, group));
    if let Some(verdicts) = &group.verdicts {
        out.push_str(&verdicts_of(data, verdicts, "the lowest mean KL of those not at the noise floor"));
    }
    out.push_str(&layers(data, group));
    out.push_str(&by_place(data, group));
    out.push_str(&distribution(data, group));
    out.push_str(&worst(data, group));
    out
}

/// Numbers and names of the models that are `wanted`.
fn names(data: &Data, group: &KlGroup, wanted: &dyn Fn(&KlEntry) -> bool) -> String {
    let name =
        |entry: &&KlEntry| format!("{} {}", data.models[entry.model].number, data.models[entry.model].label);
    let wanted = group.entries.iter().filter(|entry| wanted(entry));
    wanted.map(|entry| name(&entry)).collect::<Vec<_>>().join(", ")
}

fn sizes(data: &Data, group: &KlGroup) -> String {
    let drawn: Vec<&KlEntry> = group.entries.iter().filter(|e| !e.at_floor && e.mean.is_some()).collect();
    let dots = |on: &dyn Fn(&KlEntry) -> bool| -> Vec<Dot<'_>> {
        let dot = |entry: &&KlEntry| Dot {
            model: &data.models[entry.model],
            value: entry.mean.unwrap_or(0.0),
            interval: entry.interval.map(|interval| (interval.low, interval.high)),
            shown: format!("KL {}", nats(entry.mean.unwrap_or(0.0))),
            on_frontier: on(entry),
        };
        drawn.iter().map(dot).collect()
    };
    let least = drawn.iter().filter_map(|entry| entry.mean).fold(f64::INFINITY, f64::min);
    // Ends of intervals that would make the rest of the chart small are left out of the axis.
    let ends =
        drawn.iter().filter_map(|entry| entry.interval).flat_map(|interval| [interval.low, interval.high]);
    let near = |value: &f64| *value > least / 10.0;
    let floor = group.noise_floor.filter(|floor| *floor > least / 100.0);
    let values: Vec<f64> =
        drawn.iter().filter_map(|entry| entry.mean).chain(ends.filter(near)).chain(floor).collect();
    let y = || Axis::log("mean KL, nats per token", values.iter().copied());
    let about =
        "Each point is a model, with the 95 % interval of its mean. The table that follows has the numbers.";
    let level = floor.map(|floor| (floor, "noise floor"));
    let id = |what: &str| format!("kl-{}-{what}", group.letter);
    let mut out = "<h4>Size and divergence</h4>\n".to_owned();
    // One point shows nothing that its row does not.
    if drawn.len() > 1 {
        let bits = dots(&|entry| entry.on_bits_frontier);
        let bytes = dots(&|entry| entry.on_bytes_frontier);
        out.push_str(&plot::row(&[
            plot::scatter(
                &id("bits"),
                "Mean KL against bits per weight",
                about,
                Size::Bits,
                y(),
                &bits,
                level,
            ),
            plot::scatter(
                &id("bytes"),
                "Mean KL against the size of all weight files",
                about,
                Size::Bytes,
                y(),
                &bytes,
                level,
            ),
        ]));
        out.push_str(&plot::scatter_legend());
    }
    out.push_str(&table(data, group));
    out
}

fn table(data: &Data, group: &KlGroup) -> String {
    let mut table = Table::new(
        "Mean KL(teacher || model) in nats per token, and what goes with it",
        &[
            ("model", false),
            ("bits per weight", true),
            ("size", true),
            ("mean KL", true),
            ("95 % interval", true),
            ("on the frontier of", false),
            ("top-1 agrees", true),
            ("perplexity", true),
            ("teacher's", true),
            ("positions", true),
            ("documents", true),
            ("not finite", true),
        ],
    );
    for entry in &group.entries {
        let model = &data.models[entry.model];
        let of = |key: &str| number(&entry.summary, key);
        let whole = |key: &str| Markup::or_none(crate::report::data::count(&entry.summary, key).map(count));
        let ppl = |key: &str| Markup::or_none(of(key).map(|ppl| format!("{ppl:.4}")));
        let frontier = match (entry.on_bits_frontier, entry.on_bytes_frontier) {
            (true, true) => "both",
            (true, false) => "bits",
            (false, true) => "size",
            (false, false) => "neither",
        };
        table.row([
            who(model),
            format!("{:.3}", model.identity.bits_per_weight).into(),
            size(model.identity.bytes).into(),
            Markup::or_none(entry.mean.map(nats)),
            Markup::or_none(entry.interval.map(nats_between)),
            frontier.into(),
            Markup::or_none(of("top1_agreement").map(|share| format!("{:.2} %", 100.0 * share))),
            ppl("candidate_ppl"),
            ppl("teacher_ppl"),
            whole("tokens"),
            whole("documents"),
            whole("non_finite"),
        ]);
    }
    table.render()
}

/// The table of verdicts against a baseline that was chosen by `why`.
pub fn verdicts_of(data: &Data, verdicts: &Verdicts, why: &str) -> String {
    let base = &data.models[verdicts.baseline];
    let intro = format!("Compared with {} {}, which has {why}.", base.number, base.label);
    match &verdicts.arms {
        Err(problem) => paragraph("note", &format!("{intro} No verdict: {problem}.")),
        Ok(arms) => {
            let mut table =
                Table::new(intro, &[("model", false), ("verdict", false), ("with its numbers", false)]);
            for arm in arms {
                let word = format!("<span class=\"word {0}\">{0}</span>", arm.word);
                let long = format!("<span class=\"long\">{}</span>", prose(&arm.conclusion));
                table.row([who(&data.models[arm.model]), Markup::raw(word), Markup::raw(long)]);
            }
            table.render()
        }
    }
}

/// More layers than any model has: a bound on what a strange summary can ask for.
const MOST_LAYERS: u64 = 2000;

fn layers(data: &Data, group: &KlGroup) -> String {
    let measured: Vec<&KlEntry> = group.entries.iter().filter(|entry| !entry.layers.is_empty()).collect();
    let mut out = "<h4>By layer</h4>\n".to_owned();
    if measured.is_empty() {
        return out + &paragraph("note", "Not measured: `tqc eval kl --layers N` does it.");
    }
    let curve = |entry: &&KlEntry| Curve {
        model: entry.model,
        of: &data.models[entry.model],
        points: entry
            .layers
            .iter()
            .map(|layer| {
                let interval = layer.error.map(|error| (layer.mean - error, layer.mean + error));
                (layer.layer as f64, layer.mean, interval)
            })
            .collect(),
    };
    let drawn: Vec<&KlEntry> = measured.iter().copied().filter(|entry| !entry.at_floor).collect();
    let curves: Vec<Curve<'_>> = drawn.iter().map(curve).collect();
    let deepest = measured.iter().flat_map(|entry| entry.layers.iter().map(|l| l.layer)).max().unwrap_or(0);
    let x = Axis::places("layers done", (0..=deepest.min(MOST_LAYERS)).map(|layer| layer.to_string()));
    out.push_str(&plot::curves(
        &format!("kl-{}-layers", group.letter),
        "Mean KL after each layer, with one standard error",
        "One line a model. Both models' residual streams are read through their own final norm and head.",
        x,
        "mean KL, nats per token",
        &curves,
    ));
    out.push_str(&plot::curve_legend(drawn.iter().map(|entry| (entry.model, &data.models[entry.model]))));
    let mut table = Table::new("Mean KL after each layer ± one standard error", &[("layers done", true)]);
    measured.iter().for_each(|entry| table.column(who(&data.models[entry.model]), true));
    let mut all: Vec<u64> = measured.iter().flat_map(|entry| entry.layers.iter().map(|l| l.layer)).collect();
    all.sort_unstable();
    all.dedup();
    for layer in all {
        let cell = |entry: &&KlEntry| {
            let found = entry.layers.iter().find(|found| found.layer == layer);
            Markup::or_none(found.map(|found| match found.error {
                Some(error) => format!("{} ± {}", nats(found.mean), nats(error)),
                None => nats(found.mean),
            }))
        };
        table.row(std::iter::once(layer.to_string().into()).chain(measured.iter().map(cell)));
    }
    out + &details("KL by layer as a table", &table.render())
}

/// `0`, `4–15`; of confidences `0.1–0.3`.
fn range(key: &str, from: f64, to: f64) -> String {
    match key {
        "by_position" if to - from <= 1.0 => format!("{from}"),
        "by_position" => format!("{from}–{}", to - 1.0),
        _ => format!("{from}–{to}"),
    }
}

/// A way to sort positions: key of the summary, part of ids, words for an axis and for a sentence.
struct Kind {
    key: &'static str,
    id: &'static str,
    axis: &'static str,
    by: &'static str,
}

const KINDS: [Kind; 2] = [
    Kind {
        key: "by_position",
        id: "position",
        axis: "position in the sequence, from",
        by: "position in the sequence",
    },
    Kind {
        key: "by_confidence",
        id: "confidence",
        axis: "probability of the teacher's likeliest token, from",
        by: "the teacher's confidence",
    },
];

/// Entries that have buckets, with these.
type Buckets<'a> = [(&'a KlEntry, Vec<Bucket>)];

fn by_place(data: &Data, group: &KlGroup) -> String {
    let mut out = "<h4>By position, and by the teacher's confidence</h4>\n".to_owned();
    let (mut figures, mut tables) = (Vec::new(), String::new());
    for kind in &KINDS {
        let of = |entry| (entry, KlEntry::buckets(entry, kind.key));
        let of: Vec<(&KlEntry, Vec<Bucket>)> =
            group.entries.iter().map(of).filter(|(_, buckets)| !buckets.is_empty()).collect();
        if of.is_empty() {
            tables.push_str(&paragraph("note", &format!("These runs have no KL by {}.", kind.by)));
            continue;
        }
        let mut ranges: Vec<(f64, f64)> =
            of.iter().flat_map(|(_, b)| b.iter().map(|b| (b.from, b.to))).collect();
        ranges.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        ranges.dedup();
        if of.iter().any(|(entry, _)| !entry.at_floor) {
            figures.push(curves_of(data, group, kind, &of, &ranges));
        }
        tables.push_str(&table_of(data, kind, &of, &ranges));
    }
    if !figures.is_empty() {
        out.push_str(&plot::row(&figures));
        let drawn = group.entries.iter().filter(|entry| !entry.at_floor);
        out.push_str(&plot::curve_legend(drawn.map(|entry| (entry.model, &data.models[entry.model]))));
    }
    out + &tables
}

fn curves_of(data: &Data, group: &KlGroup, kind: &Kind, of: &Buckets<'_>, ranges: &[(f64, f64)]) -> String {
    let place = |bucket: &Bucket| ranges.iter().position(|range| *range == (bucket.from, bucket.to));
    let curve = |(entry, buckets): &(&KlEntry, Vec<Bucket>)| Curve {
        model: entry.model,
        of: &data.models[entry.model],
        points: buckets.iter().filter_map(|b| Some((place(b)? as f64, b.mean, None))).collect(),
    };
    let drawn = of.iter().filter(|(entry, _)| !entry.at_floor);
    plot::curves(
        &format!("kl-{}-{}", group.letter, kind.id),
        &format!("Mean KL by {}", kind.by),
        "One line a model. The table that follows has the numbers.",
        Axis::places(kind.axis, ranges.iter().map(|(from, _)| from.to_string())),
        "mean KL, nats per token",
        &drawn.map(curve).collect::<Vec<_>>(),
    )
}

fn table_of(data: &Data, kind: &Kind, of: &Buckets<'_>, ranges: &[(f64, f64)]) -> String {
    let caption = format!("Mean KL by {}, and part of the whole KL", kind.by);
    let mut table = Table::new(caption, &[(kind.by, false), ("positions", true)]);
    of.iter().for_each(|(entry, _)| table.column(who(&data.models[entry.model]), true));
    for (from, to) in ranges {
        let find = |buckets: &[Bucket]| buckets.iter().find(|b| (b.from, b.to) == (*from, *to)).copied();
        let positions = of.iter().filter_map(|(_, buckets)| find(buckets)).map(|b| b.tokens).max();
        let cell = |(_, buckets): &(&KlEntry, Vec<Bucket>)| {
            Markup::or_none(find(buckets).map(|b| match b.share {
                Some(share) => format!("{} ({:.0} %)", nats(b.mean), 100.0 * share),
                None => nats(b.mean),
            }))
        };
        let start = [range(kind.key, *from, *to).into(), Markup::or_none(positions.map(count))];
        table.row(start.into_iter().chain(of.iter().map(cell)));
    }
    details(format!("KL by {} as a table", kind.by), &table.render())
}

fn distribution(data: &Data, group: &KlGroup) -> String {
    let held: Vec<&KlEntry> = group.entries.iter().filter(|e| e.distribution.positions > 0).collect();
    let mut out = "<h4>Distribution over positions</h4>\n".to_owned();
    if held.is_empty() {
        return out + &paragraph("note", "No position has a divergence.");
    }
    out.push_str(&paragraph(
        "",
        "Damage sits in the tail: two models of the same mean can differ tenfold in their worst hundredth. Positions of \
         exactly 0 and positions below the noise floor have no bar; the table counts them.",
    ));
    let drawn: Vec<&KlEntry> = held.iter().copied().filter(|entry| !entry.at_floor).collect();
    let filled = |bin: &usize| held.iter().any(|entry| entry.distribution.bins[*bin] > 0);
    let bins = EDGES.len() - 1;
    if let (Some(first), Some(last)) = ((0..bins).find(filled), (0..bins).rfind(filled)) {
        let floor = group.noise_floor.filter(|floor| *floor > EDGES[first] / 100.0);
        let ends = [EDGES[first] * 1.11, EDGES[last + 1] / 1.11];
        let share = |entry: &KlEntry, bin: usize| {
            100.0 * entry.distribution.bins[bin] as f64 / entry.distribution.positions as f64
        };
        let most = drawn.iter().flat_map(|e| (first..=last).map(|bin| share(e, bin))).fold(0.0, f64::max);
        let figures: Vec<String> = drawn
            .iter()
            .map(|entry| {
                let model = &data.models[entry.model];
                let x = Axis::log("KL of a position, nats", ends.into_iter().chain(floor));
                let title = format!("{} {}", model.number, model.label);
                let mut chart = Chart::new(
                    &format!("kl-{}-spread-{}", group.letter, model.number),
                    &format!("Distribution of KL over positions: {title}"),
                    "Bars: percent of positions in each quarter of a decade. Tables below have quantiles and counts.",
                    x,
                    Axis::even("% of positions", 0.0, most.max(1.0)),
                    180.0,
                );
                for bin in (first..=last).filter(|bin| entry.distribution.bins[*bin] > 0) {
                    let (from, to) = (EDGES[bin], EDGES[bin + 1]);
                    let positions = entry.distribution.bins[bin];
                    let hint = format!("{} to {}: {positions} positions", nats(from), nats(to));
                    chart.bar(from, to, share(entry, bin), entry.model % super::COLOURS, &hint);
                }
                if let Some(floor) = floor {
                    chart.mark(floor, "noise floor");
                }
                plot::figure(&chart.render(), &title)
            })
            .collect();
        out.push_str(&plot::row(&figures));
        out.push_str(&quantiles(data, group, &held));
        let mut table = Table::new("Positions in each bin", &[("KL from, nats", true), ("to below", true)]);
        held.iter().for_each(|entry| table.column(who(&data.models[entry.model]), true));
        for bin in first..=last {
            let cells = held.iter().map(|entry| count(entry.distribution.bins[bin] as u64).into());
            table.row([nats(EDGES[bin]).into(), nats(EDGES[bin + 1]).into()].into_iter().chain(cells));
        }
        out.push_str(&details("Bins as a table", &table.render()));
    } else {
        out.push_str(&quantiles(data, group, &held));
    }
    out
}

fn quantiles(data: &Data, group: &KlGroup, held: &[&KlEntry]) -> String {
    let caption = match group.noise_floor {
        Some(floor) if floor > 0.0 => format!("Quantiles of KL over positions; noise floor {}", nats(floor)),
        _ => "Quantiles of KL over positions".to_owned(),
    };
    let mut table = Table::new(
        caption,
        &[
            ("model", false),
            ("median", true),
            ("p90", true),
            ("p99", true),
            ("p99.9", true),
            ("largest", true),
            ("exactly 0", true),
            ("below the floor", true),
            ("not finite", true),
            ("positions", true),
        ],
    );
    for entry in held {
        let d = &entry.distribution;
        let at = |of: &dyn Fn(&crate::stats::Percentiles) -> f64| {
            Markup::or_none(d.percentiles.as_ref().map(|p| nats(of(p))))
        };
        let share = |n: usize| Markup::from(percent(n as f64 / d.positions as f64));
        table.row([
            who(&data.models[entry.model]),
            at(&|p| p.p50),
            at(&|p| p.p90),
            at(&|p| p.p99),
            at(&|p| p.p999),
            Markup::or_none(d.most.map(nats)),
            share(d.zero),
            share(d.below),
            count(d.not_finite as u64).into(),
            count(d.positions as u64).into(),
        ]);
    }
    table.render()
}

fn worst(data: &Data, group: &KlGroup) -> String {
    let mut out = String::new();
    for entry in &group.entries {
        let worst = entry.worst();
        if worst.is_empty() {
            continue;
        }
        let model = &data.models[entry.model];
        let name = format!("{} {}", model.number, model.label);
        let mut table = Table::new(
            format!("The positions with the largest KL: {name}"),
            &[
                ("KL", true),
                ("line", true),
                ("token", true),
                ("text before", false),
                ("text goes on", false),
                ("teacher", false),
                ("model", false),
            ],
        );
        // As in source code: spaces and line ends can be seen.
        let quoted = |text: &Option<String>| match text {
            Some(text) => Markup::raw(format!("<code>{}</code>", escape(&format!("{text:?}")))),
            None => Markup::none(),
        };
        for place in &worst {
            let teacher = match (&place.teacher, place.confidence) {
                (Some(_), Some(p)) => {
                    Markup::raw(format!("{} {}", quoted(&place.teacher).as_str(), percent(p)))
                }
                _ => quoted(&place.teacher),
            };
            table.row([
                nats(place.kl).into(),
                Markup::or_none(place.line.map(|line| line.to_string())),
                Markup::or_none(place.position.map(|position| position.to_string())),
                Markup::raw(format!("<span class=\"long\">{}</span>", quoted(&place.context).as_str())),
                quoted(&place.next),
                teacher,
                quoted(&place.candidate),
            ]);
        }
        out.push_str(&details(format!("Worst positions in context: {name}"), &table.render()));
    }
    match out.is_empty() {
        true => out,
        false => format!("<h4>Worst positions</h4>\n{out}"),
    }
}
