//! `Tracked`: knows every live block, and who made it when.
//!
//! Each block has a header of 64 bytes. The headers are linked into lists, one list for every few threads (`ledger`). A
//! block enters its list before it is handed out and leaves it when it is released, so a listing never misses a live
//! block. The running thread's number and name are read once per thread (`here`). A function of the user's can add the
//! task and the place in the program (`Attribution`).

mod blocks;
mod here;
mod ledger;
mod packed;
mod report;

pub use blocks::{Attribution, Frame, LiveBlock, Origin, Place, Thread, Totals};
pub use report::{Group, Report};

use super::Strategy;
use super::prefixed::Prefixed;
use crate::error::Error;
use ledger::{Ledger, Record};
use packed::PackedAttribution;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Lists the live blocks of `upstream`: size, age, the thread that made each, and on request the task and the place in
/// the program.
///
/// [`live_blocks`](Strategy::live_blocks) may be called at any time, from any thread. A resized block keeps its age and
/// its maker. Each block costs 64 more bytes. Clones share one list, and cloning is cheap.
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
/// let tracked = Tracked::with_attribution(System, || task::number().into())?;
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
    attribute: Option<Box<Attribute>>,
    /// What `attribute` finds out, as `Debug` shows it: `traceback`, `tasks`.
    options: Options,
}

/// The options of an attribution with their values.
type Options = Vec<(&'static str, String)>;

type Attribute = dyn Fn() -> Attribution + Send + Sync;

impl<S: Strategy> Tracked<S> {
    /// `upstream`'s blocks, with size, age and thread of each.
    ///
    /// # Errors
    /// [`Error::BadOption`] where `upstream` is tracked already, or aligns its blocks to less than 8 bytes.
    pub fn new(upstream: S) -> Result<Self, Error> {
        Self::with(upstream, None, Options::new())
    }

    /// [`new`](Self::new), with more about each block's maker: `attribute` is called at each allocation, on the thread
    /// that allocates. It must not allocate through this strategy and must not panic.
    ///
    /// # Errors
    /// [`Error::BadOption`] where `upstream` is tracked already, or aligns its blocks to less than 8 bytes.
    pub fn with_attribution(
        upstream: S,
        attribute: impl Fn() -> Attribution + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        Self::with(upstream, Some(Box::new(attribute)), Options::new())
    }

    /// [`with_attribution`](Self::with_attribution), whose `Debug` shows these options too.
    #[cfg(feature = "python")]
    pub(crate) fn with_shown_attribution(
        upstream: S,
        attribute: impl Fn() -> Attribution + Send + Sync + 'static,
        options: Options,
    ) -> Result<Self, Error> {
        Self::with(upstream, Some(Box::new(attribute)), options)
    }

    fn with(upstream: S, attribute: Option<Box<Attribute>>, options: Options) -> Result<Self, Error> {
        if upstream.live_blocks().is_some() {
            let value = format!("{upstream:?}");
            let expected = "a strategy that is not tracked: its own list would be out of reach behind this one's";
            return Err(Error::BadOption { option: "upstream", value, expected });
        }
        let blocks = Prefixed::new(upstream);
        if !blocks.aligns_records() {
            let value = format!("{:?}", blocks.upstream);
            let expected = "a strategy whose blocks are aligned to 8 bytes or more, for the records in front of them \
                          (align=8 and up for Guard and Callbacks)";
            return Err(Error::BadOption { option: "upstream", value, expected });
        }
        Ok(Self { inner: Arc::new(Inner { blocks, ledger: Ledger::new(), attribute, options }) })
    }

    /// How many blocks are alive, and their bytes. These are counted, so this is cheaper than a listing.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.inner.ledger.totals()
    }

    #[inline]
    fn make(&self, size_bytes: usize, zeroed: bool) -> Option<NonNull<u8>> {
        let Inner { blocks, ledger, attribute, .. } = &*self.inner;
        let attribution = match attribute {
            Some(attribute) => PackedAttribution::pack(attribute()),
            None => PackedAttribution::UNKNOWN,
        };
        let (record, shard) = ledger.record(size_bytes, attribution);
        let Some(block) = blocks.allocate(size_bytes, zeroed, record) else {
            attribution.release();
            return None;
        };
        // SAFETY: `allocate` has just written the record in front of the block. Nobody else has the block yet, so its
        // record is in no list, and the record stays in place until `resize` or `release` takes it out.
        unsafe { ledger.insert(Prefixed::<S, Record>::place(block), shard) };
        Some(block)
    }
}

// SAFETY: the blocks are the upstream's, each behind a header (`Prefixed`). A list points to the header only while the
// block is alive; while the block is being resized it points to a placeholder instead.
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
        // SAFETY: `block` is live (this function's contract), so `make` put its record into a list. Dropping the
        // placeholder puts the record back, also if the upstream panics.
        let placeholder = unsafe { ledger.put_placeholder(Prefixed::<S, Record>::place(block)) };
        // SAFETY: `block` is live and from `blocks`. No list points to it now, so it may move.
        let moved = unsafe { blocks.resize(block, new_size_bytes) };
        if let Some(moved) = moved {
            // SAFETY: the resize copied the record along with the block, and `moved` is live.
            unsafe { placeholder.resized(Prefixed::<S, Record>::place(moved), new_size_bytes) };
        }
        moved
    }

    #[inline]
    unsafe fn release(&self, block: NonNull<u8>) {
        let Inner { blocks, ledger, .. } = &*self.inner;
        // SAFETY: `block` is live and not used again (this function's contract). Its record is in a list since `make`;
        // once it is out, nothing points into the block, and the upstream may have it back.
        unsafe {
            ledger.remove(Prefixed::<S, Record>::place(block)).release();
            blocks.release(block);
        }
    }

    fn is_read_after_release(&self) -> bool {
        self.inner.blocks.upstream.is_read_after_release()
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
        let mut text = f.debug_struct("Tracked");
        text.field("upstream", &self.inner.blocks.upstream);
        for (option, value) in &self.inner.options {
            text.field(option, &format_args!("{value}"));
        }
        text.finish()
    }
}

#[cfg(test)]
mod tests;
