//! `Callbacks`: four C functions of the user's, with the signatures of NEP 49's allocator.
//!
//! The block sizes are recorded here, so `free(ctx, ptr, size)` gets the true size, not NumPy's guess.

use super::Strategy;
use super::ledger::Ledger;
use crate::error::Error;
use crate::trace;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

type Malloc = unsafe extern "C" fn(ctx: *mut c_void, size: usize) -> *mut c_void;
type Calloc = unsafe extern "C" fn(ctx: *mut c_void, nelem: usize, elsize: usize) -> *mut c_void;
type Realloc = unsafe extern "C" fn(ctx: *mut c_void, ptr: *mut c_void, new_size: usize) -> *mut c_void;
type Free = unsafe extern "C" fn(ctx: *mut c_void, ptr: *mut c_void, size: usize);

/// The functions that [`Callbacks`] calls, as NEP 49 declares them. `None` is C's NULL.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct CallbackFunctions {
    /// Passed to each function as it is.
    pub ctx: *mut c_void,
    /// `malloc(ctx, size)`: returns a block of `size` bytes, or NULL. `size` is never zero.
    pub malloc: Option<Malloc>,
    /// `calloc(ctx, nelem, elsize)`: returns a block of `nelem * elsize` zero bytes, or NULL.
    pub calloc: Option<Calloc>,
    /// `realloc(ctx, ptr, new_size)`: returns the resized block, perhaps moved, or NULL, which leaves it as it was.
    /// `ptr` is never NULL.
    pub realloc: Option<Realloc>,
    /// `free(ctx, ptr, size)`: takes the block back. `size` is the block's size in bytes. `ptr` is never NULL.
    pub free: Option<Free>,
}

impl CallbackFunctions {
    /// This context, and no functions yet.
    #[must_use]
    pub const fn new(ctx: *mut c_void) -> Self {
        Self { ctx, malloc: None, calloc: None, realloc: None, free: None }
    }

    /// The functions at four addresses, as ctypes, cffi or numba provide them. NULL means `None`.
    ///
    /// # Safety
    /// - each address is NULL or that of a C function with the signature of its field.
    #[must_use]
    pub unsafe fn at(
        ctx: *mut c_void,
        malloc: *const c_void,
        calloc: *const c_void,
        realloc: *const c_void,
        free: *const c_void,
    ) -> Self {
        // SAFETY: each address is that of such a function or NULL (this function's contract). `Option` of a function
        // pointer has the same layout, with NULL for `None`.
        unsafe {
            Self {
                ctx,
                malloc: std::mem::transmute::<*const c_void, Option<Malloc>>(malloc),
                calloc: std::mem::transmute::<*const c_void, Option<Calloc>>(calloc),
                realloc: std::mem::transmute::<*const c_void, Option<Realloc>>(realloc),
                free: std::mem::transmute::<*const c_void, Option<Free>>(free),
            }
        }
    }
}

/// Blocks from four C functions, which ctypes, cffi, numba or a C library can provide without a line of Rust.
///
/// Besides the functions themselves, each call costs about 50 nanoseconds for a table of block sizes.
pub struct Callbacks {
    functions: Complete,
    align: usize,
    /// Each live block's size.
    sizes: Arc<Ledger<usize>>,
}

/// The functions, none missing.
#[derive(Clone, Copy)]
struct Complete {
    ctx: *mut c_void,
    malloc: Malloc,
    calloc: Calloc,
    realloc: Realloc,
    free: Free,
}

// SAFETY: `ctx` is only passed to the functions beside it, which may be called on any thread (`Callbacks::new`).
unsafe impl Send for Callbacks {}
// SAFETY: the functions may be called by several threads at once (`Callbacks::new`).
unsafe impl Sync for Callbacks {}

