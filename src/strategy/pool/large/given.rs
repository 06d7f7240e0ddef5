//! A list of large blocks that nobody has, to which they come without a lock.

use crate::strategy::pool::region;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// By their addresses, each next one noted in the record of its region. 0: there is none. Atomic instead of locked, so
/// that it works under any lock, and in every child of `fork`.
#[derive(Debug, Default)]
pub(super) struct Given(AtomicUsize);

impl Given {
    /// Takes the large block at this address, which nobody else has, and whose link this is.
    pub(super) fn push(&self, address: usize, link: &AtomicU64) {
        let mut next = self.0.load(Ordering::Relaxed);
        loop {
            link.store(next as u64, Ordering::Relaxed);
            // Release pairs with the Acquire in `take_all`.
            match self.0.compare_exchange_weak(next, address, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => next = now,
            }
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }

    /// Takes all out, each once it is asked for.
    pub(super) fn take_all(&self) -> impl Iterator<Item = NonNull<u8>> + use<> {
        // Acquire pairs with the Release in `push`.
        let mut next = self.0.swap(0, Ordering::Acquire);
        std::iter::from_fn(move || {
            let address = (next != 0).then_some(next)?;
            // SAFETY: `push` took it, and nobody has unmapped its region, in which it is in use until it is returned.
            let region = unsafe { region::find(address) };
            next = region.link_at(address).load(Ordering::Relaxed) as usize;
            region.block_at(address)
        })
    }
}
