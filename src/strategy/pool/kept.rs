//! `Kept`: the blocks that the running thread keeps of the shared pool, for those who make and free small blocks all
//! the time. Nothing here takes a lock or calls anything, but for `keep` where a bin is full, and `give_back`.

use super::region::{self, Region};
use super::{Pool, classes, local};
use crate::strategy::Strategy;
use crate::survived::survived;
use crate::trace;
use crate::unattributed::unattributed;
use std::ptr::NonNull;

/// What threads keep of the shared pool.
#[derive(Clone, Copy)]
pub(crate) struct Kept {
    pool: &'static Pool,
    serial: u64,
}

/// A block that the thread does not keep, of this class: it was taken and cannot be used, or there is no room for it.
#[derive(Default)]
#[must_use = "the block leaks"]
pub(crate) struct Over(Option<(usize, NonNull<u8>)>);

impl Over {
    #[inline(always)]
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_none()
    }
}

/// A small block as its record has it.
#[derive(Clone, Copy)]
pub(crate) struct Small {
    region: &'static Region,
    class: usize,
}

impl Pool {
    /// What threads keep of it.
    #[inline]
    pub(crate) fn kept(&'static self) -> Kept {
        Kept { pool: self, serial: self.inner.number.serial() }
    }
}

impl Small {
    /// The record of a block; `None` for a large one.
    ///
    /// # Safety
    /// - `block` is a live block of a pool.
    #[inline(always)]
    pub(crate) unsafe fn of(block: NonNull<u8>) -> Option<Self> {
        let address = block.addr().get();
        // SAFETY: the block is live (this function's contract), so its region is in the map.
        let region = unsafe { region::find(address) };
        Some(Self { region, class: region.class_at(address)? })
    }

    /// The record of a block of [`Kept::take_tight`] of so many bytes; `None` if it is of another class. What follows
    /// waits for nothing then, since the record is only compared.
    ///
    /// # Safety
    /// - as for [`of`](Self::of).
    #[inline(always)]
    unsafe fn of_tight(block: NonNull<u8>, size_bytes: usize) -> Option<Self> {
        let (address, class) = (block.addr().get(), classes::TIGHT.find(size_bytes)?);
        // SAFETY: the block is live (this function's contract), so its region is in the map.
        let region = unsafe { region::find(address) };
        region.has_class_at(address, class).then_some(Self { region, class })
    }

    /// How many bytes the block takes.
    #[cfg(test)]
    pub(crate) fn room_bytes(self) -> usize {
        classes::bytes(self.class)
    }

    /// How many bytes were requested, if that was noted; else 0.
    #[inline(always)]
    pub(crate) fn requested_bytes(self, block: NonNull<u8>) -> usize {
        self.region.requested_small(block.addr().get(), self.class)
    }
}

impl Kept {
    /// The largest block that a thread keeps, in bytes.
    pub(crate) const MAX_BYTES: usize = classes::MAX;

    /// Whether the class of a block of so many bytes is found in a table.
    #[inline(always)]
    pub(crate) fn is_tabled(size_bytes: usize) -> bool {
        classes::is_tabled(size_bytes)
    }

    /// A block that this thread keeps, aligned to 64; `None` if it has none of the class, or last used another pool.
    #[inline(always)]
    pub(crate) fn take(self, size_bytes: usize) -> Option<NonNull<u8>> {
        local::take_latest(self.serial, classes::ALIGNED.find(size_bytes)?)
    }

    /// [`take`](Self::take) for those who need an alignment of 16 at most.
    #[inline(always)]
    pub(crate) fn take_tight(self, size_bytes: usize) -> Option<NonNull<u8>> {
        local::take_latest(self.serial, classes::TIGHT.find(size_bytes)?)
    }

    /// [`take_tight`](Self::take_tight) where this thread keeps none: a tiny block from the central free list; `None`
    /// for larger ones, and where there is no memory. Otherwise who asks the long way, which makes no tiny blocks,
    /// would do so each time. As for [`give_back`](Self::give_back).
    #[cold]
    #[inline(never)]
    pub(crate) fn fetch_tiny(self, size_bytes: usize) -> Option<NonNull<u8>> {
        if size_bytes > classes::TINY_MAX {
            return None;
        }
        let _unattributed = unattributed();
        survived(|| self.pool.allocate_tight(size_bytes)).unwrap_or_else(|| {
            trace::strategy_panicked("malloc");
            None
        })
    }

