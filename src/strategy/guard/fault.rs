//! The process's handler of SIGSEGV and SIGBUS: says whose memory was touched, then lets happen what would have
//! happened without it.
//!
//! It allocates nothing and waits for no lock. Installed once, when the first block of a reporting Guard is made, and
//! never removed: others may have remembered it as the handler before theirs.

use super::record::{BLOCKS, Thread};
use super::report::{Finding, Text};
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];
/// What was there before us, for each signal. Never freed.
static BEFORE: [AtomicPtr<libc::sigaction>; 2] = [const { AtomicPtr::new(null_mut()) }; 2];

/// Installs the handler, once in a process.
#[inline]
pub(super) fn install() {
    static INSTALLED: AtomicBool = AtomicBool::new(false);
    // Nobody waits for the one who installs it: after a fork that thread may not be there.
    if !INSTALLED.load(Ordering::Relaxed) && !INSTALLED.swap(true, Ordering::Relaxed) && !cfg!(miri) {
        for (signal, before) in SIGNALS.into_iter().zip(&BEFORE) {
            install_for(signal, before);
        }
    }
}

#[cold]
fn install_for(signal: c_int, before: &AtomicPtr<libc::sigaction>) {
    // SAFETY: an all-zero sigaction is one with the default action.
    let empty: libc::sigaction = unsafe { std::mem::zeroed() };
    let place = Box::into_raw(Box::new(empty));
    // Asked first and kept: a fault right after our installation must find it.
    // SAFETY: only asks; a place for the answer.
    if unsafe { libc::sigaction(signal, null(), place) } != 0 {
        // SAFETY: ours alone, made just now.
        drop(unsafe { Box::from_raw(place) });
        return;
    }
    before.store(place, Ordering::Release);
    let mut ours = empty;
    ours.sa_sigaction = on_fault as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as usize;
    // On the alternate stack, if the thread has one: the fault may be that the stack is full.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // No other signal meanwhile: while the report is written the stack pointer is on the desk, and the kernel would begin
    // the next handler on the alternate stack, at its top, where the frames of this one are.
    // SAFETY: a set of ours.
    unsafe { libc::sigfillset(&raw mut ours.sa_mask) };
    // SAFETY: a function that may run at any moment, on any thread, for ever.
    let _ = unsafe { libc::sigaction(signal, &raw const ours, null_mut()) };
}

extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: errno of this thread, which the interrupted code may be about to read.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let saved = unsafe { errno.read() };
    // SAFETY: the kernel passes a valid siginfo to a handler with SA_SIGINFO.
    let known = unsafe { &*info };
    let code = known.si_code;
    // Positive: the kernel says so, and not somebody who sent a signal.
    if code > 0 {
        // SAFETY: for these two signals of the kernel it holds an address.
        let address = unsafe { known.si_addr() }.addr();
        say(address, access(context));
    }
    // SAFETY: as above.
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

/// Where one report at a time is written, and the stack for it: the alternate stack of a thread may have room for the
/// kernel's part and little more (Rust's have 8 KiB, of which the kernel takes 3 to 11).
#[repr(C, align(64))]
struct Desk {
    stack: UnsafeCell<[u8; STACK_BYTES]>,
    text: UnsafeCell<Text>,
    taken: AtomicBool,
}

const STACK_BYTES: usize = 64 << 10;

// SAFETY: `stack` and `text` belong to whoever took the desk.
unsafe impl Sync for Desk {}

static DESK: Desk = Desk {
    stack: UnsafeCell::new([0; STACK_BYTES]),
    text: UnsafeCell::new(Text::new()),
    taken: AtomicBool::new(false),
};

fn say(address: usize, access: &'static str) {
    /// Another thread may be telling of a fault of its own. In a child of `fork` it never comes to an end.
    const TURNS: usize = 1_000_000;
    let mut turns = 0;
    // Acquire pairs with the Release below.
    while DESK.taken.swap(true, Ordering::Acquire) {
        turns += 1;
        if turns == TURNS {
            return;
        }
        std::hint::spin_loop();
    }
    let fault = Fault { address, access, by: Thread::current() };
    // SAFETY: the desk is ours, and with it the stack.
    unsafe { on_the_desks_stack(&fault) };
    DESK.taken.store(false, Ordering::Release);
}

