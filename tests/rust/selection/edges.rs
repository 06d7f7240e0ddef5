//! Rule 6: re-entrancy, `block_on` inside of a scope, tasks without a context of their own. What is defined here is
//! what `contextvars` and asyncio do in the same place.

use crate::support::{Yield, block_on, blue, green, red};
use ctxalloc::strategy::{Strategy, System};
use ctxalloc::{Buffer, Context, WithHandler, current, default_handler, handler, register, scope, set};
use std::ptr::NonNull;
use tokio::runtime::Builder;
use tokio::task::LocalSet;

/// A task without a context of its own has no selection of its own either: it sees and changes that of the thread
/// that polls it. Wrapped ones beside it are not touched.
#[test]
fn a_local_task_without_a_context_sees_the_ambient_one() {
    let runtime = Builder::new_current_thread().build().expect("a runtime");
    scope(red(), || {
        let local = LocalSet::new();
        let plain = local.spawn_local(async {
            let ambient = current();
            drop(set(green())); // seen by whoever is polled next without a context of his own
            ambient
        });
        let next = local.spawn_local(async { current() });
        let wrapped = local.spawn_local(
            async {
                Yield(2).await;
                current()
            }
            .with_handler(blue()),
        );
        let seen = local.block_on(&runtime, async {
            (plain.await.expect("no panic"), next.await.expect("no panic"), wrapped.await.expect("no panic"))
        });
        assert_eq!(seen, (red(), green(), blue()));
        assert_eq!(current(), green());
    });
    assert_eq!(current(), default_handler(), "the scope around it restores");
}

#[test]
fn a_local_set_driven_in_a_scoped_future_lends_plain_tasks_its_context() {
    let runtime = Builder::new_current_thread().build().expect("a runtime");
    let seen = runtime.block_on(async {
        let local = LocalSet::new();
        let plain = local.spawn_local(async {
            Yield(1).await;
            current()
        });
        let driven = local.run_until(async { plain.await.expect("no panic") });
        (driven.with_handler(red()).await, current())
    });
    assert_eq!(seen, (red(), default_handler()));
}

#[test]
fn block_in_place_keeps_the_tasks_context() {
    let runtime = Builder::new_multi_thread().worker_threads(2).build().expect("a runtime");
    let task = runtime.spawn(
        async {
            let inside = tokio::task::block_in_place(|| {
                let seen = current();
                drop(set(green()));
                seen
            });
            tokio::task::yield_now().await;
            (inside, current())
        }
        .with_handler(red()),
    );
    assert_eq!(runtime.block_on(task).expect("no panic"), (red(), green()));
}

#[test]
fn deep_nesting_comes_back_level_by_level() {
    fn descend(depth: usize) {
        let here = [red(), green(), blue()][depth % 3];
        scope(here, || {
            if depth > 0 {
                block_on(
                    async move {
                        Context::copy_current().run(|| descend(depth - 1));
                    }
                    .in_current_handler(),
                );
            }
            assert_eq!(current(), here);
        });
    }
    descend(100);
    assert_eq!(current(), default_handler());
}

/// Uses the whole crate from inside of its own functions: NumPy may do so too, by way of a strategy that logs.
#[derive(Debug)]
struct Reentrant;

impl Reentrant {
    fn wander() {
        let before = current();
        scope(blue(), || {
            drop(set(green()));
            drop(Buffer::zeroed(32).expect("32 bytes"));
        });
        let _taken = register("registered by a strategy", System);
        assert!(handler("registered by a strategy").is_some());
        assert_eq!(block_on(async { current() }.with_handler(red())), red());
        assert_eq!(current(), before);
    }
}

// SAFETY: as `System`, to which everything goes.
unsafe impl Strategy for Reentrant {
    fn alignment(&self) -> usize {
        System.alignment()
    }

    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        Self::wander();
        System.allocate(size_bytes)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        Self::wander();
        // SAFETY: passed on.
        unsafe { System.resize(block, new_size_bytes) }
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        Self::wander();
        // SAFETY: passed on.
        unsafe { System.release(block) }
    }
}

#[test]
fn a_strategy_may_use_the_crate_while_it_allocates() {
    let reentrant = register("reentrant", Reentrant).expect("a name of its own");
    scope(reentrant, || {
        let mut buffer = Buffer::copy_from_slice(b"abc").expect("3 bytes");
        buffer.resize(1000).expect("1000 bytes");
        assert_eq!(&buffer[..4], b"abc\0");
        assert_eq!(current(), reentrant);
    });
}
