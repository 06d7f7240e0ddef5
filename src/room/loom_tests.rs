//! The queue's state and its wake-up in every interleaving: whoever enters, leaves, gives memory back or looks.
//!
//! What a model has are the locks of accounts, the queue's, those of answers, and the marks of threads that are called;
//! each queue is the model's own. In each, once all threads are through, nobody may be left waiting where there is
//! room.

use super::queue::{Later, Queue};
use super::waiter::{Time, Waiter};
use crate::error::Error;
use crate::strategy::account::{Account, Chain, OnRoom, on_room};
use crate::sync::{Called, Locked};
use loom::sync::Arc as LoomArc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::task::{Poll, Wake, Waker};

loom::lazy_static! {
    /// The thread that is called when room came: one for each execution of a model.
    static ref RUNNER: Called = Called::new();
}

/// How often a waiter was woken.
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

type Room = LoomArc<Locked<Queue>>;

fn room() -> Room {
    on_room(OnRoom { came: || RUNNER.call(), changed: || RUNNER.call() });
    LoomArc::new(Locked::new(Queue::of_this_process()))
}

fn budget(limit_bytes: usize) -> Arc<Account> {
    Account::of_budget("b", Some(limit_bytes), None)
}

fn chain(budget: &Arc<Account>) -> Arc<Chain> {
    Arc::new(Chain::of_request(None, None, 0, Some(budget), None, false, true).expect("not deep"))
}

fn with<R>(room: &Room, work: impl FnOnce(&mut Queue, &mut Later) -> R) -> R {
    let mut later = Later::default();
    let answer = room.with(|queue| work(queue, &mut later));
    later.wakers.drain(..).for_each(Waker::wake);
    answer
}

fn look(room: &Room) {
    RUNNER.begins_to_look();
    with(room, Queue::look);
}

/// As `here::enter`: its place, or nothing where it has got room.
fn enter(room: &Room, chain: &Arc<Chain>, bytes: usize) -> Option<Arc<Waiter>> {
    with(room, |queue, later| {
        let waiter = Arc::new(Waiter::new(chain, bytes, queue.arrived, Time::from_now(None), queue.process_id));
        queue.arrived += 1;
        queue.add(&waiter);
        queue.look(later);
        queue.has(&waiter).then_some(waiter)
    })
}

/// As `here::leave`.
fn leave(room: &Room, waiter: &Arc<Waiter>) {
    let is_out = with(room, |queue, later| {
        let is_there = queue.remove(waiter, later);
        if is_there {
            queue.look(later);
        }
        is_there
    });
    if !is_out {
        waiter.chain.return_reservation();
    }
}

fn is_admitted(waiter: &Arc<Waiter>, waker: &Waker) -> bool {
    match waiter.ask(waker) {
        Poll::Ready(answer) => answer.map_err(|error: Error| panic!("{error}")).is_ok(),
        Poll::Pending => false,
    }
}

fn reserved(chain: &Arc<Chain>) -> bool {
    chain.admit(1, Account::is_wanted, None)
}

/// Ends what a model began, so that each execution leaves nothing.
fn is_as_new(budget: &Account) {
    assert_eq!((budget.live_bytes(), budget.pending_bytes()), (0, 0));
    assert_eq!(budget.waiting().load(std::sync::atomic::Ordering::Relaxed), 0);
}

#[test]
fn loom_one_that_enters_while_room_comes_sees_it_or_is_called() {
    loom::model(|| {
        let (room, budget) = (room(), budget(1));
        let holder = chain(&budget);
        assert!(reserved(&holder));
        let gives = loom::thread::spawn(move || holder.return_reservation());
        let own = chain(&budget);
        let waiter = enter(&room, &own, 1);
        gives.join().expect("no panic");
        if let Some(waiter) = waiter {
            // Nobody else looks: if it was not called it would wait for ever.
            assert!(RUNNER.begins_to_look(), "a wake-up was lost");
            with(&room, Queue::look);
            assert!(is_admitted(&waiter, Waker::noop()));
        }
        own.return_reservation();
        is_as_new(&budget);
    });
}

