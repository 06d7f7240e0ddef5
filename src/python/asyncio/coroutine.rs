//! Crossing four: a Rust future for a Python awaitable, which runs on its event loop with the task's handler selected.

use super::event_loop::{call_soon, lock, take};
use crate::python::asked::asked;
use crate::python::exit;
use crate::python::handler::capsule_of;
use crate::python::imported::Imported;
use crate::python::interned::intern;
use crate::python::numpy::Numpy;
use crate::scope::Context;
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::asyncio::CancelledError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict};
use pyo3_async_runtimes::TaskLocals;
use pyo3_async_runtimes::tokio as runtimes;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context as TaskContext, Poll, ready};
use tokio::sync::oneshot;

/// Crossing four, a Rust task awaits Python: runs `awaitable` on the event loop of the running task, in a copy of
/// its Python context in which the Rust task's handler is selected.
///
/// Dropping the future cancels the Python task; if the Python task is cancelled the future returns `CancelledError`.
/// The event loop is that of [`future_into_py`](super::future_into_py)'s caller, or the one running on this thread.
///
/// ```ignore
/// // In a future that `future_into_py` was given; `load` is a Python coroutine function.
/// let answer = ctxalloc::python::attach(|py| ctxalloc::python::into_future(load.bind(py).call0()?))?;
/// let array: Py<PyAny> = answer.await?;
/// ```
///
/// # Errors
/// Where there is no event loop.
pub fn into_future(awaitable: Bound<'_, PyAny>) -> PyResult<PythonTask> {
    let locals = runtimes::get_current_locals(awaitable.py())?;
    into_future_with_locals(&locals, awaitable)
}

/// [`into_future`] on the event loop and in the Python context of `locals`.
///
/// # Errors
/// Where the event loop is closed.
pub fn into_future_with_locals(locals: &TaskLocals, awaitable: Bound<'_, PyAny>) -> PyResult<PythonTask> {
    let py = awaitable.py();
    let event_loop = locals.event_loop(py);
    let context = python_context(&locals.context(py), &Context::copy_current())?;
    let (sender, outcome) = oneshot::channel();
    let task = Arc::new(Mutex::new(None));
    let start = Start {
        awaitable: awaitable.unbind(),
        event_loop: event_loop.clone().unbind(),
        sender: Mutex::new(Some(sender)),
        task: Arc::clone(&task),
    };
    call_soon(&event_loop, start.into_bound_py_any(py)?, Some(&context))?;
    Ok(PythonTask { outcome, task, event_loop: Some(event_loop.unbind()) })
}

/// A copy of `base` (or of the running context, where it is None) with the Rust context's handler selected.
fn python_context<'py>(base: &Bound<'py, PyAny>, rust: &Context) -> PyResult<Bound<'py, PyAny>> {
    static COPY_CONTEXT: Imported = Imported::new("contextvars", "copy_context");
    let py = base.py();
    let copy = if base.is_none() { COPY_CONTEXT.get(py)?.call0()? } else { base.call_method0(intern!(py, "copy"))? };
    if !rust.is_unset() {
        let numpy = Numpy::get(py)?;
        let capsule = capsule_of(py, rust.handler())?.unbind();
        let select = PyCFunction::new_closure(py, None, None, move |arguments, _| -> PyResult<()> {
            numpy.selection().set(capsule.bind(arguments.py())).map(drop)
        })?;
        copy.call_method1(intern!(py, "run"), (select,))?;
    }
    Ok(copy)
}

type Outcome = PyResult<Py<PyAny>>;

/// Called once on the event loop's thread, in the context that was prepared for the awaitable. It makes the asyncio
/// task, which copies that context.
#[pyclass(frozen, module = "ctxalloc")]
struct Start {
    awaitable: Py<PyAny>,
    event_loop: Py<PyAny>,
    sender: Mutex<Option<oneshot::Sender<Outcome>>>,
    task: Arc<Mutex<Option<Py<PyAny>>>>,
}

