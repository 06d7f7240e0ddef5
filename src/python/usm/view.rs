//! `UsmView`: the base class of `ctxalloc.usm.Array`. It has the buffer protocol (PEP 3118), which in Python 3.11 only
//! C code can implement.
#![allow(unsafe_code, reason = "Py_buffer is C's")]

use super::queue::PyQueue;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{CString, c_int};
use std::ptr::null_mut;

/// Elements in USM, at an address, with a shape and strides in bytes.
#[pyclass(frozen, subclass, weakref, name = "UsmView", module = "ctxalloc._native")]
pub(in crate::python) struct PyView {
    /// Keeps the memory alive.
    owner: Py<PyAny>,
    queue: Py<PyQueue>,
    kind: String,
    address: usize,
    shape: Box<[ffi::Py_ssize_t]>,
    strides: Box<[ffi::Py_ssize_t]>,
    item_bytes: ffi::Py_ssize_t,
    format: CString,
    is_readonly: bool,
}

/// As many axes as an array of NumPy may have.
const MAX_AXES: usize = 64;

impl PyView {
    fn count(&self) -> ffi::Py_ssize_t {
        if self.shape.contains(&0) { 0 } else { self.shape.iter().product() }
    }

    /// Whether the elements follow one another without gaps, in the order of `dimensions`, which names the fastest axis
    /// first.
    fn is_contiguous(&self, dimensions: impl Iterator<Item = usize>) -> bool {
        if self.shape.contains(&0) {
            return true;
        }
        let mut expected = self.item_bytes;
        for dimension in dimensions {
            if self.shape[dimension] > 1 && self.strides[dimension] != expected {
                return false;
            }
            expected *= self.shape[dimension];
        }
        true
    }
}

#[pymethods]
impl PyView {
    /// `layout` is the first element's address, the shape, and the strides in bytes; `element` is the size of an
    /// element in bytes and its format (PEP 3118).
    #[new]
    #[pyo3(signature = (owner, queue, kind, layout, element, is_readonly, /))]
    fn new(
        owner: Py<PyAny>,
        queue: Py<PyQueue>,
        kind: String,
        layout: (usize, Vec<ffi::Py_ssize_t>, Vec<ffi::Py_ssize_t>),
        element: (ffi::Py_ssize_t, String),
        is_readonly: bool,
    ) -> PyResult<Self> {
        let ((address, shape, strides), (item_bytes, item_format)) = (layout, element);
        if shape.len() != strides.len() || shape.iter().any(|&length| length < 0) || item_bytes < 1 {
            return Err(PyValueError::new_err(format!("shape={shape:?} and strides={strides:?} do not fit together")));
        }
        if shape.len() > MAX_AXES {
            return Err(PyValueError::new_err(format!("an array has at most {MAX_AXES} axes, not {}", shape.len())));
        }
        let bytes = shape.iter().try_fold(item_bytes, |bytes, &length| bytes.checked_mul(length));
        if bytes.is_none() && !shape.contains(&0) {
            return Err(PyValueError::new_err(format!(
                "shape={shape:?} of elements of {item_bytes} bytes is more than any memory has"
            )));
        }
        let format = CString::new(item_format).map_err(|_| PyValueError::new_err("the format has a NUL"))?;
        let (shape, strides) = (shape.into(), strides.into());
        Ok(Self { owner, queue, kind, address, shape, strides, item_bytes, format, is_readonly })
    }

    #[getter]
    fn _owner(&self, py: Python<'_>) -> Py<PyAny> {
        self.owner.clone_ref(py)
    }

    #[getter]
    fn _queue(&self, py: Python<'_>) -> Py<PyQueue> {
        self.queue.clone_ref(py)
    }

    /// The address of its first element.
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    /// PEP 3118: waits for the queue first.
    ///
    /// # Safety
    /// - `view` is a `Py_buffer` that may be written to, as for `bf_getbuffer`.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        // SAFETY: `view` may be written to, by contract. Where this fails, NULL says that there is nothing to release.
        unsafe { (*view).obj = null_mut() };
        if this.kind == "device" {
            return Err(PyTypeError::new_err(
                "USM of the kind 'device' cannot be read by the host, so it has no buffer; copy it with asnumpy()",
            ));
        }
        let asked = |flag: c_int| flags & flag == flag;
        let axes = this.shape.len();
        let (in_c, in_fortran) = (this.is_contiguous((0..axes).rev()), this.is_contiguous(0..axes));
        let refusal = if this.is_readonly && asked(ffi::PyBUF_WRITABLE) {
            Some("it is read-only")
        } else if asked(ffi::PyBUF_C_CONTIGUOUS) && !in_c {
            Some("it is not contiguous in C's order")
        } else if asked(ffi::PyBUF_F_CONTIGUOUS) && !in_fortran {
            Some("it is not contiguous in Fortran's order")
        } else if (asked(ffi::PyBUF_ANY_CONTIGUOUS) || !asked(ffi::PyBUF_STRIDES)) && !(in_c || in_fortran) {
            Some("it is not contiguous")
        } else if !asked(ffi::PyBUF_STRIDES) && !in_c {
            Some("it is in Fortran's order, and strides are not asked for")
        } else {
            None
        };
        if let Some(refusal) = refusal {
            return Err(PyBufferError::new_err(format!("the USM array cannot give such a buffer: {refusal}")));
        }
        let queue = this.queue.get().queue();
        slf.py().detach(|| queue.wait());
        let filled = ffi::Py_buffer {
            buf: std::ptr::with_exposed_provenance_mut(this.address),
            obj: slf.clone().into_any().into_ptr(),
            len: this.count() * this.item_bytes,
            itemsize: this.item_bytes,
            readonly: this.is_readonly.into(),
            ndim: c_int::try_from(axes).expect("few axes"),
            format: if asked(ffi::PyBUF_FORMAT) { this.format.as_ptr().cast_mut() } else { null_mut() },
            shape: if asked(ffi::PyBUF_ND) { this.shape.as_ptr().cast_mut() } else { null_mut() },
            strides: if asked(ffi::PyBUF_STRIDES) { this.strides.as_ptr().cast_mut() } else { null_mut() },
            suboffsets: null_mut(),
            internal: null_mut(),
        };
        // SAFETY: `view` may be written to, by contract. Shape, strides and format live as long as this object, to
        // which the view owns a reference.
        unsafe { view.write(filled) };
        Ok(())
    }
}
