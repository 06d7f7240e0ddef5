//! Arrow's default pool: what it makes is charged to the request that asked for the pool, also on Arrow's own threads.
//!
//! pyarrow asks for the default pool at each call, on the thread that calls, and Arrow hands it on to its threads.
//! [`pool`] gives each request one of its own ([`Addresses`]). All of them are an `arrow::ProxyMemoryPool` over the
//! original pool, with some functions of its table replaced: a block that is charged is placed, as one of malloc's is;
//! all others, and all that is not known here, are the original's. No header of Arrow is needed: the functions are
//! found by name, their places in the table by their addresses, and what is not as expected leaves Arrow as it was.

use super::addresses::Addresses;
use super::decide::{ALIGN, EXACT_FROM, allocate_for, is_native, pays_for_growth, release, selected};
use super::loaded::{Loaded, loaded};
use super::python::extent;
use super::resize::resize_for;
use super::shared::{DONE, GetThread, Kind, Library, PASS, REFUSED, Thread};
use crate::handler::Handler;
use crate::handler::requests::{Tickets, give_tickets, is_live, ticket_of};
use crate::sync::{Made, is_forking};
use crate::unattributed::{is_paused, unattributed};
use std::ffi::{CStr, c_void};
use std::mem::transmute;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

/// A pool as C++ lays it out: first the address of its table of functions.
type Object = *const *const c_void;

// `arrow::Status` is a word, NULL if all is well, which is returned through a hidden pointer: on x86-64 the first
// argument.
type Allocate = unsafe extern "C" fn(*mut usize, *mut Object, i64, i64, *mut *mut u8) -> *mut usize;
type Reallocate = unsafe extern "C" fn(*mut usize, *mut Object, i64, i64, i64, *mut *mut u8) -> *mut usize;
type Free = unsafe extern "C" fn(*mut Object, *mut u8, i64, i64);
type Count = unsafe extern "C" fn(*const Object) -> i64;

/// The functions of a pool that this layer calls.
#[derive(Debug, Clone, Copy)]
struct Pool {
    object: *mut Object,
    allocate: Allocate,
    reallocate: Reallocate,
    free: Free,
    counts: [Count; 4],
}

struct Arrow {
    /// Its `default_memory_pool`.
    function: *mut c_void,
    original: Pool,
    /// Its pool over malloc, which makes the error of a refusal.
    system: Pool,
    addresses: Addresses,
}

// SAFETY: the pools are Arrow's, for all threads, and live as long as the process; the rest is never changed.
unsafe impl Send for Arrow {}
// SAFETY: the pools are for all threads at once, and nothing here is ever changed.
unsafe impl Sync for Arrow {}

/// The first Arrow that asked for a pool. `None`: it is not as expected.
static ARROW: Made<Option<Arrow>> = Made::new();
static THREAD: Made<GetThread> = Made::new();
/// What is alive of placed blocks, in bytes.
static PLACED: AtomicI64 = AtomicI64::new(0);

fn arrow() -> Option<&'static Arrow> {
    ARROW.get().and_then(Option::as_ref)
}

/// Calls of `arrow::default_memory_pool` come here from now on, where it is known how Arrow's functions are called.
pub(super) fn attach(library: &Library) {
    if !cfg!(target_arch = "x86_64") {
        return;
    }
    THREAD.get_or_make(|| library.thread);
    give_tickets(Tickets {
        take: |handler| arrow()?.addresses.take(handler),
        give_back: |number| {
            if let Some(arrow) = arrow() {
                arrow.addresses.give_back(number);
            }
        },
    });
    // SAFETY: `pool` may be called from here on.
    unsafe { (library.attach_arrow)(pool) };
}

/// This thread's struct.
fn own<R>(work: impl FnOnce(&mut Thread) -> R) -> Option<R> {
    let thread = THREAD.get()?;
    // SAFETY: this thread's struct, which lives as long as the thread; `work` cannot keep the reference, and nobody
    // above on this thread's stack has one: Arrow is not called while there is one, but by `refuse`, which passes none.
    Some(work(unsafe { &mut *thread() }))
}

