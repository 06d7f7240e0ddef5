//! Requests: nothing that an ended one left behind touches another one, limits never switch off, and nothing
//! is kept of what nothing can reach. In a process of its own, one test at a time: the numbers are the process's.
#![allow(unsafe_code, reason = "the tests write a strategy")]
#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]

mod support;

use ctxalloc::metrics::request_counts;
use ctxalloc::request::{AfterEnd, charge_current};
use ctxalloc::strategy::{Arena, Budget, Pool, Strategy, System, Tracked};
#[cfg(feature = "tokio")]
use ctxalloc::task;
use ctxalloc::{
    Buffer, Context, Error, Request, current, current_request, enter, handler, handlers, request, set, thread,
};
use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use support::Refusing;
use support::errors::error;

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn begin() -> Request {
    request().begin().unwrap()
}

/// But for what a test forgot on purpose.
fn none_is_present() -> bool {
    request_counts().present == KEPT.load(std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn two_requests_at_once_never_share_a_handler() {
    let _alone = alone();
    let requests: Vec<_> = (0..50).map(|_| begin()).collect();
    let handlers: HashSet<_> = requests.iter().map(Request::handler).collect();
    assert_eq!(handlers.len(), 50);
    drop(requests);
    assert!(none_is_present());
}

#[test]
fn an_escape_is_resized_under_the_terms_it_was_made_under() {
    let _alone = alone();
    let limited = request().limit_bytes(10_000).begin().unwrap();
    let budget = limited.budget().clone();
    let mut escape = limited.run(|| Buffer::copy_from_slice(&[7; 1000])).unwrap();
    limited.end();
    escape.resize(9000).unwrap();
    assert_eq!(budget.in_use_bytes(), 9000);
    assert!(matches!(escape.resize(10_001), Err(Error::BudgetExceeded { .. })));
    assert_eq!((escape.len(), escape[999], escape[8999]), (9000, 7, 0));
    drop(escape);
    assert_eq!(budget.in_use_bytes(), 0);
    assert!(none_is_present());
}

#[test]
fn a_limit_refuses_and_the_report_says_whose_it_was() {
    let _alone = alone();
    let tenant = Budget::new("tenant", Some(3000));
    let request = request().name("upload").limit_bytes(2000).budget(&tenant).begin().unwrap();
    let kept = request.run(|| Buffer::zeroed(1500)).unwrap();
    assert!(request.run(|| Buffer::zeroed(501)).is_err());
    assert_eq!(tenant.in_use_bytes(), 1500);
    let own = request.budget();
    let report = request.end();
    let expected = error!(BudgetExceeded {
        budget: "upload",
        budget_id: own.id(),
        of_request: true,
        limit_bytes: 2000,
        in_use_bytes: 1500,
        held_bytes: 1500,
        requested_bytes: 501,
        chosen_for: None::<String>,
        guaranteed_bytes: 0usize
    });
    assert_eq!(format!("{:?}", report.refusal.unwrap()), expected);
    assert_eq!(report.stats.refused, 1);
    drop(kept);
    assert_eq!(tenant.in_use_bytes(), 0);
}

#[test]
fn the_numbers_of_an_inner_request_are_part_of_the_outer_ones() {
    let _alone = alone();
    let outer = begin();
    let elsewhere = Budget::new("elsewhere", None);
    let (own, inner_stats) = outer.run(|| {
        let own = Buffer::zeroed(100).unwrap();
        let inner = begin();
        let with_budget = request().budget(&elsewhere).begin().unwrap();
        let one = inner.run(|| Buffer::zeroed(1000).unwrap());
        let two = with_budget.run(|| Buffer::zeroed(10_000).unwrap());
        assert_eq!(outer.stats().live_bytes, 11_100);
        assert_eq!(outer.stats().live_blocks, 3);
        assert_eq!(elsewhere.in_use_bytes(), 10_000);
        drop((one, two));
        (own, inner.end().stats)
    });
    assert_eq!((inner_stats.total_bytes, inner_stats.peak_bytes), (1000, 1000));
    let stats = outer.stats();
    assert_eq!((stats.live_bytes, stats.peak_bytes, stats.total_bytes, stats.total_blocks), (100, 11_100, 11_100, 3));
    drop(own);
    assert_eq!(outer.end().stats.live_bytes, 0);
    assert_eq!(elsewhere.in_use_bytes(), 0);
    assert!(none_is_present());
}

#[cfg(feature = "tokio")]
#[test]
fn a_task_that_outlives_its_request_never_touches_the_next_one() {
    let _alone = alone();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    runtime.block_on(async {
        let (go_on, wait) = tokio::sync::oneshot::channel::<()>();
        let first = request().name("first").begin().unwrap();
        let handler = first.handler();
        let late = first.run(|| {
            task::spawn(async move {
                wait.await.unwrap();
                Buffer::zeroed(4000).unwrap()
            })
        });
        first.end();
        let next = begin();
        assert_ne!(next.handler(), handler);
        go_on.send(()).unwrap();
        let buffer = late.await.unwrap();
        assert_eq!(buffer.handler(), handler);
        assert_eq!(next.stats().total_blocks, 0);
        assert_eq!(buffer.handler().name(), "first");
        drop((buffer, next));
    });
    drop(runtime);
    assert!(none_is_present());
}

#[test]
fn a_request_may_have_a_strategy_of_its_own_choice() {
    let _alone = alone();
    let request = request().strategy(System).begin().unwrap();
    let kept = request.run(|| Buffer::copy_from_slice(b"kept")).unwrap();
    assert_eq!(request.end().escaped_bytes, 4);
    let next = begin(); // an arena again, in another slot
    let other = next.run(|| Buffer::copy_from_slice(b"other")).unwrap();
    assert_eq!((&*kept, &*other), (&b"kept"[..], &b"other"[..]));
    drop((kept, other, next));
    assert!(none_is_present());
}

#[test]
fn a_strategy_that_aligns_too_little_is_refused() {
    let _alone = alone();
    let refused = request().strategy(Refusing::aligned_to(1)).begin().unwrap_err();
    assert!(matches!(refused, Error::BadAlignment { align: 1, min: 16, .. }), "{refused}");
    assert!(none_is_present());
}

#[test]
fn many_threads_of_requests_lose_no_slot_and_no_byte() {
    let _alone = alone();
    let (threads, rounds) = if cfg!(miri) { (2, 10) } else { (8, 3000) };
    let process = Budget::new("process", None);
    let (sender, receiver) = mpsc::channel::<(Buffer, u8)>();
    let workers: Vec<_> = (0..threads)
        .map(|number: usize| {
            let (process, sender) = (process.clone(), sender.clone());
            std::thread::spawn(move || {
                for round in 0..rounds {
                    let request = request().budget(&process).begin().unwrap();
                    let mark = (number * 31 + round) as u8;
                    request.run(|| {
                        assert_eq!(current(), request.handler());
                        let mut buffers = Vec::new();
                        for size in [1, 100, 1000, 5000 * (round % 3), 40_000 * (round % 7 / 6)] {
                            buffers.push(Buffer::copy_from_slice(&vec![mark; size]).unwrap());
                        }
                        let mut grown = buffers.swap_remove(2);
                        grown.resize(2000 + round % 100).unwrap();
                        assert!(grown[..1000].iter().all(|&byte| byte == mark));
                        if round % 5 == 0 {
                            sender.send((buffers.swap_remove(1), mark)).unwrap();
                        }
                        assert!(buffers.iter().all(|buffer| buffer.iter().all(|&byte| byte == mark)));
                    });
                }
            })
        })
        .collect();
    drop(sender);
    let mut kept = Vec::new();
    for (number, (buffer, mark)) in receiver.into_iter().enumerate() {
        assert!(buffer.iter().all(|&byte| byte == mark), "an escape was overwritten");
        if number % 3 == 0 {
            kept.push((buffer, mark));
        }
    }
    for worker in workers {
        worker.join().unwrap();
    }
    assert!(kept.iter().all(|(buffer, mark)| buffer.iter().all(|byte| byte == mark)));
    assert_eq!(process.in_use_bytes(), kept.iter().map(|(buffer, _)| buffer.len()).sum::<usize>());
    let forgotten = KEPT.load(std::sync::atomic::Ordering::Relaxed);
    assert!(
        request_counts().present - forgotten <= kept.len(),
        "no request is there without an escape: {:?}",
        request_counts()
    );
    drop(kept);
    assert_eq!(process.in_use_bytes(), 0);
    assert!(none_is_present(), "{:?}", request_counts());
    Pool::shared().trim();
}

#[test]
fn a_request_on_a_tracked_strategy_says_what_escaped() {
    let _alone = alone();
    let request = request().strategy(Tracked::new(Pool::new()).unwrap()).begin().unwrap();
    let (escape, also) = request.run(|| {
        drop(Buffer::zeroed(5000).unwrap());
        (Buffer::zeroed(1000).unwrap(), thread::spawn(|| Buffer::zeroed(10).unwrap()).join().unwrap())
    });
    assert_eq!(request.live_blocks().unwrap().len(), 2);
    assert_eq!(request.handler().live_blocks().unwrap().len(), 2);
    let report = request.end();
    let escapes = report.escapes.unwrap();
    let seen: Vec<_> = escapes.iter().map(|block| (block.size_bytes, block.address)).collect();
    assert_eq!(seen, [(1000, escape.as_ptr().addr()), (10, also.as_ptr().addr())]);
    assert_ne!(escapes[0].thread.id, escapes[1].thread.id);
    drop((escape, also));
    assert!(none_is_present());
    let plain = begin();
    assert!(plain.live_blocks().is_none() && plain.end().escapes.is_none());
}

#[test]
fn a_request_begun_where_another_one_is_over_is_part_of_none() {
    let _alone = alone();
    let first = begin();
    let mut late = first.run(Context::copy_current);
    first.end();
    let second = late.run(begin);
    assert!(second.budget().parent().is_none(), "{:?}", second.budget().parent());
    drop((late, second));
    assert!(none_is_present());
}

#[test]
fn a_request_that_left_nothing_is_gone() {
    let _alone = alone();
    let first = begin();
    let handler = first.handler();
    first.run(|| drop(Buffer::zeroed(1000).unwrap()));
    let report = first.end();
    assert_eq!((report.escaped_blocks, report.escaped_bytes, report.stats.total_blocks), (0, 0, 1));
    assert!(none_is_present());
    assert_ne!(begin().handler(), handler, "the next one has another handler");
    assert_eq!(handler.name(), "a request that has ended");
    let refused = handler.allocate(1).expect_err("it is gone");
    assert!(refused.to_string().starts_with("the request has ended and gives no more memory (1 bytes"), "{refused}");
}

#[test]
fn an_escape_stays_valid_named_and_charged_to_its_own_request() {
    let _alone = alone();
    let request = request().name("thumbnail").begin().unwrap();
    let (escape, _dead) = request.run(|| {
        let buffers: Vec<_> = (0..100).map(|n| Buffer::copy_from_slice(&[n; 5000]).unwrap()).collect();
        let mut buffers = buffers.into_iter();
        (buffers.nth(50).unwrap(), drop(buffers))
    });
    let budget = request.budget();
    let report = request.end();
    assert_eq!((report.escaped_blocks, report.escaped_bytes), (1, 5000));
    let next = begin();
    assert!(next.run(|| Buffer::zeroed(5000)).unwrap().iter().all(|&byte| byte == 0));
    assert_eq!(*escape, [50; 5000]);
    assert_eq!(escape.handler().name(), "thumbnail");
    assert_eq!(budget.in_use_bytes(), 5000);
    drop(next);
    thread::spawn(move || drop(escape)).join().unwrap();
    assert!(none_is_present());
    assert_eq!(budget.in_use_bytes(), 0);
}

#[test]
fn limits_hold_after_a_hundred_thousand_escapes() {
    let _alone = alone();
    let count = if cfg!(miri) { 100 } else { 100_000 };
    let kept: Vec<_> = (0..count).map(|_| begin().run(|| Buffer::zeroed(80).unwrap())).collect();
    let limited = request().limit_bytes(1000).begin().unwrap();
    assert!(limited.run(|| Buffer::zeroed(50 << 20)).is_err());
    assert!(limited.run(|| Buffer::zeroed(1001)).is_err());
    drop(limited.run(|| Buffer::zeroed(1000).unwrap()));
    assert_eq!((limited.stats().peak_bytes, limited.stats().refused), (1000, 2));
    drop((kept, limited));
    assert!(none_is_present());
}

#[cfg(feature = "allocator-api2")]
#[test]
fn whatever_still_reaches_an_ended_request_never_touches_the_next_one() {
    let _alone = alone();
    let first = request().name("first").limit_bytes(10_000).begin().unwrap();
    let handler = first.handler();
    let token = set(handler);
    let guard = enter(handler);
    let empty = Buffer::zeroed(0).unwrap();
    let vector = allocator_api2::vec::Vec::<u8, _>::new_in(ctxalloc::ContextAlloc::new());
    let mut context = Context::copy_current();
    let budget = first.budget();
    first.end();
    drop(guard);
    ctxalloc::reset(&token).unwrap();

    let next = request().name("next").limit_bytes(100).begin().unwrap();
    let (mut empty, mut vector) = (empty, vector);
    empty.resize(1000).unwrap(); // charged to the first one, which has room
    vector.extend_from_slice(&[1; 2000]);
    let late = context.run(|| Buffer::zeroed(3000).unwrap());
    assert_eq!(budget.in_use_bytes(), 1000 + vector.capacity() + 3000);
    assert!(context.run(|| Buffer::zeroed(9000)).is_err(), "limited by the first one");
    assert_eq!(next.stats(), Default::default());
    assert_eq!((late.handler().name(), empty.handler().name()), ("first".into(), "first".into()));
    drop((empty, vector, late, context));
    assert_eq!(budget.in_use_bytes(), 0);
    drop(next);
    assert!(none_is_present());
}

#[test]
fn a_selection_that_is_left_by_a_thread_that_ends_is_let_go() {
    let _alone = alone();
    let first = begin();
    let handler = first.handler();
    std::thread::spawn(move || drop(set(handler))).join().unwrap();
    first.end();
    assert!(none_is_present());
}

#[test]
fn a_handle_of_a_request_that_is_gone_is_told_from_the_next_one() {
    let _alone = alone();
    let gone: Vec<_> = (0..1000).map(|_| begin().handler()).collect();
    let next = begin();
    for handler in gone {
        assert_ne!(handler, next.handler());
        assert!(handler.allocate(10).is_err());
        let _scope = enter(handler);
        assert_eq!(current().name(), "a request that has ended");
        assert!(matches!(Buffer::zeroed(10), Err(Error::RequestEnded { .. })));
        assert!(current_request().is_none());
    }
    assert_eq!(next.stats(), Default::default());
}

#[test]
fn forgotten_contexts_by_the_million_neither_crash_nor_mix_requests_up() {
    let _alone = alone();
    let before = request_counts().present;
    let request = request().name("kept").limit_bytes(100).begin().unwrap();
    let handler = request.handler();
    let count = if cfg!(miri) { 100 } else { (1 << 23) + 10 };
    (0..count).for_each(|_| std::mem::forget(Context::with_handler(handler)));
    request.end();
    let next = begin();
    assert_ne!(next.handler(), handler);
    assert_eq!(handler.name(), "kept");
    assert!(handler.allocate(101).is_err(), "its limit holds");
    drop(next);
    assert_eq!(request_counts().present, before + 1, "what was forgotten is kept");
    KEPT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
}

#[test]
#[cfg(target_os = "linux")] // where the last thread-local that was made is destroyed first
fn what_a_late_destructor_leaves_selected_keeps_its_request() {
    let _alone = alone();
    for resets in [true, false] {
        let request = begin();
        let (handle, handler) = (request.run(|| current_request().unwrap()), request.handler());
        std::thread::spawn(move || {
            LATE.set(Some(Late { handle: handle.clone(), resets })); // before ours: destroyed after it
            drop(enter(handler));
            drop(handle);
        })
        .join()
        .unwrap();
        assert_eq!(request.stats().live_bytes, 0);
        drop(request);
        if !resets {
            KEPT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
        assert!(none_is_present(), "resets: {resets}, {:?}", request_counts());
    }
}

#[cfg(target_os = "linux")]
thread_local! {
    static LATE: std::cell::RefCell<Option<Late>> = const { std::cell::RefCell::new(None) };
}

/// Selects its request in its destructor.
#[cfg(target_os = "linux")]
struct Late {
    handle: ctxalloc::RequestHandle,
    resets: bool,
}

#[cfg(target_os = "linux")]
impl Drop for Late {
    fn drop(&mut self) {
        let token = set(self.handle.handler());
        drop(Buffer::zeroed(100).unwrap());
        if self.resets {
            ctxalloc::reset(&token).unwrap();
        }
    }
}

static KEPT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

#[test]
fn a_diamond_charges_what_is_shared_once() {
    let _alone = alone();
    let tenant = Budget::new("tenant", None);
    let (left, right) = (tenant.child("left", None), tenant.child("right", None));
    let outer = request().budget(&left).begin().unwrap();
    let inner = outer.run(|| request().budget(&right).begin().unwrap());
    let block = inner.run(|| Buffer::zeroed(1000).unwrap());
    for budget in [&tenant, &left, &right, &outer.budget(), &inner.budget()] {
        assert_eq!((budget.in_use_bytes(), budget.peak_bytes()), (1000, 1000), "{budget:?}");
    }
    let twice = outer.run(|| request().budget(&tenant).begin().unwrap());
    let other = twice.run(|| Buffer::zeroed(10).unwrap());
    assert_eq!(tenant.in_use_bytes(), 1010);
    drop((block, other));
    assert_eq!(tenant.in_use_bytes(), 0);
}

#[test]
fn three_levels_down_a_limit_holds_and_the_sums_are_right() {
    let _alone = alone();
    let elsewhere = Budget::new("elsewhere", None);
    let a = request().name("a").limit_bytes(1 << 20).begin().unwrap();
    let b = a.run(|| request().budget(&elsewhere).begin().unwrap());
    let c = b.run(begin);
    let block = c.run(|| Buffer::zeroed(1 << 20).unwrap());
    assert_eq!((a.stats().live_bytes, a.stats().live_blocks), (1 << 20, 1));
    assert_eq!(elsewhere.in_use_bytes(), 1 << 20);
    let refused = c.run(|| Buffer::zeroed(1)).unwrap_err();
    assert!(matches!(refused, Error::BudgetExceeded { budget, .. } if budget == "a"));
    assert_eq!((a.stats().refused, b.stats().refused, c.stats().refused), (1, 0, 0));
    drop(block);
}

#[test]
fn what_was_refused_was_never_alive() {
    let _alone = alone();
    let tenant = Budget::new("tenant", Some(1000));
    let request = request().budget(&tenant).begin().unwrap();
    request.run(|| {
        Buffer::zeroed(50_000_000).unwrap_err();
        Buffer::zeroed(usize::MAX >> 2).unwrap_err();
    });
    assert_eq!((tenant.peak_bytes(), request.stats().peak_bytes, request.stats().total_bytes), (0, 0, 0));
    let unlimited = begin();
    unlimited.run(|| Buffer::zeroed(1 << 60)).unwrap_err(); // the system's refusal
    assert_eq!((unlimited.stats().peak_bytes, unlimited.stats().total_bytes), (0, 0));
}

#[test]
fn a_limit_that_is_changed_holds_from_the_next_charge() {
    let _alone = alone();
    let tenant = Budget::new("tenant", Some(1000));
    let request = request().budget(&tenant).begin().unwrap();
    let first = request.run(|| Buffer::zeroed(900).unwrap());
    tenant.set_limit_bytes(Some(500));
    assert!(request.run(|| Buffer::zeroed(1)).is_err());
    tenant.set_limit_bytes(None);
    drop(request.run(|| Buffer::zeroed(100_000).unwrap()));
    drop(first);
}

#[test]
fn a_root_request_is_part_of_none() {
    let _alone = alone();
    let outer = request().limit_bytes(100).begin().unwrap();
    let root = outer.run(|| request().root().begin().unwrap());
    drop(root.run(|| Buffer::zeroed(1000).unwrap()));
    assert_eq!(outer.stats(), Default::default());
    assert!(root.budget().parent().is_none());
}

#[test]
fn work_after_the_end_is_charged_refused_or_detached_as_was_said() {
    let _alone = alone();
    for after_end in [AfterEnd::Charge, AfterEnd::Refuse, AfterEnd::Detach] {
        let tenant = Budget::new("tenant", None);
        let request = request().name("r").budget(&tenant).after_end(after_end).begin().unwrap();
        let mut late = request.run(Context::copy_current);
        let mut before = request.run(|| Buffer::zeroed(100).unwrap());
        request.end();
        let after = late.run(|| Buffer::zeroed(1000));
        let charged = match (after_end, &after) {
            (AfterEnd::Refuse, Err(Error::RequestEnded { request, .. })) => {
                assert_eq!(request, "r");
                100
            }
            (AfterEnd::Charge, Ok(_)) => 1100,
            (AfterEnd::Detach, Ok(_)) => 100,
            other => panic!("{other:?}"),
        };
        assert_eq!(tenant.in_use_bytes(), charged);
        if let Ok(mut after) = after {
            after.fill(7);
            after.resize(100_000).unwrap();
            assert!(after[..1000].iter().all(|&byte| byte == 7));
            assert_eq!(after.handler().name(), "r");
            drop(late);
            drop(after);
        }
        before.resize(50).unwrap();
        assert_eq!(tenant.in_use_bytes(), 50);
        drop(before);
        assert_eq!(tenant.in_use_bytes(), 0);
    }
}

#[test]
fn a_request_is_known_from_any_depth_task_and_thread_that_carries_it() {
    let _alone = alone();
    assert!(current_request().is_none());
    let outer = request().name("outer").begin().unwrap();
    let seen = outer.run(|| {
        thread::spawn(|| {
            let _block = Buffer::zeroed(10).unwrap();
            let known = current_request().unwrap();
            (known.name().into_owned(), known.stats().live_bytes)
        })
        .join()
        .unwrap()
    });
    assert_eq!(seen, ("outer".to_owned(), 10));
    let handle = outer.handle();
    outer.end();
    assert!(handle.has_ended() && handle.name() == "outer");
    drop(handle);
    assert!(none_is_present());
}

#[test]
fn bytes_from_elsewhere_are_charged_like_any_other() {
    let _alone = alone();
    assert!(charge_current(10).unwrap().is_none());
    let request = request().limit_bytes(1000).begin().unwrap();
    let charge = request.run(|| charge_current(900).unwrap().unwrap());
    assert_eq!((request.stats().live_bytes, request.stats().live_blocks), (900, 1));
    assert!(request.run(|| charge_current(101)).is_err());
    assert!(request.run(|| Buffer::zeroed(101)).is_err());
    let report = request.end();
    assert_eq!((report.escaped_bytes, report.stats.refused), (900, 2));
    assert_eq!(charge.bytes(), 900);
    drop(charge);
    assert!(none_is_present());
}

#[test]
fn a_tiny_block_may_use_the_overdraft_and_the_account_shows_it() {
    let _alone = alone();
    let request = request().limit_bytes(0).overdraft_bytes(1500).begin().unwrap();
    let tiny = request.run(|| Buffer::zeroed(1024).unwrap());
    assert_eq!(request.stats().overdraft_bytes, 1024);
    assert!(request.run(|| Buffer::zeroed(1025)).is_err(), "not tiny");
    assert!(request.run(|| Buffer::zeroed(500)).is_err(), "past the overdraft");
    let scalars: Vec<_> = request.run(|| (0..).map_while(|_| Buffer::zeroed(32).ok()).collect());
    assert_eq!(scalars.len(), (16 * 1500 - 1024) / 32, "scalars have sixteen times as much");
    drop((tiny, scalars));
    assert_eq!(request.end().stats.overdraft_bytes, 0);
}

#[test]
fn a_chain_of_successors_stays_flat() {
    let _alone = alone();
    let slots = request_counts().slots;
    let mut last = begin();
    for _ in 0..if cfg!(miri) { 100 } else { 1_000_000 } {
        let next = last.run(|| request().budget(&Budget::new("own", None)).begin().unwrap());
        last.end();
        last = next;
    }
    assert!(request_counts().slots <= slots + 64);
    drop(last.run(|| Buffer::zeroed(5).unwrap()));
    assert_eq!(last.end().stats.total_bytes, 5);
    assert!(none_is_present());
}

#[test]
fn budgets_a_million_deep_are_charged_and_dropped() {
    let depth = if cfg!(miri) { 100 } else { 1_000_000 };
    let mut deep = Budget::new("0", None);
    let top = deep.clone();
    for _ in 0..depth {
        deep = deep.child("n", None);
    }
    let charge = deep.charge(10).unwrap();
    assert_eq!(top.in_use_bytes(), 10);
    drop(charge);
    assert_eq!(top.in_use_bytes(), 0);
}

#[test]
fn requests_nested_too_deep_are_refused_with_an_error() {
    let _alone = alone();
    if cfg!(miri) {
        return;
    }
    let mut nested = vec![begin()];
    let refused = loop {
        match nested.last().unwrap().run(|| request().begin()) {
            Ok(next) => nested.push(next),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, Error::NestedTooDeep { max: 4096, .. }));
    let advice = refused.to_string();
    assert!(advice.contains("root requests") && advice.contains("parents of its budget"), "{advice}");
    let innermost = nested.last().unwrap();
    let block = innermost.run(|| Buffer::zeroed(10).unwrap());
    assert_eq!(nested[0].stats().live_bytes, 10);
    drop(block);
    assert_eq!(nested[0].stats().live_bytes, 0);
}

#[test]
fn nobody_finds_a_request_by_name_or_in_the_list() {
    let _alone = alone();
    let request = request().name("pool").begin().unwrap(); // any name will do
    assert_ne!(handler("pool"), Some(request.handler()));
    assert!(handlers().all(|other| other != request.handler()));
    let said = ctxalloc::handler::try_handler("nobody").unwrap_err().to_string();
    assert!(said.contains("system, ") && !said.contains("ended"), "{said}");
    assert_eq!(request.handler().name(), "pool");
}

#[test]
fn an_arena_of_its_own_goes_with_the_request() {
    let _alone = alone();
    let pool = Pool::new();
    let request = request().strategy(Arena::over(&pool)).begin().unwrap();
    let kept = request.run(|| {
        let all: Vec<_> = (0..1000).map(|_| Buffer::zeroed(1000).unwrap()).collect();
        all.into_iter().next().unwrap()
    });
    assert_eq!(request.end().escaped_bytes, 1000);
    assert_eq!(kept.len(), 1000);
    drop(kept);
    assert!(none_is_present());
}

#[test]
fn the_request_outlives_what_its_strategys_own_code_lets_go_of() {
    let _alone = alone();
    let telling = Tracked::with_attribution(System, || {
        drop(set(None));
        None::<u64>.into()
    })
    .unwrap();
    let request = request().strategy(telling).begin().unwrap();
    drop(set(request.handler()));
    request.end(); // from now on only the selection holds the request
    let block = Buffer::zeroed(100).unwrap();
    assert_eq!(&*block, [0; 100]);
    drop(block);
    assert!(none_is_present());
}

#[test]
fn budgets_of_an_ended_request_charge_what_is_above_them() {
    let _alone = alone();
    let tenant = Budget::new("tenant", Some(1000));
    let ended = request().name("ended").limit_bytes(800).budget(&tenant).begin().unwrap();
    let part = ended.budget().child("part", None);
    let own = ended.budget();
    ended.end();
    assert!(part.charge(900).is_err() && own.charge(900).is_err());
    let charge = part.charge(700).unwrap();
    assert_eq!((part.in_use_bytes(), own.in_use_bytes(), tenant.in_use_bytes()), (700, 700, 700));
    drop(charge);
    let next = request().budget(&part).begin().unwrap();
    assert!(next.run(|| Buffer::zeroed(900)).is_err());
    assert!(part.is_under(&tenant) && next.budget().is_under(&tenant) && !tenant.is_under(&part));
    drop(next);
    assert!(none_is_present());
}

#[test]
fn a_budget_is_idle_when_nothing_can_charge_it() {
    let _alone = alone();
    let budget = Budget::new("tenant", None);
    assert!(budget.is_idle());
    let below = budget.child("below", None);
    assert!(below.is_idle() && !budget.is_idle());
    drop(below);
    let open = request().budget(&budget).begin().unwrap();
    assert_eq!((budget.in_use_bytes(), budget.is_idle()), (0, false));
    let escaped = open.run(|| Buffer::zeroed(100)).unwrap();
    open.end();
    assert!(!budget.is_idle());
    drop(escaped);
    assert!(budget.is_idle());
    let ended = request().budget(&budget).begin().unwrap();
    let own = ended.budget();
    ended.end();
    assert!(!budget.is_idle(), "what charges an ended request's budget charges it too");
    drop(own);
    assert!(budget.is_idle());
    let charge = budget.charge(10).unwrap();
    assert!(!budget.is_idle());
    drop(charge);
    assert!(budget.is_idle());
}

#[test]
fn a_request_begun_where_a_detached_one_is_over_pays_for_nobody_else() {
    let _alone = alone();
    let (red, blue) = (Budget::new("red", Some(100)), Budget::new("blue", None));
    let first = request().budget(&red).begin().unwrap();
    let mut late = first.run(Context::copy_current);
    first.end();
    let second = late.run(|| request().budget(&blue).begin().unwrap());
    drop(second.run(|| Buffer::zeroed(1000).unwrap()));
    assert_eq!((red.peak_bytes(), blue.peak_bytes()), (0, 1000));
}

#[test]
fn numbers_end_at_the_largest_there_is() {
    let request = request().root().overdraft_bytes(64).begin().unwrap();
    let all = request.handle().charge(usize::MAX).unwrap();
    assert!(request.run(|| Buffer::zeroed(16)).is_err(), "nothing beyond it can be counted");
    assert_eq!(request.stats().live_bytes, usize::MAX);
    drop(all);
    let one = request.run(|| Buffer::zeroed(16)).unwrap();
    assert_eq!((request.stats().live_bytes, request.stats().total_bytes), (16, u64::MAX));
    drop(one);
}

#[test]
fn nobody_detaches_work_from_a_request_that_is_open() {
    let _alone = alone();
    let open = request().limit_bytes(5000).begin().unwrap();
    let inner = open.run(|| request().after_end(AfterEnd::Detach).begin().unwrap());
    let mut late = inner.run(Context::copy_current);
    inner.end();
    assert!(late.run(|| Buffer::zeroed(5001)).is_err());
    let block = late.run(|| Buffer::zeroed(5000).unwrap());
    assert_eq!(open.stats().live_bytes, 5000);
    drop(block);
    open.end();
    drop(late.run(|| Buffer::zeroed(5001).unwrap()));
}

#[test]
fn what_is_given_back_is_never_refused() {
    let _alone = alone();
    let tenant = Budget::new("tenant", None);
    let request = request().budget(&tenant).begin().unwrap();
    let mut block = request.run(|| Buffer::zeroed(100_000).unwrap());
    tenant.set_limit_bytes(Some(10));
    assert_eq!(tenant.overdraft_bytes(), 99_990);
    block.resize(50_000).unwrap();
    block.resize(10).unwrap();
    assert!(block.resize(11).is_err());
    assert_eq!(tenant.in_use_bytes(), 10);
}

#[test]
fn a_strict_request_has_no_overdraft_for_those_inside_of_it() {
    let _alone = alone();
    let strict = request().limit_bytes(0).begin().unwrap();
    let inner = strict.run(|| request().overdraft_bytes(1000).begin().unwrap());
    assert!(inner.run(|| Buffer::zeroed(1)).is_err());
    let tenant = Budget::new("tenant", Some(0));
    let (one, other) = (request().budget(&tenant), request().budget(&tenant));
    let [one, other] = [one, other].map(|request| request.overdraft_bytes(1000).begin().unwrap());
    let all = one.run(|| Buffer::zeroed(1000).unwrap());
    assert!(other.run(|| Buffer::zeroed(33)).is_err(), "no more beyond one limit, whoever asks");
    drop(other.run(|| Buffer::zeroed(32).expect("a scalar")));
    drop(all);
    drop(other.run(|| Buffer::zeroed(1000).unwrap()));
}

#[test]
fn blocks_within_the_limit_do_not_use_up_the_overdraft() {
    let _alone = alone();
    let request = request().limit_bytes(10_000).overdraft_bytes(2000).begin().unwrap();
    let rows: Vec<_> = request.run(|| (0..).map_while(|_| Buffer::zeroed(1000).ok()).collect());
    assert_eq!((rows.len(), request.stats().overdraft_bytes), (12, 2000));
    // A limit that is lowered counts from what is in use, so that scalars can still be had.
    request.budget().set_limit_bytes(Some(0));
    let more: Vec<_> = request.run(|| (0..).map_while(|_| Buffer::zeroed(1000).ok()).collect());
    assert_eq!((more.len(), request.stats().live_bytes), (2, 14_000));
    drop((rows, more));
    assert!(request.run(|| Buffer::zeroed(2001)).is_err(), "it falls with what is in use");
    assert!(request.run(|| Buffer::zeroed(1000)).is_ok());
}

#[test]
fn requests_inside_exceed_an_outer_limit_by_one_overdraft_together() {
    let _alone = alone();
    let tenant = Budget::new("tenant", Some(0));
    let outer = request().limit_bytes(0).overdraft_bytes(4000).budget(&tenant).begin().unwrap();
    let mut kept = Vec::new();
    for _ in 0..100 {
        let inner = outer.run(|| request().limit_bytes(0).overdraft_bytes(4000).begin().unwrap());
        kept.extend(inner.run(|| (0..10).filter_map(|_| Buffer::zeroed(1000).ok()).collect::<Vec<_>>()));
    }
    assert_eq!((kept.len(), tenant.overdraft_bytes(), outer.stats().overdraft_bytes), (4, 4000, 4000));
}

#[test]
fn late_work_that_is_refused_gets_one_overdraft() {
    let _alone = alone();
    let begun = request().overdraft_bytes(4000).after_end(AfterEnd::Refuse).begin().unwrap();
    let mut context = begun.run(Context::copy_current);
    let before = begun.run(|| Buffer::zeroed(50_000).unwrap());
    let handle = begun.handle();
    drop(begun);
    let late: Vec<_> = context.run(|| (0..).map_while(|_| Buffer::zeroed(1000).ok()).collect());
    assert_eq!((late.len(), handle.stats().live_bytes), (4, 54_000));
    assert!(matches!(context.run(|| Buffer::zeroed(1000)), Err(Error::RequestEnded { .. })));
    drop((before, late));
}

#[test]
fn nothing_from_elsewhere_is_nothing() {
    let _alone = alone();
    let request = begin();
    drop(request.run(|| charge_current(0).unwrap()));
    assert_eq!(request.end().escaped_blocks, 0);
    assert!(none_is_present());
}

#[test]
fn an_old_refusal_is_not_told_for_a_new_failure() {
    let _alone = alone();
    let request = request().limit_bytes(1000).begin().unwrap();
    let refused = request.run(|| Buffer::zeroed(1 << 60)).unwrap_err();
    assert!(matches!(refused, Error::BudgetExceeded { .. }));
    request.budget().set_limit_bytes(None);
    let failed = request.run(|| Buffer::zeroed(1 << 60)).unwrap_err();
    assert!(matches!(failed, Error::OutOfMemory { .. }), "{failed}");
    assert_eq!(request.end().refusal, Some(refused));
}

#[test]
fn a_strategy_that_panics_in_its_end_takes_nothing_down() {
    let _alone = alone();
    #[derive(Debug)]
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("in drop");
        }
    }
    // SAFETY: the blocks are the C heap's.
    unsafe impl Strategy for Panics {
        fn alignment(&self) -> usize {
            16
        }
        fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
            System.allocate(size_bytes)
        }
        unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
            // SAFETY: `allocate` made the block by System, and the caller promises that it is live.
            unsafe { System.resize(block, new_size_bytes) }
        }
        unsafe fn release(&self, block: NonNull<u8>) {
            // SAFETY: `allocate` made the block by System, and the caller promises that it is live.
            unsafe { System.release(block) }
        }
    }
    request().strategy(Panics).begin().unwrap().end();
    assert!(none_is_present());
}

#[test]
fn a_limit_of_the_heap_needs_an_allocator_that_counts() {
    let _alone = alone();
    let refused = request().heap_limit_bytes(1000).begin().unwrap_err();
    assert!(matches!(refused, Error::BadOption { option: "heap_limit_bytes", .. }), "{refused}");
    assert_eq!(request().begin().unwrap().heap(), None);
}
