//! Symmetric matrices, half of them stored, and their triangular factor.
//!
//! For second moments of activations, H = Σ_t x_tᵀ x_t: [`Symmetric`] sums them, [`Factor`] splits
//! H + λ I = Mᵀ D M, which is what an error-feedback quantizer walks along. All sums have an order that depends
//! on sizes only: results are the same for every instruction set and number of threads.

mod factor;
mod panels;
mod symmetric;

pub use factor::{Factor, NotPositive};
pub use panels::PANEL_ROWS;
pub use symmetric::Symmetric;

#[cfg(test)]
mod tests {
    /// splitmix64 and Box and Muller.
    pub(crate) struct Random(pub(crate) u64);

    impl Random {
        fn uniform(&mut self) -> f64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (((z ^ (z >> 31)) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
        }

        fn normal(&mut self) -> f64 {
            (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
        }

        pub(crate) fn normals(&mut self, count: usize) -> Vec<f32> {
            (0..count).map(|_| self.normal() as f32).collect()
        }
    }

    /// Three threads, each with every third part.
    pub(crate) fn threads(count: usize, part: &(dyn Fn(usize) + Sync)) {
        std::thread::scope(|scope| {
            for thread in 0..3 {
                scope.spawn(move || (thread..count).step_by(3).for_each(part));
            }
        });
    }
}
