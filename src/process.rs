//! What the operating system says of this process and its disks.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;

use crate::units::Bytes;

/// The most memory this process held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PeakMemory {
    /// All resident pages, mapped files included, as the kernel records it; 0 if it does not say.
    pub resident: Bytes,
    /// Pages that are not backed by a file, sampled while work ran; 0 if the kernel does not say.
    pub anonymous: Bytes,
}

impl PeakMemory {
    /// Takes a sample.
    pub fn sample(&mut self) {
        let now = status();
        self.resident = self.resident.max(now.resident);
        self.anonymous = self.anonymous.max(now.anonymous);
    }
}

/// Runs `work`, and says what the process held meanwhile.
pub fn watching<T>(work: impl FnOnce() -> T) -> (T, PeakMemory) {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut peak = PeakMemory::default();
            while !ended.load(Ordering::Acquire) {
                peak.sample();
                std::thread::park_timeout(SAMPLE_EVERY);
            }
            peak.sample();
            peak
        });
        let raise = Raise { ended: &ended, sleeper: watcher.thread() };
        let result = work();
        drop(raise);
        (result, watcher.join().expect("the watcher does not panic"))
    })
}

const SAMPLE_EVERY: Duration = Duration::from_millis(20);

/// Raises a flag and wakes the thread that waits for it, also when work panics: a scope waits for its threads.
pub struct Raise<'a> {
    /// The flag.
    pub ended: &'a AtomicBool,
    /// Who waits.
    pub sleeper: &'a std::thread::Thread,
}

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        self.sleeper.unpark();
    }
}

/// `VmHWM` and `RssAnon` of `/proc/self/status`; zeros where there is none.
fn status() -> PeakMemory {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok().map(|kib: u64| Bytes(kib << 10))
    };
    PeakMemory {
        resident: field("VmHWM:").unwrap_or_default(),
        anonymous: field("RssAnon:").unwrap_or_default(),
    }
}

/// Bytes that an unprivileged process may still write to the file system of `path`.
///
/// # Errors
/// If `path` does not exist or cannot be asked.
pub fn free_space(path: &Path) -> io::Result<Bytes> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(Bytes(stat.f_bavail.saturating_mul(stat.f_frsize)))
}

/// Total and available memory of the machine; `None` where `/proc/meminfo` is missing.
pub fn machine_memory() -> Option<(Bytes, Bytes)> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok().map(|kib: u64| Bytes(kib << 10))
    };
    Some((field("MemTotal:")?, field("MemAvailable:")?))
}

/// The processor's name for itself; `None` where `/proc/cpuinfo` does not say.
pub fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start().strip_prefix(':')?.trim().to_owned())
}
