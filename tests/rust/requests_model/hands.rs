//! Threads that a random program is handed to.

use crate::random::Random;
use std::cell::RefCell;
use std::sync::mpsc::{self, Sender};
use std::thread;

/// Threads that do one thing at a time for the program, in its order.
pub(crate) struct Hands {
    hands: Vec<RefCell<Hand>>,
    /// After so many things a thread ends, and another one takes its place.
    lasts: usize,
}

struct Hand {
    sender: Sender<Box<dyn FnOnce() + Send>>,
    thread: thread::JoinHandle<()>,
    done: usize,
}

impl Hand {
    fn new() -> Self {
        let (sender, receiver) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let thread = thread::spawn(move || receiver.into_iter().for_each(|work| work()));
        Self { sender, thread, done: 0 }
    }
}

impl Hands {
    pub(crate) fn new(count: usize, lasts: usize) -> Self {
        Self { hands: (0..count).map(|_| RefCell::new(Hand::new())).collect(), lasts }
    }

    /// One of them, or 0: here.
    pub(crate) fn any(&self, random: &mut Random) -> usize {
        random.below(self.hands.len() + 1)
    }

    /// Mostly `home`.
    pub(crate) fn near(&self, random: &mut Random, home: usize) -> usize {
        if random.one_in(4) { self.any(random) } else { home }
    }

    /// Runs `work` there, and waits for it.
    pub(crate) fn run<R: Send + 'static>(&self, there: usize, work: impl FnOnce() -> R + Send + 'static) -> R {
        match there.checked_sub(1) {
            None => work(),
            Some(hand) => {
                let mut hand = self.hands[hand].borrow_mut();
                if hand.done == self.lasts {
                    let Hand { sender, thread, .. } = std::mem::replace(&mut *hand, Hand::new());
                    drop(sender);
                    thread.join().unwrap();
                }
                hand.done += 1;
                let (answer, wait) = mpsc::channel();
                hand.sender.send(Box::new(move || drop(answer.send(work())))).unwrap();
                wait.recv().unwrap()
            }
        }
    }
}
