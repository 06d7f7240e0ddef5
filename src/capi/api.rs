//! `ctxalloc_api` of the header: the functions in a table, for extension modules that find it in a capsule.
//!
//! Append-only: a newer ctxalloc serves an extension that was built for an older one. A change that cannot be made by
//! appending takes another [`ABI_VERSION`] and another name of the capsule.

use super::forms::{Draft1, Draft2};
use super::list::c_functions;
use super::register::ExtrasInC;
use super::{Selection, VERSION, blocks, draft, error, hook, register, select};
use crate::handler::abi::PyDataMem_Handler;
use crate::handler::events::EventHook;
use std::ffi::{c_char, c_int, c_void};

/// `CTXALLOC_ABI_VERSION`.
const ABI_VERSION: u32 = 1;

type Struct = *const PyDataMem_Handler;

/// Makes the table, and fills it.
macro_rules! table {
    ($($field:ident $symbol:ident($($argument:ident: $kind:ty),*) -> $answer:ty = $function:expr;)*) => {
        /// The table. The order is the header's, for ever.
        #[repr(C)]
        pub(crate) struct Api {
            abi_version: u32,
            size_bytes: u32,
            version: *const c_char,
            $($field: unsafe extern "C" fn($($kind),*) -> $answer,)*
            python: PythonFunctions,
        }

        impl Api {
            /// The table over a selection.
            pub(crate) const fn new<S: Selection>(python: PythonFunctions) -> Self {
                Self {
                    abi_version: ABI_VERSION,
                    size_bytes: size_of::<Self>() as u32,
                    version: VERSION,
                    $($field: $function,)*
                    python,
                }
            }
        }
    };
}
c_functions!(table);

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
// SAFETY: functions and an immortal string belong to no thread.
unsafe impl Send for Api {}