    /// [`take_tight`](Self::take_tight) that notes the requested size. A block for which that cannot be is left in
    /// `over`, for [`give_back`](Self::give_back) once no lock of the caller's stands any more.
    #[inline(always)]
    pub(crate) fn take_sized(self, size_bytes: usize, over: &mut Over) -> Option<NonNull<u8>> {
        let class = classes::TIGHT.find(size_bytes)?;
        let block = local::take_latest(self.serial, class)?;
        // SAFETY: the block was just taken, so its region is in the map.
        let region = unsafe { region::find(block.addr().get()) };
        if region.note_again(block.addr().get(), class, size_bytes) {
            return Some(block);
        }
        over.0 = Some((class, block));
        None
    }

    /// Gives back what the thread does not keep. This may call the system, code of others and the program's allocator.
    #[inline(always)]
    pub(crate) fn give_back(self, over: Over) {
        if let Some((class, block)) = over.0 {
            self.spill(class, block);
        }
    }

    /// A block above [`MAX_BYTES`](Self::MAX_BYTES), its requested size noted, if that which came back last fits and is
    /// there without the pool's lock.
    #[inline]
    pub(crate) fn take_parked_sized(self, size_bytes: usize) -> Option<NonNull<u8>> {
        let block = self.pool.inner.take_parked(size_bytes)?;
        // SAFETY: the block was just taken, so its region is in the map.
        unsafe { Pool::note_requested(block, size_bytes) };
        Some(block)
    }

    /// The same of any that came back lately. It takes the pool's lock.
    #[inline]
    pub(crate) fn take_recent_sized(self, size_bytes: usize) -> Option<NonNull<u8>> {
        let block = self.pool.inner.take_recent(size_bytes)?;
        // SAFETY: the block was just taken, so its region is in the map.
        unsafe { Pool::note_requested(block, size_bytes) };
        Some(block)
    }

    /// Gives back what [`take_recent_sized`](Self::take_recent_sized) returned, and was not used.
    #[cold]
    pub(crate) fn give_recent_back(self, block: NonNull<u8>) {
        // SAFETY: a live block of the pool, which nobody else has.
        unsafe { self.pool.release(block) };
    }

    /// Takes a block back.
    ///
    /// # Safety
    /// - `block` is a live block of the shared pool with this record, and not used again.
    #[inline(always)]
    pub(crate) unsafe fn keep(self, small: Small, block: NonNull<u8>) {
        // SAFETY: a live block of the shared pool with this record, not used again (this function's contract).
        let over = unsafe { self.try_keep(small, block) };
        self.give_back(over);
    }

    /// Takes a block back; false, and nothing was done, if it is a large one.
    ///
    /// # Safety
    /// - `block` is a live block of the shared pool; after `true` it is not used again.
    #[inline(always)]
    pub(crate) unsafe fn keep_small(self, block: NonNull<u8>) -> bool {
        // SAFETY: a live block of the shared pool, given up where it is a small one (this function's contract).
        unsafe {
            let Some(small) = Small::of(block) else { return false };
            self.keep(small, block);
        }
        true
    }

