//! The functions of the header as symbols, for programs that link the library built without Python.

use super::forms::{Draft1, Draft2};
use super::list::c_functions;
use super::register::ExtrasInC;
use super::thread::OfThread;
use super::{VERSION, blocks, draft, error, hook, register, select};
use crate::handler::abi::PyDataMem_Handler;
use crate::handler::events::EventHook;
use std::ffi::{c_char, c_int, c_void};

type Struct = *const PyDataMem_Handler;

/// The selection that the functions are over.
type S = OfThread;

/// Makes a symbol of each function. Their duties are in the header.
macro_rules! symbols {
    ($($field:ident $symbol:ident($($argument:ident: $kind:ty),*) -> $answer:ty = $function:expr;)*) => {$(
        /// # Safety
        /// - as `include/ctxalloc.h` says.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $symbol($($argument: $kind),*) -> $answer {
            #[allow(unused_unsafe, reason = "some are safe, whatever they are given")]
            // SAFETY: the caller keeps what the header asks for, which is what the function asks for.
            unsafe { $function($($argument),*) }
        }
    )*};
}
c_functions!(symbols);

/// The library's version.
#[unsafe(no_mangle)]
extern "C" fn ctxalloc_version() -> *const c_char {
    VERSION
}
