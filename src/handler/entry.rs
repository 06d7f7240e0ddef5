//! `Entry`, what the table holds, and `Handler`, the `Copy` reference to one that everybody else passes around.
//!
//! Entries are leaked on purpose: a handler must outlive every block it made, and blocks outlive everything.

use super::abi::{Copies, Functions, PyDataMem_Handler};
use super::foreign::{self, Extras, Reach};
use super::held::Held;
use super::name::Name;
use super::requests::{self, HoldFunction};
use super::selected;
use super::trampoline;
use crate::error::Error;
use crate::layout;
use crate::strategy::{LiveBlock, Strategy};
use crate::sync::{AtomicPtr, Witness};
use std::borrow::Cow;
use std::ffi::c_void;
use std::fmt;
use std::ptr::{NonNull, null_mut};

/// Refers to a handler. `Copy`, one word wide, equal only to itself.
///
/// A named handler is immortal. That of a request is the request's own; to keep it, keep a [`Context`](crate::Context), a
/// [`RequestHandle`](crate::RequestHandle), a container or a block. A `Handler` keeps nothing: when all that held the
/// request is gone, memory that it is asked for is refused ([`Error::RequestEnded`]). It never refers to another request.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handler(
    /// The address of an [`Entry`], or a request's word ([`requests`]).
    NonNull<c_void>,
);

// SAFETY: as good as the `&'static Entry` that it leads to; a pointer, so that nobody (clippy's `mutable_key_type`
// among them) takes the entry's atomics for a part of the handler's identity.
unsafe impl Send for Handler {}
// SAFETY: as above.
unsafe impl Sync for Handler {}

/// One handler. Laid out for C: copies of this crate in several extension modules share one table.
#[repr(C)]
pub(crate) struct Entry {
    functions: Functions,
    /// Holds a request's slot, and lets go of it; for requests only.
    pub(super) hold: Option<HoldFunction>,
    /// Which copy of this crate made it.
    copy: *const u8,
    /// [`Strategy::trim`], called with the functions' context; nothing for a foreign handler.
    trim: Option<trampoline::Trim>,
    /// [`Strategy::live_blocks`], called with the functions' context by the copy that made the entry, and no other.
    live_blocks: Option<trampoline::LiveBlocks>,
    /// How bytes get in and out: what NumPy never sees (the second draft of NEP 49).
    copies: Copies,
    face: *const PyDataMem_Handler,
    /// Whether the struct is somebody else's.
    foreign: bool,
    /// Whether the host can read and write its blocks.
    host_accessible: bool,
    name: Text,
    description: Text,
    alignment: usize,
    made: Witness,
    /// The next entry in the same bucket of the index by name, by face, and in order of registration.
    /// Written once, before the entry is published there.
    pub(super) next_by_name: AtomicPtr<Entry>,
    pub(super) next_by_face: AtomicPtr<Entry>,
    pub(super) next: AtomicPtr<Entry>,
    /// Two things that the Python layer hangs here once: the capsule, and the package's `Handler` object.
    pub(crate) capsule: AtomicPtr<c_void>,
    pub(crate) object: AtomicPtr<c_void>,
}

// SAFETY: all fields are immutable once published, or atomics. `functions.ctx` is only ever handed to the
// functions beside it, which may be called on any thread (`Strategy: Send + Sync`, `adopt`'s contract).
unsafe impl Send for Entry {}
// SAFETY: as above.
unsafe impl Sync for Entry {}

/// An immortal string, laid out for C (a Rust `&str` is not).
#[repr(C)]
#[derive(Clone, Copy)]
struct Text {
    start: *const u8,
    length: usize,
}

impl Text {
    fn leak(text: String) -> Self {
        let text: &'static str = text.leak();
        Self { start: text.as_ptr(), length: text.len() }
    }

    fn get(self) -> &'static str {
        // SAFETY: `leak` took these from a string that lives for ever.
        let bytes = unsafe { std::slice::from_raw_parts(self.start, self.length) };
        // SAFETY: they were UTF-8 and nobody can write to them.
        unsafe { std::str::from_utf8_unchecked(bytes) }
    }
}

/// A handler on its way into the table: everything is checked, nothing is leaked yet.
pub(super) struct Draft<'a> {
    name: Name<'a>,
    description: String,
    alignment: usize,
    copies: Copies,
    face: Option<NonNull<PyDataMem_Handler>>,
    functions: Box<dyn FnOnce() -> Functions + 'a>,
    trim: Option<trampoline::Trim>,
    live_blocks: Option<trampoline::LiveBlocks>,
    host_accessible: bool,
}

