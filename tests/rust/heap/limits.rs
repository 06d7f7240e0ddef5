//! Limits of Rust's heap.

use ctxalloc::strategy::Budget;
use ctxalloc::{Buffer, ContextAlloc, Error, Scratch, charge_current, request};
use std::future::Future;
use std::hint::black_box; // the compiler may leave out blocks that nobody looks at
use std::pin::Pin;
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::Duration;

#[test]
fn a_heap_at_its_limit_has_room_to_tell_of_refusals() {
    let tenant = Budget::new("tenant", Some(1000));
    let full = request().root().name("full").limit_bytes(10_000).budget(&tenant).heap_limit_bytes(0).heap_refuses();
    let full = full.begin().unwrap();
    full.run(|| {
        assert!(std::vec::Vec::<u8>::new().try_reserve(10).is_err(), "nothing is left");
        let mut buffer = Buffer::zeroed(10).unwrap();
        assert!(buffer.resize(20_000).is_err());
        assert!(Buffer::zeroed(20_000).is_err());
        assert!(allocator_api2::vec::Vec::<u8, _>::new_in(ContextAlloc::new()).try_reserve(20_000).is_err());
        assert!(Scratch::new().copy_from_slice(&[0; 20_000]).is_err());
        assert!(charge_current(20_000).is_err());
        assert!(tenant.charge(20_000).is_err());
        drop(tenant.charge(10).unwrap());
        ctxalloc::trim();
        let waits = request().root().budget(&tenant).reserve_bytes(5000).timeout(Duration::from_millis(1));
        assert!(waits.admit_blocking().is_err());
    });
}

/// A task of an executor that polls it in its waker.
struct Inline(Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>);

impl Wake for Inline {
    fn wake(self: Arc<Self>) {
        let mut task = self.0.lock().unwrap();
        if let Some(mut future) = task.take()
            && future.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(&self)))).is_pending()
        {
            *task = Some(future);
        }
    }
}

#[test]
fn a_task_that_its_waker_polls_is_charged_its_heap() {
    let budget = Budget::new("tenant", Some(100));
    let held = request().root().budget(&budget).reserve_bytes(100).begin().unwrap();
    let admitting = request().root().budget(&budget).reserve_bytes(10).heap_limit_bytes(1000).admit();
    let (sender, receiver) = channel();
    let task = Inline(Mutex::new(Some(Box::pin(async move {
        let own = admitting.await.unwrap();
        let list = own.run(|| black_box(vec![0_u8; 100_000]));
        let _ = sender.send((own.heap().unwrap().live_bytes, own.heap_exceeded().is_some()));
        drop(list);
    }))));
    Arc::new(task).wake();
    drop(held);
    assert_eq!(receiver.recv_timeout(Duration::from_secs(60)), Ok((100_000, true)));
}

#[test]
fn what_exceeds_a_limit_is_given_and_the_request_is_marked() {
    let own = request().root().name("upload").heap_limit_bytes(100_000).begin().unwrap();
    own.run(|| {
        let _first = vec![0_u8; 90_000];
        assert_eq!(own.heap_exceeded(), None);
        let mut list = vec![0_u8; 9_000];
        list.extend([0; 5_000]); // aborts nobody
        assert_eq!(list.len(), 14_000);
    });
    let Some(Error::BudgetExceeded { budget, limit_bytes: 100_000, .. }) = own.heap_exceeded() else {
        panic!("{own:?}")
    };
    assert_eq!(budget, "upload");
    assert!(matches!(own.end().refusal, Some(Error::BudgetExceeded { .. })));
}

#[test]
fn what_exceeded_a_limit_is_not_part_of_what_was_in_use() {
    let own = request().root().heap_limit_bytes(10_000).begin().unwrap();
    own.run(|| {
        let kept = vec![0_u8; 1_000];
        let _large = vec![0_u8; 20_000];
        drop(kept);
    });
    let Some(Error::BudgetExceeded { in_use_bytes, held_bytes, requested_bytes, .. }) = own.heap_exceeded() else {
        panic!("{own:?}")
    };
    assert_eq!((in_use_bytes, held_bytes, requested_bytes), (1_000, 1_000, 20_000));
}

