//! What ctxalloc makes for itself is no request's: each thing a program may do is done for the first time inside of a
//! request, in a process of its own. The request is charged for what it gets, and not for what stays behind.

use ctxalloc::strategy::{Arena, Budget, Guard, GuardOptions, Pool, SharedMemory, Strategy, System, Tracked};
use ctxalloc::{Buffer, Context, ContextAlloc, Scratch, handler, metrics, request};
use std::any::Any;
use std::env;
use std::ptr::NonNull;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a program does; what it has then.
type Deed = fn() -> Box<dyn Any>;

const DEEDS: &[(&str, Deed)] = &[
    ("nothing", || Box::new(vec![1, 2, 3])),
    ("requests inside", || many(|_| request().begin().unwrap())),
    ("names", || many(|number| request().name(format!("request {number}")).begin().unwrap())),
    ("ends", || many(|number| request().name(format!("request {number}")).begin().unwrap().end())),
    ("a measure of what is unseen", || Box::new(request().root().measure_unseen().begin().unwrap().end())),
    ("a strategy of its own", || Box::new(request().strategy(Pool::new()).begin().unwrap())),
    ("a charge", || Box::new(ctxalloc::charge_current(1000).unwrap())),
    ("budgets", || many(|number| Budget::new(&format!("budget {number}"), Some(1000)))),
    ("buffers", || many(|number| Buffer::zeroed(1 + number * 5000).unwrap())),
    ("buffers of every handler", || {
        many(|number| {
            let all = ctxalloc::handlers().filter(|handler| !["faulty", "hugepages"].contains(&&*handler.name()));
            all.map(|handler| Buffer::zeroed_in(handler, 1 + number * 500).unwrap()).collect::<Vec<_>>()
        })
    }),
    ("large buffers", || many(|number| Buffer::zeroed((1 + number) << 18).unwrap())),
    ("an allocator of containers", || Box::new(ContextAlloc::new())),
    ("scratch memory", || {
        let scratch = Scratch::new();
        (0..100).for_each(|number| drop(scratch.put([number; 100])));
        Box::new(scratch)
    }),
    ("pools", || many(|_| Pool::new())),
    ("arenas", || many(|_| Arena::over(&POOL))),
    ("blocks of a pool", || blocks_of(&POOL)),
    ("blocks of an arena", || blocks_of(&ARENA)),
    ("blocks of a tracked pool", || blocks_of(&TRACKED)),
    ("blocks of a guard", || blocks_of(&GUARD)),
    ("shared memory", || blocks_of(&SHARED)),
    ("a list of blocks", || Box::new(TRACKED.live_blocks())),
    ("handlers", || {
        static NAMES: AtomicUsize = AtomicUsize::new(0);
        many(|_| ctxalloc::register(&format!("own-{}", NAMES.fetch_add(1, Ordering::Relaxed)), System).unwrap())
    }),
    ("contexts", || many(|_| Context::copy_current())),
    ("selections", || {
        let [pool, aligned] = ["pool", "aligned64"].map(|name| handler(name).unwrap());
        Box::new(ctxalloc::scope(pool, || ctxalloc::scope(aligned, || Buffer::zeroed(10).unwrap())))
    }),
    ("metrics", || Box::new((metrics::snapshot().unwrap(), metrics::present(), metrics::budgets(), metrics::pools()))),
    ("trim", || Box::new(ctxalloc::trim())),
    ("the environment", || Box::new(ctxalloc::check_environment())),
    ("a handle", || Box::new(ctxalloc::current_request())),
];

fn many<T: 'static>(make: impl Fn(usize) -> T) -> Box<dyn Any> {
    Box::new((0..50).map(make).collect::<Vec<_>>())
}

// The program's, for all of its requests; used for the first time by the deed.
static POOL: LazyLock<Pool> = LazyLock::new(Pool::new);
static ARENA: LazyLock<Arena> = LazyLock::new(|| Arena::over(&POOL));
static TRACKED: LazyLock<Tracked<Pool>> = LazyLock::new(|| Tracked::new(Pool::new()).unwrap());
static GUARD: LazyLock<Guard> = LazyLock::new(|| Guard::new(GuardOptions::default()).unwrap());
static SHARED: LazyLock<SharedMemory> = LazyLock::new(|| SharedMemory::new().unwrap());

/// A block that a strategy was asked for directly.
struct Block(&'static dyn Strategy, NonNull<u8>);

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: a block of this strategy, and given up.
        unsafe { self.0.release(self.1) };
    }
}

fn blocks_of(strategy: &'static LazyLock<impl Strategy>) -> Box<dyn Any> {
    let strategy: &'static dyn Strategy = &**strategy;
    many(|number| Block(strategy, strategy.allocate(1 + number * 20_000).unwrap()))
}

#[test]
#[cfg(all(unix, not(miri)))]
fn what_ctxalloc_makes_for_itself_is_no_requests() {
    for (name, _) in DEEDS {
        crate::child::fate_in("books::child_that_does_something_first", &[("DEED", name)]).ended_well();
    }
}

#[test]
#[ignore = "a child of what_ctxalloc_makes_for_itself_is_no_requests"]
fn child_that_does_something_first() {
    let name = env::var("DEED").unwrap();
    let (_, deed) = DEEDS.iter().find(|(own, _)| *own == name).unwrap();
    LazyLock::force(&POOL);
    LazyLock::force(&ARENA);
    LazyLock::force(&TRACKED);
    LazyLock::force(&GUARD);
    LazyLock::force(&SHARED);
    let own = request().root().begin().unwrap();
    let gotten = own.run(deed);
    let of_another = Context::new().run(deed); // beside the first one's, wherever such things are kept
    own.run(|| drop(gotten));
    let heap = own.heap().unwrap();
    drop(of_another);
    assert_eq!((heap.live_blocks, heap.live_bytes), (0, 0), "after '{name}': {heap:?}");
    assert!(heap.total_blocks > 0, "it counts");
}
