//! `Handler`, the `Copy` reference to a handler that everybody passes around: one word.
//!
//! ```text
//!   a named handler's    | address of its entry                                          | 0 |
//!
//!                        63                                     25 24                 1    0
//!   a request's          | address of the slot / 512 (39 bits)    | generation (24 bits) | 1 |
//! ```
//! An entry lives for ever, so a named handler's word is a pointer. A request's slot is recycled, so its word also has
//! the generation for which it was made; what is in the slot may be read only while the slot is held (`held`).

use super::abi::{Copies, Functions, PyDataMem_Handler};
use super::entry::Entry;
use std::ffi::c_void;
use std::ptr::NonNull;

/// Refers to a handler. `Copy`, one word wide, equal only to itself.
///
/// A named handler is immortal. That of a request is the request's own; to keep it, keep a [`Context`](crate::Context),
/// a
/// [`RequestHandle`](crate::RequestHandle), a container or a block. A `Handler` keeps nothing: when all that held the
/// request is gone, memory that it is asked for is refused
/// ([`Error::RequestEnded`](crate::Error::RequestEnded)). It never refers to another request.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handler(NonNull<c_void>);

// SAFETY: it refers to an `Entry`, which is `Send` and `Sync` and lives for ever. It is a pointer and no reference so
// that nobody (clippy's `mutable_key_type` among them) takes the entry's atomics for a part of the handler's identity.
unsafe impl Send for Handler {}
// SAFETY: all threads may read the `Entry` that it refers to, which is `Sync` and lives for ever.
unsafe impl Sync for Handler {}

/// What the addresses of slots are multiples of.
pub(super) const SLOT_BYTES: usize = 512;
const GENERATION_BITS: u32 = 24;
const ADDRESS_SHIFT: u32 = GENERATION_BITS + 1;
/// A slot that had so many requests is left alone, so that no word is ever used twice.
pub(super) const MAX_GENERATION: u32 = (1 << GENERATION_BITS) - 1;

const _: () = assert!(size_of::<usize>() == 8, "a handler's word has 64 bits");

impl Handler {
    pub(super) fn of(entry: &'static Entry) -> Self {
        Self(NonNull::from(entry).cast())
    }

    /// A request's.
    ///
    /// # Safety
    /// - `slot` is an immortal slot, whose provenance was exposed; it begins with its entry.
    /// - `generation` is one that it has or had.
    pub(super) unsafe fn of_slot(slot: *const c_void, generation: u32) -> Self {
        let word = (slot.addr() / SLOT_BYTES) << ADDRESS_SHIFT | (generation as usize) << 1 | 1;
        Self(NonNull::without_provenance(word.try_into().expect("bit 0 is set")))
    }

    /// Whether it is a request's.
    #[inline]
    pub(crate) fn is_request(self) -> bool {
        self.0.addr().get() & 1 == 1
    }

    /// The generation of its request.
    #[inline]
    pub(super) fn generation(self) -> u32 {
        (self.0.addr().get() >> 1) as u32 & MAX_GENERATION
    }

    /// The entry, or the slot that begins with it.
    #[inline]
    pub(super) fn place(self) -> NonNull<Entry> {
        if self.is_request() {
            let address = (self.0.addr().get() >> ADDRESS_SHIFT) * SLOT_BYTES;
            // SAFETY: `of_slot` made the word from the address of a slot, which is not zero.
            unsafe { NonNull::new_unchecked(std::ptr::with_exposed_provenance_mut(address)) }
        } else {
            self.0.cast()
        }
    }

    /// The entry behind it, for the layers that attach something to it. A slot's is the same for all of its requests.
    #[inline]
    pub(crate) fn entry(self) -> &'static Entry {
        // SAFETY: `of` made the word from an entry, `of_slot` from a slot that begins with one. Both live for ever.
        unsafe { self.place().as_ref() }
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

    /// Whether NumPy sees a struct that somebody else made.
    pub(super) fn is_foreign(self) -> bool {
        self.entry().foreign
    }

    /// How bytes get into its blocks and out of them.
    pub(super) fn copies(self) -> Copies {
        self.entry().copies
    }

    /// The functions that Rust calls.
    pub(crate) fn functions(self) -> Functions {
        self.entry().functions
    }

    /// NEP 49's version of its struct; 1 for every handler made here.
    #[must_use]
    pub fn version(self) -> u8 {
        // SAFETY: the struct lives for ever, and nobody writes to its version.
        unsafe { (&raw const (*self.as_ptr()).version).read() }
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

    /// The strategy behind it, as its `Debug` says: `Aligned { align: 64 }`.
    #[must_use]
    pub fn description(self) -> &'static str {
        self.entry().description()
    }

    /// The struct of NEP 49 that NumPy uses, valid for ever.
    #[must_use]
    pub fn as_ptr(self) -> *const PyDataMem_Handler {
        self.entry().c_struct()
    }
}
