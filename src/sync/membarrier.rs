//! A fence with one free side: `light` costs nothing, and orders only against `heavy`. That is the system call
//! `membarrier`, which runs a fence on every processor that runs a thread of this process.

#[cfg(any(ctxalloc_loom, miri, not(target_os = "linux")))]
pub(super) use fences::{heavy, is_there, light, try_heavy};
#[cfg(not(any(ctxalloc_loom, miri, not(target_os = "linux"))))]
pub(super) use linux::{heavy, is_there, light, try_heavy};

#[cfg(any(ctxalloc_loom, miri, not(target_os = "linux")))]
mod fences {
    /// Only where it costs nothing to have a fence on both sides, in a model.
    pub(in crate::sync) fn is_there() -> bool {
        cfg!(ctxalloc_loom)
    }

    pub(in crate::sync) fn light() {
        heavy();
    }

    pub(in crate::sync) fn heavy() {
        #[cfg(ctxalloc_loom)]
        loom::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    pub(in crate::sync) fn try_heavy() -> bool {
        heavy();
        is_there()
    }
}

#[cfg(not(any(ctxalloc_loom, miri, not(target_os = "linux"))))]
mod linux {
    use std::ptr::null_mut;
    use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering, compiler_fence};

    /// 0: not asked yet; 1: it is there; 2: it is not.
    static ANSWER: AtomicU8 = AtomicU8::new(0);

    /// Whether `protect` reaches the other processors too, should the call be forbidden later. On x86-64 they are
    /// interrupted. On aarch64 an instruction of the processor's tells them, which runs no fence there: so no lock is
    /// owned on that.
    const CAN_PROTECT: bool = cfg!(target_arch = "x86_64");

    /// Whether this process may use it: from Linux 4.14 on, unless a sandbox forbids it.
    pub(in crate::sync) fn is_there() -> bool {
        match ANSWER.load(Ordering::Relaxed) {
            0 => {
                // Both are tried: a sandbox may allow the registration and refuse the call.
                let is_there = CAN_PROTECT && register() && call(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) && map();
                let answer = if is_there { 1 } else { 2 };
                ANSWER.store(answer, Ordering::Relaxed);
                answer == 1
            }
            answer => answer == 1,
        }
    }

    #[inline]
    pub(in crate::sync) fn light() {
        compiler_fence(Ordering::SeqCst);
    }

    /// Once it was there it stays, registered for the process and its children; unless the process went into a sandbox
    /// since. Then memory is protected: the system tells every processor that runs a thread of this process.
    pub(in crate::sync) fn heavy() {
        if !try_heavy() && is_there() {
            protect();
        }
    }

    /// [`heavy`] for those who can do without: returns false, having done nothing, where the call is missing or
    /// forbidden.
    pub(in crate::sync) fn try_heavy() -> bool {
        call(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) || (register() && call(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED))
    }

    const PAGE: usize = 4096;
    static PLACE: AtomicPtr<u8> = AtomicPtr::new(null_mut());

    /// Maps a page for `protect`, while that is allowed.
    #[allow(unsafe_code, reason = "mmap")]
    fn map() -> bool {
        let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, wherever there is room.
        let place = unsafe { libc::mmap(null_mut(), PAGE, read_write, private, -1, 0) };
        PLACE.store(place.cast(), Ordering::Release);
        place != libc::MAP_FAILED
    }

    #[cold]
    #[allow(unsafe_code, reason = "mprotect")]
    fn protect() {
        static ALONE: AtomicBool = AtomicBool::new(false);
        while ALONE.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
        let place = PLACE.load(Ordering::Acquire);
        // SAFETY: a page of ours, which nobody else uses meanwhile. It is written to while it is writable, so that
        // processors may know of it; to take that right away again, every one of them has to forget it.
        unsafe {
            libc::mprotect(place.cast(), PAGE, libc::PROT_READ | libc::PROT_WRITE);
            place.write_volatile(1);
            libc::mprotect(place.cast(), PAGE, libc::PROT_NONE);
        }
        ALONE.store(false, Ordering::Release);
    }

    fn register() -> bool {
        call(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)
    }

    #[allow(unsafe_code, reason = "a system call without a wrapper in libc")]
    fn call(command: libc::c_int) -> bool {
        // SAFETY: it takes numbers only and touches no memory.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
    }
}
