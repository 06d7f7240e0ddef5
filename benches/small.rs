//! Small blocks of mixed sizes, as services in Rust make them: in the containers' own way, through `Allocator`, and in
//! the shapes of mimalloc-bench that fit. The worst shapes come first. Each against `malloc` and mimalloc, on one, two
//! and four threads. Run by `make bench`; `-- mixed` (a part of a shape's name) runs only that one. `make bench-small`
//! runs it once more with jemalloc in place of `malloc`.
//!
//! For callgrind, which counts instructions: `valgrind --tool=callgrind target/release/deps/small-* count request 100`,
//! once more with 300 rounds, and the difference by 200,000 pairs; `ALONE` in this file lists the words for `request`.
#![allow(unsafe_code, reason = "peers are C libraries, and blocks without a container are raw memory")]

mod interleaved;

use allocator_api2::alloc::{AllocError, Allocator, Global, Layout};
use allocator_api2::vec::Vec as VecIn;
use ctxalloc::strategy::{Budget, Pool};
use ctxalloc::{ContextAlloc, handler, request};
use interleaved::{Group, keep};
use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::Barrier;
use std::sync::mpsc::sync_channel;
use std::thread;

/// mimalloc v3 by its own functions.
#[derive(Clone)]
struct Mimalloc;

// SAFETY: mimalloc keeps the C heap's promises, on any thread; every alignment here is at most 16.
unsafe impl Allocator for Mimalloc {
    #[inline]
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        // SAFETY: any size may be asked for.
        let block = NonNull::new(unsafe { libmimalloc_sys::mi_malloc(layout.size()) }.cast()).ok_or(AllocError)?;
        Ok(NonNull::slice_from_raw_parts(block, layout.size()))
    }
    #[inline]
    unsafe fn deallocate(&self, block: NonNull<u8>, _: Layout) {
        // SAFETY: live, and from `allocate` or `grow` (this function's contract).
        unsafe { libmimalloc_sys::mi_free(block.as_ptr().cast()) }
    }
    #[inline]
    unsafe fn grow(&self, block: NonNull<u8>, _: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
        // SAFETY: live, and from `allocate` or `grow`; only the new block is used from here on (this function's
        // contract).
        let moved = unsafe { libmimalloc_sys::mi_realloc(block.as_ptr().cast(), new.size()) };
        Ok(NonNull::slice_from_raw_parts(NonNull::new(moved.cast()).ok_or(AllocError)?, new.size()))
    }
}

/// A pool by its own functions.
#[derive(Clone)]
struct ByStrategy;

// SAFETY: the pool's promises are those of the trait, for alignments of up to 64; no layout here changes its alignment.
unsafe impl Allocator for ByStrategy {
    #[inline]
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        let block = Pool::shared().allocate_layout(layout).ok_or(AllocError)?;
        Ok(NonNull::slice_from_raw_parts(block, layout.size()))
    }
    #[inline]
    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        // SAFETY: live, and of this pool (this function's contract).
        unsafe { Pool::shared().release_layout(block, layout) }
    }
    #[inline]
    unsafe fn grow(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
        // SAFETY: live, and from `allocate` or `grow`; only the new block is used from here on (this function's
        // contract).
        let moved = unsafe { Pool::shared().resize_layout(block, old, new) }.ok_or(AllocError)?;
        Ok(NonNull::slice_from_raw_parts(moved, new.size()))
    }
}

/// What a shape does with an allocator, on each of its threads; it returns how many blocks that were.
trait Shape: Copy + Send + Sync + 'static {
    const BLOCKS: usize;
    fn run<A: Allocator + Clone + Send + Sync>(self, allocator: &A);
}

const KEPT: usize = 1000;
const SIZES: [usize; 6] = [16, 48, 80, 128, 192, 256];

/// Blocks of 16 to 256 bytes in turn, all alive, then all freed.
#[derive(Clone, Copy)]
struct Mixed;