#[pymethods]
impl Start {
    fn __call__(&self, py: Python<'_>) -> PyResult<()> {
        static ENSURE_FUTURE: Imported = Imported::new("asyncio", "ensure_future");
        let Some(sender) = take(&self.sender) else { return Ok(()) };
        if sender.is_closed() && self.end(py)? {
            return Ok(()); // dropped before it began: no task is made, as an eager one would run its first step
        }
        let options = PyDict::new(py);
        options.set_item("loop", &self.event_loop)?;
        let task = ENSURE_FUTURE.get(py)?.call((&self.awaitable,), Some(&options));
        let task = match task {
            Ok(task) => task,
            Err(error) => {
                let _ = sender.send(Err(error)); // fails if nobody waits any more
                return self.end(py).map(drop); // the task factory refused, so the coroutine has not begun
            }
        };
        *lock(&self.task) = Some(task.clone().unbind());
        let done = Done { sender: Mutex::new(Some(sender)) };
        task.call_method1(intern!(task.py(), "add_done_callback"), (done,)).map(drop)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.awaitable)?;
        visit.call(&self.event_loop)
    }
}

impl Start {
    /// Closes a coroutine that never began, as cancelling a task before its first step does. False: the awaitable is
    /// not a coroutine.
    fn end(&self, py: Python<'_>) -> PyResult<bool> {
        static IS_COROUTINE: Imported = Imported::new("asyncio", "iscoroutine");
        let is_coroutine = IS_COROUTINE.get(py)?.call1((&self.awaitable,))?.is_truthy()?;
        if is_coroutine {
            self.awaitable.call_method0(py, "close")?;
        }
        Ok(is_coroutine)
    }
}

impl Drop for Start {
    /// Closes the coroutine if this was never called: the event loop was closed first, or refused the callback.
    fn drop(&mut self) {
        if take(&self.sender).is_some() {
            let _ = Python::try_attach(|py| match self.end(py) {
                Ok(_) => {}
                Err(error) => error.write_unraisable(py, Some(self.awaitable.bind(py))),
            });
        }
    }
}

/// See `module.rs`.
pub(super) fn make_types(py: Python<'_>) {
    py.get_type::<Start>();
    py.get_type::<Done>();
}

/// Called once when the asyncio task is done.
#[pyclass(frozen, module = "ctxalloc")]
struct Done {
    sender: Mutex<Option<oneshot::Sender<Outcome>>>,
}

#[pymethods]
impl Done {
    fn __call__(&self, task: &Bound<'_, PyAny>) {
        let Some(sender) = take(&self.sender) else { return };
        let result = task.call_method0(intern!(task.py(), "result"));
        let _ = sender.send(result.map(Bound::unbind)); // fails if nobody waits any more
    }
}

/// A Python awaitable, awaited from Rust: see [`into_future`]. Dropping it cancels the asyncio task.
#[must_use = "dropping it cancels the Python task"]
#[derive(Debug)]
pub struct PythonTask {
    outcome: oneshot::Receiver<Outcome>,
    /// Written and read on the event loop's thread.
    task: Arc<Mutex<Option<Py<PyAny>>>>,
    /// None once there is an outcome, when there is nothing to cancel any more.
    event_loop: Option<Py<PyAny>>,
}

impl Future for PythonTask {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Outcome> {
        let outcome = ready!(Pin::new(&mut self.outcome).poll(cx));
        self.event_loop = None;
        Poll::Ready(outcome.unwrap_or_else(|_| {
            Err(CancelledError::new_err("the event loop was closed before the awaitable was done"))
        }))
    }
}

impl Drop for PythonTask {
    fn drop(&mut self) {
        let Some(event_loop) = self.event_loop.take() else { return };
        let task = Arc::clone(&self.task);
        // Without an interpreter no task is left to cancel.
        let _ = exit::try_attach(|py| {
            let cancel = PyCFunction::new_closure(py, None, None, move |arguments, _| -> PyResult<()> {
                take(&task).map_or(Ok(()), |task| task.call_method0(arguments.py(), "cancel").map(drop))
            });
            // It runs after `Start`, as callbacks keep their order. A closed loop refuses it, and has no tasks.
            let posted = cancel.and_then(|cancel| call_soon(event_loop.bind(py), cancel.into_any(), None));
            if let Err(interrupt) = asked(py, posted) {
                interrupt.write_unraisable(py, Some(event_loop.bind(py))); // a destructor raises nothing
            }
        });
    }
}
