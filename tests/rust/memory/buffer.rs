//! `Buffer` against a plain `Vec<u8>`, and what a Vec does not have: a handler, failures as values, other threads.

use crate::support::errors::{error, refusal};
use crate::support::{blue, colours, green, marked, red, rounds, switched};
use ctxalloc::{Buffer, Error, Handler, current, handler, scope, set};
use proptest::prelude::*;
use std::sync::atomic::Ordering;
use std::thread;

#[test]
fn a_buffer_is_made_by_the_current_handler() {
    scope(red(), || {
        let made =
            [Buffer::zeroed(10), Buffer::copy_from_slice(b"bytes"), Buffer::zeroed(0), Buffer::copy_from_slice(b"")];
        for buffer in made {
            assert_eq!(buffer.expect("a few bytes").handler(), red());
        }
        assert_eq!(Buffer::zeroed_in(green(), 3).expect("3 bytes").handler(), green());
        assert_eq!(Buffer::copy_from_slice_in(green(), b"abc").expect("3 bytes").handler(), green());
    });
}

#[test]
fn a_buffer_outlives_its_scope_and_keeps_its_handler_to_the_end() {
    let (owner, strategy) = marked("outlives its scope");
    let mut buffer = scope(owner, || Buffer::copy_from_slice(b"escape")).expect("6 bytes");
    drop(set(blue()));
    buffer.resize(100_000).expect("some bytes");
    assert_eq!((strategy.live_blocks(), strategy.live_bytes()), (1, 100_000));
    assert_eq!(&buffer[..6], b"escape");
    let copy = buffer.try_clone().expect("as many");
    assert_eq!((copy.handler(), strategy.live_blocks()), (owner, 2));
    drop((buffer, copy));
    assert_eq!((strategy.live_blocks(), strategy.live_bytes()), (0, 0));
}

#[test]
fn an_empty_buffer_has_no_block() {
    let (owner, strategy) = marked("empty");
    let mut buffer = Buffer::zeroed_in(owner, 0).expect("nothing");
    assert!(buffer.is_empty());
    assert_eq!(strategy.made(), 0);
    buffer.resize(10).expect("10 bytes");
    assert_eq!(&buffer[..], &[0; 10]);
    buffer.resize(0).expect("nothing");
    assert_eq!((buffer.len(), strategy.live_blocks()), (0, 0));
    buffer.resize(0).expect("nothing");
    assert_eq!(buffer.try_clone().expect("nothing"), buffer);
}

#[test]
fn a_failed_resize_leaves_the_buffer_as_it_was() {
    let (owner, strategy) = switched("fails to resize");
    let mut buffer = Buffer::copy_from_slice_in(owner, b"intact").expect("6 bytes");
    let mut empty = Buffer::zeroed_in(owner, 0).expect("nothing");
    strategy.refuse(true);
    assert!(empty.resize(10).is_err());
    assert_eq!((empty.len(), empty.handler()), (0, owner));
    for length in [1, 7, 5000] {
        let refused = error!(OutOfMemory { handler: "fails to resize", requested_bytes: length });
        assert_eq!(refusal(buffer.resize(length)), refused);
        assert_eq!((&buffer[..], buffer.handler()), (&b"intact"[..], owner));
    }
    assert_eq!(buffer.resize(6), buffer.resize(6), "whether it asks at all is its own affair");
    assert!(buffer.try_clone().is_err());
    strategy.refuse(false);
    strategy.panic(true);
    assert!(buffer.resize(5000).is_err());
    assert_eq!(&buffer[..], b"intact");
    strategy.panic(false);
    buffer.resize(5000).expect("it works again");
    assert_eq!(&buffer[..6], b"intact");
    drop(buffer);
    assert_eq!(strategy.live_blocks.load(Ordering::SeqCst), 0);
}

