//! `ctxalloc.request()`: a request for a `with` block. Entering begins it, leaving ends it.
//!
//! A Request is for one block, and its numbers stay readable afterwards. It selects its handler as a scope does
//! (`scope.rs`). `options.rs` is the function, `block.rs` the `with` block, `methods.rs` what else Python calls,
//! `begin.rs` and `end.rs` how a request begins and ends; `refusal.rs` tells which MemoryErrors come from its limits.

mod admission;
mod begin;
pub(super) mod block;
pub(super) mod call;
mod cancelling;
mod current;
mod end;
mod entering;
mod given;
mod left;
mod methods;
mod noted;
mod options;
mod refusal;
mod report;
mod served;
mod terms;

use cancelling::Cancelling;
pub(super) use current::{current_request, served_in, serving_variable};
pub(super) use noted::note_ends;
pub(super) use options::request;
pub(super) use report::{
    PyEscaped, PyRequestMetrics, PyStats, PyWholeStats, escaped_of, request_metrics, stats_of, whole_stats_of,
};

pub(super) use served::ServedTerms;

use super::overdraft;
use super::sited;
use super::token_cell::TokenCell;
use crate::handler::Handler;
use crate::handler::requests::{Begun, RequestHandle, Seen};
use crate::sync::{Holding, Locked};
use left::Left;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use terms::Arguments;

/// See `module.rs`.
pub(super) fn make_types(py: Python<'_>) {
    py.get_type::<admission::PyAdmission>();
    py.get_type::<entering::Entering>();
    py.get_type::<left::Settling>();
}

/// A stretch of work with memory, numbers and a limit of its own: what ``ctxalloc.request()`` makes.
///
/// It is for one ``with`` or ``async with`` block; as a decorator it makes a new request for each call. RuntimeError:
/// it was entered before. ValueError on leaving: this is not the Context that entered it; nothing changes, and it may
/// still be left in its own. BudgetExceeded on leaving: the block ended with a MemoryError because a budget refused.
///
/// Two are equal if they are the same request: ``ctxalloc.current_request()`` equals the Request that began it.
#[pyclass(frozen, eq, weakref, name = "Request", module = "ctxalloc")]
pub(super) struct PyRequest {
    /// `None` for `request()`: most objects are small. Requests of a server share those of their route.
    arguments: Option<Arc<Arguments>>,
    token: TokenCell,
    phase: Locked<Phase>,
    /// Whether its phase is another than `New`: for the one that may enter it (`token`), who need not take the lock.
    is_used: AtomicBool,
    /// Which code made what it holds, if somebody asked for that.
    sited: Option<Arc<sited::Seen>>,
    /// The task that is cancelled if the request is chosen to make room, from its beginning to its end.
    cancelling: Mutex<Option<Arc<Cancelling>>>,
}

enum Phase {
    /// It was not entered yet.
    New,
    /// It was entered, and perhaps left.
    Begun { begun: Begun, left: Option<Left> },
    /// Another Request began it; this one was made by `current_request()`.
    Carried(RequestHandle),
}

impl PartialEq for PyRequest {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other) || self.begun_handler().is_some_and(|own| other.begun_handler() == Some(own))
    }
}

impl Eq for PyRequest {}

impl PyRequest {
    fn new(arguments: Arguments) -> Self {
        Self::on(Arc::new(arguments))
    }

    fn on(arguments: Arc<Arguments>) -> Self {
        Self { arguments: Some(arguments), ..Self::bare() }
    }

    /// One without options.
    #[inline]
    fn bare() -> Self {
        Self {
            arguments: None,
            token: TokenCell::new(),
            phase: Locked::new(Phase::New),
            is_used: AtomicBool::new(false),
            sited: None,
            cancelling: Mutex::new(None),
        }
    }

    /// One that another Request began.
    fn carried(handle: RequestHandle) -> Self {
        let arguments = Arguments { name: Some(Arc::<str>::from(handle.name()).into()), ..Arguments::none() };
        let phase = Locked::new(Phase::Carried(handle));
        Self { phase, is_used: AtomicBool::new(true), ..Self::new(arguments) }
    }

    /// It has begun. For the one that may enter it.
    #[inline]
    fn put_begun(&self, begun: Begun) {
        if self.is_whole() {
            overdraft::begins(&begun);
        }
        *self.phase() = Phase::Begun { begun, left: None };
        // Relaxed: whoever may enter it next comes after this one (`TokenCell`).
        self.is_used.store(true, Ordering::Relaxed);
    }

    #[inline]
    fn arguments(&self) -> &Arguments {
        static NONE: Arguments = Arguments::none();
        self.arguments.as_deref().unwrap_or(&NONE)
    }

    /// Never locked while Python code runs.
    #[inline]
    fn phase(&self) -> Holding<'_, Phase> {
        self.phase.hold()
    }

    /// BudgetExceeded: native code was given more than a limit allows, since it does not survive a refusal. It is told
    /// once; `again`: once more while the request is above the limit.
    pub(super) fn overdraft(&self, again: bool) -> PyResult<()> {
        if !self.is_whole() {
            return Ok(());
        }
        let error = self.if_begun(|request| request.overdraft(again)).flatten();
        error.map_or(Ok(()), |error| Err(error.into()))
    }

    /// What `read` returns for the request; None before it is entered.
    fn if_begun<R>(&self, read: impl FnOnce(&Seen) -> R) -> Option<R> {
        match &*self.phase() {
            Phase::New => None,
            Phase::Begun { begun, .. } => Some(read(begun)),
            Phase::Carried(handle) => Some(read(handle.seen())),
        }
    }

    /// The same; RuntimeError before it is entered.
    fn with_request<R>(&self, read: impl FnOnce(&Seen) -> R) -> PyResult<R> {
        self.if_begun(read).ok_or_else(|| {
            PyRuntimeError::new_err(format!(
                "{} is not entered yet, so there is nothing to tell; enter it with `with` or `async with`",
                self.text()
            ))
        })
    }

    /// Whether entering it may wait.
    pub(super) fn reserves(&self) -> bool {
        self.arguments().reserve.is_some()
    }

    /// Whether it counts native memory and objects too.
    pub(super) fn is_whole(&self) -> bool {
        self.arguments().is_whole
    }

    /// Its handler, which no other request has; None before it is entered.
    pub(super) fn begun_handler(&self) -> Option<Handler> {
        self.if_begun(|request| request.handler())
    }

    /// Its name in messages. Takes no lock.
    fn text(&self) -> String {
        match &self.arguments().name {
            Some(name) => format!("ctxalloc.request(name={:?})", &**name),
            None => "ctxalloc.request()".to_owned(),
        }
    }

    #[cold]
    fn used(&self, is_carried: bool) -> PyErr {
        let text = self.text();
        PyRuntimeError::new_err(if is_carried {
            format!(
                "{text} comes from current_request(): another Request began it, so it cannot be entered; make a new one \
                 with request()"
            )
        } else {
            format!("{text} was entered and left before, and is for one block; call request() again for a second one")
        })
    }
}
