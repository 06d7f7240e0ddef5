//! The two drafts of NEP 49: structs whose functions know no context. The first has four of them, the second three more
//! that copy.
//!
//! Into the table goes a copy of the struct, with functions that call it ([`Adapted`]): as many as there are. Out of the
//! table, as the previous handler of `SetHandler`, comes the user's own struct, or for any other handler one of the
//! [`view`]s, of which there are so many.

use super::error::{Refusal, answer};
use super::select::name_in_c;
use super::{Selection, view};
use crate::error::Error;
use crate::handler::abi::{Copies, Copy as CopyFunction, Functions};
use crate::handler::events::tell;
use crate::handler::{
    Extras, Handler, check_name, default_handler, handler as handler_named, interpreter, register_functions,
};
use crate::layout::{array, request};
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

/// `ctxalloc_draft1_handler`: the first draft's `PyDataMem_Handler`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
#[allow(
    unpredictable_function_pointer_comparisons,
    reason = "to see whether C changed a struct: the same word, or not"
)]
pub(super) struct Draft1 {
    pub(super) name: [c_char; 128],
    pub(super) alloc: Option<unsafe extern "C" fn(usize) -> *mut c_void>,
    pub(super) zeroed_alloc: Option<unsafe extern "C" fn(usize, usize) -> *mut c_void>,
    pub(super) free: Option<unsafe extern "C" fn(*mut c_void, usize)>,
    pub(super) realloc: Option<unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void>,
}

/// `dst`, or NULL where it failed.
pub(super) type DraftCopy = unsafe extern "C" fn(dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void;

/// `ctxalloc_draft2_handler`: the second draft's.
#[repr(C)]
#[derive(Clone, Copy, PartialEq)]
#[allow(unpredictable_function_pointer_comparisons, reason = "as above")]
pub(super) struct Draft2 {
    pub(super) first: Draft1,
    pub(super) host2obj: Option<DraftCopy>,
    pub(super) obj2host: Option<DraftCopy>,
    pub(super) obj2obj: Option<DraftCopy>,
}

const _: () = assert!(size_of::<Draft1>() == 128 + 4 * size_of::<usize>());
const _: () = assert!(size_of::<Draft2>() == 128 + 7 * size_of::<usize>());

/// One of the two.
pub(super) trait Form {
    const NUMBER: u8;
    /// The struct as the longer of the two.
    ///
    /// # Safety
    /// - `draft` points to a struct of this form.
    unsafe fn read(draft: *const Self) -> Draft2;
}

impl Form for Draft1 {
    const NUMBER: u8 = 1;

    unsafe fn read(draft: *const Self) -> Draft2 {
        // SAFETY: says the caller.
        Draft2 { first: unsafe { draft.read() }, host2obj: None, obj2host: None, obj2obj: None }
    }
}

impl Form for Draft2 {
    const NUMBER: u8 = 2;

    unsafe fn read(draft: *const Self) -> Draft2 {
        // SAFETY: says the caller.
        unsafe { draft.read() }
    }
}

/// A draft's struct in the table: what stands behind the functions below. Immortal, in a list of all of them.
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
        // SAFETY: `enter` alone puts pointers here, of immortal values.
        let get = |pointer: *const Self| -> Option<&'static Self> { unsafe { pointer.as_ref() } };
        // Acquire pairs with the Release in `enter`.
        std::iter::successors(get(LAST.load(Ordering::Acquire)), move |adapted| get(adapted.next))
    }

    fn enter(mut self) -> &'static Self {
        self.next = LAST.load(Ordering::Acquire);
        let entered = Box::into_raw(Box::new(self));
        loop {
            // SAFETY: nobody else knows it yet.
            let next = unsafe { (*entered).next }.cast_mut();
            match LAST.compare_exchange(next, entered, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: immortal from now on.
                Ok(_) => return unsafe { &*entered },
                // SAFETY: as above: nobody else knows it yet.
                Err(newer) => unsafe { (*entered).next = newer },
            }
        }
    }

    /// Its handler; none where its name was taken at the last moment.
    fn handler(&'static self) -> Option<Handler> {
        let handler = handler_named(name_of(&self.contents).ok()?)?;
        std::ptr::eq(handler.functions().ctx, self.ctx()).then_some(handler)
    }

    fn of(handler: Handler) -> Option<&'static Self> {
        Self::all().find(|adapted| std::ptr::eq(handler.functions().ctx, adapted.ctx()))
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
    if let Some(handler) = view::handler_at(draft.cast()) {
        return Ok(handler);
    }
    // SAFETY: says the caller.
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
    let functions = Complete {
        alloc: first.alloc.ok_or_else(|| missing("alloc"))?,
        zeroed_alloc: first.zeroed_alloc.ok_or_else(|| missing("zeroed_alloc"))?,
        free: first.free.ok_or_else(|| missing("free"))?,
        realloc: first.realloc.ok_or_else(|| missing("realloc"))?,
    };
    check_name(name)?; // before anything is made immortal
    let adapted = Adapted { address: draft.addr(), form: F::NUMBER, contents, functions, next: null() }.enter();
    let ctx = adapted.ctx();
    let copies = Copies {
        ctx,
        host2obj: contents.host2obj.map(|_| host2obj as CopyFunction),
        obj2host: contents.obj2host.map(|_| obj2host as CopyFunction),
        obj2obj: contents.obj2obj.map(|_| obj2obj as CopyFunction),
    };
    let description = format!("struct of NEP 49's draft {} at {draft:p}", F::NUMBER);
    let functions = Functions { ctx, malloc, calloc, realloc, free };
    // SAFETY: the functions below go to those of the struct, which keep C's contract, says the caller.
    match unsafe { register_functions(name, description, functions, Extras { alignment: 1, copies }) } {
        // Another thread was faster with the same struct.
        Err(Error::NameTaken { name: taken }) => {
            Adapted::all().filter(known).find_map(Adapted::handler).ok_or(Error::NameTaken { name: taken })
        }
        outcome => outcome,
    }
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
        // SAFETY: not NULL; the rest says the caller.
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
            // SAFETY: says the caller.
            Some(object) => unsafe { S::handler_of(object.as_ptr()) }?,
        };
        Ok::<_, Refusal>(handler.map_or(null(), name_in_c))
    })
}

