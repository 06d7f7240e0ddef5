//! Threads that charge the same accounts at once: no limit is passed, and wherever they stand still the sums are right.
//! No model says what each is to have; the sums do.

use crate::random::{Random, times};
use ctxalloc::strategy::Budget;
use ctxalloc::{Buffer, Context, Request, request};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::thread;

#[test]
fn threads_at_once_never_pass_a_limit_and_the_sums_are_right_afterwards() {
    for seed in 0..if cfg!(miri) { 1 } else { 5 * times() as u64 } {
        let process = Budget::new("process", Some(400_000));
        let tenants = [process.child("red", Some(250_000)), process.child("blue", None)];
        let outer = request().limit_bytes(300_000).budget(&tenants[0]).begin().unwrap();
        let barrier = Arc::new(Barrier::new(4));
        let threads: Vec<_> = (0..4)
            .map(|number| {
                let (process, tenant, barrier) = (process.clone(), tenants[number % 2].clone(), Arc::clone(&barrier));
                let mut context = Context::with_handler(outer.handler());
                thread::spawn(move || {
                    let mut random = Random::new(seed << 8 | number as u64);
                    let own = context.run(|| request().budget(&tenant).begin()).unwrap();
                    let mut own_context = Context::with_handler(own.handler());
                    let (mut shared, mut private) = (Vec::new(), Vec::new());
                    barrier.wait();
                    for _ in 0..if cfg!(miri) { 30 } else { 5000 } {
                        let size = 1 + random.below(20_000);
                        match random.below(5) {
                            0 | 1 => shared.extend(context.run(|| Buffer::zeroed(size))),
                            2 => private.extend(own_context.run(|| Buffer::zeroed(size))),
                            3 => drop((!shared.is_empty()).then(|| shared.swap_remove(random.below(shared.len())))),
                            _ => drop(private.pop()),
                        }
                        assert!(process.in_use_bytes() <= 400_000);
                        if random.one_in(50) {
                            let _ = own.stats();
                        }
                    }
                    let bytes: usize = private.iter().map(|buffer| buffer.len()).sum();
                    assert_eq!(own.stats().live_bytes, bytes);
                    (shared, private)
                })
            })
            .collect();
        let kept: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let all: usize = kept.iter().flat_map(|(shared, private)| shared.iter().chain(private)).map(|b| b.len()).sum();
        let red: usize = kept.iter().flat_map(|(shared, _)| shared).map(|buffer| buffer.len()).sum::<usize>()
            + kept.iter().flat_map(|(_, private)| private).map(|buffer| buffer.len()).sum::<usize>();
        let blue: usize =
            [1, 3].iter().flat_map(|&number: &usize| &kept[number].1).map(|buffer: &Buffer| buffer.len()).sum();
        assert_eq!((outer.stats().live_bytes, process.in_use_bytes()), (all, all));
        // Everything is inside of the outer request, whose budget is red's.
        assert_eq!((tenants[0].in_use_bytes(), tenants[1].in_use_bytes()), (red, blue));
        assert!(outer.stats().peak_bytes <= 300_000 && tenants[0].peak_bytes() <= 250_000);
        drop(kept);
        assert_eq!((outer.stats().live_bytes, outer.stats().live_blocks), (0, 0));
        assert_eq!((process.in_use_bytes(), tenants[1].in_use_bytes()), (0, 0));
    }
}

/// What the threads of the next test share.
struct Shared {
    process: Budget,
    tenants: [Budget; 2],
    request: Request,
    barrier: Barrier,
    /// What each thread holds: by its own request, and by the one that all use.
    held: [[AtomicUsize; 2]; 4],
    made: AtomicUsize,
    is_over: AtomicBool,
}

impl Shared {
    fn new() -> Self {
        let process = Budget::new("process", Some(1 << 20));
        let tenants = [process.child("red", None), process.child("blue", Some(1 << 19))];
        let request = request().root().budget(&tenants[0]).limit_bytes(1 << 18).begin().unwrap();
        let (barrier, held) = (Barrier::new(4), Default::default());
        Self { process, tenants, request, barrier, held, made: AtomicUsize::new(0), is_over: AtomicBool::new(false) }
    }

    fn sum(&self, of: impl Fn(usize, &[AtomicUsize; 2]) -> usize) -> usize {
        self.held.iter().enumerate().map(|(number, held)| of(number, held)).sum()
    }

