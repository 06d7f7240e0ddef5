//! Nobody overtakes those who wait for the same budget, whatever other threads do to its limits meanwhile.

use super::{Random, polled, times, wanting};
use ctxalloc::Request;
use ctxalloc::request::Admitting;
use ctxalloc::strategy::Budget;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::thread;

/// Those of one budget who came and were not seen to be admitted yet, the oldest first; and those who are in.
struct Line {
    waiting: VecDeque<Admitting>,
    inside: VecDeque<Request>,
    /// How many had to wait and were admitted.
    waited: usize,
}

impl Line {
    /// Sees who of the first `count` was admitted. They came before one that is in by now: each of them has to be.
    fn all_are_in(&mut self, count: usize, seed: u64) {
        for place in 0..count {
            match polled(&mut self.waiting.pop_front().unwrap()) {
                Poll::Ready(answer) => {
                    self.waited += 1;
                    self.inside.push_back(answer.unwrap());
                }
                Poll::Pending => panic!("seed {seed}: number {place} of {count} was overtaken"),
            }
        }
    }

    fn step(&mut self, budget: &Budget, random: &mut Random, seed: u64) {
        match random.below(3) {
            0 if self.waiting.len() < 8 => {
                let mut newcomer = wanting(budget, 1 + random.below(300));
                match polled(&mut newcomer) {
                    Poll::Ready(answer) => {
                        let request = answer.unwrap();
                        self.all_are_in(self.waiting.len(), seed);
                        self.inside.push_back(request);
                    }
                    Poll::Pending => self.waiting.push_back(newcomer),
                }
            }
            1 if !self.waiting.is_empty() => {
                let place = random.below(self.waiting.len());
                if let Poll::Ready(answer) = polled(&mut self.waiting[place]) {
                    self.waiting.remove(place);
                    self.waited += 1;
                    let request = answer.unwrap();
                    self.all_are_in(place, seed);
                    self.inside.push_back(request);
                }
            }
            _ => match self.inside.pop_front() {
                Some(request) => drop(request),
                None => thread::yield_now(),
            },
        }
    }
}

#[test]
fn nobody_overtakes_while_others_change_limits_and_hold_memory() {
    let process = Budget::new("process", Some(1000));
    let tenants = [process.child("one", Some(600)), process.child("two", None)];
    let (is_over, seed) = (AtomicBool::new(false), 7);
    let until_over = |work: &dyn Fn(&mut Random)| {
        let mut random = Random::new(seed);
        while !is_over.load(Ordering::Relaxed) {
            work(&mut random);
        }
    };
    thread::scope(|scope| {
        // Never below what somebody may ask for: then it would be turned away, and not overtaken.
        scope.spawn(|| until_over(&|random| process.set_limit_bytes(Some(300 + random.below(900)))));
        scope.spawn(|| until_over(&|random| tenants[0].set_limit_bytes(Some(300 + random.below(600)))));
        scope.spawn(|| {
            until_over(&|random| {
                let held = tenants[random.below(2)].charge(1 + random.below(200));
                thread::yield_now();
                drop(held);
            });
        });
        let workers: Vec<_> = tenants
            .iter()
            .map(|tenant| {
                scope.spawn(|| {
                    let (mut random, mut line) =
                        (Random::new(seed), Line { waiting: VecDeque::new(), inside: VecDeque::new(), waited: 0 });
                    while line.waited < if cfg!(miri) { 5 } else { 500 * times().min(20) } {
                        line.step(tenant, &mut random, seed);
                    }
                })
            })
            .collect();
        let answers: Vec<_> = workers.into_iter().map(thread::ScopedJoinHandle::join).collect();
        is_over.store(true, Ordering::Relaxed);
        answers.into_iter().for_each(|answer| answer.unwrap());
    });
    assert_eq!((process.in_use_bytes(), process.reserved_bytes(), process.waiting()), (0, 0, 0));
}
