//! Addresses of the driver's own allocations, whose memory a child of `fork` does not inherit.
//!
//! The child takes them for itself, without memory, before anything else runs there. Otherwise the system would soon
//! map other pages there, and pools, which go by addresses, would take the blocks of the one for those of the other.

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// A mapping; both numbers are 0 when it is gone, and then it serves the next one. Never freed.
struct Mapping {
    start: AtomicUsize,
    size_bytes: AtomicUsize,
    next: AtomicPtr<Mapping>,
}

/// A list without a lock, which another thread could hold at the fork.
static FIRST: AtomicPtr<Mapping> = AtomicPtr::new(null_mut());

/// All that there ever were.
fn all() -> impl Iterator<Item = &'static Mapping> {
    // Acquire pairs with the Release of the push.
    // SAFETY: mappings in the list are leaked, so a reference to one is good for ever; only their atomics change.
    let first = unsafe { FIRST.load(Ordering::Acquire).as_ref() };
    // SAFETY: what follows a mapping in the list was leaked before it, too.
    std::iter::successors(first, |mapping| unsafe { mapping.next.load(Ordering::Relaxed).as_ref() })
}

/// Notes whole pages of the driver's, before a block lies in them.
pub(super) fn note(start: NonNull<u8>, size_bytes: usize) {
    let start = start.addr().get();
    let is_taken =
        |mapping: &&Mapping| mapping.start.compare_exchange(0, start, Ordering::Acquire, Ordering::Relaxed).is_ok();
    if let Some(mapping) = all().find(is_taken) {
        mapping.size_bytes.store(size_bytes, Ordering::Release);
        return;
    }
    let (start, size_bytes) = (AtomicUsize::new(start), AtomicUsize::new(size_bytes));
    let made: &'static Mapping =
        Box::leak(Box::new(Mapping { start, size_bytes, next: AtomicPtr::new(FIRST.load(Ordering::Relaxed)) }));
    while let Err(first) = FIRST.compare_exchange(
        made.next.load(Ordering::Relaxed),
        std::ptr::from_ref(made).cast_mut(),
        Ordering::Release,
        Ordering::Relaxed,
    ) {
        made.next.store(first, Ordering::Relaxed);
    }
}

/// Forgets what the driver has freed.
pub(super) fn forget(start: NonNull<u8>) {
    if let Some(mapping) = all().find(|mapping| mapping.start.load(Ordering::Relaxed) == start.addr().get()) {
        mapping.size_bytes.store(0, Ordering::Relaxed);
        mapping.start.store(0, Ordering::Release);
    }
}

/// In the child, by its only thread: nothing else is mapped there from here on. What it has inherited stays.
#[cfg(all(target_os = "linux", not(miri)))]
pub(super) fn take() {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    for mapping in all() {
        let (start, size_bytes) = (mapping.start.load(Ordering::Relaxed), mapping.size_bytes.load(Ordering::Relaxed));
        if size_bytes > 0 {
            let place: *mut u8 = std::ptr::without_provenance_mut(start);
            // SAFETY: a mapping that replaces none, and that nobody can access. If it fails there is something already.
            unsafe { libc::mmap(place.cast(), size_bytes, libc::PROT_NONE, flags, -1, 0) };
        }
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
pub(super) fn take() {}
