//! The thread `ctxalloc-decay`: one per process, which does its work, sleeps as long as that says, and begins again.
//! What the work is, it is told.
//!
//! It starts when it is first woken. A fork ends it first, so that it holds no lock in the child and the child has one
//! thread. The parent starts it again at once, a child when it needs it. It blocks all signals, and the process does
//! not wait for it at exit.

use crate::os;
use crate::strategy::pool::{clock, local};
use crate::sync::{AroundFork, ForkLock, Made, around_fork};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

/// What the thread does.
pub(super) struct Work {
    /// Does all that there is to do, and returns when to call it again. `None`: only after [`wake`].
    pub(super) pass: fn() -> Option<Duration>,
    /// The lock of what it looks at, which is held across `fork`.
    pub(super) lock: fn() -> &'static ForkLock,
}

/// Set once, by [`work`].
static WORK: Made<Work> = Made::new();
/// How the thread is started again in the parent after a fork. If unset, it is started at once.
static RESTART: Made<fn()> = Made::new();

/// The state of the thread: one of the four values below.
static STATE: AtomicU32 = AtomicU32::new(NONE);
/// There is no thread. Set at first, after a fork, and when a start failed.
const NONE: u32 = 0;
/// `wake` is making the thread. Set from NONE only; followed by RUNNING, or by NONE if that failed. Cannot be set
/// by two threads at once.
const STARTING: u32 = 1;
/// The thread runs, and [`THREAD`] is valid. Set from STARTING only; left for FORKING only.
const RUNNING: u32 = 2;
/// A fork is under way: there is no thread, or the forking thread is about to end and join it. Set from NONE or
/// RUNNING; followed by NONE. Cannot be set while a thread is being made.
const FORKING: u32 = 3;

/// The thread, while the state is RUNNING.
static THREAD: AtomicUsize = AtomicUsize::new(0);
/// Whether the state was RUNNING before the fork. Written and read by the forking thread only.
static WAS_RUNNING: AtomicBool = AtomicBool::new(false);
/// Counts calls of `wake`. The thread sleeps on this word until it changes.
static CALLS: AtomicU32 = AtomicU32::new(0);
/// Whether `wake` was called while the state was FORKING, and did nothing. Set by it; cleared after that fork.
static WAS_CALLED: AtomicBool = AtomicBool::new(false);
/// The process whose state it is, once there is one. A child that is forked while this library's first user
/// registers its functions for `fork` runs none of them, and has the state of a thread that it lacks.
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// Set by a fork to end the thread; cleared before the next one is started.
static STOP: AtomicBool = AtomicBool::new(false);

/// The shortest sleep. Ages are measured by a clock that ticks every few milliseconds.
const SHORTEST: Duration = Duration::from_millis(20);
const STACK_BYTES: usize = 512 << 10;

pub(super) fn is_awake() -> bool {
    STATE.load(Ordering::Relaxed) == RUNNING
}

/// Wakes the thread, or starts it if there is none. While a fork is under way, that happens after it.
#[cold]
pub(super) fn wake() {
    CALLS.fetch_add(1, Ordering::SeqCst);
    // Before the state changes. An error: it is known already.
    let _ = PROCESS.compare_exchange(0, std::process::id(), Ordering::Relaxed, Ordering::Relaxed);
    loop {
        match STATE.compare_exchange(NONE, STARTING, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => break,
            Err(FORKING) => {
                // SeqCst, here and after the fork: either the state is seen to be another one, or this is seen.
                WAS_CALLED.store(true, Ordering::SeqCst);
                if STATE.load(Ordering::SeqCst) == FORKING {
                    return;
                }
            }
            Err(_) => return os::wake_sleeper(&CALLS),
        }
    }
    let started = start();
    if let Some(thread) = started {
        THREAD.store(thread, Ordering::Relaxed);
    }
    // If it could not be started, the next call tries again.
    STATE.store(if started.is_some() { RUNNING } else { NONE }, Ordering::Release);
}

/// Starts the thread, if it has work. Only a fork ever joins it.
fn start() -> Option<usize> {
    WORK.get()?;
    STOP.store(false, Ordering::Relaxed);
    os::start_thread(run, STACK_BYTES)
}

extern "C" fn run(_: *mut c_void) -> *mut c_void {
    let Some(work) = WORK.get() else { return null_mut() }; // there is some: see `start`
    os::name_thread(c"ctxalloc-decay");
    local::do_without(); // or it would have caches to look after itself
    while !STOP.load(Ordering::SeqCst) {
        let seen = CALLS.load(Ordering::SeqCst);
        let next = (work.pass)();
        if STOP.load(Ordering::SeqCst) {
            break;
        }
        // If `wake` was called since `seen` was read, this returns at once.
        os::sleep_while(&CALLS, seen, next.map(|next| next.saturating_sub(clock::now()).max(SHORTEST)));
    }
    null_mut()
}

/// Gives the thread its work, and has it ended before a fork takes the locks that are held across it. Only the first
/// work counts.
pub(super) fn work(work: Work) {
    WORK.get_or_make(|| work);
    around_fork(AroundFork { before, in_parent, in_child });
}

/// Has `later` called in the parent after a fork, in place of [`wake`].
#[cfg(feature = "python")]
pub(super) fn restart_by(later: fn()) {
    RESTART.get_or_make(|| later);
}

/// The lock of what the work looks at. Only what `work` registered asks for it.
fn lock() -> &'static ForkLock {
    let work = WORK.get().expect("a fork is watched once there is work");
    (work.lock)()
}

fn before() {
    let own = std::process::id();
    if ![0, own].contains(&PROCESS.swap(own, Ordering::Relaxed)) {
        STATE.store(NONE, Ordering::Relaxed);
    }
    loop {
        // Acquire pairs with the Release in `wake`: `THREAD` is visible.
        let found = STATE.compare_exchange(RUNNING, FORKING, Ordering::AcqRel, Ordering::Acquire);
        if found.is_ok() {
            break;
        }
        if found == Err(NONE) && STATE.compare_exchange(NONE, FORKING, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            WAS_RUNNING.store(false, Ordering::Relaxed);
            lock().acquire();
            return;
        }
        std::thread::yield_now(); // the thread is being started, or another thread forks
    }
    WAS_RUNNING.store(true, Ordering::Relaxed);
    STOP.store(true, Ordering::SeqCst);
    CALLS.fetch_add(1, Ordering::SeqCst);
    os::wake_sleeper(&CALLS);
    // SAFETY: `start` made it. Only the thread that changed RUNNING to FORKING joins it.
    unsafe { os::join_thread(THREAD.load(Ordering::Relaxed)) };
    lock().acquire();
}

fn in_parent() {
    let was_running = WAS_RUNNING.load(Ordering::Relaxed);
    after();
    // First, so that it is cleared in any case.
    if WAS_CALLED.swap(false, Ordering::SeqCst) || was_running {
        RESTART.get().copied().unwrap_or(wake)();
    }
}

fn in_child() {
    os::forget_sleepers();
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    after();
}

fn after() {
    lock().release();
    STATE.store(NONE, Ordering::SeqCst);
}
