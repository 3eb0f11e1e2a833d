//! A date and time of day, and `strftime` for it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Seconds since 1970-01-01T00:00:00, in UTC.
///
/// Templates that print the date get the same one on every machine at a time, so the same conversation gives the
/// same tokens. (`transformers` takes the machine's zone.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    seconds: i64,
    micros: u32,
}

/// Days of a week and months of a year, in English: a template must not depend on the machine's language.
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Days from 0000-03-01 to 1970-01-01, in the proleptic Gregorian calendar.
const EPOCH_DAYS: i64 = 719_468;
/// Days in 400 years.
const ERA_DAYS: i64 = 146_097;

impl Moment {
    /// The machine's clock.
    pub fn now() -> Self {
        // A clock before 1970 is wrong by decades; the epoch is as good.
        Self::since_epoch(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
    }

    /// A time after the epoch.
    pub fn since_epoch(time: Duration) -> Self {
        // Times beyond the year 9999 have no date in Python either.
        Self { seconds: time.as_secs().min(253_402_300_799) as i64, micros: time.subsec_micros() }
    }

    /// Year, month (1 to 12), day (1 to 31).
    fn date(self) -> (i64, usize, i64) {
        // Counted from March, the leap day is a year's last (Howard Hinnant, "chrono-compatible low-level date
        // algorithms").
        let days = self.seconds.div_euclid(86_400) + EPOCH_DAYS;
        let era = days.div_euclid(ERA_DAYS);
        let day_of_era = days.rem_euclid(ERA_DAYS);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * march_month + 2) / 5 + 1;
        let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        (year, month as usize, day)
    }

    /// The text of `format`, as Python's `datetime.strftime` with glibc in the C locale.
    ///
    /// `-`, `_` and `0` after the `%` leave out, replace by spaces, or write the leading zeros.
    ///
    /// # Errors
    /// The directive that is not known.
    pub fn strftime(self, format: &str) -> Result<String, String> {
        let (year, month, day) = self.date();
        let second_of_day = self.seconds.rem_euclid(86_400);
        let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
        let weekday = (self.seconds.div_euclid(86_400) + 4).rem_euclid(7);
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let lengths = [31, 28 + i64::from(leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let day_of_year = lengths[..month - 1].iter().sum::<i64>() + day;
        let twelve = (hour + 11) % 12 + 1;

        let mut out = String::new();
        let mut rest = format.chars();
        while let Some(c) = rest.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = rest.next();
            let flag = directive.filter(|c| matches!(c, '-' | '_' | '0'));
            if flag.is_some() {
                directive = rest.next();
            }
            let mut number = |value: i64, width: usize, pad: char| {
                let pad = match flag {
                    Some('_') => ' ',
                    Some('0') => '0',
                    _ => pad,
                };
                let digits = value.to_string();
                if flag != Some('-') {
                    out.extend(std::iter::repeat_n(pad, width.saturating_sub(digits.len())));
                }
                out.push_str(&digits);
            };
            match directive {
                Some('Y') => number(year, 1, '0'),
                Some('C') => number(year / 100, 2, '0'),
                Some('y') => number(year % 100, 2, '0'),
                Some('m') => number(month as i64, 2, '0'),
                Some('d') => number(day, 2, '0'),
                Some('e') => number(day, 2, ' '),
                Some('H') => number(hour, 2, '0'),
                Some('k') => number(hour, 2, ' '),
                Some('I') => number(twelve, 2, '0'),
                Some('l') => number(twelve, 2, ' '),
                Some('M') => number(minute, 2, '0'),
                Some('S') => number(second, 2, '0'),
                Some('j') => number(day_of_year, 3, '0'),
                Some('u') => number((weekday + 6) % 7 + 1, 1, '0'),
                Some('w') => number(weekday, 1, '0'),
                Some('U') => number((day_of_year + 6 - weekday) / 7, 2, '0'),
                Some('W') => number((day_of_year + 6 - (weekday + 6) % 7) / 7, 2, '0'),
                Some('f') => out.push_str(&format!("{:06}", self.micros)),
                Some('A') => out.push_str(DAYS[weekday as usize]),
                Some('a') => out.push_str(&DAYS[weekday as usize][..3]),
                Some('B') => out.push_str(MONTHS[month - 1]),
                Some('b' | 'h') => out.push_str(&MONTHS[month - 1][..3]),
                Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
                Some('P') => out.push_str(if hour < 12 { "am" } else { "pm" }),
                // A time without a zone has no name for it.
                Some('z' | 'Z') => {}
                Some('n') => out.push('\n'),
                Some('t') => out.push('\t'),
                Some('%') => out.push('%'),
                Some(short @ ('F' | 'T' | 'D' | 'R' | 'r' | 'c' | 'x' | 'X')) => {
                    let long = match short {
                        'F' => "%Y-%m-%d",
                        'T' | 'X' => "%H:%M:%S",
                        'D' | 'x' => "%m/%d/%y",
                        'R' => "%H:%M",
                        'r' => "%I:%M:%S %p",
                        _ => "%a %b %e %H:%M:%S %Y",
                    };
                    out.push_str(&self.strftime(long)?);
                }
                Some(other) => return Err(format!("%{other}")),
                None => return Err("%".to_owned()),
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values: Python's `datetime(...).strftime`, see `goldens/templates`; and days known by name.
    #[test]
    fn known_days() {
        let at = |seconds| Moment::since_epoch(Duration::from_secs(seconds));
        assert_eq!(at(0).strftime("%A %F %T %j").unwrap(), "Thursday 1970-01-01 00:00:00 001");
        assert_eq!(at(951_782_400).strftime("%a %-d %b %Y %j").unwrap(), "Tue 29 Feb 2000 060");
        assert_eq!(at(1_721_952_000).strftime("%d %b %Y").unwrap(), "26 Jul 2024");
        assert_eq!(at(u64::MAX).strftime("%F").unwrap(), "9999-12-31");
        assert_eq!(at(0).strftime("%Q"), Err("%Q".to_owned()));
        assert_eq!(at(0).strftime("100%"), Err("%".to_owned()));
    }
}
