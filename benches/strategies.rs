//! What a block costs in Rust: `pool` against mimalloc's own functions, an arena against bumpalo, and what a budget or
//! a list of live blocks adds. One thread, and two that work at once. Run by `make bench`. With the argument `each`
//! (`cargo bench --bench strategies -- each`) only what docs/strategies.md has: a block of each strategy, by its size.
#![allow(unsafe_code, reason = "peers are C libraries and raw memory")]

mod interleaved;

use ctxalloc::Scratch;
use ctxalloc::handler;
use ctxalloc::source::{HugePages, LockedPages, NumaPages, NumaPolicy};
use ctxalloc::strategy::{
    Aligned, Arena, Budget, Budgeted, CallbackFunctions, Callbacks, Fallback, Faulty, Guard, GuardOptions, Pool,
    PoolOptions, SharedMemory, Strategy, System, Tracked, Zeroing,
};
use interleaved::{Group, keep};
use std::ffi::c_void;
use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Instant;

const SIZES: [(usize, &str); 4] = [(16, "16 B"), (256, "256 B"), (1024, "1 KiB"), (4096, "4 KiB")];

/// How many blocks are alive at a time where more than one is.
const HELD: usize = 32;

/// A block made and released again.
fn pair(strategy: impl Strategy, size: usize) -> impl FnMut() + Send {
    move || {
        let block = strategy.allocate(black_box(size)).expect("memory");
        // SAFETY: live, from this strategy, once.
        unsafe { strategy.release(black_box(block)) }
    }
}

/// As many blocks made, and then all released, the oldest first.
fn many(strategy: impl Strategy, size: usize) -> impl FnMut() {
    move || {
        let mut blocks = [NonNull::dangling(); HELD];
        for place in &mut blocks {
            *place = strategy.allocate(black_box(size)).expect("memory");
        }
        for block in black_box(blocks) {
            // SAFETY: live, from this strategy, once.
            unsafe { strategy.release(block) };
        }
    }
}

/// mimalloc as it is: blocks of at least 16 bytes, aligned to 16.
#[derive(Debug)]
struct Mimalloc;

// SAFETY: mimalloc keeps the C heap's promises; see `System`.
unsafe impl Strategy for Mimalloc {
    fn alignment(&self) -> usize {
        16
    }
    #[inline]
    fn allocate(&self, size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: any size may be asked for, on any thread.
        NonNull::new(unsafe { libmimalloc_sys::mi_malloc(size_bytes) }.cast())
    }
    unsafe fn resize(&self, block: NonNull<u8>, new_size_bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: a live block, says the caller.
        NonNull::new(unsafe { libmimalloc_sys::mi_realloc(block.as_ptr().cast(), new_size_bytes) }.cast())
    }
    #[inline]
    unsafe fn release(&self, block: NonNull<u8>) {
        // SAFETY: a live block, given up, says the caller.
        unsafe { libmimalloc_sys::mi_free(block.as_ptr().cast()) }
    }
}

/// A second thread that does the same all the time, until this is dropped.
struct Beside {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Beside {
    fn new(mut work: impl FnMut() + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                (0..1000).for_each(|_| work());
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("no panic");
        }
    }
}

/// Runs `work` on two threads at once, `times` each, and returns when both are done.
fn on_two_threads<W: FnMut() + Send>(make: impl Fn() -> W, times: usize) -> impl FnMut() {
    let (mut here, there) = (make(), Mutex::new(make()));
    move || {
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut there = there.lock().expect("no panic");
                (0..times).for_each(|_| there());
            });
            (0..times).for_each(|_| here());
        });
    }
}

fn one_thread(size: usize, label: &str) -> String {
    let pool = Pool::shared;
    Group::new(format!("a block of {label}, allocated and released"), 20_000)
        .add("mimalloc: mi_malloc, mi_free", pair(Mimalloc, size))
        .add("System: malloc, free", pair(System, size))
        .add("Pool", pair(pool().clone(), size))
        .run()
}

fn several_alive(size: usize, label: &str) -> String {
    Group::new(format!("{HELD} blocks of {label}, allocated, then released"), 1000)
        .add("mimalloc: mi_malloc, mi_free", many(Mimalloc, size))
        .add("System: malloc, free", many(System, size))
        .add("Pool", many(Pool::shared().clone(), size))
        .run()
}

/// So many that starting a thread does not count.
const TIMES: usize = 200_000;

fn two_threads(size: usize, label: &str) -> String {
    Group::new(format!("a block of {label}, allocated and released, on two threads at once"), 1)
        .per(TIMES)
        .add("mimalloc: mi_malloc, mi_free", on_two_threads(move || pair(Mimalloc, size), TIMES))
        .add("System: malloc, free", on_two_threads(move || pair(System, size), TIMES))
        .add("Pool", on_two_threads(move || pair(Pool::shared().clone(), size), TIMES))
        .run()
}

