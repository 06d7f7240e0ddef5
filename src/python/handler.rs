//! `ctxalloc.Handler`: the one Python object for each handler, and its capsule.
//!
//! Both hang on the table's entry, made at first use and kept for ever, so that identity means equality and
//! selecting allocates nothing. Only a request's handler is not kept: each object and each capsule for it is a new
//! one, which holds the request while it lives.
#![allow(unsafe_code, reason = "immortal references kept in the table")]

use super::foreign::keep;
use super::numpy::capsule_around;
use super::strategies::in_pythons_words;
use super::tracked::{self, PyBlock};
use super::usm;
use crate::handler::{Handler, Held, unknown};
use crate::sync::Ordering;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;
use std::borrow::Cow;
use std::hash::{Hash, Hasher};
use std::ptr::{NonNull, null_mut};

/// A handler: NEP 49's named, versioned table of allocation functions.
///
/// Found by ``ctxalloc.handler(name)``, made by ``register()`` and ``adopt()``, selected by ``use()``. It lives for
/// ever; there is one object for each, so ``is`` and ``==`` agree. A request's handler is the request's own and no other's:
/// compare it by ``==``; while you keep it the request's numbers and limit stay in force. Pickles by name: where it is
/// unpickled a handler of that name must be registered.
#[pyclass(frozen, eq, hash, weakref, name = "Handler", module = "ctxalloc")]
pub(super) struct PyHandler {
    handler: Handler,
    capsule: Py<PyAny>,
}

impl PartialEq for PyHandler {
    fn eq(&self, other: &Self) -> bool {
        self.handler == other.handler
    }
}

impl Hash for PyHandler {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.handler.hash(state);
    }
}

impl PyHandler {
    pub(super) fn handler(&self) -> Handler {
        self.handler
    }

    pub(super) fn capsule<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.capsule.bind(py)
    }

    /// The object for a handler of the table.
    #[inline]
    pub(super) fn of(py: Python<'_>, handler: Handler) -> PyResult<Bound<'_, Self>> {
        if handler.is_request() {
            return Self::of_capsule(handler, new_capsule(py, handler)?);
        }
        // Acquire pairs with the exchange in `make`.
        let mut pointer = handler.entry().object.load(Ordering::Acquire).cast::<ffi::PyObject>();
        if pointer.is_null() {
            pointer = Self::make(py, handler)?;
        }
        // SAFETY: kept for ever by the table. Only the package `ctxalloc` puts objects here, all of this type.
        let object = unsafe { Bound::from_borrowed_ptr(py, pointer) };
        // SAFETY: as above.
        Ok(unsafe { object.cast_into_unchecked() })
    }

    /// A new object for a handler that a capsule selects.
    pub(super) fn of_capsule<'py>(handler: Handler, capsule: Bound<'py, PyAny>) -> PyResult<Bound<'py, Self>> {
        Bound::new(capsule.py(), Self { handler, capsule: capsule.unbind() })
    }

    /// The object, made now and kept for ever, or the one that another thread made meanwhile.
    #[cold]
    fn make(py: Python<'_>, handler: Handler) -> PyResult<*mut ffi::PyObject> {
        let object = Py::new(py, Self { handler, capsule: capsule_of(py, handler)?.unbind() })?;
        let fresh = object.into_ptr();
        let place = &handler.entry().object;
        match place.compare_exchange(null_mut(), fresh.cast(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(fresh),
            Err(present) => {
                // SAFETY: our own reference to an object that nobody else saw.
                unsafe { ffi::Py_DECREF(fresh) };
                Ok(present.cast())
            }
        }
    }
}