impl<'a> Draft<'a> {
    /// A handler of our own, which makes its strategy immortal when it is registered.
    pub(super) fn of_strategy<S: Strategy>(name: Name<'a>, strategy: S) -> Self {
        Self {
            name,
            description: format!("{strategy:?}"),
            alignment: strategy.alignment(),
            copies: Copies::NONE,
            face: None,
            functions: Box::new(move || trampoline::functions(Box::leak(Box::new(strategy)))),
            trim: Some(trampoline::trim::<S>),
            live_blocks: Some(trampoline::live_blocks::<S>),
            host_accessible: true,
        }
    }

    /// The same with copy functions of its own, and perhaps for blocks that the host cannot read.
    #[cfg(feature = "usm")]
    pub(super) fn with_copies(self, copies: Copies, host_accessible: bool) -> Self {
        Self { copies, host_accessible, ..self }
    }

    /// A handler that somebody else made.
    pub(super) fn foreign(name: Name<'a>, face: NonNull<PyDataMem_Handler>, reach: Reach, extras: Extras) -> Self {
        let description = format!("foreign handler at {face:p}");
        Self {
            name,
            description,
            alignment: extras.alignment,
            copies: foreign::copies(extras.copies, reach),
            face: Some(face),
            functions: Box::new(move || foreign::functions(face, reach)),
            trim: None,
            live_blocks: None,
            host_accessible: true,
        }
    }

    /// A handler of functions that tell of events themselves.
    #[cfg(any(feature = "capi", feature = "python"))]
    pub(super) fn of_functions(name: Name<'a>, description: String, functions: Functions, extras: Extras) -> Self {
        Self {
            name,
            description,
            alignment: extras.alignment,
            copies: extras.copies,
            face: None,
            functions: Box::new(move || functions),
            trim: None,
            live_blocks: None,
            host_accessible: true,
        }
    }

    pub(super) fn name(&self) -> &str {
        self.name.as_str()
    }

    pub(super) fn face(&self) -> Option<NonNull<PyDataMem_Handler>> {
        self.face
    }

    /// The entry, immortal from now on.
    pub(super) fn leak(self) -> &'static Entry {
        let functions = (self.functions)();
        let face = match self.face {
            Some(foreign) => foreign.as_ptr(),
            // NumPy would write to the blocks: where it may not, it gets none.
            None if !self.host_accessible => Box::leak(Box::new(trampoline::refusing().face(&self.name))),
            None => Box::leak(Box::new(functions.face(&self.name))),
        };
        Box::leak(Box::new(Entry {
            functions,
            hold: None,
            copy: &raw const COPY,
            trim: self.trim,
            live_blocks: self.live_blocks,
            copies: self.copies,
            face,
            foreign: self.face.is_some(),
            host_accessible: self.host_accessible,
            name: Text::leak(self.name.as_str().to_owned()),
            description: Text::leak(self.description),
            alignment: self.alignment,
            made: Witness::new(),
            next_by_name: AtomicPtr::new(null_mut()),
            next_by_face: AtomicPtr::new(null_mut()),
            next: AtomicPtr::new(null_mut()),
            capsule: AtomicPtr::new(null_mut()),
            object: AtomicPtr::new(null_mut()),
        }))
    }
}

/// Its address tells copies of this crate apart.
static COPY: u8 = 0;