/// A stretch of work: blocks are made, none is released before its end, when the memory goes at once (bumpalo) or is
/// given back block by block, as NumPy would, and then reset (the arena). bumpalo is for one thread and uses nothing
/// again; behind a mutex it may at least be shared, as an arena is.
fn arenas(size: usize, label: &str) -> String {
    let mut bump = bumpalo::Bump::new();
    let shared = Mutex::new(bumpalo::Bump::new());
    let arena = Arena::over(Pool::shared());
    let mut scratch = Scratch::with_handler(ctxalloc::handler("pool").expect("built in"));
    Group::new(format!("a stretch of work: {HELD} blocks of {label}, then everything goes"), 1000)
        .add("bumpalo: alloc_layout, reset", move || {
            let layout = std::alloc::Layout::from_size_align(black_box(size), 64).expect("a power of two");
            for _ in 0..HELD {
                black_box(bump.alloc_layout(layout));
            }
            bump.reset();
        })
        .add("bumpalo behind a Mutex: the same", move || {
            let layout = std::alloc::Layout::from_size_align(black_box(size), 64).expect("a power of two");
            for _ in 0..HELD {
                black_box(shared.lock().expect("no panic").alloc_layout(layout));
            }
            shared.lock().expect("no panic").reset();
        })
        .add("Scratch: allocate_layout, reset", move || {
            let layout = std::alloc::Layout::from_size_align(black_box(size), 64).expect("a power of two");
            for _ in 0..HELD {
                black_box(scratch.allocate_layout(layout).expect("memory"));
            }
            scratch.reset();
        })
        .add("Arena, its one thread by Scratch: allocate_layout, reset", {
            let arena = Arena::over(Pool::shared());
            let mut scratch = Scratch::in_arena(&arena);
            move || {
                let layout = std::alloc::Layout::from_size_align(black_box(size), 64).expect("a power of two");
                for _ in 0..HELD {
                    black_box(scratch.allocate_layout(layout).expect("memory"));
                }
                scratch.reset();
            }
        })
        .add("Arena: allocate, release, reset", {
            let mut work = many(arena.clone(), size);
            move || {
                work();
                assert!(arena.reset());
            }
        })
        .add("Pool: allocate, release", many(Pool::shared().clone(), size))
        .run()
}

fn added(size: usize, label: &str) -> String {
    let pool = || Pool::shared().clone();
    let deep = Budget::new("process", None).child("tenant", Some(1 << 30));
    Group::new(format!("what others add to a block of {label}"), 20_000)
        .add("Pool", pair(pool(), size))
        .add("Pool, 64 bytes more (the record)", pair(pool(), size + 64))
        .add("Budgeted, over Pool", pair(Budgeted::new(pool(), Budget::new("one", Some(1 << 30))), size))
        .add("Budgeted under another budget", pair(Budgeted::new(pool(), deep), size))
        .add("Tracked, over Pool", pair(Tracked::new(pool()).expect("not tracked"), size))
        .add("Fallback, over Pool and System", pair(Fallback::new(pool(), System), size))
        .run()
}

/// While another thread does the same: what is shared is felt.
fn added_beside(size: usize, label: &str) -> String {
    let budget = Budget::new("one", Some(1 << 30));
    let budgeted = Arc::new(Budgeted::new(Pool::shared().clone(), budget));
    let tracked = Tracked::new(Pool::shared().clone()).expect("not tracked");
    let mut rows = String::new();
    for (name, strategy) in [
        ("Pool", Arc::new(Pool::shared().clone()) as Arc<dyn Strategy>),
        ("Budgeted, over Pool", budgeted),
        ("Tracked, over Pool", Arc::new(tracked)),
    ] {
        let _beside = Beside::new(pair(Arc::clone(&strategy), size));
        rows += &Group::new(format!("a block of {label}, while a second thread does the same"), 20_000)
            .add(name, pair(strategy, size))
            .run();
    }
    rows
}

/// C's own functions, called by their addresses.
fn c_heap() -> Callbacks {
    unsafe extern "C" fn malloc(_: *mut c_void, size: usize) -> *mut c_void {
        // SAFETY: any size.
        unsafe { libc::malloc(size) }
    }
    unsafe extern "C" fn calloc(_: *mut c_void, count: usize, size: usize) -> *mut c_void {
        // SAFETY: any sizes.
        unsafe { libc::calloc(count, size) }
    }
    unsafe extern "C" fn realloc(_: *mut c_void, block: *mut c_void, size: usize) -> *mut c_void {
        // SAFETY: `Callbacks` passes a live block of these functions.
        unsafe { libc::realloc(block, size) }
    }
    unsafe extern "C" fn free(_: *mut c_void, block: *mut c_void, _: usize) {
        // SAFETY: `Callbacks` passes a live block of these functions.
        unsafe { libc::free(block) }
    }
    let mut functions = CallbackFunctions::new(std::ptr::null_mut());
    functions.malloc = Some(malloc);
    functions.calloc = Some(calloc);
    functions.realloc = Some(realloc);
    functions.free = Some(free);
    // SAFETY: C's functions keep C's contract; no context is needed.
    unsafe { Callbacks::new(functions, 16) }.expect("all four are there")
}