/// # Safety
/// - `ctx` is an [`Adapted`].
unsafe fn adapted(ctx: *mut c_void) -> &'static Adapted {
    // SAFETY: immortal.
    unsafe { &*ctx.cast() }
}

/// # Safety
/// - `ctx` is an [`Adapted`]. So below; and blocks are its own.
unsafe extern "C" fn malloc(ctx: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: says the caller.
    let alloc = unsafe { adapted(ctx) }.functions.alloc;
    let block = request(size).and_then(|size| {
        // SAFETY: it takes any size; attached, as NumPy calls it.
        interpreter::attached(|| unsafe { alloc(size) })
    });
    let block = block.unwrap_or(null_mut());
    tell(null_mut(), block, size);
    block
}

unsafe extern "C" fn calloc(ctx: *mut c_void, nelem: usize, elsize: usize) -> *mut c_void {
    // SAFETY: says the caller.
    let zeroed_alloc = unsafe { adapted(ctx) }.functions.zeroed_alloc;
    let block = array(nelem, elsize).and_then(request).and_then(|_| {
        // SAFETY: it takes any sizes; attached, as NumPy calls it.
        interpreter::attached(|| unsafe { zeroed_alloc(nelem.max(1), elsize.max(1)) })
    });
    let block = block.unwrap_or(null_mut());
    tell(null_mut(), block, nelem.saturating_mul(elsize));
    block
}

unsafe extern "C" fn realloc(ctx: *mut c_void, ptr: *mut c_void, new_size: usize) -> *mut c_void {
    // SAFETY: says the caller.
    let realloc = unsafe { adapted(ctx) }.functions.realloc;
    let moved = request(new_size).and_then(|size| {
        // SAFETY: a block of its own, or NULL; attached, as NumPy calls it.
        interpreter::attached(|| unsafe { realloc(ptr, size) })
    });
    let moved = moved.unwrap_or(null_mut());
    tell(ptr, moved, new_size);
    moved
}

unsafe extern "C" fn free(ctx: *mut c_void, ptr: *mut c_void, size: usize) {
    if ptr.is_null() {
        return;
    }
    // SAFETY: says the caller.
    let free = unsafe { adapted(ctx) }.functions.free;
    // SAFETY: a block of its own; attached, as NumPy calls it. Where Python is gone it stays.
    let _ = interpreter::attached(|| unsafe { free(ptr, size) });
    tell(ptr, null_mut(), 0);
}

/// # Safety
/// - the pointers are as the copy function wants them. So below.
unsafe fn copy(function: Option<DraftCopy>, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
    let Some(function) = function else { return null_mut() };
    // SAFETY: says the caller.
    interpreter::attached(|| unsafe { function(dst, src, size) }).unwrap_or(null_mut())
}

unsafe extern "C" fn host2obj(ctx: *mut c_void, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
    // SAFETY: says the caller.
    let function = unsafe { adapted(ctx) }.contents.host2obj;
    // SAFETY: says the caller.
    unsafe { copy(function, dst, src, size) }
}

unsafe extern "C" fn obj2host(ctx: *mut c_void, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
    // SAFETY: says the caller.
    let function = unsafe { adapted(ctx) }.contents.obj2host;
    // SAFETY: says the caller.
    unsafe { copy(function, dst, src, size) }
}

unsafe extern "C" fn obj2obj(ctx: *mut c_void, dst: *mut c_void, src: *const c_void, size: usize) -> *mut c_void {
    // SAFETY: says the caller.
    let function = unsafe { adapted(ctx) }.contents.obj2obj;
    // SAFETY: says the caller.
    unsafe { copy(function, dst, src, size) }
}
