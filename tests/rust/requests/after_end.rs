//! What is left of a request that has ended: blocks that escaped, work that goes on, contexts and handles.

use super::{KEPT, alone, begin, none_is_present};
use ctxalloc::metrics::request_counts;
use ctxalloc::strategy::{Budget, System, Tracked};
#[cfg(feature = "tokio")]
use ctxalloc::task;
use ctxalloc::{Buffer, Context, Error, current, current_request, enter, request, set, thread};

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
