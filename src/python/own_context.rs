//! What a ContextVar has in the Context that a thread runs in, read without the GIL.
//!
//! Native code may make memory right after a thread was given another Context: a parser that is called as the first
//! thing in a thread lets go of the GIL before Python made anything. `PyContextVar_Get` needs the GIL. But the thread
//! is in its Context: nobody else changes that, or the tree of its variables, whose nodes never change and live as long
//! as it has them. So this walks the tree itself (`Python/hamt.c`, the same in 3.11 to 3.14), without counting
//! references.
//!
//! It is tried when the whole request is enabled, with few and with many variables: where one answer is wrong, nothing
//! is read without the GIL, and such memory is nobody's.

#![allow(unsafe_code, reason = "CPython's structs")]

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCFunction;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Where things are in their structs, in words.
pub(super) const TYPE: usize = 1;
/// `PyContext.ctx_vars`.
const VARS: usize = 3;
/// `PyHamtObject.h_root`.
const ROOT: usize = 2;
/// `PyHamtNode_Array.a_array`.
const CHILDREN: usize = 2;
/// `PyHamtNode_Bitmap.b_bitmap`, behind the head of a `PyVarObject`; and `b_array`: a key and its value, or 0 and a
/// node.
const BITMAP: usize = 3;
const PAIRS: usize = 4;

/// A node has 32 children: five bits of the hash.
const BITS: u32 = 5;
/// Seven levels have all 32 bits.
const LEVELS: u32 = 7;

/// Where a thread state has its Context, in bytes, and how to get the state of this thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct State {
    pub(super) own: unsafe extern "C" fn() -> *const c_void,
    pub(super) context_at: usize,
}

impl State {
    fn own_state(self) -> *const c_void {
        // SAFETY: any thread may ask while Python runs.
        unsafe { (self.own)() }
    }

    /// # Safety
    /// - this thread has a thread state.
    unsafe fn context(self) -> *const c_void {
        // SAFETY: this function's contract, and the place was found there (`version_offset`).
        unsafe { self.own_state().byte_add(self.context_at).cast::<*const c_void>().read() }
    }
}

/// The addresses of the types of the two kinds of nodes. There is a third, for variables of one hash, in which none is
/// found.
#[derive(Debug, Clone, Copy)]
struct Nodes {
    bitmap: usize,
    array: usize,
}

/// A variable by its address, and how to find what it has.
#[derive(Debug)]
pub(super) struct Reader {
    var: usize,
    hash: u32,
    nodes: Nodes,
    context_at: usize,
    /// Whether CPython says who has the GIL, and not whether this thread has it (3.11).
    is_of_any_thread: bool,
}

/// # Safety
/// - `object` has a word there.
pub(super) unsafe fn word(object: *const c_void, at: usize) -> *const c_void {
    // SAFETY: `object` has a word in this place (this function's contract).
    unsafe { object.cast::<*const c_void>().add(at).read() }
}

/// `hamt_hash`: 32 bits of a hash's 64.
fn folded(hash: isize) -> u32 {
    let folded = hash as i32 ^ (hash >> 32) as i32;
    (if folded == -1 { -2 } else { folded }).cast_unsigned()
}

