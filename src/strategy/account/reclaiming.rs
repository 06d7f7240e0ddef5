//! The thread `ctxalloc-reclaim`: asks reclaimers for what was missing. It starts with the first of them, and sleeps
//! until somebody calls.

use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use crate::unattributed::unattributed;
use std::cell::Cell;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Thread};

/// Forgets the reclaimers of a budget, if there are any.
static FORGET: Made<fn(u64)> = Made::new();

/// Has `forget` called for each account with reclaimers that is dropped. Only the first one is.
pub(super) fn on_drop(forget: fn(u64)) {
    FORGET.get_or_make(|| forget);
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

/// Whether somebody has called since it last began to look. AcqRel: who finds it set came before that look.
static IS_CALLED: AtomicBool = AtomicBool::new(false);

/// The thread, and which process it belongs to.
struct Running(Locked<Option<(u32, Option<Thread>)>>);

impl HeldAcrossFork for Running {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.0.lock());
    }
}

fn running() -> &'static Running {
    static RUNNING: Made<Arc<Running>> = Made::new();
    RUNNING.get_or_make(|| held_across_fork(Running(Locked::new(None))))
}

/// Wakes it, if it is there: it allocates nothing, and waits for nobody.
pub(super) fn call() {
    if !IS_CALLED.swap(true, Ordering::AcqRel) {
        running().0.with(|running| {
            if let Some((_, Some(thread))) = running {
                thread.unpark();
            }
        });
    }
}

/// Starts it, unless it runs. `ask`: what it does whenever somebody called.
pub(super) fn start(ask: fn()) {
    let _unattributed = unattributed();
    let (starts, _gone) = running().0.with(|running| match running {
        Some((process_id, _)) if *process_id == process::id() => (false, None),
        _ => (true, running.replace((process::id(), None))),
    });
    if !starts {
        return;
    }
    IS_CALLED.store(true, Ordering::Release); // it looks first
    let started = thread::Builder::new().name("ctxalloc-reclaim".to_owned()).spawn(move || run(ask));
    let thread = started.ok().map(|started| started.thread().clone());
    let is_there = thread.is_some();
    let _before = running().0.with(|running| match running {
        Some((_, known)) if is_there => std::mem::replace(known, thread).map(|known| (0, Some(known))),
        _ => running.take(),
    });
    // Whoever called before it was known here.
    running().0.with(|running| {
        if let Some((_, Some(thread))) = running {
            thread.unpark();
        }
    });
}

fn run(ask: fn()) {
    loop {
        if IS_CALLED.swap(false, Ordering::AcqRel) {
            ask();
        } else {
            thread::park();
        }
    }
}