/// The pool for a call of this `default_memory_pool`. NULL: it is another Arrow's, or one that is not known.
unsafe extern "C" fn pool(function: *mut c_void, caller: *mut c_void) -> *mut c_void {
    if is_forking() || own(|thread| thread.is_busy()) != Some(false) {
        return null_mut();
    }
    // SAFETY: an Arrow's function of that name, found by `arrow.c`.
    let found = ARROW.get_or_make(|| unsafe { find(function) });
    let Some(arrow) = found.as_ref().filter(|arrow| arrow.function == function) else { return null_mut() };
    if is_paused() {
        return arrow.addresses.at(0);
    }
    prepare_statics(caller);
    let number = own(selected).flatten().and_then(ticket_of);
    arrow.addresses.at(number.unwrap_or(0))
}

/// Has Arrow make its statics that keep a default pool for ever, so that they do not keep that of a request. Only where
/// the caller is none of these statics: pyarrow itself.
fn prepare_statics(caller: *mut c_void) {
    static ARE_PREPARED: AtomicBool = AtomicBool::new(false);
    /// `arrow::io::default_io_context()` and `arrow::compute::default_exec_context()` return a reference and a pointer,
    /// `arrow::default_cpu_memory_manager()` a `std::shared_ptr`, which stays for ever.
    const STATICS: [&CStr; 3] = [
        c"_ZN5arrow2io18default_io_contextEv",
        c"_ZN5arrow7compute20default_exec_contextEv",
        c"_ZN5arrow26default_cpu_memory_managerEv",
    ];
    if ARE_PREPARED.load(Ordering::Relaxed) {
        return;
    }
    let Some(library) = LoadedLibrary::of(caller).filter(|library| library.is_named("libarrow_python")) else { return };
    if ARE_PREPARED.swap(true, Ordering::Relaxed) {
        return;
    }
    let _paused = unattributed();
    for name in STATICS {
        let Some(function) = library.symbol(name) else { continue };
        let mut place = [0_usize; 8];
        // SAFETY: a function without arguments; one that returns an object writes it into the place, which has room for
        // any such pointer.
        unsafe {
            transmute::<*mut c_void, unsafe extern "C" fn(*mut [usize; 8]) -> *mut c_void>(function)(&raw mut place)
        };
    }
}

/// A library that is loaded, which it stays.
struct LoadedLibrary {
    library: Loaded,
    handle: *mut c_void,
}

