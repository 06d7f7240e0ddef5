//! NumPy's side, read by hand from its array-API capsule: the two functions that reach its ContextVar, its default
//! handler, and where an array keeps its own. rust-numpy leaves these slots out.
#![allow(unsafe_code, reason = "NumPy's C API is a table of pointers")]

use super::selection::Selection;
use crate::handler::abi;
use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyType};
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

/// `PyDataMem_SetHandler` of the process's NumPy.
#[derive(Clone, Copy)]
pub(super) struct SetHandler(SetHandlerFunction);

type SetHandlerFunction = unsafe extern "C" fn(*mut ffi::PyObject) -> *mut ffi::PyObject;

impl SetHandler {
    /// Selects a capsule in the running Context; returns the one that was there. NumPy checks the capsule's name.
    pub(super) fn call<'py>(self, capsule: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: attached; a borrowed reference to any object, which NumPy checks.
        let old = unsafe { (self.0)(capsule.as_ptr()) };
        // SAFETY: a new reference, or NULL with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(capsule.py(), old) }
    }
}

type GetHandler = unsafe extern "C" fn() -> *mut ffi::PyObject;

/// Slots of `_ARRAY_API` (`numpy/_core/code_generators/numpy_api.py`), the same from NumPy 1.22 on.
const SLOT_SET_HANDLER: usize = 304;
const SLOT_GET_HANDLER: usize = 305;
const SLOT_DEFAULT_HANDLER: usize = 306;

/// Words between the object header and `mem_handler` in `PyArrayObject_fields`: data, nd, dimensions, strides,
/// base, descr, flags, weakreflist, _buffer_info (each one word with its padding).
const WORDS_BEFORE_HANDLER: usize = 9;

/// What this process's NumPy offers, found once.
pub(super) struct Numpy {
    set_handler: SetHandler,
    get_handler: GetHandler,
    default_handler: Py<PyAny>,
    ndarray: Py<PyType>,
    /// `ndarray.base` itself: a subclass may have something else under that name.
    base: Py<PyAny>,
    multiarray: Py<PyAny>,
    /// Where `mem_handler` stands in an array object, in bytes; `None` where a trial array had it elsewhere.
    handler_offset: Option<usize>,
    selection: Selection,
}

impl Numpy {
    /// This process's NumPy.
    #[inline]
    pub(super) fn get(py: Python<'_>) -> PyResult<&'static Self> {
        static NUMPY: PyOnceLock<Numpy> = PyOnceLock::new();
        match NUMPY.get(py) {
            Some(numpy) => Ok(numpy),
            None => Self::first(py, &NUMPY),
        }
    }

    #[cold]
    fn first<'a>(py: Python<'_>, place: &'a PyOnceLock<Self>) -> PyResult<&'a Self> {
        // Found outside of the cell: an import lets other threads run, and one of them may fork. Its child would wait here.
        let found = Self::find(py)?;
        Ok(place.get_or_init(py, || found))
    }

    fn find(py: Python<'_>) -> PyResult<Self> {
        let core = |module: &str| {
            py.import(format!("numpy._core.{module}")).or_else(|_| py.import(format!("numpy.core.{module}")))
        };
        let api = core("_multiarray_umath")?.getattr("_ARRAY_API")?.cast_into::<PyCapsule>()?;
        let table = api.pointer_checked(None)?.cast::<*const c_void>();
        let slot = |index: usize| -> PyResult<NonNull<c_void>> {
            // SAFETY: NumPy 1.22 and later fill these slots; 1.26 is required by the package.
            let place = unsafe { table.add(index) };
            // SAFETY: as above; the table lives as long as the process.
            let pointer = unsafe { place.read() };
            NonNull::new(pointer.cast_mut()).ok_or_else(|| {
                PyImportError::new_err(format!(
                    "NumPy's C API has nothing in slot {index}, where NEP 49's functions are from NumPy 1.22 on; \
                     install numpy>=1.26"
                ))
            })
        };
        // SAFETY: slot 304 is `PyObject *PyDataMem_SetHandler(PyObject *)`.
        let set_handler =
            SetHandler(unsafe { std::mem::transmute::<NonNull<c_void>, SetHandlerFunction>(slot(SLOT_SET_HANDLER)?) });
        // SAFETY: slot 305 is `PyObject *PyDataMem_GetHandler(void)`.
        let get_handler = unsafe { std::mem::transmute::<NonNull<c_void>, GetHandler>(slot(SLOT_GET_HANDLER)?) };
        let default_place = slot(SLOT_DEFAULT_HANDLER)?.cast::<*mut ffi::PyObject>();
        // SAFETY: slot 306 is the address of `PyObject *PyDataMem_DefaultHandler`.
        let default_handler = unsafe { default_place.read() };
        // SAFETY: NumPy holds a reference to it for ever.
        let default_handler = unsafe { Bound::from_borrowed_ptr(py, default_handler) };

        let multiarray = core("multiarray")?;
        let ndarray = multiarray.getattr("ndarray")?.cast_into::<PyType>()?;
        let mut numpy = Self {
            set_handler,
            get_handler,
            default_handler: default_handler.unbind(),
            base: ndarray.getattr("base")?.getattr("__get__")?.unbind(),
            ndarray: ndarray.unbind(),
            multiarray: multiarray.into_any().unbind(),
            handler_offset: None,
            selection: Selection::SetHandler { marker: py.None() },
        };
        numpy.selection = Selection::find(py, &numpy)?;
        numpy.handler_offset = numpy.find_handler_offset(py)?;
        Ok(numpy)
    }

    /// Looks into a new array for the capsule that is current, where NumPy's headers say it is.
    fn find_handler_offset(&self, py: Python<'_>) -> PyResult<Option<usize>> {
        let header: usize = py.get_type::<PyAny>().getattr("__basicsize__")?.extract()?;
        let size: usize = self.ndarray.bind(py).getattr("__basicsize__")?.extract()?;
        let offset = header + WORDS_BEFORE_HANDLER * size_of::<usize>();
        if offset + size_of::<usize>() > size {
            return Ok(None);
        }
        let trial = self.multiarray.bind(py).call_method1("empty", (1,))?;
        let found = Self::read_word(&trial, offset);
        let current = self.current_capsule(py)?;
        Ok(std::ptr::eq(found, current.as_ptr()).then_some(offset))
    }

    fn read_word(object: &Bound<'_, PyAny>, offset: usize) -> *mut ffi::PyObject {
        // SAFETY: the callers checked that an ndarray has this many bytes.
        let place = unsafe { object.as_ptr().byte_add(offset) }.cast::<*mut ffi::PyObject>();
        // SAFETY: as above; words in objects are aligned.
        unsafe { place.read() }
    }

    /// The capsule in NumPy's ContextVar: the selection of the running Python context.
    #[inline]
    pub(super) fn current_capsule<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: attached (`py`); the function takes nothing.
        let capsule = unsafe { (self.get_handler)() };
        // SAFETY: a new reference, or NULL with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
    }

