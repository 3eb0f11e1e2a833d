//! What the operating system says of this process and its disks.

use std::io;
use std::path::Path;

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
