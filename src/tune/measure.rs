//! What the process has used so far, as far as the system says.

use crate::os;
use std::fs;
use std::time::{Duration, Instant};

/// A moment, with what was used until then.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    pub(super) at: Instant,
    /// Processor time of all threads, in the program and in the kernel.
    pub(super) cpu: Duration,
    pub(super) faults: u64,
}

impl Moment {
    pub(super) fn now() -> Self {
        let (cpu, faults) = os::used().unwrap_or_default();
        Self { at: Instant::now(), cpu, faults }
    }
}

/// Forgets the peak of the resident memory. Whether the system has done so.
pub(super) fn forget_peak() -> bool {
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// The most resident memory since [`forget_peak`], in bytes.
pub(super) fn peak_resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// The resident memory now, in bytes.
pub(super) fn resident_bytes() -> Option<u64> {
    os::resident_bytes().map(|bytes| bytes as u64)
}
