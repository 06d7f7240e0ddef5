//! A SYCL queue and what is done with it: USM asked for, looked at, copied, filled and given back.

use super::UsmKind;
use super::library::{PENDING, Ref, Runtime};
use crate::error::Error;
use std::ffi::{CStr, CString};
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A SYCL queue: a device, a context, and the order in which work is done. Cheap to clone: clones are the same queue.
///
/// [`copy`](Self::copy) comes after all that was submitted before, on queues that are not in order too.
#[derive(Clone)]
pub struct Queue {
    inner: Arc<Inner>,
}

struct Inner {
    runtime: &'static Runtime,
    queue: NonNull<std::ffi::c_void>,
    context: NonNull<std::ffi::c_void>,
    device: NonNull<std::ffi::c_void>,
    /// Which kinds of USM the device has.
    kinds: Vec<UsmKind>,
    is_alone: bool,
    device_name: String,
}

// SAFETY: SYCL's classes may be used by many threads at once (SYCL 2020, 4.5.2 and 4.6.5); the rest never changes.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Queue {
    /// A new queue on the device that `filter` names (`opencl:cpu:0`, `gpu`), or on SYCL's default device.
    ///
    /// # Errors
    /// [`Error::Sycl`]: there is no such device, or no queue can be made for it.
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
            // SAFETY: takes nothing.
            None => unsafe { (functions.default_selector)() },
            Some(filter) => {
                let text = CString::new(filter).map_err(|_| none())?;
                // SAFETY: a NUL-terminated text, which it copies.
                unsafe { (functions.filter_selector)(text.as_ptr()) }
            }
        };
        let selector = NonNull::new(selector).ok_or_else(none)?;
        // SAFETY: a selector; NULL where it finds no device.
        let device = NonNull::new(unsafe { (functions.device_from)(selector.as_ptr()) });
        // SAFETY: ours, used up.
        unsafe { (functions.delete_selector)(selector.as_ptr()) };
        let device = device.ok_or_else(none)?;
        // SAFETY: a device; no error handler, no properties.
        let queue = unsafe { (functions.queue_for)(device.as_ptr(), null_mut(), 0) };
        // SAFETY: ours; the queue has its own reference.
        unsafe { (functions.delete_device)(device.as_ptr()) };
        let queue = NonNull::new(queue).ok_or_else(|| Error::Sycl {
            what: "no queue could be made for the SYCL device".into(),
            advice: "choose another of dpctl.get_devices()",
        })?;
        // SAFETY: a queue, ours.
        unsafe { Self::own(runtime, queue) }
    }

    /// Somebody's queue, by its `DPCTLSyclQueueRef`: what `dpctl.SyclQueue.addressof_ref()` gives. They share it from now
    /// on.
    ///
    /// # Errors
    /// [`Error::Sycl`]: the address is 0, or the queue cannot be shared.
    ///
    /// # Safety
    /// - `address` is 0 or that of a live queue of the same library.
    pub unsafe fn share(runtime: &'static Runtime, address: usize) -> Result<Self, Error> {
        runtime.require_usable()?;
        let there: Ref = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: a live queue or NULL, says the caller.
        let queue = if address == 0 { null_mut() } else { unsafe { (runtime.functions.copy_queue)(there) } };
        let queue = NonNull::new(queue).ok_or_else(|| Error::Sycl {
            what: format!("the SYCL queue at {address:#x} cannot be shared"),
            advice: "give the addressof_ref() of a live dpctl.SyclQueue",
        })?;
        // SAFETY: a queue, ours.
        unsafe { Self::own(runtime, queue) }
    }

    /// # Safety
    /// - `queue` is a queue of the library; the reference is given up.
    unsafe fn own(runtime: &'static Runtime, queue: NonNull<std::ffi::c_void>) -> Result<Self, Error> {
        let functions = &runtime.functions;
        // SAFETY: a live queue of the library (`own`'s contract); so below.
        let context = NonNull::new(unsafe { (functions.queue_context)(queue.as_ptr()) });
        // SAFETY: the same queue.
        let device = NonNull::new(unsafe { (functions.queue_device)(queue.as_ptr()) });
        let (Some(context), Some(device)) = (context, device) else {
            if let Some(context) = context {
                // SAFETY: a reference that `queue_context` gave us, dropped once.
                unsafe { (functions.delete_context)(context.as_ptr()) };
            }
            if let Some(device) = device {
                // SAFETY: a reference that `queue_device` gave us, dropped once.
                unsafe { (functions.delete_device)(device.as_ptr()) };
            }
            // SAFETY: `own` was given this reference, and drops it once.
            unsafe { (functions.delete_queue)(queue.as_ptr()) };
            return Err(Error::Sycl {
                what: format!("the SYCL queue has no {}", if context.is_none() { "context" } else { "device" }),
                advice: "use another queue",
            });
        };
        // From here on dropped with all that belongs to it.
        let (kinds, device_name) = (Vec::new(), String::new());
        // SAFETY: the context that `queue_context` gave us.
        let is_alone = unsafe { (functions.context_devices)(context.as_ptr()) } == 1;
        let mut inner = Inner { runtime, queue, context, device, kinds, is_alone, device_name };
        for kind in [UsmKind::Device, UsmKind::Shared, UsmKind::Host] {
            // SAFETY: a device, and a number that it knows.
            if unsafe { (functions.has_aspect)(device.as_ptr(), kind.aspect()) } {
                inner.kinds.push(kind);
            }
        }
        // SAFETY: a device.
        let name = unsafe { (functions.device_name)(device.as_ptr()) };
        if !name.is_null() {
            // SAFETY: a NUL-terminated text, ours.
            inner.device_name = unsafe { CStr::from_ptr(name) }.to_string_lossy().trim().to_owned();
            // SAFETY: as above, given up.
            unsafe { (functions.delete_text)(name) };
        }
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The device's name, as its driver tells it.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.inner.device_name
    }

    /// Whether both have the same context and the same device: what one allocates is the other's too.
    ///
    /// A device and a part of it are two devices, also in one context: a queue on one part that copies another part's
    /// memory never ends.
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
        // SAFETY: two contexts of the one runtime that there is, each kept by its `Inner`.
        let is_same = unsafe { (functions.same_context)(one.context.as_ptr(), two.context.as_ptr()) };
        // SAFETY: two devices, kept in the same way.
        is_same && unsafe { (functions.same_device)(one.device.as_ptr(), two.device.as_ptr()) }
    }

    /// Whether its context has no other device, and so no memory but its own and the host's. In a context with more of
    /// them, nobody can say whose an address is: OpenCL's runtime names the first device for all.
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
    /// [`Error::Sycl`] where SYCL may not be called.
    pub(crate) fn require_usable(&self) -> Result<(), Error> {
        self.inner.runtime.require_usable()
    }

    /// Whether its device has memory of this kind.
    #[must_use]
    pub fn has(&self, kind: UsmKind) -> bool {
        self.inner.kinds.contains(&kind)
    }

    /// # Errors
    /// [`Error::Sycl`] where its device has no memory of this kind: asking for some would end the process.
    pub fn require(&self, kind: UsmKind) -> Result<(), Error> {
        if self.has(kind) {
            return Ok(());
        }
        Err(Error::Sycl {
            what: format!("device '{}' has no USM of the kind '{}'", self.device(), kind.name()),
            advice: "choose another kind or another device (some, as that of PoCL 3.1, have none at all)",
        })
    }

    /// What kind of memory lies at an address, for this queue's context; nothing where it is no USM, or another context's.
    #[must_use]
    pub fn kind_of(&self, address: usize) -> Option<UsmKind> {
        let inner = &*self.inner;
        // A platform without USM has no such question: dpctl's library would throw through us.
        if address == 0 || inner.kinds.is_empty() || !inner.runtime.is_usable() {
            return None;
        }
        let pointer = std::ptr::without_provenance(address);
        // SAFETY: any address may be asked; it is not read.
        UsmKind::of(unsafe { (inner.runtime.functions.pointer_type)(pointer, inner.context.as_ptr()) })
    }

    /// `size_bytes` of a kind at a multiple of `align`, a power of two; nothing where SYCL has none, or none of that kind.
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
        // SAFETY: a queue whose device has that kind; what is too much is NULL.
        let block = NonNull::new(unsafe { allocate(align, size_bytes, inner.queue.as_ptr()) })?.cast::<u8>();
        if block.addr().get().is_multiple_of(align) {
            return Some(block);
        }
        // SAFETY: just made, and nobody has it.
        let _ = unsafe { self.release(block) };
        None
    }

    /// Gives an allocation back. In a child of `fork`, and while the process ends, it stays.
    ///
    /// # Errors
    /// [`Error::Sycl`] where the address is no USM of this queue's context: freeing it would end the process.
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
        // SAFETY: USM of this context, as just seen; an allocation's start, given up, says the caller.
        unsafe { (inner.runtime.functions.free)(block.as_ptr().cast(), inner.queue.as_ptr()) };
        Ok(())
    }

    /// Copies bytes after all that was submitted so far, and waits until they are there.
    ///
    /// # Errors
    /// [`Error::Sycl`] where SYCL refuses.
    ///
    /// # Safety
    /// - `to` and `from` have that many bytes, on the host or in USM of this queue's context; they do not overlap.
    pub unsafe fn copy(&self, to: *mut u8, from: *const u8, size_bytes: usize) -> Result<(), Error> {
        if size_bytes > 0 {
            // A barrier would not do: it does not see what still waits for a task of the host, as dpnp's kernels do.
            self.wait();
            // SAFETY: passed on from the caller; alive until the event is over.
            unsafe { self.submit_copy(to, from, size_bytes) }?.wait();
        }
        Ok(())
    }

    /// Submits a copy of at least one byte. On a queue that is not in order nothing says when it comes:
    /// [`wait`](Self::wait) before it where it needs what was submitted, and for the event before anything needs it.
    ///
    /// # Errors
    /// [`Error::Sycl`] where SYCL refuses.
    ///
    /// # Safety
    /// - as for [`copy`](Self::copy), until the event is over; nobody else writes to either meanwhile, or reads `to`.
    pub unsafe fn submit_copy(&self, to: *mut u8, from: *const u8, size_bytes: usize) -> Result<Event, Error> {
        let inner = &*self.inner;
        inner.runtime.require_usable()?;
        let queue = inner.queue.as_ptr();
        // SAFETY: passed on from the caller.
        let event = unsafe { (inner.runtime.functions.memcpy)(queue, to.cast(), from.cast(), size_bytes) };
        self.event(event, "copy", size_bytes)
    }

    /// Copies rows of `row_bytes` after all that was submitted so far, and waits until they are there: as many as the
    /// axes' counts multiply to, each at the steps from the first one that the axes say. What lies between them is not
    /// touched. Nothing is done where a count or `row_bytes` is zero.
    ///
    /// # Errors
    /// [`Error::Sycl`] where SYCL refuses; some rows may be there.
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
            // SAFETY: the row that `done` names, which the caller vouches for until all is waited for below.
            let outcome = unsafe { self.submit_copy(to, from, row_bytes) };
            if outcome.is_err() || submitted.is_multiple_of(MAX_ROWS_SUBMITTED) {
                self.wait();
                outcome?;
            }
            // The next row, the last axis first.
            let Some(moving) = (0..axes.len()).rev().find(|&axis| done[axis] + 1 < axes[axis].count) else { break };
            for (axis, done) in axes.iter().zip(&mut done).skip(moving + 1) {
                let back = -(*done as isize);
                (to, from) = (to.wrapping_offset(back * axis.to_step), from.wrapping_offset(back * axis.from_step));
                *done = 0;
            }
            done[moving] += 1;
            (to, from) = (to.wrapping_offset(axes[moving].to_step), from.wrapping_offset(axes[moving].from_step));
        }
        self.wait();
        Ok(())
    }

    /// Sets bytes, and waits until it is done.
    ///
    /// # Errors
    /// [`Error::Sycl`] where SYCL refuses.
    ///
    /// # Safety
    /// - `start` has that many bytes, in USM of this queue's context, and nobody else uses them.
    pub unsafe fn fill(&self, start: NonNull<u8>, value: u8, size_bytes: usize) -> Result<(), Error> {
        let inner = &*self.inner;
        inner.runtime.require_usable()?;
        let queue = inner.queue.as_ptr();
        // SAFETY: passed on from the caller.
        let event = unsafe { (inner.runtime.functions.memset)(queue, start.as_ptr().cast(), value, size_bytes) };
        self.event(event, "fill", size_bytes)?.wait();
        Ok(())
    }

    /// Waits until all is done that was submitted so far.
    pub fn wait(&self) {
        if self.inner.runtime.is_usable() {
            // SAFETY: a queue.
            unsafe { (self.inner.runtime.functions.wait)(self.inner.queue.as_ptr()) }
        }
    }

    /// Something that the end of the process waits for: work that is not submitted yet.
    #[cfg(feature = "python")]
    pub(crate) fn hold(&self) -> Hold {
        Hold::new()
    }

    /// For a call of SYCL's on a thread that the end of the process does not wait for: while there is this, it does.
    /// Nothing where SYCL may not be called any more.
    pub(super) fn begin_call(&self) -> Option<Hold> {
        let hold = Hold::new();
        self.is_usable().then_some(hold)
    }

    fn event(&self, event: Ref, what: &str, size_bytes: usize) -> Result<Event, Error> {
        let event = NonNull::new(event).ok_or_else(|| Error::Sycl {
            what: format!("SYCL did not {what} {size_bytes} bytes on device '{}'", self.device()),
            advice: "see what it wrote to stderr (DPCTL_VERBOSITY=warning); both sides must be the host's or this queue's",
        })?;
        Ok(Event::new(self.inner.runtime, event))
    }
}

