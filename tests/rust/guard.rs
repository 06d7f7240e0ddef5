//! What `Guard` catches ends a process, so each case has one of its own: this test binary once more, running one
//! ignored test. The verdict is how it ended and what it wrote to standard error.
#![cfg(not(miri))]
#![allow(unsafe_code, reason = "memory is misused on purpose")]

#[path = "support/child.rs"]
mod child;

use child::{fate_of, killed_after};
use ctxalloc::strategy::{Guard, GuardOptions, Strategy};
use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// Longer than anything here takes; a child that hangs is killed by it, and that is its verdict.
const PATIENCE_SECONDS: u32 = 60;

/// What every child does first.
fn guard(align: usize, underrun: bool) -> Guard {
    killed_after(PATIENCE_SECONDS);
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: no core dumps of processes that are meant to crash.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
    let mut options = GuardOptions::default();
    (options.align, options.underrun) = (align, underrun);
    Guard::new(options).expect("in range")
}

/// A block made by a thread with a name.
fn block_of(guard: &Guard, thread: &str, size_bytes: usize) -> NonNull<u8> {
    struct Sent(NonNull<u8>);
    // SAFETY: a block is plain memory.
    unsafe impl Send for Sent {}
    thread::scope(|threads| {
        let made = thread::Builder::new()
            .name(thread.into())
            .spawn_scoped(threads, || Sent(guard.allocate(size_bytes).expect("memory")));
        made.expect("a thread").join().expect("no panic").0
    })
}

/// Writes one byte, which the compiler may not leave out.
fn write(block: NonNull<u8>, at: isize) {
    let place = black_box(block.as_ptr()).wrapping_offset(at);
    // SAFETY: that there is nothing to write to is what Guard has to notice.
    unsafe { place.write_volatile(1) };
}

fn read(block: NonNull<u8>, at: isize) -> u8 {
    let place = black_box(block.as_ptr()).wrapping_offset(at);
    // SAFETY: in the block's own mapping; where that is not readable, the fault is what the test is about.
    unsafe { place.read_volatile() }
}

