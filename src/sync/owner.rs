//! `OwnerLock`: a lock that costs its first thread no atomic read-modify-write until a second thread comes.
//!
//! Most requests live on one thread. The first thread that takes such a lock owns it: from then on it only marks that
//! it is inside of a *section* (two plain stores in its own record) and looks whether it still owns the lock. A second
//! thread takes the ownership away for good, and everybody uses the spin lock beside it from then on.
//!
//! ```text
//!   owner:   NOBODY ──first use──► thread ──second thread──► thread | REVOKING ──section over──► SHARED
//!               └───────────────────────── no membarrier here ─────────────────────────────────────▲
//! ```
//! Where whoever uses a lock is always its owner, the thread that comes after one that has ended becomes it instead
//! (`thread | REVOKING ──section over──► next thread`, [`OwnerLock::inherit`]).
//!
//! Why the two exclude each other: the owner stores its mark, then loads `owner`; the other thread stores `owner`, then
//! loads the mark. One of them must see the other (Dekker). The owner's side has no fence; the other side calls
//! `membarrier`, which runs one on every processor that runs a thread of this process (under loom both sides have a
//! fence). Where the system has no `membarrier` (and under Miri, which does not know it) no lock is ever owned.
//!
//! What runs under such a lock changes numbers and lists of our own; only an arena's runs a user's code
//! (`Pages::empty`). A panic there ends the section and lets the locks go, as an answer would.

use super::locked::{Behind, Lock};
use super::membarrier;
use super::standstill::Unmarked;
use super::threads::{Here, Nameless, REVOKED, Section, Thread, births};
use super::{AtomicPtr, AtomicU32, Ordering, SOON, fork, yield_now};
use std::ptr::null_mut;

/// Excludes threads from one stretch of work. Survives `fork`: see [`OwnerLock::acquire`]; and `standstill` for what it
/// guards.
#[derive(Debug)]
pub(crate) struct OwnerLock {
    /// [`NOBODY`], [`SHARED`], or the owner's record, with [`REVOKING`] in its address while it is taken away.
    /// - set to a thread: from `NOBODY` only, by that thread. Cannot be set once it was `SHARED`.
    /// - set to `thread | REVOKING`: by another thread, which then waits for the owner's section. Only `SHARED`
    ///   follows, or where the owner had ended the thread that inherits.
    /// - set to `SHARED`: when no section of an owner can be under way any more. Never changes again.
    owner: AtomicPtr<Thread>,
    /// The spin lock. 0: free. Else twice the number of births ([`births`]) of the process that took it, plus one.
    /// - set: from 0 by whoever takes it; in a child of `fork` also from an older number, whose thread only the parent
    ///   has.
    /// - cleared: by the thread that took it.
    spin: AtomicU32,
}

/// More turns than a machine's life has.
const FOR_EVER: usize = usize::MAX;

const REVOKING: usize = REVOKED;
const SHARED: *mut Thread = (&raw const SHARED_BY_ALL).cast::<Thread>().cast_mut();
const NOBODY: *mut Thread = (&raw const NOBODYS).cast::<Thread>().cast_mut();
static SHARED_BY_ALL: Nameless = Nameless::new();
static NOBODYS: Nameless = Nameless::new();

/// This thread's record; none while the thread ends.
#[inline]
fn own() -> Option<&'static Thread> {
    Thread::own(fork::watch)
}

fn marked(owner: *mut Thread) -> *mut Thread {
    owner.map_addr(|address| address | REVOKING)
}

fn unmarked(owner: *mut Thread) -> *mut Thread {
    owner.map_addr(|address| address & !REVOKING)
}

/// The owner's record; `None` for [`NOBODY`] and [`SHARED`].
#[inline(always)]
#[allow(unsafe_code, reason = "records that are never freed")]
fn thread_of(owner: *mut Thread) -> Option<&'static Thread> {
    if owner == SHARED || owner == NOBODY {
        return None;
    }
    // SAFETY: else it is, without the mark, the address of a record, which is never freed.
    Some(unsafe { &*unmarked(owner) })
}

impl OwnerLock {
    pub(crate) fn new() -> Self {
        Self { owner: AtomicPtr::new(NOBODY), spin: AtomicU32::new(0) }
    }

    /// One that belongs to this thread from the start: for what will most likely be used here.
    pub(crate) fn new_owned() -> Self {
        let own = own().filter(|_| membarrier::is_there()).map_or(NOBODY, Thread::as_owner);
        Self { owner: AtomicPtr::new(own), spin: AtomicU32::new(0) }
    }

    /// Runs `work` alone. `work` is short and takes no such lock.
    #[inline]
    pub(crate) fn with<R>(&self, work: impl FnOnce() -> R) -> R {
        with_all(&[self], work)
    }

    /// Excludes everybody else until the section is dropped, if this thread owns the lock and that can be known without
    /// a thread-local. What is done in the section is as for [`with`](Self::with), and waits for nobody:
    /// [`wait_for_brief_sections`] waits for it.
    #[inline(always)]
    pub(crate) fn enter_owned(&self) -> Option<Section> {
        self.enter_owned_by(Here::of(self.owner_if_this_thread()?))
    }

