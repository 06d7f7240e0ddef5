//! `ctxalloc.Budget`: a node of the tree of budgets, as Python has it.

use crate::strategy::Budget;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString};
use std::borrow::Cow;

/// A limit in bytes, perhaps under another one: request under tenant under process.
///
/// ``limit_bytes``: None only counts. ``parent``: what is charged here is charged there too. ``name``: for messages. A
/// charge is taken from all of them or from none. Requests are charged to it (``ctxalloc.request(budget=...)``), or all
/// blocks of a handler (``strategies.Budgeted``)::
///
///     >>> process = ctxalloc.Budget(8 * ctxalloc.GiB, name="process")
///     >>> tenant = ctxalloc.Budget(ctxalloc.GiB, parent=process, name="tenant")
///     >>> with ctxalloc.request(budget=tenant):
///     ...     array = numpy.ones(1000)
///     >>> tenant.in_use_bytes, process.in_use_bytes
///     (8000, 8000)
///
/// TypeError, ValueError: an argument is not as it must be.
#[pyclass(frozen, eq, hash, weakref, name = "Budget", module = "ctxalloc")]
pub(in crate::python) struct PyBudget {
    budget: Budget,
}

impl PyBudget {
    pub(in crate::python) fn budget(&self) -> &Budget {
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
        self.budget.is(&other.budget)
    }
}

impl Eq for PyBudget {}

impl std::hash::Hash for PyBudget {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.budget.identity().hash(state);
    }
}

#[pymethods]
impl PyBudget {
    #[new]
    #[pyo3(signature = (limit_bytes = None, *, parent = None, name = None))]
    fn new(
        limit_bytes: Option<&Bound<'_, PyAny>>,
        parent: Option<&Bound<'_, PyAny>>,
        name: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let limit_bytes = limit_in("Budget", limit_bytes)?;
        let name = name_in("Budget", name)?.unwrap_or_else(|| "unnamed".to_owned());
        let budget = match parent {
            None => Budget::new(&name, limit_bytes),
            Some(parent) => match parent.cast::<Self>() {
                Ok(parent) => parent.get().budget.child(&name, limit_bytes),
                Err(_) => {
                    let shown = shown(parent);
                    return Err(PyTypeError::new_err(format!(
                        "Budget(parent={shown}): give a ctxalloc.Budget, or None"
                    )));
                }
            },
        };
        Ok(Self { budget })
    }

    /// Its name, for messages.
    #[getter]
    fn name(&self) -> Cow<'_, str> {
        self.budget.name()
    }

    /// Its limit; None where it only counts. Another one may be set at any time: it holds from the next charge on, and
    /// what is charged already stays.
    #[getter]
    fn limit_bytes(&self) -> Option<usize> {
        self.budget.limit_bytes()
    }

    #[setter]
    fn set_limit_bytes(&self, limit_bytes: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        self.budget.set_limit_bytes(limit_in("Budget", limit_bytes)?);
        Ok(())
    }

    /// The budget it is under, or None.
    #[getter]
    fn parent(&self) -> Option<Self> {
        self.budget.parent().map(Self::from)
    }

    /// What is charged now.
    #[getter]
    fn in_use_bytes(&self) -> usize {
        self.budget.in_use_bytes()
    }

    /// The most that was ever charged at one time.
    #[getter]
    fn peak_bytes(&self) -> usize {
        self.budget.peak_bytes()
    }

    /// How far it is beyond its limit: because that was lowered, or because requests used their overdrafts.
    #[getter]
    fn overdraft_bytes(&self) -> usize {
        self.budget.overdraft_bytes()
    }

    /// How many charges this budget refused (not those that one above it refused).
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

/// A limit in bytes as users give it.
pub(super) fn limit_in(function: &str, given: Option<&Bound<'_, PyAny>>) -> PyResult<Option<usize>> {
    let Some(given) = given else { return Ok(None) };
    let extracted = if given.is_instance_of::<PyBool>() {
        Err(PyTypeError::new_err("a bool is no number of bytes"))
    } else {
        given.extract()
    };
    // The largest one stands for no limit.
    let extracted = extracted.and_then(|limit: usize| match limit {
        usize::MAX => Err(PyValueError::new_err("too large")),
        limit => Ok(limit),
    });
    extracted.map(Some).map_err(|error: PyErr| {
        let message = format!(
            "{function}(limit_bytes={}): give a number of bytes, an int from 0 to {}, or None for no limit",
            shown(given),
            usize::MAX - 1
        );
        // A number out of range is a wrong value (OverflowError here); anything else is of a wrong type.
        let wrong_type = error.is_instance_of::<PyTypeError>(given.py());
        if wrong_type { PyTypeError::new_err(message) } else { PyValueError::new_err(message) }
    })
}

/// A name as users give it.
pub(super) fn name_in(function: &str, given: Option<&Bound<'_, PyAny>>) -> PyResult<Option<String>> {
    let Some(given) = given else { return Ok(None) };
    given.extract().map(Some).map_err(|_| {
        let message = format!("{function}(name={}): give a str that UTF-8 can hold, or None", shown(given));
        if given.is_instance_of::<PyString>() { PyValueError::new_err(message) } else { PyTypeError::new_err(message) }
    })
}

fn shown(given: &Bound<'_, PyAny>) -> String {
    given.repr().map_or_else(|_| "?".to_owned(), |shown| shown.to_string())
}