impl LoadedLibrary {
    /// The one that this address is in.
    fn of(address: *mut c_void) -> Option<Self> {
        let library = loaded(address.addr())?;
        // SAFETY: a name that ends with NUL, of a library that is loaded.
        let handle = unsafe { libc::dlopen(library.name().as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        (!handle.is_null()).then_some(Self { library, handle })
    }

    fn is_named(&self, part: &str) -> bool {
        self.library.path().windows(part.len()).any(|window| window == part.as_bytes())
    }

    /// A symbol of its own or of what it needs.
    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: a live handle, and a name that ends with NUL.
        let found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    }
}

const ALLOCATE: &CStr = c"_ZN5arrow15ProxyMemoryPool8AllocateEllPPh";
const REALLOCATE: &CStr = c"_ZN5arrow15ProxyMemoryPool10ReallocateElllPPh";
const FREE: &CStr = c"_ZN5arrow15ProxyMemoryPool4FreeEPhll";
const COUNTS: [&CStr; 4] = [
    c"_ZNK5arrow15ProxyMemoryPool15bytes_allocatedEv",
    c"_ZNK5arrow15ProxyMemoryPool10max_memoryEv",
    c"_ZNK5arrow15ProxyMemoryPool21total_bytes_allocatedEv",
    c"_ZNK5arrow15ProxyMemoryPool15num_allocationsEv",
];
/// A table's words before that to which an object points.
const TABLE_PREFIX: usize = 2;
/// What marks words that nobody has written.
const UNTOUCHED: usize = 0x5AFE_5AFE_5AFE_5AFE;

/// # Safety
/// - `function` is an Arrow's `default_memory_pool`.
unsafe fn find(function: *mut c_void) -> Option<Arrow> {
    let library = LoadedLibrary::of(function)?;
    let table = library.symbol(c"_ZTVN5arrow15ProxyMemoryPoolE")?;
    let words = extent(table)?.0 / size_of::<usize>();
    if words <= TABLE_PREFIX {
        return None;
    }
    // SAFETY: the table of functions of a class, as the Itanium C++ ABI lays it out, with the size that its symbol has.
    let table = unsafe { std::slice::from_raw_parts(table.cast::<*const c_void>(), words) };
    let place = |name| {
        let address = library.symbol(name)?.cast_const();
        table.iter().skip(TABLE_PREFIX).position(|&word| word == address)
    };
    let places = [place(ALLOCATE)?, place(REALLOCATE)?, place(FREE)?];
    let [a, b, c, d] = COUNTS.map(place);
    let counts = [a?, b?, c?, d?];
    // SAFETY: these pools are those of one Arrow, whose classes have one layout of their tables.
    let (original, system) = unsafe {
        let system = transmute::<*mut c_void, unsafe extern "C" fn() -> *mut Object>(
            library.symbol(c"_ZN5arrow18system_memory_poolEv")?,
        );
        let default = transmute::<*mut c_void, unsafe extern "C" fn() -> *mut Object>(function);
        (Pool::of(default(), places, counts)?, Pool::of(system(), places, counts)?)
    };
    original.works().then_some(())?;

    // The proxy that functions which are not replaced see.
    let proxy = Box::leak(Box::new([UNTOUCHED; 32]));
    let make = library.symbol(c"_ZN5arrow15ProxyMemoryPoolC1EPNS_10MemoryPoolE")?;
    // SAFETY: the constructor of `arrow::ProxyMemoryPool`, with room for one, which lives for ever, as does what it is
    // over.
    unsafe {
        transmute::<*mut c_void, unsafe extern "C" fn(*mut usize, *mut Object)>(make)(
            proxy.as_mut_ptr(),
            original.object,
        )
    };
    let [own_table, behind, rest @ ..] = proxy;
    if *own_table != table[TABLE_PREFIX..].as_ptr().addr() || rest.iter().any(|&word| word != UNTOUCHED) {
        return None; // it is not the object of two words that `Addresses` can repeat
    }
    let replaced = Box::leak(table.to_vec().into_boxed_slice());
    let [allocate_at, reallocate_at, free_at] = places;
    let functions = [
        (allocate_at, allocate as Allocate as *const c_void),
        (reallocate_at, reallocate as Reallocate as *const c_void),
        (free_at, free as Free as *const c_void),
        (counts[0], bytes_allocated as Count as *const c_void),
        (counts[1], max_memory as Count as *const c_void),
        (counts[2], total_bytes_allocated as Count as *const c_void),
        (counts[3], num_allocations as Count as *const c_void),
    ];
    for (at, function) in functions {
        replaced[TABLE_PREFIX + at] = function;
    }
    let object = [replaced[TABLE_PREFIX..].as_ptr().expose_provenance(), *behind];
    Some(Arrow { function, original, system, addresses: Addresses::of(object)? })
}

impl Pool {
    /// # Safety
    /// - `object` is a pool that lives for ever, with a table that has these functions in these places.
    unsafe fn of(object: *mut Object, places: [usize; 3], counts: [usize; 4]) -> Option<Self> {
        if object.is_null() {
            return None;
        }
        // SAFETY: a pool that lives for ever, whose table has functions of these types in these places (this function's
        // contract).
        unsafe {
            let table = *object;
            let [allocate, reallocate, free] = places.map(|at| *table.add(at));
            Some(Self {
                object,
                allocate: transmute::<*const c_void, Allocate>(allocate),
                reallocate: transmute::<*const c_void, Reallocate>(reallocate),
                free: transmute::<*const c_void, Free>(free),
                counts: counts.map(|at| transmute::<*const c_void, Count>(*table.add(at))),
            })
        }
    }

