//! Numbers as people read them.

use crate::stats::Interval;
use crate::units::Bytes;

/// Nats: four significant digits, three and an exponent below 1e-3, `0` for nothing at all.
pub fn nats(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v < 1e-3 => format!("{value:.2e}"),
        v if v < 1e-2 => format!("{value:.6}"),
        v if v < 1e-1 => format!("{value:.5}"),
        v if v < 1.0 => format!("{value:.4}"),
        _ => format!("{value:.3}"),
    }
}

/// `[low, high]` in nats.
pub fn nats_between(interval: Interval) -> String {
    format!("[{}, {}]", nats(interval.low), nats(interval.high))
}

/// A share in percent, with one digit after the point.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// `[low, high]` in percent.
pub fn percent_between(interval: Interval) -> String {
    format!("[{:.1}, {:.1}] %", 100.0 * interval.low, 100.0 * interval.high)
}

/// A size; GiB where it has some.
pub fn size(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 => format!("{:.2} GiB", b as f64 / (1u64 << 30) as f64),
        b => Bytes(b).to_string(),
    }
}

/// A count with thin spaces between thousands.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            out.push('\u{2009}');
        }
        out.push(digit);
    }
    out
}

/// Seconds, minutes, hours.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 100.0 => format!("{s:.1} s"),
        s if s < 6000.0 => format!("{:.1} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_digits_that_matter() {
        let shown = [0.0, 1.234e-7, 0.001_234_6, 0.043_214, 0.5, 12.345_6].map(nats);
        assert_eq!(shown, ["0", "1.23e-7", "0.001235", "0.04321", "0.5000", "12.346"]);
        assert_eq!(
            [0, 999, 1000, 1234567].map(count),
            ["0", "999", "1\u{2009}000", "1\u{2009}234\u{2009}567"]
        );
        assert_eq!(size(3 << 29), "1.50 GiB");
        assert_eq!(size(1536), "1.50 KiB");
        assert_eq!(percent(0.98765), "98.8 %");
        assert_eq!([59.94, 600.0, 7200.0].map(duration), ["59.9 s", "10.0 min", "2.0 h"]);
    }
}
