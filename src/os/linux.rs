//! What Linux does in its own way, with glibc and with musl.

use super::unix::{can_write_by, page_bytes, read_clock};
use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// The highest number of a signal.
pub(crate) const MAX_SIGNAL: c_int = 64;

/// Returns the memory behind pages to the system and keeps their addresses. They are zero when touched again. Returns
/// whether it could.
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from `map` whose contents nobody needs any more.
pub(crate) unsafe fn discard(start: NonNull<u8>, size_bytes: usize) -> bool {
    // SAFETY: whole pages of `map` whose contents nobody needs (this function's contract). Private anonymous memory
    // reads as zero afterwards (madvise(2)).
    unsafe { libc::madvise(start.as_ptr().cast(), size_bytes, libc::MADV_DONTNEED) == 0 }
}

/// Makes pages inaccessible and returns their memory to the system. Returns whether it could.
///
/// # Safety
/// - as for [`discard`].
pub(crate) unsafe fn forbid(start: NonNull<u8>, size_bytes: usize) -> bool {
    /// From linux/mman.h; the libc crate does not have it yet.
    const MADV_GUARD_INSTALL: c_int = 102;
    // SAFETY: whole pages of `map` whose contents nobody needs (this function's contract). Memory that cannot be
    // returned stays, inaccessible.
    unsafe {
        if libc::madvise(start.as_ptr().cast(), size_bytes, MADV_GUARD_INSTALL) == 0 {
            return true;
        }
        if libc::mprotect(start.as_ptr().cast(), size_bytes, libc::PROT_NONE) != 0 {
            return false;
        }
        discard(start, size_bytes);
    }
    true
}

/// Asks for huge pages behind mapped memory.
///
/// # Safety
/// - `start` is where a page begins, and all pages of the next `size_bytes` are mapped.
pub(crate) unsafe fn prefer_huge(start: NonNull<u8>, size_bytes: usize) {
    // SAFETY: mapped pages (this function's contract); the hint changes no contents.
    let _ = unsafe { libc::madvise(start.as_ptr().cast(), size_bytes, libc::MADV_HUGEPAGE) };
}

/// The seconds and nanoseconds since an arbitrary moment, accurate to a few milliseconds. Cheap.
#[inline]
pub(crate) fn clock() -> (u64, u32) {
    // Miri knows the precise clock only.
    read_clock(if cfg!(miri) { libc::CLOCK_MONOTONIC } else { libc::CLOCK_MONOTONIC_COARSE })
}

/// The running thread's number in the system. Safe in a signal handler.
pub(crate) fn thread_number() -> u32 {
    // SAFETY: gettid takes no argument and cannot fail.
    unsafe { libc::gettid() as u32 }
}

/// The running thread's name, padded with zeros. Safe in a signal handler.
pub(crate) fn thread_name() -> [u8; 16] {
    let mut name = [0; 16];
    // SAFETY: PR_GET_NAME writes at most 16 bytes, with a NUL at the end (prctl(2)).
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name
}

/// Names the running thread.
pub(crate) fn name_thread(name: &'static CStr) {
    // SAFETY: PR_SET_NAME reads a C string.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

/// Sleeps until `word` is not `seen`, [`wake_sleeper`] is called, or `limit` is over; perhaps less.
pub(crate) fn sleep_while(word: &'static AtomicU32, seen: u32, limit: Option<Duration>) {
    let limit = limit.map(|limit| libc::timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let wait = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: `word` is static, and `limit` is NULL or points to a timespec that lives until the call returns.
    let _ = unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), wait, seen, limit) };
}

/// Wakes the thread that sleeps on `word`, which has changed.
pub(crate) fn wake_sleeper(word: &'static AtomicU32) {
    let (wake, no_limit) = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, std::ptr::null::<libc::timespec>());
    // SAFETY: `word` is static.
    let _ = unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), wake, 1, no_limit) };
}

