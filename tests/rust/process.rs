//! What needs a process of its own: fork, the very first use, a global tracing subscriber, the process's end.
//!
//! Each child is this test binary once more, running one ignored test; its exit status is the verdict.
#![cfg(not(miri))]
#![allow(unsafe_code, reason = "fork, alarm, atexit")]

#[path = "support/child.rs"]
mod child;
#[path = "process/shared.rs"]
mod shared;
mod support;

use child::{fate_in, fork_and, killed_after};
use ctxalloc::metrics::waits;
use ctxalloc::request::Admitting;
use ctxalloc::strategy::Budget;
use ctxalloc::{
    Buffer, Context, Error, Handler, NoRoom, current, default_handler, handler, handlers, register, request, reset,
    scope, set,
};
use std::future::Future;
use std::pin::Pin;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context as TaskContext, Poll, Waker};
use std::thread;
use std::time::Duration;
use support::{Marked, marked};

/// Longer than anything here takes; a child that hangs is killed by it, and that is its verdict.
const PATIENCE_SECONDS: u32 = 60;

/// Runs one ignored test of this binary in a process of its own; it has to end with `status`.
fn in_a_process_of_its_own(test: &'static str, status: i32) {
    // Racers of the first use leave their tables behind, by design.
    fate_in(test, &[("LSAN_OPTIONS", "exitcode=0")]).ended_with(status);
}

#[test]
fn the_first_use_by_many_threads_at_once_makes_one_table() {
    for _ in 0..10 {
        in_a_process_of_its_own("child_first_use", 0);
    }
}

#[test]
#[ignore = "a child of the_first_use_by_many_threads_at_once_makes_one_table"]
fn child_first_use() {
    killed_after(PATIENCE_SECONDS);
    let threads = 16;
    let barrier = Barrier::new(threads);
    let seen: Vec<(Handler, Handler, Option<Handler>)> = thread::scope(|scope| {
        let users: Vec<_> = (0..threads)
            .map(|number| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    let mine = match number % 3 {
                        0 => register(&format!("mine {number}"), Marked::new()).expect("a new name"),
                        1 => current(),
                        _ => Buffer::zeroed(10).expect("10 bytes").handler(),
                    };
                    (default_handler(), mine, handler(&format!("mine {number}")))
                })
            })
            .collect();
        users.into_iter().map(|user| user.join().expect("no panic")).collect()
    });
    for (number, (default, mine, found)) in seen.into_iter().enumerate() {
        assert_eq!(default, default_handler());
        assert!(handlers().any(|handler| handler == mine), "not in the one table");
        if number % 3 == 0 {
            assert_eq!(found, Some(mine));
        }
    }
    assert_eq!(handlers().filter(|handler| handler.name() == "system").count(), 1);
}

#[test]
fn a_child_of_fork_has_none_of_those_who_wait_and_the_parent_has_all() {
    in_a_process_of_its_own("child_that_forks_with_waiters", 0);
}

#[test]
#[ignore = "a child of a_child_of_fork_has_none_of_those_who_wait_and_the_parent_has_all"]
fn child_that_forks_with_waiters() {
    killed_after(PATIENCE_SECONDS);
    let poll = |admitting: &mut Admitting| Pin::new(admitting).poll(&mut TaskContext::from_waker(Waker::noop()));
    let budget = Budget::new("waited for", Some(1000));
    let wanting = |bytes| request().root().name("waits").budget(&budget).reserve_bytes(bytes);
    let until = |waiting: usize| {
        while budget.waiting() != waiting {
            thread::yield_now();
        }
    };
    let held = wanting(600).begin().expect("it is empty");
    let mut task = wanting(800).admit();
    assert!(poll(&mut task).is_pending());
    thread::scope(|scope| {
        scope.spawn(|| drop(wanting(300).admit_blocking().expect("it waits for its turn")));
        until(2);
        for _ in 0..10 {
            let status = fork_and(|| {
                let is_empty = (budget.waiting(), waits(10).len()) == (0, 0);
                // What waited in the parent never gets anything here, and says so.
                let told = poll(&mut task);
                let is_told = matches!(told, Poll::Ready(Err(Error::NoRoom { reason: NoRoom::Forked, .. })));
                drop(wanting(700).admit()); // leaves a queue, and a thread for it, of its own
                // Nobody stands before it; and it stands before others.
                let own = wanting(400).max_waiting(0).begin().expect("beside what was held");
                let late = wanting(1).timeout(Duration::from_millis(20)).admit_blocking();
                let is_late = matches!(late, Err(Error::NoRoom { reason: NoRoom::TimedOut, .. }));
                let mut next = wanting(300).max_waiting(1).admit();
                drop(own);
                while poll(&mut next).is_pending() {
                    thread::yield_now();
                }
                drop(next);
                is_empty && is_told && is_late && (budget.waiting(), budget.reserved_bytes()) == (0, 600)
            });
            assert_eq!(status, 0);
            assert_eq!((budget.waiting(), waits(10).len(), budget.reserved_bytes()), (2, 2, 600));
            assert!(poll(&mut task).is_pending());
        }
        drop(held);
        let first = loop {
            if let Poll::Ready(first) = poll(&mut task) {
                break first.expect("its turn");
            }
            thread::yield_now();
        };
        assert_eq!((budget.waiting(), budget.reserved_bytes()), (1, 800));
        drop(first);
    });
    assert_eq!((budget.waiting(), budget.reserved_bytes()), (0, 0));
}