#[test]
fn each_time_that_a_limit_is_exceeded_counts() {
    let own = request().root().heap_limit_bytes(1000).begin().unwrap();
    own.run(|| {
        drop(black_box(vec![0_u8; 1500]));
        (0..10).for_each(|_| drop(black_box(vec![0_u8; 1400])));
        drop(black_box(vec![0_u8; 900]));
    });
    let heap = own.heap().unwrap();
    assert_eq!((heap.live_bytes, heap.peak_bytes, heap.exceeded), (0, 1500, 11));
    assert!(matches!(own.heap_exceeded(), Some(Error::BudgetExceeded { requested_bytes: 1400, .. })));
    assert_eq!(own.stats().refused, 1, "one refusal, however often, where it only marks");
    let report = own.end();
    assert_eq!((report.stats.refused, report.heap.unwrap().refused), (1, 0));
}

#[test]
fn what_is_freed_past_a_limit_is_no_room_below_it() {
    let own = request().root().heap_limit_bytes(1000).begin().unwrap();
    own.run(|| {
        let kept = black_box(vec![0_u8; 1000]);
        let (first, second) = black_box((vec![0_u8; 2000], vec![0_u8; 300]));
        drop((first, second));
        assert_eq!(own.heap().unwrap().exceeded, 2);
        drop(black_box(vec![0_u8; 1]));
        let (first, second) = black_box((vec![0_u8; 2000], vec![0_u8; 300]));
        drop((first, second));
        drop(black_box(vec![0_u8; 1]));
        drop(kept);
    });
    assert_eq!(own.heap().unwrap().exceeded, 6);
}