impl Callbacks {
    /// Blocks from these functions, which their author declares to be aligned to `align` bytes.
    ///
    /// 1 is correct for any functions. A larger value is relied on (C's `malloc` has 16):
    /// [`ContextAlloc`](crate::ContextAlloc) then adds no room for aligning layouts up to that. A new block that is
    /// less aligned is freed again, and the allocation fails.
    ///
    /// # Errors
    /// [`Error::FunctionMissing`] names the first function that is `None`: NEP 49 requires all four.
    /// [`Error::BadAlignment`] unless `align` is a power of two up to 2 MiB.
    ///
    /// # Safety
    /// - the functions stay callable for ever: handlers are never removed.
    /// - they may be called on any thread, several at once, without Python's GIL, after a `fork`, and while the process
    ///   exits; a function that needs the GIL takes it itself.
    /// - `malloc` and `calloc` return NULL or a block of that many bytes, which nobody else has and which stays where
    ///   it is until it is freed; that of `calloc` is zero.
    /// - `realloc` returns NULL and leaves the block as it was, or a block with its first bytes kept.
    /// - every block, that of `realloc` too, is aligned to `align` (C's own realloc keeps no more than 16).
    /// - none of them unwinds, or allocates through the handler that it serves.
    pub unsafe fn new(functions: CallbackFunctions, align: usize) -> Result<Self, Error> {
        const MAX: usize = super::Aligned::MAX;
        if !align.is_power_of_two() || align > MAX {
            return Err(Error::BadAlignment { align, min: 1, max: MAX });
        }
        let missing = |function| Error::FunctionMissing { handler: "Callbacks".into(), function };
        let functions = Complete {
            ctx: functions.ctx,
            malloc: functions.malloc.ok_or_else(|| missing("malloc"))?,
            calloc: functions.calloc.ok_or_else(|| missing("calloc"))?,
            realloc: functions.realloc.ok_or_else(|| missing("realloc"))?,
            free: functions.free.ok_or_else(|| missing("free"))?,
        };
        Ok(Self { functions, align, sizes: Ledger::new() })
    }

    /// Records a block that the functions returned. `None` if it is NULL, or less aligned than declared: then it is
    /// freed.
    fn record(&self, block: *mut c_void, size_bytes: usize) -> Option<NonNull<u8>> {
        let block = NonNull::new(block.cast::<u8>())?;
        if !block.addr().get().is_multiple_of(self.align) {
            let align = self.align;
            trace::misuse(&format!(
                "Callbacks: a block at {block:p}, where multiples of {align} were declared; freed again"
            ));
            // SAFETY: these functions have just made it with this size, and nobody else has it.
            unsafe { (self.functions.free)(self.functions.ctx, block.as_ptr().cast(), size_bytes) };
            return None;
        }
        self.sizes.insert(block, size_bytes);
        Some(block)
    }

    #[cold]
    fn unknown(&self, operation: &str, block: NonNull<u8>) {
        trace::misuse(&format!("Callbacks: {operation} of {block:p}, where no live block starts; nothing was done"));
    }
}

// SAFETY: the functions keep these promises (`Callbacks::new`). A block's record is removed before the block is freed,
// so it is never taken for that of the next block at the same address.
unsafe impl Strategy for Callbacks {
    fn alignment(&self) -> usize {
        self.align
    }

