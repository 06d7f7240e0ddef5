//! `mremap` as ThreadSanitizer can follow it (`make tsan`). It does not know that call: what one thread had at the
//! addresses to which another thread's memory moves would be a race of the two.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// Moves the mapping to a place that was mapped for it just now, by a call that ThreadSanitizer sees.
///
/// # Safety
/// As of mremap(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn mremap(old: *mut c_void, old_bytes: usize, new_bytes: usize, flags: c_int) -> *mut c_void {
    assert_eq!(flags, libc::MREMAP_MAYMOVE, "only this is known here");
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, at an address of the system's choice.
    let place = unsafe { libc::mmap(null_mut(), new_bytes, libc::PROT_NONE, private, -1, 0) };
    if place == libc::MAP_FAILED {
        return place;
    }
    let flags = flags | libc::MREMAP_FIXED;
    // SAFETY: the caller's mapping, and a place of ours, which it takes.
    match unsafe { libc::syscall(libc::SYS_mremap, old, old_bytes, new_bytes, flags, place) } {
        -1 => {
            // SAFETY: our mapping, which nobody has seen.
            unsafe { libc::munmap(place, new_bytes) };
            libc::MAP_FAILED
        }
        _moved => place,
    }
}
