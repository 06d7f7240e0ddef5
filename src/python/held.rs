//! Where a scope keeps the token of `Selection::set` while it is entered.
//!
//! No lock: entering and leaving happen at every request, and a thread that waited here would hold the interpreter.
//! Whoever wins the one exchange of `begin` or `take` is alone with the scope until `put` or `clear`.
#![allow(unsafe_code, reason = "an owned reference in an atomic")]

use pyo3::ffi;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use std::mem::ManuallyDrop;
use std::ptr::{dangling_mut, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Room for one token: the reference is ours while it lies here.
pub(super) struct Held(AtomicPtr<ffi::PyObject>);

/// Nothing here: the scope is not entered.
const LEFT: *mut ffi::PyObject = null_mut();
/// Another thread, or a finalizer in between, is entering or leaving the scope. No object has this address.
const CHANGING: *mut ffi::PyObject = dangling_mut();

impl Held {
    pub(super) fn new() -> Self {
        Self(AtomicPtr::new(LEFT))
    }

    /// Whether the caller may enter; then it calls [`put`](Self::put) or [`clear`](Self::clear).
    #[inline]
    pub(super) fn begin(&self) -> bool {
        // Acquire pairs with the Release in `clear`: entered after it was left.
        self.0.compare_exchange(LEFT, CHANGING, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// The token, for the one that may leave, which then calls [`put`](Self::put) or [`clear`](Self::clear).
    #[inline]
    pub(super) fn take<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        let token = self.token()?;
        // Acquire pairs with the Release in `put`. Where the token at this address is a later one it is taken as well.
        self.0.compare_exchange(token, CHANGING, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // SAFETY: `put` laid this reference down, and only we took it.
        Some(unsafe { Bound::from_owned_ptr(py, token) })
    }

    /// Keeps the token: the scope is entered.
    #[inline]
    pub(super) fn put(&self, token: Bound<'_, PyAny>) {
        self.0.store(token.into_ptr(), Ordering::Release);
    }

    /// The scope is not entered any more, or not after all.
    #[inline]
    pub(super) fn clear(&self) {
        self.0.store(LEFT, Ordering::Release);
    }

    /// Whether the scope is entered, or about to be.
    pub(super) fn is_in_use(&self) -> bool {
        self.0.load(Ordering::Relaxed) != LEFT
    }

    /// For the collector: a token refers to its Context, which may hold whoever holds this.
    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Some(token) = self.token() else { return Ok(()) };
        // SAFETY: the collector runs in an attached thread.
        let py = unsafe { Python::assume_attached() };
        // SAFETY: the reference that `put` laid down, looked at and not dropped.
        let token = ManuallyDrop::new(unsafe { Bound::from_owned_ptr(py, token) }.unbind());
        visit.call(&*token)
    }

    /// What lies here, if it is a token, without its reference.
    #[inline]
    pub(super) fn token(&self) -> Option<*mut ffi::PyObject> {
        let token = self.0.load(Ordering::Relaxed);
        (token != LEFT && token != CHANGING).then_some(token)
    }
}

impl Drop for Held {
    /// Attached to Python: only the object around it drops this.
    fn drop(&mut self) {
        if let Some(token) = self.token() {
            // SAFETY: the reference that `put` laid down.
            unsafe { ffi::Py_DECREF(token) };
        }
    }
}