    /// Takes a block of [`take_tight`](Self::take_tight) of so many bytes back; false, and nothing was done, if it is
    /// of another class.
    ///
    /// # Safety
    /// - `block` is a live block of the shared pool; after `true` it is not used again.
    #[inline(always)]
    pub(crate) unsafe fn keep_tight(self, block: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: a live block of the shared pool, given up where it is of that class (this function's contract).
        unsafe {
            let Some(small) = Small::of_tight(block, size_bytes) else { return false };
            self.keep(small, block);
        }
        true
    }

    /// A block with the bytes of one of [`take_tight`](Self::take_tight) and room for `new_bytes`, which may be the
    /// same; `None`, and nothing was done, if it is of another class, or this thread keeps none that is large enough.
    ///
    /// # Safety
    /// - `block` is a live block of the shared pool with `old_bytes`, which are not more than `new_bytes`; after `Some`
    ///   it is not used again.
    #[inline(always)]
    pub(crate) unsafe fn grow_tight(
        self,
        block: NonNull<u8>,
        old_bytes: usize,
        new_bytes: usize,
    ) -> Option<NonNull<u8>> {
        // SAFETY: a live block of the shared pool (this function's contract).
        let small = unsafe { Small::of_tight(block, old_bytes) }?;
        let class = classes::TIGHT.find(new_bytes)?;
        if small.class == class {
            return Some(block);
        }
        let grown = local::take_latest(self.serial, class)?;
        // SAFETY: two live blocks of the shared pool with so many bytes. The old one is given up (this function's
        // contract).
        unsafe {
            grown.copy_from_nonoverlapping(block, old_bytes);
            self.keep(small, block);
        }
        Some(grown)
    }

    /// The same, but that [`give_back`](Self::give_back) remains to be called if the thread has no room for it.
    ///
    /// # Safety
    /// - as for [`keep`](Self::keep).
    #[inline(always)]
    pub(crate) unsafe fn try_keep(self, small: Small, block: NonNull<u8>) -> Over {
        if local::keep_latest(self.serial, small.class, block) {
            return Over(None);
        }
        Over(Some((small.class, block)))
    }

    /// As C's callers do it by the handler's functions: what goes to the system now may be of another pool, whose
    /// source panics, and belongs to no request.
    #[cold]
    #[inline(never)]
    fn spill(self, class: usize, block: NonNull<u8>) {
        let _unattributed = unattributed();
        if survived(|| self.pool.release_small(class, block)).is_none() {
            trace::strategy_panicked("free");
        }
    }

    /// The same block with the new size noted if it has room for it, else a larger one that this thread keeps.
    ///
    /// # Safety
    /// - `block` is a live block of the shared pool with this record.
    #[inline]
    pub(crate) unsafe fn grow(
        self,
        block: NonNull<u8>,
        small: Small,
        size_bytes: usize,
        over: &mut Over,
    ) -> Option<NonNull<u8>> {
        if size_bytes > classes::bytes(small.class) {
            return self.take_sized(size_bytes, over);
        }
        small.region.note_again(block.addr().get(), small.class, size_bytes).then_some(block)
    }
}

#[cfg(test)]
mod tests {
    use super::{Over, Pool, Strategy as _};
    use std::thread;

    #[test]
    #[cfg(not(ctxalloc_loom))]
    fn a_thread_without_tiny_blocks_fetches_some() {
        let fetches = || {
            let kept = Pool::shared().kept();
            assert_eq!((kept.take_tight(20), kept.fetch_tiny(49)), (None, None));
            let mut blocks: Vec<_> = (0..4).map(|_| kept.fetch_tiny(20).expect("memory")).collect();
            blocks.push(kept.take_tight(20).expect("the more it fetches the more it gets"));
            assert_eq!(kept.take(20), None, "of those of 64 it has none");
            // SAFETY: this pool made them, and they are released here only.
            blocks.into_iter().for_each(|block| unsafe { Pool::shared().release(block) });
        };
        thread::spawn(fetches).join().expect("no panic");
    }

    #[test]
    fn a_block_whose_size_cannot_be_noted_is_given_back_by_who_asked() {
        let (pool, kept) = (Pool::shared(), Pool::shared().kept());
        let mut blocks = Vec::new();
        let mut over = Over::default();
        // Until one lies in a region where nobody noted a size yet, as those of the handler `pool` do not.
        while over.0.is_none() {
            assert!(blocks.len() < 10_000, "each region has notes");
            blocks.push(pool.allocate(32_000).expect("memory"));
            let last = pool.allocate(32_000).expect("memory");
            // SAFETY: this pool made it in the line above, and nothing uses it from here on.
            unsafe { pool.release(last) };
            if let Some(block) = kept.take_sized(31_000, &mut over) {
                blocks.push(block);
            }
        }
        let (_, block) = over.0.expect("the loop's end");
        kept.give_back(over);
        assert_eq!(kept.take(31_000), Some(block), "it is this thread's again");
        // SAFETY: each was made above, and is given up.
        blocks.into_iter().chain([block]).for_each(|block| unsafe { pool.release(block) });
    }
}
