//! What gives memory back when nobody drives the pools: one thread of the process, `ctxalloc-decay`.
//!
//! It starts when a pool first has something to give back, sleeps until the next of it is old enough, and sleeps without
//! an end while there is nothing. Whoever forks ends it first, so that it holds no lock in the child and children are
//! born with one thread; the parent starts it again at once, a child when it needs it. It blocks all signals, and a process
//! that ends does not wait for it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::source::heap;
#[cfg(not(ctxalloc_loom))]
use crate::sync::{Locked, Made};

/// What keeps memory for later.
pub(super) trait Keeper: Send + Sync {
    /// Gives back what is old enough at this time. When to look again; nothing where nothing is left to give back, until
    /// [`wake`] is called.
    fn decay(&self, now: Duration) -> Option<Duration>;

    /// Gives back all of it; returns how many bytes that were.
    fn give_back(&self) -> usize;
}

/// All that are alive, by age.
#[derive(Default)]
struct Keepers {
    all: BTreeMap<u64, Weak<dyn Keeper>>,
    registered: u64,
}

/// Looks at the keepers, alone.
#[cfg(not(ctxalloc_loom))]
fn with_keepers<R>(work: impl FnOnce(&mut Keepers) -> R) -> R {
    keepers().with(work)
}

/// Nobody is one in a model: its locks must not outlive it.
#[cfg(ctxalloc_loom)]
fn with_keepers<R>(work: impl FnOnce(&mut Keepers) -> R) -> R {
    work(&mut Keepers::default())
}

#[cfg(not(ctxalloc_loom))]
fn keepers() -> &'static Locked<Keepers> {
    static KEEPERS: Made<Locked<Keepers>> = Made::new();
    KEEPERS.get_or_make(|| {
        #[cfg(not(any(ctxalloc_loom, miri)))]
        timer::watch_forks();
        Locked::new(Keepers::default())
    })
}

/// A place among the keepers; left by dropping it.
#[derive(Debug)]
pub(super) struct Registration {
    number: u64,
}

/// From now on `keeper` is asked to give back what is old. It must be held across fork already.
pub(super) fn register(keeper: Weak<dyn Keeper>) -> Registration {
    with_keepers(|keepers| {
        keepers.registered += 1;
        keepers.all.insert(keepers.registered, keeper);
        Registration { number: keepers.registered }
    })
}

impl Drop for Registration {
    fn drop(&mut self) {
        // What is taken out goes outside of the lock.
        drop(with_keepers(|keepers| keepers.all.remove(&self.number)));
    }
}

/// All that are alive, the youngest first: what arenas give back goes to their pools.
fn alive() -> Vec<Arc<dyn Keeper>> {
    with_keepers(|keepers| keepers.all.values().rev().filter_map(Weak::upgrade).collect())
}

/// Gives back all that any of them keeps; returns how many bytes that were.
pub(crate) fn trim_pools() -> usize {
    alive().iter().map(|keeper| keeper.give_back()).sum()
}

/// How many bytes went for their age since the C heap was last asked to do the same.
static RELEASED: AtomicUsize = AtomicUsize::new(0);
/// From so many on it is asked.
const WORTH_A_TRIM: usize = 8 << 20;

/// Bytes have gone for their age.
pub(super) fn note_released(bytes: usize) {
    RELEASED.fetch_add(bytes, Ordering::Relaxed);
}

/// Gives back what is old. When to look again.
///
/// After a burst, when all of it is back: each array has a few bytes in the C heap too (its shape), which keeps what a
/// million of them had until it is asked.
fn pass() -> Option<Duration> {
    let next = alive().iter().filter_map(|keeper| keeper.decay(super::clock::now())).min();
    if next.is_none() && RELEASED.load(Ordering::Relaxed) >= WORTH_A_TRIM {
        RELEASED.store(0, Ordering::Relaxed);
        heap::trim();
    }
    next
}

