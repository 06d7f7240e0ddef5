//! How a handler is selected in the running Python context: NumPy's own ContextVar, set and reset with real Tokens.
//!
//! `PyDataMem_SetHandler` throws the Token away, but the ContextVar it sets can be had: after one call it is in
//! `contextvars.copy_context()`, named `current_allocator`. NumPy calls that an implementation detail; where it
//! is not found, `SetHandler` selects, and a ContextVar of our own, set and reset beside it, knows the Contexts
//! and Tokens (it says who may reset, never which handler is selected). Chosen once, at import.
#![allow(unsafe_code, reason = "PyContextVar_Set is in no limited API, but in every CPython")]

use super::numpy::{Numpy, symbol};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyTuple};
use std::ffi::{c_int, c_void};

type VarSet = unsafe extern "C" fn(*mut ffi::PyObject, *mut ffi::PyObject) -> *mut ffi::PyObject;
type VarReset = unsafe extern "C" fn(*mut ffi::PyObject, *mut ffi::PyObject) -> c_int;

/// The way chosen at import.
pub(super) enum Selection {
    /// NumPy's ContextVar itself.
    ContextVar { var: Py<PyAny>, calls: Calls },
    /// `PyDataMem_SetHandler`, with a ContextVar of our own as the witness of Contexts.
    SetHandler { marker: Py<PyAny> },
}

/// How `ContextVar.set` and `reset` are called.
pub(super) enum Calls {
    /// CPython's C functions, found by name: they are public and unchanged since 3.7.1, if not in the limited API.
    C { set: VarSet, reset: VarReset },
    /// The methods of the object, where there are no such functions.
    Methods { set: Py<PyAny>, reset: Py<PyAny> },
}

/// The environment variable that asks for one way (`contextvar`, `contextvar-methods`, `sethandler`); for tests and
/// for trouble.
const WISH: &str = "CTXALLOC_SELECTION";

impl Selection {
    /// Finds the way for this process.
    pub(super) fn find(py: Python<'_>, numpy: &Numpy) -> PyResult<Self> {
        let wish = std::env::var_os(WISH).unwrap_or_default();
        let wish = wish.to_string_lossy();
        let var = match wish.as_ref() {
            "" | "contextvar" | "contextvar-methods" => Self::numpys_variable(py, numpy)?,
            "sethandler" => None,
            other => {
                return Err(PyValueError::new_err(format!(
                    "{WISH}={other:?} is not a way to select handlers; \
                     unset it, or say contextvar, contextvar-methods or sethandler"
                )));
            }
        };
        match var {
            Some(var) => {
                let calls = match Calls::in_c() {
                    Some(calls) if wish != "contextvar-methods" => calls,
                    _ => Calls::Methods { set: var.getattr("set")?.unbind(), reset: var.getattr("reset")?.unbind() },
                };
                Ok(Self::ContextVar { var: var.unbind(), calls })
            }
            None if wish.starts_with("contextvar") => Err(PyRuntimeError::new_err(format!(
                "{WISH}={wish} was asked for, but this NumPy keeps its handler in no ContextVar that can be found; unset it"
            ))),
            None => {
                let marker = py.import("contextvars")?.getattr("ContextVar")?.call1(("ctxalloc_witness",))?;
                Ok(Self::SetHandler { marker: marker.unbind() })
            }
        }
    }

