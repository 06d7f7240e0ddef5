//! What an exchange knows and may change, under its lock.

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyDict;

#[derive(Default)]
pub(super) struct Fields {
    /// The server's scope, which is left as it is.
    pub(super) scope: Option<Py<PyAny>>,
    /// The application's scope: a copy with the exchange in it.
    pub(super) inner: Option<Py<PyDict>>,
    /// The server's `send`. None once the application has returned.
    pub(super) to_server: Option<Py<PyAny>>,
    /// The Token of the ContextVar that says whose request the Context serves.
    pub(super) mark: Option<Py<PyAny>>,
    /// The tenant's budget; perhaps that of the request around this one.
    pub(super) tenant: Option<Py<PyAny>>,
    /// The status of the answer, once it is begun.
    pub(super) status: Option<Py<PyAny>>,
    /// The headers of a whole request's answer, which go with what follows them; what tells of their end while they go.
    pub(super) headers: Option<Py<PyAny>>,
    /// The refusal that is answered in place of the 500 that a framework inside made of it.
    pub(super) replaced: Option<Py<PyAny>>,
    /// The last refusal that was found to have led to an exception.
    pub(super) refusal: Option<Py<PyAny>>,
    /// The client has gone, and `receive` or `send` has shown it.
    pub(super) is_disconnected: bool,
    /// The last message was given to the server: a disconnect that comes later is the usual end.
    pub(super) is_ending: bool,
    /// Headers were sent, or a WebSocket accepted.
    pub(super) started: bool,
    /// The last body message was sent, or the WebSocket closed.
    pub(super) is_whole: bool,
}

impl Fields {
    /// Takes out what may keep many objects alive: the scopes, the server's `send`, exceptions with their tracebacks.
    pub(super) fn take_exchanged(&mut self) -> impl Sized + use<> {
        let answer = (self.to_server.take(), self.headers.take(), self.replaced.take(), self.refusal.take());
        (self.scope.take(), self.inner.take(), answer)
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.inner)?;
        let served = [&self.scope, &self.mark, &self.tenant];
        let answer = [&self.to_server, &self.status, &self.headers, &self.replaced, &self.refusal];
        served.into_iter().chain(answer).try_for_each(|object| visit.call(object))
    }
}
