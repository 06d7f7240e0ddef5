//! `ctxalloc_api` of the header: the functions in a table, for extension modules that find it in a capsule.
//!
//! Append-only: a newer ctxalloc serves an extension that was built for an older one. What cannot be done so gets
//! another [`ABI_VERSION`], and another name for the capsule's users to ask for.

use super::forms::{Draft1, Draft2};
use super::register::ExtrasInC;
use super::{Selection, VERSION, blocks, draft, error, hook, register, select};
use crate::handler::abi::PyDataMem_Handler;
use crate::handler::events::EventHook;
use std::ffi::{c_char, c_int, c_void};

/// `CTXALLOC_ABI_VERSION`.
const ABI_VERSION: u32 = 1;

type Struct = *const PyDataMem_Handler;

/// The table. The order is the header's, for ever.
#[repr(C)]
pub(crate) struct Api {
    abi_version: u32,
    size_bytes: u32,
    version: *const c_char,
    error_code: extern "C" fn() -> c_int,
    error_message: extern "C" fn() -> *const c_char,
    clear_error: extern "C" fn(),
    register: unsafe extern "C" fn(Struct, *const ExtrasInC) -> Struct,
    find: unsafe extern "C" fn(*const c_char) -> Struct,
    default_handler: extern "C" fn() -> Struct,
    set_handler: extern "C" fn(Struct) -> Struct,
    get_handler: extern "C" fn() -> Struct,
    handler_name: extern "C" fn(Struct) -> *const c_char,
    handler_version: extern "C" fn(Struct) -> c_int,
    handler_alignment: extern "C" fn(Struct) -> usize,
    draft1_set_handler: unsafe extern "C" fn(*const Draft1) -> *const Draft1,
    draft1_get_handler_name: unsafe extern "C" fn(*mut c_void) -> *const c_char,
    draft2_set_handler: unsafe extern "C" fn(*const Draft2) -> *const Draft2,
    draft2_get_handler_name: unsafe extern "C" fn(*mut c_void) -> *const c_char,
    set_event_hook: unsafe extern "C" fn(Option<EventHook>, *mut c_void, *mut *mut c_void) -> Option<EventHook>,
    new: extern "C" fn(usize) -> *mut c_void,
    new_zeroed: extern "C" fn(usize, usize) -> *mut c_void,
    renew: extern "C" fn(*mut c_void, usize) -> *mut c_void,
    free: extern "C" fn(*mut c_void) -> c_int,
    block_handler: extern "C" fn(*mut c_void) -> Struct,
    copy_in: unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> c_int,
    copy_out: unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> c_int,
    copy: unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> c_int,
    python: PythonFunctions,
}

/// Those that there are with Python only. Objects are `PyObject *`.
#[repr(C)]
pub(crate) struct PythonFunctions {
    /// Sets the Python exception for the last error, where the thread is attached.
    pub(crate) raise: unsafe extern "C" fn(),
    /// The handler of an array.
    pub(crate) handler_of: unsafe extern "C" fn(*mut c_void) -> *const PyDataMem_Handler,
    /// A handler's capsule, a new reference.
    pub(crate) capsule: unsafe extern "C" fn(*const PyDataMem_Handler) -> *mut c_void,
    /// The handler in a capsule, taken into the table, under the name given or its own.
    pub(crate) adopt: unsafe extern "C" fn(*mut c_void, *const c_char) -> *const PyDataMem_Handler,
}

// SAFETY: functions that may be called on any thread, and an immortal string. Nothing of it changes.
unsafe impl Sync for Api {}
// SAFETY: see `Sync`.
unsafe impl Send for Api {}

impl Api {
    /// The table over a selection.
    pub(crate) const fn new<S: Selection>(python: PythonFunctions) -> Self {
        Self {
            abi_version: ABI_VERSION,
            size_bytes: size_of::<Self>() as u32,
            version: VERSION,
            error_code: error::error_code,
            error_message: error::error_message,
            clear_error: error::clear,
            register: register::register,
            find: register::find,
            default_handler: select::get_default,
            set_handler: select::set_handler::<S>,
            get_handler: select::get_handler::<S>,
            handler_name: select::handler_name::<S>,
            handler_version: select::handler_version::<S>,
            handler_alignment: select::handler_alignment::<S>,
            draft1_set_handler: draft::set_handler::<S, Draft1>,
            draft1_get_handler_name: draft::get_handler_name::<S>,
            draft2_set_handler: draft::set_handler::<S, Draft2>,
            draft2_get_handler_name: draft::get_handler_name::<S>,
            set_event_hook: hook::set_event_hook::<S>,
            new: blocks::new::<S>,
            new_zeroed: blocks::new_zeroed::<S>,
            renew: blocks::renew::<S>,
            free: blocks::free,
            block_handler: blocks::block_handler,
            copy_in: blocks::copy_in,
            copy_out: blocks::copy_out,
            copy: blocks::copy,
            python,
        }
    }
}
