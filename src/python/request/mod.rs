//! `ctxalloc.request()`: a request for a `with` block. Entering begins it, leaving ends it.
//!
//! A Request is for one block, and its numbers stay readable afterwards. It selects its handler as a scope does
//! (`scope.rs`). `refusal.rs` tells which MemoryErrors come from its limits.

mod admission;
pub(super) mod call;
mod cancelling;
mod current;
mod entering;
mod left;
mod noted;
mod refusal;
mod report;
mod terms;

use admission::Enter;
pub(super) use admission::PyAdmission;
use cancelling::Cancelling;
pub(super) use current::{current_request, served_in, serving_variable};
pub(super) use noted::note_ends;
pub(super) use report::{
    PyEscaped, PyRequestMetrics, PyStats, PyWholeStats, escaped_of, request_metrics, stats_of, whole_stats_of,
};

use super::budget::PyBudget;
use super::handler::{PyHandler, capsule_of};
use super::imported::Imported;
use super::numpy::Numpy;
use super::overdraft::Guard;
use super::scope::{deselect, entered_already, not_entered};
use super::sited::{self, sited};
use super::step::Step;
use super::sums::{SiteNumbers, SumNumbers};
use super::token_cell::TokenCell;
use super::whole::enable;
use crate::handler::Handler;
use crate::handler::requests::on_chosen::OnChosen;
use crate::handler::requests::{Begun, Prepared, RequestHandle, Seen};
use crate::room::{Admission, Ending, take_now};
use entering::Entering;
use left::{Left, Settling, running_loop};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use terms::Arguments;

