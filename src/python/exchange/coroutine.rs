//! `Coroutine`: one of Python's own, driven step by step.
#![allow(unsafe_code, reason = "PyIter_Send drives a coroutine, which is no iterator to pyo3")]

use super::super::imported::Imported;
use crate::python::interned::intern;
use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use pyo3::types::PyIterator;
use pyo3::types::iterator::PySendResult;

/// What a step came to: what it waits for, or its value.
pub(super) type Stepped<'py> = PyResult<PySendResult<'py>>;

/// An object of just this type.
pub(super) struct Coroutine(Py<PyAny>);

impl Coroutine {
    /// The object, if it is one.
    pub(super) fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        static COROUTINE: Imported = Imported::new("types", "CoroutineType");
        let is_one = object.get_type().is(COROUTINE.get(object.py())?);
        Ok(is_one.then(|| Self(object.clone().unbind())))
    }

    pub(super) fn object(&self) -> &Py<PyAny> {
        &self.0
    }

    pub(super) fn send<'py>(&self, value: &Bound<'py, PyAny>) -> Stepped<'py> {
        // SAFETY: this is a coroutine (`of`). It is passed to `PyIter_Send` only, which takes coroutines.
        unsafe { self.0.bind(value.py()).cast_unchecked::<PyIterator>() }.send(value)
    }

    pub(super) fn throw<'py>(&self, error: Bound<'py, PyAny>) -> Stepped<'py> {
        let py = error.py();
        match self.0.bind(py).call_method1(intern!(py, "throw"), (error,)) {
            Err(error) if error.is_instance_of::<PyStopIteration>(py) => {
                Ok(PySendResult::Return(error.value(py).getattr(intern!(py, "value"))?))
            }
            thrown => thrown.map(PySendResult::Next),
        }
    }

    pub(super) fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.0.bind(py).call_method0(intern!(py, "close")).map(drop)
    }
}
