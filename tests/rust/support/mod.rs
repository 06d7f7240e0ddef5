//! What the tests share: handlers to select, strategies that watch or misbehave, runtimes, and executors that move a
//! future between threads on purpose.
#![allow(dead_code, unused_imports, reason = "each test binary uses its own part of it")]

pub(crate) mod c_heap;
pub(crate) mod errors;
mod executors;
#[cfg(feature = "tracing")]
pub(crate) mod hearing;
#[cfg(ctxalloc_tsan)]
mod mremap;
mod probes;
mod strategies;

pub(crate) use executors::{Yield, block_on, migrate, on_every_runtime, poll_once};
pub(crate) use probes::{DropProbe, drop_probe, in_a_dying_thread};
pub(crate) use strategies::{Marked, Odd, Refusing, Switched};

use ctxalloc::{Handler, register};
use std::sync::{Arc, OnceLock};

/// Three handlers that are not the default, each with the strategy that watches its blocks. The same ones for all
/// tests of a binary.
pub(crate) fn colours() -> &'static [(Handler, Arc<Marked>); 3] {
    static COLOURS: OnceLock<[(Handler, Arc<Marked>); 3]> = OnceLock::new();
    COLOURS.get_or_init(|| ["red", "green", "blue"].map(marked))
}

pub(crate) fn red() -> Handler {
    colours()[0].0
}

pub(crate) fn green() -> Handler {
    colours()[1].0
}

pub(crate) fn blue() -> Handler {
    colours()[2].0
}

/// A handler of the test's own, over a strategy that counts and checks its blocks.
pub(crate) fn marked(name: &str) -> (Handler, Arc<Marked>) {
    let strategy = Arc::new(Marked::new());
    (register(name, Arc::clone(&strategy)).expect("a name of its own"), strategy)
}

/// A handler of the test's own, over a strategy that fails or panics on demand.
pub(crate) fn switched(name: &str) -> (Handler, Arc<Switched>) {
    let strategy = Arc::new(Switched::default());
    (register(name, Arc::clone(&strategy)).expect("a name of its own"), strategy)
}

/// Fewer rounds where each step costs a thousand times as much.
pub(crate) const fn rounds(usual: usize, under_miri: usize) -> usize {
    if cfg!(miri) { under_miri } else { usual }
}
