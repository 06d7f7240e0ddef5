//! The gate through which Rust threads attach to Python; it is closed before the interpreter shuts down.
//!
//! A tokio worker that is attached, or attaches, while the interpreter is torn down crashes the process: CPython up to
//! 3.13 ends such threads in the middle of their Rust frames. So an `atexit` function, which runs while everything
//! still works, closes the gate and waits for the threads inside. Each copy of this crate has a gate of its own.

use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict};
use std::cell::Cell;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How many threads are inside, and in the highest bit whether the gate is closed.
static GATE: AtomicUsize = AtomicUsize::new(0);
const CLOSED: usize = 1 << (usize::BITS - 1);

/// How long an exiting interpreter waits for the threads inside. A thread that needs longer is treated by CPython as a
/// daemon thread is.
const PATIENCE: Duration = Duration::from_secs(10);

thread_local! {
    /// Set while this thread is inside, and for ever on the thread that closed the gate, which runs the interpreter: it
    /// may always pass.
    static PASSES: Cell<bool> = const { Cell::new(false) };
}

/// [`Python::try_attach`] until Python exits, and `None` from then on.
pub(super) fn try_attach<R>(work: impl for<'py> FnOnce(Python<'py>) -> R) -> Option<R> {
    let _inside = Inside::pass()?;
    Python::try_attach(work)
}

/// As [`try_attach`], but `None` on the exiting thread too: for work that needs Python's modules intact.
pub(super) fn try_attach_before_exit<R>(work: impl for<'py> FnOnce(Python<'py>) -> R) -> Option<R> {
    if is_closed() {
        return None;
    }
    try_attach(work)
}

/// Does what a thread need not be attached for, but the interpreter has to be there for; `None` once it shuts down.
/// It waits for nobody and allocates nothing.
#[cfg(ctxalloc_whole)]
pub(super) fn before_exit<R>(work: impl FnOnce() -> R) -> Option<R> {
    let _inside = Inside::pass()?;
    Some(work())
}

/// Whether the interpreter is shutting down.
pub(super) fn is_closed() -> bool {
    GATE.load(Ordering::Acquire) & CLOSED != 0
}

/// Panics, for a thread that cannot go on without Python. If the gate is closed that is nobody's mistake, so no panic
/// hook is called.
#[cold]
pub(super) fn unwind() -> ! {
    const MESSAGE: &str = "Python is not running in this process, or is shutting down";
    if GATE.load(Ordering::Relaxed) & CLOSED == 0 {
        panic!("{MESSAGE}");
    }
    resume_unwind(Box::new(MESSAGE))
}

/// Exists while a thread is inside.
struct Inside {
    /// Whether this one counted the thread: not if the thread was inside already.
    counted: bool,
}

impl Inside {
    fn pass() -> Option<Self> {
        if PASSES.get() {
            return Some(Self { counted: false });
        }
        // One atomic step counts the thread and reads the bit, so `close` waits for every thread that was not refused
        // here.
        if GATE.fetch_add(1, Ordering::AcqRel) & CLOSED != 0 {
            GATE.fetch_sub(1, Ordering::AcqRel);
            return None;
        }
        PASSES.set(true);
        Some(Self { counted: true })
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if self.counted {
            PASSES.set(false);
            GATE.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Registers `close` with `atexit`, and `count_anew` for children of `fork`. Called once by each copy of this crate.
pub(super) fn close_at_exit(py: Python<'_>) -> PyResult<()> {
    let close = PyCFunction::new_closure(py, None, None, |arguments, _| arguments.py().detach(close))?;
    py.import("atexit")?.call_method1("register", (close,))?;
    let forked = PyCFunction::new_closure(py, None, None, |_, _| count_anew())?;
    let options = PyDict::new(py);
    options.set_item("after_in_child", forked)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&options)).map(drop)
}

/// Closes the gate and waits for the threads inside. They may need the GIL to get out, so the caller must not hold it.
fn close() {
    let begun = Instant::now();
    PASSES.set(true);
    GATE.fetch_or(CLOSED, Ordering::AcqRel);
    // Acquire pairs with the AcqRel of each thread that leaves.
    while GATE.load(Ordering::Acquire) != CLOSED && begun.elapsed() < PATIENCE {
        sleep(Duration::from_millis(1));
    }
}

/// In a child of `fork` only the forking thread exists, whichever threads were inside in the parent.
fn count_anew() {
    let closed = GATE.load(Ordering::Relaxed) & CLOSED;
    GATE.store(closed + usize::from(PASSES.get()), Ordering::Relaxed);
}
