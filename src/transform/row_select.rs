//! Which rows of a source tensor a module owns.

use std::ops::Range;

/// Rows `start .. start + len` of every `period` rows.
///
/// Row r of the module is row (r div len) · period + start + r mod len of the source. With
/// `period = len` it is the identity. `experts.gate_up_proj [E, 2I, H]` holds the gates in the first
/// I rows of each expert (period 2I, start 0, len I) and the ups in the second (start I).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RowSelect {
    /// Rows from one run to the next.
    pub period: u64,
    /// First row of the first run.
    pub start: u64,
    /// Rows in a run.
    pub len: u64,
}

impl RowSelect {
    /// All `rows` rows, in order.
    pub fn all(rows: u64) -> Self {
        Self { period: rows, start: 0, len: rows }
    }

    /// The source row of the module's row `row`.
    pub fn source_row(&self, row: u64) -> u64 {
        row / self.len * self.period + self.start + row % self.len
    }

    /// Cuts the module's `rows` rows into ranges of at most `most` that are contiguous in the source.
    pub fn panels(&self, rows: u64, most: u64) -> Vec<Range<u64>> {
        let mut panels = Vec::new();
        let mut row = 0;
        while row < rows {
            let run_left = self.len - row % self.len;
            let end = (row + run_left.min(most.max(1))).min(rows);
            panels.push(row..end);
            row = end;
        }
        panels
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ups_are_the_second_half_of_every_expert() {
        // Three experts of 2I = 8 rows.
        let ups = RowSelect { period: 8, start: 4, len: 4 };
        assert_eq!(
            (0..12).map(|r| ups.source_row(r)).collect::<Vec<_>>(),
            [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]
        );
        assert_eq!(ups.panels(12, 3), [0..3, 3..4, 4..7, 7..8, 8..11, 11..12]);
        assert_eq!(RowSelect::all(5).panels(5, 100), vec![0..5]);
    }
}
