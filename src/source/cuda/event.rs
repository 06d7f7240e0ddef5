//! `Marks`: events that stand for all work which was queued on the devices when they were recorded.
//!
//! An event belongs to a context, and ends with it. So in a context of the user's own none is made: a host function,
//! queued on the stream there, says when the work before it is done.

use super::device::CudaDevice;
use super::failure::{CAPTURES, CONTEXT_IS_DESTROYED, Failure, NOT_READY};
use super::library::{CudaDriver, Ref, Spare};
use crate::error::Error;
use crate::unattributed::unattributed;
use std::ffi::c_uint;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

/// `CU_EVENT_DISABLE_TIMING`: cheaper to record and to ask.
const WITHOUT_TIMING: c_uint = 2;

/// Recorded events, one for each device with a context; they go back to the spare ones when this is dropped.
#[derive(Debug)]
pub(crate) struct Marks {
    driver: &'static CudaDriver,
    events: Vec<(CudaDevice, Spare)>,
    /// Set when the work in a context of the user's own is done.
    is_done: Option<Arc<AtomicBool>>,
}

impl CudaDriver {
    /// Marks all work that was queued so far, on all streams of all devices' primary contexts.
    ///
    /// # Errors
    /// The call that failed: no memory, a driver before CUDA 12.5, or a stream that captures, whose capture is then
    /// invalid.
    pub(crate) fn mark(&'static self) -> Result<Marks, Failure> {
        let record = self.functions.record_context.ok_or(Failure { call: "cuCtxRecordEvent", code: 801 })?;
        let _unattributed = unattributed();
        let mut marks = Marks { driver: self, events: Vec::new(), is_done: None };
        for ordinal in 0..self.devices() {
            let Ok(device) = CudaDevice::open(self, ordinal) else { continue };
            if !device.is_active() {
                continue; // nothing was ever queued there
            }
            let entered = device.enter()?;
            let event = marks.add(device)?;
            // SAFETY: the device's own context, and an event that was made in it.
            self.check("cuCtxRecordEvent", unsafe { record(entered.context, event) })?;
        }
        Ok(marks)
    }

    /// Marks all work that was queued on one stream so far: a `CUstream` of any context of the device, or 0 and 1 for
    /// the default stream of its primary context, 2 for this thread's.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the stream is not one of that device, or captures.
    ///
    /// # Safety
    /// - `stream` is 0, 1, 2, or a live stream.
    #[cfg_attr(not(feature = "python"), allow(dead_code, reason = "Python's `keep` asks"))]
    pub(crate) unsafe fn mark_stream(&'static self, device: CudaDevice, stream: usize) -> Result<Marks, Error> {
        let _unattributed = unattributed();
        let mark = || {
            let entered = device.enter()?;
            let mut marks = Marks { driver: self, events: Vec::new(), is_done: None };
            let handle: *mut u8 = std::ptr::with_exposed_provenance_mut(stream);
            // SAFETY: a live stream (this function's contract).
            let context = unsafe { self.context_of(handle.cast(), entered.context) }?;
            if context == entered.context {
                let event = marks.add(device)?;
                // SAFETY: a live event of the current context, and a live stream of it.
                self.check("cuEventRecord", unsafe { (self.functions.record)(event, handle.cast()) })?;
            } else {
                // SAFETY: a live stream, and the context that the driver named for it.
                marks.is_done = Some(unsafe { self.queue_flag(handle.cast(), context) }?);
            }
            Ok(marks)
        };
        mark().map_err(|failure: Failure| {
            let ordinal = device.ordinal();
            failure.while_doing(&format!("no event was recorded on stream {stream:#x} of CUDA device {ordinal}"))
        })
    }

