//! What Python asks of the driver, a device and an address.

use super::{device, keep};
use crate::error::Error;
use crate::source::{CudaDriver, cuda_mapped};
use crate::strategy::{self, cuda_waiting, set_cuda_quarantine_bytes};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

/// Loads the driver from a path: the tests' own.
#[pyfunction]
#[pyo3(signature = (path, /))]
pub(in crate::python) fn cuda_load(py: Python<'_>, path: PathBuf) -> PyResult<()> {
    // SAFETY: the tests give a library with the driver's symbols.
    #[allow(unsafe_code, reason = "loads a library")]
    py.detach(|| unsafe { CudaDriver::load(Some(&path)) })?;
    Ok(())
}

/// How it stands with the driver, in one word or two.
fn state_of(outcome: &Result<&'static CudaDriver, Error>) -> &'static str {
    match outcome {
        Ok(driver) if driver.is_usable() && driver.lost().is_some() => "context lost",
        Ok(driver) if driver.is_usable() => "ready",
        Ok(_) => "forked",
        Err(Error::Cuda { code: 0, .. }) => "no driver",
        Err(Error::Cuda { code: 34, .. }) => "stub library",
        Err(Error::Cuda { code: 100, .. }) => "no device",
        Err(Error::Cuda { code: 500, .. }) => "driver too old",
        Err(Error::Cuda { code: 803, .. }) => "driver mismatch",
        Err(_) => "failed",
    }
}

/// What `ctxalloc.cuda.info()` returns, without the devices. Loads the driver if it is there.
#[pyfunction]
pub(in crate::python) fn cuda_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    // SAFETY: the name that NVIDIA's driver has; or `cuda_load` has loaded one before.
    #[allow(unsafe_code, reason = "loads a library")]
    let outcome = py.detach(|| unsafe { CudaDriver::load(None) });
    let info = PyDict::new(py);
    info.set_item("state", state_of(&outcome))?;
    let error = match &outcome {
        Ok(driver) => driver.lost().map(|error| error.to_string()),
        Err(error) => Some(error.to_string()),
    };
    info.set_item("error", error)?;
    let driver = outcome.ok();
    info.set_item("driver", driver.map(|driver| driver.path().to_string_lossy().into_owned()))?;
    info.set_item("version", driver.map(CudaDriver::version))?;
    info.set_item("safe_reuse", driver.is_some_and(CudaDriver::records_contexts))?;
    info.set_item("last_failure", driver.and_then(CudaDriver::last_failure))?;
    let (mapped_bytes, mappings, refused) = cuda_mapped();
    info.set_item("mapped_bytes", mapped_bytes)?;
    info.set_item("mappings", mappings)?;
    info.set_item("refused_registrations", refused)?;
    let waiting = cuda_waiting();
    info.set_item("waiting_blocks", waiting.blocks)?;
    info.set_item("waiting_bytes", waiting.bytes)?;
    info.set_item("stuck_bytes", waiting.stuck_bytes)?;
    info.set_item("quarantine_bytes", waiting.max_bytes)?;
    info.set_item("capturing", waiting.captures > 0)?;
    info.set_item("kept", keep::release_done(py))?;
    info.set_item("device_count", driver.map_or(0, CudaDriver::devices))?;
    Ok(info)
}

/// What a device is and can do.
#[pyfunction]
#[pyo3(signature = (ordinal, /))]
pub(in crate::python) fn cuda_device(py: Python<'_>, ordinal: usize) -> PyResult<Bound<'_, PyDict>> {
    let device = device(py, ordinal)?;
    let info = PyDict::new(py);
    info.set_item("number", device.ordinal())?;
    info.set_item("name", device.name())?;
    info.set_item("numa_node", device.numa_node())?;
    info.set_item("registers_host_memory", device.registers_host_memory())?;
    info.set_item("reaches_host_pointers", device.reaches_host_pointers())?;
    info.set_item("concurrent_managed_memory", device.has_concurrent_managed_memory())?;
    let (reads_pageable, by_page_tables) = device.reads_pageable_memory();
    info.set_item("reads_pageable_memory", reads_pageable)?;
    info.set_item("uses_host_page_tables", by_page_tables)?;
    Ok(info)
}

/// What the driver says of an address: 'host', 'managed', 'device' or 'pageable'.
#[pyfunction]
#[pyo3(signature = (address, device, /))]
pub(in crate::python) fn cuda_kind_of(py: Python<'_>, address: usize, device: usize) -> PyResult<&'static str> {
    if CudaDriver::loaded().is_some_and(CudaDriver::is_forked_from) {
        return Ok("pageable");
    }
    let device = super::device(py, device)?;
    Ok(py.detach(|| device.kind_of(address))?.name())
}

/// The address at which kernels reach pinned memory, and the number of the device whose memory it is.
#[pyfunction]
#[pyo3(signature = (address, device, /))]
pub(in crate::python) fn cuda_address(
    py: Python<'_>,
    address: usize,
    device: usize,
) -> PyResult<(Option<usize>, Option<usize>)> {
    let device = super::device(py, device)?;
    Ok(py.detach(|| Ok::<_, Error>((device.device_address(address)?, device.owner_of(address)?)))?)
}

/// Waits until the work that was queued on a stream is done. A signal's handler runs meanwhile, and may end it.
#[pyfunction]
#[pyo3(signature = (stream, device, /))]
pub(in crate::python) fn cuda_wait(py: Python<'_>, stream: usize, device: usize) -> PyResult<()> {
    let device = super::device(py, device)?;
    // SAFETY: `python/ctxalloc/cuda` is the only caller: it passes the stream that an array's maker names.
    #[allow(unsafe_code, reason = "a handle from Python")]
    let marks = py.detach(|| unsafe { device.driver().mark_stream(device, stream) })?;
    let mut pause = Duration::from_micros(20);
    while !marks.are_done().map_err(|failure| failure.while_doing("a stream could not be waited for"))? {
        py.detach(|| sleep(pause));
        py.check_signals()?;
        pause = (pause * 2).min(Duration::from_millis(1));
    }
    Ok(())
}

/// Gives back what the devices are done with, and lets go of what is kept and done. Returns how many bytes went back.
#[pyfunction]
pub(in crate::python) fn cuda_settle(py: Python<'_>) -> usize {
    let bytes = py.detach(strategy::cuda_settle);
    keep::release_done(py);
    bytes
}

/// How many bytes may wait.
#[pyfunction]
#[pyo3(signature = (quarantine_bytes, /))]
pub(in crate::python) fn cuda_configure(quarantine_bytes: usize) {
    set_cuda_quarantine_bytes(quarantine_bytes);
}
