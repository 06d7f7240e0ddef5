//! Random programs over threads and tasks against a naive count per request.

use crate::upstream::{ENTERED_TWICE, forwarding, growth, refusing};
use ctxalloc::request::HeapStats;
use ctxalloc::{Context, Request, RequestHandle, WithHandler, request};
use std::future::poll_fn;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::task::Poll;
use std::thread;

/// A small random generator: SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % end as u64) as usize
    }

    fn size(&mut self) -> usize {
        match self.below(10) {
            0 => 1 + self.below(300_000),
            _ => 1 + self.below(2000),
        }
    }
}

/// A block of Rust's heap and who made it.
struct Block {
    bytes: Vec<u8>,
    maker: Option<usize>,
}

/// The naive count of one request.
#[derive(Clone, Copy, Default)]
struct Count {
    live_bytes: usize,
    live_blocks: usize,
    peak_bytes: usize,
    total_bytes: u64,
    total_blocks: u64,
}

impl Count {
    fn grow(&mut self, bytes: usize, blocks: usize) {
        self.live_bytes += bytes;
        self.live_blocks += blocks;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
        self.total_bytes += bytes as u64;
        self.total_blocks += blocks as u64;
    }

    fn check(&self, heap: HeapStats, with_peak: bool, what: &str) {
        let seen = (heap.live_bytes, heap.live_blocks, heap.total_bytes, heap.total_blocks);
        assert_eq!(seen, (self.live_bytes, self.live_blocks, self.total_bytes, self.total_blocks), "{what}");
        if with_peak {
            assert_eq!(heap.peak_bytes, self.peak_bytes, "{what}");
        }
    }
}

/// Runs `work` with nothing or one of the requests selected.
fn under<R>(requests: &[RequestHandle], which: Option<usize>, work: impl FnOnce() -> R) -> R {
    match which {
        Some(which) => ctxalloc::scope(requests[which].handler(), work),
        None => Context::new().run(work),
    }
}

/// One random step on these blocks.
fn step(random: &mut Random, requests: &[RequestHandle], blocks: &mut Vec<Block>, counts: &mut [Count]) {
    let which = random.below(requests.len() + 1);
    let which = (which < requests.len()).then_some(which);
    match random.below(4) {
        0 | 1 => {
            let size = random.size();
            let bytes = under(requests, which, || Vec::with_capacity(size));
            if let Some(which) = which {
                counts[which].grow(size, 1);
            }
            blocks.push(Block { bytes, maker: which });
        }
        2 if !blocks.is_empty() => {
            // Resized under whatever is selected: it stays its maker's.
            let at = random.below(blocks.len());
            let Block { bytes, maker } = &mut blocks[at];
            let (before, size) = (bytes.capacity(), random.size());
            under(requests, which, || if size > before { bytes.reserve_exact(size) } else { bytes.shrink_to(size) });
            if let Some(maker) = *maker {
                match size.checked_sub(before) {
                    Some(growth) => counts[maker].grow(growth, 0),
                    None => counts[maker].live_bytes -= before - size,
                }
            }
        }
        _ if !blocks.is_empty() => {
            let at = random.below(blocks.len());
            let Block { bytes, maker } = blocks.swap_remove(at);
            if let Some(maker) = maker {
                counts[maker].live_bytes -= bytes.capacity();
                counts[maker].live_blocks -= 1;
            }
            under(requests, which, || drop(bytes));
        }
        _ => {}
    }
}

fn begun(count: usize) -> Vec<Request> {
    (0..count).map(|_| request().root().begin().unwrap()).collect()
}

#[test]
fn random_programs_on_one_thread_have_the_naive_counts() {
    for seed in 0..if cfg!(miri) { 2 } else { 200 } {
        let mut random = Random(seed);
        let requests = begun(3);
        let handles: Vec<_> = requests.iter().map(Request::handle).collect();
        let (mut blocks, mut counts) = (Vec::with_capacity(1000), [Count::default(); 3]);
        for _ in 0..200 {
            step(&mut random, &handles, &mut blocks, &mut counts);
            for (count, request) in counts.iter().zip(&requests) {
                count.check(request.heap().unwrap(), true, &format!("seed {seed}"));
            }
        }
        drop(requests);
        // After the end they are credited too.
        while let Some(Block { bytes, maker }) = blocks.pop() {
            if let Some(maker) = maker {
                counts[maker].live_bytes -= bytes.capacity();
                counts[maker].live_blocks -= 1;
            }
        }
        for (count, handle) in counts.iter().zip(&handles) {
            assert_eq!((count.live_bytes, count.live_blocks), (0, 0));
            count.check(handle.heap().unwrap(), true, &format!("seed {seed}, after the end"));
        }
    }
}

