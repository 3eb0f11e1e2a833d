//! A plot of two axes, and a bar of parts.

use super::axis::Axis;
use super::{COLOURS, at};
use crate::report::html::{cut, escape};

const WIDTH: f64 = 400.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 26.0;
const BOTTOM: f64 = 40.0;
/// About the width of a digit in the charts' font of 12 units.
const LETTER: f64 = 6.7;

/// A marker with its interval and name.
#[derive(Debug, Clone)]
pub struct Point {
    /// Its value on the horizontal axis.
    pub x: f64,
    /// Its value on the vertical axis.
    pub y: f64,
    /// The interval of `y`.
    pub interval: Option<(f64, f64)>,
    /// Number of the model, always shown if anything is.
    pub number: String,
    /// Its name, shown where there is room.
    pub name: String,
    /// Shown by the browser when the pointer rests on it.
    pub hint: String,
    /// Which colour.
    pub colour: usize,
    /// Which shape.
    pub shape: usize,
    /// Filled, or an outline.
    pub filled: bool,
}

/// A rectangle that is taken: left, top, right, bottom.
type Taken = (f64, f64, f64, f64);

/// A chart under construction.
#[derive(Debug)]
pub struct Chart {
    id: String,
    title: String,
    description: String,
    x: Axis,
    y: Axis,
    left: f64,
    height: f64,
    marks: String,
    taken: Vec<Taken>,
}

impl Chart {
    /// An empty chart. `id` is unique in the page; `title` and `description` are read to those who do not see it.
    pub fn new(id: &str, title: &str, description: &str, x: Axis, y: Axis, height: f64) -> Self {
        let longest = y.ticks.iter().map(|tick| tick.label.chars().count()).max().unwrap_or(0);
        Self {
            id: id.to_owned(),
            title: title.to_owned(),
            description: description.to_owned(),
            x,
            y,
            left: 10.0 + LETTER * longest as f64,
            height,
            marks: String::new(),
            taken: Vec::new(),
        }
    }

    fn px(&self, value: f64) -> f64 {
        self.left + (WIDTH - RIGHT - self.left) * self.x.place(value)
    }

    fn py(&self, value: f64) -> f64 {
        let bottom = self.height - BOTTOM;
        bottom - (bottom - TOP) * self.y.place(value)
    }

    /// A dashed line across at `value`, if the axis holds it, with a word.
    pub fn level(&mut self, value: f64, word: &str) {
        if value < self.y.low || value > self.y.high {
            return;
        }
        let (y, right) = (self.py(value), WIDTH - RIGHT);
        self.marks.push_str(&format!(
            "<line class=\"floor\" x1=\"{}\" x2=\"{}\" y1=\"{2}\" y2=\"{2}\"/>\
             <text class=\"floor\" x=\"{1}\" y=\"{3}\" text-anchor=\"end\">{4}</text>\n",
            at(self.left),
            at(right),
            at(y),
            at(y - 4.0),
            escape(word)
        ));
        let width = LETTER * word.chars().count() as f64;
        self.taken.push((right - width, y - 14.0, right, y));
    }

    /// A dashed line upwards at `value`, if the axis holds it, with a word.
    pub fn mark(&mut self, value: f64, word: &str) {
        if value < self.x.low || value > self.x.high {
            return;
        }
        let x = self.px(value);
        let (anchor, beside) = if x > 0.6 * WIDTH { ("end", x - 4.0) } else { ("start", x + 4.0) };
        self.marks.push_str(&format!(
            "<line class=\"floor\" x1=\"{0}\" x2=\"{0}\" y1=\"{1}\" y2=\"{2}\"/>\
             <text class=\"floor\" x=\"{3}\" y=\"{4}\" text-anchor=\"{anchor}\">{5}</text>\n",
            at(x),
            at(TOP),
            at(self.height - BOTTOM),
            at(beside),
            at(TOP + 10.0),
            escape(word)
        ));
    }

    /// A line through points that lie in order.
    pub fn line(&mut self, points: &[(f64, f64)], colour: usize, dash: usize) {
        let points: Vec<String> =
            points.iter().map(|(x, y)| format!("{},{}", at(self.px(*x)), at(self.py(*y)))).collect();
        self.marks.push_str(&format!(
            "<polyline class=\"line c{}\"{} points=\"{}\"/>\n",
            colour % COLOURS,
            dashes(dash),
            points.join(" ")
        ));
    }

