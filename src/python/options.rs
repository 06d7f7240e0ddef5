//! Arguments that users give by keyword: each is read as the type it must have, or refused with a message that says
//! which argument it is, what it was, and what to give instead.

use super::asked::asked;
use super::text::repr_of;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt};
use std::fmt;
use std::time::Duration;

/// An argument of `function` as `read` reads it; None if it was not given. `expected` completes the sentence "give
/// ...", and is only formatted where that is said.
///
/// # Errors
/// TypeError where `read` raises one; else ValueError, also for the OverflowError of an int that is out of range. What
/// is no `Exception` passes.
#[inline(always)]
pub(super) fn argument<'py, T>(
    function: &str,
    name: &str,
    given: Option<&Bound<'py, PyAny>>,
    expected: impl fmt::Display,
    read: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Option<T>> {
    // Most are not given, and a call with what says so is not worth its while.
    given.map(|value| one_given(function, name, value, expected, read)).transpose()
}

#[inline(never)]
fn one_given<'py, T>(
    function: &str,
    name: &str,
    value: &Bound<'py, PyAny>,
    expected: impl fmt::Display,
    read: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<T> {
    let error = match asked(value.py(), read(value))? {
        Ok(read) => return Ok(read),
        Err(error) => error,
    };
    let message = format!("{function}({name}={}): give {expected}", repr_of(value)?);
    let is_wrong_type = error.is_instance_of::<PyTypeError>(value.py());
    Err(if is_wrong_type { PyTypeError::new_err(message) } else { PyValueError::new_err(message) })
}

/// A number of bytes as most give it: an int itself, which fits. Anything else is left to [`argument`], which is
/// slower.
#[inline]
pub(super) fn plain_bytes(given: Option<&Bound<'_, PyAny>>) -> Option<usize> {
    given?.cast_exact::<PyInt>().ok()?.extract().ok().filter(|&bytes| bytes != usize::MAX)
}

/// A time in seconds as most give it, likewise.
#[inline]
pub(super) fn plain_seconds(given: Option<&Bound<'_, PyAny>>) -> Option<Duration> {
    crate::settings::seconds(given?.cast_exact::<PyFloat>().ok()?.value())
}

/// Refuses True and False where a number is expected: they count as 1 and 0, and were most often meant for another
/// argument.
pub(super) fn no_bool<'a, 'py>(value: &'a Bound<'py, PyAny>) -> PyResult<&'a Bound<'py, PyAny>> {
    if value.is_exact_instance_of::<PyBool>() { Err(PyTypeError::new_err(())) } else { Ok(value) }
}

/// The keyword arguments of one call. A value of None counts as not given.
pub(super) struct Options<'a, 'py> {
    function: &'a str,
    given: Option<&'a Bound<'py, PyDict>>,
}

impl<'a, 'py> Options<'a, 'py> {
    /// `function` is the name that messages have.
    pub(super) fn new(function: &'a str, given: Option<&'a Bound<'py, PyDict>>) -> Self {
        Self { function, given }
    }

    pub(super) fn function(&self) -> &'a str {
        self.function
    }

    /// An option as it was given.
    pub(super) fn given(&self, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        let value = self.given.map(|given| given.get_item(name)).transpose()?.flatten();
        Ok(value.filter(|value| !value.is_none()))
    }

    /// An option as `read` reads it: see [`argument`].
    pub(super) fn maybe<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<T>,
    ) -> PyResult<Option<T>> {
        argument(self.function, name, self.given(name)?.as_ref(), expected, read)
    }

    /// A size in bytes that must be given.
    pub(super) fn size(&self, name: &str) -> PyResult<usize> {
        self.maybe_size(name)?
            .ok_or_else(|| PyTypeError::new_err(format!("{}() needs {name}=, a number of bytes", self.function)))
    }

    /// A size in bytes: an int from 0 up.
    pub(super) fn maybe_size(&self, name: &str) -> PyResult<Option<usize>> {
        let expected = format!("a number of bytes, an int from 0 to 2**{} - 1", usize::BITS);
        self.maybe(name, &expected, |value| no_bool(value)?.extract())
    }

    /// How many bytes a pool keeps.
    pub(super) fn maybe_warm_bytes(&self) -> PyResult<Option<usize>> {
        self.maybe("warm_bytes", "a number of bytes, an int from 0 up", |value| no_bool(value)?.extract())
    }

    /// A time in seconds: a number from 0 up.
    pub(super) fn maybe_seconds(&self, name: &str) -> PyResult<Option<Duration>> {
        self.maybe(name, "a time in seconds, a number from 0 up", |value| {
            crate::settings::seconds(no_bool(value)?.extract()?).ok_or_else(|| PyValueError::new_err(()))
        })
    }

    /// A count: an int from 0 up.
    pub(super) fn maybe_count(&self, name: &str) -> PyResult<Option<u64>> {
        self.maybe(name, "a count, an int from 0 to 2**64 - 1", |value| no_bool(value)?.extract())
    }

    /// Any number.
    pub(super) fn maybe_number(&self, name: &str) -> PyResult<Option<f64>> {
        self.maybe(name, "a number", |value| no_bool(value)?.extract())
    }

    /// True or False, and nothing that only counts as one of them.
    pub(super) fn maybe_flag(&self, name: &str) -> PyResult<Option<bool>> {
        self.maybe(name, "True or False", |value| value.extract())
    }

    /// The error where exactly one of two options must be given: both were, or neither.
    pub(super) fn not_one_of(&self, [one, other]: [&str; 2], both: bool) -> PyErr {
        let function = self.function;
        PyTypeError::new_err(match both {
            true => format!("{function}() takes either {one} or {other}, and was given both; leave one out"),
            false => format!("{function}() needs either {one} or {other}; give one of them"),
        })
    }
}