/// A stretch of work with memory, numbers and a limit of its own: what ``ctxalloc.request()`` makes.
///
/// It is for one ``with`` or ``async with`` block; as a decorator it makes a new request for each call. RuntimeError:
/// it was entered before. ValueError on leaving: this is not the Context that entered it; nothing changes, and it may
/// still be left in its own. BudgetExceeded on leaving: the block ended with a MemoryError because a budget refused.
///
/// Two are equal if they are the same request: ``ctxalloc.current_request()`` equals the Request that began it.
#[pyclass(frozen, eq, weakref, name = "Request", module = "ctxalloc")]
pub(super) struct PyRequest {
    arguments: Arguments,
    token: TokenCell,
    phase: Mutex<Phase>,
    /// Of a `with` block of a whole request.
    guard: Mutex<Option<Guard>>,
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

/// A request: memory, numbers and perhaps a limit of its own for a ``with`` or ``async with`` block, or for each call
/// of a function that it decorates::
///
///     >>> with ctxalloc.request(limit_bytes=ctxalloc.MiB, name="thumbnail") as scope:
///     ...     kept = numpy.zeros(100_000).sum(keepdims=True)
///     >>> scope.stats.peak_bytes, scope.escaped.count, scope.escaped.bytes
///     (800008, 1, 8)
///
/// ``limit_bytes``: the most bytes that may be alive at one time. ``strategy``: where its blocks come from, instead of
/// the process's pool. ``name``: for messages. ``budget``: a Budget that is charged too. A request inside of another
/// one is charged to that one as well, unless it is a root (``root=True``), as the requests that a server begins should
/// be. Its arrays may outlive it for any length of time, and stay charged to it until they are freed.
///
/// ``after_end``: what happens to arrays that are made under it after its end, by tasks that continue: ``"charge"``
/// counts and limits them as before, ``"refuse"`` raises MemoryError, ``"detach"`` neither counts nor limits them,
/// unless the request is inside of one that is open: then they are charged and limited as before.
///
/// Arrays of up to 1 KiB may exceed each limit by up to 64 KiB in all, those of up to 32 bytes by 1 MiB
/// (``stats.overdraft_bytes`` tells how far they do), because NumPy crashes if some of its scalars are refused. The
/// same holds after the end of a request that refuses. ``strict=True`` allows no excess.
///
/// ``measure_unseen=True``: find out by how much the process grows beside its pools meanwhile
/// (``unseen_growth_bytes``). Costs two looks at the system, some microseconds each.
///
/// ``reserve_bytes``: reserve so much of every budget that it is charged to, from its beginning to its end. Entering it
/// waits in line until there is room, at most ``timeout`` seconds: ``async with`` in its task, ``with`` in its thread
/// (RuntimeError where that runs an event loop). NoRoom: it does not wait, or not longer. Its arrays come out of what
/// is reserved first; it may use more while the budgets have room. Inside of another request it reserves from that
/// one's reservation, and does not wait. ``reserve_bytes="auto"`` is what requests of its name needed lately: of their
/// last hundred peaks or so what was enough for 95 %, times 1.2; ``limit_bytes``, which it needs then, is the most, and
/// is reserved until ten of them have ended. ``max_waiting``: how many of its name may wait at one time.
///
/// ``whole=True``: count and limit native memory and Python objects beside arrays, all in one sum (``stats.whole`` has
/// the parts). RuntimeError: its library is not preloaded, or cannot be; docs/whole.md.
///
/// ``cancel_if_chosen=True``: when it is chosen to make room for one that waits (``Budget.victims_after``), the asyncio
/// task that entered it is cancelled, and leaving it raises BudgetExceeded. RuntimeError on entering: no task runs
/// here.
///
/// TypeError, ValueError: an argument is invalid; on entering, the strategy aligns to less than 16 bytes. RuntimeError
/// on entering: more than 4096 requests and budgets would be charged.
#[allow(clippy::too_many_arguments, reason = "one for each option of the function in Python")]
#[pyfunction]
#[pyo3(signature = (
    *, limit_bytes = None, strategy = None, name = None, budget = None, root = None, after_end = None, strict = None,
    measure_unseen = None, reserve_bytes = None, timeout = None, max_waiting = None, whole = None,
    cancel_if_chosen = None
))]
pub(super) fn request(
    limit_bytes: Option<&Bound<'_, PyAny>>,
    strategy: Option<&Bound<'_, PyAny>>,
    name: Option<&Bound<'_, PyAny>>,
    budget: Option<&Bound<'_, PyAny>>,
    root: Option<&Bound<'_, PyAny>>,
    after_end: Option<&Bound<'_, PyAny>>,
    strict: Option<&Bound<'_, PyAny>>,
    measure_unseen: Option<&Bound<'_, PyAny>>,
    reserve_bytes: Option<&Bound<'_, PyAny>>,
    timeout: Option<&Bound<'_, PyAny>>,
    max_waiting: Option<&Bound<'_, PyAny>>,
    whole: Option<&Bound<'_, PyAny>>,
    cancel_if_chosen: Option<&Bound<'_, PyAny>>,
) -> PyResult<PyRequest> {
    made(&[
        limit_bytes,
        strategy,
        name,
        budget,
        root,
        after_end,
        strict,
        measure_unseen,
        reserve_bytes,
        timeout,
        max_waiting,
        whole,
        cancel_if_chosen,
    ])
}

/// What a Request is made of, each as it was given, in the order of [`request`].
type Options<'a, 'py> = [Option<&'a Bound<'py, PyAny>>; 13];

fn made(options: &Options<'_, '_>) -> PyResult<PyRequest> {
    let &[
        limit_bytes,
        strategy,
        name,
        budget,
        root,
        after_end,
        strict,
        measure_unseen,
        reserve_bytes,
        timeout,
        max_waiting,
        whole,
        cancel_if_chosen,
    ] = options;
    let is_whole = terms::flag("whole", whole)?;
    if let (true, Some(whole)) = (is_whole, whole) {
        enable(whole.py())?;
    }
    let limit_bytes = terms::limit(limit_bytes)?;
    Ok(PyRequest::new(Arguments {
        is_whole,
        limit_bytes,
        strategy: terms::strategy(strategy)?,
        name: terms::name(name)?.map(Into::into),
        budget: terms::budget(budget)?,
        is_root: terms::flag("root", root)?,
        after_end: terms::after_end(after_end)?,
        is_strict: terms::flag("strict", strict)?,
        measure_unseen: terms::flag("measure_unseen", measure_unseen)?,
        reserve: terms::reserve(reserve_bytes, limit_bytes)?,
        timeout: terms::timeout(timeout, reserve_bytes.is_some())?,
        max_waiting: terms::max_waiting(max_waiting, reserve_bytes.is_some())?,
        cancel_if_chosen: terms::flag("cancel_if_chosen", cancel_if_chosen)?,
        is_uncounted: false,
    }))
}

