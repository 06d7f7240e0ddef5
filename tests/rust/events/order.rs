//! The order of ends and beginnings at one address: what ends there is heard before what begins there.

use super::{Hearing, structure};
use ctxalloc::handler::abi::PyDataMemAllocator;
use ctxalloc::handler::{Extras, Reach, adopt};
use ctxalloc::strategy::Strategy;
use ctxalloc::{Handler, register};
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// Two blocks, and a rendezvous in the moment in which one of them is free but its end is not over: whoever gives it up
/// waits there until another thread has had it.
struct TwoBlocks {
    blocks: [UnsafeCell<[u8; 64]>; 2],
    taken: [AtomicBool; 2],
    given_up: Barrier,
    taken_again: Barrier,
}

// SAFETY: a block belongs to whoever took it.
unsafe impl Sync for TwoBlocks {}

impl TwoBlocks {
    fn new() -> &'static Self {
        Box::leak(Box::new(Self {
            blocks: [const { UnsafeCell::new([0; 64]) }; 2],
            taken: [const { AtomicBool::new(false) }; 2],
            given_up: Barrier::new(2),
            taken_again: Barrier::new(2),
        }))
    }

    fn take(&self) -> *mut c_void {
        let free = self.taken.iter().position(|taken| !taken.swap(true, Ordering::SeqCst));
        free.map_or(null_mut(), |free| self.blocks[free].get().cast())
    }

    fn give_up(&self, block: *mut c_void) {
        let which = self.blocks.iter().position(|own| std::ptr::eq(own.get().cast(), block)).expect("one of two");
        self.taken[which].store(false, Ordering::SeqCst);
        if !block.is_null() && thread::current().name() == Some("first") {
            self.given_up.wait();
            self.taken_again.wait();
        }
    }

    /// What another thread does in that moment.
    fn take_in_between(&self, handler: Handler) -> usize {
        self.given_up.wait();
        let block = handler.allocate(10).expect("given up just now");
        self.taken_again.wait();
        block.addr().get()
    }
}

#[derive(Debug)]
struct ByRust(&'static TwoBlocks);

impl fmt::Debug for TwoBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TwoBlocks")
    }
}

// SAFETY: blocks of 64 bytes, aligned to 1, each of one owner.
unsafe impl Strategy for ByRust {
    fn alignment(&self) -> usize {
        1
    }

    fn allocate(&self, _size_bytes: usize) -> Option<NonNull<u8>> {
        NonNull::new(self.0.take().cast())
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        self.allocate(size_bytes)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        let moved = self.allocate(new_size_bytes);
        self.0.give_up(block.as_ptr().cast());
        moved
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        self.0.give_up(block.as_ptr().cast());
    }
}

/// # Safety
/// - `ctx` is a `TwoBlocks`.
unsafe fn two<'a>(ctx: *mut c_void) -> &'a TwoBlocks {
    // SAFETY: the caller passes a `TwoBlocks`; the tests leak each of them.
    unsafe { &*ctx.cast() }
}

unsafe extern "C" fn take(ctx: *mut c_void, _: usize) -> *mut c_void {
    // SAFETY: the context of these functions. So below.
    unsafe { two(ctx) }.take()
}

unsafe extern "C" fn take_zeroed(ctx: *mut c_void, _: usize, _: usize) -> *mut c_void {
    // SAFETY: these functions are registered with a `TwoBlocks` as their context.
    unsafe { two(ctx) }.take()
}

unsafe extern "C" fn move_on(ctx: *mut c_void, block: *mut c_void, _: usize) -> *mut c_void {
    // SAFETY: these functions are registered with a `TwoBlocks` as their context.
    let two = unsafe { two(ctx) };
    let moved = two.take();
    two.give_up(block);
    moved
}

unsafe extern "C" fn give_up(ctx: *mut c_void, block: *mut c_void, _: usize) {
    // SAFETY: these functions are registered with a `TwoBlocks` as their context.
    unsafe { two(ctx) }.give_up(block);
}

/// A handler over the two blocks: a strategy, or a foreign struct.
fn over(two: &'static TwoBlocks, name: &str, foreign: bool) -> Handler {
    if !foreign {
        return register(name, ByRust(two)).expect("a new name");
    }
    let mut structure = structure(name);
    structure.allocator = PyDataMemAllocator {
        ctx: std::ptr::from_ref(two).cast_mut().cast(),
        malloc: Some(take),
        calloc: Some(take_zeroed),
        realloc: Some(move_on),
        free: Some(give_up),
    };
    let c_struct = NonNull::from(Box::leak(Box::new(structure)));
    // SAFETY: an immortal struct whose functions keep C's contract.
    unsafe { adopt(c_struct, Reach::AnyThread, None, Extras::default()) }.expect("a good struct")
}

/// Runs `end` on a thread that gives its block up in the middle of it; answers what another thread got there.
fn while_another_takes_it(two: &'static TwoBlocks, handler: Handler, end: impl FnOnce() + Send + 'static) -> usize {
    let first = thread::Builder::new().name("first".into()).spawn(end).expect("a thread");
    let taken = two.take_in_between(handler);
    first.join().expect("no panic");
    taken
}

#[test]
fn a_free_is_heard_before_anybody_else_can_have_the_address() {
    for (name, foreign) in [("freed by Rust", false), ("freed by C", true)] {
        let two = TwoBlocks::new();
        let hearing = Hearing::begin();
        let handler = over(two, name, foreign);
        let block = handler.allocate(7).expect("one of two").expose_provenance().get();
        let again = while_another_takes_it(two, handler, move || {
            let block = NonNull::new(std::ptr::with_exposed_provenance_mut(block)).expect("a block");
            // SAFETY: a live block of this handler, given up.
            unsafe { handler.release(block, 7) };
        });
        assert_eq!(again, block);
        assert_eq!(hearing.heard(), [(0, block, 7), (block, 0, 0), (0, block, 10)], "{name}");
    }
}

#[test]
fn a_resize_is_heard_before_what_others_do_at_the_address_it_left() {
    for (name, foreign) in [("resized by Rust", false), ("resized by C", true)] {
        let two = TwoBlocks::new();
        let hearing = Hearing::begin();
        let handler = over(two, name, foreign);
        let block = handler.allocate(7).expect("one of two").expose_provenance().get();
        static MOVED: AtomicUsize = AtomicUsize::new(0);
        let again = while_another_takes_it(two, handler, move || {
            let block = NonNull::new(std::ptr::with_exposed_provenance_mut(block)).expect("a block");
            // SAFETY: a live block of this handler, given up.
            let new = unsafe { handler.resize(block, 9) }.expect("the other one");
            MOVED.store(new.addr().get(), Ordering::SeqCst);
        });
        let moved = MOVED.load(Ordering::SeqCst);
        assert_eq!(again, block);
        assert_eq!(hearing.heard(), [(0, block, 7), (block, moved, 9), (0, block, 10)], "{name}");
    }
}