impl Shape for Mixed {
    const BLOCKS: usize = KEPT;
    #[inline]
    fn run<A: Allocator + Clone + Send + Sync>(self, allocator: &A) {
        let mut kept = [(NonNull::<u8>::dangling(), Layout::new::<u8>()); KEPT];
        for (number, place) in kept.iter_mut().enumerate() {
            let layout = Layout::from_size_align(black_box(SIZES[number % SIZES.len()]), 8).expect("valid");
            *place = (allocator.allocate(layout).expect("memory").cast(), layout);
        }
        for (block, layout) in black_box(kept) {
            // SAFETY: live, from this allocator, once.
            unsafe { allocator.deallocate(block, layout) };
        }
    }
}

/// Vectors that grow by `push` to 1 to 64 words, all alive.
#[derive(Clone, Copy)]
struct Push;

impl Shape for Push {
    const BLOCKS: usize = 100;
    #[inline]
    fn run<A: Allocator + Clone + Send + Sync>(self, allocator: &A) {
        let mut all: Vec<VecIn<u64, A>> = Vec::with_capacity(Self::BLOCKS);
        for number in 0..Self::BLOCKS {
            let mut one = VecIn::new_in(allocator.clone());
            for word in 0..=(number % 64) as u64 {
                one.push(black_box(word));
            }
            all.push(one);
        }
        drop(black_box(all));
    }
}

/// Short strings: one block of 4 to 40 bytes each, half of them dropped at once.
#[derive(Clone, Copy)]
struct Strings;

impl Shape for Strings {
    const BLOCKS: usize = KEPT;
    #[inline]
    fn run<A: Allocator + Clone + Send + Sync>(self, allocator: &A) {
        let mut all: Vec<VecIn<u8, A>> = Vec::with_capacity(KEPT);
        for number in 0..KEPT {
            let mut one = VecIn::with_capacity_in(4 + number * 7 % 37, allocator.clone());
            one.push(black_box(number as u8));
            if number % 2 == 0 {
                all.push(one);
            }
        }
        drop(black_box(all));
    }
}

/// `larson`: of 1000 live blocks of 16 to 1024 bytes one at random is freed, and another one made.
#[derive(Clone, Copy)]
struct Larson;

impl Shape for Larson {
    const BLOCKS: usize = 4 * KEPT;
    #[inline]
    fn run<A: Allocator + Clone + Send + Sync>(self, allocator: &A) {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as usize
        };
        let layout_of = |random: usize| Layout::from_size_align(16 + random % 1009, 8).expect("valid");
        let make = |layout: Layout| (allocator.allocate(layout).expect("memory").cast::<u8>(), layout);
        let mut kept: Vec<_> = (0..KEPT).map(|_| make(layout_of(random()))).collect();
        for _ in 0..Self::BLOCKS - KEPT {
            let number = random();
            let place = &mut kept[number % KEPT];
            // SAFETY: live, from this allocator; it is replaced.
            unsafe { allocator.deallocate(place.0, place.1) };
            *place = make(layout_of(number >> 20));
        }
        for (block, layout) in kept {
            // SAFETY: live, from this allocator, once.
            unsafe { allocator.deallocate(block, layout) };
        }
    }
}

/// A block on its way to another thread.
struct Sent(NonNull<u8>, Layout);

// SAFETY: whoever has it has the block.
unsafe impl Send for Sent {}

/// `xmalloc`: batches of 100 blocks of 16 to 256 bytes, made by one thread and freed by another one.
#[derive(Clone, Copy)]
struct Xmalloc;

impl Shape for Xmalloc {
    const BLOCKS: usize = 50 * 100;
    #[inline]
    fn run<A: Allocator + Clone + Send + Sync>(self, allocator: &A) {
        let (sender, receiver) = sync_channel::<Vec<Sent>>(4);
        thread::scope(|scope| {
            scope.spawn(move || {
                for Sent(block, layout) in receiver.iter().flatten() {
                    // SAFETY: live, from this allocator, once.
                    unsafe { allocator.deallocate(block, layout) };
                }
            });
            for _ in 0..Self::BLOCKS / 100 {
                let batch = (0..100).map(|number| {
                    let layout = Layout::from_size_align(SIZES[number % SIZES.len()], 8).expect("valid");
                    Sent(allocator.allocate(layout).expect("memory").cast(), layout)
                });
                sender.send(batch.collect()).expect("it receives until the end");
            }
            drop(sender);
        });
    }
}

