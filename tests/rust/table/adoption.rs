//! Adopting: handlers that somebody else made, from C function pointers to whole structs.

use crate::support::errors::{error, refusal};
use ctxalloc::handler::abi::{Functions, PyDataMem_Handler, PyDataMemAllocator};
use ctxalloc::handler::{Extras, Reach, adopt, handler_at};
use ctxalloc::{Buffer, Error, Handler, handler, register};
use std::ffi::{c_char, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

unsafe extern "C" fn malloc(ctx: *mut c_void, size: usize) -> *mut c_void {
    count(ctx);
    // SAFETY: any size will do.
    unsafe { libc::malloc(size) }
}

unsafe extern "C" fn calloc(ctx: *mut c_void, nelem: usize, elsize: usize) -> *mut c_void {
    count(ctx);
    // SAFETY: any sizes will do.
    unsafe { libc::calloc(nelem, elsize) }
}

unsafe extern "C" fn realloc(ctx: *mut c_void, ptr: *mut c_void, new_size: usize) -> *mut c_void {
    count(ctx);
    // SAFETY: the caller's promises are the same.
    unsafe { libc::realloc(ptr, new_size) }
}

unsafe extern "C" fn free(ctx: *mut c_void, ptr: *mut c_void, _size: usize) {
    count(ctx);
    // SAFETY: the caller's promises are the same.
    unsafe { libc::free(ptr) }
}

fn count(ctx: *mut c_void) {
    // SAFETY: `foreign` puts an immortal counter there.
    let calls = unsafe { &*ctx.cast::<AtomicUsize>() };
    calls.fetch_add(1, Ordering::SeqCst);
}

fn name_field(name: &[u8]) -> [c_char; 127] {
    let mut field = [0; 127];
    for (place, &byte) in field.iter_mut().zip(name) {
        *place = byte as c_char;
    }
    field
}

struct Kept(#[expect(dead_code, reason = "there to be seen by leak checkers")] *const PyDataMem_Handler);

// SAFETY: an address that nobody follows.
unsafe impl Send for Kept {}

static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// An immortal struct as C code would make it, and the counter of its calls.
fn foreign(name: &[u8], version: u8) -> (NonNull<PyDataMem_Handler>, &'static AtomicUsize) {
    let calls: &'static AtomicUsize = Box::leak(Box::default());
    let allocator = PyDataMemAllocator {
        ctx: std::ptr::from_ref(calls).cast_mut().cast(),
        malloc: Some(malloc),
        calloc: Some(calloc),
        realloc: Some(realloc),
        free: Some(free),
    };
    let c_struct = Box::leak(Box::new(PyDataMem_Handler { name: name_field(name), version, allocator }));
    // Also where it is refused: a leak checker sees that it is kept on purpose.
    KEPT.lock().expect("nobody panicked").push(Kept(c_struct));
    (NonNull::from(c_struct), calls)
}

/// Adopts a struct, whose own functions may be called from any thread.
fn adopt_own(c_struct: NonNull<PyDataMem_Handler>, name: Option<&str>) -> Result<Handler, Error> {
    let extras = Extras::new().with_alignment(16);
    // SAFETY: an immortal struct; its functions keep C's contract; the C heap aligns to 16.
    unsafe { adopt(c_struct, Reach::AnyThread, name, extras) }
}

#[test]
fn a_foreign_handler_is_adopted_under_its_own_name_and_works() {
    let (c_struct, calls) = foreign(b"adopted", 7);
    let adopted = adopt_own(c_struct, None).expect("a good struct");
    assert_eq!((&*adopted.name(), adopted.version(), adopted.alignment()), ("adopted", 7, 16));
    assert_eq!(adopted.as_ptr(), c_struct.as_ptr().cast_const(), "NumPy sees the struct itself");
    assert_eq!((handler("adopted"), handler_at(c_struct.as_ptr())), (Some(adopted), Some(adopted)));
    let mut buffer = Buffer::zeroed_in(adopted, 10).expect("10 bytes");
    buffer.resize(100).expect("100 bytes");
    assert_eq!(&buffer[..], &[0; 100]);
    drop(buffer);
    assert_eq!(calls.load(Ordering::SeqCst), 3, "calloc, realloc, free");
    assert!(adopted.description().starts_with("foreign handler at 0x"), "{}", adopted.description());
}

#[test]
fn a_foreign_handler_is_adopted_under_an_alias() {
    let (c_struct, _) = foreign(b"ambiguous", 1);
    let adopted = adopt_own(c_struct, Some("alias")).expect("a good struct");
    assert_eq!((&*adopted.name(), handler("alias"), handler("ambiguous")), ("alias", Some(adopted), None));
}

#[test]
fn the_same_struct_adopted_twice_is_the_same_handler() {
    let (c_struct, _) = foreign(b"twin", 1);
    let first = adopt_own(c_struct, None).expect("a good struct");
    assert_eq!(adopt_own(c_struct, None), Ok(first));
    assert_eq!(adopt_own(c_struct, Some("twin")), Ok(first));
    assert_eq!(refusal(adopt_own(c_struct, Some("another"))), error!(AlreadyAdopted { name: "twin" }));
    assert_eq!(handler("another"), None);
}

#[test]
fn a_struct_under_an_alias_is_found_again_without_one() {
    let (c_struct, _) = foreign(b"own name", 1);
    let first = adopt_own(c_struct, Some("given name")).expect("a good struct");
    assert_eq!(adopt_own(c_struct, None), Ok(first));
    assert_eq!(refusal(adopt_own(c_struct, Some("own name"))), error!(AlreadyAdopted { name: "given name" }));
}

#[test]
fn a_handler_of_our_own_can_be_adopted_which_changes_nothing() {
    let ours = register("ours already", ctxalloc::strategy::System).expect("a new name");
    let c_struct = NonNull::new(ours.as_ptr().cast_mut()).expect("not NULL");
    assert_eq!(adopt_own(c_struct, None), Ok(ours));
    assert_eq!(refusal(adopt_own(c_struct, Some("not ours"))), error!(AlreadyAdopted { name: "ours already" }));
}

#[test]
fn another_struct_with_a_taken_name_is_refused() {
    let (first, _) = foreign(b"popular", 1);
    let (second, _) = foreign(b"popular", 1);
    adopt_own(first, None).expect("a good struct");
    assert_eq!(refusal(adopt_own(second, None)), error!(NameTaken { name: "popular" }));
    assert_eq!(refusal(adopt_own(second, Some("system"))), error!(NameTaken { name: "system" }));
    assert_eq!(handler_at(second.as_ptr()), None);
    adopt_own(second, Some("less popular")).expect("a name of its own");
}

#[test]
fn a_struct_that_lacks_a_function_is_refused_by_its_name() {
    for missing in ["malloc", "calloc", "realloc", "free"] {
        let (mut c_struct, _) = foreign(b"incomplete", 1);
        // SAFETY: not adopted yet, so it may still change.
        let allocator = unsafe { &mut c_struct.as_mut().allocator };
        match missing {
            "malloc" => allocator.malloc = None,
            "calloc" => allocator.calloc = None,
            "realloc" => allocator.realloc = None,
            _ => allocator.free = None,
        }
        let refused = error!(FunctionMissing { handler: "incomplete", function: missing });
        assert_eq!(Functions::of(allocator).map(drop), Err(missing));
        assert_eq!(refusal(adopt_own(c_struct, None)), refused);
        assert!(adopt_own(c_struct, None).unwrap_err().to_string().contains(missing));
        assert_eq!((handler("incomplete"), handler_at(c_struct.as_ptr())), (None, None));
    }
}

#[test]
fn a_struct_whose_name_cannot_be_read_needs_an_alias() {
    let mut endless = [b'x'; 127];
    for unreadable in [&endless[..], b"\xff\xfe no utf-8"] {
        let (c_struct, _) = foreign(unreadable, 1);
        assert_eq!(adopt_own(c_struct, None), Err(Error::NameUnreadable));
        assert_eq!(handler_at(c_struct.as_ptr()), None);
    }
    let (nameless, _) = foreign(b"", 1);
    assert_eq!(adopt_own(nameless, None), Err(Error::NameEmpty));
    endless[0] = b'y';
    let (c_struct, _) = foreign(&endless, 1);
    assert_eq!(adopt_own(c_struct, Some("readable")).expect("an alias").name(), "readable");
}

#[test]
fn a_name_that_fills_the_field_but_for_its_nul_is_readable() {
    let longest = [b'z'; 126];
    let (c_struct, _) = foreign(&longest, 1);
    assert_eq!(adopt_own(c_struct, None).expect("126 bytes and a NUL").name().len(), 126);
}

#[test]
fn a_bad_alias_is_refused() {
    let (c_struct, _) = foreign(b"good in itself", 1);
    assert_eq!(adopt_own(c_struct, Some("")), Err(Error::NameEmpty));
    assert!(matches!(adopt_own(c_struct, Some("a\0b")), Err(Error::NameHasNul { position: 1, .. })));
    assert!(matches!(adopt_own(c_struct, Some(&"x".repeat(127))), Err(Error::NameTooLong { length_bytes: 127, .. })));
    assert_eq!(handler_at(c_struct.as_ptr()), None);
}

#[test]
fn an_alignment_that_is_no_power_of_two_is_refused() {
    let (c_struct, _) = foreign(b"crooked", 1);
    for alignment in [0, 3, 24, (1 << 30) + 1, 1 << 31] {
        // SAFETY: `foreign` leaks a good struct, and nothing is allocated from it.
        let refused = unsafe { adopt(c_struct, Reach::AnyThread, None, Extras::new().with_alignment(alignment)) };
        assert_eq!(refusal(refused), error!(BadAlignment { align: alignment, min: 1, max: 1 << 30 }));
    }
    assert_eq!(handler("crooked"), None);
}

#[test]
fn of_racing_adoptions_of_one_struct_all_get_the_same_handler() {
    let threads = crate::support::rounds(12, 3);
    let (c_struct, _) = foreign(b"adopted by many", 1);
    let c_struct = c_struct.as_ptr().expose_provenance();
    let barrier = Arc::new(Barrier::new(threads));
    let adopters: Vec<_> = (0..threads)
        .map(|_| {
            let barrier = Arc::clone(&barrier);
            thread::spawn(move || {
                let c_struct = NonNull::new(std::ptr::with_exposed_provenance_mut(c_struct)).expect("not NULL");
                barrier.wait();
                adopt_own(c_struct, None)
            })
        })
        .collect();
    let outcomes: Vec<_> = adopters.into_iter().map(|adopter| adopter.join().expect("no panic")).collect();
    assert!(outcomes.iter().all(|outcome| outcome.is_ok() && *outcome == outcomes[0]), "{outcomes:?}");
}

/// A realloc that claims to have served what nothing can serve, having freed the old block on the way.
#[test]
fn an_impossible_size_never_reaches_a_foreign_handler() {
    let (c_struct, calls) = foreign(b"believes anything", 1);
    let adopted = adopt_own(c_struct, None).expect("a good struct");
    for impossible in [isize::MAX as usize + 1, usize::MAX] {
        let refused = error!(OutOfMemory { handler: "believes anything", requested_bytes: impossible });
        assert_eq!(refusal(adopted.allocate(impossible)), refused);
        assert_eq!(refusal(adopted.allocate_zeroed(impossible)), refused);
        assert_eq!(calls.load(Ordering::SeqCst), 0);
        let mut buffer = Buffer::copy_from_slice_in(adopted, b"kept").expect("4 bytes");
        assert_eq!(refusal(buffer.resize(impossible)), refused);
        assert_eq!(&buffer[..], b"kept");
        assert_eq!(calls.swap(0, Ordering::SeqCst), 1, "the malloc of the buffer");
        drop(buffer);
        calls.store(0, Ordering::SeqCst);
    }
}

#[test]
fn zero_bytes_never_reach_a_foreign_handler() {
    unsafe extern "C" fn malloc_or_null(ctx: *mut c_void, size: usize) -> *mut c_void {
        // SAFETY: passed on.
        if size == 0 { null_mut() } else { unsafe { malloc(ctx, size) } }
    }
    let (mut c_struct, _) = foreign(b"nothing for nothing", 1);
    // SAFETY: not adopted yet, so it may still change.
    unsafe { c_struct.as_mut() }.allocator.malloc = Some(malloc_or_null);
    let adopted = adopt_own(c_struct, None).expect("a good struct");
    let block = adopted.allocate(0).expect("C allows NULL for nothing; a handler is asked for a byte");
    // SAFETY: a live block of this handler; on success the old pointer is not used again.
    let block = unsafe { adopted.resize(block, 0) }.expect("one byte");
    // SAFETY: the block as it was resized, live.
    unsafe { adopted.release(block, 0) };
    let block = adopted.allocate_zeroed(0).expect("one byte");
    // SAFETY: a live block of this handler.
    unsafe { adopted.release(block, 0) };
}
