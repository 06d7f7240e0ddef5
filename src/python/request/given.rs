//! A name as `request()` was given it: the Python object, until the request begins. A reference to it costs less than
//! an atomic count, and the account that keeps the text has the only one.
#![allow(unsafe_code, reason = "the text of a str beside the str")]

use pyo3::prelude::*;
use pyo3::types::PyString;
use std::ops::Deref;
use std::sync::Arc;

/// The name of a request.
pub(super) enum Name {
    Text(Arc<str>),
    /// The text is the object's.
    Object(Py<PyString>, &'static str),
}

impl Name {
    /// `None` where the text is not UTF-8.
    #[inline]
    pub(super) fn of(object: &Bound<'_, PyString>) -> Option<Self> {
        let text: *const str = object.to_str().ok()?;
        // SAFETY: a str never changes, and keeps its UTF-8 until it goes; the reference to it goes after this.
        Some(Self::Object(object.clone().unbind(), unsafe { &*text }))
    }

    pub(super) fn clone_ref(&self, py: Python<'_>) -> Self {
        match self {
            Self::Text(text) => Self::Text(Arc::clone(text)),
            Self::Object(object, text) => Self::Object(object.clone_ref(py), text),
        }
    }

    /// For the account that keeps it.
    #[inline]
    pub(super) fn shared(&self) -> Arc<str> {
        match self {
            Self::Text(text) => Arc::clone(text),
            Self::Object(_, text) => Arc::from(*text),
        }
    }
}

impl From<Arc<str>> for Name {
    fn from(text: Arc<str>) -> Self {
        Self::Text(text)
    }
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Object(_, text) => text,
        }
    }
}
