//! The block that came back last, where the next one of its size finds it without the lock. A loop that makes an array
//! and lets it go needs no more than that.
//!
//! To the store it is in use until somebody has the lock, who puts it back first (`Large::with`).

use super::{Large, PAGE, Recent, Run, Store, now};
use crate::unattributed::unattributed;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

#[derive(Debug, Default)]
pub(super) struct Parked {
    /// NULL, or a block that nobody has. Its first page's address has 16 bits to spare, which say how many pages it has.
    /// Atomic instead of locked, so that it works in every child of `fork`.
    /// - set: from NULL by who gave the block up, in [`Large::park`].
    /// - set to NULL: by who has the block from then on.
    tagged: AtomicPtr<u8>,
    /// How many bytes more may be kept, as of when the lock was last let go. (Where another thread has it just now, a
    /// block more may be kept, until the next one is released.)
    room_bytes: AtomicUsize,
    /// Until when blocks come here: then old memory is to be looked for, under the lock. In nanoseconds.
    until: AtomicU64,
}

/// How many bits of a block's address are zero.
const TAG: usize = PAGE - 1;

fn pages_of(tagged: *mut u8) -> usize {
    tagged.addr() & TAG
}

impl Parked {
    /// Takes the block out, if this is it.
    #[inline]
    fn take(&self, tagged: *mut u8) -> Option<NonNull<u8>> {
        // Acquire pairs with the Release in `park`. Where it came back meanwhile, it is the same block again.
        let taken = self.tagged.compare_exchange(tagged, null_mut(), Ordering::Acquire, Ordering::Relaxed);
        NonNull::new(taken.ok()?.map_addr(|address| address & !TAG))
    }
}

#[inline]
fn nanoseconds(time: Duration) -> u64 {
    time.as_secs().saturating_mul(1_000_000_000).saturating_add(time.subsec_nanos().into())
}

/// Whether a block of so many pages serves one that needs fewer.
#[inline]
pub(super) fn fits(run_pages: usize, pages: usize) -> bool {
    run_pages >= pages && run_pages - pages <= pages / 8
}

impl Large {
    /// Leaves a block that came back here; false, and nothing was done, if it has to go to the store.
    #[inline]
    pub(super) fn park(&self, block: NonNull<u8>, run: Run, now: Duration) -> bool {
        let parked = &self.parked;
        run.pages <= TAG
            && parked.tagged.load(Ordering::Relaxed).is_null()
            && run.bytes() <= parked.room_bytes.load(Ordering::Relaxed)
            && nanoseconds(now) < parked.until.load(Ordering::Relaxed)
            && {
                let tagged = block.as_ptr().map_addr(|address| address | run.pages);
                // Release pairs with the Acquire in `take`.
                parked.tagged.compare_exchange(null_mut(), tagged, Ordering::Release, Ordering::Relaxed).is_ok()
            }
    }

    /// The block that is here, if it serves for so many pages.
    #[inline]
    pub(super) fn take_parked(&self, pages: usize) -> Option<NonNull<u8>> {
        let tagged = self.parked.tagged.load(Ordering::Relaxed);
        if fits(pages_of(tagged), pages) { self.parked.take(tagged) } else { None }
    }

    /// Under the lock: the block that is here comes back to the store.
    #[inline]
    pub(super) fn put_parked(&self, store: &mut Store) {
        let tagged = self.parked.tagged.load(Ordering::Relaxed);
        if !tagged.is_null()
            && let Some(block) = self.parked.take(tagged)
        {
            let _unattributed = unattributed();
            let run = Run { first: block.addr().get() / PAGE, pages: pages_of(tagged) };
            store.put(block, run, now());
        }
    }

    /// Under the lock, as it is let go: what may come here.
    #[inline]
    pub(super) fn open_parked(&self, store: &Store) {
        self.parked.room_bytes.store(store.room_bytes(), Ordering::Relaxed);
        self.parked.until.store(nanoseconds(store.look_again), Ordering::Relaxed);
    }
}

impl Recent {
    #[inline]
    pub(super) fn fits(&self, pages: usize) -> bool {
        fits(self.run.pages, pages)
    }
}

#[cfg(test)]
mod tests {
    use super::super::told::Told;
    use super::super::{Large, Taking};
    use super::{Duration, NonNull, PAGE};
    use crate::strategy::PoolOptions;
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
        !large.parked.tagged.load(Ordering::Relaxed).is_null()
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
        let start = super::now();
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
        let block = made(&large, &source, MIB);
        let run = super::super::run_of(block);
        let look_again = large.with(|store| store.look_again);
        assert!(!large.park(block, run, look_again), "then it is time");
        assert!(large.park(block, run, look_again - Duration::from_nanos(1)));
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
