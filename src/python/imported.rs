//! An attribute of a Python module that is looked up once.

use crate::sync::Made;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

/// `module.name`, looked up at its first use and kept.
///
/// An import lets other threads run, and so does a `PyOnceLock` that is filled; one of them may fork. Nobody waits for
/// the thread that the child does not have.
pub(super) struct Imported {
    module: &'static str,
    name: &'static str,
    found: Made<Py<PyAny>>,
}

impl Imported {
    pub(super) const fn new(module: &'static str, name: &'static str) -> Self {
        Self { module, name, found: Made::new() }
    }

    /// The object, if it was got before.
    #[inline]
    pub(super) fn known<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, PyAny>> {
        self.found.get().map(|found| found.bind(py))
    }

    pub(super) fn get<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyAny>> {
        if let Some(found) = self.found.get() {
            return Ok(found.bind(py));
        }
        let found = py.import(self.module)?.getattr(self.name)?.unbind();
        Ok(self.found.get_or_make(|| found).bind(py))
    }
}

/// A module that somebody has imported.
pub(super) fn module<'py>(py: Python<'py>, name: &Bound<'py, PyString>) -> Option<Bound<'py, PyAny>> {
    static MODULES: Imported = Imported::new("sys", "modules");
    MODULES.get(py).ok()?.cast::<PyDict>().ok()?.get_item(name).ok()?
}
