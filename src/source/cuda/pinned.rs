//! Pinned memory as a source for pools: mappings of our own, each populated and then registered with the driver as a
//! whole, so that one registration encloses every block.
//!
//! Contents, zeroing and NUMA placement stay the host's. Registering costs milliseconds, so a pool sits over it.

use super::device::CudaDevice;
use super::failure::Failure;
use super::{CudaSource, FALLBACKS, inherited, note_mapped, note_unmapped};
use crate::error::Error;
use crate::layout;
use crate::source::{NumaPages, NumaPolicy, Pages, pages};
use crate::sync::Locked;
use crate::trace;
use crate::unattributed::unattributed;
use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`, which are `CU_MEMHOSTALLOC_`'s too: pinned for all
/// contexts, and kernels reach it.
const PORTABLE_AND_MAPPED: c_uint = 1 | 2;

/// What [`CudaPinned`] does to its mappings before they are registered.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct CudaPinnedOptions {
    /// Whether huge pages are asked for. They make registering faster where the kernel has some, and much slower where
    /// memory is fragmented. By default not.
    pub huge_pages: bool,
    /// Whether memory is taken from the NUMA node of the device, while that has some. By default so.
    pub near_device: bool,
}

impl Default for CudaPinnedOptions {
    fn default() -> Self {
        Self { huge_pages: false, near_device: true }
    }
}

/// Pinned memory of the host, for copies to and from a device that do not block. It is pinned for all devices.
///
/// A mapping is pinned when the pool makes it, and until the pool unmaps it. In a child of `fork` new mappings are
/// plain pages. Stack [`Quarantined`](crate::strategy::Quarantined) on the pool: without it a block is reused while a
/// device reads it.
#[derive(Clone)]
pub struct CudaPinned {
    device: CudaDevice,
    options: CudaPinnedOptions,
    numa: Option<NumaPages>,
    mappings: Arc<Locked<BTreeMap<usize, Pinned>>>,
    /// Whether it has ever mapped memory that the driver allocated, which a child of `fork` may not have.
    has_fallen_back: Arc<AtomicBool>,
}

/// How a mapping is pinned.
#[derive(Debug, Clone, Copy)]
enum Pinned {
    /// Pages of ours, registered.
    Registered,
    /// The driver's, which starts here.
    Allocated(usize),
}

impl CudaPinned {
    /// Pinned memory for a device. Maps nothing, and makes no context.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the driver cannot register memory of the host for that device.
    pub fn new(device: &CudaDevice, options: CudaPinnedOptions) -> Result<Self, Error> {
        if !device.registers_host_memory() {
            return Err(Failure { call: "cuDeviceGetAttribute", code: 801 }.while_doing(&format!(
                "memory of the host cannot be registered for CUDA device {} ('{}')",
                device.ordinal(),
                device.name()
            )));
        }
        let node = if options.near_device { device.numa_node() } else { None };
        // A container may forbid mbind: then memory comes from wherever the thread runs.
        let numa = node.and_then(|node| NumaPages::new(&[node], NumaPolicy::Preferred).ok());
        Ok(Self {
            device: *device,
            options,
            numa,
            mappings: Arc::new(Locked::new(BTreeMap::new())),
            has_fallen_back: Arc::new(AtomicBool::new(false)),
        })
    }

    /// Whether kernels reach its memory at the host's own addresses.
    #[must_use]
    pub fn is_reached_by_kernels(&self) -> bool {
        self.device.reaches_host_pointers()
    }

    /// Plain pages, on the device's node and with huge pages as the options say.
    fn plain(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        let start = pages::map(size_bytes, align).ok()?;
        // SAFETY: the whole mapping that was just made.
        unsafe {
            if let Some(numa) = self.numa {
                let _ = numa.bind(start, size_bytes); // a preference: without it the memory is as good, and farther
            }
            if self.options.huge_pages {
                pages::prefer_huge(start, size_bytes);
            }
        }
        Some(start)
    }

    /// Registers a new mapping.
    fn register(&self, start: NonNull<u8>, size_bytes: usize) -> Result<(), Failure> {
        let _entered = self.device.enter()?;
        let driver = self.device.driver;
        // SAFETY: a whole mapping of ours, registered once, and unregistered before it is unmapped.
        let code = unsafe { (driver.functions.register)(start.as_ptr().cast(), size_bytes, PORTABLE_AND_MAPPED) };
        driver.check("cuMemHostRegister", code)
    }

    /// Memory of the driver's own, where it refuses to register ours.
    fn allocated(&self, size_bytes: usize, align: usize) -> Option<(NonNull<u8>, usize)> {
        let _entered = self.device.enter().ok()?;
        let driver = self.device.driver;
        let mut raw = null_mut();
        // SAFETY: the pointer is ours to write to.
        let code = unsafe {
            (driver.functions.allocate_host)(&raw mut raw, size_bytes.checked_add(align)?, PORTABLE_AND_MAPPED)
        };
        driver.check("cuMemHostAlloc", code).ok()?;
        let raw = NonNull::new(raw.cast::<u8>())?;
        // SAFETY: the allocation has `size_bytes + align` bytes, and the padding is less than `align`. Nobody else has
        // it, and it is not zero when new.
        unsafe {
            let start = raw.add(layout::padding(raw.addr().get(), align));
            start.write_bytes(0, size_bytes);
            Some((start, raw.expose_provenance().get()))
        }
    }

    fn note(&self, start: NonNull<u8>, size_bytes: usize, pinned: Pinned) -> NonNull<u8> {
        let _unattributed = unattributed();
        self.mappings.with(|mappings| mappings.insert(start.addr().get(), pinned));
        if matches!(pinned, Pinned::Allocated(_)) {
            inherited::note(start, size_bytes);
        }
        note_mapped(size_bytes);
        start
    }
}

/// Brings the pages of a new mapping into memory. False if there is no memory.
///
/// # Safety
/// - `start` and `size_bytes` name whole pages of a mapping.
#[cfg(all(target_os = "linux", not(miri)))]
unsafe fn populate(start: NonNull<u8>, size_bytes: usize) -> bool {
    /// From linux/mman.h, since Linux 5.14.
    const MADV_POPULATE_WRITE: i32 = 23;
    // SAFETY: whole pages of a mapping (this function's contract); no contents change.
    let failed = unsafe { libc::madvise(start.as_ptr().cast(), size_bytes, MADV_POPULATE_WRITE) } != 0;
    // An older kernel does not know it: then the driver brings the pages in, more slowly.
    !failed || std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL)
}

#[cfg(not(all(target_os = "linux", not(miri))))]
unsafe fn populate(_start: NonNull<u8>, _size_bytes: usize) -> bool {
    true
}

// SAFETY: anonymous mappings of this process alone, zero when new (mmap(2)), or the driver's allocations, which are
// cleared when they are mapped. Registering changes no contents.
unsafe impl Pages for CudaPinned {
    fn map(&self, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        let driver = self.device.driver;
        if !driver.is_usable() {
            // Plain pages in a child of `fork`, whose NumPy code goes on; at the end of the process nothing.
            return super::library::is_forked().then(|| self.plain(size_bytes, align)).flatten();
        }
        let start = self.plain(size_bytes, align)?;
        // SAFETY: the whole mapping that was just made.
        if unsafe { populate(start, size_bytes) } {
            match self.register(start, size_bytes) {
                Ok(()) => return Some(self.note(start, size_bytes, Pinned::Registered)),
                Err(failure) => trace::driver_refused(&failure.while_doing("memory was not registered")),
            }
        }
        // SAFETY: this mapping was just made, nobody else has it, and it is not registered.
        unsafe { pages::unmap(start, size_bytes) };
        FALLBACKS.fetch_add(1, Ordering::Relaxed);
        let (start, raw) = self.allocated(size_bytes, align)?;
        self.has_fallen_back.store(true, Ordering::Relaxed);
        Some(self.note(start, size_bytes, Pinned::Allocated(raw)))
    }

    /// Unregisters and unmaps. What the driver does not let go of stays mapped, for a device may still reach it.
    unsafe fn unmap(&self, start: NonNull<u8>, size_bytes: usize) {
        let driver = self.device.driver;
        if super::library::is_forked() {
            // A copy that the parent's driver does not know; the list's lock may be held for ever here.
            // SAFETY: a whole mapping that nobody uses (this function's contract).
            unsafe { pages::unmap(start, size_bytes) };
            return;
        }
        let Ok(_entered) = self.device.enter() else { return };
        let Some(pinned) = self.mappings.with(|mappings| mappings.remove(&start.addr().get())) else { return };
        // SAFETY: a whole mapping that nobody uses (this function's contract), registered or allocated once, as noted.
        let gone = unsafe {
            match pinned {
                Pinned::Registered => {
                    driver.check("cuMemHostUnregister", (driver.functions.unregister)(start.as_ptr().cast()))
                }
                Pinned::Allocated(raw) => {
                    let raw: *mut u8 = std::ptr::with_exposed_provenance_mut(raw);
                    driver.check("cuMemFreeHost", (driver.functions.free_host)(raw.cast()))
                }
            }
        };
        if let Err(failure) = gone {
            trace::driver_refused(&failure.while_doing("pinned memory stays mapped"));
            return;
        }
        note_unmapped(size_bytes);
        match pinned {
            // SAFETY: a whole mapping that nobody uses, and that is not registered any more.
            Pinned::Registered => unsafe { pages::unmap(start, size_bytes) },
            Pinned::Allocated(_) => inherited::forget(start),
        }
    }

    /// Does nothing: a registration cannot be undone in part, and pinned pages do not go.
    unsafe fn discard(&self, _start: NonNull<u8>, _size_bytes: usize) -> bool {
        false
    }
}

impl CudaSource for CudaPinned {
    fn device(&self) -> &CudaDevice {
        &self.device
    }

    fn survives_fork(&self) -> bool {
        !self.has_fallen_back.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for CudaPinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaPinned")
            .field("device", &self.device.ordinal())
            .field("huge_pages", &self.options.huge_pages)
            .finish_non_exhaustive()
    }
}
