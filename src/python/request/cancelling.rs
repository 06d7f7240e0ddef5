//! `request(cancel_if_chosen=True)`: the task that entered the request is cancelled when it is chosen to make room.
//!
//! The cancellation is delivered on the loop's thread, where the request also ends: so it never hits a task that has
//! left it. On leaving, it becomes a BudgetExceeded, as `asyncio.timeout` makes a TimeoutError of its own.

use crate::error::Error;
use crate::handler::requests::on_chosen::OnChosen;
use crate::python::errors::with_cause;
use crate::python::exit::try_attach_before_exit;
use crate::python::imported::Imported;
use crate::python::interned::intern;
use crate::strategy::account::Account;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyWeakrefMethods, PyWeakrefReference};
use std::sync::{Arc, Mutex, PoisonError};

/// The task that is cancelled.
pub(super) struct Cancelling {
    /// Weak: the request's state keeps this, also while a block of it has escaped.
    task: Py<PyWeakrefReference>,
    /// How many others had cancelled it when it entered the request.
    before: usize,
    /// Why it was cancelled.
    delivered: Mutex<Option<Error>>,
}

impl Cancelling {
    /// For the running task. RuntimeError: there is none.
    pub(super) fn running(py: Python<'_>, text: &str) -> PyResult<Arc<Self>> {
        static CURRENT_TASK: Imported = Imported::new("asyncio", "current_task");
        let task = match CURRENT_TASK.get(py)?.call0() {
            Err(error) if error.is_instance_of::<PyRuntimeError>(py) => None,
            answer => Some(answer?).filter(|task| !task.is_none()),
        };
        let Some(task) = task else {
            return Err(PyRuntimeError::new_err(format!(
                "{text} is to cancel its task when it is chosen to make room, and no task of asyncio runs here; enter it \
                 in a task, or without cancel_if_chosen="
            )));
        };
        let before = task.call_method0(intern!(py, "cancelling"))?.extract()?;
        let task = PyWeakrefReference::new(&task)?.unbind();
        Ok(Arc::new(Self { task, before, delivered: Mutex::new(None) }))
    }

    /// What cancels it.
    pub(super) fn on_chosen(self: &Arc<Self>) -> OnChosen {
        let this = Arc::clone(self);
        OnChosen(Arc::new(move |error, request| {
            try_attach_before_exit(|py| {
                // A loop that is closed runs no task.
                if let Err(failed) = this.ask(py, error, request)
                    && !failed.is_instance_of::<PyRuntimeError>(py)
                {
                    failed.write_unraisable(py, None);
                }
            });
        }))
    }

    fn ask(self: &Arc<Self>, py: Python<'_>, error: &Error, request: &Arc<Account>) -> PyResult<()> {
        let Some(task) = self.task.bind(py).upgrade() else { return Ok(()) };
        let event_loop = task.call_method0(intern!(py, "get_loop"))?;
        let (this, error, request) = (Arc::clone(self), error.clone(), Arc::clone(request));
        let cancel = PyCFunction::new_closure(py, None, None, move |arguments, _| -> PyResult<()> {
            let Some(task) = this.task.bind(arguments.py()).upgrade() else { return Ok(()) };
            if !request.has_ended() {
                *this.delivered.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.clone());
                task.call_method1(intern!(task.py(), "cancel"), (error.to_string(),))?;
            }
            Ok(())
        })?;
        event_loop.call_method1(intern!(py, "call_soon_threadsafe"), (cancel,)).map(drop)
    }

    /// BudgetExceeded: the request ended with `error` because it was cancelled here, and nobody else did.
    pub(super) fn end(&self, py: Python<'_>, error: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        static CANCELLED: Imported = Imported::new("asyncio", "CancelledError");
        let delivered = self.delivered.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (Some(reason), Some(task)) = (delivered, self.task.bind(py).upgrade()) else { return Ok(()) };
        let others: usize = task.call_method0(intern!(py, "uncancel"))?.extract()?;
        match error {
            Some(error) if others <= self.before && error.is_instance(CANCELLED.get(py)?)? => {
                Err(with_cause(py, PyErr::from(reason), PyErr::from_value(error.clone())))
            }
            _ => Ok(()),
        }
    }
}
