//! `Marks`: events that stand for all work which was queued on the devices when they were recorded.

use super::device::CudaDevice;
use super::failure::{CONTEXT_IS_DESTROYED, Failure, NOT_READY};
use super::library::{CudaDriver, Ref, Spare};
use crate::error::Error;
use crate::unattributed::unattributed;
use std::ffi::c_uint;
use std::ptr::null_mut;
use std::sync::PoisonError;

/// `CU_EVENT_DISABLE_TIMING`: cheaper to record and to ask.
const WITHOUT_TIMING: c_uint = 2;

/// Recorded events, one for each device with a context; they go back to the spare ones when this is dropped.
#[derive(Debug)]
pub(crate) struct Marks {
    driver: &'static CudaDriver,
    events: Vec<(CudaDevice, Spare)>,
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
        let mut marks = Marks { driver: self, events: Vec::new() };
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

    /// Marks all work that was queued on one stream so far: a `CUstream` of the device's primary context, or 0 and 1
    /// for its default stream, 2 for this thread's.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the stream is not one of that device, or captures.
    ///
    /// # Safety
    /// - `stream` is 0, 1, 2, or a live stream.
    #[cfg_attr(not(feature = "python"), allow(dead_code, reason = "Python's `keep` asks"))]
    pub(crate) unsafe fn mark_stream(&'static self, device: CudaDevice, stream: usize) -> Result<Marks, Error> {
        let _unattributed = unattributed();
        let failed = |failure: Failure| {
            failure.while_doing(&format!(
                "no event was recorded on stream {stream:#x} of CUDA device {}",
                device.ordinal()
            ))
        };
        let _entered = device.enter().map_err(failed)?;
        let mut marks = Marks { driver: self, events: Vec::new() };
        let event = marks.add(device).map_err(failed)?;
        let stream: *mut u8 = std::ptr::with_exposed_provenance_mut(stream);
        // SAFETY: a live event of the current context, and a live stream (this function's contract).
        self.check("cuEventRecord", unsafe { (self.functions.record)(event, stream.cast()) }).map_err(failed)?;
        Ok(marks)
    }
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
