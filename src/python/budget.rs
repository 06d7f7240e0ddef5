//! `ctxalloc.Budget`: a node of the tree of budgets, and how functions read the arguments that describe one.

use super::options::{argument, no_bool};
use super::reclaimers::{self, PyReclaimer};
use super::text::repr_of;
use crate::strategy::{Budget, ProcessLimit, restart_decay};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A limit in bytes, which may be part of another one: request under tenant under process.
///
/// ``limit_bytes``: None only counts. ``parent``: what is charged to this budget is charged to that one too; either
/// both take a charge or none does. ``name``: for messages. ``ctxalloc.request(budget=...)`` charges a request's blocks
/// to a budget, and ``strategies.Budgeted`` all blocks of a handler::
///
///     >>> process = ctxalloc.Budget(8 * ctxalloc.GiB, name="process")
///     >>> tenant = ctxalloc.Budget(ctxalloc.GiB, parent=process, name="tenant")
///     >>> with ctxalloc.request(budget=tenant):
///     ...     array = numpy.ones(1000)
///     >>> tenant.in_use_bytes, process.in_use_bytes
///     (8000, 8000)
///
/// ``guarantee_bytes``: so many bytes of ``parent`` are kept for this budget, whether it uses them or not, so that
/// nothing in it is refused because of others while it has no more in use; above that it borrows, up to its limit,
/// while there is room. 0 is a guarantee that may be raised later. It lasts until nothing can be charged to the budget
/// any more.
///
/// ``victims_after``: after so many seconds in which somebody has waited for room of this budget, the request that has
/// most of it is chosen to give way; None, the default: never.
///
/// TypeError, ValueError: an argument is invalid, or ``parent`` cannot guarantee so much beside what it guarantees
/// already. NoRoom: it could, but others use these bytes now (``reason`` is ``"busy"``).
#[pyclass(frozen, eq, hash, weakref, name = "Budget", module = "ctxalloc")]
pub(super) struct PyBudget {
    budget: Budget,
}

impl PyBudget {
    pub(super) fn budget(&self) -> &Budget {
        &self.budget
    }
}

impl From<Budget> for PyBudget {
    fn from(budget: Budget) -> Self {
        Self { budget }
    }
}

impl PartialEq for PyBudget {
    fn eq(&self, other: &Self) -> bool {
        self.budget.same_budget(&other.budget)
    }
}

impl Eq for PyBudget {}

impl std::hash::Hash for PyBudget {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.budget.id().hash(state);
    }
}

#[pymethods]
impl PyBudget {
    #[new]
    #[pyo3(signature = (limit_bytes = None, *, parent = None, name = None, guarantee_bytes = None, victims_after = None))]
    fn new(
        limit_bytes: Option<&Bound<'_, PyAny>>,
        parent: Option<&Bound<'_, PyAny>>,
        name: Option<&Bound<'_, PyAny>>,
        guarantee_bytes: Option<&Bound<'_, PyAny>>,
        victims_after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let victims_after = seconds_in(victims_after)?;
        let limit_bytes = limit_in("Budget", limit_bytes)?;
        let name = name_in("Budget", name)?.unwrap_or_else(|| "unnamed".to_owned());
        let guarantee_bytes = guarantee_in(guarantee_bytes)?;
        let budget = match (budget_in("Budget", "parent", parent)?, guarantee_bytes) {
            (None, None) => Budget::new(&name, limit_bytes),
            (None, Some(_)) => {
                return Err(PyValueError::new_err(
                    "guarantee_bytes is what a parent keeps for the budget, and this one has none; give it a parent, or \
                     no guarantee",
                ));
            }
            (Some(parent), None) => parent.child(&name, limit_bytes),
            (Some(parent), Some(bytes)) => parent.guaranteed_child(&name, limit_bytes, bytes)?,
        };
        budget.set_victims_after(victims_after);
        Ok(Self { budget })
    }

