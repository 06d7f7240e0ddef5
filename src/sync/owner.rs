//! `OwnerLock`: a lock that costs its first thread no atomic read-modify-write until a second thread comes.
//!
//! Most requests live on one thread. The first thread that takes such a lock owns it: from then on it only marks that it
//! is inside of a *section* (two plain stores in its own record) and looks whether it still owns the lock. A second
//! thread takes the ownership away for good, and everybody uses the spin lock beside it from then on.
//!
//! ```text
//!   owner:   NOBODY ──first use──► thread ──second thread──► thread | REVOKING ──section over──► SHARED
//!               └───────────────────────── no membarrier here ─────────────────────────────────────▲
//! ```
//! Why this excludes: the owner stores its mark, then loads `owner`; the other thread stores `owner`, then loads the
//! mark. One of them must see the other (Dekker). The owner's side has no fence; the other side calls `membarrier`, which
//! runs one on every processor that runs a thread of this process (under loom both sides have a fence). Where the system has no `membarrier` (and under Miri,
//! which does not know it) no lock is ever owned.

use super::{AtomicPtr, AtomicU32, Ordering, yield_now};
use std::cell::{Cell, UnsafeCell};
use std::ptr::{null, null_mut, without_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr as StdAtomicPtr, AtomicUsize};

/// Excludes threads from one stretch of work. Survives `fork`: see [`OwnerLock::acquire`].
#[derive(Debug)]
pub(crate) struct OwnerLock {
    /// NULL (nobody), [`SHARED`], or the owner's record, with [`REVOKING`] in its address while it is taken away.
    /// - set to a thread: from NULL only, by that thread. Cannot be set once it was `SHARED`.
    /// - set to `thread | REVOKING`: by another thread, which then waits for the owner's section. Only `SHARED` follows.
    /// - set to `SHARED`: when no section of an owner can be under way any more. Never changes again.
    owner: AtomicPtr<Thread>,
    /// 0: free. Else the number of forks before it was taken, twice, plus one: whoever took it before the last fork is
    /// not there in the child, which may take it over.
    spin: AtomicU32,
}

const SHARED: *mut Thread = without_provenance_mut(2);
const REVOKING: usize = 1;

fn marked(owner: *mut Thread) -> *mut Thread {
    owner.map_addr(|address| address | REVOKING)
}

fn unmarked(owner: *mut Thread) -> *mut Thread {
    owner.map_addr(|address| address & !REVOKING)
}

/// What a thread shows to those that take a lock away from it. Recycled, never freed.
#[derive(Debug)]
#[repr(align(128))]
struct Thread {
    /// Odd while the thread is inside of a section. Written by the thread alone.
    sections: AtomicU32,
    /// What the processor calls the thread that has this record ([`name_of_this_thread`]); 0 where none has it.
    name: AtomicUsize,
    /// Whether a thread has this record.
    taken: AtomicBool,
    /// The record that was made before this one. Written before this one is published.
    next: *const Thread,
}

// SAFETY: `next` is written once before the record is published, the rest is atomic.
#[allow(unsafe_code, reason = "a list of records that are never freed")]
unsafe impl Sync for Thread {}

static THREADS: StdAtomicPtr<Thread> = StdAtomicPtr::new(null_mut());

/// How often this process was born: counted in the child of each `fork`.
static FORKS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

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
            // Release pairs with the exchange in `open`: the next thread with this record comes after all of our sections.
            thread.taken.store(false, Ordering::Release);
        }
    }
}

/// A record by its address.
#[inline]
#[allow(unsafe_code, reason = "a list of records that are never freed")]
fn thread_at(pointer: *const Thread) -> Option<&'static Thread> {
    // SAFETY: NULL, or from `Thread::leak`.
    unsafe { pointer.as_ref() }
}

fn threads() -> impl Iterator<Item = &'static Thread> {
    // Acquire pairs with the exchange in `open`.
    std::iter::successors(thread_at(THREADS.load(Ordering::Acquire)), |thread| thread_at(thread.next))
}

impl Thread {
    /// A record that somebody has.
    fn leak(next: *const Self) -> &'static mut Self {
        let (sections, name) = (AtomicU32::new(0), AtomicUsize::new(0));
        Box::leak(Box::new(Self { sections, name, taken: AtomicBool::new(true), next }))
    }

    /// This thread's record; none while the thread ends.
    #[inline]
    fn own() -> Option<&'static Self> {
        match thread_at(THREAD.get()) {
            Some(thread) => Some(thread),
            None => open(),
        }
    }

    fn as_owner(&self) -> *mut Self {
        std::ptr::from_ref(self).cast_mut()
    }
}

