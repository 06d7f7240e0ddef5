//! The decay thread, `ctxalloc-decay`: one per process, which returns old memory to the system when no thread uses the pools.
//!
//! It starts when a pool first has unused memory, sleeps until the next of it is old enough, and sleeps without a limit while
//! there is none. A fork ends it first, so that it holds no lock in the child and the child has one thread. The parent
//! starts it again at once, a child when it needs it. It blocks all signals, and the process does not wait for it at exit.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::source::heap;
#[cfg(not(ctxalloc_loom))]
use crate::sync::{Locked, Made};

/// A pool or an arena: it keeps unused memory for later.
pub(super) trait Keeper: Send + Sync {
    /// Gives back memory that is old enough at `now`. Returns when to call it again; `None` if nothing is left, and then it is
    /// called again only after [`wake`].
    fn decay(&self, now: Duration) -> Option<Duration>;

    /// Gives back all unused memory; returns how many bytes.
    fn give_back(&self) -> usize;

    /// What it has of the system. An arena has none of its own: its spans are its pool's.
    fn kept(&self) -> PoolBytes {
        PoolBytes::default()
    }
}

/// What pools have of the system. A moment's answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolBytes {
    /// In pages that blocks or the caches of threads are in, touched or not.
    pub in_use: usize,
    /// In free pages that are kept for later.
    pub warm: usize,
}

impl PoolBytes {
    pub(super) fn plus(self, other: Self) -> Self {
        Self { in_use: self.in_use + other.in_use, warm: self.warm + other.warm }
    }
}

/// The same of all pools together.
pub(crate) fn pool_bytes() -> PoolBytes {
    alive().iter().fold(PoolBytes::default(), |sum, keeper| sum.plus(keeper.kept()))
}

/// All keepers that are alive, by age.
#[derive(Default)]
struct Keepers {
    all: BTreeMap<u64, Weak<dyn Keeper>>,
    registered: u64,
}

/// Runs `work` on the keepers, under their lock.
#[cfg(not(ctxalloc_loom))]
fn with_keepers<R>(work: impl FnOnce(&mut Keepers) -> R) -> R {
    keepers().with(work)
}

/// Under loom there are none, because a lock must not outlive the model it was made in.
#[cfg(ctxalloc_loom)]
fn with_keepers<R>(work: impl FnOnce(&mut Keepers) -> R) -> R {
    work(&mut Keepers::default())
}

#[cfg(not(ctxalloc_loom))]
fn keepers() -> &'static Locked<Keepers> {
    static KEEPERS: Made<Locked<Keepers>> = Made::new();
    KEEPERS.get_or_make(|| {
        #[cfg(not(any(ctxalloc_loom, miri, windows)))]
        timer::watch_forks();
        Locked::new(Keepers::default())
    })
}

/// Keeps a keeper registered until it is dropped.
#[derive(Debug)]
pub(super) struct Registration {
    number: u64,
}

/// Registers a keeper with the decay thread. Its locks must be held across `fork` already.
pub(super) fn register(keeper: Weak<dyn Keeper>) -> Registration {
    with_keepers(|keepers| {
        keepers.registered += 1;
        keepers.all.insert(keepers.registered, keeper);
        Registration { number: keepers.registered }
    })
}

impl Drop for Registration {
    fn drop(&mut self) {
        // The keeper is dropped outside the lock.
        drop(with_keepers(|keepers| keepers.all.remove(&self.number)));
    }
}

/// All keepers that are alive, the youngest first: arenas give memory back to their pools, which are older.
fn alive() -> Vec<Arc<dyn Keeper>> {
    with_keepers(|keepers| keepers.all.values().rev().filter_map(Weak::upgrade).collect())
}

/// Gives back the unused memory of all keepers; returns how many bytes.
pub(crate) fn trim_pools() -> usize {
    alive().iter().map(|keeper| keeper.give_back()).sum()
}

/// How many bytes were returned because of their age since the C heap was last trimmed.
static RELEASED: AtomicUsize = AtomicUsize::new(0);
/// From this many on it is trimmed.
const WORTH_A_TRIM: usize = 8 << 20;

/// Adds bytes that were returned because of their age.
pub(super) fn note_released(bytes: usize) {
    RELEASED.fetch_add(bytes, Ordering::Relaxed);
}

/// Gives back old memory of all keepers. Returns when to do so again.
///
/// When nothing is left after a burst, it also trims the C heap: each array has a few bytes there (its shape), and the heap
/// keeps those of a million arrays until it is trimmed.
fn pass() -> Option<Duration> {
    let next = alive().iter().filter_map(|keeper| keeper.decay(super::clock::now())).min();
    if next.is_none() && RELEASED.load(Ordering::Relaxed) >= WORTH_A_TRIM {
        RELEASED.store(0, Ordering::Relaxed);
        heap::trim();
    }
    next
}

