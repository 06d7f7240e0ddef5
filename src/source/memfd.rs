//! Memory with a descriptor (memfd): another process that has the descriptor can map the same pages. Linux has it;
//! `no_memfd.rs` is in place of this file elsewhere.
#![allow(unsafe_code, reason = "maps files of memory")]

use super::pages::page_bytes;
use crate::error::Error;
use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

/// A memory file and its mapping in this process.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) start: NonNull<u8>,
    /// A multiple of the page size.
    pub(crate) mapped_bytes: usize,
    descriptor: OwnedFd,
}

impl Shared {
    /// The descriptor, as long as this value lives.
    pub(crate) fn descriptor(&self) -> c_int {
        self.descriptor.as_raw_fd()
    }
}

/// Whether this system has such memory.
pub(crate) fn can_share() -> Result<(), Error> {
    Ok(())
}

/// Maps a new file of `size_bytes` zeros, rounded up to pages. It cannot be shortened, so no process that has the
/// descriptor can take pages away from others that have mapped it.
pub(crate) fn map_shared(size_bytes: usize) -> io::Result<Shared> {
    let mapped_bytes = size_bytes
        .checked_next_multiple_of(page_bytes())
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or(io::ErrorKind::OutOfMemory)?;
    let descriptor = create()?;
    set_length(&descriptor, mapped_bytes)?;
    // SAFETY: a live descriptor of ours, and a seal by value.
    if unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (protection, fd) = (libc::PROT_READ | libc::PROT_WRITE, descriptor.as_raw_fd());
    // SAFETY: a new mapping of the whole file, at an address of the system's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), mapped_bytes, protection, libc::MAP_SHARED, fd, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
    Ok(Shared { start, mapped_bytes, descriptor })
}

/// A memory file that programs started by exec do not inherit (children of `fork` do) and that cannot be executed.
fn create() -> io::Result<OwnedFd> {
    /// From linux/memfd.h, since Linux 6.3.
    const MFD_NOEXEC_SEAL: libc::c_uint = 8;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    let mut error = io::Error::from(io::ErrorKind::Unsupported);
    for flags in [flags | MFD_NOEXEC_SEAL, flags] {
        // SAFETY: a static C string, and flags that the kernel checks.
        let fd = unsafe { libc::memfd_create(c"ctxalloc".as_ptr(), flags) };
        if fd >= 0 {
            // SAFETY: a new descriptor that nobody else has.
            return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINVAL) {
            break;
        }
    }
    Err(error)
}

fn set_length(descriptor: &OwnedFd, bytes: usize) -> io::Result<()> {
    let length = bytes.try_into().map_err(|_| io::ErrorKind::OutOfMemory)?;
    // SAFETY: a live descriptor, and a length by value.
    match unsafe { libc::ftruncate(descriptor.as_raw_fd(), length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Lengthens the file and its mapping, which may move: see `shared.start`. A failure leaves the mapping as it was.
///
/// # Safety
/// - `shared` is mapped, and after success nobody uses the old addresses.
/// - `new_mapped_bytes` is a larger multiple of the page size.
pub(crate) unsafe fn grow_shared(shared: &mut Shared, new_mapped_bytes: usize) -> io::Result<()> {
    set_length(&shared.descriptor, new_mapped_bytes)?;
    let old = shared.start.as_ptr().cast();
    // SAFETY: the whole mapping, whose old addresses nobody uses after success (this function's contract). The file is
    // as long as the new mapping.
    let moved = unsafe { libc::mremap(old, shared.mapped_bytes, new_mapped_bytes, libc::MREMAP_MAYMOVE) };
    if moved == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    shared.start = NonNull::new(moved.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
    shared.mapped_bytes = new_mapped_bytes;
    Ok(())
}

impl Drop for Shared {
    /// Unmaps it here and closes the descriptor. The memory is freed when no other process has a mapping or a
    /// descriptor.
    fn drop(&mut self) {
        // SAFETY: the whole mapping, with its length. Its owner drops it only after its block was released.
        let _ = unsafe { libc::munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
    }
}
