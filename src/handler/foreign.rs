//! Foreign handlers: structs that somebody else made, and how Rust reaches the functions in them.
//!
//! A struct is read at each call and never copied: while there is an event hook, other functions take the place of its
//! own ([`events`](super::events)), and the hook is called for what Rust does too.

use super::abi::{Copies, CopyFunction, Functions, PyDataMem_Handler};
use super::call::{self, Answer, AnswerCopy, Call};
use super::entry::Draft;
use super::name::Name;
use super::table::attached;
use super::word::Handler;
use crate::unattributed::unattributed;
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};

/// How Rust may reach the functions of a foreign struct.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Reach {
    /// On any thread, several at once, without Python's GIL, also while the process exits.
    AnyThread,
    /// Attached to Python, as NumPy calls them; directly in a process without Python. Once Python is gone the functions
    /// are not called any more: NULL is the answer, and what is freed then stays.
    WithGil,
    /// Not at all: Rust allocates from this handler instead (NumPy's default keeps a cache that only the GIL protects,
    /// so Rust uses the C heap). A block goes back the way it came, so the two never mix.
    By(Handler),
}

/// What NEP 49's struct has no place for, and a handler may have all the same.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Extras {
    /// What its blocks are known to be aligned to, in bytes: a power of two up to 1 GiB; 1 where nothing is known.
    pub alignment: usize,
    /// How bytes get into its blocks and out of them; `memcpy` where there is nothing.
    pub copies: Copies,
}

impl Default for Extras {
    fn default() -> Self {
        Self { alignment: 1, copies: Copies::NONE }
    }
}

impl Extras {
    /// Nothing is known of it.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What its blocks are aligned to, in bytes.
    #[must_use]
    pub const fn with_alignment(mut self, alignment: usize) -> Self {
        self.alignment = alignment;
        self
    }

    /// How bytes get into its blocks and out of them.
    #[must_use]
    pub const fn with_copies(mut self, copies: Copies) -> Self {
        self.copies = copies;
        self
    }
}

/// A handler that somebody else made.
pub(super) fn draft(name: Name<'_>, c_struct: NonNull<PyDataMem_Handler>, reach: Reach, extras: Extras) -> Draft<'_> {
    Draft {
        alignment: extras.alignment,
        copies: copies(extras.copies, reach),
        foreign: Some(c_struct),
        ..Draft::new(name, format!("foreign handler at {c_struct:p}"), move || functions(c_struct, reach))
    }
}

/// The functions by which Rust reaches those of a foreign struct. Their context is the struct.
fn functions(c_struct: NonNull<PyDataMem_Handler>, reach: Reach) -> Functions {
    let ctx = c_struct.as_ptr().cast();
    match reach {
        Reach::AnyThread => call::functions::<Struct<false>>(ctx),
        Reach::WithGil => call::functions::<Struct<true>>(ctx),
        Reach::By(handler) => handler.functions(),
    }
}

/// The copy functions by which Rust reaches those of a foreign handler.
fn copies(copies: Copies, reach: Reach) -> Copies {
    if !matches!(reach, Reach::WithGil) || copies.are_none() {
        return copies;
    }
    let _immortal = unattributed();
    let original: &'static Original = Box::leak(Box::new(Original {
        ctx: copies.ctx,
        functions: [copies.host2obj, copies.obj2host, copies.obj2obj],
    }));
    let ctx = std::ptr::from_ref(original).cast_mut().cast();
    call::copies::<Original>(ctx, original.functions.map(|function| function.is_some()))
}

/// A foreign handler's copy functions, which are called attached to Python.
struct Original {
    ctx: *mut c_void,
    functions: [Option<CopyFunction>; 3],
}

impl AnswerCopy for Original {
    /// NULL too where Python is shutting down.
    unsafe fn copy(ctx: *mut c_void, which: usize, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
        // SAFETY: `copies` leaked it, so it is valid for ever.
        let original: &Self = unsafe { &*ctx.cast() };
        let Some(function) = original.functions[which] else { return null_mut() };
        // SAFETY: the caller keeps the function's contract; the context is the one that belongs to it.
        attached(|| unsafe { function(original.ctx, dst, src, size) }).unwrap_or(null_mut())
    }
}

/// A foreign struct, behind its address, which is immortal and changed by event hooks only; called attached to Python
/// where `GIL` says so.
struct Struct<const GIL: bool>;

impl<const GIL: bool> Answer for Struct<GIL> {
    /// NULL too where a function is missing, and where Python is shutting down: a foreign function may need Python
    /// then, and what is freed stays.
    unsafe fn answer(ctx: *mut c_void, call: Call) -> *mut c_void {
        // SAFETY: an immortal struct that only event hooks change.
        let Ok(own) = (unsafe { PyDataMem_Handler::functions(ctx.cast()) }) else { return null_mut() };
        // SAFETY: the caller passes blocks of this struct's handler.
        let called = || unsafe { own.call(call) };
        if GIL { attached(called).unwrap_or(null_mut()) } else { called() }
    }
}
