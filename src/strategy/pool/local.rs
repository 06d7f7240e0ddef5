//! How a thread reaches its caches: through a thread-local without a destructor. The caches are sent back to their
//! pools when the thread ends; blocks that it releases after that, in later destructors, go to the central free lists
//! directly. They are also sent back when the thread is idle (`idle`); it gets new ones when it next needs them.
//!
//! No reference into the caches is held while other code runs that may allocate: if this pool is the global allocator,
//! that code would enter here again. Blocks move in and out through an array on the stack.

use super::cache::{Cache, Caches, Home, NO_BLOCKS, Number};
use super::idle::{Member, Own};
use super::{classes, idle, region};
use crate::sync::Inside;
use crate::unattributed::unattributed;
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Weak;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

#[cfg(not(ctxalloc_loom))]
thread_local! {
    static MEMBER: Member = const { Member::new() };
}

thread_local! {
    /// Its destructor sends the caches back when the thread ends.
    static OWNER: Owner = const { Owner { closed: Cell::new(false) } };
    /// Set while a cache is being made. What that allocates may come from a pool, which then does without a cache.
    static OPENING: Cell<bool> = const { Cell::new(false) };
    /// [`forks`](crate::sync::forks) when the thread last joined those that have caches.
    static JOINED: Cell<u32> = const { Cell::new(0) };
}

struct Owner {
    closed: Cell<bool>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.closed.set(true);
        with_member(idle::leave);
        if let Some(caches) = own(Own::take).flatten() {
            caches.send();
        }
    }
}

/// This thread does without caches from now on.
#[cfg_attr(any(ctxalloc_loom, miri, windows), allow(dead_code, reason = "for the decay thread"))]
pub(super) fn do_without() {
    let _ = OWNER.try_with(|owner| owner.closed.set(true));
}

/// `None` under loom, whose atomics must not outlive the model they were made in: no thread has caches there.
#[inline(always)]
fn with_member<R>(work: impl FnOnce(&Member) -> R) -> Option<R> {
    #[cfg(not(ctxalloc_loom))]
    return {
        // Not `MEMBER.with(work)`: the compiler makes that a call, with all that `work` has captured in memory.
        let member: *const Member = MEMBER.with(std::ptr::from_ref);
        // SAFETY: a thread-local without a destructor is there until its thread ends, and `work` runs on this thread
        // and cannot keep the reference.
        Some(work(unsafe { &*member }))
    };
    #[cfg(ctxalloc_loom)]
    return {
        drop(work);
        None
    };
}

/// Runs `work` on what this thread has. `work` must not allocate, free or call into this file.
#[inline]
fn own<R>(work: impl FnOnce(&mut Own) -> R) -> Option<R> {
    // SAFETY: this thread's own member, and `work` does not call into this file.
    with_member(|member| unsafe { member.own.own(work) })
}

/// Runs `work` on this thread's cache of the pool, if it has one. `work` must not allocate, free or call into this
/// file.
#[inline]
pub(super) fn with<R>(number: &Number, work: impl FnOnce(&mut Cache) -> R) -> Option<R> {
    own(|own| {
        if own.latest_of(number.serial()).is_none() {
            find(own, number);
        }
        own.latest_of(number.serial()).map(work)
    })
    .flatten()
}

/// Takes the block of `class` that this thread used last of the pool with this number, if it keeps one, and that pool
/// is the one that this thread used last: if not, [`with`] finds it.
///
/// A function of its own, as [`push`] and [`push_if_of`] are: in another crate, where generic code of a pool is
/// compiled, a thread-local is reached by a call. They call nothing, and so need no registers saved.
#[inline(never)]
pub(super) fn pop(serial: u64, class: usize) -> Option<NonNull<u8>> {
    take_latest(serial, class)
}

/// Keeps a block of `class`; false if this thread has no room for it, or last used another pool.
#[inline(never)]
pub(super) fn push(serial: u64, class: usize, block: NonNull<u8>) -> bool {
    keep_latest(serial, class, block)
}

/// [`push`] of a block that is of `class` if its record says so too; else false.
///
/// Where the caller knows the class, what is put back waits for nothing: the record is only compared.
///
/// # Safety
/// - `block` is a live block of this pool.
#[inline(never)]
pub(super) unsafe fn push_if_of(serial: u64, class: usize, block: NonNull<u8>) -> bool {
    let address = block.addr().get();
    // SAFETY: the block is live (this function's contract), so its region is in the map.
    let region = unsafe { region::find(address) };
    region.has_class_at(address, class) && keep_latest(serial, class, block)
}

/// [`pop`] where the pool with this number is the one that this thread used last, and nobody visits.
#[inline(always)]
pub(super) fn take_latest(serial: u64, class: usize) -> Option<NonNull<u8>> {
    let inside = enter(serial)?;
    // SAFETY: the key is a pool's number.
    unsafe { inside.value.latest() }.pop(class)
}

/// [`push`] where the pool with this number is the one that this thread used last, and nobody visits.
#[inline(always)]
pub(super) fn keep_latest(serial: u64, class: usize, block: NonNull<u8>) -> bool {
    let Some(inside) = enter(serial) else { return false };
    // SAFETY: the key is a pool's number.
    unsafe { inside.value.latest() }.push(class, block)
}

