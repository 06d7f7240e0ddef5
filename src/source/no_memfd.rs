//! Takes the place of `memfd.rs` on systems other than Linux, which have no memory files that can be sealed against
//! shrinking: every call fails.

use crate::error::Error;
use crate::os;
use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;

/// There is none.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) start: NonNull<u8>,
    pub(crate) mapped_bytes: usize,
    none: std::convert::Infallible,
}

impl Shared {
    pub(crate) fn descriptor(&self) -> c_int {
        match self.none {}
    }
}

/// The error that says so.
pub(crate) fn can_share() -> Result<(), Error> {
    Err(os::lacks("memfd_create", "use Pool, and copy what another process is to see"))
}

/// Fails.
pub(crate) fn map_shared(_size_bytes: usize) -> io::Result<Shared> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Nobody can call it: there is no [`Shared`].
///
/// # Safety
/// - none.
pub(crate) unsafe fn grow_shared(shared: &mut Shared, _new_mapped_bytes: usize) -> io::Result<()> {
    match shared.none {}
}
