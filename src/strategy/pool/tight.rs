//! Blocks for those who need an alignment of 16 bytes at most: those of up to 48 bytes are tiny ones.

use super::{Pool, classes};
use crate::source::Pages;
use std::alloc::Layout;
use std::ptr::NonNull;

impl<P: Pages> Pool<P> {
    /// [`allocate`](super::Strategy::allocate) of a block that is aligned to what `layout` wants. A block of up to 48
    /// bytes that needs an alignment of no more than 16 takes 16, 32 or 48 bytes, where `allocate` takes 64. `None`
    /// also for an alignment above 64.
    ///
    /// [`release`](super::Strategy::release) takes it back. [`resize`](super::Strategy::resize) keeps the alignment up
    /// to 16, or that of 64 if the layout wanted more than 16.
    ///
    /// ```
    /// use ctxalloc::strategy::{Pool, Strategy};
    /// use std::alloc::Layout;
    ///
    /// let pool = Pool::new();
    /// let word = pool.allocate_layout(Layout::new::<u64>()).expect("memory");
    /// assert!(word.cast::<u64>().is_aligned());
    /// // SAFETY: the block is live and from this pool.
    /// unsafe { pool.release(word) };
    /// ```
    #[inline]
    #[must_use = "the block leaks"]
    pub fn allocate_layout(&self, layout: Layout) -> Option<NonNull<u8>> {
        let class = if layout.align() <= classes::TINY_ALIGN {
            classes::TIGHT.find(layout.size())
        } else if layout.align() <= classes::ALIGN {
            classes::ALIGNED.find(layout.size())
        } else {
            return None;
        };
        self.make(class, layout.size(), false)
    }

    /// A block that is aligned to 16 at least.
    #[inline]
    pub(super) fn allocate_tight(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.make(classes::TIGHT.find(size_bytes), size_bytes, false)
    }
}

#[cfg(test)]
mod tests {
    use super::super::resize::room_bytes;
    use super::{Pool, classes};
    use crate::strategy::{Strategy, conformance};
    use proptest::prelude::*;
    use std::alloc::Layout;
    use std::collections::BTreeMap;
    use std::ptr::NonNull;
    use std::thread;

    /// A pool by `allocate_layout`, for layouts aligned to 16.
    #[derive(Debug)]
    struct Tight(Pool);

