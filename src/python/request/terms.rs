//! The terms on which a request is begun: the arguments of `ctxalloc.request()`.

use crate::handler::requests::{AfterEnd, Begun, OVERDRAFT_BYTES, Terms};
use crate::python::bridge;
use crate::python::budget::{budget_in, limit_in, name_in};
use crate::python::options::argument;
use crate::python::strategies::PyStrategy;
use crate::python::text::repr_of;
use crate::strategy::{Budget, Strategy};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use std::sync::Arc;

/// The arguments of a Request; each block or call that it is entered for begins a request on these terms.
#[derive(Clone, Default)]
pub(super) struct Arguments {
    pub(super) limit_bytes: Option<usize>,
    pub(super) strategy: Option<Arc<dyn Strategy>>,
    pub(super) name: Option<Arc<str>>,
    pub(super) budget: Option<Budget>,
    pub(super) is_root: bool,
    pub(super) after_end: AfterEnd,
    pub(super) is_strict: bool,
    pub(super) measure_unseen: bool,
    pub(super) is_whole: bool,
}

impl Arguments {
    /// Begins a request on these terms: a root, or inside of the running context's request.
    pub(super) fn begin(&self, py: Python<'_>) -> PyResult<Begun> {
        Ok(Begun::begin(Terms {
            name: self.name.clone(),
            limit_bytes: self.limit_bytes,
            overdraft_bytes: if self.is_strict { 0 } else { OVERDRAFT_BYTES },
            budget: self.budget.clone(),
            strategy: self.strategy.clone(),
            outer: if self.is_root { None } else { Some(bridge::current(py)?) },
            after_end: self.after_end,
            measure_unseen: self.measure_unseen,
            is_whole: self.is_whole,
            is_of_this_thread: true,
            ..Terms::default()
        })?)
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
        arguments.set_item("whole", self.is_whole)?;
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

pub(super) fn limit(given: Given<'_, '_>) -> PyResult<Option<usize>> {
    limit_in("request", given)
}

pub(super) fn name(given: Given<'_, '_>) -> PyResult<Option<String>> {
    name_in("request", given)
}

pub(super) fn budget(given: Given<'_, '_>) -> PyResult<Option<Budget>> {
    budget_in("request", "budget", given)
}

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

pub(super) fn after_end(given: Given<'_, '_>) -> PyResult<AfterEnd> {
    const WANTED: &str = "'charge', 'refuse' or 'detach'";
    let Some(given) = given else { return Ok(AfterEnd::default()) };
    let text = given
        .cast::<PyString>()
        .map_err(|_| PyTypeError::new_err(format!("request(after_end={}): give {WANTED}", repr_of(given))))?;
    match &*text.to_string_lossy() {
        "charge" => Ok(AfterEnd::Charge),
        "refuse" => Ok(AfterEnd::Refuse),
        "detach" => Ok(AfterEnd::Detach),
        other => Err(PyValueError::new_err(format!("request(after_end={other:?}): give {WANTED}"))),
    }
}
