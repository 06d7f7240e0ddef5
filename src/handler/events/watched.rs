//! Functions that take the place of a foreign struct's own while there is a hook: each calls the one that it replaces,
//! and tells the hook.
//!
//! They are given the context of the original and nothing else, so there is one set for each struct, made at compile
//! time. Only functions are replaced, one word each: a caller finds the old function or the new one, with the context
//! that both want. `WATCHED` is written under the table's lock, and read without.

use super::super::abi::{Functions, PyDataMem_Handler};
use super::super::call::{Answer, Call, by_digit, functions};
use crate::unattributed::unattributed;
use std::ffi::c_void;
use std::hint;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// How many foreign handlers an event hook can hear of: there are so many sets of functions.
pub const MAX_WATCHED: usize = 16 * 16;

/// A struct, and the functions it had when it was first watched.
struct Watched {
    c_struct: AtomicPtr<PyDataMem_Handler>,
    /// A leaked copy.
    original: AtomicPtr<Functions>,
}

static WATCHED: [Watched; MAX_WATCHED] =
    [const { Watched { c_struct: AtomicPtr::new(null_mut()), original: AtomicPtr::new(null_mut()) } }; MAX_WATCHED];

/// The functions that `WATCHED[n]` replaced.
fn original(n: usize) -> &'static Functions {
    loop {
        // Acquire pairs with the Release in `watch`.
        let original = WATCHED[n].original.load(Ordering::Acquire);
        // SAFETY: NULL, or a copy that `watch` leaked and never changes.
        if let Some(original) = unsafe { original.as_ref() } {
            return original;
        }
        // `watch` stored it before it put functions with this number anywhere. But NumPy reads the struct's words in no
        // order: on a weakly ordered machine it may find the function before this thread sees what was stored earlier.
        hint::spin_loop();
    }
}

/// The functions with the number whose two hexadecimal digits these are. They find out whom they replace, and leave the
/// rest to what follows, so that each is a few instructions.
struct Replacement<const HIGH: usize, const LOW: usize>;

impl<const HIGH: usize, const LOW: usize> Replacement<HIGH, LOW> {
    /// Their context is not put anywhere: the struct keeps its own.
    const FUNCTIONS: Functions = functions::<Self>(null_mut());
}

impl<const HIGH: usize, const LOW: usize> Answer for Replacement<HIGH, LOW> {
    unsafe fn answer(ctx: *mut c_void, call: Call) -> *mut c_void {
        // SAFETY: the caller keeps the contract of the original, which has this number.
        unsafe { pass_on(HIGH * 16 + LOW, ctx, call) }
    }
}

/// # Safety
/// - as for the `n`th original.
#[inline(never)]
unsafe fn pass_on(n: usize, ctx: *mut c_void, call: Call) -> *mut c_void {
    let telling = call.begin();
    // SAFETY: it is called with its own context, as if it had not been replaced.
    telling.done(unsafe { Functions { ctx, ..*original(n) }.call(call) })
}

/// All of them, by their digits.
const REPLACEMENTS: [[Functions; 16]; 16] = by_digit!(|HIGH| row::<HIGH>());

const fn row<const HIGH: usize>() -> [Functions; 16] {
    by_digit!(|LOW| Replacement::<HIGH, LOW>::FUNCTIONS)
}

/// Puts functions of ours into the struct (`on`), or its own back; returns whether ours are in it now.
///
/// # Safety
/// - `c_struct` is an immortal, complete struct of a foreign handler; the caller holds the table's lock.
pub(in crate::handler) unsafe extern "C" fn watch(c_struct: *mut PyDataMem_Handler, on: bool) -> bool {
    let place = |wanted: *mut PyDataMem_Handler| {
        WATCHED.iter().position(|watched| std::ptr::eq(watched.c_struct.load(Ordering::Relaxed), wanted))
    };
    let Some(n) = place(c_struct).or_else(|| if on { place(null_mut()) } else { None }) else { return false };
    let watched = &WATCHED[n];
    if watched.original.load(Ordering::Relaxed).is_null() {
        // SAFETY: an immortal struct; only this function changes it, under the table's lock.
        let Ok(functions) = (unsafe { PyDataMem_Handler::functions(c_struct) }) else { return false };
        // It puts the byte there that is there already, which is no race with those who read the word, but for Miri.
        // SAFETY: the address of a field of a struct that is there; only this function writes to it.
        if !cfg!(miri) && !unsafe { crate::os::can_write((&raw mut (*c_struct).allocator.malloc).cast()) } {
            return false;
        }
        watched.c_struct.store(c_struct, Ordering::Relaxed);
        let _immortal = unattributed();
        // Release pairs with the Acquire in `original`.
        watched.original.store(Box::into_raw(Box::new(functions)), Ordering::Release);
    }
    let wanted = if on { &REPLACEMENTS[n / 16][n % 16] } else { original(n) };
    // SAFETY: an immortal struct, which could be written to when it was first watched, and the table's lock is held.
    // The replacements call the originals.
    unsafe { PyDataMem_Handler::set_functions(c_struct, wanted) };
    on
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests {
    use super::*;
    use crate::handler::abi::Free;
    use crate::handler::name;
    use crate::handler::trampoline::functions_behind;
    use crate::strategy::{Strategy, System};
    use std::thread;

    static SYSTEM: System = System;

    /// Under Miri with the stale values that a weakly ordered machine shows: `make miri-seeds`.
    #[test]
    fn threads_call_a_struct_that_becomes_watched() {
        // SAFETY: `SYSTEM` is a static, so it is valid for ever.
        let own = unsafe { functions_behind(&raw const SYSTEM) };
        let c_struct = Box::into_raw(Box::new(own.named(name::field_of("watched"))));
        let at = c_struct.expose_provenance();
        // As NumPy does, which reads single words in no order.
        let free = move || {
            // SAFETY: an aligned word of an immortal struct, which `watch` changes by atomics, and which is always a
            // function of this type.
            unsafe {
                let c_struct: *mut PyDataMem_Handler = std::ptr::with_exposed_provenance_mut(at);
                let word = AtomicPtr::from_ptr((&raw mut (*c_struct).allocator.free).cast::<*mut c_void>());
                std::mem::transmute::<*mut c_void, Free>(word.load(Ordering::Relaxed))
            }
        };
        let unwatched = free();
        let call_until_it_is_watched = || loop {
            let found = free();
            let block = System.allocate(10).expect("memory");
            // SAFETY: a live block of the strategy behind the struct's own functions, whose context this is.
            unsafe { found((&raw const SYSTEM).cast_mut().cast(), block.as_ptr().cast(), 10) };
            if !std::ptr::fn_addr_eq(found, unwatched) {
                return;
            }
            thread::yield_now();
        };
        thread::scope(|scope| {
            scope.spawn(call_until_it_is_watched);
            scope.spawn(call_until_it_is_watched);
            // SAFETY: an immortal, complete struct. No other test here watches one, and so no lock is needed.
            assert!(unsafe { watch(c_struct, true) });
        });
    }
}
