//! Functions that stand in a foreign struct while there is a hook: each calls the one whose place it takes, and tells.
//!
//! They are given the context of the original and nothing else, so there is one set for each struct, made at compile
//! time. Only functions are replaced, one word each: whoever calls through the struct meanwhile finds the old function or
//! the new one, with the context that both want. The state is touched under the table's lock, and read without.

use super::{resizing, tell};
use crate::handler::abi::{Functions, PyDataMem_Handler};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// How many foreign handlers an event hook can hear of: so many sets of functions there are.
pub const MOST_WATCHED: usize = 64;

/// A struct, and the functions it had when it was first watched.
struct Watched {
    face: AtomicPtr<PyDataMem_Handler>,
    /// A leaked copy.
    original: AtomicPtr<Functions>,
}

static WATCHED: [Watched; MOST_WATCHED] =
    [const { Watched { face: AtomicPtr::new(null_mut()), original: AtomicPtr::new(null_mut()) } }; MOST_WATCHED];

/// The functions with number `N`; their context is the struct's own.
struct Stand<const N: usize>;

impl<const N: usize> Stand<N> {
    const FUNCTIONS: Functions = Functions {
        ctx: null_mut(),
        malloc: Self::malloc,
        calloc: Self::calloc,
        realloc: Self::realloc,
        free: Self::free,
    };

    fn original() -> &'static Functions {
        // Acquire pairs with the Release in `watch`, which came before these functions stood anywhere.
        let original = WATCHED[N].original.load(Ordering::Acquire);
        // SAFETY: leaked, and there before this function stood anywhere.
        unsafe { &*original }
    }

    /// # Safety
    /// - as the function whose place it takes; so the three below.
    unsafe extern "C" fn malloc(ctx: *mut c_void, size: usize) -> *mut c_void {
        // SAFETY: passed on from the caller.
        let block = unsafe { (Self::original().malloc)(ctx, size) };
        tell(null_mut(), block, size);
        block
    }

    unsafe extern "C" fn calloc(ctx: *mut c_void, nelem: usize, elsize: usize) -> *mut c_void {
        // SAFETY: passed on from the caller.
        let block = unsafe { (Self::original().calloc)(ctx, nelem, elsize) };
        tell(null_mut(), block, nelem.saturating_mul(elsize));
        block
    }

    unsafe extern "C" fn realloc(ctx: *mut c_void, ptr: *mut c_void, new_size: usize) -> *mut c_void {
        let resizing = resizing(ptr);
        // SAFETY: passed on from the caller.
        let block = unsafe { (Self::original().realloc)(ctx, ptr, new_size) };
        resizing.done(block, new_size);
        block
    }

    unsafe extern "C" fn free(ctx: *mut c_void, ptr: *mut c_void, size: usize) {
        if !ptr.is_null() {
            tell(ptr, null_mut(), 0); // first: once it is freed its address may be another's
        }
        // SAFETY: passed on from the caller.
        unsafe { (Self::original().free)(ctx, ptr, size) };
    }
}

/// One set after the other: `sets!(0 1 2)`.
macro_rules! sets {
    ($($n:literal)*) => { [$(Stand::<$n>::FUNCTIONS),*] };
}
#[rustfmt::skip]
const STANDS: [Functions; MOST_WATCHED] = sets!(
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
    32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
);

/// Begins (`on`) or ends to stand in the struct at `face`; says whether functions of ours stand in it now.
///
/// # Safety
/// - `face` is an immortal, complete struct of a foreign handler; the caller holds the table's lock.
pub(super) unsafe extern "C" fn watch(face: *mut PyDataMem_Handler, on: bool) -> bool {
    let place = |wanted: *mut PyDataMem_Handler| {
        WATCHED.iter().position(|watched| std::ptr::eq(watched.face.load(Ordering::Relaxed), wanted))
    };
    let Some(n) = place(face).or_else(|| if on { place(null_mut()) } else { None }) else { return false };
    let watched = &WATCHED[n];
    if watched.original.load(Ordering::Relaxed).is_null() {
        // SAFETY: immortal, says the caller.
        let Ok(functions) = (unsafe { PyDataMem_Handler::functions(face) }) else { return false };
        // SAFETY: the address of a field of an immortal struct.
        if !is_writable(unsafe { &raw mut (*face).allocator.malloc }.cast()) {
            return false;
        }
        watched.face.store(face, Ordering::Relaxed);
        // Release pairs with the Acquire in `Stand::original`.
        watched.original.store(Box::into_raw(Box::new(functions)), Ordering::Release);
    }
    // SAFETY: made above, leaked.
    let original = unsafe { &*watched.original.load(Ordering::Relaxed) };
    let wanted = if on { &STANDS[n] } else { original };
    // SAFETY: an immortal struct, which could be written to when it was first watched.
    unsafe { PyDataMem_Handler::set_functions(face, wanted) };
    on
}

/// Whether the byte at `address` can be written to: the system is asked to read into it what stands there.
fn is_writable(address: *mut u8) -> bool {
    let mut ends = [-1; 2];
    // SAFETY: room for two descriptors.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return false;
    }
    // The system reads and writes the byte, and answers EFAULT where it may not.
    // SAFETY: our own descriptor, and one byte of a struct that is there.
    let sent = unsafe { libc::write(ends[1], address.cast(), 1) };
    // SAFETY: as above; what is written is what stands there.
    let taken = unsafe { libc::read(ends[0], address.cast(), 1) };
    for end in ends {
        // SAFETY: our own.
        unsafe { libc::close(end) };
    }
    (sent, taken) == (1, 1)
}
