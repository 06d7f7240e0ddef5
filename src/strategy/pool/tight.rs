//! Blocks for those who need an alignment of 16 bytes at most: those of up to 48 bytes are tiny ones.

use super::resize::Unfinished;
use super::{Pool, classes, local};
use crate::source::Pages;
use crate::strategy::Strategy;
use crate::survived::survived;
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
        if layout.align() > classes::ALIGN {
            return None;
        }
        self.make(class_of(layout), layout.size(), false)
    }

    /// [`release`](super::Strategy::release) of a block whose layout the caller knows: faster, since what is done next
    /// need not wait for the block's record.
    ///
    /// ```
    /// use ctxalloc::strategy::Pool;
    /// use std::alloc::Layout;
    ///
    /// let pool = Pool::new();
    /// let (three, five) = (Layout::array::<u64>(3)?, Layout::array::<u64>(5)?);
    /// let words = pool.allocate_layout(three).expect("memory");
    /// // SAFETY: live blocks of the pool with these layouts, each given up here.
    /// unsafe {
    ///     let words = pool.resize_layout(words, three, five).expect("memory");
    ///     pool.release_layout(words, five);
    /// }
    /// # Ok::<(), std::alloc::LayoutError>(())
    /// ```
    ///
    /// # Safety
    /// - as for `release`. A layout that the block does not have is no mistake; it takes more time.
    #[inline]
    pub unsafe fn release_layout(&self, block: NonNull<u8>, layout: Layout) {
        // SAFETY: a live block of this pool, given up by one of these (this function's contract).
        unsafe {
            match class_of(layout) {
                Some(class) if local::push_if_of(self.inner.number.serial(), class, block) => {}
                _ => self.release_by_record(block),
            }
        }
    }

    /// # Safety
    /// - as for `release`.
    #[cold]
    #[inline(never)]
    unsafe fn release_by_record(&self, block: NonNull<u8>) {
        // SAFETY: a live block of this pool, given up here (this function's contract).
        unsafe { self.release(block) }
    }

    /// [`resize`](super::Strategy::resize) of a block whose layout the caller knows, to one that is aligned to what
    /// `new` wants: faster, and a block of more than 48 bytes that is to have no more becomes as small as
    /// [`allocate_layout`](Self::allocate_layout) makes it. `None`, and the block is as it was, where there is no
    /// memory, and for an alignment above 64.
    ///
    /// # Safety
    /// - as for `resize`, and `block` has the size and the alignment of `old`.
    #[inline]
    #[must_use = "the old block is gone"]
    pub unsafe fn resize_layout(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>> {
        if old.align().max(new.align()) <= classes::TINY_ALIGN {
            // SAFETY: a live block of this pool with that layout, given up where this succeeds (this function's
            // contract).
            if let Some(kept) = unsafe { self.resize_kept_tight(block, old.size(), new.size()) } {
                return Some(kept);
            }
        }
        // SAFETY: a live block of this pool with that layout, given up where this succeeds (this function's contract).
        unsafe { self.resize_layout_slowly(block, old, new) }
    }

    /// # Safety
    /// - as for [`resize_layout`](Self::resize_layout).
    #[inline(never)]
    unsafe fn resize_layout_slowly(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>> {
        let becomes_tiny = new.size() <= classes::TINY_MAX && old.size() > classes::TINY_MAX;
        if new.align() <= old.align().max(classes::TINY_ALIGN) && !becomes_tiny {
            // SAFETY: a live block of this pool, given up where this succeeds (this function's contract). What is
            // aligned to 16, or to 64, stays so.
            return unsafe { self.resize(block, new.size()) };
        }
        let moved = self.allocate_layout(new)?;
        // SAFETY: it was just made, and is not returned unless it is finished.
        let unfinished = unsafe { Unfinished::new(self, moved) };
        // SAFETY: two live blocks with so many bytes in committed pages of the source (this function's contract).
        if !unsafe { self.inner.heap.source.copy(moved, block, old.size().min(new.size())) } {
            return None;
        }
        // A panic from here on would tell the caller that the old block is still there.
        // SAFETY: a live block of this pool. The caller uses only the other one from here on.
        survived(|| unsafe { self.release(block) });
        Some(unfinished.finish())
    }

    /// A block that is aligned to 16 at least.
    #[inline]
    pub(super) fn allocate_tight(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.make(classes::TIGHT.find(size_bytes), size_bytes, false)
    }
}

/// The class that serves a layout which needs an alignment of 64 at most; `None` for a large one.
#[inline(always)]
fn class_of(layout: Layout) -> Option<usize> {
    if layout.align() <= classes::TINY_ALIGN {
        classes::TIGHT.find(layout.size())
    } else {
        classes::ALIGNED.find(layout.size())
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

    #[test]
    fn a_block_with_a_known_layout_moves_to_the_smallest_and_back() {
        let pool = Pool::new();
        let layout = |size, align| Layout::from_size_align(size, align).expect("valid");
        let mut old = layout(0, 1);
        let mut block = pool.allocate_layout(old).expect("memory");
        for (size, align, expected) in [
            (16, 8, 16),
            (17, 8, 32),
            (10, 16, 32), // a tiny one stays
            (60, 16, 64),
            (10, 8, 16),
            (10, 32, 64),
            (60, 1, 64),
            (40, 64, 64),
            (300_000, 8, 5 << 16),
            (20, 8, 32),
            (300_000, 64, 5 << 16),
            (0, 1, 16),
        ] {
            let new = layout(size, align);
            // SAFETY: a live block of this pool with this layout; the old pointer is not used again.
            block = unsafe { pool.resize_layout(block, old, new) }.expect("memory");
            assert!(block.addr().get().is_multiple_of(align), "{old:?} to {new:?}");
            assert_eq!(room(block), expected, "{old:?} to {new:?}");
            old = new;
        }
        // SAFETY: as above; the block is as it was, and then given up.
        unsafe {
            assert_eq!(pool.resize_layout(block, old, layout(10, 128)), None);
            pool.release_layout(block, old);
        }
        assert_eq!(pool.regions_after_trim(), 0, "nothing is left");
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

        fn layout(&self) -> Layout {
            Layout::from_size_align(self.size, self.align).expect("valid")
        }

        /// To a layout, as one that has the layout or a part of it.
        fn resize_layout(&mut self, pool: &Pool, size: usize, choice: usize) {
            let new = Layout::from_size_align(size, [1, 8, 16, 32, 64][choice % 5]).expect("valid");
            let old = if choice.is_multiple_of(2) {
                Layout::from_size_align(self.size, 1).expect("valid")
            } else {
                self.layout()
            };
            // SAFETY: a live block of this pool with that layout; the old pointer is not used again.
            self.block = unsafe { pool.resize_layout(self.block, old, new) }.expect("memory");
            let kept = self.size.min(size);
            (self.size, self.align) = (size, new.align());
            self.check(kept);
            self.fill();
        }

        fn release(self, pool: &Pool, choice: usize) {
            self.check(self.size);
            let wrong = Layout::from_size_align([0, 1, 64, 100, 5000, 1 << 20][choice % 6], 1 << (choice % 8));
            // SAFETY: this pool made it, and it is released here only.
            unsafe {
                match choice % 3 {
                    _ if self.is_sized => assert_eq!(pool.release_sized(self.block), self.size),
                    0 => pool.release(self.block),
                    1 => pool.release_layout(self.block, self.layout()),
                    _ => pool.release_layout(self.block, wrong.expect("valid")),
                }
            }
        }
    }

    /// Some are large.
    fn size() -> impl proptest::strategy::Strategy<Value = usize> {
        prop_oneof![15 => 0..140_usize, 1 => 250_000..300_000_usize]
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 2 } else { 60 }, failure_persistence: None, ..ProptestConfig::default()
        })]

        /// As single values in a map, whatever lies beside them.
        #[test]
        fn tiny_blocks_beside_others_keep_what_they_have(
            steps in prop::collection::vec(
                (0..8_u8, 0..4_u8, size(), any::<usize>()),
                1..if cfg!(miri) { 60 } else { 600 },
            )
        ) {
            let pool = Pool::new();
            let mut live: Vec<Kept> = Vec::new();
            for (number, (what, kind, size, which)) in steps.into_iter().enumerate() {
                match what {
                    0..4 => live.push(Kept::make(&pool, kind, size, number as u8)),
                    4 | 5 if !live.is_empty() => {
                        let (at, choice) = (which % live.len(), which / live.len());
                        if what == 4 && !live[at].is_sized {
                            live[at].resize_layout(&pool, size, choice);
                        } else {
                            live[at].resize(&pool, size);
                        }
                    }
                    6 if !live.is_empty() => {
                        let (at, choice) = (which % live.len(), which / live.len());
                        live.swap_remove(at).release(&pool, choice);
                    }
                    7 => {
                        // Half of them, on another thread.
                        let given: Vec<_> = live.drain(..live.len() / 2).collect();
                        thread::scope(|scope| {
                            scope.spawn(|| given.into_iter().for_each(|kept| kept.release(&pool, which)));
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
            live.into_iter().enumerate().for_each(|(number, kept)| kept.release(&pool, number));
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
