//! What macOS does in its own way. Type-checked only (`make check-platforms`): nobody has run it yet.

pub(crate) use super::sleeper::{forget_sleepers, sleep_while, wake_sleeper};
use super::unix::{can_write_by, read_clock};
use std::ffi::{CStr, c_int, c_void};
use std::ptr::NonNull;

/// The highest number of a signal (NSIG - 1).
pub(crate) const MAX_SIGNAL: c_int = 31;

/// Returns the memory behind pages to the system and keeps their addresses. They are zero when touched again. Returns
/// whether it could.
///
/// MADV_DONTNEED keeps the contents here (madvise(2)), so new pages are mapped in place of the old ones.
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from `map` whose contents nobody needs any more.
pub(crate) unsafe fn discard(start: NonNull<u8>, size_bytes: usize) -> bool {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: replaces whole pages of `map` whose contents nobody needs (this function's contract), in one step: no
    // other mapping can come between. If it fails, the old pages may be gone: the process has no memory for a mapping
    // left.
    unsafe { libc::mmap(start.as_ptr().cast(), size_bytes, protection, flags, -1, 0) != libc::MAP_FAILED }
}

/// Makes pages inaccessible and returns their memory to the system. Returns whether it could.
///
/// # Safety
/// - as for [`discard`].
pub(crate) unsafe fn forbid(start: NonNull<u8>, size_bytes: usize) -> bool {
    // SAFETY: whole pages of `map` whose contents nobody needs (this function's contract).
    unsafe {
        discard(start, size_bytes);
        libc::mprotect(start.as_ptr().cast(), size_bytes, libc::PROT_NONE) == 0
    }
}

/// Does nothing: the system has no such hint.
///
/// # Safety
/// - none.
pub(crate) unsafe fn prefer_huge(_start: NonNull<u8>, _size_bytes: usize) {}

/// The seconds and nanoseconds since an arbitrary moment, accurate to a few milliseconds. Cheap.
#[inline]
pub(crate) fn clock() -> (u64, u32) {
    read_clock(libc::CLOCK_MONOTONIC_RAW_APPROX)
}

/// The running thread's number in the system, less its upper half. Safe in a signal handler: it reads the thread's own
/// record.
pub(crate) fn thread_number() -> u32 {
    let mut number = 0;
    // SAFETY: NULL is the running thread (pthread.h), and `number` is ours to write to.
    unsafe { libc::pthread_threadid_np(std::mem::zeroed(), &raw mut number) };
    number as u32
}

/// The first 15 bytes of the running thread's name, padded with zeros. Safe in a signal handler: it copies from the
/// thread's own record.
pub(crate) fn thread_name() -> [u8; 16] {
    let mut name = [0_u8; 64];
    // SAFETY: the call writes at most `name.len()` bytes, with a NUL at the end; on an error it writes nothing.
    let _ = unsafe { libc::pthread_getname_np(libc::pthread_self(), name.as_mut_ptr().cast(), name.len()) };
    let length = name.iter().position(|&byte| byte == 0).unwrap_or(0).min(15);
    std::array::from_fn(|index| if index < length { name[index] } else { 0 })
}

/// Names the running thread.
pub(crate) fn name_thread(name: &'static CStr) {
    // SAFETY: reads a C string.
    let _ = unsafe { libc::pthread_setname_np(name.as_ptr()) };
}

/// Writes zeros that are not optimised away, though nobody reads them.
///
/// # Safety
/// - `size_bytes` bytes from `start` on are writable, and nobody else uses them.
pub(crate) unsafe fn wipe(start: NonNull<u8>, size_bytes: usize) {
    // SAFETY: memset_s writes `size_bytes` bytes, which are ours to write (this function's contract).
    let _ = unsafe { libc::memset_s(start.as_ptr().cast(), size_bytes, 0, size_bytes) };
}

/// Two descriptors of a pipe, to read from and to write to. A program that another thread starts by exec at this moment
/// may inherit them: there is no call that makes and marks them in one step.
fn pipe() -> Option<[c_int; 2]> {
    let mut ends = [-1; 2];
    // SAFETY: an array with room for two descriptors, and calls with descriptors of ours.
    unsafe {
        if libc::pipe(ends.as_mut_ptr()) != 0 {
            return None;
        }
        for end in ends {
            libc::fcntl(end, libc::F_SETFD, libc::FD_CLOEXEC);
        }
    }
    Some(ends)
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
    unsafe { libc::__error() }
}

/// `read` or `write`.
///
/// # Safety
/// - `context` is what the system gave to a handler of SIGSEGV or SIGBUS with SA_SIGINFO.
pub(crate) unsafe fn kind_of_access(context: *mut c_void) -> &'static str {
    // SAFETY: a valid ucontext, which points to the thread's registers (this function's contract).
    let exception = unsafe { (*(*context.cast::<libc::ucontext_t>()).uc_mcontext).__es };
    // Bit 1 of the page fault's error code (Intel SDM volume 3, 4.7).
    #[cfg(target_arch = "x86_64")]
    let is_write = exception.__err & 2 != 0;
    // WnR, bit 6 of the syndrome of a data abort (Arm ARM, ESR_EL1).
    #[cfg(target_arch = "aarch64")]
    let is_write = exception.__esr & 1 << 6 != 0;
    if is_write { "write" } else { "read" }
}

/// When a process was started, in microseconds since 1970. None: there is no such process, or it cannot be asked.
pub(crate) fn process_started(pid: u32) -> Option<u64> {
    let size = size_of::<libc::proc_bsdinfo>() as c_int;
    // SAFETY: a plain C struct for which zeros are valid; the call writes at most `size` bytes to it.
    let (written, info) = unsafe {
        let mut info: libc::proc_bsdinfo = std::mem::zeroed();
        let place = (&raw mut info).cast::<c_void>();
        (libc::proc_pidinfo(pid.try_into().ok()?, libc::PROC_PIDTBSDINFO, 0, place, size), info)
    };
    (written == size).then(|| info.pbi_start_tvsec * 1_000_000 + info.pbi_start_tvusec)
}

/// Not known.
pub(crate) fn resident_bytes() -> Option<usize> {
    None
}

/// Not known.
pub(crate) fn resident_within(_start: usize, _size_bytes: usize) -> Option<usize> {
    None
}
