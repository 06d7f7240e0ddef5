//! The pools over CUDA's memory that handlers and strategies share: one for each device, kind and choice. They live for
//! ever, because handlers do.

use crate::error::Error;
use crate::handler;
use crate::python::handler::PyHandler;
use crate::python::options::Options;
use crate::source::{CudaDevice, CudaManaged, CudaPinned, CudaPinnedOptions};
use crate::strategy::{PoolOptions, Quarantined, Reuse, Strategy};
use crate::unattributed::unattributed;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::{Arc, Mutex, PoisonError};

/// What tells pools apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Choice {
    device: CudaDevice,
    is_managed: bool,
    huge_pages: bool,
    near_device: bool,
    reuse: Reuse,
}

#[derive(Clone)]
enum Made {
    Pinned(Quarantined<CudaPinned>),
    Managed(Quarantined<CudaManaged>),
}

static POOLS: Mutex<Vec<(Choice, Made)>> = Mutex::new(Vec::new());

impl Choice {
    fn of(options: &Options<'_, '_>, py: Python<'_>) -> PyResult<Self> {
        let kind = options.maybe("kind", "'host' or 'managed'", |value| {
            let kind: String = value.extract()?;
            ["host", "managed"].iter().position(|known| *known == kind).ok_or_else(|| PyValueError::new_err(()))
        })?;
        let reuse = options.maybe("reuse", "'events' or 'unsafe'", |value| {
            let choice: String = value.extract()?;
            match &*choice {
                "events" => Ok(Reuse::AfterEvents),
                "unsafe" => Ok(Reuse::Unchecked),
                _ => Err(PyValueError::new_err(())),
            }
        })?;
        Ok(Self {
            device: super::device(py, options.maybe_count("device")?.unwrap_or(0) as usize)?,
            is_managed: kind == Some(1),
            huge_pages: options.maybe_flag("huge_pages")?.unwrap_or(false),
            near_device: options.maybe_flag("near_device")?.unwrap_or(true),
            reuse: reuse.unwrap_or_default(),
        })
    }

    fn make(&self, options: PoolOptions) -> Result<Made, Error> {
        let _immortal = unattributed();
        if self.is_managed {
            return Quarantined::pool(CudaManaged::new(&self.device)?, options, self.reuse).map(Made::Managed);
        }
        let mut pinned = CudaPinnedOptions::default();
        (pinned.huge_pages, pinned.near_device) = (self.huge_pages, self.near_device);
        Quarantined::pool(CudaPinned::new(&self.device, pinned)?, options, self.reuse).map(Made::Pinned)
    }

    /// The process's pool of this choice.
    fn shared(&self) -> Result<Made, Error> {
        let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = pools.iter().find(|(choice, _)| choice == self) {
            return Ok(found.clone());
        }
        let made = self.make(PoolOptions::default())?;
        pools.push((*self, made.clone()));
        Ok(made)
    }
}

/// The strategy of `cuda.Pool` and `cuda.Arena`. Options for the pool make one of its own.
///
/// # Errors
/// Those of the driver, the device and the options.
pub(in crate::python) fn strategy(
    py: Python<'_>,
    options: &Options<'_, '_>,
    is_arena: bool,
) -> PyResult<Arc<dyn Strategy>> {
    let choice = Choice::of(options, py)?;
    let is_plain = options.given("warm_bytes")?.is_none() && options.given("decay_seconds")?.is_none();
    let of_pool = options.of_pool()?;
    let made = py.detach(|| if is_plain { choice.shared() } else { choice.make(of_pool) })?;
    Ok(match (made, is_arena) {
        (Made::Pinned(pool), false) => Arc::new(pool),
        (Made::Pinned(pool), true) => Arc::new(pool.arena()),
        (Made::Managed(pool), false) => Arc::new(pool),
        (Made::Managed(pool), true) => Arc::new(pool.arena()),
    })
}

/// Registers the process's pool of these options as a handler.
#[pyfunction]
#[pyo3(signature = (name, /, **options))]
pub(in crate::python) fn cuda_register<'py>(
    py: Python<'py>,
    name: &str,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyHandler>> {
    let choice = Choice::of(&Options::new("cuda.handler", options), py)?;
    let made = py.detach(|| choice.shared())?;
    let registered = match made {
        Made::Pinned(pool) => handler::register(name, pool),
        Made::Managed(pool) => handler::register(name, pool),
    };
    PyHandler::of(py, registered?)
}
