//! The ends of threads, requests and processes.

use crate::upstream;
use ctxalloc::metrics::request_counts;
use ctxalloc::{request, thread as scoped};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

#[test]
fn a_threads_last_destructors_allocate_and_free() {
    struct Last(Vec<u8>);
    impl Drop for Last {
        fn drop(&mut self) {
            drop(vec![0_u8; 5000]); // of nobody, or of the request: the selection goes at the thread's end as well
            self.0.extend([0; 1000]);
        }
    }
    thread_local! {
        static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
    }
    let own = request().root().begin().unwrap();
    let to_the_end = request().root().begin().unwrap();
    let handle = to_the_end.handle();
    for number in 0..30 {
        let thread = match number % 3 {
            0 => own.run(|| scoped::spawn(|| LAST.set(Some(Last(vec![0; 100]))))),
            // Selected to the end of the thread, before this destructor or after it.
            first => {
                let handle = handle.clone();
                thread::spawn(move || {
                    if first == 1 {
                        LAST.set(None);
                    }
                    drop(ctxalloc::set(handle.handler()));
                    drop(handle);
                    LAST.set(Some(Last(vec![0; 100])));
                })
            }
        };
        thread.join().unwrap();
    }
    for (request, threads) in [(own, 10), (to_the_end, 20)] {
        let heap = request.heap().unwrap();
        assert_eq!((heap.live_bytes, heap.live_blocks), (0, 0), "{heap:?}");
        assert!(heap.total_blocks >= threads, "what a thread made is added at its end: {heap:?}");
    }
}

#[cfg(all(unix, not(miri)))]
#[test]
fn escapes_of_the_heap_keep_no_request_and_no_record() {
    crate::child::fate_of("process::child_whose_escapes_keep_nothing").ended_well();
}

/// In a process of its own: other tests would take the records that it gives back, and it new ones.
#[test]
#[cfg_attr(not(miri), ignore = "a child of escapes_of_the_heap_keep_no_request_and_no_record")]
fn child_whose_escapes_keep_nothing() {
    let growth = upstream::growth(|| {
        let mut kept = VecDeque::new();
        for number in 0..if cfg!(miri) { 100 } else { 20_000_usize } {
            let own = request().root().begin().unwrap();
            kept.push_back(own.run(|| vec![1_u8; 100 + number % 50]));
            assert_eq!(own.end().heap.unwrap().live_blocks, 1);
            if kept.len() > 50 {
                drop(kept.pop_front());
            }
        }
        for _ in 0..if cfg!(miri) { 100 } else { 20_000 } {
            let own = request().root().begin().unwrap();
            own.run(|| drop(vec![1_u8; 10]));
            assert_eq!(own.end().heap.unwrap().live_blocks, 0);
        }
    });
    assert!(request_counts().present < 100, "the words before the blocks do not hold their requests");
    assert!(growth < 400_000, "{growth} bytes stay of requests and blocks that are gone");
    let own = request().root().begin().unwrap();
    assert_eq!(own.heap().unwrap(), ctxalloc::request::HeapStats::default(), "a record begins anew");
}

#[test]
fn what_a_request_left_is_no_later_requests() {
    let left: Vec<_> = (0..50).map(|_| request().root().begin().unwrap().run(|| vec![1_u8; 100])).collect();
    let later: Vec<_> = (0..100).map(|_| request().root().begin().unwrap()).collect();
    for own in &later {
        assert_eq!(own.heap().unwrap(), ctxalloc::request::HeapStats::default());
    }
    let kept: Vec<_> = later.iter().map(|own| own.run(|| vec![1_u8; 200])).collect();
    drop(left);
    for own in &later {
        let heap = own.heap().unwrap();
        assert_eq!((heap.live_bytes, heap.live_blocks, heap.peak_bytes, heap.exceeded), (200, 1, 200, 0));
        assert_eq!((heap.total_bytes, heap.total_blocks), (200, 1));
    }
    drop(kept);
}

/// Ends the threads that look at it, also when a test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri does not fork")]
fn a_child_of_fork_counts_on() {
    let own = request().root().begin().unwrap();
    let other = thread::spawn({
        let handle = own.handle();
        move || ctxalloc::scope(handle.handler(), || (0..50_000).for_each(|size| drop(vec![0_u8; 1 + size % 3000])))
    });
    // Often a fork falls between the lock and the release of what each request takes.
    let forks_on = AtomicBool::new(true);
    let forking = || {
        // SAFETY: the child allocates, which works after fork, and ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: a timer of the child, whose signal ends it if it hangs.
            unsafe { libc::alarm(20) };
            let child = request().root().begin().unwrap();
            let kept = child.run(|| vec![1_u8; 1000]);
            let right = child.heap().unwrap().live_bytes == 1000;
            drop(kept);
            let right = right && child.end().heap.unwrap().live_bytes == 0;
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!right)) };
        }
        let mut status = -1;
        // SAFETY: our child, and a place for its status.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(status, 0, "a child hung, crashed or counted wrong");
    };
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while forks_on.load(Ordering::Relaxed) {
                    drop(request().root().begin().unwrap());
                }
            });
        }
        let _stop = Stop(&forks_on);
        (0..200).for_each(|_| forking());
    });
    other.join().unwrap();
    assert_eq!(own.heap().unwrap().live_blocks, 0);
}
