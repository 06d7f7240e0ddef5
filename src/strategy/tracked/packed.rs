//! What a record of the ledger says of a block's maker, in one word.

use super::blocks::{Attribution, Origin};
use std::sync::Arc;

/// [`Attribution`] in one word: NULL for unknown, a task's number shifted left with the lowest bit set, or a pointer
/// from [`Arc::into_raw`], whose lowest bit is clear.
#[derive(Clone, Copy)]
pub(super) struct PackedAttribution(*const Origin);

impl PackedAttribution {
    pub(super) const UNKNOWN: Self = Self(std::ptr::null());

    pub(super) fn pack(attribution: Attribution) -> Self {
        match attribution {
            Attribution::Unknown => Self::UNKNOWN,
            Attribution::Task(number) => Self(std::ptr::without_provenance((number << 1 | 1) as usize)),
            Attribution::Origin(origin) => Self(Arc::into_raw(origin)),
        }
    }

    fn number(self) -> Option<u64> {
        (self.0.addr() & 1 == 1).then_some(self.0.addr() as u64 >> 1)
    }

    fn origin(self) -> Option<*const Origin> {
        (!self.0.is_null() && self.0.addr() & 1 == 0).then_some(self.0)
    }

    /// The attribution, with a reference of its own, which may outlive the record.
    ///
    /// # Safety
    /// - [`release`](Self::release) was not called on it.
    pub(super) unsafe fn unpack(self) -> Attribution {
        match (self.number(), self.origin()) {
            (Some(number), _) => Attribution::Task(number),
            (None, Some(origin)) => {
                // SAFETY: `pack` got the pointer from `Arc::into_raw`, and that reference is still held (not released).
                // So the count may be incremented, and the new reference is the one that `from_raw` takes over.
                Attribution::Origin(unsafe {
                    Arc::increment_strong_count(origin);
                    Arc::from_raw(origin)
                })
            }
            (None, None) => Attribution::Unknown,
        }
    }

    /// Drops the reference that `pack` took. Called once, when the record is gone.
    #[inline]
    pub(super) fn release(self) {
        if let Some(origin) = self.origin() {
            // SAFETY: `pack` got it from `Arc::into_raw`, and the record that held this reference is gone.
            drop(unsafe { Arc::from_raw(origin) });
        }
    }
}

const _: () = assert!(align_of::<Origin>() > 1, "the lowest bit of a pointer to one is free");
