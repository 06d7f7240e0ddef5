//! `UsmMemory`: a block of USM, for arrays that are not NumPy's.
#![allow(unsafe_code, reason = "an address for Python")]

use super::queue::PyQueue;
use crate::handler::{UsmBlock, UsmPool};
use pyo3::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A block, freed with this object.
#[pyclass(frozen, weakref, name = "UsmMemory", module = "ctxalloc._native")]
pub(in crate::python) struct PyMemory {
    block: UsmBlock,
}

static LIVE: AtomicUsize = AtomicUsize::new(0);

impl Drop for PyMemory {
    fn drop(&mut self) {
        LIVE.fetch_sub(1, Ordering::Relaxed);
    }
}

#[pymethods]
impl PyMemory {
    /// `size_bytes` of a kind on a queue, which are at least one: an array without elements has an address too.
    #[new]
    #[pyo3(signature = (queue, kind, size_bytes, /, *, zeroed))]
    fn new(py: Python<'_>, queue: &Bound<'_, PyQueue>, kind: &str, size_bytes: usize, zeroed: bool) -> PyResult<Self> {
        let (queue, kind) = (queue.get(), super::queue::kind_named(kind)?);
        let block = py.detach(|| {
            if queue.is_kept() {
                UsmPool::of(queue.queue(), kind)?; // which the block is from
            }
            UsmBlock::new(queue.queue(), kind, size_bytes, zeroed)
        })?;
        LIVE.fetch_add(1, Ordering::Relaxed);
        Ok(Self { block })
    }

    /// How many there are in this process.
    #[staticmethod]
    fn live() -> usize {
        LIVE.load(Ordering::Relaxed)
    }

    #[getter]
    fn address(&self) -> usize {
        self.block.as_ptr().expose_provenance()
    }

    #[getter]
    fn size_bytes(&self) -> usize {
        self.block.size_bytes()
    }
}