    /// Whether a block is made as expected, and a status is one word.
    fn works(&self) -> bool {
        let mut status = [UNTOUCHED; 8];
        let mut block = null_mut();
        // SAFETY: a pool of Arrow's, with places for what it returns; what it makes is freed.
        unsafe {
            (self.allocate)(status.as_mut_ptr(), self.object, ALIGN as i64, ALIGN as i64, &raw mut block);
            let is_made = status[0] == 0 && status[1..].iter().all(|&word| word == UNTOUCHED) && !block.is_null();
            if is_made {
                (self.free)(self.object, block, ALIGN as i64, ALIGN as i64);
            }
            is_made
        }
    }
}

// The functions below replace those of the proxy's table. Arrow calls them, on any thread: a pool is one of `pool`'s, a
// status and `out` are places for the answer, blocks are live ones of that pool with their sizes.

impl Arrow {
    /// The request of this pool, unless it has ended.
    fn owner(&self, pool: *mut Object) -> Option<Handler> {
        self.addresses.handler(pool.cast()).filter(|&handler| is_live(handler))
    }

    /// A block for the request of this pool, or the thread's own.
    fn place(&self, pool: *mut Object, size: usize, align: i64) -> (u32, *mut u8) {
        let owner = || self.owner(pool);
        let Some(align) = usize::try_from(align).ok().filter(|align| align.is_power_of_two()) else {
            return (PASS, null_mut());
        };
        let placed = own(|thread| allocate_for(thread, owner, size, align.max(16)));
        let (outcome, block) = placed.unwrap_or((PASS, null_mut()));
        if outcome == DONE {
            PLACED.fetch_add(size as i64, Ordering::Relaxed);
        }
        (outcome, block)
    }

