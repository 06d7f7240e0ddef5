//! `ctxalloc.request()` as Python calls it. Reading an option by its name takes pyo3 300 instructions, as it compares
//! texts; the names in compiled code are interned, so here their addresses are compared. Whatever is called otherwise
//! goes pyo3's way, `request` in `options.rs`, which has the signature, the documentation and the errors.
//!
//! Python calls the entry point attached, with borrowed references to its arguments: its `# Safety` section states
//! that, and the proofs refer to it.
#![allow(unsafe_code, reason = "a function from CPython's C API")]

use super::PyRequest;
use super::options::{Options, made};
use crate::python::entry_points::{answer, function_of, method};
use crate::sync::Made;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};
use std::ffi::CString;
use std::slice;

/// The names of options, in the order of [`Options`].
const NAMES: [&str; 13] = [
    "limit_bytes",
    "strategy",
    "name",
    "budget",
    "root",
    "after_end",
    "strict",
    "measure_unseen",
    "reserve_bytes",
    "timeout",
    "max_waiting",
    "whole",
    "cancel_if_chosen",
];

struct Known {
    /// [`NAMES`], interned.
    names: [Py<PyString>; NAMES.len()],
    /// pyo3's function.
    slow: Py<PyAny>,
}

static KNOWN: Made<Known> = Made::new();

/// Replaces the module's `request`, which is pyo3's, and stays what is called in the end.
pub(in crate::python) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let slow = module.getattr("request")?;
    let signature: String = slow.getattr("__text_signature__")?.extract()?;
    let doc = CString::new(format!("request{signature}\n--\n\n{}", slow.getattr("__doc__")?.extract::<String>()?))?;
    let names = NAMES.map(|name| PyString::intern(py, name).unbind());
    let known = Known { names, slow: slow.unbind() };
    KNOWN.get_or_make(|| known);
    let flags = ffi::METH_FASTCALL | ffi::METH_KEYWORDS;
    let function = ffi::PyMethodDefPointer { PyCFunctionFastWithKeywords: call };
    // Python keeps a pointer to it for ever.
    module.add("request", function_of(module, method(c"request", flags, function, Box::leak(doc.into_boxed_c_str())))?)
}

/// # Safety
/// - attached; `arguments` are `count` objects and then one for each name in `names`, a tuple of strings or NULL. All
///   of them are borrowed for the call.
unsafe extern "C" fn call(
    _module: *mut ffi::PyObject,
    arguments: *const *mut ffi::PyObject,
    count: ffi::Py_ssize_t,
    names: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: CPython calls this with its thread attached.
    let py = unsafe { Python::assume_attached() };
    answer(|| {
        let count = usize::try_from(count)?;
        // SAFETY: an object that is borrowed for the call, by contract.
        let names = (!names.is_null()).then(|| unsafe { Bound::ref_from_ptr(py, &names) });
        let names = names.map(|names| names.cast::<PyTuple>()).transpose()?;
        let given: &[*mut ffi::PyObject] = match count + names.map_or(0, |names| names.len()) {
            0 => &[], // where the pointer may be anything
            // SAFETY: so many pointers, which nobody changes during the call, by contract.
            given => unsafe { slice::from_raw_parts(arguments, given) },
        };
        // SAFETY: objects that are borrowed for the call, by contract; none is NULL.
        let given = given.iter().map(|given| unsafe { Bound::ref_from_ptr(py, given) });
        if given.len() == 0 {
            return Ok(Bound::new(py, PyRequest::bare())?.into_ptr());
        }
        let known = KNOWN.get().expect("this function was made after it");
        if count == 0 {
            let mut options = Options::default();
            let names = names.into_iter().flat_map(|names| names.iter_borrowed());
            let is_known = names.zip(given.clone()).all(|(name, given)| {
                let at = known.names.iter().position(|known| known.as_ptr() == name.as_ptr());
                at.is_some_and(|at| {
                    options[at] = Some(given).filter(|given| !given.is_none());
                    true
                })
            });
            if is_known {
                return Ok(Bound::new(py, made(&options)?)?.into_ptr());
            }
        }
        let by_position = PyTuple::new(py, given.clone().take(count).collect::<Vec<_>>())?;
        let by_name = PyDict::new(py);
        for (name, given) in names.into_iter().flat_map(|names| names.iter_borrowed()).zip(given.skip(count)) {
            by_name.set_item(name, given)?;
        }
        Ok(known.slow.bind(py).call(by_position, Some(&by_name))?.cast_into::<PyRequest>()?.into_ptr())
    })
}
