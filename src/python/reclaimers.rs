//! `Budget.add_reclaimer()`: Python functions that give memory back.

use super::exit::try_attach_before_exit;
use super::options::{argument, no_bool};
use crate::strategy::account::reclaimers::Reclaim;
use crate::strategy::{Budget, Reclaimer};
use pyo3::exceptions::{PyRuntimeWarning, PyTypeError};
use pyo3::prelude::*;
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What ``Budget.add_reclaimer`` added. Dropping it leaves that there.
#[pyclass(frozen, name = "Reclaimer", module = "ctxalloc")]
pub(super) struct PyReclaimer {
    reclaimer: Reclaimer,
}

#[pymethods]
impl PyReclaimer {
    /// Takes it out; False if it is not there any more, since it was removed before or its budget is gone. If it is
    /// being called, that call goes on.
    fn remove(&self) -> bool {
        self.reclaimer.remove()
    }
}

/// A function, called with the number of bytes that are wanted.
struct Function {
    call: Py<PyAny>,
    /// Whether it raised when it was called last, which was told.
    raised: AtomicBool,
}

impl Reclaim for Function {
    fn ask(&self, wanted_bytes: usize) {
        try_attach_before_exit(|py| {
            let answer = self.call.call1(py, (wanted_bytes,));
            self.raised.store(answer.is_err(), Relaxed);
            if let Err(error) = answer {
                error.write_unraisable(py, Some(self.call.bind(py)));
            }
        });
    }

    fn freed_nothing(&self, budget: &str, _wanted_bytes: usize) {
        if self.raised.load(Relaxed) {
            return;
        }
        try_attach_before_exit(|py| {
            // Without the number, which is another one each time: Python shows equal warnings once.
            let message = format!(
                "a reclaimer of the full budget '{budget}' was asked for memory, and nothing was given back; this is told \
                 once until something is"
            );
            let message = CString::new(message.replace('\0', "\\0")).unwrap_or_default();
            let category = py.get_type::<PyRuntimeWarning>();
            if let Err(error) = PyErr::warn(py, &category, &message, 1) {
                error.write_unraisable(py, Some(self.call.bind(py)));
            }
        });
    }
}

/// Adds a function to a budget's.
pub(super) fn add(budget: &Budget, call: &Bound<'_, PyAny>, order: Option<&Bound<'_, PyAny>>) -> PyResult<PyReclaimer> {
    if !call.is_callable() {
        return Err(super::errors::wrong_type(
            "add_reclaimer",
            "a function that is called with a number of bytes",
            call,
        ));
    }
    let read = |value: &Bound<'_, PyAny>| no_bool(value)?.extract::<i32>();
    let order = argument("add_reclaimer", "order", order, "an int from -2**31 to 2**31 - 1", read)?.unwrap_or(0);
    let function = Function { call: call.clone().unbind(), raised: AtomicBool::new(false) };
    Ok(PyReclaimer { reclaimer: budget.add_reclaim(order, Box::new(function)) })
}

/// A number of bytes that are wanted back.
pub(super) fn wanted_in(given: &Bound<'_, PyAny>) -> PyResult<usize> {
    let read = |value: &Bound<'_, PyAny>| no_bool(value)?.extract::<usize>();
    let wanted = argument("reclaim", "wanted_bytes", Some(given), "a number of bytes, an int from 0 up", read)?;
    wanted.ok_or_else(|| PyTypeError::new_err("reclaim() takes a number of bytes"))
}
