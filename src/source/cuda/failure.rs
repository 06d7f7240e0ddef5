//! The driver's error codes: their names, and what to do about each.

use crate::error::Error;
use std::ffi::c_int;

/// A call that did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The driver's function.
    pub(crate) call: &'static str,
    /// Its `CUresult`.
    pub(crate) code: c_int,
}

/// `CUDA_ERROR_INVALID_VALUE`, also of an address that CUDA does not know.
pub(super) const INVALID_VALUE: c_int = 1;
/// `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED`.
pub(super) const NOT_REGISTERED: c_int = 713;
/// `CUDA_ERROR_NOT_FOUND`, also of a function of the driver's.
pub(super) const NOT_FOUND: c_int = 500;
/// Some work that the event stands for is not done (`CUDA_ERROR_NOT_READY`).
pub(super) const NOT_READY: c_int = 600;
/// `CUDA_ERROR_DEINITIALIZED`: the driver shuts down with the process.
pub(super) const DEINITIALIZED: c_int = 4;
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`: a graph is captured, of which this cannot be a part.
pub(super) const CAPTURES: c_int = 900;
/// `CUDA_ERROR_CONTEXT_IS_DESTROYED`: whatever ran in it has ended.
pub(super) const CONTEXT_IS_DESTROYED: c_int = 709;

const KERNEL_FAILED: &str = "a kernel failed, and the context is lost: begin the process anew";

/// Code, name in cuda.h, and what to do.
const KNOWN: &[(c_int, &str, &str)] = &[
    (INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "report it, with the output of ctxalloc.cuda.info()"),
    (
        2,
        "CUDA_ERROR_OUT_OF_MEMORY",
        "free memory of the host or the device; a container's memory.max limits pinned pages too",
    ),
    (3, "CUDA_ERROR_NOT_INITIALIZED", "CUDA cannot be used in a child of fork: start workers with 'spawn'"),
    (DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "the process ends: end threads that use CUDA before it does"),
    (
        34,
        "CUDA_ERROR_STUB_LIBRARY",
        "libcuda.so.1 is the toolkit's stub, for linking only: take its folder out of LD_LIBRARY_PATH, and install the \
         NVIDIA driver",
    ),
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "another process has the device for itself: see nvidia-smi -q -d COMPUTE"),
    (
        100,
        "CUDA_ERROR_NO_DEVICE",
        "the driver is there and sees no device: check nvidia-smi, CUDA_VISIBLE_DEVICES, and the container's --gpus",
    ),
    (101, "CUDA_ERROR_INVALID_DEVICE", "give a number from 0 up, below the number of devices"),
    (201, "CUDA_ERROR_INVALID_CONTEXT", "the device was reset: begin the process anew"),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE", "the device's memory is damaged, and the context is lost: see nvidia-smi -q"),
    (220, "CUDA_ERROR_NVLINK_UNCORRECTABLE", "a link between devices failed, and the context is lost: see dmesg"),
    (400, "CUDA_ERROR_INVALID_HANDLE", "the stream is gone, or is another device's: name its device with device="),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS", "a kernel accessed what it must not, and the context is lost: restart"),
    (702, "CUDA_ERROR_LAUNCH_TIMEOUT", "a kernel ran too long, and the context is lost: begin the process anew"),
    (CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "the device was reset: begin the process anew"),
    (710, "CUDA_ERROR_ASSERT", "an assertion in a kernel failed, and the context is lost: begin the process anew"),
    (712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "report it, with the output of ctxalloc.cuda.info()"),
    (NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "report it, with the output of ctxalloc.cuda.info()"),
    (714, "CUDA_ERROR_HARDWARE_STACK_ERROR", KERNEL_FAILED),
    (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", KERNEL_FAILED),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS", KERNEL_FAILED),
    (717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", KERNEL_FAILED),
    (718, "CUDA_ERROR_INVALID_PC", KERNEL_FAILED),
    (719, "CUDA_ERROR_LAUNCH_FAILED", KERNEL_FAILED),
    (801, "CUDA_ERROR_NOT_SUPPORTED", "the device or the system does not have it: see ctxalloc.cuda.info()"),
    (802, "CUDA_ERROR_SYSTEM_NOT_READY", "the system's services for CUDA do not run: see nvidia-fabricmanager"),
    (
        803,
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "the kernel's NVIDIA module and libcuda.so.1 are of different versions: reboot after an update of the driver, or \
         give the container the host's libcuda.so.1",
    ),
    (
        CAPTURES,
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        "a stream captures a graph: enclose the capture in ctxalloc.cuda.capturing()",
    ),
    (
        901,
        "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        "a capture was interrupted: enclose it in ctxalloc.cuda.capturing()",
    ),
    (
        906,
        "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        "a stream captures a graph, which work on the default stream would join: name the stream of the work",
    ),
    (999, "CUDA_ERROR_UNKNOWN", "see dmesg; a restart of the process or the machine may help"),
];

impl Failure {
    /// Its name in cuda.h; that of `CUDA_ERROR_UNKNOWN`'s kind for codes that are not known here.
    pub(crate) fn name(self) -> &'static str {
        self.known().map_or("an error that is not known here", |known| known.1)
    }

    /// Whether no call in that context succeeds any more: cuda.h says of these that the process must begin anew.
    pub(super) fn loses_context(self) -> bool {
        matches!(self.code, 214 | 220 | 700 | 702 | 710 | 714..=719)
    }

    fn known(self) -> Option<&'static (c_int, &'static str, &'static str)> {
        KNOWN.iter().find(|known| known.0 == self.code)
    }

    /// As an error; `what` completes "... failed", with the values.
    pub(crate) fn while_doing(self, what: &str) -> Error {
        Error::Cuda {
            what: format!("{what}: {} returned {} ({})", self.call, self.name(), self.code),
            code: self.code,
            advice: self.known().map_or("see the driver's documentation of this code", |known| known.2),
        }
    }
}
