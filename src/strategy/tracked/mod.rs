//! `Tracked`: knows every live block, and who made it when.
//!
//! A record of 64 bytes stands in front of each block, and all records hang in lists, one for each handful of threads
//! (`ledger`). A block is in its list from before it is handed out until it comes back: none is ever missed. What is
//! known of the running thread is read once (`here`); whoever wants to know more of a block's maker tells by a function.

mod blocks;
mod here;
mod ledger;
mod report;

pub use blocks::{Frame, LiveBlock, Origin, Place, Thread, Told};
pub use report::{Group, Report};

use super::Strategy;
use super::prefixed::Prefixed;
use crate::error::Error;
use ledger::{Ledger, Record, Teller};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Knows each live block of `upstream`: its size, its age, the thread that made it, and on request the task and the
/// place in the program.
///
/// [`live_blocks`](Strategy::live_blocks) lists them at any time, from any thread. A block that was resized keeps its age
/// and maker. Each block costs 64 bytes more. Cheap to clone: clones are the same.
///
/// ```
/// use ctxalloc::{Buffer, register, strategy::{Pool, Report, Strategy, Tracked}};
///
/// let tracked = Tracked::new(Pool::new())?;
/// let handler = register("watched", tracked.clone())?;
/// let kept = Buffer::zeroed_in(handler, 1000)?;
/// drop(Buffer::zeroed_in(handler, 5000)?);
///
/// let blocks = handler.live_blocks().expect("tracked");
/// assert_eq!((blocks.len(), blocks[0].size_bytes, blocks[0].address), (1, 1000, kept.as_ptr().addr()));
/// assert!(Report::of(&blocks).to_string().starts_with("1 live block, 1000 bytes"));
/// # Ok::<(), ctxalloc::Error>(())
/// ```
///
/// With tokio's tasks:
///
/// ```
/// # #[cfg(feature = "tokio")] {
/// use ctxalloc::{strategy::{System, Tracked}, task};
///
/// let tracked = Tracked::telling(System, || task::number().into())?;
/// # drop(tracked);
/// # }
/// # Ok::<(), ctxalloc::Error>(())
/// ```
pub struct Tracked<S> {
    inner: Arc<Inner<S>>,
}

struct Inner<S> {
    blocks: Prefixed<S, Record>,
    ledger: Arc<Ledger>,
    tell: Option<Box<Tell>>,
}

type Tell = dyn Fn() -> Told + Send + Sync;

/// How much is alive.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Live blocks.
    pub blocks: usize,
    /// Their bytes, as asked for.
    pub bytes: usize,
}

impl<S: Strategy> Tracked<S> {
    /// `upstream`'s blocks, with size, age and thread of each.
    ///
    /// # Errors
    /// [`Error::BadOption`] where `upstream` is tracked already, or aligns its blocks to less than 8 bytes.
    pub fn new(upstream: S) -> Result<Self, Error> {
        Self::with(upstream, None)
    }

    /// The same, and `tell` is asked for more at each allocation, on the thread that allocates. It must not allocate
    /// through this strategy, nor panic.
    ///
    /// # Errors
    /// [`Error::BadOption`] where `upstream` is tracked already, or aligns its blocks to less than 8 bytes.
    pub fn telling(upstream: S, tell: impl Fn() -> Told + Send + Sync + 'static) -> Result<Self, Error> {
        Self::with(upstream, Some(Box::new(tell)))
    }

    fn with(upstream: S, tell: Option<Box<Tell>>) -> Result<Self, Error> {
        if upstream.live_blocks().is_some() {
            let value = format!("{upstream:?}");
            let wanted = "a strategy that is not tracked: its own list would be out of reach behind this one's";
            return Err(Error::BadOption { option: "upstream", value, wanted });
        }
        let blocks = Prefixed::new(upstream);
        if !blocks.aligns_records() {
            let value = format!("{:?}", blocks.upstream);
            let wanted = "a strategy whose blocks are aligned to 8 bytes or more, for the records in front of them \
                          (align=8 and up for Guard and Callbacks)";
            return Err(Error::BadOption { option: "upstream", value, wanted });
        }
        Ok(Self { inner: Arc::new(Inner { blocks, ledger: Ledger::new(), tell }) })
    }

    /// How much is alive: counted, so cheaper than the list.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.inner.ledger.totals()
    }

    #[inline]
    fn make(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        let Inner { blocks, ledger, tell } = &*self.inner;
        let teller = tell.as_deref().map_or(Teller::NOBODY, |tell| Teller::of(tell()));
        let (record, shard) = ledger.record(size_bytes, teller);
        let Some(block) = blocks.allocate(size_bytes, zeroed, record) else {
            teller.forget();
            return None;
        };
        // SAFETY: just made, with its record in front; nobody else has it.
        let place = unsafe { Prefixed::<S, Record>::place(block) };
        // SAFETY: a live record that is in no list.
        unsafe { ledger.enter(place, shard) };
        Some(block)
    }
}

// SAFETY: the blocks are the upstream's, moved behind a record of their own (`Prefixed`); the lists reach the record only
// while the block is alive, and a stand-in while it is being resized.
unsafe impl<S: Strategy> Strategy for Tracked<S> {
    fn alignment(&self) -> usize {
        self.inner.blocks.alignment()
    }

    #[inline]
    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.make(size_bytes, false)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.make(size_bytes, true)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        let Inner { blocks, ledger, .. } = &*self.inner;
        // SAFETY: a live block, says the caller.
        let place = unsafe { Prefixed::<S, Record>::place(block) };
        // SAFETY: its record is in its list, and put back below, also where the upstream panics.
        let stand_in = unsafe { ledger.stand_in(place) };
        // SAFETY: a live block, says the caller; no list leads to it any more.
        let moved = unsafe { blocks.resize(block, new_size_bytes) };
        if let Some(moved) = moved {
            // SAFETY: live, just resized.
            let place = unsafe { Prefixed::<S, Record>::place(moved) };
            // SAFETY: its record came along.
            unsafe { stand_in.resized(place, new_size_bytes) };
        }
        moved
    }

    #[inline]
    unsafe fn release(&self, block: NonNull<u8>) {
        let Inner { blocks, ledger, .. } = &*self.inner;
        // SAFETY: a live block, says the caller.
        let place = unsafe { Prefixed::<S, Record>::place(block) };
        // SAFETY: its record is in its list.
        unsafe { ledger.leave(place) }.forget();
        // SAFETY: given up, says the caller; no list leads to it any more.
        unsafe { blocks.release(block) }
    }

    fn trim(&self) -> usize {
        self.inner.blocks.upstream.trim()
    }

    fn live_blocks(&self) -> Option<Vec<LiveBlock>> {
        Some(self.inner.ledger.live_blocks())
    }
}

impl<S> Clone for Tracked<S> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<S: fmt::Debug> fmt::Debug for Tracked<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracked").field("upstream", &self.inner.blocks.upstream).finish()
    }
}

#[cfg(test)]
mod tests;
