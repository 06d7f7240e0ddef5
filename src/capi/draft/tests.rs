//! `SetHandler` of a draft under requests, over the selection of this thread.

use super::super::error::{clear, error_code, error_message};
use super::super::forms::Draft1;
use super::super::thread::OfThread;
use super::super::view::MAX_REQUESTS;
use super::set_handler;
use crate::request::{Request, request};
use crate::scope::{current, set};
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::Mutex;

/// A draft over the C heap.
static HEAP: Draft1 = {
    unsafe extern "C" fn alloc(size: usize) -> *mut c_void {
        // SAFETY: malloc takes any size.
        unsafe { libc::malloc(size) }
    }
    unsafe extern "C" fn zeroed_alloc(nelem: usize, elsize: usize) -> *mut c_void {
        // SAFETY: calloc takes any sizes.
        unsafe { libc::calloc(nelem, elsize) }
    }
    unsafe extern "C" fn free(ptr: *mut c_void, _size: usize) {
        // SAFETY: the caller gives up a block of these functions.
        unsafe { libc::free(ptr) };
    }
    unsafe extern "C" fn realloc(ptr: *mut c_void, size: usize) -> *mut c_void {
        // SAFETY: the caller gives up a block of these functions.
        unsafe { libc::realloc(ptr, size) }
    }
    let mut name = [0; 128];
    (name[0], name[1]) = (b'd' as c_char, b'1' as c_char);
    Draft1 { name, alloc: Some(alloc), zeroed_alloc: Some(zeroed_alloc), free: Some(free), realloc: Some(realloc) }
};

fn select(draft: *const Draft1) -> *const Draft1 {
    // SAFETY: `HEAP`, or what this function gave.
    let before = unsafe { set_handler::<OfThread, Draft1>(draft) };
    assert!(!before.is_null() || error_code() == 0, "{:?}", error_code());
    before
}

/// Begins a request, and selects the draft under it; what was selected before it.
fn begun() -> (Request, *const Draft1) {
    let begun = request().begin().expect("no strategy of its own, and none around it");
    drop(set(begun.handler()));
    let before = select(&raw const HEAP);
    assert!(!before.is_null());
    (begun, before)
}

fn alloc(draft: *const Draft1, size: usize) -> *mut c_void {
    // SAFETY: a struct that `select` gave; its functions take any size.
    unsafe { (*draft).alloc.expect("complete")(size) }
}

fn free(draft: *const Draft1, block: *mut c_void) {
    // SAFETY: a struct that `select` gave, and a block that it made.
    unsafe { (*draft).free.expect("complete")(block, 0) };
}

fn message() -> String {
    // SAFETY: a C string of this thread's, which is read before the next call.
    unsafe { CStr::from_ptr(error_message()) }.to_string_lossy().into_owned()
}

/// Structs are recycled among requests, hence among the threads of these tests.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn any_number_of_requests_at_once_is_selected_again() {
    let _alone = ALONE.lock();
    let all: Vec<_> = (0..3 * MAX_REQUESTS).map(|_| begun()).collect();
    for (request, before) in &all {
        select(*before);
        assert_eq!(current(), request.handler());
    }
    let with_functions = all.iter().filter(|(request, before)| {
        let block = alloc(*before, 1000);
        assert_eq!(request.stats().live_bytes, if block.is_null() { 0 } else { 1000 });
        assert_eq!(block.is_null(), error_code() != 0, "the reason is kept");
        if block.is_null() {
            assert!(message().contains(&format!("'{}'", request.name())), "{}", message());
        }
        free(*before, block);
        clear();
        !block.is_null()
    });
    assert_eq!(with_functions.count(), MAX_REQUESTS);
}

#[test]
fn the_functions_of_a_struct_serve_its_own_request() {
    let _alone = ALONE.lock();
    // One after the other, many more than there are functions for.
    for _ in 0..3 * MAX_REQUESTS {
        let (request, before) = begun();
        let block = alloc(before, 1000);
        assert!(!block.is_null());
        assert_eq!(request.stats().live_bytes, 1000);
        free(before, block);
        assert_eq!(request.stats().live_bytes, 0);
    }
}

#[test]
fn a_struct_of_an_ended_request_selects_no_other() {
    let _alone = ALONE.lock();
    let (request, before) = begun();
    drop(request);
    for _ in 0..2 {
        // SAFETY: `select` gave the struct, and those live for ever.
        let refused = unsafe { set_handler::<OfThread, Draft1>(before) };
        assert!(refused.is_null());
        assert_ne!(error_code(), 0);
        assert!(message().contains("has ended and gives no more memory; begin"), "{}", message());
        assert_eq!(current().name(), "d1", "nothing has changed");
        assert_eq!(alloc(before, 10), null_mut());
        assert_eq!(error_code(), 2, "CTXALLOC_MEMORY_ERROR");
    }
}
