//! A device: its primary context, retained when first needed, and what can be asked of it.

use super::failure::{Failure, INVALID_VALUE, NOT_REGISTERED};
use super::library::{Call, CudaDriver, Ref};
use crate::error::Error;
use std::ffi::{CStr, c_int};
use std::fmt;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

/// What the driver says of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CudaKind {
    /// Pinned memory of the host: registered, or allocated by CUDA.
    Host,
    /// Managed memory, which moves between host and device as either accesses it.
    Managed,
    /// Memory of a device; the host cannot read it.
    Device,
    /// Memory that CUDA does not know: a copy from it is not asynchronous.
    Pageable,
}

impl CudaKind {
    /// `host`, `managed`, `device` or `pageable`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Managed => "managed",
            Self::Device => "device",
            Self::Pageable => "pageable",
        }
    }
}

/// The numbers of `CUdevice_attribute` that are asked for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Attribute {
    CanMapHostMemory = 19,
    PciBus = 33,
    PciDevice = 34,
    PciDomain = 50,
    ManagedMemory = 83,
    PageableMemoryAccess = 88,
    ConcurrentManagedAccess = 89,
    HostPointerForRegistered = 91,
    HostRegister = 99,
    UsesHostPageTables = 100,
    HostNumaId = 134,
}

/// The numbers of `CUpointer_attribute`.
const MEMORY_TYPE: c_int = 2;
const IS_MANAGED: c_int = 8;
const DEVICE_ORDINAL: c_int = 9;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: calls that a capture on another thread would forbid are no business of it.
const RELAXED: c_int = 2;

/// A CUDA device, by its number. Copies are the same device.
#[derive(Clone, Copy)]
pub struct CudaDevice {
    pub(super) driver: &'static CudaDriver,
    ordinal: usize,
    /// The driver's handle.
    pub(super) device: c_int,
}

/// While it lives, the device's primary context is this thread's current one.
pub(super) struct Entered {
    driver: &'static CudaDriver,
    /// The context.
    pub(super) context: Ref,
    /// The thread's capture mode before, if it was changed.
    mode: Option<c_int>,
    _call: Call,
}

impl CudaDevice {
    /// The device with that number. No context is made.
    ///
    /// # Errors
    /// [`Error::Cuda`] if there is no such device, and in a child of `fork`.
    pub fn open(driver: &'static CudaDriver, ordinal: usize) -> Result<Self, Error> {
        let _call = driver.begin_call().ok_or_else(|| driver.unusable())?;
        let what = || format!("there is no CUDA device {ordinal}; there are {}", driver.devices());
        if ordinal >= driver.devices() {
            return Err(Failure { call: "cuDeviceGet", code: 101 }.while_doing(&what()));
        }
        let mut device = 0;
        // SAFETY: the number is ours to write to; `ordinal` is less than the number of devices.
        let code = unsafe { (driver.functions.device)(&raw mut device, ordinal as c_int) };
        driver.check("cuDeviceGet", code).map_err(|failure| failure.while_doing(&what()))?;
        Ok(Self { driver, ordinal, device })
    }

