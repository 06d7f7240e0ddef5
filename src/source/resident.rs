//! How much memory the process has, as the system counts.
#![allow(unsafe_code, reason = "sysconf")]

/// The resident memory of this process (RSS) in bytes. `None` if the system does not say.
pub(crate) fn resident_bytes() -> Option<usize> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: usize = statm.split_whitespace().nth(1)?.parse().ok()?;
    // SAFETY: a call without pointers.
    let page_bytes = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
    pages.checked_mul(page_bytes)
}
