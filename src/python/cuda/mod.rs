//! The Rust part of `ctxalloc.cuda`. Its only user is the package `python/ctxalloc/cuda`.

mod ask;
mod capture;
mod keep;
mod pools;

pub(super) use ask::{
    cuda_address, cuda_configure, cuda_device, cuda_info, cuda_kind_of, cuda_load, cuda_settle, cuda_wait,
};
pub(super) use capture::PyCapture;
pub(super) use keep::cuda_keep;
pub(super) use pools::{cuda_register, strategy};

use crate::error::Error;
use crate::source::{CudaDevice, CudaDriver};
use pyo3::prelude::*;

/// The device with that number, of the driver, which is loaded now if it was not.
fn device(py: Python<'_>, ordinal: usize) -> Result<CudaDevice, Error> {
    // SAFETY: the name that NVIDIA's driver has; or `cuda_load` has loaded one before.
    #[allow(unsafe_code, reason = "loads a library")]
    py.detach(|| CudaDevice::open(unsafe { CudaDriver::load(None) }?, ordinal))
}