#[cold]
fn open() -> Option<&'static Thread> {
    LEAVER.try_with(|_| ()).ok()?;
    // Acquire pairs with the Release in `Leaver`.
    let free =
        |thread: &&Thread| thread.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
    let thread = threads().find(free).unwrap_or_else(|| {
        forget_others_after_fork();
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

/// A word that no other thread that lives has: the address of its control block, which stands in a register. A thread-local
/// of an extension module would cost a call each time. 0 where it is not to be had so.
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

/// Hooks in, so that a child of `fork` waits for no section of a thread that it does not have. Racers may each do so.
fn forget_others_after_fork() {
    #[cfg(not(any(ctxalloc_loom, miri)))]
    {
        static HOOKED: AtomicBool = AtomicBool::new(false);
        extern "C" fn in_the_child() {
            FORKS.fetch_add(1, Ordering::Relaxed);
            let own = THREAD.get();
            for thread in threads().filter(|thread| !std::ptr::eq(*thread, own)) {
                thread.sections.store(0, Ordering::Relaxed); // a child has one thread
                thread.name.store(0, Ordering::Relaxed);
                thread.taken.store(false, Ordering::Relaxed);
            }
        }
        if !HOOKED.swap(true, Ordering::Relaxed) {
            // Fails only for want of memory; then a child of a process with several threads may wait for one that is gone.
            // SAFETY: the function lives as long as the process: neither executables nor extension modules are unloaded.
            #[allow(unsafe_code, reason = "pthread_atfork")]
            let _ = unsafe { libc::pthread_atfork(None, None, Some(in_the_child)) };
        }
    }
}

/// A stretch of work of a thread for which its mark stands. Short, and never one inside of another.
struct Section {
    thread: &'static Thread,
    number: u32,
}

impl Section {
    #[inline]
    fn begin(thread: &'static Thread) -> Self {
        // Relaxed: only this thread writes.
        let number = thread.sections.load(Ordering::Relaxed);
        debug_assert!(number.is_multiple_of(2), "a section inside of another one");
        thread.sections.store(number.wrapping_add(1), Ordering::Relaxed);
        // The loads of `owner` come after the store.
        membarrier::light();
        Self { thread, number }
    }
}

impl Drop for Section {
    #[inline]
    fn drop(&mut self) {
        // Release pairs with the Acquire in `revoke`: who waited sees what was done inside.
        self.thread.sections.store(self.number.wrapping_add(2), Ordering::Release);
    }
}

impl OwnerLock {
    pub(crate) fn new() -> Self {
        Self { owner: AtomicPtr::new(null_mut()), spin: AtomicU32::new(0) }
    }

    /// One that belongs to this thread from the start: for what will most likely be used here.
    pub(crate) fn new_owned() -> Self {
        let own = Thread::own().filter(|_| membarrier::is_there()).map_or(null_mut(), Thread::as_owner);
        Self { owner: AtomicPtr::new(own), spin: AtomicU32::new(0) }
    }

    /// Runs `work` alone. `work` is short, does not panic, and takes no such lock.
    #[inline]
    pub(crate) fn with<R>(&self, work: impl FnOnce() -> R) -> R {
        let thread = self.owner_if_this_thread().or_else(Thread::own);
        if let Some(thread) = thread {
            let section = Section::begin(thread);
            if self.is_owned_by(thread) {
                return work(); // the section ends with it
            }
            drop(section);
        }
        exclusively_slowly(thread, &[self], work)
    }

    /// The record of this thread, if it owns the lock and that can be told without a thread-local. A guess for the caller:
    /// in its section it looks again.
    #[inline]
    fn owner_if_this_thread(&self) -> Option<&'static Thread> {
        let owner = self.owner.load(Ordering::Relaxed);
        if owner.addr() & (SHARED.addr() | REVOKING) != 0 {
            return None;
        }
        let name = name_of_this_thread();
        thread_at(owner).filter(|owner| name != 0 && owner.name.load(Ordering::Relaxed) == name)
    }

    /// Whether a section of `thread` excludes everybody else, without the spin lock.
    #[inline]
    fn is_owned_by(&self, thread: &'static Thread) -> bool {
        std::ptr::eq(self.owner.load(Ordering::Relaxed), thread)
    }

    /// Makes the lock `own` if it is nobody's, and shared if it is another thread's. Outside of sections.
    #[cold]
    fn settle(&self, own: *mut Thread) {
        loop {
            // Acquire: whoever shares the lock comes after all sections of its owner.
            let owner = self.owner.load(Ordering::Acquire);
            let (before, next) = if owner == SHARED || (!own.is_null() && unmarked(owner) == own) {
                // Where it is being taken from us: of our sections, for which they wait, there is none now.
                return;
            } else if owner.is_null() {
                (owner, if membarrier::is_there() && !own.is_null() { own } else { SHARED })
            } else {
                self.revoke(unmarked(owner));
                (marked(owner), SHARED)
            };
            // AcqRel: hands on what was done by the owner, as `revoke` has seen it.
            if self.owner.compare_exchange(before, next, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return;
            }
        }
    }

    /// Takes the lock away from its owner: when this returns, no section of it is under way under this lock.
    fn revoke(&self, owner: *mut Thread) {
        // Whoever comes second finds the mark, and does the same.
        let _ = self.owner.compare_exchange(owner, marked(owner), Ordering::AcqRel, Ordering::Relaxed);
        membarrier::heavy();
        let Some(owner) = thread_at(owner) else { return };
        let number = owner.sections.load(Ordering::Acquire);
        // A later section, should there be one, has seen the mark.
        while !number.is_multiple_of(2) && owner.sections.load(Ordering::Acquire) == number {
            yield_now();
        }
    }

    /// Takes the spin lock, which was settled. In a child of `fork` also from a thread that only the parent has.
    fn acquire(&self) {
        let own = FORKS.load(Ordering::Relaxed).wrapping_mul(2) | 1;
        loop {
            // Acquire, here and below, pairs with the Release in `release`.
            match self.spin.compare_exchange(0, own, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return,
                Err(holder) if holder == own => yield_now(),
                Err(gone) => {
                    if self.spin.compare_exchange(gone, own, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                        return;
                    }
                }
            }
        }
    }

    fn release(&self) {
        self.spin.store(0, Ordering::Release);
    }

    /// Takes the lock before `fork`, for values that a child must not find half changed. Pairs with
    /// [`release_after_fork`](Self::release_after_fork).
    pub(crate) fn acquire_before_fork(&self) {
        self.settle(null_mut());
        self.acquire();
    }

    /// Lets it go, in the parent and in the child.
    pub(crate) fn release_after_fork(&self) {
        self.release();
    }
}

/// Runs `work` while all of these locks exclude everybody else. They are taken in this order, which must be the same for
/// all who take several of them. `work` is short, does not panic, and takes no such lock.
#[inline]
pub(crate) fn with_all<L: AsOwnerLock, R>(locks: &[L], work: impl FnOnce() -> R) -> R {
    let first = locks.first().and_then(|lock| lock.owner_lock().owner_if_this_thread());
    exclusively(first.or_else(Thread::own), locks, work)
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
        if locks.iter().all(|lock| lock.owner_lock().is_owned_by(thread)) {
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
        lock.owner_lock().settle(owner.map_or(null_mut(), Thread::as_owner));
    }
    let section = own.map(Section::begin);
    // Those that are owned when we look stay so for the section; a bit for each whose spin lock was taken.
    let mut taken = 0_u64;
    for (number, lock) in locks.iter().map(AsOwnerLock::owner_lock).enumerate() {
        if number >= u64::BITS as usize {
            lock.acquire();
        } else if !own.is_some_and(|thread| lock.is_owned_by(thread)) {
            lock.acquire();
            taken |= 1 << number;
        }
    }
    let answer = work();
    // The first one last: whoever gets it may be the one who frees all of them (the end of a request).
    for (number, lock) in locks.iter().map(AsOwnerLock::owner_lock).enumerate().rev() {
        if number >= u64::BITS as usize || taken & 1 << number != 0 {
            lock.release();
        }
    }
    drop(section);
    answer
}

/// A value behind an [`OwnerLock`].
#[derive(Debug)]
pub(crate) struct Owned<T> {
    lock: OwnerLock,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only reached by the one who has the lock.
#[allow(unsafe_code, reason = "a lock's cell")]
unsafe impl<T: Send> Sync for Owned<T> {}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { lock: OwnerLock::new(), value: UnsafeCell::new(value) }
    }

    /// Runs `work` on the value, alone. `work` takes no such lock and does not panic.
    #[inline]
    #[allow(unsafe_code, reason = "a lock's cell")]
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: the lock excludes everybody else, and `work` cannot keep the reference.
        self.lock.with(|| work(unsafe { &mut *self.value.get() }))
    }

    /// The lock itself, to be held across `fork`.
    pub(crate) fn lock(&self) -> &OwnerLock {
        &self.lock
    }
}

