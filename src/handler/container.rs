//! `Container`: keeps a handler valid for a container. Each string and each vector has one of its own, and a hold of a
//! request's slot is one word that all threads would change. So a request counts its containers where it counts its
//! blocks: each thread by itself.

use super::held::Held;
use super::requests::{Latest, slot_behind};
use super::word::Handler;
use std::mem::ManuallyDrop;

/// A handler, held by a container.
#[derive(Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Container {
    /// Never let go by its drop: a request of this copy of the crate counts a container in its place.
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
}

/// Counts one more container of a request.
#[inline(never)]
fn add_to_request(held: &Held) {
    let handler = held.handler();
    // SAFETY: the container that is cloned holds it.
    if unsafe { Latest::of(handler) }.is_some_and(Latest::add_container) {
        return;
    }
    match slot_behind(handler) {
        Some(slot) => slot.add_container(),
        None => std::mem::forget(held.clone()), // another copy of the crate made it, and counts a hold
    }
}

/// Counts one less, of a container that is gone.
#[inline(never)]
fn remove_from_request(handler: Handler) {
    // SAFETY: that container has held it.
    if unsafe { Latest::of(handler) }.is_some_and(Latest::remove_container) {
        return;
    }
    match slot_behind(handler) {
        Some(slot) => slot.remove_container(),
        // SAFETY: that container had the hold which `of` or `add_to_request` forgot.
        None => drop(unsafe { Held::assume(handler) }),
    }
}

impl Clone for Container {
    #[inline]
    fn clone(&self) -> Self {
        if self.held.handler().is_request() {
            add_to_request(&self.held);
        }
        // SAFETY: counted just now, or of a handler that needs no hold.
        Self { held: ManuallyDrop::new(unsafe { Held::assume(self.held.handler()) }) }
    }
}

impl Drop for Container {
    #[inline]
    fn drop(&mut self) {
        // A named handler's hold is nothing.
        if self.held.handler().is_request() {
            remove_from_request(self.held.handler());
        }
    }
}