#[test]
fn random_programs_on_threads_have_the_naive_counts() {
    for seed in 0..if cfg!(miri) { 1 } else { 30 } {
        let requests = begun(3);
        let handles: Vec<_> = requests.iter().map(Request::handle).collect();
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..4).map(|_| channel::<Block>()).unzip();
        let threads: Vec<_> = receivers
            .into_iter()
            .enumerate()
            .map(|(number, receiver)| {
                let (handles, senders) = (handles.clone(), senders.clone());
                thread::spawn(move || {
                    let mut random = Random(seed << 8 | number as u64);
                    // Counts are relative: what one thread frees may be another's. They wrap, and the sum is right.
                    let (mut blocks, mut counts) = (Vec::with_capacity(10_000), [Relative::default(); 3]);
                    for _ in 0..if cfg!(miri) { 50 } else { 2000 } {
                        let mut own = [Count { live_bytes: 1 << 40, live_blocks: 1 << 40, ..Count::default() }; 3];
                        step(&mut random, &handles, &mut blocks, &mut own);
                        for (count, own) in counts.iter_mut().zip(own) {
                            count.add(own);
                        }
                        if random.below(4) == 0 && !blocks.is_empty() {
                            let block = blocks.swap_remove(random.below(blocks.len()));
                            let _ = senders[random.below(4)].send(block);
                        }
                        blocks.extend(receiver.try_iter().take(3));
                    }
                    drop(senders);
                    blocks.extend(receiver);
                    (blocks, counts)
                })
            })
            .collect();
        drop(senders);
        let mut counts = [Relative::default(); 3];
        let mut kept = Vec::new();
        for thread in threads {
            let (blocks, own) = thread.join().unwrap();
            kept.push(blocks);
            for (count, own) in counts.iter_mut().zip(own) {
                count.merge(own);
            }
        }
        for (count, handle) in counts.iter().zip(&handles) {
            let heap = handle.heap().unwrap();
            let seen =
                [heap.live_bytes as i64, heap.live_blocks as i64, heap.total_bytes as i64, heap.total_blocks as i64];
            assert_eq!(seen, count.0, "seed {seed}");
        }
        drop(kept);
        assert!(handles.iter().all(|handle| handle.heap().unwrap().live_blocks == 0));
    }
}

/// Changes of live bytes, live blocks, total bytes, total blocks.
#[derive(Clone, Copy, Default)]
struct Relative([i64; 4]);

impl Relative {
    fn add(&mut self, step: Count) {
        let changes = [
            step.live_bytes as i64 - (1 << 40),
            step.live_blocks as i64 - (1 << 40),
            step.total_bytes as i64,
            step.total_blocks as i64,
        ];
        self.merge(Self(changes));
    }

    fn merge(&mut self, other: Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, change)| *sum += change);
    }
}

/// Lets other tasks run, without an allocation of the runtime's in the request.
async fn turn() {
    let mut is_first = true;
    poll_fn(|cx| {
        if std::mem::take(&mut is_first) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(())
    })
    .await;
}

#[test]
#[cfg_attr(miri, ignore = "a runtime of several threads")]
fn tasks_that_wander_between_threads_have_the_naive_counts() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).build().unwrap();
    runtime.block_on(async {
        for seed in 0..20 {
            let requests = begun(20);
            let tasks: Vec<_> = requests
                .iter()
                .enumerate()
                .map(|(number, request)| {
                    let work = async move {
                        let mut random = Random(seed << 8 | number as u64);
                        let mut count = Count::default();
                        let mut blocks: Vec<Vec<u8>> = Vec::with_capacity(200);
                        count.grow(200 * size_of::<Vec<u8>>(), 1);
                        for _ in 0..200 {
                            if random.below(3) > 0 {
                                let size = random.size();
                                blocks.push(Vec::with_capacity(size));
                                count.grow(size, 1);
                            } else if let Some(gone) = blocks.pop() {
                                count.live_bytes -= gone.capacity();
                                count.live_blocks -= 1;
                            }
                            if random.below(4) == 0 {
                                turn().await;
                            }
                        }
                        (blocks, count)
                    };
                    tokio::spawn(work.with_handler(request.handler()))
                })
                .collect();
            for (task, request) in tasks.into_iter().zip(&requests) {
                let (blocks, count) = task.await.unwrap();
                count.check(request.heap().unwrap(), true, &format!("seed {seed}"));
                drop(blocks);
                assert_eq!(request.heap().unwrap().live_bytes, 0);
            }
        }
    });
}

