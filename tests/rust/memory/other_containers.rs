//! `ContextAlloc` under containers of other crates: hashbrown's tables, and code written for bumpalo's `&Bump`, which
//! both use allocator-api2 0.2.

use crate::support::{blue, marked, rounds};
use allocator_api2_02::alloc::Allocator;
use allocator_api2_02::boxed::Box as BoxIn;
use allocator_api2_02::vec::Vec as VecIn;
use bumpalo::Bump;
use ctxalloc::{ContextAlloc, Scratch, scope};
use hashbrown::{DefaultHashBuilder, HashMap};
use std::thread;

type Map<K, V> = HashMap<K, V, DefaultHashBuilder, ContextAlloc>;

fn map_here<K, V>() -> Map<K, V> {
    HashMap::with_hasher_in(DefaultHashBuilder::default(), ContextAlloc::new())
}

#[test]
fn a_hash_map_stays_with_the_handler_it_was_made_in() {
    let (owner, strategy) = marked("hash map");
    let mut squares: Map<u64, u64> = scope(owner, map_here);
    assert_eq!(strategy.made(), 0, "an empty map has no block");
    let count = rounds(10_000, 100) as u64;
    scope(blue(), || squares.extend((0..count).map(|n| (n, n * n))));
    assert_eq!((squares.allocator().handler(), strategy.live_blocks()), (owner, 1));
    let copy = scope(blue(), || squares.clone());
    assert_eq!((copy.len(), strategy.live_blocks()), (squares.len(), 2));
    squares.retain(|n, _| n % 100 == 0);
    squares.shrink_to_fit();
    assert!(squares.iter().all(|(n, square)| n * n == *square));
    thread::spawn(move || drop((squares, copy))).join().expect("no panic");
    assert_eq!((strategy.live_blocks(), strategy.live_bytes()), (0, 0));
}

/// What a library writes that takes any allocator of that line.
fn fill<A: Allocator + Clone>(text: &str, allocator: A) -> (VecIn<&str, A>, BoxIn<u64, A>) {
    let mut words = VecIn::new_in(allocator.clone());
    words.extend(text.split(' '));
    let count = BoxIn::new_in(words.len() as u64, allocator);
    (words, count)
}

#[test]
fn code_for_bumpalo_s_arenas_runs_in_a_handler() {
    let bump = Bump::new();
    let (in_bump, count) = fill("a b c", &bump);
    assert_eq!((in_bump.len() as u64, bump.allocated_bytes() > 0), (*count, true));

    let (owner, strategy) = marked("as bumpalo");
    let allocator = ContextAlloc::with_handler(owner);
    let (words, count) = fill("a b c", &allocator);
    assert_eq!((&words[..], *count, strategy.live_blocks()), (&in_bump[..], 3, 2));
    let (owned, count_again) = fill("d e", allocator.clone());
    assert_eq!((owned.len() as u64, strategy.live_blocks()), (*count_again, 4));
    drop((words, count, owned, count_again));
    assert_eq!(strategy.live_blocks(), 0);
}

#[test]
fn one_allocator_serves_both_lines_of_allocator_api2() {
    let (owner, strategy) = marked("both lines");
    let allocator = ContextAlloc::with_handler(owner);
    let mut older = VecIn::new_in(allocator.clone());
    let mut newer = allocator_api2::vec::Vec::new_in(allocator);
    for number in 0..1000_u32 {
        older.push(number);
        newer.push(number);
    }
    assert_eq!((&older[..], strategy.live_blocks()), (&newer[..], 2));
    drop((older, newer));
    assert_eq!(strategy.live_blocks(), 0);
}

#[test]
fn a_scratch_takes_the_place_of_bumpalo_s_arena() {
    let (owner, strategy) = marked("scratch as bumpalo");
    let scratch = Scratch::with_handler(owner);
    let (words, count) = fill("a b c", &scratch);
    let mut lengths = HashMap::with_hasher_in(DefaultHashBuilder::default(), &scratch);
    lengths.extend(words.iter().map(|word| (*word, word.len())));
    assert_eq!((lengths.len() as u64, strategy.live_blocks()), (*count, 1), "one chunk for all of it");
    drop((words, count, lengths));
    drop(scratch);
    assert_eq!(strategy.live_blocks(), 0);
}
