//! What Linux and macOS do in the same way.

use std::ffi::{c_int, c_void};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::ptr::{NonNull, null_mut};
use std::time::Duration;

/// The size of a page in bytes, 4096 if the system does not say.
pub(crate) fn page_bytes() -> usize {
    // SAFETY: sysconf takes any number.
    let asked = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(asked).ok().filter(|page| page.is_power_of_two()).unwrap_or(4096)
}

/// How much memory the machine has, in bytes; 0 if the system does not say.
pub(crate) fn physical_bytes() -> usize {
    // SAFETY: sysconf takes any number.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    usize::try_from(pages).unwrap_or(0).saturating_mul(page_bytes())
}

/// The processor time of this process, all threads in the program and in the kernel, and its page faults. `None` if the
/// system does not say.
pub(crate) fn used() -> Option<(Duration, u64)> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: getrusage writes one struct, for which there is room.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: getrusage has filled it; all zeros would be a valid one too.
    let usage = unsafe { usage.assume_init() };
    let time = |part: libc::timeval| {
        Duration::from_secs(part.tv_sec.try_into().unwrap_or(0))
            + Duration::from_micros(part.tv_usec.try_into().unwrap_or(0))
    };
    let faults = usage.ru_minflt.saturating_add(usage.ru_majflt);
    Some((time(usage.ru_utime) + time(usage.ru_stime), faults.try_into().unwrap_or(0)))
}