    // Zero becomes one, as in handlers: what C's functions do with zero differs, and its realloc may free the block.
    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let size_bytes = size_bytes.max(1);
        // SAFETY: `ctx` is the functions' own, and malloc takes any size (`Callbacks::new`).
        let block = unsafe { (self.functions.malloc)(self.functions.ctx, size_bytes) };
        self.record(block, size_bytes)
    }

    fn allocate_zeroed(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        let size_bytes = size_bytes.max(1);
        // `(nbytes, 1)`, as NumPy calls it.
        // SAFETY: `ctx` is the functions' own, and calloc takes any sizes (`Callbacks::new`).
        let block = unsafe { (self.functions.calloc)(self.functions.ctx, size_bytes, 1) };
        self.record(block, size_bytes)
    }

    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        let new_size_bytes = new_size_bytes.max(1);
        let Some(old_size_bytes) = self.sizes.remove(block) else {
            self.unknown("resize", block);
            return None;
        };
        // SAFETY: the block had a record, so it is a live block of these functions.
        let moved = unsafe { (self.functions.realloc)(self.functions.ctx, block.as_ptr().cast(), new_size_bytes) };
        let Some(moved) = NonNull::new(moved.cast::<u8>()) else {
            self.sizes.insert(block, old_size_bytes);
            return None;
        };
        if !moved.addr().get().is_multiple_of(self.align) {
            // The old block is gone, so it is too late to refuse.
            let align = self.align;
            trace::misuse(&format!(
                "Callbacks: realloc moved a block to {moved:p}, where multiples of {align} were declared"
            ));
        }
        self.sizes.insert(moved, new_size_bytes);
        Some(moved)
    }

    unsafe fn release(&self, block: NonNull<u8>) {
        match self.sizes.remove(block) {
            // SAFETY: the block had a record with this size, so it is a live block of these functions.
            Some(size_bytes) => unsafe { (self.functions.free)(self.functions.ctx, block.as_ptr().cast(), size_bytes) },
            None => self.unknown("free", block),
        }
    }
}

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callbacks").field("align", &self.align).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::{CallbackFunctions, Callbacks};
    use crate::error::Error;
    use crate::source::heap;
    use crate::strategy::live::Live;
    use crate::strategy::{Strategy, conformance};
    use crate::sync::Locked;
    use std::collections::BTreeMap;
    use std::ffi::c_void;
    use std::ptr::{NonNull, null_mut};
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    /// A user's allocator: the C heap, with a table of sizes that `free` is checked against.
    struct Book {
        sizes: Locked<BTreeMap<usize, usize>>,
        wrong_sizes: AtomicUsize,
        refuses: AtomicBool,
        odd: AtomicBool,
    }

    impl Book {
        fn new() -> Self {
            Self {
                sizes: Locked::new(BTreeMap::new()),
                wrong_sizes: AtomicUsize::new(0),
                refuses: AtomicBool::new(false),
                odd: AtomicBool::new(false),
            }
        }

        fn insert(&self, block: Option<NonNull<u8>>, size: usize) -> *mut c_void {
            let Some(block) = block else { return null_mut() };
            self.sizes.with(|sizes| sizes.insert(block.addr().get(), size));
            block.as_ptr().cast()
        }

        fn remove(&self, block: *mut c_void) -> Option<usize> {
            self.sizes.with(|sizes| sizes.remove(&block.addr()))
        }

        fn functions(&self) -> CallbackFunctions {
            let mut functions = CallbackFunctions::new(std::ptr::from_ref(self).cast_mut().cast());
            functions.malloc = Some(malloc);
            functions.calloc = Some(calloc);
            functions.realloc = Some(realloc);
            functions.free = Some(free);
            functions
        }
    }

    /// # Safety
    /// - `ctx` is a Book that is alive.
    unsafe fn book<'a>(ctx: *mut c_void) -> &'a Book {
        // SAFETY: `ctx` is a live Book (this function's contract), which is only shared.
        unsafe { &*ctx.cast() }
    }

    unsafe extern "C" fn malloc(ctx: *mut c_void, size: usize) -> *mut c_void {
        // SAFETY: `Book::functions` puts the Book's own address beside these functions.
        let book = unsafe { book(ctx) };
        if book.refuses.load(Ordering::Relaxed) {
            return null_mut();
        }
        if book.odd.load(Ordering::Relaxed) {
            let block = heap::allocate(size + 1).expect("memory");
            // SAFETY: the block has `size + 1` bytes.
            return book.insert(Some(unsafe { block.add(1) }), size);
        }
        book.insert(heap::allocate(size), size)
    }

    unsafe extern "C" fn calloc(ctx: *mut c_void, nelem: usize, elsize: usize) -> *mut c_void {
        // SAFETY: `Book::functions` puts the Book's own address beside these functions.
        unsafe { book(ctx) }.insert(heap::allocate_zeroed(nelem * elsize), nelem * elsize)
    }

    unsafe extern "C" fn realloc(ctx: *mut c_void, ptr: *mut c_void, new_size: usize) -> *mut c_void {
        // SAFETY: `Book::functions` puts the Book's own address beside these functions.
        let book = unsafe { book(ctx) };
        if book.refuses.load(Ordering::Relaxed) {
            return null_mut();
        }
        let old = book.remove(ptr).expect("a live block");
        let block = NonNull::new(ptr.cast()).expect("a block");
        // SAFETY: the table had it, so it is a live block of the heap.
        match unsafe { heap::resize(block, new_size) } {
            None => {
                book.insert(Some(block), old);
                null_mut()
            }
            moved => book.insert(moved, new_size),
        }
    }

    unsafe extern "C" fn free(ctx: *mut c_void, ptr: *mut c_void, size: usize) {
        // SAFETY: `Book::functions` puts the Book's own address beside these functions.
        let book = unsafe { book(ctx) };
        if book.remove(ptr) != Some(size) {
            book.wrong_sizes.fetch_add(1, Ordering::Relaxed);
        }
        let offset = usize::from(book.odd.load(Ordering::Relaxed));
        if let Some(block) = NonNull::new(ptr.cast::<u8>()) {
            // SAFETY: `malloc` above moved the block by `offset` from a live block of the heap.
            unsafe { heap::release(block.sub(offset)) };
        }
    }

    /// The Book must live as long as the strategy.
    fn callbacks(book: &Book, align: usize) -> Callbacks {
        // SAFETY: these functions keep C's contract, and the tests keep the book.
        unsafe { Callbacks::new(book.functions(), align) }.expect("complete")
    }

    #[test]
    fn callbacks_keep_the_strategy_contract_and_free_gets_the_true_size() {
        for align in [1, 8] {
            let book = Book::new();
            conformance::check(callbacks(&book, align));
            assert_eq!(book.wrong_sizes.load(Ordering::Relaxed), 0);
            assert!(book.sizes.with(|sizes| sizes.is_empty()), "what was made was freed");
        }
    }

    #[test]
    fn a_missing_function_is_refused_by_name() {
        let book = Book::new();
        let without = |remove: fn(&mut CallbackFunctions)| {
            let mut functions = book.functions();
            remove(&mut functions);
            // SAFETY: the book's functions keep C's contract; one that is missing is an error, and nothing is called.
            unsafe { Callbacks::new(functions, 1) }.expect_err("incomplete")
        };
        let missing = |function| Error::FunctionMissing { handler: "Callbacks".into(), function };
        assert_eq!(without(|functions| functions.malloc = None), missing("malloc"));
        assert_eq!(without(|functions| functions.calloc = None), missing("calloc"));
        assert_eq!(without(|functions| functions.realloc = None), missing("realloc"));
        assert_eq!(without(|functions| functions.free = None), missing("free"));
    }

    #[test]
    fn a_resize_that_fails_leaves_the_block_and_its_size() {
        let book = Book::new();
        let callbacks = callbacks(&book, 1);
        let mut block = Live::of(&callbacks, 100);
        book.refuses.store(true, Ordering::Relaxed);
        assert!(!block.resize(200));
        assert!(callbacks.allocate(10).is_none());
        block.release();
        assert_eq!(book.wrong_sizes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_block_that_is_less_aligned_than_declared_is_a_failure_and_freed() {
        let book = Book::new();
        book.odd.store(true, Ordering::Relaxed);
        assert!(callbacks(&book, 8).allocate(100).is_none());
        assert!(book.sizes.with(|sizes| sizes.is_empty()));
        let modest = callbacks(&book, 1);
        Live::of(&modest, 100).release(); // aligned to nothing, as declared
        assert_eq!(book.wrong_sizes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_pointer_that_is_no_live_block_never_reaches_the_functions() {
        let book = Book::new();
        let callbacks = callbacks(&book, 1);
        let live = Live::of(&callbacks, 100);
        let block = live.start();
        live.release();
        // SAFETY: not live: the strategy finds no record and leaves it alone.
        unsafe { callbacks.release(block) };
        // SAFETY: not live: the strategy finds no record and leaves it alone.
        assert!(unsafe { callbacks.resize(block, 10) }.is_none());
        assert_eq!(book.wrong_sizes.load(Ordering::Relaxed), 0);
    }
}