    /// Its number.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> &'static CudaDriver {
        self.driver
    }

    /// Its name, as the driver reports it; empty if it does not.
    #[must_use]
    pub fn name(&self) -> String {
        let mut text = [0; 256];
        let Some(_call) = self.driver.begin_call() else { return String::new() };
        // SAFETY: the driver writes at most 255 bytes and a NUL.
        let code = unsafe { (self.driver.functions.device_name)(text.as_mut_ptr(), 255, self.device) };
        if code != 0 {
            return String::new();
        }
        // SAFETY: the last byte is zero, so there is a NUL.
        unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
    }

    /// An attribute; `None` if the driver does not know it.
    pub(super) fn attribute(&self, attribute: Attribute) -> Option<i32> {
        let _call = self.driver.begin_call()?;
        let mut value = 0;
        // SAFETY: the number is ours to write to; the handle is the driver's.
        let code = unsafe { (self.driver.functions.attribute)(&raw mut value, attribute as c_int, self.device) };
        (code == 0).then_some(value)
    }

    fn has(&self, attribute: Attribute) -> bool {
        self.attribute(attribute).is_some_and(|value| value != 0)
    }

    /// Whether memory of the host can be registered for it.
    #[must_use]
    pub fn registers_host_memory(&self) -> bool {
        self.has(Attribute::HostRegister) && self.has(Attribute::CanMapHostMemory)
    }

    /// Whether a kernel reaches registered memory at the host's own address.
    #[must_use]
    pub fn reaches_host_pointers(&self) -> bool {
        self.has(Attribute::HostPointerForRegistered)
    }

    /// Whether it has managed memory that host and device may use at the same time. Without that, a host that touches
    /// it while a kernel runs gets a SIGSEGV.
    #[must_use]
    pub fn has_concurrent_managed_memory(&self) -> bool {
        self.has(Attribute::ManagedMemory) && self.has(Attribute::ConcurrentManagedAccess)
    }

    /// Whether it reads any memory of the host, pinned or not; and whether by the host's own page tables (Grace).
    #[must_use]
    pub fn reads_pageable_memory(&self) -> (bool, bool) {
        (self.has(Attribute::PageableMemoryAccess), self.has(Attribute::UsesHostPageTables))
    }

    /// The NUMA node of the host that is nearest to it; `None` if that is unknown.
    #[must_use]
    pub fn numa_node(&self) -> Option<usize> {
        if let Some(node) = self.attribute(Attribute::HostNumaId) {
            return usize::try_from(node).ok();
        }
        // Drivers before CUDA 12.2 do not say: the system does.
        let [domain, bus, device] =
            [Attribute::PciDomain, Attribute::PciBus, Attribute::PciDevice].map(|attribute| self.attribute(attribute));
        let path = format!("/sys/bus/pci/devices/{:04x}:{:02x}:{:02x}.0/numa_node", domain?, bus?, device?);
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    }

    /// Makes its primary context this thread's current one, and retains that if nobody here did.
    pub(super) fn enter(&self) -> Result<Entered, Failure> {
        let driver = self.driver;
        let call = driver.begin_call().ok_or(Failure { call: "cuDevicePrimaryCtxRetain", code: 3 })?;
        let place = &driver.contexts[self.ordinal];
        let mut context = place.load(Ordering::Acquire);
        if context.is_null() {
            // SAFETY: the pointer is ours to write to. The reference is never given back: handlers live for ever.
            let code = unsafe { (driver.functions.retain)(&raw mut context, self.device) };
            driver.check("cuDevicePrimaryCtxRetain", code)?;
            // Two threads may both retain it: it is one context, with one reference more.
            place.store(context, Ordering::Release);
        }
        // SAFETY: a context that is retained.
        driver.check("cuCtxPushCurrent", unsafe { (driver.functions.push)(context) })?;
        let mut mode = RELAXED;
        // SAFETY: the number is ours to write to. `Entered` puts the mode back on this thread.
        let changed =
            driver.functions.exchange_capture_mode.is_some_and(|exchange| unsafe { exchange(&raw mut mode) } == 0);
        Ok(Entered { driver, context, mode: changed.then_some(mode), _call: call })
    }

    /// Whether its primary context exists, whoever made it.
    pub(super) fn is_active(&self) -> bool {
        if !self.driver.contexts[self.ordinal].load(Ordering::Acquire).is_null() {
            return true;
        }
        let (mut flags, mut active) = (0, 0);
        // SAFETY: both numbers are ours to write to; the handle is the driver's.
        let code = unsafe { (self.driver.functions.context_state)(self.device, &raw mut flags, &raw mut active) };
        code == 0 && active != 0
    }

    /// What the driver says of an address. In a child of `fork` all memory is pageable.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the device's context cannot be made, or the driver does not answer.
    pub fn kind_of(&self, address: usize) -> Result<CudaKind, Error> {
        if !self.driver.is_usable() || address == 0 {
            return Ok(CudaKind::Pageable);
        }
        let ask = || {
            let _entered = self.enter()?;
            Ok(match self.ask(address, MEMORY_TYPE)? {
                None => CudaKind::Pageable,
                Some(_) if self.ask(address, IS_MANAGED)?.is_some_and(|managed| managed & 0xff != 0) => {
                    CudaKind::Managed
                }
                Some(1) => CudaKind::Host,
                Some(_) => CudaKind::Device,
            })
        };
        ask().map_err(|failure: Failure| {
            failure.while_doing(&format!("the kind of memory at {address:#x} is not known"))
        })
    }

    /// The number of the device whose memory an address is; of pinned memory, the one that it was pinned on. `None` if
    /// CUDA does not know the address.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the device's context cannot be made, or the driver does not answer.
    pub fn owner_of(&self, address: usize) -> Result<Option<usize>, Error> {
        let ask = || {
            let _entered = self.enter()?;
            Ok(self.ask(address, DEVICE_ORDINAL)?.map(|ordinal| ordinal as usize))
        };
        ask().map_err(|failure: Failure| failure.while_doing(&format!("the device of {address:#x} is not known")))
    }

    /// An attribute of an address, in the current context. `None`: memory that CUDA does not know, which the driver
    /// calls an invalid value.
    fn ask(&self, address: usize, attribute: c_int) -> Result<Option<u32>, Failure> {
        let mut value: u64 = 0; // the widest of the attributes asked for
        // SAFETY: the driver writes 1 or 4 bytes to the number; it reads nothing at the address.
        let code =
            unsafe { (self.driver.functions.pointer_attribute)((&raw mut value).cast(), attribute, address as u64) };
        if code == INVALID_VALUE {
            return Ok(None);
        }
        self.driver.check("cuPointerGetAttribute", code).map(|()| Some(value as u32))
    }

    /// The address at which kernels reach pinned memory; `None` if they do not.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the device's context cannot be made, or the driver does not answer.
    pub fn device_address(&self, address: usize) -> Result<Option<usize>, Error> {
        let ask = || {
            let _entered = self.enter()?;
            let mut found = 0;
            let pointer: *mut u8 = std::ptr::without_provenance_mut(address);
            // SAFETY: the number is ours to write to; the driver takes any address and does not read there.
            let code = unsafe { (self.driver.functions.device_pointer)(&raw mut found, pointer.cast(), 0) };
            if matches!(code, INVALID_VALUE | NOT_REGISTERED) {
                return Ok(None);
            }
            self.driver.check("cuMemHostGetDevicePointer", code).map(|()| Some(found as usize))
        };
        ask().map_err(|failure: Failure| {
            failure.while_doing(&format!("it is not known where kernels reach the memory at {address:#x}"))
        })
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let (Some(mut mode), Some(exchange)) = (self.mode, self.driver.functions.exchange_capture_mode) {
            // SAFETY: the number is ours; it is the mode that this thread had.
            unsafe { exchange(&raw mut mode) };
        }
        let mut popped = null_mut();
        // SAFETY: `enter` pushed a context on this thread, and whoever pushed others since has popped them.
        unsafe { (self.driver.functions.pop)(&raw mut popped) };
    }
}

impl PartialEq for CudaDevice {
    fn eq(&self, other: &Self) -> bool {
        self.ordinal == other.ordinal
    }
}

impl Eq for CudaDevice {}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaDevice({})", self.ordinal)
    }
}
