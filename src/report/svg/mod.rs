//! Small charts as SVG: points with intervals, lines, bars.
//!
//! Coordinates are in a box 400 wide, so that text stays readable on a telephone, where the box is about 320 pixels.
//! Colours are classes of the page's style sheet; each has a marker and a dash of its own besides.

mod axis;
mod chart;

pub use axis::{Axis, ten};
pub use chart::{Chart, Part, Point, key, stacked, swatch};

/// Colours that the style sheet has.
pub const COLOURS: usize = 6;

/// A coordinate: one digit after the point.
fn at(value: f64) -> String {
    let text = format!("{value:.1}");
    let text = text.strip_suffix(".0").unwrap_or(&text);
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}
