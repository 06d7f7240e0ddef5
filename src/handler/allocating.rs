//! What a `Handler` does for Rust: it makes, resizes and takes back blocks by the C functions of its entry.

use super::abi::Functions;
use super::call::Call;
use super::held::Held;
use super::requests;
use super::selected;
use super::small;
use super::word::Handler;
use crate::error::Error;
use crate::layout;
use crate::strategy::LiveBlock;
use crate::unattributed::unattributed;
use std::borrow::Cow;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;

impl Handler {
    /// Its name: in the table, or that of the request. For an adopted handler the name in its own struct may differ
    /// (see
    /// [`adopt`](super::adopt)); NumPy reports that one.
    #[must_use]
    pub fn name(self) -> Cow<'static, str> {
        if self.is_request() { requests::name_of(self) } else { self.entry().name().into() }
    }

    /// # Errors
    /// [`Error::NotHostAccessible`].
    pub(crate) fn require_host_accessible(self) -> Result<(), Error> {
        if self.is_host_accessible() { Ok(()) } else { Err(Error::NotHostAccessible { handler: self.name() }) }
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
        if self.needs_no_hold()
            && let Some(block) = small::allocate(self, size_bytes.max(1))
        {
            return Ok(block);
        }
        // At least one, here and below: in C a size of zero may give NULL, and would free in some reallocs.
        self.make(Call::Malloc { size: size_bytes.max(1) }, size_bytes)
    }

    /// A block of `size_bytes` zeros, aligned to [`alignment`](Self::alignment).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn allocate_zeroed(self, size_bytes: usize) -> Result<NonNull<u8>, Error> {
        // NumPy asks in the same way, `(nbytes, 1)`.
        self.make(Call::Calloc { nelem: size_bytes.max(1), elsize: 1 }, size_bytes)
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
        // SAFETY: the caller vouches for the block, and gives it up where this succeeds.
        if let Some(grown) = unsafe { small::grow(self, block, new_size_bytes) } {
            return Ok(grown);
        }
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
        // SAFETY: `ctx` belongs to the function; the caller vouches for the block, and gives it up.
        unsafe {
            if !small::release(self, block) {
                let Functions { ctx, free, .. } = self.entry().functions;
                free(ctx, block.as_ptr().cast(), size_bytes);
            }
        }
    }

    /// The functions, for a size that a block can have. Looked up before the call: a foreign realloc that claimed to
    /// serve an impossible size would have given up the old block, which a failure must leave alone.
    #[inline]
    fn possible(self, requested_bytes: usize) -> Result<&'static Functions, Error> {
        match requested_bytes {
            0..=layout::MAX_BYTES => Ok(&self.entry().functions),
            _ => Err(self.refused(requested_bytes, Some(requested_bytes))),
        }
    }

    /// Makes a block by `call`, a malloc or calloc. A request is held meanwhile, unless this thread runs under it,
    /// which holds it already.
    #[inline]
    fn make(self, call: Call, size_bytes: usize) -> Result<NonNull<u8>, Error> {
        if self.needs_no_hold() { self.make_now(call, size_bytes) } else { self.make_held(call, size_bytes) }
    }

    /// Whether it is valid without a further hold: a named one, or that of the request that this thread runs under.
    #[inline]
    fn needs_no_hold(self) -> bool {
        !self.is_request() || selected::get() == Some(self)
    }

    /// [`make`](Self::make) for who holds it.
    #[inline]
    fn make_now(self, call: Call, size_bytes: usize) -> Result<NonNull<u8>, Error> {
        let functions = self.possible(size_bytes)?;
        // SAFETY: a call without a pointer; the functions take any sizes.
        self.answer(unsafe { functions.call(call) }, size_bytes)
    }

    #[inline(never)]
    fn make_held(self, call: Call, size_bytes: usize) -> Result<NonNull<u8>, Error> {
        let Some(_held) = Held::try_on(self) else { return Err(requests::gone(size_bytes)) };
        self.make_now(call, size_bytes)
    }

    /// Gives memory that its strategy keeps but nobody uses back to the system; see
    /// [`Strategy::trim`](crate::strategy::Strategy::trim). Returns how many bytes went, as far as is known.
    ///
    /// Meant for a quiet moment and a thread of its own: it takes the strategy's locks one by one.
    pub fn trim(self) -> usize {
        let Some(_held) = Held::try_on(self) else { return 0 };
        // SAFETY: `ctx` belongs to the functions, of which this is one; a request's slot is held.
        self.entry().trim.map_or(0, |trim| unsafe { trim(self.entry().functions.ctx) })
    }

    /// Its live blocks, the oldest first, where its strategy knows them ([`Tracked`](crate::strategy::Tracked), also
    /// behind others): see [`Strategy::live_blocks`](crate::strategy::Strategy::live_blocks). Nothing for any other,
    /// and for a handler that another copy of this crate made (another extension module of the process).
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
        let _unattributed = unattributed(); // a heap at its limit could not tell of the refusal
        match requests::refusal_of(self, refused_bytes) {
            Some(error) => {
                crate::trace::refused(&error);
                error
            }
            None => Error::OutOfMemory { handler: self.name(), requested_bytes },
        }
    }
}

/// As the functions of [`Handler`], without a second hold.
impl Held {
    /// # Errors
    /// Those of [`Handler::allocate`].
    pub(crate) fn allocate(&self, size_bytes: usize) -> Result<NonNull<u8>, Error> {
        self.handler().make_now(Call::Malloc { size: size_bytes.max(1) }, size_bytes)
    }

    /// # Errors
    /// Those of [`Handler::allocate_zeroed`].
    pub(crate) fn allocate_zeroed(&self, size_bytes: usize) -> Result<NonNull<u8>, Error> {
        self.handler().make_now(Call::Calloc { nelem: size_bytes.max(1), elsize: 1 }, size_bytes)
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
