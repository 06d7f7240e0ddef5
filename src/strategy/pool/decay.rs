//! What returns old memory to the system when no thread uses the pools: what is looked after, and what is done to it.
//! `thread` is who does it.
//!
//! Each pass takes the caches of idle threads, gives back memory that is old enough, and writes what waits in a
//! recording. The thread sleeps without a time limit while there is none of these; [`Noted::note`] wakes it.

#[cfg(not(any(ctxalloc_loom, miri, windows)))]
mod thread;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::idle;
use crate::os::resident_within;
use crate::source::heap;
use crate::survived::survived;
#[cfg(not(ctxalloc_loom))]
use crate::sync::{Locked, Made};
use crate::unattributed::unattributed;

/// A pool or an arena: it keeps unused memory for later. Or the process's budget, whose limit is read again.
pub(in crate::strategy) trait Keeper: Send + Sync {
    /// Gives back memory that is old enough at `now`. Returns when to call it again; `None` if nothing is left, and
    /// then it is called again only after [`wake`].
    fn decay(&self, now: Duration) -> Option<Duration>;

    /// Gives back all unused memory; returns how many bytes.
    fn give_back(&self) -> usize {
        0
    }

    /// What it has of the system. An arena has none of its own: its spans are its pool's.
    fn kept(&self) -> PoolBytes {
        PoolBytes::default()
    }

    /// Visits what it has mapped, as addresses and sizes in bytes, under its locks: `visit` must not allocate.
    fn for_each_mapping(&self, visit: &mut dyn FnMut(usize, usize)) {
        let _ = visit; // an arena has none, as above
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

/// How many bytes of what all pools have mapped are in memory. `None`: the system does not say.
pub(crate) fn pool_resident_bytes() -> Option<usize> {
    let _unattributed = unattributed();
    let mut mappings: Vec<(usize, usize)> = Vec::new();
    for keeper in alive() {
        let before = mappings.len();
        loop {
            let mut count = 0;
            keeper.for_each_mapping(&mut |start, size_bytes| {
                count += 1;
                if mappings.len() < mappings.capacity() {
                    mappings.push((start, size_bytes));
                }
            });
            if mappings.len() - before == count {
                break;
            }
            mappings.truncate(before);
            mappings.reserve(2 * count);
        }
    }
    // Without a lock: a mapping that goes meanwhile is not there.
    mappings.iter().map(|(start, size_bytes)| resident_within(*start, *size_bytes)).sum()
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
        thread::work(thread::Work { pass, lock: || keepers().lock() });
        Locked::new(Keepers::default())
    })
}

/// Keeps a keeper registered until it is dropped.
#[derive(Debug)]
pub(in crate::strategy) struct Registration {
    number: u64,
}