    /// Adds a function that can give memory back: that drops a cache, or writes a frame to a file. When this budget, or
    /// one above it, is full and a request begins to wait for room or is refused memory, the functions of the full
    /// budget and of all below it are called, one after the other, the lowest ``order`` first, until enough came back.
    /// They are given the number of bytes that are still missing, and are called again every second while somebody
    /// waits. A budget that uses no more than its guarantee, or nothing, is not asked for others. Returns a Reclaimer,
    /// whose ``remove()`` takes it out again::
    ///
    ///     >>> reclaimer = budget.add_reclaimer(lambda wanted_bytes: cache.clear(), order=1)
    ///
    /// They run on a thread of their own, or on one that calls ``reclaim()``: never inside of an allocation. So an
    /// allocation that is refused has them called for the next one; who must not be refused reserves
    /// (``request(reserve_bytes=...)``) and waits. What one raises goes to ``sys.unraisablehook``; a RuntimeWarning
    /// tells once that nothing came back. It must not wait for room itself (NoRoom). It stays until it is removed or
    /// the budget is gone, so it should not refer to this Budget. The program's end waits for one that runs, ten
    /// seconds at most.
    #[pyo3(signature = (call, /, *, order = None))]
    fn add_reclaimer(&self, call: &Bound<'_, PyAny>, order: Option<&Bound<'_, PyAny>>) -> PyResult<PyReclaimer> {
        reclaimers::add(&self.budget, call, order)
    }

    /// Calls reclaimers now, on this thread, until ``wanted_bytes`` came back to this budget. How many bytes did, of
    /// whatever was freed meanwhile. Not for a thread that runs an event loop: it waits for reclaimers that are being
    /// called already.
    #[pyo3(signature = (wanted_bytes, /))]
    fn reclaim(&self, py: Python<'_>, wanted_bytes: &Bound<'_, PyAny>) -> PyResult<usize> {
        let wanted_bytes = reclaimers::wanted_in(wanted_bytes)?;
        Ok(py.detach(|| self.budget.reclaim(wanted_bytes)))
    }

    /// After how many seconds in which somebody has waited for room of this budget a request is chosen to give way, and
    /// again, at least 0.1 s, until the next one; None for never. It is the one that has most of this budget beyond
    /// what it reserved and what budgets below are guaranteed, if that is more than is waited for. Its next allocation
    /// of more than 1 KiB raises BudgetExceeded, whose ``chosen_for`` says for whom, unless room came before.
    /// ``request(cancel_if_chosen=True)`` cancels its task too. What it held comes back when its arrays are gone: an
    /// exception that is kept keeps the frames that it came through.
    #[getter]
    fn victims_after(&self) -> Option<f64> {
        self.budget.victims_after().map(|after| after.as_secs_f64())
    }

    #[setter]
    fn set_victims_after(&self, victims_after: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        self.budget.set_victims_after(seconds_in(victims_after)?);
        Ok(())
    }

    /// How many requests were chosen to make room in it.
    #[getter]
    fn victims(&self) -> u64 {
        self.budget.victims()
    }

    /// How many bytes came back to it while reclaimers ran, its own and those of budgets below: of whatever was freed
    /// meanwhile.
    #[getter]
    fn reclaimed_bytes(&self) -> u64 {
        self.budget.reclaimed_bytes()
    }

