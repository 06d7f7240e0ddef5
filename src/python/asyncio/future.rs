//! Crossing two: an asyncio future for a Rust future, which runs on tokio with the caller's handler selected.

use super::event_loop::{call_soon, take};
use crate::python::asked::asked;
use crate::python::bridge::{current, with_selection};
use crate::python::errors::RustPanic;
use crate::python::exit;
use crate::python::interned::intern;
use crate::scope::{Context, WithHandler};
use pin_project::pin_project;
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyRuntimeError;
use pyo3::exceptions::asyncio::CancelledError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3_async_runtimes::{TaskLocals, tokio as runtimes};
use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context as TaskContext, Poll};
use tokio::sync::oneshot;

/// Crossing two, Python awaits a Rust future: an asyncio future for `future`, which runs on the tokio runtime of
/// `pyo3-async-runtimes` with the caller's handler selected, on any worker.
///
/// Its output is converted to a Python object under that handler too. Cancelling the asyncio future drops `future`, in
/// its context; if `future` returns `CancelledError`, the asyncio future is cancelled. A panic becomes
/// `ctxalloc.RustPanic`. The outcome of a future that is not done when the event loop is closed, or when Python exits,
/// is discarded.
///
/// ```ignore
/// #[pyfunction]
/// fn checksum<'py>(py: Python<'py>, data: Vec<u8>) -> PyResult<Bound<'py, PyAny>> {
///     ctxalloc::python::future_into_py(py, async move {
///         // In the caller's handler, here and in the task, which copies it.
///         let copy = ctxalloc::Buffer::copy_from_slice(&data)?;
///         let sum = ctxalloc::task::spawn_blocking(move || copy.iter().map(|&byte| u64::from(byte)).sum::<u64>());
///         sum.await.map_err(|error| PyRuntimeError::new_err(error.to_string()))
///     })
/// }
/// ```
///
/// # Errors
/// RuntimeError outside of a running event loop, and in a child of `fork` whose parent used the runtime, as its worker
/// threads do not exist there; those of [`current`].
pub fn future_into_py<'py, F, T>(py: Python<'py>, future: F) -> PyResult<Bound<'py, PyAny>>
where
    F: Future<Output = PyResult<T>> + Send + 'static,
    T: for<'a> IntoPyObject<'a> + Send + 'static,
{
    refuse_after_fork()?;
    let locals = runtimes::get_current_locals(py)?;
    let event_loop = locals.event_loop(py);
    let asyncio_future = event_loop.call_method0(intern!(py, "create_future"))?;
    let (sender, cancelled) = oneshot::channel();
    asyncio_future.call_method1(intern!(py, "add_done_callback"), (Cancel { sender: Mutex::new(Some(sender)) },))?;

    let in_context = async move { future.await.map(|value| (value, Context::copy_current())) };
    let running =
        Running { work: in_context.in_context(Context::with_handler(current(py)?)), cancelled: Some(cancelled) };
    let answer = Answer(Some(Places {
        event_loop: event_loop.unbind(),
        future: asyncio_future.clone().unbind(),
        locals: locals.clone(),
    }));
    runtimes::get_runtime().spawn(async move {
        let outcome = runtimes::scope(locals, running).await;
        answer.give(outcome);
    });
    Ok(asyncio_future)
}

/// RuntimeError in a child of `fork`: the runtime's threads do not exist there, so a future would wait for ever.
fn refuse_after_fork() -> PyResult<()> {
    /// The first process that called this; 0 before.
    static PROCESS: AtomicU32 = AtomicU32::new(0);
    let own = std::process::id();
    // Relaxed: the number is all that is shared.
    let Err(first) = PROCESS.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed) else { return Ok(()) };
    if own == first {
        return Ok(());
    }
    Err(PyRuntimeError::new_err(format!(
        "process {own} was forked from process {first}, which had started the tokio runtime; its threads do not \
         survive a fork: start workers with multiprocessing's 'spawn' or 'forkserver', or fork before the first \
         Rust future"
    )))
}

/// A future that ends when its work is done or panics, and with `None` when Python has cancelled it.
#[pin_project]
struct Running<F> {
    #[pin]
    work: F,
    /// None once nobody can cancel any more.
    cancelled: Option<oneshot::Receiver<()>>,
}

impl<F: Future<Output = PyResult<T>>, T> Future for Running<F> {
    type Output = Option<PyResult<T>>;

    fn poll(self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let this = self.project();
        // Unwind safety: after a panic the future is dropped, and never polled again.
        match catch_unwind(AssertUnwindSafe(|| this.work.poll(cx))) {
            Ok(Poll::Ready(outcome)) => return Poll::Ready(Some(outcome)),
            Ok(Poll::Pending) => {}
            Err(panic) => return Poll::Ready(Some(Err(panicked(panic.as_ref())))),
        }
        if let Some(receiver) = this.cancelled {
            match Pin::new(receiver).poll(cx) {
                Poll::Ready(Ok(())) => return Poll::Ready(None),
                Poll::Ready(Err(_)) => *this.cancelled = None,
                Poll::Pending => {}
            }
        }
        Poll::Pending
    }
}

