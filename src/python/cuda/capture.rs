//! `capturing`: announces a capture from its `__enter__` to its `__exit__`, or to its own end. A signal's exception can
//! come between `__enter__` and the block, and then nobody calls `__exit__`.

use crate::strategy::{CudaCapturing, cuda_capturing};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::{Mutex, PoisonError};

/// One announcement at a time. Both steps are native, so no signal's handler runs inside of them.
#[pyclass(frozen, subclass, weakref, name = "CudaCapture", module = "ctxalloc._native")]
#[derive(Debug, Default)]
pub(in crate::python) struct PyCapture(Mutex<Option<CudaCapturing>>);

#[pymethods]
impl PyCapture {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn __enter__(&self, py: Python<'_>) -> PyResult<()> {
        let announced = py.detach(cuda_capturing);
        let mut place = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if place.is_none() {
            *place = Some(announced);
            return Ok(());
        }
        drop(place);
        py.detach(|| drop(announced));
        Err(PyRuntimeError::new_err("this cuda.capturing() is entered already: make one for each block"))
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) {
        let announced = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(announced));
    }
}
