//! `Traced`: tells `tracing` of every block.

use super::{LiveBlock, Strategy};
use crate::trace;
use std::ptr::NonNull;

/// Passes everything on to `upstream`, and reports each block that is made, resized, released or refused: an event of
/// `tracing` of the target `ctxalloc::blocks` and the level TRACE.
///
/// Only what has this strategy pays for it: a look at a flag for each block where nobody listens.
///
/// ```
/// use ctxalloc::{Buffer, request, strategy::{Arena, Pool, Traced}};
///
/// let request = request().name("slow one").strategy(Traced::new(Arena::over(Pool::shared()))).begin()?;
/// request.run(|| Buffer::zeroed(100))?; // two events, if `ctxalloc::blocks=trace` is listened to
/// # Ok::<(), ctxalloc::Error>(())
/// ```
#[derive(Debug)]
pub struct Traced<S> {
    upstream: S,
}

impl<S: Strategy> Traced<S> {
    /// Reports what `upstream` does.
    pub fn new(upstream: S) -> Self {
        Self { upstream }
    }

    fn made(&self, block: Option<NonNull<u8>>, size_bytes: usize) -> Option<NonNull<u8>> {
        match block {
            Some(block) => trace::block("made", block, size_bytes),
            None => trace::no_block(size_bytes),
        }
        block
    }
}

// SAFETY: all blocks are the upstream's, which keeps these promises.
unsafe impl<S: Strategy> Strategy for Traced<S> {
    fn alignment(&self) -> usize {
        self.upstream.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.made(self.upstream.allocate(size_bytes), size_bytes)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.made(self.upstream.allocate_zeroed(size_bytes), size_bytes)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the caller passes a live block, which the upstream made.
        let moved = unsafe { self.upstream.resize(block, new_size_bytes) };
        match moved {
            Some(moved) => trace::resized(block, moved, new_size_bytes),
            None => trace::no_block(new_size_bytes),
        }
        moved
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // Before the release: from then on the address may be that of another block.
        trace::released(block);
        // SAFETY: the caller gives up a live block, which the upstream made.
        unsafe { self.upstream.release(block) }
    }

    fn is_read_after_release(&self) -> bool {
        self.upstream.is_read_after_release()
    }

    fn trim(&self) -> usize {
        self.upstream.trim()
    }

    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        self.upstream.live_blocks()
    }
}

#[cfg(test)]
mod tests {
    use super::Traced;
    use crate::strategy::{Pool, conformance};

    #[test]
    fn traced_keeps_the_strategy_contract() {
        conformance::check(Traced::new(Pool::new()));
        conformance::check_wrapper(Traced::new);
    }
}