/// On x86-64 the kernel says which it was.
fn word(access: &'static str) -> &'static str {
    if cfg!(target_arch = "x86_64") { access } else { "access" }
}

#[test]
fn a_write_past_the_end_is_stopped_and_told() {
    let fate = fate_of("child_writes_past_the_end");
    fate.says(&format!("ctxalloc Guard: {} 1 byte past the end of a live block of 100 bytes at 0x", word("write")))
        .says("allocated by thread")
        .says("'maker'")
        .says("under Guard { align: 1, underrun: false, quarantine_bytes: 268435456, report: true }")
        .says_nothing_of("freed by")
        .ended_by(libc::SIGSEGV);
}

#[test]
#[ignore = "a child of a_write_past_the_end_is_stopped_and_told"]
fn child_writes_past_the_end() {
    let block = block_of(&guard(1, false), "maker", 100);
    write(block, 99);
    write(block, 100);
}

#[test]
fn a_read_past_the_end_is_told_with_its_distance_beyond_the_slack() {
    let fate = fate_of("child_reads_past_the_end");
    fate.says(&format!("{} 29 bytes past the end of a live block of 100 bytes", word("read"))).ended_by(libc::SIGSEGV);
}

#[test]
#[ignore = "a child of a_read_past_the_end_is_told_with_its_distance_beyond_the_slack"]
fn child_reads_past_the_end() {
    let guard = guard(64, false);
    let block = guard.allocate(100).expect("memory");
    black_box(read(block, 127)); // within the alignment: unseen
    black_box(read(block, 128));
}

#[test]
fn an_underrun_is_stopped_and_told() {
    let fate = fate_of("child_writes_before_the_start");
    fate.says(&format!("{} 1 byte before the start of a live block of 8192 bytes", word("write")))
        .ended_by(libc::SIGSEGV);
}

#[test]
#[ignore = "a child of an_underrun_is_stopped_and_told"]
fn child_writes_before_the_start() {
    let guard = guard(64, true);
    let block = guard.allocate(8192).expect("memory");
    write(block, 0);
    write(block, -1);
}

#[test]
fn a_use_after_free_is_stopped_and_told_with_both_threads() {
    let fate = fate_of("child_reads_after_the_free");
    fate.says(&format!("{} at offset 5 of a freed block of 100 bytes", word("read")))
        .says("'maker'\nctxalloc Guard:   freed by thread")
        .says("'liberator'\n")
        .ended_by(libc::SIGSEGV);
}

#[test]
#[ignore = "a child of a_use_after_free_is_stopped_and_told_with_both_threads"]
fn child_reads_after_the_free() {
    let guard = guard(64, false);
    let address = block_of(&guard, "maker", 100).addr();
    let block = NonNull::with_exposed_provenance(address);
    let free = || {
        // SAFETY: `guard` made the block, and this closure is called once.
        unsafe { guard.release(NonNull::with_exposed_provenance(address)) };
    };
    thread::scope(|threads| {
        thread::Builder::new().name("liberator".into()).spawn_scoped(threads, free).expect("a thread");
    });
    black_box(read(block, 5));
}

#[test]
fn misuse_of_free_is_told_and_survived() {
    let fate = fate_of("child_frees_what_it_must_not");
    fate.says("ctxalloc Guard: double free of a freed block of 100 bytes")
        .says("ctxalloc Guard: resize of a freed block of 100 bytes")
        .says("which is at offset 8 of a live block of 200 bytes")
        .says("which is in no block of a Guard")
        .says("which another Guard made")
        .says("overwritten: from 1 to 28 bytes past the end of a live block of 100 bytes")
        .ended_well();
}

#[test]
#[ignore = "a child of misuse_of_free_is_told_and_survived"]
fn child_frees_what_it_must_not() {
    let (guard, other) = (guard(64, false), guard(64, false));
    let block = guard.allocate(100).expect("memory");
    // SAFETY: live the first time. After that Guard looks at its records and accesses nothing.
    let resized = unsafe {
        guard.release(block);
        guard.release(block);
        guard.resize(block, 10)
    };
    assert!(resized.is_none());

    let block = guard.allocate(200).expect("memory");
    // SAFETY: inside of the block.
    let inside = unsafe { block.add(8) };
    for pointer in [inside, NonNull::<u64>::dangling().cast()] {
        // SAFETY: no block starts there: Guard looks at its records and accesses nothing.
        unsafe { guard.release(pointer) };
    }
    // SAFETY: another Guard's block: Guard looks at its records and accesses nothing.
    unsafe { other.release(block) };
    // SAFETY: `guard` made the block; what was released before was refused, so this is the first time.
    unsafe { guard.release(block) };

    let block = guard.allocate(100).expect("memory");
    write(block, 100);
    write(block, 127);
    // SAFETY: `guard` made the block; what was released before was refused, so this is the first time.
    unsafe { guard.release(block) };
    assert_eq!((guard.misuses(), other.misuses()), (5, 1));
}

#[test]
fn the_handler_that_was_there_before_has_its_turn() {
    let fate = fate_of("child_with_a_handler_of_its_own");
    fate.says("past the end of a live block of 100 bytes").says("the one before");
    fate.ended_with(42);
}

#[test]
#[ignore = "a child of the_handler_that_was_there_before_has_its_turn"]
fn child_with_a_handler_of_its_own() {
    extern "C" fn on_fault(_signal: libc::c_int) {
        let text = b"the one before\n";
        // SAFETY: a live slice; write(2) and _exit(2) are safe in a signal handler.
        unsafe {
            libc::write(2, text.as_ptr().cast(), text.len());
            libc::_exit(42);
        }
    }
    // SAFETY: a function that may run at any time.
    unsafe { libc::signal(libc::SIGSEGV, on_fault as extern "C" fn(libc::c_int) as usize) };
    let guard = guard(1, false);
    write(guard.allocate(100).expect("memory"), 100);
}

#[test]
fn signals_in_the_middle_of_a_report_run_over_nothing() {
    let fate = fate_of("child_in_a_storm_of_signals");
    fate.says("read at offset 0 of a freed block").ended_well();
}

static FAULTS: AtomicUsize = AtomicUsize::new(0);
static SIGNALS: AtomicUsize = AtomicUsize::new(0);

#[test]
#[ignore = "a child of signals_in_the_middle_of_a_report_run_over_nothing"]
fn child_in_a_storm_of_signals() {
    const ROUNDS: usize = 300;
    /// The handler before the Guard's: it makes the page accessible, and the program goes on.
    extern "C" fn on_fault(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
        FAULTS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: what the kernel passes to a handler with SA_SIGINFO.
        let info = unsafe { &*info };
        // SAFETY: a fault has an address.
        let page = unsafe { info.si_addr() }.map_addr(|address| address & !4095);
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: in place of a page of a block that was released, in the Guard's quarantine.
        let readable = unsafe { libc::mmap(page, 4096, libc::PROT_READ, kind, -1, 0) };
        assert_eq!(readable, page);
        // As the kernel would have called it: others may come.
        // SAFETY: an all-zero set is one, which the call fills.
        let mut blocked: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: only asks.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, std::ptr::null(), &raw mut blocked) };
        // SAFETY: the call above filled the set.
        let blocks = |signal| unsafe { libc::sigismember(&raw const blocked, signal) } == 1;
        assert!(blocks(libc::SIGSEGV) && !blocks(libc::SIGUSR1));
    }
    /// One that needs some of its stack.
    extern "C" fn on_signal(_signal: libc::c_int) {
        black_box([0xa5_u8; 3000]);
        SIGNALS.fetch_add(1, Ordering::SeqCst);
    }
    let action = |signal, function: usize, flags| {
        // SAFETY: an all-zero sigaction blocks nothing more.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = function;
        action.sa_flags = flags | libc::SA_ONSTACK;
        // SAFETY: functions that may run at any time.
        assert_eq!(unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) }, 0);
    };
    let faulted = on_fault as extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
    action(libc::SIGSEGV, faulted as usize, libc::SA_SIGINFO);
    action(libc::SIGUSR1, on_signal as extern "C" fn(libc::c_int) as usize, libc::SA_RESTART);
    // Room for a fault and for signals in the handler that was there before; Rust's own has little for anything.
    const STACK_BYTES: usize = 256 << 10;
    let stack = Box::leak(vec![0_u8; STACK_BYTES].into_boxed_slice());
    let stack = libc::stack_t { ss_sp: stack.as_mut_ptr().cast(), ss_flags: 0, ss_size: STACK_BYTES };
    // SAFETY: a stack that nobody else has, for ever.
    assert_eq!(unsafe { libc::sigaltstack(&raw const stack, std::ptr::null_mut()) }, 0);
    let guard = guard(64, false);
    // SAFETY: always right.
    let here = unsafe { libc::pthread_self() } as usize; // a number with glibc, a pointer with musl
    let done = AtomicBool::new(false);
    thread::scope(|threads| {
        threads.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                let before = SIGNALS.load(Ordering::SeqCst);
                // SAFETY: a thread that waits for this one.
                unsafe { libc::pthread_kill(here as libc::pthread_t, libc::SIGUSR1) };
                while SIGNALS.load(Ordering::SeqCst) == before && !done.load(Ordering::SeqCst) {
                    std::hint::spin_loop();
                }
            }
        });
        for _ in 0..ROUNDS {
            let block = guard.allocate(100).expect("memory");
            // SAFETY: `guard` made the block just now, and it is released once; the read after it is what is tested.
            unsafe { guard.release(block) };
            read(block, 0);
        }
        done.store(true, Ordering::SeqCst);
    });
    assert_eq!(FAULTS.load(Ordering::SeqCst), ROUNDS);
}

