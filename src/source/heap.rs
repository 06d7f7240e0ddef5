//! The C heap: `malloc` and its kin of whatever library the process was started with (glibc, or a
//! preloaded jemalloc or mimalloc). Above it everything speaks of allocate, resize and release.
#![allow(unsafe_code, reason = "the only door to the C heap")]

use std::ptr::NonNull;

/// What C promises for every block that can hold a `max_align_t`: 16 bytes on all targets with 64-bit pointers
/// (System V ABI, AAPCS64).
///
/// A smaller block need only be fit for what it can hold: jemalloc, mimalloc and Miri align 8 bytes to 8. So
/// nothing smaller is asked for; glibc has no smaller blocks to give.
pub const ALIGNMENT: usize = 16;

/// `size_bytes` uninitialised bytes, or nothing.
#[inline]
pub fn allocate(size_bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: malloc may be called with any size, from any thread.
    let block = unsafe { libc::malloc(size_bytes.max(ALIGNMENT)) };
    NonNull::new(block.cast())
}

/// `size_bytes` zero bytes, or nothing. Fresh pages of the system are not touched.
#[inline]
pub fn allocate_zeroed(size_bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: calloc may be called with any sizes, from any thread.
    let block = unsafe { libc::calloc(1, size_bytes.max(ALIGNMENT)) };
    NonNull::new(block.cast())
}

/// The block with its first bytes kept and `new_size_bytes` of room; nothing leaves the old one intact.
///
/// # Safety
/// - `block` came from this source and was not released.
/// - `new_size_bytes` is not zero (C leaves open what that means).
/// - after `Some`, the old pointer is not used again.
#[inline]
pub unsafe fn resize(block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
    debug_assert_ne!(new_size_bytes, 0);
    // SAFETY: the caller vouches for the block and for a size above zero.
    let moved = unsafe { libc::realloc(block.as_ptr().cast(), new_size_bytes.max(ALIGNMENT)) };
    NonNull::new(moved.cast())
}

/// Gives the block back.
///
/// # Safety
/// - `block` came from this source, was not released, and is not used again.
#[inline]
pub unsafe fn release(block: NonNull<u8>) {
    // SAFETY: the caller vouches for the block.
    unsafe { libc::free(block.as_ptr().cast()) }
}

/// Asks the C library to give free memory back to the system, where it can (glibc).
pub fn trim() {
    #[cfg(all(target_env = "gnu", not(miri)))]
    // SAFETY: may be called at any time, from any thread.
    let _ = unsafe { libc::malloc_trim(0) };
}
