//! The thread `ctxalloc-reclaim`: asks reclaimers for what was missing. It starts with the first of them, and sleeps
//! until somebody calls.

use crate::sync::{Called, Made, held_across_fork};
use std::cell::Cell;
use std::sync::Arc;

/// Forgets the reclaimers of a budget, if there are any.
static FORGET: Made<fn(u64)> = Made::new();

/// Has `forget` called for each account with reclaimers that is dropped. Only the first one is.
pub(super) fn on_drop(forget: fn(u64)) {
    FORGET.get_or_make(|| forget);
    reclaimer(); // made before anybody calls it, who may not allocate
}

/// For an account that is being dropped.
pub(super) fn forget(budget_id: u64) {
    if let Some(forget) = FORGET.get() {
        forget(budget_id);
    }
}

thread_local! {
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs a reclaimer's code.
pub(super) fn inside<R>(work: impl FnOnce() -> R) -> R {
    let before = IS_INSIDE.replace(true);
    let answer = work();
    IS_INSIDE.set(before);
    answer
}

/// Whether this thread runs a reclaimer's code, which others wait for.
pub(crate) fn is_inside() -> bool {
    IS_INSIDE.get()
}

fn reclaimer() -> &'static Called {
    static RECLAIMER: Made<Arc<Called>> = Made::new();
    RECLAIMER.get_or_make(|| held_across_fork(Called::new()))
}

/// Wakes it, if it is there: it allocates nothing, and waits for nobody.
pub(super) fn call() {
    reclaimer().call();
}

/// What it does whenever somebody called.
static ASK: Made<fn()> = Made::new();

/// Starts it, unless it runs. Where the system starts no thread nobody is asked.
pub(super) fn start(ask: fn()) {
    ASK.get_or_make(|| ask);
    let _ = reclaimer().start("ctxalloc-reclaim", run);
}

fn run() {
    loop {
        match ASK.get() {
            Some(ask) if reclaimer().begins_to_look() => ask(),
            _ => reclaimer().sleep(None),
        }
    }
}
