//! Diagonal factors along an axis.

use std::sync::Arc;

use super::{Axis, Panel, Transform};
use crate::isa::Isa;
use crate::quant::Grain;

/// w'[n, k] = f32(w[n, k] · factor), the factor of column k, or of row n mod L of L factors; the product in f64.
///
/// A gain that is stored zero-centred, w for 1 + w, becomes f32((1 + w) · factor - 1).
///
/// All factors are finite; one that is 0 cannot be undone.
#[derive(Debug, Clone)]
pub struct Scale {
    axis: Axis,
    factors: Arc<[f64]>,
    centre: f64,
}

impl Scale {
    /// One factor for each column, or for each row of a matrix (of each expert's).
    ///
    /// # Panics
    /// Without factors.
    pub fn new(axis: Axis, factors: Arc<[f64]>) -> Self {
        assert!(!factors.is_empty(), "an axis has channels");
        Self { axis, factors, centre: 0.0 }
    }

    /// Factors of zero-centred gains.
    pub fn zero_centred(factors: Arc<[f64]>) -> Self {
        Self { centre: 1.0, ..Self::new(Axis::Input, factors) }
    }

    fn each(&self, panel: Panel<'_>, change: impl Fn(f64, f64) -> f64) {
        let Panel { values, row_elements, first_row } = panel;
        let each = |value: &mut f32, factor: f64| {
            *value = (change(f64::from(*value) + self.centre, factor) - self.centre) as f32;
        };
        for (row, values) in (first_row..).zip(values.chunks_exact_mut(row_elements)) {
            match self.axis {
                Axis::Input => {
                    assert_eq!(row_elements, self.factors.len(), "a factor for each column");
                    values.iter_mut().zip(&*self.factors).for_each(|(value, factor)| each(value, *factor));
                }
                Axis::Output => {
                    let factor = self.factors[(row % self.factors.len() as u64) as usize];
                    values.iter_mut().for_each(|value| each(value, factor));
                }
            }
        }
    }
}

impl Transform for Scale {
    fn id(&self) -> &'static str {
        "scale"
    }

    fn grain(&self) -> Grain {
        Grain::Rows
    }

    fn apply(&self, panel: Panel<'_>, _isa: Isa, _scratch: &mut Vec<f32>) {
        self.each(panel, |value, factor| value * factor);
    }

    fn invert(&self, panel: Panel<'_>, _isa: Isa, _scratch: &mut Vec<f32>) {
        self.each(panel, |value, factor| value / factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(scale: &Scale, first_row: u64, values: &[f32], row_elements: usize) -> Vec<f32> {
        let mut values = values.to_vec();
        scale.apply(Panel { values: &mut values, row_elements, first_row }, Isa::Scalar, &mut Vec::new());
        values
    }

    #[test]
    fn scales_columns_and_rows_wherever_a_panel_starts() {
        let columns = Scale::new(Axis::Input, Arc::from([2.0, 0.5]));
        assert_eq!(applied(&columns, 0, &[1.0, 2.0, 3.0, 4.0], 2), [2.0, 1.0, 6.0, 2.0]);
        // Two experts of three rows; the panel starts in the first one's last row.
        let rows = Scale::new(Axis::Output, Arc::from([10.0, 100.0, 1000.0]));
        assert_eq!(applied(&rows, 2, &[1.0, 2.0, 3.0], 1), [1000.0, 20.0, 300.0]);
    }

    #[test]
    fn the_product_is_rounded_once() {
        let factor = 1.0 + 2f64.powi(-30);
        let scale = Scale::new(Axis::Input, Arc::from([factor]));
        let value = 1.0 + f32::EPSILON;
        assert_eq!(applied(&scale, 0, &[value], 1), [(f64::from(value) * factor) as f32]);
    }
}
