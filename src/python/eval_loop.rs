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
    let methods = PyDict::new(py);
    for name in "call add neg lt contains getitem setitem getattr format iter bool enter exit".split(' ') {
        methods.set_item(format!("__{name}__"), &note)?;
    }
    names.set_item("x", py.get_type::<PyType>().call1(("Noting", PyTuple::empty(py), methods))?.call0()?)?;
    for call in CALLS {
        match py.run(call, Some(&names), None) {
            Err(error) if !error.is_instance_of::<PyTypeError>(py) => return Err(error), // a signal handler's
            _ => {} // `note` answers None, with which some are not content, and takes no names
        }
    }
    let learnt = *learnt.lock().unwrap_or_else(PoisonError::into_inner);
    // CPython 3.13 counts an item that a dict's table had no memory for, and lets go of what it has not got (mended in
    // 3.13.6): json's keys and `sys.intern` ended the process.
    if py.version_info().minor != 13 { Ok(Some(learnt)) } else { setting_defaults(py, learnt).map(Some) }
}

/// With the functions of a dict that set a default: what is between the loop and a key's `__hash__` there, and not
/// where it is only looked for.
fn setting_defaults(py: Python<'_>, python: Loop) -> PyResult<Loop> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&seen);
    let hash = PyCFunction::new_closure(py, None, None, move |_, _| {
        to.lock().unwrap_or_else(PoisonError::into_inner).push(python.functions_between());
        1
    })?;
    let names = PyDict::new(py);
    let methods = PyDict::new(py);
    methods.set_item("__hash__", hash)?;
    names.set_item("key", py.get_type::<PyType>().call1(("Key", PyTuple::empty(py), methods))?.call0()?)?;
    py.run(c"{}.get(key)", Some(&names), None)?;
    py.run(c"{}.setdefault(key)", Some(&names), None)?;
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    let [looking, setting] = &**seen else { return Ok(python) };
    let of_both = setting.iter().copied().filter(|function| !looking.contains(function));
    let public = [c"PyDict_SetDefaultRef", c"PyDict_SetDefault"].into_iter().filter_map(symbol).map(<*mut _>::addr);
    Ok(python.with_fragile(of_both.chain(public).filter(|&function| function != 0)))
}