#[test]
fn impossible_lengths_are_values_not_aborts() {
    for handler in [handler("system").expect("built in"), handler("aligned64").expect("built in"), red()] {
        for length in [usize::MAX, isize::MAX as usize + 1, isize::MAX as usize] {
            if cfg!(miri) && length == isize::MAX as usize {
                continue; // its malloc ends the run where a real one returns NULL
            }
            let refused = error!(OutOfMemory { handler: handler.name(), requested_bytes: length });
            assert_eq!(refusal(Buffer::zeroed_in(handler, length)), refused);
            let mut buffer = Buffer::copy_from_slice_in(handler, b"kept").expect("4 bytes");
            assert_eq!(refusal(buffer.resize(length)), refused);
            assert_eq!(&buffer[..], b"kept");
        }
    }
}

#[test]
fn buffers_compare_by_their_bytes_and_show_their_handler() {
    let [one, two] = [red(), green()].map(|owner| Buffer::copy_from_slice_in(owner, b"same").expect("4 bytes"));
    assert_eq!(one, two);
    assert_ne!(one, Buffer::copy_from_slice(b"other").expect("5 bytes"));
    let text = format!("{one:?}");
    assert!(text.contains("length: 4") && text.contains("red"), "{text}");
    assert_eq!(AsRef::<[u8]>::as_ref(&one), b"same");
}

