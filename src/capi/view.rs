//! Draft structs for handlers that are not drafts: what `SetHandler` of a draft returns when, say, `pool` was selected
//! before. Given to `SetHandler` again, such a struct selects its handler again.
//!
//! A draft's functions have no `ctx` argument, so each struct needs functions of its own. They are made at compile
//! time:
//! [`SETS`] sets, each of which knows its number.
//!
//! - A named handler has a struct and a set for ever. There are [`MAX_NAMED`] of these; one more is an error.
//! - A request has a struct, which is made for its slot and recycled with it: any number of requests can have one at
//!   the same time. While the request is there, it also has one of [`MAX_REQUESTS`] sets. If others have all of them,
//!   it gets a struct whose functions return no memory; that struct still selects the request.

use super::error::served;
use super::forms::{Draft1, Draft2};
use crate::error::Error;
use crate::handler::call::{Call, HOST2OBJ, OBJ2HOST, OBJ2OBJ, by_digit};
use crate::handler::{Handler, handler_at as handler_with_struct};
use crate::layout::array;
use crate::sync::{ForkLock, HeldAcrossFork, Locked, Made, held_across_fork};
use crate::unattributed::unattributed;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// How many named handlers can be given out as drafts. In the header: `CTXALLOC_DRAFT_VIEWS`.
pub(super) const MAX_NAMED: usize = 256;
/// How many requests can have functions at a time. In the header: `CTXALLOC_DRAFT_REQUESTS`.
pub(super) const MAX_REQUESTS: usize = 256;

/// The handlers behind the sets: `Handler::into_pointer`, or NULL. First those of named handlers, each set once; then
/// those of requests, which are set under [`Requests`]'s lock, and only where there is none or it is gone.
static HANDLERS: [AtomicPtr<c_void>; MAX_NAMED + MAX_REQUESTS] =
    [const { AtomicPtr::new(null_mut()) }; MAX_NAMED + MAX_REQUESTS];

/// The structs of named handlers, leaked. Each is there as soon as the handler is, or a moment later.
static NAMED: [AtomicPtr<Draft2>; MAX_NAMED] = [const { AtomicPtr::new(null_mut()) }; MAX_NAMED];

/// The set of a request that has none of its own: it is past the end of [`HANDLERS`].
const NO_HANDLER: usize = MAX_NAMED + MAX_REQUESTS;

fn handler_behind(place: &AtomicPtr<c_void>) -> Option<Handler> {
    // Acquire pairs with the stores in `of_named` and `lend`.
    let pointer = NonNull::new(place.load(Ordering::Acquire))?;
    // SAFETY: only those two store pointers here, from `into_pointer`.
    Some(unsafe { Handler::from_pointer(pointer) })
}

/// The handler whose functions have this number.
fn numbered(number: usize) -> Result<Handler, Error> {
    let handler = HANDLERS.get(number).and_then(handler_behind);
    handler.ok_or_else(|| {
        let names = REQUESTS.get().map(|requests| requests.without_functions()).unwrap_or_default();
        Error::TooManyViews { handler: names.join("' or '").into(), max: MAX_REQUESTS }
    })
}

/// The handler behind one of our structs; `None` for any other struct.
///
/// # Errors
/// [`Error::RequestEnded`] where its request is gone.
pub(super) fn handler_at(draft: *const Draft2) -> Result<Option<Handler>, Error> {
    let named = NAMED.iter().position(|place| std::ptr::eq(place.load(Ordering::Acquire), draft) && !draft.is_null());
    match named {
        Some(number) => Ok(handler_behind(&HANDLERS[number])),
        None => REQUESTS.get().map_or(Ok(None), |requests| requests.with_struct(draft)),
    }
}

/// The struct that stands for a handler. Both forms: the first draft's is the beginning of the second's.
///
/// # Errors
/// [`Error::TooManyViews`] for a named handler past [`MAX_NAMED`].
pub(super) fn of(handler: Handler) -> Result<*const Draft2, Error> {
    if handler.is_request() { Ok(requests().struct_of(handler)) } else { of_named(handler) }
}

