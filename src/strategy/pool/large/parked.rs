//! The block that came back last, where the next one of its size finds it without the lock. A loop that makes an array
//! and lets it go needs no more than that.
//!
//! To the store it is in use until somebody has the lock, who puts it back first (`Large::with`).

use super::store::fits;
use crate::strategy::pool::clock::nanoseconds;
use crate::strategy::pool::geometry::PAGE;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

#[derive(Debug, Default)]
pub(super) struct Parked {
    /// NULL, or a block that nobody has. A block's address has 16 bits to spare, which say how many pages this one has.
    /// Atomic instead of locked, so that it works in every child of `fork`.
    /// - set: from NULL, by who gives the block up.
    /// - set to NULL: by who has the block from then on.
    tagged: AtomicPtr<u8>,
    /// How many bytes more may be kept, as of when the lock was last let go. (Where another thread has it just now, a
    /// block more may be kept, until the next one is released.)
    room_bytes: AtomicUsize,
    /// When old memory is to be looked for, in nanoseconds.
    look_again: AtomicU64,
}

/// The bits of a block's address that are zero.
const TAG: usize = PAGE - 1;

fn pages_of(tagged: *mut u8) -> usize {
    tagged.addr() & TAG
}

impl Parked {
    /// Takes a block of so many pages; false, and nothing was done, if it has to go to the store.
    #[inline]
    pub(super) fn put(&self, block: NonNull<u8>, pages: usize) -> bool {
        if pages > TAG
            || !self.tagged.load(Ordering::Relaxed).is_null()
            || pages * PAGE > self.room_bytes.load(Ordering::Relaxed)
        {
            return false;
        }
        let tagged = block.as_ptr().map_addr(|address| address | pages);
        // Release pairs with the Acquire in `take_tagged`.
        self.tagged.compare_exchange(null_mut(), tagged, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// The block, if it serves for so many pages.
    #[inline]
    pub(super) fn take(&self, pages: usize) -> Option<NonNull<u8>> {
        let tagged = self.tagged.load(Ordering::Relaxed);
        if fits(pages_of(tagged), pages) { self.take_tagged(tagged) } else { None }
    }

    /// The block, if there is one, and how many pages it has.
    #[inline]
    pub(super) fn take_any(&self) -> Option<(NonNull<u8>, usize)> {
        let tagged = self.tagged.load(Ordering::Relaxed);
        if tagged.is_null() { None } else { Some((self.take_tagged(tagged)?, pages_of(tagged))) }
    }

    #[inline]
    fn take_tagged(&self, tagged: *mut u8) -> Option<NonNull<u8>> {
        // Acquire pairs with the Release in `put`. If the block was taken and came back meanwhile, it is as it was.
        let taken = self.tagged.compare_exchange(tagged, null_mut(), Ordering::Acquire, Ordering::Relaxed);
        NonNull::new(taken.ok()?.map_addr(|address| address & !TAG))
    }

    /// Says, as the lock is let go, how much may come here, and when old memory is to be looked for.
    #[inline]
    pub(super) fn open(&self, room_bytes: usize, look_again: Duration) {
        self.room_bytes.store(room_bytes, Ordering::Relaxed);
        self.look_again.store(nanoseconds(look_again), Ordering::Relaxed);
    }

    /// Whether it is time to look for old memory.
    #[inline]
    pub(super) fn is_due(&self, now: Duration) -> bool {
        nanoseconds(now) >= self.look_again.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.tagged.load(Ordering::Relaxed).is_null()
    }
}

#[cfg(test)]
mod tests {
    use super::super::told::Told;
    use super::super::{Large, Taking};
    use super::{Duration, NonNull, PAGE};
    use crate::strategy::PoolOptions;
    use crate::strategy::pool::clock::now;
    use crate::strategy::pool::options::Retention;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    const MIB: usize = 1 << 20;

    fn large(warm_bytes: usize) -> Large {
        // Under Miri a block takes seconds.
        let decay = Duration::from_secs(100_000);
        Large::new(1, Retention::new(PoolOptions { warm_bytes, decay }))
    }

    fn made(large: &Large, source: &Told, size_bytes: usize) -> NonNull<u8> {
        large.allocate(source, size_bytes, Taking::AsItIs).expect("memory")
    }

    /// One that has seen a block come back.
    fn used(source: &Told) -> Large {
        let large = large(64 * MIB);
        large.release(source, made(&large, source, MIB));
        large
    }

    fn is_parked(large: &Large) -> bool {
        !large.parked.is_empty()
    }

    #[test]
    fn the_next_one_of_its_size_needs_no_lock() {
        let source = Told::default();
        let large = used(&source);
        let block = made(&large, &source, MIB);
        // With the lock, `allocate` and `release` would wait for this thread.
        large.store.with(|_| {
            for size_bytes in [MIB, MIB - PAGE, MIB - 2 * PAGE + 1, MIB] {
                large.release(&source, block);
                assert!(is_parked(&large));
                assert_eq!(made(&large, &source, size_bytes), block, "{size_bytes}");
                assert!(!is_parked(&large));
            }
        });
        large.release(&source, block);
        assert_eq!((large.kept().in_use, large.kept().warm), (0, MIB), "it is unused as any other");
        assert!(!is_parked(&large), "who asked had the lock");
        large.close(&source);
    }

    #[test]
    fn other_sizes_leave_it_to_the_store() {
        let source = Told::default();
        let large = used(&source);
        for size_bytes in [MIB + 1, MIB - 3 * PAGE, MIB / 2, 8 * MIB] {
            let block = made(&large, &source, MIB);
            large.release(&source, block);
            assert!(is_parked(&large));
            let other = made(&large, &source, size_bytes);
            assert!(!is_parked(&large), "{size_bytes}");
            assert_eq!(large.kept().in_use, size_bytes.next_multiple_of(PAGE));
            large.release(&source, other);
            assert_eq!(large.kept().in_use, 0, "{size_bytes}");
        }
        assert!(large.trim(&source) >= 8 * MIB);
        assert_eq!(large.kept().warm, 0);
        large.close(&source);
    }

    #[test]
    fn a_second_one_goes_to_the_store() {
        let source = Told::default();
        let large = used(&source);
        let blocks = [(); 3].map(|()| made(&large, &source, MIB));
        blocks.into_iter().for_each(|block| large.release(&source, block));
        assert_eq!((large.kept().in_use, large.kept().warm), (0, 3 * MIB));
        let again = [(); 3].map(|()| made(&large, &source, MIB));
        assert!(blocks.iter().all(|block| again.contains(block)));
        again.into_iter().for_each(|block| large.release(&source, block));
        large.close(&source);
    }

    #[test]
    fn what_may_not_be_kept_is_not_kept_here() {
        let source = Told::default();
        for (warm_bytes, is_kept) in [(0, false), (MIB - 1, false), (MIB, true)] {
            let large = large(warm_bytes);
            for number in 0..3 {
                large.release(&source, made(&large, &source, MIB));
                assert_eq!(is_parked(&large), is_kept && number > 0, "{warm_bytes}");
            }
            large.close(&source);
        }
    }

    #[test]
    fn it_goes_to_the_system_as_old_as_others() {
        let source = Told::default();
        let large =
            Large::new(1, Retention::new(PoolOptions { decay: Duration::from_secs(8), ..PoolOptions::default() }));
        let start = now();
        large.release(&source, made(&large, &source, MIB));
        large.release(&source, made(&large, &source, MIB));
        assert!(is_parked(&large));
        let again = large.decay(&source, start + Duration::from_secs(1)).expect("something is kept");
        assert!(again <= start + Duration::from_secs(2));
        assert_eq!(large.kept().warm, MIB);
        assert_eq!(large.decay(&source, start + Duration::from_secs(10)), None);
        assert_eq!(large.kept().warm, 0);
        large.close(&source);
    }

    #[test]
    fn once_in_a_moment_old_memory_is_looked_for() {
        let source = Told::default();
        let large = used(&source);
        let look_again = large.with(|store| store.look_again);
        assert!(large.parked.is_due(look_again) && !large.parked.is_due(look_again - Duration::from_nanos(1)));
        large.with(|store| store.turn(look_again, Duration::from_secs(8)));
        assert!(large.parked.is_due(look_again + Duration::from_secs(1)) && !large.parked.is_due(look_again));
        large.close(&source);
    }

    #[test]
    fn no_two_threads_get_the_same_one() {
        const ROUNDS: usize = if cfg!(miri) { 20 } else { 20_000 };
        let (source, parked) = (Told::default(), AtomicUsize::new(0));
        let large = used(&source);
        thread::scope(|scope| {
            for number in 1..=4_u8 {
                let (large, source, parked) = (&large, &source, &parked);
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let block = made(large, source, MIB - round % 2 * PAGE);
                        // SAFETY: a live block that is larger, and only this thread's.
                        unsafe {
                            block.write(number);
                            if round % 16 == 0 {
                                thread::yield_now();
                            }
                            assert_eq!(block.read(), number);
                        }
                        large.release(source, block);
                        parked.fetch_add(usize::from(is_parked(large)), Ordering::Relaxed);
                    }
                });
            }
        });
        assert!(parked.into_inner() > 0);
        let kept = large.kept();
        assert_eq!(kept.in_use, 0);
        assert_eq!(large.trim(&source), kept.warm);
        large.close(&source);
    }
}
