//! Managed memory as a source for pools: host and device use the same addresses, and the driver moves the pages.

use super::device::CudaDevice;
use super::failure::Failure;
use super::{CudaSource, inherited, note_mapped, note_unmapped};
use crate::error::Error;
use crate::layout;
use crate::source::Pages;
use crate::sync::Locked;
use crate::trace;
use crate::unattributed::unattributed;
use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// `CU_MEM_ATTACH_GLOBAL`: any stream of any device may access it.
const FOR_ALL_STREAMS: c_uint = 1;

/// Managed memory (`cuMemAllocManaged`). The page that host or device touches moves there.
///
/// The host must not write to a block while a kernel reads it. In a child of `fork` there is none, and blocks that it
/// inherited must not be touched.
#[derive(Clone)]
pub struct CudaManaged {
    device: CudaDevice,
    /// The driver's allocations, by the first address of their mappings.
    allocations: Arc<Locked<BTreeMap<usize, u64>>>,
}

impl CudaManaged {
    /// Managed memory, in the context of a device.
    ///
    /// # Errors
    /// [`Error::Cuda`] if host and device cannot use managed memory at the same time: a host that touched some while a
    /// kernel runs would get a SIGSEGV.
    pub fn new(device: &CudaDevice) -> Result<Self, Error> {
        if !device.has_concurrent_managed_memory() {
            return Err(Failure { call: "cuDeviceGetAttribute", code: 801 }.while_doing(&format!(
                "CUDA device {} ('{}') has no managed memory that host and device may use at the same time",
                device.ordinal(),
                device.name()
            )));
        }
        Ok(Self { device: *device, allocations: Arc::new(Locked::new(BTreeMap::new())) })
    }
}

// SAFETY: an allocation of the driver's belongs to this source alone until it is freed, and `commit` clears it. It is
// requested with room for aligning.
unsafe impl Pages for CudaManaged {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        let driver = self.device.driver;
        let _entered = self.device.enter().ok()?;
        let mut raw = 0;
        let room_bytes = size_bytes.checked_add(align)?;
        // SAFETY: the number is ours to write to.
        let code = unsafe { (driver.functions.allocate_managed)(&raw mut raw, room_bytes, FOR_ALL_STREAMS) };
        driver.check("cuMemAllocManaged", code).ok()?;
        let start = (raw as usize).checked_add(layout::padding(raw as usize, align))?;
        let _unattributed = unattributed();
        self.allocations.with(|allocations| allocations.insert(start, raw));
        note_mapped(size_bytes);
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut(start))?;
        inherited::note(start, size_bytes);
        Some(start)
    }

    /// Clears the pages: new ones are not zero, and others were used before.
    unsafe fn commit(&self, start: NonNull<u8>, size_bytes: usize) -> bool {
        // SAFETY: pages of this source that nobody else has (this function's contract); all are writable here.
        unsafe { self.clear(start, size_bytes) }
    }

    /// Frees the allocation. In a child of `fork`, and while the process exits, it stays.
    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        let Ok(_entered) = self.device.enter() else { return };
        let driver = self.device.driver;
        let raw = self.allocations.with(|allocations| allocations.remove(&start.addr().get()));
        let Some(raw) = raw else { return };
        // SAFETY: what the driver gave for this mapping, which nobody uses any more (`unmap`'s contract).
        match driver.check("cuMemFree", unsafe { (driver.functions.free_managed)(raw) }) {
            Ok(()) => {
                inherited::forget(start);
                note_unmapped(size_bytes);
            }
            Err(failure) => trace::driver_refused(&failure.while_doing("managed memory stays allocated")),
        }
    }

    unsafe fn discard(&self, _start: NonNull<u8>, _size_bytes: usize) -> bool {
        false
    }
}

impl CudaSource for CudaManaged {
    fn device(&self) -> &CudaDevice {
        &self.device
    }

    fn survives_fork(&self) -> bool {
        false
    }
}

impl fmt::Debug for CudaManaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaManaged").field("device", &self.device.ordinal()).finish()
    }
}
