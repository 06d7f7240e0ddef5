//! Leases (contract 4): slots are reused, never lost, and never given away while anybody may use them. In a process of
//! its own, one test at a time: slots are the process's.
#![allow(unsafe_code, reason = "the tests write a strategy")]
#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]

use ctxalloc::handler::lease::{self, metrics};
use ctxalloc::strategy::{Budget, Pool, Strategy, System, Tracked};
#[cfg(feature = "tokio")]
use ctxalloc::task;
use ctxalloc::{Buffer, Context, Error, Request, current, handler, handlers, register, request, thread};
use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn begin() -> Request {
    request().begin().unwrap()
}

fn all_slots_are_free() -> bool {
    let metrics = metrics();
    metrics.free == metrics.slots
}

#[test]
fn a_request_that_left_nothing_gives_its_slot_to_the_next_one() {
    let _alone = alone();
    let first = begin();
    let handler = first.handler();
    first.run(|| drop(Buffer::zeroed(1000).unwrap()));
    let report = first.end();
    assert_eq!((report.escaped_blocks, report.escaped_bytes, report.stats.total_blocks), (0, 0, 1));
    assert_eq!(begin().handler(), handler);
    assert!(all_slots_are_free());
}

#[test]
fn two_requests_at_once_never_share_a_slot() {
    let _alone = alone();
    let requests: Vec<_> = (0..50).map(|_| begin()).collect();
    let handlers: HashSet<_> = requests.iter().map(Request::handler).collect();
    assert_eq!(handlers.len(), 50);
    drop(requests);
    assert!(all_slots_are_free());
}

#[test]
fn an_escape_stays_valid_and_its_slot_waits_for_it() {
    let _alone = alone();
    let request = begin();
    let handler = request.handler();
    let (escape, _dead) = request.run(|| {
        let buffers: Vec<_> = (0..100).map(|n| Buffer::copy_from_slice(&[n; 5000]).unwrap()).collect();
        let mut buffers = buffers.into_iter();
        (buffers.nth(50).unwrap(), drop(buffers))
    });
    let report = request.end();
    assert_eq!((report.escaped_blocks, report.escaped_bytes), (1, 5000));
    let next = begin();
    assert_ne!(next.handler(), handler, "its slot is not free");
    assert!(next.run(|| Buffer::zeroed(5000)).unwrap().iter().all(|&byte| byte == 0));
    assert_eq!(*escape, [50; 5000]);
    assert_eq!(escape.handler(), handler);
    drop(next);
    thread::spawn(move || drop(escape)).join().unwrap();
    assert!(all_slots_are_free());
    assert_eq!(metrics().slots, metrics().free);
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
    assert!(matches!(escape.resize(10_001), Err(Error::OutOfMemory { .. })));
    assert_eq!((escape.len(), escape[999], escape[8999]), (9000, 7, 0));
    drop(escape);
    assert_eq!(budget.in_use_bytes(), 0);
    assert!(all_slots_are_free());
}

#[test]
fn a_limit_refuses_and_the_report_says_whose_it_was() {
    let _alone = alone();
    let tenant = Budget::new("tenant", Some(3000));
    let request = request().name("upload").limit_bytes(2000).budget(&tenant).begin().unwrap();
    let kept = request.run(|| Buffer::zeroed(1500)).unwrap();
    assert!(request.run(|| Buffer::zeroed(501)).is_err());
    assert_eq!(tenant.in_use_bytes(), 1500);
    let report = request.end();
    let expected =
        Error::BudgetExceeded { budget: "upload".into(), limit_bytes: 2000, in_use_bytes: 1500, requested_bytes: 501 };
    assert_eq!(report.refusal, Some(expected));
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
    assert!(all_slots_are_free());
}

#[test]
fn a_context_that_outlives_its_request_keeps_the_slot_and_is_served_from_the_shared_pool() {
    let _alone = alone();
    let request = begin();
    let handler = request.handler();
    let mut late = request.run(Context::copy_current);
    let stats = request.end().stats;
    let next = begin();
    assert_ne!(next.handler(), handler, "somebody may still use it");
    let buffer = late.run(|| Buffer::zeroed(1000).unwrap());
    assert_eq!(buffer.handler(), handler);
    assert_eq!(next.stats(), stats, "nobody's numbers: {:?}", next.stats());
    drop((late, next));
    assert!(!all_slots_are_free(), "its block is alive");
    drop(buffer);
    assert!(all_slots_are_free());
}

#[cfg(feature = "tokio")]
#[test]
fn a_task_that_outlives_its_request_never_touches_the_next_one() {
    let _alone = alone();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    runtime.block_on(async {
        let (go_on, wait) = tokio::sync::oneshot::channel::<()>();
        let first = begin();
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
        drop((buffer, next));
    });
    drop(runtime);
    assert!(all_slots_are_free());
}

#[test]
fn requests_past_the_ceiling_are_served_from_the_shared_pool_and_counted() {
    let _alone = alone();
    let before = metrics();
    lease::set_ceiling(before.slots);
    let requests: Vec<_> = (0..before.slots + 5).map(|_| begin()).collect();
    assert_eq!(requests.iter().filter(|request| !request.is_private()).count(), 5);
    let past = requests.last().unwrap();
    assert_eq!(past.handler().name(), "pool");
    let buffer = past.run(|| Buffer::zeroed(100)).unwrap();
    assert_eq!(metrics().overflowed - before.overflowed, 5);
    assert_eq!(metrics().slots, before.slots);
    drop(requests);
    drop(buffer);
    lease::set_ceiling(4096);
    assert!(all_slots_are_free());
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
    assert!(all_slots_are_free());
}

#[test]
fn a_strategy_that_aligns_too_little_is_refused() {
    let _alone = alone();
    #[derive(Debug)]
    struct Unaligned;
    // SAFETY: it hands out nothing.
    unsafe impl Strategy for Unaligned {
        fn alignment(&self) -> usize {
            1
        }
        fn allocate(&self, _size_bytes: usize) -> Option<NonNull<u8>> {
            None
        }
        unsafe fn resize(&self, _block: NonNull<u8>, _new_size_bytes: usize) -> Option<NonNull<u8>> {
            None
        }
        unsafe fn release(&self, _block: NonNull<u8>) {}
    }
    let refused = request().strategy(Unaligned).begin().unwrap_err();
    assert!(matches!(refused, Error::BadAlignment { align: 1, least: 16, .. }), "{refused}");
    assert!(all_slots_are_free());
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
    let held = metrics();
    assert!(held.slots - held.free <= kept.len(), "no slot waits without an escape: {held:?}");
    drop(kept);
    assert_eq!(process.in_use_bytes(), 0);
    assert!(all_slots_are_free(), "{:?}", metrics());
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
    assert!(all_slots_are_free());
    let plain = begin();
    assert!(plain.live_blocks().is_none() && plain.end().escapes.is_none());
}

#[test]
fn nobody_finds_a_slot_by_name_or_in_the_list() {
    let _alone = alone();
    let request = begin();
    let slot = request.handler();
    assert!(handler(slot.name()).is_none());
    assert!(handlers().all(|other| other != slot));
    let said = ctxalloc::handler::unknown("nobody").to_string();
    assert!(said.contains("system, ") && !said.contains(slot.name()), "{said}");
    let taken = register(slot.name(), System).unwrap_err();
    assert_eq!(taken, Error::NameTaken { name: slot.name().into() });
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
    assert!(all_slots_are_free());
}
