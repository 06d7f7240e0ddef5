//! `Fallback`: blocks from one strategy, or from another if the first refuses.
//!
//! A record in front of each block ([`Prefixed`]) says which of the two made it; it goes back to that one.

use super::prefixed::Prefixed;
use super::{LiveBlock, Strategy};
use crate::survived::survived;
use std::fmt;
use std::ptr::NonNull;

/// Blocks of `first`; if it refuses, of `second`. For example 256 MiB of huge pages, then the heap.
///
/// A block is resized by the strategy that made it, and moves to the other one only if that refuses. Blocks are aligned
/// to the smaller of the two alignments. Each block costs 16 more bytes, rounded up to its maker's alignment, for a
/// record.
///
/// ```
/// use ctxalloc::{Buffer, register, strategy::{Budget, Budgeted, Fallback, Pool, System}};
///
/// let scarce = Budget::new("scarce", Some(1000));
/// let handler = register("scarce first", Fallback::new(Budgeted::new(Pool::new(), scarce.clone()), System))?;
/// let (inside, beside) = (Buffer::zeroed_in(handler, 900)?, Buffer::zeroed_in(handler, 900)?);
/// assert_eq!(scarce.in_use_bytes(), 900 + 64); // with its record; the other one is the heap's
/// drop((inside, beside));
/// assert_eq!(scarce.in_use_bytes(), 0);
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub struct Fallback<A, B> {
    first: Prefixed<A, Record>,
    second: Prefixed<B, Record>,
}

/// In front of each block, the same for both strategies.
#[derive(Clone, Copy)]
struct Record {
    /// How much to copy if the block moves to the other strategy.
    size_bytes: usize,
    maker: Maker,
}

#[derive(Clone, Copy, PartialEq)]
enum Maker {
    First,
    Second,
}

impl<A: Strategy, B: Strategy> Fallback<A, B> {
    /// Blocks of `first`, or of `second` if `first` refuses.
    #[must_use]
    pub fn new(first: A, second: B) -> Self {
        Self { first: Prefixed::new(first), second: Prefixed::new(second) }
    }

    /// The strategy that is asked first.
    pub fn first(&self) -> &A {
        &self.first.upstream
    }

    /// The strategy that is asked if the first one refuses.
    pub fn second(&self) -> &B {
        &self.second.upstream
    }

    fn make(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        self.make_by(Maker::First, size_bytes, zeroed).or_else(|| self.make_by(Maker::Second, size_bytes, zeroed))
    }

    fn make_by(&self, maker: Maker, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        let record = Record { size_bytes, maker };
        match maker {
            Maker::First => self.first.allocate(size_bytes, zeroed, record),
            Maker::Second => self.second.allocate(size_bytes, zeroed, record),
        }
    }
}

/// # Safety
/// - `block` is a live block of a fallback.
unsafe fn record_of(block: NonNull<u8>) -> Record {
    // SAFETY: the block is live, so a `Record` was written directly in front of it. Its position depends on the
    // record's type alone, so any strategy's type will do.
    unsafe { Prefixed::<super::System, Record>::read(block) }
}

// SAFETY: each block comes from one of the two strategies, behind a record (`Prefixed`), and goes back to the one that
// the record names. A block that moves is copied to a new one before it is released; if there is none, it stays as it
// was.
unsafe impl<A: Strategy, B: Strategy> Strategy for Fallback<A, B> {
    fn alignment(&self) -> usize {
        self.first.alignment().min(self.second.alignment())
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.make(size_bytes, false)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.make(size_bytes, true)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the block is live and from this fallback (this function's contract).
        let Record { size_bytes, maker } = unsafe { record_of(block) };
        let by_its_maker = match maker {
            // SAFETY: the block is live, and its record says that the first strategy made it.
            Maker::First => unsafe { self.first.resize(block, new_size_bytes) },
            // SAFETY: the block is live, and its record says that the second strategy made it.
            Maker::Second => unsafe { self.second.resize(block, new_size_bytes) },
        };
        if let Some(resized) = by_its_maker {
            // SAFETY: `resized` is live, and a record lies in front of it: the resize copied it along.
            unsafe { Prefixed::<A, Record>::write(resized, Record { size_bytes: new_size_bytes, maker }) };
            return Some(resized);
        }
        let other = if maker == Maker::First { Maker::Second } else { Maker::First };
        let moved = self.make_by(other, new_size_bytes, false)?;
        // SAFETY: both blocks are live, hence disjoint, and have at least the smaller of the two sizes.
        unsafe { moved.copy_from_nonoverlapping(block, size_bytes.min(new_size_bytes)) };
        // A panic of its maker would tell the caller that the old block is still there.
        // SAFETY: live, and released once; the caller uses the new one from here on.
        survived(|| unsafe { self.release(block) });
        Some(moved)
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the block is live and from this fallback (this function's contract).
        match unsafe { record_of(block) }.maker {
            // SAFETY: live, not used again, and its record says that the first strategy made it.
            Maker::First => unsafe { self.first.release(block) },
            // SAFETY: live, not used again, and its record says that the second strategy made it.
            Maker::Second => unsafe { self.second.release(block) },
        }
    }

    fn is_read_after_release(&self) -> bool {
        self.first().is_read_after_release() || self.second().is_read_after_release()
    }

    fn trim(&self) -> usize {
        self.first().trim() + self.second().trim()
    }

    /// The blocks of whichever of the two lists its blocks, or of both.
    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        match (self.first.live_blocks(), self.second.live_blocks()) {
            (Some(mut blocks), Some(others)) => {
                blocks.extend(others);
                blocks.sort_by_key(|block| std::cmp::Reverse(block.age));
                Some(blocks)
            }
            (one, other) => one.or(other),
        }
    }
}

impl<A: fmt::Debug, B: fmt::Debug> fmt::Debug for Fallback<A, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fallback").field("first", &self.first.upstream).field("second", &self.second.upstream).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::{Fallback, Strategy};
    use crate::strategy::live::Live;
    use crate::strategy::{Aligned, Budget, Budgeted, Faulty, Pool, System, conformance};

