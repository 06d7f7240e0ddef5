//! The process's handler of SIGSEGV and SIGBUS: reports which block was accessed, then passes the signal on as if the
//! handler were not installed.
//!
//! It does not allocate, and does not wait for a lock indefinitely. It is installed once, with the first block of a
//! reporting Guard, and never removed, since others may have remembered it as the handler before theirs.

use super::record::{BLOCKS, Thread};
use super::report::{Finding, Text};
use crate::os;
use crate::unattributed::unattributed;
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];
/// The previous action for each signal, stored by `install_for`. Never freed.
static BEFORE: [AtomicPtr<libc::sigaction>; 2] = [const { AtomicPtr::new(null_mut()) }; 2];

/// Installs the handler, once per process.
#[inline]
pub(super) fn install() {
    static INSTALLED: AtomicBool = AtomicBool::new(false);
    // No thread waits for the one that installs it, which may not exist after a fork.
    if !INSTALLED.load(Ordering::Relaxed) && !INSTALLED.swap(true, Ordering::Relaxed) && !cfg!(miri) {
        for (signal, before) in SIGNALS.into_iter().zip(&BEFORE) {
            install_for(signal, before);
        }
    }
}

#[cold]
fn install_for(signal: c_int, before: &AtomicPtr<libc::sigaction>) {
    // SAFETY: an all-zero sigaction is valid: the default action with an empty mask.
    let empty: libc::sigaction = unsafe { std::mem::zeroed() };
    let _immortal = unattributed();
    let place = Box::into_raw(Box::new(empty));
    // The previous action is stored before ours is installed: a fault right after that must find it.
    // SAFETY: `place` is a sigaction of ours, which the call fills in.
    if unsafe { libc::sigaction(signal, null(), place) } != 0 {
        // SAFETY: from `Box::into_raw` above, and nobody else has it.
        drop(unsafe { Box::from_raw(place) });
        return;
    }
    before.store(place, Ordering::Release);
    let mut ours = empty;
    ours.sa_sigaction = on_fault as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as usize;
    // On the alternate stack, if the thread has one: the fault may be a stack overflow.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // All other signals are blocked: while the report is written the stack pointer is in `REPORTER`, so the kernel
    // would run the next handler from the top of the alternate stack, over the frames of this one.
    // SAFETY: the mask is a set of ours. `on_fault` may run at any moment, on any thread, as long as the process lives.
    unsafe {
        libc::sigfillset(&raw mut ours.sa_mask);
        libc::sigaction(signal, &raw const ours, null_mut());
    }
}

extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // The interrupted code may be about to read errno, so it is put back below.
    // SAFETY: the address of this thread's errno is valid as long as the thread runs. The kernel passes a valid siginfo
    // to a handler with SA_SIGINFO.
    let (errno, saved, info_of_signal) = unsafe {
        let errno = os::errno();
        (errno, errno.read(), &*info)
    };
    let code = info_of_signal.si_code;
    // A positive code is from the kernel; others are signals that a process sent.
    if code > 0 {
        // SAFETY: for SIGSEGV and SIGBUS of the kernel's the siginfo holds the faulting address.
        let address = unsafe { info_of_signal.si_addr() }.addr();
        // SAFETY: the system passed the context to this handler, which has SA_SIGINFO.
        report(address, unsafe { os::kind_of_access(context) });
    }
    // SAFETY: this thread's errno, as read above.
    unsafe { errno.write(saved) };
    pass_on(signal, code, info, context);
}

/// What the report is about.
#[derive(Clone, Copy)]
struct Fault {
    address: usize,
    access: &'static str,
    by: Thread,
}

/// The text of the report being written, and a stack to write it on: a thread's alternate stack may have room for
/// little more than the kernel's frame (Rust's have 8 KiB, of which the kernel takes 3 to 11).
#[repr(C, align(64))]
struct Reporter {
    stack: UnsafeCell<[u8; STACK_BYTES]>,
    text: UnsafeCell<Text>,
    /// Set while a thread writes a report: `stack` and `text` are that thread's. Cannot be set by two threads at once.
    taken: AtomicBool,
}

const STACK_BYTES: usize = 64 << 10;

// SAFETY: only the thread that set `taken` accesses `stack` and `text`.
unsafe impl Sync for Reporter {}

static REPORTER: Reporter = Reporter {
    stack: UnsafeCell::new([0; STACK_BYTES]),
    text: UnsafeCell::new(Text::new()),
    taken: AtomicBool::new(false),
};