    /// The context of a stream that does not capture: `current`, where the driver does not say.
    ///
    /// # Safety
    /// - `stream` is 0, 1, 2, or a live stream.
    unsafe fn context_of(&self, stream: Ref, current: Ref) -> Result<Ref, Failure> {
        if let Some(is_capturing) = self.functions.is_capturing {
            let mut status = 0;
            // SAFETY: a live stream (this function's contract); the number is ours to write to.
            self.check("cuStreamIsCapturing", unsafe { is_capturing(stream, &raw mut status) })?;
            if status != 0 {
                // Recorded, the event would become a part of the graph, and never be done.
                return Err(Failure { call: "cuEventRecord", code: CAPTURES });
            }
        }
        let mut context = current;
        if let Some(ask) = self.functions.stream_context
            && stream.addr() > 2
        {
            // SAFETY: a live stream (this function's contract); the pointer is ours to write to.
            self.check("cuStreamGetCtx", unsafe { ask(stream, &raw mut context) })?;
        }
        Ok(context)
    }

    /// Queues a host function that sets the flag returned.
    ///
    /// # Safety
    /// - `stream` is a live stream of `context`, which is live.
    unsafe fn queue_flag(&self, stream: Ref, context: Ref) -> Result<Arc<AtomicBool>, Failure> {
        let queue = self.functions.launch_host.ok_or(Failure { call: "cuLaunchHostFunc", code: 801 })?;
        let flag = Arc::new(AtomicBool::new(false));
        let given = Arc::into_raw(Arc::clone(&flag));
        // SAFETY: a live context (this function's contract), popped below.
        self.check("cuCtxPushCurrent", unsafe { (self.functions.push)(context) })?;
        // SAFETY: a live stream. The function runs once at most, and owns what it is given.
        let code = unsafe { queue(stream, set_flag, given.cast_mut().cast()) };
        let mut popped = null_mut();
        // SAFETY: the context pushed above is on top of this thread's.
        unsafe { (self.functions.pop)(&raw mut popped) };
        self.check("cuLaunchHostFunc", code)?; // what was given stays: nobody knows whether the function will run
        Ok(flag)
    }
}

/// On a thread of the driver's, which calls nothing of the driver's here.
extern "C" fn set_flag(given: Ref) {
    // SAFETY: `queue_flag` gave this reference, for one call.
    let flag: Arc<AtomicBool> = unsafe { Arc::from_raw(given.cast::<AtomicBool>().cast_const()) };
    flag.store(true, Ordering::Release);
}

impl Marks {
    /// Adds an event of a device, whose context is the current one.
    fn add(&mut self, device: CudaDevice) -> Result<Ref, Failure> {
        let mut spare = self.driver.spare_events.lock().unwrap_or_else(PoisonError::into_inner);
        let found = spare.iter().position(|spare| spare.ordinal == device.ordinal()).map(|at| spare.swap_remove(at));
        drop(spare);
        let spare = match found {
            Some(spare) => spare,
            None => {
                let mut event = null_mut();
                // SAFETY: the pointer is ours to write to.
                let code = unsafe { (self.driver.functions.create_event)(&raw mut event, WITHOUT_TIMING) };
                self.driver.check("cuEventCreate", code)?;
                Spare { ordinal: device.ordinal(), event }
            }
        };
        let event = spare.event;
        self.events.push((device, spare));
        Ok(event)
    }

    /// Whether all that was marked is done.
    ///
    /// # Errors
    /// The call that failed: then it is not known whether the work is done, or ever will be.
    pub(crate) fn are_done(&self) -> Result<bool, Failure> {
        if self.is_done.as_ref().is_some_and(|is_done| !is_done.load(Ordering::Acquire)) {
            return Ok(false);
        }
        for (device, spare) in &self.events {
            let _entered = match device.enter() {
                Err(failure) if failure.code == CONTEXT_IS_DESTROYED => continue,
                entered => entered?,
            };
            // SAFETY: an event that this value owns, recorded once.
            match unsafe { (self.driver.functions.query)(spare.event) } {
                0 | CONTEXT_IS_DESTROYED => {} // nothing runs in a context that is gone
                NOT_READY => return Ok(false),
                code => self.driver.check("cuEventQuery", code)?,
            }
        }
        Ok(true)
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        if self.driver.is_usable() {
            let _unattributed = unattributed();
            let mut spare = self.driver.spare_events.lock().unwrap_or_else(PoisonError::into_inner);
            spare.extend(self.events.drain(..).map(|(_, event)| event));
        }
    }
}
