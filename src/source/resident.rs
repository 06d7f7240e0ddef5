//! How much memory the process has, as the system counts.

use super::pages::page_bytes;

/// The resident memory of this process (RSS) in bytes. `None` if the system does not say, as Linux alone does.
pub(crate) fn resident_bytes() -> Option<usize> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: usize = statm.split_whitespace().nth(1)?.parse().ok()?;
    pages.checked_mul(page_bytes())
}