/// A block made, filled where it is to be, and released again.
fn filled(strategy: &dyn Strategy, size: usize, fills: bool) -> impl FnMut() {
    move || {
        let block = strategy.allocate(black_box(size)).expect("memory");
        // SAFETY: a new block of so many bytes; live, from this strategy, released once.
        unsafe {
            if fills {
                black_box(block).write_bytes(1, size);
            }
            strategy.release(black_box(block));
        }
    }
}

const ROUNDS_OF_EACH: usize = 15;

/// The table of docs/strategies.md.
fn each() {
    let pool = || Pool::shared().clone();
    let options = PoolOptions::default;
    let numa = NumaPages::new(&[0], NumaPolicy::Bind).map(|pages| Pool::over(pages, options()));
    let locked = LockedPages::new().map(|pages| Pool::over(pages, options()));
    let mut all: Vec<(&'static str, Arc<dyn Strategy>)> = vec![
        ("System", Arc::new(System)),
        ("Aligned", Arc::new(Aligned::CACHE_LINE)),
        ("Pool", Arc::new(pool())),
        ("Arena", Arc::new(Arena::over(Pool::shared()))),
        ("Budgeted, over Pool", Arc::new(Budgeted::new(pool(), Budget::new("one", Some(8 << 30))))),
        ("Faulty, over Pool", Arc::new(Faulty::with_probability(pool(), 0.0, 1).expect("a probability"))),
        ("Fallback, over Pool and System", Arc::new(Fallback::new(pool(), System))),
        ("Tracked, over Pool", Arc::new(Tracked::new(pool()).expect("not tracked"))),
        ("Zeroing, over Pool", Arc::new(Zeroing::new(pool()))),
        ("Pool of HugePages", Arc::new(Pool::over(HugePages::transparent(), options()))),
        ("Guard", Arc::new(Guard::new(GuardOptions::default()).expect("the default options"))),
        ("SharedMemory", Arc::new(SharedMemory)),
        ("Callbacks, C", Arc::new(c_heap())),
    ];
    // Where this machine lets us.
    all.extend(numa.ok().map(|pool| ("Pool of NumaPages", Arc::new(pool) as Arc<dyn Strategy>)));
    all.extend(locked.ok().map(|pool| ("Pool of LockedPages", Arc::new(pool) as Arc<dyn Strategy>)));
    const SIZES: [(usize, bool, u32); 3] = [(8000, false, 1000), (1 << 20, true, 10), (64 << 20, true, 1)];
    let mut least = vec![[f64::INFINITY; 3]; all.len()];
    for _ in 0..ROUNDS_OF_EACH {
        for ((_, strategy), least) in all.iter().zip(&mut least) {
            for ((size, fills, repeats), least) in SIZES.into_iter().zip(least) {
                let Some(block) = strategy.allocate(size) else { continue }; // `ulimit -l`, for one
                // SAFETY: live, from this strategy, once.
                unsafe { strategy.release(block) };
                let mut work = filled(strategy.as_ref(), size, fills);
                let begun = Instant::now();
                (0..repeats).for_each(|_| work());
                *least = least.min(begun.elapsed().as_secs_f64() * 1e6 / f64::from(repeats));
            }
        }
    }
    println!("\nmicroseconds for a block, the least of {ROUNDS_OF_EACH} rounds");
    println!("{:<32} {:>9} {:>15} {:>15}", "", "8000 B", "1 MiB, filled", "64 MiB, filled");
    for ((name, _), [small, large, huge]) in all.iter().zip(least) {
        println!("{name:<32} {small:>9.3} {large:>15.1} {huge:>15.0}");
    }
}

fn main() -> std::io::Result<()> {
    // `cargo test --benches` runs this too: it asks whether there are tests, and there are none.
    if std::env::args().any(|argument| argument == "--test" || argument == "--list") {
        return Ok(());
    }
    handler("pool").expect("built in"); // the table and the shared pool are there
    if std::env::args().any(|argument| argument == "each") {
        each();
        return Ok(());
    }
    each();
    let mut rows = String::new();
    for (size, label) in SIZES {
        rows += &one_thread(size, label);
        rows += &several_alive(size, label);
        rows += &two_threads(size, label);
        rows += &arenas(size, label);
    }
    rows += &added(100, "100 B");
    rows += &added(4096, "4 KiB");
    rows += &added_beside(100, "100 B");
    keep("strategies-rust", &rows)
}
