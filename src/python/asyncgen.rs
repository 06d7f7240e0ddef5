//! The first step of an asynchronous generator of which the event loop must not know.

use pyo3::intern;
use pyo3::prelude::*;

/// ``anext(body)`` with no hooks of asynchronous generators meanwhile: the thread's own are there again when it returns.
///
/// Here and not in Python, where an exception of a signal handler (KeyboardInterrupt) may come between any two
/// instructions, and would leave the thread without its hooks.
#[pyfunction]
#[pyo3(name = "_anext_unhooked", signature = (body, /))]
pub(super) fn anext_unhooked<'py>(body: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = body.py();
    let sys = py.import(intern!(py, "sys"))?;
    let hooks = sys.call_method0(intern!(py, "get_asyncgen_hooks"))?;
    let (first, last) = (hooks.get_item(0)?, hooks.get_item(1)?);
    let set = sys.getattr(intern!(py, "set_asyncgen_hooks"))?;
    // From here on C functions alone, in which no signal handler runs.
    set.call1((py.None(), py.None()))?;
    let step = body.call_method0(intern!(py, "__anext__"));
    set.call1((first, last))?;
    step
}