    /// [`enter_owned`](Self::enter_owned) for who knows which thread this is.
    #[inline(always)]
    pub(crate) fn enter_owned_by(&self, here: Here) -> Option<Section> {
        let section = Section::begin_brief(here.thread());
        self.is_owned_by(here).then_some(section)
    }

    /// Whether this thread owns the lock, where that can be known without a thread-local. In a section it stays so.
    #[inline]
    pub(crate) fn is_owned_here(&self) -> bool {
        self.owner_if_this_thread().is_some()
    }

    /// Whether a second thread has taken it: then nobody will ever own it.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.owner.load(Ordering::Relaxed) == SHARED
    }

    /// The record of this thread, if it owns the lock and that can be known without a thread-local. A guess for the
    /// caller: in its section it looks again.
    #[inline(always)]
    #[allow(unsafe_code, reason = "records that are never freed")]
    fn owner_if_this_thread(&self) -> Option<&'static Thread> {
        // Acquire: another thread may have made the record just now.
        let owner = self.owner.load(Ordering::Acquire);
        // SAFETY: a record, also with `REVOKING`, which is the address of what it has for that, or one of two statics.
        unsafe { Thread::if_this_thread(owner) }
    }

    /// Whether a section of `thread` excludes everybody else, without the spin lock.
    #[inline]
    pub(crate) fn is_owned_by(&self, here: Here) -> bool {
        std::ptr::eq(self.owner.load(Ordering::Relaxed), here.thread())
    }

    /// Makes the lock `own` if it is nobody's, and shared if it is another thread's, or `own` is NULL. Outside of
    /// sections. False if it waited for so many turns: then the next call goes on with it.
    #[cold]
    fn settle(&self, own: *mut Thread, turns: usize) -> bool {
        loop {
            // Acquire: whoever shares the lock comes after all sections of its owner.
            let owner = self.owner.load(Ordering::Acquire);
            let (before, next) = if owner == SHARED || (!own.is_null() && unmarked(owner) == own) {
                // Where it is being taken from us: of our sections, for which they wait, there is none now.
                return true;
            } else if owner == NOBODY {
                (owner, if membarrier::is_there() && !own.is_null() { own } else { SHARED })
            } else if self.revoke(unmarked(owner), turns) {
                (marked(owner), SHARED)
            } else {
                return false;
            };
            // AcqRel: hands on what was done by the owner, as `revoke` has seen it.
            if self.owner.compare_exchange(before, next, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return true;
            }
        }
    }

    /// Takes the lock away from its owner: when this returns true, no section of it is under way under this lock. False
    /// if one still was after so many turns; whoever comes next, the owner too, finds the mark.
    fn revoke(&self, owner: *mut Thread, turns: usize) -> bool {
        // Whoever comes second finds the mark, and does the same.
        let _ = self.owner.compare_exchange(owner, marked(owner), Ordering::AcqRel, Ordering::Relaxed);
        membarrier::heavy();
        // A later section, should there be one, sees the mark.
        thread_of(owner).is_none_or(|owner| owner.wait_for_section(turns))
    }

    /// Makes it this thread's if the one that owned it has ended; whether it is now. Only for a lock that nobody but
    /// its owner takes. Outside of sections and locks.
    #[cold]
    pub(crate) fn inherit(&self) -> bool {
        // Acquire: another thread may have made the record just now.
        let owner = self.owner.load(Ordering::Acquire);
        thread_of(owner).is_some_and(Thread::has_ended) && own().is_some_and(|own| self.inherit_from(owner, own))
    }

    /// The next thread may have got the record meanwhile, and be inside of a section: it loses the lock as in
    /// [`revoke`](Self::revoke).
    fn inherit_from(&self, owner: *mut Thread, own: &'static Thread) -> bool {
        self.revoke(owner, FOR_EVER)
            // AcqRel: as in `settle`.
            && self.owner.compare_exchange(marked(owner), own.as_owner(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Takes the spin lock, which was settled. In a child of `fork` also from a thread that only the parent has. False
    /// if it was not free for so many turns.
    fn acquire(&self, mut turns: usize) -> bool {
        let own = births().wrapping_mul(2) | 1;
        loop {
            // Acquire, here and below, pairs with the Release in `release`.
            match self.spin.compare_exchange(0, own, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(holder) if holder == own && turns == 0 => return false,
                Err(holder) if holder == own => {
                    turns -= 1;
                    yield_now();
                }
                Err(gone) => {
                    if self.spin.compare_exchange(gone, own, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                        return true;
                    }
                }
            }
        }
    }

    fn release(&self) {
        self.spin.store(0, Ordering::Release);
    }

    /// Takes the lock before `fork`, for values that a child must not find half changed. False if it stayed busy for a
    /// moment. Pairs with [`release_after_fork`](Self::release_after_fork).
    pub(crate) fn acquire_before_fork(&self) -> bool {
        self.settle(null_mut(), SOON) && self.acquire(SOON)
    }

    /// Lets it go, in the parent and in the child.
    pub(crate) fn release_after_fork(&self) {
        self.release();
    }
}

/// Runs `work` while all of these locks exclude everybody else. They are taken in this order, which must be the same
/// for all who take several of them. `work` is short and takes no such lock.
#[inline]
pub(crate) fn with_all<L: AsOwnerLock, R>(locks: &[L], work: impl FnOnce() -> R) -> R {
    if cfg!(ctxalloc_loom) {
        return exclusively(None, locks, work); // a thread's record would outlive its model
    }
    let first = locks.first().and_then(|lock| lock.owner_lock().owner_if_this_thread());
    exclusively(first.or_else(own), locks, work)
}

/// [`OwnerLock::enter_owned`] for all of these, for what a child of `fork` must find in all of them or in none:
/// `standstill` waits for it. `None` also while another thread forks.
#[inline(always)]
pub(crate) fn enter_all_owned<L: AsOwnerLock>(locks: &[L]) -> Option<Section> {
    let thread = locks.first()?.owner_lock().owner_if_this_thread()?;
    let section = Section::try_begin(thread)?;
    locks.iter().all(|lock| lock.owner_lock().is_owned_by(Here::of(thread))).then_some(section)
}

/// Waits for the end of each section of [`OwnerLock::enter_owned`] that other threads, the owners, are inside of under
/// these locks. Those that begin from now on see what the caller has stored before. So the caller stops the owners'
/// short way and leaves them their locks; it may hold spin locks, other than these.
///
/// Not called inside of such a section.
pub(crate) fn wait_for_brief_sections<'a>(locks: impl Iterator<Item = &'a OwnerLock>) {
    membarrier::heavy();
    for lock in locks {
        // Acquire: an owner before has done what it did. One that owns the lock from now on sees what was stored.
        if let Some(owner) = thread_of(lock.owner.load(Ordering::Acquire)) {
            owner.wait_for_brief_section();
        }
    }
}

/// What has an [`OwnerLock`].
pub(crate) trait AsOwnerLock {
    fn owner_lock(&self) -> &OwnerLock;
}

impl AsOwnerLock for &OwnerLock {
    fn owner_lock(&self) -> &OwnerLock {
        self
    }
}

#[inline]
fn exclusively<L: AsOwnerLock, R>(own: Option<&'static Thread>, locks: &[L], work: impl FnOnce() -> R) -> R {
    if let Some(thread) = own {
        let section = Section::begin(thread);
        if locks.iter().all(|lock| lock.owner_lock().is_owned_by(Here::of(thread))) {
            return work(); // the section ends with it
        }
        drop(section);
    }
    exclusively_slowly(own, locks, work)
}

#[cold]
#[inline(never)]
fn exclusively_slowly<L: AsOwnerLock, R>(own: Option<&'static Thread>, locks: &[L], work: impl FnOnce() -> R) -> R {
    // Before anything is held: who waits for a section must not keep others waiting.
    // Past those that `taken` has a bit for, none stays owned.
    for (number, lock) in locks.iter().enumerate() {
        let owner = own.filter(|_| number < u64::BITS as usize);
        lock.owner_lock().settle(owner.map_or(null_mut(), Thread::as_owner), FOR_EVER);
    }
    // Both are dropped after `taken`.
    let _section = own.map(Section::begin);
    let _unmarked = if own.is_none() && !cfg!(ctxalloc_loom) { Some(Unmarked::begin()) } else { None };
    // Those that are owned when we look stay so for the section; a bit for each whose spin lock was taken.
    let mut taken = Taken { locks, spins: 0 };
    for (number, lock) in locks.iter().map(AsOwnerLock::owner_lock).enumerate() {
        if number >= u64::BITS as usize {
            lock.acquire(FOR_EVER);
        } else if !own.is_some_and(|thread| lock.is_owned_by(Here::of(thread))) {
            lock.acquire(FOR_EVER);
            taken.spins |= 1 << number;
        }
    }
    work()
}

/// Locks of which these spin locks were taken, and those of all past the 64th. Dropping it lets them go, by a panic
/// too.
struct Taken<'a, L: AsOwnerLock> {
    locks: &'a [L],
    spins: u64,
}

impl<L: AsOwnerLock> Drop for Taken<'_, L> {
    fn drop(&mut self) {
        // The first one last: whoever gets it may be the one who frees all of them (the end of a request).
        for (number, lock) in self.locks.iter().map(AsOwnerLock::owner_lock).enumerate().rev() {
            if number >= u64::BITS as usize || self.spins & 1 << number != 0 {
                lock.release();
            }
        }
    }
}

/// A value behind an [`OwnerLock`].
pub(crate) type Owned<T> = Behind<OwnerLock, T>;

// SAFETY: `with` runs `work` in a section of the owner, or under the spin lock after the last section of an owner is
// over; see the top of this file for why these exclude each other.
#[allow(unsafe_code, reason = "a lock")]
unsafe impl Lock for OwnerLock {
    fn new() -> Self {
        Self::new()
    }

    #[inline]
    fn with<R>(&self, work: impl FnOnce() -> R) -> R {
        self.with(work)
    }
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests;

#[cfg(all(test, ctxalloc_loom))]
mod loom_tests;
