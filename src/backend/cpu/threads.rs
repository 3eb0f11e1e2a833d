//! A team of threads for work of microseconds.
//!
//! A decoder step at one token is some hundred matrix-vector products of 10 to 100 µs each. Threads that sleep
//! between them would cost as much as they bring, so a worker that has run out of work looks for more for some
//! ten microseconds before it sleeps. A worker that comes late does not hold anybody up: the caller works
//! through the parts itself and waits only for parts that have begun.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// How often a worker looks for work before it sleeps: about 50 µs.
const LOOKS: u32 = 4000;

/// The team. Dropping it ends the threads.
#[derive(Debug)]
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held while a job runs: one at a time.
    running: Mutex<()>,
}

type Job = *const (dyn Fn(usize) + Sync);

#[derive(Debug)]
struct Shared {
    /// Bit 0: a job is open. Bits 1 to 15: workers inside it. The rest: how many jobs there have been.
    gate: AtomicUsize,
    /// The next part to do, and how many there are.
    next: AtomicUsize,
    parts: AtomicUsize,
    job: Mutex<Option<SendJob>>,
    sleepers: Mutex<usize>,
    wake: Condvar,
    panicked: AtomicUsize,
    end: AtomicUsize,
}

#[derive(Debug, Clone, Copy)]
struct SendJob(Job);
// SAFETY: the closure is `Sync`, and `Threads::run` outlives every use of the pointer.
unsafe impl Send for SendJob {}

const OPEN: usize = 1;
const INSIDE: usize = 2;
const INSIDE_MASK: usize = 0xfffe;
const JOB: usize = 0x1_0000;

impl Threads {
    /// A team of `count`, the caller included.
    ///
    /// # Panics
    /// If `count` is 0 or above 16384, or the system gives no threads.
    pub fn new(count: usize) -> Self {
        assert!((1..=1 << 14).contains(&count), "a team of 1 to 16384");
        let shared = Arc::new(Shared {
            gate: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            parts: AtomicUsize::new(0),
            job: Mutex::new(None),
            sleepers: Mutex::new(0),
            wake: Condvar::new(),
            panicked: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
        });
        let workers = (1..count)
            .map(|i| {
                let shared = shared.clone();
                let name = format!("tqc-{i}");
                let work = move || shared.work();
                std::thread::Builder::new().name(name).spawn(work).expect("the system has threads to give")
            })
            .collect();
        Self { shared, workers, running: Mutex::new(()) }
    }

    /// How many threads work, the caller included.
    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `part(i)` once for every i below `parts`, in any order, on any thread; returns when all are done.
    ///
    /// # Panics
    /// If a part panics.
    pub fn run(&self, parts: usize, part: &(dyn Fn(usize) + Sync)) {
        if parts <= 1 || self.workers.is_empty() {
            (0..parts).for_each(part);
            return;
        }
        // A panic of an earlier job leaves nothing behind that this one could trip over.
        let _one = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        shared.next.store(0, Ordering::Relaxed);
        shared.parts.store(parts, Ordering::Relaxed);
        let job: *const (dyn Fn(usize) + Sync + '_) = part;
        // SAFETY: only the lifetime changes; nobody calls it after `close`, which comes before this returns.
        *lock(&shared.job) =
            Some(SendJob(unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(job) }));
        shared.gate.fetch_add(JOB | OPEN, Ordering::Release);
        if *lock(&shared.sleepers) > 0 {
            shared.wake.notify_all();
        }
        let close = Close(shared);
        shared.take_parts(part);
        drop(close);
        assert_eq!(shared.panicked.swap(0, Ordering::Relaxed), 0, "a part of parallel work panicked");
    }

    /// [`Threads::run`] over ranges of at most `size` of `0..len`.
    pub fn ranges(&self, len: usize, size: usize, part: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
        self.run(len.div_ceil(size), &|i| part(i * size..len.min((i + 1) * size)));
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.end.store(1, Ordering::Release);
        drop(lock(&self.shared.sleepers));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

/// Closes the job and waits for those inside, also when the caller's own part panics.
struct Close<'a>(&'a Shared);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        self.0.gate.fetch_and(!OPEN, Ordering::AcqRel);
        let mut looks = 0u32;
        while self.0.gate.load(Ordering::Acquire) & INSIDE_MASK != 0 {
            looks += 1;
            if looks < LOOKS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        *lock(&self.0.job) = None;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn take_parts(&self, part: &(dyn Fn(usize) + Sync)) {
        let parts = self.parts.load(Ordering::Relaxed);
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= parts {
                return;
            }
            part(i);
        }
    }

    fn work(&self) {
        let mut seen = 0;
        let mut looks = 0u32;
        loop {
            if self.end.load(Ordering::Acquire) == 1 {
                return;
            }
            let gate = self.gate.load(Ordering::Acquire);
            if gate & OPEN == 1 && gate / JOB != seen {
                // Only a job that is still open may be entered: its closure is alive until those inside leave.
                let entered =
                    self.gate.compare_exchange_weak(gate, gate + INSIDE, Ordering::AcqRel, Ordering::Relaxed);
                if entered.is_ok() {
                    seen = gate / JOB;
                    looks = 0;
                    let job = lock(&self.job).expect("an open job has a closure");
                    // SAFETY: `run` waits for this worker to leave before the closure goes.
                    let part = unsafe { &*job.0 };
                    let done =
                        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.take_parts(part)));
                    if done.is_err() {
                        self.panicked.store(1, Ordering::Relaxed);
                    }
                    self.gate.fetch_sub(INSIDE, Ordering::AcqRel);
                }
                continue;
            }
            looks += 1;
            if looks < LOOKS {
                std::hint::spin_loop();
                continue;
            }
            let mut sleepers = lock(&self.sleepers);
            *sleepers += 1;
            // A job or the end may have come since the last look; who announces it takes this lock after.
            while self.end.load(Ordering::Acquire) == 0 {
                let gate = self.gate.load(Ordering::Acquire);
                if gate & OPEN == 1 && gate / JOB != seen {
                    break;
                }
                sleepers = self.wake.wait(sleepers).unwrap_or_else(PoisonError::into_inner);
            }
            *sleepers -= 1;
            looks = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_done_once_in_thousands_of_jobs_of_every_size() {
        for count in [1, 2, 3, 8] {
            let threads = Threads::new(count);
            for job in 0..3000usize {
                let parts = job % 37;
                let done: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                threads.run(parts, &|i| {
                    done[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(done.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{count} threads, job {job}");
                if job % 1000 == 999 {
                    // Long enough for the workers to fall asleep.
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
            }
        }
    }

    #[test]
    fn a_panic_of_a_part_reaches_the_caller_and_leaves_the_team_usable() {
        let threads = Threads::new(3);
        for bad in 0..20 {
            let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                threads.run(20, &|i| assert_ne!(i, bad, "as planned"));
            }));
            assert!(run.is_err());
            let sum = AtomicUsize::new(0);
            threads.run(100, &|i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 4950);
        }
    }

    #[test]
    fn callers_on_several_threads_take_turns() {
        let threads = Threads::new(2);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let sum = AtomicUsize::new(0);
                        threads.ranges(1000, 7, &|range| {
                            sum.fetch_add(range.sum::<usize>(), Ordering::Relaxed);
                        });
                        assert_eq!(sum.into_inner(), 499_500);
                    }
                });
            }
        });
    }
}
