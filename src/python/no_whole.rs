//! Where there is no `request(whole=True)`: systems other than Linux with glibc, and builds without the feature.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::collections::BTreeMap;

/// The library that is to be preloaded: None.
#[pyfunction]
#[pyo3(name = "_whole_library")]
pub(super) fn library(py: Python<'_>) -> Option<Bound<'_, pyo3::types::PyBytes>> {
    let _ = py;
    None
}

/// 0: nothing is counted.
#[pyfunction]
#[pyo3(name = "_whole_nobodys_bytes")]
pub(super) fn nobodys() -> u64 {
    0
}

/// None: nothing is counted.
#[pyfunction]
#[pyo3(name = "_whole_nobodys")]
pub(super) fn nobodys_by_group() -> Option<BTreeMap<String, u64>> {
    None
}

/// RuntimeError: it cannot be had here.
#[pyfunction]
#[pyo3(name = "_whole_enable")]
pub(super) fn enable(py: Python<'_>) -> PyResult<()> {
    let _ = py;
    Err(PyRuntimeError::new_err(
        "request(whole=True) cannot be had in this process: it needs Linux with glibc, and a ctxalloc that was built \
         with the feature `whole`",
    ))
}
