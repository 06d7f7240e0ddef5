//! What `preload.c` and this layer share: its structs and functions.

use crate::handler::Handler;
use crate::sync::fork_of_this_thread;
use crate::unattributed::pause_of_this_thread;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, compiler_fence};

/// Which of the three ranges a block is in, and who asked for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Native = 0,
    /// Python's domain MEM.
    Mem = 1,
    /// Python's domain OBJ.
    Obj = 2,
}

impl Kind {
    pub(super) fn of(number: u32) -> Self {
        [Self::Native, Self::Mem, Self::Obj].get(number as usize).copied().unwrap_or(Self::Native)
    }
}

/// `struct thread` of `preload.c`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Thread {
    pub(super) left: i64,
    pub(super) granted: i64,
    pub(super) sample_left: i64,
    pub(super) random: u64,
    /// Python's thread state when Python was last asked.
    pub(crate) state: *const c_void,
    /// The version of the running Context then.
    pub(crate) version: u64,
    /// The handler that was selected then, as a word; 0: no request's.
    pub(crate) account: u64,
    pub(super) busy: u32,
    pub(super) object: u32,
    pub(super) resize: u32,
    /// [`NOT_RAISING`], [`RAISING`], [`OWED`], [`RAISED`], [`NOTED`], [`REFUSES`], [`TELLING`] or
    /// [`REFUSED_ONE`].
    pub(crate) raising: u32,
    /// The next block of so many bytes is refused; 0: none.
    pub(super) refusing: u64,
    /// In [`REFUSED_ONE`]: which function the loop had called where it was refused. In [`REFUSES`]: how much was looked
    /// at since.
    pub(super) refused_in: u64,
    /// Where [`is_paused`](crate::unattributed::is_paused) and [`is_forking`](crate::sync::is_forking) find their
    /// answers on this thread; NULL until they were asked for. Those functions call the loader each time.
    paused: *const bool,
    held: *const *mut c_void,
    /// Where it counts what is nobody's; `None` before it has asked.
    pub(super) nobodys: Option<&'static AtomicU64>,
    /// How many calls that change a ContextVar it is inside of. CPython forgets the cached value first and allocates
    /// afterwards: who read the variable then would have the old value cached again, of which `PyContextVar_Reset` lets
    /// go.
    pub(crate) changes: u32,
}

impl Thread {
    /// Whether we, or somebody in our place, are at work on it.
    pub(super) fn is_busy(&self) -> bool {
        self.busy > 0
    }

    /// Whether its blocks are looked at. Not while we are at work ourselves.
    pub(super) fn may_decide(&mut self) -> bool {
        if self.busy > 0 || self.is_forking() {
            return false;
        }
        // SAFETY: `is_forking` has found it. It is this thread's own, and lives as long as the thread, as this struct
        // does; nobody has a reference to it for longer than a call.
        unsafe { !self.paused.read() }
    }

    /// Whether its blocks are looked at, and nothing is to be looked at but who is selected.
    #[inline(always)]
    pub(super) fn is_plain(&self) -> bool {
        const _: () = assert!(NOT_RAISING == 0);
        if (self.busy | self.raising) != 0 || self.refusing != 0 || self.held.is_null() {
            return false;
        }
        // SAFETY: `is_forking` has found both, the one before the other. They are this thread's own, and live as long
        // as the thread, as this struct does; nobody has a reference to them for longer than a call.
        unsafe { self.held.read().is_null() && !self.paused.read() }
    }

    /// Whether it is between the two sides of a `fork`, and so has taken all locks that are held across it.
    pub(super) fn is_forking(&mut self) -> bool {
        if self.held.is_null() {
            self.paused = pause_of_this_thread();
            compiler_fence(Ordering::SeqCst); // a signal's handler that allocates in between asks once more
            self.held = fork_of_this_thread();
        }
        // SAFETY: this thread's own, which lives as long as the thread, as this struct does; nobody has a reference to
        // it for longer than a call.
        unsafe { !self.held.read().is_null() }
    }

    /// What it asks for is not looked at until this is called with `false`.
    pub(super) fn set_busy(&mut self, is_busy: bool) {
        if is_busy {
            self.busy += 1;
        } else {
            self.busy -= 1;
        }
    }

    /// The next block of so many bytes is refused. Returns what [`go_on`](Self::go_on) gets: what is asked for between
    /// the two is not counted.
    pub(super) fn refuse_next(&mut self, size_bytes: usize) -> i64 {
        self.refusing = size_bytes as u64;
        std::mem::replace(&mut self.left, -1)
    }

    /// From now on the small block is refused that its own code asks for. Each that comes next is looked at, at first.
    pub(crate) fn refuse_its_own(&mut self) {
        if self.raising != REFUSES {
            self.refused_in = 0;
        }
        self.raising = REFUSES;
        self.look_soon();
    }

    /// See [`refuse_next`](Self::refuse_next).
    pub(super) fn go_on(&mut self, left: i64) {
        self.refusing = 0;
        self.left = left;
    }

    /// Whether CPython is about to raise what tells the request of an overdraft, while what took it may still be there:
    /// were the exception's traceback refused, a MemoryError would come in its place. Said once for one that was made.
    pub(super) fn is_told_now(&mut self) -> bool {
        if self.raising == RAISED {
            self.raising = NOT_RAISING;
            return true;
        }
        matches!(self.raising, RAISING | TELLING)
    }
}