    // SAFETY: blocks are the pool's, which keeps the contract, and all are aligned to 16.
    unsafe impl Strategy for Tight {
        fn alignment(&self) -> usize {
            classes::TINY_ALIGN
        }
        fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
            self.0.allocate_layout(Layout::from_size_align(size_bytes, 16).ok()?)
        }
        fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
            let block = self.allocate(size_bytes)?;
            // SAFETY: a new block of so many bytes.
            unsafe { block.write_bytes(0, size_bytes) };
            Some(block)
        }
        unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
            // SAFETY: a live block of the pool (this function's contract).
            unsafe { self.0.resize(block, new_size_bytes) }
        }
        unsafe fn release(&self, block: NonNull<u8>) {
            // SAFETY: a live block of the pool, given up (this function's contract).
            unsafe { self.0.release(block) }
        }
    }

    #[test]
    fn blocks_of_a_layout_keep_the_strategy_contract() {
        let pool = Pool::new();
        conformance::check(Tight(pool.clone()));
        assert_eq!(pool.regions_after_trim(), 0, "nothing is left");
    }

    /// How many bytes a live block of a pool takes.
    fn room(block: NonNull<u8>) -> usize {
        // SAFETY: the callers have the block.
        unsafe { room_bytes(block) }
    }

    #[test]
    fn a_layout_gets_its_alignment_and_no_more_room_than_that_needs() {
        let pool = Pool::new();
        let mut blocks = Vec::new();
        for size in (0..140).step_by(if cfg!(miri) { 31 } else { 1 }).chain([1000, 300_000]) {
            for align in [1, 2, 4, 8, 16, 32, 64] {
                let block = pool.allocate_layout(Layout::from_size_align(size, align).expect("valid")).expect("memory");
                let is_tiny = size <= 48 && align <= 16;
                assert!(block.addr().get().is_multiple_of(if is_tiny { align } else { 64 }), "{size}, {align}");
                if is_tiny {
                    assert_eq!(room(block), size.max(1).next_multiple_of(16));
                } else if size <= 512 {
                    assert_eq!(room(block), size.max(1).next_multiple_of(64));
                }
                blocks.push(block);
            }
            assert_eq!(pool.allocate_layout(Layout::from_size_align(size, 128).expect("valid")), None);
        }
        // SAFETY: this pool made them, and they are released here only.
        blocks.into_iter().for_each(|block| unsafe { pool.release(block) });
        assert_eq!(pool.regions_after_trim(), 0, "nothing is left");
    }

    #[test]
    fn a_tiny_block_stays_while_it_has_room_and_then_moves_to_the_smallest() {
        let pool = Pool::new();
        let resize = |block, size, expected| {
            // SAFETY: a live block of this pool, and the old pointer is not used again.
            let resized = unsafe { pool.resize(block, size) }.expect("memory");
            assert_eq!(room(resized), expected, "{size}");
            (resized, resized == block)
        };
        let layout = Layout::from_size_align(48, 8).expect("valid");
        let (block, stays) = resize(pool.allocate_layout(layout).expect("memory"), 10, 48);
        assert!(stays);
        let (block, _) = resize(block, 49, 64);
        let (block, stays) = resize(block, 10, 64);
        assert!(stays, "nobody knows whether its owner needs more than 16");
        let (small, _) = resize(pool.allocate_layout(Layout::new::<u64>()).expect("memory"), 17, 32);
        // SAFETY: this pool made them, and they are released here only.
        [block, small].into_iter().for_each(|block| unsafe { pool.release(block) });
    }

    /// What a block is expected to be.
    struct Kept {
        block: NonNull<u8>,
        size: usize,
        align: usize,
        is_sized: bool,
        seed: u8,
    }

    // SAFETY: the block is plain memory that this value alone owns.
    unsafe impl Send for Kept {}

    impl Kept {
        fn make(pool: &Pool, kind: u8, size: usize, seed: u8) -> Self {
            let layout = |align| Layout::from_size_align(size, align).expect("valid");
            let (block, align) = match kind {
                0 => (pool.allocate(size), 64),
                1 => (pool.allocate_layout(layout(8)), 16),
                2 => (pool.allocate_layout(layout(64)), 64),
                _ => (pool.allocate_sized(size, seed.is_multiple_of(2)), 16),
            };
            let kept = Self { block: block.expect("memory"), size, align, is_sized: kind > 2, seed };
            kept.fill();
            kept
        }

        fn fill(&self) {
            // SAFETY: a live block of so many bytes, which this value alone has.
            unsafe { self.block.write_bytes(self.seed, self.size) };
        }

        /// It has its alignment and note, its first bytes are as they were written.
        fn check(&self, written: usize) {
            assert!(self.block.addr().get().is_multiple_of(self.align), "{} bytes", self.size);
            // SAFETY: live, with so many bytes written; where it is a sized one it has a note.
            unsafe {
                assert!(!self.is_sized || Pool::requested_bytes(self.block) == self.size, "{} bytes", self.size);
                assert!((0..written).all(|at| self.block.add(at).read() == self.seed), "{} bytes", self.size);
            }
        }

        fn resize(&mut self, pool: &Pool, size: usize) {
            // SAFETY: a live block of this pool; the old pointer is not used again.
            let resized = unsafe {
                if self.is_sized { pool.resize_sized(self.block, size) } else { pool.resize(self.block, size) }
            };
            let kept = self.size.min(size);
            (self.block, self.size) = (resized.expect("memory"), size);
            self.check(kept);
            self.fill();
        }

        fn release(self, pool: &Pool) {
            self.check(self.size);
            // SAFETY: this pool made it, and it is released here only.
            unsafe {
                if self.is_sized {
                    assert_eq!(pool.release_sized(self.block), self.size);
                } else {
                    pool.release(self.block);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 2 } else { 60 }, failure_persistence: None, ..ProptestConfig::default()
        })]

        /// As single values in a map, whatever lies beside them.
        #[test]
        fn tiny_blocks_beside_others_keep_what_they_have(
            steps in prop::collection::vec((0..8_u8, 0..4_u8, 0..140_usize, any::<usize>()), 1..if cfg!(miri) { 60 } else { 600 })
        ) {
            let pool = Pool::new();
            let mut live: Vec<Kept> = Vec::new();
            for (number, (what, kind, size, which)) in steps.into_iter().enumerate() {
                match what {
                    0..4 => live.push(Kept::make(&pool, kind, size, number as u8)),
                    4..6 if !live.is_empty() => {
                        let at = which % live.len();
                        live[at].resize(&pool, size);
                    }
                    6 if !live.is_empty() => live.swap_remove(which % live.len()).release(&pool),
                    7 => {
                        // Half of them, on another thread.
                        let given: Vec<_> = live.drain(..live.len() / 2).collect();
                        thread::scope(|scope| {
                            scope.spawn(|| given.into_iter().for_each(|kept| kept.release(&pool)));
                        });
                    }
                    _ => {}
                }
                let mut ends = BTreeMap::new();
                live.iter().for_each(|kept| {
                    ends.insert(kept.block.addr().get(), kept.block.addr().get() + kept.size.max(1));
                });
                prop_assert_eq!(ends.len(), live.len(), "a block was handed out twice");
                prop_assert!(ends.values().zip(ends.keys().skip(1)).all(|(end, next)| end <= next), "they overlap");
            }
            live.into_iter().for_each(|kept| kept.release(&pool));
            prop_assert_eq!(pool.regions_after_trim(), 0, "no block is lost");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "so many blocks take minutes under Miri")]
    fn tiny_blocks_take_a_byte_each_for_their_size() {
        let pool = Pool::new();
        let blocks: Vec<_> =
            (0..10_000).map(|at| (pool.allocate_sized(at % 49, false).expect("memory"), at % 49)).collect();
        let pages = pool.inner.heap.kept().in_use >> 16;
        assert!(pages <= 3 + 10_000 * 32 / (1 << 16), "{pages} pages");
        for &(block, size) in &blocks {
            // SAFETY: `allocate_sized` made it, and it is released below only.
            assert_eq!(unsafe { Pool::requested_bytes(block) }, size);
        }
        for (block, size) in blocks {
            // SAFETY: `allocate_sized` made it, and it is released here only.
            assert_eq!(unsafe { pool.release_sized(block) }, size);
        }
    }
}
