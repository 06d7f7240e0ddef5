//! Where a scope keeps the token of `Selection::set` from entering to leaving.
//!
//! There is no lock: scopes are entered and left at every request, and a thread that waited here would wait with the
//! GIL. Instead, whoever wins the exchange in `begin` or `take` is alone with the scope until it calls `put` or
//! `clear`.
#![allow(unsafe_code, reason = "an owned reference in an atomic")]

use pyo3::ffi;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use std::mem::ManuallyDrop;
use std::ptr::{dangling_mut, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Holds one token, and owns the reference to it; or is in one of the two states below.
pub(super) struct TokenCell(AtomicPtr<ffi::PyObject>);

/// The scope is not entered. Set when the cell is made, and by `clear`.
const LEFT: *mut ffi::PyObject = null_mut();
/// Somebody is entering or leaving the scope: another thread, or a finalizer that runs in the middle of it. Set by
/// `begin` and `take`, replaced by `put` and `clear`. No object has this address.
const CHANGING: *mut ffi::PyObject = dangling_mut();

impl TokenCell {
    pub(super) fn new() -> Self {
        Self(AtomicPtr::new(LEFT))
    }

    /// Whether the caller may enter the scope; it must then call [`put`](Self::put) or [`clear`](Self::clear).
    #[inline]
    pub(super) fn begin(&self) -> bool {
        // Acquire pairs with the Release in `clear`: what the last scope did comes before what this one does.
        self.0.compare_exchange(LEFT, CHANGING, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// The token, if the caller may leave the scope; it must then call [`put`](Self::put) or [`clear`](Self::clear).
    #[inline]
    pub(super) fn take<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        let token = self.token()?;
        // Acquire pairs with the Release in `put`. If another token got the same address since `token()`, the exchange
        // takes that one, which is as good.
        self.0.compare_exchange(token, CHANGING, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // SAFETY: `put` gave this cell the reference, and the exchange made us its only owner.
        Some(unsafe { Bound::from_owned_ptr(py, token) })
    }

    /// Keeps the token: the scope is entered.
    #[inline]
    pub(super) fn put(&self, token: Bound<'_, PyAny>) {
        self.0.store(token.into_ptr(), Ordering::Release);
    }

    /// Marks the scope as not entered: it was left, or entering it failed.
    #[inline]
    pub(super) fn clear(&self) {
        self.0.store(LEFT, Ordering::Release);
    }

    /// Whether the scope is entered, or being entered or left.
    pub(super) fn is_in_use(&self) -> bool {
        self.0.load(Ordering::Relaxed) != LEFT
    }

    /// For the garbage collector: a token refers to its Context, which may refer to the owner of this cell.
    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Some(token) = self.token() else { return Ok(()) };
        // SAFETY: the collector runs in an attached thread, so no other thread takes the token meanwhile. The reference
        // stays the cell's: `ManuallyDrop` keeps us from dropping it.
        let token = ManuallyDrop::new(unsafe { Bound::from_owned_ptr(Python::assume_attached(), token) }.unbind());
        visit.call(&*token)
    }

    /// The token, without a reference to it; None in the other two states.
    #[inline]
    pub(super) fn token(&self) -> Option<*mut ffi::PyObject> {
        let token = self.0.load(Ordering::Relaxed);
        (token != LEFT && token != CHANGING).then_some(token)
    }
}

impl Drop for TokenCell {
    /// Runs attached to Python, as only the deallocation of a Python object drops a cell.
    fn drop(&mut self) {
        if let Some(token) = self.token() {
            // SAFETY: the reference that `put` gave this cell, whose only user is this function.
            unsafe { ffi::Py_DECREF(token) };
        }
    }
}
