//! `Call`: a call of `malloc`, `calloc`, `realloc` or `free`, as an enum. A type that answers such calls implements
//! [`Answer`], one function for all four, of which [`functions`] makes the C functions. [`Call::begin`] tells the event
//! hook.

use super::abi::{Copies, CopyFunction, Functions};
use super::events::tell::{Resizing, resizing, tell};
use std::ffi::c_void;
use std::ptr::null_mut;

/// A call of one of the four functions, without its context.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Call {
    Malloc { size: usize },
    Calloc { nelem: usize, elsize: usize },
    Realloc { ptr: *mut c_void, new_size: usize },
    Free { ptr: *mut c_void, size: usize },
}

impl Call {
    /// Reports a block's end to the event hook before it ends: after that, another block may have its address.
    /// Everything else is reported by [`Reporting::done`].
    ///
    /// Not a function around a closure: that would be one function for all four calls, which the compiler does not
    /// inline.
    #[inline(always)]
    pub(crate) fn begin(self) -> Reporting {
        let resizing = match self {
            Self::Realloc { ptr, .. } => Some(resizing(ptr)),
            Self::Free { ptr, .. } if !ptr.is_null() => {
                tell(ptr, null_mut(), 0);
                None
            }
            _ => None,
        };
        Reporting { call: self, resizing }
    }
}

/// A call that is under way.
#[must_use = "the event hook is called by `done`"]
pub(crate) struct Reporting {
    call: Call,
    resizing: Option<Resizing>,
}

impl Reporting {
    /// Reports to the event hook what the call made, and returns it.
    #[inline(always)]
    pub(crate) fn done(self, block: *mut c_void) -> *mut c_void {
        match (self.call, self.resizing) {
            (Call::Malloc { size }, _) => tell(null_mut(), block, size),
            (Call::Calloc { nelem, elsize }, _) => tell(null_mut(), block, nelem.saturating_mul(elsize)),
            (Call::Realloc { new_size, .. }, Some(resizing)) => resizing.done(block, new_size),
            _ => {}
        }
        block
    }
}

/// Answers calls from C.
pub(crate) trait Answer {
    /// The block; NULL where there is none, and for [`Call::Free`].
    ///
    /// # Safety
    /// - `ctx` is what the type's [`functions`] were made with.
    /// - a pointer in `call` is NULL or a live block of theirs. It is given up by `Free`, and by a `Realloc` that
    ///   succeeds.
    unsafe fn answer(ctx: *mut c_void, call: Call) -> *mut c_void;
}

/// The functions of C that `A` answers.
pub(crate) const fn functions<A: Answer>(ctx: *mut c_void) -> Functions {
    Functions { ctx, malloc: malloc::<A>, calloc: calloc::<A>, realloc: realloc::<A>, free: free::<A> }
}

/// Never inlined: who calls one from another one would save the registers of both.
///
/// # Safety
/// - as for [`Answer::answer`]; so for the three functions below.
#[inline(never)]
unsafe extern "C" fn malloc<A: Answer>(ctx: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: the caller keeps the contract of `answer`.
    unsafe { A::answer(ctx, Call::Malloc { size }) }
}

#[inline(never)]
unsafe extern "C" fn calloc<A: Answer>(ctx: *mut c_void, nelem: usize, elsize: usize) -> *mut c_void {
    // SAFETY: the caller keeps the contract of `answer`.
    unsafe { A::answer(ctx, Call::Calloc { nelem, elsize }) }
}

#[inline(never)]
unsafe extern "C" fn realloc<A: Answer>(ctx: *mut c_void, ptr: *mut c_void, new_size: usize) -> *mut c_void {
    // SAFETY: the caller keeps the contract of `answer`.
    unsafe { A::answer(ctx, Call::Realloc { ptr, new_size }) }
}

#[inline(never)]
unsafe extern "C" fn free<A: Answer>(ctx: *mut c_void, ptr: *mut c_void, size: usize) {
    // SAFETY: the caller keeps the contract of `answer`.
    unsafe { A::answer(ctx, Call::Free { ptr, size }) };
}