/// What this thread has, if the pool with this number is the one that it used last, unless somebody visits. Until it is
/// dropped, nothing else in this file is called.
#[cfg(not(ctxalloc_loom))]
#[inline(always)]
fn enter(serial: u64) -> Option<Inside<'static, Own>> {
    let member: *const Member = MEMBER.with(std::ptr::from_ref);
    // SAFETY: a thread-local without a destructor is there until its thread ends, and the two callers, which run on
    // this thread, drop what they get before they return, call nothing in this file, and leave the key.
    unsafe { (*member).own.enter(serial) }
}

#[cfg(ctxalloc_loom)]
fn enter(_: u64) -> Option<Inside<'static, Own>> {
    None
}

/// Makes the cache of a pool that is not the one used last the one used last, if there is one.
#[inline(never)]
fn find(own: &mut Own, number: &Number) {
    if let Some(found) = own.caches().map(|caches| caches.find(number)).filter(|found| !found.is_null()) {
        // SAFETY: `Caches::find` returns the cache of the pool with this number, one of `own`'s.
        unsafe { own.set_latest(number.serial(), found) };
    }
}

/// This thread's shard of the central free lists; the first for a thread without caches.
pub(super) fn shard() -> usize {
    own(|own| own.shard).flatten().unwrap_or(0)
}

/// Threads get the shards in turn: each takes the next number, which `central` divides by the number of shards.
fn next_shard() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    THREADS.fetch_add(1, Ordering::Relaxed)
}

/// Makes room for more blocks of `class` in this thread's cache of the pool, which is made if there is none. Does
/// nothing while the thread is ending. Returns whether the thread has joined the list of `idle`, so that the decay
/// thread has to look at it from now on.
#[cold]
pub(super) fn grow(number: &Number, class: usize, home: impl FnOnce() -> Weak<dyn Home>) -> bool {
    let forks = crate::sync::forks();
    let mut is_new = JOINED.replace(forks) != forks;
    if with(number, |_| ()).is_none() {
        if !open(number, home) {
            return false;
        }
        is_new = true;
    }
    if is_new {
        with_member(idle::join);
    }
    if let Some(taken) = own(|own| own.caches()?.grow(number, class)).flatten() {
        taken.send();
    }
    is_new
}

/// Makes this thread's cache of the pool; false if there can be none now.
fn open(number: &Number, home: impl FnOnce() -> Weak<dyn Home>) -> bool {
    let alive = OWNER.try_with(|owner| !owner.closed.get()).unwrap_or(false);
    if !alive || !number.has_place() || OPENING.replace(true) {
        return false;
    }
    let _opened = Opened; // by a panic too: what allocates may be the program's own
    make(number, home());
    true
}

struct Opened;

impl Drop for Opened {
    fn drop(&mut self) {
        OPENING.set(false);
    }
}

fn make(number: &Number, mut home: Weak<dyn Home>) {
    let _unattributed = unattributed(); // the thread's, for all of its requests
    // Everything is allocated before a reference is taken, and put in place only if it is still needed then: allocating
    // may have called into this file. Another thread may take the caches at any time, so each step looks again.
    if own(|own| own.caches().is_none()).unwrap_or(false) {
        let fresh = Box::new(Caches::new());
        let surplus = own(|own| {
            own.shard = own.shard.or_else(|| Some(next_shard()));
            own.put(fresh)
        });
        drop(surplus);
    }
    if let Some(length) = own(|own| own.caches()?.missing_length(number)).flatten() {
        let mut longer = Vec::with_capacity(length);
        own(|own| own.caches().map(|caches| caches.lengthen(&mut longer)));
    }
    let mut fresh = None;
    if own(|own| own.caches().is_some_and(|caches| !caches.has_place_of(number))).unwrap_or(false) {
        fresh = Some(Cache::new());
    }
    own(|own| own.caches().map(|caches| caches.assign(number, &mut fresh, &mut home)));
    // What was not needed, and the previous pool's home, are dropped here, where no reference is held.
}

/// Returns all blocks of this thread's caches to their pools, if it last did so at least `age` ago. Those that the
/// thread needs are soon cached again.
pub(super) fn sweep(now: Duration, age: Duration) {
    if own(|own| own.caches().is_some_and(|caches| caches.is_due(now, age))).unwrap_or(false) {
        let mut hand = 0;
        while let Some(taken) = own(|own| own.caches()?.empty_next(&mut hand)).flatten() {
            taken.send();
        }
    }
}

/// Returns the blocks of this thread's cache of the pool through `give`. The cache keeps its room.
pub(super) fn flush(number: &Number, give: impl Fn(usize, &mut [NonNull<u8>])) {
    for class in 0..classes::COUNT {
        let mut batch = NO_BLOCKS;
        loop {
            let Some(count) = with(number, |cache| cache.empty(class, &mut batch)) else { return };
            if count == 0 {
                break;
            }
            give(class, &mut batch[..count]);
        }
    }
}
