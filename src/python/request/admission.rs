//! Waiting for room in Python: a plain `with` blocks its thread, without the GIL and open to signals; `async with` is
//! in `python/ctxalloc/_room.py`, which awaits a future that an [`Admission`] wakes.

use super::left::running_loop;
use crate::handler::requests::{Begun, Prepared, Terms};
use crate::python::exit::{self, try_attach};
use crate::python::imported::{Imported, module};
use crate::python::interned::intern;
use crate::room::{Admission, take_now};
use pyo3::exceptions::PyRuntimeError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

/// How often a blocked thread looks for a signal: Python's handlers run on the main thread only, when it comes by.
const SIGNALS: Duration = Duration::from_millis(50);

/// Begins a request when there is room, and blocks this thread meanwhile. RuntimeError on a thread that runs an event
/// loop; whatever a signal's handler raises.
pub(super) fn begin_blocking(
    py: Python<'_>,
    terms: Terms,
    timeout: Option<Duration>,
    text: impl Fn() -> String,
) -> PyResult<Begun> {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    if NoLoop::is_due() {
        NoLoop::check(py, &text)?;
    }
    let prepared = Prepared::new(terms)?;
    if take_now(&prepared)? {
        return Ok(prepared.begin());
    }
    NoLoop::check(py, &text)?;
    if let Some(turn) = turn_of_gevent(py)? {
        let begun = begin_in_greenlet(py, prepared, timeout, &turn);
        turn.call_method0(intern!(py, "close"))?;
        return begun;
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    // Other Python code may run while wakers of others are called.
    let mut admission = py.detach(|| Admission::of(prepared, timeout))?;
    loop {
        let polled = py.detach(|| {
            let polled = poll(&mut admission, &waker);
            if polled.is_pending() {
                thread::park_timeout(SIGNALS);
            }
            polled
        });
        if let Poll::Ready(begun) = polled {
            return Ok(begun?);
        }
        if let Err(error) = py.check_signals() {
            py.detach(|| drop(admission));
            return Err(error);
        }
    }
}

/// What wakes the greenlet that runs here, where gevent is there.
fn turn_of_gevent(py: Python<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    static TURN: Imported = Imported::new("ctxalloc._gevent", "turn");
    if module(py, intern!(py, "gevent")).is_none() {
        return Ok(None);
    }
    Ok(Some(TURN.get(py)?.call0()?).filter(|turn| !turn.is_none()))
}

/// Waits without blocking other greenlets.
fn begin_in_greenlet(
    py: Python<'_>,
    prepared: Prepared,
    timeout: Option<Duration>,
    turn: &Bound<'_, PyAny>,
) -> PyResult<Begun> {
    let waker = Waker::from(Arc::new(Notify(turn.getattr(intern!(py, "wake"))?.unbind())));
    let mut admission = py.detach(|| Admission::of(prepared, timeout))?;
    loop {
        if let Poll::Ready(begun) = py.detach(|| poll(&mut admission, &waker)) {
            return Ok(begun?);
        }
        if let Err(error) = turn.call_method0(intern!(py, "wait")) {
            py.detach(|| drop(admission));
            return Err(error); // it was killed, or its time is over
        }
    }
}

/// What is known of this thread: that no event loop runs here. To ask Python is dearer than the whole reservation.
///
/// One that has to wait asks each time. One that need not could only do harm the next time: so a thread asks before its
/// first reservations, and where none found a loop, before each sixteenth. Where a loop is found it begins anew, so on
/// a loop's thread each is refused, from the sixteenth at the latest.
struct NoLoop;

thread_local! {
    /// How often this thread reserved since it last found a loop.
    static RESERVED: Cell<u32> = const { Cell::new(0) };
}

impl NoLoop {
    const FIRST: u32 = 64;
    const EACH: u32 = 16;

    /// Whether it is asked before this reservation, also if it need not wait.
    fn is_due() -> bool {
        let reserved = RESERVED.get();
        // Goes round among the numbers of those that were not the first.
        let next = if reserved < Self::FIRST + Self::EACH - 1 { reserved + 1 } else { Self::FIRST };
        RESERVED.set(next);
        reserved <= Self::FIRST
    }

    /// RuntimeError: an event loop runs here.
    fn check(py: Python<'_>, text: impl Fn() -> String) -> PyResult<()> {
        let what = match running_loop(py) {
            Some(found) if !is_another_greenlets(py, &found)? => "an event loop",
            _ if runs_trio(py) => "trio",
            _ => return Ok(()),
        };
        RESERVED.set(0);
        Err(PyRuntimeError::new_err(format!(
            "{} reserves memory, and this thread runs {what}, which would stand still while it waits; enter it with \
             `async with`",
            text()
        )))
    }
}

/// Whether another greenlet of this thread runs this event loop, which goes on while this one waits.
fn is_another_greenlets(py: Python<'_>, event_loop: &Bound<'_, PyAny>) -> PyResult<bool> {
    static ELSEWHERE: Imported = Imported::new("ctxalloc._gevent", "runs_elsewhere");
    if module(py, intern!(py, "gevent")).is_none() {
        return Ok(false);
    }
    ELSEWHERE.get(py)?.call1((event_loop,))?.is_truthy()
}

/// Whether trio runs on this thread.
fn runs_trio(py: Python<'_>) -> bool {
    let lowlevel = module(py, intern!(py, "trio.lowlevel"));
    // The one question that all its versions answer; it is an error where trio does not run.
    lowlevel.is_some_and(|lowlevel| lowlevel.call_method0(intern!(py, "current_trio_token")).is_ok())
}

fn poll(admission: &mut Admission, waker: &Waker) -> Poll<Result<Begun, crate::error::Error>> {
    Pin::new(admission).poll(&mut Context::from_waker(waker))
}

/// A request on its way in, for `async with`.
#[pyclass(frozen, weakref, name = "_Admission", module = "ctxalloc")]
pub(in crate::python) struct PyAdmission {
    admission: Mutex<Option<Admission>>,
    /// The Request.
    subject: Py<PyAny>,
    enter: Enter,
}

/// Enters the Request that was admitted.
pub(super) type Enter = fn(subject: &Bound<'_, PyAny>, begun: Begun) -> PyResult<()>;

/// Calls a Python function, on whatever thread room came.
struct Notify(Py<PyAny>);

impl Wake for Notify {
    fn wake(self: Arc<Self>) {
        // After Python's exit nobody is there to be woken.
        try_attach(|py| {
            if let Err(error) = self.0.call0(py) {
                error.write_unraisable(py, Some(self.0.bind(py)));
            }
        });
    }
}

impl PyAdmission {
    pub(super) fn new(subject: Py<PyAny>, admission: Admission, enter: Enter) -> Self {
        Self { admission: Mutex::new(Some(admission)), subject, enter }
    }

    fn take(&self) -> Option<Admission> {
        self.admission.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl PyAdmission {
    /// Enters the request if it is its turn, and says whether it did; else ``notify`` is called when it may be, and
    /// without one nobody is.
    #[pyo3(signature = (notify = None, /))]
    fn enter(&self, py: Python<'_>, notify: Option<Py<PyAny>>) -> PyResult<bool> {
        let Some(mut admission) = self.take() else {
            return Err(PyRuntimeError::new_err("this request was admitted, or left the queue"));
        };
        let waker = notify.map(|notify| Waker::from(Arc::new(Notify(notify))));
        match poll(&mut admission, waker.as_ref().unwrap_or(Waker::noop())) {
            Poll::Pending => {
                *self.admission.lock().unwrap_or_else(PoisonError::into_inner) = Some(admission);
                Ok(false)
            }
            Poll::Ready(begun) => (self.enter)(self.subject.bind(py), begun?).map(|()| true),
        }
    }

    /// Leaves the queue. Nothing happens after `enter` returned True.
    fn leave(&self, py: Python<'_>) {
        if let Some(admission) = self.take() {
            py.detach(|| drop(admission));
        }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.subject)
    }
}

impl Drop for PyAdmission {
    fn drop(&mut self) {
        // A coroutine that nobody finished. Wakers of others, which this may call, attach by themselves.
        if exit::is_closed() {
            std::mem::forget(self.take());
        }
    }
}