#[test]
fn an_upstream_that_calls_back_is_never_entered_twice() {
    let own = request().root().begin().unwrap();
    let threads: Vec<_> = (0..3)
        .map(|number| {
            let mut context = Context::with_handler(own.handler());
            thread::spawn(move || {
                forwarding(|| {
                    context.run(|| {
                        let mut random = Random(number);
                        let mut kept: Vec<Vec<u8>> = Vec::with_capacity(200);
                        for _ in 0..if cfg!(miri) { 50 } else { 3000 } {
                            let size = random.size();
                            match random.below(3) {
                                0 if kept.len() < 200 => kept.push(vec![7; size]),
                                1 if !kept.is_empty() => {
                                    let at = random.below(kept.len());
                                    kept[at].reserve(size);
                                    kept[at].push(7);
                                }
                                _ => drop(kept.pop()),
                            }
                        }
                        assert!(kept.iter().flatten().all(|byte| *byte == 7));
                    });
                });
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(ENTERED_TWICE.load(Ordering::Relaxed), 0);
    assert_eq!(own.heap().unwrap().live_blocks, 0);
}

#[test]
fn what_upstream_refuses_changes_no_number() {
    let own = request().root().begin().unwrap();
    own.run(|| {
        let mut bytes: Vec<u8> = vec![7; 100];
        let before = own.heap().unwrap();
        let mut other = Vec::<u8>::new();
        let refused = refusing(|| (bytes.try_reserve_exact(1000).is_err(), other.try_reserve_exact(1 << 40).is_err()));
        assert_eq!(refused, (true, true));
        assert_eq!((own.heap().unwrap(), &bytes[..]), (before, &[7; 100][..]));
        let _more = Vec::<u8>::with_capacity(10);
        assert_eq!(own.heap().unwrap().peak_bytes, 110, "nor later");
    });
    // Nor where the request is not selected.
    let mut bytes: Vec<u8> = own.run(|| vec![7; 100]);
    assert!(refusing(|| bytes.try_reserve_exact(1 << 40).is_err()));
    assert!(bytes.try_reserve_exact(1 << 60).is_err());
    assert_eq!(own.heap().unwrap().peak_bytes, 110);
    bytes.reserve_exact(900);
    assert_eq!(own.heap().unwrap().peak_bytes, 1000, "what is really there counts");
}

#[test]
fn a_resize_there_and_back_is_nobody_elses() {
    let requests = begun(2);
    let mut bytes: Vec<u8> = requests[0].run(|| Vec::with_capacity(100));
    requests[0].run(|| {
        bytes.reserve_exact(5000);
        bytes.shrink_to(100);
    });
    requests[1].run(|| drop(Vec::<u8>::with_capacity(10)));
    let [first, second] = [&requests[0], &requests[1]].map(|request| request.heap().unwrap());
    assert_eq!((first.peak_bytes, first.total_bytes, first.live_bytes), (5000, 5000, 100));
    assert_eq!((second.peak_bytes, second.total_bytes, second.total_blocks), (10, 10, 1));
}

#[test]
fn what_strategies_keep_books_with_is_no_requests() {
    let tracked = ctxalloc::strategy::Tracked::new(ctxalloc::strategy::Pool::new()).unwrap();
    let own = request().root().strategy(tracked).begin().unwrap();
    own.run(|| {
        let kept: Vec<_> = (0..100).map(|size| ctxalloc::Buffer::zeroed(1 + size * 1000).unwrap()).collect();
        let heap = own.heap().unwrap();
        assert_eq!(
            (heap.live_blocks, heap.live_bytes),
            (1, 100 * size_of::<ctxalloc::Buffer>()),
            "the list of buffers"
        );
        drop(kept);
    });
    assert_eq!(own.heap().unwrap().live_blocks, 0);
}

#[test]
fn what_requests_are_kept_in_is_no_requests() {
    let own = request().root().begin().unwrap();
    own.run(|| {
        let inside: Vec<Request> = (0..3000).map(|_| request().begin().unwrap()).collect();
        let heap = own.heap().unwrap();
        assert_eq!(heap.live_blocks, 1, "the list of requests: {heap:?}");
        drop(inside);
    });
    assert_eq!(own.heap().unwrap().live_blocks, 0);
}

#[test]
fn what_an_upstream_frees_in_the_middle_goes_back_to_it() {
    let growth = growth(|| {
        for _ in 0..if cfg!(miri) { 3 } else { 300 } {
            // More than it keeps to free in the middle.
            forwarding(|| (0..200).for_each(|size| drop(vec![7_u8; 1 + size])));
        }
    });
    assert!(growth < 50_000, "{growth} bytes were not given back");
}
