//! `ctxalloc.use(...)`: a handler for a `with` or `async with` block, or for a function.
//!
//! A scope keeps its token while it is entered, and refuses to be entered twice. What leaves in another Context
//! changes nothing there and may still be left in its own: `contextvars` decides, we only say it clearly.

use super::handler::{PyHandler, handler_for};
use super::numpy::Numpy;
use pyo3::exceptions::{PyRuntimeError, PyStopIteration, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A handler selected for a block or a function: what ``ctxalloc.use()`` makes.
///
/// It may be entered again after it was left. RuntimeError: it is entered already. ValueError on leaving: this is
/// another Context than the one that entered it; nothing changes, and it may still be left in its own.
#[pyclass(frozen, name = "Scope", module = "ctxalloc")]
pub(super) struct PyScope {
    handler: Py<PyHandler>,
    /// Locked only to look and to change, never while Python runs: a thread that waits here holds the interpreter.
    state: Mutex<State>,
}

enum State {
    Left,
    /// Another thread, or a finalizer in between, is entering or leaving it.
    Changing,
    /// With what `Selection::reset` wants.
    Entered(Py<PyAny>),
}

/// Selects a handler for a ``with`` or ``async with`` block, or as a decorator for a function, a coroutine function,
/// a generator or an async generator.
///
/// ``handler`` is a Handler, the name of one, or None for NumPy's default. The block gets the Handler (``as``). Arrays
/// made inside live in it, for as long as they live; tasks that are started inside, and ``asyncio.to_thread``, inherit
/// it::
///
///     >>> with ctxalloc.use("aligned64") as handler:
///     ...     array = numpy.ones(10)
///     >>> ctxalloc.handler_of(array) is handler
///     True
///     >>> @ctxalloc.use("aligned64")
///     ... async def request():
///     ...     return await asyncio.to_thread(numpy.ones, 10)
///     >>> ctxalloc.handler_of(asyncio.run(request())) is handler
///     True
///
/// UnknownHandlerError (a ValueError): no handler has that name. TypeError: something else was given. What leaving in
/// another task or thread does, and entering twice, says ``help(ctxalloc.Scope)``.
#[pyfunction]
#[pyo3(name = "use", signature = (handler, /))]
pub(super) fn use_(handler: &Bound<'_, PyAny>) -> PyResult<PyScope> {
    Ok(PyScope { handler: handler_for(handler)?.unbind(), state: Mutex::new(State::Left) })
}

impl PyScope {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self) -> &'static str {
        self.handler.get().handler().name()
    }

    fn enter(&self, py: Python<'_>) -> PyResult<Py<PyHandler>> {
        let numpy = Numpy::get(py)?;
        {
            let mut state = self.state();
            if !matches!(*state, State::Left) {
                return Err(self.entered_already());
            }
            *state = State::Changing;
        }
        let token = numpy.selection().set(numpy, self.handler.get().capsule(py));
        let (state, outcome) = match token {
            Ok(token) => (State::Entered(token), Ok(self.handler.clone_ref(py))),
            Err(error) => (State::Left, Err(error)),
        };
        *self.state() = state;
        outcome
    }

    fn exit(&self, py: Python<'_>) -> PyResult<()> {
        let numpy = Numpy::get(py)?;
        let token = {
            let mut state = self.state();
            match mem::replace(&mut *state, State::Changing) {
                State::Entered(token) => token,
                other => {
                    *state = other;
                    return Err(self.not_entered());
                }
            }
        };
        let outcome = numpy.selection().reset(numpy, token.bind(py));
        let foreign = outcome.as_ref().is_err_and(|error| error.is_instance_of::<PyValueError>(py));
        // In a foreign Context nothing has changed: it may still be left in its own.
        *self.state() = if foreign { State::Entered(token) } else { State::Left };
        outcome.map_err(|error| if foreign { self.entered_elsewhere(py, error) } else { error })
    }

    #[cold]
    fn entered_already(&self) -> PyErr {
        PyRuntimeError::new_err(format!(
            "ctxalloc.use({:?}) is entered already; call use() again for a second scope",
            self.name()
        ))
    }

    #[cold]
    fn not_entered(&self) -> PyErr {
        PyRuntimeError::new_err(format!("ctxalloc.use({:?}) is not entered, so there is nothing to leave", self.name()))
    }

    #[cold]
    fn entered_elsewhere(&self, py: Python<'_>, cause: PyErr) -> PyErr {
        let error = PyValueError::new_err(format!(
            "ctxalloc.use({:?}) was entered in another Context than the one that leaves it; nothing was restored. \
             Enter and leave it in the same task or thread; a generator wants @ctxalloc.use(...) instead of a \
             `with` across its yield",
            self.name()
        ));
        error.set_cause(py, Some(cause));
        error
    }
}

