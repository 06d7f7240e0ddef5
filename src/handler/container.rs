//! `Container`: keeps a handler valid for a container. Each string and each vector has one of its own, and a hold of a
//! request's slot is one word that all threads would change. So a request counts its containers where it counts its
//! blocks: each thread by itself.

use super::held::Held;
use super::requests::{Slot, slot_behind};
use super::word::Handler;
use std::mem::ManuallyDrop;

/// A handler, held by a container.
#[derive(Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Container {
    /// Let go only for a handler that is no request's of this copy of the crate: such a request counts a container.
    held: ManuallyDrop<Held>,
}

impl Container {
    /// One of `handler`; where that is a request's of which nothing is left, of the handler that refuses everything.
    pub(crate) fn of(handler: Handler) -> Self {
        let held = Held::on(handler);
        match slot_behind(held.handler()) {
            Some(slot) => {
                slot.add_container();
                // SAFETY: never let go, since the request counts a container from here on.
                Self { held: ManuallyDrop::new(unsafe { Held::assume(held.handler()) }) }
            }
            None => Self { held: ManuallyDrop::new(held) },
        }
    }

    /// The hold, for as long as this lives.
    #[inline]
    pub(crate) fn held(&self) -> &Held {
        &self.held
    }

    #[inline]
    fn slot(&self) -> Option<&'static Slot> {
        slot_behind(self.held.handler())
    }
}

impl Clone for Container {
    #[inline]
    fn clone(&self) -> Self {
        match self.slot() {
            Some(slot) => {
                slot.add_container();
                // SAFETY: as in `of`.
                Self { held: ManuallyDrop::new(unsafe { Held::assume(self.held.handler()) }) }
            }
            None => Self { held: self.held.clone() },
        }
    }
}

impl Drop for Container {
    #[inline]
    fn drop(&mut self) {
        match self.slot() {
            Some(slot) => slot.remove_container(),
            // SAFETY: not used again, and it was not a container that was counted.
            None => unsafe { ManuallyDrop::drop(&mut self.held) },
        }
    }
}
