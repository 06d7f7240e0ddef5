//! How a handler is selected in the running Python context: NumPy's own ContextVar, set and reset with real Tokens.
//!
//! `PyDataMem_SetHandler` discards the Token, but the ContextVar that it sets can be found: after one call it is in
//! `contextvars.copy_context()` under the name `current_allocator`. NumPy calls that an implementation detail. Where it
//! is not found, `PyDataMem_SetHandler` selects, and a ContextVar of our own is set and reset beside it: its Tokens
//! tell which Context may reset, never which handler is selected. The way is chosen once, at import.
#![allow(unsafe_code, reason = "PyContextVar_Set is in no limited API, but in every CPython")]

use super::symbol::symbol;
use super::uncollected::{Uncollected, VarReset, VarSet, collects_anywhere, uncollected};
use crate::error::Error;
use crate::unattributed::unattributed;
use pyo3::exceptions::{PyImportError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyTuple};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// `PyDataMem_SetHandler` of the process's NumPy.
#[derive(Clone, Copy)]
pub(super) struct SetHandler(SetHandlerFunction);

pub(super) type SetHandlerFunction = unsafe extern "C" fn(*mut ffi::PyObject) -> *mut ffi::PyObject;

impl SetHandler {
    /// # Safety
    /// - `function` is NumPy's `PyDataMem_SetHandler`.
    pub(super) unsafe fn new(function: SetHandlerFunction) -> Self {
        Self(function)
    }

    /// Selects a capsule in the running Context; returns the one that was selected before. NumPy checks the capsule's
    /// name.
    fn call<'py>(self, capsule: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: this is NumPy's function, as `new` requires, called attached with a borrowed object, which NumPy
        // checks. It returns a new reference, or NULL with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(capsule.py(), (self.0)(capsule.as_ptr())) }
    }
}

/// The way chosen at import.
pub(super) enum Selection {
    /// NumPy's ContextVar itself.
    ContextVar { var: Py<PyAny>, calls: Calls },
    /// `PyDataMem_SetHandler`, and a ContextVar of our own for the Tokens.
    SetHandler { set_handler: SetHandler, marker: Py<PyAny> },
}

/// How `ContextVar.set` and `reset` are called.
pub(super) enum Calls {
    /// CPython's C functions, found by name: public and unchanged since 3.7.1, though not in the limited API.
    C { set: VarSet, reset: VarReset },
    /// The methods of the object, where there are no such functions.
    Methods { set: Py<PyAny>, reset: Py<PyAny> },
}

/// The environment variable that asks for one way (`contextvar`, `contextvar-methods` or `sethandler`): for tests, and
/// where the way chosen by itself makes trouble.
const VARIABLE: &str = "CTXALLOC_SELECTION";

impl Selection {
    /// Chooses the way for this process. `default` is the capsule of NumPy's default handler.
    ///
    /// # Errors
    /// ImportError, as for all variables of the environment, where [`VARIABLE`] asks for what there is not.
    pub(super) fn find(set_handler: SetHandler, default: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = default.py();
        let asked = std::env::var_os(VARIABLE).unwrap_or_default();
        let asked = asked.to_string_lossy();
        let var = match asked.as_ref() {
            "" | "contextvar" | "contextvar-methods" => Self::numpys_variable(set_handler, default)?,
            "sethandler" => None,
            other => {
                let expected = "contextvar, contextvar-methods or sethandler";
                let error = Error::BadSetting { name: VARIABLE, value: other.to_owned(), expected };
                return Err(PyImportError::new_err(error.to_string()));
            }
        };
        match var {
            Some(var) => {
                let calls = match Calls::in_c(py) {
                    Some(calls) if asked != "contextvar-methods" => calls,
                    _ => Calls::Methods { set: var.getattr("set")?.unbind(), reset: var.getattr("reset")?.unbind() },
                };
                Ok(Self::ContextVar { var: var.unbind(), calls })
            }
            None if asked.starts_with("contextvar") => Err(PyImportError::new_err(format!(
                "the environment says {VARIABLE}={asked:?}, but the ContextVar of this NumPy's handler was not found: \
                 remove the variable"
            ))),
            None => {
                let marker = py.import("contextvars")?.getattr("ContextVar")?.call1(("ctxalloc_witness",))?;
                Ok(Self::SetHandler { set_handler, marker: marker.unbind() })
            }
        }
    }

