//! DLPack in both directions: tensors in capsules, without a version and of version 1 (dlpack.h).
//!
//! A consumer renames the capsule, and calls the tensor's deleter when it is done with it. The destructor of a capsule
//! that nobody consumed calls it instead.
#![allow(unsafe_code, reason = "DLPack is C's")]

use crate::python::capsule::pointer_in;
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

/// As many axes as an array of NumPy may have.
const MAX_AXES: usize = 64;

const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;
const PLAIN: (&CStr, &CStr) = (c"dltensor", c"used_dltensor");
const VERSIONED: (&CStr, &CStr) = (c"dltensor_versioned", c"used_dltensor_versioned");

/// What the context of a tensor of ours points to.
struct Exported {
    owner: Option<Py<PyAny>>,
    shape: Box<[i64]>,
    strides: Box<[i64]>,
}

impl Drop for Exported {
    /// May run on any thread, attached to Python or not.
    fn drop(&mut self) {
        let mut owner = self.owner.take();
        if exit::try_attach(|_| drop(owner.take())).is_none() {
            std::mem::forget(owner); // Python is gone, so nobody can release it
        }
    }
}

/// The deleter of a tensor without a version.
///
/// # Safety
/// - `usm_dlpack` made the tensor; nobody uses it afterwards, or calls its deleter a second time (DLPack's rule).
unsafe extern "C" fn delete_plain(tensor: *mut Managed) {
    // SAFETY: `usm_dlpack` took both pointers from boxes of these types, and they are freed once, by contract.
    unsafe {
        let tensor = Box::from_raw(tensor);
        drop(Box::from_raw(tensor.context.cast::<Exported>()));
    }
}

/// The deleter of a tensor of version 1.
///
/// # Safety
/// - As for `delete_plain`.
unsafe extern "C" fn delete_versioned(tensor: *mut Versioned) {
    // SAFETY: `usm_dlpack` took both pointers from boxes of these types, and they are freed once, by contract.
    unsafe {
        let tensor = Box::from_raw(tensor);
        drop(Box::from_raw(tensor.context.cast::<Exported>()));
    }
}

/// The destructor of our capsules: it deletes the tensor unless a consumer renamed the capsule.
///
/// # Safety
/// - attached; `capsule` is one that `usm_dlpack` made, without references.
unsafe extern "C" fn end_of_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: `usm_dlpack` gave each of the two names to capsules around a tensor of its type alone. A capsule that
    // still has it was not consumed, so the tensor is ours to delete, once.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, PLAIN.0.as_ptr()) != 0 {
            delete_plain(ffi::PyCapsule_GetPointer(capsule, PLAIN.0.as_ptr()).cast());
        } else if ffi::PyCapsule_IsValid(capsule, VERSIONED.0.as_ptr()) != 0 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.0.as_ptr()).cast());
        }
    }
}

/// A capsule with a tensor, which keeps `owner` alive.
///
/// `place` is an address and an offset in bytes; `layout`, the shape and the strides in elements; `dtype`, DLPack's
/// type code and the bits of an element; `device`, DLPack's device type and number; `flags`, whether the tensor is of
/// version 1, is read-only, and is a copy. BufferError: read-only without a version, which cannot say so.
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
        return Err(PyValueError::new_err("the shape and the strides have different lengths"));
    }
    if is_readonly && !is_versioned {
        return Err(PyBufferError::new_err(
            "the array is read-only, which only DLPack 1.0 and later can say; ask with max_version=(1, 0)",
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
    // SAFETY: attached; the pointer is not NULL and fits the name, which is static, and the destructor knows both
    // names. The capsule is a new reference, or NULL with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(pointer, name.as_ptr(), Some(end_of_capsule))) }
}

/// Owns a tensor that was consumed: its producer may free the memory when this is dropped.
#[pyclass(frozen, weakref, name = "DlpackOwner", module = "ctxalloc._native")]
pub(in crate::python) struct DlpackOwner {
    tensor: *mut c_void,
    is_versioned: bool,
}

// SAFETY: it alone owns the tensor, which may be deleted on any thread (DLPack's rule).
unsafe impl Send for DlpackOwner {}
// SAFETY: it has no method that takes a shared reference, so sharing it gives no access to the tensor.
unsafe impl Sync for DlpackOwner {}

impl Drop for DlpackOwner {
    fn drop(&mut self) {
        // SAFETY: `usm_from_dlpack` consumed the tensor, which is of the type that `is_versioned` says. The consumer
        // calls the deleter, if there is one, and nobody else does (DLPack's rule).
        unsafe {
            if self.is_versioned {
                let tensor = self.tensor.cast::<Versioned>();
                if let Some(deleter) = (*tensor).deleter {
                    deleter(tensor);
                }
            } else {
                let tensor = self.tensor.cast::<Managed>();
                if let Some(deleter) = (*tensor).deleter {
                    deleter(tensor);
                }
            }
        }
    }
}

/// Address, shape, strides in elements (or None), dtype (code, bits, lanes), device, whether it is read-only, the
/// owner.
type Consumed = (usize, Vec<i64>, Option<Vec<i64>>, (u8, u8, u16), (i32, i32), bool, Py<DlpackOwner>);

/// Consumes a capsule, and says what its tensor describes.
///
/// ValueError: not a capsule of DLPack's, or consumed already. BufferError: a version that is not known, or a tensor
/// that describes no memory.
#[pyfunction]
#[pyo3(signature = (capsule, /))]
pub(in crate::python) fn usm_from_dlpack(capsule: &Bound<'_, PyAny>) -> PyResult<Consumed> {
    let py = capsule.py();
    let (pointer, names, is_versioned) = if let Some(pointer) = pointer_in(capsule, VERSIONED.0) {
        (pointer.as_ptr(), VERSIONED, true)
    } else if let Some(pointer) = pointer_in(capsule, PLAIN.0) {
        (pointer.as_ptr(), PLAIN, false)
    } else {
        return Err(PyValueError::new_err(format!(
            "{} is no capsule 'dltensor' or 'dltensor_versioned', or was consumed already; call __dlpack__() again",
            capsule.repr()?
        )));
    };
    let (tensor, is_readonly): (&Tensor, bool) = if is_versioned {
        // SAFETY: a capsule of this name has a tensor of version 1 or later, which lives until it is deleted.
        let versioned = unsafe { &*pointer.cast::<Versioned>() };
        if versioned.major > 1 {
            return Err(PyBufferError::new_err(format!(
                "DLPack {}.{} is not known here; ask the producer with max_version=(1, 0)",
                versioned.major, versioned.minor
            )));
        }
        (&versioned.tensor, versioned.flags & READ_ONLY != 0)
    } else {
        // SAFETY: a capsule of this name has a tensor without a version, which lives until it is deleted.
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
        // SAFETY: a pointer that is not NULL leads to `ndim` numbers (dlpack.h), which are `axes`, at most `MAX_AXES`.
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
    // SAFETY: `pointer_in` accepted the capsule, and the name is static. From here on the tensor is ours.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), names.1.as_ptr()) } != 0 {
        return Err(PyErr::fetch(py));
    }
    let owner = Py::new(py, DlpackOwner { tensor: pointer, is_versioned })?;
    Ok((address, shape, strides, dtype, device, is_readonly, owner))
}

const _: () = assert!(size_of::<Tensor>() == 48 && size_of::<Managed>() == 64 && size_of::<Versioned>() == 80);
