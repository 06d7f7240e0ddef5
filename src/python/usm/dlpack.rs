//! DLPack, both ways: tensors in capsules, unversioned and of version 1 (dlpack.h).
//!
//! A capsule that nobody consumed calls the tensor's deleter; one that was consumed has another name, and its consumer
//! calls it.
#![allow(unsafe_code, reason = "DLPack is C's")]

use crate::python::exit;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{CStr, c_void};

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    axes: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    offset_bytes: u64,
}

#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Tensor,
}

/// As many as NumPy has.
const MAX_AXES: usize = 64;

const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;
const PLAIN: (&CStr, &CStr) = (c"dltensor", c"used_dltensor");
const VERSIONED: (&CStr, &CStr) = (c"dltensor_versioned", c"used_dltensor_versioned");

/// What our tensors' contexts point to.
struct Exported {
    owner: Option<Py<PyAny>>,
    shape: Box<[i64]>,
    strides: Box<[i64]>,
}

impl Drop for Exported {
    /// On any thread, perhaps one that is not attached to Python.
    fn drop(&mut self) {
        let mut owner = self.owner.take();
        if exit::try_attach(|_| drop(owner.take())).is_none() {
            std::mem::forget(owner); // Python is gone
        }
    }
}

unsafe extern "C" fn delete_plain(tensor: *mut Managed) {
    // SAFETY: made by `usm_dlpack`, and deleted once (DLPack's rule).
    let tensor = unsafe { Box::from_raw(tensor) };
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(tensor.context.cast::<Exported>()) });
}

unsafe extern "C" fn delete_versioned(tensor: *mut Versioned) {
    // SAFETY: as in `delete_plain`.
    let tensor = unsafe { Box::from_raw(tensor) };
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(tensor.context.cast::<Exported>()) });
}

/// The end of a capsule: where nobody consumed it, the tensor's too.
unsafe extern "C" fn end_of_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: any object may be asked.
    if unsafe { ffi::PyCapsule_IsValid(capsule, PLAIN.0.as_ptr()) } != 0 {
        // SAFETY: a capsule of this name has such a tensor.
        let tensor = unsafe { ffi::PyCapsule_GetPointer(capsule, PLAIN.0.as_ptr()) }.cast::<Managed>();
        // SAFETY: ours, not consumed.
        unsafe { delete_plain(tensor) };
    }
    // SAFETY: as above.
    if unsafe { ffi::PyCapsule_IsValid(capsule, VERSIONED.0.as_ptr()) } != 0 {
        // SAFETY: as above.
        let tensor = unsafe { ffi::PyCapsule_GetPointer(capsule, VERSIONED.0.as_ptr()) }.cast::<Versioned>();
        // SAFETY: ours, not consumed.
        unsafe { delete_versioned(tensor) };
    }
}

/// A capsule with a tensor, which keeps `owner`. `place` is an address and an offset in bytes, `layout` the shape and the
/// strides in elements, `dtype` code and bits, `flags` whether it is of version 1, read-only, and a copy.
#[pyfunction]
#[pyo3(signature = (owner, place, layout, dtype, device, flags, /))]
pub(in crate::python) fn usm_dlpack<'py>(
    py: Python<'py>,
    owner: Py<PyAny>,
    place: (usize, u64),
    layout: (Vec<i64>, Vec<i64>),
    dtype: (u8, u8),
    device: (i32, i32),
    flags: (bool, bool, bool),
) -> PyResult<Bound<'py, PyAny>> {
    let ((address, offset_bytes), (shape, strides)) = (place, layout);
    let (is_versioned, is_readonly, is_copied) = flags;
    if shape.len() != strides.len() {
        return Err(PyValueError::new_err("as many strides as there are axes"));
    }
    if is_readonly && !is_versioned {
        return Err(PyBufferError::new_err(
            "the array is read-only, which DLPack says from version 1.0 on; ask with max_version=(1, 0)",
        ));
    }
    let mut exported = Box::new(Exported { owner: Some(owner), shape: shape.into(), strides: strides.into() });
    let tensor = Tensor {
        data: std::ptr::with_exposed_provenance_mut(address),
        device_type: device.0,
        device_id: device.1,
        axes: exported.shape.len() as i32,
        code: dtype.0,
        bits: dtype.1,
        lanes: 1,
        shape: exported.shape.as_mut_ptr(),
        strides: exported.strides.as_mut_ptr(),
        offset_bytes,
    };
    let context = Box::into_raw(exported).cast();
    let flags = if is_readonly { READ_ONLY } else { 0 } | if is_copied { IS_COPIED } else { 0 };
    let (pointer, name): (*mut c_void, _) = if is_versioned {
        let deleter = Some(delete_versioned as unsafe extern "C" fn(*mut Versioned));
        (Box::into_raw(Box::new(Versioned { major: 1, minor: 0, context, deleter, flags, tensor })).cast(), VERSIONED.0)
    } else {
        let deleter = Some(delete_plain as unsafe extern "C" fn(*mut Managed));
        (Box::into_raw(Box::new(Managed { tensor, context, deleter })).cast(), PLAIN.0)
    };
    // SAFETY: not NULL, a static name, and a destructor that fits both names.
    let capsule = unsafe { ffi::PyCapsule_New(pointer, name.as_ptr(), Some(end_of_capsule)) };
    // SAFETY: a new reference, or NULL with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

