//! `keep`: objects that live until the work that was queued on a stream is done.

use crate::source::{CudaDriver, Marks};
use crate::strategy::cuda_waiting;
use crate::unattributed::unattributed;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};

/// What is kept, the oldest first. Not touched in a child of `fork`, which may find it held.
static KEPT: Mutex<Vec<(Marks, Py<PyAny>)>> = Mutex::new(Vec::new());

/// Keeps arrays until the work that was queued on a stream of a device is done; returns how many are kept now. The
/// stream is a `CUstream`, or 0 and 1 for the default one, 2 for this thread's.
#[pyfunction]
#[pyo3(signature = (arrays, stream, device, /))]
pub(in crate::python) fn cuda_keep(py: Python<'_>, arrays: Py<PyAny>, stream: usize, device: usize) -> PyResult<usize> {
    if cuda_waiting().captures > 0 {
        return Err(PyRuntimeError::new_err(
            "keep() was called inside of capturing(): a graph reads its arrays each time that it is launched, so hold \
             them yourself as long as the graph",
        ));
    }
    let device = super::device(py, device)?;
    // SAFETY: `python/ctxalloc/cuda` is the only caller: it passes the handle of a stream object that it holds, or a
    // number that the user vouches for.
    #[allow(unsafe_code, reason = "a handle from Python")]
    let marks = py.detach(|| unsafe { device.driver().mark_stream(device, stream) })?;
    let _unattributed = unattributed();
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).push((marks, arrays));
    Ok(release_done(py))
}

/// Lets go of what is done; returns how many are left. An object whose event failed stays.
pub(super) fn release_done(py: Python<'_>) -> usize {
    if !CudaDriver::loaded().is_some_and(CudaDriver::is_usable) {
        return 0;
    }
    let (done, left) = py.detach(|| {
        let _unattributed = unattributed();
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        let done: Vec<_> = kept.extract_if(.., |(marks, _)| marks.are_done().unwrap_or(false)).collect();
        (done, kept.len())
    });
    drop(done); // without the lock: a destructor may call `keep`
    left
}
