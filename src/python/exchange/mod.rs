//! What `ctxalloc.asgi` does for every request of a server: its beginning, its messages, its end.
//!
//! It is in Rust because it has to be cheap. The few hundred bytecodes that it replaces take 3 us in a loop of their
//! own, and 9 us behind a server, whose code has displaced them from the processor's caches. `asgi.py` has the rarer
//! cases: a handler without an account, a middleware around another one, refusals, exceptions, WebSockets.
//!
//! `exchanges.rs` begins a request; here is what becomes of it.

mod coroutine;
mod exchanges;
mod fields;
mod framework;
mod message;
mod pattern;
mod routes;
mod sent;
mod steps;

use super::foreign::handler_in;
use super::handler::PyHandler;
use super::imported::Imported;
use super::request::PyRequest;
use super::vectorcall;
use crate::python::interned::intern;
use coroutine::Coroutine;
pub(super) use exchanges::PyExchanges;
use fields::Fields;
use message::{as_it_is, handled, is_error, is_text};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyDict;
pub(super) use routes::PyRouteTable;
use sent::{After, Sent};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
pub(super) use steps::is_trios;
use steps::{Calls, Running, Steps};

/// See `module.rs`.
pub(super) fn make_types(py: Python<'_>) {
    py.get_type::<Sent>();
    py.get_type::<Steps>();
}

/// One request that a server serves, and how much of its answer was sent.
#[pyclass(frozen, subclass, name = "Exchange", module = "ctxalloc._native")]
pub(super) struct PyExchange {
    /// Empty until it is begun.
    begun: OnceLock<Begun>,
    fields: Mutex<Fields>,
    running: Running,
}

/// What never changes once the exchange has begun.
struct Begun {
    exchanges: Py<PyExchanges>,
    request: Py<PyRequest>,
    /// What is selected around the server: a Handler, or its capsule.
    base: Py<PyAny>,
    route: Option<Py<PyAny>>,
}

impl Begun {
    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.exchanges)?;
        visit.call(&self.request)?;
        visit.call(&self.base)?;
        visit.call(&self.route)
    }
}

static STEPS: Calls = Calls {
    running: |exchange| Ok(&exchange.cast::<PyExchange>()?.get().running),
    finish: |exchange| exchange.cast::<PyExchange>()?.get().finish(exchange.py()),
};

/// After the last message.
static AFTER: After = After {
    sent_whole: |exchange| PyExchange::sent_whole(exchange.cast::<PyExchange>()?),
    is_gone: |exchange| {
        exchange.cast::<PyExchange>()?.get().fields().is_disconnected = true;
        Ok(())
    },
};

/// After another one, where somebody asks for the end.
static AFTER_PART: After = After {
    sent_whole: |_| Ok(()),
    is_gone: |exchange| {
        let mut fields = exchange.cast::<PyExchange>()?.get().fields();
        fields.is_disconnected |= !fields.is_ending;
        Ok(())
    },
};

impl PyExchange {
    /// Never locked while Python code runs.
    fn fields(&self) -> MutexGuard<'_, Fields> {
        self.fields.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begun(&self) -> PyResult<&Begun> {
        self.begun
            .get()
            .ok_or_else(|| PyValueError::new_err("this exchange was not begun; AllocatorMiddleware begins them"))
    }

    /// Leaves the request, since the application has returned. Returns whether nothing is left to do: the answer was
    /// sent, and the account is closed.
    fn finish(&self, py: Python<'_>) -> PyResult<bool> {
        self.leave(py)?;
        let ends_with_response = self.begun()?.exchanges.get().ends_with_response;
        let mut fields = self.fields();
        let is_done = fields.is_whole && ends_with_response && fields.replaced.is_none();
        let gone = is_done.then(|| fields.take_exchanged());
        drop(fields);
        drop(gone); // not under the lock: it may run code
        Ok(is_done)
    }

    /// The last message was sent: the account closes, if it closes with the answer.
    fn sent_whole(slf: &Bound<'_, Self>) -> PyResult<()> {
        let (py, begun) = (slf.py(), slf.get().begun()?);
        let mut fields = slf.get().fields();
        fields.is_whole = true;
        let is_refused = fields.refusal.is_some();
        drop(fields);
        let exchanges = begun.exchanges.get();
        if !exchanges.ends_with_response {
            return Ok(());
        }
        if exchanges.tells {
            return slf.call_method1(intern!(py, "end"), (intern!(py, "completed"),)).map(drop);
        }
        if is_refused {
            return slf.call_method1(intern!(py, "close_after"), (py.None(),)).map(drop);
        }
        slf.get().running.close(begun.request.bind(py))
    }

