//! Structs of the drafts for handlers that are not drafts: what `SetHandler` of a draft gives back when, say, `pool` was
//! selected before.
//!
//! Their functions know no context, so there is one set for each handler, made at compile time: [`MOST`] of them. A struct
//! once given out stands for its handler for ever.

use super::draft::{Draft1, Draft2};
use crate::error::Error;
use crate::handler::Handler;
use std::ffi::{c_char, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

/// How many handlers can be given out as drafts. In the header: `CTXALLOC_DRAFT_VIEWS`.
pub(super) const MOST: usize = 64;

/// A handler, and the struct that stands for it.
struct View {
    /// `Handler::into_pointer`.
    handler: AtomicPtr<c_void>,
    /// Leaked. There as soon as the handler is, or a moment later.
    draft: AtomicPtr<Draft2>,
}

static VIEWS: [View; MOST] =
    [const { View { handler: AtomicPtr::new(null_mut()), draft: AtomicPtr::new(null_mut()) } }; MOST];

impl View {
    fn handler(&self) -> Option<Handler> {
        // Acquire pairs with the exchange in `of`.
        let pointer = NonNull::new(self.handler.load(Ordering::Acquire))?;
        // SAFETY: `of` alone puts pointers here, from `into_pointer`.
        Some(unsafe { Handler::from_pointer(pointer) })
    }
}

/// The handler that a struct of ours stands for.
pub(super) fn handler_at(draft: *const Draft2) -> Option<Handler> {
    let ours = |view: &&View| std::ptr::eq(view.draft.load(Ordering::Acquire), draft) && !draft.is_null();
    VIEWS.iter().find(ours).and_then(View::handler)
}

/// The struct that stands for a handler. Both forms: the first draft's is the beginning of the second's.
pub(super) fn of(handler: Handler) -> Result<*const Draft2, Error> {
    let wanted = handler.into_pointer().as_ptr();
    let free_or_own = |view: &View| {
        // AcqRel: takes the place, or sees who has it.
        match view.handler.compare_exchange(null_mut(), wanted, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => true,
            Err(present) => std::ptr::eq(present, wanted),
        }
    };
    let number = VIEWS.iter().position(free_or_own);
    let number = number.ok_or(Error::TooManyViews { handler: handler.name(), max: MOST })?;
    let place = &VIEWS[number].draft;
    let present = place.load(Ordering::Acquire);
    if !present.is_null() {
        return Ok(present);
    }
    let fresh = Box::into_raw(Box::new(SETS[number].draft(handler)));
    match place.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Ok(fresh),
        Err(faster) => {
            // SAFETY: made above, and seen by nobody.
            drop(unsafe { Box::from_raw(fresh) });
            Ok(faster)
        }
    }
}

/// The functions of one view.
#[derive(Clone, Copy)]
struct Set {
    alloc: unsafe extern "C" fn(usize) -> *mut c_void,
    zeroed_alloc: unsafe extern "C" fn(usize, usize) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void, usize),
    realloc: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void,
    host2obj: unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void,
    obj2host: unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void,
    obj2obj: unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void,
}

impl Set {
    fn draft(&self, handler: Handler) -> Draft2 {
        let mut name: [c_char; 128] = [0; 128];
        for (place, byte) in name.iter_mut().zip(handler.name().bytes()) {
            *place = byte as c_char;
        }
        Draft2 {
            first: Draft1 {
                name,
                alloc: Some(self.alloc),
                zeroed_alloc: Some(self.zeroed_alloc),
                free: Some(self.free),
                realloc: Some(self.realloc),
            },
            host2obj: Some(self.host2obj),
            obj2host: Some(self.obj2host),
            obj2obj: Some(self.obj2obj),
        }
    }
}

/// The functions with number `N`.
struct Numbered<const N: usize>;

impl<const N: usize> Numbered<N> {
    const SET: Set = Set {
        alloc: Self::alloc,
        zeroed_alloc: Self::zeroed_alloc,
        free: Self::free,
        realloc: Self::realloc,
        host2obj: Self::host2obj,
        obj2host: Self::obj2host,
        obj2obj: Self::obj2obj,
    };

    fn handler() -> Handler {
        VIEWS[N].handler().expect("a view has a handler before anybody has its functions")
    }

    /// # Safety
    /// - as the handler's own function; so below.
    unsafe extern "C" fn alloc(size: usize) -> *mut c_void {
        let own = Self::handler().functions();
        // SAFETY: the context belongs to the function; the rest is passed on from the caller. So below.
        unsafe { (own.malloc)(own.ctx, size) }
    }

    unsafe extern "C" fn zeroed_alloc(nelem: usize, elsize: usize) -> *mut c_void {
        let own = Self::handler().functions();
        // SAFETY: as above.
        unsafe { (own.calloc)(own.ctx, nelem, elsize) }
    }

    unsafe extern "C" fn free(ptr: *mut c_void, size: usize) {
        let own = Self::handler().functions();
        // SAFETY: as above.
        unsafe { (own.free)(own.ctx, ptr, size) }
    }

    unsafe extern "C" fn realloc(ptr: *mut c_void, size: usize) -> *mut c_void {
        let own = Self::handler().functions();
        // SAFETY: as above.
        unsafe { (own.realloc)(own.ctx, ptr, size) }
    }

    unsafe extern "C" fn host2obj(dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
        let Some(to) = NonNull::new(dst.cast()) else { return null_mut() };
        // SAFETY: passed on from the caller. So below.
        unsafe { Self::handler().copy_in(to, src.cast(), size) }.map_or(null_mut(), |()| dst)
    }

    unsafe extern "C" fn obj2host(dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
        let Some(from) = NonNull::new(src.cast_mut().cast()) else { return null_mut() };
        // SAFETY: as above.
        unsafe { Self::handler().copy_out(dst.cast(), from, size) }.map_or(null_mut(), |()| dst)
    }

    unsafe extern "C" fn obj2obj(dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
        let (Some(to), Some(from)) = (NonNull::new(dst.cast()), NonNull::new(src.cast_mut().cast())) else {
            return null_mut();
        };
        // SAFETY: as above.
        unsafe { Self::handler().copy_across(to, from, size) }.map_or(null_mut(), |()| dst)
    }
}

/// One set after the other: `sets!(0 1 2)`.
macro_rules! sets {
    ($($n:literal)*) => { [$(Numbered::<$n>::SET),*] };
}
#[rustfmt::skip]
static SETS: [Set; MOST] = sets!(
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
    32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
);
