//! How the lower triangle of a square matrix lies in memory.
//!
//! Panel p holds rows p·R to (p+1)·R − 1 (R = [`PANEL_ROWS`]; the last panel may be shorter), each with the
//! columns 0 to the panel's last row: (n² + n R) / 2 values of a matrix of order n, and rows that are contiguous.

use std::ops::Range;

/// Rows of a panel.
pub const PANEL_ROWS: usize = 256;

/// Values that all panels of a matrix of order n hold.
pub(super) fn len(n: usize) -> usize {
    let whole = n / PANEL_ROWS;
    start(whole) + n % PANEL_ROWS * n
}

/// Where panel p starts.
pub(super) fn start(p: usize) -> usize {
    PANEL_ROWS * PANEL_ROWS * p * (p + 1) / 2
}

/// The rows of panel p.
pub(super) fn rows(n: usize, p: usize) -> Range<usize> {
    p * PANEL_ROWS..n.min((p + 1) * PANEL_ROWS)
}

/// How many panels there are.
pub(super) fn count(n: usize) -> usize {
    n.div_ceil(PANEL_ROWS)
}

/// Where row i starts, and how many values it has: its panel's stride.
pub(super) fn row(n: usize, i: usize) -> (usize, usize) {
    let p = i / PANEL_ROWS;
    let stride = rows(n, p).end;
    (start(p) + (i - p * PANEL_ROWS) * stride, stride)
}

/// Rows that are worked on together: (first row, stride, values), from panel 0 on.
pub(super) fn strips(n: usize, values: &mut [f32], together: usize) -> Vec<(usize, usize, &mut [f32])> {
    let mut strips = Vec::new();
    let mut rest = values;
    let mut p = 0;
    while !rest.is_empty() {
        let rows = rows(n, p);
        let (panel, after) = rest.split_at_mut(rows.len() * rows.end);
        for (s, strip) in panel.chunks_mut(together * rows.end).enumerate() {
            strips.push((rows.start + s * together, rows.end, strip));
        }
        rest = after;
        p += 1;
    }
    strips
}