/// A keeper's flag: there is memory to give back, and the decay thread knows. Set when memory is freed and the thread was
/// woken for it; cleared right before the thread looks.
#[derive(Debug, Default)]
pub(super) struct Noted(AtomicBool);

impl Noted {
    /// Notes that there is something to give back. Cheap if it is noted already.
    #[inline]
    pub(super) fn note(&self) {
        // SeqCst, here and in `clear`: either the thread, having cleared the flag, finds what was freed before this call, or
        // this call finds the flag cleared.
        if !self.0.load(Ordering::SeqCst) || !is_awake() {
            self.0.store(true, Ordering::SeqCst);
            wake();
        }
    }

    /// Called before the thread looks. Returns whether it was set.
    pub(super) fn clear(&self) -> bool {
        self.0.swap(false, Ordering::SeqCst)
    }

    /// Called when the thread has found something and will look again by itself.
    pub(super) fn keep(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[cfg(any(ctxalloc_loom, miri, windows))]
fn is_awake() -> bool {
    true
}

/// Without a thread under loom and Miri, and on Windows.
#[cfg(any(ctxalloc_loom, miri, windows))]
fn wake() {
    if false {
        pass();
    }
}

#[cfg(not(any(ctxalloc_loom, miri, windows)))]
use timer::{is_awake, wake};

/// How the thread is started again in the parent after a fork. Python does it later, when it is safe to start threads.
#[cfg(feature = "python")]
pub(crate) mod restart {
    /// Has `later` called after a fork instead; it calls [`now`] when it can.
    pub(crate) fn by(later: fn()) {
        super::RESTART.get_or_make(|| later);
    }

    /// Starts the thread, or wakes it.
    pub(crate) fn now() {
        super::wake();
    }
}

/// If unset, the thread is started at once.
#[cfg(not(any(ctxalloc_loom, miri, windows)))]
static RESTART: Made<fn()> = Made::new();

#[cfg(not(any(ctxalloc_loom, miri, windows)))]
mod timer {
    use super::{Duration, Ordering, RESTART, keepers, pass};
    use crate::os;
    use crate::strategy::pool::clock;
    use crate::sync::{AroundFork, around_fork};
    use std::ffi::c_void;
    use std::ptr::null_mut;
    use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};

    /// The state of the thread: one of the four values below.
    static STATE: AtomicU32 = AtomicU32::new(NONE);
    /// There is no thread. Set at first, after a fork, and when a start failed.
    const NONE: u32 = 0;
    /// `wake` is making the thread. Set from NONE only; followed by RUNNING, or by NONE if that failed. Cannot be set by two
    /// threads at once.
    const STARTING: u32 = 1;
    /// The thread runs, and [`THREAD`] is valid. Set from STARTING only; left for FORKING only.
    const RUNNING: u32 = 2;
    /// A fork is under way: there is no thread, or the forking thread is about to end and join it. Set from NONE or RUNNING;
    /// followed by NONE. Cannot be set while a thread is being made.
    const FORKING: u32 = 3;

    /// The thread, while the state is RUNNING.
    static THREAD: AtomicUsize = AtomicUsize::new(0);
    /// Whether the state was RUNNING before the fork. Written and read by the forking thread only.
    static WAS_RUNNING: AtomicBool = AtomicBool::new(false);
    /// Counts calls of `wake`. The thread sleeps on this word until it changes.
    static CALLS: AtomicU32 = AtomicU32::new(0);
    /// Set by a fork to end the thread; cleared before the next one is started.
    static STOP: AtomicBool = AtomicBool::new(false);

    /// The shortest sleep. Ages are measured by a clock that ticks every few milliseconds.
    const SHORTEST: Duration = Duration::from_millis(20);
    const STACK_BYTES: usize = 512 << 10;

    pub(in super::super) fn is_awake() -> bool {
        STATE.load(Ordering::Relaxed) == RUNNING
    }

    /// Wakes the thread, or starts it if there is none. Does nothing while a fork is under way.
    #[cold]
    pub(in super::super) fn wake() {
        CALLS.fetch_add(1, Ordering::SeqCst);
        if STATE.compare_exchange(NONE, STARTING, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            let started = start();
            if let Some(thread) = started {
                THREAD.store(thread, Ordering::Relaxed);
            }
            // If it could not be started, the next call tries again.
            STATE.store(if started.is_some() { RUNNING } else { NONE }, Ordering::Release);
        } else {
            os::wake_sleeper(&CALLS);
        }
    }

    /// Starts the thread. Only a fork ever joins it.
    fn start() -> Option<usize> {
        STOP.store(false, Ordering::Relaxed);
        os::start_thread(run, STACK_BYTES)
    }

    extern "C" fn run(_: *mut c_void) -> *mut c_void {
        os::name_thread(c"ctxalloc-decay");
        while !STOP.load(Ordering::SeqCst) {
            let seen = CALLS.load(Ordering::SeqCst);
            let next = pass();
            if STOP.load(Ordering::SeqCst) {
                break;
            }
            // If `wake` was called since `seen` was read, this returns at once.
            os::sleep_while(&CALLS, seen, next.map(|next| next.saturating_sub(clock::now()).max(SHORTEST)));
        }
        null_mut()
    }

    /// Has the thread ended before a fork takes the locks that are held across it.
    pub(super) fn watch_forks() {
        around_fork(AroundFork { before, in_parent, in_child });
    }

    fn before() {
        loop {
            // Acquire pairs with the Release in `wake`: `THREAD` is visible.
            let found = STATE.compare_exchange(RUNNING, FORKING, Ordering::AcqRel, Ordering::Acquire);
            if found.is_ok() {
                break;
            }
            if found == Err(NONE) && STATE.compare_exchange(NONE, FORKING, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                WAS_RUNNING.store(false, Ordering::Relaxed);
                keepers().lock().acquire();
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
        keepers().lock().acquire();
    }

    fn in_parent() {
        let was_running = WAS_RUNNING.load(Ordering::Relaxed);
        after();
        if was_running {
            RESTART.get().copied().unwrap_or(wake)();
        }
    }

    fn in_child() {
        os::forget_sleepers();
        after();
    }

    fn after() {
        keepers().lock().release();
        STATE.store(NONE, Ordering::Release);
    }
}

#[cfg(all(test, not(any(ctxalloc_loom, miri))))]
mod tests {
    use super::{Keeper, Registration, register};
    use crate::sync::{ForkLock, HeldAcrossFork, HeldUntilDropped, hold_across_fork_until};
    use std::sync::mpsc::{Sender, channel};
    use std::sync::{Arc, Mutex, Weak};
    use std::time::Duration;
    use std::{hint, thread};

    /// Its last owner besides the forking thread drops it during the fork.
    struct Leaving {
        forked: Mutex<Option<Sender<()>>>,
        own: Weak<Self>,
        _held: HeldUntilDropped,
        _registration: Registration,
    }

    impl Keeper for Leaving {
        fn decay(&self, _now: Duration) -> Option<Duration> {
            None
        }

        fn give_back(&self) -> usize {
            0
        }
    }

    impl HeldAcrossFork for Leaving {
        fn for_each_lock(&self, _visit: &mut dyn FnMut(&ForkLock)) {}

        fn before_fork(&self) {
            let forked = self.forked.lock().expect("no panic").take().expect("one fork");
            forked.send(()).expect("the owner waits");
            while self.own.strong_count() > 1 {
                hint::spin_loop();
            }
        }

        fn after_fork(&self) {}
    }

    #[test]
    #[allow(unsafe_code, reason = "fork")]
    fn what_another_thread_drops_during_a_fork_ends_after_it() {
        // In a child, which has no other threads. Its alarm ends it if it hangs.
        // SAFETY: the child runs only the code below and then ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: alarm takes any number; nobody handles its signal.
            unsafe { libc::alarm(20) };
            let (forked, has_forked) = channel();
            let leaving = Arc::new_cyclic(|leaving: &Weak<Leaving>| Leaving {
                forked: Mutex::new(Some(forked)),
                own: leaving.clone(),
                _held: hold_across_fork_until(leaving.clone()),
                _registration: register(leaving.clone()),
            });
            let weak = Arc::downgrade(&leaving);
            let owner = thread::spawn(move || {
                has_forked.recv().expect("a fork");
                drop(leaving);
            });
            // SAFETY: the grandchild ends at once.
            let grandchild = unsafe { libc::fork() };
            if grandchild == 0 {
                // SAFETY: ends the grandchild.
                unsafe { libc::_exit(0) };
            }
            owner.join().expect("no panic");
            while weak.strong_count() > 0 {
                hint::spin_loop();
            }
            let mut status = -1;
            // SAFETY: waits for our child and writes to `status`.
            let found = unsafe { libc::waitpid(grandchild, &raw mut status, 0) };
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(found != grandchild || status != 0)) };
        }
        let mut status = -1;
        // SAFETY: waits for our child and writes to `status`.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(status, 0, "a child or its child hung or crashed");
    }
}
