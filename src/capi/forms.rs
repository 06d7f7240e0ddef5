//! The structs of the two drafts of NEP 49, whose functions have no `ctx` argument. The first draft has four functions;
//! the second adds three that copy.

use std::ffi::{c_char, c_void};

/// `ctxalloc_draft1_handler`: the first draft's `PyDataMem_Handler`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
#[allow(
    unpredictable_function_pointer_comparisons,
    reason = "to see whether C changed a struct: the same word, or not"
)]
pub(super) struct Draft1 {
    pub(super) name: [c_char; 128],
    pub(super) alloc: Option<unsafe extern "C" fn(usize) -> *mut c_void>,
    pub(super) zeroed_alloc: Option<unsafe extern "C" fn(usize, usize) -> *mut c_void>,
    pub(super) free: Option<unsafe extern "C" fn(*mut c_void, usize)>,
    pub(super) realloc: Option<unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void>,
}

/// `dst`, or NULL where it failed.
pub(super) type DraftCopy = unsafe extern "C" fn(dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void;

/// `ctxalloc_draft2_handler`: the second draft's.
#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
#[allow(
    unpredictable_function_pointer_comparisons,
    reason = "to see whether C changed a struct: the same word, or not"
)]
pub(super) struct Draft2 {
    pub(super) first: Draft1,
    pub(super) host2obj: Option<DraftCopy>,
    pub(super) obj2host: Option<DraftCopy>,
    pub(super) obj2obj: Option<DraftCopy>,
}

const _: () = assert!(size_of::<Draft1>() == 128 + 4 * size_of::<usize>());
const _: () = assert!(size_of::<Draft2>() == 128 + 7 * size_of::<usize>());

/// One of the two.
pub(super) trait Form {
    const NUMBER: u8;
    /// The struct as the longer of the two.
    ///
    /// # Safety
    /// - `draft` points to a struct of this form.
    unsafe fn read(draft: *const Self) -> Draft2;
}

impl Form for Draft1 {
    const NUMBER: u8 = 1;

    unsafe fn read(draft: *const Self) -> Draft2 {
        // SAFETY: the caller passes a struct of this form.
        Draft2 { first: unsafe { draft.read() }, host2obj: None, obj2host: None, obj2obj: None }
    }
}

impl Form for Draft2 {
    const NUMBER: u8 = 2;

    unsafe fn read(draft: *const Self) -> Draft2 {
        // SAFETY: the caller passes a struct of this form.
        unsafe { draft.read() }
    }
}
