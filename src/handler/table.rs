//! The table of handlers: one for each process, never freed, shared by every copy of this crate that calls
//! `python::init`.
//!
//! Registering takes a lock; looking up takes none. The lock is held across `fork`, so that a child is never born with
//! another thread's half-done registration. [`present`] finds the table where there is one; `process` makes it.

use super::abi::PyDataMem_Handler;
use super::entry::{Draft, Entry};
use super::events::state::Events;
use super::index::{Index, hash_address, hash_name};
use super::interpreter::Interpreter;
use super::requests::chunks::Chunks;
use super::word::Handler;
use crate::error::Error;
use crate::sync::{AtomicPtr, ForkLock, HeldAcrossFork, Ordering, Witness};
use std::ptr::null_mut;

/// Laid out for C; `python::shared` names the version of this layout.
#[repr(C)]
pub(crate) struct Table {
    made: Witness,
    pub(super) lock: ForkLock,
    pub(super) events: Events,
    pub(super) interpreter: Interpreter,
    by_name: Index,
    by_struct: Index,
    first: AtomicPtr<Entry>,
    /// Read and written only under the lock.
    last: AtomicPtr<Entry>,
    default: AtomicPtr<Entry>,
    /// Takes the place of a request's handler when nothing is left of the request.
    ended: AtomicPtr<Entry>,
    /// The slots of requests.
    chunks: Chunks,
}

#[cfg(not(ctxalloc_loom))]
static TABLE: AtomicPtr<Table> = AtomicPtr::new(null_mut());
#[cfg(ctxalloc_loom)]
loom::lazy_static! {
    static ref TABLE: AtomicPtr<Table> = AtomicPtr::new(null_mut());
}

/// The process's table, if it was made already.
#[inline]
pub(super) fn present() -> Option<&'static Table> {
    // Acquire pairs with the Release in `install`.
    let table = TABLE.load(Ordering::Acquire);
    // SAFETY: only `install` stores pointers here, of tables that live for ever.
    let table = unsafe { table.as_ref() }?;
    table.made.look();
    Some(table)
}

/// Runs `work` attached to Python, or as it is in a process without Python. `None`: Python is shutting down, and `work`
/// did not run. `work` must not panic.
pub(crate) fn attached<R>(work: impl FnOnce() -> R) -> Option<R> {
    match present() {
        Some(table) => table.interpreter.attached(work),
        None => Some(work()),
    }
}

/// Tells tracemalloc, where there is Python, of a block that is there (`size_bytes > 0`) or gone (0).
#[inline]
pub(crate) fn trace(block: *mut u8, size_bytes: usize) {
    if let Some(table) = present() {
        table.interpreter.trace(block, size_bytes);
    }
}

/// Makes `candidate` the process's table; fails with the one that is there already.
pub(super) fn install(candidate: &'static Table) -> Result<&'static Table, &'static Table> {
    let pointer = std::ptr::from_ref(candidate).cast_mut();
    // AcqRel: publishes the candidate's contents, or sees the other's. Pairs with the load in `present`.
    let installed = match TABLE.compare_exchange(null_mut(), pointer, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Ok(candidate),
        Err(other) => {
            // SAFETY: not NULL, or the exchange would have succeeded; stored by this function, of a table that lives
            // for ever.
            let other: &'static Table = unsafe { &*other };
            other.made.look();
            Err(other)
        }
    };
    let (Ok(table) | Err(table)) = installed;
    table.events.be_at_hand();
    installed
}