#[test]
fn a_child_of_a_multithreaded_process_registers_selects_and_allocates() {
    in_a_process_of_its_own("child_that_forks", 0);
}

#[test]
#[ignore = "a child of a_child_of_a_multithreaded_process_registers_selects_and_allocates"]
fn child_that_forks() {
    killed_after(PATIENCE_SECONDS);
    let (owner, _) = marked("made before the fork");
    let done = AtomicBool::new(false);
    let registered = AtomicUsize::new(0);
    thread::scope(|threads| {
        // Others hold the lock, again and again, while this thread forks.
        for number in 0..3 {
            let (done, registered) = (&done, &registered);
            threads.spawn(move || {
                while !done.load(Ordering::SeqCst) {
                    let count = registered.fetch_add(1, Ordering::SeqCst);
                    if count < 20_000 {
                        register(&format!("meanwhile {number} {count}"), ctxalloc::strategy::System)
                            .expect("a new name");
                    }
                    drop(Buffer::zeroed_in(owner, 1000).expect("1000 bytes"));
                }
            });
        }
        let forks = 40;
        for round in 0..forks {
            let before = Buffer::copy_from_slice_in(owner, b"made before the fork").expect("20 bytes");
            let verdict = scope(owner, || fork_and(|| after_the_fork(owner, &before, round)));
            if verdict != 0 {
                done.store(true, Ordering::SeqCst);
            }
            assert_eq!(verdict, 0, "the wait status of child {round}");
        }
        done.store(true, Ordering::SeqCst);
    });
    register("after all the forks", Marked::new()).expect("the parent's lock is free too");
}

/// What a child does: everything that takes a lock or touches the selection.
fn after_the_fork(owner: Handler, before: &Buffer, round: usize) -> bool {
    let name = format!("child {round}");
    let own = register(&name, Marked::new()).expect("a new name");
    let mut buffer = before.try_clone().expect("20 bytes");
    buffer.resize(5000).expect("5000 bytes");
    let token = set(own);
    let made_in_own = Buffer::zeroed(100).expect("100 bytes").handler() == own;
    reset(&token).expect("its own context");
    handler(&name) == Some(own) && made_in_own && current() == owner && buffer[..20] == before[..]
}

#[test]
fn a_child_of_a_multithreaded_process_goes_on_with_tracked_blocks() {
    in_a_process_of_its_own("child_that_forks_tracked", 0);
}

#[test]
#[ignore = "a child of a_child_of_a_multithreaded_process_goes_on_with_tracked_blocks"]
fn child_that_forks_tracked() {
    killed_after(PATIENCE_SECONDS);
    let tracked = handler("tracked").expect("built in");
    let kept = Buffer::zeroed_in(tracked, 77).expect("77 bytes");
    let done = AtomicBool::new(false);
    thread::scope(|threads| {
        // Others hold the lists' locks, again and again, while this thread forks.
        for _ in 0..3 {
            threads.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    let mut buffer = Buffer::zeroed_in(tracked, 1000).expect("1000 bytes");
                    buffer.resize(5000).expect("5000 bytes");
                }
            });
        }
        let verdicts: Vec<_> = (0..40).map(|_| fork_and(|| a_child_tracks(tracked, &kept))).collect();
        done.store(true, Ordering::SeqCst);
        assert_eq!(verdicts, [0; 40], "the wait statuses of the children");
    });
    let live = tracked.live_blocks().expect("tracked");
    assert_eq!(live.iter().map(|block| block.address).collect::<Vec<_>>(), [kept.as_ptr().addr()]);
}

