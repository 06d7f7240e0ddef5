//! `Zeroing`: a block is wiped before it is released. For keys, passwords, and other people's data.
//!
//! The upstream never resizes a block, since moving it would leave a copy behind. A resize allocates a new block,
//! copies, and wipes the old one.

use super::prefixed::Prefixed;
use super::{LiveBlock, Strategy};
use crate::os;
use crate::survived::survived;
use std::fmt;
use std::ptr::NonNull;

/// Wipes each block of `upstream` when it is released or moved, and its end when it shrinks. So neither the next user
/// of the memory nor a later dump of it finds the contents.
///
/// Over a strategy whose blocks are read after their release ([`Strategy::is_read_after_release`]: CUDA's, whose copies
/// go on) it hands out nothing, because wiping a block would change what a device reads.
///
/// A release costs one more pass over the block. Each block costs 8 more bytes, rounded up to the upstream's alignment,
/// for a record. Copies elsewhere, and pages that were swapped out, are not wiped.
///
/// ```
/// use ctxalloc::{Buffer, register, strategy::{Pool, Zeroing}};
///
/// let secrets = register("secrets", Zeroing::new(Pool::new()))?;
/// let key = Buffer::copy_from_slice_in(secrets, b"the key")?;
/// drop(key); // and it is gone
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub struct Zeroing<S> {
    /// The record is the block's size in bytes.
    blocks: Prefixed<S, usize>,
}

impl<S: Strategy> Zeroing<S> {
    /// Blocks of `upstream`, wiped before they are released to it.
    #[must_use]
    pub fn new(upstream: S) -> Self {
        Self { blocks: Prefixed::new(upstream) }
    }

    /// Whether a released block is nobody else's to read.
    fn may_wipe(&self) -> bool {
        !self.blocks.upstream.is_read_after_release()
    }
}

// SAFETY: the blocks are the upstream's, each behind a record (`Prefixed`). A resize copies to a new block before it
// wipes and releases the old one; if there is no new one, the old block keeps its first bytes.
unsafe impl<S: Strategy> Strategy for Zeroing<S> {
    fn alignment(&self) -> usize {
        self.blocks.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.may_wipe().then(|| self.blocks.allocate(size_bytes, false, size_bytes)).flatten()
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.may_wipe().then(|| self.blocks.allocate(size_bytes, true, size_bytes)).flatten()
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the block is live and from `blocks` (this function's contract).
        let size_bytes = unsafe { Prefixed::<S, usize>::read(block) };
        if let Some(moved) = self.allocate(new_size_bytes) {
            // SAFETY: both blocks are live, hence disjoint, and have at least the smaller of the two sizes.
            unsafe { moved.copy_from_nonoverlapping(block, size_bytes.min(new_size_bytes)) };
            // A panic of the upstream would tell the caller that the old block is still there.
            // SAFETY: live, and released once; the caller uses the new one from here on.
            survived(|| unsafe { self.release(block) });
            return Some(moved);
        }
        // Without a new block it can still shrink in place.
        let surplus = size_bytes.checked_sub(new_size_bytes)?;
        // SAFETY: the last `surplus` bytes of the live block, which its user gives up with this call. Its record is
        // ours to write.
        unsafe {
            os::wipe(block.add(new_size_bytes), surplus);
            Prefixed::<S, usize>::write(block, new_size_bytes);
        }
        Some(block)
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the block is live and not used again (this function's contract), so all of it may be overwritten. Its
        // record says how long it is.
        unsafe {
            os::wipe(block, Prefixed::<S, usize>::read(block));
            self.blocks.release(block);
        }
    }

    fn is_read_after_release(&self) -> bool {
        self.blocks.upstream.is_read_after_release()
    }

    fn trim(&self) -> usize {
        self.blocks.upstream.trim()
    }

    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        self.blocks.live_blocks()
    }
}

impl<S: fmt::Debug> fmt::Debug for Zeroing<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Zeroing").field("upstream", &self.blocks.upstream).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::{Strategy, Zeroing};
    use crate::strategy::live::Live;
    use crate::strategy::{Budget, Budgeted, Pool, System, conformance};
    use std::ptr::NonNull;
    use std::sync::Mutex;

