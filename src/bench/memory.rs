//! How fast memory is read.

use std::time::Instant;

/// Bytes that all threads together read: more than any last-level cache here holds.
const BYTES: usize = 512 << 20;

/// Bytes per second that `threads` threads read together, the best of some passes.
pub fn read_bandwidth(threads: usize) -> f64 {
    let values = vec![1u64; BYTES / 8];
    let parts: Vec<&[u64]> = values.chunks(values.len().div_ceil(threads)).collect();
    let pass = || {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in &parts {
                scope.spawn(|| {
                    let sums = part.as_chunks::<32>().0.iter().fold([0u64; 32], |mut sums, values| {
                        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum ^= value);
                        sums
                    });
                    std::hint::black_box(sums);
                });
            }
        });
        start.elapsed().as_secs_f64()
    };
    let best = (0..5).map(|_| pass()).fold(f64::INFINITY, f64::min);
    BYTES as f64 / best
}