fn of_named(handler: Handler) -> Result<*const Draft2, Error> {
    let wanted = handler.into_pointer().as_ptr();
    let free_or_own = |place: &AtomicPtr<c_void>| {
        // AcqRel: takes the place, or sees who has it.
        match place.compare_exchange(null_mut(), wanted, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => true,
            Err(present) => std::ptr::eq(present, wanted),
        }
    };
    let number = HANDLERS[..MAX_NAMED].iter().position(free_or_own);
    let number = number.ok_or_else(|| Error::TooManyViews { handler: handler.name(), max: MAX_NAMED })?;
    let place = &NAMED[number];
    let present = place.load(Ordering::Acquire);
    if !present.is_null() {
        return Ok(present);
    }
    let _immortal = unattributed();
    let fresh = Box::into_raw(Box::new(set(number).named(&handler.name())));
    match place.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Ok(fresh),
        Err(faster) => {
            // SAFETY: made above, and seen by nobody.
            drop(unsafe { Box::from_raw(fresh) });
            Ok(faster)
        }
    }
}

/// The structs of requests, each with the request that it was given out for last.
struct Requests(Locked<Structs>);

#[derive(Default)]
struct Structs {
    /// By the address of the struct that NumPy sees, which is that of a slot: the address of ours.
    by_slot: BTreeMap<usize, usize>,
    by_address: BTreeMap<usize, Given>,
}

struct Given {
    /// Leaked.
    draft: NonNull<Draft2>,
    request: Handler,
    /// Of its functions.
    number: usize,
}

// SAFETY: the struct is written under the lock only, and `Handler` may be sent.
unsafe impl Send for Given {}

static REQUESTS: Made<Arc<Requests>> = Made::new();

fn requests() -> &'static Requests {
    REQUESTS.get_or_make(|| held_across_fork(Requests(Locked::new(Structs::default()))))
}

impl HeldAcrossFork for Requests {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(self.0.lock());
    }
}

/// Whether anything still holds a request. Takes no hold, whose end would run whatever a strategy does in its
/// destructor.
fn is_there(request: Handler) -> bool {
    handler_with_struct(request.as_ptr()) == Some(request)
}

impl Requests {
    /// The struct for a request, which the caller holds: it is selected.
    fn struct_of(&self, request: Handler) -> *const Draft2 {
        let (slot, name) = (request.as_ptr().addr(), request.name());
        self.0.with(|structs| {
            let Structs { by_slot, by_address } = structs;
            let given = by_slot.get(&slot).and_then(|address| by_address.get_mut(address));
            if let Some(given) = given {
                if given.request != request {
                    given.request = request;
                    given.number = lend(request);
                    // SAFETY: leaked, and written under the lock. The request that it was given out for is gone; by
                    // then C must not look at it any more (the header).
                    unsafe { given.draft.write(set(given.number).named(&name)) };
                }
                return given.draft.as_ptr().cast_const();
            }
            let number = lend(request);
            let _immortal = unattributed();
            let draft = NonNull::from(Box::leak(Box::new(set(number).named(&name))));
            by_slot.insert(slot, draft.addr().get());
            by_address.insert(draft.addr().get(), Given { draft, request, number });
            draft.as_ptr().cast_const()
        })
    }

    /// The names of the requests whose structs have functions that only fail: a call of such a function is for one of
    /// these.
    #[cold]
    fn without_functions(&self) -> Vec<String> {
        self.0.with(|structs| {
            let without =
                structs.by_address.values().filter(|given| given.number == NO_HANDLER && is_there(given.request));
            // SAFETY: leaked, written under the lock, which is held.
            without.map(|given| name_in(unsafe { &given.draft.as_ref().first })).collect()
        })
    }

    fn with_struct(&self, draft: *const Draft2) -> Result<Option<Handler>, Error> {
        self.0.with(|structs| {
            let Some(given) = structs.by_address.get(&draft.addr()) else { return Ok(None) };
            if is_there(given.request) {
                return Ok(Some(given.request));
            }
            // SAFETY: leaked, written under the lock, which is held.
            let request = name_in(unsafe { &given.draft.as_ref().first });
            Err(Error::RequestEnded { request, requested_bytes: 0 })
        })
    }
}

