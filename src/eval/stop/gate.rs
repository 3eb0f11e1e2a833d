//! From cases to a verdict.

use serde::Serialize;

use super::Found;
use crate::generate::Finish;
use crate::stats::{CONFIDENCE, Interval, wilson};

/// What is still tolerable. Rates are parts of the cases where the reference does not do the same.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Limits {
    /// Empty answers.
    pub empty: f64,
    /// Answers that run to the most tokens.
    pub missed: f64,
    /// Answers that end in a repetition.
    pub loops: f64,
    /// Answers inside which the model would stop.
    pub early: f64,
    /// True ends where the model would go on.
    pub ends: f64,
    /// How much more probability than the teacher's an end may have at the start, on average.
    pub start_mass: f64,
    /// How much less at a true end.
    pub end_mass: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            empty: 0.01,
            missed: 0.05,
            loops: 0.05,
            early: 0.05,
            ends: 0.05,
            start_mass: 0.02,
            end_mass: 0.1,
        }
    }
}

/// What one side does in a frame, on average.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Means {
    /// P(end) at starts.
    pub start_p_end: f64,
    /// The largest.
    pub start_p_end_max: f64,
    /// Margin at starts.
    pub start_margin: f64,
    /// Starts where the model would stop at once.
    pub stops_at_once: usize,
    /// P(end) at true ends; null without any.
    pub end_p_end: Option<f64>,
    /// Margin at true ends.
    pub end_margin: Option<f64>,
    /// True ends where the model would go on.
    pub goes_on: usize,
    /// Empty answers.
    pub empty: usize,
    /// Answers that end in a repetition.
    pub loops: usize,
    /// Answers that ran to the most tokens.
    pub full: usize,
    /// Answers inside which the model would stop.
    pub early: usize,
}

/// A line of the gate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Line {
    /// What is judged.
    pub what: &'static str,
    /// Cases that do it, if cases are counted.
    pub count: Option<usize>,
    /// Of so many.
    pub of: usize,
    /// The rate, or the difference of means.
    pub value: f64,
    /// Wilson's 95 % interval of a rate.
    pub interval: Option<Interval>,
    /// The most that passes.
    pub limit: f64,
    /// Whether it does.
    pub pass: bool,
}

/// All cases of one frame.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FrameSummary {
    /// `raw` or `chat`.
    pub frame: String,
    /// Cases.
    pub cases: usize,
    /// Cases with a true end.
    pub ends: usize,
    /// The reference and its writer.
    pub teacher: Means,
    /// The candidate.
    pub candidate: Means,
    /// The gate.
    pub gate: Vec<Line>,
}

/// The verdict.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Whether every line of every frame passes.
    pub pass: bool,
    /// For people.
    pub headline: String,
    /// Each frame.
    pub frames: Vec<FrameSummary>,
}

/// Judges the cases, given with their frames.
pub fn summarize(cases: &[(String, Found)], limits: &Limits) -> Summary {
    let mut names: Vec<&String> = cases.iter().map(|(frame, _)| frame).collect();
    names.sort();
    names.dedup();
    let of =
        |name: &String| cases.iter().filter(|(frame, _)| frame == name).map(|(_, found)| found).collect();
    let frames: Vec<FrameSummary> = names.into_iter().map(|name| frame(name, of(name), limits)).collect();
    let failed: Vec<String> = frames
        .iter()
        .flat_map(|frame| {
            frame.gate.iter().filter(|line| !line.pass).map(|line| format!("{} ({})", line.what, frame.frame))
        })
        .collect();
    let headline = match failed.is_empty() {
        true => "pass".to_owned(),
        false => format!("FAIL: {}", failed.join(", ")),
    };
    Summary { pass: failed.is_empty(), headline, frames }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0usize), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / count as f64)
}

fn means(cases: &[&Found], teacher: bool) -> Means {
    let along = |found: &&Found| if teacher { found.teacher.clone() } else { found.candidate.clone() };
    let all: Vec<_> = cases.iter().map(along).collect();
    let ends = || all.iter().filter_map(|along| along.end);
    let count = |of: &dyn Fn(&Found) -> bool| cases.iter().filter(|found| of(found)).count();
    Means {
        start_p_end: mean(all.iter().map(|along| along.start.p_end)).unwrap_or(0.0),
        start_p_end_max: all.iter().map(|along| along.start.p_end).fold(0.0, f64::max),
        start_margin: mean(all.iter().map(|along| along.start.margin)).unwrap_or(0.0),
        stops_at_once: all.iter().filter(|along| along.start.margin > 0.0).count(),
        end_p_end: mean(ends().map(|row| row.p_end)),
        end_margin: mean(ends().map(|row| row.margin)),
        goes_on: ends().filter(|row| row.margin <= 0.0).count(),
        empty: count(&|f| if teacher { f.reference_empty } else { f.written.empty }),
        loops: count(&|f| if teacher { f.reference_loops } else { f.written.loop_period.is_some() }),
        full: count(&|f| if teacher { !f.ended } else { full(f) }),
        early: all.iter().filter(|along| along.early > 0).count(),
    }
}