/// Called in a child of `fork`, where nobody sleeps. A futex keeps no state.
pub(crate) fn forget_sleepers() {}

/// Writes zeros that are not optimised away, though nobody reads them.
///
/// # Safety
/// - `size_bytes` bytes from `start` on are writable, and nobody else uses them.
pub(crate) unsafe fn wipe(start: NonNull<u8>, size_bytes: usize) {
    #[cfg(not(miri))]
    // SAFETY: explicit_bzero writes `size_bytes` bytes, which are ours to write (this function's contract).
    unsafe {
        libc::explicit_bzero(start.as_ptr().cast(), size_bytes);
    }
    #[cfg(miri)]
    {
        // SAFETY: these bytes are ours to write (this function's contract).
        unsafe { start.write_bytes(0, size_bytes) };
        std::hint::black_box(start);
    }
}

/// Two descriptors of a pipe, to read from and to write to, which programs started by exec do not inherit.
fn pipe() -> Option<[c_int; 2]> {
    let mut ends = [-1; 2];
    // SAFETY: an array with room for two descriptors.
    (unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } == 0).then_some(ends)
}

/// Whether the byte at `address` can be written to.
///
/// # Safety
/// - there is memory at `address`, and nobody writes to this byte meanwhile.
pub(crate) unsafe fn can_write(address: *mut u8) -> bool {
    // SAFETY: this function's contract, and a new pipe.
    pipe().is_some_and(|ends| unsafe { can_write_by(ends, address) })
}

/// The address of this thread's errno. Safe in a signal handler.
pub(crate) fn errno() -> *mut c_int {
    // SAFETY: takes nothing and never fails.
    unsafe { libc::__errno_location() }
}

/// `read` or `write`, or `access` on machines that do not say which.
///
/// # Safety
/// - `context` is what the system gave to a handler of SIGSEGV or SIGBUS with SA_SIGINFO.
pub(crate) unsafe fn kind_of_access(context: *mut c_void) -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        /// Bit 1 of the page fault's error code (Intel SDM volume 3, 4.7).
        const WRITE: i64 = 2;
        let context = context.cast::<libc::ucontext_t>();
        // SAFETY: a valid ucontext (this function's contract).
        let error = unsafe { (*context).uc_mcontext.gregs[libc::REG_ERR as usize] };
        if error & WRITE == 0 { "read" } else { "write" }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = context;
        "access"
    }
}

/// When a process was started, as the system counts. None: there is no such process, or it cannot be asked.
pub(crate) fn process_started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything; the 22nd field is the 20th after it.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// The resident memory of this process (RSS) in bytes. `None` if the system does not say.
pub(crate) fn resident_bytes() -> Option<usize> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: usize = statm.split_whitespace().nth(1)?.parse().ok()?;
    pages.checked_mul(page_bytes())
}

/// How many bytes of mapped pages are in memory: all of this many that were touched, even if they were only read. Those
/// that somebody unmaps meanwhile are not. `start` is a multiple of the page's size.
pub(crate) fn resident_within(start: usize, size_bytes: usize) -> Option<usize> {
    const AT_ONCE: usize = 4096;
    let page = page_bytes();
    let mut is_there = [0_u8; AT_ONCE];
    let mut found = 0;
    for offset in (0..size_bytes).step_by(AT_ONCE * page) {
        let length = (size_bytes - offset).min(AT_ONCE * page);
        let from = std::ptr::without_provenance_mut::<c_void>(start + offset);
        // SAFETY: mincore reads no memory of ours, whatever is mapped there, and writes one byte for each page:
        // `length` is at most AT_ONCE pages, and `is_there` has as many bytes.
        if unsafe { libc::mincore(from, length, is_there.as_mut_ptr()) } == 0 {
            found += is_there[..length.div_ceil(page)].iter().filter(|page| **page & 1 == 1).count();
        }
    }
    Some(found * page)
}
