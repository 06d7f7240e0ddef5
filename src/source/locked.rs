//! Pages that are never swapped out: for keys and passwords, and for work that cannot wait for a disk.
#![allow(unsafe_code, reason = "locks pages")]

use super::pages;
use super::{Pages, PrivatePages};
use crate::error::Error;
use std::fmt;
use std::io;
use std::ptr::NonNull;

/// Pages for a pool whose blocks are locked in memory (mlock): brought in when they are first handed out, and never
/// swapped.
///
/// What is locked is what is handed out, by spans of 64 KiB and more, not what is only mapped; but also what the pool
/// keeps for the next one, until it gives that back (`decay`, [`trim`](crate::strategy::Strategy::trim)). A child of `fork` has copies that are not locked (mlock(2)). Where the
/// limit leaves no room, an allocation fails.
#[derive(Clone, Copy)]
pub struct LockedPages {
    /// Only [`new`](Self::new) and [`untried`](Self::untried) make one.
    _made: (),
}

impl fmt::Debug for LockedPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LockedPages")
    }
}

/// The least that a pool commits: the trial's size.
const SPAN: usize = 64 << 10;

impl LockedPages {
    /// Locked pages, tried out with one span.
    ///
    /// # Errors
    /// [`Error::LockLimit`] where the process's limit has no room for it; [`Error::SystemRefused`] where the system does
    /// not let it lock anything.
    pub fn new() -> Result<Self, Error> {
        let pages = Self::untried();
        let trial = pages.map(SPAN, SPAN).ok_or_else(|| refused(&io::Error::last_os_error()))?;
        // SAFETY: the mapping just made.
        let locked = unsafe { pages::lock(trial, SPAN) };
        // SAFETY: as above; nobody else has it. This takes the lock with it.
        unsafe { pages.unmap(trial, SPAN) };
        match locked {
            Ok(()) => Ok(pages),
            Err(error) => Err(refusal(&error)),
        }
    }

    /// Locked pages, not tried out: where none can be locked, every allocation fails.
    #[must_use]
    pub const fn untried() -> Self {
        Self { _made: () }
    }

    /// How many bytes this process may lock in all; nothing where there is no limit to it.
    #[must_use]
    pub fn limit_bytes() -> Option<usize> {
        if cfg!(miri) {
            return None;
        }
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a resource that every Linux has, and a place for its limits.
        let failed = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0;
        (!failed && limit.rlim_cur != libc::RLIM_INFINITY).then(|| limit.rlim_cur.try_into().unwrap_or(usize::MAX))
    }
}

/// Why the trial failed.
fn refusal(error: &io::Error) -> Error {
    match LockedPages::limit_bytes() {
        Some(limit_bytes) if matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EPERM | libc::EAGAIN)) => {
            Error::LockLimit { wanted_bytes: SPAN, limit_bytes, locked_bytes: locked_bytes() }
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

/// What the process has locked, as the system says (VmLck in /proc/self/status); 0 where it does not.
fn locked_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    let kib: Option<usize> = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok());
    kib.unwrap_or(0) << 10
}

// SAFETY: `PrivatePages`; locking changes no contents.
unsafe impl Pages for LockedPages {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        PrivatePages.map(size_bytes, align)
    }

    unsafe fn commit(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: the caller's promises are the same.
        unsafe { pages::lock(start, size_bytes) }.is_ok()
    }

    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        // SAFETY: the caller's promises are the same. This takes the locks with it.
        unsafe { PrivatePages.unmap(start, size_bytes) }
    }

    /// What lay there must not be swapped out after all: it goes at once.
    unsafe fn discard(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: the caller's promises are the same.
        unsafe { pages::unlock(start, size_bytes) };
        // SAFETY: as above.
        unsafe { PrivatePages.discard(start, size_bytes) }
    }

    /// The system does not empty pages that are locked (madvise(2)).
    unsafe fn empty(&self, _start: NonNull<u8>, _size_bytes: usize) -> bool {
        false
    }
}
