//! The C heap: `malloc` and the like, of whichever library the process was started with (glibc, or a preloaded jemalloc
//! or mimalloc). The layers above say allocate, resize and release.
#![allow(unsafe_code, reason = "the only door to the C heap")]

use std::ptr::NonNull;

/// The alignment in bytes that C promises for every block that can hold a `max_align_t`: 16 on all targets with 64-bit
/// pointers (System V ABI, AAPCS64).
///
/// A smaller block may be aligned less: jemalloc, mimalloc and Miri align 8 bytes to 8. So this file never requests
/// less than 16 bytes, which is also glibc's smallest block.
pub const ALIGNMENT: usize = 16;

/// A block of `size_bytes` uninitialised bytes; `None` if there is no memory.
#[inline]
#[must_use = "the block leaks"]
pub fn allocate(size_bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: malloc takes any size, on any thread.
    let block = unsafe { libc::malloc(size_bytes.max(ALIGNMENT)) };
    NonNull::new(block.cast())
}

/// A block of `size_bytes` zero bytes; `None` if there is no memory. New pages of the system are not touched.
#[inline]
#[must_use = "the block leaks"]
pub fn allocate_zeroed(size_bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: calloc takes any sizes, on any thread.
    let block = unsafe { libc::calloc(1, size_bytes.max(ALIGNMENT)) };
    NonNull::new(block.cast())
}

/// Resizes a block to `new_size_bytes`, perhaps by moving it, and keeps its first bytes. `None` leaves it as it was.
///
/// # Safety
/// - `block` came from this source and was not released.
/// - after `Some`, the old pointer is not used again.
#[inline]
#[must_use = "the block may have moved"]
pub unsafe fn resize(block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: a live block of malloc, calloc or realloc (this function's contract), and a size above zero, for which C
    // does not define realloc.
    let moved = unsafe { libc::realloc(block.as_ptr().cast(), new_size_bytes.max(ALIGNMENT)) };
    NonNull::new(moved.cast())
}

/// Releases a block.
///
/// # Safety
/// - `block` came from this source, was not released, and is not used again.
#[inline]
pub unsafe fn release(block: NonNull<u8>) {
    // SAFETY: a live block of malloc, calloc or realloc, which is not used again (this function's contract).
    unsafe { libc::free(block.as_ptr().cast()) }
}

/// Has the C library return free memory to the system, if it can (glibc).
pub fn trim() {
    #[cfg(all(target_env = "gnu", not(miri)))]
    // SAFETY: malloc_trim may be called at any time, on any thread.
    let _ = unsafe { libc::malloc_trim(0) };
}