    /// A bar from the bottom to `y`, between two values.
    pub fn bar(&mut self, from: f64, to: f64, y: f64, colour: usize, hint: &str) {
        let (left, right, top, bottom) = (self.px(from), self.px(to), self.py(y), self.height - BOTTOM);
        self.marks.push_str(&format!(
            "<rect class=\"fill c{}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"><title>{}</title></rect>\n",
            colour % COLOURS,
            at(left + 0.5),
            at(top),
            at((right - left - 1.0).max(0.5)),
            at(bottom - top),
            escape(hint)
        ));
    }

    /// A marker and its interval, without its name.
    pub fn point(&mut self, point: &Point) {
        let (x, y) = (self.px(point.x), self.py(point.y));
        let colour = point.colour % COLOURS;
        if let Some((low, high)) = point.interval {
            let (top, bottom) = (self.py(high), self.py(low));
            // An end that lies outside the axis has no cap.
            let cap = |value: f64, y: f64| match (self.y.low..=self.y.high).contains(&value) {
                true => format!("M{} {1}H{2}", at(x - 3.5), at(y), at(x + 3.5)),
                false => String::new(),
            };
            self.taken.push((x - 3.5, top, x + 3.5, bottom));
            self.marks.push_str(&format!(
                "<path class=\"whisker c{colour}\" d=\"M{} {}V{}{}{}\"/>\n",
                at(x),
                at(top),
                at(bottom),
                cap(high, top),
                cap(low, bottom)
            ));
        }
        let class = if point.filled { "fill" } else { "hollow" };
        self.marks.push_str(&format!(
            "<path class=\"{class} c{colour}\" d=\"{}\"><title>{}</title></path>\n",
            shape(point.shape, x, y),
            escape(&point.hint)
        ));
        self.taken.push((x - 6.0, y - 6.0, x + 6.0, y + 6.0));
    }

    /// Writes each point's number and name beside it; where there is no room for both, the number alone, in a crowd
    /// at some distance with a line that leads to it.
    pub fn names(&mut self, points: &[Point]) {
        for point in points {
            let both = format!("{} {}", point.number, cut(&point.name, 22));
            let (x, y) = (self.px(point.x), self.py(point.y));
            let near = |text| Some((text, self.room(x, y, text)?));
            let found = near(both.as_str()).or_else(|| near(point.number.as_str()));
            // A number over something is still better than no number.
            let (text, (left, base)) = found.unwrap_or_else(|| {
                let place = self.distant_room(x, y, &point.number).unwrap_or((x + 8.0, y + 4.0));
                (&point.number, place)
            });
            let own = area(left, base, text);
            if found.is_none() {
                let (to_x, to_y) = (x.clamp(own.0, own.2), y.clamp(own.1, own.3));
                // From the marker's edge, not from under it.
                let far = ((to_x - x) * (to_x - x) + (to_y - y) * (to_y - y)).sqrt();
                let edge = (6.0 / far).min(1.0);
                self.marks.push_str(&format!(
                    "<path class=\"leader\" d=\"M{} {}L{} {}\"/>\n",
                    at(x + edge * (to_x - x)),
                    at(y + edge * (to_y - y)),
                    at(to_x),
                    at(to_y)
                ));
            }
            self.taken.push(own);
            let text = escape(text);
            self.marks.push_str(&format!("<text x=\"{}\" y=\"{}\">{text}</text>\n", at(left), at(base)));
        }
    }

    /// Whether `text` at a place is inside the axes and touches nothing.
    fn is_free(&self, left: f64, base: f64, text: &str) -> bool {
        let own = area(left, base, text);
        let inside = own.0 >= self.left && own.2 <= WIDTH && own.1 >= TOP && own.3 <= self.height - BOTTOM;
        inside && !self.taken.iter().any(|other| touch(own, *other))
    }

    /// Where `text` can begin in the wider surroundings of a marker: on rings, the nearest first.
    fn distant_room(&self, x: f64, y: f64, text: &str) -> Option<(f64, f64)> {
        // Thirds of a right angle; two roots of whole numbers suffice.
        let half = 0.75f64.sqrt();
        let directions = [
            (1.0, 0.0),
            (half, -0.5),
            (half, 0.5),
            (0.5, -half),
            (0.5, half),
            (0.0, -1.0),
            (0.0, 1.0),
            (-0.5, -half),
            (-0.5, half),
            (-half, -0.5),
            (-half, 0.5),
            (-1.0, 0.0),
        ];
        let width = LETTER * text.chars().count() as f64;
        let rings = (3..12).map(|ring| 8.0 * f64::from(ring));
        let places = rings.flat_map(|far| directions.map(|(dx, dy)| (x + far * dx, y + far * dy)));
        places.map(|(x, y)| (x - width / 2.0, y + 4.0)).find(|(left, base)| self.is_free(*left, *base, text))
    }

