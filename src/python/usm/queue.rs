//! `UsmQueue`: a SYCL queue that is dpctl's too.
#![allow(unsafe_code, reason = "addresses from dpctl")]

use crate::handler::register_usm;
use crate::python::asyncio::future_into_py;
use crate::python::exit;
use crate::python::handler::PyHandler;
use crate::source::{Queue, Runtime, UsmKind, UsmPages};
use crate::strategy::{Pool, PoolOptions};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3_async_runtimes::tokio as runtimes;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use tokio::sync::oneshot;

/// A queue of dpctl's, shared with it.
#[pyclass(frozen, eq, name = "UsmQueue", module = "ctxalloc._native")]
pub(in crate::python) struct PyQueue {
    queue: Queue,
    /// A pool of each kind that was asked for, for strategies and arenas.
    pools: Mutex<Vec<(UsmKind, Pool<UsmPages>)>>,
    /// Ends with the last asynchronous copy: they take turns, in the order of the calls.
    last: Mutex<Option<oneshot::Receiver<()>>>,
}

impl PartialEq for PyQueue {
    fn eq(&self, other: &Self) -> bool {
        self.queue == other.queue
    }
}

impl PyQueue {
    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// The pool that strategies on this queue stand on.
    pub(in crate::python) fn pool(&self, kind: &str) -> PyResult<Pool<UsmPages>> {
        let kind = kind_named(kind)?;
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, pool)) = pools.iter().find(|(there, _)| *there == kind) {
            return Ok(pool.clone());
        }
        let pool = Pool::over(UsmPages::new(&self.queue, kind)?, PoolOptions::default());
        pools.push((kind, pool.clone()));
        Ok(pool)
    }
}

fn kind_named(kind: &str) -> PyResult<UsmKind> {
    let all = [UsmKind::Host, UsmKind::Device, UsmKind::Shared];
    all.into_iter().find(|known| known.name() == kind).ok_or_else(|| {
        PyValueError::new_err(format!("kind={kind:?} is no kind of USM; give 'host', 'device' or 'shared'"))
    })
}

#[pymethods]
impl PyQueue {
    /// `library` is dpctl's own, `address` what `addressof_ref()` of a live `dpctl.SyclQueue` gives.
    #[new]
    fn new(py: Python<'_>, library: PathBuf, address: usize) -> PyResult<Self> {
        let queue = py.detach(|| {
            // SAFETY: `python/ctxalloc/usm` gives the library in dpctl's own folder.
            let runtime = unsafe { Runtime::load(&library) }?;
            // SAFETY: as above; it asks a live queue.
            unsafe { Queue::share(runtime, address) }
        })?;
        Ok(Self { queue, pools: Mutex::new(Vec::new()), last: Mutex::new(None) })
    }

    #[getter]
    fn device(&self) -> &str {
        self.queue.device()
    }

    fn has(&self, kind: &str) -> PyResult<bool> {
        Ok(self.queue.has(kind_named(kind)?))
    }

    fn kind_of(&self, address: usize) -> &'static str {
        self.queue.kind_of(address).map_or("unknown", UsmKind::name)
    }

    fn register<'py>(&self, py: Python<'py>, name: &str, kind: &str) -> PyResult<Bound<'py, PyHandler>> {
        PyHandler::of(py, register_usm(name, &self.queue, kind_named(kind)?)?)
    }

    fn wait(&self, py: Python<'_>) {
        py.detach(|| self.queue.wait());
    }

    /// Copies and waits. The addresses are those of memory that the caller holds.
    fn copy(&self, py: Python<'_>, to: usize, from_: usize, size_bytes: usize) -> PyResult<()> {
        py.detach(|| {
            let (to, from) = (std::ptr::with_exposed_provenance_mut(to), std::ptr::with_exposed_provenance(from_));
            // SAFETY: the package holds both, with that many bytes, and has looked that they do not overlap.
            unsafe { self.queue.copy(to, from, size_bytes) }
        })?;
        Ok(())
    }

    /// A copy that can be awaited: it comes after all that was submitted, and after those that were asked for before.
    /// `keep` has the memory; it is let go of when the copy is done, also where nobody waits any more.
    fn copy_async<'py>(
        slf: Bound<'py, Self>,
        to: usize,
        from_: usize,
        size_bytes: usize,
        keep: Py<PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        runtimes::get_current_locals(py)?; // says so before anything is begun where there is no event loop
        let queue = slf.get().queue.clone();
        let hold = queue.hold();
        let (turn, next) = oneshot::channel();
        let before = slf.get().last.lock().unwrap_or_else(PoisonError::into_inner).replace(next);
        let done = runtimes::get_runtime().spawn_blocking(move || {
            let _held = (hold, turn);
            if let Some(before) = before {
                let _ = before.blocking_recv(); // an error too is its end
            }
            let (to, from) = (std::ptr::with_exposed_provenance_mut(to), std::ptr::with_exposed_provenance(from_));
            // SAFETY: as for `copy`; `keep` holds both until it is done.
            let outcome = unsafe { queue.copy(to, from, size_bytes) };
            let mut keep = Some(keep);
            if exit::try_attach(|_| drop(keep.take())).is_none() {
                std::mem::forget(keep); // Python is gone: nobody can let go of it
            }
            outcome
        });
        future_into_py(py, async move {
            // A drop of this future leaves the thread that copies alone: it keeps the memory until SYCL is done with it.
            Ok(done.await.map_err(|error| PyRuntimeError::new_err(error.to_string()))??)
        })
    }

    fn __repr__(&self) -> String {
        format!("<UsmQueue on {:?}>", self.queue.device())
    }
}
