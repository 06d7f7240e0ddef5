//! The drafts' `SetHandler`. It registers a copy of the struct that it is given, behind functions that call the
//! struct's own ([`Adapted`]); any number of structs can be set. It returns the handler that was selected before: the
//! user's own struct where that was a draft, else a struct from [`view`].

use super::error::{Refusal, answer};
use super::forms::{Draft2, DraftCopy, Form};
use super::select::name_in_c;
use super::{Selection, view};
use crate::error::Error;
use crate::handler::call::{Answer, AnswerCopy, Call, copies, functions};
use crate::handler::{
    Extras, Handler, attached, check_name, default_handler, handler as handler_named, name_at, register_functions,
};
use crate::layout::{array, request};
use crate::unattributed::unattributed;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A draft's struct in the table: the context of the functions below. Immortal, in a list of all of them.
struct Adapted {
    address: usize,
    form: u8,
    contents: Draft2,
    functions: Complete,
    next: *const Adapted,
}

/// The four functions, none missing.
#[derive(Clone, Copy)]
struct Complete {
    alloc: unsafe extern "C" fn(usize) -> *mut c_void,
    zeroed_alloc: unsafe extern "C" fn(usize, usize) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void, usize),
    realloc: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void,
}

/// The last one that was adapted.
static LAST: AtomicPtr<Adapted> = AtomicPtr::new(null_mut());

impl Adapted {
    fn all() -> impl Iterator<Item = &'static Self> {
        // SAFETY: `leak` alone stores pointers here, of values that live for ever.
        let get = |pointer: *const Self| -> Option<&'static Self> { unsafe { pointer.as_ref() } };
        // Acquire pairs with the exchange in `leak`.
        std::iter::successors(get(LAST.load(Ordering::Acquire)), move |adapted| get(adapted.next))
    }

    fn leak(mut self) -> &'static Self {
        self.next = LAST.load(Ordering::Acquire);
        let _immortal = unattributed();
        let adapted = Box::leak(Box::new(self));
        while let Err(newer) =
            LAST.compare_exchange(adapted.next.cast_mut(), adapted, Ordering::AcqRel, Ordering::Acquire)
        {
            adapted.next = newer;
        }
        adapted
    }

    /// Its handler; none where its name was taken at the last moment.
    fn handler(&'static self) -> Option<Handler> {
        let name = name_of(&self.contents).ok()?;
        let under =
            |name: &str| handler_named(name).filter(|handler| std::ptr::eq(handler.functions().ctx, self.ctx()));
        under(name).or_else(|| under(&name_at(name, self.address)))
    }

    fn of(handler: Handler) -> Option<&'static Self> {
        Self::all().find(|adapted| std::ptr::eq(handler.functions().ctx, adapted.ctx()))
    }

    fn copies(&self) -> [Option<DraftCopy>; 3] {
        [self.contents.host2obj, self.contents.obj2host, self.contents.obj2obj]
    }

    fn ctx(&'static self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }
}

fn name_of(draft: &Draft2) -> Result<&str, Error> {
    let field = &draft.first.name;
    // SAFETY: c_char is i8 or u8: same size, same alignment, every bit pattern valid.
    let bytes = unsafe { std::slice::from_raw_parts(field.as_ptr().cast::<u8>(), field.len()) };
    let name = CStr::from_bytes_until_nul(bytes).map_err(|_| Error::NameUnreadable)?;
    name.to_str().map_err(|_| Error::NameUnreadable)
}

/// The handler that a struct stands for: known, or taken into the table now.
///
/// # Safety
/// - `draft` points to an immortal struct of this form, whose functions keep C's contract, attached to Python.
unsafe fn adapt<F: Form>(draft: *const F) -> Result<Handler, Error> {
    if let Some(handler) = view::handler_at(draft.cast())? {
        return Ok(handler);
    }
    // SAFETY: the caller passes a struct of this form.
    let contents = unsafe { F::read(draft) };
    let known = |adapted: &&'static Adapted| adapted.address == draft.addr() && adapted.form == F::NUMBER;
    if let Some((adapted, handler)) =
        Adapted::all().filter(known).find_map(|adapted| Some((adapted, adapted.handler()?)))
    {
        let same = adapted.contents == contents;
        return if same {
            Ok(handler)
        } else {
            Err(Error::DraftChanged { handler: handler.name(), address: draft.addr() })
        };
    }
    let name = name_of(&contents)?;
    let missing = |function| Error::FunctionMissing { handler: name.into(), function };
    let first = &contents.first;
    let complete = Complete {
        alloc: first.alloc.ok_or_else(|| missing("alloc"))?,
        zeroed_alloc: first.zeroed_alloc.ok_or_else(|| missing("zeroed_alloc"))?,
        free: first.free.ok_or_else(|| missing("free"))?,
        realloc: first.realloc.ok_or_else(|| missing("realloc"))?,
    };
    match check_name(name) {
        Err(Error::NameTaken { .. }) => {} // it gets another one below
        possible => possible?,             // before anything is made immortal
    }
    let adapted =
        Adapted { address: draft.addr(), form: F::NUMBER, contents, functions: complete, next: null() }.leak();
    let ctx = adapted.ctx();
    let copies = copies::<Adapted>(ctx, adapted.copies().map(|function| function.is_some()));
    let description = format!("struct of NEP 49's draft {} at {draft:p}", F::NUMBER);
    let functions = functions::<Adapted>(ctx);
    let extras = Extras { alignment: 1, copies };
    // SAFETY: the functions below call those of the struct, and the caller promises that these keep C's contract.
    match unsafe { register_functions(name, description.clone(), functions, extras) } {
        Err(Error::NameTaken { .. }) => {}
        outcome => return outcome,
    }
    // Another thread was faster with the same struct.
    if let Some(handler) = Adapted::all().filter(known).find_map(Adapted::handler) {
        return Ok(handler);
    }
    // The drafts know no unique names: two libraries may carry one allocator, each with its own copy of the struct.
    // SAFETY: the functions below call those of the struct, and the caller promises that these keep C's contract.
    unsafe { register_functions(&name_at(name, draft.addr()), description, functions, extras) }
}