/// Maps private zero pages, which take memory when they are first touched. `None` if there are none.
///
/// Not with MAP_NORESERVE: then Linux would map more than the machine has, and whoever got it would find out much
/// later.
pub(crate) fn map(size_bytes: usize) -> Option<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new anonymous mapping at an address of the system's choice.
    let start = unsafe { libc::mmap(null_mut(), size_bytes, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED { None } else { NonNull::new(start.cast()) }
}

/// Maps private zero pages at a multiple of `align`, which is a power of two and no smaller than a page.
pub(crate) fn map_aligned(size_bytes: usize, align: usize) -> Option<NonNull<u8>> {
    let start = map(size_bytes.checked_add(align)?)?;
    let before = crate::layout::padding(start.addr().get(), align);
    // SAFETY: `before` is less than `align`, so the aligned `size_bytes` lie in the mapping. The parts before and
    // behind them are whole pages, and nobody else has the mapping yet.
    unsafe {
        let aligned = start.add(before);
        if before > 0 {
            unmap(start, before);
        }
        if align > before {
            unmap(aligned.add(size_bytes), align - before);
        }
        Some(aligned)
    }
}

/// Unmaps pages.
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from [`map`], or from [`map_file`], that nobody uses any more.
pub(crate) unsafe fn unmap(start: NonNull<u8>, size_bytes: usize) {
    // SAFETY: whole pages of `map` that nobody uses (this function's contract). The call fails only if cutting out a
    // part needs one more mapping than the process may have; then the pages stay mapped, unused.
    let _ = unsafe { libc::munmap(start.as_ptr().cast(), size_bytes) };
}

/// Brings pages into memory and locks them there.
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from [`map`].
pub(crate) unsafe fn lock(start: NonNull<u8>, size_bytes: usize) -> io::Result<()> {
    // SAFETY: whole pages of `map` (this function's contract); no contents change.
    match unsafe { libc::mlock(start.as_ptr().cast(), size_bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Undoes a [`lock`].
///
/// # Safety
/// - `start` and `size_bytes` name whole pages from [`map`].
pub(crate) unsafe fn unlock(start: NonNull<u8>, size_bytes: usize) {
    // SAFETY: whole pages of `map` (this function's contract); no contents change.
    let _ = unsafe { libc::munlock(start.as_ptr().cast(), size_bytes) };
}

/// How many bytes this process may lock in all; `None` if there is no limit.
pub(crate) fn lock_limit_bytes() -> Option<usize> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: Linux and macOS have this resource, and `limit` is a struct of ours to write to.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0;
    (!failed && limit.rlim_cur != libc::RLIM_INFINITY).then(|| limit.rlim_cur.try_into().unwrap_or(usize::MAX))
}

/// The seconds and nanoseconds of a clock of the system's.
#[inline]
pub(super) fn read_clock(clock: libc::clockid_t) -> (u64, u32) {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec of ours, and callers name clocks that their system has.
    let failed = unsafe { libc::clock_gettime(clock, &raw mut time) };
    debug_assert_eq!(failed, 0);
    (time.tv_sec as u64, time.tv_nsec as u32)
}

/// Has these called at each `fork` from now on. False: there is no memory to remember them.
pub(crate) fn at_fork(
    before: Option<unsafe extern "C" fn()>,
    in_parent: Option<unsafe extern "C" fn()>,
    in_child: Option<unsafe extern "C" fn()>,
) -> bool {
    // SAFETY: the functions live as long as the process: neither executables nor extension modules are unloaded.
    unsafe { libc::pthread_atfork(before, in_parent, in_child) == 0 }
}

/// Starts a thread with all signals blocked. Allocates nothing by Rust's allocator, which may be one of ours. `None` if
/// the system has no thread to give; else a number for [`join_thread`].
pub(crate) fn start_thread(run: extern "C" fn(*mut c_void) -> *mut c_void, stack_bytes: usize) -> Option<usize> {
    // SAFETY: plain C structs for which zeros are valid, each initialised by its own function before it is used and
    // destroyed once. If the system refuses the stack size, its default is used. `run` is given no argument.
    unsafe {
        let mut thread: libc::pthread_t = std::mem::zeroed();
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        if libc::pthread_attr_init(&raw mut attributes) != 0 {
            return None;
        }
        libc::pthread_attr_setstacksize(&raw mut attributes, stack_bytes);
        // A thread begins with the mask of the one that starts it: all signals blocked.
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let failed = libc::pthread_create(&raw mut thread, &raw const attributes, run, null_mut());
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, null_mut());
        libc::pthread_attr_destroy(&raw mut attributes);
        (failed == 0).then_some(thread as usize)
    }
}

/// Waits for a thread's end.
///
/// # Safety
/// - `thread` is from [`start_thread`], and was not joined before.
pub(crate) unsafe fn join_thread(thread: usize) {
    // SAFETY: a joinable thread of this process (this function's contract).
    unsafe { libc::pthread_join(thread as libc::pthread_t, null_mut()) };
}

/// Whether the byte at `address` can be written to: the system is asked to copy it into a pipe and back. Closes the
/// pipe's ends.
///
/// # Safety
/// - there is memory at `address`, and nobody writes to this byte meanwhile; `ends` are a new pipe's.
pub(super) unsafe fn can_write_by(ends: [c_int; 2], address: *mut u8) -> bool {
    // SAFETY: both are calls on our own descriptors with one byte of memory that is there. The system answers EFAULT
    // where the byte may not be read or written; what it writes is what was there.
    let (sent, taken) = unsafe { (libc::write(ends[1], address.cast(), 1), libc::read(ends[0], address.cast(), 1)) };
    for end in ends {
        // SAFETY: our own descriptor, used for the last time.
        unsafe { libc::close(end) };
    }
    (sent, taken) == (1, 1)
}

/// Writes to standard error, without buffers or locks. Safe in a signal handler. `None` if it could not.
pub(crate) fn print_error(bytes: &[u8]) -> Option<usize> {
    // SAFETY: a live slice; write(2) is safe in a signal handler.
    let written = unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
    usize::try_from(written).ok()
}

/// A file that these options make is its owner's alone, and the name must not be a symbolic link. Does not wait, as
/// [`without_waiting`].
pub(crate) fn only_for_its_owner(options: &mut OpenOptions) -> &mut OpenOptions {
    options.mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
}

/// Opening a FIFO does not wait for who has its other end.
pub(crate) fn without_waiting(options: &mut OpenOptions) -> &mut OpenOptions {
    options.custom_flags(libc::O_NONBLOCK)
}

/// Reads what a file has from a place on, as much as the system gives at once.
pub(crate) fn read_at(file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
    file.read_at(into, offset)
}

/// Maps the first `size_bytes` of a file, shared with all that map it. [`unmap`] ends it.
pub(crate) fn map_file(file: &File, size_bytes: usize, is_writable: bool) -> io::Result<NonNull<u8>> {
    let protection = libc::PROT_READ | if is_writable { libc::PROT_WRITE } else { 0 };
    // SAFETY: a new mapping, at an address that the system chooses.
    let start = unsafe { libc::mmap(null_mut(), size_bytes, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    match NonNull::new(start.cast()) {
        Some(mapped) if start != libc::MAP_FAILED => Ok(mapped),
        _ => Err(io::Error::last_os_error()),
    }
}