/// Registers a keeper with the decay thread. Its locks must be held across `fork` already.
pub(in crate::strategy) fn register(keeper: Weak<dyn Keeper>) -> Registration {
    let _unattributed = unattributed();
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

/// Gives back old memory of all keepers and the caches of idle threads. Returns when to do so again.
///
/// When nothing is left after a burst, it also trims the C heap: each array has a few bytes there (its shape), and the
/// heap keeps those of a million arrays until it is trimmed.
fn pass() -> Option<Duration> {
    CACHES.clear();
    let now = super::clock::now();
    let look_again = survived(|| idle::take_idle(now)).unwrap_or(Some(now + Duration::from_secs(1)));
    if look_again.is_some() {
        CACHES.keep();
    }
    // One whose source panics is looked at again when it is next used. The last owner may be this thread.
    let written = write_recordings();
    let next = alive().into_iter().filter_map(|keeper| survived(move || keeper.decay(super::clock::now()))?).min();
    if next.is_none() && RELEASED.load(Ordering::Relaxed) >= WORTH_A_TRIM {
        RELEASED.store(0, Ordering::Relaxed);
        heap::trim();
    }
    [look_again, written, next].into_iter().flatten().min()
}

/// Set when a thread got caches; see [`Noted`].
static CACHES: Noted = Noted::new();

/// Called when a thread got caches: they are taken when it is idle.
pub(super) fn note_caches() {
    CACHES.note();
}

/// Set when an event of a recording waits to be written.
static RECORDING: Noted = Noted::new();

/// Makes the thread ready to write recordings; what tells it that something waits. That is called after each event: it
/// is cheap, and allocates nothing.
pub(crate) fn flush_recordings() -> fn() {
    with_keepers(|_| ()); // a fork ends the thread from now on
    || RECORDING.note()
}

/// Writes what waits long enough, though no event comes; when to do so again.
fn write_recordings() -> Option<Duration> {
    RECORDING.clear();
    let after = survived(crate::recording::flush)??;
    RECORDING.keep();
    Some(super::clock::now() + after)
}

/// A keeper's flag: there is memory to give back, and the decay thread knows. Set when memory is freed and the thread
/// was woken for it; cleared right before the thread looks.
#[derive(Debug, Default)]
pub(in crate::strategy) struct Noted(AtomicBool);

impl Noted {
    const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Notes that there is something to give back. Cheap if it is noted already.
    #[inline]
    pub(in crate::strategy) fn note(&self) {
        // SeqCst, here and in `clear`: either the thread, having cleared the flag, finds what was freed before this
        // call, or this call finds the flag cleared.
        if !self.0.load(Ordering::SeqCst) || !is_awake() {
            self.0.store(true, Ordering::SeqCst);
            wake();
        }
    }

    /// Called before the thread looks. Returns whether it was set.
    pub(in crate::strategy) fn clear(&self) -> bool {
        self.0.swap(false, Ordering::SeqCst)
    }

    /// Called when the thread has found something and will look again by itself.
    pub(in crate::strategy) fn keep(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[cfg(any(ctxalloc_loom, miri, windows))]
fn is_awake() -> bool {
    true
}

/// Whether a thread looks at what was noted, so that nobody else need look at the clock for that.
#[inline]
pub(super) fn has_thread() -> bool {
    !cfg!(any(ctxalloc_loom, miri, windows)) && is_awake()
}

/// Without a thread under loom and Miri, and on Windows.
#[cfg(any(ctxalloc_loom, miri, windows))]
fn wake() {
    if false {
        pass();
    }
}

#[cfg(not(any(ctxalloc_loom, miri, windows)))]
use thread::{is_awake, wake};

/// Has the thread look at all keepers, of which one is new.
pub(in crate::strategy) fn look() {
    wake();
}

/// How the thread is started again in the parent after a fork. Python does it later, when it is safe to start threads.
#[cfg(feature = "python")]
pub(crate) mod restart {
    /// Has `later` called after a fork instead; it calls [`now`] when it can.
    pub(crate) fn by(later: fn()) {
        super::thread::restart_by(later);
    }

    /// Starts the thread, or wakes it.
    pub(crate) fn now() {
        super::wake();
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

    /// Its last owner besides the forking thread drops it during the fork; then it is busy, or not.
    struct Leaving {
        is_busy: bool,
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

        fn before_fork(&self) -> bool {
            let Some(forked) = self.forked.lock().expect("no panic").take() else { return true };
            forked.send(()).expect("the owner waits");
            while self.own.strong_count() > 1 {
                hint::spin_loop();
            }
            !self.is_busy
        }

        fn after_fork(&self) {}
    }

    #[test]
    fn what_another_thread_drops_during_a_fork_ends_after_it() {
        fork_while_the_last_owner_drops(false);
    }

    #[test]
    fn what_another_thread_drops_while_a_fork_begins_again_ends_after_it() {
        fork_while_the_last_owner_drops(true);
    }

    #[allow(unsafe_code, reason = "fork")]
    fn fork_while_the_last_owner_drops(is_busy: bool) {
        // In a child, which has no other threads. Its alarm ends it if it hangs.
        // SAFETY: the child runs only the code below and then ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: alarm takes any number; nobody handles its signal.
            unsafe { libc::alarm(20) };
            let (forked, has_forked) = channel();
            let leaving = Arc::new_cyclic(|leaving: &Weak<Leaving>| Leaving {
                is_busy,
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
