//! The event hook, and copy functions. The hook is the process's: the tests take turns.
#![allow(unsafe_code, reason = "hooks and foreign structs are C")]

#[path = "support/c_heap.rs"]
mod c_heap;
#[path = "support/child.rs"]
mod child;

#[path = "support/errors.rs"]
mod errors;

use c_heap::{calloc, free, malloc, realloc};
use child::fate_of;
use ctxalloc::handler::abi::{Copies, PyDataMem_Handler, PyDataMemAllocator};
use ctxalloc::handler::events::{Hook, MAX_WATCHED, set_event_hook, unwatched};
use ctxalloc::handler::{Extras, Reach, adopt};
use ctxalloc::strategy::Strategy;
use ctxalloc::{Buffer, Handler, handler, register, request, scope};
use errors::{error, refusal};
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_void};
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};
use std::thread;

/// `(inp, outp, size)`, addresses as numbers.
type Event = (usize, usize, usize);

static HEARD: Mutex<Vec<Event>> = Mutex::new(Vec::new());
static ALLOCATING: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn hear(inp: *mut c_void, outp: *mut c_void, size: usize, user_data: *mut c_void) {
    assert!(std::ptr::eq(user_data.cast_const().cast(), &raw const HEARD));
    HEARD.lock().unwrap_or_else(PoisonError::into_inner).push((inp.addr(), outp.addr(), size));
    if ALLOCATING.load(Ordering::SeqCst) > 0 {
        let own = Buffer::zeroed_in(handler("pool").expect("built in"), 32).expect("32 bytes");
        drop(own);
    }
}

fn hook() -> Hook {
    Hook::new(hear, (&raw const HEARD).cast_mut().cast())
}

/// The turn of one test: nobody else sets a hook meanwhile.
struct Turn {
    _lock: MutexGuard<'static, ()>,
}

impl Turn {
    fn take() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        Self { _lock: TURN.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    fn hear(self) -> Hearing {
        HEARD.lock().unwrap_or_else(PoisonError::into_inner).clear();
        // SAFETY: a function of this program, which may be called on any thread.
        assert!(unsafe { set_event_hook(Some(hook())) }.is_none());
        Hearing(Some(self))
    }
}

/// Hears everything until its end.
struct Hearing(Option<Turn>);

impl Hearing {
    fn begin() -> Self {
        Turn::take().hear()
    }

    fn end(mut self) -> Turn {
        self.0.take().expect("there until now")
    }

