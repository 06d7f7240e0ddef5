//! `Thread`: what a thread shows to those that take a lock away from it (`owner`), and `Section`, the mark in it.
//!
//! Records are recycled and never freed, so that any thread may look at any of them at any time.

use super::{AtomicU32, Ordering, forking, membarrier};
use crate::unattributed::unattributed;
use std::cell::Cell;
use std::mem::offset_of;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr as StdAtomicPtr, AtomicUsize};

/// What a thread shows to those that take a lock away from it. Recycled, never freed.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Thread {
    /// What the processor calls the thread that has this record ([`name_of_this_thread`]); 0 where none has it. First,
    /// as in [`Nameless`].
    name: AtomicUsize,
    /// [`OUTSIDE`] of sections, [`BRIEF`] or [`LONG`] inside of one. Constants, so that no section waits for the number
    /// that the last one stored.
    /// - set to `BRIEF` or `LONG`: when the thread begins a section, by the thread alone, from `OUTSIDE` only.
    /// - set to `OUTSIDE`: when the section ends, by the thread alone; or in a child of `fork` that lacks the thread.
    section: AtomicU32,
    /// Whether a thread has this record.
    /// - set: by the thread that takes it, from false only.
    /// - cleared: at the thread's end, when no section of it is under way; or in a child of `fork` that lacks the
    ///   thread.
    taken: AtomicBool,
    /// How many records were made before this one.
    number: usize,
    /// The record that was made before this one. Written before this one is published.
    next: *const Thread,
    /// What a lock's owner is while the lock is taken away from this thread.
    revoked: Nameless,
}

/// What stands in a lock in place of a thread's record: a name that no thread has. So who looks for its own name there
/// need not look first what it is.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Nameless(AtomicUsize);

impl Nameless {
    pub(super) const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }
}

/// From a record to its [`Nameless`], in bytes: a bit that no record's address has.
pub(super) const REVOKED: usize = offset_of!(Thread, revoked);
const _: () = assert!(REVOKED.is_power_of_two() && REVOKED < align_of::<Thread>() && offset_of!(Thread, name) == 0);

// SAFETY: `next` is written once before the record is published, the rest is atomic.
#[allow(unsafe_code, reason = "a list of records that are never freed")]
unsafe impl Sync for Thread {}

const OUTSIDE: u32 = 0;
/// In a section in which it waits for nobody. Whoever holds spin locks may wait for its end.
const BRIEF: u32 = 1;
/// In one in which it may wait for the spin locks of others.
const LONG: u32 = 2;

static THREADS: StdAtomicPtr<Thread> = StdAtomicPtr::new(null_mut());

/// How often this process was born: counted in the child of each `fork`, and not in the parent. (`fork::forks` counts
/// in both: by that number the parent would take its own spin locks for those of threads that are gone.)
static BIRTHS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

/// See [`BIRTHS`]. Relaxed: a child has one thread, which counted itself.
pub(super) fn births() -> u32 {
    BIRTHS.load(Ordering::Relaxed)
}

thread_local! {
    /// This thread's record; NULL before its first section and after its last destructor.
    static THREAD: Cell<*const Thread> = const { Cell::new(null()) };
    /// Gives the record back at the thread's end.
    static LEAVER: Leaver = const { Leaver };
}

struct Leaver;

impl Drop for Leaver {
    fn drop(&mut self) {
        if let Some(thread) = thread_at(THREAD.replace(null())) {
            thread.name.store(0, Ordering::Relaxed); // the name may be another thread's soon
            // Release pairs with the exchange in `open`: the next thread with this record comes after all of our
            // sections.
            thread.taken.store(false, Ordering::Release);
        }
    }
}

/// A record by its address, which is NULL or from [`Thread::leak`].
#[inline]
#[allow(unsafe_code, reason = "a list of records that are never freed")]
pub(super) fn thread_at(pointer: *const Thread) -> Option<&'static Thread> {
    // SAFETY: the module keeps such pointers only, and records are never freed.
    unsafe { pointer.as_ref() }
}

pub(super) fn threads() -> impl Iterator<Item = &'static Thread> {
    // Acquire pairs with the exchange in `open`.
    std::iter::successors(thread_at(THREADS.load(Ordering::Acquire)), |thread| thread_at(thread.next))
}

