//! A SYCL queue and its operations: to allocate, inspect, copy, fill and release USM.

use super::UsmKind;
use super::event::{Event, Hold};
use super::library::{Ref, Runtime};
use crate::error::Error;
use std::ffi::{CStr, CString};
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A SYCL queue: a device, a context, and an order of work. Clones are the same queue, and cloning is cheap.
///
/// [`copy`](Self::copy) runs after all work submitted before, also on out-of-order queues.
#[derive(Clone)]
pub struct Queue {
    inner: Arc<Inner>,
}

struct Inner {
    runtime: &'static Runtime,
    queue: NonNull<std::ffi::c_void>,
    context: NonNull<std::ffi::c_void>,
    device: NonNull<std::ffi::c_void>,
    /// The kinds of USM that the device has.
    kinds: Vec<UsmKind>,
    /// Whether the context has no other device.
    is_alone: bool,
    device_name: String,
    /// Held while a thread submits or waits for the whole queue: Intel's OpenCL runtime for processors (2026.2) reads
    /// freed commands where two threads do so at once on one queue that is out of order.
    turn: Mutex<()>,
}

// SAFETY: SYCL's objects may be used by several threads at once (SYCL 2020, 4.5.2 and 4.6.5), and belong to no thread.
unsafe impl Send for Inner {}
// SAFETY: SYCL's objects may be used by several threads at once, and the other fields never change.
unsafe impl Sync for Inner {}

impl Queue {
    /// A new queue on the device that `filter` names (`opencl:cpu:0`, `gpu`), or on SYCL's default device.
    ///
    /// # Errors
    /// [`Error::Sycl`] if there is no such device, or no queue can be made for it.
    pub fn open(runtime: &'static Runtime, filter: Option<&str>) -> Result<Self, Error> {
        runtime.require_usable()?;
        let functions = &runtime.functions;
        let none = || Error::Sycl {
            what: match filter {
                Some(filter) => format!("no SYCL device is named '{filter}'"),
                None => "there is no SYCL device".into(),
            },
            advice: "install intel-opencl-rt and set OCL_ICD_FILENAMES to its libintelocl.so before SYCL is first used, \
                     or choose one of dpctl.get_devices()",
        };
        let selector = match filter {
            // SAFETY: a function of the library that takes nothing.
            None => unsafe { (functions.default_selector)() },
            Some(filter) => {
                let text = CString::new(filter).map_err(|_| none())?;
                // SAFETY: a NUL-terminated string, which the function copies.
                unsafe { (functions.filter_selector)(text.as_ptr()) }
            }
        };
        let selector = NonNull::new(selector).ok_or_else(none)?;
        // SAFETY: a live selector of ours, deleted once, after its last use. The device is NULL if it finds none.
        let device = unsafe {
            let device = (functions.device_from)(selector.as_ptr());
            (functions.delete_selector)(selector.as_ptr());
            NonNull::new(device).ok_or_else(none)?
        };
        // SAFETY: a live device of ours; no error handler, no properties. The queue takes a reference of its own, and
        // ours is deleted once.
        let queue = unsafe {
            let queue = (functions.queue_for)(device.as_ptr(), null_mut(), 0);
            (functions.delete_device)(device.as_ptr());
            queue
        };
        let queue = NonNull::new(queue).ok_or_else(|| Error::Sycl {
            what: "no queue could be made for the SYCL device".into(),
            advice: "choose another of dpctl.get_devices()",
        })?;
        // SAFETY: `queue_for` has just returned this reference to a live queue, and `own` takes it over.
        unsafe { Self::own(runtime, queue) }
    }

