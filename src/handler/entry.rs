//! `Entry`, what the table holds for each handler, and `Draft`, an entry that has not been published yet.
//!
//! Both are plain data: whoever makes a handler (`trampoline`, `foreign`, `requests`) fills in the functions. Entries
//! are leaked on purpose: a handler must outlive every block it made, and blocks outlive everything.

use super::abi::{Copies, Functions, PyDataMem_Handler};
use super::name::Name;
use crate::strategy::LiveBlock;
use crate::sync::{AtomicPtr, Witness};
use crate::unattributed::unattributed;
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};

/// [`Strategy::trim`](crate::strategy::Strategy::trim) behind a handler: returns how many bytes went back.
pub(super) type Trim = unsafe extern "C" fn(ctx: *mut c_void) -> usize;

/// [`Strategy::live_blocks`](crate::strategy::Strategy::live_blocks) behind a handler. A Rust function, not a C one:
/// only the copy of this crate that made the handler may call it.
pub(super) type LiveBlocks = unsafe fn(ctx: *mut c_void) -> Option<Vec<LiveBlock>>;

/// Holds a request's slot, or lets go of it. Copies of this crate call it for slots that another copy made.
/// - [`TRY_HOLD`]: adds a holder if the slot has any and its generation is `generation`; returns whether it did.
/// - [`HOLD_AGAIN`]: adds a holder. The caller is one already.
/// - [`LET_GO`]: removes the caller's hold.
pub(super) type HoldFunction = unsafe extern "C" fn(slot: *const c_void, what: u32, generation: u32) -> bool;

pub(super) const TRY_HOLD: u32 = 0;
pub(super) const HOLD_AGAIN: u32 = 1;
pub(super) const LET_GO: u32 = 2;

/// One handler. Laid out for C: copies of this crate in several extension modules share one table.
#[repr(C)]
pub(crate) struct Entry {
    pub(super) functions: Functions,
    /// For the slots of requests only.
    pub(super) hold: Option<HoldFunction>,
    /// Which copy of this crate made it.
    pub(super) copy: *const u8,
    /// Called with the functions' context; `None` for a foreign handler.
    pub(super) trim: Option<Trim>,
    /// Called with the functions' context, and only by the copy that made the entry.
    pub(super) live_blocks: Option<LiveBlocks>,
    /// How bytes get in and out. NumPy never sees these (they are from the second draft of NEP 49).
    pub(super) copies: Copies,
    pub(super) c_struct: *const PyDataMem_Handler,
    /// Whether somebody else made the struct.
    pub(super) foreign: bool,
    /// Whether the host can read and write its blocks.
    pub(super) host_accessible: bool,
    pub(super) name: Text,
    pub(super) description: Text,
    pub(super) alignment: usize,
    pub(super) made: Witness,
    /// The next entry in the same bucket of the index by name, in that by struct, and in order of registration. Each is
    /// written once, before the entry is published there.
    pub(super) next_by_name: AtomicPtr<Entry>,
    pub(super) next_by_struct: AtomicPtr<Entry>,
    pub(super) next: AtomicPtr<Entry>,
    /// Two objects that the Python layer attaches here once: the capsule, and the package's `Handler`.
    pub(crate) capsule: AtomicPtr<c_void>,
    pub(crate) object: AtomicPtr<c_void>,
}

// SAFETY: all fields are immutable once published, or atomics. `functions.ctx` is only ever handed to the functions
// beside it, and whoever makes a handler promises that those may be called on any thread (`Strategy: Send + Sync`,
// `adopt`'s contract). So entries may be moved to other threads, and shared between them.
unsafe impl Send for Entry {}
// SAFETY: what threads share of it is immutable or atomic, and its functions may be called on any thread (`Send`).
unsafe impl Sync for Entry {}

/// Its address tells copies of this crate apart.
static COPY: u8 = 0;