/// The name in a struct of ours.
fn name_in(draft: &Draft1) -> String {
    // SAFETY: [`Set::named`] wrote the name, and a NUL behind it.
    unsafe { CStr::from_ptr(draft.name.as_ptr()) }.to_string_lossy().into_owned()
}

/// The number of a set for a request; [`NO_HANDLER`] where all of them are those of requests that are there. Only under
/// the lock. A block holds its request, so a set that made one is nobody else's before the block is freed.
fn lend(request: Handler) -> usize {
    let is_free = |place: &AtomicPtr<c_void>| handler_behind(place).is_none_or(|other| !is_there(other));
    match HANDLERS[MAX_NAMED..].iter().position(is_free) {
        Some(number) => {
            // Release pairs with the Acquire in `handler_behind`.
            HANDLERS[MAX_NAMED + number].store(request.into_pointer().as_ptr(), Ordering::Release);
            MAX_NAMED + number
        }
        None => NO_HANDLER,
    }
}

/// The functions of one struct.
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
    fn named(&self, name: &str) -> Draft2 {
        let mut field: [c_char; 128] = [0; 128];
        // A request's name may be longer than the struct has room for, and have a NUL in it.
        let end = (0..field.len().min(name.len() + 1)).rev().find(|&end| name.is_char_boundary(end)).unwrap_or(0);
        for (place, byte) in field.iter_mut().zip(name[..end].bytes()) {
            *place = if byte == 0 { b'_' as c_char } else { byte as c_char };
        }
        Draft2 {
            first: Draft1 {
                name: field,
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

/// The functions whose number is written `HIGH`, `LOW` in base 16. They pass it on, so that each is a few instructions.
struct Numbered<const HIGH: usize, const LOW: usize>;

impl<const HIGH: usize, const LOW: usize> Numbered<HIGH, LOW> {
    const NUMBER: usize = HIGH * 16 + LOW;
    const SET: Set = Set {
        alloc: Self::alloc,
        zeroed_alloc: Self::zeroed_alloc,
        free: Self::free,
        realloc: Self::realloc,
        host2obj: Self::copy::<HOST2OBJ>,
        obj2host: Self::copy::<OBJ2HOST>,
        obj2obj: Self::copy::<OBJ2OBJ>,
    };

    /// # Safety
    /// - pointers are NULL or live blocks of the struct's handler, given up; in `realloc` unless that fails. So for all
    ///   three.
    unsafe extern "C" fn alloc(size: usize) -> *mut c_void {
        // SAFETY: there is no block in this call.
        unsafe { pass_on(Self::NUMBER, Call::Malloc { size }) }
    }

    unsafe extern "C" fn zeroed_alloc(nelem: usize, elsize: usize) -> *mut c_void {
        // SAFETY: there is no block in this call.
        unsafe { pass_on(Self::NUMBER, Call::Calloc { nelem, elsize }) }
    }

    unsafe extern "C" fn free(ptr: *mut c_void, size: usize) {
        // SAFETY: the caller gives up a block of the handler with this number.
        unsafe { pass_on(Self::NUMBER, Call::Free { ptr, size }) };
    }

    unsafe extern "C" fn realloc(ptr: *mut c_void, new_size: usize) -> *mut c_void {
        // SAFETY: the caller gives up a block of the handler with this number, unless this fails.
        unsafe { pass_on(Self::NUMBER, Call::Realloc { ptr, new_size }) }
    }

    /// # Safety
    /// - as the second draft has it: both sides have `size` bytes and do not overlap, `dst` is in a live block of the
    ///   struct's handler; for `obj2host` it is `src`, for `obj2obj` both are.
    unsafe extern "C" fn copy<const WHICH: usize>(dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
        // SAFETY: the caller keeps the draft's contract, for blocks of the handler with this number.
        unsafe { copy(Self::NUMBER, WHICH, dst, src, size) }
    }
}

/// # Safety
/// - a pointer in `call` is NULL or a live block of the handler with this number, given up; by `Realloc` unless that
///   fails.
#[inline(never)]
unsafe fn pass_on(number: usize, call: Call) -> *mut c_void {
    served(null_mut(), || {
        let handler = || numbered(number);
        let block = match call {
            Call::Malloc { size } => handler()?.allocate(size)?,
            // A product that overflows is more than any handler has.
            Call::Calloc { nelem, elsize } => handler()?.allocate_zeroed(array(nelem, elsize).unwrap_or(usize::MAX))?,
            Call::Realloc { ptr, new_size } => match NonNull::new(ptr.cast()) {
                None => handler()?.allocate(new_size)?,
                // SAFETY: the caller gives up a block of this handler, unless this fails.
                Some(block) => unsafe { handler()?.resize(block, new_size) }?,
            },
            Call::Free { ptr, size } => {
                if let Some(block) = NonNull::new(ptr.cast()) {
                    // SAFETY: the caller gives up a block of this handler.
                    unsafe { handler()?.release(block, size) };
                }
                return Ok(null_mut());
            }
        };
        Ok(block.as_ptr().cast())
    })
}

/// The copy function [`HOST2OBJ`], [`OBJ2HOST`] or [`OBJ2OBJ`] of a handler.
///
/// # Safety
/// - as the second draft has it, for blocks of the handler with this number.
#[inline(never)]
unsafe fn copy(number: usize, which: usize, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
    let block = |pointer: *const c_void| NonNull::new(pointer.cast_mut().cast::<u8>());
    served(null_mut(), || {
        let handler = numbered(number)?;
        // SAFETY: the caller keeps the draft's contract.
        unsafe {
            match (which, block(dst), block(src)) {
                (HOST2OBJ, Some(to), _) => handler.copy_in(to, src.cast(), size),
                (OBJ2HOST, _, Some(from)) => handler.copy_out(dst.cast(), from, size),
                (OBJ2OBJ, Some(to), Some(from)) => handler.copy_across(to, from, size),
                _ => return Ok(null_mut()),
            }?;
        }
        Ok(dst)
    })
}

/// The set with this number, or that of [`NO_HANDLER`].
fn set(number: usize) -> &'static Set {
    const LAST: Set = Numbered::<{ NO_HANDLER / 16 }, { NO_HANDLER % 16 }>::SET;
    if number == NO_HANDLER { &LAST } else { &SETS[number / 256][number / 16 % 16][number % 16] }
}

/// All of them, by their digits.
static SETS: [[[Set; 16]; 16]; (MAX_NAMED + MAX_REQUESTS) / 256] =
    [by_digit!(|HIGH| row::<HIGH>()), by_digit!(|HIGH| row::<{ 0x10 + HIGH }>())];

const fn row<const HIGH: usize>() -> [Set; 16] {
    by_digit!(|LOW| Numbered::<HIGH, LOW>::SET)
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests {
    use super::*;
    use crate::handler::register;
    use crate::strategy::System;
    use std::thread;

    /// Under Miri with the stale values that a weakly ordered machine shows: `make miri-seeds`.
    #[test]
    fn threads_find_the_one_struct_of_a_handler_complete() {
        let handler = register("of the one struct", System).expect("a new name");
        let find = || {
            let draft = of(handler).expect("there is room");
            // SAFETY: a struct of ours, which is immortal.
            let name = unsafe { CStr::from_ptr((*draft).first.name.as_ptr()) };
            assert_eq!(name.to_bytes(), b"of the one struct");
            assert_eq!(handler_at(draft), Ok(Some(handler)));
            draft.addr()
        };
        thread::scope(|scope| {
            let threads = [(); 2].map(|()| scope.spawn(find));
            while NAMED.iter().all(|place| place.load(Ordering::Relaxed).is_null()) {
                thread::yield_now();
            }
            let found = find();
            assert_eq!(threads.map(|thread| thread.join().expect("no panic")), [found; 2]);
        });
    }
}
