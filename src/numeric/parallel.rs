//! Work that the caller may spread over threads.
//!
//! Pure modules start no threads: they cut their work into parts that share nothing, and are given the means to
//! run them.

use std::sync::Mutex;

/// Calls `part(i)` for every i below `count`, each once, in any order and on any threads.
pub type Parallel<'a> = &'a (dyn Fn(usize, &(dyn Fn(usize) + Sync)) + Sync);

/// One part after the other, on the caller's thread.
pub fn serial(count: usize, part: &(dyn Fn(usize) + Sync)) {
    (0..count).for_each(part);
}

/// Calls `work(i, piece)` on each piece of some values, in parallel, the last one first.
///
/// Of a lower triangle the last piece is the longest.
///
/// # Panics
/// If `work` does.
pub fn in_chunks<'a, T: Send + 'a>(
    parallel: Parallel<'_>,
    pieces: impl Iterator<Item = &'a mut [T]>,
    work: &(dyn Fn(usize, &mut [T]) + Sync),
) {
    let pieces: Vec<_> = pieces.map(Mutex::new).collect();
    parallel(pieces.len(), &|i| {
        let i = pieces.len() - 1 - i;
        work(i, &mut pieces[i].lock().expect("each piece is visited once"));
    });
}