impl Thread {
    /// A record that somebody has.
    pub(super) fn leak(next: *const Self) -> &'static mut Self {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let (section, name) = (AtomicU32::new(OUTSIDE), AtomicUsize::new(0));
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let (taken, revoked) = (AtomicBool::new(true), Nameless::new());
        Box::leak(Box::new(Self { name, section, taken, number, next, revoked }))
    }

    /// Whether it is this thread's.
    pub(super) fn is_own(&self) -> bool {
        std::ptr::eq(self, THREAD.get())
    }

    /// This thread's record; none while the thread ends. `watch` is called before one is made: it has each fork from
    /// then on see to all records ([`begin_child`]).
    #[inline]
    pub(super) fn own(watch: fn()) -> Option<&'static Self> {
        match thread_at(THREAD.get()) {
            Some(thread) => Some(thread),
            None => open(watch),
        }
    }

    pub(super) fn as_owner(&self) -> *mut Self {
        std::ptr::from_ref(self).cast_mut()
    }

    /// A lock's owner, if that is this thread and this can be known without a thread-local.
    ///
    /// # Safety
    /// - `owner` is a record's address, or that of its or another [`Nameless`], which is never freed.
    #[inline(always)]
    #[allow(unsafe_code, reason = "a pointer to one of two kinds")]
    pub(super) unsafe fn if_this_thread(owner: *mut Self) -> Option<&'static Self> {
        // SAFETY: each of these begins with a name, and lives for ever (this function's contract).
        let name = unsafe { &*owner.cast::<AtomicUsize>() };
        // A record that no thread has is named 0, which no thread is where names are known.
        if !HAVE_NAMES || name.load(Ordering::Relaxed) != name_of_this_thread() {
            return None;
        }
        // SAFETY: what has a thread's name is its record, which is never freed.
        Some(unsafe { &*owner })
    }

    /// Whether no thread has the record. What its last one did in sections has been done.
    pub(super) fn has_ended(&self) -> bool {
        // Acquire pairs with the Release in `Leaver`.
        !self.taken.load(Ordering::Acquire)
    }

    /// Waits until the thread is outside of sections, and lets others run so often meanwhile; whether it is. A later
    /// section sees what was stored before `membarrier::heavy`, which the caller has called.
    pub(super) fn wait_for_section(&self, mut turns: usize) -> bool {
        while self.section.load(Ordering::Acquire) != OUTSIDE {
            if turns == 0 {
                return false;
            }
            turns -= 1;
            super::yield_now();
        }
        true
    }

    /// Whether it is in a section in which it may change what several locks are for.
    pub(super) fn is_in_long_section(&self) -> bool {
        // Acquire pairs with the Release at a section's end.
        self.section.load(Ordering::Acquire) == LONG
    }

    /// [`wait_for_section`](Self::wait_for_section) for a caller that may hold spin locks: only for a brief one.
    pub(super) fn wait_for_brief_section(&self) {
        // Acquire pairs with the Release at a section's end, and with that at the begin of a long one.
        while self.section.load(Ordering::Acquire) == BRIEF {
            super::yield_now();
        }
    }
}

#[cold]
fn open(watch: fn()) -> Option<&'static Thread> {
    LEAVER.try_with(|_| ()).ok()?;
    // In a child of `fork` all records seem taken until the thread that forked has seen to that.
    forking::wait();
    // Acquire pairs with the Release in `Leaver`.
    let free =
        |thread: &&Thread| thread.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
    let thread = threads().find(free).unwrap_or_else(|| {
        watch();
        let _immortal = unattributed();
        let fresh = Thread::leak(THREADS.load(Ordering::Acquire));
        // AcqRel: publishes the record, or sees who was faster.
        while let Err(newest) =
            THREADS.compare_exchange(fresh.next.cast_mut(), fresh, Ordering::AcqRel, Ordering::Acquire)
        {
            fresh.next = newest;
        }
        fresh
    });
    THREAD.set(thread);
    thread.name.store(name_of_this_thread(), Ordering::Relaxed);
    Some(thread)
}

