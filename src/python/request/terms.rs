//! The terms on which a request is begun: the arguments of `ctxalloc.request()`.

use super::admission::begin_blocking;
use super::given::Name;
use crate::handler::Held;
use crate::handler::requests::on_chosen::OnChosen;
use crate::handler::requests::{AfterEnd, Begun, OVERDRAFT_BYTES, Prepared, Terms};
use crate::python::bridge;
use crate::python::budget::{PyBudget, budget_in, limit_in, name_in};
use crate::python::interned::intern;
use crate::python::options::{argument, no_bool, plain_bytes, plain_seconds};
use crate::python::strategies::PyStrategy;
use crate::python::text::repr_of;
use crate::strategy::{Budget, Strategy};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use std::sync::Arc;
use std::time::Duration;

/// The arguments of a Request; each block or call that it is entered for begins a request on these terms.
pub(super) struct Arguments {
    pub(super) limit_bytes: Option<usize>,
    pub(super) strategy: Option<Arc<dyn Strategy>>,
    pub(super) name: Option<Name>,
    pub(super) budget: Option<Budget>,
    pub(super) is_root: bool,
    pub(super) after_end: AfterEnd,
    pub(super) is_strict: bool,
    pub(super) measure_unseen: bool,
    pub(super) reserve: Option<Reserve>,
    /// How long it waits for its reservation.
    pub(super) timeout: Option<Duration>,
    /// How many of its name may wait.
    pub(super) max_waiting: Option<usize>,
    pub(super) is_whole: bool,
    /// Whether its task is cancelled when it is chosen to make room.
    pub(super) cancel_if_chosen: bool,
    /// Whether metrics leave it out.
    pub(super) is_uncounted: bool,
}

/// How much a request reserves.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reserve {
    Bytes(usize),
    /// What requests of its name needed lately.
    Auto,
}

impl Arguments {
    pub(super) const fn none() -> Self {
        Self {
            limit_bytes: None,
            strategy: None,
            name: None,
            budget: None,
            is_root: false,
            after_end: AfterEnd::Charge,
            is_strict: false,
            measure_unseen: false,
            reserve: None,
            timeout: None,
            max_waiting: None,
            is_whole: false,
            cancel_if_chosen: false,
            is_uncounted: false,
        }
    }

    pub(super) fn clone_ref(&self, py: Python<'_>) -> Self {
        Self {
            strategy: self.strategy.clone(),
            name: self.name.as_ref().map(|name| name.clone_ref(py)),
            budget: self.budget.clone(),
            ..*self
        }
    }

    /// Begins a request on these terms: a root, or inside of the running context's request. Where it has to wait for
    /// its reservation it blocks the thread; `text` says what does. Perhaps with a hold on it, for a capsule.
    pub(super) fn begin(
        &self,
        py: Python<'_>,
        on_chosen: Option<OnChosen>,
        text: impl Fn() -> String,
    ) -> PyResult<(Begun, Option<Held>)> {
        let (terms, timeout) = self.terms(py, on_chosen)?;
        match self.reserve {
            None => Ok(Prepared::begin_now(terms)?),
            Some(_) => Ok((begin_blocking(py, terms, timeout, text)?, None)),
        }
    }

    /// What a request is begun with, and how long it may wait.
    pub(super) fn terms(&self, py: Python<'_>, on_chosen: Option<OnChosen>) -> PyResult<(Terms, Option<Duration>)> {
        let terms = Terms {
            name: self.name.as_ref().map(Name::shared),
            limit_bytes: self.limit_bytes,
            overdraft_bytes: if self.is_strict { 0 } else { OVERDRAFT_BYTES },
            budget: self.budget.clone(),
            strategy: self.strategy.clone(),
            outer: if self.is_root { None } else { Some(bridge::current(py)?) },
            after_end: self.after_end,
            measure_unseen: self.measure_unseen,
            is_whole: self.is_whole,
            is_of_this_thread: true,
            on_chosen,
            reserve_bytes: match self.reserve {
                Some(Reserve::Bytes(bytes)) => Some(bytes),
                _ => None,
            },
            reserves_by_history: self.reserve == Some(Reserve::Auto),
            max_waiting: self.max_waiting,
            is_uncounted: self.is_uncounted,
            ..Terms::default()
        };
        Ok((terms, self.timeout))
    }

    /// The arguments that `ctxalloc.request()` makes it anew from in another process. TypeError: they mean something in
    /// this one only.
    pub(super) fn in_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let of_this_process = [("strategy", self.strategy.is_some()), ("budget", self.budget.is_some())];
        if let Some((option, _)) = of_this_process.into_iter().find(|&(_, is_given)| is_given) {
            return Err(PyTypeError::new_err(format!(
                "a request with {option}= cannot be pickled, because a {option} belongs to one process; make the request in \
                 the process that shall have it"
            )));
        }
        let arguments = PyDict::new(py);
        arguments.set_item("limit_bytes", self.limit_bytes)?;
        arguments.set_item("name", self.name.as_deref())?;
        arguments.set_item("root", self.is_root)?;
        arguments.set_item("after_end", after_end_text(self.after_end))?;
        arguments.set_item("strict", self.is_strict)?;
        arguments.set_item("measure_unseen", self.measure_unseen)?;
        match self.reserve {
            Some(Reserve::Auto) => arguments.set_item("reserve_bytes", AUTO)?,
            Some(Reserve::Bytes(bytes)) => arguments.set_item("reserve_bytes", bytes)?,
            None => {}
        }
        arguments.set_item("max_waiting", self.max_waiting)?;
        arguments.set_item("timeout", self.timeout.map(|timeout| timeout.as_secs_f64()))?;
        arguments.set_item("whole", self.is_whole)?;
        arguments.set_item("cancel_if_chosen", self.cancel_if_chosen)?;
        Ok(arguments)
    }
}

