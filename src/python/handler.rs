//! `ctxalloc.Handler`: the one Python object for each handler, and its capsule.
//!
//! Both are made at first use and kept in the table's entry for ever, so that `is` means `==` and selecting allocates
//! nothing. Only those of a request's handler are not kept: each object and each capsule is a new one, and holds the
//! request while it lives.
#![allow(unsafe_code, reason = "immortal references kept in the table")]

use super::foreign::keep;
use super::numpy::capsule_around;
use super::text::in_python_syntax;
use super::tracked::{self, PyBlock};
use crate::handler::{Handler, Held};
use crate::sync::Ordering;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::borrow::Cow;
use std::hash::{Hash, Hasher};
use std::ptr::{NonNull, null_mut};

/// A handler: NEP 49's named, versioned table of allocation functions.
///
/// ``ctxalloc.handler(name)`` finds it, ``register()`` and ``adopt()`` make it, ``use()`` selects it. It lives for
/// ever, and there is one object for each handler, so ``is`` and ``==`` agree. A request's handler belongs to that
/// request alone: compare it by ``==``; while you keep it the request's numbers and limit stay in force. It is pickled
/// by name: where it is unpickled a handler of that name must be registered.
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
        // SAFETY: the table keeps a reference for ever. Only `make` puts objects here, all of this type and of the
        // package's copy of this crate: no other copy has a module that makes a `PyHandler`.
        Ok(unsafe { Bound::from_borrowed_ptr(py, pointer).cast_into_unchecked() })
    }

    /// A new object for a handler, with the capsule that selects it.
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
                // SAFETY: our own reference to an object that nobody else has seen.
                unsafe { ffi::Py_DECREF(fresh) };
                Ok(present.cast())
            }
        }
    }
}

/// The capsule that selects a handler in NumPy: the foreign one that it was adopted from, or ours. For a request's
/// handler a new one.
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
    // SAFETY: `keep` put a reference here, which is never taken away.
    Ok(unsafe { Bound::from_borrowed_ptr(py, pointer.cast()) })
}

/// A new capsule for a handler. That of a request's handler holds the request while it lives. If nothing is left of the
/// request, it is a capsule whose functions refuse every allocation.
pub(super) fn new_capsule(py: Python<'_>, handler: Handler) -> PyResult<Bound<'_, PyAny>> {
    capsule_that_holds(py, Held::on(handler))
}

/// [`new_capsule`] with a hold that somebody has already.
pub(super) fn capsule_that_holds(py: Python<'_>, held: Held) -> PyResult<Bound<'_, PyAny>> {
    let capsule = capsule_around(py, held.handler().as_ptr())?;
    if held.handler().is_request() {
        let context = held.into_handler().into_pointer().as_ptr();
        // SAFETY: a capsule that nobody else has seen. Its context may be any pointer, and this is the one that
        // `let_go` turns back into the hold.
        unsafe {
            ffi::PyCapsule_SetContext(capsule.as_ptr(), context);
            ffi::PyCapsule_SetDestructor(capsule.as_ptr(), Some(let_go));
        }
    }
    Ok(capsule)
}

/// The destructor of a capsule that holds a request: it lets go of the request.
///
/// # Safety
/// - `capsule` is one that `capsule_that_holds` gave this destructor; Python calls it once, attached.
unsafe extern "C" fn let_go(capsule: *mut ffi::PyObject) {
    // SAFETY: by contract the capsule comes from `capsule_that_holds`, which was given a hold on the request and stored
    // its handler here as the context. The destructor runs once, so the hold is dropped once.
    unsafe {
        if let Some(context) = NonNull::new(ffi::PyCapsule_GetContext(capsule)) {
            drop(Held::assume(Handler::from_pointer(context)));
        }
    }
}

#[pymethods]
impl PyHandler {
    /// Its name in the table, or the name of its request. NumPy knows our handlers by the same name.
    #[getter]
    fn name(&self) -> Cow<'static, str> {
        self.handler.name()
    }

    /// The version of its struct (NEP 49).
    #[getter]
    fn version(&self) -> u8 {
        self.handler.version()
    }

    /// The alignment of its blocks in bytes; 1 for a foreign handler of which nothing is known.
    #[getter]
    fn alignment(&self) -> usize {
        self.handler.alignment()
    }

    /// The capsule ``mem_handler`` that ``PyDataMem_SetHandler`` takes.
    #[getter(capsule)]
    fn capsule_py(&self, py: Python<'_>) -> Py<PyAny> {
        self.capsule.clone_ref(py)
    }

    /// Gives memory that its strategy keeps but nobody uses back to the system. Returns how many bytes that was, as far
    /// as is known. Runs without the GIL: await ``asyncio.to_thread(handler.trim)`` so as not to block an event loop.
    fn trim(&self, py: Python<'_>) -> usize {
        py.detach(|| self.handler.trim())
    }

    /// Its live blocks, the oldest first: a list of ``tracking.Block``. While other threads allocate and free, it has
    /// every block that is alive during the whole call.
    ///
    /// ValueError: its strategy does not know its blocks. ``strategies.Tracked`` does, also where other strategies wrap
    /// it.
    fn live_blocks<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBlock>>> {
        tracked::of_handler(py, self.handler)
    }

    fn __repr__(&self) -> String {
        format!(
            "<ctxalloc.Handler {:?}: {}, version {}>",
            self.handler.name(),
            in_python_syntax(self.handler.description()),
            self.handler.version()
        )
    }

    /// A handler is immutable, so its copy is the handler itself.
    fn __copy__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// The same as `__copy__`.
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
