//! Containers of one request on many threads, which outlive it: it is there as long as the last of them, and no longer.

use crate::random::{Random, times};
use allocator_api2::vec::Vec as VecIn;
use ctxalloc::{Buffer, Context, ContextAlloc, Error, Handler, request};
use std::sync::Mutex;
use std::thread;

type Words = VecIn<u8, ContextAlloc>;

const THREADS: usize = 4;
const STEPS: usize = if cfg!(miri) { 40 } else { 3000 };

fn is_there(handler: Handler) -> bool {
    match Context::with_handler(handler).run(|| Buffer::zeroed(8)) {
        Ok(_) => true,
        Err(Error::RequestEnded { .. }) => false,
        Err(other) => panic!("{other}"),
    }
}

/// Makes containers, with blocks and without, gives them to other threads and drops what those gave.
fn work(given: &Mutex<Vec<Words>>, first: ContextAlloc, random: &mut Random) {
    let mut own = vec![VecIn::new_in(first)];
    for _ in 0..STEPS {
        let which = random.below(own.len());
        match random.below(6) {
            0 | 1 if own.len() < 60 => own.push(VecIn::new_in(own[which].allocator().clone())),
            2 if own.len() < 60 => {
                let mut words = VecIn::with_capacity_in(1 + random.below(300), own[which].allocator().clone());
                words.push(1);
                own.push(words);
            }
            3 if own.len() > 1 => given.lock().unwrap().push(own.swap_remove(which)),
            4 if own.len() > 1 => drop(own.swap_remove(which)),
            _ => {
                let mut given = given.lock().unwrap();
                if !given.is_empty() {
                    let taken = random.below(given.len());
                    own.push(given.swap_remove(taken));
                }
            }
        }
        if random.one_in(100) {
            own.truncate(1);
        }
    }
    given.lock().unwrap().append(&mut own);
}

#[test]
fn a_request_is_there_as_long_as_the_last_container() {
    for seed in 0..if cfg!(miri) { 2 } else { 20 * times() as u64 } {
        let mut random = Random::new(seed);
        let request = request().root().begin().unwrap();
        let (handler, given) = (request.handler(), Mutex::new(Vec::new()));
        let first = ContextAlloc::with_handler(handler);
        let mut request = Some(request);
        thread::scope(|scope| {
            for number in 0..THREADS as u64 {
                let (given, first) = (&given, first.clone());
                scope.spawn(move || work(given, first, &mut Random::new(seed << 8 | number)));
            }
            if seed.is_multiple_of(2) {
                thread::yield_now();
                request.take(); // it ends while they are at work
            }
        });
        let (mut left, first) = (given.into_inner().unwrap(), [VecIn::new_in(first)]);
        left.extend(first);
        if let Some(request) = request {
            let bytes: usize = left.iter().map(|words| words.capacity()).sum();
            let blocks = left.iter().filter(|words| words.capacity() > 0).count();
            assert_eq!((request.stats().live_bytes, request.stats().live_blocks), (bytes, blocks), "seed {seed}");
        }
        while left.len() > 1 {
            left.swap_remove(random.below(left.len()));
            assert!(!random.one_in(20) || is_there(handler), "seed {seed}: {} containers", left.len());
        }
        assert!(is_there(handler), "seed {seed}: its last container is alive");
        thread::spawn(move || drop(left)).join().unwrap();
        assert!(!is_there(handler), "seed {seed}: none is left");
    }
}
