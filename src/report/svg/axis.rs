//! Axes with readable ticks.

use crate::numeric::math::ln64;

/// A place on an axis that has a label.
#[derive(Debug, Clone, PartialEq)]
pub struct Tick {
    /// Its value.
    pub at: f64,
    /// What is written there.
    pub label: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scale {
    Linear,
    Log,
}

/// Values of one direction.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// What it measures.
    pub title: String,
    /// Where labels are.
    pub ticks: Vec<Tick>,
    /// The least value.
    pub low: f64,
    /// The greatest.
    pub high: f64,
    scale: Scale,
}

/// 10^k, the nearest f64.
pub fn ten(k: i32) -> f64 {
    format!("1e{k}").parse().expect("this is a number")
}

/// k with 10^k <= x < 10^(k + 1), for finite x above 0.
pub fn exponent(x: f64) -> i32 {
    let text = format!("{x:e}");
    let (_, k) = text.split_once('e').expect("this format has an exponent");
    k.parse().expect("the exponent of an f64")
}

/// m · 10^k without an error of its own.
fn times_ten(m: f64, k: i32) -> f64 {
    if k < 0 { m / ten(-k) } else { m * ten(k) }
}

/// The least and the greatest of the finite values, none without any.
fn ends(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.filter(|value| value.is_finite()).fold(None, |ends, value| {
        let (low, high) = ends.unwrap_or((value, value));
        Some((low.min(value), high.max(value)))
    })
}

impl Axis {
    /// Even steps of 1, 2 or 5 · 10^k inside the range of `values` and some room; never below 0 if no value is.
    pub fn linear(title: &str, values: impl Iterator<Item = f64>) -> Self {
        let (least, most) = ends(values).unwrap_or((0.0, 1.0));
        let room = match most - least {
            range if range > 0.0 => 0.04 * range,
            _ if most == 0.0 => 1.0,
            _ => 0.1 * most.abs(),
        };
        let low = if least >= 0.0 { (least - room).max(0.0) } else { least - room };
        let high = most + room;
        let mut axis = Self::even(title, low, high);
        axis.ticks.retain(|tick| (low..=high).contains(&tick.at));
        Self { low, high, ..axis }
    }

    /// From `low` to `high`, extended to whole steps.
    pub fn even(title: &str, low: f64, high: f64) -> Self {
        let rough = (high - low) / 5.0;
        let k = exponent(rough);
        let of_ten = rough / ten(k);
        let (step, k) = match of_ten {
            m if m <= 1.0 => (1.0, k),
            m if m <= 2.0 => (2.0, k),
            m if m <= 5.0 => (5.0, k),
            _ => (1.0, k + 1),
        };
        let unit = times_ten(step, k);
        // A rounding error must not add a step.
        let first = (low / unit + 1e-9).floor() as i64;
        let last = (high / unit - 1e-9).ceil() as i64;
        let digits = usize::try_from(-k).unwrap_or(0);
        let tick = |i: i64| {
            let at = times_ten(i as f64 * step, k);
            Tick { at, label: format!("{at:.digits$}") }
        };
        let ticks: Vec<Tick> = (first..=last).map(tick).collect();
        let (low, high) = (ticks[0].at, ticks[ticks.len() - 1].at);
        Self { title: title.to_owned(), ticks, low, high, scale: Scale::Linear }
    }

    /// Logarithmic around `values` that are above 0, from and to 1, 2 or 5 · 10^k.
    ///
    /// Up to 2.5 decades have labels at 1, 2 and 5, up to seven one for each, more of them every second or third.
    pub fn log(title: &str, values: impl Iterator<Item = f64>) -> Self {
        let (least, most) = ends(values.filter(|value| *value > 0.0)).unwrap_or((0.1, 1.0));
        let (least, most) = (least / 1.1, most * 1.1);
        let all: Vec<(f64, i32, f64)> = (exponent(least)..=exponent(most) + 1)
            .flat_map(|k| [1.0, 2.0, 5.0].map(|m| (times_ten(m, k), k, m)))
            .collect();
        let from = all.iter().rposition(|(at, ..)| *at <= least).unwrap_or(0);
        let to = all.iter().position(|(at, ..)| *at >= most).unwrap_or(all.len() - 1);
        let (low, high) = (all[from].0, all[to].0);
        let decades = (to - from) as f64 / 3.0;
        let every = ((decades / 7.0).ceil() as i32).max(1);
        let shown = |(_, k, m): &(f64, i32, f64)| decades <= 2.5 || *m == 1.0 && k.rem_euclid(every) == 0;
        let label = |k: i32, m: f64, at: f64| match k {
            -4..=-1 => format!("{at:.digits$}", digits = k.unsigned_abs() as usize),
            0..=4 => format!("{at:.0}"),
            _ => format!("{m:.0}e{k}"),
        };
        let inside = all[from..=to].iter().filter(|tick| shown(tick));
        let ticks = inside.map(|(at, k, m)| Tick { at: *at, label: label(*k, *m, *at) }).collect();
        Self { title: title.to_owned(), ticks, low, high, scale: Scale::Log }
    }

