//! CPython's functions that call Python code and tell nobody but `sys.unraisablehook` of what it raises: the collector,
//! what frees an object or clears its weak references, and `fork`. Whoever is told of a limit there is not told.

use super::found::{c_function, noting, or_none};
use super::symbol::symbol;
use crate::whole::Python as Loop;
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict};
use std::ffi::CStr;
use std::sync::PoisonError;

/// Those that ask for memory themselves, and go on where they get none.
pub(super) fn asking(py: Python<'_>, python: Loop) -> PyResult<Vec<usize>> {
    let mut found = or_none(py, collecting(py, python))?;
    found.extend(or_none(py, forking(py))?);
    Ok(found)
}

/// The loop, with those of this version. `asking`: see there.
pub(super) fn with_uncaught(py: Python<'_>, python: Loop, asking: &[usize]) -> PyResult<Loop> {
    const NAMES: [&CStr; 7] = [
        c"_Py_Dealloc",
        c"PyObject_CallFinalizer",
        c"PyObject_CallFinalizerFromDealloc",
        c"PyObject_ClearWeakRefs",
        c"PyErr_WriteUnraisable",
        c"_PyErr_WriteUnraisableMsg",
        c"PyErr_FormatUnraisable",
    ];
    let mut found: Vec<_> = NAMES.into_iter().filter_map(symbol).map(<*mut _>::addr).collect();
    found.extend(asking);
    found.extend(or_none(py, freeing(py, python))?);
    found.retain(|&function| function != 0);
    Ok(python.with_uncaught(found))
}

/// They call the functions of `os.register_at_fork`, of lists that they copy; where they cannot, they call none. What
/// they call for that has no name.
fn forking(py: Python<'_>) -> PyResult<Vec<usize>> {
    const FUNCTIONS: [(&str, &str); 3] = [("posix", "fork"), ("posix", "forkpty"), ("_posixsubprocess", "fork_exec")];
    let mut found = Vec::new();
    for (module, name) in FUNCTIONS {
        if let Some(function) = py.import(module)?.getattr_opt(name)? {
            found.push(c_function(&function));
        }
    }
    Ok(found)
}

/// Functions that call any other.
fn is_a_call(function: usize) -> bool {
    const CALLS: [&CStr; 5] = [
        c"PyObject_Vectorcall",
        c"PyObject_CallFunction",
        c"PyObject_CallFunctionObjArgs",
        c"PyObject_Call",
        c"PyObject_CallOneArg",
    ];
    CALLS.into_iter().filter_map(symbol).any(|call| call.addr() == function)
}

/// The collector's: of what is between `gc.collect` and one of `gc.callbacks`, or what a weak reference calls, the
/// first. It makes a text for the callbacks, and goes on where it gets none.
fn collecting(py: Python<'_>, python: Loop) -> PyResult<Vec<usize>> {
    // Not while it is at work by itself: that would not be by `gc.collect`.
    const CODE: &CStr = c"is_on = isenabled()
disable()
callbacks.append(note)
try:
    one = Freed()
    one.itself = one
    kept = ref(one, note)
    del one
    collect(0)
finally:
    callbacks.remove(note)
    if is_on: enable()";
    let (note, seen) = noting(py, python)?;
    let names = names_with(py, &note)?;
    let module = py.import("gc")?;
    for name in ["callbacks", "collect", "disable", "enable", "isenabled"] {
        names.set_item(name, module.getattr(name)?)?;
    }
    py.run(CODE, Some(&names), None)?;
    let collect = c_function(&module.getattr("collect")?);
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    // Another thread's collection has no `gc.collect` here.
    let inside = |between: &Vec<usize>| between.iter().rev().skip_while(|&&at| at != collect).nth(1).copied();
    Ok(seen.iter().filter_map(inside).filter(|&at| !is_a_call(at)).collect())
}

/// A class, and what makes weak references that call `note`.
fn names_with<'py>(py: Python<'py>, note: &Bound<'py, PyCFunction>) -> PyResult<Bound<'py, PyDict>> {
    let names = PyDict::new(py);
    names.set_item("note", note)?;
    names.set_item("ref", py.import("weakref")?.getattr("ref")?)?;
    names.set_item("Freed", py.eval(c"type('Freed', (), {})", None, None)?)?;
    Ok(names)
}

/// The function that frees an instance of a Python class: the first of what is between the loop and what its weak
/// reference calls.
fn freeing(py: Python<'_>, python: Loop) -> PyResult<Vec<usize>> {
    let (note, seen) = noting(py, python)?;
    py.run(c"one = Freed()\nkept = ref(one, note)\ndel one", Some(&names_with(py, &note)?), None)?;
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(seen.iter().filter_map(|between| between.last().copied()).filter(|&at| !is_a_call(at)).collect())
}