#[derive(Debug, Clone)]
enum Step {
    Extend { which: usize, bytes: Vec<u8> },
    Truncate { which: usize, length: usize },
    Reserve { which: usize, length: usize },
    Make { owner: usize, length: usize },
    Copy { owner: usize, bytes: Vec<u8> },
    Resize { which: usize, length: usize },
    Fill { which: usize, byte: u8 },
    Clone { which: usize },
    Select { owner: usize },
    Elsewhere { which: usize, length: usize },
    Drop { which: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let most: usize = rounds(6000, 200);
    let length = move || prop_oneof![4 => 0..most, 1 => Just(0_usize), 1 => Just(4096_usize.min(most))];
    prop_oneof![
        (0..3_usize, length()).prop_map(|(owner, length)| Step::Make { owner, length }),
        (0..3_usize, prop::collection::vec(any::<u8>(), 0..100)).prop_map(|(owner, bytes)| Step::Copy { owner, bytes }),
        (any::<usize>(), length()).prop_map(|(which, length)| Step::Resize { which, length }),
        (any::<usize>(), any::<u8>()).prop_map(|(which, byte)| Step::Fill { which, byte }),
        any::<usize>().prop_map(|which| Step::Clone { which }),
        (0..3_usize).prop_map(|owner| Step::Select { owner }),
        (any::<usize>(), length()).prop_map(|(which, length)| Step::Elsewhere { which, length }),
        any::<usize>().prop_map(|which| Step::Drop { which }),
        (any::<usize>(), prop::collection::vec(any::<u8>(), 0..300))
            .prop_map(|(which, bytes)| Step::Extend { which, bytes }),
        (any::<usize>(), length()).prop_map(|(which, length)| Step::Truncate { which, length }),
        (any::<usize>(), length()).prop_map(|(which, length)| Step::Reserve { which, length }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: rounds(200, 4) as u32, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn a_buffer_behaves_as_a_vec_of_bytes(steps in prop::collection::vec(step(), 1..rounds(60, 12))) {
        let owners: [Handler; 3] = [handler("system").expect("built in"), handler("aligned64").expect("built in"), red()];
        let mut live: Vec<(Buffer, Vec<u8>, Handler)> = Vec::new();
        let selection = ctxalloc::enter(owners[0]);
        for step in steps {
            let count = live.len().max(1);
            match step {
                Step::Make { owner, length } => {
                    live.push((Buffer::zeroed_in(owners[owner], length).expect("some bytes"), vec![0; length], owners[owner]));
                }
                Step::Copy { owner, bytes } => {
                    let buffer = scope(owners[owner], || Buffer::copy_from_slice(&bytes)).expect("some bytes");
                    live.push((buffer, bytes, owners[owner]));
                }
                Step::Resize { which, length } => if let Some((buffer, model, _)) = live.get_mut(which % count) {
                    buffer.resize(length).expect("some bytes");
                    model.resize(length, 0);
                },
                Step::Fill { which, byte } => if let Some((buffer, model, _)) = live.get_mut(which % count) {
                    buffer.fill(byte);
                    model.fill(byte);
                },
                Step::Extend { which, bytes } => if let Some((buffer, model, _)) = live.get_mut(which % count) {
                    buffer.extend_from_slice(&bytes).expect("some bytes");
                    model.extend_from_slice(&bytes);
                    prop_assert!(buffer.capacity() >= buffer.len());
                },
                Step::Truncate { which, length } => if let Some((buffer, model, _)) = live.get_mut(which % count) {
                    buffer.truncate(length);
                    model.truncate(length);
                },
                Step::Reserve { which, length } => if let Some((buffer, model, _)) = live.get_mut(which % count) {
                    buffer.reserve(length).expect("some bytes");
                    prop_assert!(buffer.capacity() - model.len() >= length);
                },
                Step::Clone { which } => if let Some((buffer, model, owner)) = live.get(which % count) {
                    let copy = (buffer.try_clone().expect("some bytes"), model.clone(), *owner);
                    live.push(copy);
                },
                Step::Select { owner } => drop(set(owners[owner])),
                Step::Elsewhere { which, length } => if let Some((buffer, model, _)) = live.get_mut(which % count) {
                    thread::scope(|threads| threads.spawn(|| buffer.resize(length)).join())
                        .expect("no panic")
                        .expect("some bytes");
                    model.resize(length, 0);
                },
                Step::Drop { which } => if !live.is_empty() {
                    live.swap_remove(which % count);
                },
            }
            for (buffer, model, owner) in &live {
                prop_assert!(**buffer == **model, "the bytes differ");
                prop_assert_eq!(buffer.handler(), *owner);
                prop_assert!(buffer.is_empty() || buffer.as_ptr().addr().is_multiple_of(owner.alignment()));
            }
        }
        drop(selection);
        prop_assert_eq!(current(), ctxalloc::default_handler());
        prop_assert_eq!(colours()[0].1.faults(), 0, "a block went to a handler that had not made it");
    }
}

#[test]
fn a_buffer_that_cannot_grow_says_so_and_is_as_it_was() {
    use std::io::Write;
    let request = ctxalloc::request().limit_bytes(1000).begin().expect("memory");
    let mut buffer = request.run(|| Buffer::with_capacity(600)).expect("room");
    assert_eq!((buffer.len(), buffer.capacity()), (0, 600));
    buffer.write_all(&[7; 600]).expect("room");
    buffer.extend_from_slice(&[8; 200]).expect("not for twice as much, but for this");
    assert_eq!((buffer.len(), buffer.capacity()), (800, 800));
    let refused = buffer.write(&[9; 201]).expect_err("over the limit");
    assert_eq!(refused.kind(), std::io::ErrorKind::OutOfMemory);
    assert!(refused.to_string().contains("has no room"), "{refused}");
    assert!(buffer[..600] == [7; 600] && buffer[600..] == [8; 200]);
    drop(buffer);
    assert_eq!(request.stats().live_bytes, 0);
}

#[test]
#[cfg(feature = "bytes")]
fn a_buffer_becomes_bytes_and_goes_back_with_the_last_slice() {
    let request = ctxalloc::request().begin().expect("memory");
    let mut buffer = request.run(|| Buffer::with_capacity(100)).expect("memory");
    buffer.extend_from_slice(b"an answer").expect("room");
    let start = buffer.as_ptr();
    let answer = bytes::Bytes::from(buffer);
    assert_eq!((answer.as_ptr(), &*answer), (start, &b"an answer"[..]));
    let word = answer.slice(3..);
    drop(answer);
    assert_eq!(request.end().escaped_bytes, 100);
    std::thread::spawn(move || drop(word)).join().expect("no panic");
    assert!(bytes::Bytes::from(Buffer::zeroed(0).expect("nothing")).is_empty());
}

#[test]
fn growing_near_a_limit_counts_no_refusal_where_nothing_is_refused() {
    let request = ctxalloc::request().root().limit_bytes(100_000).begin().expect("memory");
    let mut buffer = request.run(|| Buffer::with_capacity(1000)).expect("1000 bytes");
    for _ in 0..20 {
        buffer.extend_from_slice(&[7; 5000]).expect("there is room");
    }
    assert_eq!((buffer.len(), buffer.capacity(), request.stats().refused), (100_000, 100_000, 0));
    assert_eq!(request.last_refusal(), None);
    buffer.extend_from_slice(&[7]).expect_err("one too many");
    assert_eq!((buffer.len(), request.stats().refused), (100_000, 1));
}

#[test]
fn a_buffer_is_pushed_to_cleared_and_shrunk() {
    let mut buffer = Buffer::with_capacity(2).unwrap();
    (0..100).for_each(|byte| buffer.push(byte).unwrap());
    assert!(buffer.iter().copied().eq(0..100));
    buffer.reserve(1000).unwrap();
    buffer.shrink_to_fit().unwrap();
    assert_eq!((buffer.len(), buffer.capacity(), buffer[99]), (100, 100, 99));
    buffer.clear();
    assert_eq!((buffer.len(), buffer.capacity()), (0, 100));
    buffer.shrink_to_fit().unwrap();
    assert_eq!((buffer.len(), buffer.capacity()), (0, 0));
    buffer.shrink_to_fit().unwrap();
    buffer.push(7).unwrap();
    assert_eq!(*buffer, [7]);
}

#[test]
fn a_buffer_that_shrinks_is_credited_and_gives_its_block_back() {
    let own = ctxalloc::request().root().begin().unwrap();
    let mut buffer = Buffer::with_capacity_in(own.handler(), 10_000).unwrap();
    buffer.push(1).unwrap();
    buffer.shrink_to_fit().unwrap();
    assert_eq!((own.stats().live_bytes, own.stats().live_blocks), (1, 1));
    buffer.clear();
    buffer.shrink_to_fit().unwrap();
    assert_eq!((own.stats().live_bytes, own.stats().live_blocks), (0, 0));
}

#[test]
fn what_is_refused_to_a_buffer_leaves_it_as_it_was() {
    use ctxalloc::strategy::{Faulty, Pool};
    let faulty =
        ctxalloc::register("every second is refused to a buffer", Faulty::every(Pool::new(), 2).unwrap()).unwrap();
    let mut buffer = Buffer::with_capacity_in(faulty, 3).unwrap();
    buffer.extend_from_slice(b"abc").unwrap();
    let limited = ctxalloc::request().root().limit_bytes(3).begin().unwrap();
    let mut full = Buffer::copy_from_slice_in(limited.handler(), b"abc").unwrap();
    let start = full.as_ptr();
    assert!(matches!(full.push(b'd'), Err(Error::BudgetExceeded { .. })));
    assert_eq!((&*full, full.capacity(), full.as_ptr()), (&b"abc"[..], 3, start));

    buffer.truncate(2);
    let start = buffer.as_ptr();
    assert!(matches!(buffer.shrink_to_fit(), Err(Error::OutOfMemory { .. })));
    assert_eq!((&*buffer, buffer.capacity(), buffer.as_ptr()), (&b"ab"[..], 3, start));
}

#[cfg(feature = "bytes")]
#[test]
fn bytes_are_put_into_the_room_of_a_buffer_and_no_further() {
    use bytes::BufMut;
    let mut buffer = Buffer::with_capacity(10).unwrap();
    assert_eq!(buffer.remaining_mut(), 10);
    buffer.put_slice(b"abc");
    buffer.put_u32(0x0102_0304);
    assert_eq!((&*buffer, buffer.remaining_mut()), (&b"abc\x01\x02\x03\x04"[..], 3));
    assert_eq!(buffer.chunk_mut().len(), 3);
    let past = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| buffer.put_u32(5)));
    assert!(past.is_err());
    assert_eq!((buffer.len(), buffer.capacity()), (7, 10), "nothing was written, and it did not grow");
    buffer.clear();
    assert_eq!(buffer.remaining_mut(), 10);

    let mut none = Buffer::with_capacity(0).unwrap();
    assert_eq!((none.has_remaining_mut(), none.chunk_mut().len()), (false, 0));
    none.put_slice(b"");
}