/// The parent's blocks are listed, and its own under its own thread.
fn a_child_tracks(tracked: Handler, kept: &Buffer) -> bool {
    let own = Buffer::zeroed_in(tracked, 78).expect("78 bytes");
    let live = tracked.live_blocks().expect("tracked");
    let thread_of = |buffer: &Buffer| {
        live.iter().find(|block| block.address == buffer.as_ptr().addr()).map(|block| block.thread.id)
    };
    // SAFETY: it may always be asked.
    let this_thread = unsafe { libc::gettid() } as u32;
    thread_of(&own) == Some(this_thread) && thread_of(kept).is_some_and(|parents| parents != this_thread)
}

#[test]
#[cfg(feature = "tracing")]
fn a_subscriber_may_ask_for_the_current_handler_from_its_first_event_on() {
    in_a_process_of_its_own("child_with_a_subscriber", 0);
}

/// A subscriber that asks who serves the work it is told about, as one that attributes memory to requests would.
#[test]
#[cfg(feature = "tracing")]
#[ignore = "a child of a_subscriber_may_ask_for_the_current_handler_from_its_first_event_on"]
fn child_with_a_subscriber() {
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    static EVENTS: AtomicUsize = AtomicUsize::new(0);
    struct Curious;
    impl Subscriber for Curious {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target() == "ctxalloc"
        }
        fn event(&self, _: &Event<'_>) {
            EVENTS.fetch_add(1, Ordering::SeqCst);
            assert_eq!(current(), default_handler());
            drop(Buffer::zeroed(10).expect("10 bytes"));
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    killed_after(PATIENCE_SECONDS);
    tracing::subscriber::set_global_default(Curious).expect("the first one");
    register("reported", Marked::new()).expect("a new name"); // the first use of the table in this process
    assert_eq!(EVENTS.load(Ordering::SeqCst), 1, "what was registered by the user is reported, once");
    assert!(register("reported", Marked::new()).is_err());
    assert_eq!(EVENTS.load(Ordering::SeqCst), 1);
}

const DONE_AT_EXIT: i32 = 42;

#[test]
fn everything_works_in_a_handler_of_the_processs_exit() {
    in_a_process_of_its_own("child_that_allocates_at_exit", DONE_AT_EXIT);
}

#[test]
#[ignore = "a child of everything_works_in_a_handler_of_the_processs_exit"]
fn child_that_allocates_at_exit() {
    static KEPT: std::sync::Mutex<Option<Buffer>> = std::sync::Mutex::new(None);
    extern "C" fn last_words() {
        let work = || {
            let kept = KEPT.lock().expect("nobody panicked").take().expect("a buffer was kept");
            assert_eq!((&kept[..], &*kept.handler().name()), (&b"kept"[..], "kept to the end"));
            drop(kept);
            let own = register("registered at exit", Marked::new()).expect("a new name");
            let mut buffer = scope(own, || Buffer::zeroed(10)).expect("10 bytes");
            buffer.resize(1000).expect("1000 bytes");
            assert!(Context::new().run(current) == default_handler());
        };
        let outcome = std::panic::catch_unwind(work);
        // SAFETY: ends the process here and now, with the verdict.
        unsafe { libc::_exit(if outcome.is_ok() { DONE_AT_EXIT } else { 1 }) };
    }
    killed_after(PATIENCE_SECONDS);
    let (owner, _) = marked("kept to the end");
    *KEPT.lock().expect("nobody panicked") = Some(Buffer::copy_from_slice_in(owner, b"kept").expect("4 bytes"));
    // SAFETY: a function that may run at any time.
    assert_eq!(unsafe { libc::atexit(last_words) }, 0);
}
