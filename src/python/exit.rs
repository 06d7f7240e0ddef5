//! The gate through which Rust threads enter Python, closed before the interpreter goes down.
//!
//! A tokio worker that attaches, or is attached, while the interpreter is being torn down takes the process with it
//! (CPython up to 3.13 ends such threads in the middle of their Rust frames). So an `atexit` function, which runs
//! while everything still works, closes the gate and waits for those inside. Each copy of this crate has its own.

use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict};
use std::cell::Cell;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How many threads are inside, and whether the gate is closed.
static GATE: AtomicUsize = AtomicUsize::new(0);
const CLOSED: usize = 1 << (usize::BITS - 1);

/// How long an exiting interpreter waits for threads inside of the gate. Whoever needs longer is left to CPython,
/// as daemon threads are.
const PATIENCE: Duration = Duration::from_secs(10);

thread_local! {
    /// This thread is inside already, or may pass at any time: the one that closed the gate runs the interpreter.
    static PASSES: Cell<bool> = const { Cell::new(false) };
}

/// [`Python::try_attach`] until Python exits; then `None`, for ever.
pub(super) fn try_attach<R>(work: impl for<'py> FnOnce(Python<'py>) -> R) -> Option<R> {
    let _inside = Inside::enter()?;
    Python::try_attach(work)
}

/// As [`try_attach`], but for everybody, the exiting thread too: for work that needs an interpreter as it was, with its
/// modules.
pub(super) fn try_attach_before_exit<R>(work: impl for<'py> FnOnce(Python<'py>) -> R) -> Option<R> {
    if is_closed() {
        return None;
    }
    try_attach(work)
}

/// Whether the interpreter is on its way out.
pub(super) fn is_closed() -> bool {
    GATE.load(Ordering::Acquire) & CLOSED != 0
}

/// For a thread that cannot go on without Python: a panic, which is nobody's fault if the gate is closed and then
/// reaches no panic hook.
#[cold]
pub(super) fn unwind() -> ! {
    const MESSAGE: &str = "Python is not running in this process, or is shutting down";
    if GATE.load(Ordering::Relaxed) & CLOSED == 0 {
        panic!("{MESSAGE}");
    }
    resume_unwind(Box::new(MESSAGE))
}

/// A thread that went through the gate.
struct Inside {
    /// Whether it was counted: not where the thread passed before.
    counted: bool,
}

impl Inside {
    fn enter() -> Option<Self> {
        if PASSES.get() {
            return Some(Self { counted: false });
        }
        // Counting and asking are one step: whoever is not refused here is waited for in `close`.
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

/// Has the gate closed when the interpreter exits. Called once for each copy of this crate.
pub(super) fn close_at_exit(py: Python<'_>) -> PyResult<()> {
    let close = PyCFunction::new_closure(py, None, None, |arguments, _| arguments.py().detach(close))?;
    py.import("atexit")?.call_method1("register", (close,))?;
    let forked = PyCFunction::new_closure(py, None, None, |_, _| count_anew())?;
    let options = PyDict::new(py);
    options.set_item("after_in_child", forked)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&options)).map(drop)
}

/// Refuses newcomers and waits for those inside, who may need the GIL to get out: the caller has let go of it.
fn close() {
    let begun = Instant::now();
    PASSES.set(true);
    GATE.fetch_or(CLOSED, Ordering::AcqRel);
    // Acquire pairs with the AcqRel of those who leave.
    while GATE.load(Ordering::Acquire) != CLOSED && begun.elapsed() < PATIENCE {
        sleep(Duration::from_millis(1));
    }
}

/// In the child of a fork there is one thread, whoever was inside in the parent.
fn count_anew() {
    let closed = GATE.load(Ordering::Relaxed) & CLOSED;
    GATE.store(closed + usize::from(PASSES.get()), Ordering::Relaxed);
}
