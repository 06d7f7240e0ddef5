//! Threads and tasks by the thousands: they switch handlers, allocate, resize, hand blocks over and free what others
//! made, and check at each step who serves them and what their blocks hold.
//!
//! `CTXALLOC_STRESS` multiplies the work (`make stress`). Every choice follows from a seed that is printed.
#![allow(unsafe_code, reason = "the tests' strategies")]

mod support;

use ctxalloc::{Buffer, Context, Handler, WithHandler, current, enter, handler, reset, scope, set};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use support::{Marked, marked, rounds};

const THREADS: usize = rounds(64, 3);
const TASKS: usize = rounds(10_000, 12);

fn times() -> usize {
    std::env::var("CTXALLOC_STRESS").ok().map_or(1, |text| text.parse().expect("CTXALLOC_STRESS is a number"))
}

/// SplitMix64: each thread and task has its own, from the seed and its number.
struct Dice(u64);

impl Dice {
    fn of(seed: u64, number: usize) -> Self {
        Self(seed ^ (number as u64).wrapping_mul(0xd134_2543_de82_ef95))
    }

    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 16) as usize % sides
    }

    fn size(&mut self) -> usize {
        match self.roll(10) {
            0 => 0,
            1..=6 => 1 + self.roll(200),
            7 | 8 => 1 + self.roll(5000),
            _ => 1 + self.roll(100_000),
        }
    }
}

/// A buffer whose bytes say what they should be.
struct Parcel {
    buffer: Buffer,
    owner: Handler,
    seed: u8,
}

impl Parcel {
    /// Made by whatever is selected, which is `owner`.
    fn new(owner: Handler, dice: &mut Dice) -> Self {
        assert_eq!(current(), owner, "another handler serves this work than the one that was selected");
        let seed = dice.roll(256) as u8;
        let mut buffer = Buffer::zeroed(dice.size()).expect("some bytes");
        buffer.fill(seed);
        Self { buffer, owner, seed }
    }

    fn check(&self) {
        assert_eq!(self.buffer.handler(), self.owner);
        assert!(self.buffer.iter().all(|&byte| byte == self.seed), "somebody wrote into a block of {}", self.owner);
    }

    fn resize(&mut self, dice: &mut Dice) {
        self.check();
        let (old, new) = (self.buffer.len(), dice.size());
        self.buffer.resize(new).expect("some bytes");
        let grown = old.min(new);
        assert!(self.buffer[grown..].iter().all(|&byte| byte == 0), "what a buffer grows by is zero");
        self.buffer[grown..].fill(self.seed);
        self.check();
    }
}

/// Boxes in which parcels change hands: put in by one, taken out, checked and freed by any other.
struct Post {
    boxes: Vec<Mutex<Vec<Parcel>>>,
    handlers: Vec<Handler>,
    handed_over: AtomicUsize,
}

impl Post {
    fn send(&self, parcel: Parcel, dice: &mut Dice) {
        self.handed_over.fetch_add(1, Ordering::Relaxed);
        self.open(dice.roll(self.boxes.len())).push(parcel);
    }

    fn take(&self, dice: &mut Dice) -> Option<Parcel> {
        self.open(dice.roll(self.boxes.len())).pop()
    }

    fn open(&self, number: usize) -> std::sync::MutexGuard<'_, Vec<Parcel>> {
        self.boxes[number].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn any_handler(&self, dice: &mut Dice) -> Handler {
        self.handlers[dice.roll(self.handlers.len())]
    }

    /// One thing that a program does with memory, in the running context, where `selected` is selected.
    fn step(&self, selected: Handler, dice: &mut Dice) {
        match dice.roll(4) {
            0 => self.send(Parcel::new(selected, dice), dice),
            1 => {
                if let Some(mut parcel) = self.take(dice) {
                    parcel.resize(dice);
                    self.send(parcel, dice);
                }
            }
            2 => {
                if let Some(parcel) = self.take(dice) {
                    parcel.check();
                }
            }
            _ => {
                let inner = self.any_handler(dice);
                scope(inner, || drop(Parcel::new(inner, dice)));
            }
        }
        assert_eq!(current(), selected);
    }
}