    /// NumPy's `current_allocator`, looked for in a scratch Context in which a handler was just set.
    fn numpys_variable<'py>(py: Python<'py>, numpy: &Numpy) -> PyResult<Option<Bound<'py, PyAny>>> {
        let default = numpy.default_capsule(py).clone();
        let set = numpy.set_handler();
        let probe = PyCFunction::new_closure(py, None, None, {
            let default = default.clone().unbind();
            move |arguments, _| -> PyResult<()> {
                let py = arguments.py();
                set.call(default.bind(py)).map(drop)
            }
        })?;
        let scratch = py.import("contextvars")?.call_method0("copy_context")?;
        scratch.call_method1("run", (probe,))?;
        for item in scratch.call_method0("items")?.try_iter()? {
            let (var, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
            if value.is(&default) && var.getattr("name")?.eq("current_allocator")? {
                return Ok(Some(var));
            }
        }
        Ok(None)
    }

    /// What tests and bug reports call the way.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::ContextVar { calls: Calls::C { .. }, .. } => "contextvar",
            Self::ContextVar { calls: Calls::Methods { .. }, .. } => "contextvar-methods",
            Self::SetHandler { .. } => "sethandler",
        }
    }

    /// Selects the capsule's handler in the running Context. The answer is what [`reset`](Self::reset) wants.
    #[inline]
    pub(super) fn set<'py>(&self, numpy: &Numpy, capsule: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let Self::ContextVar { var, calls: Calls::C { set, .. } } = self else {
            return self.set_by_methods(numpy, capsule);
        };
        // SAFETY: attached; a ContextVar and any object, both borrowed.
        let token = unsafe { set(var.as_ptr(), capsule.as_ptr()) };
        // SAFETY: a new reference, or NULL with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(capsule.py(), token) }
    }

    #[cold]
    fn set_by_methods<'py>(&self, numpy: &Numpy, capsule: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = capsule.py();
        match self {
            Self::ContextVar { var, calls } => match calls {
                Calls::Methods { set, .. } => set.bind(py).call1((capsule,)),
                Calls::C { .. } => var.bind(py).call_method1("set", (capsule,)),
            },
            Self::SetHandler { marker } => {
                let marker = marker.bind(py);
                let token = marker.call_method1("set", (py.None(),))?;
                match numpy.set_capsule(capsule) {
                    Ok(old) => Ok(PyTuple::new(py, [&token, &old])?.into_any()),
                    Err(error) => {
                        marker.call_method1("reset", (token,))?;
                        Err(error)
                    }
                }
            }
        }
    }

    /// Puts back what was selected before the `set` that gave this token: once, in the same Context.
    ///
    /// RuntimeError and ValueError are those of `ContextVar.reset`; nothing has changed then.
    #[inline]
    pub(super) fn reset(&self, numpy: &Numpy, token: &Bound<'_, PyAny>) -> PyResult<()> {
        let Self::ContextVar { var, calls: Calls::C { reset, .. } } = self else {
            return self.reset_by_methods(numpy, token);
        };
        // SAFETY: attached; a ContextVar and a Token, both borrowed.
        if unsafe { reset(var.as_ptr(), token.as_ptr()) } == 0 { Ok(()) } else { Err(PyErr::fetch(token.py())) }
    }

    #[cold]
    fn reset_by_methods(&self, numpy: &Numpy, token: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = token.py();
        match self {
            Self::ContextVar { var, calls } => match calls {
                Calls::Methods { reset, .. } => reset.bind(py).call1((token,)).map(drop),
                Calls::C { .. } => var.bind(py).call_method1("reset", (token,)).map(drop),
            },
            Self::SetHandler { marker } => {
                let (witness, old): (Bound<'_, PyAny>, Bound<'_, PyAny>) = token.extract()?;
                marker.bind(py).call_method1("reset", (witness,))?;
                numpy.set_capsule(&old).map(drop)
            }
        }
    }

    /// The capsule that a token would put back; `None` where nothing had been selected.
    pub(super) fn old_capsule<'py>(&self, token: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self {
            Self::ContextVar { .. } => {
                let old = token.getattr("old_value")?;
                let missing = token.getattr("MISSING")?;
                Ok((!old.is(&missing)).then_some(old))
            }
            Self::SetHandler { .. } => token.get_item(1).map(Some),
        }
    }
}

impl Calls {
    fn in_c() -> Option<Self> {
        let set = symbol(c"PyContextVar_Set")?;
        let reset = symbol(c"PyContextVar_Reset")?;
        Some(Self::C {
            // SAFETY: `PyObject *PyContextVar_Set(PyObject *var, PyObject *value)` since CPython 3.7.1.
            set: unsafe { std::mem::transmute::<*mut c_void, VarSet>(set) },
            // SAFETY: `int PyContextVar_Reset(PyObject *var, PyObject *token)` since CPython 3.7.1.
            reset: unsafe { std::mem::transmute::<*mut c_void, VarReset>(reset) },
        })
    }
}