/// What was consumed: keeps the producer's tensor until it goes.
#[pyclass(frozen, weakref, name = "DlpackOwner", module = "ctxalloc._native")]
pub(in crate::python) struct DlpackOwner {
    tensor: *mut c_void,
    is_versioned: bool,
}

// SAFETY: a tensor may be deleted on any thread; nobody else has it.
unsafe impl Send for DlpackOwner {}
// SAFETY: nothing can be done with it but dropping it.
unsafe impl Sync for DlpackOwner {}

impl Drop for DlpackOwner {
    fn drop(&mut self) {
        if self.is_versioned {
            let tensor = self.tensor.cast::<Versioned>();
            // SAFETY: consumed, and so ours alone.
            if let Some(deleter) = unsafe { (*tensor).deleter } {
                // SAFETY: DLPack's rule: called once, by the consumer.
                unsafe { deleter(tensor) };
            }
        } else {
            let tensor = self.tensor.cast::<Managed>();
            // SAFETY: as above.
            if let Some(deleter) = unsafe { (*tensor).deleter } {
                // SAFETY: as above.
                unsafe { deleter(tensor) };
            }
        }
    }
}

/// Address, shape, strides in elements (or None), dtype (code, bits, lanes), device, whether it is read-only, the owner.
type Consumed = (usize, Vec<i64>, Option<Vec<i64>>, (u8, u8, u16), (i32, i32), bool, Py<DlpackOwner>);

/// Consumes a capsule.
#[pyfunction]
#[pyo3(signature = (capsule, /))]
pub(in crate::python) fn usm_from_dlpack(capsule: &Bound<'_, PyAny>) -> PyResult<Consumed> {
    let py = capsule.py();
    // SAFETY: any object may be asked.
    let has = |name: &CStr| unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) } != 0;
    let (names, is_versioned) = if has(VERSIONED.0) {
        (VERSIONED, true)
    } else if has(PLAIN.0) {
        (PLAIN, false)
    } else {
        return Err(PyValueError::new_err(format!(
            "{} is no capsule 'dltensor' or 'dltensor_versioned', or was consumed already; call __dlpack__() again",
            capsule.repr()?
        )));
    };
    // SAFETY: a valid capsule of this name.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), names.0.as_ptr()) };
    let (tensor, is_readonly): (&Tensor, bool) = if is_versioned {
        // SAFETY: a capsule of this name has such a tensor.
        let versioned = unsafe { &*pointer.cast::<Versioned>() };
        if versioned.major > 1 {
            return Err(PyBufferError::new_err(format!(
                "DLPack {}.{} is not known here; ask the producer with max_version=(1, 0)",
                versioned.major, versioned.minor
            )));
        }
        (&versioned.tensor, versioned.flags & READ_ONLY != 0)
    } else {
        // SAFETY: as above.
        (unsafe { &(*pointer.cast::<Managed>()).tensor }, false)
    };
    let axes = usize::try_from(tensor.axes).ok().filter(|&axes| axes <= MAX_AXES).ok_or_else(|| {
        PyBufferError::new_err(format!(
            "the DLPack tensor's ndim is {}; it must be from 0 to {MAX_AXES}: reshape it at its producer",
            tensor.axes
        ))
    })?;
    let numbers = |start: *const i64| -> Option<Vec<i64>> {
        if axes == 0 {
            return Some(Vec::new());
        }
        // SAFETY: not NULL, so as many as `ndim` says (dlpack.h); no more than `MAX_AXES`, as just seen.
        (!start.is_null()).then(|| unsafe { std::slice::from_raw_parts(start, axes) }.to_vec())
    };
    let shape = numbers(tensor.shape).filter(|shape| shape.iter().all(|&length| length >= 0)).ok_or_else(|| {
        match numbers(tensor.shape) {
            Some(shape) => {
                PyBufferError::new_err(format!("the DLPack tensor's shape is {shape:?}; it must be lengths from 0 up"))
            }
            None => {
                PyBufferError::new_err("the DLPack tensor's shape is NULL; it must be as many lengths as ndim says")
            }
        }
    })?;
    let address = usize::try_from(tensor.offset_bytes)
        .ok()
        .and_then(|offset| tensor.data.expose_provenance().checked_add(offset))
        .ok_or_else(|| {
            PyBufferError::new_err(format!(
                "the DLPack tensor's byte_offset is {}; it must lead from data={:?} to memory",
                tensor.offset_bytes, tensor.data
            ))
        })?;
    let strides = numbers(tensor.strides);
    let dtype = (tensor.code, tensor.bits, tensor.lanes);
    let device = (tensor.device_type, tensor.device_id);
    // From here on it is ours.
    // SAFETY: a capsule, and a static name.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), names.1.as_ptr()) } != 0 {
        return Err(PyErr::fetch(py));
    }
    let owner = Py::new(py, DlpackOwner { tensor: pointer, is_versioned })?;
    Ok((address, shape, strides, dtype, device, is_readonly, owner))
}

const _: () = assert!(size_of::<Tensor>() == 48 && size_of::<Managed>() == 64 && size_of::<Versioned>() == 80);