/// How [`Queue::copy_rows`] gets from one row to the next along one axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowAxis {
    /// How many rows there are along it.
    pub count: usize,
    /// Bytes from one to the next where they are written.
    pub to_step: isize,
    /// Bytes from one to the next where they are read.
    pub from_step: isize,
}

/// After so many rows it is waited for them: what is submitted takes memory until it is over.
const MAX_ROWS_SUBMITTED: usize = 4096;

/// What to say of an address that is not SYCL's.
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
        // SAFETY: two queues.
        Arc::ptr_eq(&self.inner, &other.inner)
            || unsafe { (one.runtime.functions.same_queue)(one.queue.as_ptr(), two.queue.as_ptr()) }
    }
}

impl Eq for Queue {}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.runtime.is_usable() {
            // SAFETY: a reference of our own, dropped once.
            unsafe { (self.runtime.functions.delete_context)(self.context.as_ptr()) };
            // SAFETY: a reference of our own, dropped once.
            unsafe { (self.runtime.functions.delete_device)(self.device.as_ptr()) };
            // SAFETY: as above.
            unsafe { (self.runtime.functions.delete_queue)(self.queue.as_ptr()) };
        }
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("device", &self.inner.device_name).finish()
    }
}

/// Something that was submitted.
#[derive(Debug)]
pub struct Event {
    runtime: &'static Runtime,
    event: NonNull<std::ffi::c_void>,
    _hold: Hold,
}

/// The end of the process waits a while for those that there are, so that SYCL's work is over.
#[derive(Debug)]
pub(crate) struct Hold(());

impl Hold {
    fn new() -> Self {
        PENDING.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        PENDING.fetch_sub(1, Ordering::Release);
    }
}

// SAFETY: as for `Inner`.
unsafe impl Send for Event {}

impl Event {
    fn new(runtime: &'static Runtime, event: NonNull<std::ffi::c_void>) -> Self {
        Self { runtime, event, _hold: Hold::new() }
    }

    /// Waits until it is done.
    pub fn wait(self) {
        if self.runtime.is_usable() {
            // SAFETY: an event.
            unsafe { (self.runtime.functions.wait_for)(self.event.as_ptr()) }
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.runtime.is_usable() {
            // SAFETY: ours, given up; what was submitted goes on.
            unsafe { (self.runtime.functions.delete_event)(self.event.as_ptr()) }
        }
    }
}
