//! Requests: nothing that an ended one left behind touches another one, limits never switch off, and nothing
//! is kept of what nothing can reach. In a process of its own, one test at a time: the numbers are the process's.
#![allow(unsafe_code, reason = "the tests write a strategy")]
#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]

#[path = "requests/after_end.rs"]
mod after_end;
#[path = "requests/limits.rs"]
mod limits;
mod support;

use ctxalloc::metrics::request_counts;
use ctxalloc::strategy::{Arena, Budget, Pool, Strategy, System, Tracked};
use ctxalloc::{Buffer, Error, Request, current, current_request, enter, handler, handlers, request, set, thread};
use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use support::Refusing;

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn begin() -> Request {
    request().begin().unwrap()
}

/// But for what a test forgot on purpose. A thread of the test before may still be about to end, and let go of its own.
fn none_is_present() -> bool {
    let began = std::time::Instant::now();
    while request_counts().present != KEPT.load(std::sync::atomic::Ordering::Relaxed) {
        if began.elapsed() > std::time::Duration::from_secs(10) {
            return false;
        }
        std::thread::yield_now();
    }
    true
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
    let Error::BadOption { option, value, .. } = &refused else { panic!("{refused}") };
    assert_eq!((*option, value.as_str()), ("strategy.alignment()", "1"), "{refused}");
    assert!(refused.to_string().contains("16 bytes or more"), "{refused}");
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
fn a_selection_that_is_left_by_a_thread_that_ends_is_let_go() {
    let _alone = alone();
    let first = begin();
    let handler = first.handler();
    std::thread::spawn(move || drop(set(handler))).join().unwrap();
    first.end();
    assert!(none_is_present());
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
