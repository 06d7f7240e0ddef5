//! Tells Python of each request's end, in the Context of the end: for exemplars, which name the span that runs there.

use crate::handler::requests::Begun;
use crate::python::imported::Imported;
use crate::python::interned::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether anybody asked. It orders nothing.
static IS_ASKED: AtomicBool = AtomicBool::new(false);

/// Begins or ends it.
#[pyfunction]
#[pyo3(name = "_note_ends", signature = (is_asked, /))]
pub(in crate::python) fn note_ends(is_asked: bool) {
    IS_ASKED.store(is_asked, Ordering::Relaxed);
}

/// A request that has ended: its name, its peak, whether it was refused memory.
pub(super) struct Ended(Option<String>, usize, bool);

/// What is told of it; nothing where nobody asked.
#[inline]
pub(super) fn of(begun: &Begun) -> Option<Ended> {
    (IS_ASKED.load(Ordering::Relaxed) && !begun.is_uncounted()).then(|| {
        let stats = begun.stats();
        Ended(begun.given_name().map(str::to_owned), stats.peak_bytes, begun.was_refused())
    })
}

/// Tells it.
///
/// # Errors
/// `note` has none of its own: what a signal's handler raised in it.
#[inline]
pub(super) fn tell(py: Python<'_>, ended: Option<Ended>) -> PyResult<()> {
    static NOTE: Imported = Imported::new("ctxalloc._exemplars", "note");
    let Some(Ended(name, peak_bytes, is_refused)) = ended else { return Ok(()) };
    let note = NOTE.get(py)?;
    let options = PyDict::new(py);
    options.set_item(intern!(py, "is_refused"), is_refused)?;
    note.call((name, peak_bytes), Some(&options))?;
    Ok(())
}