/// A struct for a handler: the user's own, or a view.
fn given<F: Form>(handler: Handler) -> Result<*const F, Error> {
    match Adapted::of(handler).filter(|adapted| adapted.form == F::NUMBER) {
        Some(own) => Ok(std::ptr::with_exposed_provenance(own.address)),
        None => view::of(handler).map(<*const Draft2>::cast),
    }
}

/// `ctxalloc_draft1_set_handler`, `ctxalloc_draft2_set_handler`.
///
/// # Safety
/// - `draft` is NULL or as [`adapt`] wants it.
pub(super) unsafe extern "C" fn set_handler<S: Selection, F: Form>(draft: *const F) -> *const F {
    answer(null(), || {
        // SAFETY: the caller passes NULL or a struct as `adapt` wants it.
        let handler = if draft.is_null() { default_handler() } else { unsafe { adapt(draft) }? };
        draft.expose_provenance();
        let before = S::current()?;
        // First what may fail: then nothing has changed.
        let before = if before == default_handler() { null() } else { given(before)? };
        S::select(handler)?;
        Ok(before)
    })
}

/// `ctxalloc_draft1_get_handler_name`, `ctxalloc_draft2_get_handler_name`.
///
/// # Safety
/// - `object` is NULL or an object of [`Selection::handler_of`]'s kind.
pub(super) unsafe extern "C" fn get_handler_name<S: Selection>(object: *mut c_void) -> *const c_char {
    answer(null(), || {
        let handler = match NonNull::new(object) {
            None => Some(S::current()?),
            // SAFETY: the caller passes an object of that kind.
            Some(object) => unsafe { S::handler_of(object.as_ptr()) }?,
        };
        Ok::<_, Refusal>(handler.map_or(null(), name_in_c))
    })
}

/// # Safety
/// - `ctx` is an [`Adapted`], which is the context that these functions are registered with.
unsafe fn adapted(ctx: *mut c_void) -> &'static Adapted {
    // SAFETY: the caller passes an `Adapted`, and those live for ever.
    unsafe { &*ctx.cast() }
}

impl Answer for Adapted {
    unsafe fn answer(ctx: *mut c_void, call: Call) -> *mut c_void {
        // SAFETY: the caller passes the context that belongs to these functions.
        let own = &unsafe { adapted(ctx) }.functions;
        let telling = call.begin();
        // SAFETY: the draft's functions take any sizes, and NULL or a block that they made, attached, as from NumPy.
        let block = unsafe {
            match call {
                Call::Malloc { size } => request(size).and_then(|size| attached(|| (own.alloc)(size))),
                Call::Calloc { nelem, elsize } => array(nelem, elsize)
                    .and_then(request)
                    .and_then(|_| attached(|| (own.zeroed_alloc)(nelem.max(1), elsize.max(1)))),
                Call::Realloc { ptr, new_size } => {
                    request(new_size).and_then(|size| attached(|| (own.realloc)(ptr, size)))
                }
                Call::Free { ptr, .. } if ptr.is_null() => None,
                Call::Free { ptr, size } => {
                    attached(|| (own.free)(ptr, size)); // where Python is gone the block stays
                    None
                }
            }
        };
        telling.done(block.unwrap_or(null_mut()))
    }
}

impl AnswerCopy for Adapted {
    unsafe fn copy(ctx: *mut c_void, which: usize, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
        // SAFETY: the caller passes the context that belongs to these functions.
        let Some(function) = unsafe { adapted(ctx) }.copies()[which] else { return null_mut() };
        // SAFETY: the caller passes what the function wants.
        attached(|| unsafe { function(dst, src, size) }).unwrap_or(null_mut())
    }
}

#[cfg(all(test, feature = "capi", not(ctxalloc_loom)))]
mod tests;