/// The two sides of the fence: `light` costs nothing and is only good against `heavy`, which is the system call
/// `membarrier`.
mod membarrier {
    #[cfg(any(ctxalloc_loom, miri, not(target_os = "linux")))]
    pub(super) use fences::{heavy, is_there, light};
    #[cfg(not(any(ctxalloc_loom, miri, not(target_os = "linux"))))]
    pub(super) use linux::{heavy, is_there, light};

    #[cfg(any(ctxalloc_loom, miri, not(target_os = "linux")))]
    mod fences {
        /// Only where it costs nothing to have a fence on both sides, in a model.
        pub(in super::super) fn is_there() -> bool {
            cfg!(ctxalloc_loom)
        }

        pub(in super::super) fn light() {
            heavy();
        }

        pub(in super::super) fn heavy() {
            #[cfg(ctxalloc_loom)]
            loom::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        }
    }

    #[cfg(not(any(ctxalloc_loom, miri, not(target_os = "linux"))))]
    mod linux {
        use std::ptr::null_mut;
        use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering, compiler_fence};

        /// 0: not asked yet; 1: it is there; 2: it is not.
        static ANSWER: AtomicU8 = AtomicU8::new(0);

        /// Whether this process may use it: from Linux 4.14 on, unless a sandbox forbids it.
        pub(in super::super) fn is_there() -> bool {
            match ANSWER.load(Ordering::Relaxed) {
                0 => {
                    // Both are tried: a sandbox may allow the registration and refuse the call.
                    let is_there = register() && call(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) && map();
                    let answer = if is_there { 1 } else { 2 };
                    ANSWER.store(answer, Ordering::Relaxed);
                    answer == 1
                }
                answer => answer == 1,
            }
        }