#[test]
fn a_fault_that_is_no_guards_is_left_to_others_in_silence() {
    let fate = fate_of("child_that_crashes_by_itself");
    fate.says_nothing_of("ctxalloc Guard").ended_by(libc::SIGSEGV);
    fate_of("child_that_is_sent_the_signal").says_nothing_of("ctxalloc Guard").ended_by(libc::SIGSEGV);
}

#[test]
#[ignore = "a child of a_fault_that_is_no_guards_is_left_to_others_in_silence"]
fn child_that_crashes_by_itself() {
    let guard = guard(64, false);
    guard.allocate(100).expect("memory");
    write(NonNull::<u64>::dangling().cast(), 0);
}

#[test]
#[ignore = "a child of a_fault_that_is_no_guards_is_left_to_others_in_silence"]
fn child_that_is_sent_the_signal() {
    // SAFETY: in place of Rust's own handler, which counts on a fault that happens again.
    unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
    let guard = guard(64, false);
    guard.allocate(100).expect("memory");
    // SAFETY: what somebody sends is not tried again, and must end the process all the same.
    unsafe { libc::raise(libc::SIGSEGV) };
}

#[test]
fn a_guard_that_does_not_report_stops_the_access_all_the_same() {
    let fate = fate_of("child_under_a_silent_guard");
    fate.says_nothing_of("ctxalloc Guard").ended_by(libc::SIGSEGV);
}