    /// Where `text` can begin near a marker without touching anything.
    fn room(&self, x: f64, y: f64, text: &str) -> Option<(f64, f64)> {
        let width = LETTER * text.chars().count() as f64;
        let places = [
            (x + 8.0, y + 4.0),
            (x + 7.0, y - 7.0),
            (x + 7.0, y + 15.0),
            (x - 8.0 - width, y + 4.0),
            (x - 7.0 - width, y - 7.0),
            (x - 7.0 - width, y + 15.0),
            (x - width / 2.0, y - 12.0),
            (x - width / 2.0, y + 20.0),
        ];
        places.into_iter().find(|(left, base)| self.is_free(*left, *base, text))
    }

    /// The element.
    pub fn render(&self) -> String {
        let (bottom, right) = (self.height - BOTTOM, WIDTH - RIGHT);
        let mut out = opening(&self.id, &self.title, &self.description, self.height);
        for tick in &self.y.ticks {
            let y = self.py(tick.at);
            out.push_str(&format!(
                "<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{2}\" y2=\"{2}\"/>\
                 <text class=\"tick\" x=\"{3}\" y=\"{4}\" text-anchor=\"end\">{5}</text>\n",
                at(self.left),
                at(right),
                at(y),
                at(self.left - 5.0),
                at(y + 4.0),
                escape(&tick.label)
            ));
        }
        // Labels that would run into the one before are left out.
        let mut free = f64::NEG_INFINITY;
        for tick in &self.x.ticks {
            let (x, half) = (self.px(tick.at), LETTER * tick.label.chars().count() as f64 / 2.0);
            out.push_str(&format!(
                "<line class=\"grid\" x1=\"{0}\" x2=\"{0}\" y1=\"{1}\" y2=\"{2}\"/>",
                at(x),
                at(bottom),
                at(bottom + 4.0)
            ));
            if x - half >= free {
                let middle = x.min(WIDTH - half);
                let label = escape(&tick.label);
                out.push_str(&format!(
                    "<text class=\"tick\" x=\"{}\" y=\"{}\" text-anchor=\"middle\">{label}</text>\n",
                    at(middle),
                    at(bottom + 16.0)
                ));
                free = x + half + 4.0;
            }
        }
        out.push_str(&format!(
            "<path class=\"axis\" d=\"M{left} {top}V{bottom}H{right}\"/>\n\
             <text class=\"name\" x=\"0\" y=\"12\">{y}</text>\
             <text class=\"name\" x=\"{right}\" y=\"{foot}\" text-anchor=\"end\">{x}</text>\n",
            left = at(self.left),
            top = at(TOP),
            bottom = at(bottom),
            right = at(right),
            foot = at(self.height - 6.0),
            x = escape(&self.x.title),
            y = escape(&self.y.title)
        ));
        out.push_str(&self.marks);
        out.push_str("</svg>\n");
        out
    }
}

/// What `text` covers that begins at `left` on the line `base`.
fn area(left: f64, base: f64, text: &str) -> Taken {
    (left, base - 11.0, left + LETTER * text.chars().count() as f64, base + 3.0)
}

fn touch(a: Taken, b: Taken) -> bool {
    a.0 < b.2 && b.0 < a.2 && a.1 < b.3 && b.1 < a.3
}

fn dashes(dash: usize) -> &'static str {
    ["", " stroke-dasharray=\"7 3\"", " stroke-dasharray=\"2 3\"", " stroke-dasharray=\"9 3 2 3\""][dash % 4]
}

/// The path of a marker around a place.
fn shape(shape: usize, x: f64, y: f64) -> String {
    let go = |dx: f64, dy: f64| format!("{} {}", at(x + dx), at(y + dy));
    match shape % 6 {
        0 => format!("M{}a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0Z", go(-4.5, 0.0)),
        1 => format!("M{}h8v8h-8Z", go(-4.0, -4.0)),
        2 => format!("M{}L{}L{}L{}Z", go(0.0, -5.8), go(5.8, 0.0), go(0.0, 5.8), go(-5.8, 0.0)),
        3 => format!("M{}L{}L{}Z", go(0.0, -5.5), go(5.2, 4.0), go(-5.2, 4.0)),
        4 => format!("M{}L{}L{}Z", go(0.0, 5.5), go(5.2, -4.0), go(-5.2, -4.0)),
        _ => format!("M{}h3v3h3v3h-3v3h-3v-3h-3v-3h3Z", go(-1.5, -4.5)),
    }
}