    /// The budget of the process: one, named ``process``, which is meant to be the parent of all others.
    ///
    /// ``limit``: ``"auto"``, or a number of bytes. With ``"auto"`` the limit is a ``share`` (0.8 by default) of the
    /// smallest limit of the control groups that the process is in, or of the machine's memory where that is less;
    /// minus the resident memory of the process that is in no pool of ctxalloc. It is read again, every 250 ms while
    /// something is charged to it or waits for it, and every 5 s else. Where the group goes above its ``memory.high``,
    /// or tasks of it wait for memory for more than 3.5 % of the time (PSI), pools give their unused memory back. Where
    /// several workers serve in one group, give each its ``share``. What is charged and is in no pool
    /// (``strategies.System``, objects of a ``whole`` request) is taken off too, which errs on the safe side. Called
    /// before any pool has handed out memory, it has pools keep an eighth of this memory warm, not of the machine's::
    ///
    ///     >>> process = ctxalloc.Budget.process("auto", share=0.2)
    ///     >>> tenant = ctxalloc.Budget(64 * ctxalloc.MiB, parent=process, name="tenant")
    ///
    /// A later call returns the same budget, with the limit that it names. TypeError, ValueError: an argument is
    /// invalid, or the system does not say how much memory there is.
    #[staticmethod]
    #[pyo3(signature = (limit, /, *, share = None))]
    fn process(py: Python<'_>, limit: &Bound<'_, PyAny>, share: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        const WANTED: &str = "a part of the memory, a number above 0 and up to 1";
        let share: Option<f64> = argument("Budget.process", "share", share, WANTED, |value| no_bool(value)?.extract())?;
        let wanted = match limit.cast::<PyString>() {
            Ok(text) if text.to_string_lossy() == "auto" => share.map_or(ProcessLimit::Auto, ProcessLimit::Share),
            _ => {
                let expected = "'auto', or a number of bytes";
                let bytes: usize =
                    argument("Budget.process", "limit", Some(limit), expected, |value| {
                        match no_bool(value)?.extract()? {
                            usize::MAX => Err(PyValueError::new_err(())),
                            bytes => Ok(bytes),
                        }
                    })?
                    .ok_or_else(|| PyTypeError::new_err(format!("Budget.process(): give {expected}")))?;
                if let Some(share) = share {
                    return Err(PyValueError::new_err(format!(
                        "Budget.process({}, share={share}): a share is one of the memory that there is; give 'auto', or \
                         leave the share out",
                        repr_of(limit)?
                    )));
                }
                ProcessLimit::Bytes(bytes)
            }
        };
        follow_in_children(py)?;
        // It reads files.
        Ok(py.detach(|| Budget::process(wanted)).map(Self::from)?)
    }

    /// Its name, for messages.
    #[getter]
    fn name(&self) -> Cow<'_, str> {
        self.budget.name()
    }

    /// Its number, which no other budget of the process has: ``BudgetExceeded.budget_id``, ``metrics.budgets()``.
    #[getter]
    fn id(&self) -> u64 {
        self.budget.id()
    }

    /// Its limit in bytes; None if it only counts. It may be changed at any time: a new limit applies from the next
    /// charge on, and what is charged already stays charged.
    #[getter]
    fn limit_bytes(&self) -> Option<usize> {
        self.budget.limit_bytes()
    }

    #[setter]
    fn set_limit_bytes(&self, limit_bytes: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        self.budget.set_limit_bytes(limit_in("Budget", limit_bytes)?);
        Ok(())
    }

    /// How many bytes its parent guarantees to it; None if it was made without a guarantee. It may be changed at any
    /// time if it was made with one. ValueError: its parent cannot guarantee so much beside its other guarantees, it is
    /// more than the own limit, or the budget has none. NoRoom: others use these bytes now.
    #[getter]
    fn guarantee_bytes(&self) -> Option<usize> {
        self.budget.guarantee_bytes()
    }

    #[setter]
    fn set_guarantee_bytes(&self, guarantee_bytes: &Bound<'_, PyAny>) -> PyResult<()> {
        let given = guarantee_in(Some(guarantee_bytes))?;
        Ok(self.budget.set_guarantee_bytes(given.unwrap_or(0))?)
    }

    /// The budget above it, or None.
    #[getter]
    fn parent(&self) -> Option<Self> {
        self.budget.parent().map(Self::from)
    }

    /// How many bytes are charged now.
    #[getter]
    fn in_use_bytes(&self) -> usize {
        self.budget.in_use_bytes()
    }

    /// The most bytes that were ever charged at one time.
    #[getter]
    fn peak_bytes(&self) -> usize {
        self.budget.peak_bytes()
    }

    /// How many bytes of it are reserved and not in use: by ``request(reserve_bytes=...)``, and by budgets below that
    /// it guarantees them to. They count towards its limit.
    #[getter]
    fn reserved_bytes(&self) -> usize {
        self.budget.reserved_bytes()
    }

    /// How many requests wait for room in it, or in a budget below it.
    #[getter]
    fn waiting(&self) -> usize {
        self.budget.waiting()
    }

    /// How many may wait: 1024 unless it is changed. One more is refused at once.
    #[getter]
    fn max_waiting(&self) -> usize {
        self.budget.max_waiting()
    }

    #[setter]
    fn set_max_waiting(&self, max_waiting: &Bound<'_, PyAny>) -> PyResult<()> {
        let expected = "a count, an int from 0 up";
        let given = argument("Budget", "max_waiting", Some(max_waiting), expected, |value| no_bool(value)?.extract())?;
        self.budget.set_max_waiting(given.unwrap_or(0));
        Ok(())
    }

    /// Whether more requests should be sent here. No from when 95 % of its limit are in use or reserved by requests, or
    /// half as many wait as may; yes again from when at most 80 % are and nobody waits. Between the two it is what it
    /// was when somebody asked last. What is guaranteed to budgets below and not in use does not count.
    #[getter]
    fn is_ready(&self) -> bool {
        self.budget.is_ready()
    }

    /// Whether nothing is charged to it, reserved in it or waits for it, and nothing that is alive could charge it: no
    /// request or terms with it, no strategy, no budget below. A map of tenants' budgets may drop an idle one.
    #[getter]
    fn is_idle(&self) -> bool {
        self.budget.is_idle()
    }

    /// How many bytes it is above its limit: because the limit was lowered, or because requests used their overdrafts.
    #[getter]
    fn overdraft_bytes(&self) -> usize {
        self.budget.overdraft_bytes()
    }

    /// How many charges this budget refused; not counting those that a budget above it refused.
    #[getter]
    fn refused(&self) -> u64 {
        self.budget.refused()
    }

    fn __repr__(&self) -> String {
        let in_use = self.budget.in_use_bytes();
        let state = match self.budget.limit_bytes() {
            Some(limit) => format!("{in_use} of {limit} bytes in use"),
            None => format!("{in_use} bytes in use, no limit"),
        };
        format!("<ctxalloc.Budget {:?}: {state}>", self.budget.name())
    }
}

