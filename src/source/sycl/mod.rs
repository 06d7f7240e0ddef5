//! SYCL's unified shared memory (USM), by way of dpctl's C library `libDPCTLSyclInterface.so`, opened at run time.
//!
//! The library ends the process where it is used wrongly (a kind that the device has not, a pointer that is not USM or
//! was freed), so everything is asked for before it is done; all that fails is a value. `library` has its functions,
//! `queue` what is done with one queue, `pages` the memory as a source for pools. Decision 0017 says why dpctl's.
#![allow(unsafe_code, reason = "the only door to dpctl's C library")]

mod library;
mod pages;
mod queue;

pub use library::Runtime;
pub use pages::UsmPages;
pub use queue::{Event, Queue, RowAxis};

/// Who can reach an allocation of USM (SYCL 2020, 4.8.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UsmKind {
    /// On the device; the host cannot read it.
    Device,
    /// Moves between host and device as either touches it.
    Shared,
    /// On the host; the device reads it from there.
    Host,
}

impl UsmKind {
    /// `device`, `shared` or `host`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Shared => "shared",
            Self::Host => "host",
        }
    }

    /// Whether the host can read and write such memory.
    #[must_use]
    pub const fn is_host_accessible(self) -> bool {
        !matches!(self, Self::Device)
    }

    /// As `DPCTLSyclUSMType` has them; 0 and anything else is no USM of the context that was asked.
    const fn of(number: i32) -> Option<Self> {
        match number {
            1 => Some(Self::Device),
            2 => Some(Self::Shared),
            3 => Some(Self::Host),
            _ => None,
        }
    }

    /// The `DPCTLSyclAspectType` that a device must have.
    const fn aspect(self) -> i32 {
        match self {
            Self::Device => 12,
            Self::Host => 13,
            Self::Shared => 14,
        }
    }
}