        #[inline]
        pub(in super::super) fn light() {
            compiler_fence(Ordering::SeqCst);
        }

        /// Once it was there it stays, registered for the process and its children; unless the process went into a sandbox
        /// since. Then memory is protected: the system tells every processor that runs a thread of this process.
        pub(in super::super) fn heavy() {
            let is_done = call(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
                || (register() && call(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED));
            if is_there() && !is_done {
                protect();
            }
        }

        const PAGE: usize = 4096;
        static PLACE: AtomicPtr<u8> = AtomicPtr::new(null_mut());

        /// Maps a page for `protect`, while that is allowed.
        #[allow(unsafe_code, reason = "mmap")]
        fn map() -> bool {
            let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: a new mapping, wherever there is room.
            let place = unsafe { libc::mmap(null_mut(), PAGE, read_write, private, -1, 0) };
            PLACE.store(place.cast(), Ordering::Release);
            place != libc::MAP_FAILED
        }

        #[cold]
        #[allow(unsafe_code, reason = "mprotect")]
        fn protect() {
            static ALONE: AtomicBool = AtomicBool::new(false);
            while ALONE.swap(true, Ordering::Acquire) {
                std::thread::yield_now();
            }
            let place = PLACE.load(Ordering::Acquire);
            // SAFETY: a page of ours, that nobody else uses.
            unsafe { libc::mprotect(place.cast(), PAGE, libc::PROT_READ | libc::PROT_WRITE) };
            // SAFETY: as above: writable, and touched so that processors may know of it.
            unsafe { place.write_volatile(1) };
            // SAFETY: as above. To take a right away, every processor has to forget it.
            unsafe { libc::mprotect(place.cast(), PAGE, libc::PROT_NONE) };
            ALONE.store(false, Ordering::Release);
        }

        fn register() -> bool {
            call(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)
        }

        #[allow(unsafe_code, reason = "a system call without a wrapper in libc")]
        fn call(command: libc::c_int) -> bool {
            // SAFETY: it takes numbers only and touches no memory.
            unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
        }
    }
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests {
    use super::Owned;
    use std::sync::Arc;
    use std::thread;

    #[test]
    fn a_lock_that_changes_hands_loses_nothing() {
        for _ in 0..if cfg!(miri) { 3 } else { 300 } {
            let counts = Arc::new([(); 3].map(|()| Owned::new(0_usize)));
            let rounds = if cfg!(miri) { 20 } else { 2000 };
            (0..rounds).for_each(|_| counts[0].with(|count| *count += 1));
            let threads: Vec<_> = (0..3)
                .map(|_| {
                    let counts = Arc::clone(&counts);
                    thread::spawn(move || {
                        for round in 0..rounds {
                            counts[round % 3].with(|count| *count += 1);
                        }
                    })
                })
                .collect();
            (0..rounds).for_each(|_| counts[0].with(|count| *count += 1));
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
            let sum: usize = counts.iter().map(|count| count.with(|count| *count)).sum();
            assert_eq!(sum, 5 * rounds);
        }
    }
}

#[cfg(all(test, ctxalloc_loom))]
mod loom_tests {
    use super::{Owned, OwnerLock, Thread, exclusively};
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use std::ptr::null;

