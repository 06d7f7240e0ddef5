//! The event hook, and copy functions. The hook is the process's: the tests take turns. `order` asks when it is called,
//! `copies` what copies a block.
#![allow(unsafe_code, reason = "hooks and foreign structs are C")]

#[path = "support/c_heap.rs"]
mod c_heap;
#[path = "support/child.rs"]
mod child;
#[path = "events/copies.rs"]
mod copies;
#[path = "support/errors.rs"]
mod errors;
#[path = "events/order.rs"]
mod order;

use c_heap::{calloc, free, malloc, realloc};
use child::fate_of;
use ctxalloc::handler::abi::{Copies, PyDataMem_Handler, PyDataMemAllocator};
use ctxalloc::handler::events::{Hook, MAX_WATCHED, set_event_hook, unwatched};
use ctxalloc::handler::{Extras, Reach, adopt};
use ctxalloc::{Buffer, Handler, handler, request, scope};
use std::ffi::{c_char, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
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
    // SAFETY: the struct of a registered handler is never freed or moved.
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
