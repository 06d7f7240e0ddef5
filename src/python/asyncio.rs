//! Crossings two and four: awaiting across the border. Cancelling either side cancels the other.

use super::bridge::{current, with_selection};
use super::handler::capsule_of;
use super::numpy::Numpy;
use crate::scope::{Context, WithHandler};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::asyncio::CancelledError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCFunction, PyDict};
use pyo3_async_runtimes::TaskLocals;
use pyo3_async_runtimes::tokio as runtimes;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context as TaskContext, Poll, ready};
use tokio::sync::oneshot;

/// Crossing two, Python awaits a Rust future: an asyncio future for `future`, which runs on the tokio runtime of
/// `pyo3-async-runtimes` in the handler of the call, on whatever worker.
///
/// Its output becomes a Python object in that handler too. Cancelling the asyncio future drops `future`, in its
/// context.
///
/// # Errors
/// Outside of a running event loop; as [`current`].
pub fn future_into_py<'py, F, T>(py: Python<'py>, future: F) -> PyResult<Bound<'py, PyAny>>
where
    F: Future<Output = PyResult<T>> + Send + 'static,
    T: for<'a> IntoPyObject<'a> + Send + 'static,
{
    let context = Context::with_handler(current(py)?);
    let inside = async move {
        let value = future.await?;
        Ok(InContext { value, context: Context::copy_current() })
    };
    runtimes::future_into_py(py, inside.in_context(context))
}

/// A value that becomes a Python object with its context's handler selected.
struct InContext<T> {
    value: T,
    context: Context,
}

impl<'py, T: IntoPyObject<'py>> IntoPyObject<'py> for InContext<T> {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        with_selection(py, &self.context, |py| self.value.into_bound_py_any(py))?
    }
}

/// Crossing four, a Rust task awaits Python: runs `awaitable` on the event loop of the running task, in a copy of
/// its Python context in which the Rust task's handler is selected.
///
/// Dropping the future cancels the Python task; a Python task that is cancelled makes it `CancelledError`. The
/// event loop is that of [`future_into_py`]'s caller, or the one running on this thread.
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
    static COPY_CONTEXT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = base.py();
    let copy = if base.is_none() {
        COPY_CONTEXT.import(py, "contextvars", "copy_context")?.call0()?
    } else {
        base.call_method0("copy")?
    };
    if !rust.is_unset() {
        let numpy = Numpy::get(py)?;
        let capsule = capsule_of(py, rust.handler())?.unbind();
        let select = PyCFunction::new_closure(py, None, None, move |arguments, _| -> PyResult<()> {
            numpy.selection().set(numpy, capsule.bind(arguments.py())).map(drop)
        })?;
        copy.call_method1("run", (select,))?;
    }
    Ok(copy)
}

fn call_soon<'py>(
    event_loop: &Bound<'py, PyAny>,
    callback: Bound<'py, PyAny>,
    context: Option<&Bound<'py, PyAny>>,
) -> PyResult<()> {
    let options = PyDict::new(event_loop.py());
    if let Some(context) = context {
        options.set_item("context", context)?;
    }
    event_loop.call_method("call_soon_threadsafe", (callback,), Some(&options)).map(drop)
}

type Outcome = PyResult<Py<PyAny>>;

/// Called once on the event loop's thread, in the context prepared for the awaitable: makes the asyncio task, which
/// copies that context.
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
        static ENSURE_FUTURE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let Some(sender) = lock(&self.sender).take() else { return Ok(()) };
        let options = PyDict::new(py);
        options.set_item("loop", &self.event_loop)?;
        let task = ENSURE_FUTURE.import(py, "asyncio", "ensure_future")?.call((&self.awaitable,), Some(&options));
        let task = match task {
            Ok(task) => task,
            Err(error) => {
                let _ = sender.send(Err(error)); // nobody waits: nothing to tell
                return Ok(());
            }
        };
        *lock(&self.task) = Some(task.clone().unbind());
        let done = Done { sender: Mutex::new(Some(sender)) };
        task.call_method1("add_done_callback", (done,)).map(drop)
    }
}

/// Called once when the asyncio task is done.
#[pyclass(frozen, module = "ctxalloc")]
struct Done {
    sender: Mutex<Option<oneshot::Sender<Outcome>>>,
}

#[pymethods]
impl Done {
    fn __call__(&self, task: &Bound<'_, PyAny>) {
        if let Some(sender) = lock(&self.sender).take() {
            let _ = sender.send(task.call_method0("result").map(Bound::unbind)); // as above
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A Python awaitable, awaited from Rust: see [`into_future`]. Dropping it cancels the asyncio task.
#[must_use = "dropping it cancels the Python task"]
#[derive(Debug)]
pub struct PythonTask {
    outcome: oneshot::Receiver<Outcome>,
    /// Filled on the event loop's thread; read there.
    task: Arc<Mutex<Option<Py<PyAny>>>>,
    /// Gone once there is an outcome: nothing to cancel any more.
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
        // Without an interpreter there is no task left to cancel.
        let _ = Python::try_attach(|py| -> PyResult<()> {
            let cancel = PyCFunction::new_closure(py, None, None, move |arguments, _| -> PyResult<()> {
                let task = lock(&task).take();
                task.map_or(Ok(()), |task| task.call_method0(arguments.py(), "cancel").map(drop))
            })?;
            // It runs after `Start`: callbacks keep their order. A closed loop refuses, and has no tasks.
            call_soon(event_loop.bind(py), cancel.into_any(), None)
        });
    }
}
