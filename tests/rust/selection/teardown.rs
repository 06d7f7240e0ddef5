//! Rule 6, its darkest corner: thread-local destructors. The selection has no destructor of its own, so it can be read
//! and changed until the thread is gone, whichever thread-local goes first.

use crate::support::{block_on, blue, drop_probe, green, in_a_dying_thread, marked, poll_once, red};
use ctxalloc::{Buffer, Context, Error, WithHandler, current, default_handler, enter, reset, scope, set};
use std::cell::RefCell;

const BOTH_ORDERS: [bool; 2] = [true, false];

#[test]
fn the_selection_can_be_read_and_changed_in_a_thread_local_destructor() {
    for hook_first in BOTH_ORDERS {
        in_a_dying_thread(
            hook_first,
            || drop(set(red())),
            || {
                assert_eq!(current(), red(), "the thread's own context lasts to its end");
                let token = set(green());
                assert_eq!(current(), green());
                assert_eq!(reset(&token), Ok(()));
                assert_eq!(reset(&token), Err(Error::TokenUsed));
                assert_eq!(scope(blue(), current), blue());
                drop(enter(blue()));
                assert_eq!(current(), red());
            },
        );
    }
}

#[test]
fn a_thread_that_never_selected_may_begin_in_its_destructors() {
    for hook_first in BOTH_ORDERS {
        in_a_dying_thread(
            hook_first,
            || {},
            || {
                assert_eq!(current(), default_handler());
                let token = set(red());
                assert_eq!(current(), red());
                assert_eq!(reset(&token), Ok(()));
                assert!(Context::copy_current().is_unset());
            },
        );
    }
}

#[test]
fn a_token_of_the_living_thread_is_good_in_its_destructors() {
    for hook_first in BOTH_ORDERS {
        let (send, receive) = std::sync::mpsc::channel();
        in_a_dying_thread(
            hook_first,
            move || send.send(set(red())).expect("somebody listens"),
            move || {
                let token = receive.recv().expect("a token");
                assert_eq!(reset(&token), Ok(()));
                assert_eq!(current(), default_handler());
            },
        );
    }
}

#[test]
fn buffers_are_made_resized_and_freed_in_a_thread_local_destructor() {
    let (owner, strategy) = marked("thread-local teardown");
    for hook_first in BOTH_ORDERS {
        in_a_dying_thread(
            hook_first,
            move || drop(set(owner)),
            move || {
                let mut buffer = Buffer::copy_from_slice(b"last words").expect("10 bytes");
                buffer.resize(5000).expect("5000 bytes");
                assert_eq!((&buffer[..10], buffer.handler()), (&b"last words"[..], owner));
                #[cfg(feature = "allocator-api2")]
                {
                    let mut numbers = allocator_api2::vec::Vec::new_in(ctxalloc::ContextAlloc::new());
                    numbers.extend(0..1000);
                    assert_eq!(numbers.allocator().handler(), owner);
                }
            },
        );
    }
    assert_eq!((strategy.live_blocks(), strategy.made()), (0, strategy.made()));
    assert!(strategy.made() > 0);
}

#[test]
fn a_buffer_kept_in_a_thread_local_goes_back_to_its_handler() {
    thread_local! {
        static KEPT: RefCell<Option<Buffer>> = const { RefCell::new(None) };
    }
    let (owner, strategy) = marked("kept in a thread-local");
    let strategy_there = std::sync::Arc::clone(&strategy);
    std::thread::spawn(move || {
        let buffer = scope(owner, || Buffer::zeroed(100)).expect("100 bytes");
        KEPT.set(Some(buffer));
        assert_eq!(strategy_there.live_blocks(), 1);
    })
    .join()
    .expect("no panic");
    assert_eq!(strategy.live_blocks(), 0);
}

#[test]
fn a_future_kept_in_a_thread_local_is_destroyed_in_its_context() {
    type Kept = std::pin::Pin<Box<dyn Future<Output = ()>>>;
    thread_local! {
        static KEPT: RefCell<Option<Kept>> = const { RefCell::new(None) };
    }
    let (probe, dropped) = drop_probe();
    std::thread::spawn(move || {
        let future = async move {
            let _probe = probe;
            drop(set(green()));
            std::future::pending().await
        };
        let mut future: Kept = Box::pin(future.with_handler(red()));
        assert!(poll_once(future.as_mut()).is_pending());
        KEPT.set(Some(future));
    })
    .join()
    .expect("no panic");
    assert_eq!(dropped.handler(), green());
}

#[test]
fn scoped_work_runs_in_a_thread_local_destructor() {
    in_a_dying_thread(
        true,
        || {},
        || {
            assert_eq!(block_on(async { current() }.with_handler(red())), red());
            assert_eq!(Context::with_handler(green()).run(current), green());
            let child = scope(blue(), || ctxalloc::thread::spawn(current));
            assert_eq!(child.join().expect("no panic"), blue());
            assert_eq!(current(), default_handler());
        },
    );
}

/// The context that `thread::spawn` carries is that of the closure, as `threading.Thread` with a context has it; what
/// is left of the thread after it runs in the thread's own, empty one.
#[test]
fn destructors_after_a_carried_closure_see_the_threads_own_context() {
    let seen = scope(red(), || {
        let carried = Context::copy_current();
        in_a_dying_thread(true, carried.wrap(|| assert_eq!(current(), red())), current)
    });
    assert_eq!(seen, default_handler());
}