impl PartialEq for PyRequest {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other) || self.begun_handler().is_some_and(|own| other.begun_handler() == Some(own))
    }
}

impl Eq for PyRequest {}

impl PyRequest {
    fn new(arguments: Arguments) -> Self {
        Self {
            arguments,
            token: TokenCell::new(),
            phase: Mutex::new(Phase::New),
            guard: Mutex::new(None),
            sited: None,
            cancelling: Mutex::new(None),
        }
    }

    /// Never locked while Python code runs.
    fn guard(&self) -> MutexGuard<'_, Option<Guard>> {
        self.guard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never locked while Python code runs.
    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, py: Python<'_>) -> PyResult<()> {
        self.enter_by(|| self.select(py))
    }

    /// Enters it where it was admitted.
    fn enter_begun(&self, py: Python<'_>, begun: Begun) -> PyResult<()> {
        self.enter_by(|| self.select_begun(py, begun))
    }

    /// Begins it, where it was admitted, without selecting its handler.
    fn keep_begun(&self, begun: Begun) -> PyResult<()> {
        if !self.token.begin() {
            return Err(entered_already(&self.text()));
        }
        *self.phase() = Phase::Begun { begun, left: None };
        Ok(())
    }

    /// What it begins with where it may have to wait, and how long it may.
    #[inline]
    fn prepare(&self, py: Python<'_>) -> PyResult<(Prepared, Option<Duration>)> {
        self.check_new()?;
        let (terms, timeout) = self.arguments.terms(py, self.on_chosen(py)?)?;
        Ok((Prepared::new(terms)?, timeout))
    }

    /// RuntimeError: it was entered before, or another Request began it.
    #[inline]
    fn check_new(&self) -> PyResult<()> {
        let is_carried = match &*self.phase() {
            Phase::New => return Ok(()),
            phase => matches!(phase, Phase::Carried(_)),
        };
        Err(self.used(is_carried))
    }

    /// Enters it if that needs no waiting; else its place in the queue.
    fn enter_or_wait(slf: &Bound<'_, Self>, selects: bool) -> PyResult<Option<PyAdmission>> {
        let (py, this) = (slf.py(), slf.get());
        if !this.token.begin() {
            return Err(entered_already(&this.text()));
        }
        let mut waits = None;
        let entered = this.prepare(py).and_then(|(prepared, timeout)| {
            if !take_now(&prepared)? {
                waits = Some((prepared, timeout));
                return Ok(None);
            }
            let begun = prepared.begin();
            if selects {
                return this.select_begun(py, begun).map(Some);
            }
            *this.phase() = Phase::Begun { begun, left: None };
            Ok(None)
        });
        match (entered, waits) {
            (Ok(Some(token)), _) => this.token.put(token),
            (Ok(None), None) => {} // it is entered, without a token
            (Ok(None), Some((prepared, timeout))) => {
                this.token.clear();
                return Self::waiting(slf, prepared, timeout, selects).map(Some);
            }
            (Err(error), _) => {
                this.token.clear();
                return Err(error);
            }
        }
        Ok(None)
    }

    fn waiting(
        slf: &Bound<'_, Self>,
        prepared: Prepared,
        timeout: Option<Duration>,
        selects: bool,
    ) -> PyResult<PyAdmission> {
        // Other Python code may run while wakers of others are called.
        let admission = slf.py().detach(|| Admission::of(prepared, timeout))?;
        Ok(PyAdmission::new(slf.clone().unbind().into_any(), admission, Self::enter_as(selects)))
    }

    fn enter_as(selects: bool) -> Enter {
        if selects {
            |request, begun| request.cast::<Self>()?.get().enter_begun(request.py(), begun)
        } else {
            |request, begun| request.cast::<Self>()?.get().keep_begun(begun)
        }
    }

    fn enter_by<'py>(&self, select: impl FnOnce() -> PyResult<Bound<'py, PyAny>>) -> PyResult<()> {
        if !self.token.begin() {
            return Err(entered_already(&self.text()));
        }
        match select() {
            Ok(token) => {
                self.token.put(token);
                Ok(())
            }
            Err(error) => {
                self.token.clear();
                Err(error)
            }
        }
    }

    /// Begins the request and selects its handler. After an error nothing has changed.
    fn select<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let capsule = capsule_of(py, self.begin(py)?)?;
        Numpy::get(py)?.selection().set(&capsule).inspect_err(|_| *self.phase() = Phase::New)
    }

    /// Begins the request. The caller is the one that may enter.
    fn begin(&self, py: Python<'_>) -> PyResult<Handler> {
        self.check_new()?;
        let begun = self.arguments.begin(py, self.on_chosen(py)?, || self.text())?;
        let handler = begun.handler();
        *self.phase() = Phase::Begun { begun, left: None };
        Ok(handler)
    }

    /// What is called when it is chosen to make room, for the task that runs here.
    fn on_chosen(&self, py: Python<'_>) -> PyResult<Option<OnChosen>> {
        if !self.arguments.cancel_if_chosen {
            return Ok(None);
        }
        let cancelling = Cancelling::running(py, &self.text())?;
        let on_chosen = cancelling.on_chosen();
        *self.cancelling.lock().unwrap_or_else(PoisonError::into_inner) = Some(cancelling);
        Ok(Some(on_chosen))
    }

    fn select_begun<'py>(&self, py: Python<'py>, begun: Begun) -> PyResult<Bound<'py, PyAny>> {
        let capsule = capsule_of(py, begun.handler())?;
        self.check_new()?;
        *self.phase() = Phase::Begun { begun, left: None };
        Numpy::get(py)?.selection().set(&capsule).inspect_err(|_| *self.phase() = Phase::New)
    }

    fn exit(slf: &Bound<'_, Self>, error: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        let Some(token) = this.token.take(py) else { return Err(not_entered(&this.text())) };
        let left = deselect(py, &this.token, token, &|| this.text());
        if this.token.is_in_use() {
            return left; // still entered, in another Context
        }
        let over = if error.is_none() { this.overdraft(true) } else { Ok(()) };
        let refused = Self::end(slf, error);
        match (left.and(refused), over) {
            (Err(raised), Err(over)) => Err(refusal::raised_during(py, raised, over)),
            (refused, over) => refused.and(over),
        }
    }

    /// Ends the request. BudgetExceeded: `error`, which ended the block, comes from one of its refusals.
    fn end(slf: &Bound<'_, Self>, error: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        let has_blocks = match &*this.phase() {
            Phase::Begun { begun, left: None } => begun.stats().live_blocks > 0,
            _ => return Ok(()), // it has ended already
        };
        let settling = if has_blocks {
            running_loop(py).map(|it| Settling::new(slf.clone().into_any(), Self::settle_if, it))
        } else {
            None
        };
        let mut phase = this.phase();
        let Phase::Begun { begun, left: left @ None } = &mut *phase else { return Ok(()) };
        let ending = Ending::begin();
        *left = Some(if settling.is_some() { Left::open(begun) } else { Left::settled(begun) });
        let refusals = if error.is_some() { begun.take_refusals() } else { Vec::new() };
        let is_whole = begun.whole().is_some();
        let noted = noted::of(begun);
        drop(phase);
        ending.look(); // who gets its room is woken by this thread, which has the GIL
        let noted = noted::tell(py, noted);
        let settled = match settling {
            Some(settling) => settling.begin(py),
            None => Self::tell_sites(slf),
        };
        let cancelling = this.cancelling.lock().unwrap_or_else(PoisonError::into_inner).take();
        let cancelled = cancelling.map_or(Ok(()), |cancelling| cancelling.end(py, error));
        let refused = match error {
            Some(error) => cancelled.and_then(|()| refusal::raise(py, error, &refusals, is_whole)),
            None => cancelled,
        };
        match (noted.and(settled), refused) {
            (Err(raised), Err(refused)) => Err(refusal::raised_during(py, raised, refused)),
            (told, refused) => told.and(refused),
        }
    }

    /// Settles what has escaped, unless that is done: see [`Left`].
    ///
    /// # Errors
    /// What a signal's handler, or the function that was to be called, raised.
    fn settle(slf: &Bound<'_, Self>) -> PyResult<()> {
        let (is_fresh, told) = match &mut *slf.get().phase() {
            Phase::Begun { begun, left: Some(left) } => left.settle(begun),
            _ => (false, None),
        };
        let noted = if is_fresh { Self::tell_sites(slf) } else { Ok(()) };
        let called = told.map_or(Ok(()), |told| told.call0(slf.py()).map(drop));
        noted.and(called)
    }

    /// Adds what was seen of it to the sums of its name. After its end, once. What a signal's handler raised meanwhile.
    fn tell_sites(slf: &Bound<'_, Self>) -> PyResult<()> {
        static NOTE: Imported = Imported::new("ctxalloc._sites", "note");
        let Some(numbers) = slf.get()._sites() else { return Ok(()) };
        let name = slf.get().if_begun(|request| request.given_name().map(str::to_owned)).flatten();
        NOTE.get(slf.py())?.call1((name, numbers)).map(drop)
    }

    /// For [`Settling`]: the same; unless it `must`, only if nothing is alive that may have escaped. Whether it did.
    fn settle_if(object: &Bound<'_, PyAny>, must: bool) -> PyResult<bool> {
        let Ok(request) = object.cast::<Self>() else { return Ok(true) };
        let is_gone = match &*request.get().phase() {
            Phase::Begun { begun, left: Some(left) } => left.is_gone(begun),
            _ => true,
        };
        if is_gone || must {
            Self::settle(request)?;
        }
        Ok(is_gone || must)
    }

    /// BudgetExceeded: native code was given more than a limit allows, since it does not survive a refusal. It is told
    /// once; `again`: once more while the request is above the limit.
    pub(super) fn overdraft(&self, again: bool) -> PyResult<()> {
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
        self.arguments.reserve.is_some()
    }

    /// Whether it counts native memory and objects too.
    pub(super) fn is_whole(&self) -> bool {
        self.arguments.is_whole
    }

    /// Its handler, which no other request has; None before it is entered.
    pub(super) fn begun_handler(&self) -> Option<Handler> {
        self.if_begun(|request| request.handler())
    }

    /// Begins and selects a new request on the same terms, for a server: a root or not, with this name if the terms
    /// have none, and charged to this budget if they name none; `by_site`: it is noted which code made what. `close`
    /// ends it, and `leave` restores the selection, in either order: the request may end before the call that it
    /// was begun for returns.
    pub(super) fn served(
        &self,
        py: Python<'_>,
        root: bool,
        name: Option<Arc<str>>,
        budget: Option<&PyBudget>,
        by_site: bool,
    ) -> PyResult<Self> {
        let request = self.anew(py, Some(root), name, budget, by_site)?;
        request.enter(py)?;
        Ok(request)
    }

    fn anew(
        &self,
        py: Python<'_>,
        root: Option<bool>,
        name: Option<Arc<str>>,
        budget: Option<&PyBudget>,
        by_site: bool,
    ) -> PyResult<Self> {
        let mut arguments = self.arguments.clone();
        arguments.is_root = root.unwrap_or(arguments.is_root);
        arguments.name = arguments.name.or(name);
        arguments.budget = arguments.budget.or_else(|| budget.map(|budget| budget.budget().clone()));
        if !by_site {
            return Ok(Self::new(arguments));
        }
        let (strategy, seen) = sited(py, arguments.strategy.take())?;
        arguments.strategy = Some(strategy);
        Ok(Self { sited: Some(seen), ..Self::new(arguments) })
    }

    /// Restores the selection. ValueError: this is another Context; nothing changes.
    pub(super) fn leave(&self, py: Python<'_>) -> PyResult<()> {
        let Some(token) = self.token.take(py) else { return Err(not_entered(&self.text())) };
        deselect(py, &self.token, token, &|| self.text())
    }

    /// Ends it, if it has not ended, and leaves the selection alone: this may be another task.
    pub(super) fn close(slf: &Bound<'_, Self>) -> PyResult<()> {
        Self::end(slf, None)
    }

    /// Its name in messages. Takes no lock.
    fn text(&self) -> String {
        match &self.arguments.name {
            Some(name) => format!("ctxalloc.request(name={name:?})"),
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

#[pymethods]
impl PyRequest {
    fn __enter__(slf: PyRef<'_, Self>) -> PyResult<PyRef<'_, Self>> {
        slf.enter(slf.py())?;
        if slf.arguments.is_whole
            && let Some(handler) = slf.begun_handler()
        {
            let guard = Guard::of_block(slf.py(), handler)?;
            *slf.guard() = guard;
        }
        Ok(slf)
    }

    #[pyo3(signature = (kind, error, traceback, /))]
    fn __exit__(
        slf: &Bound<'_, Self>,
        kind: &Bound<'_, PyAny>,
        error: Option<&Bound<'_, PyAny>>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let _ = (kind, traceback);
        let guard = slf.get().guard().take();
        if let Some(guard) = guard {
            guard.end(slf.py());
        }
        Self::exit(slf, error)
    }

    fn __aenter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        if slf.get().reserves() {
            let entering = Entering::new(slf.clone().unbind().into_any(), |request| {
                Self::enter_or_wait(request.cast::<Self>()?, true)
            });
            return Ok(Bound::new(slf.py(), entering)?.into_any());
        }
        let step = Step::new(slf.clone().unbind().into_any(), None, |request, _| {
            request.cast::<Self>()?.get().enter(request.py())?;
            Ok(Some(request.clone().unbind()))
        });
        Ok(Bound::new(slf.py(), step)?.into_any())
    }

    /// Takes the reservation, or a place in the queue, for a Rust task (`admit`). Unless it `selects`, the request is
    /// begun then as by `_begin`.
    #[pyo3(signature = (*, selects = true))]
    fn _admission(slf: &Bound<'_, Self>, selects: bool) -> PyResult<PyAdmission> {
        let (prepared, timeout) = slf.get().prepare(slf.py())?;
        Self::waiting(slf, prepared, timeout, selects)
    }

    /// Enters it if that needs no waiting, and returns None; else its place in the queue. Unless it `selects`, it is
    /// begun as by `_begin`.
    #[pyo3(signature = (selects, /))]
    fn _enter_or_wait(slf: &Bound<'_, Self>, selects: bool) -> PyResult<Option<PyAdmission>> {
        Self::enter_or_wait(slf, selects)
    }

    #[pyo3(signature = (kind, error, traceback, /))]
    fn __aexit__(
        slf: Py<Self>,
        kind: &Bound<'_, PyAny>,
        error: Option<Py<PyAny>>,
        traceback: &Bound<'_, PyAny>,
    ) -> Step {
        let _ = (kind, traceback);
        Step::new(slf.into_any(), error, |request, error| {
            Self::exit(request.cast::<Self>()?, error)?;
            Ok(None)
        })
    }

    /// Decorates a function: each call is a request of its own on these terms. Works for coroutine functions and
    /// (async) generators too.
    #[pyo3(signature = (function, /))]
    fn __call__<'py>(slf: &Bound<'py, Self>, function: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("ctxalloc._decorate")?.getattr("in_request")?.call1((slf, function))
    }

    /// A new request on the same terms. A server's request is a root, has a name where the terms have none, and is
    /// charged to a budget (which one, its server knows) where the terms name none; `sites`: which code made what it
    /// holds is noted.
    #[pyo3(signature = (*, root = None, name = None, budget = None, sites = false))]
    fn _again(
        &self,
        py: Python<'_>,
        root: Option<bool>,
        name: Option<String>,
        budget: Option<&Bound<'_, PyBudget>>,
        sites: bool,
    ) -> PyResult<Self> {
        self.anew(py, root, name.map(Into::into), budget.map(Bound::get), sites)
    }

    /// Begins a new request on the same terms, as `_again` and `__enter__` do: for a server (`served`).
    #[pyo3(signature = (root, name, budget, sites = false, /))]
    fn _serve(
        &self,
        py: Python<'_>,
        root: bool,
        name: Option<String>,
        budget: Option<&Bound<'_, PyBudget>>,
        sites: bool,
    ) -> PyResult<Self> {
        self.served(py, root, name.map(Into::into), budget.map(Bound::get), sites)
    }

    /// Which code made what it holds, as sums: of all, what its memory refused, by calls. None where nobody asked.
    fn _sites(&self) -> Option<(SumNumbers, u64, Vec<SiteNumbers>)> {
        self.sited.as_ref().map(|seen| seen.numbers())
    }

    /// Ends it, if it has not ended, and leaves the selection alone: this may be another task.
    fn _close(slf: &Bound<'_, Self>) -> PyResult<()> {
        Self::close(slf)
    }

    /// What it is refused for, if `error` is the cancellation of its task because it was chosen to make room: then the
    /// task is cancelled no longer. For middlewares, which answer it.
    #[pyo3(signature = (error, /))]
    fn _chosen_of(&self, py: Python<'_>, error: &Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        static REFUSED: Imported = Imported::new("ctxalloc._errors", "BudgetExceeded");
        let cancelling = self.cancelling.lock().unwrap_or_else(PoisonError::into_inner).take();
        match cancelling.map_or(Ok(()), |cancelling| cancelling.end(py, Some(error))) {
            Err(refused) if refused.value(py).is_instance(REFUSED.get(py)?)? => {
                Ok(Some(refused.into_value(py).into_any()))
            }
            other => other.map(|()| None),
        }
    }

    /// Whether its task is to be cancelled when it is chosen to make room.
    #[getter]
    fn _cancels_if_chosen(&self) -> bool {
        self.arguments.cancel_if_chosen
    }

    /// Calls the function as soon as it is settled what has escaped: now, or a turn of the event loop later. One
    /// function only.
    #[pyo3(signature = (function, /))]
    fn _when_settled(&self, py: Python<'_>, function: Py<PyAny>) -> PyResult<()> {
        let mut function = Some(function);
        if let Phase::Begun { left: Some(left), .. } = &mut *self.phase() {
            left.tell_later(&mut function);
        }
        function.map_or(Ok(()), |function| function.call0(py).map(drop))
    }

    /// Settles what has escaped now.
    #[pyo3(name = "_settle")]
    fn settle_py(slf: &Bound<'_, Self>) -> PyResult<()> {
        Self::settle(slf)
    }

    /// Whether the terms reserve memory, so that entering may wait.
    #[getter]
    fn _reserves(&self) -> bool {
        self.reserves()
    }

    /// The same terms without a reservation, for a server whose request gets none: it has an account all the same, but
    /// is none of those that have ended, whose peaks say what a request needs.
    fn _unreserved(&self) -> Self {
        let arguments = self.arguments.clone();
        Self::new(Arguments { reserve: None, timeout: None, max_waiting: None, is_uncounted: true, ..arguments })
    }

    /// The budget that the terms name.
    #[getter]
    fn _wanted_budget(&self) -> Option<PyBudget> {
        self.arguments.budget.clone().map(PyBudget::from)
    }

    /// The limit that the terms name.
    #[getter]
    fn _wanted_limit_bytes(&self) -> Option<usize> {
        self.arguments.limit_bytes
    }

    /// Begins the request without selecting its handler, for a generator, which selects it in each of its steps.
    fn _begin<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyHandler>> {
        if !self.token.begin() {
            return Err(entered_already(&self.text()));
        }
        let begun = self.begin(py).and_then(|handler| PyHandler::of(py, handler));
        if begun.is_err() {
            self.token.clear();
        }
        begun
    }

    /// Ends what `_begin` began.
    #[pyo3(signature = (error, /))]
    fn _end(slf: &Bound<'_, Self>, error: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let refused = Self::end(slf, error);
        slf.get().token.clear();
        refused
    }

    /// For each error the BudgetExceeded of this request that led to it, before its end or after it, or None. A refusal
    /// is told once: together for errors that came together.
    #[pyo3(signature = (errors, /))]
    fn _refusals_of(&self, py: Python<'_>, errors: Vec<Bound<'_, PyAny>>) -> PyResult<Vec<Option<Py<PyAny>>>> {
        let (refusals, is_whole) = match &*self.phase() {
            Phase::Begun { begun, .. } => (begun.take_refusals(), begun.whole().is_some()),
            Phase::New | Phase::Carried(_) => (Vec::new(), false),
        };
        errors.iter().map(|error| refusal::told(py, error, &refusals, is_whole)).collect()
    }

    /// Pickles by its terms, as decorated functions need it that go to other processes. TypeError: it was entered, or
    /// its terms name a budget or a strategy.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        if !matches!(*self.phase(), Phase::New) {
            return Err(PyTypeError::new_err(format!(
                "{} was entered, and belongs to this process; pickle terms that nobody has entered",
                self.text()
            )));
        }
        let request = py.import("ctxalloc")?.getattr("request")?;
        let anew = py.import("functools")?.getattr("partial")?.call((request,), Some(&self.arguments.in_dict(py)?))?;
        Ok((anew, PyTuple::empty(py)))
    }

    /// The name that it was given, or a number. RuntimeError: it is not entered yet; so for the other attributes.
    #[getter]
    fn name<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyString>> {
        self.with_request(|request| PyString::new(py, &request.name()))
    }

    /// The handler that it selects. RuntimeError: it has ended, and nothing of it is left.
    #[getter]
    fn handler<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyHandler>> {
        let handler = self.with_request(|request| request.handler())?;
        if RequestHandle::from_handler(handler).is_none() {
            return Err(PyRuntimeError::new_err(format!(
                "{} has ended and nothing of it is left, so it has no handler any more",
                self.text()
            )));
        }
        PyHandler::of(py, handler)
    }

    /// Its own budget, which is below those that it is charged to. Parts of the request can be charged to it.
    #[getter]
    fn budget(&self) -> PyResult<PyBudget> {
        self.with_request(|request| PyBudget::from(request.budget()))
    }

    /// Its numbers so far. They can be read after its end too, and change then with the blocks that outlive it.
    #[getter]
    fn stats(&self) -> PyResult<PyStats> {
        self.with_request(|request| PyStats::with_parts(request.stats(), request.whole()))
    }

    /// By how many bytes the process grew beside its pools, with ``measure_unseen=True``: what went other ways than
    /// handlers, less what was freed. None before its end, and where another request was open, or a root was begun,
    /// meanwhile: then nobody can tell whose it is. Work of other threads is part of it.
    #[getter]
    fn unseen_growth_bytes(&self) -> Option<i64> {
        match &*self.phase() {
            Phase::Begun { begun, left: Some(_) } => begun.unseen_growth_bytes(),
            _ => None,
        }
    }

    /// What was alive at its end and outlives it. None before its end, and always for what ``current_request()``
    /// returned: ask the Request that began it. Where it ends in a task of asyncio, the step that is running may still
    /// hold what its code has let go of, so the numbers may become smaller until the loop has had its turn, and for
    /// 0.11 s after that.
    #[getter]
    fn escaped(&self) -> Option<PyEscaped> {
        match &*self.phase() {
            Phase::Begun { begun, left: Some(left) } => Some(left.escaped(begun)),
            _ => None,
        }
    }

    /// The hash of the request. TypeError: it is not entered yet.
    fn __hash__(&self) -> PyResult<u64> {
        let Some(handler) = self.begun_handler() else {
            return Err(PyTypeError::new_err(format!("{} is not entered yet, so it has no hash yet", self.text())));
        };
        let mut hasher = std::hash::DefaultHasher::new();
        handler.hash(&mut hasher);
        Ok(hasher.finish())
    }

    fn __repr__(&self) -> String {
        let state = match &*self.phase() {
            Phase::New => "not entered",
            Phase::Begun { left: None, .. } => "entered",
            Phase::Begun { .. } => "left",
            Phase::Carried(_) => "carried",
        };
        format!("<{}, {state}>", self.text())
    }

    /// For the garbage collector: the token refers to its Context, which may refer to this Request.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.token.traverse(&visit)?;
        // Where the lock is taken, somebody uses it just now: then it is no garbage.
        match self.phase.try_lock().as_deref() {
            Ok(Phase::Begun { left: Some(left), .. }) => left.traverse(&visit),
            _ => Ok(()),
        }
    }
}