    /// While all threads stand still: every account says what they hold.
    fn check(&self) {
        let load = |number: &AtomicUsize| number.load(Relaxed);
        let by_all = self.sum(|_, held| load(&held[1]));
        let of_tenant = |tenant| self.sum(|number, held| if number % 2 == tenant { load(&held[0]) } else { 0 });
        assert_eq!(self.tenants[0].in_use_bytes(), by_all + of_tenant(0));
        assert_eq!(self.tenants[1].in_use_bytes(), of_tenant(1));
        assert_eq!(self.process.in_use_bytes(), by_all + of_tenant(0) + of_tenant(1));
        let stats = self.request.stats();
        assert_eq!((stats.live_bytes, stats.total_blocks), (by_all, load(&self.made) as u64));
    }

    fn run(&self, number: usize, seed: u64) {
        let mut random = Random::new(seed << 8 | number as u64);
        let own = request().root().budget(&self.tenants[number % 2]).begin().unwrap();
        let mut contexts = [own.handler(), self.request.handler()].map(Context::with_handler);
        let mut blocks: [Vec<Buffer>; 2] = Default::default();
        for round in 0..if cfg!(miri) { 2 } else { 30 } {
            // What is kept between rounds differs, so some rounds are below the peaks and some beyond.
            let kept = random.below(120);
            let mut turn = || {
                for _ in 0..if cfg!(miri) { 20 } else { 400 } {
                    let which = random.below(2);
                    let (context, blocks) = (&mut contexts[which], &mut blocks[which]);
                    if blocks.len() > kept || (!blocks.is_empty() && random.one_in(3)) {
                        let block = blocks.swap_remove(random.below(blocks.len()));
                        self.held[number][which].fetch_sub(block.len(), Relaxed);
                    } else if let Ok(block) = context.run(|| Buffer::zeroed(1 + random.below(400))) {
                        self.held[number][which].fetch_add(block.len(), Relaxed);
                        self.made.fetch_add(which, Relaxed);
                        blocks.push(block);
                    }
                }
            };
            if seed.is_multiple_of(2) {
                turn();
            } else {
                // By a thread that ends with it: the next one inherits what it had.
                thread::scope(|scope| scope.spawn(turn).join().unwrap());
            }
            if round % 3 == 0 {
                // Of its own request nobody else changes anything.
                let live: usize = blocks[0].iter().map(|block| block.len()).sum();
                assert_eq!((own.stats().live_bytes, own.stats().live_blocks), (live, blocks[0].len()));
            }
            self.barrier.wait();
            if number == 0 {
                self.check();
            }
            self.barrier.wait();
        }
        blocks.into_iter().flatten().for_each(drop); // their charges go back before the request ends, or after
    }

    /// Looks at everything and changes limits that nobody reaches, meanwhile.
    fn watch(&self) {
        while !self.is_over.load(Relaxed) {
            let (in_use, peak) = (self.process.in_use_bytes(), self.process.peak_bytes());
            assert!(in_use <= peak && peak <= 1 << 20, "{in_use} of {peak}");
            let stats = self.request.stats();
            assert!(stats.live_bytes <= stats.peak_bytes && stats.peak_bytes <= 1 << 18, "{stats:?}");
            self.tenants[1].set_limit_bytes(Some(1 << 19));
            let waits = request().root().budget(&self.process).reserve_bytes(1000).begin();
            drop(waits);
            thread::yield_now();
        }
    }
}

#[test]
fn accounts_say_what_threads_hold_whenever_these_stand_still() {
    for seed in 0..if cfg!(miri) { 1 } else { 8 * times() as u64 } {
        let shared = Shared::new();
        thread::scope(|scope| {
            let watcher = scope.spawn(|| shared.watch());
            let threads: Vec<_> = (0..4)
                .map(|number| {
                    let shared = &shared;
                    scope.spawn(move || shared.run(number, seed))
                })
                .collect();
            let ended: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
            shared.is_over.store(true, Relaxed);
            watcher.join().unwrap();
            ended.into_iter().for_each(|end| end.unwrap());
        });
        assert_eq!(shared.request.stats().live_blocks, 0);
        assert_eq!((shared.process.in_use_bytes(), shared.tenants[1].in_use_bytes()), (0, 0));
    }
}