/// `rounds` times on so many threads at once; they are one program's, so they have one allocator.
fn on_threads<A: Allocator + Clone + Send + Sync + 'static>(
    shape: impl Shape,
    threads: usize,
    rounds: usize,
    allocator: A,
) -> impl FnMut() {
    move || {
        if threads == 1 {
            return (0..rounds).for_each(|_| shape.run(&allocator));
        }
        let barrier = Barrier::new(threads);
        thread::scope(|scope| {
            let threads: Vec<_> = (0..threads)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        (0..rounds).for_each(|_| shape.run(&allocator));
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        });
    }
}

/// As a service has it: each thread has a request of its own, all of them below one tenant.
fn with_requests<S: Shape>(shape: S, threads: usize, rounds: usize, tenant: &Budget) -> impl FnMut() + use<S> {
    let tenant = tenant.clone();
    move || {
        let barrier = Barrier::new(threads);
        let one = || {
            let request = request().limit_bytes(1 << 40).budget(&tenant).begin().expect("memory");
            let allocator = request.run(ContextAlloc::new);
            barrier.wait();
            (0..rounds).for_each(|_| shape.run(&allocator));
        };
        thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(one))));
    }
}

/// A budget that two threads have charged.
fn shared(parent: Option<&Budget>) -> Budget {
    let budget = parent.map_or_else(|| Budget::new("tenant", Some(1 << 40)), |above| above.child("t", Some(1 << 40)));
    let charge = || drop(budget.charge(1 << 24).expect("it is empty"));
    charge();
    thread::scope(|scope| drop(scope.spawn(charge)));
    budget
}