impl Functions {
    /// Calls one of them, with their own context.
    ///
    /// # Safety
    /// - a pointer in `call` is as for [`Answer::answer`]; what else the functions want (Python's GIL) is there.
    #[inline(always)]
    pub(crate) unsafe fn call(&self, call: Call) -> *mut c_void {
        let &Self { ctx, malloc, calloc, realloc, free } = self;
        // SAFETY: the caller keeps the functions' contract.
        unsafe {
            match call {
                Call::Malloc { size } => malloc(ctx, size),
                Call::Calloc { nelem, elsize } => calloc(ctx, nelem, elsize),
                Call::Realloc { ptr, new_size } => realloc(ctx, ptr, new_size),
                Call::Free { ptr, size } => {
                    free(ctx, ptr, size);
                    null_mut()
                }
            }
        }
    }
}

/// Which copy function: from the host into a block.
pub(crate) const HOST2OBJ: usize = 0;
/// From a block to the host.
pub(crate) const OBJ2HOST: usize = 1;
/// From one block to another.
pub(crate) const OBJ2OBJ: usize = 2;

/// Answers the copy functions of C.
pub(crate) trait AnswerCopy {
    /// `dst`, or NULL where the copy failed. `which`: [`HOST2OBJ`], [`OBJ2HOST`] or [`OBJ2OBJ`].
    ///
    /// # Safety
    /// - `ctx` is what the type's [`copies`] were made with; the rest is the contract of that copy function.
    unsafe fn copy(ctx: *mut c_void, which: usize, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void;
}

/// The copy functions that `A` answers: those of the three that are there.
pub(crate) fn copies<A: AnswerCopy>(ctx: *mut c_void, there: [bool; 3]) -> Copies {
    Copies {
        ctx,
        host2obj: there[HOST2OBJ].then_some(copy::<A, HOST2OBJ> as CopyFunction),
        obj2host: there[OBJ2HOST].then_some(copy::<A, OBJ2HOST> as CopyFunction),
        obj2obj: there[OBJ2OBJ].then_some(copy::<A, OBJ2OBJ> as CopyFunction),
    }
}

/// # Safety
/// - as for [`AnswerCopy::copy`].
unsafe extern "C" fn copy<A: AnswerCopy, const WHICH: usize>(
    ctx: *mut c_void,
    dst: *mut c_void,
    src: *const c_void,
    size: usize,
) -> *mut c_void {
    // SAFETY: the caller keeps the contract of that method.
    unsafe { A::copy(ctx, WHICH, dst, src, size) }
}

/// An array of `$value` for each hexadecimal digit from 0 to f, which is a constant in it. It makes sets of C functions
/// whose arguments do not say which struct they belong to: each struct gets functions compiled with its own number.
macro_rules! by_digit {
    (|$digit:ident| $value:expr) => {
        [
            {
                const $digit: usize = 0x0;
                $value
            },
            {
                const $digit: usize = 0x1;
                $value
            },
            {
                const $digit: usize = 0x2;
                $value
            },
            {
                const $digit: usize = 0x3;
                $value
            },
            {
                const $digit: usize = 0x4;
                $value
            },
            {
                const $digit: usize = 0x5;
                $value
            },
            {
                const $digit: usize = 0x6;
                $value
            },
            {
                const $digit: usize = 0x7;
                $value
            },
            {
                const $digit: usize = 0x8;
                $value
            },
            {
                const $digit: usize = 0x9;
                $value
            },
            {
                const $digit: usize = 0xa;
                $value
            },
            {
                const $digit: usize = 0xb;
                $value
            },
            {
                const $digit: usize = 0xc;
                $value
            },
            {
                const $digit: usize = 0xd;
                $value
            },
            {
                const $digit: usize = 0xe;
                $value
            },
            {
                const $digit: usize = 0xf;
                $value
            },
        ]
    };
}
pub(crate) use by_digit;