#[test]
#[ignore = "a child of a_guard_that_does_not_report_stops_the_access_all_the_same"]
fn child_under_a_silent_guard() {
    let reporting = guard(64, false);
    reporting.allocate(100).expect("memory"); // the handler is there
    let mut options = GuardOptions::default();
    options.report = false;
    let silent = Guard::new(options).expect("in range");
    write(silent.allocate(100).expect("memory"), 128);
}

#[test]
fn a_child_of_fork_goes_on_though_other_threads_were_in_the_guard() {
    fate_of("child_that_forks").ended_well();
}

#[test]
#[ignore = "a child of a_child_of_fork_goes_on_though_other_threads_were_in_the_guard"]
fn child_that_forks() {
    let guard = guard(64, false);
    let kept = guard.allocate(5000).expect("memory");
    // SAFETY: the block has 5000 bytes, and nobody else knows of it yet.
    unsafe { kept.write_bytes(7, 5000) };
    let kept = kept.addr();
    let done = AtomicBool::new(false);
    thread::scope(|threads| {
        for _ in 0..3 {
            threads.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let block = guard.allocate(100).expect("memory");
                    // SAFETY: `guard` made the block just now, and it is released once.
                    unsafe { guard.release(block) };
                }
            });
        }
        for _ in 0..20 {
            // SAFETY: the child calls nothing but the Guard, which is what is tested, and `_exit`.
            let pid = unsafe { libc::fork() };
            assert!(pid >= 0, "fork failed");
            if pid == 0 {
                // SAFETY: one that waits for a lock for ever is killed.
                unsafe { libc::alarm(20) };
                let kept = NonNull::with_exposed_provenance(kept);
                let whole = (0..5000).all(|at| read(kept, at) == 7);
                // SAFETY: the child has the parent's memory, so the block is live here, and the child releases it once.
                unsafe { guard.release(kept) };
                let own = guard.allocate_zeroed(100).expect("memory");
                // SAFETY: the child's `guard` made the block just now, and it is released once.
                unsafe { guard.release(own) };
                // SAFETY: ends the child without running the parent's exit handlers.
                unsafe { libc::_exit(i32::from(!whole || guard.misuses() > 0)) };
            }
            let mut status = -1;
            // SAFETY: our child, and a place for its status.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            if status != 0 {
                done.store(true, Ordering::Relaxed);
            }
            assert_eq!(status, 0, "the wait status of a child");
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(guard.misuses(), 0);
}

#[test]
fn a_process_without_mappings_left_is_told_what_to_do_once() {
    let fate = fate_of("child_without_mappings");
    fate.says("a block of 100 bytes is refused: the process has no mapping left (vm.max_map_count").ended_well();
    fate.says_once("no mapping left");
}

#[test]
#[ignore = "a child of a_process_without_mappings_left_is_told_what_to_do_once"]
fn child_without_mappings() {
    let guard = guard(64, false);
    assert!(guard.allocate(1 << 60).is_none(), "of which nothing is said: there is no such memory");
    let early = guard.allocate(100).expect("memory");
    // Neighbours of different protection are never joined.
    for protection in [libc::PROT_READ, libc::PROT_NONE].into_iter().cycle() {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, wherever the system likes.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
        if page == libc::MAP_FAILED {
            break;
        }
    }
    let refused: Vec<_> = std::iter::from_fn(|| guard.allocate(100)).take(1000).collect();
    assert!(refused.len() < 1000);
    assert!(guard.allocate(100).is_none());
    // SAFETY: live; a block that cannot grow is as it was.
    assert!(unsafe { guard.resize(early, 200) }.is_none());
    write(early, 99);
    for block in refused.into_iter().chain([early]) {
        // SAFETY: `guard` made each of them, and this loop releases each once.
        unsafe { guard.release(block) };
    }
    assert_eq!(guard.misuses(), 0);
}