#[pymethods]
impl PyScope {
    /// The handler it selects.
    #[getter]
    fn handler(&self, py: Python<'_>) -> Py<PyHandler> {
        self.handler.clone_ref(py)
    }

    fn __enter__(&self, py: Python<'_>) -> PyResult<Py<PyHandler>> {
        self.enter(py)
    }

    #[pyo3(signature = (kind, error, traceback, /), text_signature = "($self, kind, error, traceback, /)")]
    #[expect(unused_variables, reason = "Python's protocol: a scope ends in one way, whatever ends it")]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        error: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.exit(py)
    }

    fn __aenter__(slf: Bound<'_, Self>) -> Step {
        Step { scope: slf.unbind(), entering: true }
    }

    #[pyo3(signature = (kind, error, traceback, /), text_signature = "($self, kind, error, traceback, /)")]
    #[expect(unused_variables, reason = "as above")]
    fn __aexit__(
        slf: Bound<'_, Self>,
        kind: &Bound<'_, PyAny>,
        error: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) -> Step {
        Step { scope: slf.unbind(), entering: false }
    }

    /// The function, run in this scope at each call; works for coroutine functions and (async) generators too.
    #[pyo3(signature = (function, /))]
    fn __call__<'py>(&self, py: Python<'py>, function: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        py.import("ctxalloc._decorate")?.call_method1("in_scope", (&self.handler, function))
    }

    fn __repr__(&self) -> String {
        let entered = if matches!(*self.state(), State::Left) { "" } else { ", entered" };
        format!("<ctxalloc.use({:?}){entered}>", self.name())
    }

    /// A token refers to its Context, which may hold whoever holds this scope.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self.state.try_lock().as_deref() {
            Ok(State::Entered(token)) => visit.call(token),
            _ => Ok(()), // what is not shown to the collector stays alive
        }
    }
}

/// What `__aenter__` and `__aexit__` return: a coroutine that acts in the Context of whoever awaits it, and never
/// waits. One that is not awaited does nothing.
#[pyclass(frozen, name = "_Step", module = "ctxalloc")]
pub(super) struct Step {
    scope: Py<PyScope>,
    entering: bool,
}

#[pymethods]
impl Step {
    fn __await__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<()> {
        let scope = self.scope.get();
        let value = if self.entering { Some(scope.enter(py)?) } else { scope.exit(py).map(|()| None)? };
        Err(PyStopIteration::new_err(value))
    }

    /// `send`, `throw` and `close` make it a `collections.abc.Coroutine`, which asyncio and type checkers ask for.
    #[pyo3(signature = (_value, /))]
    fn send(&self, py: Python<'_>, _value: &Bound<'_, PyAny>) -> PyResult<()> {
        self.__next__(py)
    }

    #[pyo3(signature = (kind, error = None, _traceback = None, /))]
    fn throw(
        &self,
        kind: Bound<'_, PyAny>,
        error: Option<Bound<'_, PyAny>>,
        _traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        Err(PyErr::from_value(error.unwrap_or(kind)))
    }

    #[expect(clippy::unused_self, reason = "Python's protocol: nothing is open that could be closed")]
    fn close(&self) {}

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.scope)
    }
}
