//! `__enter__` and `__exit__` of a Request, made by hand: pyo3's way to them and back took 550 instructions of the
//! 9,700 of a request with nothing in it (benches/RESULTS.md).
//!
//! pyo3 does not know that this thread is attached while Python calls these functions, so it would delay the release of
//! a `Py` that is dropped in them. A plain `with` block drops none; for all others `known` makes pyo3 know.
//!
//! Python calls each entry point attached, with borrowed references to its arguments, and the method descriptors have
//! checked that `object` is a Request. That is what the `# Safety` sections state, and the proofs refer to.
#![allow(unsafe_code, reason = "methods from CPython's C API")]

use super::PyRequest;
use crate::python::entry_points::{answer, method};
use crate::python::overdraft;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Gives the class its two methods.
pub(in crate::python) fn add_to(py: Python<'_>) -> PyResult<()> {
    use ffi::PyMethodDefPointer as Pointer;
    let kind = py.get_type::<PyRequest>();
    let exit_doc = c"__exit__($self, kind, error, traceback, /)\n--\n\n";
    for (name, definition) in [
        (
            "__enter__",
            method(c"__enter__", ffi::METH_NOARGS, Pointer { PyCFunction: enter }, c"__enter__($self, /)\n--\n\n"),
        ),
        ("__exit__", method(c"__exit__", ffi::METH_FASTCALL, Pointer { PyCFunctionFast: exit }, exit_doc)),
    ] {
        let definition = Box::leak(Box::new(definition));
        // SAFETY: attached; the definition lives for ever, and the descriptor takes a reference to the type. It is a
        // new reference, or NULL with an exception set.
        let descriptor =
            unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyDescr_NewMethod(kind.as_type_ptr(), definition)) }?;
        kind.setattr(name, descriptor)?;
    }
    Ok(())
}

/// Runs `work` where pyo3 knows that this thread is attached.
#[cold]
fn known<'py, R>(py: Python<'py>, work: impl FnOnce(Python<'_>) -> R) -> R {
    let mut work = Some(work);
    match Python::try_attach(|py| work.take().map(|work| work(py))).flatten() {
        Some(done) => done,
        // The interpreter is shutting down, when pyo3 attaches no thread any more.
        None => work.take().expect("it did not run")(py),
    }
}

impl PyRequest {
    /// Whether neither entering nor leaving it holds more of Python than the token.
    #[inline]
    fn is_plain(&self) -> bool {
        let arguments = self.arguments();
        let is_usual = !arguments.is_whole && !arguments.cancel_if_chosen;
        is_usual && arguments.reserve.is_none() && self.sited.is_none()
    }

    fn exit_block(slf: &Bound<'_, Self>, error: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        if slf.get().arguments().is_whole {
            overdraft::ends();
        }
        Self::exit(slf, error)
    }
}

/// # Safety
/// - attached; `object` is a Request that lives for `'a`, as does the pointer.
#[inline]
unsafe fn request_at<'a, 'py>(py: Python<'py>, object: &'a *mut ffi::PyObject) -> &'a Bound<'py, PyRequest> {
    // SAFETY: an object that lives for `'a`, and a Request, by contract.
    unsafe { Bound::ref_from_ptr(py, object).cast_unchecked() }
}

/// # Safety
/// - attached; `object` is a Request, borrowed for the call.
unsafe extern "C" fn enter(object: *mut ffi::PyObject, _: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: attached, and `object` is a Request that is borrowed for this call, by contract.
    let (py, request) = unsafe {
        let py = Python::assume_attached();
        (py, request_at(py, &object))
    };
    answer(|| {
        let this = request.get();
        if this.is_plain() { this.enter(py) } else { known(py, |_| this.enter(py)) }?;
        Ok(request.clone().into_ptr())
    })
}

/// # Safety
/// - attached; `object` is a Request, `arguments` are `count` objects; all are borrowed for the call.
unsafe extern "C" fn exit(
    object: *mut ffi::PyObject,
    arguments: *mut *mut ffi::PyObject,
    count: ffi::Py_ssize_t,
) -> *mut ffi::PyObject {
    // SAFETY: attached, and `object` is a Request that is borrowed for this call, by contract.
    let (py, request) = unsafe {
        let py = Python::assume_attached();
        (py, request_at(py, &object))
    };
    answer(|| {
        if count != 3 {
            return Err(PyTypeError::new_err(format!(
                "Request.__exit__() takes kind, error and traceback, 3 arguments; got {count}"
            )));
        }
        // SAFETY: three objects that are borrowed for this call, by contract.
        let error = unsafe { Bound::ref_from_ptr(py, &*arguments.add(1)) };
        if error.is_none() && request.get().is_plain() {
            PyRequest::exit(request, None)?;
        } else {
            let error = (!error.is_none()).then_some(error);
            known(py, |_| PyRequest::exit_block(request, error))?;
        }
        Ok(py.None().into_ptr())
    })
}
