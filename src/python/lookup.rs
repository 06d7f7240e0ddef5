//! Finds the handler that a user means: by its name, by its object, or None for NumPy's default.

use super::handler::PyHandler;
use super::text::type_name;
use crate::handler::{self, Handler, default_handler};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyString;

/// Handlers that `ctxalloc.usm` registers when one of them is first named: only a program that names one needs dpctl,
/// and is to learn it if dpctl is missing.
const OF_USM: [&str; 3] = ["usm_shared", "usm_host", "usm_device"];

/// The same for `ctxalloc.cuda`, the driver and a device; `cuda_host:1` is that of device 1.
const OF_CUDA: [&str; 2] = ["cuda_host", "cuda_managed"];

/// The handler with that name.
///
/// # Errors
/// UnknownHandlerError; for a handler over USM also ImportError without dpctl, and RuntimeError without a device; for
/// one over CUDA's memory RuntimeError without a driver or a device.
pub(super) fn handler_named(py: Python<'_>, name: &str) -> PyResult<Handler> {
    if handler::handler(name).is_none() && OF_USM.contains(&name) {
        py.import("ctxalloc.usm")?.call_method1("_register_defaults", (name,))?;
    }
    if handler::handler(name).is_none() && is_of_cuda(name) {
        py.import("ctxalloc.cuda")?.call_method1("_register_default", (name,))?;
    }
    Ok(handler::try_handler(name)?)
}

fn is_of_cuda(name: &str) -> bool {
    match name.split_once(':') {
        None => OF_CUDA.contains(&name),
        // As `cuda.handler` writes it: no zero before it, and no device 0.
        Some((kind, number)) => {
            OF_CUDA.contains(&kind)
                && number.parse().is_ok_and(|ordinal: u16| ordinal > 0 && ordinal.to_string() == number)
        }
    }
}

/// What users may give where a handler is selected: a Handler, its name, or None for NumPy's default.
///
/// # Errors
/// TypeError for anything else, those of [`handler_named`], and ValueError for memory that the host cannot read: NumPy
/// writes to it.
#[inline]
pub(super) fn handler_meant(subject: &Bound<'_, PyAny>) -> PyResult<Handler> {
    let handler = match subject.cast::<PyHandler>() {
        Ok(object) => object.get().handler(),
        Err(_) => named_or_default(subject)?,
    };
    handler.require_host_accessible()?;
    Ok(handler)
}

/// [`handler_meant`] as the Python object.
#[inline]
pub(super) fn handler_for<'py>(subject: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyHandler>> {
    PyHandler::of(subject.py(), handler_meant(subject)?)
}

fn named_or_default(subject: &Bound<'_, PyAny>) -> PyResult<Handler> {
    if let Ok(name) = subject.cast::<PyString>() {
        return handler_named(subject.py(), &name.to_cow()?);
    }
    if subject.is_none() {
        return Ok(default_handler());
    }
    Err(PyTypeError::new_err(format!(
        "a handler is wanted: a ctxalloc.Handler, the name of one, or None for NumPy's default; got '{}'",
        type_name(subject)
    )))
}
