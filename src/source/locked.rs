//! Pages that are never swapped out: for keys and passwords, and for work that cannot wait for a disk.
#![allow(unsafe_code, reason = "locks pages")]

use super::pages;
use super::{Pages, PrivatePages};
use crate::error::Error;
use crate::os;
use std::fmt;
use std::io;
use std::ptr::NonNull;

/// Pages for a pool whose blocks are locked in memory (mlock): brought into memory when they are first handed out, and
/// never swapped.
///
/// Spans of 64 KiB and more are locked when they are handed out. They stay locked while the pool keeps them for the
/// next block, until it returns them (`decay`, [`trim`](crate::strategy::Strategy::trim)). A child of `fork` has copies
/// that are not locked (mlock(2)). If the limit leaves no room, an allocation fails.
#[derive(Clone, Copy)]
pub struct LockedPages {
    /// Private, so that only [`new`](Self::new) and [`untried`](Self::untried) make one.
    _made: (),
}

impl fmt::Debug for LockedPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LockedPages")
    }
}

/// The smallest piece that a pool commits, which `new` tries.
const SPAN: usize = 64 << 10;

impl LockedPages {
    /// Locked pages. Locks one span to try whether that is possible.
    ///
    /// # Errors
    /// [`Error::LockLimit`] if the process's limit has no room for it; [`Error::SystemRefused`] if the system does not
    /// let it lock anything.
    pub fn new() -> Result<Self, Error> {
        let pages = Self::untried();
        let trial = pages.map(SPAN, SPAN).ok_or_else(|| refused(&io::Error::last_os_error()))?;
        // SAFETY: this mapping was just made, and nobody else has it. Unmapping it ends the lock too.
        let locked = unsafe {
            let locked = pages::lock(trial, SPAN);
            pages.unmap(trial, SPAN);
            locked
        };
        match locked {
            Ok(()) => Ok(pages),
            Err(error) => Err(refusal(&error)),
        }
    }

    /// Locked pages, without trying: if none can be locked, every allocation fails.
    #[must_use]
    pub const fn untried() -> Self {
        Self { _made: () }
    }

    /// How many bytes this process may lock in all; `None` if there is no limit.
    #[must_use]
    pub fn limit_bytes() -> Option<usize> {
        if cfg!(miri) {
            return None;
        }
        os::lock_limit_bytes()
    }
}

/// Why the trial failed.
fn refusal(error: &io::Error) -> Error {
    match LockedPages::limit_bytes() {
        Some(limit_bytes) if matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EPERM | libc::EAGAIN)) => {
            Error::LockLimit { requested_bytes: SPAN, limit_bytes, locked_bytes: locked_bytes() }
        }
        _ => refused(error),
    }
}

fn refused(error: &io::Error) -> Error {
    Error::SystemRefused {
        call: "mlock",
        reason: error.to_string(),
        advice: "allow it to the process (a container's seccomp profile may forbid it), or use Pool",
    }
}

/// How many bytes the process has locked (VmLck in /proc/self/status); 0 if the system does not say.
fn locked_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    let kib: Option<usize> = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok());
    kib.unwrap_or(0) << 10
}

// SAFETY: the pages of `PrivatePages`, which keep these promises; locking changes no contents.
unsafe impl Pages for LockedPages {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        PrivatePages.map(size_bytes, align)
    }

    unsafe fn commit(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: pages of a mapping of `map` (this function's contract).
        unsafe { pages::lock(start, size_bytes) }.is_ok()
    }

    fn maps_lazily(&self) -> bool {
        PrivatePages.maps_lazily()
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        // SAFETY: a whole mapping of `map`, not used any more (this function's contract). Unmapping it ends the locks
        // too.
        unsafe { PrivatePages.unmap(start, size_bytes) }
    }

    /// Unlocks the pages and discards them at once, since their contents must not be swapped out.
    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: pages of a mapping of `map` whose contents nobody needs (this function's contract).
        unsafe {
            pages::unlock(start, size_bytes);
            PrivatePages.discard(start, size_bytes)
        }
    }

    /// Does nothing: the system does not empty locked pages (madvise(2)).
    unsafe fn empty(&self, _start: NonNull<u8>, _size_bytes: usize) -> bool {
        false
    }
}
