//! What the operating system says of this process and its disks.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::failure::Exit;
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

    /// The larger of two, number by number.
    pub fn max(self, other: Self) -> Self {
        Self { resident: self.resident.max(other.resident), anonymous: self.anonymous.max(other.anonymous) }
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

/// What a process says that has lost pages of a mapped file.
const LOST: &str = "error: a file that is being read has become shorter, or its disk does not answer\n\
                    help: see that nothing else writes the model's files; a build goes on with `--resume`\n";

/// From now on, touching a page of a mapped file that is no longer there ends the process with a message and
/// [`Exit::Machine`] instead of a signal.
///
/// # Errors
/// Those of the operating system.
pub fn guard_maps() -> io::Result<()> {
    let end = || {
        let _ = rustix::io::write(rustix::stdio::stderr(), LOST.as_bytes());
        signal_hook::low_level::exit(Exit::Machine as i32);
    };
    // SAFETY: the handler makes two system calls, and neither allocates nor locks.
    unsafe { signal_hook::low_level::register(signal_hook::consts::SIGBUS, end) }.map(drop)
}

/// How long [`lock`] waits for another process. The system takes the memory of a killed process apart before it closes
/// its files, and some gigabytes of pages take longer than a person needs to type `--resume`.
const LOCK_WAIT: Duration = Duration::from_secs(2);

/// The lock file at `path`, made if it is not there, and locked by this process; none if another one holds it, or takes
/// it away with its folder, for two seconds. The folder is made, too.
///
/// # Errors
/// Those of the file system, and what could not be done.
pub fn lock(path: &Path) -> Result<Option<File>, (&'static str, io::Error)> {
    let until = Instant::now() + LOCK_WAIT;
    loop {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|error| ("create the folder of", error))?;
        }
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(path);
        let file = file.map_err(|error| ("open", error))?;
        loop {
            match file.try_lock() {
                // Who has just ended took the folder away, and this file with it.
                Ok(()) if is_same_file(&file, path) => return Ok(Some(file)),
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if Instant::now() >= until => return Ok(None),
                Err(TryLockError::WouldBlock) => std::thread::sleep(SAMPLE_EVERY),
                Err(TryLockError::Error(error)) => return Err(("lock", error)),
            }
        }
        if Instant::now() >= until {
            return Ok(None);
        }
    }
}

/// Whether the open file is still what the path leads to.
pub fn is_same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let id = |meta: &std::fs::Metadata| (meta.dev(), meta.ino());
    matches!((file.metadata(), std::fs::metadata(path)), (Ok(a), Ok(b)) if id(&a) == id(&b))
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

#[cfg(test)]
mod tests {
    use super::*;

    /// In a process of its own, which it ends.
    #[test]
    #[ignore = "run by the test below"]
    fn touch_what_is_gone() {
        guard_maps().unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        // SAFETY: nobody else has the file; that it shrinks is what is tested.
        let map = unsafe { memmap2::Mmap::map(&file).unwrap() };
        file.set_len(0).unwrap();
        std::hint::black_box(map[1 << 19]);
    }

    #[test]
    fn a_file_that_shrinks_while_it_is_mapped_ends_the_process_with_a_message() {
        let name = "process::tests::touch_what_is_gone";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let done = child.args(["--exact", name, "--ignored", "--nocapture"]).output().unwrap();
        assert_eq!(done.status.code(), Some(Exit::Machine as i32), "{done:?}");
        assert!(String::from_utf8_lossy(&done.stderr).contains("has become shorter"), "{done:?}");
    }

    #[test]
    fn a_lock_is_waited_for_and_found_again_where_its_folder_was_taken_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("work/lock");
        let first = lock(&path).unwrap().expect("nobody holds it");
        assert!(lock(&path).unwrap().is_none(), "it is held all the time");
        std::thread::scope(|scope| {
            let second = scope.spawn(|| lock(&path).unwrap());
            std::thread::sleep(Duration::from_millis(200));
            std::fs::remove_dir_all(dir.path().join("work")).unwrap();
            drop(first);
            let second = second.join().unwrap().expect("it came free in time");
            assert!(is_same_file(&second, &path));
        });
    }
}
