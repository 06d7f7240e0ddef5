//! What we need of NumPy's C API, read by hand from its capsule `_ARRAY_API`: the two functions that reach its
//! ContextVar, its default handler, and where an array keeps its own. rust-numpy leaves these slots out.
#![allow(unsafe_code, reason = "NumPy's C API is a table of pointers")]

use super::asked::asked;
use super::capsule;
use super::selection::{Selection, SetHandler, SetHandlerFunction};
use crate::handler::abi;
use crate::strategy::System;
use crate::sync::Made;
use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

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
    get_handler: GetHandler,
    default_handler: Py<PyAny>,
    ndarray: Py<PyType>,
    /// The getter of `ndarray.base`: a subclass may have another attribute of that name.
    base: Py<PyAny>,
    multiarray: Py<PyAny>,
    /// The class of its error for an array that cannot be made; None where this NumPy has it under another name.
    array_memory_error: Option<Py<PyAny>>,
    /// Offset of `mem_handler` in an array object, in bytes; `None` where a trial array did not have it there.
    handler_offset: Option<usize>,
    /// The name of a handler's capsule: its own text.
    capsule_name: &'static CStr,
    selection: Selection,
}

impl Numpy {
    /// This process's NumPy.
    #[inline]
    pub(super) fn get(py: Python<'_>) -> PyResult<&'static Self> {
        static NUMPY: Made<Numpy> = Made::new();
        match NUMPY.get() {
            Some(numpy) => Ok(numpy),
            None => Self::first(py, &NUMPY),
        }
    }

    #[cold]
    fn first(py: Python<'_>, place: &'static Made<Self>) -> PyResult<&'static Self> {
        // Found before it is kept: an import lets other threads run, which may find it too, and others.
        let found = Self::find(py)?;
        Ok(place.get_or_make(|| found))
    }

    fn find(py: Python<'_>) -> PyResult<Self> {
        let core = |module: &str| {
            asked(py, py.import(format!("numpy._core.{module}")))?
                .or_else(|_| py.import(format!("numpy.core.{module}")))
        };
        let functions = core("_multiarray_umath")?;
        let api = functions.getattr("_ARRAY_API")?.cast_into::<PyCapsule>()?;
        let table = api.pointer_checked(None)?.cast::<*const c_void>();
        let slot = |index: usize| -> PyResult<NonNull<c_void>> {
            // SAFETY: NumPy has these slots since 1.22, and the package requires 1.26. The table lives as long as the
            // process.
            let pointer = unsafe { table.add(index).read() };
            NonNull::new(pointer.cast_mut()).ok_or_else(|| {
                PyImportError::new_err(format!(
                    "NumPy's C API has nothing in slot {index}, where NEP 49's functions are from NumPy 1.22 on; \
                     install numpy>=1.26"
                ))
            })
        };
        // SAFETY: slot 304 is `PyObject *PyDataMem_SetHandler(PyObject *)`.
        let set_handler = unsafe {
            let function = std::mem::transmute::<NonNull<c_void>, SetHandlerFunction>(slot(SLOT_SET_HANDLER)?);
            SetHandler::new(function)
        };
        // SAFETY: slot 305 is `PyObject *PyDataMem_GetHandler(void)`.
        let get_handler = unsafe { std::mem::transmute::<NonNull<c_void>, GetHandler>(slot(SLOT_GET_HANDLER)?) };
        let default_place = slot(SLOT_DEFAULT_HANDLER)?.cast::<*mut ffi::PyObject>();
        // SAFETY: slot 306 is the address of `PyObject *PyDataMem_DefaultHandler`, a capsule that NumPy holds for ever.
        let default_handler = unsafe { Bound::from_borrowed_ptr(py, default_place.read()) };
        // SAFETY: attached; NULL, or a C string that lives as long as the capsule, which NumPy holds for ever.
        let capsule_name = unsafe {
            let name = ffi::PyCapsule_GetName(default_handler.as_ptr());
            if name.is_null() { abi::CAPSULE_NAME } else { CStr::from_ptr(name) }
        };
        let capsule_name = if capsule_name == abi::CAPSULE_NAME { capsule_name } else { abi::CAPSULE_NAME };
        let selection = Selection::find(set_handler, &default_handler)?;

        // NUMPY_MADVISE_HUGEPAGE, or what NumPy knows of the kernel. A NumPy that does not say gives the hint.
        let hints = functions.call_method0("_get_madvise_hugepage").and_then(|hints| hints.is_truthy());
        System::prefer_huge_pages(asked(py, hints)?.unwrap_or(true));

        let multiarray = core("multiarray")?;
        let error = core("_exceptions").and_then(|exceptions| exceptions.getattr("_ArrayMemoryError"));
        let array_memory_error = asked(py, error)?.ok().map(Bound::unbind);
        let ndarray = multiarray.getattr("ndarray")?.cast_into::<PyType>()?;
        let mut numpy = Self {
            get_handler,
            default_handler: default_handler.unbind(),
            base: ndarray.getattr("base")?.getattr("__get__")?.unbind(),
            ndarray: ndarray.unbind(),
            multiarray: multiarray.into_any().unbind(),
            array_memory_error,
            handler_offset: None,
            capsule_name,
            selection,
        };
        numpy.handler_offset = numpy.find_handler_offset(py)?;
        Ok(numpy)
    }