/// A line with its marker, for a legend.
pub fn key(colour: usize, dash: usize, marker: usize, line: bool) -> String {
    let line = match line {
        true => format!("<path class=\"line c{}\"{} d=\"M1 7H31\"/>", colour % COLOURS, dashes(dash)),
        false => String::new(),
    };
    format!(
        "<svg class=\"key\" viewBox=\"0 0 32 14\" aria-hidden=\"true\">{line}<path class=\"fill c{}\" d=\"{}\"/></svg>",
        colour % COLOURS,
        shape(marker, 16.0, 7.0)
    )
}

/// A square of a part's colour and pattern, for a legend.
pub fn swatch(part: usize) -> String {
    format!(
        "<svg class=\"key\" viewBox=\"0 0 14 14\" aria-hidden=\"true\"><rect class=\"part p{part}\" x=\"1\" y=\"1\" \
         width=\"12\" height=\"12\"/></svg>"
    )
}

/// A part of a bar.
#[derive(Debug, Clone)]
pub struct Part {
    /// Its colour and pattern.
    pub colour: usize,
    /// Its length.
    pub value: f64,
    /// Shown by the browser when the pointer rests on it.
    pub hint: String,
}

/// Bars of parts under each other, all on one scale, with a line of text above each.
pub fn stacked(id: &str, title: &str, description: &str, bars: &[(String, Vec<Part>)]) -> String {
    const ROW: f64 = 44.0;
    let whole = |parts: &[Part]| parts.iter().map(|part| part.value).sum::<f64>();
    let longest = bars.iter().map(|(_, parts)| whole(parts)).fold(f64::MIN_POSITIVE, f64::max);
    let height = ROW * bars.len() as f64;
    let mut out = opening(id, title, description, height);
    for (i, (name, parts)) in bars.iter().enumerate() {
        let top = ROW * i as f64;
        out.push_str(&format!("<text x=\"0\" y=\"{}\">{}</text>\n", at(top + 13.0), escape(&cut(name, 56))));
        let mut x = 0.0;
        for part in parts {
            let width = WIDTH * part.value / longest;
            out.push_str(&format!(
                "<rect class=\"part p{}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"18\"><title>{}</title></rect>\n",
                part.colour,
                at(x),
                at(top + 18.0),
                at(width),
                escape(&part.hint)
            ));
            x += width;
        }
    }
    out.push_str("</svg>\n");
    out
}

/// The start of a chart's element.
fn opening(id: &str, title: &str, description: &str, height: f64) -> String {
    let id = escape(id);
    format!(
        "<svg class=\"chart\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-labelledby=\"{id}-t\" \
         aria-describedby=\"{id}-d\">\n<title id=\"{id}-t\">{}</title>\n<desc id=\"{id}-d\">{}</desc>\n",
        escape(title),
        escape(description)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_a_crowd_touch_neither_markers_nor_whiskers_nor_each_other() {
        let point = |i: usize| Point {
            x: 4.0 + 0.02 * i as f64,
            y: 0.1 + 0.001 * (i % 3) as f64,
            interval: Some((0.08, 0.12)),
            number: (i + 1).to_string(),
            name: "a name of some length".to_owned(),
            hint: String::new(),
            colour: 0,
            shape: 0,
            filled: true,
        };
        let points: Vec<Point> = (0..12).map(point).collect();
        let (x, y) = (Axis::linear("", [2.0, 8.0].into_iter()), Axis::log("", [0.01, 1.0].into_iter()));
        let mut chart = Chart::new("c", "", "", x, y, 290.0);
        points.iter().for_each(|point| chart.point(point));
        let marks = chart.taken.len();
        chart.names(&points);
        assert_eq!(chart.taken.len(), marks + points.len());
        for (i, name) in chart.taken.iter().enumerate().skip(marks) {
            let others = chart.taken.iter().take(i);
            assert!(!others.into_iter().any(|other| touch(*name, *other)), "name {}", i - marks + 1);
        }
        assert!(chart.marks.contains("class=\"leader\""), "there is no room for all beside their markers");
    }
}