fn full(found: &Found) -> bool {
    matches!(found.written.finish, Finish::Length | Finish::ContextFull)
}

fn frame(name: &str, cases: Vec<&Found>, limits: &Limits) -> FrameSummary {
    let (teacher, candidate) = (means(&cases, true), means(&cases, false));
    let n = cases.len();
    let ends = cases.iter().filter(|found| found.teacher.end.is_some()).count();
    let rate = |what, of: usize, limit: f64, counted: &dyn Fn(&Found) -> bool| {
        let count = cases.iter().filter(|found| counted(found)).count();
        let value = if of == 0 { 0.0 } else { count as f64 / of as f64 };
        let interval = (of > 0).then(|| wilson(count as u64, of as u64, CONFIDENCE));
        Line { what, count: Some(count), of, value, interval, limit, pass: value <= limit }
    };
    let stops = |row: Option<super::Row>| row.is_some_and(|row| row.margin > 0.0);
    let mut gate = vec![
        rate("empty answers", n, limits.empty, &|f| f.written.empty && !f.reference_empty),
        rate("missed stops", n, limits.missed, &|f| full(f) && f.ended),
        rate("loops", n, limits.loops, &|f| f.written.loop_period.is_some() && !f.reference_loops),
        rate("early stops", n, limits.early, &|f| f.candidate.early > f.teacher.early),
        rate("true ends passed over", ends, limits.ends, &|f| {
            stops(f.teacher.end) && !stops(f.candidate.end)
        }),
    ];
    let difference = |what, of: usize, value: f64, limit: f64| Line {
        what,
        count: None,
        of,
        value,
        interval: None,
        limit,
        pass: value <= limit,
    };
    let more = candidate.start_p_end - teacher.start_p_end;
    gate.push(difference("P(end) gained at starts", n, more, limits.start_mass));
    if let (Some(teacher), Some(candidate)) = (teacher.end_p_end, candidate.end_p_end) {
        gate.push(difference("P(end) lost at true ends", ends, teacher - candidate, limits.end_mass));
    }
    FrameSummary { frame: name.to_owned(), cases: n, ends, teacher, candidate, gate }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::stop::{Along, Row, Written};

    fn along(start: f64, end: f64) -> Along {
        let row = |margin: f64| Row { p_end: if margin > 0.0 { 0.9 } else { 0.1 }, margin };
        Along { start: row(start), end: Some(row(end)), early: 0 }
    }

    fn found(empty: bool, finish: Finish, candidate: Along) -> Found {
        Found {
            ended: true,
            reference_tokens: 3,
            reference_empty: false,
            reference_loops: false,
            teacher: along(-5.0, 5.0),
            candidate,
            written: Written { tokens: Vec::new(), text: String::new(), finish, empty, loop_period: None },
        }
    }

    #[test]
    fn a_candidate_like_its_teacher_passes_and_each_fault_fails_its_own_line() {
        let good = || found(false, Finish::EndToken, along(-5.0, 5.0));
        let verdict = |bad: Found| {
            let mut cases: Vec<_> = (0..9).map(|_| ("chat".to_owned(), good())).collect();
            cases.push(("chat".to_owned(), bad));
            summarize(&cases, &Limits::default())
        };
        let passed = verdict(good());
        assert!(passed.pass && passed.headline == "pass", "{passed:?}");
        for (bad, lines) in [
            (found(true, Finish::EndToken, along(-5.0, 5.0)), vec!["empty answers"]),
            (found(false, Finish::Length, along(-5.0, 5.0)), vec!["missed stops"]),
            (found(false, Finish::EndToken, along(-5.0, -5.0)), vec!["true ends passed over"]),
            (found(false, Finish::EndToken, along(5.0, 5.0)), vec!["P(end) gained at starts"]),
        ] {
            let verdict = verdict(bad);
            let failed: Vec<_> =
                verdict.frames[0].gate.iter().filter(|line| !line.pass).map(|line| line.what).collect();
            assert_eq!(failed, lines);
            assert!(!verdict.pass && verdict.headline.starts_with("FAIL: "));
        }
        let mut early = good();
        early.candidate.early = 2;
        assert!(!verdict(early).pass);
        let mut loops = good();
        loops.written.loop_period = Some(3);
        assert!(!verdict(loops).pass);
        let mut both = found(true, Finish::EndToken, along(-5.0, 5.0));
        both.reference_empty = true;
        assert!(verdict(both).pass, "what the reference does too is no fault");
    }
}