impl Entry {
    /// That of a slot, which stands before its request's own parts and in no index.
    pub(super) fn of_slot<S: Strategy>(
        functions: Functions,
        face: *const PyDataMem_Handler,
        hold: HoldFunction,
        alignment: usize,
    ) -> Self {
        const NAME: &str = "request";
        let text = Text { start: NAME.as_ptr(), length: NAME.len() };
        Self {
            functions,
            hold: Some(hold),
            copy: &raw const COPY,
            trim: Some(trampoline::trim::<S>),
            live_blocks: Some(trampoline::live_blocks::<S>),
            copies: Copies::NONE,
            face,
            foreign: false,
            host_accessible: true,
            name: text,
            description: text,
            alignment,
            made: Witness::new(),
            next_by_name: AtomicPtr::new(null_mut()),
            next_by_face: AtomicPtr::new(null_mut()),
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

    pub(super) fn face(&self) -> *const PyDataMem_Handler {
        self.made.look();
        self.face
    }
}

impl Handler {
    /// Whether it is a request's.
    #[inline]
    pub(crate) fn is_request(self) -> bool {
        requests::is_request(self.0)
    }

    /// Whether NumPy sees a struct that somebody else made.
    pub(super) fn is_foreign(self) -> bool {
        self.entry().foreign
    }

    /// As a pointer, which is the same for no other handler.
    #[cfg(any(feature = "capi", feature = "python"))]
    pub(crate) fn into_pointer(self) -> NonNull<c_void> {
        self.0
    }

    /// The handler behind such a pointer.
    ///
    /// # Safety
    /// - `pointer` is from [`into_pointer`](Self::into_pointer).
    #[cfg(any(feature = "capi", feature = "python"))]
    pub(crate) unsafe fn from_pointer(pointer: NonNull<c_void>) -> Self {
        Self(pointer)
    }

    pub(super) fn of(entry: &'static Entry) -> Self {
        Self(NonNull::from(entry).cast())
    }

    /// A request's.
    ///
    /// # Safety
    /// - `word` is that of a slot and a generation that it has, or had.
    pub(super) unsafe fn of_word(word: NonNull<c_void>) -> Self {
        Self(word)
    }

    /// The word itself.
    #[inline]
    pub(super) fn word(self) -> NonNull<c_void> {
        self.0
    }

    /// The entry behind it, for the layers that hang something there. A slot's is the same for all of its requests.
    #[inline]
    pub(crate) fn entry(self) -> &'static Entry {
        let entry = if self.is_request() { requests::slot_at(self.0) } else { self.0.cast() };
        // SAFETY: `of` made it from an entry, `of_word` from a slot, which begins with its entry; both live for ever.
        unsafe { entry.as_ref() }
    }

    /// How bytes get into its blocks and out of them.
    pub(super) fn copies(self) -> Copies {
        self.entry().copies
    }

    /// The functions that Rust calls, for an entry that stands beside it (NumPy's default over the C heap).
    pub(crate) fn functions(self) -> Functions {
        self.entry().functions
    }

    /// Its name: in the table, or that of the request. For an adopted handler the name in its own struct may differ (see
    /// [`adopt`](super::adopt)); NumPy reports that one.
    #[must_use]
    pub fn name(self) -> Cow<'static, str> {
        if self.is_request() { requests::name_of(self) } else { self.entry().name().into() }
    }

    /// NEP 49's version of its struct; 1 for every handler made here.
    #[must_use]
    pub fn version(self) -> u8 {
        // SAFETY: the struct lives for ever, unchanged.
        unsafe { (*self.entry().face).version }
    }

    /// What its blocks are aligned to, in bytes; 1 for a foreign handler of which nothing is known.
    #[must_use]
    pub fn alignment(self) -> usize {
        self.entry().alignment
    }

    /// Whether the host can read and write its blocks: all but those of a device's own memory.
    #[must_use]
    pub fn is_host_accessible(self) -> bool {
        self.entry().host_accessible
    }

    /// # Errors
    /// [`Error::NotHostAccessible`].
    pub(crate) fn require_host_accessible(self) -> Result<(), Error> {
        if self.is_host_accessible() { Ok(()) } else { Err(Error::NotHostAccessible { handler: self.name() }) }
    }