    /// Writes the error that Arrow's own pool has where malloc returns NULL.
    ///
    /// # Safety
    /// - `status` is a place for it.
    unsafe fn refuse(&self, status: *mut usize, size: usize, align: i64) -> *mut usize {
        let left = own(|thread| thread.refuse_next(size));
        let mut block = null_mut();
        let system = &self.system;
        // SAFETY: a pool of Arrow's, and places for what it returns. Were a block made, it is freed, and the error is
        // that of a block that nobody can make.
        unsafe {
            (system.allocate)(status, system.object, size as i64, align, &raw mut block);
            if *status == 0 {
                (system.free)(system.object, block, size as i64, align);
                (system.allocate)(status, system.object, i64::MAX / 2, align, &raw mut block);
            }
        }
        if let Some(left) = left {
            own(|thread| thread.go_on(left));
        }
        status
    }
}

unsafe extern "C" fn allocate(
    status: *mut usize,
    pool: *mut Object,
    size: i64,
    align: i64,
    out: *mut *mut u8,
) -> *mut usize {
    let Some(arrow) = arrow() else { std::process::abort() }; // it gave the pool out
    let original = &arrow.original;
    let wanted = usize::try_from(size).ok().filter(|&size| size > 0);
    let (outcome, block) = wanted.map_or((PASS, null_mut()), |size| arrow.place(pool, size, align));
    // SAFETY: C++ returns the status through a place of the caller's, and `out` is its place for the block.
    unsafe {
        match outcome {
            DONE => {
                out.write(block);
                status.write(0);
                status
            }
            REFUSED => arrow.refuse(status, wanted.unwrap_or_default(), align),
            _ => unwatched(|| (original.allocate)(status, original.object, size, align, out)),
        }
    }
}

/// Calls the original pool: if that asks malloc, it is not looked at once more.
fn unwatched<R>(work: impl FnOnce() -> R) -> R {
    own(|thread| thread.set_busy(true));
    let result = work();
    own(|thread| thread.set_busy(false));
    result
}

unsafe extern "C" fn reallocate(
    status: *mut usize,
    pool: *mut Object,
    old_size: i64,
    new_size: i64,
    align: i64,
    place: *mut *mut u8,
) -> *mut usize {
    let Some(arrow) = arrow() else { std::process::abort() }; // it gave the pool out
    let original = &arrow.original;
    // SAFETY: the place that Arrow gave, with its block.
    let old = unsafe { place.read() };
    let (before, wanted) = (usize::try_from(old_size).unwrap_or(0), usize::try_from(new_size).unwrap_or(0));
    // SAFETY: below, the pool's functions get what Arrow gave, and a block's bytes are copied before it goes.
    unsafe {
        if is_native(old) {
            return resize_placed(arrow, status, pool, (old, before, wanted), align, place);
        }
        // As `realloc`: a large block keeps its owner, and a small one is drawn as it grows as a new one is.
        let pass = || unwatched(|| (original.reallocate)(status, original.object, old_size, new_size, align, place));
        if wanted <= before {
            return pass();
        }
        if before >= EXACT_FROM && own(|thread| pays_for_growth(thread, || arrow.owner(pool))) != Some(true) {
            return pass();
        }
        match arrow.place(pool, wanted, align) {
            (DONE, block) => {
                block.copy_from_nonoverlapping(old, before);
                (original.free)(original.object, old, old_size, align);
                place.write(block);
                status.write(0);
                status
            }
            (REFUSED, _) => arrow.refuse(status, wanted, align),
            _ => pass(),
        }
    }
}

/// # Safety
/// - as for [`reallocate`]; `old` is a placed block, `before` its size.
unsafe fn resize_placed(
    arrow: &Arrow,
    status: *mut usize,
    pool: *mut Object,
    (old, before, wanted): (*mut u8, usize, usize),
    align: i64,
    place: *mut *mut u8,
) -> *mut usize {
    let original = &arrow.original;
    // SAFETY: a pool that lives for ever, whose table has functions of these types in these places (this function's
    // contract). The old block goes only when there is another one.
    unsafe {
        if wanted == 0 {
            // The original's block without bytes, if it can make one.
            unwatched(|| (original.allocate)(status, original.object, 0, align, place));
            if *status == 0 {
                free(pool, old, before as i64, align);
            }
            return status;
        }
        let Some(block) = NonNull::new(old) else { return status };
        let (outcome, moved) = if align <= ALIGN as i64 {
            own(|thread| resize_for(thread, || arrow.owner(pool), block, wanted)).unwrap_or((REFUSED, null_mut()))
        } else {
            (PASS, null_mut())
        };
        if outcome == PASS {
            let mut moved = null_mut();
            allocate(status, pool, wanted as i64, align, &raw mut moved);
            if *status == 0 {
                moved.copy_from_nonoverlapping(old, before.min(wanted));
                place.write(moved);
                free(pool, old, before as i64, align);
            }
            return status;
        }
        if outcome != DONE {
            return arrow.refuse(status, wanted, align);
        }
        PLACED.fetch_add(wanted as i64 - before as i64, Ordering::Relaxed);
        place.write(moved);
        status.write(0);
        status
    }
}

unsafe extern "C" fn free(_pool: *mut Object, block: *mut u8, size: i64, align: i64) {
    if is_native(block) {
        PLACED.fetch_sub(size, Ordering::Relaxed);
        if let Some(thread) = THREAD.get() {
            // SAFETY: this thread's struct, and a placed block that Arrow gives up.
            unsafe { release(thread(), Kind::Native as u32, block.cast()) };
        }
        return;
    }
    let Some(original) = arrow().map(|arrow| &arrow.original) else { std::process::abort() }; // it gave the pool out
    // SAFETY: the original made the block.
    unsafe { (original.free)(original.object, block, size, align) };
}

/// What the original pool says.
fn count(which: usize) -> i64 {
    let Some(original) = arrow().map(|arrow| &arrow.original) else { return 0 };
    // SAFETY: a pool of Arrow's, which lives for ever.
    unsafe { (original.counts[which])(original.object) }
}

unsafe extern "C" fn bytes_allocated(_pool: *const Object) -> i64 {
    count(0) + PLACED.load(Ordering::Relaxed)
}

unsafe extern "C" fn max_memory(_pool: *const Object) -> i64 {
    count(1)
}

unsafe extern "C" fn total_bytes_allocated(_pool: *const Object) -> i64 {
    count(2)
}

unsafe extern "C" fn num_allocations(_pool: *const Object) -> i64 {
    count(3)
}
