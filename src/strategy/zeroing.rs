//! `Zeroing`: what was in a block is wiped before the block goes back. For keys, passwords, and other people's data.
//!
//! A block never grows or moves in the upstream's hands, which would leave a copy behind: it moves here, by way of a
//! fresh block, and the old one is wiped.

use super::prefixed::Prefixed;
use super::{LiveBlock, Strategy};
use std::fmt;
use std::ptr::NonNull;

/// Wipes each block of `upstream` when it is released, resized away, or shrunk: nobody who gets the memory next, and no
/// dump made later, finds what was in it.
///
/// It costs what it takes to fill the block once more, and each block a record: 8 bytes, rounded up to the upstream's
/// alignment. What was swapped out, or copied elsewhere, it cannot reach.
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
    /// Each with its size in bytes.
    blocks: Prefixed<S, usize>,
}

impl<S: Strategy> Zeroing<S> {
    /// `upstream`'s blocks, wiped before they go back.
    #[must_use]
    pub fn new(upstream: S) -> Self {
        Self { blocks: Prefixed::new(upstream) }
    }
}

/// Zeros that the compiler may not leave out though nobody reads them.
///
/// # Safety
/// - `size_bytes` bytes from `start` on are writable and nobody else's.
unsafe fn wipe(start: NonNull<u8>, size_bytes: usize) {
    #[cfg(all(target_os = "linux", not(miri)))]
    // SAFETY: the caller vouches for the bytes.
    unsafe {
        libc::explicit_bzero(start.as_ptr().cast(), size_bytes);
    }
    #[cfg(not(all(target_os = "linux", not(miri))))]
    {
        // SAFETY: the caller vouches for the bytes.
        unsafe { start.write_bytes(0, size_bytes) };
        std::hint::black_box(start);
    }
}

// SAFETY: the blocks are the upstream's, moved behind a record of their own (`Prefixed`). A resize copies to a fresh
// block before the old one is wiped and released; where there is none, the old block keeps its first bytes.
unsafe impl<S: Strategy> Strategy for Zeroing<S> {
    fn alignment(&self) -> usize {
        self.blocks.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.blocks.allocate(size_bytes, false, size_bytes)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.blocks.allocate(size_bytes, true, size_bytes)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: a live block, says the caller.
        let size_bytes = unsafe { Prefixed::<S, usize>::read(block) };
        if let Some(moved) = self.allocate(new_size_bytes) {
            // SAFETY: both are live and disjoint; each has the lesser of the two sizes.
            unsafe { moved.copy_from_nonoverlapping(block, size_bytes.min(new_size_bytes)) };
            // SAFETY: a live block; the caller uses the new one from now on.
            unsafe { self.release(block) };
            return Some(moved);
        }
        // A smaller one can stay where it is.
        let surplus = size_bytes.checked_sub(new_size_bytes)?;
        // SAFETY: inside of the block.
        let behind = unsafe { block.add(new_size_bytes) };
        // SAFETY: the rest of the block, which the caller gives up.
        unsafe { wipe(behind, surplus) };
        // SAFETY: live; its upstream block has room for more than that.
        unsafe { Prefixed::<S, usize>::write(block, new_size_bytes) };
        Some(block)
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: a live block, says the caller.
        let size_bytes = unsafe { Prefixed::<S, usize>::read(block) };
        // SAFETY: all of the block, given up, says the caller.
        unsafe { wipe(block, size_bytes) };
        // SAFETY: given up, says the caller.
        unsafe { self.blocks.release(block) }
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
    use crate::strategy::{Budget, Budgeted, Pool, System, conformance};
    use std::ptr::NonNull;
    use std::sync::Mutex;

    #[test]
    fn zeroing_keeps_the_strategy_contract() {
        conformance::check(Zeroing::new(Pool::new()));
        conformance::check(Zeroing::new(System));
    }

    /// Keeps what it is given back, and looks into it. The tests' blocks have 8 of its bytes in front, and 16 at most.
    #[derive(Debug, Default)]
    struct Dustbin {
        given_back: Mutex<Vec<usize>>,
    }

    /// What each block of the dustbin has room for.
    const ROOM: usize = 16 + 1000;

    impl Dustbin {
        /// How many bytes that are not zero lie in what was given back, but for the records.
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

    fn secret(strategy: &impl Strategy, size_bytes: usize) -> NonNull<u8> {
        let block = strategy.allocate(size_bytes).expect("memory");
        // SAFETY: that many bytes.
        unsafe { block.write_bytes(0x5E, size_bytes) };
        block
    }

    #[test]
    fn nothing_is_left_behind_by_a_release_nor_by_a_resize_either_way() {
        let zeroing = Zeroing::new(Dustbin::default());
        let block = secret(&zeroing, 1000);
        let address = block.as_ptr().wrapping_sub(16).expose_provenance();
        assert_eq!(dirty(address), 1000, "this test sees a secret where there is one");
        // SAFETY: live, from this strategy; the old pointer is not used again.
        let block = unsafe { zeroing.resize(block, 100) }.expect("memory");
        assert_eq!(zeroing.blocks.upstream.left_behind(), 0);
        // SAFETY: as above.
        let block = unsafe { zeroing.resize(block, 500) }.expect("memory");
        assert_eq!(zeroing.blocks.upstream.left_behind(), 0);
        // SAFETY: live, a hundred bytes written.
        assert_eq!(unsafe { std::slice::from_raw_parts(block.as_ptr(), 100) }, [0x5E; 100]);
        // SAFETY: live, from this strategy, once.
        unsafe { zeroing.release(block) };
        let upstream = &zeroing.blocks.upstream;
        assert_eq!((upstream.left_behind(), upstream.given_back.lock().expect("no panic").len()), (0, 3));
    }

    #[test]
    fn a_block_shrinks_in_place_where_there_is_no_other_and_its_end_is_wiped() {
        let budget = Budget::new("one block", Some(1016));
        let zeroing = Zeroing::new(Budgeted::new(System, budget));
        let block = secret(&zeroing, 1000);
        // SAFETY: live, from this strategy.
        assert!(unsafe { zeroing.resize(block, 1001) }.is_none(), "no room for a second one");
        // SAFETY: as above.
        let same = unsafe { zeroing.resize(block, 600) }.expect("in place");
        assert_eq!(same, block);
        // SAFETY: its upstream's block still has a thousand bytes.
        let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), 1000) };
        assert!(bytes[..600].iter().all(|&byte| byte == 0x5E) && bytes[600..].iter().all(|&byte| byte == 0));
        // SAFETY: live, from this strategy, once.
        unsafe { zeroing.release(block) };
    }
}