    /// Shares an existing queue, by its `DPCTLSyclQueueRef`, which `dpctl.SyclQueue.addressof_ref()` returns.
    ///
    /// # Errors
    /// [`Error::Sycl`] if the address is 0, or the queue cannot be shared.
    ///
    /// # Safety
    /// - `address` is 0 or that of a live queue of the same library.
    pub unsafe fn share(runtime: &'static Runtime, address: usize) -> Result<Self, Error> {
        runtime.require_usable()?;
        let there: Ref = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the address of a live queue (this function's contract).
        let queue = if address == 0 { null_mut() } else { unsafe { (runtime.functions.copy_queue)(there) } };
        let queue = NonNull::new(queue).ok_or_else(|| Error::Sycl {
            what: format!("the SYCL queue at {address:#x} cannot be shared"),
            advice: "give the addressof_ref() of a live dpctl.SyclQueue",
        })?;
        // SAFETY: `copy_queue` has just returned this reference to a live queue, and `own` takes it over.
        unsafe { Self::own(runtime, queue) }
    }

    /// # Safety
    /// - `queue` is a live queue of the library; the caller gives up its reference.
    unsafe fn own(runtime: &'static Runtime, queue: NonNull<std::ffi::c_void>) -> Result<Self, Error> {
        let functions = &runtime.functions;
        // SAFETY: a live queue of the library (this function's contract).
        let (context, device) = unsafe {
            let context = (functions.queue_context)(queue.as_ptr());
            (NonNull::new(context), NonNull::new((functions.queue_device)(queue.as_ptr())))
        };
        let (Some(context), Some(device)) = (context, device) else {
            // SAFETY: references that the two calls above returned, and the one that this function was given, each
            // deleted once.
            unsafe {
                if let Some(context) = context {
                    (functions.delete_context)(context.as_ptr());
                }
                if let Some(device) = device {
                    (functions.delete_device)(device.as_ptr());
                }
                (functions.delete_queue)(queue.as_ptr());
            }
            return Err(Error::Sycl {
                what: format!("the SYCL queue has no {}", if context.is_none() { "context" } else { "device" }),
                advice: "use another queue",
            });
        };
        // From here on `Inner` owns all three references.
        let (kinds, device_name) = (Vec::new(), String::new());
        // SAFETY: the context is live: the reference that was returned above is not deleted yet.
        let is_alone = unsafe { (functions.context_devices)(context.as_ptr()) } == 1;
        let mut inner = Inner { runtime, queue, context, device, kinds, is_alone, device_name, turn: Mutex::new(()) };
        for kind in [UsmKind::Device, UsmKind::Shared, UsmKind::Host] {
            // SAFETY: the device is live, by the reference that was returned above; any number may be asked for.
            if unsafe { (functions.has_aspect)(device.as_ptr(), kind.aspect()) } {
                inner.kinds.push(kind);
            }
        }
        // SAFETY: a live device of ours. The name is NULL or a NUL-terminated string of ours, deleted once after its
        // last use.
        unsafe {
            let name = (functions.device_name)(device.as_ptr());
            if !name.is_null() {
                inner.device_name = CStr::from_ptr(name).to_string_lossy().trim().to_owned();
                (functions.delete_text)(name);
            }
        }
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The device's name, as its driver reports it.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.inner.device_name
    }

    /// Whether both have the same context and the same device, so that one can use memory that the other allocates.
    ///
    /// A device and a sub-device of it are two devices, even in one context: a queue on one sub-device that copies
    /// memory of another one never finishes.
    #[must_use]
    pub fn shares_memory_with(&self, other: &Self) -> bool {
        let (one, two) = (&*self.inner, &*other.inner);
        let functions = &one.runtime.functions;
        if Arc::ptr_eq(&self.inner, &other.inner) {
            return true;
        }
        if !one.runtime.is_usable() {
            return false;
        }
        // SAFETY: live contexts and devices of the process's one runtime, each kept by its `Inner`.
        unsafe {
            (functions.same_context)(one.context.as_ptr(), two.context.as_ptr())
                && (functions.same_device)(one.device.as_ptr(), two.device.as_ptr())
        }
    }

    /// Whether its context has no other device, and so no memory but this device's and the host's. In a context with
    /// several devices it is unknown which one an address belongs to: OpenCL's runtime names the first one for all.
    #[must_use]
    pub fn is_alone_in_its_context(&self) -> bool {
        self.inner.is_alone
    }

    /// Whether SYCL may be called: not in a child of `fork`, and not while the process ends.
    #[must_use]
    pub(crate) fn is_usable(&self) -> bool {
        self.inner.runtime.is_usable()
    }

    /// # Errors
    /// [`Error::Sycl`] if SYCL must not be called.
    pub(crate) fn require_usable(&self) -> Result<(), Error> {
        self.inner.runtime.require_usable()
    }

    /// Whether its device has memory of this kind.
    #[must_use]
    pub fn has(&self, kind: UsmKind) -> bool {
        self.inner.kinds.contains(&kind)
    }

    /// # Errors
    /// [`Error::Sycl`] if its device has no memory of this kind, of which a request would end the process.
    pub fn require(&self, kind: UsmKind) -> Result<(), Error> {
        if self.has(kind) {
            return Ok(());
        }
        Err(Error::Sycl {
            what: format!("device '{}' has no USM of the kind '{}'", self.device(), kind.name()),
            advice: "choose another kind or another device (some, as that of PoCL 3.1, have none at all)",
        })
    }

    /// The kind of USM at an address, for this queue's context; `None` if it is not USM, or USM of another context.
    #[must_use]
    pub fn kind_of(&self, address: usize) -> Option<UsmKind> {
        let inner = &*self.inner;
        // On a platform without USM the call would throw a C++ exception through this frame.
        if address == 0 || inner.kinds.is_empty() || !inner.runtime.is_usable() {
            return None;
        }
        let pointer = std::ptr::without_provenance(address);
        // SAFETY: the call takes any address and does not read it; the context is live.
        UsmKind::of(unsafe { (inner.runtime.functions.pointer_type)(pointer, inner.context.as_ptr()) })
    }

    /// Allocates `size_bytes` at a multiple of `align`, a power of two; `None` if SYCL has no memory, or none of that
    /// kind.
    #[must_use]
    pub fn allocate(&self, kind: UsmKind, size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
        let inner = &*self.inner;
        if !self.has(kind) || !inner.runtime.is_usable() {
            return None;
        }
        let functions = &inner.runtime.functions;
        let allocate = match kind {
            UsmKind::Device => functions.allocate_device,
            UsmKind::Shared => functions.allocate_shared,
            UsmKind::Host => functions.allocate_host,
        };
        // SAFETY: a live queue whose device has that kind; the call returns NULL if it has too little.
        let block = NonNull::new(unsafe { allocate(align, size_bytes, inner.queue.as_ptr()) })?.cast::<u8>();
        if block.addr().get().is_multiple_of(align) {
            return Some(block);
        }
        // SAFETY: just allocated, and nobody else has it.
        let _ = unsafe { self.release(block) };
        None
    }

    /// Frees an allocation. In a child of `fork`, and while the process exits, it does nothing.
    ///
    /// # Errors
    /// [`Error::Sycl`] if the address is not USM of this queue's context: freeing it would end the process.
    ///
    /// # Safety
    /// - `block` is from [`allocate`](Self::allocate), was not released, and nobody uses it any more.
    pub unsafe fn release(&self, block: NonNull<u8>) -> Result<(), Error> {
        let inner = &*self.inner;
        if !inner.runtime.is_usable() {
            return Ok(());
        }
        if self.kind_of(block.addr().get()).is_none() {
            return Err(not_usm(block.addr().get()));
        }
        // SAFETY: USM of this context, as checked above; the start of an allocation that is not used again (this
        // function's contract).
        unsafe { (inner.runtime.functions.free)(block.as_ptr().cast(), inner.queue.as_ptr()) };
        Ok(())
    }

    /// Copies bytes after all work submitted so far, and waits for it.
    ///
    /// # Errors
    /// [`Error::Sycl`] if SYCL refuses.
    ///
    /// # Safety
    /// - `to` and `from` have that many bytes, on the host or in USM of this queue's context; they do not overlap.
    pub unsafe fn copy(&self, to: *mut u8, from: *const u8, size_bytes: usize) -> Result<(), Error> {
        if size_bytes > 0 {
            // A barrier would not do: it does not wait for work that itself waits for a host task, as dpnp's kernels
            // do.
            self.wait();
            // SAFETY: this function has the same contract, and it waits for the event.
            unsafe { self.submit_copy(to, from, size_bytes) }?.wait();
        }
        Ok(())
    }

    /// Submits a copy of at least one byte. An out-of-order queue may run it at any time: [`wait`](Self::wait) first if
    /// it needs earlier work, and wait for the event before using the result.
    ///
    /// # Errors
    /// [`Error::Sycl`] if SYCL refuses.
    ///
    /// # Safety
    /// - as for [`copy`](Self::copy), until the event has finished; until then nobody writes to either or reads `to`.
    pub unsafe fn submit_copy(&self, to: *mut u8, from: *const u8, size_bytes: usize) -> Result<Event, Error> {
        let memcpy = self.inner.runtime.functions.memcpy;
        // SAFETY: both sides have that many bytes until the event has finished (this function's contract); the queue is
        // live.
        self.submit("copy", size_bytes, |queue| unsafe { memcpy(queue, to.cast(), from.cast(), size_bytes) })
    }

    /// Copies rows of `row_bytes` after all work submitted so far, and waits for it. The number of rows is the product
    /// of the axes' counts, and the axes' steps say where each row lies from the first. Bytes between rows are not
    /// touched. Does nothing if a count or `row_bytes` is zero.
    ///
    /// # Errors
    /// [`Error::Sycl`] if SYCL refuses; some rows may have been copied.
    ///
    /// # Safety
    /// - each row has that many bytes on both sides, on the host or in USM of this queue's context; no row that is
    ///   written overlaps another row of either side.
    pub unsafe fn copy_rows(
        &self,
        to: *mut u8,
        from: *const u8,
        row_bytes: usize,
        axes: &[RowAxis],
    ) -> Result<(), Error> {
        if row_bytes == 0 || axes.iter().any(|axis| axis.count == 0) {
            return Ok(());
        }
        self.wait();
        let mut done: Vec<usize> = vec![0; axes.len()];
        let (mut to, mut from) = (to, from);
        for submitted in 1_usize.. {
            // SAFETY: the row that `done` names has `row_bytes` on both sides and overlaps no other (this function's
            // contract), and all copies are waited for before this function returns.
            let outcome = unsafe { self.submit_copy(to, from, row_bytes) };
            if outcome.is_err() || submitted.is_multiple_of(MAX_ROWS_SUBMITTED) {
                self.wait();
                outcome?;
            }
            // Advances to the next row, along the last axis first.
            let Some(moving) = (0..axes.len()).rev().find(|&axis| done[axis] + 1 < axes[axis].count) else { break };
            for (axis, done) in axes.iter().zip(&mut done).skip(moving + 1) {
                let back = -(*done as isize);
                (to, from) = (
                    to.wrapping_offset(back * axis.to_stride_bytes),
                    from.wrapping_offset(back * axis.from_stride_bytes),
                );
                *done = 0;
            }
            done[moving] += 1;
            (to, from) = (
                to.wrapping_offset(axes[moving].to_stride_bytes),
                from.wrapping_offset(axes[moving].from_stride_bytes),
            );
        }
        self.wait();
        Ok(())
    }

    /// Sets bytes to `value`, and waits for it.
    ///
    /// # Errors
    /// [`Error::Sycl`] if SYCL refuses.
    ///
    /// # Safety
    /// - `start` has that many bytes, in USM of this queue's context, and nobody else uses them.
    pub unsafe fn fill(&self, start: NonNull<u8>, value: u8, size_bytes: usize) -> Result<(), Error> {
        let memset = self.inner.runtime.functions.memset;
        // SAFETY: USM of this context with that many bytes that nobody else uses (this function's contract); the event
        // is waited for.
        let fill = |queue| unsafe { memset(queue, start.as_ptr().cast(), value, size_bytes) };
        self.submit("fill", size_bytes, fill)?.wait();
        Ok(())
    }

    /// Waits for all work submitted so far.
    pub fn wait(&self) {
        if let Some(_turn) = self.begin_turn() {
            // SAFETY: the queue is live: `inner` owns a reference to it.
            unsafe { (self.inner.runtime.functions.wait)(self.inner.queue.as_ptr()) }
        }
    }

    /// Makes the exit of the process wait for work that is not submitted yet, until the hold is dropped.
    #[cfg(feature = "python")]
    pub(crate) fn hold(&self) -> Hold {
        Hold::new()
    }

    /// Makes the exit of the process wait for a call of SYCL on another thread, until the hold is dropped. `None` if
    /// SYCL must not be called any more.
    pub(super) fn begin_call(&self) -> Option<Hold> {
        let hold = Hold::new();
        self.is_usable().then_some(hold)
    }

    /// As `begin_call`, and no other thread submits to this queue or waits for all of it meanwhile.
    fn begin_turn(&self) -> Option<(MutexGuard<'_, ()>, Hold)> {
        let hold = self.begin_call()?;
        Some((self.inner.turn.lock().unwrap_or_else(PoisonError::into_inner), hold)) // it guards no data
    }

    fn submit(&self, what: &str, size_bytes: usize, call: impl FnOnce(Ref) -> Ref) -> Result<Event, Error> {
        let runtime = self.inner.runtime;
        let _turn = self.begin_turn().ok_or_else(|| runtime.unusable())?; // until the event has a hold of its own
        let event = NonNull::new(call(self.inner.queue.as_ptr())).ok_or_else(|| Error::Sycl {
            what: format!("SYCL did not {what} {size_bytes} bytes on device '{}'", self.device()),
            advice: "see what it wrote to stderr (DPCTL_VERBOSITY=warning); both sides must be the host's or this queue's",
        })?;
        Ok(Event::new(runtime, event))
    }
}

/// The strides of [`Queue::copy_rows`] along one axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RowAxis {
    /// The number of rows along the axis.
    pub count: usize,
    /// Bytes from one row to the next on the side that is written.
    pub to_stride_bytes: isize,
    /// Bytes from one row to the next on the side that is read.
    pub from_stride_bytes: isize,
}