impl Reader {
    /// For this variable, of a process that never lets go of it. `None`: the answers would not be right.
    pub(super) fn tried(py: Python<'_>, var: &Bound<'_, PyAny>, state: State) -> PyResult<Option<Self>> {
        if cfg!(not(target_pointer_width = "64")) || !(11..=14).contains(&py.version_info().minor) {
            return Ok(None);
        }
        let probe = variable(py)?;
        let root = |context: &Bound<'_, PyAny>| {
            // SAFETY: called in a Context that has a variable, so that there is a tree.
            in_context(py, context, move || unsafe { word(word(word(state.context(), VARS), ROOT), TYPE) }.addr())
        };
        let nodes = Nodes { bitmap: root(&context_of(py, 1)?)?, array: root(&context_of(py, 500)?)? };
        if nodes.bitmap == nodes.array {
            return Ok(None);
        }
        for others in [0, 1, 2, 10, 16, 17, 40, 500] {
            let context = context_of(py, others)?;
            for expected in [0, probe.as_ptr().addr()] {
                if expected != 0 {
                    context.call_method1("run", (probe.getattr("set")?, &probe))?;
                }
                let reader = Self::new(&probe, nodes, state)?;
                // SAFETY: called by the thread that runs in the Context.
                let read = move || unsafe { reader.value(state.own_state()) }.map_or(0, |value| value.addr().get());
                if in_context(py, &context, read)? != expected {
                    return Ok(None);
                }
            }
        }
        Self::new(var, nodes, state).map(Some)
    }

    fn new(var: &Bound<'_, PyAny>, nodes: Nodes, state: State) -> PyResult<Self> {
        Ok(Self {
            var: var.as_ptr().addr(),
            hash: folded(var.hash()?),
            nodes,
            context_at: state.context_at,
            is_of_any_thread: var.py().version_info() < (3, 12),
        })
    }

    /// Whether "the state that has the GIL" may be another thread's.
    pub(super) fn is_of_any_thread(&self) -> bool {
        self.is_of_any_thread
    }

    /// What the variable has where this thread runs; `None`: it is not set there.
    ///
    /// # Safety
    /// - `state` is this thread's own thread state, and Python runs.
    #[inline(always)]
    pub(super) unsafe fn value(&self, state: *const c_void) -> Option<NonNull<ffi::PyObject>> {
        // SAFETY: only this thread changes which Context it is in, and what that has, and it is here. So all of these
        // are alive; the places of the words were tried.
        unsafe {
            let context = state.byte_add(self.context_at).cast::<*const c_void>().read();
            if context.is_null() {
                return None;
            }
            let vars = word(context, VARS);
            if vars.is_null() {
                return None;
            }
            let root = word(vars, ROOT);
            if self.is_not_below_few(root) { None } else { self.found_below(root) }
        }
    }

    /// Whether the root of few variables says that the variable is not among them: so it says most of the time while
    /// nothing is selected, and who asks is to touch few lines of the caches.
    ///
    /// # Safety
    /// - as for [`found_below`](Self::found_below).
    #[inline(always)]
    unsafe fn is_not_below_few(&self, root: *const c_void) -> bool {
        // SAFETY: a node that lives, if there is one (this function's contract), whose type says its kind.
        unsafe {
            let is_bitmap = !root.is_null() && word(root, TYPE).addr() == self.nodes.bitmap;
            is_bitmap && bitmap_of(root) & (1 << (self.hash & 31)) == 0
        }
    }

    /// # Safety
    /// - `root` is a node of a tree that lives, or null.
    #[inline(never)]
    unsafe fn found_below(&self, root: *const c_void) -> Option<NonNull<ffi::PyObject>> {
        let mut node = root;
        for level in 0..LEVELS {
            let child = (self.hash >> (level * BITS)) & 31;
            if node.is_null() {
                return None;
            }
            // SAFETY: a node that lives (this function's contract, and children live with it), of the kind that its
            // type says: `b_array` has a pair for each bit that is set, `a_array` 32 nodes.
            unsafe {
                let kind = word(node, TYPE).addr();
                if kind == self.nodes.array {
                    node = word(node, CHILDREN + child as usize);
                    continue;
                }
                if kind != self.nodes.bitmap {
                    return None;
                }
                let bitmap = bitmap_of(node);
                if bitmap & (1 << child) == 0 {
                    return None;
                }
                let before = (bitmap & ((1 << child) - 1)).count_ones() as usize;
                let (key, value) = (word(node, PAIRS + 2 * before), word(node, PAIRS + 2 * before + 1));
                if key.is_null() {
                    node = value;
                    continue;
                }
                return if key.addr() == self.var { NonNull::new(value.cast_mut().cast()) } else { None };
            }
        }
        None
    }
}

/// # Safety
/// - `node` is a node of the kind that has a bitmap.
unsafe fn bitmap_of(node: *const c_void) -> u32 {
    // SAFETY: it is there in such a node (this function's contract).
    unsafe { node.cast::<*const c_void>().add(BITMAP).cast::<u32>().read() }
}

fn variable(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    py.import("contextvars")?.getattr("ContextVar")?.call1(("ctxalloc",))
}

/// A Context that has so many variables.
fn context_of(py: Python<'_>, count: usize) -> PyResult<Bound<'_, PyAny>> {
    let context = py.import("contextvars")?.getattr("Context")?.call0()?;
    for number in 0..count {
        context.call_method1("run", (variable(py)?.getattr("set")?, number))?;
    }
    Ok(context)
}

/// What this says in a Context.
fn in_context(
    py: Python<'_>,
    context: &Bound<'_, PyAny>,
    read: impl Fn() -> usize + Send + Sync + 'static,
) -> PyResult<usize> {
    let found = Arc::new(AtomicUsize::new(0));
    let to = Arc::clone(&found);
    let probe = PyCFunction::new_closure(py, None, None, move |_, _| to.store(read(), Ordering::Relaxed))?;
    context.call_method1("run", (probe,))?;
    Ok(found.load(Ordering::Relaxed))
}