/// Has children of `fork` follow the memory that there is: the thread that does ends before a fork.
fn follow_in_children(py: Python<'_>) -> PyResult<()> {
    static IS_DONE: AtomicBool = AtomicBool::new(false);
    let os = py.import("os")?;
    if !os.hasattr("register_at_fork")? || IS_DONE.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    let options = PyDict::new(py);
    options.set_item("after_in_child", wrap_pyfunction!(follow_on, py)?)?;
    os.call_method("register_at_fork", (), Some(&options))?;
    Ok(())
}

/// In a child of `fork`, once Python can start threads again.
#[pyfunction]
fn follow_on() {
    restart_decay::now();
}

/// A limit in bytes as users give it; None for no limit.
#[inline]
pub(super) fn limit_in(function: &str, given: Option<&Bound<'_, PyAny>>) -> PyResult<Option<usize>> {
    // The largest `usize` stands for no limit.
    let expected = format_args!("a number of bytes, an int from 0 to {}, or None for no limit", usize::MAX - 1);
    argument(function, "limit_bytes", given, expected, |value| match no_bool(value)?.extract()? {
        usize::MAX => Err(PyValueError::new_err(())),
        limit_bytes => Ok(limit_bytes),
    })
}

/// A time in seconds as users give it; None for never.
fn seconds_in(given: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Duration>> {
    argument("Budget", "victims_after", given, "a time in seconds, a number from 0 up, or None for never", |value| {
        crate::settings::seconds(no_bool(value)?.extract()?).ok_or_else(|| PyValueError::new_err(()))
    })
}

/// A guarantee in bytes as users give it; None for none.
fn guarantee_in(given: Option<&Bound<'_, PyAny>>) -> PyResult<Option<usize>> {
    let expected = format_args!("a number of bytes, an int from 0 to {}", usize::MAX - 1);
    argument("Budget", "guarantee_bytes", given, expected, |value| match no_bool(value)?.extract()? {
        usize::MAX => Err(PyValueError::new_err(())),
        guarantee_bytes => Ok(guarantee_bytes),
    })
}

/// A name as users give it.
#[inline]
pub(super) fn name_in<T: for<'a> From<&'a str>>(
    function: &str,
    given: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<T>> {
    argument(function, "name", given, "a str that UTF-8 can hold, or None", |value| {
        Ok(value.cast::<PyString>()?.to_str()?.into())
    })
}

/// A budget as users give it.
#[inline]
pub(super) fn budget_in(function: &str, option: &str, given: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Budget>> {
    argument(function, option, given, "a ctxalloc.Budget, or None", |value| {
        Ok(value.cast::<PyBudget>()?.get().budget.clone())
    })
}