impl Entry {
    /// An entry with these functions and nothing else: a handler of our own, in no index yet.
    pub(super) fn new(functions: Functions, c_struct: *const PyDataMem_Handler, name: &'static str) -> Self {
        let name = Text::of(name);
        Self {
            functions,
            hold: None,
            copy: &raw const COPY,
            trim: None,
            live_blocks: None,
            copies: Copies::NONE,
            c_struct,
            foreign: false,
            host_accessible: true,
            name,
            description: name,
            alignment: 1,
            made: Witness::new(),
            next_by_name: AtomicPtr::new(null_mut()),
            next_by_struct: AtomicPtr::new(null_mut()),
            next: AtomicPtr::new(null_mut()),
            capsule: AtomicPtr::new(null_mut()),
            object: AtomicPtr::new(null_mut()),
        }
    }

    /// Whether this copy of the crate made it, and so knows what stands behind its functions.
    pub(super) fn made_here(&self) -> bool {
        std::ptr::eq(self.copy, &raw const COPY)
    }

    pub(super) fn name(&self) -> &'static str {
        self.made.look();
        self.name.get()
    }

    pub(super) fn description(&self) -> &'static str {
        self.description.get()
    }

    pub(super) fn c_struct(&self) -> *const PyDataMem_Handler {
        self.made.look();
        self.c_struct
    }
}

/// An immortal string, laid out for C (a Rust `&str` is not).
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Text {
    start: *const u8,
    length: usize,
}

impl Text {
    fn of(text: &'static str) -> Self {
        Self { start: text.as_ptr(), length: text.len() }
    }

    fn get(self) -> &'static str {
        // SAFETY: `of` took both from a `&'static str`, so they are `length` immortal, immutable bytes of UTF-8.
        unsafe { std::str::from_utf8_unchecked(std::slice::from_raw_parts(self.start, self.length)) }
    }
}

/// A handler on its way into the table: everything is checked, nothing is leaked yet.
pub(super) struct Draft<'a> {
    pub(super) name: Name<'a>,
    pub(super) description: String,
    pub(super) alignment: usize,
    pub(super) copies: Copies,
    /// The struct that somebody else made; `None` for a handler of our own, which gets one.
    pub(super) foreign: Option<NonNull<PyDataMem_Handler>>,
    /// Makes immortal what stands behind the functions, and returns them.
    pub(super) functions: Box<dyn FnOnce() -> Functions + 'a>,
    /// The functions in the struct that NumPy sees, if NumPy must get no memory because the host cannot write to the
    /// blocks.
    pub(super) shown: Option<Functions>,
    pub(super) trim: Option<Trim>,
    pub(super) live_blocks: Option<LiveBlocks>,
    pub(super) host_accessible: bool,
}

impl<'a> Draft<'a> {
    /// A handler of our own of which nothing is known but its functions.
    pub(super) fn new(name: Name<'a>, description: String, functions: impl FnOnce() -> Functions + 'a) -> Self {
        Self {
            name,
            description,
            alignment: 1,
            copies: Copies::NONE,
            foreign: None,
            functions: Box::new(functions),
            shown: None,
            trim: None,
            live_blocks: None,
            host_accessible: true,
        }
    }

    /// The entry, immortal from here on.
    pub(super) fn leak(self) -> &'static Entry {
        let _immortal = unattributed();
        let functions = (self.functions)();
        let c_struct = match self.foreign {
            Some(foreign) => foreign.as_ptr(),
            None => Box::leak(Box::new(self.shown.unwrap_or(functions).named(self.name.field()))),
        };
        Box::leak(Box::new(Entry {
            trim: self.trim,
            live_blocks: self.live_blocks,
            copies: self.copies,
            foreign: self.foreign.is_some(),
            host_accessible: self.host_accessible,
            // A copy: the draft's may have been made in a request.
            description: Text::of(Box::leak(Box::from(&*self.description))),
            alignment: self.alignment,
            ..Entry::new(functions, c_struct, self.name.as_str().to_owned().leak())
        }))
    }
}
