//! The charts that several sections have.

use super::look;
use crate::report::data::Model;
use crate::report::html::escape;
use crate::report::number::size;
use crate::report::svg::{Axis, Chart, Point, key};

/// Something to place in a chart of sizes.
pub struct Dot<'a> {
    pub model: &'a Model,
    pub value: f64,
    pub interval: Option<(f64, f64)>,
    pub shown: String,
    pub on_frontier: bool,
}

/// What a chart of sizes has on its horizontal axis.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Size {
    Bits,
    Bytes,
}

impl Size {
    /// The axis's title and the unit of bytes.
    fn unit(self, dots: &[Dot<'_>]) -> (&'static str, f64) {
        let largest = dots.iter().map(|dot| dot.model.identity.bytes).max().unwrap_or(0);
        match self {
            Size::Bits => ("bits per weight", 1.0),
            Size::Bytes if largest >= 1 << 30 => ("GiB", (1u64 << 30) as f64),
            Size::Bytes if largest >= 1 << 20 => ("MiB", (1u64 << 20) as f64),
            Size::Bytes => ("KiB", 1024.0),
        }
    }

    fn of(self, model: &Model) -> f64 {
        match self {
            Size::Bits => model.identity.bits_per_weight,
            Size::Bytes => model.identity.bytes as f64,
        }
    }
}

/// Markers of the kinds of models.
const KINDS: [(&str, usize); 3] = [("artifact", 0), ("mlx", 1), ("checkpoint", 2)];

fn marker(kind: &str) -> usize {
    KINDS.iter().find(|(name, _)| *name == kind).map_or(3, |(_, marker)| *marker)
}

/// Values against size, with the points that nothing beats joined by a line. `level`: a line across.
pub fn scatter(
    id: &str,
    title: &str,
    description: &str,
    size_of: Size,
    y: Axis,
    dots: &[Dot<'_>],
    level: Option<(f64, &str)>,
) -> String {
    let (unit, divisor) = size_of.unit(dots);
    let x_of = |dot: &Dot<'_>| size_of.of(dot.model) / divisor;
    let x = Axis::linear(unit, dots.iter().map(x_of));
    let mut chart = Chart::new(id, title, description, x, y, 290.0);
    if let Some((value, word)) = level {
        chart.level(value, word);
    }
    let mut on: Vec<(f64, f64)> =
        dots.iter().filter(|dot| dot.on_frontier).map(|dot| (x_of(dot), dot.value)).collect();
    on.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    if on.len() > 1 {
        chart.line(&on, 0, 2);
    }
    let point = |dot: &Dot<'_>| Point {
        x: x_of(dot),
        y: dot.value,
        interval: dot.interval,
        number: dot.model.number.to_string(),
        name: dot.model.label.clone(),
        hint: format!(
            "{} {}: {}, {:.3} bits per weight, {}",
            dot.model.number,
            dot.model.label,
            dot.shown,
            dot.model.identity.bits_per_weight,
            size(dot.model.identity.bytes)
        ),
        colour: if dot.on_frontier { 0 } else { 5 },
        shape: marker(&dot.model.identity.kind),
        filled: dot.on_frontier,
    };
    let points: Vec<Point> = dots.iter().map(point).collect();
    points.iter().for_each(|point| chart.point(point));
    chart.names(&points);
    figure(&chart.render(), title)
}

/// What the markers of [`scatter`] mean.
pub fn scatter_legend() -> String {
    let kinds: String = KINDS
        .iter()
        .map(|(kind, marker)| format!("<li>{} {}</li>\n", key(0, 0, *marker, false), escape(kind)))
        .collect();
    format!(
        "<ul class=\"legend\">\n{kinds}<li>filled and joined: on the frontier, where no other model is both as small \
         and as good</li>\n</ul>\n"
    )
}

/// Where, value, interval.
pub type CurvePoint = (f64, f64, Option<(f64, f64)>);

/// A curve of one model.
pub struct Curve<'a> {
    pub model: usize,
    pub of: &'a Model,
    pub points: Vec<CurvePoint>,
}

/// Curves on a log axis; values of 0 are left out.
pub fn curves(
    id: &str,
    title: &str,
    description: &str,
    x: Axis,
    y_title: &str,
    curves: &[Curve<'_>],
) -> String {
    let drawn = |curve: &Curve<'_>| -> Vec<CurvePoint> {
        curve.points.iter().copied().filter(|point| point.1 > 0.0).collect()
    };
    let y = Axis::log(y_title, curves.iter().flat_map(drawn).map(|point| point.1));
    let mut chart = Chart::new(id, title, description, x, y, 270.0);
    for curve in curves {
        let (colour, dash, marker) = look(curve.model);
        let points = drawn(curve);
        let line: Vec<(f64, f64)> = points.iter().map(|point| (point.0, point.1)).collect();
        chart.line(&line, colour, dash);
        for (x, y, interval) in points {
            chart.point(&Point {
                x,
                y,
                interval,
                number: String::new(),
                name: String::new(),
                hint: format!("{} {}: {}", curve.of.number, curve.of.label, crate::report::number::nats(y)),
                colour,
                shape: marker,
                filled: true,
            });
        }
    }
    figure(&chart.render(), title)
}

/// Which line is which model.
pub fn curve_legend<'a>(models: impl Iterator<Item = (usize, &'a Model)>) -> String {
    let item = |(i, model): (usize, &Model)| {
        let (colour, dash, marker) = look(i);
        format!("<li>{} {}</li>\n", key(colour, dash, marker, true), super::who(model).as_str())
    };
    format!("<ul class=\"legend\">\n{}</ul>\n", models.map(item).collect::<String>())
}

/// A chart with its title below.
pub fn figure(svg: &str, caption: &str) -> String {
    format!("<figure>\n{svg}<figcaption>{}</figcaption>\n</figure>\n", escape(caption))
}

/// Figures beside each other.
pub fn row(figures: &[String]) -> String {
    format!("<div class=\"row\">\n{}</div>\n", figures.concat())
}