/// Holds the lock of a table across `fork`: whoever has it finishes first, and parent and child each release it. The
/// copy of this crate that made the table does so for all that share it.
pub(super) struct TableLock(pub(super) &'static Table);

impl HeldAcrossFork for TableLock {
    fn for_each_lock(&self, visit: &mut dyn FnMut(&ForkLock)) {
        visit(&self.0.lock);
    }
}

impl Table {
    /// A table without handlers.
    pub(super) fn empty(events: Events) -> Self {
        Self {
            made: Witness::new(),
            lock: ForkLock::new(),
            events,
            interpreter: Interpreter::none(),
            by_name: Index::new(),
            by_struct: Index::new(),
            first: AtomicPtr::new(null_mut()),
            last: AtomicPtr::new(null_mut()),
            default: AtomicPtr::new(null_mut()),
            ended: AtomicPtr::new(null_mut()),
            chunks: Chunks::none(),
        }
    }

    /// Names the handler of a context in which nothing was selected.
    pub(super) fn set_default(&self, handler: Handler) {
        self.default.store(handler.place().as_ptr(), Ordering::Release);
    }

    /// Names the handler that stands for a request of which nothing is left.
    pub(super) fn set_ended(&self, handler: Handler) {
        self.ended.store(handler.place().as_ptr(), Ordering::Release);
    }

    /// Registers a handler, and returns whether it is new; names and structs are unique.
    ///
    /// Reports nothing: the built-in handlers are registered before there is a table, and a listener may look for one.
    pub(super) fn register(&self, draft: Draft<'_>) -> Result<(Handler, bool), Error> {
        // A refused draft is dropped after the lock is released: a strategy's destructor may register another handler.
        let mut draft = Some(draft);
        let registered = self.lock.with(|| {
            if let Some(objection) = self.objection(draft.as_ref()?) {
                return Some(Err(objection));
            }
            let draft = draft.take()?;
            let foreign = draft.foreign;
            let entry = draft.leak();
            self.publish(entry);
            if let Some(foreign) = foreign {
                self.events.registered(foreign);
            }
            Some(Ok(Handler::of(entry)))
        });
        match registered.expect("the draft was there") {
            Ok(handler) => Ok((handler, true)),
            Err(objection) => objection.map(|twin| (twin, false)),
        }
    }

    /// Why a draft is not registered: it is in the table already, or it may not be.
    fn objection(&self, draft: &Draft<'_>) -> Option<Result<Handler, Error>> {
        let name = draft.name.as_str();
        if let Some(twin) = draft.foreign.and_then(|foreign| self.with_struct(foreign.as_ptr())) {
            let known_as = twin.entry().name();
            return Some(if known_as == name {
                Ok(twin)
            } else {
                Err(Error::AlreadyAdopted { name: known_as.into() })
            });
        }
        self.named(name).map(|_| Err(Error::NameTaken { name: name.into() }))
    }

    /// Makes an entry visible: by struct, by name, in the list. Only under the lock.
    fn publish(&self, entry: &'static Entry) {
        let pointer = std::ptr::from_ref(entry).cast_mut();
        self.by_struct.add(hash_address(entry.c_struct().addr()), |entry| &entry.next_by_struct, entry);
        self.by_name.add(hash_name(entry.name()), |entry| &entry.next_by_name, entry);
        let last = self.last.load(Ordering::Relaxed);
        // SAFETY: only this function stores pointers here, of entries that live for ever.
        let link = unsafe { last.as_ref() }.map_or(&self.first, |last| &last.next);
        // Release pairs with the Acquire in `iter`.
        link.store(pointer, Ordering::Release);
        self.last.store(pointer, Ordering::Relaxed);
    }

    pub(super) fn named(&self, name: &str) -> Option<Handler> {
        let found = self.by_name.find(hash_name(name), |entry| &entry.next_by_name, |entry| entry.name() == name);
        found.map(Handler::of)
    }

    pub(super) fn with_struct(&self, c_struct: *const PyDataMem_Handler) -> Option<Handler> {
        let hash = hash_address(c_struct.addr());
        let is_it = |entry: &Entry| std::ptr::eq(entry.c_struct(), c_struct);
        let found = self.by_struct.find(hash, |entry| &entry.next_by_struct, is_it);
        found.map(Handler::of)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Handler> + use<> {
        // SAFETY: only `publish` stores pointers in the list, of entries that live for ever.
        let get = |pointer: *mut Entry| -> Option<&'static Entry> { unsafe { pointer.as_ref() } };
        // Acquire pairs with the Release in `publish`.
        let first = get(self.first.load(Ordering::Acquire));
        std::iter::successors(first, move |entry| get(entry.next.load(Ordering::Acquire))).map(Handler::of)
    }

    /// The handler of a context in which nothing was selected.
    #[inline]
    pub(super) fn default(&self) -> Handler {
        Self::named_once(&self.default)
    }

    /// Takes the place of a request's handler when nothing is left of the request.
    pub(super) fn ended(&self) -> Handler {
        Self::named_once(&self.ended)
    }

    #[inline]
    fn named_once(place: &AtomicPtr<Entry>) -> Handler {
        let entry = place.load(Ordering::Acquire);
        // SAFETY: the process's table has both of these before anybody sees it, and only handlers of the table, whose
        // entries live for ever, are named.
        Handler::of(unsafe { &*entry })
    }

    /// The slots of requests.
    pub(super) fn chunks(&self) -> &Chunks {
        &self.chunks
    }
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests;

#[cfg(all(test, ctxalloc_loom))]
mod loom_tests;