    /// A place for each label; label i is at i.
    pub fn places(title: &str, labels: impl Iterator<Item = String>) -> Self {
        let ticks: Vec<Tick> = labels.enumerate().map(|(i, label)| Tick { at: i as f64, label }).collect();
        let high = ticks.len().max(1) as f64 - 0.5;
        Self { title: title.to_owned(), ticks, low: -0.5, high, scale: Scale::Linear }
    }

    /// Where a value is: 0 at `low`, 1 at `high`; what lies outside goes to the nearer end.
    pub fn place(&self, value: f64) -> f64 {
        let at = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log if value <= self.low => 0.0,
            Scale::Log => ln64(value / self.low) / ln64(self.high / self.low),
        };
        at.clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|tick| tick.label.as_str()).collect()
    }

    #[test]
    fn even_steps_are_one_two_or_five_and_exact() {
        assert_eq!(labels(&Axis::even("", 0.0, 1.0)), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(labels(&Axis::even("", 2.1, 16.0)), ["0", "5", "10", "15", "20"]);
        assert_eq!(labels(&Axis::even("", 3.98, 4.53)), ["3.8", "4.0", "4.2", "4.4", "4.6"]);
        assert_eq!(labels(&Axis::even("", -1.0, 1.0)), ["-1.0", "-0.5", "0.0", "0.5", "1.0"]);
        assert_eq!(Axis::even("", 0.0, 1.0).ticks[3].at, 0.6);
        assert_eq!(labels(&Axis::even("", 0.0, 120_000.0)), ["0", "50000", "100000", "150000"]);
    }

    #[test]
    fn a_linear_axis_ends_with_its_values_and_a_little_room() {
        let axis = Axis::linear("", [4.0, 16.5].into_iter());
        assert_eq!((axis.low, axis.high), (3.5, 17.0));
        assert_eq!(labels(&axis), ["5", "10", "15"]);
        assert_eq!((axis.place(4.0), axis.place(17.0)), (0.5 / 13.5, 1.0));
    }

    #[test]
    fn one_value_or_none_still_has_an_axis() {
        for values in [vec![], vec![4.25], vec![0.0], vec![f64::NAN]] {
            let axis = Axis::linear("", values.iter().copied());
            assert!(axis.low < axis.high && axis.ticks.len() >= 2 && axis.low >= 0.0, "{axis:?}");
            let inside = |tick: &Tick| (axis.low..=axis.high).contains(&tick.at);
            assert!(axis.ticks.iter().all(inside), "{axis:?}");
            let axis = Axis::log("", values.iter().copied());
            assert!(axis.low < axis.high && axis.ticks.len() >= 2 && axis.low > 0.0, "{axis:?}");
        }
        let axis = Axis::log("", [0.01].into_iter());
        assert_eq!((axis.low, axis.high), (0.005, 0.02));
    }

    #[test]
    fn log_axes_have_labels_where_there_is_room_for_them() {
        assert_eq!(
            labels(&Axis::log("", [0.012, 0.3].into_iter())),
            ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5"]
        );
        let wide = Axis::log("", [3e-6, 2.0].into_iter());
        assert_eq!(labels(&wide), ["1e-5", "0.0001", "0.001", "0.01", "0.1", "1"]);
        assert_eq!((wide.low, wide.high), (2e-6, 5.0));
        let wider = Axis::log("", [1e-12, 1.0].into_iter());
        assert_eq!(labels(&wider), ["1e-12", "1e-10", "1e-8", "1e-6", "0.0001", "0.01", "1"]);
    }

    #[test]
    fn a_decade_is_as_long_as_the_next() {
        let axis = Axis::log("", [1.2e-4, 0.9].into_iter());
        assert_eq!((axis.low, axis.high), (1e-4, 1.0));
        for (value, place) in
            [(1e-4, 0.0), (1e-3, 0.25), (1e-2, 0.5), (0.1, 0.75), (1.0, 1.0), (0.0, 0.0), (9.0, 1.0)]
        {
            assert!((axis.place(value) - place).abs() < 1e-12, "{value}: {}", axis.place(value));
        }
    }

    #[test]
    fn exponents_are_those_of_the_decimal_number() {
        for (x, k) in
            [(1.0, 0), (9.999, 0), (10.0, 1), (1000.0, 3), (0.001, -3), (0.000_999, -4), (1e-300, -300)]
        {
            assert_eq!(exponent(x), k, "{x}");
        }
    }
}
