//! The function `ctxalloc.request()`, and how its options become the terms of a Request.

use super::PyRequest;
use super::terms::{self, Arguments};
use crate::python::whole::enable;
use pyo3::prelude::*;

/// A request: memory, numbers and perhaps a limit of its own for a ``with`` or ``async with`` block, or for each call
/// of a function that it decorates::
///
///     >>> with ctxalloc.request(limit_bytes=ctxalloc.MiB, name="thumbnail") as scope:
///     ...     kept = numpy.zeros(100_000).sum(keepdims=True)
///     >>> scope.stats.peak_bytes, scope.escaped.count, scope.escaped.bytes
///     (800008, 1, 8)
///
/// ``limit_bytes``: the most bytes that may be alive at one time. ``strategy``: where its blocks come from, instead of
/// the process's pool. It sees each with 8 more bytes in front (rounded up to its alignment), which a Budgeted charges
/// too, and should be no other handler's: a Tracked would show shifted addresses. ``name``: for messages. ``budget``: a
/// Budget that is charged too. A request inside of another one is charged to that one as well, unless it is a root
/// (``root=True``), as the requests that a server begins should be. Its arrays may outlive it for any length of time,
/// and stay charged to it until they are freed.
///
/// ``after_end``: what happens to arrays that are made under it after its end, by tasks that continue: ``"charge"``
/// counts and limits them as before, ``"refuse"`` raises MemoryError, ``"detach"`` neither counts nor limits them,
/// unless the request is inside of one that is open: then they are charged and limited as before. Arrays that were made
/// before stay charged, also when they grow (which ``"refuse"`` refuses); so does what is no array of a ``whole``
/// request.
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
/// last hundred peaks or so what was enough for 95 %, times 1.2, and at least 64 KiB; one that was refused memory
/// counts with its limit. ``limit_bytes``, which it needs then, is the most, and is reserved until ten of them have
/// ended, or the limit of a budget above if that is smaller. ``max_waiting``: how many of its name may wait at one
/// time.
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
pub(in crate::python) fn request(
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
pub(super) type Options<'a, 'py> = [Option<&'a Bound<'py, PyAny>>; 13];

pub(super) fn made(options: &Options<'_, '_>) -> PyResult<PyRequest> {
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
        name: terms::name(name)?,
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
