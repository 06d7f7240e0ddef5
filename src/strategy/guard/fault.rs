//! The process's handler of SIGSEGV and SIGBUS: says whose memory was touched, then lets happen what would have
//! happened without it.
//!
//! It allocates nothing and waits for no lock. Installed once, when the first block of a reporting Guard is made, and
//! never removed: others may have remembered it as the handler before theirs.

use super::record::{BLOCKS, Thread};
use super::report::Finding;
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

fn say(address: usize, access: &'static str) {
    let Some(blocks) = BLOCKS.if_made() else { return };
    let by = Thread::current();
    let answer = blocks.try_near(address, |_, record| {
        record.owns(address).then(|| {
            if record.owner.reports {
                Finding::Fault { access, address, record }.text(by).print();
            }
        })
    });
    if answer.is_err() {
        Finding::Unknown { address }.text(by).print();
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
            function(signal, info, context);
        }
        function => {
            // SAFETY: an action without SA_SIGINFO holds a function of this type.
            let function = unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(function) };
            function(signal);
        }
    }
}