/// The capsule that selects a handler in NumPy: the foreign one it came in, or ours. A new one for a request's handler.
pub(super) fn capsule_of(py: Python<'_>, handler: Handler) -> PyResult<Bound<'_, PyAny>> {
    let place = &handler.entry().capsule;
    if place.load(Ordering::Acquire).is_null() {
        let capsule = new_capsule(py, handler)?;
        if handler.is_request() {
            return Ok(capsule);
        }
        keep(handler, capsule.unbind());
    }
    let pointer = place.load(Ordering::Acquire);
    // SAFETY: `keep` put a reference here, for ever.
    Ok(unsafe { Bound::from_borrowed_ptr(py, pointer.cast()) })
}

/// A capsule that holds a request while it lives; one for any other handler holds nothing. For a request of which nothing
/// is left: one whose functions refuse.
pub(super) fn new_capsule(py: Python<'_>, handler: Handler) -> PyResult<Bound<'_, PyAny>> {
    let held = Held::on(handler);
    let capsule = capsule_around(py, held.handler().as_ptr())?;
    if held.handler().is_request() {
        // SAFETY: a capsule, which nobody else has seen; any pointer may be its context.
        unsafe { ffi::PyCapsule_SetContext(capsule.as_ptr(), held.into_handler().into_pointer().as_ptr()) };
        // SAFETY: as above.
        unsafe { ffi::PyCapsule_SetDestructor(capsule.as_ptr(), Some(let_go)) };
    }
    Ok(capsule)
}

/// The end of a capsule that holds a request.
///
/// # Safety
/// - `capsule` is one that `new_capsule` gave this destructor.
unsafe extern "C" fn let_go(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule, says the caller.
    let context = unsafe { ffi::PyCapsule_GetContext(capsule) };
    if let Some(context) = NonNull::new(context) {
        // SAFETY: `new_capsule` put it there.
        let handler = unsafe { Handler::from_pointer(context) };
        // SAFETY: the hold that `new_capsule` made; a capsule ends once.
        drop(unsafe { Held::assume(handler) });
    }
}

/// What users may say where a handler is to be selected: a Handler, a name, or None for NumPy's default. One whose memory
/// the host cannot read is refused: NumPy writes to what it is given.
#[inline]
pub(super) fn handler_meant(subject: &Bound<'_, PyAny>) -> PyResult<Handler> {
    let handler = match subject.cast::<PyHandler>() {
        Ok(object) => object.get().handler,
        Err(_) => handler_named(subject)?,
    };
    handler.require_host_accessible()?;
    Ok(handler)
}

/// [`handler_meant`], as the Python object.
#[inline]
pub(super) fn handler_for<'py>(subject: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyHandler>> {
    PyHandler::of(subject.py(), handler_meant(subject)?)
}

fn handler_named(subject: &Bound<'_, PyAny>) -> PyResult<Handler> {
    if let Ok(name) = subject.cast::<PyString>() {
        let name = name.to_cow()?;
        return Ok(usm::handler_named(subject.py(), &name)?.ok_or_else(|| unknown(&name))?);
    }
    if subject.is_none() {
        return Ok(crate::handler::default_handler());
    }
    let kind = subject.get_type().qualname()?;
    Err(PyTypeError::new_err(format!(
        "a handler is wanted: a ctxalloc.Handler, the name of one, or None for NumPy's default; got '{kind}'"
    )))
}

#[pymethods]
impl PyHandler {
    /// Its name: in the table, or that of the request. NumPy knows our handlers by the same name.
    #[getter]
    fn name(&self) -> Cow<'static, str> {
        self.handler.name()
    }

    /// NEP 49's version of its struct.
    #[getter]
    fn version(&self) -> u8 {
        self.handler.version()
    }

    /// What its blocks are aligned to, in bytes; 1 for a foreign handler of which nothing is known.
    #[getter]
    fn alignment(&self) -> usize {
        self.handler.alignment()
    }

    /// The capsule ``mem_handler`` that ``PyDataMem_SetHandler`` takes.
    #[getter(capsule)]
    fn capsule_py(&self, py: Python<'_>) -> Py<PyAny> {
        self.capsule.clone_ref(py)
    }

    /// Gives memory that its strategy keeps but nobody uses back to the system, and says how many bytes, as far as is
    /// known. Runs without the GIL: await ``asyncio.to_thread(handler.trim)`` to keep an event loop free.
    fn trim(&self, py: Python<'_>) -> usize {
        py.detach(|| self.handler.trim())
    }

    /// Its live blocks, the oldest first: a list of ``tracking.Block``. While other threads allocate, what is alive all
    /// through the call is in it.
    ///
    /// ValueError: its strategy does not know them; ``strategies.Tracked`` does, also behind others.
    fn live_blocks<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBlock>>> {
        tracked::of_handler(py, self)
    }

    fn __repr__(&self) -> String {
        format!(
            "<ctxalloc.Handler {:?}: {}, version {}>",
            self.handler.name(),
            in_pythons_words(self.handler.description()),
            self.handler.version()
        )
    }

    /// There is nothing in it to change: its copy is itself.
    fn __copy__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// As above.
    fn __deepcopy__<'py>(slf: Bound<'py, Self>, _memo: &Bound<'py, PyAny>) -> Bound<'py, Self> {
        slf
    }

    /// Pickles by name.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (Cow<'static, str>,))> {
        if self.handler.is_request() {
            return Err(PyTypeError::new_err(format!(
                "handler '{}' belongs to a request of this process, so it has no name elsewhere to pickle it by",
                self.handler.name()
            )));
        }
        Ok((py.import("ctxalloc")?.getattr("handler")?, (self.handler.name(),)))
    }
}