fn panicked(panic: &(dyn Any + Send)) -> PyErr {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    RustPanic::new_err(format!("a Rust future panicked: {}", text.unwrap_or("no message")))
}

/// See `module.rs`.
pub(super) fn make_types(py: Python<'_>) {
    py.get_type::<Cancel>();
    py.get_type::<Settle>();
}

/// The done callback of the asyncio future: it tells the Rust future if that was cancelled.
#[pyclass(frozen, module = "ctxalloc")]
struct Cancel {
    sender: Mutex<Option<oneshot::Sender<()>>>,
}

#[pymethods]
impl Cancel {
    fn __call__(&self, future: &Bound<'_, PyAny>) -> PyResult<()> {
        let sender = take(&self.sender);
        if future.call_method0(intern!(future.py(), "cancelled"))?.is_truthy()?
            && let Some(sender) = sender
        {
            let _ = sender.send(()); // fails if the Rust future is done, and cannot be cancelled any more
        }
        Ok(())
    }
}

/// Gives an asyncio future its outcome. If it is dropped before it did, because a destructor or a conversion panicked,
/// the asyncio future fails with a RustPanic: whoever awaits it must not wait for ever.
struct Answer(Option<Places>);

impl Answer {
    /// Gives the outcome, if somebody waits for it, on a thread that may wait for the GIL.
    ///
    /// By now the future was dropped. If that happened on a thread that is not attached, pyo3 releases what it held of
    /// Python's only when a thread attaches again: this does, or the request would stay alive until the next call.
    fn give<T>(mut self, outcome: Option<PyResult<(T, Context)>>)
    where
        T: for<'a> IntoPyObject<'a> + Send + 'static,
    {
        runtimes::get_runtime().spawn_blocking(move || {
            exit::try_attach(|py| {
                let Some(outcome) = outcome else { return drop(self.0.take()) };
                let outcome = outcome
                    .and_then(|(value, context)| with_selection(py, &context, |py| value.into_py_any(py)).flatten());
                if let Some(places) = self.0.take() {
                    places.post(py, outcome);
                }
            })
        });
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        let Some(places) = self.0.take() else { return };
        let panicked = RustPanic::new_err("a Rust future panicked: in a destructor, or while its output was converted");
        runtimes::get_runtime().spawn_blocking(move || exit::try_attach(|py| places.post(py, Err(panicked))));
    }
}

/// Where an outcome is delivered.
struct Places {
    event_loop: Py<PyAny>,
    future: Py<PyAny>,
    /// The last reference to the Python context of the call, and so to its request: dropped while attached.
    locals: TaskLocals,
}

impl Places {
    fn post(self, py: Python<'_>, outcome: PyResult<Py<PyAny>>) {
        let Self { event_loop, future, locals } = self;
        let event_loop = event_loop.bind(py);
        let settle = Settle { future, outcome: Mutex::new(Some(outcome)) };
        let posted = settle.into_bound_py_any(py).and_then(|settle| call_soon(event_loop, settle, None));
        if let Err(error) = posted {
            // A closed loop refuses: then the program chose not to wait, and there is nothing to report.
            let closed = event_loop.call_method0(intern!(py, "is_closed")).and_then(|closed| closed.is_truthy());
            match closed {
                Ok(true) => {}
                Ok(false) => error.write_unraisable(py, Some(event_loop)),
                Err(worse) => worse.write_unraisable(py, Some(event_loop)),
            }
        }
        drop(locals);
    }
}

/// Called once on the event loop's thread: it gives the asyncio future its outcome.
#[pyclass(frozen, module = "ctxalloc")]
struct Settle {
    future: Py<PyAny>,
    outcome: Mutex<Option<PyResult<Py<PyAny>>>>,
}

#[pymethods]
impl Settle {
    fn __call__(&self, py: Python<'_>) -> PyResult<()> {
        let future = self.future.bind(py);
        let Some(outcome) = take(&self.outcome) else { return Ok(()) };
        if future.call_method0(intern!(py, "done"))?.is_truthy()? {
            return Ok(()); // cancelled meanwhile
        }
        let error = match outcome {
            Ok(value) => return future.call_method1(intern!(py, "set_result"), (value,)).map(drop),
            Err(error) => error,
        };
        if error.is_instance_of::<CancelledError>(py) {
            return future.call_method0(intern!(py, "cancel")).map(drop);
        }
        let set_exception = |error: PyErr| future.call_method1(intern!(py, "set_exception"), (error,)).map(drop);
        // asyncio refuses StopIteration, which would end the coroutine that awaits it.
        let Err(refusal) = asked(py, set_exception(error.clone_ref(py)))? else { return Ok(()) };
        let refused = PyRuntimeError::new_err(format!(
            "a Rust future failed with an exception that no asyncio future accepts: {refusal}"
        ));
        refused.set_cause(py, Some(error));
        set_exception(refused)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.future)
    }
}
