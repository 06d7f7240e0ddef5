//! Subscribers of `tracing` with a bug: one that panics, and one that allocates by the handler that it hears of. Events
//! are told from inside of allocators, so neither may cost a block.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, reason = "a test that unwraps nothing has failed")]
#![allow(unsafe_code, reason = "a strategy")]

#[path = "support/child.rs"]
mod child;

use child::{fate_of, killed_after};
use ctxalloc::strategy::{Pool, Strategy, Traced};
use ctxalloc::{Buffer, Handler, register, request, scope};
use std::ptr::NonNull;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber, subscriber};

/// Calls a function for each event, span and record of ours.
struct Buggy(fn());

impl Subscriber for Buggy {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("ctxalloc")
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        self.0();
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {
        self.0();
    }
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        self.0();
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
    fn try_close(&self, _: Id) -> bool {
        self.0();
        true
    }
}

/// Panics where it is asked for a block.
#[derive(Debug)]
struct Panics;

// SAFETY: there are no blocks.
unsafe impl Strategy for Panics {
    fn alignment(&self) -> usize {
        64
    }
    fn allocate(&self, _: usize) -> Option<NonNull<u8>> {
        panic!("a strategy")
    }
    unsafe fn resize(&self, _: NonNull<u8>, _: usize) -> Option<NonNull<u8>> {
        None
    }
    unsafe fn release(&self, _: NonNull<u8>) {}
}

fn filled(handler: Handler, byte: u8) -> Buffer {
    let mut buffer = Buffer::zeroed_in(handler, 100).unwrap();
    buffer.fill(byte);
    buffer
}

/// Everything that tells an event.
fn work(traced: Handler, panics: Handler) {
    let mut moved = filled(traced, 1);
    moved.resize(10_000).unwrap();
    let other = filled(traced, 2);
    assert!(moved[..100].iter().all(|&byte| byte == 1) && other.iter().all(|&byte| byte == 2), "one block, two owners");
    assert!(moved.resize(usize::MAX / 2).is_err());
    drop((moved, other));
    let (one, two) = (filled(traced, 1), filled(traced, 2));
    assert_ne!(one.as_ptr(), two.as_ptr(), "a block was freed twice");
    assert!(Buffer::zeroed_in(panics, 10).is_err());
    let limited = request().limit_bytes(100).begin().unwrap();
    assert!(limited.run(|| Buffer::zeroed(1000)).is_err());
    assert_eq!(limited.end().stats.refused, 1);
    #[cfg(target_os = "linux")]
    {
        let shared = register("shared", ctxalloc::strategy::SharedMemory).unwrap();
        let mut buffer = filled(shared, 3);
        assert!(buffer.resize(1 << 50).is_err(), "nobody has so much");
        assert!(buffer.iter().all(|&byte| byte == 3), "it is unchanged");
    }
}

#[test]
fn a_subscriber_that_panics_costs_nobody_a_block() {
    fate_of("child_whose_subscriber_panics").ended_well();
}

#[test]
#[ignore = "a child of a_subscriber_that_panics_costs_nobody_a_block"]
fn child_whose_subscriber_panics() {
    killed_after(60);
    let (traced, panics) = (register("traced", Traced::new(Pool::new())).unwrap(), register("bad", Panics).unwrap());
    subscriber::with_default(Buggy(|| panic!("a subscriber")), || work(traced, panics));
}

#[test]
fn a_subscriber_may_allocate_by_the_handler_it_hears_of() {
    fate_of("child_whose_subscriber_allocates").ended_well();
}

#[test]
#[ignore = "a child of a_subscriber_may_allocate_by_the_handler_it_hears_of"]
fn child_whose_subscriber_allocates() {
    killed_after(60);
    let (traced, panics) = (register("traced", Traced::new(Pool::new())).unwrap(), register("bad", Panics).unwrap());
    subscriber::with_default(Buggy(|| drop(Buffer::zeroed(10))), || {
        work(traced, panics);
        scope(panics, || assert!(Buffer::zeroed(10).is_err()));
    });
}
