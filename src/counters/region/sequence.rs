//! The sequence lock of a series: its version is odd while it is written. A reader that finds it odd, or changed after
//! reading, reads again.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The versions order what must be ordered.
pub(super) const RELAXED: Ordering = Ordering::Relaxed;

/// One writer, so no read-modify-write is needed.
#[inline]
pub(super) fn add(number: &AtomicU64, change: u64) {
    number.store(number.load(RELAXED).wrapping_add(change), RELAXED);
}

/// Runs `write` while the version is odd.
#[inline]
pub(super) fn write<R>(version: &AtomicU64, write: impl FnOnce() -> R) -> R {
    let before = version.load(RELAXED);
    version.store(before.wrapping_add(1), RELAXED);
    // Pairs with the fence in `read`: who sees a number of this write sees the odd version too.
    fence(Ordering::Release);
    let result = write();
    // Release pairs with the Acquire in `read`: who sees the even version sees all numbers.
    version.store(before.wrapping_add(2), Ordering::Release);
    result
}

/// What `read` sees while nobody writes. After many tries, what it saw last: the writer may have died.
pub(super) fn read<R>(version: &AtomicU64, mut read: impl FnMut() -> R) -> R {
    let mut tries = 0;
    loop {
        let before = version.load(Ordering::Acquire);
        let seen = read();
        fence(Ordering::Acquire);
        tries += 1;
        if before.is_multiple_of(2) && version.load(RELAXED) == before || tries == 1000 {
            return seen;
        }
        std::hint::spin_loop();
    }
}
