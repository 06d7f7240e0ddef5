//! Python's loop, as a native stack shows it: for `request(whole=True)`, which asks whether all callers up to it
//! survive a refusal.

use super::symbol::symbol;
use crate::whole::{Python as Loop, extent};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyTuple, PyType};
use std::ffi::CStr;
use std::sync::{Arc, Mutex, PoisonError};

/// Ways in which Python's loop calls others: each may be in another part of it. `x` has `note` for its methods.
const CALLS: [&CStr; 16] = [
    c"note()",
    c"note(a=1)",
    c"note(*())",
    c"note(**{})",
    c"x()",
    c"x + 1",
    c"-x",
    c"x < 1",
    c"1 in x",
    c"x[0]",
    c"x[0] = 1",
    c"x.y",
    c"f'{x}'",
    c"for _ in x: pass",
    c"if x: pass",
    c"with x: pass",
];

/// The loop, with the parts of it that its symbol does not cover; None: this Python shows no symbol.
pub(super) fn eval_loop(py: Python<'_>) -> PyResult<Option<Loop>> {
    let Some(python) = symbol(c"_PyEval_EvalFrameDefault").and_then(Loop::at) else { return Ok(None) };
    let evaluate = symbol(c"PyEval_EvalCode").and_then(|at| extent(at).map(|(bytes, _)| (at.addr(), bytes)));
    let Some(evaluate) = evaluate else { return Ok(Some(python)) };
    let learnt = Arc::new(Mutex::new(python));
    let to = Arc::clone(&learnt);
    let note = PyCFunction::new_closure(py, None, None, move |_, _| {
        to.lock().unwrap_or_else(PoisonError::into_inner).learn(evaluate)
    })?;
    let names = PyDict::new(py);
    names.set_item("note", &note)?;
    let methods = "call add neg lt contains getitem setitem getattr format iter bool enter exit".split(' ');
    names.set_item("x", with_methods(py, methods, &note)?)?;
    for call in CALLS {
        match py.run(call, Some(&names), None) {
            Err(error) if !error.is_instance_of::<PyTypeError>(py) => return Err(error), // a signal handler's
            _ => {} // `note` answers None, with which some are not content, and takes no names
        }
    }
    let learnt = *learnt.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(Some(learnt))
}

/// An object whose special methods of these names are all this function.
pub(super) fn with_methods<'py, 'a>(
    py: Python<'py>,
    names: impl IntoIterator<Item = &'a str>,
    function: &Bound<'py, PyCFunction>,
) -> PyResult<Bound<'py, PyAny>> {
    let methods = PyDict::new(py);
    for name in names {
        methods.set_item(format!("__{name}__"), function)?;
    }
    py.get_type::<PyType>().call1(("Noting", PyTuple::empty(py), methods))?.call0()
}