    /// The strategy behind it, as its `Debug` says: `Aligned { align: 64 }`.
    #[must_use]
    pub fn description(self) -> &'static str {
        self.entry().description.get()
    }

    /// The struct of NEP 49 that NumPy uses, valid for ever.
    #[must_use]
    pub fn as_ptr(self) -> *const PyDataMem_Handler {
        self.entry().face
    }

    /// A block of `size_bytes` uninitialised bytes, aligned to [`alignment`](Self::alignment).
    ///
    /// Give it back with [`release`](Self::release) of the same handler; a [`Buffer`](crate::Buffer) does so by itself.
    ///
    /// ```
    /// let aligned = ctxalloc::handler("aligned64").expect("built in");
    /// let block = aligned.allocate(1000)?;
    /// assert_eq!(block.addr().get() % aligned.alignment(), 0);
    /// // SAFETY: from this handler, with this size, given up.
    /// unsafe { aligned.release(block, 1000) };
    /// # Ok::<(), ctxalloc::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn allocate(self, size_bytes: usize) -> Result<NonNull<u8>, Error> {
        let (_held, functions) = self.usable(size_bytes)?;
        let &Functions { ctx, malloc, .. } = functions;
        // At least one, here and below: in C a size of zero may give NULL, and would free in some reallocs.
        // SAFETY: `ctx` is what these functions were registered with; malloc takes any size.
        self.answer(unsafe { malloc(ctx, size_bytes.max(1)) }, size_bytes)
    }

    /// A block of `size_bytes` zeros, aligned to [`alignment`](Self::alignment).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn allocate_zeroed(self, size_bytes: usize) -> Result<NonNull<u8>, Error> {
        let (_held, functions) = self.usable(size_bytes)?;
        let &Functions { ctx, calloc, .. } = functions;
        // NumPy asks in the same way, `(nbytes, 1)`.
        // SAFETY: `ctx` is what these functions were registered with; calloc takes any sizes.
        self.answer(unsafe { calloc(ctx, size_bytes.max(1), 1) }, size_bytes)
    }

    /// The block with its first bytes kept and `new_size_bytes` of room; perhaps elsewhere.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; the block is as it was.
    ///
    /// # Safety
    /// - `block` came from this handler and was not released.
    /// - after `Ok` the old pointer is not used again.
    pub unsafe fn resize(self, block: NonNull<u8>, new_size_bytes: usize) -> Result<NonNull<u8>, Error> {
        let &Functions { ctx, realloc, .. } = self.possible(new_size_bytes)?;
        // SAFETY: `ctx` belongs to the function; the caller vouches for the block.
        let moved = unsafe { realloc(ctx, block.as_ptr().cast(), new_size_bytes.max(1)) };
        // What was refused is the growth, of which nobody here knows how much it was.
        NonNull::new(moved.cast()).ok_or_else(|| self.refused(new_size_bytes, None))
    }

    /// Takes the block back. `size_bytes` should be its size; strategies of this crate do not look at it.
    ///
    /// # Safety
    /// - `block` came from this handler, was not released, and is not used again.
    /// - for a foreign handler that relies on the size (NEP 49 calls it a best guess), `size_bytes` is right.
    pub unsafe fn release(self, block: NonNull<u8>, size_bytes: usize) {
        let Functions { ctx, free, .. } = self.entry().functions;
        // SAFETY: `ctx` belongs to the function; the caller vouches for the block.
        unsafe { free(ctx, block.as_ptr().cast(), size_bytes) }
    }

    /// The functions, for a size that a block can have. Asked before the call: a foreign realloc that claimed to
    /// serve an impossible size would have given up the old block, which a failure must leave alone.
    #[inline]
    fn possible(self, requested_bytes: usize) -> Result<&'static Functions, Error> {
        match requested_bytes {
            0..=layout::MAX_BYTES => Ok(&self.entry().functions),
            _ => Err(self.refused(requested_bytes, Some(requested_bytes))),
        }
    }

    /// [`possible`](Self::possible), and held: a request's, unless this thread runs under it, which holds it already.
    #[inline]
    fn usable(self, requested_bytes: usize) -> Result<(Option<Held>, &'static Functions), Error> {
        let functions = self.possible(requested_bytes)?;
        if !self.is_request() || selected::get() == Some(self) {
            return Ok((None, functions));
        }
        match Held::try_on(self) {
            Some(held) => Ok((Some(held), functions)),
            None => Err(requests::gone(requested_bytes)),
        }
    }

    /// Gives memory that its strategy keeps but nobody uses back to the system; see [`Strategy::trim`]. Returns how
    /// many bytes went, as far as is known.
    ///
    /// Meant for a quiet moment and a thread of its own: it takes the strategy's locks one by one.
    pub fn trim(self) -> usize {
        let Some(_held) = Held::try_on(self) else { return 0 };
        // SAFETY: `ctx` belongs to the functions, of which this is one; a request's slot is held.
        self.entry().trim.map_or(0, |trim| unsafe { trim(self.entry().functions.ctx) })
    }

    /// Its live blocks, the oldest first, where its strategy knows them ([`Tracked`](crate::strategy::Tracked), also
    /// behind others): see [`Strategy::live_blocks`]. Nothing for any other, and for a handler that another copy of this
    /// crate made (another extension module of the process).
    #[must_use]
    pub fn live_blocks(self) -> Option<Vec<LiveBlock>> {
        let _held = Held::try_on(self)?;
        let live_blocks = self.entry().live_blocks.filter(|_| self.entry().made_here())?;
        // SAFETY: `ctx` belongs to the functions, of which this is one, of this copy of the crate; a slot is held.
        unsafe { live_blocks(self.entry().functions.ctx) }
    }

    #[inline]
    fn answer(self, block: *mut c_void, requested_bytes: usize) -> Result<NonNull<u8>, Error> {
        NonNull::new(block.cast()).ok_or_else(|| self.refused(requested_bytes, Some(requested_bytes)))
    }

    /// Why there is no memory: a request's refusal of that many bytes, or its last one; else that there is none.
    #[cold]
    fn refused(self, requested_bytes: usize, refused_bytes: Option<usize>) -> Error {
        requests::refusal_of(self, refused_bytes)
            .unwrap_or_else(|| Error::OutOfMemory { handler: self.name(), requested_bytes })
    }
}

impl fmt::Debug for Handler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handler({:?}: {})", self.name(), self.description())
    }
}

impl fmt::Display for Handler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}