/// Calls [`tell`] on the desk's stack.
///
/// # Safety
/// - the desk is the caller's.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn on_the_desks_stack(fault: &Fault) {
    let end = DESK.stack.get().cast::<u8>().wrapping_add(STACK_BYTES);
    // SAFETY: System V ABI: the stack is aligned to 16 before a call, r12 outlives it, and the other registers that a C
    // function may change are declared. `tell` does not unwind, and returns to where the old stack is put back.
    unsafe {
        std::arch::asm!(
            "mov r12, rsp",
            "mov rsp, {end}",
            "call {tell}",
            "mov rsp, r12",
            end = in(reg) end,
            tell = in(reg) tell as extern "C" fn(*const Fault),
            in("rdi") fault,
            out("r12") _,
            clobber_abi("C"),
        );
    }
}

/// Calls [`tell`]; elsewhere alternate stacks have room for it (16 KiB on aarch64).
///
/// # Safety
/// - the desk is the caller's.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
unsafe fn on_the_desks_stack(fault: &Fault) {
    tell(fault);
}

extern "C" fn tell(fault: *const Fault) {
    // SAFETY: `say` passes one that is alive.
    let Fault { address, access, by } = unsafe { *fault };
    let print = |finding: &Finding<'_>| {
        // SAFETY: the desk is ours, says the caller of the caller.
        let text = unsafe { &mut *DESK.text.get() };
        text.clear();
        finding.tell(by, text);
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

/// Whether it was a read or a write, where the machine tells.
#[cfg(target_arch = "x86_64")]
fn access(context: *mut c_void) -> &'static str {
    /// Bit 1 of the page fault's error code (Intel SDM volume 3, 4.7).
    const WRITE: i64 = 2;
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel passes a valid ucontext to a handler with SA_SIGINFO.
    let error = unsafe { (*context).uc_mcontext.gregs[libc::REG_ERR as usize] };
    if error & WRITE == 0 { "read" } else { "write" }
}

#[cfg(not(target_arch = "x86_64"))]
fn access(_context: *mut c_void) -> &'static str {
    "access"
}

/// Blocks what the kernel had blocked for the handler that was there before us, and no more: it may let a long time pass,
/// or never return.
fn as_if_called_by_the_kernel(signal: c_int, before: &libc::sigaction, context: *mut c_void) {
    const MAX_SIGNAL: c_int = 64;
    // SAFETY: the kernel passes a valid ucontext to a handler with SA_SIGINFO; with the mask of the interrupted code.
    let mut mask = unsafe { (*context.cast::<libc::ucontext_t>()).uc_sigmask };
    for other in 1..=MAX_SIGNAL {
        let itself = other == signal && before.sa_flags & libc::SA_NODEFER == 0;
        // SAFETY: a set, and a number that it may have or not.
        if itself || unsafe { libc::sigismember(&raw const before.sa_mask, other) } == 1 {
            // SAFETY: as above.
            unsafe { libc::sigaddset(&raw mut mask, other) };
        }
    }
    // SAFETY: a set of ours. May be called in a signal handler; on return the kernel puts the interrupted code's back.
    let _ = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, null_mut()) };
}

/// Does what would have been done without us.
fn pass_on(signal: c_int, code: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let place = SIGNALS.iter().position(|&known| known == signal).map(|index| BEFORE[index].load(Ordering::Acquire));
    // SAFETY: NULL, or what `install_for` put there for ever.
    let Some(before) = place.and_then(|place| unsafe { place.as_ref() }) else { return };
    match before.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // On return the access is tried again, and then the default action ends the process with the right address
            // and stack in its core dump. (A fault cannot be ignored, says the kernel.)
            // SAFETY: the action that was there before.
            unsafe { libc::sigaction(signal, before, null_mut()) };
            if code <= 0 {
                // Sent by somebody: nothing would be tried again.
                // SAFETY: may be called in a signal handler.
                unsafe { libc::raise(signal) };
            }
        }
        function if before.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: an action with SA_SIGINFO holds a function of this type.
            let function = unsafe {
                std::mem::transmute::<usize, extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void)>(function)
            };
            as_if_called_by_the_kernel(signal, before, context);
            function(signal, info, context);
        }
        function => {
            // SAFETY: an action without SA_SIGINFO holds a function of this type.
            let function = unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(function) };
            as_if_called_by_the_kernel(signal, before, context);
            function(signal);
        }
    }
}
