//! `Decider`: what decides about blocks, once it is there.

use super::binding::Binding;
use super::place::Places;
use super::shared::{Thread, Twins};
use crate::strategy::account::WHOLE_REQUESTS;
use crate::sync::Made;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a profile runs. It orders nothing: who is told late is told of fewer blocks.
static IS_PROFILED: AtomicBool = AtomicBool::new(false);

/// Begins or ends to tell of each block.
pub(crate) fn profile(is_profiled: bool) {
    IS_PROFILED.store(is_profiled, Ordering::Relaxed);
}

pub(super) fn is_profiled() -> bool {
    IS_PROFILED.load(Ordering::Relaxed)
}

pub(super) struct Decider {
    pub(super) places: Places,
    pub(super) binding: Binding,
    pub(super) twins: Twins,
}

pub(super) static DECIDER: Made<Decider> = Made::new();

/// Whether the binding knows only what it found the last time.
pub(super) fn remembers() -> bool {
    DECIDER.get().is_some_and(|decider| decider.binding.remembers)
}

pub(super) fn begin(places: Places, binding: Binding, twins: Twins) {
    DECIDER.get_or_make(|| Decider { places, binding, twins });
}

/// Marks the thread as busy until it is dropped: what is allocated meanwhile is nobody's.
pub(super) struct Busy<'a>(pub(super) &'a mut Thread);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy -= 1;
    }
}

pub(super) fn busy(thread: &mut Thread) -> Busy<'_> {
    thread.busy += 1;
    Busy(thread)
}

/// Whether there is a request that blocks may be charged to. Relaxed: a thread that has one selected knows of it.
pub(super) fn any_is_charged() -> bool {
    WHOLE_REQUESTS.load(Ordering::Relaxed) > 0
}
