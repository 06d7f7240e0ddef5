//! Names that are made into Python's strings once.

use crate::sync::Made;
use pyo3::prelude::*;
use pyo3::types::PyString;

/// A name, interned at its first use.
///
/// As pyo3's `intern!`, but nobody waits for whoever makes one: pyo3 lets go of the GIL while it fills a cell, and a
/// child of a fork in that moment would wait for ever for the thread that it does not have.
pub(super) struct Interned {
    text: &'static str,
    made: Made<Py<PyString>>,
}

impl Interned {
    pub(super) const fn new(text: &'static str) -> Self {
        Self { text, made: Made::new() }
    }

    #[inline]
    pub(super) fn get<'py>(&'static self, py: Python<'py>) -> &'py Bound<'py, PyString> {
        self.made.get_or_make(|| PyString::intern(py, self.text).unbind()).bind(py)
    }
}

/// `intern!(py, "name")`: Python's string, the same one each time.
macro_rules! intern {
    ($py:expr, $text:expr) => {{
        static INTERNED: $crate::python::interned::Interned = $crate::python::interned::Interned::new($text);
        INTERNED.get($py)
    }};
}

pub(super) use intern;