impl RowAxis {
    /// `count` rows, with so many bytes from one to the next where they are written and where they are read.
    #[must_use]
    pub const fn new(count: usize, to_stride_bytes: isize, from_stride_bytes: isize) -> Self {
        Self { count, to_stride_bytes, from_stride_bytes }
    }
}

/// `copy_rows` waits after this many rows, since each submitted copy takes memory until it has finished.
const MAX_ROWS_SUBMITTED: usize = 4096;

/// The error for an address that is not USM of a queue's context.
pub(super) fn not_usm(address: usize) -> Error {
    Error::Sycl {
        what: format!("the address {address:#x} is no USM of this queue's context"),
        advice: "give the queue whose context it belongs to, or make the memory with ctxalloc.usm",
    }
}

impl PartialEq for Queue {
    /// Whether both are the same `sycl::queue`.
    fn eq(&self, other: &Self) -> bool {
        let (one, two) = (&*self.inner, &*other.inner);
        // SAFETY: both queues are live: each `Inner` owns a reference to its own.
        Arc::ptr_eq(&self.inner, &other.inner)
            || unsafe { (one.runtime.functions.same_queue)(one.queue.as_ptr(), two.queue.as_ptr()) }
    }
}

impl Eq for Queue {}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.runtime.is_usable() {
            // SAFETY: three references that this value owns, each deleted once.
            unsafe {
                (self.runtime.functions.delete_context)(self.context.as_ptr());
                (self.runtime.functions.delete_device)(self.device.as_ptr());
                (self.runtime.functions.delete_queue)(self.queue.as_ptr());
            }
        }
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("device", &self.inner.device_name).finish()
    }
}