/// A thread's work: selections of every kind around its steps.
fn thread_work(post: &Post, seed: u64, number: usize, steps: usize) {
    let mut dice = Dice::of(seed, number);
    let first = current();
    for _ in 0..steps {
        let wanted = post.any_handler(&mut dice);
        match dice.roll(4) {
            0 => {
                let token = set(wanted);
                post.step(wanted, &mut dice);
                reset(&token).expect("its own context");
            }
            1 => {
                let guard = enter(wanted);
                post.step(wanted, &mut dice);
                guard.exit().expect("its own context");
            }
            2 => scope(wanted, || post.step(wanted, &mut dice)),
            _ => Context::with_handler(wanted).run(|| post.step(wanted, &mut dice)),
        }
        assert_eq!(current(), first);
    }
}

/// A task's work: what it selected has to be there after each await, on whatever worker.
async fn task_work(post: Arc<Post>, seed: u64, number: usize, steps: usize) {
    let mut dice = Dice::of(seed, number);
    let mut selected = current();
    for _ in 0..steps {
        if dice.roll(2) == 0 {
            selected = post.any_handler(&mut dice);
            drop(set(selected));
        }
        let held = Parcel::new(selected, &mut dice);
        tokio::task::yield_now().await;
        assert_eq!(current(), selected, "lost over an await");
        held.check();
        post.step(selected, &mut dice);
        if dice.roll(8) == 0 {
            let inner = post.any_handler(&mut dice);
            let made = async {
                tokio::task::yield_now().await;
                Parcel::new(inner, &mut Dice::of(seed, number + 1))
            };
            let made = made.with_handler(inner).await;
            post.send(made, &mut dice);
        }
        if dice.roll(4) == 0 {
            post.send(held, &mut dice);
        }
        assert_eq!(current(), selected);
    }
}

/// Starts a task in a scope of its own: it has to begin with that selection.
fn start(post: &Arc<Post>, seed: u64, number: usize) -> tokio::task::JoinHandle<()> {
    let wanted = post.any_handler(&mut Dice::of(seed, number));
    let work = task_work(Arc::clone(post), seed, number, 4);
    let checked = async move {
        assert_eq!(current(), wanted);
        work.await;
    };
    scope(wanted, || tokio::spawn(checked.in_current_handler()))
}

#[test]
fn stress_threads_and_tasks_switch_handlers_and_hand_blocks_over() {
    let owners: [(Handler, Arc<Marked>); 3] = ["stress 1", "stress 2", "stress 3"].map(marked);
    let built_in = ["system", "aligned64"].map(|name| handler(name).expect("built in"));
    let rest = ctxalloc::handlers().filter(|one| !built_in.contains(one) && !owners.iter().any(|(own, _)| own == one));
    let post = Arc::new(Post {
        boxes: (0..64).map(|_| Mutex::default()).collect(),
        handlers: owners.iter().map(|(owner, _)| *owner).chain(built_in).chain(rest).collect(),
        handed_over: AtomicUsize::new(0),
    });
    for round in 0..times() {
        let seed = 0x5EED_0000 + round as u64;
        println!("seed {seed:#x}");
        one_round(&post, seed);
        for parcels in &post.boxes {
            let parcels = std::mem::take(&mut *parcels.lock().expect("nobody panicked"));
            parcels.iter().for_each(Parcel::check);
        }
        for (owner, strategy) in &owners {
            assert_eq!(strategy.faults(), 0, "{owner} was given blocks that are not its own");
            assert_eq!(
                (strategy.live_blocks(), strategy.live_bytes()),
                (0, 0),
                "{owner} was not given all of its blocks"
            );
            assert!(strategy.made() > 0);
        }
    }
    assert!(post.handed_over.load(Ordering::Relaxed) > THREADS);
}

fn one_round(post: &Arc<Post>, seed: u64) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).build().expect("a runtime");
    let threads: Vec<_> = (0..THREADS)
        .map(|number| {
            let post = Arc::clone(post);
            thread::spawn(move || thread_work(&post, seed, number, rounds(150, 10)))
        })
        .collect();
    runtime.block_on(async {
        let tasks: Vec<_> = (0..TASKS).map(|number| start(post, seed, THREADS + number)).collect();
        for (number, task) in tasks.into_iter().enumerate() {
            if number % 16 == 0 {
                task.abort(); // wherever it is: what it holds goes back from there
            }
            if let Err(error) = task.await {
                assert!(error.is_cancelled(), "a task failed: {error}");
            }
        }
    });
    for thread in threads {
        thread.join().expect("a thread failed");
    }
    drop(runtime); // the last aborted tasks go with it
}
