//! Under loom: who owns a lock, who takes it away, and who comes after a fork or an end exclude each other.

use super::{AtomicU32, Here, Ordering, Owned, OwnerLock, Section, Thread, exclusively, wait_for_brief_sections};
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
// SAFETY: a number and atomics, none of which belongs to the thread that made it.
#[allow(unsafe_code, reason = "the counter that the locks protect")]
unsafe impl Send for Counted {}

impl Counted {
    fn new() -> Arc<Self> {
        Arc::new(Self { locks: [OwnerLock::new(), OwnerLock::new()], count: UnsafeCell::new(0) })
    }

    #[allow(unsafe_code, reason = "the counter that the locks protect")]
    fn add(&self, thread: Option<&'static Thread>, locks: &[&OwnerLock]) {
        exclusively(thread, locks, || {
            // SAFETY: `exclusively` runs this while it holds the lock; loom fails where another thread is in it too.
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
        // SAFETY: all other threads were joined, so nobody else touches the number.
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

/// What an account lends: its owner changes the count without a lock while `is_lent`, under both locks otherwise.
/// Another thread calls it in, and holds only the second lock.
#[test]
fn loom_what_is_lent_is_called_in_from_an_owner_who_keeps_its_lock() {
    bounded(|| {
        let counted = Counted::new();
        let is_lent = Arc::new(AtomicU32::new(1));
        let own: &'static Thread = Thread::leak(null());
        let on_credit = |counted: &Counted, is_lent: &AtomicU32| {
            let _section = Section::begin_brief(own);
            let may = counted.locks[0].is_owned_by(Here::of(own)) && is_lent.load(Ordering::Relaxed) == 1;
            if may {
                // SAFETY: nobody else touches it while it is lent, and whoever calls it in waits for the section.
                #[allow(unsafe_code, reason = "the counter that the locks protect")]
                counted.count.with_mut(|count| unsafe { *count += 1 });
            }
            usize::from(may)
        };
        exclusively(Some(own), &[&counted.locks[0]], || ()); // it owns it from here on
        let other = loom::thread::spawn({
            let (counted, is_lent) = (Arc::clone(&counted), Arc::clone(&is_lent));
            move || {
                exclusively(None, &[&counted.locks[1]], || {
                    is_lent.store(0, Ordering::Relaxed);
                    wait_for_brief_sections(std::iter::once(&counted.locks[0]));
                    // SAFETY: the owner's sections are over (`wait_for_brief_sections`), and those to come see that it
                    // is called in.
                    #[allow(unsafe_code, reason = "the counter that the locks protect")]
                    counted.count.with_mut(|count| unsafe { *count += 1 });
                });
            }
        });
        let lent = on_credit(&counted, &is_lent);
        counted.add(Some(own), &[&counted.locks[0], &counted.locks[1]]);
        let lent = lent + on_credit(&counted, &is_lent);
        other.join().expect("no panic");
        assert!(counted.locks[0].is_owned_by(Here::of(own)), "it is left to its owner");
        // SAFETY: all other threads were joined, so nobody else touches the number.
        #[allow(unsafe_code, reason = "the counter that the locks protect")]
        let count = counted.count.with(|count| unsafe { *count });
        assert_eq!(count, 2 + lent);
    });
}

/// The owner has ended, but a new thread has its record and uses the lock while another one inherits it.
#[test]
fn loom_a_lock_is_inherited_while_its_owners_record_is_used_again() {
    bounded(|| {
        let counted = Counted::new();
        let first: &'static Thread = Thread::leak(null());
        exclusively(Some(first), &[&counted.locks[0]], || ());
        let add_if_owned = |counted: &Counted, thread: &'static Thread| {
            let _section = Section::begin_brief(thread);
            let is_owned = counted.locks[0].is_owned_by(Here::of(thread));
            if is_owned {
                // SAFETY: the lock's owner, in a section.
                #[allow(unsafe_code, reason = "the counter that the locks protect")]
                counted.count.with_mut(|count| unsafe { *count += 1 });
            }
            usize::from(is_owned)
        };
        let other = loom::thread::spawn({
            let counted = Arc::clone(&counted);
            move || {
                let next: &'static Thread = Thread::leak(null());
                assert!(counted.locks[0].inherit_from(first.as_owner(), next));
                add_if_owned(&counted, next)
            }
        });
        let here = add_if_owned(&counted, first) + add_if_owned(&counted, first);
        let there = other.join().expect("no panic");
        assert_eq!(there, 1);
        // SAFETY: all other threads were joined, so nobody else touches the number.
        #[allow(unsafe_code, reason = "the counter that the locks protect")]
        let count = counted.count.with(|count| unsafe { *count });
        assert_eq!(count, here + there);
    });
}

#[test]
fn loom_an_owned_value_compiles_there_too() {
    loom::model(|| assert_eq!(Owned::new(1).with(|value| *value), 1));
}