/// No exception was set for this thread, or it has raised it.
pub(crate) const NOT_RAISING: u32 = 0;
/// One was set that it has not raised.
pub(crate) const RAISING: u32 = 1;
/// One is to be set once the thread has the GIL: it was given the block without.
pub(crate) const OWED: u32 = 2;
/// It was made, and its traceback perhaps not yet.
pub(crate) const RAISED: u32 = 3;
/// As [`RAISING`], for a small block: until it is made, limits hold as ever, since what runs may be a long call.
pub(crate) const NOTED: u32 = 4;
/// A block was given beyond a limit, and nobody can be told as its code goes on: the next small one that its own code
/// asks for is refused.
pub(crate) const REFUSES: u32 = 5;
/// One is made now, by a call that asks for no other.
pub(crate) const TELLING: u32 = 6;
/// As [`REFUSES`], and one was refused: who called may have dropped the error, as `open` and `int` do with some.
pub(crate) const REFUSED_ONE: u32 = 7;

/// A handler as [`Thread`] keeps it.
pub(crate) fn word_of(handler: Handler) -> u64 {
    handler.into_pointer().as_ptr().expose_provenance() as u64
}

/// The handler behind such a word; 0 is none.
pub(crate) fn handler_of(word: u64) -> Option<Handler> {
    let pointer = NonNull::new(std::ptr::with_exposed_provenance_mut(word as usize))?;
    // SAFETY: `word_of` made it from a handler. A request's is recognised when its request is gone.
    Some(unsafe { Handler::from_pointer(pointer) })
}

/// `struct slow` of `preload.c`.
#[repr(C)]
pub(crate) struct Slow {
    pub(super) allocate:
        unsafe extern "C" fn(*mut Thread, u32, usize, usize, u32, *mut c_void, *mut u32) -> *mut c_void,
    pub(super) resize: unsafe extern "C" fn(*mut Thread, u32, *mut c_void, usize, *mut u32) -> *mut c_void,
    pub(super) release: unsafe extern "C" fn(*mut Thread, u32, *mut c_void) -> *mut c_void,
    pub(super) twin: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    pub(super) keep: unsafe extern "C" fn(*mut Thread, *mut c_void, *mut c_void, usize),
    pub(super) usable: unsafe extern "C" fn(*mut c_void) -> usize,
    pub(super) grows_for_nobody: unsafe extern "C" fn(*mut Thread) -> bool,
    pub(super) requests: &'static AtomicUsize,
}

/// How a block is wanted: zeroed; in place of one that is nobody's, and grows.
pub(super) const ZEROED: u32 = 1;
pub(super) const GROWN: u32 = 2;

pub(super) const DONE: u32 = 0;
pub(super) const PASS: u32 = 1;
pub(super) const REFUSED: u32 = 2;
/// The block is the next allocator's, which has made or resized it.
pub(super) const MADE: u32 = 3;

/// CPython's `PyMemAllocatorEx`, unchanged since 3.5. Passed on as it is.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allocator {
    pub(crate) words: [*mut c_void; 5],
}

/// The functions of the preloaded library.
pub(crate) struct Library {
    pub(crate) attach: Attach,
    pub(crate) attach_arrow: AttachArrow,
    pub(crate) hook: Hook,
    pub(crate) thread: GetThread,
    pub(crate) attach_mappings: AttachMappings,
    /// A function of the next allocator.
    pub(crate) next: unsafe extern "C" fn() -> *const c_void,
    pub(crate) twins: Twins,
}

/// What makes the blocks that would be in the places of samples: see `make_twin` in `preload.c`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Twins {
    pub(crate) make: MakeTwin,
    pub(crate) shrinks: Shrinks,
}

/// Gets the kind, the block that becomes it or NULL, its size, its alignment, and a place for how much room it has.
pub(crate) type MakeTwin = unsafe extern "C" fn(u32, *mut c_void, usize, usize, *mut usize) -> *mut c_void;
/// Whether a block of this kind that is not placed has so many bytes.
pub(crate) type Shrinks = unsafe extern "C" fn(u32, *mut c_void, usize) -> bool;

/// `struct mappings` of `mappings.c`.
#[repr(C)]
pub(crate) struct Mappings {
    pub(super) mapped: unsafe extern "C" fn(*mut Thread, usize, usize, usize, *const c_void),
    pub(super) lift: unsafe extern "C" fn(*mut Thread, usize, usize) -> usize,
    pub(super) settle: unsafe extern "C" fn(*mut Thread, usize, usize, usize, usize),
}

pub(crate) type AttachMappings = unsafe extern "C" fn(*const Mappings);
pub(crate) type Attach = unsafe extern "C" fn(usize, usize, *const Slow);
pub(crate) type AttachArrow = unsafe extern "C" fn(GetPool);
/// Gets an original `arrow::default_memory_pool` and its caller; NULL is for what that returns.
pub(crate) type GetPool = unsafe extern "C" fn(*mut c_void, *mut c_void) -> *mut c_void;
pub(crate) type Hook = unsafe extern "C" fn(u32, *const Allocator, *const Allocator, *mut Allocator);
pub(crate) type GetThread = unsafe extern "C" fn() -> *mut Thread;