    struct Counted {
        locks: [OwnerLock; 2],
        count: UnsafeCell<usize>,
    }
    // SAFETY: `count` is only touched under a lock; loom checks that this suffices.
    #[allow(unsafe_code, reason = "the counter that the locks protect")]
    unsafe impl Sync for Counted {}
    // SAFETY: a number and atomics.
    #[allow(unsafe_code, reason = "the counter that the locks protect")]
    unsafe impl Send for Counted {}

    impl Counted {
        fn new() -> Arc<Self> {
            Arc::new(Self { locks: [OwnerLock::new(), OwnerLock::new()], count: UnsafeCell::new(0) })
        }

        #[allow(unsafe_code, reason = "the counter that the locks protect")]
        fn add(&self, thread: Option<&'static Thread>, locks: &[&OwnerLock]) {
            exclusively(thread, locks, || {
                // SAFETY: under the lock.
                self.count.with_mut(|count| unsafe { *count += 1 });
            });
        }
    }

    /// Every interleaving with up to three preemptions: all of them would take hours.
    fn bounded(run: impl Fn() + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(run);
    }

    #[test]
    fn loom_a_second_thread_takes_the_lock_from_its_owner() {
        bounded(|| {
            let counted = Counted::new();
            let other = loom::thread::spawn({
                let counted = Arc::clone(&counted);
                move || counted.add(Some(Thread::leak(null())), &[&counted.locks[0]])
            });
            let own: &'static Thread = Thread::leak(null());
            counted.add(Some(own), &[&counted.locks[0]]);
            counted.add(Some(own), &[&counted.locks[0]]);
            other.join().expect("no panic");
            // SAFETY: alone again.
            #[allow(unsafe_code, reason = "the counter that the locks protect")]
            let count = counted.count.with(|count| unsafe { *count });
            assert_eq!(count, 3);
        });
    }

    #[test]
    fn loom_a_thread_that_ends_and_one_with_a_record_exclude_each_other() {
        bounded(|| {
            let counted = Counted::new();
            let other = loom::thread::spawn({
                let counted = Arc::clone(&counted);
                move || counted.add(None, &[&counted.locks[0]])
            });
            counted.add(Some(Thread::leak(null())), &[&counted.locks[0]]);
            other.join().expect("no panic");
        });
    }

    #[test]
    fn loom_one_owned_and_one_shared_lock_are_held_together() {
        bounded(|| {
            let counted = Counted::new();
            let own: &'static Thread = Thread::leak(null());
            counted.add(Some(own), &[&counted.locks[0]]);
            counted.add(None, &[&counted.locks[1]]);
            let other = loom::thread::spawn({
                let counted = Arc::clone(&counted);
                move || counted.add(Some(Thread::leak(null())), &[&counted.locks[1]])
            });
            counted.add(Some(own), &[&counted.locks[0], &counted.locks[1]]);
            other.join().expect("no panic");
        });
    }

    #[test]
    fn loom_an_owned_value_compiles_there_too() {
        loom::model(|| assert_eq!(Owned::new(1).with(|value| *value), 1));
    }
}
