//! Crossings one and three: synchronous code that calls from Python into Rust, or from Rust into Python.
//!
//! On a Python thread NumPy's ContextVar is the selection, in Rust a thread-local is. Only here and in `asyncio` is the
//! value of one given to the other, for a stretch of code.

use super::exit;
use super::foreign::handler_in;
use super::handler::capsule_of;
use super::numpy::Numpy;
use crate::handler::{Handler, default_handler};
use crate::scope::Context;
use pyo3::prelude::*;

/// The handler selected in the running Python context: what NumPy's ContextVar holds.
///
/// A foreign handler is taken into the table when it is first seen.
///
/// # Errors
/// Those of importing NumPy; a struct in the ContextVar that lacks a function (NumPy itself would crash on it).
pub fn current(py: Python<'_>) -> PyResult<Handler> {
    let numpy = Numpy::get(py)?;
    let capsule = numpy.current_capsule(py)?;
    // Where most requests begin. What is in NumPy's own capsule need not be looked up.
    if capsule.is(numpy.default_capsule(py)) {
        return Ok(default_handler());
    }
    handler_in(&capsule)
}

/// Crossing one, Python calls Rust: runs `work` with the caller's handler as Rust's current one.
///
/// `work` runs in a Rust context of its own: what it selects ends with it. It may detach from Python inside.
///
/// ```ignore
/// #[pyfunction]
/// fn work(py: Python<'_>) -> PyResult<usize> {
///     ctxalloc::python::scope(py, || Ok(ctxalloc::Buffer::zeroed(4096)?.len()))?
/// }
/// ```
///
/// # Errors
/// As [`current`].
pub fn scope<R>(py: Python<'_>, work: impl FnOnce() -> R) -> PyResult<R> {
    Ok(Context::with_handler(current(py)?).run(work))
}

/// Crossing three, a Rust task attaches to Python: [`Python::attach`], with the running context's handler selected
/// in this thread's Python context while `work` runs.
///
/// Where Rust has selected nothing, Python's own selection stays. What `work` selects in Python ends with it.
///
/// ```ignore
/// let array = ctxalloc::python::attach(|py| {
///     py.import("numpy")?.call_method1("ones", (1000,)).map(Bound::unbind) // in the task's handler
/// })?;
/// ```
///
/// # Panics
/// Where Python is not running, or is shutting down (then no panic hook is called); see [`try_attach`]. Where NumPy
/// cannot be imported.
pub fn attach<R>(work: impl for<'py> FnOnce(Python<'py>) -> R) -> R {
    let attached = exit::try_attach(|py| with_selection(py, &Context::copy_current(), work));
    attached.unwrap_or_else(|| exit::unwind()).expect("NumPy was imported by `init`")
}

/// [`attach`], or `None` where Python is not running or is shutting down.
pub fn try_attach<R>(work: impl for<'py> FnOnce(Python<'py>) -> R) -> Option<R> {
    exit::try_attach(|py| with_selection(py, &Context::copy_current(), work).ok()).flatten()
}

/// Runs `work` with the handler of a Rust context selected in the running Python context.
pub(super) fn with_selection<'py, R>(
    py: Python<'py>,
    context: &Context,
    work: impl FnOnce(Python<'py>) -> R,
) -> PyResult<R> {
    let numpy = Numpy::get(py)?;
    // Where Rust has selected nothing, Python's own selection is set once more: so what `work` selects ends with it.
    let capsule = if context.is_unset() { numpy.current_capsule(py)? } else { capsule_of(py, context.handler())? };
    let _restored = Restored { numpy, token: numpy.selection().set(&capsule)? };
    Ok(work(py))
}

/// Restores the Python context's selection when it is dropped, also when `work` panics.
struct Restored<'py> {
    numpy: &'static Numpy,
    token: Bound<'py, PyAny>,
}

impl Drop for Restored<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.numpy.selection().reset(&self.token) {
            // Happens only if `work` left the thread in another Context than it found, which Python's API does not
            // allow.
            error.write_unraisable(self.token.py(), None);
        }
    }
}