#[test]
fn large_blocks_of_threads_at_once_do_not_pass_a_limit_together() {
    for _ in 0..if cfg!(miri) { 2 } else { 200 } {
        let own = request().root().heap_limit_bytes(11 << 20).heap_refuses().begin().unwrap();
        let barrier = Barrier::new(4);
        let (own, barrier) = (&own, &barrier);
        let had: usize = thread::scope(|threads| {
            let working = |_| {
                let work = move || {
                    let mut bytes = Vec::<u8>::new();
                    barrier.wait();
                    let has = black_box(&mut bytes).try_reserve_exact(10 << 20).is_ok();
                    barrier.wait();
                    assert_eq!(own.heap().unwrap().live_bytes, 10 << 20, "each thread sees it");
                    barrier.wait();
                    usize::from(has)
                };
                threads.spawn(move || own.run(work))
            };
            let threads: Vec<_> = (0..4).map(working).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(had, 1);
        let heap = own.heap().unwrap();
        assert_eq!((heap.live_bytes, heap.peak_bytes, heap.exceeded), (0, 10 << 20, 3));
    }
}

#[test]
fn a_large_block_after_small_ones_were_freed_is_seen_at_once() {
    let own = request().root().begin().unwrap();
    own.run(|| {
        let small: Vec<_> = (0..60).map(|_| black_box(Box::new([0_u8; 1000]))).collect();
        assert!(own.heap().unwrap().live_bytes > 60_000); // and adds what this thread has counted
        let one = black_box(Box::new(0_u8));
        small.into_iter().for_each(drop);
        let large = black_box(vec![0_u8; 100_000]);
        let seen = thread::scope(|threads| threads.spawn(|| own.heap().unwrap().live_bytes).join().unwrap());
        // Beside it: what starting the thread takes, and the other one frees.
        assert!((95_000..105_000).contains(&seen), "{seen}");
        drop((one, large));
    });
}

#[test]
fn what_a_thread_frees_is_room_for_others_while_it_goes_on() {
    let own = request().root().heap_limit_bytes(11 << 20).heap_refuses().begin().unwrap();
    for size in [1000, 10 << 20] {
        let freed = Barrier::new(2);
        thread::scope(|threads| {
            threads.spawn(|| {
                own.run(|| {
                    let all: Vec<_> = (0..(10 << 20) / size).map(|_| vec![0_u8; size]).collect();
                    drop(all);
                    freed.wait();
                    freed.wait(); // still in the request
                });
            });
            freed.wait();
            let other = own.run(|| black_box(&mut Vec::<u8>::new()).try_reserve_exact(10 << 20));
            freed.wait();
            other.unwrap();
        });
    }
    assert_eq!(own.heap().unwrap().live_bytes, 0);
}

#[test]
fn a_panic_at_a_limit_that_refuses_unwinds() {
    let own = request().root().heap_limit_bytes(1000).heap_refuses().begin().unwrap();
    own.run(|| {
        let all = black_box(vec![0_u8; 1000]);
        let caught = std::panic::catch_unwind(|| panic!("at the limit: {}", black_box(1000))).unwrap_err();
        assert_eq!(caught.downcast_ref::<String>().unwrap(), "at the limit: 1000");
        assert!(black_box(Vec::<u8>::new()).try_reserve_exact(1).is_err(), "and then it refuses again");
        drop(black_box(all));
    });
}

#[test]
fn a_limit_that_refuses_is_an_error_of_try_reserve() {
    let own = request().root().heap_limit_bytes(100_000).heap_refuses().begin().unwrap();
    own.run(|| {
        let mut bytes: Vec<u8> = Vec::new();
        assert!(bytes.try_reserve_exact(100_001).is_err());
        bytes.try_reserve_exact(60_000).unwrap();
        bytes.resize(60_000, 7);
        assert!(bytes.try_reserve_exact(50_000).is_err(), "a resize is refused too");
        assert!(bytes.iter().all(|byte| *byte == 7));
        bytes.try_reserve_exact(40_000).unwrap(); // exactly what there is
        assert!(Vec::<u8>::new().try_reserve_exact(1).is_err());
        drop(bytes);
        Vec::<u8>::new().try_reserve_exact(100_000).unwrap();
    });
    let heap = own.heap().unwrap();
    assert_eq!((heap.live_bytes, heap.peak_bytes, heap.exceeded), (0, 100_000, 3));
}

#[test]
fn a_block_that_grows_elsewhere_is_limited_by_its_own_request() {
    let own = request().root().heap_limit_bytes(100_000).heap_refuses().begin().unwrap();
    let mut bytes = own.run(|| vec![7_u8; 60_000]);
    let other = request().root().begin().unwrap();
    assert!(bytes.try_reserve_exact(50_000).is_err(), "nothing is selected here");
    assert!(other.run(|| bytes.try_reserve_exact(50_000)).is_err());
    other.run(|| bytes.try_reserve_exact(40_000)).unwrap(); // exactly what there is
    let heap = own.heap().unwrap();
    assert_eq!((heap.live_bytes, heap.exceeded), (100_000, 2));
    assert_eq!(other.heap().unwrap().total_blocks, 0);
}

#[test]
fn threads_at_once_pass_a_limit_by_a_quantum_each_at_most() {
    const LIMIT: usize = 1 << 20;
    const THREADS: usize = 4;
    let own = request().root().heap_limit_bytes(LIMIT).heap_refuses().begin().unwrap();
    let barrier = Barrier::new(THREADS);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let mut kept: Vec<Vec<u8>> = Vec::with_capacity(10_000);
                own.run(|| {
                    kept.push(vec![0; 1000]);
                    barrier.wait(); // each has looked how much room there is
                    for _ in 0..if cfg!(miri) { 100 } else { 2000 } {
                        let mut block = Vec::new();
                        if block.try_reserve_exact(1000).is_ok() {
                            kept.push(block);
                        }
                    }
                });
                barrier.wait(); // all are live
            });
        }
    });
    let heap = own.heap().unwrap();
    assert_eq!(heap.live_bytes, 0);
    assert!(heap.total_bytes as usize <= LIMIT + THREADS * (64 << 10), "{heap:?}");
    assert!(cfg!(miri) || heap.total_bytes as usize > LIMIT - THREADS * (64 << 10), "{heap:?}");
}