    type Scarce = Fallback<Budgeted<System>, Budgeted<Pool>>;

    /// 1000 bytes of one, 5000 of the other.
    fn scarce() -> (Scarce, Budget, Budget) {
        let (first, second) = (Budget::new("first", Some(1000)), Budget::new("second", Some(5000)));
        let strategy = Fallback::new(Budgeted::new(System, first.clone()), Budgeted::new(Pool::new(), second.clone()));
        (strategy, first, second)
    }

    #[test]
    fn fallback_keeps_the_strategy_contract_whoever_serves() {
        conformance::check(Fallback::new(Pool::new(), System));
        conformance::check_wrapper(|upstream| Fallback::new(upstream, System));
        conformance::check_wrapper(|upstream| Fallback::new(System, upstream));
        conformance::check(Fallback::new(Faulty::every(System, 1).expect("a count"), Aligned::CACHE_LINE));
        conformance::check(Fallback::new(Faulty::every(Aligned::CACHE_LINE, 2).expect("a count"), Pool::new()));
        let little = Budgeted::new(Pool::new(), Budget::new("little", Some(10_000)));
        conformance::check(Fallback::new(little, Fallback::new(Faulty::every(System, 3).expect("a count"), System)));
    }

    #[test]
    fn each_block_goes_back_to_the_one_that_made_it() {
        let (strategy, first, second) = scarce();
        let blocks = [900, 900, 50].map(|size| Live::of(&strategy, size));
        // The prefix of `Budgeted` is not charged, that of `Fallback` is: 16 bytes, rounded up to 16 and 64.
        assert_eq!((first.in_use_bytes(), second.in_use_bytes()), (900 + 50 + 32, 900 + 64));
        drop(blocks);
        assert_eq!((first.in_use_bytes(), second.in_use_bytes()), (0, 0));
    }

    #[test]
    fn a_block_that_outgrows_its_maker_moves_and_a_refusal_of_both_leaves_it() {
        let (strategy, first, second) = scarce();
        let mut block = Live::of(&strategy, 500);
        block.fill(7);
        assert!(block.resize(2000), "the second has room");
        assert_eq!(block.bytes()[..500], [7; 500]);
        assert_eq!((first.in_use_bytes(), second.in_use_bytes()), (0, 2064));
        assert!(!block.resize(6000), "neither has room");
        assert_eq!(block.bytes()[..500], [7; 500]);
        assert_eq!((first.in_use_bytes(), second.in_use_bytes()), (0, 2064));
        assert!(block.resize(100));
        assert_eq!(block.bytes(), [7; 100]);
        assert_eq!((first.in_use_bytes(), second.in_use_bytes()), (0, 164), "it stays where it is");
    }

    #[test]
    fn a_block_of_the_second_moves_to_the_first_where_only_that_has_room() {
        let second = Budget::new("second", Some(1000));
        // The second request is the first one's last: what it refuses goes on to the second.
        let strategy = Fallback::new(Faulty::every(System, 2).expect("a count"), Budgeted::new(System, second.clone()));
        let held = Live::of(&strategy, 8);
        let mut block = Live::of(&strategy, 100);
        assert_eq!(second.in_use_bytes(), 116, "the second made it");
        block.fill(7);
        assert!(block.resize(4000), "the first has room");
        assert_eq!(block.bytes()[..100], [7; 100]);
        assert_eq!(second.in_use_bytes(), 0);
        drop((held, block));
    }

    #[test]
    fn its_alignment_is_what_both_keep() {
        assert_eq!(Fallback::new(Aligned::new(4096).expect("in range"), System).alignment(), 16);
        assert_eq!(Fallback::new(Pool::new(), Aligned::new(4096).expect("in range")).alignment(), 64);
    }
}