    /// NumPy's `current_allocator`, looked for in a new Context in which a handler was just set.
    fn numpys_variable<'py>(
        set_handler: SetHandler,
        default: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = default.py();
        let probe = PyCFunction::new_closure(py, None, None, {
            let default = default.clone().unbind();
            move |arguments, _| set_handler.call(default.bind(arguments.py())).map(drop)
        })?;
        let scratch = py.import("contextvars")?.call_method0("copy_context")?;
        scratch.call_method1("run", (probe,))?;
        for item in scratch.call_method0("items")?.try_iter()? {
            let (var, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
            if value.is(default) && var.getattr("name")?.eq("current_allocator")? {
                return Ok(Some(var));
            }
        }
        Ok(None)
    }

    /// The name of the way, for tests and bug reports.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::ContextVar { calls: Calls::C { .. }, .. } => "contextvar",
            Self::ContextVar { calls: Calls::Methods { .. }, .. } => "contextvar-methods",
            Self::SetHandler { .. } => "sethandler",
        }
    }

    /// Selects the capsule's handler in the running Context. Returns the token that [`reset`](Self::reset) takes.
    #[inline]
    pub(super) fn set<'py>(&self, capsule: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let Self::ContextVar { var, calls: Calls::C { set, .. } } = self else {
            return self.set_by_methods(capsule);
        };
        // SAFETY: `PyContextVar_Set` is called attached, with a ContextVar and any object, both borrowed. It returns a
        // new reference, or NULL with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(capsule.py(), set(var.as_ptr(), capsule.as_ptr())) }
    }

    #[cold]
    fn set_by_methods<'py>(&self, capsule: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = capsule.py();
        let _uncollected = collects_anywhere(py).then(|| Uncollected::new(py));
        match self {
            Self::ContextVar { var, calls } => match calls {
                Calls::Methods { set, .. } => set.bind(py).call1((capsule,)),
                Calls::C { .. } => var.bind(py).call_method1("set", (capsule,)),
            },
            Self::SetHandler { set_handler, marker } => {
                let marker = marker.bind(py);
                let token = marker.call_method1("set", (py.None(),))?;
                match set_handler.call(capsule) {
                    Ok(old) => Ok(PyTuple::new(py, [&token, &old])?.into_any()),
                    Err(error) => {
                        marker.call_method1("reset", (token,))?;
                        Err(error)
                    }
                }
            }
        }
    }

    /// Restores what was selected before the `set` that returned this token: once, in the same Context.
    ///
    /// # Errors
    /// RuntimeError and ValueError of `ContextVar.reset`, after which nothing has changed.
    #[inline]
    pub(super) fn reset(&self, token: &Bound<'_, PyAny>) -> PyResult<()> {
        let Self::ContextVar { var, calls: Calls::C { reset, .. } } = self else {
            return self.reset_by_methods(token);
        };
        // SAFETY: `PyContextVar_Reset` is called attached, with a ContextVar and a Token, both borrowed.
        if unsafe { reset(var.as_ptr(), token.as_ptr()) } == 0 { Ok(()) } else { Err(PyErr::fetch(token.py())) }
    }

    #[cold]
    fn reset_by_methods(&self, token: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = token.py();
        let _unattributed = unattributed(); // as what is preloaded does it for C's function
        let _uncollected = collects_anywhere(py).then(|| Uncollected::new(py));
        match self {
            Self::ContextVar { var, calls } => match calls {
                Calls::Methods { reset, .. } => reset.bind(py).call1((token,)).map(drop),
                Calls::C { .. } => var.bind(py).call_method1("reset", (token,)).map(drop),
            },
            Self::SetHandler { set_handler, marker } => {
                let (witness, old): (Bound<'_, PyAny>, Bound<'_, PyAny>) = token.extract()?;
                marker.bind(py).call_method1("reset", (witness,))?;
                set_handler.call(&old).map(drop)
            }
        }
    }

    /// The capsule that a token would restore; `None` where nothing had been selected.
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

