//! The threads that have caches. Those that are idle lose them: another thread sends their blocks back to the pools.

use super::cache::{Cache, Caches};
use super::turn::in_turn;
use crate::os;
use crate::sync::{AtomicU32, Biased, ForkLock, HeldAcrossFork, Keyed, Locked, Made, Ordering, held_across_fork};
use std::cell::Cell;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::Duration;

/// A thread that has used no cache for this long is idle.
const IDLE: Duration = Duration::from_secs(1);

/// A thread as others see it: a thread-local, which is in the list from when the thread gets caches until it ends or
/// they are taken.
pub(super) struct Member {
    /// The thread is the owner.
    pub(super) own: Biased<Own>,
    // The fields from here on belong to the holder of the list's lock.
    /// The process in which it is in the list; 0 if it is in none. In a child of `fork` the list is empty.
    process: Cell<u32>,
    /// The thread's number in the system, in that process.
    thread: Cell<u32>,
    next: Cell<*const Member>,
    previous: Cell<*const Member>,
    /// The last pass that looked at it, or that was under way when it joined.
    pass: Cell<u64>,
    /// When it was last seen that the thread had used its caches.
    used: Cell<Duration>,
}

/// What only the thread itself uses, but for visits.
pub(super) struct Own {
    /// From Box::into_raw, or NULL.
    caches: *mut Caches,
    /// The serial number and the address of the cache that was used last. The number is 0, which no pool has, and the
    /// address NULL, if there is none.
    serial: u64,
    latest: *mut Cache,
    /// The thread's shard of the central free lists, once it has one.
    pub(super) shard: Option<usize>,
}

// SAFETY: `caches` is a box that this value owns, and `latest` points to one of its caches: both go with it to another
// thread, and blocks of a pool may be released on any.
unsafe impl Send for Own {}

impl Own {
    pub(super) fn caches(&mut self) -> Option<&mut Caches> {
        // SAFETY: NULL, or a box that this value owns. The reference borrows `self`, so there is only one.
        unsafe { self.caches.as_mut() }
    }

    /// The cache that was used last.
    ///
    /// # Safety
    /// - there is one: the key, its pool's number, is not 0.
    #[inline(always)]
    pub(super) unsafe fn latest(&mut self) -> &mut Cache {
        debug_assert_ne!(self.serial, 0);
        // SAFETY: with a number that a pool has, it is one of our caches (`set_latest`), which nobody else has while
        // `self` is borrowed.
        unsafe { &mut *self.latest }
    }

    /// The cache of the pool with this number, if it is the one that was used last.
    #[inline(always)]
    pub(super) fn latest_of(&mut self, serial: u64) -> Option<&mut Cache> {
        if self.serial != serial {
            return None;
        }
        // SAFETY: no pool has the number 0.
        Some(unsafe { self.latest() })
    }

    /// Notes which cache was used last.
    ///
    /// # Safety
    /// - `latest` is one of this value's caches, of the pool with this number.
    pub(super) unsafe fn set_latest(&mut self, serial: u64, latest: *mut Cache) {
        (self.serial, self.latest) = (serial, latest);
    }

    /// Stores the caches if there are none yet; else returns them.
    pub(super) fn put(&mut self, caches: Box<Caches>) -> Option<Box<Caches>> {
        if !self.caches.is_null() {
            return Some(caches);
        }
        self.caches = Box::into_raw(caches);
        None
    }

    pub(super) fn take(&mut self) -> Option<Box<Caches>> {
        let caches = std::mem::replace(&mut self.caches, null_mut());
        (self.serial, self.latest) = (0, null_mut());
        // SAFETY: from `Box::into_raw` in `put`; no copy of the pointer is left here, and `latest`, which pointed into
        // it, is cleared.
        (!caches.is_null()).then(|| unsafe { Box::from_raw(caches) })
    }
}

impl Keyed for Own {
    /// The number of the pool whose cache was used last.
    fn key(&self) -> u64 {
        self.serial
    }
}

impl Member {
    #[cfg(not(ctxalloc_loom))]
    pub(super) const fn new() -> Self {
        let own = Biased::new(Own { caches: null_mut(), serial: 0, latest: null_mut(), shard: None });
        let (next, previous) = (Cell::new(null()), Cell::new(null()));
        let (process, thread, pass) = (Cell::new(0), Cell::new(0), Cell::new(0));
        Self { own, process, thread, next, previous, pass, used: Cell::new(Duration::ZERO) }
    }

    /// Whether it was not used for [`IDLE`].
    fn is_idle(&self, now: Duration) -> bool {
        let is_used = self.own.take_used();
        if is_used {
            self.used.set(now);
        }
        !is_used && now.saturating_sub(self.used.get()) >= IDLE
    }
}

struct List {
    head: *const Member,
    /// How many passes were begun.
    pass: u64,
    process: u32,
    /// In a child of `fork`: the caches of threads that only its parent has. From Box::into_raw, or NULL.
    left: *mut Caches,
}

// SAFETY: members are reached under the list's lock, and leave before they end.
unsafe impl Send for List {}

struct Threads {
    list: Locked<List>,
    /// The turn of the thread that takes caches and sends their blocks back. Taken before the list's lock.
    sending: ForkLock,
    /// The thread that forks, while it does; one at a time.
    forking: AtomicU32,
}

impl HeldAcrossFork for Threads {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(&self.sending);
        visit(self.list.lock());
    }

    fn before_fork(&self) -> bool {
        self.forking.store(os::thread_number(), Ordering::Relaxed);
        self.acquire_each()
    }

    fn after_fork(&self) {
        self.release_each();
        // In a child this empties the list, before the child starts threads: their members may lie where those of the
        // parent's threads were.
        with_list(|_| ());
    }
}

