//! The table: one for each process, made at first use, never freed, shared by every copy of this crate that
//! calls `python::init`.
//!
//! Registering takes a lock; looking up takes none. The lock is held across `fork`, so that a child is never
//! born with somebody else's half-done registration.

use super::abi::PyDataMem_Handler;
use super::builtin;
use super::entry::{Draft, Entry, Handler};
use super::events::Events;
use super::index::{Index, hash_address, hash_name};
use super::interpreter::Interpreter;
use super::requests::Chunks;
use crate::error::Error;
use crate::sync::{AtomicPtr, ForkLock, Ordering, Witness};
use std::cell::Cell;
use std::ptr::null_mut;

/// Laid out for C; `python::shared` names the version of this layout.
#[repr(C)]
pub(crate) struct Table {
    made: Witness,
    pub(super) lock: ForkLock,
    pub(super) events: Events,
    pub(super) interpreter: Interpreter,
    by_name: Index,
    by_face: Index,
    first: AtomicPtr<Entry>,
    /// Read and written only under the lock.
    last: AtomicPtr<Entry>,
    default: AtomicPtr<Entry>,
    /// What stands for a request of which nothing is left.
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

/// The process's table.
#[inline]
pub(super) fn table() -> &'static Table {
    // Acquire pairs with the Release in `install`.
    let table = TABLE.load(Ordering::Acquire);
    // SAFETY: only `install` puts a pointer here, of a table that lives for ever.
    match unsafe { table.as_ref() } {
        Some(table) => {
            table.made.look();
            table
        }
        None => first_use(),
    }
}

#[cold]
fn first_use() -> &'static Table {
    hold_across_fork(); // first, so that no fork falls between a table and its hold
    match install(Box::leak(Box::new(Table::with_builtins()))) {
        // The only table of this process from now on.
        Ok(table) => table,
        // Another thread was faster, or `join`. Ours was never seen; it stays behind, at most once for each racer.
        Err(table) => table,
    }
}

/// Makes `candidate` the process's table; fails with the one that is there already.
fn install(candidate: &'static Table) -> Result<&'static Table, &'static Table> {
    let pointer = std::ptr::from_ref(candidate).cast_mut();
    // AcqRel: publishes the candidate's contents, or sees the other's. Pairs with the load in `table`.
    match TABLE.compare_exchange(null_mut(), pointer, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Ok(candidate),
        Err(other) => {
            // SAFETY: not NULL, or the exchange had succeeded; put there by this function.
            let other: &'static Table = unsafe { &*other };
            other.made.look();
            Err(other)
        }
    }
}

/// Keeps the lock in one hand during `fork`: whoever holds it finishes first, and parent and child each let it go.
///
/// The hold is remembered by the thread that forks: racers of the first use may each hook in, and a table may
/// appear while somebody forks.
fn hold_across_fork() {
    thread_local! {
        static HELD: Cell<Option<&'static Table>> = const { Cell::new(None) };
    }
    extern "C" fn before() {
        // SAFETY: as in `table`.
        let table = unsafe { TABLE.load(Ordering::Acquire).as_ref() };
        if let Some(table) = table
            && HELD.get().is_none()
        {
            table.lock.acquire();
            HELD.set(Some(table));
        }
    }
    extern "C" fn after() {
        if let Some(table) = HELD.take() {
            table.lock.release();
        }
    }
    // Fails only for want of memory, and then a child of a process that registers while it forks may not register.
    // SAFETY: the functions live as long as the process (neither executables nor extension modules are unloaded).
    #[cfg(not(any(miri, ctxalloc_loom)))]
    let _ = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
    #[cfg(any(miri, ctxalloc_loom))]
    let _ = (before as extern "C" fn(), after as extern "C" fn());
}

impl Table {
    fn empty() -> Self {
        Self {
            made: Witness::new(),
            lock: ForkLock::new(),
            events: Events::none(),
            interpreter: Interpreter::none(),
            by_name: Index::new(),
            by_face: Index::new(),
            first: AtomicPtr::new(null_mut()),
            last: AtomicPtr::new(null_mut()),
            default: AtomicPtr::new(null_mut()),
            ended: AtomicPtr::new(null_mut()),
            chunks: Chunks::none(),
        }
    }

    fn with_builtins() -> Self {
        let table = Self::empty();
        let (default, ended) = builtin::register_all(&table);
        table.default.store(pointer_to(default), Ordering::Release);
        table.ended.store(pointer_to(ended), Ordering::Release);
        table
    }

