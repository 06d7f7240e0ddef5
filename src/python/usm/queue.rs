//! `UsmQueue`: a SYCL queue that dpctl uses too.
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

/// A queue that is shared with dpctl.
#[pyclass(frozen, eq, weakref, name = "UsmQueue", module = "ctxalloc._native")]
pub(in crate::python) struct PyQueue {
    queue: Queue,
    /// Whether its context lives for ever, so that pools may be made in it.
    is_kept: bool,
    /// The pool of each kind that blocks come from, once it is known. Pools are never freed.
    block_pools: [OnceLock<&'static UsmPool>; 3],
    /// Resolves when the last asynchronous copy has ended: copies run one after the other, in the order of the calls.
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

    /// The pool for blocks of a kind. In a context that lives for ever it is made if there is none; in another context
    /// it is that of a handler, if there is one.
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

    /// The pool under the strategies on this queue.
    pub(in crate::python) fn pool(&self, kind: &str) -> PyResult<Pool<UsmPages>> {
        let kind = kind_named(kind)?;
        UsmPages::new(&self.queue, kind)?; // an error where strategies cannot use this kind
        Ok(UsmPool::of(&self.queue, kind)?.for_handler())
    }
}

pub(super) fn kind_named(kind: &str) -> PyResult<UsmKind> {
    let all = [UsmKind::Host, UsmKind::Device, UsmKind::Shared];
    all.into_iter().find(|known| known.name() == kind).ok_or_else(|| {
        PyValueError::new_err(format!("kind={kind:?} is not a kind of USM; give 'host', 'device' or 'shared'"))
    })
}

#[pymethods]
impl PyQueue {
    /// `library` is dpctl's own, `address` is what `addressof_ref()` of a live `dpctl.SyclQueue` returns. `keep` says
    /// that the queue's context lives for ever, as a device's own does.
    #[new]
    #[pyo3(signature = (library, address, /, *, keep))]
    fn new(py: Python<'_>, library: PathBuf, address: usize, keep: bool) -> PyResult<Self> {
        let queue = py.detach(|| {
            // SAFETY: `python/ctxalloc/usm` is the only caller: it gives the library in dpctl's own folder, and the
            // address of a queue that it holds.
            unsafe { Queue::share(Runtime::load(&library)?, address) }
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

    /// Whether work on this queue may use the memory at an address: it may use that of its context and device, and the
    /// host's. Work on another device's memory may never end, so the answer is no where the device is unknown.
    fn reaches(&self, address: usize) -> bool {
        match self.queue.kind_of(address) {
            Some(UsmKind::Device | UsmKind::Shared) => match UsmBlock::locate(&self.queue, address) {
                Some(located) => located.queue.shares_memory_with(&self.queue),
                None => self.queue.is_alone_in_its_context(),
            },
            _ => true,
        }
    }

    /// What is known of an address in memory that this package allocated, else None: its kind, and the bytes from there
    /// to the end of its block, which are 0 if there is no block and None if that is not known.
    fn locate(&self, address: usize) -> Option<(&'static str, Option<usize>)> {
        UsmBlock::locate(&self.queue, address).map(|located| (located.kind.name(), located.room_bytes))
    }

    fn register<'py>(&self, py: Python<'py>, name: &str, kind: &str) -> PyResult<Bound<'py, PyHandler>> {
        PyHandler::of(py, register_usm(name, &self.queue, kind_named(kind)?)?)
    }

    /// Waits until all work that was submitted so far is done. RuntimeError: in a child of `fork`.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        self.queue.require_usable()?;
        py.detach(|| self.queue.wait());
        Ok(())
    }

    /// Copies and waits. The caller holds the memory on both sides.
    fn copy(&self, py: Python<'_>, to: usize, from_: usize, size_bytes: usize) -> PyResult<()> {
        py.detach(|| {
            let (to, from) = (std::ptr::with_exposed_provenance_mut(to), std::ptr::with_exposed_provenance(from_));
            // SAFETY: the package, the only caller, holds that many bytes on both sides, and has checked that they do
            // not overlap.
            unsafe { self.queue.copy(to, from, size_bytes) }
        })?;
        Ok(())
    }

    /// Copies rows and waits. `axes` has for each axis the number of rows, and the bytes from one row to the next in
    /// the target and in the source.
    fn copy_rows(
        &self,
        py: Python<'_>,
        to: usize,
        from_: usize,
        row_bytes: usize,
        axes: Vec<(usize, isize, isize)>,
    ) -> PyResult<()> {
        let axes: Vec<_> = axes.into_iter().map(|(count, to, from)| RowAxis::new(count, to, from)).collect();
        py.detach(|| {
            let (to, from) = (std::ptr::with_exposed_provenance_mut(to), std::ptr::with_exposed_provenance(from_));
            // SAFETY: the package, the only caller, holds the memory of these rows on both sides, and has checked that
            // the sides do not overlap.
            unsafe { self.queue.copy_rows(to, from, row_bytes, &axes) }
        })?;
        Ok(())
    }

    /// A copy that can be awaited. It comes after all work that was submitted before, and after earlier asynchronous
    /// copies. `keep` owns the memory on both sides, and is released when the copy is done, even if nobody awaits it
    /// any more.
    fn copy_async<'py>(
        slf: Bound<'py, Self>,
        to: usize,
        from_: usize,
        size_bytes: usize,
        keep: Py<PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        runtimes::get_current_locals(py)?; // an error before anything has begun, if there is no event loop
        let queue = slf.get().queue.clone();
        let this = slf.clone().unbind(); // the order of copies is kept in this object
        let hold = queue.hold();
        let (turn, next) = oneshot::channel();
        let before = slf.get().last.lock().unwrap_or_else(PoisonError::into_inner).replace(next);
        let done = runtimes::get_runtime().spawn_blocking(move || {
            let _held = (hold, turn);
            if let Some(before) = before {
                let _ = before.blocking_recv(); // it has ended, with an error or without
            }
            let (to, from) = (std::ptr::with_exposed_provenance_mut(to), std::ptr::with_exposed_provenance(from_));
            // SAFETY: the package, the only caller, gives that many bytes on both sides, which do not overlap. `keep`
            // owns both until the copy is done.
            let outcome = unsafe { queue.copy(to, from, size_bytes) };
            let mut keep = Some((keep, this));
            if exit::try_attach(|_| drop(keep.take())).is_none() {
                std::mem::forget(keep); // Python is gone, so nobody can release it
            }
            outcome
        });
        future_into_py(py, async move {
            // Dropping this future does not stop the thread that copies: it keeps the memory until SYCL is done with
            // it.
            Ok(done.await.map_err(|error| PyRuntimeError::new_err(error.to_string()))??)
        })
    }

    fn __repr__(&self) -> String {
        format!("<UsmQueue on {:?}>", self.queue.device())
    }
}
