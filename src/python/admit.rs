//! `admit`: a Rust task waits for room in Python's queue, in line with Python's tasks and threads.
//!
//! A budget and its queue belong to one copy of this crate. What Python has is the package's, of which the copy in an
//! extension module knows nothing. So the request is Python's object, asked by its methods; only what wakes the task is
//! here.

use super::asked::asked;
use super::exit::try_attach;
use super::foreign::handler_in;
use super::imported::Imported;
use super::text::repr_of;
use crate::handler::Handler;
use crate::python::interned::intern;
use crate::scope::{Scoped, WithHandler};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

/// A Rust task begins a request of Python when there is room: `request` is a `ctxalloc.Request` that nobody has
/// entered, made with or without `reserve_bytes=`.
///
/// It takes its reservation, or its place in the queue, before this returns, behind everybody who waits already: tasks
/// of asyncio and of tokio, threads, of all modules of the process. Dropping the future leaves the queue. No event loop
/// takes part, and no handler is selected by it.
///
/// ```ignore
/// #[pyfunction]
/// fn work<'py>(request: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
///     let waits = ctxalloc::python::admit(request)?;
///     ctxalloc::python::future_into_py(request.py(), async move {
///         let request = waits.await?;
///         let sum = request.scope(async { Ok::<_, PyErr>(ctxalloc::Buffer::zeroed(1 << 20)?.len()) }).await?;
///         request.end()?;
///         Ok(sum)
///     })
/// }
/// ```
///
/// # Errors
/// TypeError: it is no Request. `ctxalloc.NoRoom` where it cannot wait. RuntimeError: it was entered before.
pub fn admit(request: &Bound<'_, PyAny>) -> PyResult<PythonAdmission> {
    static REQUEST: Imported = Imported::new("ctxalloc", "Request");
    let py = request.py();
    if !request.is_instance(REQUEST.get(py)?)? {
        return Err(PyTypeError::new_err(format!(
            "admit({}): give a ctxalloc.Request, which ctxalloc.request() makes",
            repr_of(request)?
        )));
    }
    let options = PyDict::new(py);
    options.set_item("selects", false)?;
    let admission = request.call_method(intern!(request.py(), "_admission"), (), Some(&options))?.unbind();
    let woken = Arc::new(Woken::default());
    let wakes = Arc::clone(&woken);
    let notify = PyCFunction::new_closure(py, None, None, move |_, _| wakes.wake());
    let places = Places { request: request.clone().unbind(), admission };
    let mut waits = PythonAdmission { places: Some(places), notify: None, woken };
    waits.notify = Some(notify?.into_any().unbind()); // where that fails it leaves the queue
    Ok(waits)
}

/// Whom to wake.
#[derive(Default)]
struct Woken(Mutex<Option<Waker>>);

impl Woken {
    fn put(&self, waker: Waker) {
        let _before = self.0.lock().unwrap_or_else(PoisonError::into_inner).replace(waker);
    }

    fn wake(&self) {
        let waker = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(waker) = waker {
            waker.wake(); // somebody's code, under no lock but Python's
        }
    }
}

/// Python's objects of one that waits.
struct Places {
    request: Py<PyAny>,
    admission: Py<PyAny>,
}

/// A request of Python that a Rust task waits for: what [`admit`] returns. Dropping it leaves the queue.
///
/// Where Python exits meanwhile, it is a RuntimeError.
#[must_use = "it leaves the queue when it is dropped"]
pub struct PythonAdmission {
    /// Until it is ready.
    places: Option<Places>,
    notify: Option<Py<PyAny>>,
    woken: Arc<Woken>,
}

impl Future for PythonAdmission {
    type Output = PyResult<PythonRequest>;

    /// Waits for Python's GIL, as everything does that attaches.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let (Some(places), Some(notify)) = (&this.places, &this.notify) else {
            panic!("a future is not polled after it was ready");
        };
        this.woken.put(cx.waker().clone()); // before it asks: it may be called at once
        let entered = try_attach(|py| {
            let is_in = places.admission.bind(py).call_method1(intern!(py, "enter"), (notify,))?.is_truthy()?;
            if is_in { PythonRequest::begun(py, &places.request).map(Some) } else { Ok(None) }
        });
        let answer = match entered {
            Some(Ok(None)) => return Poll::Pending,
            Some(Ok(Some(begun))) => Ok(begun),
            Some(Err(error)) => Err(error),
            None => Err(PyRuntimeError::new_err("Python is shutting down, and admits no request any more")),
        };
        this.leave();
        Poll::Ready(answer)
    }
}

impl PythonAdmission {
    /// Nothing where it was admitted. What it holds of Python is dropped while attached.
    fn leave(&mut self) {
        let (places, notify) = (self.places.take(), self.notify.take());
        if let Some(places) = places {
            try_attach(|py| {
                if let Err(error) = places.admission.bind(py).call_method0(intern!(py, "leave")) {
                    error.write_unraisable(py, Some(places.request.bind(py)));
                }
                drop((places, notify));
            });
        }
    }
}

impl Drop for PythonAdmission {
    fn drop(&mut self) {
        self.leave();
    }
}

impl fmt::Debug for PythonAdmission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PythonAdmission").field("is_ready", &self.places.is_none()).finish_non_exhaustive()
    }
}

/// A request of Python that a Rust task has begun. Dropping it ends it.
#[derive(Debug)]
pub struct PythonRequest {
    /// Until its end.
    request: Option<Py<PyAny>>,
    handler: Handler,
}

impl PythonRequest {
    fn begun(py: Python<'_>, request: &Py<PyAny>) -> PyResult<Self> {
        let bound = request.bind(py);
        let handler = bound
            .getattr(intern!(py, "handler"))
            .and_then(|handler| handler_in(&handler.getattr(intern!(py, "capsule"))?));
        match handler {
            Ok(handler) => Ok(Self { request: Some(request.clone_ref(py)), handler }),
            Err(error) => {
                asked(py, end(bound))?.ok(); // the first error is the one that is told
                Err(error)
            }
        }
    }

    /// Its handler, for [`with_handler`](WithHandler::with_handler) and [`scope`](fn@crate::scope).
    #[must_use]
    pub fn handler(&self) -> Handler {
        self.handler
    }

    /// Gives `future` a context of its own with the request's handler selected. It does not end the request.
    pub fn scope<F: Future>(&self, future: F) -> Scoped<F> {
        future.with_handler(self.handler)
    }

    /// Ends it: the rest of its reservation goes back, and the next one in line has its turn.
    ///
    /// # Errors
    /// What the end of a Request raises.
    pub fn end(mut self) -> PyResult<()> {
        self.finish()
    }

    fn finish(&mut self) -> PyResult<()> {
        let Some(request) = self.request.take() else { return Ok(()) };
        try_attach(|py| end(request.bind(py))).unwrap_or(Ok(())) // at Python's exit nobody waits any more
    }
}

fn end(request: &Bound<'_, PyAny>) -> PyResult<()> {
    request.call_method1(intern!(request.py(), "_end"), (request.py().None(),)).map(drop)
}

impl Drop for PythonRequest {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            try_attach(|py| error.write_unraisable(py, None));
        }
    }
}
