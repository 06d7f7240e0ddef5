//! `UsmMemory`: a block of USM for an array that is not NumPy's. Until it is freed it is charged to the request that it
//! is made in, so the limits of the request and its budgets apply to it.
#![allow(unsafe_code, reason = "an address for Python")]

use super::queue::PyQueue;
use crate::handler::UsmBlock;
use crate::python::bridge;
use crate::request::{ExternalCharge, charge_current};
use pyo3::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A block of USM, which is freed with this object.
#[pyclass(frozen, weakref, name = "UsmMemory", module = "ctxalloc._native")]
pub(in crate::python) struct PyMemory {
    block: UsmBlock,
    /// Given back after the block is freed: fields are dropped in this order.
    _charge: Option<ExternalCharge>,
}

static LIVE: AtomicUsize = AtomicUsize::new(0);

impl Drop for PyMemory {
    fn drop(&mut self) {
        LIVE.fetch_sub(1, Ordering::Relaxed);
    }
}

#[pymethods]
impl PyMemory {
    /// Allocates `size_bytes` of a kind on a queue; 0 becomes 1, as an array without elements has an address too. The
    /// running context's request is charged, unless `charged` is false, as for memory that exists only while a copy
    /// runs.
    #[new]
    #[pyo3(signature = (queue, kind, size_bytes, /, *, zeroed, charged=true))]
    fn new(
        py: Python<'_>,
        queue: &Bound<'_, PyQueue>,
        kind: &str,
        size_bytes: usize,
        zeroed: bool,
        charged: bool,
    ) -> PyResult<Self> {
        let (queue, kind, size_bytes) = (queue.get(), super::queue::kind_named(kind)?, size_bytes.max(1));
        let charge = if charged { bridge::scope(py, || charge_current(size_bytes))?? } else { None };
        let block = py.detach(|| UsmBlock::new(queue.queue(), queue.block_pool(kind)?, kind, size_bytes, zeroed))?;
        LIVE.fetch_add(1, Ordering::Relaxed);
        Ok(Self { block, _charge: charge })
    }

    /// How many blocks there are in this process.
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
