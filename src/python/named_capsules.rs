//! Capsules of one name, which are looked into without a call: who is selected is asked for each large block, and
//! CPython's two functions compare the texts. Where CPython has a capsule's words is tried; else its functions are
//! called.
#![allow(unsafe_code, reason = "CPython's structs")]

use super::capsule;
use super::own_context::{TYPE, word};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{CStr, c_void};
use std::ptr::{NonNull, null_mut};

/// Where they are, in words: the same in 3.11 to 3.14.
const POINTER: usize = 2;
const NAME: usize = 3;

/// A name. A capsule whose name is the same text at another address is looked into by CPython.
#[derive(Debug)]
pub(super) struct Named {
    name: &'static CStr,
    /// Whether a trial capsule had its words there.
    is_known: bool,
}

impl Named {
    pub(super) fn tried(py: Python<'_>, name: &'static CStr) -> PyResult<Self> {
        static POINTED_TO: u8 = 0;
        let pointer = (&raw const POINTED_TO).cast();
        let trial = capsule::new(py, pointer, name)?;
        let size_bytes: usize = trial.get_type().getattr("__basicsize__")?.extract()?;
        let has = |at, value: *const c_void| {
            // SAFETY: the object lives, and has so many words.
            size_bytes > at * size_of::<usize>() && unsafe { word(trial.as_ptr().cast(), at) } == value
        };
        let is_known = has(TYPE, capsule_type()) && has(POINTER, pointer) && has(NAME, name.as_ptr().cast());
        Ok(Self { name, is_known })
    }

    /// The pointer in `object` if that is a capsule with this name; None for any other object. Needs no GIL.
    ///
    /// # Safety
    /// - `object` lives, and nobody changes it meanwhile.
    #[inline]
    pub(super) unsafe fn pointer_in(&self, object: *mut ffi::PyObject) -> Option<NonNull<c_void>> {
        let name = self.name.as_ptr();
        let words = object.cast::<c_void>();
        // SAFETY: the object lives (this function's contract). What has the type of capsules has their words where the
        // trial had them. Both functions look into it only where it is a valid capsule of this name.
        unsafe {
            if self.is_known && word(words, TYPE) == capsule_type() && word(words, NAME) == name.cast() {
                return NonNull::new(word(words, POINTER).cast_mut());
            }
            let is_valid = ffi::PyCapsule_IsValid(object, name) == 1;
            NonNull::new(if is_valid { ffi::PyCapsule_GetPointer(object, name) } else { null_mut() })
        }
    }
}

fn capsule_type() -> *const c_void {
    (&raw const ffi::PyCapsule_Type).cast()
}
