//! How the divergence is spread over positions.

use std::sync::LazyLock;

use crate::eval::kl::Position;
use crate::report::svg::ten;
use crate::stats::Percentiles;

/// The least divergence that has a bin, 10^`LEAST`.
const LEAST: i32 = -12;
/// The end of the last bin, 10^`MOST`.
const MOST: i32 = 3;

/// Ends of the bins: four a decade, the same for all models.
pub static EDGES: LazyLock<Vec<f64>> = LazyLock::new(edges);

/// 10^(i / 4), from 10^-12 to 10^3.
fn edges() -> Vec<f64> {
    // 10^(0 / 4) ... 10^(3 / 4): constants, since pow differs between platforms.
    const QUARTERS: [f64; 4] = [1.0, 1.778_279_410_038_922_8, 3.162_277_660_168_379_5, 5.623_413_251_903_491];
    let decade = |k: i32| QUARTERS.map(|quarter| if k < 0 { quarter / ten(-k) } else { quarter * ten(k) });
    let mut edges: Vec<f64> = (LEAST..MOST).flat_map(decade).collect();
    edges.push(ten(MOST));
    edges
}

/// Positions by their divergence.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    /// Positions with a divergence.
    pub positions: usize,
    /// Without, because a logit is not finite.
    pub not_finite: usize,
    /// Exactly 0.
    pub zero: usize,
    /// Above 0 and below the noise floor, or below the first edge.
    pub below: usize,
    /// All others: bin i is from edge i to below edge i + 1, the last one holds what is larger too.
    pub bins: Vec<usize>,
    /// Over all positions with a divergence; none without any.
    pub percentiles: Option<Percentiles>,
    /// The largest.
    pub most: Option<f64>,
}

impl Distribution {
    /// Of `positions`, with the dump's noise floor.
    pub fn of<'a>(positions: impl Iterator<Item = &'a Position>, floor: f64) -> Self {
        let (mut values, mut not_finite) = (Vec::new(), 0);
        for position in positions {
            match position.kl.is_finite() {
                true => values.push(position.kl),
                false => not_finite += 1,
            }
        }
        let last = EDGES.len() - 2;
        let mut bins = vec![0; last + 1];
        let (mut zero, mut below) = (0, 0);
        for value in values.iter().map(|value| f64::from(*value)) {
            if value <= 0.0 {
                zero += 1;
            } else if value < floor || value < EDGES[0] {
                below += 1;
            } else {
                let bin = EDGES.partition_point(|edge| *edge <= value) - 1;
                bins[bin.min(last)] += 1;
            }
        }
        Self {
            positions: values.len(),
            not_finite,
            zero,
            below,
            bins,
            percentiles: Percentiles::of(&values),
            most: values.iter().copied().reduce(f32::max).map(f64::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[f32], floor: f64) -> Distribution {
        let positions: Vec<Position> =
            values.iter().map(|kl| Position { kl: *kl, ..Position::NOT_FINITE }).collect();
        Distribution::of(positions.iter(), floor)
    }

    /// Bins that hold something: their lower edge and count.
    fn held(distribution: &Distribution) -> Vec<(f64, usize)> {
        let bins = distribution.bins.iter().enumerate().filter(|(_, count)| **count > 0);
        bins.map(|(i, count)| (EDGES[i], *count)).collect()
    }

    #[test]
    fn there_are_four_bins_a_decade_and_decades_begin_at_powers_of_ten() {
        assert_eq!(EDGES.len(), 61);
        assert_eq!((EDGES[0], EDGES[48], EDGES[52], EDGES[60]), (1e-12, 1.0, 10.0, 1000.0));
        for edges in EDGES.windows(2) {
            assert!((edges[1] / edges[0] - 10f64.powf(0.25)).abs() < 1e-12, "{edges:?}");
        }
    }

    #[test]
    fn every_position_is_counted_once() {
        let values = [0.0, 1e-13, 1e-6, 5e-4, 1.0, 1.5, 1.8, 10.0, 5000.0, f32::NAN, f32::INFINITY];
        let found = of(&values, 1e-5);
        assert_eq!((found.positions, found.not_finite, found.zero, found.below), (9, 2, 1, 2));
        let counted = [(EDGES[34], 1), (1.0, 2), (EDGES[49], 1), (10.0, 1), (EDGES[59], 1)];
        assert_eq!(held(&found), counted);
        assert_eq!(found.zero + found.below + found.bins.iter().sum::<usize>(), found.positions);
        assert_eq!(found.most, Some(5000.0));
    }

    #[test]
    fn without_a_floor_small_ones_have_bins_and_without_positions_there_is_nothing() {
        assert_eq!(held(&of(&[2e-12], 0.0)), [(EDGES[1], 1)]);
        let none = of(&[f32::NAN], 0.0);
        assert_eq!((none.positions, none.not_finite, none.percentiles, none.most), (0, 1, None, None));
    }
}
