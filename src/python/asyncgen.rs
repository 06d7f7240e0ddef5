//! The first step of an asynchronous generator that the event loop must not learn of.

use crate::python::interned::intern;
use pyo3::prelude::*;

/// ``anext(body)`` while the thread has no hooks for asynchronous generators; it gets its own back before this returns.
///
/// This is Rust because a signal handler's exception (KeyboardInterrupt) may interrupt Python code between any two
/// instructions, and would leave the thread without its hooks.
#[pyfunction]
#[pyo3(name = "_anext_unhooked", signature = (body, /))]
pub(super) fn anext_unhooked<'py>(body: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = body.py();
    let sys = py.import(intern!(py, "sys"))?;
    let hooks = sys.call_method0(intern!(py, "get_asyncgen_hooks"))?;
    let (first, last) = (hooks.get_item(0)?, hooks.get_item(1)?);
    let set = sys.getattr(intern!(py, "set_asyncgen_hooks"))?;
    // From here on only C functions run, and Python calls no signal handler in them.
    set.call1((py.None(), py.None()))?;
    let step = body.call_method0(intern!(py, "__anext__"));
    set.call1((first, last))?;
    step
}
