//! Threads that share a request while one of them forks: the child's accounts say what the threads had, but for the one
//! block that each may have been at.

use crate::child::{fork_and, killed_after};
use crate::{PATIENCE_SECONDS, in_a_process_of_its_own};
use ctxalloc::strategy::Budget;
use ctxalloc::{Buffer, Handler, Request, request};
use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

#[test]
fn a_child_of_fork_has_what_threads_of_a_shared_request_have_charged() {
    in_a_process_of_its_own("shared::child_that_forks_while_threads_share_a_request", 0);
}

/// Blocks that one thread has: at least, and at most. They differ while it makes or frees one.
#[derive(Default)]
struct Blocks {
    least: AtomicUsize,
    most: AtomicUsize,
}

const BYTES: usize = 40;
const THREADS: usize = 6;

struct World {
    budget: Budget,
    request: Request,
    threads: [Blocks; THREADS],
    is_over: AtomicBool,
}

impl World {
    fn work(&self, own: &Blocks, kept: usize) {
        let mut blocks = Vec::new();
        while !self.is_over.load(Ordering::SeqCst) {
            for _ in 0..kept {
                own.most.fetch_add(1, Ordering::SeqCst);
                blocks.push(Buffer::zeroed_in(self.request.handler(), BYTES).expect("there is no limit"));
                own.least.fetch_add(1, Ordering::SeqCst);
            }
            for block in blocks.drain(..) {
                own.least.fetch_sub(1, Ordering::SeqCst);
                drop(block);
                own.most.fetch_sub(1, Ordering::SeqCst);
            }
            let _ = self.request.stats(); // all loans are called in
        }
    }

    /// In a process in which no thread is at work.
    fn range(&self) -> RangeInclusive<usize> {
        let sum = |of: fn(&Blocks) -> &AtomicUsize| self.threads.iter().map(|it| of(it).load(Ordering::SeqCst)).sum();
        sum(|it| &it.least)..=sum(|it| &it.most)
    }

    fn is_right(&self) -> bool {
        let (range, stats) = (self.range(), self.request.stats());
        let is_right = range.contains(&stats.live_blocks)
            && (range.start() * BYTES..=range.end() * BYTES).contains(&stats.live_bytes)
            && (range.start() * BYTES..=range.end() * BYTES).contains(&self.budget.in_use_bytes());
        if !is_right {
            eprintln!("{range:?} blocks of {BYTES} bytes: {stats:?}, {} in the budget", self.budget.in_use_bytes());
        }
        is_right
    }
}

#[test]
#[ignore = "a child of a_child_of_fork_has_what_threads_of_a_shared_request_have_charged"]
fn child_that_forks_while_threads_share_a_request() {
    killed_after(PATIENCE_SECONDS);
    let budget = (0..8).fold(Budget::new("process", None), |budget, depth| budget.child(&format!("{depth}"), None));
    let request = request().root().budget(&budget).begin().expect("no limit");
    let world = World { budget, request, threads: Default::default(), is_over: AtomicBool::new(false) };
    let mut verdicts = Vec::new();
    thread::scope(|threads| {
        for (number, own) in world.threads.iter().enumerate() {
            let world = &world;
            threads.spawn(move || world.work(own, 10 + 5 * number));
        }
        let began = Instant::now();
        // A machine that has no time for it takes a minute for all.
        while verdicts.len() < 400 && began.elapsed() < Duration::from_secs(15) {
            thread::yield_now();
            verdicts.push(fork_and(|| world.is_right()));
        }
        world.is_over.store(true, Ordering::SeqCst);
    });
    let wrong = verdicts.iter().filter(|&&status| status != 0).count();
    assert_eq!(wrong, 0, "children that count something else than the threads had");
    assert!(world.is_right() && world.range() == (0..=0));
}

#[test]
fn a_thread_that_starts_while_a_child_is_born_shares_no_record() {
    in_a_process_of_its_own("shared::child_whose_children_are_born_with_a_thread", 0);
}

/// What a function that `fork` calls starts in the child, before any of ours is called there.
static STARTED: Mutex<Option<JoinHandle<()>>> = Mutex::new(None);
static SHARED: Mutex<Option<(Budget, Handler)>> = Mutex::new(None);

extern "C" fn start_in_the_child() {
    let Some((budget, handler)) = SHARED.lock().expect("no panic").clone() else { return };
    let work = move || {
        drop(budget.charge(8)); // needs a record, and no lock of the pool's
        make_blocks(handler);
    };
    *STARTED.lock().expect("no panic") = Some(thread::spawn(work));
    thread::sleep(Duration::from_millis(20)); // it goes as far as it can
}

fn make_blocks(handler: Handler) {
    for round in 0..20_000 {
        drop([(); 5].map(|()| Buffer::zeroed_in(handler, 16 + round % 7).expect("there is no limit")));
    }
}

#[test]
#[ignore = "a child of a_thread_that_starts_while_a_child_is_born_shares_no_record"]
fn child_whose_children_are_born_with_a_thread() {
    killed_after(PATIENCE_SECONDS);
    // SAFETY: a function that may be called in any child. It is registered before any of ours.
    assert_eq!(unsafe { libc::pthread_atfork(None, None, Some(start_in_the_child)) }, 0);
    let budget = Budget::new("tenant", None);
    let request = request().root().budget(&budget).begin().expect("no limit");
    let handler = request.handler();
    make_blocks(handler);
    thread::spawn(move || make_blocks(handler)).join().expect("no panic"); // from now on it is shared
    *SHARED.lock().expect("no panic") = Some((budget.clone(), handler));
    for _ in 0..5 {
        let is_right = || {
            let third = thread::spawn(move || make_blocks(handler));
            make_blocks(handler);
            let born_with = STARTED.lock().expect("no panic").take().expect("it was started");
            let are_well = third.join().is_ok() && born_with.join().is_ok();
            are_well && (request.stats().live_blocks, budget.in_use_bytes()) == (0, 0)
        };
        assert_eq!(fork_and(is_right), 0);
    }
}