/// Whether a keeper has something to give back that the timer does not know of.
#[derive(Debug, Default)]
pub(super) struct Noted(AtomicBool);

impl Noted {
    /// There is something to give back. Cheap where that was said before.
    #[inline]
    pub(super) fn note(&self) {
        // SeqCst, here and in `clear`: either the timer's look finds what was kept before this, or this finds the note gone.
        if !self.0.load(Ordering::SeqCst) || !is_awake() {
            self.0.store(true, Ordering::SeqCst);
            wake();
        }
    }

    /// Before the timer looks. Whether there was a note.
    pub(super) fn clear(&self) -> bool {
        self.0.swap(false, Ordering::SeqCst)
    }

    /// The timer has found something.
    pub(super) fn keep(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[cfg(any(ctxalloc_loom, miri))]
fn is_awake() -> bool {
    true
}

/// No thread where threads are a model's.
#[cfg(any(ctxalloc_loom, miri))]
fn wake() {
    if false {
        pass();
    }
}

#[cfg(not(any(ctxalloc_loom, miri)))]
use timer::{is_awake, wake};

/// Who starts the thread again in the parent after a fork.
#[cfg(feature = "python")]
pub(crate) mod restart {
    /// From now on `later` is called there, which calls [`now`] when it likes.
    pub(crate) fn by(later: fn()) {
        super::RESTART.get_or_make(|| later);
    }

    /// Starts it, or has it look.
    pub(crate) fn now() {
        super::wake();
    }
}

/// Does it at once where there is nothing.
#[cfg(not(any(ctxalloc_loom, miri)))]
static RESTART: Made<fn()> = Made::new();

#[cfg(not(any(ctxalloc_loom, miri)))]
mod timer {
    use super::{Duration, Ordering, RESTART, keepers, pass};
    use crate::strategy::pool::clock;
    use crate::sync::{AroundFork, around_fork};
    use std::ffi::c_void;
    use std::ptr::null_mut;
    use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

    /// What there is of the thread. Only `NONE` is left by whoever needs the thread, and only `RUNNING` by who forks.
    static STATE: AtomicU32 = AtomicU32::new(NONE);
    const NONE: u32 = 0;
    /// Somebody is making it, and then writes [`THREAD`].
    const STARTING: u32 = 1;
    const RUNNING: u32 = 2;
    /// Somebody forks: there is none, and none is made.
    const FORKING: u32 = 3;

    /// Valid while the state is `RUNNING`.
    static THREAD: AtomicU64 = AtomicU64::new(0);
    /// Whether there was one before the fork.
    static WAS_RUNNING: AtomicBool = AtomicBool::new(false);
    /// Counts the calls to it; the thread sleeps on it.
    static CALLS: AtomicU32 = AtomicU32::new(0);
    static STOP: AtomicBool = AtomicBool::new(false);

    /// No less: ages are looked at by a clock that ticks every few milliseconds.
    const SHORTEST: Duration = Duration::from_millis(20);
    const STACK_BYTES: usize = 512 << 10;

    pub(in super::super) fn is_awake() -> bool {
        STATE.load(Ordering::Relaxed) == RUNNING
    }

    /// Has the thread look at once; starts it where there is none. Does nothing while a fork is under way.
    #[cold]
    pub(in super::super) fn wake() {
        CALLS.fetch_add(1, Ordering::SeqCst);
        if STATE.compare_exchange(NONE, STARTING, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            let started = start();
            if let Some(thread) = started {
                THREAD.store(thread, Ordering::Relaxed);
            }
            // Where it could not be made, the next one who needs it tries again.
            STATE.store(if started.is_some() { RUNNING } else { NONE }, Ordering::Release);
        } else {
            futex(libc::FUTEX_WAKE, 1, None);
        }
    }

    /// A thread that nobody but a fork waits for.
    fn start() -> Option<u64> {
        STOP.store(false, Ordering::Relaxed);
        // SAFETY: all zero is a place for attributes.
        let mut attributes: libc::pthread_attr_t = unsafe { std::mem::zeroed() };
        // SAFETY: a place for attributes.
        if unsafe { libc::pthread_attr_init(&raw mut attributes) } != 0 {
            return None;
        }
        // SAFETY: made above. Where the size does not suit the system, its default is used.
        let _ = unsafe { libc::pthread_attr_setstacksize(&raw mut attributes, STACK_BYTES) };
        // SAFETY: all zero is a place for a set of signals.
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
        // SAFETY: a place for a set.
        unsafe { libc::sigfillset(&raw mut all) };
        // A thread starts with its maker's mask.
        // SAFETY: two sets.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
        let mut thread = 0;
        // SAFETY: attributes made above, and a function that takes no argument.
        let failed = unsafe { libc::pthread_create(&raw mut thread, &raw const attributes, run, null_mut()) };
        // SAFETY: the mask from before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, null_mut()) };
        // SAFETY: made above, and not used again.
        unsafe { libc::pthread_attr_destroy(&raw mut attributes) };
        (failed == 0).then_some(thread)
    }

    extern "C" fn run(_: *mut c_void) -> *mut c_void {
        // SAFETY: a name of at most 15 bytes for this thread.
        unsafe { libc::prctl(libc::PR_SET_NAME, c"ctxalloc-decay".as_ptr()) };
        while !STOP.load(Ordering::SeqCst) {
            let seen = CALLS.load(Ordering::SeqCst);
            let next = pass();
            if STOP.load(Ordering::SeqCst) {
                break;
            }
            // Calls since then wake it at once.
            futex(libc::FUTEX_WAIT, seen, next.map(|next| next.saturating_sub(clock::now()).max(SHORTEST)));
        }
        null_mut()
    }

    /// Waits while nobody calls and the time is not over, or wakes who waits.
    fn futex(operation: libc::c_int, value: u32, time: Option<Duration>) {
        let time = time.map(|time| libc::timespec {
            tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: time.subsec_nanos().into(),
        });
        let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: a static word, and a time or NULL.
        let _ = unsafe {
            libc::syscall(libc::SYS_futex, CALLS.as_ptr(), operation | libc::FUTEX_PRIVATE_FLAG, value, time)
        };
    }

    /// The thread ends before the locks of the holders are taken.
    pub(super) fn watch_forks() {
        around_fork(AroundFork { before, in_parent, in_child: after });
    }

    fn before() {
        loop {
            // Acquire pairs with the Release in `wake`: the thread is known.
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
            std::thread::yield_now(); // it starts, or another thread forks
        }
        WAS_RUNNING.store(true, Ordering::Relaxed);
        STOP.store(true, Ordering::SeqCst);
        CALLS.fetch_add(1, Ordering::SeqCst);
        futex(libc::FUTEX_WAKE, 1, None);
        // SAFETY: a thread that was made joinable, by us, and that nobody else joins.
        unsafe { libc::pthread_join(THREAD.load(Ordering::Relaxed), null_mut()) };
        keepers().lock().acquire();
    }

    fn in_parent() {
        let was_running = WAS_RUNNING.load(Ordering::Relaxed);
        after();
        if was_running {
            RESTART.get().copied().unwrap_or(wake)();
        }
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

    /// Something whose last owner but for the forking thread goes away during the fork.
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
        // In a child, whose other threads hold nothing; and the timer ends one that hangs.
        // SAFETY: the child only runs the code below, and ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: a timer whose signal nobody handles.
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
            // SAFETY: our child, and a place for its status.
            let found = unsafe { libc::waitpid(grandchild, &raw mut status, 0) };
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(found != grandchild || status != 0)) };
        }
        let mut status = -1;
        // SAFETY: our child, and a place for its status.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(status, 0, "a child or its child hung or crashed");
    }
}
