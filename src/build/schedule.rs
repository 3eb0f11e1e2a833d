//! Runs a list of small jobs on a few threads.
//!
//! Jobs are listed in the order work should proceed, each with the earlier jobs it waits for. A free
//! thread always takes the first job that is ready, so that the threads stay close together in the
//! source: what one has read, the next still finds in memory. The list's order decides nothing else:
//! every job's result is the same whenever it runs.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};

/// Jobs and what they wait for.
#[derive(Debug)]
pub struct Schedule<J> {
    jobs: Vec<J>,
    /// How many jobs each one waits for.
    waits: Vec<u32>,
    /// Which jobs wait for each one.
    then: Vec<Vec<u32>>,
}

/// Why a run ended before its last job.
#[derive(Debug)]
pub enum Ended<E> {
    /// The stop flag was raised.
    Stopped,
    /// A job failed: of all failures, the one listed first, whatever the threads did.
    Failed(E),
}

struct State {
    ready: BTreeSet<u32>,
    waits: Vec<u32>,
    left: usize,
    running: usize,
    /// Index of the earliest failure.
    failed: Option<u32>,
}

/// Lets the other threads go when a job panics: they would wait for its end forever.
struct Release<'a> {
    state: &'a Mutex<State>,
    changed: &'a Condvar,
}

impl Drop for Release<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner).left = 0;
            self.changed.notify_all();
        }
    }
}

impl<J> Default for Schedule<J> {
    fn default() -> Self {
        Self { jobs: Vec::new(), waits: Vec::new(), then: Vec::new() }
    }
}

impl<J> Schedule<J> {
    /// Appends a job that runs after all of `after`, and returns its number.
    pub fn add(&mut self, job: J, after: impl IntoIterator<Item = u32>) -> u32 {
        let id =
            u32::try_from(self.jobs.len()).expect("panels are megabytes, so jobs are far fewer than 2^32");
        let mut waits = 0;
        for earlier in after {
            self.then[earlier as usize].push(id);
            waits += 1;
        }
        self.jobs.push(job);
        self.waits.push(waits);
        self.then.push(Vec::new());
        id
    }

    /// Runs every job on `threads` threads; `work` is also given the thread's number.
    ///
    /// After a failure, jobs listed before it still run, so that the failure reported is the first in
    /// the list whatever the number of threads.
    ///
    /// # Errors
    /// [`Ended`].
    pub fn run<E: Send>(
        self,
        threads: usize,
        stop: &AtomicBool,
        work: impl Fn(usize, &J) -> Result<(), E> + Sync,
    ) -> Result<(), Ended<E>>
    where
        J: Sync,
    {
        let ready = (0..self.jobs.len() as u32).filter(|id| self.waits[*id as usize] == 0).collect();
        let left = self.jobs.len();
        let state = Mutex::new(State { ready, waits: self.waits, left, running: 0, failed: None });
        let first_error = Mutex::new(None::<(u32, E)>);
        let changed = Condvar::new();
        let (jobs, then) = (&self.jobs, &self.then);
        let worker = |thread: usize| {
            let _release = Release { state: &state, changed: &changed };
            let mut held = state.lock().expect("no job panics while holding the lock");
            loop {
                let limit = held.failed.unwrap_or(u32::MAX);
                let next = held.ready.first().copied().filter(|id| *id < limit);
                if held.left == 0 || stop.load(Ordering::Relaxed) {
                    changed.notify_all();
                    return;
                }
                let Some(id) = next else {
                    if held.running == 0 {
                        // Only a failure can leave jobs with nobody running: what they wait for never ends.
                        changed.notify_all();
                        return;
                    }
                    held = changed.wait(held).expect("no job panics while holding the lock");
                    continue;
                };
                held.ready.remove(&id);
                held.running += 1;
                drop(held);
                let result = work(thread, &jobs[id as usize]);
                held = state.lock().expect("no job panics while holding the lock");
                held.running -= 1;
                held.left -= 1;
                match result {
                    Ok(()) => {
                        for later in &then[id as usize] {
                            held.waits[*later as usize] -= 1;
                            if held.waits[*later as usize] == 0 {
                                held.ready.insert(*later);
                            }
                        }
                    }
                    Err(error) => {
                        held.failed = Some(held.failed.map_or(id, |earlier| earlier.min(id)));
                        let mut first = first_error.lock().expect("held only here");
                        if first.as_ref().is_none_or(|(earlier, _)| id < *earlier) {
                            *first = Some((id, error));
                        }
                    }
                }
                changed.notify_all();
            }
        };
        std::thread::scope(|scope| {
            for thread in 1..threads.max(1) {
                let worker = &worker;
                scope.spawn(move || worker(thread));
            }
            worker(0);
        });
        if let Some((_, error)) = first_error.into_inner().expect("all threads have ended") {
            return Err(Ended::Failed(error));
        }
        let left = state.into_inner().expect("all threads have ended").left;
        if left > 0 { Err(Ended::Stopped) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_job_runs_once_and_after_what_it_waits_for() {
        for threads in [1, 2, 5] {
            let mut schedule = Schedule::default();
            for i in 0..200u32 {
                let after =
                    [i / 2, i / 3].into_iter().filter(|earlier| *earlier < i).collect::<BTreeSet<_>>();
                schedule.add(i, after);
            }
            let done = Mutex::new(Vec::new());
            schedule
                .run(threads, &AtomicBool::new(false), |_, job| {
                    let mut done = done.lock().unwrap();
                    for earlier in [job / 2, job / 3] {
                        assert!(earlier >= *job || done.contains(&earlier), "{job} before {earlier}");
                    }
                    done.push(*job);
                    Ok::<(), ()>(())
                })
                .unwrap();
            let mut done = done.into_inner().unwrap();
            done.sort_unstable();
            assert_eq!(done, (0..200).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_failure_reported_is_the_first_listed() {
        for threads in [1, 2, 8] {
            let mut schedule = Schedule::default();
            for i in 0..64u32 {
                schedule.add(i, []);
            }
            let result = schedule.run(threads, &AtomicBool::new(false), |_, job| {
                // The later a job, the sooner it fails.
                std::thread::sleep(std::time::Duration::from_micros(u64::from(64 - job) * 50));
                if *job >= 7 { Err(*job) } else { Ok(()) }
            });
            assert!(matches!(result, Err(Ended::Failed(7))), "{result:?}");
        }
    }

    #[test]
    fn a_panic_in_a_job_ends_the_run() {
        for threads in [1, 4] {
            let mut schedule = Schedule::default();
            for i in 0..20u32 {
                schedule.add(i, if i > 0 { vec![0] } else { vec![] });
            }
            let stop = AtomicBool::new(false);
            let run =
                || {
                    schedule.run(threads, &stop, |_, job| {
                        if *job == 0 { panic!("a defect") } else { Ok::<(), ()>(()) }
                    })
                };
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err());
        }
    }

    #[test]
    fn a_raised_stop_flag_ends_the_run() {
        let mut schedule = Schedule::default();
        for i in 0..100u32 {
            schedule.add(i, if i > 0 { vec![i - 1] } else { vec![] });
        }
        let stop = AtomicBool::new(false);
        let result = schedule.run(2, &stop, |_, job| {
            stop.store(*job == 5, Ordering::Relaxed);
            Ok::<(), ()>(())
        });
        assert!(matches!(result, Err(Ended::Stopped)));
    }
}