/// What [`after_end`] reads.
fn after_end_text(after_end: AfterEnd) -> &'static str {
    match after_end {
        AfterEnd::Charge => "charge",
        AfterEnd::Refuse => "refuse",
        AfterEnd::Detach => "detach",
    }
}

type Given<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

#[inline]
pub(super) fn limit(given: Given<'_, '_>) -> PyResult<Option<usize>> {
    if let Some(bytes) = plain_bytes(given) {
        return Ok(Some(bytes));
    }
    limit_in("request", given)
}

#[inline]
pub(super) fn name(given: Given<'_, '_>) -> PyResult<Option<Name>> {
    // As most give it; the long way has the errors.
    if let Some(name) = given.and_then(|given| Name::of(given.cast_exact::<PyString>().ok()?)) {
        return Ok(Some(name));
    }
    Ok(name_in("request", given)?.map(|name: Arc<str>| name.into()))
}

#[inline]
pub(super) fn budget(given: Given<'_, '_>) -> PyResult<Option<Budget>> {
    if let Some(budget) = given.and_then(|given| given.cast_exact::<PyBudget>().ok()) {
        return Ok(Some(budget.get().budget().clone()));
    }
    budget_in("request", "budget", given)
}

const AUTO: &str = "auto";

/// ValueError: also for "auto" without a limit, which is what is reserved at first.
#[inline]
pub(super) fn reserve(given: Given<'_, '_>, limit_bytes: Option<usize>) -> PyResult<Option<Reserve>> {
    if let Some(bytes) = plain_bytes(given) {
        return Ok(Some(Reserve::Bytes(bytes)));
    }
    if let Some(text) = given.and_then(|given| given.cast::<PyString>().ok())
        && (text.is(intern!(text.py(), "auto")) || text.to_string_lossy() == AUTO)
    {
        if limit_bytes.is_none() {
            return Err(PyValueError::new_err(
                "request(reserve_bytes='auto'): give limit_bytes= too: it is what is reserved until some requests of that \
                 name have ended",
            ));
        }
        return Ok(Some(Reserve::Auto));
    }
    let expected = format_args!("a number of bytes, an int from 0 to {}, or 'auto'", usize::MAX - 1);
    argument("request", "reserve_bytes", given, expected, |value| match no_bool(value)?.extract()? {
        usize::MAX => Err(PyValueError::new_err(())),
        bytes => Ok(Reserve::Bytes(bytes)),
    })
}

#[inline]
pub(super) fn max_waiting(given: Given<'_, '_>, reserves: bool) -> PyResult<Option<usize>> {
    const WANTED: &str = "a count, an int from 0 up, together with reserve_bytes=";
    argument("request", "max_waiting", given, WANTED, |value| {
        let max_waiting = no_bool(value)?.extract()?;
        if reserves { Ok(max_waiting) } else { Err(PyValueError::new_err(())) }
    })
}

#[inline]
pub(super) fn timeout(given: Given<'_, '_>, reserves: bool) -> PyResult<Option<Duration>> {
    if let Some(timeout) = plain_seconds(given).filter(|_| reserves) {
        return Ok(Some(timeout));
    }
    const WANTED: &str = "a time in seconds, a finite number from 0 up, together with reserve_bytes=; None waits \
                          until there is room";
    argument("request", "timeout", given, WANTED, |value| {
        let timeout = crate::settings::seconds(no_bool(value)?.extract()?).filter(|_| reserves);
        timeout.ok_or_else(|| PyValueError::new_err(()))
    })
}

#[inline]
pub(super) fn strategy(given: Given<'_, '_>) -> PyResult<Option<Arc<dyn Strategy>>> {
    argument("request", "strategy", given, "one of ctxalloc.strategies, or None for the process's pool", |value| {
        Ok(value.cast::<PyStrategy>()?.get().strategy())
    })
}

#[inline]
pub(super) fn flag(option: &str, given: Given<'_, '_>) -> PyResult<bool> {
    if given.is_none() {
        return Ok(false);
    }
    Ok(argument("request", option, given, "True or False", |value| value.extract())?.unwrap_or(false))
}

#[inline]
pub(super) fn after_end(given: Given<'_, '_>) -> PyResult<AfterEnd> {
    const WANTED: &str = "'charge', 'refuse' or 'detach'";
    let Some(given) = given else { return Ok(AfterEnd::default()) };
    let Ok(text) = given.cast::<PyString>() else {
        return Err(PyTypeError::new_err(format!("request(after_end={}): give {WANTED}", repr_of(given)?)));
    };
    match &*text.to_string_lossy() {
        "charge" => Ok(AfterEnd::Charge),
        "refuse" => Ok(AfterEnd::Refuse),
        "detach" => Ok(AfterEnd::Detach),
        other => Err(PyValueError::new_err(format!("request(after_end={other:?}): give {WANTED}"))),
    }
}
