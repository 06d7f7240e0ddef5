//! The functions of the header as symbols, for programs that link the library built without Python.

use super::forms::{Draft1, Draft2};
use super::register::ExtrasInC;
use super::thread::OfThread;
use super::{VERSION, blocks, draft, error, hook, register, select};
use crate::handler::abi::PyDataMem_Handler;
use crate::handler::events::EventHook;
use std::ffi::{c_char, c_int, c_void};

type Struct = *const PyDataMem_Handler;

/// `name(arguments) -> answer = function;`: each a symbol that calls it. Their duties stand in the header.
macro_rules! exported {
    ($($name:ident($($argument:ident: $kind:ty),*) -> $answer:ty = $function:expr;)*) => {$(
        /// # Safety
        /// - as `include/ctxalloc.h` says.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $kind),*) -> $answer {
            #[allow(unused_unsafe, reason = "some are safe, whatever they are given")]
            // SAFETY: the caller keeps what the header asks for, which is what the function asks for.
            unsafe { $function($($argument),*) }
        }
    )*};
}

exported! {
    ctxalloc_error_code() -> c_int = error::error_code;
    ctxalloc_error_message() -> *const c_char = error::error_message;
    ctxalloc_clear_error() -> () = error::clear;
    ctxalloc_register(handler: Struct, extras: *const ExtrasInC) -> Struct = register::register;
    ctxalloc_find(name: *const c_char) -> Struct = register::find;
    ctxalloc_default_handler() -> Struct = select::get_default;
    ctxalloc_set_handler(handler: Struct) -> Struct = select::set_handler::<OfThread>;
    ctxalloc_get_handler() -> Struct = select::get_handler::<OfThread>;
    ctxalloc_handler_name(handler: Struct) -> *const c_char = select::handler_name::<OfThread>;
    ctxalloc_handler_version(handler: Struct) -> c_int = select::handler_version::<OfThread>;
    ctxalloc_handler_alignment(handler: Struct) -> usize = select::handler_alignment::<OfThread>;
    ctxalloc_draft1_set_handler(draft: *const Draft1) -> *const Draft1 = draft::set_handler::<OfThread, Draft1>;
    ctxalloc_draft1_get_handler_name(block: *mut c_void) -> *const c_char = draft::get_handler_name::<OfThread>;
    ctxalloc_draft2_set_handler(draft: *const Draft2) -> *const Draft2 = draft::set_handler::<OfThread, Draft2>;
    ctxalloc_draft2_get_handler_name(block: *mut c_void) -> *const c_char = draft::get_handler_name::<OfThread>;
    ctxalloc_set_event_hook(hook: Option<EventHook>, user_data: *mut c_void, old_data: *mut *mut c_void)
        -> Option<EventHook> = hook::set_event_hook::<OfThread>;
    ctxalloc_new(size: usize) -> *mut c_void = blocks::new::<OfThread>;
    ctxalloc_new_zeroed(nelem: usize, elsize: usize) -> *mut c_void = blocks::new_zeroed::<OfThread>;
    ctxalloc_renew(block: *mut c_void, size: usize) -> *mut c_void = blocks::renew::<OfThread>;
    ctxalloc_free(block: *mut c_void) -> c_int = blocks::free;
    ctxalloc_block_handler(block: *mut c_void) -> Struct = blocks::block_handler;
    ctxalloc_copy_in(dst: *mut c_void, src: *const c_void, size: usize) -> c_int = blocks::copy_in;
    ctxalloc_copy_out(dst: *mut c_void, src: *const c_void, size: usize) -> c_int = blocks::copy_out;
    ctxalloc_copy(dst: *mut c_void, src: *const c_void, size: usize) -> c_int = blocks::copy;
}

/// The library's version.
#[unsafe(no_mangle)]
extern "C" fn ctxalloc_version() -> *const c_char {
    VERSION
}
