//! `UsmMemory`: a block of a handler, for arrays that are not NumPy's. Bytes get in and out by the handler's copies.
#![allow(unsafe_code, reason = "copies by address")]

use crate::memory::DeviceBuffer;
use crate::python::handler::PyHandler;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A block, freed with this object.
#[pyclass(frozen, weakref, name = "UsmMemory", module = "ctxalloc._native")]
pub(in crate::python) struct PyMemory {
    buffer: DeviceBuffer,
}

static LIVE: AtomicUsize = AtomicUsize::new(0);

impl Drop for PyMemory {
    fn drop(&mut self) {
        LIVE.fetch_sub(1, Ordering::Relaxed);
    }
}

impl PyMemory {
    /// The address of a part of it.
    fn part(&self, offset: usize, size_bytes: usize) -> PyResult<NonNull<u8>> {
        if offset.checked_add(size_bytes).is_none_or(|end| end > self.buffer.len()) {
            return Err(PyValueError::new_err(format!(
                "{size_bytes} bytes from byte {offset} on are not in a block of {} bytes",
                self.buffer.len()
            )));
        }
        let start = NonNull::new(self.buffer.as_ptr().cast_mut()).expect("blocks are not NULL");
        // SAFETY: inside of the block.
        Ok(unsafe { start.add(offset) })
    }
}

#[pymethods]
impl PyMemory {
    /// `size_bytes` from a handler, which are at least one: an array without elements has an address too.
    #[new]
    #[pyo3(signature = (handler, size_bytes, /, *, zeroed))]
    fn new(py: Python<'_>, handler: &Bound<'_, PyHandler>, size_bytes: usize, zeroed: bool) -> PyResult<Self> {
        let handler = handler.get().handler();
        let buffer = py.detach(|| match zeroed {
            true => DeviceBuffer::zeroed_in(handler, size_bytes.max(1)),
            false => DeviceBuffer::uninitialised(handler, size_bytes.max(1)),
        })?;
        LIVE.fetch_add(1, Ordering::Relaxed);
        Ok(Self { buffer })
    }

    /// How many there are in this process.
    #[staticmethod]
    fn live() -> usize {
        LIVE.load(Ordering::Relaxed)
    }

    #[getter]
    fn address(&self) -> usize {
        self.buffer.as_ptr().expose_provenance()
    }

    #[getter]
    fn size_bytes(&self) -> usize {
        self.buffer.len()
    }

    #[getter]
    fn handler<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyHandler>> {
        PyHandler::of(py, self.buffer.handler())
    }

    /// host2obj: the caller holds what is at `from`.
    fn copy_in(&self, py: Python<'_>, offset: usize, from_: usize, size_bytes: usize) -> PyResult<()> {
        let (to, handler) = (self.part(offset, size_bytes)?.as_ptr().expose_provenance(), self.buffer.handler());
        py.detach(|| {
            let to = NonNull::new(std::ptr::with_exposed_provenance_mut(to)).expect("blocks are not NULL");
            // SAFETY: a part of a live block of this handler; as many bytes of the host, which the caller holds.
            unsafe { handler.copy_in(to, std::ptr::with_exposed_provenance(from_), size_bytes) }
        })?;
        Ok(())
    }

    /// obj2host: the caller holds what is at `to`.
    fn copy_out(&self, py: Python<'_>, offset: usize, to: usize, size_bytes: usize) -> PyResult<()> {
        let (from, handler) = (self.part(offset, size_bytes)?.as_ptr().expose_provenance(), self.buffer.handler());
        py.detach(|| {
            let from = NonNull::new(std::ptr::with_exposed_provenance_mut(from)).expect("blocks are not NULL");
            // SAFETY: a part of a live block of this handler; room for as many bytes, which the caller holds.
            unsafe { handler.copy_out(std::ptr::with_exposed_provenance_mut(to), from, size_bytes) }
        })?;
        Ok(())
    }

    /// obj2obj, where both are of one handler.
    fn copy_across(
        &self,
        py: Python<'_>,
        offset: usize,
        source: &Bound<'_, Self>,
        source_offset: usize,
        size_bytes: usize,
    ) -> PyResult<()> {
        let handler = self.buffer.handler();
        if source.get().buffer.handler() != handler {
            return Err(PyValueError::new_err("the two blocks are of two handlers"));
        }
        let to = self.part(offset, size_bytes)?.as_ptr().expose_provenance();
        let from = source.get().part(source_offset, size_bytes)?.as_ptr().expose_provenance();
        if to.abs_diff(from) < size_bytes {
            return Err(PyValueError::new_err("the two parts overlap"));
        }
        py.detach(|| {
            let to = NonNull::new(std::ptr::with_exposed_provenance_mut(to)).expect("blocks are not NULL");
            let from = NonNull::new(std::ptr::with_exposed_provenance_mut(from)).expect("blocks are not NULL");
            // SAFETY: parts of live blocks of this handler that do not overlap, as just seen.
            unsafe { handler.copy_across(to, from, size_bytes) }
        })?;
        Ok(())
    }
}