    #[test]
    fn zeroing_keeps_the_strategy_contract() {
        conformance::check(Zeroing::new(Pool::new()));
        conformance::check(Zeroing::new(System));
        conformance::check_wrapper(Zeroing::new);
    }

    /// Keeps what is released to it, and looks into it. `Zeroing` has a prefix of at most 16 bytes in it.
    #[derive(Debug, Default)]
    struct Dustbin {
        given_back: Mutex<Vec<usize>>,
    }

    /// The size of each block of the dustbin.
    const ROOM: usize = 16 + 1000;

    impl Dustbin {
        /// How many bytes of the released blocks are not zero, without the prefixes.
        fn left_behind(&self) -> usize {
            let given_back = self.given_back.lock().expect("no panic");
            given_back.iter().map(|&address| dirty(address)).sum()
        }
    }

    fn dirty(address: usize) -> usize {
        let start: *const u8 = std::ptr::with_exposed_provenance(address);
        // SAFETY: the dustbin frees nothing, and its blocks are zeroed before they are handed out.
        let bytes = unsafe { std::slice::from_raw_parts(start, ROOM) };
        bytes[16..].iter().filter(|&&byte| byte != 0).count()
    }

    // SAFETY: zeroed blocks of the C heap, large enough for all that the tests ask for, never used twice.
    unsafe impl Strategy for Dustbin {
        fn alignment(&self) -> usize {
            16
        }
        fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
            (size_bytes <= ROOM).then(|| System.allocate_zeroed(ROOM)).flatten()
        }
        unsafe fn resize(&self, block: NonNull<u8>, _new_size_bytes: usize) -> Option<NonNull<u8>> {
            Some(block)
        }
        unsafe fn release(&self, block: NonNull<u8>) {
            self.given_back.lock().expect("no panic").push(block.as_ptr().expose_provenance());
        }
    }

    impl Drop for Dustbin {
        fn drop(&mut self) {
            for &address in self.given_back.lock().expect("no panic").iter() {
                let start = NonNull::new(std::ptr::with_exposed_provenance_mut(address)).expect("not NULL");
                // SAFETY: from the C heap, freed once, here.
                unsafe { System.release(start) };
            }
        }
    }

    #[test]
    fn nothing_is_left_behind_by_a_release_nor_by_a_resize_either_way() {
        let zeroing = Zeroing::new(Dustbin::default());
        let mut block = Live::of(&zeroing, 1000);
        let address = block.start().as_ptr().wrapping_sub(16).expose_provenance();
        assert_eq!(dirty(address), 1000, "this test sees a secret where there is one");
        assert!(block.resize(100));
        assert_eq!(zeroing.blocks.upstream.left_behind(), 0);
        assert!(block.resize(500));
        assert_eq!(zeroing.blocks.upstream.left_behind(), 0);
        assert_eq!(block.bytes()[..100], [0x5E; 100]);
        block.release();
        let upstream = &zeroing.blocks.upstream;
        assert_eq!((upstream.left_behind(), upstream.given_back.lock().expect("no panic").len()), (0, 3));
    }

    #[test]
    fn a_block_shrinks_in_place_where_there_is_no_other_and_its_end_is_wiped() {
        let budget = Budget::new("one block", Some(1016));
        let zeroing = Zeroing::new(Budgeted::new(System, budget));
        let mut block = Live::of(&zeroing, 1000);
        let first = block.start();
        assert!(!block.resize(1001), "no room for a second one");
        assert!(block.resize(600));
        assert_eq!(block.start(), first, "in place");
        // SAFETY: its upstream's block still has a thousand bytes.
        let bytes = unsafe { std::slice::from_raw_parts(first.as_ptr(), 1000) };
        assert!(bytes[..600].iter().all(|&byte| byte == 0x5E) && bytes[600..].iter().all(|&byte| byte == 0));
        block.release();
    }
}