    /// Gives the server a message. After the last one the account closes; where somebody asks for the end, it is noted
    /// that the client has gone: servers raise OSError then (ASGI 2.4).
    fn give<'py>(
        slf: &Bound<'py, Self>,
        to_server: &Bound<'py, PyAny>,
        message: &Bound<'py, PyAny>,
        is_last: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        if is_last {
            slf.get().fields().is_ending = true;
        }
        let called = vectorcall::call(to_server, [message]);
        if !is_last && !slf.get().begun()?.exchanges.get().tells {
            return called;
        }
        let (after, of_others) =
            if is_last { (&AFTER, intern!(py, "_last")) } else { (&AFTER_PART, intern!(py, "_part")) };
        match called {
            Ok(awaitable) => match Coroutine::of(&awaitable)? {
                Some(sending) => {
                    Ok(Bound::new(py, Sent::new(slf.clone().into_any().unbind(), after, sending))?.into_any())
                }
                None => slf.call_method1(of_others, (awaitable,)),
            },
            Err(error) => {
                if error.is_instance_of::<PyOSError>(py) {
                    (after.is_gone)(slf.as_any())?;
                }
                Err(error)
            }
        }
    }
}

#[pymethods]
impl PyExchange {
    #[new]
    fn new() -> Self {
        Self { begun: OnceLock::new(), fields: Mutex::new(Fields::default()), running: Running::default() }
    }

    /// Calls the application, with a scope of its own and with our `send`. The caller awaits what it returns: None
    /// where nothing is left to do, else the exchange.
    #[pyo3(signature = (app, receive, /))]
    fn call<'py>(
        slf: &Bound<'py, Self>,
        app: &Bound<'py, PyAny>,
        receive: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, Steps>> {
        let py = slf.py();
        let inner = slf.get().fields().inner.as_ref().map(|inner| inner.bind(py).clone().into_any());
        let inner = inner.unwrap_or_else(|| py.None().into_bound(py));
        let receive = if slf.get().begun()?.exchanges.get().tells {
            slf.call_method1(intern!(py, "_watching"), (receive,))?
        } else {
            receive
        };
        let called = vectorcall::call(app, [&inner, &receive, &slf.getattr(intern!(py, "send"))?]);
        Steps::around(slf.as_any(), &STEPS, &slf.get().begun()?.request, called)
    }

