//! The functions of `include/ctxalloc.h` that exist both with and without Python, in the header's order: the list from
//! which `api` makes the table of an extension module, and `exports` the symbols of a library.

/// Calls a macro with a line for each function: its field in `ctxalloc_api`, its symbol, its signature, and what it is.
/// `S` is the selection, which the caller names. The order is that of `ctxalloc_api`: append-only.
macro_rules! c_functions {
    ($with:ident) => {
        $with! {
            error_code ctxalloc_error_code() -> c_int = error::error_code;
            error_message ctxalloc_error_message() -> *const c_char = error::error_message;
            clear_error ctxalloc_clear_error() -> () = error::clear;
            register ctxalloc_register(handler: Struct, extras: *const ExtrasInC) -> Struct = register::register;
            find ctxalloc_find(name: *const c_char) -> Struct = register::find;
            default_handler ctxalloc_default_handler() -> Struct = select::get_default;
            set_handler ctxalloc_set_handler(handler: Struct) -> Struct = select::set_handler::<S>;
            get_handler ctxalloc_get_handler() -> Struct = select::get_handler::<S>;
            handler_name ctxalloc_handler_name(handler: Struct) -> *const c_char = select::handler_name::<S>;
            handler_version ctxalloc_handler_version(handler: Struct) -> c_int = select::handler_version::<S>;
            handler_alignment ctxalloc_handler_alignment(handler: Struct) -> usize = select::handler_alignment::<S>;
            draft1_set_handler ctxalloc_draft1_set_handler(draft: *const Draft1) -> *const Draft1
                = draft::set_handler::<S, Draft1>;
            draft1_get_handler_name ctxalloc_draft1_get_handler_name(block: *mut c_void) -> *const c_char
                = draft::get_handler_name::<S>;
            draft2_set_handler ctxalloc_draft2_set_handler(draft: *const Draft2) -> *const Draft2
                = draft::set_handler::<S, Draft2>;
            draft2_get_handler_name ctxalloc_draft2_get_handler_name(block: *mut c_void) -> *const c_char
                = draft::get_handler_name::<S>;
            set_event_hook ctxalloc_set_event_hook(hook: Option<EventHook>, user_data: *mut c_void, old_data: *mut *mut c_void)
                -> Option<EventHook> = hook::set_event_hook::<S>;
            new ctxalloc_new(size: usize) -> *mut c_void = blocks::new::<S>;
            new_zeroed ctxalloc_new_zeroed(nelem: usize, elsize: usize) -> *mut c_void = blocks::new_zeroed::<S>;
            renew ctxalloc_renew(block: *mut c_void, size: usize) -> *mut c_void = blocks::renew::<S>;
            free ctxalloc_free(block: *mut c_void) -> c_int = blocks::free;
            block_handler ctxalloc_block_handler(block: *mut c_void) -> Struct = blocks::block_handler;
            copy_in ctxalloc_copy_in(dst: *mut c_void, src: *const c_void, size: usize) -> c_int = blocks::copy_in;
            copy_out ctxalloc_copy_out(dst: *mut c_void, src: *const c_void, size: usize) -> c_int = blocks::copy_out;
            copy ctxalloc_copy(dst: *mut c_void, src: *const c_void, size: usize) -> c_int = blocks::copy;
        }
    };
}
pub(super) use c_functions;