static THREADS: Made<Arc<Threads>> = Made::new();

/// Makes the list. Called where it is safe to allocate and to lock: before the first cache. There is none under loom,
/// because a lock must not outlive the model it was made in.
pub(super) fn prepare() {
    if cfg!(ctxalloc_loom) {
        return;
    }
    THREADS.get_or_make(|| {
        let list = List { head: null(), pass: 0, process: std::process::id(), left: null_mut() };
        held_across_fork(Threads { list: Locked::new(list), sending: ForkLock::new(), forking: AtomicU32::new(0) })
    });
}

fn with_list<R>(work: impl FnOnce(&mut List) -> R) -> Option<R> {
    let threads = THREADS.get()?;
    Some(threads.list.with(|list| {
        let process = std::process::id();
        if list.process != process {
            list.begin_child(process, threads.forking.load(Ordering::Relaxed));
        }
        work(list)
    }))
}

/// Adds this thread, if it is not in the list.
pub(super) fn join(member: &Member) {
    with_list(|list| list.add(member));
}

/// Takes this thread out of the list: its caches are its own from then on.
pub(super) fn leave(member: &Member) {
    with_list(|list| list.remove(member));
}

/// Takes the caches of idle threads. Returns when to look again; `None` if no thread has caches, or they cannot be
/// taken.
pub(super) fn take_idle(now: Duration) -> Option<Duration> {
    let can_be_taken = Biased::<Own>::can_be_visited();
    take(|member| can_be_taken && member.is_idle(now));
    (can_be_taken && with_list(|list| !list.head.is_null())?).then(|| now + IDLE)
}

/// Takes the caches of all threads.
pub(super) fn take_all() {
    take(|_| true);
}

/// Sends back the caches that a fork has left without a thread, and those of the threads that are wanted, one thread at
/// a time.
fn take(is_wanted: impl Fn(&Member) -> bool) {
    let Some(threads) = THREADS.get() else { return };
    in_turn(&threads.sending, || {
        // Not under the list's lock: pools have locks of their own, and a pool may end with this.
        while let Some(caches) = with_list(List::take_left).flatten() {
            caches.send();
        }
        let Some(pass) = with_list(List::begin_pass) else { return };
        while let Some(caches) = with_list(|list| list.take_next(pass, &is_wanted)).flatten() {
            caches.send();
        }
    });
}

impl List {
    /// Empties the list in a child of `fork`, which has one thread: that one joins again later, and the caches of the
    /// others are set aside. A thread that was using its caches while another one forked may have left them half
    /// changed: those are leaked.
    fn begin_child(&mut self, process: u32, forking: u32) {
        let mut left = self.left;
        for member in self.members().filter(|member| member.thread.get() != forking && !member.own.is_in_use()) {
            // SAFETY: the child does not have that thread, which was not inside (`is_in_use`). Nobody visits: a visitor
            // holds the list's lock, as the caller does now.
            if let Some(mut caches) = unsafe { member.own.abandoned(Own::take) } {
                caches.next = left;
                left = Box::into_raw(caches);
            }
        }
        (self.head, self.left, self.process) = (null(), left, process);
    }

    fn take_left(&mut self) -> Option<Box<Caches>> {
        // SAFETY: NULL, or from `begin_child`, and nobody else has it.
        let caches = (!self.left.is_null()).then(|| unsafe { Box::from_raw(self.left) })?;
        self.left = caches.next;
        Some(caches)
    }

    fn begin_pass(&mut self) -> u64 {
        self.pass += 1;
        self.pass
    }

    fn members(&self) -> impl Iterator<Item = &Member> {
        // SAFETY: a thread leaves the list before its member ends, so members in the list exist; their links are NULL
        // or members in the list.
        let member = |pointer: *const Member| unsafe { pointer.as_ref() };
        std::iter::successors(member(self.head), move |last| member(last.next.get()))
    }

    /// Takes the caches of the next thread that is wanted, and the thread out of the list.
    fn take_next(&mut self, pass: u64, is_wanted: impl Fn(&Member) -> bool) -> Option<Box<Caches>> {
        let found = self.members().filter(|member| member.pass.get() < pass).find_map(|member| {
            member.pass.set(pass);
            if !is_wanted(member) {
                return None;
            }
            let caches = member.own.visit(Own::take).flatten()?;
            Some((std::ptr::from_ref(member), caches))
        });
        let (member, caches) = found?;
        // SAFETY: it is in the list, so it exists: the lock, which the caller holds, keeps it there.
        self.remove(unsafe { &*member });
        Some(caches)
    }

    fn add(&mut self, member: &Member) {
        if member.process.get() == self.process {
            return;
        }
        // SAFETY: a member in the list, so it exists.
        if let Some(head) = unsafe { self.head.as_ref() } {
            head.previous.set(member);
        }
        member.process.set(self.process);
        member.thread.set(os::thread_number());
        member.pass.set(self.pass);
        member.next.set(self.head);
        member.previous.set(null());
        self.head = member;
    }

    fn remove(&mut self, member: &Member) {
        if member.process.get() != self.process {
            return;
        }
        let (next, previous) = (member.next.get(), member.previous.get());
        // SAFETY: both are NULL or members in the list, so they exist.
        let (next_member, previous_member) = unsafe { (next.as_ref(), previous.as_ref()) };
        if let Some(next_member) = next_member {
            next_member.previous.set(previous);
        }
        match previous_member {
            Some(previous_member) => previous_member.next.set(next),
            None => self.head = next,
        }
        member.process.set(0);
    }
}