    /// The application's ``send``.
    #[pyo3(signature = (message, /))]
    fn send<'py>(slf: &Bound<'py, Self>, message: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        static NOTHING: Imported = Imported::new("ctxalloc.asgi", "_nothing");
        let (py, this) = (slf.py(), slf.get());
        let request = this.begun()?.request.get();
        if request.is_whole() {
            if handled(py)?.is_none() {
                request.overdraft(false)?; // before a word of the answer is sent, if it can be
            }
            if this.fields().headers.is_some() {
                return slf.call_method1(intern!(py, "_send_after_headers"), (message,));
            }
        }
        let unusual = || slf.call_method1(intern!(py, "_send"), (message,));
        let Ok(items) = message.cast_exact::<PyDict>() else { return unusual() };
        let Some(kind) = items.get_item(intern!(py, "type"))? else { return unusual() };
        let to_server = {
            let fields = this.fields();
            if fields.replaced.is_some() { None } else { fields.to_server.as_ref().map(|send| send.bind(py).clone()) }
        };
        let Some(to_server) = to_server else { return unusual() };
        if is_text(&kind, "http.response.body") {
            let goes_on = match items.get_item(intern!(py, "more_body"))? {
                None => false,
                Some(more) => more.is_truthy()?,
            };
            return Self::give(slf, &to_server, message, !goes_on);
        }
        if !is_text(&kind, "http.response.start") {
            return unusual();
        }
        let Some(status) = items.get_item(intern!(py, "status"))? else { return unusual() };
        if is_error(&status)? {
            return unusual();
        }
        let kept = if request.is_whole() { Some(as_it_is(items)?.into_any().unbind()) } else { None };
        let is_kept = kept.is_some();
        let before = {
            let mut fields = this.fields();
            let status = fields.status.replace(status.unbind());
            if is_kept {
                (status, std::mem::replace(&mut fields.headers, kept))
            } else {
                fields.started = true;
                (status, None)
            }
        };
        drop(before); // not under the lock: it may run code
        if is_kept {
            return NOTHING.get(py)?.call0(); // the headers go with what follows them
        }
        Self::give(slf, &to_server, message, false)
    }

    /// Gives the server a message of any kind.
    #[pyo3(signature = (message, /, *, is_last))]
    fn _give<'py>(slf: &Bound<'py, Self>, message: &Bound<'py, PyAny>, is_last: bool) -> PyResult<Bound<'py, PyAny>> {
        let to_server = slf.getattr(intern!(slf.py(), "to_server"))?;
        Self::give(slf, &to_server, message, is_last)
    }

    /// Restores the selection and removes the mark. Where the call's coroutine was thrown away and is closed in another
    /// Context, there is nothing to restore: the request just ends.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        let begun = self.begun()?;
        match begun.request.get().leave(py) {
            Err(error) if error.is_instance_of::<PyValueError>(py) => return PyRequest::close(begun.request.bind(py)),
            left => left?,
        }
        let mark = self.fields().mark.take();
        match mark {
            Some(mark) => begun.exchanges.get().serving.reset(mark.bind(py)),
            None => Ok(()),
        }
    }

    /// Lets go of what need not stay alive in Contexts that live on (those of a timer of the connection, a task).
    fn forget(&self, _py: Python<'_>) {
        let gone = self.fields().take_exchanged();
        drop(gone); // not under the lock: it may run code
    }

    /// The last message was sent, by an awaitable that is no coroutine.
    fn _sent_whole(slf: &Bound<'_, Self>) -> PyResult<()> {
        Self::sent_whole(slf)
    }

    /// Ends the request, if it has not ended.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.running.close(self.begun()?.request.bind(py))
    }

    /// What is selected around the server.
    #[getter]
    fn base<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyHandler>> {
        match self.begun()?.base.bind(py).clone().cast_into::<PyHandler>() {
            Ok(handler) => Ok(handler),
            Err(capsule) => PyHandler::of(py, handler_in(&capsule.into_inner())?),
        }
    }

    #[getter]
    fn service(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(self.begun()?.exchanges.get().service.clone_ref(py))
    }

    #[getter]
    fn _answers(&self) -> PyResult<bool> {
        Ok(self.begun()?.exchanges.get().answers)
    }

    #[getter]
    fn scope(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.fields().scope.as_ref().map(|it| it.clone_ref(py))
    }

    /// The application's scope.
    #[getter]
    fn inner(&self, py: Python<'_>) -> Option<Py<PyDict>> {
        self.fields().inner.as_ref().map(|it| it.clone_ref(py))
    }

    #[getter]
    fn route(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.begun.get()?.route.as_ref().map(|it| it.clone_ref(py))
    }

    #[getter(request)]
    fn request_py(&self, py: Python<'_>) -> Option<Py<PyRequest>> {
        self.begun.get().map(|begun| begun.request.clone_ref(py))
    }

    /// The server's `send`; None once the application has returned.
    #[getter]
    fn _to_server(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.fields().to_server.as_ref().map(|it| it.clone_ref(py))
    }

    #[getter]
    fn tenant(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.fields().tenant.as_ref().map(|it| it.clone_ref(py))
    }

    #[setter]
    fn set_tenant(&self, value: Option<Py<PyAny>>) {
        let old = std::mem::replace(&mut self.fields().tenant, value);
        drop(old);
    }

    #[getter]
    fn status(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.fields().status.as_ref().map(|it| it.clone_ref(py))
    }

    #[setter]
    fn set_status(&self, value: Option<Py<PyAny>>) {
        let old = std::mem::replace(&mut self.fields().status, value);
        drop(old);
    }

    #[getter]
    fn headers(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.fields().headers.as_ref().map(|it| it.clone_ref(py))
    }

    #[setter]
    fn set_headers(&self, value: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        let kept = match value {
            Some(value) => match value.cast::<PyDict>() {
                Ok(message) => Some(as_it_is(message)?.into_any().unbind()),
                Err(_) => Some(value.unbind()),
            },
            None => None,
        };
        let old = std::mem::replace(&mut self.fields().headers, kept);
        drop(old);
        Ok(())
    }

    /// Whether the request counts native memory and objects too.
    #[getter]
    fn counts_whole(&self) -> PyResult<bool> {
        Ok(self.begun()?.request.get().is_whole())
    }

    #[getter]
    fn replaced(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.fields().replaced.as_ref().map(|it| it.clone_ref(py))
    }

    #[setter]
    fn set_replaced(&self, value: Option<Py<PyAny>>) {
        let old = std::mem::replace(&mut self.fields().replaced, value);
        drop(old);
    }

    #[getter]
    fn _refusal(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.fields().refusal.as_ref().map(|it| it.clone_ref(py))
    }

    #[setter(_refusal)]
    fn set_refusal(&self, value: Option<Py<PyAny>>) {
        let old = std::mem::replace(&mut self.fields().refusal, value);
        drop(old);
    }

    #[getter]
    fn is_disconnected(&self) -> bool {
        self.fields().is_disconnected
    }

    #[setter]
    fn set_is_disconnected(&self, value: bool) {
        self.fields().is_disconnected = value;
    }

    #[getter]
    fn is_ending(&self) -> bool {
        self.fields().is_ending
    }

    #[setter]
    fn set_is_ending(&self, value: bool) {
        self.fields().is_ending = value;
    }

    #[getter]
    fn started(&self) -> bool {
        self.fields().started
    }

    #[setter]
    fn set_started(&self, value: bool) {
        self.fields().started = value;
    }

    #[getter]
    fn is_whole(&self) -> bool {
        self.fields().is_whole
    }

    #[setter]
    fn set_is_whole(&self, value: bool) {
        self.fields().is_whole = value;
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        if let Some(begun) = self.begun.get() {
            begun.traverse(&visit)?;
        }
        // Where the lock is taken, somebody uses the fields just now: then the exchange is no garbage.
        self.fields.try_lock().map_or(Ok(()), |fields| fields.traverse(&visit))
    }

    fn __clear__(&self) {
        let gone = std::mem::take(&mut *self.fields());
        drop(gone);
    }
}
