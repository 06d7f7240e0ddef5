//! CUDA's pinned and managed memory, through the driver library `libcuda.so.1`, which is opened when first needed.
//!
//! `library` has the driver's functions, `failure` its error codes in our words, `device` contexts and questions,
//! `event` what work on the devices has passed, `pinned` and `managed` the memory as sources for pools. No call is made
//! in a child of `fork` or while the process ends; `inherited` keeps addresses free in the child. Decision 0047 has the
//! reasons.
#![allow(unsafe_code, reason = "the only door to the CUDA driver")]

mod device;
mod event;
mod failure;
mod inherited;
mod library;
mod managed;
mod pinned;

pub use device::{CudaDevice, CudaKind};
pub(crate) use event::Marks;
pub use library::CudaDriver;
pub use managed::CudaManaged;
pub use pinned::{CudaPinned, CudaPinnedOptions};

use super::Pages;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A source of CUDA's memory: what [`Quarantined`](crate::strategy::Quarantined) stands on.
pub trait CudaSource: Pages {
    /// The device that it maps for.
    fn device(&self) -> &CudaDevice;

    /// Whether its memory can be read and written in a child of `fork`.
    fn survives_fork(&self) -> bool;
}

/// How much is mapped, in all sources of the process.
static MAPPED_BYTES: AtomicUsize = AtomicUsize::new(0);
static MAPPINGS: AtomicUsize = AtomicUsize::new(0);
/// How often a registration was refused, and `cuMemHostAlloc` asked instead.
static FALLBACKS: AtomicUsize = AtomicUsize::new(0);

/// Notes a mapping of this many bytes.
fn note_mapped(size_bytes: usize) {
    MAPPED_BYTES.fetch_add(size_bytes, Ordering::Relaxed);
    MAPPINGS.fetch_add(1, Ordering::Relaxed);
}

/// Notes that one is gone.
fn note_unmapped(size_bytes: usize) {
    MAPPED_BYTES.fetch_sub(size_bytes, Ordering::Relaxed);
    MAPPINGS.fetch_sub(1, Ordering::Relaxed);
}

/// What all sources of CUDA's memory have mapped: bytes, mappings, and how many registrations were refused since the
/// start.
#[must_use]
pub fn cuda_mapped() -> (usize, usize, usize) {
    (MAPPED_BYTES.load(Ordering::Relaxed), MAPPINGS.load(Ordering::Relaxed), FALLBACKS.load(Ordering::Relaxed))
}
