//! Memory behind a descriptor (memfd): another process that is given the descriptor maps the same pages.
#![allow(unsafe_code, reason = "maps files of memory")]

use super::pages::page_bytes;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

/// A new file of memory and its mapping here.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) start: NonNull<u8>,
    /// A multiple of the page size.
    pub(crate) mapped_bytes: usize,
    pub(crate) descriptor: OwnedFd,
}

/// `size_bytes` of zeros, rounded up to pages, in a file that cannot be made shorter: nobody who has the descriptor can
/// take pages away from under those who have mapped it.
pub(crate) fn map_shared(size_bytes: usize) -> io::Result<Shared> {
    let mapped_bytes = size_bytes
        .checked_next_multiple_of(page_bytes())
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or(io::ErrorKind::OutOfMemory)?;
    let descriptor = create()?;
    set_length(&descriptor, mapped_bytes)?;
    // SAFETY: our own descriptor.
    if unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let (protection, fd) = (libc::PROT_READ | libc::PROT_WRITE, descriptor.as_raw_fd());
    // SAFETY: a new mapping, wherever the system likes, of the whole file.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), mapped_bytes, protection, libc::MAP_SHARED, fd, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
    Ok(Shared { start, mapped_bytes, descriptor })
}

/// A file of memory that is not inherited by other programs (only by children of `fork`) and cannot be executed.
fn create() -> io::Result<OwnedFd> {
    /// From linux/memfd.h, since Linux 6.3.
    const MFD_NOEXEC_SEAL: libc::c_uint = 8;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    let mut error = io::Error::from(io::ErrorKind::Unsupported);
    for flags in [flags | MFD_NOEXEC_SEAL, flags] {
        // SAFETY: a C string, and flags that the kernel checks.
        let fd = unsafe { libc::memfd_create(c"ctxalloc".as_ptr(), flags) };
        if fd >= 0 {
            // SAFETY: a new descriptor, ours alone.
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
    // SAFETY: a live descriptor.
    match unsafe { libc::ftruncate(descriptor.as_raw_fd(), length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Lengthens the file and its mapping, which may move; the new start. A failure leaves the mapping as it was.
///
/// # Safety
/// - `shared` is mapped, and after success nobody uses the old addresses.
/// - `new_mapped_bytes` is a larger multiple of the page size.
pub(crate) unsafe fn grow_shared(shared: &mut Shared, new_mapped_bytes: usize) -> io::Result<()> {
    set_length(&shared.descriptor, new_mapped_bytes)?;
    let old = shared.start.as_ptr().cast();
    // SAFETY: the whole mapping, says the caller; the file is that long now.
    let moved = unsafe { libc::mremap(old, shared.mapped_bytes, new_mapped_bytes, libc::MREMAP_MAYMOVE) };
    if moved == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    shared.start = NonNull::new(moved.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
    shared.mapped_bytes = new_mapped_bytes;
    Ok(())
}

impl Drop for Shared {
    /// The mapping of this process and its descriptor go; the memory does when nobody else has either.
    fn drop(&mut self) {
        // SAFETY: mapped with this length; whoever drops it has given its block up.
        let _ = unsafe { libc::munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
    }
}