#[test]
fn what_the_limit_of_the_heap_refuses_is_among_the_refused() {
    let own = request().root().heap_limit_bytes(1000).heap_refuses().begin().unwrap();
    own.run(|| (0..3).for_each(|_| assert!(black_box(Vec::<u8>::new()).try_reserve_exact(2000).is_err())));
    assert_eq!(own.stats().refused, 3);
    assert_eq!(own.handle().stats().refused, 3);
    let handle = own.handle();
    let report = own.end();
    assert_eq!((report.stats.refused, report.heap.unwrap().refused), (3, 3));
    assert_eq!(handle.stats().refused, 3, "once, also after the end");
}

#[test]
fn what_the_limit_of_the_heap_refuses_is_among_the_metrics() {
    let own = request().root().name("refused by its heap").heap_limit_bytes(1000).heap_refuses().begin().unwrap();
    own.run(|| assert!(black_box(Vec::<u8>::new()).try_reserve_exact(2000).is_err()));
    drop(own);
    let all = ctxalloc::metrics::snapshot().unwrap().series;
    let series = all.iter().find(|series| series.name == "refused by its heap").unwrap();
    assert_eq!((series.refused_requests, series.refused_allocations), (1, 1));
}

#[cfg(feature = "tracing")]
mod events {
    use super::*;
    use crate::hearing::hearing;
    use std::fmt::{Debug, Write};
    use std::sync::{Arc, Mutex};
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Level, Metadata, Subscriber};

    /// Hears of warnings, and allocates under its lock, as one does that writes lines.
    #[derive(Clone, Default)]
    struct Heard(Arc<Mutex<Vec<String>>>);

    struct Line(String);

    impl Visit for Line {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            write!(self.0, "{field}={value:?} ").unwrap();
        }
    }

    impl Subscriber for Heard {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            *metadata.level() <= Level::WARN
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &Event<'_>) {
            let mut lines = self.0.lock().unwrap();
            let mut line = Line(String::new());
            event.record(&mut line);
            lines.push(line.0);
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    fn lines_of(work: impl FnOnce()) -> Vec<String> {
        let heard = Heard::default();
        hearing(heard.clone(), work);
        heard.0.lock().unwrap().clone()
    }

    #[test]
    fn what_the_limit_of_the_heap_refused_is_one_event_at_the_end() {
        let lines = lines_of(|| {
            let own = request().root().name("upload").heap_limit_bytes(1000).heap_refuses().begin().unwrap();
            own.run(|| (0..5).for_each(|_| assert!(black_box(Vec::<u8>::new()).try_reserve_exact(2000).is_err())));
        });
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("budget 'upload' has no room for 2000 more bytes"), "{lines:?}");
        assert!(lines[0].contains("exceeded=5 refused=5"), "{lines:?}");
    }

    #[test]
    fn that_the_limit_of_the_heap_was_exceeded_is_one_event_at_the_end() {
        let lines = lines_of(|| {
            let own = request().root().heap_limit_bytes(1000).begin().unwrap();
            own.run(|| (0..5).for_each(|_| drop(black_box(vec![0_u8; 2000]))));
            own.end();
            let own = request().root().heap_limit_bytes(1000).begin().unwrap();
            own.run(|| drop(black_box(vec![0_u8; 100])));
        });
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("exceeded=5 refused=0"), "{lines:?}");
    }
}