/// A ContextVar of the package's own.
pub(super) struct Variable {
    var: Py<PyAny>,
    calls: Option<(VarGet, VarSet, VarReset)>,
}

type VarGet = unsafe extern "C" fn(*mut ffi::PyObject, *mut ffi::PyObject, *mut *mut ffi::PyObject) -> c_int;

impl Variable {
    /// The one that `var` is. TypeError: it is none.
    pub(super) fn of(var: &Bound<'_, PyAny>) -> PyResult<Self> {
        let kind = var.py().import("contextvars")?.getattr("ContextVar")?;
        if !var.get_type().is(&kind) {
            return Err(PyTypeError::new_err("give a ContextVar"));
        }
        let calls = match (symbol(c"PyContextVar_Get"), Calls::in_c(var.py())) {
            (Some(get), Some(Calls::C { set, reset })) => {
                // SAFETY: `int PyContextVar_Get(PyObject *var, PyObject *default, PyObject **value)` since CPython
                // 3.7.1.
                Some((unsafe { std::mem::transmute::<*mut c_void, VarGet>(get) }, set, reset))
            }
            _ => None,
        };
        Ok(Self { var: var.clone().unbind(), calls })
    }

    /// What it is in the running Context; `None` for Python's None, and where it is nothing.
    #[inline]
    pub(super) fn get<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let value = match self.calls {
            Some((get, ..)) => {
                let mut value = null_mut();
                // SAFETY: called attached, with a ContextVar and a place for a new reference, or for NULL.
                if unsafe { get(self.var.as_ptr(), null_mut(), &raw mut value) } != 0 {
                    return Err(PyErr::fetch(py));
                }
                // SAFETY: a new reference, or NULL.
                unsafe { Bound::from_owned_ptr_or_opt(py, value) }
            }
            None => Some(self.var.bind(py).call_method1("get", (py.None(),))?),
        };
        Ok(value.filter(|value| !value.is_none()))
    }

    /// Sets it in the running Context; returns the Token.
    #[inline]
    pub(super) fn set<'py>(&self, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = value.py();
        match self.calls {
            // SAFETY: called attached, with a ContextVar and any object, both borrowed. It returns a new reference, or
            // NULL with an exception set.
            Some((_, set, _)) => unsafe { Bound::from_owned_ptr_or_err(py, set(self.var.as_ptr(), value.as_ptr())) },
            None => self.var.bind(py).call_method1("set", (value,)),
        }
    }

    /// Restores what it was before the `set` that returned this Token.
    ///
    /// # Errors
    /// RuntimeError and ValueError of `ContextVar.reset`, after which nothing has changed.
    #[inline]
    pub(super) fn reset(&self, token: &Bound<'_, PyAny>) -> PyResult<()> {
        match self.calls {
            Some((.., reset)) => {
                // SAFETY: called attached, with a ContextVar and a Token, both borrowed.
                let is_done = unsafe { reset(self.var.as_ptr(), token.as_ptr()) } == 0;
                if is_done { Ok(()) } else { Err(PyErr::fetch(token.py())) }
            }
            None => self.var.bind(token.py()).call_method1("reset", (token,)).map(drop),
        }
    }
}

impl Calls {
    fn in_c(py: Python<'_>) -> Option<Self> {
        let set = symbol(c"PyContextVar_Set")?;
        let reset = symbol(c"PyContextVar_Reset")?;
        // SAFETY: `PyObject *PyContextVar_Set(PyObject *var, PyObject *value)` since CPython 3.7.1.
        let set = unsafe { std::mem::transmute::<*mut c_void, VarSet>(set) };
        // SAFETY: `int PyContextVar_Reset(PyObject *var, PyObject *token)` since CPython 3.7.1.
        let reset = unsafe { std::mem::transmute::<*mut c_void, VarReset>(reset) };
        let (set, reset) = uncollected(py, set, reset);
        #[cfg(ctxalloc_whole)]
        let (set, reset) = super::preloaded::watched(set, reset);
        Some(Self::C { set, reset })
    }
}
