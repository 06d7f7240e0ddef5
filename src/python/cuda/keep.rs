//! `keep`: objects that live until the work that was queued on a stream is done.

use crate::source::{CudaDriver, Marks};
use crate::strategy::cuda_waiting;
use crate::unattributed::unattributed;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// What is kept, those first that were not asked about for the longest time. Not touched in a child of `fork`, which
/// may find it held.
static KEPT: Mutex<VecDeque<(Marks, Py<PyAny>)>> = Mutex::new(VecDeque::new());

/// How many [`cuda_keep`] asks about: each call adds one, so that all have their turn, and none costs more when many
/// wait.
const ASKED: usize = 16;

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
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).push_back((marks, arrays));
    Ok(release_some(py, ASKED))
}

/// Lets go of what is done; returns how many are left. An object whose event failed stays.
pub(super) fn release_done(py: Python<'_>) -> usize {
    release_some(py, usize::MAX)
}

/// The same of so many at most.
fn release_some(py: Python<'_>, most: usize) -> usize {
    if !CudaDriver::loaded().is_some_and(CudaDriver::is_usable) {
        return 0;
    }
    let (done, left) = py.detach(|| {
        let _unattributed = unattributed();
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        let mut done = Vec::new();
        for _ in 0..kept.len().min(most) {
            let Some(one) = kept.pop_front() else { break };
            if one.0.are_done().unwrap_or(false) { done.push(one) } else { kept.push_back(one) }
        }
        (done, kept.len())
    });
    drop(done); // without the lock: a destructor may call `keep`
    left
}
