//! The table from the inside: what only a caller of `Table::register` can bring about.

use super::super::name::Name;
use super::super::process::empty;
use super::super::trampoline;
use super::super::{handler, handlers, register};
use super::{Draft, Handler, Table};
use crate::error::Error;
use crate::strategy::{Strategy, System};
use std::ptr::NonNull;
use std::sync::{Barrier, mpsc};
use std::thread;

#[test]
fn of_racing_registrations_one_wins_and_the_others_get_an_error() {
    let threads = if cfg!(miri) { 3 } else { 16 };
    let barrier = Barrier::new(threads);
    let outcomes: Vec<_> = thread::scope(|scope| {
        let racers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    barrier.wait();
                    register("raced for", System)
                })
            })
            .collect();
        racers.into_iter().map(|racer| racer.join().expect("no panic")).collect()
    });
    let winners: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().ok()).collect();
    assert_eq!(winners.len(), 1, "{outcomes:?}");
    let taken = Error::NameTaken { name: "raced for".into() };
    assert!(outcomes.iter().all(|outcome| outcome.as_ref().err().is_none_or(|error| *error == taken)));
    assert_eq!(handler("raced for"), Some(*winners[0]));
    assert_eq!(handlers().filter(|handler| handler.name() == "raced for").count(), 1);
}

/// The C heap again, but its destructor registers another handler.
struct Parting(&'static Table);

impl std::fmt::Debug for Parting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Parting")
    }
}

// SAFETY: every call goes unchanged to `System`, which keeps these promises.
unsafe impl Strategy for Parting {
    fn alignment(&self) -> usize {
        System.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        System.allocate(size_bytes)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the caller's promises are about `System`, which makes all blocks.
        unsafe { System.resize(block, new_size_bytes) }
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: the caller's promises are about `System`, which makes all blocks.
        unsafe { System.release(block) }
    }
}

impl Drop for Parting {
    fn drop(&mut self) {
        self.0.register(draft("from a destructor", System)).expect("a new name");
    }
}

fn draft<S: Strategy>(name: &'static str, strategy: S) -> Draft<'static> {
    trampoline::draft(Name::new(name).expect("a good name"), strategy)
}

#[test]
fn a_refused_strategy_may_register_another_one_in_its_destructor() {
    let table: &'static Table = Box::leak(Box::new(empty()));
    table.register(draft("twice", System)).expect("the first");
    let (done, is_done) = mpsc::channel();
    // On a thread of its own: should the destructor wait for the lock that its own thread holds, the test ends by
    // the watchdog below instead of never.
    thread::spawn(move || done.send(table.register(draft("twice", Parting(table))).map(|(handler, _)| handler.name())));
    let outcome = is_done.recv_timeout(std::time::Duration::from_secs(30));
    assert_eq!(outcome, Ok(Err(Error::NameTaken { name: "twice".into() })), "the lock was held while it was dropped");
    assert!(table.named("from a destructor").is_some());
}

#[test]
fn entries_that_share_a_bucket_are_all_found() {
    // More entries than the index has buckets: chains form whatever the hashes are.
    let count = if cfg!(miri) { 40 } else { 3000 };
    let table = empty();
    let names: Vec<String> = (0..count).map(|number| format!("handler {number}")).collect();
    let entered: Vec<Handler> = names
        .iter()
        .map(|name| {
            let draft = trampoline::draft(Name::new(name).expect("a good name"), System);
            table.register(draft).expect("a new name").0
        })
        .collect();
    for (name, &handler) in names.iter().zip(&entered) {
        assert_eq!(table.named(name), Some(handler));
        assert_eq!(table.with_struct(handler.as_ptr()), Some(handler));
    }
    assert!(table.iter().eq(entered), "the order of registration");
    assert_eq!(table.named("handler"), None);
    assert_eq!(table.named("handler 99999"), None);
}
