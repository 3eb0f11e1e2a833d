//! Rotary position embedding.

use crate::arch::decoder::Rope;
use crate::numeric::math::sin_cos64;

/// Cosines and sines of every position of a pass, made once for all layers.
///
/// cos[t, i] = cos(position(t) · frequency(i)), in f64 up to the last rounding.      [T, dims / 2]
#[derive(Debug, Clone, Default)]
pub struct Rotation {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rotation {
    /// The table for these positions.
    pub fn new(rope: &Rope, positions: impl Iterator<Item = usize>) -> Self {
        let frequencies = rope.frequencies();
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in positions {
            for frequency in &frequencies {
                let (s, c) = sin_cos64(position as f64 * frequency);
                cos.push(c as f32);
                sin.push(s as f32);
            }
        }
        Self { half: frequencies.len(), cos, sin }
    }

    /// Rotates one head of row `t` in place: pairs (i, i + dims / 2); dimensions from `dims` on stay.
    pub fn turn(&self, t: usize, head: &mut [f32]) {
        let at = t * self.half;
        let (low, high) = head.split_at_mut(self.half);
        let angles = self.cos[at..at + self.half].iter().zip(&self.sin[at..at + self.half]);
        for ((a, b), (cos, sin)) in low.iter_mut().zip(high).zip(angles) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}