    /// What was heard since the last time.
    fn heard(&self) -> Vec<Event> {
        std::mem::take(&mut HEARD.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Hearing {
    fn drop(&mut self) {
        // SAFETY: no hook is set, so nothing is promised of one.
        let before = unsafe { set_event_hook(None) }.expect("the hook that `hear` set");
        assert!(std::ptr::fn_addr_eq(before.function, hook().function) && before.user_data == hook().user_data);
    }
}

// ---- a foreign struct over the C heap

fn structure(name: &str) -> PyDataMem_Handler {
    let mut field: [c_char; 127] = [0; 127];
    for (place, byte) in field.iter_mut().zip(name.bytes()) {
        *place = byte as c_char;
    }
    let allocator = PyDataMemAllocator {
        ctx: null_mut(),
        malloc: Some(malloc),
        calloc: Some(calloc),
        realloc: Some(realloc),
        free: Some(free),
    };
    PyDataMem_Handler { name: field, version: 1, allocator }
}

fn adopted(name: &str, copies: Copies) -> Handler {
    let c_struct = NonNull::from(Box::leak(Box::new(structure(name))));
    // SAFETY: an immortal struct whose functions are the C heap's.
    unsafe { adopt(c_struct, Reach::AnyThread, None, Extras::new().with_alignment(16).with_copies(copies)) }
        .expect("a good struct")
}

/// What NumPy would call.
fn by_struct(handler: Handler) -> (*mut c_void, unsafe extern "C" fn(*mut c_void, *mut c_void, usize)) {
    // SAFETY: immortal; read as NumPy reads it.
    let allocator = unsafe { (*handler.as_ptr()).allocator };
    let malloc = allocator.malloc.expect("complete");
    // SAFETY: the context belongs to the function.
    (unsafe { malloc(allocator.ctx, 70) }, allocator.free.expect("complete"))
}

fn of_one_buffer(handler: Handler, hearing: &Hearing) {
    let mut buffer = Buffer::zeroed_in(handler, 100).expect("100 bytes");
    let first = buffer.as_ptr().addr();
    buffer.resize(5000).expect("5000 bytes");
    let second = buffer.as_ptr().addr();
    drop(buffer);
    assert_eq!(hearing.heard(), [(0, first, 100), (first, second, 5000), (second, 0, 0)], "{handler}");
}

#[test]
fn the_hook_hears_of_every_block_once() {
    let hearing = Hearing::begin();
    for name in ["system", "aligned64", "pool", "tracked"] {
        of_one_buffer(handler(name).expect("built in"), &hearing);
    }
    of_one_buffer(adopted("heard while it enters", Copies::NONE), &hearing);
    let lease = request().begin().expect("a slot");
    of_one_buffer(lease.handler(), &hearing);
}

#[test]
fn the_hook_hears_a_foreign_struct_which_is_as_before_without_it() {
    let turn = Turn::take();
    let handler = adopted("heard through its struct", Copies::NONE);
    let (without_hook, own_free) = by_struct(handler);
    let hearing = turn.hear();
    let (block, free_and_tell) = by_struct(handler);
    assert!(!std::ptr::fn_addr_eq(own_free, free_and_tell));
    assert_eq!(hearing.heard(), [(0, block.addr(), 70)]);
    // SAFETY: a live block of this handler, made before the hook.
    unsafe { free_and_tell(null_mut(), without_hook, 70) };
    assert_eq!(hearing.heard(), [(without_hook.addr(), 0, 0)]);
    of_one_buffer(handler, &hearing);
    let _turn = hearing.end();
    let (another, free_again) = by_struct(handler);
    assert!(std::ptr::fn_addr_eq(own_free, free_again), "bit by bit as it was");
    // SAFETY: live blocks of this handler, one of them made with the hook.
    unsafe { own_free(null_mut(), another, 70) };
    // SAFETY: a live block of this handler.
    unsafe { own_free(null_mut(), block, 70) };
}

#[test]
fn a_refusal_is_heard_and_free_of_null_is_not() {
    let hearing = Hearing::begin();
    let pool = handler("pool").expect("built in");
    // SAFETY: immortal.
    let allocator = unsafe { (*pool.as_ptr()).allocator };
    // SAFETY: the context belongs to the function, here and below.
    let refused = unsafe { allocator.malloc.expect("complete")(allocator.ctx, usize::MAX) };
    assert!(refused.is_null());
    // SAFETY: NULL may be freed.
    unsafe { allocator.free.expect("complete")(allocator.ctx, null_mut(), 10) };
    assert_eq!(hearing.heard(), [(0, 0, usize::MAX)]);
}

#[test]
fn what_the_hook_allocates_is_not_heard() {
    let hearing = Hearing::begin();
    ALLOCATING.store(1, Ordering::SeqCst);
    drop(Buffer::zeroed_in(handler("system").expect("built in"), 300).expect("300 bytes"));
    ALLOCATING.store(0, Ordering::SeqCst);
    let heard = hearing.heard();
    assert_eq!((heard.len(), heard[0].2), (2, 300), "made and freed, and nothing of 32 bytes: {heard:?}");
}

#[test]
fn threads_are_heard_while_the_hook_comes_and_goes() {
    let pool = handler("pool").expect("built in");
    let foreign = adopted("heard by many", Copies::NONE);
    for _ in 0..20 {
        let hearing = Hearing::begin();
        let threads: Vec<_> = (0..4)
            .map(|n| {
                thread::spawn(move || {
                    for i in 1..200 {
                        scope(if (i + n) % 2 == 0 { pool } else { foreign }, || Buffer::zeroed(i))
                            .expect("a few bytes");
                    }
                })
            })
            .collect();
        let hearing = hearing.end().hear();
        for thread in threads {
            thread.join().expect("no panic");
        }
        let heard = hearing.heard();
        assert!(heard.iter().all(|&(inp, outp, size)| (inp == 0) == (size > 0) && (inp == 0) != (outp == 0)));
    }
}

#[test]
fn a_struct_that_cannot_be_written_to_is_named_and_works() {
    // A page that is read-only by the time the hook is set.
    // SAFETY: a new mapping.
    let page = unsafe {
        libc::mmap(null_mut(), 4096, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    let own: *mut PyDataMem_Handler = page.cast();
    // SAFETY: room for a struct, nobody else's.
    unsafe { own.write(structure("in a read-only page")) };
    // SAFETY: our own page, never written to again.
    assert_eq!(unsafe { libc::mprotect(page, 4096, libc::PROT_READ) }, 0);
    let c_struct = NonNull::new(own).expect("mapped");
    // SAFETY: an immortal struct whose functions are the C heap's.
    let handler = unsafe { adopt(c_struct, Reach::AnyThread, None, Extras::default()) }.expect("a good struct");
    let turn = Turn::take();
    assert!(unwatched().is_empty(), "there is no hook");
    let hearing = turn.hear();
    assert_eq!(unwatched(), ["in a read-only page"]);
    let (block, free) = by_struct(handler);
    // SAFETY: a live block of this handler.
    unsafe { free(null_mut(), block, 70) };
    assert_eq!(hearing.heard(), []);
}

#[test]
fn past_the_most_that_can_be_watched_handlers_work_unheard() {
    fate_of("child_past_the_most").ended_well();
}

#[test]
#[ignore = "a child of the test above: it takes all there are"]
fn child_past_the_most() {
    let all: Vec<_> = (0..=MAX_WATCHED).map(|n| adopted(&format!("one of many {n}"), Copies::NONE)).collect();
    let hearing = Hearing::begin();
    let deaf = unwatched();
    let last = all[MAX_WATCHED];
    assert!(deaf.contains(&last.name()), "{deaf:?}");
    drop(Buffer::zeroed_in(last, 10).expect("10 bytes"));
    assert_eq!(hearing.heard(), []);
}

// ---- the order of ends and beginnings at one address

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

// ---- copy functions

/// How many bytes went in, out, and across.
#[derive(Default)]
struct Copied([AtomicUsize; 3]);

impl Copied {
    fn copies(&'static self) -> Copies {
        Copies::new(std::ptr::from_ref(self).cast_mut().cast())
            .with_host2obj(copy::<0>)
            .with_obj2host(copy::<1>)
            .with_obj2obj(copy::<2>)
    }

    fn seen(&self) -> [usize; 3] {
        self.0.each_ref().map(|bytes| bytes.load(Ordering::SeqCst))
    }
}

unsafe extern "C" fn copy<const WHICH: usize>(
    ctx: *mut c_void,
    dst: *mut c_void,
    src: *const c_void,
    size: usize,
) -> *mut c_void {
    // SAFETY: the context that `copies` put there.
    let copied: &Copied = unsafe { &*ctx.cast() };
    copied.0[WHICH].fetch_add(size, Ordering::SeqCst);
    if size == 13 {
        return null_mut(); // unlucky
    }
    // SAFETY: passed on from the caller.
    unsafe { libc::memcpy(dst, src, size) }
}

#[test]
fn buffers_are_copied_by_the_handlers_own_functions() {
    let _turn = Turn::take(); // nobody hears of these
    let copied: &'static Copied = Box::leak(Box::default());
    let handler = adopted("copies by itself", copied.copies());
    let buffer = Buffer::copy_from_slice_in(handler, b"0123456789").expect("10 bytes");
    assert_eq!((&buffer[..], copied.seen()), (&b"0123456789"[..], [10, 0, 0]));
    let twin = buffer.try_clone().expect("10 bytes");
    assert_eq!((&twin[..], copied.seen()), (&b"0123456789"[..], [10, 0, 10]));
    let mut bytes = [0; 10];
    twin.copy_to_slice(&mut bytes).expect("10 bytes");
    assert_eq!((&bytes, copied.seen()), (b"0123456789", [10, 10, 10]));
    let empty = Buffer::copy_from_slice_in(handler, b"").expect("nothing").try_clone().expect("nothing");
    empty.copy_to_slice(&mut []).expect("nothing");
    assert_eq!(copied.seen(), [10, 10, 10], "nothing is not copied");
}

#[test]
fn a_copy_that_fails_is_an_error_and_nothing_is_lost() {
    let copied: &'static Copied = Box::leak(Box::default());
    let handler = adopted("fails over 13 bytes", copied.copies());
    let failed = |function| error!(CopyFailed { handler: "fails over 13 bytes", function: function, size_bytes: 13 });
    let hearing = Hearing::begin();
    assert_eq!(refusal(Buffer::copy_from_slice_in(handler, &[1; 13]).map(drop)), failed("host2obj"));
    let heard = hearing.heard();
    assert_eq!((heard.len(), heard[0].1), (2, heard[1].0), "the block was given back: {heard:?}");
    let buffer = Buffer::zeroed_in(handler, 13).expect("13 bytes");
    assert_eq!(refusal(buffer.try_clone().map(drop)), failed("obj2obj"));
    assert_eq!(refusal(buffer.copy_to_slice(&mut [0; 13])), failed("obj2host"));
    assert_eq!(&buffer[..], [0; 13]);
}

#[test]
fn without_functions_of_their_own_buffers_are_copied_all_the_same() {
    let _turn = Turn::take(); // as above
    let buffer = Buffer::copy_from_slice_in(handler("pool").expect("built in"), b"plain").expect("5 bytes");
    let mut bytes = [0; 5];
    buffer.try_clone().expect("5 bytes").copy_to_slice(&mut bytes).expect("5 bytes");
    assert_eq!(&bytes, b"plain");
}