/// A word, and what it does so many rounds of.
type Alone = (&'static str, fn(usize));

/// For callgrind: which allocator runs which shape, the mixed one unless the word says another, by its word.
const ALONE: [Alone; 21] = [
    ("mimalloc", |rounds| (0..rounds).for_each(|_| Mixed.run(&Mimalloc))),
    ("pool", |rounds| (0..rounds).for_each(|_| Mixed.run(&ByStrategy))),
    ("context", |rounds| (0..rounds).for_each(|_| Mixed.run(&in_handler("pool")))),
    ("request", |rounds| in_request(Mixed, rounds, request())),
    ("limited", |rounds| {
        let tenant = Budget::new("tenant", Some(1 << 40));
        in_request(Mixed, rounds, request().limit_bytes(1 << 40).budget(&tenant));
    }),
    ("shared", |rounds| in_request(Mixed, rounds, request().limit_bytes(1 << 40).budget(&shared(None)))),
    ("shared-twice", |rounds| {
        in_request(Mixed, rounds, request().limit_bytes(1 << 40).budget(&shared(Some(&shared(None)))));
    }),
    ("threads", |rounds| after_another_thread(Mixed, rounds)),
    ("together", |rounds| on_two_at_once(Mixed, rounds)),
    ("in-turns", |rounds| on_two_in_turns(Mixed, rounds)),
    ("strings-alone", |rounds| in_request(Strings, rounds, request())),
    ("strings-threads", |rounds| after_another_thread(Strings, rounds)),
    ("strings-together", |rounds| on_two_at_once(Strings, rounds)),
    ("strings-in-turns", |rounds| on_two_in_turns(Strings, rounds)),
    ("strings-mimalloc", |rounds| (0..rounds).for_each(|_| Strings.run(&Mimalloc))),
    ("strings-pool", |rounds| (0..rounds).for_each(|_| Strings.run(&ByStrategy))),
    ("push-mimalloc", |rounds| (0..rounds).for_each(|_| Push.run(&Mimalloc))),
    ("push-pool", |rounds| (0..rounds).for_each(|_| Push.run(&ByStrategy))),
    ("push-together", |rounds| on_two_at_once(Push, rounds)),
    ("push-alone", |rounds| in_request(Push, rounds, request())),
    // So many thousand requests that allocate nothing.
    ("begin-end", |rounds| {
        let tenant = shared(None);
        (0..1000 * rounds).for_each(|_| drop(request().limit_bytes(1 << 40).budget(&tenant).begin()));
    }),
];

fn in_request(shape: impl Shape, rounds: usize, terms: ctxalloc::request::Builder) {
    let request = terms.begin().expect("memory");
    let allocator = request.run(ContextAlloc::new);
    (0..rounds).for_each(|_| shape.run(&allocator));
}

/// One thread of a request that another one has used too.
fn after_another_thread(shape: impl Shape, rounds: usize) {
    let request = request().begin().expect("memory");
    let allocator = request.run(ContextAlloc::new);
    shape.run(&allocator); // this thread owns it
    thread::scope(|scope| drop(scope.spawn(|| shape.run(&allocator)))); // both share it from now on
    (0..rounds).for_each(|_| shape.run(&allocator));
}

/// Two threads at once in one request, for so many rounds each.
fn on_two_at_once(shape: impl Shape, rounds: usize) {
    let request = request().begin().expect("memory");
    on_threads(shape, 2, rounds, request.run(ContextAlloc::new))();
}

/// The same with two new threads for each ten rounds.
fn on_two_in_turns(shape: impl Shape, rounds: usize) {
    let request = request().begin().expect("memory");
    let mut ten = on_threads(shape, 2, 10, request.run(ContextAlloc::new));
    (0..rounds / 10).for_each(|_| ten());
}

fn measure<S: Shape>(shape: S, name: &str, rounds: usize) -> String {
    if std::env::args().skip(1).any(|only| !only.starts_with('-') && !name.contains(&only)) {
        return String::new();
    }
    let tenant = Budget::new("tenant", Some(1 << 40));
    let plain = request().begin().expect("memory");
    let limited = request().limit_bytes(1 << 40).budget(&tenant).begin().expect("memory");
    let mut rows = String::new();
    for threads in [1, 2, 4] {
        rows += &Group::new(format!("{name}, {threads} threads"), 1)
            .per(rounds * S::BLOCKS)
            .add("malloc, free", on_threads(shape, threads, rounds, Global))
            .add("mimalloc", on_threads(shape, threads, rounds, Mimalloc))
            .add("Pool", on_threads(shape, threads, rounds, ByStrategy))
            .add("ContextAlloc in `system`", on_threads(shape, threads, rounds, in_handler("system")))
            .add("ContextAlloc in `pool`", on_threads(shape, threads, rounds, in_handler("pool")))
            .add("ContextAlloc in a request()", on_threads(shape, threads, rounds, plain.run(ContextAlloc::new)))
            .add("with a limit and a budget", on_threads(shape, threads, rounds, limited.run(ContextAlloc::new)))
            .add("one on each thread", with_requests(shape, threads, rounds, &tenant))
            .run();
    }
    rows
}

fn in_handler(name: &str) -> ContextAlloc {
    ContextAlloc::with_handler(handler(name).expect("built in"))
}

fn main() -> std::io::Result<()> {
    // `cargo test --benches` runs this too: it asks whether there are tests, and there are none.
    if std::env::args().any(|argument| argument == "--test" || argument == "--list") {
        return Ok(());
    }
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [count, which, rounds, ..] = &words[..]
        && count == "count"
    {
        let (_, run) = ALONE.iter().find(|(word, _)| word == which).expect("a word of `ALONE`");
        run(rounds.parse().expect("how many rounds"));
        return Ok(());
    }
    let mut rows = measure(Mixed, "mixed sizes, all alive, then all freed", 10);
    rows += &measure(Larson, "larson: one of 1000 replaced", 3);
    rows += &measure(Xmalloc, "xmalloc: freed by another thread", 1);
    rows += &measure(Push, "vectors that grow by push", 30);
    rows += &measure(Strings, "short strings", 10);
    // With another allocator preloaded, `malloc` is that one.
    keep(&std::env::var("SMALL_ROWS").unwrap_or_else(|_| "small-rust".to_owned()), &rows)
}