    /// Enters a handler, and says whether it is new; names and structs are unique.
    ///
    /// Reports nothing: the built-in handlers enter while there is no table yet, and whoever listens may ask for one.
    pub(super) fn register(&self, draft: Draft<'_>) -> Result<(Handler, bool), Error> {
        // Dropped outside of the lock where it is refused: a strategy's destructor may register another handler.
        let mut draft = Some(draft);
        let entered = self.lock.with(|| {
            if let Some(objection) = self.objection(draft.as_ref()?) {
                return Some(Err(objection));
            }
            let draft = draft.take()?;
            let foreign = draft.face();
            let entry = draft.leak();
            self.publish(entry);
            if let Some(face) = foreign {
                self.events.entered(face);
            }
            Some(Ok(Handler::of(entry)))
        });
        match entered.expect("the draft was there") {
            Ok(handler) => Ok((handler, true)),
            Err(objection) => objection.map(|twin| (twin, false)),
        }
    }

    /// What a draft that may not enter is told: that it is in already, or an error.
    fn objection(&self, draft: &Draft<'_>) -> Option<Result<Handler, Error>> {
        if let Some(twin) = draft.face().and_then(|face| self.with_face(face.as_ptr())) {
            let same = twin.name() == draft.name();
            return Some(if same { Ok(twin) } else { Err(Error::AlreadyAdopted { name: twin.name() }) });
        }
        self.named(draft.name()).map(|_| Err(Error::NameTaken { name: draft.name().into() }))
    }

    /// Makes an entry visible: by struct, by name, in the list. Only under the lock.
    fn publish(&self, entry: &'static Entry) {
        let pointer = std::ptr::from_ref(entry).cast_mut();
        self.by_face.add(hash_address(entry.face().addr()), |entry| &entry.next_by_face, entry);
        self.by_name.add(hash_name(entry.name()), |entry| &entry.next_by_name, entry);
        let last = self.last.load(Ordering::Relaxed);
        // SAFETY: only this function puts pointers here, of entries that live for ever.
        let link = unsafe { last.as_ref() }.map_or(&self.first, |last| &last.next);
        // Release pairs with the Acquire in `iter`.
        link.store(pointer, Ordering::Release);
        self.last.store(pointer, Ordering::Relaxed);
    }

    pub(super) fn named(&self, name: &str) -> Option<Handler> {
        let found = self.by_name.find(hash_name(name), |entry| &entry.next_by_name, |entry| entry.name() == name);
        found.map(Handler::of)
    }

    pub(super) fn with_face(&self, face: *const PyDataMem_Handler) -> Option<Handler> {
        let hash = hash_address(face.addr());
        let found = self.by_face.find(hash, |entry| &entry.next_by_face, |entry| std::ptr::eq(entry.face(), face));
        found.map(Handler::of)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Handler> + use<> {
        // SAFETY: only `publish` puts pointers into the list, of entries that live for ever.
        let get = |pointer: *mut Entry| -> Option<&'static Entry> { unsafe { pointer.as_ref() } };
        // Acquire pairs with the Release in `publish`.
        let first = get(self.first.load(Ordering::Acquire));
        std::iter::successors(first, move |entry| get(entry.next.load(Ordering::Acquire))).map(Handler::of)
    }

    #[inline]
    pub(super) fn default(&self) -> Handler {
        let default = self.default.load(Ordering::Acquire);
        // SAFETY: set by `with_builtins` before anyone saw the table; entries live for ever.
        Handler::of(unsafe { &*default })
    }

    /// What stands for a request of which nothing is left.
    pub(super) fn ended(&self) -> Handler {
        let ended = self.ended.load(Ordering::Acquire);
        // SAFETY: as above.
        Handler::of(unsafe { &*ended })
    }

    /// The slots of requests.
    pub(super) fn chunks(&self) -> &Chunks {
        &self.chunks
    }
}

#[cfg(feature = "python")]
impl Table {
    /// The process's table, to be shared with another copy of this crate.
    pub(crate) fn share() -> &'static Self {
        table()
    }

    /// Uses the table of another copy of this crate from now on; false where this copy has one of its own already.
    pub(crate) fn join(shared: &'static Self) -> bool {
        match install(shared) {
            Ok(_) => true,
            Err(present) => std::ptr::eq(present, shared),
        }
    }

    /// From now on contexts in which nothing was selected use `handler`: NumPy's own default.
    pub(crate) fn set_default(handler: Handler) {
        table().default.store(pointer_to(handler), Ordering::Release);
    }
}

fn pointer_to(handler: Handler) -> *mut Entry {
    std::ptr::from_ref(handler.entry()).cast_mut()
}

#[cfg(all(test, not(ctxalloc_loom)))]
mod tests;

#[cfg(all(test, ctxalloc_loom))]
mod loom_tests;