fn report(address: usize, access: &'static str) {
    /// Another thread may be reporting a fault of its own. In a child of `fork` that thread may not exist: give up
    /// then.
    const ATTEMPTS: usize = 1_000_000;
    let mut attempts = 0;
    // Acquire pairs with the Release below.
    while REPORTER.taken.swap(true, Ordering::Acquire) {
        attempts += 1;
        if attempts == ATTEMPTS {
            return;
        }
        std::hint::spin_loop();
    }
    let fault = Fault { address, access, by: Thread::current() };
    // SAFETY: this thread has set `taken`.
    unsafe { write_on_own_stack(&fault) };
    REPORTER.taken.store(false, Ordering::Release);
}

/// Calls [`write`] on the stack of [`REPORTER`].
///
/// # Safety
/// - this thread has set `REPORTER.taken`.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn write_on_own_stack(fault: &Fault) {
    let end = REPORTER.stack.get().cast::<u8>().wrapping_add(STACK_BYTES);
    // SAFETY: the stack is this thread's alone (this function's contract) and its end is aligned to 16, as the System V
    // ABI wants it before a call. The callee preserves r12, and `clobber_abi` declares the other registers that it may
    // change. `write` does not unwind; it returns to the instruction that restores the old stack.
    unsafe {
        std::arch::asm!(
            "mov r12, rsp",
            "mov rsp, {end}",
            "call {write}",
            "mov rsp, r12",
            end = in(reg) end,
            write = in(reg) write as extern "C" fn(*const Fault),
            in("rdi") fault,
            out("r12") _,
            clobber_abi("C"),
        );
    }
}

/// Calls [`write`] on the current stack: on other machines alternate stacks have room for it (16 KiB on aarch64).
///
/// # Safety
/// - this thread has set `REPORTER.taken`.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
unsafe fn write_on_own_stack(fault: &Fault) {
    write(fault);
}

extern "C" fn write(fault: *const Fault) {
    // SAFETY: `report` passes a fault on its own stack, which is alive until this returns.
    let Fault { address, access, by } = unsafe { *fault };
    let print = |finding: &Finding<'_>| {
        // SAFETY: called below `report` only, whose thread has set `taken`; this is the only reference to the text.
        let text = unsafe { &mut *REPORTER.text.get() };
        text.clear();
        finding.write_to(by, text);
        text.print();
    };
    let Some(blocks) = BLOCKS.if_made() else { return };
    let answer = blocks.try_near(address, |_, record| {
        record.owns(address).then(|| {
            if record.owner.reports {
                print(&Finding::Fault { access, address, record });
            }
        })
    });
    if answer.is_err() {
        print(&Finding::Unknown { address });
    }
}

/// Blocks the signals that the kernel would have blocked for the previous handler, and no more: it may run for long, or
/// never return.
fn set_mask_as_the_kernel_would(signal: c_int, before: &libc::sigaction, context: *mut c_void) {
    // SAFETY: the kernel passes a valid ucontext to a handler with SA_SIGINFO. It holds the mask of the interrupted
    // code.
    let mut mask = unsafe { (*context.cast::<libc::ucontext_t>()).uc_sigmask };
    for other in 1..=os::MAX_SIGNAL {
        let itself = other == signal && before.sa_flags & libc::SA_NODEFER == 0;
        // SAFETY: two valid sets, and a signal's number.
        unsafe {
            if itself || libc::sigismember(&raw const before.sa_mask, other) == 1 {
                libc::sigaddset(&raw mut mask, other);
            }
        }
    }
    // SAFETY: `mask` is a set of ours, and the call is safe in a signal handler. When the handler returns, the kernel
    // restores the mask of the interrupted code.
    let _ = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, null_mut()) };
}

/// Does what the process would have done without this handler.
fn pass_on(signal: c_int, code: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let place = SIGNALS.iter().position(|&known| known == signal).map(|index| BEFORE[index].load(Ordering::Acquire));
    // SAFETY: NULL, or a sigaction that `install_for` leaked.
    let Some(before) = place.and_then(|place| unsafe { place.as_ref() }) else { return };
    match before.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // When the handler returns, the access is tried again, and then the default action ends the process with
            // the right address and stack in its core dump. (The kernel does not let a process ignore a fault.)
            // SAFETY: `before` is a valid sigaction.
            unsafe { libc::sigaction(signal, before, null_mut()) };
            if code <= 0 {
                // Sent by a process: there is no access to try again.
                // SAFETY: raise is safe in a signal handler.
                unsafe { libc::raise(signal) };
            }
        }
        function if before.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: an action with SA_SIGINFO, and not the default or to ignore, holds a function of this type.
            let function = unsafe {
                std::mem::transmute::<usize, extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void)>(function)
            };
            set_mask_as_the_kernel_would(signal, before, context);
            function(signal, info, context);
        }
        function => {
            // SAFETY: an action without SA_SIGINFO, and not the default or to ignore, holds a function of this type.
            let function = unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(function) };
            set_mask_as_the_kernel_would(signal, before, context);
            function(signal);
        }
    }
}
