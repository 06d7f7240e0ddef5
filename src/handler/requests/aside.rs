//! A user's strategy in a whole request: its arrays are charged as such, so what it takes from malloc is nobody's.

use crate::strategy::{LiveBlock, Strategy};
use crate::unattributed::unattributed;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// The strategy; what it allocates by other means is attributed to no request.
pub(super) struct Aside(pub(super) Arc<dyn Strategy>);

// SAFETY: every call goes unchanged to a strategy, which keeps these promises.
unsafe impl Strategy for Aside {
    fn alignment(&self) -> usize {
        self.0.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let _aside = unattributed();
        self.0.allocate(size_bytes)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let _aside = unattributed();
        self.0.allocate_zeroed(size_bytes)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        let _aside = unattributed();
        // SAFETY: the caller's promises are about the strategy inside, which makes all blocks.
        unsafe { self.0.resize(block, new_size_bytes) }
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the caller's promises are about the strategy inside, which makes all blocks.
        unsafe { self.0.release(block) }
    }

    fn is_read_after_release(&self) -> bool {
        self.0.is_read_after_release()
    }

    fn trim(&self) -> usize {
        self.0.trim()
    }

    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        self.0.live_blocks()
    }
}

impl fmt::Debug for Aside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