    /// Looks in a new array for the current capsule, where NumPy's headers say it is.
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

    /// The word at an offset in bytes; `object` is an ndarray.
    fn read_word(object: &Bound<'_, PyAny>, offset: usize) -> *mut ffi::PyObject {
        // SAFETY: the callers checked that an ndarray is larger than that. The offset is a multiple of a word's size,
        // and so the word is aligned.
        unsafe { object.as_ptr().byte_add(offset).cast::<*mut ffi::PyObject>().read() }
    }

    /// The capsule in NumPy's ContextVar: the selection of the running Python context.
    #[inline]
    pub(super) fn current_capsule<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: `PyDataMem_GetHandler` takes nothing and is called attached, as `py` shows. It returns a new
        // reference, or NULL with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(py, (self.get_handler)()) }
    }

    /// Whether an object is NumPy's error for an array that cannot be made.
    pub(super) fn is_array_memory_error(&self, object: &Bound<'_, PyAny>) -> bool {
        let is = |class: &Py<PyAny>| std::ptr::eq(object.get_type().as_ptr(), class.as_ptr());
        self.array_memory_error.as_ref().is_some_and(is)
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

    /// Whether an object has an array's layout, by its real type: `isinstance` would believe its `__class__`, which a
    /// mock or a proxy sets as it likes.
    pub(super) fn is_array(&self, object: &Bound<'_, PyAny>) -> bool {
        // SAFETY: attached, as the `Bound` shows; `object` is an object, and `ndarray` a type.
        unsafe { ffi::PyObject_TypeCheck(object.as_ptr(), self.ndarray.as_ptr().cast()) != 0 }
    }

    /// The object that owns an array's memory; Python's None where the array itself does.
    pub(super) fn base_of<'py>(&self, array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.base.bind(array.py()).call1((array,))
    }

    /// The capsule through which an array frees its data; `None` where it owns none. `array` is an ndarray.
    pub(super) fn capsule_of<'py>(&self, array: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        debug_assert!(self.is_array(array));
        let Some(offset) = self.handler_offset else { return Ok(None) };
        let capsule = Self::read_word(array, offset);
        // SAFETY: NULL, or a capsule that the array holds, as we hold the array.
        Ok(unsafe { Bound::from_borrowed_ptr_or_opt(array.py(), capsule) })
    }

    /// Whether [`capsule_of`](Self::capsule_of) can tell.
    pub(super) fn knows_array_handlers(&self) -> bool {
        self.handler_offset.is_some()
    }
}

/// NEP 49's struct in a capsule, if it is a capsule of such a struct.
pub(super) fn struct_in(capsule: &Bound<'_, PyAny>) -> Option<NonNull<abi::PyDataMem_Handler>> {
    capsule::pointer_in(capsule, abi::CAPSULE_NAME).map(NonNull::cast)
}

/// The name of the capsules of handlers: NumPy's own text.
#[cfg(ctxalloc_whole)]
pub(super) fn capsule_name(py: Python<'_>) -> PyResult<&'static CStr> {
    Ok(Numpy::get(py)?.capsule_name)
}

/// A capsule around a struct that lives for ever. Its name is NumPy's own text where that is the same: NumPy compares
/// it for each array, and glibc's `strcmp` takes twice as long where one of two texts is at the end of a page.
pub(super) fn capsule_around<'py>(
    py: Python<'py>,
    c_struct: *const abi::PyDataMem_Handler,
) -> PyResult<Bound<'py, PyAny>> {
    capsule::new(py, c_struct.cast(), Numpy::get(py)?.capsule_name)
}