/// Whether [`name_of_this_thread`] is ever anything but 0.
const HAVE_NAMES: bool =
    cfg!(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"), not(any(miri, ctxalloc_loom))));

/// A word that no other thread that lives has: the address of its control block, which stands in a register. A
/// thread-local of an extension module would cost a call each time. 0 where it is not to be had so.
#[inline]
fn name_of_this_thread() -> usize {
    #[cfg(all(target_os = "linux", target_arch = "x86_64", not(any(miri, ctxalloc_loom))))]
    {
        let name: usize;
        // SAFETY: reads a word: the ABI (System V, ELF TLS) has the thread pointer itself at `fs:0`.
        #[allow(unsafe_code, reason = "a register that no function reads")]
        unsafe {
            std::arch::asm!("mov {}, fs:0", out(reg) name, options(nostack, preserves_flags, readonly, pure));
        }
        name
    }
    #[cfg(all(target_os = "linux", target_arch = "aarch64", not(any(miri, ctxalloc_loom))))]
    {
        let name: usize;
        // SAFETY: reads a register, which holds the thread pointer.
        #[allow(unsafe_code, reason = "a register that no function reads")]
        unsafe {
            std::arch::asm!("mrs {}, tpidr_el0", out(reg) name, options(nostack, preserves_flags, nomem, pure));
        }
        name
    }
    #[cfg(not(all(
        target_os = "linux",
        any(target_arch = "x86_64", target_arch = "aarch64"),
        not(any(miri, ctxalloc_loom))
    )))]
    0
}

/// The running thread.
#[derive(Clone, Copy)]
pub(crate) struct Here(&'static Thread);

impl Here {
    /// `None` before its first section, and where no thread owns a lock anyway.
    #[inline(always)]
    pub(crate) fn now() -> Option<Self> {
        thread_at(THREAD.get()).filter(|_| HAVE_NAMES).map(Self)
    }

    /// A number that no other thread has that lives, and mostly a small one: that of its record, which it has of a
    /// thread that has ended if there is one.
    #[inline(always)]
    pub(crate) fn number(self) -> usize {
        self.0.number
    }

    /// The thread that is known to be the running one.
    #[inline(always)]
    pub(super) fn of(thread: &'static Thread) -> Self {
        Self(thread)
    }

    #[inline(always)]
    pub(super) fn thread(self) -> &'static Thread {
        self.0
    }
}

/// In a child of `fork`: it waits for no section of a thread that it does not have, and new threads get their records.
/// No other thread of the child has one yet ([`open`]).
#[cfg_attr(any(ctxalloc_loom, miri), allow(dead_code, reason = "neither forks"))]
pub(super) fn begin_child() {
    BIRTHS.fetch_add(1, Ordering::Relaxed);
    for thread in threads().filter(|thread| !thread.is_own()) {
        thread.section.store(OUTSIDE, Ordering::Relaxed);
        thread.name.store(0, Ordering::Relaxed);
        thread.taken.store(false, Ordering::Relaxed);
    }
}

/// A stretch of work of a thread for which its mark stands. Short, and never one inside of another.
pub(crate) struct Section {
    thread: &'static Thread,
}

impl Section {
    /// One in which the thread may wait for others. While another thread forks none begins (`standstill`).
    #[inline]
    pub(super) fn begin(thread: &'static Thread) -> Self {
        loop {
            if let Some(section) = Self::try_begin(thread) {
                return section;
            }
            forking::wait();
        }
    }

    /// The same; `None`, without waiting, while another thread forks.
    #[inline]
    pub(super) fn try_begin(thread: &'static Thread) -> Option<Self> {
        let section = Self::begin_as(LONG, thread); // if it is dropped, it has waited for nobody
        if forking::may_begin() { Some(section) } else { None }
    }

    /// One in which it waits for nobody.
    #[inline(always)]
    pub(super) fn begin_brief(thread: &'static Thread) -> Self {
        Self::begin_as(BRIEF, thread)
    }

    #[inline(always)]
    fn begin_as(kind: u32, thread: &'static Thread) -> Self {
        debug_assert_eq!(thread.section.load(Ordering::Relaxed), OUTSIDE, "a section inside of another one");
        // Release pairs with the Acquire in `wait_for_brief_section`: who waited for the end of the last section may
        // see the start of this one instead.
        thread.section.store(kind, Ordering::Release);
        // The loads of what it looks at come after the store.
        membarrier::light();
        Self { thread }
    }
}

impl Drop for Section {
    #[inline]
    fn drop(&mut self) {
        // Release pairs with the Acquire in `wait_for_section`: who waited sees what was done inside.
        self.thread.section.store(OUTSIDE, Ordering::Release);
    }
}
