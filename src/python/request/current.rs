//! `current_request()`: the request of the running context, as an object.

use super::super::foreign::handler_in;
use super::super::numpy::Numpy;
use super::super::selection::Variable;
use super::PyRequest;
use crate::handler::Handler;
use crate::handler::requests::RequestHandle;
use crate::python::interned::intern;
use pyo3::prelude::*;
use std::sync::OnceLock;

/// The ContextVar of the record that a Context of a server carries. Empty where no middleware was imported.
static SERVING: OnceLock<Variable> = OnceLock::new();

/// The ContextVar of the records of servers' requests; None where no middleware was imported.
pub(in crate::python) fn serving_variable() -> Option<&'static Variable> {
    SERVING.get()
}

/// Names the ContextVar of a server's records, whose ``request`` is what ``current_request()`` returns.
#[pyfunction]
#[pyo3(name = "_served_in", signature = (serving, /))]
pub(in crate::python) fn served_in(serving: &Bound<'_, PyAny>) -> PyResult<()> {
    let serving = Variable::of(serving)?;
    SERVING.get_or_init(|| serving);
    Ok(())
}

/// The request that the running context is in, at any depth and in any task or thread that inherited it; else None::
///
///     >>> def helper():
///     ...     return ctxalloc.current_request().stats.live_bytes
///     >>> with ctxalloc.request():
///     ...     array = numpy.ones(1000)
///     ...     helper()
///     8000
///
/// It equals the Request that began it; in a request of a server it is the one that ``scope["ctxalloc.request"]`` has.
#[pyfunction]
pub(in crate::python) fn current_request(py: Python<'_>) -> PyResult<Option<Py<PyRequest>>> {
    let capsule = Numpy::get(py)?.current_capsule(py)?; // keeps the request while its handler is looked up
    let handler = handler_in(&capsule)?;
    let Some(handle) = RequestHandle::from_handler(handler) else { return Ok(None) };
    if let Some(served) = served(py, handler)? {
        return Ok(Some(served));
    }
    Py::new(py, PyRequest::carried(handle)).map(Some)
}

/// The request of the server that the Context serves, if this is its handler.
fn served(py: Python<'_>, handler: Handler) -> PyResult<Option<Py<PyRequest>>> {
    let Some(record) = SERVING.get().map(|serving| serving.get(py)).transpose()?.flatten() else { return Ok(None) };
    let Ok(request) = record.getattr(intern!(py, "request"))?.cast_into::<PyRequest>() else { return Ok(None) };
    Ok((request.get().begun_handler() == Some(handler)).then(|| request.unbind()))
}
