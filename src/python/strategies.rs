//! From the classes of `python/ctxalloc/strategies.py` to strategies. One arm a kind; the class has the docs.

use crate::strategy::{Aligned, Strategy, System};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::Arc;

/// How memory is handed out: the base of the classes in ``ctxalloc.strategies``. Immutable.
#[pyclass(frozen, subclass, name = "Strategy", module = "ctxalloc.strategies")]
pub(super) struct PyStrategy {
    strategy: Arc<dyn Strategy>,
}

impl PyStrategy {
    pub(super) fn strategy(&self) -> Arc<dyn Strategy> {
        Arc::clone(&self.strategy)
    }
}

#[pymethods]
impl PyStrategy {
    #[new]
    #[pyo3(signature = (kind, /, **options))]
    fn new(kind: &str, options: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let options = Options { kind, given: options };
        let strategy: Arc<dyn Strategy> = match kind {
            "System" => Arc::new(System),
            "Aligned" => Arc::new(Aligned::new(options.size("align")?)?),
            _ => {
                return Err(PyValueError::new_err(format!(
                    "there is no strategy of kind {kind:?}; use the classes in ctxalloc.strategies"
                )));
            }
        };
        Ok(Self { strategy })
    }

    fn __repr__(&self) -> String {
        let text = in_pythons_words(&format!("{:?}", self.strategy));
        if text.ends_with(')') { text } else { text + "()" }
    }
}

/// The Debug text of a strategy in Python's words: `Aligned { align: 64 }` is `Aligned(align=64)`.
pub(super) fn in_pythons_words(debug: &str) -> String {
    match debug.split_once(" { ") {
        Some((kind, fields)) => format!("{kind}({})", fields.trim_end_matches(" }").replace(": ", "=")),
        None => debug.to_owned(),
    }
}

/// The keyword options that a class passed on.
struct Options<'a, 'py> {
    kind: &'a str,
    given: Option<&'a Bound<'py, PyDict>>,
}

impl Options<'_, '_> {
    /// A size or count: an int, not negative.
    fn size(&self, name: &str) -> PyResult<usize> {
        let value = self.given.map(|given| given.get_item(name)).transpose()?.flatten();
        let Some(value) = value else {
            return Err(PyTypeError::new_err(format!("{}() needs {name}=, a number of bytes", self.kind)));
        };
        let shown = value.repr()?;
        value.extract().map_err(|error: PyErr| {
            let message = format!("{}({name}={shown}): give a number of bytes, an int from 0 up", self.kind);
            // An int that is no size is a wrong value (OverflowError here); anything else is of a wrong type.
            let wrong_type = error.is_instance_of::<PyTypeError>(value.py());
            if wrong_type { PyTypeError::new_err(message) } else { PyValueError::new_err(message) }
        })
    }
}