    /// Calls NumPy's `PyDataMem_SetHandler`; returns the capsule that was there.
    pub(super) fn set_capsule<'py>(&self, capsule: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.set_handler.call(capsule)
    }

    pub(super) fn set_handler(&self) -> SetHandler {
        self.set_handler
    }

    pub(super) fn selection(&self) -> &Selection {
        &self.selection
    }

    pub(super) fn default_capsule<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.default_handler.bind(py)
    }

    /// `numpy._core.multiarray` (`numpy.core.multiarray` before 2.0).
    pub(super) fn multiarray<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.multiarray.bind(py)
    }

    /// Whether an object has an array's layout: by its real type. `isinstance` would believe its `__class__`, which a mock
    /// or a proxy says as it likes.
    pub(super) fn is_array(&self, object: &Bound<'_, PyAny>) -> bool {
        // SAFETY: attached, as the `Bound` shows; an object, which has a type, and the type that `find` got from NumPy.
        unsafe { ffi::PyObject_TypeCheck(object.as_ptr(), self.ndarray.as_ptr().cast()) != 0 }
    }

    /// What an array's memory belongs to; None where it is the array's own.
    pub(super) fn base_of<'py>(&self, array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.base.bind(array.py()).call1((array,))
    }

    /// The capsule that an array frees its data with; `None` where it owns none. `array` is an ndarray.
    pub(super) fn capsule_of<'py>(&self, array: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        debug_assert!(self.is_array(array));
        let Some(offset) = self.handler_offset else { return Ok(None) };
        let capsule = Self::read_word(array, offset);
        // SAFETY: NULL, or a reference that the array holds while we hold the array.
        Ok(unsafe { Bound::from_borrowed_ptr_or_opt(array.py(), capsule) })
    }

    /// Whether [`capsule_of`](Self::capsule_of) can tell.
    pub(super) fn knows_array_handlers(&self) -> bool {
        self.handler_offset.is_some()
    }
}

/// The struct in a capsule, if it is one of NEP 49's.
pub(super) fn struct_in(capsule: &Bound<'_, PyAny>) -> Option<NonNull<abi::PyDataMem_Handler>> {
    // SAFETY: any object may be asked; anything but a capsule of this name gives 0.
    let valid = unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), abi::CAPSULE_NAME.as_ptr()) };
    if valid == 0 {
        return None;
    }
    // SAFETY: a valid capsule of this name, as just seen.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), abi::CAPSULE_NAME.as_ptr()) };
    NonNull::new(pointer.cast())
}

/// A capsule around a struct that lives for ever.
pub(super) fn capsule_around<'py>(py: Python<'py>, face: *const abi::PyDataMem_Handler) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the pointer is not NULL, the name is static, no destructor: the struct is immortal.
    let capsule = unsafe { ffi::PyCapsule_New(face.cast_mut().cast(), abi::CAPSULE_NAME.as_ptr(), None) };
    // SAFETY: a new reference, or NULL with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

/// The address of a C function that this process has loaded: CPython's own that are in no limited API.
pub(super) fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a NUL-terminated name, looked up in what the process has loaded.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}
