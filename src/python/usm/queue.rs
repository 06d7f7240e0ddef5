//! `UsmQueue`: a SYCL queue that is dpctl's too.
#![allow(unsafe_code, reason = "addresses from dpctl")]

use crate::error::Error;
use crate::handler::{UsmBlock, UsmPool, register_usm};
use crate::python::asyncio::future_into_py;
use crate::python::exit;
use crate::python::handler::PyHandler;
use crate::source::{Queue, RowAxis, Runtime, UsmKind, UsmPages};
use crate::strategy::Pool;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3_async_runtimes::tokio as runtimes;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};
use tokio::sync::oneshot;

/// A queue of dpctl's, shared with it.
#[pyclass(frozen, eq, weakref, name = "UsmQueue", module = "ctxalloc._native")]
pub(in crate::python) struct PyQueue {
    queue: Queue,
    /// Whether its context is for ever, and so may have pools.
    is_kept: bool,
    /// The pools that blocks are from, once they are known: they are never given up.
    block_pools: [OnceLock<&'static UsmPool>; 3],
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

    /// The pool that blocks of a kind are from: made where the context stays, else only where a handler has one.
    pub(super) fn block_pool(&self, kind: UsmKind) -> Result<Option<&'static UsmPool>, Error> {
        let known = &self.block_pools[match kind {
            UsmKind::Device => 0,
            UsmKind::Shared => 1,
            UsmKind::Host => 2,
        }];
        if let Some(&pool) = known.get() {
            return Ok(Some(pool));
        }
        let found = match self.is_kept {
            true => Some(UsmPool::of(&self.queue, kind)?),
            false => UsmPool::found(&self.queue, kind),
        };
        Ok(found.map(|pool| *known.get_or_init(|| pool)))
    }

    /// The pool that strategies on this queue stand on.
    pub(in crate::python) fn pool(&self, kind: &str) -> PyResult<Pool<UsmPages>> {
        let kind = kind_named(kind)?;
        UsmPages::new(&self.queue, kind)?; // says so where no strategy can stand on it
        Ok(UsmPool::of(&self.queue, kind)?.lent())
    }
}

pub(super) fn kind_named(kind: &str) -> PyResult<UsmKind> {
    let all = [UsmKind::Host, UsmKind::Device, UsmKind::Shared];
    all.into_iter().find(|known| known.name() == kind).ok_or_else(|| {
        PyValueError::new_err(format!("kind={kind:?} is no kind of USM; give 'host', 'device' or 'shared'"))
    })
}

#[pymethods]
impl PyQueue {
    /// `library` is dpctl's own, `address` what `addressof_ref()` of a live `dpctl.SyclQueue` gives. `keep` says that its
    /// context is one that stays, such as a device's own.
    #[new]
    #[pyo3(signature = (library, address, /, *, keep))]
    fn new(py: Python<'_>, library: PathBuf, address: usize, keep: bool) -> PyResult<Self> {
        let queue = py.detach(|| {
            // SAFETY: `python/ctxalloc/usm` gives the library in dpctl's own folder.
            let runtime = unsafe { Runtime::load(&library) }?;
            // SAFETY: as above; it asks a live queue.
            unsafe { Queue::share(runtime, address) }
        })?;
        Ok(Self { queue, is_kept: keep, block_pools: Default::default(), last: Mutex::new(None) })
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

    /// Whether both have the same context and device.
    fn shares_memory_with(&self, other: &Bound<'_, Self>) -> bool {
        self.queue.shares_memory_with(&other.get().queue)
    }

    /// Whether its work may use the memory at an address: that of its context and device, and the host's; where nobody
    /// can say whose it is, it may not. Work on another device's memory may never end.
    fn reaches(&self, address: usize) -> bool {
        match self.queue.kind_of(address) {
            Some(UsmKind::Device | UsmKind::Shared) => match UsmBlock::told(&self.queue, address) {
                Some(told) => told.queue.shares_memory_with(&self.queue),
                None => self.queue.is_alone_in_its_context(),
            },
            _ => true,
        }
    }

    /// What is known of an address in memory that this package allocated: its kind, and the bytes from there to its
    /// block's end, which are 0 where no block is and None where that cannot be told.
    fn told(&self, address: usize) -> Option<(&'static str, Option<usize>)> {
        UsmBlock::told(&self.queue, address).map(|told| (told.kind.name(), told.room_bytes))
    }

    fn register<'py>(&self, py: Python<'py>, name: &str, kind: &str) -> PyResult<Bound<'py, PyHandler>> {
        PyHandler::of(py, register_usm(name, &self.queue, kind_named(kind)?)?)
    }

    /// Until all is done that was submitted so far. RuntimeError: in a child of `fork`.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        self.queue.require_usable()?;
        py.detach(|| self.queue.wait());
        Ok(())
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

    /// Copies rows and waits. `axes` has, for each axis, how many rows there are and the bytes from one to the next where
    /// they are written and where they are read.
    fn copy_rows(
        &self,
        py: Python<'_>,
        to: usize,
        from_: usize,
        row_bytes: usize,
        axes: Vec<(usize, isize, isize)>,
    ) -> PyResult<()> {
        let axes: Vec<_> =
            axes.into_iter().map(|(count, to_step, from_step)| RowAxis { count, to_step, from_step }).collect();
        py.detach(|| {
            let (to, from) = (std::ptr::with_exposed_provenance_mut(to), std::ptr::with_exposed_provenance(from_));
            // SAFETY: the package holds both sides, of which these are the rows, and has looked that they do not overlap.
            unsafe { self.queue.copy_rows(to, from, row_bytes, &axes) }
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
        let this = slf.clone().unbind(); // the turns are this object's
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
            let mut keep = Some((keep, this));
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
