//! SYCL's unified shared memory (USM), through dpctl's C library `libDPCTLSyclInterface.so`, which is opened at run
//! time.
//!
//! The library ends the process when it is used wrongly (a kind that the device does not have, a pointer that is not
//! USM or was freed). So everything is checked before it is done, and all failures are values. `library` has the
//! functions, `queue` the operations of a queue, `event` those under way, `pages` the memory as a source for pools.
//! Decision 0017 says why it is dpctl's library.
#![allow(unsafe_code, reason = "the only door to dpctl's C library")]

mod event;
mod library;
mod pages;
mod queue;

pub use event::Event;
pub use library::Runtime;
pub use pages::UsmPages;
pub use queue::{Queue, RowAxis};

/// Which side can access an allocation of USM (SYCL 2020, 4.8.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UsmKind {
    /// On the device; the host cannot read it.
    Device,
    /// Moves between host and device as either accesses it.
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

    /// By the number in `DPCTLSyclUSMType`. 0, or any other number, means that it is not USM of the context.
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