#[test]
fn loom_the_thread_of_the_queue_that_sleeps_is_woken() {
    loom::model(|| {
        let (room, budget) = (room(), budget(1));
        let (holder, own) = (chain(&budget), chain(&budget));
        assert!(reserved(&holder));
        let waiter = enter(&room, &own, 1).expect("there is no room");
        let woken = Arc::new(Woken(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&woken));
        assert!(!is_admitted(&waiter, &waker));
        // As `runner::run`. It sleeps for ever, which loom reports, if nobody wakes it.
        let runner = loom::thread::spawn({
            let (room, woken) = (room.clone(), Arc::clone(&woken));
            move || {
                RUNNER.runs_here();
                loop {
                    look(&room);
                    if woken.0.load(Ordering::Acquire) > 0 {
                        break;
                    }
                    RUNNER.sleep(None);
                }
            }
        });
        holder.return_reservation();
        runner.join().expect("no panic");
        assert!(is_admitted(&waiter, &waker));
        own.return_reservation();
        is_as_new(&budget);
    });
}

#[test]
fn loom_one_that_leaves_while_it_gets_room_passes_it_on() {
    loom::model(|| {
        let (room, budget) = (room(), budget(1));
        let (holder, first, second) = (chain(&budget), chain(&budget), chain(&budget));
        assert!(reserved(&holder));
        let leaver = enter(&room, &first, 1).expect("there is no room");
        let stays = enter(&room, &second, 1).expect("it is behind the first one");
        holder.return_reservation();
        let leaves = loom::thread::spawn({
            let room = room.clone();
            move || leave(&room, &leaver)
        });
        look(&room);
        leaves.join().expect("no panic");
        // The first may have had its room when it left: that calls.
        if RUNNER.begins_to_look() {
            with(&room, Queue::look);
        }
        assert!(is_admitted(&stays, Waker::noop()), "the turn was not passed on");
        second.return_reservation();
        is_as_new(&budget);
    });
}

#[test]
fn loom_a_newcomer_does_not_pass_one_that_waits() {
    loom::model(|| {
        let (room, budget) = (room(), budget(2));
        let (holder, first) = (chain(&budget), chain(&budget));
        assert!(reserved(&holder));
        let waiter = enter(&room, &first, 2).expect("there is room for one byte");
        let comes = loom::thread::spawn({
            let budget = Arc::clone(&budget);
            move || {
                let newcomer = chain(&budget);
                let passes = reserved(&newcomer);
                newcomer.return_reservation();
                passes
            }
        });
        holder.return_reservation();
        look(&room);
        assert!(is_admitted(&waiter, Waker::noop()), "whoever came after it has its room");
        assert!(!comes.join().expect("no panic"), "it came when all was wanted or taken");
        first.return_reservation();
        is_as_new(&budget);
    });
}

#[test]
fn loom_two_that_look_at_once_give_each_byte_once() {
    loom::model(|| {
        let (room, budget) = (room(), budget(1));
        let (holder, first, second) = (chain(&budget), chain(&budget), chain(&budget));
        assert!(reserved(&holder));
        let waits = [&first, &second].map(|chain| enter(&room, chain, 1).expect("there is no room"));
        // One that ends its request looks by itself, and so does the thread of the queue.
        let ends = loom::thread::spawn({
            let room = room.clone();
            move || {
                holder.return_reservation();
                with(&room, Queue::look);
            }
        });
        look(&room);
        ends.join().expect("no panic");
        let admitted = waits.each_ref().map(|waiter| is_admitted(waiter, Waker::noop()));
        assert_eq!(admitted, [true, false], "the first one, and nobody else");
        leave(&room, &waits[1]);
        first.return_reservation();
        is_as_new(&budget);
    });
}
